"""README.md says what the program does: its option tables are the program's own, its examples run."""
import json
import re

import readme


def test_options(gen):
    assert readme.FILE.read_text() == readme.with_options(gen.path), "run: make readme"


def test_json_example(gen, smollm2):
    """The JSON object shown has the fields that the program prints."""
    shown = json.loads(re.search(r'^    (\{"text".*?\n)\n', readme.FILE.read_text(), re.M | re.S).group(1).replace("\n    ", ""))
    printed = json.loads(gen.ok("--json", "-q", "--temp", "0", "-n", "4", "-p", "One, two, three,").text)
    assert shown.keys() == printed.keys() and shown["kv"].keys() == printed["kv"].keys()
    assert shown["tokens"] == printed["tokens"] and shown["text"] == printed["text"]
