/* device.cpp - the runtime's API: memory, streams, events, graphs. */
#include "emulator.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <deque>

namespace emulator {

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* An allocation ends, as near as its alignment lets it, at a page that cannot be touched. What was freed is not used
 * again. */
constexpr size_t PAGE = 4096, ALIGNMENT = 256;
uintptr_t arena;
allocation **slot_owner;
static size_t slots_used;
static std::deque<allocation> all;                 /* pointers to its elements stay good */
static size_t in_use, pinned_in_use;               /* bytes of device memory, of the host's */
static int live_objects[4];                        /* streams, events, graphs, graph instances */
static const char *const object_names[4] = { "streams", "events", "graphs", "graph instances" };
static int opened;
static bool in_host_function;

static const char *kind(const allocation &a) { return a.pinned ? "host" : "device"; }

allocation *find_registered(uintptr_t p)
{
    for (allocation &a : all)
        if (a.map == 0 && !a.freed && p >= a.start && p < a.end) return &a;
    return nullptr;
}

static void protect(const allocation &a, int how)
{
    if (mprotect((void *)a.map, a.map_end - a.map, how)) die("mprotect failed");
}

static void protect_device(int how)
{
    for (const allocation &a : all)
        if (!a.pinned && !a.freed) protect(a, how);
}

device_open::device_open()
{
    if (!opened++) protect_device(PROT_READ | PROT_WRITE);
}

device_open::~device_open()
{
    if (!--opened) protect_device(PROT_NONE);
}

void check_device(const void *p, size_t bytes, const char *what)
{
    if (bytes == 0) return;
    const allocation *a = find_allocation((uintptr_t)p);
    if (!a) die("%s: %p is not the device's memory", what, p);
    if (a->freed) die("%s: use after free", what);
    if ((uintptr_t)p < a->start || (uintptr_t)p + bytes > a->end)
        die("%s: %zu bytes at byte %zd of an allocation of %zu bytes", what, bytes, (uintptr_t)p - a->start,
            a->end - a->start);
}

/* A host pointer of the API: not the device's memory. */
static void check_host(const void *p, const char *what)
{
    const allocation *a = find_allocation((uintptr_t)p);
    if (a && !a->pinned) die("%s: %p is the device's memory, not the host's", what, p);
}

static void on_signal(int, siginfo_t *info, void *)
{
    uintptr_t p = (uintptr_t)info->si_addr;
    const allocation *a = find_allocation(p);
    if (current && p - (uintptr_t)current->stack + PAGE < PAGE) die("the thread's stack overflows");
    if (!a) die("invalid access to memory at %#zx", p);
    if (a->freed) die("use after free at %#zx", p);
    if (current) die("out-of-bounds access at byte %zd of %zu", p - a->start, a->end - a->start);
    die("the host touches %s memory, byte %zd of %zu allocated at %s:%d", kind(*a), p - a->start, a->end - a->start,
        a->at.file, a->at.line);
}

static void at_end()
{
    for (const allocation &a : all)
        if (!a.freed && a.map)
            die("%zu bytes of %s memory are not freed (allocated at %s:%d)", a.end - a.start, kind(a), a.at.file,
                a.at.line);
    for (int i = 0; i < 4; i++)
        if (live_objects[i]) die("%d %s are not destroyed", live_objects[i], object_names[i]);
    write_counters();
}

static void start()
{
    static bool started;
    if (started) return;
    started = true;
    void *p = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) die("no address space for device memory");
    arena = ((uintptr_t)p + SLOT) / SLOT * SLOT;   /* a page at least lies before it */
    slot_owner = (allocation **)calloc(ARENA / SLOT, sizeof *slot_owner);
    if (!slot_owner) die("no memory");
    static char stack[64 << 10];
    stack_t alternate = {};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, NULL);
    struct sigaction s = {};
    s.sa_sigaction = on_signal;
    s.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &s, NULL);
    sigaction(SIGBUS, &s, NULL);
    atexit(at_end);
}

