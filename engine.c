/* engine.c - sequences over one page pool and one backend: what of a sequence is in the cache, and what is computed
 * next. */
#include "engine.h"
#include "ranks.h"

#include <nettle/sha2.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 512 };                  /* rows of a prefill chunk where none is asked for */

_Static_assert(HEAD_MOST <= KV_HEAD_MOST, "the cache takes every head of a model");

struct engine {
    const struct model *m;
    struct backend *b;
    char note[sizeof ((struct error *)0)->text];   /* why CUDA is not used */
    struct engine_options o;
    int64_t ctx;
    int chunk, max_rows;               /* rows of a prefill chunk, and of the largest batch */
    struct kv_pool main[KV_GROUPS], raw[KV_GROUPS];  /* see struct kv_view */
    int sinks[KV_GROUPS], window[KV_GROUPS];
    int most_pages[KV_GROUPS];         /* of one sequence */
    struct row *rows;                  /* [max_rows] of the batch being built */
    struct kv_view (*views)[KV_GROUPS];            /* [max_sequences] one per sequence of the batch */
    struct work *step;                 /* [max_sequences] of engine_step */
    struct kvstore *store;             /* blocks that outlive the process; NULL = none */
    uint8_t root[KV_KEY];              /* the key of the store's first blocks */
    unsigned char *blocks;             /* room for n_blocks of block_bytes on their way there */
    size_t block_bytes;
    int n_blocks;
    struct kv_memory memory;           /* of the pools */
    struct sequence *sequences;        /* all that are open */
    /* of eviction */
    uint64_t *scratch;                 /* [2 * mass_rows] */
    int32_t *kept;                     /* kv_choose's */
    uint64_t *mass;                    /* a sequence's masses where they lie on a device; NULL = they do not */
    int32_t *moves;                    /* there: kept, then a page table; NULL = nothing does */
    uint64_t forwards;                 /* forward passes so far: tells whether a sequence's logits are still there */
};

struct sequence {
    struct engine *g;
    struct kv_table main[KV_GROUPS], raw[KV_GROUPS];
    /* Tokens before these are gone but for the sinks, or for block 0. */
    int64_t dropped_main[KV_GROUPS], dropped_raw[KV_GROUPS];
    /* Importance eviction, in the global layers: see struct kv_view. */
    int64_t gone, voters, prompt_end;
    uint64_t *mass;
    int64_t evict_at;                  /* length at which it takes place next */
    int32_t *tokens;                   /* [ctx] */
    int64_t n;                         /* tokens whose keys and values are in the cache */
    int64_t prompt;                    /* tokens whose blocks are put into the store */
    int64_t stored;                    /* so many blocks of the prompt are in the store, */
    uint8_t stored_key[KV_KEY];        /* and this is the last one's key */
    uint8_t (*keys)[KV_KEY];           /* [ctx / KV_BLOCK] of the blocks, for the index: */
    int64_t hashed;                    /* tokens whose blocks have keys */
    uint64_t forward;                  /* the pass that computed logits of the last rows, 0 = none */
    int logits, n_logits;              /* place of the last row's among that pass's wanted rows; rows that have them */
    int top;                           /* how many of the largest are asked for */
    struct sequence *next, *before;    /* in the engine's list */
};

/* ---- opening ----------------------------------------------------------------------------------------------------- */

struct plan {
    int64_t ctx, seen;
    int chunk;
    struct kv_shape main[KV_GROUPS], raw[KV_GROUPS];
    int main_pages[KV_GROUPS], raw_pages[KV_GROUPS];
    int main_alone[KV_GROUPS], raw_alone[KV_GROUPS];   /* where there is one sequence */
    size_t bytes_alone;
};

/* Tokens behind a layer's window that are still kept, so that a rejected draft can be taken back. */
enum { WINDOW_MARGIN = 2 * KV_BLOCK };

/* Tokens after which an evicting sequence shrinks again, and the prompt's last ones, whose votes SnapKV counts. */
enum { EVICT_EVERY = KV_BLOCK, VOTERS = KV_BLOCK };
/* What a mass is worth EVICT_EVERY tokens later. */
#define FADE_ATTENTION 0.875
#define FADE_SNAPKV 0.5

/* Tokens of a sequence with --window: its memory does not grow with them but for 4 bytes each, 4 bytes a page and 32
 * bytes a block. */
#define MOST_TOKENS ((int64_t)1 << 27)

/* Bytes of all pages of the plan; false when they cannot be counted. */
static bool plan_bytes(const struct plan *p, size_t *out)
{
    *out = 0;
    for (int g = 0; g < KV_GROUPS; g++) {
        size_t main, raw;
        if (!size_mul(kv_page_bytes(&p->main[g]), (size_t)p->main_pages[g], &main) ||
            !size_mul(kv_page_bytes(&p->raw[g]), (size_t)p->raw_pages[g], &raw) ||
            !size_add(*out, main, out) || !size_add(*out, raw, out))
            return false;
    }
    return true;
}

/* The options with the context and the window that they stand for. */
static struct engine_options resolved(const struct model *m, struct engine_options o)
{
    if (o.ctx <= 0) o.ctx = m->n_ctx;
    if (o.slide && o.slide <= o.ctx / 2) {
        o.sinks = o.slide;
        o.window = (int)(o.ctx - o.slide);
    }
    return o;
}

/* Rows of a prefill chunk: those that are asked for, or CHUNK; fewer where what the cache keeps of a chunk beside its
 * sequence, in windows and as raw rows of sealed types, would take more than an eighth of a memory that is limited and
 * all there is. */
static int chunk_rows(const struct engine_options *o, const struct plan *p)
{
    int64_t rows = o->batch > 0 ? o->batch : CHUNK;
    double row = 0;                    /* bytes */
    for (int g = 0; g < KV_GROUPS; g++) {
        if (kv_sealed(o->type_k) || kv_sealed(o->type_v)) row += kv_token_bytes(&p->raw[g]);
        if (g == KV_LOCAL || o->window > 0) row += kv_token_bytes(&p->main[g]);
    }
    bool choose = !o->batch && o->kv_memory && !o->kv_offload;
    while (choose && rows > KV_BLOCK && (double)rows * row > (double)o->kv_memory / 8) rows /= 2;
    return (int)(rows < p->seen ? rows : p->seen);
}

/* Shapes of the page pools that the options ask for. */
static bool plan_pools(const struct model *m, const struct engine_options *o, struct plan *p, struct error *e)
{
    p->ctx = p->seen = o->ctx;
    if (o->window > 0) {
        p->seen = (int64_t)o->sinks + o->window;
        if (p->seen > p->ctx)
            return fail(e, GEN_USAGE, "--window %d and %d sinks are more than the context of %lld tokens: "
                        "lower --window", o->window, o->sinks, (long long)p->ctx);
        p->ctx = MOST_TOKENS;
        if (o->layout == KV_CONTIGUOUS)
            return fail(e, GEN_USAGE, "--window gives pages back, which --kv-layout contiguous cannot: use paged");
    }
    int64_t page = o->layout == KV_CONTIGUOUS ? (p->ctx + KV_BLOCK - 1) / KV_BLOCK * KV_BLOCK : o->page_size;
    if (page < KV_BLOCK || page % KV_BLOCK || page > INT32_MAX - KV_BLOCK)
        return fail(e, GEN_USAGE, "--page-size %lld is not a multiple of %d from %d up", (long long)page, KV_BLOCK,
                    KV_BLOCK);
    int layers[KV_GROUPS] = { 0 };
    for (int i = 0; i < m->n_layer; i++) layers[m->layers[i].local ? KV_LOCAL : KV_GLOBAL]++;
    for (int g = 0; g < KV_GROUPS; g++) {
        p->main[g] = (struct kv_shape){ layers[g], m->n_kv, m->head_k, m->head_v, o->type_k, o->type_v, (int)page };
        p->raw[g] = (struct kv_shape){ layers[g], m->n_kv, m->head_k, m->head_v, kv_raw_type(o->type_k),
                                       kv_raw_type(o->type_v), KV_BLOCK };
    }
    p->chunk = chunk_rows(o, p);
    int64_t spare = WINDOW_MARGIN + p->chunk + EXTEND_ROWS;     /* tokens beside those that a windowed query sees */
    int64_t per_sequence = o->window > 0 ? (p->seen + spare) / page + 4 : (p->ctx + page - 1) / page;
    if (per_sequence > INT32_MAX / o->max_sequences)
        return fail(e, GEN_USAGE, "a context of %lld tokens for %d sequences is too large to address: lower --ctx-size",
                    (long long)p->ctx, o->max_sequences);
    for (int g = 0; g < KV_GROUPS; g++) {
        int64_t most = g == KV_LOCAL ? (m->window + spare) / page + 2 : per_sequence;
        p->main_pages[g] = layers[g] ? (int)((most < per_sequence ? most : per_sequence) * o->max_sequences) : 0;
        /* block 0, the last two, one being begun, and block 0 of a text that is gone; and the rows of a batch */
        bool sealed = layers[g] && (kv_sealed(o->type_k) || kv_sealed(o->type_v));
        p->raw_pages[g] = sealed ? 5 * o->max_sequences + p->chunk / KV_BLOCK + 2 : 0;
    }
    return true;
}

