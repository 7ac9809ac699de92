/* cases.cu - what the emulator must run, and what it must catch. `cases NAME` runs one case: those that are right print
 * "ok" or a number that must not depend on the seed; in those with a planted fault the emulator ends the program. */
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <stdio.h>
#include <stdlib.h>

extern __shared__ unsigned char smem[];

static void must(bool ok, const char *what)
{
    if (ok) return;
    printf("wrong: %s\n", what);
    exit(1);
}
static void must(cudaError_t e, const char *what) { must(e == cudaSuccess, what); }

template <class T> static T *device(size_t n)
{
    T *p;
    must(cudaMalloc(&p, n * sizeof *p), "cudaMalloc");
    return p;
}

template <class... P, class... A>
static void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, A... args)
{
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = shared;
    must(cudaLaunchKernelEx(&c, kernel, args...), "launch");
}

/* The first of n ints that a kernel left. */
static int result(int *p)
{
    int r;
    must(cudaMemcpy(&r, p, sizeof r, cudaMemcpyDeviceToHost), "copy");
    must(cudaFree(p), "free");
    return r;
}

/* ---- sums over a block, with and without faults ------------------------------------------------------------------ */

/* out = sum of the threads' numbers, by a tree in shared memory. */
enum { NO_FAULT, NO_FIRST_BARRIER, NO_BARRIER_IN_LOOP, BARRIER_IN_BRANCH, ENDS_EARLY, TWO_BARRIERS };
template <int FAULT> __global__ void tree(int *out)
{
    __shared__ int part[128];
    int t = (int)threadIdx.x;
    part[t] = t;
    if (FAULT == BARRIER_IN_BRANCH) {
        if (t < 64) __syncthreads();
        else __syncwarp();
    } else if (FAULT == TWO_BARRIERS) {
        if (t < 64) __syncthreads();
        else
            __syncthreads();
    } else if (FAULT == ENDS_EARLY) {
        if (t == 127) return;
        __syncthreads();
    } else if (FAULT != NO_FIRST_BARRIER) {
        __syncthreads();
    }
    for (int n = 64; n; n /= 2) {
        if (t < n) part[t] += part[t + n];
        if (FAULT != NO_BARRIER_IN_LOOP) __syncthreads();
    }
    if (t == 0) *out = part[0];
}
template <int FAULT> static void run_tree()
{
    int *out = device<int>(1);
    launch(tree<FAULT>, 1, 128, 0, out);
    printf("%d\n", result(out));
}

/* The last block to finish adds what all left, in a fixed order. */
__global__ void last_block(float *parts, unsigned *count, int *out)
{
    __shared__ unsigned place;
    int t = (int)threadIdx.x;
    float v = 1.0f / (float)(1 + blockIdx.x * blockDim.x + threadIdx.x);
    for (int n = 16; n; n /= 2) v += __shfl_xor_sync(~0u, v, n);
    if (t == 0) {
        parts[blockIdx.x] = v;
        __threadfence();
        place = atomicAdd(count, 1u);
    }
    __syncthreads();
    if (place != gridDim.x - 1 || t) return;
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x; i++) sum += __ldcg(parts + i);
    *out = __float_as_int(sum);
}
static void run_last_block()
{
    float *parts = device<float>(50);
    unsigned *count = device<unsigned>(1);
    int *out = device<int>(1);
    must(cudaMemset(count, 0, sizeof *count), "memset");
    launch(last_block, 50, 32, 0, parts, count, out);
    printf("%08x\n", (unsigned)result(out));
    must(cudaFree(parts), "free");
    must(cudaFree(count), "free");
}

/* A sum that depends on the order of the threads: float atomics. */
__global__ void float_atomics(float *sum)
{
    atomicAdd(sum, 1.0f / (float)(1 + blockIdx.x * blockDim.x + threadIdx.x));
}
static void run_float_atomics()
{
    int *out = device<int>(1);
    must(cudaMemset(out, 0, sizeof *out), "memset");
    launch(float_atomics, 8, 64, 0, (float *)out);
    printf("%08x\n", (unsigned)result(out));
}

