/* kvreport.c - one engine after the other, each with another setting of the cache, on the same text. */
#include "kvreport.h"

#include "inspect.h"
#include "json.h"
#include "measure.h"
#include "output.h"
#include "result.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DECODE = 32, RUNS = 2, LINES = 16, SIZES = 3 };
static const int64_t sizes[SIZES] = { 4096, 32768, 131072 };

struct line {
    char name[96];
    bool given;                        /* what the user asks for */
    struct engine_options eo;
    int kv_heads;                      /* 0 = the file's */
    double token_bytes;
    size_t bytes[SIZES];               /* reserved for a context of so many tokens */
    double prefill, decode;            /* tokens per second, the best of all runs */
    struct perplexity quality;
};

struct report {
    const struct kv_report_options *o;
    const struct model *m;
    const struct tokenizer *t;
    const int32_t *tokens;
    size_t n;
    FILE *base;                        /* log-probabilities with the f16 cache */
    struct line lines[LINES];
    int n_lines;
    char omitted[160];                 /* settings that are not measured, and what they need; "" = none */
    int64_t windows;
    char machine[80];
};

/* ---- the settings ------------------------------------------------------------------------------------------------ */

static struct line *add_line(struct report *r, struct engine_options eo, enum kv_type k, enum kv_type v)
{
    struct line *l = &r->lines[r->n_lines++];
    eo.type_k = k;
    eo.type_v = v;
    *l = (struct line){ .eo = eo };
    return l;
}

__attribute__((format(printf, 2, 3))) static void append_name(struct line *l, const char *format, ...)
{
    size_t n = strlen(l->name);
    va_list args;
    va_start(args, format);
    vsnprintf(l->name + n, sizeof l->name - n, format, args);
    va_end(args);
}

static void name_line(const struct report *r, struct line *l)
{
    const struct engine_options *eo = &l->eo;
    append_name(l, "%s", kv_type_name(eo->type_k));
    if (eo->type_v != eo->type_k) append_name(l, ", %s", kv_type_name(eo->type_v));
    if (eo->window) append_name(l, ", window %d, sinks %d", eo->window, eo->sinks);
    if (eo->evict)
        append_name(l, ", %s, budget %lld", eo->evict == EVICT_SNAPKV ? "snapkv" : "attention", (long long)eo->budget);
    if (l->kv_heads > 0) append_name(l, ", %d of %d KV heads", l->kv_heads, r->m->n_kv);
    if (l->given) append_name(l, " (as given)");
}

static void list_lines(struct report *r, const struct engine_options *eo)
{
    static const enum kv_type pairs[][2] = {
        { KV_F16, KV_F16 }, { KV_F32, KV_F32 }, { KV_BF16, KV_BF16 }, { KV_FP8, KV_FP8 }, { KV_INT8, KV_INT8 },
        { KV_INT8, KV_INT4 }, { KV_INT4, KV_INT4 },
    };
    struct engine_options plain = *eo;
    bool paged = eo->layout == KV_PAGED;
    int64_t quarter = r->o->window / 4, budget = quarter / KV_BLOCK * KV_BLOCK;
    if (budget < KV_BUDGET_LEAST) budget = KV_BUDGET_LEAST;
    bool windowed = paged && r->o->window >= 64;
    bool evicts = paged && eo->page_size == KV_BLOCK && r->o->window >= budget + KV_BLOCK;
    plain.window = 0;
    plain.evict = EVICT_OFF;
    plain.budget = 0;
    plain.ctx = r->o->window + DECODE;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) add_line(r, plain, pairs[i][0], pairs[i][1]);
    if (windowed) {
        struct line *l = add_line(r, plain, KV_F16, KV_F16);
        l->eo.window = (int)quarter;
        l->eo.sinks = 4;
    }
    for (int i = 0; i < 2 && evicts; i++) {
        struct line *l = add_line(r, plain, KV_F16, KV_F16);
        l->eo.evict = i ? EVICT_SNAPKV : EVICT_ATTENTION;
        l->eo.budget = budget;
    }
    int fewer = r->m->n_kv - 1;
    while (fewer > 0 && r->m->n_kv % fewer) fewer--;
    if (fewer > 0) {
        struct line *l = add_line(r, plain, KV_F16, KV_F16);
        l->kv_heads = fewer;
    }
    if (eo->type_k != KV_F16 || eo->type_v != KV_F16 || eo->window || eo->evict ||
        r->o->model.kv_heads) {
        struct line *l = add_line(r, *eo, eo->type_k, eo->type_v);
        l->eo.ctx = plain.ctx;
        l->kv_heads = r->o->model.kv_heads;
        l->given = true;
    }
    if (!evicts)
        snprintf(r->omitted, sizeof r->omitted, "%s, which %s of 32 tokens and windows of at least %d (-c)", windowed ?
                 "eviction" : "--window and eviction", windowed ? "takes pages" : "take --kv-layout paged with pages",
                 KV_BUDGET_LEAST + KV_BLOCK);
    for (int i = 0; i < r->n_lines; i++) {
        name_line(r, &r->lines[i]);
        struct engine_options *o = &r->lines[i].eo;
        o->progress = NULL;
        o->share = false;              /* what is measured is computed */
        o->kv_memory = 0;
        o->kv_offload = NULL;
    }
}

