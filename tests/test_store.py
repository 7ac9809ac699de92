"""The cache on disk: --prompt-cache FILE and --prefix-cache DIR. Whatever is in them, whoever writes to them at the same
time and whatever became of them, a run gives the bits of a cold one."""
import contextlib
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import struct
import subprocess
import time

import pytest
from conftest import GEN, SANITIZED
from make_model import random_model

TYPES = "f32 f16 bf16 fp8 int8 int4".split()
MODELS = {
    "llama": dict(arch="llama", head_k=32, embd=128, ff=128),
    "one head": dict(arch="qwen2", heads=4, kv_heads=1, head_k=32, embd=128, ff=128),
    "window": dict(arch="gemma3", layers=7, head_k=32, embd=128, ff=128, window=40),
}
BLOCK = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, how in MODELS.items():
        random_model(str(folder / name), ctx=2048, **how)
    past = time.time() - 100            # or they were too new to be known by their times
    for name in MODELS:
        os.utime(folder / name, (past, past))
    return folder


def text(seed, n):
    return "".join(random.Random(seed).choices("abcdefgh ", k=n))


def answer(gen, model, prompt, *args, n=12, err=None, **how):
    """What a run says of `prompt`: its text, ids and logits, and the tokens that came from a cache."""
    r = gen.ok(*map(str, ("-m", model, "-p", prompt, "--temp", "0", "--ignore-eos", "-n", n, "--json", *args)), **how)
    told = [line for line in r.err.splitlines() if "warning" in line]
    assert len(told) <= 1, r.err
    if err is not None:
        assert (err in told[0]) if err else not told, r.err
    said = json.loads(r.text)
    return (said["tokens"], said["logits_sha256"]), said["usage"]["cached_tokens"]


known = {}


def cold(gen, model, prompt, *args, **how):
    """What a run without a cache says; it is computed once."""
    key = repr((model, prompt, args, how))
    if key not in known:
        known[key] = answer(gen, model, prompt, *args, **how)[0]
    return known[key]


def blocks(prompt):
    """Tokens of a prompt that a cache can give back: whole blocks before the last token (one byte is one token)."""
    return (len(prompt.encode()) - 1) // BLOCK * BLOCK


# ---- the same bits in every case

