/* gguf.c - opens a GGUF file or a split set of them.
 *
 * The file, all numbers little-endian:
 *
 *     "GGUF"  u32 version  u64 tensors  u64 values
 *     values times:   string key  u32 type  value
 *     tensors times:  string name  u32 dims  u64 ne[dims]  u32 type  u64 offset (from the start of the data)
 *     padding to the alignment
 *     data: the tensors, each at a multiple of the alignment
 *
 * A string is a u64 length and its bytes; an array is a u32 item type, a u64 count and the items. Version 2 differs
 * from 3 only in that it is always little-endian.
 *
 * Everything before the data (the head) is copied into private memory as the one cursor asks for it, so nothing that
 * happens to the file later can undo the checks made here. Tensor data is mapped or read on demand. If the file is
 * made shorter while a tensor is mapped, touching the lost pages raises SIGBUS, as with any mapping; gguf_read reports
 * an error instead. */
#include "gguf.h"

#include "threads.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <nettle/sha2.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are used as they stand in the file");

#define HEAD_LIMIT ((uint64_t)256 << 20)   /* bytes; the largest vocabularies in use take about 30 MB */
enum {
    DIGEST_STEP = 1 << 18,                 /* bytes hashed at a time */
    HEAD_STEP = 1 << 20,                   /* the head is read in steps of this many bytes */
    MAX_VALUES = 1 << 16,
    MAX_TENSORS = 1 << 20,
    MAX_NAME = 65535,
    MAX_ALIGNMENT = 1 << 24,
    MAX_PARTS = 99999                      /* five digits in the file name */
};

/* Names sorted by length and bytes. Each points to the first member of a gguf_value or gguf_tensor. Sorting instead of
 * hashing keeps a file that was made to collide at n log n. */
struct index {
    const struct gguf_str **sorted;
    size_t n;
};

struct part {                              /* one file */
    char *path;
    int fd;
    int version;
    uint64_t size;                         /* bytes of the file when it was opened */
    uint8_t *head;                         /* address space for min(size, HEAD_LIMIT) bytes, the first `loaded` read */
    size_t head_size, loaded;
    struct gguf_value *values;
    size_t n_values;
    struct index keys;
    uint64_t alignment;
    uint8_t *map;                          /* the whole file, or NULL */
};

struct gguf {
    struct part *parts;
    int n_parts;
    struct gguf_tensor *tensors;           /* of all parts, in the order of the files */
    size_t n_tensors;
    struct index names;
};

/* ---- messages --------------------------------------------------------------------------------------------------- */

/* For "%.*s": at most 100 bytes of a name from the file. */
#define NAME(s) ((int)((s).len < 100 ? (s).len : 100)), (s).ptr

/* The end of a long path, so that the rest of the message fits. */
static const char *short_path(const char *path)
{
    size_t n = strlen(path);
    return n > 200 ? path + n - 200 : path;
}

/* fail() with the name of the file in front. */
__attribute__((format(printf, 3, 4)))
static bool bad(const struct part *p, struct error *e, const char *format, ...)
{
    char text[sizeof e->text];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return fail(e, GEN_MODEL, "%s: %s", short_path(p->path), text);
}

static const char *const type_words[] = { "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array",
                                          "u64", "i64", "f64" };
static const uint8_t type_width[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };   /* bytes; 0: not fixed */

/* ---- the cursor: every byte of a head goes through take() ------------------------------------------------------- */

struct cursor {
    struct part *part;
    uint64_t pos;                          /* <= part->size and <= HEAD_LIMIT */
    const char *what;                      /* what is being read, for messages: "header", or item `i` of `n` */
    uint64_t i, n;
    struct error *e;
};

/* pread until `n` bytes are there; false at the end of the file or on an error (errno is 0 at the end). */
static bool read_at(int fd, void *dst, size_t n, uint64_t offset)
{
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(fd, (uint8_t *)dst + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got == 0) errno = 0;
        if (got <= 0) return false;
        done += (size_t)got;
    }
    return true;
}

static const char *read_problem(void)
{
    return errno ? strerror(errno) : "the file has become shorter since it was opened";
}

