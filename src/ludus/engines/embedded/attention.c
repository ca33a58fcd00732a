/* Attention of ragged batches over paged keys and values, in float32.
 *
 * keys   [pages, heads, width, PAGE]   transposed, so that a row of a page yields a vector of scores
 * values [pages, heads, PAGE, width]
 *
 * Each query reads only its own sequence and sums in an order that depends only on its position, so results are
 * bit-identical for any batch and any chunking of the prompt.
 */
#include <math.h>
#include <stdint.h>

#define PAGE 16
#define MANY 3 /* maximum number of query heads processed together */
#define WIDE 4 /* vectors of 8 value columns processed together */
#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32), aligned(4)));
#define LOAD(p) (*(const v8 *)(p))
#define STORE(p, v) (*(v8 *)(p) = (v))

typedef struct {
    const int32_t *slots, *positions, *table; /* per token: slot (-1: padding), position; per slot: pages */
    const float *query, *key, *value;         /* element (head h, token t) begins at h * _head + t * _token */
    float *keys, *values, *out;               /* out [tokens, query heads, width] */
    int64_t table_stride, query_heads, heads, width, window;
    int64_t query_head, query_token, key_head, key_token, value_head, value_token;
    float scale, softcap;
} Pass;

void ludus_write(const Pass *a, int64_t first, int64_t last)
{
    const int64_t width = a->width;
    for (int64_t t = first; t < last; t++) {
        if (a->slots[t] < 0) continue;
        const int64_t at = a->positions[t] % PAGE;
        const int64_t page = a->table[a->slots[t] * a->table_stride + a->positions[t] / PAGE];
        for (int64_t h = 0; h < a->heads; h++) {
            const float *key = a->key + h * a->key_head + t * a->key_token;
            const float *value = a->value + h * a->value_head + t * a->value_token;
            float *to_key = a->keys + (page * a->heads + h) * width * PAGE + at;
            float *to_value = a->values + ((page * a->heads + h) * PAGE + at) * width;
            for (int64_t d = 0; d < width; d++) to_key[d * PAGE] = key[d];
            for (int64_t d = 0; d < width; d++) to_value[d] = value[d];
        }
    }
}

/* Compute the scores of `many` queries with the keys of a page, one row of `out` per query; two sums each, so that
 * additions overlap. Pages are scattered in memory, so the next one is prefetched. */
INLINE void score_page(const float *query, int64_t next_query, const float *keys, const float *next_keys,
                       const int64_t width, const int many, float *out, int64_t row)
{
    v8 even[MANY][2] = {{{0}}}, odd[MANY][2] = {{{0}}};
    for (int64_t d = 0; d < width; d += 2) {
        __builtin_prefetch(next_keys + d * PAGE);
        __builtin_prefetch(next_keys + (d + 1) * PAGE);
        for (int i = 0; i < many; i++) {
            const float *q = query + i * next_query + d;
            even[i][0] += q[0] * LOAD(keys + d * PAGE);
            even[i][1] += q[0] * LOAD(keys + d * PAGE + 8);
            odd[i][0] += q[1] * LOAD(keys + (d + 1) * PAGE);
            odd[i][1] += q[1] * LOAD(keys + (d + 1) * PAGE + 8);
        }
    }
    for (int i = 0; i < many; i++) {
        STORE(out + i * row, even[i][0] + odd[i][0]);
        STORE(out + i * row + 8, even[i][1] + odd[i][1]);
    }
}

/* Convert scores to unnormalized weights and return their sum; columns outside [low, high) get weight 0. */
INLINE float weigh(float *scores, int64_t n, int64_t low, int64_t high, float scale, float softcap)
{
    if (softcap > 0)
        for (int64_t j = 0; j < n; j++) scores[j] = softcap * tanhf(scores[j] * scale / softcap);
    else
        for (int64_t j = 0; j < n; j++) scores[j] *= scale;
    for (int64_t j = 0; j < low; j++) scores[j] = -1e30f;
    for (int64_t j = high; j < n; j++) scores[j] = -1e30f;
    float top = -1e30f, total = 0;
    for (int64_t j = 0; j < n; j++) top = scores[j] > top ? scores[j] : top;
    for (int64_t j = 0; j < n; j++) {
        scores[j] = expf(scores[j] - top);
        total += scores[j];
    }
    return total;
}

/* Row i of out = factors[i] * sum of n values weighted by row i; `many` rows of 8 * wide columns, accumulated in
 * registers. */
