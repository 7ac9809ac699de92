/* test_sampler.c - draws against distributions computed by definition: sort everything, in double. */
#include "../sampler.h"            /* first: cmocka defines a macro named fail */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct sampler_options plain(void)
{
    struct sampler_options o = sampler_defaults;
    o.temperature = 1;
    o.top_k = 0;
    o.top_p = 1;
    o.min_p = 0;
    return o;
}

static struct sampler *open_ok(const struct sampler_options *o, int n)
{
    struct sampler *s;
    struct error e = {0};
    if (!sampler_open(&s, o, n, &e))
        fail_msg("sampler_open: %s", e.text);
    return s;
}

static int32_t pick_ok(struct sampler *s, const float *x, uint64_t index)
{
    struct error e = {0};
    int32_t id = sampler_pick(s, x, index, NULL, 0, &e);
    if (id < 0)
        fail_msg("sampler_pick: %s", e.text);
    return id;
}

static double unit(void)
{
    return ((double)rand() + 0.5) / ((double)RAND_MAX + 1);
}

static float gauss(double sigma)
{
    return (float)(sigma * sqrt(-2 * log(unit())) * cos(2 * M_PI * unit()));
}

/* ---- the reference */

struct entry { int32_t id; double x, p, key; };

static int by_key(const void *a, const void *b)
{
    const struct entry *l = a, *r = b;
    return l->key != r->key ? (l->key < r->key) - (l->key > r->key) : l->id - r->id;
}

static void sort_by(struct entry *v, int n, bool typical, double entropy)
{
    for (int i = 0; i < n; i++)
        v[i].key = typical ? -fabs(-log(v[i].p) - entropy) : v[i].x;
    qsort(v, (size_t)n, sizeof *v, by_key);
}

static double softmax(struct entry *v, int n, double temperature)
{
    double max = -INFINITY, sum = 0, entropy = 0;
    for (int i = 0; i < n; i++)
        max = fmax(max, v[i].x);
    for (int i = 0; i < n; i++)
        sum += v[i].p = exp((v[i].x - max) / temperature);
    for (int i = 0; i < n; i++) {
        v[i].p /= sum;
        entropy -= v[i].p > 0 ? v[i].p * log(v[i].p) : 0;
    }
    return entropy;
}

static int prefix(const struct entry *v, int n, double mass)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        if ((sum += v[i].p) >= mass - 1e-9)
            return i + 1;
    return n;
}

/* p[0..n): what the filters of o leave of the logits x, at o's temperature. Returns how many tokens are left. */
static int reference(const struct sampler_options *o, const float *x, int n, double *p)
{
    struct entry *v = calloc((size_t)n, sizeof *v);
    int m = 0;
    for (int i = 0; i < n; i++)
        if (x[i] > -INFINITY)
            v[m++] = (struct entry){.id = i, .x = (double)x[i]};
    sort_by(v, m, false, 0);
    if (o->top_k > 0 && o->top_k < m)
        m = o->top_k;
    double entropy = softmax(v, m, 1);
    if (o->typical_p < 1) {
        sort_by(v, m, true, entropy);
        m = prefix(v, m, (double)o->typical_p);
        sort_by(v, m, false, 0);
        softmax(v, m, 1);
    }
    if (o->top_p < 1)
        m = prefix(v, m, (double)o->top_p);
    int kept = 1;
    while (kept < m && o->min_p < 1 && v[kept].p >= (double)o->min_p * v[0].p * (1 - 1e-6))
        kept++;
    softmax(v, kept, (double)o->temperature);
    memset(p, 0, (size_t)n * sizeof *p);
    for (int i = 0; i < kept; i++)
        p[v[i].id] = v[i].p;
    free(v);
    return kept;
}

/* Chi-square of counts against probabilities; bins that expect fewer than 8 are joined. A right sampler exceeds the
 * bound, 5 standard deviations above the mean, about once in a million tests. */
