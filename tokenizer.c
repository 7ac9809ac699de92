/* tokenizer.c - byte-level BPE and SentencePiece over one merge loop.
 *
 * Encoding: special tokens are found first; the text between them is cut into words across which nothing ever merges
 * (pretokenizer.c for BPE, before spaces for SentencePiece); a word that has been seen before in the same text is
 * copied from the output; any other is merged, the best pair of neighbours first.
 *
 * The vocabulary stays where gguf.c has it. Beside it are kept: where each text starts, a hash table from text to id,
 * for BPE one from pairs of ids to their merge, the special tokens sorted by text, and all pieces as they are written
 * out. All is made by tokenizer_open and only read later. */
#define _GNU_SOURCE
#include "tokenizer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pretokenizer.h"
#include "utf8.h"

enum {
    MAX_TOKENS = 1 << 22,
    MAX_MERGES = 1 << 22,
    MAX_SPECIAL = 1 << 18,     /* tokens that are looked for in the text */
    MAX_SPECIAL_LENGTH = 256,  /* bytes; bounds the search at each position. A longer one is not looked for */
    MAX_PROBES = 1024,         /* more than chance can cause at the load of 2/3: the file was made to collide */
};

/* tokenizer.ggml.token_type, and what is found out here. */
enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE, KIND = 7, ENDS = 8, STRIPS = 16 };

static const char space_mark[] = "\u2581";             /* a space in SentencePiece's vocabulary */
enum { MARK = sizeof space_mark - 1 };

struct slot { uint32_t tag, id1; };                    /* low half of the hash; id + 1, 0 in an empty slot */
struct merge { uint32_t left, right, rank; int32_t id; };      /* rank: 1 is the first merge, 0 an empty slot */

struct tokenizer {
    int n;
    int bos, eos;                                      /* -1: none */
    bool adds_bos;
    const uint8_t *strings;                            /* tokenizer.ggml.tokens: u64 length and bytes of each text */
    uint32_t *text_at;                                 /* [n] where in strings */
    size_t longest;                                    /* text, in bytes */
    uint8_t *kind;                                     /* [n] kind, ENDS, STRIPS */
    char *pieces;                                      /* what tokens stand for, one after the other */
    uint32_t *piece_at;                                /* [n + 1] where in pieces */
    struct slot *slots;                                /* [2^slot_bits] */
    int slot_bits;
    int32_t byte_id[256];                              /* the token of a single byte, or -1 */
    int32_t *special;                                  /* sorted by text */
    uint32_t special_from[257];                        /* those whose first byte is b: special_from[b] to [b + 1] */

    /* byte-level BPE */
    struct pretokenizer *cutter;                       /* NULL: the vocabulary is SentencePiece's */
    struct merge *merges;                              /* [2^merge_bits] */
    int merge_bits;
    char letter[256][2];                               /* the character that stands for a byte, in UTF-8 */
    uint8_t letter_size[256];

    /* SentencePiece */
    int unknown;                                       /* for a character that has no token, not even bytes; or -1 */
    bool prefix_space;                                 /* text begins with a space that the user did not write */
    const uint8_t *scores;                             /* [n] packed floats */
    bool joined_to_space[256];                         /* some token has a space behind a character that ends so */
};

/* ---- hash tables ------------------------------------------------------------------------------------------------ */

static inline uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static const uint64_t odd = 0x9E3779B97F4A7C15u;       /* 2^64 / golden ratio */

static inline uint64_t hash_bytes(const char *p, size_t n)
{
    uint64_t h = n * odd + 1, w = 0;
    for (; n >= 8; p += 8, n -= 8) {
        memcpy(&w, p, 8);
        h = fold(h ^ w, odd);
    }
    if (n >= 4) {
        uint32_t first, last;
        memcpy(&first, p, 4);
        memcpy(&last, p + n - 4, 4);
        w = first | (uint64_t)last << 32;
    } else if (n) {
        w = (uint64_t)(unsigned char)p[0] | (uint64_t)(unsigned char)p[n / 2] << 8 |
            (uint64_t)(unsigned char)p[n - 1] << 16;
    } else {
        w = 0;
    }
    return fold(h ^ w, odd);
}

static inline uint64_t hash_pair(uint32_t left, uint32_t right)
{
    return fold(((uint64_t)left << 32 | right) + odd, 0xD6E8FEB86659FD93u);
}

/* Bits of a table's size: at most two thirds are used. */
static int table_bits(uint64_t n)
{
    int bits = 4;
    while (((uint64_t)2 << bits) < 3 * n) bits++;
    return bits;
}

static inline struct gguf_str text_of(const struct tokenizer *t, int32_t id)
{
    uint64_t n;
    const uint8_t *at = t->strings + t->text_at[id];
    memcpy(&n, at, sizeof n);
    return (struct gguf_str){ (const char *)at + sizeof n, n };
}

static inline int32_t find_hashed(const struct tokenizer *t, uint64_t hash, const char *text, size_t n)
{
    uint32_t mask = ((uint32_t)1 << t->slot_bits) - 1;
    for (uint32_t i = (uint32_t)(hash >> (64 - t->slot_bits)); t->slots[i].id1; i = (i + 1) & mask) {
        if (t->slots[i].tag != (uint32_t)hash) continue;
        int32_t id = (int32_t)(t->slots[i].id1 - 1);
        struct gguf_str s = text_of(t, id);
        if (s.len == n && !memcmp(s.ptr, text, n)) return id;
    }
    return -1;
}

static int32_t find_text(const struct tokenizer *t, const char *text, size_t n)
{
    return n > t->longest ? -1 : find_hashed(t, hash_bytes(text, n), text, n);
}

static inline const struct merge *find_merge(const struct tokenizer *t, int32_t left, int32_t right)
{
    if (left < 0 || right < 0) return NULL;
    uint32_t mask = ((uint32_t)1 << t->merge_bits) - 1;
    uint32_t i = (uint32_t)(hash_pair((uint32_t)left, (uint32_t)right) >> (64 - t->merge_bits));
    for (; t->merges[i].rank; i = (i + 1) & mask)
        if (t->merges[i].left == (uint32_t)left && t->merges[i].right == (uint32_t)right) return &t->merges[i];
    return NULL;
}

