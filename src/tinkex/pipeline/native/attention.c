/* Causal attention over documents that lie end to end, forth and back.
 *
 * One thread takes a document and a head of keys with all its queries, so that nobody else adds to
 * the same gradient, and what comes out does not depend on how many threads there are. Queries are
 * taken in blocks whose scores stay in the caches; what a query cannot see is hardly computed.
 * The right side of each product lies in panels: PANEL columns side by side, row by row.
 */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "lanes.h"

enum {
    ROWS = 6, /* as many as have their sums in registers */
    PANEL = 2 * LANES,
    BLOCK = 8 * ROWS /* queries whose scores are there at once */
};

/* Rows of numbers: the next row is `row` away, the next number `step`. */
typedef struct {
    const float *from;
    long row;
    long step;
} matrix;

static long at_most(long x, long most) { return x < most ? x : most; }

static long panels_of(long columns) { return (columns + PANEL - 1) / PANEL; }

/* --- products --------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) void tile(const float *a, long row, long step,
                                                      const float *panel, long depth, float *c,
                                                      long c_row, const int rows,
                                                      const int is_added)
{
    lanes sum[ROWS][2];
    for (int i = 0; i < rows; i++) {
        sum[i][0] = is_added ? load(c + i * c_row) : (lanes){0};
        sum[i][1] = is_added ? load(c + i * c_row + LANES) : (lanes){0};
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

#define TILE(number)                                                                               \
    case number:                                                                                   \
        if (is_added)                                                                              \
            tile(a.from, a.row, a.step, panel, depth, to, c_row, number, 1);                       \
        else                                                                                       \
            tile(a.from, a.row, a.step, panel, depth, to, c_row, number, 0);                       \
        break;

/* c = a * b, or c += a * b, for at most ROWS rows; a panel of b is `panel_step` long. */
static void multiply(matrix a, const float *b, long panel_step, long depth, float *c, long c_row,
                     long rows, long panels, int is_added)
{
    for (long at = 0; at < panels; at++) {
        const float *panel = b + at * panel_step;
        float *to = c + at * PANEL;
        switch (rows) {
            TILE(6) TILE(5) TILE(4) TILE(3) TILE(2) TILE(1)
        }
    }
}

/* Columns of x in panels of rows. */
static void pack(const float *x, long row, long rows, long width, float *to)
{
    for (long column = 0; column < width; column += PANEL)
        for (long i = 0; i < rows; i++, to += PANEL)
            memcpy(to, x + i * row + column, PANEL * sizeof(float));
}

/* Rows of x in panels of columns; those that are missing in the last panel are zero. */
static void pack_across(const float *x, long row, long rows, long width, float *to)
{
    for (long first = 0; first < rows; first += PANEL, to += PANEL * width) {
        long num = at_most(rows - first, PANEL);
        if (num < PANEL)
            memset(to, 0, PANEL * width * sizeof(float));
        for (long i = 0; i < num; i++)
            for (long column = 0; column < width; column++)
                to[column * PANEL + i] = x[(first + i) * row + column];
    }
}

/* --- what is looked at ------------------------------------------------------------------------ */

/* A call: rows of all documents, by heads. */
typedef struct {
    const float *q, *k, *v;
    long q_row, k_row, v_row;
    const long *starts; /* of the documents, and the end */
    long documents, queries, keys, width;
    float scale;
} scene;

/* A document with one head of keys, and a thread's own memory. */
typedef struct {
    long first, length, head;
    long room; /* from one row of scores to the next */
    float *keys_across, *values_across, *keys, *values;
    float *scores, *pulls, *block, *dkeys, *dvalues;
} work;

/* A row of scores ends at another place in the caches than the row before it. */
static long room_of(long length) { return panels_of(length + ROWS) * PANEL + PANEL; }

/* How many numbers a thread needs for documents of this length. */
long attention_scratch(long length, long width)
{
    long across = panels_of(length) * PANEL * width;
    return 6 * across + 2 * BLOCK * room_of(length) + BLOCK * width;
}

static work begin(const scene *all, long number, float *scratch)
{
    long document = number / all->keys, first = all->starts[document];
    work mine = {.first = first, .length = all->starts[document + 1] - first};
    mine.head = number % all->keys;
    long across = panels_of(mine.length) * PANEL * all->width;
    mine.room = room_of(mine.length);
    mine.keys_across = scratch;
    mine.values_across = scratch + across;
    mine.keys = scratch + 2 * across;
    mine.values = scratch + 3 * across;
    mine.dkeys = scratch + 4 * across;
    mine.dvalues = scratch + 5 * across;
    mine.scores = scratch + 6 * across;
    mine.pulls = mine.scores + BLOCK * mine.room;
    mine.block = mine.pulls + BLOCK * mine.room;
    const float *k = all->k + first * all->k_row + mine.head * all->width;
    pack_across(k, all->k_row, mine.length, all->width, mine.keys_across);
    return mine;
}

