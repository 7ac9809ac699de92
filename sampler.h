/* sampler.h - choosing the next token: pure functions over an array of logits.
 *
 * Draws are counter-based: the random number of a token depends on (seed, token index) alone, so caches, batches and
 * speculation never change what is drawn. */
#ifndef SAMPLER_H
#define SAMPLER_H

#include "base.h"

struct logit_bias { int32_t id; float bias; };       /* bias -INFINITY forbids the token */

struct sampler_options {
    float temperature;                 /* 0 = greedy: the best logit after bias and penalties, whatever else is set */
    int top_k;                         /* 0 = off */
    float top_p;                       /* 1 = off */
    float min_p;                       /* 0 = off; >= 1 keeps exactly the best */
    float typical_p;                   /* 1 = off */
    float repeat_penalty;              /* 1 = off */
    int repeat_last_n;                 /* tokens looked back on; 0 = off, -1 = all */
    float presence_penalty, frequency_penalty;       /* 0 = off */
    const struct logit_bias *bias;
    size_t n_bias;
    uint64_t seed;
};

extern const struct sampler_options sampler_defaults;   /* 0.8, 40, 0.95, 0.05, 1; penalties off, repeat_last_n 64 */

struct sampler;                        /* scratch for one vocabulary size; not shared between threads */

/* Errors: GEN_USAGE naming the long option whose value is out of range (NaN included) or whose bias id is not in the
 * vocabulary; GEN_RUN for memory. */
bool sampler_open(struct sampler **out, const struct sampler_options *o, int n_vocab, struct error *e);
void sampler_close(struct sampler *s);
enum { SAMPLER_TOP = 128 };
/* How many of the largest logits a pick goes by, whatever the others are, at most SAMPLER_TOP; 0 = it may need all. */
int sampler_top(const struct sampler *s);

/* Picks the token at index `index` of the sequence; history = all tokens before it (prompt and answer). Does not
 * allocate and does not change logits. Ties go to the lower id. -1 and *e (GEN_RUN, names the index) when a logit is
 * NaN, all are -inf or one is +inf. */
int32_t sampler_pick(struct sampler *s, const float *logits, uint64_t index, const int32_t *history, size_t n_history,
                     struct error *e);
/* The same token by the sampler_top(s) largest logits alone, which are finite, and their ids: in falling order, the
 * lower id first among equals. 1 <= n <= sampler_top(s): fewer where all others are -inf. Does not allocate. */
int32_t sampler_pick_among(struct sampler *s, const int32_t *ids, const float *logits, int n, uint64_t index);

/* Natural-log probabilities of the unmodified softmax: of `token`, and the n best in falling order (ties: lower id
 * first). n <= 100. */
struct token_logprob { int32_t id; float logprob; };
void sampler_logprobs(struct sampler *s, const float *logits, int32_t token, float *logprob,
                      struct token_logprob *best, int n);

#endif
