"""The validations of a run: when one is due, what it measures, and what follows (a best checkpoint, or the run's end).

A validation has its questions answered by the policy as it is now, on the open engine and without noise. transformers'
loop asks where it would evaluate: between a step's metrics and its checkpoint, and once before the first step of this
process, where a validation that a signal cut off is made up for.

It leaves the run as it was: the noise is put back, the global random streams are restored, the engine's seeds depend on
the run's seed alone, and rewards have processes of their own. All validations of a run sample with the same seeds, so
that they differ by the policy alone.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy
import torch
from transformers import TrainerCallback

from qerl.base.philox import derive_seed
from qerl.data.grading.grade import CORRECT_FROM
from qerl.data.grading.intervals import estimate
from training.loss.groups import GradedGroup, logged_means
from training.rewards.grading import Graded, Grader, merged_grades, reward_metrics
from training.run_dir.stop import AskedError, EndedError, Stop
from training.run_dir.verdict import Best, best_of, ending

if TYPE_CHECKING:
    from training.parts import Parts, TrainingParts
    from training.validation.questions import Questions


logger = logging.getLogger(__name__)


class Validation(TrainerCallback):
    """See the module docstring. Every rank of the run has the same `rows` and decides the same."""

    def __init__(self, parts: TrainingParts, stop: Stop) -> None:
        self._parts, self._stop = parts, stop
        self._config = parts.config.validation
        self._rows = list(parts.parallel.broadcast(parts.log.validations))
        self._left = False  # a signal came to one of the ranks

    @property
    def best(self) -> Best | None:
        """The validation whose checkpoint is to be kept."""
        return best_of(self._rows, self._config)

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
            found = self._parts.measure(step, self._stop)
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


def measure(parts: Parts, step: int, stop: Stop) -> dict[str, float]:
    """The metrics of a validation after `step` steps, under validation/, and time/validation_s.

    Each rank asks its share of the questions. Empty if a signal came to a rank before its share was sampled.
    """
    started = time.perf_counter()
    with _random_state_kept():
        parts.sampler.sync(step)
        shares = stop.of_all_ranks(_share(parts, parts.questions, step, stop))
    if not shares:
        return {}
    named = {f"validation/{name}": value for name, value in _metrics(parts.questions, shares).items()}
    return {**named, "time/validation_s": time.perf_counter() - started}


def _share(parts: Parts, questions: Questions, step: int, stop: Stop) -> Graded | None:
    """This rank's questions, answered and graded; None if a signal came meanwhile."""
    own = parts.parallel.span(len(questions.prompts))
    prompts, seed = questions.prompts[own], derive_seed(parts.config.run.seed, 0, "validation")
    if not prompts:
        return Graded([])
    try:
        with parts.sampler.clean_engine() as engine:
            groups = questions.asking.groups(engine, prompts, seed, own.start, stop.leave_if_asked)
    except AskedError:
        return None
    grader = Grader(questions.rewards, parts.grader.decode, mask_truncated=False)
    return grader.grade(groups, step, steps_done=step)


def _metrics(questions: Questions, shares: Sequence[Graded]) -> dict[str, float]:
    """Lengths, the recipe's rewards and, where rows have answers, the accuracy with its interval over questions."""
    graded = merged_grades(shares)
    means = logged_means(graded.logged)
    samples = [sample for group in graded.groups for sample in group.group.samples]
    metrics = {
        "mean_tokens": sum(sample.written for sample in samples) / len(samples),
        "truncated_share": sum(sample.truncated for sample in samples) / len(samples),
        **_rewards(questions, graded.groups),
        **_accuracy(questions, graded.groups),
    }
    for source, name in enumerate(questions.rewards.source_names) if any(questions.rewards.source_names) else ():
        own = [group for group in graded.groups if group.group.prompt.source == source]
        of_source = {**_rewards(questions, own), **_accuracy(questions, own)}
        metrics |= {f"sources/{name}/{key}": value for key, value in of_source.items() if not math.isnan(value)}
    if "accuracy" in metrics and (no_answer := means.get("grades/no_answer_share")) is not None:
        metrics["no_answer_share"] = no_answer
    return metrics


def _rewards(questions: Questions, groups: Sequence[GradedGroup]) -> dict[str, float]:
    """The means of the recipe's own rewards."""
    means = reward_metrics(groups, questions.rewards.names)
    own = {"reward", *(f"rewards/{name}" for name in questions.reward_names)}
    return {key: value for key, value in means.items() if key in own and not math.isnan(value)}


def _accuracy(questions: Questions, groups: Sequence[GradedGroup]) -> dict[str, float]:
    """The accuracy over the questions that have answers, with its interval; empty if there are none."""
    if questions.accuracy is None:
        return {}
    graded = [group.rewards_G_F[:, questions.accuracy] for group in groups]
    correct_P_G = [accuracy_G >= CORRECT_FROM for accuracy_G in graded if not accuracy_G.isnan().any()]
    if not correct_P_G:
        return {}
    accuracy = estimate([correct_G.double().mean().item() for correct_G in correct_P_G])
    return {"accuracy": accuracy.value, "accuracy_low": accuracy.low, "accuracy_high": accuracy.high}


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Leave Python's, numpy's and torch's global generators as they were."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)
