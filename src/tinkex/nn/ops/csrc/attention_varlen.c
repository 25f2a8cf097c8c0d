/* Causal attention over documents packed end to end, forward and backward.
 *
 * One thread processes a document and a key head with all its query heads, so no two threads add to
 * the same gradient and results do not depend on the thread count. Queries are processed in blocks
 * whose scores stay in the caches; positions after a block are skipped. The right operand of each
 * product is packed in panels of PANEL columns.
 */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "kernels.h"
#include "lanes.h"

enum {
    REGISTER_ROWS = 6,        /* rows whose sums fit in registers */
    BLOCK = 8 * REGISTER_ROWS /* queries that are scored together */
};

/* A matrix with row stride `row` and column stride `step`. */
typedef struct {
    const float *from;
    long row;
    long step;
} strided_matrix;

static long min_long(long x, long y) { return x < y ? x : y; }

/* --- products --------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) void accumulate_tile(const float *a, long row,
                                                                  long step, const float *panel,
                                                                  long depth, float *c, long c_row,
                                                                  const int rows,
                                                                  const int accumulate)
{
    lanes sum[REGISTER_ROWS][2];
    for (int i = 0; i < rows; i++) {
        sum[i][0] = accumulate ? load(c + i * c_row) : (lanes){0};
        sum[i][1] = accumulate ? load(c + i * c_row + LANES) : (lanes){0};
    }
    for (long k = 0; k < depth; k++, panel += PANEL, a += step) {
        lanes left = load(panel), right = load(panel + LANES);
        IN_REGISTER(left);
        IN_REGISTER(right);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            sum[i][0] += a[i * row] * left;
            sum[i][1] += a[i * row] * right;
        }
    }
    for (int i = 0; i < rows; i++) {
        store(c + i * c_row, sum[i][0]);
        store(c + i * c_row + LANES, sum[i][1]);
    }
}

#define TILE_CASE(number)                                                                          \
    case number:                                                                                   \
        if (accumulate)                                                                            \
            accumulate_tile(a.from, a.row, a.step, panel, depth, to, c_row, number, 1);            \
        else                                                                                       \
            accumulate_tile(a.from, a.row, a.step, panel, depth, to, c_row, number, 0);            \
        break;

/* c = a b, or c += a b, for up to REGISTER_ROWS rows; panels of b are `panel_step` apart. */
static void tile_matmul(strided_matrix a, const float *b, long panel_step, long depth, float *c,
                        long c_row, long rows, long panels, int accumulate)
{
    for (long at = 0; at < panels; at++) {
        const float *panel = b + at * panel_step;
        float *to = c + at * PANEL;
        switch (rows) {
            TILE_CASE(6) TILE_CASE(5) TILE_CASE(4) TILE_CASE(3) TILE_CASE(2) TILE_CASE(1)
        }
    }
}

/* Pack x: panels of PANEL columns, row by row. */
static void pack(const float *x, long row, long rows, long width, float *to)
{
    for (long column = 0; column < width; column += PANEL)
        for (long i = 0; i < rows; i++, to += PANEL)
            memcpy(to, x + i * row + column, PANEL * sizeof(float));
}

/* Pack the transpose of x; the last panel is padded with zeros. */
static void pack_transposed(const float *x, long row, long rows, long width, float *to)
{
    for (long first = 0; first < rows; first += PANEL, to += PANEL * width) {
        long num = min_long(rows - first, PANEL);
        if (num < PANEL)
            memset(to, 0, PANEL * width * sizeof(float));
        for (long i = 0; i < num; i++)
            for (long column = 0; column < width; column++)
                to[column * PANEL + i] = x[(first + i) * row + column];
    }
}

/* --- arguments and working memory ------------------------------------------------------------- */

/* Arguments of a call: (tokens, heads, width) of all documents, with row strides. */
typedef struct {
    const float *q, *k, *v;
    long q_row, k_row, v_row;
    const long *starts; /* first token of each document, then the number of tokens */
    long documents, queries, keys, width;
    float scale;
} attention_args;

/* One document and key head, and the working memory of a thread. */
typedef struct {
    long first, length, head;
    long score_stride; /* between rows of scores */
    float *keys_transposed, *values_transposed, *keys, *values;
    float *scores, *dscores, *block, *dkeys, *dvalues;
} head_work;

/* The extra panel avoids cache set conflicts between rows. */
static long score_stride_for(long length)
{
    return num_panels(length + REGISTER_ROWS) * PANEL + PANEL;
}

/* Number of floats of working memory that a thread needs for documents of up to this length. */
long varlen_attention_scratch(long length, long width)
{
    long across = num_panels(length) * PANEL * width;
    return 6 * across + 2 * BLOCK * score_stride_for(length) + BLOCK * width;
}

