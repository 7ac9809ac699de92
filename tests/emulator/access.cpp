/* access.cpp - every access to memory that the sources make: bounds, races, counters. g++'s -fsanitize=thread calls
 * __tsan_read4 and its kin before each one; -fsanitize=alignment,bounds calls the __ubsan handlers. */
#include "emulator.h"

#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>

namespace emulator {

/* ---- where things are -------------------------------------------------------------------------------------------- */

struct ranges {
    uintptr_t load;                    /* what is added to the program's addresses */
    uintptr_t data, data_end;          /* the program's own image: constants and __device__ variables */
    uintptr_t shared, shared_end;      /* thread-local variables: shared memory */
};

static ranges look()
{
    ranges found = { 0, UINTPTR_MAX, 0, 0, 0 };
    dl_iterate_phdr([](dl_phdr_info *info, size_t, void *to) {
        ranges &f = *(ranges *)to;
        f.load = info->dlpi_addr;
        for (int i = 0; i < info->dlpi_phnum; i++) {
            const ElfW(Phdr) &h = info->dlpi_phdr[i];
            if (h.p_type == PT_LOAD) {
                f.data = std::min(f.data, f.load + h.p_vaddr);
                f.data_end = std::max(f.data_end, f.load + h.p_vaddr + h.p_memsz);
            } else if (h.p_type == PT_TLS) {
                f.shared = (uintptr_t)info->dlpi_tls_data;
                f.shared_end = f.shared + h.p_memsz;
            }
        }
        return 1;                      /* the program itself comes first */
    }, &found);
    return found;
}
static const ranges memory = look();   /* of the main thread, which is to use the device */

void die_at(const void *pc, const char *form, ...)
{
    char text[1000], command[200], where[400] = "";
    va_list list;
    va_start(list, form);
    vsnprintf(text, sizeof text, form, list);
    va_end(list);
    snprintf(command, sizeof command, "addr2line -e /proc/%d/exe %#zx 2>/dev/null", (int)getpid(),
             (uintptr_t)pc - memory.load - 1);
    FILE *f = popen(command, "r");
    if (f && fgets(where, sizeof where, f)) where[strcspn(where, " \n")] = 0;
    die("%s (%s)", text, *where ? where : "no addr2line");
}

/* ---- shared memory ----------------------------------------------------------------------------------------------- */

/* What happened to one byte of shared memory in this block. Times are a thread's numbers of barriers and, within a
 * warp, of meetings passed. */
struct cell {
    uint32_t block;                    /* the block that wrote it; another's means nothing */
    uint32_t write_barrier, write_meeting, read_barrier, read_meeting;
    uint16_t writer, reader;
    enum : uint8_t { NOBODY, ONE, ONE_WARP, MANY } readers;        /* since the last write, in one barrier interval */
    bool pending, atomic;
};
static std::vector<cell> cells;
static uint32_t block_number;

bool is_shared(uintptr_t p) { return p >= memory.shared && p < memory.shared_end; }

[[noreturn]] static void race(const char *what, unsigned other, uintptr_t p, const void *pc)
{
    die_at(pc, "a race in shared memory: %s thread number %u, with no barrier between (byte %zd of dynamic shared "
           "memory)", what, other, p - (uintptr_t)smem);
}

static bool ordered(const thread &me, unsigned other, uint32_t barrier, uint32_t meeting)
{
    return other == me.number || barrier < me.barriers || (other / WARP == me.number / WARP && meeting < me.meetings);
}

static void check_read(cell &c, const thread &me, bool atomic, uintptr_t p, const void *pc)
{
    if (!(atomic && c.atomic) && !ordered(me, c.writer, c.write_barrier, c.write_meeting))
        race("a read of what was written by", c.writer, p, pc);
    if (c.readers == cell::NOBODY || c.read_barrier != me.barriers) {
        c.readers = cell::ONE;
        c.read_barrier = me.barriers;
        c.reader = (uint16_t)me.number;
        c.read_meeting = me.meetings;
    } else if (c.reader / WARP != me.number / WARP) {
        c.readers = cell::MANY;
    } else if (c.readers != cell::MANY) {
        if (me.meetings > c.read_meeting) c.readers = cell::ONE;
        else if (c.reader != me.number) c.readers = cell::ONE_WARP;
        c.reader = (uint16_t)me.number;
        c.read_meeting = std::max(c.read_meeting, me.meetings);
    }
}

static void check_write(cell &c, const thread &me, bool atomic, uintptr_t p, const void *pc)
{
    if (!(atomic && c.atomic)) {
        if (!ordered(me, c.writer, c.write_barrier, c.write_meeting))
            race("a write over what was written by", c.writer, p, pc);
        bool mine = c.readers == cell::ONE && c.reader == me.number;
        if (c.readers != cell::NOBODY && c.read_barrier == me.barriers && !mine &&
            (c.readers == cell::MANY || c.reader / WARP != me.number / WARP || c.read_meeting >= me.meetings))
            race("a write over what was read by", c.reader, p, pc);
    }
    c.write_barrier = me.barriers;
    c.write_meeting = me.meetings;
    c.writer = (uint16_t)me.number;
    c.readers = cell::NOBODY;
    c.atomic = atomic;
}

static void access_shared(uintptr_t p, size_t bytes, bool write, bool atomic, const void *pc)
{
    uintptr_t dynamic = (uintptr_t)smem;
    if (p + bytes > dynamic && p < dynamic + MOST_SHARED && (p < dynamic || p + bytes > dynamic + running->shared))
        die_at(pc, "out-of-bounds %s of %zu bytes: byte %zd of %zu of dynamic shared memory", write ? "write" : "read",
               bytes, p - dynamic, running->shared);
    for (size_t i = 0; i < bytes; i++) {
        cell &c = cells[p + i - memory.shared];
        bool fresh = c.block != block_number;
        if (fresh) {
            if (!write)
                die_at(pc, "a read of shared memory that nobody wrote (byte %zd of the dynamic part)", p + i - dynamic);
            c = { block_number, 0, 0, 0, 0, (uint16_t)current->number, 0, cell::NOBODY, false, atomic };
        }
        if (c.pending) die_at(pc, "shared memory is touched before cp.async's wait");
        if (atomic && write && fresh) die_at(pc, "an atomic on shared memory that nobody wrote");
        if (write) check_write(c, *current, atomic, p + i, pc);
        else check_read(c, *current, atomic, p + i, pc);
    }
}

void mark_pending(uintptr_t p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) cells[p + i - memory.shared].pending = true;
}

