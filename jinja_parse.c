/* jinja_parse.c - template text to tokens, tokens to a tree of nodes. */
#define _GNU_SOURCE                    /* memmem */
#include "jinja_internal.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>

/* ---- lexer */

enum token_kind {
    TK_END, TK_DATA, TK_PRINT, TK_PRINT_END, TK_BLOCK, TK_BLOCK_END, TK_NAME, TK_STRING, TK_INT, TK_FLOAT, TK_OP
};
struct token { enum token_kind kind; int line; const char *p; size_t n; };

static const char *at_src(const struct run *r, size_t i, const char *s)     /* does s stand at i? */
{
    size_t n = strlen(s);
    return i <= r->n && n <= r->n - i && memcmp(r->src + i, s, n) == 0 ? r->src + i : NULL;
}

static void count_lines(struct run *r, size_t to)
{
    for (; r->counted < to; r->counted++)
        r->line += r->src[r->counted] == '\n';
}

static void add_token(struct run *r, enum token_kind kind, size_t from, size_t to)
{
    count_lines(r, from);
    r->tokens = jj_grow(r, r->tokens, r->n_tokens, &r->cap_tokens, sizeof *r->tokens);
    r->tokens[r->n_tokens++] = (struct token){kind, r->line, r->src + from, to - from};
}

static size_t skip_space(const struct run *r, size_t i)
{
    struct text t = text_of(r->src, r->n, true);
    while (i < r->n && jj_is_space(jj_code_point(t, i)))
        i += jj_char_len(t, i);
    return i;
}

/* Where the text goes on, if a tag ends at i with `end` ("%}", "#}" or "}}"), else 0. A '-' before it takes the white
 * space behind it away; without a sign, blocks and comments take one line end (trim_blocks). */
static size_t tag_end(const struct run *r, size_t i, const char *end)
{
    bool variable = end[0] == '}';
    if (at_src(r, i, "-") && at_src(r, i + 1, end))
        return skip_space(r, i + 3);
    if (!variable && at_src(r, i, "+") && at_src(r, i + 1, end))
        return i + 3;
    if (!at_src(r, i, end))
        return 0;
    return i + 2 + (!variable && at_src(r, i + 2, "\n"));
}

/* Text between tags. The sign of the tag behind it, or lstrip_blocks, may take white space from its end. */
static void add_data(struct run *r, size_t from, size_t to, char sign, bool block)
{
    size_t end = to;
    if (sign == '-') {
        end = from + jj_strip(r, text_of(r->src + from, to - from, true), NULL, false, true).n;
    } else if (sign != '+' && block) {
        size_t line = to;
        while (line > from && r->src[line - 1] != '\n')
            line--;
        bool starts_line = line > from || from == 0 || r->src[from - 1] == '\n';
        if (starts_line && skip_space(r, line) >= to)
            end = line;
    }
    if (end > from)
        add_token(r, TK_DATA, from, end);
}

static size_t number_end(const struct run *r, size_t i, bool *is_float)
{
    size_t start = i;
    bool after_dot = start > 0 && r->src[start - 1] == '.';
    *is_float = false;
    if (r->src[i] == '0' && i + 1 < r->n && strchr("xXoObB", r->src[i + 1])) {
        for (i += 2; i < r->n && (isxdigit((unsigned char)r->src[i]) || r->src[i] == '_');)
            i++;
        return i;
    }
    while (i < r->n && (isdigit((unsigned char)r->src[i]) || r->src[i] == '_'))
        i++;
    for (int part = 0; part < 2 && !after_dot; part++) {       /* fraction, exponent */
        size_t j = i;
        if (part == 0 ? !at_src(r, j, ".") : !at_src(r, j, "e") && !at_src(r, j, "E"))
            continue;
        j++;
        if (part == 1 && (at_src(r, j, "+") || at_src(r, j, "-")))
            j++;
        if (j >= r->n || !isdigit((unsigned char)r->src[j]))
            continue;
        while (j < r->n && (isdigit((unsigned char)r->src[j]) || r->src[j] == '_'))
            j++;
        i = j;
        *is_float = true;
    }
    return i;
}