X = text(1, 200)
CASES = {
    "equal": (X, blocks(X)), "prefix": (X[:100], 96), "longer": (X + text(2, 90), 192), "other end": (X[:70] + text(3, 99), 64),
    "nothing shared": (text(4, 150), 0), "five tokens": (X[:5] + text(5, 150), 0),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", TYPES)
def test_cases(gen, models, tmp_path, model, kind):
    """Bugs B13 and B14."""
    args = ["-ctk", kind, "-ctv", TYPES[::-1][TYPES.index(kind)] if kind == "int8" else kind]
    model = models / model
    file, folder, seeded = tmp_path / "c.kv", tmp_path / "d", ["--temp", "1", "-s", "7"]
    for where, store in ((file, ["--prompt-cache", file]), (folder, ["--prefix-cache", folder])):
        assert answer(gen, model, X, *args, *store, err="") == (cold(gen, model, X, *args), 0)
        first = where.rename(tmp_path / "first")
        for case, (prompt, cached) in CASES.items():
            shutil.rmtree(folder, ignore_errors=True)
            (shutil.copytree if first.is_dir() else shutil.copy)(first, where)
            if where == file:
                assert answer(gen, model, prompt, *args, *store, "--prompt-cache-ro", n=1)[1] == cached
                assert file.read_bytes() == first.read_bytes()
            again = answer(gen, model, prompt, *args, *store, err="")
            assert again == (cold(gen, model, prompt, *args), cached), (case, store)
        assert cold(gen, model, X, *args, *seeded) == answer(gen, model, X, *args, *store, *seeded)[0]
        (shutil.rmtree if first.is_dir() else os.remove)(first)


def test_settings_do_not_mix(gen, models, tmp_path):
    """One store for all: what another setting, model or instruction set computed is never taken; what does not change the
    numbers shares it."""
    folder, one = tmp_path / "d", models / "llama"
    other = tmp_path / "other"
    random_model(str(other), ctx=2048, seed=2, **MODELS["llama"])
    settings = [[], ["-ctk", "int8"], ["-ctv", "int8"], ["-ctk", "int8", "-ctv", "int8"], ["--rope-freq-base", 5e4],
                ["--rope-scale", 2]]
    isas = [isa for isa in ("generic", "avx2") if gen("--version", env={"GEN_ISA": isa}).rc == 0]
    for model, args, env in [(one, a, {}) for a in settings] + [(other, [], {}), *((one, [], {"GEN_ISA": i}) for i in isas)]:
        bits, cached = answer(gen, model, X, *args, "--prefix-cache", folder, env=env)
        assert cached == 0 and bits == cold(gen, model, X, *args, env=env), (model, args, env)
    for window, sinks in ((64, 4), (64, 30), (96, 4), (160, 0), (192, 3)):      # the same up to where the window is full
        args = ["--window", window, "--sinks", sinks]
        bits, cached = answer(gen, one, X, *args, "--prefix-cache", folder)
        assert cached == (window + sinks) // BLOCK * BLOCK and bits == cold(gen, one, X, *args), args
        assert answer(gen, one, X, *args, "--prefix-cache", folder) == (bits, 192)
    for args in (["-t", 1], ["-b", 7], ["--page-size", 64], ["--kv-layout", "contiguous"], ["-c", 512], ["--no-mmap"], ["--lookup"]):
        assert answer(gen, one, X, *args, "--prefix-cache", folder) == (cold(gen, one, X), 192), args
    copy = tmp_path / "copy"
    shutil.copy(one, copy)
    assert answer(gen, copy, X, "--prefix-cache", folder)[1] == 192
    check(folder)


def test_around_block_ends(gen, models, tmp_path):
    """Prompts that share 1 to 129 tokens, one after another in one store, made and read in different layouts."""
    layouts = itertools.cycle([[], ["--page-size", "64"], ["--kv-layout", "contiguous"], ["-b", "7"], ["-b", "33", "--page-size", "96"]])
    for name in ("llama", "window"):
        folder = tmp_path / name
        for length in [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 96, 97, 129] * 2:
            prompt = X[:length] + text(length, 40)
            bits, cached = answer(gen, models / name, prompt, "-ctk", "int4", *next(layouts), "--prefix-cache", folder, err="")
            assert bits == cold(gen, models / name, prompt, "-ctk", "int4"), (name, length)
            assert cached % BLOCK == 0 and cached <= len(prompt)
        assert cached == blocks(prompt)
        check(folder)


@pytest.mark.parametrize("window", [(), ("--window", "64"), ("--window", "50", "--sinks", "40")])
def test_windows(gen, models, tmp_path, window):
    """What lies behind the windows went away while the prompt was computed, and is there again for a shorter one."""
    folder, file, long = tmp_path / "d", tmp_path / "f", text(9, 700)
    for store in (["--prefix-cache", folder], ["--prompt-cache", file]):
        answer(gen, models / "window", long, "-b", 50, *window, *store, n=1)
        for n in (700, 680, 400, 133, 65):
            prompt = long[:n] + "xyz"
            assert answer(gen, models / "window", prompt, *window, *store, n=40) == (
                cold(gen, models / "window", prompt, *window, n=40), blocks(prompt) if n < 700 else 672), n
    # a conversation whose first part is known and whose last part is not
    assert answer(gen, models / "window", long[:333] + text(8, 200), *window, "--prefix-cache", folder)[1] == 320


def test_answers(gen, models, tmp_path):
    file, folder = tmp_path / "f", tmp_path / "d"
    model = models / "window"
    args = ["-m", model, "-p", X, "--temp", "0", "--ignore-eos", "-n", "80", "--json"]
    said = json.loads(gen.ok(*args, "--prompt-cache", file, "--prompt-cache-all").text)
    assert json.loads(gen.ok(*args, "--prefix-cache", folder).text)["tokens"] == said["tokens"]
    # the answer's bytes cannot be given as text again: the file's tokens show that it is there
    shown = json.loads(gen.ok("--inspect", file, "--json").text)
    assert shown["tokens"] == 279 and shown["blocks"] == 8
    assert answer(gen, model, X, "--prompt-cache", file, err="")[1] == 192


# ---- one file

def test_short_prompt_and_bad_places(gen, models, tmp_path):
    file, model = tmp_path / "f", models / "llama"
    assert answer(gen, model, "hello", "--prompt-cache", file, err="") == (cold(gen, model, "hello"), 0)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["f"]
    assert answer(gen, model, X, "--prompt-cache", file, err="")[1] == 0
    assert answer(gen, model, X, "--prompt-cache", file, err="")[1] == 192
    assert os.listdir(tmp_path) == ["f"]
    # a file of another kind is left as it is, whatever is asked
    for other in (tmp_path / "notes", models / "window"):
        if not other.exists():
            other.write_text("my notes")
        before = other.read_bytes()
        for more in ([], ["--prompt-cache-all"], ["--prompt-cache-ro"]):
            assert answer(gen, model, X, "--prompt-cache", other, *more, err="not a cache file") == (cold(gen, model, X), 0)
        assert other.read_bytes() == before
    for other in (tmp_path, "/nowhere/f", "/dev/null"):
        assert answer(gen, model, X, "--prompt-cache", other)[0] == cold(gen, model, X)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    assert answer(gen, model, X, "--prompt-cache", empty, err="")[1] == 0
    assert answer(gen, model, X, "--prompt-cache", empty, err="")[1] == 192


def test_file_of_another_run(gen, models, tmp_path):
    file = tmp_path / "f"
    answer(gen, models / "llama", X, "--prompt-cache", file)
    for model, args, says in [
            ("window", [], "another model"), ("llama", ["-ctk", "int8"], "settings than this run's (-ctk f16, now int8)"),
            ("llama", ["--rope-scale", 2, "-ctv", "f32", "--page-size", "64"],
             "(-ctv f16, now f32; --rope-scale the model's, now 2): it is not used, and stays as it is"),
            ("llama", ["--kv-heads", "mqa"], "(--kv-heads 2, now 1)")]:
        before = file.read_bytes()
        assert answer(gen, models / model, X, *args, "--prompt-cache", file, "--prompt-cache-ro", err=says) == (
            cold(gen, models / model, X, *args), 0)
        assert file.read_bytes() == before
    assert answer(gen, models / "window", X, "--prompt-cache", file,
                  err="another model file: it is not used, and replaced when this run ends")[1] == 0
    assert answer(gen, models / "window", X, "--prompt-cache", file, err="")[1] == 192


def test_damaged_file(gen, models, tmp_path):
    """Cut at every kind of place, any byte changed: told in one sentence, and the same bits."""
    file, bad, model = tmp_path / "f", tmp_path / "bad", models / "one head"
    bits = cold(gen, model, X)
    answer(gen, model, X, "--prompt-cache", file)
    whole = file.read_bytes()
    places = random.Random(3)
    sizes = [1, 7, 8, 9, 100, 167, 168, 169, len(whole) - 1, *(places.randrange(len(whole)) for _ in range(12))]
    spots = [8, 12, 16, 24, 56, 64, 100, 160, *(places.randrange(8, len(whole)) for _ in range(16))]
    changed = [whole[:n] for n in sizes] + [whole + b"x"]
    changed += [whole[:i] + bytes([whole[i] ^ 1 << places.randrange(8)]) + whole[i + 1:] for i in spots]
    changed += [whole[:i] + bytes(4096) + whole[i + 4096:] for i in (0, 168, 5000)]
    for content in changed:
        bad.write_bytes(content)
        gen.refused("--inspect", bad, rc=3) if len(content) != len(whole) or content[:168] != whole[:168] else None
        assert answer(gen, model, X, "--prompt-cache", bad, "--prompt-cache-ro", err="cache file")[0] == bits
    bad.write_bytes(changed[-1])
    answer(gen, model, X, "--prompt-cache", bad, err="damaged")
    assert answer(gen, model, X, "--prompt-cache", bad, err="") == (bits, 192)     # written anew


def digest(data, piece=1 << 18):
    """A model file's fingerprint: the hash of its pieces' hashes."""
    hashes = [hashlib.sha256(data[at:at + piece]).digest() for at in range(0, len(data), piece)]
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def test_inspect(gen, models, tmp_path):
    file = tmp_path / "f"
    gen.ok("-m", models / "llama", "-p", X, "-n", "3", "-ctk", "int8", "--prompt-cache", file)
    shown = gen.ok("--inspect", file).text
    for words in ("200", "int8", "paged", digest((models / "llama").read_bytes())):
        assert words in shown, words
    shown = json.loads(gen.ok("--inspect", file, "--json").text)
    assert (shown["tokens"], shown["blocks"], shown["settings"]["type_k"]) == (200, 6, "int8")
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)
    assert "block" in gen.refused("--inspect", file, rc=3)