/* Fresh memory is full of NaN, but for the middle of what is so large that it would cost time. */
static void allocate(void **out, size_t bytes, bool pinned, place at)
{
    constexpr size_t FILL = 32 << 20;
    start();
    size_t pages = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, mapped = (pages + PAGE - 1) / PAGE * PAGE;
    size_t slots = (mapped + PAGE + SLOT - 1) / SLOT;
    if ((slots_used + slots + 1) * SLOT > ARENA) die("no address space left");
    allocation a = {};
    a.map = arena + slots_used * SLOT;
    a.map_end = a.map + mapped;
    a.start = a.map_end - pages;
    a.end = a.start + bytes;
    a.pinned = pinned;
    a.at = at;
    a.label = std::string(strrchr(at.file, '/') ? strrchr(at.file, '/') + 1 : at.file) + ":" + std::to_string(at.line);
    all.push_back(a);
    std::fill_n(slot_owner + slots_used, slots, &all.back());
    slots_used += slots;
    madvise((void *)a.map, mapped, MADV_HUGEPAGE);             /* less to do when it is protected */
    protect(a, PROT_READ | PROT_WRITE);
    memset((void *)a.start, 0xff, std::min(bytes, FILL));
    if (bytes > FILL) memset((void *)(a.end - std::min(bytes - FILL, FILL)), 0xff, std::min(bytes - FILL, FILL));
    if (!pinned && !opened) protect(a, PROT_NONE);
    *out = (void *)a.start;
}

static allocation &take_back(void *p, bool pinned, const char *what)
{
    allocation *a = find_allocation((uintptr_t)p);
    if (!a || a->start != (uintptr_t)p || a->pinned != pinned) die("%s: %p was not allocated so", what, p);
    if (a->freed) die("%s: %p was freed before", what, p);
    a->freed = true;
    if (a->map) {
        protect(*a, PROT_NONE);
        madvise((void *)a->map, a->map_end - a->map, MADV_DONTNEED);
    }
    std::vector<uint32_t>().swap(a->written);
    return *a;
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

bool fails()
{
    static long calls;
    if (in_host_function) die("a call of the API in a function of cudaLaunchHostFunc");
    return ++calls == options().fail;
}
}

using namespace emulator;

struct emulator_graph { std::vector<std::function<void()>> steps; };
struct emulator_graph_exec { std::vector<std::function<void()>> steps; };
struct emulator_stream { std::deque<std::function<void()>> queue; emulator_graph *capture; bool blocking; };
struct emulator_event {
    emulator_stream *stream;
    emulator_graph *capture;           /* recorded while this graph is captured */
    uint64_t recorded, done;           /* counts */
    double seconds;
};

static emulator_stream legacy;         /* the stream NULL: waits for all others, and they for it */
static std::vector<emulator_stream *> streams;
static emulator_graph *capturing;      /* by any stream */
static cudaError_t last_error;

static cudaError_t given(cudaError_t e)
{
    if (e) last_error = e;
    return e;
}
#define MAY_FAIL() do { if (emulator::fails()) return given(cudaErrorUnknown); } while (0)

static void step(emulator_stream *s)
{
    device_open open;
    std::function<void()> what = std::move(s->queue.front());
    s->queue.pop_front();
    what();
}
static void drain(emulator_stream *s)
{
    device_open open;
    while (!s->queue.empty()) step(s);
}
static void drain_all()
{
    device_open open;
    for (emulator_stream *s : streams) drain(s);
    drain(&legacy);
}
static void no_capture(const char *call)
{
    if (capturing) die("%s while a stream is being captured", call);
}

