"""Faults that were found by attack: what is written to, signals, files that change under the program."""
import json
import os
import resource
import shutil
import signal
import subprocess
import time

import pytest

import conftest

TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def score(gen, model, text, save, **how):
    return gen("-q", "-m", model, "--perplexity", text, "-c", "64", "--chunks", "2", "--save-logits", save, **how)


def test_saved_logits_take_the_place_of_regular_files_only(gen, mkfix, text, tmp_path):
    model, link, real, fifo = mkfix("rand"), tmp_path / "link", tmp_path / "real", tmp_path / "fifo"
    real.write_bytes(b"old")
    link.symlink_to("real")
    assert score(gen, model, text, link).rc == 0
    assert link.is_symlink() and real.stat().st_size > 1000
    os.mkfifo(fifo)
    reader = subprocess.Popen(["cat", fifo], stdout=subprocess.PIPE)
    assert score(gen, model, text, fifo).rc == 0
    assert reader.communicate()[0] == real.read_bytes() and fifo.is_fifo()
    assert not list(tmp_path.glob("*.??????"))


def test_saved_logits_do_not_replace_the_text(gen, mkfix, text):
    gen.refused("-q", "-m", mkfix("rand"), "--perplexity", text, "-c", "64", "--save-logits", text, rc=2, says="--save-logits")
    assert text.read_text() == TEXT


def test_file_size_limit(gen, mkfix, text, tmp_path):
    save = tmp_path / "f.kl"
    run = subprocess.run([gen.path, "-q", "-m", mkfix("rand"), "--perplexity", text, "-c", "64", "--save-logits", save],
                         capture_output=True, text=True,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)))
    assert run.returncode == 1 and run.stderr.startswith("gen: cannot write --save-logits") and run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [text]


@pytest.mark.skipif(conftest.SANITIZED, reason="the sanitizers have a handler of their own")
def test_model_cut_short_while_it_is_used(gen, mkfix, tmp_path):
    model = tmp_path / "model.gguf"
    shutil.copy(mkfix("rand", "--embd", "256", "--layers", "4"), model)
    run = subprocess.Popen([gen.path, "-q", "-m", model, "-p", "a", "-n", "-1", "--ignore-eos", "--window", "50"],
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)
    os.truncate(model, 100000)
    try:
        err = run.communicate(timeout=20)[1]
    finally:
        run.kill()
    assert run.returncode == 3 and err.count("\n") == 1 and "shorter" in err


@pytest.mark.parametrize("first, second", [(signal.SIGTERM, None), (signal.SIGINT, signal.SIGTERM)])
def test_signal_ends_a_run_that_nobody_reads(gen, mkfix, first, second):
    run = subprocess.Popen([gen.path, "-q", "-m", mkfix("rand"), "-p", "a", "-n", "-1", "--ignore-eos", "--window", "50"],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(1 if not conftest.SANITIZED else 5)
    run.send_signal(first)
    if second:
        run.send_signal(second)
    try:
        assert run.wait(timeout=10) in (-first, -second if second else -first)
    finally:
        run.kill()
        run.communicate()


def test_window_that_cannot_be(gen, mkfix):
    model = mkfix("rand", "--ctx", "512")
    gen.refused("-q", "-m", model, "--kv-layout", "contiguous", "--window", "5", "-p", "ab", rc=2, says="contiguous")
    gen.refused("-q", "-m", model, "--window", "600", "-p", "ab", rc=2, says=["600", "512"])


@pytest.mark.parametrize("depth", [60, 2000])
def test_nested_json_on_a_small_stack(gen, mkfix, tmp_path, depth):
    def run(*args, stdin):
        limit = lambda: conftest.SANITIZED or resource.setrlimit(resource.RLIMIT_STACK, (1 << 17, 1 << 17))
        return subprocess.run([gen.path, "-q", "-t", "1", "-m", mkfix("rand"), "-n", "1", "-s", "1", *args], input=stdin,
                              capture_output=True, text=True, preexec_fn=limit)
    deep = "[" * depth + "]" * depth
    talk = run("--chat-template", "chatml", "--messages", "-", stdin='[{"role": "user", "content": "a", "x": %s}]' % deep)
    lines = run("--batch", "-", stdin='{"prompt": "a"}\n{"prompt": "b", "custom_id": %s}\n' % deep)
    assert (talk.returncode, lines.returncode) == (2 if depth > 64 else 0, 1), talk.stderr + lines.stderr
    assert ("level more than 64" in talk.stderr) == ("level more than 64" in lines.stdout) == (depth > 64)
    assert lines.stdout.count("response") == lines.stdout.count("error") == 1


@pytest.mark.skipif(conftest.SANITIZED, reason="a sanitizer's frames are larger")
@pytest.mark.parametrize("kilobytes", [32, 64, 127, 128])
def test_small_stacks(gen, mkfix, tmp_path, kilobytes):
    """A sentence, or all works."""
    text = tmp_path / "text"
    text.write_text("abc " * 100)
    for task in (["-p", "a", "-n", "2", "-ctk", "int4", "-ctv", "int4"], ["--batch", "-"], ["--chat", "--chat-template", "chatml"],
                 ["--kv-report", "-f", text, "-c", "64"], ["--perplexity", text, "-c", "64"], ["--help"]):
        r = subprocess.run([gen.path, "-q", "-m", mkfix("rand"), *task], input='{"prompt": "a"}\n', capture_output=True,
                           text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (kilobytes << 10,) * 2))
        if kilobytes < 128:
            assert r.returncode == 1 and r.stdout == "" and r.stderr.count("\n") == 1, (task, r.stderr)
            assert f"limited to {kilobytes} kB, but gen needs 128" in r.stderr
        else:
            assert r.returncode == 0, (task, r.stderr)