/* Whether ordinary text may become this token. */
static inline bool is_ordinary(const struct tokenizer *t, int32_t id)
{
    int kind = id < 0 ? UNUSED : t->kind[id] & KIND;
    return kind == NORMAL || kind == USER_DEFINED;
}

static inline int32_t find_ordinary(const struct tokenizer *t, const char *text, size_t n)
{
    int32_t id = find_text(t, text, n);
    return is_ordinary(t, id) ? id : -1;
}

/* ---- opening: vocabulary ---------------------------------------------------------------------------------------- */

/* The array at key. NULL with an empty error: there is none. NULL with a filled one: it is something else, or has
 * fewer than `least` items. */
static const struct gguf_value *find_array(const struct gguf *g, const char *key, enum gguf_type item, uint64_t least,
                                           struct error *e)
{
    const struct gguf_value *v = gguf_find(g, key);
    e->code = GEN_OK;
    if (v && (v->type != GGUF_ARRAY || v->item != item)) {
        fail(e, GEN_MODEL, "%s in the model file is not an array of %s", key,
             item == GGUF_STRING ? "strings" : item == GGUF_F32 ? "32-bit floats" : "32-bit integers");
        return NULL;
    }
    if (v && v->count < least) {
        fail(e, GEN_MODEL, "%s in the model file has %llu items where the vocabulary has %llu tokens", key,
             (unsigned long long)v->count, (unsigned long long)least);
        return NULL;
    }
    return v;
}

/* Where each text starts, and the hash table of them all. Of equal texts the first counts; an empty one is left out. */
static bool index_texts(struct tokenizer *t, const struct gguf_value *tokens, struct error *e)
{
    t->strings = tokens->data;
    t->n = (int)tokens->count;
    t->slot_bits = table_bits(tokens->count);
    t->text_at = alloc_zeroed(tokens->count, sizeof *t->text_at, "the vocabulary", e);
    t->slots = t->text_at ? alloc_zeroed((size_t)1 << t->slot_bits, sizeof *t->slots, "the vocabulary", e) : NULL;
    if (!t->slots) return false;
    uint32_t mask = ((uint32_t)1 << t->slot_bits) - 1;
    const uint8_t *at = tokens->data;
    for (int id = 0; id < t->n; id++) {
        t->text_at[id] = (uint32_t)(at - tokens->data);
        struct gguf_str s = gguf_next_str(&at);
        if (!s.len) continue;
        if (s.len > t->longest) t->longest = s.len;
        uint64_t hash = hash_bytes(s.ptr, s.len);
        uint32_t i = (uint32_t)(hash >> (64 - t->slot_bits));
        int probes = 0;
        for (; t->slots[i].id1; i = (i + 1) & mask) {
            if (t->slots[i].tag == (uint32_t)hash) {
                struct gguf_str other = text_of(t, (int32_t)(t->slots[i].id1 - 1));
                if (other.len == s.len && !memcmp(other.ptr, s.ptr, s.len)) break;
            }
            if (++probes > MAX_PROBES)
                return fail(e, GEN_MODEL, "tokenizer.ggml.tokens in the model file was made to collide in hash tables");
        }
        if (!t->slots[i].id1) t->slots[i] = (struct slot){ (uint32_t)hash, (uint32_t)id + 1 };
    }
    return true;
}

/* The byte of a token "<0xAB>", or -1. */
static int byte_of_name(struct gguf_str s)
{
    static const char digits[] = "0123456789ABCDEF";
    if (s.len != 6 || memcmp(s.ptr, "<0x", 3) || s.ptr[5] != '>' || !s.ptr[3] || !s.ptr[4]) return -1;
    const char *high = strchr(digits, s.ptr[3]), *low = strchr(digits, s.ptr[4]);
    return high && low ? (int)((high - digits) * 16 + (low - digits)) : -1;
}

/* <|name|>, with ASCII or full-width bars: the form of turn markers. Some files call them user-defined; what a user
 * types must not become one, so they are control tokens here. */
static bool is_marker(struct gguf_str s)
{
    static const char wide_open[] = "<\uFF5C", wide_close[] = "\uFF5C>";
    return (s.len > 4 && !memcmp(s.ptr, "<|", 2) && !memcmp(s.ptr + s.len - 2, "|>", 2)) ||
           (s.len > 8 && !memcmp(s.ptr, wide_open, 4) && !memcmp(s.ptr + s.len - 4, wide_close, 4));
}

static bool read_kinds(struct tokenizer *t, const struct gguf *g, struct error *e)
{
    const struct gguf_value *types = find_array(g, "tokenizer.ggml.token_type", GGUF_I32, (uint64_t)t->n, e);
    if (!types && e->code) return false;
    t->kind = alloc_zeroed((size_t)t->n, 1, "the vocabulary", e);
    if (!t->kind) return false;
    for (int id = 0; id < t->n; id++) {
        int32_t type = NORMAL;
        if (types) memcpy(&type, types->data + (size_t)id * sizeof type, sizeof type);
        else if (!t->cutter && byte_of_name(text_of(t, id)) >= 0) type = BYTE;
        if (type < NORMAL || type > BYTE) type = NORMAL;
        if (type == USER_DEFINED && is_marker(text_of(t, id))) type = CONTROL;
        t->kind[id] = (uint8_t)type;
    }
    return true;
}

/* ---- opening: what tokens stand for ----------------------------------------------------------------------------- */

/* Byte-level BPE writes every byte as a printable character: bytes that are printable in Latin-1 as themselves, the
 * others, in order, as U+0100 and up. */
static void make_letters(struct tokenizer *t, int16_t byte_of[324])
{
    memset(byte_of, -1, 324 * sizeof *byte_of);
    int next = 256;
    for (int b = 0; b < 256; b++) {
        bool printable = (b > 0x20 && b < 0x7F) || (b > 0xA0 && b != 0xAD);
        int c = printable ? b : next++;
        byte_of[c] = (int16_t)b;
        t->letter_size[b] = c < 0x80 ? 1 : 2;
        t->letter[b][0] = (char)(c < 0x80 ? c : 0xC0 | c >> 6);
        t->letter[b][1] = (char)(c < 0x80 ? 0 : 0x80 | (c & 0x3F));
    }
}

