#!/usr/bin/env python3
"""What a quantised cache does to the output: gen beside llama.cpp, the same file, tokens and windows.

    bench/kv_quality.py --peer DIR --text FILE MODEL.gguf [WINDOWS] [MODEL.gguf [WINDOWS] ...]

DIR is where bench/peer.sh has built llama.cpp. Prints, for each type of keys and values, the mean Kullback-Leibler
divergence from the same program's own f16 cache, over the second half of each window of 1,024 tokens:

    gen -m MODEL --perplexity FILE -c 1024 --chunks N -ctk T -ctv T --kl-base BASE              (BASE: --save-logits)
    llama-perplexity -m MODEL -f FILE -c 1024 -b 1024 --chunks N -ctk T -ctv T --kl-divergence --kl-divergence-base BASE
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# gen's name of a type (or pair), and llama.cpp's
TYPES = [("bf16", "bf16"), ("fp8", None), ("int8", "q8_0"), ("int8,int4", "q8_0,q4_0"), ("int4", "q4_0")]


def run(command):
    r = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if r.returncode:
        sys.exit(f"{command} failed:\n{(r.stdout + r.stderr)[-2000:]}")
    return r.stdout + r.stderr


def types_of(pair):
    k, _, v = pair.partition(",")
    return ["-ctk", k, "-ctv", v or k]


def of_gen(program, model, text, windows, base):
    command = [program, "-q", "-m", model, "--perplexity", text, "-c", 1024, "--chunks", windows, "--json"]
    run([*command, "--save-logits", base])
    return {name: json.loads(run([*command, *types_of(name), "--kl-base", base]))["kl_mean"] for name, _ in TYPES}


def of_llama(program, model, text, windows, base):
    command = [program, "-m", model, "-f", text, "-c", 1024, "-b", 1024, "--chunks", windows]
    run([*command, "--save-all-logits", base])
    found = {}
    for name, peer in TYPES:
        if peer:
            out = run([*command, *types_of(peer), "--kl-divergence", "--kl-divergence-base", base])
            found[name] = float(re.search(r"Mean\s+KLD:\s*([-\d.e]+)", out)[1])
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gen", default=ROOT / "gen")
    p.add_argument("--peer", type=pathlib.Path, default=ROOT / "build" / "peer")
    p.add_argument("--text", required=True)
    p.add_argument("models", nargs="+", metavar="MODEL [WINDOWS]")
    a = p.parse_args()
    for i, model in enumerate(a.models):
        if model.isdigit():
            continue
        windows = a.models[i + 1] if i + 1 < len(a.models) and a.models[i + 1].isdigit() else "2"
        with tempfile.TemporaryDirectory() as folder:
            ours = of_gen(a.gen, model, a.text, windows, f"{folder}/gen")
        with tempfile.TemporaryDirectory() as folder:
            theirs = of_llama(a.peer / "bin" / "llama-perplexity", model, a.text, windows, f"{folder}/llama")
        print(f"{model}, {windows} windows of 1,024 tokens\n\n| keys, values | gen | llama.cpp |\n|---|---|---|")
        for name, peer in TYPES:
            other = f"{theirs[name]:.5f} ({peer})" if peer else "-"
            print(f"| {name.replace(',', ', ')} | {ours[name]:.5f} | {other} |")
        print(flush=True)


if __name__ == "__main__":
    main()
