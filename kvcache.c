/* kvcache.c - the page pool: one reservation of address space, reference counts, each sequence's table of pages, and
 * what goes in and out of it: copies of pages, blocks. */
#define _GNU_SOURCE
#include "kvcache_pool.h"

#include <nettle/sha2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- free pages -------------------------------------------------------------------------------------------------- */

void kv_free_push(struct kv_pool *p, int32_t page)
{
    int tier = kv_tier_of(p, page);
    size_t bytes = kv_page_bytes(&p->shape), unit = (size_t)sysconf(_SC_PAGESIZE);
    p->pages[page].newer = p->tier[tier].free;
    p->tier[tier].free = page;
    p->tier[tier].n_free++;
    if (tier == KV_SLOW) return;
    p->memory->used -= bytes;
    if (p->memory->limit == SIZE_MAX || p->memory->device) return;
    /* under a budget, what one pool does not use is another's */
    size_t from = ((size_t)page * bytes + unit - 1) / unit * unit, to = (size_t)(page + 1) * bytes / unit * unit;
    if (to > from) madvise(p->base + from, to - from, MADV_DONTNEED);
}

int32_t kv_free_pop(struct kv_pool *p, int tier)
{
    int32_t page = p->tier[tier].free;
    if (page < 0) return -1;
    p->tier[tier].free = p->pages[page].newer;
    p->tier[tier].n_free--;
    if (tier == KV_FAST) p->memory->used += kv_page_bytes(&p->shape);
    return page;
}

static void give_back(struct kv_pool *p, int32_t *page)
{
    if (*page >= 0 && --p->pages[*page].refs == 0) (p->pages[*page].indexed ? kv_idle_add : kv_free_push)(p, *page);
    *page = -1;
}

/* ---- the pool ---------------------------------------------------------------------------------------------------- */

/* Puts the pages [first, end) on their list, the first on top. */
static void all_free(struct kv_pool *p, int tier, int first, int end)
{
    p->tier[tier] = (struct kv_tier){ first < end ? first : -1, -1, -1, end - first, 0 };
    for (int i = first; i < end; i++) p->pages[i].newer = i + 1 < end ? i + 1 : -1;
}

/* Memory for the pages; `start`: where the file's part begins. */
static bool open_memory(struct kv_pool *p, size_t start, struct error *e)
{
    struct kv_device *d = p->memory->device;
    size_t page = kv_page_bytes(&p->shape), beyond = page * (size_t)(p->n_pages - p->first_slow);
    if (d) {
        p->reserved = page * (size_t)p->n_fast;
        if (p->reserved && !(p->base = d->open(d, p->reserved, false, e))) return false;
        return beyond == 0 || (p->slow = d->open(d, beyond, true, e));
    }
    p->reserved = page * (size_t)p->n_pages;
    p->base = reserve_bytes(p->reserved, "the KV cache: lower --ctx-size or choose smaller -ctk and -ctv types", e);
    if (!p->base) return false;
    p->slow = p->base + page * (size_t)p->first_slow;
    madvise(p->base, page * (size_t)p->n_fast, MADV_HUGEPAGE);      /* tiles of one head lie a page apart */
    return !p->memory->folder || kv_file_open(p, start, e);
}

