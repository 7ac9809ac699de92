/* kvcache.h - the contract of the KV cache that every backend's compiler reads: what a page is, where a row lies, how
 * it is kept, which rows a query sees.
 *
 * A page holds `page_size` tokens (a multiple of KV_BLOCK) of all layers of a group. Contiguous is the one-page case.
 * In a page, each layer has one key plane and one value plane; a plane is a sequence of tiles, one per (KV head, block
 * of 32 tokens):
 *
 *   page:   layer 0 | layer 1 | ...
 *   layer:  K of head 0, head 1, ... | V of head 0, head 1, ...
 *   head:   tile of tokens 0..31 | tile of tokens 32..63 | ...
 *   tile:   steps | scales | codes                      (steps and scales only where the type has them)
 *
 *   K codes  [head][32]  channel-major: lane t of row d is channel d of token t. A query's scores for 32 keys are one
 *                        chain of multiply-adds per key in the order of d, without horizontal sums.
 *   V codes  [32][head]  token-major: row t is added to the output with the weight of token t.
 *   int4     K [head][16], V [16][head]: a byte's low nibble is token u = 0..15, its high nibble token u + 16.
 *   scales   [blocks][32]: one per token and block of channels (kv_blocks), f16; int4 values: one byte, see
 *            kv_small_scale. int4 keys have none.
 *   steps    int4 keys only: [head] a channel's value of code 0, f16, then [head] its step, one byte, see
 *            kv_small_scale. Channels of keys differ more from each other than tokens do (Liu et al. 2024, "KIVI").
 *
 * Keys are stored after RoPE at their absolute position and are never turned again. Rows of the types below f16 are
 * kept in a rotated basis (Hadamard, per head), which spreads outlier channels over all: queries are rotated likewise,
 * outputs rotated back. int4 keys are not rotated, see kv_rotated.
 *
 * Sealing. A block of the types below f16 is quantised once, when all its 32 rows are there. A query sees its own block
 * and block 0 in raw form (f16) and all other blocks sealed, whether it is part of a prompt or generated, so a row's
 * result does not depend on how the rows before it came. Raw blocks live in slots of their own; kept are those of block
 * 0, of the last two blocks, and of a chunk while it is computed. */
#ifndef KVCACHE_H
#define KVCACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Functions that kernels on a device call, too. */
#ifdef __CUDACC__
#define KV_INLINE static inline __host__ __device__
#else
#define KV_INLINE static inline
#endif

#define KV_BLOCK 32                    /* tokens in a tile, in every layout */
#define KV_HEAD_MOST 1024              /* largest head size */
#define KV_SPLIT 256                   /* keys of one split of a row's attention: splits start at multiples of it */

/* How a key or value element is kept. fp8 is e4m3 with a scale per row and head. */
enum kv_type { KV_F32, KV_F16, KV_BF16, KV_FP8, KV_INT8, KV_INT4, KV_TYPES };

/* Blocks of the type are sealed; rows not yet sealed, and block 0, are kept as kv_raw_type. */
KV_INLINE bool kv_sealed(enum kv_type t) { return t >= KV_FP8; }
KV_INLINE enum kv_type kv_raw_type(enum kv_type t) { return kv_sealed(t) ? KV_F16 : t; }

/* Rows of the type are kept in the rotated basis. */
KV_INLINE bool kv_rotated(enum kv_type t, bool keys) { return kv_sealed(t) && !(keys && t == KV_INT4); }

/* Blocks of channels that share a token's scale: 32 channels each, the last with what is left over; 0 = no scales. */
KV_INLINE int kv_blocks(enum kv_type t, int head, bool keys)
{
    return !kv_rotated(t, keys) ? 0 : t == KV_FP8 || head < 64 ? 1 : head / 32;
}

/* Scales and steps of int4: 5 bits of exponent and 3 of mantissa, as the top bits of a float (about 3e-5 to 1.2e5). */
KV_INLINE float kv_small_scale(uint8_t s)
{
    union { uint32_t u; float f; } x = { ((uint32_t)s << 20) + (112u << 23) };
    return x.f;
}
/* The least of them that is not below x, or the largest; x >= 0. */
KV_INLINE uint8_t kv_to_small_scale(float x)
{
    union { float f; uint32_t u; } bits = { x };
    uint32_t least = 112u << 3, s = (bits.u + 0xfffff) >> 20;
    return s < least ? 0 : s > least + 255 ? 255 : (uint8_t)(s - least);
}

