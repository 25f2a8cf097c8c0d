/* RMS norm: y = x / sqrt(|x|^2 + eps_sum) * scale.
 *
 * Widths are multiples of LANES. Each row is computed independently of the others. Weight gradients
 * are summed in NUM_PARTIALS fixed ranges of rows, so results do not depend on the thread count.
 */
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "lanes.h"

enum { MIN_PARALLEL_WORK = 1 << 15 /* below this, waking a second thread costs more */ };

/* 1 / sqrt(|x|^2 + eps_sum) */
float inverse_norm(const float *x, float eps_sum, long width)
{
    lanes even = {0}, odd = {0};
    long i = 0;
    for (; i + LANES < width; i += 2 * LANES) {
        lanes one = load(x + i), other = load(x + i + LANES);
        even += one * one;
        odd += other * other;
    }
    if (i < width) {
        lanes one = load(x + i);
        even += one * one;
    }
    return 1.0f / sqrtf(lane_sum(even + odd) + eps_sum);
}

/* y may be x. */
void rms_norm_row(const float *x, const float *scale, float eps_sum, long width, float *y)
{
    float inv_norm = inverse_norm(x, eps_sum, width);
    for (long i = 0; i < width; i += LANES)
        store(y + i, load(x + i) * inv_norm * load(scale + i));
}

/* sum = x + delta and y = norm(sum); without a delta (null), y = norm(x) and sum is not written. */
void add_rms_norm_forward(const float *x, const float *delta, const float *scale, float eps_sum,
                          long rows, long width, float *sum, float *y, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        const float *in = x + row * width;
        if (delta) {
            float *total = sum + row * width;
            for (long i = 0; i < width; i += LANES)
                store(total + i, load(in + i) + load(delta + row * width + i));
            in = total;
        }
        rms_norm_row(in, scale, eps_sum, width, y + row * width);
    }
}

/* dx, plus `residual_grad` if it is not null; the scale's gradient is added to dscale. */
void rms_norm_row_backward(const float *x, const float *dy, const float *residual_grad,
                           const norm_params *norm, long width, float *dx, float *dscale)
{
    const float *scale = norm->scale;
    lanes squares = {0}, projection = {0};
    for (long i = 0; i < width; i += LANES) {
        lanes in = load(x + i);
        squares += in * in;
        projection += in * load(dy + i) * load(scale + i);
    }
    float inv_norm = 1.0f / sqrtf(lane_sum(squares) + norm->eps_sum);
    float projection_scale = lane_sum(projection) * inv_norm * inv_norm;
    for (long i = 0; i < width; i += LANES) {
        lanes in = load(x + i), out = load(dy + i);
        store(dscale + i, load(dscale + i) + out * in * inv_norm);
        lanes grad = (out * load(scale + i) - in * projection_scale) * inv_norm;
        store(dx + i, residual_grad ? grad + load(residual_grad + i) : grad);
    }
}

/* dscales: (NUM_PARTIALS, width). */
void add_rms_norm_backward(const float *x, const float *dy, const float *residual_grad,
                           const float *scale, float eps_sum, long rows, long width, float *dx,
                           float *dscales, int threads)
{
    norm_params norm = {scale, eps_sum};
    memset(dscales, 0, sizeof(float) * NUM_PARTIALS * width);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long part = 0; part < NUM_PARTIALS; part++)
        for (long row = rows * part / NUM_PARTIALS; row < rows * (part + 1) / NUM_PARTIALS; row++) {
            long at = row * width;
            rms_norm_row_backward(x + at, dy + at, residual_grad ? residual_grad + at : 0, &norm,
                                  width, dx + at, dscales + part * width);
        }
}