/* Reads the head up to byte `end` <= head_size, in large steps. */
static bool load(struct part *p, uint64_t end, struct error *e)
{
    if (end <= p->loaded) return true;
    size_t until = p->head_size - p->loaded > HEAD_STEP ? p->loaded + HEAD_STEP : p->head_size;
    if (until < end) until = end;
    if (!read_at(p->fd, p->head + p->loaded, until - p->loaded, p->loaded))
        return bad(p, e, "cannot read the file: %s", read_problem());
    p->loaded = until;
    return true;
}

/* The next n bytes, or NULL after filling the error. */
static const uint8_t *take(struct cursor *c, uint64_t n)
{
    struct part *p = c->part;
    if (n > p->size - c->pos) {
        char item[60] = "";
        if (c->n) snprintf(item, sizeof item, " %zu of %zu", (size_t)c->i + 1, (size_t)c->n);
        bad(p, c->e, "the file is incomplete or damaged: it ends after %zu bytes, inside %s%s; download or copy it "
            "again", (size_t)p->size, c->what, item);
        return NULL;
    }
    if (n > HEAD_LIMIT - c->pos) {
        bad(p, c->e, "the metadata takes more than %zu MiB, which is not supported", (size_t)(HEAD_LIMIT >> 20));
        return NULL;
    }
    if (!load(p, c->pos + n, c->e)) return NULL;
    const uint8_t *at = p->head + c->pos;
    c->pos += n;
    return at;
}

static bool take_u32(struct cursor *c, uint32_t *out)
{
    const uint8_t *at = take(c, sizeof *out);
    if (at) memcpy(out, at, sizeof *out);
    return at;
}

static bool take_u64(struct cursor *c, uint64_t *out)
{
    const uint8_t *at = take(c, sizeof *out);
    if (at) memcpy(out, at, sizeof *out);
    return at;
}

static bool take_str(struct cursor *c, struct gguf_str *out)
{
    uint64_t n;
    if (!take_u64(c, &n)) return false;
    out->ptr = (const char *)take(c, n);
    out->len = n;
    return out->ptr;
}

/* A key or a tensor's name. */
static bool take_name(struct cursor *c, struct gguf_str *out)
{
    if (!take_str(c, out)) return false;
    if (out->len >= 1 && out->len <= MAX_NAME) return true;
    return bad(c->part, c->e, "the name of %s %zu of %zu has %zu bytes; it must have 1 to %d", c->what,
               (size_t)c->i + 1, (size_t)c->n, out->len, MAX_NAME);
}

/* ---- names to entries ------------------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b)
{
    const struct gguf_str *x = *(const struct gguf_str *const *)a, *y = *(const struct gguf_str *const *)b;
    if (x->len != y->len) return x->len < y->len ? -1 : 1;
    return memcmp(x->ptr, y->ptr, x->len);
}

/* Indexes n entries of `stride` bytes that begin with their name, which must be unique. */
static bool index_names(struct index *index, const void *entries, size_t n, size_t stride, const char *what,
                        const struct part *p, struct error *e)
{
    index->sorted = alloc_zeroed(n, sizeof *index->sorted, "names of the model file", e);
    if (!index->sorted) return false;
    for (size_t i = 0; i < n; i++) index->sorted[i] = (const void *)((const uint8_t *)entries + i * stride);
    index->n = n;
    qsort(index->sorted, n, sizeof *index->sorted, compare_names);
    for (size_t i = 1; i < n; i++)
        if (compare_names(&index->sorted[i - 1], &index->sorted[i]) == 0)
            return bad(p, e, "the %s '%.*s' appears twice", what, NAME(*index->sorted[i]));
    return true;
}

static const void *find_name(const struct index *index, const char *name)
{
    struct gguf_str wanted = { name, strlen(name) };
    const struct gguf_str *key = &wanted;
    const struct gguf_str **found = bsearch(&key, index->sorted, index->n, sizeof key, compare_names);
    return found ? *found : NULL;
}

/* ---- typed access ----------------------------------------------------------------------------------------------- */

static bool is_signed(enum gguf_type t) { return t == GGUF_I8 || t == GGUF_I16 || t == GGUF_I32 || t == GGUF_I64; }

static bool is_integer(enum gguf_type t)
{
    return is_signed(t) || t == GGUF_U8 || t == GGUF_U16 || t == GGUF_U32 || t == GGUF_U64;
}

