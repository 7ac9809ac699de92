/* kvcache.h - the contract of the KV cache that every backend's compiler reads: what a page is, where a row lies, which
 * rows a query sees.
 *
 * A page holds `page_size` tokens (a multiple of KV_BLOCK) of all layers of a group. Contiguous is the one-page case. In a page, each
 * layer has one key plane and one value plane; a plane is a sequence of tiles, one tile per (KV head, block of 32 tokens):
 *
 *   page:   layer 0 | layer 1 | ...                     layer_bytes each
 *   layer:  K of head 0, head 1, ... | V of head 0, head 1, ...
 *   head:   tile of tokens 0..31 | tile of tokens 32..63 | ...  (page_size / 32 tiles)
 *   K tile: [head_k][32]   channel-major: lane t of row d is channel d of token t. A query's scores for 32 keys are one chain
 *                          of multiply-adds per key in the order of d, without horizontal sums; a channel's statistics over
 *                          the block are neighbours.
 *   V tile: [32][head_v]   token-major: row t is added to the output with weight p[t].
 *
 * Keys are stored after RoPE at their absolute position and are never turned again. */
#ifndef KVCACHE_H
#define KVCACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KV_BLOCK 32                    /* tokens in a tile, in every layout */
#define KV_SPLIT 256                   /* keys of one split of a row's attention: splits start at multiples of it */

enum kv_type { KV_F32, KV_F16 };       /* how a key or value element is kept */

static inline size_t kv_type_bytes(enum kv_type t) { return t == KV_F32 ? 4 : 2; }

/* Shape of the pages of one layer group: fixed for a run. */
struct kv_shape {
    int n_layer;                       /* layers in this group */
    int n_kv;                          /* KV heads */
    int head_k, head_v;                /* elements of a key and of a value head */
    enum kv_type type_k, type_v;
    int page_size;                     /* tokens, a multiple of KV_BLOCK */
};

static inline size_t kv_k_tile_bytes(const struct kv_shape *s) { return (size_t)s->head_k * KV_BLOCK * kv_type_bytes(s->type_k); }
static inline size_t kv_v_tile_bytes(const struct kv_shape *s) { return (size_t)s->head_v * KV_BLOCK * kv_type_bytes(s->type_v); }
static inline size_t kv_layer_bytes(const struct kv_shape *s)
{
    return (size_t)s->n_kv * (s->page_size / KV_BLOCK) * (kv_k_tile_bytes(s) + kv_v_tile_bytes(s));
}
static inline size_t kv_page_bytes(const struct kv_shape *s) { return s->n_layer * kv_layer_bytes(s); }

/* One sequence as a kernel sees it in one layer group. */
struct kv_view {
    const struct kv_shape *shape;
    unsigned char *base;               /* page p starts at base + p * kv_page_bytes */
    const int32_t *pages;              /* [tokens / page_size, rounded up]: page of the i-th stretch of page_size tokens */
};

/* The tiles of (layer in group, KV head) that hold token `pos`. */
static inline unsigned char *kv_k_tile(const struct kv_view *v, int layer, int head, int64_t pos)
{
    const struct kv_shape *s = v->shape;
    size_t page = (size_t)v->pages[pos / s->page_size], tile = (size_t)(pos % s->page_size) / KV_BLOCK;
    return v->base + page * kv_page_bytes(s) + layer * kv_layer_bytes(s)
         + ((size_t)head * (s->page_size / KV_BLOCK) + tile) * kv_k_tile_bytes(s);
}
static inline unsigned char *kv_v_tile(const struct kv_view *v, int layer, int head, int64_t pos)
{
    const struct kv_shape *s = v->shape;
    size_t page = (size_t)v->pages[pos / s->page_size], tile = (size_t)(pos % s->page_size) / KV_BLOCK;
    size_t tiles = s->page_size / KV_BLOCK;
    return v->base + page * kv_page_bytes(s) + layer * kv_layer_bytes(s) + s->n_kv * tiles * kv_k_tile_bytes(s)
         + ((size_t)head * tiles + tile) * kv_v_tile_bytes(s);
}

/* The rows that the query at position `pos` sees: [first, first + count). window 0 = all. */
struct kv_range { int64_t first, count; };
static inline struct kv_range kv_visible(int64_t pos, int window)
{
    struct kv_range r = { window > 0 && pos >= window ? pos - window + 1 : 0, 0 };
    r.count = pos + 1 - r.first;
    return r;
}

/* ---- the page pool (kvcache.c) ------------------------------------------------------------------------------------ */

struct error;

/* Pages of one layer group: one reservation of address space, touched only when used. */
struct kv_pool {
    struct kv_shape shape;
    unsigned char *base;
    size_t reserved;                   /* bytes of address space */
    int n_pages, n_free;
    int32_t *free;                     /* stack of free page ids */
    int32_t *refs;                     /* [n_pages] owners of each page */
};

bool kv_pool_open(struct kv_pool *p, const struct kv_shape *shape, int n_pages, struct error *e);
void kv_pool_close(struct kv_pool *p);

/* A sequence's pages in one pool. */
struct kv_table {
    int32_t *pages;                    /* [cap] */
    int n, cap;                        /* pages held; most it may hold */
};
/* The table never grows past `max_tokens`, so that a token loop does not allocate. */
bool kv_table_open(struct kv_table *t, const struct kv_pool *p, int64_t max_tokens, struct error *e);
/* Makes room for `tokens` tokens; false when the pool has no page left (nothing changed then). */
bool kv_table_grow(struct kv_table *t, struct kv_pool *p, int64_t tokens);
/* Gives back the pages past `tokens` tokens. */
void kv_table_cut(struct kv_table *t, struct kv_pool *p, int64_t tokens);
void kv_table_close(struct kv_table *t, struct kv_pool *p);

/* True when reference counts, free list and tables agree: the invariant checker of the tests. */
bool kv_pool_check(const struct kv_pool *p, const struct kv_table *const *tables, int n_tables);

#endif
