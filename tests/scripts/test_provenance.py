"""A measurement records the code it was made with; all benchmarks that write JSON use the same function for it."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.bench.provenance import command, commit, machine, require_card, without_folders

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one commit that holds a source file and a result."""
    monkeypatch.delenv("QERL_COMMIT", raising=False)
    root = tmp_path / "checkout"
    (root / "benchmarks").mkdir(parents=True)
    (root / "code.py").write_text("1")
    (root / "benchmarks" / "result.json").write_text("1")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "one")
    return root


def git(root, *words):
    return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True).stdout.strip()


def test_it_gives_the_commit_of_the_checkout_and_marks_changed_code(checkout):
    head = git(checkout, "rev-parse", "--short", "HEAD")
    assert re.fullmatch("[0-9a-f]{7,}", head)
    (checkout / "new.log").write_text("not of the code")
    (checkout / "benchmarks" / "result.json").write_text("measured meanwhile")
    assert commit(checkout) == head
    (checkout / "code.py").write_text("2")
    assert commit(checkout) == f"{head}-dirty"


def test_the_environment_wins_unless_it_is_empty(checkout, monkeypatch):
    monkeypatch.setenv("QERL_COMMIT", "abc1234")
    assert commit(checkout) == machine()["commit"] == "abc1234"
    monkeypatch.setenv("QERL_COMMIT", "")
    assert commit(checkout) == git(checkout, "rev-parse", "--short", "HEAD")


def test_a_report_names_the_card_whose_code_ran(monkeypatch):
    monkeypatch.delenv("QERL_CAPABILITY", raising=False)
    assert "capability" not in machine()
    monkeypatch.setenv("QERL_CAPABILITY", "8.0")
    assert machine()["capability"] == "8.0"


def test_a_copy_without_history_does_not_take_the_commit_of_a_folder_above(checkout, monkeypatch):
    copy = checkout / "copy"
    copy.mkdir()
    assert commit(copy) == ""
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit(checkout) == ""  # without git


def test_every_benchmark_that_needs_a_card_records_its_commit():
    scripts = [path for path in (ROOT / "scripts").rglob("*.py") if writes_a_report(path)]
    assert len(scripts) >= 10
    assert [p.name for p in scripts if "**machine()" not in p.read_text(encoding="utf-8")] == []


def writes_a_report(path):
    text = path.read_text(encoding="utf-8")
    return '"command": command()' in text


def test_a_command_names_no_folder_of_this_machine(monkeypatch):
    words = [f"{ROOT}/scripts/bench/bench_step.py", "--model", "/data/ck/7b", "--out", "runs/a.json", "--set"]
    monkeypatch.setattr(sys, "argv", [*words, "rewards=[{name: '/home/me/reward.py:length', weight: 1/2}]"])
    expected = "scripts/bench/bench_step.py --model 7b --out runs/a.json --set"
    assert command() == f"{expected} rewards=[{{name: 'reward.py:length', weight: 1/2}}]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("in /data/runs/NaN: see", "in NaN: see"),
        ("([/__w/torch/pair.cc:537] Read", "([pair.cc:537] Read"),
        ("runs/a and 3/4 of https://host/page", "runs/a and 3/4 of https://host/page"),
        (f"file {ROOT}/docs/loss.md", "file docs/loss.md"),
    ],
)
def test_only_absolute_paths_lose_their_folders(text, expected):
    assert without_folders(text) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
@pytest.mark.parametrize(
    "command", ["bench_attention.py", "bench_gdn.py", "bench_linear.py", "check_engine.py --model tiny"]
)
def test_scripts_that_need_a_card_say_so_in_one_line(command, monkeypatch):
    script, *options = command.split()
    file = str(next((ROOT / "scripts").glob(f"*/{script}")))
    monkeypatch.setattr(sys, "argv", [file, *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(file, run_name="__main__")
    assert re.fullmatch(rf"{script} measures on a CUDA card, and .* none: run it on a .*", ended.value.code)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_card("torch")
    with pytest.raises(SystemExit, match=r"needs no_such_package, which is not installed: run `pip install"):
        require_card("no_such_package")