/* Products of some rows with all that the last of them sees, tile by tile. */
static void score(const work *mine, long width, const float *rows, long row, long from, long num,
                  const float *across, float *to)
{
    for (long i = 0; i < num; i += ROWS) {
        long tall = at_most(num - i, ROWS);
        multiply((matrix){rows + i * row, row, 1}, across, PANEL * width, width,
                 to + i * mine->room, mine->room, tall, panels_of(from + i + tall), 0);
    }
}

/* What a row does not see counts nothing, as far as somebody might read. */
static void hide(const work *mine, float *row, long seen, long from, long num)
{
    long end = at_most(panels_of(from + num + ROWS) * PANEL, mine->room);
    memset(row + seen, 0, (end - seen) * sizeof(float));
}

/* --- forth ------------------------------------------------------------------------------------ */

static float largest_of(const float *x, long num)
{
    float found = x[0];
    lanes most = (lanes){0} + found;
    long i = 0;
    for (; i + LANES <= num; i += LANES) {
        lanes some = load(x + i);
        whole_lanes is_more = some > most;
        most = (lanes)((is_more & (whole_lanes)some) | (~is_more & (whole_lanes)most));
    }
    for (int lane = 0; lane < LANES; lane++)
        found = most[lane] > found ? most[lane] : found;
    for (; i < num; i++)
        found = x[i] > found ? x[i] : found;
    return found;
}

/* Makes scores into e^(score - most), and returns 1 / their sum; `lse` is the log of the sum. */
static float soften(float *x, long seen, float scale, float *lse)
{
    long whole = seen / LANES * LANES, end = (seen + LANES - 1) / LANES * LANES;
    float most = largest_of(x, seen);
    for (long i = seen; i < end; i++)
        x[i] = most;
    lanes sums = {0};
    for (long i = 0; i < end; i += LANES) {
        lanes some = exp_of((load(x + i) - most) * scale);
        if (i < whole)
            sums += some;
        store(x + i, some);
    }
    float sum = sum_of(sums);
    for (long i = whole; i < seen; i++)
        sum += x[i];
    *lse = most * scale + logf(sum);
    return 1.0f / sum;
}

static void attend_block(const scene *all, const work *mine, long head, long from, long num,
                         float *out, float *lse)
{
    long width = all->width, out_row = all->queries * width, row = mine->first + from;
    const float *q = all->q + row * all->q_row + head * width;
    score(mine, width, q, all->q_row, from, num, mine->keys_across, mine->scores);
    float shrink[BLOCK];
    for (long i = 0; i < num; i++) {
        float *scores = mine->scores + i * mine->room;
        shrink[i] = soften(scores, from + i + 1, all->scale, lse + (row + i) * all->queries + head);
        hide(mine, scores, from + i + 1, from, num);
    }
    for (long i = 0; i < num; i += ROWS) {
        long tall = at_most(num - i, ROWS);
        multiply((matrix){mine->scores + i * mine->room, mine->room, 1}, mine->values,
                 PANEL * mine->length, from + i + tall, out + (row + i) * out_row + head * width,
                 out_row, tall, width / PANEL, 0);
    }
    for (long i = 0; i < num; i++) {
        float *to = out + (row + i) * out_row + head * width;
        for (long column = 0; column < width; column += LANES)
            store(to + column, load(to + column) * shrink[i]);
    }
}

void attend(const float *q, long q_row, const float *k, long k_row, const float *v, long v_row,
            const long *starts, long documents, long queries, long keys, long width, float scale,
            float *out, float *lse, float *scratch, long scratch_step, int threads)
{
    scene all = {q, k, v, q_row, k_row, v_row, starts, documents, queries, keys, width, scale};
    long share = queries / keys;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long number = 0; number < documents * keys; number++) {
        work mine = begin(&all, number, scratch + omp_get_thread_num() * scratch_step);
        pack(v + mine.first * v_row + mine.head * width, v_row, mine.length, width, mine.values);
        for (long head = mine.head * share; head < (mine.head + 1) * share; head++)
            for (long from = 0; from < mine.length; from += BLOCK)
                attend_block(&all, &mine, head, from, at_most(mine.length - from, BLOCK), out, lse);
    }
}

