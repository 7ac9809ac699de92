/* gguf_tool.c - what gguf.c makes of a file, as JSON Lines for the Python tests.
 *
 *   gguf_tool dump FILE...     one line per file: its metadata and tensors, or the error; data as SHA-256
 *   gguf_tool prefixes FILE    opens every shorter prefix of the file; prints how many of them were accepted */
#define _GNU_SOURCE
#include "gguf.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Names may hold any bytes: hexadecimal. */
static json_t *hex(struct gguf_str s)
{
    struct bytes b = { 0 };
    bytes_add(&b, "", 0);
    for (size_t i = 0; i < s.len; i++) bytes_printf(&b, "%02x", (uint8_t)s.ptr[i]);
    json_t *text = json_string(b.data);
    bytes_free(&b);
    return text;
}

static json_t *value_json(const struct gguf_value *v)
{
    char sha[65];
    sha256_hex(v->data, v->size, sha);
    return json_pack("{so si si sI sI ss}", "key", hex(v->key), "type", (int)v->type, "item", (int)v->item, "count",
                     (json_int_t)v->count, "size", (json_int_t)v->size, "sha256", sha);
}

/* The data must be the same whether mapped or read, whole or in two pieces. */
static json_t *tensor_json(const struct gguf *mapped, const struct gguf *unmapped, size_t i, struct error *e)
{
    const struct gguf_tensor *t = gguf_tensor_at(mapped, i), *u = gguf_tensor_at(unmapped, i);
    char sha[65] = "", sha_read[65] = "-";
    size_t half = t->size / 2;
    uint8_t *copy = malloc(t->size);
    if (!copy || !gguf_read(unmapped, u, half, copy + half, t->size - half, e)
        || !gguf_read(mapped, t, 0, copy, half, e)) {
        free(copy);
        return NULL;
    }
    sha256_hex(gguf_data(mapped, t), t->size, sha);
    sha256_hex(copy, t->size, sha_read);
    free(copy);
    return json_pack("{so si si s[IIII] si sI ss sb}", "name", hex(t->name), "type", (int)t->type, "n_dims", t->n_dims,
                     "ne", (json_int_t)t->ne[0], (json_int_t)t->ne[1], (json_int_t)t->ne[2], (json_int_t)t->ne[3],
                     "file", t->file, "size", (json_int_t)t->size, "sha256", sha, "same",
                     strcmp(sha, sha_read) == 0 && !gguf_data(unmapped, u));
}

static void dump(const char *path)
{
    struct gguf *mapped, *unmapped = NULL;
    struct error e = { 0 };
    double start = now_seconds();
    bool good = gguf_open(&mapped, path, true, &e);
    double seconds = now_seconds() - start;
    json_t *out = json_object(), *values = json_array(), *tensors = json_array();
    good = good && gguf_open(&unmapped, path, false, &e);
    if (good) {
        json_object_set_new(out, "version", json_integer(gguf_version(mapped)));
        json_object_set_new(out, "bytes", json_integer((json_int_t)gguf_file_bytes(mapped)));
        const struct gguf_value *v;
        for (size_t i = 0; (v = gguf_value_at(mapped, i)); i++) json_array_append_new(values, value_json(v));
        for (size_t i = 0; good && i < gguf_tensor_count(mapped); i++) {
            json_t *t = tensor_json(mapped, unmapped, i, &e);
            good = t && json_array_append_new(tensors, t) == 0;
        }
    }
    json_object_set_new(out, "ok", json_boolean(good));
    json_object_set_new(out, "seconds", json_real(seconds));
    json_object_set_new(out, "code", json_integer(e.code));
    json_object_set_new(out, "error", json_string(e.text));
    json_object_set_new(out, "values", values);
    json_object_set_new(out, "tensors", tensors);
    json_dumpf(out, stdout, JSON_COMPACT);
    printf("\n");
    json_decref(out);
    gguf_close(mapped);
    gguf_close(unmapped);
}

static int prefixes(const char *path)
{
    char name[64];
    size_t accepted = 0, size = 0;
    struct error e;
    FILE *f = fopen(path, "rb");
    int fd = memfd_create("prefix", 0);
    if (!f || fd < 0) return GEN_RUN;
    char chunk[1 << 16];
    for (size_t n; (n = fread(chunk, 1, sizeof chunk, f)) > 0; size += n)
        if (write(fd, chunk, n) != (ssize_t)n) return GEN_RUN;
    fclose(f);
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    for (size_t n = size; n-- > 0;) {
        struct gguf *g;
        if (ftruncate(fd, (off_t)n) != 0) return GEN_RUN;
        e = (struct error){ 0 };
        if (gguf_open(&g, name, true, &e) || e.code != GEN_MODEL || !*e.text) accepted++;
        gguf_close(g);
    }
    close(fd);
    printf("%zu of %zu\n", accepted, size);
    return GEN_OK;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "prefixes") == 0) return prefixes(argv[2]);
    if (argc < 3 || strcmp(argv[1], "dump") != 0) return GEN_USAGE;
    for (int i = 2; i < argc; i++) dump(argv[i]);
    return GEN_OK;
}
