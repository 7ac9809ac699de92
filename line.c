/* line.c - reading lines, and the signals that may come meanwhile. All input goes through one buffer and one poll,
 * which also waits for a pipe that the signal handler writes to: no signal is missed, whichever thread gets it. */
#define _GNU_SOURCE                    /* pipe2, memmem */
#include "line.h"
#include "utf8.h"

#include <errno.h>
#include <fcntl.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <utf8proc.h>
#include <wchar.h>

#define MOST_LINE ((size_t)1 << 30)    /* bytes */
enum { END_OF_INPUT = -1, BY_SIGNAL = -2, FAILED = -3 };

/* ---- signals ----------------------------------------------------------------------------------------------------- */

static const int caught[] = { SIGINT, SIGTERM, SIGHUP, SIGWINCH, SIGCONT };
enum { N_CAUGHT = sizeof caught / sizeof *caught };

static struct {
    volatile sig_atomic_t ending, working, keeps, redraw;
    volatile int stop;
    int wake[2];                       /* a pipe; the handler writes to [1] */
    struct sigaction before[N_CAUGHT];
} signals = { .wake = { -1, -1 } };

static void on_signal(int number)
{
    int reason = errno;
    if (number == SIGWINCH || number == SIGCONT) {
        signals.redraw = number;
    } else if (signals.ending) {       /* asked twice: now */
        signal(number, SIG_DFL);
        raise(number);
    } else if (number == SIGINT && signals.working && signals.keeps && !signals.stop) {
        signals.stop = 1;
    } else {
        signals.ending = number;
        signals.stop = 1;
    }
    if (write(signals.wake[1], "", 1) < 0) { }         /* a full pipe wakes as well */
    errno = reason;
}

const volatile int *lines_work(struct lines *l)
{
    signals.keeps = lines_editing(l);
    if (!signals.ending) signals.stop = 0;
    signals.working = 1;
    return &signals.stop;
}

void lines_rest(struct lines *l)
{
    (void)l;
    signals.working = 0;
}

int lines_signal(void) { return signals.ending; }

/* ---- bytes ------------------------------------------------------------------------------------------------------- */

struct lines {
    EditLine *editor;                  /* NULL: plain reading */
    History *history;
    FILE *screen;
    bool pastes;                       /* the terminal can mark what is pasted */
    char sign[40];                     /* what stands before the line; a colour between \1 */
    bool begun;                        /* the first line was read */
    size_t at, len;                    /* the unread part of buffer */
    char buffer[1 << 16];
};

bool lines_editing(const struct lines *l) { return l->editor != NULL; }

/* The window has another size, or the program was stopped and its terminal is no longer set up for editing. */
static void redraw(struct lines *l)
{
    int number = signals.redraw;
    signals.redraw = 0;
    if (!l->editor || !number) return;
    if (number == SIGCONT) {
        el_set(l->editor, EL_PREP_TERM, 0);
        el_set(l->editor, EL_PREP_TERM, 1);
    }
    el_resize(l->editor);
    el_set(l->editor, EL_REFRESH);
}

/* Waits until the buffer is not empty; 1, or one of the negative values. */
static int fill(struct lines *l)
{
    char many[64];
    while (l->at == l->len) {
        struct pollfd files[] = { { STDIN_FILENO, POLLIN, 0 }, { signals.wake[0], POLLIN, 0 } };
        if (signals.ending) return BY_SIGNAL;
        if (poll(files, 2, -1) < 0 && errno != EINTR) return FAILED;
        if (files[1].revents && read(signals.wake[0], many, sizeof many) > 0) redraw(l);
        if (!files[0].revents) continue;
        ssize_t n = read(STDIN_FILENO, l->buffer, sizeof l->buffer);
        if (n == 0 || (n < 0 && errno == EIO)) return END_OF_INPUT;    /* EIO: the terminal has gone */
        if (n < 0 && errno != EINTR && errno != EAGAIN) return FAILED;
        l->at = 0;
        l->len = n > 0 ? (size_t)n : 0;
    }
    return 1;
}

static int next_byte(struct lines *l)
{
    int there = fill(l);
    return there < 0 ? there : (unsigned char)l->buffer[l->at++];
}

/* ---- the editor -------------------------------------------------------------------------------------------------- */

static struct lines *lines_of(EditLine *editor)
{
    void *l = NULL;
    el_get(editor, EL_CLIENTDATA, &l);
    return l;
}

