/* inspect.c - summaries of a model file, estimates of memory, and the check of all tensors. */
#include "inspect.h"

#include "result.h"
#include "json.h"
#include "kvstore.h"
#include "memory.h"
#include "output.h"

#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *human_bytes(double n, char out[32])
{
    static const char *const unit[] = { "bytes", "kB", "MB", "GB", "TB", "PB", "EB" };
    int i = 0;
    for (; n >= 999.5 && i < 6; i++) n /= 1000;
    snprintf(out, 32, i && n < 99.5 ? "%.1f %s" : "%.0f %s", n, unit[i]);
    return out;
}

static uint64_t tensor_bytes(const struct gguf *g)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < gguf_tensor_count(g); i++) sum += gguf_tensor_at(g, i)->size;
    return sum;
}

static uint64_t elements(const struct gguf_tensor *t) { return t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]; }

/* ---- a file */

static void put_text(json_t **object, const char *label, const struct gguf *g, const char *key)
{
    struct error ignored;
    struct gguf_str s = { NULL, 0 };
    if (gguf_get_str(g, key, &s, &ignored) && s.ptr) json_put(object, label, json_text(s.ptr, s.len));
}

static void put_count(json_t **object, const char *label, uint64_t n)
{
    json_put(object, label, json_integer(n > INT64_MAX ? INT64_MAX : (json_int_t)n));
}

static json_int_t count_in(const json_t *object, const char *label)
{
    return json_integer_value(json_object_get(object, label));
}

/* Puts the number that stands under arch + key. Absent, or not one number: nothing. */
static void put_number(json_t **object, const char *label, const struct gguf *g, struct gguf_str arch, const char *key)
{
    struct error ignored;
    char name[200];
    uint64_t n = UINT64_MAX;
    snprintf(name, sizeof name, "%.*s%s", (int)(arch.len < 100 ? arch.len : 100), arch.len ? arch.ptr : "", key);
    if (gguf_get_u64(g, name, &n, &ignored) && n <= INT64_MAX) put_count(object, label, n);
}

