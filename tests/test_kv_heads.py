"""--kv-heads: a file whose key and value heads NumPy has averaged, and one whose heads it has repeated, give the same bits
as the option does with the file they were made of."""
import json

import gguf
import numpy as np
import pytest
from make_model import random_model

SIZES = {"heads": 12, "kv_heads": 6, "head_k": 32, "layers": 2, "embd": 64, "ff": 64}


def regroup(x, heads, n):
    """x: [heads * size, ...] in floats, to n heads: means of neighbours, rounded to F16, or copies."""
    x = x.reshape(heads, -1, *x.shape[1:])
    if n >= heads:
        return np.repeat(x, n // heads, axis=0).reshape(-1, *x.shape[2:])
    groups = x.reshape(n, heads // n, *x.shape[1:])
    total = np.zeros_like(groups[:, 0])
    for i in range(heads // n):        # one by one, as the program adds them
        total += groups[:, i]
    return (total / np.float32(heads // n)).reshape(-1, *x.shape[2:])


def converted(source, target, n):
    """Writes `source` with n key/value heads."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    sizes = {k: reader.fields[f"{arch}.attention.{k}"].contents() for k in ("head_count", "head_count_kv", "key_length")}
    heads, n_q = sizes["head_count_kv"], sizes["head_count"] * sizes["key_length"]
    n_k = heads * sizes["key_length"]
    writer = gguf.GGUFWriter(target, arch)
    for key, field in reader.fields.items():
        if key.endswith(".head_count_kv"):
            writer.add_head_count_kv(n)
        elif not key.startswith("GGUF.") and key != "general.architecture":
            item = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], item)

    def weights(x):
        return regroup(x, heads, n).astype(np.float16 if n < heads else np.float32)
    for t in reader.tensors:
        x = gguf.dequantize(t.data, t.tensor_type)
        if "attn_k.weight" in t.name or "attn_v.weight" in t.name:
            writer.add_tensor(t.name, weights(x))
        elif "attn_qkv" in t.name:
            writer.add_tensor(t.name, np.concatenate([x[:n_q].astype(np.float16), weights(x[n_q:n_q + n_k]).astype(np.float16),
                                                      weights(x[n_q + n_k:]).astype(np.float16)]))
        elif "attn_k.bias" in t.name or "attn_v.bias" in t.name:
            writer.add_tensor(t.name, regroup(x, heads, n))
        else:
            writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def answer(gen, model, *args):
    r = json.loads(gen.ok("-q", "--temp", "0", "--json", "-m", model, "-p", "The quick brown fox", "-n", "8", *args).text)
    return r["tokens"], r["logits_sha256"]


# llama with biases in F32 and in blocks, qwen3 and gemma3 with normalised keys, phi3 with one fused tensor in F16
MODELS = [("llama", "F32", True), ("llama", "Q4_0", True), ("qwen2", "Q8_0", True), ("qwen3", "F16", False),
          ("gemma3", "BF16", False), ("phi3", "F16", False)]


@pytest.mark.parametrize("arch, weight, bias", MODELS)
def test_fewer_heads_are_means(gen, tmp_path, arch, weight, bias):
    window = {"window": 8} if arch in ("gemma3", "phi3") else {}
    source = random_model(tmp_path / "m.gguf", arch, weight=weight, bias=bias, **window, **SIZES)
    own = answer(gen, source)
    for word, n in (("1", 1), ("mqa", 1), ("2", 2), ("3", 3)):
        other = converted(source, tmp_path / f"{word}.gguf", n)
        assert answer(gen, source, "--kv-heads", word) == answer(gen, other) != own
        assert answer(gen, source, "--kv-heads", word, "-ctk", "int8", "-ctv", "int4") == answer(
            gen, other, "-ctk", "q8_0", "-ctv", "q4_0")


@pytest.mark.parametrize("arch, weight, bias", MODELS)
def test_more_heads_are_copies(gen, tmp_path, arch, weight, bias):
    source = random_model(tmp_path / "m.gguf", arch, weight=weight, bias=bias, **SIZES)
    own = answer(gen, source)
    for word in ("auto", "gqa", "6", "12", "mha"):
        assert answer(gen, source, "--kv-heads", word, "--no-mmap") == own
    if weight == "F32":
        assert answer(gen, converted(source, tmp_path / "12.gguf", 12)) == own


def test_bytes_and_warning(gen, tmp_path):
    model = random_model(tmp_path / "m.gguf", **SIZES)
    per_token = {}
    for word in ("1", "3", "6", "12"):
        run = json.loads(gen.ok("-m", model, "--dry-run", "--json", "--kv-heads", word).text)
        per_token[word] = {c["type_k"]: (c["bytes_per_token"], c["reserved_bytes"]) for c in run["cache"]}
    for word in per_token:
        for kind in ("f32", "f16", "int8", "int4"):
            for i in range(2):
                assert per_token[word][kind][i] * 6 == per_token["6"][kind][i] * int(word)
    for word, warned in (("1", 1), ("3", 1), ("6", 0), ("12", 0)):
        err = gen.ok("-m", model, "--temp", "0", "-p", "a", "-n", "1", "--kv-heads", word).err
        assert err.count("averaged") == warned
    assert "averaged" not in gen.ok("-q", "-m", model, "--temp", "0", "-p", "a", "-n", "1", "--kv-heads", "1").err


def test_refused(gen, tmp_path):
    model = random_model(tmp_path / "m.gguf", **SIZES)
    mha = random_model(tmp_path / "mha.gguf", **{**SIZES, "kv_heads": 12})
    for word in ("4", "5", "24", "4096"):
        gen.refused("-m", model, "-p", "a", "--kv-heads", word, rc=2, says=["--kv-heads " + word, "12", "6"])
    for word in ("0", "-1", "N", "none", "1.5", ""):
        gen.refused("-m", model, "-p", "a", "--kv-heads", word, rc=2, says="--kv-heads")
    gen.refused("-m", mha, "-p", "a", "--kv-heads", "gqa", rc=2, says="gqa")
    assert answer(gen, mha, "--kv-heads", "mha") == answer(gen, mha)


def test_more_heads_than_threads_can_share_out(gen, tiny):
    """The pieces of a phase are counted in 22 bits: a model of very many heads is refused for a batch so large."""
    model = tiny(heads=4096, kv_heads=128, head_k=2, embd=32, ff=32, layers=1, ctx=65536)
    gen.refused("-q", "-m", model, "-p", "a", "-n", "1", "-b", "65536", rc=2, says="--batch-size")
    gen.ok("-q", "-m", model, "-p", "a", "-n", "1", "-b", "512")
