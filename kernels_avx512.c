/* kernels_avx512.c - kernels for AVX-512 with VNNI; compiled with those instructions. */
#include "processor.h"
#define KERNELS kernels_avx512
#define KERNELS_NAME "avx512"
#define KERNELS_USABLE cpu_has_avx512()
#include "kernels.inc"
