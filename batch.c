/* batch.c - the scheduler of a batch.
 *
 * Each answer owes the cache the rows between the length of its sequence and that of its tokens: many while its prompt
 * is read, one while it is written, many again after its pages had to be given up. A step is one forward pass over
 * rows of all answers that are under way: the one row of each that is being written, and as many others as keep the
 * step short. */
#include "batch.h"

#include "answer.h"
#include "json.h"
#include "output.h"
#include "result.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    WORTH_WAITING = KV_BLOCK,          /* tokens that others compute, from which on a text waits for them */
    MOST_BEHIND = 1024,                /* answers that may wait for the one whose turn it is to be written */
    MOST_ROWS = 256,                   /* that cost as much as a step without any, at most */
    WAIT_MS = 200                      /* that a signal is noticed after, while no line comes */
};
/* A step with rows of prompts may take this many times as long as one in which all answers under way are written: the
 * longest gap between two tokens is to stay below 3 steps, on a machine that has other work now and then. */
static const double STRETCH = 1.5;
static const double FILE_RATE = 1e9;   /* bytes a second that pages are taken to be written and read with */

enum state { WAITING, RUNNING, AWAY, DONE };      /* AWAY: another rank answers it */

/* One answer: a sample of a line. */
struct task {
    struct task *next;                 /* in the order of the lines */
    struct request *request;
    int sample;
    int64_t id;                        /* by which ranks talk about it */
    enum state state;
    bool failed;
    struct bytes record;               /* DONE: what is to be written */
    /* from when it first runs until it is done */
    bool begun;
    struct sequence *sequence;         /* NULL: not yet, or its pages were given up */
    bool joined;                       /* it has what others have computed of its text */
    bool parked, fetched;              /* its pages may be in the file; the system has been told to read them */
    struct ids tokens;                 /* prompt, then answer */
    struct answer answer;
    struct sampler *sampler;
    struct stream *stream;
    struct logprob_rows logprobs;
    int64_t computed;                  /* length that the sequence has had already */
    int64_t shared;                    /* tokens of the prompt that others had computed */
    double since, first, last;         /* when it was begun, when its first and its last token came */
    bool waited;                       /* its pages were given up since its last token */
};

/* Durations of steps, sorted into bins 3 % wide from 10 microseconds on. */
enum { BINS = 640 };
struct histogram { int64_t bin[BINS], n; };

/* What a step costs: seconds = base + row * rows + see * tokens that the rows see. */
struct price { double base, row, see; };
/* The price by least squares of relative errors, whose past fades: sums of products of 1, rows, seen and seconds. */
struct cost { double sums[3][4]; int64_t n; };

struct scheduler {
    struct batch_options o;
    struct batch_status *status;
    struct task *first, **end;         /* answers that are not written yet */
    int64_t behind;                    /* how many */
    struct task *slots[LOGIT_ROWS];    /* the running ones, oldest first */
    int n_slots;
    struct request *current;           /* line whose samples are being made tasks */
    int next_sample;
    bool ended;                        /* no line is to come */
    struct work work[LOGIT_ROWS];
    struct task *owner[LOGIT_ROWS];    /* of each work */
    int n_work;
    struct cost cost;
    struct histogram steps;
    double begun, waste_sum;
    int64_t n_steps;
    bool seed_kept;
    bool short_of_pages;               /* some were given up, and no pass has succeeded since: nobody is admitted */
    /* several processes */
    int64_t last_id, n_away;
    struct rank { int wants; bool ended; struct batch_status status; } *ranks;     /* [size] as rank 0 knows them */
    bool asked;                        /* another rank: rank 0 owes it lines */
    struct bytes message;
};

/* ---- time -------------------------------------------------------------------------------------------------------- */

static void histogram_add(struct histogram *h, double seconds)
{
    double bin = log(fmax(seconds, 1e-5) * 1e5) / log(1.03);
    h->bin[bin < BINS ? (int)bin : BINS - 1]++;
    h->n++;
}

static double histogram_median(const struct histogram *h)
{
    int64_t below = 0;
    int i = 0;
    while (i < BINS - 1 && 2 * (below += h->bin[i]) < h->n) i++;
    return h->n ? 1e-5 * pow(1.03, i + 0.5) : 0;
}

static void cost_add(struct cost *c, double rows, double seen, double s)
{
    s = fmax(s, 1e-6);
    const double fade = 0.98, x[4] = { 1 / s, rows / s, seen / s, 1 };
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 4; k++) c->sums[i][k] = c->sums[i][k] * fade + x[i] * x[k];
    c->n++;
}

/* Solves the normal equations for the unknowns that are in use. */
static void solve(const struct cost *c, const bool use[3], double x[3])
{
    const double ridge = 1.01;         /* what the steps do not tell apart shares its cost */
    double a[3][4];
    memcpy(a, c->sums, sizeof a);
    for (int i = 0; i < 3; i++) {
        a[i][i] *= ridge;
        for (int k = 0; k < 3 && !use[i]; k++) a[i][k] = a[k][i] = i == k;
        if (!use[i]) a[i][3] = 0;
    }
    for (int i = 0; i < 3; i++)
        for (int j = i + 1; j < 3; j++)
            for (int k = 3; k >= i; k--) a[j][k] -= a[i][k] * a[j][i] / a[i][i];
    for (int i = 2; i >= 0; i--) {
        x[i] = a[i][3];
        for (int k = i + 1; k < 3; k++) x[i] -= a[i][k] * x[k];
        x[i] /= a[i][i];
    }
}

