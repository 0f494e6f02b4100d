"""Big-Math-RL-Verified: 251 thousand problems with closed-form answers, many of them LaTeX (arXiv 2502.17387)."""

from qerl.tasks import Task

TASK = Task(
    name="bigmath",
    hub="SynthLabsAI/Big-Math-RL-Verified",
    splits={"train": "train"},
    columns={"question": "problem", "answer": "answer"},
    answer_kind="math",
)
