/* engine.h - an engine (model, backend, page pool) and its sequences; the only decode loop. */
#ifndef ENGINE_H
#define ENGINE_H

#include "backend.h"
#include "kvstore.h"

enum kv_layout { KV_PAGED, KV_CONTIGUOUS };
enum { BACKEND_AUTO, BACKEND_CPU, BACKEND_CUDA };      /* auto: CUDA where it can be used */

struct engine_options {
    int64_t ctx;                       /* tokens a sequence may hold; 0 = the model's */
    int batch;                         /* rows of a prefill chunk; 0 = chosen */
    int threads;                       /* 0 = the cores this process may use */
    int backend;                       /* BACKEND_AUTO, BACKEND_CPU, BACKEND_CUDA */
    int max_sequences;                 /* sequences alive at once, >= 1 */
    enum kv_layout layout;
    int page_size;                     /* tokens, multiple of KV_BLOCK; paged only */
    enum kv_type type_k, type_v;
    int window, sinks;                 /* keep the last `window` tokens and the first `sinks`; window 0 = keep all */
    int slide;                         /* > 0: once ctx tokens are there, keep the first `slide` and the
                                        * last ctx - slide; ignored where that is less than half of them */
    enum kv_evict evict;               /* importance eviction down to `budget` tokens per layer and head; paged, pages
                                        * of KV_BLOCK, no window */
    int64_t budget;                    /* >= KV_BUDGET_LEAST */
    bool cache;                        /* false: --no-kv-cache, everything is computed again at each step */
    bool share;                        /* sequences find each other's full pages by their tokens (paged only) */
    size_t kv_memory;                  /* bytes of pages in memory at most; 0 = what the context may need */
    bool overcommit;                   /* kv_memory may be less than ctx tokens need: passes fail when pages are out */
    const char *kv_offload;            /* where pages go beyond kv_memory: a folder, or "host": /var/tmp, of CUDA pinned
                                        * memory; NULL = nowhere */
    void (*progress)(const char *what, double done);   /* load and prefill, 0..1; may be NULL */
    struct comm *comm;                 /* the ranks that hold the model's other parts; NULL = it is whole */
    int place;                         /* number of this machine's device that CUDA uses, counted around */
};

struct engine;
struct sequence;

/* The model must outlive the engine. Errors: GEN_USAGE (context, page size), GEN_RUN (memory: bytes wanted and what to
 * lower). */
bool engine_open(struct engine **out, const struct model *m, const struct engine_options *o, struct error *e);
void engine_close(struct engine *g);
const struct model *engine_model(const struct engine *g);
int64_t engine_ctx(const struct engine *g);
const struct backend *engine_backend(const struct engine *g);
/* Why CUDA is not used with BACKEND_AUTO, "" where it is. */
const char *engine_note(const struct engine *g);

/* With a model in parts, rank 0 uses the engine as ever. The other ranks wait for the options that its engine_open is
 * called with (false: there will be none, by ranks_tell of nothing), call engine_open with these and the same model's
 * part, and compute their parts in engine_serve until rank 0 closes its engine. */
bool engine_wait(struct comm *comm, struct engine_options *o);
bool engine_serve(struct engine *g, struct error *e);

struct kv_usage {
    size_t bytes_used;                 /* of pages that sequences own; raw blocks of sealed types included */
    size_t bytes_reserved;             /* of pages that may lie in memory at once */
    size_t bytes_per_token;
    int pages;                         /* owned */
    size_t bytes_unfilled;             /* of bytes_used: places at the sequences' ends that hold no token yet */
    size_t bytes_slow;                 /* of bytes_used: in the file of kv_offload */
    uint64_t bytes_out, bytes_in;      /* moved to that file and back, so far */
};
struct kv_usage engine_kv_usage(const struct engine *g);
/* True when the page pools are consistent: for tests. */
bool engine_check(const struct engine *g);
/* What engine_open would reserve for these options, without reserving it; whether that is more than kv_memory without
 * kv_offload is not looked at. */
bool engine_estimate(const struct model *m, const struct engine_options *o, struct kv_usage *out, struct error *e);

bool sequence_open(struct sequence **out, struct engine *g, struct error *e);
void sequence_close(struct sequence *s);

