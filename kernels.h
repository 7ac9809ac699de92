/* kernels.h - the CPU's arithmetic: one table of functions per instruction set, all compiled from the same sources.
 *
 * Law: for one instruction set an output's bits depend on its inputs alone, never on how many rows or columns are
 * computed together. Every output has one accumulator, and its terms are added in one order:
 *
 *   quantised weights:  acc = 0; for each block b of 32 columns in rising order
 *                           acc = fma(D[b] * d[b], (float)I[b], acc)            I = exact integer sum of code * q
 *                           acc = fma(M[b], s[b], acc)                          only for types with a minimum
 *                       D, M: the weight block's scale and minimum in float; d, s: the activation block's scale and d *
 *                       sum of q. Sub-blocks of 16 (Q2_K, Q3_K, Q6_K): I = sc0*I0 + sc1*I1 in integers; minima (Q2_K):
 *                       fma(M0,s0,..), fma(M1,s1,..) with s0, s1 = d * sum of q over each half.
 *   float weights:      one vector accumulator over the columns, its lanes summed in a fixed tree at the end.
 *
 * As the integer sums are exact, quantised products have the same bits for any layout of the weights and for every
 * instruction set with fused multiply-add. */
#ifndef KERNELS_H
#define KERNELS_H

#include "base.h"
#include "kvcache.h"
#include "model.h"
#include "quant.h"

/* 32 activations as integers: a value is d * q. `all` and `upper` are sums of q over the whole block and over its upper
 * half, each for the columns 0, 1 (mod 4) and 2, 3 (mod 4). */
struct act_block {
    float d;                           /* largest magnitude / 127 */
    float s;                           /* d * (sum of q) */
    int16_t all[2], upper[2];
    int8_t q[32];                      /* f / d rounded to nearest, ties to even: -127..127 */
};

/* Activations of n tokens, k values each, ready to be multiplied. k is a multiple of 32 where b is used. */
struct acts {
    int n, k;
    const float *f;                    /* [n][k] */
    struct act_block *b;               /* [n][k/32] */
};

/* A matrix as the CPU keeps it: W[rows][cols]. */
struct weight {
    enum tensor_type type;
    int64_t rows, cols;
    bool packed;                       /* `data` is in tiles of the table's own layout; else GGUF rows as in the file */
    const void *data;
};

/* Attention of a few query rows over the keys of one split: partial results in the online-softmax form. Each of the KV
 * heads [head, head + heads) has n_q rows, of which row i sees keys [first[i], last[i]] of the split. Keys are taken in
 * steps of 32 at absolute multiples of 32: m' = max(m, scores), l = l * exp(m - m') + sum p, o = o * exp(m - m') + sum
 * p * v. A row that sees nothing gets m = -inf, l = 0, o = 0. A step is taken by all heads before the next, as their
 * tiles lie side by side; no result depends on how many heads are computed together. */
struct attend {
    const struct kv_view *view;
    int layer, head, heads;            /* layer in the group, first KV head, KV heads */
    int n_q;                           /* query rows of a KV head */
    const float *q;                    /* [heads][n_q][head_k], already scaled */
    const int64_t *first, *last;       /* [n_q] keys that a row sees, inclusive; none where last < first */
    const int64_t *pos;                /* [n_q] the rows' own places in the cache, rising */
    int64_t begin, end;                /* the split: keys [begin, end), begin a multiple of KV_SPLIT */
    int next_head;                     /* what is likely to be read after it, for the processor's caches: the keys */
    int64_t next;                      /* from there on, of this KV head */
    float cap;                         /* soft cap of the scores; 0 = none */
    float *m, *l;                      /* [heads][n_q] */
    float *o;                          /* [heads][n_q][head_v] */
    float *scratch;                    /* [ATTEND_SCRATCH] */
};
enum {
    ATTEND_ROWS = 64,                  /* query rows of all heads that attend is given at most */
    ATTEND_SCRATCH = ATTEND_ROWS * KV_BLOCK            /* floats */
};

