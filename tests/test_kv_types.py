"""What the cache's types cost in quality, and that they cost the same bits however the cache lies and was filled."""
import itertools
import json

import pytest
from conftest import SANITIZED
from make_model import random_model

TYPES = ["f32", "f16", "bf16", "fp8", "int8", "int4"]
PAGES = [["--kv-layout", "contiguous"], ["--page-size", "32"], ["--page-size", "64"], ["--page-size", "96"]]
WAYS = list(itertools.product(PAGES, ["1", "7", "32", "64", "512"], ["1", "3"]))
TEXT = "The law of the cache: a row's result does not depend on how the rows before it came to be there. " * 2


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("types")
    small = {"layers": 2, "heads": 4, "kv_heads": 2, "head_k": 40, "embd": 64, "ff": 64}
    return {"llama": random_model(folder / "llama.gguf", **small),
            "gemma3": random_model(folder / "gemma3.gguf", "gemma3", window=40, **{**small, "layers": 7})}


@pytest.mark.parametrize("arch, window", [("llama", []), ("llama", ["--window", "70", "--sinks", "4"]), ("gemma3", []),
                                          ("gemma3", ["--window", "50"])])
def test_same_bits(gen, models, arch, window):
    """Every pair of types, each in other layouts, chunks and numbers of threads than the one before; prompt and answer
    together are 169 tokens, so that blocks are sealed by both, and then the whole as one prompt."""
    ways = itertools.cycle(WAYS[::3] + WAYS[1::3] + WAYS[2::3])

    def run(text, n, k, v, pages, chunk, threads):
        r = gen.ok("-q", "--temp", "0", "--ignore-eos", "--json", "-m", models[arch], "-p", text, "-n", str(n), "-ctk", k,
                   "-ctv", v, *window, *([] if window and "contiguous" in pages else pages), "-b", chunk, "-t", threads)
        return json.loads(r.text)
    for k, v in itertools.product(TYPES, TYPES):
        prompt, n = TEXT[:150], 19
        want = run(prompt, n, k, v, PAGES[1], "512", "2")
        for _ in range(2):
            way = next(ways)
            got = run(prompt, n, k, v, *way)
            assert (got["tokens"], got["logits_sha256"]) == (want["tokens"], want["logits_sha256"]), (k, v, way)


OUTLIERS = {"fp8": 0.02, "int8": 0.001, "int4": 0.05}


def scores(gen, model, text, tmp_path, kinds, *options):
    base = tmp_path / "base"
    command = ["-q", "-m", model, "--perplexity", text, *options, "--json"]
    gen.ok(*command, "--save-logits", base, timeout=900)
    return {kind: json.loads(gen.ok(*command, "-ctk", kind, "-ctv", kind, "--kl-base", base, timeout=900).text)["kl_mean"]
            for kind in kinds}


def test_outlier_channels(gen, tmp_path):
    """Channels of the keys that stand out by 40 times cost no more than OUTLIERS, and int4 not four times what it costs
    without them."""
    text = tmp_path / "text"
    text.write_text(TEXT * 3)
    kl = {}
    for outliers in (0.0, 20.0):
        model = random_model(tmp_path / f"{outliers}.gguf", bias=True, heads=4, kv_heads=2, head_k=64, layers=2, embd=128, ff=128,
                             outliers=outliers)
        kl[outliers] = scores(gen, model, text, tmp_path, OUTLIERS, "-c", "256", "--chunks", "2")
    print(kl)
    for kind, bound in OUTLIERS.items():
        assert kl[20.0][kind] <= bound, kl
    assert kl[20.0]["int4"] <= 4 * kl[0.0]["int4"]


# The divergence from the f16 cache that a type may cost: over 2 windows of SmolLM2 in floats; and in the shipped files, whose
# int8 activations make any change of the cache cost about as much as bf16 does, as a multiple of that.
FLOAT = {"int8": 0.00017, "fp8": 0.001, "int4": 0.00405}
SHIPPED = {"int8": 1.15, "int4": 2.5}


@pytest.fixture(scope="module")
def text(data):
    return data / "eval" / "developers-reference.txt"


@pytest.mark.skipif(SANITIZED, reason="a sanitizer's build is too slow for real models")
def test_smollm2_in_floats(gen, smollm2, text, tmp_path):
    from conftest import ROOT
    from test_perplexity import float_model
    model = float_model(smollm2, ROOT / "build" / "models" / "SmolLM2-135M-Instruct.F32.gguf")
    kl = scores(gen, model, text, tmp_path, FLOAT, "-c", "1024", "--chunks", "2")
    print(kl)
    for kind, bound in FLOAT.items():
        assert kl[kind] <= bound, kl


@pytest.mark.long
@pytest.mark.parametrize("name, windows", [("smollm2", 2), ("gemma3", 4)])
def test_shipped_files(gen, request, text, tmp_path, name, windows):
    model = request.getfixturevalue(name)
    kl = scores(gen, model, text, tmp_path, ["bf16", *SHIPPED], "-c", "1024", "--chunks", str(windows))
    print(kl)
    for kind, bound in SHIPPED.items():
        assert kl[kind] <= bound * kl["bf16"], kl
