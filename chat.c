/* chat.c - chat templates and conversations. */
#define _GNU_SOURCE                    /* memmem */
#include "chat.h"
#include "json.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* ---- templates --------------------------------------------------------------------------------------------------- */

/* For formats without a system turn: the system message goes into the first message of the user. */
#define SPLIT_SYSTEM \
    "{%- if messages and messages[0].role == 'system' %}" \
    "{% set system, messages = messages[0].content, messages[1:] %}{% else %}{% set system = '' %}{% endif -%}"

static const struct builtin { const char *name, *source; } builtins[] = {
    { "chatml",
      "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}" },
    { "llama2",
      SPLIT_SYSTEM
      "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}"
      "{% if loop.first and system %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}"
      "{{ m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}" },
    { "llama3",
      "{{ bos_token }}{% for m in messages %}"
      "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}" },
    { "gemma",
      SPLIT_SYSTEM
      "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' }}"
      "{{ 'model' if m.role == 'assistant' else m.role }}{{ '\\n' }}"
      "{% if loop.first and system %}{{ system + '\\n\\n' }}{% endif %}{{ m.content | trim + '<end_of_turn>\\n' }}"
      "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}" },
    { "phi3",
      "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}" },
    { "mistral",
      SPLIT_SYSTEM
      "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' }}"
      "{% if loop.first and system %}{{ system + '\\n\\n' }}{% endif %}{{ m.content + '[/INST]' }}"
      "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}" },
};
enum { N_BUILTINS = sizeof builtins / sizeof *builtins };

const char *chat_builtin(const char *name)
{
    for (int i = 0; i < N_BUILTINS; i++)
        if (strcmp(builtins[i].name, name) == 0) return builtins[i].source;
    return NULL;
}

const char *chat_builtin_names(void) { return "chatml, llama2, llama3, gemma, phi3, mistral"; }

bool chat_model_template(const struct gguf *g, struct gguf_str *source, struct error *e)
{
    *source = (struct gguf_str){ NULL, 0 };
    if (!gguf_get_str(g, "tokenizer.chat_template", source, e)) return false;
    if (!source->len) source->ptr = NULL;
    return true;
}

struct chat {
    const struct tokenizer *tokenizer;
    struct jinja *template;
    json_t *own;                       /* variables of the program */
    time_t now;
};

/* Adds the text of a token as a variable; a token that the model lacks stays undefined. */
static bool add_token(json_t *own, const char *name, const struct tokenizer *t, int id)
{
    struct gguf_str text = id >= 0 ? tokenizer_text(t, id) : (struct gguf_str){ NULL, 0 };
    return id < 0 || json_object_set_new(own, name, json_text(text.ptr, text.len)) == 0;
}

static bool contains(const struct chat_options *o, const char *word)
{
    return memmem(o->source, o->n, word, strlen(word)) != NULL;
}

bool chat_open(struct chat **out, const struct tokenizer *t, const struct chat_options *o, struct error *e)
{
    bool has_switch = contains(o, "enable_thinking");
    *out = NULL;
    if (o->no_think && !has_switch && contains(o, "<think>"))
        return fail(e, GEN_USAGE, "--no-think is not possible: the chat template makes the model think and knows no "
                                  "enable_thinking that turns it off");
    struct chat *c = alloc_zeroed(1, sizeof *c, "the chat", e);
    if (!c) return false;
    c->tokenizer = t;
    c->now = o->now;
    c->own = json_pack("{s:b}", "add_generation_prompt", 1);
    bool ok = c->own && add_token(c->own, "bos_token", t, tokenizer_bos(t))
           && add_token(c->own, "eos_token", t, tokenizer_eos(t))
           && (!o->no_think || !has_switch || json_object_set_new(c->own, "enable_thinking", json_false()) == 0);
    ok = ok ? jinja_parse(&c->template, o->source, o->n, e) : fail(e, GEN_RUN, "cannot allocate memory for the chat");
    if (ok) *out = c;
    else chat_close(c);
    return ok;
}

void chat_close(struct chat *c)
{
    if (!c) return;
    jinja_free(c->template);
    json_decref(c->own);
    free(c);
}

/* ---- messages ---------------------------------------------------------------------------------------------------- */

bool chat_check_messages(const json_t *value, struct error *e)
{
    json_t *message;
    size_t i;
    if (!json_is_array(value) || json_array_size(value) == 0)
        return fail(e, GEN_USAGE, "the messages are no JSON array of objects with \"role\" and \"content\"");
    json_array_foreach(value, i, message)
        if (!json_is_string(json_object_get(message, "role")) || !json_is_string(json_object_get(message, "content")))
            return fail(e, GEN_USAGE, "message %zu is no object whose \"role\" and \"content\" are strings", i + 1);
    return true;
}

