/* jinja_value.c - memory, text that knows where it comes from, values and Python's operators on them, printing. */
#define _GNU_SOURCE                    /* memmem */
#include "jinja_internal.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <utf8proc.h>

/* ---- errors, limits, memory */

_Noreturn void jj_die_code(struct run *r, int code, const char *message)
{
    fail(r->e, code, "line %d of the chat template: %s", r->line, message);
    longjmp(r->failed, 1);
}

_Noreturn void jj_die(struct run *r, const char *format, ...)
{
    char message[400];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    jj_die_code(r, GEN_MODEL, message);
}

bool jj_guarded(struct run *r, void (*body)(struct run *))
{
    if (setjmp(r->failed))
        return false;
    body(r);
    return true;
}

void jj_spend(struct run *r, size_t steps)
{
    r->steps += steps;
    if (r->steps > r->max_steps)
        jj_die(r, "it runs for too long, so it is stopped");
}

void jj_enter(struct run *r)
{
    if (++r->depth > JJ_MAX_DEPTH)
        jj_die(r, "it is nested too deeply");
    jj_spend(r, 1);
}

void jj_leave(struct run *r)
{
    r->depth--;
}

void *jj_alloc(struct run *r, size_t n, size_t size)
{
    size_t bytes;
    if (!size_mul(n, size, &bytes) || bytes > r->limit)
        jj_die(r, "it needs too much memory");
    bytes = (bytes + 15) & ~(size_t)15;
    if (!r->chunks || bytes > r->chunks->size - r->chunks->used) {
        size_t room = bytes > 1 << 16 ? bytes : 1 << 16;
        if ((r->allocated += room) > r->limit)
            jj_die(r, "it needs too much memory");
        struct chunk *c = malloc(sizeof *c + room);
        if (!c)
            jj_die_code(r, GEN_RUN, "memory is out");
        *c = (struct chunk){r->chunks, 0, room};
        if (room == bytes && r->chunks) {        /* keep filling the current chunk */
            c->next = r->chunks->next;
            r->chunks->next = c;
            c->used = bytes;
            return memset(c->data, 0, bytes);
        }
        r->chunks = c;
    }
    void *p = r->chunks->data + r->chunks->used;
    r->chunks->used += bytes;
    return memset(p, 0, bytes);
}

void jj_free_chunks(struct chunk *c)
{
    while (c) {
        struct chunk *next = c->next;
        free(c);
        c = next;
    }
}

void *jj_grow(struct run *r, void *items, size_t n, size_t *cap, size_t size)
{
    if (n < *cap)
        return items;
    *cap = *cap ? 2 * *cap : 8;
    void *more = jj_alloc(r, *cap, size);
    if (n)
        memcpy(more, items, n * size);
    return more;
}

void jj_push(struct run *r, struct list *list, struct value v)
{
    list->v = jj_grow(r, list->v, list->n, &list->cap, sizeof v);
    list->v[list->n++] = v;
}

/* ---- text */

size_t jj_char_len(struct text t, size_t i)
{
    unsigned char c = (unsigned char)t.p[i];
    size_t want = c < 0xc0 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4, have = 1;
    while (have < want && i + have < t.n && ((unsigned char)t.p[i + have] & 0xc0) == 0x80)
        have++;
    return have;
}

int32_t jj_code_point(struct text t, size_t i)
{
    utf8proc_int32_t c;
    return utf8proc_iterate((const utf8proc_uint8_t *)t.p + i, (utf8proc_ssize_t)(t.n - i), &c) > 0 ? c : -1;
}

size_t jj_count_chars(struct run *r, struct text t)
{
    size_t n = 0;
    jj_spend(r, t.n / 16);
    for (size_t i = 0; i < t.n; i += jj_char_len(t, i))
        n++;
    return n;
}

bool jj_is_space(int32_t c)
{
    return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f) || c == 0x85 || c == 0xa0 || c == 0x1680
           || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

