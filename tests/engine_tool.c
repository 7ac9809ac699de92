/* engine_tool MODEL SEED STEPS LAYOUT PAGE TYPE CHUNK THREADS WINDOW SINKS SHARE KIB - several sequences of one engine go through random operations (sync to a
 * changed text, extend, cut, one step together, prefill and decode in one pass, fork, blocks out of one sequence into another); after each, the logits must be the bits that a second engine computes from nothing.
 * The token loop must not allocate. Prints the number of comparisons. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine.h"

/* ---- the allocator guard: while `watched` is set, allocating is an error --------------------------------------------- */

#if defined __has_feature
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1         /* as gcc says it */
#endif
#endif

static int watched;
#if !defined __SANITIZE_ADDRESS__
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
            *__libc_memalign(size_t, size_t);
static void check(void)
{
    if (!watched) return;
    watched = 0;
    fputs("the token loop allocated memory\n", stderr);
    abort();
}
void *malloc(size_t n) { check(); return __libc_malloc(n); }
void *calloc(size_t n, size_t size) { check(); return __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { check(); return __libc_realloc(p, n); }
void *aligned_alloc(size_t align, size_t n) { check(); return __libc_memalign(align, n); }
#endif

enum { SEQUENCES = 3, CTX = 300 };

static uint64_t state;
static bool share;
static int rnd(int n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)n);
}

static void must(bool ok, const struct error *e)
{
    if (ok) return;
    fprintf(stderr, "engine_tool: %s\n", e->text);
    exit(1);
}

static int checks;
static int64_t tokens_reused;

/* The logits of s after position `pos` are those of its tokens computed from nothing. */
static void compare(struct engine *plain, const struct sequence *s, int64_t pos, const char *what, int step)
{
    struct error e;
    struct sequence *fresh;
    size_t bytes = sizeof(float) * engine_model(plain)->n_vocab;
    const float *have = sequence_logits_at(s, pos), *want;
    must(sequence_open(&fresh, plain, &e) && sequence_sync(fresh, sequence_tokens(s), pos + 1, NULL, NULL, &e), &e);
    want = sequence_logits(fresh);
    if (!have || !want || memcmp(have, want, bytes)) {
        fprintf(stderr, "engine_tool: step %d (%s): logits after position %lld %s\n", step, what, (long long)pos,
                have ? "are other bits" : "are missing");
        exit(1);
    }
    sequence_close(fresh);
    checks++;
}

/* A new text that shares a random part with the sequence's. */
static void step_sync(struct engine *plain, struct sequence *s, int step)
{
    struct error e;
    int32_t text[CTX];
    int64_t n = sequence_length(s), same = rnd((int)n + 1), all = same + rnd(CTX - (int)same) , reused;
    if (all == 0) all = 1;
    memcpy(text, sequence_tokens(s), sizeof *text * same);
    for (int64_t i = same; i < all; i++) text[i] = rnd(engine_model(plain)->n_vocab);
    must(sequence_sync(s, text, all, &reused, NULL, &e), &e);
    if (reused > all || sequence_length(s) != all) must((e.text[0] = 0, false), &e);
    compare(plain, s, all - 1, "sync", step);
}

static void step_extend(struct engine *plain, struct sequence *s, int step)
{
    struct error e;
    int32_t draft[EXTEND_ROWS];
    int n = 1 + rnd(EXTEND_ROWS);
    int64_t before = sequence_length(s);
    if (before + n > CTX) return;
    for (int i = 0; i < n; i++) draft[i] = rnd(engine_model(plain)->n_vocab);
    watched = 1;
    must(sequence_extend(s, draft, n, &e), &e);
    watched = 0;
    sequence_cut(s, before + 1 + rnd(n));
    compare(plain, s, before, "extend", step);
    compare(plain, s, sequence_length(s) - 1, "extend", step);
}

