/* model.c - the architecture table, and binding a GGUF file's tensors and numbers to struct model. */
#include "model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What tells one architecture from another. The tensors that a file may leave out are found by looking. */
struct arch {
    const char *name;                  /* general.architecture, and the prefix of its keys */
    enum rope_order rope_order;
    enum activation act;
    bool fused;                        /* attn_qkv, and ffn_up holding gate and up */
    bool qk_norm;                      /* q and k heads are normalised before RoPE */
    bool post_norm;                    /* attention and feed-forward outputs are normalised before they are added */
    bool qkv_bias;                     /* q, k and v must have a bias */
    bool embd_sqrt;                    /* embeddings are multiplied by sqrt(n_embd) */
    int local_of;                      /* of each `local_of` layers all but the last have a window; 1 = all, 0 = none */
    int default_window;                /* where the file names none */
    double local_base;                 /* RoPE base of windowed layers where the file names none; 0 = the global one */
    double attn_cap, logit_cap;        /* soft caps where the file names none; 0 = none */
    int wide_layers;                   /* with this many layers scores are scaled by n_embd / n_head (27B Gemmas) */
};

static const struct arch arches[] = {
    { "llama",  ROPE_PAIRS,  ACT_SILU, .local_of = 0 },
    { "qwen2",  ROPE_HALVES, ACT_SILU, .qkv_bias = true },
    { "qwen3",  ROPE_HALVES, ACT_SILU, .qk_norm = true },
    { "phi3",   ROPE_HALVES, ACT_SILU, .fused = true, .local_of = 1 },
    { "gemma2", ROPE_HALVES, ACT_GELU, .post_norm = true, .embd_sqrt = true, .local_of = 2, .default_window = 4096,
      .attn_cap = 50, .logit_cap = 30, .wide_layers = 46 },
    { "gemma3", ROPE_HALVES, ACT_GELU, .qk_norm = true, .post_norm = true, .embd_sqrt = true, .local_of = 6,
      .local_base = 10000, .wide_layers = 62 },
};
enum { N_ARCH = sizeof arches / sizeof *arches };

const char *model_architectures(void)
{
    static char list[200];
    if (!list[0])
        for (int i = 0; i < N_ARCH; i++) {
            size_t n = strlen(list);
            snprintf(list + n, sizeof list - n, "%s%s", i ? ", " : "", arches[i].name);
        }
    return list;
}

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

/* The key "<architecture>.<suffix>" */
static const char *arch_key(const struct model *m, const char *suffix, char buf[128])
{
    snprintf(buf, 128, "%s.%s", m->arch->name, suffix);
    return buf;
}

/* An integer in [lo, hi]. *value holds the default (-1: the key must be there). */
static bool get_int(const struct model *m, const char *suffix, int64_t lo, int64_t hi, int *value, struct error *e)
{
    char key[128];
    uint64_t v = UINT64_MAX;
    arch_key(m, suffix, key);
    const struct gguf_value *kv = gguf_find(m->file, key);
    if (kv && kv->type == GGUF_ARRAY)
        return fail(e, GEN_MODEL, "%s: %s differs from layer to layer, which is not supported", gguf_path(m->file),
                    key);
    if (!gguf_get_u64(m->file, key, &v, e)) return false;
    if (v == UINT64_MAX) {
        if (*value >= 0) return true;
        return fail(e, GEN_MODEL, "%s: %s is missing, so this is no complete %s model", gguf_path(m->file), key,
                    m->arch->name);
    }
    if (v < (uint64_t)lo || v > (uint64_t)hi)
        return fail(e, GEN_MODEL, "%s: %s is %llu, but must be %lld to %lld", gguf_path(m->file), key,
                    (unsigned long long)v, (long long)lo, (long long)hi);
    *value = (int)v;
    return true;
}

