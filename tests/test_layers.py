"""Dependencies between the files at the top level point one way, as the table says."""
import re

import pytest
from conftest import ROOT

# Which project headers a unit (NAME.h, NAME.c, NAME_*.c and so on together) may include beside its own and base.h,
# which all may.
MAY_INCLUDE = {
    # the program
    "gen": "answer batch bench chat comm engine gguf input inspect kvreport kvstore lookup measure memory model options"
           " output probe ranks result sampler tokenizer usage",
    "usage": "options",
    "output": "options tokenizer",
    "options": "sampler",
    # what it does
    "answer": "engine lookup sampler tokenizer",
    "inspect": "engine gguf json kvstore memory output result",
    "measure": "engine tokenizer json",
    "kvreport": "engine tokenizer json measure inspect result gguf output",
    "bench": "engine json memory probe quant",
    "batch": "answer comm engine journal json jsonl kvcache output result sampler tokenizer",
    "jsonl": "chat gguf json options tokenizer",
    "journal": "json output",
    "result": "engine json sampler tokenizer",
    "chat": "answer engine gguf jinja json kvstore line options output sampler tokenizer",
    "engine": "model kvcache kvstore backend lookup comm ranks",
    # its parts
    "input": "",
    "jinja": "tokenizer",
    "json": "",
    "sampler": "",
    "line": "utf8",
    "lookup": "",
    "memory": "",
    "probe": "kernels threads",
    "tokenizer": "gguf pretokenizer utf8",
    "pretokenizer": "utf8",
    "utf8": "",
    "model": "gguf quant",
    "gguf": "quant threads",
    "quant": "",
    "base": "",
    # the machine
    "backend": "kvcache model",
    "ranks": "backend comm kvcache",
    "cpu": "backend comm memory model kvcache quant kernels threads",
    "kernels": "kvcache model quant",
    "threads": "memory",
    "cuda": "attention backend device exchange model kvcache quant select",
    "nocuda": "backend",
    "attention": "device kvcache model",
    "select": "backend device",
    "device": "",
    "exchange": "comm device",
    "kvcache": "",
    "kvstore": "kvcache threads",
    "comm": "",
}
# These are parts of the unit kernels, as is everything that is compiled once per instruction set.
KERNELS = {"vector.h", "layer.inc", "matmul.inc", "processor.h"}


def unit(path):
    return "kernels" if path.name in KERNELS else path.stem.split("_")[0]


def includes(path):
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M)


FILES = sorted(path for suffix in ("c", "h", "inc", "cu") for path in ROOT.glob(f"*.{suffix}"))
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
