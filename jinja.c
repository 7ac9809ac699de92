/* jinja.c - the evaluator of the template language, and the interface. */
#include "jinja_internal.h"

#include <stdlib.h>

struct jinja { struct chunk *chunks; struct node *root; size_t source_bytes; };

/* ---- variables */

static void set_var(struct run *r, struct scope *scope, struct text name, struct value v)
{
    for (struct var *p = scope->vars; p; p = p->next)
        if (same(p->name, name)) {
            p->value = v;
            return;
        }
    struct var *p = jj_alloc(r, 1, sizeof *p);
    *p = (struct var){name, v, scope->vars};
    scope->vars = p;
}

static struct value get_var(struct run *r, struct text name)
{
    for (const struct scope *s = r->scope; s; s = s->parent)
        for (const struct var *p = s->vars; p; p = p->next)
            if (same(p->name, name))
                return p->value;
    const struct value *v = jj_lookup_text(r, r->own, name);
    if (!v)
        v = jj_lookup_text(r, r->data, name);
    if (v)
        return *v;
    const struct function *f = jj_find_function(jj_globals, name);
    return f ? (struct value){.type = V_FUNCTION, .function = f} : jj_undefined(r, name);
}

static void push_scope(struct run *r, struct scope *parent)
{
    r->scope = jj_alloc(r, 1, sizeof *r->scope);
    r->scope->parent = parent;
}

static struct value eval(struct run *r, const struct node *n);

static void assign(struct run *r, const struct node *target, struct value v)
{
    if (target->kind == N_NAME) {
        set_var(r, r->scope, target->name, v);
    } else if (target->kind == N_MEMBER) {
        struct value ns = get_var(r, target->a->name);
        if (ns.type != V_NAMESPACE)
            jj_die(r, "'%.*s' is %s, but only a namespace's members can be set", JJ_SHOW(target->a->name),
                   jj_type_word(ns));
        jj_dict_set(r, ns.dict, jj_string(r, target->name), v);
    } else {
        const struct list *items = jj_iterate(r, v);
        size_t i = 0;
        for (const struct node *p = target->list; p; p = p->next, i++) {
            if (i >= items->n)
                jj_die(r, "there are fewer values than names to unpack them into");
            assign(r, p, items->v[i]);
        }
        if (i < items->n)
            jj_die(r, "there are more values than names to unpack them into");
    }
}

/* ---- statements */

enum flow { NEXT, BREAK, CONTINUE };

static enum flow exec(struct run *r, const struct node *n);

/* Text that a body writes, in the present scope. */
static struct value capture(struct run *r, const struct node *body)
{
    struct builder text = {0}, *out = r->out;
    r->out = &text;
    exec(r, body);
    r->out = out;
    return jj_string(r, built(&text));
}

static struct value call_macro(struct run *r, const struct macro *m, const struct args *args,
                               const struct macro *caller)
{
    struct scope *outer = r->scope;
    size_t used = 0, used_names = 0;
    jj_enter(r);
    push_scope(r, m->scope);
    for (const struct node *p = m->node->list; p; p = p->next)      /* a default sees the parameters before its own */
        set_var(r, r->scope, p->name, jj_undefined(r, p->name));
    for (const struct node *p = m->node->list; p; p = p->next) {
        const struct value *v = NULL;
        if (used < args->positional.n)
            v = &args->positional.v[used++];
        else if ((v = jj_lookup_text(r, &args->named, p->name)))
            used_names++;
        if (v || p->a)
            set_var(r, r->scope, p->name, v ? *v : eval(r, p->a));
    }
    if (used < args->positional.n || used_names < args->named.n)
        jj_die(r, "the macro '%.*s' is called with other arguments than it takes", JJ_SHOW(m->node->name));
    if (caller)
        set_var(r, r->scope, literal("caller"), (struct value){.type = V_MACRO, .macro = (struct macro *)caller});
    struct value text = capture(r, m->node->body);
    r->scope = outer;
    jj_leave(r);
    return text;
}