/* As long as nothing is known, all that counts is the rows. Where a row's bits depend on the others of its pass, the
 * passes must not depend on time: the price is one that devices may have, and a file has the same answers each time. */
static struct price price_of(const struct scheduler *b)
{
    static const struct price fixed = { 2e-3, 2e-5, 1e-8 };
    const struct cost *c = &b->cost;
    bool use[3] = { true, true, true }, again = c->n >= 3;
    if (!engine_backend(b->o.engine)->exact) return fixed;
    double x[3] = { 0, 1, 0 };
    while (again) {                    /* nothing costs less than nothing */
        solve(c, use, x);
        again = false;
        for (int i = 0; i < 3; i++)
            if (x[i] < 0) use[i] = false, again = true;
    }
    return (struct price){ x[0], fmax(x[1], x[0] / MOST_ROWS), x[2] };
}

/* Tokens that n rows after `length` tokens see. */
static double tokens_seen(int64_t length, int64_t n)
{
    return (double)n * (double)length + (double)n * (double)(n + 1) / 2;
}

static double row_seconds(const struct price *p, int64_t length) { return p->row + p->see * tokens_seen(length, 1); }

/* ---- answers ----------------------------------------------------------------------------------------------------- */

static void task_rest(struct task *t)
{
    sequence_close(t->sequence);
    sampler_close(t->sampler);
    stream_close(t->stream);
    free(t->logprobs.data);
    ids_free(&t->tokens);
    t->sequence = NULL;
    t->sampler = NULL;
    t->stream = NULL;
    t->logprobs.data = NULL;
}

static void task_free(struct task *t)
{
    task_rest(t);
    request_close(t->request);
    bytes_free(&t->record);
    free(t);
}

/* Makes the line of the output and lets go of all else. `why`: the answer failed. */
static bool finish(struct scheduler *b, struct task *t, json_t *response, const struct error *why, struct error *e)
{
    const struct request *r = t->request;
    json_t *object = json_object();
    if (r->custom_id) json_put(&object, "custom_id", json_incref((json_t *)r->custom_id));
    json_put(&object, "key", json_string(r->key));
    if (r->o.samples > 1) json_put(&object, "sample", json_integer(t->sample));
    if (why) response = json_pack("{s:I, s:s}", "line", (json_int_t)r->number, "message", why->text);
    json_put(&object, why ? "error" : "response", response);
    if (b->o.timings && t->begun)
        json_put(&object, "timings",
                 json_pack("{s:f, s:f, s:I}", "prefill_ms", json_ms(t->first - t->since), "decode_ms",
                           json_ms(t->last - t->first), "cached_tokens", (json_int_t)t->shared));
    if (!json_line(&t->record, object, e)) return false;
    task_rest(t);
    t->state = DONE;
    t->failed = why != NULL;
    b->status->answered += !t->failed;
    b->status->failed += t->failed;
    return true;
}

/* The answer is whole. */
static bool succeed(struct scheduler *b, struct task *t, struct error *e)
{
    const struct request *r = t->request;
    const struct tokenizer *tokenizer = b->o.context->tokenizer;
    if (!stream_end(t->stream, e)) return false;
    const struct bytes *text = stream_text(t->stream);
    struct result result = {
        .text = text->data ? text->data : "", .text_len = text->len, .tokens = t->tokens.data + r->prompt.len,
        .n_tokens = t->tokens.len - r->prompt.len, .finish_reason = t->answer.finish_reason,
        .prompt_tokens = (int64_t)r->prompt.len, .n_top = r->o.logprobs, .logprobs = t->logprobs.data,
    };
    return sequence_hash_logits(t->sequence, result.logits_sha256, e)
        && finish(b, t, result_response(&result, tokenizer), NULL, e);
}

static bool take(void *user, int32_t id, size_t index, const float *logits, bool *stopped, struct error *e)
{
    struct task *t = user;
    return logprobs_keep(&t->logprobs, t->sampler, logits, id, index, e) && stream_add(t->stream, id, stopped, e);
}

/* Makes ready what an answer needs; what is wrong with its options is the line's fault (*why, but for GEN_RUN). */
static bool begin(struct scheduler *b, struct task *t, struct error *why)
{
    struct request *r = t->request;
    struct sampler_options so = r->o.sampling;
    struct stream_options to = { .tokenizer = b->o.context->tokenizer, .stops = &r->o.stops, .at_start = r->at_start };
    so.seed = (uint64_t)r->o.seed + (uint64_t)t->sample;
    t->logprobs.n_top = r->o.logprobs;
    if (!sampler_open(&t->sampler, &so, engine_model(b->o.engine)->n_vocab, why) || !stream_open(&t->stream, &to, why))
        return false;
    for (size_t i = 0; i < r->prompt.len; i++)
        if (!ids_add(&t->tokens, r->prompt.data[i]))
            return fail(why, GEN_RUN, "cannot allocate memory for the tokens of line %lld", (long long)r->number);
    t->answer = (struct answer){ .engine = b->o.engine, .sampler = t->sampler, .tokenizer = to.tokenizer,
                                 .limit = r->o.predict, .ignore_end = r->o.ignore_eos,
                                 .wants_logits = r->o.logprobs >= 0, .take = take, .user = t };
    t->begun = true;
    t->since = now_seconds();
    b->status->prompt_tokens += (int64_t)r->prompt.len;
    return true;
}

