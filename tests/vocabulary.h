/* vocabulary.h - makes GGUF files that hold a vocabulary and nothing else, in memory. */
#ifndef VOCABULARY_H
#define VOCABULARY_H

#ifndef _GNU_SOURCE
#error "define _GNU_SOURCE before the first header"
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gguf.h"

struct file { struct bytes values; uint64_t n_values; };

static inline void put(struct file *f, const void *data, size_t n) { if (!bytes_add(&f->values, data, n)) abort(); }
static inline void put_u32(struct file *f, uint32_t x) { put(f, &x, 4); }
static inline void put_u64(struct file *f, uint64_t x) { put(f, &x, 8); }
static inline void put_text(struct file *f, const char *text, size_t n) { put_u64(f, n), put(f, text, n); }

static inline void put_key(struct file *f, const char *key, enum gguf_type type)
{
    f->n_values++;
    put_text(f, key, strlen(key));
    put_u32(f, type);
}

static inline void add_string(struct file *f, const char *key, const char *text)
{
    put_key(f, key, GGUF_STRING);
    put_text(f, text, strlen(text));
}

static inline void add_u32(struct file *f, const char *key, uint32_t x) { put_key(f, key, GGUF_U32), put_u32(f, x); }

static inline void add_bool(struct file *f, const char *key, bool x)
{
    put_key(f, key, GGUF_BOOL);
    put(f, &(uint8_t){ x }, 1);
}

static inline void add_array(struct file *f, const char *key, enum gguf_type item, uint64_t count, const struct bytes *b)
{
    put_key(f, key, GGUF_ARRAY);
    put_u32(f, item);
    put_u64(f, count);
    put(f, b->data, b->len);
}

/* Opens the file and empties *f. NULL when gguf.c refuses it. */
static inline struct gguf *open_file(struct file *f)
{
    struct file whole = { 0 };
    put(&whole, "GGUF", 4);
    put_u32(&whole, 3);
    put_u64(&whole, 0);
    put_u64(&whole, f->n_values);
    put(&whole, f->values.data, f->values.len);
    char path[64];
    int fd = memfd_create("vocabulary", MFD_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (fd < 0 || write(fd, whole.values.data, whole.values.len) != (ssize_t)whole.values.len) abort();
    struct gguf *g = NULL;
    struct error e;
    if (!gguf_open(&g, path, false, &e)) fprintf(stderr, "%s\n", e.text);
    close(fd);
    bytes_free(&whole.values);
    bytes_free(&f->values);
    f->n_values = 0;
    return g;
}

/* A vocabulary in the making. */
struct words {
    struct file tokens, types, scores, merges;         /* only their `values` are used */
    uint64_t n, n_merges;
};

/* Adds a token of n bytes; its id. */
static inline int add_word_n(struct words *w, const char *text, size_t n, int type, float score)
{
    put_text(&w->tokens, text, n);
    put_u32(&w->types, (uint32_t)type);
    put(&w->scores, &score, sizeof score);
    return (int)w->n++;
}

static inline int add_word(struct words *w, const char *text, int type, float score)
{
    return add_word_n(w, text, strlen(text), type, score);
}

static inline void add_merge(struct words *w, const char *pair)
{
    put_text(&w->merges, pair, strlen(pair));
    w->n_merges++;
}

/* The character that byte-level BPE writes for a byte, in UTF-8. */
static inline void byte_letter(int byte, char out[3])
{
    int c = 256;
    for (int b = 0; b <= byte; b++) {
        bool printable = (b > 0x20 && b < 0x7F) || (b > 0xA0 && b != 0xAD);
        if (b == byte && printable) c = b;
        else if (b < byte && !printable) c++;
    }
    memset(out, 0, 3);
    if (c < 0x80) out[0] = (char)c;
    else out[0] = (char)(0xC0 | c >> 6), out[1] = (char)(0x80 | (c & 0x3F));
}

/* The 256 byte tokens of either kind. */
static inline void add_bytes(struct words *w, bool bpe)
{
    for (int b = 0; b < 256; b++) {
        char name[8];
        if (bpe) byte_letter(b, name);
        else snprintf(name, sizeof name, "<0x%02X>", (unsigned)b);
        add_word(w, name, bpe ? 1 : 6, 0);
    }
}

/* Moves the vocabulary into a file, with the keys that its kind needs. pre: NULL leaves tokenizer.ggml.pre out. */
static inline void add_vocabulary(struct file *f, struct words *w, bool bpe, const char *pre)
{
    add_string(f, "tokenizer.ggml.model", bpe ? "gpt2" : "llama");
    if (pre) add_string(f, "tokenizer.ggml.pre", pre);
    add_array(f, "tokenizer.ggml.tokens", GGUF_STRING, w->n, &w->tokens.values);
    add_array(f, "tokenizer.ggml.token_type", GGUF_I32, w->n, &w->types.values);
    if (bpe) add_array(f, "tokenizer.ggml.merges", GGUF_STRING, w->n_merges, &w->merges.values);
    else add_array(f, "tokenizer.ggml.scores", GGUF_F32, w->n, &w->scores.values);
    bytes_free(&w->tokens.values);
    bytes_free(&w->types.values);
    bytes_free(&w->scores.values);
    bytes_free(&w->merges.values);
    *w = (struct words){ 0 };
}

#endif
