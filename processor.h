/* processor.h - what this processor and the system's saving of registers allow. */
#ifndef PROCESSOR_H
#define PROCESSOR_H

#include <stdbool.h>

bool cpu_has_avx2(void);               /* AVX2, FMA, F16C */
bool cpu_has_avxvnni(void);            /* the same and AVX-VNNI */
bool cpu_has_avx512(void);             /* AVX-512 F, BW, VL, DQ and VNNI */

#endif
