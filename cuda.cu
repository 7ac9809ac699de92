/* cuda.cu - the CUDA backend: weights on the device, and the forward pass as kernels of one stream.
 *
 * A step of up to FEW rows multiplies matrices by kernels of its own, five launches a layer: query-key-value,
 * attention, attention output, gate and up, down (a layer whose query, key and value matrices are of two types: six).
 * Each product makes its input ready itself: the residual sum, the norm and the activations' int8 blocks (those of the
 * CPU backend) are computed by every block of threads for itself, which costs less than a launch. More rows are
 * multiplied by cuBLAS, tile by tile of a weight matrix in f16 (F32 and BF16 weights and what they meet: f32). A step
 * in which each row is of another sequence and wants logits is recorded once as a graph for its number of rows; what
 * changes from step to step lies in device memory.
 *
 * Budgets, checked by tests/test_cuda_static.py: registers a thread, shared memory set statically.
 *
 *     kernel              registers  static shared
 *     product<*, 1>       96         64
 *     product<*, 4>       128        64
 *     product<*, 8>       128        64
 *     repack              72         256
 *     all others          64         256
 */
#include <cublas_v2.h>
#ifdef __CUDACC__
#include <dlfcn.h>
#endif
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attention.h"
extern "C" {
#include "backend.h"
}
#include "device.h"
#include "exchange.h"
#include "select.h"

#ifndef CUDA_LABEL
#define CUDA_LABEL(pointer, what)
#endif

extern __shared__ unsigned char smem[];

enum {
    FEW = 8,                           /* rows that are multiplied without cuBLAS */
    PRODUCT_WARPS = 8,
    TILE_BYTES = 64 << 20,             /* of a weight matrix in f16 for cuBLAS */
    STAGING_BYTES = 16 << 20,          /* of the file on its way to the device */
    STATIC_BYTES = 1024                /* shared memory that a kernel may have beside what its launch asks for */
};

/* ---- weights: bit planes of blocks of 32 columns -------------------------------------------------------------------
 *
 * Of a block's 32 codes the low four bits (eight in Q8_0, two in Q2_K and Q3_K) are in plane `a`, what is left in `h`:
 *
 *     a   4 bits: 16 bytes, byte i = code i | code i+16 << 4     8 bits: codes 0..15, the others in plane `b`
 *         2 bits: 8 bytes, half p: bits 8k + 2j of word p are those of code 16p + 4j + k
 *     h   1 bit: 4 bytes, bit 8k + j is that of code 4j + k      2 bits: 8 bytes, as two bits of a
 *     s   what scales the block: 16 bits (Q4_1, Q5_1: 32)
 *     d   types of 256 weights, for 8 blocks: Q2_K, Q6_K the one or two f16 that the file has; the others all scales,
 *         in fields of the 8 or 16 numbers one after the other:
 *         Q4_K, Q5_K: d, dmin | 8 scales, low 4 bits | 8 minima, low 4 bits | high 2 bits of the scales | of the minima
 *         Q3_K: 16 scales, low 4 bits | their high 2 bits | d | 0          IQ4_XS: 8 scales, low 4 | high 2 bits | d
 *
 * so that four neighbouring codes come out of a word by one shift and one mask. Lane l of a warp takes blocks l,
 * l + 32, ...: every load of a warp is one piece of memory. Float weights: rows as they are, padded to a multiple of
 * 32. */
struct weight {
    enum tensor_type type;
    int rows, cols;
    int nb;                            /* blocks of a row; of float types: columns with padding */
    unsigned char *a, *b, *h, *s, *d;
};

static __host__ __device__ inline bool is_float(enum tensor_type t) { return t == T_F32 || t == T_F16 || t == T_BF16; }
/* Bits of a code in planes a (8: a and b) and h. */
static __host__ __device__ constexpr int low_bits(int t)
{
    return t == T_Q8_0 ? 8 : t == T_Q2_K || t == T_Q3_K ? 2 : 4;
}
static __host__ __device__ constexpr int high_bits(int t)
{
    return t == T_Q5_0 || t == T_Q5_1 || t == T_Q5_K || t == T_Q3_K ? 1 : t == T_Q6_K ? 2 : 0;
}
static __host__ __device__ constexpr bool of_256(int t)
{
    return t == T_Q2_K || t == T_Q3_K || t == T_Q4_K || t == T_Q5_K || t == T_Q6_K || t == T_IQ4_XS;
}
static __host__ __device__ constexpr bool has_halves(int t) { return t == T_Q2_K || t == T_Q3_K || t == T_Q6_K; }
/* Bytes of a block in plane s, and of 8 in plane d. */
static __host__ __device__ constexpr int scale_bytes(int t)
{
    return t == T_Q4_1 || t == T_Q5_1 ? 4 : of_256(t) && t != T_Q2_K && t != T_Q6_K ? 0 : 2;
}
static __host__ __device__ constexpr int super_bytes(int t)
{
    return !of_256(t) ? 0 : t == T_Q6_K ? 2 : t == T_Q2_K ? 4 : t == T_IQ4_XS ? 8 : 16;
}

/* Calls CALL(type) with the type as a constant. */
#define FOR_QUANTISED(type, CALL) \
    switch (type) { \
    case T_Q4_0: CALL(T_Q4_0); break; \
    case T_Q4_1: CALL(T_Q4_1); break; \
    case T_Q5_0: CALL(T_Q5_0); break; \
    case T_Q5_1: CALL(T_Q5_1); break; \
    case T_Q8_0: CALL(T_Q8_0); break; \
    case T_Q2_K: CALL(T_Q2_K); break; \
    case T_Q3_K: CALL(T_Q3_K); break; \
    case T_Q4_K: CALL(T_Q4_K); break; \
    case T_Q5_K: CALL(T_Q5_K); break; \
    case T_Q6_K: CALL(T_Q6_K); break; \
    case T_IQ4_NL: CALL(T_IQ4_NL); break; \
    case T_IQ4_XS: CALL(T_IQ4_XS); break; \
    default: break; \
    }

/* A block as it comes from memory. */
template <int T> struct raw_block { uint32_t a[low_bits(T) == 2 ? 2 : low_bits(T)], h[2], s, d[4]; };

template <int T> static __device__ inline raw_block<T> load_block(const weight &w, int row, int b)
{
    raw_block<T> r;
    size_t i = (size_t)row * w.nb + b;
    if (low_bits(T) == 2) {
        uint2 v = stream_load((const uint2 *)w.a + i);
        r.a[0] = v.x, r.a[1] = v.y;
    } else {
        uint4 v = stream_load((const uint4 *)w.a + i);
        constexpr int A = low_bits(T) == 2 ? 0 : 1;
        r.a[0] = v.x, r.a[1] = v.y, r.a[2 * A] = v.z, r.a[3 * A] = v.w;
        if (low_bits(T) == 8) {
            constexpr int B = low_bits(T) == 8 ? 4 : 0;
            v = stream_load((const uint4 *)w.b + i);
            r.a[B] = v.x, r.a[B + (B > 0)] = v.y, r.a[B + 2 * (B > 0)] = v.z, r.a[B + 3 * (B > 0)] = v.w;
        }
    }
    if (high_bits(T) == 1) r.h[0] = stream_load((const uint32_t *)w.h + i);
    if (high_bits(T) == 2) {
        uint2 v = stream_load((const uint2 *)w.h + i);
        r.h[0] = v.x, r.h[1] = v.y;
    }
    if (scale_bytes(T) == 4) r.s = stream_load((const uint32_t *)w.s + i);
    if (scale_bytes(T) == 2) r.s = stream_load((const uint16_t *)w.s + i);
    size_t j = (size_t)row * (w.nb / 8) + b / 8;
    if (super_bytes(T) == 2) r.d[0] = ((const uint16_t *)w.d)[j];
    if (super_bytes(T) == 4) r.d[0] = ((const uint32_t *)w.d)[j];
    if (super_bytes(T) == 8) {
        uint2 v = ((const uint2 *)w.d)[j];
        r.d[0] = v.x, r.d[1] = v.y;
    }
    if (super_bytes(T) == 16) {
        uint4 v = stream_load((const uint4 *)w.d + j);
        r.d[0] = v.x, r.d[1] = v.y, r.d[2] = v.z, r.d[3] = v.w;
    }
    return r;
}

/* A block ready to be multiplied: 32 signed codes; a weight is d * (s0 or s1 of its half) * code + (m0 or m1). */
struct block { uint32_t q[8]; float d; int s0, s1; float m0, m1; };

/* The levels of IQ4_NL (quant.c) at the four low nibbles of a word's bytes. */
static __device__ inline uint32_t iq4_levels(uint32_t x)
{
    uint32_t y = x | x >> 4, pick = ((y & 0xff) | (y >> 8 & 0xff00)) & 0x7777, upper = (x >> 3 & 0x01010101u) * 255;
    uint32_t low = __byte_perm(0xbfad9881u, 0xf6eaddcfu, pick), high = __byte_perm(0x26190d01u, 0x71594535u, pick);
    return (high & upper) | (low & ~upper);
}

/* The 6-bit number whose low bits are at 4i of `low` and whose high ones are at 2i of `high`. */
static __device__ inline int six_bits(uint32_t low, uint32_t high, int i)
{
    return (int)((low >> 4 * i & 15) | (high >> 2 * i & 3) << 4);
}

/* Block g of the 8 that share r.d. */
template <int T> static __device__ inline block unpack(const raw_block<T> &r, int g)
{
    block b;
    UNROLL
    for (int j = 0; j < 8; j++) {
        if (low_bits(T) == 8) b.q[j] = r.a[j];
        else if (low_bits(T) == 2) b.q[j] = r.a[j / 4] >> 2 * (j % 4) & 0x03030303u;
        else b.q[j] = r.a[j % 4] >> j / 4 * 4 & 0x0f0f0f0fu;
        if (high_bits(T) == 1) b.q[j] |= (r.h[0] >> j & 0x01010101u) << low_bits(T);
        if (high_bits(T) == 2) b.q[j] |= (r.h[j / 4] >> 2 * (j % 4) & 0x03030303u) << 4;
        if (T == T_Q4_0) b.q[j] = bytes_minus(b.q[j], 8);
        if (T == T_Q5_0) b.q[j] = bytes_minus(b.q[j], 16);
        if (T == T_Q3_K) b.q[j] = bytes_minus(b.q[j], 4);
        if (T == T_Q6_K) b.q[j] = bytes_minus(b.q[j], 32);
        if (T == T_IQ4_NL || T == T_IQ4_XS) b.q[j] = iq4_levels(b.q[j]);
    }
    b.s0 = b.s1 = 1;
    b.m0 = b.m1 = 0;
    if (T == T_Q4_K || T == T_Q5_K) {
        b.d = low_half(r.d[0]) * (float)six_bits(r.d[1], r.d[3], g);
        b.m0 = b.m1 = -(high_half(r.d[0]) * (float)six_bits(r.d[2], r.d[3] >> 16, g));
    } else if (T == T_Q2_K) {
        b.d = low_half(r.d[0]);
        b.s0 = r.s & 15, b.s1 = r.s >> 8 & 15;
        b.m0 = -(high_half(r.d[0]) * (float)(r.s >> 4 & 15)), b.m1 = -(high_half(r.d[0]) * (float)(r.s >> 12 & 15));
    } else if (T == T_Q3_K) {
        uint32_t low = g < 4 ? r.d[0] : r.d[1], high = g < 4 ? r.d[2] : r.d[2] >> 16;
        b.d = low_half(r.d[3]);
        b.s0 = six_bits(low, high, g % 4 * 2) - 32, b.s1 = six_bits(low, high, g % 4 * 2 + 1) - 32;
    } else if (T == T_Q6_K) {
        b.d = low_half(r.d[0]);
        b.s0 = (int8_t)r.s, b.s1 = (int8_t)(r.s >> 8);
    } else if (T == T_IQ4_XS) b.d = high_half(r.d[1]) * (float)(six_bits(r.d[0], r.d[1], g) - 32);
    else {
        b.d = low_half(r.s);
        if (scale_bytes(T) == 4) b.m0 = b.m1 = high_half(r.s);
    }
    return b;
}

