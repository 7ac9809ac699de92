/* jinja_internal.h - what the files of the template interpreter share.
 *
 *   jinja_value.c    memory, text that knows where it comes from, values and Python's operators on them, printing
 *   jinja_parse.c    template text to a tree of nodes
 *   jinja_library.c  attributes, filters, tests, methods and functions
 *   jinja.c          the evaluator and the interface
 *
 * Names that the linker sees begin with jj_. Everything lives in one arena per template (nodes) or per rendering
 * (values), which bounds the memory and is freed as a whole; an error anywhere ends in jj_die(), which fills the error
 * and jumps back to the entry point. Names, arguments and corner cases are those of Python and jinja2. */
#ifndef JINJA_INTERNAL_H
#define JINJA_INTERNAL_H

#include "jinja.h"

#include <setjmp.h>
#include <string.h>

enum { JJ_MAX_DEPTH = 800, JJ_MAX_PARSE_DEPTH = 150 };      /* of nested evaluations and values; of nested source */

/* ---- values */

/* A piece of text. trust has a flag for each byte; NULL when all bytes are `trusted` alike. */
struct text { const char *p; size_t n; const uint8_t *trust; bool trusted; };

enum type {
    V_ABSENT,                          /* an argument that was not given */
    V_UNDEFINED, V_NONE, V_BOOL, V_INT, V_FLOAT, V_TEXT, V_LIST, V_TUPLE,
    V_STREAM,                          /* what a generator or a view of a dict yields */
    V_DICT, V_NAMESPACE, V_MACRO, V_FUNCTION, V_METHOD, V_LOOP
};

struct value {
    enum type type;
    bool trusted;                      /* of a scalar: would its text be? */
    union {
        bool boolean;
        int64_t integer;
        double real;
        const struct text *text;       /* V_TEXT; V_UNDEFINED: the name that was looked for */
        struct list *list;
        struct dict *dict;             /* V_DICT, V_NAMESPACE */
        struct macro *macro;
        const struct function *function;
        struct method *method;
        struct loop *loop;
    };
};

struct list { struct value *v; size_t n, cap; bool once, spent; };  /* once: a generator, which can be read one time */
struct pair { struct value key, value; };
struct dict { struct pair *v; size_t n, cap; };                      /* in order of insertion */
struct macro { const struct node *node; struct scope *scope; };
struct method { struct value self; const struct function *function; };
struct loop { struct list *items; size_t i; int depth; const struct node *node; struct value seen; };

struct run;
struct node;
struct scope;
/* A filter, method or global. params: names after the subject, '?' marks those that may be left out; a final '*' takes
 * the rest, positional ones as a list and named ones as a dict. a[0] is the subject, a[1..] are the parameters. */
struct function { const char *name, *params; struct value (*call)(struct run *r, struct value *a); };
struct args { struct list positional; struct dict named; };

struct var { struct text name; struct value value; struct var *next; };
struct scope { struct scope *parent; struct var *vars; };

/* ---- nodes */

enum kind {
    N_DATA, N_PRINT, N_IF, N_FOR, N_SET, N_SET_BLOCK, N_MACRO, N_CALL_BLOCK, N_FILTER_BLOCK, N_WITH, N_SCOPE, N_BREAK,
    N_CONTINUE,
    N_CONST, N_NAME, N_MEMBER, N_TUPLE, N_LIST, N_DICT, N_UNARY, N_BINARY, N_AND, N_OR, N_NOT, N_COMPARE, N_COND,
    N_ATTR, N_ITEM, N_SLICE, N_CALL, N_FILTER, N_TEST
};

struct node {
    enum kind kind;
    char op;                           /* see jj_binary, jj_compare; '*', '^': unpacked argument; 'r': recursive loop */
    int line;
    struct text name;                  /* name, attribute, filter, test, named argument; text of N_DATA */
    struct value value;                /* N_CONST */
    struct node *a, *b, *c;            /* operands; N_FOR: target, sequence, condition; N_COND: test, then, else */
    struct node *list;                 /* items, arguments, parameters (default in a); N_DICT: key, value, key ... */
    struct node *body, *other;         /* statements; other: else */
    struct node *next;                 /* in the list that holds it */
};

