/* kvreport.h - what each way of keeping the cache costs: bytes, speed, and quality on a text. */
#ifndef KVREPORT_H
#define KVREPORT_H

#include "engine.h"
#include "tokenizer.h"

struct kv_report_options {
    int64_t window;                    /* tokens of a window, and in the cache when speed is measured; >= 4 */
    int64_t chunks;                    /* windows at most */
    struct model_options model;        /* those that the model was opened with; kv_heads: what the user asks for */
    bool map;                          /* the model file is mapped */
    bool json;
    void (*progress)(const char *what, double done);   /* may be NULL */
    const volatile int *stop;          /* non-zero ends the run with an error; may be NULL */
};

/* Adds a table, or a JSON object, to *out: a line for the cache in f16, with which the others are compared, one for
 * each other setting that the model allows, and one for the cache that *eo and o->model.kv_heads ask for where it is
 * none of f16. Layout, page size, batch and threads are those of *eo. m has the file's own heads.
 *
 * Quality is perplexity_measure's; the f16 cache's log-probabilities are kept in a temporary file meanwhile, 4 bytes
 * for each word of the vocabulary and scored token. Errors: those of engine_open and perplexity_measure. */
bool kv_report(struct bytes *out, const struct model *m, const struct tokenizer *t, const int32_t *tokens, size_t n,
               const struct engine_options *eo, const struct kv_report_options *o, struct error *e);

#endif
