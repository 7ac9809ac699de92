/* fault_tool MODEL FOLDER - the n-th allocation or mapping of memory fails, n = 1, 2, 3 ... until a run of the engine is
 * clean: it opens, prefills, forks, takes one step with two sequences, reuses pages, moves some to a file in FOLDER. Each
 * failure must be told in a sentence; leaks are the sanitizer's business. Prints how many there were. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../engine.h"

static long count = -1;                /* allocations until the one that fails; below 0: none does */
static bool broken;                    /* something else is wrong */
static bool due(void) { return count > 0 && --count == 0; }

#if defined __has_feature
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1         /* as gcc says it */
#endif
#endif
#if !defined __SANITIZE_ADDRESS__      /* which has an allocator of its own: only mappings fail then */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
            *__libc_memalign(size_t, size_t);
void *malloc(size_t n) { return due() ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return due() ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return due() ? NULL : __libc_realloc(p, n); }
void *aligned_alloc(size_t align, size_t n) { return due() ? NULL : __libc_memalign(align, n); }
#endif
void *mmap(void *at, size_t n, int prot, int flags, int file, off_t offset)
{
    if (due()) return errno = ENOMEM, MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, n, prot, flags, file, offset);
}

enum { PROMPT = 150 };

static bool run(const struct model *m, const char *folder, struct error *e)
{
    struct engine *g = NULL;
    struct sequence *s[3] = { NULL };
    int32_t text[PROMPT], next[2] = { 1, 2 };
    int64_t reused;
    struct engine_options o = { .ctx = 400, .batch = 64, .threads = 2, .max_sequences = 3, .page_size = 32,
                                .type_k = KV_INT8, .type_v = KV_F16, .cache = true, .share = true, .kv_memory = 20000,
                                .kv_offload = folder };
    for (int i = 0; i < PROMPT; i++) text[i] = i % 50;
    bool ok = engine_open(&g, m, &o, e) && sequence_open(&s[0], g, e)
           && sequence_sync(s[0], text, PROMPT, NULL, NULL, e) && sequence_fork(&s[1], s[0], e)
           && engine_step(g, s, next, 2, e) && sequence_open(&s[2], g, e)
           && sequence_sync(s[2], text, PROMPT, &reused, NULL, e);
    if (ok && (reused != PROMPT / 32 * 32 || engine_kv_usage(g).bytes_out == 0))
        ok = fail(e, GEN_RUN, "%lld tokens were reused, or nothing was moved", (long long)reused), broken = true;
    long left = count;
    count = -1;                        /* the checker allocates, too */
    if (g && !engine_check(g)) ok = fail(e, GEN_RUN, "the pages are inconsistent"), broken = true;
    count = left;
    for (int i = 0; i < 3; i++) sequence_close(s[i]);
    engine_close(g);
    return ok;
}

int main(int argc, char **argv)
{
    struct error e;
    struct gguf *file;
    struct model *m;
    char note[200];
    if (argc != 3) return fprintf(stderr, "usage: fault_tool MODEL FOLDER\n"), 2;
    if (!gguf_open(&file, argv[1], true, &e) || !model_open(&m, file, &(struct model_options){ 0 }, note, &e))
        return fprintf(stderr, "fault_tool: %s\n", e.text), 1;
    for (long n = 1; ; n++) {
        e = (struct error){ 0 };
        count = n;
        bool ok = run(m, argv[2], &e), reached = count == 0;
        count = -1;
        if (ok && !reached) return model_close(m), printf("%ld failures\n", n - 1), 0;
        if (ok) continue;              /* the library did without */
        if (broken || !reached || e.code == 0 || strlen(e.text) < 10) return fprintf(stderr, "fault_tool: %ld: %s\n", n, e.text), 1;
    }
}
