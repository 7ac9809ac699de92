/* bench.h - how fast a model is read and written here, beside what the machine can do. */
#ifndef BENCH_H
#define BENCH_H

#include "engine.h"

struct bench_options {
    /* Whole numbers with commas between them; NULL = not given. */
    const char *prefill;               /* tokens of each prefill test; 0 = none */
    const char *decode;                /* tokens of each decode test; 0 = none */
    const char *depth;                 /* tokens in the cache before each test; "0" when not given */
    const char *parallel;              /* sequences of each decode test that step together; "1" when not given */
    int reps;                          /* repetitions of each test, >= 1 */
    bool json;
    void (*progress)(const char *what, double done);   /* may be NULL */
    const volatile int *stop;          /* non-zero ends the run with an error; may be NULL */
};

/* Runs every test with an engine of its own and adds a table, or the JSON array of objects, to *out. With neither
 * prefill nor decode given the tests are prefill of 512 tokens and decode of 128. *eo is the engine's options but for
 * max_sequences; with ctx = 0 the context is what the longest test needs, whatever the model was made for.
 *
 * Without a cache (eo->cache false) decode alone is measured, at several depths unless they are given, with a cache and
 * without, and the table has the time per token of both.
 *
 * tokens_per_s is the median of the repetitions, over all sequences. bytes_per_token is the least that must be read
 * from memory for a token: the matrices once for each forward pass (a prefill counts as one), and the keys and values
 * of the tokens that it sees. Errors: GEN_USAGE for the lists and a context that is too small, GEN_RUN. */
bool bench_run(struct bytes *out, const struct model *m, const struct engine_options *eo, const struct bench_options *o,
               struct error *e);

#endif