bool chat_read_messages(struct json_t **out, const char *text, size_t n, struct error *e)
{
    json_t *list = json_read(text, n, "the messages are", e);
    *out = NULL;
    if (!list) return false;
    if (chat_check_messages(list, e)) return *out = list, true;
    json_decref(list);
    return false;
}

void chat_free_messages(struct json_t *messages) { json_decref(messages); }

/* A text as it was rendered: each byte with its trust, since two renderings may differ in that alone. */
struct rendered {
    struct bytes text;
    struct bytes trust;                /* [text.len] 1 = the template's */
};

/* Where a reply ends, in the rendered text and in the ids. */
struct mark { size_t text, ids; };

struct conversation {
    const struct chat *chat;
    json_t *messages;
    struct rendered last;              /* the last prompt, and after it the reply */
    struct ids ids;                    /* what stands for it */
    struct mark *marks;                /* ends of the replies whose ids are the generated ones; rising */
    size_t n_marks, cap_marks;
};

static bool no_memory(struct error *e) { return fail(e, GEN_RUN, "cannot allocate memory for the conversation"); }

bool conversation_open(struct conversation **out, const struct chat *chat, struct error *e)
{
    struct conversation *c = alloc_zeroed(1, sizeof *c, "a conversation", e);
    *out = NULL;
    if (!c) return false;
    c->chat = chat;
    c->messages = json_array();
    if (!c->messages) return conversation_close(c), no_memory(e);
    *out = c;
    return true;
}

void conversation_close(struct conversation *c)
{
    if (!c) return;
    json_decref(c->messages);
    bytes_free(&c->last.text);
    bytes_free(&c->last.trust);
    ids_free(&c->ids);
    free(c->marks);
    free(c);
}

size_t conversation_length(const struct conversation *c) { return json_array_size(c->messages); }
const struct bytes *conversation_text(const struct conversation *c) { return &c->last.text; }

const char *conversation_role(const struct conversation *c, size_t i)
{
    const char *role = json_string_value(json_object_get(json_array_get(c->messages, i), "role"));
    return role ? role : "";
}

static json_t *new_message(const char *role, const char *text, size_t n)
{
    return json_pack("{s:s, s:o}", "role", role, "content", json_text(text, n));
}

bool conversation_add(struct conversation *c, const char *role, const char *text, size_t n, struct error *e)
{
    return conversation_push(c, new_message(role, text, n), e);
}

bool conversation_add_list(struct conversation *c, const struct json_t *messages, struct error *e)
{
    return json_array_extend(c->messages, (json_t *)messages) == 0 || no_memory(e);
}

bool conversation_set_system(struct conversation *c, const char *text, size_t n, struct error *e)
{
    bool there = conversation_length(c) && strcmp(conversation_role(c, 0), "system") == 0;
    if (!n) return !there || json_array_remove(c->messages, 0) == 0;
    json_t *message = new_message("system", text, n);
    int failed = there ? json_array_set_new(c->messages, 0, message) : json_array_insert_new(c->messages, 0, message);
    return failed == 0 || no_memory(e);
}

bool conversation_add_system(struct conversation *c, const char *text, const char *other, struct error *e)
{
    if (conversation_length(c) && strcmp(conversation_role(c, 0), "system") == 0)
        return fail(e, GEN_USAGE, "-sys and the first of %s both give a system message: leave one out", other);
    return conversation_set_system(c, text, strlen(text), e);
}

void conversation_cut(struct conversation *c, size_t i)
{
    for (size_t n = conversation_length(c); n > i; n--) json_array_remove(c->messages, n - 1);
}

struct json_t *conversation_pop(struct conversation *c)
{
    size_t n = conversation_length(c);
    json_t *last = n ? json_incref(json_array_get(c->messages, n - 1)) : NULL;
    if (n) json_array_remove(c->messages, n - 1);
    return last;
}

bool conversation_push(struct conversation *c, struct json_t *message, struct error *e)
{
    return json_array_append_new(c->messages, message) == 0 || no_memory(e);
}

/* ---- prompts ----------------------------------------------------------------------------------------------------- */

static void rendered_free(struct rendered *r)
{
    bytes_free(&r->text);
    bytes_free(&r->trust);
}

