"""--lookup changes speed only: same text, tokens, log-probabilities and logits at any temperature."""
import json

import pytest

REPEATS = "one two three four five six seven. one two three four five six seven. one two three"


def run(gen, model, *words):
    object = json.loads(gen.ok("-m", model, "--json", "-q", "--ignore-eos", *words).text)
    return {key: object[key] for key in ("text", "tokens", "finish_reason", "logits_sha256", "logprobs") if key in object}


@pytest.mark.parametrize("words", [["--temp", "0"], ["--temp", "1", "-s", "7"], ["--temp", "0.3", "-s", "1", "--repeat-penalty", "1.1"]])
def test_same_bits(gen, mkfix, words):
    for model in (mkfix("rand"), mkfix("rand", "--arch", "gemma3", "--layers", 7, "--swa", 40)):
        for more in ([], ["-ctk", "int4", "-ctv", "int8"], ["--window", "50"], ["-c", "100"]):
            words = [*words, "-p", REPEATS, "-n", "90", "--logprobs", "2", *more]
            assert run(gen, model, *words) == run(gen, model, *words, "--lookup")


def test_loop_is_drafted(gen, mkfix):
    """A model that says the same for ever: nearly every token comes from a draft, and the text stays right."""
    loop = mkfix("chain", "--text", "abcdefgh", "--end", "loop")
    text = gen.ok("-m", loop, "-p", ":", "-n", "400", "--temp", "0", "--lookup", "-q").text
    assert text == ("abcdefgh" * 50)


def test_real_model(gen, smollm2):
    for temp in ("0", "0.8"):
        words = ["-p", "Repeat the sentence. " + REPEATS, "-n", "60", "--temp", temp, "-s", "3"]
        assert run(gen, smollm2, *words) == run(gen, smollm2, *words, "--lookup")


def test_refused_without_cache(gen, mkfix):
    gen.refused("-m", mkfix("rand"), "-p", "x", "--lookup", "--no-kv-cache", rc=2, says="--lookup")
