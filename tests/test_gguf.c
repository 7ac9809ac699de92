/* test_gguf.c - the GGUF reader on files made here: what is right is read exactly, what is wrong is refused with a
 * sentence, and no damage to a file makes more of it than an error. */
#define _GNU_SOURCE
#include "gguf_walk.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

/* ---- making files ----------------------------------------------------------------------------------------------- */

static void put(struct bytes *b, const void *data, size_t n) { assert_true(bytes_add(b, data, n)); }
static void put_u32(struct bytes *b, uint32_t x) { put(b, &x, 4); }
static void put_u64(struct bytes *b, uint64_t x) { put(b, &x, 8); }

static void put_str(struct bytes *b, const char *text)
{
    put_u64(b, strlen(text));
    put(b, text, strlen(text));
}

static void put_header(struct bytes *b, uint32_t version, uint64_t tensors, uint64_t values)
{
    put(b, "GGUF", 4);
    put_u32(b, version);
    put_u64(b, tensors);
    put_u64(b, values);
}

static void put_value(struct bytes *b, const char *key, enum gguf_type type, const void *data, size_t n)
{
    put_str(b, key);
    put_u32(b, type);
    put(b, data, n);
}

static void put_value_u32(struct bytes *b, const char *key, uint32_t x) { put_value(b, key, GGUF_U32, &x, 4); }

static void put_value_str(struct bytes *b, const char *key, const char *text)
{
    put_value(b, key, GGUF_STRING, NULL, 0);
    put_str(b, text);
}

static void put_tensor(struct bytes *b, const char *name, int n_dims, const uint64_t *ne, uint32_t type,
                       uint64_t offset)
{
    put_str(b, name);
    put_u32(b, (uint32_t)n_dims);
    for (int i = 0; i < n_dims; i++) put_u64(b, ne[i]);
    put_u32(b, type);
    put_u64(b, offset);
}

static void pad(struct bytes *b, size_t alignment)
{
    while (b->len % alignment) put(b, "", 1);
}

/* n bytes of data that differ from place to place and are no infinities or NaNs as halves or floats. */
static void put_data(struct bytes *b, size_t n)
{
    for (size_t i = 0; i < n; i++) put(b, &(uint8_t){ (uint8_t)(i * 37 + i / 64) & 0x3F }, 1);
}

