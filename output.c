/* output.c - streamed text: a Knuth-Morris-Pratt automaton for each stop string keeps time linear in the text. */
#include "output.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <utf8proc.h>

enum { LAST_CHANCE = 500 };            /* milliseconds that a reader has once the run is to stop */
static const volatile int *give_up;

void output_until(const volatile int *stop) { give_up = stop; }

bool output_write(const void *data, size_t n, struct error *e)
{
    const char *p = data;
    while (n) {
        bool stopping = give_up && *give_up;
        struct pollfd room = { .fd = STDOUT_FILENO, .events = POLLOUT };
        if (stopping && poll(&room, 1, LAST_CHANCE) == 0) {
            *e = (struct error){ .code = GEN_OK };
            return false;
        }
        ssize_t done = write(STDOUT_FILENO, p, stopping && n > PIPE_BUF ? PIPE_BUF : n);
        if (done >= 0) {
            p += done;
            n -= (size_t)done;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            struct pollfd ready = { .fd = STDOUT_FILENO, .events = POLLOUT };
            poll(&ready, 1, -1);
        } else if (errno == EPIPE) {
            *e = (struct error){ .code = GEN_OK };
            return false;
        } else if (errno != EINTR) {
            return fail(e, GEN_RUN, "cannot write to standard output: %s", strerror(errno));
        }
    }
    return true;
}

bool visible_add(struct bytes *out, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        bool c1 = c == 0xC2 && i + 1 < n && (unsigned char)text[i + 1] < 0xA0;
        char shown[4] = { '^', (char)(c ^ 0x40) };   /* ESC = 0x1B is ^[, DEL = 0x7F is ^? */
        bool ok;
        if (c1) {
            ok = bytes_add(out, "M-^", 3);
            shown[0] = (char)((unsigned char)text[++i] - 0x40);
            ok = ok && bytes_add(out, shown, 1);
        } else if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7F) {
            ok = bytes_add(out, shown, 2);
        } else {
            ok = bytes_add(out, text + i, 1);
        }
        if (!ok) return false;
    }
    return true;
}

bool escaped_add(struct bytes *out, const char *text, size_t n)
{
    bool ok = true;
    for (size_t i = 0; ok && i < n;) {
        utf8proc_int32_t c = -1;
        utf8proc_ssize_t size = utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(n - i), &c);
        bool plain = size > 0 && c >= 0x20 && !(c >= 0x7F && c < 0xA0) && c != 0x2028 && c != 0x2029;
        if (size < 1) size = 1;
        if (c == '\n') ok = bytes_add(out, "\\n", 2);
        else if (c == '\t') ok = bytes_add(out, "\\t", 2);
        else if (c == '\\') ok = bytes_add(out, "\\\\", 2);
        else if (plain) ok = bytes_add(out, text + i, (size_t)size);
        else for (int k = 0; k < size; k++) ok = ok && bytes_printf(out, "\\x%02X", (unsigned char)text[i + k]);
        i += (size_t)size;
    }
    return ok;
}

/* One stop string. After each byte of the text, `state` is the length of the longest beginning of the stop string that
 * the text ends with. */
struct matcher {
    const char *text;
    size_t len, state;
    size_t *back;                      /* [len] length of the longest proper beginning that text[0..i] ends with */
};

struct stream {
    struct stream_options o;
    struct detok detok;
    struct matcher *matchers;
    size_t n_matchers;
    struct bytes held;                 /* text not let out yet: from the first byte that may begin a stop string */
    struct bytes text;                 /* all that was let out (print = false) */
    struct bytes shown;                /* scratch of the visible form */
    bool ended;                        /* by a stop string */
    char last;                         /* byte let out last, 0 = none */
};

static bool matcher_open(struct matcher *m, const char *text, struct error *e)
{
    size_t n = strlen(text);
    for (size_t i = 0; i < n;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t step = utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(n - i), &c);
        if (step < 1) return fail(e, GEN_USAGE, "--stop '%s' is not UTF-8 text", text);
        i += (size_t)step;
    }
    *m = (struct matcher){ .text = text, .len = n, .back = alloc_zeroed(n, sizeof *m->back, "a stop string", e) };
    if (!m->back) return false;
    for (size_t i = 1, k = 0; i < n; i++) {
        while (k && text[i] != text[k]) k = m->back[k - 1];
        if (text[i] == text[k]) k++;
        m->back[i] = k;
    }
    return true;
}

