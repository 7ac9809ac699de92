/* answer.c - the decode loop. */
#include "answer.h"

#include "lookup.h"

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

_Static_assert(LOOKUP_MOST + 1 <= EXTEND_ROWS, "a draft and the token before it are one pass");

/* A draft: history[begin..begin + count) was computed ahead, as a guess of what will be chosen there. */
struct draft { struct lookup lookup; int64_t begin; int count; };

/* Makes the logits after the last token, whose position follows those that are computed. */
static bool compute(struct answer *a, const struct ids *tokens, struct draft *d, struct error *e)
{
    struct sequence *s = a->sequence;
    int64_t pos = (int64_t)tokens->len - 1, room = engine_ctx(a->engine) - pos - 1;
    int32_t batch[EXTEND_ROWS] = { tokens->data[pos] };
    if (!a->lookup) return engine_step(a->engine, &s, batch, 1, e);
    if (pos < sequence_length(s) && sequence_tokens(s)[pos] == batch[0]) return true;
    if (d->count) lookup_learn(&d->lookup, d->count, (int)(pos - d->begin));
    sequence_cut(s, pos);
    d->begin = pos + 1;
    d->count = lookup_draft(&d->lookup, tokens->data, tokens->len, room < LOOKUP_MOST ? (int)room : LOOKUP_MOST,
                            batch + 1);
    return sequence_extend(s, batch, 1 + d->count, e);
}

static bool end(struct answer *a, const char *reason)
{
    a->done = true;
    a->finish_reason = reason;
    return true;
}

static bool reached(const struct answer *a) { return a->limit >= 0 && (int64_t)a->index >= a->limit; }

/* How many of the largest logits are all that the next token is chosen by; 0 = they are needed as they are. */
static int deciding(const struct answer *a) { return a->wants_logits ? 0 : sampler_top(a->sampler); }

void answer_expect(const struct answer *a) { sequence_want_top(a->sequence, deciding(a)); }

bool answer_step(struct answer *a, struct ids *tokens, struct error *e)
{
    bool stopped = false;
    int64_t pos = (int64_t)tokens->len - 1;
    const float *logits = NULL;
    if (reached(a)) return end(a, "length");
    struct top top = sequence_top_at(a->sequence, pos, deciding(a));
    int32_t id;
    if (top.n) id = sampler_pick_among(a->sampler, top.ids, top.logits, top.n, tokens->len);
    else {
        if (!(logits = sequence_logits_at(a->sequence, pos)))
            return fail(e, GEN_RUN, "the logits of token %lld cannot be read from the device", (long long)pos);
        id = sampler_pick(a->sampler, logits, tokens->len, tokens->data, tokens->len, e);
    }
    if (id < 0) return false;
    if (!a->ignore_end && tokenizer_is_end(a->tokenizer, id)) return end(a, "stop");
    if (!ids_add(tokens, id)) return fail(e, GEN_RUN, "cannot allocate memory for the generated tokens");
    if (!a->take(a->user, id, a->index++, logits, &stopped, e)) return false;
    if (stopped) return end(a, "stop");
    if (reached(a)) return end(a, "length");
    return (int64_t)tokens->len <= engine_ctx(a->engine) || end(a, "context");
}

static bool loop(struct answer *a, struct ids *tokens, int64_t *used, struct error *e)
{
    struct draft draft = { 0 };
    while (!a->done && !(a->stop && *a->stop)) {
        if (a->index > 0) {            /* the token before this one takes the next position */
            if (!compute(a, tokens, &draft, e)) return false;
            a->steps++;
        }
        *used = (int64_t)tokens->len;
        if (!answer_step(a, tokens, e)) return false;
    }
    return true;
}

bool answer_run(struct answer *a, struct ids *tokens, struct error *e)
{
    int64_t used = (int64_t)tokens->len;
    bool ok = loop(a, tokens, &used, e);
    sequence_cut(a->sequence, used);   /* without drafts: the last logits are those last chosen by */
    return ok;
}
