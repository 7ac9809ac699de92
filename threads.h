/* threads.h - a fixed team of worker threads that run one function together. */
#ifndef THREADS_H
#define THREADS_H

#include "base.h"

struct team;

/* A job is called once per thread with its number, 0 (the caller's thread) to n-1. */
typedef void (*team_job)(void *user, int thread);

/* n threads, the caller's included. Threads sleep when there is nothing to do for a while. */
bool team_open(struct team **out, int n, struct error *e);
void team_close(struct team *t);
int team_size(const struct team *t);
/* Runs job on every thread and returns when all have finished. */
void team_run(struct team *t, team_job job, void *user);
/* Inside a job: waits until every thread has come here. */
void team_barrier(struct team *t);
/* Inside a job, between two barriers: hands out the numbers 0..n-1 in pieces of `chunk`, each to one thread, until all
 * are taken. false: none is left. There is one counter, which the barrier sets back to 0. */
bool team_take(struct team *t, int n, int chunk, int *begin, int *end);

/* Cores that this process may use: affinity mask and cgroup quota. */
int cores_available(void);

#endif
