"""The parts of a run as one value, which the functions of `training/step.py` take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.parallel import ALONE, Parallel
from qerl.checkpoint.load import text_of_engine
from qerl.engine.interface import Engine, SamplingParams
from training.policy.packed_policy import PackedPolicy
from training.policy.policy import Policy, check_reference
from training.rewards.grading import Grader
from training.rollout.prompts import Curriculum, StepPrompts, step_prompts, weights_of
from training.rollout.sampler import Asking, Sampler
from training.run_dir.inputs import inputs_of_run
from training.run_dir.phase_times import PhaseTimes
from training.step import Loss, Objective, collect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import RunConfig
    from qerl.engine.loaded_base import LoadedBase
    from qerl.episodes.play import Environments
    from qerl.plan.micro_batch_plan import MicroBatchPlan
    from training.loss.groups import Prompt
    from training.policy.teacher import FoundTeacher, Teacher
    from training.rewards.rewards import Rewards
    from training.rollout.carry_over import CarryOver
    from training.run_dir.log import RunLog
    from training.run_dir.stop import Stop
    from training.sft.rows import Row
    from training.validation.questions import Questions


@dataclass(frozen=True)
class Given:
    """What a run is given before an engine is opened."""

    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt | Row]
    rewards: Rewards | None = None
    parallel: Parallel = ALONE
    questions: Questions | None = None  # of a run that validates by asking
    environments: Environments | None = None  # of a run with episodes of several turns
    teacher: FoundTeacher | None = None  # of a run that distills

    def inputs(self, config: RunConfig) -> dict[str, str]:
        """Digests of it, for run.json."""
        validated = self.questions.prompts if self.questions else ()
        files = self.environments.runner.files if self.environments else ()
        inputs = inputs_of_run(config, self.prompts, validated, files)
        return inputs | (self.teacher.inputs() if self.teacher else {})

    def parts(self, config: RunConfig, opened: Loaded, shared: Mapping[str, Any]) -> TrainingParts:
        check_reference(opened.policy, config.loss.kl_coef)
        rollout, run = config.rollout, config.run
        sampling = SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k)
        asking = Asking(sampling, rollout.group_size, self.environments)
        sampler = Sampler(opened.engine, opened.policy, asking, config.noise, run.steps, run.seed)
        if rollout.kv_cache_dtype == "fp8":
            from training.policy.kv_ranges import KV_REFRESH, KVCalibration

            prompts = [prompt.ids for prompt in self.prompts]
            sampler.calibration = KVCalibration(opened.policy.base_model, prompts, KV_REFRESH, self.parallel)
        decode = text_of_engine(self.tokenizer, opened.engine).batch
        weighted = weights_of(config), self.prompts, self.rewards, run.seed
        return Parts(
            prompts=self.prompts,
            rewards=self.rewards,
            questions=self.questions,
            sampler=sampler,
            grader=Grader(self.rewards, decode, config.loss.mask_truncated),
            carry_over=self._carry_over(config),
            curriculum=Curriculum(*weighted) if config.data.curriculum else None,
            **shared,
        )

    def _carry_over(self, config: RunConfig) -> CarryOver | None:
        if not config.rollout.carry_over:
            return None
        from training.rollout.carry_over import CarryOver

        return CarryOver(config, self.prompts, self.parallel)


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """What every run is made of: a policy, how it is packed, and where its numbers go.

    `Parts` below says what is of runs that sample, and `training/sft_step.py` what is of runs on given conversations.
    """

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    packed: PackedPolicy  # the policy's log probabilities over packed rows
    plan: MicroBatchPlan
    log: RunLog
    times: PhaseTimes
    parallel: Parallel = ALONE
    teacher: Teacher | None = None  # of a run that distills

    @property
    def run_dir(self) -> Path:
        return self.log.run_dir

    def clear_noise(self) -> None:
        """Take the noise out of what is trained, if there is any."""

    def save(self, folder: Path, step: int) -> None:
        """Write what the next steps depend on beside policy, optimizer and seed, if there is any."""

    def load(self, folder: Path, step: int) -> None:
        """Take it over from a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Parts(TrainingParts):
    """What a run is made of that samples what it trains on."""

    prompts: Sequence[Prompt]
    rewards: Rewards
    sampler: Sampler
    grader: Grader
    questions: Questions | None = None
    carry_over: CarryOver | None = None  # of a run whose completions go on from step to step
    curriculum: Curriculum | None = None

    collect = collect

    @property
    def validates(self) -> bool:
        return self.questions is not None

    def measure(self, step: int, stop: Stop) -> dict[str, float]:
        """The metrics of a validation after `step` steps."""
        from training.validate import measure

        return measure(self, step, stop)

    def steps(self, first: int) -> StepPrompts:
        """What each step trains on, from step `first` on."""
        return step_prompts(self.config, self.prompts, first, self.curriculum)

    def objective(self, rewarded: Loss) -> Objective:
        """What a step minimizes; `rewarded` is the loss of rewards."""
        loss = self.config.loss
        if self.teacher is not None:
            return Objective(self.teacher.loss, "dapo")
        return Objective(rewarded, loss.type, advantage_only=loss.kl_coef == 0 and loss.entropy_coef == 0)

    def clear_noise(self) -> None:
        self.sampler.clear_noise()

    def save(self, folder: Path, step: int) -> None:
        if self.carry_over is not None:
            self.carry_over.save(folder, step)
        if self.curriculum is not None:
            self.curriculum.save(folder, step // self.config.loss.num_iterations)
        if self.sampler.calibration is not None:
            self.sampler.calibration.save(folder)

    def load(self, folder: Path, step: int) -> None:
        if self.carry_over is not None:
            self.carry_over.load(folder, step)
        if self.curriculum is not None:
            self.curriculum.load(folder)
        if self.sampler.calibration is not None:
            self.sampler.calibration.load(folder)


@dataclass(frozen=True)
class Loaded:
    """What is in memory when a run begins: an engine, or a loaded base, and the policy on its weights."""

    engine: Engine | LoadedBase
    policy: Policy
    plan: MicroBatchPlan
    teacher: Teacher | None = None


def make_parts(config: RunConfig, given: Given, opened: Loaded, log: RunLog) -> TrainingParts:
    temperature = config.rollout.temperature if config.kind.samples else 1.0
    packed = PackedPolicy(
        opened.policy.base_model, temperature, opened.plan, config.loss.entropy_coef > 0, config.rollout.deterministic
    )
    shared = {
        "config": config,
        "tokenizer": given.tokenizer,
        "policy": opened.policy,
        "packed": packed,
        "plan": opened.plan,
        "log": log,
        "times": PhaseTimes(packed.device),
        "parallel": given.parallel,
        "teacher": opened.teacher,
    }
    return given.parts(config, opened, shared)
