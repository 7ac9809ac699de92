/* fuzz_main.c - runs a fuzz target without libFuzzer: a fixed number of mutated inputs, the same ones for the same seed.
 *
 *   fuzz_NAME RUNS SEED FILE...          mutates the files; the i-th input depends on (SEED, i) alone
 *
 * The inputs are tried in a child process. When that dies, or one input takes more than LIMIT seconds, the parent says which
 * input it was and leaves it in the file fuzz-NAME-SEED-I.bin. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { LIMIT = 5, MAX_SIZE = 1 << 20, MAX_FILES = 64 };

struct input { uint8_t *data; size_t size; };

static struct input files[MAX_FILES];
static int n_files;
static uint8_t buffer[MAX_SIZE];       /* the input being made */

static uint64_t state;                 /* SplitMix64 (Steele, Lea, Flood 2014) */
static uint64_t draw(void)
{
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}
static size_t below(size_t n) { return n ? draw() % n : 0; }

static struct input read_file(const char *path)
{
    struct input in = { malloc(MAX_SIZE), 0 };
    FILE *f = fopen(path, "rb");
    if (!f || !in.data) {
        fprintf(stderr, "cannot read %s\n", path);
        exit(2);
    }
    in.size = fread(in.data, 1, MAX_SIZE, f);
    fclose(f);
    return in;
}

/* Most fields that matter lie at the front: half of all places are drawn from the first 256 bytes. */
static size_t place(const struct input *in) { return below(draw() & 1 && in->size > 256 ? 256 : in->size); }

/* A number at which a count, length or offset is likely to go wrong. */
static uint64_t edge(size_t size)
{
    uint64_t base[] = { 0, 1, size, 1u << 7, 1u << 15, 1u << 31, 1ull << 32, 1ull << 61, 1ull << 63, draw() };
    return base[below(sizeof base / sizeof *base)] + below(5) - 2;
}

static void mutate(struct input *in, const struct input *other)
{
    size_t at = place(in), n = 1 + below(draw() & 3 ? 16 : 4096), rest = in->size - at;
    uint64_t value = edge(in->size);
    switch (below(7)) {
    case 0: if (rest) in->data[at] ^= 1 << below(8); break;
    case 1: if (rest) in->data[at] = (uint8_t)draw(); break;
    case 2: n = (size_t)1 << below(4); if (n <= rest) memcpy(in->data + at, &value, n); break;
    case 3: in->size = at; break;
    case 4:                            /* a stretch is taken out */
        if (n > rest) n = rest;
        memmove(in->data + at, in->data + at + n, rest - n);
        in->size -= n;
        break;
    case 5:                            /* a stretch is repeated */
        if (n > rest) n = rest;
        if (in->size + n > MAX_SIZE) break;
        memmove(in->data + at + n, in->data + at, rest);
        in->size += n;
        break;
    case 6:                            /* a stretch of another file is laid over this one */
        at = place(in);
        if (n > other->size) n = other->size;
        if (n > in->size - at) n = in->size - at;
        memcpy(in->data + at, other->data + below(other->size - n + 1), n);
        break;
    }
}

static struct input make_input(uint64_t seed, uint64_t i)
{
    state = seed * 0x100000001B3 + i;
    draw();
    const struct input *from = &files[below(n_files)];
    struct input in = { buffer, from->size };
    memcpy(buffer, from->data, from->size);
    for (size_t changes = 1 + below(4); changes > 0; changes--) mutate(&in, &files[below(n_files)]);
    return in;
}

int main(int argc, char **argv)
{
    if (argc < 4 || argc - 3 > MAX_FILES) {
        fprintf(stderr, "usage: %s RUNS SEED FILE...\n", argv[0]);
        return 2;
    }
    uint64_t runs = strtoull(argv[1], NULL, 0), seed = strtoull(argv[2], NULL, 0);
    uint64_t *now = mmap(NULL, sizeof *now, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (now == MAP_FAILED) return 2;
    for (; n_files < argc - 3; n_files++) files[n_files] = read_file(argv[3 + n_files]);

    pid_t child = fork();
    if (child < 0) return 2;
    if (child == 0) {
        for (; *now < runs; ++*now) {
            struct input in = make_input(seed, *now);
            uint8_t *exact = malloc(in.size ? in.size : 1);    /* so that the sanitizer sees a read past the end */
            if (!exact) return 2;
            memcpy(exact, in.data, in.size);
            alarm(LIMIT);
            LLVMFuzzerTestOneInput(exact, in.size);
            alarm(0);
            free(exact);
        }
        return 0;
    }
    int status;
    if (waitpid(child, &status, 0) == child && status == 0) {
        printf("%llu inputs, seed %llu\n", (unsigned long long)runs, (unsigned long long)seed);
        return 0;
    }
    const char *name = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
    struct input in = make_input(seed, *now);
    char path[256];
    snprintf(path, sizeof path, "%s-%llu-%llu.bin", name, (unsigned long long)seed, (unsigned long long)*now);
    FILE *f = fopen(path, "wb");
    if (f) {
        fwrite(in.data, 1, in.size, f);
        fclose(f);
    }
    fprintf(stderr, "%s: input %llu of seed %llu %s; it is in %s\n", name, (unsigned long long)*now,
            (unsigned long long)seed,
            WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? "took too long" : "failed", path);
    return 1;
}
