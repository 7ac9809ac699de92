/* attention.cu - the fused cached-attention kernels.
 *
 * A tile is 32 tokens of one KV head (kvcache.h): keys channel-major, values token-major. A warp copies a tile into
 * shared memory, 16 bytes a lane, while it works on the one before. For the scores a lane holds the word of a few
 * neighbouring tokens of every N-th channel and adds up their products with all queries of the group; folding the lanes
 * of one word onto each other leaves one token's score in each lane. For the values a lane owns a few channels and adds
 * up all tokens. So keys and values are read once for all query heads of a KV head, and only unpacked in registers.
 *
 * Prompts, and five query heads or more of one KV head, would keep the multiprocessor's arithmetic busier than its
 * memory. They are multiplied by the tensor cores, with queries and weights as sums of two halves; codes of a cache are
 * halves (or bfloat16) by themselves, and their scales are factors of the weights and of the scores. So nothing is lost
 * but the order of the sums. Only a cache of f32 is left to the other arithmetic.
 *
 * Which of its 32 tokens a query sees is a range of token numbers; what a tile is made of (raw or sealed, and of which
 * type) is the same for a whole warp, so one kernel serves every pair of types.
 *
 * Budgets, checked by tests/test_cuda_static.py: registers a thread, shared memory set statically; nothing may spill.
 *
 *     kernel              registers  static shared
 *     decode<1, *>        128        256
 *     decode<2, *>        160        256
 *     decode<*, true>     255        256
 *     decode<4, 256, *>   192        256
 *     decode<4, *>        168        256
 *     decode<8, *>        255        256
 *     decode<16, *>       255        256
 *     prefill<*, false>   255        1024
 *     prefill<256, true>  255        1024
 *     prefill<*, true>    168        1024
 *     append, seal        64         0
 *     mass                168        0
 *     compact             64         0
 */
#include "attention.h"
#include "device.h"

extern __shared__ unsigned char smem[];

enum { DECODE_WARPS = 4, STAGES = 2 };

/* ---- where tiles are --------------------------------------------------------------------------------------------- */

static __device__ inline unsigned char *page_at(const kv_store &s, int32_t page)
{
    return page < s.first_slow ? s.base + (size_t)page * s.page_bytes
                               : s.slow + (size_t)(page - s.first_slow) * s.page_bytes;
}

/* Keys of `block` (32 tokens), KV head `head`; the values lie at values_of(). */
static __device__ inline unsigned char *keys_at(const kv_store &s, int layer, int head, int32_t page, int block)
{
    return page_at(s, page) + layer * s.layer_bytes
         + ((size_t)head * s.page_tiles + block % s.page_tiles) * s.k_tile;
}
static __device__ inline unsigned char *values_at(const kv_store &s, int layer, int head, int32_t page, int block)
{
    return page_at(s, page) + layer * s.layer_bytes + (size_t)s.n_kv * s.page_tiles * s.k_tile
         + ((size_t)head * s.page_tiles + block % s.page_tiles) * s.v_tile;
}

/* The query at `pos` finds the block in raw slots. */
static __device__ inline bool is_raw(const attention &a, int pos, int block)
{
    return a.raw.base && (block == 0 || block == pos / KV_BLOCK);
}
/* Pages of a block in the raw and in the main pool. */
static __device__ inline int32_t raw_page(const kv_sequence &s, int block)
{
    return s.raw[block < 1 ? block : 1 + (block - 1) % s.raw_ring];
}
static __device__ inline int32_t main_page(const attention &a, const kv_sequence &s, int block)
{
    int page = block / a.main.page_tiles;
    return s.main[page < s.low ? page : s.low + (page - s.low) % s.ring];
}
static __device__ inline int32_t page_of(const attention &a, const kv_sequence &s, int pos, int block)
{
    return is_raw(a, pos, block) ? raw_page(s, block) : main_page(a, s, block);
}

/* The blocks that rows [first row's position, last row's] of one sequence see: first those of the sinks, then those of
 * the window, numbered through. */
struct blocks { int sinks, first, count; };
static __device__ inline blocks blocks_of(const kv_sequence &s, int pos, int last)
{
    int from = (int)kv_window_range(pos, s.sinks, s.window).first;
    int seen = (int)kv_sink_range(last, s.sinks, s.window).last + 1;
    blocks b = { (seen + KV_BLOCK - 1) / KV_BLOCK, from / KV_BLOCK, 0 };
    b.count = b.sinks + (last < from ? 0 : last / KV_BLOCK - b.first + 1);
    return b;
}
static __device__ inline int block_number(const blocks &b, int i) { return i < b.sinks ? i : b.first + i - b.sinks; }

/* Bytes of a row of codes, of types below f32: of a channel's 32 keys, of a token's values (int4: of two tokens'). */
static __device__ inline int key_row(kv_type t) { return t >= KV_FP8 ? t == KV_INT4 ? 16 : 32 : 64; }
static __device__ inline int value_row(kv_type t, int head) { return t >= KV_FP8 ? head : 2 * head; }

/* Where 16 bytes of a tile's codes lie in a stage for the tensor cores: those of eight neighbouring rows at eight
 * different places modulo 128, and so in different banks. Rows whose length is no power of two lie as they are. */
struct places { int shift, mask; };
static __device__ inline places places_of(int row)
{
    places none = { 0, 0 }, wide = { 31 - __clz(row), 0x70 }, narrow = { 7, row - 16 };
    return row & (row - 1) ? none : row >= 128 ? wide : narrow;
}
static __device__ inline int place(int at, places p) { return at ^ (at >> p.shift << 4 & p.mask); }

/* Starts to copy a tile's keys and values into the stage, by `n` threads of which this is number `thread`. */
template <bool TENSOR>
static __device__ inline void fetch(const attention &a, int head, int pos, int block, int32_t page,
                                    unsigned char *stage, int k_room, int thread, int n)
{
    const kv_store &s = is_raw(a, pos, block) ? a.raw : a.main;
    const unsigned char *k = keys_at(s, a.layer, head, page, block), *v = values_at(s, a.layer, head, page, block);
    const places kp = places_of(key_row(s.type_k)), vp = places_of(value_row(s.type_v, a.head_v));
    int k_front = (int)(kv_step_bytes(s.type_k, a.head_k, true) + kv_scale_bytes(s.type_k, a.head_k, true));
    int v_front = (int)kv_scale_bytes(s.type_v, a.head_v, false);
    for (int i = thread * 16; i < s.k_tile; i += n * 16)
        __pipeline_memcpy_async(stage + (TENSOR && i >= k_front ? k_front + place(i - k_front, kp) : i), k + i, 16);
    stage += k_room;
    for (int i = thread * 16; i < s.v_tile; i += n * 16)
        __pipeline_memcpy_async(stage + (TENSOR && i >= v_front ? v_front + place(i - v_front, vp) : i), v + i, 16);
}

/* Room for the larger of a raw and a sealed tile. */
static __host__ __device__ inline int k_room(const attention &a)
{
    return a.raw.base && a.raw.k_tile > a.main.k_tile ? a.raw.k_tile : a.main.k_tile;
}
static __host__ __device__ inline int v_room(const attention &a)
{
    return a.raw.base && a.raw.v_tile > a.main.v_tile ? a.raw.v_tile : a.main.v_tile;
}

/* ---- codes ------------------------------------------------------------------------------------------------------- */

/* A word of codes as halves, exactly and without their scale: bytes 0 and 2, and bytes 1 and 3; of int4 their low
 * nibbles. fp8: 1/256 of the value, the scale makes up for it. */
template <int T> static __device__ inline void halves(uint32_t w, uint32_t *even, uint32_t *odd)
{
    if (T == KV_FP8) {
        uint32_t x = w << 8 & 0xff00ff00u, y = w & 0xff00ff00u;
        *even = (x & 0x80008000u) | (x & 0x7f007f00u) >> 1;
        *odd = (y & 0x80008000u) | (y & 0x7f007f00u) >> 1;
        return;
    }
    uint32_t zero = T == KV_INT4 ? 0x64086408u : 0x64806480u;          /* 1024 + 8, 1024 + 128 */
    uint32_t x = T == KV_INT4 ? (w ^ 0x88888888u) & 0x0f0f0f0fu : w ^ 0x80808080u;
    *even = minus_halves(__byte_perm(x, 0x64646464u, 0x4240), zero);
    *odd = minus_halves(__byte_perm(x, 0x64646464u, 0x4341), zero);
}

/* A word of codes as floats, without their scale: N neighbouring tokens of a channel (keys), or N channels of a token
 * (values; of int4 the last four are those of the token 16 further on). */
template <int T> struct code;
template <> struct code<KV_F32> {
    enum { N = 1 };
    static __device__ inline void get(uint32_t w, float f[1]) { f[0] = __uint_as_float(w); }
};
template <> struct code<KV_F16> {
    enum { N = 2 };
    static __device__ inline void get(uint32_t w, float f[2]) { f[0] = low_half(w), f[1] = high_half(w); }
};
template <> struct code<KV_BF16> {
    enum { N = 2 };
    static __device__ inline void get(uint32_t w, float f[2])
    {
        f[0] = __uint_as_float(w << 16), f[1] = __uint_as_float(w & 0xffff0000u);
    }
};
template <> struct code<KV_FP8> {
    enum { N = 4 };
    static __device__ inline void get(uint32_t w, float f[4])
    {
        uint32_t even, odd;
        halves<KV_FP8>(w, &even, &odd);
        f[0] = low_half(even), f[1] = low_half(odd), f[2] = high_half(even), f[3] = high_half(odd);
    }
};
template <> struct code<KV_INT8> {
    enum { N = 4 };
    static __device__ inline void get(uint32_t w, float f[4])
    {
        for (int i = 0; i < 4; i++) f[i] = flipped_byte(w ^ 0x80808080u, i);
    }
};
template <> struct code<KV_INT4> {
    enum { N = 8 };
    static __device__ inline void get(uint32_t w, float f[8])
    {
        uint32_t x = w ^ 0x88888888u, low = x & 0x0f0f0f0fu, high = x >> 4 & 0x0f0f0f0fu;
        for (int i = 0; i < 4; i++) f[i] = unsigned_byte(low, i) - 8, f[4 + i] = unsigned_byte(high, i) - 8;
    }
};

