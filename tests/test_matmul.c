/* test_matmul.c - every table of kernels against the law of kernels.h, bit for bit, and against dequantised weights.
 *
 * Sizes go around every constant of the kernels: rows around the tile and the strip of two tiles, columns around the
 * strip's length of 640 / tile blocks and the 8 blocks whose scales are read together, tokens around the groups of 3, 4
 * and 8 and the change of method at 4 or 16. */
#include "kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- random numbers ---------------------------------------------------------------------------------------------- */

static uint64_t state = 88172645463325252u;

static uint32_t random_bits(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}
static float random_float(void) { return (float)(int32_t)random_bits() * 0x1p-31f; }

/* A half of any sign and fraction, zero and subnormals included, below 2^6 so that sums stay finite. */
static uint16_t random_half(void)
{
    uint32_t r = random_bits();
    return (uint16_t)((r & 0x83FF) | ((r >> 16) % 21) << 10);
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

static const enum tensor_type quantised[] = {
    T_Q4_0, T_Q4_1, T_Q5_0, T_Q5_1, T_Q8_0, T_IQ4_NL, T_Q2_K, T_Q3_K, T_Q4_K, T_Q5_K, T_Q6_K, T_IQ4_XS
};
static const enum tensor_type plain[] = { T_F32, T_F16, T_BF16 };
enum { N_QUANTISED = sizeof quantised / sizeof *quantised, N_PLAIN = sizeof plain / sizeof *plain };

static void *allocate(size_t n, size_t size)
{
    struct error e;
    void *p = alloc_zeroed(n ? n : 1, size, "a test", &e);
    if (!p) fail_msg("%s", e.text);
    return p;
}

/* Puts a sane scale at the places where a block has halves. */
static void set_scales(enum tensor_type type, uint8_t *block)
{
    size_t at[2] = { 0, 0 };
    int n = 1;
    switch (type) {
    case T_Q4_1: case T_Q5_1: case T_Q4_K: case T_Q5_K: at[1] = 2, n = 2; break;
    case T_Q2_K: at[0] = offsetof(struct block_q2_k, d), at[1] = at[0] + 2, n = 2; break;
    case T_Q3_K: at[0] = offsetof(struct block_q3_k, d); break;
    case T_Q6_K: at[0] = offsetof(struct block_q6_k, d); break;
    default: break;
    }
    for (int i = 0; i < n; i++) {
        uint16_t h = random_half();
        memcpy(block + at[i], &h, 2);
    }
}

/* Random GGUF rows. Plain types get values of magnitude up to about 64. */
static void *random_rows(enum tensor_type type, int rows, int cols)
{
    const struct type_info *info = type_info(type);
    size_t blocks = (size_t)rows * cols / info->block;
    uint8_t *p = allocate(blocks, info->bytes);
    for (size_t i = 0; i < blocks; i++) {
        uint8_t *b = p + i * info->bytes;
        if (type == T_F32) {
            float f = random_float() * 64;
            memcpy(b, &f, 4);
        } else if (type == T_F16) {
            uint16_t h = random_half();
            memcpy(b, &h, 2);
        } else if (type == T_BF16) {
            uint16_t h = (uint16_t)((random_bits() & 0x807F) | (112 + random_bits() % 21) << 7);
            memcpy(b, &h, 2);
        } else {
            for (int k = 0; k < info->bytes; k++) b[k] = (uint8_t)random_bits();
            if (random_bits() % 4 == 0)                /* extreme codes */
                memset(b, (int[]){ 0xFF, 0x80, 0x7F, 0 }[random_bits() % 4], info->bytes);
            set_scales(type, b);
        }
    }
    return p;
}

/* ---- the law, one weight after the other ------------------------------------------------------------------------- */

/* A block of 32 columns taken apart: a weight is D * scale[half] * code[i] + M[half]. */
struct law_block { int code[32], scale[2]; float d, m[2]; bool minimum, halves; };

static int nibble_of(const uint8_t *qs, int i) { return qs[i % 16] >> i / 16 * 4 & 15; }
static int pair_of(const uint8_t *qs, int i) { return qs[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3; }

static void law_small(enum tensor_type type, const void *p, struct law_block *o)
{
    const uint8_t *bytes = p;
    uint16_t h[2];
    memcpy(h, p, 4);
    o->d = f16_to_f32(h[0]);
    o->minimum = type == T_Q4_1 || type == T_Q5_1;
    if (o->minimum) o->m[0] = o->m[1] = f16_to_f32(h[1]);
    const uint8_t *qs = bytes + 2 + 2 * o->minimum, *fifth = qs;
    if (type == T_Q5_0 || type == T_Q5_1) qs += 4;
    for (int i = 0; i < 32; i++) {
        int code = type == T_Q8_0 ? (int8_t)qs[i] : nibble_of(qs, i);
        if (type == T_Q5_0 || type == T_Q5_1) code |= (fifth[i / 8] >> i % 8 & 1) << 4;
        if (type == T_Q4_0) code -= 8;
        if (type == T_Q5_0) code -= 16;
        if (type == T_IQ4_NL) code = iq4_values[code];
        o->code[i] = code;
    }
}

/* Block g = 0..7 of 32 in a block of 256. */
static void law_big(enum tensor_type type, const void *p, int g, struct law_block *o)
{
    const struct block_q2_k *q2 = p;
    const struct block_q3_k *q3 = p;
    const struct block_q4_k *q4 = p;
    const struct block_q5_k *q5 = p;
    const struct block_q6_k *q6 = p;
    const struct block_iq4_xs *xs = p;
    int scale, min;
    o->halves = type == T_Q2_K || type == T_Q3_K || type == T_Q6_K;
    o->minimum = type == T_Q2_K || type == T_Q4_K || type == T_Q5_K;
    if (type == T_Q4_K || type == T_Q5_K) {
        k_scale_min(q4->scales, g, &scale, &min);
        o->d = f16_to_f32(q4->d) * (float)scale;
        o->m[0] = o->m[1] = -(f16_to_f32(q4->dmin) * (float)min);
    } else if (type == T_IQ4_XS) {
        o->d = f16_to_f32(xs->d) * (float)iq4_xs_scale(xs, g);
    } else {
        o->d = f16_to_f32(type == T_Q2_K ? q2->d : type == T_Q3_K ? q3->d : q6->d);
    }
    for (int half = 0; half < 2; half++) {
        int k = 2 * g + half;
        if (type == T_Q2_K) {
            o->scale[half] = q2->scales[k] & 15;
            o->m[half] = -(f16_to_f32(q2->dmin) * (float)(q2->scales[k] >> 4));
        }
        if (type == T_Q3_K) o->scale[half] = q3_k_scale(q3->scales, k);
        if (type == T_Q6_K) o->scale[half] = q6->scales[k];
    }
    for (int k = 0; k < 32; k++) {
        int i = 32 * g + k, *code = &o->code[k];
        switch (type) {
        case T_Q2_K: *code = pair_of(q2->qs, i); break;
        case T_Q3_K: *code = (pair_of(q3->qs, i) | (q3->hmask[k] >> g & 1) << 2) - 4; break;
        case T_Q4_K: *code = q4->qs[g / 2 * 32 + k] >> g % 2 * 4 & 15; break;
        case T_Q5_K: *code = (q5->qs[g / 2 * 32 + k] >> g % 2 * 4 & 15) | (q5->qh[k] >> g & 1) << 4; break;
        case T_Q6_K:
            *code = ((q6->ql[i / 128 * 64 + i % 64] >> i % 128 / 64 * 4 & 15) | pair_of(q6->qh, i) << 4) - 32;
            break;
        default: *code = iq4_values[nibble_of(xs->qs + 16 * g, k)];
        }
    }
}

static float multiply_add(float a, float b, float c, bool fused) { return fused ? fmaf(a, b, c) : a * b + c; }

/* One output by the law, and in double over dequantised weights w with the sum of its terms' magnitudes. */
static float by_law(enum tensor_type type, const void *row, const struct acts *x, int t, bool fused)
{
    const struct type_info *info = type_info(type);
    int nb = x->k / 32;
    float acc = 0;
    for (int b = 0; b < nb; b++) {
        struct law_block o = { .scale = { 1, 1 } };
        if (info->block == 32) law_small(type, (const uint8_t *)row + (size_t)b * info->bytes, &o);
        else law_big(type, (const uint8_t *)row + (size_t)(b / 8) * info->bytes, b % 8, &o);
        const struct act_block *v = &x->b[(size_t)t * nb + b];
        int sum[2] = { 0, 0 }, q_sum[2] = { 0, 0 };
        for (int i = 0; i < 32; i++) {
            int q = v->q[i];
            sum[i / 16] += o.code[i] * q;
            q_sum[i / 16] += q;
        }
        float d = v->d;
        acc = multiply_add(o.d * d, (float)(sum[0] * o.scale[0] + sum[1] * o.scale[1]), acc, fused);
        if (o.minimum && o.halves)
            for (int half = 0; half < 2; half++) acc = multiply_add(o.m[half], d * (float)q_sum[half], acc, fused);
        else if (o.minimum) acc = multiply_add(o.m[0], d * (float)(q_sum[0] + q_sum[1]), acc, fused);
    }
    return acc;
}

/* ---- activations ------------------------------------------------------------------------------------------------- */

static struct acts new_acts(int n, int k)
{
    struct acts x = { .n = n, .k = k };
    float *f = allocate((size_t)n * k, sizeof *f);
    for (int i = 0; i < n * k; i++) f[i] = random_float() * (random_bits() % 8 ? 1 : 20);
    for (int i = 0; i + 32 <= n * k; i += 32)      /* now and then all +-127, so that integer sums reach their limits */
        if (random_bits() % 8 == 0) {
            bool same_sign = random_bits() % 2;
            for (int j = 0; j < 32; j++) f[i + j] = same_sign || random_bits() % 2 ? 3 : -3;
        }
    x.f = f;
    x.b = allocate((size_t)n * (k / 32), sizeof *x.b);
    return x;
}

static void free_acts(struct acts *x)
{
    free((void *)x->f);
    free(x->b);
}

/* ---- one product in every way ------------------------------------------------------------------------------------ */

static float *new_output(size_t n)
{
    float *y = allocate(n, sizeof *y);
    for (size_t i = 0; i < n; i++) y[i] = NAN;
    return y;
}

static void assert_same(const float *a, const float *b, size_t n, const char *what, const struct kernels *k,
                        enum tensor_type type, int rows, int cols, int tokens)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a))
            fail_msg("%s, %s, %d x %d, %d tokens: %s: output %zu is %.9g, not %.9g", k->name, type_info(type)->name,
                     rows, cols, tokens, what, i, a[i], b[i]);
}

