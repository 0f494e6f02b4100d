"""When a run validates, and what follows: a saved best checkpoint, or the run's end.

transformers' loop asks where it would evaluate: between a step's metrics and its checkpoint, and once before the first
step of this process. A validation that a signal cut off is made there when the run resumes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from training.run_dir.stop import EndedError
from training.validation.verdict import best_kept, ending

if TYPE_CHECKING:
    from training.parts import TrainingParts
    from training.run_dir.stop import Stop
    from training.validation.verdict import Best

logger = logging.getLogger(__name__)


class Validation(TrainerCallback):
    """See the module docstring. Every rank of the run has the same `rows` and decides the same."""

    def __init__(self, parts: TrainingParts, measure: Callable[[int, Stop], dict[str, float]], stop: Stop) -> None:
        """`measure` makes the validation after so many steps; it returns nothing if a signal ended it."""
        self._parts, self._measure, self._stop = parts, measure, stop
        self._config = parts.config.validation
        self._rows = list(parts.parallel.broadcast(parts.log.validations))
        self._left = False  # a signal came to one of the ranks

    @property
    def best(self) -> Best | None:
        """The validation whose checkpoint is to be kept."""
        return best_kept(self._rows, self._config)

    def ended(self, step: int) -> str | None:
        """Why the validation after `step` ends the run; None if it does not."""
        return ending(self._rows, self._config, step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        last = state.global_step == self._parts.config.run.steps
        control.should_evaluate = self._is_due(state.global_step) and (last or not control.should_training_stop)

    def run(self, step: int) -> dict[str, float]:
        """The metrics of the validation after `step`; empty if a signal ended it before its end."""
        self._parts.log.phase("validation")
        with self._stop.validating(step):
            found = self._measure(step, self._stop)
            self._left = self._stop.asked is not None
        if found:
            self._rows.append({"step": step, **found})
        else:
            logger.warning("the validation after step %d was left before its end; a resumed run makes it first", step)
        return found

    def decide(self, step: int, control: Any) -> None:
        """Have the step saved if it is the best so far, or if it ends the run; a signal's end is saved as well."""
        if self.best is not None and self.best.step == step:
            control.should_save = True
        reason = self.ended(step)
        if reason is not None:
            logger.info("%s: the run ends after step %d", reason, step)
        if reason is not None or self._left:
            control.should_save = control.should_training_stop = True

    def at_start(self, step: int) -> dict[str, float]:
        """The validation before the first step of this process if it is due, written into the log.

        Raises EndedError if it ends a run that was resumed, or if a signal came.
        """
        if not self._is_due(step):
            return {}
        found = self.run(step)
        if found:
            self._parts.log.write_validation(step, found)
        if reason := self.ended(step):
            logger.info("%s: the run ends after step %d", reason, step)
        if reason or self._left:
            raise EndedError
        return found

    def _is_due(self, step: int) -> bool:
        """Whether a validation belongs after `step` and is not there yet."""
        wanted = self._config.at_start if step == 0 else step % self._config.every == 0
        last = step == self._parts.config.run.steps
        return (wanted or last) and not any(row["step"] == step for row in self._rows)