# ---- memory that runs out

def check_ended_well(run, text, what):
    """The whole text, or an error in one sentence and nothing of the text lost or changed."""
    assert run.returncode in (0, 1, 3), (what, run.returncode, run.stderr[-300:])
    if run.returncode == 0:
        assert run.stdout == text, what
    else:
        lines = [line for line in run.stderr.splitlines() if line.startswith(b"gen: ")]
        assert len(lines) == 1 and run.stderr.count(b"\n") == 1, (what, run.stderr[-300:])
        assert text.startswith(run.stdout), what


TASKS = {
    "text": ["-p", "ab", "-n", "40", "--ignore-eos", "--temp", "0"],
    "types": ["-p", "ab" * 40, "-n", "8", "--temp", "0", "-ctk", "int8", "-ctv", "int4", "--kv-heads", "1"],
    "chat": ["--chat-template", "chatml", "-st", "-p", "hello", "-n", "8", "--temp", "0"],
    "json": ["-p", "ab", "-n", "8", "--json", "--logprobs", "3", "--temp", "0", "-s", "1"],
    "score": ["--perplexity", "TEXT", "-c", "64", "--chunks", "2"],
    "report": ["--kv-report", "-f", "TEXT", "-c", "64", "--chunks", "1"],
    "estimate": ["--dry-run", "--json", "--kv-memory", "10M"],
    "summary": ["--inspect", "MODEL", "--json"],
    "compared": ["--perplexity", "TEXT", "-c", "64", "--chunks", "1", "--kl-base", "BASE", "--json"],
}


