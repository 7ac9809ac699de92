"""Runs what make has built from tests/*.c: each cmocka program (test_*.c) is one test here, and each fuzz target (fuzz_*.c)
another, which tries a fixed number of inputs in the sanitizers' build."""
import re

import pytest
import fuzz_seeds
from conftest import BUILD, ROOT, run_program

PROGRAMS = sorted(path.stem for path in (ROOT / "tests").glob("test_*.c"))
FUZZERS = sorted(path.stem for path in (ROOT / "tests").glob("fuzz_*.c") if path.stem != "fuzz_main")


@pytest.mark.parametrize("name", PROGRAMS)
def test_c(name):
    program = BUILD / "tests" / name
    assert program.exists(), f"{program} is not there: make programs builds it"
    r = run_program([program], timeout=240, env={"CMOCKA_MESSAGE_OUTPUT": "STDOUT"})
    report = r.out.decode(errors="replace") + r.err
    assert r.rc == 0, f"exit code {r.rc}\n{report[-8000:]}"
    passed = re.findall(r"^\[       OK \] (.*)", report, re.M)
    skipped = re.findall(r"^\[  SKIPPED \] (\w+)", report, re.M)
    assert passed or skipped, f"no test ran\n{report[-2000:]}"
    if skipped and not passed:
        pytest.skip(f"{name} skipped {', '.join(skipped)}")


@pytest.mark.parametrize("name", FUZZERS)
def test_fuzz(name, tmp_path):
    program = ROOT / "build" / "sanitize" / "tests" / name
    assert program.exists(), f"{program} is not there: make config=sanitize fuzzers builds it"
    r = run_program([program, "50000", "1", *fuzz_seeds.write(tmp_path / "seeds")], timeout=240, cwd=tmp_path)
    assert r.rc == 0 and "50000 inputs" in r.text, r.err[-8000:]
