/* kvcache_tier.c - pages in memory within a budget, and beyond it in a mapped file, or in the memory of a device's
 * host. A page is moved by copying it and changing its number in the tables that own it. */
#define _GNU_SOURCE
#include "kvcache_pool.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { FILE_STEP = 16 << 20 };         /* bytes by which a file is made longer at least */

/* ---- the file ---------------------------------------------------------------------------------------------------- */

bool kv_file_open(struct kv_pool *p, size_t start, struct error *e)
{
    const char *folder = p->memory->folder;
    char path[4200];
    p->file = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (p->file < 0) {                 /* not every file system makes files without a name */
        snprintf(path, sizeof path, "%s/gen-kv-XXXXXX", folder);
        p->file = mkostemp(path, O_CLOEXEC);
        if (p->file >= 0) unlink(path);
    }
    if (p->file < 0)
        return fail(e, GEN_USAGE, "--kv-offload %s: no file can be made there: %s", folder, strerror(errno));
    void *at = mmap(p->base + start, p->reserved - start, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, p->file, 0);
    return at != MAP_FAILED
        || fail(e, GEN_RUN, "--kv-offload %s: the file cannot be mapped: %s", folder, strerror(errno));
}

/* Where in the file a page ends. */
static size_t end_in_file(const struct kv_pool *p, int32_t page)
{
    size_t bytes = kv_page_bytes(&p->shape), unit = (size_t)sysconf(_SC_PAGESIZE);
    return (size_t)(page + 1) * bytes - (p->n_fast * bytes + unit - 1) / unit * unit;
}

/* The file has space for the page, which a later write to it thus cannot lack. */
static bool has_space(struct kv_pool *p, int32_t page)
{
    size_t end = end_in_file(p, page), most = end_in_file(p, p->n_pages - 1), want = p->file_bytes + FILE_STEP;
    if (p->file < 0 || end <= p->file_bytes) return true;
    if (want < end) want = end;
    if (want > most) want = most;
    int error = posix_fallocate(p->file, (off_t)p->file_bytes, (off_t)(want - p->file_bytes));
    if (error && want > end)
        want = end, error = posix_fallocate(p->file, (off_t)p->file_bytes, (off_t)(want - p->file_bytes));
    if (error) return p->memory->file_error = error, false;
    p->file_bytes = want;
    return true;
}

/* A free page in the file; the page there that has been idle for longest makes way for it. -1 = none. */
static int32_t take_slow(struct kv_pool *p)
{
    struct kv_tier *t = &p->tier[KV_SLOW];
    if ((t->free < 0 || !has_space(p, t->free)) && t->oldest >= 0) kv_index_forget(p, t->oldest);
    return t->free >= 0 && has_space(p, t->free) ? kv_free_pop(p, KV_SLOW) : -1;
}

/* ---- moving ------------------------------------------------------------------------------------------------------ */

/* `to` has just been taken off its list. ahead: nobody uses either page before kv_settle. */
static void move(struct kv_pool *p, int32_t from, int32_t to, bool ahead)
{
    struct kv_device *d = p->memory->device;
    size_t bytes = kv_page_bytes(&p->shape);
    int owners = p->pages[from].refs;
    if (d) d->move(d, kv_page_at(p, to), kv_page_at(p, from), bytes);
    else kv_pool_copy(p, to, from, p->shape.page_size);
    if (!ahead) kv_settle(p);
    *(kv_tier_of(p, to) == KV_SLOW ? &p->memory->bytes_out : &p->memory->bytes_in) += bytes;
    if (p->pages[from].indexed) kv_index_rename(p, from, to);
    else p->pages[to] = p->pages[from];
    for (struct kv_table *t = p->tables; t && owners; t = t->next)
        for (int i = 0; i < t->n && owners; i++)
            if (t->pages[i] == from) t->pages[i] = to, owners--;
    p->pages[from] = (struct kv_page){ 0 };
    kv_free_push(p, from);
}

/* What makes room, the coldest first. */
enum cold { IDLE, PARKED, RUNNING };

