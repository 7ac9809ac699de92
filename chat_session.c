/* chat_session.c - the loop of a chat: reading messages and commands, streaming replies. */
#define _GNU_SOURCE                    /* memmem, vasprintf */
#include "chat_session.h"
#include "answer.h"
#include "line.h"
#include "output.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct session {
    const struct chat_session *in;
    struct options *options;
    struct conversation *conversation;
    struct sequence *sequence;         /* in->sequence */
    struct lines *lines;
    struct ids tokens;                 /* the last prompt and its reply */
    struct bytes line, message;
    struct bytes ahead;                /* text that /read put before the next message */
    struct texts kept;                 /* words of /set, which the options point to */
    uint64_t replies;
    uint64_t again;                    /* how often the last reply was made again */
    int64_t prompted, reused;          /* tokens of all prompts, and those that were in the cache */
    bool over, slid;                   /* slid: it was told that old tokens are gone */
};

/* Text for the user; control characters are made visible. */
__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
    struct bytes shown = { 0 };
    char *made = NULL;
    va_list args;
    va_start(args, format);
    int n = vasprintf(&made, format, args);
    va_end(args);
    if (n >= 0 && visible_add(&shown, made, (size_t)n)) fprintf(stderr, "%s\n", shown.data ? shown.data : "");
    if (n >= 0) free(made);
    bytes_free(&shown);
}

/* ---- showing a reply --------------------------------------------------------------------------------------------- */

static const char color_reply[] = "\033[36m", color_thinking[] = "\033[0;2m", color_none[] = "\033[0m";
static const char open_tag[] = "<think>", close_tag[] = "</think>";

/* Text on its way to standard output, thinking sections told apart by colour. */
struct display {
    bool color, visible;               /* visible: control characters are shown, not sent */
    bool thinking;
    struct bytes held, shown;
    char last;                         /* byte, 0 = none */
};

static bool put(struct display *d, size_t n, struct error *e)
{
    bool ok = true;
    if (!n) return true;
    d->last = d->held.data[n - 1];
    d->shown.len = 0;
    if (!d->visible) ok = output_write(d->held.data, n, e);
    else if (!visible_add(&d->shown, d->held.data, n)) ok = fail(e, GEN_RUN, "cannot allocate memory for the reply");
    else ok = output_write(d->shown.data, d->shown.len, e);
    memmove(d->held.data, d->held.data + n, d->held.len - n);
    d->held.len -= n;
    return ok;
}

static bool put_color(struct display *d, const char *code, struct error *e)
{
    return !d->color || output_write(code, strlen(code), e);
}

/* The length of the longest end of text that begins the tag. */
static size_t begun_tag(const struct bytes *text, const char *tag)
{
    size_t n = strlen(tag) - 1;
    if (n > text->len) n = text->len;
    while (n && memcmp(text->data + text->len - n, tag, n) != 0) n--;
    return n;
}

static bool display_add(struct display *d, const char *text, size_t n, struct error *e)
{
    if (!bytes_add(&d->held, text, n)) return fail(e, GEN_RUN, "cannot allocate memory for the reply");
    while (d->color) {
        const char *tag = d->thinking ? close_tag : open_tag;
        const char *at = memmem(d->held.data, d->held.len, tag, strlen(tag));
        if (!at) return put(d, d->held.len - begun_tag(&d->held, tag), e);
        bool opens = tag == open_tag;
        bool ok = put(d, (size_t)(at - d->held.data), e) && (!opens || put_color(d, color_thinking, e))
               && put(d, strlen(tag), e) && (opens || put_color(d, color_reply, e));
        if (!ok) return false;
        d->thinking = opens;
    }
    return put(d, d->held.len, e);
}

static bool display_begin(struct display *d, struct error *e)
{
    return put_color(d, d->thinking ? color_thinking : color_reply, e);
}

