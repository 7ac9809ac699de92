"""The CUDA backend on the emulator (tests/emulator) against the CPU backend: log-probabilities of tiny models after the same
steps, and the same bits from run to run, in any order of threads, contiguous or paged.

Bounds. Sums are floats in both, but in other orders. With a cache of f32 that is all there is (4e-5 is the most measured). Other
types round keys and values, and what lies near the middle between two steps may be rounded the other way; so where a
cache is not f32, CUDA starts from the whole blocks of the CPU's (hand=1), and what is left of such flips is that of
the last few tokens."""
import itertools
import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
from conftest import BUILD, ROOT
import cuda_counters
from make_model import ARCHITECTURES, WEIGHT_TYPES

FLOAT_BOUND, BOUND = 1e-4, 1e-3
STEPS = ("prefill", "decode", "extend", "together")
TYPES = "f32 f16 bf16 fp8 int8 int4".split()
SMALL = {"embd": 128, "ff": 128, "head_k": 32}
WIDE = {"embd": 256, "ff": 256, "head_k": 64, "layers": 1}           # whole blocks of the K-quants in every row
TOOL = BUILD / "emulated" / "cuda_tool"

if not list(ROOT.glob("*.cu")):
    pytest.skip("there is no CUDA backend", allow_module_level=True)


@pytest.fixture(scope="module")
def model(tiny):
    return lambda **arguments: tiny(**{**SMALL, **arguments})


def emulated(*command, settings="", stdin=""):
    """Runs a program on the emulator."""
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600, cwd=ROOT, input=stdin,
                          env={**os.environ, "CUDA_EMULATOR": settings})


def emulate(*command, **how):
    """The stdout of a program that must succeed."""
    r = emulated(*command, **how)
    assert r.returncode == 0, f"{command}: {r.returncode}\n{r.stderr[-2000:]}"
    return r.stdout


def at_once(function, *arguments):
    """Its results for each of the arguments: programs that do not depend on each other, on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, *arguments))


def steps(path, settings="", **words):
    """The result of cuda_tool."""
    if not TOOL.exists():
        pytest.fail(f"{TOOL} is not there: make emulated builds it")
    return json.loads(emulate(TOOL, path, *(f"{k}={v}" for k, v in words.items()), settings=settings))


def compare(path, bound=None, kinds=STEPS, **words):
    f32 = words.get("k", "f16") == words.get("v", "f16") == "f32"
    r = steps(path, **({} if f32 else {"hand": 1}), **words)
    for kind in kinds:
        assert r[kind] <= (bound or (FLOAT_BOUND if f32 else BOUND)), f"{kind}: {r}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architectures(model, arch):
    options = {"caps": (50.0, 30.0)} if arch == "gemma2" else {}
    if arch.startswith("gemma"):
        options |= {"window": 40, "layers": 6 if arch == "gemma3" else 2}
    compare(model(arch=arch, **options), k="f32", v="f32")


# (query heads, KV heads, head size): groups of 1 to 16, MQA, sizes that are padded.
HEADS = [(4, 4, 32), (4, 1, 64), (6, 2, 32), (12, 2, 32), (7, 1, 32), (8, 1, 80), (16, 1, 32), (4, 2, 96), (2, 1, 100),
         (4, 2, 128), (2, 1, 256)]


@pytest.mark.parametrize("heads, kv_heads, head", HEADS)
def test_heads(model, heads, kv_heads, head):
    path = model(heads=heads, kv_heads=kv_heads, head_k=head, layers=1)
    compare(path, k="f32", v="f32", prompt=45)
    compare(path, k="int8", v="int4", prompt=45, page=64)


# Keys and values; groups of 5 heads and more are the tensor cores' in decode, too.
@pytest.mark.parametrize("k, v, heads, head, words", [
    ("f16", "f16", 8, 64, {}), ("f16", "f16", 12, 128, {"page": 64}), ("f16", "bf16", 8, 256, {}), ("int8", "int8", 8, 256, {}),
    ("bf16", "f16", 5, 96, {"window": 64, "sinks": 40, "prompt": 150}), ("fp8", "fp8", 16, 80, {"window": 20, "sinks": 4, "prompt": 110}),
    ("int4", "int4", 16, 128, {"window": 64, "sinks": 40, "prompt": 150}), ("f16", "int8", 16, 64, {}), ("int8", "f16", 8, 32, {}),
    ("int4", "fp8", 8, 48, {"window": 33, "prompt": 110}), ("bf16", "int4", 16, 64, {})])
def test_tensor_cores(model, k, v, heads, head, words):
    compare(model(heads=heads, kv_heads=1, head_k=head, layers=1), k=k, v=v, **words)


@pytest.mark.parametrize("kind", ["f16", "int8"])
def test_little_shared_memory(model, kind):
    """A device whose blocks have 99 KiB (compute capability 8.6, 8.9): prompts go in smaller pieces where heads are large."""
    compare(model(heads=4, kv_heads=1, head_k=256, layers=1), settings=f"shared={99 << 10}", k=kind, v=kind)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_large_scales(model, kind):
    """Values whose scales are more than 1, so that the weights have another unit; layers add them to what they outweigh."""
    compare(model(arch="qwen2", heads=8, kv_heads=1, layers=1, v_bias=3000.0), k=kind, v=kind)


PAIRS = list(itertools.product(TYPES, TYPES))


@pytest.mark.parametrize("k, v", [(t, t) for t in TYPES[1:]] + [("f16", "int8"), ("int8", "int4"), ("fp8", "f32"), ("f32", "int4")])
def test_types(model, k, v):
    compare(model(layers=1), k=k, v=v)


@pytest.mark.long
@pytest.mark.parametrize("k, v", PAIRS)
def test_all_types_and_shapes(model, k, v):
    for heads, kv_heads, head in HEADS:
        compare(model(heads=heads, kv_heads=kv_heads, head_k=head, layers=1), k=k, v=v, prompt=75)
    for window, sinks in [(1, 0), (20, 4), (33, 0), (64, 40)]:
        compare(model(layers=1), k=k, v=v, window=window, sinks=sinks, prompt=150)


@pytest.mark.parametrize("window, sinks, kind", [(1, 0, "f32"), (20, 4, "f32"), (33, 0, "int8"), (64, 40, "int4")])
def test_windows(model, window, sinks, kind):
    compare(model(layers=1), window=window, sinks=sinks, k=kind, v=kind, prompt=110)


@pytest.mark.parametrize("weight", WEIGHT_TYPES)
def test_weight_types(model, weight):
    """Prompts of one token take the path of matrix times vector, with the CPU's activation format where weights are quantised."""
    compare(model(weight=weight, **WIDE), bound=BOUND, k="f32", v="f32", prompt=1, steps=2)


