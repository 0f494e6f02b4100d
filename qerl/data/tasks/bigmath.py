"""Big-Math: problems with closed-form answers, many of them in LaTeX (arXiv 2502.17387), at levels 3 to 5 of open-r1.

open-r1/Big-Math-RL-Verified-Processed keeps the rows whose answers math-verify can parse, and grades them by how often
Llama 3.1 8B solves them: its subsets are `all`, `level_1` to `level_5` (the hardest), and `level_2_3_4_5`,
`level_3_4_5` and `level_4_5`. QeRL trains 7B and 14B models on levels 3 to 5, and 32B models on levels 4 and 5, which
are the task bigmath_hard (arXiv 2510.11696, appendix E; utils/data.py of its code).

The columns there are `prompt` and `solution` (the bare answer). The whole dataset, SynthLabsAI/Big-Math-RL-Verified
with 251 thousand rows, calls them `problem` and `answer`; `data.source` takes it as well.
"""

from qerl.data.tasks import Task

TASK = Task(
    name="bigmath",
    hub="open-r1/Big-Math-RL-Verified-Processed",
    hub_config="level_3_4_5",
    splits={"train": "train"},
    columns={"question": ("problem", "prompt"), "answer": ("answer", "solution")},
    answer_kind="math",
)
