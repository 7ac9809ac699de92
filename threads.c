/* threads.c - the worker team: a phase counter that threads spin on briefly, then sleep on (futex). */
#define _GNU_SOURCE
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Rounds of `pause` before a waiting thread sleeps: about 20 microseconds, several barriers' length. With more threads
 * than cores a spinning thread keeps the one it waits for from running, so then nobody spins. */
enum { SPIN = 2000 };

struct member { struct team *team; int number; pthread_t thread; };

struct team {
    int n;
    int spin;
    struct member *members;            /* [n]; 0 is the caller's thread */
    team_job job;
    void *user;
    _Alignas(64) atomic_uint phase;    /* rises by one at every barrier, and when a job starts */
    _Alignas(64) atomic_uint arrived;  /* threads at the barrier */
    _Alignas(64) atomic_uint sleepers; /* threads asleep on `phase` */
    _Alignas(64) atomic_int next;      /* work handed out in this phase */
    bool quit;
};

static void phase_wait(struct team *t, unsigned old)
{
    for (int i = 0; i < t->spin; i++) {
        if (atomic_load_explicit(&t->phase, memory_order_acquire) != old) return;
        __builtin_ia32_pause();
    }
    atomic_fetch_add(&t->sleepers, 1);
    while (atomic_load(&t->phase) == old)
        syscall(SYS_futex, &t->phase, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&t->sleepers, 1);
}

static void phase_advance(struct team *t)
{
    atomic_fetch_add(&t->phase, 1);
    if (atomic_load(&t->sleepers)) syscall(SYS_futex, &t->phase, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

void team_barrier(struct team *t)
{
    unsigned phase = atomic_load_explicit(&t->phase, memory_order_relaxed);
    if (atomic_fetch_add(&t->arrived, 1) + 1 == (unsigned)t->n) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&t->next, 0, memory_order_relaxed);
        phase_advance(t);
    } else
        phase_wait(t, phase);
}

bool team_take(struct team *t, int n, int chunk, int *begin, int *end)
{
    int at = atomic_fetch_add_explicit(&t->next, chunk, memory_order_relaxed);
    if (at >= n) return false;
    *begin = at;
    *end = at + chunk < n ? at + chunk : n;
    return true;
}

static void *work(void *arg)
{
    const struct member *me = arg;
    struct team *t = me->team;
    unsigned phase = 0;
    for (;;) {
        phase_wait(t, phase);
        if (t->quit) return NULL;
        t->job(t->user, me->number);
        phase = atomic_load(&t->phase);   /* cannot move before this thread arrives */
        team_barrier(t);
        phase++;
    }
}

void team_run(struct team *t, team_job job, void *user)
{
    t->job = job;
    t->user = user;
    if (t->n > 1) phase_advance(t);
    job(user, 0);
    team_barrier(t);
}

bool team_open(struct team **out, int n, struct error *e)
{
    struct team *t = alloc_zeroed(1, sizeof *t, "the threads", e);
    if (!t) return false;
    t->n = n;
    t->spin = n <= cores_available() ? SPIN : 0;
    t->members = alloc_zeroed(n, sizeof *t->members, "the threads", e);
    if (!t->members) return free(t), false;
    for (int i = 1; i < n; i++) {
        struct member *m = &t->members[i];
        m->team = t;
        m->number = i;
        if (pthread_create(&m->thread, NULL, work, m)) {
            t->n = i;
            fail(e, GEN_RUN, "cannot start %d threads: lower --threads", n);
            return team_close(t), false;
        }
    }
    *out = t;
    return true;
}

void team_close(struct team *t)
{
    if (!t) return;
    t->quit = true;
    phase_advance(t);
    for (int i = 1; i < t->n; i++) pthread_join(t->members[i].thread, NULL);
    free(t->members);
    free(t);
}

int team_size(const struct team *t) { return t->n; }

/* Whole cores of a cgroup v2 or v1 quota, or `limit` when there is none. */
static int cgroup_cores(int limit)
{
    long long quota = -1, period = 0;
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (f) {
        if (fscanf(f, "%lld %lld", &quota, &period) != 2) quota = -1;
        fclose(f);
    } else if ((f = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r"))) {
        if (fscanf(f, "%lld", &quota) != 1) quota = -1;
        fclose(f);
        if ((f = fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r"))) {
            if (fscanf(f, "%lld", &period) != 1) period = 0;
            fclose(f);
        }
    }
    if (quota <= 0 || period <= 0) return limit;
    long long cores = (quota + period - 1) / period;
    return cores < limit ? (int)cores : limit;
}

int cores_available(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) ? (int)sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&set);
    return cgroup_cores(n > 0 ? n : 1);
}
