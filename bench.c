/* bench.c - speed: prefill and decode at several depths of the cache, against the memory's and the processor's own. */
#include "bench.h"

#include "json.h"
#include "memory.h"
#include "probe.h"
#include "quant.h"

#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>

enum { LIST = 32, MOST_PARALLEL = LOGIT_ROWS, MOST_REPS = 1000 };

struct list { int n; int64_t at[LIST]; };

/* One line of the result. */
struct test {
    bool decode;
    int64_t n;                         /* tokens, of each sequence */
    int64_t depth;
    int parallel;                      /* sequences */
    double median, best, deviation;    /* tokens per second, all sequences together */
    double cached;                     /* the median with a cache, where this one is measured without */
};

/* What a forward pass takes at least, whatever the program. */
struct token_work {
    double matrices;                   /* bytes of all matrices as they stand in the file, the embedding's rows apart */
    double layers, head;               /* multiply-adds of a token in the layers' matrices, and in the last one */
    double cell;                       /* bytes of one token's keys and values in one layer */
    int global;                        /* layers that see the last `kept` tokens (all, unless --window) */
    int local;                         /* layers that see the last `window` */
    double kept, window;
};

struct run {
    const struct bench_options *o;
    bool quadratic;                    /* decode is measured with a cache, then without */
    struct engine *g;
    struct sequence *first;            /* kept from test to test: a depth that is there already is not computed again */
    struct sequence *more[MOST_PARALLEL - 1];      /* the other ones of a test with several */
    int n_more;
    int32_t *tokens;                   /* [context] any text */
    double *speeds;                    /* [reps] of the test under way */
    struct test *tests;
    int n_tests;
    struct probe *probe;
    struct limits limits;
    struct token_work work;
};

/* ---- what is asked for */

static bool read_list(const char *option, const char *text, int64_t lo, int64_t hi, struct list *out, struct error *e)
{
    out->n = 0;
    for (const char *p = text;; p++) {
        char *end;
        long long x = *p >= '0' && *p <= '9' ? strtoll(p, &end, 10) : -1;
        if (x < lo || x > hi || (*end != ',' && *end != '\0'))
            return fail(e, GEN_USAGE, "%s '%s' is not possible: it takes whole numbers from %lld to %lld with commas "
                                      "between them", option, text, (long long)lo, (long long)hi);
        if (out->n == LIST) return fail(e, GEN_USAGE, "%s '%s' has more than %d numbers", option, text, LIST);
        out->at[out->n++] = x;
        p = end;
        if (*p == '\0') return true;
    }
}

/* Depth by depth, so that the cache only grows. */
static bool list_tests(struct run *r, struct error *e)
{
    const struct bench_options *o = r->o;
    struct list prefill, decode, depth, parallel;
    bool none = !o->prefill && !o->decode;
    if (r->quadratic && o->prefill)
        return fail(e, GEN_USAGE, "-pp measures nothing with --no-kv-cache, which changes only how an answer is "
                                  "computed");
    const char *pp = o->prefill ? o->prefill : none && !r->quadratic ? "512" : "0";
    const char *tg = o->decode ? o->decode : !none ? "0" : r->quadratic ? "4" : "128";
    const char *depths = o->depth ? o->depth : r->quadratic ? "128,256,512,1024" : "0";
    if (!read_list("-pp", pp, 0, INT_MAX / 2, &prefill, e) || !read_list("-tg", tg, 0, INT_MAX / 2, &decode, e) ||
        !read_list("--depth", depths, 0, INT_MAX / 2, &depth, e) ||
        !read_list("-np", o->parallel ? o->parallel : "1", 1, MOST_PARALLEL, &parallel, e))
        return false;
    r->tests = alloc_zeroed((size_t)LIST * LIST * (LIST + 1), sizeof *r->tests, "the list of tests", e);
    if (!r->tests) return false;
    for (int d = 0; d < depth.n; d++) {
        for (int i = 0; i < prefill.n; i++)
            if (prefill.at[i])
                r->tests[r->n_tests++] = (struct test){ .n = prefill.at[i], .depth = depth.at[d], .parallel = 1 };
        for (int i = 0; i < decode.n; i++)
            for (int k = 0; k < parallel.n && decode.at[i]; k++)
                r->tests[r->n_tests++] = (struct test){ .decode = true, .n = decode.at[i], .depth = depth.at[d],
                                                        .parallel = (int)parallel.at[k] };
    }
    return r->n_tests || fail(e, GEN_USAGE, "there is nothing to measure: -pp and -tg are both 0");
}