/* ---- warps ------------------------------------------------------------------------------------------------------- */

enum { LANE_ENDS = 1, LANE_NOT_IN_MASK, LANE_READ_NOT_IN_MASK, NO_SYNCWARP, DIFFERENT_CALLS };
template <int FAULT> __global__ void warp(int *out)
{
    int lane = (int)threadIdx.x;
    if (FAULT == LANE_ENDS && lane == 31) return;
    int v = lane;
    if (FAULT == LANE_NOT_IN_MASK) {
        v = __shfl_sync(0xffffu, v, 3);
    } else if (FAULT == LANE_READ_NOT_IN_MASK) {
        if (lane < 16) v = __shfl_sync(0xffffu, v, 20);
    } else if (FAULT == DIFFERENT_CALLS) {
        if (lane < 16) v += __shfl_xor_sync(~0u, v, 1);
        else v += __any_sync(~0u, v);
    } else {
        for (int n = 16; n; n /= 2) v += __shfl_xor_sync(~0u, v, n);
    }
    int *s = (int *)smem;
    s[lane] = v;
    if (FAULT != NO_SYNCWARP) __syncwarp();
    if (lane == 0) *out = s[31];
}
template <int FAULT> static void run_warp()
{
    int *out = device<int>(1);
    launch(warp<FAULT>, 1, 32, 128, out);
    printf("%d\n", result(out));
}

