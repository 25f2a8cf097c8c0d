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
    FEW = 1 << 15, /* numbers that are done sooner than a second thread wakes up */
    PARTS = 16,    /* ranges of rows that are summed on their own */
    WIDEST = 512   /* of a head */
};

typedef struct {
    const float *scale; /* the norm's weight times sqrt(width), or null if there is no norm */
    float floor;
} norm;

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
    return sum_of(even + odd);
}

static float shrink_of(const float *x, float floor, long width)
{
    return 1.0f / sqrtf(dot(x, x, width) + floor);
}

/* --- norms ------------------------------------------------------------------------------------ */

/* sum = x + delta, or x alone if there is no delta; y = sum / sqrt(|sum|^2 + floor) * scale */
void add_norm(const float *x, const float *delta, const float *scale, float floor, long rows,
              long width, float *sum, float *y, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= FEW)
    for (long row = 0; row < rows; row++) {
        const float *in = x + row * width;
        float *to = y + row * width;
        if (delta) {
            float *both = sum + row * width;
            for (long i = 0; i < width; i += LANES)
                store(both + i, load(in + i) + load(delta + row * width + i));
            in = both;
        }
        float shrink = shrink_of(in, floor, width);
        for (long i = 0; i < width; i += LANES)
            store(to + i, load(in + i) * shrink * load(scale + i));
    }
}

/* dx of a norm, plus `more` if there is any; what the scale gets is added to dscale. */
static void norm_back(const float *x, const float *dy, const float *more, const float *scale,
                      float floor, long width, float *dx, float *dscale)
{
    lanes squares = {0}, along = {0};
    for (long i = 0; i < width; i += LANES) {
        lanes in = load(x + i);
        squares += in * in;
        along += in * load(dy + i) * load(scale + i);
    }
    float shrink = 1.0f / sqrtf(sum_of(squares) + floor);
    float slope = sum_of(along) * shrink * shrink;
    for (long i = 0; i < width; i += LANES) {
        lanes in = load(x + i), out = load(dy + i);
        store(dscale + i, load(dscale + i) + out * in * shrink);
        lanes pulled = (out * load(scale + i) - in * slope) * shrink;
        store(dx + i, more ? pulled + load(more + i) : pulled);
    }
}

/* dscales has a row for each part. */
void add_norm_back(const float *x, const float *dy, const float *more, const float *scale,
                   float floor, long rows, long width, float *dx, float *dscales, int threads)
{
    memset(dscales, 0, sizeof(float) * PARTS * width);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= FEW)
    for (long part = 0; part < PARTS; part++)
        for (long row = rows * part / PARTS; row < rows * (part + 1) / PARTS; row++) {
            long at = row * width;
            norm_back(x + at, dy + at, more ? more + at : 0, scale, floor, width, dx + at,
                      dscales + part * width);
        }
}

/* --- turning by position ---------------------------------------------------------------------- */

static void turn_head(const float *x, const norm *how, const float *cos, const float *sin,
                      long width, float *y)
{
    long half = width / 2;
    float shrink = how->scale ? shrink_of(x, how->floor, width) : 1.0f;
    for (long i = 0; i < half; i += LANES) {
        lanes first = load(x + i) * shrink, second = load(x + half + i) * shrink;
        if (how->scale) {
            first *= load(how->scale + i);
            second *= load(how->scale + half + i);
        }
        store(y + i, first * load(cos + i) - second * load(sin + i));
        store(y + half + i, second * load(cos + i) + first * load(sin + i));
    }
}

static void turn_head_back(const float *x, const norm *how, const float *cos, const float *sin,
                           long width, const float *dy, float *dx, float *dscale)
{
    long half = width / 2;
    float back[WIDEST];
    float *to = how->scale ? back : dx;
    for (long i = 0; i < half; i += LANES) {
        lanes first = load(dy + i), second = load(dy + half + i);
        store(to + i, first * load(cos + i) + second * load(sin + i));
        store(to + half + i, second * load(cos + i) - first * load(sin + i));
    }
    if (how->scale)
        norm_back(x, back, 0, how->scale, how->floor, width, dx, dscale);
}

/* Queries and keys out of rows that hold queries, keys and values; angles are half a head wide. */
void turn(const float *all, const float *q_scale, const float *k_scale, float floor,
          const float *cos, const float *sin, long rows, long queries, long keys, long width,
          float *q, float *k, int threads)
{
    norm of_q = {q_scale, floor}, of_k = {k_scale, floor};
    long stride = (queries + 2 * keys) * width, half = width / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * stride >= FEW)
    for (long row = 0; row < rows; row++) {
        const float *from = all + row * stride;
        const float *c = cos + row * half, *s = sin + row * half;
        for (long head = 0; head < queries; head++)
            turn_head(from + head * width, &of_q, c, s, width, q + (row * queries + head) * width);
        from += queries * width;
        for (long head = 0; head < keys; head++)
            turn_head(from + head * width, &of_k, c, s, width, k + (row * keys + head) * width);
    }
}

