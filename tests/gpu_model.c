/* gpu_model OUT TYPE LAYERS EMBD FF HEADS KV_HEADS VOCAB - a llama model with random weights, all matrices of one type
 * (Q4_K, Q8_0, F32), without a tokenizer: for tests/gpu.sh, which has no packages to make one with. */
#include <stdio.h>
#include <stdlib.h>

#include "../quant.h"

static FILE *out;
static uint64_t state = 88172645463325252u;

static uint64_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static void put(const void *p, size_t n)
{
    if (fwrite(p, 1, n, out) == n) return;
    perror("gpu_model");
    exit(1);
}
static void put_u32(uint32_t x) { put(&x, 4); }
static void put_u64(uint64_t x) { put(&x, 8); }
static void put_str(const char *s) { put_u64(strlen(s)), put(s, strlen(s)); }
static void put_number(const char *key, uint32_t x) { put_str(key), put_u32(4), put_u32(x); }

struct tensor { char name[64]; uint64_t columns, rows; };      /* rows 0: a vector of F32 ones */
static struct tensor *tensors;
static int n_tensors;
static void add(const char *name, uint64_t columns, uint64_t rows)
{
    struct tensor *t = &tensors[n_tensors++];
    snprintf(t->name, sizeof t->name, "%s", name);
    t->columns = columns, t->rows = rows;
}

static uint64_t bytes_of(const struct tensor *t, enum tensor_type type)
{
    const struct type_info *i = type_info(type);
    return t->rows ? t->rows * (t->columns / i->block) * i->bytes : t->columns * 4;
}

static void put_matrix(const struct tensor *t, enum tensor_type type)
{
    const struct type_info *info = type_info(type);
    double std = 1 / __builtin_sqrt((double)t->columns);
    union { uint64_t words[32]; float f; struct block_q8_0 q8; struct block_q4_k q4; } block;
    for (uint64_t i = 0; i < t->rows * (t->columns / info->block); i++) {
        for (int k = 0; k < 32 && 8 * k < info->bytes; k++) block.words[k] = draw();
        if (type == T_Q8_0) block.q8.d = f32_to_f16((float)(std / 74));
        else if (type == T_F32) block.f = (float)(((double)(draw() >> 11) / (1ull << 52) - 1) * 1.7 * std);
        else {
            block.q4.d = f32_to_f16((float)(std / 220));
            block.q4.dmin = f32_to_f16((float)(7.5 * std / 220));
        }
        put(&block, info->bytes);
    }
}

int main(int argc, char **argv)
{
    if (argc != 9) return fprintf(stderr, "usage: gpu_model OUT TYPE LAYERS EMBD FF HEADS KV_HEADS VOCAB\n"), 2;
    enum tensor_type type = !strcmp(argv[2], "Q8_0") ? T_Q8_0 : !strcmp(argv[2], "F32") ? T_F32 : T_Q4_K;
    int layers = atoi(argv[3]), embd = atoi(argv[4]), ff = atoi(argv[5]), heads = atoi(argv[6]), kv = atoi(argv[7]);
    int vocab = atoi(argv[8]), head = embd / heads;
    char name[64];
    tensors = calloc((size_t)layers * 9 + 3, sizeof *tensors);
    out = fopen(argv[1], "wb");
    if (!out || !tensors) return perror(argv[1]), 1;
    add("token_embd.weight", embd, vocab);
    add("output_norm.weight", embd, 0);
    add("output.weight", embd, vocab);
    for (int i = 0; i < layers; i++) {
        struct { const char *name; int columns, rows; } all[] = {
            { "attn_norm", embd, 0 }, { "attn_q", embd, embd }, { "attn_k", embd, kv * head }, { "attn_v", embd,
                kv * head },
            { "attn_output", embd, embd }, { "ffn_norm", embd, 0 }, { "ffn_gate", embd, ff }, { "ffn_up", embd, ff },
            { "ffn_down", ff, embd } };
        for (int k = 0; k < 9; k++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", i, all[k].name);
            add(name, all[k].columns, all[k].rows);
        }
    }
    put("GGUF", 4), put_u32(3), put_u64(n_tensors), put_u64(9);
    put_str("general.architecture"), put_u32(8), put_str("llama");
    put_number("llama.context_length", 1 << 20);
    put_number("llama.embedding_length", embd);
    put_number("llama.block_count", layers);
    put_number("llama.feed_forward_length", ff);
    put_number("llama.attention.head_count", heads);
    put_number("llama.attention.head_count_kv", kv);
    put_number("llama.rope.dimension_count", head);
    float eps = 1e-5f, one = 1;
    put_str("llama.attention.layer_norm_rms_epsilon"), put_u32(6), put(&eps, 4);
    uint64_t at = 0;
    for (int i = 0; i < n_tensors; i++) {
        const struct tensor *t = &tensors[i];
        put_str(t->name), put_u32(t->rows ? 2 : 1), put_u64(t->columns);
        if (t->rows) put_u64(t->rows);
        put_u32(t->rows ? type : T_F32), put_u64(at);
        at += (bytes_of(t, type) + 31) & ~31ull;
    }
    for (int i = -1; i < n_tensors; i++) {
        while (ftell(out) % 32) put("", 1);
        if (i < 0) continue;
        if (tensors[i].rows) put_matrix(&tensors[i], type);
        else for (uint64_t k = 0; k < tensors[i].columns; k++) put(&one, 4);
    }
    while (ftell(out) % 32) put("", 1);
    return fclose(out) ? perror(argv[1]), 1 : 0;
}
