/* test_tokenizer.c - small vocabularies made here: start and end tokens, spans, merging against the plain algorithm,
 * broken text, streaming, vocabularies that must be refused, patterns without PCRE2's compiler. */
#define _GNU_SOURCE
#include "vocabulary.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <pthread.h>
#include <time.h>
#include <cmocka.h>

#include "pretokenizer.h"
#include "tokenizer.h"
#include "utf8.h"

static struct error e;
static bool refuse_compiler;           /* pcre2_jit_compile fails, as where memory may not be made executable */
static int n_refused;

int pcre2_jit_compile_8(void *code, uint32_t options);
int pcre2_jit_compile_8(void *code, uint32_t options)
{
    int (*real)(void *, uint32_t) = (int (*)(void *, uint32_t))dlsym(RTLD_NEXT, "pcre2_jit_compile_8");
    n_refused += refuse_compiler;
    return refuse_compiler ? -45 : real(code, options);
}

static uint64_t state;                 /* SplitMix64 (Steele, Lea, Flood 2014) */
static unsigned draw(unsigned n)
{
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return (unsigned)((z ^ (z >> 31)) % n);
}

/* ---- help ------------------------------------------------------------------------------------------------------- */

struct vocabulary { struct gguf *g; struct tokenizer *t; char note[200]; };

static struct vocabulary opened(struct file *f)
{
    struct vocabulary v = { .g = open_file(f) };
    assert_non_null(v.g);
    if (!tokenizer_open(&v.t, v.g, v.note, &e)) fail_msg("%s", e.text);
    return v;
}

static void closed(struct vocabulary *v)
{
    tokenizer_close(v->t);
    gguf_close(v->g);
}

/* The texts of the tokens of the spans, each in brackets. */
static const char *show(const struct tokenizer *t, const struct span *spans, size_t n, bool add_bos)
{
    static struct bytes out;
    struct ids ids = { 0 };
    out.len = 0;
    assert_true(bytes_add(&out, "", 0));
    assert_true(ids_add(&ids, 12345));
    assert_true(tokenizer_encode(t, spans, n, add_bos, &ids, &e));
    assert_int_equal(ids.data[0], 12345);              /* ids are appended */
    for (size_t i = 1; i < ids.len; i++) {
        struct gguf_str s = tokenizer_text(t, ids.data[i]);
        assert_true(bytes_printf(&out, "[%.*s]", (int)s.len, s.ptr));
    }
    ids_free(&ids);
    return out.data;
}

static const char *show_text(const struct tokenizer *t, const char *text, bool trusted, bool add_bos)
{
    return show(t, &(struct span){ text, strlen(text), trusted }, 1, add_bos);
}

/* A byte-level vocabulary: specials, 256 bytes, "hello" and " hello". */
static void bpe_words(struct words *w)
{
    add_word(w, "<s>", 3, 0);
    add_word(w, "</s>", 3, 0);
    add_word(w, "<|im_end|>", 3, 0);
    add_word(w, "<think>", 4, 0);
    add_bytes(w, true);
    const char *merges[] = { "h e", "l l", "he ll", "hell o", "\xC4\xA0 hello" };
    const char *words[] = { "he", "ll", "hell", "hello", "\xC4\xA0hello" };
    for (int i = 0; i < 5; i++) add_merge(w, merges[i]), add_word(w, words[i], 1, 0);
}

/* SentencePiece: specials, bytes, some pieces. */
static void spm_words(struct words *w)
{
    add_word(w, "<unk>", 2, 0);
    add_word(w, "<s>", 3, 0);
    add_word(w, "</s>", 3, 0);
    add_bytes(w, false);
    const char *pieces[] = { "\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello", "\u2581hello", "\u2581\u2581" };
    for (int i = 0; i < 11; i++) add_word(w, pieces[i], 1, i < 5 ? -100 : (float)i);
    add_word(w, "<think>", 4, 0);
}

static struct vocabulary bpe(void)
{
    struct words w = { 0 };
    struct file f = { 0 };
    bpe_words(&w);
    add_vocabulary(&f, &w, true, "gpt-2");
    add_u32(&f, "tokenizer.ggml.bos_token_id", 0);
    add_u32(&f, "tokenizer.ggml.eos_token_id", 1);
    add_bool(&f, "tokenizer.ggml.add_bos_token", true);
    return opened(&f);
}

static struct vocabulary spm(bool prefix)
{
    struct words w = { 0 };
    struct file f = { 0 };
    spm_words(&w);
    add_vocabulary(&f, &w, false, "default");
    if (!prefix) add_bool(&f, "tokenizer.ggml.add_space_prefix", false);
    return opened(&f);
}

/* ---- start and end tokens --------------------------------------------------------------------------------------- */