/* Undoes make_letters. Returns the number of bytes, or -1 where the text has a character that stands for no byte. */
static ptrdiff_t read_letters(const int16_t byte_of[324], struct gguf_str s, char *out)
{
    char *start = out;
    for (size_t i = 0; i < s.len;) {
        unsigned c = (unsigned char)s.ptr[i++];
        if (c >= 0x80) {
            if (c < 0xC2 || c > 0xC5 || i == s.len || (s.ptr[i] & 0xC0) != 0x80) return -1;
            c = (c & 0x1F) << 6 | (s.ptr[i++] & 0x3F);
        }
        if (c >= 324 || byte_of[c] < 0) return -1;
        *out++ = (char)byte_of[c];
    }
    return out - start;
}

/* Copies s with spaces for their marks and notes what stands before a mark. Returns the number of bytes. */
static size_t read_marks(struct tokenizer *t, struct gguf_str s, char *out)
{
    char *start = out;
    for (size_t i = 0; i < s.len;) {
        if (s.ptr[i] == space_mark[0] && s.len - i >= MARK && !memcmp(s.ptr + i, space_mark, MARK)) {
            if (i) t->joined_to_space[(unsigned char)s.ptr[i - 1]] = true;
            *out++ = ' ';
            i += MARK;
        } else {
            *out++ = s.ptr[i++];
        }
    }
    return (size_t)(out - start);
}

/* Fills pieces and byte_id. A piece is never longer than its text. */
static bool make_pieces(struct tokenizer *t, size_t text_bytes, struct error *e)
{
    int16_t byte_of[324];
    make_letters(t, byte_of);
    memset(t->byte_id, -1, sizeof t->byte_id);
    t->pieces = alloc_zeroed(text_bytes, 1, "the vocabulary", e);
    t->piece_at = t->pieces ? alloc_zeroed((size_t)t->n + 1, sizeof *t->piece_at, "the vocabulary", e) : NULL;
    if (!t->piece_at) return false;
    char *out = t->pieces;
    for (int id = 0; id < t->n; id++) {
        struct gguf_str s = text_of(t, id);
        int kind = t->kind[id], byte = kind == BYTE ? byte_of_name(s) : -1;
        ptrdiff_t n = -1;
        if (kind == UNUSED) n = 0;
        else if (byte >= 0) n = 1, *out = (char)byte;
        else if (kind == NORMAL && t->cutter) n = read_letters(byte_of, s, out);
        else if (!t->cutter && (kind == NORMAL || kind == USER_DEFINED)) n = (ptrdiff_t)read_marks(t, s, out);
        if (n < 0) {
            memcpy(out, s.ptr, s.len);
            n = (ptrdiff_t)s.len;
        }
        if (byte >= 0 && t->byte_id[byte] < 0) t->byte_id[byte] = id;
        out += n;
        t->piece_at[id + 1] = (uint32_t)(out - t->pieces);
    }
    for (int b = 0; t->cutter && b < 256; b++) {
        int32_t id = find_ordinary(t, t->letter[b], t->letter_size[b]);
        if (id >= 0) t->byte_id[b] = id;
    }
    return true;
}

/* ---- opening: merges, specials ---------------------------------------------------------------------------------- */

enum { BLOCK = 32 };                                   /* merges that are read together */

struct pending {                                       /* a merge on its way into the table: left, right, both joined */
    const char *text[3];
    size_t size[3];
    uint64_t hash[3];
    int32_t id[3];
    size_t joined_at;                                  /* where text[2] is in the block's buffer */
    uint32_t rank;
};

/* Enters n merges. Nearly all of the time would be spent waiting for memory, so each step is taken for all n before the
 * next, and asks for what the next will read. False: they collide. */
static bool add_merges(struct tokenizer *t, struct pending *block, int n, const char *joined)
{
    uint32_t mask = ((uint32_t)1 << t->merge_bits) - 1;
    for (int k = 0; k < n; k++) block[k].text[2] = joined + block[k].joined_at;
    for (int k = 0; k < n; k++)
        for (int i = 0; i < 3; i++) {
            block[k].hash[i] = hash_bytes(block[k].text[i], block[k].size[i]);
            __builtin_prefetch(&t->slots[block[k].hash[i] >> (64 - t->slot_bits)]);
        }
    for (int k = 0; k < n; k++)
        for (int i = 0; i < 3; i++) {
            uint32_t id1 = t->slots[block[k].hash[i] >> (64 - t->slot_bits)].id1;
            if (id1) __builtin_prefetch(t->strings + t->text_at[id1 - 1]);
        }
    for (int k = 0; k < n; k++) {
        int32_t *id = block[k].id;
        for (int i = 0; i < 3; i++) id[i] = find_hashed(t, block[k].hash[i], block[k].text[i], block[k].size[i]);
        if (!is_ordinary(t, id[2])) id[0] = -1;
        if (id[0] >= 0 && id[1] >= 0)
            __builtin_prefetch(&t->merges[hash_pair((uint32_t)id[0], (uint32_t)id[1]) >> (64 - t->merge_bits)]);
    }
    for (int k = 0; k < n; k++) {
        int32_t *id = block[k].id;
        if (id[0] < 0 || id[1] < 0) continue;          /* it could never give a token */
        uint32_t left = (uint32_t)id[0], right = (uint32_t)id[1];
        uint32_t i = (uint32_t)(hash_pair(left, right) >> (64 - t->merge_bits));
        int probes = 0;
        while (t->merges[i].rank && (t->merges[i].left != left || t->merges[i].right != right)) {
            i = (i + 1) & mask;
            if (++probes > MAX_PROBES) return false;
        }
        if (!t->merges[i].rank) t->merges[i] = (struct merge){ left, right, block[k].rank, id[2] };
    }
    return true;
}

