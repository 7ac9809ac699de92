"""What the CUDA backend does with the cache's memory, on the emulator: files of it, eviction, pages beyond the device's memory,
and what is said when there is too little. The CPU backend is the oracle."""
import json
import random

import pytest
from conftest import BUILD
from test_cuda import SMALL, at_once, emulate, emulated, steps

GEN = BUILD / "emulated" / "gen"
TEXT = "".join(random.Random(1).choices("abcdefgh ", k=2000))
MODELS = {
    "llama": dict(arch="llama", layers=2, **SMALL),
    "gemma2": dict(arch="gemma2", layers=2, window=40, **SMALL),
}


@pytest.fixture(scope="module")
def model(tiny):
    return lambda name: tiny(**MODELS[name])


def answer(model, prompt, *more, backend="cuda", n=4, settings=""):
    """Tokens of a greedy answer, and how many of the prompt's came from a cache."""
    r = json.loads(emulate(GEN, "-m", model, "-p", prompt, "--backend", backend, "--temp", 0, "--ignore-eos", "-n", n, "-c", 512, "--json",
                           "-q", *more, settings=settings))
    return r["tokens"], r["usage"]["cached_tokens"]


# ---- files of the cache

@pytest.mark.parametrize("name, kinds, more", [("llama", ("f16", "f16"), ["--page-size", "64"]), ("llama", ("int8", "int4"), []),
                                               ("gemma2", ("fp8", "bf16"), ["--kv-layout", "contiguous"])])
def test_stores(model, tmp_path, name, kinds, more):
    """A second run starts with what the first one kept, whatever its pages; what the processor wrote is not taken."""
    path, types = model(name), ["-ctk", kinds[0], "-ctv", kinds[1]]
    prompt, other = TEXT[:150], TEXT[:100] + "xyz"
    cold = at_once(lambda text: answer(path, text, *types), (prompt, other))

    def check(how, is_file):
        store = [how, tmp_path / how, *types]
        assert answer(path, prompt, *store) == cold[0] and cold[0][1] == 0
        assert answer(path, prompt, *store, *more) == (cold[0][0], 128)
        assert answer(path, other, *store, *(["--prompt-cache-ro"] if is_file else [])) == (cold[1][0], 96)
        assert answer(path, prompt, *store, backend="cpu")[1] == 0
        assert answer(path, prompt, *store)[1] == (0 if is_file else 128)        # the file is now the processor's
    at_once(check, ("--prompt-cache", "--prefix-cache"), (True, False))


@pytest.mark.parametrize("saver", ["cuda", "cpu"])
def test_chat_is_saved_and_loaded(model, tmp_path, saver):
    """/save keeps the cache as well; a file of another backend gives its messages only."""
    words = [GEN, "-m", model("llama"), "--chat", "--chat-template", "chatml", "--temp", 0, "-n", 6, "--ignore-eos", "-c", 512]
    first, second = f"{TEXT[:90]}\n", "and then\n"
    whole = emulate(*words, "--backend", "cuda", stdin=first + second)
    begun = emulate(*words, "--backend", saver, stdin=f"{first}/save {tmp_path}/chat\n")
    loaded = emulated(*words, "--backend", "cuda", stdin=f"/load {tmp_path}/chat\n{second}")
    assert loaded.returncode == 0 and begun + loaded.stdout == whole, loaded.stderr
    assert ("96 of their" in loaded.stderr) == (saver == "cuda") and ("only its messages" in loaded.stderr) == (saver == "cpu"), loaded.stderr


# ---- eviction

EVICTING = [("llama", "attention", "f32", "f32"), ("gemma2", "snapkv", "f16", "fp8"),
            ("llama", "attention", "int8", "int4")]


@pytest.mark.parametrize("name, rule, k, v", EVICTING)
def test_eviction(model, name, rule, k, v):
    """The same rows are kept as on the processor. The rest is numbers of the cache that are rounded the other way, as without
    eviction (which f32 shows): here the cache cannot start from the CPU's blocks. The same bits come out in any order of threads."""
    words = dict(k=k, v=v, evict=rule, budget=160, prompt=200, steps=35, ctx=256)
    r, other = at_once(lambda settings, cpu: steps(model(name), settings, cpu=cpu, **words), ("", "seed=3"), (1, 0))
    exact = k == "f32"
    assert r["kept"] > 0 and r["alike"] == r["kept"], r
    for kind in "prefill", "decode", "together":
        assert r[kind] <= (1e-4 if exact else 3e-2), r
    assert other["hash"] == r["hash"]


# ---- pages beyond the device's memory

@pytest.mark.parametrize("name, more", [("llama", []), ("llama", ["-ctk", "int8", "-ctv", "int4", "--page-size", "64"]),
                                        ("gemma2", ["--window", "64"]), ("llama", ["--evict", "snapkv", "--kv-budget", "160"])])
def test_the_same_bits_beyond_memory(model, name, more):
    """Pages in the host's memory are read and written where they are."""
    words = [GEN, "-m", model(name), "-p", TEXT[:200], "--backend", "cuda", "--temp", 0, "--ignore-eos", "-n", 4, "-c", 384, "--json", "-q",
             *more]
    small = lambda size: emulate(*words, "--kv-memory", size, "--kv-offload", "host", settings=f"memory={80 << 20}")
    sizes = 1, 60_000
    whole, *parts = map(json.loads, at_once(lambda size: small(size) if size else emulate(*words), (None, *sizes)))
    for size, part in zip(sizes, parts):
        assert part["logits_sha256"] == whole["logits_sha256"] and part["tokens"] == whole["tokens"]
        assert part["kv"]["bytes_reserved"] <= size < whole["kv"]["bytes_reserved"]