/* Counts the tensors of each type: {"Q4_1": {"tensors": 210, "bytes": ...}, ...} */
static json_t *types(const struct gguf *g)
{
    json_t *types = json_object();
    for (size_t i = 0; i < gguf_tensor_count(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        json_t *type = json_object_get(types, type_name(t->type));
        json_put(&types, type_name(t->type), json_pack("{s:I, s:I}", "tensors", count_in(type, "tensors") + 1, "bytes",
                                                       count_in(type, "bytes") + (json_int_t)t->size));
    }
    return types;
}

static json_t *file_object(const struct gguf *g)
{
    static const struct { const char *label, *key; } of_arch[] = {
        { "layers", ".block_count" }, { "embedding", ".embedding_length" }, { "feed_forward", ".feed_forward_length" },
        { "heads", ".attention.head_count" }, { "kv_heads", ".attention.head_count_kv" },
        { "key_size", ".attention.key_length" }, { "value_size", ".attention.value_length" },
        { "window", ".attention.sliding_window" }, { "context", ".context_length" },
    };
    struct error ignored;
    const struct gguf_str none = { NULL, 0 };
    struct gguf_str arch = none;
    json_t *o = json_object();
    uint64_t parameters = 0;
    json_put(&o, "file", json_text(gguf_path(g), strlen(gguf_path(g))));
    put_count(&o, "gguf_version", (uint64_t)gguf_version(g));
    put_text(&o, "architecture", g, "general.architecture");
    put_text(&o, "name", g, "general.name");
    if (!gguf_get_str(g, "general.architecture", &arch, &ignored)) arch = none;
    for (size_t i = 0; i < sizeof of_arch / sizeof *of_arch; i++)
        put_number(&o, of_arch[i].label, g, arch, of_arch[i].key);
    const struct gguf_value *tokens = gguf_find(g, "tokenizer.ggml.tokens");
    put_text(&o, "tokenizer", g, "tokenizer.ggml.model");
    put_text(&o, "pretokenizer", g, "tokenizer.ggml.pre");
    if (tokens) put_count(&o, "vocabulary", tokens->count);
    put_number(&o, "bos", g, none, "tokenizer.ggml.bos_token_id");
    put_number(&o, "eos", g, none, "tokenizer.ggml.eos_token_id");
    json_put(&o, "chat_template", json_boolean(gguf_find(g, "tokenizer.chat_template") != NULL));
    for (size_t i = 0; i < gguf_tensor_count(g); i++) parameters += elements(gguf_tensor_at(g, i));
    put_count(&o, "tensors", gguf_tensor_count(g));
    put_count(&o, "parameters", parameters);
    put_count(&o, "tensor_bytes", tensor_bytes(g));
    put_count(&o, "file_bytes", gguf_file_bytes(g));
    json_put(&o, "types", types(g));
    return o;
}

/* One line per member: label, value; a line per type of tensor. */
static bool file_lines(struct bytes *out, json_t *object)
{
    const char *label, *type;
    json_t *value, *count;
    char size[32];
    bool ok = true;
    json_object_foreach(object, label, value) {
        if (json_is_object(value)) {
            json_object_foreach(value, type, count) {
                human_bytes((double)count_in(count, "bytes"), size);
                ok = ok && bytes_printf(out, "%-14s  %lld tensors, %s\n", type, count_in(count, "tensors"), size);
            }
            continue;
        }
        ok = ok && bytes_printf(out, "%-14s  ", label);
        if (json_is_string(value)) ok = ok && visible_add(out, json_string_value(value), json_string_length(value));
        else if (json_is_boolean(value)) ok = ok && bytes_printf(out, "%s", json_is_true(value) ? "yes" : "no");
        else ok = ok && bytes_printf(out, "%lld", json_integer_value(value));
        if (strstr(label, "bytes"))
            ok = ok && bytes_printf(out, " (%s)", human_bytes((double)json_integer_value(value), size));
        ok = ok && bytes_add(out, "\n", 1);
    }
    return ok;
}

bool inspect_file(struct bytes *out, const struct gguf *g, bool json, struct error *e)
{
    json_t *object = file_object(g);
    if (json) return json_line(out, object, e);
    bool ok = object && file_lines(out, object);
    json_decref(object);
    return ok || fail(e, GEN_RUN, "cannot allocate memory for the summary");
}

/* ---- a cache file */

/* What a text holds; what is no JSON is `none`. NULL: memory was out. */
static json_t *read_json(const struct bytes *text, json_t *none)
{
    struct error why = { 0 };
    json_t *value = json_read(text->data ? text->data : "", text->len, "it is", &why);
    if (!value && why.code == GEN_USAGE) return none;
    json_decref(none);
    return value;
}

static bool setting_add(struct bytes *out, const json_t *value)
{
    const char *text = json_string_value(value);
    if (text) return visible_add(out, text, strnlen(text, 40));
    return json_number_value(value) ? bytes_printf(out, "%g", json_number_value(value))
                                    : bytes_printf(out, "the model's");
}

bool inspect_settings(struct bytes *out, const struct bytes *theirs, const struct bytes *own)
{
    static const char *const names[][2] = {
        { "backend", "--backend" }, { "isa", "instructions" }, { "type_k", "-ctk" }, { "type_v", "-ctv" },
        { "rope_freq_base", "--rope-freq-base" }, { "rope_scale", "--rope-scale" }, { "kv_heads", "--kv-heads" },
    };
    json_t *a = read_json(theirs, json_object()), *b = read_json(own, json_object());
    bool ok = a && b, any = false;
    for (size_t i = 0; ok && i < sizeof names / sizeof *names; i++) {
        const json_t *there = json_object_get(a, names[i][0]), *here = json_object_get(b, names[i][0]);
        if (!there || json_equal(there, here)) continue;
        ok = bytes_printf(out, "%s%s ", any ? "; " : " (", names[i][1]) && setting_add(out, there)
          && bytes_printf(out, ", now ") && setting_add(out, here);
        any = true;
    }
    json_decref(a);
    json_decref(b);
    return ok && (!any || bytes_add(out, ")", 1));
}

static json_t *cache_object(const char *path, const struct kvstore_text *t)
{
    char model[65];
    json_t *o = json_object(), *chat = read_json(&t->messages, json_array());
    hex_text(t->fingerprint, model);
    json_put(&o, "file", json_text(path, strlen(path)));
    put_count(&o, "file_bytes", t->bytes);
    put_count(&o, "tokens", (uint64_t)t->n_tokens);
    put_count(&o, "blocks", (uint64_t)t->n_blocks);
    json_put(&o, "messages", chat ? json_integer((json_int_t)json_array_size(chat)) : NULL);
    json_put(&o, "model_digest", json_string(model));
    json_put(&o, "settings", read_json(&t->settings, json_object()));
    json_decref(chat);
    return o;
}

static bool cache_lines(struct bytes *out, json_t *object)
{
    const char *label, *setting;
    json_t *value, *of;
    bool ok = true;
    json_object_foreach(object, label, value) {
        ok = ok && bytes_printf(out, "%-14s  ", label);
        if (json_is_string(value)) ok = ok && visible_add(out, json_string_value(value), json_string_length(value));
        else if (json_is_integer(value)) ok = ok && bytes_printf(out, "%lld", json_integer_value(value));
        json_object_foreach(value, setting, of)
            ok = ok && bytes_printf(out, "%s ", setting) && json_add_ascii(out, of) && bytes_add(out, "  ", 2);
        ok = ok && bytes_add(out, "\n", 1);
    }
    return ok;
}

bool inspect_cache(struct bytes *out, const char *path, bool json, struct error *e)
{
    struct error why = { 0 };
    struct kvstore *k = kvstore_file_open(path, KVSTORE_READ, &why);
    bool ok = k && !why.code && kvstore_file_verify(k, &why);
    json_t *object = ok ? cache_object(path, kvstore_file_text(k)) : NULL;
    if (k) k->close(k);
    if (!ok) return fail(e, GEN_MODEL, "%s", why.text);
    if (json) return json_line(out, object, e);
    ok = object && cache_lines(out, object);
    json_decref(object);
    return ok || fail(e, GEN_RUN, "cannot allocate memory for the summary");
}

/* ---- a run */

uint64_t cache_room(const struct model *m, int64_t budget, uint64_t available)
{
    if (budget) return (uint64_t)budget;
    uint64_t room = available - available / 3, weights = tensor_bytes(m->file);
    return room > weights ? room - weights : 0;
}

static bool fits(const struct model *m, struct engine_options o, int64_t ctx, uint64_t room)
{
    struct kv_usage usage;
    struct error ignored;
    o.ctx = ctx;
    return engine_estimate(m, &o, &usage, &ignored) && usage.bytes_reserved <= room;
}

int64_t largest_context(const struct model *m, const struct engine_options *o, int64_t most, uint64_t room)
{
    if (fits(m, *o, most, room)) return most;
    int64_t low = 0, high = most / KV_BLOCK;         /* in blocks: low fits, more than high is not asked for */
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (fits(m, *o, middle * KV_BLOCK, room)) low = middle;
        else high = middle - 1;
    }
    return low * KV_BLOCK;
}

