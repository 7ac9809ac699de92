/* batch.h - many prompts at once: sequences join and leave the computation at every step (continuous batching: Yu et
 * al. 2022, "Orca"), in pages that they share where their texts begin alike. */
#ifndef BATCH_H
#define BATCH_H

#include "comm.h"
#include "engine.h"
#include "journal.h"
#include "jsonl.h"

/* How far a run is, and what it took. */
struct batch_status {
    int64_t answered, failed;          /* answers of this run, and lines or samples that got an error instead */
    int64_t unanswered;                /* lines that a signal left without one, as far as they can be read */
    bool unread;                       /* there may be more of them */
    int64_t known;                     /* answered by the run that this one resumes */
    int64_t waiting, running;
    int64_t prompt_tokens;             /* of the prompts of the answers begun */
    int64_t prefilled;                 /* of these, computed; the others were shared */
    int64_t repeated;                  /* rows computed again after their sequence had to give its pages up */
    int64_t generated;
    int64_t given_up;                  /* times that a sequence had to */
    double seconds;
    double share;                      /* of the input read, 0 to 1; negative = unknown */
    double longest_gap, median_step;   /* seconds between two tokens of a running sequence, all that happens there
                                        * included, and of all forward passes */
    double longest_wait;               /* the same of a sequence whose pages were given up in between */
    struct kv_usage kv;
    int most_pages;                    /* in use at once */
    size_t shared;                     /* bytes of pages that sharing saved, at most at once */
    double waste;                      /* share of the places in used pages that hold no token, mean over the steps */
};

struct batch_options {
    struct engine *engine;             /* opened for `parallel` sequences */
    struct feed *feed;
    struct journal *journal;
    struct request_context *context;
    int parallel;                      /* sequences at once, <= LOGIT_ROWS */
    bool unordered, timings;
    const char *longer;                /* what makes room for longer prompts, as advice */
    int64_t drawn_seed;                /* to be kept in the first answer; -1 = none */
    struct comm *comm;                 /* processes that the lines are divided over; NULL = one. Rank 0 reads and
                                        * writes: the others have neither feed nor journal */
    const volatile int *stop;          /* non-zero: what was begun is finished, and no more */
    void (*report)(void *user, const struct batch_status *s);      /* called between steps */
    void *user;
};

/* Answers every line of the feed. *status holds the totals, also after an error. A line that cannot be answered gets an
 * answer that says so. Errors: GEN_RUN, those of the feed and of the journal. */
bool batch_run(const struct batch_options *o, struct batch_status *status, struct error *e);

/* Appends the status as one line of text or as one JSON object; `last`: the run is over. Errors: GEN_RUN. */
bool batch_describe(struct bytes *out, const struct batch_status *s, bool json, bool last, struct error *e);

#endif