@pytest.fixture(scope="module")
def alloc_fault(tmp_path_factory):
    if conftest.SANITIZED:
        pytest.skip("the sanitizers have an allocator of their own")
    library = tmp_path_factory.mktemp("fault") / "alloc_fault.so"
    source = conftest.ROOT / "tests" / "alloc_fault.c"
    subprocess.run([*os.environ.get("CC", "cc").split(), "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.mark.parametrize("task", TASKS)
def test_an_allocation_fails(gen, mkfix, text, tmp_path, alloc_fault, task):
    """One allocation after the other: alone, and with all that follow it."""
    model = mkfix("rand", "--layers", "1")
    base = tmp_path / "base"
    names = {"TEXT": text, "MODEL": model, "BASE": base}
    words = [gen.path, "-q", "-t", "1", "--backend", "cpu", *([] if task == "summary" else ["-m", model]),
             *[str(names.get(w, w)) for w in TASKS[task]]]
    if "BASE" in TASKS[task]:
        gen.ok("-m", model, "--perplexity", text, "-c", "64", "--chunks", "1", "--save-logits", base)

    def run(**fault):
        return subprocess.run(words, capture_output=True, timeout=60,
                              env={**os.environ, "LD_PRELOAD": str(alloc_fault), **fault})
    whole = run(FAULT_COUNT=str(tmp_path / "count"))
    assert whole.returncode == 0, whole.stderr
    n = int((tmp_path / "count").read_text())
    plain = lambda out: {k: v for k, v in json.loads(out).items() if k not in ("timings", "kv", "memory_available")}
    assert n > 20
    points = sorted({1 + i * (n - 1) // 59 for i in range(60)} | set(range(1, 12)) | set(range(max(1, n - 10), n + 1)))
    for at in points:
        for on in ({}, {"FAULT_ON": "1"}):
            broken = run(FAULT_AT=str(at), **on)
            if broken.returncode == 0 and task in ("json", "report", "estimate"):      # times and memory differ
                assert task == "report" or plain(broken.stdout) == plain(whole.stdout), (task, at, on)
                continue
            check_ended_well(broken, whole.stdout, (task, at, on))


@pytest.mark.skipif(conftest.SANITIZED, reason="a sanitizer's shadow is larger than any limit")
def test_memory_limits(gen, mkfix):
    """From a limit under which nothing starts to one under which everything fits: refused, or the whole text. Where a
    small context fits, a run that may choose its own finds one."""
    model = mkfix("rand", "--ctx", "65536", "--layers", "2")
    words = [gen.path, "-q", "-t", "2", "--backend", "cpu", "-m", model, "-n", "20", "--ignore-eos", "--temp", "0"]
    long, short = ["-p", "ab" * 50, "-c", "8192"], ["-p", "ab", "-c", "32"]

    def run(args, mb=None):
        limit = lambda: mb and resource.setrlimit(resource.RLIMIT_AS, (mb << 20, mb << 20))
        return subprocess.run([*words, *args], capture_output=True, timeout=60, preexec_fn=limit)

    def starts(mb):
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (mb << 20, mb << 20))
        return subprocess.run([gen.path, "--version"], capture_output=True, preexec_fn=limit).returncode == 0
    whole, part = run(long).stdout, run(short).stdout
    ended = {0: 0, 1: 0}
    for mb in range(16, 120, 4):
        if not starts(mb):
            continue                   # the program and its libraries do not fit
        limited = run(long, mb)
        check_ended_well(limited, whole, mb)
        ended[limited.returncode] += 1
        if run(short, mb).returncode == 0:
            assert run(short[:2], mb + 2).stdout.startswith(part[:10]), mb
    assert ended[0] and ended[1], ended


@pytest.mark.skipif(conftest.SANITIZED, reason="a sanitizer's shadow is larger than any limit")
@pytest.mark.parametrize("option", ["--batch", "--messages"])
def test_little_memory_for_json(gen, mkfix, tmp_path, option):
    """From the limit under which a short text is read: a long one is read, too, or memory is said to be out. The
    library that reads JSON does not look whether its buffer grew: no crash, and no text called wrong for that."""
    long, short = tmp_path / "long", tmp_path / "short"
    for path, n in ((long, 900000), (short, 1)):
        content = "z" * n
        one = {"prompt": content} if option == "--batch" else [{"role": "user", "content": content}]
        path.write_text(json.dumps(one))
    words = ["-q", "-t", "1", "--backend", "cpu", "-m", mkfix("rand", "--ctx", "512", "--layers", "1"), "-n", "3",
             "-s", "1", "--temp", "0", *(["-np", "1"] if option == "--batch" else ["--chat-template", "chatml"]),
             option]

    def run(path, kb):
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (kb << 10, kb << 10))
        return subprocess.run([gen.path, *words, path], capture_output=True, text=True, timeout=60, preexec_fn=limit)
    least = next(kb for kb in range(8000, 400000, 200) if run(short, kb).returncode == 0)
    told = set()
    for kb in range(least, least + 5000, 100):
        r = run(long, kb)
        assert r.returncode in (0, 1) and "no JSON" not in r.stdout + r.stderr, (kb, r)
        if r.returncode == 1:
            assert r.stderr.startswith("gen: ") and r.stderr.count("\n") == 1 and r.stdout == "", (kb, r)
            told.add(r.stderr)
    assert any(line.endswith("cannot allocate memory for JSON\n") for line in told), told
