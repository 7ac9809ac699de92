"""What nvcc made of the CUDA kernels, without running them: registers and shared memory within the budget written beside the
kernels, no spills, 128-bit loads where a kernel streams weights or the cache.

The table in the first comment of each .cu file is the budget: names, registers, static shared memory. A * stands for anything.
make leaves ptxas's reports and the cubins of ./gen in build/release/nvcc; sm_100 is compiled here (long)."""
import fnmatch
import pathlib
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest
from conftest import BUILD, CONFIG, ROOT

SOURCES = sorted(ROOT.glob("*.cu"))
STREAMING = [path for path in SOURCES if re.search(r"\b(decode|prefill|product|select)_kernel\(", path.read_text())]
REPORTS = BUILD / "nvcc"

if not SOURCES or CONFIG != "release":
    pytest.skip("CUDA is compiled in the release build", allow_module_level=True)


class Compiled(NamedTuple):
    kernel: str                        # as a person writes it: decode_kernel<1, 64>
    arch: str
    spills: int
    registers: int
    shared: int


def plain_names(mangled):
    """decode_kernel<1, 64> for _Z13decode_kernelILi1ELi64EEv9attention, and so on."""
    out = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    names = {}
    for name, line in zip(mangled, out.splitlines()):
        line = re.sub(r"^void |\((\w+|anonymous namespace)\)(?=[-\d:])|\(anonymous namespace\)::", "", line)
        depth, end = 0, len(line)
        for i, c in enumerate(line):
            depth += (c == "<") - (c == ">")
            if c == "(" and not depth:
                end = i
                break
        names[name] = line[:end]
    return names


def read_report(text):
    found = re.findall(r"Compiling entry function '(\S+)' for '(sm_\d+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
                       r".*?Used (\d+) registers([^\n]*)", text, re.S)
    names = plain_names([f[0] for f in found])
    return [Compiled(names[name], arch, int(stores) + int(loads), int(registers),
                     int((re.search(r"(\d+) bytes smem", rest) or [0, 0])[1]))
            for name, arch, stores, loads, registers, rest in found]


def budgets(source):
    """[(pattern, registers, shared)] of a file's first comment, for names without _kernel. A line may name several."""
    comment = source.read_text().split("*/")[0]
    lines = re.findall(r"^ \*     (\w.*?)\s{2,}(\d+)\s+(\d+)$", comment, re.M)
    assert lines, f"{source.name} has no budgets"
    return [("*" if name == "all others" else name.replace(" ", ""), int(registers), int(shared))
            for names, registers, shared in lines for name in re.split(r", (?![^<]*>)", names)]


def squeezed(kernel):
    return kernel.replace(" ", "").replace("_kernel", "")


def budget_of(kernel, source):
    for pattern, *budget in budgets(source):
        if fnmatch.fnmatchcase(squeezed(kernel), pattern):
            return budget
    pytest.fail(f"{source.name} has no budget for {kernel}")


def check(compiled, source):
    assert compiled
    faults = []
    for c in compiled:
        registers, shared = budget_of(c.kernel, source)
        if c.spills or c.registers > registers or c.shared > shared:
            faults.append(f"{c.kernel} for {c.arch}: {c.registers} registers of {registers}, {c.shared} bytes shared of {shared}, "
                          f"{c.spills} bytes of spills")
    assert not faults, "\n".join(faults)


def report_of(source):
    path = REPORTS / f"{source.stem}.log"
    if not path.exists():
        pytest.skip("gen is built without nvcc")
    return path.read_text()


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_budgets(source):
    compiled = read_report(report_of(source))
    assert {c.arch for c in compiled} >= {"sm_80", "sm_90"}
    check(compiled, source)
    for pattern, *_ in budgets(source):
        assert any(fnmatch.fnmatchcase(squeezed(c.kernel), pattern) for c in compiled), f"{source.name}: no kernel is {pattern}"


# ---- what the instructions are

