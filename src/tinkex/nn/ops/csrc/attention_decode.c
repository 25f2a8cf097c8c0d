/* Attention of a decode step: each sequence adds one token and attends to its own KV cache slot.
 *
 * Keys and values are (slots, heads, capacity, width). Each sequence is computed independently, so
 * its result does not depend on the rest of the batch.
 */
#include <math.h>

#include "lanes.h"
#include "kernels.h"

enum {
    TILE = 64, /* tokens that are scored before their values are read */
    MAX_HEAD_DIM = 256,
    MIN_PARALLEL_WORK = 1 << 17 /* below this, waking a second thread costs more */
};

static inline float dot(const float *a, const float *b, long width)
{
    lanes sum = {0};
    for (long i = 0; i < width; i += LANES)
        sum += load(a + i) * load(b + i);
    return lane_sum(sum);
}

/* Score `num` tokens, pad the tile with minus infinity and return the maximum. */
static float score_tokens(const kv_view *view, const float *query, long from, long num,
                          float *scores)
{
    float top = -INFINITY;
    for (long t = 0; t < num; t++) {
        const float *key = view->keys + (from + t) * view->key_width;
        scores[t] = dot(query, key, view->key_width) * view->scale;
        /* In this order, a NaN score becomes the maximum. */
        top = scores[t] <= top ? top : scores[t];
    }
    for (long t = num; t < TILE; t++)
        scores[t] = -INFINITY;
    return top;
}

/* Replace scores by e^(score - top) and return the sum. */
static float exp_scores(float *scores, float top)
{
    lanes sum = {0};
    for (long t = 0; t < TILE; t += LANES) {
        lanes weight = lane_exp(load(scores + t) - top);
        store(scores + t, weight);
        sum += weight;
    }
    return lane_sum(sum);
}

/* Attention of one query with online softmax; returns the log-sum-exp of its scores. */
float attend_one(const kv_view *view, const float *query, float *out)
{
    float weights[TILE], top = -INFINITY, total = 0.0f;
    float sums[MAX_HEAD_DIM] = {0};
    for (long from = 0; from < view->num_tokens; from += TILE) {
        long num = view->num_tokens - from < TILE ? view->num_tokens - from : TILE;
        float highest = score_tokens(view, query, from, num, weights);
        float new_top = highest <= top ? top : highest;
        float rescale = expf(top - new_top);
        total = total * rescale + exp_scores(weights, new_top);
        top = new_top;
        for (long i = 0; i < view->value_width; i += LANES) {
            lanes sum = load(sums + i) * rescale;
            const float *value = view->values + from * view->value_width + i;
            for (long t = 0; t < num; t++)
                sum += weights[t] * load(value + t * view->value_width);
            store(sums + i, sum);
        }
    }
    for (long i = 0; i < view->value_width; i += LANES)
        store(out + i, load(sums + i) / total);
    return top + logf(total);
}

/* Append each row's key and value to its slot and attend.
 *
 * Writes out (rows, heads, value_width) and the log-sum-exp of the scores, lse (rows, heads).
 * `lengths` are the numbers of tokens before this step; `window` limits how many of the last tokens
 * a query sees, 0 for no limit. `*_row` and `*_head` are strides.
 */
void decode_attention(const float *query, long query_row, long query_head, const float *key,
                      long key_row, long key_head, const float *value, long value_row,
                      long value_head, float *keys, float *values, const long *lengths, long window,
                      long capacity, long rows, long kv_heads, long share, long key_width,
                      long value_width, float scale, float *out, float *lse, int threads)
{
    long work = 0;
    for (long row = 0; row < rows; row++)
        work += (lengths[row] + 1) * kv_heads * share * (key_width + value_width);
#pragma omp parallel for schedule(dynamic) num_threads(threads)                                    \
    if (threads > 1 && work >= MIN_PARALLEL_WORK)
    for (long at = 0; at < rows * kv_heads; at++) {
        long row = at / kv_heads, head = at % kv_heads, length = lengths[row] + 1;
        float *slot_keys = keys + at * capacity * key_width;
        float *slot_values = values + at * capacity * value_width;
        memcpy(slot_keys + (length - 1) * key_width, key + row * key_row + head * key_head,
               key_width * sizeof(float));
        memcpy(slot_values + (length - 1) * value_width,
               value + row * value_row + head * value_head, value_width * sizeof(float));
        long first = window && length > window ? length - window : 0;
        kv_view view = {slot_keys + first * key_width,
                        slot_values + first * value_width,
                        length - first,
                        key_width,
                        value_width,
                        scale};
        for (long s = 0; s < share; s++) {
            long query_index = head * share + s, out_index = row * kv_heads * share + query_index;
            lse[out_index] = attend_one(&view, query + row * query_row + query_index * query_head,
                                        out + out_index * value_width);
        }
    }
}