/* dscales has, for each part, that of the queries' norm and that of the keys'. */
void turn_back(const float *all, const float *q_scale, const float *k_scale, float floor,
               const float *cos, const float *sin, long rows, long queries, long keys, long width,
               const float *dq, const float *dk, const float *dv, float *dall, float *dscales,
               int threads)
{
    norm of_q = {q_scale, floor}, of_k = {k_scale, floor};
    long stride = (queries + 2 * keys) * width, half = width / 2;
    memset(dscales, 0, sizeof(float) * PARTS * 2 * width);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * stride >= FEW)
    for (long part = 0; part < PARTS; part++)
        for (long row = rows * part / PARTS; row < rows * (part + 1) / PARTS; row++) {
            const float *from = all + row * stride;
            float *to = dall + row * stride, *dscale = dscales + part * 2 * width;
            const float *c = cos + row * half, *s = sin + row * half;
            for (long head = 0; head < queries; head++, from += width, to += width)
                turn_head_back(from, &of_q, c, s, width, dq + (row * queries + head) * width, to,
                               dscale);
            for (long head = 0; head < keys; head++, from += width, to += width)
                turn_head_back(from, &of_k, c, s, width, dk + (row * keys + head) * width, to,
                               dscale + width);
            memcpy(to, dv + row * keys * width, sizeof(float) * keys * width);
        }
}

/* --- gating ----------------------------------------------------------------------------------- */

/* 1 / (1 + e^-x), of e^-|x|, which is at most one */
static inline lanes sigmoid_of(lanes x)
{
    const whole_lanes sign = (whole_lanes){0} + (int)0x80000000;
    const lanes one = (lanes){0} + 1.0f;
    lanes small = exp_of((lanes)((whole_lanes)x | sign));
    whole_lanes is_low = x < 0.0f;
    lanes top = (lanes)((is_low & (whole_lanes)small) | (~is_low & (whole_lanes)one));
    return top / (one + small);
}

/* y = silu(gate) * up, where gate and up lie one behind the other. */
void gate(const float *both, long rows, long width, float *y, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= FEW)
    for (long row = 0; row < rows; row++) {
        const float *x = both + row * 2 * width;
        for (long i = 0; i < width; i += LANES) {
            lanes in = load(x + i);
            store(y + row * width + i, in * sigmoid_of(in) * load(x + width + i));
        }
    }
}

void gate_back(const float *both, const float *dy, long rows, long width, float *dboth, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= FEW)
    for (long row = 0; row < rows; row++) {
        const float *x = both + row * 2 * width;
        float *dx = dboth + row * 2 * width;
        for (long i = 0; i < width; i += LANES) {
            lanes in = load(x + i), out = load(dy + row * width + i);
            lanes share = sigmoid_of(in), passed = in * share;
            store(dx + i, out * load(x + width + i) * (share + passed * (1.0f - share)));
            store(dx + width + i, out * passed);
        }
    }
}

/* --- losses ----------------------------------------------------------------------------------- */

static float largest_of(const float *x, long width)
{
    lanes most = load(x);
    for (long i = LANES; i < width; i += LANES) {
        lanes some = load(x + i);
        whole_lanes is_more = some > most;
        most = (lanes)((is_more & (whole_lanes)some) | (~is_more & (whole_lanes)most));
    }
    float found = most[0];
    for (int lane = 1; lane < LANES; lane++)
        found = most[lane] > found ? most[lane] : found;
    return found;
}

/* Makes e^(x - most) of all numbers, and returns their sum. */
static float exps_of(float *x, float most, long width)
{
    lanes even = {0}, odd = {0};
    long i = 0;
    for (; i + LANES < width; i += 2 * LANES) {
        lanes one = exp_of(load(x + i) - most), other = exp_of(load(x + i + LANES) - most);
        even += one;
        odd += other;
        store(x + i, one);
        store(x + i + LANES, other);
    }
    if (i < width) {
        lanes one = exp_of(load(x + i) - most);
        even += one;
        store(x + i, one);
    }
    return sum_of(even + odd);
}

/* losses = -log softmax(logits)[target]; logits become weight * (softmax - one at the target). */
void nll(float *logits, const int64_t *targets, const float *weights, long rows, long width,
         float *losses, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= FEW)
    for (long row = 0; row < rows; row++) {
        float *x = logits + row * width;
        float most = largest_of(x, width), wanted = x[targets[row]];
        float sum = exps_of(x, most, width);
        losses[row] = logf(sum) + most - wanted;
        float share = weights[row] / sum;
        for (long i = 0; i < width; i += LANES)
            store(x + i, load(x + i) * share);
        x[targets[row]] -= weights[row];
    }
}