/* A file with a value of every type, an array of every type, and tensors of 1 to 4 dimensions. */
static struct bytes good_file(uint32_t version)
{
    struct bytes b = { 0 };
    put_header(&b, version, 4, 26);
    put_value_str(&b, "general.architecture", "llama");
    put_value_u32(&b, "general.alignment", 64);
    put_value(&b, "u8", GGUF_U8, &(uint8_t){ 200 }, 1);
    put_value(&b, "i8", GGUF_I8, &(int8_t){ -3 }, 1);
    put_value(&b, "u16", GGUF_U16, &(uint16_t){ 50000 }, 2);
    put_value(&b, "i16", GGUF_I16, &(int16_t){ -1234 }, 2);
    put_value(&b, "u32", GGUF_U32, &(uint32_t){ 4000000000 }, 4);
    put_value(&b, "i32", GGUF_I32, &(int32_t){ 77 }, 4);
    put_value(&b, "f32", GGUF_F32, &(float){ 0.25f }, 4);
    put_value(&b, "yes", GGUF_BOOL, &(uint8_t){ 1 }, 1);
    put_value(&b, "no", GGUF_BOOL, &(uint8_t){ 0 }, 1);
    put_value(&b, "u64", GGUF_U64, &(uint64_t){ UINT64_MAX }, 8);
    put_value(&b, "i64", GGUF_I64, &(int64_t){ INT64_MIN }, 8);
    put_value(&b, "f64", GGUF_F64, &(double){ 1e-300 }, 8);
    put_value(&b, "nan", GGUF_F32, &(float){ NAN }, 4);
    put_value(&b, "inf", GGUF_F64, &(double){ -INFINITY }, 8);
    put_value_str(&b, "empty", "");
    for (uint32_t type = 0; type <= GGUF_F64; type++) {
        static const size_t width[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
        char key[] = { 'a', (char)('A' + type), '\0' };
        if (type == GGUF_ARRAY || type == GGUF_I8 || type == GGUF_U16 || type == GGUF_BOOL) continue;
        put_value(&b, key, GGUF_ARRAY, &type, 4);
        put_u64(&b, 3);
        if (type == GGUF_STRING) put_str(&b, "one"), put_str(&b, ""), put_str(&b, "three");
        else put_data(&b, 3 * width[type]);
    }
    put_tensor(&b, "a", 1, (uint64_t[]){ 10 }, T_F32, 0);
    put_tensor(&b, "b.weight", 2, (uint64_t[]){ 64, 3 }, T_Q8_0, 64);
    put_tensor(&b, "c", 3, (uint64_t[]){ 256, 2, 2 }, T_Q6_K, 320);
    put_tensor(&b, "d", 4, (uint64_t[]){ 2, 3, 1, 5 }, T_F16, 320 + 896);
    pad(&b, 64);
    put_data(&b, 320 + 896 + 60);
    return b;
}

/* ---- opening them ----------------------------------------------------------------------------------------------- */

static int memory_file;                   /* stands in for a file on the disk */
static char memory_path[64];

static void fill(const void *data, size_t n)
{
    assert_int_equal(ftruncate(memory_file, 0), 0);
    assert_int_equal(pwrite(memory_file, data, n, 0), n);
}

static struct gguf *open_good(const char *path, bool use_map)
{
    struct gguf *g;
    struct error e = { 0 };
    if (!gguf_open(&g, path, use_map, &e)) fail_msg("%s", e.text);
    return g;
}

/* The error of a file that must be refused; it holds `says`. Frees b. */
static void refused(struct bytes *b, const char *says)
{
    struct gguf *g;
    struct error e = { 0 };
    fill(b->data, b->len);
    bytes_free(b);
    assert_false(gguf_open(&g, memory_path, true, &e));
    assert_null(g);
    assert_int_equal(e.code, GEN_MODEL);
    if (!strstr(e.text, says) || !strstr(e.text, memory_path)) fail_msg("'%s' is not in '%s'", says, e.text);
}

static int set_up(void **state)
{
    (void)state;
    memory_file = memfd_create("gguf", 0);
    snprintf(memory_path, sizeof memory_path, "/proc/self/fd/%d", memory_file);
    return memory_file < 0;
}

static int tear_down(void **state)
{
    (void)state;
    return close(memory_file);
}

/* ---- tests ------------------------------------------------------------------------------------------------------ */

static uint64_t u64_of(const struct gguf *g, const char *key)
{
    uint64_t x = 12345;
    struct error e = { 0 };
    if (!gguf_get_u64(g, key, &x, &e)) fail_msg("%s", e.text);
    return x;
}

static double f64_of(const struct gguf *g, const char *key)
{
    double x = 12345;
    struct error e = { 0 };
    if (!gguf_get_f64(g, key, &x, &e)) fail_msg("%s", e.text);
    return x;
}

static void test_values(void **state)
{
    (void)state;
    struct bytes b = good_file(3);
    fill(b.data, b.len);
    struct gguf *g = open_good(memory_path, true);
    assert_int_equal(gguf_version(g), 3);
    assert_int_equal(gguf_file_bytes(g), b.len);
    assert_string_equal(gguf_path(g), memory_path);
    assert_true(u64_of(g, "u8") == 200 && u64_of(g, "u16") == 50000 && u64_of(g, "u32") == 4000000000);
    assert_true(u64_of(g, "i32") == 77 && u64_of(g, "u64") == UINT64_MAX && u64_of(g, "absent") == 12345);
    assert_true(f64_of(g, "i8") == -3 && f64_of(g, "i16") == -1234 && f64_of(g, "i64") == -0x1p63);
    assert_true(f64_of(g, "u64") == 0x1p64 && f64_of(g, "f32") == 0.25 && f64_of(g, "f64") == 1e-300);
    assert_true(f64_of(g, "absent") == 12345);
    struct error e = { 0 };
    bool yes = false, no = true;
    struct gguf_str s = { "?", 1 };
    assert_true(gguf_get_bool(g, "yes", &yes, &e) && yes && gguf_get_bool(g, "no", &no, &e) && !no);
    assert_true(gguf_get_bool(g, "absent", &yes, &e) && yes && gguf_get_str(g, "absent", &s, &e) && s.len == 1);
    assert_true(gguf_get_str(g, "general.architecture", &s, &e) && s.len == 5 && memcmp(s.ptr, "llama", 5) == 0);
    assert_true(gguf_get_str(g, "empty", &s, &e) && s.len == 0);
    const struct gguf_value *v = gguf_find(g, "aI");
    assert_true(v && v->type == GGUF_ARRAY && v->item == GGUF_STRING && v->count == 3 && v->size == 3 * 8 + 8);
    const uint8_t *at = v->data;
    assert_memory_equal(gguf_next_str(&at).ptr, "one", 3);
    assert_int_equal(gguf_next_str(&at).len, 0);
    s = gguf_next_str(&at);
    assert_true(s.len == 5 && memcmp(s.ptr, "three", 5) == 0 && at == v->data + v->size);
    v = gguf_find(g, "aM");
    assert_true(v && v->item == GGUF_F64 && v->count == 3 && v->size == 24);
    assert_true(gguf_value_at(g, 0)->key.len == strlen("general.architecture") && gguf_value_at(g, 25) == v);
    assert_null(gguf_value_at(g, 26));
    assert_true(!gguf_find(g, "") && !gguf_find(g, "u") && !gguf_find(g, "u88"));
    gguf_close(g);
    bytes_free(&b);
}

static void test_wrong_types(void **state)
{
    (void)state;
    struct bytes b = good_file(3);
    fill(b.data, b.len);
    bytes_free(&b);
    struct gguf *g = open_good(memory_path, false);
    struct error e;
    uint64_t u = 7;
    double d = 7;
    bool flag = true;
    struct gguf_str s = { "?", 1 };
    static const char *const not_u64[][2] = {
        { "i8", "must not be negative, but it is -3" }, { "i64", "-9223372036854775808" },
        { "f32", "an integer, but it has the type f32" }, { "yes", "the type bool" }, { "empty", "the type string" },
        { "aA", "an array of u8" } };
    for (size_t i = 0; i < sizeof not_u64 / sizeof *not_u64; i++) {
        memset(&e, 0, sizeof e);
        assert_false(gguf_get_u64(g, not_u64[i][0], &u, &e));
        assert_non_null(strstr(e.text, not_u64[i][1]));
        assert_non_null(strstr(e.text, not_u64[i][0]));
        assert_int_equal(e.code, GEN_MODEL);
    }
    assert_true(!gguf_get_f64(g, "nan", &d, &e) && strstr(e.text, "finite"));
    assert_true(!gguf_get_f64(g, "inf", &d, &e) && strstr(e.text, "finite"));
    assert_true(!gguf_get_f64(g, "yes", &d, &e) && !gguf_get_f64(g, "empty", &d, &e) && !gguf_get_f64(g, "aG", &d, &e));
    assert_true(!gguf_get_bool(g, "u8", &flag, &e) && !gguf_get_str(g, "u8", &s, &e) && !gguf_get_str(g, "aI", &s, &e));
    assert_true(u == 7 && d == 7 && flag && s.len == 1);
    gguf_close(g);
}

static void check_tensor(const struct gguf *g, const char *name, enum tensor_type type, int n_dims, const uint64_t *ne,
                         size_t offset, size_t size, const char *file)
{
    const struct gguf_tensor *t = gguf_tensor(g, name);
    struct error e = { 0 };
    uint8_t copy[1024] = { 0 };
    assert_non_null(t);
    assert_true(t->type == type && t->n_dims == n_dims && t->offset == offset && t->size == size && t->file == 0);
    assert_memory_equal(t->ne, ne, 4 * sizeof *ne);
    assert_true(gguf_read(g, t, 0, copy, size, &e));
    assert_memory_equal(copy, file + offset, size);
    memset(copy, 0, sizeof copy);
    assert_true(gguf_read(g, t, size / 3, copy, size - size / 3, &e));
    assert_memory_equal(copy, file + offset + size / 3, size - size / 3);
    assert_false(gguf_read(g, t, 1, copy, size, &e));
    assert_false(gguf_read(g, t, size + 1, copy, 0, &e));
    assert_false(gguf_read(g, t, SIZE_MAX, copy, 2, &e));
    assert_true(gguf_read(g, t, size, copy, 0, &e));
    if (gguf_data(g, t)) {
        assert_memory_equal(gguf_data(g, t), file + offset, size);
        gguf_forget(g, t);
        assert_memory_equal(gguf_data(g, t), file + offset, size);
    }
}

static void test_tensors(void **state)
{
    (void)state;
    for (int variant = 0; variant < 4; variant++) {    /* versions 2 and 3, mapped and not */
        struct bytes b = good_file(2 + variant % 2);
        fill(b.data, b.len);
        struct gguf *g = open_good(memory_path, variant / 2);
        size_t data = b.len - 60 - 896 - 320;
        assert_int_equal(data % 64, 0);
        assert_int_equal(gguf_tensor_count(g), 4);
        check_tensor(g, "a", T_F32, 1, (uint64_t[]){ 10, 1, 1, 1 }, data, 40, b.data);
        check_tensor(g, "b.weight", T_Q8_0, 2, (uint64_t[]){ 64, 3, 1, 1 }, data + 64, 204, b.data);
        check_tensor(g, "c", T_Q6_K, 3, (uint64_t[]){ 256, 2, 2, 1 }, data + 320, 840, b.data);
        check_tensor(g, "d", T_F16, 4, (uint64_t[]){ 2, 3, 1, 5 }, data + 320 + 896, 60, b.data);
        for (size_t i = 0; i < 4; i++) assert_true(!gguf_data(g, gguf_tensor_at(g, i)) == !(variant / 2));
        assert_true(!gguf_tensor_at(g, 4) && !gguf_tensor(g, "e") && !gguf_tensor(g, ""));
        walk(g);
        gguf_close(g);
        bytes_free(&b);
    }
}

/* The data of the last tensor ends the file: whatever is cut off, something is missing. */
static void test_every_prefix(void **state)
{
    (void)state;
    struct bytes b = good_file(3);
    for (size_t n = 0; n < b.len; n++) {
        struct bytes cut = { 0 };
        put(&cut, b.data, n);
        size_t data = b.len - 60 - 896 - 320;
        refused(&cut, n == 0 ? "is empty" : n >= data ? "is incomplete: it has" : "is incomplete");
    }
    put(&b, "more", 4);                   /* bytes behind the data are nobody's business */
    fill(b.data, b.len);
    gguf_close(open_good(memory_path, true));
    bytes_free(&b);
}

static uint64_t random_state;
static uint64_t draw(void)                /* xorshift64* (Vigna 2016) */
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545F4914F6CDD1D;
}