static bool in_set(struct run *r, struct text chars, struct text t, size_t at, size_t len)
{
    jj_spend(r, 1 + chars.n / 16);
    for (size_t i = 0; i < chars.n; i += jj_char_len(chars, i))
        if (jj_char_len(chars, i) == len && memcmp(chars.p + i, t.p + at, len) == 0)
            return true;
    return false;
}

struct text jj_strip(struct run *r, struct text t, const struct text *chars, bool left, bool right)
{
    size_t from = 0, to = t.n;
    jj_spend(r, t.n / 16);
    while (left && from < to) {
        size_t len = jj_char_len(t, from);
        if (chars ? !in_set(r, *chars, t, from, len) : !jj_is_space(jj_code_point(t, from)))
            break;
        from += len;
    }
    while (right && from < to) {
        size_t at = to - 1;
        while (at > from && ((unsigned char)t.p[at] & 0xc0) == 0x80 && to - at < 4)
            at--;
        if (at + jj_char_len(sub(t, 0, to), at) != to)
            at = to - 1;               /* a stray byte */
        if (chars ? !in_set(r, *chars, t, at, to - at) : !jj_is_space(jj_code_point(sub(t, 0, to), at)))
            break;
        to = at;
    }
    return sub(t, from, to);
}

size_t jj_find(struct run *r, struct text t, size_t i, struct text what)
{
    if (what.n == 0)
        return i;
    if (t.n - i < what.n)
        return SIZE_MAX;
    const char *p = memmem(t.p + i, t.n - i, what.p, what.n);
    jj_spend(r, 1 + (p ? (size_t)(p - t.p) - i : t.n - i) / 16);
    return p ? (size_t)(p - t.p) : SIZE_MAX;
}

bool jj_is_word_of(const char *words, struct text name)
{
    char key[40];
    if (name.n == 0 || name.n > sizeof key - 3 || memchr(name.p, 0, name.n) || memchr(name.p, ' ', name.n))
        return false;
    snprintf(key, sizeof key, " %.*s ", (int)name.n, name.p);
    return strstr(words, key) != NULL;
}

/* ---- building text */

void jj_put(struct run *r, struct builder *b, const char *p, size_t n, bool trusted)
{
    if (n == 0)
        return;
    jj_spend(r, 1 + n / 16);
    if (n > b->cap - b->n) {
        size_t cap;
        if (!size_add(n > b->cap ? n : b->cap, b->cap + 32, &cap))
            jj_die(r, "it needs too much memory");
        char *more = jj_alloc(r, cap, 1);
        if (b->n)
            memcpy(more, b->p, b->n);
        b->p = more;
        if (b->trust) {
            uint8_t *trust = jj_alloc(r, cap, 1);
            memcpy(trust, b->trust, b->n);
            b->trust = trust;
        }
        b->cap = cap;
    }
    if (b->n == 0)
        b->trusted = trusted;
    if (!b->trust && trusted != b->trusted) {
        b->trust = jj_alloc(r, b->cap, 1);
        memset(b->trust, b->trusted, b->n);
    }
    memcpy(b->p + b->n, p, n);
    if (b->trust)
        memset(b->trust + b->n, trusted, n);
    b->n += n;
}

void jj_put_text(struct run *r, struct builder *b, struct text t)
{
    for (size_t i = 0, end; i < t.n; i = end) {
        end = t.n;
        bool trusted = trust_at(t, i);
        if (t.trust) {
            const uint8_t *change = memchr(t.trust + i, !trusted, t.n - i);
            end = change ? (size_t)(change - t.trust) : t.n;
        }
        jj_put(r, b, t.p + i, end - i, trusted);
    }
}

void jj_put_code_point(struct run *r, struct builder *b, int32_t c, bool trusted)
{
    utf8proc_uint8_t bytes[4];
    jj_put(r, b, (char *)bytes, (size_t)utf8proc_encode_char(c, bytes), trusted);
}

