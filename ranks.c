/* ranks.c - how rank 0 tells the other ranks what to compute: each batch as its rows, and of the page tables what those
 * rows read and write. */
#include "ranks.h"

#include <stdlib.h>
#include <string.h>

/* ---- telling ----------------------------------------------------------------------------------------------------- */

struct leader {
    struct backend base;
    struct backend *own;               /* rank 0's part */
    struct comm *comm;
    const struct kv_pool *main, *raw;  /* [KV_GROUPS] */
    struct bytes message;
    struct error lost;                 /* how a pass of rank 0 failed, which others may wait for */
};

/* A message: a head, rows[n_rows], then pieces until the end. Without rows the head is of a page that was copied. */
struct head {
    int32_t n_rows;
    int32_t group, raw, to, from;      /* of a copy: the pool, and its pages */
    int64_t tokens;                    /* how many of the page's first tokens */
};
/* What a sequence sees in a layer group (kind VIEW: `first` sinks and a window of `n`), or pages [first, first + n) of
 * its main or raw table, whose numbers follow. */
enum { MAIN, RAW, VIEW };
struct piece { int32_t sequence, group, kind, first, n; };

static bool add_piece(struct bytes *b, struct piece p, const struct kv_slots *slots)
{
    return bytes_add(b, &p, sizeof p) && bytes_add(b, slots->pages + p.first, p.n * sizeof *slots->pages);
}

/* The pages that tokens [from, last] lie on, and those of the first `sinks` tokens before them. */
static bool add_slots(struct bytes *b, int sequence, int group, int kind, const struct kv_slots *slots, int64_t sinks,
                      int64_t from, int64_t last)
{
    if (!slots->shape) return true;
    int64_t size = slots->shape->page_size, first = from / size, near = (sinks + size - 1) / size;
    if (near > first) near = first;
    return (near == 0 || add_piece(b, (struct piece){ sequence, group, kind, 0, (int32_t)near }, slots))
        && add_piece(b, (struct piece){ sequence, group, kind, (int32_t)first, (int32_t)(last / size - first + 1) },
                     slots);
}

/* Rows [r, end) are one sequence's. */
static bool add_views(struct bytes *b, const struct batch *batch, int r, int end)
{
    int64_t first = batch->rows[r].pos, last = batch->rows[end - 1].pos;
    int sequence = batch->rows[r].sequence;
    for (int g = 0; g < KV_GROUPS; g++) {
        const struct kv_view *v = &batch->views[sequence][g];
        struct piece head = { sequence, g, VIEW, v->sinks, v->window };
        int64_t seen = kv_window_range(first, v->sinks, v->window).first;
        if (!bytes_add(b, &head, sizeof head)) return false;
        if (!v->main.pages) continue;  /* no layer is in the group */
        if (!add_slots(b, sequence, g, MAIN, &v->main, v->sinks, seen < first ? seen : first, last) ||
            !add_slots(b, sequence, g, RAW, &v->raw, 1, first, last))
            return false;
    }
    return true;
}

void ranks_tell(struct comm *comm, const void *data, size_t n)
{
    uint64_t length = n;
    if (comm_lost(comm)) return;       /* they wait for something else */
    comm_share(comm, &length, sizeof length);
    comm_share(comm, (void *)data, n);
}

static bool lead_forward(struct backend *b, const struct batch *batch, struct error *e)
{
    struct leader *l = (struct leader *)b;
    struct bytes *m = &l->message;
    struct head head = { .n_rows = batch->n_rows };
    if (comm_lost(l->comm)) return *e = l->lost, false;
    m->len = 0;
    bool ok = bytes_add(m, &head, sizeof head) && bytes_add(m, batch->rows, batch->n_rows * sizeof *batch->rows);
    for (int r = 0, end; ok && r < batch->n_rows; r = end) {
        for (end = r; end < batch->n_rows && batch->rows[end].sequence == batch->rows[r].sequence; ) end++;
        ok = add_views(m, batch, r, end);
    }
    if (!ok) return fail(e, GEN_RUN, "cannot allocate memory to tell the other ranks of a batch");
    ranks_tell(l->comm, m->data, m->len);
    if (l->own->forward(l->own, batch, e)) return true;
    comm_lose(l->comm);
    l->lost = *e;
    return false;
}

static const float *lead_logits(struct backend *b, int i)
{
    struct backend *own = ((struct leader *)b)->own;
    return own->logits(own, i);
}

static struct top lead_top(struct backend *b, int i, int k)
{
    struct backend *own = ((struct leader *)b)->own;
    return own->top(own, i, k);
}

static void lead_copy(void *user, const struct kv_pool *p, int32_t to, int32_t from, int64_t tokens)
{
    struct leader *l = user;
    bool raw = p >= l->raw && p < l->raw + KV_GROUPS;
    struct head head = { 0, (int32_t)(p - (raw ? l->raw : l->main)), raw, to, from, tokens };
    ranks_tell(l->comm, &head, sizeof head);
}

