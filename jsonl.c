/* jsonl.c - lines in bounded memory, and requests out of JSON objects. */
#define _GNU_SOURCE
#include "jsonl.h"

#include "json.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <nettle/sha2.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- lines ------------------------------------------------------------------------------------------------------- */

enum { READ_BYTES = 1 << 13 };

struct feed {
    int file;
    const char *path;
    int64_t number;                    /* of the last line */
    uint64_t read, size;               /* bytes; size 0 = no regular file */
    struct bytes text;                 /* what was read and is not handed out */
    size_t begin, searched;            /* where it begins, and up to where it holds no line end */
    struct sha256_ctx hash;            /* of the part of a long line that was thrown away */
    bool skipping, ended;
};

bool feed_open(struct feed **out, const char *path, struct error *e)
{
    struct stat st;
    struct feed *f = alloc_zeroed(1, sizeof *f, "the batch's lines", e);
    *out = f;
    if (!f) return false;
    bool input = strcmp(path, "-") == 0;
    f->path = input ? "standard input" : path;
    f->file = input ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (f->file < 0 || fstat(f->file, &st) != 0 || S_ISDIR(st.st_mode)) {
        fail(e, GEN_USAGE, "cannot read --batch %s: %s", path, f->file >= 0 ? "it is a directory" : strerror(errno));
        feed_close(f);
        *out = NULL;
        return false;
    }
    f->size = S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0;
    sha256_init(&f->hash);
    return true;
}

void feed_close(struct feed *f)
{
    if (!f) return;
    if (f->file > STDIN_FILENO) close(f->file);
    bytes_free(&f->text);
    free(f);
}

double feed_share(const struct feed *f)
{
    double done = (double)(f->read - (f->text.len - f->begin));
    return !f->size ? -1 : done < (double)f->size ? done / (double)f->size : 1;
}

/* Hands out the line of n bytes at the beginning of the text. */
static enum feed_state hand_out(struct feed *f, size_t n, struct line *out)
{
    uint8_t digest[SHA256_DIGEST_SIZE];
    const char *data = f->text.data + f->begin;
    size_t past = f->begin + n + (f->begin + n < f->text.len);
    sha256_update(&f->hash, n, (const uint8_t *)data);
    sha256_digest(&f->hash, sizeof digest, digest);     /* and begins anew */
    hex_text(digest, out->hash);
    if (n && data[n - 1] == '\r') n--;
    out->number = ++f->number;
    out->data = f->skipping || n > LINE_MOST ? NULL : data;
    out->len = n;
    f->skipping = false;
    f->begin = f->searched = past;
    return FEED_LINE;
}

/* Keeps what is not handed out at the front, and of a line that is too long only the hash. */
static void make_room(struct feed *f)
{
    size_t left = f->text.len - f->begin;
    if (left > LINE_MOST) {
        sha256_update(&f->hash, left, (const uint8_t *)f->text.data + f->begin);
        f->skipping = true;
        left = 0;
    }
    if (left) memmove(f->text.data, f->text.data + f->begin, left);
    f->searched = left;
    f->begin = 0;
    f->text.len = left;
    if (f->text.cap > 4 * READ_BYTES && left < READ_BYTES) {      /* after a long line */
        char *data = realloc(f->text.data, 2 * READ_BYTES);
        if (data) f->text.data = data, f->text.cap = 2 * READ_BYTES;
    }
}

/* Reads on. FEED_LINE: there is more. */
static enum feed_state read_on(struct feed *f, int wait_ms, struct error *e)
{
    char buffer[READ_BYTES];
    struct pollfd ready = { .fd = f->file, .events = POLLIN };
    int come = poll(&ready, 1, wait_ms);
    if (come == 0 || (come < 0 && errno == EINTR)) return FEED_NOTHING;
    ssize_t n = read(f->file, buffer, sizeof buffer);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return FEED_NOTHING;
    if (n < 0) return fail(e, GEN_RUN, "cannot read %s: %s", f->path, strerror(errno)), FEED_FAILED;
    f->ended = n == 0;
    bool mark = !f->read && n >= 3 && memcmp(buffer, "\xEF\xBB\xBF", 3) == 0;
    f->read += (size_t)n;
    make_room(f);
    if (!bytes_add(&f->text, buffer + 3 * mark, (size_t)n - 3 * mark))
        return fail(e, GEN_RUN, "cannot allocate memory for line %lld of %s", (long long)f->number + 1, f->path),
               FEED_FAILED;
    return FEED_LINE;
}

