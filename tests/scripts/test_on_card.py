"""How scripts/bench/on_card.sh runs its commands, tested with small shell scripts in place of Python."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "on_card.sh"
SAYS_ITS_CARD = 'echo "card $CUDA_VISIBLE_DEVICES"'


def command(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def on_card(folder, python, *batches, **environment):
    """Call the script with a shell script `python` in place of Python. Returns (the folder of its files, stdout)."""
    command(folder / "python", python)
    given = {**os.environ, "PYTHON": str(folder / "python"), "CHECKPOINTS": str(folder / "checkpoints"), **environment}
    call = ["bash", SCRIPT, folder / "out", *batches]
    done = subprocess.run(call, env=given, check=True, capture_output=True, text=True, timeout=240)
    return folder / "out", done.stdout


def summary(folder, python, **environment):
    """The summary that a call with one batch writes about its commands."""
    out, _ = on_card(folder, python, "cap24", **environment)
    text = (out / "summary.txt").read_text()
    (out / "summary.txt").unlink()
    return [line.split(",")[0] for line in text.splitlines()]


def test_a_checkpoint_that_could_not_be_made_is_made_by_the_next_call(tmp_path):
    assert summary(tmp_path, "true", SECONDS_LEFT="1")[0] == "make-7b: exit none"
    assert summary(tmp_path, "false")[:2] == ["make-7b: exit 1", "step-7b-qerl-cap24: exit 1"]
    assert summary(tmp_path, "true")[:2] == ["make-7b: exit 0", "step-7b-qerl-cap24: exit 0"]
    assert summary(tmp_path, "true")[0] == "step-7b-qerl-cap24: exit 0"


def test_batches_for_several_cards_each_run_on_their_own_card(tmp_path):
    out, said = on_card(tmp_path, SAYS_ITS_CARD, "cap24", "agree", "--", "peaks")
    found = {path.parent.name: path.read_text() for path in out.glob("*/summary.txt")}
    assert {card: text.count("== ") for card, text in found.items()} == {"0": 2, "1": 1}
    for card, text in found.items():
        assert all(line.endswith(f"; card {card}") for line in text.splitlines() if not line.startswith("== "))
    assert sum(text.count("make-7b: ") for text in found.values()) == 1
    assert "card 1: peaks-7b: exit 0" in said


def test_engines_open_alone_on_all_cards_and_then_take_turns_on_the_first(tmp_path):
    out, _ = on_card(tmp_path, SAYS_ITS_CARD, "decode", CUDA_VISIBLE_DEVICES="2,5,7")
    names = ("7b-qerl", "7b-qerl-base", "7b-merged", "7b-marlin", "7b-bf16")
    cards = {way: [(out / f"{way}-{name}.log").read_text() for name in names] for way in ("open", "rollout")}
    assert cards == {"open": [f"card {card}\n" for card in (2, 5, 7, 2, 5)], "rollout": ["card 2\n"] * 5}
    lines = (out / "summary.txt").read_text().splitlines()
    assert [line.partition("-")[0] for line in lines if "7b" in line] == ["make"] * 2 + ["open"] * 5 + ["rollout"] * 5


@pytest.mark.parametrize(
    ("batch", "cards", "beside"),
    [("ranks", 2, "step-7b-trl-cards2"), ("ranks4", 4, "step-7b-trl-cards4"), ("ranks8", 8, None)],
)
def test_runs_on_one_card_share_the_host_before_those_on_several(tmp_path, batch, cards, beside):
    python = 'echo "card $CUDA_VISIBLE_DEVICES beside $QERL_BESIDE, $3 $5 $*"'
    out, _ = on_card(tmp_path, python, batch, CUDA_VISIBLE_DEVICES="")
    said = {path.stem: path.read_text().strip() for path in out.glob("*-7b-*.log") if "make" not in path.stem}
    other = ", workload A on cards 2 and 3" if cards == 4 else ""
    assert said.pop("step-7b-cards1").startswith(f"card 0 beside geometric lengths on card 1{other}, ")
    assert said.pop("step-7b-mixed-cards1").startswith(f"card 1 beside workload A on card 0{other}, ")
    if cards == 4:
        assert said.pop("step-7b-cards2").startswith(
            "card 2,3 beside workload A on card 0, geometric lengths on card 1, "
        )
    for text in said.values():
        assert text.startswith(f"card  beside , --standalone {cards} ")
    assert said[f"step-7b-cards{cards}-weak"].endswith(f"--prompts {16 * cards}")
    several = {f"step-7b-{name}" for name in (f"cards{cards}", f"mixed-cards{cards}", f"cards{cards}-weak")}
    assert set(said) == several | ({beside} if beside else set())


def test_two_hosts_have_two_cards_each_and_one_file(tmp_path):
    out, _ = on_card(tmp_path, 'echo "card $CUDA_VISIBLE_DEVICES, $*"', "hosts4", CUDA_VISIBLE_DEVICES="")
    for number, cards in enumerate(("0,1", "2,3")):
        text = (out / f"step-7b-hosts2-host{number}.log").read_text().strip()
        assert text.startswith(f"card {cards}, ")
        assert f"--nnodes 2 --node-rank {number} --nproc-per-node 2 " in text
        assert text.endswith("/step-7b-hosts2.json")


@pytest.mark.parametrize(("driver", "opened"), [("exit 9", "000"), ("echo 0; echo 1", "010")])
def test_cards_are_counted_by_the_driver_and_without_one_the_engines_fail(tmp_path, monkeypatch, driver, opened):
    command(tmp_path / "nvidia-smi", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    out, _ = on_card(tmp_path, SAYS_ITS_CARD, "marlin32", "cap24", PATH=f"{tmp_path}:{os.environ['PATH']}")
    names = ("qerl-beside", "qerl-base", "marlin")
    assert [(out / f"open-32b-{name}.log").read_text() for name in names] == [f"card {card}\n" for card in opened]
    lines = (out / "summary.txt").read_text().splitlines()
    assert sum(line.startswith("rollout-32b") for line in lines) == 3
    assert [line.split(":")[0] for line in lines if line.startswith("==")] == ["== marlin32", "== cap24"]
