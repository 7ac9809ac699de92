/* alloc_fault.c - preloaded into gen: the FAULT_AT-th call after main's start that allocates memory fails, and with
 * FAULT_ON every one after it; FAULT_COUNT names a file that receives the number of calls. (Before main the libraries
 * start, CUDA's among them.) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
            *__libc_memalign(size_t, size_t);

static atomic_long calls;
static long fault_at = -1, fault_on;

typedef int program(int argc, char **argv, char **environment);
static program *real_main;

static int begin(int argc, char **argv, char **environment)
{
    const char *at = getenv("FAULT_AT");
    fault_on = getenv("FAULT_ON") != NULL;
    fault_at = at ? atol(at) : 0;
    return real_main(argc, argv, environment);
}

int __libc_start_main(program *main, int argc, char **argv, void (*init)(void), void (*fini)(void), void (*end)(void),
                      void *stack)
{
    int (*start)(program *, int, char **, void (*)(void), void (*)(void), void (*)(void), void *) =
        dlsym(RTLD_NEXT, "__libc_start_main");
    real_main = main;
    return start(begin, argc, argv, init, fini, end, stack);
}

__attribute__((destructor)) static void end(void)
{
    const char *name = getenv("FAULT_COUNT");
    fault_at = -1;
    FILE *f = name ? fopen(name, "w") : NULL;
    if (f) fprintf(f, "%ld\n", atomic_load(&calls)), fclose(f);
}

static int fails(void)
{
    long n = fault_at < 0 ? 0 : atomic_fetch_add(&calls, 1) + 1;
    int now = n > 0 && fault_at > 0 && (n == fault_at || (fault_on && n > fault_at));
    if (now) errno = ENOMEM;
    return now;
}

void *malloc(size_t n) { return fails() ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return fails() ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return fails() ? NULL : __libc_realloc(p, n); }
void *aligned_alloc(size_t align, size_t n) { return fails() ? NULL : __libc_memalign(align, n); }
int posix_memalign(void **p, size_t align, size_t n)
{
    return fails() || !(*p = __libc_memalign(align, n)) ? ENOMEM : 0;
}
void *mmap(void *at, size_t n, int protection, int flags, int file, off_t offset)
{
    return fails() ? MAP_FAILED : (void *)syscall(SYS_mmap, at, n, protection, flags, file, offset);
}