/* The product in pieces of `step_r` tiles and `step_t` tokens. */
static void in_pieces(const struct kernels *k, const struct weight *w, const struct acts *x, int tokens, int step_r,
                      int step_t, float *y, void *scratch)
{
    size_t ld = (size_t)w->rows + 5;
    float *part = new_output(ld * tokens);
    for (int64_t r = 0; r < w->rows; r += step_r * k->tile) {
        int64_t end = r + step_r * k->tile < w->rows ? r + step_r * k->tile : w->rows;
        for (int t = 0; t < tokens; t += step_t) {
            int last = t + step_t < tokens ? t + step_t : tokens;
            for (size_t i = 0; i < ld * tokens; i++) part[i] = NAN;
            k->matmul(w, r, end, x, t, last, part, ld, scratch);
            for (int i = t; i < last; i++)
                for (int64_t c = 0; c < (int64_t)ld; c++) {
                    float v = part[(size_t)(i - t) * ld + c];
                    if (c < end - r) y[(size_t)i * w->rows + r + c] = v;
                    else assert_true(isnan(v));        /* nothing is written beyond the rows asked for */
                }
        }
    }
    free(part);
}

/* The exact answer for quantised types, the whole product in one piece for plain ones. */
static float *expected(const struct kernels *k, const struct weight *w, const struct acts *x, int tokens, void *scratch)
{
    float *y = new_output((size_t)w->rows * tokens);
    const struct type_info *info = type_info(w->type);
    size_t stride = (size_t)w->cols / info->block * info->bytes;
    bool fused = strcmp(k->name, "generic") != 0;
    if (info->block == 1) {
        k->matmul(w, 0, w->rows, x, 0, tokens, y, (size_t)w->rows, scratch);
        return y;
    }
    for (int t = 0; t < tokens; t++)
        for (int64_t r = 0; r < w->rows; r++)
            y[(size_t)t * w->rows + r] = by_law(w->type, (const uint8_t *)w->data + stride * r, x, t, fused);
    return y;
}