/* An integer value widened to 64 bits, with its sign where the type has one. */
static uint64_t integer_bits(const struct gguf_value *v)
{
    uint64_t bits = 0;
    memcpy(&bits, v->data, v->size);
    int unused = 64 - 8 * (int)v->size;
    return is_signed(v->type) ? (uint64_t)((int64_t)(bits << unused) >> unused) : bits;
}

static bool wrong_type(const struct part *p, const struct gguf_value *v, const char *wanted, struct error *e)
{
    if (v->type == GGUF_ARRAY)
        return bad(p, e, "the key '%.*s' must be %s, but it is an array of %s", NAME(v->key), wanted,
                   type_words[v->item]);
    return bad(p, e, "the key '%.*s' must be %s, but it has the type %s", NAME(v->key), wanted, type_words[v->type]);
}

static bool get_u64(const struct part *p, const char *key, uint64_t *out, struct error *e)
{
    const struct gguf_value *v = find_name(&p->keys, key);
    if (!v) return true;
    if (!is_integer(v->type)) return wrong_type(p, v, "an integer", e);
    uint64_t bits = integer_bits(v);
    if (is_signed(v->type) && (int64_t)bits < 0)
        return bad(p, e, "the key '%s' must not be negative, but it is %lld", key, (long long)bits);
    *out = bits;
    return true;
}

bool gguf_get_u64(const struct gguf *g, const char *key, uint64_t *out, struct error *e)
{
    return get_u64(g->parts, key, out, e);
}

bool gguf_get_f64(const struct gguf *g, const char *key, double *out, struct error *e)
{
    const struct gguf_value *v = gguf_find(g, key);
    if (!v) return true;
    double x;
    float f;
    if (v->type == GGUF_F32) {
        memcpy(&f, v->data, sizeof f);
        x = f;
    } else if (v->type == GGUF_F64) {
        memcpy(&x, v->data, sizeof x);
    } else if (is_integer(v->type)) {
        x = is_signed(v->type) ? (double)(int64_t)integer_bits(v) : (double)integer_bits(v);
    } else {
        return wrong_type(g->parts, v, "a number", e);
    }
    if (!isfinite(x)) return bad(g->parts, e, "the key '%s' must be a finite number, but it is %g", key, x);
    *out = x;
    return true;
}

bool gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct error *e)
{
    const struct gguf_value *v = gguf_find(g, key);
    if (!v) return true;
    if (v->type != GGUF_BOOL) return wrong_type(g->parts, v, "true or false", e);
    *out = v->data[0] != 0;
    return true;
}

bool gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *out, struct error *e)
{
    const struct gguf_value *v = gguf_find(g, key);
    if (!v) return true;
    if (v->type != GGUF_STRING) return wrong_type(g->parts, v, "a string", e);
    const uint8_t *at = v->data;
    *out = gguf_next_str(&at);
    return true;
}

struct gguf_str gguf_next_str(const uint8_t **cursor)
{
    uint64_t n;
    memcpy(&n, *cursor, sizeof n);
    struct gguf_str s = { (const char *)*cursor + sizeof n, n };
    *cursor += sizeof n + n;
    return s;
}

/* ---- header and metadata ---------------------------------------------------------------------------------------- */

/* What a file that is no GGUF probably is. */
static bool not_gguf(const struct part *p, struct error *e)
{
    static const struct { const char *start, *text; } known[] = {
        { "<", "it looks like a web page; the download probably went wrong" },
        { "{", "it looks like a JSON text" },
        { "version https://git-lfs", "it is a Git LFS pointer; fetch the model itself with 'git lfs pull'" },
        { "PK\3\4", "it looks like a PyTorch or zip file; convert it to GGUF first" },
        { "lmgg", "it is a model in the old GGML format; convert it to GGUF first" },
        { "fmgg", "it is a model in the old GGML format; convert it to GGUF first" },
        { "tjgg", "it is a model in the old GGML format; convert it to GGUF first" },
        { "FUGG", "it is a GGUF file whose bytes are swapped" },
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        size_t n = strlen(known[i].start);
        if (p->loaded >= n && memcmp(p->head, known[i].start, n) == 0)
            return bad(p, e, "this is not a GGUF file: %s", known[i].text);
    }
    return bad(p, e, "this is not a GGUF file: it does not begin with the letters GGUF");
}

