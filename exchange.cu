/* exchange.cu - partial sums and pieces of logits between ranks, each of which drives a device: NCCL gathers all ranks'
 * numbers, and every device adds them up in the order of ranks; or the stream has the host gather them, between a copy
 * there and one back.
 *
 *     kernel              registers  static shared
 *     all others          32         0
 */
#include "exchange.h"

#ifdef __CUDACC__
#include <dlfcn.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "device.h"

/* ---- NCCL: loaded when it is needed, since the toolkit has neither its library nor its header -------------------- */

extern "C" {
typedef struct ncclComm *ncclComm_t;
typedef int ncclResult_t;
typedef struct { char internal[128]; } ncclUniqueId;
enum { ncclSuccess = 0, ncclFloat32 = 7 };
ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank);
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, int type, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
const char *ncclGetErrorString(ncclResult_t r);
}

enum { NCCL_LEAST = 20906 };           /* 2.9.6: streams that are captured */

struct nccl {
    ncclComm_t comm;
    decltype(&ncclGetVersion) version;
    decltype(&ncclGetUniqueId) unique_id;
    decltype(&ncclCommInitRank) join;
    decltype(&ncclAllGather) all_gather;
    decltype(&ncclCommDestroy) destroy;
    decltype(&ncclCommAbort) abort;
    decltype(&ncclGetErrorString) text;
};

static bool nccl_load(struct nccl *n)
{
#ifdef __CUDACC__
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);     /* stays: it has threads of its own */
    if (!library) return false;
    n->version = (decltype(n->version))dlsym(library, "ncclGetVersion");
    n->unique_id = (decltype(n->unique_id))dlsym(library, "ncclGetUniqueId");
    n->join = (decltype(n->join))dlsym(library, "ncclCommInitRank");
    n->all_gather = (decltype(n->all_gather))dlsym(library, "ncclAllGather");
    n->destroy = (decltype(n->destroy))dlsym(library, "ncclCommDestroy");
    n->abort = (decltype(n->abort))dlsym(library, "ncclCommAbort");
    n->text = (decltype(n->text))dlsym(library, "ncclGetErrorString");
    if (!n->version || !n->unique_id || !n->join || !n->all_gather || !n->destroy || !n->abort || !n->text)
        return false;
#else
    *n = { NULL, ncclGetVersion, ncclGetUniqueId, ncclCommInitRank, ncclAllGather, ncclCommDestroy,
           ncclCommAbort, ncclGetErrorString };
#endif
    int version = 0;
    return n->version(&version) == ncclSuccess && version >= NCCL_LEAST;
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

/* Row blockIdx.x of y is multiplied by its scale, which becomes 1. */
static __global__ void scale_kernel(float *y, int width, float *scale)
{
    float by = scale[blockIdx.x];
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += blockDim.x) y[(size_t)blockIdx.x * width + i] *= by;
    if (threadIdx.x == 0) scale[blockIdx.x] = 1;
}

/* y[n] = the sum of all[size][n]. */
static __global__ void add_kernel(const float *all, int size, size_t n, float *y)
{
    let_next_start();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = all[i];
    for (int r = 1; r < size; r++) sum += all[r * n + i];
    y[i] = sum;
}

/* y[gridDim.y][width] = all[size][gridDim.y][most], of which each rank's part is its columns. */
static __global__ void spread_kernel(const float *all, int size, int width, int most, float *y)
{
    let_next_start();
    int i = blockIdx.x * blockDim.x + threadIdx.x, r = 0;
    if (i >= width) return;
    while (i >= (int)((int64_t)width * (r + 1) / size)) r++;
    int first = (int)((int64_t)width * r / size);
    y[(size_t)blockIdx.y * width + i] = all[((size_t)r * gridDim.y + blockIdx.y) * most + i - first];
}

/* ---- both ways --------------------------------------------------------------------------------------------------- */

enum { TRIED = 32,                     /* numbers of the first sum */
       FACTS = 4 };                    /* of a rank: it has NCCL; machine, PCI domain and number there of its device */

/* What the host does in the midst of the stream; graphs point to it. */
struct call { struct call *next; struct exchange *x; size_t n; bool sum; };

struct exchange {
    struct comm *comm;
    cudaStream_t stream;
    struct nccl nccl;                  /* comm NULL: through the host */
    float *all;                        /* on the device: every rank's numbers */
    float *host, *host_all;            /* pinned: this rank's, and in a gathering every rank's */
    float *ones;                       /* [TRIED] on the device */
    float (*facts)[FACTS];             /* [ranks] */
    struct call *calls;
};

