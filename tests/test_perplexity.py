"""Real models on a real text, by the method of llama-perplexity: the golden values are llama.cpp's (golden/measure.py
made them), divergences are from the NumPy oracle of the same file.

A float model leaves only rounding. In the shipped files activations are rounded to int8, which any program pays with
about 0.3 % of the perplexity, up or down (0.7 % over two windows), and with a divergence from the exact model of 2e-3;
gen may pay at most a tenth more of that than llama.cpp does."""
import hashlib
import json
import os
import pathlib

import gguf
import numpy as np
import pytest
from conftest import ROOT, SANITIZED
from oracle import Oracle, kl_divergence, read_log_probs

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "perplexity.json").read_text())
WINDOW = 1024

pytestmark = pytest.mark.skipif(SANITIZED, reason="a sanitizer's build is too slow for real models")


@pytest.fixture(scope="module")
def text(data):
    path = data / "eval" / "developers-reference.txt"
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == GOLDEN["text_sha256"], f"{path} is not the text of the golden values"
    return path


def float_model(source, target):
    """Writes the GGUF `source` with all its tensors dequantised to F32 to `target`, unless it is there."""
    if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
        return target
    reader = gguf.GGUFReader(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            item = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], item)
    for t in reader.tensors:
        writer.add_tensor(t.name, gguf.dequantize(t.data, t.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
    return target


@pytest.fixture(scope="module")
def smollm2_f32(smollm2):
    return float_model(smollm2, ROOT / "build" / "models" / "SmolLM2-135M-Instruct.F32.gguf")


@pytest.fixture(scope="module")
def measure(gen, text, tmp_path_factory):
    """measure(model, windows, options...): gen's result object; with save=True also tokens and log-probabilities."""
    saved = tmp_path_factory.mktemp("perplexity") / "logprobs"

    def run(model, windows, *options, save=False):
        r = gen.ok("-m", model, "--perplexity", text, "-c", str(WINDOW), "--chunks", str(windows), "--json",
                   *options, *(["--save-logits", saved] if save else []), timeout=900)
        result = json.loads(r.text)
        assert result["tokens"] == windows * (WINDOW - 1 - WINDOW // 2)
        assert np.isclose(result["perplexity"], np.exp(result["nll"]), rtol=1e-5)
        if not save:
            return result
        tokens, log_probs = read_log_probs(saved)
        saved.unlink()
        return result, tokens, log_probs
    return run


def relative(a, b):
    return abs(a / b - 1)


def against_oracle(model, tokens, log_probs):
    """Perplexity of gen's rows and of the oracle's, their divergences, and the largest difference of log-probabilities
    above -16."""
    oracle = Oracle(model, dtype=np.float32)
    first, nll, kl, worst = WINDOW // 2, [], [], 0.0
    for window, got in zip(tokens, log_probs):
        exact = oracle.log_probs(window, first)[:-1]
        rows, targets = np.arange(len(got)), window[first + 1:]
        nll.append([-got[rows, targets].mean(dtype=np.float64), -exact[rows, targets].mean(dtype=np.float64)])
        kl.append(kl_divergence(exact, got))
        worst = max(worst, float(np.abs(np.where(exact > -16, exact - got, 0)).max()))
    return *np.exp(np.mean(nll, axis=0)), np.concatenate(kl), worst


def golden(name, windows):
    g = GOLDEN[name]
    return g["perplexity_after_each_window"][windows - 1], float(np.mean(g["kl_from_oracle_of_each_window"][:windows]))


def check_tokens(gen, model, text, name):
    """The ids are those of llama.cpp's tokenizer."""
    n = GOLDEN[name]["windows"] * WINDOW
    lines = gen.ok("-m", model, "-f", text, "--dump-tokens").out.split(b"\n")
    ids = np.array([int(line.split(b"\t")[0]) for line in lines[:n]], "<i4")
    assert hashlib.sha256(ids.tobytes()).hexdigest() == GOLDEN[name]["tokens_sha256"]
    return ids.reshape(-1, WINDOW)


def check_shipped(gen, measure, text, model, name, bound, windows, kl_windows):
    """Perplexity over `windows` within `bound` of llama.cpp's; divergence from the oracle over `kl_windows`."""
    ids = check_tokens(gen, model, text, name)
    want, _ = golden(name, windows)
    _, want_kl = golden(name, kl_windows)
    if windows == kl_windows:
        result, tokens, log_probs = measure(model, windows, save=True)
    else:
        result = measure(model, windows)
        _, tokens, log_probs = measure(model, kl_windows, save=True)
    assert (tokens[:, 1:] == ids[:kl_windows, 1:]).all()
    got, exact, kl, _ = against_oracle(model, tokens, log_probs)
    print(f"\n{name}: perplexity of {windows} windows {result['perplexity']:.4f}, llama.cpp {want:.4f}; of "
          f"{kl_windows} windows {got:.4f}, oracle {exact:.4f}; mean KL {kl.mean():.3e}, llama.cpp {want_kl:.3e}")
    assert relative(result["perplexity"], want) <= bound
    assert kl.mean() <= 1.1 * want_kl


def test_float(gen, measure, smollm2_f32, text):
    """SmolLM2 dequantised to F32: within 0.02 % of llama.cpp and of the oracle."""
    check_tokens(gen, smollm2_f32, text, "smollm2_f32")
    result, tokens, log_probs = measure(smollm2_f32, 2, save=True)
    got, exact, kl, worst = against_oracle(smollm2_f32, tokens, log_probs)
    want, _ = golden("smollm2_f32", 2)
    print(f"\nF32: perplexity of 2 windows {result['perplexity']:.4f}, oracle {exact:.4f}, llama.cpp {want:.4f}; "
          f"mean KL {kl.mean():.3e}, largest difference {worst:.3g}")
    assert relative(result["perplexity"], got) <= 1e-5
    assert relative(got, exact) <= 2e-4 and relative(got, want) <= 2e-4
    assert abs(kl.mean()) <= 2e-6 and worst <= 0.1


def test_smollm2(gen, measure, smollm2, text):
    check_shipped(gen, measure, text, smollm2, "smollm2", 0.006, windows=8, kl_windows=2)


def test_gemma3(gen, measure, gemma3, text):
    check_shipped(gen, measure, text, gemma3, "gemma3", 0.01, windows=4, kl_windows=1)


@pytest.mark.long
def test_smollm2_long(gen, measure, smollm2, text):
    check_shipped(gen, measure, text, smollm2, "smollm2", 0.006, windows=8, kl_windows=8)


@pytest.mark.long
def test_gemma3_long(gen, measure, gemma3, text):
    check_shipped(gen, measure, text, gemma3, "gemma3", 0.01, windows=4, kl_windows=4)


@pytest.mark.long
def test_float_with_float_cache(gen, measure, smollm2_f32, text):
    """Without the half-precision cache there is no rounding but float32's."""
    _, tokens, log_probs = measure(smollm2_f32, 2, "-ctk", "f32", "-ctv", "f32", save=True)
    got, exact, kl, worst = against_oracle(smollm2_f32, tokens, log_probs)
    print(f"\nF32, F32 cache: perplexity {got:.4f}, oracle {exact:.4f}; mean KL {kl.mean():.3e}, largest difference "
          f"{worst:.3g}")
    assert relative(got, exact) <= 1e-5 and worst <= 1e-3