static bool parse_header(struct cursor *c, uint64_t *n_tensors, uint64_t *n_values)
{
    struct part *p = c->part;
    uint32_t version;
    c->what = "the header";
    if (!load(p, p->head_size < HEAD_STEP ? p->head_size : HEAD_STEP, c->e)) return false;
    if (memcmp(p->head, "GGUF", p->size < 4 ? p->size : 4) != 0) return not_gguf(p, c->e);
    if (!take(c, 4) || !take_u32(c, &version)) return false;
    if (version > 0xFFFF && (version & 0xFFFF) == 0)
        return bad(p, c->e, "this GGUF file is big-endian, which is not supported; convert it to little-endian");
    if (version != 2 && version != 3)
        return bad(p, c->e, "this GGUF file has version %u; only versions 2 and 3 are supported", version);
    p->version = (int)version;
    if (!take_u64(c, n_tensors) || !take_u64(c, n_values)) return false;
    if (*n_values > MAX_VALUES)
        return bad(p, c->e, "the header announces %zu metadata values; at most %d are supported", (size_t)*n_values,
                   MAX_VALUES);
    if (*n_tensors > MAX_TENSORS)
        return bad(p, c->e, "the header announces %zu tensors; at most %d are supported", (size_t)*n_tensors,
                   MAX_TENSORS);
    return true;
}

/* Goes over the bytes of a value whose type is known; v->data points to its first item. */
static bool parse_items(struct cursor *c, struct gguf_value *v)
{
    enum gguf_type type = v->type == GGUF_ARRAY ? v->item : v->type;
    uint64_t start = c->pos;
    if (type == GGUF_STRING) {
        struct gguf_str s;
        for (uint64_t i = 0; i < v->count; i++)
            if (!take_str(c, &s)) return false;
        v->size = c->pos - start;
    } else {
        if (!size_mul(v->count, type_width[type], &v->size)) v->size = SIZE_MAX;   /* take() refuses that */
        if (!take(c, v->size)) return false;
    }
    v->data = c->part->head + start;
    return true;
}

static bool parse_value(struct cursor *c, struct gguf_value *v)
{
    uint32_t type, item = 0;
    if (!take_name(c, &v->key) || !take_u32(c, &type)) return false;
    v->count = 1;
    if (type == GGUF_ARRAY && (!take_u32(c, &item) || !take_u64(c, &v->count))) return false;
    if (type == GGUF_ARRAY && item == GGUF_ARRAY)
        return bad(c->part, c->e, "the key '%.*s' is an array of arrays, which is not supported", NAME(v->key));
    if (type > GGUF_F64 || item > GGUF_F64)
        return bad(c->part, c->e, "the key '%.*s' has the unknown type %u", NAME(v->key),
                   type > GGUF_F64 ? type : item);
    v->type = type;
    v->item = item;
    return parse_items(c, v);
}

static bool parse_alignment(struct part *p, struct error *e)
{
    p->alignment = 32;
    if (!get_u64(p, "general.alignment", &p->alignment, e)) return false;
    if (p->alignment >= 8 && p->alignment <= MAX_ALIGNMENT && (p->alignment & (p->alignment - 1)) == 0) return true;
    return bad(p, e, "the key 'general.alignment' is %zu; it must be a power of two from 8 to %d",
               (size_t)p->alignment, MAX_ALIGNMENT);
}

static bool parse_metadata(struct cursor *c, size_t n)
{
    struct part *p = c->part;
    p->values = alloc_zeroed(n, sizeof *p->values, "metadata of the model file", c->e);
    if (!p->values) return false;
    p->n_values = n;
    c->what = "metadata value";
    for (c->n = n, c->i = 0; c->i < n; c->i++)
        if (!parse_value(c, &p->values[c->i])) return false;
    return index_names(&p->keys, p->values, n, sizeof *p->values, "key", p, c->e) && parse_alignment(p, c->e);
}

/* ---- tensor directory ------------------------------------------------------------------------------------------- */

