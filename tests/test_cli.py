"""The program as a user meets it: options, prompts, output, results, measures. Most tests use a model whose text is known
in advance: after ":" it says abcd! and ends."""
import hashlib
import json
import math
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import time

import pytest
from conftest import GEN, SANITIZED

B0 = 6                                 # id of byte 0 in the fixtures' vocabulary
GREEDY = ("--temp", "0", "-q")


@pytest.fixture(scope="session")
def chain(mkfix):
    return mkfix("chain")


@pytest.fixture(scope="session")
def loop(mkfix):
    """abcd!abcd!... without an end."""
    return mkfix("chain", "--end", "loop")


@pytest.fixture(scope="session")
def rand(mkfix):
    return mkfix("rand")


def say(gen, model, *args, prompt=":", **how):
    """The greedy text after the prompt."""
    return gen.ok(*GREEDY, "-m", model, "-p", prompt, *args, **how).out


def answer(gen, model, *args, prompt=":", **how):
    """The greedy result object."""
    return json.loads(gen.ok(*GREEDY, "-m", model, "-p", prompt, "--json", *args, **how).text)


def on_terminal(args, timeout=30, stdin=subprocess.DEVNULL):
    """Runs gen with stdout and stderr on a terminal; what it showed (line ends as the terminal sends them), exit code."""
    master, slave = pty.openpty()
    run = subprocess.Popen([GEN, *map(str, args)], stdin=stdin, stdout=slave, stderr=slave)
    os.close(slave)
    shown, end = b"", time.time() + timeout
    while time.time() < end:
        if select.select([master], [], [], 0.1)[0]:
            try:
                piece = os.read(master, 65536)
            except OSError:
                break
            if not piece:
                break
            shown += piece
    os.close(master)
    return shown, run.wait(timeout=10)


# ---- options

REFUSED = [
    (["--temp", "abc"], ["--temp", "abc"]), (["--temp", ""], ["--temp"]), (["--temp="], ["--temp"]),
    (["--temp", "-1"], ["--temp", "at least 0"]), (["--temp", "nan"], ["--temp"]), (["--temp", "inf"], ["--temp"]),
    (["--temp", "1e999"], ["--temp"]), (["--top-k", "3x"], ["--top-k", "whole number"]),
    (["--top-k", "-5"], ["--top-k"]),
    (["--top-p", "2"], ["--top-p", "0 to 1"]), (["--min-p", "-0.1"], ["--min-p"]),
    (["--typical-p", "1.5"], ["--typical-p"]),
    (["--repeat-penalty", "0"], ["--repeat-penalty", "above 0"]), (["--repeat-last-n", "-2"], ["--repeat-last-n"]),
    (["--seed", "-2"], ["--seed"]), (["-n", "-3"], ["--predict", "-2"]), (["-n", "9" * 30], ["--predict"]),
    (["-c", "-1"], ["--ctx-size"]), (["-c", "99999999999"], ["--ctx-size"]), (["-t", "-1"], ["--threads"]),
    (["-b", "0"], ["--batch-size"]), (["-ctk", "f17"], ["-ctk", "f32|f16"]), (["--kv-layout", "page"], ["--kv-layout"]),
    (["--page-size", "33"], ["--page-size", "multiple of 32"]), (["--page-size", "0"], ["--page-size"]),
    (["--kv-layout", "contiguous", "--page-size", "64"], ["--page-size"]),
    (["--backend", "gpu"], ["--backend", "auto|cpu"]),
    (["--color", "yes"], ["--color"]), (["-l", "5"], ["--logit-bias"]), (["--logprobs", "101"], ["--logprobs", "100"]),
    (["--logprobs", "5"], ["--logprobs", "--json"]), (["--stop", ""], ["--stop"]),
    (["--rope-scale", "0"], ["--rope-scale"]),
    (["--tmep", "0"], ["--tmep", "--temp"]), (["--perp", "x"], ["--perplexity"]), (["--no-mmp"], ["--no-mmap"]),
    (["-x"], ["'-x'"]), (["-n5x"], ["5x"]), (["-n=3"], ["-n is the next word", "--predict=3"]), (["--quiet=1"], ["--quiet"]), (["-p"], ["--prompt", "value"]),
    (["temp"], ["temp", "--temp"]), (["-p", "two", "words"], ["words", "quotes"]),
    ([""], ["-p"]), (["--", "-q", "-x"], ["-x", "quotes"]), (["--inspect", "--dry-run"], ["--inspect", "--dry-run"]),
    (["--perplexity", "x", "-p", "y"], ["--prompt"]), (["--chunks", "2"], ["--chunks", "--perplexity"]),
    (["--save-logits", "x"], ["--save-logits"]), (["--kl-base", "x"], ["--kl-base"]), (["-f", "-", "-"], ["twice"]),
    (["-", "-"], ["twice"]), (["--json", "--display-prompt"], ["--display-prompt"]),
    (["-q", "--verbose"], ["--quiet"]),
    (["--dump-tokens", "--json"], ["--json"]), (["--help", "nothing"], ["nothing", "sampling"]),
    (["--completion", "tcsh"], ["bash|zsh|fish"]),
]


@pytest.mark.parametrize("args,says", REFUSED, ids=lambda value: " ".join(value)[:40] or "empty")
def test_refused_options(gen, args, says):
    line = gen.refused(*args, rc=2, says=says)
    assert line.startswith("gen: ")


def test_both_dashes_and_attached_values(gen, loop):
    for words in (["-n", "3"], ["-n3"], ["--predict", "3"], ["--predict=3"], ["-predict", "3"]):
        assert gen.ok("-temp=0", "--quiet", "-m", loop, "-p", ":", *words).out == b"abc"
    assert gen.ok(*GREEDY, "-m", loop, "-p", ":", "-n", "9", "-n", "2").out == b"ab"    # the last one counts
    assert gen.ok(*GREEDY, "-m", loop, "-p", "--temp:", "-n", "2").out == b"ab"         # a value may begin with a dash