void emulator::enqueue(cudaStream_t s, std::function<void()> what)
{
    start();
    if (s && s->capture) {
        s->capture->steps.push_back(std::move(what));
        return;
    }
    if (!s) {
        no_capture("use of the default stream");
        for (emulator_stream *other : streams)
            if (other->blocking) drain(other);
        s = &legacy;
    } else if (s->blocking) {
        drain(&legacy);
    }
    s->queue.push_back(std::move(what));
}

cudaError_t emulator::launch(const cudaLaunchConfig_t *c, const void *kernel, bound *arguments)
{
    work w = { kernel, std::shared_ptr<bound>(arguments, [](bound *b) { b->drop(b); }), c->gridDim, c->blockDim,
               c->dynamicSmemBytes, false };
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
            w.dependent = c->attrs[i].val.programmaticStreamSerializationAllowed != 0;
    MAY_FAIL();
    check_launch(w);
    enqueue(c->stream, [w] { run(w); });
    return cudaSuccess;
}

static void drop_from(std::vector<emulator_stream *> &list, emulator_stream *s)
{
    list.erase(std::find(list.begin(), list.end(), s));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    MAY_FAIL();
    start();
    *s = new emulator_stream{ {}, nullptr, !(flags & cudaStreamNonBlocking) };
    streams.push_back(*s);
    live_objects[0]++;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithFlags(s, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int)
{
    return cudaStreamCreateWithFlags(s, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    drain(s);
    drop_from(streams, s);
    delete s;
    live_objects[0]--;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    MAY_FAIL();
    no_capture("cudaStreamSynchronize");
    if (s) drain(s);
    else drain_all();
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s)
{
    emulator_stream *q = s ? s : &legacy;
    if (q->queue.empty()) return cudaSuccess;
    step(q);
    return cudaErrorNotReady;
}
/* The host's function sees no device memory. */
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *user)
{
    MAY_FAIL();
    enqueue(s, [=] {
        first_in_flight = launch_number + 1;
        protect_device(PROT_NONE);
        in_host_function = true;
        f(user);
        in_host_function = false;
        protect_device(PROT_READ | PROT_WRITE);
        records["functions of the host"].launches++;
    });
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize()
{
    MAY_FAIL();
    no_capture("cudaDeviceSynchronize");
    drain_all();
    return cudaSuccess;
}
cudaError_t cudaDeviceReset()
{
    drain_all();
    return cudaSuccess;
}

/* ---- events ------------------------------------------------------------------------------------------------------ */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned)
{
    MAY_FAIL();
    start();
    *e = new emulator_event{};
    live_objects[1]++;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, cudaEventDefault); }

static void finish(cudaEvent_t e, uint64_t count)
{
    device_open open;
    while (e->done < count) {
        if (e->stream->queue.empty()) die("an event waits for itself");
        step(e->stream);
    }
}
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    finish(e, e->recorded);
    delete e;
    live_objects[1]--;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    MAY_FAIL();
    e->capture = s ? s->capture : nullptr;
    if (e->capture) return cudaSuccess;            /* steps of a graph run in the order of their capture */
    if (e->done < e->recorded && e->stream != (s ? s : &legacy)) finish(e, e->recorded);
    e->stream = s ? s : &legacy;
    uint64_t count = ++e->recorded;
    enqueue(s, [e, count] {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        e->seconds = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
        e->done = count;
    });
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    MAY_FAIL();
    if (e->capture) {
        if (s) s->capture = e->capture;
        return cudaSuccess;
    }
    if (s && s->capture) die("cudaStreamWaitEvent: a stream being captured waits for what is not in the graph");
    uint64_t count = e->recorded;
    enqueue(s, [e, count] { finish(e, count); });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    MAY_FAIL();
    no_capture("cudaEventSynchronize");
    finish(e, e->recorded);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    if (e->done >= e->recorded) return cudaSuccess;
    step(e->stream);
    return cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    if (from->done < from->recorded || to->done < to->recorded) return cudaErrorNotReady;
    *ms = (float)(1e3 * (to->seconds - from->seconds));
    return cudaSuccess;
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode)
{
    MAY_FAIL();
    if (!s) die("cudaStreamBeginCapture: the default stream cannot be captured");
    no_capture("cudaStreamBeginCapture");
    s->capture = capturing = new emulator_graph;
    live_objects[2]++;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g)
{
    if (!s || !s->capture) die("cudaStreamEndCapture: the stream is not being captured");
    *g = s->capture;
    for (emulator_stream *other : streams) other->capture = nullptr;
    capturing = nullptr;
    MAY_FAIL();
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *status)
{
    *status = s && s->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long)
{
    MAY_FAIL();
    *x = new emulator_graph_exec{ g->steps };
    live_objects[3]++;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s)
{
    MAY_FAIL();
    if (s && s->capture) die("cudaGraphLaunch in a capture");
    for (const auto &what : x->steps) enqueue(s, what);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    delete g;
    live_objects[2]--;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x)
{
    delete x;
    live_objects[3]--;
    return cudaSuccess;
}

