"""oracle.py - a readable NumPy forward pass over the tensors of a GGUF file: what the logits of a model are.

Tensors are dequantised by the `gguf` package, every product is a plain matrix product of floats (float64 unless
told otherwise), and a text is one causal pass without a cache. Two options imitate, one by one, what an engine rounds
on purpose:

    int8=True   activations in front of a quantised matrix are rounded to int8 in blocks of 32 (see `quantise`)
    kv="f16"    keys (after RoPE) and values are rounded to half precision, as a cache of that type holds them

Facts about the architectures, each read in llama.cpp's sources (src/models/NAME.cpp, src/llama-model.cpp, ggml's rope):

    all      RMS norm x / sqrt(mean(x^2) + eps) * w; head sizes from attention.key_length and value_length, else
             n_embd / n_head; output.weight, or token_embd.weight where it is missing; scores times
             1 / sqrt(key head size).
    llama    RoPE turns neighbours (2i, 2i+1); the frequency of pair i is divided by rope_freqs.weight[i]; biases on
             q, k, v and attn_output where present; attention.sliding_window is not read (Mistral's files carry it).
    qwen2    here and below RoPE turns halves (i, i + n/2); biases on q, k, v.
    qwen3    each query and key head is RMS-normed before RoPE.
    phi3     attn_qkv holds q, k, v one after the other, ffn_up holds gate then up. Frequencies are divided by
             rope_factors_long.weight where the context in use exceeds rope.scaling.original_context_length (the
             model's context if not given), else by rope_factors_short.weight; cos and sin are multiplied by
             rope.scaling.attn_factor. A window holds in all layers (llama.cpp reads the key but does not apply it;
             here it is applied).
    gemma2   embeddings times sqrt(n_embd); outputs of attention and feed-forward are normed before they are added;
             GELU in the tanh form; scores capped by 50 and logits by 30 (keys override); the window, 4096 if not
             given, holds in layers 0, 2, 4, ..; 46 layers (27B) scale scores by 1 / sqrt(n_embd / n_head).
    gemma3   as gemma2 without caps, with q and k norms; of six layers the first five are local and have the RoPE base
             rope.freq_base_swa, 10000 if not given, and no scaling; without a window all layers are global; 62
             layers are the 27B.
    window   query i sees keys j with i - j < window.
    scaling  linear: positions divided by the factor; no type means linear. yarn: per pair a mix of the divided and the
             plain frequency; cos and sin times 1 + 0.1 ln(factor), and times attn_factor.
"""
import math
import struct

import gguf
import numpy as np

FLOAT_TYPES = {"F32", "F16", "BF16"}