static bool is_name_byte(char c) { return isalnum((unsigned char)c) || c == '_' || (unsigned char)c >= 0x80; }

/* The tokens of a tag, from i to its end; returns where the text goes on. Its end is not looked for inside brackets. */
static size_t lex_tag(struct run *r, size_t i, bool variable)
{
    static const char pairs[][3] = {"//", "**", "==", "!=", ">=", "<="};
    char open[JJ_MAX_PARSE_DEPTH];
    int depth = 0;
    for (;;) {
        i = skip_space(r, i);
        count_lines(r, i);
        size_t end = depth == 0 ? tag_end(r, i, variable ? "}}" : "%}") : 0, from = i;
        if (end) {
            add_token(r, variable ? TK_PRINT_END : TK_BLOCK_END, i, i);
            return end;
        }
        if (i >= r->n)
            jj_die(r, "the template ends inside a tag");
        char c = r->src[i];
        if (isdigit((unsigned char)c)) {
            bool is_float;
            i = number_end(r, i, &is_float);
            add_token(r, is_float ? TK_FLOAT : TK_INT, from, i);
        } else if (is_name_byte(c)) {
            while (i < r->n && is_name_byte(r->src[i]) && skip_space(r, i) == i)
                i++;
            add_token(r, TK_NAME, from, i);
        } else if (c == '"' || c == '\'') {
            for (i++; i < r->n && r->src[i] != c; i++)
                i += r->src[i] == '\\';
            if (i >= r->n)
                jj_die(r, "a string has no end");
            add_token(r, TK_STRING, from + 1, i++);
        } else if (c && strchr("+-/*%~[](){}<>=.:|,;!", c)) {
            i++;
            for (size_t k = 0; k < sizeof pairs / sizeof *pairs; k++)
                if (at_src(r, from, pairs[k]))
                    i = from + 2;
            if (c == '!' && i == from + 1)
                jj_die(r, "'!' stands alone");
            if (strchr("([{", c)) {
                if (depth == JJ_MAX_PARSE_DEPTH)
                    jj_die(r, "it is nested too deeply");
                open[depth++] = c;
            }
            if (strchr(")]}", c) && (depth == 0 || open[--depth] != (c == ')' ? '(' : c == ']' ? '[' : '{')))
                jj_die(r, "unexpected '%c'", c);
            add_token(r, TK_OP, from, i);
        } else {
            jj_die(r, "unexpected character '%c'", isprint((unsigned char)c) ? c : '?');
        }
    }
}

/* After "{% raw %}": the text up to the {% endraw %}. */
static size_t lex_raw(struct run *r, size_t from)
{
    if (from >= r->n)                  /* jinja2 lets this pass */
        return r->n;
    for (size_t i = from; i < r->n; i++) {
        if (!at_src(r, i, "{%"))
            continue;
        char sign = at_src(r, i + 2, "-") || at_src(r, i + 2, "+") ? r->src[i + 2] : 0;
        size_t j = skip_space(r, i + 2 + (sign != 0));
        size_t end = at_src(r, j, "endraw") ? tag_end(r, skip_space(r, j + 6), "%}") : 0;
        if (end) {
            add_data(r, from, i, sign, true);
            return end;
        }
    }
    jj_die(r, "a {%% raw %%} block has no end");
}

