/* jinja_library.c - attributes and items, filters, tests, methods and functions of templates. */
#include "jinja_internal.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <utf8proc.h>

enum { MAX_ARGS = 8, MAX_RANGE = 100000 };

/* ---- functions on text, used as filters and as methods. A filter's subject may be any value: its str() is taken. */

static struct text subject(struct run *r, struct value *a) { return jj_to_text(r, a[0]); }

static struct text need_text(struct run *r, struct value v, const char *what)
{
    if (v.type != V_TEXT)
        jj_die(r, "%s must be a string, not %s", what, jj_type_word(v));
    return *v.text;
}

static int64_t need_int(struct run *r, struct value v, int64_t absent)
{
    if (v.type == V_ABSENT || v.type == V_NONE)
        return absent;
    if (!is_whole(v))
        jj_die(r, "an integer is needed, not %s", jj_type_word(v));
    return whole(v);
}

enum casing { LOWER, UPPER, CAPITALIZE, TITLE, TITLE_FILTER };

static bool is_cased(int32_t c)
{
    utf8proc_category_t k = utf8proc_category(c);
    return k == UTF8PROC_CATEGORY_LU || k == UTF8PROC_CATEGORY_LL || k == UTF8PROC_CATEGORY_LT;
}

/* Simple case mappings, one character to one, and the German sharp s, whose capitals are two. */
static struct value change_case(struct run *r, struct text t, enum casing how)
{
    struct builder out = {0};
    bool start = true, capitals = how == UPPER || how == TITLE_FILTER;
    for (size_t i = 0, len; i < t.n; i += len) {
        int32_t c = jj_code_point(t, i);
        bool upper = how == UPPER || (how != LOWER && start), trusted = trust_at(t, i);
        len = jj_char_len(t, i);
        if (c < 0)
            jj_put_text(r, &out, sub(t, i, i + len));
        else if (c == 0xdf && upper)
            jj_put(r, &out, capitals ? "SS" : "Ss", 2, trusted);
        else
            jj_put_code_point(r, &out, !upper      ? utf8proc_tolower(c)
                                       : capitals ? utf8proc_toupper(c)
                                                  : utf8proc_totitle(c), trusted);
        if (how == TITLE)
            start = !is_cased(c);
        else
            start = how == TITLE_FILTER && (jj_is_space(c) || (c > 0 && c < 128 && strchr("-({[<", c)));
    }
    return jj_string(r, built(&out));
}

static struct value f_lower(struct run *r, struct value *a) { return change_case(r, subject(r, a), LOWER); }
static struct value f_upper(struct run *r, struct value *a) { return change_case(r, subject(r, a), UPPER); }
static struct value f_capitalize(struct run *r, struct value *a) { return change_case(r, subject(r, a), CAPITALIZE); }
static struct value f_title(struct run *r, struct value *a) { return change_case(r, subject(r, a), TITLE_FILTER); }
static struct value m_title(struct run *r, struct value *a) { return change_case(r, subject(r, a), TITLE); }
static struct value f_string(struct run *r, struct value *a) { return jj_string(r, subject(r, a)); }

static struct value strip_side(struct run *r, struct value *a, bool left, bool right)
{
    struct text chars, *set = NULL;
    if (a[1].type != V_ABSENT && a[1].type != V_NONE) {
        chars = need_text(r, a[1], "what is stripped");
        set = &chars;
    }
    return jj_string(r, jj_strip(r, subject(r, a), set, left, right));
}

static struct value f_trim(struct run *r, struct value *a) { return strip_side(r, a, true, true); }
static struct value m_lstrip(struct run *r, struct value *a) { return strip_side(r, a, true, false); }
static struct value m_rstrip(struct run *r, struct value *a) { return strip_side(r, a, false, true); }

static struct value replace(struct run *r, struct text t, struct text old, struct text new, int64_t left)
{
    struct builder out = {0};
    size_t i = 0;
    for (size_t at; left != 0 && (at = jj_find(r, t, i, old)) != SIZE_MAX; left--) {
        if (old.n == 0) {              /* between all characters */
            jj_put_text(r, &out, new);
            if (i == t.n)
                break;
            at = i + jj_char_len(t, i);
            jj_put_text(r, &out, sub(t, i, at));
            i = at;
            continue;
        }
        jj_put_text(r, &out, sub(t, i, at));
        jj_put_text(r, &out, new);
        i = at + old.n;
    }
    jj_put_text(r, &out, sub(t, i, t.n));
    return jj_string(r, built(&out));
}

static struct value f_replace(struct run *r, struct value *a)
{
    return replace(r, subject(r, a), jj_to_text(r, a[1]), jj_to_text(r, a[2]), need_int(r, a[3], -1));
}

static struct value m_replace(struct run *r, struct value *a)
{
    struct text old = need_text(r, a[1], "what is replaced"), new = need_text(r, a[2], "what replaces it");
    return replace(r, subject(r, a), old, new, need_int(r, a[3], -1));
}

/* Splits at white space, as str.split() does without a separator; after `limit` splits the rest stays as it is. */
static void split_words(struct run *r, struct list *out, struct text t, int64_t limit, bool from_right)
{
    for (;; limit--) {
        t = jj_strip(r, t, NULL, !from_right, from_right);
        if (t.n == 0)
            return;
        size_t cut = from_right ? 0 : t.n;
        for (size_t i = 0; limit != 0 && i < t.n; i += jj_char_len(t, i))
            if (jj_is_space(jj_code_point(t, i))) {
                cut = from_right ? i + jj_char_len(t, i) : i;
                if (!from_right)
                    break;
            }
        jj_spend(r, t.n / 4);
        jj_push(r, out, jj_string(r, from_right ? sub(t, cut, t.n) : sub(t, 0, cut)));
        t = from_right ? sub(t, 0, cut) : sub(t, cut, t.n);
    }
}

static size_t find_last(struct run *r, struct text t, struct text what)
{
    if (what.n == 0)
        return t.n;
    jj_spend(r, t.n / 16);
    for (size_t end = t.n; end >= what.n; end--) {
        if (t.p[end - 1] != what.p[what.n - 1] || t.p[end - what.n] != what.p[0])
            continue;
        jj_spend(r, 1 + what.n / 16);
        if (memcmp(t.p + end - what.n, what.p, what.n) == 0)
            return end - what.n;
    }
    return SIZE_MAX;
}

