/* fuzz_gguf.c - opens the input as a GGUF file, and walks over all of it if that succeeds. A memory file stands in for
 * the disk, so that the code under test is the one that opens real files. */
#define _GNU_SOURCE
#include "gguf_walk.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[64];
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0) return 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (write(fd, data, size) == (ssize_t)size) {
        struct gguf *g;
        struct error e = { 0 };
        bool good = gguf_open(&g, path, size & 1, &e);
        if (good) walk(g);
        if (good == !g || (!good && (!e.code || !*e.text))) abort();    /* either a file or an error, never both */
        gguf_close(g);
    }
    close(fd);
    return 0;
}
