/* The page pool, the index and the tiers against a naive shadow: random operations, the invariant checker after each.
 *
 *   test_kvcache [OPERATIONS [SEED]] */
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
    struct kv_slots v = { .shape = &shape, .base = base, .pages = pages };
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

/* The formula: 2 * layers * KV heads * head size * tokens * bytes; the types' shares of f16. */
static void test_bytes(void **unused)
{
    (void)unused;
    struct kv_shape big = { 80, 8, 128, 128, KV_F16, KV_F16, 32 };
    assert_true((double)kv_page_bytes(&big) * (4096 / 32) == 1.25 * (1 << 30));
    big.n_kv = 64;
    assert_true((double)kv_page_bytes(&big) * (4096 / 32) == 10.0 * (1 << 30));
    assert_true(kv_token_bytes(&big) * 32 == (double)kv_page_bytes(&big));
    struct kv_shape f16 = { 1, 1, 128, 128, KV_F16, KV_F16, 32 }, less = f16;
    less.type_k = less.type_v = KV_INT8;
    assert_true(kv_token_bytes(&less) <= 0.56 * kv_token_bytes(&f16));
    less.type_k = less.type_v = KV_INT4;
    assert_true(kv_token_bytes(&less) <= 0.30 * kv_token_bytes(&f16));
}

/* Sequences of mixed lengths come and go in any order: no page is lost, and little of the pages is empty. */
static void test_waste(void **unused)
{
    (void)unused;
    enum { SEQUENCES = 64, LONGEST = 1500, ALL = SEQUENCES * (LONGEST / 32 + 1) };
    struct kv_shape small = { 1, 1, 8, 8, KV_F16, KV_F16, 32 };
    struct kv_memory memory = { .limit = SIZE_MAX };
    struct kv_pool pool;
    struct kv_table tables[SEQUENCES];
    struct error e;
    int64_t tokens[SEQUENCES] = { 0 }, held = 0, places = 0;
    assert_true(kv_pool_open(&pool, &small, ALL, ALL, &memory, &e));
    for (int i = 0; i < SEQUENCES; i++) assert_true(kv_table_open(&tables[i], &pool, LONGEST, &e));
    for (int step = 0; step < 2000; step++) {
        int i = rnd(SEQUENCES);
        kv_table_cut(&tables[i], &pool, 0);
        tokens[i] = 100 + rnd(LONGEST - 100);
        assert_true(kv_table_grow(&tables[i], &pool, 0, tokens[i]));
        for (int k = 0; k < SEQUENCES; k++) held += tokens[k], places += (int64_t)tables[k].n * 32;
    }
    assert_true(kv_pool_check(&pool));
    assert_true((double)held > 0.96 * (double)places);
    for (int i = 0; i < SEQUENCES; i++) kv_table_close(&tables[i], &pool);
    assert_int_equal(pool.tier[KV_FAST].n_free, ALL);
    kv_pool_close(&pool);
}

enum { POOLS = 2, TABLES = 5, PAGES = 23, MOST = 10 * 64 };
static int operations = 60000;

/* What a table should hold: its tokens, each of which writes its own value, and what of it is gone. */
struct shadow { int32_t token[MOST]; bool gone[MOST]; int64_t n; };
static struct kv_pool pool[POOLS];
static struct kv_table table[POOLS][TABLES];
static struct shadow shadow[POOLS][TABLES];

static float *place(int p, int t, int64_t pos)
{
    struct kv_slots v = { .shape = &pool[p].shape, .base = pool[p].base, .pages = table[p][t].pages };
    return (float *)kv_v_tile(&v, 0, 0, pos) + pos % KV_BLOCK;
}

static void same_as_shadow(int p, int t)
{
    const struct shadow *x = &shadow[p][t];
    int page = pool[p].shape.page_size;
    assert_int_equal(table[p][t].n, (x->n + page - 1) / page);
    for (int64_t i = 0; i < x->n; i++)
        if (!x->gone[i]) {
            assert_true(table[p][t].pages[i / page] >= 0);
            assert_true(*place(p, t, i) == (float)x->token[i]);
        }
}