/* Exactly one start token where the model wants one, none otherwise, also when the text has it already. */
static void test_one_bos(void **unused)
{
    (void)unused;
    static const struct { int adds; bool has_id, bpe; const char *pre; bool expected; } cases[] = {
        { 1, true, true, "gpt-2", true }, { 0, true, true, "gpt-2", false }, { -1, true, true, "gpt-2", false },
        { 1, false, true, "gpt-2", false }, { -1, true, true, "llama-bpe", true }, { -1, true, true, "tekken", true },
        { 0, true, true, "llama-bpe", false }, { -1, false, true, "llama-bpe", false },
        { -1, true, true, "qwen2", false },
        { 1, true, false, NULL, true }, { 0, true, false, NULL, false }, { -1, true, false, NULL, true },
        { -1, false, false, NULL, true },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct words w = { 0 };
        struct file f = { 0 };
        if (cases[i].bpe) bpe_words(&w);
        else spm_words(&w);
        add_vocabulary(&f, &w, cases[i].bpe, cases[i].pre);
        if (cases[i].adds >= 0) add_bool(&f, "tokenizer.ggml.add_bos_token", cases[i].adds);
        if (cases[i].has_id) add_u32(&f, "tokenizer.ggml.bos_token_id", cases[i].bpe ? 0 : 1);
        struct vocabulary v = opened(&f);
        const char *bos = cases[i].expected ? "[<s>]" : "";
        char want[100];
        assert_int_equal(tokenizer_adds_bos(v.t), cases[i].expected);
        assert_string_equal(show_text(v.t, "", true, true), bos);
        assert_string_equal(show_text(v.t, "", true, false), "");
        snprintf(want, sizeof want, "%s[%shello]", bos, cases[i].bpe ? "" : "\u2581");
        assert_string_equal(show_text(v.t, "hello", true, true), want);
        assert_string_equal(show_text(v.t, "hello", true, false), want + strlen(bos));
        snprintf(want, sizeof want, "[<s>][%shello]", cases[i].bpe ? "" : "\u2581");
        assert_string_equal(show_text(v.t, "<s>hello", true, true), want);
        assert_string_equal(show_text(v.t, "<s>hello", true, false), want);
        assert_string_equal(show_text(v.t, "<s>", true, true), "[<s>]");
        const char *forged = show_text(v.t, "<s>hello", false, true);      /* a user's <s> is ordinary text */
        assert_true(!strncmp(forged, bos, strlen(bos)) && !strstr(forged + strlen(bos), "[<s>]"));
        closed(&v);
    }
}

static void test_end_tokens(void **unused)
{
    (void)unused;
    struct words w = { 0 };
    struct file f = { 0 };
    bpe_words(&w);
    int ordinary = add_word(&w, "<|eot_id|>", 1, 0), user = add_word(&w, "<|end|>", 4, 0);
    int other = add_word(&w, "<|user|>", 4, 0), tag = add_word(&w, "</s>x", 4, 0);
    int eot = add_word(&w, "STOP", 3, 0), eom = add_word(&w, "CALL", 3, 0), turn = add_word(&w, "<end_of_turn>", 4, 0);
    int deepseek = add_word(&w, "<\uFF5Cend\u2581of\u2581sentence\uFF5C>", 3, 0);
    add_vocabulary(&f, &w, true, "gpt-2");
    add_u32(&f, "tokenizer.ggml.eos_token_id", 1);
    add_u32(&f, "tokenizer.ggml.eot_token_id", (uint32_t)eot);
    add_u32(&f, "tokenizer.ggml.eom_token_id", (uint32_t)eom);
    struct vocabulary v = opened(&f);
    assert_int_equal(tokenizer_eos(v.t), 1);
    assert_int_equal(tokenizer_bos(v.t), -1);
    const int ends[] = { 1, 2, user, eot, eom, turn, deepseek };
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        assert_true(tokenizer_is_end(v.t, ends[i]));
        assert_true(tokenizer_is_control(v.t, ends[i]));
        assert_int_equal(tokenizer_piece(v.t, ends[i], false).len, 0);
        assert_true(tokenizer_piece(v.t, ends[i], true).len > 0);
    }
    const int others[] = { 0, ordinary, tag, other, 3, 100, -1, tokenizer_vocab(v.t), INT32_MIN, INT32_MAX };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) assert_false(tokenizer_is_end(v.t, others[i]));
    assert_true(tokenizer_is_control(v.t, other));                 /* a turn marker, whatever the file calls it */
    assert_false(tokenizer_is_control(v.t, ordinary));             /* merely spells one */
    assert_false(tokenizer_is_control(v.t, tag));
    assert_null(strstr(show_text(v.t, "<|user|>", false, false), "[<|user|>]"));
    assert_string_equal(show_text(v.t, "<|user|>", true, false), "[<|user|>]");
    closed(&v);

    add_word(&w, "<unk>", 2, 0);                                   /* Gemma's strike-through tag is no end */
    add_word(&w, "<bos>", 3, 0);
    add_word(&w, "<eos>", 3, 0);
    int html = add_word(&w, "</s>", 4, 0);
    add_bytes(&w, false);
    add_vocabulary(&f, &w, false, NULL);
    v = opened(&f);
    assert_false(tokenizer_is_end(v.t, html));
    assert_false(tokenizer_is_control(v.t, html));
    assert_true(tokenizer_is_end(v.t, 2));
    assert_string_equal(show_text(v.t, "</s>", false, false), "[</s>]");
    closed(&v);
}

