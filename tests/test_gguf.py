"""gguf.c against the reader and the writer of the gguf package, and on malformed files."""
import hashlib
import json

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter, GGML_QUANT_SIZES, GGMLQuantizationType as Q
from conftest import SANITIZED
from test_quant import TYPES

# Malformed in their hyper-parameters only: nothing is wrong with the file as such.
SOUND = {"no_arch", "arch_unknown", "arch_nul", "heads_zero", "kv_heads_zero", "kv_heads_3", "layers_zero", "layers_4g",
         "embd_zero", "ctx_zero", "embd_4g"}


def dump(tool, *paths):
    """What the tool says of each file."""
    r = tool("gguf", "dump", *paths)
    assert r.rc == 0
    return [json.loads(line) for line in r.text.splitlines()]


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def expected_values(reader):
    """The key, type, item type, count, size and hash of every value, from the package's reader."""
    for name, field in reader.fields.items():
        if name.startswith("GGUF."):        # the reader's own additions
            continue
        array = field.types[0] == GGUFValueType.ARRAY
        packed = b"".join(part.tobytes() for part in field.parts[5 if array else 3:])
        yield {"key": name.encode().hex(), "type": int(field.types[0]), "item": int(field.types[1]) if array else 0,
               "count": int(field.parts[4][0]) if array else 1, "size": len(packed), "sha256": sha256(packed)}


def expected_tensors(reader, file=0):
    for t in reader.tensors:
        ne = [int(n) for n in t.shape]
        yield {"name": t.name.encode().hex(), "type": int(t.tensor_type), "n_dims": len(ne),
               "ne": ne + [1] * (4 - len(ne)), "file": file, "size": int(t.n_bytes), "sha256": sha256(t.data.tobytes()),
               "same": True}


def check_against_reader(tool, path):
    got, reader = dump(tool, path)[0], GGUFReader(path)
    assert got["ok"], got["error"]
    assert got["bytes"] == path.stat().st_size
    assert got["values"] == list(expected_values(reader))
    assert got["tensors"] == list(expected_tensors(reader))
    return got


def write_file(path, **how):
    """A file with a value and an array of each type that the writer has, and a tensor of each supported type."""
    rng = np.random.default_rng(5)
    w = GGUFWriter(path, "llama", **how)
    for add, value in ((w.add_uint8, 200), (w.add_int8, -3), (w.add_uint16, 50000), (w.add_int16, -1234),
                       (w.add_uint32, 2 ** 32 - 1), (w.add_int32, -7), (w.add_float32, 0.1), (w.add_uint64, 2 ** 64 - 1),
                       (w.add_int64, -2 ** 63), (w.add_float64, 1e-300), (w.add_bool, True), (w.add_string, "wörd")):
        add(f"one.{add.__name__}", value)
    for name, items in dict(strings=["a", "漢字", "b" * 1000], ints=[1, -2, 3], floats=[0.5, -1.5], bools=[True, False],
                            one=["x"]).items():
        w.add_array(f"many.{name}", items)
    for name in TYPES:
        block, size = GGML_QUANT_SIZES[Q[name]]
        raw = rng.integers(0, 256, (3, 2 * size), np.uint8)
        plain = {"F32": np.float32, "F16": np.float16}.get(name)
        if plain:
            w.add_tensor(f"t.{name}", rng.standard_normal((3, 2, 5)).astype(plain))
        else:
            w.add_tensor(f"t.{name}", raw, raw_dtype=Q[name])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def test_every_type(tool, tmp_path):
    write_file(tmp_path / "all types.gguf")
    got = check_against_reader(tool, tmp_path / "all types.gguf")
    assert {t["type"] for t in got["tensors"]} == {int(Q[name]) for name in TYPES}


def test_alignment(tool, tmp_path):
    for alignment in (8, 64, 4096):
        w = GGUFWriter(tmp_path / "a.gguf", "llama")
        w.add_custom_alignment(alignment)
        for i in range(3):
            w.add_tensor(f"t{i}", np.full(5 + i, i, np.float32))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        check_against_reader(tool, tmp_path / "a.gguf")


def test_split_set(tool, tmp_path):
    write_file(tmp_path / "whole.gguf")
    write_file(tmp_path / "set.gguf", split_max_tensors=4)
    parts = sorted(tmp_path.glob("set-*.gguf"))
    assert len(parts) == 4
    whole, split = dump(tool, tmp_path / "whole.gguf", parts[0])
    assert split["ok"], split["error"]
    assert split["bytes"] == sum(part.stat().st_size for part in parts)
    want = [t for i, part in enumerate(parts) for t in expected_tensors(GGUFReader(part), i)]
    assert split["tensors"] == want
    assert [t | {"file": 0} for t in split["tensors"]] == whole["tensors"]
    keys = {v["key"] for v in split["values"]} ^ {v["key"] for v in whole["values"]}
    assert {bytes.fromhex(key) for key in keys} == {b"split.no", b"split.count", b"split.tensors.count"}
    parts[2].unlink()
    (missing,) = dump(tool, parts[0])
    assert not missing["ok"] and parts[2].name in missing["error"] and missing["code"] == 3


def test_big_endian_is_refused(tool, tmp_path):
    write_file(tmp_path / "big.gguf", endianess=GGUFEndian.BIG)
    (got,) = dump(tool, tmp_path / "big.gguf")
    assert not got["ok"] and "big-endian" in got["error"]


def test_malformed_kinds(tool, mkfix):
    kinds = mkfix.kinds()
    assert len(kinds) > 40 and SOUND < set(kinds)
    for kind, got in zip(kinds, dump(tool, *(mkfix("bad", kind) for kind in kinds)), strict=True):
        assert got["ok"] == (kind in SOUND), f"{kind}: {got['error'] or 'accepted'}"
        assert got["seconds"] < 1, kind
        if not got["ok"]:
            assert got["code"] == 3 and got["error"].isprintable() and ".gguf: " in got["error"], (kind, got["error"])


@pytest.mark.parametrize("words", [("llama",), ("gemma3", "--head-dim", "16", "--tied", "1")])
def test_every_prefix_is_refused(tool, mkfix, words):
    arch, *rest = words
    path = mkfix("rand", "--arch", arch, "--embd", "16", "--ff", "16", "--layers", "1", "--heads", "2", *rest)
    check_against_reader(tool, path)
    r = tool("gguf", "prefixes", path, timeout=120)
    assert r.text == f"0 of {path.stat().st_size}\n"


def test_vocabularies(tool, data):
    paths = sorted((data / "tokenizers").glob("*.gguf"))
    assert len(paths) >= 7
    for path, got in zip(paths, dump(tool, *paths), strict=True):
        assert got["ok"] and got["tensors"] == [] and got["values"], (path, got["error"])
    check_against_reader(tool, data / "tokenizers" / "ggml-vocab-llama-spm.gguf")


def test_smollm2(tool, smollm2):
    check_against_reader(tool, smollm2)


def test_gemma3_opens_fast(tool, gemma3):
    """262,144 words take about 5 ms; the bound leaves room for a busy machine."""
    got = min(dump(tool, gemma3, gemma3, gemma3), key=lambda d: d["seconds"])
    assert got["ok"] and any(v["count"] == 262144 for v in got["values"])
    assert all(t["same"] for t in got["tensors"])
    assert got["seconds"] < (1 if SANITIZED else 0.2)
