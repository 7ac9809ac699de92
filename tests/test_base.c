/* test_base.c - errors, allocation, growable arrays, SHA-256. */
#include "base.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#undef fail                               /* cmocka has a macro of this name */

static void test_fail_is_printable(void **state)
{
    (void)state;
    struct error e = { 0 };
    assert_false(fail(&e, GEN_MODEL, "%s: bad key '%s'", "m.gguf", "a\n\x1b[31m\x7f\xc2\x9b"));
    assert_int_equal(e.code, GEN_MODEL);
    assert_string_equal(e.text, "m.gguf: bad key 'a?\?[31m?\?\?'");
    fail(&e, GEN_RUN, "h\xc3\xa9 \xf0\x9f\x91\x8d stay, \xff \xc3 \xf0\x9f\x91 do not");
    assert_string_equal(e.text, "h\xc3\xa9 \xf0\x9f\x91\x8d stay, ? ? ??? do not");
    fail(&e, GEN_USAGE, "again: %s", e.text);     /* its own text as an argument */
    assert_string_equal(e.text, "again: h\xc3\xa9 \xf0\x9f\x91\x8d stay, ? ? ??? do not");
    assert_int_equal(e.code, GEN_USAGE);
}

static void test_fail_cuts_long_texts(void **state)
{
    (void)state;
    struct error e = { 0 };
    char text[1200];
    for (size_t n = 0; n < sizeof text; n++) {    /* ends inside a character for two of three lengths */
        for (size_t i = 0; i < n; i++) text[i] = "\xe2\x82\xac"[i % 3];
        text[n] = '\0';
        memset(&e, 'x', sizeof e);
        fail(&e, GEN_RUN, "%s", text);
        size_t length = strnlen(e.text, sizeof e.text);
        assert_true(length < sizeof e.text);
        if (n < sizeof e.text) assert_int_equal(length, n);
        else assert_string_equal(e.text + length - 3, "...");
    }
}

static void test_alloc(void **state)
{
    (void)state;
    struct error e = { 0 };
    for (size_t n = 0; n < 200; n += 7) {
        uint8_t *p = alloc_zeroed(n, 3, "a test", &e);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t i = 0; i < 3 * n; i++) assert_int_equal(p[i], 0);
        memset(p, 0xAA, 3 * n);
        free(p);
    }
    size_t impossible[][2] = { { SIZE_MAX, 1 }, { SIZE_MAX - 62, 1 }, { SIZE_MAX, SIZE_MAX }, { SIZE_MAX / 2 + 1, 2 },
                               { (size_t)1 << 32, (size_t)1 << 32 } };
    for (size_t i = 0; i < sizeof impossible / sizeof *impossible; i++) {
        e = (struct error){ 0 };
        assert_null(alloc_zeroed(impossible[i][0], impossible[i][1], "a test", &e));
        assert_int_equal(e.code, GEN_RUN);
        assert_non_null(strstr(e.text, "for a test"));
    }
    size_t x;
    assert_true(size_mul(SIZE_MAX / 3, 3, &x) && x == SIZE_MAX / 3 * 3);
    assert_false(size_mul(SIZE_MAX / 2, 3, &x) || size_add(SIZE_MAX, 1, &x));
}

static void test_bytes(void **state)
{
    (void)state;
    struct bytes b = { 0 };
    assert_true(bytes_add(&b, NULL, 0));
    assert_string_equal(b.data, "");
    for (int i = 0; i < 1000; i++) {
        assert_true(i % 2 ? bytes_printf(&b, "%d,", i) : bytes_add(&b, "\0x", 2));
        assert_int_equal(b.data[b.len], 0);
    }
    assert_int_equal(b.len, 500 * 2 + 5 * 2 + 45 * 3 + 450 * 4);
    assert_memory_equal(b.data, "\0x1,\0x3,", 8);
    assert_memory_equal(b.data + b.len - 4, "999,", 4);
    assert_false(bytes_add(&b, "", SIZE_MAX));    /* would wrap */
    assert_int_equal(b.len, 500 * 2 + 5 * 2 + 45 * 3 + 450 * 4);
    bytes_free(&b);
    assert_true(!b.data && !b.len && !b.cap);
}

static void test_ids(void **state)
{
    (void)state;
    struct ids v = { 0 };
    for (int32_t i = 0; i < 5000; i++) assert_true(ids_add(&v, i * 7 - 100));
    assert_int_equal(v.len, 5000);
    for (int32_t i = 0; i < 5000; i++) assert_int_equal(v.data[i], i * 7 - 100);
    ids_free(&v);
    assert_true(!v.data && !v.len && !v.cap);
}

/* The example values of FIPS 180-4. */
static void test_sha256(void **state)
{
    (void)state;
    char hex[65], *million = malloc(1000000);
    assert_non_null(million);
    memset(million, 'a', 1000000);
    sha256_hex("abc", 3, hex);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    sha256_hex("", 0, hex);
    assert_string_equal(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    sha256_hex(million, 1000000, hex);
    assert_string_equal(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    free(million);
}

static void test_clock(void **state)
{
    (void)state;
    double before = now_seconds();
    for (int i = 0; i < 1000; i++) {
        double now = now_seconds();
        assert_true(now >= before);
        before = now;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fail_is_printable), cmocka_unit_test(test_fail_cuts_long_texts),
        cmocka_unit_test(test_alloc), cmocka_unit_test(test_bytes), cmocka_unit_test(test_ids),
        cmocka_unit_test(test_sha256), cmocka_unit_test(test_clock),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