/* As in jinja2, "else" runs when no iteration has come to its end: a break or continue in each counts as none. */
static enum flow run_loop(struct run *r, const struct node *n, struct value sequence, int depth)
{
    struct loop *loop = jj_alloc(r, 1, sizeof *loop);
    struct list *all = jj_iterate(r, sequence), *kept = all;
    struct scope *outer = r->scope;
    enum flow flow = NEXT;
    bool done = false;
    if (n->c) {
        kept = jj_alloc(r, 1, sizeof *kept);
        for (size_t i = 0; i < all->n; i++) {
            push_scope(r, outer);
            assign(r, n->a, all->v[i]);
            if (jj_truthy(eval(r, n->c)))
                jj_push(r, kept, all->v[i]);
        }
    }
    *loop = (struct loop){.items = kept, .depth = depth, .node = n->op == 'r' ? n : NULL};
    for (; loop->i < kept->n && flow != BREAK; loop->i++) {
        push_scope(r, outer);
        set_var(r, r->scope, literal("loop"), (struct value){.type = V_LOOP, .loop = loop});
        assign(r, n->a, kept->v[loop->i]);
        flow = exec(r, n->body);
        done = done || flow == NEXT;
    }
    flow = NEXT;
    if (!done && n->other) {
        push_scope(r, outer);
        flow = exec(r, n->other);
    }
    r->scope = outer;
    return flow;
}

static struct value call_loop(struct run *r, const struct loop *loop, const struct args *args)
{
    if (!loop->node || args->positional.n != 1)
        jj_die(r, "only a loop that is marked recursive can be called, with one sequence");
    struct builder text = {0}, *out = r->out;
    r->out = &text;
    run_loop(r, loop->node, args->positional.v[0], loop->depth + 1);
    r->out = out;
    return jj_string(r, built(&text));
}

static struct args eval_args(struct run *r, const struct node *list, const struct value *first)
{
    struct args args = {0};
    if (first)
        jj_push(r, &args.positional, *first);
    for (const struct node *p = list; p; p = p->next) {
        struct value v = eval(r, p->a);
        if (p->op == '*') {
            const struct list *more = jj_iterate(r, v);
            for (size_t i = 0; i < more->n; i++)
                jj_push(r, &args.positional, more->v[i]);
        } else if (p->op == '^') {
            if (v.type != V_DICT)
                jj_die(r, "'**' needs a dict, not %s", jj_type_word(v));
            for (size_t i = 0; i < v.dict->n; i++)
                jj_dict_set(r, &args.named, v.dict->v[i].key, v.dict->v[i].value);
        } else if (p->name.n) {
            jj_dict_set(r, &args.named, jj_string(r, p->name), v);
        } else {
            jj_push(r, &args.positional, v);
        }
    }
    return args;
}

static struct value eval_call(struct run *r, const struct node *n, const struct macro *caller)
{
    struct value f = eval(r, n->a), ignored = none();
    if (f.type == V_UNDEFINED)
        jj_die_undefined(r, f);
    const struct value *self = f.type == V_METHOD ? &f.method->self : f.type == V_FUNCTION ? &ignored : NULL;
    struct args args = eval_args(r, n->list, self);
    r->line = n->line;
    if (caller && f.type != V_MACRO)
        jj_die(r, "a {%% call %%} block calls %s, not a macro", jj_type_word(f));
    switch (f.type) {
    case V_MACRO: return call_macro(r, f.macro, &args, caller);
    case V_FUNCTION: return jj_call_function(r, f.function, &args);
    case V_LOOP: return call_loop(r, f.loop, &args);
    case V_METHOD:
        if (f.method->function)
            return jj_call_function(r, f.method->function, &args);
        jj_die(r, "this method of %s is not supported", jj_type_word(f.method->self));
    default: jj_die(r, "%s cannot be called", jj_type_word(f));
    }
}

static struct macro *new_macro(struct run *r, const struct node *n)
{
    struct macro *m = jj_alloc(r, 1, sizeof *m);
    *m = (struct macro){n, r->scope};
    return m;
}