static bool read_merges(struct tokenizer *t, const struct gguf *g, struct error *e)
{
    const struct gguf_value *v = find_array(g, "tokenizer.ggml.merges", GGUF_STRING, 0, e);
    if (!v && e->code) return false;
    if (!v) return fail(e, GEN_MODEL, "tokenizer.ggml.merges is missing in the model file; byte-level BPE needs it");
    if (v->count > MAX_MERGES)
        return fail(e, GEN_MODEL, "tokenizer.ggml.merges in the model file has %llu items; %d is the most that is read",
                    (unsigned long long)v->count, MAX_MERGES);
    t->merge_bits = table_bits(v->count);
    t->merges = alloc_zeroed((size_t)1 << t->merge_bits, sizeof *t->merges, "the merges", e);
    if (!t->merges) return false;
    struct bytes joined = { 0 };
    struct pending block[BLOCK];
    const uint8_t *at = v->data;
    bool ok = true;
    int n = 0;
    for (uint32_t rank = 1; ok && rank <= v->count; rank++) {
        struct gguf_str s = gguf_next_str(&at);
        const char *space = s.len > 2 ? memchr(s.ptr + 1, ' ', s.len - 2) : NULL;
        if (!space) {
            ok = fail(e, GEN_MODEL, "tokenizer.ggml.merges[%u] in the model file is not two texts with a space between",
                      rank - 1);
            break;
        }
        size_t left = (size_t)(space - s.ptr), right = s.len - left - 1;
        if (left + right <= t->longest) {
            block[n++] = (struct pending){ .text = { s.ptr, space + 1 }, .size = { left, right, left + right },
                                           .joined_at = joined.len, .rank = rank };
            if (!bytes_add(&joined, s.ptr, left) || !bytes_add(&joined, space + 1, right)) {
                ok = fail(e, GEN_RUN, "cannot allocate memory for the merges");
                break;
            }
        }
        if (n < BLOCK && rank < v->count) continue;
        if (!add_merges(t, block, n, joined.data))
            ok = fail(e, GEN_MODEL, "tokenizer.ggml.merges in the model file was made to collide in hash tables");
        n = 0;
        joined.len = 0;
    }
    bytes_free(&joined);
    return ok;
}

static int by_text(const void *a, const void *b, void *context)
{
    struct gguf_str x = text_of(context, *(const int32_t *)a), y = text_of(context, *(const int32_t *)b);
    int order = memcmp(x.ptr, y.ptr, x.len < y.len ? x.len : y.len);
    return order ? order : (x.len > y.len) - (x.len < y.len);
}

/* Control and user-defined tokens, sorted. */
static bool collect_specials(struct tokenizer *t, struct error *e)
{
    uint32_t n = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass && n > MAX_SPECIAL)
            return fail(e, GEN_MODEL, "the vocabulary in the model file has %u control and user-defined tokens; "
                        "%d is the most that is supported", n, MAX_SPECIAL);
        if (pass && !(t->special = alloc_zeroed(n, sizeof *t->special, "the special tokens", e))) return false;
        n = 0;
        for (int id = 0; id < t->n; id++) {
            int kind = t->kind[id] & KIND;
            if (kind != CONTROL && kind != UNKNOWN && kind != USER_DEFINED) continue;
            struct gguf_str s = text_of(t, id);
            if (!s.len || s.len > MAX_SPECIAL_LENGTH || find_text(t, s.ptr, s.len) != id) continue;
            if (pass) t->special[n] = id;
            n++;
        }
    }
    qsort_r(t->special, n, sizeof *t->special, by_text, t);
    for (int b = 0, i = 0; b <= 256; b++) {
        while ((uint32_t)i < n && (unsigned char)text_of(t, t->special[i]).ptr[0] < b) i++;
        t->special_from[b] = (uint32_t)i;
    }
    return true;
}

/* *id: the value of key, or what it was where the key is missing. The largest number means "none". */
static bool read_id(const struct tokenizer *t, const struct gguf *g, const char *key, int *id, struct error *e)
{
    uint64_t value = *id < 0 ? UINT32_MAX : (uint64_t)*id;
    if (!gguf_get_u64(g, key, &value, e)) return false;
    if (value == UINT32_MAX) *id = -1;
    else if (value < (uint64_t)t->n) *id = (int)value;
    else return fail(e, GEN_MODEL, "%s in the model file is %llu, but the vocabulary has %d tokens", key,
                     (unsigned long long)value, t->n);
    return true;
}

/* Texts of tokens that end a turn or a document, from the models' own configurations. */
static const char *const end_texts[] = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>",
    "<\uFF5Cend\u2581of\u2581sentence\uFF5C>",
    /* beyond the end of a file in fill-in-the-middle training */
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
};

/* Start and end tokens. Where keys are missing, SentencePiece has <s> and </s> at 1 and 2. */
static bool read_ends(struct tokenizer *t, const struct gguf *g, struct error *e)
{
    t->bos = !t->cutter && t->n > 1 && t->kind[1] == CONTROL ? 1 : -1;
    t->eos = !t->cutter && t->n > 2 && t->kind[2] == CONTROL ? 2 : -1;
    int eot = -1, eom = -1;
    t->adds_bos = !t->cutter || pretokenizer_adds_bos(t->cutter);
    if (!read_id(t, g, "tokenizer.ggml.bos_token_id", &t->bos, e) ||
        !read_id(t, g, "tokenizer.ggml.eos_token_id", &t->eos, e) ||
        !read_id(t, g, "tokenizer.ggml.eot_token_id", &eot, e) ||
        !read_id(t, g, "tokenizer.ggml.eom_token_id", &eom, e) ||
        !gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &t->adds_bos, e)) return false;
    if (t->bos < 0) t->adds_bos = false;
    for (size_t i = 0; i < sizeof end_texts / sizeof *end_texts; i++) {
        int32_t id = find_text(t, end_texts[i], strlen(end_texts[i]));
        if (id < 0) continue;
        bool html = !strcmp(end_texts[i], "</s>");     /* Gemma has the tag that ends struck-through text */
        if (t->kind[id] == USER_DEFINED && !html) t->kind[id] = CONTROL;
        if (t->kind[id] == CONTROL) t->kind[id] |= ENDS;
    }
    if (t->eos >= 0) t->kind[t->eos] |= ENDS;
    if (eot >= 0) t->kind[eot] |= ENDS;
    if (eom >= 0) t->kind[eom] |= ENDS;
    return true;
}

