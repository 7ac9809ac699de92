#!/usr/bin/env python3
"""Measures what llama.cpp makes of the two models, and writes it to perplexity.json beside this file.

    tests/golden/measure.py LLAMA_PERPLEXITY SMOLLM2.gguf SMOLLM2_F32.gguf GEMMA3.gguf TEXT

LLAMA_PERPLEXITY is the program of a llama.cpp build for the CPU, TEXT is eval/developers-reference.txt of the
conformance data, and the F32 file is made by tests/test_perplexity.py (`float_model`). Each run is

    llama-perplexity -m MODEL -f TEXT -c 1024 -b 1024 --chunks N -t 2 --save-all-logits FILE

and its divergence from the NumPy oracle of the same file is taken over the saved rows. These are 16-bit steps from 16
below the best logit up; what lies lower is saved as if it lay there, so it is left out of the sum: it holds 2e-4 of the
probability, and the divergence of the F32 model comes out below 1e-6.
"""
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from oracle import Oracle, windows  # noqa: E402


def saved_rows(f):
    """The tokens in an open file, and for each window the scored rows' log-probabilities, NaN where none was saved."""
    assert f.read(8) == b"_logits_"
    n_ctx, n_vocab, n_windows = np.fromfile(f, "<i4", 3)
    tokens = np.fromfile(f, "<i4", n_ctx * n_windows)
    rows, width = n_ctx - 1 - n_ctx // 2, (n_vocab + 1) // 2 * 2 + 4

    def each():
        for _ in range(n_windows):
            words = np.fromfile(f, "<u2", rows * width).reshape(rows, width)
            scale, low = words[:, :4].copy().view("<f4").T[:, :, None]
            steps = words[:, 4:4 + n_vocab]
            yield np.where(steps > 0, low + scale * steps, np.float32(np.nan))
    return tokens, each()


def measure(program, model, text, n, n_kl, bos):
    with tempfile.NamedTemporaryFile(dir=HERE.parent.parent / "build") as saved:
        command = [program, "-m", model, "-f", text, "-c", "1024", "-b", "1024", "--chunks", str(n), "-t", "2",
                   "--save-all-logits", saved.name]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        cpu = re.search(r"CPU : (.*?) \| OPENMP", run.stdout + run.stderr)
        running = [float(x) for x in re.findall(r"\[\d+\]([0-9.]+)", run.stdout + run.stderr)]
        tokens, rows = saved_rows(open(saved.name, "rb"))
        oracle, kl = Oracle(model, dtype=np.float32), []
        for (window, first, _), got in zip(windows(tokens, 1024, n_kl, bos), rows):
            exact = oracle.log_probs(window, first)[:-1].astype(np.float64)
            kl.append(float(np.nansum(np.exp(exact) * (exact - got), axis=1).mean()))
    return {"windows": n, "cpu": cpu and cpu[1], "perplexity_after_each_window": running,
            "kl_from_oracle_of_each_window": kl,
            "tokens_sha256": hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()}


def main():
    program, smollm2, smollm2_f32, gemma3, text = sys.argv[1:]
    version = subprocess.run([program, "--version"], capture_output=True, text=True)
    result = {
        "made_by": "tests/golden/measure.py LLAMA_PERPLEXITY SMOLLM2.gguf SMOLLM2_F32.gguf GEMMA3.gguf TEXT",
        "command": "llama-perplexity -m MODEL -f TEXT -c 1024 -b 1024 --chunks N -t 2 --save-all-logits FILE",
        "program": re.sub(r"\s+", " ", version.stdout + version.stderr).strip(),
        "text_sha256": hashlib.sha256(pathlib.Path(text).read_bytes()).hexdigest(),
        "smollm2_f32": measure(program, smollm2_f32, text, 2, 2, None),
        "smollm2": measure(program, smollm2, text, 8, 8, None),
        "gemma3": measure(program, gemma3, text, 4, 4, 2),
    }
    (HERE / "perplexity.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
