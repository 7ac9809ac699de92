/* quant.h - the block formats of GGUF tensors and their scalar dequantisers: the oracle of every kernel.
 *
 * A row of a tensor is a whole number of blocks, one after the other, without padding; all numbers are little-endian.
 * In the drawings a byte is written most significant bit first, and w0, w1, ... are the weights of a block in order.
 * Every product and sum of a dequantiser is rounded to float in the order written here, so that the result has the
 * same bits everywhere; build with -ffp-contract=off. */
#ifndef QUANT_H
#define QUANT_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum tensor_type {                     /* numbered as in GGUF */
    T_F32 = 0, T_F16 = 1, T_Q4_0 = 2, T_Q4_1 = 3, T_Q5_0 = 6, T_Q5_1 = 7, T_Q8_0 = 8,
    T_Q2_K = 10, T_Q3_K = 11, T_Q4_K = 12, T_Q5_K = 13, T_Q6_K = 14, T_IQ4_NL = 20, T_IQ4_XS = 23, T_BF16 = 30
};

struct type_info {
    const char *name;                  /* as GGUF tools print it: "Q4_K" */
    int block;                         /* weights in a block */
    int bytes;                         /* bytes of a block */
    void (*dequantise)(const void *src, float *dst, size_t n);   /* n weights, a multiple of `block` */
};

/* NULL for a type that is not supported. */
const struct type_info *type_info(uint32_t type);
/* The name of any type number that GGUF ever used ("IQ2_XXS"), for messages; "unknown" otherwise. */
const char *type_name(uint32_t type);

/* IEEE half precision: 1 sign bit, 5 exponent bits (bias 15), 10 fraction bits. Exact; a NaN keeps its payload. */
static inline float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3FF, bits;
    float f;
    if (exponent == 0) {               /* zero or subnormal: a multiple of 2^-24, always a normal float */
        f = (float)fraction * 0x1p-24f;
        memcpy(&bits, &f, 4);
    } else if (exponent == 31) {       /* infinity or NaN */
        bits = 0x7F800000 | fraction << 13;
    } else {
        bits = (exponent + 127 - 15) << 23 | fraction << 13;
    }
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}

/* Rounds to nearest, ties to even; too large becomes infinity; a NaN becomes quiet and keeps its upper payload bits. */
static inline uint16_t f32_to_f16(float f)
{
    uint32_t bits, half;
    memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) {
        half = 0x7E00 | (bits >> 13 & 0x1FF);
    } else if (bits >= 0x477FF000) {   /* 65520, halfway between the largest half and 2^16 */
        half = 0x7C00;
    } else if (bits >= 0x38800000) {   /* 2^-14, the smallest normal half: a carry runs into the exponent, rightly */
        half = (bits - ((uint32_t)(127 - 15) << 23) + 0xFFF + (bits >> 13 & 1)) >> 13;
    } else {                           /* one step of a float in [0.5, 1) is 2^-24, the step of subnormal halves */
        memcpy(&f, &bits, 4);
        f += 0.5f;
        memcpy(&bits, &f, 4);
        half = bits - 0x3F000000;
    }
    return (uint16_t)(sign | half);
}

/* ---- blocks of 32 weights: w = d*q, or d*q + m ------------------------------------------------------------------
 *
 * Nibbles: byte i of qs holds w[i] in its low and w[i+16] in its high half. Fifth bits: bit i of qh belongs to w[i].
 *
 *     qs   0: w16 w16 w16 w16 w0  w0  w0  w0       qh   0: w7  w6  w5  w4  w3  w2  w1  w0
 *         15: w31 w31 w31 w31 w15 w15 w15 w15           3: w31 w30 w29 w28 w27 w26 w25 w24
 */
struct block_q4_0 { uint16_t d; uint8_t qs[16]; };                           /* w = d * (q - 8) */
struct block_q4_1 { uint16_t d, m; uint8_t qs[16]; };                        /* w = d * q + m */
struct block_q5_0 { uint16_t d; uint8_t qh[4], qs[16]; };                    /* w = d * (q - 16) */
struct block_q5_1 { uint16_t d, m; uint8_t qh[4], qs[16]; };                 /* w = d * q + m */
struct block_q8_0 { uint16_t d; int8_t qs[32]; };                            /* w = d * q */
struct block_iq4_nl { uint16_t d; uint8_t qs[16]; };                         /* w = d * iq4_values[q] */