/* Puts the colours back and ends the line. */
static bool display_end(struct display *d, struct error *e)
{
    struct error later;
    bool ok = put(d, d->held.len, e);
    ok = put_color(d, color_none, ok ? e : &later) && ok;
    if (d->last && d->last != '\n') ok = output_write("\n", 1, ok ? e : &later) && ok;
    bytes_free(&d->held);
    bytes_free(&d->shown);
    return ok;
}

/* ---- replies ----------------------------------------------------------------------------------------------------- */

struct reply {
    struct stream *stream;
    struct display display;
    size_t shown;                      /* bytes of the stream's text that were displayed */
    const char *finish_reason;
    double begun, read, done;          /* times: start, prompt computed, end */
    int64_t reused;
};

static bool show_new(struct reply *r, struct error *e)
{
    const struct bytes *text = stream_text(r->stream);
    size_t from = r->shown;
    r->shown = text->len;
    return text->len == from || display_add(&r->display, text->data + from, text->len - from, e);
}

static bool take(void *user, int32_t id, size_t index, const float *logits, bool *stopped, struct error *e)
{
    struct reply *r = user;
    (void)index;
    (void)logits;
    return stream_add(r->stream, id, stopped, e) && show_new(r, e);
}

/* A chat that slides takes every message that would fit at its beginning, whatever of it is in the cache. */
static bool check_length(const struct session *s, size_t n, struct error *e)
{
    long long ctx = s->in->ctx;
    if ((int64_t)n <= ctx || s->options->window) return true;
    if (!s->in->sinks)
        return fail(e, GEN_USAGE, "the chat would have %zu tokens with this message, but the context holds %lld: "
                                  "shorten the message, or /undo and /clear make room", n, ctx);
    if (!conversation_alone(s->conversation, &n, e)) return false;
    return (int64_t)n <= ctx
        || fail(e, GEN_USAGE, "a chat of this message alone would have %zu tokens, but the context holds %lld: "
                              "shorten the message or the system message", n, ctx);
}

/* The prompt's ids go to s->tokens; refused when they do not fit. */
static bool make_prompt(struct session *s, struct error *e)
{
    const struct ids *ids;
    if (!conversation_prompt(s->conversation, &ids, e) || !check_length(s, ids->len, e)) return false;
    if (!ids->len) return fail(e, GEN_USAGE, "the chat template makes an empty prompt of this message");
    s->tokens.len = 0;
    for (size_t i = 0; i < ids->len; i++)
        if (!ids_add(&s->tokens, ids->data[i])) return fail(e, GEN_RUN, "cannot allocate memory for the prompt");
    return true;
}

/* Does the prompt end inside a thinking section? */
static bool begins_thinking(const struct bytes *prompt)
{
    size_t n = prompt->len, tag = sizeof open_tag - 1;
    while (n && prompt->data[n - 1] == '\n') n--;
    return n >= tag && memcmp(prompt->data + n - tag, open_tag, tag) == 0;
}

static void tell_statistics(const struct session *s, const struct reply *r, size_t n_prompt, int64_t steps)
{
    if (s->options->quiet) return;
    double read = r->read - r->begun, write = r->done - r->read;
    bool dim = s->in->color && isatty(STDERR_FILENO);
    if (dim) fputs("\033[2m", stderr);
    char of[32] = "";                  /* with --window the text has no bound; else, once it is full, it slides */
    int64_t held = (int64_t)s->tokens.len;
    if (!s->options->window) {
        snprintf(of, sizeof of, " of %lld", (long long)s->in->ctx);
        if (held > s->in->ctx) held = s->in->ctx;
    }
    say("%sprompt %zu tokens (%lld cached) at %.1f t/s, generated %zu tokens at %.1f t/s, context %lld%s%s",
        dim ? "" : "gen: ", n_prompt, (long long)r->reused,
        (double)((int64_t)n_prompt - r->reused) / (read > 0 ? read : 1e-9), s->tokens.len - n_prompt,
        (double)steps / (write > 0 ? write : 1e-9), (long long)held, of, r->finish_reason ? "" : "; stopped");
    if (dim) fputs(color_none, stderr);
}

