/* cuda_tool MODEL [WORD=VALUE]... - the same steps on the CPU and on the CUDA backend: a prompt, single tokens, a few
 * tokens at once, a cut, two sequences together. Prints the largest difference of log-probabilities of each kind of
 * step and a hash of all logits that CUDA gave, as JSON; with eviction also how many units (rows or blocks) of all
 * layers and heads CUDA kept, and how many of these the CPU kept, too. Fails where the largest logits that CUDA finds
 * are not those of the row. It is linked with --wrap=kv_choose.
 *
 *   k, v      types of the cache (f16)               layout   paged or contiguous (paged)    page   its tokens (32)
 *   prompt    tokens of the prompt (70)              steps    single tokens (4)              seed   of the tokens (1)
 *   chunk     tokens of a prefill chunk (512)        window, sinks                           cpu    0: without the CPU
 *   oracle    the model that the CPU computes (MODEL itself): its weights in float, say
 *   hand      1: CUDA's sequences start with the blocks of the CPU's cache, so that codes are the same
 *   ctx       largest context (1024)                 evict    off, attention or snapkv   budget   its tokens
 *   depth     CUDA alone, a cache of so many tokens that holds zeros, then only `steps` single tokens: to count */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine.h"

enum { CPU, CUDA, BACKENDS, EXTRA = 5, CUT = 3, TOP = 40 };
enum kind { PREFILL, DECODE, EXTEND, TOGETHER, KINDS };
static const char *const kind_names[KINDS] = { "prefill", "decode", "extend", "together" };
static const char *const types[KV_TYPES] = { "f32", "f16", "bf16", "fp8", "int8", "int4" };

struct run {
    struct engine *g;
    struct sequence *a, *b;
};
static struct run runs[BACKENDS];
static int first = CPU;                /* CUDA where only that is run */
static double worst[KINDS];
static uint64_t hash = 14695981039346656037u;

/* ---- what eviction keeps: the CPU's choices wait for CUDA's --------------------------------------------------------- */

struct choice { struct choice *next; int32_t kept[]; };
static struct choice *choices, **last_choice = &choices;
static int64_t kept_units, kept_alike;

static void choose_on_cpu(const int32_t *kept, int64_t n)
{
    struct choice *c = malloc(sizeof *c + n * sizeof *kept);
    memcpy(c->kept, kept, n * sizeof *kept);
    c->next = NULL;
    *last_choice = c;
    last_choice = &c->next;
}

/* Counts units that are in both lists of a head, which rise. */
static void choose_on_cuda(const int32_t *kept, int64_t lines, int64_t n)
{
    struct choice *c = choices;
    kept_units += lines * n;
    if (!c) return;
    for (int64_t line = 0; line < lines; line++) {
        const int32_t *a = kept + line * n, *b = c->kept + line * n;
        for (int64_t i = 0, k = 0; i < n && k < n; )
            if (a[i] == b[k]) kept_alike++, i++, k++;
            else if (a[i] < b[k]) i++;
            else k++;
    }
    if (!(choices = c->next)) last_choice = &choices;
    free(c);
}

void __real_kv_choose(const struct kv_view *v, const struct kv_middle *m, int64_t rows, uint64_t *scratch, int32_t *kept);
void __wrap_kv_choose(const struct kv_view *v, const struct kv_middle *m, int64_t rows, uint64_t *scratch, int32_t *kept)
{
    const struct kv_shape *s = v->main.shape;
    int64_t lines = s->n_layer * s->n_kv, n = m->keep / kv_unit(s);
    __real_kv_choose(v, m, rows, scratch, kept);
    static const unsigned char *cpu;   /* where its pages lie: the CPU comes first */
    if (!cpu) cpu = v->main.base;
    if (v->main.base == cpu && first == CPU) choose_on_cpu(kept, lines * n);
    else choose_on_cuda(kept, lines, n);
}

/* ---- steps ---------------------------------------------------------------------------------------------------------- */

static void must(bool ok, const struct error *e)
{
    if (ok) return;
    fprintf(stderr, "cuda_tool: %s\n", e->text);
    exit(1);
}

static double log_sum(const float *x, int n)
{
    double most = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) most = fmax(most, x[i]);
    for (int i = 0; i < n; i++) sum += exp(x[i] - most);
    return most + log(sum);
}

/* Takes note of how far apart the logits after position `pos` are; of NaN as infinitely far. */
static void compare(enum kind kind, const float *const logits[BACKENDS])
{
    int n = engine_model(runs[CUDA].g)->n_vocab;
    const unsigned char *bytes = (const unsigned char *)logits[CUDA];
    for (size_t i = 0; i < sizeof(float) * (size_t)n; i++) hash = (hash ^ bytes[i]) * 1099511628211u;
    double sums[BACKENDS];
    for (int i = first; i < BACKENDS; i++) sums[i] = log_sum(logits[i], n);
    for (int i = 0; i < n; i++) {
        double d = fabs((logits[first][i] - sums[first]) - (logits[CUDA][i] - sums[CUDA]));
        if (!(d <= worst[kind])) worst[kind] = d >= 0 ? d : INFINITY;
    }
}