/* Shape of the pages of one layer group: fixed for a run. */
struct kv_shape {
    int n_layer;                       /* layers in this group */
    int n_kv;                          /* KV heads */
    int head_k, head_v;                /* elements of a key and of a value head */
    enum kv_type type_k, type_v;
    int page_size;                     /* tokens, a multiple of KV_BLOCK */
};

/* Bytes in front of a tile's codes. */
KV_INLINE size_t kv_step_bytes(enum kv_type t, int head, bool keys)
{
    return t == KV_INT4 && keys ? (3 * (size_t)head + 3) & ~(size_t)3 : 0;
}
KV_INLINE size_t kv_scale_bytes(enum kv_type t, int head, bool keys)
{
    return (size_t)kv_blocks(t, head, keys) * KV_BLOCK * (t == KV_INT4 ? 1 : 2);
}
KV_INLINE size_t kv_code_bytes(enum kv_type t, int head)
{
    size_t n = (size_t)head * KV_BLOCK;
    return t == KV_F32 ? 4 * n : t <= KV_BF16 ? 2 * n : t == KV_INT4 ? n / 2 : n;
}
/* A whole tile, rounded up so that the next one starts at a multiple of 16 bytes. */
KV_INLINE size_t kv_tile_bytes(enum kv_type t, int head, bool keys)
{
    return (kv_step_bytes(t, head, keys) + kv_scale_bytes(t, head, keys) + kv_code_bytes(t, head) + 15) & ~(size_t)15;
}
KV_INLINE size_t kv_k_tile_bytes(const struct kv_shape *s) { return kv_tile_bytes(s->type_k, s->head_k, true); }
KV_INLINE size_t kv_v_tile_bytes(const struct kv_shape *s) { return kv_tile_bytes(s->type_v, s->head_v, false); }
KV_INLINE size_t kv_layer_bytes(const struct kv_shape *s)
{
    return (size_t)s->n_kv * (s->page_size / KV_BLOCK) * (kv_k_tile_bytes(s) + kv_v_tile_bytes(s));
}
KV_INLINE size_t kv_page_bytes(const struct kv_shape *s) { return s->n_layer * kv_layer_bytes(s); }
/* Bytes of one token in all layers of the group, scales included. */
KV_INLINE double kv_token_bytes(const struct kv_shape *s)
{
    return (double)s->n_layer * s->n_kv * (kv_k_tile_bytes(s) + kv_v_tile_bytes(s)) / KV_BLOCK;
}

/* Pages of one kind as a kernel sees them: page p starts at base + p * kv_page_bytes. */
struct kv_slots {
    const struct kv_shape *shape;
    unsigned char *base;
    const int32_t *pages;              /* [tokens / page_size, rounded up] page of each page_size tokens; -1 = gone */
    unsigned char *slow;               /* of a device: pages from first_slow on lie one after another from here */
    int first_slow;
};

/* One sequence in one layer group. */
struct kv_view {
    struct kv_slots main;              /* all tokens; for sealed types their full blocks */
    struct kv_slots raw;               /* pages of one block, raw types; shape NULL where no type is sealed */
    int sinks, window;                 /* a query sees the first `sinks` tokens and the last `window` (its own is one);
                                        * 0 = all */
    int64_t gone;                      /* rows that importance eviction took out: position p lies in row p - gone */
    uint64_t *mass;                    /* [n_layer][n_kv][mass_rows] softmax weight that queries gave to each row, in
                                        * 2^-32: integers, so that the order of adding does not matter. NULL = not
                                        * summed */
    int64_t mass_rows;
    int64_t voters, prompt;            /* queries from position `voters` on add theirs; one of the prompt, which ends */
    double fade;                       /* at `prompt`, times fade^k, k = whole blocks of tokens from it to that end */
};

/* The slots in which a query at `pos` finds the block that starts at `block`, and those that rows are written to. */
KV_INLINE const struct kv_slots *kv_seen(const struct kv_view *v, int64_t pos, int64_t block)
{
    return v->raw.shape && (block == 0 || block == pos / KV_BLOCK * KV_BLOCK) ? &v->raw : &v->main;
}
KV_INLINE const struct kv_slots *kv_written(const struct kv_view *v) { return v->raw.shape ? &v->raw : &v->main; }

