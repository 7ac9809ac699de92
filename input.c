/* input.c - reading files of text. */
#include "input.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define MOST_TEXT ((size_t)1 << 30)    /* bytes of a prompt or text */

bool input_read(const char *path, struct bytes *out, struct error *e)
{
    const char *name = strcmp(path, "-") == 0 ? "standard input" : path;
    int file = strcmp(path, "-") == 0 ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    size_t start = out->len;
    char piece[1 << 13];
    ssize_t n = file < 0 ? -1 : 1;
    while (n > 0) {
        n = read(file, piece, sizeof piece);
        if (n < 0 && errno == EINTR) n = 1;
        else if (n > 0 && !bytes_add(out, piece, (size_t)n)) errno = ENOMEM, n = -1;
        else if (out->len > MOST_TEXT) errno = EFBIG, n = -1;
    }
    int reason = errno;
    if (file > STDIN_FILENO) close(file);
    if (n < 0) return fail(e, reason == ENOMEM ? GEN_RUN : GEN_USAGE, "cannot read %s: %s", name, strerror(reason));
    if (out->len - start >= 3 && memcmp(out->data + start, "\xEF\xBB\xBF", 3) == 0) {
        out->len -= 3;
        memmove(out->data + start, out->data + start + 3, out->len - start);
    }
    bool line_end = out->len > start && out->data[out->len - 1] == '\n';
    if (line_end) out->len--;
    if (line_end && out->len > start && out->data[out->len - 1] == '\r') out->len--;
    return true;
}