static struct value split(struct run *r, struct value *a, bool from_right)
{
    struct text t = subject(r, a);
    struct value out = jj_new_list(r, V_LIST);
    int64_t limit = need_int(r, a[2], -1);
    if (a[1].type == V_ABSENT || a[1].type == V_NONE) {
        split_words(r, out.list, t, limit, from_right);
    } else {
        struct text by = need_text(r, a[1], "the separator");
        if (by.n == 0)
            jj_die(r, "the separator is empty");
        for (size_t at; limit != 0 && t.n >= by.n; limit--) {
            at = from_right ? find_last(r, t, by) : jj_find(r, t, 0, by);
            if (at == SIZE_MAX)
                break;
            jj_push(r, out.list, jj_string(r, from_right ? sub(t, at + by.n, t.n) : sub(t, 0, at)));
            t = from_right ? sub(t, 0, at) : sub(t, at + by.n, t.n);
        }
        jj_push(r, out.list, jj_string(r, t));
    }
    for (size_t i = 0, n = out.list->n; from_right && i < n / 2; i++) {
        struct value v = out.list->v[i];
        out.list->v[i] = out.list->v[n - 1 - i];
        out.list->v[n - 1 - i] = v;
    }
    return out;
}

static struct value m_split(struct run *r, struct value *a) { return split(r, a, false); }
static struct value m_rsplit(struct run *r, struct value *a) { return split(r, a, true); }

static struct value split_lines(struct run *r, struct text t, bool keep_ends)
{
    struct value out = jj_new_list(r, V_LIST);
    size_t start = 0;
    jj_spend(r, t.n / 4);
    for (size_t i = 0, len; i < t.n; i += len) {
        int32_t c = jj_code_point(t, i);
        len = jj_char_len(t, i);
        if (!((c >= 10 && c <= 13) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 || c == 0x2029))
            continue;
        size_t end = i;
        len += c == '\r' && i + 1 < t.n && t.p[i + 1] == '\n';
        jj_push(r, out.list, jj_string(r, sub(t, start, keep_ends ? i + len : end)));
        start = i + len;
    }
    if (start < t.n)
        jj_push(r, out.list, jj_string(r, sub(t, start, t.n)));
    return out;
}

static struct value m_splitlines(struct run *r, struct value *a)
{
    return split_lines(r, subject(r, a), jj_truthy(a[1]));
}

static struct value has_end(struct run *r, struct value *a, bool at_start)
{
    struct text t = subject(r, a);
    struct list one = {.v = &a[1], .n = 1}, *all = a[1].type == V_TUPLE ? a[1].list : &one;
    for (size_t i = 0; i < all->n; i++) {
        struct text end = need_text(r, all->v[i], "the prefix or suffix");
        jj_spend(r, 1 + end.n / 16);
        if (end.n <= t.n && same(end, at_start ? sub(t, 0, end.n) : sub(t, t.n - end.n, t.n)))
            return boolean(true);
    }
    return boolean(false);
}

static struct value m_startswith(struct run *r, struct value *a) { return has_end(r, a, true); }
static struct value m_endswith(struct run *r, struct value *a) { return has_end(r, a, false); }

static struct value m_removeprefix(struct run *r, struct value *a)
{
    struct text t = subject(r, a), what = need_text(r, a[1], "the prefix");
    return jj_string(r, jj_truthy(has_end(r, a, true)) ? sub(t, what.n, t.n) : t);
}

static struct value m_removesuffix(struct run *r, struct value *a)
{
    struct text t = subject(r, a), what = need_text(r, a[1], "the suffix");
    return jj_string(r, jj_truthy(has_end(r, a, false)) ? sub(t, 0, t.n - what.n) : t);
}

static int64_t position(struct run *r, struct value *a, bool last)
{
    struct text t = subject(r, a), what = need_text(r, a[1], "what is looked for");
    size_t at = last ? find_last(r, t, what) : jj_find(r, t, 0, what);
    return at == SIZE_MAX ? -1 : (int64_t)jj_count_chars(r, sub(t, 0, at));
}

static struct value m_find(struct run *r, struct value *a) { return integer(position(r, a, false), true); }
static struct value m_rfind(struct run *r, struct value *a) { return integer(position(r, a, true), true); }

static struct value m_index(struct run *r, struct value *a)
{
    int64_t at = position(r, a, false);
    if (at < 0)
        jj_die(r, "index: the string is not found");
    return integer(at, true);
}

static struct value m_count(struct run *r, struct value *a)
{
    struct text t = subject(r, a), what = need_text(r, a[1], "what is counted");
    if (what.n == 0)
        return integer((int64_t)jj_count_chars(r, t) + 1, true);
    int64_t n = 0;
    for (size_t i = 0; (i = jj_find(r, t, i, what)) != SIZE_MAX; i += what.n)
        n++;
    return integer(n, true);
}

static struct value join(struct run *r, struct text by, const struct list *items, bool only_text)
{
    struct builder out = {0};
    for (size_t i = 0; i < items->n; i++) {
        if (i)
            jj_put_text(r, &out, by);
        jj_put_text(r, &out, only_text ? need_text(r, items->v[i], "each item to join") : jj_to_text(r, items->v[i]));
        jj_spend(r, 1);
    }
    return jj_string(r, built(&out));
}

static struct value m_join(struct run *r, struct value *a) { return join(r, subject(r, a), jj_iterate(r, a[1]), true); }

/* True when there are characters and all are as `class` says: a alpha, d digit, n alpha or number, s space; l and u:
 * all cased ones are lower or upper, and there is one. */
static struct value all_are(struct run *r, struct value *a, char class)
{
    struct text t = subject(r, a);
    bool cased = false;
    for (size_t i = 0; i < t.n; i += jj_char_len(t, i)) {
        int32_t c = jj_code_point(t, i);
        utf8proc_category_t k = utf8proc_category(c);
        bool alpha = k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO, digit = k == UTF8PROC_CATEGORY_ND;
        bool numeric = k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO;
        bool ok = class == 'a' ? alpha : class == 'd' ? digit : class == 'n' ? alpha || numeric : jj_is_space(c);
        if (class == 'l' || class == 'u') {
            ok = !is_cased(c) || k == (class == 'l' ? UTF8PROC_CATEGORY_LL : UTF8PROC_CATEGORY_LU);
            cased = cased || is_cased(c);
        }
        if (!ok)
            return boolean(false);
    }
    jj_spend(r, t.n / 4);
    return boolean(class == 'l' || class == 'u' ? cased : t.n > 0);
}