static void keys_of(const int32_t *tokens, int64_t n, uint8_t (*keys)[KV_KEY])
{
    static const uint8_t root[KV_KEY];
    for (int64_t b = 0; b < n / KV_BLOCK; b++) kv_block_key(b ? keys[b - 1] : root, tokens + b * KV_BLOCK, keys[b]);
}

/* Pages that have no owner. */
static int unowned(const struct kv_pool *p)
{
    int n = 0;
    for (int i = 0; i < KV_TIERS; i++) n += p->tier[i].n_free + p->tier[i].n_idle;
    return n;
}

static void op_append(int p, int t)
{
    struct shadow *x = &shadow[p][t];
    int64_t n = x->n + 1 + rnd(100);
    if (n > MOST || (x->n && x->gone[x->n - 1])) return;
    int lacks = kv_table_lacks(&table[p][t], &pool[p], x->n, n), before = unowned(&pool[p]);
    if (!kv_table_grow(&table[p][t], &pool[p], x->n, n)) return;
    assert_int_equal(before - unowned(&pool[p]), lacks);
    assert_int_equal(kv_table_lacks(&table[p][t], &pool[p], x->n, n), 0);
    for (; x->n < n; x->n++) {         /* few different texts, so that beginnings are often the same */
        x->token[x->n] = (int32_t)(x->n / KV_BLOCK * 2 + (rnd(200) == 0));
        x->gone[x->n] = false;
        *place(p, t, x->n) = (float)x->token[x->n];
    }
}

static void op_cut(int p, int t)
{
    struct shadow *x = &shadow[p][t];
    x->n = rnd((int)x->n + 1);
    while (x->n && x->gone[x->n - 1]) x->n--;
    kv_table_cut(&table[p][t], &pool[p], x->n);
}

static void op_drop(int p, int t)
{
    struct shadow *x = &shadow[p][t];
    int64_t page = pool[p].shape.page_size, from = rnd(40), to = x->n < page ? 0 : rnd((int)(x->n - page) + 1);
    kv_table_drop(&table[p][t], &pool[p], from, to);
    for (int64_t k = (from + page - 1) / page; k < to / page; k++)
        for (int64_t i = k * page; i < (k + 1) * page; i++) x->gone[i] = true;
}

static void op_fork(int p, int t)
{
    int from = (t + 1 + rnd(TABLES - 1)) % TABLES;
    kv_table_cut(&table[p][t], &pool[p], 0);
    kv_table_share(&table[p][t], &table[p][from], &pool[p]);
    shadow[p][t] = shadow[p][from];
}

static void op_index(int p, int t)
{
    const struct shadow *x = &shadow[p][t];
    uint8_t keys[MOST / KV_BLOCK][KV_KEY];
    int page = pool[p].shape.page_size;
    keys_of(x->token, x->n, keys);
    for (int k = 0; k < x->n / page; k++)
        if (table[p][t].pages[k] >= 0)
            kv_index_add(&table[p][t], &pool[p], k, keys[(k + 1) * (page / KV_BLOCK) - 1], x->token + k * page);
}

/* A table begins with what the index has of another's text. */
static void op_adopt(int p, int t)
{
    const struct shadow *from = &shadow[p][(t + 1 + rnd(TABLES - 1)) % TABLES];
    struct shadow *x = &shadow[p][t];
    uint8_t keys[MOST / KV_BLOCK][KV_KEY];
    int page = pool[p].shape.page_size;
    int32_t text[MOST];
    int64_t n = from->n;
    memcpy(text, from->token, sizeof text);
    if (n && rnd(3) == 0) text[rnd((int)n)]++;
    keys_of(text, n, keys);
    kv_table_cut(&table[p][t], &pool[p], 0);
    for (x->n = 0; x->n + page <= n; x->n += page) {
        int32_t found = kv_index_find(&pool[p], keys[(x->n + page) / KV_BLOCK - 1], text + x->n);
        if (found < 0) break;
        kv_table_adopt(&table[p][t], &pool[p], found);
    }
    memcpy(x->token, text, sizeof text);
    memset(x->gone, 0, sizeof x->gone);
}

