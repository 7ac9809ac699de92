/* line.h - lines that people type: with line editing and a history on a terminal, plain from a pipe or file. */
#ifndef LINE_H
#define LINE_H

#include "base.h"

struct lines;

/* Reads standard input: with editing where it is a terminal and standard output or standard error is one, too. Signals
 * that ask to end (SIGINT, SIGTERM, SIGHUP) are the reader's from now on: see lines_signal. Errors: GEN_RUN. */
bool lines_open(struct lines **out, struct error *e);
void lines_close(struct lines *l);     /* gives the signals back */
bool lines_editing(const struct lines *l);

enum line_end { LINE_READ, LINE_EOF, LINE_SIGNAL };
/* The next line, without its end, in *out (emptied first); with editing after a sign ("> "), in colour where asked. A
 * last line without an end counts. Text pasted into the editor is one line, its line ends kept. LINE_EOF: there is no
 * more. LINE_SIGNAL: lines_signal() asks to end. Errors: LINE_EOF, and *e is filled. */
enum line_end lines_read(struct lines *l, const char *sign, bool color, struct bytes *out, struct error *e);
/* Remembers a text for the arrow keys. */
void lines_remember(struct lines *l, const char *text);

/* While work is done between lines, SIGINT asks only to stop it: *lines_work() becomes non-zero; a second SIGINT, or
 * any other signal that asks to end, asks to end all. Without editing the first one does that, too. */
const volatile int *lines_work(struct lines *l);
void lines_rest(struct lines *l);      /* the work is done */
int lines_signal(void);                /* the signal that asks to end, or 0 */

#endif