/* What to say of a line whose cache for `n` tokens is more than all the memory that there is. */
static bool too_large(const struct scheduler *b, const char *which, int64_t n, struct error *why)
{
    const struct options *o = b->o.context->options;
    return fail(why, GEN_RUN, "%s %lld tokens need %zu bytes of cache, more than the %lld allowed: raise --kv-memory%s "
                "or ask for fewer", which, (long long)n, engine_bytes_for(b->o.engine, n), (long long)o->kv_memory,
                o->tensor_parallel > 1 ? "" : ", add --kv-offload host");
}

/* Makes a request of a line. It cannot be answered where the context is too short for its prompt, or the memory too
 * small for all that is asked for. Errors: as request_make. */
static bool make_request(const struct scheduler *b, struct request **out, const struct line *line, struct error *e)
{
    const struct options *all = b->o.context->options;
    int64_t ctx = engine_ctx(b->o.engine);
    if (!request_make(out, b->o.context, line, e)) return false;
    struct request *r = *out;
    if (r->error.code) return true;
    int64_t prompt = (int64_t)r->prompt.len, n = prompt;
    if (r->o.predict > 0 && !all->evict) n += r->o.predict - 1;    /* the last one is not computed */
    if (n > ctx) n = prompt > ctx ? prompt : ctx;
    if (all->kv_memory && !all->kv_offload && engine_bytes_for(b->o.engine, n) > (size_t)all->kv_memory)
        too_large(b, n > prompt ? "prompt and answer of" : "the prompt's", n, &r->error);
    else if (prompt > ctx)
        fail(&r->error, GEN_USAGE, "the prompt has %lld tokens, but the context holds %lld: %s or shorten the prompt",
             (long long)prompt, (long long)ctx, b->o.longer);
    return true;
}

/* ---- the queue --------------------------------------------------------------------------------------------------- */

static bool append(struct scheduler *b, struct request *r, int sample, int64_t id, struct error *e)
{
    struct task *t = alloc_zeroed(1, sizeof *t, "an answer", e);
    if (!t) return false;
    t->request = r;
    t->sample = sample;
    t->id = id;
    r->refs++;
    *b->end = t;
    b->end = &t->next;
    b->behind++;
    if (r->error.code) return finish(b, t, NULL, &r->error, e);
    b->status->waiting++;
    return true;
}

/* An empty line asks for nothing; in plain text, spaces are a prompt. */
static bool is_empty(const struct scheduler *b, const struct line *line)
{
    return line->data && strspn(line->data, b->o.context->plain ? "\r" : " \t\r") >= line->len;
}

/* Makes a task of the next answer that is asked for; false also when none is known yet. */
static bool next_task(struct scheduler *b, int wait_ms, bool *any, struct error *e)
{
    struct line line;
    *any = false;
    while (!b->current) {
        enum feed_state state = feed_next(b->o.feed, wait_ms, &line, e);
        b->status->share = feed_share(b->o.feed);
        if (state == FEED_END) b->ended = true;
        if (state == FEED_FAILED) return false;
        if (state != FEED_LINE) return true;
        if (is_empty(b, &line)) continue;
        if (!make_request(b, &b->current, &line, e)) return false;
        b->next_sample = 0;
    }
    struct request *r = b->current;
    int sample = b->next_sample++;
    if (b->next_sample >= (r->error.code ? 1 : r->o.samples)) b->current = NULL;
    bool known = journal_take(b->o.journal, r->key, sample);
    b->status->known += known;
    *any = true;
    bool ok = known || append(b, r, sample, b->last_id++, e);
    if (!b->current) request_close(r);
    return ok;
}

/* Reads lines ahead, only as many as are soon wanted: waits for them only when there is nothing else to do. */
static bool fill_queue(struct scheduler *b, struct error *e)
{
    bool any = true;
    int free_slots = b->o.parallel - b->n_slots;
    int wanted = free_slots + 1;
    for (int r = 1; r < comm_size(b->o.comm); r++) wanted += b->ranks[r].wants;
    while (any && !b->ended && !*b->o.stop && b->status->waiting < wanted && b->behind < MOST_BEHIND) {
        bool idle = !b->o.comm && !b->n_slots && !b->status->waiting && (!b->first || b->first->state != DONE);
        if (!next_task(b, idle ? WAIT_MS : 0, &any, e)) return false;
    }
    return true;
}

static void unlink_task(struct scheduler *b, struct task **at)
{
    struct task *t = *at;
    *at = t->next;
    if (b->end == &t->next) b->end = at;
    b->behind--;
    task_free(t);
}

/* Writes what is done: in the order of the lines, or all of it. */
static bool write_answers(struct scheduler *b, struct error *e)
{
    for (struct task **at = &b->first, *t; (t = *at);) {
        if (t->state != DONE) {
            if (!b->o.unordered) break;
            at = &t->next;
            continue;
        }
        struct bytes line = t->record;
        if (b->o.drawn_seed >= 0 && !b->seed_kept) {
            line = (struct bytes){ 0 };
            if (!bytes_printf(&line, "{\"seed\":%lld,", (long long)b->o.drawn_seed) ||
                !bytes_add(&line, t->record.data + 1, t->record.len - 1))
                return fail(e, GEN_RUN, "cannot allocate memory for an answer");
        }
        bool ok = journal_write(b->o.journal, line.data, line.len, e);
        if (line.data != t->record.data) bytes_free(&line);
        if (!ok) return false;
        b->seed_kept = true;
        unlink_task(b, at);
    }
    return true;
}

