/* emulator.cpp - threads as fibers, blocks, barriers, warps. */
#include "emulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>

alignas(128) thread_local unsigned char smem[emulator::MOST_SHARED];
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

/* ---- settings, chance, messages ---------------------------------------------------------------------------------- */

const settings &options()
{
    static const settings s = [] {
        settings r = { 0, (size_t)1 << 30, (size_t)1 << 30, MOST_SHARED, 1, 0, 13000, 0, "", "" };
        const char *text = getenv("CUDA_EMULATOR");
        std::string all = text ? text : "";
        for (size_t i = 0, j; i < all.size(); i = j + 1) {
            j = std::min(all.find(',', i), all.size());
            std::string word = all.substr(i, j - i), name = word.substr(0, word.find('='));
            std::string value = name.size() < word.size() ? word.substr(name.size() + 1) : "";
            if (name == "seed") r.seed = strtoull(value.c_str(), NULL, 10);
            else if (name == "memory") r.memory = strtoull(value.c_str(), NULL, 10);
            else if (name == "pinned") r.pinned = strtoull(value.c_str(), NULL, 10);
            else if (name == "shared") r.shared = strtoull(value.c_str(), NULL, 10);
            else if (name == "devices") r.devices = atoi(value.c_str());
            else if (name == "first") r.first = atoi(value.c_str());
            else if (name == "driver") r.driver = atoi(value.c_str());
            else if (name == "fail") r.fail = atol(value.c_str());
            else if (name == "counters") r.counters = value;
            else if (name == "nccl") r.nccl = value;
            else die("CUDA_EMULATOR: unknown word \"%s\"", word.c_str());
        }
        return r;
    }();
    return s;
}

unsigned draw(unsigned n)
{
    static uint64_t state = options().seed * 0x9e3779b97f4a7c15u + 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)((state >> 32) * n >> 32);
}

thread *current;
const work *running;
uint3 block_now;

[[noreturn]] static void vdie(const char *where, const char *form, va_list list)
{
    fflush(NULL);
    fputs("cuda emulator: ", stderr);
    if (running) {
        fprintf(stderr, "kernel %s, block (%u,%u,%u)", kernel_name(running->kernel).c_str(), block_now.x, block_now.y,
                block_now.z);
        if (current) fprintf(stderr, ", thread (%u,%u,%u)", current->index.x, current->index.y, current->index.z);
        fputs(": ", stderr);
    }
    vfprintf(stderr, form, list);
    fprintf(stderr, "%s\n", where);
    abort();
}

void die(const char *form, ...)
{
    va_list list;
    va_start(list, form);
    vdie("", form, list);
}

void fault(place at, const char *form, ...)
{
    va_list list;
    char where[500];
    snprintf(where, sizeof where, " (%s:%d)", at.file, at.line);
    va_start(list, form);
    vdie(where, form, list);
}

/* ---- fibers ------------------------------------------------------------------------------------------------------ */

/* Stores the stack pointer in *from and goes on at `to`. Saved on the stack: what a call leaves as it was. */
extern "C" void emulator_switch(void **from, void *to);
asm(".text\n"
    ".type emulator_switch, @function\n"
    "emulator_switch:\n"
    "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
    "    mov %rsp, (%rdi)\n"
    "    mov %rsi, %rsp\n"
    "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n"
    "    ret\n"
    ".size emulator_switch, . - emulator_switch\n");

static std::vector<thread> threads;    /* of the block; more than it needs */
static std::vector<thread *> ready;
static void *scheduler;                /* its stack pointer while a thread runs */
static unsigned n_threads, n_ended, n_waiting;
static int barrier_count;

/* A warp's rendezvous. */
struct warp { unsigned waiting, ended, exists; };
static std::vector<warp> warps;

static void give_way() { emulator_switch(&current->sp, scheduler); }

static std::string name_of(const thread &t)
{
    char s[60];
    snprintf(s, sizeof s, "thread (%u,%u,%u)", t.index.x, t.index.y, t.index.z);
    return s;
}

static std::string state_of(const thread &t)
{
    char s[400];
    if (t.state == thread::ENDED) return name_of(t) + " has ended";
    snprintf(s, sizeof s, " waits in %s (%s:%d)", t.what, t.at.file, t.at.line);
    return name_of(t) + s;
}

