/* Attention of samples that each add one token and see those before it.
 *
 * Keys and values lie slot by slot: (slots, heads, capacity, width). Each sample is computed alone,
 * so that it does not matter who else takes a step.
 */
#include <math.h>

#include "lanes.h"
#include "kernels.h"

enum {
    TILE = 64,       /* tokens whose scores are known before their values are read */
    MAX_HEAD_DIM = 256, /* of a head */
    MIN_PARALLEL_WORK = 1 << 17    /* products that are done sooner than a second thread wakes up */
};

static inline float dot(const float *a, const float *b, long width)
{
    lanes sum = {0};
    for (long i = 0; i < width; i += LANES)
        sum += load(a + i) * load(b + i);
    return lane_sum(sum);
}

/* The scores of some tokens, filled up with minus infinity; returns the highest. */
static float score_tokens(const kv_view *view, const float *query, long from, long num, float *scores)
{
    float top = -INFINITY;
    for (long t = 0; t < num; t++) {
        const float *key = view->keys + (from + t) * view->key_width;
        scores[t] = dot(query, key, view->key_width) * view->scale;
        /* Written so that a score that is not a number stays one. */
        top = scores[t] <= top ? top : scores[t];
    }
    for (long t = num; t < TILE; t++)
        scores[t] = -INFINITY;
    return top;
}

/* Weights of scores against the highest, in their place; returns their sum. */
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

/* What one query sees; returns the logarithm of the total weight. */
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

/* Keep each sample's new key and value, and see: out (rows, heads, width), totals (rows, heads).
 *
 * `lengths` says how many tokens a slot holds before; `window`, how many are seen at most. Strides
 * are those of rows and of heads.
 */
void decode_attention(const float *query, long query_row, long query_head, const float *key, long key_row,
            long key_head, const float *value, long value_row, long value_head, float *keys,
            float *values, const long *lengths, long window, long capacity, long rows,
            long key_heads, long share, long key_width, long value_width, float scale, float *out,
            float *lse, int threads)
{
    long work = 0;
    for (long row = 0; row < rows; row++)
        work += (lengths[row] + 1) * key_heads * share * (key_width + value_width);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && work >= MIN_PARALLEL_WORK)
    for (long at = 0; at < rows * key_heads; at++) {
        long row = at / key_heads, head = at % key_heads, length = lengths[row] + 1;
        float *my_keys = keys + at * capacity * key_width;
        float *my_values = values + at * capacity * value_width;
        memcpy(my_keys + (length - 1) * key_width, key + row * key_row + head * key_head,
               key_width * sizeof(float));
        memcpy(my_values + (length - 1) * value_width, value + row * value_row + head * value_head,
               value_width * sizeof(float));
        long first = window && length > window ? length - window : 0;
        kv_view view = {my_keys + first * key_width, my_values + first * value_width, length - first,
                      key_width, value_width, scale};
        for (long s = 0; s < share; s++) {
            long number = head * share + s, place = row * key_heads * share + number;
            lse[place] = attend_one(&view, query + row * query_row + number * query_head,
                                 out + place * value_width);
        }
    }
}