template <int T> static __device__ inline float scale_of(const unsigned char *scales, int i)
{
    if (T == KV_INT4) return kv_small_scale(scales[i]);
    float s = half_to_float(((const uint16_t *)scales)[i]);
    return T == KV_FP8 ? s * 256 : s;
}

/* n neighbouring floats of shared memory, n = 1, 2 or a multiple of 4 and aligned to as much. */
template <int N> static __device__ inline void load_floats(const float *p, float *out)
{
    if (N == 1) out[0] = p[0];
    else if (N == 2) {
        float2 v = *(const float2 *)p;
        out[0] = v.x, out[1] = v.y;
    } else
        for (int i = 0; i < N; i += 4) {
            float4 v = *(const float4 *)(p + i);
            out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
        }
}

/* N neighbouring words, 2 or 4, aligned to as much. */
template <int N> static __device__ inline void load_words(const uint32_t *p, uint32_t *out)
{
    if (N == 2) {
        uint2 v = *(const uint2 *)p;
        out[0] = v.x, out[1] = v.y;
    } else {
        uint4 v = *(const uint4 *)p;
        out[0] = v.x, out[1] = v.y, out[N - 2] = v.z, out[N - 1] = v.w;
    }
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

/* s[g] = query g times the key of one token, whose number is returned. q: [head_k][q_stride], query g in column g. */
template <int T, int G>
static __device__ inline int scores_of(const unsigned char *tile, int head_k, const float *q, int q_stride, float s[G])
{
    constexpr int N = code<T>::N, L = WARP / N;        /* words of a channel: lanes that share it */
    constexpr bool by_token = T >= KV_FP8 && T != KV_INT4, by_channel = T == KV_INT4;
    int lane = threadIdx.x % WARP, w = lane % L, c = lane / L;
    const uint16_t *zeros = (const uint16_t *)tile;
    const unsigned char *steps = tile + 2 * head_k;
    const unsigned char *scales = tile + kv_step_bytes((kv_type)T, head_k, true);
    const unsigned char *codes = scales + kv_scale_bytes((kv_type)T, head_k, true);
    int n_blocks = by_token ? kv_blocks((kv_type)T, head_k, true) : 1;
    float acc[G][N];
    UNROLL
    for (int g = 0; g < G; g++)
        UNROLL
        for (int i = 0; i < N; i++) acc[g][i] = 0;
    for (int b = 0; b < n_blocks; b++) {
        int end = b + 1 == n_blocks ? head_k : 32 * (b + 1);
        float scale[N];
        if (by_token)
            UNROLL
            for (int i = 0; i < N; i++) scale[i] = scale_of<T>(scales, b * KV_BLOCK + N * w + i);
        UNROLL_4
        for (int d = 32 * b + c; d < end; d += N) {
            float k[N], x[G];
            code<T>::get(*(const uint32_t *)(codes + (size_t)(d * L + w) * 4), k);
            load_floats<G>(q + d * q_stride, x);
            float step = by_channel ? kv_small_scale(steps[d]) : 1;
            float zero = by_channel ? half_to_float(zeros[d]) : 0;
            UNROLL
            for (int i = 0; i < N; i++) k[i] = by_channel ? fmaf(k[i], step, zero) : by_token ? k[i] * scale[i] : k[i];
            UNROLL
            for (int g = 0; g < G; g++)
                UNROLL
                for (int i = 0; i < N; i++) acc[g][i] = fmaf(x[g], k[i], acc[g][i]);
        }
    }
    /* The N lanes of a word share out its N tokens. */
    UNROLL
    for (int g = 0; g < G; g++) {
        UNROLL
        for (int step = N / 2; step; step /= 2) {
            bool upper = c & step;
            UNROLL
            for (int i = 0; i < step; i++) {
                float give = upper ? acc[g][i] : acc[g][i + step], keep = upper ? acc[g][i + step] : acc[g][i];
                acc[g][i] = keep + __shfl_xor_sync(ALL_LANES, give, step * L);
            }
        }
        s[g] = acc[g][0];
    }
    return T == KV_INT4 ? (c < 4 ? 4 * w + c : 12 + 4 * w + c) : N * w + c;
}

template <int G>
static __device__ inline int scores(kv_type type, const unsigned char *tile, int head_k, const float *q, int q_stride,
                                    float s[G])
{
    switch (type) {
    case KV_F32: return scores_of<KV_F32, G>(tile, head_k, q, q_stride, s);
    case KV_F16: return scores_of<KV_F16, G>(tile, head_k, q, q_stride, s);
    case KV_BF16: return scores_of<KV_BF16, G>(tile, head_k, q, q_stride, s);
    case KV_FP8: return scores_of<KV_FP8, G>(tile, head_k, q, q_stride, s);
    case KV_INT8: return scores_of<KV_INT8, G>(tile, head_k, q, q_stride, s);
    default: return scores_of<KV_INT4, G>(tile, head_k, q, q_stride, s);
    }
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

/* A lane's channels: HV / 32 of them in pieces of EACH neighbours, piece j from channel j * 128 + lane * EACH on. */
template <int HV> struct channels { enum { EACH = HV < 128 ? HV / WARP : 4, PIECES = HV / WARP / EACH }; };

/* EACH codes of one token from channel d on (of int4: of two tokens). */
template <int T, int EACH> static __device__ inline void load_codes(const unsigned char *codes, size_t at, float *f)
{
    if (T == KV_F32) load_floats<EACH>((const float *)codes + at, f);
    else if (T == KV_F16 || T == KV_BF16) {
        const uint32_t *p = (const uint32_t *)(codes + 2 * at);
        if (EACH == 2) code<T>::get(*p, f);
        else {
            uint2 w = *(const uint2 *)p;
            code<T>::get(w.x, f);
            code<T>::get(w.y, f + 2);
        }
    } else {
        float all[8];
        uint32_t w = EACH == 2 ? *(const uint16_t *)(codes + at) : *(const uint32_t *)(codes + at);
        code<T>::get(w, all);
        for (int i = 0; i < EACH; i++) {
            f[i] = all[i];
            if (T == KV_INT4) f[EACH + i] = all[4 + i];
        }
    }
}

/* o[g] += sum over the tokens [t0, t1) of p[token][g] * value. p: [32][P]. */
template <int T, int G, int HV>
static __device__ inline void add_values(const unsigned char *tile, int head_v, const float *p, int t0, int t1,
                                         float o[G][HV / WARP])
{
    constexpr int EACH = channels<HV>::EACH, PIECES = channels<HV>::PIECES, P = G;
    constexpr bool sealed = T >= KV_FP8, pairs = T == KV_INT4;
    int lane = threadIdx.x % WARP;
    const unsigned char *codes = tile + kv_scale_bytes((kv_type)T, head_v, false);
    int last = sealed ? kv_blocks((kv_type)T, head_v, false) - 1 : 0;
    int from = pairs ? 0 : t0, to = pairs ? KV_BLOCK / 2 : t1;
    UNROLL_4
    for (int t = from; t < to; t++) {
        float x[pairs ? 2 * G : G];
        load_floats<G>(p + t * P, x);
        if (pairs) load_floats<G>(p + (t + 16) * P, x + (pairs ? G : 0));
        UNROLL
        for (int j = 0; j < PIECES; j++) {
            int d = j * 128 + lane * EACH;
            if (d >= head_v) continue;
            float v[2 * EACH];
            load_codes<T, EACH>(codes, (size_t)t * head_v + d, v);
            if (sealed) {
                int b = d / 32 < last ? d / 32 : last;
                float scale = scale_of<T>(tile, b * KV_BLOCK + t);
                float far = pairs ? scale_of<T>(tile, b * KV_BLOCK + t + (pairs ? 16 : 0)) : 0;
                UNROLL
                for (int i = 0; i < EACH; i++) {
                    v[i] *= scale;
                    if (pairs) v[EACH + i] *= far;
                }
            }
            UNROLL
            for (int g = 0; g < G; g++)
                UNROLL
                for (int i = 0; i < EACH; i++) {
                    o[g][j * EACH + i] = fmaf(x[g], v[i], o[g][j * EACH + i]);
                    if (pairs) o[g][j * EACH + i] = fmaf(x[(pairs ? G : 0) + g], v[EACH + i], o[g][j * EACH + i]);
                }
        }
    }
}

template <int G, int HV>
static __device__ inline void values(kv_type type, const unsigned char *tile, int head_v, const float *p, int t0,
                                     int t1, float o[G][HV / WARP])
{
    switch (type) {
    case KV_F32: return add_values<KV_F32, G, HV>(tile, head_v, p, t0, t1, o);
    case KV_F16: return add_values<KV_F16, G, HV>(tile, head_v, p, t0, t1, o);
    case KV_BF16: return add_values<KV_BF16, G, HV>(tile, head_v, p, t0, t1, o);
    case KV_FP8: return add_values<KV_FP8, G, HV>(tile, head_v, p, t0, t1, o);
    case KV_INT8: return add_values<KV_INT8, G, HV>(tile, head_v, p, t0, t1, o);
    default: return add_values<KV_INT4, G, HV>(tile, head_v, p, t0, t1, o);
    }
}

/* ---- one tile, one warp ------------------------------------------------------------------------------------------ */

/* Online softmax of G queries. l is this lane's part of the sum. */
template <int G, int HV> struct state { float m[G], l[G], o[G][HV / WARP]; };

template <int G, int HV> static __device__ inline void start(state<G, HV> &s)
{
    UNROLL
    for (int g = 0; g < G; g++) {
        s.m[g] = -INFINITY;
        s.l[g] = 0;
        UNROLL
        for (int i = 0; i < HV / WARP; i++) s.o[g][i] = 0;
    }
}

/* Query g sees tokens [first[g], last[g]], none where last < first; [t0, t1) of the tile are those that any of them
 * sees. p: [32][G], this warp's own. */
template <int G, int HV>
static __device__ inline void step(const attention &a, const kv_store &types, const unsigned char *stage, int block,
                                   const float *q, const int *first, const int *last, int t0, int t1, float *p,
                                   state<G, HV> &s)
{
    constexpr int AT_ONCE = G > 8 || (G == 8 && HV > 128) ? 4 : G;     /* scores that are in registers together */
    UNROLL
    for (int g0 = 0; g0 < G; g0 += AT_ONCE) {
        float x[AT_ONCE], keep[AT_ONCE];
        int t = scores<AT_ONCE>(types.type_k, stage, a.head_k, q + g0, G, x), token = block * KV_BLOCK + t;
        UNROLL
        for (int i = 0; i < AT_ONCE; i++) {
            int g = g0 + i;
            if (a.cap > 0) x[i] = a.cap * tanhf(x[i] / a.cap);
            if (token < first[g] || token > last[g]) x[i] = -INFINITY;
            float top = fmaxf(s.m[g], warp_max(x[i]));
            keep[i] = s.m[g] == top ? 1 : __expf(s.m[g] - top);
            x[i] = x[i] == -INFINITY ? 0 : __expf(x[i] - top);
            s.m[g] = top;
            s.l[g] = s.l[g] * keep[i] + x[i];
            if (keep[i] != 1)
                UNROLL
                for (int j = 0; j < HV / WARP; j++) s.o[g][j] *= keep[i];
            p[t * G + g] = x[i];
        }
    }
    __syncwarp();
    values<G, HV>(types.type_v, stage + k_room(a), a.head_v, p, t0, t1, s.o);
    __syncwarp();
}

/* Writes the warp's part where parts meet, [G][stride]: maximum, sum, values. */
template <int G, int HV>
static __device__ inline void put_part(const attention &a, const state<G, HV> &s, float *to, size_t stride)
{
    int lane = threadIdx.x % WARP;
    UNROLL
    for (int g = 0; g < G; g++, to += stride) {
        float l = warp_sum(s.l[g]);
        if (lane == 0) to[0] = s.m[g], to[1] = l;
        UNROLL
        for (int j = 0; j < channels<HV>::PIECES; j++)
            UNROLL
            for (int i = 0; i < channels<HV>::EACH; i++) {
                int d = j * 128 + lane * channels<HV>::EACH + i;
                if (d < a.head_v) to[2 + d] = s.o[g][j * channels<HV>::EACH + i];
            }
    }
}

/* Query g's channels into column g of q[n][stride]. */
static __device__ inline void put_column(float *q, int stride, int g, const float *x, int n)
{
    for (int d = threadIdx.x % WARP; d < n; d += WARP) q[d * stride + g] = x[d];
    __syncwarp();
}

/* ---- the same with tensor cores: 8 or 16 queries, a cache of anything but f32 ------------------------------------ */

/* A lane has query lane / 4 and, of 16, that one's neighbour 8 further on; of each eight columns of a product number
 * lane % 4 * 2 and the next one. Columns of scores are tokens, of outputs channels: in_column says which. l is this
 * lane's part of the sum. o is the sum times 2^15 / unit, so that the weights keep their bits as halves; unit is a
 * power of two, and more than 1 only where a scale of the values has been. */
template <int G, int HV> struct tensor_state { float m[G / 8], l[G / 8], unit, o[HV / 8][G / 4]; };

template <int G, int HV> static __device__ inline void start(tensor_state<G, HV> &s)
{
    UNROLL
    for (int r = 0; r < G / 8; r++) s.m[r] = -INFINITY, s.l[r] = 0;
    s.unit = 1;
    UNROLL
    for (int n = 0; n < HV / 8; n++)
        UNROLL
        for (int i = 0; i < G / 4; i++) s.o[n][i] = 0;
}

/* The one of 16 tokens that column i of their scores stands for. Bytes come from shared memory in pairs: eight columns
 * are made of the first ones, eight of the second (`pairs`: the keys are of a type of 8 or 4 bits). The same of the
 * channels of an output, where the cache's values are of such a type. */
static __device__ inline int in_column(bool pairs, int i) { return pairs ? i % 8 * 2 + i / 8 : i; }

/* x = high + low, each a half: up to 2^-22 of it; or a bfloat16: up to 2^-17. */
template <bool BF16>
static __device__ inline void split_pair(float x, float y, uint32_t *high, uint32_t *low)
{
    uint32_t h = BF16 ? pair_bf16(x, y) : pair_halves(x, y);
    float a = BF16 ? bf16_to_float(h & 0xffff) : low_half(h), b = BF16 ? bf16_to_float(h >> 16) : high_half(h);
    *high = h;
    *low = BF16 ? pair_bf16(x - a, y - b) : pair_halves(x - a, y - b);
}

/* Query g's channels as the lanes want them: [n / 16][high, low][lane][G / 4] words of two numbers. */
template <int G, bool BF16> static __device__ inline void put_fragments(float *q, int g, const float *x, int n)
{
    uint32_t *to = (uint32_t *)q;
    for (int d = threadIdx.x % WARP * 2; d < n; d += 2 * WARP) {
        int k = d % 16, lane = g % 8 * 4 + k % 8 / 2, word = k / 8 * (G / 8) + g / 8;
        int at = (d / 16 * 2 * WARP + lane) * (G / 4) + word;
        split_pair<BF16>(x[d], x[d + 1], &to[at], &to[at + WARP * (G / 4)]);
    }
    __syncwarp();
}

/* d[G][8] += (high + low)[G][16] b[16][8]; of 8 queries the other half of the fragments is zero. */
template <int G, bool BF16>
static __device__ inline void multiply_add(float d[G / 4], const uint32_t high[G / 4], const uint32_t low[G / 4],
                                           const uint32_t b[2])
{
    if (G == 8) {
        float all[4] = { d[0], d[1], 0, 0 };
        uint32_t h[4] = { high[0], 0, high[1], 0 }, l[4] = { low[0], 0, low[1], 0 };
        BF16 ? mma_bf16(all, h, b) : mma_f16(all, h, b);
        BF16 ? mma_bf16(all, l, b) : mma_f16(all, l, b);
        d[0] = all[0], d[1] = all[1];
    } else {
        BF16 ? mma_bf16(d, high, b) : mma_f16(d, high, b);
        BF16 ? mma_bf16(d, low, b) : mma_f16(d, low, b);
    }
}

/* Two small scales that lie side by side, as halves. */
static __device__ inline uint32_t small_scales(const unsigned char *s, int a, int b)
{
    return pair_halves(kv_small_scale(s[a]), kv_small_scale(s[b]));
}

/* The codes of 16 channels from d on as right factors: column i of b[j] is token 16 * (j / 2) + in_column(8 * (j % 2)
 * + i). */
template <int T> static __device__ inline void key_factors(const unsigned char *codes, int d, uint32_t b[4][2])
{
    int lane = threadIdx.x % WARP, row = key_row((kv_type)T);
    const int at = (d + lane % 16) * row;
    const places p = places_of(row);
    if (T == KV_INT4) {
        uint32_t r[2];
        ldmatrix_x2_trans(r, codes + at);
        UNROLL
        for (int i = 0; i < 2; i++) {
            halves<T>(r[i], &b[0][i], &b[1][i]);
            halves<T>(r[i] >> 4, &b[2][i], &b[3][i]);
        }
    } else if (T >= KV_FP8) {
        uint32_t r[4];
        ldmatrix_x4_trans(r, codes + place(at + lane / 16 * 16, p));
        UNROLL
        for (int i = 0; i < 4; i++) halves<T>(r[i], &b[i / 2 * 2][i % 2], &b[i / 2 * 2 + 1][i % 2]);
    } else
        UNROLL
        for (int j = 0; j < 2; j++) ldmatrix_x4_trans(b[2 * j], codes + place(at + 32 * j + lane / 16 * 16, p));
}

/* x[j][2r + i]: score of this lane's query r with the token of column i of key_factors' b[j]. */
template <int T, int G>
static __device__ inline void tensor_scores_of(const unsigned char *tile, int head_k, const float *q, float x[4][G / 4])
{
    constexpr int WORDS = G / 4;
    constexpr bool BF16 = T == KV_BF16, by_token = T >= KV_FP8 && T != KV_INT4, by_channel = T == KV_INT4;
    int lane = threadIdx.x % WARP, pair = lane % 4 * 2;
    const unsigned char *steps = tile + 2 * head_k, *scales = tile + kv_step_bytes((kv_type)T, head_k, true);
    const unsigned char *codes = scales + kv_scale_bytes((kv_type)T, head_k, true);
    int n_blocks = by_token ? kv_blocks((kv_type)T, head_k, true) : 1;
    float zero[WORDS];                 /* int4: what the channels' zeros add up to, for every token */
    UNROLL
    for (int i = 0; i < WORDS; i++) {
        zero[i] = 0;
        UNROLL
        for (int j = 0; j < 4; j++) x[j][i] = 0;
    }
    KEEP_ROLLED
    for (int block = 0; block < n_blocks; block++) {
        int end = block + 1 == n_blocks ? head_k : 32 * (block + 1);
        float sum[4][WORDS];
        UNROLL
        for (int j = 0; j < 4; j++)
            UNROLL
            for (int i = 0; i < WORDS; i++) sum[j][i] = 0;
        KEEP_ROLLED
        for (int d = 32 * block; d < end; d += 16) {
            const uint32_t *from = (const uint32_t *)q + (d / 16 * 2 * WARP + lane) * WORDS;
            uint32_t high[WORDS], low[WORDS], b[4][2];
            load_words<WORDS>(from, high);
            load_words<WORDS>(from + WARP * WORDS, low);
            key_factors<T>(codes, d, b);
            if (by_channel) {
                uint32_t z[2];
                UNROLL
                for (int i = 0; i < 2; i++) {
                    z[i] = *(const uint32_t *)(tile + 2 * (d + 8 * i + pair));
                    uint32_t step = small_scales(steps + d + 8 * i + pair, 0, 1);
                    UNROLL
                    for (int j = 0; j < 4; j++) b[j][i] = times_halves(b[j][i], step);      /* exact */
                }
                multiply_add<G, BF16>(zero, high, low, z);
            }
            UNROLL
            for (int j = 0; j < 4; j++) multiply_add<G, BF16>(sum[j], high, low, b[j]);
        }
        UNROLL
        for (int j = 0; j < 4; j++)
            UNROLL
            for (int i = 0; i < WORDS; i++) {
                int token = 16 * (j / 2) + in_column(true, 8 * (j % 2) + pair + i % 2);
                x[j][i] = by_token ? fmaf(sum[j][i], scale_of<T>(scales, block * KV_BLOCK + token), x[j][i])
                                   : sum[j][i] + zero[i];
            }
    }
}

template <int G>
static __device__ inline void tensor_scores(kv_type type, const unsigned char *tile, int head_k, const float *q,
                                            float x[4][G / 4])
{
    switch (type) {
    case KV_BF16: return tensor_scores_of<KV_BF16, G>(tile, head_k, q, x);
    case KV_FP8: return tensor_scores_of<KV_FP8, G>(tile, head_k, q, x);
    case KV_INT8: return tensor_scores_of<KV_INT8, G>(tile, head_k, q, x);
    case KV_INT4: return tensor_scores_of<KV_INT4, G>(tile, head_k, q, x);
    default: return tensor_scores_of<KV_F16, G>(tile, head_k, q, x);
    }
}

/* The codes of 16 channels from d on as right factors: b[k] of the 16 tokens from 16k on, in the order of the scores;
 * two words for the first eight columns and two for the others. */
template <int T>
static __device__ inline void value_factors(const unsigned char *codes, int head_v, int d, bool pairs, bool paired,
                                            uint32_t b[2][4])
{
    int lane = threadIdx.x % WARP, token = in_column(pairs, lane % 16), row = value_row((kv_type)T, head_v);
    const places p = places_of(row);
    if (T == KV_INT4) {
        uint32_t r[2];
        ldmatrix_x2_trans(r, codes + place(token * row + d, p));
        UNROLL
        for (int i = 0; i < 2; i++) {
            halves<T>(r[i], &b[0][i], &b[0][2 + i]);
            halves<T>(r[i] >> 4, &b[1][i], &b[1][2 + i]);
        }
    } else if (T >= KV_FP8) {
        uint32_t r[4];
        ldmatrix_x4_trans(r, codes + place((lane / 16 * 16 + token) * row + d, p));
        UNROLL
        for (int i = 0; i < 4; i++) halves<T>(r[i], &b[i / 2][i % 2], &b[i / 2][2 + i % 2]);
    } else if (!paired)
        UNROLL
        for (int k = 0; k < 2; k++)
            ldmatrix_x4_trans(b[k], codes + place((16 * k + token) * row + 2 * d + lane / 16 * 16, p));
    else                               /* a raw tile among sealed ones: its channels in the order of theirs */
        UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t w[2];
            UNROLL
            for (int k = 0; k < 2; k++) {
                int t = i / 2 * 16 + in_column(pairs, 8 * (i % 2) + lane % 4 * 2 + k), at = t * row + 2 * d;
                w[k] = *(const uint32_t *)(codes + place(at + lane / 16 * 16, p) + lane / 4 % 4 * 4);
            }
            b[i / 2][i % 2] = __byte_perm(w[0], w[1], 0x5410);
            b[i / 2][2 + i % 2] = __byte_perm(w[0], w[1], 0x7632);
        }
}

/* o += x V; x: the tokens' weights, as tensor_scores leaves them, here times `factor`. */
template <int T, int G, int HV>
static __device__ inline void add_tensor_values(const attention &a, const unsigned char *tile, bool pairs, float factor,
                                                const float x[4][G / 4], float o[HV / 8][G / 4])
{
    constexpr int WORDS = G / 4;
    constexpr bool BF16 = T == KV_BF16, by_token = T == KV_FP8 || T == KV_INT8;
    bool paired = kv_sealed(a.main.type_v);
    int last = kv_sealed((kv_type)T) ? kv_blocks((kv_type)T, a.head_v, false) - 1 : 0;
    const unsigned char *codes = tile + kv_scale_bytes((kv_type)T, a.head_v, false);
    uint32_t high[2][WORDS], low[2][WORDS], scale[2][2];
    UNROLL
    for (int n = 0; n < HV / 16; n++) {
        if (n && 16 * n >= a.head_v) continue;
        if (n == 0 || (n % 2 == 0 && n / 2 <= last))       /* other scales */
            UNROLL
            for (int i = 0; i < 4; i++) {                  /* eight tokens in the order of the scores, of them two */
                int t = 8 * (i % 2) + threadIdx.x % 4 * 2, at = n / 2 * KV_BLOCK + i / 2 * 16;
                int t0 = at + in_column(pairs, t), t1 = at + in_column(pairs, t + 1);
                float f0 = by_token ? factor * scale_of<T>(tile, t0) : factor;
                float f1 = by_token ? factor * scale_of<T>(tile, t1) : factor;
                if (T == KV_INT4) scale[i / 2][i % 2] = small_scales(tile, t0, t1);
                UNROLL
                for (int r = 0; r < G / 8; r++)
                    split_pair<BF16>(x[i][2 * r] * f0, x[i][2 * r + 1] * f1, &high[i / 2][i % 2 * (G / 8) + r],
                                     &low[i / 2][i % 2 * (G / 8) + r]);
            }
        uint32_t b[2][4];
        value_factors<T>(codes, a.head_v, 16 * n, pairs, paired, b);
        UNROLL
        for (int k = 0; k < 2; k++) {
            if (T == KV_INT4)
                UNROLL
                for (int i = 0; i < 4; i++) b[k][i] = times_halves(b[k][i], scale[k][i % 2]);     /* exact */
            multiply_add<G, BF16>(o[2 * n], high[k], low[k], b[k]);
            multiply_add<G, BF16>(o[2 * n + 1], high[k], low[k], b[k] + 2);
        }
    }
}

template <int G, int HV>
static __device__ inline void tensor_values(const attention &a, kv_type type, const unsigned char *tile, bool pairs,
                                            float factor, const float x[4][G / 4], float o[HV / 8][G / 4])
{
    switch (type) {
    case KV_BF16: return add_tensor_values<KV_BF16, G, HV>(a, tile, pairs, factor, x, o);
    case KV_FP8: return add_tensor_values<KV_FP8, G, HV>(a, tile, pairs, factor, x, o);
    case KV_INT8: return add_tensor_values<KV_INT8, G, HV>(a, tile, pairs, factor, x, o);
    case KV_INT4: return add_tensor_values<KV_INT4, G, HV>(a, tile, pairs, factor, x, o);
    default: return add_tensor_values<KV_F16, G, HV>(a, tile, pairs, factor, x, o);
    }
}

/* The power of two that no scale of a tile of values exceeds, 1 or more, by one warp; int4's scale codes only. */
static __device__ inline float scale_unit(kv_type type, const unsigned char *tile, int head_v)
{
    if (type != KV_FP8 && type != KV_INT8) return 1;
    float most = 1;
    for (int i = threadIdx.x % WARP; i < kv_blocks(type, head_v, false) * KV_BLOCK; i += WARP)
        most = fmaxf(most, type == KV_FP8 ? scale_of<KV_FP8>(tile, i) : scale_of<KV_INT8>(tile, i));
    return __uint_as_float((__float_as_uint(warp_max(most)) + 0x7fffff) & 0xff800000u);
}

/* Tokens outside of [t0, t1) are not seen and may hold anything, also what times zero is not zero: removes them from a
 * tile of values, by `n` threads of which this is number `thread`. Codes of 8 and 4 bits are always numbers. */
static __device__ inline void clear_unseen(kv_type type, unsigned char *tile, int head_v, int t0, int t1, int thread,
                                           int n)
{
    if (type == KV_INT4) return;
    bool scales = kv_sealed(type);
    int each = scales ? 1 : head_v / 8, all = KV_BLOCK * (scales ? kv_blocks(type, head_v, false) : each);
    for (int i = thread; i < all; i += n) {
        int t = i / each % KV_BLOCK;
        if (t >= t0 && t < t1) continue;
        if (scales) ((uint16_t *)tile)[i] = 0;
        else ((uint4 *)tile)[i] = make_uint4(0, 0, 0, 0);
    }
}

/* As above; clear_unseen has been called. */
template <int G, int HV>
static __device__ inline void step(const attention &a, const kv_store &types, const unsigned char *stage, int block,
                                   const float *q, const int *first, const int *last, int, int, float *,
                                   tensor_state<G, HV> &s)
{
    int lane = threadIdx.x % WARP;
    bool pairs = kv_sealed(types.type_k);
    const unsigned char *v = stage + k_room(a);
    float x[4][G / 4], unit = fmaxf(s.unit, scale_unit(types.type_v, v, a.head_v)), grown = s.unit / unit;
    tensor_scores<G>(types.type_k, stage, a.head_k, q, x);
    UNROLL
    for (int r = 0; r < G / 8; r++) {
        int from = first[8 * r + lane / 4] - block * KV_BLOCK, to = last[8 * r + lane / 4] - block * KV_BLOCK;
        float top = s.m[r], sum = 0;
        UNROLL
        for (int j = 0; j < 8; j++) {
            int t = j / 4 * 16 + in_column(pairs, j / 2 % 2 * 8 + lane % 4 * 2 + j % 2);
            float &y = x[j / 2][2 * r + j % 2];
            if (a.cap > 0) y = a.cap * tanhf(y / a.cap);
            if (t < from || t > to) y = -INFINITY;
            top = fmaxf(top, y);
        }
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
        float keep = s.m[r] == top ? 1 : __expf(s.m[r] - top);
        UNROLL
        for (int j = 0; j < 8; j++) {
            float &y = x[j / 2][2 * r + j % 2];
            y = y == -INFINITY ? 0 : __expf(y - top);
            sum += y;
        }
        s.m[r] = top;
        s.l[r] = s.l[r] * keep + sum;
        keep *= grown;
        if (keep != 1)
            UNROLL
            for (int n = 0; n < HV / 8; n++) s.o[n][2 * r] *= keep, s.o[n][2 * r + 1] *= keep;
    }
    s.unit = unit;
    tensor_values<G, HV>(a, types.type_v, v, pairs, 0x1p15f / unit, x, s.o);
    __syncwarp();
}

template <int G, int HV>
static __device__ inline void put_part(const attention &a, const tensor_state<G, HV> &s, float *to, size_t stride)
{
    int lane = threadIdx.x % WARP;
    bool paired = kv_sealed(a.main.type_v);
    UNROLL
    for (int r = 0; r < G / 8; r++) {
        float *part = to + (8 * r + lane / 4) * stride, l = s.l[r];
        l += __shfl_xor_sync(ALL_LANES, l, 1);
        l += __shfl_xor_sync(ALL_LANES, l, 2);
        if (lane % 4 == 0) part[0] = s.m[r], part[1] = l;
        UNROLL
        for (int n = 0; n < HV / 8; n++)
            UNROLL
            for (int i = 0; i < 2; i++) {
                int d = n / 2 * 16 + in_column(paired, n % 2 * 8 + lane % 4 * 2 + i);
                if (d < a.head_v) part[2 + d] = s.o[n][2 * r + i] * (0x1p-15f * s.unit);
            }
    }
}

/* ---- a head's vector --------------------------------------------------------------------------------------------- */

/* x -> H x / sqrt(size) in blocks of the largest power of two that divides n, by one warp. */
static __device__ void turn_basis(float *x, int n)
{
    int lane = threadIdx.x % WARP, size = n & -n;
    float scale = 1 / sqrtf((float)size);
    for (int step = 1; step < size; step *= 2) {
        for (int i = lane; i < n / 2; i += WARP) {
            int j = i / step * 2 * step + i % step;
            float u = x[j], v = x[j + step];
            x[j] = u + v;
            x[j + step] = u - v;
        }
        __syncwarp();
    }
    for (int i = lane; i < n; i += WARP) x[i] *= scale;
    __syncwarp();
}

/* x[n] = a query's or key's channels made ready by one warp: bias, norm, RoPE, scale, the cache's basis. */
static __device__ void ready(const attention &a, float *x, int n, const float *src, const float *bias,
                             const float *norm, const float *cs, const float *sn, float scale, bool turn)
{
    int lane = threadIdx.x % WARP, half = cs ? a.n_rot / 2 : 0;
    float sum = 0;
    for (int i = lane; i < n; i += WARP) {
        float y = src[i] + (bias ? bias[i] : 0);
        x[i] = y;
        sum = fmaf(y, y, sum);
    }
    if (norm) {
        float f = 1 / sqrtf(warp_sum(sum) / n + a.eps);
        for (int i = lane; i < n; i += WARP) x[i] = x[i] * f * norm[i];
    }
    __syncwarp();
    int width = a.order == ROPE_PAIRS ? 2 : 1, other = a.order == ROPE_PAIRS ? 1 : half;
    for (int i = lane; i < half; i += WARP) {
        float u = x[i * width], v = x[i * width + other];
        x[i * width] = u * cs[i] - v * sn[i];
        x[i * width + other] = u * sn[i] + v * cs[i];
    }
    __syncwarp();
    if (scale != 1)
        for (int i = lane; i < n; i += WARP) x[i] *= scale;
    __syncwarp();
    if (turn) turn_basis(x, n);
}

/* x[head_k] = query head h of row r, for the sinks or the window. */
static __device__ void ready_query(const attention &a, int r, int h, bool sinks, float *x)
{
    const float *cs = (sinks ? a.sink_cs : a.cs) + (size_t)r * (a.n_rot / 2);
    const float *sn = (sinks ? a.sink_sn : a.sn) + (size_t)r * (a.n_rot / 2);
    ready(a, x, a.head_k, a.qkv + (size_t)r * a.ld + h * a.head_k, a.q_bias ? a.q_bias + h * a.head_k : NULL, a.q_norm,
          cs, sn, a.scale, kv_rotated(a.main.type_k, true));
}

/* ---- rows into the cache ----------------------------------------------------------------------------------------- */

static __device__ inline void put(unsigned char *tile, kv_type type, int at, float x)
{
    if (type == KV_F32) ((float *)tile)[at] = x;
    else ((uint16_t *)tile)[at] = type == KV_F16 ? float_to_half(x) : float_to_bf16(x);
}

/* Row r's key (or value) of KV head `head`, by one warp; x has room for a head. */
static __device__ void append_key(const attention &a, int r, int head, float *x)
{
    const kv_row &row = a.rows[r];
    const kv_sequence &s = a.sequences[row.sequence * a.sequence_stride];
    const kv_store &to = a.raw.base ? a.raw : a.main;
    int block = row.pos / KV_BLOCK, t = row.pos % KV_BLOCK;
    int32_t page = page_of(a, s, row.pos, block);
    unsigned char *tile = keys_at(to, a.layer, head, page, block);
    const float *src = a.qkv + (size_t)r * a.ld + a.n_head * a.head_k + head * a.head_k;
    ready(a, x, a.head_k, src, a.k_bias ? a.k_bias + head * a.head_k : NULL, a.k_norm,
          a.cs + (size_t)r * (a.n_rot / 2), a.sn + (size_t)r * (a.n_rot / 2), 1, kv_rotated(a.main.type_k, true));
    for (int d = threadIdx.x % WARP; d < a.head_k; d += WARP) put(tile, to.type_k, d * KV_BLOCK + t, x[d]);
}
static __device__ void append_value(const attention &a, int r, int head, float *x)
{
    const kv_row &row = a.rows[r];
    const kv_sequence &s = a.sequences[row.sequence * a.sequence_stride];
    const kv_store &to = a.raw.base ? a.raw : a.main;
    int block = row.pos / KV_BLOCK, t = row.pos % KV_BLOCK;
    int32_t page = page_of(a, s, row.pos, block);
    unsigned char *tile = values_at(to, a.layer, head, page, block);
    const float *src = a.qkv + (size_t)r * a.ld + (a.n_head + a.n_kv) * a.head_k + head * a.head_v;
    ready(a, x, a.head_v, src, a.v_bias ? a.v_bias + head * a.head_v : NULL, NULL, NULL, NULL, 1,
          kv_rotated(a.main.type_v, false));
    for (int d = threadIdx.x % WARP; d < a.head_v; d += WARP) put(tile, to.type_v, t * a.head_v + d, x[d]);
}

/* ---- sealing: the same codes, bit for bit, as layer.inc makes ---------------------------------------------------- */

/* Scale (its byte) of least squared error for int4 codes of n channels. */
static __device__ int scale_int4(const uint16_t *raw, int step, int n)
{
    float most = 0, best = INFINITY;
    for (int d = 0; d < n; d++) {
        float x = half_to_float(raw[d * step]);
        most = fabsf(x) > most ? fabsf(x) : most;
    }
    int top = (int)(__float_as_uint(most / 7) >> 20) - (112 << 3) + 1;
    top = top < 0 ? 0 : top > 255 ? 255 : top;
    int chosen = top;
    for (int s = top; s >= 0 && s > top - 5; s--) {
        float scale = kv_small_scale((uint8_t)s), inverse = 1 / scale, error = 0;
        for (int d = 0; d < n; d++) {
            float x = half_to_float(raw[d * step]), q = rintf(x * inverse);
            q = q > -8 ? q : -8;
            q = q < 7 ? q : 7;
            float off = q * scale - x;
            error += off * off;
        }
        if (error < best) best = error, chosen = s;
    }
    return chosen;
}

static __device__ inline int code_int4(float x, float inverse)
{
    float q = rintf(x * inverse);
    q = q > -8 ? q : -8;
    return (int)(q < 7 ? q : 7);
}

/* Channel d of int4 keys, as the CPU's seal_by_channel does it. raw: its 32 tokens. */
static __device__ void seal_channel(const uint16_t *raw, unsigned char *tile, int n, int d)
{
    float low = INFINITY, high = -INFINITY, sum = 0;
    for (int t = 0; t < KV_BLOCK; t++) {
        float x = half_to_float(raw[t]);
        low = x < low ? x : low;
        high = x > high ? x : high;
        sum += x * 0;
    }
    uint8_t code = kv_to_small_scale(sum == 0 ? (high - low) / 15.5f : 0);
    float step = kv_small_scale(code), inverse = 1 / step;
    bool odd = sum == 0 && (high - low) * inverse >= 14.5f;            /* 15 steps from end to end, or at most 14 */
    uint16_t zero = float_to_half((low + high + (odd ? step : 0)) / 2 + sum);
    unsigned char *codes = tile + kv_step_bytes(KV_INT4, n, true) + 16 * d;
    ((uint16_t *)tile)[d] = zero;
    tile[2 * n + d] = code;
    for (int t = 0; t < KV_BLOCK / 2; t++) {
        int p = sum == 0 ? code_int4(half_to_float(raw[t]) - half_to_float(zero), inverse) : 0;
        int q = sum == 0 ? code_int4(half_to_float(raw[t + 16]) - half_to_float(zero), inverse) : 0;
        codes[t] = (uint8_t)((p & 15) | (q & 15) << 4);
    }
}

/* A raw tile (of f16 where `type` is sealed) becomes a tile of `type`, by all threads of the block. */
static __device__ void seal_tile(const uint16_t *raw, unsigned char *tile, kv_type type, int n, bool keys)
{
    int step_t = keys ? 1 : n, step_d = keys ? KV_BLOCK : 1, n_blocks = kv_blocks(type, n, keys);
    unsigned char *scales = tile, *codes = scales + kv_scale_bytes(type, n, keys);
    if (!kv_sealed(type)) {
        for (int i = threadIdx.x; i < (int)kv_code_bytes(type, n) / 4; i += blockDim.x)
            ((uint32_t *)tile)[i] = ((const uint32_t *)raw)[i];
        return;
    }
    if (!kv_rotated(type, keys)) {
        for (int d = threadIdx.x; d < n; d += blockDim.x) seal_channel(raw + d * KV_BLOCK, tile, n, d);
        return;
    }
    int tokens = type == KV_INT4 ? KV_BLOCK / 2 : KV_BLOCK;        /* int4: a byte holds tokens u and u + 16 */
    for (int i = threadIdx.x; i < tokens * n_blocks; i += blockDim.x) {
        int t = i % tokens, b = i / tokens, d0 = 32 * b, end = b + 1 == n_blocks ? n : d0 + 32;
        const uint16_t *x = raw + t * step_t + d0 * step_d;
        if (type == KV_INT4) {
            const uint16_t *y = x + 16 * step_t;
            int low = scale_int4(x, step_d, end - d0), high = scale_int4(y, step_d, end - d0);
            float a = 1 / kv_small_scale((uint8_t)low), c = 1 / kv_small_scale((uint8_t)high);
            scales[b * KV_BLOCK + t] = (uint8_t)low;
            scales[b * KV_BLOCK + t + 16] = (uint8_t)high;
            for (int d = 0; d < end - d0; d++) {
                int p = code_int4(half_to_float(x[d * step_d]), a), q = code_int4(half_to_float(y[d * step_d]), c);
                codes[t * step_t + d0 + d] = (uint8_t)((p & 15) | (q & 15) << 4);
            }
            continue;
        }
        float most = 0, limit = type == KV_INT8 ? 127 : 448;
        for (int d = 0; d < end - d0; d++) {
            float size = fabsf(half_to_float(x[d * step_d]));
            most = size > most ? size : most;
        }
        uint16_t half = float_to_half(most / limit);
        float scale = half_to_float(half), inverse = scale > 0 ? 1 / scale : 0;
        ((uint16_t *)scales)[b * KV_BLOCK + t] = half;
        for (int d = 0; d < end - d0; d++) {
            float q = half_to_float(x[d * step_d]) * inverse;
            q = q > -limit ? q : -limit;
            q = q < limit ? q : limit;
            codes[t * step_t + (d0 + d) * step_d] = type == KV_INT8 ? (uint8_t)(int8_t)rintf(q) : float_to_fp8(q);
        }
    }
}

/* Seals the keys and values of the block that row r completes. */
static __device__ void seal_row(const attention &a, int r, int head, bool keys, bool values)
{
    const kv_row &row = a.rows[r];
    const kv_sequence &s = a.sequences[row.sequence * a.sequence_stride];
    int block = row.pos / KV_BLOCK;
    int32_t from = raw_page(s, block), to = main_page(a, s, block);
    if (keys)
        seal_tile((const uint16_t *)keys_at(a.raw, a.layer, head, from, block),
                  keys_at(a.main, a.layer, head, to, block), a.main.type_k, a.head_k, true);
    if (values)
        seal_tile((const uint16_t *)values_at(a.raw, a.layer, head, from, block),
                  values_at(a.main, a.layer, head, to, block), a.main.type_v, a.head_v, false);
}
static __device__ inline bool completes(const attention &a, int r)
{
    return a.raw.base && a.rows[r].pos % KV_BLOCK == KV_BLOCK - 1;
}

static __global__ void __launch_bounds__(64) append_kernel(const __grid_constant__ attention a)
{
    wait_for_previous();
    let_next_start();
    float *x = (float *)smem;
    if (threadIdx.x < WARP) append_key(a, blockIdx.y, blockIdx.x, x);
    else append_value(a, blockIdx.y, blockIdx.x, x + a.head_k);
}

static __global__ void __launch_bounds__(128) seal_kernel(const __grid_constant__ attention a)
{
    wait_for_previous();
    let_next_start();
    if (completes(a, blockIdx.y)) seal_row(a, blockIdx.y, blockIdx.x, blockIdx.z == 0, blockIdx.z == 1);
}

/* ---- decode: the keys of a row split over blocks ----------------------------------------------------------------- */

/* Weight of a part whose maximum is m when joined under `top`. */
static __device__ inline float weight(float m, float top) { return m == top ? 1 : __expf(m - top); }

/* out[head_v] of query head h of row r: the weighted mean in x, in the model's own basis; by one warp. top, sum: of its
 * weights. */
static __device__ void finish(const attention &a, int r, int h, float *x, float top, float sum)
{
    if (a.peaks && threadIdx.x % WARP == 0) {
        float *peak = a.peaks + 2 * ((size_t)r * a.n_head + h);
        peak[0] = top, peak[1] = sum;
    }
    for (int d = threadIdx.x % WARP; d < a.head_v; d += WARP) x[d] /= sum;
    __syncwarp();
    if (kv_rotated(a.main.type_v, false)) turn_basis(x, a.head_v);
    for (int d = threadIdx.x % WARP; d < a.head_v; d += WARP) a.out[((size_t)r * a.n_head + h) * a.head_v + d] = x[d];
}

/* Joins `n` parts in rising order; part i of head g is at part + i * stride: maximum, sum, then the values. Leaves the
 * values in x[head_v], maximum and sum in *m, *l. By one warp. */
static __device__ void join(const float *part, int n, size_t stride, int head_v, float *x, float *m, float *l)
{
    float top = -INFINITY, sum = 0;
    int lane = threadIdx.x % WARP;
    for (int i = 0; i < n; i++) {
        float mi = part[i * stride];
        top = mi > top ? mi : top;
    }
    for (int i = 0; i < n; i++) {
        float li = part[i * stride + 1];
        if (li != 0) sum += li * weight(part[i * stride], top);
    }
    for (int d = lane; d < head_v; d += WARP) {
        float y = 0;
        for (int i = 0; i < n; i++)
            if (part[i * stride + 1] != 0) y = fmaf(part[i * stride + 2 + d], weight(part[i * stride], top), y);
        x[d] = y;
    }
    __syncwarp();
    *m = top;
    *l = sum;
}

/* Floats of shared memory in front of the stages: queries, weights, a vector for each warp. */
template <int G> static __host__ __device__ inline int decode_floats(const attention &a, int warps)
{
    int wide = a.head_k > a.head_v ? a.head_k : a.head_v;
    return (a.head_k * G + warps * (KV_BLOCK * G + wide) + 3) / 4 * 4;
}

/* How a kernel keeps its queries and its sums. */
template <int G, int HV, bool TENSOR> struct kind {
    typedef ::state<G, HV> state;
    static __device__ inline void put_query(const attention &a, float *q, int g, const float *x)
    {
        put_column(q, G, g, x, a.head_k);
    }
};
template <int G, int HV> struct kind<G, HV, true> {
    typedef tensor_state<G, HV> state;
    static __device__ inline void put_query(const attention &a, float *q, int g, const float *x)
    {
        if (a.main.type_k == KV_BF16) put_fragments<G, true>(q, g, x, a.head_k);
        else put_fragments<G, false>(q, g, x, a.head_k);
    }
};

/* TENSOR: see tensor_takes. */
template <int G, int HV, bool TENSOR>
static __global__ void __launch_bounds__(DECODE_WARPS * WARP, G <= 4 && G * HV <= 512 ? 3 : 2)
decode_kernel(const __grid_constant__ attention a)
{
    __shared__ int first[G], last[G];
    __shared__ bool final;
    int group = a.n_head / a.n_kv, parts = attention_parts(group, a.head_v), each = (group + parts - 1) / parts;
    int head = blockIdx.y / parts, g0 = blockIdx.y % parts * each, n_g = group - g0 < each ? group - g0 : each;
    int r = blockIdx.z, split = blockIdx.x;
    int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int h0 = head * group + g0;
    wait_for_previous();
    const kv_row row = a.rows[r];
    const kv_sequence s = a.sequences[row.sequence * a.sequence_stride];
    blocks seen = blocks_of(s, row.pos, row.pos);
    int chunk = (seen.count + a.n_splits - 1) / a.n_splits;
    if (chunk < warps) chunk = warps;
    int used = (seen.count + chunk - 1) / chunk;
    let_next_start();
    if (split >= used) return;
    int begin = split * chunk, end = begin + chunk < seen.count ? begin + chunk : seen.count;

    float *q = (float *)smem, *p = q + a.head_k * G + warp * KV_BLOCK * G;
    int wide = a.head_k > a.head_v ? a.head_k : a.head_v;
    float *x = q + a.head_k * G + warps * KV_BLOCK * G + warp * wide;
    unsigned char *stages = (unsigned char *)(q + decode_floats<G>(a, warps));
    int stage_bytes = k_room(a) + v_room(a);
    unsigned char *mine = stages + warp * STAGES * stage_bytes;

    if (a.append && split == used - 1) {
        if (warp == 0) append_key(a, r, head, x);
        if (warp == warps - 1) append_value(a, r, head, x);
        __syncthreads();
        if (completes(a, r)) seal_row(a, r, head, true, true);
    }
    typename kind<G, HV, TENSOR>::state st;
    start(st);
    for (int i = threadIdx.x; i < a.head_k * G; i += blockDim.x) q[i] = 0;         /* columns without a head */
    for (int sinks = 1; sinks >= 0; sinks--) {
        int from = begin, to = end;
        if (sinks && to > seen.sinks) to = seen.sinks;
        if (!sinks && from < seen.sinks) from = seen.sinks;
        if (from >= to) continue;
        kv_range range = sinks ? kv_sink_range(row.pos, s.sinks, s.window)
                               : kv_window_range(row.pos, s.sinks, s.window);
        __syncthreads();
        for (int g = warp; g < n_g; g += warps) {
            ready_query(a, r, h0 + g, sinks, x);
            kind<G, HV, TENSOR>::put_query(a, q, g, x);
        }
        if (threadIdx.x < G) first[threadIdx.x] = (int)range.first, last[threadIdx.x] = (int)range.last;
        __syncthreads();
        int i = from + warp, stage = 0;
        int32_t page = 0;
        if (i < to) {
            int block = block_number(seen, i);
            fetch<TENSOR>(a, head, row.pos, block, page_of(a, s, row.pos, block), mine, k_room(a), lane, WARP);
        }
        __pipeline_commit();
        if (i + warps < to) page = page_of(a, s, row.pos, block_number(seen, i + warps));
        for (; i < to; i += warps, stage ^= 1) {
            int next = i + warps, block = block_number(seen, i);
            if (next < to)
                fetch<TENSOR>(a, head, row.pos, block_number(seen, next), page, mine + (stage ^ 1) * stage_bytes,
                              k_room(a), lane, WARP);
            __pipeline_commit();
            if (next + warps < to) page = page_of(a, s, row.pos, block_number(seen, next + warps));
            __pipeline_wait_prior(1);
            __syncwarp();
            int t0 = (int)range.first - block * KV_BLOCK, t1 = (int)range.last + 1 - block * KV_BLOCK;
            const kv_store &types = is_raw(a, row.pos, block) ? a.raw : a.main;
            unsigned char *tile = mine + stage * stage_bytes;
            if (TENSOR && (t0 > 0 || t1 < KV_BLOCK)) {
                clear_unseen(types.type_v, tile + k_room(a), a.head_v, t0, t1, lane, WARP);
                __syncwarp();
            }
            step<G, HV>(a, types, tile, block, q, first, last, t0 < 0 ? 0 : t0, t1 > KV_BLOCK ? KV_BLOCK : t1, p, st);
        }
        __pipeline_wait_prior(0);
    }

    /* The warps' parts meet where the stages were: [G][warps][head_v + 2]. */
    __syncthreads();
    float *meet = (float *)stages;
    size_t stride = a.head_v + 2;
    put_part(a, st, meet + warp * stride, warps * stride);
    __syncthreads();
    for (int g = warp; g < n_g; g += warps) {
        float m, l;
        join(meet + g * warps * stride, warps, stride, a.head_v, x, &m, &l);
        if (used == 1) {
            finish(a, r, h0 + g, x, m, l);
            continue;
        }
        float *to = a.part + (((size_t)r * a.n_head + h0 + g) * a.n_splits + split) * stride;
        if (lane == 0) to[0] = m, to[1] = l;
        for (int d = lane; d < a.head_v; d += WARP) to[2 + d] = x[d];
        __syncwarp();
    }
    if (used == 1) return;

    /* Whoever comes last joins all splits, in their order. */
    __threadfence();
    __syncthreads();
    unsigned *arrived = &a.arrived[r * gridDim.y + blockIdx.y];
    if (threadIdx.x == 0) {
        final = atomicAdd(arrived, 1u) == (unsigned)used - 1;
        if (final) *arrived = 0;
    }
    __syncthreads();
    if (!final) return;
    __threadfence();
    for (int g = warp; g < n_g; g += warps) {
        float m, l;
        join(a.part + ((size_t)r * a.n_head + h0 + g) * a.n_splits * stride, used, stride, a.head_v, x, &m, &l);
        finish(a, r, h0 + g, x, m, l);
    }
}

/* ---- prefill: runs of rows against all that they see ------------------------------------------------------------- */

static __host__ __device__ constexpr int prefill_warps(bool tensor) { return tensor ? 4 : 8; }

/* Floats of shared memory in front of the stages: queries, a vector for each warp, the weights of a tile. */
static __host__ __device__ inline int prefill_floats(const attention &a, bool tensor)
{
    int wide = a.head_k > a.head_v ? a.head_k : a.head_v;
    return a.queries * (a.head_k + (tensor ? 0 : KV_BLOCK)) + prefill_warps(tensor) * ((wide + 3) / 4 * 4);
}

/* TENSOR: see tensor_takes. */
template <int HV, bool TENSOR>
static __global__ void __launch_bounds__(prefill_warps(TENSOR) * WARP, TENSOR && HV <= 128 ? 3 : TENSOR ? 2 : 1)
prefill_kernel(const __grid_constant__ attention a)
{
    constexpr int WARPS = prefill_warps(TENSOR), EACH = PREFILL_QUERIES / WARPS;
    __shared__ int first[PREFILL_QUERIES], last[PREFILL_QUERIES];
    int group = a.n_head / a.n_kv, head = blockIdx.x, warp = threadIdx.x / WARP;
    wait_for_previous();
    let_next_start();
    const kv_run run = a.runs[blockIdx.y];
    const kv_row row = a.rows[run.row];
    const kv_sequence s = a.sequences[row.sequence * a.sequence_stride];
    int n_q = run.n * group, high = row.pos + run.n - 1;
    blocks seen = blocks_of(s, row.pos, high);

    int wide = ((a.head_k > a.head_v ? a.head_k : a.head_v) + 3) / 4 * 4;
    float *q = (float *)smem, *x = q + a.head_k * a.queries + warp * wide;
    float *p = q + a.head_k * a.queries + WARPS * wide + warp * EACH * KV_BLOCK;
    unsigned char *stages = (unsigned char *)(q + prefill_floats(a, TENSOR));
    int stage_bytes = k_room(a) + v_room(a), n_stages = a.stages;

    typename kind<EACH, HV, TENSOR>::state st;
    start(st);
    for (int i = threadIdx.x; i < a.head_k * a.queries; i += blockDim.x) q[i] = 0;
    for (int sinks = 1; sinks >= 0; sinks--) {
        int from = sinks ? 0 : seen.sinks, to = sinks ? seen.sinks : seen.count;
        if (from >= to) continue;
        __syncthreads();
        for (int i = warp; i < PREFILL_QUERIES; i += WARPS) {
            int pos = row.pos + i / group;
            kv_range seen_by = sinks ? kv_sink_range(pos, s.sinks, s.window) : kv_window_range(pos, s.sinks, s.window);
            if (i < n_q) {
                ready_query(a, run.row + i / group, head * group + i % group, sinks, x);
                kind<EACH, HV, TENSOR>::put_query(a, q + i / EACH * EACH * a.head_k, i % EACH, x);
            }
            if (threadIdx.x % WARP == 0)
                first[i] = i < n_q ? (int)seen_by.first : 0, last[i] = i < n_q ? (int)seen_by.last : -1;
        }
        int low = sinks ? 0 : (int)kv_window_range(row.pos, s.sinks, s.window).first;
        int top = sinks && high >= s.sinks ? s.sinks - 1 : high;
        for (int ahead = 0; ahead < n_stages - 1; ahead++) {
            int block = block_number(seen, from + ahead);
            if (from + ahead < to)
                fetch<TENSOR>(a, head, row.pos, block, page_of(a, s, row.pos, block), stages, k_room(a), threadIdx.x,
                              blockDim.x);
            __pipeline_commit();
        }
        for (int i = from, stage = 0; i < to; i++) {
            int next = i + n_stages - 1, block = block_number(seen, i), put = n_stages == 2 ? stage ^ 1 : 0;
            if (next < to) {
                int b = block_number(seen, next);
                fetch<TENSOR>(a, head, row.pos, b, page_of(a, s, row.pos, b), stages + put * stage_bytes, k_room(a),
                              threadIdx.x, blockDim.x);
            }
            __pipeline_commit();
            if (n_stages == 2) __pipeline_wait_prior(1);
            else __pipeline_wait_prior(0);
            __syncthreads();
            int t0 = low - block * KV_BLOCK, t1 = top + 1 - block * KV_BLOCK;
            const kv_store &types = is_raw(a, row.pos, block) ? a.raw : a.main;
            unsigned char *tile = stages + stage * stage_bytes;
            if (TENSOR && (t0 > 0 || t1 < KV_BLOCK)) {
                clear_unseen(types.type_v, tile + k_room(a), a.head_v, t0, t1, threadIdx.x, blockDim.x);
                __syncthreads();
            }
            if (warp * EACH < n_q)
                step<EACH, HV>(a, types, tile, block, q + warp * EACH * a.head_k, first + warp * EACH,
                               last + warp * EACH, t0 < 0 ? 0 : t0, t1 > KV_BLOCK ? KV_BLOCK : t1, p, st);
            __syncthreads();
            stage = put;
        }
        __pipeline_wait_prior(0);
    }

    /* Where queries and stages were: [queries][head_v + 2]. */
    int stride = a.head_v + 2;
    float *part = (float *)smem + warp * EACH * stride;
    __syncthreads();
    if (warp * EACH >= n_q) return;
    put_part(a, st, part, stride);
    __syncwarp();
    for (int i = warp * EACH; i < (warp + 1) * EACH && i < n_q; i++, part += stride)
        finish(a, run.row + i / group, head * group + i % group, part + 2, part[0], part[1]);
}

/* ---- importance eviction ----------------------------------------------------------------------------------------- */

enum { MASS_WARPS = 4, MASS_EACH = 4 };

static __host__ __device__ inline int mass_columns(int n_q) { return (n_q + MASS_EACH - 1) / MASS_EACH * MASS_EACH; }

/* The weights that a run's queries of one KV head gave to each key, in 2^-32 so that the order of adding does not
 * matter (layer.inc). The keys' blocks are shared out to the warps of gridDim.x blocks. */
static __global__ void __launch_bounds__(MASS_WARPS * WARP, 3) mass_kernel(const __grid_constant__ attention a)
{
    int group = a.n_head / a.n_kv, head = blockIdx.y, warp = threadIdx.x / WARP;
    wait_for_previous();
    let_next_start();
    const kv_run run = a.runs[blockIdx.z];
    const kv_row row = a.rows[run.row];
    const kv_sequence s = a.sequences[row.sequence * a.sequence_stride];
    int n_q = run.n * group, columns = mass_columns(n_q), n_blocks = (row.pos + run.n - 1) / KV_BLOCK + 1;
    float *q = (float *)smem, *factor = q + a.head_k * columns, *top = factor + columns;
    float *x = top + columns + warp * a.head_k;
    bool votes = false;
    for (int i = 0; i < run.n; i++) votes |= a.votes[run.row + i] > 0;
    if (!votes || (int)blockIdx.x * MASS_WARPS >= n_blocks) return;
    for (int i = threadIdx.x; i < a.head_k * columns; i += blockDim.x) q[i] = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        int r = run.row + i / group;
        const float *peak = a.peaks + 2 * ((size_t)r * a.n_head + head * group + i % group);
        factor[i] = i < n_q ? 0x1p32f * a.votes[r] / peak[1] : 0;
        top[i] = i < n_q ? peak[0] : 0;
    }
    __syncthreads();
    for (int i = warp; i < n_q; i += MASS_WARPS) {
        ready_query(a, run.row + i / group, head * group + i % group, false, x);
        put_column(q, columns, i, x, a.head_k);
    }
    __syncthreads();
    uint64_t *mass = a.mass[row.sequence] + ((size_t)a.layer * a.n_kv + head) * a.mass_rows;
    for (int block = blockIdx.x * MASS_WARPS + warp; block < n_blocks; block += gridDim.x * MASS_WARPS) {
        const kv_store &of = is_raw(a, row.pos, block) ? a.raw : a.main;
        const unsigned char *keys = keys_at(of, a.layer, head, page_of(a, s, row.pos, block), block);
        unsigned long long sum = 0;
        int t = 0;
        for (int g = 0; g < columns; g += MASS_EACH) {
            float y[MASS_EACH];
            t = scores<MASS_EACH>(of.type_k, keys, a.head_k, q + g, columns, y);
            UNROLL
            for (int i = 0; i < MASS_EACH; i++) {
                if (a.cap > 0) y[i] = a.cap * tanhf(y[i] / a.cap);
                float w = __expf(y[i] - top[g + i]) * factor[g + i];
                bool seen = block * KV_BLOCK + t <= row.pos + (g + i) / group;
                sum += seen && w > 0 ? (unsigned long long)(long long)w : 0;         /* a NaN counts nothing */
            }
        }
        if (sum) atomicAdd((unsigned long long *)mass + block * KV_BLOCK + t, sum);
    }
}

