/* select.cu - the largest logits of each row, so that the host need not read them all.
 *
 * A thread keeps the largest of the logits that it reads, its peak. The row's last block to finish folds the peaks into
 * one a thread: the k-th largest of these bounds the k-th largest logit from below (as sampler.c's blocks do). Hardly
 * more than k peaks reach that bound, and only what their threads have read is looked at again. Each candidate's place
 * is the number of those that are greater.
 *
 * Budgets, checked by tests/test_cuda_static.py: registers a thread, shared memory set statically.
 *
 *     kernel              registers  static shared
 *     select              40         8320
 */
#include "select.h"
#include "device.h"

enum {
    THREADS = 256,
    BLOCKS = 32,                       /* of a row, at most */
    CANDIDATES = 1024                  /* logits that reach the bound, at most */
};
static_assert(TOP_MOST <= THREADS, "the bound is one of a block's peaks");

/* The upper halves of what packed() makes of finite numbers. */
#define LEAST_FINITE 0x00800000u
#define MOST_FINITE 0xff7fffffu

/* A logit's bits and its id as one number, greater for the better one: the greater logit, then the lower id. -0 is 0; a
 * NaN is above all; 0 is below all. */
static __device__ inline uint64_t packed(uint32_t logit, int id)
{
    uint32_t key = logit ^ (logit >> 31 ? 0xffffffffu : 0x80000000u);
    if (logit == 0x80000000u) key = 0x80000000u;
    if ((logit & 0x7fffffff) > 0x7f800000) key = 0xffffffffu;
    return (uint64_t)key << 32 | (uint32_t)~id;
}
static __device__ inline uint32_t key_of(uint64_t p) { return (uint32_t)(p >> 32); }
static __device__ inline int packed_id(uint64_t p) { return (int)~(uint32_t)p; }
static __device__ inline float packed_logit(uint64_t p)
{
    return __uint_as_float(key_of(p) ^ (key_of(p) >> 31 ? 0x80000000u : 0xffffffffu));
}

static __device__ inline uint64_t greater(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* A row as groups of four logits that lie on 16 bytes; the first and the last group may reach beyond it. */
struct groups { const uint4 *at; int lead, n, count; };       /* lead: floats of the first group before the row */

static __device__ inline groups groups_of(const selection &s, int row)
{
    size_t first = (size_t)row * s.n;
    int lead = (int)(first % 4);
    return { (const uint4 *)(s.logits + first - lead), lead, s.n, (lead + s.n + 3) / 4 };
}

/* The four of group g; 0 for what lies beyond the row. */
static __device__ inline void load_group(const groups &r, int g, uint64_t p[4])
{
    uint4 v = fresh_load(r.at + g);
    uint32_t x[4] = { v.x, v.y, v.z, v.w };
    UNROLL
    for (int i = 0; i < 4; i++) {
        int id = 4 * g + i - r.lead;
        p[i] = id >= 0 && id < r.n ? packed(x[i], id) : 0;
    }
}

/* The greatest of all threads' numbers, in every thread. shared: one for each warp. */
static __device__ uint64_t block_greatest(uint64_t mine, uint64_t *shared)
{
    for (int step = WARP / 2; step; step /= 2) mine = greater(mine, __shfl_xor_sync(ALL_LANES, mine, step));
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = mine;
    __syncthreads();
    for (int i = 0; i < THREADS / WARP; i++) mine = greater(mine, shared[i]);
    return mine;
}

/* The largest number that the keys of k threads reach, or one below it that no more than k reach. */
static __device__ uint32_t kth_largest(uint32_t key, int k)
{
    uint32_t bound = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        int reach = __syncthreads_count(key >= (bound | bit));
        if (reach >= k) bound |= bit;
        if (reach == k) break;
    }
    return bound;
}

/* Writes the row's k largest of at least `bound`; peaks: what each of its threads has found. Returns how many there
 * are, 0 = too many reach the bound. */
static __device__ int write_largest(const groups &r, int k, const uint64_t *peaks, int n_peaks, uint32_t bound,
                                    uint64_t *list, unsigned *found, selected *out)
{
    if (threadIdx.x == 0) *found = 0;
    __syncthreads();
    KEEP_ROLLED
    for (int i = threadIdx.x; i < n_peaks; i += THREADS) {
        if (key_of(fresh_load(peaks + i)) < bound) continue;
        KEEP_ROLLED
        for (int g = i; g < r.count; g += n_peaks) {
            uint64_t p[4];
            load_group(r, g, p);
            UNROLL
            for (int j = 0; j < 4; j++) {
                if (key_of(p[j]) < bound) continue;
                unsigned to = atomicAdd(found, 1u);
                if (to < CANDIDATES) list[to] = p[j];
            }
        }
    }
    __syncthreads();
    int n = (int)*found;
    if (n > CANDIDATES) return 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        uint64_t mine = list[i];
        int place = 0;
        for (int j = 0; j < n; j++) place += list[j] > mine;
        if (place < k) out->ids[place] = packed_id(mine), out->logits[place] = packed_logit(mine);
    }
    return n < k ? n : k;
}

static __global__ void __launch_bounds__(THREADS) select_kernel(const selection s)
{
    __shared__ uint64_t list[CANDIDATES], shared[THREADS / WARP];
    __shared__ unsigned found;
    __shared__ bool last;
    wait_for_previous();
    let_next_start();
    int row = blockIdx.y, k = s.top[row], n_peaks = gridDim.x * THREADS, own = blockIdx.x * THREADS + threadIdx.x;
    if (k == 0) return;
    groups r = groups_of(s, row);
    uint64_t *peaks = s.peaks + (size_t)row * n_peaks, peak = 0;
    selected *out = s.out + row;
    UNROLL_4
    for (int g = own; g < r.count; g += n_peaks) {
        uint64_t p[4];
        load_group(r, g, p);
        peak = greater(peak, greater(greater(p[0], p[1]), greater(p[2], p[3])));
    }
    if (k == 1) {                      /* one peak a block is enough */
        peak = block_greatest(peak, shared);
        own = blockIdx.x, n_peaks = gridDim.x;
    }
    if (k > 1 || threadIdx.x == 0) peaks[own] = peak;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&s.arrived[row], 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    peak = 0;
    for (int i = threadIdx.x; i < n_peaks; i += THREADS) peak = greater(peak, fresh_load(peaks + i));
    uint64_t best = block_greatest(peak, shared);
    int n = key_of(best) >= LEAST_FINITE && key_of(best) <= MOST_FINITE;
    if (n && k == 1 && threadIdx.x == 0) out->ids[0] = packed_id(best), out->logits[0] = packed_logit(best);
    if (n && k > 1) {
        uint32_t bound = kth_largest(key_of(peak), k);
        n = write_largest(r, k, peaks, n_peaks, bound < LEAST_FINITE ? LEAST_FINITE : bound, list, &found, out);
    }
    if (threadIdx.x == 0) out->n = n, s.arrived[row] = 0;
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

static int blocks_of(int n)
{
    int groups = (n + 6) / 4, blocks = (groups + THREADS - 1) / THREADS;
    return blocks < BLOCKS ? blocks : BLOCKS;
}

size_t select_peaks(int n) { return (size_t)blocks_of(n) * THREADS; }

struct select_launch select_largest(const struct selection *s, int n_rows)
{
    return { "select", select_kernel, dim3(blocks_of(s->n), n_rows), dim3(THREADS), 0 };
}
