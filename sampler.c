/* sampler.c - filters and draws over one array of logits.
 *
 * Order: bias, penalties, top-k, typical-p, top-p, min-p, temperature, draw; each filter looks at the softmax (at
 * temperature 1) of what the filters before it left.
 *
 * No path sorts the vocabulary. One pass takes the maximum of every block of BLOCK logits. From these follow
 *   - top-k: the k-th largest block maximum bounds the k-th largest logit from below, so only the few blocks that reach
 *     it are looked into (gather);
 *   - without top-k: tokens are proposed by rejection, a block in proportion to its maximum's weight and a token evenly
 *     inside it, accepted with the weight it really has; never more than BLOCK proposals are expected. Whether a
 *     token is inside top-p is one masked sum over the better ones (pick_by_rejection).
 * Only + - * and comparisons of IEEE floats decide, in one fixed order, so every machine draws the same token. */
#include "sampler.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 128 };                  /* logits per block: a multiple of 8 */

const struct sampler_options sampler_defaults = {
    .temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .typical_p = 1,
    .repeat_penalty = 1, .repeat_last_n = 64,
};

struct sampler {
    struct sampler_options o;          /* bias points to a copy */
    int n, n_blocks;                   /* vocabulary; blocks that cover it */
    float *edited;                     /* [n] logits after bias and penalties */
    float *peak;                       /* [n_blocks, padded with -inf to a multiple of 4] maximum of each block */
    float max;                         /* of all logits */
    float tail[BLOCK];                 /* the last block when it is not full, padded with -inf */
    double *reach;                     /* [n_blocks] running sum of the blocks' weights (pick_by_rejection) */
    uint64_t *list;                    /* [max(n, n_blocks)] candidates, see pack() */
    int32_t *count;                    /* [n] uses of a token in the history; all 0 between calls */
    int32_t *seen;                     /* [n] the tokens whose count is not 0 */
};

/* ---- weights: 2^y without a library, the same bits everywhere */

typedef float f32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));

static const float log2e = 1.44269504f;