/* A row of a tile into another: scales and codes of SIZE bytes each; by one warp. */
template <class T>
static __device__ inline void gather_row(unsigned char *dst, int to, const unsigned char *src, int from, int n,
                                         size_t scales, bool keys)
{
    for (int b = threadIdx.x % WARP; b < (int)scales / (2 * KV_BLOCK); b += WARP)
        ((uint16_t *)dst)[b * KV_BLOCK + to] = ((const uint16_t *)src)[b * KV_BLOCK + from];
    for (int d = threadIdx.x % WARP; d < n; d += WARP)
        ((T *)(dst + scales))[keys ? d * KV_BLOCK + to : to * n + d] =
            ((const T *)(src + scales))[keys ? d * KV_BLOCK + from : from * n + d];
}

static __device__ inline unsigned char *tile_at(const compaction &c, int layer, int head, bool keys, int block)
{
    int32_t page = c.pages[block];
    return keys ? keys_at(c.main, layer, head, page, block) : values_at(c.main, layer, head, page, block);
}

/* One head's rows move together, tile by tile: what a tile is to hold comes from there or from behind it, and is read
 * before any of it is written. */
static __global__ void __launch_bounds__(128, 8) compact_kernel(const __grid_constant__ compaction c)
{
    wait_for_previous();
    let_next_start();
    const kv_store &s = c.main;
    int head = blockIdx.x, layer = blockIdx.y, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    bool keys = blockIdx.z == 0;
    kv_type type = keys ? s.type_k : s.type_v;
    int n = keys ? c.head_k : c.head_v, bytes = keys ? s.k_tile : s.v_tile, each = KV_BLOCK / c.unit;
    size_t scales = kv_scale_bytes(type, n, keys);
    const int32_t *kept = c.kept + ((size_t)layer * s.n_kv + head) * c.n;
    for (int i = 0; i < c.n; i += each) {
        for (int t = warp; t < each; t += warps) {
            int from = kept[i + t];
            const unsigned char *src = tile_at(c, layer, head, keys, from / KV_BLOCK);
            if (each == 1)
                for (int b = threadIdx.x % WARP; b < bytes / 16; b += WARP)
                    ((uint4 *)smem)[b] = ((const uint4 *)src)[b];
            else if (type == KV_F32) gather_row<uint32_t>(smem, t, src, from % KV_BLOCK, n, scales, keys);
            else if (kv_sealed(type)) gather_row<uint8_t>(smem, t, src, from % KV_BLOCK, n, scales, keys);
            else gather_row<uint16_t>(smem, t, src, from % KV_BLOCK, n, scales, keys);
        }
        __syncthreads();
        unsigned char *dst = tile_at(c, layer, head, keys, (c.begin + i * c.unit) / KV_BLOCK);
        for (int b = threadIdx.x; b < bytes / 16; b += blockDim.x) ((uint4 *)dst)[b] = ((const uint4 *)smem)[b];
        __syncthreads();
    }
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

const char *attention_refuses(int head_k, int head_v, int group)
{
    if (head_k > 256 || head_v > 256) return "heads of more than 256 channels";
    if (head_k % 2 || head_v % 2 || (head_v > 64 && head_v % 4)) return "head sizes that are not a multiple of 4";
    if (group > PREFILL_QUERIES) return "more than 64 query heads on one key/value head";
    return NULL;
}

/* Tensor cores take codes that are halves or bfloat16, in rows of whole 16 bytes. */
static bool tensor_takes(const attention &a)
{
    return a.main.type_k != KV_F32 && a.main.type_v != KV_F32 && a.head_k % 16 == 0 && a.head_v % 16 == 0;
}

template <int G, bool TENSOR> static void (*decode_for(int head_v))(attention)
{
    constexpr int WIDE = G < ATTENTION_WIDE ? G : (int)ATTENTION_WIDE;
    return head_v <= 64 ? decode_kernel<G, 64, TENSOR> : head_v <= 128 ? decode_kernel<G, 128, TENSOR>
         : decode_kernel<WIDE, 256, TENSOR>;
}

template <int G> static attention_launch decode_of(const attention *a, int n_rows, size_t shared_limit)
{
    int parts = attention_parts(a->n_head / a->n_kv, a->head_v), warps = DECODE_WARPS + 1;
    attention_launch l = { "attention decode", NULL, dim3(a->n_splits, a->n_kv * parts, n_rows), dim3(0), 0 };
    l.kernel = G >= 8 && tensor_takes(*a) ? decode_for<G, (G >= 8)>(a->head_v) : decode_for<G, false>(a->head_v);
    do {                               /* large heads of wide types leave room for fewer warps */
        warps--;
        size_t stages = (size_t)warps * STAGES * (k_room(*a) + v_room(*a));
        size_t meet = (size_t)G * warps * (a->head_v + 2) * sizeof(float);
        l.shared = decode_floats<G>(*a, warps) * sizeof(float) + (stages > meet ? stages : meet);
    } while (l.shared > shared_limit && warps > 1);
    l.block = dim3(warps * WARP);
    return l;
}

struct attention_launch attention_decode(const struct attention *a, int n_rows, size_t shared_limit)
{
    int group = a->n_head / a->n_kv, parts = attention_parts(group, a->head_v), each = (group + parts - 1) / parts;
    return each == 1 ? decode_of<1>(a, n_rows, shared_limit) : each == 2 ? decode_of<2>(a, n_rows, shared_limit)
         : each <= 4 ? decode_of<4>(a, n_rows, shared_limit) : each <= 8 ? decode_of<8>(a, n_rows, shared_limit)
         : decode_of<16>(a, n_rows, shared_limit);
}

struct attention_launch attention_append(const struct attention *a, int n_rows)
{
    return { "attention append", append_kernel, dim3(a->n_kv, n_rows), dim3(2 * WARP),
             sizeof(float) * (a->head_k + a->head_v) };
}

struct attention_launch attention_seal(const struct attention *a, int n_rows)
{
    return { "attention seal", seal_kernel, dim3(a->n_kv, n_rows, 2), dim3(128), 0 };
}

static size_t prefill_shared(const attention *a)
{
    size_t meet = (size_t)a->queries * (a->head_v + 2) * sizeof(float);
    size_t all = prefill_floats(*a, tensor_takes(*a)) * sizeof(float) + (size_t)a->stages * (k_room(*a) + v_room(*a));
    return all > meet ? all : meet;
}

void attention_fit(struct attention *a, size_t shared_limit)
{
    a->stages = 2, a->queries = PREFILL_QUERIES;
    if (prefill_shared(a) <= shared_limit) return;
    a->stages = 1;
    while (prefill_shared(a) > shared_limit && a->queries / 2 >= 16 && a->queries / 2 >= a->n_head / a->n_kv)
        a->queries /= 2;
}

template <bool TENSOR> static attention_launch prefill_of(const attention *a, int n_runs)
{
    return { "attention prefill",
             a->head_v <= 64 ? prefill_kernel<64, TENSOR> : a->head_v <= 128 ? prefill_kernel<128, TENSOR>
             : prefill_kernel<256, TENSOR>,
             dim3(a->n_kv, n_runs), dim3(prefill_warps(TENSOR) * WARP), prefill_shared(a) };
}

struct attention_launch attention_prefill(const struct attention *a, int n_runs)
{
    return tensor_takes(*a) ? prefill_of<true>(a, n_runs) : prefill_of<false>(a, n_runs);
}

struct attention_launch attention_mass(const struct attention *a, int n_runs, int most_rows)
{
    int columns = mass_columns(most_rows * (a->n_head / a->n_kv));
    return { "attention mass", mass_kernel, dim3(a->n_splits, a->n_kv, n_runs), dim3(MASS_WARPS * WARP),
             sizeof(float) * ((size_t)(a->head_k + 2) * columns + MASS_WARPS * a->head_k) };
}

struct compaction_launch attention_compact(const struct compaction *c, int n_layer)
{
    return { "compact", compact_kernel, dim3(c->main.n_kv, n_layer, 2), dim3(128),
             (size_t)(c->main.k_tile > c->main.v_tile ? c->main.k_tile : c->main.v_tile) };
}
