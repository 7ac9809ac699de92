"""The CUDA emulator itself (tests/emulator): right kernels run and give the same bits in any order of their threads; a planted
fault ends the program with a message that names kernel, block and thread."""
import json
import os
import re
import subprocess

import pytest
from conftest import BUILD, ROOT

CASES = BUILD / "emulated" / "cases"
SEEDS = range(4)

# What a right case prints.
RIGHT = {
    "tree": "8128", "last block": None, "warp": "496", "warp calls": "0", "read": "0", "read four": "0", "shared": "1",
    "shared most": "1", "shared opted in": "1", "pipeline": "130816", "dependent": "9", "graph": "10", "event": "1", "host function": "14", "gather": "3",
    "matrix products": "0", "conversions": "ok", "blas": "ok", "counters": "",
}
# What the message of a planted fault says, and which kernel, block and thread it names.
FAULTS = {
    "no first barrier": (r"tree<1>", r"nobody wrote|race in shared memory: a read of what was written by"),
    "no barrier in loop": (r"tree<2>", r"race in shared memory"),
    "barrier in branch": (r"tree<3>", r"threads wait at different barriers"),
    "thread ends early": (r"tree<4>", r"a barrier is not reached by all threads: .*thread \(127,0,0\) has ended"),
    "two barriers": (r"tree<5>", r"threads wait at different barriers"),
    "lane ends": (r"warp<1>", r"has ended|have ended"),
    "lane not in mask": (r"warp<2>", r"not in its own mask 0000ffff"),
    "lane read not in mask": (r"warp<3>", r"reads from lane 20, which is not in the mask"),
    "no syncwarp": (r"warp<4>", r"race in shared memory|nobody wrote"),
    "different warp calls": (r"warp<5>", r"lanes of one warp meet in different calls"),
    "read past the end": (r"read_int", r"out-of-bounds read of 4 bytes at byte 40 of 40"),
    "read before the start": (r"read_int", r"out-of-bounds read of 4 bytes at byte -4 of 40"),
    "read far past the end": (r"read_int", r"not the device's memory"),
    "read four past the end": (r"read_four", r"out-of-bounds read of 16 bytes at byte 32 of 40"),
    "read four misaligned": (r"read_four", r"misaligned access .* multiple of 16"),
    "write before the start": (r"write_int", r"out-of-bounds write of 4 bytes at byte -4 of 40"),
    "use after free": (r"read_int", r"use after free"),
    "host memory": (r"read_int", r"not the device's memory"),
    "index of shared array": (r"index_array", r"index 8 lies outside"),
    "index of local array": (r"local_array", r"index 4 lies outside"),
    "shared past the end": (r"shared_end", r"out-of-bounds write of 4 bytes: byte 48 of 48 of dynamic shared memory"),
    "shared not written": (r"shared_unwritten", r"nobody wrote"),
    "pipeline without wait": (r"pipeline<1>", r"before cp.async's wait"),
    "pipeline without barrier": (r"pipeline<2>", r"race in shared memory|nobody wrote|before cp.async's wait"),
    "pipeline waits for one": (r"pipeline<3>", r"before cp.async's wait"),
    "dependent does not wait": (r"consumer", r"before cudaGridDependencySynchronize, of what a kernel in flight writes"),
}
# Faults of the host's code.
HOST_FAULTS = {
    "host reads device": r"the host touches device memory, byte 0 of 40",
    "leak": r"40 bytes of device memory are not freed",
    "freed twice": r"freed before",
    "copy too long": r"44 bytes at byte 0 of an allocation of 40",
    "shared too large": r"kernel shared_end: 49153 bytes of dynamic",
    "shared opted in too large": r"kernel shared_end: 232449 bytes of dynamic",
    "static shared too large": r"kernel large_static: 52000 bytes of static",
    "too many threads": r"kernel shared_end: a block of 1025 x 1 x 1",
    "capture waits": r"while a stream is being captured",
    "host function reads device": r"the host touches device memory, byte 0 of 4",
    "host function calls": r"a call of the API in a function of cudaLaunchHostFunc",
    "gather too much": r"what ncclAllGather sends: 80004 bytes at byte 0 of an allocation of 80000",
}
# Wrong programs that are not caught: what they print changes with the seed, or is not what it should be.
WRONG_RESULTS = {"float atomics", "no event"}


@pytest.fixture(scope="module")
def case():
    if not CASES.exists():
        pytest.fail(f"{CASES} is not there: make emulated builds it")

    def run(name, **settings):
        text = ",".join(f"{key}={value}" for key, value in settings.items())
        return subprocess.run([CASES, name], capture_output=True, text=True, timeout=60, cwd=ROOT,
                              env={**os.environ, "CUDA_EMULATOR": text})
    return run


def test_every_case_is_listed():
    names = subprocess.run([CASES], capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    assert sorted(names) == sorted([*RIGHT, *FAULTS, *HOST_FAULTS, *WRONG_RESULTS])


@pytest.mark.parametrize("name", RIGHT)
def test_right(case, name):
    runs = [case(name, seed=seed) for seed in SEEDS]
    for r in runs:
        assert r.returncode == 0, r.stderr
        assert r.stdout.strip() == (runs[0].stdout.strip() if RIGHT[name] is None else RIGHT[name])


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(case, name):
    kernel, message = FAULTS[name]
    for seed in SEEDS:
        r = case(name, seed=seed)
        assert r.returncode < 0, f"not caught with seed {seed}: {r.stdout}"
        assert re.search(rf"^cuda emulator: kernel {kernel}, block \(0,0,0\)(, thread \(\d+,0,0\))?: .*({message})", r.stderr), r.stderr


@pytest.mark.parametrize("name", HOST_FAULTS)
def test_host_fault_is_caught(case, name):
    r = case(name)
    assert r.returncode < 0 and re.search(rf"^cuda emulator: .*({HOST_FAULTS[name]})", r.stderr), r.stderr


def test_order_shows_in_results(case):
    """Sums whose order is not fixed differ between seeds; without the event the copy comes before the kernel."""
    assert len({case("float atomics", seed=seed).stdout for seed in range(8)}) > 1
    assert case("no event").stdout == "0\n"


def test_out_of_memory_and_failing_calls(case):
    r = case("tree", memory=1000)
    assert r.returncode == 0 and r.stdout == "8128\n"
    assert "cudaMalloc" in case("tree", memory=0).stdout
    seen = {case("graph", fail=n).stdout for n in range(1, 24)}
    assert len(seen) >= 8, seen


def test_counters(case, tmp_path):
    """256 threads copy 16 bytes each twice; then 32 lanes read 4 bytes each from 32 sectors, and all of them the same one."""
    file = tmp_path / "counters.json"
    assert case("counters", counters=file).returncode == 0
    counted = json.loads(file.read_text())
    assert counted["copies"] == {
        "launches": 1, "threads": 256,
        "reads": {"from": {"requests": 16, "bytes": 8192, "sectors": 256, "distinct": 128}},
        "writes": {"to": {"requests": 16, "bytes": 8192, "sectors": 256, "distinct": 128}}}
    assert counted["strided"]["reads"]["from"] == {"requests": 2, "bytes": 132, "sectors": 33, "distinct": 32}
    assert counted["strided"]["writes"]["to"] == {"requests": 1, "bytes": 4, "sectors": 1, "distinct": 1}
