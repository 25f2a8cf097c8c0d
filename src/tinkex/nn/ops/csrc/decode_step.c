/* Fused decode step: each sequence adds one token, and all layers of the model run in one call.
 *
 * Threads split the columns of matrix products and the attention heads and meet at barriers; they
 * are started once per step, not once per product. Results are bit-identical to running the layers
 * one by one, because both use the same kernels in the same order.
 */
#include <stdlib.h>
#include <string.h>

#include "lanes.h"
#include "kernels.h"
#include "team.h"

enum { LINEARS_PER_LAYER = 4 /* QKV, attention output, gate and up, down */ };

/* A frozen linear layer. */
typedef struct {
    packed_weight weight;
    const float *bias; /* or null */
} linear;

typedef struct {
    norm_params input_norm, qk_norm, post_attention_norm;
    linear linears[LINEARS_PER_LAYER];
    float scale;
    long window; /* 0 for none */
} layer;

typedef struct {
    const layer *layers;
    long num_layers;
    norm_params final_norm;
    long width, query_heads, kv_heads, head_width, inner;
} model;

/* LoRA matrices of one merged linear layer; `down` has `rank` columns for each of `num` parts. */
typedef struct {
    const float *down; /* null if the layer is not adapted */
    const float *const *ups;
    const long *outputs;
    long rank;
    long num;
} lora_pair;

/* Consecutive rows of one adapter, and its pairs for every linear layer of the model. */
typedef struct {
    long start;
    long stop;
    const lora_pair *pairs;
} adapter_span;

/* KV cache slots; keys and values by layer. */
typedef struct {
    float *const *keys;
    float *const *values;
    const long *lengths;
    long capacity;
} kv_block;

typedef struct {
    const model *of;
    team *threads;
    const adapter_span *spans;
    long num_spans;
    const kv_block *blocks;
    long rows;
    const long *blocks_of, *slots;
    const float *cos, *sin; /* (rows, head_width), sin signed */
    /* Activations. */
    float *x, *normed, *wide, *attended, *inner, *lora_hidden;
    long lora_width;
} step_state;

#define BARRIER wait_for_team(step->threads);

/* --- parts of a layer, called by all threads -------------------------------------------------- */

static const lora_pair *lora_pair_at(const adapter_span *span, long number)
{
    return span->pairs[number].down ? &span->pairs[number] : 0;
}

/* y = x w + b plus the LoRA update of each row's adapter. */
static void apply_linear(const step_state *step, long number, const float *x, float *y)
{
    const layer *of = &step->of->layers[number / LINEARS_PER_LAYER];
    const linear *base = &of->linears[number % LINEARS_PER_LAYER];
    long inputs = base->weight.inputs, outputs = base->weight.outputs;
    packed_matmul_range(x, inputs, &base->weight, base->bias, 0, y, outputs, step->rows,
                        thread_range(num_panels(outputs)));
    int is_adapted = 0;
    for (long i = 0; i < step->num_spans; i++) {
        const adapter_span *span = &step->spans[i];
        const lora_pair *pair = lora_pair_at(span, number);
        if (!pair)
            continue;
        long width = pair->num * pair->rank;
        is_adapted = 1;
        packed_weight down = float32_weight(pair->down, inputs, width);
        packed_matmul_range(x + span->start * inputs, inputs, &down, 0, 0,
                            step->lora_hidden + span->start * step->lora_width, step->lora_width,
                            span->stop - span->start, thread_range(num_panels(width)));
    }
    BARRIER
    if (!is_adapted)
        return;
    for (long i = 0; i < step->num_spans; i++) {
        const adapter_span *span = &step->spans[i];
        const lora_pair *pair = lora_pair_at(span, number);
        const float *hidden = step->lora_hidden + span->start * step->lora_width;
        float *to = y + span->start * outputs;
        for (long m = 0; pair && m < pair->num; m++) {
            packed_weight up = float32_weight(pair->ups[m], pair->rank, pair->outputs[m]);
            packed_matmul_range(hidden + m * pair->rank, step->lora_width, &up, to, outputs, to,
                                outputs, span->stop - span->start,
                                thread_range(num_panels(up.outputs)));
            to += pair->outputs[m];
        }
    }
    BARRIER
}

/* Add `added` to the residual stream unless it is null, and write its norm to `to`. */
static void add_rms_norm_rows(const step_state *step, const float *added, const norm_params *params,
                              float *to)
{
    long width = step->of->width;
    range mine = thread_range(step->rows);
    for (long row = mine.first; row < mine.last; row++) {
        float *x = step->x + row * width;
        for (long i = 0; added && i < width; i++)
            x[i] += added[row * width + i];
        rms_norm_row(x, params->scale, params->eps_sum, width, to + row * width);
    }
    BARRIER
}