/* A finite number in [lo, hi]. *value holds the default (NAN: the key must be there). */
static bool get_real(const struct model *m, const char *suffix, double lo, double hi, double *value, struct error *e)
{
    char key[128];
    arch_key(m, suffix, key);
    if (!gguf_find(m->file, key)) {
        if (!isnan(*value)) return true;
        return fail(e, GEN_MODEL, "%s: %s is missing, so this is no complete %s model", gguf_path(m->file), key,
                    m->arch->name);
    }
    if (!gguf_get_f64(m->file, key, value, e)) return false;
    if (!(*value >= lo && *value <= hi))
        return fail(e, GEN_MODEL, "%s: %s is %g, but must be %g to %g", gguf_path(m->file), key, *value, lo, hi);
    return true;
}

static bool read_sizes(struct model *m, char note[200], struct error *e)
{
    const char *path = gguf_path(m->file);
    m->n_layer = m->n_embd = m->n_ff = m->n_head = m->n_ctx = -1;
    if (!get_int(m, "block_count", 1, 4096, &m->n_layer, e)) return false;
    if (!get_int(m, "embedding_length", 1, 1 << 20, &m->n_embd, e)) return false;
    if (!get_int(m, "feed_forward_length", 1, 1 << 24, &m->n_ff, e)) return false;
    if (!get_int(m, "attention.head_count", 1, 4096, &m->n_head, e)) return false;
    m->n_kv = m->n_head;
    if (!get_int(m, "attention.head_count_kv", 1, 4096, &m->n_kv, e)) return false;
    if (m->n_head % m->n_kv)
        return fail(e, GEN_MODEL, "%s: %d query heads cannot share %d key/value heads evenly", path, m->n_head,
                    m->n_kv);
    if (!get_int(m, "context_length", 1, INT32_MAX, &m->n_ctx, e)) return false;
    m->head_k = m->n_embd / m->n_head;
    if (!get_int(m, "attention.key_length", 1, HEAD_MOST, &m->head_k, e)) return false;
    m->head_v = m->n_embd / m->n_head;
    if (!get_int(m, "attention.value_length", 1, HEAD_MOST, &m->head_v, e)) return false;
    if (m->head_k < 1 || m->head_k > HEAD_MOST || m->head_v < 1 || m->head_v > HEAD_MOST)
        return fail(e, GEN_MODEL, "%s: head sizes of %d and %d are not supported (1 to 1024 are)", path, m->head_k,
                    m->head_v);
    double eps = NAN, attn_cap = m->arch->attn_cap, logit_cap = m->arch->logit_cap;
    if (!get_real(m, "attention.layer_norm_rms_epsilon", 0, 1, &eps, e)) return false;
    if (!get_real(m, "attn_logit_softcapping", 0, 1e30, &attn_cap, e)) return false;
    if (!get_real(m, "final_logit_softcapping", 0, 1e30, &logit_cap, e)) return false;
    m->norm_eps = (float)eps, m->attn_cap = (float)attn_cap, m->logit_cap = (float)logit_cap;
    m->embd_scale = m->arch->embd_sqrt ? sqrtf((float)m->n_embd) : 1;
    bool wide = m->arch->wide_layers && m->n_layer == m->arch->wide_layers;
    m->attn_scale = 1 / sqrtf((float)(wide ? m->n_embd / m->n_head : m->head_k));
    m->window = m->arch->default_window;
    if (!get_int(m, "attention.sliding_window", 0, INT32_MAX, &m->window, e)) return false;
    if (m->window && !m->arch->local_of) {
        snprintf(note, 200, "%s.attention.sliding_window is ignored: layers of this architecture see everything",
                 m->arch->name);
        m->window = 0;
    }
    return true;
}

/* ---- RoPE ------------------------------------------------------------------------------------------------------- */

