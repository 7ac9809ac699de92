/* cuda_fp16.h - half precision, rounded to the nearest even. */
#ifndef EMULATOR_CUDA_FP16_H
#define EMULATOR_CUDA_FP16_H

extern "C++" {

#include "cuda_runtime.h"

namespace emulator {
static inline float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, m = h & 0x7fff;
    if (m >= 0x7c00) return as<float>(sign | 0x7f800000u | (m & 0x3ff) << 13);
    if (m < 0x400) return as<float>(sign | as<uint32_t>((float)m * 0x1p-24f));
    return as<float>(sign | ((m << 13) + (112u << 23)));
}
static inline uint16_t float_to_half(float f)
{
    uint32_t u = as<uint32_t>(f), sign = u >> 16 & 0x8000, m = u & 0x7fffffff;
    if (m > 0x7f800000) return 0x7fff;
    if (m >= 0x47800000 - 0x1000) return (uint16_t)(sign | 0x7c00);               /* 65520 and more */
    if (m < 0x38800000) return (uint16_t)(sign | (as<uint32_t>(as<float>(m) + 0.5f) - 0x3f000000));   /* below 2^-14 */
    return (uint16_t)(sign | (m + 0xfff + (m >> 13 & 1) - (112u << 23)) >> 13);
}
}

struct __align__(2) __half_raw { unsigned short x; };
struct __align__(2) __half {
    unsigned short bits;
    __half() = default;
    __half(float f) : bits(emulator::float_to_half(f)) {}
    __half(__half_raw r) : bits(r.x) {}
    operator float() const { return emulator::half_to_float(bits); }
    operator __half_raw() const { return { bits }; }
};
struct __align__(4) __half2_raw { unsigned short x, y; };
struct __align__(4) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half x, __half y) : x(x), y(y) {}
    __half2(__half2_raw r) : x(__half_raw{ r.x }), y(__half_raw{ r.y }) {}
};
typedef __half half;
typedef __half2 half2;

static inline __half __float2half(float f) { return __half(f); }
static inline __half __float2half_rn(float f) { return __half(f); }
static inline float __half2float(__half h) { return emulator::half_to_float(h.bits); }
static inline __half2 __float2half2_rn(float f) { return __half2(__half(f), __half(f)); }
static inline __half2 __floats2half2_rn(float a, float b) { return __half2(__half(a), __half(b)); }
static inline __half2 __float22half2_rn(float2 f) { return __floats2half2_rn(f.x, f.y); }
static inline float2 __half22float2(__half2 h) { return { __half2float(h.x), __half2float(h.y) }; }
static inline __half2 __halves2half2(__half a, __half b) { return __half2(a, b); }
static inline __half2 __half2half2(__half a) { return __half2(a, a); }
static inline __half2 make_half2(__half a, __half b) { return __half2(a, b); }
static inline __half __low2half(__half2 h) { return h.x; }
static inline __half __high2half(__half2 h) { return h.y; }
static inline float __low2float(__half2 h) { return __half2float(h.x); }
static inline float __high2float(__half2 h) { return __half2float(h.y); }
static inline __half2 __lowhigh2highlow(__half2 h) { return __half2(h.y, h.x); }
static inline unsigned short __half_as_ushort(__half h) { return h.bits; }
static inline short __half_as_short(__half h) { return (short)h.bits; }
static inline __half __ushort_as_half(unsigned short u) { return __half(__half_raw{ u }); }
static inline __half __short_as_half(short u) { return __half(__half_raw{ (unsigned short)u }); }
static inline __half __int2half_rn(int i) { return __half((float)i); }
static inline __half __hadd(__half a, __half b) { return __half(__half2float(a) + __half2float(b)); }
static inline __half __hsub(__half a, __half b) { return __half(__half2float(a) - __half2float(b)); }
static inline __half __hmul(__half a, __half b) { return __half(__half2float(a) * __half2float(b)); }
static inline __half __hneg(__half a) { return __ushort_as_half(a.bits ^ 0x8000); }
static inline __half __habs(__half a) { return __ushort_as_half(a.bits & 0x7fff); }
/* The product of two halves is exact in float, the sum in double; so one rounding is left, as the device does it. */
static inline __half __hfma(__half a, __half b, __half c)
{
    double exact = (double)(__half2float(a) * __half2float(b)) + (double)__half2float(c);
    float f = (float)exact;
    if ((double)f != exact && (emulator::as<uint32_t>(f) & 0x1fff) == 0x1000)           /* do not round a tie twice */
        f = nextafterf(f, (double)f < exact ? HUGE_VALF : -HUGE_VALF);
    return __half(f);
}
static inline __half __hmax(__half a, __half b) { return __half(fmaxf(__half2float(a), __half2float(b))); }
static inline __half __hmin(__half a, __half b) { return __half(fminf(__half2float(a), __half2float(b))); }
static inline __half2 __hadd2(__half2 a, __half2 b) { return __half2(__hadd(a.x, b.x), __hadd(a.y, b.y)); }
static inline __half2 __hsub2(__half2 a, __half2 b) { return __half2(__hsub(a.x, b.x), __hsub(a.y, b.y)); }
static inline __half2 __hmul2(__half2 a, __half2 b) { return __half2(__hmul(a.x, b.x), __hmul(a.y, b.y)); }
static inline __half2 __hneg2(__half2 a) { return __half2(__hneg(a.x), __hneg(a.y)); }
static inline __half2 __habs2(__half2 a) { return __half2(__habs(a.x), __habs(a.y)); }
static inline __half2 __hmax2(__half2 a, __half2 b) { return __half2(__hmax(a.x, b.x), __hmax(a.y, b.y)); }
static inline __half2 __hmin2(__half2 a, __half2 b) { return __half2(__hmin(a.x, b.x), __hmin(a.y, b.y)); }
static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c)
{
    return __half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}

}
#endif
