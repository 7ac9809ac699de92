/* utf8.h - steps through bytes that may or may not be UTF-8 (the Unicode Standard, table 3-7: no overlong forms, no
 * surrogates, nothing above U+10FFFF). */
#ifndef UTF8_H
#define UTF8_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* What stands at p[0..n), n >= 1: a positive result is the length of one whole character; 0 means that all n bytes are
 * the beginning of a character whose rest is missing; -k means that the first k bytes belong to no character (k is the
 * length of the longest beginning of one, so that each such piece is shown as one U+FFFD, as Unicode recommends). */
static inline int utf8_step(const char *p, size_t n)
{
    const unsigned char *s = (const unsigned char *)p;
    if (s[0] < 0x80) return 1;
    if (s[0] < 0xC2 || s[0] > 0xF4) return -1;
    int length = s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4;
    unsigned char low = s[0] == 0xE0 ? 0xA0 : s[0] == 0xF0 ? 0x90 : 0x80;      /* bounds of the second byte */
    unsigned char high = s[0] == 0xED ? 0x9F : s[0] == 0xF4 ? 0x8F : 0xBF;
    for (int i = 1; i < length; i++, low = 0x80, high = 0xBF) {
        if ((size_t)i == n) return 0;
        if (s[i] < low || s[i] > high) return -i;
    }
    return length;
}

/* Length of the longest beginning of p[0..n) that is whole characters. */
static inline size_t utf8_valid(const char *p, size_t n)
{
    size_t at = 0;
    while (at < n) {
        uint64_t eight;
        if (n - at >= 8 && (memcpy(&eight, p + at, 8), !(eight & 0x8080808080808080u))) {
            at += 8;
            continue;
        }
        int step = utf8_step(p + at, n - at);
        if (step <= 0) break;
        at += (size_t)step;
    }
    return at;
}

#endif