/* Opens a damaged file and, if it is accepted, reads all of it. */
static bool survives(const struct bytes *b)
{
    struct gguf *g;
    struct error e = { 0 };
    fill(b->data, b->len);
    bool good = gguf_open(&g, memory_path, true, &e);
    if (good) walk(g);
    else assert_true(e.code && *e.text && strlen(e.text) < sizeof e.text);
    assert_true(good == (g != NULL));
    gguf_close(g);
    return good;
}

/* Every byte of the head takes four other values, then 10,000 random damages of one to four places. */
static void test_damage(void **state)
{
    (void)state;
    struct bytes good = good_file(3), b = { 0 };
    size_t accepted = 0, tried = 0;
    size_t head = good.len - 60 - 896 - 320;
    for (size_t i = 0; i < head; i++)
        for (int k = 0; k < 4; k++, tried++) {
            uint8_t old = (uint8_t)good.data[i], values[] = { old ^ 1, old ^ 0x80, 0xFF, (uint8_t)(old + 8) };
            good.data[i] = (char)values[k];
            accepted += survives(&good);
            good.data[i] = (char)old;
        }
    random_state = 88172645463325252;
    for (int run = 0; run < 10000; run++, tried++) {
        b.len = 0;
        put(&b, good.data, good.len);
        for (uint64_t n = 1 + draw() % 4; n > 0; n--) {
            uint64_t edges[] = { 0, UINT64_MAX, 1ull << 63, 1ull << 61, 1ull << 32, b.len, draw() % 64, draw() };
            uint64_t value = edges[draw() % 8], width = 1ull << draw() % 4, at = draw() % (head - 8);
            memcpy(b.data + at, &value, width);
        }
        accepted += survives(&b);
    }
    assert_true(accepted > tried / 100 && accepted < tried);    /* both ways were taken */
    bytes_free(&b);
    bytes_free(&good);
}