/* Makes the cache hold the longest part of tokens[0..n) that needs no computing, from the sequence's own rows or from
 * pages of the same text that others have computed; at most n - 1 tokens, unless the sequence holds all n and their
 * logits. Returns how many. Worth asking again while another sequence computes the same text. */
int64_t sequence_reuse(struct sequence *s, const int32_t *tokens, int64_t n);

/* Makes the cache hold exactly tokens[0..n): what sequence_reuse finds is kept, the rest is dropped, the missing rows
 * are computed in chunks, and the logits of row n-1 are ready afterwards (that row is computed again if need be).
 * *reused (may be NULL) = rows that were kept. n >= 1. Stopped early (*stop becomes non-zero, stop may be NULL): true,
 * but logits are NULL. Errors: GEN_USAGE when n exceeds the context (both numbers), GEN_RUN. */
bool sequence_sync(struct sequence *s, const int32_t *tokens, int64_t n, int64_t *reused,
                   const volatile int *stop, struct error *e);

/* Called with the logits of the rows that sequence_score wants, in order. false stops the run (the error is the
 * callee's). */
typedef bool (*score_row)(void *user, int64_t pos, const float *logits, struct error *e);
/* As sequence_sync from an empty cache, with the logits of every row from `first` on handed to `each`. */
bool sequence_score(struct sequence *s, const int32_t *tokens, int64_t n, int64_t first, score_row each, void *user,
                    struct error *e);

/* One sequence's part of a forward pass: `n` tokens more, of which the last `want` get logits. */
struct work { struct sequence *s; const int32_t *tokens; int n, want; };
/* One forward pass for `n` different sequences (at most max_sequences; together at most engine_rows tokens, of which
 * LOGIT_ROWS get logits). All or nothing: after an error every sequence holds what it held. Does not allocate. */
bool engine_forward(struct engine *g, const struct work *w, int n, struct error *e);
int engine_rows(const struct engine *g);

/* engine_forward with one token and its logits for each of n different sequences. With options.cache false and n = 1
 * everything is computed again. */
bool engine_step(struct engine *g, struct sequence *const *seqs, const int32_t *tokens, int n, struct error *e);
/* engine_forward with n tokens of one sequence, 1 to EXTEND_ROWS, and the logits after each of them. */
enum { EXTEND_ROWS = 16 };
bool sequence_extend(struct sequence *s, const int32_t *tokens, int n, struct error *e);

/* A second sequence with the same tokens, and the same logits as long as those last. It shares all pages: whoever
 * writes to a shared one gets a copy of his own first. */
bool sequence_fork(struct sequence **out, const struct sequence *from, struct error *e);
/* With eviction: a prompt ends after n tokens (nothing happens if the sequence holds them). Nothing goes before that,
 * and something may go then and every KV_BLOCK tokens. sequence_sync and sequence_score say it themselves. */
void sequence_prompt_ends(struct sequence *s, int64_t n);
/* Tokens that one forward pass may add: it must not go past a length at which something may go. */
int64_t sequence_most(const struct sequence *s);
/* Drops all tokens from position n on, and as many before it as have lost what the next token needs: none as long as n
 * lies within the last EXTEND_ROWS tokens. Returns the length that is left. */
int64_t sequence_cut(struct sequence *s, int64_t n);

/* Logits after the sequence's last token, or after the one at `pos`: [n_vocab], valid until the next call that computes
 * anything. NULL when there are none. */
const float *sequence_logits(const struct sequence *s);
const float *sequence_logits_at(const struct sequence *s, int64_t pos);
/* out = the lower-case hex SHA-256 of those after the last token, "" where there are none. Errors: GEN_RUN where they
 * cannot be read. */
bool sequence_hash_logits(const struct sequence *s, char out[65], struct error *e);
/* From now on, whoever reads logits of the sequence may ask for the k largest of them (0 = nobody does). */
void sequence_want_top(struct sequence *s, int k);
/* The k largest of the logits after the token at `pos`, where the backend tells them without all being read. n = 0
 * where it does not, where there are no logits, or one is NaN, the largest is not finite, or too many are equal. */