const char *exchange_way(const struct exchange *x) { return x->nccl.comm ? "NCCL" : "MPI"; }

static bool check(cudaError_t r, const char *call, struct error *e)
{
    return r == cudaSuccess || fail(e, GEN_RUN, "CUDA: %s of the exchange between ranks failed: %s", call,
                                    cudaGetErrorString(r));
}

static bool check_nccl(const struct exchange *x, ncclResult_t r, const char *call, struct error *e)
{
    return r == ncclSuccess || fail(e, GEN_RUN, "NCCL: %s failed: %s", call, x->nccl.text(r));
}

/* The kernels start when all before them has ended, which may be NCCL's or a copy. */
template <class... P, class... A>
static void launch(struct exchange *x, void (*kernel)(P...), dim3 grid, struct error *e, A... args)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(256);
    config.stream = x->stream;
    if (!e->code) check(cudaLaunchKernelEx(&config, kernel, (P)args...), "the launch", e);
}

static void run_call(void *user)
{
    const struct call *c = (const struct call *)user;
    if (c->sum) comm_sum(c->x->comm, c->x->host, c->n);
    else comm_gather(c->x->comm, c->x->host, c->n, c->x->host_all);
}

static struct call *find_call(struct exchange *x, size_t n, bool sum, struct error *e)
{
    struct call *c = x->calls;
    while (c && (c->n != n || c->sum != sum)) c = c->next;
    if (c || !(c = (struct call *)alloc_zeroed(1, sizeof *c, "the exchange between ranks", e))) return c;
    *c = { x->calls, x, n, sum };
    return x->calls = c;
}

/* The host's numbers, once this rank's n of y have come there. */
static void through_host(struct exchange *x, const float *y, size_t n, bool sum, struct error *e)
{
    struct call *c = find_call(x, n, sum, e);
    (void)(c && check(cudaMemcpyAsync(x->host, y, n * sizeof *y, cudaMemcpyDeviceToHost, x->stream), "cudaMemcpy", e) &&
           check(cudaLaunchHostFunc(x->stream, run_call, c), "cudaLaunchHostFunc", e));
}

/* x->all[size][n] = every rank's y[n]. */
static void by_nccl(struct exchange *x, const float *y, size_t n, struct error *e)
{
    check_nccl(x, x->nccl.all_gather(y, x->all, n, ncclFloat32, x->nccl.comm, x->stream), "ncclAllGather", e);
}

static void to_device(struct exchange *x, float *to, const float *from, size_t n, struct error *e)
{
    if (!e->code) check(cudaMemcpyAsync(to, from, n * sizeof *to, cudaMemcpyHostToDevice, x->stream), "cudaMemcpy", e);
}

void exchange_sum(struct exchange *x, float *y, int rows, int width, float *scale, struct error *e)
{
    size_t n = (size_t)rows * width;
    if (scale) launch(x, scale_kernel, dim3(rows), e, y, width, scale);
    if (e->code) return;
    if (x->nccl.comm) {
        by_nccl(x, y, n, e);
        launch(x, add_kernel, dim3((unsigned)((n + 255) / 256)), e, x->all, comm_size(x->comm), n, y);
    } else {
        through_host(x, y, n, true, e);
        to_device(x, y, x->host, n, e);
    }
}