/* Fills t->size from its type and dimensions. */
static bool tensor_size(const struct part *p, struct gguf_tensor *t, struct error *e)
{
    const struct type_info *info = type_info(t->type);
    if (!info)
        return bad(p, e, "tensor '%.*s' has the type %u (%s), which is not supported; use a file quantised to another "
                   "type, such as Q4_K_M or Q8_0", NAME(t->name), (unsigned)t->type, type_name(t->type));
    size_t weights = 1;
    for (int i = 0; i < 4; i++) {
        if (t->ne[i] == 0) return bad(p, e, "tensor '%.*s': dimension %d is 0", NAME(t->name), i + 1);
        if (!size_mul(weights, t->ne[i], &weights))
            return bad(p, e, "tensor '%.*s' is too large: its dimensions multiply to more than 2^64", NAME(t->name));
    }
    if (t->ne[0] % (uint64_t)info->block)
        return bad(p, e, "tensor '%.*s': its rows of %zu weights are no whole number of %s blocks of %d",
                   NAME(t->name), (size_t)t->ne[0], info->name, info->block);
    if (!size_mul(weights / (size_t)info->block, (size_t)info->bytes, &t->size))
        return bad(p, e, "tensor '%.*s' is too large: %zu weights of type %s", NAME(t->name), weights, info->name);
    return true;
}

/* Reads one entry; t->offset is still relative to the start of the data. */
static bool parse_tensor(struct cursor *c, struct gguf_tensor *t)
{
    uint32_t n_dims, type;
    if (!take_name(c, &t->name) || !take_u32(c, &n_dims)) return false;
    if (n_dims < 1 || n_dims > 4)
        return bad(c->part, c->e, "tensor '%.*s' has %u dimensions; it must have 1 to 4", NAME(t->name), n_dims);
    for (int i = 0; i < 4; i++) {
        t->ne[i] = 1;
        if (i < (int)n_dims && !take_u64(c, &t->ne[i])) return false;
    }
    if (!take_u32(c, &type) || !take_u64(c, &t->offset)) return false;
    t->n_dims = (int)n_dims;
    t->type = type;
    if (t->offset % c->part->alignment)
        return bad(c->part, c->e, "tensor '%.*s': its offset %zu is no multiple of the alignment %zu", NAME(t->name),
                   (size_t)t->offset, (size_t)c->part->alignment);
    return tensor_size(c->part, t, c->e);
}

/* Makes the offsets of n tensors absolute and checks that the file reaches to the end of each. */
static bool place_tensors(const struct part *p, uint64_t head_end, struct gguf_tensor *t, size_t n, struct error *e)
{
    uint64_t data = (head_end + p->alignment - 1) & ~(p->alignment - 1);   /* head_end <= HEAD_LIMIT */
    uint64_t needed = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t end;
        if (!size_add(t[i].offset, data, &t[i].offset) || !size_add(t[i].offset, t[i].size, &end) || end > INT64_MAX)
            return bad(p, e, "tensor '%.*s': its offset is far outside of the file", NAME(t[i].name));
        if (end > needed) needed = end;
    }
    if (needed <= p->size) return true;
    return bad(p, e, "the file is incomplete: it has %zu of %zu bytes; download or copy it again", (size_t)p->size,
               (size_t)needed);
}

/* Appends the directory of part `file` to g->tensors. */
static bool parse_directory(struct gguf *g, int file, struct cursor *c, size_t n)
{
    size_t total, bytes;
    if (!size_add(g->n_tensors, n, &total) || !size_mul(total, sizeof *g->tensors, &bytes)) bytes = SIZE_MAX;
    struct gguf_tensor *tensors = realloc(g->tensors, bytes ? bytes : 1);
    if (!tensors) return fail(c->e, GEN_RUN, "cannot allocate %zu bytes for the tensor directory", bytes);
    g->tensors = tensors;
    tensors += g->n_tensors;
    c->what = "tensor entry";
    for (c->n = n, c->i = 0; c->i < n; c->i++) {
        tensors[c->i] = (struct gguf_tensor){ .file = file };
        if (!parse_tensor(c, &tensors[c->i])) return false;
    }
    g->n_tensors = total;
    return place_tensors(c->part, c->pos, tensors, n, c->e);
}