struct top sequence_top_at(const struct sequence *s, int64_t pos, int k);
int64_t sequence_length(const struct sequence *s);
/* Tokens that no new token sees any more, because of the window option or, per layer and head, of eviction. */
int64_t sequence_evicted(const struct sequence *s);
const int32_t *sequence_tokens(const struct sequence *s);

/* ---- room: for a scheduler --------------------------------------------------------------------------------------- */

/* Bytes of pages that a sequence of n tokens needs when it shares none; and those in memory that can be had without
 * taking any from a sequence that is not parked. */
size_t engine_bytes_for(const struct engine *g, int64_t n);
size_t engine_room(const struct engine *g);
/* Bytes that the sequence would need beyond what it has, to hold n tokens. */
size_t sequence_bytes_to(const struct sequence *s, int64_t n);
/* Bytes of pages that a forward pass takes to add n tokens: exactly those that engine_forward takes, unless two
 * sequences of the pass get copies of the same page, of which one is not made. */
size_t sequence_bytes_more(const struct sequence *s, int64_t n);
/* Bytes of pages that a forward pass of so many rows may take for itself: they are given back at its end. */
size_t engine_bytes_of_pass(const struct engine *g, int64_t rows);
/* The sequence is not used for now: its pages are the first to leave memory. A forward pass with it ends this, and
 * brings back what there is room for; sequence_prefetch, a step before, has the system read ahead, or pages moved to
 * the device. */
void sequence_park(struct sequence *s);
void sequence_prefetch(struct sequence *s);

/* ---- blocks: keys and values of KV_BLOCK tokens in all layers, whatever the layout and the page size; for a store  */

/* A block's parts are those of the layer groups: bit i stands for group i. Windows make parts of old blocks go away,
 * and a sequence does without them. */
enum { KV_ALL_PARTS = (1 << KV_GROUPS) - 1 };
/* Raised whenever the numbers that a forward pass writes to the cache change. */
enum { KV_NUMERICS = 3 };
/* Key that block 0's is chained to (kv_block_key): SHA-256 over all that the numbers depend on. `model` is the
 * fingerprint of the model file. */
void engine_root_key(const struct engine *g, const uint8_t model[KV_KEY], uint8_t key[KV_KEY]);
/* Bytes of these parts of a block (block 0 of sealed types has its raw rows, too). */
size_t engine_block_bytes(const struct engine *g, int64_t block, unsigned parts);
/* Parts of `block` that a sequence needs to go on after `n` tokens. */
unsigned engine_block_needs(const struct engine *g, int64_t block, int64_t n);
/* Writes the parts that are still there one after another to `out` (room for KV_ALL_PARTS) and says which these are; 0
 * also for a block that is not whole. */
unsigned sequence_read_block(const struct sequence *s, int64_t block, void *out);
/* Appends a block's tokens with the parts `in`, which hold what sequence_read_block gave; the sequence's length is a
 * multiple of KV_BLOCK. Once all are written, sequence_sync goes on from there, or from 0 if a part it needs is not
 * there. Errors: as engine_forward's; nothing is changed then. */
bool sequence_write_block(struct sequence *s, const int32_t tokens[KV_BLOCK], const void *in, unsigned parts,
                          struct error *e);

/* ---- a store of blocks (kvstore.h) ------------------------------------------------------------------------------- */

/* From now on sequence_sync and sequence_begin take blocks from the store and have those of prompts put there (NULL =
 * no more). `root` is engine_root_key's. Errors: GEN_RUN for memory. */
bool engine_use_store(struct engine *g, struct kvstore *k, const uint8_t root[KV_KEY], struct error *e);
/* For those who compute a prompt by engine_forward: the sequence holds a part of tokens[0..n), and now what the store
 * has of it, too, but for the last token. The rest is put there as it is computed. */
void sequence_begin(struct sequence *s, const int32_t *tokens, int64_t n);
/* Appends blocks of tokens[0..n), which go on what the sequence holds, as far as the store has what is needed to go on
 * after them. */
void sequence_restore(struct sequence *s, struct kvstore *k, const uint8_t root[KV_KEY], const int32_t *tokens,
                      int64_t n);
/* Puts the sequence's whole blocks into the store, with the parts that are still there. Errors: GEN_RUN for memory. */
bool sequence_store(const struct sequence *s, struct kvstore *k, const uint8_t root[KV_KEY], struct error *e);

#endif
