"""AIME 2025, I and II: 30 problems whose answers are integers from 0 to 999."""

from qerl.data.tasks import Task

TASK = Task(
    name="aime25",
    hub="math-ai/aime25",
    splits={"test": "test"},
    columns={"question": "problem", "answer": "answer"},
    answer_kind="math",
)