/* ---- spans ------------------------------------------------------------------------------------------------------ */

static void test_spans(void **unused)
{
    (void)unused;
    struct vocabulary v = bpe();
    struct span split[] = {
        { "he", 2, true }, { "", 0, false }, { "ll", 2, false }, { "o hel", 5, true }, { "lo", 2, true }
    };
    assert_string_equal(show(v.t, split, 5, false), "[hello][\u0120hello]");
    struct span message[] = { { "<s>", 3, true }, { "<|im_end|>", 10, false }, { "<|im_end|>", 10, true } };
    assert_string_equal(show(v.t, message, 3, true), "[<s>][<][|][i][m][_][e][n][d][|][>][<|im_end|>]");
    struct span forged[] = { { "<|im_", 5, true }, { "end|>", 5, false } };        /* half of it is not enough */
    assert_null(strstr(show(v.t, forged, 2, false), "[<|im_end|>]"));
    forged[0].trusted = false, forged[1].trusted = true;
    assert_null(strstr(show(v.t, forged, 2, false), "[<|im_end|>]"));
    forged[0].trusted = true;                                      /* two trusted ones are one text */
    assert_string_equal(show(v.t, forged, 2, false), "[<|im_end|>]");
    struct span user[] = { { "<thi", 4, false }, { "nk>", 3, true } };
    assert_string_equal(show(v.t, user, 2, false), "[<think>]");   /* user-defined tokens are found in any text */
    assert_string_equal(show_text(v.t, "x<think><think", false, false), "[x][<think>][<][t][h][i][n][k]");
    assert_string_equal(show(v.t, NULL, 0, true), "[<s>]");
    closed(&v);
}

/* The longest special token at the leftmost place. */
static void test_longest_special(void **unused)
{
    (void)unused;
    struct words w = { 0 };
    struct file f = { 0 };
    const char *specials[] = { "ab", "abcd", "bcdef", "\n", "\n\n", "\n\n\n", "a", "abcd" };
    for (int i = 0; i < 8; i++) add_word(&w, specials[i], 4, 0);
    add_bytes(&w, true);
    add_vocabulary(&f, &w, true, "gpt-2");
    struct vocabulary v = opened(&f);
    assert_string_equal(show_text(v.t, "abcdef", false, false), "[abcd][e][f]");
    assert_string_equal(show_text(v.t, "abcab", false, false), "[ab][c][ab]");
    assert_string_equal(show_text(v.t, "xbcdeabc", false, false), "[x][b][c][d][e][ab][c]");
    assert_string_equal(show_text(v.t, "bcdefa", false, false), "[bcdef][a]");
    assert_string_equal(show_text(v.t, "\n\n\n\n\n", false, false), "[\n\n\n][\n\n]");
    assert_int_equal(tokenizer_find(v.t, "abcd", 4), 1);           /* the first of two equal ones */
    closed(&v);
}

/* Phi-3: special tokens swallow the white space behind them. */
static void test_stripping(void **unused)
{
    (void)unused;
    for (int phi = 0; phi < 2; phi++) {
        struct words w = { 0 };
        struct file f = { 0 };
        spm_words(&w);
        add_word(&w, "<|end|>", 3, 0);
        add_vocabulary(&f, &w, false, NULL);
        add_string(&f, "general.architecture", phi ? "phi3" : "llama");
        add_bool(&f, "tokenizer.ggml.add_space_prefix", false);
        struct vocabulary v = opened(&f);
        assert_string_equal(show_text(v.t, "<|end|> \n\thello <s> hello", true, false),
                            phi ? "[<|end|>][hello][\u2581][<s>][\u2581hello]"
                                : "[<|end|>][\u2581][<0x0A>][<0x09>][hello][\u2581][<s>][\u2581hello]");
        closed(&v);
    }
}

/* ---- SentencePiece ---------------------------------------------------------------------------------------------- */

