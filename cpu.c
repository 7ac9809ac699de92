/* cpu.c - the CPU backend: weights made ready for the kernels, and the forward pass as stages that a team of threads
 * goes through.
 *
 * The pieces of a stage (rows of a matrix, tokens, attention tasks) are done by whichever thread is free, and no result
 * depends on who computes it. A stage of one piece, as is the work per token with one token in the batch, is done on
 * the spot by the thread that finished the stage before: nobody could help. */
#define _GNU_SOURCE
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend.h"
#include "comm.h"
#include "kernels.h"
#include "memory.h"
#include "threads.h"

struct cpu_layer {
    struct weight qkv[3], o, gate, up, down;
    const float *attn_norm, *q_bias, *k_bias, *v_bias, *o_bias, *q_norm, *k_norm, *attn_post_norm, *ffn_norm;
    const float *ffn_post_norm;
    int group, index;                  /* KV group, and layer number in that group */
};

enum { SPLIT_TOKENS = 64 };            /* most tokens of a batch whose attention is dealt out split by split */

/* Consecutive rows of one sequence whose attention is computed together. */
struct tile { int row, n; };

/* A piece of the attention of single rows: rows [row, row + n), each of another sequence, look at the split with this
 * number. Several do it together where it lies in the same pages for all. */
struct part { int row, n, split; };

struct cpu {
    struct backend base;
    const struct model *m;
    const struct kernels *k;
    struct team *team;
    struct comm *comm;                 /* NULL = the model is whole */
    struct cpu_layer *layers;
    struct weight embd, out;
    const float *out_norm, *out_bias;
    int max_rows;
    float *x;                          /* [rows][n_embd] residual stream */
    float *input;                      /* [rows][max(n_embd, n_head * head_v)] of the next product, in floats */
    struct acts acts, ffn;             /* the same, quantised; [rows][n_ff] */
    float *cs[KV_GROUPS], *sn[KV_GROUPS];          /* [rows][rope.n / 2] angles of the row's position */
    float *sink_cs, *sink_sn;                      /* [rows][rope.n / 2] of the position that it sees the sinks from */
    float *sink_q;                     /* [rows][n_head * head_k] queries for the sinks */
    float *qkv, *att, *proj, *gate, *up;           /* [rows][..] outputs of products, and the attention's */
    float *logits;                     /* [LOGIT_ROWS][n_vocab] */
    float *gathered;                   /* [ranks][..] by rank: one row's logits, or all rows' states */
    float *states;                     /* [rows][n_head]: m, l, o[head_v] of attention to own tokens; by_token only */
    struct tile *tiles;
    int *wanted;                       /* [LOGIT_ROWS] rows of the batch */
    float *part;                       /* results of parts: see part_at */
    struct part *parts[KV_GROUPS];     /* [split_tokens * max_splits] of the batch */
    int n_parts[KV_GROUPS], n_splits[KV_GROUPS];   /* ... and how many there were if each row were alone */
    int part_heads[KV_GROUPS];         /* KV heads that a thread computes together: divides n_kv */
    int n_single;                      /* rows at the batch's beginning whose attention is done in parts */
    size_t split_tokens, max_splits;   /* of `part` */
    char **scratch;                    /* [threads] of scratch_bytes each */
    void *arena, *weights;
    size_t arena_bytes, weights_bytes;

    const struct batch *batch;         /* the forward pass under way */
    int n_tiles, n_wanted;
    int stage, layer;                  /* of the pass: see stages */
    bool weighs;                       /* a sequence of the batch sums attention's mass */
};

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Cuts 64-byte aligned pieces off an arena; with base NULL it only adds up. */
struct carver { char *base; size_t used; };
static void *carve(struct carver *c, size_t count, size_t size)
{
    size_t at = c->used;
    c->used += (count * size + 127) & ~(size_t)63;     /* a spare line after each piece */
    return c->base ? c->base + at : NULL;
}

static void carve_acts(struct carver *c, struct acts *a, size_t rows, int k)
{
    size_t k32 = ((size_t)k + 31) / 32 * 32;
    a->b = carve(c, rows * k32 / 32, sizeof *a->b);
}

static int widest(const struct model *m)
{
    int att = m->n_head * m->head_v;
    return att > m->n_embd ? att : m->n_embd;
}

static int qkv_width(const struct model *m) { return m->n_head * m->head_k + m->n_kv * (m->head_k + m->head_v); }

/* Floats of one thread's attention scratch: queries, their results, a split's results, the kernel's own. */
static size_t attend_floats(const struct model *m)
{
    return (size_t)ATTEND_ROWS * (m->head_k + 2 * m->head_v + 4) + ATTEND_SCRATCH;
}

