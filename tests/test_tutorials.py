"""The tutorials of docs/, run as they are printed: their files, their commands, and what they say is shown.

Numbers of an output may differ, since they depend on the processor; `...` stands for lines that a page leaves out.
"""

import re
import subprocess
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from qerl.cli.main import app
from qerl.cli.train import with_resume_value
from tests.helpers.parsed import split_command

DOCS = Path(__file__).parent.parent / "docs"
TUTORIALS = ("tutorial-reward", "tutorial-tools", "tutorial-serve")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$|((?:^    [^\n]*\n)+)", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    kind: str  # bash, text, python or yaml; commands that are only indented are "bash" too
    text: str


def blocks(page):
    return [Block(kind or "bash", code or indented) for kind, code, indented in FENCE.findall(page)]


def run(command):
    """What `qerl ...` prints, in this process; what a shell prints of anything else."""
    before, pipe, ours = command.rpartition(" | ")
    if not ours.startswith("qerl "):
        done = subprocess.run(["bash", "-ec", command], check=True, stdout=subprocess.PIPE, text=True, timeout=60)
        return done.stdout
    words = with_resume_value(split_command(ours))
    done = CliRunner().invoke(app, words, input=run(before) if pipe else None, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def plain(text):
    """The text without what differs between processors and terminals: numbers, and the lines of a table."""
    return re.sub(r"[\d.,%]*\d[\d.,%]*(e[+-]\d+)?", "N", re.sub(r"[^\x00-\x7f]|\x1b\[[\d;]*m", " ", text))


def check_printed(wanted, printed):
    parts = [" ".join(part.split()) for part in plain(wanted).split("...")]
    if not re.search(".*".join(map(re.escape, parts)), " ".join(plain(printed).split())):
        pytest.fail(f"the page shows\n{wanted}\nand the commands print\n{printed}")
    accuracy = re.compile(r"^  (?:accuracy|second) +([\d.]+)%", re.MULTILINE)
    shown = accuracy.findall(wanted)
    for ours, found in zip(shown, accuracy.findall(printed)[-len(shown) :], strict=False):
        assert abs(float(ours) - float(found)) < 15, "points beside what the page shows"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_as_it_is_printed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    printed, shown = "", 0
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8").partition("\n## With your own model")[0]
    for kind, text in blocks(page):
        if kind == "console":  # for a card, or a second shell
            continue
        if kind == "text":
            check_printed(text, printed)
            shown += 1
        elif file := re.match(r"# (\S+\.\w+)\n", text):
            Path(file[1]).write_text(text)
        elif kind == "python":
            with redirect_stdout(StringIO()) as said:
                exec(compile(text, name, "exec"), {})
            printed = said.getvalue()
        elif text.startswith("    "):
            printed = "".join(run(line.strip()) for line in text.splitlines())
        else:
            printed = run(text)
    assert shown > 1
