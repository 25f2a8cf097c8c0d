/* What training does to rows between products, forth and back: norms, turning, gating, losses.
 *
 * Widths are multiples of LANES. Sums over rows are made by parts that do not depend on how many
 * threads there are, so that they come out the same to the bit.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "lanes.h"

enum {
    MIN_PARALLEL_WORK = 1 << 15, /* numbers that are done sooner than a second thread wakes up */
    NUM_PARTIALS = 16,    /* ranges of rows that are summed on their own */
    MAX_HEAD_DIM = 512   /* of a head */
};

typedef struct {
    const float *scale; /* the norm's weight times sqrt(width), or null if there is no norm */
    float eps_sum;
} norm_params;

static float dot(const float *x, const float *y, long width)
{
    lanes even = {0}, odd = {0};
    long i = 0;
    for (; i + LANES < width; i += 2 * LANES) {
        even += load(x + i) * load(y + i);
        odd += load(x + i + LANES) * load(y + i + LANES);
    }
    if (i < width)
        even += load(x + i) * load(y + i);
    return lane_sum(even + odd);
}

static float inverse_norm(const float *x, float eps_sum, long width)
{
    return 1.0f / sqrtf(dot(x, x, width) + eps_sum);
}

/* --- norms ------------------------------------------------------------------------------------ */

/* sum = x + delta, or x alone if there is no delta; y = sum / sqrt(|sum|^2 + floor) * scale */
void add_rms_norm_forward(const float *x, const float *delta, const float *scale, float eps_sum, long rows,
              long width, float *sum, float *y, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        const float *in = x + row * width;
        float *to = y + row * width;
        if (delta) {
            float *both = sum + row * width;
            for (long i = 0; i < width; i += LANES)
                store(both + i, load(in + i) + load(delta + row * width + i));
            in = both;
        }
        float inv_norm = inverse_norm(in, eps_sum, width);
        for (long i = 0; i < width; i += LANES)
            store(to + i, load(in + i) * inv_norm * load(scale + i));
    }
}

/* dx of a norm, plus `more` if there is any; what the scale gets is added to dscale. */
static void rms_norm_row_backward(const float *x, const float *dy, const float *more, const float *scale,
                      float eps_sum, long width, float *dx, float *dscale)
{
    lanes squares = {0}, projection = {0};
    for (long i = 0; i < width; i += LANES) {
        lanes in = load(x + i);
        squares += in * in;
        projection += in * load(dy + i) * load(scale + i);
    }
    float inv_norm = 1.0f / sqrtf(lane_sum(squares) + eps_sum);
    float projection_scale = lane_sum(projection) * inv_norm * inv_norm;
    for (long i = 0; i < width; i += LANES) {
        lanes in = load(x + i), out = load(dy + i);
        store(dscale + i, load(dscale + i) + out * in * inv_norm);
        lanes grad = (out * load(scale + i) - in * projection_scale) * inv_norm;
        store(dx + i, more ? grad + load(more + i) : grad);
    }
}

/* dscales has a row for each part. */
void add_rms_norm_backward(const float *x, const float *dy, const float *more, const float *scale,
                   float eps_sum, long rows, long width, float *dx, float *dscales, int threads)
{
    memset(dscales, 0, sizeof(float) * NUM_PARTIALS * width);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long part = 0; part < NUM_PARTIALS; part++)
        for (long row = rows * part / NUM_PARTIALS; row < rows * (part + 1) / NUM_PARTIALS; row++) {
            long at = row * width;
            rms_norm_row_backward(x + at, dy + at, more ? more + at : 0, scale, eps_sum, width, dx + at,
                      dscales + part * width);
        }
}

/* --- turning by position ---------------------------------------------------------------------- */

static void rotary_head_forward(const float *x, const norm_params *how, const float *cos, const float *sin,
                      long width, float *y)
{
    long half = width / 2;
    float inv_norm = how->scale ? inverse_norm(x, how->eps_sum, width) : 1.0f;
    for (long i = 0; i < half; i += LANES) {
        lanes first = load(x + i) * inv_norm, second = load(x + half + i) * inv_norm;
        if (how->scale) {
            first *= load(how->scale + i);
            second *= load(how->scale + half + i);
        }
        store(y + i, first * load(cos + i) - second * load(sin + i));
        store(y + half + i, second * load(cos + i) + first * load(sin + i));
    }
}

static void rotary_head_backward(const float *x, const norm_params *how, const float *cos, const float *sin,
                           long width, const float *dy, float *dx, float *dscale)
{
    long half = width / 2;
    float back[MAX_HEAD_DIM];
    float *to = how->scale ? back : dx;
    for (long i = 0; i < half; i += LANES) {
        lanes first = load(dy + i), second = load(dy + half + i);
        store(to + i, first * load(cos + i) + second * load(sin + i));
        store(to + half + i, second * load(cos + i) - first * load(sin + i));
    }
    if (how->scale)
        rms_norm_row_backward(x, back, 0, how->scale, how->eps_sum, width, dx, dscale);
}

