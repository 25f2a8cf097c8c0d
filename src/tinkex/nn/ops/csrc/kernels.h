/* What files of kernels have of each other: how threads share work, and what they call. */
#ifndef TINKEX_KERNELS_H
#define TINKEX_KERNELS_H

#include <omp.h>

#include "lanes.h"

enum { PANEL = 2 * LANES /* columns of a weight that lie side by side */ };

/* Things from `first` up to `last`. */
typedef struct {
    long first;
    long last;
} range;

/* Which of some things this thread does. */
static inline range thread_range(long num)
{
    long threads = omp_get_num_threads(), me = omp_get_thread_num();
    return (range){num * me / threads, num * (me + 1) / threads};
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
} kv_view;

/* products.c */
void packed_matmul_range(const float *x, long x_stride, const float *panels, const float *start,
                   long start_stride, float *y, long y_stride, long rows, long inputs, long outputs,
                   range mine);

/* Never inlined, so that a number is made by the very same code wherever it is needed. */
#define NOINLINE __attribute__((noinline))

/* attention.c */
NOINLINE float attend_one(const kv_view *view, const float *query, float *out);

/* rows.c */
NOINLINE void rms_norm_row(const float *x, const float *scale, float eps_sum, long width, float *y);
NOINLINE void rotary_head(float *x, const float *scale, float eps_sum, const float *cos,
                        const float *sin, long width);
NOINLINE void swiglu_row(const float *gate_up, long width, float *y);

#endif
