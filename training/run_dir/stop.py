"""Stop a run early without losing what it has done, and save by the clock between the checkpoints that steps bring.

Ctrl-C, SIGTERM (a preempted job) and SIGHUP (a closed terminal) finish the updates of the present rollout, save, and
stop, all ranks of the run after the same step. A second Ctrl-C stops at once. After SIGTERM or SIGHUP there is
`run.stop_within_s` for that, since whoever sent it soon sends SIGKILL. If a step takes longer, it is abandoned: until
its update the policy and the optimizer are those after the step before, which are saved instead. A validation is left
at once: the step before it has ended, and a resumed run begins with that validation. A signal that was ignored when the
run began (nohup) stays ignored.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import TrainerCallback

from qerl.base.parallel import ALONE, Parallel
from training.run_dir.checkpoint import checkpoint_path, checkpoint_step, damage_of, newest_checkpoint

if TYPE_CHECKING:
    from types import FrameType

    from transformers import TrainerState

    from qerl.config.schema import LoopConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE_EVERY_S = 30 * 60.0  # after which a checkpoint is due, between those that steps bring
AGAIN_S = 5.0  # until the step is interrupted again: Python drops an exception that is raised in a finalizer


class OutOfTimeError(BaseException):
    """Leaves a step that does not end in time. No library takes it for an error of its own."""


class EndedError(Exception):
    """Ends the training loop where transformers offers no other way: before the first step of this process."""


class AskedError(Exception):
    """Leaves a validation because a signal came."""


class Stop(TrainerCallback):
    """Ends the training loop after a step if a signal asks for it, and saves every SAVE_EVERY_S."""

    def __init__(self, run: LoopConfig, updates: int, run_dir: Path, parallel: Parallel = ALONE) -> None:
        """`updates` is the number of optimizer steps on one rollout."""
        self._run, self._updates, self._run_dir, self._parallel = run, updates, run_dir, parallel
        self.asked: int | None = None  # the signal
        self.abandoned = False  # a step was left before its end
        self._deadline: float | None = None
        self._interruptible = False  # within a step, before its update
        self._validated: int | None = None  # the step whose validation is going on
        self._tokens = 0  # that the steps before this one have seen
        self._saved_at = self._step_ended_at = time.monotonic()
        self._save_s: float | None = None  # that the latest checkpoint took
        self._over = threading.Event()

    # -- what the training loop calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved_at = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tokens = state.num_input_tokens_seen
        self._interruptible = True
        self._leave_if_late()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._interruptible = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_ended_at = time.monotonic()
        if state.global_step % self._updates:
            return  # a checkpoint between two updates on one rollout could not be resumed
        due = self._step_ended_at - self._saved_at >= SAVE_EVERY_S
        of_ranks = self._parallel.gather((due, self.asked))  # signals and clocks are each rank's own
        if of_ranks[0][0]:
            control.should_save = True
        if asked := next((asked for _, asked in of_ranks if asked is not None), None):
            self.asked = self.asked or asked
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved_at = time.monotonic()
        self._save_s = self._saved_at - self._step_ended_at

    # -- signals

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGNALS."""
        if number == signal.SIGINT:
            if self.asked is not None:
                logger.warning("stopped at once; continue with `qerl train --resume %s`", self._run_dir)
                raise KeyboardInterrupt
            self.asked = number
            what = "stopping after this step" if self._validated is None else "leaving the validation to save and stop"
            logger.warning("%s; interrupt again to stop at once and lose the step", what)
            return
        self._leave_if_late()
        if self._deadline is None:
            self.asked = number
            self._set_deadline(signal.Signals(number).name)

    @contextmanager
    def validating(self, step: int) -> Iterator[None]:
        """A block that a late signal ends: the validation after `step`, which has ended."""
        self._interruptible, self._validated = True, step
        self._leave_if_late()
        yield
        self._interruptible, self._validated = False, None

    def leave_if_asked(self, *_: object) -> None:
        """Raise AskedError, which leaves a validation between two completions, if a signal came to this process."""
        if self.asked is not None:
            raise AskedError

    def of_all_ranks(self, share: T | None) -> list[T]:
        """The ranks' shares of a validation; none, on all of them, if a signal left one without its share (None)."""
        of_ranks = self._parallel.gather((share, self.asked))
        self.asked = self.asked or next((asked for _, asked in of_ranks if asked is not None), None)
        shares = [share for share, _ in of_ranks if share is not None]
        return shares if len(shares) == len(of_ranks) else []

    def close(self) -> None:
        """From now on no step is interrupted."""
        self._over.set()

    def _set_deadline(self, name: str) -> None:
        within = self._run.stop_within_s
        if within is None:
            self._deadline = float("inf")
            logger.warning("%s: stopping after this step", name)
            return
        for_saving = within / 2 if self._save_s is None else min(within / 2, max(1.0, 2 * self._save_s))
        self._deadline = time.monotonic() + within - for_saving
        logger.warning("%s: stopping after this step, or without it after %g s (run.stop_within_s)", name, within)
        threading.Thread(target=self._interrupt_late_steps, daemon=True).start()

    def _interrupt_late_steps(self) -> None:
        """Send the main thread its signal again at the deadline, which also ends what it waits for."""
        wait_s = self._deadline - time.monotonic()
        while not self._over.wait(max(0.0, wait_s)):
            signal.pthread_kill(threading.main_thread().ident, self.asked)
            wait_s = AGAIN_S

    def _leave_if_late(self) -> None:
        if self._interruptible and self._deadline is not None and time.monotonic() >= self._deadline:
            raise OutOfTimeError

    def save_abandoned(self, state: TrainerState, save_now: Callable[[], None], shared: bool) -> int:
        """Save the state before the abandoned step if it can be resumed from; returns the step of the checkpoint that
        the run continues from. Ranks that share whole weights out (`shared`) could save only together."""
        self.close()
        self._parallel.leave()  # the other ranks may be anywhere
        self._interruptible, self.abandoned = False, True
        step, validated = state.global_step, self._validated is not None
        if not shared and (validated or (step and step % self._updates == 0)):
            if not validated:
                state.num_input_tokens_seen = self._tokens
            if step and damage_of(checkpoint_path(self._run_dir, step)):
                save_now()
            if validated:
                said = f"the validation after step {step} was left before its end; a resumed run makes it first"
            else:
                said = f"step {step + 1} did not end in time and is lost; the state after step {step} is saved"
            logger.warning(said)
            return step
        newest = newest_checkpoint(self._run_dir)
        saved = checkpoint_step(newest) if newest else 0
        kept = f"the checkpoint of step {saved} stays" if saved else "there is no checkpoint yet"
        logger.warning("step %d did not end in time; steps %d to %d are lost: %s", step + 1, saved + 1, step + 1, kept)
        return saved


@contextmanager
def stop_on_signals(run: LoopConfig, updates: int, run_dir: Path, parallel: Parallel = ALONE) -> Iterator[Stop]:
    """While the block runs, SIGNALS stop the training loop. Outside the main thread the caller handles them."""
    stop = Stop(run, updates, run_dir, parallel)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    wanted = [each for each in SIGNALS if each == signal.SIGINT or signal.getsignal(each) != signal.SIG_IGN]
    previous = {each: signal.signal(each, stop.handle) for each in wanted}
    try:
        yield stop
    finally:
        stop.close()
        for each, handler in previous.items():
            signal.signal(each, handler)