__global__ void warp_calls(int *bad)
{
    int l = (int)(threadIdx.x & 31);
    if (__shfl_up_sync(~0u, l, 3) != (l < 3 ? l : l - 3)) atomicOr(bad, 1);
    if (__shfl_down_sync(~0u, l, 3, 8) != (l % 8 > 4 ? l : l + 3)) atomicOr(bad, 2);
    if (__shfl_sync(~0u, (double)l, 5, 8) != l / 8 * 8 + 5) atomicOr(bad, 4);
    if (__shfl_xor_sync(~0u, 1ll << l, 1) != 1ll << (l ^ 1)) atomicOr(bad, 8);
    if (__ballot_sync(~0u, l % 3 == 0) != 0x49249249u) atomicOr(bad, 16);
    if (!__any_sync(~0u, l == 7) || __any_sync(~0u, l > 40)) atomicOr(bad, 32);
    if (__all_sync(~0u, l != 7) || !__all_sync(~0u, l < 40)) atomicOr(bad, 64);
    if (__reduce_add_sync(~0u, l) != 496 || __reduce_max_sync(~0u, l - 50) != -19) atomicOr(bad, 128);
    if (__reduce_min_sync(~0u, (unsigned)l - 1) != 0 || __reduce_or_sync(~0u, 1u << l) != ~0u) atomicOr(bad, 256);
    if (l % 2 && __reduce_add_sync(0xaaaaaaaau, l) != 256) atomicOr(bad, 512);
    if (__syncthreads_count(l == 0) != 2 || !__syncthreads_or(threadIdx.x == 40) || __syncthreads_and(l > 0))
        atomicOr(bad, 1024);
    __half2 h = __floats2half2_rn((float)l, 1);
    if (__low2float(__shfl_sync(~0u, h, 9)) != 9) atomicOr(bad, 2048);
}
static void run_warp_calls()
{
    int *bad = device<int>(1);
    must(cudaMemset(bad, 0, sizeof *bad), "memset");
    launch(warp_calls, 1, 64, 0, bad);
    printf("%d\n", result(bad));
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

__global__ void read_int(const int *p, long i, int *out) { *out = p[i]; }
__global__ void read_four(const int *p, long i, int *out)
{
    uint4 v = *(const uint4 *)(p + i);
    *out = (int)(v.x + v.w);
}
__global__ void write_int(int *p, long i) { p[i] = 7; }
__global__ void index_array(const int *p, int *out)
{
    __shared__ int a[8];
    a[threadIdx.x] = p[0];
    *out = a[threadIdx.x + p[0]];
}
__global__ void shared_end(int *out)
{
    ((int *)smem)[threadIdx.x] = 1;
    *out = 1;
}
__global__ void shared_unwritten(int *out) { *out = ((int *)smem)[3]; }
__global__ void local_array(const int *p, int *out)
{
    int a[4] = { 1, 2, 3, 4 };
    *out = a[p[0]];
}

static void run_memory(void (*kernel)(const int *, long, int *), size_t ints, long i)
{
    int *p = device<int>(ints), *out = device<int>(1);
    must(cudaMemset(p, 0, ints * sizeof *p), "memset");
    launch(kernel, 1, 1, 0, (const int *)p, i, out);
    printf("%d\n", result(out));
    must(cudaFree(p), "free");
}

static void out_of_bounds_write()
{
    int *p = device<int>(10);
    launch(write_int, 1, 1, 0, p, -1l);
    must(cudaFree(p), "free");
}
static void use_after_free()
{
    int *p = device<int>(10), *out = device<int>(1);
    must(cudaFree(p), "free");
    launch(read_int, 1, 1, 0, (const int *)p, 0l, out);
    result(out);
}
static void host_memory()
{
    static int x;
    int *p = (int *)malloc(40), *out = device<int>(1);
    launch(read_int, 1, 1, 0, (const int *)p, (long)x, out);
    result(out);
}
static void host_reads_device()
{
    int *p = device<int>(10);
    printf("%d\n", *(volatile int *)p);
}
static void leak() { device<int>(10); }
static void freed_twice()
{
    int *p = device<int>(10);
    cudaFree(p);
    cudaFree(p);
}
static void copy_too_long()
{
    int *p = device<int>(10), a[11] = {};
    cudaMemcpy(p, a, sizeof a, cudaMemcpyHostToDevice);
}
static void array_index(void (*kernel)(const int *, int *), int i)
{
    int *p = device<int>(1), *out = device<int>(1);
    must(cudaMemcpy(p, &i, sizeof i, cudaMemcpyHostToDevice), "copy");
    launch(kernel, 1, 1, 0, (const int *)p, out);
    result(out);
    must(cudaFree(p), "free");
}
static void shared_memory(void (*kernel)(int *), unsigned threads, size_t bytes)
{
    int *out = device<int>(1);
    launch(kernel, 1, threads, bytes, out);
    printf("%d\n", result(out));
}
__global__ void large_static(int *out)
{
    __shared__ int a[13000];
    a[threadIdx.x] = 1;
    __syncthreads();
    *out = a[threadIdx.x];
}
static void opted_in(int bytes)
{
    must(cudaFuncSetAttribute(shared_end, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "attribute");
    shared_memory(shared_end, 1, (size_t)bytes);
}

/* ---- asynchronous copies ----------------------------------------------------------------------------------------- */

enum { NO_WAIT = 1, NO_BARRIER, WAIT_FOR_ONE };
template <int FAULT> __global__ void pipeline(const int *src, int *out)
{
    int t = (int)threadIdx.x, sum = 0;
    int4 *s = (int4 *)smem;
    __pipeline_memcpy_async(s + t, src + 4 * t, 16);
    __pipeline_commit();
    __pipeline_memcpy_async(s + 64 + t, src + 256 + 4 * t, 16);
    __pipeline_commit();
    if (FAULT != NO_WAIT) __pipeline_wait_prior(FAULT == WAIT_FOR_ONE ? 1 : 0);
    if (FAULT != NO_BARRIER) __syncthreads();
    if (t == 0) {
        for (int i = 0; i < 512; i++) sum += ((int *)smem)[i];
        *out = sum;
    }
}
template <int FAULT> static void run_pipeline()
{
    int *src = device<int>(512), *out = device<int>(1), a[512];
    for (int i = 0; i < 512; i++) a[i] = i;
    must(cudaMemcpy(src, a, sizeof a, cudaMemcpyHostToDevice), "copy");
    launch(pipeline<FAULT>, 1, 64, 2048, (const int *)src, out);
    printf("%d\n", result(out));
    must(cudaFree(src), "free");
}

/* ---- dependent launches ------------------------------------------------------------------------------------------ */

__global__ void producer(int *p) { p[threadIdx.x] = (int)threadIdx.x; }
__global__ void consumer(const int *p, int *out, bool waits)
{
    if (waits) cudaGridDependencySynchronize();
    int v = p[threadIdx.x];
    cudaGridDependencySynchronize();
    if (threadIdx.x == 9) *out = v;
}
static void dependent(bool waits)
{
    int *p = device<int>(32), *out = device<int>(1);
    cudaLaunchAttribute a;
    a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.blockDim = 32;
    must(cudaLaunchKernelEx(&c, producer, p), "launch");
    c.attrs = &a;
    c.numAttrs = 1;
    must(cudaLaunchKernelEx(&c, consumer, (const int *)p, out, waits), "launch");
    printf("%d\n", result(out));
    must(cudaFree(p), "free");
}

/* ---- streams and graphs ------------------------------------------------------------------------------------------ */

__global__ void increment(int *p) { ++*p; }
static void graph()
{
    cudaStream_t s, other;
    cudaEvent_t fork, join;
    cudaGraph_t g;
    cudaGraphExec_t x;
    int *p = device<int>(1), *pinned;
    cudaLaunchConfig_t c = {};
    must(cudaMallocHost(&pinned, sizeof *pinned), "pinned");
    must(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream");
    must(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "stream");
    must(cudaEventCreate(&fork), "event");
    must(cudaEventCreate(&join), "event");
    must(cudaMemsetAsync(p, 0, sizeof *p, s), "memset");
    must(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), "capture");
    c.stream = s;
    must(cudaLaunchKernelEx(&c, increment, p), "launch");
    must(cudaEventRecord(fork, s), "record");
    must(cudaStreamWaitEvent(other, fork), "wait");
    c.stream = other;
    must(cudaLaunchKernelEx(&c, increment, p), "launch");
    must(cudaEventRecord(join, other), "record");
    must(cudaStreamWaitEvent(s, join), "wait");
    must(cudaStreamEndCapture(s, &g), "end");
    must(cudaGraphInstantiate(&x, g, 0), "instantiate");
    for (int i = 0; i < 5; i++) must(cudaGraphLaunch(x, s), "launch");
    must(cudaMemcpyAsync(pinned, p, sizeof *p, cudaMemcpyDeviceToHost, s), "copy");
    *pinned = -1;                      /* nothing has run yet: this would be seen otherwise */
    must(*pinned == -1, "work runs before anybody waits for it");
    must(cudaStreamSynchronize(s), "synchronize");
    printf("%d\n", *pinned);
    cudaGraphExecDestroy(x);
    cudaGraphDestroy(g);
    cudaEventDestroy(fork);
    cudaEventDestroy(join);
    cudaStreamDestroy(s);
    cudaStreamDestroy(other);
    cudaFree(p);
    cudaFreeHost(pinned);
}
/* A stream that does not wait for the other's event uses what is not there yet. */
static void event(bool waits)
{
    cudaStream_t a, b;
    cudaEvent_t e;
    int *p = device<int>(1), *pinned;
    cudaLaunchConfig_t c = {};
    must(cudaMallocHost(&pinned, sizeof *pinned), "pinned");
    must(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking), "stream");
    must(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking), "stream");
    must(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "event");
    must(cudaMemset(p, 0, sizeof *p), "memset");
    must(cudaDeviceSynchronize(), "synchronize");
    c.stream = a;
    must(cudaLaunchKernelEx(&c, increment, p), "launch");
    must(cudaEventRecord(e, a), "record");
    if (waits) must(cudaStreamWaitEvent(b, e, 0), "wait");
    must(cudaMemcpyAsync(pinned, p, sizeof *p, cudaMemcpyDeviceToHost, b), "copy");
    must(cudaStreamSynchronize(b), "synchronize");
    printf("%d\n", *pinned);
    cudaEventDestroy(e);
    cudaStreamDestroy(a);
    cudaStreamDestroy(b);
    cudaFree(p);
    cudaFreeHost(pinned);
}
static void capture_waits()
{
    cudaStream_t s;
    must(cudaStreamCreate(&s), "stream");
    must(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), "capture");
    cudaStreamSynchronize(s);
}

