"""--tensor-parallel: a model divided over the processes of mpirun says the same, within a bound, and the same bits each
time. Needs Open MPI."""
import json
import math
import os
import shutil
import signal
import subprocess

import pytest
from conftest import GEN, run_program

MPIRUN = shutil.which("mpirun")
# The ranks' parts of a sum are added in another order than one process adds, which changes the seventh digit of activations
# around 1 and, through a few layers, log-probabilities by some 1e-5. A cache rounds what differs in that digit to another
# value here and there: by 1/2048 with f16, 1/250 of a block's largest with int8 (weights of 8 bits round activations
# likewise), 1/15 with int4. Twice to five times what is measured.
BOUND = {"f32": 1e-4, "f16": 2e-3, "int8": 2e-2, "int4": 2e-1}


@pytest.fixture(scope="module")
def mpi(gen):
    if not MPIRUN:
        pytest.skip("mpirun is not there (Debian: openmpi-bin)")
    if "without MPI" in gen("--tensor-parallel", "2", "-m", "none", "-p", "x").err:
        pytest.skip("gen was built without MPI (Debian: libopenmpi-dev)")

    def command(ranks, *args):
        root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        return [MPIRUN, *root, "--oversubscribe", "-n", str(ranks), GEN, "--tensor-parallel", str(ranks), "-t", "1", *args]

    def run(ranks, *args, **how):
        return run_program(command(ranks, *map(str, args)), timeout=120, **how)
    run.command = command
    return run


@pytest.fixture(scope="module")
def models(tiny):
    return tiny


def answer(text):
    return json.loads(text)


ASK = ["-p", "a prompt that is longer than one block of the cache, so that some are sealed", "-n", "24", "--temp", "0",
       "--ignore-eos", "--logprobs", "3", "--json", "-q"]


def close(one, other, bound):
    """Log-probabilities as long as the texts are the same; how many tokens that is."""
    for n, (a, b) in enumerate(zip(one["logprobs"]["content"], other["logprobs"]["content"])):
        top = {str(t["bytes"]): t["logprob"] for t in b["top_logprobs"]}
        for t in a["top_logprobs"][:2]:
            assert abs(t["logprob"] - top.get(str(t["bytes"]), math.inf)) <= bound, (n, t, top)
        if one["tokens"][n] != other["tokens"][n]:
            return n
    return len(one["tokens"])


@pytest.mark.parametrize("ranks,kv,weight,cache", [
    (2, 4, "F32", "f32"), (4, 4, "F32", "f16"), (3, 3, "Q8_0", "f16"), (2, 8, "Q4_0", "int8"), (4, 8, "Q8_0", "int4"),
    (2, 1, "F32", "f32"), (3, 2, "Q8_0", "int8")])
def test_parts_say_what_the_whole_says(gen, mpi, models, ranks, kv, weight, cache):
    m = models(weight=weight, heads=2 * kv, kv_heads=kv, head_k=32, ff=512)
    words = ["-m", m, "-ctk", cache, "-ctv", cache, *ASK]
    whole, parts = answer(gen.ok(*words).out), [answer(mpi(ranks, *words).out) for _ in range(2)]
    assert parts[0]["logits_sha256"] == parts[1]["logits_sha256"]      # the same bits from run to run
    assert close(whole, parts[0], BOUND[cache] if weight == "F32" else max(BOUND[cache], 5e-2)) >= 1
    shared = ranks if kv % ranks == 0 else 1         # else the same pages, of which each rank fills its own
    assert parts[0]["kv"]["bytes_used"] * shared == whole["kv"]["bytes_used"]


