"""cuda_counters.py CUDA_TOOL [DEPTH] - what one decode step of a model of 4 layers and width 1,024 asks of the device, counted
by the emulator for each type of cache; prints the table of the README's CUDA section. Nothing is timed.

The step is the difference between two runs, one a token longer than the other."""
import json
import os
import subprocess
import sys
import tempfile

import gguf
from make_model import random_model

LAYERS, KV_HEADS, HEAD, BLOCK = 4, 4, 64, 32
MODEL = {"layers": LAYERS, "embd": 1024, "ff": 1024, "heads": 16, "kv_heads": KV_HEADS, "head_k": HEAD, "ctx": 8192}
TYPES = "f32 f16 bf16 fp8 int8 int4".split()


def tile_bytes(kind, keys):
    """kv_tile_bytes of kvcache.h, for heads of a multiple of 32 channels, 64 or more."""
    codes = HEAD * BLOCK * {"f32": 8, "f16": 4, "bf16": 4, "fp8": 2, "int8": 2, "int4": 1}[kind] // 2
    if kind == "int4":
        return codes + (3 * HEAD if keys else HEAD // 32 * BLOCK)
    return codes + {"fp8": 1, "int8": HEAD // 32}.get(kind, 0) * BLOCK * 2


def least_cache(depth, kind):
    """Bytes of all keys and values that a step at `depth` (a multiple of 32 and one) sees: whole tiles, block 0 and the last one
    raw where the type is sealed."""
    raw = "f16" if kind in ("fp8", "int8", "int4") else kind
    both = lambda t: tile_bytes(t, True) + tile_bytes(t, False)
    return LAYERS * KV_HEADS * ((depth // BLOCK - 1) * both(kind) + 2 * both(raw))


def least_weights(path):
    """Bytes of all matrices that a step multiplies with: all but the embedding."""
    return sum(int(t.n_bytes) for t in gguf.GGUFReader(path).tensors if len(t.shape) == 2 and t.name != "token_embd.weight")


def counters(tool, path, **words):
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        r = subprocess.run([str(tool), path, *(f"{k}={v}" for k, v in words.items())], capture_output=True, text=True,
                           env={**os.environ, "CUDA_EMULATOR": f"memory={4 << 30},counters={f.name}"})
        assert r.returncode == 0, r.stderr[-2000:]
        return json.load(open(f.name))


def step(tool, path, depth, kind, first=2):
    """Sums over one decode step: {"launches": n, "weights": {...}, "cache": {...}, "other": {...}}; each with requests, bytes,
    sectors and distinct sectors that were read."""
    before, after = (counters(tool, path, depth=depth, steps=n, k=kind, v=kind, ctx=2 * depth) for n in (first, first + 1))
    out = {"launches": 0, **{label: dict.fromkeys(("requests", "bytes", "sectors", "distinct"), 0) for label in ("weights", "cache", "other")}}
    for kernel, now in after.items():
        if kernel == "copies to the host":
            continue
        was = before.get(kernel, {"launches": 0, "reads": {}})
        out["launches"] += now["launches"] - was["launches"]
        for label, sums in now["reads"].items():
            for key, value in sums.items():
                out[label if label in out else "other"][key] += value - was["reads"].get(label, {}).get(key, 0)
    return out


def weight_ratios(counted, path):
    """Bytes of matrices that a step asks for over the least, and bytes of the sectors that these requests touch."""
    least = least_weights(path)
    return counted["weights"]["bytes"] / least, 32 * counted["weights"]["sectors"] / least


def table(tool, path, depth, types=TYPES):
    """A row for each type of cache: ratios to the least, and what is read beside matrices and cache: activations, norms, tables."""
    rows = []
    for kind in types:
        s, least = step(tool, path, depth, kind), least_cache(depth, kind)
        weights, weight_sectors = weight_ratios(s, path)
        rows.append({"kind": kind, "launches": s["launches"], "weights": weights, "weight_sectors": weight_sectors,
                     "cache": s["cache"]["bytes"] / least, "cache_sectors": 32 * s["cache"]["sectors"] / least,
                     "other_requests": s["other"]["requests"], "other_bytes": s["other"]["bytes"],
                     "other_distinct": 32 * s["other"]["distinct"]})
    return rows


def main():
    tool, depth = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    with tempfile.TemporaryDirectory() as folder:
        path = random_model(f"{folder}/model.gguf", weight="Q4_K", **MODEL)
        print("| cache | launches | weights read / least | their sectors | K, V read / least | their sectors | other reads | KiB | distinct KiB |")
        print("|---|---|---|---|---|---|---|---|---|")
        for kind in TYPES:
            r, = table(tool, path, depth, [kind])
            print(f"| {r['kind']} | {r['launches']} | {r['weights']:.3f} | {r['weight_sectors']:.3f} | {r['cache']:.3f} | {r['cache_sectors']:.3f} "
                  f"| {r['other_requests']} | {r['other_bytes'] / 1024:.0f} | {r['other_distinct'] / 1024:.0f} |", flush=True)


if __name__ == "__main__":
    main()
