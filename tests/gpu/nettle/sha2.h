/* sha2.h - SHA-256 in the words of nettle, for tests/gpu.sh: a machine with a GPU may lack the library's headers. */
#ifndef GPU_SHA2_H
#define GPU_SHA2_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SHA256_DIGEST_SIZE = 32 };
struct sha256_ctx { uint32_t h[8]; uint64_t bytes; uint8_t block[64]; };

static inline uint32_t sha256_turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

/* The first 32 bits behind the point of the n-th prime's square root, or cube root. */
static inline uint32_t sha256_root(int n, int cube)
{
    int prime = 1;
    for (int left = n + 1; left; ) {
        int divisor = 2;
        for (prime++; prime % divisor; divisor++) ;
        left -= divisor == prime;
    }
    long double root = cube ? cbrtl(prime) : sqrtl(prime);
    return (uint32_t)((root - (long double)(int)root) * 4294967296.0L);
}

static inline void sha256_block(uint32_t h[8], const uint8_t *p)
{
    static uint32_t k[64];
    uint32_t w[64], s[8];
    for (int i = 0; !k[63] && i < 64; i++) k[i] = sha256_root(i, 1);
    for (int i = 0; i < 16;
         i++) w[i] = (uint32_t)p[4 * i] << 24 | p[4 * i + 1] << 16 | p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (sha256_turn(a, 7) ^ sha256_turn(a, 18) ^ a >> 3) + w[i - 7]
             + (sha256_turn(b, 17) ^ sha256_turn(b, 19) ^ b >> 10);
    }
    memcpy(s, h, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t e = s[4], a = s[0];
        uint32_t t1 = s[7] + (sha256_turn(e, 6) ^ sha256_turn(e, 11) ^ sha256_turn(e, 25)) + ((e & s[5]) ^ (~e & s[6]))
                    + k[i] + w[i];
        uint32_t t2 = (sha256_turn(a, 2) ^ sha256_turn(a, 13) ^ sha256_turn(a, 22))
                    + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) h[i] += s[i];
}

static inline void sha256_init(struct sha256_ctx *c)
{
    for (int i = 0; i < 8; i++) c->h[i] = sha256_root(i, 0);
    c->bytes = 0;
}
static inline void sha256_update(struct sha256_ctx *c, size_t n, const uint8_t *data)
{
    for (; n; n--) {
        c->block[c->bytes++ % 64] = *data++;
        if (c->bytes % 64 == 0) sha256_block(c->h, c->block);
    }
}
static inline void sha256_digest(struct sha256_ctx *c, size_t n, uint8_t *out)
{
    uint8_t pad[72] = { 0x80 };
    uint64_t bits = c->bytes * 8;
    size_t zeros = (119 - c->bytes % 64) % 64;
    for (int i = 0; i < 8; i++) pad[1 + zeros + i] = (uint8_t)(bits >> (56 - 8 * i));
    sha256_update(c, 9 + zeros, pad);
    for (size_t i = 0; i < n; i++) out[i] = (uint8_t)(c->h[i / 4] >> (24 - 8 * (i % 4)));
    sha256_init(c);
}

#endif
