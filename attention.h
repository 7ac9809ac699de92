/* attention.h - attention over the cache on a CUDA device: what the kernels of attention.cu are given. All pointers are
 * to memory that the device can read. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include <cuda_runtime.h>

extern "C" {
#include "kvcache.h"
#include "model.h"
}

/* The pages of one pool. */
struct kv_store {
    unsigned char *base;               /* NULL = there is no such pool */
    size_t page_bytes, layer_bytes;
    int n_kv, page_tiles;              /* heads; tiles of one head in a page */
    int k_tile, v_tile;                /* bytes */
    enum kv_type type_k, type_v;
    unsigned char *slow;               /* page first_slow and those after it, in the host's memory */
    int first_slow;
};

/* What changes from step to step lies in device memory, so that a recorded step can be played again. */
struct kv_row { int32_t token, sequence, pos; };
struct kv_sequence {                   /* one sequence in one layer group; see struct kv_view */
    const int32_t *main, *raw;         /* pages: as in the sequence's own table up to `low` (raw: 1), then a ring */
    int low, ring, raw_ring;
    int sinks, window;
};
/* Neighbouring rows of one sequence that lie in the same block of 32 tokens. */
struct kv_run { int row, n; };

struct attention {
    struct kv_store main, raw;
    int layer;                         /* in its group */
    int n_head, n_kv, head_k, head_v;
    int n_rot;                         /* channels of a head that turn */
    enum rope_order order;
    float scale, cap, eps;
    const float *qkv;                  /* [rows][ld]: queries, keys, values of a row side by side */
    int ld;
    const float *q_bias, *k_bias, *v_bias, *q_norm, *k_norm;     /* NULL = none */
    const float *cs, *sn;              /* [rows][n_rot / 2] angles of the row's position */
    const float *sink_cs, *sink_sn;    /* and of the position that it sees the sinks from */
    const struct kv_row *rows;
    const struct kv_sequence *sequences;           /* [sequences], stride KV_GROUPS */
    int sequence_stride;
    float *out;                        /* [rows][n_head * head_v] */
    /* decode */
    bool append;                       /* the row's own key and value are still to be put into the cache */
    int n_splits;
    float *part;                       /* [rows][n_head][n_splits][head_v + 2]: maximum, sum, values */
    unsigned *arrived;                 /* [rows][n_kv * attention_parts], zero between launches */
    /* prefill */
    const struct kv_run *runs;
    int stages, queries;               /* tiles in shared memory, rows of a run times query heads: attention_fit */
    /* importance eviction: what keys are looked at; see struct kv_view */
    float *peaks;                      /* [rows][n_head][2] maximum and sum of a query's weights; NULL = not wanted */
    const float *votes;                /* [rows] what a query's weight of 1 counts; 0 = nothing */
    uint64_t *const *mass;             /* [sequences] the sequence's masses, [n_layer][n_kv][mass_rows] */
    int mass_rows;
};

/* Rows of a sequence's middle that move together: kv_compact's arguments. */
struct compaction {
    struct kv_store main;              /* pages of one block */
    int head_k, head_v;
    const int32_t *pages, *kept;       /* kept: [n_layer][n_kv][n] */
    int begin, n, unit;
};

enum {
    ATTENTION_GROUP = 16,              /* query heads of a KV head that a block serves; of more each takes a part */
    ATTENTION_WIDE = 8,                /* the same for value heads of more than 128: what registers hold */
    PREFILL_QUERIES = 64               /* rows of a run times query heads of a KV head, at most */
};

/* Blocks that share a KV head's query heads. */
KV_INLINE int attention_parts(int group, int head_v)
{
    int most = head_v > 128 ? ATTENTION_WIDE : ATTENTION_GROUP;
    return (group + most - 1) / most;
}

/* Splits of a row's keys with which `columns` (rows, KV heads and their parts) fill the multiprocessors twice; most:
 * tokens that a row sees. */
static inline int attention_splits(int columns, int processors, int64_t most)
{
    int64_t n = 2 * processors / columns, tiles = (most / KV_BLOCK + 8) / 4;
    n = n < tiles ? n : tiles;
    return n < 1 ? 1 : (int)n;
}

/* What is to be launched, with the struct as its argument; the launch itself is the caller's. */
struct attention_launch {
    const char *name;
    void (*kernel)(struct attention);
    dim3 grid, block;
    size_t shared;
};

/* Rows that each are the only one of their sequence in the batch: split over the keys. shared_limit: bytes of shared
 * memory that a block may have. */
struct attention_launch attention_decode(const struct attention *a, int n_rows, size_t shared_limit);
/* Keys and values of all rows into the cache, then the blocks that they complete sealed, then attention run by run. */
struct attention_launch attention_append(const struct attention *a, int n_rows);
struct attention_launch attention_seal(const struct attention *a, int n_rows);
struct attention_launch attention_prefill(const struct attention *a, int n_runs);
/* Adds the weights of all rows' queries to the masses, once attention has filled peaks. */
struct attention_launch attention_mass(const struct attention *a, int n_runs, int most_rows);
struct compaction_launch {
    const char *name;
    void (*kernel)(struct compaction);
    dim3 grid, block;
    size_t shared;
};
struct compaction_launch attention_compact(const struct compaction *c, int n_layer);
/* Sets `stages` and `queries` (16 to PREFILL_QUERIES) to what fits; `shared_limit` as above. */
void attention_fit(struct attention *a, size_t shared_limit);

/* Why heads of these sizes are not served; NULL = they are. */
const char *attention_refuses(int head_k, int head_v, int group);

#endif
