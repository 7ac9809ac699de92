/* json.h - writing JSON: what every object that gen prints has in common. */
#ifndef JSON_H
#define JSON_H

#include "base.h"

struct json_t;                         /* Jansson's */

/* Appends a value on one line, with a line end, and frees it; NULL counts as memory that was out (GEN_RUN). */
bool json_line(struct bytes *out, struct json_t *value, struct error *e);
/* Adds a value, which may be NULL for memory that was out, to an object or array. When that fails the whole is given up:
 * freed and NULL, to which nothing can be added. */
void json_put(struct json_t **object, const char *name, struct json_t *value);
void json_push(struct json_t **array, struct json_t *value);
/* Any bytes as a string: what is not UTF-8 becomes U+FFFD. NULL when memory is out. */
struct json_t *json_text(const char *text, size_t n);

#endif
