/* The worker team: every piece of every phase is done once, phases do not overlap, whatever threads sleep or lose their
 * core meanwhile. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../base.h"
#include "../threads.h"

#include <cmocka.h>              /* after base.h: it defines a macro named fail */

enum { PIECES = 300, THREADS = 7 };

static uint64_t state = 20261129;
static int rnd(int n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)n);
}

struct job {
    int phases, n;                     /* still to come; pieces of the phase under way */
    int size;                          /* of the team */
    int pause;                         /* a piece in so many sleeps for a while, 0 = none */
    atomic_int inside;                 /* threads in a piece or in next */
    int count[PIECES];                 /* how often each piece of the phase was done: not atomic, as the team orders it */
    atomic_int errors;
};

static void piece(void *user, int i, int thread)
{
    struct job *j = user;
    atomic_fetch_add(&j->inside, 1);
    if (i < 0 || i >= j->n || thread < 0 || thread >= j->size) atomic_fetch_add(&j->errors, 1);
    else j->count[i]++;
    if (j->pause && i % j->pause == 1) nanosleep(&(struct timespec){ 0, 2000000 }, NULL);
    atomic_fetch_sub(&j->inside, 1);
}

static int next(void *user, int thread)
{
    struct job *j = user;
    (void)thread;
    if (atomic_fetch_add(&j->inside, 1) != 0) atomic_fetch_add(&j->errors, 1);
    for (int i = 0; i < PIECES; i++)
        if (j->count[i] != (i < j->n)) atomic_fetch_add(&j->errors, 1);
    memset(j->count, 0, sizeof j->count);
    j->n = j->phases-- > 0 ? 1 + rnd(PIECES) : 0;
    int n = j->n;
    atomic_fetch_sub(&j->inside, 1);
    return n;
}

static void run(int size, int runs, int phases, int pause)
{
    struct team *t;
    struct error e = { 0 };
    assert_true(team_open(&t, size, &e));
    assert_int_equal(team_size(t), size);
    for (int i = 0; i < runs; i++) {
        struct job j = { .phases = rnd(phases), .size = size, .pause = pause };
        team_run(t, next, piece, &j);
        assert_int_equal(j.errors, 0);
        assert_int_equal(j.phases, -1);
        memset(&j, 0, sizeof j);
        j.n = 1 + rnd(PIECES);
        j.size = size;
        team_each(t, j.n, piece, &j);
        for (int k = 0; k < PIECES; k++) assert_int_equal(j.count[k], k < j.n);
        if (i % 7 == 0) nanosleep(&(struct timespec){ 0, 100000 }, NULL);      /* the threads fall asleep */
    }
    team_close(t);
}

static void test_pieces(void **unused)
{
    (void)unused;
    for (int size = 1; size <= THREADS; size++) run(size, 60, 100, 0);
}

/* Threads that sleep in a piece keep the others waiting, which then sleep, too. */
static void test_late_pieces(void **unused)
{
    (void)unused;
    run(2, 3, 20, 100);
    run(THREADS, 3, 20, 100);
}

/* Opening and closing, with threads that have never found anything to do. */
static void test_close(void **unused)
{
    (void)unused;
    for (int i = 0; i < 100; i++) {
        struct team *t;
        struct error e = { 0 };
        assert_true(team_open(&t, 1 + i % THREADS, &e));
        if (i % 3 == 0) team_each(t, 0, piece, NULL);
        team_close(t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces), cmocka_unit_test(test_late_pieces), cmocka_unit_test(test_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