/* Phi-3's special tokens, except some, swallow the white space behind them; GGUF files do not say so. */
static bool mark_stripping(struct tokenizer *t, const struct gguf *g, struct error *e)
{
    static const char *const except[] = { "<unk>", "<s>", "<|endoftext|>" };
    struct gguf_str architecture = { "", 0 };
    if (!gguf_get_str(g, "general.architecture", &architecture, e)) return false;
    if (t->cutter || architecture.len != 4 || memcmp(architecture.ptr, "phi3", 4)) return true;
    for (int id = 0; id < t->n; id++) {
        int kind = t->kind[id] & KIND;
        if (kind == CONTROL || kind == USER_DEFINED || kind == UNKNOWN) t->kind[id] |= STRIPS;
    }
    for (size_t i = 0; i < sizeof except / sizeof *except; i++) {
        int32_t id = find_text(t, except[i], strlen(except[i]));
        if (id >= 0) t->kind[id] &= (uint8_t)~STRIPS;
    }
    return true;
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

/* Opens the pre-tokenizer of a byte-level BPE vocabulary. */
static bool open_cutter(struct tokenizer *t, const struct gguf *g, char note[200], struct error *e)
{
    struct gguf_str pre = { "", 0 };
    if (!gguf_get_str(g, "tokenizer.ggml.pre", &pre, e)) return false;
    bool named_default = pre.len == 7 && !memcmp(pre.ptr, "default", 7);
    if (!pre.len || named_default) {
        snprintf(note, 200, "tokenizer.ggml.pre is %s in the model file: text is cut into words as for gpt-2",
                 named_default ? "\"default\"" : "missing");
        pre = (struct gguf_str){ "gpt-2", 5 };
    }
    return pretokenizer_open(&t->cutter, pre.ptr, pre.len, e);
}

static bool open_scores(struct tokenizer *t, const struct gguf *g, struct error *e)
{
    const struct gguf_value *v = find_array(g, "tokenizer.ggml.scores", GGUF_F32, (uint64_t)t->n, e);
    if (!v && e->code) return false;
    if (!v) return fail(e, GEN_MODEL, "tokenizer.ggml.scores is missing in the model file, and SentencePiece needs it");
    t->scores = v->data;
    t->unknown = t->kind[0] == UNKNOWN ? 0 : -1;
    t->prefix_space = true;
    return read_id(t, g, "tokenizer.ggml.unknown_token_id", &t->unknown, e) &&
           gguf_get_bool(g, "tokenizer.ggml.add_space_prefix", &t->prefix_space, e);
}

static bool open_parts(struct tokenizer *t, const struct gguf *g, char note[200], struct error *e)
{
    struct gguf_str model = { NULL, 0 };
    if (!gguf_get_str(g, "tokenizer.ggml.model", &model, e)) return false;
    if (!model.ptr)
        return fail(e, GEN_MODEL, "tokenizer.ggml.model is missing in the model file: it has no vocabulary");
    bool bpe = model.len == 4 && !memcmp(model.ptr, "gpt2", 4);
    if (!bpe && (model.len != 5 || memcmp(model.ptr, "llama", 5)))
        return fail(e, GEN_MODEL, "tokenizer.ggml.model is '%.*s'; only 'gpt2' (byte-level BPE) and 'llama' "
                    "(SentencePiece) are supported", model.len < 100 ? (int)model.len : 100, model.ptr);
    const struct gguf_value *tokens = find_array(g, "tokenizer.ggml.tokens", GGUF_STRING, 0, e);
    if (!tokens && e->code) return false;
    if (!tokens || !tokens->count || tokens->count > MAX_TOKENS || tokens->size > UINT32_MAX)
        return fail(e, GEN_MODEL, "tokenizer.ggml.tokens in the model file has %llu tokens; from 1 to %d are supported",
                    tokens ? (unsigned long long)tokens->count : 0, MAX_TOKENS);
    if (bpe && !open_cutter(t, g, note, e)) return false;
    return index_texts(t, tokens, e) && read_kinds(t, g, e) &&
           make_pieces(t, tokens->size - tokens->count * sizeof(uint64_t), e) &&
           (bpe ? read_merges(t, g, e) : open_scores(t, g, e)) &&
           read_ends(t, g, e) && mark_stripping(t, g, e) && collect_specials(t, e);
}

bool tokenizer_open(struct tokenizer **out, const struct gguf *g, char note[200], struct error *e)
{
    char unused[200];
    if (!note) note = unused;
    note[0] = '\0';
    struct tokenizer *t = alloc_zeroed(1, sizeof *t, "the tokenizer", e);
    if (!t) return false;
    if (!open_parts(t, g, note, e)) {
        tokenizer_close(t);
        return false;
    }
    *out = t;
    return true;
}

void tokenizer_close(struct tokenizer *t)
{
    if (!t) return;
    pretokenizer_close(t->cutter);
    free(t->text_at);
    free(t->kind);
    free(t->pieces);
    free(t->piece_at);
    free(t->slots);
    free(t->special);
    free(t->merges);
    free(t);
}

/* ---- questions -------------------------------------------------------------------------------------------------- */

static bool in_vocabulary(const struct tokenizer *t, int32_t id) { return id >= 0 && id < t->n; }

int tokenizer_vocab(const struct tokenizer *t) { return t->n; }
int tokenizer_bos(const struct tokenizer *t) { return t->bos; }
bool tokenizer_adds_bos(const struct tokenizer *t) { return t->adds_bos; }
int tokenizer_eos(const struct tokenizer *t) { return t->eos; }

bool tokenizer_is_end(const struct tokenizer *t, int32_t id)
{
    return in_vocabulary(t, id) && t->kind[id] & ENDS;
}

bool tokenizer_is_control(const struct tokenizer *t, int32_t id)
{
    return in_vocabulary(t, id) && ((t->kind[id] & KIND) == CONTROL || (t->kind[id] & KIND) == UNKNOWN);
}

int32_t tokenizer_find(const struct tokenizer *t, const char *text, size_t n) { return find_text(t, text, n); }

struct gguf_str tokenizer_text(const struct tokenizer *t, int32_t id)
{
    return in_vocabulary(t, id) ? text_of(t, id) : (struct gguf_str){ "", 0 };
}

struct gguf_str tokenizer_piece(const struct tokenizer *t, int32_t id, bool show_control)
{
    if (!in_vocabulary(t, id) || (!show_control && tokenizer_is_control(t, id))) return (struct gguf_str){ "", 0 };
    return (struct gguf_str){ t->pieces + t->piece_at[id], t->piece_at[id + 1] - t->piece_at[id] };
}

/* ---- encoding: merging a word ----------------------------------------------------------------------------------- */

/* A word while it is merged: symbol i begins at byte i of the word and ends where `next` says, which is where the next
 * symbol begins. next is 0 for bytes that begin no symbol (any more). */
struct symbol { int32_t prev, next, id; };             /* prev: -1 at the start; id: -1, no token */

/* Neighbours that make token `id`: from byte `left` up to byte `end`. The pair with the lowest `first` is merged first:
 * its upper half is the merge's rank or the score's order, the lower half is `left`. */
struct pair { uint64_t first; int32_t end, id; };

struct cached { const char *word; size_t ids_at; uint32_t n, n_ids; };

struct job {                                           /* one call of tokenizer_encode */
    const struct tokenizer *t;
    struct ids *out;
    struct error *e;
    struct cached *cache;                              /* [2^cache_bits] words and where their ids are in out */
    int cache_bits;
    struct symbol *symbols;
    size_t n_symbols;                                  /* allocated */
    struct pair *heap;
    size_t n_heap, heap_size;                          /* used, allocated */
    struct bytes spelled;                              /* a word as the vocabulary writes it */
};

static bool no_memory(struct job *j)
{
    return fail(j->e, GEN_RUN, "cannot allocate memory for the tokens of the text");
}

static bool add_id(struct job *j, int32_t id) { return ids_add(j->out, id) || no_memory(j); }

/* The heap: item i comes before its children WAYS * i + 1 and so on. Four of them fill a cache line. */
enum { WAYS = 4 };

/* Puts p into the heap's hole at i, whose children are in order. */
static void sift_down(struct job *j, size_t i, struct pair p)
{
    for (size_t child; (child = WAYS * i + 1) < j->n_heap;) {
        size_t end = child + WAYS < j->n_heap ? child + WAYS : j->n_heap, best = child;
        while (++child < end) best = j->heap[child].first < j->heap[best].first ? child : best;
        if (j->heap[best].first >= p.first) break;
        j->heap[i] = j->heap[best];
        i = best;
    }
    j->heap[i] = p;
}

static void sift_up(struct job *j, size_t i)
{
    struct pair p = j->heap[i];
    for (; i && p.first < j->heap[(i - 1) / WAYS].first; i = (i - 1) / WAYS) j->heap[i] = j->heap[(i - 1) / WAYS];
    j->heap[i] = p;
}

/* The order of SentencePiece's scores as unsigned numbers: the highest score gives the lowest. NaN comes last. */
static inline uint32_t score_key(const struct tokenizer *t, int32_t id)
{
    float score;
    uint32_t bits;
    memcpy(&score, t->scores + (size_t)id * sizeof score, sizeof score);
    if (isnan(score)) return UINT32_MAX;
    score += 0.0f;                                     /* -0 is 0 */
    memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? bits : ~bits & 0x7FFFFFFF;
}

/* Puts the symbol at `left` and its right neighbour behind the heap if they make a token. Its order is not restored. */
static bool add_pair(struct job *j, const char *word, size_t n, int32_t left)
{
    const struct tokenizer *t = j->t;
    int32_t right = j->symbols[left].next;
    if ((size_t)right == n) return false;
    struct pair p = { 0, j->symbols[right].next, -1 };
    uint32_t key = 0;
    if (t->cutter) {
        const struct merge *m = find_merge(t, j->symbols[left].id, j->symbols[right].id);
        if (m) key = m->rank, p.id = m->id;
    } else {
        p.id = find_ordinary(t, word + left, (size_t)(p.end - left));
        if (p.id >= 0) key = score_key(t, p.id);
    }
    if (p.id < 0) return false;
    p.first = (uint64_t)key << 32 | (uint32_t)left;
    j->heap[j->n_heap++] = p;
    return true;
}

/* Symbols and heap for a word of n bytes. A word of k symbols has at most k - 1 pairs, and each merge takes one and
 * adds two, so that there are never more than 2k. */
static bool reserve_word(struct job *j, size_t n)
{
    if (n > j->n_symbols) {
        size_t want = n < 256 ? 256 : n;
        free(j->symbols);
        free(j->heap);
        j->n_symbols = 0;
        j->symbols = malloc(want * sizeof *j->symbols);
        j->heap = malloc(2 * want * sizeof *j->heap);
        if (!j->symbols || !j->heap) return no_memory(j);
        j->n_symbols = want;
    }
    return true;
}

/* Adds the token of what merging left. Characters without a token are written as bytes; where there is no token for a
 * byte either, byte-level BPE drops it and SentencePiece has one for unknown characters. */
static bool add_symbol(struct job *j, const char *text, size_t n, int32_t id)
{
    const struct tokenizer *t = j->t;
    if (id >= 0) return add_id(j, id);
    if (n == MARK && !memcmp(text, space_mark, MARK)) text = " ", n = 1;
    if (t->byte_id[(unsigned char)*text] < 0) return t->cutter || t->unknown < 0 || add_id(j, t->unknown);
    for (size_t i = 0; i < n; i++) {
        int32_t byte = t->byte_id[(unsigned char)text[i]];
        if (byte >= 0 && !add_id(j, byte)) return false;
    }
    return true;
}

/* Adds the ids of a word (of bytes for BPE, as the vocabulary spells it for SentencePiece). */
static bool merge_word(struct job *j, const char *word, size_t n)
{
    const struct tokenizer *t = j->t;
    if (n > INT32_MAX) return fail(j->e, GEN_RUN, "the text has a word of %zu bytes; %d is the limit", n, INT32_MAX);
    if (!reserve_word(j, n)) return false;
    struct symbol *s = j->symbols;
    int32_t prev = -1;
    for (size_t i = 0; i < n;) {
        int step = t->cutter ? 1 : utf8_step(word + i, n - i);
        if (step < 1) step = 1;
        s[i] = (struct symbol){ prev, (int32_t)i + step, t->cutter ? t->byte_id[(unsigned char)word[i]]
                                                                   : find_ordinary(t, word + i, (size_t)step) };
        for (int k = 1; k < step; k++) s[i + (size_t)k].next = 0;
        prev = (int32_t)i;
        i += (size_t)step;
    }
    j->n_heap = 0;
    for (int32_t i = 0; (size_t)i < n; i = s[i].next) add_pair(j, word, n, i);
    for (size_t i = (j->n_heap + WAYS - 2) / WAYS; i-- > 0;) sift_down(j, i, j->heap[i]);
    while (j->n_heap) {
        struct pair p = j->heap[0];
        if (--j->n_heap) sift_down(j, 0, j->heap[j->n_heap]);
        int32_t left = (int32_t)(uint32_t)p.first, right = s[left].next;
        if (!right || (size_t)right == n || s[right].next != p.end) continue;      /* one of the two has merged since */
        s[right].next = 0;
        s[left].next = p.end;
        s[left].id = p.id;
        if ((size_t)p.end < n) s[p.end].prev = left;
        if (add_pair(j, word, n, left)) sift_up(j, j->n_heap - 1);
        if (s[left].prev >= 0 && add_pair(j, word, n, s[left].prev)) sift_up(j, j->n_heap - 1);
    }
    for (int32_t i = 0; (size_t)i < n; i = s[i].next)
        if (!add_symbol(j, word + i, (size_t)(s[i].next - i), s[i].id)) return false;
    return true;
}

/* ---- encoding: text between special tokens ---------------------------------------------------------------------- */

/* Puts the word into `spelled` with the vocabulary's spelling of bytes (BPE) or of spaces (SentencePiece, and then with
 * one more in front if `prefix`). */
static bool spell(struct job *j, const char *word, size_t n, bool prefix)
{
    const struct tokenizer *t = j->t;
    j->spelled.len = 0;
    bool ok = !prefix || bytes_add(&j->spelled, space_mark, MARK);
    for (size_t i = 0; ok && i < n;) {
        if (t->cutter) {
            unsigned char byte = (unsigned char)word[i++];
            ok = bytes_add(&j->spelled, t->letter[byte], t->letter_size[byte]);
        } else if (word[i] == ' ') {
            ok = bytes_add(&j->spelled, space_mark, MARK);
            i++;
        } else {
            const char *space = memchr(word + i, ' ', n - i);
            size_t end = space ? (size_t)(space - word) : n;
            ok = bytes_add(&j->spelled, word + i, end - i);
            i = end;
        }
    }
    return ok || no_memory(j);
}

static bool encode_new_word(struct job *j, const char *word, size_t n, bool prefix)
{
    const struct tokenizer *t = j->t;
    if (!t->cutter) return spell(j, word, n, prefix) && merge_word(j, j->spelled.data, j->spelled.len);
    if (n > 1 && n <= t->longest && pretokenizer_whole_words(t->cutter)) {
        if (!spell(j, word, n, false)) return false;
        int32_t id = find_ordinary(t, j->spelled.data, j->spelled.len);
        if (id >= 0) return add_id(j, id);
    }
    return merge_word(j, word, n);
}

/* Adds the ids of a word that is part of the text. */
static bool encode_word(void *context, const char *word, size_t n)
{
    struct job *j = context;
    struct cached *c = &j->cache[hash_bytes(word, n) >> (64 - j->cache_bits)];
    if (c->n == n && !memcmp(c->word, word, n)) {
        for (uint32_t i = 0; i < c->n_ids; i++) if (!add_id(j, j->out->data[c->ids_at + i])) return false;
        return true;
    }
    size_t ids_at = j->out->len;
    if (!encode_new_word(j, word, n, false)) return false;
    if (n <= UINT32_MAX) *c = (struct cached){ word, ids_at, (uint32_t)n, (uint32_t)(j->out->len - ids_at) };
    return true;
}

/* SentencePiece merges across the whole text, but no token reaches over most places where a space follows something
 * else; there the text is cut. */
static bool encode_sentence(struct job *j, const char *text, size_t n)
{
    const bool *joined = j->t->joined_to_space;
    for (size_t at = 0, end; at < n; at = end) {
        for (end = at + 1; end < n; end++)
            if (text[end] == ' ' && text[end - 1] != ' ' && !joined[(unsigned char)text[end - 1]]) break;
        bool prefix = at == 0 && j->t->prefix_space;
        if (!(prefix ? encode_new_word(j, text, end, true) : encode_word(j, text + at, end - at))) return false;
    }
    return true;
}

static bool encode_ordinary(struct job *j, const char *text, size_t n)
{
    if (!j->t->cutter) return encode_sentence(j, text, n);
    return pretokenizer_split(j->t->cutter, text, n, encode_word, j, j->e);
}

/* ---- encoding: special tokens ----------------------------------------------------------------------------------- */

struct stretch { size_t end; bool trusted; };          /* adjacent spans that are trusted alike */

struct text {                                          /* the spans as one string */
    const char *ptr;
    size_t len;
    char *joined;                                      /* what to free, or NULL */
    struct stretch *stretches;
    size_t n_stretches, current;                       /* current: the stretch that find_special has reached */
};

struct special { size_t at, end; int32_t id; };        /* id: -1, none */

static bool join_spans(struct text *x, const struct span *spans, size_t n, struct error *e)
{
    *x = (struct text){ .ptr = "" };
    for (size_t i = 0; i < n; i++)
        if (!size_add(x->len, spans[i].len, &x->len)) return fail(e, GEN_RUN, "the text is too long for memory");
    x->stretches = alloc_zeroed(n, sizeof *x->stretches, "the text", e);
    if (!x->stretches) return false;
    if (n > 1 && !(x->joined = alloc_zeroed(x->len, 1, "the text", e))) {
        free(x->stretches);
        return false;
    }
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        if (!spans[i].len) continue;
        if (n == 1) x->ptr = spans[i].ptr;
        else memcpy(x->joined + at, spans[i].ptr, spans[i].len);
        at += spans[i].len;
        struct stretch *last = x->n_stretches ? &x->stretches[x->n_stretches - 1] : NULL;
        if (last && last->trusted == spans[i].trusted) last->end = at;
        else x->stretches[x->n_stretches++] = (struct stretch){ at, spans[i].trusted };
    }
    if (x->joined) x->ptr = x->joined;
    return true;
}