static void test_refused_headers(void **state)
{
    (void)state;
    static const struct { const char *start, *says; } files[] = {
        { "<!DOCTYPE html><html>", "web page" }, { "{\"error\": 1}", "JSON" }, { "lmgg0123", "old GGML" },
        { "version https://git-lfs.github.com/spec/v1", "git lfs pull" }, { "PK\3\4xxxx", "zip" },
        { "GGUX\3", "does not begin with" }, { "G", "incomplete" }, { "GGU", "incomplete" }, { "x", "not a GGUF" } };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        struct bytes b = { 0 };
        put(&b, files[i].start, strlen(files[i].start));
        refused(&b, files[i].says);
    }
    static const struct { uint32_t version; const char *says; } versions[] = {
        { 0, "version 0;" }, { 1, "version 1;" }, { 4, "version 4;" }, { UINT32_MAX, "version 4294967295" },
        { 3u << 24, "big-endian" }, { 2u << 24, "big-endian" } };
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        struct bytes b = { 0 };
        put_header(&b, versions[i].version, 0, 0);
        refused(&b, versions[i].says);
    }
    uint64_t counts[] = { (1 << 20) + 1, 1ull << 32, 1ull << 61, 1ull << 63, UINT64_MAX };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        struct bytes b = { 0 };
        put_header(&b, 3, counts[i], 0);
        refused(&b, "tensors; at most");
        put_header(&b, 3, 0, counts[i]);
        refused(&b, "metadata values; at most");
    }
    struct bytes b = { 0 };
    put_header(&b, 3, 0, 0);              /* nothing in it, but a GGUF file */
    fill(b.data, b.len);
    bytes_free(&b);
    gguf_close(open_good(memory_path, true));
}

static void test_refused_values(void **state)
{
    (void)state;
    struct bytes b = { 0 };
    uint64_t lengths[] = { 2, 1ull << 31, 1ull << 63, UINT64_MAX - 32, UINT64_MAX };
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        put_header(&b, 3, 0, 1);          /* the length of the key */
        put_u64(&b, lengths[i]);
        put(&b, "x", 1);
        refused(&b, "inside metadata value 1 of 1");
        put_header(&b, 3, 0, 2);          /* of a string */
        put_value_str(&b, "general.architecture", "llama");
        put_value(&b, "name", GGUF_STRING, &lengths[i], 8);
        put(&b, "x", 1);
        refused(&b, "inside metadata value 2 of 2");
        for (uint32_t type = 0; type <= GGUF_F64; type++) {    /* of an array */
            put_header(&b, 3, 0, 1);
            put_value(&b, "list", GGUF_ARRAY, &type, 4);
            put_u64(&b, lengths[i]);
            refused(&b, type == GGUF_ARRAY ? "array of arrays" : "inside metadata value 1 of 1");
        }
    }
    for (uint32_t type = GGUF_F64 + 1; type; type <<= 1) {
        put_header(&b, 3, 0, 1);
        put_value(&b, "odd", type, "12345678", 8);
        refused(&b, "'odd' has the unknown type");
        put_header(&b, 3, 0, 1);
        put_value(&b, "odd", GGUF_ARRAY, &type, 4);
        put_u64(&b, 0);
        refused(&b, "'odd' has the unknown type");
    }
    put_header(&b, 3, 0, 1);
    put_value_u32(&b, "", 1);
    refused(&b, "the name of metadata value 1 of 1 has 0 bytes");
    char *long_key = calloc(65537, 1);
    memset(long_key, 'k', 65536);
    put_header(&b, 3, 0, 1);
    put_value_u32(&b, long_key, 1);
    refused(&b, "has 65536 bytes");
    put_header(&b, 3, 0, 1);
    put_value_u32(&b, long_key + 1, 1);
    fill(b.data, b.len);
    bytes_free(&b);
    struct gguf *g = open_good(memory_path, true);
    assert_non_null(gguf_find(g, long_key + 1));
    gguf_close(g);
    free(long_key);
    put_header(&b, 3, 0, 3);
    put_value_u32(&b, "twice", 1);
    put_value_u32(&b, "once", 1);
    put_value_str(&b, "twice", "x");
    refused(&b, "the key 'twice' appears twice");
    put_header(&b, 3, 0, 1);
    put_value(&b, "bad\n\x1b[2Jkey", (enum gguf_type)99, "", 0);
    refused(&b, "'bad??[2Jkey' has the unknown type 99");
}