@pytest.mark.parametrize("arch,ranks", [("qwen2", 2), ("qwen3", 4), ("phi3", 2), ("gemma2", 2), ("gemma3", 4)])
def test_architectures(gen, mpi, models, arch, ranks):
    """Biases, norms of heads, fused tensors, windows: each rank takes its own part of them."""
    m = models(arch=arch, heads=8, kv_heads=4, head_k=32, ff=512, layers=3, window=24, bias=arch == "qwen2")
    words = ["-m", m, "-ctk", "f32", "-ctv", "f32", *ASK]
    whole, parts = answer(gen.ok(*words).out), answer(mpi(ranks, *words).out)
    assert close(whole, parts, 1e-3) >= 1


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_other_numbers_of_heads(gen, mpi, models, heads):
    """Heads that are averaged, or repeated, by each rank for itself."""
    m = models(arch="qwen2", weight="F32", heads=8, kv_heads=4, head_k=32, ff=512)
    words = ["-m", m, "-ctk", "f32", "-ctv", "f32", "--kv-heads", str(heads), *ASK]
    assert close(answer(gen.ok(*words).out), answer(mpi(2, *words).out), 1e-3) >= 1


@pytest.mark.parametrize("ranks,kv", [(4, 4), (3, 1)])
def test_a_text_is_scored_alike(gen, mpi, models, tmp_path, ranks, kv):
    """Prefill in chunks, and a window with sinks; of the text divided by tokens each rank has several parts."""
    m = models(weight="F32", heads=8, kv_heads=kv, head_k=32, ff=512)
    text = tmp_path / "text"
    text.write_text("".join(chr(97 + i * i % 23) for i in range(2600)))
    words = ["-m", m, "--perplexity", text, "-c", "1300", "--json", "-ctk", "f32", "-ctv", "f32", "-q"]
    for more in [], ["--window", "600", "--sinks", "4"]:
        base = tmp_path / "base"
        one = answer(gen.ok(*words, *more, "--save-logits", base).out)
        other = answer(mpi(ranks, *words, *more, "--kl-base", base).out)
        assert abs(other["nll"] - one["nll"]) <= 1e-4 and other["kl_mean"] <= 1e-6 and other["top1_agreement"] >= 0.99


def test_a_chat_of_several_turns(gen, mpi, models):
    m = models(weight="F32", heads=8, kv_heads=4, head_k=32, ff=512)
    words = ["-m", m, "--chat", "--chat-template", "chatml", "-n", "8", "--temp", "0", "-q", "-ctk", "f32", "-ctv", "f32"]
    assert mpi(2, *words, stdin="one\ntwo\n/undo\nthree\n").out == gen.ok(*words, stdin="one\ntwo\n/undo\nthree\n").out


@pytest.mark.parametrize("more", [[], ["--kv-memory", "150K", "-c", "256"]], ids=" ".join)
def test_a_batch(mpi, models, more):
    """Lines have the bits that the same ranks give each alone, also when pages are given up and shared."""
    m = models(weight="Q8_0", heads=8, kv_heads=4, head_k=32, ff=512)
    words = ["-m", m, "--temp", "0", "--ignore-eos", "-q", "-s", "1", *more]
    texts = ["a text that all have in common, longer than a block, " + end for end in ("", "and", "and more " * 9)] * 2
    lines = "".join(json.dumps({"prompt": t}) + "\n" for t in texts)
    r = mpi(2, *words, "-n", "60", "--batch", "-", "-np", "4", stdin=lines)
    got = [answer(line)["response"]["logits_sha256"] for line in r.out.splitlines()]
    alone = [answer(mpi(2, *words, "-n", "60", "--json", "-p", t).out)["logits_sha256"] for t in texts]
    assert r.rc == 0 and got == alone


@pytest.mark.parametrize("ranks,more,says", [
    (2, ["-c", "2000000000"], "ctx-size"), (2, ["-p", ""], "empty")])
def test_refusals_are_one_sentence_of_rank_0(mpi, models, ranks, more, says):
    """And no rank waits for ever."""
    m = models(weight="F32", heads=8, kv_heads=4, head_k=32, ff=512)
    r = mpi(ranks, "-m", m, "-p", "x", "-n", "1", "-q", *more)
    said = [line for line in r.err.splitlines() if line.startswith("gen: ")]
    assert r.rc in (1, 2, 3) and r.out == b"" and len(said) == 1 and says in said[0], r.err