/* ---- blocks of 256 weights: groups of 16 or 32 have a small integer scale each ---------------------------------
 *
 * Q2_K: 16 groups of 16; w = (d * low nibble of scales[group]) * q - dmin * high nibble.
 *     qs, 32 bytes per 128 weights, byte i of the first:  w[96+i] w[96+i] w[64+i] w[64+i] w[32+i] w[32+i] w[i] w[i]
 * Q3_K: 16 groups of 16; w = (d * (scale - 32)) * (q - 4), q's low two bits laid out as in Q2_K.
 *     third bits: bit g of hmask[i] belongs to w[32*g+i]; scales: see q3_k_scale.
 * Q4_K: 8 groups of 32; w = (d * scale) * q - dmin * min; scales: see k_scale_min.
 *     qs, 32 bytes per 64 weights, byte i of the first:   w[32+i] in the high half, w[i] in the low half
 * Q5_K: as Q4_K; the fifth bit of w[32*g+i] is bit g of qh[i].
 * Q6_K: 16 groups of 16; w = (d * scales[group]) * (q - 32).
 *     ql, 64 bytes per 128 weights, byte i of the first:  w[64+i] in the high half, w[i] in the low half (i < 64)
 *     qh, 32 bytes per 128 weights, byte i of the first:  w[96+i] w[96+i] w[64+i] w[64+i] w[32+i] w[32+i] w[i] w[i]
 * IQ4_XS: 8 groups of 32, each with nibbles as in a block of 32; w = (d * (scale - 32)) * iq4_values[q].
 *     scale of group g: low four bits in nibble g of scales_l, high two in bits 2g+1 and 2g of scales_h. */
struct block_q2_k { uint8_t scales[16], qs[64]; uint16_t d, dmin; };
struct block_q3_k { uint8_t hmask[32], qs[64], scales[12]; uint16_t d; };
struct block_q4_k { uint16_t d, dmin; uint8_t scales[12], qs[128]; };
struct block_q5_k { uint16_t d, dmin; uint8_t scales[12], qh[32], qs[128]; };
struct block_q6_k { uint8_t ql[128], qh[64]; int8_t scales[16]; uint16_t d; };
struct block_iq4_xs { uint16_t d, scales_h; uint8_t scales_l[4], qs[128]; };

static_assert(sizeof(struct block_q4_0) == 18, "Q4_0 block");
static_assert(sizeof(struct block_q4_1) == 20, "Q4_1 block");
static_assert(sizeof(struct block_q5_0) == 22, "Q5_0 block");
static_assert(sizeof(struct block_q5_1) == 24, "Q5_1 block");
static_assert(sizeof(struct block_q8_0) == 34, "Q8_0 block");
static_assert(sizeof(struct block_iq4_nl) == 18, "IQ4_NL block");
static_assert(sizeof(struct block_q2_k) == 84, "Q2_K block");
static_assert(sizeof(struct block_q3_k) == 110, "Q3_K block");
static_assert(sizeof(struct block_q4_k) == 144, "Q4_K block");
static_assert(sizeof(struct block_q5_k) == 176, "Q5_K block");
static_assert(sizeof(struct block_q6_k) == 210, "Q6_K block");
static_assert(sizeof(struct block_iq4_xs) == 136, "IQ4_XS block");

/* The 16 levels of IQ4_NL and IQ4_XS. */
extern const int8_t iq4_values[16];

/* Scale and minimum (6 bits each) of group g = 0..7 of Q4_K and Q5_K. Scale bits are S, minimum bits M; the lower
 * case ones belong to group g+4:
 *
 *     s[g]:   s5 s4 S5 S4 S3 S2 S1 S0     s[g+4]: m5 m4 M5 M4 M3 M2 M1 M0     s[g+8]: m3 m2 m1 m0 s3 s2 s1 s0     g < 4
 */
static inline void k_scale_min(const uint8_t s[12], int g, int *scale, int *min)
{
    if (g < 4) {
        *scale = s[g] & 63;
        *min = s[g + 4] & 63;
    } else {
        *scale = (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        *min = s[g + 4] >> 4 | s[g] >> 6 << 4;
    }
}

/* Scale of group g = 0..15 of Q3_K, -32 to 31. Six bits: the low four are nibble g (byte g % 8, high half from g = 8
 * on), the high two are pair g / 4 of byte 8 + g % 4, counted from the low end. */
static inline int q3_k_scale(const uint8_t s[12], int g)
{
    return ((s[g % 8] >> g / 8 * 4 & 15) | (s[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32;
}

/* Scale of group g = 0..7 of IQ4_XS, -32 to 31. */
static inline int iq4_xs_scale(const struct block_iq4_xs *b, int g)
{
    return ((b->scales_l[g / 2] >> g % 2 * 4 & 15) | (b->scales_h >> 2 * g & 3) << 4) - 32;
}

#endif
