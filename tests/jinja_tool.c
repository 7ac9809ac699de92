/* jinja_tool.c - renders chat templates for the Python tests. Reads requests from stdin, one JSON array a line,
 * [template, data, own, time], and writes one JSON value a line: the text as a list of [text, trusted] pieces, or the
 * error. */
#include "jinja.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static json_t *answer(const json_t *request)
{
    const json_t *source = json_array_get(request, 0);
    const json_t *data = json_array_get(request, 1), *own = json_array_get(request, 2);
    time_t now = (time_t)json_integer_value(json_array_get(request, 3));
    struct error e = {0};
    struct jinja *t;
    struct jinja_result result = {0};
    bool ok = jinja_parse(&t, json_string_value(source), json_string_length(source), &e)
              && jinja_render(t, data, own, now, &result, &e);
    jinja_free(t);
    if (!ok)
        return json_pack("{s:i, s:s}", "code", e.code, "error", e.text);
    json_t *pieces = json_array();
    for (size_t i = 0; i < result.n_spans; i++) {
        const struct span *s = &result.spans[i];
        json_array_append_new(pieces, json_pack("[o, b]", json_stringn_nocheck(s->ptr, s->len), s->trusted));
    }
    jinja_result_free(&result);
    return pieces;
}

int main(void)
{
    char *line = NULL;
    size_t cap = 0;
    for (ssize_t n; (n = getline(&line, &cap, stdin)) > 0;) {
        json_error_t why;
        json_t *request = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, &why);
        if (!request) {
            fprintf(stderr, "jinja_tool: %s\n", why.text);
            return GEN_USAGE;
        }
        json_t *reply = answer(request);
        if (json_dumpf(reply, stdout, JSON_COMPACT | JSON_ENCODE_ANY) != 0) {
            fprintf(stderr, "jinja_tool: the answer is not UTF-8\n");
            return GEN_RUN;
        }
        putchar('\n');
        fflush(stdout);
        json_decref(reply);
        json_decref(request);
    }
    free(line);
    return GEN_OK;
}