/* The 32 weights in the order of operations of quant.c. */
static __device__ inline float weight_of(const block &b, int i)
{
    int code = (int8_t)(b.q[i / 4] >> i % 4 * 8);
    return b.d * (float)(i < 16 ? b.s0 : b.s1) * (float)code + (i < 16 ? b.m0 : b.m1);
}

/* Weight (row, column) of a float type. */
static __device__ inline float float_weight(const weight &w, size_t at)
{
    if (w.type == T_F32) return ((const float *)w.a)[at];
    uint16_t h = ((const uint16_t *)w.a)[at];
    return w.type == T_F16 ? half_to_float(h) : bf16_to_float(h);
}

/* ---- repacking, on the device ------------------------------------------------------------------------------------ */

static __device__ inline int nibble(const uint8_t *qs, int i) { return qs[i % 16] >> i / 16 * 4 & 15; }
static __device__ inline int fifth(const uint8_t *qh, int i) { return (qh[i / 8] >> i % 8 & 1) << 4; }
static __device__ inline int two_bits(const uint8_t *qs, int i)
{
    return qs[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}
static __device__ inline uint32_t two_bytes(const uint8_t *p) { return p[0] | p[1] << 8; }

/* Code i of block b of a row as it stands in the file, unsigned (quant.h draws the layouts). */
static __device__ int file_code(enum tensor_type type, const uint8_t *row, int b, int i)
{
    int g = b % 8, at = g * 32 + i;
    switch (type) {
    case T_Q4_0: case T_IQ4_NL: return nibble(row + b * 18 + 2, i);
    case T_Q4_1: return nibble(row + b * 20 + 4, i);
    case T_Q5_0: return nibble(row + b * 22 + 6, i) | fifth(row + b * 22 + 2, i);
    case T_Q5_1: return nibble(row + b * 24 + 8, i) | fifth(row + b * 24 + 4, i);
    case T_Q8_0: return row[b * 34 + 2 + i];
    case T_Q2_K: return two_bits(row + b / 8 * 84 + 16, at);
    case T_Q3_K: row += b / 8 * 110; return two_bits(row + 32, at) | (row[i] >> g & 1) << 2;
    case T_Q4_K: return row[b / 8 * 144 + 16 + g / 2 * 32 + i] >> g % 2 * 4 & 15;
    case T_Q5_K: row += b / 8 * 176; return (row[48 + g / 2 * 32 + i] >> g % 2 * 4 & 15) | (row[16 + i] >> g & 1) << 4;
    case T_Q6_K:
        row += b / 8 * 210;
        return (row[at / 128 * 64 + at % 64] >> at % 128 / 64 * 4 & 15) | two_bits(row + 128, at) << 4;
    default: return nibble(row + b / 8 * 136 + 8 + g * 16, i);          /* IQ4_XS */
    }
}

/* What scales block b, as plane s holds it. */
static __device__ uint32_t file_scale(enum tensor_type type, const uint8_t *row, int b)
{
    switch (type) {
    case T_Q4_0: case T_IQ4_NL: return two_bytes(row + b * 18);
    case T_Q5_0: return two_bytes(row + b * 22);
    case T_Q8_0: return two_bytes(row + b * 34);
    case T_Q4_1: return two_bytes(row + b * 20) | two_bytes(row + b * 20 + 2) << 16;
    case T_Q5_1: return two_bytes(row + b * 24) | two_bytes(row + b * 24 + 2) << 16;
    case T_Q2_K: return two_bytes(row + b / 8 * 84 + b % 8 * 2);
    case T_Q6_K: return two_bytes(row + b / 8 * 210 + 192 + b % 8 * 2);
    default: return 0;
    }
}

/* d[] = the numbers of 256 weights, whose file bytes begin at p, as plane d holds them. */
static __device__ void file_super(enum tensor_type type, const uint8_t *p, uint32_t d[4])
{
    d[0] = d[1] = d[2] = d[3] = 0;
    switch (type) {
    case T_Q2_K: d[0] = two_bytes(p + 80) | two_bytes(p + 82) << 16; break;
    case T_Q6_K: d[0] = two_bytes(p + 208); break;
    case T_Q4_K: case T_Q5_K:
        d[0] = two_bytes(p) | two_bytes(p + 2) << 16;
        p += 4;
        for (int g = 0; g < 8; g++) {  /* see k_scale_min in quant.c */
            uint32_t scale = g < 4 ? p[g] & 63 : (p[g + 4] & 15) | p[g - 4] >> 6 << 4;
            uint32_t min = g < 4 ? p[g + 4] & 63 : p[g + 4] >> 4 | p[g] >> 6 << 4;
            d[1] |= (scale & 15) << 4 * g;
            d[2] |= (min & 15) << 4 * g;
            d[3] |= scale >> 4 << 2 * g | min >> 4 << (16 + 2 * g);
        }
        break;
    case T_Q3_K:
        for (int g = 0; g < 16; g++) {
            d[g / 8] |= (uint32_t)(p[96 + g % 8] >> g / 8 * 4 & 15) << 4 * (g % 8);
            d[2] |= (uint32_t)(p[104 + g % 4] >> g / 4 * 2 & 3) << 2 * g;
        }
        d[3] = two_bytes(p + 108);
        break;
    default:                           /* IQ4_XS */
        d[0] = two_bytes(p + 4) | two_bytes(p + 6) << 16;
        d[1] = two_bytes(p + 2) | two_bytes(p) << 16;
    }
}

/* file: `n` rows from row0 on, of `bytes` each, as in the file. One thread a block of 32 (float types: a weight). */
static __global__ void repack_kernel(weight w, const uint8_t *file, int row0, int n, size_t bytes)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    wait_for_previous();
    if (i >= (size_t)n * w.nb) return;
    int r = (int)(i / w.nb), b = (int)(i % w.nb);
    const uint8_t *row = file + r * bytes;
    size_t to = (size_t)(row0 + r) * w.nb + b;
    if (is_float(w.type)) {
        bool in = b < w.cols;
        if (w.type == T_F32) ((float *)w.a)[to] = in ? ((const float *)row)[b] : 0;
        else ((uint16_t *)w.a)[to] = in ? ((const uint16_t *)row)[b] : 0;
        return;
    }
    uint32_t a[8] = { 0 }, h[2] = { 0 };
    int low = low_bits(w.type), high = high_bits(w.type);
    for (int c = 0; c < 32; c++) {
        uint32_t code = (uint32_t)file_code(w.type, row, b, c);
        int j = c / 4, k = c % 4;
        if (low == 8) a[j] |= code << 8 * k;
        else if (low == 4) a[j % 4] |= (code & 15) << (8 * k + j / 4 * 4);
        else a[j / 4] |= (code & 3) << (8 * k + 2 * (j % 4));
        if (high == 1) h[0] |= (code >> low & 1) << (8 * k + j);
        if (high == 2) h[j / 4] |= (code >> 4 & 3) << (8 * k + 2 * (j % 4));
    }
    if (low == 2) ((uint2 *)w.a)[to] = make_uint2(a[0], a[1]);
    else ((uint4 *)w.a)[to] = make_uint4(a[0], a[1], a[2], a[3]);
    if (low == 8) ((uint4 *)w.b)[to] = make_uint4(a[4], a[5], a[6], a[7]);
    if (high == 1) ((uint32_t *)w.h)[to] = h[0];
    if (high == 2) ((uint2 *)w.h)[to] = make_uint2(h[0], h[1]);
    if (scale_bytes(w.type) == 4) ((uint32_t *)w.s)[to] = file_scale(w.type, row, b);
    if (scale_bytes(w.type) == 2) ((uint16_t *)w.s)[to] = (uint16_t)file_scale(w.type, row, b);
    if (!of_256(w.type) || b % 8) return;
    uint32_t d[4];
    size_t at = (size_t)(row0 + r) * (w.nb / 8) + b / 8;
    file_super(w.type, row + (size_t)(b / 8) * (bytes / (w.nb / 8)), d);
    if (super_bytes(w.type) == 2) ((uint16_t *)w.d)[at] = (uint16_t)d[0];
    if (super_bytes(w.type) == 4) ((uint32_t *)w.d)[at] = d[0];
    if (super_bytes(w.type) == 8) ((uint2 *)w.d)[at] = make_uint2(d[0], d[1]);
    if (super_bytes(w.type) == 16) ((uint4 *)w.d)[at] = make_uint4(d[0], d[1], d[2], d[3]);
}

/* out[rows][nb * 32] = rows [row0, row0 + n) in f16. One thread a block. */
static __global__ void dequantise_kernel(weight w, int row0, int n, uint16_t *out)
{
    wait_for_previous();
    let_next_start();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)n * w.nb) return;
    block b;
#define UNPACK(T) b = unpack<T>(load_block<T>(w, row0 + (int)(i / w.nb), (int)(i % w.nb)), (int)(i % w.nb) % 8)
    FOR_QUANTISED(w.type, UNPACK)
#undef UNPACK
    uint4 *to = (uint4 *)out + i * 4;
    UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t v[4];
        UNROLL
        for (int j = 0; j < 4; j++) {
            uint32_t low = float_to_half(weight_of(b, 8 * k + 2 * j));
            v[j] = low | (uint32_t)float_to_half(weight_of(b, 8 * k + 2 * j + 1)) << 16;
        }
        to[k] = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

/* bf16 -> f32, which cuBLAS multiplies with f32. */
static __global__ void widen_kernel(const uint16_t *in, size_t n, float *out)
{
    wait_for_previous();
    let_next_start();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = bf16_to_float(in[i]);
}

/* ---- a row's start: embedding and angles ------------------------------------------------------------------------- */

struct start {
    weight embd;
    float embd_scale;
    const kv_row *rows;
    const kv_sequence *sequences;
    float *x;                          /* [rows][n_embd] */
    int n_embd, half;                  /* half: pairs that turn */
    const double *freq[KV_GROUPS];     /* [half] radians per position */
    float scale[KV_GROUPS];
    float *cs[KV_GROUPS], *sn[KV_GROUPS], *sink_cs, *sink_sn;      /* [rows][half] */
};

static __device__ inline void angle(double freq, int pos, float scale, float *cs, float *sn)
{
    double s, c;
    sincos((double)pos * freq, &s, &c);
    *cs = (float)(c * scale);
    *sn = (float)(s * scale);
}

static __global__ void __launch_bounds__(128) start_kernel(start s)
{
    wait_for_previous();
    let_next_start();
    int r = blockIdx.x;
    kv_row row = s.rows[r];
    kv_sequence seq = s.sequences[row.sequence * KV_GROUPS + KV_GLOBAL];
    float *x = s.x + (size_t)r * s.n_embd;
    if (is_float(s.embd.type))
        for (int i = threadIdx.x; i < s.n_embd; i += blockDim.x)
            x[i] = float_weight(s.embd, (size_t)row.token * s.embd.nb + i) * s.embd_scale;
    else
        for (int i = threadIdx.x; i < s.n_embd; i += blockDim.x) {
            block b;
#define UNPACK(T) b = unpack<T>(load_block<T>(s.embd, row.token, i / 32), i / 32 % 8)
            FOR_QUANTISED(s.embd.type, UNPACK)
#undef UNPACK
            x[i] = weight_of(b, i % 32) * s.embd_scale;
        }
    for (int i = threadIdx.x; i < s.half; i += blockDim.x) {
        size_t at = (size_t)r * s.half + i;
        for (int g = 0; g < KV_GROUPS; g++) angle(s.freq[g][i], row.pos, s.scale[g], s.cs[g] + at, s.sn[g] + at);
        if (seq.sinks)
            angle(s.freq[KV_GLOBAL][i], (int)kv_sink_range(row.pos, seq.sinks, seq.window).query, s.scale[KV_GLOBAL],
                  s.sink_cs + at, s.sink_sn + at);
    }
}

