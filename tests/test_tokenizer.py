"""The tokenizer against conformance data and, on random text, against a second implementation (the
`tokenizers` package); round trips, broken UTF-8, speed and the time of opening."""
import os
import pathlib
import random
import struct
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from conftest import ROOT, SANITIZED

HERE = pathlib.Path(__file__).parent

# The expressions in the models' own tokenizer.json, applied one after the other, each to the pieces that the one before
# left.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
UP, LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{UP}*{LOW}+|[^\r\n\p{{L}}\p{{N}}]?{UP}+{LOW}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (rf"[^\r\n\p{{L}}\p{{N}}]?{UP}*{LOW}+{TAIL}|[^\r\n\p{{L}}\p{{N}}]?{UP}+{LOW}*{TAIL}|\p{{N}}{{1,3}}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CJK = "[一-龥\u0800-一가-\ud7ff]+"
CASED = ("A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF\u0370-\u0373"
         "\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F"
         "\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77"
         "\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D"
         "\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB"
         "\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128"
         "\u212A-\u212D\u212F-\u2134\u2139\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4"
         "\u2CEB-\u2CEE\u2CF2\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF"
         "\uFB00-\uFB06\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A\U00010400-\U0001044F\U000104B0-\U000104D3"
         "\U000104D8-\U000104FB\U00010C80-\U00010CB2\U00010CC0-\U00010CF2\U000118A0-\U000118DF\U0001E900-\U0001E943")
DIGITS = [r"\p{N}", GPT2]
PATTERNS = {
    "gpt-2": [GPT2], "mpt": [GPT2], "smollm": DIGITS, "starcoder": DIGITS, "refact": DIGITS, "command-r": DIGITS,
    "llama-bpe": [LLAMA3], "qwen2": [LLAMA3.replace("{1,3}", "")], "qwen35": [QWEN35], "tekken": [TEKKEN],
    "gpt-4o": [GPT4O],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "deepseek-llm": ["[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, r"\p{N}+"],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"],
}
WHOLE_WORDS = ("llama-bpe", "tekken")


def records(items):
    return b"".join(struct.pack("<I", len(x)) + x for x in items)


def encode(tool, model, texts, mode="encode", timeout=120):
    """The ids of each text (bytes or str)."""
    raw = [x.encode() if isinstance(x, str) else x for x in texts]
    r = tool("tokenize", model, mode, stdin=records(raw), timeout=timeout)
    assert r.rc == 0, r.err
    lines = r.text.split("\n")[:-1]
    assert len(lines) == len(texts)
    return [[int(x) for x in line.split()] for line in lines]


def decode(tool, model, lists):
    """The bytes of each list of ids."""
    packed = b"".join(struct.pack(f"<I{len(ids)}i", len(ids), *ids) for ids in lists)
    r = tool("tokenize", model, "decode", stdin=packed, timeout=120)
    assert r.rc == 0, r.err
    out, at = [], 0
    while at < len(r.out):
        n, = struct.unpack_from("<I", r.out, at)
        out.append(r.out[at + 4:at + 4 + n])
        at += 4 + n
    assert len(out) == len(lists)
    return out


def random_texts(seed, count, lookalikes=()):
    """Text of all kinds: letters, digits, runs of white space, CJK, emoji, combining marks, any assigned code point,
    look-alikes of special tokens."""
    rng = random.Random(seed)
    runs = [line.split() for line in (HERE / "golden/unicode14.txt").read_text().splitlines()[1:]]
    assigned = [c for first, last in runs for c in range(int(first, 16), int(last, 16) + 1)]
    any_of = lambda text: lambda: "".join(rng.choices(text, k=rng.randint(1, 6)))
    spread = lambda first, last: lambda: "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 5)))
    words = ("the of and to in return def int main self print don't WE'LL I'm it's o'clock hello World HELLO iPhone "
             "naïve Straße ИМЯ слово λόγος שלום سلام हिन्दी ไทย 日本語 テスト 한국어 Việt été").split()
    kinds = [
        lambda: rng.choice(words), lambda: " " + rng.choice(words), any_of("abcdefghijklmnopqrstuvwxyz"),
        any_of("ABCxyz'’-_"), any_of("0123456789"), any_of("0123456789٠١٢٣०१२½²Ⅷ①"), any_of(" "), any_of("\n"),
        any_of("\t"),
        any_of(" \n\r\t\v\f\u00a0\u0085\u2003\u2028\u3000\u180e\u200b\ufeff"), lambda: " " * rng.randint(1, 40),
        lambda: "\n" * rng.randint(1, 35), any_of("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"), any_of("—…“”«»¿¡。、！？·※→∑≈©®™"),
        any_of("/\n!;. "),
        spread(0x4E00, 0x9FFF), spread(0x3041, 0x30FE), spread(0xAC00, 0xD7A3), spread(0x1F300, 0x1F64F),
        lambda: rng.choice("aeonAEO漢字") + "".join(chr(rng.randint(0x300, 0x36F)) for _ in range(rng.randint(1, 4))),
        lambda: rng.choice(["👍🏽", "👨‍👩‍👧", "🏳️‍🌈", "🇩🇪", "☃️", "1️⃣"]), lambda: "\0" * rng.randint(1, 2),
        lambda: "".join(chr(rng.choice(assigned)) for _ in range(rng.randint(1, 6))),
        lambda: rng.choice(["'s", "'S", "'ll", "'LL", "'re", "'Ve", "'d", "'t", "'m", "'x", "'ſ"]),
        lambda: rng.choice(lookalikes or ["<s>"]), lambda: rng.choice(["<|", "|>", "<s>", "</s>", "<0x0A>"]),
    ]
    return ["".join(rng.choice(kinds)() for _ in range(rng.choice([1, 2, 3, 5, 8, 13, 30]))) for _ in range(count)]


class Vocabulary:
    """tokenizer.ggml.* of a file (gguf.GGUFReader takes half a minute for 262,144 tokens)."""
    def __init__(self, path):
        self.raw, self.at = pathlib.Path(path).open("rb").read(32 << 20), 16
        values = {}
        for _ in range(self.number("Q")):
            key = self.string()
            values[key] = self.value(self.number("I"))
        get = lambda name: values.get(f"tokenizer.ggml.{name}")
        self.tokens, self.types = get("tokens"), get("token_type")
        self.merges, self.scores = get("merges"), get("scores")
        del self.raw

    def number(self, form):
        x, = struct.unpack_from("<" + form, self.raw, self.at)
        self.at += struct.calcsize("<" + form)
        return x

    def string(self):
        n = self.number("Q")
        self.at += n
        return self.raw[self.at - n:self.at].decode()

    def value(self, kind):
        if kind == 8:
            return self.string()
        if kind != 9:
            return self.number("BbHhIif?__Qqd"[kind])
        kind, n = self.number("I"), self.number("Q")
        return [self.value(kind) for _ in range(n)]

    def of_type(self, *types):
        return [x for x, kind in zip(self.tokens, self.types) if kind in types]

    def ids(self):
        return {x: i for i, x in enumerate(self.tokens)}


def byte_level(vocabulary, pre, merges=None):
    """The `tokenizers` package's tokenizer for a byte-level BPE vocabulary."""
    pairs = merges or [tuple(m.split(" ")) for m in vocabulary.merges]
    t = Tokenizer(models.BPE(vocabulary.ids(), pairs, ignore_merges=pre in WHOLE_WORDS))
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(x), "isolated") for x in PATTERNS[pre]] +
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    return t


