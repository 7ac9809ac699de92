/* measure.c - perplexity, Kullback-Leibler divergence, and the file that keeps log-probabilities.
 *
 * The file, little-endian:
 *
 *     offset  bytes
 *     0       8      "GENLOGP\1"
 *     8       4      vocabulary
 *     12      4      tokens in a window, w
 *     16      8      windows
 *     24      8      zero
 *     32      32     SHA-256 of the next part
 *     64      4 * windows * w               token ids as the model got them
 *     ...     4 * windows * rows * vocab    float32 log-probabilities of the scored rows, rows = w - 1 - w/2
 */
#include "measure.h"

#include "json.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char magic[8] = "GENLOGP\1";

struct header {
    char magic[8];
    uint32_t vocab, window;
    uint64_t windows, zero;
    uint8_t sha256[SHA256_DIGEST_SIZE];
};
_Static_assert(sizeof(struct header) == 64, "the file's header has 64 bytes");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the file's header and numbers are written as they stand in memory"
#endif

struct run {
    const struct perplexity_options *o;
    int vocab;
    int32_t *input;                    /* [windows][window] tokens as the model gets them */
    int64_t window, windows, rows;     /* scored rows of a window */
    FILE *save, *base;
    char *final, *temporary;           /* the file that is named, and the one being written, which takes its place */
    float *logprob, *expected;         /* [vocab] of a row: this run's, and the base's */
    double sum, squares;               /* of the negative log-likelihoods */
    float *kl;                         /* [windows * rows] */
    int64_t scored, same_top;
    const int32_t *target;             /* the window being scored */
};

/* ---- the file of log-probabilities */

static void header_of(const struct run *r, struct header *h)
{
    struct sha256_ctx hash;
    *h = (struct header){ .vocab = (uint32_t)r->vocab, .window = (uint32_t)r->window, .windows = (uint64_t)r->windows };
    memcpy(h->magic, magic, sizeof magic);
    sha256_init(&hash);
    sha256_update(&hash, (size_t)(r->windows * r->window) * sizeof *r->input, (const uint8_t *)r->input);
    sha256_digest(&hash, sizeof h->sha256, h->sha256);
}

static bool cannot_save(const struct run *r, struct error *e)
{
    if (!r->o->save)
        return fail(e, GEN_RUN, "cannot write the log-probabilities to compare with to a temporary file: %s",
                    strerror(errno));
    return fail(e, GEN_RUN, "cannot write --save-logits %s: %s", r->o->save, strerror(errno));
}

static bool cannot_compare(const struct run *r, struct error *e)
{
    return fail(e, GEN_RUN, "cannot read %s%s: %s", r->o->base ? "--kl-base " : "the temporary file",
                r->o->base ? r->o->base : "", strerror(errno));
}

/* Opens what is written: a temporary file beside the one that is named, links followed, which takes its place when all
 * is well; what is there and is no regular file (a device, a pipe) is written to as it is. */
static int save_target(struct run *r, struct error *e)
{
    struct stat st;
    if (stat(r->o->save, &st) == 0 && !S_ISREG(st.st_mode)) return open(r->o->save, O_WRONLY | O_CLOEXEC);
    r->final = realpath(r->o->save, NULL);
    if (!r->final) r->final = strdup(r->o->save);
    size_t n = r->final ? strlen(r->final) + 8 : 0;
    r->temporary = r->final ? alloc_zeroed(n, 1, "a file name", e) : NULL;
    if (!r->temporary) return -1;
    snprintf(r->temporary, n, "%s.XXXXXX", r->final);
    int file = mkstemp(r->temporary);
    if (file < 0) {
        free(r->temporary);
        r->temporary = NULL;
        return -1;
    }
    mode_t mask = umask(0);
    umask(mask);
    fchmod(file, 0666 & ~mask);
    return file;
}

static bool save_open(struct run *r, struct error *e)
{
    struct header h;
    size_t count = (size_t)(r->windows * r->window);
    r->save = r->o->save_to;
    if (r->save) rewind(r->save);
    else {
        int file = save_target(r, e);
        if (file < 0) return cannot_save(r, e);
        r->save = fdopen(file, "wb");
        if (!r->save) {
            close(file);
            return cannot_save(r, e);
        }
    }
    header_of(r, &h);
    return (fwrite(&h, sizeof h, 1, r->save) == 1 && fwrite(r->input, sizeof *r->input, count, r->save) == count)
        || cannot_save(r, e);
}

/* Gives the file its name once it is whole. */
static bool save_finish(struct run *r, struct error *e)
{
    bool ok = fflush(r->save) == 0 && (!r->temporary || fsync(fileno(r->save)) == 0);
    if (!r->o->save_to) ok = fclose(r->save) == 0 && ok;
    r->save = NULL;
    if (!ok || (r->temporary && rename(r->temporary, r->final) != 0)) return cannot_save(r, e);
    free(r->temporary);
    r->temporary = NULL;
    return true;
}