static inline f32x4 load4(const float *p)
{
    f32x4 v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* 2^y for y <= 0 to 1.5e-7 relative; exactly 0 for y <= -125, -inf and NaN. Adding 1.5 * 2^23 rounds y to an integer in
 * the low bits of the sum; the rest, in [-1/2, 1/2], goes through a polynomial of least relative error. */
static inline f32x4 exp2_4(f32x4 y)
{
    const f32x4 round = {0x1.8p23f, 0x1.8p23f, 0x1.8p23f, 0x1.8p23f};
    f32x4 whole = y + round, f = y - (whole - round);
    f32x4 p = (((0.0013276471f * f + 0.009675541f) * f + 0.05550713f) * f + 0.2402212f) * f + 0.69314694f;
    u32x4 bits = (u32x4)(p * f + 1.0f) + ((u32x4)whole << 23);
    return (f32x4)(bits & (u32x4)(y > -125.0f));
}

/* e^d for d <= 0, or with c = log2e / T the weight e^(d/T). */
static inline float weight(float d, float c)
{
    float y = d * c;
    return exp2_4((f32x4){y, y, y, y})[0];
}

static float temperature_scale(float temperature)
{
    float c = log2e / temperature;
    return c <= FLT_MAX ? c : FLT_MAX;   /* 0 * c stays 0 */
}

/* ---- random numbers: SplitMix64 (Steele, Lea, Flood 2014), started at a hash of (seed, index) */

struct random { uint64_t state; };

static uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static struct random random_at(uint64_t seed, uint64_t index)
{
    return (struct random){mix64(mix64(seed + 0x9e3779b97f4a7c15u) ^ index)};
}

static uint64_t random_bits(struct random *r)
{
    return mix64(r->state += 0x9e3779b97f4a7c15u);
}

static double uniform(struct random *r)      /* [0, 1), 53 bits */
{
    return (double)(random_bits(r) >> 11) * 0x1p-53;
}

/* ---- opening */

static bool option(struct error *e, bool ok, const char *name, const char *range, double value)
{
    return ok || fail(e, GEN_USAGE, "--%s must be %s, not %g", name, range, value);
}

static bool options_are_valid(const struct sampler_options *o, int n_vocab, struct error *e)
{
    bool ok = option(e, isfinite(o->temperature) && o->temperature >= 0, "temp", "0 or a positive number",
                     o->temperature)
           && option(e, o->top_k >= 0, "top-k", "0 (off) or a positive number", o->top_k)
           && option(e, o->top_p >= 0 && o->top_p <= 1, "top-p", "between 0 and 1", o->top_p)
           && option(e, isfinite(o->min_p) && o->min_p >= 0, "min-p", "0 (off) or a positive number", o->min_p)
           && option(e, o->typical_p >= 0 && o->typical_p <= 1, "typical-p", "between 0 and 1", o->typical_p)
           && option(e, isfinite(o->repeat_penalty) && o->repeat_penalty > 0, "repeat-penalty", "a positive number",
                     o->repeat_penalty)
           && option(e, o->repeat_last_n >= -1, "repeat-last-n", "-1 (all), 0 (off) or a number of tokens",
                     o->repeat_last_n)
           && option(e, isfinite(o->presence_penalty), "presence-penalty", "a finite number", o->presence_penalty)
           && option(e, isfinite(o->frequency_penalty), "frequency-penalty", "a finite number", o->frequency_penalty);
    for (size_t i = 0; ok && i < o->n_bias; i++) {
        if (o->bias[i].id < 0 || o->bias[i].id >= n_vocab)
            return fail(e, GEN_USAGE, "--logit-bias names token %d, but the vocabulary has ids 0 to %d",
                        (int)o->bias[i].id, n_vocab - 1);
        ok = option(e, o->bias[i].bias < INFINITY, "logit-bias", "a number or -inf", o->bias[i].bias);
    }
    return ok;
}

bool sampler_open(struct sampler **out, const struct sampler_options *o, int n_vocab, struct error *e)
{
    *out = NULL;
    if (n_vocab < 1 || n_vocab > 1 << 30)
        return fail(e, GEN_RUN, "cannot sample from a vocabulary of %d tokens", n_vocab);
    if (!options_are_valid(o, n_vocab, e))
        return false;
    struct sampler *s = alloc_zeroed(1, sizeof *s, "the sampler", e);
    if (!s)
        return false;
    size_t n = (size_t)n_vocab, n_blocks = (n + BLOCK - 1) / BLOCK, padded = (n_blocks + 3) & ~(size_t)3;
    struct logit_bias *bias = alloc_zeroed(o->n_bias + 1, sizeof *bias, "the logit biases", e);
    s->o = *o;
    s->o.bias = bias;
    s->n = n_vocab;
    s->n_blocks = (int)n_blocks;
    if (!bias || !(s->edited = alloc_zeroed(n, sizeof *s->edited, "the sampler's logits", e))
        || !(s->peak = alloc_zeroed(padded, sizeof *s->peak, "the sampler's blocks", e))
        || !(s->reach = alloc_zeroed(padded, sizeof *s->reach, "the sampler's blocks", e))
        || !(s->list = alloc_zeroed(n, sizeof *s->list, "the sampler's candidates", e))
        || !(s->count = alloc_zeroed(n, sizeof *s->count, "the sampler's counts", e))
        || !(s->seen = alloc_zeroed(n, sizeof *s->seen, "the sampler's counts", e))) {
        sampler_close(s);
        return false;
    }
    if (o->n_bias)
        memcpy(bias, o->bias, o->n_bias * sizeof *bias);
    for (size_t b = n_blocks; b < padded; b++)
        s->peak[b] = -INFINITY;
    for (int i = 0; i < BLOCK; i++)
        s->tail[i] = -INFINITY;
    *out = s;
    return true;
}

void sampler_close(struct sampler *s)
{
    if (!s)
        return;
    free((void *)s->o.bias);
    free(s->edited);
    free(s->peak);
    free(s->reach);
    free(s->list);
    free(s->count);
    free(s->seen);
    free(s);
}

/* ---- bias and penalties */

/* Repetition penalty of Keskar et al. 2019 (CTRL), multiplied where the logit is negative so that it never rewards;
 * presence and frequency penalties as in OpenAI's interface. A finite logit stays finite. */
static float penalised(const struct sampler_options *o, float logit, int count)
{
    if (!isfinite(logit))
        return logit;
    double v = logit <= 0 ? (double)logit * o->repeat_penalty : (double)logit / o->repeat_penalty;
    v -= (double)count * o->frequency_penalty + o->presence_penalty;
    return (float)fmax(-FLT_MAX, fmin(FLT_MAX, v));
}

static bool penalises(const struct sampler_options *o)
{
    return o->repeat_penalty != 1 || o->presence_penalty != 0 || o->frequency_penalty != 0;
}

/* The logits that the filters see: the caller's own array when nothing is to be changed. */
static const float *edit(struct sampler *s, const float *logits, const int32_t *history, size_t n_history)
{
    const struct sampler_options *o = &s->o;
    if (o->repeat_last_n >= 0 && n_history > (size_t)o->repeat_last_n) {
        history += n_history - (size_t)o->repeat_last_n;
        n_history = (size_t)o->repeat_last_n;
    }
    if (!penalises(o))
        n_history = 0;
    if (n_history == 0 && o->n_bias == 0)
        return logits;
    float *x = s->edited;
    memcpy(x, logits, (size_t)s->n * sizeof *x);
    for (size_t i = 0; i < o->n_bias; i++)
        x[o->bias[i].id] += o->bias[i].bias;
    int n_seen = 0;
    for (size_t i = 0; i < n_history; i++) {
        int32_t id = history[i];
        if (id >= 0 && id < s->n && s->count[id]++ == 0)
            s->seen[n_seen++] = id;
    }
    for (int i = 0; i < n_seen; i++) {
        int32_t id = s->seen[i];
        x[id] = penalised(o, x[id], s->count[id]);
        s->count[id] = 0;
    }
    return x;
}

/* ---- blocks */

static const float *block(const struct sampler *s, const float *x, int b)
{
    return (b + 1) * BLOCK <= s->n ? x + b * BLOCK : s->tail;
}

static inline f32x4 max4(f32x4 a, f32x4 b)
{
    u32x4 m = (u32x4)(a > b);
    return (f32x4)(((u32x4)a & m) | ((u32x4)b & ~m));
}

/* Fills tail, peak and max. False when a logit is NaN. */
static bool survey(struct sampler *s, const float *x)
{
    int rest = s->n % BLOCK;
    memcpy(s->tail, x + s->n - rest, (size_t)rest * sizeof *x);
    u32x4 nan = {0};
    s->max = -INFINITY;
    for (int b = 0; b < s->n_blocks; b++) {
        const float *p = block(s, x, b);
        f32x4 m = load4(p), m2 = load4(p + 4);
        for (int i = 0; i < BLOCK; i += 8) {
            f32x4 v = load4(p + i), v2 = load4(p + i + 4);
            nan |= (u32x4)(v != v) | (u32x4)(v2 != v2);
            m = max4(v, m);
            m2 = max4(v2, m2);
        }
        m = max4(m, m2);
        float a = m[0] > m[1] ? m[0] : m[1], c = m[2] > m[3] ? m[2] : m[3];
        s->peak[b] = a > c ? a : c;
        s->max = s->max > s->peak[b] ? s->max : s->peak[b];
    }
    return !(nan[0] | nan[1] | nan[2] | nan[3]);
}

static bool explain(const struct sampler *s, const float *x, uint64_t index, struct error *e)
{
    unsigned long long at = index;
    for (int i = 0; i < s->n; i++)
        if (isnan(x[i]) || x[i] == INFINITY)
            return fail(e, GEN_RUN, "the logit of token %d at position %llu is %s, so no next token can be chosen: "
                        "the model file is damaged or its numbers overflow", i, at,
                        isnan(x[i]) ? "not a number" : "infinite");
    return fail(e, GEN_RUN, "every token at position %llu has probability 0, so no next token can be chosen: lift some "
                "of the --logit-bias values", at);
}

/* Weights e^(x - max) summed over a block: all of them, and those with x >= t. */
static void block_mass(const float *p, float max, float t, double *all, double *above)
{
    f32x4 sum = {0}, sum2 = {0}, sum_above = {0};
    for (int i = 0; i < BLOCK; i += 8) {
        f32x4 v = load4(p + i), w = exp2_4((v - max) * log2e);
        f32x4 v2 = load4(p + i + 4), w2 = exp2_4((v2 - max) * log2e);
        sum += w;
        sum2 += w2;
        sum_above += (f32x4)((u32x4)w & (u32x4)(v >= t)) + (f32x4)((u32x4)w2 & (u32x4)(v2 >= t));
    }
    sum += sum2;
    *all += (double)((sum[0] + sum[1]) + (sum[2] + sum[3]));
    *above += (double)((sum_above[0] + sum_above[1]) + (sum_above[2] + sum_above[3]));
}

/* ---- lists of candidates */

/* A candidate as one integer whose order is "greater key first, then lower id". */
static uint64_t pack(float key, int32_t id)
{
    uint32_t u;
    key += 0.0f;                       /* -0 becomes 0 */
    memcpy(&u, &key, sizeof u);
    u ^= u >> 31 ? 0xffffffffu : 0x80000000u;
    return (uint64_t)u << 32 | (uint32_t)~id;
}

static int32_t packed_id(uint64_t c)
{
    return (int32_t)~(uint32_t)c;
}

/* Moves the greatest candidates of c[0..n) to the front (in any order): the fewest that are `count` or weigh `mass`, at
 * least one, at most n; returns how many. Quickselect; weights are e^(x[id] - max). */
static size_t keep_best(const float *x, float max, uint64_t *c, size_t n, size_t count, double mass)
{
    struct random r = {n};
    size_t lo = 0, hi = n;             /* c[0..lo) is kept, c[hi..n) is not */
    while (lo < hi) {
        size_t at = lo + (size_t)(random_bits(&r) % (hi - lo)), last = hi - 1, m = lo;
        uint64_t pivot = c[at];
        c[at] = c[last];
        for (size_t i = lo; i < last; i++) {
            uint64_t v = c[i];
            c[i] = c[m];
            c[m] = v;
            m += v > pivot;
        }
        c[last] = c[m];
        c[m] = pivot;
        double sum = 0;
        for (size_t i = lo; mass < INFINITY && i < m; i++)
            sum += (double)weight(x[packed_id(c[i])] - max, log2e);
        if (m > lo && (m >= count || sum >= mass)) {
            hi = m;
            continue;
        }
        if (mass < INFINITY)
            mass -= sum + (double)weight(x[packed_id(pivot)] - max, log2e);
        lo = m + 1;
        if (lo >= count || mass <= 0)
            break;
    }
    return lo;
}

/* The k best logits that are not -inf; k <= 0 means all. */
static size_t gather(struct sampler *s, const float *x, int k)
{
    float t = -FLT_MAX;
    if (k > 0 && k < s->n_blocks) {
        for (int b = 0; b < s->n_blocks; b++)
            s->list[b] = pack(s->peak[b], b);
        uint64_t least = UINT64_MAX;
        for (size_t i = keep_best(x, s->max, s->list, (size_t)s->n_blocks, (size_t)k, INFINITY); i-- > 0;)
            least = s->list[i] < least ? s->list[i] : least;
        float kth = s->peak[packed_id(least)];
        t = kth > t ? kth : t;
    }
    size_t n = 0;
    for (int b = 0; b < s->n_blocks; b++) {
        if (!(s->peak[b] >= t))
            continue;
        int end = (b + 1) * BLOCK < s->n ? (b + 1) * BLOCK : s->n;
        for (int i = b * BLOCK; i < end; i++)
            if (x[i] >= t)
                s->list[n++] = pack(x[i], i);
    }
    return k > 0 && (size_t)k < n ? keep_best(x, s->max, s->list, n, (size_t)k, INFINITY) : n;
}

/* Puts a short list in its order, greatest first. */
static void sort(uint64_t *c, size_t n)
{
    for (size_t i = 1; i < n; i++)
        for (size_t j = i; j > 0 && c[j] > c[j - 1]; j--) {
            uint64_t v = c[j];
            c[j] = c[j - 1];
            c[j - 1] = v;
        }
}

static double list_mass(const struct sampler *s, const float *x, size_t n, float c)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)weight(x[packed_id(s->list[i])] - s->max, c);
    return sum;
}