/* The same, with the limit of memory looked at: pages beyond it need another place, or not all sequences may be long at
 * once, but one must be possible unless that is waived. */
static bool make_plan(const struct model *m, const struct engine_options *o, struct plan *p, struct error *e)
{
    struct engine_options alone = *o;
    alone.max_sequences = 1;
    size_t bytes;
    if (o->kv_offload && o->layout == KV_CONTIGUOUS)
        return fail(e, GEN_USAGE, "--kv-offload moves pages, which --kv-layout contiguous has not: use paged");
    if (!plan_pools(m, &alone, p, e)) return false;
    if (o->kv_memory && !o->kv_offload && !o->overcommit && plan_bytes(p, &bytes) && bytes > o->kv_memory)
        return fail(e, GEN_USAGE, "the cache of %lld tokens needs %zu bytes, more than --kv-memory %zu: lower "
                    "--ctx-size or --batch-size, choose smaller types with -ctk and -ctv, or add --kv-offload",
                    (long long)p->seen, bytes, o->kv_memory);
    struct plan one = *p;
    if (!plan_pools(m, o, p, e)) return false;
    memcpy(p->main_alone, one.main_pages, sizeof p->main_alone);
    memcpy(p->raw_alone, one.raw_pages, sizeof p->raw_alone);
    return plan_bytes(&one, &p->bytes_alone) || fail(e, GEN_USAGE, "a context of %lld tokens is too large to address: "
                                                     "lower --ctx-size", (long long)p->ctx);
}

bool engine_estimate(const struct model *m, const struct engine_options *o, struct kv_usage *out, struct error *e)
{
    struct plan p;
    struct engine_options all = resolved(m, *o);
    *out = (struct kv_usage){ 0 };
    if (!plan_pools(m, &all, &p, e)) return false;
    if (!plan_bytes(&p, &out->bytes_reserved))
        return fail(e, GEN_USAGE, "a context of %lld tokens is too large to address: lower --ctx-size",
                    (long long)p.ctx);
    if (o->kv_offload && o->kv_memory < out->bytes_reserved) out->bytes_reserved = o->kv_memory;
    double token = 0;
    for (int g = 0; g < KV_GROUPS; g++) {
        token += kv_token_bytes(&p.main[g]);
        out->pages += p.main_pages[g] + p.raw_pages[g];
    }
    out->bytes_per_token = (size_t)token;
    return true;
}

static int64_t mass_rows(const struct engine *g) { return (g->ctx + KV_BLOCK - 1) / KV_BLOCK * KV_BLOCK; }
/* Layers times heads that evict, each for itself. */
static size_t mass_lines(const struct engine *g)
{
    return g->o.evict ? (size_t)g->main[KV_GLOBAL].shape.n_layer * g->main[KV_GLOBAL].shape.n_kv : 0;
}
static size_t mass_bytes(const struct engine *g) { return mass_lines(g) * mass_rows(g) * sizeof(uint64_t); }
static size_t most_kept(const struct engine *g) { return mass_lines(g) * g->o.budget; }

static _Thread_local void (*progress_of_load)(const char *, double);
static void load_progress(double done) { progress_of_load("loading", done); }

/* CUDA where it is asked for, or can be used and is not forbidden. All ranks get the same, or the same error. */
static bool open_backend(struct engine *g, const struct plan *p, struct error *e)
{
    struct error why = { 0 };
    struct backend_options o = { g->o.threads, g->max_rows, g->o.max_sequences, p->seen, g->o.evict,
                                 g->o.progress ? load_progress : NULL, g->o.comm, g->o.place };
    progress_of_load = g->o.progress;
    bool file = g->o.kv_offload && strcmp(g->o.kv_offload, "host");
    if (g->o.backend == BACKEND_CUDA && file)
        return fail(e, GEN_USAGE, "--kv-offload DIR is for the CPU backend: with CUDA pages go to the memory of the "
                    "host, --kv-offload host");
    bool can = g->o.backend != BACKEND_CPU && !file;
    if (can && cuda_open(&g->b, g->m, &o, &why)) return true;
    if (g->o.backend == BACKEND_CUDA || comm_lost(o.comm))
        return fail(e, why.code, "%s; --backend cpu does without CUDA", why.text);
    if (can) memcpy(g->note, why.text, sizeof g->note);
    return comm_agree(o.comm, cpu_open(&g->b, g->m, &o, e), e);
}

/* Pages that are to lie on a device, of n: all pools together take no more than the budget, and first of all what one
 * sequence needs. */
static int fast_pages(const struct engine *g, const struct plan *p, int alone, int n)
{
    size_t all, limit = g->memory.limit, one = p->bytes_alone;
    if (!g->memory.device || !plan_bytes(p, &all) || all <= limit) return n;
    if (limit < one) return (int)((double)alone * (double)limit / (double)one);
    return alone + (int)((double)(n - alone) * (double)(limit - one) / (double)(all - one));
}

/* What eviction needs beside each sequence's masses. */
static bool open_eviction(struct engine *g, struct error *e)
{
    struct kv_device *d = g->memory.device;
    if (!mass_lines(g)) return true;
    g->scratch = reserve_bytes(2 * mass_rows(g) * sizeof *g->scratch, "eviction: lower --ctx-size", e);
    g->kept = reserve_bytes(most_kept(g) * sizeof *g->kept, "eviction: lower --kv-budget", e);
    if (!g->scratch || !g->kept) return false;
    if (!d) return true;
    size_t bytes = (most_kept(g) + mass_rows(g) / KV_BLOCK) * sizeof *g->moves;
    g->mass = reserve_bytes(mass_bytes(g), "attention's mass: lower --ctx-size", e);
    return g->mass && (g->moves = (int32_t *)d->open(d, bytes, false, e));
}

/* What a pass needs beside the backend and the pages. Also after an error *out, if not NULL, is to be closed. */
static bool open_plan(struct engine **out, const struct model *m, const struct engine_options *o, struct plan *p,
                      struct error *e)
{
    struct engine *g = *out = alloc_zeroed(1, sizeof *g, "the engine", e);
    if (!g) return false;
    g->m = m;
    g->o = resolved(m, *o);
    o = &g->o;
    g->o.share = o->share && o->cache && o->layout == KV_PAGED && !o->evict;
    if (!make_plan(m, o, p, e)) return false;
    g->memory.limit = o->kv_memory ? o->kv_memory : SIZE_MAX;
    g->memory.folder = !o->kv_offload || strcmp(o->kv_offload, "host") ? o->kv_offload : "/var/tmp";
    g->ctx = p->ctx;
    g->sinks[KV_GLOBAL] = o->window > 0 ? o->sinks : 0;
    g->window[KV_GLOBAL] = o->window;
    g->window[KV_LOCAL] = o->window > 0 && o->window < m->window ? o->window : m->window;
    int rows = g->chunk = p->chunk;
    if (rows < o->max_sequences) rows = o->max_sequences;
    g->max_rows = rows > EXTEND_ROWS ? rows : EXTEND_ROWS;
    g->rows = alloc_zeroed(g->max_rows, sizeof *g->rows, "the batch", e);
    g->views = alloc_zeroed(o->max_sequences, sizeof *g->views, "the batch's views", e);
    g->step = alloc_zeroed(o->max_sequences, sizeof *g->step, "the batch's parts", e);
    return g->rows && g->views && g->step;
}

