"""The forward pass: log-probabilities of tiny random models against the NumPy oracle, and the same bits however they
are computed.

Bounds. Where weights are float, every difference is rounding in float32: at most 1e-4 in log-probability (about 1e-5 is
measured). Where they are quantised, activations are rounded to int8; the oracle can do the same, and then agrees to
float32 rounding (2e-6 is measured) as long as each activation is rounded to the same side. One that lies within 1e-5 of
the middle between two steps may not be, and then rows differ by what a step is worth. With one layer and windows of
eight tokens that is rare, unless it befalls the embedding of a letter: most rows must agree to 1e-4, and all must stay
within what int8 costs at all."""
import hashlib
import itertools
import json

import numpy as np
import pytest
from make_model import ARCHITECTURES, BYTE0, CONTROL, FLOAT_TYPES, WEIGHT_TYPES, chain_model, ids_of
from oracle import Oracle, kl_divergence, log_softmax, read_log_probs

FLOAT_BOUND = 1e-4
QUANTISED = [t for t in WEIGHT_TYPES if t not in FLOAT_TYPES]
ISAS = ["generic", "avx2", "avxvnni", "avx512"]
TEXT = bytes(np.random.default_rng(7).integers(ord("a"), ord("z") + 1, 4000, np.uint8))


@pytest.fixture(scope="module")
def model(tiny):
    return tiny


@pytest.fixture(scope="module")
def score(gen, tmp_path_factory):
    """score(model, window, windows, options...): tokens [windows][window] and gen's log-probabilities of the scored
    rows [windows][rows][vocabulary]."""
    folder = tmp_path_factory.mktemp("scores")
    text, out = folder / "text", folder / "logprobs"
    text.write_bytes(TEXT)

    def run(path, window, windows, *options, env=None):
        r = gen.ok("-m", path, "--perplexity", text, "-c", str(window), "--chunks", str(windows), "--save-logits", out,
                   "--json", "-t", "1", *options, env=env)
        tokens, log_probs = read_log_probs(out)
        assert tokens.shape == (windows, window)
        assert json.loads(r.text)["tokens"] == log_probs.shape[0] * log_probs.shape[1]
        return tokens, log_probs
    return run


F32_CACHE = ("-ctk", "f32", "-ctv", "f32")


ORACLES = {}


