"""Your own rows: a prompt or messages, and perhaps an answer. Nothing is added to them unless it is asked for.

Without a grader of one's own (`--grader`), an answer is compared as text (qerl/data/grading/grade.py).
"""

from qerl.data.tasks import Task

TASK = Task(
    name="own",
    hub=None,
    splits={"train": "train", "test": "test"},
    answer_kind="text",
    columns={"question": ("prompt", "messages", "question", "conversations", "instruction"), "answer": "answer"},
    prompt_template="{question}",
    free_form=True,
)
