#!/usr/bin/env python3
"""Measures gen --batch: 64 prompts of mixed length, 128 tokens each, beside llama.cpp's llama-batched-bench at the same
mean length, beside the slots of its llama-server with the same prompts, and beside gen one prompt at a time; then with a
tenth of the memory that the caches need, the rest in a file; then with 1,000 tokens that all prompts begin with.

  batch.py --model FILE --text FILE [--gen ./gen] [--peer DIR] [--lines 64] [--parts mixed,tier,peer,server,shared]

llama-batched-bench computes its prompts and tokens in step, without sampling and without anything to read or write; it
is run with flash attention on and off, and its best counts. All times are without the loading of the model."""
import argparse
import concurrent.futures
import json
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent


def prompts(text, n, beginning=""):
    """Mixed lengths from one sentence to some pages, 30 to 2,000 characters, always the same."""
    draw = random.Random(1)
    sizes = [30, 60, 120, 250, 500, 1000, 2000]
    for i in range(n):
        size, at = draw.choice(sizes), draw.randrange(len(text) - 2000)
        yield {"custom_id": i, "prompt": beginning + text[at:at + size]}


def gen(o, lines, *args):
    """The summary of a run over these lines."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
        file.flush()
        command = [o.gen, "-q", "-m", o.model, "--batch", file.name, "-o", "/dev/null", "--progress", "json", "-n",
                   str(o.tokens), "--ignore-eos", "--temp", "0", "-t", o.threads, *args]
        r = subprocess.run(command, capture_output=True, text=True)
    if r.returncode != 0:
        sys.exit(r.stderr)
    return json.loads(r.stderr.splitlines()[-1])


def peer(o, length, parallel):
    """Seconds that llama.cpp takes for all lines, the best of its ways."""
    best = None
    for flash in "on", "off":
        command = [f"{o.peer}/build/bin/llama-batched-bench", "-m", o.model, "-c", str(parallel * (length + o.tokens + 8)),
                   "-b", "2048", "-ub", "512", "-npp", str(length), "-ntg", str(o.tokens), "-npl", str(parallel),
                   "-t", o.threads, "-fa", flash, "--output-format", "jsonl"]
        r = subprocess.run(command, capture_output=True, text=True)
        rows = [json.loads(line) for line in r.stdout.splitlines() if line.startswith("{")]
        if r.returncode != 0 or not rows:
            sys.exit(r.stderr[-1000:])
        seconds = rows[-1]["t"] * o.lines / parallel
        best = min(best or seconds, seconds)
    return best


def server(o, lines):
    """Seconds that llama-server takes for these lines when as many are asked for at once as it has slots."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    n, address = int(o.parallel), f"http://127.0.0.1:{port}"
    longest = max(len(line["prompt"]) for line in lines)
    command = [f"{o.peer}/build/bin/llama-server", "-m", o.model, "-t", o.threads, "-np", str(n),
               "-c", str(n * (longest // 2 + o.tokens)), "--no-cache-prompt", "--port", str(port)]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(line):
        body = {"prompt": line["prompt"], "n_predict": o.tokens, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))["tokens_predicted"]

    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health")
                break
            except OSError:             # it does not listen yet, or loads the model
                time.sleep(0.1)
        begun = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(n) as pool:
            made = list(pool.map(ask, lines))
        seconds = time.monotonic() - begun
    finally:
        run.terminate()
        run.wait()
    if set(made) != {o.tokens}:
        sys.exit(f"llama-server made {sorted(set(made))} tokens of {o.tokens}")
    return seconds


def stall(processes):
    """Longest time in 10 seconds, in ms, that a process which only reads the clock is kept from running, one on each core: what
    any program's longest gap includes."""
    spin = """if True:
        import time
        begun = last = time.perf_counter()
        longest = 0
        while last < begun + 10:
            now = time.perf_counter()
            longest = max(longest, now - last)
            last = now
        print(longest)"""
    runs = [subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(processes)]
    return 1e3 * max(float(run.communicate()[0]) for run in runs)


def row(name, seconds, base, o, note=""):
    print(f"| {name} | {seconds:.1f} s | {o.lines * o.tokens / seconds:.0f} | {base / seconds:.1f} | {note} |", flush=True)


def told(s):
    return (f"{s['prefilled_tokens']} of {s['prompt_tokens']} prompt tokens computed, longest gap {s['longest_gap_ms']:.0f} ms, "
            f"{s['longest_gap_ms'] / s['median_step_ms']:.1f} median steps")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gen", default=str(ROOT / "gen"))
    p.add_argument("--peer", default=str(ROOT / "build/peer"))
    p.add_argument("--model", default=str(ROOT / "weights/SmolLM2-135M-Instruct.Q4_1.gguf"))
    p.add_argument("--text", required=True)
    p.add_argument("--lines", type=int, default=64)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--parallel", default="16")
    p.add_argument("--threads", default="2", help="of gen and of its peers")
    p.add_argument("--peer-parallel", default="16")
    p.add_argument("--budget", default="9M", help="memory for the caches in the part `tier`")
    p.add_argument("--parts", default="mixed,tier,peer,server,shared")
    o = p.parse_args()
    text = pathlib.Path(o.text).read_text()
    parts = o.parts.split(",")
    print("| | time | tokens/s | times | |\n|---|---|---|---|---|")
    if {"mixed", "tier", "peer", "server"} & set(parts):
        lines = list(prompts(text, o.lines))
        s = gen(o, lines, "-np", o.parallel)
        length = round(s["prompt_tokens"] / o.lines)
        row(f"gen -np {o.parallel}", s["seconds"], s["seconds"], o, told(s))
        if "mixed" in parts:
            one = gen(o, lines, "-np", "1")
            row("gen -np 1", one["seconds"], s["seconds"], o)
            print(f"| the cores alone | | | | a process that only reads the clock stands still for up to "
                  f"{stall(int(o.threads)):.1f} ms |", flush=True)
        if "tier" in parts:
            t = gen(o, lines, "-np", o.parallel, "--kv-memory", o.budget, "--kv-offload", "host")
            row(f"gen -np {o.parallel} --kv-memory {o.budget}", t["seconds"], s["seconds"], o,
                f"{t['bytes_out'] / 1e6:.0f} MB written to the file, {t['bytes_in'] / 1e6:.0f} MB read, {t['given_up']} times a "
                "sequence gave its pages up")
        for n in o.peer_parallel.split(",") if "peer" in parts else []:
            row(f"llama.cpp, {n} x {length} tokens", peer(o, length, int(n)), s["seconds"], o)
        if "server" in parts:
            row(f"llama-server, {o.parallel} slots", server(o, lines), s["seconds"], o)
    if "shared" in parts:
        lines = list(prompts(text, o.lines, text[:4500]))
        s = gen(o, lines, "-np", o.parallel)
        row(f"gen -np {o.parallel}, beginning shared", s["seconds"], s["seconds"], o, told(s))
        few = lines[:max(1, o.lines // 8)]
        one = gen(o, few, "-np", "1", "--no-share")
        row("gen -np 1, nothing shared (an eighth of the lines)", one["seconds"] * o.lines / len(few), s["seconds"], o)


if __name__ == "__main__":
    main()