/* The tiles of (layer in group, KV head) that hold token `pos`. */
KV_INLINE unsigned char *kv_k_tile(const struct kv_slots *v, int layer, int head, int64_t pos)
{
    const struct kv_shape *s = v->shape;
    size_t page = (size_t)v->pages[pos / s->page_size], tile = (size_t)(pos % s->page_size) / KV_BLOCK;
    return v->base + page * kv_page_bytes(s) + layer * kv_layer_bytes(s)
         + ((size_t)head * (s->page_size / KV_BLOCK) + tile) * kv_k_tile_bytes(s);
}
KV_INLINE unsigned char *kv_v_tile(const struct kv_slots *v, int layer, int head, int64_t pos)
{
    const struct kv_shape *s = v->shape;
    size_t page = (size_t)v->pages[pos / s->page_size], tile = (size_t)(pos % s->page_size) / KV_BLOCK;
    size_t tiles = s->page_size / KV_BLOCK;
    return v->base + page * kv_page_bytes(s) + layer * kv_layer_bytes(s) + s->n_kv * tiles * kv_k_tile_bytes(s)
         + ((size_t)head * tiles + tile) * kv_v_tile_bytes(s);
}

/* What the query at position `pos` sees: two ranges of tokens, [first, last] each (empty: last < first), and the
 * position that the query is turned to for each. As long as all tokens are seen the second range alone holds them, so
 * that a window changes nothing before it is full. Sinks are looked at as from the position where they would be
 * `window` away, however far the text has gone on since: they look as near as they lie in the cache (Xiao et al. 2023,
 * "Efficient Streaming Language Models"). */
struct kv_range { int64_t first, last, query; };
KV_INLINE struct kv_range kv_sink_range(int64_t pos, int sinks, int window)
{
    int64_t far = (int64_t)sinks + window - 1;
    return pos <= far ? (struct kv_range){ 0, -1, pos } : (struct kv_range){ 0, (int64_t)sinks - 1, far };
}
KV_INLINE struct kv_range kv_window_range(int64_t pos, int sinks, int window)
{
    int64_t far = (int64_t)sinks + window - 1;
    return (struct kv_range){ window > 0 && pos > far ? pos - window + 1 : 0, pos, pos };
}

/* ---- importance eviction (kvcache_evict.c) ---------------------------------------------------------------------- */

/* Whose attention counts: that of all queries (H2O, Zhang et al. 2023), or of the prompt's last ones and those since
 * (SnapKV, Li et al. 2024). */
enum kv_evict { EVICT_OFF, EVICT_ATTENTION, EVICT_SNAPKV };

#define KV_BUDGET_LEAST (5 * KV_BLOCK) /* block 0, two of the middle, two recent ones */
#define KV_POOL 3                      /* rows that a row lends its mass to, the next ones */
#define KV_RECENT_PART 2               /* half of the budget is for the recent rows */

/* Rows [begin, end) of which `keep` stay, all multiples of KV_BLOCK; begin = end: nothing is to go. */
struct kv_middle { int64_t begin, end, keep; };
/* The middle of a cache of `rows` rows that may keep `budget`. */
struct kv_middle kv_middle_of(int64_t rows, int64_t budget);
/* Rows that stay or go together: blocks where a type has no rows of its own. */
int64_t kv_unit(const struct kv_shape *s);
/* Of the middle of each layer and head chooses the rows with the highest mass near them: the first ones of the units,
 * in their order, are written to kept[n_layer][n_kv][keep / unit]. Masses move as kv_compact then moves the rows, to
 * [begin, begin + keep), those behind the middle included, and fade: what was looked at long ago counts less. `scratch`
 * has 2 * rows. */
void kv_choose(const struct kv_view *v, const struct kv_middle *m, int64_t rows, uint64_t *scratch, int32_t *kept);
void kv_compact(const struct kv_view *v, const struct kv_middle *m, const int32_t *kept);

/* ---- the page pool: pages and tables (kvcache.c), the index (kvcache_index.c), tiers (kvcache_tier.c) ------------ */

struct error;