INLINE void sum_values(const Pass *a, const float *weights, int64_t row, const float *values, const int32_t *pages,
                       int64_t n, const int many, const int wide, const float *factors, float *out)
{
    v8 sum[MANY][WIDE] = {{{0}}};
    const int64_t page = a->heads * PAGE * a->width;
    for (int64_t p = 0; p * PAGE < n; p++) {
        const float *rows = values + pages[p] * page;
        const float *next = values + pages[(p + 1) * PAGE < n ? p + 1 : 0] * page;
        const int64_t count = n - p * PAGE < PAGE ? n - p * PAGE : PAGE;
        for (int64_t j = 0; j < count; j++) {
            for (int w = 0; w < wide; w += 2) __builtin_prefetch(next + j * a->width + 8 * w);
            for (int w = 0; w < wide; w++) {
                const v8 value = LOAD(rows + j * a->width + 8 * w);
                for (int i = 0; i < many; i++) sum[i][w] += weights[i * row + p * PAGE + j] * value;
            }
        }
    }
    for (int i = 0; i < many; i++)
        for (int w = 0; w < wide; w++) STORE(out + i * a->width + 8 * w, sum[i][w] * factors[i]);
}

/* Query heads h to h + many of one token, which share keys and values. */
INLINE void attend_heads(const Pass *a, int64_t t, int64_t h, const int many, float *scratch, const int64_t width)
{
    const int64_t end = a->positions[t] + 1, kv = h / (a->query_heads / a->heads);
    const int64_t begin = a->window > 0 && end > a->window ? end - a->window : 0, from = begin / PAGE;
    const int32_t *pages = a->table + a->slots[t] * a->table_stride + from;
    const int64_t high = end - from * PAGE, count = (high + PAGE - 1) / PAGE, row = count * PAGE;
    const float *query = a->query + h * a->query_head + t * a->query_token;
    const float *keys = a->keys + kv * width * PAGE;
    const int64_t page = a->heads * width * PAGE;
    for (int64_t p = 0; p < count; p++)
        score_page(query, a->query_head, keys + pages[p] * page, keys + pages[p + 1 < count ? p + 1 : 0] * page, width,
                   many, scratch + p * PAGE, row);
    float factors[MANY];
    for (int i = 0; i < many; i++)
        factors[i] = 1 / weigh(scratch + i * row, row, begin - from * PAGE, high, a->scale, a->softcap);
    const float *values = a->values + kv * PAGE * width;
    float *out = a->out + (t * a->query_heads + h) * width;
    int64_t d = 0;
    for (; d + 8 * WIDE <= width; d += 8 * WIDE)
        sum_values(a, scratch, row, values + d, pages, high, many, WIDE, factors, out + d);
    for (; d < width; d += 8) sum_values(a, scratch, row, values + d, pages, high, many, 1, factors, out + d);
}

/* All query heads of one token. The grouping depends only on the model, so a head always uses the same code. */
INLINE void attend_token(const Pass *a, int64_t t, float *scratch, const int64_t width)
{
    const int64_t group = a->query_heads / a->heads;
    for (int64_t h = 0; h < a->query_heads; h += group) {
        int64_t i = 0;
        for (; i + 3 <= group; i += 3) attend_heads(a, t, h + i, 3, scratch, width);
        if (i + 2 == group) attend_heads(a, t, h + i, 2, scratch, width);
        if (i + 1 == group) attend_heads(a, t, h + i, 1, scratch, width);
    }
}

INLINE void attend(const Pass *a, int64_t first, int64_t last, float *scratch, const int64_t width)
{
    for (int64_t t = first; t < last; t++) {
        if (a->slots[t] >= 0)
            attend_token(a, t, scratch, width);
        else
            for (int64_t d = 0; d < a->query_heads * width; d++) a->out[t * a->query_heads * width + d] = 0;
    }
}

/* Tokens first to last; `scratch` holds MANY floats per column of a sequence, rounded up to whole pages.
 * The width is a multiple of 8; common widths are specialized. */
void ludus_attend(const Pass *a, int64_t first, int64_t last, float *scratch)
{
    if (a->width == 32) attend(a, first, last, scratch, 32);
    else if (a->width == 64) attend(a, first, last, scratch, 64);
    else if (a->width == 128) attend(a, first, last, scratch, 128);
    else attend(a, first, last, scratch, a->width);
}