/* ---- a product's input ------------------------------------------------------------------------------------------- */

/* The residual stream's next state and its norm: x' = x + (y + bias), of which the sum in brackets is normalised first
 * where there is a post norm; out = norm(x'). */
struct residual {
    const float *x, *y;                /* [rows][n]; y NULL = nothing to add */
    const float *y_scale;              /* [rows] y is to be multiplied by; NULL = 1 */
    const float *bias, *post_norm, *norm;
    float *x_out;                      /* [rows][n]; NULL = not wanted */
    int n;
    float eps;
};

/* buf[n] = the normalised row r, by all threads of the block; `write`: this block writes x'. */
static __device__ void normalise(const residual &p, size_t r, bool write, float *buf, float *shared)
{
    const float *x = p.x + r * p.n, *y = p.y ? p.y + r * p.n : NULL;
    float sum = 0, post = 1, y_scale = p.y_scale ? p.y_scale[r] : 1;
    if (y && p.post_norm) {
        for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
            float v = y[i] * y_scale + (p.bias ? p.bias[i] : 0);
            sum = fmaf(v, v, sum);
        }
        post = 1 / sqrtf(block_sum(sum, shared) / p.n + p.eps);
        sum = 0;
    }
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
        float v = x[i];
        if (y) {
            float add = y[i] * y_scale + (p.bias ? p.bias[i] : 0);
            v += p.post_norm ? add * post * p.post_norm[i] : add;
        }
        buf[i] = v;
        sum = fmaf(v, v, sum);
        if (write && p.x_out) p.x_out[r * p.n + i] = v;
    }
    float scale = 1 / sqrtf(block_sum(sum, shared) / p.n + p.eps);
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) buf[i] = buf[i] * scale * p.norm[i];
    __syncthreads();
}

/* Activations in shared memory: a block's first 16 and last 16 codes, and {scale, sums of its halves}. */
struct acts { uint32_t *low, *high; uint2 *ds; };

/* Quantises nb blocks of x as the CPU does (kernels.h), eight lanes a block. */
static __device__ void quantise(const float *x, int nb, const acts &out)
{
    int lane = threadIdx.x % WARP, j = lane % 8;
    for (int b0 = threadIdx.x / WARP * 4; b0 < nb; b0 += blockDim.x / WARP * 4) {
        int b = b0 + lane / 8;
        float4 v = make_float4(0, 0, 0, 0);
        if (b < nb) v = ((const float4 *)x)[b * 8 + j];
        float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
        bool bad = v.x != v.x || v.y != v.y || v.z != v.z || v.w != v.w;
        for (int step = 1; step < 8; step *= 2) {
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
            bad |= __shfl_xor_sync(ALL_LANES, (int)bad, step) != 0;
        }
        bad |= most == INFINITY;
        bool none = bad || most < 127 * 0x1p-126f;
        float d = none ? 0 : most / 127, inverse = none ? 0 : 1 / d;
        int q0 = none ? 0 : (int)rintf(v.x * inverse), q1 = none ? 0 : (int)rintf(v.y * inverse);
        int q2 = none ? 0 : (int)rintf(v.z * inverse), q3 = none ? 0 : (int)rintf(v.w * inverse);
        int sum = q0 + q1 + q2 + q3;
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        int other = __shfl_xor_sync(ALL_LANES, sum, 4);
        if (b >= nb) continue;
        uint32_t word = (q0 & 255) | (q1 & 255) << 8 | (q2 & 255) << 16 | (uint32_t)q3 << 24;
        (j < 4 ? out.low : out.high)[b * 4 + j % 4] = word;
        uint32_t sums = (sum & 0xffff) | (uint32_t)other << 16;
        if (j == 0) out.ds[b] = make_uint2(bad ? 0x7fc00000u : __float_as_uint(d), sums);
    }
}

/* ---- products of few rows ---------------------------------------------------------------------------------------- */

enum epilogue { STORE, GLU, HEAD };

struct product {
    weight w[3];                       /* of one type; GLU: gate and up */
    int column[3];                     /* of y where the matrix's outputs begin */
    int n_w, pairs;                    /* pairs of rows of all matrices (GLU: of a gate's and an up's row) */
    int n;                             /* rows of the batch, 1..NX */
    /* input: the residual's norm, or plain [rows][k] */
    residual in;
    const float *plain;
    int k;
    const int32_t *gather;             /* [n] rows of the input; NULL = the first n */
    /* output */
    enum epilogue epilogue;
    float *y;                          /* [n][ld] */
    int ld;
    enum activation act;
    const float *bias;                 /* HEAD: [rows] or NULL */
    float cap;                         /* HEAD: 0 = none */
};

static __host__ __device__ inline int padded(int k) { return (k + 31) / 32 * 32; }

/* Bytes of shared memory for nx rows of nb int8 blocks, after which floats may follow. */
static __host__ __device__ constexpr int acts_bytes(int nx, int nb) { return (nx * nb * 40 + 15) / 16 * 16; }
/* Those of nx rows: floats, or int8 blocks and a row being made. */
static size_t product_shared(const product &p, int nx)
{
    int k = padded(p.k);
    return sizeof(float) * k * (is_float(p.w[0].type) ? nx : 1) + (is_float(p.w[0].type) ? 0 : acts_bytes(nx, k / 32));
}

/* Two rows times all of NX inputs, this lane's part of the sums. */
template <int T, int NX>
static __device__ inline void two_rows(const weight &wa, int ra, const weight &wb, int rb, const acts &x,
                                       float sum[2][NX])
{
    int lane = threadIdx.x % WARP, nb = wa.nb;
    raw_block<T> now[2], next[2];
    if (lane < nb) now[0] = load_block<T>(wa, ra, lane), now[1] = load_block<T>(wb, rb, lane);
    KEEP_ROLLED
    for (int b = lane; b < nb; b += WARP) {
        if (b + WARP < nb) next[0] = load_block<T>(wa, ra, b + WARP), next[1] = load_block<T>(wb, rb, b + WARP);
        block w[2] = { unpack<T>(now[0], lane % 8), unpack<T>(now[1], lane % 8) };
        UNROLL
        for (int i = 0; i < NX; i++) {
            uint4 low = ((const uint4 *)x.low)[i * nb + b], high = ((const uint4 *)x.high)[i * nb + b];
            uint2 ds = x.ds[i * nb + b];
            float d = __uint_as_float(ds.x);
            int sum_low = (int16_t)ds.y, sum_high = (int)ds.y >> 16;
            UNROLL
            for (int r = 0; r < 2; r++) {
                int p = __dp4a((int)w[r].q[0], (int)low.x, 0), q = __dp4a((int)w[r].q[4], (int)high.x, 0);
                p = __dp4a((int)w[r].q[1], (int)low.y, p), q = __dp4a((int)w[r].q[5], (int)high.y, q);
                p = __dp4a((int)w[r].q[2], (int)low.z, p), q = __dp4a((int)w[r].q[6], (int)high.z, q);
                p = __dp4a((int)w[r].q[3], (int)low.w, p), q = __dp4a((int)w[r].q[7], (int)high.w, q);
                int all = has_halves(T) ? w[r].s0 * p + w[r].s1 * q : p + q;
                sum[r][i] = fmaf(w[r].d * d, (float)all, sum[r][i]);
                if (T == T_Q2_K) {
                    sum[r][i] = fmaf(w[r].m0, d * (float)sum_low, sum[r][i]);
                    sum[r][i] = fmaf(w[r].m1, d * (float)sum_high, sum[r][i]);
                } else if (T == T_Q4_1 || T == T_Q5_1 || T == T_Q4_K || T == T_Q5_K)
                    sum[r][i] = fmaf(w[r].m0, d * (float)(sum_low + sum_high), sum[r][i]);
            }
        }
        now[0] = next[0], now[1] = next[1];
    }
}

/* The same for float weights; x: [NX][stride]. */
template <int T, int NX>
static __device__ inline void two_float_rows(const weight &wa, int ra, const weight &wb, int rb, const float *x,
                                             int stride, float sum[2][NX])
{
    constexpr int EACH = T == T_F32 ? 4 : 8;
    int lane = threadIdx.x % WARP;
    KEEP_ROLLED
    for (int c = lane * EACH; c < wa.nb; c += WARP * EACH) {
        float w[2][8];
        UNROLL
        for (int r = 0; r < 2; r++) {
            const weight &m = r ? wb : wa;
            size_t at = (size_t)(r ? rb : ra) * m.nb + c;
            uint4 v = stream_load((const uint4 *)(m.a + at * (T == T_F32 ? 4 : 2)));
            uint32_t word[4] = { v.x, v.y, v.z, v.w };
            UNROLL
            for (int i = 0; i < 4; i++) {
                if (T == T_F32) w[r][i] = __uint_as_float(word[i]);
                else if (T == T_F16) w[r][2 * i] = low_half(word[i]), w[r][2 * i + 1] = high_half(word[i]);
                else w[r][2 * i] = bf16_to_float(word[i] & 0xffff), w[r][2 * i + 1] = bf16_to_float(word[i] >> 16);
            }
        }
        UNROLL
        for (int i = 0; i < NX; i++)
            UNROLL
            for (int j = 0; j < EACH; j += 4) {
                float4 v = *(const float4 *)(x + i * stride + c + j);
                UNROLL
                for (int r = 0; r < 2; r++) {
                    sum[r][i] = fmaf(w[r][j], v.x, sum[r][i]);
                    sum[r][i] = fmaf(w[r][j + 1], v.y, sum[r][i]);
                    sum[r][i] = fmaf(w[r][j + 2], v.z, sum[r][i]);
                    sum[r][i] = fmaf(w[r][j + 3], v.w, sum[r][i]);
                }
            }
    }
}

static __device__ inline float activate(float gate, float up, enum activation act)
{
    if (act == ACT_SILU) return gate / (1 + __expf(-gate)) * up;
    float inner = 0.79788456080286535588f * (gate + 0.044715f * gate * gate * gate);      /* sqrt(2 / pi) */
    return 0.5f * gate * (1 + tanhf(inner)) * up;
}

/* T: the matrices' type. */
template <int T, int NX>
static __global__ void __launch_bounds__(PRODUCT_WARPS * WARP, NX == 1 ? 2 : 1)
product_kernel(const __grid_constant__ product p)
{
    constexpr bool floating = T == T_F32 || T == T_F16 || T == T_BF16;
    __shared__ float shared[PRODUCT_WARPS];
    int lane = threadIdx.x % WARP, k = padded(p.k), nb = k / 32;
    acts x = { (uint32_t *)smem, (uint32_t *)smem + NX * nb * 4, (uint2 *)(smem + NX * nb * 32) };
    float *floats = (float *)(smem + (floating ? 0 : acts_bytes(NX, nb)));
    wait_for_previous();
    let_next_start();
    for (int i = 0; i < NX; i++) {
        int r = i < p.n ? i : p.n - 1;
        if (p.gather) r = p.gather[r];
        float *buf = floats + (floating ? i * k : 0);
        __syncthreads();
        for (int j = p.k + threadIdx.x; j < k; j += blockDim.x) buf[j] = 0;
        if (p.plain)
            for (int j = threadIdx.x; j < p.k; j += blockDim.x) buf[j] = p.plain[(size_t)r * p.k + j];
        else normalise(p.in, r, blockIdx.x == 0 && i < p.n, buf, shared);
        __syncthreads();
        acts row = { x.low + i * nb * 4, x.high + i * nb * 4, x.ds + i * nb };
        if (!floating) quantise(buf, nb, row);
    }
    __syncthreads();
    for (int pair = blockIdx.x * PRODUCT_WARPS + threadIdx.x / WARP; pair < p.pairs;
         pair += gridDim.x * PRODUCT_WARPS) {
        bool glu = p.epilogue == GLU;
        int m = 0, i0 = pair;
        while (!glu && i0 >= (p.w[m].rows + 1) / 2) i0 -= (p.w[m++].rows + 1) / 2;
        int ra = glu ? pair : 2 * i0, rb = glu ? pair : ra + 1 < p.w[m].rows ? ra + 1 : ra;
        float sum[2][NX];
        UNROLL
        for (int i = 0; i < NX; i++) sum[0][i] = sum[1][i] = 0;
        if (floating) two_float_rows<T, NX>(p.w[m], ra, p.w[glu ? 1 : m], rb, floats, k, sum);
        else two_rows<floating ? (int)T_Q8_0 : T, NX>(p.w[m], ra, p.w[glu ? 1 : m], rb, x, sum);
        UNROLL
        for (int i = 0; i < NX; i++) sum[0][i] = warp_sum(sum[0][i]), sum[1][i] = warp_sum(sum[1][i]);
        UNROLL
        for (int i = 0; i < NX; i++)
            UNROLL
            for (int r = 0; r < 2; r++) {
                if (lane != 2 * i + r || i >= p.n || ra + r >= p.w[m].rows + (glu ? 1 : 0)) continue;
                float y = sum[r][i];
                if (glu) {
                    if (r == 0) p.y[(size_t)i * p.ld + pair] = activate(sum[0][i], sum[1][i], p.act);
                    continue;
                }
                if (p.epilogue == HEAD) {
                    if (p.bias) y += p.bias[ra + r];
                    if (p.cap > 0) y = p.cap * tanhf(y / p.cap);
                }
                p.y[(size_t)i * p.ld + p.column[m] + ra + r] = y;
            }
    }
}

