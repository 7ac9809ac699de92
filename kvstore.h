/* kvstore.h - keys and values on disk: blocks of KV_BLOCK tokens, found by their keys (kv_block_key). Two kinds: a
 * store in a directory that processes share, and a file that holds one text's blocks.
 *
 * A store never makes a run fail: what cannot be read is as if it were not there, what cannot be written is left out,
 * and the first thing that goes wrong is told in one sentence. Nothing that a file says is trusted before its checksum
 * was compared. */
#ifndef KVSTORE_H
#define KVSTORE_H

#include "base.h"
#include "kvcache.h"

struct kvstore_block {
    int64_t index;                     /* of the block in its text */
    uint8_t key[KV_KEY], parent[KV_KEY];           /* its own, and that of the block before it */
    const int32_t *tokens;             /* [KV_BLOCK] */
    unsigned parts;                    /* which parts the data has; see engine.h */
    const void *data;                  /* [bytes], a multiple of 8 */
    size_t bytes;
};

struct kvstore {
    /* The parts that are there of the block with this key; 0 = nothing is. What is found counts as used. */
    unsigned (*find)(struct kvstore *k, const struct kvstore_block *b);
    /* The data of a block that was found, with exactly these parts and bytes and for these tokens, until the next call;
     * NULL = not there after all. */
    const void *(*read)(struct kvstore *k, const struct kvstore_block *b);
    /* Keeps n blocks. */
    void (*put)(struct kvstore *k, const struct kvstore_block *b, int n);
    /* What was put is kept; no other process has to wait for this one while it computes what comes next. */
    void (*pause)(struct kvstore *k);
    /* As pause: a prompt is done. */
    void (*done)(struct kvstore *k);
    /* The fingerprint of the model file that has this identity (gguf_identity), and the remembering of one. */
    bool (*known)(struct kvstore *k, const uint8_t identity[32], uint8_t fingerprint[32]);
    void (*remember)(struct kvstore *k, const uint8_t identity[32], const uint8_t fingerprint[32]);
    void (*close)(struct kvstore *k);
    /* Takes the one sentence that says what is wrong. */
    void (*tell)(void *user, const char *sentence);
    void *user;
};

/* A sum over n bytes, a multiple of 8, going on from `sum` (at first 1): SQLite's of its write-ahead log. */
uint64_t kvstore_sum(uint64_t sum, const void *data, size_t n);
/* The sum over all of a block but its index. */
uint64_t kvstore_block_sum(const struct kvstore_block *b);

/* ---- a directory (kvstore.c) ------------------------------------------------------------------------------------- */

/* Opens the store in `dir`, which is made where it is not there; it takes at most about `limit` bytes and is written by
 * so many threads. NULL = it cannot be used, which was told. */
struct kvstore *kvstore_open(const char *dir, uint64_t limit, int threads, void (*tell)(void *, const char *),
                             void *user);

/* ---- a file (kvstore_file.c) ------------------------------------------------------------------------------------- */

/* What stands in a file beside the blocks. Texts are JSON and belong to the store. */
struct kvstore_text {
    const int32_t *tokens;
    int64_t n_tokens, n_blocks;
    uint64_t bytes;                    /* of the file */
    uint8_t root[KV_KEY];              /* the key that block 0's is chained to */
    uint8_t fingerprint[32];           /* of the model file */
    struct bytes settings, messages;   /* what the blocks were made with; the chat that they belong to, or nothing */
};

enum kvstore_use { KVSTORE_UPDATE, KVSTORE_READ, KVSTORE_REPLACE };
/* A store in the file `path`; what is put into it is kept by kvstore_file_save. A file that is not there is an empty
 * one. So is one that cannot be used, and *e says why. A file of another kind is never written to. NULL: *e says
 * why. */
struct kvstore *kvstore_file_open(const char *path, enum kvstore_use use, struct error *e);
/* Does the file begin as one of these? */
bool kvstore_file_is(const char *path);
/* Reads all blocks. Errors: GEN_RUN naming the first that is damaged. */
bool kvstore_file_verify(struct kvstore *k, struct error *e);
/* What the file holds, NULL when it is empty. */
const struct kvstore_text *kvstore_file_text(const struct kvstore *k);
/* Empties the store, and says why in *e, unless the file's blocks are of this model and root. */
bool kvstore_file_check(struct kvstore *k, const uint8_t fingerprint[32], const uint8_t root[KV_KEY], struct error *e);
/* Will a file that cannot be used be written over? Not one of another kind, nor one that is only read. */
bool kvstore_file_replaces(const struct kvstore *k);
/* Writes the file, under another name that is then changed to its own, unless it holds these blocks already. Of *t the
 * blocks and bytes are not looked at. Errors: GEN_RUN; the file is as it was. */
bool kvstore_file_save(struct kvstore *k, const struct kvstore_text *t, struct error *e);

#endif