void exchange_gather(struct exchange *x, float *y, int rows, int width, struct error *e)
{
    int most = exchange_most(x->comm, width), size = comm_size(x->comm);
    size_t n = (size_t)rows * most;
    if (e->code) return;
    if (x->nccl.comm) by_nccl(x, y, n, e);
    else through_host(x, y, n, false, e);
    if (comm_rank(x->comm)) return;
    if (!x->nccl.comm) to_device(x, x->all, x->host_all, size * n, e);
    launch(x, spread_kernel, dim3((width + 255) / 256, rows), e, x->all, size, width, most, y);
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

/* All ranks have NCCL, and no two of them one device. */
static bool can_join(struct exchange *x)
{
    int device = 0;
    cudaDeviceProp p = {};
    bool known = cudaGetDevice(&device) == cudaSuccess && cudaGetDeviceProperties(&p, device) == cudaSuccess;
    const float own[FACTS] = { (float)(known && nccl_load(&x->nccl)), (float)comm_machine(x->comm),
                               (float)p.pciDomainID, (float)(p.pciBusID * 32 + p.pciDeviceID) };
    comm_gather(x->comm, own, FACTS, x->facts[0]);
    bool can = true;
    for (int r = 0; r < comm_size(x->comm); r++) {
        can = can && x->facts[r][0];
        for (int k = 0; k < r; k++) can = can && memcmp(x->facts[r], x->facts[k], sizeof x->facts[r]);
    }
    return can;
}

/* The ranks begin when all have the id: none may wait in NCCL for one that MPI has not brought it yet. One that fails
 * is lost, as the others wait for it. */
static bool join(struct exchange *x, struct error *e)
{
    ncclUniqueId id = {};
    ncclResult_t r = comm_rank(x->comm) ? ncclSuccess : x->nccl.unique_id(&id);
    comm_share(x->comm, &id, sizeof id);
    if (!comm_agree(x->comm, check_nccl(x, r, "ncclGetUniqueId", e), e)) return false;
    r = x->nccl.join(&x->nccl.comm, comm_size(x->comm), id, comm_rank(x->comm));
    return check_nccl(x, r, "ncclCommInitRank", e) || (comm_lose(x->comm), false);
}

static bool allocate(float **out, size_t n, bool host, struct error *e)
{
    size_t available = 0, all = 0, bytes = n * sizeof **out;
    cudaError_t r = host ? cudaMallocHost(out, bytes) : cudaMalloc(out, bytes);
    if (r != cudaErrorMemoryAllocation) return check(r, host ? "cudaMallocHost" : "cudaMalloc", e);
    cudaGetLastError();
    cudaMemGetInfo(&available, &all);
    if (host) return fail(e, GEN_RUN, "the exchange between ranks needs %zu bytes of pinned memory, which the "
                          "system does not give: lower --batch-size", bytes);
    return fail(e, GEN_RUN, "the exchange between ranks needs %zu bytes of device memory, but %zu are free: lower "
                "--batch-size", bytes, available);
}

static bool open_buffers(struct exchange *x, size_t sums, size_t gathers, struct error *e)
{
    size_t size = comm_size(x->comm), device = size * gathers, host = (size + 1) * gathers;
    if (x->nccl.comm && device < size * sums) device = size * sums;
    if (host < sums) host = sums;
    if (!allocate(&x->all, device, false, e) || !allocate(&x->ones, TRIED, false, e) ||
        (!x->nccl.comm && !allocate(&x->host, host, true, e)))
        return false;
    if (x->host) x->host_all = x->host + gathers;
    return true;
}

/* One sum: what its first call sets up is there before a stream is captured. */
static bool try_once(struct exchange *x, struct error *e)
{
    float y[TRIED];
    for (int i = 0; i < TRIED; i++) y[i] = 1;
    to_device(x, x->ones, y, TRIED, e);
    exchange_sum(x, x->ones, 1, TRIED, NULL, e);
    cudaError_t r = cudaMemcpyAsync(y, x->ones, sizeof y, cudaMemcpyDeviceToHost, x->stream);
    if (r == cudaSuccess) r = cudaStreamSynchronize(x->stream);
    if (e->code || !check(r, "cudaMemcpy", e)) return false;
    for (int i = 0; i < TRIED; i++)
        if (!(y[i] == (float)comm_size(x->comm)))
            return fail(e, GEN_RUN, "the sum of 1 from each of %d ranks, by %s, came out as %g", comm_size(x->comm),
                        exchange_way(x), y[i]);
    return true;
}

bool exchange_open(struct exchange **out, struct comm *comm, cudaStream_t stream, size_t sums, size_t gathers, bool ok,
                   struct error *e)
{
    struct exchange *x = *out = ok ? (struct exchange *)alloc_zeroed(1, sizeof *x, "the exchange", e) : NULL;
    void *facts = x ? alloc_zeroed(comm_size(comm), sizeof *x->facts, "the exchange", e) : NULL;
    if (x) x->comm = comm, x->stream = stream, x->facts = (float (*)[FACTS])facts;
    if (!comm_agree(comm, facts != NULL, e)) return false;
    if (can_join(x) && !join(x, e)) return false;
    ok = comm_agree(comm, open_buffers(x, sums, gathers, e), e);
    if (ok && !try_once(x, e)) return comm_lose(comm), false;
    if (!ok && x->nccl.comm) x->nccl.abort(x->nccl.comm), x->nccl.comm = NULL;
    return ok;
}

void exchange_close(struct exchange *x)
{
    if (!x) return;
    if (x->nccl.comm) x->nccl.destroy(x->nccl.comm);
    cudaFree(x->all);
    cudaFree(x->ones);
    cudaFreeHost(x->host);
    while (struct call *c = x->calls) {
        x->calls = c->next;
        free(c);
    }
    free(x->facts);
    free(x);
}