/* Computes the prompt in s->tokens and the reply to it, showing it. */
static bool compute(struct session *s, struct reply *r, struct sampler *sampler, const volatile int *stop,
                    struct error *e)
{
    const struct options *o = s->options;
    size_t n_prompt = s->tokens.len;
    int64_t most = s->in->ctx - s->in->sinks, limit = o->predict;
    if (s->in->sinks && (limit < 0 || limit > most)) limit = most;     /* or it might never end */
    struct answer a = { .sequence = s->sequence, .engine = s->in->engine, .sampler = sampler,
                        .tokenizer = s->in->tokenizer, .limit = limit, .ignore_end = o->ignore_eos,
                        .lookup = o->lookup, .stop = stop, .take = take, .user = r };
    answer_expect(&a);
    r->begun = now_seconds();
    if (!sequence_sync(s->sequence, s->tokens.data, (int64_t)n_prompt, &r->reused, stop, e)) return false;
    s->in->progress("prefill", 1);
    r->read = now_seconds();
    s->prompted += (int64_t)n_prompt;
    s->reused += r->reused;
    if (!answer_reserve(&a, &s->tokens, e) || !display_begin(&r->display, e)) return false;
    struct error later;
    bool ok = answer_run(&a, &s->tokens, e);
    ok = stream_end(r->stream, ok ? e : &later) && ok;
    ok = show_new(r, ok ? e : &later) && ok;
    ok = display_end(&r->display, ok ? e : &later) && ok;
    r->done = now_seconds();
    r->finish_reason = a.finish_reason;
    if (ok) tell_statistics(s, r, n_prompt, a.steps);
    return ok;
}

/* Lets the model reply to the conversation as it stands. *said: the reply was added to it. */
static bool reply(struct session *s, bool *said, struct error *e)
{
    struct sampler_options so = s->options->sampling;
    struct sampler *sampler = NULL;
    struct reply r = { 0 };
    struct stream_options to = { .tokenizer = s->in->tokenizer, .stops = &s->options->stops };
    *said = false;
    so.seed = (uint64_t)s->options->seed + s->again;
    if (!make_prompt(s, e)) return false;
    size_t n_prompt = s->tokens.len;
    r.display = (struct display){ .color = s->in->color, .visible = s->in->terminal,
                                  .thinking = begins_thinking(conversation_text(s->conversation)) };
    bool ok = sampler_open(&sampler, &so, engine_model(s->in->engine)->n_vocab, e) && stream_open(&r.stream, &to, e);
    if (ok) {
        ok = compute(s, &r, sampler, lines_work(s->lines), e);
        lines_rest(s->lines);
    }
    const struct bytes *text = r.stream ? stream_text(r.stream) : NULL;
    *said = ok && (r.finish_reason || s->tokens.len > n_prompt);
    s->replies += *said;
    if (*said)
        ok = conversation_add_reply(s->conversation, s->tokens.data + n_prompt, s->tokens.len - n_prompt,
                                    text->len ? text->data : "", text->len, e);
    if (ok && r.finish_reason && strcmp(r.finish_reason, "context") == 0)
        say("The context of %lld tokens is full, so the reply ends here: /undo takes the last message back, /clear "
            "begins anew, %s gives more room.", (long long)s->in->ctx, s->in->longer);
    if (ok && s->in->sinks && !s->slid && sequence_evicted(s->sequence) > 0) {
        s->slid = true;
        say("The context of %lld tokens is full: from now on the oldest tokens go, but for the first %d with the "
            "system message. /clear begins anew, %s gives more room.", (long long)s->in->ctx, s->in->sinks,
            s->in->longer);
    }
    stream_close(r.stream);
    sampler_close(sampler);
    return ok;
}

