/* bench_matmul_tool.c - how near the matrix products come to what the machine can do.
 *
 *     bench_matmul_tool [ISA [TYPE,TYPE...]]
 *
 * One JSON object a line. The first gives the limits measured in the same run: bytes read per second by one and by two
 * threads, and int8 multiply-adds per second of one core in a loop without loads. Then for each type: bytes of weights
 * read per second by products with one token (one and two threads, packed; one thread, as in the file), and
 * multiply-adds per second and core with 8, 32, 128 and 512 tokens. All are the best of several repetitions in
 * processor time, so that a busy machine shows little. */
#include "kernels.h"

#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <time.h>

enum { ROWS = 1536, COLS = 1536, TOKENS = 512, REPEAT = 9 };
enum { SWEEP = 160 << 20 };            /* bytes of weights in a decode measurement: more than any cache */

static double thread_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *take(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

/* ---- the limits -------------------------------------------------------------------------------------------------- */

struct part { const uint8_t *data; size_t bytes; double seconds; };

static void *read_part(void *user)
{
    struct part *p = user;
    double start = thread_seconds();
    const __m128i *v = (const void *)p->data;
    __m128i a = { 0 }, b = a, c = a, d = a;
    for (size_t i = 0; i + 4 <= p->bytes / sizeof *v; i += 4) {
        __builtin_prefetch((const uint8_t *)(v + i) + 4096);
        a = _mm_xor_si128(a, v[i]);
        b = _mm_xor_si128(b, v[i + 1]);
        c = _mm_xor_si128(c, v[i + 2]);
        d = _mm_xor_si128(d, v[i + 3]);
    }
    __asm__ volatile ("" :: "x" (a), "x" (b), "x" (c), "x" (d));
    p->seconds = thread_seconds() - start;
    return NULL;
}

/* Eight independent chains of one step each; the operands are new to the compiler every time. */
#define CHAINS(V, zero, step) \
    V a0 = zero, a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0, x = a0, y = a0; \
    for (int i = 0; i < n; i++) { \
        step(a0); step(a1); step(a2); step(a3); step(a4); step(a5); step(a6); step(a7); \
    } \
    __asm__ volatile ("" :: "x" (a0), "x" (a1), "x" (a2), "x" (a3), "x" (a4), "x" (a5), "x" (a6), "x" (a7))
#define FRESH __asm__ volatile ("" : "+x" (x), "+x" (y))

__attribute__((target("avx512f,avx512vnni"))) static void chain_avx512(int n)
{
#define STEP(a) FRESH; a = _mm512_dpbusd_epi32(a, x, y)
    CHAINS(__m512i, _mm512_setzero_si512(), STEP);
#undef STEP
}
__attribute__((target("avx2,avxvnni"))) static void chain_avxvnni(int n)
{
#define STEP(a) FRESH; a = _mm256_dpbusd_avx_epi32(a, x, y)
    CHAINS(__m256i, _mm256_setzero_si256(), STEP);
#undef STEP
}
__attribute__((target("avx2"))) static void chain_avx2(int n)
{
#define STEP(a) FRESH; a = _mm256_add_epi16(a, _mm256_maddubs_epi16(x, y))
    CHAINS(__m256i, _mm256_setzero_si256(), STEP);
#undef STEP
}
static void chain_generic(int n)
{
#define STEP(a) FRESH; a = _mm_add_epi32(a, _mm_madd_epi16(x, y))
    CHAINS(__m128i, _mm_setzero_si128(), STEP);
#undef STEP
}

static const struct { const char *isa; void (*chain)(int n); int products; } chains[] = {
    { "avx512", chain_avx512, 64 }, { "avxvnni", chain_avxvnni, 32 }, { "avx2", chain_avx2, 32 },
    { "generic", chain_generic, 8 }
};

static void print_limits(const char *isa)
{
    size_t bytes = SWEEP;
    uint8_t *data = take(bytes);
    memset(data, 1, bytes);
    double one = 0, two = 0, products = 0;
    for (int i = 0; i < REPEAT; i++) {
        struct part whole = { data, bytes, 0 };
        struct part half[2] = { { data, bytes / 2, 0 }, { data + bytes / 2, bytes / 2, 0 } };
        read_part(&whole);
        if ((double)bytes / whole.seconds > one) one = (double)bytes / whole.seconds;
        pthread_t other;
        if (pthread_create(&other, NULL, read_part, &half[1])) exit(1);
        read_part(&half[0]);
        pthread_join(other, NULL);
        double slower = half[0].seconds > half[1].seconds ? half[0].seconds : half[1].seconds;
        if ((double)bytes / slower > two) two = (double)bytes / slower;
        for (size_t k = 0; k < sizeof chains / sizeof *chains; k++) {
            if (strcmp(chains[k].isa, isa)) continue;
            enum { STEPS = 200000 };
            double start = thread_seconds();
            chains[k].chain(STEPS);
            double rate = 8.0 * STEPS * chains[k].products / (thread_seconds() - start);
            if (rate > products) products = rate;
        }
    }
    printf("{\"isa\": \"%s\", \"read_gb\": %.1f, \"read_gb_2_threads\": %.1f, \"int8_gmac\": %.0f}\n", isa, one * 1e-9,
           two * 1e-9, products * 1e-9);
    munmap(data, bytes);
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Rows [row0, row1) of `count` matrices, one after the other in memory, times n tokens. */
struct job {
    const struct kernels *k;
    struct weight w;
    size_t bytes;                      /* of one matrix */
    int count, n;
    int64_t row0, row1;
    const struct acts *x;
    float *y;
    void *scratch;
    double seconds;
};

static void *run_job(void *user)
{
    struct job *j = user;
    double start = thread_seconds();
    for (int i = 0; i < j->count; i++) {
        struct weight w = j->w;
        w.data = (const uint8_t *)j->w.data + j->bytes * i;
        for (int64_t r = j->row0; r < j->row1; r += 64)
            j->k->matmul(&w, r, r + 64 < j->row1 ? r + 64 : j->row1, j->x, 0, j->n, j->y + r, ROWS, j->scratch);
    }
    j->seconds = thread_seconds() - start;
    return NULL;
}

static double run_jobs(struct job *jobs, int threads)
{
    pthread_t other;
    if (threads == 2 && pthread_create(&other, NULL, run_job, &jobs[1])) exit(1);
    run_job(&jobs[0]);
    if (threads == 2) pthread_join(other, NULL);
    return threads == 2 && jobs[1].seconds > jobs[0].seconds ? jobs[1].seconds : jobs[0].seconds;
}

/* Best time of REPEAT runs of a product over rows split among the threads. */
static double best(struct job base, int threads)
{
    struct job jobs[2] = { base, base };
    for (int i = 0; i < threads; i++) {
        jobs[i].row0 = (int64_t)ROWS * i / threads;
        jobs[i].row1 = (int64_t)ROWS * (i + 1) / threads;
        jobs[i].scratch = aligned_alloc(64, (base.k->scratch_bytes + 63) / 64 * 64);
        if (!jobs[i].scratch) exit(1);
    }
    double least = 1e9;
    for (int i = 0; i < REPEAT; i++) {
        double t = run_jobs(jobs, threads);
        if (t < least) least = t;
    }
    for (int i = 0; i < threads; i++) free(jobs[i].scratch);
    return least;
}

/* Random bytes, with scales that are small numbers. */
static void fill(enum tensor_type type, uint8_t *p, size_t blocks)
{
    const struct type_info *info = type_info(type);
    for (size_t i = 0; i < blocks * info->bytes; i++) p[i] = (uint8_t)(i * 2654435761u >> 13);
    if (info->block == 1) return;
    for (size_t i = 0; i < blocks; i++, p += info->bytes)
        for (int h = 0; h < 2; h++) {
            int at = type == T_Q2_K ? 80 : type == T_Q3_K ? 108 : type == T_Q6_K ? 208 : 0;
            if (at + 2 * h + 2 <= info->bytes) memcpy(p + at + 2 * h, &(uint16_t){ 0x2000 }, 2);
        }
}

static void measure(const struct kernels *k, enum tensor_type type, const struct acts *x, float *y)
{
    const struct type_info *info = type_info(type);
    size_t blocks = (size_t)ROWS * COLS / info->block, bytes = blocks * info->bytes;
    size_t packed = k->packed_bytes(type, ROWS, COLS);
    int count = (int)(SWEEP / bytes) + 1;
    uint8_t *file = take(bytes * count), *tiles = take(packed * count + 1);
    fill(type, file, blocks * count);
    for (int i = 0; packed && i < count; i++)
        k->pack(type, file + bytes * i, ROWS, COLS, 0, (ROWS + k->tile - 1) / k->tile, tiles + packed * i);
    struct job plain = { k, { type, ROWS, COLS, false, file }, bytes, count, 1, 0, ROWS, x, y, NULL, 0 }, job = plain;
    if (packed) {
        job.w.packed = true;
        job.w.data = tiles;
        job.bytes = packed;
    }
    double sweep = (double)job.bytes * count * 1e-9;
    printf("{\"type\": \"%s\", \"decode_gb\": %.1f", info->name, sweep / best(job, 1));
    printf(", \"decode_gb_2_threads\": %.1f", sweep / best(job, 2));
    printf(", \"decode_gb_file\": %.1f", (double)bytes * count * 1e-9 / best(plain, 1));
    job.count = 1;
    static const int tokens[] = { 8, 32, 128, 512 };
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        job.n = tokens[i];
        printf(", \"gmac_%d\": %.0f", job.n, (double)ROWS * COLS * job.n * 1e-9 / best(job, 1));
    }
    printf("}\n");
    fflush(stdout);
    munmap(file, bytes * count);
    munmap(tiles, packed * count + 1);
}

/* `name` is one of the comma-separated names in `list`, in any case. */
static bool listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *p = list; *p; p += *p == ',') {
        size_t length = strcspn(p, ",");
        if (length == n && !strncasecmp(p, name, n)) return true;
        p += length;
    }
    return false;
}

int main(int argc, char **argv)
{
    struct error e = { 0 };
    const struct kernels *k = kernels_choose(argc > 1 ? argv[1] : NULL, &e);
    if (!k) {
        fprintf(stderr, "%s\n", e.text);
        return e.code;
    }
    print_limits(k->name);
    size_t n = (size_t)TOKENS * COLS;
    float *f = take(n * sizeof *f), *y = take((size_t)TOKENS * ROWS * sizeof *y);
    struct acts x = { TOKENS, COLS, f, take(n / 32 * sizeof *x.b) };
    for (size_t i = 0; i < n; i++) f[i] = (float)(i * 2654435761u >> 8 & 0xFFFF) / 32768 - 1;
    for (int t = 0; t < TOKENS; t++) k->quantise(&x, t);
    for (uint32_t type = 0; type <= T_BF16; type++)
        if (type_info(type) && (argc < 3 || listed(argv[2], type_info(type)->name))) measure(k, type, &x, y);
    return 0;
}