/* Frequencies divided by `factor` per pair where the file has factors (llama 3 `rope_freqs`, longrope). */
static bool read_factors(const struct model *m, const char *name, int n_pairs, float *factors, bool *found,
                         struct error *e)
{
    const struct gguf_tensor *t = gguf_tensor(m->file, name);
    *found = t != NULL;
    if (!t) return true;
    if (t->type != T_F32 || t->n_dims != 1 || t->ne[0] != (uint64_t)n_pairs)
        return fail(e, GEN_MODEL, "%s: tensor %s must be %d F32 values, one per rotated pair", gguf_path(m->file), name,
                    n_pairs);
    if (!gguf_read(m->file, t, 0, factors, sizeof(float) * n_pairs, e)) return false;
    for (int i = 0; i < n_pairs; i++)
        if (!(factors[i] > 0 && factors[i] < 1e30f))
            return fail(e, GEN_MODEL, "%s: tensor %s has the factor %g at %d, but factors must be positive",
                        gguf_path(m->file), name, factors[i], i);
    return true;
}

/* YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): the pair that turns `rotations` times in the original
 * context. */
static double yarn_pair(double rotations, int n, double base, double original)
{
    return n * log(original / (rotations * 2 * M_PI)) / (2 * log(base));
}

struct scaling { double factor, original, attn_factor, beta_fast, beta_slow; bool yarn; };

static void rope_fill(struct rope *r, double base, const struct scaling *s, const float *factors)
{
    double low = 0, high = 0;
    if (s->yarn) {
        low = fmax(0, floor(yarn_pair(s->beta_fast, r->n, base, s->original)));
        high = fmin(r->n - 1, ceil(yarn_pair(s->beta_slow, r->n, base, s->original)));
    }
    for (int i = 0; i < r->n / 2; i++) {
        double f = pow(base, -2.0 * i / r->n);
        if (factors) f /= factors[i];
        double mix = s->yarn ? 1 - fmin(1, fmax(0, (i - low) / fmax(0.001, high - low))) : 0;
        r->freq[i] = f / s->factor * (1 - mix) + f * mix;
    }
    r->scale = (float)s->attn_factor;
    if (s->yarn) r->scale *= (float)(1 + 0.1 * log(s->factor));
}

static bool read_scaling(const struct model *m, const struct model_options *o, struct scaling *s, struct error *e)
{
    char key[128];
    struct gguf_str type = { "linear", 6 };        /* what a factor without a type means */
    *s = (struct scaling){ 1, m->n_ctx, 1, 32, 1, false };
    double old = 0;                    /* rope.scale_linear: the name of the factor in old files */
    if (!gguf_get_str(m->file, arch_key(m, "rope.scaling.type", key), &type, e)) return false;
    if (!get_real(m, "rope.scale_linear", 0, 1e9, &old, e)) return false;
    s->factor = old > 0 ? old : 1;
    double factor = 0;
    if (!get_real(m, "rope.scaling.factor", 0, 1e9, &factor, e)) return false;
    if (factor > 0) s->factor = factor;
    if (!get_real(m, "rope.scaling.original_context_length", 1, 1e12, &s->original, e)) return false;
    if (!get_real(m, "rope.scaling.attn_factor", 0, 1e9, &s->attn_factor, e)) return false;
    if (!get_real(m, "rope.scaling.yarn_beta_fast", 0, 1e9, &s->beta_fast, e)) return false;
    if (!get_real(m, "rope.scaling.yarn_beta_slow", 0, 1e9, &s->beta_slow, e)) return false;
    if (type.len == 4 && !memcmp(type.ptr, "yarn", 4)) s->yarn = s->factor != 1;
    else if (type.len == 4 && !memcmp(type.ptr, "none", 4)) { if (!(old > 0)) s->factor = 1; }
    else if (type.len == 8 && !memcmp(type.ptr, "longrope", 8)) s->factor = 1;
    else if (type.len != 6 || memcmp(type.ptr, "linear", 6))
        return fail(e, GEN_MODEL, "%s: %s is '%.*s', which is not supported (none, linear, yarn and longrope are)",
                    gguf_path(m->file), key, (int)(type.len < 60 ? type.len : 60), type.ptr);
    if (o->rope_scale > 0) s->factor = o->rope_scale, s->yarn = false;
    return true;
}

