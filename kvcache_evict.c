/* kvcache_evict.c - importance eviction: which rows of the middle stay, and how the holes are closed.
 *
 * The rows of a layer and KV head, with a budget of b blocks:
 *
 *     block 0 (the sinks) | the middle: whole blocks | the recent ones: whole blocks, then the one begun
 *
 * The first and the recent ones always stay. Of the middle those rows stay that the queries have looked at most, in
 * their order, moved together to whole blocks; each head has rows of its own, but all have the same number. */
#include "kvcache.h"

#include <string.h>

struct kv_middle kv_middle_of(int64_t rows, int64_t budget)
{
    int64_t blocks = (rows + KV_BLOCK - 1) / KV_BLOCK, most = budget / KV_BLOCK;
    if (blocks <= most) return (struct kv_middle){ 0, 0, 0 };
    int64_t recent = most / KV_RECENT_PART > 2 ? most / KV_RECENT_PART : 2;
    return (struct kv_middle){ KV_BLOCK, (blocks - recent) * KV_BLOCK, (most - 1 - recent) * KV_BLOCK };
}

static void swap(uint64_t *a, uint64_t *b)
{
    uint64_t x = *a;
    *a = *b;
    *b = x;
}

/* The k-th largest of x[n], 1 <= k <= n; x is put into another order (Hoare's selection). */
static uint64_t select_largest(uint64_t *x, int64_t n, int64_t k)
{
    int64_t low = 0, high = n - 1, at = k - 1;
    while (low < high) {
        uint64_t pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) swap(&x[i++], &x[j--]);
        }
        if (at <= j) high = j;
        else if (at >= i) low = i;
        else break;
    }
    return x[at];
}

/* Moves row `from` of a tile to row `to` of another; sealed types with their scales. int4 has no rows of its own. */
static void move_row(unsigned char *dst, int to, const unsigned char *src, int from, enum kv_type type, int head,
                     bool keys)
{
    size_t scales = kv_scale_bytes(type, head, keys), size = kv_code_bytes(type, head) / ((size_t)head * KV_BLOCK);
    for (int b = 0; b < kv_blocks(type, head, keys); b++)
        memcpy(dst + 2 * (b * KV_BLOCK + to), src + 2 * (b * KV_BLOCK + from), 2);
    dst += scales;
    src += scales;
    if (!keys) memcpy(dst + to * head * size, src + from * head * size, head * size);
    for (int d = 0; keys && d < head; d++)
        if (size == 1) dst[d * KV_BLOCK + to] = src[d * KV_BLOCK + from];
        else memcpy(dst + (d * KV_BLOCK + to) * size, src + (d * KV_BLOCK + from) * size, size);
}

/* Chooses what stays of one head's middle; its masses move together. `score` holds those of the units; `scratch` takes
 * as many numbers. */
static void choose(const struct kv_middle *m, int64_t unit, const uint64_t *score, uint64_t *scratch, uint64_t *mass,
                   int32_t *kept)
{
    int64_t n = (m->end - m->begin) / unit, keep = m->keep / unit, above = 0, to = m->begin;
    memcpy(scratch, score, n * sizeof *scratch);
    uint64_t least = keep ? select_largest(scratch, n, keep) : UINT64_MAX;
    for (int64_t i = 0; i < n; i++) above += score[i] > least;
    int64_t ties = n;                  /* of rows with equal masses the latest stay */
    for (int64_t left = keep - above; left > 0; ) left -= score[--ties] == least;
    for (int64_t i = 0; i < n; i++) {
        if (!(score[i] > least || (score[i] == least && i >= ties && keep))) continue;
        int64_t from = m->begin + i * unit;
        if (from != to) memcpy(mass + to, mass + from, unit * sizeof *mass);
        *kept++ = (int32_t)from;
        to += unit;
    }
}

/* What a row counts as: the highest of its own mass and those of the rows just before, so that what follows the place
 * that was looked at stays with it: the answer to the question, the rest of the word. (SnapKV pools over both sides;
 * over one, half as many rows are kept for the sake of another, with the same answers.) */
static uint64_t score_of(const uint64_t *mass, const struct kv_middle *m, int64_t row)
{
    uint64_t most = 0;
    for (int64_t i = row - KV_POOL; i <= row; i++)
        if (i >= m->begin && mass[i] > most) most = mass[i];
    return most;
}

int64_t kv_unit(const struct kv_shape *s) { return s->type_k == KV_INT4 || s->type_v == KV_INT4 ? KV_BLOCK : 1; }

void kv_choose(const struct kv_view *v, const struct kv_middle *m, int64_t rows, uint64_t *scratch, int32_t *kept)
{
    const struct kv_shape *shape = v->main.shape;
    int64_t n = m->end - m->begin, unit = kv_unit(shape);
    uint64_t *score = scratch, *mass = v->mass;
    for (int i = 0; i < shape->n_layer * shape->n_kv; i++, mass += v->mass_rows, kept += m->keep / unit) {
        for (int64_t k = 0; k < n / unit; k++) score[k] = 0;
        for (int64_t k = 0; k < n; k++) score[k / unit] += score_of(mass, m, m->begin + k);
        choose(m, unit, score, scratch + n, mass, kept);
        for (int64_t k = 0; k < rows; k++) mass[k] = (uint64_t)((double)mass[k] * v->fade);
        memmove(mass + m->begin + m->keep, mass + m->end, (rows - m->end) * sizeof *mass);
        memset(mass + m->begin + m->keep + rows - m->end, 0, (n - m->keep) * sizeof *mass);
    }
}

void kv_compact(const struct kv_view *v, const struct kv_middle *m, const int32_t *kept)
{
    const struct kv_shape *shape = v->main.shape;
    int64_t unit = kv_unit(shape);
    for (int layer = 0; layer < shape->n_layer; layer++)
        for (int head = 0; head < shape->n_kv; head++)
            for (int64_t to = m->begin; to < m->begin + m->keep; to += unit) {
                int64_t from = *kept++;
                if (from == to) continue;
                unsigned char *k = kv_k_tile(&v->main, layer, head, from), *k2 = kv_k_tile(&v->main, layer, head, to);
                unsigned char *u = kv_v_tile(&v->main, layer, head, from), *u2 = kv_v_tile(&v->main, layer, head, to);
                if (unit == KV_BLOCK) {
                    memcpy(k2, k, kv_k_tile_bytes(shape));
                    memcpy(u2, u, kv_v_tile_bytes(shape));
                } else {
                    move_row(k2, (int)(to % KV_BLOCK), k, (int)(from % KV_BLOCK), shape->type_k, shape->head_k, true);
                    move_row(u2, (int)(to % KV_BLOCK), u, (int)(from % KV_BLOCK), shape->type_v, shape->head_v, false);
                }
            }
}
