"""Nothing that a terminal would obey, and nothing that rich would take for markup, is printed as it is."""

import ast
import io
import json
import logging
import re
import sys

import pytest
import yaml
from rich.table import Table

from qerl.base.errors import CheckpointError
from qerl.base.printable import SafeConsole, in_comment, printable, quoted
from qerl.cli.chat import Conversation, talk
from qerl.cli.terminal import run_command
from tests.helpers.report_factory import full_run, sample

HOSTILE = "a\x1b[2Jb\x1b]0;title\x07c\x9b31md\re\u202ef\x08\udc1b"
MARKUP = "[/x] [bold]b[/bold] :smile: [link=file:///etc]here[/link]"


def harmless(text):
    return not any(ord(each) < 32 or 127 <= ord(each) < 160 or each == "\u202e" for each in re.sub(r"[\n\t]", "", text))


def test_line_feeds_and_tabs_stay():
    assert printable("one\n\ttwo\r\nthree äß∞ 中") == "one\n\ttwo\nthree äß∞ 中"
    assert harmless(printable(HOSTILE))
    printable(HOSTILE).encode()


@pytest.mark.parametrize(
    "text", [HOSTILE, MARKUP, 'x"""\n\\N{x}', "\u2028\x85\x7f\0'", "größe 中 😀", "\U000e0001", "\ud83d"]
)
def test_quoted_text_is_one_line_that_python_and_yaml_read_back(text):
    shown = quoted(text)
    assert shown.isprintable()
    assert ast.literal_eval(shown) == yaml.safe_load(shown) == text
    assert in_comment(text) == (text if text.isprintable() else shown)


def test_a_console_shows_text_as_it_is(capsys):
    table = Table(MARKUP, title=MARKUP)
    table.add_row(f"{HOSTILE} {MARKUP}")
    console = SafeConsole()
    console.print(table, soft_wrap=True)
    console.print(MARKUP, HOSTILE, soft_wrap=True)
    shown = capsys.readouterr().out
    assert harmless(shown)
    assert shown.count("[/x]") == shown.count(":smile:") == 4


def test_errors_and_logs_are_shown_without_control_characters(capsys):
    def command(arguments, prog_name, standalone_mode):
        logging.getLogger("qerl.test").warning("a server said %s", HOSTILE)
        raise CheckpointError(f"there is no folder {HOSTILE}{MARKUP}")

    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        with pytest.raises(SystemExit):
            run_command(command)
    finally:
        root.handlers = before
    shown = capsys.readouterr().err
    assert harmless(shown)
    assert MARKUP in shown
    assert "a server said a" in shown


class Speaking(Conversation):
    def ask(self, question):
        return HOSTILE + "\n\tend"


def test_answers_of_a_chat_do_not_reach_the_terminal_raw():
    answers = io.StringIO()
    talk(Speaking(None, None), io.StringIO("hello\n"), answers)
    assert harmless(answers.getvalue())
    assert answers.getvalue().endswith("\n\tend\n")


@pytest.mark.parametrize("command", ["grade", "report"])
def test_commands_that_show_completions(here, tmp_path, command):
    row = {"question": "3+4?", "answer": f"7{MARKUP}", "completion": f"\\boxed{{{MARKUP}}}", "correct": True}
    folder = tmp_path / "[" / "x]"
    folder.mkdir(parents=True)
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({**row, "completion": HOSTILE}) + "\n" + json.dumps({**row, MARKUP: HOSTILE}) + "\n")
    run = full_run(folder / "run", [sample(HOSTILE + MARKUP, 1.0, HOSTILE)])
    code, out, err = here(command, *(["--task", "math500", file] if command == "grade" else [run]))
    assert (code, harmless(out + err)) == (0, True), err
    code, out, err = here("report", f"{folder}/{HOSTILE[:4]}{MARKUP}")
    assert code == 2
    assert harmless(out + err)
    assert "[/x]" in err


def test_copies_of_completions_are_passed_over(here, tmp_path):
    run = full_run(tmp_path / "run", [sample("7", 1.0)])
    names = ("step-000004 (copy).jsonl", "step-x.jsonl", "step-4٤.jsonl")
    for name in (*names, "step-000004.jsonl.bak"):
        (run / "completions" / name).write_text("what ever\n")
    code, _, err = here("report", run)
    assert code == 0, err
    assert all(f"completions/{name} is passed over" in err for name in names)


def test_what_stdout_cannot_encode_is_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit):
        run_command(lambda *args, **options: sys.stdout.write("π"))
    stream.flush()
    assert stream.buffer.getvalue() == b"\\u03c0"