/* A file with one tensor and n bytes of data. */
static struct bytes one_tensor(int n_dims, const uint64_t *ne, uint32_t type, uint64_t offset, size_t n)
{
    struct bytes b = { 0 };
    put_header(&b, 3, 1, 0);
    put_tensor(&b, "w", n_dims, ne, type, offset);
    pad(&b, 32);
    put_data(&b, n);
    return b;
}

static void test_refused_tensors(void **state)
{
    (void)state;
    static const struct { uint64_t ne[4]; int n_dims; uint32_t type; uint64_t offset; const char *says; } tensors[] = {
        { { 4 }, 0, T_F32, 0, "'w' has 0 dimensions" },
        { { 4 }, 1, T_F32, 16, "offset 16 is no multiple of the alignment 32" },
        { { 0, 4 }, 2, T_F32, 0, "'w': dimension 1 is 0" },
        { { 4, 0 }, 2, T_F32, 0, "'w': dimension 2 is 0" },
        { { 0, 1ull << 63, 1ull << 63 }, 3, T_F32, 0, "dimension 1 is 0" },
        { { 1ull << 32, (1ull << 32) + 1 }, 2, T_F32, 0, "too large" },
        { { 1ull << 32, 1ull << 32 }, 2, T_F32, 0, "too large" },
        { { 1ull << 16, 1ull << 16, 1ull << 16, 1ull << 16 }, 4, T_F32, 0, "too large" },
        { { 1ull << 62 }, 1, T_F32, 0, "too large" },
        { { 1ull << 63, 2 }, 2, T_F32, 0, "too large" },
        { { 1ull << 63 }, 1, T_F16, 0, "too large" },
        { { (1ull << 63) - 32 }, 1, T_Q8_0, 0, "far outside" },
        { { 1ull << 61 }, 1, T_F32, 0, "far outside" },
        { { 33, 4 }, 2, T_Q8_0, 0, "rows of 33 weights are no whole number of Q8_0 blocks of 32" },
        { { 16, 4 }, 2, T_Q4_0, 0, "no whole number of Q4_0 blocks" },
        { { 128, 2 }, 2, T_Q6_K, 0, "no whole number of Q6_K blocks of 256" },
        { { 32 }, 1, 16, 0, "the type 16 (IQ2_XXS)" },
        { { 32 }, 1, 4, 0, "the type 4 (Q4_2)" },
        { { 32 }, 1, 999, 0, "the type 999 (unknown)" },
        { { 32 }, 1, UINT32_MAX, 0, "the type 4294967295 (unknown)" },
        { { 32 }, 1, T_F32, 1ull << 40, "incomplete: it has" },
        { { 32 }, 1, T_F32, UINT64_MAX - 31, "far outside" },
        { { 32 }, 1, T_F32, (1ull << 63) - 64, "far outside" },
        { { 33 }, 1, T_F32, 0, "of" },
        { { 32 }, 1, T_F32, 32, "incomplete" },
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        struct bytes b = one_tensor(tensors[i].n_dims, tensors[i].ne, tensors[i].type, tensors[i].offset, 128);
        refused(&b, tensors[i].says);
    }
    uint32_t dims[] = { 5, 9, 1000000, UINT32_MAX };
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        struct bytes b = { 0 };
        put_header(&b, 3, 1, 0);
        put_str(&b, "w");
        put_u32(&b, dims[i]);
        put_data(&b, 100);
        refused(&b, "dimensions; it must have 1 to 4");
    }
    struct bytes b = one_tensor(1, (uint64_t[]){ 32 }, T_F32, 0, 127);
    char says[80];
    snprintf(says, sizeof says, "incomplete: it has %zu of %zu bytes", b.len, b.len + 1);
    refused(&b, says);
}