/* Locally typical sampling (Meister et al. 2022): the tokens whose surprise -log p is nearest to the entropy H. With
 * d = x - max, both contain log Z, so that the distance is |E[d] - d|. */
static size_t keep_typical(struct sampler *s, const float *x, size_t n)
{
    double sum = 0, mean = 0;
    for (size_t i = 0; i < n; i++) {
        float d = x[packed_id(s->list[i])] - s->max;
        double w = (double)weight(d, log2e);
        sum += w;
        mean += w > 0 ? w * (double)d : 0;     /* d may be -inf */
    }
    mean /= sum;
    for (size_t i = 0; i < n; i++) {
        int32_t id = packed_id(s->list[i]);
        s->list[i] = pack((float)-fabs(mean - (double)(x[id] - s->max)), id);
    }
    n = keep_best(x, s->max, s->list, n, n, s->o.typical_p * sum);
    for (size_t i = 0; i < n; i++)
        s->list[i] = pack(x[packed_id(s->list[i])], packed_id(s->list[i]));
    return n;
}

static float min_p_threshold(float max, float min_p)
{
    return (float)((double)max + log((double)min_p));
}

/* From the n candidates that top-k has left; of x only their logits are read. */
static int32_t pick_from_list(struct sampler *s, const float *x, size_t n, struct random *r)
{
    const struct sampler_options *o = &s->o;
    if (o->typical_p < 1) {
        n = keep_typical(s, x, n);
        uint64_t best = 0;
        for (size_t i = 0; i < n; i++)
            best = s->list[i] > best ? s->list[i] : best;
        s->max = x[packed_id(best)];
    }
    if (o->top_p < 1)
        n = keep_best(x, s->max, s->list, n, n, o->top_p * list_mass(s, x, n, log2e));
    if (o->min_p >= 1) {
        n = keep_best(x, s->max, s->list, n, 1, INFINITY);
    } else if (o->min_p > 0) {
        float t = min_p_threshold(s->max, o->min_p);
        size_t kept = 0;
        for (size_t i = 0; i < n; i++)
            if (x[packed_id(s->list[i])] >= t)
                s->list[kept++] = s->list[i];
        n = kept;
    }
    float c = temperature_scale(o->temperature);
    double target = uniform(r) * list_mass(s, x, n, c);
    int32_t id = -1;                   /* stays at the last one of positive weight if rounding runs past the end */
    for (size_t i = 0; i < n && target >= 0; i++) {
        double w = (double)weight(x[packed_id(s->list[i])] - s->max, c);
        target -= w;
        if (w > 0)
            id = packed_id(s->list[i]);
    }
    return id;
}

