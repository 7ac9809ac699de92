/* measure.h - how well a model predicts a text: perplexity, and divergence from a saved run. */
#ifndef MEASURE_H
#define MEASURE_H

#include "engine.h"
#include "tokenizer.h"

#include <stdio.h>

struct perplexity_options {
    int64_t window;                    /* tokens, >= 4 and at most the engine's context */
    int64_t chunks;                    /* windows at most; 0 = all */
    const char *save, *base;           /* files of log-probabilities to write and to compare with; NULL = none */
    FILE *save_to, *base_from;         /* the same as open files, which stay open; NULL = none */
    void (*progress)(const char *what, double done);
    const volatile int *stop;          /* non-zero ends the run with an error; may be NULL */
};

struct perplexity {
    int64_t windows, tokens;           /* windows, and tokens scored in them */
    double nll;                        /* mean negative log-likelihood of a scored token */
    double error;                      /* standard error of nll */
    double value;                      /* exp(nll) */
    bool compared;                     /* the rest is filled */
    double kl_mean, kl_p99;            /* KL(base || this run) per scored token: mean, 99th percentile */
    double top1_agreement;             /* share of tokens for which the most likely one is the same */
};

/* Scores tokens[0..n) by the method of llama.cpp's llama-perplexity: the text is cut into windows of w tokens (a rest
 * is left out); in the model's input each window's first token becomes the start token where the model wants one; rows
 * w/2 to w-2 are scored by the probability they give to the token that follows them. Errors: GEN_USAGE (text too short;
 * a base that is no such file, damaged, or of other tokens, vocabulary or windows), GEN_RUN (memory, files, logits that
 * give a token no finite probability, stopped). */
bool perplexity_measure(struct perplexity *out, struct engine *g, const struct tokenizer *t, const int32_t *tokens,
                        size_t n, const struct perplexity_options *o, struct error *e);
struct json_t;
/* Adds what the comparison gave to a JSON object, if there was one (json_put). */
void divergence_put(struct json_t **object, const struct perplexity *p);
/* The result as text lines, or as the JSON object of cli.md. */
bool perplexity_print(struct bytes *out, const struct perplexity *p, int64_t window, bool json, struct error *e);

#endif
