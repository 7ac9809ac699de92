"""Random operations on sequences give the bits of a fresh computation (law 1), and the token loop does not allocate (law 5)."""
import itertools

import pytest

MODELS = {
    "llama": ["--arch", "llama"],
    "gemma3": ["--arch", "gemma3", "--layers", 7, "--swa", 40],
    "gemma2": ["--arch", "gemma2", "--layers", 2, "--swa", 33, "--head-dim", 80],
    "qwen2": ["--arch", "qwen2", "--bias", 0.5, "--kv-heads", 1, "--head-dim", 100],
}


@pytest.mark.parametrize("seed, model", list(enumerate(MODELS)))
def test_random_operations(tool, mkfix, seed, model):
    path = mkfix("rand", *MODELS[model])
    settings = itertools.cycle([("paged", 32, "f16", 512, 2), ("paged", 64, "f32", 7, 3), ("contiguous", 32, "f16", 32, 1)])
    for i, (layout, page, kind, chunk, threads) in zip(range(6), itertools.islice(settings, seed, None)):
        r = tool("engine", path, *map(str, (seed * 10 + i, 60, layout, page, kind, chunk, threads)))
        assert r.rc == 0, r.err
        assert int(r.text.split()[0]) > 60
