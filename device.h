/* device.h - small functions of the kernels. Products are fused only where fmaf stands: nvcc gets -fmad=false, so that
 * sums are the same wherever the kernels run. */
#ifndef DEVICE_H
#define DEVICE_H

#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

/* In front of a loop over registers, of one that is to have four loads under way, and of one that has enough. */
#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#define UNROLL_4 _Pragma("unroll 4")
#define KEEP_ROLLED _Pragma("unroll 1")
#else
#define UNROLL
#define UNROLL_4
#define KEEP_ROLLED
#endif

enum { WARP = 32 };
#define ALL_LANES 0xffffffffu

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

/* Half floats as bits. To half: round to nearest even; too large becomes infinity. */
__device__ inline float half_to_float(uint16_t h) { return __half2float(__ushort_as_half(h)); }
__device__ inline uint16_t float_to_half(float f) { return __half_as_ushort(__float2half_rn(f)); }
__device__ inline float low_half(uint32_t w) { return half_to_float((uint16_t)w); }
__device__ inline float high_half(uint32_t w) { return half_to_float((uint16_t)(w >> 16)); }

/* bfloat16: the upper half of a float; round to nearest even, NaN stays NaN. */
__device__ inline float bf16_to_float(uint32_t h) { return __uint_as_float(h << 16); }
__device__ inline uint16_t float_to_bf16(float f)
{
    uint32_t u = __float_as_uint(f);
    return f != f ? (uint16_t)(u >> 16 | 64) : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* To e4m3, whose bits, moved up, are a half float of 1/256 the value; |f| <= 448. */
__device__ inline uint8_t float_to_fp8(float f)
{
    uint32_t h = float_to_half(f / 256), size = h & 0x7fff;
    size = (size + 0x3f + (size >> 7 & 1)) >> 7;
    return (uint8_t)((h >> 8 & 0x80) | (size > 0x7e ? 0x7e : size));
}

/* n is taken from each byte, all of which are 0 to 127. */
__device__ inline uint32_t bytes_minus(uint32_t x, uint32_t n)
{
    return ((x | 0x80808080u) - n * 0x01010101u) ^ 0x80808080u;
}
/* Byte i of a word as a float, without a conversion: 2^23 + byte is put together from bits, and 2^23 taken off. For
 * signed bytes each is made unsigned by ^ 0x80 first, and 128 is taken off, too. */
__device__ inline float unsigned_byte(uint32_t w, int i)
{
    return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440u + i)) - 8388608.0f;
}
__device__ inline float flipped_byte(uint32_t w, int i)
{
    return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440u + i)) - 8388736.0f;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Reads weights: never written while kernels run, and read once per pass. */
template <class T> __device__ inline T stream_load(const T *p) { return *p; }
#ifdef __CUDACC__
template <> __device__ inline uint4 stream_load(const uint4 *p)
{
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
#endif

/* Reads past the first-level cache, which does not see what other multiprocessors write; 16 bytes stay one load. */
template <class T> __device__ inline T fresh_load(const T *p)
{
#ifdef __CUDACC__
    return __ldcg(p);
#else
    return *p;
#endif
}

/* ---- tensor cores (off the device tests/emulator has functions of these names) ----------------------------------- */

#ifdef __CUDACC__
/* d[16][8] += a[16][16] b[16][8] of halves, with the fragments of PTX's mma.m16n8k16. */
__device__ inline void mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* The same of bfloat16. */
__device__ inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* Two floats as halves, or as bfloat16, in one word. */
__device__ inline uint32_t pair_halves(float low, float high)
{
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ inline uint32_t pair_bf16(float low, float high)
{
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
/* Differences and products of the two halves in each word. */
__device__ inline uint32_t minus_halves(uint32_t x, uint32_t y)
{
    uint32_t d;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
    return d;
}
__device__ inline uint32_t times_halves(uint32_t x, uint32_t y)
{
    uint32_t d;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
    return d;
}
/* Two matrices of 8 x 8 halves of shared memory, transposed; lane i gives the place of row i % 8 of matrix i / 8. */
__device__ inline void ldmatrix_x2_trans(uint32_t r[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
        : "=r"(r[0]), "=r"(r[1]) : "r"((uint32_t)__cvta_generic_to_shared(row)) : "memory");
}
/* Four of them; row i % 8 of matrix i / 8. */
__device__ inline void ldmatrix_x4_trans(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((uint32_t)__cvta_generic_to_shared(row)) : "memory");
}
#endif

/* ---- the grid before and after this one (sm_90 and later) -------------------------------------------------------- */

#if !defined __CUDA_ARCH__ || __CUDA_ARCH__ >= 900
/* Waits until what the kernels before this one wrote can be read. */
__device__ inline void wait_for_previous() { cudaGridDependencySynchronize(); }
/* The next kernel may start; it waits itself for the end of this one. */
__device__ inline void let_next_start() { cudaTriggerProgrammaticLaunchCompletion(); }
#else
__device__ inline void wait_for_previous() { }
__device__ inline void let_next_start() { }
#endif

/* ---- sums over a warp and a block -------------------------------------------------------------------------------- */

__device__ inline float warp_sum(float x)
{
    for (int step = WARP / 2; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}
/* A NaN does not count. */
__device__ inline float warp_max(float x)
{
    for (int step = WARP / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}
/* The same sum in every thread. `shared` has a float for each of the block's warps. */
__device__ inline float block_sum(float x, float *shared)
{
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0;
    for (unsigned i = 0; i < blockDim.x / WARP; i++) sum += shared[i];
    return sum;
}

#endif