static struct value m_isalpha(struct run *r, struct value *a) { return all_are(r, a, 'a'); }
static struct value m_isdigit(struct run *r, struct value *a) { return all_are(r, a, 'd'); }
static struct value m_isalnum(struct run *r, struct value *a) { return all_are(r, a, 'n'); }
static struct value m_isspace(struct run *r, struct value *a) { return all_are(r, a, 's'); }
static struct value m_islower(struct run *r, struct value *a) { return all_are(r, a, 'l'); }
static struct value m_isupper(struct run *r, struct value *a) { return all_are(r, a, 'u'); }

static const struct function text_methods[] = {
    {"lower", "", f_lower}, {"upper", "", f_upper}, {"capitalize", "", f_capitalize}, {"title", "", m_title},
    {"strip", "chars?", f_trim}, {"lstrip", "chars?", m_lstrip}, {"rstrip", "chars?", m_rstrip},
    {"replace", "old new count?", m_replace}, {"split", "sep? maxsplit?", m_split},
    {"rsplit", "sep? maxsplit?", m_rsplit}, {"splitlines", "keepends?", m_splitlines},
    {"startswith", "prefix", m_startswith}, {"endswith", "suffix", m_endswith},
    {"removeprefix", "prefix", m_removeprefix}, {"removesuffix", "suffix", m_removesuffix}, {"find", "sub", m_find},
    {"rfind", "sub", m_rfind}, {"index", "sub", m_index}, {"count", "sub", m_count}, {"join", "iterable", m_join},
    {"isalpha", "", m_isalpha}, {"isdigit", "", m_isdigit}, {"isalnum", "", m_isalnum}, {"isspace", "", m_isspace},
    {"islower", "", m_islower}, {"isupper", "", m_isupper},
    {NULL, NULL, NULL}
};

/* ---- methods of dicts, lists and loops */

static struct value dict_view(struct run *r, const struct dict *d, bool keys, bool values)
{
    struct value out = jj_new_list(r, V_STREAM);
    for (size_t i = 0; i < d->n; i++) {
        struct value item = keys ? d->v[i].key : d->v[i].value;
        if (keys && values) {
            item = jj_new_list(r, V_TUPLE);
            jj_push(r, item.list, d->v[i].key);
            jj_push(r, item.list, d->v[i].value);
        }
        jj_push(r, out.list, item);
    }
    return out;
}

static struct value m_items(struct run *r, struct value *a) { return dict_view(r, a[0].dict, true, true); }
static struct value m_keys(struct run *r, struct value *a) { return dict_view(r, a[0].dict, true, false); }
static struct value m_values(struct run *r, struct value *a) { return dict_view(r, a[0].dict, false, true); }

static struct value m_get(struct run *r, struct value *a)
{
    jj_need_key(r, a[1]);
    const struct value *v = jj_lookup(r, a[0].dict, a[1]);
    return v ? *v : a[2].type == V_ABSENT ? none() : a[2];
}

static struct value m_copy(struct run *r, struct value *a)
{
    struct value out = jj_new_dict(r, V_DICT);
    for (size_t i = 0; i < a[0].dict->n; i++)
        jj_dict_append(r, out.dict, a[0].dict->v[i].key, a[0].dict->v[i].value);
    return out;
}

static struct value m_list_count(struct run *r, struct value *a)
{
    int64_t n = 0;
    for (size_t i = 0; i < a[0].list->n; i++)
        n += jj_equal(r, a[0].list->v[i], a[1]);
    return integer(n, true);
}

static struct value m_list_index(struct run *r, struct value *a)
{
    for (size_t i = 0; i < a[0].list->n; i++)
        if (jj_equal(r, a[0].list->v[i], a[1]))
            return integer((int64_t)i, true);
    jj_die(r, "index: the item is not in the list");
}

static const struct function list_methods[] = {
    {"count", "value", m_list_count}, {"index", "value", m_list_index}, {NULL, NULL, NULL}
};

static const struct function dict_methods[] = {
    {"items", "", m_items}, {"keys", "", m_keys}, {"values", "", m_values}, {"get", "key default?", m_get},
    {"copy", "", m_copy}, {NULL, NULL, NULL}
};

static struct value f_cycle(struct run *r, struct value *a)
{
    if (a[1].list->n == 0)
        jj_die(r, "cycle has nothing to choose from");
    return a[1].list->v[a[0].loop->i % a[1].list->n];
}

static struct value f_changed(struct run *r, struct value *a)
{
    struct loop *l = a[0].loop;
    bool changed = l->seen.type == V_ABSENT || !jj_equal(r, l->seen, a[1]);
    l->seen = a[1];
    return boolean(changed);
}

/* ---- attributes, items, slices */

const struct function *jj_find_function(const struct function *table, struct text name)
{
    for (; table->name; table++)
        if (is(name, table->name))
            return table;
    return NULL;
}

/* The bound method of that name, if Python's type has one that the sandbox allows; *known: if it has one at all. */
static struct value get_method(struct run *r, struct value self, struct text name, bool *known)
{
    static const char text_others[] =
        " casefold center encode expandtabs format format_map isascii isdecimal isidentifier isnumeric isprintable"
        " istitle ljust maketrans partition rjust rpartition swapcase translate zfill ";
    const struct function *f = NULL;
    bool allowed = false;
    *known = false;
    if (self.type == V_TEXT) {
        f = jj_find_function(text_methods, name);
        allowed = f || jj_is_word_of(text_others, name);
    } else if (self.type == V_DICT) {
        f = jj_find_function(dict_methods, name);
        allowed = f || is(name, "fromkeys");
        *known = jj_is_word_of(" clear pop popitem setdefault update ", name);
    } else if (self.type == V_LIST || self.type == V_TUPLE) {
        f = jj_find_function(list_methods, name);
        allowed = f;
        *known = jj_is_word_of(" append clear copy extend insert pop remove reverse sort ", name);
    }
    bool special = name.n > 4 && memcmp(name.p, "__", 2) == 0 && memcmp(name.p + name.n - 2, "__", 2) == 0;
    *known = *known || allowed || special;
    if (!allowed)
        return jj_undefined(r, name);
    struct method *m = jj_alloc(r, 1, sizeof *m);
    *m = (struct method){self, f};
    return (struct value){.type = V_METHOD, .method = m};
}

