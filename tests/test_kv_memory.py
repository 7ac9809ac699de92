"""--kv-memory, and the types that -ctk auto and -ctv auto choose by it."""
import json
import re

import pytest
from make_model import random_model

PAIRS = [("f16", "f16"), ("f16", "int8"), ("int8", "int8"), ("int8", "int4"), ("int4", "int4")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("memory") / "m.gguf", heads=4, kv_heads=2, head_k=64, layers=2, embd=64,
                        ff=64, ctx=4096)


CHUNK = ["-b", "512"]                   # left to itself it is smaller where the memory is small


def reserved(gen, model, ctx, k, v):
    run = json.loads(gen.ok("-m", model, *CHUNK, "--dry-run", "--json", "-c", str(ctx), "-ctk", k, "-ctv", v).text)
    return next(c["reserved_bytes"] for c in run["cache"] if (c["type_k"], c["type_v"]) == (k, v))


def run(gen, model, *args):
    r = gen.ok("-m", model, *CHUNK, "--temp", "0", "-p", "ab", "-n", "2", "--json", *args)
    kv = json.loads(r.text)["kv"]
    return kv["type_k"], kv["type_v"], kv["bytes_reserved"], r.err


def test_finest_pair_that_fits(gen, model):
    need = [reserved(gen, model, 4096, *pair) for pair in PAIRS]
    assert need == sorted(need, reverse=True)
    for pair, bytes_ in zip(PAIRS, need):
        for budget in (bytes_, bytes_ + 1):
            k, v, got, err = run(gen, model, "-c", "4096", "-ctk", "auto", "-ctv", "auto", "--kv-memory", str(budget))
            assert (k, v, got) == (*pair, bytes_)
            assert f"4096 tokens: keys {k}, values {v}" in err
    line = gen.refused("-q", "-m", model, *CHUNK, "-p", "ab", "-c", "4096", "-ctk", "auto", "-ctv", "auto", "--kv-memory",
                       str(need[-1] - 1), rc=1, says=["4096", str(need[-1]), "--kv-memory"])
    assert "--ctx-size" in line


@pytest.mark.parametrize("fixed, chosen", [("k", ["f16", "int8", "int4"]), ("v", ["f16", "int8", "int4"])])
def test_one_of_both_is_given(gen, model, fixed, chosen):
    for kind in chosen:
        pair = ("fp8", kind) if fixed == "k" else (kind, "fp8")
        words = ["-ctk", "fp8", "-ctv", "auto"] if fixed == "k" else ["-ctk", "auto", "-ctv", "fp8"]
        budget = reserved(gen, model, 1024, *pair)
        assert run(gen, model, "-c", "1024", *words, "--kv-memory", str(budget))[:3] == (*pair, budget)


def test_auto_without_a_budget_is_f16(gen, model):
    assert run(gen, model, "-ctk", "auto", "-ctv", "auto")[:2] == ("f16", "f16")


def test_context_is_lowered_to_the_budget(gen, model):
    for kind in ("f16", "int4"):
        *_, got, err = run(gen, model, "-ctk", kind, "-ctv", kind, "--kv-memory", "600K")
        tokens = int(re.search(r"lowered from the model's 4096 to (\d+) tokens", err)[1])
        assert got <= 600 << 10 < reserved(gen, model, tokens + 32, kind, kind)
        assert got == reserved(gen, model, tokens, kind, kind)


@pytest.mark.parametrize("text, size", [("1048576", 1 << 20), ("1024K", 1 << 20), ("1M", 1 << 20)])
def test_sizes(gen, model, text, size):
    assert run(gen, model, "--kv-memory", text)[2] <= size
    assert gen.ok("-m", model, "--dry-run", "--kv-memory", text).text.splitlines()[4:] == gen.ok(
        "-m", model, "--dry-run", "--kv-memory", str(size)).text.splitlines()[4:]


def test_wrong_sizes(gen, model):
    for text in ("0", "-1", "1.5M", "10Q", "K", "1MB", "9999999999999G", ""):
        gen.refused("-m", model, "-p", "a", "--kv-memory", text, rc=2, says="--kv-memory")


def test_other_names_of_types(gen, model):
    for name, kind in (("q8_0", "int8"), ("q4_0", "int4")):
        assert run(gen, model, "-ctk", name, "-ctv", name)[:2] == (kind, kind)