static bool open_pages(struct engine *g, const struct plan *p, struct error *e)
{
    g->memory.device = g->b->device;
    for (int i = 0; i < KV_GROUPS; i++)
        if (!kv_pool_open(&g->main[i], &p->main[i], p->main_pages[i],
                          fast_pages(g, p, p->main_alone[i], p->main_pages[i]), &g->memory, e) ||
            !kv_pool_open(&g->raw[i], &p->raw[i], p->raw_pages[i], fast_pages(g, p, p->raw_alone[i], p->raw_pages[i]),
                          &g->memory, e))
            return false;
    if (!open_eviction(g, e)) return false;
    for (int i = 0; i < KV_GROUPS; i++) {
        g->most_pages[i] = p->main_pages[i] / g->o.max_sequences;
        if (g->m->by_token) kv_pool_sparse(&g->main[i]);
        /* without a budget, finished sequences keep as much as one may hold, so that memory does not grow with their
         * number */
        if (!g->o.kv_memory) g->main[i].most_idle /= g->o.max_sequences;
    }
    return true;
}

bool engine_open(struct engine **out, const struct model *m, const struct engine_options *o, struct error *e)
{
    struct plan p;
    struct engine_options told = *o;   /* what is told of a function's address is never used */
    bool leads = comm_size(o->comm) > 1 && comm_rank(o->comm) == 0;
    if (leads) ranks_tell(o->comm, &told, sizeof told);
    bool ok = comm_agree(o->comm, open_plan(out, m, o, &p, e), e)
           && open_backend(*out, &p, e) && comm_agree(o->comm, open_pages(*out, &p, e), e);
    if (ok && leads && !ranks_lead(&(*out)->b, o->comm, (*out)->main, (*out)->raw, e)) {
        ranks_tell(o->comm, NULL, 0);
        ok = false;
    }
    if (!ok) engine_close(*out), *out = NULL;
    return ok;
}

bool engine_wait(struct comm *comm, struct engine_options *o)
{
    struct bytes told = { 0 };
    struct error e = { 0 };
    bool more = ranks_hear(comm, &told, &e);
    int places;
    if (more) {
        memcpy(o, told.data, sizeof *o);
        o->comm = comm;
        o->place = comm_place(comm, &places);
        o->progress = NULL;
        o->kv_offload = NULL;
    }
    bytes_free(&told);
    return more;
}

bool engine_serve(struct engine *g, struct error *e)
{
    return ranks_follow(g->b, g->o.comm, g->main, g->raw, g->max_rows, g->o.max_sequences, e);
}

void engine_close(struct engine *g)
{
    if (!g || comm_lost(g->o.comm)) return;        /* a kernel may use it, waiting for another rank */
    release_bytes(g->scratch, 2 * mass_rows(g) * sizeof *g->scratch);
    release_bytes(g->kept, most_kept(g) * sizeof *g->kept);
    release_bytes(g->mass, mass_bytes(g));
    if (g->moves) g->memory.device->close(g->memory.device, (unsigned char *)g->moves, false);
    for (int i = 0; i < KV_GROUPS; i++) {
        kv_pool_close(&g->main[i]);
        kv_pool_close(&g->raw[i]);
    }
    if (g->b) g->b->close(g->b);
    free(g->rows);
    free(g->views);
    free(g->step);
    release_bytes(g->blocks, g->block_bytes * (size_t)g->n_blocks);
    free(g);
}

const struct model *engine_model(const struct engine *g) { return g->m; }
int64_t engine_ctx(const struct engine *g) { return g->ctx; }
const struct backend *engine_backend(const struct engine *g) { return g->b; }
const char *engine_note(const struct engine *g) { return g->note; }

bool engine_check(const struct engine *g)
{
    bool ok = true;
    for (int i = 0; i < g->memory.n_pools; i++) ok = ok && kv_pool_check(g->memory.pools[i]);
    return ok;
}

/* Rows of layer group k in the cache. */
static int64_t rows_of(const struct sequence *s, int k) { return k == KV_GLOBAL ? s->n - s->gone : s->n; }

/* Places of the sequence's last page in the group that hold no token yet, this one's share of a shared page. */
static double unfilled(const struct sequence *s, int group)
{
    const struct kv_table *t = &s->main[group];
    const struct kv_pool *p = &s->g->main[group];
    if (t->n == 0 || t->pages[t->n - 1] < 0) return 0;
    return (double)((int64_t)t->n * p->shape.page_size - rows_of(s, group)) / p->pages[t->pages[t->n - 1]].refs;
}

struct kv_usage engine_kv_usage(const struct engine *g)
{
    struct kv_usage u = { .bytes_out = g->memory.bytes_out, .bytes_in = g->memory.bytes_in };
    double token = 0, waste = 0;
    for (int i = 0; i < g->memory.n_pools; i++) {
        const struct kv_pool *p = g->memory.pools[i];
        const struct kv_tier *fast = &p->tier[KV_FAST], *slow = &p->tier[KV_SLOW];
        size_t bytes = kv_page_bytes(&p->shape);
        int in_file = p->n_pages - p->first_slow - slow->n_free - slow->n_idle;
        int used = p->n_fast - fast->n_free - fast->n_idle + in_file;
        u.bytes_used += used * bytes;
        u.bytes_slow += in_file * bytes;
        u.bytes_reserved += p->n_fast * bytes;
        u.pages += used;
    }
    if (u.bytes_reserved > g->memory.limit) u.bytes_reserved = g->memory.limit;
    for (int i = 0; i < KV_GROUPS; i++) {
        token += kv_token_bytes(&g->main[i].shape);
        for (const struct sequence *s = g->sequences; s; s = s->next)
            waste += unfilled(s, i) * kv_token_bytes(&g->main[i].shape);
    }
    u.bytes_per_token = (size_t)token;
    u.bytes_unfilled = (size_t)waste;
    return u;
}

/* ---- sequences --------------------------------------------------------------------------------------------------- */

/* A sequence's masses, all zero: where its keys lie. */
static uint64_t *open_mass(const struct engine *g, struct error *e)
{
    struct kv_device *d = g->memory.device;
    return d ? (uint64_t *)d->open(d, mass_bytes(g), false, e)
             : reserve_bytes(mass_bytes(g), "attention's mass: lower --ctx-size", e);
}

static void close_mass(const struct engine *g, uint64_t *mass)
{
    struct kv_device *d = g->memory.device;
    if (d && mass) d->close(d, (unsigned char *)mass, false);
    if (!d) release_bytes(mass, mass_bytes(g));
}

/* Brings the masses of the sequence's rows from the device, or back. Returns where they can be read and changed. */
static uint64_t *get_mass(const struct sequence *s)
{
    struct kv_device *d = s->g->memory.device;
    size_t step = mass_rows(s->g) * sizeof *s->mass, bytes = rows_of(s, KV_GLOBAL) * sizeof *s->mass;
    if (d && bytes) d->copy(d, s->g->mass, step, s->mass, step, bytes, (int)mass_lines(s->g));
    return d ? s->g->mass : s->mass;
}
static void put_mass(const struct sequence *s)
{
    struct kv_device *d = s->g->memory.device;
    size_t step = mass_rows(s->g) * sizeof *s->mass, bytes = rows_of(s, KV_GLOBAL) * sizeof *s->mass;
    if (d && bytes) d->copy(d, s->mass, step, s->g->mass, step, bytes, (int)mass_lines(s->g));
}

bool sequence_open(struct sequence **out, struct engine *g, struct error *e)
{
    struct sequence *s = alloc_zeroed(1, sizeof *s, "a sequence", e);
    if (!s) return false;
    s->g = g;
    s->tokens = reserve_bytes(g->ctx * sizeof *s->tokens, "a sequence's tokens", e);
    s->keys = reserve_bytes(g->ctx / KV_BLOCK * sizeof *s->keys, "a sequence's keys", e);
    s->next = g->sequences;
    if (s->next) s->next->before = s;
    g->sequences = s;
    if (mass_lines(g)) s->mass = open_mass(g, e);
    s->evict_at = INT64_MAX;
    bool ok = s->tokens && s->keys && (s->mass || !mass_lines(g));
    for (int i = 0; i < KV_GROUPS && ok; i++)
        ok = kv_table_open(&s->main[i], &g->main[i], g->ctx, e) && kv_table_open(&s->raw[i], &g->raw[i], g->ctx, e);
    if (!ok) return sequence_close(s), false;
    *out = s;
    return true;
}