/* The cache is touched as the tests fill it, so it is looked at before. */
static bool enough_memory(const struct model *m, const struct engine_options *eo, struct error *e)
{
    struct kv_usage need;
    uint64_t available = memory_available();
    if (!engine_estimate(m, eo, &need, e)) return false;
    return need.bytes_reserved <= available
        || fail(e, GEN_RUN, "%d sequences of %lld tokens need %zu bytes for their cache, but %llu are available: lower "
                            "--depth, -pp, -tg or -np", eo->max_sequences, (long long)eo->ctx, need.bytes_reserved,
                (unsigned long long)available);
}

/* The sequences beside the first give their part of the cache back. */
static void close_more(struct run *r)
{
    for (; r->n_more; r->n_more--) sequence_close(r->more[r->n_more - 1]);
}

static void close_engine(struct run *r)
{
    close_more(r);
    sequence_close(r->first);
    engine_close(r->g);
    probe_close(r->probe);
    free(r->tokens);
    r->first = NULL;
    r->g = NULL;
    r->probe = NULL;
    r->tokens = NULL;
}

/* The engine for all tests, its first sequence, and the text. */
static bool open_engine(struct run *r, const struct model *m, struct engine_options eo, struct error *e)
{
    int64_t longest = 0;
    eo.max_sequences = 1;
    for (const struct test *t = r->tests; t < r->tests + r->n_tests; t++) {
        if (t->depth + t->n > longest) longest = t->depth + t->n;
        if (t->parallel > eo.max_sequences) eo.max_sequences = t->parallel;
    }
    if (eo.ctx && eo.ctx < longest)
        return fail(e, GEN_USAGE, "the longest test needs a context of %lld tokens, but --ctx-size is %lld",
                    (long long)longest, (long long)eo.ctx);
    if (!eo.ctx) eo.ctx = longest > eo.window + eo.sinks ? longest : eo.window + eo.sinks;
    if (!eo.cache && eo.max_sequences > 1)
        return fail(e, GEN_USAGE, "--no-kv-cache computes one sequence at a time: leave out -np");
    if (!enough_memory(m, &eo, e)) return false;
    eo.share = false;                  /* each test computes its own */
    eo.progress = NULL;                /* the tests tell their own */
    r->tokens = alloc_zeroed((size_t)longest, sizeof *r->tokens, "the text", e);
    if (!r->tokens || !engine_open(&r->g, m, &eo, e) || !sequence_open(&r->first, r->g, e)) return false;
    uint32_t x = 1;
    for (int64_t i = 0; i < longest; i++) {
        x = x * 1664525 + 1013904223;  /* Numerical Recipes' generator; its upper bits are the good ones */
        r->tokens[i] = (int32_t)((uint64_t)x * (uint64_t)m->n_vocab >> 32);
    }
    return true;
}

/* ---- the work of a token */

static void add_matrix(struct token_work *w, const struct matrix *x, double *products)
{
    w->matrices += (double)x->rows * (double)matrix_row_bytes(x);
    *products += (double)x->rows * (double)x->columns;
}

static struct token_work work_of(const struct model *m, const struct engine_options *eo)
{
    struct token_work w = { .window = eo->window > 0 && eo->window < m->window ? eo->window : m->window,
                      .kept = eo->window > 0 ? (double)eo->window + eo->sinks : INFINITY };
    for (int i = 0; i < m->n_layer; i++) {
        const struct layer *l = &m->layers[i];
        const struct matrix *all[] = { &l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down };
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) add_matrix(&w, all[k], &w.layers);
        *(l->local ? &w.local : &w.global) += 1;
    }
    add_matrix(&w, &m->out, &w.head);
    struct kv_shape one_layer = { 1, m->n_kv, m->head_k, m->head_v, eo->type_k, eo->type_v, KV_BLOCK };
    w.cell = kv_token_bytes(&one_layer);
    return w;
}

/* Bytes of the keys and values that the token at position `pos` sees. */
static double cache_bytes(const struct token_work *w, double pos)
{
    double all = pos + 1 < w->kept ? pos + 1 : w->kept, near = pos + 1 < w->window ? pos + 1 : w->window;
    return w->cell * (w->global * all + w->local * near);
}