/* gate[n] = act(gate) * up */
static __global__ void glu_kernel(float *gate, const float *up, size_t n, enum activation act)
{
    wait_for_previous();
    let_next_start();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) gate[i] = activate(gate[i], up[i], act);
}

/* ---- inputs of cuBLAS, row by row -------------------------------------------------------------------------------- */

struct prepare {
    residual in;                       /* the residual's norm; or, where in.norm is NULL: */
    const float *plain, *up;           /* [rows][n], and where up is not NULL plain is the gate of a GLU */
    enum activation act;
    int n;
    const int32_t *gather;             /* rows of the input; NULL = all in order */
    uint16_t *half;                    /* [rows][ld] in f16; NULL = not wanted */
    float *full;                       /* the same in f32 */
    int ld;                            /* n padded with zeros */
    float *scale;                      /* [rows] what half was divided by so that it fits; NULL = numbers are clipped */
};

static __global__ void __launch_bounds__(256) prepare_kernel(prepare p)
{
    __shared__ float shared[8];
    wait_for_previous();
    let_next_start();
    size_t to = blockIdx.x, r = p.gather ? p.gather[to] : to;
    float *buf = (float *)smem, scale = 1;
    if (p.in.norm) normalise(p.in, r, true, buf, shared);
    const float *gate = p.in.norm ? buf : p.plain + r * p.n, *up = p.up ? p.up + r * p.n : NULL;
    if (p.scale) {
        float most = 0;
        for (int i = threadIdx.x; i < p.n && p.half; i += blockDim.x)
            most = fmaxf(most, fabsf(up ? activate(gate[i], up[i], p.act) : gate[i]));
        most = warp_max(most);
        if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = most;
        __syncthreads();
        for (unsigned i = 0; i < blockDim.x / WARP; i++) most = fmaxf(most, shared[i]);
        while (most / scale > 32768 && scale < 0x1p100f) scale *= 256;
        if (threadIdx.x == 0) p.scale[to] = scale;
    }
    for (int i = threadIdx.x; i < p.ld; i += blockDim.x) {
        float v = i >= p.n ? 0 : up ? activate(gate[i], up[i], p.act) : gate[i];
        if (p.full) p.full[to * p.ld + i] = v;
        if (p.half) {
            v /= scale;
            p.half[to * p.ld + i] = float_to_half(v > 65504 ? 65504 : v < -65504 ? -65504 : v);
        }
    }
}

/* y[rows][ld] += bias[n], then the soft cap. */
static __global__ void head_kernel(float *y, int ld, int n, const float *bias, float cap)
{
    wait_for_previous();
    let_next_start();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = y[(size_t)blockIdx.y * ld + i];
    if (bias) v += bias[i];
    if (cap > 0) v = cap * tanhf(v / cap);
    y[(size_t)blockIdx.y * ld + i] = v;
}

/* ---- cuBLAS: loaded when it is needed, so that the program starts where it is not installed ---------------------- */

/* One of the overloads of the header. */
typedef cublasStatus_t (*gemm_function)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                                        const void *, const void *, cudaDataType_t, int, const void *, cudaDataType_t,
                                        int, const void *, void *, cudaDataType_t, int, cublasComputeType_t,
                                        cublasGemmAlgo_t);

struct blas {
    void *library;
    cublasHandle_t handle;
    decltype(&cublasCreate) create;
    decltype(&cublasDestroy) destroy;
    decltype(&cublasSetStream) set_stream;
    gemm_function gemm;
};

static bool blas_open(struct blas *b, cudaStream_t stream, struct error *e)
{
#ifdef __CUDACC__
    char name[40];
    snprintf(name, sizeof name, "libcublas.so.%d", CUBLAS_VER_MAJOR);
    b->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!b->library)
        return fail(e, GEN_MODEL, "cuBLAS cannot be loaded (%s): put its folder into LD_LIBRARY_PATH", dlerror());
    b->create = (decltype(b->create))dlsym(b->library, "cublasCreate_v2");
    b->destroy = (decltype(b->destroy))dlsym(b->library, "cublasDestroy_v2");
    b->set_stream = (decltype(b->set_stream))dlsym(b->library, "cublasSetStream_v2");
    b->gemm = (gemm_function)dlsym(b->library, "cublasGemmEx");
    if (!b->create || !b->destroy || !b->set_stream || !b->gemm)
        return fail(e, GEN_MODEL, "%s lacks functions of cuBLAS", name);
#else
    *b = { NULL, NULL, cublasCreate, cublasDestroy, cublasSetStream, cublasGemmEx };
#endif
    cublasStatus_t r = b->create(&b->handle);
    if (r == CUBLAS_STATUS_SUCCESS) r = b->set_stream(b->handle, stream);
    return r == CUBLAS_STATUS_SUCCESS || fail(e, GEN_RUN, "cuBLAS: cublasCreate failed with status %d", (int)r);
}

static void blas_close(struct blas *b)
{
    if (b->handle) b->destroy(b->handle);
#ifdef __CUDACC__
    if (b->library) dlclose(b->library);
#endif
}

/* ---- the backend ------------------------------------------------------------------------------------------------- */

struct device_layer {
    weight qkv[3], o, gate, up, down;
    float *attn_norm, *q_bias, *k_bias, *v_bias, *o_bias, *q_norm, *k_norm, *attn_post_norm, *ffn_norm, *ffn_post_norm;
    int group, index;                  /* KV group, and layer number in that group */
};

/* Pages of one kind of one sequence on the device: entries [0, low) as they are, the others in a ring. */
struct table { int32_t *device, *shadow; int low, ring; };

/* What changes from step to step, side by side in pinned memory and copied as one. */
struct step {
    kv_row *rows[KV_GROUPS];           /* pos: of the cache's row; in the local group that of the text */
    kv_sequence *sequences;
    int32_t *wanted, *top;             /* [LOGIT_ROWS] rows with logits; how many of each are told */
    kv_run *runs;
    float *votes;
    uint64_t **mass;
};

struct gpu {
    struct backend base;
    struct kv_device pool;             /* memory of the page pools */
    const struct model *m;
    struct error *e;                   /* where the call under way reports its first failure */
    struct error lost;                 /* what failed between forward passes: the next one reports it */
    const char *last;                  /* name of the kernel launched last */
    cudaDeviceProp device;
    int shared_limit, resident;        /* bytes of shared memory a block; blocks of the product kernel on the device */
    bool dependent;                    /* kernels may start before the one before them ends */
    cudaStream_t stream;
    cudaStream_t moves;                /* pages between device and host, while the device computes */
    cudaEvent_t moved;                 /* all moves so far; */
    bool moving;                       /* what comes next on the stream does not wait for it yet */
    struct blas blas;
    struct comm *comm;                 /* the ranks that have the model's other parts; */
    struct exchange *exchange;         /* NULL: the model is whole */
    char name[300];                    /* of the device, and how ranks exchange */
    int max_rows, max_sequences;
    bool evicts;
    int mass_rows;
    void **allocated;                  /* what is to be freed */
    int n_allocated, most_allocated;
    size_t weight_bytes;

    device_layer *layers;
    weight embd, out;
    float *out_norm, *out_bias;
    double *freq[KV_GROUPS];

    float *x[2], *qkv, *att, *proj, *gate, *up, *logits;           /* as in cpu.c; x is written to and fro */
    float *cs[KV_GROUPS], *sn[KV_GROUPS], *sink_cs, *sink_sn;
    uint16_t *half;                    /* [max_rows][widest] inputs of cuBLAS */
    float *full, *full_scale, *tile;
    int tile_bytes;
    float *part, *peaks;
    unsigned *arrived, *logit_arrived;
    uint64_t *logit_peaks;             /* see struct selection */
    selected *largest;                 /* [LOGIT_ROWS], pinned: the device writes there itself */
    float *host_logits;                /* [LOGIT_ROWS][n_vocab], pinned */
    int n_logits;
    uint64_t have;                     /* bits of the logits that are already in host_logits */

    struct step host, dev;
    void *host_step, *dev_step;
    size_t step_bytes;
    table *tables;                     /* [max_sequences][KV_GROUPS][2]: main, raw */
    kv_store stores[KV_GROUPS][2];
    bool tables_open;
    int64_t max_seen;
    cudaGraphExec_t graphs[FEW + 1];   /* by number of rows */
};

/* Reports a call that failed; the first one counts. */
static bool check(struct gpu *c, cudaError_t r, const char *call, const char *of)
{
    if (r == cudaSuccess) return true;
    if (c->e && !c->e->code)
        fail(c->e, GEN_RUN, "CUDA: %s of %s failed: %s", call, of, cudaGetErrorString(r));
    return false;
}

static bool remember(struct gpu *c, void *p)
{
    if (c->n_allocated == c->most_allocated) {
        int most = c->most_allocated * 2 + 64;
        void **grown = (void **)realloc(c->allocated, sizeof *grown * most);
        if (!grown) return fail(c->e, GEN_RUN, "cannot allocate the list of device memory");
        c->allocated = grown;
        c->most_allocated = most;
    }
    c->allocated[c->n_allocated++] = p;
    return true;
}

/* Device memory, filled with zeros; lower: what the user can do when there is too little, NULL = nothing. */
static void *device_alloc(struct gpu *c, size_t bytes, const char *label, const char *what, const char *lower)
{
    void *p = NULL;
    size_t available = 0, all = 0;
    cudaMemGetInfo(&available, &all);
    if (bytes == 0) bytes = 16;
    cudaError_t r = cudaMalloc(&p, bytes);
    if (r == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        fail(c->e, GEN_RUN, "%s need %zu bytes of device memory, but %zu are free%s%s", what, bytes, available,
             lower ? ": " : "", lower ? lower : "");
        return NULL;
    }
    if (!check(c, r, "cudaMalloc", label)) return NULL;
    CUDA_LABEL(p, label);
    return check(c, cudaMemsetAsync(p, 0, bytes, c->stream), "cudaMemset", label) ? p : (cudaFree(p), (void *)NULL);
}

