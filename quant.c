/* quant.c - scalar dequantisers and the table of tensor types. The formats are drawn in quant.h. */
#include "quant.h"

const int8_t iq4_values[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

/* ---- plain types ------------------------------------------------------------------------------------------------ */

static void dequantise_f32(const void *src, float *dst, size_t n)
{
    memcpy(dst, src, n * sizeof *dst);
}

static void dequantise_f16(const void *src, float *dst, size_t n)
{
    const uint16_t *h = src;
    for (size_t i = 0; i < n; i++) dst[i] = f16_to_f32(h[i]);
}

/* bfloat16 is the upper half of a float. */
static void dequantise_bf16(const void *src, float *dst, size_t n)
{
    const uint16_t *h = src;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)h[i] << 16;
        memcpy(&dst[i], &bits, 4);
    }
}

/* ---- blocks of 32 ----------------------------------------------------------------------------------------------- */

/* The i-th of 32 nibbles, and the i-th of 32 fifth bits at its place. */
static int nibble(const uint8_t qs[16], int i) { return qs[i % 16] >> i / 16 * 4 & 15; }
static int fifth(const uint8_t qh[4], int i) { return (qh[i / 8] >> i % 8 & 1) << 4; }

static void dequantise_q4_0(const void *src, float *dst, size_t n)
{
    for (const struct block_q4_0 *b = src; n; b++, n -= 32) {
        float d = f16_to_f32(b->d);
        for (int i = 0; i < 32; i++) *dst++ = d * (float)(nibble(b->qs, i) - 8);
    }
}

static void dequantise_q4_1(const void *src, float *dst, size_t n)
{
    for (const struct block_q4_1 *b = src; n; b++, n -= 32) {
        float d = f16_to_f32(b->d), m = f16_to_f32(b->m);
        for (int i = 0; i < 32; i++) *dst++ = d * (float)nibble(b->qs, i) + m;
    }
}

static void dequantise_q5_0(const void *src, float *dst, size_t n)
{
    for (const struct block_q5_0 *b = src; n; b++, n -= 32) {
        float d = f16_to_f32(b->d);
        for (int i = 0; i < 32; i++) *dst++ = d * (float)((nibble(b->qs, i) | fifth(b->qh, i)) - 16);
    }
}

static void dequantise_q5_1(const void *src, float *dst, size_t n)
{
    for (const struct block_q5_1 *b = src; n; b++, n -= 32) {
        float d = f16_to_f32(b->d), m = f16_to_f32(b->m);
        for (int i = 0; i < 32; i++) *dst++ = d * (float)(nibble(b->qs, i) | fifth(b->qh, i)) + m;
    }
}

static void dequantise_q8_0(const void *src, float *dst, size_t n)
{
    for (const struct block_q8_0 *b = src; n; b++, n -= 32) {
        float d = f16_to_f32(b->d);
        for (int i = 0; i < 32; i++) *dst++ = d * (float)b->qs[i];
    }
}

static void dequantise_iq4_nl(const void *src, float *dst, size_t n)
{
    for (const struct block_iq4_nl *b = src; n; b++, n -= 32) {
        float d = f16_to_f32(b->d);
        for (int i = 0; i < 32; i++) *dst++ = d * (float)iq4_values[nibble(b->qs, i)];
    }
}

/* ---- blocks of 256 ---------------------------------------------------------------------------------------------- */

