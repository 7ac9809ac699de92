"""What the Python tests share: where the program, its helpers, the conformance data and the models are; how gen is run.

Environment, set by make: CONFIG (release, sanitize, ...) names the build under test, DATA the folder of conformance data."""
import os
import pathlib
import resource
import subprocess
import sys
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = os.environ.get("CONFIG", "release")
BUILD = ROOT / "build" / CONFIG
GEN = ROOT / "gen" if CONFIG == "release" else BUILD / "gen"
DATA = pathlib.Path(os.environ["DATA"]).resolve() if os.environ.get("DATA") else None
SANITIZED = CONFIG in ("sanitize", "fuzz")

if DATA:
    if not os.path.isdir(DATA):
        raise pytest.UsageError(f"DATA={os.environ['DATA']}: there is no such folder")
    os.environ["DATA"] = str(DATA)          # the C tests run in another directory
for name in ("GEN_MODEL", "GEN_ISA", "NO_COLOR"):
    os.environ.pop(name, None)              # what the caller prefers must not change a test


class Result(NamedTuple):
    rc: int
    out: bytes
    err: str

    @property
    def text(self):
        """stdout; not UTF-8 is an error."""
        return self.out.decode("utf-8")


def run_program(command, stdin=b"", timeout=60, memory=None, env=None, cwd=ROOT):
    """Runs a program to its end. Fails when it dies by a signal, outlasts `timeout` seconds or a sanitizer complains.
    stdin: bytes, text or an open file. memory: most bytes of address space (not applied to a sanitizer's build, whose
    shadow alone is larger). env: variables set beside the inherited ones. A program of several processes may leak: Open MPI
    does, in plugins that are unloaded before the end."""
    def limit():
        if memory and not SANITIZED:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    feed = {"input": stdin.encode() if isinstance(stdin, str) else stdin} if isinstance(stdin, (str, bytes)) else {"stdin": stdin}
    command = [str(word) if isinstance(word, pathlib.Path) else word for word in command]
    env = {**os.environ, **(env or {})}
    if {"--data-parallel", "--tensor-parallel"} & set(command):
        env["ASAN_OPTIONS"] = env.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, cwd=cwd, env=env,
                             preexec_fn=limit, **feed)
    except subprocess.TimeoutExpired as e:
        pytest.fail(f"not done after {timeout} s: {command}\n{(e.stderr or b'').decode(errors='replace')[-2000:]}")
    err = run.stderr.decode("utf-8", "replace")
    if run.returncode < 0 or run.returncode >= 128:
        pytest.fail(f"died by a signal ({run.returncode}): {command}\n{err[-4000:]}")
    if "Sanitizer" in err or "runtime error:" in err:
        pytest.fail(f"sanitizer report: {command}\n{err[-6000:]}")
    return Result(run.returncode, run.stdout, err)


class Gen:
    """The program under test."""
    path = GEN

    def __call__(self, *args, **how):
        """Runs gen with these arguments; see run_program for `how`."""
        return run_program([GEN, *args], **how)

    def ok(self, *args, **how):
        """Runs gen, which must exit with 0; its Result."""
        r = self(*args, **how)
        assert r.rc == 0, f"exit code {r.rc}: {args}\n{r.err}"
        return r

    def refused(self, *args, rc=None, says=(), **how):
        """Runs gen, which must refuse: exit code from 1 to 127 (or exactly rc), nothing on stdout, one readable line on
        stderr that holds every text of `says`. Returns that line."""
        r = self(*args, **how)
        assert 1 <= r.rc <= 127 if rc is None else r.rc == rc, f"exit code {r.rc}: {args}\n{r.err}"
        assert r.out == b"", f"refused, but printed {r.out[:200]!r}: {args}"
        line = r.err[:-1]
        assert r.err.endswith("\n") and line.strip() and line.isprintable(), f"not one readable line: {r.err!r}: {args}"
        for text in [says] if isinstance(says, str) else says:
            assert text in line, f"{text!r} is not in {line!r}: {args}"
        return line


@pytest.fixture(scope="session")
def gen():
    if not GEN.exists():
        pytest.fail(f"{GEN} is not there: run make{'' if CONFIG == 'release' else f' config={CONFIG}'} first")
    return Gen()


@pytest.fixture(scope="session")
def tool():
    """tool(NAME, arguments...) runs the helper program built from tests/NAME_tool.c."""
    def run(name, *args, **how):
        path = BUILD / "tests" / f"{name}_tool"
        assert path.exists(), f"{path} is not there: make config={CONFIG} programs builds it"
        return run_program([path, *args], **how)
    return run


@pytest.fixture(scope="session")
def data():
    """The folder of conformance data (make test DATA=DIR)."""
    if not DATA:
        pytest.skip("no conformance data: make test DATA=DIR")
    return DATA


def model_file(name):
    path = ROOT / "weights" / name
    if not path.exists():
        pytest.skip(f"weights/{name} is not there (python3 weights/get.py obtains it)")
    return path


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2 135M Instruct, Q4_1."""
    return model_file("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma3():
    """Gemma 3 270M, mixed K-quants."""
    return model_file("gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(**arguments of random_model) is the path of that model; the same arguments give the same file, made once."""
    from make_model import random_model
    folder, made = tmp_path_factory.mktemp("tiny"), {}

    def make(**arguments):
        key = repr(sorted(arguments.items()))
        if key not in made:
            made[key] = random_model(str(folder / f"{len(made)}.gguf"), **arguments)
        return made[key]
    return make


@pytest.fixture(scope="session")
def mkfix(data, tmp_path_factory):
    """mkfix("chain", "--text", "ok") makes a small GGUF with DATA's fixture maker and returns its path; the same words
    give the same file, made once. "patch" takes the source file second: mkfix("patch", source, key, value)."""
    maker = data / "tools" / "mkfix.py"
    if not maker.exists():
        pytest.skip(f"{maker} is not there")
    folder, made = tmp_path_factory.mktemp("mkfix"), {}

    def make(kind, *words):
        key = (kind, *map(str, words))
        if key not in made:
            out = folder / f"{len(made)}-{kind}.gguf"
            args = [words[0], out, *words[1:]] if kind == "patch" else [out, *words]
            run = subprocess.run([sys.executable, maker, kind, *map(str, args)], capture_output=True, text=True)
            assert run.returncode == 0, f"mkfix.py {kind} {words}: {run.stderr}"
            made[key] = out
        return made[key]

    def kinds():
        run = subprocess.run([sys.executable, maker, "kinds"], capture_output=True, text=True, check=True)
        return run.stdout.split()
    make.kinds = kinds
    return make
