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

/* The number of key/value heads that is asked for: one that the query heads and the file's heads allow. */
static bool choose_kv_heads(struct model *m, int asked, struct error *e)
{
    const char *path = gguf_path(m->file);
    if (asked == KV_HEADS_GQA && m->file_kv == m->n_head)
        return fail(e, GEN_USAGE, "--kv-heads gqa is not possible: %s has a key/value head for each of its %d query "
                                  "heads, so it has no groups of its own: give a number", path, m->n_head);
    int n = asked == KV_HEADS_MHA ? m->n_head : asked == KV_HEADS_MQA ? 1 : asked > 0 ? asked : m->file_kv;
    if (m->n_head % n || (m->file_kv % n && n % m->file_kv))
        return fail(e, GEN_USAGE, "--kv-heads %d is not possible: it must divide the %d query heads of %s, and divide "
                                  "or be a multiple of its %d key/value heads", n, m->n_head, path, m->file_kv);
    m->n_kv = m->all_kv = n;
    return true;
}

static bool read_sizes(struct model *m, const struct model_options *o, char note[200], struct error *e)
{
    const char *path = gguf_path(m->file);
    m->n_layer = m->n_embd = m->n_ff = m->n_head = m->n_ctx = -1;
    if (!get_int(m, "block_count", 1, 4096, &m->n_layer, e)) return false;
    if (!get_int(m, "embedding_length", 1, 1 << 20, &m->n_embd, e)) return false;
    if (!get_int(m, "feed_forward_length", 1, 1 << 24, &m->n_ff, e)) return false;
    if (!get_int(m, "attention.head_count", 1, 4096, &m->n_head, e)) return false;
    m->file_kv = m->n_head;
    if (!get_int(m, "attention.head_count_kv", 1, 4096, &m->file_kv, e)) return false;
    if (m->n_head % m->file_kv)
        return fail(e, GEN_MODEL, "%s: %d query heads cannot share %d key/value heads evenly", path, m->n_head,
                    m->file_kv);
    if (!choose_kv_heads(m, o->kv_heads, e)) return false;
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
    *out = (struct matrix){ .rows = rows, .columns = columns };
    return bind(m, full, rows, columns, false, &out->tensor, e);
}

/* Gives keys or values the number of heads that is wanted. */
static void regroup(const struct model *m, struct matrix *x, int head)
{
    if (m->n_kv == m->file_kv) return;
    x->head = head;
    x->heads = m->n_kv;
    x->file_heads = m->file_kv;
    x->rows = (uint64_t)m->n_kv * head;
}

static bool bind_attention(struct model *m, int i, struct layer *l, struct error *e)
{
    uint64_t E = m->n_embd, nq = (uint64_t)m->n_head * m->head_k, nk = (uint64_t)m->file_kv * m->head_k,
             nv = (uint64_t)m->file_kv * m->head_v;
    char fused[64];
    snprintf(fused, sizeof fused, "blk.%d.attn_qkv.weight", i);
    if (m->arch->fused && gguf_tensor(m->file, fused)) {
        struct matrix all;
        if (!bind_matrix(m, i, "attn_qkv", nq + nk + nv, E, &all, e)) return false;
        l->q = (struct matrix){ .tensor = all.tensor, .rows = nq, .columns = E };
        l->k = (struct matrix){ .tensor = all.tensor, .row0 = nq, .rows = nk, .columns = E };
        l->v = (struct matrix){ .tensor = all.tensor, .row0 = nq + nk, .rows = nv, .columns = E };
    } else if (!bind_matrix(m, i, "attn_q", nq, E, &l->q, e) || !bind_matrix(m, i, "attn_k", nk, E, &l->k, e) ||
               !bind_matrix(m, i, "attn_v", nv, E, &l->v, e)) return false;
    regroup(m, &l->k, m->head_k);
    regroup(m, &l->v, m->head_v);
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
        l->gate = (struct matrix){ .tensor = both.tensor, .rows = F, .columns = E };
        l->up = (struct matrix){ .tensor = both.tensor, .row0 = F, .rows = F, .columns = E };
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
    m->embd = m->out = (struct matrix){ .tensor = embd, .rows = m->n_vocab, .columns = m->n_embd };
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
    *(x->head ? &x->first : &x->row0) += first;
    x->rows = n;
}

