#!/usr/bin/env python3
"""Writes the files that fuzzing starts from: small valid GGUF files and texts. Usage: fuzz_seeds.py DIRECTORY"""
import pathlib
import struct
import sys

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", 10: "<Q", 11: "<q", 12: "<d"}


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def item(kind, value):
    return string(value) if kind == STRING else struct.pack(SCALARS[kind], value)


def pair(key, kind, value):
    if isinstance(value, list):
        return string(key) + struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(item(kind, v) for v in value)
    return string(key) + struct.pack("<I", kind) + item(kind, value)


def gguf(pairs, tensors=(), version=3):
    """tensors: (name, shape with the row length first, type number, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pair(*p) for p in pairs)
    data = b""
    for name, shape, kind, raw in tensors:
        out += string(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in shape)
        out += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    return out + bytes(-len(out) % 32) + data


def byte_letters():
    """The characters that byte-level BPE writes for the bytes 0 to 255 (Radford et al. 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)]


def bpe(pre):
    pairs = ["t h", "th e", "Ġ the", "i n", "a n", "an d", "Ċ Ċ", "Ġ Ġ"]
    tokens = byte_letters() + [p.replace(" ", "") for p in pairs] + ["<|end|>", "<|im_start|>"]
    return [("general.architecture", STRING, "llama"), ("tokenizer.ggml.model", STRING, "gpt2"),
            ("tokenizer.ggml.pre", STRING, pre), ("tokenizer.ggml.tokens", STRING, tokens),
            ("tokenizer.ggml.token_type", I32, [1] * (len(tokens) - 2) + [3, 3]),
            ("tokenizer.ggml.merges", STRING, pairs), ("tokenizer.ggml.bos_token_id", U32, len(tokens) - 1),
            ("tokenizer.ggml.eos_token_id", U32, len(tokens) - 2), ("tokenizer.ggml.add_bos_token", BOOL, 1)]


def spm():
    pieces = ["▁", "t", "h", "e", "▁t", "he", "▁the", "▁▁", "é"]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + pieces
    return [("tokenizer.ggml.model", STRING, "llama"), ("tokenizer.ggml.tokens", STRING, tokens),
            ("tokenizer.ggml.scores", F32, [0.0] * 259 + [-1.0 - i for i in range(len(pieces))]),
            ("tokenizer.ggml.token_type", I32, [2, 3, 3] + [6] * 256 + [1] * len(pieces)),
            ("tokenizer.ggml.bos_token_id", U32, 1), ("tokenizer.ggml.eos_token_id", U32, 2),
            ("tokenizer.ggml.add_bos_token", BOOL, 1), ("tokenizer.ggml.add_space_prefix", BOOL, 1)]


def model():
    """A whole llama model of one layer, all matrices Q8_0 of 32 columns."""
    def q8(name, rows):
        return name, [32, rows], 8, (struct.pack("<e", 0.01) + bytes(range(32))) * rows

    def ones(name):
        return name, [32], 0, struct.pack("<f", 1.0) * 32
    words = spm()
    n_vocab = len(words[1][2])
    sizes = dict(context_length=64, embedding_length=32, block_count=1, feed_forward_length=32)
    sizes.update({"attention.head_count": 1, "attention.head_count_kv": 1, "rope.dimension_count": 32})
    pairs = [("general.architecture", STRING, "llama"), *((f"llama.{k}", U32, v) for k, v in sizes.items()),
             ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5), *words]
    tensors = [q8("token_embd.weight", n_vocab), ones("output_norm.weight"), ones("blk.0.attn_norm.weight"), ones("blk.0.ffn_norm.weight")]
    tensors += [q8(f"blk.0.{name}.weight", 32) for name in
                ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")]
    return gguf(pairs, tensors)


def seeds():
    every = [(f"k.{kind}", kind, 1) for kind in SCALARS] + [(f"a.{kind}", kind, [0, 1, 1]) for kind in SCALARS]
    text = "The quick brown fox, don't  stop:\n\n\t12345 -> x²Ⅷ \u00a0é e\u0301 漢字 👍🏽 <|im_start|><s></s>\r\n"
    return {
        "model.gguf": model(),
        "bpe-gpt2.gguf": gguf(bpe("gpt-2")),
        "bpe-qwen2.gguf": gguf(bpe("qwen2")),
        "spm.gguf": gguf([("general.architecture", STRING, "llama"), *spm()]),
        "every-type.gguf": gguf([("general.architecture", STRING, "llama"), *every, ("s", STRING, "x"),
                                 ("as", STRING, ["a", "", "bc"]), ("general.alignment", U32, 32)]),
        "version2.gguf": gguf([("general.architecture", STRING, "llama")], [("t", [32], 0, bytes(128))], version=2),
        "text.txt": text.encode(),
        "broken.txt": b"a\x00\xff\xc3 \xe2\x96\x81\xf0\x9f" + text.encode("utf-16-le") + bytes(range(256)),
    }


def write(folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds().items():
        (folder / name).write_bytes(data)
    return sorted(folder / name for name in seeds())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(sys.argv[1])
