"""Puts the option tables that ./gen --help markdown prints into README.md, between their two marker lines."""
import pathlib
import subprocess
import sys

FILE = pathlib.Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "puts them here. -->\n", "<!-- end of the options -->"


def with_options(gen):
    """README.md's text as it should be."""
    text, table = FILE.read_text(), subprocess.run([gen, "--help", "markdown"], capture_output=True, text=True, check=True).stdout
    head, rest = text.split(BEGIN, 1)
    return head + BEGIN + table.strip("\n") + "\n" + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    FILE.write_text(with_options(sys.argv[1]))
