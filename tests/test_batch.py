"""gen --batch: every line gets what it would get alone, in order, whatever happens on the way."""
import fcntl
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time

import gguf
import pytest
from conftest import GEN, SANITIZED, run_program
from make_model import chain_model, random_model

TEXT = ("It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
        "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light. ")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_model(str(tmp_path_factory.mktemp("batch") / "random.gguf"), layers=2, embd=128, ff=128, head_k=32,
                        weight="Q8_0", ctx=1024)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return chain_model(str(tmp_path_factory.mktemp("batch") / "chain.gguf"), "abcd!", ctx=512)


def jsonl(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def answers(r):
    """The output's lines; each is whole."""
    assert r.out == b"" or r.out.endswith(b"\n")
    return [json.loads(line) for line in r.out.splitlines()]


def batch(gen, model, lines, *args, rc=0, **how):
    lines = lines if isinstance(lines, (str, bytes)) else jsonl(lines)
    r = gen("-q", "-m", model, "--batch", "-", *args, stdin=lines, **how)
    assert r.rc == rc, r.err
    return answers(r)


def alone(gen, model, line, *args):
    """What the line's prompt gets from a process of its own."""
    line = dict(line)
    words = ["-p", line.pop("prompt")]
    line.pop("custom_id", None)
    for name, value in line.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if value is True else [f"--{name}={one}"]
    r = json.loads(gen.ok("-q", "-m", model, "--json", *args, *words).text)
    return {"text": r["text"], "tokens": r["tokens"], "finish_reason": r["finish_reason"],
            "usage": {k: r["usage"][k] for k in ("prompt_tokens", "completion_tokens")},
            "logits_sha256": r["logits_sha256"], **({"logprobs": r["logprobs"]} if "logprobs" in r else {})}


def mixed_lines(n, seed=3):
    """Lines of mixed lengths, some greedy, some drawn, some that end early."""
    draw = random.Random(seed)
    lines = []
    for i in range(n):
        begin = draw.randrange(20)
        line = {"custom_id": f"line-{i}", "prompt": TEXT[begin:begin + draw.choice([1, 7, 31, 32, 33, 64, 65, 150])],
                "predict": draw.choice([1, 2, 9, 30, 70]), "ignore-eos": True}
        line.update(draw.choice([{"temp": 0}, {"temp": 1, "seed": 42}, {"seed": i, "top-k": 5, "repeat-penalty": 1.2}]))
        if i % 9 == 0:
            line["stop"] = ["e", "\u00ff"]
        lines.append(line)
    return lines


# ---- the same bits

@pytest.fixture(scope="module")
def expected(gen, model):
    """64 mixed lines, and what each gets in a process of its own."""
    lines = mixed_lines(64)
    return lines, [alone(gen, model, line) for line in lines]


@pytest.mark.parametrize("args", [["-np", "1"], ["-np", "3"], ["-np", "8"], ["-np", "64"], ["-t", "1"], ["-t", "3"],
                                  ["-b", "1"], ["-b", "7"], ["-b", "512"], ["--page-size", "64"],
                                  ["--kv-layout", "contiguous"], ["--unordered"]], ids=" ".join)
def test_as_alone(gen, model, expected, args):
    """B15"""
    lines, alone = expected
    got = batch(gen, model, lines, *args)
    if "--unordered" in args:
        got.sort(key=lambda a: int(a["custom_id"][5:]))
    assert [a["custom_id"] for a in got] == [line["custom_id"] for line in lines]
    assert [a["response"] for a in got] == alone


def test_as_alone_shuffled(gen, model, expected):
    lines, alone = expected
    order = list(range(len(lines)))
    random.Random(7).shuffle(order)
    got = batch(gen, model, [lines[i] for i in order], "-np", "5")
    assert [a["response"] for a in got] == [alone[i] for i in order]


def prefix_lines():
    """B14: the same prompt three times, beginnings of all lengths around a page, one the beginning of another, one that
    is a prompt and its answer."""
    text = TEXT * 2
    lines = [{"prompt": text[:100], "predict": 12}] * 3
    for n in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65):
        lines += [{"prompt": text[:n] + end, "predict": 6} for end in ("", "x", "yz" * 20)]
    lines += [{"prompt": text[:200], "predict": 3}, {"prompt": text[:150], "predict": 20},
              {"prompt": text[:200] + "?", "predict": 40}]
    return [{"custom_id": i, "temp": 0, "ignore-eos": True, **line} for i, line in enumerate(lines)]


@pytest.mark.parametrize("types", [["f16", "f16"], ["f32", "fp8"], ["int8", "int4"], ["int4", "int4"]], ids="-".join)
@pytest.mark.parametrize("args", [["-np", "1"], ["-np", "6"], ["-np", "40", "--page-size", "64"],
                                  ["-np", "6", "--no-share"]], ids=" ".join)