static head_work begin_head(const attention_args *all, long number, float *scratch)
{
    long document = number / all->keys, first = all->starts[document];
    head_work mine = {.first = first, .length = all->starts[document + 1] - first};
    mine.head = number % all->keys;
    long across = num_panels(mine.length) * PANEL * all->width;
    mine.score_stride = score_stride_for(mine.length);
    mine.keys_transposed = scratch;
    mine.values_transposed = scratch + across;
    mine.keys = scratch + 2 * across;
    mine.values = scratch + 3 * across;
    mine.dkeys = scratch + 4 * across;
    mine.dvalues = scratch + 5 * across;
    mine.scores = scratch + 6 * across;
    mine.dscores = mine.scores + BLOCK * mine.score_stride;
    mine.block = mine.dscores + BLOCK * mine.score_stride;
    const float *k = all->k + first * all->k_row + mine.head * all->width;
    pack_transposed(k, all->k_row, mine.length, all->width, mine.keys_transposed);
    return mine;
}

/* Products of query rows with all keys up to the last visible one, tile by tile. */
static void score_block(const head_work *mine, long width, const float *rows, long row, long from,
                        long num, const float *across, float *to)
{
    for (long i = 0; i < num; i += REGISTER_ROWS) {
        long num_rows = min_long(num - i, REGISTER_ROWS);
        tile_matmul((strided_matrix){rows + i * row, row, 1}, across, PANEL * width, width,
                    to + i * mine->score_stride, mine->score_stride, num_rows,
                    num_panels(from + i + num_rows), 0);
    }
}

/* Zero the scores after the visible ones, up to where later products read. */
static void mask_row(const head_work *mine, float *row, long seen, long from, long num)
{
    long end = min_long(num_panels(from + num + REGISTER_ROWS) * PANEL, mine->score_stride);
    memset(row + seen, 0, (end - seen) * sizeof(float));
}

/* --- forward ---------------------------------------------------------------------------------- */

/* Replace scores by e^(score - max) and return 1 / sum; writes the log-sum-exp to `lse`. */
static float softmax_row(float *x, long seen, float scale, float *lse)
{
    long full = seen / LANES * LANES, end = (seen + LANES - 1) / LANES * LANES;
    float max_value = row_max(x, seen);
    for (long i = seen; i < end; i++)
        x[i] = max_value;
    lanes sums = {0};
    for (long i = 0; i < end; i += LANES) {
        lanes some = lane_exp((load(x + i) - max_value) * scale);
        if (i < full)
            sums += some;
        store(x + i, some);
    }
    float sum = lane_sum(sums);
    for (long i = full; i < seen; i++)
        sum += x[i];
    *lse = max_value * scale + logf(sum);
    return 1.0f / sum;
}

static void forward_block(const attention_args *all, const head_work *mine, long head, long from,
                          long num, float *out, float *lse)
{
    long width = all->width, out_row = all->queries * width, row = mine->first + from;
    const float *q = all->q + row * all->q_row + head * width;
    score_block(mine, width, q, all->q_row, from, num, mine->keys_transposed, mine->scores);
    float inv_sum[BLOCK];
    for (long i = 0; i < num; i++) {
        float *scores = mine->scores + i * mine->score_stride;
        inv_sum[i] = softmax_row(scores, from + i + 1, all->scale,
                                 lse + (row + i) * all->queries + head);
        mask_row(mine, scores, from + i + 1, from, num);
    }
    for (long i = 0; i < num; i += REGISTER_ROWS) {
        long num_rows = min_long(num - i, REGISTER_ROWS);
        tile_matmul((strided_matrix){mine->scores + i * mine->score_stride, mine->score_stride, 1},
                    mine->values, PANEL * mine->length, from + i + num_rows,
                    out + (row + i) * out_row + head * width, out_row, num_rows, width / PANEL, 0);
    }
    for (long i = 0; i < num; i++) {
        float *to = out + (row + i) * out_row + head * width;
        for (long column = 0; column < width; column += LANES)
            store(to + column, load(to + column) * inv_sum[i]);
    }
}

void varlen_attention_forward(const float *q, long q_row, const float *k, long k_row,
                              const float *v, long v_row, const long *starts, long documents,
                              long queries, long keys, long width, float scale, float *out,
                              float *lse, float *scratch, long scratch_step, int threads)
{
    attention_args all = {q,      k,         v,       q_row, k_row, v_row,
                          starts, documents, queries, keys,  width, scale};
    long share = queries / keys;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long number = 0; number < documents * keys; number++) {
        head_work mine = begin_head(&all, number, scratch + omp_get_thread_num() * scratch_step);
        pack(v + mine.first * v_row + mine.head * width, v_row, mine.length, width, mine.values);
        for (long head = mine.head * share; head < (mine.head + 1) * share; head++)
            for (long from = 0; from < mine.length; from += BLOCK)
                forward_block(&all, &mine, head, from, min_long(mine.length - from, BLOCK), out,
                              lse);
    }
}

