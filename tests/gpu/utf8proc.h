/* utf8proc.h - what base.c asks of utf8proc, for tests/gpu.sh: a machine with a GPU may lack the library. */
#ifndef GPU_UTF8PROC_H
#define GPU_UTF8PROC_H

#include <stddef.h>
#include <stdint.h>

typedef int32_t utf8proc_int32_t;
typedef uint8_t utf8proc_uint8_t;
typedef ptrdiff_t utf8proc_ssize_t;

/* The character at p, a NUL-terminated text, and its bytes; -1 where it is none. */
static inline utf8proc_ssize_t utf8proc_iterate(const utf8proc_uint8_t *p, utf8proc_ssize_t n, utf8proc_int32_t *c)
{
    static const int32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
    int bytes = *p < 0x80 ? 1 : *p >> 5 == 6 ? 2 : *p >> 4 == 14 ? 3 : *p >> 3 == 30 ? 4 : -1;
    (void)n;
    *c = bytes < 0 ? -1 : bytes == 1 ? *p : *p & (0x7f >> bytes);
    for (int i = 1; i < bytes; i++) {
        if (p[i] >> 6 != 2) return *c = -1, -1;
        *c = *c << 6 | (p[i] & 63);
    }
    if (bytes < 0 || *c < least[bytes] || *c > 0x10ffff || *c >> 11 == 27) return *c = -1, -1;
    return bytes;
}

#endif