/* ---- several processes ------------------------------------------------------------------------------------------- */

/* Rank 0 sends lines to the ranks that ask for them, which send their answers and ask again. What they say: how many
 * answers they want to compute, how far they are, answers. What they are told: lines; 0 lines = no more are to come;
 * nothing at all = the run has failed. */
struct asking { int32_t wants, over; struct batch_status status; };
struct parcel { int64_t id, number; int32_t sample, failed; char hash[65]; uint64_t n; };      /* n bytes follow */

static bool pack(struct scheduler *b, struct parcel p, const struct bytes *data, struct error *e)
{
    p.n = data->len;
    return (bytes_add(&b->message, &p, sizeof p) && bytes_add(&b->message, data->data ? data->data : "", data->len))
        || fail(e, GEN_RUN, "cannot allocate memory for a message to another process");
}

/* The next parcel of a message that begins at *at; false at its end. */
static bool unpack(const struct bytes *message, size_t *at, struct parcel *p, const char **data)
{
    if (message->len - *at < sizeof *p) return false;
    memcpy(p, message->data + *at, sizeof *p);
    *data = message->data + *at + sizeof *p;
    *at += sizeof *p + p->n;
    return true;
}

/* Rank 0 takes the answers of a message. */
static bool take_answers(struct scheduler *b, struct error *e)
{
    struct bytes message = { 0 };
    struct asking asking;
    struct parcel p;
    const char *data;
    size_t at = sizeof asking;
    int from = comm_receive(b->o.comm, -1, &message);
    if (from < 0) return fail(e, GEN_RUN, "cannot allocate memory for another process's answers");
    memcpy(&asking, message.data, sizeof asking);
    b->ranks[from].wants = asking.wants;
    b->ranks[from].status = asking.status;
    b->ranks[from].ended = asking.over;
    bool ok = true;
    while (ok && unpack(&message, &at, &p, &data)) {
        struct task *t = b->first;
        while (t->id != p.id) t = t->next;
        ok = bytes_add(&t->record, data, p.n) || fail(e, GEN_RUN, "cannot allocate memory for an answer");
        t->state = DONE;
        t->failed = p.failed;
        b->status->answered += !t->failed;
        b->status->failed += t->failed;
        b->n_away--;
    }
    bytes_free(&message);
    return ok;
}

/* Rank 0 sends a rank that asks what it can have. */
static bool send_lines(struct scheduler *b, int rank, struct error *e)
{
    struct rank *r = &b->ranks[rank];
    int n = 0;
    b->message.len = 0;
    for (struct task *t = b->first; t && n < r->wants && !*b->o.stop; t = t->next) {
        if (t->state != WAITING || t->begun) continue;
        struct parcel p = { .id = t->id, .number = t->request->number, .sample = t->sample };
        memcpy(p.hash, t->request->hash, sizeof p.hash);
        if (!pack(b, p, &t->request->line, e)) return false;
        t->state = AWAY;
        b->status->waiting--;
        b->n_away++;
        n++;
    }
    if (!n && !b->ended && !*b->o.stop) return true;
    r->wants = 0;
    if (!n && !pack(b, (struct parcel){ .id = -1 }, &(struct bytes){ 0 }, e)) return false;
    return comm_post(b->o.comm, rank, b->message.data, b->message.len, e);
}

/* Rank 0's part between two steps. */
static bool serve_ranks(struct scheduler *b, struct error *e)
{
    while (comm_waiting(b->o.comm))
        if (!take_answers(b, e)) return false;
    for (int r = 1; r < comm_size(b->o.comm); r++)
        if (b->ranks[r].wants && !send_lines(b, r, e)) return false;
    return true;
}

static bool ranks_ended(const struct scheduler *b)
{
    for (int r = 1; r < comm_size(b->o.comm); r++)
        if (!b->ranks[r].ended) return false;
    return true;
}

/* The run has failed: tells every rank that asks, until all have been told. */
static void dismiss_ranks(struct scheduler *b)
{
    struct error e;
    for (int r = 1; r < comm_size(b->o.comm); r++) {
        struct bytes message = { 0 };
        while (!b->ranks[r].ended && !b->ranks[r].wants && comm_receive(b->o.comm, r, &message) == r) {
            struct asking asking;
            memcpy(&asking, message.data, sizeof asking);
            b->ranks[r].wants = asking.wants;
            b->ranks[r].ended = asking.over;
        }
        if (!b->ranks[r].ended) comm_post(b->o.comm, r, "", 0, &e);
        bytes_free(&message);
    }
}

/* Another rank takes the lines that rank 0 has sent. */
static bool take_lines(struct scheduler *b, struct error *e)
{
    struct bytes message = { 0 };
    struct parcel p;
    const char *data;
    size_t at = 0;
    bool ok = comm_receive(b->o.comm, 0, &message) == 0 || fail(e, GEN_RUN, "cannot allocate memory for lines");
    b->asked = false;
    if (ok && !message.len) {          /* rank 0 says what was wrong */
        *e = (struct error){ .code = GEN_OK };
        ok = false;
    }
    while (ok && unpack(&message, &at, &p, &data)) {
        struct line line = { p.number, data, p.n, "" };
        struct request *r;
        memcpy(line.hash, p.hash, sizeof line.hash);
        if (p.id < 0) b->ended = true;
        else if ((ok = make_request(b, &r, &line, e))) {
            ok = append(b, r, p.sample, p.id, e);
            request_close(r);
        }
    }
    bytes_free(&message);
    return ok;
}