/* What a reply may fail with that leaves the session whole: told, and not an error any more. */
static bool forgive(struct error *e)
{
    if (e->code != GEN_USAGE) return false;
    say("gen: %s", e->text);
    *e = (struct error){ 0 };
    return true;
}

/* Adds a message of the user and lets the model reply; taken back when there is no reply. */
static bool turn(struct session *s, const char *text, size_t n, struct error *e)
{
    size_t before = conversation_length(s->conversation);
    bool said;
    s->again = 0;
    if (!conversation_add(s->conversation, "user", text, n, e)) return false;
    bool ok = reply(s, &said, e), stopped = ok && !said && !lines_signal();
    if (!said) conversation_cut(s->conversation, before);
    if (stopped) say("Nothing was said yet, so your message is taken back.");
    return ok || forgive(e);
}

/* ---- commands ---------------------------------------------------------------------------------------------------- */

static bool command_help(struct session *s, const char *arg, struct error *e);

static bool is_role(const struct session *s, size_t i, const char *role)
{
    return i < conversation_length(s->conversation) && strcmp(conversation_role(s->conversation, i), role) == 0;
}

static bool command_clear(struct session *s, const char *arg, struct error *e)
{
    (void)arg;
    (void)e;
    conversation_cut(s->conversation, is_role(s, 0, "system"));
    s->ahead.len = 0;
    say("The conversation is empty%s.", is_role(s, 0, "system") ? " but for the system message" : "");
    return true;
}

static bool command_regen(struct session *s, const char *arg, struct error *e)
{
    size_t n = conversation_length(s->conversation);
    bool said;
    (void)arg;
    if (!n || !is_role(s, n - 1, "assistant")) return say("There is no reply to make again."), true;
    json_t *old = conversation_pop(s->conversation);
    s->again++;
    bool ok = reply(s, &said, e) || forgive(e);
    if (!said) return conversation_push(s->conversation, old, e) && ok;
    json_decref(old);
    return ok;
}

static bool command_undo(struct session *s, const char *arg, struct error *e)
{
    size_t n = conversation_length(s->conversation);
    (void)arg;
    (void)e;
    while (n && !is_role(s, n - 1, "user")) n--;
    if (!n) return say("There is no message to take back."), true;
    conversation_cut(s->conversation, n - 1);
    say("Your last message and its reply are taken back; %zu messages are left.", n - 1);
    return true;
}

static bool command_system(struct session *s, const char *arg, struct error *e)
{
    size_t head = 0;
    if (!conversation_set_system(s->conversation, arg, strlen(arg), e)
        || (s->in->sinks && !conversation_head(s->conversation, &head, e))) return false;
    say(*arg ? "The system message is set." : "The system message is taken away.");
    if ((int64_t)head > s->in->sinks && s->in->sinks)
        say("It ends after %zu tokens, but once the context is full only the first %d stay: -sys TEXT keeps all of "
            "it.", head, s->in->sinks);
    return true;
}

static bool command_read(struct session *s, const char *arg, struct error *e)
{
    size_t before = s->ahead.len;
    if (!*arg) return say("/read needs a file: /read FILE"), true;
    if ((before && !bytes_add(&s->ahead, "\n", 1)) || !s->in->read_file(arg, &s->ahead, e)) {
        s->ahead.len = before;
        return forgive(e);
    }
    say("%zu bytes of %s go before your next message.", s->ahead.len - before, arg);
    return true;
}

static bool command_save(struct session *s, const char *arg, struct error *e)
{
    struct bytes messages = { 0 };
    int64_t cached;
    char note[500] = "";
    if (!*arg) return say("/save needs a file: /save FILE"), true;
    /* The last token of a reply is in the cache only if one came after it. */
    size_t held = (size_t)sequence_length(s->sequence);
    struct ids tokens = { .data = (int32_t *)sequence_tokens(s->sequence), .len = held };
    if (held <= s->tokens.len && (!held || memcmp(tokens.data, s->tokens.data, held * sizeof *tokens.data) == 0))
        tokens = s->tokens;
    bool ok = conversation_json(s->conversation, &messages, e);
    if (ok && !s->in->save(s->in->user, arg, &messages, &tokens, &cached, note, e)) {
        say("gen: %s", e->text);
        *e = (struct error){ 0 };
    } else if (ok) {
        if (*note) say("gen: %s", note);
        say("%zu messages and the cache of %lld of their %zu tokens are in %s.", conversation_length(s->conversation),
            (long long)cached, tokens.len, arg);
    }
    bytes_free(&messages);
    return ok;
}