static void lex(struct run *r)
{
    size_t i = 0;
    while (i < r->n) {
        size_t at = i;
        while (at < r->n && !(r->src[at] == '{' && at + 1 < r->n && strchr("{%#", r->src[at + 1]) && r->src[at + 1]))
            at++;
        char kind = at < r->n ? r->src[at + 1] : 0;
        char sign = kind && (at_src(r, at + 2, "-") || at_src(r, at + 2, "+")) ? r->src[at + 2] : 0;
        add_data(r, i, at, sign, kind == '%' || kind == '#');
        if (!kind)
            break;
        count_lines(r, at);
        size_t inside = at + 2 + (sign != 0), word = skip_space(r, inside);
        if (kind == '#' && inside >= r->n) {       /* jinja2 lets this pass */
            i = r->n;
        } else if (kind == '#') {
            const char *p = memmem(r->src + inside, r->n - inside, "#}", 2);
            if (!p)
                jj_die(r, "a comment has no end");
            size_t end = (size_t)(p - r->src);
            bool signed_end = end > inside && (p[-1] == '-' || p[-1] == '+');
            i = tag_end(r, end - signed_end, "#}");
        } else if (kind == '%' && at_src(r, word, "raw") && (at_src(r, skip_space(r, word + 3), "%}")
                                                             || at_src(r, skip_space(r, word + 3), "-%}"))) {
            word = skip_space(r, word + 3);
            i = lex_raw(r, at_src(r, word, "-") ? skip_space(r, word + 3) : word + 2);
        } else {
            add_token(r, kind == '{' ? TK_PRINT : TK_BLOCK, at, at);
            i = lex_tag(r, inside, kind == '{');
        }
    }
    add_token(r, TK_END, r->n, r->n);
}

/* ---- parser */

static struct token *now(struct run *r)
{
    r->line = r->tokens[r->at].line;
    return &r->tokens[r->at];
}

static struct text token_text(const struct token *t) { return text_of(t->p, t->n, true); }

static bool is_token(struct run *r, enum token_kind kind, const char *s)
{
    const struct token *t = now(r);
    return t->kind == kind && is(token_text(t), s);
}

static bool is_op(struct run *r, const char *s) { return is_token(r, TK_OP, s); }

static bool skip(struct run *r, enum token_kind kind, const char *s)
{
    bool yes = is_token(r, kind, s);
    r->at += yes;
    return yes;
}

static bool skip_op(struct run *r, const char *s) { return skip(r, TK_OP, s); }
static bool skip_word(struct run *r, const char *s) { return skip(r, TK_NAME, s); }

static _Noreturn void die_expected(struct run *r, const char *what)
{
    const struct token *t = now(r);
    if (t->kind >= TK_NAME)
        jj_die(r, "%s is expected, not '%.*s'", what, JJ_SHOW(*t));
    jj_die(r, "%s is expected before %s", what, t->kind == TK_END ? "the end of the template" : "the end of the tag");
}

static void expect_op(struct run *r, const char *s)
{
    if (!skip_op(r, s))
        die_expected(r, s);
}

static void expect(struct run *r, enum token_kind kind, const char *what)
{
    if (now(r)->kind != kind)
        die_expected(r, what);
    r->at++;
}

static struct text expect_name(struct run *r)
{
    expect(r, TK_NAME, "a name");
    return token_text(&r->tokens[r->at - 1]);
}

static struct node *new_node(struct run *r, enum kind kind)
{
    struct node *n = jj_alloc(r, 1, sizeof *n);
    n->kind = kind;
    n->line = r->tokens[r->at].line;
    return n;
}

static struct node *new_pair(struct run *r, enum kind kind, char op, struct node *a, struct node *b)
{
    struct node *n = new_node(r, kind);
    n->op = op;
    n->a = a;
    n->b = b;
    n->line = a->line;
    return n;
}

static void append(struct node ***tail, struct node *n)
{
    **tail = n;
    *tail = &n->next;
}

static struct node *parse_expr(struct run *r);
static struct node *parse_or(struct run *r);
static struct node *parse_primary(struct run *r, bool member);

