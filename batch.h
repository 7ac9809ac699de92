/* batch.h - the result of one run as a JSON object. */
#ifndef BATCH_H
#define BATCH_H

#include "engine.h"
#include "sampler.h"
#include "tokenizer.h"

struct result {
    const char *text;                  /* UTF-8, text_len bytes */
    size_t text_len;
    const int32_t *tokens;             /* [n_tokens] generated ids; the token that ended the text is not among them */
    size_t n_tokens;
    const char *finish_reason;         /* "stop", "length", "context"; NULL = interrupted */
    int64_t prompt_tokens, cached_tokens, evicted_tokens;
    double load_s, prefill_s, decode_s;
    enum kv_layout layout;
    enum kv_type type_k, type_v;
    struct kv_usage kv;
    int64_t seed;
    char logits_sha256[65];            /* of the last step's logits: little-endian float32 bytes; "" = none */
    int n_top;                         /* alternatives told for each token; -1 = no log-probabilities */
    const struct token_logprob *logprobs;       /* [n_tokens][1 + n_top]: the token itself, then the best, falling */
};

/* Appends the object of cli.md on one line, with a line end. Errors: GEN_RUN for memory. */
bool result_json(struct bytes *out, const struct result *r, const struct tokenizer *t, struct error *e);

/* "f32", "f16", ... */
const char *kv_type_name(enum kv_type t);

#endif