void sequence_close(struct sequence *s)
{
    if (!s) return;
    for (int i = 0; i < KV_GROUPS; i++) {
        kv_table_close(&s->main[i], &s->g->main[i]);
        kv_table_close(&s->raw[i], &s->g->raw[i]);
    }
    *(s->before ? &s->before->next : &s->g->sequences) = s->next;
    if (s->next) s->next->before = s->before;
    close_mass(s->g, s->mass);
    release_bytes(s->tokens, s->g->ctx * sizeof *s->tokens);
    release_bytes(s->keys, s->g->ctx / KV_BLOCK * sizeof *s->keys);
    free(s);
}

int64_t sequence_length(const struct sequence *s) { return s->n; }

int64_t sequence_evicted(const struct sequence *s)
{
    if (s->g->o.evict) return s->gone;
    int64_t kept = (int64_t)s->g->sinks[KV_GLOBAL] + s->g->o.window;
    return s->g->o.window > 0 && s->n > kept ? s->n - kept : 0;
}

const int32_t *sequence_tokens(const struct sequence *s) { return s->tokens; }

/* Which of the last pass's logits are those after the token at `pos`; -1 = none. */
static int logits_index(const struct sequence *s, int64_t pos)
{
    int64_t back = s->n - 1 - pos;
    bool there = s->forward && s->forward == s->g->forwards && back >= 0 && back < s->n_logits;
    return there ? s->logits - (int)back : -1;
}

static bool unreadable(int64_t pos, struct error *e)
{
    return fail(e, GEN_RUN, "the logits of token %lld cannot be read from the device", (long long)pos);
}

const float *sequence_logits_at(const struct sequence *s, int64_t pos)
{
    int i = logits_index(s, pos);
    return i < 0 ? NULL : s->g->b->logits(s->g->b, i);
}

void sequence_want_top(struct sequence *s, int k) { s->top = s->g->b->top && k <= TOP_MOST ? k : 0; }

struct top sequence_top_at(const struct sequence *s, int64_t pos, int k)
{
    int i = logits_index(s, pos);
    return i < 0 || !s->g->b->top ? (struct top){ 0 } : s->g->b->top(s->g->b, i, k);
}

const float *sequence_logits(const struct sequence *s) { return sequence_logits_at(s, s->n - 1); }

bool sequence_hash_logits(const struct sequence *s, char out[65], struct error *e)
{
    const float *logits = sequence_logits(s);
    *out = 0;
    if (logits) return sha256_hex(logits, (size_t)s->g->m->n_vocab * sizeof *logits, out), true;
    return logits_index(s, s->n - 1) < 0 || unreadable(s->n - 1, e);
}

/* The largest length <= n at which the sequence can go on: a block that is not whole needs its raw rows, and what the
 * next row sees and the page that it lies on must be there. */
static int64_t resumable(const struct sequence *s, int64_t n)
{
    const struct engine *g = s->g;
    if (n > s->n) n = s->n;
    if (s->mass && n < s->n) return 0; /* what the tokens behind n looked at cannot be taken back */
    if (s->gone) return n;
    for (int i = 0; i < KV_GROUPS; i++)
        if (!kv_table_holds(&s->raw[i], &g->raw[i], n / KV_BLOCK * KV_BLOCK, n)) n = n / KV_BLOCK * KV_BLOCK;
    for (int i = 0; i < KV_GROUPS; i++) {
        int64_t first = kv_window_range(n, g->sinks[i], g->window[i]).first, page = n - n % g->main[i].shape.page_size;
        int64_t sinks = n < g->sinks[i] ? n : g->sinks[i];
        bool start = n > 0 && (sinks > 0 || first < KV_BLOCK);     /* block 0 is seen, raw where there are raw rows */
        if (!g->main[i].n_pages) continue;
        if ((first < n && first < s->dropped_main[i]) || !kv_table_holds(&s->raw[i], &g->raw[i], 0, start) ||
            !kv_table_holds(&s->main[i], &g->main[i], 0, sinks) ||
            !kv_table_holds(&s->main[i], &g->main[i], first < page ? first : page, n))
            return 0;
    }
    return n;
}

/* Nothing is left of the sequence; what its tokens looked at is forgotten. */
static void forget_mass(struct sequence *s)
{
    uint64_t *mass = s->g->mass ? s->g->mass : s->mass;
    for (size_t i = 0; i < mass_lines(s->g); i++)
        memset(mass + i * mass_rows(s->g), 0, rows_of(s, KV_GLOBAL) * sizeof *mass);
    put_mass(s);
    s->gone = 0;
    s->evict_at = INT64_MAX;
}

int64_t sequence_cut(struct sequence *s, int64_t n)
{
    n = resumable(s, n);
    if (n == s->n) return n;
    if (s->mass) forget_mass(s);
    int64_t gone = s->n - n;
    if (s->prompt > n) s->prompt = n;
    if (s->stored > n / KV_BLOCK) s->stored = 0;
    s->logits -= (int)(gone < s->n_logits ? gone : s->n_logits);
    s->n_logits -= (int)(gone < s->n_logits ? gone : s->n_logits);
    s->n = n;
    if (s->hashed > n) s->hashed = n / KV_BLOCK * KV_BLOCK;
    for (int i = 0; i < KV_GROUPS; i++) {
        kv_table_cut(&s->main[i], &s->g->main[i], n);
        kv_table_cut(&s->raw[i], &s->g->raw[i], n);
        if (s->dropped_main[i] > n) s->dropped_main[i] = n;
        if (s->dropped_raw[i] > n) s->dropped_raw[i] = n;
    }
    return n;
}

/* Gives back pages that no row to come can reach: what lies behind the windows, and raw blocks but the first and the
 * last two. */
static void drop_unreachable(struct sequence *s)
{
    struct engine *g = s->g;
    for (int i = 0; i < KV_GROUPS; i++) {
        int64_t last = (rows_of(s, i) - 1) / KV_BLOCK * KV_BLOCK - KV_BLOCK;
        int64_t seen = kv_window_range(s->n, g->sinks[i], g->window[i]).first - WINDOW_MARGIN;
        int64_t page = g->main[i].shape.page_size;
        if (seen > s->dropped_main[i] && g->o.layout == KV_PAGED) {
            int64_t from = s->dropped_main[i] / page * page;
            kv_table_drop(&s->main[i], &g->main[i], from > g->sinks[i] ? from : g->sinks[i], seen);
            s->dropped_main[i] = seen;
        }
        if (last > s->dropped_raw[i]) {
            int64_t from = s->dropped_raw[i] > KV_BLOCK ? s->dropped_raw[i] / KV_BLOCK * KV_BLOCK : KV_BLOCK;
            kv_table_drop(&s->raw[i], &g->raw[i], from, last);
            s->dropped_raw[i] = last;
        }
    }
}

/* ---- the index --------------------------------------------------------------------------------------------------- */

/* Keys of the blocks of tokens[0..n) that have none yet; those of the sequence's own tokens stay. */
static void make_keys(struct sequence *s, const int32_t *tokens, int64_t n)
{
    static const uint8_t root[KV_KEY]; /* within an engine, all else is the same */
    for (; s->hashed + KV_BLOCK <= n; s->hashed += KV_BLOCK) {
        int64_t b = s->hashed / KV_BLOCK;
        kv_block_key(b ? s->keys[b - 1] : root, tokens + s->hashed, s->keys[b]);
    }
}

static const uint8_t *page_key(const struct sequence *s, const struct kv_pool *p, int64_t page)
{
    return s->keys[(page + 1) * (p->shape.page_size / KV_BLOCK) - 1];
}

/* Pages that have become full since the sequence had `before` tokens are there for others from now on; of the raw ones
 * block 0, which all that follows sees. */
static void index_pages(struct sequence *s, int64_t before)
{
    struct engine *g = s->g;
    if (!g->o.share) return;
    make_keys(s, s->tokens, s->n);
    for (int i = 0; i < KV_GROUPS; i++) {
        int64_t page = g->main[i].shape.page_size;
        for (int64_t k = before / page; g->main[i].n_pages && k < s->n / page; k++)
            if (k * page >= s->dropped_main[i])
                kv_index_add(&s->main[i], &g->main[i], (int)k, page_key(s, &g->main[i], k), s->tokens + k * page);
        if (before < KV_BLOCK && s->n >= KV_BLOCK && s->raw[i].n && s->raw[i].pages[0] >= 0)
            kv_index_add(&s->raw[i], &g->raw[i], 0, s->keys[0], s->tokens);
    }
}

