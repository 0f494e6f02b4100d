"""What scripts/on_card.sh does around its commands, with `true` and `false` in place of Python."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "on_card.sh"


def summary(folder, python, **environment):
    """What a call of one batch says of its commands."""
    out = folder / "out"
    given = {**os.environ, "PYTHON": python, "CHECKPOINTS": str(folder / "checkpoints"), **environment}
    subprocess.run(["bash", SCRIPT, out, "cap24"], env=given, check=True, capture_output=True, timeout=60)
    text = (out / "summary.txt").read_text()
    (out / "summary.txt").unlink()
    return [line.split(",")[0] for line in text.splitlines()]


def test_a_checkpoint_that_was_not_made_is_made_by_the_next_call(tmp_path):
    assert summary(tmp_path, "true", SECONDS_LEFT="1")[0] == "make-7b: exit none"
    assert summary(tmp_path, "false")[:2] == ["make-7b: exit 1", "step-7b-qerl-cap24: exit 1"]
    assert summary(tmp_path, "true")[:2] == ["make-7b: exit 0", "step-7b-qerl-cap24: exit 0"]
    assert summary(tmp_path, "true")[0] == "step-7b-qerl-cap24: exit 0"
