/* Rotary position embedding (RoPE) with an optional RMS norm of each query and key head.
 *
 * Element i of a head's first half and element i of its second half form one rotated pair. Half the
 * head width is a multiple of LANES. Each head is computed independently of the others; weight
 * gradients are summed in NUM_PARTIALS fixed ranges of rows, regardless of the thread count.
 */
#include <string.h>

#include "kernels.h"
#include "lanes.h"

enum {
    MIN_PARALLEL_WORK = 1 << 15, /* below this, waking a second thread costs more */
    MAX_HEAD_DIM = 512
};

/* --- inference: in place, full-width tables, sin negated for the first half ------------------- */

void rotary_head(float *x, const norm_params *norm, const float *cos, const float *sin, long width)
{
    if (norm->scale)
        rms_norm_row(x, norm->scale, norm->eps_sum, width, x);
    long half = width / 2;
    for (long i = 0; i < half; i += LANES) {
        lanes first = load(x + i), second = load(x + half + i);
        store(x + i, first * load(cos + i) + second * load(sin + i));
        store(x + half + i, second * load(cos + half + i) + first * load(sin + half + i));
    }
}

/* Rotate the first `heads` heads of each row; `scales` is (heads, width), or null for no norm. */
void rotary_rows(float *x, long row_stride, long rows, long heads, long width, const float *scales,
                 float eps_sum, const float *cos, const float *sin, int threads)
{
#pragma omp parallel for num_threads(threads)                                                      \
    if (threads > 1 && rows * heads * width >= MIN_PARALLEL_WORK)
    for (long at = 0; at < rows * heads; at++) {
        long row = at / heads, head = at % heads;
        norm_params norm = {scales ? scales + head * width : 0, eps_sum};
        rotary_head(x + row * row_stride + head * width, &norm, cos + row * width,
                    sin + row * width, width);
    }
}

/* --- training: out of place, half-width tables ------------------------------------------------ */

static void rotary_head_forward(const float *x, const norm_params *norm, const float *cos,
                                const float *sin, long width, float *y)
{
    long half = width / 2;
    float inv_norm = norm->scale ? inverse_norm(x, norm->eps_sum, width) : 1.0f;
    for (long i = 0; i < half; i += LANES) {
        lanes first = load(x + i) * inv_norm, second = load(x + half + i) * inv_norm;
        if (norm->scale) {
            first *= load(norm->scale + i);
            second *= load(norm->scale + half + i);
        }
        store(y + i, first * load(cos + i) - second * load(sin + i));
        store(y + half + i, second * load(cos + i) + first * load(sin + i));
    }
}

static void rotary_head_backward(const float *x, const norm_params *norm, const float *cos,
                                 const float *sin, long width, const float *dy, float *dx,
                                 float *dscale)
{
    long half = width / 2;
    float dnormed[MAX_HEAD_DIM];
    float *to = norm->scale ? dnormed : dx;
    for (long i = 0; i < half; i += LANES) {
        lanes first = load(dy + i), second = load(dy + half + i);
        store(to + i, first * load(cos + i) + second * load(sin + i));
        store(to + half + i, second * load(cos + i) - first * load(sin + i));
    }
    if (norm->scale)
        rms_norm_row_backward(x, dnormed, 0, norm, width, dx, dscale);
}

/* Read q and k from rows of merged q, k and v; write them normed and rotated. */
void rotary_forward(const float *qkv, const float *q_scale, const float *k_scale, float eps_sum,
                    const float *cos, const float *sin, long rows, long query_heads, long kv_heads,
                    long width, float *q, float *k, int threads)
{
    norm_params q_norm = {q_scale, eps_sum}, k_norm = {k_scale, eps_sum};
    long stride = (query_heads + 2 * kv_heads) * width, half = width / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * stride >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        const float *from = qkv + row * stride;
        const float *c = cos + row * half, *s = sin + row * half;
        float *to_q = q + row * query_heads * width, *to_k = k + row * kv_heads * width;
        for (long head = 0; head < query_heads; head++, from += width, to_q += width)
            rotary_head_forward(from, &q_norm, c, s, width, to_q);
        for (long head = 0; head < kv_heads; head++, from += width, to_k += width)
            rotary_head_forward(from, &k_norm, c, s, width, to_k);
    }
}

/* dscales: (NUM_PARTIALS, 2, width), for the norms of queries and keys. */
void rotary_backward(const float *qkv, const float *q_scale, const float *k_scale, float eps_sum,
                     const float *cos, const float *sin, long rows, long query_heads, long kv_heads,
                     long width, const float *dq, const float *dk, const float *dv, float *dqkv,
                     float *dscales, int threads)
{
    norm_params q_norm = {q_scale, eps_sum}, k_norm = {k_scale, eps_sum};
    long stride = (query_heads + 2 * kv_heads) * width, half = width / 2;
    memset(dscales, 0, sizeof(float) * NUM_PARTIALS * 2 * width);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * stride >= MIN_PARALLEL_WORK)
    for (long part = 0; part < NUM_PARTIALS; part++)
        for (long row = rows * part / NUM_PARTIALS; row < rows * (part + 1) / NUM_PARTIALS; row++) {
            const float *from = qkv + row * stride;
            float *to = dqkv + row * stride, *dscale = dscales + part * 2 * width;
            const float *c = cos + row * half, *s = sin + row * half;
            for (long head = 0; head < query_heads; head++, from += width, to += width)
                rotary_head_backward(from, &q_norm, c, s, width,
                                     dq + (row * query_heads + head) * width, to, dscale);
            for (long head = 0; head < kv_heads; head++, from += width, to += width)
                rotary_head_backward(from, &k_norm, c, s, width,
                                     dk + (row * kv_heads + head) * width, to, dscale + width);
            memcpy(to, dv + row * kv_heads * width, sizeof(float) * kv_heads * width);
        }
}