bool kv_pool_open(struct kv_pool *p, const struct kv_shape *shape, int n_pages, int n_fast, struct kv_memory *memory,
                  struct error *e)
{
    *p = (struct kv_pool){ .shape = *shape, .memory = memory, .file = -1 };
    if (n_pages == 0) return true;     /* the model has no layers of this group */
    size_t page = kv_page_bytes(shape), unit = (size_t)sysconf(_SC_PAGESIZE);
    /* in floating point, since the size of one page alone may be more than a size_t holds */
    double most = kv_token_bytes(shape) * shape->page_size * n_pages * (memory->folder ? 2 : 1);
    if (most > (double)PTRDIFF_MAX - 2 * (double)page || n_pages > INT32_MAX / 2 - 1)
        return fail(e, GEN_RUN, "the KV cache is too large to address: lower --ctx-size");
    size_t start = (page * (size_t)n_pages + unit - 1) / unit * unit;  /* the file's part starts at a system page */
    bool file = memory->folder && !memory->device;
    p->n_fast = p->most_idle = n_fast;
    p->first_slow = file ? (int)((start + page - 1) / page) : n_fast;
    p->n_pages = file ? p->first_slow + n_pages : memory->folder ? n_pages : n_fast;
    for (p->n_buckets = 1; p->n_buckets < n_pages; ) p->n_buckets *= 2;
    p->pages = alloc_zeroed(p->n_pages, sizeof *p->pages, "the list of KV pages", e);
    p->buckets = alloc_zeroed(p->n_buckets, sizeof *p->buckets, "the index of KV pages", e);
    if (!p->pages || !p->buckets) return kv_pool_close(p), false;
    p->tokens = reserve_bytes(sizeof *p->tokens * p->n_pages * shape->page_size, "the KV pages' tokens", e);
    if (!p->tokens || !open_memory(p, start, e)) return kv_pool_close(p), false;
    memset(p->buckets, -1, sizeof *p->buckets * p->n_buckets);
    all_free(p, KV_FAST, 0, n_fast);
    all_free(p, KV_SLOW, p->first_slow, p->n_pages);
    memory->pools[memory->n_pools++] = p;
    return true;
}

void kv_pool_close(struct kv_pool *p)
{
    struct kv_device *device = p->memory ? p->memory->device : NULL;
    if (device && p->base) device->close(device, p->base, false);
    if (device && p->slow) device->close(device, p->slow, true);
    if (!device) release_bytes(p->base, p->reserved);
    release_bytes(p->tokens, sizeof *p->tokens * p->n_pages * p->shape.page_size);
    free(p->pages);
    free(p->buckets);
    if (p->n_pages && p->file >= 0) close(p->file);
    *p = (struct kv_pool){ .file = -1 };
}

void kv_pool_sparse(const struct kv_pool *p)
{
    if (p->base) madvise(p->base, p->reserved, MADV_NOHUGEPAGE);
}

static int pages_for(const struct kv_pool *p, int64_t tokens)
{
    return (int)((tokens + p->shape.page_size - 1) / p->shape.page_size);
}

/* ---- tables ------------------------------------------------------------------------------------------------------ */

bool kv_table_open(struct kv_table *t, struct kv_pool *p, int64_t max_tokens, struct error *e)
{
    *t = (struct kv_table){ .cap = p->n_pages ? pages_for(p, max_tokens) : 0 };
    if (t->cap == 0) return true;
    t->pages = reserve_bytes(t->cap * sizeof *t->pages, "a page table", e);
    if (!t->pages) return false;
    t->next = p->tables;
    if (t->next) t->next->before = t;
    p->tables = t;
    return true;
}

/* The page that token `pos` lies in is covered, but gone or owned by others as well. */
static bool not_own(const struct kv_table *t, const struct kv_pool *p, int64_t pos)
{
    int64_t i = pos / p->shape.page_size;
    return i < t->n && (t->pages[i] < 0 || p->pages[t->pages[i]].refs > 1);
}

/* Copies n pieces between the pool and this process, or within the pool; steps: from a piece to the next. */
static bool copy_pieces(const struct kv_pool *p, unsigned char *dst, size_t dst_step, const unsigned char *src,
                        size_t src_step, size_t bytes, int n)
{
    struct kv_device *d = p->memory->device;
    if (d) return d->copy(d, dst, dst_step, src, src_step, bytes, n);
    for (int i = 0; i < n; i++) memcpy(dst + i * dst_step, src + i * src_step, bytes);
    return true;
}

