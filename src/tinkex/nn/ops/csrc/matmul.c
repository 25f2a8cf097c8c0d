/* Matrix products with packed weights: panels of PANEL columns, stored input by input.
 *
 * A panel is read sequentially while the sums of a few rows stay in registers. Inputs are processed
 * in chunks, so that a chunk of the panel and of the rows stays in the L1 cache. Every sum has a
 * fixed order, so a row's result does not depend on the other rows or on the number of threads.
 */
#include <stdlib.h>
#include <string.h>

#include "lanes.h"
#include "kernels.h"

enum {
    REGISTER_ROWS = 6, /* rows whose sums fit in registers */
    INPUT_CHUNK = 256, /* inputs per partial sum; also reduces rounding errors */
    GATHERED_STRIDE = INPUT_CHUNK + LANES, /* the offset avoids cache set conflicts of rows */
    TILE = 16 * REGISTER_ROWS,
    PREFETCH_DISTANCE = 16 * PANEL,
    MIN_PARALLEL_WORK = 1 << 19 /* below this, waking a second thread costs more */
};

/* A chunk of inputs of some rows, and the same chunk of a panel. */
typedef struct {
    const float *x;
    long row_step;
    int is_gathered; /* rows are GATHERED_STRIDE apart instead of row_step */
    const float *panel;
    long inputs;
    const float *start; /* initial value of the sums, or null for zero */
    long start_stride;
    float *y;
    long y_stride;
    long width; /* valid columns of the panel */
} panel_tile;

static inline void load_totals(const panel_tile *one, int row, lanes total[2])
{
    float padded[PANEL] = {0};
    const float *from = padded;
    if (one->start) {
        from = one->start + row * one->start_stride;
        if (one->width < PANEL)
            from = memcpy(padded, from, one->width * sizeof(float));
    }
    total[0] = load(from);
    total[1] = load(from + LANES);
}

static inline void store_totals(const panel_tile *one, int row, const lanes total[2])
{
    float *to = one->y + row * one->y_stride;
    if (one->width == PANEL)
        memcpy(to, total, PANEL * sizeof(float));
    else
        memcpy(to, total, one->width * sizeof(float));
}

/* Callers pass constants for `rows` and, where possible, `row_step`, which the compiler unrolls. */
static inline __attribute__((always_inline)) void accumulate_panel(const panel_tile *one,
                                                                   const int rows,
                                                                   const long row_step)
{
    lanes sum[REGISTER_ROWS][2];
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = (lanes){0};
    const float *x = one->x, *weight = one->panel;
    for (long k = 0; k < one->inputs; k++, weight += PANEL, x++) {
        __builtin_prefetch(weight + PREFETCH_DISTANCE);
        lanes left = load(weight), right = load(weight + LANES);
        IN_REGISTER(left);
        IN_REGISTER(right);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            sum[i][0] += x[i * row_step] * left;
            sum[i][1] += x[i * row_step] * right;
        }
    }
    for (int i = 0; i < rows; i++) {
        lanes total[2];
        load_totals(one, i, total);
        total[0] += sum[i][0];
        total[1] += sum[i][1];
        store_totals(one, i, total);
    }
}

static void multiply_panel_tile(const panel_tile *one, long rows)
{
    switch (rows) {
#define CASE(num)                                                                                  \
    case num:                                                                                      \
        if (one->is_gathered)                                                                      \
            accumulate_panel(one, num, GATHERED_STRIDE);                                           \
        else                                                                                       \
            accumulate_panel(one, num, one->row_step);                                             \
        break;
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
        CASE(5)
        CASE(6)
#undef CASE
    }
}

/* Groups of nearly equal size: 4 + 3 rows are faster than 6 + 1. */
static inline long group_size(long rows, long groups) { return (rows + groups - 1) / groups; }

static inline long num_groups(long rows) { return group_size(rows, REGISTER_ROWS); }

/* Copy a chunk of rows to a buffer with a constant stride. */
static void gather(const float *x, long x_stride, long rows, long inputs, float *to)
{
    for (long i = 0; i < rows; i++)
        memcpy(to + i * GATHERED_STRIDE, x + i * x_stride, inputs * sizeof(float));
}

/* Multiply all rows of a tile by a chunk of a panel. */
static void multiply_row_tile(panel_tile one, long rows)
{
    for (long groups = num_groups(rows); groups > 0; groups--) {
        long mine = group_size(rows, groups);
        multiply_panel_tile(&one, mine);
        one.x += mine * (one.is_gathered ? GATHERED_STRIDE : one.row_step);
        one.y += mine * one.y_stride;
        if (one.start)
            one.start += mine * one.start_stride;
        rows -= mine;
    }
}

/* packed_matmul for a range of panels, run by one thread. */
void packed_matmul_range(const float *x, long x_stride, const float *panels, const float *start,
                         long start_stride, float *y, long y_stride, long rows, long inputs,
                         long outputs, range mine)
{
    float gathered[TILE * GATHERED_STRIDE]; /* per thread: no synchronization */
    for (long top = 0; top < rows; top += TILE) {
        long tile = rows - top < TILE ? rows - top : TILE;
        for (long from = 0; from < inputs; from += INPUT_CHUNK) {
            long chunk = inputs - from < INPUT_CHUNK ? inputs - from : INPUT_CHUNK;
            const float *some = x + top * x_stride + from;
            int is_gathered = tile > REGISTER_ROWS;
            if (is_gathered && mine.first < mine.last)
                gather(some, x_stride, tile, chunk, gathered);
            for (long p = mine.first; p < mine.last; p++) {
                long at = p * PANEL;
                float *to = y + top * y_stride + at;
                panel_tile one = {
                    .x = is_gathered ? gathered : some,
                    .row_step = x_stride,
                    .is_gathered = is_gathered,
                    .panel = panels + at * inputs + from * PANEL,
                    .inputs = chunk,
                    .start = from ? to : start ? start + top * start_stride + at : 0,
                    .start_stride = from ? y_stride : start_stride,
                    .y = to,
                    .y_stride = y_stride,
                    .width = outputs - at < PANEL ? outputs - at : PANEL,
                };
                multiply_row_tile(one, tile);
            }
        }
    }
}