/* The largest logits that CUDA tells are those of all that it gives. */
static void check_top(struct sequence *s, int64_t pos, const float *logits)
{
    struct error e;
    struct top t = sequence_top_at(s, pos, TOP);
    int greater = 0, n = engine_model(runs[CUDA].g)->n_vocab;
    bool ok = t.n == TOP;
    for (int i = 0; ok && i < n; i++) greater += logits[i] > t.logits[TOP - 1];
    ok = ok && greater < TOP;
    for (int i = 0; ok && i < TOP; i++)
        ok = t.logits[i] == logits[t.ids[i]] && (i == 0 || t.logits[i] < t.logits[i - 1] ||
                                                 (t.logits[i] == t.logits[i - 1] && t.ids[i] > t.ids[i - 1]));
    must(ok || fail(&e, GEN_RUN, "after token %lld the largest logits are others than CUDA tells", (long long)pos), &e);
}

static void compare_at(enum kind kind, struct sequence *const s[BACKENDS], int64_t pos)
{
    const float *logits[BACKENDS];
    for (int i = first; i < BACKENDS; i++) logits[i] = sequence_logits_at(s[i], pos);
    check_top(s[CUDA], pos, logits[CUDA]);
    compare(kind, logits);
}

static int32_t next_token(void)
{
    static uint64_t state;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return 6 + (int32_t)((state >> 33) % 250);      /* past the control tokens */
}

/* One token more for each of the sequences, in one pass. */
static void step(enum kind kind, bool both)
{
    struct error e;
    int32_t tokens[2] = { next_token(), next_token() };
    struct sequence *a[BACKENDS], *b[BACKENDS];
    for (int i = first; i < BACKENDS; i++) {
        struct sequence *s[2] = { runs[i].a, runs[i].b };
        must(engine_step(runs[i].g, s, tokens, both ? 2 : 1, &e), &e);
        a[i] = s[0], b[i] = s[1];
    }
    compare_at(kind, a, sequence_length(a[CUDA]) - 1);
    if (both) compare_at(kind, b, sequence_length(b[CUDA]) - 1);
}

/* Gives CUDA's sequence the whole blocks of the CPU's. */
static void hand_over(struct sequence *from, struct sequence *to)
{
    struct error e;
    const int32_t *tokens = sequence_tokens(from);
    for (int64_t block = 0; block < sequence_length(from) / KV_BLOCK; block++) {
        void *bytes = malloc(engine_block_bytes(runs[CPU].g, block, KV_ALL_PARTS));
        unsigned parts = sequence_read_block(from, block, bytes);
        must(sequence_write_block(to, tokens + block * KV_BLOCK, bytes, parts, &e), &e);
        free(bytes);
    }
}

static void prefill(struct sequence **s[BACKENDS], int n, bool hand)
{
    struct error e;
    struct sequence *open[BACKENDS];
    int32_t *tokens = calloc((size_t)n, sizeof *tokens);
    int64_t whole = n / KV_BLOCK * KV_BLOCK, reused;
    for (int i = 0; i < n; i++) tokens[i] = next_token();
    for (int i = first; i < BACKENDS; i++) {
        must(sequence_open(s[i], runs[i].g, &e), &e);
        sequence_want_top(open[i] = *s[i], TOP);
    }
    if (hand && whole > 0) {
        must(sequence_sync(open[CPU], tokens, whole, NULL, NULL, &e), &e);
        hand_over(open[CPU], open[CUDA]);
    }
    for (int i = first; i < BACKENDS; i++) must(sequence_sync(open[i], tokens, n, &reused, NULL, &e), &e);
    must(!hand || whole == 0 || reused == whole || fail(&e, GEN_RUN, "blocks given to CUDA are not used"), &e);
    compare_at(PREFILL, open, n - 1);
    free(tokens);
}

/* A sequence whose first n tokens (whole blocks) have keys and values of zero, and one token more. */
static void deep(int n)
{
    struct error e;
    struct run *r = &runs[CUDA];
    int32_t *tokens = calloc((size_t)n + 1, sizeof *tokens);
    must(sequence_open(&r->a, r->g, &e) && sequence_open(&r->b, r->g, &e), &e);
    sequence_want_top(r->a, TOP);
    for (int64_t block = 0; block < n / KV_BLOCK; block++) {
        void *zeros = calloc(1, engine_block_bytes(r->g, block, KV_ALL_PARTS));
        must(sequence_write_block(r->a, tokens, zeros, KV_ALL_PARTS, &e), &e);
        free(zeros);
    }
    must(sequence_sync(r->a, tokens, n / KV_BLOCK * KV_BLOCK + 1, NULL, NULL, &e), &e);
    free(tokens);
}