bool finest_types(const struct model *m, struct engine_options *o, bool auto_k, bool auto_v, uint64_t room,
                  struct error *e)
{
    static const enum kv_type steps[] = { KV_F16, KV_INT8, KV_INT4 };
    struct engine_options best = *o, least = *o;
    struct kv_usage usage;
    size_t bytes = SIZE_MAX;
    best.ctx = 0;
    for (int i = 0; i < 5; i++) {
        struct engine_options try = *o;
        if (auto_k) try.type_k = steps[auto_v ? i / 2 : i < 2 ? i : 2];
        if (auto_v) try.type_v = steps[auto_k ? (i + 1) / 2 : i < 2 ? i : 2];
        if (!engine_estimate(m, &try, &usage, e)) return false;
        if (usage.bytes_reserved <= room) return *o = try, true;
        try.ctx = largest_context(m, &try, o->ctx, room);
        if (try.ctx > best.ctx) best = try;
        struct engine_options block = try;
        block.ctx = KV_BLOCK;
        if (!engine_estimate(m, &block, &usage, e)) return false;
        if (usage.bytes_reserved < bytes) bytes = usage.bytes_reserved, least = try;
    }
    *o = best.ctx ? best : least;
    return true;
}

/* What a cache of one pair of types takes. */
struct estimate { enum kv_type k, v; uint64_t formula; struct kv_usage usage; int64_t largest; };

