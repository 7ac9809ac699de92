/* batch.c - the result object. */
#include "batch.h"

#include "json.h"

#include <jansson.h>
#include <math.h>

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
    for (size_t i = 0; i < piece.len; i++) json_array_append_new(bytes, json_integer((unsigned char)piece.ptr[i]));
    return json_pack("{s:o, s:f, s:o}", "token", json_text(piece.ptr, piece.len),
                     "logprob", isfinite(p.logprob) ? (double)p.logprob : -9999.0, "bytes", bytes);
}

static json_t *json_logprobs(const struct result *r, const struct tokenizer *t)
{
    json_t *content = json_array();
    for (size_t i = 0; i < r->n_tokens; i++) {
        const struct token_logprob *p = r->logprobs + i * (1 + (size_t)r->n_top);
        json_t *entry = json_logprob(t, p[0]), *top = json_array();
        for (int k = 1; k <= r->n_top; k++) json_array_append_new(top, json_logprob(t, p[k]));
        json_object_set_new(entry, "top_logprobs", top);
        json_array_append_new(content, entry);
    }
    return json_pack("{s:o}", "content", content);
}

/* Milliseconds, to the microsecond. */
static double ms(double seconds) { return round(seconds * 1e6) / 1e3; }

bool result_json(struct bytes *out, const struct result *r, const struct tokenizer *t, struct error *e)
{
    json_t *tokens = json_array();
    for (size_t i = 0; i < r->n_tokens; i++) json_array_append_new(tokens, json_integer(r->tokens[i]));
    json_t *object = json_pack(
        "{s:o, s:o, s:s?, s:{s:I, s:I, s:I}, s:{s:f, s:f, s:f}, s:{s:s, s:s, s:s, s:I, s:I, s:i, s:I}, s:I, s:s?}",
        "text", json_text(r->text, r->text_len), "tokens", tokens, "finish_reason", r->finish_reason,
        "usage", "prompt_tokens", (json_int_t)r->prompt_tokens, "cached_tokens", (json_int_t)r->cached_tokens,
        "completion_tokens", (json_int_t)r->n_tokens,
        "timings", "load_ms", ms(r->load_s), "prefill_ms", ms(r->prefill_s), "decode_ms", ms(r->decode_s),
        "kv", "layout", r->layout == KV_PAGED ? "paged" : "contiguous", "type_k", kv_type_name(r->type_k),
        "type_v", kv_type_name(r->type_v), "bytes_used", (json_int_t)r->kv.bytes_used,
        "bytes_reserved", (json_int_t)r->kv.bytes_reserved, "pages", r->kv.pages,
        "evicted_tokens", (json_int_t)r->evicted_tokens,
        "seed", (json_int_t)r->seed, "logits_sha256", r->logits_sha256[0] ? r->logits_sha256 : NULL);
    if (object && r->n_top >= 0) json_object_set_new(object, "logprobs", json_logprobs(r, t));
    return json_line(out, object, e);
}
