/* memory.h - how much memory and how many cores this process may take. */
#ifndef MEMORY_H
#define MEMORY_H

#include <stdint.h>

/* Bytes: the least of what the machine has available (MemAvailable), what the process's control groups leave (v1 and
 * v2; page cache that can be dropped counts as free) and what its address space limit leaves. UINT64_MAX when nothing
 * is known. */
uint64_t memory_available(void);
/* At least 1: by the affinity mask and by the quotas of the control groups, rounded up to whole cores. */
int cores_available(void);

#endif