static void check_counts(const char *what, const int *count, const double *p, int n, int draws)
{
    double chi = 0, rest_expected = 0;
    int rest = 0, bins = 0;
    for (int i = 0; i < n; i++) {
        double expected = p[i] * draws;
        if (p[i] == 0 && count[i] > 0)
            fail_msg("%s: token %d was drawn %d times but is filtered out", what, i, count[i]);
        if (expected < 8) {
            rest += count[i];
            rest_expected += expected;
            continue;
        }
        chi += (count[i] - expected) * (count[i] - expected) / expected;
        bins++;
    }
    if (rest_expected >= 8) {
        chi += (rest - rest_expected) * (rest - rest_expected) / rest_expected;
        bins++;
    }
    double bound = bins - 1 + 5 * sqrt(2.0 * bins) + 5;
    if (!(chi <= bound))
        fail_msg("%s: chi-square %.1f over %d bins exceeds %.1f", what, chi, bins, bound);
}

static void check_distribution(const char *what, const struct sampler_options *o, const float *x, int n, int draws)
{
    double *p = calloc((size_t)n, sizeof *p);
    int *count = calloc((size_t)n, sizeof *count);
    reference(o, x, n, p);
    struct sampler *s = open_ok(o, n);
    for (int i = 0; i < draws; i++)
        count[pick_ok(s, x, (uint64_t)i)]++;
    sampler_close(s);
    check_counts(what, count, p, n, draws);
    free(count);
    free(p);
}

/* ---- distributions */

static void test_filters(void **state)
{
    (void)state;
    static const float top_p[] = {1, 0.95f, 0.5f, 0.1f, 0}, min_p[] = {0, 0.02f, 0.3f, 1, 5};
    static const float typical[] = {1, 0.9f, 0.4f, 0}, temperature[] = {1, 0.5f, 3};
    static const int top_k[] = {0, 1, 3, 40, 1000000}, sizes[] = {1, 127, 128, 129, 300};
    int cases = 0;
    srand(1);
    for (int round = 0; round < 150; round++) {
        int n = sizes[rand() % 5];
        float x[300];
        double sigma = 0.3 + 3 * unit();
        for (int i = 0; i < n; i++) {
            x[i] = gauss(sigma);
            if (round % 3 == 1)
                x[i] = roundf(2 * x[i]) / 2;           /* many ties */
            if (round % 5 == 2 && i % 4 == 1)
                x[i] = -INFINITY;
        }
        struct sampler_options o = plain();
        o.seed = (uint64_t)round;
        o.temperature = temperature[rand() % 3];
        o.top_k = top_k[rand() % 5];
        o.top_p = rand() % 2 ? 1 : top_p[rand() % 5];
        o.min_p = rand() % 2 ? 0 : min_p[rand() % 5];
        o.typical_p = rand() % 3 ? 1 : typical[rand() % 4];
        if (o.typical_p < 1 && round % 3 == 1)
            continue;                                  /* equal surprise: any order is right */
        char what[200];
        snprintf(what, sizeof what, "round %d: n %d, temp %g, top-k %d, top-p %g, min-p %g, typical %g", round, n,
                 o.temperature, o.top_k, o.top_p, o.min_p, o.typical_p);
        check_distribution(what, &o, x, n, 4000);
        cases++;
    }
    assert_true(cases > 100);
}

/* A vocabulary of many blocks, flat and peaked: counts over ranges of rank. */
static void test_large(void **state)
{
    (void)state;
    enum { n = 20000, bins = 50, draws = 4000 };
    static float x[n];
    static double p[n];
    for (int round = 0; round < 8; round++) {
        srand((unsigned)round);
        struct sampler_options o = plain();
        for (int i = 0; i < n; i++)
            x[i] = gauss(round < 4 ? 1 : 4);
        o.top_p = (float[]){1, 0.5f, 0.95f, 0.3f}[round % 4];
        o.min_p = round % 4 == 2 ? 0.05f : 0;
        o.temperature = round % 4 == 3 ? 1e9f : 0.8f;
        int kept = reference(&o, x, n, p);
        struct entry *v = calloc(n, sizeof *v);
        for (int i = 0; i < n; i++)
            v[i] = (struct entry){.id = i, .x = (double)x[i]};
        sort_by(v, n, false, 0);
        static int bin_of[n];
        double expected[bins + 1] = {0};
        for (int i = 0; i < n; i++) {
            bin_of[v[i].id] = i < kept ? (int)((int64_t)i * bins / kept) : bins;
            expected[bin_of[v[i].id]] += p[v[i].id];
        }
        int count[bins + 1] = {0};
        struct sampler *s = open_ok(&o, n);
        for (int i = 0; i < draws; i++)
            count[bin_of[pick_ok(s, x, (uint64_t)i)]]++;
        sampler_close(s);
        char what[100];
        snprintf(what, sizeof what, "large vocabulary, round %d (%d tokens kept)", round, kept);
        check_counts(what, count, expected, bins + 1, draws);
        free(v);
    }
}