static struct value loop_attr(struct run *r, const struct loop *l, struct text name)
{
    int64_t i = (int64_t)l->i, n = (int64_t)l->items->n;
    if (is(name, "index")) return integer(i + 1, true);
    if (is(name, "index0")) return integer(i, true);
    if (is(name, "revindex")) return integer(n - i, true);
    if (is(name, "revindex0")) return integer(n - i - 1, true);
    if (is(name, "length")) return integer(n, true);
    if (is(name, "depth")) return integer(l->depth + 1, true);
    if (is(name, "depth0")) return integer(l->depth, true);
    if (is(name, "first")) return boolean(i == 0);
    if (is(name, "last")) return boolean(i == n - 1);
    if (is(name, "previtem") && i > 0) return l->items->v[i - 1];
    if (is(name, "nextitem") && i < n - 1) return l->items->v[i + 1];
    return jj_undefined(r, name);
}

/* obj.name: what Python's type has comes before a key of the dict. */
struct value jj_get_attr(struct run *r, struct value obj, struct text name)
{
    static const struct function cycle = {"cycle", "*", f_cycle}, changed = {"changed", "*", f_changed};
    if (obj.type == V_UNDEFINED)
        jj_die_undefined(r, obj);
    if (obj.type == V_LOOP) {
        const struct function *f = is(name, "cycle") ? &cycle : is(name, "changed") ? &changed : NULL;
        if (!f)
            return loop_attr(r, obj.loop, name);
        struct method *m = jj_alloc(r, 1, sizeof *m);
        *m = (struct method){obj, f};
        return (struct value){.type = V_METHOD, .method = m};
    }
    bool known;
    struct value method = get_method(r, obj, name, &known);
    if (known || (obj.type != V_DICT && obj.type != V_NAMESPACE))
        return method;
    const struct value *v = jj_lookup_text(r, obj.dict, name);
    return v ? *v : jj_undefined(r, name);
}

/* obj[key]: a key of the dict comes before what Python's type has. */
struct value jj_get_item(struct run *r, struct value obj, struct value key)
{
    if (obj.type == V_UNDEFINED)
        jj_die_undefined(r, obj);
    if (obj.type == V_DICT) {
        const struct value *v = jj_lookup(r, obj.dict, key);
        if (v)
            return *v;
    }
    if (is_whole(key) && (obj.type == V_LIST || obj.type == V_TUPLE || obj.type == V_TEXT)) {
        int64_t n = (int64_t)(obj.type == V_TEXT ? jj_count_chars(r, *obj.text) : obj.list->n), i = whole(key);
        i += i < 0 ? n : 0;
        if (i < 0 || i >= n)
            return jj_undefined(r, literal("an index out of range"));
        if (obj.type != V_TEXT)
            return obj.list->v[i];
        size_t at = 0;
        while (i-- > 0)
            at += jj_char_len(*obj.text, at);
        return jj_string(r, sub(*obj.text, at, at + jj_char_len(*obj.text, at)));
    }
    if (key.type != V_TEXT)
        return jj_undefined(r, literal("an item"));
    bool known;
    return obj.type == V_LOOP || obj.type == V_NAMESPACE ? jj_get_attr(r, obj, *key.text)
                                                         : get_method(r, obj, *key.text, &known);
}

/* A bound of a slice, moved into 0..n (or -1..n-1 when the step is negative) as Python does. */
static int64_t slice_bound(struct run *r, struct value v, int64_t n, int64_t step, int64_t absent)
{
    if (v.type == V_NONE || v.type == V_ABSENT)
        return absent;
    if (v.type == V_UNDEFINED)
        jj_die_undefined(r, v);
    if (!is_whole(v))
        jj_die(r, "a slice needs integers, not %s", jj_type_word(v));
    int64_t i = whole(v), low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    i = i < 0 ? (i < -n ? low : i + n) : i;
    return i < low ? low : i > high ? high : i;
}

struct value jj_get_slice(struct run *r, struct value obj, struct value from, struct value to, struct value by)
{
    if (obj.type == V_UNDEFINED)
        jj_die_undefined(r, obj);
    if (obj.type != V_TEXT && obj.type != V_LIST && obj.type != V_TUPLE)
        jj_die(r, "%s has no slices", jj_type_word(obj));
    bool is_text = obj.type == V_TEXT;
    int64_t n = (int64_t)(is_text ? jj_count_chars(r, *obj.text) : obj.list->n);
    int64_t step = by.type == V_NONE || by.type == V_ABSENT ? 1 : slice_bound(r, by, INT64_MAX - 1, 1, 1);
    if (is_whole(by) && whole(by) < 0)
        step = whole(by) < -n ? -n - 1 : whole(by);
    if (step == 0)
        jj_die(r, "a slice cannot have a step of 0");
    int64_t i = slice_bound(r, from, n, step, step < 0 ? n - 1 : 0);
    int64_t end = slice_bound(r, to, n, step, step < 0 ? -1 : n);
    jj_spend(r, (size_t)n / 4);
    if (is_text && step == 1) {
        size_t at = 0, from_byte = 0;
        int64_t k = 0;
        for (; k < end && at < obj.text->n; k++, at += jj_char_len(*obj.text, at))
            if (k == i)
                from_byte = at;
        return jj_string(r, i < end ? sub(*obj.text, from_byte, at) : literal(""));
    }
    size_t *start = is_text ? jj_alloc(r, (size_t)n + 1, sizeof *start) : NULL;
    for (int64_t k = 0; is_text && k < n; k++)
        start[k + 1] = start[k] + jj_char_len(*obj.text, start[k]);
    struct builder out = {0};
    struct value items = jj_new_list(r, obj.type);
    for (; step > 0 ? i < end : i > end; i += step) {
        jj_spend(r, 1);
        if (is_text)
            jj_put_text(r, &out, sub(*obj.text, start[i], start[i + 1]));
        else
            jj_push(r, items.list, obj.list->v[i]);
        if (step > n)
            break;
    }
    return is_text ? jj_string(r, built(&out)) : items;
}

/* ---- filters */

static struct value f_default(struct run *r, struct value *a)
{
    bool missing = a[0].type == V_UNDEFINED || (jj_truthy(a[2]) && !jj_truthy(a[0]));
    return !missing ? a[0] : a[1].type == V_ABSENT ? jj_string(r, literal("")) : a[1];
}

static struct value f_length(struct run *r, struct value *a)
{
    switch (a[0].type) {
    case V_UNDEFINED: return integer(0, true);
    case V_TEXT: return integer((int64_t)jj_count_chars(r, *a[0].text), true);
    case V_DICT: return integer((int64_t)a[0].dict->n, true);
    case V_LOOP: return integer((int64_t)a[0].loop->items->n, true);
    case V_LIST: case V_TUPLE: return integer((int64_t)a[0].list->n, true);
    case V_STREAM:
        if (!a[0].list->once)
            return integer((int64_t)a[0].list->n, true);
        /* fall through */
    default: jj_die(r, "%s has no length", jj_type_word(a[0]));
    }
}

