/* answer.c - the decode loop. */
#include "answer.h"

#include <stdlib.h>

bool answer_reserve(const struct answer *a, struct ids *tokens, struct error *e)
{
    int64_t room = engine_ctx(a->engine) - (int64_t)tokens->len + 1;
    size_t most = tokens->len + (size_t)(a->limit >= 0 && a->limit < room ? a->limit : room > 0 ? room : 0);
    if (most <= tokens->cap) return true;
    int32_t *data = realloc(tokens->data, most * sizeof *data);
    if (!data) return fail(e, GEN_RUN, "cannot allocate memory for %zu tokens: lower --predict or --ctx-size", most);
    tokens->data = data;
    tokens->cap = most;
    return true;
}

bool answer_run(struct answer *a, struct ids *tokens, struct error *e)
{
    bool stopped = false;
    for (size_t index = 0; a->limit < 0 || (int64_t)index < a->limit; index++) {
        if (a->stop && *a->stop) return a->finish_reason = NULL, true;
        if (index > 0) {               /* the token before this one takes the next position */
            if ((int64_t)tokens->len > engine_ctx(a->engine)) return a->finish_reason = "context", true;
            if (!engine_step(a->engine, &a->sequence, &tokens->data[tokens->len - 1], 1, e)) return false;
            a->steps++;
        }
        const float *logits = sequence_logits(a->sequence);
        int32_t id = sampler_pick(a->sampler, logits, tokens->len, tokens->data, tokens->len, e);
        if (id < 0) return false;
        if (!a->ignore_end && tokenizer_is_end(a->tokenizer, id)) return a->finish_reason = "stop", true;
        if (!ids_add(tokens, id)) return fail(e, GEN_RUN, "cannot allocate memory for the generated tokens");
        if (!a->take(a->user, id, index, logits, &stopped, e)) return false;
        if (stopped) return a->finish_reason = "stop", true;
    }
    a->finish_reason = a->stop && *a->stop ? NULL : "length";
    return true;
}