/* Opens the base and checks that it is whole and of the same text, windows and vocabulary. */
static bool base_open(struct run *r, struct error *e)
{
    const char *name = r->o->base ? r->o->base : "(a temporary file)";
    struct header h, want;
    struct stat st;
    r->base = r->o->base_from ? r->o->base_from : fopen(name, "rbe");
    if (r->o->base_from) rewind(r->base);
    if (!r->base || fstat(fileno(r->base), &st) != 0)
        return fail(e, errno == ENOMEM ? GEN_RUN : GEN_USAGE, "cannot read --kl-base %s: %s", name, strerror(errno));
    if (!S_ISREG(st.st_mode)) return fail(e, GEN_USAGE, "--kl-base %s is not a regular file", name);
    if (fread(&h, sizeof h, 1, r->base) != 1 || memcmp(h.magic, magic, sizeof magic) != 0)
        return fail(e, GEN_USAGE, "--kl-base %s is no file that --save-logits wrote", name);
    header_of(r, &want);
    if (h.vocab != want.vocab)
        return fail(e, GEN_USAGE, "--kl-base %s is of a vocabulary of %u tokens, but the model has %u", name, h.vocab,
                    want.vocab);
    if (h.window != want.window)
        return fail(e, GEN_USAGE, "--kl-base %s has windows of %u tokens, but this run's have %u: give -c %u", name,
                    h.window, want.window, h.window);
    if (h.windows != want.windows)
        return fail(e, GEN_USAGE, "--kl-base %s has %llu windows, but this run has %llu: give the same text and "
                                  "--chunks", name, (unsigned long long)h.windows, (unsigned long long)want.windows);
    if (memcmp(&h, &want, sizeof h) != 0)
        return fail(e, GEN_USAGE, "--kl-base %s was made from other tokens: give the same text", name);
    size_t tokens = (size_t)(r->windows * r->window) * 4, row = (size_t)r->vocab * 4, whole;
    if (!size_mul(row, (size_t)(r->windows * r->rows), &whole) || !size_add(whole, tokens + sizeof h, &whole)
        || (uint64_t)st.st_size != whole)
        return fail(e, GEN_USAGE, "--kl-base %s has %lld bytes instead of %zu: it is incomplete or damaged", name,
                    (long long)st.st_size, whole);
    return fseeko(r->base, (off_t)(tokens + sizeof h), SEEK_SET) == 0
        || cannot_compare(r, e);
}

/* ---- scoring */

/* logprob = log softmax(logits); the place of the largest, or -1 when a logit is NaN or +inf or all are -inf. */
static int log_softmax(const float *logits, int n, float *logprob)
{
    int best = 0;
    double sum = 0;
    bool sound = true;
    for (int i = 0; i < n; i++) {
        sound &= logits[i] < INFINITY;               /* false for NaN */
        if (logits[i] > logits[best]) best = i;
    }
    double max = logits[best];
    if (!sound || !(max > -INFINITY)) return -1;
    for (int i = 0; i < n; i++) sum += exp(logits[i] - max);
    double log_sum = max + log(sum);
    for (int i = 0; i < n; i++) logprob[i] = (float)(logits[i] - log_sum);
    return best;
}

/* KL(base || this) of one row, and whether both have the same most likely token. */
static bool compare(struct run *r, int best, struct error *e)
{
    if (fread(r->expected, 4, (size_t)r->vocab, r->base) != (size_t)r->vocab)
        return cannot_compare(r, e);
    double kl = 0;
    int base_best = 0;
    for (int i = 0; i < r->vocab; i++) {
        double p = exp(r->expected[i]);
        if (p != 0) kl += p * ((double)r->expected[i] - r->logprob[i]);
        if (r->expected[i] > r->expected[base_best]) base_best = i;
    }
    if (!(kl > -1e-3 && kl < INFINITY))
        return fail(e, GEN_RUN, "--kl-base %s: the divergence of row %lld is %g, so it holds no log-probabilities",
                    r->o->base, (long long)r->scored, kl);
    r->kl[r->scored] = (float)kl;
    r->same_top += base_best == best;
    return true;
}

static bool score(void *user, int64_t pos, const float *logits, struct error *e)
{
    struct run *r = user;
    if (r->o->stop && *r->o->stop) return fail(e, GEN_RUN, "interrupted");
    int best = log_softmax(logits, r->vocab, r->logprob);
    double nll = best < 0 ? NAN : -(double)r->logprob[r->target[pos + 1]];
    if (!(nll < INFINITY))
        return fail(e, GEN_RUN, "the logits of position %lld in window %lld give the next token no finite probability",
                    (long long)pos, (long long)(r->scored / r->rows));
    r->sum += nll;
    r->squares += nll * nll;
    if (r->base && !compare(r, best, e)) return false;
    if (r->save && fwrite(r->logprob, 4, (size_t)r->vocab, r->save) != (size_t)r->vocab)
        return cannot_save(r, e);
    r->scored++;
    if (r->o->progress) r->o->progress("perplexity", (double)r->scored / (double)(r->windows * r->rows));
    return true;
}