static void exec_set_block(struct run *r, const struct node *n)
{
    struct scope *outer = r->scope;
    push_scope(r, outer);
    struct value old = r->captured, text = capture(r, n->body);
    r->scope = outer;
    if (n->b) {
        r->captured = text;
        text = eval(r, n->b);
        r->captured = old;
    }
    if (n->kind == N_SET_BLOCK)
        assign(r, n->a, text);
    else
        jj_put_text(r, r->out, jj_to_text(r, text));
}

static enum flow exec_one(struct run *r, const struct node *n)
{
    struct scope *outer = r->scope;
    enum flow flow = NEXT;
    switch (n->kind) {
    case N_DATA:
        jj_put_text(r, r->out, n->name);
        return NEXT;
    case N_PRINT:
        jj_put_text(r, r->out, jj_to_text(r, eval(r, n->a)));
        return NEXT;
    case N_IF: return exec(r, jj_truthy(eval(r, n->a)) ? n->body : n->other);
    case N_FOR: return run_loop(r, n, eval(r, n->b), 0);
    case N_SET:
        assign(r, n->a, eval(r, n->b));
        return NEXT;
    case N_SET_BLOCK: case N_FILTER_BLOCK:
        exec_set_block(r, n);
        return NEXT;
    case N_MACRO:
        set_var(r, r->scope, n->name, (struct value){.type = V_MACRO, .macro = new_macro(r, n)});
        return NEXT;
    case N_CALL_BLOCK:
        jj_put_text(r, r->out, jj_to_text(r, eval_call(r, n->a, new_macro(r, n))));
        return NEXT;
    case N_WITH: case N_SCOPE: {
        push_scope(r, outer);
        struct scope *inner = r->scope;
        for (const struct node *p = n->list; p; p = p->next) {
            r->scope = outer;          /* values are those from outside */
            struct value v = eval(r, p->b);
            r->scope = inner;
            assign(r, p->a, v);
        }
        r->scope = inner;
        flow = exec(r, n->body);
        r->scope = outer;
        return flow;
    }
    case N_BREAK: return BREAK;
    case N_CONTINUE: return CONTINUE;
    default: return NEXT;
    }
}

static enum flow exec(struct run *r, const struct node *n)
{
    jj_enter(r);
    enum flow flow = NEXT;
    for (; n && flow == NEXT; n = n->next) {
        jj_spend(r, 1);
        r->line = n->line;
        flow = exec_one(r, n);
    }
    jj_leave(r);
    return flow;
}

/* ---- expressions */

static struct value eval_list(struct run *r, const struct node *n)
{
    if (n->kind == N_DICT) {
        struct value out = jj_new_dict(r, V_DICT);
        for (const struct node *p = n->list; p; p = p->next->next) {
            struct value key = eval(r, p), v = eval(r, p->next);
            jj_need_key(r, key);
            jj_dict_set(r, out.dict, key, v);
        }
        return out;
    }
    struct value out = jj_new_list(r, n->kind == N_TUPLE ? V_TUPLE : V_LIST);
    for (const struct node *p = n->list; p; p = p->next)
        jj_push(r, out.list, eval(r, p));
    return out;
}

static struct value eval_comparison(struct run *r, const struct node *n)
{
    struct value left = eval(r, n->a);
    for (const struct node *p = n->list; p; p = p->next) {
        struct value right = eval(r, p->a);
        if (!jj_compare(r, p->op, left, right))
            return boolean(false);
        left = right;
    }
    return boolean(true);
}

static struct value eval_unary(struct run *r, const struct node *n)
{
    struct value v = eval(r, n->a);
    if (v.type == V_UNDEFINED)
        jj_die_undefined(r, v);
    if (!is_number(v))
        jj_die(r, "%s has no sign", jj_type_word(v));
    if (v.type == V_FLOAT)
        return real(n->op == '-' ? -v.real : v.real, v.trusted);
    return jj_int_arith(r, n->op, 0, whole(v), v.trusted);
}

