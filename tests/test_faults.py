"""Faults that were found by attack: what is written to, signals, files that change under the program."""
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
