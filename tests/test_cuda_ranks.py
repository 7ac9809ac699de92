"""--tensor-parallel with --backend cuda on the emulator: a model divided over devices says what one device and what ranks of
processors say, and the same bits whether the ranks exchange by NCCL (here: its twin in tests/emulator) or by MPI. Needs Open MPI."""
import json
import os
import shutil
import subprocess

import pytest
from conftest import BUILD, ROOT, SANITIZED, run_program
from test_cuda import SMALL, at_once
from test_ranks import BOUND, MPIRUN, answer, close

GEN = BUILD / "emulated" / "gen"
NCCL, HOST = "devices=4", "devices=1,seed=3"       # two ranks on one device cannot use NCCL
ASK = ["-p", "a prompt that is longer than one block of the cache, so that some are sealed", "-n", "8", "--temp", "0", "--ignore-eos",
       "-c", "128", "--logprobs", "3", "--json"]

if not MPIRUN:
    pytest.skip("mpirun is not there (Debian: openmpi-bin)", allow_module_level=True)
if not list(ROOT.glob("*.cu")):
    pytest.skip("there is no CUDA backend", allow_module_level=True)


@pytest.fixture(scope="module")
def model(tiny):
    return lambda **arguments: tiny(**{**SMALL, "embd": 64, "layers": 2, **arguments})


def ranks(n, *args, settings=(), backend="cuda", gen=GEN, parallel="--tensor-parallel", **how):
    """Runs gen on n ranks; settings: the emulator's, of each rank or of all."""
    if isinstance(settings, str):
        settings = [settings] * n
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    words = [gen, *(["--tensor-parallel", n] if parallel == "--tensor-parallel" else [parallel]), "-t", 1, *args]
    words += ["--backend", backend] if backend else []
    parts = [[":", "-n", 1, "-x", f"CUDA_EMULATOR={s}", *words] for s in settings]
    return run_program(list(map(str, [MPIRUN, *root, "--oversubscribe", *sum(parts, [])[1:]])), timeout=300, **how)


def alone(*args, **how):
    """Runs gen on one device."""
    return run_program(list(map(str, [GEN, *args, "--backend", "cuda"])), timeout=300, env={"CUDA_EMULATOR": ""}, **how)


def said(r):
    return [line for line in r.err.splitlines() if line.startswith("gen: ")]


def told(r):
    assert r.rc == 0, r.err
    return answer(r.out)


@pytest.fixture(scope="module", autouse=True)
def built():
    if not GEN.exists():
        pytest.fail(f"{GEN} is not there: make emulated builds it")
    if "without MPI" in alone("--tensor-parallel", 2, "-m", "none", "-p", "x").err:
        pytest.skip("gen was built without MPI (Debian: libopenmpi-dev)")


@pytest.mark.parametrize("n, kv, weight, cache", [
    (2, 2, "F32", ("f32", "f32")), (3, 3, "Q8_0", ("int8", "int4")), (4, 4, "F32", ("f16", "f16"))])
def test_parts_say_what_the_whole_says(model, n, kv, weight, cache):
    """Also by quantised products of 9 blocks a row, an odd number."""
    words = ["-m", model(weight=weight, heads=2 * kv, kv_heads=kv, ff=288 * n if weight == "Q8_0" else 128), "-ctk", cache[0], "-ctv",
             cache[1], *ASK]
    bound = BOUND[cache[1]] if weight == "F32" else max(BOUND[cache[1]], 5e-2)
    whole, nccl, host = at_once(lambda run: told(run()), [
        lambda: alone(*words), lambda: ranks(n, *words, settings=NCCL),
        lambda: ranks(n, *words, settings=HOST)])
    assert nccl["logits_sha256"] == host["logits_sha256"]
    assert nccl["kv"]["bytes_used"] * n == whole["kv"]["bytes_used"]
    for other in whole, told(ranks(n, *words, settings=[""] * n, backend="cpu")):
        assert close(other, nccl, bound) >= 1