/* The conversation is that of the file then, or as it was. */
static bool command_load(struct session *s, const char *arg, struct error *e)
{
    struct bytes text = { 0 };
    struct ids tokens = { 0 };
    json_t *messages = NULL;
    struct error why;
    char note[500] = "";
    if (!*arg) return say("/load needs a file: /load FILE"), true;
    bool read = s->in->load(s->in->user, arg, &text, &tokens, note, &why)
             && chat_read_messages(&messages, text.data ? text.data : "", text.len, &why), ok = true;
    if (read) {
        conversation_cut(s->conversation, 0);
        s->ahead.len = 0;
        ok = conversation_add_known(s->conversation, messages, tokens.data, tokens.len, e);
    }
    if (*note) say("gen: %s", note);
    if (!read) say("gen: %s", why.text);
    else if (ok)
        say("%zu messages are loaded; %lld of their %zu tokens are in the cache.", conversation_length(s->conversation),
            (long long)sequence_length(s->sequence), tokens.len);
    chat_free_messages(messages);
    bytes_free(&text);
    ids_free(&tokens);
    return ok;
}

static bool keep_word(struct texts *t, const char *word)
{
    const char **grown = realloc(t->data, (t->len + 1) * sizeof *grown);
    if (!grown) return false;
    t->data = grown;
    t->data[t->len] = strdup(word);
    return t->data[t->len] && ++t->len;
}

/* Only options that a reply depends on can change while the program runs. */
static bool changes(const struct option_row *row)
{
    return row->group == GROUP_SAMPLING || (row->group == GROUP_GENERATION && strcmp(row->name, "ctx-size") != 0);
}

/* The row that the name or letter stands for; *row is NULL for an unknown one. */
static bool find_setting(const char *name, const struct option_row **found, struct error *e)
{
    char display[40];
    *found = NULL;
    for (const struct option_row *row = option_table; row < option_table + n_options; row++) {
        if (strcmp(row->name, name) != 0 && (row->letter != name[0] || name[1])) continue;
        if (!changes(row))
            return fail(e, GEN_USAGE, "%s cannot be changed any more: only options of generation and sampling can",
                        option_display(row, display));
        *found = row;
    }
    return true;
}

/* Beside what the command line does: a flag takes on and off, and an empty text empties a list. */
static bool set_option(struct options *o, const char *name, const char *value, struct error *e)
{
    const struct option_row *row;
    char display[40];
    if (!find_setting(name, &row, e)) return false;
    if (row && row->kind == OPT_FLAG) {
        bool on = !value || strcmp(value, "on") == 0;
        if (!on && strcmp(value, "off") != 0)
            return fail(e, GEN_USAGE, "%s is on or off, not '%s'", option_display(row, display), value);
        *(bool *)((char *)o + row->at) = on;
        return !o->lookup || (!o->evict && !o->no_kv_cache)
            || fail(e, GEN_USAGE, "--lookup and --%s exclude each other", o->evict ? "evict" : "no-kv-cache");
    }
    bool empty = value && !*value;
    if (row && row->kind == OPT_TEXTS && empty) return ((struct texts *)((char *)o + row->at))->len = 0, true;
    if (row && row->kind == OPT_BIAS && empty) return o->sampling.n_bias = 0, true;
    return options_set(o, name, value, e);
}

