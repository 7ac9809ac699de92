/* backend.h - the boundary between the engine and the machine that computes. */
#ifndef BACKEND_H
#define BACKEND_H

#include "base.h"
#include "kvcache.h"
#include "model.h"

enum want { WANT_NOTHING, WANT_LOGITS };

/* One token of a batch. Rows of one sequence are neighbours and in order of position. */
struct row {
    int32_t token;
    int32_t sequence;                  /* index into the batch's views */
    int64_t pos;                       /* absolute position; its key and value go into row pos - view.gone */
    enum want want;
    int32_t top;                       /* of a row with logits: how many of the largest are asked for, 0 to TOP_MOST */
};
#define TOP_MOST 128

/* Layer groups: full attention, and layers with a window of the model's own. */
enum { KV_GLOBAL, KV_LOCAL, KV_GROUPS };

struct batch {
    const struct row *rows;
    int n_rows;                        /* <= the max_rows given to open */
    const struct kv_view (*views)[KV_GROUPS];      /* [sequences] */
};

#define LOGIT_ROWS 64                  /* most rows of a batch that may want logits */

/* The largest logits of a row and their ids, in falling order, the lower id first among equals; without those of -inf.
 * Valid until the next forward. */
struct top { int n; const int32_t *ids; const float *logits; };

struct backend {
    const char *name;
    /* Runs the model over the batch: appends every row's key and value to its cache, computes the wanted rows'
     * logits. */
    bool (*forward)(struct backend *b, const struct batch *batch, struct error *e);
    /* Logits of the i-th row of the last batch that wanted them: [n_vocab] floats, valid until the next forward. */
    const float *(*logits)(struct backend *b, int i);
    /* The k largest of its logits where the row asked for as many: found without their being read. n = 0: it did not,
     * or one is NaN, or the largest is not finite, or too many are equal. NULL = this backend has only logits. */
    struct top (*top)(struct backend *b, int i, int k);
    void (*close)(struct backend *b);
    bool exact;                        /* a row's bits do not depend on what is computed with it */
    const char *isa;                   /* instruction set in use */
    int threads;
    size_t weight_bytes;               /* memory held for weights beside the mapped file */
    struct kv_device *device;          /* memory that the page pools are to lie in; NULL = this process's */
};

struct backend_options {
    int threads;                       /* 0 = the cores this process may use */
    int max_rows;                      /* rows of the largest batch */
    int max_sequences;                 /* sequences of the largest batch */
    int64_t max_seen;                  /* most tokens that one query sees */
    bool evicts;                       /* the views sum masses, and rows of theirs may be gone */
    void (*progress)(double done);     /* called while weights are read, 0..1; may be NULL */
    struct comm *comm;                 /* the ranks that hold the model's other parts; NULL = it is whole */
    int place;                         /* number of the device that is used, counted around */
};

/* The CPU backend (cpu.c). Errors: GEN_USAGE for GEN_ISA, GEN_MODEL for a file that shrinks, GEN_RUN for memory. */
bool cpu_open(struct backend **out, const struct model *m, const struct backend_options *o, struct error *e);

/* The CUDA backend (cuda.cu), on device `place`, counted around. Called by all ranks of a group, which all succeed or
 * all fail, with the error of the first that does. Errors: GEN_MODEL where this program, machine or model cannot use
 * CUDA, GEN_RUN for memory (bytes wanted, bytes free, what to lower) and for calls that fail (call and kernel). */
bool cuda_open(struct backend **out, const struct model *m, const struct backend_options *o, struct error *e);
/* Free bytes of the device that cuda_open would take, divided by the processes that share it; 0 after filling *e as
 * it would. */
size_t cuda_memory(int place, int places, struct error *e);

#endif