/* A block of another table, maybe of the other pool's shape, is put at the end. */
static void op_block(int p, int t)
{
    int q = rnd(POOLS), from = rnd(TABLES);
    struct shadow *x = &shadow[p][t];
    const struct shadow *y = &shadow[q][from];
    unsigned char block[4096];
    assert_true(kv_block_bytes(&pool[q].shape) <= sizeof block &&
                kv_block_bytes(&pool[q].shape) == kv_block_bytes(&pool[p].shape));
    if (y->n < KV_BLOCK || x->n % KV_BLOCK || x->n + KV_BLOCK > MOST || (x->n && x->gone[x->n - 1])) return;
    int64_t pos = rnd((int)(y->n / KV_BLOCK)) * KV_BLOCK;
    if (y->gone[pos]) return;
    kv_block_read(&table[q][from], &pool[q], pos, block);
    int32_t tokens[KV_BLOCK];
    memcpy(tokens, y->token + pos, sizeof tokens);
    if (!kv_table_grow(&table[p][t], &pool[p], x->n, x->n + KV_BLOCK)) return;
    kv_block_write(&table[p][t], &pool[p], x->n, block);
    memcpy(x->token + x->n, tokens, sizeof tokens);
    memset(x->gone + x->n, 0, KV_BLOCK);
    x->n += KV_BLOCK;
}

static void op_park(int p, int t)
{
    table[p][t].parked = rnd(2);
    if (table[p][t].parked) return;
    kv_table_prefetch(&table[p][t], &pool[p]);
    kv_table_promote(&table[p][t], &pool[p]);
}

static void op_reopen(int p, int t)
{
    struct error e;
    kv_table_close(&table[p][t], &pool[p]);
    assert_true(kv_table_open(&table[p][t], &pool[p], MOST, &e));
    shadow[p][t].n = 0;
}

static void random_operations(size_t limit, const char *folder)
{
    static void (*const all[])(int p, int t) = { op_append, op_append, op_append, op_append, op_cut, op_drop, op_fork,
                                                 op_index, op_index, op_adopt, op_block, op_park, op_reopen };
    struct error e;
    struct kv_memory memory = { .limit = limit, .folder = folder };
    uint64_t seed = state;
    for (int p = 0; p < POOLS; p++) {
        struct kv_shape shapes[POOLS] = { { 1, 1, 8, 8, KV_F16, KV_F32, 32 }, { 1, 1, 8, 8, KV_F16, KV_F32, 64 } };
        assert_true(kv_pool_open(&pool[p], &shapes[p], PAGES, PAGES, &memory, &e));
        for (int t = 0; t < TABLES; t++) {
            assert_true(kv_table_open(&table[p][t], &pool[p], MOST, &e));
            shadow[p][t].n = 0;
        }
    }
    for (int step = 0; step < operations; step++) {
        int p = rnd(POOLS), t = rnd(TABLES);
        all[rnd(sizeof all / sizeof *all)](p, t);
        for (int i = 0; i < POOLS; i++)
            if (!kv_pool_check(&pool[i])) fail_msg("invariant broken at step %d of seed %llu", step, (unsigned long long)seed);
        assert_true(memory.used <= memory.limit);
        same_as_shadow(p, t);
        same_as_shadow(rnd(POOLS), rnd(TABLES));
    }
    if (folder) assert_true(memory.bytes_out > 0 && memory.bytes_in > 0);
    for (int p = 0; p < POOLS; p++) {
        for (int t = 0; t < TABLES; t++) kv_table_close(&table[p][t], &pool[p]);
        for (int k = 0; k < KV_TIERS; k++)
            assert_int_equal(pool[p].tier[k].n_free + pool[p].tier[k].n_idle, k == KV_FAST || folder ? PAGES : 0);
    }
    for (int p = 0; p < POOLS; p++) kv_pool_close(&pool[p]);
}

static void test_random(void **unused) { (void)unused; random_operations(SIZE_MAX, NULL); }
static void test_random_budget(void **unused) { (void)unused; random_operations(40000, NULL); }
static void test_random_tiers(void **unused) { (void)unused; random_operations(20000, "."); }

