/* output.h - generated text on its way to standard output: whole characters as they come, stop strings held back and
 * never printed, control characters made visible on a terminal. */
#ifndef OUTPUT_H
#define OUTPUT_H

#include "base.h"
#include "options.h"
#include "tokenizer.h"

/* Writes all bytes to standard output now. Errors: GEN_RUN with the system's reason; when the reader of a pipe has
 * gone, false with code GEN_OK and no text: the program is to end quietly. */
bool output_write(const void *data, size_t n, struct error *e);

/* Once *stop is non-zero (a signal came), a reader that does not read is waited for no longer than half a second; then
 * output_write gives up as if the reader had gone. */
void output_until(const volatile int *stop);

/* Adds UTF-8 text with control characters other than tab and line end shown as ^[ (ESC), ^? (DEL) and M-^[ (C1). */
bool visible_add(struct bytes *out, const char *text, size_t n);

/* Adds any bytes as text that stays on one line: \n, \t, \\, and \xNN for each byte of other control characters, of
 * Unicode's line separators and of what is not UTF-8. */
bool escaped_add(struct bytes *out, const char *text, size_t n);

struct stream;

struct stream_options {
    const struct tokenizer *tokenizer;
    const struct texts *stops;         /* UTF-8 */
    bool at_start;                     /* no text comes before this stream */
    bool print;                        /* to standard output; else the text is kept */
    bool visible;                      /* print control characters with visible_add */
};

/* Errors: GEN_USAGE for a stop string that is not UTF-8, GEN_RUN for memory. */
bool stream_open(struct stream **out, const struct stream_options *o, struct error *e);
void stream_close(struct stream *s);
/* Adds a token's text. *stopped becomes true when a stop string is complete: the text ends before it. The stop string
 * whose end comes first counts. Errors: as output_write, GEN_RUN for memory. */
bool stream_add(struct stream *s, int32_t id, bool *stopped, struct error *e);
/* The text ends here: what was held back is let out. */
bool stream_end(struct stream *s, struct error *e);
/* The text so far (print = false). */
const struct bytes *stream_text(const struct stream *s);
/* Is the last character out a line end, or is there none yet? */
bool stream_at_line_start(const struct stream *s);

#endif
