/* test_json.c - json_read when memory runs out: the linker wraps malloc, and each allocation fails in its turn. */
#include "json.h"

#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static __thread long left = -1;          /* this thread's allocations until the one that fails; below 0: none does */

void *__real_malloc(size_t n);
void *__wrap_malloc(size_t n) { return left > 0 && --left == 0 ? NULL : __real_malloc(n); }

/* The value of a text whose n-th allocation fails; *reached: there were as many. */
static json_t *read_failing(const struct bytes *text, long n, bool *reached, struct error *e)
{
    *e = (struct error){ 0 };
    left = n;
    json_t *value = json_read(text->data, text->len, "it is", e);
    *reached = left == 0;
    left = -1;
    return value;
}

/* Whether each failure is told as one, and the text then reads as before (or is refused as before). */
static bool survives(const struct bytes *text, long least)
{
    bool reached, ok;
    struct error e, plain = { 0 };
    json_t *whole = json_read(text->data, text->len, "it is", &plain);
    long n = 0;
    do {
        json_t *value = read_failing(text, ++n, &reached, &e);
        if (reached) ok = !value && e.code == GEN_RUN && strstr(e.text, "cannot allocate memory");
        else ok = whole ? json_equal(value, whole) : !value && e.code == plain.code && strcmp(e.text, plain.text) == 0;
        json_decref(value);
    } while (ok && reached);
    json_decref(whole);
    return ok && n > least;
}

static struct bytes text_of(const char *start, const char *unit, int n, const char *end)
{
    struct bytes b = { 0 };
    bool ok = bytes_add(&b, start, strlen(start));
    for (int i = 0; i < n; i++) ok = ok && bytes_add(&b, unit, strlen(unit));
    assert_true(ok && bytes_add(&b, end, strlen(end)));
    return b;
}

static void test_an_allocation_fails(void **state)
{
    (void)state;
    static const struct { const char *start, *unit; int n; const char *end; long least; } texts[] = {
        { "{\"prompt\":\"", "z", 90000, "\"}", 15 },
        { "[\"", "\\u20ac\\n\\\"", 3000, "\"]", 10 },
        { "{\"", "k", 5000, "\": [true, null, 2.5e3, -7]}", 10 },
        { "[", "1234567890123, -1.25e-3, ", 200, "0]", 400 },
        { "[1", "2", 200, "e-199]", 5 },
        { "", "[{\"a\": ", 30, "1}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]}]", 100 },
        { "{", "\"name\": [\"text\", {}, []], ", 1, "\"b\": {\"c\": \"d\", \"c\": 1}}", 20 },      /* no JSON: */
        { "[\"", "z", 9000, "", 5 },
        { "[", "\"z\", ", 90, "\"\\x\"]", 100 },
        { "[", "9", 30, "]", 3 },
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct bytes b = text_of(texts[i].start, texts[i].unit, texts[i].n, texts[i].end);
        if (!survives(&b, texts[i].least)) fail_msg("text %zu", i);
        bytes_free(&b);
    }
}

static void test_outside_of_a_read(void **state)
{
    (void)state;
    bool reached;
    struct error e = { 0 };
    struct bytes text = text_of("[", "{\"a\": \"b\"}, ", 20, "0]"), out = { 0 };
    json_t *value = json_read(text.data, text.len, "it is", &e), *member = json_incref(json_array_get(value, 7));
    assert_null(read_failing(&text, 9, &reached, &e));
    left = 1;
    assert_null(json_object());
    left = 1;
    assert_null(json_stringn("text", 4));
    left = -1;
    json_decref(value);
    assert_true(json_add(&out, member, &e));
    assert_string_equal(out.data, "{\"a\":\"b\"}");
    json_decref(member);
    bytes_free(&out);
    bytes_free(&text);
}

static void *survive(void *text) { return survives(text, 100) ? text : NULL; }

static void test_two_threads(void **state)
{
    (void)state;
    struct bytes text = text_of("[", "{\"a\": [\"b\", 1]}, ", 60, "0]");
    pthread_t other;
    void *ended;
    assert_int_equal(pthread_create(&other, NULL, survive, &text), 0);
    bool ok = survives(&text, 100);
    assert_int_equal(pthread_join(other, &ended), 0);
    assert_true(ok && ended);
    bytes_free(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_allocation_fails), cmocka_unit_test(test_outside_of_a_read),
        cmocka_unit_test(test_two_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
