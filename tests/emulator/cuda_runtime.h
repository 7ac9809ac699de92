/* cuda_runtime.h - stands in for the CUDA toolkit's header of that name, so that g++ compiles attention.cu and cuda.cu
 * as they are and a processor runs them. See emulator.h for what is checked.
 *
 * What the sources may use is what is declared here and in the other headers of this directory. In short:
 *   - threads and blocks in up to three dimensions, warps of 32; __syncthreads and its kin, __syncwarp, shuffles,
 *     votes, __reduce_*_sync; a thread that has ended must not be waited for;
 *   - static __shared__ arrays inside kernels; dynamic shared memory by this declaration at namespace scope:
 *         extern __shared__ unsigned char smem[];
 *   - global memory through plain pointers; a copy of a uint4 is one 128-bit access. __ldg, __ldcs, ... are accepted;
 *   - atomics on 32 and 64 bits; cp.async by the calls of cuda_pipeline.h; mma and ldmatrix by the twins in
 *     mma_twins.h;
 *   - launches by cudaLaunchKernelEx, with programmatic dependent launch;
 *   - streams, events, graphs by stream capture, pinned and mapped host memory.
 * __CUDACC__ and __CUDA_ARCH__ are not defined. */
#ifndef EMULATOR_CUDA_RUNTIME_H
#define EMULATOR_CUDA_RUNTIME_H

/* The sources include this from within extern "C" as well, as the toolkit allows. */
extern "C++" {

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ thread_local
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define CUDART_VERSION 13000
#define CUDART_INF_F HUGE_VALF

/* ---- vector types ------------------------------------------------------------------------------------------------ */

#define VECTOR(name, type, bytes2, bytes4)                                                                             \
    struct name##1 { type x; };                                                                                        \
    struct __align__(bytes2) name##2 { type x, y; };                                                                   \
    struct name##3 { type x, y, z; };                                                                                  \
    struct __align__(bytes4) name##4 { type x, y, z, w; };                                                             \
    static inline name##2 make_##name##2(type x, type y) { return { x, y }; }                                          \
    static inline name##3 make_##name##3(type x, type y, type z) { return { x, y, z }; }                               \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return { x, y, z, w }; }
VECTOR(char, signed char, 2, 4)
VECTOR(uchar, unsigned char, 2, 4)
VECTOR(short, short, 4, 8)
VECTOR(ushort, unsigned short, 4, 8)
VECTOR(int, int, 8, 16)
VECTOR(uint, unsigned, 8, 16)
VECTOR(float, float, 8, 16)
#undef VECTOR
struct __align__(16) longlong2 { long long x, y; };
struct __align__(16) ulonglong2 { unsigned long long x, y; };
struct __align__(16) double2 { double x, y; };

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

/* A thread's own values: changed with every switch of threads, so constant for whoever reads them. */
#ifndef EMULATOR_ITSELF
extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;
#endif
constexpr int warpSize = 32;

/* ---- the emulator's calls behind what follows -------------------------------------------------------------------- */

namespace emulator {

/* Where a call stands in the source, as __builtin_FILE and __builtin_LINE say. */
struct place { const char *file; int line; };
#define HERE emulator::place at = { __builtin_FILE(), __builtin_LINE() }

/* Waits for all threads of the block; returns how many gave a `yes`. */
int block_barrier(bool yes, place at);
/* Waits for the lanes of `mask`, runs `combine` once over their operands (entries outside the mask are NULL) and lets
 * them go on. `what` names the operation. `order` = memory is ordered as well. */
void warp_meet(unsigned mask, void *mine, void (*combine)(void *const lanes[32], unsigned mask), const char *what,
               bool order, place at);
unsigned lane();
/* An access to memory that g++ does not see: checked, counted. */
void touch(const void *p, size_t bytes, bool write, bool atomic);
void copy_async(void *dst, const void *src, size_t bytes, size_t zeros);
void copy_commit();
void copy_wait(unsigned groups_left);
void dependency_synchronize();
[[noreturn]] void fault(place at, const char *form, ...) __attribute__((format(printf, 2, 3)));

/* Lanes of a shuffle. */
struct shuffle { uint64_t value, result; int from; unsigned lane; };
void combine_shuffle(void *const lanes[32], unsigned mask);
template <class T> T shuffled(unsigned mask, T value, int from, const char *what, place at)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2, "shuffles move 2, 4 or 8 bytes");
    static_assert(std::is_trivially_copyable<T>::value, "shuffles move plain values");
    shuffle s = { 0, 0, from, lane() };
    memcpy(&s.value, &value, sizeof value);
    warp_meet(mask, &s, combine_shuffle, what, false, at);
    memcpy(&value, &s.result, sizeof value);
    return value;
}

