"""How scripts/bench/on_card.sh runs its commands, tested with `true` and `false` in place of Python."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "on_card.sh"


def summary(folder, python, **environment):
    """The summary that a call with one batch writes about its commands."""
    out = folder / "out"
    given = {**os.environ, "PYTHON": python, "CHECKPOINTS": str(folder / "checkpoints"), **environment}
    subprocess.run(["bash", SCRIPT, out, "cap24"], env=given, check=True, capture_output=True, timeout=240)
    text = (out / "summary.txt").read_text()
    (out / "summary.txt").unlink()
    return [line.split(",")[0] for line in text.splitlines()]


def test_a_checkpoint_that_could_not_be_made_is_made_by_the_next_call(tmp_path):
    assert summary(tmp_path, "true", SECONDS_LEFT="1")[0] == "make-7b: exit none"
    assert summary(tmp_path, "false")[:2] == ["make-7b: exit 1", "step-7b-qerl-cap24: exit 1"]
    assert summary(tmp_path, "true")[:2] == ["make-7b: exit 0", "step-7b-qerl-cap24: exit 0"]
    assert summary(tmp_path, "true")[0] == "step-7b-qerl-cap24: exit 0"


def test_batches_for_several_cards_each_run_on_their_own_card(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "card $CUDA_VISIBLE_DEVICES"\n')
    python.chmod(0o755)
    given = {**os.environ, "PYTHON": str(python), "CHECKPOINTS": str(tmp_path / "checkpoints")}
    call = ["bash", SCRIPT, tmp_path / "out", "cap24", "agree", "--", "peaks"]
    done = subprocess.run(call, env=given, check=True, capture_output=True, text=True, timeout=240)
    found = {path.parent.name: path.read_text() for path in (tmp_path / "out").glob("*/summary.txt")}
    assert {card: text.count("== ") for card, text in found.items()} == {"0": 2, "1": 1}
    for card, text in found.items():
        assert all(line.endswith(f"; card {card}") for line in text.splitlines() if not line.startswith("== "))
    assert sum(text.count("make-7b: ") for text in found.values()) == 1
    assert "card 1: peaks-7b: exit 0" in done.stdout


def test_engines_open_alone_on_all_cards_and_then_take_turns_on_the_first(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "card $CUDA_VISIBLE_DEVICES"\n')
    python.chmod(0o755)
    given = {"PYTHON": str(python), "CHECKPOINTS": str(tmp_path / "checkpoints"), "CUDA_VISIBLE_DEVICES": "2,5,7"}
    call = ["bash", SCRIPT, tmp_path / "out", "decode"]
    subprocess.run(call, env={**os.environ, **given}, check=True, capture_output=True, timeout=240)
    names = ("7b-qerl", "7b-qerl-base", "7b-marlin", "7b-bf16")
    logs = {way: [tmp_path / "out" / f"{way}-{name}.log" for name in names] for way in ("open", "rollout")}
    cards = {way: [path.read_text() for path in paths] for way, paths in logs.items()}
    assert cards == {"open": [f"card {card}\n" for card in (2, 5, 7, 2)], "rollout": ["card 2\n"] * 4}
    lines = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert [line.partition("-")[0] for line in lines if "7b" in line] == ["make"] * 2 + ["open"] * 4 + ["rollout"] * 4


def test_runs_on_one_card_share_the_host_before_those_on_several(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "card $CUDA_VISIBLE_DEVICES beside $QERL_BESIDE, $3"\n')
    python.chmod(0o755)
    given = {"PYTHON": str(python), "CHECKPOINTS": str(tmp_path / "checkpoints"), "CUDA_VISIBLE_DEVICES": ""}
    call = ["bash", SCRIPT, tmp_path / "out", "ranks"]
    subprocess.run(call, env={**os.environ, **given}, check=True, capture_output=True, timeout=240)
    said = {path.stem: path.read_text().strip() for path in (tmp_path / "out").glob("step-*.log")}
    assert said["step-7b-cards1"].startswith("card 0 beside geometric lengths on card 1, ")
    assert said["step-7b-mixed-cards1"].startswith("card 1 beside workload A on card 0, ")
    assert said["step-7b-cards2"] == "card  beside , --standalone"
    assert len(said) == 6


@pytest.mark.parametrize(("driver", "opened"), [("exit 9", "000"), ("echo 0; echo 1", "010")])
def test_cards_are_counted_by_the_driver_and_without_one_the_engines_fail(tmp_path, driver, opened):
    for name, text in {"python": 'echo "card $CUDA_VISIBLE_DEVICES"', "nvidia-smi": driver}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    given = {**os.environ, "PYTHON": str(tmp_path / "python"), "CHECKPOINTS": str(tmp_path / "checkpoints")}
    given["PATH"] = f"{tmp_path}:{given['PATH']}"
    given.pop("CUDA_VISIBLE_DEVICES", None)
    call = ["bash", SCRIPT, tmp_path / "out", "marlin32", "cap24"]
    subprocess.run(call, env=given, check=True, capture_output=True, timeout=240)
    logs = [tmp_path / "out" / f"open-32b-{name}.log" for name in ("qerl-beside", "qerl-base", "marlin")]
    assert [log.read_text() for log in logs] == [f"card {card}\n" for card in opened]
    lines = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert sum(line.startswith("rollout-32b") for line in lines) == 3
    assert [line.split(":")[0] for line in lines if line.startswith("==")] == ["== marlin32", "== cap24"]
