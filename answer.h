/* answer.h - one answer: the loop from logits to tokens. */
#ifndef ANSWER_H
#define ANSWER_H

#include "engine.h"
#include "sampler.h"
#include "tokenizer.h"

struct answer {
    struct sequence *sequence;         /* whose logits the next token is chosen by */
    struct engine *engine;             /* the sequence's */
    struct sampler *sampler;
    const struct tokenizer *tokenizer;
    int64_t limit;                     /* tokens at most; negative = no limit */
    bool ignore_end;                   /* go on past the tokens that end a text */
    bool lookup;                       /* drafts from the text so far are verified several at a time: the same bits */
    const volatile int *stop;          /* non-zero ends the answer; may be NULL */
    bool wants_logits;                 /* `take` does */
    /* Takes the index-th token of the answer, with the logits that it was chosen by (NULL where neither the sampler nor
     * `take` needs them); *stopped = true ends the answer with it. false ends the run (the error is the callee's). */
    bool (*take)(void *user, int32_t id, size_t index, const float *logits, bool *stopped, struct error *e);
    void *user;
    /* results */
    size_t index;                      /* tokens chosen so far, the one that ends the text not among them */
    bool done;
    const char *finish_reason;         /* "stop", "length", "context"; NULL = not done, or interrupted */
    int64_t steps;                     /* tokens that were computed */
};

/* Tells the sequence what will be read of its logits: to be called before the first are computed. */
void answer_expect(const struct answer *a);
/* Goes on from the sequence's logits and adds the tokens to `tokens`, which hold the sequence's; a token that ends the
 * text is not added. Does not allocate but where tokens->cap is passed. Errors: GEN_RUN, and those of `take`. */
bool answer_run(struct answer *a, struct ids *tokens, struct error *e);
/* One turn of that loop, for a caller who computes: chooses the token after `tokens` by the logits of their last one
 * and adds it, unless it ends the text. a->done says whether the answer has ended; else the new token is to be computed
 * next. Errors: as answer_run. */
bool answer_step(struct answer *a, struct ids *tokens, struct error *e);
/* Makes room for all the tokens that can come, so that the loop does not allocate. Errors: GEN_RUN for memory. */
bool answer_reserve(const struct answer *a, struct ids *tokens, struct error *e);

#endif