/* y against a sum in double over dequantised weights and the activations as they are used. Float rounding alone is
 * allowed: a step of 2^-24 per addition, of terms that may be some times larger than the products (codes of types with
 * a minimum are not centred: their two terms cancel). */
static void assert_close(const float *y, const struct weight *w, const struct acts *x, int tokens)
{
    const struct type_info *info = type_info(w->type);
    size_t stride = (size_t)w->cols / info->block * info->bytes;
    int cols = (int)w->cols;
    float *row = allocate(cols, sizeof *row);
    for (int64_t r = 0; r < w->rows; r++) {
        info->dequantise((const uint8_t *)w->data + stride * r, row, cols);
        for (int t = 0; t < tokens; t++) {
            double sum = 0, magnitude = 0;
            for (int c = 0; c < cols; c++) {
                double v = info->block == 1 ? x->f[(size_t)t * cols + c]
                    : (double)x->b[((size_t)t * cols + c) / 32].d * x->b[((size_t)t * cols + c) / 32].q[c % 32];
                sum += row[c] * v;
                magnitude += fabs(row[c] * v);
            }
            double error = fabs(y[(size_t)t * w->rows + r] - sum), bound = magnitude * (cols / 8 + 8) * 0x1p-24 * 16;
            if (!(error <= bound))
                fail_msg("%s, row %d of %d, %d columns: %.9g, not %.17g", info->name, (int)r, (int)w->rows, cols,
                         y[(size_t)t * w->rows + r], sum);
        }
    }
    free(row);
}