/* ---- draws without a list */

/* The set of tokens that come before (t, id) in the order "greater logit first, then lower id". */
struct limit { float t; int32_t id; };

static bool is_before(const float *x, int32_t i, struct limit l)
{
    return x[i] > l.t || (x[i] == l.t && i < l.id);
}

/* A token before `l`, drawn by its weight at the options' temperature. A block is worth BLOCK times its best weight
 * here; what its tokens lack is rejected. */
static int32_t propose(struct sampler *s, const float *x, struct limit l, struct random *r)
{
    float c = temperature_scale(s->o.temperature);
    double total = 0;
    for (int b = 0; b < s->n_blocks; b += 4) {
        f32x4 w = exp2_4((load4(s->peak + b) - s->max) * c);
        for (int j = 0; j < 4; j++) {
            float top = s->peak[b + j];
            if (top > l.t || (top == l.t && (b + j) * BLOCK < l.id))
                total += (double)w[j];
            s->reach[b + j] = total;
        }
    }
    for (;;) {
        double target = uniform(r) * total;
        int lo = 0, hi = s->n_blocks - 1;     /* the first block whose reach exceeds the target */
        while (lo < hi) {
            int mid = (lo + hi) / 2;
            if (s->reach[mid] > target)
                hi = mid;
            else
                lo = mid + 1;
        }
        int32_t i = lo * BLOCK + (int32_t)(random_bits(r) % BLOCK);
        if (i < s->n && is_before(x, i, l)
            && uniform(r) * (double)weight(s->peak[lo] - s->max, c) < (double)weight(x[i] - s->max, c))
            return i;
    }
}

