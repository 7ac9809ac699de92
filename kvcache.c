/* kvcache.c - the page pool: one reservation of address space, reference counts, each sequence's table of pages, and
 * what goes in and out of it: copies of pages, blocks. */
#define _GNU_SOURCE
#include "kvcache.h"

#include <nettle/sha2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base.h"

bool kv_pool_open(struct kv_pool *p, const struct kv_shape *shape, int n_pages, struct error *e)
{
    *p = (struct kv_pool){ .shape = *shape, .n_pages = n_pages };
    if (n_pages == 0) return true;     /* the model has no layers of this group */
    /* in floating point, since the size of one page alone may be more than a size_t holds */
    if (kv_token_bytes(shape) * shape->page_size * n_pages > (double)PTRDIFF_MAX)
        return fail(e, GEN_RUN, "the KV cache is too large to address: lower --ctx-size");
    p->reserved = kv_page_bytes(shape) * (size_t)n_pages;
    p->free = alloc_zeroed(n_pages, sizeof *p->free, "the list of free KV pages", e);
    p->refs = alloc_zeroed(n_pages, sizeof *p->refs, "the KV pages' reference counts", e);
    if (!p->free || !p->refs) return kv_pool_close(p), false;
    p->base = reserve_bytes(p->reserved, "the KV cache: lower --ctx-size or choose smaller -ctk and -ctv types", e);
    if (!p->base) return kv_pool_close(p), false;
    madvise(p->base, p->reserved, MADV_HUGEPAGE);      /* tiles of one head lie a page apart */
    for (int i = 0; i < n_pages; i++) p->free[i] = n_pages - 1 - i;    /* page 0 is handed out first */
    p->n_free = n_pages;
    return true;
}

void kv_pool_close(struct kv_pool *p)
{
    release_bytes(p->base, p->reserved);
    free(p->free);
    free(p->refs);
    *p = (struct kv_pool){ 0 };
}

void kv_pool_sparse(const struct kv_pool *p)
{
    if (p->base) madvise(p->base, p->reserved, MADV_NOHUGEPAGE);
}

static int pages_for(const struct kv_pool *p, int64_t tokens)
{
    return (int)((tokens + p->shape.page_size - 1) / p->shape.page_size);
}

bool kv_table_open(struct kv_table *t, const struct kv_pool *p, int64_t max_tokens, struct error *e)
{
    *t = (struct kv_table){ .cap = p->n_pages ? pages_for(p, max_tokens) : 0 };
    if (t->cap == 0) return true;
    t->pages = reserve_bytes(t->cap * sizeof *t->pages, "a page table", e);
    return t->pages != NULL;
}

/* The page that token `pos` lies in is covered, but gone or owned by others as well. */
static bool not_own(const struct kv_table *t, const struct kv_pool *p, int64_t pos)
{
    int64_t i = pos / p->shape.page_size;
    return i < t->n && (t->pages[i] < 0 || p->refs[t->pages[i]] > 1);
}

/* Only the first page of a range can be so: those after it are new. */
int kv_table_needs(const struct kv_table *t, const struct kv_pool *p, int64_t from, int64_t to)
{
    if (p->n_pages == 0 || to <= from) return 0;
    int more = pages_for(p, to) - t->n;
    return (more > 0 ? more : 0) + not_own(t, p, from);
}

static int32_t take(struct kv_pool *p)
{
    int32_t page = p->free[--p->n_free];
    p->refs[page] = 1;
    return page;
}

static void give_back(struct kv_pool *p, int32_t *page)
{
    if (*page >= 0 && --p->refs[*page] == 0) p->free[p->n_free++] = *page;
    *page = -1;
}

static unsigned char *page_at(const struct kv_pool *p, int32_t page)
{
    return p->base + (size_t)page * kv_page_bytes(&p->shape);
}

void kv_pool_copy(const struct kv_pool *p, int32_t to, int32_t from, int64_t tokens)
{
    const struct kv_shape *s = &p->shape;
    size_t tiles = s->page_size / KV_BLOCK, used = (size_t)(tokens + KV_BLOCK - 1) / KV_BLOCK;
    size_t plane[2] = { kv_k_tile_bytes(s), kv_v_tile_bytes(s) };
    unsigned char *dst = page_at(p, to);
    const unsigned char *src = page_at(p, from);
    for (int i = 0; i < 2 * s->n_layer; i++)
        for (int h = 0; h < s->n_kv; h++) {
            memcpy(dst, src, used * plane[i % 2]);
            dst += tiles * plane[i % 2];
            src += tiles * plane[i % 2];
        }
    if (p->copied) p->copied(p->copied_user, p, to, from, tokens);
}

bool kv_table_grow(struct kv_table *t, struct kv_pool *p, int64_t from, int64_t to)
{
    if (p->n_pages == 0) return true;
    int want = pages_for(p, to);
    if (want > t->cap || kv_table_needs(t, p, from, to) > p->n_free) return false;
    if (not_own(t, p, from)) {
        int32_t *page = &t->pages[from / p->shape.page_size], own = take(p);
        if (*page >= 0) kv_pool_copy(p, own, *page, from % p->shape.page_size);
        give_back(p, page);
        *page = own;
    }
    while (t->n < want) t->pages[t->n++] = take(p);
    return true;
}

