/* Cross-entropy and its gradient w.r.t. the logits in one pass; widths are multiples of LANES. */
#include <math.h>
#include <stdint.h>

#include "lanes.h"

enum { MIN_PARALLEL_WORK = 1 << 15 /* below this, waking a second thread costs more */ };

/* Replace each x by e^(x - max_value) and return the sum. */
static float exp_row(float *x, float max_value, long width)
{
    lanes even = {0}, odd = {0};
    long i = 0;
    for (; i + LANES < width; i += 2 * LANES) {
        lanes one = lane_exp(load(x + i) - max_value);
        lanes other = lane_exp(load(x + i + LANES) - max_value);
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

/* losses = -log softmax(logits)[target]; logits become weight * (softmax - one_hot(target)). */
void cross_entropy_forward_backward(float *logits, const int64_t *targets, const float *weights,
                                    long rows, long width, float *losses, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= MIN_PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        float *x = logits + row * width;
        float max_value = row_max(x, width), target_logit = x[targets[row]];
        float sum = exp_row(x, max_value, width);
        losses[row] = logf(sum) + max_value - target_logit;
        float scale = weights[row] / sum;
        for (long i = 0; i < width; i += LANES)
            store(x + i, load(x + i) * scale);
        x[targets[row]] -= weights[row];
    }
}
