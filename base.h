/* base.h - what every file needs: one error type, checked sizes, allocation, SHA-256.
 *
 * A function that can fail takes `struct error *` last and returns false or NULL after filling it; the text is one
 * sentence that says what is wrong, where, and what to do. Nothing below main() prints or exits. */
#ifndef BASE_H
#define BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { GEN_OK = 0, GEN_RUN = 1, GEN_USAGE = 2, GEN_MODEL = 3 };   /* process exit codes, also struct error's code */

struct error {
    int code;          /* GEN_RUN, GEN_USAGE or GEN_MODEL; 0 = no error */
    char text[500];    /* one sentence, no line end; control bytes of quoted file content are shown as '?' */
};

/* Fills *e and returns false, so that a caller can write `return fail(e, ...)`. */
bool fail(struct error *e, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* a*b and a+b in size_t; false when the result would wrap. */
static inline bool size_mul(size_t a, size_t b, size_t *out) { return !__builtin_mul_overflow(a, b, out); }
static inline bool size_add(size_t a, size_t b, size_t *out) { return !__builtin_add_overflow(a, b, out); }

/* Zeroed memory for n items of `size` bytes, aligned to 64 bytes; NULL after filling *e ("cannot allocate N bytes
 * for WHAT"). Freed with free(). */
void *alloc_zeroed(size_t n, size_t size, const char *what, struct error *e);

/* Zeroed memory that costs nothing until it is touched, for what may grow large: address space of whole pages. NULL
 * after filling *e. `bytes` may be 0. */
void *reserve_bytes(size_t bytes, const char *what, struct error *e);
void release_bytes(void *p, size_t bytes);                                   /* p may be NULL */

/* A growable byte string. `data` is always NUL-terminated one byte past `len` once anything was added. */
struct bytes { char *data; size_t len, cap; };
bool bytes_add(struct bytes *b, const void *data, size_t n);                 /* false when memory is out */
bool bytes_printf(struct bytes *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void bytes_free(struct bytes *b);

/* A growable list of token ids. */
struct ids { int32_t *data; size_t len, cap; };
bool ids_add(struct ids *v, int32_t id);                                     /* false when memory is out */
void ids_free(struct ids *v);

double now_seconds(void);                                                    /* monotonic clock, seconds */
void hex_text(const uint8_t digest[32], char out[65]);                       /* lower-case hex and NUL */
void sha256_hex(const void *data, size_t n, char out[65]);                   /* the same of the data's SHA-256 */

#endif