/* Weight i's two bits in the layout that Q2_K, Q3_K (low bits) and Q6_K (high bits) share. */
static int two_bits(const uint8_t qs[64], int i) { return qs[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3; }

static void dequantise_q2_k(const void *src, float *dst, size_t n)
{
    for (const struct block_q2_k *b = src; n; b++, n -= 256) {
        float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
        for (int i = 0; i < 256; i++) {
            float scale = d * (float)(b->scales[i / 16] & 15), min = dmin * (float)(b->scales[i / 16] >> 4);
            *dst++ = scale * (float)two_bits(b->qs, i) - min;
        }
    }
}

static void dequantise_q3_k(const void *src, float *dst, size_t n)
{
    for (const struct block_q3_k *b = src; n; b++, n -= 256) {
        float d = f16_to_f32(b->d);
        for (int i = 0; i < 256; i++) {
            float scale = d * (float)q3_k_scale(b->scales, i / 16);
            int third = (b->hmask[i % 32] >> i / 32 & 1) << 2;
            *dst++ = scale * (float)((two_bits(b->qs, i) | third) - 4);
        }
    }
}

static void dequantise_q4_k(const void *src, float *dst, size_t n)
{
    for (const struct block_q4_k *b = src; n; b++, n -= 256) {
        float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
        for (int g = 0; g < 8; g++) {
            int s, m;
            k_scale_min(b->scales, g, &s, &m);
            float scale = d * (float)s, min = dmin * (float)m;
            for (int i = 0; i < 32; i++) {
                int q = b->qs[g / 2 * 32 + i] >> g % 2 * 4 & 15;
                *dst++ = scale * (float)q - min;
            }
        }
    }
}

static void dequantise_q5_k(const void *src, float *dst, size_t n)
{
    for (const struct block_q5_k *b = src; n; b++, n -= 256) {
        float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
        for (int g = 0; g < 8; g++) {
            int s, m;
            k_scale_min(b->scales, g, &s, &m);
            float scale = d * (float)s, min = dmin * (float)m;
            for (int i = 0; i < 32; i++) {
                int q = (b->qs[g / 2 * 32 + i] >> g % 2 * 4 & 15) | (b->qh[i] >> g & 1) << 4;
                *dst++ = scale * (float)q - min;
            }
        }
    }
}

static void dequantise_q6_k(const void *src, float *dst, size_t n)
{
    for (const struct block_q6_k *b = src; n; b++, n -= 256) {
        float d = f16_to_f32(b->d);
        for (int i = 0; i < 256; i++) {
            float scale = d * (float)b->scales[i / 16];
            int low = b->ql[i / 128 * 64 + i % 64] >> i % 128 / 64 * 4 & 15;
            *dst++ = scale * (float)((low | two_bits(b->qh, i) << 4) - 32);
        }
    }
}

static void dequantise_iq4_xs(const void *src, float *dst, size_t n)
{
    for (const struct block_iq4_xs *b = src; n; b++, n -= 256) {
        float d = f16_to_f32(b->d);
        for (int i = 0; i < 256; i++) {
            float scale = d * (float)iq4_xs_scale(b, i / 32);
            *dst++ = scale * (float)iq4_values[nibble(b->qs + i / 32 * 16, i % 32)];
        }
    }
}

/* ---- the table -------------------------------------------------------------------------------------------------- */

static const struct type_info types[] = {
    [T_F32]    = { "F32", 1, 4, dequantise_f32 },
    [T_F16]    = { "F16", 1, 2, dequantise_f16 },
    [T_Q4_0]   = { "Q4_0", 32, sizeof(struct block_q4_0), dequantise_q4_0 },
    [T_Q4_1]   = { "Q4_1", 32, sizeof(struct block_q4_1), dequantise_q4_1 },
    [T_Q5_0]   = { "Q5_0", 32, sizeof(struct block_q5_0), dequantise_q5_0 },
    [T_Q5_1]   = { "Q5_1", 32, sizeof(struct block_q5_1), dequantise_q5_1 },
    [T_Q8_0]   = { "Q8_0", 32, sizeof(struct block_q8_0), dequantise_q8_0 },
    [T_Q2_K]   = { "Q2_K", 256, sizeof(struct block_q2_k), dequantise_q2_k },
    [T_Q3_K]   = { "Q3_K", 256, sizeof(struct block_q3_k), dequantise_q3_k },
    [T_Q4_K]   = { "Q4_K", 256, sizeof(struct block_q4_k), dequantise_q4_k },
    [T_Q5_K]   = { "Q5_K", 256, sizeof(struct block_q5_k), dequantise_q5_k },
    [T_Q6_K]   = { "Q6_K", 256, sizeof(struct block_q6_k), dequantise_q6_k },
    [T_IQ4_NL] = { "IQ4_NL", 32, sizeof(struct block_iq4_nl), dequantise_iq4_nl },
    [T_IQ4_XS] = { "IQ4_XS", 256, sizeof(struct block_iq4_xs), dequantise_iq4_xs },
    [T_BF16]   = { "BF16", 1, 2, dequantise_bf16 },
};

/* Every number that GGUF assigned, those withdrawn since included, so that an old or a new file can be named. */
static const char *const names[] = {
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32",
    "I64", "F64", "IQ1_M", "BF16", "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8",
    "IQ4_NL_8_8", "MXFP4", "NVFP4", "Q1_0", "Q2_0"
};

const struct type_info *type_info(uint32_t type)
{
    return type < sizeof types / sizeof *types && types[type].name ? &types[type] : NULL;
}

const char *type_name(uint32_t type)
{
    return type < sizeof names / sizeof *names ? names[type] : "unknown";
}
