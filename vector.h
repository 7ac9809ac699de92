/* vector.h - a float vector of the width of the instruction set that includes it (16, 8 or 4 lanes).
 *
 * Arithmetic is the compiler's own on vector types; what it cannot express (fused multiply-add, maximum, half floats)
 * has one wrapper each. Every function gives the same bits for the same lane values, whatever the compiler. */
#ifndef VECTOR_H
#define VECTOR_H

#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "quant.h"

#if defined __AVX512F__
enum { VW = 16 };
#elif defined __AVX2__
enum { VW = 8 };
#else
enum { VW = 4 };
#endif

#define INLINE static inline __attribute__((always_inline, unused))

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));

INLINE vf v_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void v_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf v_set(float x) { return x - (vf){ 0 }; }

#if defined __AVX512F__
INLINE vf v_fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf v_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }       /* b where either is NaN */
INLINE vf v_min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vf v_half(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INLINE vf v_bf16(const uint16_t *p)
{
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16);
}
INLINE vf v_fp8(const uint8_t *p)      /* e4m3: moved up, its bits are a half float of 1/256 the value */
{
    __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)p));
    x = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8),
                        _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7));
    return (vf)_mm512_cvtph_ps(x) * 256;
}
INLINE vf v_int8(const int8_t *p)
{
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}
INLINE vf v_int4(const uint8_t *p, bool high)      /* the high or the low nibbles, -8..7 */
{
    __m128i x = _mm_loadu_si128((const void *)p), eight = _mm_set1_epi8(8);
    x = _mm_and_si128(high ? _mm_srli_epi16(x, 4) : x, _mm_set1_epi8(15));
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_sub_epi8(_mm_xor_si128(x, eight), eight)));
}
INLINE vi v_bytes(const uint8_t *p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)); }
#elif defined __AVX2__
INLINE vf v_fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf v_max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf v_min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vf v_half(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
INLINE vf v_bf16(const uint16_t *p)
{
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16);
}
INLINE vf v_fp8(const uint8_t *p)
{
    __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)p));
    x = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8),
                     _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7));
    return (vf)_mm256_cvtph_ps(x) * 256;
}
INLINE vf v_int8(const int8_t *p)
{
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
}
INLINE vf v_int4(const uint8_t *p, bool high)
{
    __m128i x = _mm_loadl_epi64((const void *)p), eight = _mm_set1_epi8(8);
    x = _mm_and_si128(high ? _mm_srli_epi16(x, 4) : x, _mm_set1_epi8(15));
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_sub_epi8(_mm_xor_si128(x, eight), eight)));
}
INLINE vi v_bytes(const uint8_t *p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)); }
#else
INLINE vf v_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf v_max(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
INLINE vf v_min(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
INLINE vf v_half(const uint16_t *p)
{
    return (vf){ f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3]) };
}
INLINE vf v_bf16(const uint16_t *p)
{
    vi x = { p[0], p[1], p[2], p[3] };
    return (vf)(x << 16);
}
INLINE vf v_fp8(const uint8_t *p)
{
    uint16_t h[VW];
    for (int i = 0; i < VW; i++) h[i] = (uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
    return v_half(h) * 256;
}
INLINE vf v_int8(const int8_t *p) { return (vf){ p[0], p[1], p[2], p[3] }; }
INLINE vf v_int4(const uint8_t *p, bool high)
{
    int8_t x[VW];
    for (int i = 0; i < VW; i++) x[i] = (int8_t)(((high ? p[i] >> 4 : p[i] & 15) ^ 8) - 8);
    return v_int8(x);
}
INLINE vi v_bytes(const uint8_t *p) { return (vi){ p[0], p[1], p[2], p[3] }; }
#endif

/* int4's scales (kvcache.h) */
INLINE vf v_small_scale(const uint8_t *p) { return (vf)((v_bytes(p) << 20) + (112 << 23)); }

#if defined __FMA__
INLINE float s_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
INLINE float s_fma(float a, float b, float c) { return a * b + c; }
#endif

#if defined __F16C__
INLINE float s_half(uint16_t h) { return _cvtsh_ss(h); }
INLINE uint16_t s_to_half(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
#else
INLINE float s_half(uint16_t h) { return f16_to_f32(h); }
INLINE uint16_t s_to_half(float f) { return f32_to_f16(f); }
#endif

/* The lanes folded onto each other by an operation, upper half onto lower half: the tree is fixed by the width. */
#if defined __AVX512F__
#define FOLD8(v, op) _mm256_##op##_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1))
#elif defined __AVX2__
#define FOLD8(v, op) (__m256)v
#endif
#if defined __AVX2__
#define FOLD4(v, op) _mm_##op##_ps(_mm256_castps256_ps128(FOLD8(v, op)), _mm256_extractf128_ps(FOLD8(v, op), 1))
#else
#define FOLD4(v, op) (__m128)v
#endif
INLINE float v_sum(vf v)
{
    __m128 sum = FOLD4(v, add);
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}

/* The same for each of four vectors. */
#define FOLD_FOUR(v, op) \
    __m128 a = FOLD4(v[0], op), b = FOLD4(v[1], op), c = FOLD4(v[2], op), d = FOLD4(v[3], op); \
    __m128 ab = _mm_##op##_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)); \
    __m128 cd = _mm_##op##_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c)); \
    _mm_storeu_ps(out, _mm_##op##_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xDD)))
INLINE void v_sum4(const vf v[4], float out[4]) { FOLD_FOUR(v, add); }
INLINE void v_highest4(const vf v[4], float out[4]) { FOLD_FOUR(v, max); }

/* exp(x): x = n ln 2 + r, |r| <= ln 2 / 2, the Taylor polynomial of degree 7 in r (error below 2 ulp), 2^n through the
 * exponent bits. Below -87.3 the result is 0, above 88.3 it is about 2e38 (scores never get there: they are at most 0);
 * NaN stays NaN. */
INLINE vf v_exp(vf x)
{
    vf c = v_min(v_set(88.3f), v_max(v_set(-87.3f), x));
    vf t = v_fma(c, v_set(1.44269504f), v_set(12582912.0f));  /* 1.5 * 2^23: n sits in the low bits of t */
    vf n = t - v_set(12582912.0f);
    vf r = v_fma(n, v_set(-0.693359375f), c);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vf p = v_set(1.0f / 5040);
    p = v_fma(p, r, v_set(1.0f / 720));
    p = v_fma(p, r, v_set(1.0f / 120));
    p = v_fma(p, r, v_set(1.0f / 24));
    p = v_fma(p, r, v_set(1.0f / 6));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1));
    p = v_fma(p, r, v_set(1));
    vi e;
    memcpy(&e, &t, sizeof e);
    e = (e << 23) + (127 << 23);       /* the bits of 2^n */
    vf s;
    memcpy(&s, &e, sizeof s);
    vf y = p * s;
    vi live = ~(x < v_set(-87.3f));    /* all ones, or zero where the result underflows */
    vi yb;
    memcpy(&yb, &y, sizeof yb);
    yb &= live;
    memcpy(&y, &yb, sizeof y);
    return y;
}
INLINE float s_exp(float x) { return v_exp(v_set(x))[0]; }

#endif
