/* What is done to rows between products: norms, turning by position, gating.
 *
 * Widths are multiples of LANES. Each row or head is computed alone, and by the same code whoever
 * calls it, so that it comes out the same to the bit.
 */
#include <math.h>

#include "lanes.h"
#include "sharing.h"

enum {
    FEW = 1 << 15 /* numbers that are done sooner than a second thread wakes up */
};

/* 1 / sqrt(|x|^2 + floor) */
static float shrink_of(const float *x, float floor, long width)
{
    lanes sums[2] = {{0}, {0}};
    for (long i = 0; i < width; i += LANES) {
        lanes some = load(x + i);
        sums[i / LANES % 2] += some * some;
    }
    return 1.0f / sqrtf(sum_of(sums[0] + sums[1]) + floor);
}

/* y = x / sqrt(|x|^2 + floor) * scale; y may be x. */
void norm_row(const float *x, const float *scale, float floor, long width, float *y)
{
    float shrink = shrink_of(x, floor, width);
    for (long i = 0; i < width; i += LANES)
        store(y + i, load(x + i) * shrink * load(scale + i));
}

/* Norm a head if there is a scale, then turn it: its halves are the parts of complex numbers. */
void turn_head(float *x, const float *scale, float floor, const float *cos, const float *sin,
               long width)
{
    if (scale)
        norm_row(x, scale, floor, width, x);
    long half = width / 2;
    for (long i = 0; i < half; i += LANES) {
        lanes first = load(x + i), second = load(x + half + i);
        store(x + i, first * load(cos + i) + second * load(sin + i));
        store(x + half + i, second * load(cos + half + i) + first * load(sin + half + i));
    }
}

/* y = silu(gate) * up, where gate and up lie one behind the other. */
void gate_row(const float *both, long width, float *y)
{
    const whole_lanes sign = (whole_lanes){0} + (int)0x80000000;
    for (long i = 0; i < width; i += LANES) {
        lanes x = load(both + i);
        /* e^-|x| is at most one, and both x / (1 + e^-x) and x e^x / (1 + e^x) are silu. */
        lanes small = exp_of((lanes)((whole_lanes)x | sign));
        whole_lanes is_low = x < 0.0f;
        lanes top = (lanes)((is_low & (whole_lanes)(x * small)) | (~is_low & (whole_lanes)x));
        store(y + i, top / (1.0f + small) * load(both + width + i));
    }
}

/* --- all rows of a pass ----------------------------------------------------------------------- */

void norm_rows(const float *x, const float *scale, float floor, long rows, long width, float *y,
               int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= FEW)
    for (long row = 0; row < rows; row++)
        norm_row(x + row * width, scale, floor, width, y + row * width);
}

/* The first heads of each row, in place; `scales` has a head's own behind each other, or is null. */
void turn_rows(float *x, long row_stride, long rows, long heads, long width, const float *scales,
               float floor, const float *cos, const float *sin, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * heads * width >= FEW)
    for (long at = 0; at < rows * heads; at++) {
        long row = at / heads, head = at % heads;
        turn_head(x + row * row_stride + head * width, scales ? scales + head * width : 0, floor,
                  cos + row * width, sin + row * width, width);
    }
}

void gate_rows(const float *both, long rows, long width, float *y, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= FEW)
    for (long row = 0; row < rows; row++)
        gate_row(both + row * 2 * width, width, y + row * width);
}