def test_ranks_must_be_as_many_as_said(gen, mpi, models):
    m = models(weight="F32", heads=8, kv_heads=4, head_k=32, ff=512)
    assert "mpirun -n 2" in gen.refused("--tensor-parallel", "2", "-m", m, "-p", "x", rc=2)
    command = mpi.command(2, "-m", str(m), "-p", "x")
    command[command.index("--tensor-parallel") + 1] = "4"
    r = run_program(command)
    assert r.rc == 2 and "there are 2" in r.err


def test_ranks_without_a_task(mpi, models):
    """Several processes that know nothing of each other would each do it all."""
    m = models(weight="F32", heads=8, kv_heads=4, head_k=32, ff=512)
    command = mpi.command(2, "-m", str(m), "-p", "x", "-n", "1")
    at = command.index("--tensor-parallel")
    r = run_program(command[:at] + command[at + 2:])
    assert r.rc == 2 and r.out == b"" and r.err.count("gen: mpirun has started 2 processes") == 1, r.err


def test_a_rank_that_dies_ends_the_run_and_is_named(mpi, models):
    m = models(weight="F32", heads=8, kv_heads=4, head_k=32, ff=512)
    command = mpi.command(2, "-m", str(m), "-p", "x", "-n", "4000", "--temp", "0", "--ignore-eos")
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout.read(40)                       # it is generating
    children = subprocess.run(["pgrep", "-P", str(run.pid), "gen"], capture_output=True, text=True).stdout.split()
    ranks = {}
    for pid in children:
        environment = open(f"/proc/{pid}/environ", "rb").read().split(b"\0")
        ranks[int(next(v for v in environment if v.startswith(b"OMPI_COMM_WORLD_RANK=")).split(b"=")[1])] = int(pid)
    os.kill(ranks[1], signal.SIGKILL)
    out, err = run.communicate(timeout=60)
    assert run.returncode != 0 and b"rank 1" in err, err


@pytest.fixture
def two_hosts(tmp_path):
    """Two network namespaces that see each other by one cable only; mpirun's words for ranks on both of them."""
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    a, b = f"gen-a{os.getpid()}", f"gen-b{os.getpid()}"
    agent = tmp_path / "agent"                       # stands for ssh: its first word is the host
    agent.write_text(f'#!/bin/sh\nshift\nexec ip netns exec {b} unshare --uts sh -c "hostname other; $*"\n')
    agent.chmod(0o755)
    try:
        for words in ([f"netns add {a}", f"netns add {b}", f"link add va netns {a} type veth peer name vb netns {b}"] +
                      [f"-n {name} addr add 10.77.0.{i}/24 dev v{name[4]}" for i, name in ((1, a), (2, b))] +
                      [f"-n {name} link set {link} up" for name in (a, b) for link in ("lo", f"v{name[4]}")]):
            if subprocess.run(["ip", *words.split()], capture_output=True).returncode != 0:
                pytest.skip("network namespaces cannot be made here")
        tcp = "--mca btl tcp,self --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24"
        yield (["ip", "netns", "exec", a],
               f"--host 10.77.0.1:1,10.77.0.2:2 --mca plm_rsh_agent {agent} --mca routed direct {tcp}".split())
    finally:
        for name in a, b:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_ranks_on_two_hosts_over_tcp(mpi, models, two_hosts):
    m = models(weight="Q8_0", heads=6, kv_heads=3, head_k=32, ff=512)
    here = mpi(3, "-m", m, *ASK)
    enter, hosts = two_hosts
    command = mpi.command(3, "-m", str(m), *ASK)
    r = run_program([*enter, *command[:2], *hosts, *command[2:]], timeout=120)
    assert r.rc == 0, r.err
    assert answer(r.out)["logits_sha256"] == answer(here.out)["logits_sha256"]