static char *sign_of(EditLine *editor) { return lines_of(editor)->sign; }

/* The editor's next character: 1, 0 at the end of input, -1 when something else ends the line. */
static int get_character(EditLine *editor, wchar_t *out)
{
    struct lines *l = lines_of(editor);
    char text[4];
    for (int n = 0;;) {
        int byte = next_byte(l), step = -1;
        utf8proc_int32_t c = 0xFFFD;
        if (byte < 0 && n == 0) return byte == END_OF_INPUT ? 0 : -1;
        if (byte >= 0) {
            text[n++] = (char)byte;
            step = utf8_step(text, (size_t)n);
            if (step < 0 && n > 1) l->at--;            /* it begins something else */
            if (step > 0) utf8proc_iterate((const utf8proc_uint8_t *)text, n, &c);
        }
        if (step == 0) continue;
        *out = (wchar_t)c;
        return 1;
    }
}

/* Makes UTF-8 text with plain line ends of what was pasted. */
static bool clean(const char *text, size_t n, struct bytes *out)
{
    bool ok = true;
    for (size_t i = 0; ok && i < n;) {
        int step = utf8_step(text + i, n - i);
        bool line_end = text[i] == '\r';
        if (step <= 0) ok = bytes_add(out, "\xEF\xBF\xBD", 3);
        else if (line_end) ok = i + 1 < n && text[i + 1] == '\n' ? true : bytes_add(out, "\n", 1);
        else if (text[i]) ok = bytes_add(out, text + i, (size_t)step);
        i += step > 0 ? (size_t)step : step < 0 ? (size_t)-step : n - i;
    }
    return ok;
}

/* Bound to what the terminal sends before pasted text: inserts all of it at once, line ends too. */
static unsigned char paste(EditLine *editor, int c)
{
    static const char end[] = "\033[201~";
    const size_t n = sizeof end - 1;
    struct lines *l = lines_of(editor);
    struct bytes raw = { 0 }, text = { 0 };
    bool ok = true, done = false;
    (void)c;
    while (ok && !done && raw.len < MOST_LINE) {
        int byte = next_byte(l);
        char b = (char)byte;
        ok = byte >= 0 && bytes_add(&raw, &b, 1);
        done = ok && raw.len >= n && memcmp(raw.data + raw.len - n, end, n) == 0;
    }
    if (done) raw.len -= n;
    ok = ok && clean(raw.data, raw.len, &text) && (!text.len || el_insertstr(editor, text.data) == 0);
    bytes_free(&raw);
    bytes_free(&text);
    return ok ? CC_REFRESH : CC_ERROR;
}

static bool open_editor(struct lines *l)
{
    HistEvent event;
    const char *terminal = NULL;
    setlocale(LC_CTYPE, "C.UTF-8");    /* what the editor's characters are, whatever the environment says */
    l->screen = isatty(STDOUT_FILENO) ? stdout : stderr;
    l->editor = el_init("gen", stdin, l->screen, stderr);
    l->history = history_init();
    if (!l->editor || !l->history) return false;
    history(l->history, &event, H_SETSIZE, 1000);
    history(l->history, &event, H_SETUNIQUE, 1);
    el_set(l->editor, EL_CLIENTDATA, l);
    el_set(l->editor, EL_EDITOR, "emacs");
    el_set(l->editor, EL_GETCFN, get_character);
    el_set(l->editor, EL_PROMPT_ESC, sign_of, '\1');
    el_set(l->editor, EL_HIST, history, l->history);
    el_wset(l->editor, EL_ADDFN, L"paste", L"Insert pasted text", paste);  /* el_set would lose copies of the texts */
    el_set(l->editor, EL_BIND, "\033[200~", "paste", NULL);
    el_set(l->editor, EL_BIND, "\033[3~", "ed-delete-next-char", NULL);
    el_set(l->editor, EL_BIND, "\033[1~", "ed-move-to-beg", NULL);
    el_set(l->editor, EL_BIND, "\033[4~", "ed-move-to-end", NULL);
    el_get(l->editor, EL_TERMINAL, &terminal);
    l->pastes = terminal && strcmp(terminal, "dumb") != 0 && strcmp(terminal, "unknown") != 0;
    return true;
}