/* ---- measuring --------------------------------------------------------------------------------------------------- */

static bool estimate(struct line *l, const struct model *m, struct error *e)
{
    for (int i = 0; i < SIZES; i++) {
        struct engine_options eo = l->eo;
        struct kv_usage usage;
        eo.ctx = sizes[i];
        if (!engine_estimate(m, &eo, &usage, e)) return false;
        l->bytes[i] = usage.bytes_reserved;
        l->token_bytes = (double)usage.bytes_per_token;
    }
    return true;
}

/* One prefill of a window and the tokens that follow it, both timed. */
static bool time_once(const struct report *r, struct line *l, struct sequence *s, struct engine *g, struct error *e)
{
    int64_t n = r->o->window;
    double start = now_seconds();
    if (!sequence_sync(s, r->tokens, n, NULL, r->o->stop, e)) return false;
    double prefilled = now_seconds();
    for (int i = 0; i < DECODE; i++) {
        if (r->o->stop && *r->o->stop) return fail(e, GEN_RUN, "interrupted");
        if (!engine_step(g, &s, &r->tokens[i], 1, e)) return false;
    }
    l->prefill = fmax(l->prefill, (double)n / (prefilled - start));
    l->decode = fmax(l->decode, DECODE / (now_seconds() - prefilled));
    return true;
}

static bool time_all(const struct report *r, struct line *l, struct engine *g, struct error *e)
{
    bool ok = true;
    for (int i = 0; i < RUNS && ok; i++) {
        struct sequence *s;
        if (!sequence_open(&s, g, e)) return false;
        ok = time_once(r, l, s, g, e);
        sequence_close(s);
    }
    return ok;
}

static bool measure(struct report *r, struct line *l, const struct model *m, struct error *e)
{
    struct perplexity_options po = { .window = r->o->window, .chunks = r->o->chunks, .stop = r->o->stop };
    struct engine *g;
    if (l == r->lines) po.save_to = r->base;
    else po.base_from = r->base;
    if (!estimate(l, m, e) || !engine_open(&g, m, &l->eo, e)) return false;
    const struct backend *b = engine_backend(g);
    snprintf(r->machine, sizeof r->machine, "%s %s, %d thread%s", b->name, b->isa, b->threads,
             b->threads == 1 ? "" : "s");
    bool ok = perplexity_measure(&l->quality, g, r->t, r->tokens, r->n, &po, e) && time_all(r, l, g, e);
    r->windows = l->quality.windows;
    engine_close(g);
    return ok;
}

/* The same with a model whose heads are not the file's. */
static bool measure_heads(struct report *r, struct line *l, struct error *e)
{
    struct model_options mo = r->o->model;
    struct model *m;
    struct gguf *file;
    char note[200];
    mo.kv_heads = l->kv_heads;
    if (!gguf_open(&file, gguf_path(r->m->file), r->o->map, e) || !model_open(&m, file, &mo, note, e)) return false;
    bool ok = measure(r, l, m, e);
    model_close(m);
    return ok;
}

static bool measure_all(struct report *r, struct error *e)
{
    for (int i = 0; i < r->n_lines; i++) {
        struct line *l = &r->lines[i];
        if (!(l->kv_heads ? measure_heads(r, l, e) : measure(r, l, r->m, e))) return false;
        if (r->o->progress) r->o->progress("measuring", (double)(i + 1) / r->n_lines);
    }
    return true;
}

/* ---- printing ---------------------------------------------------------------------------------------------------- */