/* Page k of the group's pool, if it is in the index. */
static int32_t known_page(const struct sequence *s, const struct kv_pool *p, const int32_t *tokens, int64_t k)
{
    return kv_index_find(p, page_key(s, p, k), tokens + k * p->shape.page_size);
}

/* How many of tokens[0..n) the index has what it takes to go on after: in each group all pages up to there that the
 * next row sees. The keys are made. */
static int64_t known(const struct sequence *s, const int32_t *tokens, int64_t n)
{
    const struct engine *g = s->g;
    int64_t page = g->o.page_size, best = 0, run[KV_GROUPS] = { 0 };   /* where the unbroken pages up to here start */
    bool start[KV_GROUPS];
    for (int i = 0; i < KV_GROUPS; i++)
        start[i] = !g->raw[i].n_pages || (n >= KV_BLOCK && known_page(s, &g->raw[i], tokens, 0) >= 0);
    for (int64_t k = 0; (k + 1) * page <= n; k++) {
        bool enough = true;
        for (int i = 0; i < KV_GROUPS; i++) {
            int64_t first = kv_window_range((k + 1) * page, g->sinks[i], g->window[i]).first;
            if (g->main[i].n_pages == 0) continue;
            if (known_page(s, &g->main[i], tokens, k) < 0) {
                run[i] = (k + 1) * page;
                if (!g->window[i] || k * page < g->sinks[i]) return best;
            }
            enough = enough && run[i] <= first && (start[i] || (first >= KV_BLOCK && !g->sinks[i]));
        }
        if (enough) best = (k + 1) * page;
    }
    return best;
}

/* The sequence gets the index's pages of tokens[0..n), whose keys are made. */
static void adopt(struct sequence *s, const int32_t *tokens, int64_t n)
{
    struct engine *g = s->g;
    sequence_cut(s, 0);
    s->hashed = n;
    for (int i = 0; i < KV_GROUPS; i++) {
        int64_t page = g->main[i].shape.page_size, first = kv_window_range(n, g->sinks[i], g->window[i]).first;
        for (int64_t k = 0; g->main[i].n_pages && k < n / page; k++)
            if (k * page < g->sinks[i] || (k + 1) * page > first)
                kv_table_adopt(&s->main[i], &g->main[i], known_page(s, &g->main[i], tokens, k));
            else kv_table_skip(&s->main[i], &g->main[i], (k + 1) * page);
        if (first > g->sinks[i]) s->dropped_main[i] = first / page * page;
        int32_t raw = g->raw[i].n_pages ? known_page(s, &g->raw[i], tokens, 0) : -1;
        if (raw >= 0) kv_table_adopt(&s->raw[i], &g->raw[i], raw);
        kv_table_skip(&s->raw[i], &g->raw[i], n);
        s->dropped_raw[i] = n;
    }
    memmove(s->tokens, tokens, sizeof *tokens * n);
    s->n = n;
}

int64_t sequence_reuse(struct sequence *s, const int32_t *tokens, int64_t n)
{
    const struct engine *g = s->g;
    int64_t same = 0;
    while (g->o.cache && same < n && same < s->n && s->tokens[same] == tokens[same]) same++;
    if (same == n && s->n == n && logits_index(s, n - 1) >= 0) return n;
    int64_t own = resumable(s, same == n ? n - 1 : same);
    if (g->o.share && n - 1 - own >= g->o.page_size) {
        if (s->hashed > same) s->hashed = same / KV_BLOCK * KV_BLOCK;
        make_keys(s, tokens, n - 1);
        int64_t found = known(s, tokens, n - 1);
        s->hashed = s->hashed < same ? s->hashed : same / KV_BLOCK * KV_BLOCK;
        if (found > own) return adopt(s, tokens, found), found;
    }
    return sequence_cut(s, own);
}

/* The last `wanted` rows of the pass just run are this sequence's; their logits end at place `last`. */
static void has_logits(struct sequence *s, int last, int wanted)
{
    s->forward = s->g->forwards;
    s->logits = last;
    s->n_logits = wanted;
}

static bool check_tokens(const struct sequence *s, const int32_t *tokens, int n, struct error *e)
{
    const struct engine *g = s->g;
    for (int i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= g->m->n_vocab)
            return fail(e, GEN_RUN, "token id %d is not in the vocabulary of %d", tokens[i], g->m->n_vocab);
    if (n <= g->ctx - s->n) return true;
    return fail(e, GEN_USAGE, "the context of %lld tokens is full: raise --ctx-size", (long long)g->ctx);
}

/* Gives back the pages past the sequence's tokens. */
static void shrink(struct sequence *s)
{
    for (int i = 0; i < KV_GROUPS; i++) {
        kv_table_cut(&s->main[i], &s->g->main[i], rows_of(s, i));
        kv_table_cut(&s->raw[i], &s->g->raw[i], rows_of(s, i));
    }
}

static bool no_page(const struct sequence *s, struct error *e)
{
    const struct kv_memory *m = &s->g->memory;
    if (m->file_error)
        return fail(e, GEN_RUN, "no KV page is left for token %lld: the file in %s cannot grow: %s", (long long)s->n,
                    m->folder, strerror(m->file_error));
    return fail(e, GEN_RUN, "no KV page is left for token %lld: %s", (long long)s->n, m->limit < SIZE_MAX ?
                "raise --kv-memory, add --kv-offload or lower the number of sequences" :
                "lower --ctx-size or the number of sequences");
}

/* Pages for n tokens more; nothing is changed when there are not enough. */
static bool grow(struct sequence *s, int n, struct error *e)
{
    struct engine *g = s->g;
    for (int i = 0; i < KV_GROUPS; i++) {
        int64_t rows = rows_of(s, i);
        if (kv_table_grow(&s->main[i], &g->main[i], rows, rows + n) &&
            kv_table_grow(&s->raw[i], &g->raw[i], rows, rows + n))
            continue;
        shrink(s);
        return no_page(s, e);
    }
    return true;
}

/* ---- the store --------------------------------------------------------------------------------------------------- */

enum { MOST_BLOCKS = 16 };             /* that are put together, by several threads */
static const size_t MOST_BLOCK_BYTES = (size_t)16 << 20;

/* The last one of n blocks, whose key is given: the root where there are none. */
static struct kvstore_block last_block(int64_t n, const uint8_t key[KV_KEY])
{
    struct kvstore_block b = { .index = n - 1 };
    memcpy(b.key, key, KV_KEY);
    return b;
}

/* Goes on to the next block of the text. The window option counts from the first block on of which a token does not see
 * all before it: what comes earlier is the same with any window, or none. */
static void next_block(const struct engine *g, struct kvstore_block *b, const int32_t *tokens)
{
    int32_t window[KV_BLOCK] = { g->sinks[KV_GLOBAL], g->window[KV_GLOBAL] };
    memcpy(b->parent, b->key, KV_KEY);
    b->index++;
    if (window[1] && b->index == ((int64_t)window[0] + window[1]) / KV_BLOCK)
        kv_block_key(b->key, window, b->parent);
    b->tokens = tokens + b->index * KV_BLOCK;
    kv_block_key(b->parent, b->tokens, b->key);
}

/* A block's data and parts as sequence_read_block gives them: where it lies, or copied to `room`. */
static const void *block_data(const struct sequence *s, int64_t block, void *room, unsigned *parts)
{
    const struct engine *g = s->g;
    const struct kv_table *t = &s->main[KV_GLOBAL];
    int64_t pos = block * KV_BLOCK;
    bool one = !g->main[KV_LOCAL].n_pages && !g->raw[KV_GLOBAL].n_pages && !s->gone && comm_size(g->o.comm) == 1
            && (pos >= s->dropped_main[KV_GLOBAL] || pos < g->sinks[KV_GLOBAL])
            && kv_table_holds(t, &g->main[KV_GLOBAL], pos, pos + KV_BLOCK);
    const void *at = one ? kv_block_at(t, &g->main[KV_GLOBAL], pos) : NULL;
    *parts = at ? 1u << KV_GLOBAL : sequence_read_block(s, block, room);
    return at ? at : room;
}

