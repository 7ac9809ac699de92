/* cuda_fp8.h - 8-bit floats: e4m3 (largest 448, no infinity). */
#ifndef EMULATOR_CUDA_FP8_H
#define EMULATOR_CUDA_FP8_H

extern "C++" {

#include "cuda_fp16.h"

namespace emulator {
static inline float e4m3_to_float(uint8_t b)
{
    int m = b & 7, e = b >> 3 & 15;
    float f = (b & 0x7f) == 0x7f ? NAN : e ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
    return b & 0x80 ? -f : f;
}
/* To the nearest, ties to even; saturates. */
static inline uint8_t float_to_e4m3(float f)
{
    uint8_t sign = as<uint32_t>(f) >> 31 ? 0x80 : 0;
    float a = fabsf(f);
    if (!(a == a)) return sign | 0x7f;
    if (a >= 448) return sign | 0x7e;
    if (a < 0x1p-6f) return sign | (uint8_t)rintf(a * 512);                       /* 8 carries into the exponent */
    int e;
    frexpf(a, &e);                                                                /* a = [0.5, 1) * 2^e */
    return (uint8_t)(sign | (((e + 6) << 3) + (int)rintf(ldexpf(a, 4 - e)) - 8));
}
}

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
typedef unsigned __nv_fp8x4_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

struct __nv_fp8_e4m3 {
    __nv_fp8_storage_t __x;
    __nv_fp8_e4m3() = default;
    explicit __nv_fp8_e4m3(float f) : __x(emulator::float_to_e4m3(f)) {}
    explicit __nv_fp8_e4m3(__half h) : __x(emulator::float_to_e4m3(__half2float(h))) {}
    explicit operator float() const { return emulator::e4m3_to_float(__x); }
    explicit operator __half() const { return __half(emulator::e4m3_to_float(__x)); }
};
static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float f, __nv_saturation_t, __nv_fp8_interpretation_t)
{
    return emulator::float_to_e4m3(f);
}
static inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 f, __nv_saturation_t, __nv_fp8_interpretation_t)
{
    return (__nv_fp8x2_storage_t)(emulator::float_to_e4m3(f.x) | emulator::float_to_e4m3(f.y) << 8);
}
static inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t b, __nv_fp8_interpretation_t)
{
    return { emulator::float_to_half(emulator::e4m3_to_float(b)) };
}
static inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t b, __nv_fp8_interpretation_t)
{
    return { emulator::float_to_half(emulator::e4m3_to_float((uint8_t)b)),
             emulator::float_to_half(emulator::e4m3_to_float((uint8_t)(b >> 8))) };
}

}
#endif
