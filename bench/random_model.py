#!/usr/bin/env python3
"""Writes a llama model of TinyLlama's shape (1.1 billion weights) with random weights, all matrices in one type: speed
does not depend on what the weights say.

  random_model.py OUT Q4_0|Q4_1|Q8_0|Q4_K|Q5_K|Q6_K
"""
import os
import sys

import gguf
import numpy as np

EMBD, LAYERS, HEADS, KV_HEADS, FF, VOCAB, CONTEXT = 2048, 22, 32, 4, 5632, 32000, 2048
HEAD = EMBD // HEADS
STD = EMBD ** -0.5                     # of the weights

# Where a block keeps its half-precision scale and that of its minima, in 16-bit words; the standard deviation of a
# weight whose bits are random when that scale is 1; and the minima's scale that makes the mean weight zero.
BLOCKS = {"Q4_0": (0, None, 4.6, 0), "Q4_1": (0, 1, 4.6, -7.5), "Q8_0": (0, None, 74, 0), "Q4_K": (0, 1, 220, 7.5),
          "Q5_K": (0, 1, 440, 15.5), "Q6_K": (104, None, 150, 0)}


def matrix(random, rows, columns, kind):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    words = np.frombuffer(random.bytes(rows * columns // block * size), np.uint16).reshape(-1, size // 2).copy()
    scale, minimum, deviation, shift = BLOCKS[kind]
    words[:, scale] = np.float16(STD / deviation).view(np.uint16)
    if minimum is not None:
        words[:, minimum] = np.float16(shift * STD / deviation).view(np.uint16)
    if kind == "Q6_K":                 # the groups' scales are bytes: small ones, so that the half is a normal number
        groups = words.view(np.uint8)[:, 192:208]
        groups[:] = groups % 8 + 4
    return words.view(np.uint8).reshape(rows, -1)


def shapes():
    yield "token_embd.weight", (VOCAB, EMBD)
    yield "output_norm.weight", (EMBD,)
    yield "output.weight", (VOCAB, EMBD)
    for i in range(LAYERS):
        for name, shape in (("attn_norm", (EMBD,)), ("attn_q", (EMBD, EMBD)), ("attn_k", (KV_HEADS * HEAD, EMBD)),
                            ("attn_v", (KV_HEADS * HEAD, EMBD)), ("attn_output", (EMBD, EMBD)), ("ffn_norm", (EMBD,)),
                            ("ffn_gate", (FF, EMBD)), ("ffn_up", (FF, EMBD)), ("ffn_down", (EMBD, FF))):
            yield f"blk.{i}.{name}.weight", shape


def header(path, kind):
    w = gguf.GGUFWriter(path, "llama")
    w.add_name(f"random 1.1B {kind}")
    w.add_context_length(CONTEXT)
    w.add_embedding_length(EMBD)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(FF)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(HEAD)
    w.add_rope_freq_base(10000.0)
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    types = [gguf.TokenType.UNKNOWN] + 2 * [gguf.TokenType.CONTROL] + 256 * [gguf.TokenType.BYTE]
    rest = VOCAB - len(tokens)
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens + [f"\N{LOWER ONE EIGHTH BLOCK}word{i}" for i in range(rest)])
    w.add_token_scores([0.0] * len(tokens) + [-1.0 - i for i in range(rest)])
    w.add_token_types(types + rest * [gguf.TokenType.NORMAL])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    return w


def write(path, kind):
    """The file appears under its name only when it is whole."""
    random = np.random.default_rng(1)
    w = header(f"{path}.part", kind)
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    for name, shape in shapes():
        if len(shape) == 1:
            w.add_tensor_info(name, shape, np.dtype(np.float32), shape[0] * 4)
        else:
            row = shape[1] // block * size
            w.add_tensor_info(name, (shape[0], row), np.dtype(np.uint8), shape[0] * row, number)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for _, shape in shapes():
        w.write_tensor_data(np.ones(shape, np.float32) if len(shape) == 1 else matrix(random, *shape, kind))
    w.close()
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in BLOCKS:
        sys.exit(__doc__)
    write(sys.argv[1], sys.argv[2])