enum feed_state feed_next(struct feed *f, int wait_ms, struct line *out, struct error *e)
{
    for (;;) {
        size_t unseen = f->text.len - f->searched;
        const char *end = unseen ? memchr(f->text.data + f->searched, '\n', unseen) : NULL;
        if (end) return hand_out(f, (size_t)(end - f->text.data) - f->begin, out);
        f->searched = f->text.len;
        bool left_over = f->text.len > f->begin || f->skipping;
        if (f->ended) return left_over ? hand_out(f, f->text.len - f->begin, out) : FEED_END;
        enum feed_state state = read_on(f, wait_ms, e);
        if (state != FEED_LINE) return state;
    }
}

/* ---- keys ------------------------------------------------------------------------------------------------------- */

/* Some bytes of every tensor: at its beginning, in its middle and at its end. */
static bool sample_tensors(struct bytes *out, const struct gguf *file, struct error *e)
{
    unsigned char piece[64];
    bool ok = true;
    for (size_t i = 0; ok && i < gguf_tensor_count(file); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(file, i);
        size_t n = t->size < sizeof piece ? t->size : sizeof piece, places[] = { 0, (t->size - n) / 2, t->size - n };
        ok = bytes_add(out, t->name.ptr, t->name.len) && bytes_add(out, &t->type, sizeof t->type)
          && bytes_add(out, t->ne, sizeof t->ne);
        for (int k = 0; ok && k < 3; k++) {
            if (!gguf_read(file, t, places[k], piece, n, e)) return false;
            ok = bytes_add(out, piece, n);
        }
    }
    return ok || fail(e, GEN_RUN, "cannot allocate memory for the model's fingerprint");
}