def test_shared_beginnings(gen, model, types, args):
    kv = ["-ctk", types[0], "-ctv", types[1]]
    lines = prefix_lines()
    some = range(len(lines)) if types == ["f16", "f16"] and args == ["-np", "6"] else range(0, len(lines), 7)
    got = batch(gen, model, lines, *args, *kv)
    for i in some:
        assert got[i]["response"] == alone(gen, model, lines[i], *kv), lines[i]


@pytest.mark.parametrize("args", [[], ["-ctk", "int8", "-ctv", "int4"], ["--window", "700"], ["-np", "20"],
                                  ["-ctk", "f32", "-ctv", "fp8", "--page-size", "512"]], ids=" ".join)
def test_long_beginnings(gen, model, args):
    """Rows that share whole splits of 256 tokens look at them together, beside rows of prompts and of other texts."""
    lines = [{"prompt": (TEXT * 5)[:600 + 7 * i % 5 * 60] + str(i), "predict": 5 + 3 * i, "temp": 0, "ignore-eos": True}
             for i in range(12)]
    lines[5]["prompt"] = "another text" + lines[5]["prompt"]
    got = batch(gen, model, lines, "-np", "7", *args)
    each = batch(gen, model, lines, *args, "-np", "1", "--no-share")
    assert [a["response"] for a in got] == [a["response"] for a in each]
    assert got[5]["response"] == alone(gen, model, lines[5], *[a for a in args if a not in ("-np", "20")])


def test_beginnings_are_computed_once(gen, model):
    lines = [{"prompt": TEXT + TEXT + f"{i}", "predict": 2, "temp": 0} for i in range(12)]
    r = gen("-m", model, "--batch", "-", "-np", "6", "--progress", "json", stdin=jsonl(lines))
    last = json.loads(r.err.splitlines()[-1])
    asked = sum(len(line["prompt"]) for line in lines)
    assert r.rc == 0 and last["done"] and last["prompt_tokens"] == asked
    assert last["prefilled_tokens"] < 2 * asked / 12 + 200


@pytest.mark.parametrize("offload", [False, True])
def test_more_work_than_memory(gen, model, tmp_path, offload):
    """Caches that need 10 times the memory: the youngest sequences give their pages up, and get the same bits."""
    lines = [{**line, "custom_id": i, "predict": 200} for i, line in enumerate(mixed_lines(40))]
    args = ["-c", "384", "-s", "1", "-np", "20"]
    whole = batch(gen, model, lines, *args)
    # 512 bytes a token: a sequence of 384 tokens just fits, 20 of 200 to 350 tokens need ten times that
    args += ["--kv-memory", "200K", *(["--kv-offload", tmp_path] if offload else [])]
    r = gen("-q", "-m", model, "--batch", "-", *args, "--progress", "json", stdin=jsonl(lines))
    last = json.loads(r.err.splitlines()[-1])
    assert r.rc == 0 and answers(r) == whole
    assert last["given_up"] > 0 and (last["bytes_out"] > 0) == offload and not list(tmp_path.iterdir())
    assert last["repeated_tokens"] > 0 or offload
    assert last["longest_wait_ms"] > last["median_step_ms"] and last["longest_gap_ms"] > 0


@pytest.mark.parametrize("args", [[], ["--no-share"], ["--evict", "snapkv", "--kv-budget", "256"], ["--window", "64"]])
def test_any_memory_ends(gen, tmp_path, args):
    """Raw rows of a pass come on top of what sequences keep: a pass that lacks room makes way, and is not tried again
    with the same tasks for ever."""
    tiny = random_model(str(tmp_path / "tiny.gguf"), layers=2, embd=64, ff=64, heads=4, kv_heads=2, head_k=32, ctx=2048)
    text = TEXT * 4
    lines = [{"prompt": p} for p in (text[:700], text[:351], "qq" + text[:700], text[:700], text[:701], "short")]
    for types in ("bf16", "int8"), ("int4", "f32"):
        for memory in "200K", "350K", "510K", "540K":
            same = [*args, "-s", "3", "-n", "5", "--kv-heads", "mqa", "-ctk", types[0], "-ctv", types[1],
                    "--kv-memory", memory]
            r = gen("-q", "-m", tiny, "--batch", "-", *same, "-np", "3", stdin=jsonl(lines))
            got = answers(r)
            assert len(got) == len(lines) and all(("response" in a) != ("error" in a) for a in got), r.err
            assert r.rc == any("error" in a for a in got) and "response" in got[5]
            assert got == answers(gen("-q", "-m", tiny, "--batch", "-", *same, "-np", "1", stdin=jsonl(lines)))


