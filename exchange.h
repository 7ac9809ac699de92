/* exchange.h - what the ranks of a divided model give each other, as work of a stream: by NCCL from device to device,
 * or through the hosts' memory by MPI. The same bits either way. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include <cuda_runtime.h>

extern "C" {
#include "comm.h"
}

struct exchange;

/* Called by all ranks of the group, by one with ok = false whose *e says what has failed before: all succeed, or all
 * fail with the error of the first that does; but a rank that cannot join NCCL's group, or on which the first exchange
 * fails, is lost (comm_lose). By NCCL where all ranks have it, and current devices that differ. sums, gathers: most
 * numbers of an exchange_sum, and that a rank brings to an exchange_gather. Errors: GEN_RUN for memory and calls that
 * fail. */
bool exchange_open(struct exchange **out, struct comm *comm, cudaStream_t stream, size_t sums, size_t gathers, bool ok,
                   struct error *e);
/* By all ranks as well; x may be NULL. */
void exchange_close(struct exchange *x);
/* "NCCL" or "MPI". */
const char *exchange_way(const struct exchange *x);

/* Both put work on the stream, by all ranks in the same order; the stream may be captured. Where *e has a code they do
 * nothing; errors: GEN_RUN. */
/* y[rows][width] on the device = the sum of all ranks' y, each row multiplied by scale[row] (NULL = 1), which becomes
 * 1. Added in the order of ranks, as by comm_sum. */
void exchange_sum(struct exchange *x, float *y, int rows, int width, float *scale, struct error *e);
/* Each rank r has columns [width * r / size, width * (r + 1) / size) of `rows` rows, in y[rows][exchange_most]: on
 * rank 0 y[rows][width] = all of them. */
void exchange_gather(struct exchange *x, float *y, int rows, int width, struct error *e);
static inline int exchange_most(const struct comm *c, int width) { return (width + comm_size(c) - 1) / comm_size(c); }

#endif
