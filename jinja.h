/* jinja.h - a small sandboxed interpreter of the Jinja template language, for the chat templates of models.
 *
 * It gives what Python's jinja2 gives in the configuration that Hugging Face's apply_chat_template uses (sandboxed and
 * immutable; trim_blocks and lstrip_blocks on; break and continue; {% generation %}; tojson without HTML escapes;
 * raise_exception and strftime_now), byte for byte, for the language that chat templates are written in. Left out, and
 * refused by name: include, import, extends, block, autoescape; filters and methods that format for the web or print.
 * Three rules differ: integers have 64 bits; `safe` and `escape` give plain strings; a variable that the template reads
 * before it sets it is always the caller's.
 *
 * A template is hostile: it can only read its variables and write text, within limits of steps, memory and nesting.
 * Each byte of text knows whether it comes from the template (trusted) or from data, through every operation, so that
 * the tokenizer can look for control tokens in what the template's author wrote and nowhere else. */
#ifndef JINJA_H
#define JINJA_H

#include "base.h"
#include "tokenizer.h"

#include <jansson.h>
#include <time.h>

/* Limits of a rendering; each byte of template and variables adds to them. A step is an evaluated node, or a few bytes
 * of text looked at. */
enum { JINJA_STEPS = 5000000, JINJA_STEPS_PER_BYTE = 8, JINJA_MEMORY = 64 << 20, JINJA_MEMORY_PER_BYTE = 64 };

struct jinja;                          /* a parsed template; immutable */

/* Errors: GEN_MODEL, "line N of the chat template: ...". The source need not outlive the call. */
bool jinja_parse(struct jinja **out, const char *source, size_t n, struct error *e);
void jinja_free(struct jinja *t);

struct jinja_result {
    struct bytes text;
    struct span *spans;                /* the whole text in order; neighbours differ in trust; NULL when it is empty */
    size_t n_spans;
};

/* Renders with the members of two JSON objects as variables (either may be NULL): `own` is the program's, for instance
 * bos_token, its strings are trusted and its names win; strings in `data`, keys included, are not trusted, except that
 * "role" may be one of the well-known roles, since some templates build a control token around it. `now` is what
 * strftime_now shows, in local time. Errors, all with the line: GEN_USAGE when the template calls raise_exception (the
 * messages do not suit the model), GEN_MODEL when it cannot be run or passes a limit, GEN_RUN for memory. *out is
 * zeroed on failure. */
bool jinja_render(const struct jinja *t, const json_t *data, const json_t *own, time_t now, struct jinja_result *out,
                  struct error *e);
void jinja_result_free(struct jinja_result *result);

#endif
