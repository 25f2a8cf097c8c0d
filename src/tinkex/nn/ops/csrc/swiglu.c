/* SwiGLU: y = silu(gate) * up, where each row holds gate followed by up.
 *
 * Widths are multiples of LANES. Inference computes silu as a quotient, training as x * sigmoid(x),
 * whose sigmoid the backward pass needs too; the two differ in the last bit.
 */
#include "kernels.h"
#include "lanes.h"

enum { MIN_PARALLEL_WORK = 1 << 15 /* below this, waking a second thread costs more */ };

void swiglu_row(const float *gate_up, long width, float *y)
{
    for (long i = 0; i < width; i += LANES) {
        lanes x = load(gate_up + i);
        /* silu(x) is x / (1 + e^-x) = x e^x / (1 + e^x): use whichever exponent is negative. */
        lanes small = lane_exp_neg_abs(x);
        lanes numerator = lane_select(x < 0.0f, x * small, x);
        store(y + i, numerator / (1.0f + small) * load(gate_up + width + i));
    }
}

void swiglu_rows(const float *gate_up, long rows, long width, float *y, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++)
        swiglu_row(gate_up + row * 2 * width, width, y + row * width);
}

static inline lanes lane_sigmoid(lanes x)
{
    const lanes one = (lanes){0} + 1.0f;
    lanes small = lane_exp_neg_abs(x);
    return lane_select(x < 0.0f, small, one) / (one + small);
}

void swiglu_forward(const float *gate_up, long rows, long width, float *y, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        const float *x = gate_up + row * 2 * width;
        for (long i = 0; i < width; i += LANES) {
            lanes gate = load(x + i);
            store(y + row * width + i, gate * lane_sigmoid(gate) * load(x + width + i));
        }
    }
}

void swiglu_backward(const float *gate_up, const float *dy, long rows, long width, float *dgate_up,
                     int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        const float *x = gate_up + row * 2 * width;
        float *dx = dgate_up + row * 2 * width;
        for (long i = 0; i < width; i += LANES) {
            lanes gate = load(x + i), out = load(dy + row * width + i);
            lanes sigmoid = lane_sigmoid(gate), silu = gate * sigmoid;
            store(dx + i, out * load(x + width + i) * (sigmoid + silu * (1.0f - sigmoid)));
            store(dx + width + i, out * silu);
        }
    }
}
