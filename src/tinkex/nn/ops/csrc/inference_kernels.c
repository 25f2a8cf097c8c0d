/* What is done to rows between products: norms, turning by position, gating.
 *
 * Widths are multiples of LANES. Each row or head is computed alone, and by the same code whoever
 * calls it, so that it comes out the same to the bit.
 */
#include <math.h>

#include "lanes.h"
#include "kernels.h"

enum {
    MIN_PARALLEL_WORK = 1 << 15 /* numbers that are done sooner than a second thread wakes up */
};

/* 1 / sqrt(|x|^2 + floor) */
static float inverse_norm(const float *x, float eps_sum, long width)
{
    lanes sums[2] = {{0}, {0}};
    for (long i = 0; i < width; i += LANES) {
        lanes some = load(x + i);
        sums[i / LANES % 2] += some * some;
    }
    return 1.0f / sqrtf(lane_sum(sums[0] + sums[1]) + eps_sum);
}

/* y = x / sqrt(|x|^2 + floor) * scale; y may be x. */
void rms_norm_row(const float *x, const float *scale, float eps_sum, long width, float *y)
{
    float inv_norm = inverse_norm(x, eps_sum, width);
    for (long i = 0; i < width; i += LANES)
        store(y + i, load(x + i) * inv_norm * load(scale + i));
}

/* Norm a head if there is a scale, then turn it: its halves are the parts of complex numbers. */
void rotary_head(float *x, const float *scale, float eps_sum, const float *cos, const float *sin,
               long width)
{
    if (scale)
        rms_norm_row(x, scale, eps_sum, width, x);
    long half = width / 2;
    for (long i = 0; i < half; i += LANES) {
        lanes first = load(x + i), second = load(x + half + i);
        store(x + i, first * load(cos + i) + second * load(sin + i));
        store(x + half + i, second * load(cos + half + i) + first * load(sin + half + i));
    }
}

/* y = silu(gate) * up, where gate and up lie one behind the other. */
void swiglu_row(const float *gate_up, long width, float *y)
{
    const int_lanes sign = (int_lanes){0} + (int)0x80000000;
    for (long i = 0; i < width; i += LANES) {
        lanes x = load(gate_up + i);
        /* e^-|x| is at most one, and both x / (1 + e^-x) and x e^x / (1 + e^x) are silu. */
        lanes small = lane_exp((lanes)((int_lanes)x | sign));
        int_lanes is_low = x < 0.0f;
        lanes top = (lanes)((is_low & (int_lanes)(x * small)) | (~is_low & (int_lanes)x));
        store(y + i, top / (1.0f + small) * load(gate_up + width + i));
    }
}

/* --- all rows of a pass ----------------------------------------------------------------------- */

void rms_norm_forward(const float *x, const float *scale, float eps_sum, long rows, long width, float *y,
               int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++)
        rms_norm_row(x + row * width, scale, eps_sum, width, y + row * width);
}

/* The first heads of each row, in place; `scales` has a head's own behind each other, or is null. */
void rotary_rows(float *x, long row_stride, long rows, long heads, long width, const float *scales,
               float eps_sum, const float *cos, const float *sin, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * heads * width >= MIN_PARALLEL_WORK)
    for (long at = 0; at < rows * heads; at++) {
        long row = at / heads, head = at % heads;
        rotary_head(x + row * row_stride + head * width, scales ? scales + head * width : 0, eps_sum,
                  cos + row * width, sin + row * width, width);
    }
}

void swiglu_rows(const float *gate_up, long rows, long width, float *y, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++)
        swiglu_row(gate_up + row * 2 * width, width, y + row * width);
}