/* No thread can go on: says who waits for whom. */
[[noreturn]] static void stuck()
{
    const thread *waits = nullptr, *other = nullptr;
    for (unsigned i = 0; i < n_threads; i++)
        if (threads[i].state == thread::AT_BARRIER) waits = &threads[i];
    if (waits) {
        for (unsigned i = 0; i < n_threads; i++)
            if (threads[i].state != thread::AT_BARRIER) other = &threads[i];
        die("a barrier is not reached by all threads: %s, %s", state_of(*waits).c_str(), state_of(*other).c_str());
    }
    for (unsigned i = 0; i < n_threads; i++) {
        waits = &threads[i];
        if (waits->state != thread::AT_WARP) continue;
        for (unsigned l = 0; l < WARP; l++) {
            other = &threads[i / WARP * WARP + l];
            if (waits->mask >> l & 1 && other->state != thread::AT_WARP)
                die("a lane does not come: %s, %s", state_of(*waits).c_str(), state_of(*other).c_str());
        }
    }
    die("the threads of a warp wait for each other with different masks: %s", state_of(*waits).c_str());
}

static void thread_main()
{
    running->arguments->run(running->arguments.get());
    thread &t = *current;
    warp &w = warps[t.number / WARP];
    t.state = thread::ENDED;
    w.ended |= 1u << t.number % WARP;
    n_ended++;
    for (unsigned l = 0; l < WARP; l++) {
        const thread &other = threads[t.number / WARP * WARP + l];
        if (w.waiting >> l & 1 && other.mask & w.ended)
            die("a lane that takes part has ended: %s", state_of(other).c_str());
    }
    give_way();
    abort();                           /* ended threads are not resumed */
}

static void make_threads(unsigned n)
{
    for (unsigned i = (unsigned)threads.size(); i < n; i++) {
        char *p = (char *)mmap(NULL, 4096 + STACK_BYTES, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || mprotect(p, 4096, PROT_NONE)) die("no memory for stacks");
        threads.push_back({});
        threads[i].stack = p + 4096;
    }
}

static void start_thread(unsigned i, dim3 block)
{
    thread &t = threads[i];
    void **sp = (void **)(t.stack + STACK_BYTES - 64);
    *sp = (void *)thread_main;         /* popped by ret; a function starts with its stack 8 above a multiple of 16 */
    t.sp = sp - 6;
    t.index = { i % block.x, i / block.x % block.y, i / block.x / block.y };
    t.number = i;
    t.state = thread::RUNNING;
    t.barriers = t.meetings = 0;
    t.dependency_met = !running->dependent;
    t.copy_groups = 0;
    t.copies.clear();
    t.seen.clear();
    ready.push_back(&t);
}

static void run_block(const work &w)
{
    ready.clear();
    n_threads = w.block.x * w.block.y * w.block.z;
    n_ended = n_waiting = 0;
    make_threads((n_threads + WARP - 1) / WARP * WARP);
    warps.assign(n_threads / WARP + 1, { 0, 0, 0 });
    for (unsigned i = 0; i < n_threads; i++) {
        start_thread(i, w.block);
        warps[i / WARP].exists |= 1u << i % WARP;
    }
    access_start_block();
    while (n_ended < n_threads) {
        if (ready.empty()) stuck();
        unsigned i = draw((unsigned)ready.size());
        current = ready[i];
        ready[i] = ready.back();
        ready.pop_back();
        threadIdx = current->index;
        emulator_switch(&scheduler, current->sp);
        current = nullptr;
    }
    access_end_block();
}

uint32_t launch_number, first_in_flight;
std::map<std::string, kernel_record> records;

void run(const work &w)
{
    running = &w;
    launch_number++;
    if (!w.dependent) first_in_flight = launch_number;
    unsigned n = w.grid.x * w.grid.y * w.grid.z;
    std::vector<unsigned> order(n);
    for (unsigned i = 0; i < n; i++) order[i] = i;
    for (unsigned i = n; i > 1; i--) std::swap(order[i - 1], order[draw(i)]);
    blockDim = w.block;
    gridDim = w.grid;
    for (unsigned b : order) {
        blockIdx = block_now = { b % w.grid.x, b / w.grid.x % w.grid.y, b / w.grid.x / w.grid.y };
        run_block(w);
    }
    kernel_record &r = records[kernel_name(w.kernel)];
    r.launches++;
    r.threads += (uint64_t)n * n_threads;
    running = nullptr;
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

static std::map<const void *, size_t> opted;       /* dynamic shared memory that a kernel may have */

cudaError_t opt_in(const void *kernel, cudaFuncAttribute attribute, int value)
{
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (size_t)value + static_shared(kernel) > options().shared)
        die("kernel %s: %d bytes of dynamic and %zu of static shared memory; the most is %zu",
            kernel_name(kernel).c_str(), value, static_shared(kernel), options().shared);
    opted[kernel] = (size_t)value;
    return cudaSuccess;
}