def dequantised(path, out):
    """The same model with its weights in F32."""
    r = gguf.GGUFReader(path)
    w = gguf.GGUFWriter(out, r.fields["general.architecture"].contents())
    for field in r.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            value, kind = field.contents(), field.types[0]
            if kind == gguf.GGUFValueType.ARRAY:
                w.add_array(field.name, value)
            else:
                w.add_key_value(field.name, value, kind)
    for t in r.tensors:
        w.add_tensor(t.name, gguf.dequantize(t.data, t.tensor_type).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return out


@pytest.mark.parametrize("weight", ["Q8_0", "Q4_K", "Q6_K"])
def test_prefill_of_quantised_weights(model, weight, tmp_path):
    """cuBLAS multiplies the weights themselves, in half precision, with activations that are not quantised: compared
    with the model in F32 on the CPU. The one row of the prompt that wants logits meets an output matrix in F32."""
    path = model(weight=weight, out_weight="F32", **WIDE)
    compare(path, bound=2e-2, kinds=["prefill"], oracle=dequantised(path, str(tmp_path / "f32.gguf")), k="f32", v="f32", steps=0)


@pytest.mark.parametrize("arch, kind, more", [("llama", "f16", {}), ("gemma3", "int8", {"window": 40}), ("qwen2", "int4", {}),
                                              ("llama", "int8", {"heads": 8, "kv_heads": 1, "layers": 1})])
def test_same_bits(model, arch, kind, more):
    """From run to run, for any order of threads and blocks, any page size."""
    path = model(arch=arch, **{"layers": 2, **more})
    runs = [("", {}), ("", {}), ("seed=1", {}), ("seed=2", {"page": 64}), ("seed=3", {"layout": "contiguous"})]
    hashes = at_once(lambda run: steps(path, run[0], cpu=0, k=kind, v=kind, **run[1])["hash"], runs)
    assert len(set(hashes)) == 1, hashes


def test_program(model):
    """The whole program: greedy text is the CPU's."""
    gen = BUILD / "emulated" / "gen"
    path = model(arch="qwen3")
    words = [gen, "-m", path, "-p", "hello", "--temp", "0", "-n", "12", "--ignore-eos", "-c", "256", "-ctk", "f32", "-ctv", "f32", "-q"]
    assert emulate(*words, "--backend", "cuda") == emulate(*words, "--backend", "cpu")
    assert emulate(*words, "--backend", "cuda", "--lookup") == emulate(*words, "--backend", "cpu")


@pytest.mark.parametrize("options, least, most", [
    (["--temp", "0"], 12, 12), (["--temp", "0", "--lookup"], 0, 100), (["--temp", "0", "--repeat-penalty", "1.1"], 1000, 1100),
    ([], 324, 324), (["--top-k", "128"], 1028, 1028), (["--lookup"], 0, 3300), (["--top-k", "0"], 1000, 1100),
    (["--json", "--logprobs", "0"], 1000, 1100)])
def test_bytes_read_back(model, tmp_path, options, least, most):
    """A token is so many bytes of the device's: the k logits that it is chosen among and their ids, or all logits. (Here these are
    no more: 258 words.)"""
    gen, path, counted = BUILD / "emulated" / "gen", model(layers=1), []
    for n in 8, 9:
        file = tmp_path / f"{n}.json"
        emulate(gen, "-m", path, "-p", "hello", "-s", "1", "-n", n, "--ignore-eos", "-c", "256", "-q", "--backend", "cuda", *options,
                settings=f"counters={file}")
        kernels = json.loads(file.read_text())
        copied = sum(r["bytes"] for r in kernels.pop("copies to the host")["reads"].values()) if "copies to the host" in kernels else 0
        counted.append(copied + sum(r["writes"].get("host", {"bytes": 0})["bytes"] for r in kernels.values()))
    assert least <= counted[1] - counted[0] <= most


def test_largest_logits():
    """Rows of many lengths beside a sort: ties, infinities, NaN. What is chosen does not depend on the order of threads."""
    told = at_once(lambda seed: emulate(BUILD / "emulated" / "select_tool", settings=seed), ["", "seed=1", "seed=2"])
    assert len(set(told)) == 1, told


SAMPLING = [["--temp", "2"], ["--temp", "2", "--top-k", "1"], ["--temp", "3", "--top-k", "2", "--top-p", "1", "--min-p", "0"],
            ["--temp", "3", "--top-k", "128", "--top-p", "1", "--min-p", "0"], ["--temp", "3", "--top-k", "129", "--min-p", "0"],
            ["--temp", "3", "--typical-p", "0.6"], ["--temp", "3", "--min-p", "0.3", "--top-p", "0.5"], ["--temp", "2", "--lookup"]]


def test_sampled_text(model):
    """It is the same by the largest logits as by all of them, which --logprobs asks for."""
    gen, path = BUILD / "emulated" / "gen", model(layers=1)
    runs = [[*options, "-s", str(seed), *more] for seed, options in enumerate(SAMPLING) for more in ([], ["--logprobs", "0"])]
    told = at_once(lambda words: json.loads(emulate(gen, "-m", path, "-p", "hello", "-n", "8", "--ignore-eos", "-c", "256", "-q", "--json",
                                                    "--backend", "cuda", *words)), runs)
    for few, all in zip(told[::2], told[1::2]):
        assert few["tokens"] == all["tokens"] and few["logits_sha256"] == all["logits_sha256"]
    assert len({str(t["tokens"]) for t in told}) >= len(SAMPLING)


def test_sampled_batch(model, tmp_path):
    """Lines that choose among other numbers of logits in one pass: each draws as it does alone."""
    gen, path = BUILD / "emulated" / "gen", model(layers=1)
    lines = [{"prompt": "hello" * (1 + i), "seed": i, "temp": 2, "top-k": k} for i, k in enumerate((40, 1, 128, 0, 3))]

    def answers(name, lines, *more):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        out = emulate(gen, "-m", path, "--batch", tmp_path / name, "-n", "6", "--ignore-eos", "-c", "128", "-q", "--backend", "cuda", *more)
        return [json.loads(line)["response"] for line in out.splitlines()]
    together = answers("all", lines, "-np", "5")
    alone = at_once(lambda i: answers(str(i), [lines[i]])[0], range(len(lines)))
    assert [t["tokens"] for t in together] == [t["tokens"] for t in alone]


@pytest.mark.parametrize("sampling", [["--temp", "0"], []])
def test_nan_among_logits(model, tmp_path, sampling):
    """The device tells no largest logits then, and what is wrong is told as on the CPU."""
    path = shutil.copy(model(layers=1, weight="F32"), tmp_path / "nan.gguf")
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name == "output.weight":
            tensor.data[97] = np.nan
            tensor.data.flush()
    gen = BUILD / "emulated" / "gen"
    told = [subprocess.run([gen, "-m", path, "-p", "hello", *sampling, "-s", "1", "-c", "64", "-q", "--backend", backend],
                           capture_output=True, text=True, timeout=600, cwd=ROOT) for backend in ("cuda", "cpu")]
    assert told[0].returncode == told[1].returncode == 1 and "is not a number" in told[0].stderr
    assert told[0].stderr == told[1].stderr


@pytest.mark.parametrize("types, depth", [(["int8"], 512), pytest.param(TYPES, 4096, marks=pytest.mark.long)])
def test_traffic_of_a_step(model, types, depth):
    """A decode step of L layers is 5 L + 3 launches, and reads matrices and cache once, by whole sectors."""
    path = model(weight="Q4_K", **cuda_counters.MODEL)
    for r in cuda_counters.table(TOOL, path, depth, types):
        assert r["launches"] == 5 * cuda_counters.LAYERS + 3, r
        assert r["weights"] <= 1.001 and r["weight_sectors"] <= 1.001, r
        assert r["cache"] <= 1.001 and r["cache_sectors"] <= 1.001, r


@pytest.mark.parametrize("weight", WEIGHT_TYPES)
def test_traffic_of_weights(model, weight):
    """Matrices are kept as small as in the file (Q3_K: 112 bytes for 110). A warp's request for the d of Q2_K is half a sector, for
    that of Q6_K a quarter, which the next request of a longer row finds in the first-level cache."""
    path = model(weight=weight, **{**cuda_counters.MODEL, "layers": 1, "kv_heads": 1})
    bytes, sectors = cuda_counters.weight_ratios(cuda_counters.step(TOOL, path, 32, "f16", first=0), path)
    assert bytes <= 1.02 and sectors <= (1.05 if weight == "Q2_K" else 1.03), (bytes, sectors)


# ---- tests/gpu.sh, which compiles a list of files of its own

def symbols(path):
    """(defined, undefined) global names of an object."""
    lines = subprocess.run(["nm", "-gP", str(path)], capture_output=True, text=True, check=True).stdout.splitlines()
    kinds = [line.split()[:2] for line in lines]
    return {name for name, kind in kinds if kind not in "Uwv"}, {name for name, kind in kinds if kind == "U"}


def test_gpu_script_has_all_sources(tmp_path):
    """What its files call of gen's is among them, and what they call of libraries is in tests/gpu."""
    names = subprocess.run(["sh", "tests/gpu.sh", "--sources"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    timer = tmp_path / "gpu_time.o"
    subprocess.run(["g++", "-x", "c++", "-std=gnu++17", "-Itests/emulator", "-I.", "-c", "tests/gpu_time.cu", "-o", timer], check=True, cwd=ROOT)
    emulated_objects = [BUILD / "emulated" / f"{name}.o" for name in ("attention", "cuda", "exchange", "select")]
    used = [symbols(path) for path in [BUILD / f"{name}.o" for name in names] + emulated_objects + [BUILD / "tests" / "cuda_tool.o", timer]]
    defined, wanted = (set().union(*parts) for parts in zip(*used))
    ours = {name: path.stem for path in BUILD.glob("*.o") for name in symbols(path)[0]}
    missing = {name: ours[name] for name in wanted - defined if name in ours}
    assert not missing, f"tests/gpu.sh lacks {missing}"
    stand_ins = "".join(path.read_text() for path in (ROOT / "tests" / "gpu").rglob("*.h"))
    library = {name for name in wanted if name.startswith(("nettle_", "utf8proc_", "json_", "pcre2_", "sqlite3_", "el_"))}
    assert all(name.removeprefix("nettle_") in stand_ins for name in library), library
