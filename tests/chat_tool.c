/* chat_tool.c - conversations for the Python tests: chat_tool MODEL [TEMPLATE], the template a built-in's name or Jinja
 * source, else the model's. Reads operations from stdin, one JSON array a line, and answers each with a JSON line:
 *
 *   ["add", ROLE, TEXT], ["messages", JSON TEXT], ["system", TEXT], ["cut", N]     null
 *   ["prompt"]                                                                     {"text": ..., "ids": [...]}
 *   ["reply", [IDS], TEXT]    without TEXT the text is the one that the ids make     the text
 *
 * What fails is answered with {"error": ..., "code": ...}. */
#include "chat.h"
#include "json.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static json_t *prompt(struct conversation *c, struct error *e)
{
    const struct ids *ids;
    if (!conversation_prompt(c, &ids, e)) return NULL;
    json_t *list = json_array();
    for (size_t i = 0; i < ids->len; i++) json_array_append_new(list, json_integer(ids->data[i]));
    const struct bytes *text = conversation_text(c);
    return json_pack("{s:o, s:o}", "text", json_text(text->data, text->len), "ids", list);
}

static json_t *reply(struct conversation *c, const struct tokenizer *t, const json_t *op, struct error *e)
{
    struct ids ids = { 0 };
    struct bytes made = { 0 };
    struct detok d = { 0 };
    const json_t *id, *given = json_array_get(op, 2);
    size_t i;
    json_array_foreach(json_array_get(op, 1), i, id) {
        ids_add(&ids, (int32_t)json_integer_value(id));
        detok_add(t, &d, (int32_t)json_integer_value(id), false, false, &made);
    }
    detok_end(&d, &made);
    const char *text = given ? json_string_value(given) : made.len ? made.data : "";
    bool ok = conversation_add_reply(c, ids.data, ids.len, text, strlen(text), e);
    json_t *out = ok ? json_string(text) : NULL;
    ids_free(&ids);
    bytes_free(&made);
    return out;
}

static json_t *answer(struct conversation *c, const struct tokenizer *t, const json_t *op, struct error *e)
{
    const char *what = json_string_value(json_array_get(op, 0)), *a = json_string_value(json_array_get(op, 1));
    const json_t *text = json_array_get(op, json_array_size(op) - 1);
    size_t n = json_string_length(text);
    json_t *list = NULL;
    bool ok = true;
    if (!what) return json_string("an operation has a name");
    if (strcmp(what, "prompt") == 0) return prompt(c, e);
    if (strcmp(what, "reply") == 0) return reply(c, t, op, e);
    if (strcmp(what, "add") == 0) ok = conversation_add(c, a, json_string_value(text), n, e);
    else if (strcmp(what, "system") == 0) ok = conversation_set_system(c, a, n, e);
    else if (strcmp(what, "cut") == 0) conversation_cut(c, (size_t)json_integer_value(text));
    else if (strcmp(what, "messages") == 0)
        ok = chat_read_messages(&list, a, n, e) && conversation_add_list(c, list, e);
    json_decref(list);
    return ok ? json_null() : NULL;
}

int main(int argc, char **argv)
{
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    struct chat *chat = NULL;
    struct conversation *c = NULL;
    struct gguf_str source = { NULL, 0 };
    struct error e = { 0 };
    char note[200], *line = NULL;
    size_t cap = 0;
    bool ok = argc > 1 && gguf_open(&g, argv[1], true, &e) && tokenizer_open(&t, g, note, &e);
    if (ok && argc > 2) {
        source.ptr = chat_builtin(argv[2]) ? chat_builtin(argv[2]) : argv[2];
        source.len = strlen(source.ptr);
    } else {
        ok = ok && chat_model_template(g, &source, &e);
    }
    struct chat_options o = { source.ptr, source.len, false, 1721999999 };
    ok = ok && chat_open(&chat, t, &o, &e) && conversation_open(&c, chat, &e);
    for (ssize_t n; ok && (n = getline(&line, &cap, stdin)) > 0;) {
        json_t *op = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, NULL), *out = answer(c, t, op, &e);
        if (!out) out = json_pack("{s:s, s:i}", "error", e.text, "code", e.code);
        json_dumpf(out, stdout, JSON_COMPACT | JSON_ENCODE_ANY);
        putchar('\n');
        json_decref(op);
        json_decref(out);
    }
    if (!ok) fprintf(stderr, "chat_tool: %s\n", e.text);
    free(line);
    conversation_close(c);
    chat_close(chat);
    tokenizer_close(t);
    if (g) gguf_close(g);
    return ok ? GEN_OK : e.code ? e.code : GEN_USAGE;
}
