/* probe.h - what this machine can do at best: bytes read from memory, and multiply-adds of bytes, per second. */
#ifndef PROBE_H
#define PROBE_H

#include "base.h"

struct probe;

/* Of all threads together. */
struct limits {
    double bytes;                      /* read from memory per second, from a buffer far larger than the caches */
    double multiply_adds;              /* of bytes in registers per second */
};

/* isa: name of a table of kernels; the multiply-adds are done with the instructions that it has for them. The buffer
 * takes 256 MiB until the probe is closed. Errors: GEN_RUN. */
bool probe_open(struct probe **out, const char *isa, int threads, struct error *e);
void probe_close(struct probe *p);
/* Measures both for about a tenth of a second, and returns the best of all calls so far: what else the machine does can
 * only make it look slower. */
struct limits probe_measure(struct probe *p);

#endif