void jj_put_format(struct run *r, struct builder *b, bool trusted, const char *format, ...)
{
    char s[64];                        /* escapes and numbers */
    va_list args;
    va_start(args, format);
    int n = vsnprintf(s, sizeof s, format, args);
    va_end(args);
    jj_put(r, b, s, n < (int)sizeof s ? (size_t)n : sizeof s - 1, trusted);
}

/* ---- making values */

struct value jj_undefined(struct run *r, struct text name)
{
    struct text *t = jj_alloc(r, 1, sizeof *t);
    *t = name;
    return (struct value){.type = V_UNDEFINED, .text = t};
}

struct value jj_string(struct run *r, struct text text)
{
    struct text *t = jj_alloc(r, 1, sizeof *t);
    *t = text;
    return (struct value){.type = V_TEXT, .text = t};
}

struct value jj_new_list(struct run *r, enum type type)
{
    return (struct value){.type = type, .list = jj_alloc(r, 1, sizeof(struct list))};
}

struct value jj_generator(struct run *r)
{
    struct value v = jj_new_list(r, V_STREAM);
    v.list->once = true;
    return v;
}

struct value jj_new_dict(struct run *r, enum type type)
{
    return (struct value){.type = type, .dict = jj_alloc(r, 1, sizeof(struct dict))};
}

void jj_dict_append(struct run *r, struct dict *d, struct value key, struct value value)
{
    d->v = jj_grow(r, d->v, d->n, &d->cap, sizeof *d->v);
    d->v[d->n++] = (struct pair){key, value};
}

/* ---- what Python's operators mean */

const char *jj_type_word(struct value v)
{
    static const char *const words[] = {
        "nothing", "an undefined value", "none", "a boolean", "an integer", "a float", "a string", "a list", "a tuple",
        "a generator", "a dict", "a namespace", "a macro", "a function", "a method", "a loop"
    };
    return words[v.type];
}

_Noreturn void jj_die_undefined(struct run *r, struct value v)
{
    jj_die(r, "'%.*s' is undefined", JJ_SHOW(*v.text));
}

static long double exact(struct value v)       /* holds every int64 and every double */
{
    return v.type == V_FLOAT ? (long double)v.real : (long double)whole(v);
}

bool jj_truthy(struct value v)
{
    switch (v.type) {
    case V_ABSENT: case V_UNDEFINED: case V_NONE: return false;
    case V_BOOL: return v.boolean;
    case V_INT: return v.integer != 0;
    case V_FLOAT: return v.real != 0;
    case V_TEXT: return v.text->n > 0;
    case V_LIST: case V_TUPLE: return v.list->n > 0;
    case V_STREAM: return v.list->once || v.list->n > 0;
    case V_DICT: return v.dict->n > 0;
    default: return true;
    }
}

bool jj_equal(struct run *r, struct value a, struct value b)
{
    jj_enter(r);
    bool result = false;
    if (is_number(a) && is_number(b)) {
        result = exact(a) == exact(b);
    } else if (a.type != b.type) {
        result = false;
    } else if (a.type == V_TEXT) {
        jj_spend(r, a.text->n / 16);
        result = same(*a.text, *b.text);
    } else if (a.type == V_LIST || a.type == V_TUPLE) {
        result = a.list->n == b.list->n;
        for (size_t i = 0; result && i < a.list->n; i++)
            result = jj_equal(r, a.list->v[i], b.list->v[i]);
    } else if (a.type == V_DICT) {
        result = a.dict->n == b.dict->n;
        for (size_t i = 0; result && i < a.dict->n; i++) {
            const struct value *other = jj_lookup(r, b.dict, a.dict->v[i].key);
            result = other && jj_equal(r, a.dict->v[i].value, *other);
        }
    } else {
        result = a.type <= V_NONE || a.list == b.list;
    }
    jj_leave(r);
    return result;
}