static void check_product(const struct kernels *k, enum tensor_type type, int rows, int cols, int tokens)
{
    struct weight w = { type, rows, cols, false, random_rows(type, rows, cols) }, packed = w;
    struct acts x = new_acts(tokens, cols);
    void *scratch = allocate(1, k->scratch_bytes);
    if (type_info(type)->block > 1)
        for (int t = 0; t < tokens; t++) k->quantise(&x, t);
    size_t n = (size_t)rows * tokens;
    float *y = expected(k, &w, &x, tokens, scratch), *z = new_output(n);
    assert_close(y, &w, &x, tokens);

    in_pieces(k, &w, &x, tokens, rows, tokens, z, scratch);
    assert_same(z, y, n, "rows of the file", k, type, rows, cols, tokens);
    in_pieces(k, &w, &x, tokens, 1, tokens < 7 ? 1 : 7, z, scratch);
    assert_same(z, y, n, "rows of the file, in pieces", k, type, rows, cols, tokens);

    size_t bytes = k->packed_bytes(type, rows, cols);
    assert_true((bytes != 0) == (type_info(type)->block > 1));
    if (bytes) {
        uint8_t *data = allocate(1, bytes);
        int tiles = (rows + k->tile - 1) / k->tile, half = tiles / 2;
        size_t stride = (size_t)cols / type_info(type)->block * type_info(type)->bytes;
        k->pack(type, (const uint8_t *)w.data + stride * half * k->tile, rows, cols, half, tiles, data);
        k->pack(type, w.data, rows, cols, 0, half, data);
        packed.data = data;
        packed.packed = true;
        in_pieces(k, &packed, &x, tokens, rows, tokens, z, scratch);
        assert_same(z, y, n, "packed", k, type, rows, cols, tokens);
        in_pieces(k, &packed, &x, tokens, 1, 1, z, scratch);
        assert_same(z, y, n, "packed, tile by tile and token by token", k, type, rows, cols, tokens);
        in_pieces(k, &packed, &x, tokens, 3, 5, z, scratch);
        assert_same(z, y, n, "packed, in pieces", k, type, rows, cols, tokens);
        free(data);
    }
    free(scratch);
    free((void *)w.data);
    free_acts(&x);
    free(y);
    free(z);
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static void check_sizes(const struct kernels *k, enum tensor_type type)
{
    int tile = k->tile, block = type_info(type)->block, unit = block == 1 ? 1 : block;
    int strip = block == 1 ? tile : 640 / tile * 32 / unit;      /* units in a strip; lanes for plain types */
    if (strip < 1) strip = 1;
    int rows[] = { 1, tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile, 2 * tile + 1, 4 * tile + 1, 7, 8, 9, 17 };
    int units[] = { 1, 2, 3, 7, 8, 9, strip - 1, strip, strip + 1, 2 * strip + 1 };
    int tokens[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 18, 19, 20, 33 };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        check_product(k, type, rows[i], 2 * unit, 1);
        check_product(k, type, rows[i], 2 * unit, 6);
        check_product(k, type, rows[i], 2 * unit, 17);
    }
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (units[i] < 1) continue;
        check_product(k, type, tile + 1, units[i] * unit, 1);
        check_product(k, type, tile + 1, units[i] * unit, 5);
        check_product(k, type, 2 * tile + 1, units[i] * unit, 17);
    }
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        check_product(k, type, 2 * tile + 3, 3 * unit, tokens[i]);
}