def test_help_comes_from_the_table(gen):
    whole = gen.ok("--help").text
    names = re.findall(r"^  (?:-\w, )?(--?[\w-]+)", whole, re.M)
    assert len(names) > 45 and len(set(names)) == len(names)
    groups = re.findall(r"\(--help (\w+)\)", whole)
    assert len(groups) == 10
    assert sum(len(re.findall(r"^  -", gen.ok("--help", g).text, re.M)) for g in groups) == len(names)
    assert gen.ok("-h").text == whole
    for name in names:
        assert name in gen.ok("--help", "markdown").text
        assert name.replace("-", "\\-") in gen.ok("--help", "man").text
        assert name in gen.ok("--completion", "bash").text
    assert all(len(line) <= 100 for line in whole.splitlines())
    # every option of the help is one that the parser knows
    for name in names:
        assert "unknown option" not in gen(name, "1", "-m", "/nowhere").err


def test_man_page_is_sound(gen, tmp_path):
    page = gen.ok("--help", "man").out
    if not shutil.which("groff"):
        pytest.skip("no groff to read the man page with")
    run = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-P-cbu"], input=page, capture_output=True)
    assert run.returncode == 0 and run.stderr == b"" and b"--typical-p" in run.stdout


def test_bash_completion(gen, tmp_path):
    script = tmp_path / "gen.bash"
    script.write_bytes(gen.ok("--completion", "bash").out)

    def complete(*words):
        code = f"""source '{script}'; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() {{ :; }}
                   _gen; printf '%s\\n' "${{COMPREPLY[@]}}" """
        run = subprocess.run(["bash", "-c", code, "bash", *words], capture_output=True, text=True, check=True)
        assert run.stderr == ""
        return run.stdout.split()
    assert complete("gen", "--typ") == ["--typical-p"]
    assert complete("gen", "--kv-layout", "") == ["paged", "contiguous"]
    assert complete("gen", "--help", "ma") == ["man", "markdown"] and complete("gen", "-h", "samp") == ["sampling"]
    assert "-ctk" in complete("gen", "-") and "-m" in complete("gen", "-")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_completions(gen, shell, tmp_path):
    script = gen.ok("--completion", shell).text
    assert script.count("typical-p") == 1 and "paged contiguous" in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)


def test_version(gen):
    assert re.fullmatch(r"gen \d+\.\d+\.\d+\n", gen.ok("--version").text)


# ---- the model file