/* --- back ------------------------------------------------------------------------------------- */

/* Scores become probabilities p; their gradients dp become p (dp - projection) scale. */
static void softmax_backward_row(float *p, float *dp, long seen, float scale, float lse,
                                 float projection)
{
    for (long i = 0; i < seen; i += LANES) {
        lanes probs = lane_exp(load(p + i) * scale - lse);
        store(p + i, probs);
        store(dp + i, probs * (load(dp + i) - projection) * scale);
    }
}

/* to += x^T block, where row i of x has nonzero columns up to from + i. */
static void add_transposed_product(const head_work *mine, const float *x, long from, long num,
                                   long width, float *to)
{
    for (long first = 0; first < from + num; first += REGISTER_ROWS) {
        long skipped = first > from ? first - from : 0;
        long num_rows = min_long(from + num - first, REGISTER_ROWS);
        strided_matrix across = {x + skipped * mine->score_stride + first, 1, mine->score_stride};
        tile_matmul(across, mine->block + skipped * PANEL, PANEL * num, num - skipped,
                    to + first * width, width, num_rows, width / PANEL, 1);
    }
}

typedef struct {
    const float *out, *lse, *dout;
    float *dq, *dk, *dv;
} attention_grads;

static void backward_block(const attention_args *all, const head_work *mine,
                           const attention_grads *by, long head, long from, long num)
{
    long width = all->width, out_row = all->queries * width, row = mine->first + from;
    const float *q = all->q + row * all->q_row + head * width;
    const float *dout = by->dout + row * out_row + head * width;
    const float *out = by->out + row * out_row + head * width;
    score_block(mine, width, q, all->q_row, from, num, mine->keys_transposed, mine->scores);
    score_block(mine, width, dout, out_row, from, num, mine->values_transposed, mine->dscores);
    for (long i = 0; i < num; i++) {
        float *p = mine->scores + i * mine->score_stride;
        float *dp = mine->dscores + i * mine->score_stride;
        lanes projection = {0};
        for (long column = 0; column < width; column += LANES)
            projection += load(out + i * out_row + column) * load(dout + i * out_row + column);
        float lse = by->lse[(row + i) * all->queries + head];
        softmax_backward_row(p, dp, from + i + 1, all->scale, lse, lane_sum(projection));
        mask_row(mine, p, from + i + 1, from, num);
        mask_row(mine, dp, from + i + 1, from, num);
    }
    pack(dout, out_row, num, width, mine->block);
    add_transposed_product(mine, mine->scores, from, num, width, mine->dvalues);
    pack(q, all->q_row, num, width, mine->block);
    add_transposed_product(mine, mine->dscores, from, num, width, mine->dkeys);
    for (long i = 0; i < num; i += REGISTER_ROWS) {
        long num_rows = min_long(num - i, REGISTER_ROWS);
        tile_matmul((strided_matrix){mine->dscores + i * mine->score_stride, mine->score_stride, 1},
                    mine->keys, PANEL * mine->length, from + i + num_rows,
                    by->dq + (row + i) * out_row + head * width, out_row, num_rows, width / PANEL,
                    0);
    }
}

void varlen_attention_backward(const float *q, long q_row, const float *k, long k_row,
                               const float *v, long v_row, const long *starts, long documents,
                               long queries, long keys, long width, float scale, const float *out,
                               const float *lse, const float *dout, float *dq, float *dk, float *dv,
                               float *scratch, long scratch_step, int threads)
{
    attention_args all = {q,      k,         v,       q_row, k_row, v_row,
                          starts, documents, queries, keys,  width, scale};
    attention_grads by = {out, lse, dout, dq, dk, dv};
    long share = queries / keys, bytes = width * sizeof(float);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long number = 0; number < documents * keys; number++) {
        head_work mine = begin_head(&all, number, scratch + omp_get_thread_num() * scratch_step);
        long first = mine.first, offset = mine.head * width;
        pack_transposed(v + first * v_row + offset, v_row, mine.length, width,
                        mine.values_transposed);
        pack(k + first * k_row + offset, k_row, mine.length, width, mine.keys);
        memset(mine.dkeys, 0, mine.length * bytes);
        memset(mine.dvalues, 0, mine.length * bytes);
        for (long head = mine.head * share; head < (mine.head + 1) * share; head++)
            for (long from = 0; from < mine.length; from += BLOCK)
                backward_block(&all, &mine, &by, head, from, min_long(mine.length - from, BLOCK));
        for (long i = 0; i < mine.length; i++) {
            memcpy(dk + ((first + i) * keys + mine.head) * width, mine.dkeys + i * width, bytes);
            memcpy(dv + ((first + i) * keys + mine.head) * width, mine.dvalues + i * width, bytes);
        }
    }
}