const struct value *jj_lookup(struct run *r, const struct dict *d, struct value key)
{
    for (size_t i = 0; i < d->n; i++) {
        const struct pair *p = &d->v[i];
        bool both_text = key.type == V_TEXT && p->key.type == V_TEXT;
        if (both_text ? same(*key.text, *p->key.text) : jj_equal(r, p->key, key))
            return &p->value;
        if (i % 8 == 7)
            jj_spend(r, 1);
    }
    return NULL;
}

const struct value *jj_lookup_text(struct run *r, const struct dict *d, struct text key)
{
    return jj_lookup(r, d, (struct value){.type = V_TEXT, .text = &key});
}

void jj_dict_set(struct run *r, struct dict *d, struct value key, struct value value)
{
    struct value *old = (struct value *)jj_lookup(r, d, key);
    if (old)
        *old = value;
    else
        jj_dict_append(r, d, key, value);
}

bool jj_less(struct run *r, struct value a, struct value b)
{
    jj_enter(r);
    bool result = false;
    if (is_number(a) && is_number(b)) {
        result = exact(a) < exact(b);
    } else if (a.type == V_TEXT && b.type == V_TEXT) {      /* UTF-8 bytes sort like code points */
        size_t n = a.text->n < b.text->n ? a.text->n : b.text->n;
        jj_spend(r, n / 16);
        int order = n ? memcmp(a.text->p, b.text->p, n) : 0;
        result = order < 0 || (order == 0 && a.text->n < b.text->n);
    } else if (a.type == b.type && (a.type == V_LIST || a.type == V_TUPLE)) {
        size_t i = 0;
        while (i < a.list->n && i < b.list->n && jj_equal(r, a.list->v[i], b.list->v[i]))
            i++;
        result = i < a.list->n && i < b.list->n ? jj_less(r, a.list->v[i], b.list->v[i]) : i < b.list->n;
    } else if (a.type == V_UNDEFINED || b.type == V_UNDEFINED) {
        jj_die_undefined(r, a.type == V_UNDEFINED ? a : b);
    } else {
        jj_die(r, "%s and %s cannot be ordered", jj_type_word(a), jj_type_word(b));
    }
    jj_leave(r);
    return result;
}

void jj_sort_pairs(struct run *r, struct pair *v, size_t n, bool reverse)
{
    if (n < 2)
        return;
    size_t half = n / 2, i = 0, j = half;
    jj_sort_pairs(r, v, half, reverse);
    jj_sort_pairs(r, v + half, n - half, reverse);
    struct pair *out = jj_alloc(r, n, sizeof *out);
    for (size_t k = 0; k < n; k++) {
        bool right = i == half;
        if (i < half && j < n)
            right = reverse ? jj_less(r, v[i].key, v[j].key) : jj_less(r, v[j].key, v[i].key);
        out[k] = right ? v[j++] : v[i++];
    }
    memcpy(v, out, n * sizeof *v);
}

struct list *jj_iterate(struct run *r, struct value v)
{
    bool is_list = v.type == V_LIST || v.type == V_TUPLE || v.type == V_STREAM;
    struct list *out = is_list ? v.list : jj_alloc(r, 1, sizeof *out);
    switch (v.type) {
    case V_UNDEFINED: case V_LIST: case V_TUPLE:
        break;
    case V_STREAM:
        if (out->once && out->spent)
            return jj_alloc(r, 1, sizeof *out);
        out->spent = true;
        break;
    case V_DICT:
        for (size_t i = 0; i < v.dict->n; i++)
            jj_push(r, out, v.dict->v[i].key);
        break;
    case V_TEXT:
        jj_spend(r, v.text->n);
        for (size_t i = 0; i < v.text->n; i += jj_char_len(*v.text, i))
            jj_push(r, out, jj_string(r, sub(*v.text, i, i + jj_char_len(*v.text, i))));
        break;
    default:
        jj_die(r, "%s cannot be looped over", jj_type_word(v));
    }
    return out;
}