def quantise(x):
    """The nearest int8 activations, as floats: per block of 32, d = largest magnitude / 127, x ~ d * round(x / d)."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    d = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    q = np.rint(blocks / np.where(d > 0, d, 1))
    return (q * d).reshape(x.shape).astype(x.dtype)


def rms_norm(x, w, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * w


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def cap(x, c):
    return c * np.tanh(x / c) if c else x


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(x.dtype)


class Oracle:
    """A model in a GGUF file. `ctx` is the context in use (it chooses phi3's factors); rope_base and rope_scale
    override the file's base and linear factor, as --rope-freq-base and --rope-scale do."""

    def __init__(self, path, dtype=np.float64, ctx=0, int8=False, kv="f32", rope_base=0.0, rope_scale=0.0):
        self.reader = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in self.reader.tensors}
        self.floats = {}
        self.dtype, self.int8, self.kv = dtype, int8, kv
        self.arch = self.reader.fields["general.architecture"].contents()
        assert self.arch in ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"), self.arch
        self.gemma = self.arch in ("gemma2", "gemma3")
        key = self.key
        self.n_layer, self.n_embd = key("block_count"), key("embedding_length")
        self.n_head = key("attention.head_count")
        self.n_kv = key("attention.head_count_kv", self.n_head)
        self.head_k = key("attention.key_length", self.n_embd // self.n_head)
        self.head_v = key("attention.value_length", self.n_embd // self.n_head)
        self.eps = key("attention.layer_norm_rms_epsilon")
        self.attn_cap = key("attn_logit_softcapping", 50.0) if self.arch == "gemma2" else 0.0
        self.logit_cap = key("final_logit_softcapping", 30.0 if self.arch == "gemma2" else 0.0) if self.gemma else 0.0
        wide = self.n_layer == {"gemma2": 46, "gemma3": 62}.get(self.arch)
        self.attn_scale = 1 / math.sqrt(self.n_embd // self.n_head if wide else self.head_k)
        self.window, self.local = self.find_windows()
        self.find_rope(ctx, rope_base, rope_scale)

    def key(self, name, default=None):
        field = self.reader.fields.get(f"{self.arch}.{name}")
        if field is None:
            assert default is not None, f"{self.arch}.{name} is missing"
            return default
        return field.contents()

    def find_windows(self):
        """The window, and for each layer whether it applies."""
        period = {"phi3": 1, "gemma2": 2, "gemma3": 6}.get(self.arch)
        window = self.key("attention.sliding_window", 4096 if self.arch == "gemma2" else 0) if period else 0
        pattern = self.key("attention.sliding_window_pattern", period or 0)
        if isinstance(pattern, list):
            return window, [bool(window and p) for p in pattern]
        is_local = lambda i: bool(window) and (pattern <= 1 or i % pattern < pattern - 1)
        return window, [is_local(i) for i in range(self.n_layer)]

    # ---- RoPE

    def find_rope(self, ctx, base_override, scale_override):
        """Radians per position of each pair, in global and in local layers, and the magnitude of cos and sin."""
        key = self.key
        self.n_rot = key("rope.dimension_count", self.head_k)
        base = base_override or key("rope.freq_base", 10000.0)
        kind = key("rope.scaling.type", "linear")
        factor = scale_override or key("rope.scaling.factor", 0.0) or key("rope.scale_linear", 0.0) or 1.0
        if kind == "none" and not scale_override:
            factor = 1.0
        original = key("rope.scaling.original_context_length", key("context_length"))
        divisors = None
        if self.arch == "llama":
            divisors = self.vector("rope_freqs.weight")
        if self.arch == "phi3" or kind == "longrope":
            long = (ctx or key("context_length")) > original
            divisors = self.vector("rope_factors_long.weight" if long else "rope_factors_short.weight")
        yarn = kind == "yarn"
        self.freq = self.frequencies(base, factor, divisors, yarn, original)
        magnitude = lambda factor: key("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor) if yarn else 1.0)
        local_base, local_factor = base, factor
        if self.arch == "gemma2":
            local_base = key("rope.freq_base_swa", base)
        if self.arch == "gemma3":
            local_base, local_factor = key("rope.freq_base_swa", 10000.0), 1.0
        self.rope_scale, self.local_rope_scale = magnitude(factor), magnitude(local_factor)
        self.local_freq = self.frequencies(local_base, local_factor, None if self.gemma else divisors, yarn, original)

    def frequencies(self, base, factor, divisors, yarn, original):
        n = self.n_rot
        pair = np.arange(n // 2, dtype=np.float64)
        freq = base ** (-2 * pair / n)
        if divisors is not None:
            freq = freq / divisors
        mix = 0.0
        if yarn:                       # 1 for fast pairs, which keep their frequency; 0 for slow ones
            turns_in = lambda turns: n * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
            low = max(0, math.floor(turns_in(self.key("rope.scaling.yarn_beta_fast", 32.0))))
            high = min(n - 1, math.ceil(turns_in(self.key("rope.scaling.yarn_beta_slow", 1.0))))
            mix = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
        return freq / factor * (1 - mix) + freq * mix

    def rope(self, x, local, start=0):
        """x[heads][tokens][head size], turned at positions start, start + 1, ..."""
        freq, scale = (self.local_freq, self.local_rope_scale) if local else (self.freq, self.rope_scale)
        angle = np.arange(start, start + x.shape[1], dtype=np.float64)[:, None] * freq
        cos, sin = (f(angle).astype(x.dtype) * x.dtype.type(scale) for f in (np.cos, np.sin))
        n = self.n_rot
        pairs = self.arch == "llama"
        first, second = (slice(0, n, 2), slice(1, n, 2)) if pairs else (slice(0, n // 2), slice(n // 2, n))
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    # ---- tensors

    def weight(self, name):
        """The tensor as floats, [rows][columns]; None where the file has none."""
        if name not in self.floats and name in self.tensors:
            t = self.tensors[name]
            self.floats[name] = gguf.dequantize(t.data, t.tensor_type).astype(self.dtype, copy=False)
        return self.floats.get(name)

    vector = weight

    def matmul(self, x, name):
        if self.int8 and self.tensors[name].tensor_type.name not in FLOAT_TYPES:
            x = quantise(x)
        return x @ self.weight(name).T

    def project(self, x, layer, name):
        y = self.matmul(x, f"blk.{layer}.{name}.weight")
        bias = self.vector(f"blk.{layer}.{name}.bias")
        return y if bias is None else y + bias

    # ---- the forward pass

    def heads(self, x, n, size):
        return x.reshape(len(x), n, size).transpose(1, 0, 2)

    def qkv(self, x, layer, start=0):
        """Queries, keys and values [heads][tokens][head size] of tokens from position `start` on, as they meet."""
        sizes = self.n_head * self.head_k, self.n_kv * self.head_k, self.n_kv * self.head_v
        if f"blk.{layer}.attn_qkv.weight" in self.tensors:
            q, k, v = np.split(self.project(x, layer, "attn_qkv"), np.cumsum(sizes)[:2], axis=1)
        else:
            q, k, v = (self.project(x, layer, name) for name in ("attn_q", "attn_k", "attn_v"))
        q, k, v = (self.heads(x, n, size) for x, n, size in ((q, self.n_head, self.head_k), (k, self.n_kv, self.head_k),
                                                             (v, self.n_kv, self.head_v)))
        if self.arch in ("qwen3", "gemma3"):
            q = rms_norm(q, self.vector(f"blk.{layer}.attn_q_norm.weight"), self.eps)
            k = rms_norm(k, self.vector(f"blk.{layer}.attn_k_norm.weight"), self.eps)
        q, k = self.rope(q, self.local[layer], start), self.rope(k, self.local[layer], start)
        if self.kv == "f16":
            k, v = k.astype(np.float16).astype(self.dtype), v.astype(np.float16).astype(self.dtype)
        return q, k, v

    def attention(self, x, layer):
        q, k, v = self.qkv(x, layer)
        i, j = np.arange(len(x))[:, None], np.arange(len(x))
        hidden = j > i
        if self.local[layer]:
            hidden |= i - j >= self.window
        out = np.empty((len(x), self.n_head, self.head_v), self.dtype)
        for h in range(self.n_head):
            g = h // (self.n_head // self.n_kv)
            score = cap(q[h] @ k[g].T * self.dtype(self.attn_scale), self.attn_cap)
            score[hidden] = -np.inf
            p = np.exp(score - score.max(axis=1, keepdims=True))
            out[:, h] = p @ v[g] / p.sum(axis=1, keepdims=True)
        return self.project(out.reshape(len(x), -1), layer, "attn_output")

    def feed_forward(self, x, layer):
        if self.arch == "phi3":
            gate, up = np.split(self.project(x, layer, "ffn_up"), 2, axis=1)
        else:
            gate, up = self.project(x, layer, "ffn_gate"), self.project(x, layer, "ffn_up")
        return self.project((gelu if self.gemma else silu)(gate) * up, layer, "ffn_down")

    def logits(self, tokens, first=0):
        """Logits after each of tokens[first:], as [rows][n_vocab]."""
        norm = lambda x, name: rms_norm(x, self.vector(name), self.eps)
        x = self.weight("token_embd.weight")[np.asarray(tokens)]
        if self.gemma:
            x = x * self.dtype(math.sqrt(self.n_embd))
        for layer in range(self.n_layer):
            b = f"blk.{layer}."
            y = self.attention(norm(x, b + "attn_norm.weight"), layer)
            x = x + (norm(y, b + "post_attention_norm.weight") if self.gemma else y)
            y = self.feed_forward(norm(x, b + "ffn_norm.weight"), layer)
            x = x + (norm(y, b + "post_ffw_norm.weight") if self.gemma else y)
        x = norm(x[first:], "output_norm.weight")
        tied = "output.weight" not in self.tensors
        y = self.matmul(x, "token_embd.weight" if tied else "output.weight")
        bias = self.vector("output.bias")
        return cap(y if bias is None else y + bias, self.logit_cap)

    def log_probs(self, tokens, first=0):
        return log_softmax(self.logits(tokens, first))


def windows(tokens, n_ctx, chunks, bos=None):
    """llama-perplexity's method: consecutive windows of n_ctx tokens (the first of each replaced by `bos` where the
    model wants one), of which the second half is scored. Yields (window, first scored row, the tokens
    that those rows predict)."""
    first = n_ctx // 2
    for i in range(min(chunks, len(tokens) // n_ctx)):
        w = list(tokens[i * n_ctx:(i + 1) * n_ctx])
        targets = w[first + 1:]
        if bos is not None:
            w[0] = bos
        yield w, first, targets


def kl_divergence(base, other):
    """KL(base || other) of each row of log-probabilities, in nats."""
    out = np.empty(len(base))
    for i, (p, q) in enumerate(zip(base, other)):
        p = p.astype(np.float64)
        out[i] = np.dot(np.exp(p), p - q)
    return out


def read_log_probs(path):
    """A file written by gen --save-logits (layout: measure.c): token windows [windows][w] as the model got them, and
    log-probabilities of the scored rows [windows][rows][n_vocab], rows w/2 to w-2 of each window."""
    with open(path, "rb") as f:
        magic, n_vocab, w, n, _ = struct.unpack("<8sIIQQ", f.read(32))
        assert magic == b"GENLOGP\1", path
        f.seek(64)
        tokens = np.fromfile(f, "<i4", n * w).reshape(n, w)
        rows = w - 1 - w // 2
        return tokens, np.fromfile(f, "<f4").reshape(n, rows, n_vocab)
