"""--kv-memory, --kv-offload, --no-share: pages in memory and in a file, with the same bits."""
import json
import re

import pytest
from conftest import GEN, run_program

CACHE = 70_000                          # bytes: less than the text below needs, in each type
COMMON = ["--json", "-s", "1", "--temp", "0", "--ignore-eos", "-n", "120", "-c", "512", "-p", "abc " * 60]


def size_of(text):
    number, unit = text.split()
    return float(number) * {"bytes": 1, "B": 1, "kB": 1e3, "MB": 1e6}[unit]


@pytest.fixture(scope="module")
def model(mkfix):
    return mkfix("rand", "--arch", "llama", "--layers", 4)


@pytest.mark.parametrize("more", [[], ["-ctk", "int8", "-ctv", "int4"], ["-b", "7", "--page-size", "96"], ["--window", "64"],
                                  ["--lookup"]], ids=" ".join)
def test_the_same_bits_beyond_memory(gen, model, tmp_path, more):
    whole = json.loads(gen.ok("-m", model, *COMMON, *more).text)
    for size in (1, CACHE):
        r = gen.ok("-m", model, *COMMON, *more, "--kv-memory", str(size), "--kv-offload", tmp_path)
        part, told = json.loads(r.text), re.search(r"([\d.]+) (kB|MB) of the cache lie in the file of --kv-offload", r.err)
        fast, of = re.search(r"KV cache (.*) of (.*)\n", r.err).groups()
        assert size_of(fast) <= size_of(of), r.err
        assert told and float(told[1]) > 0, r.err
        assert part["logits_sha256"] == whole["logits_sha256"] and part["text"] == whole["text"]
        assert part["kv"]["bytes_reserved"] <= CACHE < whole["kv"]["bytes_reserved"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_grow(model, tmp_path):
    """As on a full disk: one sentence, after the text that was made until then."""
    words = [str(GEN), "-m", str(model), "--temp", "0", "--ignore-eos", "-n", "300", "-p", "a", "--kv-memory", "1",
             "--kv-offload", str(tmp_path)]
    full = run_program(words)
    r = run_program(["sh", "-c", 'ulimit -f 64; exec "$@"', "sh", *words])
    assert full.rc == 0 and r.rc == 1, r.err
    assert "no KV page is left" in r.err and "cannot grow" in r.err
    assert 0 < len(r.out) < len(full.out) and full.out.startswith(r.out)


def test_refused(gen, model, tmp_path):
    gen.refused("-m", model, "-p", "a", "--kv-offload", "host", rc=2, says="--kv-memory")
    gen.refused("-m", model, "-s", "1", "-p", "a", "--kv-memory", "1M", "--kv-offload", tmp_path / "none", rc=2, says="none")
    gen.refused("-m", model, "-p", "a", "--kv-memory", "1M", "--kv-offload", tmp_path, "--kv-layout", "contiguous", rc=2,
                says="contiguous")