static void step_together(struct engine *g, struct engine *plain, struct sequence **s, int step)
{
    struct error e;
    struct sequence *who[SEQUENCES];
    int32_t token[SEQUENCES];
    int n = 0;
    for (int i = 0; i < SEQUENCES; i++)
        if (rnd(3) && sequence_length(s[i]) < CTX) who[n] = s[i], token[n++] = rnd(engine_model(plain)->n_vocab);
    if (n == 0) return;
    watched = 1;
    must(engine_step(g, who, token, n, &e), &e);
    watched = 0;
    for (int i = 0; i < n; i++) compare(plain, who[i], sequence_length(who[i]) - 1, "step", step);
}

/* Some tokens for one sequence and a single one for each of the others, in one pass. */
static void step_mixed(struct engine *g, struct engine *plain, struct sequence **s, int step)
{
    struct error e;
    struct work w[SEQUENCES];
    int32_t token[SEQUENCES][CTX];
    int n = 0, left = engine_rows(g) - SEQUENCES;
    for (int i = 0; i < SEQUENCES; i++) {
        int most = CTX - (int)sequence_length(s[i]);
        if (rnd(4) == 0 || most == 0) continue;
        if (most > left + 1) most = left + 1;
        int rows = 1 + rnd(most), want = rnd(rows < 3 ? rows + 1 : 3);
        left -= rows - 1;
        for (int k = 0; k < rows; k++) token[n][k] = rnd(engine_model(plain)->n_vocab);
        w[n] = (struct work){ s[i], token[n], rows, want };
        n++;
    }
    if (n == 0) return;
    watched = 1;
    must(engine_forward(g, w, n, &e), &e);
    watched = 0;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < w[i].want; k++) compare(plain, w[i].s, sequence_length(w[i].s) - 1 - k, "mixed", step);
}

/* Another sequence becomes a copy of this one; both go on their own ways. */
static void step_fork(struct engine *plain, struct sequence **s, int step)
{
    struct error e;
    int from = rnd(SEQUENCES), to = (from + 1 + rnd(SEQUENCES - 1)) % SEQUENCES;
    sequence_close(s[to]);
    must(sequence_fork(&s[to], s[from], &e), &e);
    if (sequence_logits(s[from])) compare(plain, s[to], sequence_length(s[to]) - 1, "fork", step);
    if (rnd(2)) step_extend(plain, s[from], step);
    step_extend(plain, s[to], step);
}

/* A sequence that begins anew with another one's text, or with part of it, finds that one's pages. */
static void step_reuse(struct engine *plain, struct sequence **s, int step)
{
    struct error e;
    int from = rnd(SEQUENCES), to = (from + 1 + rnd(SEQUENCES - 1)) % SEQUENCES;
    int64_t n = sequence_length(s[from]), reused;
    int32_t text[CTX];
    if (n == 0) return;
    if (rnd(2)) n = 1 + rnd((int)n);
    memcpy(text, sequence_tokens(s[from]), sizeof *text * n);
    must(sequence_sync(s[to], text, n, &reused, NULL, &e), &e);
    tokens_reused += reused;
    compare(plain, s[to], n - 1, "reuse", step);
}

/* The whole blocks of one sequence are written into another, of this engine or of one with other pages. */
static void step_blocks(struct engine *g, struct engine *plain, struct sequence **s, int step)
{
    struct error e;
    int from = rnd(SEQUENCES), to = (from + 1 + rnd(SEQUENCES - 1)) % SEQUENCES;
    int64_t n = sequence_length(s[from]) / KV_BLOCK, reused;
    int32_t text[CTX], more = rnd(engine_model(plain)->n_vocab);
    if (n * KV_BLOCK == CTX) n--;
    memcpy(text, sequence_tokens(s[from]), sizeof *text * n * KV_BLOCK);
    text[n * KV_BLOCK] = more;
    bool needed = true;
    sequence_cut(s[to], 0);
    for (int64_t b = 0; b < n; b++) {
        unsigned char *block = malloc(engine_block_bytes(g, b, KV_ALL_PARTS));
        unsigned parts = sequence_read_block(s[from], b, block), needs = engine_block_needs(g, b, n * KV_BLOCK);
        needed = needed && (parts & needs) == needs;
        must(sequence_write_block(s[to], text + b * KV_BLOCK, block, parts, &e), &e);
        free(block);
    }
    must(sequence_sync(s[to], text, n * KV_BLOCK + 1, &reused, NULL, &e), &e);
    if (needed ? reused != n * KV_BLOCK : reused > 0 && !share) {
        fprintf(stderr, "engine_tool: step %d: %lld of %lld tokens in blocks were used\n", step, (long long)reused,
                (long long)n * KV_BLOCK);
        exit(1);
    }
    compare(plain, s[to], n * KV_BLOCK, "blocks", step);
}

