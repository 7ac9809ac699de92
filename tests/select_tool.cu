/* select_tool - the kernel of select.cu beside a sort: rows of many lengths, with ties, infinities and NaN. Prints how
 * many rows were right, how many of them were left to the host, and a hash of what they gave; exit 1 and the first row
 * that was wrong. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <vector>

#include "../select.h"

enum { ROWS = 7 };
static const int32_t tops[ROWS] = { 40, 1, 0, 128, 2, 127, 40 };
enum kind { NORMAL, LEVELS, EQUAL, MOSTLY_NONE, ZEROS, FALLING, ONE_NAN, ONE_INFINITE, NONE, KINDS };

static uint64_t state = 1;
static double unit()
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return ((double)(state >> 33) + 0.5) / 0x1p31;
}
static float normal() { return (float)(sqrt(-2 * log(unit())) * cos(2 * M_PI * unit())); }

static void must(cudaError_t r, const char *what)
{
    if (r == cudaSuccess) return;
    fprintf(stderr, "select_tool: %s: %s\n", what, cudaGetErrorString(r));
    exit(2);
}
template <class T> static T *device(size_t n)
{
    T *p = NULL;
    must(cudaMalloc((void **)&p, n * sizeof(T)), "cudaMalloc");
    must(cudaMemset(p, 0, n * sizeof(T)), "cudaMemset");
    return p;
}

static void fill(float *x, int n, int kind)
{
    for (int i = 0; i < n; i++)
        x[i] = kind == LEVELS ? roundf(4 * normal()) / 4 : kind == EQUAL ? -3.5f : kind == FALLING ? -(float)i
             : kind == ZEROS ? (i % 3 ? 0.0f : -0.0f)
             : kind == NONE || (kind == MOSTLY_NONE && i % 7 != 3) ? -INFINITY : 5 * normal();
    if (kind == ONE_NAN) x[n / 3] = n % 2 ? NAN : -NAN;
    if (kind == ONE_INFINITE) x[n / 2] = INFINITY;
}

/* What the row should give. Many equal logits may be left to the host, and more than 1,024 of them must be. */
static bool is_right(const float *x, int n, int k, int kind, const selected &got)
{
    std::vector<int32_t> ids;
    for (int i = 0; i < n; i++)
        if (!(x[i] == -INFINITY)) ids.push_back(i);
    if (kind == ONE_NAN || kind == ONE_INFINITE || ids.empty()) return got.n == 0;
    std::sort(ids.begin(), ids.end(), [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
    int most = std::min(k, (int)ids.size()), reach = 0;
    for (int32_t id : ids) reach += x[id] >= x[ids[most - 1]];
    bool may_be_left = k > 1 && (kind == LEVELS || kind == EQUAL || kind == ZEROS) && reach > 128;
    if (may_be_left && got.n == 0) return true;
    if (got.n != most || (k > 1 && reach > 1024)) return false;
    for (int i = 0; i < most; i++)
        if (got.ids[i] != ids[i] || !(got.logits[i] == x[ids[i]])) return false;
    return true;
}

int main()
{
    static const int sizes[] = { 1, 2, 3, 5, 127, 129, 260, 1023, 1024, 1025, 1029, 4096, 32767, 32769, 65541 };
    int rows = 0, left = 0;
    uint64_t hash = 14695981039346656037u;
    selected *out;
    must(cudaMallocHost((void **)&out, ROWS * sizeof *out), "cudaMallocHost");
    int32_t *top = device<int32_t>(ROWS);
    must(cudaMemcpy(top, tops, sizeof tops, cudaMemcpyHostToDevice), "cudaMemcpy");
    unsigned *arrived = device<unsigned>(ROWS);
    for (int n : sizes) {
        std::vector<float> x((size_t)ROWS * n);
        float *logits = device<float>((x.size() + 3) / 4 * 4);     /* as cuda.cu's, which have 64 rows */
        uint64_t *peaks = device<uint64_t>(ROWS * select_peaks(n));
        for (int kind = 0; kind < KINDS; kind++) {
            for (int r = 0; r < ROWS; r++) fill(&x[(size_t)r * n], n, (kind + r) % KINDS);
            must(cudaMemcpy(logits, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
            memset(out, 0xff, ROWS * sizeof *out);
            selection s = { logits, n, top, peaks, arrived, out };
            select_launch l = select_largest(&s, ROWS);
            cudaLaunchConfig_t config = {};
            config.gridDim = l.grid, config.blockDim = l.block, config.dynamicSmemBytes = l.shared;
            must(cudaLaunchKernelEx(&config, l.kernel, s), l.name);
            must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            for (int r = 0; r < ROWS; r++) {
                int of = (kind + r) % KINDS;
                bool right = tops[r] ? is_right(&x[(size_t)r * n], n, tops[r], of, out[r]) : out[r].n == -1;
                if (!right) {
                    fprintf(stderr, "select_tool: row %d of %d logits, kind %d, the %d largest: %d are given, the "
                            "first is %d\n", r, n, of, tops[r], out[r].n, out[r].ids[0]);
                    return 1;
                }
                rows++, left += tops[r] && out[r].n == 0;
                for (int i = 0; i < out[r].n; i++) hash = (hash ^ (uint32_t)out[r].ids[i]) * 1099511628211u;
            }
        }
        must(cudaFree(logits), "cudaFree");
        must(cudaFree(peaks), "cudaFree");
    }
    must(cudaFree(top), "cudaFree");
    must(cudaFree(arrived), "cudaFree");
    must(cudaFreeHost(out), "cudaFreeHost");
    printf("{\"rows\": %d, \"left\": %d, \"hash\": \"%016llx\"}\n", rows, left, (unsigned long long)hash);
    return 0;
}