void land(const copy &c)
{
    uintptr_t p = (uintptr_t)c.dst;
    memset(c.dst, 0, c.bytes);
    memcpy(c.dst, c.src, c.bytes - c.zeros);
    for (size_t i = 0; i < c.bytes; i++) {
        cell &x = cells[p + i - memory.shared];
        x.pending = false;
        x.write_barrier = current->barriers;
        x.write_meeting = current->meetings;
    }
}

/* ---- counters ---------------------------------------------------------------------------------------------------- */

/* One access of one lane: accesses of a warp's lanes at one place, each the n-th there, are one request. */
struct noted { uint64_t place; uintptr_t p; uint32_t bytes, warp; bool write; };
static std::vector<noted> log;

static uint32_t times_at(thread &t, const void *pc)
{
    if (t.seen.empty()) t.seen.assign(2048, 0);
    uint64_t key = (uint64_t)(uint32_t)(uintptr_t)pc << 32;
    size_t n = t.seen.size();
    for (size_t i = ((uintptr_t)pc * 0x9e3779b1u >> 4) % n, k = 0; k < n; k++, i = (i + 1) % n) {
        if (t.seen[i] == 0) t.seen[i] = key;
        if (t.seen[i] >> 32 == key >> 32) return (uint32_t)++t.seen[i];
    }
    die("a kernel with more than %zu accesses", n);
}

static void note(uintptr_t p, size_t bytes, bool write, const void *pc)
{
    uint64_t place = (uint64_t)(uint32_t)(uintptr_t)pc << 32 | times_at(*current, pc);
    log.push_back({ place, p, (uint32_t)bytes, current->number / WARP, write });
}

/* Adds the requests of the block to the kernel's record. */
static void count_requests()
{
    kernel_record &r = records[kernel_name(running->kernel)];
    std::sort(log.begin(), log.end(), [](const noted &a, const noted &b) {
        return a.warp != b.warp ? a.warp < b.warp : a.place != b.place ? a.place < b.place : a.p < b.p;
    });
    for (size_t i = 0, j; i < log.size(); i = j) {
        allocation &a = *find_allocation(log[i].p);
        traffic &t = (log[i].write ? r.writes : r.reads)[a.label];
        std::vector<uint32_t> &counted = a.counted[log[i].write];
        uintptr_t end = 0, last = UINTPTR_MAX;
        if (counted.empty()) counted.resize((a.end - a.start) / 32 + 2);
        t.requests++;
        for (j = i; j < log.size() && log[j].warp == log[i].warp && log[j].place == log[i].place; j++) {
            uintptr_t from = std::max(log[j].p, end), to = log[j].p + log[j].bytes;
            if (to <= end) continue;
            t.bytes += to - from;
            for (uintptr_t s = from / 32; s <= (to - 1) / 32; s++) {
                uint32_t &stamp = counted[s - a.start / 32];
                if (s != last) t.sectors++, last = s;
                if (stamp != launch_number) t.distinct++, stamp = launch_number;
            }
            end = to;
        }
    }
    log.clear();
}