/* The checker itself must notice a lost page, a page on the free list twice and a wrong count. */
static void test_checker(void **unused)
{
    (void)unused;
    struct error e;
    struct kv_pool pool;
    struct kv_table t;
    struct kv_memory memory = { .limit = SIZE_MAX };
    assert_true(kv_pool_open(&pool, &shape, PAGES, PAGES, &memory, &e) && kv_table_open(&t, &pool, MOST, &e) &&
                kv_table_grow(&t, &pool, 0, 100));
    assert_true(kv_pool_check(&pool));
    pool.pages[t.pages[0]].refs++;
    assert_false(kv_pool_check(&pool));
    pool.pages[t.pages[0]].refs--;
    struct kv_tier *fast = &pool.tier[KV_FAST];
    int32_t lost = fast->free;
    fast->free = pool.pages[lost].newer;
    assert_false(kv_pool_check(&pool));
    fast->n_free--;
    assert_false(kv_pool_check(&pool));
    fast->n_free++;
    fast->free = lost;
    assert_true(kv_pool_check(&pool));
    pool.pages[t.pages[0]].indexed = true;
    assert_false(kv_pool_check(&pool));
    pool.pages[t.pages[0]].indexed = false;
    assert_true(kv_pool_check(&pool));
    kv_table_close(&t, &pool);
    kv_pool_close(&pool);
}

/* ---- importance eviction ---- */

/* What is kept of row `row` of a head: its scales and codes, of keys and values. */
static size_t row_bytes(const struct kv_view *v, int layer, int head, int64_t row, unsigned char *out)
{
    size_t n = 0;
    for (int keys = 0; keys < 2; keys++) {
        const struct kv_shape *s = v->main.shape;
        enum kv_type type = keys ? s->type_k : s->type_v;
        int size = keys ? s->head_k : s->head_v, t = (int)(row % KV_BLOCK), wide = (int)(kv_code_bytes(type, size) / size / KV_BLOCK);
        const unsigned char *tile = (keys ? kv_k_tile : kv_v_tile)(&v->main, layer, head, row);
        for (int b = 0; b < kv_blocks(type, size, keys); b++)
            for (int i = 0; i < 2; i++) out[n++] = tile[2 * (b * KV_BLOCK + t) + i];
        tile += kv_scale_bytes(type, size, keys);
        for (int d = 0; d < size; d++)
            for (int i = 0; i < wide; i++) out[n++] = tile[(keys ? d * KV_BLOCK + t : t * size + d) * wide + i];
    }
    return n;
}