int main(int argc, char **argv)
{
    struct error e = { 0 };
    struct gguf *file;
    struct model *m;
    struct engine *g, *plain;
    struct sequence *s[SEQUENCES];
    char note[200];
    if (argc != 13) return fprintf(stderr, "usage: engine_tool MODEL SEED STEPS LAYOUT PAGE TYPE CHUNK THREADS WINDOW SINKS SHARE KIB\n"), 2;
    state = strtoull(argv[2], NULL, 10);
    static const char *const types[KV_TYPES] = { "f32", "f16", "bf16", "fp8", "int8", "int4" };
    enum kv_type type = KV_F16;
    for (int i = 0; i < KV_TYPES; i++)
        if (!strcmp(argv[6], types[i])) type = (enum kv_type)i;
    struct engine_options o = { .ctx = CTX, .batch = atoi(argv[7]), .threads = atoi(argv[8]), .max_sequences = SEQUENCES,
                                .layout = strcmp(argv[4], "paged") ? KV_CONTIGUOUS : KV_PAGED, .page_size = atoi(argv[5]),
                                .type_k = type, .type_v = type, .window = atoi(argv[9]), .sinks = atoi(argv[10]), .cache = true,
                                .share = atoi(argv[11]), .kv_memory = (size_t)atoi(argv[12]) << 10, .kv_offload = atoi(argv[12]) ? "." : NULL };
    share = o.share;
    struct engine_options po = o;
    po.share = false, po.kv_memory = 0, po.kv_offload = NULL, po.batch = 0, po.threads = po.max_sequences = 1, po.page_size = 3 * KV_BLOCK;
    if (!po.window) po.layout = KV_CONTIGUOUS;
    must(gguf_open(&file, argv[1], true, &e) && model_open(&m, file, &(struct model_options){ 0 }, note, &e), &e);
    must(engine_open(&g, m, &o, &e) && engine_open(&plain, m, &po, &e), &e);
    for (int i = 0; i < SEQUENCES; i++) must(sequence_open(&s[i], g, &e), &e);
    for (int step = 0; step < atoi(argv[3]); step++) {
        switch (rnd(9)) {
        case 0: case 1: step_sync(plain, s[rnd(SEQUENCES)], step); break;
        case 2: case 3: step_extend(plain, s[rnd(SEQUENCES)], step); break;
        case 4: step_fork(plain, s, step); break;
        case 5: step_blocks(g, plain, s, step); break;
        case 6: step_mixed(g, plain, s, step); break;
        case 7: step_reuse(plain, s, step); break;
        default: step_together(g, plain, s, step);
        }
        sequence_park(s[rnd(SEQUENCES)]);
        if (!engine_check(g)) return fprintf(stderr, "engine_tool: step %d left the pages inconsistent\n", step), 1;
    }
    struct kv_usage kv = engine_kv_usage(g);
    for (int i = 0; i < SEQUENCES; i++) sequence_close(s[i]);
    if (engine_kv_usage(g).pages || !engine_check(g)) return fprintf(stderr, "engine_tool: pages were lost\n"), 1;
    engine_close(g);
    engine_close(plain);
    model_close(m);
    printf("%d comparisons, %lld tokens reused, %llu bytes out, %llu in\n", checks, (long long)tokens_reused,
           (unsigned long long)kv.bytes_out, (unsigned long long)kv.bytes_in);
    return 0;
}
