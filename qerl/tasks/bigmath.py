"""Big-Math: problems with closed-form answers, many of them LaTeX (arXiv 2502.17387), at open-r1's levels 3 to 5.

open-r1/Big-Math-RL-Verified-Processed keeps the rows whose answer math-verify parses, and sorts them by the share that
Llama 3.1 8B solves: its subsets are `all`, `level_1` to `level_5` (the hardest), and `level_2_3_4_5`, `level_3_4_5` and
`level_4_5`. QeRL trains 7B and 14B models on the levels 3 to 5 and 32B ones on 4 and 5, which is the task bigmath_hard
(arXiv 2510.11696, appendix E; utils/data.py of its code).

There the columns are `prompt` and `solution` (the bare answer). The whole set, SynthLabsAI/Big-Math-RL-Verified with
251 thousand rows, calls them `problem` and `answer`; `data.source` takes that too.
"""

from qerl.tasks import Task

TASK = Task(
    name="bigmath",
    hub="open-r1/Big-Math-RL-Verified-Processed",
    hub_config="level_3_4_5",
    splits={"train": "train"},
    columns={"question": ("problem", "prompt"), "answer": ("answer", "solution")},
    answer_kind="math",
)