/* Python's escapes; an unknown one stays as it is. */
static void unescape(struct run *r, struct builder *b, const struct token *t)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    for (size_t i = 0; i < t->n; i++) {
        char c = t->p[i], e = i + 1 < t->n ? t->p[i + 1] : 0;
        const char *known = e ? strchr(from, e) : NULL;
        if (c != '\\' || i + 1 == t->n) {
            jj_put(r, b, &c, 1, true);
            continue;
        }
        i++;
        if (known) {
            jj_put(r, b, &to[known - from], 1, true);
        } else if (e == '\n') {
            continue;
        } else if (e >= '0' && e <= '7') {
            int32_t code = 0;
            for (int k = 0; k < 3 && i < t->n && t->p[i] >= '0' && t->p[i] <= '7'; k++)
                code = 8 * code + t->p[i++] - '0';
            i--;
            jj_put_code_point(r, b, code, true);
        } else if (e == 'x' || e == 'u' || e == 'U') {
            int digits = e == 'x' ? 2 : e == 'u' ? 4 : 8;
            int64_t code = 0;
            for (int k = 0; k < digits; k++) {
                char h = i + 1 < t->n ? t->p[++i] : 0;
                if (!isxdigit((unsigned char)h))
                    jj_die(r, "a string has a broken \\%c escape", e);
                code = 16 * code + (isdigit((unsigned char)h) ? h - '0' : tolower((unsigned char)h) - 'a' + 10);
            }
            if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
                jj_die(r, "a string has an escape that is no character");
            jj_put_code_point(r, b, (int32_t)code, true);
        } else if (e == 'N') {
            jj_die(r, "characters by name are not supported");
        } else {
            jj_put(r, b, t->p + i - 1, 2, true);
        }
    }
}

static struct value parse_number(struct run *r, const struct token *t)
{
    char s[64];
    size_t n = 0;
    for (size_t i = 0; i < t->n; i++)
        if (t->p[i] != '_') {
            if (n == sizeof s - 1)
                jj_die(r, "a number is too long");
            s[n++] = t->p[i];
        }
    s[n] = 0;
    errno = 0;
    if (t->kind == TK_FLOAT)
        return real(strtod(s, NULL), true);
    char letter = n > 1 && s[0] == '0' ? (char)(s[1] | 32) : 0;
    int base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
    char *end;
    int64_t i = strtoll(base == 10 ? s : s + 2, &end, base);
    if (errno || *end)
        jj_die(r, "the integer %s cannot be read", s);
    return integer(i, true);
}

/* Items up to, and with, the closing bracket; a comma may stand before it. */
static struct node *parse_items(struct run *r, enum kind kind, const char *close)
{
    struct node *n = new_node(r, kind), **tail = &n->list;
    while (!skip_op(r, close)) {
        if (n->list) {
            expect_op(r, ",");
            if (skip_op(r, close))
                break;
        }
        append(&tail, parse_expr(r));
        if (kind == N_DICT) {
            expect_op(r, ":");
            append(&tail, parse_expr(r));
        }
    }
    return n;
}

/* One expression, or several with commas: a tuple. `part` parses each. */
static struct node *parse_tuple(struct run *r, struct node *(*part)(struct run *), bool may_be_empty)
{
    struct node *n = new_node(r, N_TUPLE), **tail = &n->list;
    bool comma = false;
    for (;;) {
        const struct token *t = now(r);
        if (t->kind == TK_PRINT_END || t->kind == TK_BLOCK_END || is_op(r, ")") || is_token(r, TK_NAME, "in"))
            break;
        append(&tail, part(r));
        if (!skip_op(r, ","))
            break;
        comma = true;
    }
    if (!n->list && !may_be_empty)
        die_expected(r, "an expression");
    return comma || !n->list ? n : n->list;
}