/* The longest special token that begins at `at`; those that are control tokens end at `trusted` at the latest. */
static struct special match_special(const struct tokenizer *t, const struct text *x, size_t at, size_t trusted)
{
    struct special best = { at, at, -1 };
    unsigned char first = (unsigned char)x->ptr[at];
    uint32_t low = t->special_from[first], high = t->special_from[first + 1];
    for (size_t n = 1; low < high; n++) {              /* low to high: those that begin with the n bytes at `at` */
        int32_t id = t->special[low];
        if (text_of(t, id).len == n) {
            if (at + n <= trusted || (t->kind[id] & KIND) == USER_DEFINED) best = (struct special){ at, at + n, id };
            low++;
        }
        if (at + n == x->len) break;
        int next = (unsigned char)x->ptr[at + n];
        for (int side = 0; side < 2; side++, next++) { /* the first with byte n >= next, then >= next + 1 */
            uint32_t a = low, b = high;
            while (a < b) {
                uint32_t middle = a + (b - a) / 2;
                if ((unsigned char)text_of(t, t->special[middle]).ptr[n] < next) a = middle + 1;
                else b = middle;
            }
            if (side) high = a;
            else low = a;
        }
    }
    return best;
}

/* The first special token at `from` or behind it, or one with id -1 at the end of the text. */
static struct special find_special(const struct tokenizer *t, struct text *x, size_t from)
{
    for (size_t at = from; at < x->len; at++) {
        unsigned char first = (unsigned char)x->ptr[at];
        if (t->special_from[first] == t->special_from[first + 1]) continue;
        while (x->stretches[x->current].end <= at) x->current++;
        const struct stretch *s = &x->stretches[x->current];
        struct special found = match_special(t, x, at, s->trusted ? s->end : at);
        if (found.id >= 0) return found;
    }
    return (struct special){ x->len, x->len, -1 };
}

static bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static bool encode_text(struct job *j, struct text *x)
{
    for (size_t at = 0; at < x->len;) {
        struct special s = find_special(j->t, x, at);
        if (s.at > at && !encode_ordinary(j, x->ptr + at, s.at - at)) return false;
        if (s.id >= 0 && !add_id(j, s.id)) return false;
        at = s.end;
        if (s.id >= 0 && j->t->kind[s.id] & STRIPS) while (at < x->len && is_space(x->ptr[at])) at++;
    }
    return true;
}

bool tokenizer_encode(const struct tokenizer *t, const struct span *spans, size_t n, bool add_bos,
                      struct ids *out, struct error *e)
{
    struct text x;
    if (!join_spans(&x, spans, n, e)) return false;
    struct job j = { .t = t, .out = out, .e = e, .cache_bits = 6 };
    while (j.cache_bits < 15 && ((size_t)16 << j.cache_bits) < x.len) j.cache_bits++;
    j.cache = alloc_zeroed((size_t)1 << j.cache_bits, sizeof *j.cache, "the text", e);
    size_t start = out->len;
    bool bos = add_bos && t->adds_bos;
    bool ok = j.cache && (!bos || add_id(&j, t->bos)) && encode_text(&j, &x);
    if (ok && bos && out->len > start + 1 && out->data[start + 1] == t->bos) {     /* the text has it already */
        out->len--;
        memmove(out->data + start, out->data + start + 1, (out->len - start) * sizeof *out->data);
    }
    if (!ok) out->len = start;
    free(j.cache);
    free(j.symbols);
    free(j.heap);
    bytes_free(&j.spelled);
    free(x.stretches);
    free(x.joined);
    return ok;
}