/* The page to leave memory: of a parked table, one that it alone owns; else the first of the table that has most. */
static int32_t victim(const struct kv_pool *p, enum cold cold)
{
    int32_t found = -1;
    int most = 0;
    for (const struct kv_table *t = p->tables; t; t = t->next) {
        int n = 0;
        int32_t first = -1;
        if (t->parked != (cold == PARKED)) continue;
        for (int i = t->n - 1; i >= 0; i--) {
            int32_t page = t->pages[i];
            if (page < 0 || page >= p->n_fast || (cold == PARKED && p->pages[page].refs > 1)) continue;
            first = page;
            n++;
        }
        if (n > most) most = n, found = first;
    }
    return found;
}

/* Makes one page in memory free. */
static bool demote(struct kv_pool *p, enum cold cold)
{
    int32_t page = cold == IDLE ? p->tier[KV_FAST].oldest : kv_has_slow(p) ? victim(p, cold) : -1;
    if (page < 0) return false;
    int32_t to = kv_has_slow(p) ? take_slow(p) : -1;
    if (to >= 0) return move(p, page, to, cold == IDLE), true;
    if (cold == IDLE) kv_index_forget(p, page);
    return cold == IDLE;
}

static bool has_room(const struct kv_pool *p)
{
    return p->tier[KV_FAST].n_free && kv_page_bytes(&p->shape) <= p->memory->limit - p->memory->used;
}

/* Another pool's pages help where it is the budget that lacks. */
static bool demote_somewhere(struct kv_pool *p, enum cold cold)
{
    if (demote(p, cold)) return true;
    for (int i = 0; p->tier[KV_FAST].n_free && i < p->memory->n_pools; i++)
        if (demote(p->memory->pools[i], cold)) return true;
    return false;
}

static bool make_room(struct kv_pool *p, enum cold most)
{
    for (int cold = IDLE; !has_room(p); )
        if (!demote_somewhere(p, (enum cold)cold) && ++cold > (int)most) return false;
    return true;
}

int32_t kv_page_take(struct kv_pool *p)
{
    while (p->tier[KV_FAST].n_idle > p->most_idle) kv_index_forget(p, p->tier[KV_FAST].oldest);
    int32_t page = make_room(p, RUNNING) ? kv_free_pop(p, KV_FAST) : kv_has_slow(p) ? take_slow(p) : -1;
    if (page >= 0) p->pages[page] = (struct kv_page){ .refs = 1 };
    kv_settle(p);
    return page;
}

void kv_table_promote(struct kv_table *t, struct kv_pool *p)
{
    if (t->coming) kv_settle(p);
    t->coming = false;
    if (!kv_has_slow(p)) return;
    for (int i = t->n - 1; i >= 0; i--)
        if (t->pages[i] >= p->first_slow) {
            if (!make_room(p, PARKED)) return;
            move(p, t->pages[i], kv_free_pop(p, KV_FAST), false);
        }
}

/* Pages that others have as well stay: they may be used before the table is. */
static void move_ahead(struct kv_table *t, struct kv_pool *p)
{
    for (int i = t->n - 1; i >= 0; i--)
        if (t->pages[i] >= p->first_slow && p->pages[t->pages[i]].refs == 1) {
            if (!make_room(p, IDLE)) return;
            move(p, t->pages[i], kv_free_pop(p, KV_FAST), true);
            t->coming = true;
        }
}

void kv_table_prefetch(struct kv_table *t, struct kv_pool *p)
{
    if (p->memory->device && t->parked) move_ahead(t, p);
    size_t unit = (size_t)sysconf(_SC_PAGESIZE), bytes = kv_page_bytes(&p->shape);
    if (p->file < 0) return;
    for (int i = 0, end; i < t->n; i = end) {
        for (end = i + 1; end < t->n && t->pages[end] == t->pages[end - 1] + 1; ) end++;    /* neighbours in one call */
        if (t->pages[i] < p->first_slow) continue;
        size_t from = (size_t)t->pages[i] * bytes / unit * unit, to = (size_t)(t->pages[end - 1] + 1) * bytes;
        madvise(p->base + from, to - from, MADV_WILLNEED);
    }
}