/* --- back ------------------------------------------------------------------------------------- */

/* Scores become chances p, and their pulls dp become p (dp - along) scale. */
static void pull_row(float *p, float *dp, long seen, float scale, float lse, float along)
{
    for (long i = 0; i < seen; i += LANES) {
        lanes chances = exp_of(load(p + i) * scale - lse);
        store(p + i, chances);
        store(dp + i, chances * (load(dp + i) - along) * scale);
    }
}

/* to += x^T * block, for rows of x that see columns from `from` on downwards. */
static void add_across(const work *mine, const float *x, long from, long num, long width, float *to)
{
    for (long first = 0; first < from + num; first += ROWS) {
        long skipped = first > from ? first - from : 0;
        long tall = at_most(from + num - first, ROWS);
        matrix across = {x + skipped * mine->room + first, 1, mine->room};
        multiply(across, mine->block + skipped * PANEL, PANEL * num, num - skipped,
                 to + first * width, width, tall, width / PANEL, 1);
    }
}

typedef struct {
    const float *out, *lse, *dout;
    float *dq, *dk, *dv;
} pull;

static void pull_block(const scene *all, const work *mine, const pull *by, long head, long from,
                       long num)
{
    long width = all->width, out_row = all->queries * width, row = mine->first + from;
    const float *q = all->q + row * all->q_row + head * width;
    const float *dout = by->dout + row * out_row + head * width;
    const float *out = by->out + row * out_row + head * width;
    score(mine, width, q, all->q_row, from, num, mine->keys_across, mine->scores);
    score(mine, width, dout, out_row, from, num, mine->values_across, mine->pulls);
    for (long i = 0; i < num; i++) {
        float *p = mine->scores + i * mine->room, *dp = mine->pulls + i * mine->room;
        lanes along = {0};
        for (long column = 0; column < width; column += LANES)
            along += load(out + i * out_row + column) * load(dout + i * out_row + column);
        float lse = by->lse[(row + i) * all->queries + head];
        pull_row(p, dp, from + i + 1, all->scale, lse, sum_of(along));
        hide(mine, p, from + i + 1, from, num);
        hide(mine, dp, from + i + 1, from, num);
    }
    pack(dout, out_row, num, width, mine->block);
    add_across(mine, mine->scores, from, num, width, mine->dvalues);
    pack(q, all->q_row, num, width, mine->block);
    add_across(mine, mine->pulls, from, num, width, mine->dkeys);
    for (long i = 0; i < num; i += ROWS) {
        long tall = at_most(num - i, ROWS);
        multiply((matrix){mine->pulls + i * mine->room, mine->room, 1}, mine->keys,
                 PANEL * mine->length, from + i + tall,
                 by->dq + (row + i) * out_row + head * width, out_row, tall, width / PANEL, 0);
    }
}

void attend_back(const float *q, long q_row, const float *k, long k_row, const float *v, long v_row,
                 const long *starts, long documents, long queries, long keys, long width,
                 float scale, const float *out, const float *lse, const float *dout, float *dq,
                 float *dk, float *dv, float *scratch, long scratch_step, int threads)
{
    scene all = {q, k, v, q_row, k_row, v_row, starts, documents, queries, keys, width, scale};
    pull by = {out, lse, dout, dq, dk, dv};
    long share = queries / keys, bytes = width * sizeof(float);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long number = 0; number < documents * keys; number++) {
        work mine = begin(&all, number, scratch + omp_get_thread_num() * scratch_step);
        long first = mine.first, offset = mine.head * width;
        pack_across(v + first * v_row + offset, v_row, mine.length, width, mine.values_across);
        pack(k + first * k_row + offset, k_row, mine.length, width, mine.keys);
        memset(mine.dkeys, 0, mine.length * bytes);
        memset(mine.dvalues, 0, mine.length * bytes);
        for (long head = mine.head * share; head < (mine.head + 1) * share; head++)
            for (long from = 0; from < mine.length; from += BLOCK)
                pull_block(&all, &mine, &by, head, from, at_most(mine.length - from, BLOCK));
        for (long i = 0; i < mine.length; i++) {
            memcpy(dk + ((first + i) * keys + mine.head) * width, mine.dkeys + i * width, bytes);
            memcpy(dv + ((first + i) * keys + mine.head) * width, mine.dvalues + i * width, bytes);
        }
    }
}