/* Takes one byte of the text; true when it completes the stop string. */
static bool matcher_step(struct matcher *m, char c)
{
    while (m->state && m->text[m->state] != c) m->state = m->back[m->state - 1];
    if (m->text[m->state] == c) m->state++;
    return m->state == m->len;
}

bool stream_open(struct stream **out, const struct stream_options *o, struct error *e)
{
    struct stream *s = alloc_zeroed(1, sizeof *s, "the output stream", e);
    *out = s;
    if (!s) return false;
    s->o = *o;
    s->matchers = alloc_zeroed(o->stops->len, sizeof *s->matchers, "stop strings", e);
    bool ok = s->matchers != NULL;
    for (size_t i = 0; ok && i < o->stops->len; i++) {
        ok = matcher_open(&s->matchers[i], o->stops->data[i], e);
        if (ok) s->n_matchers++;
    }
    if (ok) return true;
    stream_close(s);
    *out = NULL;
    return false;
}

void stream_close(struct stream *s)
{
    if (!s) return;
    for (size_t i = 0; i < s->n_matchers; i++) free(s->matchers[i].back);
    free(s->matchers);
    bytes_free(&s->held);
    bytes_free(&s->text);
    bytes_free(&s->shown);
    free(s);
}

static bool no_memory(struct error *e) { return fail(e, GEN_RUN, "cannot allocate memory for the generated text"); }

/* Lets out the first n held bytes. */
static bool let_out(struct stream *s, size_t n, struct error *e)
{
    if (!n) return true;
    const char *data = s->held.data;
    size_t size = n;
    s->last = data[n - 1];
    if (s->o.print && s->o.visible) {
        s->shown.len = 0;
        if (!visible_add(&s->shown, data, n)) return no_memory(e);
        data = s->shown.data;
        size = s->shown.len;
    }
    if (s->o.print && !output_write(data, size, e)) return false;
    if (!s->o.print && !bytes_add(&s->text, data, size)) return no_memory(e);
    memmove(s->held.data, s->held.data + n, s->held.len - n);
    s->held.len -= n;
    return true;
}

/* Looks for stop strings in the held bytes from `from` on, and lets out all that cannot begin one. */
static bool advance(struct stream *s, size_t from, bool *stopped, struct error *e)
{
    size_t hold = 0;
    for (size_t i = from; i < s->held.len && !*stopped; i++) {
        size_t longest = 0;            /* of several that end here, the one that begins first */
        for (struct matcher *m = s->matchers; m < s->matchers + s->n_matchers; m++)
            if (matcher_step(m, s->held.data[i]) && m->len > longest) longest = m->len;
        if (longest) {
            s->held.len = i + 1 - longest;
            *stopped = s->ended = true;
        }
    }
    for (size_t k = 0; k < s->n_matchers && !*stopped; k++)
        if (s->matchers[k].state > hold) hold = s->matchers[k].state;
    return let_out(s, s->held.len - hold, e);
}

bool stream_add(struct stream *s, int32_t id, bool *stopped, struct error *e)
{
    size_t from = s->held.len;
    if (!detok_add(s->o.tokenizer, &s->detok, id, s->o.at_start, false, &s->held)) return no_memory(e);
    return advance(s, from, stopped, e);
}

bool stream_end(struct stream *s, struct error *e)
{
    size_t from = s->held.len;
    bool stopped = false;
    if (s->ended) return true;
    if (!detok_end(&s->detok, &s->held)) return no_memory(e);
    return advance(s, from, &stopped, e) && let_out(s, s->held.len, e);
}

const struct bytes *stream_text(const struct stream *s) { return &s->text; }
bool stream_at_line_start(const struct stream *s) { return !s->last || s->last == '\n'; }