/* Queries and keys out of rows that hold queries, keys and values; angles are half a head wide. */
void rotary_forward(const float *all, const float *q_scale, const float *k_scale, float eps_sum,
          const float *cos, const float *sin, long rows, long queries, long keys, long width,
          float *q, float *k, int threads)
{
    norm_params of_q = {q_scale, eps_sum}, of_k = {k_scale, eps_sum};
    long stride = (queries + 2 * keys) * width, half = width / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * stride >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        const float *from = all + row * stride;
        const float *c = cos + row * half, *s = sin + row * half;
        for (long head = 0; head < queries; head++)
            rotary_head_forward(from + head * width, &of_q, c, s, width, q + (row * queries + head) * width);
        from += queries * width;
        for (long head = 0; head < keys; head++)
            rotary_head_forward(from + head * width, &of_k, c, s, width, k + (row * keys + head) * width);
    }
}

/* dscales has, for each part, that of the queries' norm and that of the keys'. */
void rotary_backward(const float *all, const float *q_scale, const float *k_scale, float eps_sum,
               const float *cos, const float *sin, long rows, long queries, long keys, long width,
               const float *dq, const float *dk, const float *dv, float *dall, float *dscales,
               int threads)
{
    norm_params of_q = {q_scale, eps_sum}, of_k = {k_scale, eps_sum};
    long stride = (queries + 2 * keys) * width, half = width / 2;
    memset(dscales, 0, sizeof(float) * NUM_PARTIALS * 2 * width);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * stride >= MIN_PARALLEL_WORK)
    for (long part = 0; part < NUM_PARTIALS; part++)
        for (long row = rows * part / NUM_PARTIALS; row < rows * (part + 1) / NUM_PARTIALS; row++) {
            const float *from = all + row * stride;
            float *to = dall + row * stride, *dscale = dscales + part * 2 * width;
            const float *c = cos + row * half, *s = sin + row * half;
            for (long head = 0; head < queries; head++, from += width, to += width)
                rotary_head_backward(from, &of_q, c, s, width, dq + (row * queries + head) * width, to,
                               dscale);
            for (long head = 0; head < keys; head++, from += width, to += width)
                rotary_head_backward(from, &of_k, c, s, width, dk + (row * keys + head) * width, to,
                               dscale + width);
            memcpy(to, dv + row * keys * width, sizeof(float) * keys * width);
        }
}

/* --- gating ----------------------------------------------------------------------------------- */

/* 1 / (1 + e^-x), of e^-|x|, which is at most one */
static inline lanes lane_sigmoid(lanes x)
{
    const int_lanes sign = (int_lanes){0} + (int)0x80000000;
    const lanes one = (lanes){0} + 1.0f;
    lanes small = lane_exp((lanes)((int_lanes)x | sign));
    int_lanes is_low = x < 0.0f;
    lanes top = (lanes)((is_low & (int_lanes)small) | (~is_low & (int_lanes)one));
    return top / (one + small);
}

/* y = silu(gate) * up, where gate and up lie one behind the other. */
void swiglu_forward(const float *both, long rows, long width, float *y, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        const float *x = both + row * 2 * width;
        for (long i = 0; i < width; i += LANES) {
            lanes in = load(x + i);
            store(y + row * width + i, in * lane_sigmoid(in) * load(x + width + i));
        }
    }
}

void swiglu_backward(const float *both, const float *dy, long rows, long width, float *dgate_up, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        const float *x = both + row * 2 * width;
        float *dx = dgate_up + row * 2 * width;
        for (long i = 0; i < width; i += LANES) {
            lanes in = load(x + i), out = load(dy + row * width + i);
            lanes share = lane_sigmoid(in), passed = in * share;
            store(dx + i, out * load(x + width + i) * (share + passed * (1.0f - share)));
            store(dx + width + i, out * passed);
        }
    }
}

/* --- losses ----------------------------------------------------------------------------------- */

static float row_max(const float *x, long width)
{
    lanes max_value = load(x);
    for (long i = LANES; i < width; i += LANES) {
        lanes some = load(x + i);
        int_lanes is_more = some > max_value;
        max_value = (lanes)((is_more & (int_lanes)some) | (~is_more & (int_lanes)max_value));
    }
    float found = max_value[0];
    for (int lane = 1; lane < LANES; lane++)
        found = max_value[lane] > found ? max_value[lane] : found;
    return found;
}

/* Makes e^(x - most) of all numbers, and returns their sum. */
static float exp_row(float *x, float max_value, long width)
{
    lanes even = {0}, odd = {0};
    long i = 0;
    for (; i + LANES < width; i += 2 * LANES) {
        lanes one = lane_exp(load(x + i) - max_value), other = lane_exp(load(x + i + LANES) - max_value);
        even += one;
        odd += other;
        store(x + i, one);
        store(x + i + LANES, other);
    }
    if (i < width) {
        lanes one = lane_exp(load(x + i) - max_value);
        even += one;
        store(x + i, one);
    }
    return lane_sum(even + odd);
}

/* losses = -log softmax(logits)[target]; logits become weight * (softmax - one at the target). */
void cross_entropy_forward_backward(float *logits, const int64_t *targets, const float *weights, long rows, long width,
         float *losses, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        float *x = logits + row * width;
        float max_value = row_max(x, width), target_logit = x[targets[row]];
        float sum = exp_row(x, max_value, width);
        losses[row] = logf(sum) + max_value - target_logit;
        float share = weights[row] / sum;
        for (long i = 0; i < width; i += LANES)
            store(x + i, load(x + i) * share);
        x[targets[row]] -= weights[row];
    }
}
