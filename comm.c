/* comm.c - MPI where gen is built with it, otherwise one process. */
#include "comm.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int comm_started(int *rank)
{
    const char *size = getenv("OMPI_COMM_WORLD_SIZE"), *own = getenv("OMPI_COMM_WORLD_RANK");   /* Open MPI's */
    if (!size) size = getenv("PMI_SIZE"), own = getenv("PMI_RANK");                             /* MPICH's */
    *rank = size && own ? atoi(own) : 0;
    return size && own ? atoi(size) : 1;
}

#ifdef GEN_MPI

#include <mpi.h>

enum { PIECE = 1 << 16,                /* floats of one exchange: bounds its memory */
       MESSAGE = 1 << 26 };            /* bytes of one MPI message, whose counts are ints */
enum { TAG_LENGTH = 1, TAG_DATA };

/* A message on its way to a rank. */
struct post { struct bytes data; uint64_t length; MPI_Request *parts; int n; };

struct comm {
    int rank, size;
    int place, places, machine;        /* on this machine; the rank of the first one there */
    bool lost;
    struct post *posts;                /* [size] the last one to each rank */
    float *all;                        /* [size][PIECE] every rank's part of an exchange */
};

bool comm_open(struct comm **out, struct error *e)
{
    int level = MPI_THREAD_SINGLE, size = 1;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS || level < MPI_THREAD_SERIALIZED)
        return fail(e, GEN_RUN, "MPI does not allow calls from several threads in turn: install one that does");
    struct comm *c = alloc_zeroed(1, sizeof *c, "the group of processes", e);
    if (!c) return false;
    MPI_Comm_rank(MPI_COMM_WORLD, &c->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    c->size = size;
    MPI_Comm here;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
    MPI_Comm_rank(here, &c->place);
    MPI_Comm_size(here, &c->places);
    c->machine = c->rank;
    MPI_Bcast(&c->machine, 1, MPI_INT, 0, here);
    MPI_Comm_free(&here);
    c->all = alloc_zeroed((size_t)size * PIECE, sizeof *c->all, "what the processes exchange", e);
    c->posts = alloc_zeroed((size_t)size, sizeof *c->posts, "messages to other processes", e);
    if (!c->all || !c->posts) return free(c->all), free(c->posts), free(c), false;
    *out = c;
    return true;
}

/* Waits until the message has left. */
static void settle(struct post *p)
{
    MPI_Waitall(p->n, p->parts, MPI_STATUSES_IGNORE);
    p->n = 0;
}

void comm_close(struct comm *c)
{
    if (!c) return;
    for (int r = 0; r < c->size; r++) {
        settle(&c->posts[r]);
        bytes_free(&c->posts[r].data);
        free(c->posts[r].parts);
    }
    MPI_Finalize();
    free(c->posts);
    free(c->all);
    free(c);
}

void comm_abort(struct comm *c, int code)
{
    (void)c;
    MPI_Abort(MPI_COMM_WORLD, code);
    _exit(code);
}

void comm_lose(struct comm *c) { c->lost = true; }
bool comm_lost(const struct comm *c) { return c && c->lost; }

int comm_rank(const struct comm *c) { return c ? c->rank : 0; }
int comm_size(const struct comm *c) { return c ? c->size : 1; }

int comm_place(const struct comm *c, int *of)
{
    *of = c ? c->places : 1;
    return c ? c->place : 0;
}

int comm_machine(const struct comm *c) { return c ? c->machine : 0; }

void comm_gather(struct comm *c, const float *x, size_t n, float *out)
{
    for (size_t at = 0; at < n; at += PIECE) {
        size_t k = n - at < PIECE ? n - at : PIECE;
        MPI_Allgather(x + at, (int)k, MPI_FLOAT, c->all, (int)k, MPI_FLOAT, MPI_COMM_WORLD);
        for (int r = 0; r < c->size; r++) memcpy(out + (size_t)r * n + at, c->all + (size_t)r * k, k * sizeof *x);
    }
}

void comm_sum(struct comm *c, float *x, size_t n)
{
    for (size_t at = 0; at < n; at += PIECE) {
        size_t k = n - at < PIECE ? n - at : PIECE;
        MPI_Allgather(x + at, (int)k, MPI_FLOAT, c->all, (int)k, MPI_FLOAT, MPI_COMM_WORLD);
        memcpy(x + at, c->all, k * sizeof *x);
        for (int r = 1; r < c->size; r++)
            for (size_t i = 0; i < k; i++) x[at + i] += c->all[(size_t)r * k + i];
    }
}

void comm_share(struct comm *c, void *data, size_t n)
{
    (void)c;
    for (size_t at = 0; at < n; at += MESSAGE)
        MPI_Bcast((char *)data + at, (int)(n - at < MESSAGE ? n - at : MESSAGE), MPI_BYTE, 0, MPI_COMM_WORLD);
}