static int compare_places(const void *a, const void *b)
{
    const struct gguf_tensor *x = *(const struct gguf_tensor *const *)a, *y = *(const struct gguf_tensor *const *)b;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static bool check_overlap(const struct gguf *g, struct error *e)
{
    const struct gguf_tensor **t = alloc_zeroed(g->n_tensors, sizeof *t, "the tensor directory", e);
    if (!t) return false;
    for (size_t i = 0; i < g->n_tensors; i++) t[i] = &g->tensors[i];
    qsort(t, g->n_tensors, sizeof *t, compare_places);
    bool good = true;
    for (size_t i = 1; good && i < g->n_tensors; i++)
        if (t[i]->file == t[i - 1]->file && t[i]->offset - t[i - 1]->offset < t[i - 1]->size)
            good = bad(&g->parts[t[i]->file], e, "the tensors '%.*s' and '%.*s' overlap in the file",
                       NAME(t[i - 1]->name), NAME(t[i]->name));
    free(t);
    return good;
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

/* Opens a regular file; a FIFO or device is refused without waiting for it. */
static bool open_file(struct part *p, struct error *e)
{
    struct stat st;
    p->fd = open(p->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (p->fd < 0 || fstat(p->fd, &st) != 0) return bad(p, e, "cannot open the model file: %s", strerror(errno));
    if (S_ISDIR(st.st_mode)) return bad(p, e, "this is a directory; name a GGUF file in it");
    if (!S_ISREG(st.st_mode)) return bad(p, e, "this is not a regular file; name a GGUF file");
    if (st.st_size <= 0) return bad(p, e, "the file is empty");
    p->size = (uint64_t)st.st_size;
    p->head_size = p->size < HEAD_LIMIT ? p->size : HEAD_LIMIT;
    void *head = mmap(NULL, p->head_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (head == MAP_FAILED)
        return fail(e, GEN_RUN, "cannot allocate %zu bytes for the metadata of %s", p->head_size, short_path(p->path));
    p->head = head;
    return true;
}

/* Gives back the address space behind the part of the head that was read, and makes the rest read-only. */
static void trim_head(struct part *p)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t used = (p->loaded + page - 1) & ~(page - 1);
    if (used < p->head_size) {
        munmap(p->head + used, p->head_size - used);
        p->head_size = used;
    }
    mprotect(p->head, p->head_size, PROT_READ);
}

/* Opens g->parts[file] (its path is set), reads its metadata and appends its tensors to the directory. */
static bool open_part(struct gguf *g, int file, struct error *e)
{
    struct part *p = &g->parts[file];
    struct cursor c = { .part = p, .e = e };
    uint64_t n_tensors = 0, n_values = 0;
    if (!open_file(p, e) || !parse_header(&c, &n_tensors, &n_values) || !parse_metadata(&c, n_values)) return false;
    if (!parse_directory(g, file, &c, n_tensors)) return false;
    trim_head(p);
    return true;
}

/* The length of `path` without its "-00001-of-00003.gguf"; 0 when it does not end like that. */
static size_t split_prefix(const char *path, uint64_t no, uint64_t count)
{
    char suffix[64];
    int n = snprintf(suffix, sizeof suffix, "-%05u-of-%05u.gguf", (unsigned)no + 1, (unsigned)count);
    size_t length = strlen(path);
    return length > (size_t)n && strcmp(path + length - n, suffix) == 0 ? length - (size_t)n : 0;
}

static bool split_numbers(const struct part *p, uint64_t *no, uint64_t *count, struct error *e)
{
    *no = 0;
    *count = 1;
    if (!get_u64(p, "split.no", no, e) || !get_u64(p, "split.count", count, e)) return false;
    if (*count == 0) *count = 1;            /* some tools write 0 for a file that was not split */
    if (*count <= MAX_PARTS && *no < *count) return true;
    return bad(p, e, "the split keys are damaged: part %zu of %zu", (size_t)*no + 1, (size_t)*count);
}

/* Opens the other parts of a split set, whose first part is open. */
static bool open_others(struct gguf *g, struct error *e)
{
    uint64_t no, count, total = 0;
    struct part first = *g->parts;
    if (!split_numbers(&first, &no, &count, e)) return false;
    if (count == 1) return true;
    size_t prefix = split_prefix(first.path, no, count);
    if (no != 0 && prefix)
        return bad(&first, e, "this is part %zu of a set of %zu files; name the first, ...-00001-of-%05zu.gguf",
                   (size_t)no + 1, (size_t)count, (size_t)count);
    if (no != 0)
        return bad(&first, e, "this is part %zu of a set of %zu files; name the first", (size_t)no + 1, (size_t)count);
    if (!prefix)
        return bad(&first, e, "this is the first of %zu files, but its name does not end in -00001-of-%05zu.gguf, so "
                   "the others cannot be found; give the set its names back", (size_t)count, (size_t)count);
    struct part *parts = alloc_zeroed(count, sizeof *parts, "the files of the model", e);
    if (!parts) return false;
    *parts = first;
    free(g->parts);
    g->parts = parts;
    for (uint64_t i = 1; i < count; i++) {
        struct part *p = &parts[i];
        uint64_t part_no, part_count;
        p->fd = -1;
        g->n_parts = (int)i + 1;
        struct bytes name = { 0 };
        if (!bytes_printf(&name, "%.*s-%05zu-of-%05zu.gguf", (int)prefix, first.path, (size_t)i + 1, (size_t)count))
            return fail(e, GEN_RUN, "cannot allocate memory for the name of a model file");
        p->path = name.data;
        if (!open_part(g, (int)i, e) || !split_numbers(p, &part_no, &part_count, e)) return false;
        if (part_no != i || part_count != count)
            return bad(p, e, "this file says that it is part %zu of %zu; part %zu of %zu was expected",
                       (size_t)part_no + 1, (size_t)part_count, (size_t)i + 1, (size_t)count);
    }
    total = g->n_tensors;
    if (!get_u64(parts, "split.tensors.count", &total, e)) return false;
    if (total == g->n_tensors) return true;
    return bad(parts, e, "the %zu files hold %zu tensors together, but the first announces %zu", (size_t)count,
               g->n_tensors, (size_t)total);
}

/* Maps the files that hold tensors. A system that cannot map them leaves gguf_read. */
static void map_parts(struct gguf *g)
{
    for (size_t i = 0; i < g->n_tensors; i++) {
        struct part *p = &g->parts[g->tensors[i].file];
        if (p->map) continue;
        void *map = mmap(NULL, p->size, PROT_READ, MAP_SHARED, p->fd, 0);
        if (map == MAP_FAILED) return;
        p->map = map;
    }
}

bool gguf_open(struct gguf **out, const char *path, bool use_map, struct error *e)
{
    *out = NULL;
    if (!*path) return fail(e, GEN_MODEL, "the name of the model file is empty");
    struct gguf *g = alloc_zeroed(1, sizeof *g, "a model file", e);
    if (!g) return false;
    g->parts = alloc_zeroed(1, sizeof *g->parts, "a model file", e);
    bool good = g->parts;
    if (good) {
        g->n_parts = 1;
        g->parts->fd = -1;
        g->parts->path = strdup(path);
        good = g->parts->path || fail(e, GEN_RUN, "cannot allocate memory for the name of a model file");
    }
    good = good && open_part(g, 0, e) && open_others(g, e) && check_overlap(g, e)
        && index_names(&g->names, g->tensors, g->n_tensors, sizeof *g->tensors, "tensor", g->parts, e);
    if (!good) {
        gguf_close(g);
        return false;
    }
    if (use_map) map_parts(g);
    *out = g;
    return true;
}

void gguf_close(struct gguf *g)
{
    if (!g) return;
    for (int i = 0; i < g->n_parts; i++) {
        struct part *p = &g->parts[i];
        if (p->map) munmap(p->map, p->size);
        if (p->head) munmap(p->head, p->head_size);
        if (p->fd >= 0) close(p->fd);
        free(p->values);
        free(p->keys.sorted);
        free(p->path);
    }
    free(g->parts);
    free(g->tensors);
    free(g->names.sorted);
    free(g);
}

/* ---- the open file ---------------------------------------------------------------------------------------------- */

const char *gguf_path(const struct gguf *g) { return g->parts->path; }
int gguf_version(const struct gguf *g) { return g->parts->version; }

uint64_t gguf_file_bytes(const struct gguf *g)
{
    uint64_t sum = 0;
    for (int i = 0; i < g->n_parts; i++) sum += g->parts[i].size;
    return sum;
}

bool gguf_identity(const struct gguf *g, uint8_t out[32])
{
    struct sha256_ctx c;
    struct stat st;
    struct timespec now;
    bool settled = true;
    sha256_init(&c);
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < g->n_parts; i++) {
        if (fstat(g->parts[i].fd, &st) != 0) return false;
        int64_t all[] = { (int64_t)st.st_dev, (int64_t)st.st_ino, st.st_size, st.st_mtim.tv_sec, st.st_mtim.tv_nsec,
                          st.st_ctim.tv_sec, st.st_ctim.tv_nsec };
        sha256_update(&c, sizeof all, (const uint8_t *)all);
        settled = settled && st.st_ctim.tv_sec + 2 < now.tv_sec;
    }
    sha256_digest(&c, 32, out);
    return settled;
}

/* The threads that compute a digest, piece by piece. */
struct digest {
    const struct gguf *g;
    uint8_t (*pieces)[32];             /* [n] SHA-256 of each piece */
    uint8_t *room;                     /* [threads][DIGEST_STEP] */
    int n;
    void (*progress)(const char *what, double done);
    struct error *e;                   /* [threads] the first of its pieces that cannot be read */
};

/* Piece i of the files: each begins with a piece of its own. */
static void digest_piece(void *user, int i, int thread)
{
    struct digest *d = user;
    struct part *p = d->g->parts;
    uint8_t *data = d->room + (size_t)thread * DIGEST_STEP;
    uint64_t k = (uint64_t)i;
    struct sha256_ctx c;
    for (uint64_t n; k >= (n = (p->size + DIGEST_STEP - 1) / DIGEST_STEP); p++) k -= n;
    uint64_t at = k * DIGEST_STEP;
    size_t n = p->size - at < DIGEST_STEP ? p->size - at : DIGEST_STEP;
    if (d->e[thread].code) return;
    if (!read_at(p->fd, data, n, at)) {
        bad(p, &d->e[thread], "cannot read the file: %s", read_problem());
        return;
    }
    sha256_init(&c);
    sha256_update(&c, n, data);
    sha256_digest(&c, 32, d->pieces[i]);
    if (d->progress && thread == 0) d->progress("hashing", (double)(i + 1) / d->n);
}

bool gguf_digest(const struct gguf *g, uint8_t out[32], int threads, void (*progress)(const char *what, double done),
                 struct error *e)
{
    struct digest d = { .g = g, .progress = progress };
    struct team *team = NULL;
    struct sha256_ctx c;
    for (int i = 0; i < g->n_parts; i++) d.n += (int)((g->parts[i].size + DIGEST_STEP - 1) / DIGEST_STEP);
    bool ok = (d.pieces = alloc_zeroed((size_t)d.n, sizeof *d.pieces, "the model file's digest", e))
           && (d.room = alloc_zeroed((size_t)threads, DIGEST_STEP, "the model file's digest", e))
           && (d.e = alloc_zeroed((size_t)threads, sizeof *d.e, "the model file's digest", e))
           && team_open(&team, threads, e);
    if (ok) team_each(team, d.n, digest_piece, &d);
    for (int i = 0; ok && i < threads; i++)
        if (d.e[i].code) *e = d.e[i], ok = false;
    sha256_init(&c);
    if (ok) sha256_update(&c, (size_t)d.n * sizeof *d.pieces, *d.pieces);
    sha256_digest(&c, 32, out);
    if (team) team_close(team);
    free(d.pieces);
    free(d.room);
    free(d.e);
    return ok;
}

const struct gguf_value *gguf_value_at(const struct gguf *g, size_t i)
{
    return i < g->parts->n_values ? &g->parts->values[i] : NULL;
}

const struct gguf_value *gguf_find(const struct gguf *g, const char *key) { return find_name(&g->parts->keys, key); }
size_t gguf_tensor_count(const struct gguf *g) { return g->n_tensors; }

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i)
{
    return i < g->n_tensors ? &g->tensors[i] : NULL;
}

const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name) { return find_name(&g->names, name); }

const void *gguf_data(const struct gguf *g, const struct gguf_tensor *t)
{
    const uint8_t *map = g->parts[t->file].map;
    return map ? map + t->offset : NULL;
}

bool gguf_read(const struct gguf *g, const struct gguf_tensor *t, size_t offset, void *dst, size_t size,
               struct error *e)
{
    const struct part *p = &g->parts[t->file];
    if (offset > t->size || size > t->size - offset)
        return fail(e, GEN_RUN, "%zu bytes at %zu lie outside of the tensor '%.*s'", size, offset, NAME(t->name));
    if (read_at(p->fd, dst, size, t->offset + offset)) return true;
    return bad(p, e, "cannot read the tensor '%.*s': %s", NAME(t->name), read_problem());
}

void gguf_forget(const struct gguf *g, const struct gguf_tensor *t)
{
    uint8_t *map = g->parts[t->file].map;
    if (!map) return;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), first = t->offset & ~(page - 1);
    madvise(map + first, t->offset + t->size - first, MADV_DONTNEED);
}
