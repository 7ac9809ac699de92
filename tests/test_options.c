/* test_options.c - the option table against itself, and the parser against the table. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <float.h>
#include <stdio.h>
#include <string.h>

#include "options.h"

#include <cmocka.h>                    /* last: its macro fail() is not the function of base.h */

/* Parses up to three words; the error's code. */
static int parse(struct options *o, struct error *e, char *a, char *b, char *c)
{
    char *words[] = { "gen", a, b, c, NULL };
    int n = 1;
    while (words[n]) n++;
    *e = (struct error){ 0 };
    return options_parse(o, n, words, e) ? GEN_OK : e->code;
}

static int code(char *a, char *b, char *c)
{
    struct options o;
    struct error e;
    int code = parse(&o, &e, a, b, c);
    assert_true(code == GEN_OK || (code == GEN_USAGE && e.text[0]));
    options_free(&o);
    return code;
}

static void names_are_unique(void **state)
{
    (void)state;
    for (int i = 0; i < n_options; i++) {
        assert_true(strlen(option_table[i].name) < 38);
        for (int k = 0; k < i; k++) {
            assert_string_not_equal(option_table[i].name, option_table[k].name);
            assert_true(!option_table[i].letter || option_table[i].letter != option_table[k].letter);
        }
    }
}

/* Without options the sampler's own defaults hold. */
static void presets_are_the_samplers(void **state)
{
    (void)state;
    struct options o;
    struct error e;
    assert_int_equal(parse(&o, &e, NULL, NULL, NULL), GEN_OK);
    const struct sampler_options *a = &o.sampling, *b = &sampler_defaults;
    assert_true(a->temperature == b->temperature && a->top_p == b->top_p && a->min_p == b->min_p);
    assert_true(a->typical_p == b->typical_p && a->repeat_penalty == b->repeat_penalty);
    assert_true(a->presence_penalty == b->presence_penalty && a->frequency_penalty == b->frequency_penalty);
    assert_int_equal(a->top_k, b->top_k);
    assert_int_equal(a->repeat_last_n, b->repeat_last_n);
    assert_int_equal(o.predict, 512);
    assert_int_equal(o.seed, -1);
    assert_int_equal(o.logprobs, -1);
    options_free(&o);
}

/* Every number is taken at its bounds and refused one step beyond; what is no number is never guessed. */
static void bounds(void **state)
{
    (void)state;
    for (int i = 0; i < n_options; i++) {
        const struct option_row *row = &option_table[i];
        char word[50], value[60];
        bool whole = row->kind == OPT_INT || row->kind == OPT_LONG;
        if (!whole && row->kind != OPT_FLOAT && row->kind != OPT_DOUBLE) continue;
        option_display(row, word);
        const char *bad[] = { "", "abc", "3x", " 3", "3 ", "0x10", "nan", "inf", "-inf", "1e", "--", "9e9999" };
        for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
            strcpy(value, bad[k]);
            assert_int_equal(code(word, value, NULL), GEN_USAGE);
        }
        if (!whole) {
            if (row->lo == 0) assert_int_equal(code(word, "-0.001", NULL), GEN_USAGE);
            if (row->hi == 1) assert_int_equal(code(word, "1.001", NULL), GEN_USAGE);
            if (row->lo > 0) assert_int_equal(code(word, "0", NULL), GEN_USAGE);
            assert_int_equal(code(word, "1", NULL), GEN_OK);
            assert_int_equal(code(word, row->lo <= 0.5 ? ".5" : "1e0", NULL), GEN_OK);
            continue;
        }
        assert_int_equal(code(word, "1.0", NULL), GEN_USAGE);
        assert_int_equal(code(word, "99999999999999999999", NULL), GEN_USAGE);
        for (int step = -1; step <= 1; step++) {
            char *json = strcmp(row->name, "logprobs") == 0 ? "--json" : NULL;
            bool other_rule = row->modes || strcmp(row->name, "page-size") == 0 ||
                              strcmp(row->name, "sinks") == 0 || strcmp(row->name, "kv-budget") == 0;     /* nothing alone */
            snprintf(value, sizeof value, "%.0f", step < 0 ? row->lo - 1 : row->lo);
            if (step < 0) assert_int_equal(code(word, value, json), GEN_USAGE);
            if (step == 0 && (!other_rule || json)) assert_int_equal(code(word, value, json), GEN_OK);
            snprintf(value, sizeof value, "%.0f", row->hi + step);
            if (step == 1 && row->hi < 0x1p53) assert_int_equal(code(word, value, json), GEN_USAGE);
            if (step == 0 && (!other_rule || json)) assert_int_equal(code(word, value, json), GEN_OK);
        }
    }
}