static struct value f_first(struct run *r, struct value *a)
{
    const struct list *items = jj_iterate(r, a[0]);
    return items->n ? items->v[0] : jj_undefined(r, literal("the first item of nothing"));
}

static struct value f_last(struct run *r, struct value *a)
{
    if (a[0].type == V_STREAM && a[0].list->once)
        jj_die(r, "a generator has no last item");
    const struct list *items = jj_iterate(r, a[0]);
    return items->n ? items->v[items->n - 1] : jj_undefined(r, literal("the last item of nothing"));
}

static struct value f_list(struct run *r, struct value *a)
{
    struct value out = jj_new_list(r, V_LIST);
    const struct list *items = jj_iterate(r, a[0]);
    for (size_t i = 0; i < items->n; i++)
        jj_push(r, out.list, items->v[i]);
    return out;
}

static struct value f_reverse(struct run *r, struct value *a)
{
    const struct list *items = jj_iterate(r, a[0]);
    if (a[0].type == V_TEXT) {
        struct builder out = {0};
        for (size_t i = items->n; i-- > 0;)
            jj_put_text(r, &out, *items->v[i].text);
        return jj_string(r, built(&out));
    }
    struct value out = jj_generator(r);
    for (size_t i = items->n; i-- > 0;)
        jj_push(r, out.list, items->v[i]);
    return out;
}

static struct value f_items(struct run *r, struct value *a)
{
    struct value out = jj_generator(r);
    if (a[0].type == V_DICT)
        *out.list = *dict_view(r, a[0].dict, true, true).list;
    else if (a[0].type != V_UNDEFINED)
        jj_die(r, "items needs a dict, not %s", jj_type_word(a[0]));
    out.list->once = true;
    return out;
}

/* Follows a path such as "function.name" or "0"; ABSENT: the item itself. Items come before attributes here. */
static struct value follow(struct run *r, struct value item, struct value path, struct value fallback)
{
    if (path.type == V_ABSENT || path.type == V_NONE)
        return item;
    if (path.type != V_TEXT)
        return jj_get_item(r, item, path);
    for (size_t i = 0, dot; i <= path.text->n; i = dot + 1) {
        const char *p = i < path.text->n ? memchr(path.text->p + i, '.', path.text->n - i) : NULL;
        dot = p ? (size_t)(p - path.text->p) : path.text->n;
        struct text part = sub(*path.text, i, dot);
        int64_t index = 0;
        bool digits = part.n > 0 && part.n < 10;
        for (size_t k = 0; k < part.n && digits; k++) {
            digits = isdigit((unsigned char)part.p[k]);
            index = 10 * index + part.p[k] - '0';
        }
        item = jj_get_item(r, item, digits ? integer(index, true) : jj_string(r, part));
        if (item.type == V_UNDEFINED && fallback.type != V_ABSENT && fallback.type != V_NONE)
            item = fallback;
    }
    return item;
}

static const struct value *named(struct run *r, struct value *a, const char *name)   /* of the dict that '*' fills */
{
    return jj_lookup_text(r, a[2].dict, literal(name));
}

static struct value f_map(struct run *r, struct value *a)
{
    struct value out = jj_generator(r);
    const struct value *attribute = named(r, a, "attribute"), *fallback = named(r, a, "default");
    struct list *rest = a[1].list;
    if (rest->n == 0 && !attribute)
        jj_die(r, "map needs a filter or an attribute");
    const struct list *items = jj_iterate(r, a[0]);
    for (size_t i = 0; i < items->n; i++) {
        if (rest->n == 0) {
            jj_push(r, out.list, follow(r, items->v[i], *attribute, fallback ? *fallback : (struct value){0}));
            continue;
        }
        struct args args = {.named = *a[2].dict};
        jj_push(r, &args.positional, items->v[i]);
        for (size_t k = 1; k < rest->n; k++)
            jj_push(r, &args.positional, rest->v[k]);
        jj_push(r, out.list, jj_call_filter(r, need_text(r, rest->v[0], "the filter's name"), &args));
    }
    return out;
}

static struct value choose(struct run *r, struct value *a, bool wanted, bool by_attribute)
{
    struct value out = jj_generator(r);
    struct list args = *a[1].list;
    struct value path = {0};
    if (by_attribute) {
        if (args.n == 0)
            jj_die(r, "an attribute's name is missing");
        path = args.v[0];
        args = (struct list){.v = args.v + 1, .n = args.n - 1};
    }
    const struct list *items = jj_iterate(r, a[0]);
    for (size_t i = 0; i < items->n; i++) {
        struct value v = follow(r, items->v[i], path, (struct value){0});
        struct list rest = {.v = args.v + 1, .n = args.n ? args.n - 1 : 0};
        bool yes = args.n == 0 ? jj_truthy(v) : jj_run_test(r, need_text(r, args.v[0], "the test's name"), v, &rest);
        jj_spend(r, 1);
        if (yes == wanted)
            jj_push(r, out.list, items->v[i]);
    }
    return out;
}

static struct value f_select(struct run *r, struct value *a) { return choose(r, a, true, false); }
static struct value f_reject(struct run *r, struct value *a) { return choose(r, a, false, false); }
static struct value f_selectattr(struct run *r, struct value *a) { return choose(r, a, true, true); }
static struct value f_rejectattr(struct run *r, struct value *a) { return choose(r, a, false, true); }

static struct value sort_key(struct run *r, struct value v, struct value attribute, bool case_sensitive)
{
    v = follow(r, v, attribute, (struct value){0});
    return v.type == V_TEXT && !case_sensitive ? change_case(r, *v.text, LOWER) : v;
}

static struct value sorted(struct run *r, const struct list *items, struct value attribute, bool case_sensitive,
                           bool reverse)
{
    struct value out = jj_new_list(r, V_LIST);
    struct pair *pairs = jj_alloc(r, items->n, sizeof *pairs);
    for (size_t i = 0; i < items->n; i++) {
        pairs[i] = (struct pair){jj_new_list(r, V_LIST), items->v[i]};       /* in a list, even none equals none */
        jj_push(r, pairs[i].key.list, sort_key(r, items->v[i], attribute, case_sensitive));
    }
    jj_sort_pairs(r, pairs, items->n, reverse);
    for (size_t i = 0; i < items->n; i++)
        jj_push(r, out.list, pairs[i].value);
    return out;
}

