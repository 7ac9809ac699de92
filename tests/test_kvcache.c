/* The page pool against a naive shadow: random grow, cut, close and open of tables, the invariant checker after each step. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base.h"
#include "../kvcache.h"

#include <cmocka.h>              /* after base.h: it defines a macro named fail */

static const struct kv_shape shape = { 2, 3, 40, 24, KV_F16, KV_F32, 64 };

static uint64_t state = 20261129;
static int rnd(int n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)n);
}

/* Every (page, layer, plane, head, tile) has its own bytes, and they fill the page exactly. */
static void test_addresses(void **unused)
{
    (void)unused;
    size_t page = kv_page_bytes(&shape);
    assert_int_equal(page, 2 * 3 * 64 * (40 * 2 + 24 * 4));
    unsigned char *base = malloc(3 * page);
    assert_non_null(base);
    memset(base, 0, 3 * page);
    int32_t pages[3] = { 2, 0, 1 };
    struct kv_slots v = { &shape, base, pages };
    for (int64_t pos = 0; pos < 192; pos += KV_BLOCK)
        for (int layer = 0; layer < 2; layer++)
            for (int head = 0; head < 3; head++) {
                unsigned char *k = kv_k_tile(&v, layer, head, pos), *u = kv_v_tile(&v, layer, head, pos);
                assert_ptr_equal(k, kv_k_tile(&v, layer, head, pos + KV_BLOCK - 1));
                assert_true((size_t)(k - base) / page == (size_t)pages[pos / 64]);
                for (size_t i = 0; i < kv_k_tile_bytes(&shape); i++) assert_int_equal(k[i]++, 0);
                for (size_t i = 0; i < kv_v_tile_bytes(&shape); i++) assert_int_equal(u[i]++, 0);
            }
    for (size_t i = 0; i < 3 * page; i++) assert_int_equal(base[i], 1);
    free(base);
}

/* B11: query i sees keys j with i - j < W, and the sinks as from no further away than they lie in the cache. */
static void test_visible(void **unused)
{
    (void)unused;
    for (int window = 0; window < 10; window++)
        for (int sinks = 0; sinks < (window ? 6 : 1); sinks++)
            for (int64_t pos = 0; pos < 40; pos++) {
                struct kv_range s = kv_sink_range(pos, sinks, window), w = kv_window_range(pos, sinks, window);
                for (int64_t j = 0; j < 41; j++) {
                    bool sees = j <= pos && (window == 0 || pos - j < window || j < sinks);
                    bool sink = j >= s.first && j <= s.last, near = j >= w.first && j <= w.last;
                    assert_true(sees == (sink || near) && !(sink && near));
                }
                assert_true(w.query == pos && (sinks == 0 || s.query == (pos < sinks + window - 1 ? pos : sinks + window - 1)));
            }
}

enum { TABLES = 5, PAGES = 23, MOST = 10 * 64 };

static void test_random(void **unused)
{
    (void)unused;
    struct error e;
    struct kv_pool pool;
    struct kv_table tables[TABLES];
    const struct kv_table *all[TABLES];
    int64_t tokens[TABLES] = { 0 };
    assert_true(kv_pool_open(&pool, &shape, PAGES, &e));
    for (int i = 0; i < TABLES; i++) {
        assert_true(kv_table_open(&tables[i], &pool, MOST, &e));
        all[i] = &tables[i];
    }
    for (int step = 0; step < 200000; step++) {
        int i = rnd(TABLES), used = 0;
        for (int k = 0; k < TABLES; k++) used += (int)((tokens[k] + 63) / 64);
        if (rnd(2)) {
            int64_t want = tokens[i] + rnd(150);
            int more = (int)((want + 63) / 64 - (tokens[i] + 63) / 64);
            bool fits = want <= MOST && more <= PAGES - used;
            assert_true(kv_table_grow(&tables[i], &pool, tokens[i], want) == fits);
            if (fits) tokens[i] = want;
        } else if (rnd(10)) {
            tokens[i] = rnd((int)tokens[i] + 1);
            kv_table_cut(&tables[i], &pool, tokens[i]);
        } else {
            kv_table_close(&tables[i], &pool);
            assert_true(kv_table_open(&tables[i], &pool, MOST, &e));
            tokens[i] = 0;
        }
        assert_int_equal(tables[i].n, (tokens[i] + 63) / 64);
        if (!kv_pool_check(&pool, all, TABLES)) fail_msg("invariant broken at step %d", step);
    }
    for (int i = 0; i < TABLES; i++) kv_table_close(&tables[i], &pool);
    assert_int_equal(pool.n_free, PAGES);
    kv_pool_close(&pool);
}

/* The checker itself must notice a lost page, a page on the free list twice and a wrong count. */
static void test_checker(void **unused)
{
    (void)unused;
    struct error e;
    struct kv_pool pool;
    struct kv_table t;
    const struct kv_table *all[] = { &t };
    assert_true(kv_pool_open(&pool, &shape, PAGES, &e) && kv_table_open(&t, &pool, MOST, &e) &&
                kv_table_grow(&t, &pool, 0, 100));
    assert_true(kv_pool_check(&pool, all, 1));
    pool.refs[t.pages[0]]++;
    assert_false(kv_pool_check(&pool, all, 1));
    pool.refs[t.pages[0]]--;
    pool.n_free--;
    assert_false(kv_pool_check(&pool, all, 1));
    pool.n_free++;
    int32_t page = pool.free[0];
    pool.free[0] = pool.free[1];
    assert_false(kv_pool_check(&pool, all, 1));
    pool.free[0] = page;
    assert_true(kv_pool_check(&pool, all, 1));
    kv_table_close(&t, &pool);
    kv_pool_close(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_addresses), cmocka_unit_test(test_visible),
                                        cmocka_unit_test(test_random), cmocka_unit_test(test_checker) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