static void test_products(void **unused)
{
    (void)unused;
    for (int i = 0; i < n_kernel_tables; i++) {
        const struct kernels *k = kernel_tables[i];
        if (!k->usable()) {
            print_message("this processor lacks %s: its kernels were not tested\n", k->name);
            continue;
        }
        print_message("products with %s\n", k->name);
        for (int j = 0; j < N_QUANTISED; j++) check_sizes(k, quantised[j]);
        for (int j = 0; j < N_PLAIN; j++) check_sizes(k, plain[j]);
    }
}

/* Quantised activations have the same bits everywhere: those of this definition. */
static void quantise_by_definition(struct acts *x, int t)
{
    for (int b = 0; b < x->k / 32; b++) {
        const float *f = x->f + (size_t)t * x->k + 32 * b;
        struct act_block *o = &x->b[(size_t)t * (x->k / 32) + b];
        float high = 0;
        for (int i = 0; i < 32; i++)
            if (!(fabsf(f[i]) <= high)) high = fabsf(f[i]);
        for (int i = 0; i < 32; i++)
            if (!isfinite(f[i])) high = NAN;
        float d = high / 127;
        if (d < 0x1p-126f) d = 0;
        int sum = 0;
        *o = (struct act_block){ .d = d };
        for (int i = 0; i < 32; i++) {
            int q = d > 0 ? (int)nearbyintf(f[i] * (1 / d)) : 0;
            assert_in_range(q + 127, 0, 254);
            o->q[i] = (int8_t)q;
            o->all[i / 2 % 2] += (int16_t)q;
            if (i >= 16) o->upper[i / 2 % 2] += (int16_t)q;
            sum += q;
        }
        o->s = d * (float)sum;
    }
}

static bool same_float(float a, float b) { return !memcmp(&a, &b, sizeof a) || (isnan(a) && isnan(b)); }

static void test_quantise(void **unused)
{
    (void)unused;
    enum { K = 64 * 32, TOKENS = 3 };
    static const float special[] = {
        0, -0.0f, 1, -1, 0.5f, 1.5f, 2.5f, 126.5f, 127, 1e-45f, 1e-38f, 1.4e-36f, 1.5e-36f, 3.4e38f, -3.4e38f, INFINITY,
        -INFINITY, NAN
    };
    struct acts want = new_acts(TOKENS, K), have = want;
    float *f = (float *)want.f;
    for (int i = 0; i < TOKENS * K; i++) {
        int kind = i / 32 % 8;
        if (kind == 1) f[i] = 0;
        if (kind == 2) f[i] = (float)((int)(random_bits() % 255) - 127) / 2;                 /* many ties */
        if (kind == 3) {                                                                     /* any finite bits */
            uint32_t bits = random_bits();
            if ((bits & 0x7F800000) == 0x7F800000) bits ^= 0x40000000;
            memcpy(&f[i], &bits, 4);
        }
        if (kind == 4) f[i] = random_float() * 1e-36f;
        if (kind >= 5 && i % 32 == 7) f[i] = special[random_bits() % (sizeof special / sizeof *special)];
    }
    have.b = allocate(TOKENS * K / 32, sizeof *have.b);
    for (int t = 0; t < TOKENS; t++) quantise_by_definition(&want, t);
    for (int i = 0; i < n_kernel_tables; i++) {
        if (!kernel_tables[i]->usable()) continue;
        memset(have.b, 0x80, TOKENS * K / 32 * sizeof *have.b);
        for (int t = 0; t < TOKENS; t++) kernel_tables[i]->quantise(&have, t);
        for (int j = 0; j < TOKENS * K / 32; j++) {
            struct act_block *a = &have.b[j], *b = &want.b[j];
            assert_memory_equal(a->q, b->q, sizeof a->q);
            assert_memory_equal(a->all, b->all, sizeof a->all);
            assert_memory_equal(a->upper, b->upper, sizeof a->upper);
            assert_true(same_float(a->d, b->d) && same_float(a->s, b->s));
        }
    }
    free(have.b);
    free_acts(&want);
}