void jj_need_key(struct run *r, struct value v)
{
    if (v.type > V_TEXT && v.type != V_TUPLE)
        jj_die(r, "%s cannot be a key", jj_type_word(v));
    for (size_t i = 0; v.type == V_TUPLE && i < v.list->n; i++) {
        jj_enter(r);
        jj_need_key(r, v.list->v[i]);
        jj_leave(r);
    }
}

bool jj_contains(struct run *r, struct value where, struct value what)
{
    if (where.type == V_TEXT) {
        if (what.type != V_TEXT)
            jj_die(r, "'in' looks for %s in a string", jj_type_word(what));
        return jj_find(r, *where.text, 0, *what.text) != SIZE_MAX;
    }
    if (where.type == V_DICT) {
        jj_need_key(r, what);
        return jj_lookup(r, where.dict, what) != NULL;
    }
    const struct list *items = jj_iterate(r, where);
    for (size_t i = 0; i < items->n; i++)
        if (jj_equal(r, items->v[i], what))
            return true;
    return false;
}

/* ---- values as text: str(), repr() and json.dumps() */

/* The shortest digits that read back as d, laid out as Python does. */
static void put_float(struct run *r, struct builder *b, double d, bool trusted, bool json)
{
    if (isnan(d) || isinf(d)) {
        const char *word = isnan(d) ? (json ? "NaN" : "nan") : json ? "Infinity" : "inf";
        jj_put_format(r, b, trusted, "%s%s", d < 0 ? "-" : "", word);
        return;
    }
    char s[40], digits[24];
    int precision = 0;
    do
        snprintf(s, sizeof s, "%.*e", precision, d);
    while (strtod(s, NULL) != d && ++precision < 17);
    const char *sign = s[0] == '-' ? "-" : "", *mantissa = s + strlen(sign);
    int n = 0, exponent = atoi(strchr(s, 'e') + 1);
    for (; *mantissa != 'e'; mantissa++)
        if (*mantissa != '.')
            digits[n++] = *mantissa;
    while (n > 1 && digits[n - 1] == '0')
        n--;
    if (exponent < -4 || exponent >= 16)
        jj_put_format(r, b, trusted, "%s%c%s%.*se%c%02d", sign, digits[0], n > 1 ? "." : "", n - 1, digits + 1,
                   exponent < 0 ? '-' : '+', abs(exponent));
    else if (exponent < 0)
        jj_put_format(r, b, trusted, "%s0.%.*s%.*s", sign, -exponent - 1, "000", n, digits);
    else if (n <= exponent + 1)
        jj_put_format(r, b, trusted, "%s%.*s%.*s.0", sign, n, digits, exponent + 1 - n, "0000000000000000");
    else
        jj_put_format(r, b, trusted, "%s%.*s.%.*s", sign, exponent + 1, digits, n - exponent - 1,
                      digits + exponent + 1);
}

static bool is_printable(int32_t c)    /* as str.isprintable */
{
    utf8proc_category_t k = utf8proc_category(c);
    return c == ' ' || !(k == UTF8PROC_CATEGORY_CN || k == UTF8PROC_CATEGORY_CC || k == UTF8PROC_CATEGORY_CF
                         || k == UTF8PROC_CATEGORY_CS || k == UTF8PROC_CATEGORY_CO || k == UTF8PROC_CATEGORY_ZL
                         || k == UTF8PROC_CATEGORY_ZP || k == UTF8PROC_CATEGORY_ZS);
}