# what does not fit 100 kB of 512 bytes a token, about 190 tokens: a prompt, an answer, one that has no end
TOO_LARGE = {"prompt": {"prompt": (TEXT * 2)[:300], "predict": 2}, "answer": {"prompt": "a", "predict": 250},
             "endless": {"prompt": "an answer without an end", "predict": -1},
             "fork": {"prompt": TEXT[:180] + "x", "predict": 90}}


@pytest.mark.parametrize("args", [["-np", "1"], ["-np", "16"], ["-np", "4", "--samples", "3"],
                                  ["-np", "3", "--no-share"], ["-np", "5", "-ctk", "int8", "-ctv", "int4"],
                                  ["-np", "5", "-b", "150"], ["-np", "5", "--kv-offload", "host"],
                                  ["-np", "2", "--data-parallel"]], ids=" ".join)
def test_lines_larger_than_memory(gen, model, request, args):
    """A line that does not fit --kv-memory alone is an error of its own; all others get what they always get."""
    sealed = "int8" in args
    lines = []
    for i, line in enumerate(mixed_lines(16, seed=5)):
        lines.append({**line, "predict": min(line["predict"], 30)})
        if i % 4 == 1:
            name = list(TOO_LARGE)[i // 4]
            lines.append({**TOO_LARGE[name], "custom_id": name, "temp": 0, "ignore-eos": True})
        lines.append({"prompt": TEXT[:150] + f"{i}", "custom_id": f"shared-{i}", "predict": 9, "temp": 0})
    same = ["-s", "1", "-c", "1024", *(args[2:] if sealed or "--samples" in args else [])]
    whole = {(a["custom_id"], a.get("sample")): a for a in batch(gen, model, lines, *same)}
    memory = "110000" if sealed else "100000"
    program = request.getfixturevalue("mpirun")(2) if "--data-parallel" in args else [GEN]
    r = run_program([*program, "-q", "-m", model, "--batch", "-", *same, "--kv-memory", memory, *args], jsonl(lines))
    got = answers(r)
    failed = [a for a in got if "error" in a]
    if "--kv-offload" in args:
        assert r.rc == 0 and not failed
    else:
        assert r.rc == 1 and {a["custom_id"] for a in failed} == set(TOO_LARGE), r.err
    for a in failed:
        said = a["error"]["message"]
        assert re.search(rf" (\d+) tokens need (\d+) bytes of cache, more than the {memory} allowed: "
                         "raise --kv-memory, add --kv-offload host or ask for fewer", said), said
        assert a["error"]["line"] == [line["custom_id"] for line in lines].index(a["custom_id"]) + 1
    for a in got:
        if "error" not in a:
            assert a == whole[a["custom_id"], a.get("sample")]


def test_numbers_that_overflow(gen, tmp_path):
    """A line whose logits are no numbers fails alone: not those beside it, nor those that get its pages."""
    path = random_model(str(tmp_path / "nan.gguf"), layers=2, embd=128, ff=128, head_k=32, weight="F32", ctx=512)
    z = int(gen.ok("-q", "-m", path, "--dump-tokens", "-p", "z").text.split("\t")[0])
    reader = gguf.GGUFReader(path, "r+")
    next(t for t in reader.tensors if t.name == "token_embd.weight").data[z] = math.nan
    reader.data.flush()
    lines = [{**line, "logit-bias": f"{z}-10000"} for line in mixed_lines(24)]
    good = batch(gen, path, lines, "-s", "1")
    for np in ("1", "6"):
        both = [x for line in lines for x in ({**line, "prompt": line["prompt"] + "z"}, line)]
        got = batch(gen, path, both, "-np", np, "-s", "1", "--kv-memory", "500K", rc=1)
        assert got[1::2] == good and all("not a number" in a["error"]["message"] for a in got[::2])


def test_window(gen, model):
    lines = [{"prompt": (TEXT * 4)[i:], "predict": 90, "temp": 0, "ignore-eos": True} for i in range(0, 400, 60)]
    args = ["--window", "128", "--sinks", "4"]
    for line, a in zip(lines, batch(gen, model, lines, "-np", "4", *args)):
        assert a["response"] == alone(gen, model, line, *args)


def test_samples(gen, model):
    base = {"prompt": TEXT[:70], "predict": 20, "temp": 1, "ignore-eos": True}
    for np in ("1", "4", "9"):
        lines = [{**base, "custom_id": "x", "n": 6}, {**base, "custom_id": "y"}]
        got = batch(gen, model, lines, "--seed", "5", "-np", np)
        assert [(a["custom_id"], a.get("sample")) for a in got] == [("x", k) for k in range(6)] + [("y", None)]
        for k, a in enumerate(got[:6]):
            assert a["response"] == alone(gen, model, {**base, "seed": 5 + k})
        assert got[6]["response"] == got[0]["response"]
    assert len({a["key"] for a in got}) == 2 and len({a["response"]["text"] for a in got[:6]}) == 6
    assert [a["sample"] for a in batch(gen, model, [base], "--samples", "3", "-s", "1")] == [0, 1, 2]


def test_logprobs_and_predict_0(gen, model):
    line = {"prompt": TEXT[:40], "predict": 5, "temp": 0, "logprobs": 3}
    assert batch(gen, model, [line])[0]["response"] == alone(gen, model, line)
    line = {"prompt": TEXT[:40], "predict": 0, "temp": 0}
    assert batch(gen, model, [line])[0]["response"] == alone(gen, model, line)


# ---- lines

def test_fixed_text(gen, chain):
    lines = [{"prompt": ":"}, {"prompt": ":", "predict": 3}, {"prompt": ":", "stop": "d"}]
    got = batch(gen, chain, lines, "--temp", "0")
    assert [(a["response"]["text"], a["response"]["finish_reason"]) for a in got] == \
        [("abcd!", "stop"), ("abc", "length"), ("abc", "stop")]


def test_plain_text(gen, chain, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeff:\r\nx:\n\n:".encode())
    r = gen("-q", "-m", chain, "--temp", "0", "--batch", file)
    assert r.rc == 0 and [a["response"]["text"] for a in answers(r)] == ["abcd!"] * 3
    file.write_bytes(b"\r\n\n:\n\n" + b"x" * 600 + b":\n\n")
    r = gen("-m", chain, "--temp", "0", "--batch", file)
    got = answers(r)
    assert r.rc == 1 and got[0]["response"]["text"] == "abcd!" and got[1]["error"]["line"] == 5
    assert "gen: 1 answer, 1 failed" in r.err and "gen: 1 line has no answer" in r.err


BAD_LINES = [
    ("{", "JSON"), ("[]", "object"), ('"x"', "JSON"), ("\0", "JSON"), ("nan", "JSON"), ('{"prompt":"a"} x', "JSON"),
    ('{"prompt":"\udcff"}', "JSON"), ('{"prompt":"a","prompt":"b"}', "duplicate"), ("{}", "neither"),
    ('{"prompt":"a","messages":[]}', "both"), ('{"prompt":5}', "no text"), ('{"prompt":""}', "empty"),
    ('{"prompt":"a","tmep":1}', "--temp"), ('{"prompt":"a","t":1}', "'t'"), ('{"prompt":"a","threads":1}', "--threads"),
    ('{"prompt":"a","temp":-1}', "--temp"), ('{"prompt":"a","temp":"hot"}', "--temp"),
    ('{"prompt":"a","temp":null}', "temp"),
    ('{"prompt":"a","temp":[1]}', "temp"), ('{"prompt":"a","predict":1.5}', "--predict"),
    ('{"prompt":"a","n":0}', '"n": '),
    ('{"prompt":"a","ignore-eos":1}', "true or false"), ('{"prompt":"a","stop":5}', "text"),
    ('{"prompt":"a","stop":""}', "--stop"), ('{"prompt":"a","stop":"a\\u0000b"}', "zero"),
    ('{"prompt":"a","logit-bias":"5"}', "--logit-bias"), ('{"prompt":"a","logit-bias":"99999+1"}', "logit-bias"),
    ('{"prompt":"a","custom_id":[1]}', "custom_id"), ('{"prompt":"a","bench":true}', "--bench"),
    ('{"prompt":"' + "x" * 600 + '"}', "600 tokens"), ("[" * 100000, "JSON"),
    ('{"messages":"hi"}', "template"), ('{"messages":[{"role":"user","content":"a"}]}', "template"),
]


def test_bad_lines(gen, chain):
    """Each gets an error of its own, and the lines between are answered."""
    good = b'{"custom_id":"good","prompt":":"}\n'
    bad = [line.encode("utf-8", "surrogateescape") for line, _ in BAD_LINES]
    got = batch(gen, chain, good + good.join(line + b"\n" for line in bad) + good, "--temp", "0", rc=1)
    assert len(got) == 2 * len(bad) + 1
    for i, (line, says) in enumerate(BAD_LINES):
        error = got[2 * i + 1]["error"]
        assert error["line"] == 2 * i + 2 and says in error["message"] and error["message"].isprintable(), (line, error)
        assert len(got[2 * i + 1]["key"]) == 64
    assert all(a["response"]["text"] == "abcd!" and a["custom_id"] == "good" for a in got[::2])


@pytest.mark.parametrize("bytes_, fits", [(63, True), (64, True), (65, False), (640, False)])
def test_prompt_and_context(gen, chain, bytes_, fits):
    """B18: a line whose prompt is longer than the context fails alone, with both numbers."""
    got = batch(gen, chain, [{"prompt": text, "predict": 1} for text in (":", "x" * bytes_, ":")],
                "-c", "64", "--temp", "0", rc=0 if fits else 1)
    assert got[0]["response"] == got[2]["response"]
    if fits:
        assert got[1]["response"]["text"] == "a"
    else:
        assert f"{bytes_} tokens" in got[1]["error"]["message"] and "64" in got[1]["error"]["message"]


def test_line_over_64_mib(gen, chain):
    lines = b'{"prompt":"' + b"x" * (64 << 20) + b'"}\n{"prompt":":"}\n'
    got = batch(gen, chain, lines, "--temp", "0", rc=1)
    assert "67108864 bytes" in got[0]["error"]["message"] and got[1]["response"]["text"] == "abcd!"


def test_nothing_to_do(gen, chain, tmp_path):
    assert batch(gen, chain, "") == [] and batch(gen, chain, "\n \n\t\r\n") == []
    gen.refused("-m", chain, "--batch", tmp_path / "none", rc=2, says=["none", "No such file"])
    gen.refused("-m", chain, "--batch", tmp_path, rc=2, says="directory")


REFUSED = [(["-o", "x"], "--batch"), (["--resume"], "--batch"), (["--samples", "2"], "--batch"),
           (["-np", "3", "-p", "a"], "-np"),
           (["--batch", "-", "--resume"], "--output"), (["--batch", "-", "-p", "a"], "--prompt"),
           (["--batch", "-", "--json"], "--json"), (["--batch", "-", "-np", "65"], "64"),
           (["--batch", "-", "-np", "3,4"], "3,4"), (["--batch", "-", "--lookup"], "--lookup"),
           (["--batch", "-", "--no-kv-cache"], "--no-kv-cache"), (["--batch", "-", "--bench"], "--bench"),
           (["--data-parallel", "-p", "a"], "--batch"),
           (["--batch", "-", "--data-parallel", "--tensor-parallel", "2"], "--tensor-parallel"),
           (["--batch", "-", "-"], "standard input"), (["--batch", "-", "--progress", "x"], "--progress")]


@pytest.mark.parametrize("args,says", REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else None)
def test_refused(gen, chain, args, says):
    gen.refused("-m", chain, *args, rc=2, says=says)


def test_chat_lines(gen, smollm2):
    messages = [{"role": "user", "content": "Say <|im_end|> twice."}]
    args = ["-q", "-m", smollm2, "--temp", "0", "-n", "8"]
    got = answers(gen.ok(*args, "--batch", "-", stdin=jsonl([
        {"messages": messages}, {"prompt": messages[0]["content"]}])))
    one = json.loads(gen.ok(*args, "--json", "--messages", "-", stdin=json.dumps(messages)).text)
    assert got[0]["response"]["text"] == one["text"] and got[0]["response"]["logits_sha256"] == one["logits_sha256"]
    system = answers(gen(*args, "-sys", "Be brief.", "--batch", "-", stdin=jsonl([
        {"prompt": messages[0]["content"]}, {"messages": [{"role": "system", "content": "x"}, *messages]}])))
    one = json.loads(gen.ok(*args, "--json", "-sys", "Be brief.", messages[0]["content"]).text)
    assert system[0]["response"]["tokens"] == one["tokens"] and "system" in system[1]["error"]["message"]


# ---- the output file

def run_to(gen, model, lines, out, *args, rc=0):
    r = gen("-q", "-m", model, "--batch", lines, "-o", out, *args)
    assert r.rc == rc and r.out == b"", r.err
    return out.read_bytes()


@pytest.fixture
def files(tmp_path):
    lines = tmp_path / "in.jsonl"
    lines.write_text(jsonl([*mixed_lines(30), {"prompt": "a", "bad": 1}, *mixed_lines(5), *mixed_lines(5, seed=8)]))
    return lines, tmp_path / "out.jsonl"


def test_resume(gen, model, files):
    lines, out = files
    whole = run_to(gen, model, lines, out, "-s", "4", rc=1)
    kept = whole.splitlines(keepends=True)
    for cut in (0, 1, len(kept[0]) - 1, len(kept[0]), len(whole) // 2, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:cut])
        assert run_to(gen, model, lines, out, "-s", "4", "--resume", "-np", "3", rc=1) == whole, cut
    # any subset: what is missing is added; equal lines by their number. Empty lines count for nothing
    half = kept[1::2]
    out.write_bytes(b"".join(half))
    assert sorted(run_to(gen, model, lines, out, "-s", "4", "--resume", rc=1).splitlines(keepends=True)) == sorted(kept)
    for text in b"\n", b"\n" + kept[0][:20]:
        out.write_bytes(text)
        assert run_to(gen, model, lines, out, "-s", "4", "--resume", rc=1) == b"\n" + whole
    out.write_bytes(whole + b"\n \r\n")
    assert run_to(gen, model, lines, out, "-s", "4", "--resume", rc=1) == whole + b"\n \r\n"


def test_resume_draws_no_second_seed(gen, model, tmp_path):
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(jsonl([{"prompt": TEXT[i:i + 30], "predict": 20, "n": 2} for i in range(9)]))
    whole = run_to(gen, model, lines, out)
    first = json.loads(whole.splitlines()[0])
    assert first["seed"] >= 0 and whole.count(b'"seed"') == 1
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    assert run_to(gen, model, lines, out, "--resume") == whole
    assert json.loads(run_to(gen, model, lines, out).splitlines()[0])["seed"] != first["seed"]


def test_keys(gen, model, files):
    """A key stands for the line, the options and the model, and for nothing that answers do not depend on."""
    lines, out = files
    keys = lambda *args: [json.loads(line)["key"] for line in run_to(gen, model, lines, out, *args, rc=1).splitlines()]
    base = keys("-s", "1")
    assert len(set(base)) == len(base) - 5                      # five lines stand there twice
    assert keys("-s", "1", "-np", "2", "-t", "1", "--page-size", "64", "-b", "9", "--timings") == base
    assert not set(keys("-s", "2")) & set(base) and not set(keys("-s", "1", "-ctk", "int8")) & set(base)
    assert not set(keys("-s", "1", "-r", "zz")) & set(base)


def test_resume_refuses_other_files(gen, model, files, tmp_path):
    lines, out = files
    base = ["-q", "-m", model, "--batch", lines]
    out.write_text('{"custom_id":1}\n')
    gen.refused(*base, "-o", out, "--resume", rc=2, says=["line 1", "out.jsonl"])
    assert out.read_text() == '{"custom_id":1}\n'
    out.write_text(run_to(gen, model, lines, out, "-s", "1", rc=1).decode() + "of another program")
    kept = out.read_bytes()
    gen.refused(*base, "-o", out, "--resume", rc=2, says=["out.jsonl", "does not end with an answer"])
    assert out.read_bytes() == kept
    for text in ("my precious notes", "{", '{"ke', '{"keys":1', '{"key":"0a', '{"seed":5,"key'):
        out.write_text(text)
        if any(answer.startswith(text[:8]) for answer in ('{"key":"', '{"seed":')):
            assert len(run_to(gen, model, lines, out, "-s", "1", "--resume", rc=1)) > 1000, text
            continue
        gen.refused(*base, "-o", out, "--resume", rc=2, says=["out.jsonl", "does not begin with an answer"])
        assert out.read_text() == text
    gen.refused(*base, "-o", lines, rc=2, says="in.jsonl")
    assert lines.stat().st_size > 1000
    gen.refused(*base, "-o", tmp_path / "no" / "out", rc=2, says="No such file")
    gen.refused(*base, "-o", "/dev/null", "--resume", rc=2, says="regular")
    with open(out) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        gen.refused(*base, "-o", out, rc=2, says="another run")


def start(model, *args, quiet=True, **how):
    return subprocess.Popen([str(GEN), *["-q"] * quiet, "-m", str(model), *map(str, args)], **how)


def kill_at_random(gen, model, files, times):
    lines, out = files
    draw = random.Random(times)
    begun = time.monotonic()
    whole = run_to(gen, model, lines, out, "-s", "4", rc=1)
    took = time.monotonic() - begun
    for i in range(times):
        out.unlink(missing_ok=True)
        for _ in range(2):                                      # killed, resumed and killed, resumed
            run = start(model, "--batch", lines, "-o", out, "-s", "4", "--resume", "-np", draw.choice([1, 4, 16]))
            time.sleep(draw.random() * took)
            run.kill()
            run.wait()
        assert run_to(gen, model, lines, out, "-s", "4", "--resume", rc=1) == whole, i


def test_killed_and_resumed(gen, model, files):
    kill_at_random(gen, model, files, 10)


@pytest.mark.long
def test_killed_and_resumed_often(gen, model, files):
    kill_at_random(gen, model, files, 100)


def test_disk_full(gen, model, files):
    lines, out = files
    whole = run_to(gen, model, lines, out, "-s", "4", rc=1)
    limit = len(whole) * 2 // 3
    run = start(model, "--batch", lines, "-o", out, "-s", "4", stderr=subprocess.PIPE, text=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    err = run.communicate()[1]
    assert run.returncode == 1 and err.startswith("gen: cannot write --output") and err.count("\n") == 1
    kept = out.read_bytes()
    assert kept.endswith(b"\n") and whole.startswith(kept)
    assert run_to(gen, model, lines, out, "-s", "4", "--resume", rc=1) == whole
    r = gen("-q", "-m", model, "--batch", lines, "-o", "/dev/full")
    assert r.rc == 1 and "/dev/full" in r.err and r.err.count("\n") == 1


def test_reader_leaves(model, files):
    lines, _ = files
    command = '"$0" -q -m "$1" --batch "$2" -s 1 | head -n 2 | wc -l; exit ${PIPESTATUS[0]}'
    run = subprocess.run(["bash", "-c", command, str(GEN), model, lines], capture_output=True, timeout=60)
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, b"2", b"")


def test_input_that_grows(gen, model, tmp_path):
    """What is there when the end is reached is answered; a later run answers the rest."""
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [json.dumps(line) + "\n" for line in mixed_lines(24)]
    lines.write_text("".join(texts[:6]))
    run = start(model, "--batch", lines, "-o", out, "-np", "2")
    with open(lines, "a") as file:
        for text in texts[6:]:
            file.write(text)
            file.flush()
            time.sleep(0.01)
    assert run.wait() == 0
    assert len(out.read_bytes().splitlines()) >= 6
    got = run_to(gen, model, lines, out, "--resume")
    assert [json.loads(line)["custom_id"] for line in got.splitlines()] == [f"line-{i}" for i in range(24)]


# ---- standard input and signals

def test_co_process(model):
    """A line is answered as it comes."""
    run = start(model, "--batch", "-", "--temp", "0", "-n", "5", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True)
    try:
        for i in range(3):
            run.stdin.write(json.dumps({"custom_id": i, "prompt": TEXT[:10 + i]}) + "\n")
            run.stdin.flush()
            assert json.loads(run.stdout.readline())["custom_id"] == i
        run.stdin.close()
        assert run.wait(timeout=20) == 0 and run.stdout.read() == ""
    finally:
        run.kill()
        run.wait()


def interrupted(model, lines, out, signals, *more):
    run = start(model, "--batch", lines, "-o", out, "-s", "4", "--resume", "-np", "4", *more, quiet=False, stderr=subprocess.PIPE,
                text=True)
    deadline = time.monotonic() + 30
    while not (out.exists() and out.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    for number in signals:
        run.send_signal(number)
        time.sleep(0.02)
    err = run.communicate(timeout=60)[1]
    assert run.returncode in (0, 1, *(-s for s in signals)), err
    return run.returncode, err


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]], ids=str)
def test_interrupted(gen, model, tmp_path, signals):
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(jsonl([{**line, "predict": 600} for line in mixed_lines(30)]))
    rc, err = interrupted(model, lines, out, signals)
    kept = out.read_bytes()
    assert rc == -signals[-1] and 0 < kept.count(b"\n") < 30
    if len(signals) == 1:              # the first answer was out: four that ran then were finished
        assert kept.endswith(b"\n") and kept.count(b"\n") >= 4
        left = 30 - kept.count(b"\n")
        assert f"interrupted: {left} lines have no answer; the same command with --resume goes on" in err
    resumed = run_to(gen, model, lines, out, "-s", "4", "--resume")
    assert resumed.startswith(kept) and resumed == run_to(gen, model, lines, out, "-s", "4")


def test_interrupted_answer_without_end(model, tmp_path):
    """It is not waited for; the one beside it is."""
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(jsonl([{"prompt": TEXT[:40], "predict": n, "ignore-eos": True} for n in (3, 200, -1)]))
    rc, err = interrupted(model, lines, out, [signal.SIGTERM], "--window", "40")
    assert rc == -signal.SIGTERM and out.read_bytes().count(b"\n") == 2 and "1 line has no answer" in err


def test_interrupted_while_waiting(model):
    run = start(model, "--batch", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, quiet=False, text=True)
    time.sleep(0.5 if not SANITIZED else 3)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=20) == -signal.SIGINT
    assert "interrupted: lines that were not read" in run.communicate()[1]


