/* kernels_generic.c - kernels in what every x86-64 has. */
#define KERNELS kernels_generic
#define KERNELS_NAME "generic"
#define KERNELS_USABLE true
#include "kernels.inc"
