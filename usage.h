/* usage.h - the option table as people and shells read it. */
#ifndef USAGE_H
#define USAGE_H

#include "base.h"

/* The text of --help: all options, or those of one group; topic "man" gives a man page in roff, "markdown" a table per
 * group. Errors: GEN_USAGE for an unknown topic, GEN_RUN for memory. */
bool usage_help(struct bytes *out, const char *topic, struct error *e);
/* A completion script; shell is SHELL_BASH, SHELL_ZSH or SHELL_FISH. */
bool usage_completion(struct bytes *out, int shell, struct error *e);

#endif
