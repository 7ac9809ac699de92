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


def reserved(gen, model, ctx, k, v):
    run = json.loads(gen.ok("-m", model, "--dry-run", "--json", "-c", str(ctx), "-ctk", k, "-ctv", v).text)
    return next(c["reserved_bytes"] for c in run["cache"] if (c["type_k"], c["type_v"]) == (k, v))


def run(gen, model, *args):
    r = gen.ok("-m", model, "--temp", "0", "-p", "ab", "-n", "2", "--json", *args)
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
    line = gen.refused("-q", "-m", model, "-p", "ab", "-c", "4096", "-ctk", "auto", "-ctv", "auto", "--kv-memory",
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
