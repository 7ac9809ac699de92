/* json.h - JSON: reading texts that may be hostile, and what every object that gen prints has in common. */
#ifndef JSON_H
#define JSON_H

#include "base.h"

struct json_t;                         /* Jansson's */

enum { JSON_DEPTH = 64 };              /* levels that a text may be nested: few enough for a small stack */
/* The value that a text holds: without a member twice in one object, NUL allowed in strings. NULL after filling *e:
 * GEN_USAGE ("WHAT no JSON, column 5: ..."; `what` ends with the verb), GEN_RUN for memory.
 * Jansson's memory has a header of json.c's: what json_dumps returns is not for free(). Use json_add. */
struct json_t *json_read(const char *text, size_t n, const char *what, struct error *e);

/* Appends a value; NULL counts as memory that was out (GEN_RUN). */
bool json_add(struct bytes *out, const struct json_t *value, struct error *e);
/* Appends a value, not NULL, of any type in ASCII; false when memory is out. */
bool json_add_ascii(struct bytes *out, const struct json_t *value);
/* json_add with a line end; the value is freed. */
bool json_line(struct bytes *out, struct json_t *value, struct error *e);
/* Adds a value, which may be NULL for memory that was out, to an object or array. When that fails the whole is given
 * up: freed and NULL, to which nothing can be added. */
void json_put(struct json_t **object, const char *name, struct json_t *value);
void json_push(struct json_t **array, struct json_t *value);
/* Any bytes as a string: what is not UTF-8 becomes U+FFFD. NULL when memory is out. */
struct json_t *json_text(const char *text, size_t n);
/* Seconds as milliseconds with three decimals. */
double json_ms(double seconds);

#endif