static double bytes_per_token(const struct token_work *w, const struct test *t)
{
    if (!t->decode) return (w->matrices + cache_bytes(w, (double)(t->depth + t->n - 1))) / (double)t->n;
    return w->matrices / t->parallel + cache_bytes(w, (double)t->depth + (double)(t->n - 1) / 2);
}

static double products_per_token(const struct token_work *w, const struct test *t)
{
    return w->layers + w->head / (t->decode ? 1 : (double)t->n);
}

/* ---- running */

static bool stopped(const struct run *r, struct error *e)
{
    return r->o->stop && *r->o->stop && !fail(e, GEN_RUN, "interrupted");
}

/* Brings the sequence to `depth` tokens of the text. */
static bool fill(struct run *r, struct sequence **s, int64_t depth, struct error *e)
{
    if (depth) return sequence_sync(*s, r->tokens, depth, NULL, r->o->stop, e) && !stopped(r, e);
    sequence_close(*s);
    *s = NULL;
    return sequence_open(s, r->g, e);
}

static bool fill_all(struct run *r, const struct test *t, struct error *e)
{
    for (; r->n_more < t->parallel - 1; r->n_more++)
        if (!sequence_open(&r->more[r->n_more], r->g, e)) return false;
    bool ok = fill(r, &r->first, t->depth, e);
    for (int i = 0; i < t->parallel - 1 && ok; i++) ok = fill(r, &r->more[i], t->depth, e);
    return ok;
}

static bool decode(struct run *r, const struct test *t, int64_t n, struct error *e)
{
    struct sequence *all[MOST_PARALLEL];
    int32_t next[MOST_PARALLEL];
    for (int i = 0; i < t->parallel; i++) all[i] = i ? r->more[i - 1] : r->first;
    for (int64_t k = 0; k < n && !stopped(r, e); k++) {
        for (int i = 0; i < t->parallel; i++) next[i] = r->tokens[t->depth + k];
        if (!engine_step(r->g, all, next, t->parallel, e)) return false;
    }
    return !stopped(r, e);
}