/* y = start + x w for x (rows, inputs), w (inputs, outputs) in panels, y (rows, outputs). */
void packed_matmul(const float *x, long x_stride, const float *panels, const float *start,
                   long start_stride, float *y, long y_stride, long rows, long inputs, long outputs,
                   int threads)
{
#pragma omp parallel num_threads(threads)                                                          \
    if (threads > 1 && rows * inputs * outputs >= MIN_PARALLEL_WORK)
    packed_matmul_range(x, x_stride, panels, start, start_stride, y, y_stride, rows, inputs,
                        outputs, thread_range(num_panels(outputs)));
}

/* LoRA update y += x down up of several merged linear layers: each has its own `rank` columns of
 * down, its own up and its own columns of y. Returns 0 if memory cannot be allocated.
 */
int add_low_rank(const float *x, long x_stride, const float *down, long rank, long layers,
                 const float *const *ups, const long *outputs, float *y, long y_stride, long rows,
                 long inputs, int threads)
{
    long width = layers * rank;
    float *hidden = malloc(rows * width * sizeof(float));
    if (!hidden && rows)
        return 0;
    packed_matmul(x, x_stride, down, 0, 0, hidden, width, rows, inputs, width, threads);
    for (long i = 0; i < layers; i++) {
        packed_matmul(hidden + i * rank, width, ups[i], y, y_stride, y, y_stride, rows, rank,
                      outputs[i], threads);
        y += outputs[i];
    }
    free(hidden);
    return 1;
}

/* --- many small products ---------------------------------------------------------------------- */

/* c = scale a b, or c += scale a b, for a (rows, inputs), b (inputs, outputs), c (rows, outputs).
 * `a_row`, `a_input`, `b_input`, `b_output` and `c_row` are strides.
 */
typedef struct {
    const float *a;
    long a_row;
    long a_input;
    const float *b;
    long b_input;
    long b_output;
    float *c;
    long c_row;
    long rows;
    long inputs;
    long outputs;
    float scale;
    int accumulate;
} gemm_task;

static void gather_rows(const gemm_task *one, long top, long tile, long from, long inputs,
                        float *to)
{
    const float *a = one->a + top * one->a_row + from * one->a_input;
    if (one->a_input == 1)
        for (long i = 0; i < tile; i++)
            for (long k = 0; k < inputs; k++)
                to[i * GATHERED_STRIDE + k] = one->scale * a[i * one->a_row + k];
    else
        for (long k = 0; k < inputs; k++)
            for (long i = 0; i < tile; i++)
                to[i * GATHERED_STRIDE + k] = one->scale * a[i * one->a_row + k * one->a_input];
}

static void gather_panel(const gemm_task *one, long from, long inputs, long at, long width,
                         float *to)
{
    const float *b = one->b + from * one->b_input + at * one->b_output;
    if (width < PANEL)
        memset(to, 0, inputs * PANEL * sizeof(float));
    if (one->b_output == 1)
        for (long k = 0; k < inputs; k++)
            memcpy(to + k * PANEL, b + k * one->b_input, width * sizeof(float));
    else
        for (long j = 0; j < width; j++)
            for (long k = 0; k < inputs; k++)
                to[k * PANEL + j] = b[k * one->b_input + j * one->b_output];
}

static void run_gemm_task(const gemm_task *one)
{
    float rows[TILE * GATHERED_STRIDE], panel[INPUT_CHUNK * PANEL];
    for (long top = 0; top < one->rows; top += TILE) {
        long tile = one->rows - top < TILE ? one->rows - top : TILE;
        for (long from = 0; from < one->inputs; from += INPUT_CHUNK) {
            long chunk = one->inputs - from < INPUT_CHUNK ? one->inputs - from : INPUT_CHUNK;
            gather_rows(one, top, tile, from, chunk, rows);
            for (long at = 0; at < one->outputs; at += PANEL) {
                long width = one->outputs - at < PANEL ? one->outputs - at : PANEL;
                gather_panel(one, from, chunk, at, width, panel);
                float *to = one->c + top * one->c_row + at;
                panel_tile mine = {
                    .x = rows,
                    .is_gathered = 1,
                    .panel = panel,
                    .inputs = chunk,
                    .start = from || one->accumulate ? to : 0,
                    .start_stride = one->c_row,
                    .y = to,
                    .y_stride = one->c_row,
                    .width = width,
                };
                multiply_row_tile(mine, tile);
            }
        }
    }
}

/* One thread per product: small products run faster side by side than one after the other. */
void run_gemm_tasks(const gemm_task *tasks, long num, int threads)
{
    long work = 0;
    for (long i = 0; i < num; i++)
        work += tasks[i].rows * tasks[i].inputs * tasks[i].outputs;
#pragma omp parallel for schedule(dynamic) num_threads(threads)                                    \
    if (threads > 1 && work >= MIN_PARALLEL_WORK)
    for (long i = 0; i < num; i++)
        run_gemm_task(&tasks[i]);
}
