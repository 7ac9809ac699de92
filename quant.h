/* quant.h - the block formats of GGUF tensors and their scalar dequantisers: the oracle of every kernel. */
#ifndef QUANT_H
#define QUANT_H

#include <stddef.h>
#include <stdint.h>

enum tensor_type {                     /* numbered as in GGUF */
    T_F32 = 0, T_F16 = 1, T_Q4_0 = 2, T_Q4_1 = 3, T_Q5_0 = 6, T_Q5_1 = 7, T_Q8_0 = 8,
    T_Q2_K = 10, T_Q3_K = 11, T_Q4_K = 12, T_Q5_K = 13, T_Q6_K = 14, T_IQ4_NL = 20, T_IQ4_XS = 23, T_BF16 = 30
};

struct type_info {
    const char *name;                  /* as GGUF tools print it: "Q4_K" */
    int block;                         /* weights in a block */
    int bytes;                         /* bytes of a block */
    void (*dequantise)(const void *src, float *dst, size_t n);   /* n weights, a multiple of `block` */
};

/* NULL for a type that is not supported. */
const struct type_info *type_info(uint32_t type);
/* The name of any type number that GGUF ever used ("IQ2_XXS"), for messages; "unknown" otherwise. */
const char *type_name(uint32_t type);

float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f);          /* round to nearest even */

#endif
