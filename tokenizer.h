/* tokenizer.h - text to token ids and back: byte-level BPE and SentencePiece, read from GGUF metadata. */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "base.h"
#include "gguf.h"

struct tokenizer;

/* The tokenizer keeps pointers into g, which must outlive it. Errors (GEN_MODEL) name the key, and for an unknown
 * tokenizer.ggml.pre its value. *note (may be NULL) receives a one-line remark such as "no tokenizer.ggml.pre: gpt-2 is
 * assumed", or "". */
bool tokenizer_open(struct tokenizer **out, const struct gguf *g, char note[200], struct error *e);
void tokenizer_close(struct tokenizer *t);

int tokenizer_vocab(const struct tokenizer *t);      /* number of ids */
int tokenizer_bos(const struct tokenizer *t);        /* start token, or -1 */
bool tokenizer_adds_bos(const struct tokenizer *t);  /* a raw prompt starts with it */
int tokenizer_eos(const struct tokenizer *t);        /* or -1 */
/* Is the id eos, eot, eom or a control token known to end a turn? */
bool tokenizer_is_end(const struct tokenizer *t, int32_t id);
bool tokenizer_is_control(const struct tokenizer *t, int32_t id);
/* The id whose text is exactly this, or -1. */
int32_t tokenizer_find(const struct tokenizer *t, const char *text, size_t n);

/* A piece of the text to encode. Control tokens are looked for only in trusted spans; text between control tokens is
 * tokenised as one string whatever spans it comes from. */
struct span { const char *ptr; size_t len; bool trusted; };

/* Appends the ids of the spans' text. add_bos: put the start token first where the model wants one and the text does
 * not begin with it already. The text may hold any bytes, NUL and broken UTF-8 included. Time is linear in the text.
 * The pieces of the ids, joined, are the text byte by byte, except that a byte-level vocabulary may lack some bytes,
 * which are dropped (SmolLM2 lacks six control characters), that U+2581 means a space to SentencePiece, and that its
 * text may begin with a space more (struct detok takes that off).
 * Thread-safe for one tokenizer. Errors: GEN_RUN (memory). */
bool tokenizer_encode(const struct tokenizer *t, const struct span *spans, size_t n, bool add_bos,
                      struct ids *out, struct error *e);

/* The bytes that id stands for when it is generated: control tokens give "" unless show_control; byte tokens give their
 * byte; '▁' and byte-level marks are undone. The pointer is valid until the tokenizer is closed. SentencePiece's
 * leading space is not removed here: see struct detok. An id outside the vocabulary gives "". */
struct gguf_str tokenizer_piece(const struct tokenizer *t, int32_t id, bool show_control);
/* The id's text exactly as it stands in the vocabulary. */
struct gguf_str tokenizer_text(const struct tokenizer *t, int32_t id);

/* Streaming decode: bytes come out only as whole UTF-8 characters; an invalid byte comes out as U+FFFD and never holds
 * back what follows. A zeroed struct starts a stream. */
struct detok {
    unsigned char held[4];             /* an unfinished character */
    int n_held;
    bool begun;                        /* something was decoded: SentencePiece's first space is past */
};
/* Appends the whole characters that id completes. at_start: this stream starts the text (strips the one space that
 * encoding put in front, where the tokenizer does so). false when memory is out. */
bool detok_add(const struct tokenizer *t, struct detok *d, int32_t id, bool at_start, bool show_control,
               struct bytes *out);
/* End of text: a left-over fragment becomes one U+FFFD. */
bool detok_end(struct detok *d, struct bytes *out);

#endif
