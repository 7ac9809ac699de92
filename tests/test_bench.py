"""--bench: which tests are run, what is reported of them, and what is refused. Speeds themselves depend on the machine."""
import json
import math
import signal
import subprocess
import time

import gguf
import pytest
from conftest import GEN

KEYS = {"test", "n", "depth", "sequences", "tokens_per_s", "best_tokens_per_s", "stddev", "bytes_per_token", "gb_per_s",
        "bandwidth_fraction", "gmac_per_s", "int8_fraction"}


@pytest.fixture(scope="module")
def rand(mkfix):
    return mkfix("rand")


def bench(gen, model, *args):
    return json.loads(gen.ok("-m", model, "--bench", "--json", "--reps", "2", *args).text)


def matrices(model):
    """Bytes and weights of the layers' matrices, and of the last one."""
    tensors = {t.name: t for t in gguf.GGUFReader(model).tensors if len(t.shape) == 2}
    layers = [t for name, t in tensors.items() if name.startswith("blk.")]
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    return sum(int(t.n_bytes) for t in layers), sum(int(t.n_elements) for t in layers), int(head.n_bytes), int(head.n_elements)


def test_tests_and_their_order(gen, rand):
    rows = bench(gen, rand, "-pp", "5,3", "-tg", "4", "-d", "0,40", "-np", "1,3")
    assert [(r["test"], r["n"], r["depth"], r["sequences"]) for r in rows] == [
        ("prefill", 5, 0, 1), ("prefill", 3, 0, 1), ("decode", 4, 0, 1), ("decode", 4, 0, 3),
        ("prefill", 5, 40, 1), ("prefill", 3, 40, 1), ("decode", 4, 40, 1), ("decode", 4, 40, 3)]
    for r in rows:
        assert set(r) == KEYS
        assert 0 < r["tokens_per_s"] <= r["best_tokens_per_s"] < math.inf
        # the median of two is their mean, so that the larger lies half their difference above it
        assert math.isclose(r["best_tokens_per_s"], r["tokens_per_s"] + r["stddev"] / math.sqrt(2), rel_tol=1e-9)
        assert math.isclose(r["gb_per_s"] * 1e9, r["tokens_per_s"] * r["bytes_per_token"], rel_tol=1e-9)
        assert r["bandwidth_fraction"] > 0 and r["int8_fraction"] > 0
    machine = {key: rows[0][value] / rows[0][key] for key, value in
               (("bandwidth_fraction", "gb_per_s"), ("int8_fraction", "gmac_per_s"))}
    for r in rows:                     # all are compared with the same speed of the machine
        assert math.isclose(r["gb_per_s"] / r["bandwidth_fraction"], machine["bandwidth_fraction"], rel_tol=1e-9)
        assert math.isclose(r["gmac_per_s"] / r["int8_fraction"], machine["int8_fraction"], rel_tol=1e-9)


def test_default_tests(gen, rand):
    def kinds(*args):
        return [(r["test"], r["n"]) for r in bench(gen, rand, *args)]
    assert kinds() == [("prefill", 512), ("decode", 128)]
    assert kinds("-pp", "7") == [("prefill", 7)]
    assert kinds("-tg", "6", "-pp", "0") == [("decode", 6)]


@pytest.mark.parametrize("words, width, near, total", [
    ([], 2, 0, 2), (["--arch", "gemma3", "--swa", "8", "--layers", "6"], 2, 5, 6), (["--tied", "1"], 2, 0, 2)])
def test_bytes_and_products(gen, mkfix, words, width, near, total):
    """Two KV heads of 16 channels; `near` of the layers see 8 tokens."""
    model = mkfix("rand", *words)
    layer_bytes, layer_weights, head_bytes, head_weights = matrices(model)

    def seen(pos, element=2):
        return 2 * (16 + 16) * element * ((total - near) * (pos + 1) + near * min(pos + 1, 8))
    prefill, decode, together = bench(gen, model, "-pp", "20", "-tg", "5", "-d", "30", "-np", "1,4")
    assert math.isclose(prefill["bytes_per_token"], (layer_bytes + head_bytes + seen(49)) / 20)
    assert math.isclose(decode["bytes_per_token"], layer_bytes + head_bytes + seen(32))
    assert math.isclose(together["bytes_per_token"], (layer_bytes + head_bytes) / 4 + seen(32))
    for row, products in (prefill, layer_weights + head_weights / 20), (decode, layer_weights + head_weights), \
                         (together, layer_weights + head_weights):
        assert math.isclose(row["gmac_per_s"] * 1e9, products * row["tokens_per_s"], rel_tol=1e-9)
    wide = bench(gen, model, "-pp", "0", "-tg", "5", "-d", "30", "-ctk", "f32", "-ctv", "f32")[0]
    assert math.isclose(wide["bytes_per_token"], layer_bytes + head_bytes + seen(32, 4))


