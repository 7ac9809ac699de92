"""Dependencies between the files at the top level point one way, as the table says."""
import re

import pytest
from conftest import ROOT

# Which project headers a unit (NAME.c and NAME.h together) may include beside its own and base.h, which all may.
MAY_INCLUDE = {
    "gen": "engine batch chat measure model sampler tokenizer gguf",
    "measure": "engine",
    "batch": "engine kvcache chat sampler tokenizer",
    "chat": "engine jinja sampler tokenizer",
    "jinja": "",
    "sampler": "",
    "engine": "model kvcache kvstore backend",
    "tokenizer": "gguf",
    "model": "gguf quant",
    "gguf": "quant",
    "quant": "",
    "base": "",
    "backend": "kvcache model",
    "cpu": "backend model kvcache quant kernels threads",
    "threads": "",
    "kernels": "kvcache model quant",
    "kvcache": "",
    "kvstore": "kvcache",
    "comm": "",
}


def unit(path):
    """The files that are compiled once per instruction set are one unit: kernels_avx2.c, kernels.inc, vector.h, ..."""
    return "kernels" if path.name.startswith(("kernels", "vector.", "layer.")) else path.stem


def includes(path):
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M)


FILES = sorted(path for suffix in ("c", "h", "inc") for path in ROOT.glob(f"*.{suffix}"))
GRAPH = {}
for file in FILES:
    GRAPH.setdefault(unit(file), set()).update(
        unit(ROOT / name) for name in includes(file) if unit(ROOT / name) not in (unit(file), "base"))


def test_there_are_files():
    assert len(FILES) >= 5 and "base" in GRAPH


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_includes_are_allowed(file):
    assert unit(file) in MAY_INCLUDE, f"{file.name} is not in the table of tests/test_layers.py: which layer is it?"
    allowed = {unit(file), "base", *MAY_INCLUDE[unit(file)].split()}
    for name in includes(file):
        assert unit(ROOT / name) in allowed, f"{file.name} may not include {name}"
        assert (ROOT / name).exists(), f"{file.name} includes {name}, which is not at the top level"


def test_table_has_no_cycle():
    """The table itself, and so everything it allows, can be put in one order from the bottom to the top."""
    left, done = {name: set(allowed.split()) for name, allowed in MAY_INCLUDE.items()}, set()
    while left:
        free = {name for name, needs in left.items() if needs <= done}
        assert free, f"a cycle among {sorted(left)}"
        done |= free
        left = {name: needs for name, needs in left.items() if name not in free}


def test_graph_has_no_cycle():
    def visit(name, path):
        assert name not in path, f"cycle: {' -> '.join([*path, name])}"
        for below in GRAPH.get(name, ()):
            visit(below, [*path, name])
    for name in GRAPH:
        visit(name, [])
