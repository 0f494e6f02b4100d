"""GSM8K: grade-school word problems with a number as the answer (arXiv 2110.14168).

The hub's `answer` column is the worked solution, whose last line is `#### N`; qerl/data/examples.py takes N.
"""

from qerl.data.tasks import Task

TASK = Task(
    name="gsm8k",
    hub="openai/gsm8k",
    hub_config="main",
    splits={"train": "train", "test": "test"},
    answer_kind="number",
)