static void carve_all(struct cpu *c, struct carver *v)
{
    const struct model *m = c->m;
    size_t rows = c->max_rows, threads = team_size(c->team);
    size_t scratch = c->k->scratch_bytes, att = attend_floats(m) * sizeof(float);
    size_t angles = rows * (m->rope_global.n / 2);
    c->x = carve(v, rows * m->n_embd, sizeof(float));
    c->input = carve(v, rows * widest(m), sizeof(float));
    carve_acts(v, &c->acts, rows, widest(m));
    carve_acts(v, &c->ffn, rows, m->n_ff);
    for (int g = 0; g < KV_GROUPS; g++) {
        c->cs[g] = carve(v, angles, sizeof(float));
        c->sn[g] = carve(v, angles, sizeof(float));
    }
    c->sink_cs = carve(v, angles, sizeof(float));
    c->sink_sn = carve(v, angles, sizeof(float));
    c->sink_q = carve(v, rows * m->n_head * m->head_k, sizeof(float));
    c->qkv = carve(v, rows * qkv_width(m), sizeof(float));
    c->att = carve(v, rows * m->n_head * m->head_v, sizeof(float));
    c->proj = carve(v, rows * m->n_embd, sizeof(float));
    c->gate = carve(v, rows * m->n_ff, sizeof(float));
    c->up = carve(v, rows * m->n_ff, sizeof(float));
    c->logits = carve(v, (size_t)LOGIT_ROWS * m->n_vocab, sizeof(float));
    size_t ranks = comm_size(c->comm), states = m->by_token ? rows * m->n_head * (m->head_v + 2) : 0;
    size_t gathered = ranks == 1 ? 0 : m->n_vocab / ranks + 1 > states ? m->n_vocab / ranks + 1 : states;
    c->states = carve(v, states, sizeof(float));
    c->gathered = carve(v, ranks * gathered, sizeof(float));
    c->tiles = carve(v, c->max_rows, sizeof *c->tiles);
    c->wanted = carve(v, LOGIT_ROWS, sizeof *c->wanted);
    c->part = carve(v, c->split_tokens * c->max_splits * m->n_head * (m->head_v + 2), sizeof(float));
    for (int g = 0; g < KV_GROUPS; g++) c->parts[g] = carve(v, c->split_tokens * c->max_splits, sizeof *c->parts[g]);
    for (size_t i = 0; i < threads; i++) c->scratch[i] = carve(v, 1, scratch > att ? scratch : att);
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

/* One matrix to be made ready, and where. */
struct load { const struct matrix *src; struct weight *dst; char *at; };

struct loading {
    struct cpu *c;
    struct load *list;
    int n;
    struct piece { int load; int64_t tile0, tile1; } *pieces;
    int n_pieces;
    atomic_int done;
    atomic_bool failed;
    struct error *e;
    void (*progress)(double);
};

/* Rows of a piece of about 256 KiB, whole tiles. */
static int64_t piece_tiles(const struct cpu *c, const struct matrix *x)
{
    int64_t n = (256 << 10) / (int64_t)(matrix_row_bytes(x) * c->k->tile);
    return n < 1 ? 1 : n;
}

static void load_piece(void *user, int i, int thread)
{
    struct loading *l = user;
    struct cpu *c = l->c;
    const struct piece *p = &l->pieces[i];
    const struct load *w = &l->list[p->load];
    if (atomic_load(&l->failed)) return;
    int64_t row0 = p->tile0 * c->k->tile, row1 = p->tile1 * c->k->tile;
    if (row1 > (int64_t)w->src->rows) row1 = w->src->rows;
    size_t bytes = (size_t)(row1 - row0) * matrix_row_bytes(w->src);
    struct error mine = { 0 };
    void *dst = w->at + (size_t)row0 * matrix_row_bytes(w->src);
    if (w->dst->packed && !(dst = malloc(bytes)))
        fail(&mine, GEN_RUN, "cannot allocate %zu bytes to read the weights", bytes);
    if (mine.code || !matrix_read(c->m, w->src, row0, row1 - row0, dst, &mine)) {
        if (!atomic_exchange(&l->failed, true)) *l->e = mine;
    } else if (w->dst->packed)
        c->k->pack(w->dst->type, dst, w->dst->rows, w->dst->cols, p->tile0, p->tile1, w->at);
    if (w->dst->packed) free(dst);
    int done = atomic_fetch_add(&l->done, 1) + 1;
    if (thread == 0 && l->progress) l->progress((double)done / l->n_pieces);
}

/* Decides how each matrix is kept: read into memory, packed where the kernels have a layout for the type, else in place
 * in the mapped file. */
static void plan(struct loading *l, const struct matrix *src, struct weight *dst)
{
    struct cpu *c = l->c;
    const void *map = matrix_data(c->m, src);
    enum tensor_type type = matrix_type(src);
    bool raw = c->k->packed_bytes(type, src->rows, src->columns) == 0;
    *dst = (struct weight){ type, (int64_t)src->rows, (int64_t)src->columns, !raw, NULL };
    if (raw && map) dst->data = map;
    else l->list[l->n++] = (struct load){ src, dst, NULL };
}

static void plan_all(struct loading *l)
{
    struct cpu *c = l->c;
    for (int i = 0; i < c->m->n_layer; i++) {
        const struct layer *s = &c->m->layers[i];
        struct cpu_layer *d = &c->layers[i];
        plan(l, &s->q, &d->qkv[0]);
        plan(l, &s->k, &d->qkv[1]);
        plan(l, &s->v, &d->qkv[2]);
        plan(l, &s->o, &d->o);
        plan(l, &s->gate, &d->gate);
        plan(l, &s->up, &d->up);
        plan(l, &s->down, &d->down);
    }
    plan(l, &c->m->out, &c->out);
    bool tied = c->m->out.tensor == c->m->embd.tensor && c->m->out.rows == c->m->embd.rows;
    const void *map = gguf_data(c->m->file, c->m->embd.tensor);
    if (map) c->embd = (struct weight){ c->m->embd.tensor->type, c->m->n_vocab, c->m->n_embd, false, map };
    else if (!tied) plan(l, &c->m->embd, &c->embd);
}

static bool load_weights(struct cpu *c, void (*progress)(double), struct error *e)
{
    struct loading l = { .c = c, .e = e, .progress = progress };
    l.list = alloc_zeroed((size_t)c->m->n_layer * 7 + 2, sizeof *l.list, "the list of weights", e);
    if (!l.list) return false;
    plan_all(&l);
    struct carver v = { NULL, 0 };
    size_t n_pieces = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < l.n; i++) {
            const struct matrix *x = l.list[i].src;
            size_t bytes = l.list[i].dst->packed ? c->k->packed_bytes(matrix_type(x), x->rows, x->columns)
                                                 : x->rows * matrix_row_bytes(x);
            l.list[i].at = carve(&v, bytes, 1);
            l.list[i].dst->data = l.list[i].at;
            int64_t tiles = ((int64_t)x->rows + c->k->tile - 1) / c->k->tile, step = piece_tiles(c, x);
            if (pass == 0) n_pieces += (tiles + step - 1) / step;
            else
                for (int64_t t = 0; t < tiles; t += step)
                    l.pieces[l.n_pieces++] = (struct piece){ i, t, t + step < tiles ? t + step : tiles };
        }
        if (pass) break;
        c->weights_bytes = v.used;
        c->weights = v.base = reserve_bytes(v.used, "the weights", e);
        if (v.base) madvise(v.base, v.used, MADV_HUGEPAGE);           /* read from end to end for each token */
        l.pieces = alloc_zeroed(n_pieces, sizeof *l.pieces, "the list of weight pieces", e);
        if (!v.base || !l.pieces) break;
        v.used = 0;
    }
    bool ok = v.base && l.pieces;
    if (ok) team_each(c->team, l.n_pieces, load_piece, &l);
    ok = ok && !atomic_load(&l.failed);
    if (ok && !c->embd.data) c->embd = c->out;         /* tied, and not mapped */
    free(l.list);
    free(l.pieces);
    return ok;
}

/* Reads n floats of a vector from number `first` on. */
static bool load_part(struct cpu *c, const struct gguf_tensor *t, size_t first, size_t n, const float **out,
                      struct error *e)
{
    *out = NULL;
    if (!t) return true;
    float *p = alloc_zeroed(n, sizeof(float), "a weight vector", e);
    if (!p) return false;
    *out = p;
    return gguf_read(c->m->file, t, first * sizeof(float), p, n * sizeof(float), e);
}

static bool load_vector(struct cpu *c, const struct gguf_tensor *t, const float **out, struct error *e)
{
    return load_part(c, t, 0, t ? t->ne[0] : 0, out, e);
}

/* Reads a bias of keys or values, for heads of `size`. */
static bool load_kv_bias(struct cpu *c, const struct gguf_tensor *t, int size, const float **out, struct error *e)
{
    float *p = t ? alloc_zeroed((size_t)c->m->n_kv * size, sizeof *p, "a bias", e) : NULL;
    *out = p;
    return !t || (p && model_read_kv_bias(c->m, t, p, e));
}