static struct value f_sort(struct run *r, struct value *a)
{
    return sorted(r, jj_iterate(r, a[0]), a[3], jj_truthy(a[2]), jj_truthy(a[1]));
}

static struct value f_dictsort(struct run *r, struct value *a)
{
    if (a[0].type != V_DICT)
        jj_die(r, "dictsort needs a dict, not %s", jj_type_word(a[0]));
    bool by_value = a[2].type == V_TEXT && is(*a[2].text, "value");
    const struct list *items = dict_view(r, a[0].dict, true, true).list;
    return sorted(r, items, integer(by_value, true), jj_truthy(a[1]), jj_truthy(a[3]));
}

static struct value f_unique(struct run *r, struct value *a)
{
    struct value out = jj_generator(r);
    struct list seen = {0};
    const struct list *items = jj_iterate(r, a[0]);
    for (size_t i = 0; i < items->n; i++) {
        struct value key = sort_key(r, items->v[i], a[2], jj_truthy(a[1]));
        bool known = false;
        jj_need_key(r, key);
        for (size_t k = 0; k < seen.n && !known; k++)
            known = jj_equal(r, seen.v[k], key);
        if (known)
            continue;
        jj_push(r, &seen, key);
        jj_push(r, out.list, items->v[i]);
    }
    return out;
}

static struct value extreme(struct run *r, struct value *a, bool most)
{
    const struct list *items = jj_iterate(r, a[0]);
    if (items->n == 0)
        return jj_undefined(r, literal("the least or greatest of nothing"));
    size_t best = 0;
    struct value best_key = sort_key(r, items->v[0], a[2], jj_truthy(a[1]));
    for (size_t i = 1; i < items->n; i++) {
        struct value key = sort_key(r, items->v[i], a[2], jj_truthy(a[1]));
        if (most ? jj_less(r, best_key, key) : jj_less(r, key, best_key)) {
            best = i;
            best_key = key;
        }
    }
    return items->v[best];
}

static struct value f_min(struct run *r, struct value *a) { return extreme(r, a, false); }
static struct value f_max(struct run *r, struct value *a) { return extreme(r, a, true); }

static struct value f_sum(struct run *r, struct value *a)
{
    struct value sum = a[2].type == V_ABSENT ? integer(0, true) : a[2];
    const struct list *items = jj_iterate(r, a[0]);
    for (size_t i = 0; i < items->n; i++) {
        sum = jj_binary(r, '+', sum, follow(r, items->v[i], a[1], (struct value){0}));
        jj_spend(r, 1);
    }
    return sum;
}

static struct value f_join(struct run *r, struct value *a)
{
    struct list items = {0};
    const struct list *all = jj_iterate(r, a[0]);
    for (size_t i = 0; i < all->n; i++)
        jj_push(r, &items, follow(r, all->v[i], a[2], (struct value){0}));
    return join(r, a[1].type == V_ABSENT ? literal("") : jj_to_text(r, a[1]), &items, false);
}