static struct bytes two_tensors(const char *name1, uint64_t offset1, const char *name2, uint64_t offset2)
{
    struct bytes b = { 0 };
    put_header(&b, 3, 2, 0);
    put_tensor(&b, name1, 1, (uint64_t[]){ 16 }, T_F32, offset1);
    put_tensor(&b, name2, 1, (uint64_t[]){ 16 }, T_F32, offset2);
    pad(&b, 32);
    put_data(&b, 256);
    return b;
}

static void test_overlap_and_names(void **state)
{
    (void)state;
    struct bytes b = two_tensors("a", 0, "b", 32);
    refused(&b, "'a' and 'b' overlap");
    b = two_tensors("a", 96, "b", 64);
    refused(&b, "'b' and 'a' overlap");
    b = two_tensors("a", 64, "b", 64);
    refused(&b, "overlap");
    b = two_tensors("same", 0, "same", 64);
    refused(&b, "the tensor 'same' appears twice");
    b = two_tensors("", 0, "b", 64);
    refused(&b, "the name of tensor entry 1 of 2");
    b = two_tensors("a", 128, "b", 0);    /* any order and gaps are fine */
    fill(b.data, b.len);
    bytes_free(&b);
    gguf_close(open_good(memory_path, true));
}

static void test_alignment(void **state)
{
    (void)state;
    for (uint64_t a = 0; a <= 1ull << 33; a = a < 40 ? a + 1 : a * 2) {
        bool valid = a >= 8 && a <= 1 << 24 && (a & (a - 1)) == 0;
        struct bytes b = { 0 };
        put_header(&b, 3, 1, 1);
        put_value(&b, "general.alignment", GGUF_U64, &a, 8);
        put_tensor(&b, "w", 1, (uint64_t[]){ 4 }, T_F32, valid ? a : 0);
        if (!valid) {
            put_data(&b, 64);
            refused(&b, "'general.alignment' is");
            continue;
        }
        fill(b.data, b.len);
        uint64_t start = (b.len + a - 1) / a * a + a;
        bytes_free(&b);
        assert_int_equal(pwrite(memory_file, "0123456789ABCDEF", 16, (off_t)start), 16);
        struct gguf *g = open_good(memory_path, true);
        assert_int_equal(gguf_tensor_at(g, 0)->offset, start);
        assert_memory_equal(gguf_data(g, gguf_tensor_at(g, 0)), "0123456789ABCDEF", 16);
        gguf_close(g);
    }
    struct bytes b = { 0 };
    put_header(&b, 3, 0, 1);
    put_value_str(&b, "general.alignment", "32");
    refused(&b, "'general.alignment' must be an integer");
    put_header(&b, 3, 0, 1);
    put_value(&b, "general.alignment", GGUF_I32, &(int32_t){ -32 }, 4);
    refused(&b, "'general.alignment' must not be negative");
}

/* One value longer than the steps in which the head is read, and what follows it. */
static void test_long_value(void **state)
{
    (void)state;
    struct bytes b = { 0 };
    uint64_t n = (3 << 20) + 5;
    put_header(&b, 3, 0, 2);
    put_value(&b, "long", GGUF_ARRAY, &(uint32_t){ GGUF_U8 }, 4);
    put_u64(&b, n);
    size_t start = b.len;
    put_data(&b, n);
    put_value_u32(&b, "after", 7);
    fill(b.data, b.len);
    struct gguf *g = open_good(memory_path, false);
    assert_int_equal(gguf_find(g, "long")->size, n);
    assert_memory_equal(gguf_find(g, "long")->data, b.data + start, n);
    assert_int_equal(u64_of(g, "after"), 7);
    gguf_close(g);
    bytes_free(&b);
}

/* Huge numbers that a sparse file does back with bytes: refused, or opened, in bounded time and memory. */
static void test_huge_files(void **state)
{
    (void)state;
    struct rusage usage;
    struct bytes b = { 0 };
    clock_t start = clock();
    uint64_t tera = 1ull << 40, items = (300 << 20) / 8;
    put_header(&b, 3, 0, 1);
    put_value(&b, "name", GGUF_STRING, &tera, 8);
    fill(b.data, b.len);
    assert_int_equal(ftruncate(memory_file, (off_t)tera * 2), 0);
    struct gguf *g;
    struct error e = { 0 };
    assert_true(!gguf_open(&g, memory_path, true, &e) && strstr(e.text, "more than 256 MiB"));
    bytes_free(&b);
    put_header(&b, 3, 0, 1);              /* 39 million empty strings */
    put_value(&b, "list", GGUF_ARRAY, &(uint32_t){ GGUF_STRING }, 4);
    put_u64(&b, items);
    fill(b.data, b.len);
    assert_int_equal(ftruncate(memory_file, (off_t)tera), 0);
    assert_true(!gguf_open(&g, memory_path, true, &e) && strstr(e.text, "more than 256 MiB"));
    bytes_free(&b);
    b = one_tensor(2, (uint64_t[]){ 1 << 20, 1 << 16 }, T_F32, 0, 0);    /* 256 GiB of weights, none of them read */
    fill(b.data, b.len);
    bytes_free(&b);
    assert_int_equal(ftruncate(memory_file, (off_t)tera), 0);
    g = open_good(memory_path, true);
    assert_int_equal(gguf_tensor(g, "w")->size, 1ull << 38);
    gguf_close(g);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    assert_int_equal(ftruncate(memory_file, 0), 0);
    getrusage(RUSAGE_SELF, &usage);
    print_message("huge files: %.2f s of processor time, peak memory %ld MiB\n", seconds, usage.ru_maxrss / 1024);
    assert_true(seconds < 3);
    assert_true(usage.ru_maxrss < 600 << 10);
}