/* Cuts "name value" or "name=value" in two, a value in quotes without them; NULL = there is none. */
static char *cut_value(char *line)
{
    char *value = line + strcspn(line, " =");
    bool equals = *value == '=';
    if (*value) *value++ = '\0';
    value += strspn(value, " ");
    size_t n = strlen(value);
    if (n < 2 || value[0] != '"' || value[n - 1] != '"') return n || equals ? value : NULL;
    value[n - 1] = '\0';
    return value + 1;
}

static bool show_settings(const struct session *s, struct error *e)
{
    struct bytes line = { 0 };
    bool ok = true;
    for (const struct option_row *row = option_table; ok && row < option_table + n_options; row++) {
        if (!changes(row)) continue;
        line.len = 0;
        ok = option_value(s->options, row, &line) || fail(e, GEN_RUN, "cannot allocate memory for the options");
        if (ok) say("  %-18s %s", row->name, line.data);
    }
    bytes_free(&line);
    say("/set temp 0.5 changes one, /set lookup off a switch, /set stop \"\" empties a list; gen --help sampling tells "
        "what they mean.");
    return ok;
}

static bool command_set(struct session *s, const char *arg, struct error *e)
{
    struct options before = *s->options;
    struct sampler *sampler = NULL;
    if (!*arg) return show_settings(s, e);
    if (!keep_word(&s->kept, arg)) return fail(e, GEN_RUN, "cannot allocate memory for the options");
    char *name = (char *)s->kept.data[s->kept.len - 1], *value = cut_value(name);
    name += strspn(name, "-");
    bool ok = set_option(s->options, name, value, e)
           && (s->options->seed >= 0 || fail(e, GEN_USAGE, "/set seed takes a number from 0 on"))
           && sampler_open(&sampler, &s->options->sampling, engine_model(s->in->engine)->n_vocab, e);
    sampler_close(sampler);
    if (ok) return true;
    before.stops.data = s->options->stops.data;        /* lists may have moved */
    before.sampling.bias = s->options->sampling.bias;
    *s->options = before;
    return forgive(e);
}

static bool command_tokens(struct session *s, const char *arg, struct error *e)
{
    char *end;
    size_t held = (size_t)sequence_length(s->sequence), n = strtoul(arg, &end, 10);
    const int32_t *ids = sequence_tokens(s->sequence);
    struct bytes line = { 0 };
    bool ok = true;
    if (end[strspn(end, " \t")] || *arg == '-') return say("/tokens takes a number of tokens: /tokens 20"), true;
    say("%lld of %lld tokens of context are in use; /tokens N shows the last N.",
        (long long)held - (long long)sequence_evicted(s->sequence), (long long)s->in->ctx);
    for (size_t i = n < held ? held - n : 0; ok && i < held; i++) {
        struct gguf_str text = tokenizer_piece(s->in->tokenizer, ids[i], true);
        line.len = 0;
        ok = (bytes_printf(&line, "%d\t", ids[i]) && escaped_add(&line, text.ptr, text.len))
          || fail(e, GEN_RUN, "cannot allocate memory for the tokens");
        if (ok) say("%s", line.data);
    }
    bytes_free(&line);
    return ok;
}

static bool command_kv(struct session *s, const char *arg, struct error *e)
{
    enum { WIDE = 64 };
    const struct options *o = s->options;
    struct kv_usage kv = engine_kv_usage(s->in->engine);
    double used = (double)(kv.bytes_used - kv.bytes_slow), reserved = (double)kv.bytes_reserved;
    char picture[WIDE + 1] = "";
    (void)arg;
    (void)e;
    for (int i = 0; i < WIDE; i++) picture[i] = i * reserved < used * WIDE ? '#' : '.';
    say("[%s]", picture);
    say("%lld tokens in %d page%s of %lld; %.1f of %.1f MB, %zu bytes a token", (long long)sequence_length(s->sequence),
        kv.pages, kv.pages == 1 ? "" : "s",
        (long long)(o->layout == KV_PAGED ? o->page_size : s->in->ctx), 1e-6 * used, 1e-6 * reserved,
        kv.bytes_per_token);
    say("%lld of the %lld tokens of all prompts were in the cache; %lld tokens are evicted", (long long)s->reused,
        (long long)s->prompted, (long long)sequence_evicted(s->sequence));
    return true;
}