def sentence_piece(vocabulary):
    """The same for a SentencePiece vocabulary whose scores all differ: a BPE whose merges are all ways to put a token
    together, best token first."""
    known = vocabulary.ids()
    merges = []
    order = sorted((i for i, kind in enumerate(vocabulary.types) if kind == 1), key=lambda i: -vocabulary.scores[i])
    ordinary = {vocabulary.tokens[i] for i in order}
    for i in order:
        token = vocabulary.tokens[i]
        halves = [(token[:k], token[k:]) for k in range(1, len(token))]
        merges += [(left, right) for left, right in halves if left in ordinary and right in ordinary]
    t = Tokenizer(models.BPE(known, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Replace(" ", "▁")
    t.add_tokens([AddedToken(x, normalized=False) for x in vocabulary.of_type(4)])
    return t


def differences(texts, ours, theirs):
    return [(x, a, b) for x, a, b in zip(texts, ours, theirs) if a != b][:3]


def ids_of(reference, texts):
    return [x.ids for x in reference.encode_batch(texts, add_special_tokens=False)]


@pytest.fixture(scope="module")
def smollm2_vocabulary(smollm2):
    return Vocabulary(smollm2)


@pytest.fixture(scope="module")
def gemma3_reference(gemma3):
    return sentence_piece(Vocabulary(gemma3))


def test_conformance(tool, data):
    cases = sorted((data / "tokenizers").glob("*.gguf.inp"))
    assert len(cases) >= 7
    for inp in cases:
        model = inp.with_suffix("")
        texts = inp.read_bytes().split(b"\n__ggml_vocab_test__\n")
        if not texts[-1]:
            texts.pop()
        expected = [[int(x) for x in line.split()] for line in model.with_suffix(".gguf.out").read_text().splitlines()]
        assert len(texts) == len(expected) >= 40
        got = encode(tool, model, texts)
        assert not differences(texts, got, expected), model.name
        assert not differences(texts, decode(tool, model, got), texts), model.name


def test_smollm2(tool, smollm2, smollm2_vocabulary):
    """10,000 random strings: ids equal to the second implementation, and decoding gives the string back, except for six
    control characters that this vocabulary has no token for."""
    lost = [chr(c) for c, ids in enumerate(encode(tool, smollm2, [chr(c) for c in range(128)])) if not ids]
    assert lost == list("\x04\x06\x13\x14\x16\x1d")
    drop = str.maketrans("", "", "".join(lost))
    specials = smollm2_vocabulary.of_type(3)
    reference = byte_level(smollm2_vocabulary, "smollm")
    texts = random_texts(1, 10000, specials)
    for mode in "encode", "trusted":
        got = encode(tool, smollm2, texts, mode)
        assert not differences(texts, got, ids_of(reference, texts)), mode
        assert not differences(texts, decode(tool, smollm2, got), [x.translate(drop).encode() for x in texts]), mode
        reference.add_special_tokens([AddedToken(x, normalized=False) for x in specials])


def test_gemma3(tool, gemma3, gemma3_reference):
    """The same. U+2581 is a space for SentencePiece, so it cannot come back."""
    texts = random_texts(3, 10000, "<bos> <eos> <start_of_turn> <end_of_turn> <table> </s> <unused7>".split())
    got = encode(tool, gemma3, texts)
    assert not differences(texts, got, ids_of(gemma3_reference, texts))
    assert not differences(texts, decode(tool, gemma3, got), [x.replace("▁", " ").encode() for x in texts])


@pytest.mark.parametrize("pre", PATTERNS)
def test_patterns(tool, pre):
    """Each family's words."""
    texts = random_texts(4, 4000)
    r = tool("tokenize", pre, "words", stdin=records([x.encode() for x in texts]))
    assert r.rc == 0, r.err
    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(x), "isolated") for x in PATTERNS[pre]])
    lines = r.text.split("\n")[:-1]
    theirs = [[len(word.encode()) for word, place in cut.pre_tokenize_str(x)] for x in texts]
    assert not differences(texts, [[int(x) for x in line.split()] for line in lines], theirs)


