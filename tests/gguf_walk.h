/* gguf_walk.h - touches every byte that an open file offers, as the program might. For tests: after gguf_open has
 * accepted a file, none of this may crash, whatever the file says. */
#ifndef GGUF_WALK_H
#define GGUF_WALK_H

#include "gguf.h"

#include <string.h>

static uint64_t walk_sum;                 /* keeps the compiler from dropping the reads */

static void walk_bytes(const void *data, size_t n)
{
    for (size_t i = 0; i < n; i++) walk_sum += ((const uint8_t *)data)[i];
}

static void walk_value(const struct gguf *g, const struct gguf_value *v)
{
    char key[70000];
    struct error e;
    uint64_t u = 0;
    double d = 0;
    bool b = false;
    struct gguf_str s = { "", 0 };
    walk_bytes(v->data, v->size);
    if (v->type == GGUF_STRING || (v->type == GGUF_ARRAY && v->item == GGUF_STRING)) {
        const uint8_t *at = v->data;
        for (uint64_t i = 0; i < v->count; i++) {
            struct gguf_str item = gguf_next_str(&at);
            walk_bytes(item.ptr, item.len);
        }
        walk_sum += (uint64_t)(at - v->data) == v->size;
    }
    memcpy(key, v->key.ptr, v->key.len);
    key[v->key.len] = '\0';
    walk_sum += gguf_get_u64(g, key, &u, &e) + gguf_get_f64(g, key, &d, &e) + gguf_get_bool(g, key, &b, &e);
    if (gguf_get_str(g, key, &s, &e)) walk_bytes(s.ptr, s.len);
    walk_sum += u + b + (d > 0);
}

/* Mapped data is read in full, the same through gguf_read, and the first block is dequantised. */
static void walk_tensor(const struct gguf *g, const struct gguf_tensor *t)
{
    const struct type_info *info = type_info(t->type);
    uint8_t block[256];
    float weights[256];
    struct error e;
    const uint8_t *data = gguf_data(g, t);
    if (data) walk_bytes(data, t->size);
    walk_sum += gguf_read(g, t, t->size, block, 1, &e);
    if (gguf_read(g, t, t->size - (size_t)info->bytes, block, (size_t)info->bytes, &e)) walk_bytes(block, 1);
    if (data) {
        info->dequantise(data, weights, (size_t)info->block);
        walk_bytes(weights, sizeof *weights * (size_t)info->block);
        gguf_forget(g, t);
        walk_bytes(data + t->size - 1, 1);
    }
}

static void walk(const struct gguf *g)
{
    const struct gguf_value *v;
    for (size_t i = 0; (v = gguf_value_at(g, i)); i++) walk_value(g, v);
    for (size_t i = 0; i < gguf_tensor_count(g); i++) walk_tensor(g, gguf_tensor_at(g, i));
    walk_sum += gguf_file_bytes(g) + strlen(gguf_path(g)) + (uint64_t)gguf_version(g);
    walk_sum += gguf_find(g, "split.count") || gguf_tensor(g, "output.weight");
}

#endif
