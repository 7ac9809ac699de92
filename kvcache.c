/* kvcache.c - the page pool: one reservation of address space, reference counts, and each sequence's table of pages. */
#define _GNU_SOURCE
#include "kvcache.h"

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

bool kv_table_grow(struct kv_table *t, struct kv_pool *p, int64_t tokens)
{
    if (p->n_pages == 0) return true;
    int want = pages_for(p, tokens);
    if (want > t->cap || want - t->n > p->n_free) return false;
    while (t->n < want) {
        int32_t page = p->free[--p->n_free];
        p->refs[page] = 1;
        t->pages[t->n++] = page;
    }
    return true;
}

static void give_back(struct kv_pool *p, int32_t *page)
{
    if (*page >= 0 && --p->refs[*page] == 0) p->free[p->n_free++] = *page;
    *page = -1;
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