static void extend(void)
{
    struct error e;
    int32_t tokens[EXTRA];
    struct sequence *a[BACKENDS];
    int64_t n = sequence_length(runs[CUDA].a);
    for (int i = 0; i < EXTRA; i++) tokens[i] = next_token();
    for (int i = first; i < BACKENDS; i++) must(sequence_extend(a[i] = runs[i].a, tokens, EXTRA, &e), &e);
    for (int i = 0; i < EXTRA; i++) compare_at(EXTEND, a, n + i);
    for (int i = first; i < BACKENDS; i++)
        must(sequence_cut(a[i], n + EXTRA - CUT) == n + EXTRA - CUT || fail(&e, GEN_RUN, "cut keeps less"), &e);
}

static enum kv_type type_of(const char *name)
{
    for (int i = 0; i < KV_TYPES; i++)
        if (!strcmp(name, types[i])) return (enum kv_type)i;
    fprintf(stderr, "cuda_tool: unknown type %s\n", name);
    exit(2);
}

int main(int argc, char **argv)
{
    struct error e = { 0 };
    struct engine_options o = { .ctx = 1024, .batch = 512, .threads = 1, .max_sequences = 2, .layout = KV_PAGED,
                                .page_size = KV_BLOCK, .type_k = KV_F16, .type_v = KV_F16, .cache = true };
    int prompt = 70, steps = 4, seed = 1, depth = 0;
    bool hand = false;
    if (argc < 2) return fprintf(stderr, "usage: cuda_tool MODEL [WORD=VALUE]...\n"), 2;
    const char *files[BACKENDS] = { argv[1], argv[1] };
    for (int i = 2; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (!value) return fprintf(stderr, "cuda_tool: %s: no value\n", argv[i]), 2;
        *value++ = 0;
        if (!strcmp(argv[i], "k")) o.type_k = type_of(value);
        else if (!strcmp(argv[i], "v")) o.type_v = type_of(value);
        else if (!strcmp(argv[i], "layout")) o.layout = strcmp(value, "paged") ? KV_CONTIGUOUS : KV_PAGED;
        else if (!strcmp(argv[i], "page")) o.page_size = atoi(value);
        else if (!strcmp(argv[i], "prompt")) prompt = atoi(value);
        else if (!strcmp(argv[i], "steps")) steps = atoi(value);
        else if (!strcmp(argv[i], "seed")) seed = atoi(value);
        else if (!strcmp(argv[i], "chunk")) o.batch = atoi(value);
        else if (!strcmp(argv[i], "ctx")) o.ctx = atoi(value);
        else if (!strcmp(argv[i], "depth")) depth = atoi(value), first = depth ? CUDA : first;
        else if (!strcmp(argv[i], "evict"))
            o.evict = !strcmp(value, "attention") ? EVICT_ATTENTION : !strcmp(value, "snapkv") ? EVICT_SNAPKV : EVICT_OFF;
        else if (!strcmp(argv[i], "budget")) o.budget = atoi(value);
        else if (!strcmp(argv[i], "window")) o.window = atoi(value);
        else if (!strcmp(argv[i], "sinks")) o.sinks = atoi(value);
        else if (!strcmp(argv[i], "cpu")) first = atoi(value) ? CPU : CUDA;
        else if (!strcmp(argv[i], "hand")) hand = atoi(value) != 0;
        else if (!strcmp(argv[i], "oracle")) files[CPU] = value;
        else return fprintf(stderr, "cuda_tool: unknown word %s\n", argv[i]), 2;
    }
    for (int i = 0; i < seed; i++) next_token();
    struct model *m[BACKENDS] = { 0 };
    struct sequence **a[BACKENDS], **b[BACKENDS];
    for (int i = first; i < BACKENDS; i++) {
        struct gguf *file;
        char note[200];
        o.backend = i == CUDA ? BACKEND_CUDA : BACKEND_CPU;
        must(gguf_open(&file, files[i], true, &e) &&
             model_open(&m[i], file, &(struct model_options){ 0 }, note, &e), &e);
        must(engine_open(&runs[i].g, m[i], &o, &e), &e);
        a[i] = &runs[i].a, b[i] = &runs[i].b;
    }
    if (depth) deep(depth);
    else prefill(a, prompt, hand);
    for (int i = 0; i < steps; i++) step(DECODE, false);
    if (!depth) {
        if (!o.evict) extend();        /* which takes tokens back */
        step(DECODE, false);
        prefill(b, (prompt + 1) / 2, hand);
        for (int i = 0; i < 2; i++) step(TOGETHER, true);
        step(DECODE, false);
    }
    printf("{");
    for (int i = 0; i < KINDS; i++) printf("\"%s\": %.3g, ", kind_names[i], isfinite(worst[i]) ? worst[i] : 1e30);
    if (o.evict) printf("\"kept\": %lld, \"alike\": %lld, ", (long long)kept_units, (long long)kept_alike);
    printf("\"hash\": \"%016llx\"}\n", (unsigned long long)hash);
    for (int i = first; i < BACKENDS; i++) {
        sequence_close(runs[i].a);
        sequence_close(runs[i].b);
        engine_close(runs[i].g);
        model_close(m[i]);
    }
    return 0;
}
