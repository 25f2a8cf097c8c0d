/* A step of samples that each add one token: all layers of a model at once.
 *
 * Threads share the columns of a product and the heads of attention, and wait for each other only
 * in between; they are woken once for a step, not once for a product. Every number is made by the
 * same code as where the layers are called one by one, and in the same order, so that a sample
 * comes out the same to the bit either way.
 */
#include <stdlib.h>
#include <string.h>

#include "lanes.h"
#include "kernels.h"

enum { LINEARS_PER_LAYER = 4 /* of a layer: into attention, out of it, gate and up, down */ };

/* A frozen linear map. */
typedef struct {
    const float *panels;
    const float *bias; /* or null */
    long inputs;
    long outputs;
} linear;

typedef struct {
    const float *scale; /* or null for no norm */
    float eps_sum;
} norm_params;

typedef struct {
    norm_params input_norm, heads, post_attention_norm;
    linear linears[LINEARS_PER_LAYER];
    float scale;
    long window; /* 0 for none */
} layer;

typedef struct {
    const float *embedding;
    const layer *layers;
    long num_layers;
    norm_params last;
    long width, query_heads, key_heads, head_width, inner;
} model;

/* An adapter's part of a map; `rank` columns of down for each of the maps that are one here. */
typedef struct {
    const float *down; /* or null if there is none */
    const float *const *ups;
    const long *outputs;
    long rank;
    long num;
} lora_pair;

/* Rows of one adapter; its pairs, map by map and layer by layer. */
typedef struct {
    long start;
    long stop;
    const lora_pair *pairs;
} adapter_span;

/* Slots of samples; keys and values by layer. */
typedef struct {
    float *const *keys;
    float *const *values;
    const long *lengths;
    long capacity;
} kv_block;

typedef struct {
    const model *of;
    const adapter_span *spans;
    long num_spans;
    const kv_block *blocks;
    long rows;
    const long *blocks_of, *slots;
    const float *cos, *sin; /* a row's own, behind each other */
    /* Memory for what stands between. */
    float *x, *normed, *wide, *seen, *inner, *low;
    long low_width;
} step_state;

#define BARRIER _Pragma("omp barrier")

/* --- parts of a layer; all threads come here together ----------------------------------------- */

static const lora_pair *lora_pair_at(const adapter_span *one, long number)
{
    return one->pairs[number].down ? &one->pairs[number] : 0;
}

/* y = x w + b, and every row's adapter. */
static void apply_linear(const step_state *now, long number, const float *x, float *y)
{
    const linear *whole = &now->of->layers[number / LINEARS_PER_LAYER].linears[number % LINEARS_PER_LAYER];
    packed_matmul_range(x, whole->inputs, whole->panels, whole->bias, 0, y, whole->outputs, now->rows,
                  whole->inputs, whole->outputs, thread_range(num_panels(whole->outputs)));
    int is_adapted = 0;
    for (long i = 0; i < now->num_spans; i++) {
        const adapter_span *one = &now->spans[i];
        const lora_pair *mine = lora_pair_at(one, number);
        if (!mine)
            continue;
        long width = mine->num * mine->rank;
        is_adapted = 1;
        packed_matmul_range(x + one->start * whole->inputs, whole->inputs, mine->down, 0, 0,
                      now->low + one->start * now->low_width, now->low_width,
                      one->stop - one->start, whole->inputs, width, thread_range(num_panels(width)));
    }
    BARRIER
    if (!is_adapted)
        return;
    for (long i = 0; i < now->num_spans; i++) {
        const adapter_span *one = &now->spans[i];
        const lora_pair *mine = lora_pair_at(one, number);
        const float *low = now->low + one->start * now->low_width;
        float *to = y + one->start * whole->outputs;
        for (long m = 0; mine && m < mine->num; m++) {
            packed_matmul_range(low + m * mine->rank, now->low_width, mine->ups[m], to, whole->outputs,
                          to, whole->outputs, one->stop - one->start, mine->rank, mine->outputs[m],
                          thread_range(num_panels(mine->outputs[m])));
            to += mine->outputs[m];
        }
    }
    BARRIER
}

/* Add to the rows, if there is something to add, and norm them. */
static void add_rms_norm_rows(const step_state *now, const float *added, const norm_params *how, float *to)
{
    long width = now->of->width;
    range mine = thread_range(now->rows);
    for (long row = mine.first; row < mine.last; row++) {
        float *x = now->x + row * width;
        for (long i = 0; added && i < width; i++)
            x[i] += added[row * width + i];
        rms_norm_row(x, how->scale, how->eps_sum, width, to + row * width);
    }
    BARRIER
}

