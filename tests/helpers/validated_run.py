"""The small run with validation on rows of its own, whose reward differs from policy to policy."""

import json
from itertools import islice

from qerl.data.tasks import get_task
from tests.helpers.small_run import numbers, small_config

VALIDATED = ("validation.every=2", "validation.samples=2", "validation.temperature=1.0", "validation.metric=reward")
QUESTIONS = 6


def validated_config(base, folder, *overrides, **given):
    """The small run's recipe with a validation every two steps, on rows that it writes into `folder`."""
    rows = folder / "questions.jsonl"
    written = islice(get_task("arith").generate("test"), QUESTIONS)
    rows.write_text("".join(json.dumps(row) + "\n" for row in written))
    return small_config(base, folder, *VALIDATED, f"validation.source={rows}", *overrides, **given)


def without_validation(run_dir):
    """The rows of a run's log as a run without validation has them."""
    rows = [row for row in numbers(run_dir) if row["step"]]
    return [{key: value for key, value in row.items() if not key.startswith("validation/")} for row in rows]


def validated_steps(run_dir):
    return [row["step"] for row in numbers(run_dir) if "validation/accuracy" in row]
