/* kvcache_pool.h - what the parts of the page pool share with each other, and with nobody else. */
#ifndef KVCACHE_POOL_H
#define KVCACHE_POOL_H

#include "base.h"
#include "kvcache.h"

static inline int kv_tier_of(const struct kv_pool *p, int32_t page)
{
    return page >= p->first_slow ? KV_SLOW : KV_FAST;
}
static inline unsigned char *kv_page_at(const struct kv_pool *p, int32_t page)
{
    size_t bytes = kv_page_bytes(&p->shape);
    return page < p->first_slow ? p->base + (size_t)page * bytes : p->slow + (size_t)(page - p->first_slow) * bytes;
}

static inline bool kv_has_slow(const struct kv_pool *p) { return p->first_slow < p->n_pages; }
/* Whoever gets a page or finds it by its key may use it at once. */
static inline void kv_settle(const struct kv_pool *p)
{
    if (p->memory->device) p->memory->device->settle(p->memory->device);
}

/* ---- kvcache.c: the list of free pages. A page taken off it has no owner yet. */
void kv_free_push(struct kv_pool *p, int32_t page);
int32_t kv_free_pop(struct kv_pool *p, int tier);                    /* -1 = none */

/* ---- kvcache_index.c */
void kv_idle_add(struct kv_pool *p, int32_t page);                   /* as the one used last */
void kv_idle_remove(struct kv_pool *p, int32_t page);
void kv_index_forget(struct kv_pool *p, int32_t page);               /* an idle page becomes a free one */
void kv_index_rename(struct kv_pool *p, int32_t from, int32_t to);   /* `to` takes the place of `from` */

/* ---- kvcache_tier.c */
/* start: where in the pool the file's part begins. */
bool kv_file_open(struct kv_pool *p, size_t start, struct error *e);
/* A free page, in memory if that can be had: idle pages make room first, then parked tables, then the oldest pages of
 * the others. -1 = none. */
int32_t kv_page_take(struct kv_pool *p);

#endif
