/* nccl.cpp - the calls of NCCL that the sources use, between processes of one machine through shared memory. */
#include "emulator.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <atomic>

using namespace emulator;

constexpr size_t MOST_RANKS = 16, PIECE = 1 << 14;

/* What the ranks of a group share; they join it once rank 0 has made it. They wait for one that refuses for ever. */
struct shared {
    std::atomic<bool> made;
    std::atomic<int> opened;
    pthread_barrier_t barrier;
    int device[MOST_RANKS];
    float part[MOST_RANKS][PIECE];
};
struct ncclComm { int rank, size; shared *s; };

extern "C" {

struct ncclUniqueId { char internal[128]; };
enum { ncclSuccess = 0, ncclSystemError = 2, ncclInvalidArgument = 4, ncclInvalidUsage = 5 };

int ncclGetVersion(int *version)
{
    *version = 23203;
    return options().nccl == "absent" ? ncclSystemError : ncclSuccess;
}

int ncclGetUniqueId(ncclUniqueId *id)
{
    if (fails()) return ncclSystemError;
    unsigned long long number;
    if (getrandom(&number, sizeof number, 0) != sizeof number) die("NCCL: no random number");
    *id = {};
    snprintf(id->internal, sizeof id->internal, "/dev/shm/emulated-nccl-%016llx", number);
    int file = open(id->internal, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || ftruncate(file, sizeof(shared))) die("NCCL: %s cannot be made", id->internal);
    close(file);
    return ncclSuccess;
}

int ncclCommInitRank(ncclComm **comm, int size, ncclUniqueId id, int rank)
{
    if (size < 1 || size > (int)MOST_RANKS || rank < 0 || rank >= size) return ncclInvalidArgument;
    int file = open(id.internal, O_RDWR), other = 0;
    shared *s = file < 0 ? (shared *)MAP_FAILED
                         : (shared *)mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (s == MAP_FAILED) die("NCCL: %s cannot be opened", id.internal);
    close(file);
    s->opened++;
    if (rank == 0) {
        pthread_barrierattr_t across;
        pthread_barrierattr_init(&across);
        pthread_barrierattr_setpshared(&across, PTHREAD_PROCESS_SHARED);
        pthread_barrier_init(&s->barrier, &across, (unsigned)size);
        while (s->opened < size) usleep(1000);
        unlink(id.internal);
        s->made = true;
    }
    while (!s->made) usleep(1000);
    if (fails() || options().nccl == "refuses") return ncclSystemError;
    cudaGetDevice(&s->device[rank]);
    s->device[rank] += options().first;
    pthread_barrier_wait(&s->barrier);
    for (int r = 0; r < size; r++) other += r != rank && s->device[r] == s->device[rank];
    if (other) return ncclInvalidUsage;
    *comm = new ncclComm{ rank, size, s };
    return ncclSuccess;
}

static void all_gather(ncclComm *c, const float *from, float *to, size_t n)
{
    check_device(from, n * sizeof *from, "what ncclAllGather sends");
    check_device(to, c->size * n * sizeof *to, "what ncclAllGather receives");
    for (size_t at = 0; at < n; at += PIECE) {
        size_t k = n - at < PIECE ? n - at : PIECE;
        memcpy(c->s->part[c->rank], from + at, k * sizeof *from);
        pthread_barrier_wait(&c->s->barrier);
        for (int r = 0; r < c->size; r++) memcpy(to + (size_t)r * n + at, c->s->part[r], k * sizeof *to);
        pthread_barrier_wait(&c->s->barrier);
    }
    first_in_flight = launch_number + 1;
    records["NCCL"].launches++;
}

int ncclAllGather(const void *from, void *to, size_t count, int type, ncclComm *c, cudaStream_t stream)
{
    if (fails()) return ncclSystemError;
    if (type != 7) die("NCCL: only numbers of type ncclFloat32 are emulated");
    enqueue(stream, [=] { all_gather(c, (const float *)from, (float *)to, count); });
    return ncclSuccess;
}

/* Waits for the other ranks. */
int ncclCommDestroy(ncclComm *c)
{
    pthread_barrier_wait(&c->s->barrier);
    munmap(c->s, sizeof *c->s);
    delete c;
    return ncclSuccess;
}
int ncclCommAbort(ncclComm *c)
{
    munmap(c->s, sizeof *c->s);
    delete c;
    return ncclSuccess;
}

const char *ncclGetErrorString(int r)
{
    switch (r) {
    case ncclSuccess: return "no error";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    }
    return "unknown result code";
}

}