def test_table(gen, rand):
    r = gen.ok("-m", rand, "--bench", "-pp", "9", "-tg", "2", "-t", "1", "--reps", "1")
    lines = r.text.splitlines()
    assert "1 thread; memory" in lines[0] and "GMAC/s; median of 1 runs" in lines[0]
    assert [line.split()[:4] for line in lines[3:]] == [["prefill", "9", "0", "1"], ["decode", "2", "0", "1"]]
    assert r.err == ""


def test_past_the_models_context_and_within_the_one_asked_for(gen, mkfix):
    model = mkfix("rand", "--ctx", "64")
    assert bench(gen, model, "-tg", "3", "-d", "100")[0]["depth"] == 100
    assert bench(gen, model, "-tg", "3", "-d", "61", "-c", "64")[0]["n"] == 3
    gen.refused("-m", model, "--bench", "-tg", "4", "-d", "61", "-c", "64", rc=2, says=["65", "64", "--ctx-size"])


@pytest.mark.parametrize("args, says", [
    (["-pp", "1,x"], ["-pp", "1,x"]), (["-tg", "4,"], ["-tg"]), (["-tg", ",4"], ["-tg"]), (["-d", "-1"], ["--depth"]),
    (["-d", "99999999999999999999"], ["--depth"]), (["-np", "0"], ["-np"]), (["-np", "65"], ["-np", "64"]),
    (["-pp", "0", "-tg", "0"], ["-pp", "-tg"]), (["-pp", "+1"], ["-pp"]), (["-pp", " 1"], ["-pp"]), (["-pp", ""], ["-pp"]),
    (["-tg", ",".join(["1"] * 33)], ["-tg", "32"]), (["--reps", "0"], ["--reps"]), (["-p", "x"], ["--prompt"])])
def test_refusals(gen, rand, args, says):
    gen.refused("-m", rand, "--bench", *args, rc=2, says=says)


def test_more_cache_than_there_is_memory(gen, rand):
    gen.refused("-m", rand, "--bench", "-tg", "1", "-d", "1000000000", rc=1, says=["--depth", "bytes"])


@pytest.mark.parametrize("option", [["-pp", "1"], ["-tg", "1"], ["-d", "1"], ["-np", "2"], ["--reps", "2"]])
def test_options_that_need_bench(gen, rand, option):
    gen.refused("-m", rand, "-p", "x", *option, rc=2, says="--bench")


def test_interrupted(rand):
    run = subprocess.Popen([GEN, "-m", rand, "--bench", "-tg", "1000000", "--reps", "1000"], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=20)
    assert run.returncode == -signal.SIGINT and out == b""


def test_without_a_cache(gen, tmp_path):
    """Decode alone, with a cache and without: the more text, the larger the ratio."""
    from make_model import random_model
    model = random_model(tmp_path / "m.gguf", layers=4)
    rows = bench(gen, model, "--no-kv-cache", "-tg", "2", "-d", "16,512")
    assert [(r["test"], r["n"], r["depth"]) for r in rows] == [("decode", 2, 16), ("decode", 2, 512)]
    ratio = [r["cached_tokens_per_s"] / r["tokens_per_s"] for r in rows]
    assert set(rows[0]) == KEYS | {"cached_tokens_per_s"} and ratio[1] > 2 * ratio[0] > 0
    table = gen.ok("-m", model, "--bench", "--no-kv-cache", "--reps", "1").text.splitlines()
    assert [line.split()[:2] for line in table[3:]] == [["128", "4"], ["256", "4"], ["512", "4"], ["1024", "4"]]
    gen.refused("-m", model, "--bench", "--no-kv-cache", "-pp", "5", rc=2, says=["-pp", "--no-kv-cache"])