static void test_sentence_piece(void **unused)
{
    (void)unused;
    struct vocabulary v = spm(true);
    assert_string_equal(v.note, "");                               /* tokenizer.ggml.pre does not matter */
    assert_string_equal(show_text(v.t, "hello", false, false), "[\u2581hello]");
    assert_string_equal(show_text(v.t, " hello", false, false), "[\u2581\u2581][hello]");
    assert_string_equal(show_text(v.t, "hello hello", false, false), "[\u2581hello][\u2581hello]");
    assert_string_equal(show_text(v.t, "\u00e9h", false, false), "[\u2581][<0xC3>][<0xA9>][h]");
    assert_string_equal(show_text(v.t, "<0x41>", false, false),
                        "[\u2581][<0x3C>][<0x30>][<0x78>][<0x34>][<0x31>][<0x3E>]");
    assert_string_equal(show_text(v.t, "<think>hello", false, false), "[<think>][\u2581hello]");
    assert_string_equal(show_text(v.t, "", false, false), "");
    closed(&v);
    v = spm(false);
    assert_string_equal(show_text(v.t, "hello  hello", false, false), "[hello][\u2581\u2581][hello]");
    assert_string_equal(show_text(v.t, "hello\u2581hello", false, false), "[hello][\u2581hello]");   /* it is a space */
    closed(&v);
    struct words w = { 0 };                                        /* no token for a space but its byte */
    struct file f = { 0 };
    add_word(&w, "<unk>", 2, 0);
    add_bytes(&w, false);
    add_vocabulary(&f, &w, false, NULL);
    v = opened(&f);
    assert_string_equal(show_text(v.t, "a b", false, false), "[<0x20>][<0x61>][<0x20>][<0x62>]");
    closed(&v);                                                    /* no byte tokens either */
    add_word(&w, "<unk>", 2, 0);
    add_word(&w, "a", 1, 0);
    add_word(&w, "aa", 1, 1);
    add_vocabulary(&f, &w, false, NULL);
    v = opened(&f);
    assert_string_equal(show_text(v.t, "\u00e9 aaa", false, true), "[<unk>][<unk>][<unk>][aa][a]");
    closed(&v);
}

/* ---- merging ---------------------------------------------------------------------------------------------------- */

/* The plain algorithm: again and again the best pair, the leftmost of equals. parts: where each part starts, and the
 * length of text as the last. Returns the number of parts. */
static size_t merge_plainly(const struct tokenizer *t, const char *text, size_t *parts, size_t n,
                            double (*cost)(const struct tokenizer *, const char *, size_t, size_t))
{
    for (;;) {
        size_t best = 0;
        double least = 1e9;
        for (size_t i = 0; i + 2 <= n; i++) {
            double c = cost(t, text + parts[i], parts[i + 1] - parts[i], parts[i + 2] - parts[i + 1]);
            if (c < least) least = c, best = i;
        }
        if (least == 1e9) return n;
        memmove(parts + best + 1, parts + best + 2, (n - best - 1) * sizeof *parts);
        n--;
    }
}

enum { RANDOM_WORDS = 40 };
static char random_merges[RANDOM_WORDS][40];

static double rank_cost(const struct tokenizer *t, const char *text, size_t left, size_t right)
{
    char pair[80];
    (void)t;
    snprintf(pair, sizeof pair, "%.*s %.*s", (int)left, text, (int)right, text + left);
    for (int i = 0; i < RANDOM_WORDS; i++) if (!strcmp(random_merges[i], pair)) return i;
    return 1e9;
}

static double score_cost(const struct tokenizer *t, const char *text, size_t left, size_t right)
{
    int id = tokenizer_find(t, text, left + right);
    return id < 0 ? 1e9 : id / 4;                      /* four tokens have the same score */
}

/* Random vocabularies over "abc", words of up to 300 letters. */
static void test_merging(void **unused)
{
    (void)unused;
    state = 1;
    for (int round = 0; round < 60; round++) {
        bool is_bpe = round & 1;
        struct words w = { 0 };
        struct file f = { 0 };
        char words[RANDOM_WORDS + 3][40] = { "a", "b", "c" };
        for (int i = 0; i < 3; i++) add_word(&w, words[i], 1, 0);
        for (int i = 0; i < RANDOM_WORDS; i++) {
            const char *left = words[draw((unsigned)i + 3)], *right = words[draw((unsigned)i + 3)];
            if (strlen(left) + strlen(right) > 30) left = right = "a";
            sprintf(random_merges[i], "%s %s", left, right);
            sprintf(words[i + 3], "%s%s", left, right);
            add_merge(&w, random_merges[i]);
            add_word(&w, words[i + 3], 1, -(float)(w.n / 4));
        }
        add_vocabulary(&f, &w, is_bpe, "gpt-2");
        add_bool(&f, "tokenizer.ggml.add_space_prefix", false);
        struct vocabulary v = opened(&f);
        for (int k = 0; k < 60; k++) {
            char text[301], want[1000] = "";
            size_t parts[302], n = 1 + draw(k < 50 ? 20 : 300);
            for (size_t i = 0; i < n; i++) text[i] = (char)('a' + draw(3)), parts[i] = i;
            text[n] = '\0', parts[n] = n;
            n = merge_plainly(v.t, text, parts, n, is_bpe ? rank_cost : score_cost);
            for (size_t i = 0; i < n; i++)
                sprintf(want + strlen(want), "[%.*s]", (int)(parts[i + 1] - parts[i]), text + parts[i]);
            assert_string_equal(show_text(v.t, text, false, false), want);
        }
        closed(&v);
    }
}