void kv_pool_copy(const struct kv_pool *p, int32_t to, int32_t from, int64_t tokens)
{
    const struct kv_shape *s = &p->shape;
    size_t tiles = s->page_size / KV_BLOCK, used = (size_t)(tokens + KV_BLOCK - 1) / KV_BLOCK;
    size_t plane[2] = { kv_k_tile_bytes(s), kv_v_tile_bytes(s) };
    unsigned char *dst = kv_page_at(p, to);
    const unsigned char *src = kv_page_at(p, from);
    if (used == tiles) copy_pieces(p, dst, 0, src, 0, kv_page_bytes(s), 1);
    for (int i = 0; used < tiles && i < 2 * s->n_layer; i++) {
        size_t step = tiles * plane[i % 2];
        copy_pieces(p, dst, step, src, step, used * plane[i % 2], s->n_kv);
        dst += s->n_kv * step;
        src += s->n_kv * step;
    }
    if (p->copied) p->copied(p->copied_user, p, to, from, tokens);
}

int kv_table_lacks(const struct kv_table *t, const struct kv_pool *p, int64_t from, int64_t to)
{
    if (p->n_pages == 0 || to <= from) return 0;
    int want = pages_for(p, to);
    return (want > t->n ? want - t->n : 0) + not_own(t, p, from);
}

bool kv_table_grow(struct kv_table *t, struct kv_pool *p, int64_t from, int64_t to)
{
    if (p->n_pages == 0 || to <= from) return true;
    int want = pages_for(p, to), had = t->n, first = (int)(from / p->shape.page_size);
    if (want > t->cap) return false;
    if (not_own(t, p, from)) {
        int32_t own = kv_page_take(p);
        if (own < 0) return false;
        if (t->pages[first] >= 0) kv_pool_copy(p, own, t->pages[first], from % p->shape.page_size);
        give_back(p, &t->pages[first]);
        t->pages[first] = own;
    } else if (first < t->n && p->pages[t->pages[first]].indexed) kv_index_forget(p, t->pages[first]);
    while (t->n < want) {
        int32_t page = kv_page_take(p);
        if (page < 0) break;
        t->pages[t->n++] = page;
    }
    if (t->n < want) kv_table_cut(t, p, (int64_t)had * p->shape.page_size);
    return t->n >= want;
}