# ---- progress

def test_summary_and_progress(gen, model, files):
    lines, out = files
    r = gen("-m", model, "--batch", lines, "-o", out, "-s", "1")
    assert r.rc == 1 and "40 answers, 1 failed" in r.err and "longest gap" in r.err and "\r" not in r.err
    assert r.err.splitlines()[-1] == f'gen: 1 line has no answer: see "error" in {out}'
    r = gen("-q", "-m", model, "--batch", lines, "-o", out, "-s", "1", "--progress", "json")
    *status, last = [json.loads(line) for line in r.err.splitlines() if line.startswith("{")]
    assert last["done"] and last["answers"] == 40 and last["unanswered"] == 0 and last["failed"] == 1 and last["completion_tokens"] > 100
    assert last["longest_gap_ms"] > 0 and last["median_step_ms"] > 0 and not any(s["done"] for s in status)
    r = gen("-m", model, "--batch", lines, "-o", out, "-s", "1", "--resume", "--progress", "never")
    assert "0 answers, 41 known" in r.err


def test_timings(gen, model):
    a = batch(gen, model, [{"prompt": TEXT[:40], "predict": 5, "temp": 0}], "--timings")[0]
    assert set(a["timings"]) == {"prefill_ms", "decode_ms", "cached_tokens"} and a["timings"]["prefill_ms"] > 0