def test_which_model(gen, chain, loop, tmp_path):
    greedy = [*GREEDY, "-p", ":", "-n", "7"]
    assert gen.ok(*greedy, env={"GEN_MODEL": str(loop)}).out == b"abcd!ab"
    assert gen.ok(*greedy, "-m", chain, env={"GEN_MODEL": "/nowhere"}).out == b"abcd!"
    gen.refused(*greedy, env={"GEN_MODEL": "/nowhere/x.gguf"}, rc=3, says="/nowhere/x.gguf")
    program = tmp_path / "bin" / "gen"
    program.parent.mkdir()
    shutil.copy(GEN, program)

    def here(cwd):
        return subprocess.run([program, *greedy], cwd=cwd, capture_output=True)
    r = here(tmp_path)
    assert r.returncode == 2 and b"make run" in r.stderr and b"-m FILE" in r.stderr and r.stderr.count(b"\n") == 1
    for folder, model, text in ((tmp_path, loop, b"abcd!ab"), (program.parent, chain, b"abcd!")):
        (folder / "weights").mkdir()
        (folder / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(model)
        assert here(tmp_path).stdout == text           # beside the program goes before the current directory


# ---- the prompt

def ids(gen, model, *args, **how):
    lines = gen.ok("-m", model, "--dump-tokens", "-q", *args, **how).text.splitlines()
    return [int(line.split("\t")[0]) for line in lines]


def text_ids(data):
    return [1] + [B0 + b for b in data]


def test_where_the_prompt_comes_from(gen, chain, tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"file")
    assert ids(gen, chain, "-p", "ab") == text_ids(b"ab")
    assert ids(gen, chain, "-f", file) == text_ids(b"file")
    assert ids(gen, chain, "-f", file, "-p", "ab") == text_ids(b"abfile")
    assert ids(gen, chain, stdin="in") == text_ids(b"in")
    assert ids(gen, chain, "-", stdin="in") == text_ids(b"in")
    assert ids(gen, chain, "-f", "-", stdin="in") == text_ids(b"in")
    assert ids(gen, chain, "-p", "ab", stdin="in") == text_ids(b"ab")
    assert ids(gen, chain, "-p", "ab", "-", stdin="in") == text_ids(b"abin")
    assert ids(gen, chain, "-p", "ab", "-f", "-", stdin="in") == text_ids(b"abin")
    assert ids(gen, chain, "-p", "ab", "-f", file, "-", stdin="in") == text_ids(b"abfilein")


@pytest.mark.parametrize("raw,kept", [
    (b"a\n", b"a"), (b"a\n\n", b"a\n"), (b"a\r\n", b"a"), (b"a\r", b"a\r"), (b"\n", b""), (b"\xef\xbb\xbfa", b"a"),
    (b"\xef\xbb\xbf\xef\xbb\xbfa", b"\xef\xbb\xbfa"), (b"a\xef\xbb\xbf", b"a\xef\xbb\xbf"), (b"a\0b\0", b"a\0b\0"),
    (b"\xff\xfe", b"\xff\xfe"), (b"", b"")])
def test_what_is_dropped_from_a_file(gen, chain, tmp_path, raw, kept):
    file = tmp_path / "text"
    file.write_bytes(raw)
    assert ids(gen, chain, "-f", file) == text_ids(kept)
    assert ids(gen, chain, stdin=raw) == text_ids(kept)


def test_prompt_on_the_line_is_verbatim(gen, chain):
    assert ids(gen, chain, "-p", "a\\n\n") == text_ids(b"a\\n\n")


def test_unread_input_gets_a_warning(gen, chain):
    base = ["-m", chain, "--temp", "0", "-p", ":", "-n", "2"]
    assert "standard input" in gen.ok(*base, stdin="text").err
    for how in (dict(args=["-q"], stdin="text"), dict(args=[], stdin=b""), dict(args=["-"], stdin="text")):
        assert "standard input" not in gen.ok(*base, *how["args"], stdin=how["stdin"]).err


def test_no_prompt(gen, chain):
    master, slave = pty.openpty()
    with os.fdopen(slave) as terminal:
        gen.refused("-m", chain, stdin=terminal, rc=2, says=["no prompt", "-p"])
    os.close(master)


@pytest.mark.parametrize("args,says", [(["-f", "/nowhere/f"], "/nowhere/f"), (["-f", "/"], "directory")])
def test_unreadable_prompt(gen, chain, args, says):
    gen.refused("-m", chain, *args, rc=2, says=says)


def test_closed_stdin(gen, chain):
    run = subprocess.run(["bash", "-c", '"$0" -q --temp 0 -m "$1" <&-', GEN, chain], capture_output=True)
    assert run.returncode == 2 and run.stdout == b"" and b"standard input" in run.stderr
    run = subprocess.run(["bash", "-c", '"$0" -q --temp 0 -m "$1" -p : <&-', GEN, chain], capture_output=True)
    assert run.returncode == 0 and run.stdout == b"abcd!"


def test_dump_tokens_lines(gen, chain):
    lines = gen.ok("-m", chain, "--dump-tokens", "-p", "a\n\t\\\x1b\x7f \xe9").text
    assert lines == "1\t<s>\n103\ta\n16\t\\n\n15\t\\t\n98\t\\\\\n33\t\\x1B\n133\t\\x7F\n38\t \n201\t\\xC3\n175\t\\xA9\n"


def test_vocabulary_only_files(gen, data):
    vocab = data / "tokenizers" / "ggml-vocab-llama-spm.gguf"
    lines = gen.ok("-m", vocab, "--dump-tokens", "-p", "a  b").text.splitlines()
    assert lines == ["1\t<s>", "263\t a", "29871\t ", "289\t b"]
    assert gen.ok("-m", vocab, "--show-prompt", "-p", "a\nb").out == b"<s>a\nb"
    assert "vocabulary      32000" in gen.ok("-m", vocab, "--inspect").text
    gen.refused("-m", vocab, "-p", "a", rc=3, says="token_embd.weight")


def test_show_prompt(gen, mkfix, chain):
    show = ["--show-prompt", "-q"]
    assert gen.ok("-m", chain, *show, "-p", "a\n").out == b"<s>a\n"
    assert gen.ok("-m", chain, *show, "-p", "<s>a").out == b"<s>a"
    assert gen.ok("-m", chain, *show, "--no-parse-special", "-p", "<s>a").out == b"<s><s>a"
    assert gen.ok("-m", chain, *show, "--no-bos", "-p", "a").out == b"a"
    assert gen.ok("-m", mkfix("chain", "--bos", "0"), *show, "-p", "a").out == b"a"
    assert gen.ok("-m", chain, *show, "-p", "").out == b"<s>"


def test_control_tokens_in_the_prompt(gen, chain):
    assert ids(gen, chain, "-p", "a<|im_end|>") == [1, B0 + 97, 4]
    assert ids(gen, chain, "--no-parse-special", "-p", "a<|im_end|>") == text_ids(b"a<|im_end|>")
    assert ids(gen, chain, "--no-bos", "-p", "a") == [B0 + 97]


# ---- how much is generated

def test_known_text(gen, chain):
    r = gen.ok("--temp", "0", "-m", chain, "-p", ":")
    assert r.out == b"abcd!"
    assert re.fullmatch(r"gen: prompt 2 tokens \(0 cached\) at [\d.]+ t/s, generated 5 tokens at [\d.]+ t/s, "
                        r"KV cache [\d.]+ \w+ of [\d.]+ \w+\n", r.err)
    assert gen.ok(*GREEDY, "-m", chain, "-p", ":").err == ""


@pytest.mark.parametrize("args,length,reason", [
    ([], 512, "length"), (["-n", "7"], 7, "length"), (["-n", "0"], 0, "length"), (["-n", "1"], 1, "length"),
    (["-n", "-1", "-c", "40"], 39, "context"), (["-n", "-2", "-c", "40"], 39, "context"),
    (["-n", "38", "-c", "40"], 38, "length"), (["-n", "39", "-c", "40"], 39, "length"),
    (["-n", "40", "-c", "40"], 39, "context"),
    (["-n", "9", "-c", "2"], 1, "context"), (["-n", "1", "-c", "2"], 1, "length")])
def test_length(gen, loop, args, length, reason):
    r = answer(gen, loop, *args)
    assert (r["usage"]["completion_tokens"], r["finish_reason"]) == (length, reason)
    assert r["text"] == ("abcd!" * 200)[:length] and len(r["tokens"]) == length
    assert r["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("args", [["-n", "-1"], ["-n", "-2"], ["-n", "100"], []])
def test_end_token(gen, chain, args):
    r = answer(gen, chain, *args)
    assert r["text"] == "abcd!" and r["finish_reason"] == "stop"
    assert r["tokens"] == [B0 + b for b in b"abcd!"]           # the end token is not part of the text


def test_prompt_as_long_as_the_context(gen, loop):
    """A prompt that fills the context is legal: its logits still give one token."""
    for n in (63, 64, 65):
        prompt = "x" * (n - 2) + ":"                            # one token is the start token
        if n <= 64:
            r = answer(gen, loop, "-c", "64", prompt=prompt)
            assert r["finish_reason"] == "context" and len(r["tokens"]) == 65 - n
        else:
            gen.refused(*GREEDY, "-m", loop, "-c", "64", "-p", prompt, rc=2, says=["65", "64", "--ctx-size"])


# ---- stop strings

@pytest.mark.parametrize("stops,text,reason", [
    (["cd"], "ab", "stop"), (["a"], "", "stop"), (["!a"], "abcd", "stop"), (["d!ab"], "abc", "stop"),
    (["d!ax"], "abcd!abcd!abcd!a", "length"), (["x"], "abcd!abcd!abcd!a", "length"), (["cd", "b"], "a", "stop"),
    (["bcd", "c"], "ab", "stop"), (["d", "cd"], "ab", "stop"), (["abcd!abcd!abcd!ab"], "abcd!abcd!abcd!a", "length"),
    (["!abcd!abce", "!abcd!abcd!"], "abcd", "stop"), (["zz", "!abcd!a"], "abcd", "stop")])
def test_stop_strings(gen, loop, stops, text, reason):
    args = [word for stop in stops for word in ("-r", stop)]
    r = answer(gen, loop, "-n", "16", *args)
    assert (r["text"], r["finish_reason"]) == (text, reason)
    assert say(gen, loop, "-n", "16", *args) == text.encode()


def test_stop_string_against_a_simple_search(gen, mkfix):
    """A text with many false beginnings: each stop string cuts where str.find finds it."""
    model = mkfix("chain", "--text", "abcdefgh", "--end", "loop")
    text = "abcdefgh" * 4
    for stop in ("habca", "habcd", "ghabcdefghabcdefgha", "efghab", "hab" * 2, "defgha" "bcdefghab"):
        at = text.find(stop)
        assert say(gen, model, "-n", "32", "-r", stop).decode() == (text[:at] if at >= 0 else text)


def test_stop_string_within_characters(gen, mkfix):
    model = mkfix("chain", "--text", "aé👍!z", "--end", "loop")
    assert say(gen, model, "-n", "30", "-r", "👍!").decode() == "aé"
    assert say(gen, model, "-n", "30", "-r", "é").decode() == "a"
    gen.refused(*GREEDY, "-m", model, "-p", ":", b"--stop=\xf0\x9f", rc=2, says="--stop")


def test_held_back_text_appears_at_the_end(gen, chain):
    assert say(gen, chain, "-r", "d!x") == b"abcd!"            # the model ends inside a possible stop string


# ---- the stream

def writes(args):
    """What gen writes to stdout, one item for each write."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.settimeout(60)
        run = subprocess.Popen([GEN, *map(str, args)], stdin=subprocess.DEVNULL, stdout=theirs.fileno(),
                               stderr=subprocess.DEVNULL)
        theirs.close()
        parts = []
        while run.poll() is None or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], 0.02)[0]:
                part = ours.recv(1 << 16)
                if not part and run.poll() is not None:
                    break
                parts.append(part)
        assert run.returncode == 0
    return [part for part in parts if part]


def test_text_is_written_as_it_comes(loop):
    assert writes([*GREEDY, "-m", loop, "-p", ":", "-n", "9"]) == [b"a", b"b", b"c", b"d", b"!", b"a", b"b", b"c", b"d"]
    assert writes([*GREEDY, "-m", loop, "-p", ":", "-n", "9", "-r", "cdx"]) == \
        [b"a", b"b", b"cd!", b"a", b"b", b"cd"]                # held back no longer than it may begin a stop string


def test_only_whole_characters_are_written(mkfix):
    model = mkfix("chain", "--text", "👍é!", "--end", "loop")
    parts = writes([*GREEDY, "-m", model, "-p", ":", "-n", "14"])
    assert [part.decode() for part in parts] == list("👍é!👍é!")


def test_control_characters_on_a_terminal_only(mkfix, gen):
    model = mkfix("chain", "--hex", "611b5b316d07620ac29b7f63")       # a ESC [1m BEL b LF C1-CSI DEL c
    raw = bytes.fromhex("611b5b316d07620ac29b7f63")
    assert say(gen, model) == raw
    assert say(gen, model, "--color", "always") == raw
    shown, rc = on_terminal([*GREEDY, "-m", model, "-p", ":"])
    assert rc == 0 and shown == b"a^[[1m^Gb\r\nM-^[^?c\r\n"


def test_line_end_after_the_text_on_a_terminal(chain, mkfix):
    assert on_terminal([*GREEDY, "-m", chain, "-p", ":"])[0] == b"abcd!\r\n"
    assert on_terminal([*GREEDY, "-m", mkfix("chain", "--text", "ab\n"), "-p", ":"])[0] == b"ab\r\n"


def test_display_prompt_and_color(gen, chain, monkeypatch):
    assert say(gen, chain, "--display-prompt", prompt="x:") == b"x:abcd!"
    assert say(gen, chain, "--display-prompt", "--color", "always", prompt="x:") == b"\x1b[32mx:\x1b[0mabcd!"
    base = [*GREEDY, "-m", chain, "-p", ":", "--display-prompt"]
    assert on_terminal(base)[0] == b"\x1b[32m:\x1b[0mabcd!\r\n"
    assert on_terminal([*base, "--color", "never"])[0] == b":abcd!\r\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_terminal(base)[0] == b":abcd!\r\n"


def test_reader_gone(mkfix):
    command = '"$0" --temp 0 -m "$1" -p : -n 200000 | head -c 10; exit ${PIPESTATUS[0]}'
    run = subprocess.run(["bash", "-c", command, GEN, mkfix("chain", "--end", "loop", "--ctx", "300000")],
                         capture_output=True, timeout=60)
    assert run.returncode == 0 and run.stdout == b"abcd!abcd!" and run.stderr == b""


@pytest.mark.parametrize("args", [["-p", ":"], ["-p", ":", "--json"], ["-p", ":", "--dump-tokens"], ["--help"],
                                  ["--inspect"]])
def test_output_that_cannot_be_written(chain, args):
    with open("/dev/full", "wb") as full:
        run = subprocess.run([GEN, *GREEDY, "-m", chain, *args], stdin=subprocess.DEVNULL, stdout=full,
                             stderr=subprocess.PIPE)
    assert run.returncode == 1 and re.fullmatch(rb"gen: cannot write [^\n]*\n", run.stderr)
    closed = subprocess.run(["bash", "-c", '"$@" >&-', "bash", GEN, *GREEDY, "-m", chain, *args],
                            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert closed.returncode == 1 and re.fullmatch(rb"gen: cannot write [^\n]*\n", closed.stderr)


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("args", [[], ["--json"]])
def test_signal_ends_in_order(loop, which, args):
    run = subprocess.Popen([GEN, "--temp", "0", "-m", loop, "-p", ":", "-n", "-1", "-c", "2000000", *args],
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(1.0)
    run.send_signal(which)
    out, err = run.communicate(timeout=20)
    assert run.returncode == -which
    if args:
        r = json.loads(out)
        assert r["finish_reason"] is None and len(r["tokens"]) > 10
        out = r["text"].encode()
    assert len(out) > 10 and (b"abcd!" * (len(out) // 5 + 1)).startswith(out)


@pytest.mark.skipif(SANITIZED, reason="too slow")
def test_progress_bar(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("GEN_ISA", "generic")                   # so that it takes long on any machine
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 14)
    base = ["--temp", "0", "-n", "0", "-m", smollm2, "-f", text, "-b", "16", "-t", "1"]
    shown, rc = on_terminal(base, timeout=120)
    assert rc == 0 and re.search(rb"prefill +\[#+ +\] +\d+ %", shown) and b"\r\x1b[K" in shown
    assert shown.rstrip().endswith(b"MB") and b"\x1b" not in shown.split(b"\r\x1b[K")[-1]
    shown, rc = on_terminal([*base, "-q"], timeout=120)
    assert rc == 0 and shown == b""


# ---- results

def test_json_object(gen, chain):
    r = gen.ok(*GREEDY, "-m", chain, "-p", ":", "--json", "-s", "7")
    assert r.text.count("\n") == 1
    o = json.loads(r.text)
    assert list(o) == ["text", "tokens", "finish_reason", "usage", "timings", "kv", "seed", "logits_sha256"]
    assert o["usage"] == {"prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": 5}
    assert set(o["timings"]) == {"load_ms", "prefill_ms", "decode_ms"} and all(v > 0 for v in o["timings"].values())
    # 1 layer, 1 KV head of 32 for keys and values, 2 bytes: 128 bytes a token, 4096 tokens reserved, one page of 32 used
    assert o["kv"] == {"layout": "paged", "type_k": "f16", "type_v": "f16", "bytes_used": 4096, "bytes_reserved": 524288,
                       "pages": 1, "evicted_tokens": 0}
    assert o["seed"] == 7 and re.fullmatch("[0-9a-f]{64}", o["logits_sha256"])


def test_last_logits(gen, chain):
    """The fixture's logits are 0 but for the successor's, which follows from the norm; so their hash is known but for
    the rounding of one number."""
    o = answer(gen, chain, "-n", "1", "--logprobs", "2")
    n, width, successor = 262, 288, B0 + ord("a")
    logit = 1 / math.sqrt(1 / width + 1e-6)
    top = o["logprobs"]["content"][0]["top_logprobs"]
    assert abs(top[0]["logprob"] - top[1]["logprob"] - logit) < 1e-4
    bits = struct.unpack("<I", struct.pack("<f", logit))[0]
    hashes = [hashlib.sha256(struct.pack(f"<{n}I", *(value if i == successor else 0 for i in range(n)))).hexdigest()
              for value in range(bits - 8, bits + 9)]
    assert o["logits_sha256"] in hashes


def test_json_is_utf8(gen, mkfix):
    model = mkfix("chain", "--hex", "ff41c3")
    o = answer(gen, model, "--logprobs", "1")
    assert o["text"] == "\ufffdA\ufffd" and o["tokens"] == [B0 + 0xFF, B0 + 0x41, B0 + 0xC3]
    assert [entry["bytes"] for entry in o["logprobs"]["content"]] == [[0xFF], [0x41], [0xC3]]
    assert say(gen, model).decode() == "\ufffdA\ufffd"


def test_logprobs(gen, rand):
    r = answer(gen, rand, "-n", "6", "--logprobs", "100")
    assert len(r["logprobs"]["content"]) == 6
    for id, entry in zip(r["tokens"], r["logprobs"]["content"]):
        top = [t["logprob"] for t in entry["top_logprobs"]]
        assert len(top) == 100 and top == sorted(top, reverse=True) and entry["logprob"] == top[0]
        assert 0 < sum(map(math.exp, top)) <= 1 + 1e-5
        assert entry["bytes"] == entry["top_logprobs"][0]["bytes"]
        if id >= B0:
            assert entry["bytes"] == [id - B0]
    bare = answer(gen, rand, "-n", "6", "--logprobs", "0")["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * 6
    assert [entry["logprob"] for entry in bare] == [entry["logprob"] for entry in r["logprobs"]["content"]]


def test_json_says_what_text_says(gen, rand):
    args = ["-n", "60", "--ignore-eos", "--temp", "1", "-s", "5", "--top-k", "0"]
    plain = gen.ok("-q", "-m", rand, "-p", "abc", *args).text
    assert json.loads(gen.ok("-q", "-m", rand, "-p", "abc", "--json", *args).text)["text"] == plain


def test_results_do_not_depend_on_how_they_are_computed(gen, rand):
    args = ["-n", "40", "--ignore-eos", "--logprobs", "5"]
    prompt = "The first words of a longer prompt, more than one block of them." * 3

    def essence(*more):
        r = answer(gen, rand, *args, *more, prompt=prompt)
        return r["tokens"], r["logits_sha256"], r["logprobs"], r["text"]
    expected = essence()
    for more in (["-t", "1"], ["-t", "2"], ["-b", "1"], ["-b", "7"], ["-b", "33"], ["--kv-layout", "contiguous"],
                 ["--page-size", "64"], ["--no-kv-cache"], ["--no-mmap"], ["-c", "300"]):
        assert essence(*more) == expected, more
    assert essence("-ctk", "f32", "-ctv", "f32")[1] != expected[1]


def test_seed_is_told_and_repeats_the_run(gen, rand):
    args = ["-m", rand, "-p", "a", "-n", "40", "--temp", "1.5", "--ignore-eos"]
    first = gen.ok(*args)
    seed = re.search(r"^gen: seed (\d+)$", first.err, re.M)[1]
    assert gen.ok(*args, "-s", seed).out == first.out
    assert "seed" not in gen.ok(*args, "-s", seed).err
    assert "seed" not in gen.ok("-m", rand, "-p", "a", "-n", "1", "--temp", "0").err      # nothing is drawn
    seeds = {json.loads(gen.ok(*args, "-q", "--json").text)["seed"] for _ in range(4)}
    assert len(seeds) == 4


def test_logit_bias(gen, chain):
    assert say(gen, chain, "-n", "3", "-l", f"{B0 + ord('z')}+100") == b"zzz"
    assert say(gen, chain, "-n", "5", "-l", f"{B0 + ord('a')}-inf") != b"abcd!"
    gen.refused(*GREEDY, "-m", chain, "-p", ":", "-l", "262+1", rc=2, says=["--logit-bias", "262"])


def test_nan_ends_the_run_with_a_sentence(gen, rand, tmp_path):
    broken = with_nan(rand, tmp_path)
    r = gen(*GREEDY, "-m", broken, "-p", "a", "-n", "3")
    assert r.rc == 1 and r.err.count("\n") == 1 and r.err.startswith("gen: ")


def test_verbose(gen, chain):
    err = gen.ok("--verbose", "--temp", "0", "-m", chain, "-p", ":").err
    assert "llama" in err and "threads" in err and all(line.startswith("gen: ") for line in err.splitlines())


# ---- memory

@pytest.mark.skipif(SANITIZED, reason="a sanitizer's build has no limit of address space")
def test_explicit_context_too_large(gen, loop):
    base = [*GREEDY, "-m", loop, "-p", ":", "-c", "2147483647"]
    gen.refused(*base, memory=4 << 30, rc=1, says=["274877906944", "--ctx-size", "-ctk"])


@pytest.mark.skipif(SANITIZED, reason="a sanitizer's build has no limit of address space")
def test_context_of_the_model_is_lowered(gen, mkfix):
    """100 million tokens of 256 bytes do not fit 2 GB: the context is lowered, and a note says so."""
    model = mkfix("rand", "--ctx", "100000000")
    base = ["-m", model, "-p", "a", "-n", "3", "--temp", "0"]
    r = gen.ok(*base, memory=2 << 30)
    lowered = int(re.search(r"lowered from the model's 100000000 to (\d+) tokens", r.err)[1])
    assert 10_000 < lowered < 100_000_000 and lowered % 32 == 0
    assert gen.ok(*base, "-q", memory=2 << 30) == (0, r.out, "")


# ---- perplexity

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do. " * 4


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "alice.txt"
    path.write_text(TEXT + "\n")
    return path


def perplexity(gen, model, text, *args):
    return json.loads(gen.ok("-q", "-m", model, "--perplexity", text, "--json", *args).text)


def read_logits(path):
    """Header fields and rows of a file that --save-logits wrote."""
    data = path.read_bytes()
    magic, vocab, window, windows, zero, digest = struct.unpack_from("<8sIIQQ32s", data)
    assert magic == b"GENLOGP\1" and zero == 0
    tokens = data[64:64 + 4 * window * windows]
    assert digest == hashlib.sha256(tokens).digest()
    rows = windows * (window - 1 - window // 2)
    assert len(data) == 64 + len(tokens) + 4 * vocab * rows
    floats = struct.unpack_from(f"<{vocab * rows}f", data, 64 + len(tokens))
    return (vocab, window, windows, list(struct.unpack(f"<{window * windows}i", tokens)),
            [floats[i * vocab:(i + 1) * vocab] for i in range(rows)])


def test_perplexity_by_hand(gen, rand, text_file, tmp_path):
    """Every scored row is the distribution that generation sees after the same tokens; nll is the mean over the rows w/2
    to w-2 of each window; the windows begin with the start token."""
    saved = tmp_path / "saved"
    r = perplexity(gen, rand, text_file, "-c", "16", "--save-logits", saved)
    vocab, window, windows, tokens, rows = read_logits(saved)
    text = text_ids(TEXT.encode())
    assert (vocab, window, windows) == (262, 16, len(text) // 16)
    expected = [1 if i % 16 == 0 else text[i] for i in range(16 * windows)]
    assert tokens == expected
    places = [(w, i) for w in range(windows) for i in range(8, 15)]
    nll = [-row[text[16 * w + i + 1]] for row, (w, i) in zip(rows, places)]
    assert r["tokens"] == len(rows) == len(nll) == 7 * windows
    assert abs(r["nll"] - sum(nll) / len(nll)) < 1e-6 and abs(r["perplexity"] / math.exp(r["nll"]) - 1) < 1e-9
    for row in rows[::50]:
        assert abs(sum(map(math.exp, row)) - 1) < 1e-4
    for k in (0, 6, 45):
        w, i = places[k]
        prompt = bytes(t - B0 for t in tokens[16 * w + 1:16 * w + i + 1]).decode()
        first = answer(gen, rand, "-n", "1", "--logprobs", "100", prompt=prompt)["logprobs"]["content"][0]
        best = sorted(rows[k], reverse=True)[:100]
        assert max(abs(a["logprob"] - b) for a, b in zip(first["top_logprobs"], best)) < 1e-5


def test_perplexity_text(gen, rand, text_file):
    line = gen.ok("-m", rand, "--perplexity", text_file, "-c", "16", "--chunks", "3").text
    assert re.fullmatch(r"perplexity [\d.]+ \+/- [\d.]+ \([\d.]+ nats per token; 21 tokens in 3 windows of 16\)\n", line)
    assert gen.ok("-m", rand, "--perplexity", "-", "-c", "16", "--chunks", "3", stdin=text_file.read_bytes()).text == line


def test_perplexity_windows(gen, rand, text_file, mkfix, tmp_path):
    saved = tmp_path / "saved"
    perplexity(gen, mkfix("rand", "--bos", "0"), text_file, "-c", "7", "--chunks", "2", "--save-logits", saved)
    _, window, windows, tokens, rows = read_logits(saved)
    assert (window, windows, len(rows)) == (7, 2, 6)            # rows 3, 4, 5 of each
    assert tokens == [B0 + b for b in TEXT.encode()][:14]       # no start token where the model wants none
    gen.refused("-m", rand, "--perplexity", text_file, rc=2, says=["512", "-c"])
    for size in ("1", "3", "4097"):
        gen.refused("-m", rand, "--perplexity", text_file, "-c", size, rc=2, says=[size, "4096"])
    gen.refused("-m", rand, "--perplexity", "/nowhere/t", rc=2, says="/nowhere/t")
    assert perplexity(gen, rand, text_file, "-c", "4")["tokens"] == (len(TEXT) + 1) // 4


def test_control_tokens_in_a_scored_text_are_text(gen, rand, tmp_path):
    text, saved = tmp_path / "text", tmp_path / "saved"
    text.write_text("ab</s>cd<|im_end|>ef")
    perplexity(gen, rand, text, "-c", "20", "--save-logits", saved)
    assert read_logits(saved)[3] == text_ids(b"ab</s>cd<|im_end|>ef")[:20]


def test_kl_divergence(gen, rand, text_file, tmp_path):
    base, other = tmp_path / "base", tmp_path / "other"
    args = ["-c", "32", "--chunks", "4"]
    plain = perplexity(gen, rand, text_file, *args, "--save-logits", base)
    assert set(plain) == {"tokens", "nll", "perplexity"}
    same = perplexity(gen, rand, text_file, *args, "--kl-base", base)
    assert abs(same["kl_mean"]) < 1e-6 and abs(same["kl_p99"]) < 1e-5 and same["top1_agreement"] == 1
    r = perplexity(gen, rand, text_file, *args, "--rope-scale", "3", "--kl-base", base, "--save-logits", other)
    p, q = read_logits(base)[4], read_logits(other)[4]
    kl = sorted(sum(math.exp(a) * (a - b) for a, b in zip(x, y)) for x, y in zip(p, q))
    assert r["kl_mean"] > 1e-3 and abs(r["kl_mean"] - sum(kl) / len(kl)) < 1e-6
    assert kl[int(0.97 * len(kl))] - 1e-6 <= r["kl_p99"] <= kl[-1] + 1e-6
    top = sum(x.index(max(x)) == y.index(max(y)) for x, y in zip(p, q)) / len(p)
    assert abs(r["top1_agreement"] - top) < 1e-9
    lines = gen.ok("-m", rand, "--perplexity", text_file, *args, "--kl-base", base).text.splitlines()
    assert len(lines) == 2 and lines[1].startswith("KL divergence 0.000000 mean") and lines[1].endswith(" 100.00 %")


def test_kl_base_that_does_not_fit(gen, rand, mkfix, text_file, tmp_path):
    base, bad, text = tmp_path / "base", tmp_path / "bad", tmp_path / "text"
    args = ["-c", "32", "--chunks", "3"]
    perplexity(gen, rand, text_file, *args, "--save-logits", base)
    data = base.read_bytes()

    def refused(says, *more, model=rand, source=text_file, args=args):
        gen.refused("-m", model, "--perplexity", source, *args, "--kl-base", bad, *more, rc=2, says=["--kl-base", *says])
    for cut in (0, 10, 63, 64, 100, len(data) - 1):
        bad.write_bytes(data[:cut])
        refused(["bytes"] if cut >= 64 else [])
    bad.write_bytes(data + b"x")
    refused(["bytes"])
    bad.write_bytes(b"X" + data[1:])
    refused(["--save-logits"])
    bad.write_bytes(data)
    refused(["windows"], args=["-c", "32", "--chunks", "2"])
    refused(["-c 32"], args=["-c", "16", "--chunks", "3"])
    refused(["vocabulary"], model=mkfix("rand", "--pad", "3"))
    text.write_text(TEXT.replace("sister", "mother"))
    refused(["tokens"], source=text)
    bad.unlink()
    refused(["bad"])
    bad.mkdir()
    refused([])


def test_save_logits_appears_only_whole(gen, rand, text_file, tmp_path):
    gen.refused("-m", rand, "--perplexity", text_file, "-c", "16", "--save-logits", tmp_path / "no" / "x", rc=1,
                says="--save-logits")
    broken = with_nan(rand, tmp_path)
    saved = tmp_path / "saved"
    assert gen("-m", broken, "--perplexity", text_file, "-c", "16", "--save-logits", saved).rc == 1
    assert sorted(os.listdir(tmp_path)) == ["nan.gguf"]


# ---- files

def with_nan(model, folder):
    """The model with a NaN as the last value of its last tensor."""
    path = folder / "nan.gguf"
    path.write_bytes(model.read_bytes()[:-4] + struct.pack("<f", math.nan))
    return path


def test_inspect(gen, chain, smollm2):
    lines = dict(line.split(None, 1) for line in gen.ok("--inspect", smollm2).text.splitlines())
    assert lines["architecture"] == "llama" and lines["layers"] == "30" and lines["kv_heads"] == "3"
    assert lines["vocabulary"] == "49152" and lines["Q4_1"].startswith("210 tensors") and lines["chat_template"] == "yes"
    o = json.loads(gen.ok("-m", smollm2, "--inspect", "--json").text)
    assert o["parameters"] == 134515008 and o["context"] == 8192 and o["types"]["Q4_1"]["tensors"] == 210
    assert o["tensor_bytes"] == sum(t["bytes"] for t in o["types"].values()) <= o["file_bytes"] == smollm2.stat().st_size
    assert gen.ok("--inspect", chain).out == gen.ok("-m", chain, "--inspect").out
    gen.refused("--inspect", "/nowhere/m", rc=3, says="/nowhere/m")
    gen.refused("--inspect", chain, "-m", chain, rc=2, says="once")


def test_inspect_shows_no_control_characters(gen, mkfix, chain, tmp_path):
    evil = tmp_path / "evil.gguf"
    evil.write_bytes(chain.read_bytes().replace(b"fixture", b"\x1b[31m\x07x", 1))
    out = gen.ok("--inspect", evil).out
    assert b"^[[31m" in out and b"\x1b" not in out and b"\x07" not in out


def test_dry_run(gen, mkfix, loop):
    o = json.loads(gen.ok("-m", loop, "--dry-run", "--json", "-c", "1000").text)
    by_type = {(c["type_k"], c["type_v"]): c for c in o["cache"]}
    assert set(by_type) >= {("f32", "f32"), ("f16", "f16")} and o["ctx"] == 1000 and o["model_ctx"] == 4096
    for kind, size in (("f32", 4), ("f16", 2)):
        entry = by_type[kind, kind]
        # 2 * layers * KV heads * head size * tokens * bytes of the type; whole pages of 32 tokens are reserved
        assert entry["formula_bytes"] == 2 * 1 * 1 * 32 * 1000 * size
        assert entry["reserved_bytes"] == 2 * 1 * 1 * 32 * 1024 * size
        assert entry["largest_ctx"] > 4096
    real = answer(gen, loop, "-c", "1000", "-n", "1")["kv"]["bytes_reserved"]
    assert real == by_type["f16", "f16"]["reserved_bytes"]
    mixed = json.loads(gen.ok("-m", loop, "--dry-run", "--json", "-ctk", "f32").text)
    assert ("f32", "f16") in [(c["type_k"], c["type_v"]) for c in mixed["cache"]]
    assert "2 * layers 1 * KV heads 1 * head size 32 * tokens 4096" in gen.ok("-m", loop, "--dry-run").text
    gen.ok("-m", loop, "--dry-run", "-p", ":", "-c", "2147483647")             # says what it would take


@pytest.mark.skipif(SANITIZED, reason="a sanitizer's build has no limit of address space")
def test_largest_context_of_the_dry_run_is_right(gen, mkfix):
    model = mkfix("rand", "--ctx", "100000000")
    o = json.loads(gen.ok("-m", model, "--dry-run", "--json", memory=2 << 30).text)
    largest = {c["type_k"]: c["largest_ctx"] for c in o["cache"]}
    assert o["memory_available"] < 2 << 30 and 1 << 29 < largest["f16"] * 256 < 2 << 30
    assert abs(largest["f16"] / largest["f32"] - 2) < 0.01
    gen.ok(*GREEDY, "-m", model, "-p", "a", "-n", "1", "-c", str(largest["f16"]), memory=2 << 30)


def test_check_tensors(gen, rand, tmp_path):
    assert re.fullmatch(r"\d+ tensors, [\d.]+ kB: all values are finite\n", gen.ok("-m", rand, "--check-tensors").text)
    broken = with_nan(rand, tmp_path)
    gen.refused("-m", broken, "--check-tensors", rc=3, says=["1 of", "(1)"])
    gen.refused("-m", broken, "--check-tensors", "--no-mmap", rc=3, says="not finite")


def test_threads_follow_the_quota_of_a_group(gen, rand):
    """The control group that the process is in, or one above it, allows one core."""
    lines = [line.rstrip("\n").split(":", 2) for line in open("/proc/self/cgroup")]
    mounts = {names: path for _, names, path in lines if names == "" or "cpu" in names.split(",")}
    if len(os.sched_getaffinity(0)) < 2 or not mounts:
        pytest.skip("there is but one core, or no control group for them")
    names, path = max(mounts.items())
    root = pathlib.Path("/sys/fs/cgroup", "cpu" if names else ".", path.strip("/"))
    outer = root / f"gen-{os.getpid()}"
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
        (outer / ("cpu.cfs_quota_us" if names else "cpu.max")).write_text("100000")
        run = subprocess.run([GEN, "--verbose", "-m", rand, "-p", "a", "-n", "1"], capture_output=True, text=True,
                             preexec_fn=lambda: (inner / "cgroup.procs").write_text("0"))
        assert run.returncode == 0 and ", 1 threads" in run.stderr, run.stderr
    except (OSError, subprocess.SubprocessError) as e:
        pytest.skip(f"no control group can be made: {e}")
    finally:
        for folder in (inner, outer):
            if folder.exists():
                folder.rmdir()