/* ---- memory: the calls ------------------------------------------------------------------------------------------- */

cudaError_t emulator_malloc(void **p, size_t bytes, place at)
{
    *p = nullptr;
    MAY_FAIL();
    no_capture("cudaMalloc");
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (bytes == 0) return cudaSuccess;
    if (rounded < bytes || rounded > options().memory - in_use) return given(cudaErrorMemoryAllocation);
    in_use += rounded;
    allocate(p, bytes, false, at);
    return cudaSuccess;
}
cudaError_t emulator_malloc_host(void **p, size_t bytes, place at)
{
    *p = nullptr;
    MAY_FAIL();
    if (bytes > options().pinned - pinned_in_use) return given(cudaErrorMemoryAllocation);
    pinned_in_use += bytes;
    if (bytes) allocate(p, bytes, true, at);
    return cudaSuccess;
}
void emulator_label(const void *p, const char *label)
{
    if (allocation *a = find_allocation((uintptr_t)p)) a->label = label;
}
cudaError_t cudaFree(void *p)
{
    if (!p) return cudaSuccess;
    no_capture("cudaFree");
    drain_all();
    allocation &a = take_back(p, false, "cudaFree");
    in_use -= (a.end - a.start + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *p)
{
    if (!p) return cudaSuccess;
    drain_all();
    allocation &a = take_back(p, true, "cudaFreeHost");
    pinned_in_use -= a.end - a.start;
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned)
{
    MAY_FAIL();
    start();
    allocation a = {};
    a.start = (uintptr_t)p;
    a.end = a.start + bytes;
    a.pinned = true;
    a.at = { "cudaHostRegister", 0 };
    a.label = "registered";
    all.push_back(a);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p)
{
    drain_all();
    take_back(p, true, "cudaHostUnregister");
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
    MAY_FAIL();
    *total = options().memory;
    *free = *total - in_use;
    return cudaSuccess;
}

static bool on_device(const void *p)
{
    const allocation *a = find_allocation((uintptr_t)p);
    return a && !a->pinned;
}

/* Checks both ends of a copy; true when one of them is pageable memory of the host's. */
static bool check_copy(void *dst, const void *src, size_t bytes, cudaMemcpyKind k)
{
    if (k == cudaMemcpyDefault)
        k = on_device(dst) ? on_device(src) ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice
                           : on_device(src) ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
    bool to = k == cudaMemcpyHostToDevice || k == cudaMemcpyDeviceToDevice;
    bool from = k == cudaMemcpyDeviceToHost || k == cudaMemcpyDeviceToDevice;
    if (to) check_device(dst, bytes, "destination of a copy");
    else check_host(dst, "destination of a copy");
    if (from) check_device(src, bytes, "source of a copy");
    else check_host(src, "source of a copy");
    return (!to && !find_allocation((uintptr_t)dst)) || (!from && !find_allocation((uintptr_t)src));
}

/* The bytes that a copy writes count as written by no kernel. */
static void copied(void *dst, const void *src, size_t bytes)
{
    if (on_device(dst)) check_device(dst, bytes, "destination of a copy");
    if (on_device(src)) check_device(src, bytes, "source of a copy");
    memmove(dst, src, bytes);
    if (on_device(src) && !on_device(dst)) {
        kernel_record &r = records["copies to the host"];
        r.launches++;
        r.reads[find_allocation((uintptr_t)src)->label].bytes += bytes;
    }
    first_in_flight = launch_number + 1;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t s)
{
    MAY_FAIL();
    if (bytes == 0) return cudaSuccess;
    if (!check_copy(dst, src, bytes, kind)) {
        enqueue(s, [=] { copied(dst, src, bytes); });
    } else if (on_device(dst)) {       /* the host's bytes are taken at once */
        auto taken = std::make_shared<std::vector<unsigned char>>((const unsigned char *)src,
                                                                  (const unsigned char *)src + bytes);
        enqueue(s, [=] { copied(dst, taken->data(), bytes); });
    } else {
        no_capture("a copy to pageable memory");
        enqueue(s, [=] { copied(dst, src, bytes); });
        drain(s ? s : &legacy);
    }
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind)
{
    no_capture("cudaMemcpy");
    cudaError_t e = cudaMemcpyAsync(dst, src, bytes, kind, nullptr);
    if (!e) drain(&legacy);
    return e;
}
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t s)
{
    if (width > dst_pitch || width > src_pitch) die("cudaMemcpy2DAsync: the width exceeds a pitch");
    for (size_t y = 0; y < height; y++) {
        cudaError_t e = cudaMemcpyAsync((char *)dst + y * dst_pitch, (const char *)src + y * src_pitch, width, kind, s);
        if (e) return e;
    }
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s)
{
    MAY_FAIL();
    check_device(p, bytes, "cudaMemset");
    enqueue(s, [=] {
        check_device(p, bytes, "cudaMemset");
        memset(p, value, bytes);
        first_in_flight = launch_number + 1;
    });
    return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }

