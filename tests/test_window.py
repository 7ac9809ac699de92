"""Streaming through --window and --sinks: text without end, no drift with any cache type (B10), memory that does not grow."""
import itertools
import json

import numpy as np
import pytest

TYPES = "f32 f16 bf16 fp8 int8 int4".split()
BYTE0 = 6                              # id of byte 0 in the fixture's vocabulary


@pytest.fixture(scope="module")
def losses(tool, mkfix):
    """losses(key type, value type): negative log-likelihoods of 1,800 random tokens through a window of 252 and 4 sinks."""
    made, tokens = {}, np.random.default_rng(3).integers(BYTE0, BYTE0 + 256, 1801)

    def run(key, value):
        if (key, value) not in made:
            r = tool("score", mkfix("rand", "--arch", "llama", "--ctx", 512, "--head-dim", 40, "--qk", 2), key, value, "252", "4",
                     "off", "0", "0", "1", stdin="0 " + " ".join(map(str, tokens)) + "\n")
            assert r.rc == 0, r.err
            made[key, value] = np.array([float(x.rstrip("*")) for x in r.text.split("|")[0].split()])
        return made[key, value]
    return run


@pytest.mark.parametrize("key, value", list(itertools.product(TYPES, TYPES)))
def test_no_drift(losses, key, value):
    """What the types cost after the window has moved by six times its size is what they cost when it began to move."""
    away = np.abs(losses(key, value) - losses("f32", "f32"))
    before, after = away[256:756].mean(), away[-500:].mean()
    assert np.isfinite(away).all() and len(away) == 1800
    assert after <= 1.25 * before + 1e-6, f"{after:.4g} after, {before:.4g} before"


@pytest.mark.parametrize("kind", TYPES)
def test_loop_goes_on(gen, mkfix, kind):
    path = mkfix("chain", "--text", "abcd!", "--end", "loop")
    r = gen.ok("-m", path, "-p", ":", "-q", "--temp", "0", "--window", "60", "--sinks", "4", "--ignore-eos", "-n", "5000",
               "-ctk", kind, "-ctv", kind, timeout=300)
    assert r.text == "abcd!" * 1000


def test_memory_is_flat(gen, mkfix):
    """The prompt is longer than the context, and so is what follows; the cache holds the same pages all the time."""
    path, prompt = mkfix("rand", "--ctx", 128, "--arch", "gemma3", "--swa", 40, "--layers", 7), "x" * 640
    kv = lambda n: json.loads(gen.ok("-m", path, "-p", prompt, "-c", "128", "--window", "100", "-n", str(n), "--ignore-eos",
                                     "--json", "-s", "1", "-ctk", "int8", "-ctv", "int4").text)["kv"]
    short, long = kv(32), kv(32 * 60)
    assert long["bytes_used"] == short["bytes_used"] and long["pages"] == short["pages"]
    assert long["evicted_tokens"] - short["evicted_tokens"] == 32 * 59


def test_perplexity_streams(gen, tool, mkfix, tmp_path):
    """-c as long as the text, past the model's context: the second half of the stream is scored."""
    path, text = mkfix("rand", "--ctx", 128), tmp_path / "text"
    text.write_bytes(bytes(np.random.default_rng(5).integers(97, 123, 999, np.uint8)))
    r = json.loads(gen.ok("-m", path, "--perplexity", text, "-c", "100000", "--window", "60", "--json").text)
    tokens = [1] + [BYTE0 + b for b in text.read_bytes()]
    line = tool("score", path, "f16", "f16", "60", "4", "off", "0", "0", "1", stdin="0 " + " ".join(map(str, tokens)) + "\n").text
    rows = np.array([float(x.rstrip("*")) for x in line.split("|")[0].split()])
    assert r["tokens"] == 499 and abs(r["nll"] - rows[500:].mean()) < 1e-5
    gen.refused("-m", path, "--perplexity", text, "-c", "100000", rc=2, says="--ctx-size")
