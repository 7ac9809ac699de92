/* cuda_bf16.h - bfloat16, rounded to the nearest even. */
#ifndef EMULATOR_CUDA_BF16_H
#define EMULATOR_CUDA_BF16_H

extern "C++" {

#include "cuda_runtime.h"

namespace emulator {
static inline float bf16_to_float(uint16_t b) { return as<float>((uint32_t)b << 16); }
static inline uint16_t float_to_bf16(float f)
{
    uint32_t u = as<uint32_t>(f);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
}

struct __align__(2) __nv_bfloat16_raw { unsigned short x; };
struct __align__(2) __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) : bits(emulator::float_to_bf16(f)) {}
    __nv_bfloat16(__nv_bfloat16_raw r) : bits(r.x) {}
    operator float() const { return emulator::bf16_to_float(bits); }
};
struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) : x(x), y(y) {}
};

static inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
static inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
static inline float __bfloat162float(__nv_bfloat16 b) { return emulator::bf16_to_float(b.bits); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return __nv_bfloat162(a, b); }
static inline float2 __bfloat1622float2(__nv_bfloat162 b) { return { __bfloat162float(b.x), __bfloat162float(b.y) }; }
static inline float __low2float(__nv_bfloat162 b) { return __bfloat162float(b.x); }
static inline float __high2float(__nv_bfloat162 b) { return __bfloat162float(b.y); }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.bits; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { return __nv_bfloat16(__nv_bfloat16_raw{ u }); }

}
#endif
