"""AMC 12A and 12B 2023: 40 problems, reworded so that the answer is a number instead of a letter."""

from qerl.data.tasks import Task

TASK = Task(
    name="amc23",
    hub="math-ai/amc23",
    splits={"test": "test"},
    answer_kind="math",
)