static bool render(const struct conversation *c, struct rendered *out, struct error *e)
{
    struct jinja_result r = { 0 };
    json_t *data = json_pack("{s:O}", "messages", c->messages);
    bool ok = data ? jinja_render(c->chat->template, data, c->chat->own, c->chat->now, &r, e) : no_memory(e);
    json_decref(data);
    *out = (struct rendered){ { 0 }, { 0 } };
    if (!ok) return false;
    ok = bytes_add(&out->text, r.text.data, r.text.len) && bytes_add(&out->trust, r.text.data, r.text.len);
    for (size_t i = 0, at = 0; ok && i < r.n_spans; at += r.spans[i++].len)
        memset(out->trust.data + at, r.spans[i].trusted, r.spans[i].len);
    jinja_result_free(&r);
    if (!ok) rendered_free(out);
    return ok || no_memory(e);
}

/* Encodes the first n bytes, from the start of a sequence. */
static bool encode(const struct conversation *c, const struct rendered *r, size_t n, struct ids *out, struct error *e)
{
    struct span *spans = NULL;
    size_t n_spans = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass && !(spans = alloc_zeroed(n_spans, sizeof *spans, "the prompt", e))) return false;
        n_spans = 0;
        for (size_t i = 0, end; i < n; i = end) {
            char trust = r->trust.data[i];
            const char *change = memchr(r->trust.data + i, !trust, n - i);
            end = change ? (size_t)(change - r->trust.data) : n;
            if (pass) spans[n_spans] = (struct span){ r->text.data + i, end - i, trust };
            n_spans++;
        }
    }
    bool ok = tokenizer_encode(c->chat->tokenizer, spans, n_spans, true, out, e);
    free(spans);
    return ok;
}

static bool begins_with(const struct rendered *r, const struct rendered *with, size_t n)
{
    return n <= r->text.len && n <= with->text.len && memcmp(r->text.data, with->text.data, n) == 0
        && memcmp(r->trust.data, with->trust.data, n) == 0;
}

/* Joins the ids up to mark m with what a plain encoding has after its text. *joined = false where a token of the plain
 * encoding lies across the mark. */
static bool join(const struct conversation *c, const struct rendered *r, struct mark m, struct ids *plain, bool *joined,
                 struct error *e)
{
    struct ids before = { 0 }, out = { 0 };
    if (!encode(c, r, m.text, &before, e)) return false;
    bool ok = true;
    *joined = before.len <= plain->len
           && (!before.len || memcmp(before.data, plain->data, before.len * sizeof *plain->data) == 0);
    for (size_t i = 0; ok && *joined && i < m.ids; i++) ok = ids_add(&out, c->ids.data[i]);
    for (size_t i = before.len; ok && *joined && i < plain->len; i++) ok = ids_add(&out, plain->data[i]);
    ids_free(&before);
    if (!ok || !*joined) return ids_free(&out), ok || no_memory(e);
    ids_free(plain);
    *plain = out;
    return true;
}

bool conversation_prompt(struct conversation *c, const struct ids **out, struct error *e)
{
    struct rendered now;
    struct ids ids = { 0 };
    bool joined = false;
    size_t n = c->n_marks;
    if (!render(c, &now, e)) return false;
    while (n && !begins_with(&now, &c->last, c->marks[n - 1].text)) n--;
    bool ok = encode(c, &now, now.text.len, &ids, e) && (!n || join(c, &now, c->marks[n - 1], &ids, &joined, e));
    if (!ok) {
        ids_free(&ids);
        rendered_free(&now);
        return false;
    }
    rendered_free(&c->last);
    ids_free(&c->ids);
    c->last = now;
    c->ids = ids;
    c->n_marks = joined ? n : 0;
    *out = &c->ids;
    return true;
}

/* How many of the ids make exactly this text, as many as do; SIZE_MAX when none do. */
static size_t ids_of_text(const struct tokenizer *t, const int32_t *ids, size_t n_ids, const char *text, size_t n)
{
    struct bytes made = { 0 };
    struct detok d = { 0 };
    size_t i, kept = n ? SIZE_MAX : 0;
    for (i = 0; i < n_ids && made.len <= n && detok_add(t, &d, ids[i], false, false, &made); i++)
        if (made.len == n && !d.n_held && (!n || memcmp(made.data, text, n) == 0)) kept = i + 1;
    if (i == n_ids && d.n_held && detok_end(&d, &made) && made.len == n && memcmp(made.data, text, n) == 0) kept = i;
    bytes_free(&made);
    return kept;
}