/* Memory of a device that a backend keeps its pages in. */
struct kv_device {
    /* Its own memory, zeroed, or memory of the process's that it reads and writes as well. NULL after filling *e. */
    unsigned char *(*open)(struct kv_device *d, size_t bytes, bool host, struct error *e);
    void (*close)(struct kv_device *d, unsigned char *base, bool host);
    /* Copies n pieces within the device, or between it and the process; a piece starts dst_step and src_step bytes
     * after the one before. False: it failed, which the next forward pass reports. */
    bool (*copy)(struct kv_device *d, void *dst, size_t dst_step, const void *src, size_t src_step, size_t bytes,
                 int n);
    /* Copies between its own memory and that of open(host), while it computes: until `settle` nothing but other moves
     * may use the one place or write the other. */
    void (*move)(struct kv_device *d, void *dst, const void *src, size_t bytes);
    void (*settle)(struct kv_device *d);           /* what comes next finds all moves done */
    /* kv_compact; `kept` and the page table in `v`, whose pages are of one block, lie on the device. Failures as those
     * of copy. */
    void (*compact)(struct kv_device *d, const struct kv_view *v, const struct kv_middle *m, const int32_t *kept);
};

enum { KV_KEY = 32 };                  /* bytes of a block's key */

/* A page is free; or owned by `refs` tables; or idle: nobody's any more, but still found by its key. */
struct kv_page {
    int32_t refs;
    int32_t older, newer;              /* idle: neighbours in the order of last use; free: newer = the next free one */
    int32_t chain;                     /* indexed: the next page of the same bucket; -1 = none */
    bool indexed;
    uint8_t key[KV_KEY];               /* indexed: key of its last block */
};

/* Pages in memory, and pages in a file; or on a device, and in the memory of its host. */
enum { KV_FAST, KV_SLOW, KV_TIERS };
struct kv_tier { int32_t free, oldest, newest; int n_free, n_idle; };  /* heads of the lists of free and idle pages */

/* Pages of one kind: one reservation of address space, touched only when used. Ids below n_fast lie in memory; those
 * from first_slow on in a mapped file that has no name, whose space is allocated as it is needed, so that a full disk
 * is no signal. Kernels see one base; those of a device see two. */
struct kv_pool {
    struct kv_shape shape;
    struct kv_memory *memory;
    unsigned char *base, *slow;        /* the first page, and page first_slow */
    size_t reserved;                   /* bytes of address space; of a device: of its own memory */
    int n_pages;                       /* ids lie below; 0 = the model has no layers of this group */
    int n_fast, first_slow;            /* first_slow = n_pages where there is no other place */
    struct kv_tier tier[KV_TIERS];
    int most_idle;                     /* idle pages kept in memory when pages are taken; n_pages at first */
    struct kv_page *pages;             /* [n_pages] */
    int32_t *tokens;                   /* [n_pages][page_size] of indexed pages */
    int32_t *buckets;                  /* [n_buckets, a power of two] the index: heads of chains */
    int n_buckets;
    struct kv_table *tables;           /* all that are open */
    int file;                          /* descriptor, -1 = none */
    size_t file_bytes;                 /* allocated of it */
    /* Called after kv_pool_copy, for memory elsewhere that holds the same pages; NULL = there is none. */
    void (*copied)(void *user, const struct kv_pool *p, int32_t to, int32_t from, int64_t tokens);
    void *copied_user;
};

/* What pools share: the budget for pages in memory, and where pages go beyond it. */
struct kv_memory {
    size_t limit, used;                /* bytes of fast pages that are not free */
    const char *folder;                /* of the file (a device needs none); NULL = pages have no other place */
    struct kv_pool *pools[4];
    int n_pools;
    uint64_t bytes_out, bytes_in;      /* moved to the file, and back */
    int file_error;                    /* errno of the last allocation in the file that failed */
    struct kv_device *device;          /* whose memory the pools lie in; NULL = this process's */
};

/* n_pages of them fit in memory at once, and as many again in the file. A device holds n_fast of them (elsewhere it is
 * n_pages), and where they have another place its host holds the others. The pool is to stay where it is, as are
 * `memory` and the tables. Errors: GEN_USAGE for the folder, GEN_RUN. */
bool kv_pool_open(struct kv_pool *p, const struct kv_shape *shape, int n_pages, int n_fast, struct kv_memory *memory,
                  struct error *e);
void kv_pool_close(struct kv_pool *p);
/* Says that only some of the pages will be touched: memory comes in small pieces then. */
void kv_pool_sparse(const struct kv_pool *p);
/* Copies the tiles that hold a page's first `tokens` tokens to another page. */
void kv_pool_copy(const struct kv_pool *p, int32_t to, int32_t from, int64_t tokens);

