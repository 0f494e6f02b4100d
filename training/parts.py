"""The parts of a run as one value, which the functions of `training/step.py` take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.parallel import ALONE, Parallel
from qerl.checkpoint.load import text_of_engine
from qerl.engine.interface import SamplingParams
from training.policy.kv_ranges import KVCalibration
from training.policy.packed_policy import PackedPolicy
from training.policy.policy import Policy, check_reference
from training.rewards.grading import Grader
from training.rollout.carry_over import CarryOver
from training.rollout.prompts import Curriculum, weights_of
from training.rollout.sampler import Sampler, SamplerOptions
from training.run_dir.phase_times import PhaseTimes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import RunConfig
    from qerl.engine.interface import Engine
    from qerl.engine.loaded_base import LoadedBase
    from qerl.episodes.play import Environments
    from qerl.plan.micro_batch_plan import MicroBatchPlan
    from training.loss.groups import Prompt
    from training.policy.teacher import FoundTeacher, Teacher
    from training.rewards.rewards import Rewards
    from training.run_dir.log import RunLog
    from training.sft.rows import Row, Rows
    from training.validation.questions import Questions


@dataclass(frozen=True)
class Given:
    """What is known before an engine is opened."""

    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt | Row]
    rewards: Rewards | None
    parallel: Parallel = ALONE
    questions: Questions | None = None  # of a run that validates
    environments: Environments | None = None  # of a run with episodes of several turns
    teacher: FoundTeacher | None = None  # of a run that distills
    rows: Rows | None = None  # of a run on given conversations, which has neither rewards nor questions


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """What every run is made of: a policy, how it is packed, and where its numbers go."""

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


@dataclass(frozen=True, kw_only=True)
class Parts(TrainingParts):
    """What a run is made of that samples what it trains on."""

    prompts: Sequence[Prompt]
    rewards: Rewards
    sampler: Sampler
    grader: Grader
    carry_over: CarryOver | None = None  # of a run whose completions go on from step to step
    curriculum: Curriculum | None = None


@dataclass(frozen=True, kw_only=True)
class SftParts(TrainingParts):
    """What a run on given conversations is made of."""

    base: LoadedBase
    rows: Rows


@dataclass(frozen=True)
class Loaded:
    """What is in memory when a run begins: an engine, or a loaded base, and the policy on its weights."""

    engine: Engine | LoadedBase
    policy: Policy
    plan: MicroBatchPlan
    teacher: Teacher | None = None


def make_parts(config: RunConfig, given: Given, opened: Loaded, log: RunLog) -> TrainingParts:
    """The parts of a run over what is open."""
    engine, policy, plan = opened.engine, opened.policy, opened.plan
    rollout, sampled = config.rollout, given.rows is None
    packed = PackedPolicy(
        policy.base_model,
        rollout.temperature if sampled else 1.0,
        plan,
        config.loss.entropy_coef > 0,
        rollout.deterministic,
    )
    shared = {
        "config": config,
        "tokenizer": given.tokenizer,
        "policy": policy,
        "packed": packed,
        "plan": plan,
        "log": log,
        "times": PhaseTimes(packed.device),
        "parallel": given.parallel,
        "teacher": opened.teacher,
    }
    if not sampled:
        return SftParts(base=engine, rows=given.rows, **shared)
    check_reference(policy, config.loss.kl_coef)
    sampler = Sampler(engine, policy, sampler_options(config), given.environments)
    if config.rollout.calibrates_kv:
        prompts = [prompt.ids for prompt in given.prompts]
        sampler.calibration = KVCalibration(policy.base_model, prompts, rollout.kv_refresh, given.parallel)
    return Parts(
        prompts=given.prompts,
        rewards=given.rewards,
        sampler=sampler,
        grader=Grader(given.rewards, text_of_engine(given.tokenizer, engine).batch, config.loss.mask_truncated),
        carry_over=CarryOver(config, given.prompts, given.parallel) if rollout.carry_over else None,
        curriculum=_curriculum(config, given),
        **shared,
    )


def _curriculum(config: RunConfig, given: Given) -> Curriculum | None:
    wanted = config.data.curriculum
    return wanted and Curriculum(wanted, weights_of(config), given.prompts, given.rewards, config.run.seed)


def sampler_options(config: RunConfig) -> SamplerOptions:
    """How the recipe samples."""
    rollout, run = config.rollout, config.run
    sampling = SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
    return SamplerOptions(sampling, rollout.group_size, config.noise, run.steps, run.seed)
