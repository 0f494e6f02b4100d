"""Distillation on a card: the vLLM engine samples, the teacher reads packed rows, and the KL falls.

It has not run on a card. To run it on a CPU with the other engine:

    QERL_TEST_ENGINE=transformers python -m pytest -n0 -m gpu tests/training/test_distillation_gpu.py
"""

import pytest

from tests.helpers.cli_shell import Shell
from tests.helpers.either_engine import ENGINE, ON_CARD, marks
from tests.helpers.small_run import numbers

pytestmark = marks(300)
STEPS, FIRST = 24, 4
BOUNDS = {  # of mismatch_kl, and of the KL at the end as a share of that at the start
    "nvfp4_w4a16": (1e-3, 0.75),
    "nvfp4_w4a4": (1.0, 0.95),  # a last bit may become a whole step, and weights cannot undo all of the error
}


@pytest.mark.parametrize("quant_cfg", BOUNDS)
def test_the_kl_to_the_teacher_falls(tmp_path, quant_cfg):
    mismatch, share = BOUNDS[quant_cfg]
    keys = {
        "qat.quant_cfg": quant_cfg,
        "rollout.engine": ENGINE,
        "optim.learning_rate": 3e-4,
        "loss.mismatch_gate": mismatch,
        "logging.completions_count": 0,
        **({"rollout.memory": 8} if ON_CARD else {}),
    }
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    Shell(tmp_path).run("distill", "distill", "--recipe", "qad_tiny", "--steps", STEPS, *sets, "--out", "run")
    rows = numbers(tmp_path / "run")
    kls = [row["kl_to_teacher/forward"] for row in rows]
    assert len(kls) == STEPS
    assert all(row["mismatch_kl"] < mismatch for row in rows)
    assert sum(kls[-FIRST:]) < share * sum(kls[:FIRST])
    assert (tmp_path / "run/model/config.json").is_file()