static struct node *parse_primary(struct run *r, bool member)
{
    const struct token *t = now(r);
    struct node *n = new_node(r, N_CONST);
    if (t->kind == TK_NAME) {
        struct text name = expect_name(r);
        if (is(name, "true") || is(name, "True") || is(name, "false") || is(name, "False")) {
            n->value = boolean((name.p[0] | 32) == 't');
        } else if (is(name, "none") || is(name, "None")) {
            n->value = none();
        } else {
            n->kind = N_NAME;
            n->name = name;
            if (member && skip_op(r, ".")) {
                struct node *m = new_pair(r, N_MEMBER, 0, n, NULL);
                m->name = expect_name(r);
                return m;
            }
        }
    } else if (t->kind == TK_STRING) {
        struct builder b = {0};
        for (; now(r)->kind == TK_STRING; r->at++)
            unescape(r, &b, now(r));
        n->value = jj_string(r, b.n ? built(&b) : literal(""));
    } else if (t->kind == TK_INT || t->kind == TK_FLOAT) {
        n->value = parse_number(r, t);
        r->at++;
    } else if (skip_op(r, "(")) {
        n = parse_tuple(r, parse_expr, true);
        expect_op(r, ")");
    } else if (skip_op(r, "[")) {
        n = parse_items(r, N_LIST, "]");
    } else if (skip_op(r, "{")) {
        n = parse_items(r, N_DICT, "}");
    } else {
        die_expected(r, "an expression");
    }
    return n;
}

/* Arguments after "(", up to and with ")". */
static struct node *parse_args(struct run *r)
{
    struct node *first = NULL, **tail = &first;
    while (!skip_op(r, ")")) {
        if (first) {
            expect_op(r, ",");
            if (skip_op(r, ")"))
                break;
        }
        struct node *n = new_node(r, N_CONST);
        n->op = skip_op(r, "**") ? '^' : skip_op(r, "*") ? '*' : 0;
        const struct token *t = now(r);
        if (!n->op && t->kind == TK_NAME && t[1].kind == TK_OP && is(token_text(t + 1), "=")) {
            n->name = token_text(t);
            r->at += 2;
        }
        n->a = parse_expr(r);
        append(&tail, n);
    }
    return first;
}

static struct node *parse_subscript(struct run *r, struct node *obj)
{
    struct node *n = new_pair(r, N_ITEM, 0, obj, NULL);
    struct node *part[3] = {0};
    int i = 0;
    do {
        if (!is_op(r, ":") && !is_op(r, "]"))
            part[i] = parse_expr(r);
    } while (skip_op(r, ":") && ++i < 3);
    if (i == 0) {
        if (!part[0])
            die_expected(r, "an index");
        n->b = part[0];
    } else {
        n->b = new_pair(r, N_SLICE, 0, obj, part[1]);
        n->b->a = part[0];
        n->b->c = part[2];
    }
    expect_op(r, "]");
    return n;
}

static struct node *parse_postfix(struct run *r, struct node *n)
{
    for (;;) {
        if (skip_op(r, ".")) {
            struct node *attr = new_pair(r, N_ATTR, 0, n, NULL);
            if (now(r)->kind == TK_INT) {
                attr->kind = N_ITEM;
                attr->b = parse_primary(r, false);
            } else {
                attr->name = expect_name(r);
            }
            n = attr;
        } else if (skip_op(r, "[")) {
            n = parse_subscript(r, n);
        } else if (is_op(r, "(")) {
            n = new_pair(r, N_CALL, 0, n, NULL);
            n->line = now(r)->line;
            r->at++;
            n->list = parse_args(r);
        } else {
            return n;
        }
    }
}

/* "| name(args)", as often as it comes; n is NULL where a block's text is filtered. */
static struct node *parse_filter(struct run *r, struct node *n)
{
    struct node *f = new_node(r, N_FILTER);
    f->a = n;
    f->name = expect_name(r);
    if (skip_op(r, "("))
        f->list = parse_args(r);
    return f;
}

static struct node *parse_test(struct run *r, struct node *n)
{
    bool negated = skip_word(r, "not");
    struct node *t = new_node(r, N_TEST);
    t->a = n;
    t->name = expect_name(r);
    const struct token *k = now(r);
    bool ends = k->kind == TK_NAME && (is(token_text(k), "else") || is(token_text(k), "or") || is(token_text(k), "and")
                                       || is(token_text(k), "if"));
    bool value = k->kind == TK_NAME || k->kind == TK_STRING || k->kind == TK_INT || k->kind == TK_FLOAT;
    if (skip_op(r, "(")) {
        t->list = parse_args(r);
    } else if ((value && !ends) || is_op(r, "[") || is_op(r, "{")) {
        if (is_token(r, TK_NAME, "is"))
            jj_die(r, "tests with 'is' cannot be chained");
        t->list = new_node(r, N_CONST);
        t->list->a = parse_postfix(r, parse_primary(r, false));
    }
    return negated ? new_pair(r, N_NOT, 0, t, NULL) : t;
}

