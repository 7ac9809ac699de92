/* select.h - the largest logits of a row, found on a CUDA device: what the kernel of select.cu is given. */
#ifndef SELECT_H
#define SELECT_H

#include <cuda_runtime.h>

extern "C" {
#include "backend.h"
}

/* A row's largest logits that are not -inf, in falling order, the lower id first among equals. */
struct selected {
    int32_t n;                         /* 0 = one is NaN, the largest is not finite, or too many are equal */
    int32_t ids[TOP_MOST];
    float logits[TOP_MOST];
};

struct selection {
    const float *logits;               /* [rows][n] */
    int n;
    const int32_t *top;                /* [rows] how many, at most TOP_MOST; 0 = none, and nothing is written */
    uint64_t *peaks;                   /* [rows][select_peaks(n)] */
    unsigned *arrived;                 /* [rows], zero between launches */
    struct selected *out;              /* [rows]; may be the host's memory */
};

/* What is to be launched, with the struct as its argument; the launch itself is the caller's. */
struct select_launch {
    const char *name;
    void (*kernel)(struct selection);
    dim3 grid, block;
    size_t shared;
};
struct select_launch select_largest(const struct selection *s, int n_rows);
/* Numbers that a row of n logits needs in `peaks`. */
size_t select_peaks(int n);

#endif
