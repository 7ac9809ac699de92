"""Random operations on sequences give the bits of a fresh computation (law 1), and the token loop does not allocate (law 5)."""
import itertools
import re

import pytest
from conftest import SANITIZED

MODELS = {
    "llama": ["--arch", "llama"],
    "gemma3": ["--arch", "gemma3", "--layers", 7, "--swa", 40],
    "gemma2": ["--arch", "gemma2", "--layers", 2, "--swa", 33, "--head-dim", 80],
    "qwen2": ["--arch", "qwen2", "--bias", 0.5, "--kv-heads", 1, "--head-dim", 100],
}


@pytest.mark.parametrize("seed, model", list(enumerate(MODELS)))
def test_random_operations(tool, mkfix, seed, model):
    path = mkfix("rand", *MODELS[model])
    layouts, chunks = itertools.cycle([("paged", 32), ("paged", 64), ("contiguous", 32), ("paged", 96)]), itertools.cycle([512, 7, 32, 1, 40])
    for i, kind in enumerate(["f32", "f16", "bf16", "fp8", "int8", "int4"]):
        layout, page = next(itertools.islice(layouts, seed, None))
        chunk, threads = next(chunks), 1 + i % 3
        r = tool("engine", path, *map(str, (seed * 10 + i, 60, layout, page, kind, chunk, threads, 0, 0, int(i % 4 != 3), 0)))
        assert r.rc == 0, r.err
        assert int(r.text.split()[0]) > 60


@pytest.mark.parametrize("window, sinks", [(1, 0), (20, 4), (33, 0), (64, 40), (100, 1)])
def test_random_operations_with_a_window(tool, mkfix, window, sinks):
    for i, (model, kind) in enumerate([("llama", "f16"), ("gemma3", "int8"), ("qwen2", "int4")]):
        r = tool("engine", mkfix("rand", *MODELS[model]),
                 *map(str, (i, 60, "paged", 32 + 32 * (i % 2), kind, [7, 512, 40][i], 1 + i, window, sinks, 1, 0)))
        assert r.rc == 0, r.err
        assert int(r.text.split()[0]) > 60


@pytest.mark.parametrize("kib", [1, 40, 100])
def test_random_operations_with_a_budget(tool, mkfix, kib, tmp_path):
    """Pages go to a file and come back, at any time and in any number: the bits stay."""
    for i, (model, kind) in enumerate([("llama", "f16"), ("gemma3", "int8"), ("qwen2", "int4")]):
        words = [i, 60, "paged", 32 + 32 * (i % 2), kind, [7, 512, 40][i], 1 + i, 0, 0, 1, kib]
        r = tool("engine", mkfix("rand", *MODELS[model]), *map(str, words), cwd=tmp_path)
        assert r.rc == 0, r.err
        checks, reused, out, back = map(int, re.findall(r"\d+", r.text))
        assert checks > 60 and reused > 100 and (kib == 1 or (out > 10000 and (back > 0 or kib > 40)))
    assert list(tmp_path.iterdir()) == []


def test_each_allocation_fails_once(tool, mkfix, tmp_path):
    r = tool("fault", mkfix("rand"), tmp_path)
    assert r.rc == 0, r.err
    assert int(r.text.split()[0]) > (10 if SANITIZED else 50) and list(tmp_path.iterdir()) == []
