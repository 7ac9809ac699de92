/* Attention kernels of every instruction set this machine has: against a plain double-precision softmax, and the same bits however
 * queries and keys are grouped. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base.h"
#include "../kernels.h"

#include <cmocka.h>              /* after base.h: it defines a macro named fail */

static uint64_t state = 7;
static float rnd(void)           /* roughly normal */
{
    float x = 0;
    for (int i = 0; i < 4; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x += (float)(state >> 40) / (1 << 24) - 0.5f;
    }
    return x * 1.7f;
}

/* A cache of `n` random tokens (the second layer of two) with pages in falling order, the rest of it NaN. KV head 0 has
 * the tokens of KV head 1 in reverse order. */
struct cache { struct kv_shape shape; struct kv_view view; int32_t *pages; float *k, *v; int n; };

static void fill(struct cache *c, const struct kernels *table, enum kv_type type, int head_k, int head_v, int page, int n)
{
    int n_pages = (n + page - 1) / page;
    *c = (struct cache){ { 2, 2, head_k, head_v, type, type, page }, { .window = 0 }, malloc(sizeof(int32_t) * n_pages),
                         malloc(sizeof(float) * n * head_k), malloc(sizeof(float) * n * head_v), n };
    size_t bytes = kv_page_bytes(&c->shape) * n_pages;
    for (int i = 0; i < n_pages; i++) c->pages[i] = n_pages - 1 - i;
    c->view.main = (struct kv_slots){ .shape = &c->shape, .base = malloc(bytes), .pages = c->pages };
    memset(c->view.main.base, 0xff, bytes);
    for (int i = 0; i < n * head_k; i++) c->k[i] = rnd();
    for (int i = 0; i < n * head_v; i++) c->v[i] = rnd();
    for (int t = 0; t < n; t++) {
        const float *k = c->k + (size_t)(n - 1 - t) * head_k, *v = c->v + (size_t)(n - 1 - t) * head_v;
        table->put_key(kv_k_tile(&c->view.main, 1, 0, t), type, k, head_k, t % KV_BLOCK);
        table->put_value(kv_v_tile(&c->view.main, 1, 0, t), type, v, head_v, t % KV_BLOCK);
    }
    for (int t = 0; t < n; t++) {
        table->put_key(kv_k_tile(&c->view.main, 1, 1, t), type, c->k + (size_t)t * head_k, head_k, t % KV_BLOCK);
        table->put_value(kv_v_tile(&c->view.main, 1, 1, t), type, c->v + (size_t)t * head_v, head_v, t % KV_BLOCK);
        if (type == KV_F16) {
            for (int d = 0; d < head_k; d++) c->k[t * head_k + d] = f16_to_f32(f32_to_f16(c->k[t * head_k + d]));
            for (int d = 0; d < head_v; d++) c->v[t * head_v + d] = f16_to_f32(f32_to_f16(c->v[t * head_v + d]));
        }
    }
}
static void drop(struct cache *c) { free(c->view.main.base); free(c->pages); free(c->k); free(c->v); }