/* A graph of a kernel, a copy to the host, the host's own function and a copy back; `what` is a wrong function. */
static int *of_device;
static void twice(void *pinned) { *(int *)pinned *= 2; }
static void touches_device(void *pinned) { *(int *)pinned = *of_device; }
static void calls(void *) { cudaMalloc(&of_device, 4); }
static void host_function(void (*what)(void *))
{
    cudaStream_t s;
    cudaGraph_t g;
    cudaGraphExec_t x;
    int *p = of_device = device<int>(1), *pinned;
    cudaLaunchConfig_t c = {};
    must(cudaMallocHost(&pinned, sizeof *pinned), "pinned");
    must(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream");
    must(cudaMemsetAsync(p, 0, sizeof *p, s), "memset");
    must(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), "capture");
    c.stream = s;
    must(cudaLaunchKernelEx(&c, increment, p), "launch");
    must(cudaMemcpyAsync(pinned, p, sizeof *p, cudaMemcpyDeviceToHost, s), "copy");
    must(cudaLaunchHostFunc(s, what, pinned), "host function");
    must(cudaMemcpyAsync(p, pinned, sizeof *p, cudaMemcpyHostToDevice, s), "copy");
    must(cudaStreamEndCapture(s, &g), "end");
    must(cudaGraphInstantiate(&x, g, 0), "instantiate");
    for (int i = 0; i < 3; i++) must(cudaGraphLaunch(x, s), "launch");
    must(cudaStreamSynchronize(s), "synchronize");
    printf("%d\n", *pinned);
    cudaGraphDestroy(g);
    cudaGraphExecDestroy(x);
    cudaStreamDestroy(s);
    cudaFree(p);
    cudaFreeHost(pinned);
}