def peak(gen, model, n, tmp_path):
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(jsonl({"custom_id": i, "prompt": TEXT[i % 50:][:40], "predict": 4, "temp": 0} for i in range(n)))
    run = subprocess.Popen([str(GEN), "-q", "-m", model, "--batch", lines, "-o", out], env={**os.environ})
    _, status, usage = os.wait4(run.pid, 0)
    run.returncode = status
    assert status == 0 and out.read_bytes().count(b"\n") == n
    return usage.ru_maxrss


@pytest.mark.skipif(SANITIZED, reason="the sanitizers keep what is freed")
@pytest.mark.parametrize("n", [2000, pytest.param(10000, marks=pytest.mark.long)])
def test_memory_is_flat(gen, model, tmp_path, n):
    few, many = peak(gen, model, 300, tmp_path), peak(gen, model, n, tmp_path)
    assert many < few + 4096, (few, many)


# ---- several processes

@pytest.fixture(scope="module")
def mpirun(gen, chain):
    """mpirun(N): the words before gen's."""
    path = shutil.which("mpirun")
    if not path:
        pytest.skip("mpirun is not there (Debian: openmpi-bin)")
    if "without MPI" in gen("-m", chain, "--batch", "-", "--data-parallel").err:
        pytest.skip("gen was built without MPI (Debian: libopenmpi-dev)")
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return lambda n: [path, *root, "--oversubscribe", "-n", str(n), GEN]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_lines_divided_over_processes(gen, model, files, mpirun, ranks):
    lines, out = files
    whole = run_to(gen, model, lines, out, "-s", "4", rc=1)
    args = ["-q", "-m", model, "-s", "4", "-t", "1", "-np", "3", "--data-parallel"]
    r = run_program([*mpirun(ranks), *args, "--batch", lines, "-o", out], timeout=120)
    assert r.rc == 1 and out.read_bytes() == whole and r.err.count("gen: ") == 1
    r = run_program([*mpirun(ranks), *args, "--batch", "-"], stdin=lines.read_bytes(), timeout=120)
    assert r.out == whole


