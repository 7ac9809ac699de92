"""Importance eviction: the continuation against a NumPy oracle that follows the rules on its own, the same bits however the
rows came, every cache type, and what is refused."""
import itertools
import json

import numpy as np
import pytest
from oracle import Oracle, log_softmax, read_log_probs

BLOCK = 32
TYPES = "f32 f16 bf16 fp8 int8 int4".split()
FADE = {"attention": 0.875, "snapkv": 0.5}             # what a mass is worth a block of tokens later
RULES = list(FADE)
TEXT = bytes(np.random.default_rng(11).integers(ord("a"), ord("z") + 1, 4000, np.uint8))
MODELS = {
    "llama": dict(arch="llama", heads=4, kv_heads=2, head_k=64, layers=3),
    "gemma2": dict(arch="gemma2", heads=4, kv_heads=1, head_k=40, layers=4, window=48),
    "gemma3": dict(arch="gemma3", heads=4, kv_heads=2, head_k=32, layers=7, window=40),
    "qwen2": dict(arch="qwen2", heads=3, kv_heads=3, head_k=100, head_v=36, layers=2),
}


@pytest.fixture(scope="module")
def model(tiny):
    return lambda name: tiny(**MODELS[name])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(TEXT)
    return path


class Evicting(Oracle):
    """A pass in pieces over a cache whose global layers evict. Rows keep their order; `mass` is the softmax weight given to
    each by the query heads of its KV head."""

    def __init__(self, path, rule, budget):
        super().__init__(path)
        self.rule, self.budget, self.start, self.voters, self.fade = rule, budget, 0, 0, FADE[rule]
        empty = lambda: dict(k=np.zeros((0, self.head_k)), v=np.zeros((0, self.head_v)), pos=np.zeros(0, int), mass=np.zeros(0))
        self.cache = [[empty() for _ in range(self.n_kv)] for _ in range(self.n_layer)]

    def attention(self, x, layer):
        q, k, v = self.qkv(x, layer, self.start)
        pos = self.start + np.arange(len(x))
        out = np.empty((len(x), self.n_head, self.head_v))
        for g, c in enumerate(self.cache[layer]):
            new = dict(k=k[g], v=v[g], pos=pos, mass=np.zeros(len(x)))
            for name in c:
                c[name] = np.concatenate([c[name], new[name]])
            for h in range(self.n_head // self.n_kv * g, self.n_head // self.n_kv * (g + 1)):
                score = q[h] @ c["k"].T * self.attn_scale
                score = self.attn_cap * np.tanh(score / self.attn_cap) if self.attn_cap else score
                away = pos[:, None] - c["pos"]
                score[(away < 0) | (away >= self.window if self.local[layer] else False)] = -np.inf
                p = np.exp(score - score.max(axis=1, keepdims=True))
                p /= p.sum(axis=1, keepdims=True)
                out[:, h] = p @ c["v"]
                back = np.maximum(self.prompt - 1 - pos, 0) // BLOCK
                c["mass"] += (self.fade ** back * (pos >= self.voters)) @ p
        return self.project(out.reshape(len(x), -1), layer, "attn_output")

    def evict(self):
        """Block 0, half of the budget for the recent rows (the block begun counts as one), the rest for the
        heaviest, a row counting as the heaviest of itself and three rows before; later equal ones first."""
        for layer, heads in enumerate(self.cache):
            for c in heads if not self.local[layer] else []:
                blocks, budget = -(-len(c["pos"]) // BLOCK), self.budget // BLOCK
                c["mass"] *= self.fade         # of all rows alike: it does not matter whether before or after the choice
                if blocks <= budget:
                    continue
                recent = max(budget // 2, 2)
                end = (blocks - recent) * BLOCK
                mass = np.pad(c["mass"][BLOCK:end], (3, 0))
                score = np.max([mass[i:i + end - BLOCK] for i in range(4)], axis=0)
                best = BLOCK + np.lexsort((np.arange(len(score)), score))[::-1][:(budget - 1 - recent) * BLOCK]
                kept = np.sort(np.concatenate([np.arange(BLOCK), best, np.arange(end, len(c["pos"]))]))
                for name in c:
                    c[name] = c[name][kept]

    def scores(self, tokens, prompt):
        """Log-probabilities after the prompt's last token and each token that follows it."""
        rows = []
        self.prompt = prompt
        self.voters = prompt - BLOCK if self.rule == "snapkv" else 0
        while self.start < len(tokens):
            end = self.start + BLOCK if self.start else prompt
            rows.append(self.logits(tokens[self.start:end], prompt - 1 if not self.start else 0))
            self.start, self.voters = end, 0
            if end <= len(tokens):
                self.evict()
        return log_softmax(np.concatenate(rows))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_oracle(gen, model, text, tmp_path, name, rule):
    window, budget, out = 600, 200, tmp_path / "logprobs"
    path = model(name)
    gen.ok("-m", path, "--perplexity", text, "-c", str(window), "--chunks", "1", "--save-logits", out, "-ctk", "f32", "-ctv", "f32",
           "--evict", rule, "--kv-budget", str(budget))
    tokens, got = read_log_probs(out)
    want = Evicting(path, rule, budget).scores(tokens[0][:-1], window // 2 + 1)
    full = Oracle(path).log_probs(tokens[0], window // 2)[:-1]
    worst = np.abs(got[0] - want).max()
    assert worst <= 1e-3, f"log-probabilities differ by {worst:.3g}"
    assert np.abs(full - want).max() > 0.05, "nothing of weight was evicted"


# ---- the same bits however the rows came (law 1)

def score(tool, path, first, tokens, key, value, rule, budget, chunk, threads):
    r = tool("score", path, key, value, "0", "0", rule, str(budget), str(chunk), str(threads),
             stdin=f"{first} " + " ".join(map(str, tokens)) + "\n")
    assert r.rc == 0, r.err
    return r.text


def ids(n):
    return np.random.default_rng(n).integers(6, 262, n).tolist()


@pytest.mark.parametrize("key, value", list(itertools.product(TYPES, TYPES)))
def test_same_bits(tool, model, key, value):
    """Every pair of types; the rule, the model, chunks and threads change from pair to pair."""
    i = TYPES.index(key) * len(TYPES) + TYPES.index(value)
    path, rule = model(list(MODELS)[i % len(MODELS)]), RULES[i // 4 % 2]
    tokens, budget = ids(420 + i), 160 + 40 * (i % 3)
    base = score(tool, path, 270 + i, tokens, key, value, rule, budget, 512, 1)
    assert int(base.split()[-1]) >= 32 * (len(tokens) // 32 - budget // 32 - 1), base[-100:]
    for chunk, threads in [(1, 2), (7, 3), (33, 1), (300, 4)][i % 2::2]:
        assert score(tool, path, 270 + i, tokens, key, value, rule, budget, chunk, threads) == base, (chunk, threads)


@pytest.mark.parametrize("rule", RULES)
def test_generated_is_scored(gen, tool, model, text, rule):
    """What is generated token by token has the logits of the same tokens scored in one go."""
    path, prompt = model("gemma3"), TEXT[:333].decode()
    how = "--evict", rule, "--kv-budget", "224", "-ctk", "int8", "-ctv", "fp8"
    r = json.loads(gen.ok("-m", path, "-p", prompt, "-n", "120", "--ignore-eos", "--temp", "0", "--json", "-t", "2", *how).text)
    tokens = [6 + b for b in prompt.encode()] + r["tokens"][:-1]
    line = score(tool, path, len(prompt) - 1, tokens, "int8", "fp8", rule, 224, 50, 1)
    assert line.split("|")[1].split()[0] == r["logits_sha256"]
    assert r["kv"]["evicted_tokens"] == int(line.split()[-1]) > 190
    full = json.loads(gen.ok("-m", path, "-p", prompt, "-n", "120", "--ignore-eos", "--temp", "0", "--json", *how[4:]).text)
    assert full["kv"]["evicted_tokens"] == 0 and r["kv"]["bytes_used"] < full["kv"]["bytes_used"]


@pytest.mark.parametrize("rule", RULES)
def test_budget_that_is_not_reached(tool, model, rule):
    """Nothing is evicted, and nothing changes, while the text is no longer than the budget."""
    tokens = ids(300)
    plain = score(tool, model("llama"), 200, tokens, "f16", "int4", "off", 0, 64, 2)
    assert score(tool, model("llama"), 200, tokens, "f16", "int4", rule, 320, 64, 2) == plain
    assert plain.endswith(" 0\n")


def test_refusals(gen, model):
    base = "-m", model("llama"), "-p", "x", "--evict", "snapkv", "--kv-budget", "200"
    for more, says in [(("--window", "100"), "--window"), (("--lookup",), "--lookup"), (("--no-kv-cache",), "--no-kv-cache"),
                       (("--prompt-cache", "x"), "--prompt-cache"), (("--prefix-cache", "x"), "--prefix-cache"),
                       (("--tensor-parallel", "2"), "--tensor-parallel"), (("--kv-layout", "contiguous"), "contiguous"), (("--page-size", "64"), "--page-size 64"),
                       (("--kv-budget", "159"), "160")]:
        gen.refused(*base, *more, rc=2, says=["--evict" if says != "160" else "--kv-budget", says])
    gen.refused(*base[:4], "--evict", "attention", rc=2, says=["--evict", "--kv-budget"])
    gen.refused(*base[:4], "--kv-budget", "300", rc=2, says=["--kv-budget", "--evict"])
    assert "200" not in gen.ok(*base, "-n", "1").err and "192 tokens" in gen.ok(*base, "-n", "1").err


@pytest.mark.parametrize("rule", RULES)
def test_batch(gen, model, tmp_path, rule):
    """Lines of a batch, with beginnings in common and chunks that mix, are answered as alone."""
    lines, how = tmp_path / "lines.jsonl", ("--temp", "0", "--ignore-eos", "--evict", rule, "--kv-budget", "192", "-n", "80")
    prompts = [TEXT[:n].decode() + "x" for n in (250, 400, 401, 90, 333)]
    lines.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    out = gen.ok("-m", model("llama"), "--batch", lines, "--parallel", "3", "-b", "48", *how).text
    for prompt, line in zip(prompts, out.splitlines(), strict=True):
        alone = json.loads(gen.ok("-m", model("llama"), "-p", prompt, "--json", *how).text)
        assert json.loads(line)["response"]["logits_sha256"] == alone["logits_sha256"]
