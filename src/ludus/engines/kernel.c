/* Attention of ragged batches over paged keys and values, in float32.
 *
 * keys   [pages, heads, width, PAGE]   transposed, so that one row of a page gives one vector of scores
 * values [pages, heads, PAGE, width]
 *
 * Each query reads its own sequence only, and sums in an order that depends on its position alone: what else
 * is in the batch, and in how many parts a prompt comes, changes no bit.
 */
#include <math.h>
#include <stdint.h>

#define PAGE 16
#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32), aligned(4)));
#define LOAD(p) (*(const v8 *)(p))
#define STORE(p, v) (*(v8 *)(p) = (v))

typedef struct {
    const int32_t *slots, *positions, *table; /* per token its slot (-1: padding) and position; pages of slots */
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

/* The scores of one query with the keys of a page; two sums each, so that additions overlap. */
INLINE void score_page(const float *query, const float *keys, const int64_t width, float *out)
{
    v8 a = {0}, b = {0}, c = {0}, e = {0};
    for (int64_t d = 0; d < width; d += 2) {
        a += query[d] * LOAD(keys + d * PAGE);
        b += query[d] * LOAD(keys + d * PAGE + 8);
        c += query[d + 1] * LOAD(keys + (d + 1) * PAGE);
        e += query[d + 1] * LOAD(keys + (d + 1) * PAGE + 8);
    }
    STORE(out, a + c);
    STORE(out + 8, b + e);
}

/* Turns scores into weights whose sum is returned; columns outside [low, high) weigh nothing. */
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

/* out[0, 8 * wide) = factor * sum of n weighted values, kept in registers meanwhile. */
INLINE void sum_values(const Pass *a, const float *weights, const float *values, const int32_t *pages, int64_t n,
                       const int wide, float factor, float *out)
{
    v8 sum[4] = {{0}, {0}, {0}, {0}};
    for (int64_t p = 0; p * PAGE < n; p++) {
        const float *rows = values + pages[p] * a->heads * PAGE * a->width;
        const int64_t count = n - p * PAGE < PAGE ? n - p * PAGE : PAGE;
        for (int64_t j = 0; j < count; j++)
            for (int i = 0; i < wide; i++) sum[i] += weights[p * PAGE + j] * LOAD(rows + j * a->width + 8 * i);
    }
    for (int i = 0; i < wide; i++) STORE(out + 8 * i, sum[i] * factor);
}

INLINE void attend_head(const Pass *a, int64_t t, int64_t h, float *scratch, const int64_t width)
{
    const int64_t end = a->positions[t] + 1, kv = h / (a->query_heads / a->heads);
    const int64_t begin = a->window > 0 && end > a->window ? end - a->window : 0, from = begin / PAGE;
    const int32_t *pages = a->table + a->slots[t] * a->table_stride + from;
    const int64_t high = end - from * PAGE, count = (high + PAGE - 1) / PAGE;
    const float *query = a->query + h * a->query_head + t * a->query_token;
    for (int64_t p = 0; p < count; p++)
        score_page(query, a->keys + (pages[p] * a->heads + kv) * width * PAGE, width, scratch + p * PAGE);
    const float total = weigh(scratch, count * PAGE, begin - from * PAGE, high, a->scale, a->softcap);
    const float *values = a->values + kv * PAGE * width;
    float *out = a->out + (t * a->query_heads + h) * width;
    int64_t d = 0;
    for (; d + 32 <= width; d += 32) sum_values(a, scratch, values + d, pages, high, 4, 1 / total, out + d);
    for (; d < width; d += 8) sum_values(a, scratch, values + d, pages, high, 1, 1 / total, out + d);
}

INLINE void attend(const Pass *a, int64_t first, int64_t last, float *scratch, const int64_t width)
{
    for (int64_t t = first; t < last; t++)
        for (int64_t h = 0; h < a->query_heads; h++) {
            if (a->slots[t] >= 0)
                attend_head(a, t, h, scratch, width);
            else
                for (int64_t d = 0; d < width; d++) a->out[(t * a->query_heads + h) * width + d] = 0;
        }
}

/* Tokens first to last; `scratch` has room for one float per column of a sequence, rounded up to whole pages.
 * The width is a multiple of 8; the common ones are compiled apart. */
void ludus_attend(const Pass *a, int64_t first, int64_t last, float *scratch)
{
    if (a->width == 32) attend(a, first, last, scratch, 32);
    else if (a->width == 64) attend(a, first, last, scratch, 64);
    else if (a->width == 128) attend(a, first, last, scratch, 128);
    else attend(a, first, last, scratch, a->width);
}