static bool load_vectors(struct cpu *c, struct error *e)
{
    const struct model *m = c->m;
    int in_group[KV_GROUPS] = { 0 };
    for (int i = 0; i < m->n_layer; i++) {
        const struct layer *s = &m->layers[i];
        struct cpu_layer *d = &c->layers[i];
        d->group = s->local ? KV_LOCAL : KV_GLOBAL;
        d->index = in_group[d->group]++;
        int k = m->head_k, v = m->head_v;
        if (!load_vector(c, s->attn_norm, &d->attn_norm, e) ||
            !load_part(c, s->q_bias, m->head0 * k, m->n_head * k, &d->q_bias, e) ||
            !load_kv_bias(c, s->k_bias, k, &d->k_bias, e) || !load_kv_bias(c, s->v_bias, v, &d->v_bias, e) ||
            !load_vector(c, s->o_bias, &d->o_bias, e) || !load_vector(c, s->q_norm, &d->q_norm, e) ||
            !load_vector(c, s->k_norm, &d->k_norm, e) || !load_vector(c, s->attn_post_norm, &d->attn_post_norm, e) ||
            !load_vector(c, s->ffn_norm, &d->ffn_norm, e) || !load_vector(c, s->ffn_post_norm, &d->ffn_post_norm, e))
            return false;
    }
    return load_vector(c, m->out_norm, &c->out_norm, e) && load_vector(c, m->out_bias, &c->out_bias, e);
}

/* ---- work per token ---------------------------------------------------------------------------------------------- */

/* The input of a product: `n` rows of k values. */
static struct acts inputs(const struct cpu *c, int n, int k)
{
    struct acts x = c->acts;
    x.n = n;
    x.k = k;
    x.f = c->input;
    return x;
}

/* Row r of the input, k values, is complete in floats: quantise it. (Rows that are no whole blocks meet float weights
 * only.) */
static void set_input(struct cpu *c, int r, int k)
{
    struct acts x = inputs(c, r + 1, k);
    if (k % 32 == 0) c->k->quantise(&x, r);
}

static void norm_input(struct cpu *c, int r, const float *x, const float *w)
{
    int n = c->m->n_embd;
    c->k->rms_norm(x, w, n, c->m->norm_eps, c->input + (size_t)r * n);
    set_input(c, r, n);
}

static void angles(const struct rope *p, int64_t pos, float *cs, float *sn)
{
    for (int i = 0; i < p->n / 2; i++) {
        double angle = (double)pos * p->freq[i];
        cs[i] = (float)(cos(angle) * p->scale);
        sn[i] = (float)(sin(angle) * p->scale);
    }
}

static void row_start(struct cpu *c, int r, int thread)
{
    (void)thread;
    const struct model *m = c->m;
    const struct row *row = &c->batch->rows[r];
    float *x = c->x + (size_t)r * m->n_embd;
    c->k->row(&c->embd, row->token, x);
    if (m->embd_scale != 1)
        for (int i = 0; i < m->n_embd; i++) x[i] *= m->embd_scale;
    const struct kv_view *view = &c->batch->views[row->sequence][KV_GLOBAL];
    size_t at = (size_t)r * (m->rope_global.n / 2);
    angles(&m->rope_global, row->pos, c->cs[KV_GLOBAL] + at, c->sn[KV_GLOBAL] + at);
    if (m->window) angles(&m->rope_local, row->pos, c->cs[KV_LOCAL] + at, c->sn[KV_LOCAL] + at);
    if (view->sinks)
        angles(&m->rope_global, kv_sink_range(row->pos, view->sinks, view->window).query, c->sink_cs + at,
               c->sink_sn + at);
    norm_input(c, r, x, c->layers[0].attn_norm);
}