/* Another rank's part between two steps: answers go to rank 0, and lines come. */
static bool ask_rank_0(struct scheduler *b, struct error *e)
{
    if (b->asked && comm_waiting(b->o.comm) && !take_lines(b, e)) return false;
    if (b->asked) return true;
    bool over = b->ended && !b->n_slots && !b->status->waiting;
    int wants = b->ended ? 0 : b->o.parallel - b->n_slots + 1 - (int)b->status->waiting;
    struct asking asking = { wants > 0 ? wants : 0, over, *b->status };
    b->message.len = 0;
    if (!bytes_add(&b->message, &asking, sizeof asking))
        return fail(e, GEN_RUN, "cannot allocate memory for a message to rank 0");
    for (struct task **at = &b->first, *t; (t = *at);) {
        struct parcel p = { .id = t->id, .failed = t->failed };
        if (t->state != DONE) {
            at = &t->next;
            continue;
        }
        if (!pack(b, p, &t->record, e)) return false;
        unlink_task(b, at);
    }
    if (!asking.wants && !over && b->message.len == sizeof asking) return true;
    b->asked = asking.wants > 0;
    return comm_post(b->o.comm, 0, b->message.data, b->message.len, e);
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

/* Tokens that the text of `t`, all but the last, has in common with that of `other` from the start. */
static int64_t alike(const struct task *t, const struct task *other)
{
    int64_t n = (int64_t)t->tokens.len - 1, m = (int64_t)other->tokens.len, i = 0;
    while (i < n && i < m && t->tokens.data[i] == other->tokens.data[i]) i++;
    return i;
}

/* May tasks have pages in common? */
static bool shares(const struct scheduler *b)
{
    return !b->o.context->options->no_share && !b->o.context->options->evict;
}

/* Gives a task its sequence with all that is known of its text: pages that the engine finds, or a fork of the sequence
 * that has the longest beginning in common. While that one is still to compute much of it, the task waits. */
static bool join(struct scheduler *b, struct task *t, struct error *e)
{
    struct sequence *fork;
    struct task *best = NULL;
    if (!t->sequence && !sequence_open(&t->sequence, b->o.engine, e)) return false;
    int64_t most = sequence_reuse(t->sequence, t->tokens.data, (int64_t)t->tokens.len), reused = most;
    for (int i = 0; i < b->n_slots && shares(b); i++) {
        int64_t n = b->slots[i]->joined ? alike(t, b->slots[i]) : 0;
        if (n > most) best = b->slots[i], most = n;
    }
    bool ready = best && sequence_length(best->sequence) >= most;
    if (best && !ready && most >= reused + WORTH_WAITING) return true;
    if (ready) {
        if (!sequence_fork(&fork, best->sequence, e)) return false;
        sequence_close(t->sequence);
        t->sequence = fork;
        sequence_cut(fork, most);
    }
    sequence_begin(t->sequence, t->tokens.data, (int64_t)t->tokens.len);
    sequence_prompt_ends(t->sequence, (int64_t)t->request->prompt.len);
    t->answer.sequence = t->sequence;
    answer_expect(&t->answer);
    reused = sequence_length(t->sequence);
    t->joined = true;
    if (!t->computed) t->shared = reused;
    if (t->computed < reused) t->computed = reused;
    return true;
}

/* Takes the pages of the youngest task, which goes on later: they stay in the file where there is one and reading them
 * again is cheaper than computing them. */
static void give_up_youngest(struct scheduler *b)
{
    struct task *t = b->slots[--b->n_slots];
    int64_t length = sequence_length(t->sequence);
    struct price p = price_of(b);
    double bytes = (double)length * (double)b->status->kv.bytes_per_token;
    t->parked = b->o.context->options->kv_offload && t->joined
             && p.row * (double)length + p.see * tokens_seen(0, length) > 2 * bytes / FILE_RATE;
    if (t->parked) {
        sequence_park(t->sequence);
    } else {
        sequence_close(t->sequence);
        t->sequence = NULL;
        t->joined = false;
    }
    t->fetched = false;
    t->waited = true;
    t->state = WAITING;
    b->short_of_pages = true;
    b->status->waiting++;
    b->status->given_up++;
}

/* Bytes of pages that the running tasks will take until all their prompts are read and each has one page more, with
 * what the passes of these rows and `rows` others take for themselves. */
static size_t promised(const struct scheduler *b, int64_t rows)
{
    size_t bytes = 0, page = engine_bytes_for(b->o.engine, 1);
    int64_t most = engine_rows(b->o.engine);
    for (int i = 0; i < b->n_slots; i++) {
        const struct task *t = b->slots[i];
        int64_t n = (int64_t)t->tokens.len;
        bytes += page + (t->sequence ? sequence_bytes_to(t->sequence, n) : engine_bytes_for(b->o.engine, n));
        rows += n - (t->sequence ? sequence_length(t->sequence) : 0);
    }
    return bytes + engine_bytes_of_pass(b->o.engine, rows < most ? rows : most);
}

/* Is there memory for one task more? What it shares with a running one takes none. */
static bool fits(const struct scheduler *b, const struct task *t)
{
    int64_t shared = 0;
    for (int i = 0; i < b->n_slots && shares(b); i++) {
        int64_t n = alike(t, b->slots[i]);
        if (n > shared) shared = n;
    }
    int64_t n = (int64_t)t->tokens.len;
    size_t bytes = engine_bytes_for(b->o.engine, n) - engine_bytes_for(b->o.engine, shared);
    return !b->n_slots || promised(b, n - shared) + bytes <= engine_room(b->o.engine);
}

static bool is_endless(const struct scheduler *b, const struct task *t)
{
    return t->begun && t->answer.limit < 0 && b->o.context->options->window;
}

/* Takes waiting tasks into the free slots, in the order of their lines. */
static bool admit(struct scheduler *b, struct error *e)
{
    struct error why;
    for (struct task *t = b->first; t && b->status->waiting && b->n_slots < b->o.parallel; t = t->next) {
        if (t->state != WAITING || (*b->o.stop && (!t->begun || is_endless(b, t)))) continue;
        if (!t->begun && !begin(b, t, &why)) {
            if (why.code == GEN_RUN) return *e = why, false;
            b->status->waiting--;
            if (!finish(b, t, NULL, &why, e)) return false;
            continue;
        }
        if (b->short_of_pages || !fits(b, t)) break;
        b->status->waiting--;
        if (t->parked) sequence_prefetch(t->sequence);
        t->fetched = t->parked;
        t->parked = false;
        t->state = RUNNING;
        b->slots[b->n_slots++] = t;
    }
    for (int i = 0; i < b->n_slots; i++)
        if (!b->slots[i]->joined && !join(b, b->slots[i], e)) return false;
    b->status->running = b->n_slots;
    return true;
}

/* Rows that the sequence is behind its tokens; a task whose pages are being read sits out one step if there are
 * others. */
static int64_t owed(const struct scheduler *b, const struct task *t)
{
    bool waits = !t->joined || (t->fetched && b->n_slots > 1);
    return waits ? 0 : (int64_t)t->tokens.len - sequence_length(t->sequence);
}

static void add_work(struct scheduler *b, struct task *t, int64_t rows)
{
    int64_t most = sequence_most(t->sequence);
    if (rows > most) rows = most;
    const int32_t *tokens = t->tokens.data + sequence_length(t->sequence);
    bool last = rows == (int64_t)t->tokens.len - sequence_length(t->sequence);
    b->work[b->n_work] = (struct work){ t->sequence, tokens, (int)rows, last };
    b->owner[b->n_work++] = t;
}

/* Chooses the rows of the next forward pass: beside those of answers as many of prompts as keep it short. */
static void compose(struct scheduler *b)
{
    struct price p = price_of(b);
    double left = 0, all = p.base;     /* seconds: of a pass for rows of prompts, and with a row of every task */
    int most = engine_rows(b->o.engine);
    b->n_work = 0;
    for (int i = 0; i < b->n_slots; i++) {
        struct task *t = b->slots[i];
        double row = row_seconds(&p, t->sequence ? sequence_length(t->sequence) : 0);
        all += row;
        if (owed(b, t) != 1) continue;
        left -= row;
        add_work(b, t, 1);
    }
    bool writing = b->n_work > 0;
    left += STRETCH * all - p.base;
    most -= b->n_work;
    for (int i = 0; i < b->n_slots && most > 0; i++) {
        int64_t n = owed(b, b->slots[i]);
        if (n <= 1) continue;
        double row = row_seconds(&p, sequence_length(b->slots[i]->sequence));
        double rows = writing ? left / row : most;
        if (rows < 1) break;
        if (n > most) n = most;
        add_work(b, b->slots[i], n < rows ? n : (int64_t)rows);
        most -= b->work[b->n_work - 1].n;
        left -= row * b->work[b->n_work - 1].n;
    }
}

static void leave(struct scheduler *b, struct task *t)
{
    int i = 0;
    while (b->slots[i] != t) i++;
    memmove(b->slots + i, b->slots + i + 1, (size_t)(--b->n_slots - i) * sizeof *b->slots);
}

/* When the run is to end, answers that may have no end are not waited for: their lines stay without one. */
static void leave_endless(struct scheduler *b)
{
    for (int i = b->n_slots; i-- > 0;)
        if (is_endless(b, b->slots[i])) leave(b, b->slots[i]);
}

/* Takes the next token of an answer. */
static bool advance(struct scheduler *b, struct task *t, double now, struct error *e)
{
    struct error why;
    size_t before = t->answer.index;
    bool ok = answer_step(&t->answer, &t->tokens, &why);
    b->status->generated += (int64_t)(t->answer.index - before);
    if (!t->first) t->first = now;
    double *longest = t->waited ? &b->status->longest_wait : &b->status->longest_gap;
    if (t->last) *longest = fmax(*longest, now - t->last);
    t->last = now;
    t->waited = false;
    if (ok && !t->answer.done) return true;
    leave(b, t);
    return ok ? succeed(b, t, e) : finish(b, t, NULL, &why, e);
}

/* Counts the rows of a pass. */
static void count(struct scheduler *b)
{
    for (int i = 0; i < b->n_work; i++) {
        struct task *t = b->owner[i];
        int64_t length = sequence_length(t->sequence), first = length - b->work[i].n;
        int64_t prompt = (int64_t)t->request->prompt.len;
        int64_t again = (t->computed < length ? t->computed : length) - first;
        if (again > 0) b->status->repeated += again;
        if (first < t->computed) first = t->computed;
        if (first < prompt && length > first) b->status->prefilled += (length < prompt ? length : prompt) - first;
        if (t->computed < length) t->computed = length;
    }
}

/* Does the pass find all its pages in memory? */
static bool has_room(const struct scheduler *b)
{
    size_t bytes = 0;
    for (int i = 0; i < b->n_work; i++)
        bytes += sequence_bytes_more(b->work[i].s, b->work[i].n);
    return bytes <= engine_room(b->o.engine);
}

/* Chooses the rows of the next pass so that there is memory for them: the youngest tasks make way, and the one that is
 * left takes smaller steps. False: not even one token of it fits. */
static bool make_room(struct scheduler *b)
{
    compose(b);
    while (b->n_slots > 1 && !has_room(b)) {
        give_up_youngest(b);
        compose(b);
    }
    while (b->n_work == 1 && b->work[0].n > 1 && !has_room(b)) {
        b->work[0].n /= 2;
        b->work[0].want = 0;
    }
    return b->n_slots != 1 || b->o.context->options->kv_offload || has_room(b);
}

static bool step(struct scheduler *b, struct error *e)
{
    struct error why;
    if (!make_room(b)) {
        struct task *t = b->slots[--b->n_slots];
        b->short_of_pages = false;
        too_large(b, "its", (int64_t)t->tokens.len, &why);
        return finish(b, t, NULL, &why, e);
    }
    for (int i = 0; i < b->n_slots; i++) b->slots[i]->fetched = false;
    if (!b->n_work) return true;
    double start = now_seconds(), rows = 0, seen = 0;
    for (int i = 0; i < b->n_work; i++) {
        rows += b->work[i].n;
        seen += tokens_seen(sequence_length(b->work[i].s), b->work[i].n);
    }
    if (!engine_forward(b->o.engine, b->work, b->n_work, e)) {
        if (b->n_slots == 1) return false;         /* there was room for one: the disk is full, or a device failed */
        give_up_youngest(b);
        return true;
    }
    b->short_of_pages = false;
    count(b);
    double now = now_seconds();
    int n = b->n_work;
    for (int i = 0; i < n; i++)
        if (b->work[i].want && !advance(b, b->owner[i], now, e)) return false;
    cost_add(&b->cost, rows, seen, now - start);
    histogram_add(&b->steps, now - start);
    return true;
}

static void measure(struct scheduler *b)
{
    struct batch_status *s = b->status;
    size_t whole = 0;
    for (int i = 0; i < b->n_slots; i++)
        if (b->slots[i]->joined) whole += engine_bytes_for(b->o.engine, sequence_length(b->slots[i]->sequence));
    s->kv = engine_kv_usage(b->o.engine);
    if (whole > s->kv.bytes_used && whole - s->kv.bytes_used > s->shared) s->shared = whole - s->kv.bytes_used;
    if (s->kv.bytes_used) b->waste_sum += (double)s->kv.bytes_unfilled / (double)s->kv.bytes_used, b->n_steps++;
    s->waste = b->n_steps ? b->waste_sum / (double)b->n_steps : 0;
    if (s->kv.pages > s->most_pages) s->most_pages = s->kv.pages;
    s->seconds = now_seconds() - b->begun;
    s->median_step = histogram_median(&b->steps);
    s->running = b->n_slots;
    b->o.report(b->o.user, s);
}

/* What other ranks have done counts as this one's. */
static void add_ranks(struct scheduler *b)
{
    struct batch_status *s = b->status;
    for (int r = 1; r < comm_size(b->o.comm); r++) {
        const struct batch_status *o = &b->ranks[r].status;
        s->prompt_tokens += o->prompt_tokens;
        s->prefilled += o->prefilled;
        s->repeated += o->repeated;
        s->generated += o->generated;
        s->given_up += o->given_up;
        s->most_pages += o->most_pages;
        s->longest_gap = fmax(s->longest_gap, o->longest_gap);
        s->longest_wait = fmax(s->longest_wait, o->longest_wait);
    }
}

/* Counts the lines that an interrupted run leaves without an answer: those under way, and of a regular file those that
 * are not read yet. A line whose first sample is known has its answer. */
static bool count_unanswered(struct scheduler *b, struct error *e)
{
    struct batch_status *s = b->status;
    const struct request *counted = NULL;
    enum feed_state state = FEED_LINE;
    struct line line;
    char key[65];
    for (struct task *t = b->first; t; counted = t->request, t = t->next) s->unanswered += t->request != counted;
    s->unanswered += b->current && b->current != counted;
    s->unread = !b->ended && feed_share(b->o.feed) < 0;
    while (!b->ended && !s->unread && (state = feed_next(b->o.feed, 0, &line, e)) == FEED_LINE) {
        request_key(key, b->o.context, &line);
        s->unanswered += !is_empty(b, &line) && !journal_take(b->o.journal, key, 0);
    }
    return state != FEED_FAILED;
}

static bool exchange(struct scheduler *b, struct error *e)
{
    return !b->o.comm || (comm_rank(b->o.comm) ? ask_rank_0(b, e) : serve_ranks(b, e));
}

static bool run(struct scheduler *b, struct error *e)
{
    bool follows = comm_rank(b->o.comm) > 0;
    for (;;) {
        if ((!follows && !fill_queue(b, e)) || !admit(b, e) || !exchange(b, e)) return false;
        if (!follows && !write_answers(b, e)) return false;
        measure(b);
        if (*b->o.stop) leave_endless(b);
        if (b->n_slots) {
            if (!step(b, e)) return false;
        } else if (follows) {
            if (b->ended && !b->first) return true;
            usleep(500);
        } else if ((*b->o.stop || (b->ended && !b->status->waiting)) && ranks_ended(b)) {
            return write_answers(b, e) && (!*b->o.stop || count_unanswered(b, e));
        } else if (b->o.comm) {
            usleep(500);
        }
    }
}

bool batch_run(const struct batch_options *o, struct batch_status *status, struct error *e)
{
    struct scheduler *b = alloc_zeroed(1, sizeof *b, "the batch", e);
    *status = (struct batch_status){ .share = -1 };
    if (!b) return false;
    b->o = *o;
    b->status = status;
    b->end = &b->first;
    b->begun = now_seconds();
    b->ranks = alloc_zeroed((size_t)comm_size(o->comm), sizeof *b->ranks, "other processes", e);
    bool ok = b->ranks && run(b, e);
    if (!ok && o->comm && comm_rank(o->comm) == 0) dismiss_ranks(b);
    if (comm_rank(o->comm) == 0) add_ranks(b);
    for (struct task *t = b->first, *next; t; t = next) {
        next = t->next;
        task_free(t);
    }
    request_close(b->current);
    bytes_free(&b->message);
    free(b->ranks);
    free(b);
    return ok;
}

/* ---- telling ----------------------------------------------------------------------------------------------------- */

static double rate(const struct batch_status *s) { return s->seconds > 0 ? (double)s->generated / s->seconds : 0; }

/* Seconds left by the share of the input that is read; negative = unknown. */
static double time_left(const struct batch_status *s)
{
    return s->share > 0 ? s->seconds * (1 - s->share) / s->share : -1;
}

static bool describe_json(struct bytes *out, const struct batch_status *s, bool last, struct error *e)
{
    json_t *object = json_pack(
        "{s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:I, s:I, s:I, s:I, s:f, s:I, s:f, s:f, s:f, s:i, s:i, s:f, s:I, "
        "s:I, s:I}", "done", last, "answers", (json_int_t)s->answered, "failed", (json_int_t)s->failed,
        "unanswered", (json_int_t)s->unanswered,
        "known", (json_int_t)s->known, "running", (json_int_t)s->running, "waiting", (json_int_t)s->waiting,
        "seconds", json_ms(s->seconds) / 1e3, "prompt_tokens", (json_int_t)s->prompt_tokens,
        "prefilled_tokens", (json_int_t)s->prefilled, "repeated_tokens", (json_int_t)s->repeated,
        "completion_tokens", (json_int_t)s->generated, "tokens_per_s", json_ms(rate(s)) / 1e3,
        "given_up", (json_int_t)s->given_up, "longest_gap_ms", json_ms(s->longest_gap),
        "longest_wait_ms", json_ms(s->longest_wait),
        "median_step_ms", json_ms(s->median_step), "pages", s->kv.pages, "most_pages", s->most_pages, "waste", s->waste,
        "bytes_shared", (json_int_t)s->shared, "bytes_out", (json_int_t)s->kv.bytes_out,
        "bytes_in", (json_int_t)s->kv.bytes_in);
    if (time_left(s) >= 0) json_put(&object, "seconds_left", json_real(json_ms(time_left(s)) / 1e3));
    return json_line(out, object, e);
}

bool batch_describe(struct bytes *out, const struct batch_status *s, bool json, bool last, struct error *e)
{
    if (json) return describe_json(out, s, last, e);
    bool ok = bytes_printf(out, "%lld answer%s", (long long)s->answered, s->answered == 1 ? "" : "s");
    if (s->failed) ok = ok && bytes_printf(out, ", %lld failed", (long long)s->failed);
    if (s->known) ok = ok && bytes_printf(out, ", %lld known", (long long)s->known);
    ok = ok && bytes_printf(out, ", %.1f t/s", rate(s));
    if (!last) {
        double left = time_left(s);
        ok = ok && bytes_printf(out, ", %lld running, %d pages", (long long)s->running, s->kv.pages);
        if (left >= 0) ok = ok && bytes_printf(out, ", %lld:%02d left", (long long)left / 60, (int)left % 60);
    } else {
        ok = ok && bytes_printf(out, ": prompts %lld tokens, %lld of them computed; generated %lld tokens in %.1f s; "
                                "longest gap %.1f ms, median step %.1f ms; %d pages at most, %.1f MB shared, %.0f %% "
                                "of their places unused", (long long)s->prompt_tokens, (long long)s->prefilled,
                                (long long)s->generated, s->seconds, s->longest_gap * 1e3, s->median_step * 1e3,
                                s->most_pages, (double)s->shared / 1e6, s->waste * 100);
        if (s->given_up) ok = ok && bytes_printf(out, "; %lld times a sequence gave its pages up, for %.1f ms at most, "
                                                 "%lld rows computed again", (long long)s->given_up,
                                                 s->longest_wait * 1e3, (long long)s->repeated);
        if (s->kv.bytes_out) ok = ok && bytes_printf(out, "; %.1f MB of pages moved away, %.1f MB back",
                                                     (double)s->kv.bytes_out / 1e6, (double)s->kv.bytes_in / 1e6);
    }
    return ok || fail(e, GEN_RUN, "cannot allocate memory for the progress line");
}