# ---- the store

def block_sum(*parts):
    """SQLite's checksum of its write-ahead log, from 1."""
    a, b = 1, 0
    data = b"".join(parts)
    for x, y in struct.iter_unpack("<II", data):
        a = a + x + b & 0xffffffff
        b = b + y + a & 0xffffffff
    return struct.unpack("<q", struct.pack("<II", a, b))[0]


def files(folder):
    """The files of a store: its database's, and its blocks'."""
    return [f for f in folder.rglob("*") if not f.is_dir()]


def check(folder, sums=True):
    """Verifies every entry of a store, and that no file lies there but those of entries and, of writers that were killed,
    those that the next writer overwrites; how many entries there are."""
    with contextlib.closing(sqlite3.connect(folder / "prefixes.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = db.execute("SELECT key, parent, parts, tokens, sum, used, bytes, id FROM block").fetchall()
        assert db.execute("SELECT bytes FROM disk").fetchone()[0] == sum((row[6] + 4095) // 4096 * 4096 for row in rows)
        last = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'block'").fetchone()[0]
        known = {row[7] for row in rows} | {row[0] for row in db.execute("SELECT id FROM gone")}
        assert {n for n in (int(f.name[6:]) for f in (folder / "prefixes.blocks").iterdir()) if n <= last} <= known
        used = {row[0]: row[5] for row in rows}
        for key, parent, parts, tokens, total, when, size, n in rows:
            data = (folder / "prefixes.blocks" / f"block-{n}").read_bytes()
            assert len(data) == size
            assert hashlib.sha256(parent + tokens).digest() == key
            if sums:
                assert block_sum(key, parent, tokens, struct.pack("<Q", parts), data) == total
            assert when < used.get(parent, 1 << 62)            # a prefix outlives what follows it
        return len(rows)


def test_modes_and_contents(gen, models, tmp_path):
    folder = tmp_path / "d"
    for _ in range(2):
        answer(gen, models / "llama", X, "--prefix-cache", folder, err="")
        assert {stat.S_IMODE(f.stat().st_mode) for f in (folder, folder / "prefixes.blocks")} == {0o700}
        assert {stat.S_IMODE(f.stat().st_mode) for f in files(folder)} == {0o600}
    assert check(folder) == 6
    answer(gen, models / "llama", X[:31], "--prefix-cache", tmp_path / "e")
    assert not (tmp_path / "e").exists()                       # nothing to keep, nothing to look up


def test_conversation(gen, models, tmp_path):
    """Each turn of a conversation that a script holds computes what follows the turn before."""
    folder, prompt = tmp_path / "d", text(5, 300)
    for n in (100, 170, 300):
        bits, cached = answer(gen, models / "llama", prompt[:n], "--prefix-cache", folder)
        assert bits == cold(gen, models / "llama", prompt[:n])
        assert cached == {100: 0, 170: 96, 300: 160}[n]
    assert check(folder) == 9


def test_chat_keeps_its_beginning(gen, models, tmp_path):
    """Of a long chat, whose turns take nothing from the store, the first blocks are used as late as the last ones; so are those
    of a text that another line of a batch has computed."""
    folder, model = tmp_path / "d", models / "llama"
    turns = "".join(text(i, 150) + "\n" for i in range(3))
    gen.ok("-m", model, "--chat", "--chat-template", "chatml", "-n", "8", "--prefix-cache", folder, "--temp", "0", stdin=turns)
    assert check(folder) > 12
    folder = tmp_path / "e"
    lines = "".join(json.dumps({"prompt": X[:128] + text(i, 300)}) + "\n" for i in range(2))
    for size in ("64", "512"):
        gen.ok("-m", model, "--batch", "-", "-n", "4", "-np", "2", "-b", size, "--prefix-cache", folder, stdin=lines)
        check(folder)


def test_size(gen, models, tmp_path):
    """The folder stays within its size; what is used stays, the ends of prefixes go first."""
    folder, model, limit = tmp_path / "d", models / "llama", 2 << 20
    args = ["--prefix-cache", folder, "--prefix-cache-size", "2M"]
    for i in range(24):
        answer(gen, model, text(100 + i, 170), *args, err="", n=1)
        cached = answer(gen, model, X, *args, err="", n=1)[1]
        assert cached == (192 if i else 0)
        assert sum(f.stat().st_size for f in files(folder) if f.name != "prefixes.db-shm") <= limit * 1.1
    count = check(folder)
    assert 40 < count < 130
    answer(gen, model, X, "--prefix-cache", folder, "--prefix-cache-size", "512K", err="", n=1)
    assert check(folder) < count / 2
    assert sum(f.stat().st_size for f in files(folder) if f.name != "prefixes.db-shm") <= 700 << 10
    assert answer(gen, model, X, "--prefix-cache", folder, "--prefix-cache-size", "1",
                  err="--prefix-cache-size")[0] == cold(gen, model, X)
    assert check(folder) == 0
    for size in ("1", "40K", "45K"):                           # nothing, the empty tables, them and half a block
        folder = tmp_path / size
        for _ in range(2):
            assert answer(gen, model, X, "--prefix-cache", folder, "--prefix-cache-size", size, err="--prefix-cache-size") == (
                cold(gen, model, X), 0)


def test_processes_at_once(gen, models, tmp_path):
    """Many processes begin a store, read and write it; each gives a cold run's bits."""
    folder, model = tmp_path / "d", models / "llama"
    prompts = [X[:60 + 20 * (i % 5)] + text(i % 7, 150) for i in range(24)]
    expected = {p: cold(gen, model, p) for p in set(prompts)}
    for size in ("4G", "2M"):
        command = [GEN, "-m", model, "--temp", "0", "--ignore-eos", "-n", "12", "--json", "-q", "-t", "1", "--prefix-cache", folder,
                   "--prefix-cache-size", size, "-p"]
        runs = [subprocess.Popen([*map(str, command), p], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for p in prompts]
        for prompt, run in zip(prompts, runs):
            out, err = run.communicate(timeout=120)
            assert run.returncode == 0 and err == b"", err
            said = json.loads(out)
            assert (said["tokens"], said["logits_sha256"]) == expected[prompt]
    assert check(folder) > 20


def test_computes_while_another_stores(gen, models, tmp_path):
    """A process that is stopped between two parts of its prompt leaves the store to others."""
    folder = tmp_path / "d"
    args = [str(w) for w in ("-m", models / "llama", "-n", "1", "-b", "64", "-t", "1", "--prefix-cache", folder)]
    first, second, stored = text(1, 2000), text(2, 500), 0
    answer(gen, models / "llama", X, "--prefix-cache", folder)
    run = subprocess.Popen([GEN, *args, "-q", "-p", first], stdout=subprocess.DEVNULL)
    with contextlib.closing(sqlite3.connect(folder / "prefixes.db", timeout=0, isolation_level=None)) as db:
        try:
            while run.poll() is None and not stored:
                time.sleep(0.001)
                run.send_signal(signal.SIGSTOP)
                with contextlib.suppress(sqlite3.OperationalError):        # it was stopped while it writes
                    db.execute("BEGIN IMMEDIATE")
                    stored = db.execute("SELECT count(*) FROM block").fetchone()[0] - 6
                    db.execute("ROLLBACK")
                if not stored:
                    run.send_signal(signal.SIGCONT)
            assert 0 < stored < 50, "its blocks are seen at its end only"
            gen.ok(*args, "-p", second)
        finally:
            run.send_signal(signal.SIGCONT)
            run.wait()
    for prompt in (first, second):
        assert answer(gen, models / "llama", prompt, "--prefix-cache", folder)[1] == blocks(prompt)


def kill(gen, models, folder, times, seed):
    """Kills writers at random moments; the number of entries that are whole afterwards."""
    draw, model, bits = random.Random(seed), models / "llama", {}
    begun = time.time()
    answer(gen, model, text(0, 900), "--prefix-cache", folder, n=1)
    takes = time.time() - begun
    for i in range(times):
        prompt = text(draw.randrange(50), 900) + text(i, 200)
        runs = [subprocess.Popen([str(GEN), "-m", str(model), "-p", prompt, "-n", "1", "-q", "-b", "64", "--prefix-cache", str(folder)],
                                 stdout=subprocess.DEVNULL) for _ in range(1 + i % 2)]
        time.sleep(draw.random() * takes)
        for run in runs:
            run.send_signal(signal.SIGKILL)
            run.wait()
        if i % 10 == 9:
            assert answer(gen, model, prompt, "--prefix-cache", folder, n=1, err="")[0] == cold(gen, model, prompt, n=1)
    return check(folder)


def test_killed_at_any_moment(gen, models, tmp_path):
    assert kill(gen, models, tmp_path / "d", 20, seed=1) > 25


@pytest.mark.long
def test_killed_200_times(gen, models, tmp_path):
    assert kill(gen, models, tmp_path / "d", 200, seed=2) > 25


def damage(gen, models, tmp_path, times, seed):
    """Cuts and overwrites the database, its log and the blocks' files; how often that was told."""
    draw, model = random.Random(seed), models / "one head"
    prompts = [X, X[:80] + text(2, 200), text(3, 400)]
    bits = [cold(gen, model, p) for p in prompts]
    whole, folder, told = tmp_path / "whole", tmp_path / "d", 0
    checked = tmp_path / "checked"
    answer(gen, model, prompts[0], "--prefix-cache", whole)
    with contextlib.closing(sqlite3.connect(whole / "prefixes.db")) as db:
        db.execute("SELECT * FROM model").fetchall()           # as long as it is open the log stays
        for p in prompts[1:]:
            answer(gen, model, p, "--prefix-cache", whole)
        shutil.copytree(whole, tmp_path / "logged")
    shutil.copytree(whole, checked)
    whole = tmp_path / "logged"
    assert (whole / "prefixes.db-wal").stat().st_size > 20000
    assert {f.name.split("-")[0] for f in files(checked)} == {"prefixes.db", "block"}
    for i in range(times):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree([whole, checked][i % 2], folder)
        block = draw.choice(sorted(f"prefixes.blocks/{f.name}" for f in (folder / "prefixes.blocks").iterdir()))
        file = folder / draw.choice(["prefixes.db-wal", "prefixes.db-wal", "prefixes.db-shm", "prefixes.db", block] if i % 2 == 0
                                    else ["prefixes.db", block])
        data = bytearray(file.read_bytes())
        how, at = draw.randrange(5), draw.randrange(len(data))
        if draw.random() < 0.3:
            at = draw.randrange(min(len(data), 4096))          # the headers
        if how == 0:
            del data[at:]
        elif how == 1:
            data[at] ^= 1 << draw.randrange(8)
        else:
            n = draw.choice([2, 64, 4096, 40000])
            piece = data[at:at + n]
            data[at:at + len(piece)] = [draw.randbytes, bytes, lambda n: bytes(data[-n:])][how - 2](len(piece))[:len(piece)]
        file.write_bytes(data)
        for _ in range(2):
            for p, expected in zip(prompts, bits):
                r = gen.ok("-m", model, "-p", p, "--temp", "0", "--ignore-eos", "-n", "12", "--json", "--prefix-cache", folder)
                said = json.loads(r.text)
                assert (said["tokens"], said["logits_sha256"]) == expected
                lines = [line for line in r.err.splitlines() if "warning" in line]
                assert len(lines) <= 1, r.err
                told += len(lines)
    return told


def test_damaged_store(gen, models, tmp_path):
    assert damage(gen, models, tmp_path, 20, seed=1) > 3


@pytest.mark.long
def test_damaged_store_often(gen, models, tmp_path):
    assert damage(gen, models, tmp_path, 400, seed=2) > 60


def test_damaged_store_is_begun_anew(gen, models, tmp_path):
    folder, model = tmp_path / "d", models / "llama"
    answer(gen, model, X, "--prefix-cache", folder)
    mine = ["block-diagram.txt", "block-7", "prefixes.db.bak", "prefixes.blocks/block-diagram.txt"]
    for n, name in enumerate(mine):
        (folder / name).write_text(name)

    def replace(file, how):
        file.unlink(missing_ok=True)
        if how:
            how(file)

    def full_folder(file):
        file.mkdir()
        (file / "x").write_text("x")
    zeros = bytes(block_files(folder)[0].stat().st_size)
    for how in (lambda f: f.write_bytes(zeros), lambda f: f.write_bytes(zeros[:-1]), None, os.mkfifo, lambda f: f.mkdir(), full_folder,
                lambda f: f.symlink_to(folder / "block-7"), lambda f: f.symlink_to("/nowhere")):
        replace(block_files(folder)[2], how)
        assert answer(gen, model, X, "--prefix-cache", folder, err="damaged") == (cold(gen, model, X), 64)
        assert answer(gen, model, X, "--prefix-cache", folder, err="")[1] == 0
        assert answer(gen, model, X, "--prefix-cache", folder, err="")[1] == 192
        assert all((folder / name).read_text() == name for name in mine)


@pytest.mark.parametrize("change", ["UPDATE sqlite_sequence SET seq = 9223372036854775807", "UPDATE sqlite_sequence SET seq = -1",
                                    "UPDATE block SET used = 9223372036854775807"])
def test_numbers_without_a_next_one(gen, models, tmp_path, change):
    folder, model = tmp_path / "d", models / "llama"
    answer(gen, model, X, "--prefix-cache", folder)
    with contextlib.closing(sqlite3.connect(folder / "prefixes.db")) as db:
        db.execute(change)
        db.commit()
    assert answer(gen, model, text(2, 200), "--prefix-cache", folder, err="damaged")[1] == 0
    assert answer(gen, model, X, "--prefix-cache", folder, err="")[1] == 0
    assert check(folder) == 6


def block_files(folder):
    """The blocks' files in the order of their ids."""
    with contextlib.closing(sqlite3.connect(folder / "prefixes.db")) as db:
        ids = [row[0] for row in db.execute("SELECT id FROM block ORDER BY id")]
    return [folder / "prefixes.blocks" / f"block-{n}" for n in ids]


def test_what_lies_at_the_next_name(gen, models, tmp_path):
    """A file that a killed writer left, or whatever else is there, is not written to, and is waited for by nobody."""
    folder, model = tmp_path / "d", models / "llama"
    mine = tmp_path / "mine"
    mine.write_text("mine")
    places = [os.mkfifo, lambda f: f.symlink_to(mine), lambda f: os.link(mine, f),
              lambda f: f.write_bytes(bytes(1 << 20)), lambda f: f.mkdir()]
    answer(gen, model, X, "--prefix-cache", folder)
    for i, how in enumerate(places):
        last = block_files(folder)[-1]
        how(last.with_name(f"block-{int(last.name[6:]) + 1}"))
        prompt, a_folder = text(20 + i, 200), i == len(places) - 1
        assert answer(gen, model, prompt, "--prefix-cache", folder, err="damaged" if a_folder else "")[1] == 0
        if a_folder:
            answer(gen, model, prompt, "--prefix-cache", folder, err="")
        assert answer(gen, model, prompt, "--prefix-cache", folder, err="")[1] == 192
        assert mine.read_text() == "mine" and check(folder) == (6 if a_folder else 6 * i + 12)


def test_database_is_removed(gen, models, tmp_path):
    """The blocks that lie there without one go when it is made anew."""
    folder, model = tmp_path / "d", models / "llama"
    answer(gen, model, text(1, 2000), "--prefix-cache", folder)
    for file in folder.glob("prefixes.db*"):
        file.unlink()
    answer(gen, model, X, "--prefix-cache", folder, err="")
    assert check(folder) == len(list((folder / "prefixes.blocks").iterdir())) == 6


def test_clock_is_set_back(gen, models, tmp_path):
    """What was used in the future makes room as well."""
    folder, model = tmp_path / "d", models / "llama"
    args = ["--prefix-cache", folder, "--prefix-cache-size", "2M"]
    for i in range(8):
        answer(gen, model, text(100 + i, 400), *args, n=1)
    with contextlib.closing(sqlite3.connect(folder / "prefixes.db")) as db:
        db.execute("UPDATE block SET used = used + 1000000000000000")
        db.commit()
    for i in range(8):
        prompt = text(200 + i, 400)
        assert [answer(gen, model, prompt, *args, err="", n=1)[1] for _ in range(2)] == [0, 384]
    check(folder)


def test_places_that_are_no_store(gen, models, tmp_path):
    """One warning, no caching, the same text."""
    model, bits = models / "llama", cold(gen, models / "llama", X)
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "prefixes.db").write_text("my own file, of some length, which is no database" * 100)
    (tmp_path / "foreign").mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "foreign" / "prefixes.db")) as db:
        db.execute("CREATE TABLE mine(x)")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "prefixes.db").symlink_to(tmp_path / "file")
    (tmp_path / "directory" / "prefixes.db").mkdir(parents=True)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "prefixes.blocks").symlink_to(tmp_path)
    assert answer(gen, model, X, "--prefix-cache", tmp_path / "taken", err="prefixes.blocks") == (bits, 0)
    err = gen.ok("-m", model, "-p", X, "-n", "1", "--prefix-cache", "/sys/new").err      # nobody can make a folder in /sys
    assert "/sys/new cannot be used" in err and "No such file" not in err
    for name in ("file", "file/under", "other", "foreign", "link", "directory", "no/parents"):
        for _ in range(2):
            assert answer(gen, model, X, "--prefix-cache", tmp_path / name, err="prefixes.db" if name in (
                "other", "foreign", "link", "directory") else name) == (bits, 0), name
    assert (tmp_path / "other" / "prefixes.db").read_text().startswith("my own")
    assert (tmp_path / "file").read_text() == "x"
    gen.refused("-m", model, "-p", X, "--prefix-cache", tmp_path / "d", "--prefix-cache-size", "1X", rc=2, says="1X")