/* The metadata is a copy, and reading tensors that are gone is an error. */
static void test_file_changes_while_open(void **state)
{
    (void)state;
    struct bytes b = good_file(3);
    fill(b.data, b.len);
    struct gguf *g = open_good(memory_path, false);
    const struct gguf_tensor *d = gguf_tensor(g, "d");
    struct error e = { 0 };
    uint8_t copy[60];
    assert_true(gguf_read(g, d, 0, copy, 60, &e));
    memset(b.data, 0xFF, b.len);
    assert_int_equal(pwrite(memory_file, b.data, b.len, 0), b.len);
    assert_true(u64_of(g, "u16") == 50000);
    walk(g);
    assert_int_equal(ftruncate(memory_file, (off_t)b.len - 1), 0);
    assert_true(gguf_read(g, d, 0, copy, 59, &e));
    assert_false(gguf_read(g, d, 0, copy, 60, &e));
    assert_non_null(strstr(e.text, "'d': the file has become shorter"));
    assert_int_equal(ftruncate(memory_file, 0), 0);
    assert_false(gguf_read(g, d, 0, copy, 1, &e));
    assert_true(u64_of(g, "u16") == 50000);
    gguf_close(g);
    bytes_free(&b);
}

/* ---- paths and split sets --------------------------------------------------------------------------------------- */

static char folder[64];

static int make_folder(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "%s/test gguf XXXXXX", P_tmpdir);
    return !mkdtemp(folder);
}

static int remove_folder(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    return system(command);
}

