/* input.h - files of text. */
#ifndef INPUT_H
#define INPUT_H

#include "base.h"

/* Appends a file's bytes (- is standard input), without a byte order mark at its start and one final line end; at most
 * 1 GiB. Errors: GEN_USAGE with the file's name and the system's reason, GEN_RUN for memory. */
bool input_read(const char *path, struct bytes *out, struct error *e);

#endif
