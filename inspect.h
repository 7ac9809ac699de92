/* inspect.h - what a model file holds and what a run of it takes, without running it. */
#ifndef INSPECT_H
#define INSPECT_H

#include "engine.h"
#include "gguf.h"

/* A summary of the file: architecture, sizes, tokenizer, tensor types; as text lines or as a JSON object. Works on
 * files that hold only a vocabulary and on architectures that cannot be run. Errors: GEN_RUN for memory. */
bool inspect_file(struct bytes *out, const struct gguf *g, bool json, struct error *e);

/* The same of a cache file (kvstore.h), every block of which is read. Errors: GEN_MODEL when it is damaged. */
bool inspect_cache(struct bytes *out, const char *path, bool json, struct error *e);

/* Appends in what a cache file's settings differ from this run's, of those that its blocks depend on: " (-ctk f16, now
 * int8; ...)"; nothing where none of these does. Errors: false for memory. */
bool inspect_settings(struct bytes *out, const struct bytes *theirs, const struct bytes *own);

/* The bytes of weights and cache that engine_open would take with *o, the cache's bytes for each type and the largest
 * context whose cache fits into `room` bytes. */
bool inspect_run(struct bytes *out, const struct model *m, const struct engine_options *o, uint64_t room, bool json,
                 struct error *e);

/* Reads every tensor through gguf_read and adds one line when all values are finite. Errors: GEN_MODEL naming the
 * tensors with values that are not, or what cannot be read. progress may be NULL. */
bool inspect_tensors(struct bytes *out, const struct gguf *g, void (*progress)(const char *what, double done),
                     struct error *e);

/* Bytes that the cache may take: `budget` where there is one, else two thirds of what is available, less the
 * weights. */
uint64_t cache_room(const struct model *m, int64_t budget, uint64_t available);
/* The largest context, at most `most` tokens, whose cache fits into `room` bytes; a multiple of KV_BLOCK unless it is
 * `most`. 0: not even one block of tokens fits. */
int64_t largest_context(const struct model *m, const struct engine_options *o, int64_t most, uint64_t room);

/* Chooses o->type_k where auto_k, o->type_v where auto_v: the finest of f16, int8 and int4, keys never coarser than
 * values, with which the cache of o->ctx tokens fits into `room` bytes. Where none does, those with which the largest
 * context fits, which o->ctx becomes (sealed types keep rows of a chunk as they are, whatever the context: a small room
 * may hold more tokens in f16); 0 and those that take the least when not even one block fits. */
bool finest_types(const struct model *m, struct engine_options *o, bool auto_k, bool auto_v, uint64_t room,
                  struct error *e);

/* "1.2 GB" */
const char *human_bytes(double n, char out[32]);

#endif