/* Rows of random bytes and masses, of which many are equal: what kv_choose and kv_compact leave is as a plain choice says. */
static void check_compact(enum kv_type type_k, enum kv_type type_v, int head_k, int64_t rows, int64_t budget)
{
    enum { ROWS = 1024, BYTES = 1024 };
    static unsigned char before[2][3][ROWS][BYTES];
    static uint64_t mass[2 * 3 * ROWS], old[2 * 3 * ROWS], scratch[2 * ROWS];
    static int32_t chosen[2 * 3 * ROWS];
    struct kv_shape s = { 2, 3, head_k, 20, type_k, type_v, KV_BLOCK };
    int32_t pages[ROWS / KV_BLOCK];
    int n_pages = (int)((rows + KV_BLOCK - 1) / KV_BLOCK);
    unsigned char *base = malloc(n_pages * kv_page_bytes(&s));
    struct kv_view v = { .main = { .shape = &s, .base = base, .pages = pages }, .mass = mass, .mass_rows = ROWS, .fade = 0.5 };
    struct kv_middle m = kv_middle_of(rows, budget);
    int64_t gone = m.end - m.begin - m.keep, kept = rows - gone;
    assert_true(m.begin == KV_BLOCK && m.end > m.begin + m.keep && m.keep % KV_BLOCK == 0 && m.end % KV_BLOCK == 0);
    assert_true(kept <= budget && kept > budget - 2 * KV_BLOCK && rows - m.end > KV_BLOCK);
    for (int i = 0; i < n_pages; i++) pages[i] = n_pages - 1 - i;
    for (size_t i = 0; i < n_pages * kv_page_bytes(&s); i++) base[i] = (unsigned char)rnd(256);
    for (int i = 0; i < 2 * 3 * ROWS; i++) old[i] = mass[i] = i % ROWS < rows ? (uint64_t)rnd(40) << 32 : 0;
    for (int layer = 0; layer < 2; layer++)
        for (int head = 0; head < 3; head++)
            for (int64_t i = 0; i < rows; i++) row_bytes(&v, layer, head, i, before[layer][head][i]);
    kv_choose(&v, &m, rows, scratch, chosen);
    kv_compact(&v, &m, chosen);
    for (int layer = 0; layer < 2; layer++)
        for (int head = 0; head < 3; head++) {
            const uint64_t *was = old + (layer * 3 + head) * ROWS, *is = mass + (layer * 3 + head) * ROWS;
            uint64_t score[ROWS] = { 0 };
            int64_t to = 0;
            for (int64_t i = m.begin; i < m.end; i++)
                for (int64_t j = i - KV_POOL; j <= i; j++)
                    if (j >= m.begin && j < m.end && was[j] > score[i]) score[i] = was[j];
            for (int64_t i = 0; i < rows; i++) {
                int64_t better = 0;    /* rows of the middle that come before this one */
                for (int64_t j = m.begin; j < m.end; j++) better += score[j] > score[i] || (score[j] == score[i] && j > i);
                if (i >= m.begin && i < m.end && better >= m.keep) continue;
                int64_t place = i < m.end ? to : to + gone;            /* the table has not moved up yet */
                unsigned char now[BYTES];
                size_t n = row_bytes(&v, layer, head, place, now);
                if (memcmp(now, before[layer][head][i], n) || is[to] != was[i] / 2)
                    fail_msg("types %d, %d: row %d is not what row %d was", type_k, type_v, (int)place, (int)i);
                to++;
            }
            assert_int_equal(to, kept);
            for (; to < ROWS; to++) assert_true(is[to] == 0);
        }
    free(base);
}

static void test_compact(void **unused)
{
    (void)unused;
    for (enum kv_type k = KV_F32; k < KV_INT4; k++)
        for (enum kv_type v = KV_F32; v < KV_INT4; v++)
            check_compact(k, v, 20 + 44 * (k % 2), 300 + rnd(700), 160 + rnd(100));
}

static void test_table_remove(void **unused)
{
    (void)unused;
    struct error e;
    struct kv_pool pool;
    struct kv_table t;
    struct kv_memory memory = { .limit = SIZE_MAX };
    assert_true(kv_pool_open(&pool, &shape, PAGES, PAGES, &memory, &e) && kv_table_open(&t, &pool, MOST, &e) &&
                kv_table_grow(&t, &pool, 0, MOST));
    kv_table_drop(&t, &pool, 64, 128);
    int32_t last[] = { t.pages[7], t.pages[8], t.pages[9] }, first = t.pages[0];
    kv_table_remove(&t, &pool, 64, 7 * 64);
    assert_true(t.n == 4 && t.pages[0] == first && memcmp(t.pages + 1, last, sizeof last) == 0);
    int owned = 0;
    for (int i = 0; i < pool.n_pages; i++) owned += pool.pages[i].refs;
    assert_true(kv_pool_check(&pool) && owned == 4);
    kv_table_close(&t, &pool);
    kv_pool_close(&pool);
}

int main(int argc, char **argv)
{
    if (argc > 1) operations = atoi(argv[1]);
    if (argc > 2) state = strtoull(argv[2], NULL, 10);
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_addresses), cmocka_unit_test(test_visible),
                                        cmocka_unit_test(test_bytes), cmocka_unit_test(test_waste),
                                        cmocka_unit_test(test_random), cmocka_unit_test(test_random_budget),
                                        cmocka_unit_test(test_random_tiers), cmocka_unit_test(test_checker),
                                        cmocka_unit_test(test_compact), cmocka_unit_test(test_table_remove) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