static bool score_windows(struct run *r, struct engine *g, const int32_t *tokens, struct error *e)
{
    struct sequence *s;
    if (!sequence_open(&s, g, e)) return false;
    bool ok = true;
    for (int64_t i = 0; ok && i < r->windows; i++) {
        r->target = tokens + i * r->window;
        ok = sequence_score(s, r->input + i * r->window, r->window - 1, r->window / 2, score, r, e);
    }
    sequence_close(s);
    return ok;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void summarise(struct perplexity *out, struct run *r)
{
    double n = (double)r->scored, mean = r->sum / n, variance = r->squares / n - mean * mean;
    *out = (struct perplexity){ .windows = r->windows, .tokens = r->scored, .nll = mean, .value = exp(mean) };
    out->error = n > 1 && variance > 0 ? sqrt(variance / (n - 1)) : 0;
    if (!r->base) return;
    double sum = 0;
    for (int64_t i = 0; i < r->scored; i++) sum += r->kl[i];
    qsort(r->kl, (size_t)r->scored, sizeof *r->kl, by_value);
    out->compared = true;
    out->kl_mean = sum / n;
    out->kl_p99 = r->kl[(int64_t)(0.99 * (n - 1) + 0.5)];
    out->top1_agreement = (double)r->same_top / n;
}

static bool prepare(struct run *r, const struct tokenizer *t, const int32_t *tokens, size_t n, struct error *e)
{
    r->window = r->o->window;
    r->windows = (int64_t)n / r->window;
    if (!r->windows)
        return fail(e, GEN_USAGE, "the text has %zu tokens, but one window has %lld: give a longer text or a smaller "
                                  "-c", n, (long long)r->window);
    if (r->o->chunks && r->o->chunks < r->windows) r->windows = r->o->chunks;
    r->rows = r->window - 1 - r->window / 2;
    r->logprob = alloc_zeroed((size_t)r->vocab, 4, "log-probabilities", e);
    r->expected = r->logprob ? alloc_zeroed((size_t)r->vocab, 4, "log-probabilities", e) : NULL;
    r->kl = r->expected ? alloc_zeroed((size_t)(r->windows * r->rows), 4, "divergences", e) : NULL;
    r->input = r->kl ? alloc_zeroed((size_t)(r->windows * r->window), sizeof *r->input, "the text's tokens", e) : NULL;
    if (!r->input) return false;
    memcpy(r->input, tokens, (size_t)(r->windows * r->window) * sizeof *r->input);
    for (int64_t i = 0; tokenizer_adds_bos(t) && i < r->windows; i++) r->input[i * r->window] = tokenizer_bos(t);
    return true;
}

bool perplexity_measure(struct perplexity *out, struct engine *g, const struct tokenizer *t, const int32_t *tokens,
                        size_t n, const struct perplexity_options *o, struct error *e)
{
    struct run r = { .o = o, .vocab = engine_model(g)->n_vocab };
    bool saves = o->save || o->save_to;
    bool ok = prepare(&r, t, tokens, n, e) && ((!o->base && !o->base_from) || base_open(&r, e))
           && (!saves || save_open(&r, e)) && score_windows(&r, g, tokens, e) && (!saves || save_finish(&r, e));
    if (ok) summarise(out, &r);
    if (r.save && !o->save_to) fclose(r.save);
    if (r.temporary) unlink(r.temporary);
    if (r.base && !o->base_from) fclose(r.base);
    free(r.temporary);
    free(r.final);
    free(r.input);
    free(r.kl);
    free(r.expected);
    free(r.logprob);
    return ok;
}

/* ---- printing */

void divergence_put(struct json_t **object, const struct perplexity *p)
{
    if (!p->compared) return;
    json_put(object, "kl_mean", json_real(p->kl_mean));
    json_put(object, "kl_p99", json_real(p->kl_p99));
    json_put(object, "top1_agreement", json_real(p->top1_agreement));
}

bool perplexity_print(struct bytes *out, const struct perplexity *p, int64_t window, bool json, struct error *e)
{
    if (json) {
        json_t *value = isfinite(p->value) ? json_real(p->value) : json_null();
        json_t *object = json_pack("{s:I, s:f, s:o}", "tokens", (json_int_t)p->tokens, "nll", p->nll, "perplexity",
                                   value);
        divergence_put(&object, p);
        return json_line(out, object, e);
    }
    bool ok = bytes_printf(out, "perplexity %.4f +/- %.4f (%.6f nats per token; %lld tokens in %lld windows of %lld)\n",
                           p->value, p->value * p->error, p->nll, (long long)p->tokens, (long long)p->windows,
                           (long long)window);
    if (ok && p->compared)
        ok = bytes_printf(out, "KL divergence %.6f mean, %.6f 99th percentile; same most likely token %.2f %%\n",
                          fmax(p->kl_mean, 0), fmax(p->kl_p99, 0), 100 * p->top1_agreement);
    return ok || fail(e, GEN_RUN, "cannot allocate memory for the result");
}