static bool command_quit(struct session *s, const char *arg, struct error *e)
{
    (void)arg;
    (void)e;
    return s->over = true;
}

static const struct command {
    const char *name, *arg, *help;
    bool (*run)(struct session *s, const char *arg, struct error *e);
} commands[] = {
    { "/help", "", "this list", command_help },
    { "/clear", "", "forget the conversation, not the system message", command_clear },
    { "/regen", "", "make the last reply again, with another seed", command_regen },
    { "/undo", "", "take the last message and its reply back", command_undo },
    { "/system", " TEXT", "set the system message; without TEXT take it away", command_system },
    { "/read", " FILE", "put a file's text before the next message", command_read },
    { "/save", " FILE", "keep the conversation and its cache in a file", command_save },
    { "/load", " FILE", "go on with a conversation from a file", command_load },
    { "/set", " [OPTION VALUE]", "change an option of sampling or generation; show them all", command_set },
    { "/tokens", " [N]", "how many tokens are in use; the last N of them", command_tokens },
    { "/kv", "", "a picture of the cache", command_kv },
    { "/quit", "", "end the chat", command_quit },
};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

static bool command_help(struct session *s, const char *arg, struct error *e)
{
    (void)s;
    (void)arg;
    (void)e;
    for (int i = 0; i < N_COMMANDS; i++) {
        int n = (int)(strlen(commands[i].name) + strlen(commands[i].arg));
        say("  %s%s%*s%s", commands[i].name, commands[i].arg, 22 - n, "", commands[i].help);
    }
    say("A message of several lines stands between \"\"\" and \"\"\", or its lines end with \\. A message that begins\n"
        "with a slash needs a space before it. Ctrl-C stops a reply, and at the prompt ends gen, as Ctrl-D does.");
    return true;
}

