/* result.c - answers as JSON. */
#include "result.h"

#include "json.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>

const char *kv_type_name(enum kv_type t)
{
    static const char *const name[KV_TYPES] = { "f32", "f16", "bf16", "fp8", "int8", "int4" };
    return name[t];
}

/* OpenAI's shape: the token's text, its log-probability (-9999 where the probability is 0) and its bytes. */
static json_t *json_logprob(const struct tokenizer *t, struct token_logprob p)
{
    struct gguf_str piece = tokenizer_piece(t, p.id, true);
    json_t *bytes = json_array();
    for (size_t i = 0; i < piece.len; i++) json_push(&bytes, json_integer((unsigned char)piece.ptr[i]));
    return json_pack("{s:o, s:f, s:o}", "token", json_text(piece.ptr, piece.len),
                     "logprob", isfinite(p.logprob) ? (double)p.logprob : -9999.0, "bytes", bytes);
}

static json_t *json_logprobs(const struct result *r, const struct tokenizer *t)
{
    json_t *content = json_array();
    for (size_t i = 0; i < r->n_tokens; i++) {
        const struct token_logprob *p = r->logprobs + i * (1 + (size_t)r->n_top);
        json_t *entry = json_logprob(t, p[0]), *top = json_array();
        for (int k = 1; k <= r->n_top; k++) json_push(&top, json_logprob(t, p[k]));
        json_put(&entry, "top_logprobs", top);
        json_push(&content, entry);
    }
    return json_pack("{s:o}", "content", content);
}

bool logprobs_keep(struct logprob_rows *rows, struct sampler *s, const float *logits, int32_t id, size_t index,
                   struct error *e)
{
    size_t width = 1 + (size_t)rows->n_top;
    if (rows->n_top < 0) return true;
    if (index >= rows->cap) {
        size_t cap = rows->cap ? rows->cap * 2 : 64, bytes;
        struct token_logprob *grown = size_mul(cap, width * sizeof *grown, &bytes) ? realloc(rows->data, bytes) : NULL;
        if (!grown) return fail(e, GEN_RUN, "cannot allocate memory for the log-probabilities");
        rows->data = grown;
        rows->cap = cap;
    }
    struct token_logprob *row = rows->data + index * width;
    row[0].id = id;
    sampler_logprobs(s, logits, id, &row[0].logprob, row + 1, rows->n_top);
    return true;
}

static json_t *json_ids(const int32_t *ids, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) json_push(&list, json_integer(ids[i]));
    return list;
}

/* Adds what is there at the end of an object in any case. */
static json_t *finished(json_t *object, const struct result *r, const struct tokenizer *t)
{
    if (!object) return NULL;
    json_put(&object, "logits_sha256", r->logits_sha256[0] ? json_string(r->logits_sha256) : json_null());
    if (r->n_top >= 0) json_put(&object, "logprobs", json_logprobs(r, t));
    return object;
}

json_t *result_response(const struct result *r, const struct tokenizer *t)
{
    json_t *object = json_pack(
        "{s:o, s:o, s:s?, s:{s:I, s:I}}",
        "text", json_text(r->text, r->text_len), "tokens", json_ids(r->tokens, r->n_tokens),
        "finish_reason", r->finish_reason,
        "usage", "prompt_tokens", (json_int_t)r->prompt_tokens, "completion_tokens", (json_int_t)r->n_tokens);
    return finished(object, r, t);
}

/* Milliseconds, to the microsecond. */

bool result_json(struct bytes *out, const struct result *r, const struct tokenizer *t, struct error *e)
{
    json_t *object = json_pack(
        "{s:o, s:o, s:s?, s:{s:I, s:I, s:I}, s:{s:f, s:f, s:f}, s:{s:s, s:s, s:s, s:I, s:I, s:i, s:I}, s:I}",
        "text", json_text(r->text, r->text_len), "tokens", json_ids(r->tokens, r->n_tokens),
        "finish_reason", r->finish_reason,
        "usage", "prompt_tokens", (json_int_t)r->prompt_tokens, "cached_tokens", (json_int_t)r->cached_tokens,
        "completion_tokens", (json_int_t)r->n_tokens,
        "timings", "load_ms", json_ms(r->load_s), "prefill_ms", json_ms(r->prefill_s),
        "decode_ms", json_ms(r->decode_s),
        "kv", "layout", r->layout == KV_PAGED ? "paged" : "contiguous", "type_k", kv_type_name(r->type_k),
        "type_v", kv_type_name(r->type_v), "bytes_used", (json_int_t)r->kv.bytes_used,
        "bytes_reserved", (json_int_t)r->kv.bytes_reserved, "pages", r->kv.pages,
        "evicted_tokens", (json_int_t)r->evicted_tokens,
        "seed", (json_int_t)r->seed);
    return json_line(out, finished(object, r, t), e);
}
