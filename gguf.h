/* gguf.h - a GGUF file (v2, v3, little-endian, one file or a split set): metadata and tensor directory.
 *
 * No byte of the file is trusted: every count, length and offset is checked against the bytes that are really there
 * before it is used, so whatever gguf_open accepts can be read without further checks. */
#ifndef GGUF_H
#define GGUF_H

#include "base.h"
#include "quant.h"

struct gguf;

enum gguf_type {                       /* metadata value types, numbered as in the file */
    GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY,
    GGUF_U64, GGUF_I64, GGUF_F64
};

struct gguf_str { const char *ptr; size_t len; };   /* bytes inside the file, not NUL-terminated */

struct gguf_value {
    struct gguf_str key;
    enum gguf_type type;               /* GGUF_ARRAY: `item` is the type of its items */
    enum gguf_type item;
    uint64_t count;                    /* items of an array; 1 otherwise */
    const uint8_t *data;               /* the packed items as they stand in the file (strings: u64 length, bytes) */
    size_t size;                       /* bytes at data */
};

struct gguf_tensor {
    struct gguf_str name;
    enum tensor_type type;
    int n_dims;                        /* 1 to 4 */
    uint64_t ne[4];                    /* ne[0] = row length (columns), ne[1] = rows, ...; unused are 1 */
    int file;                          /* which file of a split set */
    uint64_t offset;                   /* from the start of that file, in bytes */
    size_t size;                       /* in bytes: whole, inside the file and not overlapping another tensor */
};

/* Opens FILE (of a split set: the first; the others are found beside it). use_map: memory-map the tensor data; without
 * it, or where the system cannot map the file, data is only reachable through gguf_read. The metadata is always a
 * private copy. Errors: GEN_MODEL with the file's name; GEN_RUN when memory is out. */
bool gguf_open(struct gguf **out, const char *path, bool use_map, struct error *e);
void gguf_close(struct gguf *g);

const char *gguf_path(const struct gguf *g);
int gguf_version(const struct gguf *g);
uint64_t gguf_file_bytes(const struct gguf *g);      /* all files of the set together */
/* What tells these files from changed ones without reading them: SHA-256 over their devices, inodes, sizes and times.
 * False where it does not: a file changed so lately that another change might leave its times as they are. */
bool gguf_identity(const struct gguf *g, uint8_t out[32]);
/* SHA-256 over the SHA-256 of each 256 KiB of each file (the last ones are shorter), computed by as many threads.
 * progress may be NULL. Errors: GEN_MODEL; GEN_RUN for memory. */
bool gguf_digest(const struct gguf *g, uint8_t out[32], int threads, void (*progress)(const char *what, double done),
                 struct error *e);

/* Metadata. The i-th value, or NULL past the end; the value of a key, or NULL. */
const struct gguf_value *gguf_value_at(const struct gguf *g, size_t i);
const struct gguf_value *gguf_find(const struct gguf *g, const char *key);

/* Typed access. Absent key: *out is left as it was and the result is true. Wrong type or out of range: false and *e
 * names key, wanted and found type. Any integer type converts to u64 when not negative; integers convert to f64, and
 * infinities and NaNs are out of range. */
bool gguf_get_u64(const struct gguf *g, const char *key, uint64_t *out, struct error *e);
bool gguf_get_f64(const struct gguf *g, const char *key, double *out, struct error *e);
bool gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct error *e);
bool gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *out, struct error *e);

/* The next string of a string array: *cursor starts at value->data; call at most value->count times. */
struct gguf_str gguf_next_str(const uint8_t **cursor);

/* Tensors. */
size_t gguf_tensor_count(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i);
const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name);     /* NULL when absent */
/* The mapped data, aligned to at least 8 bytes, or NULL when not mapped. Touching it after the file was made shorter
 * raises SIGBUS, as with any mapping. */
const void *gguf_data(const struct gguf *g, const struct gguf_tensor *t);
/* Copies `size` bytes at `offset` of the tensor's data with pread, not through the map. Thread-safe. */
bool gguf_read(const struct gguf *g, const struct gguf_tensor *t, size_t offset, void *dst, size_t size,
               struct error *e);
/* Gives mapped pages of the tensor back to the system (they can be read again). */
void gguf_forget(const struct gguf *g, const struct gguf_tensor *t);

#endif
