/* threads.h - a fixed team of worker threads that share work out, piece by piece. */
#ifndef THREADS_H
#define THREADS_H

#include "base.h"

struct team;

enum { TEAM_PIECES = 4000000 };        /* most pieces of a phase */

/* Work comes in phases, whose pieces, 0 to n-1, may be done by any thread in any order. `thread` is the thread's
 * number, 0 the caller's. */
typedef void team_piece(void *user, int piece, int thread);
/* What follows a phase all of whose pieces are done: the number of pieces of the next one, 0 when the work is over.
 * One thread calls it, and nothing else runs meanwhile. */
typedef int team_next(void *user, int thread);

/* n threads, the caller's included. Threads sleep when there is nothing to do for a while, and fewer than n take part
 * while other programs hold the cores. */
bool team_open(struct team **out, int n, struct error *e);
void team_close(struct team *t);
int team_size(const struct team *t);
/* Goes through the phases that `next` opens, the first one included, and returns when it says 0. */
void team_run(struct team *t, team_next *next, team_piece *piece, void *user);
/* A single phase of n pieces. */
void team_each(struct team *t, int n, team_piece *piece, void *user);

#endif