@pytest.mark.parametrize("arch, more", [("qwen2", {"bias": True}), ("gemma2", {"window": 24, "caps": (50.0, 30.0)})])
def test_architectures(model, arch, more):
    """Biases, norms after the sums, windows, soft caps, a vocabulary that the ranks do not divide evenly."""
    words = ["-m", model(arch=arch, heads=4, kv_heads=2, **more), "-ctk", "f32", "-ctv", "f32", *ASK]
    whole, nccl = at_once(lambda run: told(run()), [lambda: alone(*words),
                                                    lambda: ranks(2, *words, settings=NCCL)])
    assert close(whole, nccl, 1e-3) >= 1


def test_a_batch(model):
    """Sequences that share pages, write to copies of them, and have more logits than fit one step of few rows."""
    words = ["-m", model(weight="F32", layers=1, heads=4, kv_heads=2), "--temp", "0", "--ignore-eos", "-q", "-n", "5", "-c", "256", "-ctk",
             "f32", "-ctv", "f32", "--batch", "-", "-np", "10"]
    lines = "".join(json.dumps({"prompt": "what all have in common is longer than a block" + end, "n": 2}) + "\n"
                    for end in ("", " and", " more" * 5, ", too", "."))
    whole, parts = at_once(lambda run: [answer(line)["response"]["text"] for line in run().out.splitlines()], [
        lambda: alone(*words, stdin=lines), lambda: ranks(2, *words, settings=HOST, stdin=lines)])
    assert len(whole) == 10 and parts == whole


def test_a_chat_of_several_turns(model):
    words = ["-m", model(weight="F32", layers=1, heads=4, kv_heads=2), "--chat", "--chat-template", "chatml", "-n", "4", "--temp", "0", "-q",
             "-ctk", "f32", "-ctv", "f32", "-c", "256", "--window", "64"]
    stdin = "one\ntwo\n/undo\nthree\n"
    assert ranks(2, *words, settings=NCCL, stdin=stdin).out == alone(*words, stdin=stdin).out != b""


def test_each_rank_sees_one_device_of_its_own(model):
    """As where a script sets CUDA_VISIBLE_DEVICES for each: NCCL can be used, if all ranks have it."""
    words = ["-m", model(layers=1), "-p", "x", "-n", 1, "-c", 64, "--verbose"]
    own = [f"devices=1,first={r}" for r in (0, 1)]
    by = at_once(lambda settings: ranks(2, *words, settings=settings).err, (own, [own[0], own[1] + ",nccl=absent"]))
    assert "2 ranks by NCCL" in by[0] and "2 ranks by MPI" in by[1]


def test_launches_of_a_step(model, tmp_path):
    """Beside those of one device: for each layer two gatherings and two kernels that add, and the same for the logits."""
    def run(n):
        counters = tmp_path / str(n)
        r = ranks(2, "-m", model(layers=2), "-p", "x", "-n", n, "--temp", 0, "--ignore-eos", "-c", 64, "-q",
                  settings=[f"devices=2,counters={counters}", "devices=2"])
        assert r.rc == 0, r.err
        return {name: k["launches"] for name, k in json.loads(counters.read_text()).items()}
    few, more = at_once(run, (8, 9))
    grown = {name: n - few.get(name, 0) for name, n in more.items() if n != few.get(name, 0)}
    assert grown["NCCL"] == 2 * 2 + 1 and grown["add_kernel"] == 2 * 2 and grown["spread_kernel"] == 1, grown
    assert sum(grown.values()) == (5 * 2 + 3) + 2 * (2 * 2 + 1), grown


def test_lines_on_several_devices(model, tmp_path):
    """--data-parallel: each process takes a device of its own, with the same bits."""
    lines = tmp_path / "lines"
    lines.write_text("".join(json.dumps({"prompt": f"line {i}"}) + "\n" for i in range(3)))
    words = ["-m", model(layers=1), "--temp", "0", "-q", "-n", "4", "-c", "64", "-s", "1", "--batch", lines]
    parts = ranks(2, *words, settings=NCCL, parallel="--data-parallel")
    assert parts.out == alone(*words).out != b""