/* Whether i is in the top-p set, that is, whether the tokens before it weigh less than top_p of all. *all is the weight
 * of all tokens, or 0 while that is not known; it is known whenever the answer is no. */
static bool inside_top_p(const struct sampler *s, const float *x, int32_t i, double *all)
{
    double p = s->o.top_p, sum = 0, before = 0, unused = 0;
    float after = nextafterf(x[i], INFINITY);
    int own = i / BLOCK;
    for (int b = 0; b < s->n_blocks; b++) {
        if (s->peak[b] < x[i])
            continue;
        if (b != own) {
            block_mass(block(s, x, b), s->max, b < own ? x[i] : after, &sum, &before);
            continue;
        }
        block_mass(block(s, x, b), s->max, INFINITY, &sum, &unused);
        for (int32_t j = b * BLOCK; j < (b + 1) * BLOCK && j < s->n; j++)
            if (is_before(x, j, (struct limit){x[i], i}))
                before += (double)weight(x[j] - s->max, log2e);
    }
    if (*all > 0)
        return before < p * *all;
    for (int b = 0; b < s->n_blocks && before >= p * sum; b++)
        if (s->peak[b] < x[i])
            block_mass(block(s, x, b), s->max, INFINITY, &sum, &unused);
    if (before < p * sum)
        return true;                   /* and what was not summed can only widen the set */
    *all = sum;
    return false;
}

