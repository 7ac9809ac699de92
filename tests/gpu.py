"""What tests/gpu.sh runs once everything is built: comparisons, compute-sanitizer, timings; one table, one JSON file."""
import itertools
import json
import os
import shutil
import subprocess
import sys
import time

B, EMULATED, CUDA_HOME = os.environ["B"], bool(os.environ["EMULATED"]), os.environ["CUDA_HOME"]
TYPES = "f32 f16 bf16 fp8 int8 int4".split()
# Largest differences of log-probabilities. Sums are floats in another order, which is 1e-5 with a cache of f32. Other types round
# keys and values, and what lies near the middle of two steps may be rounded the other way: CUDA starts from the CPU's whole blocks
# (hand=1), and such flips of the last few tokens stay below 5e-4 on the emulator. With quantised weights an activation may be rounded
# to the other of two int8 steps: 0.06 was the most in 24 runs of these two models on the emulator.
FLOAT, CACHE, INT8 = 1e-4, 1e-3, 0.12
result, wrong = {"emulated": EMULATED, "compare": [], "sanitizer": [], "times": []}, []


def run(*command, limit=240):
    r = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=limit)
    if r.returncode:
        wrong.append(f"{' '.join(map(str, command))}: exit {r.returncode}: {(r.stdout + r.stderr).strip()[-500:]}")
        return None
    return r.stdout


def model(name, *shape):
    path = f"{B}/{name}.gguf"
    if not os.path.exists(path):
        run(f"{B}/gpu_model", path, *shape)
    return path


def compare(path, bound, *words):
    out = run(f"{B}/cuda_tool", path, *words)
    if out is None:
        return
    got = json.loads(out)
    entry = {"model": os.path.basename(path), "words": words, **got}
    result["compare"].append(entry)
    for kind in "prefill", "decode", "extend", "together":
        if not got[kind] <= bound:     # NaN is wrong as well
            wrong.append(f"{entry['model']} {' '.join(words)}: {kind} differs by {got[kind]}, more than {bound}")
    print(f"  {entry['model']:22} {' '.join(words):28} " + " ".join(f"{k} {got[k]:.1e}" for k in got if k != "hash"))
    return got["hash"]


def comparisons():
    print("Log-probabilities beside the CPU backend's (largest difference)")
    small = model("f32", "F32", 1, 128, 256, 4, 2, 512)
    quantised = model("q8_0", "Q8_0", 1, 256, 256, 4, 2, 512)
    k_quants = model("q4_k", "Q4_K", 1, 256, 256, 4, 2, 512)
    wide = model("heads", "F32", 1, 512, 256, 8, 1, 512)
    compare(small, FLOAT, "k=f32", "v=f32", "prompt=70", "steps=2")
    for k in TYPES[3:] if EMULATED else TYPES[1:]:
        compare(small, CACHE, "hand=1", f"k={k}", f"v={k}", "prompt=70", "steps=2")
    for k in ("f16", "int4") if EMULATED else TYPES[1:]:         # all by the tensor cores
        compare(wide, CACHE, "hand=1", f"k={k}", f"v={k}", "prompt=70", "steps=2")
    hashes = {compare(small, FLOAT, "k=f32", "v=f32", f"page={p}") for p in (32, 64)}
    hashes.add(compare(small, FLOAT, "k=f32", "v=f32", "layout=contiguous"))
    if len(hashes) != 1:
        wrong.append("paged and contiguous caches give different bits")
    for path in quantised, k_quants:
        compare(path, INT8, "prompt=8", "chunk=8", "k=f32", "v=f32")


def largest_logits():
    out = run(f"{B}/select_tool")
    if out:
        result["select"] = json.loads(out)
        print(f"Largest logits beside a sort: {result['select']['rows']} rows, {result['select']['left']} of them left to the host")


def sanitizer():
    tool = shutil.which("compute-sanitizer") or f"{CUDA_HOME}/bin/compute-sanitizer"
    if EMULATED or not os.path.exists(tool):
        print("compute-sanitizer: " + ("the emulator checks every access itself" if EMULATED else "not installed"))
        return
    for check in "memcheck", "racecheck":
        out = run(tool, "--tool", check, "--error-exitcode", 9, f"{B}/cuda_tool", f"{B}/f32.gguf", "cpu=0", "k=int8",
                  "v=int4", "prompt=40", "steps=2")
        result["sanitizer"].append({"check": check, "clean": out is not None})
        print(f"compute-sanitizer {check}: {'clean' if out is not None else 'FAILED'}")