static void lead_close(struct backend *b)
{
    struct leader *l = (struct leader *)b;
    ranks_tell(l->comm, NULL, 0);
    l->own->close(l->own);
    bytes_free(&l->message);
    free(l);
}

bool ranks_lead(struct backend **b, struct comm *comm, struct kv_pool *main, struct kv_pool *raw, struct error *e)
{
    struct leader *l = alloc_zeroed(1, sizeof *l, "the ranks' leader", e);
    if (!l) return false;
    l->base = **b;
    l->base.forward = lead_forward;
    l->base.logits = lead_logits;
    if (l->base.top) l->base.top = lead_top;
    l->base.close = lead_close;
    l->own = *b;
    l->comm = comm;
    l->main = main;
    l->raw = raw;
    for (int g = 0; g < KV_GROUPS; g++) {
        main[g].copied = raw[g].copied = lead_copy;
        main[g].copied_user = raw[g].copied_user = l;
    }
    *b = &l->base;
    return true;
}

/* ---- following --------------------------------------------------------------------------------------------------- */

/* Page numbers as rank 0 has told them; reserved for any length of text, as only what is told is touched. */
enum { MOST_PAGES = 1 << 22 };

struct follower {
    struct row *rows;                  /* [rows] */
    struct kv_view (*views)[KV_GROUPS];            /* [sequences] */
    int32_t *tables;                   /* [sequences][KV_GROUPS][main, raw][MOST_PAGES] */
    size_t table_bytes;
};

/* The table of a sequence in a group; kind: MAIN or RAW. */
static int32_t *table_of(const struct follower *f, int sequence, int group, int kind)
{
    return f->tables + (((size_t)sequence * KV_GROUPS + group) * 2 + kind) * MOST_PAGES;
}

static void take(const char **at, void *out, size_t n)
{
    memcpy(out, *at, n);
    *at += n;
}

/* Makes the batch of what follows the head of a message. */
static struct batch read_batch(struct follower *f, int n_rows, const char *at, const char *end,
                               const struct kv_pool *main, const struct kv_pool *raw)
{
    take(&at, f->rows, n_rows * sizeof *f->rows);
    for (int r = 0; r < n_rows; r++) f->rows[r].top = 0;           /* only rank 0 reads */
    while (at < end) {
        struct piece p;
        take(&at, &p, sizeof p);
        const struct kv_pool *a = &main[p.group], *b = &raw[p.group];
        if (p.kind != VIEW) take(&at, table_of(f, p.sequence, p.group, p.kind) + p.first, p.n * sizeof *f->tables);
        else
            f->views[p.sequence][p.group] = (struct kv_view){
                .main = { &a->shape, a->base, table_of(f, p.sequence, p.group, MAIN), a->slow, a->first_slow },
                .raw = { b->n_pages ? &b->shape : NULL, b->base, table_of(f, p.sequence, p.group, RAW), b->slow,
                         b->first_slow },
                .sinks = p.first, .window = p.n };
    }
    return (struct batch){ f->rows, n_rows, (const struct kv_view (*)[KV_GROUPS])f->views };
}

bool ranks_hear(struct comm *comm, struct bytes *out, struct error *e)
{
    uint64_t n = 0;
    comm_share(comm, &n, sizeof n);
    if (n == 0) return false;
    if (n > out->cap) {
        bytes_free(out);
        out->data = malloc(n);
        if (!out->data) return fail(e, GEN_RUN, "cannot allocate %llu bytes for a batch", (unsigned long long)n);
        out->cap = n;
    }
    out->len = n;
    comm_share(comm, out->data, n);
    return true;
}

bool ranks_follow(struct backend *b, struct comm *comm, struct kv_pool *main, struct kv_pool *raw, int rows,
                  int sequences, struct error *e)
{
    struct bytes message = { 0 };
    struct follower f = { .table_bytes = (size_t)sequences * KV_GROUPS * 2 * MOST_PAGES * sizeof *f.tables };
    f.rows = alloc_zeroed(rows, sizeof *f.rows, "the batch", e);
    f.views = alloc_zeroed(sequences, sizeof *f.views, "the batch's views", e);
    f.tables = reserve_bytes(f.table_bytes, "page tables", e);
    bool ok = f.rows && f.views && f.tables;
    if (ok) e->code = GEN_OK;
    while (ok && ranks_hear(comm, &message, e)) {
        struct head head;
        const char *at = message.data;
        take(&at, &head, sizeof head);
        if (head.n_rows) {
            struct batch batch = read_batch(&f, head.n_rows, at, message.data + message.len, main, raw);
            ok = b->forward(b, &batch, e);
        } else
            kv_pool_copy(head.raw ? &raw[head.group] : &main[head.group], head.to, head.from, head.tokens);
    }
    free(f.rows);
    free(f.views);
    release_bytes(f.tables, f.table_bytes);
    bytes_free(&message);
    return ok && e->code == GEN_OK;
}
