"""AIME 2024, I and II: 30 problems whose answers are integers from 0 to 999; its only split on the hub is "train"."""

from qerl.data.tasks import Task

TASK = Task(
    name="aime24",
    hub="HuggingFaceH4/aime_2024",
    splits={"test": "train"},
    columns={"question": "problem", "answer": "answer"},
    answer_kind="math",
)