/* A name cut short or with a letter too many is never taken for another. */
static void nothing_is_abbreviated(void **state)
{
    (void)state;
    for (int i = 0; i < n_options; i++) {
        char word[50];
        for (int dashes = 1; dashes <= 2; dashes++) {
            size_t n = strlen(option_table[i].name);
            for (size_t cut = 2; cut < n; cut++) {
                snprintf(word, sizeof word, "%.*s%.*s", dashes, "--", (int)cut, option_table[i].name);
                bool exact = false;
                for (int k = 0; k < n_options; k++) exact |= strcmp(option_table[k].name, word + dashes) == 0;
                if (!exact) assert_int_equal(code(word, "1", NULL), GEN_USAGE);
            }
            snprintf(word, sizeof word, "%.*s%sx", dashes, "--", option_table[i].name);
            assert_int_equal(code(word, "1", NULL), GEN_USAGE);
        }
    }
}

static void forms_of_an_option(void **state)
{
    (void)state;
    struct options o;
    struct error e;
    struct { char *a, *b; int64_t predict; } forms[] = {
        { "-n", "5", 5 }, { "-n5", NULL, 5 }, { "-n-2", NULL, -2 }, { "--predict", "5", 5 }, { "-predict", "5", 5 },
        { "--predict=5", NULL, 5 }, { "-predict=5", NULL, 5 }, { "-n", "-1", -1 },
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        assert_int_equal(parse(&o, &e, forms[i].a, forms[i].b, NULL), GEN_OK);
        assert_int_equal(o.predict, forms[i].predict);
        options_free(&o);
    }
    assert_int_equal(code("--n", "5", NULL), GEN_USAGE);
    assert_int_equal(code("-n=5", NULL, NULL), GEN_USAGE);
    assert_int_equal(code("-q5", NULL, NULL), GEN_USAGE);
    assert_int_equal(code("-ptext", NULL, NULL), GEN_USAGE);
    assert_int_equal(code("--ctk", "f32", NULL), GEN_OK);
    assert_int_equal(code("-ctk", "f32", NULL), GEN_OK);
    assert_int_equal(code("-ctk=f32", NULL, NULL), GEN_OK);
    assert_int_equal(code("-ctk", "f3", NULL), GEN_USAGE);
    assert_int_equal(code("--backend", "auto|cpu", NULL), GEN_USAGE);
}

static void values_that_repeat(void **state)
{
    (void)state;
    struct options o;
    struct error e;
    assert_int_equal(parse(&o, &e, "-l15+1.5", "--logit-bias=7-inf", "-l0-2"), GEN_OK);
    assert_int_equal(o.sampling.n_bias, 3);
    assert_int_equal(o.sampling.bias[0].id, 15);
    assert_true(o.sampling.bias[0].bias == 1.5f && o.sampling.bias[1].bias < -FLT_MAX && o.sampling.bias[2].bias == -2);
    options_free(&o);
    char *bad[] = { "15", "15+", "+1", "a+1", "15+x", "15+inf", "15+nan", "99999999999+1", "3000000000+1", "15*2",
                    "15+1x", "" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) assert_int_equal(code("-l", bad[i], NULL), GEN_USAGE);
    assert_int_equal(parse(&o, &e, "--stop=a", "--stop=b", "--temp=0"), GEN_OK);
    assert_int_equal(o.stops.len, 2);
    assert_string_equal(o.stops.data[1], "b");
    options_free(&o);
    assert_int_equal(code("--stop", "", NULL), GEN_USAGE);
}

/* One option at a time, as a chat command or a batch line gives it. */
static void set_by_name(void **state)
{
    (void)state;
    struct options o;
    struct error e;
    assert_int_equal(parse(&o, &e, NULL, NULL, NULL), GEN_OK);
    assert_true(options_set(&o, "temp", "0.25", &e) && o.sampling.temperature == 0.25f && options_given(&o, "temp"));
    assert_true(options_set(&o, "n", "7", &e) && o.predict == 7);
    assert_true(options_set(&o, "ignore-eos", NULL, &e) && o.ignore_eos);
    const char *bad[][2] = { { "temp", NULL }, { "temp", "x" }, { "tem", "1" }, { "", "1" }, { "help", NULL },
                             { "perplexity", "f" }, { "ignore-eos", "1" }, { "--temp", "1" } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        e = (struct error){ 0 };
        assert_false(options_set(&o, bad[i][0], bad[i][1], &e));
        assert_true(e.code == GEN_USAGE && e.text[0]);
    }
    assert_true(o.sampling.temperature == 0.25f);
    options_free(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_unique), cmocka_unit_test(presets_are_the_samplers), cmocka_unit_test(bounds),
        cmocka_unit_test(nothing_is_abbreviated), cmocka_unit_test(forms_of_an_option),
        cmocka_unit_test(values_that_repeat), cmocka_unit_test(set_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
