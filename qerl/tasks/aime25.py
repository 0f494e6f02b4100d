"""AIME 2025, I and II: 30 problems with an integer from 0 to 999 as the answer."""

from qerl.tasks import Task

TASK = Task(
    name="aime25",
    hub="math-ai/aime25",
    splits={"test": "test"},
    columns={"question": "problem", "answer": "answer"},
    answer_kind="math",
)
