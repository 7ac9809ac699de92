/* kvcache_index.c - the index of full pages: a hash table by key, and the idle pages in the order of their last use. */
#include "kvcache_pool.h"

#include <string.h>

/* ---- idle pages: one list per tier ------------------------------------------------------------------------------- */

void kv_idle_add(struct kv_pool *p, int32_t page)
{
    struct kv_tier *t = &p->tier[kv_tier_of(p, page)];
    p->pages[page].older = t->newest;
    p->pages[page].newer = -1;
    *(t->newest < 0 ? &t->oldest : &p->pages[t->newest].newer) = page;
    t->newest = page;
    t->n_idle++;
}

void kv_idle_remove(struct kv_pool *p, int32_t page)
{
    struct kv_tier *t = &p->tier[kv_tier_of(p, page)];
    struct kv_page *x = &p->pages[page];
    *(x->older < 0 ? &t->oldest : &p->pages[x->older].newer) = x->newer;
    *(x->newer < 0 ? &t->newest : &p->pages[x->newer].older) = x->older;
    t->n_idle--;
}

/* ---- the hash table: keys are evenly spread already -------------------------------------------------------------- */

static int32_t *bucket(const struct kv_pool *p, const uint8_t *key)
{
    uint32_t h;
    memcpy(&h, key, sizeof h);
    return &p->buckets[h & (uint32_t)(p->n_buckets - 1)];
}

/* The link of its chain that leads to the page. */
static int32_t *link_to(struct kv_pool *p, int32_t page)
{
    int32_t *at = bucket(p, p->pages[page].key);
    while (*at != page) at = &p->pages[*at].chain;
    return at;
}

static int32_t *tokens_of(const struct kv_pool *p, int32_t page)
{
    return p->tokens + (size_t)page * p->shape.page_size;
}

int32_t kv_index_find(const struct kv_pool *p, const uint8_t key[KV_KEY], const int32_t *tokens)
{
    size_t bytes = sizeof *tokens * p->shape.page_size;
    for (int32_t i = *bucket(p, key); i >= 0; i = p->pages[i].chain)
        if (!memcmp(p->pages[i].key, key, KV_KEY) && !memcmp(tokens_of(p, i), tokens, bytes)) return i;
    return -1;
}

void kv_index_forget(struct kv_pool *p, int32_t page)
{
    struct kv_page *x = &p->pages[page];
    *link_to(p, page) = x->chain;
    x->indexed = false;
    if (x->refs) return;
    kv_idle_remove(p, page);
    kv_free_push(p, page);
}

void kv_index_rename(struct kv_pool *p, int32_t from, int32_t to)
{
    const struct kv_page *x = &p->pages[from];
    *link_to(p, from) = to;
    if (!x->refs) kv_idle_remove(p, from);
    p->pages[to] = *x;
    if (!x->refs) kv_idle_add(p, to);
    memcpy(tokens_of(p, to), tokens_of(p, from), sizeof *p->tokens * p->shape.page_size);
}

void kv_index_add(struct kv_table *t, struct kv_pool *p, int i, const uint8_t key[KV_KEY], const int32_t *tokens)
{
    int32_t own = t->pages[i];
    struct kv_page *x = &p->pages[own];
    if (x->indexed) return;
    int32_t same = kv_index_find(p, key, tokens);
    if (same >= 0) {
        if (p->pages[same].refs++ == 0) kv_idle_remove(p, same);
        kv_settle(p);
        t->pages[i] = same;
        if (--x->refs == 0) kv_free_push(p, own);
        return;
    }
    memcpy(x->key, key, KV_KEY);
    memcpy(tokens_of(p, own), tokens, sizeof *tokens * p->shape.page_size);
    x->chain = *bucket(p, key);
    *bucket(p, key) = own;
    x->indexed = true;
}

void kv_table_adopt(struct kv_table *t, struct kv_pool *p, int32_t page)
{
    if (p->pages[page].refs++ == 0) kv_idle_remove(p, page);
    kv_settle(p);
    t->pages[t->n++] = page;
}