def expected(path, tokens, **options):
    """The oracle's log-probabilities of the rows that gen scores. The same arguments are computed once."""
    key = path, tokens.tobytes(), tokens.shape, repr(options)
    if key not in ORACLES:
        oracle = Oracle(path, ctx=tokens.shape[1], **options)
        ORACLES[key] = np.array([oracle.log_probs(w, len(w) // 2)[:-1] for w in tokens])
    return ORACLES[key]


def largest(a, b):
    """The largest difference of each row; NaN where either has one."""
    return np.abs(a - b).max(axis=-1)


def agree(a, b, bound=FLOAT_BOUND):
    worst = float(largest(a, b).max())
    assert worst <= bound, f"log-probabilities differ by {worst:.3g}"


# ---- float weights: 1e-4

HEADS = [(32, 32), (64, 64), (80, 80), (96, 96), (100, 100), (128, 128), (256, 256), (64, 96), (128, 32), (100, 40)]
LAYOUTS = [(arch, k, v, kv_heads) for a, arch in enumerate(ARCHITECTURES) for h, (k, v) in enumerate(HEADS)
           for kv_heads in ((1, 2, 4)[(a + h) % 3],)]


@pytest.mark.parametrize("arch, head_k, head_v, kv_heads", LAYOUTS)
def test_head_layouts(model, score, arch, head_k, head_v, kv_heads):
    path = model(arch=arch, head_k=head_k, head_v=head_v, heads=4, kv_heads=kv_heads, ff=160)
    tokens, got = score(path, 42, 2, *F32_CACHE)
    agree(got, expected(path, tokens))


@pytest.mark.long
@pytest.mark.parametrize("head_k, head_v", HEADS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_head_layouts_long(model, score, arch, head_k, head_v):
    for heads, kv_heads in (4, 1), (4, 2), (4, 4), (6, 2), (15, 5), (8, 1), (1, 1):
        path = model(arch=arch, head_k=head_k, head_v=head_v, heads=heads, kv_heads=kv_heads)
        tokens, got = score(path, 300, 1, *F32_CACHE)
        agree(got, expected(path, tokens))


geometric, linear = np.geomspace, np.linspace
FACTORS = (tuple(linear(1, 3, 24)), tuple(linear(2, 9, 24)))
VARIANTS = {
    "biases": dict(bias=True),
    "tied": dict(tied=True),
    "tied qwen2": dict(arch="qwen2", tied=True),
    "start token": dict(bos=True),
    "byte-level BPE": dict(vocab="bpe"),
    "odd sizes": dict(embd=100, heads=3, kv_heads=3, head_k=34, ff=77, layers=3),
    "one head": dict(heads=1, kv_heads=1),
    "nine query heads, three of keys": dict(heads=9, kv_heads=3),
    "part of the head turns, gemma3": dict(arch="gemma3", head_k=96, n_rot=48),
    "part of the head turns, gemma2": dict(arch="gemma2", head_k=80, n_rot=20),
    "part of the head turns, phi3": dict(arch="phi3", head_k=128, n_rot=96),
    "base 5e5": dict(rope_base=5e5),
    "linear": dict(rope=("linear", 4.0, 0)),
    "linear gemma3": dict(arch="gemma3", rope=("linear", 8.0, 0), window=16, layers=7),
    "linear gemma2": dict(arch="gemma2", rope=("linear", 8.0, 0), window=16),
    "no scaling in spite of a factor": dict(rope=("none", 4.0, 0)),
    "yarn": dict(rope=("yarn", 4.0, 32)),
    "yarn, all pairs slow": dict(rope=("yarn", 16.0, 4)),
    "yarn qwen2": dict(arch="qwen2", rope=("yarn", 4.0, 512)),
    "yarn qwen3 with a magnitude": dict(arch="qwen3", rope=("yarn", 4.0, 64), attn_factor=0.8),
    "yarn gemma3": dict(arch="gemma3", rope=("yarn", 4.0, 64), window=16, layers=7),
    "llama 3 factors": dict(rope_freqs=tuple(geometric(1, 8, 32))),
    "short factors": dict(arch="phi3", n_rot=48, long_factors=FACTORS, attn_factor=1.2, ctx=4096),
    "long factors": dict(arch="phi3", n_rot=48, long_factors=FACTORS, attn_factor=1.2, ctx=4096,
                         rope=("longrope", 0.0, 32)),
    "window of phi3": dict(arch="phi3", window=16),
    "window of gemma2": dict(arch="gemma2", window=16, layers=4),
    "window of gemma3": dict(arch="gemma3", window=16, layers=13),
    "window of llama is not read": dict(window=16),
    "caps": dict(arch="gemma2", caps=(3.0, 10.0)),
    "27B gemma2": dict(arch="gemma2", layers=46, embd=128, ff=64, heads=4, kv_heads=1, qk=0.7),
    "27B gemma3": dict(arch="gemma3", layers=62, embd=128, ff=64, heads=4, kv_heads=1, qk=0.7, window=20),
    "F16": dict(weight="F16"),
    "BF16": dict(weight="BF16"),
    "F16 of odd size": dict(weight="F16", embd=100, heads=3, kv_heads=1, head_k=34, ff=77),
    "BF16 of odd size": dict(weight="BF16", embd=100, heads=3, kv_heads=1, head_k=34, ff=77),
    "F16 gemma3": dict(arch="gemma3", weight="F16"),
    "F32 with a Q8_0 embedding": dict(out_weight="Q8_0", embd=64),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(model, score, name):
    path = model(**VARIANTS[name])
    tokens, got = score(path, 70, 2, *F32_CACHE)
    if name == "F32 with a Q8_0 embedding":          # activations of the output are int8: as in test_quantised
        assert np.mean(largest(got, expected(path, tokens, int8=True)) <= FLOAT_BOUND) >= 0.75
    else:
        agree(got, expected(path, tokens))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_half_precision_cache(model, score, arch):
    """Rounding a key to half precision may go the other way too, but a step is then 1e-3 of one number of one key."""
    path = model(arch=arch, window=24)
    tokens, got = score(path, 70, 2)
    agree(got, expected(path, tokens, kv="f16"), bound=2e-3)
    error = lambda kv: np.median(largest(got, expected(path, tokens, kv=kv)))
    assert error("f16") < 0.1 * error("f32")


@pytest.mark.parametrize("arch, window", [("llama", 0), ("gemma3", 300), ("gemma2", 257), ("phi3", 64)])
def test_long_windows(model, score, arch, window):
    """More than two splits of 256 keys."""
    path = model(arch=arch, window=window, layers=2, embd=128, ff=128)
    tokens, got = score(path, 700, 1, *F32_CACHE)
    agree(got, expected(path, tokens))


# ---- quantised weights: int8 activations

def check_quantised(path, tokens, got):
    exact, int8 = expected(path, tokens), expected(path, tokens, int8=True)
    error = largest(got, int8)
    same = np.mean(error <= FLOAT_BOUND)
    assert same >= 0.75, f"only {same:.0%} of the rows agree with int8 activations to {FLOAT_BOUND}"
    noise = largest(int8, exact).max()
    assert 1e-3 < noise < 3 and largest(got, exact).max() <= 1.5 * noise
    assert error.max() <= 1.5 * noise, f"{error.max():.3g} where int8 costs {noise:.3g}"
    flat = lambda x: x.reshape(-1, x.shape[-1])
    of_gen, of_int8 = (kl_divergence(flat(exact), flat(x)).mean() for x in (got, int8))
    assert 0.8 * of_int8 <= of_gen <= 1.2 * of_int8, f"KL from the exact model {of_gen:.3g}, by int8 {of_int8:.3g}"


@pytest.fixture(params=ISAS)
def isa(request, gen, model):
    """Each instruction set that this machine has."""
    r = gen("-m", model(), "-p", "a", "-n", "1", env={"GEN_ISA": request.param})
    if r.rc == 2 and "GEN_ISA" in r.err:
        pytest.skip(f"this machine lacks {request.param}")
    assert r.rc == 0, r.err
    return {"GEN_ISA": request.param}


@pytest.mark.parametrize("weight", QUANTISED)
def test_quantised(model, score, isa, weight):
    path = model(weight=weight, layers=1)
    tokens, got = score(path, 8, 40, *F32_CACHE, env=isa)
    check_quantised(path, tokens, got)


@pytest.mark.parametrize("weight", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"])
def test_quantised_rows_of_odd_size(model, score, isa, weight):
    """Nine and eleven blocks of 32 in a row."""
    path = model(weight=weight, layers=1, embd=288, ff=352, heads=3, kv_heads=1, head_k=96)
    tokens, got = score(path, 8, 40, *F32_CACHE, env=isa)
    check_quantised(path, tokens, got)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("weight", ["Q4_1", "Q6_K"])
def test_quantised_architectures(model, score, arch, weight):
    path = model(arch=arch, weight=weight, layers=1)
    tokens, got = score(path, 8, 40, *F32_CACHE)
    check_quantised(path, tokens, got)


@pytest.mark.parametrize("weight", QUANTISED)
def test_quantised_and_deep(model, score, weight):
    """Long windows and several layers: by now most rows met an activation that was rounded the other way, and
    differences are as large as the noise of int8 itself. Its size must still be right."""
    path = model(weight=weight, layers=3)
    tokens, got = score(path, 66, 6, *F32_CACHE)
    exact, int8 = expected(path, tokens), expected(path, tokens, int8=True)
    flat = lambda x: x.reshape(-1, x.shape[-1])
    of_gen, of_int8 = (kl_divergence(flat(exact), flat(x)).mean() for x in (got, int8))
    assert 0.75 * of_int8 <= of_gen <= 1.3 * of_int8, f"KL from the exact model {of_gen:.3g}, by int8 {of_int8:.3g}"


@pytest.mark.parametrize("weight", FLOAT_TYPES)
def test_float_instruction_sets(model, score, isa, weight):
    path = model(weight=weight, embd=100, heads=3, kv_heads=1, head_k=34, ff=77)
    for cache in "f32", "f16":
        tokens, got = score(path, 70, 2, "-ctk", cache, "-ctv", cache, env=isa)
        agree(got, expected(path, tokens, kv=cache), bound=FLOAT_BOUND if cache == "f32" else 2e-3)


# ---- the same bits (law 1)

@pytest.fixture(scope="module")
def last(gen, tmp_path_factory):
    """last(model, prompt bytes, options...): the object of a greedy one-token run, {..., logits_sha256, logprobs}."""
    prompt = tmp_path_factory.mktemp("prompts") / "prompt"

    def run(path, text, *options, n=1, env=None):
        prompt.write_bytes(text)
        return json.loads(gen.ok("-m", path, "-f", prompt, "-n", str(n), "--temp", "0", "--ignore-eos", "--json", "-q",
                                 "-t", "1", *options, env=env).text)
    return run


LENGTHS = [1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 513]
WAYS = [("-t", "2"), ("-t", "3"), ("-b", "1"), ("-b", "7"), ("-b", "32"), ("-b", "512"),
        ("--kv-layout", "contiguous"), ("--page-size", "64"), ("--page-size", "256"),
        ("-b", "33", "-t", "2", "--page-size", "96"),
        ("-b", "5", "-t", "1", "--kv-layout", "contiguous"), ("--no-mmap",), ("--no-kv-cache",)]
SAME_BITS = {
    "llama F32": dict(layers=2),
    "gemma3 Q4_K, window 40": dict(arch="gemma3", weight="Q4_K", window=40, layers=7, ff=256),
    "qwen2 Q8_0": dict(arch="qwen2", weight="Q8_0", kv_heads=1, head_k=80),
    "gemma2 Q5_1, window 33": dict(arch="gemma2", weight="Q5_1", window=33, caps=(3.0, 10.0)),
    "phi3 F16, window 256": dict(arch="phi3", weight="F16", window=256, head_k=96),
    "qwen3 IQ4_XS": dict(arch="qwen3", weight="IQ4_XS", heads=8, kv_heads=4, head_k=32),
}


def check_bits(path, last, length, ways, cache=("-ctk", "f32", "-ctv", "f32")):
    text = TEXT[:length]
    want = last(path, text, *cache)
    assert want["usage"]["prompt_tokens"] == length
    for way in ways:
        assert last(path, text, *cache, *way)["logits_sha256"] == want["logits_sha256"], f"{length} tokens, {way}"


@pytest.mark.parametrize("name", SAME_BITS)
def test_same_bits(model, last, name):
    path = model(**SAME_BITS[name])
    ways = itertools.cycle(WAYS)
    for i, length in list(enumerate(LENGTHS))[list(SAME_BITS).index(name) % 2::2]:
        cache = ("-ctk", ("f32", "f16")[i % 2], "-ctv", ("f16", "f32")[i // 2 % 2])
        check_bits(path, last, length, itertools.islice(ways, 2), cache)
    check_bits(path, last, 257, WAYS)


@pytest.mark.long
@pytest.mark.parametrize("name", SAME_BITS)
@pytest.mark.parametrize("length", LENGTHS)
def test_same_bits_long(model, last, isa, name, length):
    path = model(**SAME_BITS[name])
    for k, v in itertools.product(("f32", "f16"), repeat=2):
        run = lambda *way: last(path, TEXT[:length], "-ctk", k, "-ctv", v, *way, env=isa)["logits_sha256"]
        want = run()
        for way in WAYS:
            assert run(*way) == want, way


@pytest.mark.parametrize("name", ["llama F32", "phi3 F16, window 256"])
def test_prompt_lengths(model, last, name):
    """The first token's hundred best log-probabilities, for prompts that end around the edges of blocks and splits."""
    path = model(**SAME_BITS[name])
    oracle = Oracle(path)
    for length in LENGTHS:
        exact = oracle.log_probs(ids_of(TEXT[:length]), length - 1)[0]
        best = last(path, TEXT[:length], *F32_CACHE, "--logprobs", "100")["logprobs"]["content"][0]["top_logprobs"]
        assert len(best) == 100
        got = np.array([item["logprob"] for item in best])
        assert np.abs(got - np.sort(exact)[::-1][:100]).max() <= FLOAT_BOUND, length
        for item in best:
            if len(item["bytes"]) == 1:
                assert abs(exact[BYTE0 + item["bytes"][0]] - item["logprob"]) <= FLOAT_BOUND, (length, item)


@pytest.mark.parametrize("name", SAME_BITS)
def test_decoded_is_prefilled(model, last, name):
    """The logits after a prompt and generated tokens are those of a prompt that holds them."""
    path = model(**SAME_BITS[name])
    no_control = [word for i in [*range(len(CONTROL)), BYTE0 + ord("\n")] for word in ("-l", f"{i}-inf")]
    for length, n in (29, 8), (250, 12):
        run = last(path, TEXT[:length], *no_control, n=n)
        assert len(run["tokens"]) == n and run["finish_reason"] == "length"
        text = TEXT[:length] + bytes(t - BYTE0 for t in run["tokens"][:-1])
        again = last(path, text, "-b", "512")
        assert again["usage"]["prompt_tokens"] == length + n - 1
        assert again["logits_sha256"] == run["logits_sha256"]


def test_hash_tells_logits_apart(model, last):
    path = model()
    runs = [last(path, TEXT[:n]) for n in range(1, 9)] + [last(model(seed=2), TEXT[:4])]
    seen = {run["logits_sha256"] for run in runs}
    assert len(seen) == 9 and all(len(h) == len(hashlib.sha256().hexdigest()) for h in seen)


def test_known_text(gen, tmp_path):
    path = chain_model(str(tmp_path / "chain.gguf"), "abcd!")
    assert gen.ok("-m", path, "-p", ":", "-n", "50", "--temp", "0", "-q").text == "abcd!"
    assert gen.ok("-m", path, "-p", "some words:", "-n", "3", "--temp", "0", "-q", "-b", "1").text == "abc"


# ---- B8: head size is not n_embd / n_head; the output matrix may be missing

@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "phi3", "gemma3"])
@pytest.mark.parametrize("weight", ["F32", "Q8_0"])
def test_tied_output(model, last, arch, weight):
    tied = model(arch=arch, weight=weight, tied=True)
    copied = model(arch=arch, weight=weight, copy_embd=True)
    assert last(tied, TEXT[:40])["logits_sha256"] == last(copied, TEXT[:40])["logits_sha256"]


# ---- B11: the window is exactly as wide as the file says

def changed(at):
    text = bytearray(TEXT[:20])
    text[at] = ord("A")
    return bytes(text)


@pytest.mark.parametrize("way", [("-b", "1"), ("-b", "7"), ("-b", "512"), ("--no-kv-cache",)])
@pytest.mark.parametrize("arch", ["phi3", "gemma2", "gemma3"])
def test_window_of_eight(model, last, arch, way):
    path = model(arch=arch, layers=1, window=8)
    want = last(path, TEXT[:20], *way)["logits_sha256"]
    assert last(path, changed(11), *way)["logits_sha256"] == want, "19 - 11 is 8: just out of sight"
    assert last(path, changed(12), *way)["logits_sha256"] != want, "19 - 12 is 7: the first one in sight"


@pytest.mark.parametrize("arch", ["phi3", "gemma2", "gemma3"])
def test_window_while_decoding(model, last, arch):
    """The last five of the twenty tokens are generated, held to one letter by a bias."""
    path = model(arch=arch, layers=1, window=8)
    force = ("-l", f"{BYTE0 + ord('x')}+1000")

    def decode(text):
        run = last(path, text[:15], *force, n=6)
        assert run["text"] == "xxxxxx"
        return run["logits_sha256"]
    want = last(path, TEXT[:15] + b"xxxxx")["logits_sha256"]
    assert decode(TEXT) == want and decode(changed(11)) == want and decode(changed(12)) != want


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_no_window(model, last, arch):
    """These architectures have none, whatever the file says."""
    path = model(arch=arch, layers=1, window=8)
    hashes = {last(path, text)["logits_sha256"] for text in (TEXT[:20], changed(0), changed(11), changed(12))}
    assert len(hashes) == 4


def test_which_layers_are_local(model, last):
    """Of gemma3's six layers the last sees everything, and so does the second of gemma2's two."""
    for arch, layers, sees in ("gemma3", 5, False), ("gemma3", 6, True), ("gemma2", 1, False), ("gemma2", 2, True):
        path = model(arch=arch, layers=layers, window=3)
        hashes = {last(path, text)["logits_sha256"] for text in (TEXT[:20], changed(1))}
        assert len(hashes) == (2 if sees else 1), (arch, layers)


# ---- B12: RoPE scaling

def test_scaling_by_file_and_by_option(model, last):
    """Divisors of four for all pairs, a linear factor of four and --rope-scale 4 are one; divisors of one are none."""
    best = lambda path, *options, text=TEXT[:60]: last(path, text, *F32_CACHE, "--logprobs", "100", *options)
    plain, divided = model(), model(rope_freqs=4.0)
    factor = model(rope=("linear", 4.0, 0))
    assert best(model(rope_freqs=1.0))["logits_sha256"] == best(plain)["logits_sha256"]
    want = [item["logprob"] for item in best(factor)["logprobs"]["content"][0]["top_logprobs"]]
    for run in best(divided), best(plain, "--rope-scale", "4"):
        got = [item["logprob"] for item in run["logprobs"]["content"][0]["top_logprobs"]]
        assert np.abs(np.array(got) - want).max() <= FLOAT_BOUND
    other_base = model(rope_base=5e5)
    different = {run["logits_sha256"] for run in (best(plain), best(factor), best(other_base),
                                                  best(plain, "--rope-freq-base", "777"))}
    assert len(different) == 4
    assert best(plain, "--rope-freq-base", "5e5")["logits_sha256"] == best(other_base)["logits_sha256"]
    first = {best(path, text=TEXT[:1])["logits_sha256"] for path in (plain, divided, factor, other_base)}
    assert len(first) == 1, "position 0 does not turn"


@pytest.mark.parametrize("options, override", [(("--rope-scale", "2"), dict(rope_scale=2)),
                                               (("--rope-freq-base", "1234"), dict(rope_base=1234))])
def test_options_beat_the_file(model, score, options, override):
    path = model(rope=("linear", 4.0, 0), rope_base=5e5)
    tokens, got = score(path, 70, 1, *F32_CACHE, *options)
    agree(got, expected(path, tokens, **override))


def test_far_position(model, last):
    path = model(rope_base=5e5, layers=1, embd=128, ff=64, heads=2, kv_heads=1)
    exact = np.sort(Oracle(path).log_probs(ids_of(TEXT[:3001]), 3000)[0])[::-1]
    best = last(path, TEXT[:3001], *F32_CACHE, "--logprobs", "100")["logprobs"]["content"][0]["top_logprobs"]
    assert np.abs(exact[:100] - [item["logprob"] for item in best]).max() <= FLOAT_BOUND


def test_factor_without_a_type_is_linear(model, last, tmp_path):
    """Files older than the key rope.scaling.type: the factor holds."""
    path = model(rope=("linear", 4.0, 0))
    untyped = tmp_path / "untyped.gguf"
    data = open(path, "rb").read()
    assert data.count(b"llama.rope.scaling.type") == 1
    untyped.write_bytes(data.replace(b"llama.rope.scaling.type", b"llama.rope.scaling.tipe"))
    assert last(untyped, TEXT[:60])["logits_sha256"] == last(path, TEXT[:60])["logits_sha256"]


def test_unknown_scaling_is_refused(gen, model, tmp_path):
    path = model(rope=("linear", 4.0, 0))
    strange = tmp_path / "strange.gguf"
    data = open(path, "rb").read()
    assert data.count(b"linear") == 1
    strange.write_bytes(data.replace(b"linear", b"lunear"))
    gen.refused("-m", strange, "-p", "a", "-n", "1", rc=3, says=["rope.scaling.type", "lunear"])


# ---- the oracle itself

def test_oracle_by_hand():
    """log_softmax and the divergence on numbers that can be checked on paper."""
    p = log_softmax(np.log(np.array([[1.0, 1.0, 2.0]])))
    assert np.allclose(np.exp(p), [[0.25, 0.25, 0.5]])
    q = np.log(np.array([[0.5, 0.25, 0.25]]))
    assert np.allclose(kl_divergence(p, q), 0.25 * np.log(0.5) + 0.5 * np.log(2))
