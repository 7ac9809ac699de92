/* kernels_avxvnni.c - kernels for AVX2 with AVX-VNNI; compiled with those instructions. */
#include "processor.h"
#define KERNELS kernels_avxvnni
#define KERNELS_NAME "avxvnni"
#define KERNELS_USABLE cpu_has_avxvnni()
#include "kernels.inc"