/* Adds a product's output to the residual stream (normalised first in Gemma) and prepares the next product's input. */
static void row_residual(struct cpu *c, int r, const float *bias, const float *post_norm,
                         const float *next_norm)
{
    int n = c->m->n_embd;
    float *x = c->x + (size_t)r * n, *out = c->input + (size_t)r * n;
    const float *y = c->proj + (size_t)r * n;
    if (bias) {
        for (int i = 0; i < n; i++) out[i] = y[i] + bias[i];
        y = out;
    }
    if (post_norm) {
        c->k->rms_norm(y, post_norm, n, c->m->norm_eps, out);
        y = out;
    }
    c->k->add(x, y, n);
    if (next_norm) norm_input(c, r, x, next_norm);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

static int group_size(const struct model *m) { return m->n_head / m->n_kv; }

/* The rank that holds the tokens of a split, where tokens are divided. */
static bool is_own(const struct cpu *c, int64_t split) { return !c->m->by_token || split % c->m->ranks == c->m->rank; }

static const struct kv_view *batch_view(const struct cpu *c, int r, int group)
{
    return &c->batch->views[c->batch->rows[r].sequence][group];
}

static const struct kv_view *view_of(const struct cpu *c, const struct cpu_layer *l, int r)
{
    return batch_view(c, r, l->group);
}

/* Rows of the batch that a thread does at once in the stages which go row by row: where there are enough, those of a
 * block, as keys of a block lie in the same lines of memory. */
static int rows_step(const struct cpu *c)
{
    int n = c->batch->n_rows / team_size(c->team);
    return n >= 2 * KV_BLOCK ? KV_BLOCK : n < 8 ? 1 : n / 8;
}
static int row_pieces(const struct cpu *c) { return (c->batch->n_rows + rows_step(c) - 1) / rows_step(c); }
static void each_row(struct cpu *c, void (*row)(struct cpu *c, int r, int thread), int i, int thread)
{
    int step = rows_step(c), end = (i + 1) * step < c->batch->n_rows ? (i + 1) * step : c->batch->n_rows;
    for (int r = i * step; r < end; r++) row(c, r, thread);
}

/* The row of the cache that row r of the batch takes. */
static int64_t place_of(const struct cpu *c, const struct kv_view *v, int r) { return c->batch->rows[r].pos - v->gone; }

/* dst = query head h of row r, for the sinks or for the window: bias, norm, RoPE, scale, the cache's basis. */
static void make_query(const struct cpu *c, const struct cpu_layer *l, int r, int h, bool sinks, float *dst)
{
    const struct model *m = c->m;
    const float *src = c->qkv + (size_t)r * qkv_width(m) + (size_t)h * m->head_k;
    int n = m->head_k, half = m->rope_global.n / 2;
    for (int i = 0; i < n; i++) dst[i] = src[i] + (l->q_bias ? l->q_bias[h * n + i] : 0);
    if (l->q_norm) c->k->rms_norm(dst, l->q_norm, n, m->norm_eps, dst);
    const float *cs = sinks ? c->sink_cs : c->cs[l->group], *sn = sinks ? c->sink_sn : c->sn[l->group];
    c->k->rope(dst, cs + (size_t)r * half, sn + (size_t)r * half, 2 * half, m->rope_order);
    for (int i = 0; i < n; i++) dst[i] *= m->attn_scale;
    if (kv_rotated(view_of(c, l, r)->main.shape->type_k, true)) c->k->rotate(dst, n);
}

/* Row r's queries: those for the sinks where there are any, then, in place, those for the window. */
static void make_queries(const struct cpu *c, const struct cpu_layer *l, int r)
{
    int n = c->m->head_k;
    float *q = c->qkv + (size_t)r * qkv_width(c->m), *sink_q = c->sink_q + (size_t)r * c->m->n_head * n;
    for (int h = 0; h < c->m->n_head; h++) {
        if (view_of(c, l, r)->sinks) make_query(c, l, r, h, true, sink_q + (size_t)h * n);
        make_query(c, l, r, h, false, q + (size_t)h * n);
    }
}

/* Appends the key and value of KV head h of row r to the cache. `tmp` has head_k + head_v floats. */
static void append(const struct cpu *c, const struct cpu_layer *l, int r, int h, float *tmp)
{
    const struct model *m = c->m;
    const struct kv_view *view = view_of(c, l, r);
    const struct kv_slots *to = kv_written(view);
    int64_t place = place_of(c, view, r);
    const float *qkv = c->qkv + (size_t)r * qkv_width(m);
    const float *k = qkv + (size_t)m->n_head * m->head_k + (size_t)h * m->head_k;
    const float *v = qkv + (size_t)(m->n_head + m->n_kv) * m->head_k + (size_t)h * m->head_v;
    float *tv = tmp + m->head_k;
    int half = m->rope_global.n / 2, t = (int)(place % KV_BLOCK);
    for (int i = 0; i < m->head_k; i++) tmp[i] = k[i] + (l->k_bias ? l->k_bias[h * m->head_k + i] : 0);
    for (int i = 0; i < m->head_v; i++) tv[i] = v[i] + (l->v_bias ? l->v_bias[h * m->head_v + i] : 0);
    if (l->k_norm) c->k->rms_norm(tmp, l->k_norm, m->head_k, m->norm_eps, tmp);
    c->k->rope(tmp, c->cs[l->group] + (size_t)r * half, c->sn[l->group] + (size_t)r * half, 2 * half, m->rope_order);
    if (kv_rotated(view->main.shape->type_k, true)) c->k->rotate(tmp, m->head_k);
    if (kv_rotated(view->main.shape->type_v, false)) c->k->rotate(tv, m->head_v);
    c->k->put_key(kv_k_tile(to, l->index, h, place), to->shape->type_k, tmp, m->head_k, t);
    c->k->put_value(kv_v_tile(to, l->index, h, place), to->shape->type_v, tv, m->head_v, t);
}

/* Row r completes its block where it is the 32nd: seals the tiles of KV head h, all of whose rows are written. */
static void seal(const struct cpu *c, const struct cpu_layer *l, int r, int h)
{
    const struct kv_view *view = view_of(c, l, r);
    int64_t pos = place_of(c, view, r);
    if (!view->raw.shape || pos % KV_BLOCK != KV_BLOCK - 1) return;
    c->k->seal(kv_k_tile(&view->raw, l->index, h, pos), kv_k_tile(&view->main, l->index, h, pos),
               view->main.shape->type_k, c->m->head_k, true);
    c->k->seal(kv_v_tile(&view->raw, l->index, h, pos), kv_v_tile(&view->main, l->index, h, pos),
               view->main.shape->type_v, c->m->head_v, false);
}

/* One thread's attention scratch, cut into its parts. */
struct queries {
    float *q, *m, *l, *o, *m1, *l1, *o1, *kernel;
    int64_t first[ATTEND_ROWS], last[ATTEND_ROWS], pos[ATTEND_ROWS];
};

static void lay_out(const struct cpu *c, int thread, struct queries *qs)
{
    float *p = (float *)c->scratch[thread];
    qs->q = p, p += (size_t)ATTEND_ROWS * c->m->head_k;
    qs->o = p, p += (size_t)ATTEND_ROWS * c->m->head_v;
    qs->o1 = p, p += (size_t)ATTEND_ROWS * c->m->head_v;
    qs->m = p, p += ATTEND_ROWS;
    qs->l = p, p += ATTEND_ROWS;
    qs->m1 = p, p += ATTEND_ROWS;
    qs->l1 = p, p += ATTEND_ROWS;
    qs->kernel = p;
}

/* The partial result of (row, query head, split): m, l, then o[head_v]. */
static float *part_at(const struct cpu *c, int row, int head, int split)
{
    return c->part + (((size_t)row * c->m->n_head + head) * c->max_splits + split) * (c->m->head_v + 2);
}

/* The splits that rows [row, row + n) of one sequence look at, numbered through: those of the sinks, then those of the
 * window. A split is the part of a range between two multiples of KV_SPLIT. */
struct splits {
    int sinks;                         /* splits of the sinks */
    int first;                         /* number in the sequence of the window's first */
    int count;                         /* of both together */
};

static struct splits splits_of(const struct cpu *c, const struct kv_view *v, int row, int n)
{
    int64_t from = kv_window_range(place_of(c, v, row), v->sinks, v->window).first;
    int64_t last = place_of(c, v, row + n - 1);
    int64_t sinks = kv_sink_range(last, v->sinks, v->window).last + 1;
    struct splits s = { (int)((sinks + KV_SPLIT - 1) / KV_SPLIT), (int)(from / KV_SPLIT), 0 };
    s.count = s.sinks + (last < from ? 0 : (int)(last / KV_SPLIT) - s.first + 1);
    return s;
}

/* The number in the sequence of split `i` of `s`. */
static int64_t split_number(const struct splits *s, int i) { return i < s->sinks ? i : s->first + i - s->sinks; }

/* Gathers the queries of the `n` rows from `row` for `heads` KV heads from `h` on: by KV head, then by token, then by
 * query head of the group. */
static void gather_queries(struct cpu *c, const struct cpu_layer *l, int row, int n, int h, int heads, bool sinks,
                           struct queries *qs)
{
    const struct kv_view *v = view_of(c, l, row);
    int g = group_size(c->m), size = g * c->m->head_k, stride = sinks ? c->m->n_head * c->m->head_k : qkv_width(c->m);
    const float *q = (sinks ? c->sink_q : c->qkv) + (size_t)row * stride + (size_t)h * size;
    for (int i = 0; i < n; i++) {
        int64_t pos = place_of(c, v, row + i);
        struct kv_range seen = sinks ? kv_sink_range(pos, v->sinks, v->window)
                                     : kv_window_range(pos, v->sinks, v->window);
        for (int j = 0; j < heads; j++)
            memcpy(qs->q + (size_t)(j * n + i) * size, q + (size_t)i * stride + (size_t)j * size, sizeof(float) * size);
        for (int j = i * g; j < (i + 1) * g; j++) {
            qs->first[j] = seen.first;
            qs->last[j] = seen.last;
            qs->pos[j] = pos;
        }
    }
}

/* Attention of the n_q queries of each of `heads` KV heads to split `i` of `s`; the thread is likely to look at split
 * `next` for KV heads from next_h on after it. */
static void attend_split(struct cpu *c, const struct cpu_layer *l, const struct kv_view *view, int h, int heads,
                         const struct splits *s, int i, int next_h, int next, int n_q, struct queries *qs)
{
    int64_t begin = split_number(s, i) * KV_SPLIT, end = begin + KV_SPLIT;
    int64_t first = qs->first[0], last = qs->last[n_q - 1];            /* both rise from row to row */
    if (first > begin) begin = first / KV_BLOCK * KV_BLOCK;           /* nobody sees the blocks before */
    if (last + 1 < end) end = last + 1;
    struct attend a = { view, l->index, h, heads, n_q, qs->q, qs->first, qs->last, qs->pos, begin, end, next_h,
                        split_number(s, next) * KV_SPLIT, c->m->attn_cap, qs->m1, qs->l1, qs->o1, qs->kernel };
    c->k->attend(&a);
}

/* Splits, from the first one on, that rows r and r + 1 of two sequences find in the same pages and see all of. */
static int shared_splits(const struct cpu *c, int group, int r)
{
    const struct kv_view *a = batch_view(c, r, group), *b = batch_view(c, r + 1, group);
    int64_t at = place_of(c, a, r), next = place_of(c, b, r + 1), pos = at < next ? at : next;
    int page = a->main.shape->page_size, n = (int)(pos / KV_SPLIT), i = 0;
    if (a->sinks || (a->window && at + next - pos >= a->window)) return 0;
    if (a->raw.shape && a->raw.pages[0] != b->raw.pages[0]) return 0;
    for (; i < n; i++)
        for (int64_t p = (int64_t)i * KV_SPLIT / page; p <= ((int64_t)(i + 1) * KV_SPLIT - 1) / page; p++)
            if (a->main.pages[p] != b->main.pages[p]) return i;
    return i;
}

enum { PIECES_EACH = 4 };              /* pieces of a phase that a thread should find, for an even end */

/* Cuts the attention of the single rows into parts. Rows whose texts begin alike look at what is common together, so
 * that it is read and widened once (Juravsky et al. 2024, "Hydragen"). */
static void plan_parts(struct cpu *c, int group)
{
    struct part *parts = c->parts[group];
    int n = 0, all = 0, g = group_size(c->m), most = ATTEND_ROWS / g, widest = 1, heads = c->m->n_kv;
    bool used = batch_view(c, 0, group)->main.shape->n_layer > 0;
    for (int r = 0, end; r < c->n_single && used; r = end) {
        int common = 0;
        for (end = r + 1; end < c->n_single && end - r < most; end++) {
            int shared = shared_splits(c, group, end - 1);
            if (!shared || shared < common) break;
            if (!common) common = shared;
        }
        for (int i = 0; i < common; i++) parts[n++] = (struct part){ r, end - r, i };
        widest = common && end - r > widest ? end - r : widest;
        for (int k = r; k < end; k++) {
            int count = splits_of(c, batch_view(c, k, group), k, 1).count;
            all += count;
            for (int i = common; i < count; i++) parts[n++] = (struct part){ k, 1, i };
        }
    }
    while (c->m->n_kv % heads || heads * widest * g > ATTEND_ROWS ||
           (heads > 1 && n * (c->m->n_kv / heads) < PIECES_EACH * team_size(c->team)))
        heads--;
    c->part_heads[group] = heads;
    c->n_parts[group] = n;
    c->n_splits[group] = all;
}

/* Adds the softmax weights of the queries, whose m and l are those of all their keys, to the sums of KV head h. */
static void add_mass(struct cpu *c, const struct cpu_layer *l, int row, int n, int h, struct queries *qs)
{
    const struct kv_view *v = view_of(c, l, row);
    int g = group_size(c->m), n_q = n * g, i = 0;
    while (i < n_q && c->batch->rows[row + i / g].pos < v->voters) i += g;
    if (!v->mass || i == n_q) return;
    for (int j = i; j < n_q; j++) {    /* a smaller sum is a greater weight */
        int64_t before = v->prompt - 1 - c->batch->rows[row + j / g].pos;
        qs->l1[j] = qs->l[j] / (float)(before > 0 ? pow(v->fade, (double)(before / KV_BLOCK)) : 1);
    }
    struct attend a = { v, l->index, h, 1, n_q - i, qs->q + (size_t)i * c->m->head_k, qs->first + i, qs->last + i,
                        qs->pos + i, 0, qs->last[n_q - 1] + 1, h, 0,
                        c->m->attn_cap, qs->m + i, qs->l1 + i, NULL, qs->kernel };
    c->k->mass(&a, v->mass + ((size_t)l->index * c->m->n_kv + h) * v->mass_rows);
}

/* Piece i of the single rows' attention: a part, for some of the KV heads. */
static void attend_part(struct cpu *c, const struct cpu_layer *l, int i, int thread)
{
    const struct model *m = c->m;
    struct queries qs;
    int g = group_size(m), heads = c->part_heads[l->group], of_part = m->n_kv / heads, h = i % of_part * heads;
    int coming = i + team_size(c->team);                               /* threads take turns */
    struct part p = c->parts[l->group][i / of_part], *next = &c->parts[l->group][coming / of_part];
    struct splits s = splits_of(c, view_of(c, l, p.row), p.row, 1);
    bool follows = coming < c->n_parts[l->group] * of_part && next->row == p.row;
    lay_out(c, thread, &qs);
    gather_queries(c, l, p.row, p.n, h, heads, p.split < s.sinks, &qs);
    attend_split(c, l, view_of(c, l, p.row), h, heads, &s, p.split, coming % of_part * heads,
                 follows ? next->split : s.count, p.n * g, &qs);
    for (int j = 0; j < heads * p.n * g; j++) {
        int head = h + j / (p.n * g), row = p.row + j / g % p.n;
        float *part = part_at(c, row, head * g + j % g, p.split);
        part[0] = qs.m1[j];
        part[1] = qs.l1[j];
        memcpy(part + 2, qs.o1 + (size_t)j * m->head_v, sizeof(float) * m->head_v);
    }
}

/* out[head_v] of row r: the weighted mean of the values, in the model's own basis. */
static void finish(const struct cpu *c, const struct cpu_layer *l, int r, const float *o, float sum, float *out)
{
    for (int i = 0; i < c->m->head_v; i++) out[i] = o[i] / sum;
    if (kv_rotated(view_of(c, l, r)->main.shape->type_v, false)) c->k->rotate(out, c->m->head_v);
}

/* Joins the parts of a single row for the query heads of KV head h into out[group * head_v]. */
static void join_parts(struct cpu *c, const struct cpu_layer *l, int row, int h, float *out)
{
    const struct model *m = c->m;
    int g = group_size(m);
    struct splits splits = splits_of(c, view_of(c, l, row), row, 1);
    for (int j = 0; j < g; j++) {
        float *o = out + (size_t)j * m->head_v, top = -INFINITY, sum = 0;
        memset(o, 0, sizeof(float) * m->head_v);
        for (int i = 0; i < splits.count; i++) {
            const float *p = part_at(c, row, h * g + j, i);
            c->k->join(&top, &sum, o, p[0], p[1], p + 2, m->head_v);
        }
        finish(c, l, row, o, sum, o);
    }
}

/* Attention of a tile of several tokens for one KV head, all splits in order. */
static void attend_tile(struct cpu *c, const struct cpu_layer *l, int tile, int h, int thread)
{
    const struct model *m = c->m;
    int row = c->tiles[tile].row, n = c->tiles[tile].n, g = group_size(m), n_q = n * g;
    const struct kv_view *view = view_of(c, l, row);
    struct splits s = splits_of(c, view, row, n);
    struct queries qs;
    lay_out(c, thread, &qs);
    memset(qs.o, 0, sizeof(float) * n_q * m->head_v);
    for (int i = 0; i < n_q; i++) qs.m[i] = -INFINITY, qs.l[i] = 0;
    for (int i = 0; i < s.count; i++) {
        if (i == 0 || i == s.sinks) gather_queries(c, l, row, n, h, 1, i < s.sinks, &qs);
        if (!is_own(c, split_number(&s, i))) continue;
        attend_split(c, l, view, h, 1, &s, i, h, i + 1, n_q, &qs);
        for (int j = 0; j < n_q; j++)
            c->k->join(&qs.m[j], &qs.l[j], qs.o + (size_t)j * m->head_v, qs.m1[j], qs.l1[j],
                       qs.o1 + (size_t)j * m->head_v, m->head_v);
    }
    add_mass(c, l, row, n, h, &qs);
    for (int i = 0; i < n_q; i++) {
        size_t at = (size_t)(row + i / g) * m->n_head + h * g + i % g;
        const float *o = qs.o + (size_t)i * m->head_v;
        if (!m->by_token) finish(c, l, row + i / g, o, qs.l[i], c->att + at * m->head_v);
        else {
            float *state = c->states + at * (m->head_v + 2);
            state[0] = qs.m[i];
            state[1] = qs.l[i];
            memcpy(state + 2, o, sizeof(float) * m->head_v);
        }
    }
}

/* Where tokens are divided: joins the ranks' results in their order. */
static int states_pieces(const struct cpu *c) { return c->m->by_token; }
static void states_piece(struct cpu *c, int i, int thread)
{
    const struct model *m = c->m;
    size_t rows = (size_t)c->batch->n_rows * m->n_head, size = m->head_v + 2, n = rows * size;
    (void)i, (void)thread;
    comm_gather(c->comm, c->states, n, c->gathered);
    for (size_t r = 0; r < rows; r++) {
        float *o = c->states + r * size, top = -INFINITY, sum = 0;
        memset(o, 0, sizeof(float) * m->head_v);
        for (int k = 0; k < m->ranks; k++) {
            const float *state = c->gathered + k * n + r * size;
            if (state[1] > 0) c->k->join(&top, &sum, o, state[0], state[1], state + 2, m->head_v);
        }
        finish(c, &c->layers[c->layer], (int)(r / m->n_head), o, sum, c->att + r * m->head_v);
    }
}

/* Tiles whose attention is computed as a whole. */
static int whole_tiles(const struct cpu *c) { return c->n_tiles - c->n_single; }

static int attend_pieces(const struct cpu *c)
{
    int group = c->layers[c->layer].group;
    return whole_tiles(c) * c->m->n_kv + c->n_parts[group] * (c->m->n_kv / c->part_heads[group]);
}

static void attend_piece(struct cpu *c, int i, int thread)
{
    const struct cpu_layer *l = &c->layers[c->layer];
    int n_kv = c->m->n_kv, whole = whole_tiles(c) * n_kv;
    if (i < whole) attend_tile(c, l, c->n_tiles - 1 - i / n_kv, i % n_kv, thread);     /* the longest first */
    else attend_part(c, l, i - whole, thread);
}

/* The maxima and sums of a single row's queries are known once all its parts are there. */
static int mass_pieces(const struct cpu *c)
{
    return c->weighs && c->layers[c->layer].group == KV_GLOBAL ? c->n_single * c->m->n_kv : 0;
}

static void mass_piece(struct cpu *c, int i, int thread)
{
    const struct cpu_layer *l = &c->layers[c->layer];
    int n_kv = c->m->n_kv, row = i / n_kv, h = i % n_kv, g = group_size(c->m);
    int parts = splits_of(c, view_of(c, l, row), row, 1).count;
    struct queries qs;
    lay_out(c, thread, &qs);
    for (int j = 0; j < g; j++) {
        qs.m[j] = -INFINITY;
        qs.l[j] = 0;
        for (int k = 0; k < parts; k++) {
            const float *p = part_at(c, row, h * g + j, k);
            c->k->join(&qs.m[j], &qs.l[j], NULL, p[0], p[1], NULL, 0);
        }
    }
    gather_queries(c, l, row, 1, h, 1, false, &qs);
    add_mass(c, l, row, 1, h, &qs);
}

static void append_row(struct cpu *c, int r, int thread)
{
    const struct cpu_layer *l = &c->layers[c->layer];
    make_queries(c, l, r);
    if (!is_own(c, c->batch->rows[r].pos / KV_SPLIT)) return;
    for (int h = 0; h < c->m->n_kv; h++) append(c, l, r, h, (float *)c->scratch[thread]);
}
static void append_piece(struct cpu *c, int i, int thread) { each_row(c, append_row, i, thread); }

static int seal_pieces(const struct cpu *c)
{
    return view_of(c, &c->layers[c->layer], 0)->raw.shape ? row_pieces(c) : 0;
}
static void seal_row(struct cpu *c, int r, int thread)
{
    (void)thread;
    if (!is_own(c, c->batch->rows[r].pos / KV_SPLIT)) return;
    for (int h = 0; h < c->m->n_kv; h++) seal(c, &c->layers[c->layer], r, h);
}
static void seal_piece(struct cpu *c, int i, int thread) { each_row(c, seal_row, i, thread); }

/* The attention's result as the next product's input, or `heads` KV heads of it from h0 on; the parts of single rows
 * are joined. */
static void attended(struct cpu *c, int r, int h0, int heads)
{
    int n = group_size(c->m) * c->m->head_v;
    size_t at = ((size_t)r * c->m->n_kv + h0) * n;
    for (int h = 0; h < heads && r < c->n_single; h++)
        join_parts(c, &c->layers[c->layer], r, h0 + h, c->input + at + (size_t)h * n);
    if (r >= c->n_single) memcpy(c->input + at, c->att + at, sizeof(float) * heads * n);
    struct acts part = { 1, heads * n, c->input + at, c->acts.b + at / 32 };
    if (part.k % 32 == 0) c->k->quantise(&part, 0);
}

/* Many splits are joined KV head by KV head. */
enum { FEW_SPLITS = 3 };
static bool by_head(const struct cpu *c)
{
    return !whole_tiles(c) && c->n_splits[c->layers[c->layer].group] > FEW_SPLITS * c->n_single &&
           group_size(c->m) * c->m->head_v % 32 == 0;
}
static int attended_pieces(const struct cpu *c) { return by_head(c) ? c->batch->n_rows * c->m->n_kv : row_pieces(c); }
static void attended_row(struct cpu *c, int r, int thread)
{
    (void)thread;
    attended(c, r, 0, c->m->n_kv);
}
static void attended_piece(struct cpu *c, int i, int thread)
{
    if (by_head(c)) attended(c, i / c->m->n_kv, i % c->m->n_kv, 1);
    else each_row(c, attended_row, i, thread);
}

/* ---- matrix products --------------------------------------------------------------------------------------------- */

/* Rows of a product handed out at once: whole tiles and quantisation blocks. A few pieces per thread even out what the
 * threads take; each more costs a counter that all of them want. */
enum { PRODUCTS_EACH = 4, ROWS_MOST = 2048 };
static int chunk_rows(const struct cpu *c, int64_t rows)
{
    int64_t pieces = team_size(c->team) * PRODUCTS_EACH, n = (rows + 32 * pieces - 1) / (32 * pieces) * 32;
    return n < ROWS_MOST ? (int)n : ROWS_MOST;
}

static int pieces_of(const struct cpu *c, const struct weight *w, int n)
{
    int64_t rows = 0;
    int pieces = 0;
    for (int i = 0; i < n; i++) rows += w[i].rows;
    for (int i = 0, step = chunk_rows(c, rows); i < n; i++) pieces += (int)((w[i].rows + step - 1) / step);
    return pieces;
}

/* Piece p of the outputs of n matrices with the same input, side by side in y[tokens][ld]. */
static void product(struct cpu *c, const struct weight *w, int n, const struct acts *x, float *y, size_t ld, int p,
                    int thread)
{
    int64_t rows = 0;
    for (int i = 0; i < n; i++) rows += w[i].rows;
    int step = chunk_rows(c, rows), i = 0;
    size_t column = 0;
    for (; p >= (w[i].rows + step - 1) / step; i++) {
        p -= (int)((w[i].rows + step - 1) / step);
        column += w[i].rows;
    }
    int64_t r0 = (int64_t)p * step, r1 = r0 + step < w[i].rows ? r0 + step : w[i].rows;
    c->k->matmul(&w[i], r0, r1, x, 0, x->n, y + column + r0, ld, c->scratch[thread]);
}

static int qkv_pieces(const struct cpu *c) { return pieces_of(c, c->layers[c->layer].qkv, 3); }
static void qkv_piece(struct cpu *c, int p, int thread)
{
    struct acts x = inputs(c, c->batch->n_rows, c->m->n_embd);
    product(c, c->layers[c->layer].qkv, 3, &x, c->qkv, qkv_width(c->m), p, thread);
}

static int out_pieces(const struct cpu *c) { return pieces_of(c, &c->layers[c->layer].o, 1); }
static void out_piece(struct cpu *c, int p, int thread)
{
    struct acts x = inputs(c, c->batch->n_rows, c->m->n_head * c->m->head_v);
    product(c, &c->layers[c->layer].o, 1, &x, c->proj, c->m->n_embd, p, thread);
}

static int down_pieces(const struct cpu *c) { return pieces_of(c, &c->layers[c->layer].down, 1); }
static void down_piece(struct cpu *c, int p, int thread)
{
    product(c, &c->layers[c->layer].down, 1, &c->ffn, c->proj, c->m->n_embd, p, thread);
}

/* gate and up for the same rows, then the activation, then its blocks quantised. */
static int glu_step(const struct cpu *c) { return chunk_rows(c, 2 * (int64_t)c->m->n_ff); }
static int glu_pieces(const struct cpu *c) { return (c->m->n_ff + glu_step(c) - 1) / glu_step(c); }
static void glu_piece(struct cpu *c, int p, int thread)
{
    const struct cpu_layer *l = &c->layers[c->layer];
    struct acts x = inputs(c, c->batch->n_rows, c->m->n_embd);
    int F = c->m->n_ff, r0 = p * glu_step(c), r1 = r0 + glu_step(c) < F ? r0 + glu_step(c) : F;
    c->k->matmul(&l->gate, r0, r1, &x, 0, x.n, c->gate + r0, F, c->scratch[thread]);
    c->k->matmul(&l->up, r0, r1, &x, 0, x.n, c->up + r0, F, c->scratch[thread]);
    for (int t = 0; t < x.n; t++) {
        float *g = c->gate + (size_t)t * F + r0;
        size_t at = (size_t)t * F + r0;
        c->k->glu(g, c->up + at, r1 - r0, c->m->act, g);
        struct acts part = { 1, r1 - r0, g, c->ffn.b + at / 32 };
        if (F % 32 == 0) c->k->quantise(&part, 0);
    }
}

static int head_pieces(const struct cpu *c) { return c->n_wanted ? pieces_of(c, &c->out, 1) : 0; }
static void head_piece(struct cpu *c, int p, int thread)
{
    struct acts x = inputs(c, c->n_wanted, c->m->n_embd);
    int V = c->m->n_vocab, rows = (int)c->out.rows, first = (int)c->m->out.row0, step = chunk_rows(c, rows);
    int r0 = p * step, n = rows - r0 < step ? rows - r0 : step;
    product(c, &c->out, 1, &x, c->logits + first, V, p, thread);
    for (int t = 0; t < x.n; t++) {
        float *y = c->logits + (size_t)t * V + first + r0;
        if (c->out_bias) c->k->add(y, c->out_bias + first + r0, n);
        if (c->m->logit_cap > 0) c->k->soft_cap(y, n, c->m->logit_cap);
    }
}

/* ---- the forward pass -------------------------------------------------------------------------------------------- */

static int wanted_of(const struct cpu *c) { return c->n_wanted; }

static void start_piece(struct cpu *c, int i, int thread) { each_row(c, row_start, i, thread); }

static void after_attention(struct cpu *c, int r, int thread)
{
    const struct cpu_layer *l = &c->layers[c->layer];
    (void)thread;
    row_residual(c, r, l->o_bias, l->attn_post_norm, l->ffn_norm);
}
static void after_attention_piece(struct cpu *c, int i, int thread) { each_row(c, after_attention, i, thread); }

static void after_ffn(struct cpu *c, int r, int thread)
{
    const struct cpu_layer *l = &c->layers[c->layer];
    (void)thread;
    row_residual(c, r, NULL, l->ffn_post_norm, c->layer + 1 < c->m->n_layer ? l[1].attn_norm : NULL);
}
static void after_ffn_piece(struct cpu *c, int i, int thread) { each_row(c, after_ffn, i, thread); }

static void last_norm_piece(struct cpu *c, int r, int thread)
{
    (void)thread;
    norm_input(c, r, c->x + (size_t)c->wanted[r] * c->m->n_embd, c->out_norm);
}

/* ---- between ranks ----------------------------------------------------------------------------------------------- */

static int ranks_pieces(const struct cpu *c) { return c->comm != NULL; }
static int heads_pieces(const struct cpu *c) { return c->comm && !c->m->by_token; }

/* After a product of which each rank has a part: its outputs become the sums over the ranks. */
static void sum_piece(struct cpu *c, int i, int thread)
{
    (void)i, (void)thread;
    comm_sum(c->comm, c->proj, (size_t)c->batch->n_rows * c->m->n_embd);
}

/* Each rank has the logits of some of the vocabulary: brings them together. */
static void gather_piece(struct cpu *c, int i, int thread)
{
    int64_t V = c->m->n_vocab, ranks = comm_size(c->comm), most = (V + ranks - 1) / ranks;
    (void)i, (void)thread;
    for (int t = 0; t < c->n_wanted; t++) {
        float *y = c->logits + t * V;
        comm_gather(c->comm, y + c->m->out.row0, most, c->gathered);
        for (int64_t r = 0; r < ranks; r++) {
            int64_t first = V * r / ranks, end = V * (r + 1) / ranks;
            memcpy(y + first, c->gathered + r * most, (end - first) * sizeof *y);
        }
    }
}

/* The stages of a forward pass; those from LAYER_FIRST to LAYER_LAST are gone through for each layer. */
enum { LAYER_FIRST = 1, LAYER_LAST = 14 };
static const struct stage {
    int (*pieces)(const struct cpu *c);            /* 0: left out */
    void (*piece)(struct cpu *c, int i, int thread);
} stages[] = {
    { row_pieces, start_piece },
    { qkv_pieces, qkv_piece },
    { row_pieces, append_piece },
    { seal_pieces, seal_piece },
    { attend_pieces, attend_piece },
    { mass_pieces, mass_piece },
    { states_pieces, states_piece },
    { attended_pieces, attended_piece },
    { out_pieces, out_piece },
    { heads_pieces, sum_piece },
    { row_pieces, after_attention_piece },
    { glu_pieces, glu_piece },
    { down_pieces, down_piece },
    { ranks_pieces, sum_piece },
    { row_pieces, after_ffn_piece },
    { wanted_of, last_norm_piece },
    { head_pieces, head_piece },
    { ranks_pieces, gather_piece },
};
enum { STAGES = sizeof stages / sizeof *stages };

static int next_stage(void *user, int thread)
{
    struct cpu *c = user;
    for (;;) {
        if (c->stage == LAYER_LAST && c->layer + 1 < c->m->n_layer) c->layer++, c->stage = LAYER_FIRST;
        else c->stage++;
        if (c->stage == STAGES) return 0;
        int n = stages[c->stage].pieces(c);
        if (n > 1) return n;
        if (n == 1) stages[c->stage].piece(c, 0, thread);
    }
}

static void stage_piece(void *user, int i, int thread)
{
    struct cpu *c = user;
    stages[c->stage].piece(c, i, thread);
}

/* Rows of a sequence that attend to it together. */
static int rows_per_tile(const struct cpu *c) { return ATTEND_ROWS / group_size(c->m); }

static bool forward(struct backend *b, const struct batch *batch, struct error *e)
{
    struct cpu *c = (struct cpu *)b;
    int n = batch->n_rows, wanted = 0, per_tile = rows_per_tile(c);
    for (int r = 0; r < n; r++) wanted += batch->rows[r].want == WANT_LOGITS;
    if (wanted > LOGIT_ROWS)
        return fail(e, GEN_RUN, "%d rows want logits, but a batch gives at most %d", wanted, LOGIT_ROWS);
    c->batch = batch;
    c->n_tiles = c->n_wanted = c->n_single = 0;
    c->weighs = false;
    for (int r = 0; r < n; ) {
        int end = r + 1;
        while (end < n && end - r < per_tile && batch->rows[end].sequence == batch->rows[r].sequence) end++;
        c->weighs = c->weighs || batch->views[batch->rows[r].sequence][KV_GLOBAL].mass;
        c->tiles[c->n_tiles++] = (struct tile){ r, end - r };
        r = end;
    }
    /* single rows are computed in parts, as long as they are few */
    while (c->n_single < c->n_tiles && c->tiles[c->n_single].n == 1) c->n_single++;
    if ((size_t)c->n_single > c->split_tokens || c->m->by_token) c->n_single = 0;
    for (int k = 0; k < KV_GROUPS; k++) plan_parts(c, k);
    for (int r = 0; r < n; r++)
        if (batch->rows[r].want == WANT_LOGITS) c->wanted[c->n_wanted++] = r;
    c->ffn.n = n;
    c->ffn.k = c->m->n_ff;
    c->ffn.f = c->gate;
    c->stage = -1;
    c->layer = 0;
    team_run(c->team, next_stage, stage_piece, c);
    return true;
}

static const float *logits(struct backend *b, int i)
{
    struct cpu *c = (struct cpu *)b;
    return i < c->n_wanted ? c->logits + (size_t)i * c->m->n_vocab : NULL;
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

static void cpu_close(struct backend *b)
{
    struct cpu *c = (struct cpu *)b;
    team_close(c->team);
    for (int i = 0; c->layers && i < c->m->n_layer; i++) {
        const struct cpu_layer *l = &c->layers[i];
        const float *all[] = { l->attn_norm, l->q_bias, l->k_bias, l->v_bias, l->o_bias, l->q_norm, l->k_norm,
                               l->attn_post_norm, l->ffn_norm, l->ffn_post_norm };
        for (size_t j = 0; j < sizeof all / sizeof *all; j++) free((void *)all[j]);
    }
    free((void *)c->out_norm);
    free((void *)c->out_bias);
    free(c->layers);
    free(c->scratch);
    release_bytes(c->arena, c->arena_bytes);
    release_bytes(c->weights, c->weights_bytes);
    free(c);
}

static bool open_parts(struct cpu *c, const struct backend_options *o, struct error *e)
{
    const struct model *m = c->m;
    int cores = cores_available(), threads = o->threads > 0 && o->threads < cores ? o->threads : cores;
    if (group_size(m) > ATTEND_ROWS)
        return fail(e, GEN_MODEL, "%s: %d query heads on one key/value head are not supported (at most %d)",
                    gguf_path(m->file), group_size(m), ATTEND_ROWS);
    c->k = kernels_choose(getenv("GEN_ISA"), e);
    if (!c->k || !team_open(&c->team, threads, e)) return false;
    c->layers = alloc_zeroed(m->n_layer, sizeof *c->layers, "the layers", e);
    c->scratch = alloc_zeroed(threads, sizeof *c->scratch, "the threads' scratch", e);
    if (!c->layers || !c->scratch || !load_vectors(c, e) || !load_weights(c, o->progress, e)) return false;
    c->max_rows = o->max_rows;
    c->comm = o->comm;
    c->split_tokens = o->max_sequences < SPLIT_TOKENS ? (size_t)o->max_sequences : SPLIT_TOKENS;
    c->max_splits = (size_t)(o->max_seen / KV_SPLIT + 4);
    size_t most = TEAM_PIECES / 2 / (c->max_splits * m->n_kv);     /* the other half is for whole tiles */
    if (c->split_tokens > most) c->split_tokens = most;
    if ((c->max_rows / rows_per_tile(c) + (size_t)o->max_sequences) * m->n_kv > TEAM_PIECES / 2)
        return fail(e, GEN_USAGE, "%d tokens at once are too many for %d key/value heads: lower --batch-size",
                    o->max_rows, m->n_kv);
    struct carver v = { NULL, 0 };
    carve_all(c, &v);
    c->arena_bytes = v.used;
    c->arena = v.base = reserve_bytes(v.used, "working memory: lower --batch-size or --ctx-size", e);
    if (!v.base) return false;
    v.used = 0;
    carve_all(c, &v);
    c->base = (struct backend){ .name = "cpu", .forward = forward, .logits = logits, .close = cpu_close,
                                .exact = true, .isa = c->k->name, .threads = threads, .weight_bytes = c->weights_bytes };
    return true;
}

bool cpu_open(struct backend **out, const struct model *m, const struct backend_options *o, struct error *e)
{
    struct cpu *c = alloc_zeroed(1, sizeof *c, "the CPU backend", e);
    if (!c) return false;
    c->m = m;
    if (!open_parts(c, o, e)) return cpu_close(&c->base), false;
    *out = &c->base;
    return true;
}
