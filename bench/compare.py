#!/usr/bin/env python3
"""Measures gen beside llama.cpp: same file, prompt length and threads, run in turns; prints ratios beside the memory's
bandwidth and the processor's byte products, which gen measures in the same run.

  compare.py [--tests decode,prefill,batch,process,lookup,threads,busy] [--models smollm2,gemma3,1.1b-q4_0,...] ...

Each line begins with one try of every way to run llama.cpp that could be its best (flash attention on and off, its own
number of threads, the file mapped or not); the fastest is then run in turns with gen, `rounds` times. A ratio is of one
round, gen's speed over llama.cpp's, so above 1 gen is faster; of all rounds the median and the minimum are told."""
import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import random_model

ROOT = pathlib.Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "weights"
REAL = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}
RANDOM = {f"1.1b-{kind.lower()}": kind for kind in ("Q4_0", "Q4_K", "Q6_K", "Q8_0")}
TEXT = """The old harbour lies at the mouth of a narrow river, where the hills come down to the sea. In the morning the
fishing boats leave before the sun is up, and the women of the town walk along the quay to the market with baskets on
their arms. By noon the streets are quiet and the shutters are closed against the heat. In the evening the boats return
one by one, the gulls cry over the nets, and the lamps are lit along the water. On Sundays the whole town gathers to hear
the band play, and the children run between the tables until it is dark.""".replace("\n", " ")
REWRITE = f'A text:\n\n{TEXT}\n\nThe same text with the word "port" in place of "harbour":\n\nThe old port'
FREE = "The keeper of the lighthouse had not spoken to anyone for eleven days when"
PROMPT = "The quick brown fox jumps over the lazy dog, and then it runs away from the big wolf"      # 20 tokens


class Failed(Exception):
    """One sentence for the user."""


def say(text):
    print(text, file=sys.stderr, flush=True)


# ---- running programs

def run(command, prefix=()):
    """Standard output of a program; prefix: words before it, such as taskset's."""
    command = [str(word) for word in (*prefix, *command)]
    r = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if r.returncode != 0:
        lines = r.stderr.strip().splitlines() or ["no message"]
        raise Failed(f"{' '.join(command)}: exit code {r.returncode}: {lines[-1]}")
    return r.stdout


def whole_process(command):
    """Seconds and largest resident megabytes of a program from start to end."""
    start = time.monotonic()
    child = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: exit code {child.returncode}")
    return seconds, usage.ru_maxrss / 1024