/* Queries [q0, q1) of q over all their splits, in groups of `step` rows; adds up what they give to each key. */
static void run(const struct kernels *table, const struct cache *c, const float *q, const int64_t *first, const int64_t *last,
                int n_q, int step, float cap, float *out, uint64_t *mass)
{
    int D = c->shape.head_k, V = c->shape.head_v;
    float *m1 = malloc(sizeof(float) * n_q), *l1 = malloc(sizeof(float) * n_q), *o1 = malloc(sizeof(float) * n_q * V);
    float *m = malloc(sizeof(float) * n_q), *l = malloc(sizeof(float) * n_q);
    float *scratch = malloc(sizeof(float) * ATTEND_SCRATCH);
    for (int i = 0; i < n_q; i++) m[i] = -INFINITY, l[i] = 0;
    memset(out, 0, sizeof(float) * n_q * V);
    for (int r = 0; r < n_q; r += step) {
        int n = n_q - r < step ? n_q - r : step;
        for (int64_t begin = 0; begin < c->n; begin += KV_SPLIT) {
            struct attend a = { &c->view, 1, 1, 1, n, q + (size_t)r * D, first + r, last + r, last + r, begin,
                                begin + KV_SPLIT < c->n ? begin + KV_SPLIT : c->n, 1, begin + KV_SPLIT, cap, m1, l1, o1,
                                scratch };
            for (int i = 0; i < n * V; i++) o1[i] = NAN;
            table->attend(&a);
            for (int i = 0; i < n; i++)
                table->join(&m[r + i], &l[r + i], out + (size_t)(r + i) * V, m1[i], l1[i], o1 + (size_t)i * V, V);
        }
        struct attend a = { &c->view, 1, 1, 1, n, q + (size_t)r * D, first + r, last + r, last + r, 0, c->n, 1, 0, cap, m + r, l + r, NULL,
                            scratch };
        table->mass(&a, mass);
    }
    for (int i = 0; i < n_q; i++)
        for (int d = 0; d < V; d++) out[i * V + d] /= l[i];
    free(m1), free(l1), free(o1), free(m), free(l), free(scratch);
}

static double oracle_error(const struct cache *c, const float *q, const int64_t *first, const int64_t *last, int n_q, float cap,
                           const float *out, const uint64_t *mass)
{
    int D = c->shape.head_k, V = c->shape.head_v;
    double worst = 0, *p = malloc(sizeof(double) * c->n), *all = calloc(c->n, sizeof *all);
    for (int i = 0; i < n_q; i++) {
        double sum = 0, top = -INFINITY;
        for (int64_t t = first[i]; t <= last[i]; t++) {
            p[t] = 0;
            for (int d = 0; d < D; d++) p[t] += (double)q[i * D + d] * c->k[t * D + d];
            if (cap > 0) p[t] = cap * tanh(p[t] / cap);
            top = p[t] > top ? p[t] : top;
        }
        for (int64_t t = first[i]; t <= last[i]; t++) sum += p[t] = exp(p[t] - top);
        for (int d = 0; d < V; d++) {
            double x = 0;
            for (int64_t t = first[i]; t <= last[i]; t++) x += p[t] / sum * c->v[t * V + d];
            double error = fabs(x - out[i * V + d]);
            if (!(error <= worst)) worst = error;      /* NaN stays */
        }
        for (int64_t t = first[i]; t <= last[i]; t++) all[t] += p[t] / sum;
    }
    for (int t = 0; t < c->n; t++) {
        double error = fabs(all[t] - (double)mass[t] / 0x1p32);
        if (!(error <= worst)) worst = error;
    }
    free(p), free(all);
    return worst;
}

enum { ROWS = 13 };

/* Both KV heads at once give the bits that each gives alone. */
static void check_heads(const struct kernels *table, const struct cache *c, const float *q, const int64_t *first,
                        const int64_t *last)
{
    int D = c->shape.head_k, V = c->shape.head_v, n = ROWS / 2;
    int64_t begin = (c->n - 1) / KV_SPLIT * KV_SPLIT;
    float m[2][ROWS], l[2][ROWS], scratch[ATTEND_SCRATCH], *o = malloc(sizeof(float) * 4 * n * V);
    struct attend a = { &c->view, 1, 0, 2, n, q, first, last, last, begin, c->n, 0, c->n, 0, m[0], l[0], o, scratch };
    table->attend(&a);
    for (int h = 0; h < 2; h++) {
        struct attend one = { &c->view, 1, h, 1, n, q + h * n * D, first, last, last, begin, c->n, h, c->n, 0,
                              m[1] + h * n, l[1] + h * n, o + (2 + h) * n * V, scratch };
        table->attend(&one);
    }
    if (memcmp(m[0], m[1], sizeof(float) * 2 * n) || memcmp(l[0], l[1], sizeof(float) * 2 * n) ||
        memcmp(o, o + 2 * n * V, sizeof(float) * 2 * n * V))
        fail_msg("%s: two heads together give other bits", table->name);
    free(o);
}