static struct node *parse_unary(struct run *r, bool with_filters)
{
    if (++r->depth > JJ_MAX_PARSE_DEPTH)
        jj_die(r, "it is nested too deeply");
    struct node *n;
    if (is_op(r, "-") || is_op(r, "+")) {
        n = new_node(r, N_UNARY);
        n->op = now(r)->p[0];
        r->at++;
        n->a = parse_unary(r, false);
    } else {
        n = parse_primary(r, false);
    }
    n = parse_postfix(r, n);
    while (with_filters) {
        if (skip_op(r, "|"))
            n = parse_filter(r, n);
        else if (skip_word(r, "is"))
            n = parse_test(r, n);
        else if (is_op(r, "("))
            n = parse_postfix(r, n);
        else
            break;
    }
    r->depth--;
    return n;
}

/* Levels of binary operators, the loosest first; all group to the left. */
static struct node *parse_binary(struct run *r, int level)
{
    static const struct { const char *word; char op; int level; } ops[] = {
        {"+", '+', 0}, {"-", '-', 0}, {"~", '~', 1}, {"*", '*', 2}, {"/", '/', 2}, {"//", 'd', 2}, {"%", '%', 2},
        {"**", '^', 3}
    };
    if (level == 4)
        return parse_unary(r, true);
    struct node *n = parse_binary(r, level + 1);
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (ops[i].level == level && skip_op(r, ops[i].word)) {
            n = new_pair(r, N_BINARY, ops[i].op, n, parse_binary(r, level + 1));
            i = SIZE_MAX;              /* look for all of them again */
        }
    return n;
}

static char comparison(struct run *r)
{
    static const char *const ops[][2] = {{"==", "="}, {"!=", "!"}, {"<", "<"}, {">", ">"}, {"<=", "l"}, {">=", "g"}};
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (skip_op(r, ops[i][0]))
            return ops[i][1][0];
    if (skip_word(r, "in"))
        return 'i';
    if (is_token(r, TK_NAME, "not") && now(r)[1].kind == TK_NAME && is(token_text(now(r) + 1), "in")) {
        r->at += 2;
        return 'n';
    }
    return 0;
}

static struct node *parse_not(struct run *r)
{
    if (skip_word(r, "not")) {
        if (++r->depth > JJ_MAX_PARSE_DEPTH)
            jj_die(r, "it is nested too deeply");
        struct node *n = new_pair(r, N_NOT, 0, parse_not(r), NULL);
        r->depth--;
        return n;
    }
    struct node *n = parse_binary(r, 0), *chain = NULL, **tail = NULL;
    for (char op; (op = comparison(r));) {
        if (!chain) {
            chain = new_pair(r, N_COMPARE, 0, n, NULL);
            tail = &chain->list;
        }
        append(&tail, new_pair(r, N_CONST, op, parse_binary(r, 0), NULL));
    }
    return chain ? chain : n;
}

static struct node *parse_and(struct run *r)
{
    struct node *n = parse_not(r);
    while (skip_word(r, "and"))
        n = new_pair(r, N_AND, 0, n, parse_not(r));
    return n;
}

static struct node *parse_or(struct run *r)
{
    struct node *n = parse_and(r);
    while (skip_word(r, "or"))
        n = new_pair(r, N_OR, 0, n, parse_and(r));
    return n;
}

