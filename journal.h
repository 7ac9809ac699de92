/* journal.h - where a batch's answers go: whole lines, each written at once, in a file that a later run can go on
 * with however this one ends. */
#ifndef JOURNAL_H
#define JOURNAL_H

#include "base.h"

struct journal;

/* Opens the file `path`, NULL = standard output. Without `resume` what it held is gone; with it the answers that it
 * holds are read, and a last line that is not whole is cut off. `source`, the file that lines are read from, is never
 * opened. Errors: GEN_USAGE for a file that cannot be written, does not begin like an answer (it stays as it is) or is
 * in use by another run. */
bool journal_open(struct journal **out, const char *path, bool resume, const char *source, struct error *e);
void journal_close(struct journal *j);

/* Is there an answer to this key and sample? Each counts once: equal lines have as many answers. */
bool journal_take(struct journal *j, const char key[65], int sample);
int64_t journal_answers(const struct journal *j);    /* there when it was opened */
int64_t journal_errors(const struct journal *j);     /* of them, errors */
/* The seed that was drawn for those answers; -1 = none. */
int64_t journal_seed(const struct journal *j);

/* Writes an object on a line, line end included. Whole or not at all where the file can be cut. Errors: GEN_RUN; for
 * standard output as output_write. */
bool journal_write(struct journal *j, const char *line, size_t n, struct error *e);

#endif