bool comm_agree(struct comm *c, bool ok, struct error *e)
{
    if (!c) return ok;
    if (c->lost) return false;
    int failed = ok ? c->size : c->rank, first;
    MPI_Allreduce(&failed, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (first == c->size) return true;
    struct error theirs = *e;
    MPI_Bcast(&theirs, sizeof theirs, MPI_BYTE, first, MPI_COMM_WORLD);
    return fail(e, theirs.code, "rank %d: %s", first, theirs.text);
}

void comm_send(struct comm *c, int to, const void *data, size_t n)
{
    uint64_t length = n;
    (void)c;
    MPI_Send(&length, 1, MPI_UINT64_T, to, TAG_LENGTH, MPI_COMM_WORLD);
    for (size_t at = 0; at < n; at += MESSAGE)
        MPI_Send((const char *)data + at, (int)(n - at < MESSAGE ? n - at : MESSAGE), MPI_BYTE, to, TAG_DATA,
                 MPI_COMM_WORLD);
}

bool comm_post(struct comm *c, int to, const void *data, size_t n, struct error *e)
{
    struct post *p = &c->posts[to];
    settle(p);
    MPI_Request *parts = realloc(p->parts, (2 + n / MESSAGE) * sizeof *parts);
    if (parts) p->parts = parts;
    p->data.len = 0;
    if (!parts || !bytes_add(&p->data, data, n))
        return fail(e, GEN_RUN, "cannot allocate memory for a message to rank %d", to);
    p->length = n;
    MPI_Isend(&p->length, 1, MPI_UINT64_T, to, TAG_LENGTH, MPI_COMM_WORLD, &parts[p->n++]);
    for (size_t at = 0; at < n; at += MESSAGE)
        MPI_Isend(p->data.data + at, (int)(n - at < MESSAGE ? n - at : MESSAGE), MPI_BYTE, to, TAG_DATA,
                  MPI_COMM_WORLD, &parts[p->n++]);
    return true;
}

bool comm_waiting(struct comm *c)
{
    int any = 0;
    (void)c;
    MPI_Iprobe(MPI_ANY_SOURCE, TAG_LENGTH, MPI_COMM_WORLD, &any, MPI_STATUS_IGNORE);
    return any;
}

int comm_receive(struct comm *c, int from, struct bytes *out)
{
    uint64_t length = 0;
    MPI_Status status;
    (void)c;
    MPI_Recv(&length, 1, MPI_UINT64_T, from < 0 ? MPI_ANY_SOURCE : from, TAG_LENGTH, MPI_COMM_WORLD, &status);
    char *data = realloc(out->data, length + 1);
    if (!data) return -1;
    for (size_t at = 0; at < length; at += MESSAGE)
        MPI_Recv(data + at, (int)(length - at < MESSAGE ? length - at : MESSAGE), MPI_BYTE, status.MPI_SOURCE, TAG_DATA,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    data[length] = 0;
    *out = (struct bytes){ data, length, length + 1 };
    return status.MPI_SOURCE;
}

#else

bool comm_open(struct comm **out, struct error *e)
{
    *out = NULL;
    return fail(e, GEN_USAGE, "this gen was built without MPI: install libopenmpi-dev and build it again");
}

void comm_close(struct comm *c) { (void)c; }
void comm_abort(struct comm *c, int code) { (void)c; _exit(code); }
void comm_lose(struct comm *c) { (void)c; }
bool comm_lost(const struct comm *c) { (void)c; return false; }
int comm_rank(const struct comm *c) { (void)c; return 0; }
int comm_size(const struct comm *c) { (void)c; return 1; }
int comm_place(const struct comm *c, int *of) { (void)c; *of = 1; return 0; }
int comm_machine(const struct comm *c) { (void)c; return 0; }
void comm_gather(struct comm *c, const float *x, size_t n, float *out) { (void)c; memcpy(out, x, n * sizeof *x); }
void comm_sum(struct comm *c, float *x, size_t n) { (void)c; (void)x; (void)n; }
void comm_share(struct comm *c, void *data, size_t n) { (void)c; (void)data; (void)n; }
bool comm_agree(struct comm *c, bool ok, struct error *e) { (void)c; (void)e; return ok; }
void comm_send(struct comm *c, int to, const void *data, size_t n) { (void)c; (void)to; (void)data; (void)n; }
int comm_receive(struct comm *c, int from, struct bytes *out) { (void)c; (void)from; (void)out; return -1; }
bool comm_post(struct comm *c, int to, const void *data, size_t n, struct error *e)
{
    (void)c, (void)to, (void)data, (void)n;
    return fail(e, GEN_RUN, "there is no other process");
}
bool comm_waiting(struct comm *c) { (void)c; return false; }

#endif
