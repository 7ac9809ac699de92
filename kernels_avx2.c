/* kernels_avx2.c - kernels for AVX2, FMA and F16C; compiled with those instructions. */
#include "processor.h"
#define KERNELS kernels_avx2
#define KERNELS_NAME "avx2"
#define KERNELS_USABLE cpu_has_avx2()
#include "kernels.inc"