/* Turn queries and keys by their positions, and keep keys and values. */
static void rotate_and_store_kv(const step_state *now, long number)
{
    const model *of = now->of;
    const norm_params *how = &of->layers[number].heads;
    long width = of->head_width, num_rotated = of->query_heads + of->key_heads;
    long row_width = (num_rotated + of->key_heads) * width;
    range mine = thread_range(now->rows * num_rotated);
    for (long at = mine.first; at < mine.last; at++) {
        long row = at / num_rotated, head = at % num_rotated;
        float *x = now->wide + row * row_width + head * width;
        rotary_head(x, how->scale ? how->scale + head * width : 0, how->eps_sum, now->cos + row * width,
                  now->sin + row * width, width);
        if (head < of->query_heads)
            continue;
        const kv_block *cache = &now->blocks[now->blocks_of[row]];
        long slot = now->slots[row];
        long place = (slot * of->key_heads + head - of->query_heads) * cache->capacity;
        place = (place + cache->lengths[slot]) * width;
        memcpy(cache->keys[number] + place, x, width * sizeof(float));
        memcpy(cache->values[number] + place, x + of->key_heads * width, width * sizeof(float));
    }
    BARRIER
}

static void attend_layer(const step_state *now, long number)
{
    const model *of = now->of;
    const layer *how = &of->layers[number];
    long width = of->head_width, share = of->query_heads / of->key_heads;
    long row_width = (of->query_heads + 2 * of->key_heads) * width;
#pragma omp for schedule(dynamic)
    for (long at = 0; at < now->rows * of->query_heads; at++) {
        long row = at / of->query_heads, head = at % of->query_heads;
        const kv_block *cache = &now->blocks[now->blocks_of[row]];
        long slot = now->slots[row], length = cache->lengths[slot] + 1;
        long first = how->window && length > how->window ? length - how->window : 0;
        long place = ((slot * of->key_heads + head / share) * cache->capacity + first) * width;
        kv_view seen = {cache->keys[number] + place, cache->values[number] + place, length - first,
                      width, width, how->scale};
        attend_one(&seen, now->wide + row * row_width + head * width, now->seen + at * width);
    }
}

static void swiglu_layer(const step_state *now)
{
    long width = now->of->inner;
    range mine = thread_range(now->rows);
    for (long row = mine.first; row < mine.last; row++)
        swiglu_row(now->wide + row * 2 * width, width, now->inner + row * width);
    BARRIER
}

/* --- a step ----------------------------------------------------------------------------------- */

static void run_layers(const step_state *now, float *out)
{
    const model *of = now->of;
    const float *added = 0;
    for (long i = 0; i < of->num_layers; i++) {
        const layer *this = &of->layers[i];
        add_rms_norm_rows(now, added, &this->input_norm, now->normed);
        apply_linear(now, i * LINEARS_PER_LAYER, now->normed, now->wide);
        rotate_and_store_kv(now, i);
        attend_layer(now, i);
        apply_linear(now, i * LINEARS_PER_LAYER + 1, now->seen, now->wide);
        add_rms_norm_rows(now, now->wide, &this->post_attention_norm, now->normed);
        apply_linear(now, i * LINEARS_PER_LAYER + 2, now->normed, now->wide);
        swiglu_layer(now);
        apply_linear(now, i * LINEARS_PER_LAYER + 3, now->inner, now->wide);
        added = now->wide;
    }
    add_rms_norm_rows(now, added, &of->last, out);
}

static long low_width(const step_state *now)
{
    long widest = 0;
    for (long i = 0; i < now->num_spans; i++)
        for (long m = 0; m < now->of->num_layers * LINEARS_PER_LAYER; m++) {
            const lora_pair *mine = lora_pair_at(&now->spans[i], m);
            long width = mine ? mine->num * mine->rank : 0;
            widest = width > widest ? width : widest;
        }
    return widest;
}

/* The last hidden states, (rows, width). Returns whether there was memory. */
int decode_step(const model *of, const adapter_span *spans, long num_spans, const kv_block *blocks,
             long rows, const long *tokens, const long *blocks_of, const long *slots,
             const float *cos, const float *sin, float *out, int threads)
{
    step_state now = {.of = of,
                .spans = spans,
                .num_spans = num_spans,
                .blocks = blocks,
                .rows = rows,
                .blocks_of = blocks_of,
                .slots = slots,
                .cos = cos,
                .sin = sin};
    long heads = of->query_heads * of->head_width;
    long wide = heads + 2 * of->key_heads * of->head_width;
    wide = wide > 2 * of->inner ? wide : 2 * of->inner;
    wide = wide > of->width ? wide : of->width;
    now.low_width = low_width(&now);
    float *memory =
        malloc(rows * (2 * of->width + wide + heads + of->inner + now.low_width) * sizeof(float));
    if (!memory && rows)
        return 0;
    now.x = memory;
    now.normed = now.x + rows * of->width;
    now.wide = now.normed + rows * of->width;
    now.seen = now.wide + rows * wide;
    now.inner = now.seen + rows * heads;
    now.low = now.inner + rows * of->inner;
    for (long row = 0; row < rows; row++)
        memcpy(now.x + row * of->width, of->embedding + tokens[row] * of->width,
               of->width * sizeof(float));
#pragma omp parallel num_threads(threads)
    run_layers(&now, out);
    free(memory);
    return 1;
}