/* ---- the device -------------------------------------------------------------------------------------------------- */

const char *cudaGetErrorName(cudaError_t e)
{
    switch (e) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorUnknown: return "cudaErrorUnknown";
    }
    return "unrecognized error code";
}
const char *cudaGetErrorString(cudaError_t e)
{
    switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorUnknown: return "unknown error";
    }
    return "unrecognized error code";
}
cudaError_t cudaGetLastError()
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = 0;
    if (options().driver < CUDART_VERSION) return given(cudaErrorInsufficientDriver);
    if (options().devices < 1) return given(cudaErrorNoDevice);
    *n = options().devices;
    return cudaSuccess;
}
static int device_now;
static cudaError_t find_device(int device)
{
    int n;
    cudaError_t e = cudaGetDeviceCount(&n);
    return e ? e : device < 0 || device >= n ? given(cudaErrorInvalidDevice) : cudaSuccess;
}
/* What a process has allocated lies on one device. */
cudaError_t cudaSetDevice(int device)
{
    cudaError_t e = find_device(device);
    if (e) return e;
    if (device != device_now && (in_use || !streams.empty())) die("cudaSetDevice: another device is in use");
    device_now = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device)
{
    *device = device_now;
    return cudaSuccess;
}
cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version)
{
    *version = options().devices < 1 ? 0 : options().driver;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device)
{
    cudaError_t e = find_device(device);
    if (e) return e;
    *p = cudaDeviceProp{ "the emulator", options().memory, STATIC_SHARED, options().shared, SM_SHARED, 9, 0, 4,
                         (int)MOST_THREADS, 1 << 20, (int)WARP, 65536, 0, options().first + device + 1, 0 };
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e) return e;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrIntegrated: *value = 0; break;
    case cudaDevAttrCanMapHostMemory: *value = 1; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    default: return given(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