static void test_seeds(void **state)
{
    (void)state;
    enum { n = 200, draws = 2000 };
    float x[n];
    double p[n];
    int count[n] = {0};
    srand(7);
    for (int i = 0; i < n; i++)
        x[i] = gauss(2);
    struct sampler_options o = plain();
    reference(&o, x, n, p);
    for (int seed = 1; seed <= draws; seed++) {
        o.seed = (uint64_t)seed;
        struct sampler *s = open_ok(&o, n);
        count[pick_ok(s, x, 5)]++;
        sampler_close(s);
    }
    check_counts("first token of seeds 1 to 2000", count, p, n, draws);
}

/* Neighbouring draws, and equal draws of neighbouring seeds, are independent: pairs fill an 8 x 8 table evenly. */
static void test_counter(void **state)
{
    (void)state;
    enum { n = 8, draws = 20000 };
    float x[n] = {0};
    double even[n * n];
    struct sampler_options o = plain(), other = plain();
    other.seed = o.seed + 1;
    struct sampler *s = open_ok(&o, n), *s2 = open_ok(&other, n);
    int next[n * n] = {0}, seeds[n * n] = {0}, far[n * n] = {0};
    for (int i = 0; i < n * n; i++)
        even[i] = 1.0 / (n * n);
    for (uint64_t i = 0; i < draws; i++) {
        int32_t a = pick_ok(s, x, i);
        next[a * n + pick_ok(s, x, i + 1)]++;
        seeds[a * n + pick_ok(s2, x, i)]++;
        far[a * n + pick_ok(s, x, i + (1ull << 40))]++;
        assert_int_equal(a, pick_ok(s, x, i));         /* whatever was drawn in between */
    }
    check_counts("pairs of neighbouring indices", next, even, n * n, draws);
    check_counts("pairs of neighbouring seeds", seeds, even, n * n, draws);
    check_counts("pairs of distant indices", far, even, n * n, draws);
    sampler_close(s);
    sampler_close(s2);
}

/* ---- edges */

static void test_greedy(void **state)
{
    (void)state;
    enum { n = 1000 };
    float x[n];
    srand(3);
    for (int i = 0; i < n; i++)
        x[i] = gauss(2);
    x[700] = x[300] = x[900] = 20;                     /* ties: the lowest id */
    for (int k = 0; k < 7; k++) {
        struct sampler_options o = sampler_defaults;
        o.temperature = 5;
        if (k == 0) o.temperature = 0;
        if (k == 1) o.temperature = 0, o.top_k = 0, o.top_p = 1, o.min_p = 0, o.typical_p = 0.1f;
        if (k == 2) o.top_k = 1;
        if (k == 3) o.top_p = 0;
        if (k == 4) o.min_p = 1;
        if (k == 5) o.min_p = 5, o.top_k = 0;
        if (k == 6) o.top_p = 0, o.top_k = 0;
        for (o.seed = 0; o.seed < 20; o.seed++) {
            struct sampler *s = open_ok(&o, n);
            assert_int_equal(pick_ok(s, x, o.seed), 300);
            assert_int_equal(sampler_top(s), 1);
            sampler_close(s);
        }
    }
}