static struct value eval_item(struct run *r, const struct node *n)
{
    struct value obj = eval(r, n->a);
    if (n->b->kind != N_SLICE)
        return jj_get_item(r, obj, eval(r, n->b));
    struct value bound[3];
    const struct node *at[3] = {n->b->a, n->b->b, n->b->c};
    for (int i = 0; i < 3; i++)
        bound[i] = at[i] ? eval(r, at[i]) : none();
    return jj_get_slice(r, obj, bound[0], bound[1], bound[2]);
}

static struct value eval_filter(struct run *r, const struct node *n)
{
    struct value v = n->a ? eval(r, n->a) : r->captured;
    struct args args = eval_args(r, n->list, &v);
    r->line = n->line;
    if (n->kind == N_FILTER)
        return jj_call_filter(r, n->name, &args);
    if (args.named.n)
        jj_die(r, "a test's arguments cannot be named");
    struct list rest = {.v = args.positional.v + 1, .n = args.positional.n - 1};
    return boolean(jj_run_test(r, n->name, v, &rest));
}

static struct value eval_node(struct run *r, const struct node *n)
{
    struct value v;
    switch (n->kind) {
    case N_CONST: return n->value;
    case N_NAME: return get_var(r, n->name);
    case N_TUPLE: case N_LIST: case N_DICT: return eval_list(r, n);
    case N_UNARY: return eval_unary(r, n);
    case N_BINARY:
        v = eval(r, n->a);
        return jj_binary(r, n->op, v, eval(r, n->b));
    case N_AND:
        v = eval(r, n->a);
        return jj_truthy(v) ? eval(r, n->b) : v;
    case N_OR:
        v = eval(r, n->a);
        return jj_truthy(v) ? v : eval(r, n->b);
    case N_NOT: return boolean(!jj_truthy(eval(r, n->a)));
    case N_COMPARE: return eval_comparison(r, n);
    case N_COND:
        if (jj_truthy(eval(r, n->a)))
            return eval(r, n->b);
        return n->c ? eval(r, n->c) : jj_undefined(r, literal("an if without else"));
    case N_ATTR: return jj_get_attr(r, eval(r, n->a), n->name);
    case N_ITEM: return eval_item(r, n);
    case N_CALL: return eval_call(r, n, NULL);
    case N_FILTER: case N_TEST: return eval_filter(r, n);
    default: jj_die(r, "an expression is expected");
    }
}

static struct value eval(struct run *r, const struct node *n)
{
    jj_enter(r);
    r->line = n->line;
    struct value v = eval_node(r, n);
    jj_leave(r);
    return v;
}

/* ---- the interface */

bool jinja_parse(struct jinja **out, const char *source, size_t n, struct error *e)
{
    struct run r = {.e = e, .line = 1, .src = source, .n = n, .limit = JINJA_MEMORY + (size_t)JINJA_MEMORY_PER_BYTE * n,
                    .max_steps = JINJA_STEPS + (uint64_t)JINJA_STEPS_PER_BYTE * n};
    struct jinja *t = alloc_zeroed(1, sizeof *t, "a chat template", e);
    *out = NULL;
    if (!t)
        return false;
    if (!jj_guarded(&r, jj_parse)) {
        jj_free_chunks(r.chunks);
        free(t);
        return false;
    }
    *t = (struct jinja){r.chunks, r.root, n};
    *out = t;
    return true;
}

void jinja_free(struct jinja *t)
{
    if (!t)
        return;
    jj_free_chunks(t->chunks);
    free(t);
}

static bool is_role(struct text key, struct text value)
{
    return is(key, "role") && jj_is_word_of(" system developer user assistant tool function ipython ", value);
}

