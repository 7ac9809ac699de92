/* model.h - a transformer as data: hyper-parameters, and weights bound by name once to fields.
 *
 * The forward pass sees only these fields. Shapes are written [rows][columns]; a matrix W[rows][columns] maps a vector
 * of `columns` floats to `rows` floats, and its rows are contiguous in the file. */
#ifndef MODEL_H
#define MODEL_H

#include "base.h"
#include "gguf.h"

enum rope_order { ROPE_PAIRS, ROPE_HALVES };   /* element 2i turns with 2i+1 (llama), or i with i + n/2 (NeoX) */
enum { HEAD_MOST = 1024 };              /* largest head size */
enum activation { ACT_SILU, ACT_GELU };        /* GELU in the tanh form */

/* Angles of one kind of layer. Pair i at position p turns by p * freq[i] radians and is multiplied by `scale`. */
struct rope {
    int n;                             /* dimensions that turn, the first n of a head; even, <= head size */
    double *freq;                      /* [n/2] radians per position, scaling and factors included */
    float scale;                       /* YaRN / longrope magnitude; 1 otherwise */
};

/* Rows [row0, row0 + rows) and columns [col0, col0 + columns) of a tensor: the whole, a part of a fused tensor, or what
 * one of several processes holds. col0 and columns are whole blocks. */
struct matrix {
    const struct gguf_tensor *tensor;
    uint64_t row0, rows, columns, col0;
    /* Keys or values whose heads are not the file's (model_options.kv_heads): rows of a head (0 = they are the file's),
     * heads wanted and there, and the first wanted row in all their rows; row0 is then that of the file's first
     * head. */
    int head, heads, file_heads;
    uint64_t first;
};

/* One layer's weights. NULL = the architecture has none. Several fields with `row0` refer to a fused tensor. */
struct layer {
    const struct gguf_tensor *attn_norm;           /* [n_embd] */
    struct matrix q;                               /* [n_head*head_k][n_embd] */
    struct matrix k, v;                            /* [n_kv*head_k][n_embd], [n_kv*head_v][n_embd] */
    const struct gguf_tensor *q_bias, *k_bias, *v_bias, *o_bias;
    const struct gguf_tensor *q_norm, *k_norm;     /* [head_k], per head, before RoPE */
    struct matrix o;                               /* [n_embd][n_head*head_v] */
    const struct gguf_tensor *attn_post_norm;      /* [n_embd], on the attention output before it is added (Gemma) */
    const struct gguf_tensor *ffn_norm;            /* [n_embd] */
    struct matrix gate, up;                        /* [n_ff][n_embd] */
    struct matrix down;                            /* [n_embd][n_ff] */
    const struct gguf_tensor *ffn_post_norm;
    bool local;                                    /* sees only the last `window` positions */
};

struct model {
    const struct arch *arch;           /* row of the architecture table */
    const char *arch_name;
    struct gguf_str name;              /* general.name, may be empty */
    struct gguf *file;
    int n_layer, n_embd, n_ff, n_vocab;
    int n_head, n_kv;                  /* query heads, key/value heads; n_head % n_kv == 0 */
    int all_kv;                        /* n_kv of all parts together */
    int file_kv;                       /* key/value heads in the file: all_kv, a multiple or a divisor of it */
    int head_k, head_v;                /* size of a key (and query) head and of a value head */
    int n_ctx;                         /* context the model was trained for, in tokens */
    int window;                        /* of local layers, the own position included; 0 = no local layers */
    float norm_eps;
    float embd_scale;                  /* embedding rows are multiplied by this */
    float attn_scale;                  /* scores are multiplied by this */
    float attn_cap, logit_cap;         /* soft caps: x -> cap * tanh(x / cap); 0 = none */
    enum rope_order rope_order;
    enum activation act;
    struct rope rope_global, rope_local;
    struct matrix embd;                /* [n_vocab][n_embd] */
    struct matrix out;                 /* [n_vocab][n_embd]; the embedding again when tied */
    const struct gguf_tensor *out_norm;/* [n_embd] */
    const struct gguf_tensor *out_bias;/* [n_vocab] */
    struct layer *layers;              /* [n_layer] */
    /* One of `ranks` parts: n_ff, gate, up and down are the part's, so that the output of `down` is a sum over the
     * ranks, and `out` has some of the rows. n_head, n_kv, q, k, v and o are the part's as well, and their biases from
     * the first head on, and the output of `o` is a sum; or where KV heads cannot be divided evenly, the tokens of the
     * cache are: `by_token`, all ranks have the whole of these and each the tokens of every `ranks`-th split. */
    int rank, ranks;
    bool by_token;
    int head0, kv0;                    /* first of the part's query and KV heads */
};

/* Values of model_options.kv_heads beside a number. */
enum { KV_HEADS_AUTO = 0, KV_HEADS_MHA = -1, KV_HEADS_GQA = -2, KV_HEADS_MQA = -3 };

struct model_options {
    double rope_freq_base;             /* 0 = the file's */
    double rope_scale;                 /* 0 = the file's; positions are divided by it (linear scaling) */
    int ctx;                           /* the context to be used (0 = the model's): chooses longrope's factors once */
    int rank, ranks;                   /* the part of the model that is wanted; ranks 0 or 1 = the whole */
    int kv_heads;                      /* as the file, or so many: fewer are the means of neighbouring heads (Ainslie et
                                        * al. 2023, "GQA", section 2.1, without the training that follows there), more
                                        * are the file's repeated */
};

/* Binds the file's tensors, checks every shape against the hyper-parameters. Keeps g (closed by model_close). *note
 * receives a one-line remark for stderr or "". Errors (GEN_MODEL): one sentence naming key or tensor, expected and
 * found. */
bool model_open(struct model **out, struct gguf *g, const struct model_options *o, char note[200], struct error *e);
void model_close(struct model *m);

/* A matrix as a backend gets it: its type, which is F16 where heads are averaged; bytes of a row; the rows where they
 * lie in the mapped file, NULL where they are not there as such; a copy of rows [row, row + n). Errors: those of
 * gguf_read. */
enum tensor_type matrix_type(const struct matrix *x);
size_t matrix_row_bytes(const struct matrix *x);
const void *matrix_data(const struct model *m, const struct matrix *x);
bool matrix_read(const struct model *m, const struct matrix *x, uint64_t row, uint64_t n, void *dst, struct error *e);
/* out[n_kv * head] = a bias of keys or values, of all heads. */
bool model_read_kv_bias(const struct model *m, const struct gguf_tensor *t, float *out, struct error *e);

/* Names of the supported architectures, comma separated. */
const char *model_architectures(void);

#endif