static bool read_rope(struct model *m, const struct model_options *o, struct error *e)
{
    double base = 10000, base_local = m->arch->local_base;
    int n = m->head_k;
    struct scaling s;
    if (!get_real(m, "rope.freq_base", 1e-3, 1e18, &base, e)) return false;
    if (!get_real(m, "rope.freq_base_swa", 1e-3, 1e18, &base_local, e)) return false;
    if (o->rope_freq_base > 0) base = o->rope_freq_base;
    if (!get_int(m, "rope.dimension_count", 0, HEAD_MOST, &n, e)) return false;
    if (n % 2 || n > m->head_k)
        return fail(e, GEN_MODEL, "%s: %d rotated dimensions do not fit a head size of %d", gguf_path(m->file), n,
                    m->head_k);
    if (!read_scaling(m, o, &s, e)) return false;
    m->rope_global.n = m->rope_local.n = n;
    m->rope_global.freq = alloc_zeroed(n + 2, sizeof(double), "RoPE frequencies", e);
    m->rope_local.freq = alloc_zeroed(n + 2, sizeof(double), "RoPE frequencies", e);
    float *factors = alloc_zeroed(n + 2, sizeof(float), "RoPE factors", e);
    if (!m->rope_global.freq || !m->rope_local.freq || !factors) return free(factors), false;
    bool found = false, ok = read_factors(m, "rope_freqs.weight", n / 2, factors, &found, e);
    if (ok && !found) {
        int ctx = o->ctx > 0 ? o->ctx : m->n_ctx;
        const char *name = ctx > s.original ? "rope_factors_long.weight" : "rope_factors_short.weight";
        ok = read_factors(m, name, n / 2, factors, &found, e);
    }
    if (ok) {
        /* Gemma's windowed layers have a base of their own and are not scaled. */
        struct scaling plain = { 1, s.original, 1, 32, 1, false };
        rope_fill(&m->rope_global, base, &s, found ? factors : NULL);
        rope_fill(&m->rope_local, base_local > 0 ? base_local : base, base_local > 0 ? &plain : &s,
                  found && !(base_local > 0) ? factors : NULL);
    }
    free(factors);
    return ok;
}

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

/* Finds tensor `name`; checks that it is [rows][columns] (rows 0: a vector of F32). Absent: NULL and true if
 * optional. */
static bool bind(const struct model *m, const char *name, uint64_t rows, uint64_t columns, bool optional,
                 const struct gguf_tensor **out, struct error *e)
{
    const struct gguf_tensor *t = gguf_tensor(m->file, name);
    *out = t;
    if (!t && optional) return true;
    if (!t)
        return fail(e, GEN_MODEL, "%s: tensor %s is missing, so this is no complete %s model", gguf_path(m->file), name,
                    m->arch->name);
    uint64_t have_rows = rows ? t->ne[1] : 0;
    if (t->ne[0] != columns || have_rows != rows || t->n_dims > (rows ? 2 : 1))
        return fail(e, GEN_MODEL, "%s: tensor %s is [%llu][%llu], but the model's sizes ask for [%llu][%llu]",
                    gguf_path(m->file), name, (unsigned long long)t->ne[1], (unsigned long long)t->ne[0],
                    (unsigned long long)(rows ? rows : 1), (unsigned long long)columns);
    if (!rows && t->type != T_F32)
        return fail(e, GEN_MODEL, "%s: tensor %s is %s, but vectors must be F32", gguf_path(m->file), name,
                    type_name(t->type));
    return true;
}

static bool bind_vector(const struct model *m, int layer, const char *name, int n, bool optional,
                        const struct gguf_tensor **out, struct error *e)
{
    char full[96];
    snprintf(full, sizeof full, "blk.%d.%s", layer, name);
    return bind(m, full, 0, n, optional, out, e);
}

static bool bind_matrix(const struct model *m, int layer, const char *name, uint64_t rows, uint64_t columns,
                        struct matrix *out, struct error *e)
{
    char full[96];
    snprintf(full, sizeof full, "blk.%d.%s.weight", layer, name);
    *out = (struct matrix){ NULL, 0, rows, columns, 0 };
    return bind(m, full, rows, columns, false, &out->tensor, e);
}