/* A token that reaches over a space is found although text is cut at other spaces. */
static void test_pieces_over_spaces(void **unused)
{
    (void)unused;
    struct words w = { 0 };
    struct file f = { 0 };
    const char *pieces[] = { "\u2581", ">", "a", ">\u2581", ">\u2581a", "\u2581a" };
    add_word(&w, "<unk>", 2, 0);
    for (int i = 0; i < 6; i++) add_word(&w, pieces[i], 1, (float)-i);
    add_vocabulary(&f, &w, false, NULL);
    add_bool(&f, "tokenizer.ggml.add_space_prefix", false);
    struct vocabulary v = opened(&f);
    assert_string_equal(show_text(v.t, "a> a a", false, false), "[a][>\u2581a][\u2581a]");
    assert_string_equal(show_text(v.t, "a>  a a> a", false, false), "[a][>\u2581][\u2581a][\u2581a][>\u2581a]");
    closed(&v);
}

/* ---- broken text and streaming ---------------------------------------------------------------------------------- */

/* Random bytes: the pieces joined are the text. Two threads, since one tokenizer serves many. */
static void *encode_noise(void *context)
{
    const struct vocabulary *v = context;
    uint64_t seed = (uint64_t)(uintptr_t)v;
    for (int round = 0; round < 400; round++) {
        char text[400];
        size_t n = round % sizeof text;
        struct ids ids = { 0 };
        struct bytes back = { 0 };
        struct error mine;
        for (size_t i = 0; i < n; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            text[i] = "hello \n\xC3\xA9\xF0\x9F\x91\x8D\xFF\xE2\x96\0"[seed >> 33 & 15];
            if ((seed >> 40) % 5 == 0) text[i] = (char)(seed >> 48);
            if (i > 1 && !memcmp(text + i - 2, "\u2581", 3)) text[i] = '-';    /* this alone does not come back */
        }
        bool ok = tokenizer_encode(v->t, &(struct span){ text, n, false }, 1, false, &ids, &mine);
        for (size_t i = 0; ok && i < ids.len; i++) {
            struct gguf_str s = tokenizer_piece(v->t, ids.data[i], true);
            ok = bytes_add(&back, s.ptr, s.len);
        }
        ok = ok && back.len == n && (!n || !memcmp(back.data, text, n));
        ids_free(&ids);
        bytes_free(&back);
        if (!ok) return "the bytes did not come back";
    }
    return NULL;
}

static void test_broken_text(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        struct vocabulary v = k ? bpe() : spm(false);
        pthread_t threads[2];
        void *problem[2];
        for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&threads[i], NULL, encode_noise, &v), 0);
        for (int i = 0; i < 2; i++) assert_int_equal(pthread_join(threads[i], &problem[i]), 0);
        assert_null(problem[0]);
        assert_null(problem[1]);
        closed(&v);
    }
}

/* Streams bytes one by one through byte tokens; what comes out after each, separated by '|'. */
static const char *stream(const struct tokenizer *t, const char *bytes, size_t n)
{
    static struct bytes out;
    struct detok d = { 0 };
    out.len = 0;
    for (size_t i = 0; i < n; i++) {
        char name[3];
        byte_letter((unsigned char)bytes[i], name);
        assert_true(detok_add(t, &d, tokenizer_find(t, name, strlen(name)), true, false, &out));
        assert_int_equal(utf8_valid(out.data ? out.data : "", out.len), out.len);
        assert_true(bytes_add(&out, "|", 1));
    }
    assert_true(detok_end(&d, &out));
    assert_true(detok_end(&d, &out));                  /* nothing is left to say */
    return out.data;
}

