/* json.c - JSON lines and clean strings. */
#include "json.h"

#include <jansson.h>
#include <utf8proc.h>

static int add_chunk(const char *data, size_t n, void *out) { return bytes_add(out, data, n) ? 0 : -1; }

bool json_line(struct bytes *out, struct json_t *value, struct error *e)
{
    /* 15 digits: every float and every count comes back the same, and 0.1 stays 0.1 */
    bool ok = value && json_dump_callback(value, add_chunk, out, JSON_COMPACT | JSON_REAL_PRECISION(15)) == 0
           && bytes_add(out, "\n", 1);
    json_decref(value);
    return ok || fail(e, GEN_RUN, "cannot allocate memory for the JSON result");
}

/* `failed`: what the call that added a value to *whole returned. */
static void give_up(json_t **whole, int failed)
{
    if (!failed) return;
    json_decref(*whole);
    *whole = NULL;
}

void json_put(struct json_t **object, const char *name, struct json_t *value)
{
    give_up(object, json_object_set_new(*object, name, value));
}

void json_push(struct json_t **array, struct json_t *value) { give_up(array, json_array_append_new(*array, value)); }

struct json_t *json_text(const char *text, size_t n)
{
    struct bytes clean = { 0 };
    bool ok = true;
    for (size_t i = 0; i < n && ok;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t step = utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(n - i), &c);
        ok = step > 0 ? bytes_add(&clean, text + i, (size_t)step) : bytes_add(&clean, "\xEF\xBF\xBD", 3);
        i += step > 0 ? (size_t)step : 1;
    }
    json_t *string = !ok ? NULL : json_stringn(clean.len ? clean.data : "", clean.len);
    bytes_free(&clean);
    return string;
}
