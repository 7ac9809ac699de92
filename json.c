/* json.c - reading JSON, JSON lines and clean strings. */
#include "json.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <utf8proc.h>

/* ---- memory
 *
 * Jansson (2.14) does not look whether its buffer grew while it reads a text: bytes are lost, then copied past the end.
 * So nothing that it asks for then fails: json_read takes the control back instead, and frees what was taken. */

/* Ahead of all memory that Jansson has. Blocks taken by a read under way form a ring; elsewhere `next` is NULL. */
struct block { struct block *next, *prev; };
_Static_assert(sizeof(struct block) % _Alignof(max_align_t) == 0, "what follows a block is aligned for everything");

static __thread struct { bool active; struct block ring; jmp_buf no_memory; } reading;

static void *take(size_t n)
{
    size_t size;
    struct block *b = size_add(n, sizeof *b, &size) ? malloc(size) : NULL;
    if (!b && reading.active) longjmp(reading.no_memory, 1);
    if (!b) return NULL;
    *b = (struct block){ 0 };
    if (reading.active) {
        *b = (struct block){ reading.ring.next, &reading.ring };
        b->next->prev = b->prev->next = b;
    }
    return b + 1;
}

static void give_back(void *p)
{
    struct block *b = p ? (struct block *)p - 1 : NULL;
    if (b && b->next) b->next->prev = b->prev, b->prev->next = b->next;
    free(b);
}

/* Before any value is made: what take gave goes to give_back. */
__attribute__((constructor)) static void use_blocks(void) { json_set_alloc_funcs(take, give_back); }

/* The read is over: its blocks are the value's, or are freed. */
static void end_reading(bool keep)
{
    reading.active = false;
    for (struct block *b = reading.ring.next, *next; b != &reading.ring; b = next) {
        next = b->next;
        *b = (struct block){ 0 };
        if (!keep) free(b);
    }
}

/* json_loadb; false: memory was out. */
static bool load(json_t **value, const char *text, size_t n, json_error_t *why)
{
    reading.ring = (struct block){ &reading.ring, &reading.ring };
    reading.active = true;
    if (setjmp(reading.no_memory) != 0) return end_reading(false), false;
    *value = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, why);
    return end_reading(true), true;
}

/* ---- reading and writing */

/* The first bracket that opens a level too many; NULL = there is none. */
static const char *too_deep(const char *text, size_t n)
{
    bool quoted = false;
    int depth = 0;
    for (const char *at = text; at < text + n; at++) {
        if (quoted && *at == '\\') at++;
        else if (*at == '"') quoted = !quoted;
        else if (!quoted && (*at == '[' || *at == '{') && ++depth > JSON_DEPTH) return at;
        else if (!quoted && (*at == ']' || *at == '}')) depth--;
    }
    return NULL;
}

struct json_t *json_read(const char *text, size_t n, const char *what, struct error *e)
{
    json_error_t why;
    const char *deep = too_deep(text, n);
    if (deep)
        return fail(e, GEN_USAGE, "%s no JSON that can be read: byte %zu opens a level more than %d", what,
                    (size_t)(deep - text) + 1, JSON_DEPTH), NULL;
    json_t *value;
    if (!load(&value, text, n, &why)) return fail(e, GEN_RUN, "cannot allocate memory for JSON"), NULL;
    if (value) return value;
    if (why.line > 1) fail(e, GEN_USAGE, "%s no JSON, line %d column %d: %s", what, why.line, why.column, why.text);
    else fail(e, GEN_USAGE, "%s no JSON, column %d: %s", what, why.column, why.text);
    return NULL;
}

/* Jansson does not look at what comes back for the name of a member. */
struct dump { struct bytes *out; bool whole; };
static int add_chunk(const char *data, size_t n, void *dump)
{
    struct dump *d = dump;
    d->whole = d->whole && bytes_add(d->out, data, n);
    return d->whole ? 0 : -1;
}

static bool dump(struct bytes *out, const json_t *value, size_t flags)
{
    struct dump d = { out, true };
    return json_dump_callback(value, add_chunk, &d, flags) == 0 && d.whole;
}

bool json_add(struct bytes *out, const struct json_t *value, struct error *e)
{
    /* 15 digits: every float and every count comes back the same, and 0.1 stays 0.1 */
    return (value && dump(out, value, JSON_COMPACT | JSON_REAL_PRECISION(15)))
        || fail(e, GEN_RUN, "cannot allocate memory for JSON");
}

bool json_add_ascii(struct bytes *out, const struct json_t *value)
{
    return dump(out, value, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
}

bool json_line(struct bytes *out, struct json_t *value, struct error *e)
{
    bool ok = json_add(out, value, e)
           && (bytes_add(out, "\n", 1) || fail(e, GEN_RUN, "cannot allocate memory for JSON"));
    json_decref(value);
    return ok;
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

double json_ms(double seconds) { return round(seconds * 1e6) / 1e3; }
