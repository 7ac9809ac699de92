/* jsonl.h - the lines of a batch: read one by one from a file or a pipe, and each made a request of its own. */
#ifndef JSONL_H
#define JSONL_H

#include "base.h"
#include "chat.h"
#include "gguf.h"
#include "options.h"
#include "tokenizer.h"

enum { LINE_MOST = 64 << 20 };         /* bytes of a line that is read */

/* Where lines come from. */
struct feed;
struct line {
    int64_t number;                    /* from 1 on, empty lines included */
    const char *data;                  /* len bytes without the line end, valid until the next call; NULL when the line
                                        * has more than LINE_MOST bytes */
    size_t len;
    char hash[65];                     /* SHA-256 of the whole line in hex */
};
enum feed_state { FEED_LINE, FEED_NOTHING, FEED_END, FEED_FAILED };

/* Opens a file, or standard input where path is "-". A byte order mark at its beginning is dropped. Errors: GEN_USAGE
 * for a file that cannot be opened. */
bool feed_open(struct feed **out, const char *path, struct error *e);
void feed_close(struct feed *f);
/* The next line; FEED_NOTHING when none has come within wait_ms milliseconds, or a signal came. Errors: GEN_RUN. */
enum feed_state feed_next(struct feed *f, int wait_ms, struct line *out, struct error *e);
/* How much of a regular file was read, 0 to 1; negative for others. */
double feed_share(const struct feed *f);

/* What the lines of a run have in common. */
struct request_context {
    const struct options *options;     /* the command line's */
    const struct tokenizer *tokenizer;
    const struct chat *chat;           /* NULL: *no_chat says why messages are not possible */
    const struct error *no_chat;
    bool chats;                        /* a prompt is a message */
    bool plain;                        /* a line is a prompt, not JSON */
    bool keep;                         /* lines are sent to other processes */
    int64_t seed;                      /* in place of -1 */
    char base[65];                     /* hash of all that answers depend on beside their line */
};

/* Fills base: a hash over the options, the chat template (n bytes of source) and the model's file, of whose tensors
 * names, shapes and some bytes count. Errors: as gguf_read, GEN_RUN for memory. */
bool request_base(char base[65], const struct options *o, const char *source, size_t n, const struct gguf *file,
                  struct error *e);

/* One line, ready to be answered. */
struct request {
    int64_t number;                    /* of the line */
    struct json_t *object;             /* the line's, which the options' texts lie in; NULL for plain text */
    const struct json_t *custom_id;    /* NULL = none */
    char key[65];                      /* of line, options and model: equal keys, equal answers */
    struct bytes line;                 /* a copy, where context.keep asks for it */
    char hash[65];                     /* of the line */
    struct options o;                  /* the command line's and the line's own */
    struct ids prompt;
    bool at_start;                     /* nothing stands before the answer */
    int refs;                          /* answers that still need it; 1 when made */
    struct error error;                /* why it cannot be answered; code 0 = it can */
};

/* A line's key, 64 hexadecimal digits: see struct request. */
void request_key(char key[65], const struct request_context *c, const struct line *line);
/* What is wrong with the line is told by the request. Errors: GEN_RUN when memory is out. */
bool request_make(struct request **out, const struct request_context *c, const struct line *line, struct error *e);
/* Gives one reference back. r may be NULL. */
void request_close(struct request *r);

#endif