cudaError_t occupancy(int *blocks, const void *kernel, int threads, size_t shared_bytes)
{
    size_t shared = shared_bytes + static_shared(kernel) + 1024;
    *blocks = (int)std::min<size_t>(std::min<size_t>(2048 / std::max(threads, 1), 32), SM_SHARED / shared);
    return cudaSuccess;
}

void check_launch(const work &w)
{
    std::string name = kernel_name(w.kernel);
    size_t threads = (size_t)w.block.x * w.block.y * w.block.z, fixed = static_shared(w.kernel);
    size_t most = opted.count(w.kernel) ? opted[w.kernel] : STATIC_SHARED - std::min(fixed, STATIC_SHARED);
    if (threads == 0 || threads > MOST_THREADS || w.block.z > 64)
        die("kernel %s: a block of %u x %u x %u threads", name.c_str(), w.block.x, w.block.y, w.block.z);
    if (!w.grid.x || !w.grid.y || !w.grid.z || w.grid.x > 0x7fffffff || w.grid.y > 65535 || w.grid.z > 65535)
        die("kernel %s: a grid of %u x %u x %u blocks", name.c_str(), w.grid.x, w.grid.y, w.grid.z);
    if (fixed > STATIC_SHARED)
        die("kernel %s: %zu bytes of static shared memory; the most is %zu", name.c_str(), fixed, STATIC_SHARED);
    if (w.shared > most)
        die("kernel %s: %zu bytes of dynamic shared memory, beside %zu static; it may have %zu%s", name.c_str(),
            w.shared, fixed, most, opted.count(w.kernel) ? "" : ", as cudaFuncSetAttribute has not raised it");
    if (w.arguments->bytes > 4096 + 64) die("kernel %s: more than 4096 bytes of arguments", name.c_str());
}

/* ---- what threads call ------------------------------------------------------------------------------------------- */

unsigned lane() { return current->number % WARP; }

static void must_run(const char *what)
{
    if (!current) die("%s called outside of a kernel", what);
}

int block_barrier(bool yes, place at)
{
    must_run("__syncthreads");
    thread &me = *current;
    me.state = thread::AT_BARRIER;
    me.what = "__syncthreads";
    me.at = at;
    me.yes = yes;
    if (++n_waiting < n_threads) {
        give_way();
        return barrier_count;
    }
    n_waiting = 0;
    barrier_count = 0;
    for (unsigned i = 0; i < n_threads; i++) {
        thread &t = threads[i];
        if (t.at.line != at.line || strcmp(t.at.file, at.file))
            die("threads wait at different barriers: %s, %s", state_of(me).c_str(), state_of(t).c_str());
        barrier_count += t.yes;
        t.barriers++;
        t.state = thread::RUNNING;
        if (&t != &me) ready.push_back(&t);
    }
    return barrier_count;
}

void warp_meet(unsigned mask, void *mine, void (*combine)(void *const *, unsigned), const char *what, bool order,
               place at)
{
    must_run(what);
    thread &me = *current;
    thread *lanes = &threads[me.number / WARP * WARP];
    warp &w = warps[me.number / WARP];
    unsigned own = 1u << lane();
    if (!(mask & own)) fault(at, "%s: the lane is not in its own mask %08x", what, mask);
    if (mask & ~w.exists) fault(at, "%s: mask %08x names lanes that the block does not have", what, mask);
    if (mask & w.ended) fault(at, "%s: mask %08x names lanes that have ended (%08x)", what, mask, w.ended);
    me.state = thread::AT_WARP;
    me.what = what;
    me.at = at;
    me.mask = mask;
    me.operand = mine;
    w.waiting |= own;
    if ((w.waiting & mask) != mask) {
        give_way();
        return;
    }
    void *operands[WARP];
    uint32_t meetings = 0;
    for (unsigned l = 0; l < WARP; l++) {
        operands[l] = nullptr;
        if (!(mask >> l & 1)) continue;
        if (lanes[l].mask != mask || lanes[l].at.line != at.line || strcmp(lanes[l].what, what))
            die("lanes of one warp meet in different calls: %s with mask %08x, %s with mask %08x",
                state_of(me).c_str(), mask, state_of(lanes[l]).c_str(), lanes[l].mask);
        operands[l] = lanes[l].operand;
        meetings = std::max(meetings, lanes[l].meetings);
    }
    if (combine) combine(operands, mask);
    w.waiting &= ~mask;
    for (unsigned l = 0; l < WARP; l++) {
        if (!(mask >> l & 1)) continue;
        if (order) lanes[l].meetings = meetings + 1;
        lanes[l].state = thread::RUNNING;
        if (&lanes[l] != &me) ready.push_back(&lanes[l]);
    }
}

