"""make_model.py - tiny random GGUF models, and one whose greedy text is known in advance. Same arguments, same bytes.

    make_model.py OUT [--arch A] [--weight TYPE] [--heads N] [--kv-heads N] [--head-k N] [--head-v N] [--layers N] ...
    make_model.py OUT --chain 'abcd!'          after ":" it says abcd! and then the end-of-text token

The vocabulary is the 256 bytes (ids BYTE0 .. BYTE0 + 255) after six control tokens, so a text's ids are known without a
tokenizer. Weights are scaled so that the numbers behave as in a trained model: attention scores of standard deviation 2
(neither uniform nor one-hot), logits of standard deviation 2.5. Norm weights lie around 1.
"""
import argparse

import gguf
import numpy as np

CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
BOS, EOS, BYTE0 = 1, 2, len(CONTROL)
VOCAB = BYTE0 + 256
ARCHITECTURES = "llama qwen2 qwen3 phi3 gemma2 gemma3".split()
FLOAT_TYPES = "F32 F16 BF16".split()
WEIGHT_TYPES = FLOAT_TYPES + "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()

# Where a block of a type that the gguf package cannot quantise keeps its half-precision scale and (if it has one) the
# scale of its minima, as indices of 16-bit words; and the ratio of the two that makes the mean weight zero.
SCALES = {"Q2_K": (40, 41, 1.5), "Q3_K": (54, None, 0), "Q4_K": (0, 1, 7.5), "Q5_K": (0, 1, 15.5),
          "Q6_K": (104, None, 0), "IQ4_NL": (0, None, 0), "IQ4_XS": (0, None, 0)}


def ids_of(text):
    return [BYTE0 + b for b in (text.encode() if isinstance(text, str) else text)]


