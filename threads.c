/* threads.c - the worker team. A phase is over when its pieces are done, not when every thread has come by: a thread
 * that lost its core holds up the others by the piece in its hands at most, and joins whatever phase it finds. */
#define _GNU_SOURCE
#include "threads.h"

#include "memory.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Rounds of `pause` before a waiting thread sleeps: about 20 microseconds, several phases' length. With more threads
 * than cores a spinning thread keeps the one it waits for from running, so then nobody spins. */
enum { SPIN = 2000 };

/* Where something else runs on the cores, a thread that loses its own in the middle of a piece keeps all others waiting
 * for a time slice of the system, which is longer than it could ever save. So one thread less takes part after a wait
 * that long, at first for REST_LEAST; whenever it then happens again soon, for twice as long. In nanoseconds. */
enum { LONG_WAIT = 1000000, REST_LEAST = 5000000, REST_MOST = 1000000000 };

struct member { struct team *team; int number; pthread_t thread; long switches; };

struct team {
    int n;
    int spin;
    struct member *members;            /* [n]; 0 is the caller's thread */
    team_piece *piece;
    team_next *next;
    void *user;
    atomic_bool quit;
    /* The phase under way: its number << 44 | its pieces << 22 | the next one to be taken. The upper half changes from
     * phase to phase, and sleepers wait for that. */
    _Alignas(64) atomic_ullong phase;
    _Alignas(64) atomic_int done;      /* pieces of the phase that are done */
    _Alignas(64) atomic_uint sleepers; /* threads asleep until the phase is over */
    atomic_uint robbed;                /* upper half of the last phase that ended late as a thread had lost its core */
    _Alignas(64) atomic_int active;    /* threads 0 to active - 1 take part */
    atomic_llong rest, until;          /* how long, and until when, the others do not */
};

enum { BITS = 22 };
static int taken(uint64_t phase) { return (int)(phase & ((1 << BITS) - 1)); }
static int pieces(uint64_t phase) { return taken(phase >> BITS); }
static uint32_t upper(uint64_t phase) { return (uint32_t)(phase >> 32); }

static long long nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void sleep_on(void *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}
static void wake_all(void *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0); }

/* The system took the thread's core away since it last asked. */
static bool lost_core(struct member *m)
{
    struct rusage u;
    long before = m->switches;
    getrusage(RUSAGE_THREAD, &u);
    m->switches = u.ru_nivcsw;
    return m->switches != before;
}

/* `until` is set by one thread alone, and before the number of active ones falls. */
static void rest_one(struct team *t)
{
    long long until = atomic_load(&t->until), rest = atomic_load(&t->rest), now = nanoseconds();
    int active = atomic_load(&t->active);
    rest = now - until > rest ? REST_LEAST : 2 * rest < REST_MOST ? 2 * rest : REST_MOST;
    if (active < 2 || !atomic_compare_exchange_strong(&t->until, &until, now + rest)) return;
    atomic_store(&t->rest, rest);
    atomic_compare_exchange_strong(&t->active, &active, active - 1);
}

/* Waits until `phase` is over. */
static void wait_for_next(struct team *t, uint64_t phase)
{
    for (int i = 0; i < t->spin; i++) {
        if (upper(atomic_load_explicit(&t->phase, memory_order_acquire)) != upper(phase)) return;
        __builtin_ia32_pause();
    }
    long long start = nanoseconds();
    atomic_fetch_add(&t->sleepers, 1);
    while (upper(atomic_load(&t->phase)) == upper(phase)) sleep_on((uint32_t *)&t->phase + 1, upper(phase));
    atomic_fetch_sub(&t->sleepers, 1);
    if (atomic_load(&t->robbed) == upper(phase) && nanoseconds() - start > LONG_WAIT) rest_one(t);
}

/* Opens the phase after the present one, of n pieces. */
static void open_phase(struct team *t, int n)
{
    int active = atomic_load(&t->active);
    if (active < t->n && nanoseconds() >= atomic_load(&t->until) &&
        atomic_compare_exchange_strong(&t->active, &active, active + 1))
        wake_all(&t->active);
    uint64_t number = (atomic_load_explicit(&t->phase, memory_order_relaxed) >> 2 * BITS) + 1;
    atomic_store_explicit(&t->done, 0, memory_order_relaxed);
    atomic_store(&t->phase, number << 2 * BITS | (uint64_t)n << BITS);
    if (atomic_load(&t->sleepers)) wake_all((uint32_t *)&t->phase + 1);
}

/* Takes pieces until none is left, and opens the next phase where the last one to be done was among them. Whoever holds
 * a piece knows that the phase stays: its pieces are not all done before he says so. */
static void take_pieces(struct team *t, struct member *me)
{
    int count = 0;
    uint64_t phase;
    do {
        phase = atomic_fetch_add(&t->phase, 1);
        if (taken(phase) >= pieces(phase)) break;
        t->piece(t->user, taken(phase), me->number);
        count++;
    } while (taken(phase) + 1 < pieces(phase));
    if (count == 0 || atomic_fetch_add(&t->done, count) + count < pieces(phase)) return;
    if (atomic_load(&t->sleepers) && lost_core(me)) atomic_store(&t->robbed, upper(phase));
    open_phase(t, t->next ? t->next(t->user, me->number) : 0);
}

static void *work(void *arg)
{
    struct member *me = arg;
    struct team *t = me->team;
    for (;;) {
        uint64_t phase = atomic_load(&t->phase);
        int active = atomic_load(&t->active);
        if (atomic_load(&t->quit)) return NULL;
        if (me->number >= active) sleep_on(&t->active, (uint32_t)active);
        else if (taken(phase) < pieces(phase)) take_pieces(t, me);
        else wait_for_next(t, phase);
    }
}

static void run(struct team *t, int n)
{
    open_phase(t, n);
    for (uint64_t phase; pieces(phase = atomic_load(&t->phase)); ) {
        if (taken(phase) < pieces(phase)) take_pieces(t, &t->members[0]);
        else wait_for_next(t, phase);
    }
}

void team_run(struct team *t, team_next *next, team_piece *piece, void *user)
{
    t->next = next;
    t->piece = piece;
    t->user = user;
    int n = next(user, 0);
    if (n) run(t, n);
}

void team_each(struct team *t, int n, team_piece *piece, void *user)
{
    t->next = NULL;
    t->piece = piece;
    t->user = user;
    if (n) run(t, n);
}

bool team_open(struct team **out, int n, struct error *e)
{
    struct team *t = alloc_zeroed(1, sizeof *t, "the threads", e);
    if (!t) return false;
    t->n = n;
    t->spin = n <= cores_available() ? SPIN : 0;
    t->members = alloc_zeroed(n, sizeof *t->members, "the threads", e);
    if (!t->members) return free(t), false;
    atomic_store(&t->active, n);
    for (int i = 0; i < n; i++) {
        struct member *m = &t->members[i];
        m->team = t;
        m->number = i;
        if (i && pthread_create(&m->thread, NULL, work, m)) {
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
    atomic_store(&t->quit, true);
    atomic_store(&t->active, t->n);
    wake_all(&t->active);
    open_phase(t, 0);
    for (int i = 1; i < t->n; i++) pthread_join(t->members[i].thread, NULL);
    free(t->members);
    free(t);
}

int team_size(const struct team *t) { return t->n; }