static void put_quoted(struct run *r, struct builder *b, struct text t)
{
    char quote = t.n && memchr(t.p, '\'', t.n) && !memchr(t.p, '"', t.n) ? '"' : '\'';
    jj_put(r, b, &quote, 1, false);
    for (size_t i = 0, len; i < t.n; i += len) {
        int32_t c = jj_code_point(t, i);
        bool trusted = trust_at(t, i);
        len = jj_char_len(t, i);
        if (c == quote || c == '\\')
            jj_put_format(r, b, trusted, "\\%c", (char)c);
        else if (c == '\n' || c == '\r' || c == '\t')
            jj_put_format(r, b, trusted, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (c < 0 || is_printable(c))
            jj_put_text(r, b, sub(t, i, i + len));
        else
            jj_put_format(r, b, trusted, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", (unsigned)c);
    }
    jj_put(r, b, &quote, 1, false);
}

static void put_repr(struct run *r, struct builder *b, struct value v)
{
    jj_enter(r);
    switch (v.type) {
    case V_NONE: jj_put_format(r, b, v.trusted, "None"); break;
    case V_BOOL: jj_put_format(r, b, v.trusted, v.boolean ? "True" : "False"); break;
    case V_INT: jj_put_format(r, b, v.trusted, "%lld", (long long)v.integer); break;
    case V_FLOAT: put_float(r, b, v.real, v.trusted, false); break;
    case V_TEXT: put_quoted(r, b, *v.text); break;
    case V_UNDEFINED: jj_put_format(r, b, false, "Undefined"); break;
    case V_LIST: case V_TUPLE:
        jj_put(r, b, v.type == V_LIST ? "[" : "(", 1, false);
        for (size_t i = 0; i < v.list->n; i++) {
            jj_put(r, b, ", ", i ? 2 : 0, false);
            put_repr(r, b, v.list->v[i]);
        }
        jj_put(r, b, ",", v.type == V_TUPLE && v.list->n == 1, false);
        jj_put(r, b, v.type == V_LIST ? "]" : ")", 1, false);
        break;
    case V_DICT:
        jj_put(r, b, "{", 1, false);
        for (size_t i = 0; i < v.dict->n; i++) {
            jj_put(r, b, ", ", i ? 2 : 0, false);
            put_repr(r, b, v.dict->v[i].key);
            jj_put(r, b, ": ", 2, false);
            put_repr(r, b, v.dict->v[i].value);
        }
        jj_put(r, b, "}", 1, false);
        break;
    default: jj_die(r, "%s cannot be printed", jj_type_word(v));
    }
    jj_leave(r);
}

struct text jj_to_text(struct run *r, struct value v)
{
    if (v.type == V_TEXT)
        return *v.text;
    struct builder b = {0};
    if (v.type != V_UNDEFINED && v.type != V_ABSENT)
        put_repr(r, &b, v);
    return built(&b);
}

static void put_json_string(struct run *r, struct builder *b, struct text t, bool ascii)
{
    static const char special[] = "\"\\\b\f\n\r\t", code[] = "\"\\bfnrt";
    jj_put(r, b, "\"", 1, false);
    for (size_t i = 0, end; i < t.n; i = end) {
        for (end = i; end < t.n; end++) {      /* a stretch that stays as it is */
            unsigned char c = (unsigned char)t.p[end];
            if (c < 0x20 || c == '"' || c == '\\' || (ascii && c >= 0x7f))
                break;
        }
        jj_put_text(r, b, sub(t, i, end));
        if (end == t.n)
            break;
        const char *escape = t.p[end] ? strchr(special, t.p[end]) : NULL;
        bool trusted = trust_at(t, end);
        int32_t c = jj_code_point(t, end);
        if (escape)
            jj_put_format(r, b, trusted, "\\%c", code[escape - special]);
        else if (c >= 0x10000)
            jj_put_format(r, b, trusted, "\\u%04x\\u%04x", 0xd800u + ((unsigned)(c - 0x10000) >> 10),
                          0xdc00u + ((unsigned)c & 0x3ff));
        else
            jj_put_format(r, b, trusted, "\\u%04x", c < 0 ? 0xfffdu : (unsigned)c);
        end += jj_char_len(t, end);
    }
    jj_put(r, b, "\"", 1, false);
}

static void put_line(struct run *r, struct builder *b, const struct json_style *style, int level)
{
    if (!style->indented)
        return;
    jj_put(r, b, "\n", 1, false);
    for (int i = 0; i < level; i++)
        jj_put_text(r, b, style->indent);
}

void jj_put_json(struct run *r, struct builder *b, struct value v, const struct json_style *style, int level)
{
    jj_enter(r);
    switch (v.type) {
    case V_NONE: jj_put_format(r, b, v.trusted, "null"); break;
    case V_BOOL: jj_put_format(r, b, v.trusted, v.boolean ? "true" : "false"); break;
    case V_INT: jj_put_format(r, b, v.trusted, "%lld", (long long)v.integer); break;
    case V_FLOAT: put_float(r, b, v.real, v.trusted, true); break;
    case V_TEXT: put_json_string(r, b, *v.text, style->ascii); break;
    case V_LIST: case V_TUPLE: case V_STREAM: {
        const struct list *items = jj_iterate(r, v);
        jj_put(r, b, "[", 1, false);
        for (size_t i = 0; i < items->n; i++) {
            if (i)
                jj_put_text(r, b, style->item);
            put_line(r, b, style, level + 1);
            jj_put_json(r, b, items->v[i], style, level + 1);
        }
        if (items->n)
            put_line(r, b, style, level);
        jj_put(r, b, "]", 1, false);
        break;
    }
    case V_DICT: {
        struct dict d = *v.dict;
        if (style->sort_keys && d.n) {
            d.v = jj_alloc(r, d.n, sizeof *d.v);
            memcpy(d.v, v.dict->v, d.n * sizeof *d.v);
            jj_sort_pairs(r, d.v, d.n, false);
        }
        jj_put(r, b, "{", 1, false);
        for (size_t i = 0; i < d.n; i++) {
            if (i)
                jj_put_text(r, b, style->item);
            put_line(r, b, style, level + 1);
            struct builder key = {0};
            if (d.v[i].key.type > V_TEXT)
                jj_die(r, "tojson: %s cannot be a key", jj_type_word(d.v[i].key));
            else if (d.v[i].key.type == V_TEXT)
                jj_put_text(r, &key, *d.v[i].key.text);
            else
                jj_put_json(r, &key, d.v[i].key, style, 0);
            put_json_string(r, b, built(&key), style->ascii);
            jj_put_text(r, b, style->key);
            jj_put_json(r, b, d.v[i].value, style, level + 1);
        }
        if (d.n)
            put_line(r, b, style, level);
        jj_put(r, b, "}", 1, false);
        break;
    }
    case V_UNDEFINED: jj_die_undefined(r, v);
    default: jj_die(r, "tojson: %s has no JSON form", jj_type_word(v));
    }
    jj_leave(r);
}

/* ---- arithmetic */

static struct value concat(struct run *r, struct text a, struct text b)
{
    struct builder out = {0};
    jj_put_text(r, &out, a);
    jj_put_text(r, &out, b);
    return jj_string(r, built(&out));
}

static struct value join_lists(struct run *r, struct value a, struct value b, enum type type)
{
    struct value out = jj_new_list(r, type);
    for (size_t i = 0; i < a.list->n; i++)
        jj_push(r, out.list, a.list->v[i]);
    for (size_t i = 0; i < b.list->n; i++)
        jj_push(r, out.list, b.list->v[i]);
    return out;
}

static struct value repeat(struct run *r, struct value v, int64_t times)
{
    struct builder out = {0};
    struct value items = jj_new_list(r, v.type);
    bool empty = v.type == V_TEXT ? v.text->n == 0 : v.list->n == 0;
    for (int64_t k = 0; k < times && !empty; k++) {
        jj_spend(r, 1);
        if (v.type == V_TEXT)
            jj_put_text(r, &out, *v.text);
        for (size_t i = 0; v.type != V_TEXT && i < v.list->n; i++)
            jj_push(r, items.list, v.list->v[i]);
    }
    return v.type == V_TEXT ? jj_string(r, built(&out)) : items;
}

struct value jj_int_arith(struct run *r, char op, int64_t a, int64_t b, bool trusted)
{
    int64_t out = 0;
    bool wrapped = false;
    if ((op == 'd' || op == '%') && b == 0)
        jj_die(r, "division by zero");
    switch (op) {
    case '+': wrapped = __builtin_add_overflow(a, b, &out); break;
    case '-': wrapped = __builtin_sub_overflow(a, b, &out); break;
    case '*': wrapped = __builtin_mul_overflow(a, b, &out); break;
    case 'd':                          /* rounds down */
        wrapped = a == INT64_MIN && b == -1;
        out = wrapped ? 0 : a / b - (a % b != 0 && (a < 0) != (b < 0));
        break;
    case '%':
        out = b == -1 ? 0 : a % b;
        out += out != 0 && (out < 0) != (b < 0) ? b : 0;
        break;
    case '^':
        out = 1;
        if (a == 0 || a == 1 || a == -1)
            b = b > 1 ? 2 - b % 2 : b;
        for (; b > 0 && !wrapped; b--)
            wrapped = __builtin_mul_overflow(out, a, &out);
        break;
    }
    if (wrapped)
        jj_die(r, "an integer does not fit 64 bits");
    return integer(out, trusted);
}

static struct value float_arith(struct run *r, char op, double a, double b, bool trusted)
{
    if ((op == '/' || op == 'd' || op == '%') && b == 0)
        jj_die(r, "division by zero");
    double rest, whole_part;
    switch (op) {
    case '+': return real(a + b, trusted);
    case '-': return real(a - b, trusted);
    case '*': return real(a * b, trusted);
    case '/': return real(a / b, trusted);
    case '^':
        if ((a < 0 && b != floor(b)) || (a == 0 && b < 0))
            jj_die(r, "a power is not a real number");
        return real(pow(a, b), trusted);
    default:
        rest = fmod(a, b);
        if (rest != 0 && (rest < 0) != (b < 0))
            rest += b;
        if (op == '%')
            return real(rest != 0 ? rest : copysign(0, b), trusted);
        whole_part = floor((a - rest) / b + 0.5);
        return real(whole_part != 0 ? whole_part : copysign(0, a / b), trusted);
    }
}

struct value jj_binary(struct run *r, char op, struct value a, struct value b)
{
    if (op == '~')
        return concat(r, jj_to_text(r, a), jj_to_text(r, b));
    if (a.type == V_UNDEFINED || b.type == V_UNDEFINED)
        jj_die_undefined(r, a.type == V_UNDEFINED ? a : b);
    if (is_number(a) && is_number(b)) {
        bool trusted = a.trusted && b.trusted;
        if (is_whole(a) && is_whole(b) && op != '/' && !(op == '^' && whole(b) < 0))
            return jj_int_arith(r, op, whole(a), whole(b), trusted);
        return float_arith(r, op, number(a), number(b), trusted);
    }
    if (op == '+' && a.type == V_TEXT && b.type == V_TEXT)
        return concat(r, *a.text, *b.text);
    if (op == '+' && a.type == b.type && (a.type == V_LIST || a.type == V_TUPLE))
        return join_lists(r, a, b, a.type);
    if (op == '*' && (a.type == V_TEXT || a.type == V_LIST || a.type == V_TUPLE) && is_whole(b))
        return repeat(r, a, whole(b));
    if (op == '*' && (b.type == V_TEXT || b.type == V_LIST || b.type == V_TUPLE) && is_whole(a))
        return repeat(r, b, whole(a));
    jj_die(r, "'%s' does not work on %s and %s", op == 'd' ? "//" : op == '^' ? "**" : (char[]){op, 0}, jj_type_word(a),
        jj_type_word(b));
}
