/* base.c - errors, allocation, growable bytes and ids, the clock, SHA-256. */
#define _GNU_SOURCE
#include "base.h"

#include <nettle/sha2.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <utf8proc.h>

/* Control characters (C1 included, which some terminals obey) and bytes that are not UTF-8 become '?'. */
static void make_printable(char *text)
{
    for (char *p = text; *p;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)p, -1, &c);
        if (n < 1) n = 1, c = 0;
        if (c < 0x20 || (c >= 0x7F && c < 0xA0)) memset(p, '?', (size_t)n);
        p += n;
    }
}

bool fail(struct error *e, int code, const char *format, ...)
{
    char text[sizeof e->text];    /* an argument may point into e->text, as when a caller adds a prefix */
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n < 0) snprintf(text, sizeof text, "an error whose message could not be formatted");
    if (n >= (int)sizeof text) memcpy(text + sizeof text - 4, "...", 4);
    make_printable(text);
    memcpy(e->text, text, strlen(text) + 1);
    e->code = code;
    return false;
}

void *alloc_zeroed(size_t n, size_t size, const char *what, struct error *e)
{
    size_t bytes, padded;
    bool fits = size_mul(n, size, &bytes) && size_add(bytes, 63, &padded);
    void *p = NULL;
    if (fits) {
        padded &= ~(size_t)63;
        p = aligned_alloc(64, padded ? padded : 64);
    }
    if (!p) {
        if (fits) fail(e, GEN_RUN, "cannot allocate %zu bytes for %s", bytes, what);
        else fail(e, GEN_RUN, "cannot allocate %zu times %zu bytes for %s", n, size, what);
        return NULL;
    }
    return memset(p, 0, padded ? padded : 64);
}

void *reserve_bytes(size_t bytes, const char *what, struct error *e)
{
    void *p = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) return p;
    fail(e, GEN_RUN, "cannot reserve %zu bytes for %s", bytes, what);
    return NULL;
}

void release_bytes(void *p, size_t bytes)
{
    if (p) munmap(p, bytes ? bytes : 1);
}

/* The capacity that follows `cap` so that it holds at least `need` items: doubling, so that n additions cost O(n). */
static size_t grown(size_t cap, size_t need)
{
    size_t next = cap < 32 ? 64 : cap <= SIZE_MAX / 2 ? cap * 2 : SIZE_MAX;
    return next < need ? need : next;
}

/* Room for `extra` more bytes and the final NUL. */
static bool bytes_reserve(struct bytes *b, size_t extra)
{
    size_t need;
    if (!size_add(b->len, extra, &need) || !size_add(need, 1, &need)) return false;
    if (need <= b->cap) return true;
    size_t cap = grown(b->cap, need);
    char *data = realloc(b->data, cap);
    if (!data) return false;
    b->data = data;
    b->cap = cap;
    return true;
}

bool bytes_add(struct bytes *b, const void *data, size_t n)
{
    if (!bytes_reserve(b, n)) return false;
    if (n) memcpy(b->data + b->len, data, n);
    b->len += n;
    b->data[b->len] = '\0';
    return true;
}

bool bytes_printf(struct bytes *b, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n < 0 || !bytes_reserve(b, (size_t)n)) return false;
    va_start(args, format);
    vsnprintf(b->data + b->len, (size_t)n + 1, format, args);
    va_end(args);
    b->len += (size_t)n;
    return true;
}

void bytes_free(struct bytes *b)
{
    free(b->data);
    *b = (struct bytes){ 0 };
}

bool ids_add(struct ids *v, int32_t id)
{
    if (v->len == v->cap) {
        size_t cap = grown(v->cap, v->len + 1), bytes;
        if (!size_mul(cap, sizeof *v->data, &bytes)) return false;
        int32_t *data = realloc(v->data, bytes);
        if (!data) return false;
        v->data = data;
        v->cap = cap;
    }
    v->data[v->len++] = id;
    return true;
}

void ids_free(struct ids *v)
{
    free(v->data);
    *v = (struct ids){ 0 };
}

double now_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void hex_text(const uint8_t digest[32], char out[65])
{
    static const char digit[] = "0123456789abcdef";
    for (int i = 0; i < 32; i++) {
        out[2 * i] = digit[digest[i] >> 4];
        out[2 * i + 1] = digit[digest[i] & 15];
    }
    out[64] = '\0';
}

void sha256_hex(const void *data, size_t n, char out[65])
{
    struct sha256_ctx context;
    uint8_t digest[SHA256_DIGEST_SIZE];
    sha256_init(&context);
    sha256_update(&context, n, data);
    sha256_digest(&context, sizeof digest, digest);
    hex_text(digest, out);
}