/* Whatever may pick another token than the logits' best one is not greedy. */
static void test_not_greedy(void **state)
{
    (void)state;
    struct logit_bias bias = {3, 1};
    for (int k = 0; k < 7; k++) {
        struct sampler_options o = sampler_defaults;
        if (k > 1) o.temperature = 0;
        if (k == 1) o.typical_p = 0.5f, o.top_p = 0;
        if (k == 2) o.bias = &bias, o.n_bias = 1;
        if (k == 3) o.repeat_penalty = 1.1f;
        if (k == 4) o.presence_penalty = 0.1f;
        if (k == 5) o.frequency_penalty = -0.1f;
        struct sampler *s = open_ok(&o, 10);
        assert_int_equal(sampler_top(s), k == 6);
        sampler_close(s);
    }
}

/* The largest logits alone give the token that all give; of their order nothing is left to chance. */
static void test_pick_among(void **state)
{
    (void)state;
    enum { most = 3000 };
    static const int top_k[] = {1, 2, 3, 40, 127, 128}, sizes[] = {129, 130, 500, most};
    static float x[most], logits[most];
    static int32_t ids[most];
    int drawn = 0;
    srand(10);
    for (int round = 0; round < 200; round++) {
        int n = sizes[rand() % 4];
        struct entry *v = calloc((size_t)n, sizeof *v);
        double sigma = 0.5 + 3 * unit();
        for (int i = 0; i < n; i++) {
            x[i] = round % 10 == 9 ? 1 : gauss(sigma);
            if (round % 3 == 1)
                x[i] = roundf(2 * x[i]) / 2;           /* many ties, some between 0 and -0 */
            if (round % 5 == 2 && i % 8)
                x[i] = -INFINITY;
            v[i] = (struct entry){.id = i, .x = (double)x[i]};
        }
        sort_by(v, n, false, 0);
        struct sampler_options o = sampler_defaults;
        o.seed = (uint64_t)round;
        o.top_k = top_k[rand() % 6];
        o.top_p = rand() % 2 ? 1 : (float)unit();
        o.min_p = rand() % 2 ? 0 : (float)unit() / 4;
        o.typical_p = rand() % 2 ? 1 : (float)unit();
        struct sampler *s = open_ok(&o, n);
        assert_int_equal(sampler_top(s), o.top_k);
        int k = 0;
        for (; k < o.top_k && v[k].x > -INFINITY; k++)
            ids[k] = v[k].id, logits[k] = x[v[k].id];
        for (uint64_t i = 0; i < 50; i++) {
            int32_t all = pick_ok(s, x, i), few = sampler_pick_among(s, ids, logits, k, i);
            if (all != few)
                fail_msg("round %d, index %d: %d among all, %d among the %d best", round, (int)i, all, few, k);
            drawn += all != ids[0];
        }
        sampler_close(s);
        free(v);
    }
    assert_true(drawn > 2000);
    static const int other[][2] = {{0, 3000}, {129, 3000}, {128, 128}, {40, 40}, {41, 40}};
    for (int i = 0; i < 5; i++) {                      /* all of them count */
        struct sampler_options o = sampler_defaults;
        o.top_k = other[i][0];
        struct sampler *s = open_ok(&o, other[i][1]);
        assert_int_equal(sampler_top(s), 0);
        sampler_close(s);
    }
}

static void test_temperature_limits(void **state)
{
    (void)state;
    enum { n = 500 };
    float x[n];
    srand(4);
    for (int i = 0; i < n; i++)
        x[i] = gauss(2);
    x[123] = 12;
    struct sampler_options o = plain();
    for (int top_k = 0; top_k <= 40; top_k += 40)
        for (int i = 0; i < 3; i++) {
            o.top_k = top_k;
            o.temperature = (float[]){1e-9f, 1e-30f, 1e-45f}[i];
            struct sampler *s = open_ok(&o, n);
            for (uint64_t j = 0; j < 200; j++)
                assert_int_equal(pick_ok(s, x, j), 123);
            sampler_close(s);
        }
    o.temperature = 1e9f;
    for (o.top_k = 0; o.top_k <= 300; o.top_k += 300) {
        double p[n];
        int kept = reference(&o, x, n, p);
        for (int i = 0; i < n; i++)
            assert_true(p[i] == 0 || fabs(p[i] * kept - 1) < 1e-6);
        check_distribution("temperature 1e9", &o, x, n, 10000);
    }
}

