"""evict.py - what a cache costs that does not keep everything, measured with build/release/tests/score_tool.

    evict.py continue MODEL TEXT       perplexity of 512 tokens after prompts of 2,048, by budget: everything kept, --window, --evict
    evict.py needle MODEL TEXT         a fact in a prompt of 2,048 tokens that is asked for at its end: how often it is told
    evict.py stream MODEL TEXT         a text of any length through --window 1020 --sinks 4, and without sinks; against the same
                                       window computed from nothing at 300 places; --plot FILE.svg draws the curves

`make all programs` builds what is needed; --plot needs matplotlib."""
import argparse
import pathlib
import random
import subprocess

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROMPT, REST = 2048, 512


def gen_tokens(model, text):
    run = subprocess.run([ROOT / "gen", "-q", "-m", model, "--dump-tokens", "--no-bos", "-f", "-"], input=text.encode(),
                         capture_output=True, check=True)
    return [int(line.split(b"\t")[0]) for line in run.stdout.splitlines()]


def start_tokens(model):
    run = subprocess.run([ROOT / "gen", "-q", "-m", model, "--dump-tokens", "-p", "x"], capture_output=True, check=True)
    return [int(line.split(b"\t")[0]) for line in run.stdout.splitlines()][:-1]


def score(a, texts, window=0, sinks=4, evict="off", budget=0):
    """For each (place of the prompt's last token, tokens): negative log-likelihoods of the tokens behind it, and whether each
    is the most likely one."""
    lines = "".join(f"{first} {' '.join(map(str, tokens))}\n" for first, tokens in texts)
    command = [ROOT / "build/release/tests/score_tool", a.model, a.type, a.type, window, sinks, evict, budget, 0, a.threads]
    run = subprocess.run(list(map(str, command)), input=lines, capture_output=True, text=True, check=True)
    rows = [line.split("|")[0].split() for line in run.stdout.splitlines()]
    assert len(rows) == len(texts)
    return [(np.array([float(x.rstrip("*")) for x in row]), np.array([x[-1] == "*" for x in row])) for row in rows]


def ways(budgets):
    yield "everything", dict()
    for budget in budgets:
        yield f"window of {budget}", dict(window=budget - 4)
        for rule in "attention", "snapkv":
            yield f"{rule}, budget {budget}", dict(evict=rule, budget=budget)


def run_continue(a, ids, start):
    texts = []
    for i in range(0, len(ids) - PROMPT - REST + 1, PROMPT + REST):
        texts.append((PROMPT - 1, start + ids[i:i + PROMPT + REST - len(start)]))
    print(f"{len(texts)} texts, perplexity of {REST} tokens after {PROMPT}", flush=True)
    for name, how in ways(a.budgets):
        nll = np.array([row for row, _ in score(a, texts[:a.cases], **how)])
        print(f"{name:24s} {np.exp(nll.mean()):8.3f}   first 64 {np.exp(nll[:, :64].mean()):8.3f}   "
              f"last 128 {np.exp(nll[:, -128:].mean()):8.3f}", flush=True)


THINGS = ["red house", "blue house", "old library", "green gate", "iron bridge", "white tower", "north station", "south garden",
          "small chapel", "grey mill", "stone bakery", "wooden boat"]


def needles(a, ids, start):
    """A number told between 5 and 45 % of the prompt; the question repeats how it was told."""
    draw = random.Random(1)
    for i in range(a.cases):
        thing, number = THINGS[i % len(THINGS)], draw.randrange(1000, 10000)
        fact = gen_tokens(a.model, f"\n\nRemember this: the secret number of the {thing} is {number}.\n\n")
        ask = f"\n\nQuestion: what is the secret number of the {thing}? Answer: the secret number of the {thing} is"
        question, answered = gen_tokens(a.model, ask), gen_tokens(a.model, f"{ask} {number}")
        assert answered[:len(question)] == question
        room = PROMPT - len(start) - len(fact) - len(question)
        begin, at = draw.randrange(0, len(ids) - room), int(room * draw.uniform(0.05, 0.45))
        hay = ids[begin:begin + room]
        yield PROMPT - 1, start + hay[:at] + fact + hay[at:] + answered


def run_needle(a, ids, start):
    texts = list(needles(a, ids, start))
    for name, how in ways(a.budgets):
        hits = [row for _, row in score(a, texts, **how)]
        print(f"{name:24s} told {sum(row.all() for row in hits):3d} of {len(texts)}", flush=True)


def run_stream(a, ids, start):
    ids, window, sinks = start + ids, 1020, 4
    curves = {"window 1,020 and 4 sinks": score(a, [(0, ids)], window=window, sinks=sinks)[0][0],
              "window 1,024, no sinks": score(a, [(0, ids)], window=window + sinks, sinks=0)[0][0]}
    places = np.linspace(window + sinks - 1, len(ids) - 2, 300).astype(int)
    anew = [(window + sinks - 1, ids[:sinks] + ids[p - window + 1:p + 2]) for p in places]
    anew = np.array([row[0] for row, _ in score(a, anew)])
    for name, nll in curves.items():
        print(f"{name:28s} perplexity of {len(nll)} tokens {np.exp(nll.mean()):9.3f}, last quarter "
              f"{np.exp(nll[-len(nll) // 4:].mean()):9.3f}; at the 300 places {np.exp(nll[places].mean()):9.3f}")
    ratio = np.exp(curves["window 1,020 and 4 sinks"][places].mean() - anew.mean())
    print(f"{'computed from nothing':28s} at the 300 places {np.exp(anew.mean()):.3f}; streamed / from nothing {ratio:.4f}")
    if a.plot:
        draw_curves(a, curves)


def draw_curves(a, curves):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    matplotlib.rcParams.update({"svg.hashsalt": "gen", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    step = 512
    for name, nll in curves.items():
        mean = nll[:len(nll) // step * step].reshape(-1, step).mean(axis=1)
        axes.plot((np.arange(len(mean)) + 0.5) * step, np.exp(mean), label=name, linewidth=1)
    axes.set(xlabel="position", ylabel=f"perplexity of {step} tokens", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(a.plot, metadata={"Date": None})


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["continue", "needle", "stream"])
    p.add_argument("model", type=pathlib.Path)
    p.add_argument("text", type=pathlib.Path)
    p.add_argument("--type", default="f16", help="of keys and values")
    p.add_argument("--budgets", type=int, nargs="+", default=[1024, 416], help="tokens kept (%(default)s: 50 and 20 %%)")
    p.add_argument("--cases", type=int, default=24, help="texts or needles at most")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--plot", type=pathlib.Path)
    a = p.parse_args()
    run = {"continue": run_continue, "needle": run_needle, "stream": run_stream}[a.what]
    run(a, gen_tokens(a.model, a.text.read_text()), start_tokens(a.model))


if __name__ == "__main__":
    main()