static const char *in_folder(const char *name)
{
    static char path[400];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void save(const char *name, struct bytes *b)
{
    FILE *f = fopen(in_folder(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(b->data, 1, b->len, f), b->len);
    assert_int_equal(fclose(f), 0);
    bytes_free(b);
}

static void path_refused(const char *path, const char *says)
{
    struct gguf *g;
    struct error e = { 0 };
    double start = now_seconds();
    assert_false(gguf_open(&g, path, true, &e));
    assert_true(now_seconds() - start < 1);
    assert_null(g);
    assert_int_equal(e.code, GEN_MODEL);
    if (!strstr(e.text, says)) fail_msg("'%s' is not in '%s'", says, e.text);
}

static void test_paths(void **state)
{
    (void)state;
    path_refused("", "the name of the model file is empty");
    path_refused(folder, "this is a directory");
    path_refused(in_folder("none.gguf"), "No such file");
    path_refused("/dev/zero", "not a regular file");
    assert_int_equal(mkfifo(in_folder("fifo"), 0600), 0);
    path_refused(in_folder("fifo"), "not a regular file");
    struct bytes b = good_file(3);
    save("plain.gguf", &b);
    assert_int_equal(symlink("plain.gguf", in_folder("link.gguf")), 0);
    gguf_close(open_good(in_folder("link.gguf"), true));
    assert_int_equal(chmod(in_folder("plain.gguf"), 0), 0);
    if (geteuid() != 0) path_refused(in_folder("plain.gguf"), "Permission denied");
    char *longest = calloc(5001, 1);
    memset(longest, 'n', 5000);
    path_refused(longest, "nnn: cannot open the model file: File name too long");
    free(longest);
}

/* Part `no` of `count`, whose tensors are called tNO.0, tNO.1, ... and hold 16 floats each. */
static struct bytes part(uint16_t no, uint16_t count, int32_t total, int tensors)
{
    struct bytes b = { 0 };
    put_header(&b, 3, (uint64_t)tensors, 4);
    put_value(&b, "split.no", GGUF_U16, &no, 2);
    put_value(&b, "split.count", GGUF_U16, &count, 2);
    put_value(&b, "split.tensors.count", GGUF_I32, &total, 4);
    put_value_u32(&b, "own", no);
    for (int i = 0; i < tensors; i++) {
        char name[32];
        snprintf(name, sizeof name, "t%d.%d", no, i);
        put_tensor(&b, name, 1, (uint64_t[]){ 16 }, T_F32, (uint64_t)i * 64);
    }
    pad(&b, 32);
    for (int i = 0; i < tensors; i++)
        for (int k = 0; k < 16; k++) put(&b, &(float){ (float)(no * 1000 + i * 100 + k) }, 4);
    return b;
}

static void save_set(int32_t total)
{
    struct bytes b = part(0, 3, total, 0);
    save("m-00001-of-00003.gguf", &b);
    b = part(1, 3, total, 2);
    save("m-00002-of-00003.gguf", &b);
    b = part(2, 3, total, 3);
    save("m-00003-of-00003.gguf", &b);
}

static void test_split_set(void **state)
{
    (void)state;
    save_set(5);
    for (int use_map = 0; use_map < 2; use_map++) {
        struct gguf *g = open_good(in_folder("m-00001-of-00003.gguf"), use_map);
        assert_int_equal(gguf_tensor_count(g), 5);
        assert_int_equal(u64_of(g, "own"), 0);
        assert_non_null(strstr(gguf_path(g), "-00001-of-"));
        uint64_t bytes = 0;
        for (int i = 1; i <= 3; i++) {
            struct stat st;
            char name[40];
            snprintf(name, sizeof name, "m-%05d-of-00003.gguf", i);
            assert_int_equal(stat(in_folder(name), &st), 0);
            bytes += (uint64_t)st.st_size;
        }
        assert_int_equal(gguf_file_bytes(g), bytes);
        for (int no = 1; no < 3; no++)
            for (int i = 0; i < no + 1; i++) {
                char name[32];
                float x[16];
                struct error e = { 0 };
                snprintf(name, sizeof name, "t%d.%d", no, i);
                const struct gguf_tensor *t = gguf_tensor(g, name);
                assert_true(t && t->file == no && t->size == 64);
                assert_true(gguf_read(g, t, 0, x, 64, &e));
                assert_true(x[0] == (float)(no * 1000 + i * 100) && x[15] == x[0] + 15);
                if (use_map) assert_memory_equal(gguf_data(g, t), x, 64);
                else assert_null(gguf_data(g, t));
            }
        walk(g);
        gguf_close(g);
    }
}

static void test_broken_split_sets(void **state)
{
    (void)state;
    const char *first = "m-00001-of-00003.gguf", *second = "m-00002-of-00003.gguf", *third = "m-00003-of-00003.gguf";
    char from[400];
    save_set(5);
    path_refused(in_folder(second), "part 2 of a set of 3 files; name the first, ...-00001-of-00003.gguf");
    snprintf(from, sizeof from, "%s", in_folder(first));
    assert_int_equal(link(from, in_folder("renamed.gguf")), 0);
    path_refused(in_folder("renamed.gguf"), "the first of 3 files, but its name does not end in -00001-of-00003.gguf");
    struct bytes b = part(1, 3, 5, 2);
    save("other.gguf", &b);
    path_refused(in_folder("other.gguf"), "part 2 of a set of 3 files; name the first");
    save_set(6);
    path_refused(in_folder(first), "hold 5 tensors together, but the first announces 6");
    save_set(-1);
    path_refused(in_folder(first), "must not be negative");
    save_set(5);
    b = part(2, 3, 5, 3);
    save(second, &b);
    path_refused(in_folder(first), "m-00002-of-00003.gguf: this file says that it is part 3 of 3; part 2 of 3 was");
    b = part(1, 4, 5, 2);
    save(second, &b);
    path_refused(in_folder(first), "part 2 of 4; part 2 of 3 was expected");
    b = good_file(3);                     /* a file that belongs to no set */
    save(second, &b);
    path_refused(in_folder(first), "part 1 of 1; part 2 of 3 was expected");
    b = part(1, 3, 5, 2);
    b.len -= 1;
    save(second, &b);
    path_refused(in_folder(first), "m-00002-of-00003.gguf: the file is incomplete");
    assert_int_equal(unlink(in_folder(second)), 0);
    path_refused(in_folder(first), "m-00002-of-00003.gguf: cannot open the model file: No such file");
    assert_int_equal(mkfifo(in_folder(second), 0600), 0);
    path_refused(in_folder(first), "m-00002-of-00003.gguf: this is not a regular file");
    assert_int_equal(unlink(in_folder(second)), 0);
    save_set(5);
    b = part(1, 3, 5, 3);                 /* tensors t1.x twice, in two files */
    b.data[strlen("GGUF") + 20 + 8 + strlen("split.no") + 4] = 2;
    save(third, &b);
    path_refused(in_folder(first), "the tensor 't1.");
    for (int i = 0; i < 2; i++) {         /* keys that make no sense */
        b = part(i ? 3 : 65535, 3, 5, 0);
        save(first, &b);
        path_refused(in_folder(first), "the split keys are damaged");
    }
    b = part(0, 65535, 5, 0);
    save("m-00001-of-65535.gguf", &b);
    path_refused(in_folder("m-00001-of-65535.gguf"), "m-00002-of-65535.gguf: cannot open");
}

int main(void)
{
#define MEMORY(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
#define FOLDER(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        MEMORY(test_values), MEMORY(test_wrong_types), MEMORY(test_tensors), MEMORY(test_every_prefix),
        MEMORY(test_damage), MEMORY(test_refused_headers), MEMORY(test_refused_values), MEMORY(test_refused_tensors),
        MEMORY(test_overlap_and_names), MEMORY(test_alignment), MEMORY(test_long_value), MEMORY(test_huge_files),
        MEMORY(test_file_changes_while_open), FOLDER(test_paths), FOLDER(test_split_set),
        FOLDER(test_broken_split_sets),
    };
    return cmocka_run_group_tests_name("gguf", tests, NULL, NULL);
}