/* Text points into the JSON values, which outlive the rendering. */
static struct value from_json(struct run *r, const json_t *j, struct text key, bool trusted)
{
    jj_enter(r);
    struct value v = none();
    struct text t;
    size_t i;
    const char *name;
    json_t *item;
    switch (json_typeof(j)) {
    case JSON_NULL: break;
    case JSON_TRUE: case JSON_FALSE: v = boolean(json_is_true(j)); break;
    case JSON_INTEGER: v = integer(json_integer_value(j), trusted); break;
    case JSON_REAL: v = real(json_real_value(j), trusted); break;
    case JSON_STRING:
        t = text_of(json_string_value(j), json_string_length(j), trusted);
        t.trusted = trusted || is_role(key, t);
        v = jj_string(r, t);
        break;
    case JSON_ARRAY:
        v = jj_new_list(r, V_LIST);
        json_array_foreach((json_t *)j, i, item)
            jj_push(r, v.list, from_json(r, item, literal(""), trusted));
        break;
    case JSON_OBJECT:
        v = jj_new_dict(r, V_DICT);
        json_object_foreach((json_t *)j, name, item) {
            struct text k = text_of(name, strlen(name), trusted);
            jj_dict_append(r, v.dict, jj_string(r, k), from_json(r, item, k, trusted));
        }
        break;
    }
    v.trusted = trusted;
    jj_leave(r);
    return v;
}

static void render(struct run *r)
{
    struct value empty = jj_new_dict(r, V_DICT), data = empty, own = empty;
    if (r->json_data)
        data = from_json(r, r->json_data, literal(""), false);
    if (r->json_own)
        own = from_json(r, r->json_own, literal(""), true);
    if (data.type != V_DICT || own.type != V_DICT)
        jj_die(r, "its variables are not a JSON object");
    r->data = data.dict;
    r->own = own.dict;
    r->steps = 0;
    push_scope(r, NULL);
    exec(r, r->root);
}

static bool copy_result(struct jinja_result *out, const struct text t)
{
    size_t n = 0;
    for (size_t i = 0; i < t.n; i++)
        n += i == 0 || trust_at(t, i) != trust_at(t, i - 1);
    if (n == 0)
        return true;
    out->spans = calloc(n, sizeof *out->spans);
    if (!out->spans || !bytes_add(&out->text, t.p, t.n))
        return false;
    for (size_t i = 0; i < t.n; i++) {
        if (i == 0 || trust_at(t, i) != trust_at(t, i - 1))
            out->spans[out->n_spans++] = (struct span){out->text.data + i, 0, trust_at(t, i)};
        out->spans[out->n_spans - 1].len++;
    }
    return true;
}

/* Bytes of all strings and keys, and some for each value. */
static size_t json_bytes(const json_t *j, int depth)
{
    size_t n = 64, i;
    const char *name;
    json_t *item;
    if (depth > JJ_MAX_DEPTH)
        return n;
    if (json_is_string(j))
        n += json_string_length(j);
    json_array_foreach((json_t *)j, i, item)
        n += json_bytes(item, depth + 1);
    json_object_foreach((json_t *)j, name, item)
        n += strlen(name) + json_bytes(item, depth + 1);
    return n;
}

bool jinja_render(const struct jinja *t, const json_t *data, const json_t *own, time_t now, struct jinja_result *out,
                  struct error *e)
{
    struct builder text = {0};
    size_t input = t->source_bytes + (data ? json_bytes(data, 0) : 0) + (own ? json_bytes(own, 0) : 0);
    struct run r = {.e = e, .line = 1, .root = t->root, .json_data = data, .json_own = own, .now = now, .out = &text,
                    .limit = JINJA_MEMORY + (size_t)JINJA_MEMORY_PER_BYTE * input,
                    .max_steps = JINJA_STEPS + (uint64_t)JINJA_STEPS_PER_BYTE * input};
    *out = (struct jinja_result){0};
    bool ok = jj_guarded(&r, render);
    if (ok && !copy_result(out, built(&text))) {
        jinja_result_free(out);
        ok = fail(e, GEN_RUN, "cannot allocate the rendered chat template of %zu bytes", text.n);
    }
    jj_free_chunks(r.chunks);
    return ok;
}

void jinja_result_free(struct jinja_result *result)
{
    bytes_free(&result->text);
    free(result->spans);
    *result = (struct jinja_result){0};
}
