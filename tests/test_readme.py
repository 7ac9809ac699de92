"""README.md says what the program does: its option tables are the program's own, its examples run."""
import json
import re
import shutil
import subprocess

import pytest
import readme


def test_options(gen):
    assert readme.FILE.read_text() == readme.with_options(gen.path), "run: make readme"


def test_json_example(gen, smollm2):
    """The JSON object shown has the fields that the program prints."""
    shown = json.loads(re.search(r'^    (\{"text".*?\n)\n', readme.FILE.read_text(), re.M | re.S).group(1).replace("\n    ", ""))
    printed = json.loads(gen.ok("--json", "-q", "--temp", "0", "-n", "4", "-p", "One, two, three,").text)
    assert shown.keys() == printed.keys() and shown["kv"].keys() == printed["kv"].keys()
    assert shown["tokens"] == printed["tokens"] and shown["text"] == printed["text"]


def test_batch_example(gen, smollm2, tmp_path):
    """The commands of the batch example print what is shown."""
    if not shutil.which("jq"):
        pytest.skip("no jq to run the example with")
    block = re.search(r"^(    \$ cat prompts.jsonl\n(?:    .*\n)+)", readme.FILE.read_text(), re.M).group(1)
    parts = re.findall(r"^    \$ (.*)\n((?:    (?!\$ ).*\n)*)", block, re.M)
    assert len(parts) == 3
    for command, shown in parts:
        shown = shown.replace("\n    ", "\n")[4:]
        if command == "cat prompts.jsonl":
            (tmp_path / "prompts.jsonl").write_text(shown)
            continue
        run = subprocess.run(["bash", "-c", command.replace("./gen", f"'{gen.path}' -m '{smollm2}'")], cwd=tmp_path,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert run.stdout == shown, command