static struct node *parse_expr(struct run *r)
{
    if (++r->depth > JJ_MAX_PARSE_DEPTH)
        jj_die(r, "it is nested too deeply");
    struct node *n = parse_or(r);
    while (skip_word(r, "if")) {
        struct node *cond = new_pair(r, N_COND, 0, n, n);
        cond->a = parse_or(r);
        if (skip_word(r, "else"))
            cond->c = parse_expr(r);
        n = cond;
    }
    r->depth--;
    return n;
}

/* ---- parsing statements */

static struct node *parse_body(struct run *r, const char *ends);

static struct node *parse_target_part(struct run *r)
{
    struct node *n = parse_primary(r, true);
    if (n->kind != N_NAME && n->kind != N_MEMBER && n->kind != N_TUPLE)
        jj_die(r, "only names can be assigned to");
    for (const struct node *p = n->kind == N_TUPLE ? n->list : NULL; p; p = p->next)
        if (p->kind != N_NAME && p->kind != N_TUPLE)
            jj_die(r, "only names can be assigned to");
    return n;
}

static struct node *parse_target(struct run *r) { return parse_tuple(r, parse_target_part, false); }

/* "(name, name=default, ...)" */
static struct node *parse_parameters(struct run *r)
{
    struct node *first = NULL, **tail = &first;
    bool defaults = false;
    expect_op(r, "(");
    while (!skip_op(r, ")")) {
        if (first)
            expect_op(r, ",");
        struct node *n = new_node(r, N_NAME);
        n->name = expect_name(r);
        if (skip_op(r, "="))
            n->a = parse_expr(r);
        else if (defaults)
            jj_die(r, "a parameter without a default follows one with");
        defaults = n->a != NULL;
        append(&tail, n);
    }
    return first;
}

/* The body of the tag being parsed, up to one of the words of `ends` (" a b "), which is the next token then. */
static struct node *tag_body(struct run *r, const char *ends)
{
    skip_op(r, ":");
    expect(r, TK_BLOCK_END, "the end of the tag");
    return parse_body(r, ends);
}

static struct node *last_body(struct run *r, const char *end)
{
    struct node *body = tag_body(r, end);
    r->at++;
    return body;
}

/* A body that break and continue do not reach out of. */
static struct node *closed_body(struct run *r, const char *end)
{
    int loops = r->loops;
    r->loops = 0;
    struct node *body = last_body(r, end);
    r->loops = loops;
    return body;
}

static void parse_if(struct run *r, struct node *n)
{
    n->a = parse_tuple(r, parse_or, false);
    n->body = tag_body(r, " elif else endif ");
    if (skip_word(r, "else")) {
        n->other = last_body(r, " endif ");
    } else if (!skip_word(r, "endif")) {
        if (++r->depth > JJ_MAX_PARSE_DEPTH)
            jj_die(r, "it has too many elif branches");
        n->other = new_node(r, N_IF);
        r->at++;
        parse_if(r, n->other);
        r->depth--;
    }
}

static void parse_for(struct run *r, struct node *n)
{
    n->a = parse_target(r);
    if (!skip_word(r, "in"))
        die_expected(r, "'in'");
    n->b = parse_tuple(r, parse_or, false);
    if (skip_word(r, "if"))
        n->c = parse_expr(r);
    n->op = skip_word(r, "recursive") ? 'r' : 0;
    r->loops++;
    n->body = tag_body(r, " else endfor ");
    r->loops--;
    if (skip_word(r, "else"))
        n->other = last_body(r, " endfor ");
    else
        r->at++;
}

static void parse_set(struct run *r, struct node *n)
{
    n->a = parse_target(r);
    if (skip_op(r, "=")) {
        n->b = parse_tuple(r, parse_expr, false);
        return;
    }
    n->kind = N_SET_BLOCK;
    while (skip_op(r, "|"))
        n->b = parse_filter(r, n->b);
    n->body = last_body(r, " endset ");
}