void kv_table_share(struct kv_table *t, const struct kv_table *from, struct kv_pool *p)
{
    for (t->n = 0; t->n < from->n; t->n++) {
        t->pages[t->n] = from->pages[t->n];
        if (t->pages[t->n] >= 0) p->refs[t->pages[t->n]]++;
    }
}

void kv_table_skip(struct kv_table *t, const struct kv_pool *p, int64_t tokens)
{
    if (p->n_pages == 0) return;
    while (t->n < pages_for(p, tokens)) t->pages[t->n++] = -1;
}

void kv_table_cut(struct kv_table *t, struct kv_pool *p, int64_t tokens)
{
    if (p->n_pages == 0) return;
    for (int keep = pages_for(p, tokens); t->n > keep; ) give_back(p, &t->pages[--t->n]);
}

void kv_table_drop(struct kv_table *t, struct kv_pool *p, int64_t from, int64_t to)
{
    if (p->n_pages == 0) return;
    int end = (int)(to / p->shape.page_size);
    for (int i = pages_for(p, from); i < end && i < t->n; i++) give_back(p, &t->pages[i]);
}

bool kv_table_holds(const struct kv_table *t, const struct kv_pool *p, int64_t from, int64_t to)
{
    if (p->n_pages == 0 || to <= from) return true;
    int end = pages_for(p, to);
    bool there = end <= t->n;
    for (int i = (int)(from / p->shape.page_size); i < end && there; i++) there = t->pages[i] >= 0;
    return there;
}

void kv_table_close(struct kv_table *t, struct kv_pool *p)
{
    kv_table_cut(t, p, 0);
    release_bytes(t->pages, t->cap * sizeof *t->pages);
    *t = (struct kv_table){ 0 };
}

/* Calls copy(tile in the cache, place in `flat`, bytes) for each tile of the block, in the order of kv_block_read. */
static void each_tile(const struct kv_table *t, const struct kv_pool *p, int64_t pos, unsigned char *flat,
                      void (*copy)(unsigned char *tile, unsigned char *at, size_t bytes))
{
    const struct kv_shape *s = &p->shape;
    struct kv_slots slots = { s, p->base, t->pages };
    size_t k = kv_k_tile_bytes(s), v = kv_v_tile_bytes(s);
    for (int layer = 0; layer < s->n_layer; layer++) {
        for (int h = 0; h < s->n_kv; h++, flat += k) copy(kv_k_tile(&slots, layer, h, pos), flat, k);
        for (int h = 0; h < s->n_kv; h++, flat += v) copy(kv_v_tile(&slots, layer, h, pos), flat, v);
    }
}
static void tile_out(unsigned char *tile, unsigned char *at, size_t bytes) { memcpy(at, tile, bytes); }
static void tile_in(unsigned char *tile, unsigned char *at, size_t bytes) { memcpy(tile, at, bytes); }

size_t kv_block_bytes(const struct kv_shape *s)
{
    return (size_t)s->n_layer * s->n_kv * (kv_k_tile_bytes(s) + kv_v_tile_bytes(s));
}

void kv_block_read(const struct kv_table *t, const struct kv_pool *p, int64_t pos, void *out)
{
    each_tile(t, p, pos, out, tile_out);
}

void kv_block_write(const struct kv_table *t, const struct kv_pool *p, int64_t pos, const void *in)
{
    each_tile(t, p, pos, (unsigned char *)in, tile_in);
}

void kv_block_key(const uint8_t before[KV_KEY], const int32_t tokens[KV_BLOCK], uint8_t key[KV_KEY])
{
    struct sha256_ctx c;
    uint8_t bytes[4 * KV_BLOCK];       /* the tokens in little endian */
    for (int i = 0; i < 4 * KV_BLOCK; i++) bytes[i] = (uint8_t)((uint32_t)tokens[i / 4] >> 8 * (i % 4));
    sha256_init(&c);
    sha256_update(&c, KV_KEY, before);
    sha256_update(&c, sizeof bytes, bytes);
    sha256_digest(&c, KV_KEY, key);
}

bool kv_pool_check(const struct kv_pool *p, const struct kv_table *const *tables, int n_tables)
{
    int32_t *seen = calloc((size_t)p->n_pages + 1, sizeof *seen);
    if (!seen) return false;
    bool ok = true;
    for (int i = 0; i < n_tables; i++)
        for (int k = 0; k < tables[i]->n; k++) {
            int32_t page = tables[i]->pages[k];
            if (page >= p->n_pages) ok = false;
            else if (page >= 0) seen[page]++;
        }
    for (int i = 0; i < p->n_pages; i++) ok = ok && seen[i] == p->refs[i];
    for (int i = 0; i < p->n_free && ok; i++) {
        ok = p->free[i] >= 0 && p->free[i] < p->n_pages && seen[p->free[i]] == 0;
        if (ok) seen[p->free[i]] = -1; /* a page on the list twice is found by this mark */
    }
    int unused = 0;
    for (int i = 0; i < p->n_pages; i++) unused += p->refs[i] == 0;
    ok = ok && unused == p->n_free;
    free(seen);
    return ok;
}