/* Puts the blocks after *b of the first n tokens into the store, but those that are there with all parts. */
static void put_blocks(const struct sequence *s, struct kvstore *k, struct kvstore_block *b, int64_t n)
{
    const struct engine *g = s->g;
    struct kvstore_block some[MOST_BLOCKS];
    int have = 0;
    while ((b->index + 2) * KV_BLOCK <= n) {
        next_block(g, b, s->tokens);
        if (!(engine_block_needs(g, b->index, (b->index + 1) * KV_BLOCK) & ~k->find(k, b))) continue;
        b->data = block_data(s, b->index, g->blocks + (size_t)have * g->block_bytes, &b->parts);
        b->bytes = engine_block_bytes(g, b->index, b->parts);
        if (!b->parts) continue;
        some[have++] = *b;
        if (have == g->n_blocks) k->put(k, some, have), have = 0;
    }
    if (have) k->put(k, some, have);
}

/* Puts the prompt's new blocks into the engine's store, before parts of them are dropped. */
static void store_prompt(struct sequence *s)
{
    struct engine *g = s->g;
    int64_t n = s->n < s->prompt ? s->n : s->prompt;
    if (!g->store || n / KV_BLOCK <= s->stored) return;
    struct kvstore_block b = last_block(s->stored, s->stored ? s->stored_key : g->root);
    put_blocks(s, g->store, &b, n);
    s->stored = n / KV_BLOCK;
    memcpy(s->stored_key, b.key, KV_KEY);
    if (s->stored < s->prompt / KV_BLOCK) return g->store->pause(g->store);
    b = last_block(0, g->root);        /* all its blocks are used now, after those of prompts that ended meanwhile */
    while (b.index + 1 < s->stored) next_block(g, &b, s->tokens), g->store->find(g->store, &b);
    g->store->done(g->store);
}

static bool room_for_blocks(struct engine *g, struct error *e)
{
    if (g->blocks) return true;
    g->block_bytes = engine_block_bytes(g, 0, KV_ALL_PARTS);
    size_t n = MOST_BLOCK_BYTES / g->block_bytes;
    g->n_blocks = n < 1 ? 1 : n < MOST_BLOCKS ? (int)n : MOST_BLOCKS;
    g->blocks = reserve_bytes(g->block_bytes * (size_t)g->n_blocks, "blocks of the cache", e);
    return g->blocks != NULL;
}

bool engine_use_store(struct engine *g, struct kvstore *k, const uint8_t root[KV_KEY], struct error *e)
{
    if (k && !room_for_blocks(g, e)) return false;
    g->store = g->o.cache ? k : NULL;
    memcpy(g->root, root, KV_KEY);
    return true;
}

bool sequence_store(const struct sequence *s, struct kvstore *k, const uint8_t root[KV_KEY], struct error *e)
{
    struct kvstore_block b = last_block(0, root);
    if (s->gone)
        return fail(e, GEN_RUN, "the cache has holes because of --evict, and cannot be kept for other texts");
    if (!room_for_blocks(s->g, e)) return false;
    put_blocks(s, k, &b, s->n);
    k->done(k);
    return true;
}

/* Can a sequence that has the blocks before `from` go on after n blocks when the others come from the store? */
static bool enough(const struct engine *g, const struct kvstore_block *chain, int64_t from, int64_t n)
{
    for (int64_t i = from; i < n; i++)
        if (engine_block_needs(g, i, n * KV_BLOCK) & ~chain[i].parts) return false;
    return true;
}

void sequence_restore(struct sequence *s, struct kvstore *k, const uint8_t root[KV_KEY], const int32_t *tokens,
                      int64_t n)
{
    struct engine *g = s->g;
    struct error ignored;
    int64_t from = s->n / KV_BLOCK, most = n / KV_BLOCK, found = 0;
    struct kvstore_block b = last_block(0, root), *chain = most > from ? malloc((size_t)most * sizeof *chain) : NULL;
    if (!chain || comm_size(g->o.comm) > 1) return free(chain);
    for (bool missing = false; found < most && !missing; found += !missing) {
        next_block(g, &b, tokens);
        b.parts = k->find(k, &b);      /* of its own ones, too: they are used */
        if (found < from) b.parts = KV_ALL_PARTS;
        b.bytes = engine_block_bytes(g, found, b.parts);
        chain[found] = b;
        missing = engine_block_needs(g, found, most * KV_BLOCK) & ~b.parts;
    }
    while (found > from && !enough(g, chain, from, found)) found--;
    if (found > from && sequence_cut(s, from * KV_BLOCK) < from * KV_BLOCK) {
        sequence_restore(s, k, root, tokens, n);       /* less of its own stays */
    } else if (found > from) {
        for (int64_t i = from; i < found; i++) {
            const void *data = chain[i].parts ? k->read(k, &chain[i]) : "";
            if (!data || !sequence_write_block(s, chain[i].tokens, data, chain[i].parts, &ignored)) break;
        }
        sequence_cut(s, s->n);
        if (k == g->store && s->stored == from && s->n) {
            s->stored = s->n / KV_BLOCK;
            memcpy(s->stored_key, chain[s->stored - 1].key, KV_KEY);
        }
    }
    free(chain);
}