void access_start_block()
{
    block_number++;
    if (cells.empty()) cells.resize(memory.shared_end - memory.shared);
    if (!is_shared((uintptr_t)smem)) die("the device is used by another thread than the program's first");
    memset(smem, 0xff, running->shared);
}

void access_end_block()
{
    if (!options().counters.empty()) count_requests();
}

/* ---- all memory -------------------------------------------------------------------------------------------------- */

static void access_global(allocation &a, uintptr_t p, size_t bytes, bool write, bool atomic, const void *pc)
{
    const char *how = atomic ? "atomic" : write ? "write" : "read";
    if (a.freed) die_at(pc, "use after free: %s of %zu bytes", how, bytes);
    if (p < a.start || p + bytes > a.end)
        die_at(pc, "out-of-bounds %s of %zu bytes at byte %zd of %zu of the memory allocated at %s:%d", how, bytes,
               p - a.start, a.end - a.start, a.at.file, a.at.line);
    if (a.written.empty()) a.written.resize((a.end - a.start) / 64 + 1);
    uint32_t *stamp = &a.written[(p - a.start) / 64];
    if (!current->dependency_met) {
        if (write) die_at(pc, "a %s before cudaGridDependencySynchronize", how);
        if (*stamp >= first_in_flight && *stamp != launch_number)
            die_at(pc, "a read, before cudaGridDependencySynchronize, of what a kernel in flight writes");
    }
    if (write) *stamp = launch_number;
    if (!options().counters.empty()) note(p, bytes, write, pc);
}

void access(uintptr_t p, size_t bytes, bool write, bool atomic, const void *pc)
{
    if (!current) return;              /* the host's code: pages guard it */
    if (p - (uintptr_t)current->stack < STACK_BYTES) return;
    const ranges &m = memory;
    if (p >= m.shared && p < m.shared_end) access_shared(p, bytes, write, atomic, pc);
    else if (p >= m.data && p < m.data_end) return;
    else if (allocation *a = find_allocation(p)) access_global(*a, p, bytes, write, atomic, pc);
    else if (p - (uintptr_t)running->arguments.get() < running->arguments->bytes && !write) return;
    else die_at(pc, "%s of %zu bytes at %#zx, which is not the device's memory", write ? "write" : "read", bytes, p);
}

void touch(const void *p, size_t bytes, bool write, bool atomic)
{
    const void *pc = __builtin_return_address(0);
    if ((uintptr_t)p % bytes) die_at(pc, "misaligned atomic of %zu bytes", bytes);
    access((uintptr_t)p, bytes, write, atomic, pc);
}

}

/* ---- what the compiler calls ------------------------------------------------------------------------------------- */

using emulator::access;

extern "C" {
void __tsan_init() {}
#define ACCESS(n)                                                                                                      \
    void __tsan_read##n(void *p) { access((uintptr_t)p, n, false, false, __builtin_return_address(0)); }               \
    void __tsan_write##n(void *p) { access((uintptr_t)p, n, true, false, __builtin_return_address(0)); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void *p, size_t n) { access((uintptr_t)p, n, false, false, __builtin_return_address(0)); }
void __tsan_write_range(void *p, size_t n) { access((uintptr_t)p, n, true, false, __builtin_return_address(0)); }

struct ubsan_place { const char *file; uint32_t line, column; };
struct ubsan_mismatch { ubsan_place at; void *type; unsigned char log_alignment, kind; };
struct ubsan_bounds { ubsan_place at; void *array_type, *index_type; };
void __ubsan_handle_type_mismatch_v1(ubsan_mismatch *d, uintptr_t p)
{
    emulator::fault({ d->at.file, (int)d->at.line }, "misaligned access at %#zx, which needs a multiple of %d", p,
                    1 << d->log_alignment);
}
void __ubsan_handle_out_of_bounds(ubsan_bounds *d, uintptr_t i)
{
    emulator::fault({ d->at.file, (int)d->at.line }, "index %zd lies outside of its array", (ssize_t)i);
}
}