def test_parked_sequences(tiny, tmp_path):
    """Lines of a batch whose caches do not fit the device together: one waits in the host's memory and comes back while the
    others are computed; the answers are those of a device that holds all."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"prompt": TEXT[97 * i:97 * i + 40 + 9 * i]}) + "\n" for i in range(3)))
    words = [GEN, "-m", tiny(arch="llama", layers=1, embd=32, ff=32, head_k=32, heads=1, kv_heads=1), "--batch", lines, "--backend",
             "cuda", "--temp", 0, "--ignore-eos", "-n", 60, "-c", 256, "-np", 3, "--no-share", "-ctk", "f32", "-ctv", "f32"]
    read = lambda out: [json.loads(line)["response"]["text"] for line in out.splitlines()]
    part, whole = at_once(lambda more: emulated(*words, *more, "--progress", "json"), (["--kv-memory", "60K", "--kv-offload", "host"], []))
    assert part.returncode == whole.returncode == 0, part.stderr + whole.stderr
    assert read(part.stdout) == read(whole.stdout)
    last = json.loads(part.stderr.splitlines()[-1])
    assert last["bytes_out"] >= last["bytes_in"] > 0, last


# ---- too little memory

@pytest.mark.parametrize("settings, says", [
    ("memory=1000000", ["need", "bytes of device memory, but", "are free", "--backend cpu"]),
    ("memory=66000000", ["need", "bytes of device memory, but", "are free", "--batch-size"]),
    ("pinned=1000", ["need 16777216 bytes of pinned memory", "--backend cpu"]),
])
def test_too_little_for_the_model(model, settings, says):
    r = emulated(GEN, "-m", model("llama"), "-p", "abc", "-n", 2, "-c", 256, "-s", 1, "--backend", "cuda", settings=settings)
    assert r.returncode == 1 and r.stdout == "" and len(r.stderr.splitlines()) == 1, r.stderr
    assert all(text in r.stderr for text in says), r.stderr


@pytest.mark.parametrize("settings, more", [("memory=1000000", []), ("memory=3000000", ["-ctk", "auto", "-ctv", "auto"]),
                                            ("memory=100000", ["-c", "200"])])
def test_auto_plans_for_what_computes(model, settings, more):
    """Where the device has too little memory, context and types are those of the processor."""
    words = [GEN, "-m", model("llama"), "-p", "abc", "-n", 2, "-s", 1, *more]
    auto, cpu = emulated(*words, settings=settings), emulated(*words, "--backend", "cpu")
    assert auto.returncode == 0 and auto.stdout == cpu.stdout and "gen: CUDA is not used: " in auto.stderr
    context = lambda r: r.stderr.splitlines()[-1].split("KV cache ")[1]
    assert context(auto) == context(cpu)


def test_logits_that_cannot_be_read(model, tmp_path):
    """Whatever call fails, a run says so or is right: never a crash, and no answer without its hash."""
    text = tmp_path / "text"
    text.write_text(TEXT[:200])
    base = [GEN, "-m", model("llama"), "--backend", "cuda", "-q", "-c", 64]
    tasks = [[*base, "--perplexity", text, "--chunks", 1], [*base, "-p", "ab", "-n", 2, "-s", 1, "--json"]]
    for words in tasks:
        n, r = 340, None
        while not r or "cannot be read" not in r.stderr:       # from behind the last call towards the first
            r = emulated(*words, settings=f"fail={n}")
            assert n < 340 or r.returncode == 0, n
            said = r.stderr.splitlines()
            assert (r.returncode == 0 and "null" not in r.stdout) or (r.returncode == 1 and len(said) == 1), (n, r)
            n -= 1


def test_a_batch_is_the_same_each_time(tiny, tmp_path):
    """What is computed together does not depend on time, and so the bits do not."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"prompt": TEXT[i:i + 10 + 29 * (i % 4)], "predict": 3 + 5 * (i % 3)}) + "\n" for i in range(8)))
    words = [GEN, "-m", tiny(arch="llama", layers=2, weight="Q8_0", **SMALL), "--batch", lines, "--backend", "cuda", "-s", 1, "-c", 256,
             "-np", 4, "-q"]
    assert len(set(at_once(lambda seed: emulate(*words, settings=f"seed={seed}"), range(1, 5)))) == 1


def test_too_little_for_the_cache(model):
    """The message names what is wanted, what is free and what to lower; a folder is for the CPU backend."""
    words = [GEN, "-m", model("llama"), "-p", "abc", "-n", 2, "-s", 1, "--backend", "cuda"]
    for more, settings, says in [
            (["-c", 100_000, "--kv-memory", "1G"], f"memory={90 << 20}", ["the KV cache", "bytes of device memory", "--kv-memory"]),
            (["-c", 100_000, "--kv-memory", "64K", "--kv-offload", "host"], f"pinned={40 << 20}",
             ["the pages beyond --kv-memory need", "bytes of pinned memory", "--ctx-size"]),
            (["-c", 256, "--kv-memory", "64K", "--kv-offload", "."], "", ["--kv-offload host"])]:
        r = emulated(*words, *more, settings=settings)
        line = r.stderr.splitlines()[-1]
        assert r.returncode in (1, 2) and r.stdout == "" and all(text in line for text in says), r.stderr