static bool estimate(struct estimate *s, const struct model *m, struct engine_options o, enum kv_type k, enum kv_type v,
                     uint64_t room, struct error *e)
{
    *s = (struct estimate){ .k = k, .v = v };
    o.type_k = k;
    o.type_v = v;
    s->largest = largest_context(m, &o, INT_MAX / KV_BLOCK * KV_BLOCK, room);
    if (!engine_estimate(m, &o, &s->usage, e)) return false;
    s->formula = (uint64_t)s->usage.bytes_per_token * (uint64_t)o.ctx;
    return true;
}

static json_t *run_object(const struct model *m, int64_t ctx, uint64_t available, const struct estimate *s, int n)
{
    json_t *object = json_object(), *cache = json_array();
    put_count(&object, "weight_bytes", tensor_bytes(m->file));
    put_count(&object, "ctx", (uint64_t)ctx);
    put_count(&object, "model_ctx", (uint64_t)m->n_ctx);
    put_count(&object, "memory_available", available);
    for (int i = 0; i < n; i++) {
        json_t *entry = json_pack("{s:s, s:s}", "type_k", kv_type_name(s[i].k), "type_v", kv_type_name(s[i].v));
        put_count(&entry, "bytes_per_token", s[i].usage.bytes_per_token);
        put_count(&entry, "formula_bytes", s[i].formula);
        put_count(&entry, "reserved_bytes", s[i].usage.bytes_reserved);
        put_count(&entry, "largest_ctx", (uint64_t)s[i].largest);
        json_push(&cache, entry);
    }
    json_put(&object, "cache", cache);
    return object;
}

static bool run_lines(struct bytes *out, const struct model *m, int64_t ctx, uint64_t available,
                      const struct estimate *s, int n)
{
    char a[32], b[32];
    bool ok = bytes_printf(out, "weights  %s in %zu tensors\n", human_bytes((double)tensor_bytes(m->file), a),
                           gguf_tensor_count(m->file));
    ok = ok && bytes_printf(out, "memory   %s available\n", human_bytes((double)available, a));
    ok = ok && bytes_printf(out, "context  %lld tokens (the model's: %d)\n", (long long)ctx, m->n_ctx);
    ok = ok && bytes_printf(out, "cache    ");
    if (ok && m->head_k == m->head_v)
        ok = bytes_printf(out, "2 * layers %d * KV heads %d * head size %d * tokens %lld * bytes of type "
                               "with scales\n", m->n_layer, m->n_kv, m->head_k, (long long)ctx);
    else if (ok)
        ok = bytes_printf(out, "layers %d * KV heads %d * (key size %d * its bytes + value size %d * its bytes) "
                               "* tokens %lld\n", m->n_layer, m->n_kv, m->head_k, m->head_v, (long long)ctx);
    for (int i = 0; ok && i < n; i++) {
        human_bytes((double)s[i].formula, a);
        human_bytes((double)s[i].usage.bytes_reserved, b);
        ok = bytes_printf(out, "  -ctk %-4s -ctv %-4s  %llu bytes (%s), reserved %zu (%s); at most %lld tokens fit\n",
                          kv_type_name(s[i].k), kv_type_name(s[i].v), (unsigned long long)s[i].formula, a,
                          s[i].usage.bytes_reserved, b, (long long)s[i].largest);
    }
    return ok;
}

