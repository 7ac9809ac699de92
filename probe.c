/* probe.c - measures the two limits that the speed of a model is compared with. */
#include "probe.h"

#include "processor.h"
#include "threads.h"

#include <immintrin.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ROUNDS = 3 };                   /* of each loop in one call of probe_measure */
enum { PIECE = 1 << 20, STREAMS = 2 }; /* bytes that a thread takes at once, read in as many streams side by side */
#define BUFFER ((size_t)256 << 20)
enum { PIECES = BUFFER / PIECE };

/* Does multiply-adds of bytes in registers, `rounds` times; returns how many of them one round has. */
typedef int dot_loop(int64_t rounds);

struct probe {
    struct team *team;
    dot_loop *dots;
    unsigned char *buffer;             /* [BUFFER] */
    struct limits best;
};

/* ---- multiply-adds */

/* Keeps the compiler from knowing what is in a register, and from dropping it. */
#define OPAQUE(x) __asm__ volatile ("" : "+v"(x))

enum { SUMS = 8 };                     /* independent sums: an instruction's latency is hidden behind the others */
/* Unrolled, so that the sums are registers. */
#define EACH_SUM(n) _Pragma("GCC unroll 8") for (int i = 0; i < (n); i++)

/* A processor without byte products: pairs of int16. */
static int dots_generic(int64_t rounds)
{
    __m128i x = _mm_set1_epi8(1), w = _mm_set1_epi8(2), sum[SUMS] = { 0 };
    for (int64_t r = 0; r < rounds; r++)
        EACH_SUM(SUMS) {
            OPAQUE(x);
            sum[i] = _mm_add_epi32(sum[i], _mm_madd_epi16(w, x));
        }
    EACH_SUM(SUMS) OPAQUE(sum[i]);
    return SUMS * 8;
}

/* Products of bytes are added up in pairs of int16, eight of them before the sum is widened, as 4-bit weights allow. */
__attribute__((target("avx2"))) static int dots_avx2(int64_t rounds)
{
    __m256i x = _mm256_set1_epi8(1), w = _mm256_set1_epi8(2), one = _mm256_set1_epi16(1), sum[SUMS / 2] = { 0 };
    for (int64_t r = 0; r < rounds; r++) {
        __m256i part[SUMS / 2] = { 0 };
        _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++)
            EACH_SUM(SUMS / 2) {
                OPAQUE(x);
                part[i] = _mm256_add_epi16(part[i], _mm256_maddubs_epi16(w, x));
            }
        EACH_SUM(SUMS / 2) sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(part[i], one));
    }
    EACH_SUM(SUMS / 2) OPAQUE(sum[i]);
    return SUMS / 2 * 8 * 32;
}

/* Compilers from before AVX-VNNI make that table of kernels, too, of AVX2 alone. */
#if defined __clang__ ? __clang_major__ >= 12 : __GNUC__ >= 11
__attribute__((target("avx2,avxvnni"))) static int dots_avxvnni(int64_t rounds)
{
    __m256i x = _mm256_set1_epi8(1), w = _mm256_set1_epi8(2), sum[SUMS] = { 0 };
    for (int64_t r = 0; r < rounds; r++)
        EACH_SUM(SUMS) {
            OPAQUE(x);
            sum[i] = _mm256_dpbusd_avx_epi32(sum[i], w, x);
        }
    EACH_SUM(SUMS) OPAQUE(sum[i]);
    return SUMS * 32;
}
#else
#define dots_avxvnni dots_avx2
#endif

__attribute__((target("avx512f,avx512vnni"))) static int dots_avx512(int64_t rounds)
{
    __m512i x = _mm512_set1_epi8(1), w = _mm512_set1_epi8(2), sum[SUMS] = { 0 };
    for (int64_t r = 0; r < rounds; r++)
        EACH_SUM(SUMS) {
            OPAQUE(x);
            sum[i] = _mm512_dpbusd_epi32(sum[i], w, x);
        }
    EACH_SUM(SUMS) OPAQUE(sum[i]);
    return SUMS * 64;
}

static const struct { const char *isa; dot_loop *loop; } loops[] = {
    { "generic", dots_generic }, { "avx2", dots_avx2 }, { "avxvnni", dots_avxvnni }, { "avx512", dots_avx512 },
};

enum { DOT_ROUNDS = 1000000 };           /* a few milliseconds */

static void dot_piece(void *user, int piece, int thread)
{
    struct probe *p = user;
    (void)piece, (void)thread;
    p->dots(DOT_ROUNDS);
}

/* ---- memory */

typedef uint64_t words __attribute__((vector_size(16)));

static void read_piece(void *user, int piece, int thread)
{
    struct probe *p = user;
    words sum[STREAMS] = { { 0 } };
    const words *at = (const words *)(p->buffer + (size_t)piece * PIECE);
    enum { STEP = PIECE / STREAMS / sizeof(words) };
    (void)thread;
    for (size_t i = 0; i < STEP; i += 4)
        for (int s = 0; s < STREAMS; s++)
            for (int k = 0; k < 4; k++) sum[s] += at[s * STEP + i + k];
    for (int s = 0; s < STREAMS; s++) OPAQUE(sum[s]);
}

static void touch_piece(void *user, int piece, int thread)
{
    struct probe *p = user;
    (void)thread;
    memset(p->buffer + (size_t)piece * PIECE, 1, PIECE);
}

/* ---- both */

bool probe_open(struct probe **out, const char *isa, int threads, struct error *e)
{
    struct probe *p = alloc_zeroed(1, sizeof *p, "the measuring of the machine", e);
    if (!p) return false;
    p->dots = dots_generic;
    for (size_t i = 0; i < sizeof loops / sizeof *loops; i++)
        if (strcmp(loops[i].isa, isa) == 0) p->dots = loops[i].loop;
    void *buffer = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) {
        fail(e, GEN_RUN, "cannot allocate %zu bytes to measure the speed of the memory", BUFFER);
        return probe_close(p), false;
    }
    p->buffer = buffer;
    madvise(buffer, BUFFER, MADV_HUGEPAGE);
    if (!team_open(&p->team, threads, e)) return probe_close(p), false;
    team_each(p->team, PIECES, touch_piece, p);
    *out = p;
    return true;
}

void probe_close(struct probe *p)
{
    if (!p) return;
    team_close(p->team);
    if (p->buffer) munmap(p->buffer, BUFFER);
    free(p);
}

struct limits probe_measure(struct probe *p)
{
    double dots = (double)p->dots(0) * DOT_ROUNDS * team_size(p->team);
    for (int i = 0; i < ROUNDS; i++) {
        double start = now_seconds();
        team_each(p->team, PIECES, read_piece, p);
        double middle = now_seconds();
        team_each(p->team, team_size(p->team), dot_piece, p);
        double bytes = (double)BUFFER / (middle - start), rate = dots / (now_seconds() - middle);
        if (bytes > p->best.bytes) p->best.bytes = bytes;
        if (rate > p->best.multiply_adds) p->best.multiply_adds = rate;
    }
    return p->best;
}
