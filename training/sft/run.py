"""A run on given conversations: what `training.run` hands on when a recipe has the section `sft`.

Its directory is that of any run, without completions/. No engine is opened: the base is loaded once, as the trainer
multiplies by it.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig

from qerl.checkpoint.load import end_token_ids, load_tokenizer, local_folder
from qerl.checkpoint.resolve import describe
from qerl.engine.loaded_base import LoadedBase
from qerl.engine.options import EngineOptions
from qerl.plan.advice import check_ranks
from qerl.plan.plan import checkpoint_bytes
from training.course import Course, Place, TrainResult, agree_on_inputs, carry_out, settled_plan
from training.policy.packed_policy import PackedPolicy
from training.preflight.checks import (
    check_activations,
    check_memory,
    check_room,
    check_trackers,
    check_trained,
    free_bytes,
    sizes_at,
)
from training.preflight.start import check_warm_start
from training.run import packed_base, policy_on
from training.run_dir.folder import written
from training.run_dir.phase_times import PhaseTimes
from training.run_dir.resume import check_same_base
from training.sft.marking import Marker
from training.sft.rows import Rows, read_rows
from training.sft.trainer import SftParts, SftTrainer
from training.sft.validation import measure
from training.trl_config import check_installed, sft_arguments
from training.validation.validation import Validation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import RunConfig
    from training.run_dir.log import RunLog
    from training.run_dir.stop import Stop

logger = logging.getLogger(__name__)


def train_on_rows(
    config: RunConfig, base: ModelRef, place: Place, checkpoint: Path | None, accept_changes: bool
) -> TrainResult:
    """Check, load, plan, train, finish. What can be refused is refused before anything heavy is loaded or written."""
    run_dir, parallel = place.run_dir, place.parallel
    found = written(run_dir)
    tokenizer, rows = _check(config, base, place)
    agree_on_inputs(config, base, place, rows.inputs(), accept_changes)
    args = sft_arguments(config, run_dir)  # what it refuses is refused before anything is written
    served = base if config.qat is None else packed_base(config, base, place, rows.trained)
    options = EngineOptions(
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        cap_gib=config.memory.cap_gib,
        start=base.start if config.adapter.start == "frozen" else None,
    )
    loaded = LoadedBase(served.base, served.format, options)
    logger.info("%s; %s", describe(served), loaded.kernel)
    policy = policy_on(config, loaded, base, parallel)
    plan = settled_plan(config, base, place, policy, loaded)
    course = Course(config, base, place, checkpoint, found, rows.inputs(), plan)

    def begin(log: RunLog, stop: Stop) -> SftTrainer:
        packed = PackedPolicy(policy.base_model, 1.0, plan, deterministic=config.rollout.deterministic)
        parts = SftParts(
            base=loaded,
            rows=rows,
            config=config,
            tokenizer=tokenizer,
            policy=policy,
            packed=packed,
            plan=plan,
            log=log,
            times=PhaseTimes(packed.device),
            parallel=parallel,
        )
        validation = Validation(parts, partial(measure, parts), stop) if rows.held_out else None
        return SftTrainer(parts, args, [stop], course.start_step, validation)

    return carry_out(course, begin, lambda trainer, abandoned: loaded.close())


def _check(config: RunConfig, base: ModelRef, place: Place) -> tuple[PreTrainedTokenizerBase, Rows]:
    """Read the rows, and raise QerlError for whatever this base, card or run directory refuses."""
    check_installed(config)
    check_trackers(config.logging.report_to)
    check_activations(config, base)
    check_ranks(config, place.parallel.size)
    check_same_base(place.run_dir, base.base)
    sizes = sizes_at(base)
    check_room(place.run_dir, checkpoint_bytes(config, sizes))
    if torch.cuda.is_available():
        check_memory(config, base, free_bytes(), place.parallel.size)
    return read_given(config, base)


def read_given(config: RunConfig, base: ModelRef) -> tuple[PreTrainedTokenizerBase, Rows]:
    """The tokenizer of a base and the rows that a run on it learns from. Raises QerlError if it cannot learn them."""
    if base.adapter is not None:
        check_warm_start(base.adapter, base.base, config.adapter)
    sizes = sizes_at(base)
    check_trained(config, sizes)
    tokenizer = load_tokenizer(base.base, config.model.trust_remote_code)
    folder = local_folder(base.base, config.model.trust_remote_code)
    text_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code).get_text_config()
    ends = end_token_ids(folder, text_config, tokenizer)
    marker = Marker(tokenizer, ends, config.data.chat_template_kwargs)
    return tokenizer, read_rows(config, marker, sizes)