static bool bind_attention(struct model *m, int i, struct layer *l, struct error *e)
{
    uint64_t E = m->n_embd, nq = (uint64_t)m->n_head * m->head_k, nk = (uint64_t)m->n_kv * m->head_k,
             nv = (uint64_t)m->n_kv * m->head_v;
    char fused[64];
    snprintf(fused, sizeof fused, "blk.%d.attn_qkv.weight", i);
    if (m->arch->fused && gguf_tensor(m->file, fused)) {
        struct matrix all;
        if (!bind_matrix(m, i, "attn_qkv", nq + nk + nv, E, &all, e)) return false;
        l->q = (struct matrix){ all.tensor, 0, nq, E, 0 };
        l->k = (struct matrix){ all.tensor, nq, nk, E, 0 };
        l->v = (struct matrix){ all.tensor, nq + nk, nv, E, 0 };
    } else if (!bind_matrix(m, i, "attn_q", nq, E, &l->q, e) || !bind_matrix(m, i, "attn_k", nk, E, &l->k, e) ||
               !bind_matrix(m, i, "attn_v", nv, E, &l->v, e)) return false;
    bool no_bias = !m->arch->qkv_bias, no_norm = !m->arch->qk_norm;
    return bind_vector(m, i, "attn_norm.weight", m->n_embd, false, &l->attn_norm, e)
        && bind_matrix(m, i, "attn_output", E, (uint64_t)m->n_head * m->head_v, &l->o, e)
        && bind_vector(m, i, "attn_q.bias", (int)nq, no_bias, &l->q_bias, e)
        && bind_vector(m, i, "attn_k.bias", (int)nk, no_bias, &l->k_bias, e)
        && bind_vector(m, i, "attn_v.bias", (int)nv, no_bias, &l->v_bias, e)
        && bind_vector(m, i, "attn_output.bias", m->n_embd, true, &l->o_bias, e)
        && (no_norm || (bind_vector(m, i, "attn_q_norm.weight", m->head_k, false, &l->q_norm, e)
                        && bind_vector(m, i, "attn_k_norm.weight", m->head_k, false, &l->k_norm, e)))
        && (!m->arch->post_norm
            || bind_vector(m, i, "post_attention_norm.weight", m->n_embd, false, &l->attn_post_norm, e));
}

static bool bind_ffn(struct model *m, int i, struct layer *l, struct error *e)
{
    uint64_t E = m->n_embd, F = m->n_ff;
    if (m->arch->fused) {
        struct matrix both;
        if (!bind_matrix(m, i, "ffn_up", 2 * F, E, &both, e)) return false;
        l->gate = (struct matrix){ both.tensor, 0, F, E, 0 };
        l->up = (struct matrix){ both.tensor, F, F, E, 0 };
    } else if (!bind_matrix(m, i, "ffn_gate", F, E, &l->gate, e) || !bind_matrix(m, i, "ffn_up", F, E, &l->up, e)) {
        return false;
    }
    return bind_vector(m, i, "ffn_norm.weight", m->n_embd, false, &l->ffn_norm, e)
        && bind_matrix(m, i, "ffn_down", E, F, &l->down, e)
        && (!m->arch->post_norm || bind_vector(m, i, "post_ffw_norm.weight", m->n_embd, false, &l->ffn_post_norm, e));
}

