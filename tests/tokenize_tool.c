/* tokenize_tool.c - lets the Python tests drive the tokenizer.
 *
 *     tokenize_tool MODEL encode|trusted|bos     stdin: records {u32 n, n bytes}; stdout: one line of ids for each.
 *                                                trusted: control tokens count; bos: the same, with the start token
 *     tokenize_tool MODEL decode                 stdin: records {u32 n, n i32 ids}; stdout: records {u32 n, n bytes}
 *     tokenize_tool PRE words                    stdin as for encode; stdout: one line for each, the bytes of its words
 *     tokenize_tool MODEL time FILE...           one line for each: processor seconds, bytes, ids of encoding the file
 *     tokenize_tool MODEL open N                 processor seconds that opening takes, least of N */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "pretokenizer.h"
#include "tokenizer.h"

static struct error e;

/* Processor time, in seconds: other programs on a busy machine do not count. */
static double cpu_seconds(void) { return (double)clock() / CLOCKS_PER_SEC; }

static int stop(void)
{
    fprintf(stderr, "%s\n", e.text);
    return 1;
}

/* Reads the next record of n items. False at the end of stdin. */
static bool read_record(struct bytes *b, uint32_t *n, size_t item)
{
    static char chunk[1 << 16];
    b->len = 0;
    if (fread(n, sizeof *n, 1, stdin) != 1) return false;
    for (size_t left = *n * item; left;) {
        size_t got = fread(chunk, 1, left < sizeof chunk ? left : sizeof chunk, stdin);
        if (!got || !bytes_add(b, chunk, got)) return false;
        left -= got;
    }
    return true;
}

static int encode_all(const struct tokenizer *t, bool trusted, bool add_bos)
{
    struct bytes text = { 0 };
    struct ids ids = { 0 };
    for (uint32_t n; read_record(&text, &n, 1);) {
        ids.len = 0;
        if (!tokenizer_encode(t, &(struct span){ text.data, n, trusted }, 1, add_bos, &ids, &e)) return stop();
        for (size_t i = 0; i < ids.len; i++) printf(i ? " %d" : "%d", (int)ids.data[i]);
        putchar('\n');
    }
    bytes_free(&text);
    ids_free(&ids);
    return 0;
}

static bool print_length(void *unused, const char *word, size_t n)
{
    (void)unused, (void)word;
    return printf("%zu ", n) > 0;
}

static int print_words(const char *pre)
{
    struct pretokenizer *p;
    struct bytes text = { 0 };
    if (!pretokenizer_open(&p, pre, strlen(pre), &e)) return stop();
    for (uint32_t n; read_record(&text, &n, 1); putchar('\n'))
        if (!pretokenizer_split(p, text.data, n, print_length, NULL, &e)) return stop();
    pretokenizer_close(p);
    bytes_free(&text);
    return 0;
}

static int decode_all(const struct tokenizer *t)
{
    struct bytes in = { 0 }, text = { 0 };
    for (uint32_t n; read_record(&in, &n, sizeof(int32_t));) {
        struct detok d = { 0 };
        text.len = 0;
        for (uint32_t i = 0; i < n; i++) {
            int32_t id;
            memcpy(&id, in.data + i * sizeof id, sizeof id);
            if (!detok_add(t, &d, id, true, true, &text)) return 1;
        }
        if (!detok_end(&d, &text)) return 1;
        uint32_t size = (uint32_t)text.len;
        fwrite(&size, sizeof size, 1, stdout);
        fwrite(text.data, 1, text.len, stdout);
    }
    bytes_free(&in);
    bytes_free(&text);
    return 0;
}

static int time_file(const struct tokenizer *t, const char *path)
{
    FILE *f = fopen(path, "rb");
    struct bytes text = { 0 };
    struct ids ids = { 0 };
    static char chunk[1 << 16];
    if (!f) return 1;
    for (size_t got; (got = fread(chunk, 1, sizeof chunk, f));) if (!bytes_add(&text, chunk, got)) return 1;
    fclose(f);
    double start = cpu_seconds();
    if (!tokenizer_encode(t, &(struct span){ text.data, text.len, false }, 1, false, &ids, &e)) return stop();
    printf("%.6f %zu %zu\n", cpu_seconds() - start, text.len, ids.len);
    bytes_free(&text);
    ids_free(&ids);
    return 0;
}

static int time_opening(const struct gguf *g, int times)
{
    double best = 1e9;
    while (times-- > 0) {
        struct tokenizer *t;
        double start = cpu_seconds();
        if (!tokenizer_open(&t, g, NULL, &e)) return stop();
        double taken = cpu_seconds() - start;
        if (taken < best) best = taken;
        tokenizer_close(t);
    }
    printf("%.6f\n", best);
    return 0;
}

int main(int argc, char **argv)
{
    struct gguf *g;
    struct tokenizer *t;
    char note[200];
    if (argc < 3) return 2;
    if (!strcmp(argv[2], "words")) return print_words(argv[1]);
    if (!gguf_open(&g, argv[1], true, &e) || !tokenizer_open(&t, g, note, &e)) return stop();
    if (note[0]) fprintf(stderr, "%s\n", note);
    int rc = 2;
    const char *mode = argv[2];
    if (!strcmp(mode, "encode")) rc = encode_all(t, false, false);
    if (!strcmp(mode, "trusted")) rc = encode_all(t, true, false);
    if (!strcmp(mode, "bos")) rc = encode_all(t, true, true);
    if (!strcmp(mode, "decode")) rc = decode_all(t);
    if (!strcmp(mode, "time")) for (int i = 3; i < argc; i++) if ((rc = time_file(t, argv[i]))) break;
    if (!strcmp(mode, "open") && argc == 4) rc = time_opening(g, atoi(argv[3]));
    tokenizer_close(t);
    gguf_close(g);
    return rc;
}