/* Rotate queries and keys, and append keys and values to the cache. */
static void rotate_and_store_kv(const step_state *step, long number)
{
    const model *of = step->of;
    const norm_params *params = &of->layers[number].qk_norm;
    long width = of->head_width, num_rotated = of->query_heads + of->kv_heads;
    long row_width = (num_rotated + of->kv_heads) * width;
    range mine = thread_range(step->rows * num_rotated);
    for (long at = mine.first; at < mine.last; at++) {
        long row = at / num_rotated, head = at % num_rotated;
        float *x = step->wide + row * row_width + head * width;
        norm_params norm = {params->scale ? params->scale + head * width : 0, params->eps_sum};
        rotary_head(x, &norm, step->cos + row * width, step->sin + row * width, width);
        if (head < of->query_heads)
            continue;
        const kv_block *cache = &step->blocks[step->blocks_of[row]];
        long slot = step->slots[row];
        long offset = (slot * of->kv_heads + head - of->query_heads) * cache->capacity;
        offset = (offset + cache->lengths[slot]) * width;
        memcpy(cache->keys[number] + offset, x, width * sizeof(float));
        memcpy(cache->values[number] + offset, x + of->kv_heads * width, width * sizeof(float));
    }
    BARRIER
}

static void attend_layer(const step_state *step, long number)
{
    const model *of = step->of;
    const layer *this = &of->layers[number];
    long width = of->head_width, share = of->query_heads / of->kv_heads;
    long row_width = (of->query_heads + 2 * of->kv_heads) * width;
    long at;
    while ((at = atomic_fetch_add(&step->threads->next_task, 1)) < step->rows * of->query_heads) {
        long row = at / of->query_heads, head = at % of->query_heads;
        const kv_block *cache = &step->blocks[step->blocks_of[row]];
        long slot = step->slots[row], length = cache->lengths[slot] + 1;
        long first = this->window && length > this->window ? length - this->window : 0;
        long offset = ((slot * of->kv_heads + head / share) * cache->capacity + first) * width;
        kv_view view = {cache->keys[number] + offset,
                        cache->values[number] + offset,
                        length - first,
                        width,
                        width,
                        this->scale};
        attend_one(&view, step->wide + row * row_width + head * width, step->attended + at * width);
    }
    BARRIER
}

static void swiglu_layer(const step_state *step)
{
    long width = step->of->inner;
    range mine = thread_range(step->rows);
    for (long row = mine.first; row < mine.last; row++)
        swiglu_row(step->wide + row * 2 * width, width, step->inner + row * width);
    BARRIER
}

/* --- a step ----------------------------------------------------------------------------------- */

static void run_layers(const step_state *step, float *out)
{
    const model *of = step->of;
    const float *added = 0;
    for (long i = 0; i < of->num_layers; i++) {
        const layer *this = &of->layers[i];
        add_rms_norm_rows(step, added, &this->input_norm, step->normed);
        apply_linear(step, i * LINEARS_PER_LAYER, step->normed, step->wide);
        rotate_and_store_kv(step, i);
        attend_layer(step, i);
        apply_linear(step, i * LINEARS_PER_LAYER + 1, step->attended, step->wide);
        add_rms_norm_rows(step, step->wide, &this->post_attention_norm, step->normed);
        apply_linear(step, i * LINEARS_PER_LAYER + 2, step->normed, step->wide);
        swiglu_layer(step);
        apply_linear(step, i * LINEARS_PER_LAYER + 3, step->inner, step->wide);
        added = step->wide;
    }
    add_rms_norm_rows(step, added, &of->final_norm, out);
}

static long lora_width(const step_state *step)
{
    long widest = 0;
    for (long i = 0; i < step->num_spans; i++)
        for (long m = 0; m < step->of->num_layers * LINEARS_PER_LAYER; m++) {
            const lora_pair *pair = lora_pair_at(&step->spans[i], m);
            long width = pair ? pair->num * pair->rank : 0;
            widest = width > widest ? width : widest;
        }
    return widest;
}

/* Write the last hidden states (rows, width) to `out`, given the embedded tokens in `x`, which is
 * overwritten; returns 0 if memory cannot be allocated.
 */
int decode_step(const model *of, const adapter_span *spans, long num_spans, const kv_block *blocks,
                long rows, float *x, const long *blocks_of, const long *slots, const float *cos,
                const float *sin, float *out, int threads)
{
    team threads_of_step = {0};
    step_state step = {
        .of = of,
        .threads = &threads_of_step,
        .spans = spans,
        .num_spans = num_spans,
        .blocks = blocks,
        .rows = rows,
        .blocks_of = blocks_of,
        .slots = slots,
        .cos = cos,
        .sin = sin,
        .x = x,
    };
    long heads = of->query_heads * of->head_width;
    long wide = heads + 2 * of->kv_heads * of->head_width;
    wide = wide > 2 * of->inner ? wide : 2 * of->inner;
    wide = wide > of->width ? wide : of->width;
    step.lora_width = lora_width(&step);
    float *memory =
        malloc(rows * (of->width + wide + heads + of->inner + step.lora_width) * sizeof(float));
    if (!memory && rows)
        return 0;
    step.normed = memory;
    step.wide = step.normed + rows * of->width;
    step.attended = step.wide + rows * wide;
    step.inner = step.attended + rows * heads;
    step.lora_hidden = step.inner + rows * of->inner;
#pragma omp parallel num_threads(threads)
    run_layers(&step, out);
    free(memory);
    return 1;
}
