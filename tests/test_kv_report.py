"""--kv-report: its lines, and that each number is the one that the program gives elsewhere."""
import json
import math

import pytest
from make_model import random_model

TEXT = "Sphinx of black quartz, judge my vow; the quick brown fox jumps over the lazy dog. " * 8
PLAIN = ["f16", "f32", "bf16", "fp8", "int8", "int8, int4", "int4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("report") / "m.gguf", heads=4, kv_heads=2, head_k=32, layers=2, embd=64,
                        ff=64, bos=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "text"
    path.write_text(TEXT)
    return path


def report(gen, model, text, *args):
    return json.loads(gen.ok("-q", "-m", model, "--kv-report", "-f", text, "--json", *args).text)


def test_lines(gen, model, text):
    r = report(gen, model, text, "-c", "128", "--chunks", "3")
    assert (r["window"], r["windows"]) == (128, 3) and r["not_measured"].startswith("eviction")
    assert [s["setting"] for s in r["settings"]] == [*PLAIN, "f16, window 32, sinks 4", "f16, 1 of 2 KV heads"]
    for s in r["settings"]:
        assert 0 < s["prefill_tokens_per_s"] < math.inf and 0 < s["decode_tokens_per_s"] < math.inf
        assert ("kl_mean" in s) == (s["setting"] != "f16")
    by_name = {s["setting"]: s for s in r["settings"]}
    assert by_name["f32"]["kl_mean"] < by_name["int8"]["kl_mean"] < by_name["int4"]["kl_mean"]
    assert by_name["f16, 1 of 2 KV heads"]["bytes_per_token"] * 2 == by_name["f16"]["bytes_per_token"]


def test_numbers_are_those_of_other_tasks(gen, model, text, tmp_path):
    r = report(gen, model, text, "-c", "128", "--window", "40", "--sinks", "2", "-ctk", "int8", "-ctv", "fp8",
               "--kv-heads", "1")
    assert r["windows"] == 2
    assert r["settings"][-1]["setting"] == "int8, fp8, window 40, sinks 2, 1 of 2 KV heads (as given)"
    base = tmp_path / "base"
    score = ["-q", "-m", model, "--perplexity", text, "-c", "128", "--chunks", "2", "--json"]
    options = {"f16": [], "int8, int4": ["-ctk", "int8", "-ctv", "int4"], "f16, window 32, sinks 4": ["--window", "32"],
               "f16, 1 of 2 KV heads": ["--kv-heads", "mqa"],
               "int8, fp8, window 40, sinks 2, 1 of 2 KV heads (as given)": "--window 40 --sinks 2 -ctk int8 -ctv fp8 --kv-heads 1".split()}
    gen.ok(*score, "--save-logits", base)
    for s in r["settings"]:
        if s["setting"] not in options:
            continue
        words = options[s["setting"]]
        want = json.loads(gen.ok(*score, *words, *([] if s["setting"] == "f16" else ["--kl-base", base])).text)
        for key in ("perplexity", "kl_mean", "kl_p99", "top1_agreement"):
            assert s.get(key) == want.get(key), (s["setting"], key)
        for ctx, reserved in s["bytes"].items():
            run = json.loads(gen.ok("-m", model, "--dry-run", "--json", "-c", ctx, *words).text)
            want = [c for c in run["cache"] if (c["type_k"], c["type_v"]) == (s["type_k"], s["type_v"])]
            assert want[0]["reserved_bytes"] == reserved and want[0]["bytes_per_token"] == s["bytes_per_token"]


def test_eviction(gen, tmp_path):
    """Its lines are those of the runs with the same options."""
    model = random_model(tmp_path / "m.gguf", heads=4, kv_heads=2, head_k=32, layers=2, embd=64, ff=64)
    text, base = tmp_path / "text", tmp_path / "base"
    text.write_text(TEXT)
    score = ["-q", "-m", model, "--perplexity", text, "-c", "640", "--chunks", "1", "--json"]
    gen.ok(*score, "--save-logits", base)
    settings = {s["setting"]: s for s in report(gen, model, text, "-c", "640", "--chunks", "1")["settings"]}
    for name in ("attention", "snapkv"):
        want = json.loads(gen.ok(*score, "--evict", name, "--kv-budget", "160", "--kl-base", base).text)
        got = settings[f"f16, {name}, budget 160"]
        assert got["budget"] == 160 and (got["perplexity"], got["kl_mean"]) == (want["perplexity"], want["kl_mean"])


def test_eviction_in_short_windows(gen, tmp_path):
    """A budget is never below its least; what is given is named in full."""
    model = random_model(tmp_path / "m.gguf", heads=4, kv_heads=2, head_k=32, layers=2, embd=64, ff=64)
    text = tmp_path / "text"
    text.write_text(TEXT)
    r = report(gen, model, text, "-c", "256", "--chunks", "1", "--evict", "snapkv", "--kv-budget", "192")
    assert [s["setting"] for s in r["settings"]][-5:] == [
        "f16, window 64, sinks 4", "f16, attention, budget 160", "f16, snapkv, budget 160", "f16, 1 of 2 KV heads",
        "f16, snapkv, budget 192 (as given)"]
    assert "not_measured" not in r
    assert "not_measured" in report(gen, model, text, "-c", "160", "--chunks", "1")


def test_table(gen, model, text):
    lines = gen.ok("-q", "-m", model, "--kv-report", "-f", text, "-c", "64", "--chunks", "1", "--kv-layout", "contiguous").text.splitlines()
    assert "1 window of 64 tokens" in lines[0] + lines[1]
    assert lines[-2] == "" and lines[-1].startswith("not measured: --window and eviction") and "192" in lines[-1]
    names = [line[:30].strip() for line in lines[5:-2]]
    assert names == [*PLAIN, "f16, 1 of 2 KV heads"]           # pages are what a window gives back


def test_refused(gen, model, text, tmp_path):
    gen.refused("-m", model, "--kv-report", rc=2, says="-f FILE")
    gen.refused("-m", model, "--kv-report", "-f", text, "--no-kv-cache", rc=2, says="--no-kv-cache")
    gen.refused("-m", model, "--kv-report", "-f", text, "-n", "3", "-p", "x", rc=2, says="--prompt")
    gen.refused("-m", model, "--kv-report", "-f", text, rc=2, says=["tokens", "1024"])
    gen.refused("-m", model, "--kv-report", "-f", tmp_path / "none", rc=2, says="none")
    gen.refused("-m", model, "--kv-report", "-f", text, "-c", "3", rc=2, says="--ctx-size 3")