static bool command(struct session *s, char *line, struct error *e)
{
    size_t n = strcspn(line, " \t");
    char *arg = line + n + strspn(line + n, " \t");
    for (int i = 0; i < N_COMMANDS; i++)
        if (strlen(commands[i].name) == n && memcmp(commands[i].name, line, n) == 0)
            return *arg && !*commands[i].arg ? say("%s takes nothing after it.", commands[i].name), true
                                             : commands[i].run(s, arg, e);
    say("%.*s is no command: /help lists them. A message that begins with a slash needs a space before it.", (int)n,
        line);
    return true;
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

static enum line_end next_line(struct session *s, const char *sign, struct error *e)
{
    return lines_read(s->lines, sign, s->in->color, &s->line, e);
}

static bool ends_with(const struct bytes *b, const char *end)
{
    size_t n = strlen(end);
    return b->len >= n && memcmp(b->data + b->len - n, end, n) == 0;
}

/* The next message or command into s->message: one line, or several that """ or a last \ hold together. */
static enum line_end next_message(struct session *s, struct error *e)
{
    static const char quotes[] = "\"\"\"";
    enum line_end how = next_line(s, "> ", e);
    s->message.len = 0;
    if (how != LINE_READ) return how;
    bool block = s->line.len >= 3 && memcmp(s->line.data, quotes, 3) == 0;
    bool command = s->line.len && s->line.data[0] == '/';
    const char *end = block ? quotes : "\\";
    size_t skip = block ? 3 : 0;
    bool memory = bytes_add(&s->message, s->line.len ? s->line.data + skip : "", s->line.len - skip);
    bool apart = !block || s->message.len;             /* a line end comes before the next line */
    while (memory && !command && how == LINE_READ) {
        bool here = ends_with(&s->message, end);
        if (here) s->message.len -= strlen(end);
        if (block && here && ends_with(&s->message, "\n")) s->message.len--;
        if (block == here) break;
        how = next_line(s, "... ", e);
        if (how == LINE_READ)
            memory = bytes_add(&s->message, "\n", apart) && bytes_add(&s->message, s->line.data, s->line.len);
        apart = true;
    }
    if (memory) memory = bytes_add(&s->message, "", 0);
    if (!memory) return fail(e, GEN_RUN, "cannot allocate memory for the message"), LINE_EOF;
    return how == LINE_EOF && !e->code && s->message.len ? LINE_READ : how;
}

/* One message or command of the user. */
static bool take_message(struct session *s, struct error *e)
{
    struct bytes *m = &s->message;
    if (m->len) lines_remember(s->lines, m->data);
    if (m->len && m->data[0] == '/' && !memchr(m->data, '\n', m->len)) return command(s, m->data, e);
    if (strspn(m->data, " \t\n") == m->len && !s->ahead.len) return true;
    if (s->ahead.len) {
        if (!bytes_add(&s->ahead, "\n", m->len != 0) || !bytes_add(&s->ahead, m->data, m->len))
            return fail(e, GEN_RUN, "cannot allocate memory for the message");
        struct bytes whole = s->ahead;
        s->ahead = (struct bytes){ 0 };
        bool ok = turn(s, whole.data, whole.len, e);
        bytes_free(&whole);
        return ok;
    }
    return turn(s, m->data, m->len, e);
}

static void tell_beginning(const struct session *s)
{
    struct gguf_str name = engine_model(s->in->engine)->name;
    if (s->options->quiet || !lines_editing(s->lines)) return;
    say("%.*s%scontext of %lld tokens. /help lists the commands; Ctrl-C stops a reply, and here ends gen, as Ctrl-D "
        "does.", (int)(name.len < 80 ? name.len : 80), name.len ? name.ptr : "", name.len ? ", " : "",
        (long long)s->in->ctx);
}

/* Messages that were given may end with one of the user. */
static bool reply_to_waiting(struct session *s, struct error *e)
{
    size_t n = conversation_length(s->conversation);
    bool said;
    if (!n || !is_role(s, n - 1, "user")) return true;
    bool ok = reply(s, &said, e);
    if (!said) conversation_cut(s->conversation, n - 1);
    return ok;
}

/* The template must take the messages that are there, followed by one of the user. */
static bool check_messages(struct session *s, struct error *e)
{
    const struct ids *ids;
    size_t n = conversation_length(s->conversation);
    if (!n || is_role(s, n - 1, "user")) return true;
    bool ok = conversation_add(s->conversation, "user", "", 0, e) && conversation_prompt(s->conversation, &ids, e);
    conversation_cut(s->conversation, n);
    return ok;
}

bool chat_session_run(const struct chat_session *o, int *signal, struct error *e)
{
    struct session s = { .in = o, .options = o->options, .conversation = o->conversation, .sequence = o->sequence };
    bool ok = check_messages(&s, e) && lines_open(&s.lines, e);
    *signal = 0;
    if (ok) tell_beginning(&s);
    if (ok && o->first) ok = turn(&s, o->first, o->n_first, e);
    else if (ok) ok = reply_to_waiting(&s, e);
    s.over = o->once && s.replies;
    while (ok && !s.over && !lines_signal()) {
        enum line_end how = next_message(&s, e);
        if (how != LINE_READ) {
            ok = how == LINE_SIGNAL || !e->code;
            break;
        }
        ok = take_message(&s, e);
        s.over |= o->once && s.replies;
    }
    if (s.lines) *signal = lines_signal();
    lines_close(s.lines);
    for (size_t i = 0; i < s.kept.len; i++) free((char *)s.kept.data[i]);
    free(s.kept.data);
    ids_free(&s.tokens);
    bytes_free(&s.line);
    bytes_free(&s.message);
    bytes_free(&s.ahead);
    return ok;
}