static struct value f_tojson(struct run *r, struct value *a)
{
    struct json_style style = {.ascii = jj_truthy(a[1]), .sort_keys = jj_truthy(a[4])};
    struct builder out = {0}, indent = {0};
    style.indented = a[2].type != V_ABSENT && a[2].type != V_NONE;
    if (a[2].type == V_TEXT)
        style.indent = *a[2].text;
    else
        for (int64_t i = need_int(r, a[2], 0); i > 0; i--)
            jj_put(r, &indent, " ", 1, true);
    if (a[2].type != V_TEXT)
        style.indent = built(&indent);
    style.item = literal(style.indented ? "," : ", ");
    style.key = literal(": ");
    if (a[3].type == V_LIST || a[3].type == V_TUPLE) {
        if (a[3].list->n != 2)
            jj_die(r, "tojson needs two separators");
        style.item = need_text(r, a[3].list->v[0], "a separator");
        style.key = need_text(r, a[3].list->v[1], "a separator");
    }
    jj_put_json(r, &out, a[0], &style, 0);
    return jj_string(r, built(&out));
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* Text as a number the way int() and float() read it; false when it is none. */
static bool read_number(struct run *r, struct text t, bool whole_only, struct value *out)
{
    char s[64];
    size_t n = 0;
    t = jj_strip(r, t, NULL, true, true);
    for (size_t i = 0; i < t.n; i++) {
        char c = t.p[i];
        if (c == '_' && i > 0 && i + 1 < t.n && is_digit(t.p[i - 1]) && is_digit(t.p[i + 1]))
            continue;
        if (n == sizeof s - 1 || !c || !(is_digit(c) || strchr(whole_only ? i == 0 ? "+-" : "" : "+-.eE", c)))
            return false;
        s[n++] = c;
    }
    s[n] = 0;
    char *end;
    errno = 0;
    *out = whole_only ? integer(strtoll(s, &end, 10), all_trusted(t)) : real(strtod(s, &end), all_trusted(t));
    if (whole_only && errno)
        jj_die(r, "an integer does not fit 64 bits");
    return n > 0 && *end == 0;
}

static struct value f_int(struct run *r, struct value *a)
{
    struct value v = a[0];
    if (v.type == V_UNDEFINED)
        jj_die_undefined(r, v);
    if (need_int(r, a[2], 10) != 10)
        jj_die(r, "int reads base 10 only");
    if (is_whole(v))
        return integer(whole(v), v.trusted);
    if (v.type == V_TEXT && read_number(r, *v.text, true, &v))
        return v;
    if (v.type == V_FLOAT || (v.type == V_TEXT && read_number(r, *v.text, false, &v))) {
        if (!(fabs(v.real) < 0x1p63))
            jj_die(r, "an integer does not fit 64 bits");
        return integer((int64_t)v.real, v.trusted);
    }
    return a[1].type == V_ABSENT ? integer(0, true) : a[1];
}

static struct value f_float(struct run *r, struct value *a)
{
    struct value v = a[0];
    if (v.type == V_UNDEFINED)
        jj_die_undefined(r, v);
    if (is_number(v))
        return real(number(v), v.trusted);
    if (v.type == V_TEXT && read_number(r, *v.text, false, &v))
        return v;
    return a[1].type == V_ABSENT ? real(0, true) : a[1];
}

static struct value f_abs(struct run *r, struct value *a)
{
    if (a[0].type == V_FLOAT)
        return real(fabs(a[0].real), a[0].trusted);
    int64_t i = need_int(r, a[0], 0);
    return i < 0 ? jj_int_arith(r, '-', 0, i, a[0].trusted) : integer(i, a[0].trusted);
}

static struct value f_round(struct run *r, struct value *a)
{
    if (!is_number(a[0]))
        jj_die(r, "%s cannot be rounded", jj_type_word(a[0]));
    int64_t places = need_int(r, a[1], 0);
    double d = number(a[0]), scale = pow(10, (double)places);
    if (a[2].type == V_TEXT && !is(*a[2].text, "common"))
        return real((is(*a[2].text, "ceil") ? ceil(d * scale) : floor(d * scale)) / scale, a[0].trusted);
    if (places < 0 || places > 300 || is_whole(a[0]) || !(fabs(d) < 1e300))
        return places >= 0 ? a[0] : real(rint(d * scale) / scale, a[0].trusted);
    char s[700];
    snprintf(s, sizeof s, "%.*f", (int)places, d);
    return real(strtod(s, NULL), a[0].trusted);
}

static struct value f_indent(struct run *r, struct value *a)
{
    struct builder out = {0}, spaces = {0};
    struct text t = need_text(r, a[0], "what is indented");
    const struct list *lines = split_lines(r, t, false).list;
    if (a[1].type == V_TEXT)
        jj_put_text(r, &spaces, *a[1].text);
    else
        for (int64_t i = need_int(r, a[1], 4); i > 0; i--)
            jj_put(r, &spaces, " ", 1, true);
    /* a final line end makes one more, empty line, since the filter adds "\n" before it splits */
    size_t n = lines->n + (t.n == 0 || same(sub(t, t.n - 1, t.n), literal("\n")));
    for (size_t i = 0; i < n; i++) {
        struct text line = i < lines->n ? *lines->v[i].text : literal("");
        if (i)
            jj_put(r, &out, "\n", 1, true);
        if (i == 0 ? jj_truthy(a[2]) : line.n > 0 || jj_truthy(a[3]))
            jj_put_text(r, &out, built(&spaces));
        jj_put_text(r, &out, line);
    }
    return jj_string(r, built(&out));
}

static struct value f_escape(struct run *r, struct value *a)
{
    struct text t = subject(r, a);
    struct builder out = {0};
    for (size_t i = 0; i < t.n; i++) {
        char c = t.p[i];
        const char *s = c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : NULL;
        s = c == '"' ? "&#34;" : c == '\'' ? "&#39;" : s;
        jj_put(r, &out, s ? s : &c, s ? strlen(s) : 1, trust_at(t, i));
    }
    return jj_string(r, built(&out));
}

static struct value f_attr(struct run *r, struct value *a)
{
    bool known;
    struct text name = need_text(r, a[1], "the attribute's name");
    bool no_items = a[0].type == V_DICT || a[0].type == V_UNDEFINED;
    return no_items ? get_method(r, a[0], name, &known) : jj_get_attr(r, a[0], name);
}

static const struct function filters[] = {
    {"abs", "", f_abs}, {"attr", "name", f_attr},
    {"capitalize", "", f_capitalize}, {"count", "", f_length}, {"d", "default_value? boolean?", f_default},
    {"default", "default_value? boolean?", f_default}, {"dictsort", "case_sensitive? by? reverse?", f_dictsort},
    {"e", "", f_escape}, {"escape", "", f_escape}, {"first", "", f_first}, {"float", "default?", f_float},
    {"indent", "width? first? blank?", f_indent}, {"int", "default? base?", f_int},
    {"items", "", f_items}, {"join", "d? attribute?", f_join}, {"last", "", f_last}, {"length", "", f_length},
    {"list", "", f_list}, {"lower", "", f_lower}, {"map", "*", f_map}, {"max", "case_sensitive? attribute?", f_max},
    {"min", "case_sensitive? attribute?", f_min}, {"reject", "*", f_reject}, {"rejectattr", "*", f_rejectattr},
    {"replace", "old new count?", f_replace}, {"reverse", "", f_reverse}, {"round", "precision? method?", f_round},
    {"safe", "", f_string}, {"select", "*", f_select}, {"selectattr", "*", f_selectattr},
    {"sort", "reverse? case_sensitive? attribute?", f_sort}, {"string", "", f_string},
    {"sum", "attribute? start?", f_sum},
    {"title", "", f_title}, {"tojson", "ensure_ascii? indent? separators? sort_keys?", f_tojson},
    {"trim", "chars?", f_trim}, {"unique", "case_sensitive? attribute?", f_unique}, {"upper", "", f_upper},
    {NULL, NULL, NULL}
};

/* ---- tests */

static bool is_type_test(struct text name, struct value v, bool *result)
{
    enum type t = v.type;
    if (is(name, "defined")) *result = t != V_UNDEFINED;
    else if (is(name, "undefined")) *result = t == V_UNDEFINED;
    else if (is(name, "none")) *result = t == V_NONE;
    else if (is(name, "boolean")) *result = t == V_BOOL;
    else if (is(name, "true")) *result = t == V_BOOL && v.boolean;
    else if (is(name, "false")) *result = t == V_BOOL && !v.boolean;
    else if (is(name, "integer")) *result = t == V_INT;
    else if (is(name, "float")) *result = t == V_FLOAT;
    else if (is(name, "number")) *result = is_number(v);
    else if (is(name, "string")) *result = t == V_TEXT;
    else if (is(name, "mapping")) *result = t == V_DICT;
    else if (is(name, "sequence")) *result = (t >= V_TEXT && t <= V_TUPLE) || t == V_DICT || t == V_UNDEFINED;
    else if (is(name, "iterable")) *result = (t >= V_TEXT && t <= V_DICT) || t == V_UNDEFINED || t == V_LOOP;
    else if (is(name, "callable")) *result = t == V_MACRO || t == V_FUNCTION || t == V_METHOD;
    else if (is(name, "escaped")) *result = false;
    else return false;
    return true;
}

bool jj_compare(struct run *r, char op, struct value a, struct value b)     /* = ! < > l(<=) g(>=) i(in) n(not in) */
{
    switch (op) {
    case '=': return jj_equal(r, a, b);
    case '!': return !jj_equal(r, a, b);
    case '<': return jj_less(r, a, b);
    case '>': return jj_less(r, b, a);
    case 'l': return jj_less(r, a, b) || jj_equal(r, a, b);
    case 'g': return jj_less(r, b, a) || jj_equal(r, a, b);
    case 'i': return jj_contains(r, b, a);
    default: return !jj_contains(r, b, a);
    }
}

bool jj_run_test(struct run *r, struct text name, struct value v, const struct list *args)
{
    static const char *const comparisons[][2] = {
        {"eq", "="}, {"equalto", "="}, {"==", "="}, {"ne", "!"}, {"!=", "!"}, {"lt", "<"}, {"lessthan", "<"},
        {"<", "<"}, {"gt", ">"}, {"greaterthan", ">"}, {">", ">"}, {"le", "l"}, {"<=", "l"}, {"ge", "g"}, {">=", "g"},
        {"in", "i"}
    };
    bool result;
    if (is_type_test(name, v, &result)) {
        if (args->n)
            jj_die(r, "the test '%.*s' takes no argument", (int)name.n, name.p);
        return result;
    }
    if (is(name, "odd") || is(name, "even"))
        return jj_equal(r, jj_binary(r, '%', v, integer(2, true)), integer(is(name, "odd"), true));
    if (is(name, "lower") || is(name, "upper"))
        return jj_truthy(all_are(r, &v, name.p[0]));
    if (is(name, "filter"))
        return v.type == V_TEXT && jj_find_function(filters, *v.text);
    if (args->n == 1) {
        if (is(name, "divisibleby"))
            return jj_equal(r, jj_binary(r, '%', v, args->v[0]), integer(0, true));
        if (is(name, "sameas"))
            return v.type == args->v[0].type && jj_equal(r, v, args->v[0]);
        for (size_t i = 0; i < sizeof comparisons / sizeof *comparisons; i++)
            if (is(name, comparisons[i][0]))
                return jj_compare(r, comparisons[i][1][0], v, args->v[0]);
    }
    jj_die(r, "there is no test '%.*s' with %zu arguments", JJ_SHOW(name), args->n);
}

/* ---- functions that templates can call */

static struct value g_range(struct run *r, struct value *a)
{
    int64_t from = need_int(r, a[1], 0), to = need_int(r, a[2], 0), step = need_int(r, a[3], 1);
    struct value out = jj_new_list(r, V_LIST);
    if (a[2].type == V_ABSENT) {
        to = from;
        from = 0;
    }
    if (step == 0)
        jj_die(r, "range has a step of 0");
    for (int64_t i = from; step > 0 ? i < to : i > to;) {
        if (out.list->n == MAX_RANGE)
            jj_die(r, "range is longer than %d", MAX_RANGE);
        jj_push(r, out.list, integer(i, true));
        jj_spend(r, 1);
        if (__builtin_add_overflow(i, step, &i))
            break;
    }
    return out;
}

/* dict(mapping or pairs, name=value): the later wins. */
static struct value fill_dict(struct run *r, struct value *a, enum type type)
{
    struct value out = jj_new_dict(r, type);
    for (size_t i = 0; i < a[1].list->n; i++) {
        struct value v = a[1].list->v[i];
        const struct list *pairs = v.type == V_DICT ? dict_view(r, v.dict, true, true).list : jj_iterate(r, v);
        for (size_t k = 0; k < pairs->n; k++) {
            const struct list *pair = jj_iterate(r, pairs->v[k]);
            if (pair->n != 2)
                jj_die(r, "a dict is made of pairs");
            jj_dict_set(r, out.dict, pair->v[0], pair->v[1]);
        }
    }
    for (size_t i = 0; i < a[2].dict->n; i++)
        jj_dict_set(r, out.dict, a[2].dict->v[i].key, a[2].dict->v[i].value);
    return out;
}

static struct value g_dict(struct run *r, struct value *a) { return fill_dict(r, a, V_DICT); }
static struct value g_namespace(struct run *r, struct value *a) { return fill_dict(r, a, V_NAMESPACE); }

static struct value g_raise_exception(struct run *r, struct value *a)
{
    char message[400];
    struct text t = jj_to_text(r, a[1]);
    snprintf(message, sizeof message, "the template refuses these messages: %.*s", (int)(t.n < 300 ? t.n : 300),
             t.n ? t.p : "");
    jj_die_code(r, GEN_USAGE, message);
}

static struct value g_strftime_now(struct run *r, struct value *a)
{
    struct text t = need_text(r, a[1], "the date's format");
    struct builder format = {0}, out = {0};
    struct tm tm;
    char s[1000];
    if (t.n > 200 || (t.n && memchr(t.p, 0, t.n)) || !localtime_r(&r->now, &tm))
        jj_die(r, "strftime_now cannot use its format");
    jj_put(r, &format, t.p, t.n, true);
    jj_put(r, &format, "", 1, true);
    jj_put(r, &out, s, strftime(s, sizeof s, format.p, &tm), all_trusted(t));
    return jj_string(r, built(&out));
}

const struct function jj_globals[] = {
    {"range", "start stop? step?", g_range}, {"dict", "*", g_dict}, {"namespace", "*", g_namespace},
    {"raise_exception", "message", g_raise_exception}, {"strftime_now", "format", g_strftime_now}, {NULL, NULL, NULL}
};

/* ---- calls */

/* Calls f with positional[0] as its subject. */
struct value jj_call_function(struct run *r, const struct function *f, const struct args *args)
{
    struct value a[MAX_ARGS] = {args->positional.v[0]};
    size_t used = 1, used_names = 0, n = 1;
    for (const char *p = f->params; *p; n++) {
        size_t len = strcspn(p, " ?");
        struct text name = text_of(p, len, true);
        bool optional = p[len] == '?';
        if (*p == '*') {
            a[n] = jj_new_list(r, V_LIST);
            for (; used < args->positional.n; used++)
                jj_push(r, a[n].list, args->positional.v[used]);
            a[n + 1] = jj_new_dict(r, V_DICT);
            *a[n + 1].dict = args->named;
            return f->call(r, a);
        }
        const struct value *v = jj_lookup_text(r, &args->named, name);
        used_names += v != NULL;
        if (used < args->positional.n) {
            if (v)
                jj_die(r, "%s: '%.*s' is given twice", f->name, (int)len, p);
            v = &args->positional.v[used++];
        }
        if (!v && !optional)
            jj_die(r, "%s: '%.*s' is missing", f->name, (int)len, p);
        if (v)
            a[n] = *v;
        p += len + optional;
        p += *p == ' ';
    }
    if (used < args->positional.n || used_names < args->named.n)
        jj_die(r, "%s: there are more arguments than it takes", f->name);
    return f->call(r, a);
}

struct value jj_call_filter(struct run *r, struct text name, struct args *args)
{
    const struct function *f = jj_find_function(filters, name);
    if (!f)
        jj_die(r, "there is no filter '%.*s'", JJ_SHOW(name));
    return jj_call_function(r, f, args);
}