/* A group of one: what it gets is what it brings. */
extern "C" {
struct ncclUniqueId { char internal[128]; };
int ncclGetUniqueId(ncclUniqueId *id);
int ncclCommInitRank(struct ncclComm **comm, int size, ncclUniqueId id, int rank);
int ncclAllGather(const void *from, void *to, size_t n, int type, struct ncclComm *comm, cudaStream_t stream);
int ncclCommDestroy(struct ncclComm *comm);
}
static void gather(size_t n)
{
    enum { NUMBERS = 20000, FLOAT = 7 };
    cudaStream_t s;
    ncclUniqueId id;
    struct ncclComm *group;
    float *from = device<float>(NUMBERS), *to = device<float>(NUMBERS), last = 3;
    must(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream");
    must(cudaMemcpy(from + NUMBERS - 1, &last, sizeof last, cudaMemcpyHostToDevice), "copy");
    must(ncclGetUniqueId(&id) == 0 && ncclCommInitRank(&group, 1, id, 0) == 0, "a group");
    must(ncclAllGather(from, to, n, FLOAT, group, s) == 0, "gather");
    must(cudaStreamSynchronize(s), "synchronize");
    must(cudaMemcpy(&last, to + NUMBERS - 1, sizeof last, cudaMemcpyDeviceToHost), "copy");
    printf("%g\n", last);
    ncclCommDestroy(group);
    cudaStreamDestroy(s);
    cudaFree(from);
    cudaFree(to);
}

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

/* Fragments of a 16 x 16 matrix a and a 16 x 8 matrix b, filled as the PTX manual says, element by element. */
__global__ void matrix_products(int *bad)
{
    int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
    auto a = [](int m, int k) { return (m * 7 + k * 3) % 11 - 5; };
    auto b = [](int k, int n) { return (k * 5 + n * 2) % 13 - 6; };
    for (int bf16 = 0; bf16 < 2; bf16++) {
        auto pair = [=](int x, int y) {
            return bf16 ? __float_as_uint(x) >> 16 | (__float_as_uint(y) & 0xffff0000u)
                        : __half_as_ushort(__int2half_rn(x)) | (uint32_t)__half_as_ushort(__int2half_rn(y)) << 16;
        };
        uint32_t fa[4], fb[2];
        float d[4] = { 1, 2, 3, 4 };
        for (int r = 0; r < 4; r++) {
            int m = g + 8 * (r % 2), k = 2 * t + 8 * (r / 2);
            fa[r] = pair(a(m, k), a(m, k + 1));
        }
        for (int r = 0; r < 2; r++) fb[r] = pair(b(2 * t + 8 * r, g), b(2 * t + 8 * r + 1, g));
        if (bf16) mma_bf16(d, fa, fb);
        else mma_f16(d, fa, fb);
        for (int r = 0; r < 4; r++) {
            int want = r + 1;
            for (int k = 0; k < 16; k++) want += a(g + 8 * (r / 2), k) * b(k, 2 * t + r % 2);
            if (d[r] != (float)want) atomicOr(bad, 1);
        }
        float x = (float)a(g, t), y = (float)b(t, g);
        if (pair(a(g, t), b(t, g)) != (bf16 ? pair_bf16(x, y) : pair_halves(x, y))) atomicOr(bad, 4);
    }
    if (minus_halves(0x64056500u, 0x64006400u) != 0x45005c00u || times_halves(0x3c01c000u, 0x34004200u) != 0x3401c600u)
        atomicOr(bad, 8);

    uint16_t *s = (uint16_t *)smem;    /* four matrices of 8 x 8, one after the other */
    for (int i = lane; i < 256; i += 32) s[i] = (uint16_t)i;
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4_trans(r, s + 8 * lane);
    for (int i = 0; i < 4; i++)
        if (r[i] != (uint32_t)(64 * i + 16 * t + g + ((64 * i + 16 * t + 8 + g) << 16))) atomicOr(bad, 2);
    ldmatrix_x2_trans(r + 2, s + 8 * (lane % 16));
    if (r[2] != r[0] || r[3] != r[1]) atomicOr(bad, 2);
}
static void run_matrix_products()
{
    int *bad = device<int>(1);
    must(cudaMemset(bad, 0, sizeof *bad), "memset");
    launch(matrix_products, 1, 32, 512, bad);
    printf("%d\n", result(bad));
}

static void conversions()
{
    /* every half survives; halfway cases go to the even one */
    for (unsigned i = 0; i < 65536; i++) {
        float f = __half2float(__ushort_as_half((unsigned short)i));
        if (f == f) must(__half_as_ushort(__float2half_rn(f)) == i, "a half does not survive");
        if (i % 0x8000 >= 0x7bff) continue;
        float next = __half2float(__ushort_as_half((unsigned short)(i + 1))), middle = 0.5f * (f + next);
        must(__half_as_ushort(__float2half_rn(middle)) == (i & 1 ? i + 1 : i), "a tie is not rounded to even");
        must(__half_as_ushort(__float2half_rn(nextafterf(middle, next))) == i + 1, "above the middle");
        must(__half_as_ushort(__float2half_rn(nextafterf(middle, f))) == i, "below the middle");
    }
    must(__half_as_ushort(__float2half_rn(65519.99f)) == 0x7bff, "largest half");
    must(__half_as_ushort(__float2half_rn(65520.f)) == 0x7c00, "infinity");
    must(__half_as_ushort(__float2half_rn(-1e30f)) == 0xfc00, "infinity");
    must(__bfloat16_as_ushort(__nv_bfloat16(1.00390625f)) == 0x3f80, "a tie of bf16");
    must(__bfloat16_as_ushort(__nv_bfloat16(1.01171875f)) == 0x3f82, "a tie of bf16");
    must(__dp4a(0x01ff02fe, 0x7f808001, 10) == 127 + 128 - 256 - 2 + 10, "dp4a");
    must(__dp4a(0x01ff02feu, 0x7f808001u, 10u) == 127 + 255 * 128 + 256 + 254 + 10, "dp4a without signs");
    must(__byte_perm(0x33221100, 0x77665544, 0x7520) == 0x77552200, "byte_perm");
    must(__byte_perm(0x80, 0, 0x888f) == 0xffffff00, "byte_perm's signs");
    must(__funnelshift_r(0x11112222, 0x33334444, 16) == 0x44441111, "funnel shift");
    must(__funnelshift_l(0x11112222, 0x33334444, 16) == 0x44441111, "funnel shift");
    must(__vsubss4(0x80007f01, 0x01ff8002) == 0x80017fff, "vsubss4");
    must(__brev(1) == 0x80000000 && __clz(1) == 31 && __ffs(8) == 4 && __umulhi(~0u, 2) == 1, "bits");
    printf("ok\n");
}

/* c = a^T b: what the program does with weights. */
static void blas()
{
    enum { M = 5, N = 3, K = 7 };
    __half a[M * K], b[N * K];
    float c[M * N], one = 1, zero = 0;
    for (int i = 0; i < M * K; i++) a[i] = __float2half((float)(i % 9 - 4));
    for (int i = 0; i < N * K; i++) b[i] = __float2half((float)(i % 5 - 2));
    __half *da = device<__half>(M * K), *db = device<__half>(N * K);
    float *dc = device<float>(M * N);
    cublasHandle_t h;
    must(cublasCreate(&h) == CUBLAS_STATUS_SUCCESS, "cublas");
    must(cudaMemcpy(da, a, sizeof a, cudaMemcpyHostToDevice), "copy");
    must(cudaMemcpy(db, b, sizeof b, cudaMemcpyHostToDevice), "copy");
    must(cublasGemmEx(h, CUBLAS_OP_T, CUBLAS_OP_N, M, N, K, &one, da, CUDA_R_16F, K, db, CUDA_R_16F, K, &zero, dc,
                      CUDA_R_32F, M, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS, "gemm");
    must(cudaMemcpy(c, dc, sizeof c, cudaMemcpyDeviceToHost), "copy");
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            float want = 0;
            for (int k = 0; k < K; k++) want += __half2float(a[m * K + k]) * __half2float(b[n * K + k]);
            must(c[n * M + m] == want, "a product");
        }
    cublasDestroy(h);
    cudaFree(da);
    cudaFree(db);
    cudaFree(dc);
    printf("ok\n");
}

/* ---- counters ---------------------------------------------------------------------------------------------------- */

/* Each thread copies 16 bytes, all 32 lanes side by side; then each reads one int, 128 bytes apart. */
__global__ void copies(const uint4 *from, uint4 *to)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = from[i];
    __stcs(to + i, __ldcs(from + i));
}
__global__ void strided(const int *from, int *out)
{
    int v = from[32 * threadIdx.x];
    v += from[0];
    if (threadIdx.x == 0) *out = v;
}
static void counters()
{
    uint4 *from = device<uint4>(256), *to = device<uint4>(256);
    CUDA_LABEL(from, "from");
    CUDA_LABEL(to, "to");
    must(cudaMemset(from, 0, 4096), "memset");
    launch(copies, 4, 64, 0, (const uint4 *)from, to);
    launch(strided, 1, 32, 0, (const int *)from, (int *)to);
    must(cudaDeviceSynchronize(), "synchronize");
    cudaFree(from);
    cudaFree(to);
}