struct kernels {
    const char *name;                  /* generic, avx2, avxvnni, avx512 */
    bool (*usable)(void);              /* this processor has the instructions */
    int tile;                          /* rows in a packed tile; row ranges given to matmul start at multiples of it */

    /* Packing: bytes for all rows (the last tile is padded), 0 for a type that is used as it stands in the file.
     * pack converts the GGUF rows of tiles [tile0, tile1) (src points at the first row of tile0) into dst (start of the
     * whole matrix). */
    size_t (*packed_bytes)(enum tensor_type type, int64_t rows, int64_t cols);
    void (*pack)(enum tensor_type type, const void *src, int64_t rows, int64_t cols, int64_t tile0, int64_t tile1,
                 void *dst);
    /* out[cols] = row r of w in floats, the same bits as the scalar dequantiser. */
    void (*row)(const struct weight *w, int64_t r, float *out);

    /* Quantises row t of x: fills row t of b from f. A block whose largest magnitude is below 127 * 2^-126 becomes
     * zero; one with an infinity or a NaN gets d = s = NaN, which reaches every output. */
    void (*quantise)(const struct acts *x, int t);
    /* y[(t - t0) * ld + (r - row0)] = W[r] . x[t] for rows [row0, row1) and tokens [t0, t1). `scratch` has
     * scratch_bytes. */
    void (*matmul)(const struct weight *w, int64_t row0, int64_t row1, const struct acts *x, int t0, int t1,
                   float *y, size_t ld, void *scratch);
    size_t scratch_bytes;

    /* ---- the rest of a layer (layer.inc) ---- */
    /* out = x / sqrt(mean(x*x) + eps) * w */
    void (*rms_norm)(const float *x, const float *w, int n, float eps, float *out);
    void (*add)(float *x, const float *y, int n);                        /* x += y */
    /* out = act(gate) * up */
    void (*glu)(const float *gate, const float *up, int n, enum activation act, float *out);
    /* Turns x[n] in place by (cos, sin)[n/2]. */
    void (*rope)(float *x, const float *cs, const float *sn, int n, enum rope_order order);
    /* Writes one token's key [head_k] / value [head_v] into its raw tile at lane/row t (0..31). */
    void (*put_key)(void *tile, enum kv_type type, const float *k, int head_k, int t);
    void (*put_value)(void *tile, enum kv_type type, const float *v, int head_v, int t);
    /* Turns x[n] into the sealed types' basis, and back. */
    void (*rotate)(float *x, int n);
    /* Makes a tile of `type`, for heads of n channels, from the raw tile of 32 tokens of kv_raw_type(type). */
    void (*seal)(const void *raw, void *tile, enum kv_type type, int n, bool keys);
    /* Attention of n_q query rows over one split of keys: see struct attend. */
    void (*attend)(const struct attend *a);
    /* Adds to mass[key], key in [begin, end), the softmax weights that the rows give it, in 2^-32 and by atomic adds;
     * the rows' maxima m and sums l are those of all their keys, joined. */
    void (*mass)(const struct attend *a, uint64_t *mass);
    /* Joins the split (m1, l1, o1[n]) to the splits before it (m, l, o); an empty state is m = -inf, l = 0, o = 0.
     * Splits are joined in rising order of their keys. */
    void (*join)(float *m, float *l, float *o, float m1, float l1, const float *o1, int n);
    void (*soft_cap)(float *x, int n, float cap);                        /* x = cap * tanh(x / cap) */
};

/* Table for `name`, or the best usable one for NULL. NULL and *e (GEN_USAGE) when name is unknown or this machine lacks
 * it. */
const struct kernels *kernels_choose(const char *name, struct error *e);
/* All compiled tables, best last. */
extern const struct kernels *const kernel_tables[];
extern const int n_kernel_tables;

#endif