void kv_table_share(struct kv_table *t, const struct kv_table *from, struct kv_pool *p)
{
    t->coming = from->coming;
    for (t->n = 0; t->n < from->n; t->n++) {
        t->pages[t->n] = from->pages[t->n];
        if (t->pages[t->n] >= 0) p->pages[t->pages[t->n]].refs++;
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

void kv_table_remove(struct kv_table *t, struct kv_pool *p, int64_t from, int64_t to)
{
    if (p->n_pages == 0 || to <= from) return;
    int first = (int)(from / p->shape.page_size), end = (int)(to / p->shape.page_size);
    for (int i = first; i < end; i++) give_back(p, &t->pages[i]);
    memmove(t->pages + first, t->pages + end, (t->n - end) * sizeof *t->pages);
    t->n -= end - first;
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
    if (t->pages) {
        *(t->before ? &t->before->next : &p->tables) = t->next;
        if (t->next) t->next->before = t->before;
    }
    release_bytes(t->pages, t->cap * sizeof *t->pages);
    *t = (struct kv_table){ 0 };
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

size_t kv_block_bytes(const struct kv_shape *s)
{
    return (size_t)s->n_layer * s->n_kv * (kv_k_tile_bytes(s) + kv_v_tile_bytes(s));
}

/* Copies the block to `out`, or there from `in`, whichever is not NULL. A page of one block is in this order. */
static bool copy_block(const struct kv_table *t, const struct kv_pool *p, int64_t pos, unsigned char *out,
                       const unsigned char *in)
{
    const struct kv_shape *s = &p->shape;
    size_t tiles = s->page_size / KV_BLOCK, at = pos % s->page_size / KV_BLOCK;
    size_t plane[2] = { kv_k_tile_bytes(s), kv_v_tile_bytes(s) };
    int planes = tiles == 1 ? 1 : 2 * s->n_layer, n = tiles == 1 ? 1 : s->n_kv;
    unsigned char *page = kv_page_at(p, t->pages[pos / s->page_size]);
    bool ok = true;
    for (int i = 0; i < planes && ok; i++) {
        size_t bytes = tiles == 1 ? kv_page_bytes(s) : plane[i % 2], step = tiles * bytes;
        if (out) ok = copy_pieces(p, out, bytes, page + at * bytes, step, bytes, n), out += n * bytes;
        else ok = copy_pieces(p, page + at * bytes, step, in, bytes, bytes, n), in += n * bytes;
        page += n * step;
    }
    return ok;
}

bool kv_block_read(const struct kv_table *t, const struct kv_pool *p, int64_t pos, void *out)
{
    return copy_block(t, p, pos, out, NULL);
}

void kv_block_write(const struct kv_table *t, const struct kv_pool *p, int64_t pos, const void *in)
{
    copy_block(t, p, pos, NULL, in);
}

const void *kv_block_at(const struct kv_table *t, const struct kv_pool *p, int64_t pos)
{
    bool whole = p->shape.page_size == KV_BLOCK && !p->memory->device;
    return whole ? kv_page_at(p, t->pages[pos / KV_BLOCK]) : NULL;
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

/* ---- the invariants ---------------------------------------------------------------------------------------------- */

enum { OWNED = 1, FREE, IDLE };

/* Walks a tier's two lists; each page is on one of them, once, and has no owner. */
static bool check_lists(const struct kv_pool *p, int tier, uint8_t *state)
{
    const struct kv_tier *t = &p->tier[tier];
    int n = 0;
    for (int32_t i = t->free; i >= 0; i = p->pages[i].newer, n++) {
        if (i >= p->n_pages || kv_tier_of(p, i) != tier || state[i] || p->pages[i].indexed) return false;
        state[i] = FREE;
    }
    if (n != t->n_free) return false;
    n = 0;
    for (int32_t i = t->oldest, before = -1; i >= 0; before = i, i = p->pages[i].newer, n++) {
        if (i >= p->n_pages || kv_tier_of(p, i) != tier || state[i] || !p->pages[i].indexed ||
            p->pages[i].older != before || (p->pages[i].newer < 0 && t->newest != i))
            return false;
        state[i] = IDLE;
    }
    return n == t->n_idle && (n > 0 || t->newest < 0);
}

bool kv_pool_check(const struct kv_pool *p)
{
    int32_t *owners = calloc((size_t)p->n_pages + 1, sizeof *owners);
    uint8_t *state = calloc((size_t)p->n_pages + 1, 1);
    bool ok = owners && state;
    int indexed = 0, found = 0;
    for (const struct kv_table *t = p->tables; t && ok; t = t->next)
        for (int k = 0; k < t->n && ok; k++) {
            int32_t page = t->pages[k];
            ok = page < p->n_pages && (page < p->n_fast || page >= p->first_slow);
            if (ok && page >= 0) owners[page]++, state[page] = OWNED;
        }
    ok = ok && check_lists(p, KV_FAST, state) && check_lists(p, KV_SLOW, state);
    for (int i = 0; i < p->n_pages && ok; i++) {
        bool gap = i >= p->n_fast && i < p->first_slow;
        ok = gap ? !state[i] : state[i] && owners[i] == (state[i] == OWNED ? p->pages[i].refs : 0);
        indexed += p->pages[i].indexed;
    }
    for (int b = 0; b < p->n_buckets && ok; b++)
        for (int32_t i = p->buckets[b]; i >= 0 && ok; i = p->pages[i].chain) {
            const int32_t *tokens = p->tokens + (size_t)i * p->shape.page_size;
            ok = p->pages[i].indexed && kv_index_find(p, p->pages[i].key, tokens) == i && ++found <= indexed;
        }
    free(owners);
    free(state);
    return ok && found == indexed;
}