int main(int argc, char **argv)
{
    static const struct { const char *name; void (*run)(); } cases[] = {
        { "tree", run_tree<NO_FAULT> },
        { "no first barrier", run_tree<NO_FIRST_BARRIER> },
        { "no barrier in loop", run_tree<NO_BARRIER_IN_LOOP> },
        { "barrier in branch", run_tree<BARRIER_IN_BRANCH> },
        { "thread ends early", run_tree<ENDS_EARLY> },
        { "two barriers", run_tree<TWO_BARRIERS> },
        { "last block", run_last_block },
        { "float atomics", run_float_atomics },
        { "warp", run_warp<NO_FAULT> },
        { "lane ends", run_warp<LANE_ENDS> },
        { "lane not in mask", run_warp<LANE_NOT_IN_MASK> },
        { "lane read not in mask", run_warp<LANE_READ_NOT_IN_MASK> },
        { "no syncwarp", run_warp<NO_SYNCWARP> },
        { "different warp calls", run_warp<DIFFERENT_CALLS> },
        { "warp calls", run_warp_calls },
        { "read", [] { run_memory(read_int, 10, 9); } },
        { "read past the end", [] { run_memory(read_int, 10, 10); } },
        { "read before the start", [] { run_memory(read_int, 10, -1); } },
        { "read far past the end", [] { run_memory(read_int, 10, 1l << 40); } },
        { "read four", [] { run_memory(read_four, 12, 8); } },
        { "read four past the end", [] { run_memory(read_four, 10, 8); } },
        { "read four misaligned", [] { run_memory(read_four, 12, 2); } },
        { "write before the start", out_of_bounds_write },
        { "use after free", use_after_free },
        { "host memory", host_memory },
        { "host reads device", host_reads_device },
        { "leak", leak },
        { "freed twice", freed_twice },
        { "copy too long", copy_too_long },
        { "index of shared array", [] { array_index(index_array, 8); } },
        { "index of local array", [] { array_index(local_array, 4); } },
        { "shared", [] { shared_memory(shared_end, 12, 48); } },
        { "shared past the end", [] { shared_memory(shared_end, 13, 48); } },
        { "shared not written", [] { shared_memory(shared_unwritten, 1, 48); } },
        { "shared most", [] { shared_memory(shared_end, 1, 48 << 10); } },
        { "shared too large", [] { shared_memory(shared_end, 1, (48 << 10) + 1); } },
        { "shared opted in", [] { opted_in(227 << 10); } },
        { "shared opted in too large", [] { opted_in((227 << 10) + 1); } },
        { "static shared too large", [] { shared_memory(large_static, 1, 0); } },
        { "too many threads", [] { shared_memory(shared_end, 1025, 8192); } },
        { "pipeline", run_pipeline<NO_FAULT> },
        { "pipeline without wait", run_pipeline<NO_WAIT> },
        { "pipeline without barrier", run_pipeline<NO_BARRIER> },
        { "pipeline waits for one", run_pipeline<WAIT_FOR_ONE> },
        { "dependent", [] { dependent(true); } },
        { "dependent does not wait", [] { dependent(false); } },
        { "graph", graph },
        { "event", [] { event(true); } },
        { "no event", [] { event(false); } },
        { "capture waits", capture_waits },
        { "host function", [] { host_function(twice); } },
        { "host function reads device", [] { host_function(touches_device); } },
        { "host function calls", [] { host_function(calls); } },
        { "gather", [] { gather(20000); } },
        { "gather too much", [] { gather(20001); } },
        { "matrix products", run_matrix_products },
        { "conversions", conversions },
        { "blas", blas },
        { "counters", counters },
    };
    for (const auto &c : cases)
        if (argc == 2 && !strcmp(argv[1], c.name)) return c.run(), 0;
    for (const auto &c : cases) puts(c.name);
    return argc == 2;
}
