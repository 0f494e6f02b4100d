"""Each command of scripts/bench/on_card.sh, as far as a CPU can follow it: its files and its arguments.

The commands are those that a shell script in place of Python is called with. A card's time was once lost to an argument
that a script no longer had.
"""

import argparse
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import bench_qat
import bench_step
import pytest

from qerl.config.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench" / "on_card.sh"
BATCHES = re.findall(r"^batch_(\w+)\(\)", SCRIPT.read_text(), re.MULTILINE)
OF_ANOTHER_TREE = ("older", "faster")
STEPS = {"bench_step.py": bench_step, "bench_qat.py": bench_qat}


class Understood(Exception):
    """Ends a script once it has read its arguments."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """The arguments of each call of Python, by batch."""
    folder = tmp_path_factory.mktemp("batches")
    python = folder / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >"$(mktemp "$CALLS/XXXXXX")"\n')  # some run at the same time
    python.chmod(0o755)
    found = {}
    for batch in (name for name in BATCHES if name not in OF_ANOTHER_TREE):
        calls = folder / f"{batch}.calls"
        calls.mkdir()
        given = {"PYTHON": str(python), "CALLS": str(calls), "CHECKPOINTS": str(folder / "checkpoints")}
        environment = {**os.environ, **given, "CUDA_VISIBLE_DEVICES": "0"}
        subprocess.run(["bash", SCRIPT, folder / "out", batch], env=environment, check=True, capture_output=True)
        found[batch] = [path.read_text().removesuffix("\0").split("\0") for path in calls.iterdir()]
    return found


def test_every_batch_is_described_and_what_is_described_is_there():
    described = re.findall(r"^#     (\w+) +\d+ s ", SCRIPT.read_text(), re.MULTILINE)
    assert sorted(described) == sorted(BATCHES)


def test_the_tests_are_there_that_the_batches_select(commands):
    seen = 0
    for calls in commands.values():
        for call in (call for call in calls if call[:2] == ["-m", "pytest"]):
            files = [ROOT / word for word in call if word.startswith("tests/")]
            assert files
            assert all(path.exists() for path in files)
            text = "".join(path.read_text() for path in files if path.is_file())
            chosen = call[call.index("-k") + 1].split(" or ") if "-k" in call else []
            assert all(word in text for word in chosen), chosen
            seen += 1
    assert seen > 10


def test_the_arguments_of_every_script_are_understood(commands, monkeypatch, tmp_path):
    seen = {tuple(call) for calls in commands.values() for call in map(own_arguments, calls) if call}
    assert len({script for script, *_ in seen}) > 10
    for script, *arguments in sorted(seen):
        given = understood(script, arguments, monkeypatch)
        if (name := Path(script).name) in STEPS:
            loads(name, given, tmp_path)


def own_arguments(call):
    """[script, argument, ...] of a call that runs one of ours, also of several ranks."""
    at = next((place for place, word in enumerate(call) if word.startswith("scripts/")), None)
    return [] if at is None or call[:2] == ["-m", "pytest"] else call[at:]


def understood(script, arguments, monkeypatch):
    """What the script makes of its arguments; it ends there."""

    def parse(parser, *_):
        raise Understood(original(parser, arguments))

    original = argparse.ArgumentParser.parse_args
    with monkeypatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [script, *arguments])
        patch.setattr(sys, "path", [str((ROOT / script).parent), *sys.path])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except Understood as ended:
            return ended.args[0]
        except SystemExit:
            pytest.fail(f"{script} {' '.join(arguments)}: {said.getvalue().splitlines()[-1]}")
    return pytest.fail(f"{script} reads no arguments")


def loads(name, given, folder):
    """The recipe of a measured step is valid."""
    if name == "bench_qat.py":
        given.set += bench_qat.own_settings(given)
    load_recipe("dapo_7b", bench_step.overrides(given, folder))