/* One NaN among the activations makes every output NaN; an infinity does not become a finite number. */
static void test_not_finite(void **unused)
{
    (void)unused;
    enum { ROWS = 35, K = 512, TOKENS = 6 };
    for (int i = 0; i < n_kernel_tables; i++) {
        const struct kernels *k = kernel_tables[i];
        if (!k->usable()) continue;
        for (int j = 0; j < N_QUANTISED; j++) {
            struct weight w = { quantised[j], ROWS, K, false, random_rows(quantised[j], ROWS, K) };
            struct acts x = new_acts(TOKENS, K);
            void *scratch = allocate(1, k->scratch_bytes);
            ((float *)x.f)[1 * K + 100] = NAN;
            ((float *)x.f)[3 * K + 300] = -INFINITY;
            for (int t = 0; t < TOKENS; t++) k->quantise(&x, t);
            float y[TOKENS][ROWS];
            k->matmul(&w, 0, ROWS, &x, 0, TOKENS, &y[0][0], ROWS, scratch);
            for (int t = 0; t < TOKENS; t++)
                for (int r = 0; r < ROWS; r++) assert_true(isnan(y[t][r]) == (t == 1 || t == 3));
            free(scratch);
            free((void *)w.data);
            free_acts(&x);
        }
    }
}

static void test_rows(void **unused)
{
    (void)unused;
    for (int i = 0; i < n_kernel_tables; i++) {
        const struct kernels *k = kernel_tables[i];
        if (!k->usable()) continue;
        for (int j = 0; j < N_QUANTISED + N_PLAIN; j++) {
            enum tensor_type type = j < N_QUANTISED ? quantised[j] : plain[j - N_QUANTISED];
            int rows = 2 * k->tile + 1, cols = 512;
            struct weight w = { type, rows, cols, false, random_rows(type, rows, cols) }, packed = w;
            size_t bytes = k->packed_bytes(type, rows, cols);
            void *data = allocate(1, bytes);
            if (bytes) {
                k->pack(type, w.data, rows, cols, 0, 3, data);
                packed.data = data;
                packed.packed = true;
            }
            for (int r = 0; r < rows; r++) {
                float want[512], have[512];
                const struct type_info *info = type_info(type);
                info->dequantise((const uint8_t *)w.data + (size_t)r * (cols / info->block) * info->bytes, want, cols);
                for (int c = 0; c < cols; c++) have[c] = NAN;
                k->row(&packed, r, have);
                assert_same(have, want, cols, "row, packed", k, type, rows, cols, 0);
                for (int c = 0; c < cols; c++) have[c] = NAN;
                k->row(&w, r, have);
                assert_same(have, want, cols, "row", k, type, rows, cols, 0);
            }
            free(data);
            free((void *)w.data);
        }
    }
}

static void test_choose(void **unused)
{
    (void)unused;
    struct error e = { 0 };
    const struct kernels *best = kernels_choose(NULL, &e);
    assert_non_null(best);
    assert_true(best->usable());
    for (int i = 0; i < n_kernel_tables; i++) {
        const struct kernels *k = kernel_tables[i];
        e = (struct error){ 0 };
        assert_ptr_equal(kernels_choose(k->name, &e), k->usable() ? k : NULL);
        assert_int_equal(e.code, k->usable() ? GEN_OK : GEN_USAGE);
        if (k == best)
            for (int j = i + 1; j < n_kernel_tables; j++) assert_false(kernel_tables[j]->usable());
    }
    assert_string_equal(kernel_tables[0]->name, "generic");
    assert_true(kernel_tables[0]->usable());
    assert_null(kernels_choose("pentium", &e));
    assert_int_equal(e.code, GEN_USAGE);
    assert_non_null(strstr(e.text, "pentium"));
    assert_non_null(strstr(e.text, "generic"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quantise),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_choose),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
