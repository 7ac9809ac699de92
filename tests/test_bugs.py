"""Faults that were reported of other programs of this kind, each as a test that the whole kind cannot occur here:
characters cut in the stream, start tokens put in twice, wrong splitting, ends that are run past, hostile headers, half
files, sampler limits, ends of input, prompts that are too long."""
import collections
import json
import math
import os
import re
import signal
import subprocess
import time

import pytest
from conftest import GEN, SANITIZED

B0 = 6                                 # id of byte 0 in the fixtures' vocabulary
GREEDY = ("--temp", "0", "-q")
FOUR_GB = 4 << 30


def say(gen, model, *args, prompt=":", **how):
    return gen.ok(*GREEDY, "-m", model, "-p", prompt, *args, **how).out


def answer(gen, model, *args, prompt=":", **how):
    return json.loads(gen.ok(*GREEDY, "-m", model, "-p", prompt, "--json", *args, **how).text)


def ids(gen, model, *args, **how):
    lines = gen.ok("-q", "-m", model, "--dump-tokens", *args, **how).text.splitlines()
    return [int(line.split("\t")[0]) for line in lines]


# ---- B1: characters whose bytes come in several tokens

def test_characters_of_several_tokens(gen, mkfix):
    assert say(gen, mkfix("chain", "--text", "👍é!")) == "👍é!".encode()
    assert say(gen, mkfix("chain", "--text", "日ü🙂")) == "日ü🙂".encode()


@pytest.mark.parametrize("n", range(8))
def test_text_cut_inside_a_character(gen, mkfix, n):
    """A left-over fragment is one U+FFFD."""
    model = mkfix("chain", "--text", "👍é!")
    whole = "👍é!".encode()[:n]
    text = whole.decode("utf-8", "ignore")
    expected = text + ("\ufffd" if len(text.encode()) < len(whole) else "")
    assert say(gen, model, "-n", str(n)).decode() == expected
    assert answer(gen, model, "-n", str(n))["text"] == expected


@pytest.mark.parametrize("raw,text", [
    ("ff41c3", "?A?"), ("c341", "?A"), ("f09f41", "?A"), ("80bf", "?"), ("eda080", "?"), ("c0af", "?"), ("f4908081", "?"),
    ("41e28242", "A?B"), ("f09f91c3a9", "?é")])
def test_invalid_bytes_hold_nothing_back(gen, mkfix, raw, text):
    """What is not UTF-8 shows as U+FFFD (how many stand for a broken sequence is open), and what follows appears."""
    shown = say(gen, mkfix("chain", "--hex", raw)).decode()
    assert re.sub("\ufffd+", "?", shown) == text


# ---- B3: the start token

@pytest.mark.parametrize("bos,prompt,expected", [
    (1, "ab", [1, B0 + 97, B0 + 98]), (0, "ab", [B0 + 97, B0 + 98]), (1, "<s>a", [1, B0 + 97]), (0, "<s>a", [1, B0 + 97]),
    (1, "", [1]), (0, "", []), (1, "<s>", [1]), (1, "<s><s>a", [1, 1, B0 + 97])])
@pytest.mark.parametrize("template", ["", "{{ bos_token }}{{ messages[0].content }}"])
def test_start_token_of_raw_prompts(gen, mkfix, bos, prompt, expected, template):
    assert ids(gen, mkfix("chain", "--bos", str(bos), "--template", template), "-p", prompt) == expected


def test_empty_prompt(gen, mkfix):
    r = answer(gen, mkfix("chain"), "-n", "4", prompt="")
    assert r["usage"]["prompt_tokens"] == 1 and r["text"] == "abcd"
    for args in (["-p", ""], [], ["-f", "/dev/null"]):
        gen.refused("-m", mkfix("chain", "--bos", "0"), *args, rc=2, says=["empty", "-p"])
        gen.refused("-m", mkfix("chain"), "--no-bos", *args, rc=2, says="empty")


# ---- B4: splitting before BPE (all reference cases are in the tokenizer's own tests)