void sequence_begin(struct sequence *s, const int32_t *tokens, int64_t n)
{
    struct engine *g = s->g;
    if (!g->store) return;
    sequence_restore(s, g->store, g->root, tokens, n - 1);
    s->prompt = n;
    store_prompt(s);                   /* what the sequence had: the reply before this prompt */
    if (s->stored == n / KV_BLOCK) g->store->done(g->store);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static struct kv_slots slots(const struct kv_pool *p, const struct kv_table *t)
{
    return (struct kv_slots){ &p->shape, p->base, t->pages, p->slow, p->first_slow };
}

/* What the forward pass sees of a sequence. */
static void view(const struct sequence *s, struct kv_view out[KV_GROUPS])
{
    const struct engine *g = s->g;
    for (int k = 0; k < KV_GROUPS; k++)
        out[k] = (struct kv_view){
            .main = slots(&g->main[k], &s->main[k]), .raw = slots(&g->raw[k], &s->raw[k]),
            .sinks = g->sinks[k], .window = g->window[k]
        };
    for (int k = 0; k < KV_GROUPS; k++)
        if (!g->raw[k].n_pages) out[k].raw.shape = NULL;
    struct kv_view *v = &out[KV_GLOBAL];
    v->gone = s->gone;
    v->mass = s->mass;
    v->mass_rows = mass_rows(g);
    v->voters = s->voters;
    v->prompt = s->prompt_end;
    v->fade = g->o.evict == EVICT_SNAPKV ? FADE_SNAPKV : FADE_ATTENTION;
}

void sequence_prompt_ends(struct sequence *s, int64_t n)
{
    if (n <= s->n) return;             /* it was parked, and goes on */
    s->evict_at = n;
    s->voters = s->g->o.evict == EVICT_SNAPKV ? n - VOTERS : 0;
    s->prompt_end = n;
}

int64_t sequence_most(const struct sequence *s) { return s->mass ? s->evict_at - s->n : INT64_MAX; }

/* kv_compact, where the pages are. `v` is changed. */
static void compact(struct engine *g, struct kv_view *v, const struct kv_middle *m, int64_t rows)
{
    struct kv_device *d = g->memory.device;
    size_t kept = mass_lines(g) * (m->keep / kv_unit(v->main.shape)), pages = (rows + KV_BLOCK - 1) / KV_BLOCK;
    if (!d) return kv_compact(v, m, g->kept);
    int32_t *table = g->moves + kept;
    if (!kept || !d->copy(d, g->moves, 0, g->kept, 0, kept * sizeof *g->kept, 1) ||
        !d->copy(d, table, 0, v->main.pages, 0, pages * sizeof *table, 1))
        return;
    v->main.pages = table;
    d->compact(d, v, m, g->moves);
}

/* The sequence is at its prompt's end, or EVICT_EVERY tokens further: it shrinks to the budget. */
static void evict(struct sequence *s)
{
    struct engine *g = s->g;
    struct kv_view views[KV_GROUPS];
    int64_t rows = rows_of(s, KV_GLOBAL);
    struct kv_middle m = kv_middle_of(rows, g->o.budget);
    int64_t more = m.end - m.begin - m.keep;
    s->evict_at = s->n + EVICT_EVERY;
    s->voters = 0;
    view(s, views);
    views[KV_GLOBAL].mass = get_mass(s);
    kv_choose(&views[KV_GLOBAL], &m, rows, g->scratch, g->kept);
    put_mass(s);
    compact(g, &views[KV_GLOBAL], &m, rows);
    kv_table_remove(&s->main[KV_GLOBAL], &g->main[KV_GLOBAL], m.begin + m.keep, m.end);
    kv_table_remove(&s->raw[KV_GLOBAL], &g->raw[KV_GLOBAL], m.begin + m.keep, m.end);
    s->gone += more;
    s->dropped_raw[KV_GLOBAL] -= more;
}

/* The pages are there, the numbers of rows fit. */
static bool run(struct engine *g, const struct work *w, int n, struct error *e)
{
    int rows = 0, wanted = 0;
    for (int i = 0; i < n; i++) {
        struct sequence *s = w[i].s;
        view(s, g->views[i]);
        for (int k = 0; k < w[i].n; k++)
            g->rows[rows++] = (struct row){ w[i].tokens[k], i, s->n + k,
                                            k >= w[i].n - w[i].want ? WANT_LOGITS : WANT_NOTHING, s->top };
    }
    struct batch batch = { g->rows, rows, (const struct kv_view (*)[KV_GROUPS])g->views };
    g->forwards++;
    if (!g->b->forward(g->b, &batch, e)) return false;
    for (int i = 0; i < n; i++) {
        struct sequence *s = w[i].s;
        memmove(s->tokens + s->n, w[i].tokens, sizeof *s->tokens * w[i].n);
        s->n += w[i].n;
        wanted += w[i].want;
        has_logits(s, wanted - 1, w[i].want);
        index_pages(s, s->n - w[i].n);
        store_prompt(s);
        drop_unreachable(s);
        if (s->mass && s->n >= s->evict_at) evict(s);
    }
    return true;
}

static void set_parked(struct sequence *s, bool parked)
{
    for (int i = 0; i < KV_GROUPS; i++) s->main[i].parked = s->raw[i].parked = parked;
}

void sequence_park(struct sequence *s) { set_parked(s, true); }

void sequence_prefetch(struct sequence *s)
{
    for (int i = 0; i < KV_GROUPS; i++) {
        kv_table_prefetch(&s->main[i], &s->g->main[i]);
        kv_table_prefetch(&s->raw[i], &s->g->raw[i]);
    }
}

/* Pages of the file come back into memory; the system reads ahead what stays there and is read in place. */
static void bring_back(struct sequence *s)
{
    if (!s->g->memory.folder) return;
    for (int i = 0; i < KV_GROUPS; i++) {
        kv_table_promote(&s->main[i], &s->g->main[i]);
        kv_table_promote(&s->raw[i], &s->g->raw[i]);
    }
    sequence_prefetch(s);
}

bool engine_forward(struct engine *g, const struct work *w, int n, struct error *e)
{
    int rows = 0, wanted = 0, grown = 0;
    for (int i = 0; i < n; i++) rows += w[i].n, wanted += w[i].want;
    if (n > g->o.max_sequences || rows > g->max_rows || wanted > LOGIT_ROWS)
        return fail(e, GEN_RUN, "%d tokens of %d sequences with %d logits are more than a batch takes: %d, %d, %d",
                    rows, n, wanted, g->max_rows, g->o.max_sequences, LOGIT_ROWS);
    bool ok = true;
    for (int i = 0; i < n && ok; i++) ok = check_tokens(w[i].s, w[i].tokens, w[i].n, e);
    for (int i = 0; i < n; i++) set_parked(w[i].s, false);
    for (; ok && grown < n; grown += ok) ok = grow(w[grown].s, w[grown].n, e);
    for (int i = 0; i < n && ok; i++) bring_back(w[i].s);
    ok = ok && run(g, w, n, e);
    for (int i = 0; !ok && i < grown; i++) shrink(w[i].s);
    return ok;
}

int engine_rows(const struct engine *g) { return g->max_rows; }

/* ---- room -------------------------------------------------------------------------------------------------------- */

size_t engine_bytes_for(const struct engine *g, int64_t n)
{
    size_t bytes = 0;
    for (int i = 0; i < KV_GROUPS; i++) {
        int64_t page = g->main[i].shape.page_size, pages = (n + page - 1) / page;
        int64_t most = g->window[i] ? g->most_pages[i] : pages;
        int64_t raw = g->raw[i].n_pages ? (n + KV_BLOCK - 1) / KV_BLOCK : 0;
        bytes += (size_t)(pages < most ? pages : most) * kv_page_bytes(&g->main[i].shape);
        bytes += (size_t)(raw < 4 ? raw : 4) * kv_page_bytes(&g->raw[i].shape);
    }
    return bytes;
}

size_t sequence_bytes_to(const struct sequence *s, int64_t n)
{
    size_t has = engine_bytes_for(s->g, s->n), wants = engine_bytes_for(s->g, n);
    return wants > has ? wants - has : 0;
}

size_t sequence_bytes_more(const struct sequence *s, int64_t n)
{
    const struct engine *g = s->g;
    size_t bytes = 0;
    for (int i = 0; i < KV_GROUPS; i++) {
        int64_t rows = rows_of(s, i);
        int main = kv_table_lacks(&s->main[i], &g->main[i], rows, rows + n);
        int raw = kv_table_lacks(&s->raw[i], &g->raw[i], rows, rows + n);
        bytes += (size_t)main * kv_page_bytes(&g->main[i].shape) + (size_t)raw * kv_page_bytes(&g->raw[i].shape);
    }
    return bytes;
}

size_t engine_bytes_of_pass(const struct engine *g, int64_t rows)
{
    size_t bytes = 0;
    for (int i = 0; i < KV_GROUPS; i++) {
        if (g->raw[i].n_pages) bytes += (size_t)(rows / KV_BLOCK + 1) * kv_page_bytes(&g->raw[i].shape);
        if (g->main[i].n_pages && g->window[i])
            bytes += (size_t)(rows / g->main[i].shape.page_size + 1) * kv_page_bytes(&g->main[i].shape);
    }
    return bytes;
}

size_t engine_room(const struct engine *g)
{
    size_t room = 0, idle = 0;
    for (int i = 0; i < g->memory.n_pools; i++) {
        const struct kv_pool *p = g->memory.pools[i];
        size_t bytes = kv_page_bytes(&p->shape);
        room += p->tier[KV_FAST].n_free * bytes;
        idle += p->tier[KV_FAST].n_idle * bytes;
        for (const struct kv_table *t = p->tables; t && p->first_slow < p->n_pages; t = t->next)
            for (int k = 0; t->parked && k < t->n; k++)
                if (t->pages[k] >= 0 && t->pages[k] < p->n_fast && p->pages[t->pages[k]].refs == 1) idle += bytes;
    }
    if (room > g->memory.limit - g->memory.used) room = g->memory.limit - g->memory.used;
    return room + idle;
}

/* Computes tokens[s->n..n) in chunks; `first`..n-1 want logits, handed to `each` where there is one. */
static bool extend(struct sequence *s, const int32_t *tokens, int64_t n, int64_t first, score_row each, void *user,
                   const volatile int *stop, struct error *e)
{
    struct engine *g = s->g;
    int64_t begin = s->n;
    while (s->n < n) {
        if (stop && *stop) return true;
        int64_t most = n - first > 1 && g->chunk > LOGIT_ROWS ? LOGIT_ROWS : g->chunk, left = n - s->n;
        if (left > sequence_most(s)) left = sequence_most(s);
        int rows = (int)(left < most ? left : most), wanted = s->n + rows > first ? (int)(s->n + rows - first) : 0;
        if (wanted > rows) wanted = rows;
        if (!engine_forward(g, &(struct work){ s, tokens + s->n, rows, wanted }, 1, e)) return false;
        for (int i = 0; each && i < wanted; i++) {
            const float *logits = g->b->logits(g->b, i);
            int64_t pos = s->n - wanted + i;
            if (!logits ? !unreadable(pos, e) : !each(user, pos, logits, e)) return false;
        }
        if (g->o.progress && n - begin > g->chunk) g->o.progress("prefill", (double)(s->n - begin) / (n - begin));
    }
    return true;
}

static bool fits(const struct engine *g, int64_t n, struct error *e)
{
    if (n >= 1 && n <= g->ctx) return true;
    return fail(e, GEN_USAGE, "the prompt has %lld tokens but the context holds %lld: shorten it or raise --ctx-size",
                (long long)n, (long long)g->ctx);
}

bool sequence_sync(struct sequence *s, const int32_t *tokens, int64_t n, int64_t *reused, const volatile int *stop,
                   struct error *e)
{
    if (!fits(s->g, n, e)) return false;
    int64_t same = sequence_reuse(s, tokens, n);
    if (same < n) sequence_begin(s, tokens, n);
    if (reused) *reused = s->n;
    if (same < n) sequence_prompt_ends(s, n);
    return same == n || extend(s, tokens, n, n - 1, NULL, NULL, stop, e);
}

bool sequence_score(struct sequence *s, const int32_t *tokens, int64_t n, int64_t first, score_row each, void *user,
                    struct error *e)
{
    if (!fits(s->g, n, e)) return false;
    sequence_cut(s, 0);
    sequence_prompt_ends(s, first + 1);
    return extend(s, tokens, n, first, each, user, NULL, e);
}

bool sequence_extend(struct sequence *s, const int32_t *tokens, int n, struct error *e)
{
    return engine_forward(s->g, &(struct work){ s, tokens, n, n }, 1, e);
}

bool engine_step(struct engine *g, struct sequence *const *seqs, const int32_t *tokens, int n, struct error *e)
{
    if (!g->o.cache && n == 1) {       /* the baseline: nothing is kept from the last step */
        struct sequence *s = seqs[0];
        if (!check_tokens(s, tokens, 1, e)) return false;
        s->tokens[s->n] = tokens[0];
        int64_t all = s->n + 1;
        sequence_cut(s, 0);
        return extend(s, s->tokens, all, all - 1, NULL, NULL, NULL, e);
    }
    for (int i = 0; i < n && i < g->o.max_sequences; i++) g->step[i] = (struct work){ seqs[i], &tokens[i], 1, 1 };
    return engine_forward(g, g->step, n, e);
}

bool sequence_fork(struct sequence **out, const struct sequence *from, struct error *e)
{
    struct sequence *s;
    if (from->mass) return fail(e, GEN_RUN, "a sequence with --evict cannot be shared");
    if (!sequence_open(&s, from->g, e)) return false;
    memcpy(s->tokens, from->tokens, sizeof *s->tokens * from->n);
    for (int i = 0; i < KV_GROUPS; i++) {
        kv_table_share(&s->main[i], &from->main[i], &s->g->main[i]);
        kv_table_share(&s->raw[i], &from->raw[i], &s->g->raw[i]);
        s->dropped_main[i] = from->dropped_main[i];
        s->dropped_raw[i] = from->dropped_raw[i];
    }
    s->n = from->n;
    s->forward = from->forward;
    s->logits = from->logits;
    s->n_logits = from->n_logits;
    *out = s;
    return true;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

static void hash_text(struct sha256_ctx *c, const char *text)
{
    sha256_update(c, strlen(text) + 1, (const void *)text);
}

static void hash_rope(struct sha256_ctx *c, const struct rope *r)
{
    sha256_update(c, sizeof r->n, (const void *)&r->n);
    sha256_update(c, sizeof r->scale, (const void *)&r->scale);
    sha256_update(c, sizeof *r->freq * (r->n / 2), (const void *)r->freq);
}

void engine_root_key(const struct engine *g, const uint8_t model[KV_KEY], uint8_t key[KV_KEY])
{
    const struct model *m = g->m;
    int32_t all[] = { KV_NUMERICS, KV_BLOCK, g->o.type_k, g->o.type_v, m->n_layer, m->n_kv, m->head_k, m->head_v,
                      m->rope_order, g->window[KV_LOCAL] };
    struct sha256_ctx c;
    sha256_init(&c);
    hash_text(&c, "gen kv");
    sha256_update(&c, KV_KEY, model);
    hash_text(&c, g->b->name);
    hash_text(&c, g->b->isa);
    sha256_update(&c, sizeof all, (const void *)all);
    hash_rope(&c, &m->rope_global);
    hash_rope(&c, &m->rope_local);
    sha256_digest(&c, KV_KEY, key);
}

static bool has_raw(const struct engine *g, int group, int64_t block) { return block == 0 && g->raw[group].n_pages; }

size_t engine_block_bytes(const struct engine *g, int64_t block, unsigned parts)
{
    size_t n = 0;
    for (int i = 0; i < KV_GROUPS; i++)
        if (parts >> i & 1)
            n += kv_block_bytes(&g->main[i].shape) + (has_raw(g, i, block) ? kv_block_bytes(&g->raw[i].shape) : 0);
    return n;
}

unsigned engine_block_needs(const struct engine *g, int64_t block, int64_t n)
{
    unsigned parts = 0;
    for (int i = 0; i < KV_GROUPS; i++) {
        int64_t first = kv_window_range(n, g->sinks[i], g->window[i]).first, pos = block * KV_BLOCK;
        bool seen = pos < n && (pos < g->sinks[i] || pos + KV_BLOCK > first);
        if (g->main[i].n_pages && seen) parts |= 1u << i;
    }
    return parts;
}

unsigned sequence_read_block(const struct sequence *s, int64_t block, void *out)
{
    const struct engine *g = s->g;
    unsigned parts = 0;
    int64_t pos = block * KV_BLOCK;
    unsigned char *at = out;
    if (block < 0 || pos + KV_BLOCK > s->n || s->gone || comm_size(g->o.comm) > 1) return 0;
    for (int i = 0; i < KV_GROUPS; i++) {
        bool kept = pos >= s->dropped_main[i] || pos < g->sinks[i];
        if (!g->main[i].n_pages || !kept || !kv_table_holds(&s->main[i], &g->main[i], pos, pos + KV_BLOCK)) continue;
        if (!kv_block_read(&s->main[i], &g->main[i], pos, at)) return 0;
        at += kv_block_bytes(&g->main[i].shape);
        if (has_raw(g, i, block)) {
            if (!kv_block_read(&s->raw[i], &g->raw[i], pos, at)) return 0;
            at += kv_block_bytes(&g->raw[i].shape);
        }
        parts |= 1u << i;
    }
    return parts;
}

bool sequence_write_block(struct sequence *s, const int32_t tokens[KV_BLOCK], const void *in, unsigned parts,
                          struct error *e)
{
    struct engine *g = s->g;
    const unsigned char *at = in;
    int64_t pos = s->n;
    if (pos % KV_BLOCK) return fail(e, GEN_RUN, "a block cannot be put after %lld tokens", (long long)pos);
    if (s->mass) return fail(e, GEN_RUN, "a block cannot be put into a sequence that evicts");
    if (!check_tokens(s, tokens, KV_BLOCK, e)) return false;
    for (int i = 0; i < KV_GROUPS; i++) {
        bool part = parts >> i & 1, raw = part && has_raw(g, i, pos / KV_BLOCK);
        if ((part && !kv_table_grow(&s->main[i], &g->main[i], pos, pos + KV_BLOCK)) ||
            (raw && !kv_table_grow(&s->raw[i], &g->raw[i], pos, pos + KV_BLOCK)))
            return shrink(s), no_page(s, e);
    }
    for (int i = 0; i < KV_GROUPS; i++) {
        bool part = parts >> i & 1, raw = part && has_raw(g, i, pos / KV_BLOCK);
        if (part && g->main[i].n_pages) {
            kv_block_write(&s->main[i], &g->main[i], pos, at);
            at += kv_block_bytes(&g->main[i].shape);
        } else kv_table_skip(&s->main[i], &g->main[i], pos + KV_BLOCK), s->dropped_main[i] = pos + KV_BLOCK;
        if (raw) {
            kv_block_write(&s->raw[i], &g->raw[i], pos, at);
            at += kv_block_bytes(&g->raw[i].shape);
        } else kv_table_skip(&s->raw[i], &g->raw[i], pos + KV_BLOCK);
        s->dropped_raw[i] = pos + KV_BLOCK;
    }
    memcpy(s->tokens + pos, tokens, sizeof *tokens * KV_BLOCK);
    s->n = pos + KV_BLOCK;
    s->forward = 0;
    index_pages(s, pos);
    drop_unreachable(s);
    return true;
}