static bool add_mark(struct conversation *c, struct mark m)
{
    if (c->n_marks == c->cap_marks) {
        size_t cap = c->cap_marks ? c->cap_marks * 2 : 16;
        struct mark *grown = realloc(c->marks, cap * sizeof *grown);
        if (!grown) return false;
        c->marks = grown;
        c->cap_marks = cap;
    }
    c->marks[c->n_marks++] = m;
    return true;
}

bool conversation_add_reply(struct conversation *c, const int32_t *ids, size_t n_ids, const char *text, size_t n,
                            struct error *e)
{
    size_t kept = ids_of_text(c->chat->tokenizer, ids, n_ids, text, n);
    if (!conversation_add(c, "assistant", text, n, e)) return false;
    if (kept == SIZE_MAX) return true;
    size_t trust = c->last.trust.len;
    bool ok = bytes_add(&c->last.text, text, n) && bytes_add(&c->last.trust, text, n);
    if (ok && n) memset(c->last.trust.data + trust, 0, n);
    for (size_t i = 0; ok && i < kept; i++) ok = ids_add(&c->ids, ids[i]);
    return (ok && add_mark(c, (struct mark){ c->last.text.len, c->ids.len })) || no_memory(e);
}

bool conversation_json(const struct conversation *c, struct bytes *out, struct error *e)
{
    return json_add(out, c->messages, e);
}

/* Adds a reply whose ids stand in `tokens` behind those of the prompt that asks for it. False when they do not, or when
 * there is no such prompt. */
static bool add_known_reply(struct conversation *c, const json_t *reply, const int32_t *tokens, size_t n)
{
    struct error ignored;
    const struct ids *prompt;
    const json_t *text = json_object_get(reply, "content");
    if (!conversation_prompt(c, &prompt, &ignored) || prompt->len > n) return false;
    if (memcmp(prompt->data, tokens, prompt->len * sizeof *tokens) != 0) return false;
    size_t begin = prompt->len, end = begin, before = conversation_length(c);
    while (end < n && !tokenizer_is_end(c->chat->tokenizer, tokens[end])) end++;
    bool ok = conversation_add_reply(c, tokens + begin, end - begin, json_string_value(text), json_string_length(text),
                                     &ignored);
    if (!ok) conversation_cut(c, before);
    return ok;
}

bool conversation_add_known(struct conversation *c, const struct json_t *messages, const int32_t *tokens, size_t n,
                            struct error *e)
{
    size_t i;
    json_t *m;
    json_array_foreach((json_t *)messages, i, m) {
        const char *role = json_string_value(json_object_get(m, "role"));
        bool plain = json_object_size(m) == 2 && role && strcmp(role, "assistant") == 0;
        if (plain && add_known_reply(c, m, tokens, n)) continue;
        if (!conversation_push(c, json_incref(m), e)) return false;
    }
    return true;
}

/* A conversation of the system message of `c`, if there is one, and a message (which is taken over). */
static bool open_short(struct conversation **out, const struct conversation *c, json_t *message, struct error *e)
{
    bool system = conversation_length(c) && strcmp(conversation_role(c, 0), "system") == 0;
    if (conversation_open(out, c->chat, e)
        && (!system || conversation_push(*out, json_incref(json_array_get(c->messages, 0)), e)))
        return conversation_push(*out, message, e);
    json_decref(message);
    return false;
}

bool conversation_head(const struct conversation *c, size_t *n, struct error *e)
{
    struct conversation *two[2] = { NULL, NULL };
    const struct ids *ids[2];
    bool ok = true, told = true;
    struct error why;
    *n = 0;
    for (int i = 0; i < 2 && ok; i++) {
        ok = open_short(&two[i], c, new_message("user", i ? "b" : "a", 1), e);
        told = ok && told && conversation_prompt(two[i], &ids[i], &why);
    }
    if (ok && told)
        while (*n < ids[0]->len && *n < ids[1]->len && ids[0]->data[*n] == ids[1]->data[*n]) ++*n;
    conversation_close(two[0]);
    conversation_close(two[1]);
    return ok;
}

bool conversation_alone(const struct conversation *c, size_t *n, struct error *e)
{
    struct conversation *alone = NULL;
    const struct ids *ids;
    json_t *last = json_array_get(c->messages, conversation_length(c) - 1);
    bool ok = open_short(&alone, c, json_incref(last), e) && conversation_prompt(alone, &ids, e);
    if (ok) *n = ids->len;
    conversation_close(alone);
    return ok;
}