def test_chat_in_a_budget(gen, model):
    """The context that is chosen for a chat leaves room for what a window costs once the chat slides."""
    talk = ["-m", model, "--chat", "--chat-template", "chatml", "-n", "120", "--temp", "0", "--ignore-eos"]
    for kind, budget in (("f16", "1M"), ("int4", "1M"), ("f16", "100M")):
        r = gen.ok(*talk, "-ctk", kind, "-ctv", kind, "--kv-memory", budget, "-b", "64", stdin="hello\n" * 12)
        assert r.err.count("tokens (") == 12
        full = "--kv-memory gives more room" if "context is lowered" in r.err else "--ctx-size gives more room"
        assert r.err.count("gives more room") == r.err.count(full) == ("is full" in r.err)


def test_small_budget_takes_the_types_with_the_largest_context(gen, model):
    """Sealed types keep rows of a chunk as they are, whatever the context: in a small budget f16 may hold more."""
    chosen = set()
    for kilobytes in (64, 400, 1000, 1900):
        budget, largest = str(kilobytes << 10), {}
        for k, v in PAIRS:
            words = [*CHUNK, "--dry-run", "--json", "--kv-memory", budget, "-ctk", k, "-ctv", v]
            listed = json.loads(gen.ok("-m", model, *words).text)
            largest.update({(c["type_k"], c["type_v"]): min(c["largest_ctx"], 4096) for c in listed["cache"]})
        most = max(largest[pair] for pair in PAIRS)
        k, v, got, err = run(gen, model, "-ctk", "auto", "-ctv", "auto", "--kv-memory", budget)
        finest = next(pair for pair in PAIRS if largest[pair] == most)
        assert (k, v) == finest and f"the cache of {most} tokens: keys {k}, values {v}" in err
        assert most == 4096 or f"4096 to {most} tokens" in err
        chosen.add(k)
    assert {"f16", "int4"} <= chosen


def test_chunk_leaves_the_memory_to_the_context(gen, model):
    """Where -b is not given, the rows of a chunk that sealed types and windows keep take a part of the memory at most."""
    def largest(*words):
        return json.loads(gen.ok("-m", model, "--dry-run", "--json", *words).text)["cache"]
    for kilobytes in (600, 1000, 1900):
        ctx = {c["type_k"]: c["largest_ctx"] for c in largest("--kv-memory", f"{kilobytes}K")}
        fixed = {c["type_k"]: c["largest_ctx"] for c in largest("--kv-memory", f"{kilobytes}K", *CHUNK)}
        assert ctx["int8"] > fixed["int8"] and ctx["int4"] > fixed["int4"] and ctx["f16"] == fixed["f16"]
        assert ctx["int4"] > ctx["int8"] >= ctx["f16"]
    window = ["-q", "-p", "ab", "-n", "2", "-c", "2048", "--window", "600", "--kv-memory", "1M"]
    gen.ok("-m", model, *window)
    gen.refused("-m", model, *window, *CHUNK, rc=1, says="--kv-memory")


def test_budget_below_one_block_says_what_is_needed(gen, model):
    for types in (["int8", "int8"], ["f16", "f16"], ["auto", "auto"]):
        words = ["-q", "-m", model, "-p", "ab", "-n", "2", "-ctk", types[0], "-ctv", types[1], "--kv-memory"]
        line = gen.refused(*words, "1K", rc=1, says=["one block of 32 tokens needs", "--kv-memory"])
        need = int(re.search(r"needs (\d+) bytes", line)[1])
        gen.refused(*words, str(need - 1), rc=1, says=str(need))
        gen.ok(*words, str(need))


def test_long_prompt_names_what_lowered_the_context(gen, model, tmp_path):
    words = ["-q", "-m", model, "-p", "ab" * 600, "-n", "1"]
    line = gen.refused(*words, "--kv-memory", "200K", rc=2, says=["raise --kv-memory", "--kv-offload"])
    assert "--ctx-size" not in line
    assert "--kv-offload" not in gen.refused(*words, "--kv-memory", "200K", "--kv-layout", "contiguous", rc=2,
                                             says="raise --kv-memory")
    gen.refused(*words, "-c", "64", rc=2, says="raise --ctx-size")
    lines = tmp_path / "in.txt"
    lines.write_text("ab" * 600 + "\n")
    r = gen("-q", "-m", model, "--batch", lines, "--kv-memory", "200K")
    assert r.rc == 1 and "raise --kv-memory" in json.loads(r.text)["error"]["message"]