static void parse_with(struct run *r, struct node *n)
{
    struct node **tail = &n->list;
    while (now(r)->kind != TK_BLOCK_END) {
        if (n->list)
            expect_op(r, ",");
        struct node *target = parse_target_part(r);
        expect_op(r, "=");
        append(&tail, new_pair(r, N_CONST, 0, target, parse_expr(r)));
    }
    n->body = last_body(r, " endwith ");
}

static struct node *parse_statement(struct run *r)
{
    struct node *n = new_node(r, N_SCOPE);
    struct text tag = expect_name(r);
    if (is(tag, "if")) {
        n->kind = N_IF;
        parse_if(r, n);
    } else if (is(tag, "for")) {
        n->kind = N_FOR;
        parse_for(r, n);
    } else if (is(tag, "set")) {
        n->kind = N_SET;
        parse_set(r, n);
    } else if (is(tag, "macro")) {
        n->kind = N_MACRO;
        n->name = expect_name(r);
        n->list = parse_parameters(r);
        n->body = closed_body(r, " endmacro ");
    } else if (is(tag, "call")) {
        n->kind = N_CALL_BLOCK;
        if (is_op(r, "("))
            n->list = parse_parameters(r);
        n->a = parse_expr(r);
        if (n->a->kind != N_CALL)
            jj_die(r, "a {%% call %%} block needs a call");
        n->body = closed_body(r, " endcall ");
    } else if (is(tag, "filter")) {
        n->kind = N_FILTER_BLOCK;
        n->b = parse_filter(r, NULL);
        while (skip_op(r, "|"))
            n->b = parse_filter(r, n->b);
        n->body = last_body(r, " endfilter ");
    } else if (is(tag, "with")) {
        n->kind = N_WITH;
        parse_with(r, n);
    } else if (is(tag, "generation")) {
        n->body = closed_body(r, " endgeneration ");
    } else if (is(tag, "break") || is(tag, "continue")) {
        n->kind = is(tag, "break") ? N_BREAK : N_CONTINUE;
        if (r->loops == 0)
            jj_die(r, "{%% %.*s %%} stands outside of a loop", (int)tag.n, tag.p);
    } else {
        jj_die(r, "the tag {%% %.*s %%} is not supported", JJ_SHOW(tag));
    }
    return n;
}

/* Statements up to a tag that begins with one of the words of `ends`; NULL: up to the end of the template. */
static struct node *parse_body(struct run *r, const char *ends)
{
    struct node *first = NULL, **tail = &first;
    if (++r->depth > JJ_MAX_PARSE_DEPTH)
        jj_die(r, "it is nested too deeply");
    for (;;) {
        const struct token *t = now(r);
        struct node *n = new_node(r, t->kind == TK_DATA ? N_DATA : N_PRINT);
        if (t->kind == TK_END) {
            if (ends)
                jj_die(r, "the template ends before one of:%s", ends);
            break;
        }
        r->at++;
        if (t->kind == TK_DATA) {
            n->name = token_text(t);
        } else if (t->kind == TK_PRINT) {
            n->a = parse_tuple(r, parse_expr, false);
            expect(r, TK_PRINT_END, "the end of the tag");
        } else {
            if (ends && now(r)->kind == TK_NAME && jj_is_word_of(ends, token_text(now(r))))
                break;
            n = parse_statement(r);
            expect(r, TK_BLOCK_END, "the end of the tag");
        }
        append(&tail, n);
    }
    r->depth--;
    return first;
}

/* Line ends become "\n", and one at the end of the template is dropped. */
static void normalise(struct run *r)
{
    char *p = jj_alloc(r, r->n + 1, 1);
    size_t n = 0;
    for (size_t i = 0; i < r->n; i++) {
        if (r->src[i] == '\r' && i + 1 < r->n && r->src[i + 1] == '\n')
            continue;
        p[n++] = r->src[i] == '\r' ? '\n' : r->src[i];
    }
    n -= n > 0 && p[n - 1] == '\n';
    r->src = p;
    r->n = n;
}

void jj_parse(struct run *r)
{
    normalise(r);
    lex(r);
    r->root = parse_body(r, NULL);
}