def random_blocks(random, rows, columns, kind, std):
    """A matrix of random blocks: every bit but the scales' is drawn, and the weights have standard deviation `std`."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    words = random.integers(0, 1 << 16, (rows, columns // block, size // 2), np.uint16)
    at, at_min, ratio = SCALES[kind]
    spread = random.uniform(0.7, 1.3, words.shape[:2])
    as_words = lambda x: x.astype(np.float16).view(np.uint16)

    def scaled(d):
        words[:, :, at] = as_words(d * spread)
        if at_min is not None:
            words[:, :, at_min] = as_words(d * ratio * spread)
        return words.reshape(rows, -1).view(np.uint8)
    unit = gguf.dequantize(scaled(1.0), gguf.GGMLQuantizationType[kind]).std()
    return scaled(std / unit)


class Writer(gguf.GGUFWriter):
    def __init__(self, path, arch, seed, vocab="bytes", bos=False):
        super().__init__(path, arch)
        self.random = np.random.default_rng(seed)
        self.tokens(vocab, bos)

    def tokens(self, vocab, bos):
        names = [name.encode() for name in CONTROL]
        kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * (len(CONTROL) - 1)
        if vocab == "bytes":           # SentencePiece with nothing but byte tokens
            self.add_tokenizer_model("llama")
            names += [b"<0x%02X>" % i for i in range(256)]
            kinds += [gguf.TokenType.BYTE] * 256
            self.add_token_scores([0.0] * len(names))
            self.add_unk_token_id(0)
            self.add_add_space_prefix(False)
        else:                          # byte-level BPE whose only merge never applies to the tests' texts
            self.add_tokenizer_model("gpt2")
            self.add_tokenizer_pre("qwen2")
            plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
            others = [b for b in range(256) if b not in plain]
            names += [chr(b if b in plain else 256 + others.index(b)).encode() for b in range(256)]
            kinds += [gguf.TokenType.NORMAL] * 256
            self.add_token_merges(["\u00ff \u00ff"])
            names.append("\u00ff\u00ff".encode())
            kinds.append(gguf.TokenType.NORMAL)
        self.add_token_list(names)
        self.add_token_types(kinds)
        self.add_bos_token_id(BOS)
        self.add_eos_token_id(EOS)
        self.add_add_bos_token(bos)
        self.n_vocab = len(names)

    def sizes(self, layers, embd, ff, heads, kv_heads, head_k, head_v, ctx, eps=1e-5):
        self.add_context_length(ctx)
        self.add_embedding_length(embd)
        self.add_block_count(layers)
        self.add_feed_forward_length(ff)
        self.add_head_count(heads)
        self.add_head_count_kv(kv_heads)
        self.add_key_length(head_k)
        self.add_value_length(head_v)
        self.add_layer_norm_rms_eps(eps)

    def vector(self, name, n, mean=1.0, std=0.2):
        self.add_tensor(name, (mean + std * self.random.standard_normal(n)).astype(np.float32))

    def matrix(self, name, rows, columns, kind, gain=1.0):
        """Maps activations of size 1 to outputs of standard deviation `gain`."""
        std = gain / np.sqrt(columns)
        qtype = gguf.GGMLQuantizationType[kind]
        if kind in SCALES:
            self.add_tensor(name, random_blocks(self.random, rows, columns, kind, std), raw_dtype=qtype)
        else:
            w = (self.random.standard_normal((rows, columns)) * std).astype(np.float32)
            self.add_tensor(name, gguf.quantize(w, qtype), raw_dtype=qtype)

    def finish(self):
        self.write_header_to_file()
        self.write_kv_data_to_file()
        self.write_tensors_to_file()
        self.close()


def random_model(path, arch="llama", weight="F32", out_weight=None, heads=4, kv_heads=2, head_k=64, head_v=None,
                 layers=2, embd=256, ff=256, ctx=4096, tied=False, bias=False, qk=1.4, window=0, n_rot=0,
                 rope_base=10000.0, rope=None, rope_freqs=None, long_factors=None, attn_factor=1.0, caps=(0.0, 0.0),
                 vocab="bytes", bos=False, seed=1, copy_embd=False, outliers=0.0,
                 v_bias=0.5):
    """`weight` is the type of all matrices, `out_weight` of embedding and output where it differs. rope: (scaling type,
    factor, original context). rope_freqs: a number or one divisor per pair. long_factors: (short, long) of phi3. caps:
    of scores and logits. copy_embd: output.weight is a byte copy of token_embd.weight. outliers: with biases, what is
    added to those of every 16th channel of the keys, which trained models have, too. v_bias: size of the values' biases."""
    head_v = head_v or head_k
    gemma, qk_norm = arch.startswith("gemma"), arch in ("qwen3", "gemma3")
    w = Writer(path, arch, seed, vocab, bos)
    w.sizes(layers, embd, ff, heads, kv_heads, head_k, head_v, ctx)
    n_rot = n_rot or head_k
    w.add_rope_dimension_count(n_rot)
    w.add_rope_freq_base(rope_base)
    if window:
        w.add_sliding_window(window)
    if rope:
        w.add_rope_scaling_type(gguf.RopeScalingType(rope[0]))
        w.add_rope_scaling_factor(rope[1])
        if rope[2]:
            w.add_rope_scaling_orig_ctx_len(rope[2])
    if attn_factor != 1.0:
        w.add_rope_scaling_attn_factors(attn_factor)
    if arch == "gemma2" and any(caps):
        w.add_attn_logit_softcapping(caps[0])
        w.add_final_logit_softcapping(caps[1])
    if rope_freqs is not None:
        w.add_tensor("rope_freqs.weight", (np.zeros(n_rot // 2) + rope_freqs).astype(np.float32))
    if long_factors:
        for name, factors in zip(("short", "long"), long_factors):
            w.add_tensor(f"rope_factors_{name}.weight", (np.zeros(n_rot // 2) + factors).astype(np.float32))

    out_weight = out_weight or weight
    tied = tied or gemma
    start = w.random.bit_generator.state
    w.matrix("token_embd.weight", w.n_vocab, embd, out_weight, gain=2.5)
    w.vector("output_norm.weight", embd)
    if copy_embd:
        after, w.random.bit_generator.state = w.random.bit_generator.state, start
        w.matrix("output.weight", w.n_vocab, embd, out_weight, gain=2.5)
        w.random.bit_generator.state = after
    elif not tied:
        w.matrix("output.weight", w.n_vocab, embd, out_weight, gain=2.5)
    # What the layers add outweighs the embedding many times, or a tied output would just name the last token again.
    n_q, n_k, n_v = heads * head_k, kv_heads * head_k, kv_heads * head_v
    sharp = 1.0 if qk_norm else qk
    for i in range(layers):
        b = f"blk.{i}."
        w.vector(b + "attn_norm.weight", embd)
        if arch == "phi3":
            w.matrix(b + "attn_qkv.weight", n_q + n_k + n_v, embd, weight, sharp)
            w.matrix(b + "ffn_up.weight", 2 * ff, embd, weight)
        else:
            w.matrix(b + "attn_q.weight", n_q, embd, weight, sharp)
            w.matrix(b + "attn_k.weight", n_k, embd, weight, sharp)
            w.matrix(b + "attn_v.weight", n_v, embd, weight)
            w.matrix(b + "ffn_gate.weight", ff, embd, weight)
            w.matrix(b + "ffn_up.weight", ff, embd, weight)
        w.matrix(b + "attn_output.weight", embd, heads * head_v, weight, 0.6)
        w.vector(b + "ffn_norm.weight", embd)
        w.matrix(b + "ffn_down.weight", embd, ff, weight, 0.6)
        if qk_norm:
            w.vector(b + "attn_q_norm.weight", head_k, mean=qk)
            w.vector(b + "attn_k_norm.weight", head_k, mean=qk)
        if gemma:
            w.vector(b + "post_attention_norm.weight", embd, mean=8.0, std=1.6)
            w.vector(b + "post_ffw_norm.weight", embd, mean=8.0, std=1.6)
        if bias or arch == "qwen2":
            for name, n in (("attn_q", n_q), ("attn_k", n_k), ("attn_v", n_v)):
                planted = outliers * (np.arange(n) % 16 == 13) if name == "attn_k" else 0.0
                w.vector(f"{b}{name}.bias", n, mean=planted, std=v_bias if name == "attn_v" else 0.5)
        if bias and arch == "llama":
            w.vector(b + "attn_output.bias", embd, mean=0.0, std=0.2)
    w.finish()
    return path


def chain_model(path, text="abcd!", start=":", ctx=4096):
    """One-hot embeddings, an output matrix that maps each token to its successor, and layers that add nothing."""
    w = Writer(path, "llama", 0)
    embd = (w.n_vocab + 31) // 32 * 32
    w.sizes(1, embd, 32, embd // 32, 1, 32, 32, ctx)
    ids = ids_of(text)
    assert len(set(ids)) == len(ids), "a chain's text must not repeat a byte"
    successor = np.full(w.n_vocab, ids[0])
    successor[ids] = [*ids[1:], EOS]
    assert ids_of(start)[-1] not in ids
    one_hot = np.eye(w.n_vocab, embd, dtype=np.float32)
    w.add_tensor("token_embd.weight", one_hot)
    out = np.zeros((w.n_vocab, embd), np.float32)
    out[successor, np.arange(w.n_vocab)] = 1.0
    w.add_tensor("output.weight", out)
    w.add_tensor("output_norm.weight", np.ones(embd, np.float32))
    for name in "attn_norm", "ffn_norm":
        w.add_tensor(f"blk.0.{name}.weight", np.ones(embd, np.float32))
    for name, rows, columns in (("attn_q", embd, embd), ("attn_k", 32, embd), ("attn_v", 32, embd),
                                ("attn_output", embd, embd), ("ffn_gate", 32, embd), ("ffn_up", 32, embd),
                                ("ffn_down", embd, 32)):
        w.add_tensor(f"blk.0.{name}.weight", np.zeros((rows, columns), np.float32))
    w.finish()
    return path


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("out")
    p.add_argument("--chain", metavar="TEXT")
    p.add_argument("--arch", choices=ARCHITECTURES, default="llama")
    p.add_argument("--weight", choices=WEIGHT_TYPES, default="F32")
    for name, default in (("heads", 4), ("kv-heads", 2), ("head-k", 64), ("head-v", 0), ("layers", 2), ("embd", 256),
                          ("ff", 256), ("ctx", 4096), ("window", 0), ("seed", 1)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--tied", action="store_true")
    p.add_argument("--bos", action="store_true")
    a = vars(p.parse_args())
    out, chain = a.pop("out"), a.pop("chain")
    chain_model(out, chain) if chain else random_model(out, **a)


if __name__ == "__main__":
    main()