def timed(*command):
    out = run(f"{B}/gpu_time", *command)
    entry = json.loads(out) if out else None
    if entry:
        result["times"].append(entry)
    return entry


def torch_attention(depth, heads, kv_heads, size):
    """Median microseconds of PyTorch's scaled_dot_product_attention in f16, cold second-level cache; None without it."""
    try:
        import torch
        import torch.nn.functional as functional
        copies = max(2, int(256e6 / (4 * depth * kv_heads * size)) + 1)
        make = lambda h, n: torch.randn(1, h, n, size, device="cuda", dtype=torch.float16)
        q, kv = make(heads, 1), [(make(kv_heads, depth), make(kv_heads, depth)) for _ in range(copies)]
        spent = []
        for i in range(22):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            functional.scaled_dot_product_attention(q, *kv[i % copies], enable_gqa=True)
            b.record()
            b.synchronize()
            spent.append(a.elapsed_time(b) * 1000)
        return sorted(spent[2:])[10]
    except Exception as error:         # no PyTorch, or one without a device
        result["torch"] = str(error)
        return None


def times():
    copy = timed("copy", 1 if EMULATED else 2048)
    if not copy:
        return
    peak = copy["gb_per_s"]
    print(f"Device copy: {peak:.0f} GB/s")
    print("Attention of one token (cold cache)")
    print(f"  {'heads':>9} {'type':6} {'depth':>8} {'us':>9} {'GB/s':>8} {'of copy':>8} {'PyTorch us':>11}")
    shapes = [(8, 2, 32), (8, 1, 64)] if EMULATED else [(32, 8, 128), (32, 4, 128), (32, 2, 128)]
    for shape, depth in itertools.product(shapes, (100, 300) if EMULATED else (1024, 4096, 16384, 65536, 262144)):
        beside = None if EMULATED else torch_attention(depth, *shape)
        for k in TYPES[1:] if shape == shapes[0] else ("f16", "fp8"):
            t = timed("attention", k, k, depth, *shape, 1 if EMULATED else 20)
            if t and not t["finite"]:
                wrong.append(f"attention {k} {depth} {shape}: the result is zero or not finite")
            if t:
                t["torch_us"] = beside if k == "f16" else None
                other = f"{beside:11.1f}" if beside and k == "f16" else ""
                print(f"  {shape[0]:3} on {shape[1]:2} {k:6} {depth:8} {t['us']:9.1f} {t['gb_per_s']:8.0f} {t['gb_per_s'] / peak:8.0%} {other}")
    print("Largest logits of each row")
    print(f"  {'words':>8} {'top-k':>6} {'rows':>5} {'us':>8} {'copy of a row us':>17}")
    for n, k, rows in itertools.product((3000,) if EMULATED else (32000, 128256, 262144), (1, 40, 128), (1, 8)):
        t = timed("select", n, k, rows, 1 if EMULATED else 50)
        if t and t["found"] != k:
            wrong.append(f"select {n} {k}: {t['found']} are found")
        if t:
            print(f"  {n:8} {k:6} {rows:5} {t['us']:8.1f} {t['copy_us']:17.1f}")
    print("Whole models, random weights")
    print(f"  {'model':12} {'prefill t/s':>12} {'TFLOP/s':>8} {'decode t/s':>11} {'GB/s':>7} {'of copy':>8}")
    shapes = {"1B": (16, 2048, 8192, 32, 8, 32000), "8B": (32, 4096, 14336, 32, 8, 128256)}
    if EMULATED:
        shapes = {"tiny": (1, 256, 256, 4, 2, 512)}
    for name, shape in shapes.items():
        for kind in "Q4_K", "Q8_0":
            path = model(f"{name}-{kind}", kind, *shape)
            t = timed("model", path, "f16", *((9, 1, 64) if EMULATED else (2048, 128, 4096)))
            if not t or not t["finite"]:
                wrong.append(f"{name} {kind}: logits are not finite")
                continue
            print(f"  {name + ' ' + kind:12} {t['prefill_tokens_per_s']:12.0f} {t['prefill_tflops']:8.1f} "
                  f"{t['decode_tokens_per_s']:11.1f} {t['decode_gb_per_s']:7.0f} {t['decode_gb_per_s'] / peak:8.0%}")


begin = time.time()
for part in comparisons, largest_logits, sanitizer, times:
    part()
result["seconds"], result["wrong"] = time.time() - begin, wrong
with open(f"{B}/result.json", "w") as f:
    json.dump(result, f, indent=1)
print(f"{time.time() - begin:.0f} s, {B}/result.json")
for line in wrong:
    print("WRONG:", line)
sys.exit(bool(wrong))
