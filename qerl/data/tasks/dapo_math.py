"""DAPO-Math-17k: competition problems, reworded by DAPO's authors so that each answer is an integer (arXiv 2503.14476).

The file on the hub has verl's layout: `prompt` is a list with one user message, which wraps the problem in a fixed
instruction ("The last line of your response should be of the form Answer: ..."), `reward_model.ground_truth` is the
answer, and each of the 17 thousand problems occurs about 100 times. The instruction is removed, so that the task's own
prompt is the only one; qerl/data/examples.py drops and counts repeated rows. In open-r1's copy without repetitions
(`data.source: open-r1/DAPO-Math-17k-Processed:en`), which QeRL's code reads, `prompt` is the message itself.
"""

from qerl.data.tasks import Task

_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
_SUFFIX = 'Remember to put your answer on its own line after "Answer:".'


def _bare(question: str) -> str:
    return question.strip().removeprefix(_PREFIX).removesuffix(_SUFFIX).strip()


TASK = Task(
    name="dapo_math",
    hub="BytedTsinghua-SIA/DAPO-Math-17k",
    splits={"train": "train"},
    columns={"question": ("prompt.0.content", "prompt"), "answer": "reward_model.ground_truth"},
    answer_kind="number",
    clean_question=_bare,
)