static bool bind_all(struct model *m, struct error *e)
{
    const struct gguf_tensor *embd = gguf_tensor(m->file, "token_embd.weight");
    if (!embd)
        return fail(e, GEN_MODEL, "%s: tensor token_embd.weight is missing, so this is no complete model%s",
                    gguf_path(m->file), gguf_tensor_count(m->file) ? "" : " (a vocabulary-only file?)");
    if (embd->ne[1] < 1 || embd->ne[1] > 1 << 24)
        return fail(e, GEN_MODEL, "%s: a vocabulary of %llu words is not supported", gguf_path(m->file),
                    (unsigned long long)embd->ne[1]);
    m->n_vocab = (int)embd->ne[1];
    const struct gguf_value *words = gguf_find(m->file, "tokenizer.ggml.tokens");
    if (words && words->type == GGUF_ARRAY && words->count != (uint64_t)m->n_vocab)
        return fail(e, GEN_MODEL, "%s: the tokenizer has %llu words but token_embd.weight has %d rows",
                    gguf_path(m->file), (unsigned long long)words->count, m->n_vocab);
    m->embd = m->out = (struct matrix){ embd, 0, m->n_vocab, m->n_embd, 0 };
    if (!bind(m, "token_embd.weight", m->n_vocab, m->n_embd, false, &m->embd.tensor, e)) return false;
    const struct gguf_tensor *out = NULL;
    if (!bind(m, "output.weight", m->n_vocab, m->n_embd, true, &out, e)) return false;
    if (out) m->out.tensor = out;
    if (!bind(m, "output_norm.weight", 0, m->n_embd, false, &m->out_norm, e)) return false;
    if (!bind(m, "output.bias", 0, m->n_vocab, true, &m->out_bias, e)) return false;
    for (int i = 0; i < m->n_layer; i++) {
        struct layer *l = &m->layers[i];
        if (!bind_attention(m, i, l, e) || !bind_ffn(m, i, l, e)) return false;
    }
    return true;
}

/* ---- one part of several ---------------------------------------------------------------------------------------- */

/* Keeps rows [first, first + n) of a matrix. */
static void keep_rows(struct matrix *x, uint64_t first, uint64_t n)
{
    x->row0 += first;
    x->rows = n;
}

/* Keeps columns [first, first + n), which are whole blocks. */
static bool keep_columns(const struct model *m, struct matrix *x, uint64_t first, uint64_t n, struct error *e)
{
    uint64_t block = (uint64_t)type_info(x->tensor->type)->block;
    if (first % block || n % block)
        return fail(e, GEN_USAGE, "%s: tensor %.*s of type %s cannot be divided among %d ranks: its blocks have %d columns",
                    gguf_path(m->file), (int)x->tensor->name.len, x->tensor->name.ptr, type_name(x->tensor->type),
                    m->ranks, (int)block);
    x->col0 = first;
    x->columns = n;
    return true;
}

/* The rank's part of n things that come in units: [*first, *first + result). */
static uint64_t share_of(const struct model *m, uint64_t n, uint64_t unit, uint64_t *first)
{
    uint64_t units = n / unit;
    *first = units * m->rank / m->ranks * unit;
    return units * (m->rank + 1) / m->ranks * unit - *first;
}

/* Divides the heads, or leaves them whole and the tokens of the cache divided. */
static bool keep_heads(struct model *m, struct error *e)
{
    m->by_token = m->n_kv % m->ranks != 0;
    if (m->by_token) return true;
    m->n_head /= m->ranks, m->n_kv /= m->ranks;
    m->head0 = m->rank * m->n_head, m->kv0 = m->rank * m->n_kv;
    uint64_t q = (uint64_t)m->n_head * m->head_k, k = (uint64_t)m->n_kv * m->head_k, v = (uint64_t)m->n_kv * m->head_v;
    uint64_t o = (uint64_t)m->n_head * m->head_v;
    for (int i = 0; i < m->n_layer; i++) {
        struct layer *l = &m->layers[i];
        keep_rows(&l->q, m->rank * q, q);
        keep_rows(&l->k, m->rank * k, k);
        keep_rows(&l->v, m->rank * v, v);
        if (!keep_columns(m, &l->o, m->rank * o, o, e)) return false;
    }
    return true;
}

/* Megatron's division (Shoeybi et al. 2019): heads and feed-forward columns by rank, so that only the outputs of `o`
 * and `down` are to be summed; and the vocabulary's rows. */