/* Keeps columns [first, first + n), which are whole blocks. */
static bool keep_columns(const struct model *m, struct matrix *x, uint64_t first, uint64_t n, struct error *e)
{
    uint64_t block = (uint64_t)type_info(x->tensor->type)->block;
    if (first % block || n % block)
        return fail(e, GEN_USAGE, "%s: tensor %.*s of type %s cannot be divided among %d ranks: its blocks have %d "
                    "columns", gguf_path(m->file), (int)x->tensor->name.len, x->tensor->name.ptr,
                    type_name(x->tensor->type), m->ranks, (int)block);
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

/* ---- what a backend reads --------------------------------------------------------------------------------------- */

/* Neighbouring heads of the file of which one is made; 1 where they are kept or repeated. */
static int averaged(int heads, int file_heads) { return heads < file_heads ? file_heads / heads : 1; }
static int averaged_rows(const struct matrix *x) { return x->head ? averaged(x->heads, x->file_heads) : 1; }

/* The file's row that row r of x is, or the first of those that it is the mean of. */
static uint64_t file_row(const struct matrix *x, uint64_t r)
{
    if (!x->head) return x->row0 + r;
    uint64_t head = (x->first + r) / x->head * x->file_heads / x->heads;
    return x->row0 + head * x->head + (x->first + r) % x->head;
}

/* Bytes of n columns of a row of the file. */
static size_t column_bytes(const struct matrix *x, uint64_t n)
{
    const struct type_info *t = type_info(x->tensor->type);
    return n / t->block * t->bytes;
}

static size_t place_of(const struct matrix *x, uint64_t file_row)
{
    return file_row * column_bytes(x, x->tensor->ne[0]) + column_bytes(x, x->col0);
}

enum tensor_type matrix_type(const struct matrix *x) { return averaged_rows(x) > 1 ? T_F16 : x->tensor->type; }

size_t matrix_row_bytes(const struct matrix *x)
{
    return averaged_rows(x) > 1 ? 2 * x->columns : column_bytes(x, x->columns);
}

const void *matrix_data(const struct model *m, const struct matrix *x)
{
    const char *map = gguf_data(m->file, x->tensor);
    return map && !x->head && x->columns == x->tensor->ne[0] ? map + place_of(x, x->row0) : NULL;
}

/* out[columns] = row r in halves, the mean over `n` heads of the file. work: two rows of floats, then one of the
 * file. */
static bool mean_row(const struct model *m, const struct matrix *x, uint64_t r, int n, float *work, uint16_t *out,
                     struct error *e)
{
    size_t columns = x->columns;
    float *sum = work, *one = work + columns;
    void *raw = one + columns;
    memset(sum, 0, columns * sizeof *sum);
    for (int h = 0; h < n; h++) {
        uint64_t row = file_row(x, r) + (uint64_t)h * x->head;
        if (!gguf_read(m->file, x->tensor, place_of(x, row), raw, column_bytes(x, columns), e)) return false;
        type_info(x->tensor->type)->dequantise(raw, one, columns);
        for (size_t i = 0; i < columns; i++) sum[i] += one[i];
    }
    for (size_t i = 0; i < columns; i++) out[i] = f32_to_f16(sum[i] / n);
    return true;
}

static bool read_means(const struct model *m, const struct matrix *x, uint64_t row, uint64_t n, void *dst,
                       struct error *e)
{
    size_t bytes = 2 * x->columns * sizeof(float) + column_bytes(x, x->columns);
    float *work = alloc_zeroed(bytes, 1, "a row of weights", e);
    bool ok = work != NULL;
    for (uint64_t i = 0; i < n && ok; i++)
        ok = mean_row(m, x, row + i, averaged_rows(x), work, (uint16_t *)dst + i * x->columns, e);
    free(work);
    return ok;
}

bool matrix_read(const struct model *m, const struct matrix *x, uint64_t row, uint64_t n, void *dst, struct error *e)
{
    size_t bytes = column_bytes(x, x->columns);
    if (averaged_rows(x) > 1) return read_means(m, x, row, n, dst, e);
    if (!x->head && x->columns == x->tensor->ne[0])
        return gguf_read(m->file, x->tensor, place_of(x, x->row0 + row), dst, n * bytes, e);
    for (uint64_t i = 0; i < n; i++)
        if (!gguf_read(m->file, x->tensor, place_of(x, file_row(x, row + i)), (char *)dst + i * bytes, bytes, e))
            return false;
    return true;
}

bool model_read_kv_bias(const struct model *m, const struct gguf_tensor *t, float *out, struct error *e)
{
    int size = (int)(t->ne[0] / m->file_kv), means = averaged(m->all_kv, m->file_kv);
    float *all = alloc_zeroed(t->ne[0], sizeof *all, "a bias", e);
    bool ok = all && gguf_read(m->file, t, 0, all, t->size, e);
    for (int h = 0; ok && h < m->n_kv; h++)
        for (int i = 0; i < size; i++) {
            const float *from = all + (size_t)(m->kv0 + h) * m->file_kv / m->all_kv * size + i;
            float sum = 0;
            for (int k = 0; k < means; k++) sum += from[(size_t)k * size];
            out[(size_t)h * size + i] = sum / means;
        }
    free(all);
    return ok;
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
    if (!choose_arch(m, e) || !read_sizes(m, o, note, e) || !gguf_get_str(g, "general.name", &m->name, e) ||
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
