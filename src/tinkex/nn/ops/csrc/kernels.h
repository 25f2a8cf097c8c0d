/* Declarations shared between kernel files: work splitting, row kernels, panel layout. */
#ifndef TINKEX_KERNELS_H
#define TINKEX_KERNELS_H

#include <omp.h>

#include "lanes.h"

enum {
    PANEL = 2 * LANES, /* columns of a packed weight that are stored side by side */
    NUM_PARTIALS = 16  /* partial sums of weight gradients, regardless of the thread count */
};

/* Items from `first` up to, but not including, `last`. */
typedef struct {
    long first;
    long last;
} range;

/* The calling thread's share of `num` items. */
static inline range thread_range(long num)
{
    long threads = omp_get_num_threads(), me = omp_get_thread_num();
    return (range){num * me / threads, num * (me + 1) / threads};
}

static inline long num_panels(long columns) { return (columns + PANEL - 1) / PANEL; }

/* Types of the numbers of a packed weight; 16-bit ones are widened exactly where they are used. */
enum { FLOAT32, BFLOAT16, FLOAT16 };

/* A frozen weight in panels (packed_weight.h). */
typedef struct {
    const void *panels;
    long dtype;
    long inputs;
    long outputs;
} packed_weight;

static inline packed_weight float32_weight(const float *panels, long inputs, long outputs)
{
    return (packed_weight){panels, FLOAT32, inputs, outputs};
}

/* RMS norm with scale = weight * sqrt(width) and eps_sum = eps * width; a null scale means none. */
typedef struct {
    const float *scale;
    float eps_sum;
} norm_params;

/* Keys and values of one head, token by token. */
typedef struct {
    const float *keys;
    const float *values;
    long num_tokens;
    long key_width;
    long value_width;
    float scale;
} kv_view;

/* matmul.c */
void packed_matmul_range(const float *x, long x_stride, const packed_weight *weight,
                         const float *start, long start_stride, float *y, long y_stride, long rows,
                         range mine);

/* Not inlined, so that every caller executes the same instructions and gets the same bits. */
#define NOINLINE __attribute__((noinline))

/* attention_decode.c */
NOINLINE float attend_one(const kv_view *view, const float *query, float *out);

/* rms_norm.c */
NOINLINE float inverse_norm(const float *x, float eps_sum, long width);
NOINLINE void rms_norm_row(const float *x, const float *scale, float eps_sum, long width, float *y);
NOINLINE void rms_norm_row_backward(const float *x, const float *dy, const float *residual_grad,
                                    const norm_params *norm, long width, float *dx, float *dscale);

/* rotary.c */
NOINLINE void rotary_head(float *x, const norm_params *norm, const float *cos, const float *sin,
                          long width);

/* swiglu.c */
NOINLINE void swiglu_row(const float *gate_up, long width, float *y);

#endif
