/* What files of kernels have of each other: how threads share work, and what they call. */
#ifndef TINKEX_SHARING_H
#define TINKEX_SHARING_H

#include <omp.h>

#include "lanes.h"

enum { PANEL = 2 * LANES /* columns of a weight that lie side by side */ };

/* Things from `first` up to `last`. */
typedef struct {
    long first;
    long last;
} part;

/* Which of some things this thread does. */
static inline part my_part(long num)
{
    long threads = omp_get_num_threads(), me = omp_get_thread_num();
    return (part){num * me / threads, num * (me + 1) / threads};
}

static inline long num_panels(long outputs) { return (outputs + PANEL - 1) / PANEL; }

/* What a query sees: keys and values of one head, token by token. */
typedef struct {
    const float *keys;
    const float *values;
    long num_tokens;
    long key_width;
    long value_width;
    float scale;
} sight;

/* products.c */
void multiply_some(const float *x, long x_stride, const float *panels, const float *start,
                   long start_stride, float *y, long y_stride, long rows, long inputs, long outputs,
                   part mine);

/* Never inlined, so that a number is made by the very same code wherever it is needed. */
#define THE_SAME __attribute__((noinline))

/* attention.c */
THE_SAME float look(const sight *seen, const float *query, float *out);

/* rows.c */
THE_SAME void norm_row(const float *x, const float *scale, float floor, long width, float *y);
THE_SAME void turn_head(float *x, const float *scale, float floor, const float *cos,
                        const float *sin, long width);
THE_SAME void gate_row(const float *both, long width, float *y);

#endif