bool inspect_run(struct bytes *out, const struct model *m, const struct engine_options *o, uint64_t room, bool json,
                 struct error *e)
{
    struct estimate s[KV_TYPES + 1];
    struct engine_options asked = *o;
    uint64_t available = memory_available();
    int n = 0;
    if (!asked.ctx) asked.ctx = m->n_ctx;
    for (int k = KV_F32; k < KV_TYPES; k++)
        for (int v = KV_F32; v < KV_TYPES; v++) {
            bool shown = k == v || (k == (int)o->type_k && v == (int)o->type_v);
            if (shown && !estimate(&s[n++], m, asked, k, v, room, e)) return false;
        }
    if (json) return json_line(out, run_object(m, asked.ctx, available, s, n), e);
    return run_lines(out, m, asked.ctx, available, s, n) || fail(e, GEN_RUN, "cannot allocate memory for the summary");
}

/* ---- all tensors */

enum { PIECE = 1 << 16 };              /* weights read at a time; a multiple of every block size */

/* Counts the values of a tensor that are not finite. */
static bool count_bad(const struct gguf *g, const struct gguf_tensor *t, uint8_t *raw, float *values, uint64_t *bad,
                      struct error *e)
{
    const struct type_info *type = type_info(t->type);
    size_t n = elements(t), block = (size_t)type->block, bytes = (size_t)type->bytes;
    for (size_t i = 0; i < n; i += PIECE) {
        size_t count = n - i < PIECE ? n - i : PIECE;
        if (!gguf_read(g, t, i / block * bytes, raw, count / block * bytes, e)) return false;
        type->dequantise(raw, values, count);
        for (size_t k = 0; k < count; k++) *bad += !isfinite(values[k]);
    }
    return true;
}

bool inspect_tensors(struct bytes *out, const struct gguf *g, void (*progress)(const char *what, double done),
                     struct error *e)
{
    struct bytes found = { 0 };
    uint64_t done = 0, all = tensor_bytes(g);
    size_t n = gguf_tensor_count(g), n_bad = 0;
    char size[32];
    uint8_t *raw = alloc_zeroed(PIECE, sizeof(float), "tensor data", e);
    float *values = raw ? alloc_zeroed(PIECE, sizeof(float), "tensor data", e) : NULL;
    bool ok = values != NULL;
    for (size_t i = 0; ok && i < n; i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        uint64_t bad = 0;
        ok = count_bad(g, t, raw, values, &bad, e);
        if (bad && n_bad++ < 5)
            bytes_printf(&found, "%s%.*s (%llu)", n_bad > 1 ? ", " : "", (int)(t->name.len < 70 ? t->name.len : 70),
                         t->name.ptr, (unsigned long long)bad);
        done += t->size;
        if (progress) progress("checking", all ? (double)done / (double)all : 1);
    }
    if (ok && n_bad)
        ok = fail(e, GEN_MODEL, "%s: %zu of %zu tensors hold values that are not finite: %s%s", gguf_path(g), n_bad, n,
                  found.data ? found.data : "", n_bad > 5 ? ", ..." : "");
    else if (ok)
        ok = bytes_printf(out, "%zu tensors, %s: all values are finite\n", n, human_bytes((double)all, size))
          || fail(e, GEN_RUN, "cannot allocate memory for the result");
    bytes_free(&found);
    free(raw);
    free(values);
    return ok;
}
