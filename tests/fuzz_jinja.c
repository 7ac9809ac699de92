/* fuzz_jinja.c - fuzz target: the input makes a template, which is parsed and rendered. Bytes from 0x20 to 0x7e stand
 * for themselves, the others for fragments of the language. Trusted text must not hold what only the data has. */
#include "jinja.h"

#include <stdlib.h>
#include <string.h>

static const char *const fragments[] = {
    "{{ ", " }}", "{% ", " %}", "{%- ", " -%}", "{# ", " #}", "for x in ", "for k, v in d.items() ", "if ", "elif ",
    "else", "endif", "endfor", "set ", "set ns.q = ", "endset", "macro m(a, b=1) ", "endmacro", "call m(1) ",
    "endcall", "filter upper ", "endfilter", "with ", "endwith", "generation", "endgeneration", "raw", "endraw",
    "break", "continue", "recursive", "l", "d", "s", "t", "n", "f", "x", "k", "v", "ns", "loop", "messages",
    "message.content", "m", "caller()", "q", "loop.index", "loop.last", "loop.previtem", "loop(", "namespace(",
    "range(", "dict(", "raise_exception(", "strftime_now('%Y')", "ns.q", "true", "none", "0", "1", "-1", "2",
    "100000", "9223372036854775807", "1.5", "1e300", "'a'", "\"b\\n\"", "''", "[", "]", "(", ")", "{", "}", "[1:]",
    "[::-1]", "[-1]", "[:2]", ".", ",", ":", "=", " == ", " != ", " < ", " >= ", " + ", " - ", " * ", " / ", " // ",
    " % ", " ** ", " ~ ", " and ", " or ", " not ", " in ", " not in ", " is ", " is not ", "defined", "string",
    "mapping", "iterable", "sequence", "none", "divisibleby", "eq", " if ", " else ", " | ", "tojson",
    "tojson(indent=2)", "tojson(true)", "string", "trim", "upper", "title", "replace('a', s)", "join(s)", "list",
    "first", "last", "length", "sort", "reverse", "unique", "map(", "select(", "selectattr(", "reject(", "attribute=",
    "'upper'", "items", "dictsort", "default(", "int", "float", "round(2)", "abs", "sum", "min", "indent(2)", "safe",
    "escape", "capitalize", ".split(", ".rsplit(", ".splitlines()", ".strip(", ".lstrip(", ".replace(",
    ".startswith(", ".find(", ".count(", ".join(", ".items()", ".keys()", ".get(", ".upper()", ".removeprefix(",
    ".isalpha()", "*", "**", "\n", "  "
};
enum { N_FRAGMENTS = sizeof fragments / sizeof *fragments };

static const char data[] =
    "{\"s\": \"αβ γ\\nδ  \", \"t\": \"ΑΒ👍\", \"n\": 3, \"f\": -2.5, \"l\": [3, \"ω\", [\"χ\", null], {\"ψ\": 1}], \"q\": null,"
    "\"d\": {\"κ\": \"λ\", \"μ\": [1, 2.5], \"items\": {}}, \"messages\": [{\"role\": \"user\", \"content\": \"ξ\"},"
    "{\"role\": \"assistant\", \"content\": \"π\"}], \"message\": {\"content\": \" ρσ\"}}";

/* Of all that the data holds, only these lead bytes of Greek letters are in no template. */
static int has_greek(const struct span *s)
{
    return memchr(s->ptr, 0xce, s->len) || memchr(s->ptr, 0xcf, s->len);
}

static void check(const struct jinja_result *r, int has_escapes)
{
    const char *end = r->text.data;
    for (size_t i = 0; i < r->n_spans; i++) {
        const struct span *s = &r->spans[i];
        if (s->ptr != end || s->len == 0 || (i && s->trusted == s[-1].trusted))
            abort();
        if (s->trusted && !has_escapes && has_greek(s))
            abort();
        end += s->len;
    }
    if (r->text.len && end != r->text.data + r->text.len)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    static json_t *variables;
    if (!variables)
        variables = json_loads(data, 0, NULL);
    struct bytes source = {0};
    for (size_t i = 0; i < size && i < 4096; i++) {
        char c = (char)input[i];
        const char *s = fragments[input[i] % N_FRAGMENTS];
        if (input[i] >= 0x20 && input[i] < 0x7f)
            bytes_add(&source, &c, 1);
        else
            bytes_add(&source, s, strlen(s));
    }
    struct jinja *t = NULL;
    struct jinja_result result;
    struct error e = {0};
    const char *text = source.data ? source.data : "";
    if (jinja_parse(&t, text, source.len, &e)) {
        if (jinja_render(t, variables, NULL, 0, &result, &e)) {
            check(&result, source.len && memchr(source.data, '\\', source.len) != NULL);
            jinja_result_free(&result);
        } else if (!strstr(e.text, "line ")) {
            abort();
        }
    } else if (!strstr(e.text, "line ")) {
        abort();
    }
    jinja_free(t);
    bytes_free(&source);
    return 0;
}
