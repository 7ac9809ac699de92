/* chat.h - messages as a model reads them: rendered by a chat template whose text is trusted while the messages are
 * not, so that nothing in a message becomes a control token; and conversations, whose replies stay the generated
 * ids. */
#ifndef CHAT_H
#define CHAT_H

#include "base.h"
#include "gguf.h"
#include "jinja.h"
#include "tokenizer.h"

struct json_t;                         /* Jansson's */

/* The source of a built-in template ("chatml", "llama2", ...), or NULL. */
const char *chat_builtin(const char *name);
/* The names of the built-in templates, comma separated. */
const char *chat_builtin_names(void);
/* The template that the model brings (tokenizer.chat_template); ptr NULL where it brings none. Errors: GEN_MODEL. */
bool chat_model_template(const struct gguf *g, struct gguf_str *source, struct error *e);

/* A list of messages from JSON text: an array of objects with the strings "role" and "content"; other members reach the
 * template as they are. Errors: GEN_USAGE with the place of what is wrong. */
bool chat_read_messages(struct json_t **out, const char *text, size_t n, struct error *e);
void chat_free_messages(struct json_t *messages);
/* Is the value such an array? Errors: GEN_USAGE, the same. */
bool chat_check_messages(const struct json_t *value, struct error *e);

struct chat;                           /* a template ready for use with one model; immutable */

struct chat_options {
    const char *source;                /* of the template, n bytes; need not outlive the call */
    size_t n;
    bool no_think;                     /* turn thinking off by the template's own switch */
    time_t now;                        /* what the template takes for the time, so that prompts stay the same */
};
/* The tokenizer must outlive the chat. Errors: GEN_MODEL with the template's line, GEN_USAGE for no_think where the
 * template thinks and has no switch, GEN_RUN for memory. */
bool chat_open(struct chat **out, const struct tokenizer *t, const struct chat_options *o, struct error *e);
void chat_close(struct chat *c);

/* Messages and the ids they were computed with. The start token comes once, at the front of the ids. */
struct conversation;

/* The chat must outlive the conversation. */
bool conversation_open(struct conversation **out, const struct chat *c, struct error *e);
void conversation_close(struct conversation *c);
size_t conversation_length(const struct conversation *c);          /* messages */
const char *conversation_role(const struct conversation *c, size_t i);
/* Adds a message at the end; bytes that are not UTF-8 become U+FFFD. Errors: GEN_RUN for memory. */
bool conversation_add(struct conversation *c, const char *role, const char *text, size_t n, struct error *e);
/* Adds a list that chat_read_messages made. */
bool conversation_add_list(struct conversation *c, const struct json_t *messages, struct error *e);
/* The messages as JSON, as chat_read_messages takes them. */
bool conversation_json(const struct conversation *c, struct bytes *out, struct error *e);
/* Adds a list as conversation_add_list does. `tokens` are those that a conversation of these messages had: its replies
 * get their ids back from there. */
bool conversation_add_known(struct conversation *c, const struct json_t *messages, const int32_t *tokens, size_t n,
                            struct error *e);
/* Puts the system message in front, instead of the one that is there; n = 0 takes it away. */
bool conversation_set_system(struct conversation *c, const char *text, size_t n, struct error *e);
/* Puts that of -sys in front. Errors: GEN_USAGE where the first message is one, too, which came from `other`. */
bool conversation_add_system(struct conversation *c, const char *text, const char *other, struct error *e);
/* Drops the messages from the i-th on. */
void conversation_cut(struct conversation *c, size_t i);
/* Takes the last message off, NULL when there is none, and puts one (which is taken over) at the end. */
struct json_t *conversation_pop(struct conversation *c);
bool conversation_push(struct conversation *c, struct json_t *message, struct error *e);

/* The ids after which the model writes the next reply, until the next call that changes the conversation. Of replies
 * that conversation_add_reply took they hold the generated ids for as long as the template gives back the text before
 * and of them; from the first one on that it rewrites, all is encoded anew. Errors: jinja_render's, GEN_RUN for
 * memory. */
bool conversation_prompt(struct conversation *c, const struct ids **out, struct error *e);
/* How many ids the prompt of every conversation with this system message begins with: *n, 0 where the template cannot
 * tell. Errors: GEN_RUN for memory. */
bool conversation_head(const struct conversation *c, size_t *n, struct error *e);
/* How many ids the prompt would have if the last message were the first, after the system message. Errors:
 * conversation_prompt's. */
bool conversation_alone(const struct conversation *c, size_t *n, struct error *e);
/* The text that conversation_prompt rendered last. */
const struct bytes *conversation_text(const struct conversation *c);
/* The model's reply to the last prompt: the generated ids, the end token not among them, and the text made of them,
 * which may end early (before a stop string). It becomes the assistant's message. */
bool conversation_add_reply(struct conversation *c, const int32_t *ids, size_t n_ids, const char *text, size_t n,
                            struct error *e);

#endif
