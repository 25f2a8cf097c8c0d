/* Matrix products with packed weights, and with their transposes.
 *
 * A panel is read sequentially while the sums of a few rows stay in registers. Inputs are processed
 * in chunks, so that a chunk of the panel and of the rows stays in the L1 cache. Every sum has a
 * fixed order, so a row's result does not depend on the other rows or on the number of threads.
 */
#include <stdlib.h>
#include <string.h>

#include "lanes.h"
#include "kernels.h"
#include "packed_weight.h"

enum {
    REGISTER_ROWS = 6, /* rows whose sums fit in registers */
    INPUT_CHUNK = 256, /* inputs per partial sum; also reduces rounding errors */
    GATHERED_STRIDE = INPUT_CHUNK + LANES, /* the offset avoids cache set conflicts of rows */
    TILE = 16 * REGISTER_ROWS,
    WIDE_TILE = 2 * TILE, /* rows that share a panel which is transposed for them */
    PREFETCH_BYTES = 2048,
    MIN_PARALLEL_WORK = 1 << 19 /* below this, waking a second thread costs more */
};

/* A chunk of inputs of some rows, and the same chunk of a panel. */
typedef struct {
    const float *x;
    long row_step;
    int is_gathered; /* rows are GATHERED_STRIDE apart instead of row_step */
    const void *panel;
    long dtype;
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

/* Callers pass constants where possible, which the compiler unrolls. */
ALWAYS_INLINE void accumulate_panel(const panel_tile *one, const int rows, const long row_step,
                                    const int dtype)
{
    lanes sum[REGISTER_ROWS][2];
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = (lanes){0};
    const float *x = one->x;
    const char *weight = one->panel;
    const long step = PANEL * dtype_bytes(dtype);
    for (long k = 0; k < one->inputs; k++, weight += step, x++) {
        __builtin_prefetch(weight + PREFETCH_BYTES);
        lanes column[2];
        widen_row(weight, dtype, column);
        IN_REGISTER(column[0]);
        IN_REGISTER(column[1]);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            sum[i][0] += x[i * row_step] * column[0];
            sum[i][1] += x[i * row_step] * column[1];
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

ALWAYS_INLINE void accumulate_panel_rows(const panel_tile *one, long rows, const int dtype)
{
    switch (rows) {
#define CASE(num)                                                                                  \
    case num:                                                                                      \
        if (one->is_gathered)                                                                      \
            accumulate_panel(one, num, GATHERED_STRIDE, dtype);                                    \
        else                                                                                       \
            accumulate_panel(one, num, one->row_step, dtype);                                      \
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

static void multiply_panel_tile(const panel_tile *one, long rows)
{
    if (one->dtype == FLOAT32)
        accumulate_panel_rows(one, rows, FLOAT32);
    else if (one->dtype == BFLOAT16)
        accumulate_panel_rows(one, rows, BFLOAT16);
    else
        accumulate_panel_rows(one, rows, FLOAT16);
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

static inline long min_long(long a, long b) { return a < b ? a : b; }

/* A product of some rows with a packed weight; `start` may be null. */
typedef struct {
    const float *x;
    long x_stride;
    const packed_weight *weight;
    const float *start;
    long start_stride;
    float *y;
    long y_stride;
    long rows;
} product;

/* Multiply a chunk of inputs of all rows by a panel; `gathered` may be null. */
static void multiply_chunk(const product *of, const float *gathered, long p, long from)
{
    long at = p * PANEL;
    float *to = of->y + at;
    panel_tile one = {
        .x = gathered ? gathered : of->x + from,
        .row_step = of->x_stride,
        .is_gathered = gathered != 0,
        .panel = panel_row(of->weight, p, from),
        .dtype = of->weight->dtype,
        .inputs = min_long(INPUT_CHUNK, of->weight->inputs - from),
        .start = from ? to : of->start ? of->start + at : 0,
        .start_stride = from ? of->y_stride : of->start_stride,
        .y = to,
        .y_stride = of->y_stride,
        .width = min_long(PANEL, of->weight->outputs - at),
    };
    multiply_row_tile(one, of->rows);
}

/* Multiply few rows panel by panel, which reads the weight in the order of its memory. */
static void multiply_few_rows(const product *of, float *gathered, range mine)
{
    long inputs = of->weight->inputs, size = of->rows * GATHERED_STRIDE;
    int is_gathered = of->rows > REGISTER_ROWS;
    for (long from = 0; is_gathered && from < inputs; from += INPUT_CHUNK)
        gather(of->x + from, of->x_stride, of->rows, min_long(INPUT_CHUNK, inputs - from),
               gathered + from / INPUT_CHUNK * size);
    for (long p = mine.first; p < mine.last; p++)
        for (long from = 0; from < inputs; from += INPUT_CHUNK)
            multiply_chunk(of, is_gathered ? gathered + from / INPUT_CHUNK * size : 0, p, from);
}

/* Multiply rows chunk by chunk, which keeps a chunk of the rows in the cache. */
static void multiply_many_rows(const product *of, float *gathered, range mine)
{
    long inputs = of->weight->inputs;
    for (long from = 0; from < inputs; from += INPUT_CHUNK) {
        gather(of->x + from, of->x_stride, of->rows, min_long(INPUT_CHUNK, inputs - from),
               gathered);
        for (long p = mine.first; p < mine.last; p++)
            multiply_chunk(of, gathered, p, from);
    }
}

/* packed_matmul for a range of panels, run by one thread. */
void packed_matmul_range(const float *x, long x_stride, const packed_weight *weight,
                         const float *start, long start_stride, float *y, long y_stride, long rows,
                         range mine)
{
    float gathered[TILE * GATHERED_STRIDE]; /* per thread: no synchronization */
    long chunks = group_size(weight->inputs, INPUT_CHUNK);
    for (long top = 0; top < rows && mine.first < mine.last; top += TILE) {
        product one = {
            .x = x + top * x_stride,
            .x_stride = x_stride,
            .weight = weight,
            .start = start ? start + top * start_stride : 0,
            .start_stride = start_stride,
            .y = y + top * y_stride,
            .y_stride = y_stride,
            .rows = min_long(TILE, rows - top),
        };
        if (one.rows <= REGISTER_ROWS || one.rows * chunks <= TILE)
            multiply_few_rows(&one, gathered, mine);
        else
            multiply_many_rows(&one, gathered, mine);
    }
}

/* y = start + x w for x (rows, inputs), w (inputs, outputs), y (rows, outputs). */
void packed_matmul(const float *x, long x_stride, const packed_weight *weight, const float *start,
                   long start_stride, float *y, long y_stride, long rows, int threads)
{
#pragma omp parallel num_threads(threads)                                                          \
    if (threads > 1 && rows * weight->inputs * weight->outputs >= MIN_PARALLEL_WORK)
    packed_matmul_range(x, x_stride, weight, start, start_stride, y, y_stride, rows,
                        thread_range(num_panels(weight->outputs)));
}

/* Write the inputs [at, at + PANEL) of some outputs to a panel of the transposed weight. */
static void transpose_panel(const packed_weight *weight, long at, long from, long chunk, float *to)
{
    for (long n = 0; n < chunk; n += PANEL, to += PANEL * PANEL) {
        long panel = (from + n) / PANEL;
        if (weight->dtype == FLOAT32)
            transpose_block(weight, FLOAT32, panel, at, to);
        else if (weight->dtype == BFLOAT16)
            transpose_block(weight, BFLOAT16, panel, at, to);
        else
            transpose_block(weight, FLOAT16, panel, at, to);
    }
}

/* packed_matmul_transposed for a range of panels of the transposed weight, run by one thread. */
static void matmul_transposed_range(const float *x, long x_stride, const packed_weight *weight,
                                    float *y, long y_stride, long rows, range mine)
{
    float gathered[WIDE_TILE * GATHERED_STRIDE], panel[INPUT_CHUNK * PANEL];
    for (long top = 0; top < rows; top += WIDE_TILE) {
        long tile = rows - top < WIDE_TILE ? rows - top : WIDE_TILE;
        for (long from = 0; from < weight->outputs; from += INPUT_CHUNK) {
            long left = weight->outputs - from, chunk = left < INPUT_CHUNK ? left : INPUT_CHUNK;
            if (mine.first < mine.last)
                gather(x + top * x_stride + from, x_stride, tile, chunk, gathered);
            for (long p = mine.first; p < mine.last; p++) {
                long at = p * PANEL, width = weight->inputs - at;
                float *to = y + top * y_stride + at;
                transpose_panel(weight, at, from, chunk, panel);
                panel_tile one = {
                    .x = gathered,
                    .is_gathered = 1,
                    .panel = panel,
                    .dtype = FLOAT32,
                    .inputs = chunk,
                    .start = from ? to : 0,
                    .start_stride = y_stride,
                    .y = to,
                    .y_stride = y_stride,
                    .width = width < PANEL ? width : PANEL,
                };
                multiply_row_tile(one, tile);
            }
        }
    }
}

/* y = x w^T for x (rows, outputs), w (inputs, outputs), y (rows, inputs). */
void packed_matmul_transposed(const float *x, long x_stride, const packed_weight *weight, float *y,
                              long y_stride, long rows, int threads)
{
#pragma omp parallel num_threads(threads)                                                          \
    if (threads > 1 && rows * weight->inputs * weight->outputs >= MIN_PARALLEL_WORK)
    matmul_transposed_range(x, x_stride, weight, y, y_stride, rows,
                            thread_range(num_panels(weight->inputs)));
}

ALWAYS_INLINE void copy_column(const packed_weight *weight, const int dtype, long column, float *to)
{
    for (long k = 0; k < weight->inputs; k++) {
        lanes row[2];
        widen_row(panel_row(weight, column / PANEL, k), dtype, row);
        to[k] = row[column % PANEL / LANES][column % LANES];
    }
}

/* Write columns of a weight to rows of y (num, inputs); returns 0 if one does not exist. */
int packed_columns(const packed_weight *weight, const long *columns, long num, float *y,
                   int threads)
{
    for (long i = 0; i < num; i++)
        if (columns[i] < 0 || columns[i] >= weight->outputs)
            return 0;
#pragma omp parallel for num_threads(threads) if (threads > 1 && num > 8)
    for (long i = 0; i < num; i++) {
        float *to = y + i * weight->inputs;
        if (weight->dtype == FLOAT32)
            copy_column(weight, FLOAT32, columns[i], to);
        else if (weight->dtype == BFLOAT16)
            copy_column(weight, BFLOAT16, columns[i], to);
        else
            copy_column(weight, FLOAT16, columns[i], to);
    }
    return 1;
}

/* Whether the kernels can widen numbers of a type. */
int supports_dtype(long dtype, int threads)
{
    (void)threads;
#if defined(__F16C__)
    return dtype == FLOAT32 || dtype == BFLOAT16 || dtype == FLOAT16;
#else
    return dtype == FLOAT32 || dtype == BFLOAT16;
#endif
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
    packed_weight weight = float32_weight(down, inputs, width);
    packed_matmul(x, x_stride, &weight, 0, 0, hidden, width, rows, threads);
    for (long i = 0; i < layers; i++) {
        weight = float32_weight(ups[i], rank, outputs[i]);
        packed_matmul(hidden + i * rank, width, &weight, y, y_stride, y, y_stride, rows, threads);
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
                    .dtype = FLOAT32,
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