/* Memory of the host's that the device reads and writes. */
static void *host_alloc(struct gpu *c, size_t bytes, const char *what, const char *lower)
{
    void *p = NULL;
    cudaError_t r = cudaMallocHost(&p, bytes);
    if (r == cudaErrorMemoryAllocation) {
        size_t available = (size_t)sysconf(_SC_AVPHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
        cudaGetLastError();
        fail(c->e, GEN_RUN, "%s need %zu bytes of pinned memory; the system has %zu free, of which not all may be "
             "pinned%s%s", what, bytes, available, lower ? ": " : "", lower ? lower : "");
        return NULL;
    }
    if (!check(c, r, "cudaMallocHost", what)) return NULL;
    CUDA_LABEL(p, "host");
    return p;
}

template <class T> static bool scratch(struct gpu *c, T **out, size_t n)
{
    *out = (T *)device_alloc(c, n * sizeof(T), "scratch", "working memory would", "lower --batch-size or --ctx-size");
    return *out && remember(c, *out);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

template <class... P, class... A>
static void launch(struct gpu *c, const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                   A... args)
{
    if (c->e->code) return;
    cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (shared + STATIC_BYTES > 48 << 10 &&
        !check(c, cudaFuncSetAttribute((const void *)kernel, most, (int)shared), "cudaFuncSetAttribute", name))
        return;
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute;
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = c->stream;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = c->dependent ? 1 : 0;
    c->last = name;
    check(c, cudaLaunchKernelEx(&config, kernel, (P)args...), "the launch", name);
}

static void launch_attention(struct gpu *c, const attention_launch &l, const attention &a)
{
    launch(c, l.name, l.kernel, l.grid, l.block, l.shared, a);
}

/* Rows [r0, r0 + n) of a product's input and output. */
static product part_of(const product &p, int r0, int n)
{
    product q = p;
    q.n = n;
    if (p.gather) q.gather += r0;
    else {
        size_t at = (size_t)r0 * p.k;
        if (p.plain) q.plain += at;
        else q.in.x += at;
        if (p.in.y) q.in.y += at;
        if (p.in.x_out) q.in.x_out += at;
    }
    q.y += (size_t)r0 * p.ld;
    return q;
}

typedef void (*product_function)(product);

template <int T> static product_function product_of(int nx)
{
    return nx == 1 ? product_kernel<T, 1> : nx == 4 ? product_kernel<T, 4> : product_kernel<T, 8>;
}
static product_function product_of_type(enum tensor_type type, int nx)
{
    switch (type) {
    case T_F32: return product_of<T_F32>(nx);
    case T_F16: return product_of<T_F16>(nx);
    case T_BF16: return product_of<T_BF16>(nx);
#define PRODUCT_OF(T) return product_of<T>(nx)
    default: FOR_QUANTISED(type, PRODUCT_OF)
#undef PRODUCT_OF
    }
    return NULL;
}

/* Matrices of one type. */
static void multiply_alike(struct gpu *c, const char *name, product p)
{
    int fits = FEW;
    p.pairs = p.epilogue == GLU ? p.w[0].rows : 0;
    for (int i = 0; i < p.n_w && p.epilogue != GLU; i++) p.pairs += (p.w[i].rows + 1) / 2;
    while (fits > 1 && product_shared(p, fits) > (size_t)c->shared_limit) fits /= 2;
    if (fits == 2) fits = 1;
    int blocks = (p.pairs + PRODUCT_WARPS - 1) / PRODUCT_WARPS;
    if (blocks > c->resident) blocks = c->resident;
    for (int r0 = 0; r0 < p.n; r0 += fits) {
        int n = p.n - r0 < fits ? p.n - r0 : fits, nx = n == 1 ? 1 : n <= 4 ? 4 : 8;
        launch(c, name, product_of_type(p.w[0].type, nx), dim3(blocks), dim3(PRODUCT_WARPS * WARP),
               product_shared(p, nx), part_of(p, r0, n));
    }
}

/* One launch for the matrices of each type, side by side in y. */
static void multiply(struct gpu *c, const char *name, product p)
{
    int column = 0, done = 0;
    for (int i = 0; i < p.n_w; column += p.w[i++].rows) p.column[i] = column;
    for (int i = 0; i < p.n_w; i++) {
        if (done >> i & 1) continue;
        product q = p;
        q.n_w = 0;
        for (int k = i; k < p.n_w; k++)
            if (p.w[k].type == p.w[i].type) {
                q.w[q.n_w] = p.w[k];
                q.column[q.n_w++] = p.column[k];
                done |= 1 << k;
            }
        multiply_alike(c, name, q);
    }
}

/* ---- products of many rows --------------------------------------------------------------------------------------- */

/* y[n][ld] = x times w; x: [n][x_ld] as floats or as halves, whichever the weights need. */
static void gemm(struct gpu *c, const weight &w, int n, int x_ld, float *y, int ld)
{
    const float one = 1, zero = 0;
    bool full = w.type == T_F32 || w.type == T_BF16, direct = w.type == T_F32 || w.type == T_F16;
    int k = is_float(w.type) ? w.nb : w.nb * 32;                   /* padding is zero on both sides */
    int step = direct ? w.rows : (int)(c->tile_bytes / ((size_t)k * (full ? 4 : 2)));
    for (int r0 = 0; r0 < w.rows && !c->e->code; r0 += step) {
        int rows = w.rows - r0 < step ? w.rows - r0 : step;
        size_t count = (size_t)rows * w.nb;
        dim3 grid((unsigned)((count + 127) / 128));
        const void *tile = direct ? (const void *)w.a : c->tile;
        if (w.type == T_BF16)
            launch(c, "widen", widen_kernel, grid, dim3(128), 0, (const uint16_t *)w.a + (size_t)r0 * w.nb, count,
                   c->tile);
        else if (!direct)
            launch(c, "dequantise", dequantise_kernel, grid, dim3(128), 0, w, r0, rows, (uint16_t *)c->tile);
        cudaDataType_t type = full ? CUDA_R_32F : CUDA_R_16F;
        cublasStatus_t r = c->blas.gemm(c->blas.handle, CUBLAS_OP_T, CUBLAS_OP_N, rows, n, k, &one, tile, type, k,
                                        full ? (const void *)c->full : c->half, type, x_ld, &zero, y + r0, CUDA_R_32F,
                                        ld, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
        if (r != CUBLAS_STATUS_SUCCESS && !c->e->code)
            fail(c->e, GEN_RUN, "cuBLAS: cublasGemmEx of %d x %d x %d failed with status %d", rows, n, k, (int)r);
    }
}

/* Makes the inputs of n_w matrices that follow each other, in the forms that they need. */
static void inputs(struct gpu *c, const weight *w, int n_w, prepare p, int n)
{
    bool half = false, full = false;
    for (int i = 0; i < n_w; i++)
        if (w[i].type == T_F32 || w[i].type == T_BF16) full = true;
        else half = true;
    p.ld = padded(p.n);
    p.half = half ? c->half : NULL;
    p.full = full ? c->full : NULL;
    launch(c, "prepare", prepare_kernel, dim3(n), dim3(256), p.in.norm ? sizeof(float) * p.n : 0, p);
}

/* Their products, side by side in y[n][ld]. */
static void many(struct gpu *c, const weight *w, int n_w, const prepare &p, int n, float *y, int ld)
{
    inputs(c, w, n_w, p, n);
    for (int i = 0; i < n_w; y += w[i++].rows) gemm(c, w[i], n, padded(p.n), y, ld);
}

/* ---- the forward pass -------------------------------------------------------------------------------------------- */

static int qkv_width(const struct model *m) { return m->n_head * m->head_k + m->n_kv * (m->head_k + m->head_v); }

static attention attention_of(const struct gpu *c, const device_layer &l, int n, bool alone)
{
    const struct model *m = c->m;
    attention a = {};
    a.main = c->stores[l.group][0];
    a.raw = c->stores[l.group][1];
    a.layer = l.index;
    a.n_head = m->n_head, a.n_kv = m->n_kv, a.head_k = m->head_k, a.head_v = m->head_v;
    a.n_rot = m->rope_global.n;
    a.order = m->rope_order;
    a.scale = m->attn_scale, a.cap = m->attn_cap, a.eps = m->norm_eps;
    a.qkv = c->qkv;
    a.ld = qkv_width(m);
    a.q_bias = l.q_bias, a.k_bias = l.k_bias, a.v_bias = l.v_bias, a.q_norm = l.q_norm, a.k_norm = l.k_norm;
    a.cs = c->cs[l.group], a.sn = c->sn[l.group], a.sink_cs = c->sink_cs, a.sink_sn = c->sink_sn;
    a.rows = c->dev.rows[l.group];
    a.sequences = c->dev.sequences + l.group;
    a.sequence_stride = KV_GROUPS;
    a.out = c->att;
    int parts = attention_parts(m->n_head / m->n_kv, m->head_v);
    a.append = alone && parts == 1;
    a.n_splits = attention_splits(m->n_kv * parts * n, c->device.multiProcessorCount, c->max_seen);
    a.part = c->part;
    a.arrived = c->arrived;
    a.runs = c->dev.runs;
    attention_fit(&a, c->shared_limit);
    if (c->evicts && l.group == KV_GLOBAL) {
        a.peaks = c->peaks;
        a.votes = c->dev.votes;
        a.mass = c->dev.mass;
        a.mass_rows = c->mass_rows;
    }
    return a;
}

static residual residual_of(const struct gpu *c, const float *x, const float *y, const float *bias, const float *post,
                            const float *norm, float *x_out)
{
    return { x, y, NULL, bias, post, norm, x_out, c->m->n_embd, c->m->norm_eps };
}

/* Attention of all rows; `alone`: each is the only one of its sequence. */
static void attend(struct gpu *c, const device_layer &l, int n, int n_runs, bool alone)
{
    attention a = attention_of(c, l, n, alone);
    if (!a.append) {
        launch_attention(c, attention_append(&a, n), a);
        if (a.raw.base) launch_attention(c, attention_seal(&a, n), a);
    }
    launch_attention(c, alone ? attention_decode(&a, n, c->shared_limit) : attention_prefill(&a, n_runs), a);
    if (a.peaks) launch_attention(c, attention_mass(&a, n_runs, alone ? 1 : a.queries / (a.n_head / a.n_kv)), a);
}

/* Makes c->proj[n][n_embd] the sum over the ranks. */
static void sum_ranks(struct gpu *c, int n, float *scale)
{
    if (c->exchange) exchange_sum(c->exchange, c->proj, n, c->m->n_embd, scale, c->e);
}

/* c->gate[n][n_ff] = the gated activation. */
static void gate_and_up(struct gpu *c, product p)
{
    int ff = c->m->n_ff;
    p.ld = ff;
    p.y = c->gate;
    p.epilogue = GLU;
    if (p.w[0].type == p.w[1].type) return multiply_alike(c, "gate and up", p);
    p.epilogue = STORE;
    p.n_w = 1;
    multiply_alike(c, "gate", p);
    p.w[0] = p.w[1];
    p.y = c->up;
    multiply_alike(c, "up", p);
    launch(c, "activation", glu_kernel, dim3((unsigned)((p.n * (size_t)ff + 255) / 256)), dim3(256), 0, c->gate,
           (const float *)c->up, (size_t)p.n * ff, p.act);
}

/* Layers by kernels of our own. Returns the residual stream's last state before `*y` is added to it. */
static const float *few_rows(struct gpu *c, int n, int n_runs, bool alone)
{
    const struct model *m = c->m;
    float *now = c->x[0], *other = c->x[1];
    for (int i = 0; i < m->n_layer; i++) {
        const device_layer &l = c->layers[i];
        product p = {};
        p.n = n;
        p.k = m->n_embd;
        p.act = m->act;
        p.w[0] = l.qkv[0], p.w[1] = l.qkv[1], p.w[2] = l.qkv[2];
        p.n_w = 3;
        p.in = residual_of(c, now, i ? c->proj : NULL, NULL, i ? c->layers[i - 1].ffn_post_norm : NULL, l.attn_norm,
                           other);
        p.y = c->qkv, p.ld = qkv_width(m);
        multiply(c, "query, key and value", p);
        attend(c, l, n, n_runs, alone);
        product o = {};
        o.n = n;
        o.k = m->n_head * m->head_v;
        o.w[0] = l.o, o.n_w = 1;
        o.plain = c->att;
        o.y = c->proj, o.ld = m->n_embd;
        multiply(c, "attention output", o);
        sum_ranks(c, n, NULL);
        p.w[0] = l.gate, p.w[1] = l.up, p.n_w = 2;
        p.in = residual_of(c, other, c->proj, l.o_bias, l.attn_post_norm, l.ffn_norm, now);
        gate_and_up(c, p);
        o.k = m->n_ff;
        o.w[0] = l.down;
        o.plain = c->gate;
        multiply(c, "down", o);
        sum_ranks(c, n, NULL);
    }
    return now;
}

/* The same by cuBLAS; the residual stream is changed in place. */
static const float *many_rows(struct gpu *c, int n, int n_runs, bool alone)
{
    const struct model *m = c->m;
    for (int i = 0; i < m->n_layer; i++) {
        const device_layer &l = c->layers[i];
        prepare p = {};
        p.n = m->n_embd;
        p.act = m->act;
        p.in = residual_of(c, c->x[0], i ? c->proj : NULL, NULL, i ? c->layers[i - 1].ffn_post_norm : NULL, l.attn_norm,
                           c->x[0]);
        if (i) p.in.y_scale = c->full_scale;
        many(c, l.qkv, 3, p, n, c->qkv, qkv_width(m));
        attend(c, l, n, n_runs, alone);
        prepare o = {};
        o.plain = c->att;
        o.n = m->n_head * m->head_v;
        many(c, &l.o, 1, o, n, c->proj, m->n_embd);
        sum_ranks(c, n, NULL);
        p.in = residual_of(c, c->x[0], c->proj, l.o_bias, l.attn_post_norm, l.ffn_norm, c->x[0]);
        inputs(c, &l.gate, 2, p, n);
        gemm(c, l.gate, n, padded(p.n), c->gate, m->n_ff);
        gemm(c, l.up, n, padded(p.n), c->up, m->n_ff);
        o.plain = c->gate, o.up = c->up;
        o.act = m->act;
        o.n = m->n_ff;
        o.scale = c->full_scale;
        many(c, &l.down, 1, o, n, c->proj, m->n_embd);
        sum_ranks(c, n, c->full_scale);
    }
    return c->x[0];
}

static void head(struct gpu *c, const float *x, int n_wanted, bool all, bool scaled)
{
    const struct model *m = c->m;
    residual in = residual_of(c, x, c->proj, NULL, c->layers[m->n_layer - 1].ffn_post_norm, c->out_norm, NULL);
    if (scaled) in.y_scale = c->full_scale;
    const int32_t *gather = all ? NULL : c->dev.wanted;
    int ld = exchange_most(c->comm, m->n_vocab);       /* of this rank's part of the vocabulary */
    if (n_wanted <= FEW) {
        product p = {};
        p.n = n_wanted;
        p.k = m->n_embd;
        p.w[0] = c->out, p.n_w = 1;
        p.in = in;
        p.gather = gather;
        p.epilogue = HEAD;
        p.y = c->logits, p.ld = ld;
        p.bias = c->out_bias;
        p.cap = m->logit_cap;
        multiply(c, "output", p);
    } else {
        prepare p = {};
        p.n = m->n_embd;
        p.in = in;
        p.gather = gather;
        many(c, &c->out, 1, p, n_wanted, c->logits, ld);
        if (c->out_bias || m->logit_cap > 0)
            launch(c, "output", head_kernel, dim3((c->out.rows + 255) / 256, n_wanted), dim3(256), 0, c->logits, ld,
                   c->out.rows, (const float *)c->out_bias, m->logit_cap);
    }
    if (c->exchange) exchange_gather(c->exchange, c->logits, n_wanted, m->n_vocab, c->e);
    if (comm_rank(c->comm)) return;
    selection s = { c->logits, m->n_vocab, c->dev.top, c->logit_peaks, c->logit_arrived, c->largest };
    select_launch l = select_largest(&s, n_wanted);
    launch(c, l.name, l.kernel, l.grid, l.block, l.shared, s);
}

/* Everything of a step on the stream. */
static void enqueue(struct gpu *c, int n, int n_runs, int n_wanted, bool alone)
{
    const struct model *m = c->m;
    check(c, cudaMemcpyAsync(c->dev_step, c->host_step, c->step_bytes, cudaMemcpyHostToDevice, c->stream), "cudaMemcpy",
          "the step's rows");
    start s = {};
    s.embd = c->embd;
    s.embd_scale = m->embd_scale;
    s.rows = c->dev.rows[KV_LOCAL];
    s.sequences = c->dev.sequences;
    s.x = c->x[0];
    s.n_embd = m->n_embd;
    s.half = m->rope_global.n / 2;
    for (int g = 0; g < KV_GROUPS; g++) {
        s.freq[g] = c->freq[g];
        s.scale[g] = g == KV_LOCAL ? m->rope_local.scale : m->rope_global.scale;
        s.cs[g] = c->cs[g], s.sn[g] = c->sn[g];
    }
    s.sink_cs = c->sink_cs, s.sink_sn = c->sink_sn;
    launch(c, "start", start_kernel, dim3(n), dim3(128), 0, s);
    const float *x = n <= FEW ? few_rows(c, n, n_runs, alone) : many_rows(c, n, n_runs, alone);
    if (n_wanted) head(c, x, n_wanted, n_wanted == n, n > FEW);
}

/* ---- page tables ------------------------------------------------------------------------------------------------- */

/* The pools' places are known when the first batch comes. What an attempt that failed has got is kept for the next. */
static bool open_tables(struct gpu *c, const struct batch *batch)
{
    for (int g = 0; g < KV_GROUPS; g++)
        for (int kind = 0; kind < 2; kind++) {
            const struct kv_view *v = &batch->views[0][g];
            const struct kv_slots *slots = kind ? &v->raw : &v->main;
            const struct kv_shape *shape = slots->shape;
            if (!shape || shape->n_layer == 0) continue;
            unsigned char *base = slots->base ? slots->base : slots->slow;
            c->stores[g][kind] = { base, kv_page_bytes(shape), kv_layer_bytes(shape), shape->n_kv,
                                   shape->page_size / KV_BLOCK, (int)kv_k_tile_bytes(shape),
                                   (int)kv_v_tile_bytes(shape), shape->type_k, shape->type_v, slots->slow,
                                   slots->first_slow };
            for (int i = 0; i < c->max_sequences; i++) {
                table *t = &c->tables[(i * KV_GROUPS + g) * 2 + kind];
                t->low = kind ? 1 : (v->sinks + shape->page_size - 1) / shape->page_size;
                int64_t seen = kind ? 2 * KV_BLOCK : c->max_seen;
                t->ring = (int)((seen + c->max_rows) / shape->page_size) + 4;
                int entries = t->low + t->ring;
                if (!t->device && !scratch(c, &t->device, entries)) return false;
                if (!t->shadow && !(t->shadow = (int32_t *)host_alloc(c, sizeof *t->shadow * entries, "the page tables",
                                                                      "lower --ctx-size")))
                    return false;
                for (int k = 0; k < entries; k++) t->shadow[k] = -1;
            }
        }
    return c->tables_open = true;
}

/* Brings what rows [pos, last] of one sequence see of its pages to the device. */
static void upload_table(struct gpu *c, table *t, const int32_t *pages, int first, int last)
{
    int low = INT32_MAX, high = -1;
    for (int i = 0; i <= last; i++) {
        if (i == t->low && first > i) i = first;
        int at = i < t->low ? i : t->low + (i - t->low) % t->ring;
        if (i > last || t->shadow[at] == pages[i]) continue;
        t->shadow[at] = pages[i];
        if (at < low) low = at;
        if (at > high) high = at;
    }
    if (high >= low)
        check(c, cudaMemcpyAsync(t->device + low, t->shadow + low, sizeof(int32_t) * (high - low + 1),
                                 cudaMemcpyHostToDevice, c->stream), "cudaMemcpy", "a page table");
}

/* Rows [row, end) are those of one sequence. */
static void put_sequence(struct gpu *c, const struct batch *batch, int row, int end)
{
    int sequence = batch->rows[row].sequence;
    c->host.mass[sequence] = batch->views[sequence][KV_GLOBAL].mass;
    for (int g = 0; g < KV_GROUPS; g++) {
        const struct kv_view *v = &batch->views[sequence][g];
        int pos = (int)(batch->rows[row].pos - v->gone), last = (int)(batch->rows[end - 1].pos - v->gone);
        kv_sequence *s = &c->host.sequences[sequence * KV_GROUPS + g];
        table *t = &c->tables[(sequence * KV_GROUPS + g) * 2];
        *s = { t[0].device, t[1].device, t[0].low, t[0].ring, t[1].ring, v->sinks, v->window };
        if (c->stores[g][0].base) {
            int page = v->main.shape->page_size;
            upload_table(c, &t[0], v->main.pages, (int)kv_window_range(pos, v->sinks, v->window).first / page,
                         last / page);
        }
        if (c->stores[g][1].base) upload_table(c, &t[1], v->raw.pages, pos / KV_BLOCK, last / KV_BLOCK);
    }
}

/* What a weight of the row's queries counts among the masses: see struct kv_view. */
static float vote(const struct kv_view *v, int64_t pos)
{
    int64_t before = v->prompt - 1 - pos;
    return !v->mass || pos < v->voters ? 0 : before > 0 ? (float)pow(v->fade, (double)(before / KV_BLOCK)) : 1;
}

static bool forward(struct backend *b, const struct batch *batch, struct error *e)
{
    struct gpu *c = (struct gpu *)b;
    int n = batch->n_rows, wanted = 0, n_runs = 0, group = c->m->n_head / c->m->n_kv;
    bool alone = true;
    struct error failed = c->lost;
    c->lost = {};
    for (int r = 0; r < n; r++) wanted += batch->rows[r].want == WANT_LOGITS;
    if (wanted > LOGIT_ROWS)
        return fail(e, GEN_RUN, "%d rows want logits, but a batch gives at most %d", wanted, LOGIT_ROWS);
    c->e = &failed;
    c->n_logits = 0;
    c->have = 0;
    c->mass_rows = (int)batch->views[0][KV_GLOBAL].mass_rows;
    if (!c->tables_open) open_tables(c, batch);
    for (int r = 0, end; r < n && !failed.code; r = end) {
        for (end = r + 1; end < n && batch->rows[end].sequence == batch->rows[r].sequence; end++) alone = false;
        put_sequence(c, batch, r, end);
    }
    int queries = attention_of(c, c->layers[0], n, false).queries;     /* all layers' tiles have one size */
    for (int r = 0, k = 0; r < n; r++) {
        const struct row *row = &batch->rows[r];
        const struct kv_view *views = batch->views[row->sequence];
        for (int g = 0; g < KV_GROUPS; g++)
            c->host.rows[g][r] = { row->token, row->sequence, (int32_t)(row->pos - views[g].gone) };
        if (c->evicts) c->host.votes[r] = vote(&views[KV_GLOBAL], row->pos);
        if (row->want == WANT_LOGITS) c->host.top[k] = row->top, c->host.wanted[k++] = r;
        kv_run *run = n_runs ? &c->host.runs[n_runs - 1] : NULL;
        if (run && batch->rows[run->row].sequence == row->sequence && (run->n + 1) * group <= queries &&
            batch->rows[run->row].pos / KV_BLOCK == row->pos / KV_BLOCK)
            run->n++;
        else c->host.runs[n_runs++] = { r, 1 };
    }
    bool recorded = alone && wanted == n && n <= FEW;
    if (recorded && !c->graphs[n] && !failed.code) {
        cudaGraph_t graph = NULL;
        if (check(c, cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture",
                  "a step")) {
            enqueue(c, n, n_runs, wanted, alone);
            check(c, cudaStreamEndCapture(c->stream, &graph), "cudaStreamEndCapture", "a step");
        }
        if (!failed.code) check(c, cudaGraphInstantiate(&c->graphs[n], graph, 0), "cudaGraphInstantiate", "a step");
        if (graph) cudaGraphDestroy(graph);
    }
    if (recorded && !failed.code) check(c, cudaGraphLaunch(c->graphs[n], c->stream), "cudaGraphLaunch", "a step");
    else if (!failed.code) enqueue(c, n, n_runs, wanted, alone);
    check(c, cudaStreamSynchronize(c->stream), "cudaStreamSynchronize after the kernel", c->last ? c->last : "none");
    c->e = NULL;
    if (failed.code) {
        c->tables_open = false;        /* the device may lack pages that the shadows show */
        return *e = failed, false;
    }
    c->n_logits = wanted;
    return true;
}

static const float *logits(struct backend *b, int i)
{
    struct gpu *c = (struct gpu *)b;
    if (i < 0 || i >= c->n_logits) return NULL;
    size_t n = c->m->n_vocab;
    float *to = c->host_logits + i * n;
    if (c->have >> i & 1) return to;
    if (cudaMemcpyAsync(to, c->logits + i * n, n * sizeof *to, cudaMemcpyDeviceToHost, c->stream) != cudaSuccess ||
        cudaStreamSynchronize(c->stream) != cudaSuccess)
        return NULL;
    c->have |= 1ull << i;
    return to;
}

static struct top read_top(struct backend *b, int i, int k)
{
    struct gpu *c = (struct gpu *)b;
    if (i < 0 || i >= c->n_logits || k < 1 || k > c->host.top[i]) return {};
    const selected *l = &c->largest[i];
    return { l->n < k ? l->n : k, l->ids, l->logits };
}

/* ---- memory of the page pools ------------------------------------------------------------------------------------ */

static struct gpu *of_pool(struct kv_device *d) { return (struct gpu *)((char *)d - offsetof(struct gpu, pool)); }

static unsigned char *pool_open(struct kv_device *d, size_t bytes, bool host, struct error *e)
{
    struct gpu *c = of_pool(d);
    void *p;
    c->e = e;
    if (host) p = host_alloc(c, bytes, "the pages beyond --kv-memory", "lower --ctx-size or the number of sequences");
    else p = device_alloc(c, bytes, "cache", "the KV cache would",
                          "lower --ctx-size or --kv-memory, or choose smaller -ctk and -ctv types");
    c->e = NULL;
    return (unsigned char *)p;
}

static void pool_close(struct kv_device *d, unsigned char *base, bool host)
{
    (void)d;
    if (host) cudaFreeHost(base);
    else cudaFree(base);
}

/* What comes next on the stream waits for the moves so far. */
static void pool_settle(struct kv_device *d)
{
    struct gpu *c = of_pool(d);
    if (!c->moving) return;
    c->e = &c->lost;
    check(c, cudaStreamWaitEvent(c->stream, c->moved, 0), "cudaStreamWaitEvent", "pages");
    c->e = NULL;
    c->moving = false;
}

/* The stream itself has nothing to do between forward passes. */
static void pool_move(struct kv_device *d, void *dst, const void *src, size_t bytes)
{
    struct gpu *c = of_pool(d);
    c->e = &c->lost;
    check(c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, c->moves), "cudaMemcpy", "a page");
    check(c, cudaEventRecord(c->moved, c->moves), "cudaEventRecord", "a page");
    c->e = NULL;
    c->moving = true;
}

static bool pool_copy(struct kv_device *d, void *dst, size_t dst_step, const void *src, size_t src_step, size_t bytes,
                      int n)
{
    struct gpu *c = of_pool(d);
    pool_settle(d);
    c->e = &c->lost;
    cudaError_t r = n == 1 ? cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, c->stream)
                  : cudaMemcpy2DAsync(dst, dst_step, src, src_step, bytes, n, cudaMemcpyDefault, c->stream);
    bool ok = check(c, r, "cudaMemcpy", "the KV cache") &&
              check(c, cudaStreamSynchronize(c->stream), "cudaStreamSynchronize", "the KV cache");
    c->e = NULL;
    return ok;
}

static void pool_compact(struct kv_device *d, const struct kv_view *v, const struct kv_middle *m, const int32_t *kept)
{
    struct gpu *c = of_pool(d);
    const struct kv_shape *s = v->main.shape;
    int unit = (int)kv_unit(s);
    compaction k = { c->stores[KV_GLOBAL][0], s->head_k, s->head_v, v->main.pages, kept, (int)m->begin,
                     (int)m->keep / unit, unit };
    compaction_launch l = attention_compact(&k, s->n_layer);
    pool_settle(d);
    c->e = &c->lost;
    launch(c, l.name, l.kernel, l.grid, l.block, l.shared, k);
    check(c, cudaStreamSynchronize(c->stream), "cudaStreamSynchronize after the kernel", l.name);
    c->e = NULL;
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

static void cuda_close(struct backend *b)
{
    struct gpu *c = (struct gpu *)b;
    if (comm_lost(c->comm)) return;    /* a kernel may wait for another rank */
    if (c->stream) cudaStreamSynchronize(c->stream);
    for (int i = 0; i <= FEW; i++)
        if (c->graphs[i]) cudaGraphExecDestroy(c->graphs[i]);
    exchange_close(c->exchange);       /* other ranks' devices may read this one's memory until then */
    for (int i = 0; i < c->n_allocated; i++) cudaFree(c->allocated[i]);
    for (int i = 0; c->tables && i < c->max_sequences * KV_GROUPS * 2; i++)
        if (c->tables[i].shadow) cudaFreeHost(c->tables[i].shadow);
    if (c->host_step) cudaFreeHost(c->host_step);
    if (c->largest) cudaFreeHost(c->largest);
    if (c->host_logits) cudaFreeHost(c->host_logits);
    blas_close(&c->blas);
    if (c->moved) cudaEventDestroy(c->moved);
    if (c->moves) cudaStreamDestroy(c->moves);
    if (c->stream) cudaStreamDestroy(c->stream);
    free(c->allocated);
    free(c->tables);
    free(c->layers);
    free(c);
}

/* A vector of n floats on the device. */
static bool put_vector(struct gpu *c, const float *host, size_t n, float **out)
{
    *out = (float *)device_alloc(c, n * sizeof *host, "vectors", "the weights would", NULL);
    c->weight_bytes += n * sizeof *host;
    return *out && remember(c, *out) &&
           check(c, cudaMemcpyAsync(*out, host, n * sizeof *host, cudaMemcpyHostToDevice, c->stream), "cudaMemcpy",
                 "a vector") &&
           check(c, cudaStreamSynchronize(c->stream), "cudaStreamSynchronize", "a vector");
}

/* Numbers [first, first + n) of a vector of the file (n = 0: all); NULL for a tensor that is not there. */
static bool load_vector(struct gpu *c, const struct gguf_tensor *t, float **out, size_t first = 0, size_t n = 0)
{
    *out = NULL;
    if (!t) return true;
    if (n == 0) n = t->ne[0];
    float *host = (float *)alloc_zeroed(n, sizeof *host, "a weight vector", c->e);
    bool ok = host && gguf_read(c->m->file, t, first * sizeof *host, host, n * sizeof *host, c->e) &&
              put_vector(c, host, n, out);
    free(host);
    return ok;
}

/* A bias of keys or values, in heads of `size`. */
static bool load_kv_bias(struct gpu *c, const struct gguf_tensor *t, float **out, int size)
{
    *out = NULL;
    if (!t) return true;
    size_t n = (size_t)c->m->n_kv * size;
    float *host = (float *)alloc_zeroed(n, sizeof *host, "a bias", c->e);
    bool ok = host && model_read_kv_bias(c->m, t, host, c->e) && put_vector(c, host, n, out);
    free(host);
    return ok;
}

/* The file's bytes on their way: two pieces, of which one is filled while the other is copied and repacked. */
struct staging {
    unsigned char *host[2], *device[2];
    cudaEvent_t done[2];
    int next;
    double total, loaded;
    void (*progress)(double);
};

static size_t plane(size_t *at, size_t bytes)
{
    size_t here = *at;
    *at += (bytes + 255) & ~(size_t)255;
    return here;
}

/* Reserves the planes of a matrix of the file and fills them. */
static bool load_matrix(struct gpu *c, struct staging *s, const struct matrix *m, weight *w)
{
    enum tensor_type t = matrix_type(m);
    size_t row = matrix_row_bytes(m), rows = m->rows, at = 0;
    *w = { t, (int)m->rows, (int)m->columns, 0, NULL, NULL, NULL, NULL, NULL };
    w->nb = is_float(w->type) ? padded(w->cols) : w->cols / 32;
    size_t blocks = rows * w->nb, planes[5];
    planes[0] = plane(&at, is_float(w->type) ? blocks * (t == T_F32 ? 4 : 2) : blocks * (low_bits(t) == 2 ? 8 : 16));
    planes[1] = plane(&at, is_float(w->type) || low_bits(t) != 8 ? 0 : blocks * 16);
    planes[2] = plane(&at, is_float(w->type) ? 0 : blocks * 4 * high_bits(t));
    planes[3] = plane(&at, is_float(w->type) ? 0 : blocks * scale_bytes(t));
    planes[4] = plane(&at, is_float(w->type) ? 0 : blocks / 8 * super_bytes(t));
    unsigned char *base = (unsigned char *)device_alloc(c, at, "weights", "the weights would", NULL);
    if (!base || !remember(c, base)) return false;
    c->weight_bytes += at;
    w->a = base + planes[0], w->b = base + planes[1], w->h = base + planes[2];
    w->s = base + planes[3], w->d = base + planes[4];
    int step = (int)(STAGING_BYTES / row);
    for (int r0 = 0; r0 < w->rows; r0 += step) {
        int n = w->rows - r0 < step ? w->rows - r0 : step, k = s->next;
        size_t bytes = n * row, count = (size_t)n * w->nb;
        if (!check(c, cudaEventSynchronize(s->done[k]), "cudaEventSynchronize", "the weights") ||
            !matrix_read(c->m, m, r0, n, s->host[k], c->e) ||
            !check(c, cudaMemcpyAsync(s->device[k], s->host[k], bytes, cudaMemcpyHostToDevice, c->stream), "cudaMemcpy",
                   "the weights"))
            return false;
        launch(c, "repack", repack_kernel, dim3((unsigned)((count + 127) / 128)), dim3(128), 0, *w,
               (const uint8_t *)s->device[k], r0, n, row);
        if (c->e->code || !check(c, cudaEventRecord(s->done[k], c->stream), "cudaEventRecord", "the weights"))
            return false;
        s->next ^= 1;
        s->loaded += (double)bytes;
        if (s->progress) s->progress(s->loaded / s->total);
    }
    return true;
}

static bool load_all(struct gpu *c, struct staging *s)
{
    const struct model *m = c->m;
    int in_group[KV_GROUPS] = { 0 };
    for (int i = 0; i < m->n_layer; i++) {
        const struct layer *l = &m->layers[i];
        device_layer *d = &c->layers[i];
        d->group = l->local ? KV_LOCAL : KV_GLOBAL;
        d->index = in_group[d->group]++;
        if (!load_matrix(c, s, &l->q, &d->qkv[0]) || !load_matrix(c, s, &l->k, &d->qkv[1]) ||
            !load_matrix(c, s, &l->v, &d->qkv[2]) || !load_matrix(c, s, &l->o, &d->o) ||
            !load_matrix(c, s, &l->gate, &d->gate) || !load_matrix(c, s, &l->up, &d->up) ||
            !load_matrix(c, s, &l->down, &d->down) || !load_vector(c, l->attn_norm, &d->attn_norm) ||
            !load_vector(c, l->q_bias, &d->q_bias, m->head0 * m->head_k, m->n_head * m->head_k) ||
            !load_kv_bias(c, l->k_bias, &d->k_bias, m->head_k) || !load_kv_bias(c, l->v_bias, &d->v_bias, m->head_v) ||
            !load_vector(c, l->o_bias, &d->o_bias) ||
            !load_vector(c, l->q_norm, &d->q_norm) || !load_vector(c, l->k_norm, &d->k_norm) ||
            !load_vector(c, l->attn_post_norm, &d->attn_post_norm) || !load_vector(c, l->ffn_norm, &d->ffn_norm) ||
            !load_vector(c, l->ffn_post_norm, &d->ffn_post_norm))
            return false;
    }
    if (!load_vector(c, m->out_norm, &c->out_norm) ||
        !load_vector(c, m->out_bias, &c->out_bias, m->out.row0, m->out.rows) || !load_matrix(c, s, &m->out, &c->out))
        return false;
    if (m->out.tensor == m->embd.tensor && m->out.rows == m->embd.rows) return c->embd = c->out, true;
    return load_matrix(c, s, &m->embd, &c->embd);
}

static bool load_weights(struct gpu *c, void (*progress)(double))
{
    struct staging s = {};
    bool ok = true;
    s.progress = progress;
    s.total = (double)gguf_file_bytes(c->m->file);
    for (int i = 0; i < 2 && ok; i++)
        ok = (s.host[i] = (unsigned char *)host_alloc(c, STAGING_BYTES, "the weights on their way", NULL)) &&
             (s.device[i] = (unsigned char *)device_alloc(c, STAGING_BYTES, "staging", "the weights would", NULL)) &&
             check(c, cudaEventCreateWithFlags(&s.done[i], cudaEventDisableTiming), "cudaEventCreate", "the weights");
    ok = ok && load_all(c, &s) && check(c, cudaStreamSynchronize(c->stream), "cudaStreamSynchronize", "repack");
    if (!ok) cudaStreamSynchronize(c->stream);
    for (int i = 0; i < 2; i++) {
        if (s.done[i]) cudaEventDestroy(s.done[i]);
        if (s.host[i]) cudaFreeHost(s.host[i]);
        if (s.device[i]) cudaFree(s.device[i]);
    }
    return ok;
}

static int largest(int a, int b) { return a > b ? a : b; }

/* The step's arrays at `base`; returns their bytes. */
static size_t carve_step(const struct gpu *c, char *base, struct step *s)
{
    size_t at = 0;
    for (int g = 0; g < KV_GROUPS; g++)
        s->rows[g] = g && !c->evicts ? s->rows[0] : (kv_row *)(base + plane(&at, sizeof(kv_row) * c->max_rows));
    s->sequences = (kv_sequence *)(base + plane(&at, sizeof(kv_sequence) * c->max_sequences * KV_GROUPS));
    s->wanted = (int32_t *)(base + plane(&at, sizeof(int32_t) * LOGIT_ROWS));
    s->top = (int32_t *)(base + plane(&at, sizeof(int32_t) * LOGIT_ROWS));
    s->runs = (kv_run *)(base + plane(&at, sizeof(kv_run) * c->max_rows));
    s->votes = (float *)(base + plane(&at, c->evicts ? sizeof(float) * c->max_rows : 0));
    s->mass = (uint64_t **)(base + plane(&at, sizeof(uint64_t *) * c->max_sequences));
    return at;
}

static bool open_buffers(struct gpu *c)
{
    const struct model *m = c->m;
    size_t rows = c->max_rows, half = m->rope_global.n / 2 + 1;
    int att = m->n_head * m->head_v, wide = padded(largest(largest(m->n_embd, att), m->n_ff));
    int group_parts = attention_parts(m->n_head / m->n_kv, m->head_v);
    size_t widest_row = (size_t)padded(largest(wide, m->n_embd)) * sizeof(float);
    size_t splits = 2 * c->device.multiProcessorCount / (m->n_kv * group_parts) + (size_t)c->max_sequences + 1;
    bool ok = scratch(c, &c->x[0], rows * m->n_embd) && scratch(c, &c->x[1], rows * m->n_embd) &&
              scratch(c, &c->qkv, rows * qkv_width(m)) && scratch(c, &c->att, rows * att) &&
              scratch(c, &c->proj, rows * m->n_embd) && scratch(c, &c->gate, rows * m->n_ff) &&
              scratch(c, &c->up, rows * m->n_ff) && scratch(c, &c->logits, (size_t)LOGIT_ROWS * m->n_vocab) &&
              scratch(c, &c->sink_cs, rows * half) && scratch(c, &c->sink_sn, rows * half) &&
              scratch(c, &c->part, splits * m->n_head * (m->head_v + 2)) &&
              scratch(c, &c->arrived, (size_t)c->max_sequences * m->n_kv * group_parts) &&
              scratch(c, &c->logit_peaks, LOGIT_ROWS * select_peaks(m->n_vocab)) &&
              scratch(c, &c->logit_arrived, LOGIT_ROWS) && scratch(c, &c->full_scale, rows);
    if (ok && c->evicts) ok = scratch(c, &c->peaks, rows * m->n_head * 2);
    for (int g = 0; g < KV_GROUPS && ok; g++) {
        const struct rope *p = g == KV_LOCAL ? &m->rope_local : &m->rope_global;
        ok = scratch(c, &c->cs[g], rows * half) && scratch(c, &c->sn[g], rows * half) &&
             scratch(c, &c->freq[g], half) &&
             check(c, cudaMemcpyAsync(c->freq[g], p->freq, sizeof(double) * (p->n / 2), cudaMemcpyHostToDevice,
                                      c->stream), "cudaMemcpy", "RoPE frequencies");
    }
    if (ok && c->max_rows > FEW) {     /* cuBLAS is used */
        c->tile_bytes = widest_row > TILE_BYTES ? (int)widest_row : TILE_BYTES;
        ok = scratch(c, &c->half, rows * wide) && scratch(c, &c->full, rows * wide) &&
             scratch(c, (char **)&c->tile, c->tile_bytes);
    }
    c->tables = (table *)calloc((size_t)c->max_sequences * KV_GROUPS * 2, sizeof *c->tables);
    c->step_bytes = carve_step(c, NULL, &c->host);
    char *dev;
    ok = ok && c->tables && scratch(c, &dev, c->step_bytes) &&
         (c->host_step = host_alloc(c, c->step_bytes, "the step's rows", "lower --batch-size")) &&
         (c->largest = (selected *)host_alloc(c, sizeof *c->largest * LOGIT_ROWS, "the largest logits", NULL)) &&
         (c->host_logits = (float *)host_alloc(c, sizeof(float) * LOGIT_ROWS * m->n_vocab, "logits", NULL));
    if (!ok) return false;
    c->dev_step = dev;
    memset(c->host_step, 0, c->step_bytes);
    carve_step(c, (char *)c->host_step, &c->host);
    carve_step(c, dev, &c->dev);
    return check(c, cudaStreamSynchronize(c->stream), "cudaStreamSynchronize", "working memory");
}

/* Takes device `place` of *n, counted around: true, or why there is none. */
static bool find_device(cudaDeviceProp *device, int place, int *n, struct error *e)
{
    int driver = 0;
    cudaError_t r = cudaGetDeviceCount(n);
    if (r == cudaErrorNoDevice || (r == cudaSuccess && *n == 0))
        return fail(e, GEN_MODEL, "there is no CUDA device");
    if (r == cudaErrorInsufficientDriver) {
        cudaDriverGetVersion(&driver);
        if (driver == 0) return fail(e, GEN_MODEL, "there is no CUDA driver");
        return fail(e, GEN_MODEL, "the CUDA driver is too old (%d.%d, but gen needs %d.%d): update it",
                    driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    }
    if (r == cudaSuccess) r = cudaSetDevice(place % *n);
    if (r == cudaSuccess) r = cudaGetDeviceProperties(device, place % *n);
    if (r != cudaSuccess) return fail(e, GEN_MODEL, "CUDA cannot be used: %s", cudaGetErrorString(r));
    if (device->major < 8)
        return fail(e, GEN_MODEL, "the CUDA device %s has compute capability %d.%d, but 8.0 is needed",
                    device->name, device->major, device->minor);
    return true;
}

/* The ranks cannot divide the KV heads as they are. */
static bool refuse_heads(const struct model *m, struct error *e)
{
    int repeated = m->n_kv;
    while (repeated % m->ranks) repeated += m->n_kv;
    char repeat[60] = "";
    if (m->n_head % repeated == 0) snprintf(repeat, sizeof repeat, "repeat them with --kv-heads %d, or ", repeated);
    return fail(e, GEN_MODEL, "%s: %d key/value heads cannot be divided evenly among %d ranks, which CUDA asks for: "
                "%schoose another --tensor-parallel", gguf_path(m->file), m->n_kv, m->ranks, repeat);
}

static bool open_parts(struct gpu *c, const struct backend_options *o)
{
    int devices;
    const struct model *m = c->m;
    const char *odd = attention_refuses(m->head_k, m->head_v, m->n_head / m->n_kv);
    if (odd)
        return fail(c->e, GEN_MODEL, "%s: the CUDA backend does not take %s", gguf_path(m->file), odd);
    if (m->by_token) return refuse_heads(m, c->e);
    if (!find_device(&c->device, o->place, &devices, c->e)) return false;
    c->max_rows = o->max_rows;
    c->max_sequences = o->max_sequences;
    c->max_seen = o->max_seen;
    c->evicts = o->evicts;
    c->dependent = c->device.major >= 9;
    c->shared_limit = (int)c->device.sharedMemPerBlockOptin - STATIC_BYTES;
    c->resident = 2 * c->device.multiProcessorCount;
    c->layers = (device_layer *)alloc_zeroed(m->n_layer, sizeof *c->layers, "the layers", c->e);
    if (!c->layers ||
        !check(c, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "cudaStreamCreate", "the stream") ||
        !check(c, cudaStreamCreateWithFlags(&c->moves, cudaStreamNonBlocking), "cudaStreamCreate", "pages") ||
        !check(c, cudaEventCreateWithFlags(&c->moved, cudaEventDisableTiming), "cudaEventCreate", "pages"))
        return false;
    if (c->max_rows > FEW && !blas_open(&c->blas, c->stream, c->e)) return false;
    return load_weights(c, o->progress) && open_buffers(c);
}

/* Whatever has become of this rank's part, the others are told. */
static bool open_exchange(struct gpu *c, const struct backend_options *o, bool ok)
{
    const struct model *m = c->m;
    size_t sums = (size_t)o->max_rows * m->n_embd, gathers = (size_t)LOGIT_ROWS * exchange_most(o->comm, m->n_vocab);
    if (comm_size(o->comm) == 1) return ok;
    if (!exchange_open(&c->exchange, o->comm, c->stream, sums, gathers, ok, c->e)) return false;
    snprintf(c->name, sizeof c->name, "%s, %d ranks by %s", c->device.name, comm_size(o->comm),
             exchange_way(c->exchange));
    return true;
}

static void fill_base(struct gpu *c)
{
    c->base.name = "cuda";
    c->base.forward = forward;
    c->base.logits = logits;
    c->base.top = read_top;
    c->base.close = cuda_close;
    c->base.isa = c->exchange ? c->name : c->device.name;
    c->base.threads = 1;
    c->base.weight_bytes = c->weight_bytes;
    c->base.device = &c->pool;
}

extern "C" bool cuda_open(struct backend **out, const struct model *m, const struct backend_options *o, struct error *e)
{
    struct gpu *c = (struct gpu *)alloc_zeroed(1, sizeof *c, "the CUDA backend", e);
    if (!comm_agree(o->comm, c != NULL, e)) return free(c), false;
    c->m = m;
    c->e = e;
    c->comm = o->comm;
    c->pool = { pool_open, pool_close, pool_copy, pool_move, pool_settle, pool_compact };
    if (!open_exchange(c, o, open_parts(c, o))) return cuda_close(&c->base), false;
    fill_base(c);
    c->e = NULL;
    *out = &c->base;
    return true;
}

extern "C" size_t cuda_memory(int place, int places, struct error *e)
{
    cudaDeviceProp device;
    size_t available = 0, all = 0;
    int n = 1;
    if (!find_device(&device, place, &n, e)) return 0;
    if (cudaMemGetInfo(&available, &all) != cudaSuccess) return fail(e, GEN_RUN, "CUDA: cudaMemGetInfo failed"), 0;
    int sharing = (places - place % n + n - 1) / n;
    return sharing > 1 ? available / sharing : available;
}