bool request_base(char base[65], const struct options *o, const char *source, size_t n, const struct gguf *file,
                  struct error *e)
{
    struct bytes all = { 0 };
    bool ok = (options_text(o, &all) && bytes_add(&all, source, n))
           || fail(e, GEN_RUN, "cannot allocate memory for the options");
    ok = ok && sample_tensors(&all, file, e);
    if (ok) sha256_hex(all.data, all.len, base);
    bytes_free(&all);
    return ok;
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

void request_close(struct request *r)
{
    if (!r || --r->refs > 0) return;
    json_decref(r->object);
    options_free(&r->o);
    ids_free(&r->prompt);
    bytes_free(&r->line);
    free(r);
}

/* Sets an option to one value of the line. */
static bool set_value(struct request *r, const struct option_row *row, const json_t *value, struct error *e)
{
    char number[40];
    bool text = row->kind == OPT_TEXTS || row->kind == OPT_BIAS;
    if (row->kind == OPT_FLAG) {
        if (!json_is_boolean(value)) return fail(e, GEN_USAGE, "\"%s\" takes true or false", row->name);
        *(bool *)((char *)&r->o + row->at) = json_is_true(value);
        return true;
    }
    if (json_is_string(value)) {
        if (strlen(json_string_value(value)) != json_string_length(value))
            return fail(e, GEN_USAGE, "\"%s\" holds a zero byte", row->name);
        return options_set(&r->o, row->name, json_string_value(value), e);
    }
    if (text || !json_is_number(value))
        return fail(e, GEN_USAGE, "\"%s\" takes a %s", row->name, text ? "text, or a list of texts" : "number");
    if (json_is_integer(value)) snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
    else snprintf(number, sizeof number, "%.17g", json_real_value(value));
    return options_set(&r->o, row->name, number, e);
}

/* Sets an option of the line: a list replaces what the command line says, like one value. */
static bool set_option(struct request *r, const char *name, const json_t *value, struct error *e)
{
    const struct option_row *row = options_of_line(name, e);
    size_t i;
    json_t *item;
    if (!row) return false;
    if (row->kind == OPT_TEXTS) r->o.stops.len = 0;
    if (row->kind == OPT_BIAS) r->o.sampling.n_bias = 0;
    if (!json_is_array(value) || (row->kind != OPT_TEXTS && row->kind != OPT_BIAS)) return set_value(r, row, value, e);
    json_array_foreach(value, i, item)
        if (!set_value(r, row, item, e)) return false;
    return true;
}

/* What "n" says: another name of "samples", which errors then begin with. */
static bool set_samples(struct request *r, const json_t *value, struct error *e)
{
    struct error why;
    return set_option(r, "samples", value, &why) || fail(e, why.code, "\"n\": %s", why.text);
}

/* The ids of messages, a list or one text of the user's. */
static bool encode_messages(struct request *r, const struct request_context *c, const json_t *list, const char *text,
                            size_t n, struct error *e)
{
    struct conversation *talk;
    const struct ids *ids;
    const char *system = c->options->system;
    if (!c->chat) {
        *e = *c->no_chat;
        return false;
    }
    if (!conversation_open(&talk, c->chat, e)) return false;
    bool ok = list ? chat_check_messages(list, e) && conversation_add_list(talk, list, e)
                   : conversation_add(talk, "user", text, n, e);
    ok = ok && (!system || conversation_add_system(talk, system, "\"messages\"", e));
    ok = ok && conversation_prompt(talk, &ids, e);
    for (size_t i = 0; ok && i < ids->len; i++)
        ok = ids_add(&r->prompt, ids->data[i]) || fail(e, GEN_RUN, "cannot allocate memory for the prompt");
    conversation_close(talk);
    if (ok && r->o.predict == 512 && !options_given(&r->o, "predict")) r->o.predict = -1;
    return ok;
}

static bool encode_text(struct request *r, const struct request_context *c, const char *text, size_t n, struct error *e)
{
    struct span span = { text, n, !r->o.no_parse_special };
    if (c->chats) return encode_messages(r, c, NULL, text, n, e);
    r->at_start = n == 0;
    if (!tokenizer_encode(c->tokenizer, &span, 1, !r->o.no_bos, &r->prompt, e)) return false;
    return r->prompt.len || fail(e, GEN_USAGE, "the prompt %s, and no start token stands in for it",
                                 n ? "has no tokens" : "is empty");
}

/* Takes the members of the line's object. */
static bool read_object(struct request *r, const struct request_context *c, const struct line *line, struct error *e)
{
    const char *name;
    json_t *value, *prompt = NULL, *messages = NULL;
    r->object = json_read(line->data, line->len, "the line is", e);
    if (!r->object) return false;
    if (!json_is_object(r->object)) return fail(e, GEN_USAGE, "the line is no JSON object");
    value = json_object_get(r->object, "custom_id");
    if (value && !json_is_string(value) && !json_is_number(value))
        return fail(e, GEN_USAGE, "\"custom_id\" is neither a text nor a number");
    r->custom_id = value;
    json_object_foreach(r->object, name, value) {
        bool ok = true;
        if (strcmp(name, "prompt") == 0) prompt = value;
        else if (strcmp(name, "messages") == 0) messages = value;
        else if (strcmp(name, "n") == 0) ok = set_samples(r, value, e);
        else if (strcmp(name, "custom_id") != 0) ok = set_option(r, name, value, e);
        if (!ok) return false;
    }
    if (!prompt == !messages) return fail(e, GEN_USAGE, "the line has %s \"prompt\" %s \"messages\"",
                                          prompt ? "both" : "neither", prompt ? "and" : "nor");
    if (messages) return encode_messages(r, c, messages, NULL, 0, e);
    if (!json_is_string(prompt)) return fail(e, GEN_USAGE, "\"prompt\" is no text");
    return encode_text(r, c, json_string_value(prompt), json_string_length(prompt), e);
}

static bool read_line(struct request *r, const struct request_context *c, const struct line *line, struct error *e)
{
    if (!line->data) return fail(e, GEN_USAGE, "the line has more than %d bytes", LINE_MOST);
    if (!(c->plain ? encode_text(r, c, line->data, line->len, e) : read_object(r, c, line, e))) return false;
    if (r->o.seed < 0) r->o.seed = c->seed;
    return true;
}

void request_key(char key[65], const struct request_context *c, const struct line *line)
{
    char both[2 * 64];
    memcpy(both, c->base, 64);
    memcpy(both + 64, line->hash, 64);
    sha256_hex(both, sizeof both, key);
}

bool request_make(struct request **out, const struct request_context *c, const struct line *line, struct error *e)
{
    struct request *r = alloc_zeroed(1, sizeof *r, "a line of the batch", e);
    *out = r;
    if (!r) return false;
    r->number = line->number;
    r->refs = 1;
    request_key(r->key, c, line);
    memcpy(r->hash, line->hash, sizeof r->hash);
    bool ok = !c->keep || !line->data || bytes_add(&r->line, line->data, line->len)
           || fail(e, GEN_RUN, "cannot allocate memory for a line");
    ok = ok && options_copy(&r->o, c->options, e);
    if (!ok || (!read_line(r, c, line, &r->error) && r->error.code == GEN_RUN)) {
        if (ok) *e = r->error;
        request_close(r);
        *out = NULL;
        return false;
    }
    return true;
}
