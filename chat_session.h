/* chat_session.h - a chat that goes on: messages come line by line, replies are streamed, lines that begin with a slash
 * are commands. On a terminal with line editing, in a pipe without any signs or colours. */
#ifndef CHAT_SESSION_H
#define CHAT_SESSION_H

#include "chat.h"
#include "engine.h"
#include "options.h"

struct chat_session {
    struct options *options;           /* generation and sampling, seed >= 0; /set changes them */
    const struct tokenizer *tokenizer;
    struct engine *engine;
    struct conversation *conversation; /* may hold messages */
    const char *first;                 /* the first message of the user, n_first bytes; NULL = it is read, too */
    size_t n_first;
    bool once;                         /* one message and its reply */
    bool terminal;                     /* a person reads standard output: control characters are shown as ^[ */
    bool color;
    struct sequence *sequence;         /* of the engine: the chat's */
    int64_t ctx;                       /* tokens of context */
    const char *longer;                /* the options that give more of them */
    int sinks;                         /* when it is full, the oldest tokens but so many go; 0 = then replies end */
    /* Keep the messages (JSON), the tokens (which begin with the sequence's) and of the sequence's cache what a file
     * can hold, *cached tokens, in one; take them from one, as far as they fit: then the sequence holds blocks of
     * *tokens. *note is told to the user, or empty. */
    bool (*save)(void *user, const char *path, const struct bytes *messages, const struct ids *tokens, int64_t *cached,
                 char note[500], struct error *e);
    bool (*load)(void *user, const char *path, struct bytes *messages, struct ids *tokens, char note[500],
                 struct error *e);
    void *user;
    bool (*read_file)(const char *path, struct bytes *out, struct error *e);       /* appends the text of a file */
    void (*progress)(const char *what, double done);   /* told when a prompt is computed */
};

/* Runs to the end of input or /quit. A message that is not possible (too long, refused by the template) is told and
 * dropped. *signal = the signal that ended it, or 0. Errors: those of writing and computing. */
bool chat_session_run(const struct chat_session *o, int *signal, struct error *e);

#endif