static void check(const struct kernels *table, enum kv_type type, int head_k, int head_v, int page, int n, int window, float cap)
{
    struct cache c;
    float *q = malloc(sizeof(float) * ROWS * head_k), *a = malloc(sizeof(float) * ROWS * head_v),
          *b = malloc(sizeof(float) * ROWS * head_v);
    int64_t first[ROWS], last[ROWS];
    uint64_t *mass = calloc(2 * n, sizeof *mass);
    fill(&c, table, type, head_k, head_v, page, n);
    for (int i = 0; i < ROWS * head_k; i++) q[i] = rnd() / sqrtf((float)head_k) * 3;
    for (int i = 0; i < ROWS; i++) {               /* the last tokens of the cache, two query heads each */
        int64_t pos = n - 1 - (ROWS - 1 - i) / 2;
        last[i] = pos < 0 ? 0 : pos;
        first[i] = kv_window_range(last[i], 0, window).first;
    }
    run(table, &c, q, first, last, ROWS, ROWS, cap, a, mass);
    double error = oracle_error(&c, q, first, last, ROWS, cap, a, mass);
    /* A score of 256 products of magnitude 1 is off by up to about 256 * 2^-24 / 4, and so, relatively, is its weight. */
    if (!(error <= 1e-5))
        fail_msg("%s: type %d head %d/%d page %d tokens %d window %d cap %g: error %g", table->name, type, head_k, head_v, page, n,
                 window, cap, error);
    for (int step = 1; step < 8; step++) {
        memset(mass + n, 0, n * sizeof *mass);
        run(table, &c, q, first, last, ROWS, step, cap, b, mass + n);
        if (memcmp(a, b, sizeof(float) * ROWS * head_v) || memcmp(mass, mass + n, n * sizeof *mass))
            fail_msg("%s: rows by %d give other bits", table->name, step);
    }
    check_heads(table, &c, q, first, last);
    free(q), free(a), free(b), free(mass);
    drop(&c);
}

static void test_attend(void **unused)
{
    (void)unused;
    static const int heads[][2] = { { 64, 64 }, { 32, 32 }, { 80, 80 }, { 96, 40 }, { 100, 100 }, { 128, 128 }, { 256, 256 }, { 1, 7 } };
    static const int sizes[] = { 1, 31, 32, 33, 65, 255, 256, 257, 513 };
    for (int k = 0; k < n_kernel_tables; k++) {
        const struct kernels *table = kernel_tables[k];
        if (!table->usable()) {
            print_message("this machine has no %s\n", table->name);
            continue;
        }
        print_message("%s\n", table->name);
        for (size_t h = 0; h < sizeof heads / sizeof *heads; h++)
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
                for (enum kv_type type = KV_F32; type <= KV_F16; type++) {
                    int window = s % 3 == 0 ? 0 : s % 3 == 1 ? 40 : 7;
                    check(table, type, heads[h][0], heads[h][1], s % 2 ? 32 : 96, sizes[s], window, h == 1 ? 5 : 0);
                }
    }
}

/* ---- sealed types ------------------------------------------------------------------------------------------------- */

/* Element (token t, channel d) of a tile, decoded from the layout that kvcache.h describes. */
static double decode(const unsigned char *tile, enum kv_type type, int head, bool keys, int t, int d)
{
    const unsigned char *scales = tile + kv_step_bytes(type, head, keys), *codes = scales + kv_scale_bytes(type, head, keys);
    int blocks = kv_blocks(type, head, keys), block = d / 32 < blocks ? d / 32 : blocks - 1;
    uint16_t half;
    if (type == KV_INT4) {
        int byte = codes[keys ? d * 16 + t % 16 : t % 16 * head + d], nibble = t < 16 ? byte & 15 : byte >> 4;
        double code = nibble < 8 ? nibble : nibble - 16;
        if (!keys) return code * (double)kv_small_scale(scales[block * KV_BLOCK + t]);
        memcpy(&half, tile + 2 * d, 2);
        return code * (double)kv_small_scale(tile[2 * head + d]) + f16_to_f32(half);
    }
    size_t at = keys ? (size_t)d * KV_BLOCK + t : (size_t)t * head + d;
    memcpy(&half, scales + 2 * (block * KV_BLOCK + t), 2);
    if (type == KV_INT8) return (int8_t)codes[at] * (double)f16_to_f32(half);
    int c = codes[at], exponent = c >> 3 & 15, mantissa = c & 7;
    double magnitude = exponent ? ldexp(1 + mantissa / 8.0, exponent - 7) : ldexp(mantissa, -9);
    return (c & 0x80 ? -magnitude : magnitude) * f16_to_f32(half);
}