def pieces(gen, model, text):
    return [line.split("\t")[1] for line in gen.ok("-q", "-m", model, "--dump-tokens", "-p", text).text.splitlines()]


def test_splits(gen, data):
    vocab = lambda name: data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    assert pieces(gen, vocab("gpt-2"), "a  b") == ["a", " ", " b"]
    assert pieces(gen, vocab("qwen2"), "12345") == list("12345")
    assert pieces(gen, vocab("llama-bpe"), "12345")[-2:] == ["123", "45"]
    assert "\\n" not in pieces(gen, vocab("llama-bpe"), "a\\nb")               # a backslash and n are no line end
    texts = ["\n\n\n\nx", "    return", "->", "(x):\n", "don't DON'T", "Ⅷ²³", " \t\n ", "a\u00a0b", "e\u0301"]
    for name in ("gpt-2", "qwen2", "llama-bpe", "falcon", "starcoder", "deepseek-coder"):
        for text in texts:
            raw = re.sub("^<[|｜]begin.of.\\w+[|｜]>", "", "".join(pieces(gen, vocab(name), text)))
            joined = raw.encode().decode("unicode_escape").encode("latin-1").decode()
            assert joined == text, (name, text)


def test_unknown_splitter_is_named(gen, data, tmp_path):
    path = tmp_path / "odd.gguf"
    vocab = (data / "tokenizers" / "ggml-vocab-qwen2.gguf").read_bytes()
    key = b"tokenizer.ggml.pre" + (8).to_bytes(4, "little") + (5).to_bytes(8, "little")
    assert key + b"qwen2" in vocab
    path.write_bytes(vocab.replace(key + b"qwen2", key + b"qwenX"))
    gen.refused("-q", "-m", path, "--dump-tokens", "-p", "x", rc=3, says="qwenX")


# ---- B5: the end of the turn

@pytest.mark.parametrize("end", ["eos", "eot", "im_end"])
def test_every_end_token_ends(gen, mkfix, end):
    model = mkfix("chain", "--text", "ok", "--end", end)
    r = answer(gen, model, "-n", "50")
    assert r["text"] == "ok" and r["finish_reason"] == "stop" and len(r["tokens"]) == 2
    r = answer(gen, model, "-n", "50", "--ignore-eos")
    assert len(r["tokens"]) == 50 and r["finish_reason"] == "length"
    assert r["text"] == "ok" * 16 + "ok"[:2]                   # the markers are taken, not printed


def test_text_that_spells_an_end_does_not_end(gen, mkfix):
    model = mkfix("chain", "--text", "a<|im_end|>b", "--piece", "<|im_end|>")
    assert say(gen, model) == b"a<|im_end|>b"


# ---- B6, B7: hostile and half files

def test_malformed_headers(gen, mkfix):
    for kind in mkfix.kinds():
        path = mkfix("bad", kind)
        start = time.monotonic()
        line = gen.refused("-m", path, "-p", "x", "-n", "1", memory=FOUR_GB, rc=3)
        assert time.monotonic() - start < (1 if not SANITIZED else 5), kind
        assert str(path) in line or "tensor" in line or "file" in line, (kind, line)
        r = gen("-m", path, "--inspect", memory=FOUR_GB)        # some headers are sound enough for a summary
        assert r.rc == 0 or (r.rc == 3 and r.out == b"" and r.err.count("\n") == 1), (kind, r)


def test_dimension_that_fits_no_memory(gen, mkfix, tmp_path):
    data = bytearray(mkfix("rand").read_bytes())
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    data[at:at + 8] = (2**42 + 1).to_bytes(8, "little")
    path = tmp_path / "wide.gguf"
    path.write_bytes(data)
    gen.refused("-m", path, "-p", "x", "-n", "1", memory=FOUR_GB, rc=3, says="wide.gguf")