struct chunk { struct chunk *next; size_t used, size; _Alignas(16) char data[]; };

struct run {                           /* one parse or one rendering */
    jmp_buf failed;                    /* where jj_die goes */
    struct error *e;
    int line;                          /* being worked on */
    struct chunk *chunks;
    size_t allocated, limit;
    uint64_t steps, max_steps;
    int depth;
    /* parsing */
    const char *src;
    size_t n, counted;                 /* bytes of src; `line` is the line of src[counted] */
    struct token *tokens;
    size_t n_tokens, cap_tokens, at;
    int loops;                         /* around the statement being parsed */
    struct node *root;
    /* rendering */
    const json_t *json_data, *json_own;
    struct dict *data, *own;
    struct scope *scope;
    struct builder *out;
    struct value captured;             /* what a {% filter %} or {% set %} block wrote */
    time_t now;
};



/* ---- jinja_value.c: errors, limits, memory */

_Noreturn void jj_die_code(struct run *r, int code, const char *message);
_Noreturn __attribute__((format(printf, 2, 3))) void jj_die(struct run *r, const char *format, ...);    /* GEN_MODEL */
bool jj_guarded(struct run *r, void (*body)(struct run *));     /* calls body with a place to jump back to */
void jj_spend(struct run *r, size_t steps);
void jj_enter(struct run *r);                                   /* one level deeper, one step */
void jj_leave(struct run *r);
void *jj_alloc(struct run *r, size_t n, size_t size);           /* zeroed */
void jj_free_chunks(struct chunk *c);
void *jj_grow(struct run *r, void *items, size_t n, size_t *cap, size_t size);  /* room for one more of n items */
void jj_push(struct run *r, struct list *list, struct value v);

/* ---- text */

#define JJ_SHOW(t) (int)((t).n < 60 ? (t).n : 60), (t).n ? (t).p : ""     /* for "%.*s" in messages */

static inline struct text text_of(const char *p, size_t n, bool trusted)
{
    return (struct text){p, n, NULL, trusted};
}
static inline struct text literal(const char *s) { return text_of(s, strlen(s), true); }
static inline bool same(struct text a, struct text b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}
static inline bool is(struct text t, const char *s) { return same(t, literal(s)); }
static inline bool trust_at(struct text t, size_t i) { return t.trust ? t.trust[i] : t.trusted; }
static inline struct text sub(struct text t, size_t from, size_t to)
{
    return (struct text){t.p ? t.p + from : NULL, to - from, t.trust ? t.trust + from : NULL, t.trusted};
}
static inline bool all_trusted(struct text t) { return t.trust ? !memchr(t.trust, 0, t.n) : t.trusted; }
/* Bytes of the character at i: a UTF-8 sequence as far as it is one, or a stray byte. */
size_t jj_char_len(struct text t, size_t i);
int32_t jj_code_point(struct text t, size_t i);     /* -1 where it is not UTF-8 */
size_t jj_count_chars(struct run *r, struct text t);
bool jj_is_space(int32_t c);                        /* as str.isspace */
/* Without the characters of `chars` (NULL: white space) at its left and right end. */
struct text jj_strip(struct run *r, struct text t, const struct text *chars, bool left, bool right);
size_t jj_find(struct run *r, struct text t, size_t i, struct text what);      /* at or after i; SIZE_MAX: nowhere */
bool jj_is_word_of(const char *words, struct text name);                       /* words: " one two " */

struct builder { char *p; uint8_t *trust; size_t n, cap; bool trusted; };       /* text that grows; zeroed: empty */
static inline struct text built(const struct builder *b) { return (struct text){b->p, b->n, b->trust, b->trusted}; }
void jj_put(struct run *r, struct builder *b, const char *p, size_t n, bool trusted);
void jj_put_text(struct run *r, struct builder *b, struct text t);
void jj_put_code_point(struct run *r, struct builder *b, int32_t c, bool trusted);
__attribute__((format(printf, 4, 5)))
void jj_put_format(struct run *r, struct builder *b, bool trusted, const char *format, ...);    /* at most 63 bytes */