@pytest.mark.parametrize("room", [1 << 12, 1 << 13, 1 << 14])
def test_full_disk(gen, models, tmp_path, room):
    """The file size limit stands in for a full disk."""
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    for store in (["--prefix-cache", tmp_path / "d"], ["--prompt-cache", tmp_path / "f"]):
        for _ in range(2):
            run = subprocess.run([str(w) for w in (GEN, "-m", models / "llama", "-p", text(6, 900), "-n", "4", "--temp", "0", *store)],
                                 capture_output=True, text=True, preexec_fn=limit)
            assert run.returncode == 0 and run.stderr.count("warning") == 1, run.stderr
            assert run.stdout == gen.ok("-m", models / "llama", "-p", text(6, 900), "-n", "4", "--temp", "0").text
    assert os.listdir(tmp_path) == ["d"]
    assert not list(tmp_path.rglob("block-*"))


def test_full_disk_between_two_transactions(gen, models, tmp_path):
    """The blocks' files have room, the database's log has none for all rows: no file is left of what was not committed.
    How much fits in the log depends on when it was worked off, so that several sizes are tried."""
    kept = set()
    for room in range(48 << 10, 112 << 10, 8 << 10):
        folder = tmp_path / str(room)
        run = subprocess.run([str(w) for w in (GEN, "-m", models / "llama", "-p", text(6, 900), "-n", "1", "--prefix-cache", folder)],
                             capture_output=True, text=True,
                             preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
        assert run.returncode == 0 and run.stderr.count("warning") <= 1, run.stderr
        rows = check(folder)
        assert rows == len(list((folder / "prefixes.blocks").iterdir()))
        if run.stderr: kept.add(rows)
    assert max(kept) > 0, "no run stored a part"


def test_locked_by_a_process_that_sleeps(gen, models, tmp_path):
    """A writer that stops in its transaction does not stop the others for long."""
    folder, model = tmp_path / "d", models / "llama"
    answer(gen, model, X, "--prefix-cache", folder)
    with contextlib.closing(sqlite3.connect(folder / "prefixes.db")) as db:
        db.execute("BEGIN IMMEDIATE")
        begun = time.time()
        assert answer(gen, model, X[:64] + text(8, 500), "--prefix-cache", folder, err="")[1] == 64
        assert time.time() - begun < (60 if SANITIZED else 10)


@pytest.mark.parametrize("args,says", [
    (["--prompt-cache-ro"], "--prompt-cache FILE"), (["--prompt-cache-all"], "--prompt-cache FILE"),
    (["--prompt-cache", "a", "--prefix-cache", "b"], "exclude"), (["--prefix-cache-size", "1G"], "--prefix-cache DIR"),
    (["--prompt-cache", "a", "--prompt-cache-ro", "--prompt-cache-all"], "exclude"),
    (["--prefix-cache", "b", "--no-kv-cache"], "exclude"), (["--prefix-cache", "b", "--prefix-cache-size", "0"], "bytes")])
def test_refused(gen, models, args, says):
    gen.refused("-m", models / "llama", "-p", "x", *args, rc=2, says=says)


def test_batch(gen, models, tmp_path):
    """Lines of a batch begin with what earlier batches and runs computed."""
    folder, model = tmp_path / "d", models / "window"
    prompts = [X[:n] + text(n, 40) for n in (150, 33, 64, 120, 150)]
    lines = "".join(json.dumps({"custom_id": str(i), "prompt": p}) + "\n" for i, p in enumerate(prompts))
    args = ["-m", model, "--batch", "-", "--temp", "0", "-s", "1", "-n", "8", "-np", "3", "-q", "--timings"]

    def run(*more):
        said = [json.loads(line) for line in gen.ok(*args, *more, stdin=lines).text.splitlines()]
        said = {line["custom_id"]: (line["response"], line["timings"]) for line in said if "response" in line}
        return [said[str(i)] for i in range(5)]
    plain, first, second = run(), run("--prefix-cache", folder), run("--prefix-cache", folder)
    assert [r for r, _ in plain] == [r for r, _ in first] == [r for r, _ in second]
    assert [t["cached_tokens"] for _, t in second] == [blocks(p) for p in prompts]
    assert answer(gen, model, prompts[0], "--prefix-cache", folder, err="")[1] == blocks(prompts[0])
    check(folder)