bool lines_open(struct lines **out, struct error *e)
{
    struct lines *l = alloc_zeroed(1, sizeof *l, "reading lines", e);
    *out = NULL;
    if (!l) return false;
    if (pipe2(signals.wake, O_CLOEXEC | O_NONBLOCK) != 0) {
        free(l);
        return fail(e, GEN_RUN, "cannot make a pipe for signals: %s", strerror(errno));
    }
    struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
    for (int i = 0; i < N_CAUGHT; i++) {               /* what is ignored stays so */
        sigaction(caught[i], NULL, &signals.before[i]);
        if (signals.before[i].sa_handler != SIG_IGN) sigaction(caught[i], &action, NULL);
    }
    if (isatty(STDIN_FILENO) && (isatty(STDOUT_FILENO) || isatty(STDERR_FILENO)) && !open_editor(l))
        return lines_close(l), fail(e, GEN_RUN, "cannot set up line editing");
    *out = l;
    return true;
}

void lines_close(struct lines *l)
{
    if (!l) return;
    if (l->editor) el_end(l->editor);
    if (l->history) history_end(l->history);
    for (int i = 0; i < N_CAUGHT; i++) sigaction(caught[i], &signals.before[i], NULL);
    for (int i = 0; i < 2; i++) {
        close(signals.wake[i]);
        signals.wake[i] = -1;
    }
    free(l);
}

void lines_remember(struct lines *l, const char *text)
{
    HistEvent event;
    if (l->history && *text) history(l->history, &event, H_ENTER, text);
}

/* ---- lines ------------------------------------------------------------------------------------------------------- */

static enum line_end ended(int how, struct error *e)
{
    if (how == BY_SIGNAL) return LINE_SIGNAL;
    if (how == FAILED) fail(e, GEN_RUN, "cannot read standard input: %s", strerror(errno));
    return LINE_EOF;
}

static enum line_end no_memory(struct error *e)
{
    fail(e, GEN_RUN, "cannot allocate memory for the line read");
    return LINE_EOF;
}

static enum line_end read_plain(struct lines *l, struct bytes *out, struct error *e)
{
    for (;;) {
        int there = fill(l);
        if (there == END_OF_INPUT && out->len) return LINE_READ;
        if (there < 0) return ended(there, e);
        const char *from = l->buffer + l->at, *end = memchr(from, '\n', l->len - l->at);
        size_t n = end ? (size_t)(end - from) : l->len - l->at;
        if (!bytes_add(out, from, n)) return no_memory(e);
        l->at += n + (end != NULL);
        if (out->len > MOST_LINE) {
            fail(e, GEN_RUN, "a line of standard input is longer than 1 GiB");
            return LINE_EOF;
        }
        if (!end) continue;
        if (out->len && out->data[out->len - 1] == '\r') out->len--;
        return LINE_READ;
    }
}

static enum line_end read_edited(struct lines *l, const char *sign, bool color, struct bytes *out, struct error *e)
{
    int n = 0;
    snprintf(l->sign, sizeof l->sign, color ? "\1\033[32m\1%s" : "%s", sign);
    signals.redraw = 0;
    el_set(l->editor, EL_PREP_TERM, 1);                /* before the sign is there to be answered */
    if (l->pastes) fputs("\033[?2004h", l->screen);
    const char *line = el_gets(l->editor, &n);
    int reason = errno;
    if (l->pastes) fputs("\033[?2004l", l->screen);
    if (color) fputs("\033[0m", l->screen);
    if (!line || n <= 0) fputc('\n', l->screen);
    fflush(l->screen);
    errno = reason;
    if (!line || n <= 0) return ended(signals.ending ? BY_SIGNAL : n < 0 ? FAILED : END_OF_INPUT, e);
    if (line[n - 1] == '\n') n--;
    return bytes_add(out, line, (size_t)n) ? LINE_READ : no_memory(e);
}

enum line_end lines_read(struct lines *l, const char *sign, bool color, struct bytes *out, struct error *e)
{
    out->len = 0;
    enum line_end how = l->editor ? read_edited(l, sign, color, out, e) : read_plain(l, out, e);
    if (how == LINE_READ && !l->begun && out->len >= 3 && memcmp(out->data, "\xEF\xBB\xBF", 3) == 0) {
        out->len -= 3;                 /* a byte order mark */
        memmove(out->data, out->data + 3, out->len);
    }
    l->begun = true;
    return how;
}