/* Root mean square of the error of sealed normal numbers, as a share of theirs. Theory for 32 to 128 numbers to a scale: fp8 0.026,
 * int8 0.007, int4 0.10 to 0.11. */
static const double coarse[KV_TYPES] = { [KV_FP8] = 0.03, [KV_INT8] = 0.0085, [KV_INT4] = 0.12 };

static void check_sealed(const struct kernels *table, enum kv_type type_k, enum kv_type type_v, int head_k, int head_v, int n)
{
    struct cache c;                    /* its pages of one block hold the raw rows */
    int blocks = (n + KV_BLOCK - 1) / KV_BLOCK;
    fill(&c, table, KV_F16, head_k, head_v, KV_BLOCK, n);
    struct kv_shape shape = { 2, 2, head_k, head_v, type_k, type_v, 2 * KV_BLOCK };
    int32_t *pages = malloc(sizeof *pages * blocks);
    for (int i = 0; i < blocks; i++) pages[i] = i ^ 1;
    c.view.raw = c.view.main;
    c.view.main = (struct kv_slots){ .shape = &shape, .base = malloc(kv_page_bytes(&shape) * (blocks + 1)), .pages = pages };
    memset(c.view.main.base, 0xff, kv_page_bytes(&shape) * (blocks + 1));
    for (int t = 0; t + KV_BLOCK <= n; t += KV_BLOCK) {
        unsigned char *k = kv_k_tile(&c.view.main, 1, 1, t), *v = kv_v_tile(&c.view.main, 1, 1, t);
        table->seal(kv_k_tile(&c.view.raw, 1, 1, t), k, type_k, head_k, true);
        table->seal(kv_v_tile(&c.view.raw, 1, 1, t), v, type_v, head_v, false);
        if (t == 0 || t + KV_BLOCK >= n) continue;     /* block 0 and the queries' own are seen raw */
        for (int plane = 0; plane < 2; plane++) {
            enum kv_type type = plane ? type_v : type_k;
            int head = plane ? head_v : head_k;
            double power = 0, noise = 0;
            for (int i = 0; i < KV_BLOCK && kv_sealed(type); i++)
                for (int d = 0; d < head; d++) {
                    float *x = (plane ? c.v : c.k) + (size_t)(t + i) * head + d;
                    double y = decode(plane ? v : k, type, head, !plane, i, d);
                    power += (double)*x * *x, noise += (y - *x) * (y - *x);
                    *x = (float)y;
                }
            if (!(noise <= coarse[type] * coarse[type] * power))
                fail_msg("%s type %d head size %d: error %g of the rows", table->name, type, head, sqrt(noise / power));
        }
    }
    float *q = malloc(sizeof(float) * head_k), *out = malloc(sizeof(float) * head_v);
    int64_t first = 0, last = n - 1;
    for (int i = 0; i < head_k; i++) q[i] = rnd() / sqrtf((float)head_k) * 3;
    uint64_t *mass = calloc(n, sizeof *mass);
    run(table, &c, q, &first, &last, 1, 1, 0, out, mass);
    double error = oracle_error(&c, q, &first, &last, 1, 0, out, mass);
    free(mass);
    if (!(error <= 1e-5)) fail_msg("%s: types %d/%d head %d/%d tokens %d: error %g", table->name, type_k, type_v, head_k, head_v, n, error);
    free(q), free(out), free(pages), free(c.view.main.base);
    c.view.main.base = c.view.raw.base;
    c.view.main.pages = c.pages;
    drop(&c);
}