/* ---- streaming decode ------------------------------------------------------------------------------------------- */

static const char replacement[] = "\uFFFD";

/* Adds the whole characters of d's fragment and text, and keeps what is unfinished. */
static bool add_characters(struct detok *d, const char *text, size_t n, struct bytes *out)
{
    while (d->n_held && n) {                           /* the fragment grows byte by byte until it is decided */
        d->held[d->n_held++] = (unsigned char)*text;
        int step = utf8_step((const char *)d->held, (size_t)d->n_held);
        if (step < 0) {                                /* the new byte does not belong to it, and is looked at again */
            if (!bytes_add(out, replacement, 3)) return false;
            d->n_held = 0;
            continue;
        }
        text++;
        n--;
        if (step > 0) {
            if (!bytes_add(out, d->held, (size_t)step)) return false;
            d->n_held = 0;
        }
    }
    while (n) {
        size_t whole = utf8_valid(text, n);
        if (!bytes_add(out, text, whole)) return false;
        text += whole;
        n -= whole;
        if (!n) break;
        int step = utf8_step(text, n);
        if (step == 0) {
            memcpy(d->held, text, n);
            d->n_held = (int)n;
            break;
        }
        if (!bytes_add(out, replacement, 3)) return false;
        text += -step;
        n -= (size_t)-step;
    }
    return true;
}

bool detok_add(const struct tokenizer *t, struct detok *d, int32_t id, bool at_start, bool show_control,
               struct bytes *out)
{
    if (!in_vocabulary(t, id)) return true;
    int kind = t->kind[id] & KIND;
    struct gguf_str s = tokenizer_piece(t, id, show_control);
    bool special = kind == CONTROL || kind == UNKNOWN || kind == USER_DEFINED;
    if (!special && t->prefix_space && at_start && !d->begun && s.len && s.ptr[0] == ' ') {
        s.ptr++;
        s.len--;
        d->begun = true;
    } else if (special || s.len) {
        d->begun = !special;                           /* encoding puts a space behind every special token, too */
    }
    return add_characters(d, s.ptr, s.len, out);
}

bool detok_end(struct detok *d, struct bytes *out)
{
    bool ok = !d->n_held || bytes_add(out, replacement, 3);
    d->n_held = 0;
    return ok;
}