/* The tokens that top-p and min-p leave are the first of the order in struct limit. A token proposed from a larger set
 * and found to be inside is drawn as it should; one that is outside shows a closer limit. */
static int32_t pick_by_rejection(struct sampler *s, const float *x, struct random *r)
{
    struct limit l = {-FLT_MAX, INT32_MAX};
    if (s->o.min_p > 0) {
        float t = min_p_threshold(s->max, s->o.min_p);
        l.t = t > l.t ? t : l.t;
    }
    if (s->o.top_p == 1)
        return propose(s, x, l, r);
    double all = 0;
    for (;;) {
        /* Tokens so light that n of them do not weigh 1 - top_p of all are outside; the best one alone weighs 1. */
        float t = (float)((double)s->max + log((1.0 - s->o.top_p) * fmax(all, 1) / s->n) - 0.001);
        if (t > l.t)
            l = (struct limit){t, INT32_MAX};
        int32_t i = propose(s, x, l, r);
        if (inside_top_p(s, x, i, &all))
            return i;
        l = (struct limit){x[i], i};
    }
}

/* ---- the interface */

static int32_t best_token(const struct sampler *s, const float *x)
{
    int32_t i = 0;
    while (s->peak[i / BLOCK] < s->max)
        i += BLOCK;
    while (x[i] < s->max)
        i++;
    return i;
}

/* Whatever the logits are, one is left: the best. */
static bool one_is_left(const struct sampler_options *o)
{
    return o->temperature == 0 || o->top_k == 1 || (o->typical_p >= 1 && (o->top_p == 0 || o->min_p >= 1));
}

int sampler_top(const struct sampler *s)
{
    const struct sampler_options *o = &s->o;
    if (penalises(o) || o->n_bias)
        return 0;
    if (one_is_left(o))
        return 1;
    return o->top_k > 0 && o->top_k < s->n && o->top_k <= SAMPLER_TOP ? o->top_k : 0;
}

int32_t sampler_pick(struct sampler *s, const float *logits, uint64_t index, const int32_t *history, size_t n_history,
                     struct error *e)
{
    const struct sampler_options *o = &s->o;
    const float *x = edit(s, logits, history, n_history);
    if (!survey(s, x) || !isfinite(s->max)) {
        explain(s, x, index, e);
        return -1;
    }
    if (one_is_left(o))
        return best_token(s, x);
    struct random r = random_at(o->seed, index);
    if (o->typical_p >= 1 && (o->top_k == 0 || o->top_k >= s->n))
        return pick_by_rejection(s, x, &r);
    size_t n = gather(s, x, o->top_k);
    if (n <= SAMPLER_TOP)
        sort(s->list, n);              /* as sampler_pick_among has it */
    return pick_from_list(s, x, n, &r);
}

int32_t sampler_pick_among(struct sampler *s, const int32_t *ids, const float *logits, int n, uint64_t index)
{
    if (one_is_left(&s->o))
        return ids[0];
    struct random r = random_at(s->o.seed, index);
    s->max = logits[0];
    for (int i = 0; i < n; i++) {
        s->edited[ids[i]] = logits[i];
        s->list[i] = pack(logits[i], ids[i]);
    }
    return pick_from_list(s, s->edited, (size_t)n, &r);
}

void sampler_logprobs(struct sampler *s, const float *logits, int32_t token, float *logprob,
                      struct token_logprob *best, int n)
{
    bool ok = survey(s, logits) && isfinite(s->max);
    double sum = 0, unused = 0;
    for (int b = 0; ok && b < s->n_blocks; b++)
        block_mass(block(s, logits, b), s->max, INFINITY, &sum, &unused);
    double log_sum = ok ? (double)s->max + log(sum) : NAN;
    *logprob = (float)((double)logits[token] - log_sum);
    size_t found = ok && n > 0 ? gather(s, logits, n) : 0;
    sort(s->list, found);
    for (int i = 0; i < n; i++) {
        best[i] = (struct token_logprob){-1, -INFINITY};
        if ((size_t)i < found) {
            int32_t id = packed_id(s->list[i]);
            best[i] = (struct token_logprob){id, (float)((double)logits[id] - log_sum)};
        }
    }
}