static void test_equal_and_few(void **state)
{
    (void)state;
    float x[600] = {0}, one = -3;
    struct sampler_options o = plain();
    check_distribution("equal logits", &o, x, 600, 20000);
    for (int i = 0; i < 600; i++)
        x[i] = i % 2 ? 0.0f : -0.0f;
    o.top_k = 7;
    check_distribution("equal logits, the first seven", &o, x, 600, 5000);
    o.top_k = 0;
    o.top_p = 0.5f;
    check_distribution("equal logits, the first half", &o, x, 600, 20000);
    for (int k = 0; k < 3; k++) {
        o = k == 0 ? plain() : sampler_defaults;
        o.typical_p = k == 2 ? 0 : 1;
        check_distribution("one word", &o, &one, 1, 10);
        for (int i = 0; i < 600; i++)
            x[i] = -INFINITY;
        x[599] = -50;
        check_distribution("one word that is allowed", &o, x, 600, 10);
        x[3] = -3e38f;
        x[4] = 3e38f;
        check_distribution("extreme logits", &o, x, 600, 10);
    }
}

static void test_bad_logits(void **state)
{
    (void)state;
    enum { n = 300 };
    float x[n];
    for (int top_k = 0; top_k <= 40; top_k += 40)
        for (int kind = 0; kind < 5; kind++) {
            struct sampler_options o = sampler_defaults;
            o.top_k = top_k;
            o.temperature = kind == 1 ? 0 : 1;
            for (int i = 0; i < n; i++)
                x[i] = kind == 3 ? -INFINITY : (float)i;
            if (kind < 2) x[n - 1] = NAN;
            if (kind == 2) x[130] = INFINITY;
            if (kind == 4) x[7] = -NAN;
            struct sampler *s = open_ok(&o, n);
            struct error e = {0};
            assert_int_equal(sampler_pick(s, x, 4711, NULL, 0, &e), -1);
            assert_int_equal(e.code, GEN_RUN);
            assert_non_null(strstr(e.text, "4711"));
            assert_non_null(strstr(e.text, kind == 2 ? "infinite" : kind == 3 ? "probability 0" : "not a number"));
            sampler_close(s);
        }
}

static void test_options(void **state)
{
    (void)state;
    struct { const char *name; struct sampler_options o; } bad[40];
    int n = 0;
    struct logit_bias bias[2] = {{5, 1}, {5, 1}};
#define BAD(NAME, FIELD, VALUE) (bad[n].name = "--" NAME, bad[n].o = sampler_defaults, bad[n].o.FIELD = (VALUE), n++)
    BAD("temp", temperature, -1);
    BAD("temp", temperature, NAN);
    BAD("temp", temperature, INFINITY);
    BAD("top-k", top_k, -5);
    BAD("top-p", top_p, 2);
    BAD("top-p", top_p, -0.1f);
    BAD("top-p", top_p, NAN);
    BAD("min-p", min_p, -0.1f);
    BAD("min-p", min_p, NAN);
    BAD("min-p", min_p, INFINITY);
    BAD("typical-p", typical_p, 1.5f);
    BAD("typical-p", typical_p, -1);
    BAD("typical-p", typical_p, NAN);
    BAD("repeat-penalty", repeat_penalty, 0);
    BAD("repeat-penalty", repeat_penalty, -1);
    BAD("repeat-penalty", repeat_penalty, NAN);
    BAD("repeat-penalty", repeat_penalty, INFINITY);
    BAD("repeat-last-n", repeat_last_n, -2);
    BAD("presence-penalty", presence_penalty, NAN);
    BAD("frequency-penalty", frequency_penalty, -INFINITY);
#undef BAD
    for (int i = 0; i < n; i++) {
        struct sampler *s;
        struct error e = {0};
        if (sampler_open(&s, &bad[i].o, 100, &e))
            fail_msg("case %d: a bad %s is accepted", i, bad[i].name);
        assert_null(s);
        assert_int_equal(e.code, GEN_USAGE);
        assert_non_null(strstr(e.text, bad[i].name));
    }
    static const struct logit_bias wrong[] = {{100, 0}, {-1, 0}, {0, INFINITY}, {0, NAN}};
    for (int i = 0; i < 4; i++) {
        struct sampler_options o = sampler_defaults;
        struct sampler *s;
        struct error e = {0};
        bias[1] = wrong[i];
        o.bias = bias;
        o.n_bias = 2;
        assert_false(sampler_open(&s, &o, 100, &e));
        assert_int_equal(e.code, GEN_USAGE);
        assert_non_null(strstr(e.text, "--logit-bias"));
    }
}