static void test_streaming(void **unused)
{
    (void)unused;
    struct words w = { 0 };
    struct file f = { 0 };
    bpe_words(&w);
    int broken = add_word(&w, "\u00e2\u0138A\u00f0\u0141", 1, 0);          /* E2 96 A F0 9F in byte-level letters */
    add_vocabulary(&f, &w, true, "gpt-2");
    struct vocabulary v = opened(&f);
    assert_string_equal(stream(v.t, "a\xC3\xA9", 3), "a||\u00e9|");
    assert_string_equal(stream(v.t, "\xF0\x9F\x91\x8D\xF0\x9F\x91\x8D", 8), "|||\U0001F44D||||\U0001F44D|");
    assert_string_equal(stream(v.t, "\xF0\x9F\x91", 3), "|||\uFFFD");                      /* cut off at the end */
    assert_string_equal(stream(v.t, "\xFF" "A\xC3" "A", 4), "\uFFFD|A||\uFFFDA|");         /* holds nothing back */
    assert_string_equal(stream(v.t, "\xE2\x96\xE2\x96\x81", 5), "||\uFFFD||\u2581|");
    assert_string_equal(stream(v.t, "\xED\xA0\x80", 3), "|\uFFFD\uFFFD|\uFFFD|");          /* a surrogate */
    assert_string_equal(stream(v.t, "\xC0\x80\xF5\xF4\x90", 5), "\uFFFD|\uFFFD|\uFFFD||\uFFFD\uFFFD|");
    struct detok d = { 0 };
    struct bytes out = { 0 };
    assert_true(detok_add(v.t, &d, 2, true, false, &out));         /* a control token is not shown unless asked for */
    assert_int_equal(out.len, 0);
    assert_true(detok_add(v.t, &d, 2, true, true, &out));
    assert_true(detok_add(v.t, &d, -5, true, true, &out) && detok_add(v.t, &d, 1 << 30, true, true, &out));
    assert_string_equal(out.data, "<|im_end|>");
    out.len = 0;
    assert_true(detok_add(v.t, &d, broken, true, false, &out) && detok_add(v.t, &d, broken, true, false, &out));
    assert_true(detok_end(&d, &out));
    assert_string_equal(out.data, "\uFFFDA\uFFFD\uFFFDA\uFFFD");
    bytes_free(&out);
    closed(&v);
}

