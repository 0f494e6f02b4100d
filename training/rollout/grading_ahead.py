"""Formulas are graded while the engine still decodes other completions.

Comparing two formulas takes up to 0.07 s in another process, and the verdict is kept (qerl/tasks/math_pool.py). Here a
thread grades each completion as soon as it has ended, just as the rewards will later, and throws the grade away. When
the rewards grade the whole rollout they find the verdicts, so grades are the same with and without this.

Numbers are compared in microseconds, so nothing is done ahead for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qerl.tasks.grading import grade

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.engine.interface import Completion, Finished
    from qerl.tasks import Task

THREAD = "grading-ahead"
GRADING_REWARDS = ("accuracy", "length")


class GradingAhead:
    """One rollout after another, each with a thread of its own. `graded` counts what is graded of the latest one."""

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self.graded = 0

    @contextmanager
    def rollout(self, answers: Sequence[str]) -> Iterator[Finished]:
        """The function that the engine calls with each completion; `answers` has one for each prompt of the rollout.

        At the end of the block, completions whose grading has not begun are left to the rewards, which have more
        threads. Grading that is under way is waited for, so that the rewards do not compare the same formulas at the
        same time; if the block raises, nothing is waited for.
        """
        self.graded = 0
        thread, wait = ThreadPoolExecutor(1, THREAD), False
        try:
            yield lambda index, completion: thread.submit(self._grade, completion, answers[index])
            wait = True
        finally:
            thread.shutdown(wait, cancel_futures=True)

    def _grade(self, completion: Completion, answer: str) -> None:
        """An error stays in the thread: the reward that meets it again ends the run and says where it was."""
        grade(self._task, self._tokenizer.decode(completion.token_ids, skip_special_tokens=True), answer)  # as TRL does
        self.graded += 1


def grading_ahead(task: Task, rewards: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> GradingAhead | None:
    """What grades ahead for rewards of these names; None if they compare no formulas."""
    if task.answer_kind != "math" or task.grader is not None or not any(name in GRADING_REWARDS for name in rewards):
        return None
    return GradingAhead(task, tokenizer)