@contextlib.contextmanager
def busy():
    """A process that keeps one core busy."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        child.kill()
        child.wait()


# ---- the two programs. A speed is in tokens per second

class Gen:
    def __init__(self, options):
        self.path = options.gen.resolve()
        self.threads, self.reps, self.isa = options.threads, options.reps, options.isa

    def bench(self, model, *words, threads=None, prefix=()):
        """The object of the one test that the words ask for."""
        if self.isa:
            prefix = ("env", f"GEN_ISA={self.isa}", *prefix)
        return json.loads(run([self.path, "-m", model, "--bench", "--json", "--reps", self.reps,
                               "-t", threads or self.threads, *words], prefix))[0]

    def command(self, model):
        return [self.path, "-m", model, "-t", self.threads, "-p", PROMPT, "-n", 1, "--temp", 0, "-q"]

    def answer(self, model, prompt, tokens, *words):
        """The object of --json, with its speed."""
        command = [self.path, "-m", model, "-t", self.threads, "-p", prompt, "-n", tokens, "-s", 1, "--ignore-eos", "-q",
                   "--json", *words]
        r = json.loads(run(command, ("env", f"GEN_ISA={self.isa}") if self.isa else ()))
        return {**r, "tokens_per_s": 1000 * r["usage"]["completion_tokens"] / r["timings"]["decode_ms"]}


class LlamaCpp:
    def __init__(self, options):
        self.bin, self.threads, self.reps = options.peer.resolve() / "build" / "bin", options.threads, options.reps

    def ways(self, threads=None):
        """Ways to run it, by name: words for llama-bench."""
        threads = threads or self.threads
        counts = {threads} if threads == os.cpu_count() else {threads, os.cpu_count()}
        for flash in (0, 1):
            for mapped in ("mmap", "none"):
                for n in sorted(counts):
                    yield f"-fa {flash} -lm {mapped} -t {n}", ["-fa", flash, "-lm", mapped, "-t", n]

    def bench(self, model, way, prefill=0, decode=0, depth=0, prefix=(), reps=None):
        samples = json.loads(run([self.bin / "llama-bench", "-m", model, "-p", prefill, "-n", decode, "-d", depth,
                                  "-r", reps or self.reps, *way, "-o", "json"], prefix))[0]["samples_ts"]
        return statistics.median(samples)

    def batch(self, model, way, prompt, decode, sequences, reps=None):
        way = ["-fa", "on" if way[1] else "off", *way[2:]]
        speeds = []
        for _ in range(reps or self.reps):
            out = run([self.bin / "llama-batched-bench", "-m", model, "-c", (prompt + decode) * sequences,
                       "-npp", prompt, "-ntg", decode, "-npl", sequences, *way, "--output-format", "jsonl"])
            speeds += [json.loads(line)["speed_tg"] for line in out.splitlines() if line.startswith("{")]
        return statistics.median(speeds)

    def command(self, model, way):
        way = ["-fa", "on" if way[1] else "off", *way[2:]]
        return [self.bin / "llama-completion", "-m", model, "-p", PROMPT, "-n", 1, "--temp", 0, "-no-cnv",
                "--no-warmup", *way]


# ---- comparing

class Report:
    def __init__(self, options):
        self.rounds, self.lines = options.rounds, []

    def turns(self, model, test, ours, ways, **about):
        """ours() is an object of --bench; ways: functions that give llama.cpp's speed in so many repetitions, by name."""
        say(f"{model}: {test}")
        tries = {name: call(1) for name, call in ways.items()}
        best = max(tries, key=tries.get)
        mine, theirs = [], []
        for _ in range(self.rounds):
            mine.append(ours())
            theirs.append(ways[best](None))
        median = sorted(mine, key=lambda r: r["tokens_per_s"])[len(mine) // 2]
        ratios = [a["tokens_per_s"] / b for a, b in zip(mine, theirs)]
        shares = {key: median[key] for key in ("gb_per_s", "bandwidth_fraction", "gmac_per_s", "int8_fraction")}
        self.add(model=model, test=test, **about, unit="t/s", gen=[r["tokens_per_s"] for r in mine], peer=theirs,
                 ways=tries, way=best, ratio=statistics.median(ratios), least_ratio=min(ratios), **shares)

    def add(self, **line):
        self.lines.append(line)
        say("    " + self.row(line))

    def keep(self, old):
        """Puts lines measured before in front of the others, those of the same model and test left out."""
        new = {(line["model"], line["test"]) for line in self.lines}
        self.lines = [line for line in old if (line["model"], line["test"]) not in new] + self.lines

    @staticmethod
    def row(line):
        def number(x):
            return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"

        def share(value, part):
            return f"{line[part]:.0%} of {line[value] / line[part]:.0f}" if part in line else ""
        cells = [line["model"], line["test"], number(statistics.median(line["gen"])),
                 number(statistics.median(line["peer"])), line["unit"],
                 f"{line['ratio']:.2f} ({line['least_ratio']:.2f})", share("gb_per_s", "bandwidth_fraction"),
                 share("gmac_per_s", "int8_fraction"), line["way"]]
        return f"| {' | '.join(cells)} |"

    def table(self):
        heads = ["model", "test", "gen", "llama.cpp", "", "ratio (least)", "GB/s", "GMAC/s", "llama.cpp's way"]
        return "\n".join([f"| {' | '.join(heads)} |", "|" + len(heads) * "---|", *map(self.row, self.lines)])


def test_decode(report, gen, peer, name, model, o):
    for depth in o.depths:
        words = ["-tg", o.decode, "-d", depth]
        ways = {key: lambda reps, way=way: peer.bench(model, way, decode=o.decode, depth=depth, reps=reps)
                for key, way in peer.ways()}
        report.turns(name, f"decode {o.decode} at {depth}", lambda: gen.bench(model, *words), ways, kind="decode",
                     depth=depth)


def test_prefill(report, gen, peer, name, model, o):
    for n in o.prefill:
        ways = {key: lambda reps, way=way: peer.bench(model, way, prefill=n, reps=reps) for key, way in peer.ways()}
        report.turns(name, f"prefill {n}", lambda: gen.bench(model, "-pp", n), ways, kind="prefill", n=n)


def test_batch(report, gen, peer, name, model, o):
    for n in o.sequences:
        words = ["-tg", o.batch_decode, "-d", o.batch_prompt, "-np", n]
        ways = {key: lambda reps, way=way: peer.batch(model, way, o.batch_prompt, o.batch_decode, n, reps)
                for key, way in peer.ways()}
        report.turns(name, f"decode {o.batch_decode} of {n} sequences at {o.batch_prompt}",
                     lambda: gen.bench(model, *words), ways, kind="batch", sequences=n)


def test_process(report, gen, peer, name, model, o):
    """A ratio is llama.cpp's seconds, or megabytes, over gen's."""
    say(f"{name}: whole process")
    ways = dict(peer.ways())
    for command in [gen.command(model)] + [peer.command(model, way) for way in ways.values()]:
        whole_process(command)                       # brings the file into the page cache
    tries = {key: min(whole_process(peer.command(model, way))[0] for _ in range(2)) for key, way in ways.items()}
    best = min(tries, key=tries.get)
    mine, theirs = [], []
    for _ in range(o.rounds * 2):
        mine.append(whole_process(gen.command(model)))
        theirs.append(whole_process(peer.command(model, ways[best])))
    for k, (what, unit) in enumerate((("whole process, one token", "s"), ("its peak memory", "MB"))):
        a, b = [r[k] for r in mine], [r[k] for r in theirs]
        ratios = [y / x for x, y in zip(a, b)]
        report.add(model=name, test=what, kind="process", unit=unit, gen=a, peer=b, way=best, ways=tries,
                   ratio=statistics.median(ratios), least_ratio=min(ratios))


def against_itself(report, name, test, one, other):
    """Two ways to run gen in turns: one()'s speed over other()'s, which stands in llama.cpp's column."""
    say(f"{name}: {test}")
    a, b = zip(*[(one()["tokens_per_s"], other()["tokens_per_s"]) for _ in range(report.rounds)])
    ratios = [x / y for x, y in zip(a, b)]
    report.add(model=name, test=test, kind="itself", unit="t/s", gen=list(a), peer=list(b), way="(gen itself)",
               ratio=statistics.median(ratios), least_ratio=min(ratios))


def test_lookup(report, gen, peer, name, model, o):
    """--lookup beside gen without it, on a text that repeats its prompt and on one that does not: the same text. What is drawn
    repeats more or less, so several are."""
    for what, prompt in ("a text rewritten with one word changed", REWRITE), ("free text", FREE):
        for temperature in 0, 0.8:
            texts = set()
            seeds = range(1, 8 if temperature else 2)

            def answer(*words):
                runs = [gen.answer(model, prompt, 160, "--temp", temperature, "--seed", seed, *words) for seed in seeds]
                texts.update((seed, r["text"], r["logits_sha256"]) for seed, r in zip(seeds, runs))
                return {"tokens_per_s": len(runs) / sum(1 / r["tokens_per_s"] for r in runs)}
            against_itself(report, name, f"{what}, temperature {temperature}: --lookup, without",
                           lambda: answer("--lookup"), answer)
            if len(texts) != len(seeds):
                raise Failed(f"{name}: --lookup changes the text")


def test_threads(report, gen, peer, name, model, o):
    for words in ["-pp", 512], ["-tg", o.decode]:
        for n in sorted({2, o.threads} - {1}):
            against_itself(report, name, f"{' '.join(map(str, words))}: {n} threads, 1 thread",
                           lambda: gen.bench(model, *words, threads=n), lambda: gen.bench(model, *words, threads=1))


def test_busy(report, gen, peer, name, model, o):
    """More threads than cores, and cores taken away: at most 1.3 times slower than the number of threads that fits."""
    cores, one = os.cpu_count(), ("taskset", "-c", "0")
    all_cores = ("taskset", "-c", f"0-{cores - 1}")
    for words in ["-pp", 512], ["-tg", o.decode]:
        def with_busy(threads):
            with busy():
                return gen.bench(model, *words, threads=threads)
        what = " ".join(map(str, words))
        against_itself(report, name, f"{what}: {2 * cores} threads on {cores} cores, {cores} threads",
                       lambda: gen.bench(model, *words, threads=2 * cores, prefix=all_cores),
                       lambda: gen.bench(model, *words, threads=cores, prefix=all_cores))
        against_itself(report, name, f"{what}: 2 threads on 1 core, 1 thread",
                       lambda: gen.bench(model, *words, threads=2, prefix=one),
                       lambda: gen.bench(model, *words, threads=1, prefix=one))
        if cores > 1:
            against_itself(report, name, f"{what}: one core busy: {cores} threads, {cores - 1} threads",
                           lambda: with_busy(cores), lambda: with_busy(cores - 1))


TESTS = {name.removeprefix("test_"): call for name, call in list(globals().items()) if name.startswith("test_")}


# ---- models, arguments, results

def obtain(name):
    if name in REAL:
        if subprocess.run([sys.executable, WEIGHTS / "get.py", name]).returncode != 0:
            raise Failed(f"{name} cannot be obtained")
        return WEIGHTS / REAL[name]
    if name in RANDOM:
        path = ROOT / "build" / "bench" / f"random-{name}.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            say(f"writing {path}")
            random_model.write(path, RANDOM[name])
        return path
    if pathlib.Path(name).is_file():
        return pathlib.Path(name)
    raise Failed(f"model {name}: neither a file nor one of {', '.join([*REAL, *RANDOM])}")


def plot(lines, path):
    """Decode speed against depth, one colour a model; llama.cpp's is dashed."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for i, model in enumerate(dict.fromkeys(line["model"] for line in lines if line["kind"] == "decode")):
        points = sorted((line["depth"], statistics.median(line["gen"]), statistics.median(line["peer"]))
                        for line in lines if line["kind"] == "decode" and line["model"] == model)
        depths, mine, theirs = zip(*points)
        axes.plot(depths, mine, "o-", color=f"C{i}", label=f"{pathlib.Path(model).stem}, gen")
        axes.plot(depths, theirs, "o--", color=f"C{i}", label=f"{pathlib.Path(model).stem}, llama.cpp")
    axes.set(xlabel="tokens in the cache", ylabel="decode, tokens per second", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def machine():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()}, {os.cpu_count()} cores"
    return f"{os.cpu_count()} cores"


def arguments(argv):
    def words(kind=str):
        return lambda text: [kind(word) for word in text.replace(",", " ").split()]
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tests", type=words(), default=["decode", "prefill", "batch", "process", "lookup"], help=", ".join(TESTS))
    p.add_argument("--models", type=words(), help="names, or GGUF files; if not given, SmolLM2 and Gemma 3 "
                   "in all tests, and the random models in decode at depth 0")
    p.add_argument("--gen", type=pathlib.Path, default=ROOT / "gen")
    p.add_argument("--isa", help="instruction set that gen is made to use (GEN_ISA)")
    p.add_argument("--peer", type=pathlib.Path, default=ROOT / "build" / "peer", help="folder that peer.sh built in")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--rounds", type=int, default=3, help="turns of gen and llama.cpp")
    p.add_argument("--reps", type=int, default=2, help="repetitions inside one turn")
    p.add_argument("--depths", type=words(int), default=[0, 4096])
    p.add_argument("--decode", type=int, default=64, help="tokens of a decode test")
    p.add_argument("--prefill", type=words(int), default=[128, 512, 4096])
    p.add_argument("--sequences", type=words(int), default=[4, 16, 64])
    p.add_argument("--batch-prompt", type=int, default=128)
    p.add_argument("--batch-decode", type=int, default=32)
    p.add_argument("--json", type=pathlib.Path, default=ROOT / "build" / "bench.json", help="where the results go")
    p.add_argument("--keep", action="store_true", help="lines of the file of results that are not measured now stay")
    p.add_argument("--plot", type=pathlib.Path, help="draw decode speed against depth (svg, png; needs matplotlib)")
    o = p.parse_args(argv)
    for test in o.tests:
        if test not in TESTS:
            p.error(f"test {test}: there are {', '.join(TESTS)}")
    return o


def main(argv):
    o = arguments(argv)
    report, gen, peer = Report(o), Gen(o), LlamaCpp(o)
    load = os.getloadavg()[0]
    if load > 0.5:
        say(f"warning: something else is running (load {load:.1f}): only the ratios say something, if anything")
    try:
        models = {name: obtain(name) for name in o.models or REAL}
        for test in o.tests:
            for name, model in models.items():
                TESTS[test](report, gen, peer, name, model, o)
        if not o.models and "decode" in o.tests:
            o.depths = [0]
            for name in RANDOM:
                test_decode(report, gen, peer, name, obtain(name), o)
    except Failed as e:
        say(f"compare.py: {e}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        if o.keep and o.json.exists():
            report.keep(json.loads(o.json.read_text())["lines"])
        if report.lines:
            o.json.parent.mkdir(parents=True, exist_ok=True)
            result = {"machine": machine(), "threads": o.threads, "lines": report.lines}
            o.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{machine()}; {o.threads} threads; {o.rounds} rounds of {o.reps} repetitions\n\n{report.table()}")
    if o.plot:
        plot(report.lines, o.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
