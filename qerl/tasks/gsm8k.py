"""GSM8K: grade-school word problems with a number as the answer (arXiv 2110.14168).

The hub's `answer` column is the worked solution, whose last line is `#### N`; N is the answer.
"""

from qerl.tasks import Task


def _adapt(question: str, answer: str) -> tuple[str, str]:
    return question, answer.rsplit("####", 1)[-1].strip()


TASK = Task(
    name="gsm8k",
    hub="openai/gsm8k",
    hub_config="main",
    splits={"train": "train", "test": "test"},
    columns={"question": "question", "answer": "answer"},
    answer_kind="number",
    adapt=_adapt,
)
