/* comm.h - several processes that compute one thing: rank, size, and exchanges in a fixed order. One process unless a
 * run under mpirun asks for more.
 *
 * Every call below is made by all ranks of the group in the same order, by one thread at a time. A rank that dies takes
 * the others with it: MPI ends them and names it. */
#ifndef COMM_H
#define COMM_H

#include "base.h"

struct comm;

/* Joins the processes that mpirun has started; without mpirun a group of one. Errors: GEN_USAGE where gen was built
 * without MPI, GEN_RUN. */
bool comm_open(struct comm **out, struct error *e);
/* c may be NULL. */
void comm_close(struct comm *c);
/* How many processes mpirun has started together with this one, 1 without it, and which of them this one is: known
 * without joining them. */
int comm_started(int *rank);
int comm_rank(const struct comm *c);   /* 0 for NULL */
int comm_size(const struct comm *c);   /* 1 for NULL */
/* Which of the group's processes on this machine this one is, and how many those are: 0 of 1 for NULL. */
int comm_place(const struct comm *c, int *of);
int comm_machine(const struct comm *c);            /* rank of the first process on this machine */

/* Ends the processes of all ranks at once with this exit code: for a rank that cannot go on. */
void comm_abort(struct comm *c, int code) __attribute__((noreturn));
/* This rank has not done what others may wait for: nothing is left but comm_abort. */
void comm_lose(struct comm *c);
bool comm_lost(const struct comm *c);  /* c may be NULL */

/* x[n] = the sum of all ranks' x[n], added in the order of ranks: the same bits everywhere and from run to run. */
void comm_sum(struct comm *c, float *x, size_t n);
/* out[size][n] = every rank's x[n], in the order of ranks. */
void comm_gather(struct comm *c, const float *x, size_t n, float *out);
/* data[n] of rank 0 goes to all. */
void comm_share(struct comm *c, void *data, size_t n);
/* false on all ranks unless ok on all; *e is then the first failing rank's, which it names. At once false for a rank
 * that is lost. c may be NULL. */
bool comm_agree(struct comm *c, bool ok, struct error *e);
/* One message of any length from one rank to another; `from` < 0 = whoever sends first, whose rank is returned.
 * comm_receive replaces *out; -1 when memory is out. */
void comm_send(struct comm *c, int to, const void *data, size_t n);
int comm_receive(struct comm *c, int from, struct bytes *out);
/* As comm_send, but returns at once; waits only for the last message that was posted to that rank. Errors: GEN_RUN for
 * memory. */
bool comm_post(struct comm *c, int to, const void *data, size_t n, struct error *e);
/* Does a message wait to be received? */
bool comm_waiting(struct comm *c);

#endif
