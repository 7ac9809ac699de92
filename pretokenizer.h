/* pretokenizer.h - cuts text into the words inside which byte-level BPE may merge.
 *
 * Each family of models has its own regular expressions for this (tokenizer.ggml.pre names them); other words mean
 * other tokens than the model was trained on. PCRE2 runs them, compiled to machine code where it can, with its own
 * Unicode tables (Unicode 14 in releases 10.40 to 10.42). */
#ifndef PRETOKENIZER_H
#define PRETOKENIZER_H

#include "base.h"

struct pretokenizer;

/* name: a value of tokenizer.ggml.pre, n bytes. Error GEN_MODEL: the name is unknown, and is part of the message. */
bool pretokenizer_open(struct pretokenizer **out, const char *name, size_t n, struct error *e);
void pretokenizer_close(struct pretokenizer *p);

bool pretokenizer_whole_words(const struct pretokenizer *p);   /* a word that is a token is not taken apart */
bool pretokenizer_adds_bos(const struct pretokenizer *p);      /* where tokenizer.ggml.add_bos_token is missing */

/* Gives the words of text to each(), in order; joined they are the text. A run of bytes that are not UTF-8 is a word of
 * its own, and what stands on either side is cut as if the text ended there. Thread-safe; time is linear in n. False:
 * each() returned false, or memory is out (GEN_RUN; only then *e is filled). */
typedef bool word_fn(void *context, const char *word, size_t n);
bool pretokenizer_split(const struct pretokenizer *p, const char *text, size_t n, word_fn *each, void *context,
                        struct error *e);

#endif