/* Lanes of a vote or reduction. */
struct vote { uint32_t value, result; };
void combine_ballot(void *const lanes[32], unsigned mask);
uint32_t voted(unsigned mask, uint32_t value, void (*combine)(void *const *, unsigned), const char *what, place at);
void combine_add(void *const lanes[32], unsigned mask);
void combine_and(void *const lanes[32], unsigned mask);
void combine_or(void *const lanes[32], unsigned mask);
void combine_xor(void *const lanes[32], unsigned mask);
void combine_min(void *const lanes[32], unsigned mask);
void combine_max(void *const lanes[32], unsigned mask);
void combine_umin(void *const lanes[32], unsigned mask);
void combine_umax(void *const lanes[32], unsigned mask);
}

/* ---- barriers, shuffles, votes ----------------------------------------------------------------------------------- */

static inline void __syncthreads(HERE) { emulator::block_barrier(false, at); }
static inline int __syncthreads_count(int yes, HERE) { return emulator::block_barrier(yes != 0, at); }
static inline int __syncthreads_or(int yes, HERE) { return emulator::block_barrier(yes != 0, at) > 0; }
static inline int __syncthreads_and(int yes, HERE) { return emulator::block_barrier(yes == 0, at) == 0; }
static inline void __syncwarp(unsigned mask = ~0u, HERE)
{
    emulator::warp_meet(mask, nullptr, nullptr, "__syncwarp", true, at);
}

template <class T> T __shfl_sync(unsigned mask, T v, int lane, int width = 32, HERE)
{
    int own = (int)emulator::lane();
    return emulator::shuffled(mask, v, (own & -width) + (lane & (width - 1)), "__shfl_sync", at);
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, HERE)
{
    int own = (int)emulator::lane(), from = own ^ bits;
    return emulator::shuffled(mask, v, from >= (own & -width) + width ? own : from, "__shfl_xor_sync", at);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32, HERE)
{
    int own = (int)emulator::lane(), from = own - (int)by;
    return emulator::shuffled(mask, v, from < (own & -width) ? own : from, "__shfl_up_sync", at);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32, HERE)
{
    int own = (int)emulator::lane(), from = own + (int)by;
    return emulator::shuffled(mask, v, from >= (own & -width) + width ? own : from, "__shfl_down_sync", at);
}