/* ---- bias and penalties */

static void test_bias(void **state)
{
    (void)state;
    enum { n = 200 };
    float x[n], biased[n];
    srand(5);
    for (int i = 0; i < n; i++)
        biased[i] = x[i] = gauss(1);
    struct logit_bias bias[n] = {{3, 2.5f}, {150, -INFINITY}, {3, 0.5f}, {4, -1}};
    struct sampler_options o = plain();
    o.bias = bias;
    o.n_bias = 4;
    biased[3] += 3;
    biased[4] -= 1;
    biased[150] = -INFINITY;
    double p[n];
    int count[n] = {0};
    reference(&o, biased, n, p);
    struct sampler *s = open_ok(&o, n);
    bias[0].bias = 1e9f;                               /* the sampler has its own copy */
    for (uint64_t i = 0; i < 20000; i++)
        count[pick_ok(s, x, i)]++;
    sampler_close(s);
    check_counts("bias", count, p, n, 20000);

    for (int i = 0; i < n; i++)
        bias[i] = (struct logit_bias){i, -INFINITY};
    o.n_bias = n;
    struct error e = {0};
    s = open_ok(&o, n);
    assert_int_equal(sampler_pick(s, x, 9, NULL, 0, &e), -1);
    assert_non_null(strstr(e.text, "--logit-bias"));
    sampler_close(s);
    o.n_bias = n - 1;                                  /* all but the last */
    s = open_ok(&o, n);
    assert_int_equal(pick_ok(s, x, 9), n - 1);
    sampler_close(s);
}

static void test_penalties(void **state)
{
    (void)state;
    enum { n = 100, n_history = 50 };
    static const int last_n[] = {0, 1, 7, 49, 50, 51, 1000000000, -1};
    float x[n], copy[n], y[n];
    int32_t history[n_history + 3];
    srand(6);
    for (int round = 0; round < 40; round++) {
        for (int i = 0; i < n; i++)
            copy[i] = x[i] = gauss(2);
        x[0] = copy[0] = 0;
        x[1] = copy[1] = -INFINITY;
        for (int i = 0; i < n_history; i++)
            history[i] = rand() % 10;
        history[5] = -1;                               /* ids outside the vocabulary are passed over */
        history[6] = n;
        struct sampler_options o = plain();
        o.repeat_last_n = last_n[round % 8];
        o.repeat_penalty = round % 3 ? 1.5f : 0.7f;
        o.frequency_penalty = round % 2 ? 0.3f : -0.2f;
        o.presence_penalty = round % 4 ? 0.5f : 0;
        int from = o.repeat_last_n < 0 || o.repeat_last_n > n_history ? 0 : n_history - o.repeat_last_n;
        for (int i = 0; i < n; i++) {
            int uses = 0;
            for (int j = from; j < n_history; j++)
                uses += history[j] == i;
            y[i] = x[i];
            if (uses == 0)
                continue;
            y[i] = y[i] <= 0 ? y[i] * o.repeat_penalty : y[i] / o.repeat_penalty;
            y[i] -= (float)uses * o.frequency_penalty + o.presence_penalty;
        }
        double p[n];
        int count[n] = {0};
        struct error e = {0};
        reference(&o, y, n, p);
        struct sampler *s = open_ok(&o, n);
        for (uint64_t i = 0; i < 3000; i++)
            count[sampler_pick(s, x, i, history, n_history, &e)]++;
        sampler_close(s);
        check_counts("penalties", count, p, n, 3000);
        assert_memory_equal(x, copy, sizeof x);

        int best = 0;
        for (int i = 1; i < n; i++)
            best = y[i] > y[best] ? i : best;
        o.temperature = 0;
        s = open_ok(&o, n);
        assert_int_equal(sampler_pick(s, x, 0, history, n_history, &e), best);
        sampler_close(s);
    }
    struct sampler_options o = plain();                /* a quotient that overflows stays a number */
    o.repeat_penalty = 1e-44f;
    x[0] = 30;
    history[0] = 0;
    struct error e = {0};
    struct sampler *s = open_ok(&o, n);
    assert_int_equal(sampler_pick(s, x, 0, history, 1, &e), 0);
    sampler_close(s);
}