static bool print_table(struct bytes *out, const struct report *r, struct error *e)
{
    const struct gguf_str *name = &r->m->name;
    char size[SIZES + 1][32];
    int width = 30;
    for (int i = 0; i < r->n_lines; i++)
        if ((int)strlen(r->lines[i].name) > width) width = (int)strlen(r->lines[i].name);
    bool ok = (!name->len || (visible_add(out, name->ptr, name->len) && bytes_add(out, ", ", 2)))
           && bytes_printf(out, "%s\nquality on %lld window%s of %lld tokens, KL divergence from the first line; speed "
                                "of a prefill of %lld tokens,\nand of decode after it, in tokens per second\n\n",
                           r->machine, (long long)r->windows,
                           r->windows == 1 ? "" : "s", (long long)r->o->window, (long long)r->o->window)
           && bytes_printf(out, "%-*s %9s %9s %9s %9s %8s %8s %11s %9s %7s\n", width, "keys, values", "per token",
                           "at 4k", "at 32k", "at 128k", "prefill", "decode", "perplexity", "mean KL", "top-1");
    for (const struct line *l = r->lines; l < r->lines + r->n_lines && ok; l++) {
        human_bytes(l->token_bytes, size[SIZES]);
        for (int i = 0; i < SIZES; i++) human_bytes((double)l->bytes[i], size[i]);
        ok = bytes_printf(out, "%-*s %9s %9s %9s %9s %8.1f %8.1f %11.4f", width, l->name, size[SIZES], size[0],
                          size[1], size[2], l->prefill, l->decode, l->quality.value);
        if (ok && l->quality.compared)
            ok = bytes_printf(out, " %9.6f %5.1f %%", fmax(l->quality.kl_mean, 0), 100 * l->quality.top1_agreement);
        ok = ok && bytes_add(out, "\n", 1);
    }
    if (*r->omitted) ok = ok && bytes_printf(out, "\nnot measured: %s\n", r->omitted);
    return ok || fail(e, GEN_RUN, "cannot allocate memory for the report");
}

static json_t *line_object(const struct line *l)
{
    json_t *perplexity = isfinite(l->quality.value) ? json_real(l->quality.value) : json_null();
    json_t *bytes = json_object();
    for (int i = 0; i < SIZES; i++) {
        char key[24];
        snprintf(key, sizeof key, "%lld", (long long)sizes[i]);
        json_put(&bytes, key, json_integer((json_int_t)l->bytes[i]));
    }
    json_t *object = json_pack(
        "{s:s, s:s, s:s, s:i, s:i, s:I, s:i, s:f, s:o, s:f, s:f, s:o}", "setting", l->name, "type_k",
        kv_type_name(l->eo.type_k), "type_v", kv_type_name(l->eo.type_v), "window", l->eo.window, "sinks",
        l->eo.window ? l->eo.sinks : 0, "budget", (json_int_t)l->eo.budget, "kv_heads", l->kv_heads,
        "bytes_per_token", l->token_bytes, "bytes", bytes,
        "prefill_tokens_per_s", l->prefill, "decode_tokens_per_s", l->decode, "perplexity", perplexity);
    divergence_put(&object, &l->quality);
    return object;
}

static bool print_json(struct bytes *out, const struct report *r, struct error *e)
{
    json_t *lines = json_array();
    for (int i = 0; i < r->n_lines; i++) json_push(&lines, line_object(&r->lines[i]));
    json_t *object = json_pack("{s:s, s:I, s:I, s:o}", "machine", r->machine, "window", (json_int_t)r->o->window,
                               "windows", (json_int_t)r->windows, "settings", lines);
    if (*r->omitted) json_put(&object, "not_measured", json_string(r->omitted));
    return json_line(out, object, e);
}

bool kv_report(struct bytes *out, const struct model *m, const struct tokenizer *t, const int32_t *tokens, size_t n,
               const struct engine_options *eo, const struct kv_report_options *o, struct error *e)
{
    struct report r = { .o = o, .m = m, .t = t, .tokens = tokens, .n = n };
    list_lines(&r, eo);
    r.base = tmpfile();
    if (!r.base) return fail(e, GEN_RUN, "cannot make a temporary file: %s", strerror(errno));
    bool ok = measure_all(&r, e) && (o->json ? print_json(out, &r, e) : print_table(out, &r, e));
    fclose(r.base);
    return ok;
}
