/* score_tool MODEL KTYPE VTYPE WINDOW SINKS EVICT BUDGET CHUNK THREADS - what a cache makes of texts. Each line of stdin is
 * "FIRST id id ...": the tokens up to place FIRST are a prompt, the rest is what follows it, one token after the other. Prints per
 * line, for each token from FIRST + 1 on, its negative log-likelihood, with a '*' when it is the most likely one; and at last
 * '|', the hash of the last row's logits and the tokens evicted. */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine.h"

static void must(bool ok, const struct error *e)
{
    if (ok) return;
    fprintf(stderr, "score_tool: %s\n", e->text);
    exit(1);
}

struct text { int32_t *tokens; int64_t n; int vocab; char hash[65]; };

static bool each(void *user, int64_t pos, const float *logits, struct error *e)
{
    struct text *t = user;
    (void)e;
    if (pos == t->n - 1) return sha256_hex(logits, sizeof *logits * t->vocab, t->hash), true;
    int32_t next = t->tokens[pos + 1];
    double sum = 0, top = -INFINITY;
    for (int i = 0; i < t->vocab; i++) top = logits[i] > top ? logits[i] : top;
    for (int i = 0; i < t->vocab; i++) sum += exp(logits[i] - top);
    printf("%.6f%s ", top + log(sum) - logits[next], logits[next] == top ? "*" : "");
    return true;
}

static enum kv_type type_of(const char *name)
{
    static const char *const types[KV_TYPES] = { "f32", "f16", "bf16", "fp8", "int8", "int4" };
    for (int i = 0; i < KV_TYPES; i++)
        if (!strcmp(name, types[i])) return (enum kv_type)i;
    exit(2);
}

int main(int argc, char **argv)
{
    struct error e = { 0 };
    struct gguf *file;
    struct model *m = NULL;
    struct engine *g;
    struct sequence *s;
    char note[200], *line = NULL, *at;
    size_t cap = 0;
    if (argc != 10)
        return fprintf(stderr, "usage: score_tool MODEL KTYPE VTYPE WINDOW SINKS EVICT BUDGET CHUNK THREADS\n"), 2;
    must(gguf_open(&file, argv[1], true, &e) && model_open(&m, file, &(struct model_options){ 0 }, note, &e), &e);
    struct engine_options o = { .ctx = m->n_ctx, .batch = atoi(argv[8]), .threads = atoi(argv[9]), .max_sequences = 1,
                                .page_size = KV_BLOCK, .type_k = type_of(argv[2]), .type_v = type_of(argv[3]),
                                .window = atoi(argv[4]), .sinks = atoi(argv[5]), .cache = true, .budget = atoi(argv[7]),
                                .evict = !strcmp(argv[6], "attention") ? EVICT_ATTENTION :
                                         !strcmp(argv[6], "snapkv") ? EVICT_SNAPKV : EVICT_OFF };
    must(engine_open(&g, m, &o, &e) && sequence_open(&s, g, &e), &e);
    while (getline(&line, &cap, stdin) > 0) {
        struct text t = { NULL, 0, m->n_vocab, "" };
        int64_t first = strtoll(line, &at, 10);
        t.tokens = calloc(strlen(line) / 2 + 1, sizeof *t.tokens);
        for (char *end; ; at = end) {
            long id = strtol(at, &end, 10);
            if (end == at) break;
            t.tokens[t.n++] = (int32_t)id;
        }
        must(sequence_score(s, t.tokens, t.n, first, each, &t, &e), &e);
        printf("| %s %lld\n", t.hash, (long long)sequence_evicted(s));
        fflush(stdout);
        free(t.tokens);
    }
    free(line);
    sequence_close(s);
    engine_close(g);
    model_close(m);
    return 0;
}