@pytest.mark.parametrize("how", [[], ["--no-mmap"]])
def test_half_files(gen, mkfix, tmp_path, how):
    good = mkfix("rand").read_bytes()
    path = tmp_path / "half.gguf"
    for n in (0, 1, 3, 4, 8, 23, 24, 100, 1000, len(good) // 2, len(good) - 4096, len(good) - 1):
        path.write_bytes(good[:n])
        line = gen.refused("-m", path, "-p", "x", "-n", "1", *how, memory=FOUR_GB, rc=3, says="half.gguf")
        if n > 20000:
            assert "incomplete" in line and str(n) in line and str(len(good)) in line
    path.write_bytes(good + b"more")                            # bytes after the last tensor are nobody's business
    assert say(gen, path, "-n", "3", *how) == say(gen, mkfix("rand"), "-n", "3")


def test_what_is_no_model(gen, mkfix, tmp_path):
    fifo, locked = tmp_path / "fifo", tmp_path / "locked"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo, "/dev/null", tmp_path / "missing.gguf", mkfix("bad", "html")):
        gen.refused("-m", path, "-p", "x", rc=3, says=str(path), timeout=5)
    locked.write_bytes(b"GGUF")
    locked.chmod(0)
    if os.geteuid() != 0:
        gen.refused("-m", locked, "-p", "x", rc=3, says="locked")


# ---- B16: the sampler at its limits

LEGAL = [["--temp", "0"], ["--temp", "0", "--top-k", "0"], ["--temp", "0", "--top-k", "1000000"],
         ["--temp", "0", "--top-p", "0"], ["--temp", "0", "--min-p", "5"], ["--temp", "0", "--typical-p", "0"], ["--temp", "0", "--repeat-last-n", "-1"],
         ["--temp", "0", "--repeat-last-n", "1000000000"], ["--temp", "1e-9"], ["--temp", "5", "--top-k", "1"],
         ["--temp", "5", "--top-p", "0"], ["--temp", "5", "--min-p", "1"], ["--temp", "1e9", "--min-p", "5"],
         ["--temp", "1e9", "--top-k", "1"]]


@pytest.mark.parametrize("args", LEGAL, ids=" ".join)
def test_the_best_token_under_every_filter(gen, mkfix, args):
    for model in (mkfix("chain"), mkfix("rand")):
        more = ["-n", "20"] + (["--ignore-eos"] if "rand" in model.name else [])
        best = say(gen, model, *more)
        for seed in "1", "2":
            assert gen.ok("-q", "-m", model, "-p", ":", "-s", seed, *args, *more).out == best


def test_hot_sampling_never_runs_out_of_candidates(gen, mkfix):
    for args in (["--temp", "1e9"], ["--temp", "1e9", "--top-k", "0", "--top-p", "1", "--min-p", "0"],
                 ["--top-p", "0", "--min-p", "5"], ["--typical-p", "0"], ["--repeat-penalty", "1e30"],
                 ["--presence-penalty", "1e30"], ["--frequency-penalty", "-1e30"]):
        r = gen.ok("-q", "-m", mkfix("rand"), "-p", "ab", "-n", "30", "--ignore-eos", "--json", "-s", "3", *args)
        assert len(json.loads(r.text)["tokens"]) == 30


def draws(gen, model, n):
    """n draws of the first token against its probabilities: chi-square of the four most likely and the rest."""
    first = answer(gen, model, "-n", "1", "--logprobs", "4", prompt="ab")["logprobs"]["content"][0]["top_logprobs"]
    shares = {tuple(t["bytes"]): math.exp(t["logprob"]) for t in first}
    seen = collections.Counter()
    for seed in range(1, n + 1):
        r = gen.ok("-q", "-m", model, "-p", "ab", "-n", "1", "--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p",
                   "0", "--ignore-eos", "--json", "--logprobs", "0", "-s", str(seed))
        seen[tuple(json.loads(r.text)["logprobs"]["content"][0]["bytes"])] += 1
    rest = n - sum(seen[key] for key in shares)
    cells = [(seen[key], n * share) for key, share in shares.items()] + [(rest, n * (1 - sum(shares.values())))]
    assert min(expected for _, expected in cells) > 5
    return sum((observed - expected) ** 2 / expected for observed, expected in cells)


