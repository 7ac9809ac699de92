/* ranks.h - a model in parts, one on each rank of a group: rank 0 runs the engine, the others compute what it tells
 * them. All ranks' caches have the same pages under the same numbers, each with the rank's own KV heads. */
#ifndef RANKS_H
#define RANKS_H

#include "backend.h"
#include "comm.h"

/* Rank 0 tells the others something, unless it is lost: n bytes, which ranks_hear brings them; 0 = the end of what was
 * told until then, for which ranks_hear is false (also when memory is out: *e has a code then). */
void ranks_tell(struct comm *comm, const void *data, size_t n);
bool ranks_hear(struct comm *comm, struct bytes *out, struct error *e);

/* Rank 0: puts in front of *b, which it owns from then on, a backend that tells the other ranks of every pass, and of
 * pages copied within the pools [KV_GROUPS]. */
bool ranks_lead(struct backend **b, struct comm *comm, struct kv_pool *main, struct kv_pool *raw, struct error *e);
/* Other ranks: take part in every pass, over pools of the same page counts as rank 0's, until rank 0 closes its
 * backend. `rows`: of the largest batch; `sequences`: most of one. */
bool ranks_follow(struct backend *b, struct comm *comm, struct kv_pool *main, struct kv_pool *raw, int rows,
                  int sequences, struct error *e);

#endif
