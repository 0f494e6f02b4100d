"""MATH-500: 500 problems of the MATH test set, with LaTeX answers (arXiv 2103.03874, 2305.20050)."""

from qerl.data.tasks import Task

TASK = Task(
    name="math500",
    hub="HuggingFaceH4/MATH-500",
    splits={"test": "test"},
    columns={"question": "problem", "answer": "answer"},
    answer_kind="math",
)
