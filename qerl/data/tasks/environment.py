"""Rows for an environment that brings its own task: a row is a number, and what `reset` returns is the prompt.

It is what TRL calls an environment that owns the data. There is no answer to grade: the reward is `environment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qerl.data.tasks import Task

TASK_ROWS = {"train": 1024, "test": 256}
ASKS = "environment_asks"  # a column: qerl/episodes/episodes.py takes the environment's text for the question


def rows(split: str) -> Iterator[dict[str, Any]]:
    """The rows of a split, which differ in their number alone."""
    for index in range(TASK_ROWS[split]):
        yield {"id": f"environment-{split}-{index}", "question": f"Episode {index} of {split}.", ASKS: True}


TASK = Task(
    name="environment",
    hub=None,
    splits={"train": "train", "test": "test"},
    answer_kind="text",
    generate=rows,
    prompt_template="{question}",
    free_form=True,
)