static inline unsigned __ballot_sync(unsigned mask, int yes, HERE)
{
    return emulator::voted(mask, yes != 0, emulator::combine_ballot, "__ballot_sync", at);
}
static inline int __any_sync(unsigned mask, int yes, HERE)
{
    return emulator::voted(mask, yes != 0, emulator::combine_ballot, "__any_sync", at) != 0;
}
static inline int __all_sync(unsigned mask, int yes, HERE)
{
    return emulator::voted(mask, yes == 0, emulator::combine_ballot, "__all_sync", at) == 0;
}
#define REDUCE(name, type, combine)                                                                                    \
    static inline type name(unsigned mask, type v, HERE)                                                               \
    {                                                                                                                  \
        return (type)emulator::voted(mask, (uint32_t)v, emulator::combine, #name, at);                                 \
    }
REDUCE(__reduce_add_sync, int, combine_add)
REDUCE(__reduce_add_sync, unsigned, combine_add)
REDUCE(__reduce_min_sync, int, combine_min)
REDUCE(__reduce_min_sync, unsigned, combine_umin)
REDUCE(__reduce_max_sync, int, combine_max)
REDUCE(__reduce_max_sync, unsigned, combine_umax)
REDUCE(__reduce_and_sync, unsigned, combine_and)
REDUCE(__reduce_or_sync, unsigned, combine_or)
REDUCE(__reduce_xor_sync, unsigned, combine_xor)
#undef REDUCE

static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void cudaGridDependencySynchronize() { emulator::dependency_synchronize(); }
static inline void cudaTriggerProgrammaticLaunchCompletion() {}
static inline void __nanosleep(unsigned) {}
[[noreturn]] static inline void __trap(HERE) { emulator::fault(at, "__trap"); }

/* ---- memory ------------------------------------------------------------------------------------------------------ */

#define LOAD(name) template <class T> static inline T name(const T *p) { return *p; }
LOAD(__ldg)
LOAD(__ldca)
LOAD(__ldcg)
LOAD(__ldcs)
LOAD(__ldcv)
LOAD(__ldlu)
#undef LOAD
#define STORE(name) template <class T> static inline void name(T *p, T v) { *p = v; }
STORE(__stcg)
STORE(__stcs)
STORE(__stwb)
STORE(__stwt)
#undef STORE

#define ATOMIC(name, type, result)                                                                                     \
    static inline type name(type *p, type v)                                                                           \
    {                                                                                                                  \
        emulator::touch(p, sizeof *p, true, true);                                                                     \
        return emulator::exchange(p, [&](type old) -> type { (void)old; return result; });                             \
    }
namespace emulator {
/* Threads of the emulator do not run at once, so what remains of an atomic is that nobody calls it a race. */
template <class T, class F> __attribute__((no_sanitize("thread"))) T exchange(T *p, F next)
{
    T old, v;
    memcpy(&old, p, sizeof v);
    v = next(old);
    memcpy(p, &v, sizeof v);
    return old;
}
}
#define ATOMICS(type)                                                                                                  \
    ATOMIC(atomicAdd, type, old + v)                                                                                   \
    ATOMIC(atomicMax, type, old > v ? old : v)                                                                         \
    ATOMIC(atomicMin, type, old < v ? old : v)                                                                         \
    ATOMIC(atomicExch, type, v)
ATOMICS(int)
ATOMICS(unsigned)
ATOMICS(unsigned long long)
#define BITS(type)                                                                                                     \
    ATOMIC(atomicAnd, type, old & v)                                                                                   \
    ATOMIC(atomicOr, type, old | v)                                                                                    \
    ATOMIC(atomicXor, type, old ^ v)                                                                                   \
    static inline type atomicCAS(type *p, type expected, type v)                                                       \
    {                                                                                                                  \
        emulator::touch(p, sizeof *p, true, true);                                                                     \
        return emulator::exchange(p, [&](type old) -> type { return old == expected ? v : old; });                     \
    }
BITS(int)
BITS(unsigned)
BITS(unsigned long long)
ATOMIC(atomicAdd, float, old + v)
ATOMIC(atomicExch, float, v)
ATOMIC(atomicSub, int, old - v)
ATOMIC(atomicSub, unsigned, old - v)
ATOMIC(atomicInc, unsigned, old >= v ? 0 : old + 1)
ATOMIC(atomicDec, unsigned, old == 0 || old > v ? v : old - 1)
#undef BITS
#undef ATOMICS
#undef ATOMIC

/* ---- arithmetic -------------------------------------------------------------------------------------------------- */

namespace emulator {
template <class To, class From> static inline To as(From f)
{
    static_assert(sizeof(To) == sizeof(From), "");
    To t;
    memcpy(&t, &f, sizeof t);
    return t;
}
}
static inline int __float_as_int(float f) { return emulator::as<int>(f); }
static inline unsigned __float_as_uint(float f) { return emulator::as<unsigned>(f); }
static inline float __int_as_float(int i) { return emulator::as<float>(i); }
static inline float __uint_as_float(unsigned i) { return emulator::as<float>(i); }
static inline int __float2int_rn(float f) { return (int)rintf(f); }
static inline int __float2int_rz(float f) { return (int)f; }
static inline int __float2int_rd(float f) { return (int)floorf(f); }
static inline int __float2int_ru(float f) { return (int)ceilf(f); }
static inline unsigned __float2uint_rn(float f) { return (unsigned)rintf(f); }
static inline unsigned __float2uint_rz(float f) { return (unsigned)f; }
static inline float __int2float_rn(int i) { return (float)i; }
static inline float __uint2float_rn(unsigned i) { return (float)i; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frcp_rn(float a) { return 1 / a; }
static inline float __frsqrt_rn(float a) { return 1 / sqrtf(a); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __saturatef(float a) { return a > 1 ? 1 : a > 0 ? a : 0; }
static inline float rsqrtf(float a) { return 1 / sqrtf(a); }
/* glibc declares some of these names for itself. */
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)
#define __tanhf(x) tanhf(x)

#define EXTREMES(type)                                                                                                 \
    static inline type min(type a, type b) { return b < a ? b : a; }                                                   \
    static inline type max(type a, type b) { return a < b ? b : a; }
EXTREMES(int)
EXTREMES(unsigned)
EXTREMES(long)
EXTREMES(unsigned long)
EXTREMES(long long)
EXTREMES(unsigned long long)
#undef EXTREMES
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __ffsll(long long v) { return __builtin_ffsll(v); }
static inline unsigned __brev(unsigned v)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (v >> i & 1) << (31 - i);
    return r;
}
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned by)
{
    return (unsigned)(((unsigned long long)hi << 32 | lo) << (by & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned by)
{
    return (unsigned)(((unsigned long long)hi << 32 | lo) >> (by & 31));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector)
{
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned s = selector >> 4 * i & 15, byte = both >> 8 * (s & 7) & 255;
        r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return r;
}
static inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 32; i += 8) c = (int)((unsigned)c + (unsigned)((int8_t)(a >> i) * (int8_t)(b >> i)));
    return c;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c)
{
    for (int i = 0; i < 32; i += 8) c += (uint8_t)(a >> i) * (uint8_t)(b >> i);
    return c;
}
#define BYTES(name, type, result)                                                                                      \
    static inline unsigned name(unsigned a, unsigned b)                                                                \
    {                                                                                                                  \
        unsigned r = 0;                                                                                                \
        for (int i = 0; i < 32; i += 8) {                                                                              \
            int x = (type)(a >> i), y = (type)(b >> i);                                                                \
            r |= (unsigned)((result) & 255) << i;                                                                      \
        }                                                                                                              \
        return r;                                                                                                      \
    }
BYTES(__vadd4, uint8_t, x + y)
BYTES(__vsub4, uint8_t, x - y)
BYTES(__vsubss4, int8_t, x - y > 127 ? 127 : x - y < -128 ? -128 : x - y)
BYTES(__vaddss4, int8_t, x + y > 127 ? 127 : x + y < -128 ? -128 : x + y)
BYTES(__vcmpeq4, uint8_t, x == y ? 255 : 0)
BYTES(__vcmpne4, uint8_t, x != y ? 255 : 0)
BYTES(__vmaxs4, int8_t, x > y ? x : y)
BYTES(__vmins4, int8_t, x < y ? x : y)
#undef BYTES

#include "mma_twins.h"
#include "runtime_api.h"

}
#endif