/* ---- values */

static inline struct value none(void) { return (struct value){.type = V_NONE, .trusted = true}; }
static inline struct value boolean(bool b) { return (struct value){.type = V_BOOL, .trusted = true, .boolean = b}; }
static inline struct value integer(int64_t i, bool trusted)
{
    return (struct value){.type = V_INT, .trusted = trusted, .integer = i};
}
static inline struct value real(double d, bool trusted)
{
    return (struct value){.type = V_FLOAT, .trusted = trusted, .real = d};
}
static inline bool is_number(struct value v) { return v.type == V_BOOL || v.type == V_INT || v.type == V_FLOAT; }
static inline bool is_whole(struct value v) { return v.type == V_BOOL || v.type == V_INT; }
static inline int64_t whole(struct value v) { return v.type == V_BOOL ? v.boolean : v.integer; }
static inline double number(struct value v) { return v.type == V_FLOAT ? v.real : (double)whole(v); }
struct value jj_undefined(struct run *r, struct text name);
struct value jj_string(struct run *r, struct text text);
struct value jj_new_list(struct run *r, enum type type);        /* V_LIST, V_TUPLE or V_STREAM */
struct value jj_generator(struct run *r);                       /* a V_STREAM that can be read once */
struct value jj_new_dict(struct run *r, enum type type);        /* V_DICT or V_NAMESPACE */
void jj_dict_append(struct run *r, struct dict *d, struct value key, struct value value);       /* a key not in d */
void jj_dict_set(struct run *r, struct dict *d, struct value key, struct value value);
const struct value *jj_lookup(struct run *r, const struct dict *d, struct value key);           /* or NULL */
const struct value *jj_lookup_text(struct run *r, const struct dict *d, struct text key);

void jj_need_key(struct run *r, struct value v);                /* dies unless v could be a dict's key */

const char *jj_type_word(struct value v);                       /* "a list" */
_Noreturn void jj_die_undefined(struct run *r, struct value v);
bool jj_truthy(struct value v);
bool jj_equal(struct run *r, struct value a, struct value b);
bool jj_less(struct run *r, struct value a, struct value b);
bool jj_contains(struct run *r, struct value where, struct value what);
struct list *jj_iterate(struct run *r, struct value v);         /* the items that a loop over v sees */
void jj_sort_pairs(struct run *r, struct pair *v, size_t n, bool reverse);      /* by key; stable, reversed as well */
struct value jj_int_arith(struct run *r, char op, int64_t a, int64_t b, bool trusted);
struct value jj_binary(struct run *r, char op, struct value a, struct value b);  /* + - * / d(//) % ^(**) ~ */

struct text jj_to_text(struct run *r, struct value v);          /* str(v) */
struct json_style { bool ascii, sort_keys, indented; struct text indent, item, key; };      /* item, key: separators */
void jj_put_json(struct run *r, struct builder *b, struct value v, const struct json_style *style, int level);

/* ---- jinja_library.c */

extern const struct function jj_globals[];                      /* ends with name NULL, as all such tables */
const struct function *jj_find_function(const struct function *table, struct text name);
struct value jj_get_attr(struct run *r, struct value obj, struct text name);     /* obj.name */
struct value jj_get_item(struct run *r, struct value obj, struct value key);     /* obj[key] */
struct value jj_get_slice(struct run *r, struct value obj, struct value from, struct value to, struct value by);
/* op: = ! < > l(<=) g(>=) i(in) n(not in) */
bool jj_compare(struct run *r, char op, struct value a, struct value b);
bool jj_run_test(struct run *r, struct text name, struct value v, const struct list *args);
/* The subject is args->positional.v[0]. */
struct value jj_call_function(struct run *r, const struct function *f, const struct args *args);
struct value jj_call_filter(struct run *r, struct text name, struct args *args);

/* ---- jinja_parse.c */

void jj_parse(struct run *r);          /* r->src to r->root */

#endif
