/* fuzz_tokenizer.c - an input that begins with "GGUF" is a vocabulary, and texts are encoded with it if it is accepted. Any
 * other input is text for two small vocabularies: its first byte chooses between them and how the text is cut into spans.
 * What must hold: ids are in the vocabulary; the pieces joined are the text, byte by byte; decoded as a stream it is valid
 * UTF-8. */
#define _GNU_SOURCE
#include "vocabulary.h"

#include "tokenizer.h"
#include "utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool condition) { if (!condition) abort(); }

static struct gguf *small_vocabulary(bool bpe)
{
    struct words w = { 0 };
    struct file f = { 0 };
    add_word(&w, "<unk>", 2, 0);
    add_word(&w, "<s>", 3, 0);
    add_word(&w, "</s>", 3, 0);
    add_bytes(&w, bpe);
    const char *merges[] = { "t h", "th e", "i n", "a n", "an d", "a a", "aa aa", "n 't", "e e" };
    const char *space = bpe ? "\xC4\xA0" : "\xE2\x96\x81";
    for (const char *c = "theinadx'"; !bpe && *c; c++) add_word(&w, (char[2]){ *c }, 1, -100);
    for (size_t i = 0; i < sizeof merges / sizeof *merges; i++) {
        char joined[32], pair[64];
        snprintf(joined, sizeof joined, "%.*s%s", (int)strcspn(merges[i], " "), merges[i], strchr(merges[i], ' ') + 1);
        add_merge(&w, merges[i]);
        add_word(&w, joined, 1, -1.0f - (float)(i / 2));
        snprintf(pair, sizeof pair, "%s %s", space, joined);
        add_merge(&w, pair);
        memmove(pair + strlen(space), pair + strlen(space) + 1, strlen(joined) + 1);
        add_word(&w, pair, 1, -1.5f - (float)(i / 2));
    }
    add_word(&w, space, bpe ? 5 : 1, -200);
    add_word(&w, "<|im_start|>", 3, 0);
    add_word(&w, "\n\n", 4, 0);
    add_word(&w, "<think>", 4, 0);
    add_vocabulary(&f, &w, bpe, bpe ? "llama-bpe" : NULL);
    add_u32(&f, "tokenizer.ggml.bos_token_id", 1);
    add_u32(&f, "tokenizer.ggml.eos_token_id", 2);
    add_bool(&f, "tokenizer.ggml.add_space_prefix", false);
    struct gguf *g = open_file(&f);
    must(g != NULL);
    return g;
}

/* Encodes text in three spans and looks at the result. exact: the pieces give the text back. */
static void check_text(const struct tokenizer *t, const char *text, size_t n, unsigned choice, bool exact)
{
    size_t a = n * (choice & 7) / 8, b = a + (n - a) * (choice >> 3 & 3) / 4;
    struct span spans[3] = {
        { text, a, choice & 32 }, { text + a, b - a, choice & 64 }, { text + b, n - b, choice & 128 }
    };
    struct ids ids = { 0 };
    struct bytes joined = { 0 }, shown = { 0 };
    struct detok d = { 0 };
    struct error e = { 0 };
    must(tokenizer_encode(t, spans, 3, choice & 1, &ids, &e));
    size_t first = ids.len && tokenizer_adds_bos(t) && (choice & 1) ? 1 : 0;
    must(!first || ids.data[0] == tokenizer_bos(t));
    for (size_t i = 0; i < ids.len; i++) {
        must(ids.data[i] >= 0 && ids.data[i] < tokenizer_vocab(t));
        struct gguf_str s = tokenizer_piece(t, ids.data[i], true);
        if (i >= first) must(bytes_add(&joined, s.ptr, s.len));
        must(detok_add(t, &d, ids.data[i], true, true, &shown));
        must(d.n_held >= 0 && d.n_held < 4);
    }
    must(detok_end(&d, &shown));
    must(utf8_valid(shown.data ? shown.data : "", shown.len) == shown.len);
    if (exact && !(first && n >= 3 && !memcmp(text, "<s>", 3)))        /* there the text's own start token is the one */
        must(joined.len == n && (!n || !memcmp(joined.data, text, n)));
    ids_free(&ids);
    bytes_free(&joined);
    bytes_free(&shown);
}

static void check_vocabulary(const uint8_t *data, size_t size)
{
    static const char text[] = "The the  in and\n\n\t123 don't\0<|im_start|><s>\xC3\xA9\xF0\x9F\x91\x8D\xFF\xE2\x96\x81 aaaa";
    char path[64];
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    must(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    struct gguf *g;
    struct tokenizer *t;
    struct error e = { 0 };
    if (gguf_open(&g, path, false, &e)) {
        char note[200];
        if (tokenizer_open(&t, g, note, &e)) {
            for (unsigned choice = 0; choice < 256; choice += 51) check_text(t, text, sizeof text - 1, choice, false);
            for (int32_t id = -2; id <= tokenizer_vocab(t); id++) {
                struct gguf_str s = tokenizer_text(t, id), p = tokenizer_piece(t, id, false);
                must(p.len <= s.len);
                must(!s.len || tokenizer_find(t, s.ptr, s.len) >= 0);
            }
            must(tokenizer_bos(t) < tokenizer_vocab(t) && tokenizer_eos(t) < tokenizer_vocab(t));
            tokenizer_close(t);
        } else {
            must(e.code != GEN_OK && e.text[0]);
        }
        gguf_close(g);
    }
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct gguf *files[2];
    static struct tokenizer *small[2];
    struct error e;
    for (int bpe = 0; bpe < 2; bpe++)
        if (!small[bpe]) must(tokenizer_open(&small[bpe], files[bpe] = small_vocabulary(bpe), NULL, &e));
    bool marked = memmem(data, size, "\xE2\x96\x81", 3) != NULL;      /* the same as a space for SentencePiece */
    if (size >= 4 && !memcmp(data, "GGUF", 4)) check_vocabulary(data, size);
    else if (size) for (int bpe = 0; bpe < 2; bpe++)
        check_text(small[bpe], (const char *)data + 1, size - 1, data[0], bpe || !marked);
    return 0;
}