def test_samples_and_seed_over_processes(gen, model, tmp_path, mpirun):
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(jsonl({"prompt": TEXT[:50 + i], "predict": 9, "n": 3} for i in range(4)))
    args = ["-q", "-m", model, "-t", "1", "-np", "2", "--data-parallel", "--batch", lines, "-o", out]
    assert run_program([*mpirun(3), *args], timeout=120).rc == 0
    seed = json.loads(out.read_bytes().splitlines()[0])["seed"]
    responses = lambda text: [json.loads(line)["response"] for line in text.splitlines()]
    assert responses(out.read_bytes()) == responses(run_to(gen, model, lines, out, "-s", str(seed)))


def test_process_that_dies(gen, model, files, mpirun):
    """The run ends with a sentence that names it, and the file can be gone on with."""
    lines, out = files
    whole = run_to(gen, model, lines, out, "-s", "4", rc=1)
    out.unlink()
    args = ["-q", "-m", model, "-s", "4", "-t", "1", "--data-parallel", "--batch", "-", "-o", out]
    run = subprocess.Popen([*mpirun(3), *args], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdin.write(lines.read_bytes())
    run.stdin.flush()                  # and stays open, so that the run does not end by itself
    deadline = time.monotonic() + 60
    while not (out.exists() and out.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks = {}
    for pid in subprocess.run(["pgrep", "-P", str(run.pid), "gen"], capture_output=True, text=True).stdout.split():
        words = open(f"/proc/{pid}/environ", "rb").read().split(b"\0")
        ranks[next(w for w in words if w.startswith(b"OMPI_COMM_WORLD_RANK=")).split(b"=")[1]] = int(pid)
    os.kill(ranks[b"2"], signal.SIGKILL)
    err = run.communicate(timeout=120)[1]
    assert run.returncode != 0 and b"rank 2" in err
    assert run_to(gen, model, lines, out, "-s", "4", "--resume", rc=1) == whole


def test_failure_ends_all_processes(model, files, mpirun, tmp_path):
    lines, out = files
    base = [*mpirun(2), "-q", "-m", model, "-t", "1", "--data-parallel", "--batch"]
    r = run_program([*base, lines, "-o", "/dev/full"], timeout=120)
    assert r.rc == 1 and r.err.count("gen: ") == 1 and "/dev/full" in r.err
    r = run_program([*base, tmp_path / "none", "-o", out], timeout=120)
    assert r.rc == 2 and r.err.count("gen: ") == 1 and "none" in r.err