/* SentencePiece's first space: removed at the start of a text and behind special tokens, nowhere else. */
static void test_first_space(void **unused)
{
    (void)unused;
    struct vocabulary v = spm(true);
    const char *texts[] = {
        "hello hello", " hello", "  h", "", "h\n hello", "<s>hello<think> hello</s>", "<think>hello"
    };
    for (int i = 0; i < 7; i++) for (int at_start = 0; at_start < 2; at_start++) {
        struct ids ids = { 0 };
        struct bytes out = { 0 };
        struct detok d = { 0 };
        assert_true(bytes_add(&out, "", 0));
        assert_true(tokenizer_encode(v.t, &(struct span){ texts[i], strlen(texts[i]), true }, 1, false, &ids, &e));
        for (size_t k = 0; k < ids.len; k++) assert_true(detok_add(v.t, &d, ids.data[k], at_start, true, &out));
        if (at_start) assert_string_equal(out.data, texts[i]);
        else if (i < 4 && ids.len) assert_true(out.data[0] == ' ' && !strcmp(out.data + 1, texts[i]));
        ids_free(&ids);
        bytes_free(&out);
    }
    closed(&v);
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

/* What each file does that it should not, and what the refusal says. */
static void build_bad(int kind, struct file *f, const char **says)
{
    struct words w = { 0 };
    struct bytes short_array = { 0 }, none = { 0 };
    uint32_t many[2] = { 0, 0 };
    assert_true(bytes_add(&short_array, many, sizeof many) && bytes_add(&none, "", 0));
    bool is_bpe = kind < 10;
    if (is_bpe) bpe_words(&w);
    else spm_words(&w);
    if (kind == 1) add_merge(&w, "nospace");
    if (kind == 2) add_merge(&w, "trailing ");
    struct words rest = { 0 };
    if (kind == 3 || kind == 13) rest = w, w = (struct words){ 0 };        /* a vocabulary of zero tokens */
    add_vocabulary(f, &w, is_bpe, kind == 4 ? "no-such-pre\x1b[31m" : "gpt-2");
    bytes_free(&rest.tokens.values), bytes_free(&rest.types.values);
    bytes_free(&rest.scores.values), bytes_free(&rest.merges.values);
    static const char *const messages[] = {
        "bos_token_id in the model file is 999999", "merges[5]", "merges[5]", "tokens", "no-such-pre?[31m",
        "eos_token_id", "add_bos_token", "eot_token_id", "eom_token_id", "bos_token_id", "bos_token_id",
        "add_space_prefix", "unknown_token_id", "tokens",
    };
    *says = messages[kind];
    if (kind == 0 || kind == 10) add_u32(f, "tokenizer.ggml.bos_token_id", 999999);
    if (kind == 5) add_u32(f, "tokenizer.ggml.eos_token_id", 0x7FFFFFFF);
    if (kind == 6) add_string(f, "tokenizer.ggml.add_bos_token", "yes");
    if (kind == 7) add_u32(f, "tokenizer.ggml.eot_token_id", 0xFFFFFFFE);
    if (kind == 8) add_u32(f, "tokenizer.ggml.eom_token_id", 100000);
    if (kind == 9) add_array(f, "tokenizer.ggml.bos_token_id", GGUF_I32, 2, &short_array);
    if (kind == 11) add_array(f, "tokenizer.ggml.add_space_prefix", GGUF_I32, 2, &short_array);
    if (kind == 12) add_u32(f, "tokenizer.ggml.unknown_token_id", 100000);
    bytes_free(&short_array), bytes_free(&none);
}

static void assert_refused(struct file *f, const char *says)
{
    struct tokenizer *t = NULL;
    struct gguf *g = open_file(f);
    assert_non_null(g);
    e = (struct error){ 0 };
    assert_false(tokenizer_open(&t, g, NULL, &e));
    assert_null(t);
    assert_int_equal(e.code, GEN_MODEL);
    if (!strstr(e.text, says)) fail_msg("'%s' is not in: %s", says, e.text);
    gguf_close(g);
}

static void test_refused(void **unused)
{
    (void)unused;
    struct file f = { 0 };
    const char *says;
    for (int kind = 0; kind < 14; kind++) {
        build_bad(kind, &f, &says);
        assert_refused(&f, says);
    }
    add_string(&f, "general.name", "no vocabulary");
    assert_refused(&f, "tokenizer.ggml.model");
    add_string(&f, "tokenizer.ggml.model", "bert");
    assert_refused(&f, "'bert'");
    add_string(&f, "tokenizer.ggml.model", "gpt2");
    assert_refused(&f, "tokenizer.ggml.tokens");
    /* arrays that are missing, too short or of another type */
    enum { MISSING, OTHER_TYPE, SHORT, GOOD };
    static const struct { bool bpe; int types, scores, merges; const char *says; } cases[] = {
        { true, SHORT, MISSING, GOOD, "token_type" }, { true, GOOD, MISSING, MISSING, "merges is missing" },
        { false, GOOD, MISSING, MISSING, "scores is missing" }, { false, GOOD, SHORT, MISSING, "scores" },
        { false, OTHER_TYPE, GOOD, MISSING, "token_type" }, { true, GOOD, MISSING, OTHER_TYPE, "merges" },
        { false, GOOD, OTHER_TYPE, MISSING, "scores" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct words w = { 0 };
        bpe_words(&w);
        add_string(&f, "tokenizer.ggml.model", cases[i].bpe ? "gpt2" : "llama");
        add_array(&f, "tokenizer.ggml.tokens", GGUF_STRING, w.n, &w.tokens.values);
        if (cases[i].types == SHORT) w.types.values.len = 4;
        if (cases[i].scores == SHORT) w.scores.values.len = 4;
        if (cases[i].types)
            add_array(&f, "tokenizer.ggml.token_type", cases[i].types == OTHER_TYPE ? GGUF_F32 : GGUF_I32,
                      cases[i].types == SHORT ? 1 : w.n, &w.types.values);
        if (cases[i].scores)
            add_array(&f, "tokenizer.ggml.scores", cases[i].scores == OTHER_TYPE ? GGUF_I32 : GGUF_F32,
                      cases[i].scores == SHORT ? 1 : w.n, &w.scores.values);
        if (cases[i].merges == GOOD)
            add_array(&f, "tokenizer.ggml.merges", GGUF_STRING, w.n_merges, &w.merges.values);
        if (cases[i].merges == OTHER_TYPE) add_array(&f, "tokenizer.ggml.merges", GGUF_I32, w.n, &w.types.values);
        bytes_free(&w.tokens.values), bytes_free(&w.types.values);
        bytes_free(&w.scores.values), bytes_free(&w.merges.values);
        assert_refused(&f, cases[i].says);
    }
}

/* Odd vocabularies that work. */
static void test_odd_vocabularies(void **unused)
{
    (void)unused;
    struct words w = { 0 };
    struct file f = { 0 };
    bpe_words(&w);
    int empty = add_word(&w, "", 1, 0), second = add_word(&w, "hello", 1, 0), nul = add_word_n(&w, "a\0b", 3, 4, 0);
    int strange = add_word(&w, "type 77", 77, 0), broken = add_word(&w, "\xFF\xC3", 1, 0);
    int unused_one = add_word(&w, "zz", 5, 0);
    add_merge(&w, "not known");
    add_merge(&w, "z z");
    add_merge(&w, "h e");
    char *longer = malloc(300000);
    memset(longer, 'q', 300000);
    int huge = add_word_n(&w, longer, 300000, 3, 0);
    add_vocabulary(&f, &w, true, NULL);
    add_u32(&f, "tokenizer.ggml.bos_token_id", UINT32_MAX);
    struct vocabulary v = opened(&f);
    assert_non_null(strstr(v.note, "gpt-2"));
    assert_int_equal(tokenizer_bos(v.t), -1);
    assert_int_equal(tokenizer_find(v.t, "", 0), -1);
    assert_true(tokenizer_find(v.t, "hello", 5) < second);
    assert_int_equal(tokenizer_find(v.t, "a\0b", 3), nul);
    assert_int_equal(tokenizer_find(v.t, "a", 1), tokenizer_find(v.t, "a\0", 1));
    assert_int_equal(tokenizer_text(v.t, empty).len, 0);
    assert_int_equal(tokenizer_piece(v.t, broken, false).len, 2);
    assert_int_equal(tokenizer_piece(v.t, strange, false).len, 7);
    assert_int_equal(tokenizer_piece(v.t, unused_one, true).len, 0);
    assert_int_equal(tokenizer_piece(v.t, huge, true).len, 300000);
    assert_string_equal(show_text(v.t, "hello zz", false, false), "[hello][\u0120][z][z]");
    struct ids ids = { 0 };
    assert_true(tokenizer_encode(v.t, &(struct span){ "xa\0b\0", 5, false }, 1, false, &ids, &e));
    assert_int_equal(ids.len, 3);
    assert_int_equal(ids.data[1], nul);
    ids.len = 0;
    assert_true(tokenizer_encode(v.t, &(struct span){ longer, 300000, true }, 1, false, &ids, &e));
    assert_int_equal(ids.len, 300000);
    ids_free(&ids);
    free(longer);
    closed(&v);
    bpe_words(&w);
    add_vocabulary(&f, &w, true, "default");
    v = opened(&f);
    assert_non_null(strstr(v.note, "default"));
    closed(&v);
}

/* ---- patterns --------------------------------------------------------------------------------------------------- */

struct cut { const char *at; uint64_t hash; size_t words; };       /* what each() has seen */

static bool see_word(void *context, const char *word, size_t n)
{
    struct cut *c = context;
    assert_true(n > 0);
    assert_ptr_equal(word, c->at);
    c->at += n;
    c->hash = c->hash * 1000003 + n;
    c->words++;
    return true;
}

static bool stop_at_once(void *context, const char *word, size_t n)
{
    (void)word, (void)n;
    return ++*(int *)context < 3;
}

/* All patterns on long texts that tempt to backtrack, compiled and interpreted: the same words, in linear time. */
static void test_patterns(void **unused)
{
    (void)unused;
    static const char *const names[] = {
        "gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "falcon", "deepseek-llm",
        "deepseek-coder",
    };
    static const char *const units[] = {
        " ", "A", "a", "\n", "7", "!", "\u6f22", "\u0301", " \n", "A\u6f22", "aB1 ", "\t  x", "\n    ", "'S", "\xFF",
        "\xF0\x9F", "a\u0301", "\u00a0", "/\n", "-A",
    };
    enum { SIZE = 1 << 17 };
    char *text = malloc(SIZE);
    for (size_t u = 0; u < sizeof units / sizeof *units; u++) for (const char *tail = "z7! "; *tail; tail++) {
        size_t n = 0, k = strlen(units[u]);
        for (; n + k + 1 <= SIZE; n += k) memcpy(text + n, units[u], k);
        text[n++] = *tail;
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            struct cut cuts[2];
            for (int interpreted = 0; interpreted < 2; interpreted++) {
                struct pretokenizer *p;
                refuse_compiler = interpreted;
                assert_true(pretokenizer_open(&p, names[i], strlen(names[i]), &e));
                refuse_compiler = false;
                struct cut *c = &cuts[interpreted];
                *c = (struct cut){ .at = text };
                clock_t start = clock();
                if (!pretokenizer_split(p, text, n, see_word, c, &e)) fail_msg("%s: %s", names[i], e.text);
                assert_true(clock() - start < 2 * CLOCKS_PER_SEC);
                assert_ptr_equal(c->at, text + n);
                int calls = 0;
                assert_false(n > 3 && cuts[0].words > 3 && pretokenizer_split(p, text, n, stop_at_once, &calls, &e));
                pretokenizer_close(p);
            }
            assert_true(cuts[0].hash == cuts[1].hash);
        }
    }
    free(text);
    assert_true(n_refused > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_bos), cmocka_unit_test(test_end_tokens), cmocka_unit_test(test_spans),
        cmocka_unit_test(test_longest_special), cmocka_unit_test(test_stripping), cmocka_unit_test(test_sentence_piece),
        cmocka_unit_test(test_merging), cmocka_unit_test(test_pieces_over_spaces), cmocka_unit_test(test_broken_text),
        cmocka_unit_test(test_streaming), cmocka_unit_test(test_first_space), cmocka_unit_test(test_refused),
        cmocka_unit_test(test_odd_vocabularies), cmocka_unit_test(test_patterns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