void combine_shuffle(void *const lanes[], unsigned mask)
{
    for (unsigned l = 0; l < WARP; l++) {
        shuffle *s = (shuffle *)lanes[l];
        if (!s) continue;
        if (!(mask >> s->from & 1))
            die("a shuffle reads from lane %d, which is not in the mask %08x (lane %u asks)", s->from, mask, l);
        s->result = ((shuffle *)lanes[s->from])->value;
    }
}

uint32_t voted(unsigned mask, uint32_t value, void (*combine)(void *const *, unsigned), const char *what, place at)
{
    vote v = { value, 0 };
    warp_meet(mask, &v, combine, what, false, at);
    return v.result;
}

void combine_ballot(void *const lanes[], unsigned)
{
    uint32_t all = 0;
    for (unsigned l = 0; l < WARP; l++)
        if (lanes[l]) all |= ((vote *)lanes[l])->value << l;
    for (unsigned l = 0; l < WARP; l++)
        if (lanes[l]) ((vote *)lanes[l])->result = all;
}

template <class F> static void reduce(void *const lanes[], F join)
{
    bool any = false;
    uint32_t all = 0;
    for (unsigned l = 0; l < WARP; l++)
        if (lanes[l]) all = any ? join(all, ((vote *)lanes[l])->value) : ((vote *)lanes[l])->value, any = true;
    for (unsigned l = 0; l < WARP; l++)
        if (lanes[l]) ((vote *)lanes[l])->result = all;
}
void combine_add(void *const l[], unsigned) { reduce(l, [](uint32_t a, uint32_t b) { return a + b; }); }
void combine_and(void *const l[], unsigned) { reduce(l, [](uint32_t a, uint32_t b) { return a & b; }); }
void combine_or(void *const l[], unsigned) { reduce(l, [](uint32_t a, uint32_t b) { return a | b; }); }
void combine_xor(void *const l[], unsigned) { reduce(l, [](uint32_t a, uint32_t b) { return a ^ b; }); }
void combine_umin(void *const l[], unsigned) { reduce(l, [](uint32_t a, uint32_t b) { return std::min(a, b); }); }
void combine_umax(void *const l[], unsigned) { reduce(l, [](uint32_t a, uint32_t b) { return std::max(a, b); }); }
void combine_min(void *const l[], unsigned)
{
    reduce(l, [](uint32_t a, uint32_t b) { return (uint32_t)std::min((int32_t)a, (int32_t)b); });
}
void combine_max(void *const l[], unsigned)
{
    reduce(l, [](uint32_t a, uint32_t b) { return (uint32_t)std::max((int32_t)a, (int32_t)b); });
}

void dependency_synchronize()
{
    must_run("cudaGridDependencySynchronize");
    current->dependency_met = true;
}

/* ---- cp.async ---------------------------------------------------------------------------------------------------- */

void copy_async(void *dst, const void *src, size_t bytes, size_t zeros)
{
    must_run("cp.async");
    const void *pc = __builtin_return_address(0);
    if (bytes != 4 && bytes != 8 && bytes != 16) die_at(pc, "cp.async of %zu bytes", bytes);
    if (((uintptr_t)dst | (uintptr_t)src) % bytes) die_at(pc, "cp.async of %zu bytes: misaligned", bytes);
    if (!is_shared((uintptr_t)dst)) die_at(pc, "cp.async to memory that is not shared");
    if (zeros > bytes) die_at(pc, "cp.async: more zeros than bytes");
    if (zeros < bytes) access((uintptr_t)src, bytes - zeros, false, false, pc);
    access((uintptr_t)dst, bytes, true, false, pc);
    mark_pending((uintptr_t)dst, bytes);
    memset(dst, 0xff, bytes);
    current->copies.push_back({ dst, src, (unsigned)bytes, (unsigned)zeros, current->copy_groups });
}

void copy_commit()
{
    must_run("cp.async's commit");
    current->copy_groups++;
}

void copy_wait(unsigned groups_left)
{
    must_run("cp.async's wait");
    auto &copies = current->copies;
    size_t done = 0;
    while (done < copies.size() && copies[done].group + groups_left < current->copy_groups) land(copies[done++]);
    copies.erase(copies.begin(), copies.begin() + (long)done);
}

}