def test_broken_text(tool, gemma3, data):
    """Random bytes come back, shown the way Python shows broken UTF-8: one U+FFFD for each piece of a character."""
    rng = random.Random(5)
    alphabet = [bytes([b]) for b in range(256)] + [x.encode() for x in ("é", "漢", "👍", " the")] + [b"\xf0\x9f", b"\xe2"]
    texts = [b"".join(rng.choices(alphabet, k=rng.randint(0, 60))) for _ in range(2000)]
    expected = [x.decode("utf-8", "replace").encode() for x in texts]
    for model in gemma3, data / "tokenizers/ggml-vocab-gpt-2.gguf", data / "tokenizers/ggml-vocab-llama-bpe.gguf":
        back = decode(tool, model, encode(tool, model, texts))
        wanted = [x.replace("▁".encode(), b" ") for x in expected] if model == gemma3 else expected
        assert not differences(texts, back, wanted), model


def seconds(tool, model, path, times=3):
    """Processor time to encode a file, least of some."""
    lines = tool("tokenize", model, "time", *[path] * times, timeout=240).text.splitlines()
    return min(float(line.split()[0]) for line in lines)


def natural_text(size):
    """Sources and texts of this repository over and over."""
    text = "".join(p.read_text() for p in sorted([*ROOT.glob("*.[ch]"), *ROOT.glob("*.md"), *HERE.glob("*.[ch]")]))
    return (text * (size // len(text) + 1))[:size]


@pytest.mark.skipif(SANITIZED, reason="speed of a sanitizers' build means nothing")
def test_speed(tool, smollm2, smollm2_vocabulary, gemma3, gemma3_reference, tmp_path):
    """Never slower than the second implementation in the same run, both on one thread."""
    rng = random.Random(6)
    texts = {"natural": natural_text(1 << 18), "word": "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=1 << 19))}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        for model, reference in (smollm2, byte_level(smollm2_vocabulary, "smollm")), (gemma3, gemma3_reference):
            start = time.process_time()
            ids = reference.encode(text, add_special_tokens=False).ids
            theirs = time.process_time() - start
            ours = seconds(tool, model, tmp_path / name)
            size = len(text.encode()) / 1e6
            print(f"{model.name}, {name}: {size / ours:.1f} MB/s, tokenizers {size / theirs:.1f} MB/s")
            assert ours <= theirs
            assert encode(tool, model, [text]) == [ids]


@pytest.mark.skipif(SANITIZED, reason="speed of a sanitizers' build means nothing")
@pytest.mark.parametrize("size", [10, pytest.param(50, marks=pytest.mark.long)])
def test_linear(tool, smollm2, gemma3, tmp_path, size):
    """Time grows as the text does: for natural text, for text without spaces, for white space."""
    kinds = {"natural": natural_text(1 << 20), "one word": "漢字かな交じり文" * 40000, "white space": " \n" * (1 << 19)}
    for name, text in kinds.items():
        (tmp_path / "1").write_text(text)
        (tmp_path / "n").write_text(text * size)
        for model in smollm2, gemma3:
            one, many = seconds(tool, model, tmp_path / "1"), seconds(tool, model, tmp_path / "n", 1)
            print(f"{model.name}, {name}: {one:.3f} s, {size} times as much {many:.3f} s")
            assert many <= 3 * size * one + 0.1        # caches and a logarithm count, too


@pytest.mark.skipif(SANITIZED, reason="speed of a sanitizers' build means nothing")
def test_opening(tool, smollm2, gemma3):
    for model, limit in (smollm2, 0.02), (gemma3, 0.05):
        taken = float(tool("tokenize", model, "open", "10").text)
        print(f"{model.name}: {1000 * taken:.1f} ms")
        assert taken < limit