static bool keep_part(struct model *m, const struct model_options *o, struct error *e)
{
    m->rank = o->rank;
    m->ranks = o->ranks > 1 ? o->ranks : 1;
    if (m->ranks == 1) return true;
    if (!keep_heads(m, e)) return false;
    uint64_t first, n, block = m->n_ff % 32 ? 1 : 32;  /* activations are quantised by 32 */
    for (int i = 0; i < m->n_layer; i++) {
        uint64_t b = (uint64_t)type_info(m->layers[i].down.tensor->type)->block;
        if (b > block) block = b;
    }
    n = share_of(m, m->n_ff, block, &first);
    if (n == 0)
        return fail(e, GEN_USAGE, "%d feed-forward columns in blocks of %d are too few for %d ranks: lower "
                    "--tensor-parallel", m->n_ff, (int)block, m->ranks);
    for (int i = 0; i < m->n_layer; i++) {
        struct layer *l = &m->layers[i];
        keep_rows(&l->gate, first, n);
        keep_rows(&l->up, first, n);
        if (!keep_columns(m, &l->down, first, n, e)) return false;
    }
    m->n_ff = (int)n;
    n = share_of(m, m->n_vocab, 1, &first);
    if (n == 0)
        return fail(e, GEN_USAGE, "a vocabulary of %d is too small for %d ranks: lower --tensor-parallel", m->n_vocab,
                    m->ranks);
    keep_rows(&m->out, first, n);
    return true;
}

/* Which layers have a window: of each `local_of` layers all but the last, unless the file has a period or a list of its
 * own. */
static bool mark_local(struct model *m, struct error *e)
{
    char key[128];
    const struct gguf_value *list = gguf_find(m->file, arch_key(m, "attention.sliding_window_pattern", key));
    int of = m->arch->local_of;
    bool listed = list && list->type == GGUF_ARRAY;
    if (listed && (list->item != GGUF_BOOL || list->count != (uint64_t)m->n_layer))
        return fail(e, GEN_MODEL, "%s: %s must be a number, or %d booleans, one per layer", gguf_path(m->file), key,
                    m->n_layer);
    if (of > 1 && !listed && !get_int(m, "attention.sliding_window_pattern", 1, 4096, &of, e)) return false;
    for (int i = 0; i < m->n_layer; i++) {
        bool local = of > 1 && listed ? list->data[i] != 0 : of == 1 || (of > 1 && (i + 1) % of != 0);
        m->layers[i].local = m->window > 0 && local;
    }
    return true;
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static bool choose_arch(struct model *m, struct error *e)
{
    struct gguf_str name = { NULL, 0 };
    if (!gguf_get_str(m->file, "general.architecture", &name, e)) return false;
    if (!name.ptr)
        return fail(e, GEN_MODEL, "%s: general.architecture is missing, so the kind of model is unknown",
                    gguf_path(m->file));
    for (int i = 0; i < N_ARCH; i++)
        if (name.len == strlen(arches[i].name) && !memcmp(name.ptr, arches[i].name, name.len)) m->arch = &arches[i];
    if (!m->arch)
        return fail(e, GEN_MODEL, "%s: architecture '%.*s' is not supported (supported: %s)", gguf_path(m->file),
                    (int)(name.len < 60 ? name.len : 60), name.ptr, model_architectures());
    m->arch_name = m->arch->name;
    m->rope_order = m->arch->rope_order;
    m->act = m->arch->act;
    return true;
}

bool model_open(struct model **out, struct gguf *g, const struct model_options *o, char note[200], struct error *e)
{
    note[0] = 0;
    struct model *m = alloc_zeroed(1, sizeof *m, "the model", e);
    if (!m) return gguf_close(g), false;
    m->file = g;
    if (!choose_arch(m, e) || !read_sizes(m, note, e) || !gguf_get_str(g, "general.name", &m->name, e) ||
        !read_rope(m, o, e))
        goto bad;
    m->layers = alloc_zeroed(m->n_layer, sizeof *m->layers, "the layers", e);
    if (!m->layers || !mark_local(m, e) || !bind_all(m, e) || !keep_part(m, o, e)) goto bad;
    *out = m;
    return true;
bad:
    model_close(m);
    return false;
}

void model_close(struct model *m)
{
    if (!m) return;
    free(m->rope_global.freq);
    free(m->rope_local.freq);
    free(m->layers);
    gguf_close(m->file);
    free(m);
}
