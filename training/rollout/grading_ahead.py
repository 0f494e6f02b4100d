"""Formulas are graded while the engine still decodes other completions.

Comparing two formulas takes up to 0.07 s in another process, and the verdict is kept (qerl/data/grading/math_pool.py).
Here a thread grades each completion as soon as it has ended, just as the rewards will later, and throws the grade away.
When the rewards grade the whole rollout they find the verdicts, so grades are the same with and without this.

Numbers are compared in microseconds, so nothing is done ahead for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qerl.data.grading.grade import grade

if TYPE_CHECKING:
    from qerl.data.tasks import Task
    from qerl.engine.interface import Completion, Finished

Text = Callable[[Sequence[int]], str]

THREAD = "grading-ahead"
GRADING_REWARDS = ("accuracy", "length")


class GradingAhead:
    """One rollout after another, each with a thread of its own. `graded` counts what is graded of the latest one."""

    def __init__(self, tasks: Task | Sequence[Task | None], text: Text) -> None:
        """`tasks` has one for each source, None where no formulas are compared; or it is the only source's.

        `text` gives a completion's token ids as text.
        """
        self._tasks = tasks if isinstance(tasks, Sequence) else (tasks,)
        self._text = text
        self.graded = 0

    @contextmanager
    def rollout(self, answers: Sequence[str], sources: Sequence[int] | None = None) -> Iterator[Finished]:
        """The function that the engine calls with each completion; `answers` has one for each prompt of the rollout,
        and `sources` (None: there is one) the place of its source. Both may grow while the block runs.

        At the end of the block, completions whose grading has not begun are left to the rewards, which have more
        threads. Grading that is under way is waited for, so that the rewards do not compare the same formulas at the
        same time; if the block raises, nothing is waited for.
        """
        self.graded = 0
        thread, wait = ThreadPoolExecutor(1, THREAD), False

        def finished(index: int, completion: Completion) -> Future[None] | None:
            task = self._tasks[0 if sources is None else sources[index]]
            return task and thread.submit(self._grade, task, completion, answers[index])

        try:
            yield finished
            wait = True
        finally:
            thread.shutdown(wait, cancel_futures=True)

    def _grade(self, task: Task, completion: Completion, answer: str) -> None:
        """An error stays in the thread: the reward that meets it again ends the run and says where it was."""
        grade(task, self._text(completion.token_ids), answer)
        self.graded += 1


def grading_ahead(sources: Sequence[tuple[Task, Sequence[str]]], text: Text) -> GradingAhead | None:
    """What grades ahead for sources with these tasks and names of rewards; None if they compare no formulas."""
    tasks = [task if _compares_formulas(task, rewards) else None for task, rewards in sources]
    return GradingAhead(tasks, text) if any(tasks) else None


def _compares_formulas(task: Task, rewards: Sequence[str]) -> bool:
    return task.answer_kind == "math" and task.grader is None and any(name in GRADING_REWARDS for name in rewards)