def test_draws_follow_the_softmax(gen, mkfix):
    assert draws(gen, mkfix("rand", "--scale", "2"), 200) < 25        # 4 degrees of freedom: one in 20,000


@pytest.mark.long
def test_draws_follow_the_softmax_long(gen, mkfix):
    assert draws(gen, mkfix("rand", "--scale", "2"), 2000) < 25


# ---- B17: the end of input, signals, full disks

def test_no_input_ends(gen, mkfix):
    gen.refused("-m", mkfix("chain", "--bos", "0"), stdin=b"", timeout=10, rc=2)
    assert gen.ok(*GREEDY, "-m", mkfix("chain"), stdin=b":", timeout=10).out == b"abcd!"      # no line end at the end
    assert gen.ok(*GREEDY, "-m", mkfix("chain"), stdin=b":\n", timeout=10).out == b"abcd!"


def test_no_escape_in_a_pipe(gen, mkfix):
    r = gen.ok("--temp", "0", "--verbose", "-m", mkfix("chain"), "-p", ":", "--display-prompt")
    assert b"\x1b" not in r.out and "\x1b" not in r.err and "\r" not in r.err


def test_reader_that_leaves(mkfix):
    command = '"$0" -q --temp 0 -m "$1" -p : -n 100000 --ignore-eos | head -c 10; exit ${PIPESTATUS[0]}'
    run = subprocess.run(["bash", "-c", command, GEN, mkfix("chain", "--ctx", "200000")], capture_output=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"abcd!abcd!", b"")


def test_interrupted_while_loading(mkfix, smollm2):
    for delay in (0, 0.01, 0.03, 0.1):
        run = subprocess.Popen([GEN, "-q", "-m", smollm2, "-p", "x", "-n", "-1", "--ignore-eos"], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(delay)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=20)
        assert run.returncode == -signal.SIGINT and err == b""


def test_interrupted_in_a_long_prompt(smollm2):
    run = subprocess.Popen([GEN, "-q", "-m", smollm2, "-b", "32", "-f", "-"], stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdin.write(b"word " * 7000)
    run.stdin.close()
    time.sleep(1.5)
    start = time.monotonic()
    run.send_signal(signal.SIGINT)
    run.wait(timeout=60)
    assert run.returncode == -signal.SIGINT and run.stdout.read() == b"" and run.stderr.read() == b""
    assert time.monotonic() - start < 30


# ---- B18: a prompt longer than the context

@pytest.mark.parametrize("bytes_,fits", [(62, True), (63, True), (64, False), (640, False)])
@pytest.mark.parametrize("way", ["-p", "-f", "stdin"])
def test_prompt_and_context(gen, mkfix, tmp_path, bytes_, fits, way):
    """With the start token the prompt has bytes + 1 tokens."""
    model, text = mkfix("chain"), "x" * bytes_
    file = tmp_path / "prompt"
    file.write_text(text)
    args = {"-p": ["-p", text], "-f": ["-f", file], "stdin": []}[way]
    how = {"stdin": text} if way == "stdin" else {}
    base = [*GREEDY, "-m", model, "-c", "64", "-n", "1", *args]
    if fits:
        assert gen.ok(*base, **how).out == b"a"
    else:
        gen.refused(*base, **how, rc=2, says=[f"{bytes_ + 1} tokens", "64"])


@pytest.mark.parametrize("ctx,rc", [("0", 0), ("1", 2), ("2", 0), ("-1", 2), ("2147483647", 1), ("99999999999", 2)])
def test_odd_contexts(gen, mkfix, ctx, rc):
    base = [*GREEDY, "-m", mkfix("chain"), "-p", ":", "-n", "1", "-c", ctx]
    if rc == 0:
        assert gen.ok(*base, memory=FOUR_GB).out == b"a"
    elif rc == 1 and SANITIZED:
        gen(*base)                                              # no limit of memory there: it may fit
    else:
        line = gen.refused(*base, memory=FOUR_GB, rc=rc)
        assert "--ctx-size" in line and (rc != 1 or "274877906944 bytes" in line)
