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

/* A cache of `n` random tokens (one KV head of two, one layer of two) with pages in falling order, the rest of it NaN. */
struct cache { struct kv_shape shape; struct kv_view view; int32_t *pages; float *k, *v; int n; };

static void fill(struct cache *c, const struct kernels *table, enum kv_type type, int head_k, int head_v, int page, int n)
{
    int n_pages = (n + page - 1) / page;
    *c = (struct cache){ { 2, 2, head_k, head_v, type, type, page }, { 0 }, malloc(sizeof(int32_t) * n_pages),
                         malloc(sizeof(float) * n * head_k), malloc(sizeof(float) * n * head_v), n };
    size_t bytes = kv_page_bytes(&c->shape) * n_pages;
    for (int i = 0; i < n_pages; i++) c->pages[i] = n_pages - 1 - i;
    c->view = (struct kv_view){ &c->shape, malloc(bytes), c->pages };
    memset(c->view.base, 0xff, bytes);
    for (int i = 0; i < n * head_k; i++) c->k[i] = rnd();
    for (int i = 0; i < n * head_v; i++) c->v[i] = rnd();
    for (int t = 0; t < n; t++) {
        table->put_key(kv_k_tile(&c->view, 1, 1, t), type, c->k + (size_t)t * head_k, head_k, t % KV_BLOCK);
        table->put_value(kv_v_tile(&c->view, 1, 1, t), type, c->v + (size_t)t * head_v, head_v, t % KV_BLOCK);
        if (type == KV_F16) {
            for (int d = 0; d < head_k; d++) c->k[t * head_k + d] = f16_to_f32(f32_to_f16(c->k[t * head_k + d]));
            for (int d = 0; d < head_v; d++) c->v[t * head_v + d] = f16_to_f32(f32_to_f16(c->v[t * head_v + d]));
        }
    }
}
static void drop(struct cache *c) { free(c->view.base); free(c->pages); free(c->k); free(c->v); }

/* Queries [q0, q1) of q over all their splits, in groups of `step` rows. */
static void run(const struct kernels *table, const struct cache *c, const float *q, const int64_t *first, const int64_t *last,
                int n_q, int step, float cap, float *out)
{
    int D = c->shape.head_k, V = c->shape.head_v;
    float *m1 = malloc(sizeof(float) * n_q), *l1 = malloc(sizeof(float) * n_q), *o1 = malloc(sizeof(float) * n_q * V);
    float *m = malloc(sizeof(float) * n_q), *l = malloc(sizeof(float) * n_q);
    float *scratch = malloc(sizeof(float) * attend_scratch(&c->shape));
    for (int i = 0; i < n_q; i++) m[i] = -INFINITY, l[i] = 0;
    memset(out, 0, sizeof(float) * n_q * V);
    for (int r = 0; r < n_q; r += step) {
        int n = n_q - r < step ? n_q - r : step;
        for (int64_t begin = 0; begin < c->n; begin += KV_SPLIT) {
            struct attend a = { &c->view, 1, 1, n, q + (size_t)r * D, first + r, last + r, begin,
                                begin + KV_SPLIT < c->n ? begin + KV_SPLIT : c->n, cap, m1, l1, o1, scratch };
            for (int i = 0; i < n * V; i++) o1[i] = NAN;
            table->attend(&a);
            for (int i = 0; i < n; i++)
                table->join(&m[r + i], &l[r + i], out + (size_t)(r + i) * V, m1[i], l1[i], o1 + (size_t)i * V, V);
        }
    }
    for (int i = 0; i < n_q; i++)
        for (int d = 0; d < V; d++) out[i * V + d] /= l[i];
    free(m1), free(l1), free(o1), free(m), free(l), free(scratch);
}

static double oracle_error(const struct cache *c, const float *q, const int64_t *first, const int64_t *last, int n_q, float cap,
                           const float *out)
{
    int D = c->shape.head_k, V = c->shape.head_v;
    double worst = 0, *p = malloc(sizeof(double) * c->n);
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
    }
    free(p);
    return worst;
}

enum { ROWS = 13 };

static void check(const struct kernels *table, enum kv_type type, int head_k, int head_v, int page, int n, int window, float cap)
{
    struct cache c;
    float *q = malloc(sizeof(float) * ROWS * head_k), *a = malloc(sizeof(float) * ROWS * head_v),
          *b = malloc(sizeof(float) * ROWS * head_v);
    int64_t first[ROWS], last[ROWS];
    fill(&c, table, type, head_k, head_v, page, n);
    for (int i = 0; i < ROWS * head_k; i++) q[i] = rnd() / sqrtf((float)head_k) * 3;
    for (int i = 0; i < ROWS; i++) {               /* the last tokens of the cache, two query heads each */
        int64_t pos = n - 1 - (ROWS - 1 - i) / 2;
        last[i] = pos < 0 ? 0 : pos;
        first[i] = kv_visible(last[i], window).first;
    }
    run(table, &c, q, first, last, ROWS, ROWS, cap, a);
    double error = oracle_error(&c, q, first, last, ROWS, cap, a);
    /* A score of 256 products of magnitude 1 is off by up to about 256 * 2^-24 / 4, and so, relatively, is its weight. */
    if (!(error <= 1e-5))
        fail_msg("%s: type %d head %d/%d page %d tokens %d window %d cap %g: error %g", table->name, type, head_k, head_v, page, n,
                 window, cap, error);
    for (int step = 1; step < 8; step++) {
        run(table, &c, q, first, last, ROWS, step, cap, b);
        if (memcmp(a, b, sizeof(float) * ROWS * head_v)) fail_msg("%s: rows by %d give other bits", table->name, step);
    }
    free(q), free(a), free(b);
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

/* A NaN in a visible key must not vanish in the softmax. */
static void test_nan(void **unused)
{
    (void)unused;
    for (int k = 0; k < n_kernel_tables; k++) {
        if (!kernel_tables[k]->usable()) continue;
        struct cache c;
        float q[64], out[64];
        int64_t first = 0, last = 99;
        fill(&c, kernel_tables[k], KV_F32, 64, 64, 32, 100);
        for (int i = 0; i < 64; i++) q[i] = rnd();
        for (int bad = 0; bad < 100; bad += 33) {
            float row[64];
            memcpy(row, c.k + bad * 64, sizeof row);
            row[5] = NAN;
            kernel_tables[k]->put_key(kv_k_tile(&c.view, 1, 1, bad), KV_F32, row, 64, bad % KV_BLOCK);
            run(kernel_tables[k], &c, q, &first, &last, 1, 1, 0, out);
            assert_true(isnan(out[0]));
            kernel_tables[k]->put_key(kv_k_tile(&c.view, 1, 1, bad), KV_F32, c.k + bad * 64, 64, bad % KV_BLOCK);
        }
        run(kernel_tables[k], &c, q, &first, &last, 1, 1, 0, out);
        assert_false(isnan(out[0]));
        drop(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_attend), cmocka_unit_test(test_nan) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