def disassembler():
    beside = [pathlib.Path(p) / "nvidia" / cuda / "bin" / "nvdisasm" for p in sys.path for cuda in ("cu13", "cuda_nvdisasm")]
    found = shutil.which("nvdisasm") or next((str(p) for p in [pathlib.Path("/usr/local/cuda/bin/nvdisasm"), *beside] if p.exists()), None)
    return found or pytest.skip("there is no nvdisasm (pip install nvidia-cuda-nvdisasm)")


def load_bytes(line):
    """(opcode, bytes a lane) of a load from global memory; LDGSTS copies to shared memory."""
    m = re.search(r"\b(LDGSTS|LDG)\.E(\S*)", line)
    return m and (m[1], next((n for key, n in ((".128", 16), (".64", 8), ("16", 2), ("8", 1)) if key in m[2]), 4))


def instructions(cubin):
    """{kernel: its lines} of a cubin."""
    text = subprocess.run([disassembler(), "-c", cubin], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\.text\.(\S+):\n(.*?)(?=^\t\.section|\Z)", text, re.M | re.S)
    names = plain_names([name for name, _ in found])
    return {names[name]: body.splitlines() for name, body in found}


def inner_loops(lines):
    """The lines of each loop that holds no other: between a label and a later branch back to it."""
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L_x_\d+):", line))}
    backs = [(labels.get(m[1], i), i) for i, line in enumerate(lines) if (m := re.search(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)", line))]
    loops = {(first, last) for first, last in backs if first < last}
    return [lines[a:b] for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]


def check_wide(cubin, source):
    """Tiles of the cache are copied 16 bytes a lane, always. Of what the loops load that multiply weights (by dp4a, or past the
    first-level cache) at least half the bytes come 16 a lane; of the types of two bits, whose blocks are no more, 8. Logits are read
    16 bytes a lane, and again where candidates are."""
    seen = 0
    for kernel, lines in instructions(cubin).items():
        name = re.split("_kernel|<", kernel)[0]
        if name in ("decode", "prefill"):
            copies = [load[1] for line in lines if (load := load_bytes(line)) and load[0] == "LDGSTS"]
            assert copies and set(copies) == {16}, f"{kernel} in {cubin.name}: copies of {copies} bytes"
            assert ("true" in kernel) == any("HMMA.16816" in line for line in lines), f"{kernel} in {cubin.name}: tensor cores"
        elif name == "product":
            two_bits = int(re.search(r"<(\d+)", kernel)[1]) in (10, 11)
            loops = [loop for loop in inner_loops(lines) if re.search(r"IDP\.4A|LDG\.E\.NA\.", "\n".join(loop))]
            assert len(loops) >= 1, f"{kernel} in {cubin.name}: no loop multiplies weights"
            for loop in loops:
                sizes = [load[1] for line in loop if (load := load_bytes(line))]
                wide = sum(n for n in sizes if n >= (8 if two_bits else 16))
                assert wide > 0 and 2 * wide >= sum(sizes), f"{kernel} in {cubin.name}: loads of {sizes} bytes"
        elif name == "select":
            sizes = [load[1] for loop in inner_loops(lines) for line in loop if (load := load_bytes(line))]
            assert sizes.count(16) >= 2, f"{kernel} in {cubin.name}: loads of {sizes} bytes"
        else:
            continue
        seen += 1
    assert seen, f"{source.name}: no kernel streams"


@pytest.mark.parametrize("source", STREAMING, ids=lambda p: p.name)
def test_wide_loads(source):
    report_of(source)
    cubins = sorted(REPORTS.glob(f"{source.stem}.*.cubin"))
    assert cubins
    for cubin in cubins:
        check_wide(cubin, source)


@pytest.mark.long
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_next_architecture(source, tmp_path):
    """sm_100, for which ./gen only has PTX."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not nvcc:
        pytest.skip("there is no nvcc")
    cubin = tmp_path / f"{source.stem}.sm_100.cubin"
    r = subprocess.run([nvcc, "-std=c++17", "-O3", "-fmad=false", "-arch=sm_100", "-Xptxas", "-v", "-I.", "-cubin", "-o", cubin, source],
                       capture_output=True, text=True, cwd=ROOT)
    assert r.returncode == 0, r.stderr
    check(read_report(r.stderr), source)
    if source in STREAMING:
        check_wide(cubin, source)