/* A sequence's pages in one pool. */
struct kv_table {
    int32_t *pages;                    /* [cap]; -1 where a page was given back */
    int n, cap;                        /* pages covered; most it may cover */
    bool parked;                       /* not in use now: its pages are the first to go to the file */
    bool coming;                       /* some of its pages are being moved to the device */
    struct kv_table *next, *before;    /* in the pool's list */
};
/* The table never covers more than `max_tokens`, so that a token loop does not allocate. */
bool kv_table_open(struct kv_table *t, struct kv_pool *p, int64_t max_tokens, struct error *e);
/* Makes the places of tokens [from, to) writable: covers them, and gives the table a page of its own where the first
 * one has others as owners (its tokens before `from` are copied) or is gone. False when the pool has not enough pages
 * left (no other page is covered then). */
bool kv_table_grow(struct kv_table *t, struct kv_pool *p, int64_t from, int64_t to);
/* Pages that kv_table_grow would take. */
int kv_table_lacks(const struct kv_table *t, const struct kv_pool *p, int64_t from, int64_t to);
/* The empty table `t` gets all pages of `from`, which both own then. */
void kv_table_share(struct kv_table *t, const struct kv_table *from, struct kv_pool *p);
/* Gives back the pages past `tokens` tokens, the last first. */
void kv_table_cut(struct kv_table *t, struct kv_pool *p, int64_t tokens);
/* Gives back the pages that hold only tokens of [from, to). */
void kv_table_drop(struct kv_table *t, struct kv_pool *p, int64_t from, int64_t to);
/* Takes the pages of tokens [from, to), whole pages, out of the table: those behind move up. */
void kv_table_remove(struct kv_table *t, struct kv_pool *p, int64_t from, int64_t to);
/* All pages that hold tokens of [from, to) are there. */
bool kv_table_holds(const struct kv_table *t, const struct kv_pool *p, int64_t from, int64_t to);
/* Covers `tokens` tokens without pages: what is covered anew is gone. */
void kv_table_skip(struct kv_table *t, const struct kv_pool *p, int64_t tokens);
void kv_table_close(struct kv_table *t, struct kv_pool *p);

/* A block's tiles in the order layer, plane, head, whatever the page size: kv_block_bytes of them. The block starts at
 * `pos` and its page is there; to be written, it must be the table's own (kv_table_grow). False: a device failed. */
size_t kv_block_bytes(const struct kv_shape *s);
bool kv_block_read(const struct kv_table *t, const struct kv_pool *p, int64_t pos, void *out);
void kv_block_write(const struct kv_table *t, const struct kv_pool *p, int64_t pos, const void *in);
/* The block where it lies, if it does so in this order and in this process's memory; else NULL. */
const void *kv_block_at(const struct kv_table *t, const struct kv_pool *p, int64_t pos);

/* Key of a block: SHA-256 over the key of the block before it (of the first: a key that stands for all else that the
 * block's numbers depend on) and its tokens. */
void kv_block_key(const uint8_t before[KV_KEY], const int32_t tokens[KV_BLOCK], uint8_t key[KV_KEY]);

/* The index finds full pages by the key of their last block and by their tokens. A page stays in it after its last
 * owner has gone, until pages are wanted: the one that has been idle for longest goes first. */
/* Page with this key and these tokens [page_size], or -1. */
int32_t kv_index_find(const struct kv_pool *p, const uint8_t key[KV_KEY], const int32_t *tokens);
/* Puts page i of the table, which is full, into the index. Where an equal page is there already, the table takes that
 * one and gives its own back. */
void kv_index_add(struct kv_table *t, struct kv_pool *p, int i, const uint8_t key[KV_KEY], const int32_t *tokens);
/* Covers one page more with a page that kv_index_find gave. */
void kv_table_adopt(struct kv_table *t, struct kv_pool *p, int32_t page);

/* Brings the table's pages from the file into memory, as far as idle pages and parked tables make room; `t` is not
 * parked. */
void kv_table_promote(struct kv_table *t, struct kv_pool *p);
/* Has the system read the table's pages in the file ahead. On a device: moves pages of a parked table to where free and
 * idle pages make room, while it computes for others. */
void kv_table_prefetch(struct kv_table *t, struct kv_pool *p);

/* True when reference counts, lists, index and tables agree: the invariant checker of the tests. */
bool kv_pool_check(const struct kv_pool *p);

#endif
