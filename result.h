/* result.h - the answer of one run as a JSON object, and its parts. */
#ifndef RESULT_H
#define RESULT_H

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

struct json_t;                         /* Jansson's */

/* What of a result does not depend on how it was computed: text, tokens, finish_reason, usage without cached tokens,
 * logits_sha256, log-probabilities. NULL when memory is out. */
struct json_t *result_response(const struct result *r, const struct tokenizer *t);

/* Log-probabilities of the tokens of an answer, one row of 1 + n_top each. */
struct logprob_rows { struct token_logprob *data; size_t cap; int n_top; };
/* Keeps those of the index-th token, chosen by these logits. Does nothing where n_top < 0. Errors: GEN_RUN. */
bool logprobs_keep(struct logprob_rows *rows, struct sampler *s, const float *logits, int32_t id, size_t index,
                   struct error *e);

/* Appends the whole object on one line, with a line end. Errors: GEN_RUN for memory. */
bool result_json(struct bytes *out, const struct result *r, const struct tokenizer *t, struct error *e);

/* "f32", "f16", ... */
const char *kv_type_name(enum kv_type t);

#endif