def test_sums_in_another_order_would_show(model, tmp_path):
    """A planted fault: the kernel that adds what NCCL brought goes backwards; the host does not."""
    source = (ROOT / "exchange.cu").read_text()
    wrong = source.replace("sum += all[r * n + i]", "sum += all[(size - r) * n + i]")
    assert wrong != source
    (tmp_path / "exchange.cu").write_text(wrong)
    flags = "-x c++ -std=gnu++17 -ffp-contract=off -pthread -fno-extern-tls-init -O1 -fsanitize=thread,alignment,bounds --param "
    flags = (flags + "tsan-instrument-func-entry-exit=0").split()
    subprocess.run(["g++", *flags, "-I.", "-Itests/emulator", "-c", tmp_path / "exchange.cu", "-o", tmp_path / "exchange.o"], check=True, cwd=ROOT)
    objects = [BUILD / "gen.o", *(BUILD / "emulated" / f"{s.stem}.o" for s in ROOT.glob("*.cu") if s.stem != "exchange"), tmp_path / "exchange.o",
               *(BUILD / "tests" / "emulator").glob("*.o"), BUILD / "libgen.a"]
    libraries = subprocess.run(["pkg-config", "--libs", *"libpcre2-8 jansson libutf8proc nettle libedit sqlite3 ompi-c".split()],
                               capture_output=True, text=True, check=True).stdout.split()
    checks = ["-fsanitize=address,undefined"] if SANITIZED else []
    subprocess.run(["gcc", "-pthread", *checks, "-o", tmp_path / "gen", *objects, *libraries, "-lm", "-lstdc++"], check=True, cwd=ROOT)
    words = ["-m", model(weight="F32", layers=1, heads=3, kv_heads=3), *ASK]
    nccl, host = at_once(lambda settings: told(ranks(3, *words, settings=settings, gen=tmp_path / "gen")), (NCCL, HOST))
    assert nccl["logits_sha256"] != host["logits_sha256"]


# ---- what cannot be

def refused(r, *says):
    assert r.rc in (1, 3) and r.out == b"" and len(said(r)) == 1, r.err
    assert all(text in said(r)[0] for text in says), r.err


def test_heads_that_cannot_be_divided(model):
    """A sentence; where nothing was asked for, all ranks take the processor. Heads that are repeated can be divided."""
    words = ["-m", model(weight="F32", layers=1, heads=4, kv_heads=1), *ASK]
    cuda, auto, cpu, repeated = at_once(lambda backend, *more: ranks(2, *words, *more, settings=NCCL, backend=backend),
                                        ("cuda", None, "cpu", "cuda"), ("--seed=1", "--seed=1", "--seed=1", "--kv-heads=2"))
    refused(cuda, "1 key/value heads", "2 ranks", "--kv-heads 2", "--backend cpu")
    assert close(told(cpu), told(repeated), BOUND["f16"]) >= 1
    assert told(auto)["logits_sha256"] == told(cpu)["logits_sha256"] and "CUDA is not used" in auto.err


def test_a_rank_that_cannot_use_cuda(model):
    """Ends the run, and the others with it."""
    path = model(layers=1)
    cases = [(["devices=2", "devices=2,memory=1000000"], ["rank 1: ", "bytes of device memory, but", "--backend cpu"]),
             (["devices=2", "devices=2,nccl=refuses"], ["rank 1: NCCL: ncclCommInitRank failed", "--backend cpu"]),
             (["devices=2,nccl=refuses", "devices=2"], ["gen: NCCL: ncclCommInitRank failed", "--backend cpu"]),
             (["devices=2", "devices=0"], ["rank 1: there is no CUDA device"])]
    for r, (_, says) in zip(at_once(lambda case: ranks(2, "-m", path, *ASK, settings=case[0]), cases), cases):
        refused(r, *says)


def test_a_rank_that_fails_later(model):
    """The others wait for what it does not do, on the device or in the host's exchange: all end at once."""
    path = model(layers=1)

    def run(case):
        rank, devices, n = case
        settings = [f"devices={devices}"] * 2
        settings[rank] += f",fail={n}"
        return ranks(2, "-m", path, "-p", "abc", "-n", 40, "--temp", 0, "--ignore-eos", "-c", 128, "-q", settings=settings)
    cases = [(rank, devices, n) for n in (225, 255) for rank in (0, 1) for devices in (2, 1)]
    for r, (rank, *_) in zip(at_once(run, cases), cases):
        assert r.rc == 1 and len(said(r)) == 1 and "does without" not in r.err, r.err
        assert ("rank 1: " in said(r)[0]) == (rank == 1)
