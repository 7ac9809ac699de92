/* emulator.h - runs CUDA kernels on a processor and says what is wrong with them; what its parts share.
 *
 * Each CUDA thread is a fiber; the blocks of a launch run one after the other, the threads of a block in turns until
 * each has reached a barrier or a warp's rendezvous. Which thread, and which block, comes next is drawn from a seed, so
 * that what must not depend on the order gives other results when it does.
 *
 * g++ compiles the sources with -fsanitize=thread,alignment,bounds, whose run-time library is not linked: the calls
 * that it puts before each access to memory come here (access.cpp), and so do the reports of the other two. The program
 * ends with a message that names kernel, block, thread and place in the source on
 *   - an access outside of an allocation, to freed memory, to the host's memory, to another thread's stack, a
 *     misaligned one, an index outside of an array;
 *   - shared memory read before it was written, and a race: two accesses by different threads, one of them a write,
 *     that no barrier orders (__syncthreads, or in one warp __syncwarp; shuffles order nothing);
 *   - a barrier or a warp's rendezvous that not all threads reach or that they reach at different places, a shuffle
 *     from a lane that does not take part;
 *   - cp.async: a destination touched before the wait;
 *   - programmatic dependent launch: results of a kernel that may still run, used before cudaGridDependencySynchronize;
 *   - a launch with too many threads or too much shared memory; API calls with pointers or sizes that are wrong;
 *   - the host touching device memory (which is mapped only while the device works), memory not freed at the end.
 * What is given to a stream is done as late as allowed: when something waits for it.
 *
 * Environment: CUDA_EMULATOR, words NAME=VALUE with commas between them:
 *   seed=N        order of threads and blocks (0)
 *   pinned=BYTES  what may be pinned of the host's (1 GiB)
 *   shared=BYTES  shared memory that a block may ask for (227 KiB, which is the most)
 *   memory=BYTES  device memory (1 GiB)          devices=N  (1)          driver=N  version of the driver (13000)
 *   first=N       the machine's device that is the first this program sees (0)
 *   nccl=WHAT     absent: there is no NCCL; refuses: this rank cannot join
 *   fail=N        the N-th API call that may fail returns cudaErrorUnknown
 *   counters=FILE at the end, a JSON object of what each kernel did, and of the bytes copied to the host
 *
 * Not emulated: weak memory order, races between blocks, bank conflicts, registers, time. */
#ifndef EMULATOR_H
#define EMULATOR_H

#define EMULATOR_ITSELF
#include "cuda_runtime.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

/* Dynamic shared memory. */
extern thread_local unsigned char smem[(227 << 10)];

namespace emulator {

constexpr size_t STATIC_SHARED = 48 << 10, MOST_SHARED = 227 << 10, SM_SHARED = 228 << 10;
constexpr unsigned MOST_THREADS = 1024, WARP = 32;

/* CUDA_EMULATOR, read once. */
struct settings {
    uint64_t seed;
    size_t memory, pinned, shared;
    int devices, first, driver;
    long fail;
    std::string counters, nccl;
};
const settings &options();
/* A number below n; the same sequence for the same seed. */
unsigned draw(unsigned n);

/* What is known of a piece of memory that the device may use. */
struct allocation {
    uintptr_t start, end;              /* bytes asked for: [start, end) */
    uintptr_t map, map_end;            /* pages that hold them */
    bool pinned;                       /* the host's */
    bool freed;
    place at;                          /* where it was asked for */
    std::string label;
    std::vector<uint32_t> written;     /* for each 64 bytes, the launch that wrote there last */
    std::vector<uint32_t> counted[2];  /* for each 32 bytes, the launch that read or wrote there last, while counting */
};
/* One reservation of address space in which each allocation has slots of its own. */
constexpr size_t ARENA = (size_t)1 << 38, SLOT = 2 << 20;
extern uintptr_t arena;                /* 0 until anything is allocated */
extern allocation **slot_owner;        /* [ARENA / SLOT] */
allocation *find_registered(uintptr_t p);          /* memory of the host's, in its own place */
static inline allocation *find_allocation(uintptr_t p)
{
    return p - arena < ARENA && arena ? slot_owner[(p - arena) / SLOT] : find_registered(p);
}
/* Device memory may be touched while one of these lives. */
struct device_open { device_open(); ~device_open(); };

/* One launch, run once or, from a graph, again and again. */
struct work {
    const void *kernel;
    std::shared_ptr<bound> arguments;
    dim3 grid, block;
    size_t shared;
    bool dependent;                    /* programmatic dependent launch */
};
void check_launch(const work &w);       /* ends the program where a device would refuse */
void run(const work &w);
/* Puts what is to be done at the end of a stream's queue. */
void enqueue(cudaStream_t s, std::function<void()> what);
/* The memory is the device's, all of it, and alive; `what` uses it. */
void check_device(const void *p, size_t bytes, const char *what);
/* True when the settings want this call to fail. */
bool fails();
/* Number of the launch under way, and of the first one that may still run beside it. */
extern uint32_t launch_number, first_in_flight;

/* Sums over a kernel's launches of what its warps asked for in memory of one label: requests (one instruction of one
 * warp), bytes without those that several lanes want, 32-byte sectors touched by each request, and by each launch. */
struct traffic { uint64_t requests, bytes, sectors, distinct; };
struct kernel_record {
    uint64_t launches, threads;
    std::map<std::string, traffic> reads, writes;
};
extern std::map<std::string, kernel_record> records;
void write_counters();
/* The function's name, from the program's symbol table. */
std::string kernel_name(const void *kernel);
/* Bytes of the static __shared__ variables that a kernel declares. */
size_t static_shared(const void *kernel);

/* ---- a thread ---------------------------------------------------------------------------------------------------- */

struct copy { void *dst; const void *src; unsigned bytes, zeros, group; };
struct thread {
    void *sp;                          /* stack pointer while it does not run */
    char *stack;                       /* [STACK_BYTES], above a page that cannot be touched */
    uint3 index;
    unsigned number;                   /* in its block */
    enum { RUNNING, AT_BARRIER, AT_WARP, ENDED } state;
    place at;                          /* where it waits */
    const char *what;                  /* for what */
    unsigned mask;
    void *operand;
    void (*combine)(void *const *, unsigned);
    bool yes;
    uint32_t barriers, meetings;       /* passed so far: what orders memory in a block and in a warp */
    bool dependency_met;
    unsigned copy_groups;
    std::vector<copy> copies;
    std::vector<uint64_t> seen;        /* counting: pairs (pc, times), a hash table */
};
constexpr size_t STACK_BYTES = 64 << 10;
extern thread *current;                /* NULL outside of kernels */
extern const work *running;
extern uint3 block_now;
/* Ends the program; the message says first where: kernel, block and thread, if one runs. */
[[noreturn]] void die(const char *form, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void die_at(const void *pc, const char *form, ...) __attribute__((format(printf, 2, 3)));

/* ---- access.cpp -------------------------------------------------------------------------------------------------- */
void access(uintptr_t p, size_t bytes, bool write, bool atomic, const void *pc);
void access_start_block();             /* shared memory holds nothing any more */
void access_end_block();
/* A destination of cp.async, from the call to the wait. */
void mark_pending(uintptr_t p, size_t bytes);
void land(const copy &c);
bool is_shared(uintptr_t p);
}

#endif