static void test_sealed(void **unused)
{
    (void)unused;
    static const int heads[][2] = { { 64, 64 }, { 32, 32 }, { 80, 80 }, { 96, 40 }, { 100, 100 }, { 128, 128 }, { 256, 256 }, { 24, 36 },
                                   { 40, 48 }, { 48, 40 } };
    for (int k = 0; k < n_kernel_tables; k++)
        for (size_t h = 0; kernel_tables[k]->usable() && h < sizeof heads / sizeof *heads; h++)
            for (enum kv_type a = KV_F16; a < KV_TYPES; a++)
                for (enum kv_type b = KV_F16; b < KV_TYPES; b++)
                    if ((kv_sealed(a) || kv_sealed(b)) && a != KV_BF16 && b != KV_BF16)
                        check_sealed(kernel_tables[k], a, b, heads[h][0], heads[h][1], 100 + 32 * (int)(h % 3));
}

/* What the types promise to cost: shares of f16, scales and means included, from head size 32 on. */
static void test_bytes(void **unused)
{
    (void)unused;
    for (int head = 32; head <= 256; head += 4)
        for (int keys = 0; keys < 2; keys++) {
            double f16 = (double)kv_tile_bytes(KV_F16, head, keys);
            assert_true(kv_tile_bytes(KV_INT8, head, keys) <= 0.56 * f16);
            assert_true(kv_tile_bytes(KV_FP8, head, keys) <= 0.56 * f16);
            assert_true(kv_step_bytes(KV_INT4, head, keys) + kv_scale_bytes(KV_INT4, head, keys) +
                        kv_code_bytes(KV_INT4, head) <= 0.30 * f16);   /* less the padding up to 16 bytes */
            if (head % 16 == 0) assert_true(kv_tile_bytes(KV_INT4, head, keys) <= 0.30 * f16);
        }
}

/* The rotation is orthonormal and its own inverse. */
static void test_rotate(void **unused)
{
    (void)unused;
    for (int k = 0; k < n_kernel_tables; k++)
        for (int n = 1; kernel_tables[k]->usable() && n <= 256; n = n < 100 ? n + 1 : n + 52) {
            float x[256], y[256];
            double before = 0, after = 0;
            for (int i = 0; i < n; i++) x[i] = y[i] = rnd();
            kernel_tables[k]->rotate(y, n);
            for (int i = 0; i < n; i++) before += (double)x[i] * x[i], after += (double)y[i] * y[i];
            assert_true(fabs(before - after) <= 1e-5 * (1 + before));
            kernel_tables[k]->rotate(y, n);
            for (int i = 0; i < n; i++) assert_true(fabsf(x[i] - y[i]) <= 2e-6f);
        }
}

/* A NaN in a visible key must not vanish in the softmax. */
static void test_nan(void **unused)
{
    (void)unused;
    for (int k = 0; k < n_kernel_tables; k++) {
        if (!kernel_tables[k]->usable()) continue;
        struct cache c;
        float q[64], out[64];
        uint64_t mass[100] = { 0 };
        int64_t first = 0, last = 99;
        fill(&c, kernel_tables[k], KV_F32, 64, 64, 32, 100);
        for (int i = 0; i < 64; i++) q[i] = rnd();
        for (int bad = 0; bad < 100; bad += 33) {
            float row[64];
            memcpy(row, c.k + bad * 64, sizeof row);
            row[5] = NAN;
            kernel_tables[k]->put_key(kv_k_tile(&c.view.main, 1, 1, bad), KV_F32, row, 64, bad % KV_BLOCK);
            run(kernel_tables[k], &c, q, &first, &last, 1, 1, 0, out, mass);
            assert_true(isnan(out[0]));
            kernel_tables[k]->put_key(kv_k_tile(&c.view.main, 1, 1, bad), KV_F32, c.k + bad * 64, 64, bad % KV_BLOCK);
        }
        run(kernel_tables[k], &c, q, &first, &last, 1, 1, 0, out, mass);
        assert_false(isnan(out[0]));
        drop(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_attend), cmocka_unit_test(test_sealed), cmocka_unit_test(test_bytes),
                                        cmocka_unit_test(test_rotate), cmocka_unit_test(test_nan) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