/* ---- log-probabilities */

static void test_logprobs(void **state)
{
    (void)state;
    srand(8);
    for (int round = 0; round < 30; round++) {
        int n = 1 + (int)(unit() * 30000), want = round % 3 == 0 ? 100 : round % 3;
        float *x = calloc((size_t)n, sizeof *x), logprob = NAN;
        struct entry *v = calloc((size_t)n, sizeof *v);
        double max = -INFINITY, sum = 0;
        for (int i = 0; i < n; i++) {
            x[i] = gauss(0.1 + round % 5);
            if (round % 4 == 1)
                x[i] = roundf(x[i]);
            if (round % 4 == 2 && i % 3)
                x[i] = -INFINITY;
            v[i] = (struct entry){.id = i, .x = (double)x[i]};
            max = fmax(max, v[i].x);
        }
        for (int i = 0; i < n; i++)
            sum += exp(v[i].x - max);
        sort_by(v, n, false, 0);
        struct sampler_options o = sampler_defaults;   /* whose filters and temperature do not matter */
        struct sampler *s = open_ok(&o, n);
        struct token_logprob best[100];
        int32_t token = rand() % n;
        sampler_logprobs(s, x, token, &logprob, best, want);
        double right = (double)x[token] - max - log(sum);
        assert_true(logprob == right || fabs((double)logprob - right) < 2e-6 * fmax(1, -right));
        for (int i = 0; i < want; i++) {
            if (i >= n || v[i].x == -INFINITY) {
                assert_int_equal(best[i].id, -1);
                continue;
            }
            assert_int_equal(best[i].id, v[i].id);
            right = v[i].x - max - log(sum);
            assert_true(fabs((double)best[i].logprob - right) < 2e-6 * fmax(1, -right));
        }
        sampler_close(s);
        free(v);
        free(x);
    }
}

/* ---- speed, for the log: machines differ */

static void test_speed(void **state)
{
    (void)state;
    enum { n = 262144, runs = 20 };
    float *x = calloc(n, sizeof *x);
    srand(9);
    for (int i = 0; i < n; i++)
        x[i] = gauss(3.5);
    for (int i = 0; i < 40; i++)
        x[rand() % n] = 12 + (float)(rand() % 8);
    for (int k = 0; k < 4; k++) {
        static const char *name[] = {"defaults", "top-k 0", "top-k 0, top-p 1, min-p 0", "greedy"};
        struct sampler_options o = k == 2 ? plain() : sampler_defaults;
        o.top_k = k == 0 ? 40 : 0;
        o.temperature = k == 3 ? 0 : 0.8f;
        struct sampler *s = open_ok(&o, n);
        double least = INFINITY;
        for (uint64_t i = 0; i < runs; i++) {
            double start = now_seconds();
            pick_ok(s, x, i);
            least = fmin(least, now_seconds() - start);
        }
        print_message("%d logits, %s: %.3f ms\n", n, name[k], least * 1e3);
        assert_true(least > 0);
        sampler_close(s);
    }
    free(x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_filters), cmocka_unit_test(test_large), cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_counter), cmocka_unit_test(test_greedy), cmocka_unit_test(test_not_greedy),
        cmocka_unit_test(test_pick_among), cmocka_unit_test(test_temperature_limits),
        cmocka_unit_test(test_equal_and_few), cmocka_unit_test(test_bad_logits), cmocka_unit_test(test_options),
        cmocka_unit_test(test_bias), cmocka_unit_test(test_penalties), cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_speed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