/* Runs the test once with n of its tokens. *seconds without bringing the cache to the depth. */
static bool once(struct run *r, const struct test *t, int64_t n, double *seconds, struct error *e)
{
    if (!fill_all(r, t, e)) return false;
    double start = now_seconds();
    bool ok = t->decode ? decode(r, t, n, e) : fill(r, &r->first, t->depth + n, e);
    *seconds = now_seconds() - start;
    return ok;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void summarise(struct test *t, double *speeds, int n)
{
    double sum = 0, squares = 0;
    for (int i = 0; i < n; i++) sum += speeds[i];
    for (int i = 0; i < n; i++) squares += (speeds[i] - sum / n) * (speeds[i] - sum / n);
    qsort(speeds, (size_t)n, sizeof *speeds, by_value);
    t->median = (speeds[n / 2] + speeds[(n - 1) / 2]) / 2;
    t->best = speeds[n - 1];
    t->deviation = n > 1 ? sqrt(squares / (n - 1)) : 0;
}

/* The machine is measured before each test and after the last one. */
static bool run_all(struct run *r, struct error *e)
{
    int reps = r->o->reps, done = 0, all = r->n_tests * reps;
    for (struct test *t = r->tests; t < r->tests + r->n_tests; t++) {
        double seconds;
        r->limits = probe_measure(r->probe);
        if (!once(r, t, t->decode && t->n > 4 ? 4 : t->n, &seconds, e)) return false;      /* touches the memory once */
        for (int i = 0; i < reps; i++) {
            if (!once(r, t, t->n, &seconds, e)) return false;
            r->speeds[i] = (double)t->n * t->parallel / (seconds > 0 ? seconds : 1e-9);
            if (r->o->progress) r->o->progress("measuring", (double)++done / all);
        }
        summarise(t, r->speeds, reps);
        if (t->parallel > 1) close_more(r);
    }
    r->limits = probe_measure(r->probe);
    return true;
}

/* ---- printing */

static bool print_json(struct bytes *out, const struct run *r, struct error *e)
{
    json_t *array = json_array();
    for (const struct test *t = r->tests; t < r->tests + r->n_tests; t++) {
        double bytes = bytes_per_token(&r->work, t), products = products_per_token(&r->work, t);
        json_t *test = json_pack(
            "{s:s, s:I, s:I, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}",
            "test", t->decode ? "decode" : "prefill", "n", (json_int_t)t->n, "depth", (json_int_t)t->depth,
            "sequences", t->parallel, "tokens_per_s", t->median, "best_tokens_per_s", t->best, "stddev", t->deviation,
            "bytes_per_token", bytes, "gb_per_s", bytes * t->median / 1e9,
            "bandwidth_fraction", bytes * t->median / r->limits.bytes,
            "gmac_per_s", products * t->median / 1e9, "int8_fraction", products * t->median / r->limits.multiply_adds);
        if (r->quadratic) json_put(&test, "cached_tokens_per_s", json_real(t->cached));
        json_push(&array, test);
    }
    return json_line(out, array, e);
}

static bool print_table(struct bytes *out, const struct run *r, struct error *e)
{
    const struct backend *b = engine_backend(r->g);
    bool ok = bytes_printf(out, "%s %s, %d thread%s; memory %.1f GB/s, byte products %.1f GMAC/s; median of %d runs\n\n"
                                "%-8s %6s %6s %4s %10s %9s %8s %8s %6s %8s %6s\n",
                           b->name, b->isa, b->threads, b->threads == 1 ? "" : "s", r->limits.bytes / 1e9,
                           r->limits.multiply_adds / 1e9, r->o->reps, "test", "tokens", "depth", "seqs", "tokens/s",
                           "best", "stddev", "GB/s", "of it", "GMAC/s", "of it");
    for (const struct test *t = r->tests; t < r->tests + r->n_tests && ok; t++) {
        double bytes = bytes_per_token(&r->work, t) * t->median, products = products_per_token(&r->work, t) * t->median;
        ok = bytes_printf(out, "%-8s %6lld %6lld %4d %10.2f %9.2f %8.2f %8.2f %4.0f %% %8.1f %4.0f %%\n",
                          t->decode ? "decode" : "prefill", (long long)t->n, (long long)t->depth, t->parallel,
                          t->median, t->best, t->deviation, bytes / 1e9, 100 * bytes / r->limits.bytes, products / 1e9,
                          100 * products / r->limits.multiply_adds);
    }
    return ok || fail(e, GEN_RUN, "cannot allocate memory for the result");
}

/* Time per token against the length of the text: flat with a cache, growing without. */
static bool print_growth(struct bytes *out, const struct run *r, struct error *e)
{
    const struct backend *b = engine_backend(r->g);
    bool ok = bytes_printf(out, "%s %s, %d thread%s; milliseconds for each of the next tokens, median of %d runs\n\n"
                                "%6s %6s %12s %14s %8s\n", b->name, b->isa, b->threads, b->threads == 1 ? "" : "s",
                           r->o->reps, "depth", "tokens", "with cache", "without", "ratio");
    for (const struct test *t = r->tests; t < r->tests + r->n_tests && ok; t++)
        ok = bytes_printf(out, "%6lld %6lld %12.2f %14.2f %8.1f\n", (long long)t->depth, (long long)t->n,
                          1e3 / t->cached, 1e3 / t->median, t->cached / t->median);
    return ok || fail(e, GEN_RUN, "cannot allocate memory for the result");
}

static bool measure(struct run *r, const struct model *m, struct engine_options eo, struct error *e)
{
    return open_engine(r, m, eo, e)
        && probe_open(&r->probe, engine_backend(r->g)->isa, engine_backend(r->g)->threads, e) && run_all(r, e);
}

bool bench_run(struct bytes *out, const struct model *m, const struct engine_options *eo, const struct bench_options *o,
               struct error *e)
{
    struct run r = { .o = o, .work = work_of(m, eo), .quadratic = !eo->cache };
    if (o->reps < 1 || o->reps > MOST_REPS)
        return fail(e, GEN_USAGE, "--reps %d is not possible: it takes 1 to %d", o->reps, MOST_REPS);
    r.speeds = alloc_zeroed((size_t)o->reps, sizeof *r.speeds, "the results", e);
    bool ok = r.speeds && list_tests(&r, e);
    if (ok && r.quadratic) {
        struct engine_options with = *eo;
        with.cache = true;
        ok = measure(&r, m, with, e);
        close_engine(&r);
        for (int i = 0; i < r.n_tests; i++) r.tests[i].cached = r.tests[i].median;
    }
    ok = ok && measure(&r, m, *eo, e);
    ok = ok && (o->json ? print_json(out, &r, e) : r.quadratic ? print_growth(out, &r, e) : print_table(out, &r, e));
    close_engine(&r);
    free(r.tests);
    free(r.speeds);
    return ok;
}
