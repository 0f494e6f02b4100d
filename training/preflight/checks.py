"""Checks of a run before an engine is opened: data, rewards, base, adapter, context, trackers and memory.

`check_config` and `check_resumed` need the configuration and files alone, so the command calls them before it imports
anything heavy. `read_prompts` reads the data, and holds prompts and adapter to what the base allows. `uses_card` and
`check_memory` ask this machine. No torch on import.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.devices import FP8_CAPABILITY
from qerl.base.errors import CheckpointError, ConfigError, EngineError
from qerl.checkpoint.activations import GRPO_WARNING, kind_of_activations
from qerl.checkpoint.load import check_switches, load_tokenizer, local_folder
from qerl.config.quant import CALIBRATION
from qerl.config.rules import vllm_only
from qerl.data.examples import check_source
from qerl.data.grading.grade import check_grader
from qerl.data.rows import naming, sources_of
from qerl.data.sequences import check_readable
from qerl.data.tasks import task_of
from qerl.engine.interface import check_tokens
from qerl.engine.memory import others_bytes
from qerl.engine.open import choose_engine
from qerl.plan.engine_memory import Card
from qerl.plan.sizes import ModelSizes, read_sizes
from qerl.plan.trained import trained_linears
from training.preflight.plan import GIB, check_layers, plan, settled_for, with_values
from training.preflight.start import check_warm_start
from training.rewards.rewards import check_rewards, fixed_columns
from training.run_dir.checkpoint import checkpoints
from training.run_dir.resume import NOTHING_MOVED, Moved, base_to_resume, check_files, config_to_resume

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import RunConfig
    from qerl.episodes.play import Environments
    from training.loss.groups import Prompt
    from training.sft.rows import Rows


logger = logging.getLogger(__name__)


def check_activations(config: RunConfig, base: ModelRef) -> None:
    """Warn that GRPO may not converge with 4-bit activations, by the recipe or of a frozen base. A distillation does.

    Raises ConfigError for dropout on an adapter's input: the engine's adapter reads what its linear reads; and for
    training in FP8 on a card without.
    """
    if config.train.fp8_recipe is not None:
        _check_card(config.train.fp8_recipe)
    if config.qat is not None:
        packed = formats.get(config.qat.quant_cfg.weights.format)
        kind = config.qat.quant_cfg.activations if packed.four_bit_inputs else "none"
    else:
        kind = kind_of_activations(local_folder(base.base, config.model.trust_remote_code), formats.get(base.format))
        if kind != "none" and config.adapter.dropout:
            raise ConfigError(
                f"adapter.dropout: {config.adapter.dropout:g} does not go with {base.base}, whose linears round their "
                "input to 4 bits: write adapter.dropout: 0"
            )
    if kind != "none" and config.distill is None:
        logger.warning(GRPO_WARNING)


def _check_card(recipe: str) -> None:
    import torch

    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        raise ConfigError(
            f"train.fp8_recipe: {recipe} needs compute capability {FP8_CAPABILITY} (Ada, Hopper or newer) and "
            f"{torch.cuda.get_device_name()} has {capability}: write train.fp8_recipe: null"
        )


OFFLINE = ("offline", "local", "disabled", "dryrun")  # values of WANDB_MODE and SWANLAB_MODE that need no key


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is not installed, or that would ask for a key."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"logging.report_to names {name}, which is not installed: run `pip install {name}`, or leave it out "
                "(metrics.jsonl is written in any case)"
            )
    for name, has_key in (("wandb", _wandb_has_key), ("swanlab", _swanlab_has_key)):
        if name in names and not has_key():
            variable = name.upper()
            raise ConfigError(
                f"logging.report_to names {name}, which has no key here: run `{name} login`, set {variable}_API_KEY, "
                f"or set {variable}_MODE=offline to keep its files in the run until `{name} sync` (metrics.jsonl is "
                "written in any case)"
            )


def _swanlab_has_key() -> bool:
    import swanlab

    settings = swanlab.Settings()
    return settings.mode in OFFLINE or bool(settings.api_key)


def _wandb_has_key() -> bool:
    """Whether wandb finds a key where it looks for one, or needs none, by its settings of environment and files."""
    import wandb

    settings = wandb.setup().settings
    if os.environ.get("WANDB_MODE", settings.mode) in OFFLINE or settings.api_key or settings.identity_token_file:
        return True
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        from wandb.sdk.lib.wbauth.wbnetrc import read_netrc_auth  # wandb 0.31.0; it has no public function for this
    except ImportError:
        return True  # wandb itself then says what is missing
    try:
        return read_netrc_auth(host=settings.base_url) is not None
    except wandb.errors.AuthenticationError:  # a key that cannot be one
        return False


PLAN_ERROR = 0.10  # the error of a plan, as a share of the limit: measured runs stay within it


def check_config(config: RunConfig) -> None:
    """Raise ConfigError for a grader, a tracker or a reward that cannot be used, DataError or ConfigError for rows."""
    check_trackers(config.logging.report_to)
    if not config.kind.samples:
        check_conversation_sources(config)
        return
    for source in sources_of(config.data, config.rewards):
        data, task = source.data, task_of(source.data)
        check_grader(task)
        check_rewards(source.rewards, fixed_columns(task, config.rollout.max_new_tokens))
        with naming(source):
            check_source(task, data.source, data.split, data.columns)
    if config.validation.every is not None:
        from training.validation.questions import check_rows

        check_rows(config)


def check_calibration(config: RunConfig) -> None:
    """Raise DataError if a new run cannot read the rows that it is to calibrate its activations on."""
    if config.qat is not None and (rows := config.qat.quant_cfg.calibration.data) is not None:
        check_readable(rows, CALIBRATION)


def check_conversation_sources(config: RunConfig) -> None:
    """Raise DataError for rows of a run on given conversations that can be refused without reading all of them."""
    from qerl.data.conversations import Source, check_conversations, held_out_source

    data = config.data
    check_conversations(task_of(data), Source(data.source, data.split, data.columns))
    held_out = held_out_source(config.data, config.validation)
    if config.validation.every is not None and held_out is not None:
        check_conversations(*held_out)


def check_resumed(
    run_dir: Path, step: int | None = None, steps: int | None = None, moved: Moved = NOTHING_MOVED
) -> None:
    """Raise QerlError if a run cannot continue as `config_to_resume` says.

    Unless the run is finished, the base and data it was started with have to be there.
    """
    config, done = config_to_resume(run_dir, step, steps, moved)
    if done < config.run.steps:
        check_files(config, run_dir)
        check_config(config)
        base_to_resume(run_dir, config)


def read_prompts(
    config: RunConfig, base: ModelRef
) -> tuple[PreTrainedTokenizerBase, list[Prompt], Environments | None]:
    """The tokenizer, the prompts and the environments of a run on `base`.

    Raises QerlError if the data cannot be read, or if the base allows neither these prompts nor the adapter.
    """
    from training.rollout.prompts import load_all_prompts  # it imports torch

    if base.adapter is not None:
        check_warm_start(base.adapter, base.base, config.adapter)
    sizes = sizes_at(base)
    tokenizer = load_tokenizer(base.base, config.model.trust_remote_code)
    switches = config.data.chat_template_kwargs
    check_switches(tokenizer, switches, "data.chat_template_kwargs")
    environments = None
    if config.environment is not None:
        from qerl.episodes.play import open_environments

        new_tokens = config.rollout.max_new_tokens
        context = min(config.data.max_prompt_tokens + new_tokens, sizes.positions or sys.maxsize)
        folder = local_folder(base.base)
        environments = open_environments(config.environment, tokenizer, folder, new_tokens, context, switches)
    chat = environments.chat if environments else None
    prompts = load_all_prompts(config, tokenizer, chat)
    check_limits(config, sizes, prompts)
    return tokenizer, prompts, environments


def read_given(config: RunConfig, base: ModelRef) -> tuple[PreTrainedTokenizerBase, Rows]:
    """The tokenizer and the rows of a run on given conversations. Raises QerlError as `read_prompts` does."""
    from training.sft.rows import read_rows  # it imports torch

    if base.adapter is not None:
        check_warm_start(base.adapter, base.base, config.adapter)
    sizes = sizes_at(base)
    check_trained(config, sizes)
    tokenizer = load_tokenizer(base.base, config.model.trust_remote_code)
    return tokenizer, read_rows(config, base, tokenizer, sizes)


def check_limits(config: RunConfig, sizes: ModelSizes, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if completions can outgrow the model's positions, or if what is trained does not fit it.

    Raises EngineError if a prompt has a token outside of the model's vocabulary.
    """
    check_tokens((prompt.ids for prompt in prompts), sizes.vocabulary)
    longest, new_tokens = max(len(prompt.ids) for prompt in prompts), config.rollout.max_new_tokens
    if sizes.positions is not None and longest + new_tokens > sizes.positions:
        raise ConfigError(
            f"a prompt of {longest} tokens and rollout.max_new_tokens {new_tokens} exceed the model's "
            f"{sizes.positions} positions: write rollout.max_new_tokens: {max(1, sizes.positions - longest)}, or lower "
            "data.max_prompt_tokens"
        )
    check_trained(config, sizes)


def check_trained(config: RunConfig, sizes: ModelSizes) -> None:
    """Raise ConfigError if what is trained does not fit the model."""
    check_layers(config, sizes.decoder)
    if config.qat is not None:
        trained_linears(config.qat, sizes.decoder)
    if not config.kind.has_adapter:
        return
    targets = sizes.decoder.targets(config.adapter.targets)
    width = max(min(sizes.projections[target]) for target in targets)
    if config.adapter.rank > width:
        raise ConfigError(
            f"adapter.rank {config.adapter.rank} is more than any linear of this model can have: write adapter.rank: "
            f"{width} or less"
        )


def uses_card(config: RunConfig) -> bool:
    """Whether the run takes memory of a card, by the engine that rollout.engine means on this machine.

    Raises ConfigError if other keys need another engine.
    """
    import torch

    if not config.kind.samples:
        return torch.cuda.is_available()
    engine = choose_engine(config.rollout.engine)
    asked = vllm_only(config) if engine == "transformers" else {}
    if asked:
        why = "vllm is not installed" if torch.cuda.is_available() else "there is no CUDA device"
        keys = ", ".join(asked)
        raise ConfigError(
            f"rollout.engine auto is transformers here, since {why}, and that does not read {keys}: leave "
            f"{'it' if len(asked) == 1 else 'them'} out, or run it where vllm runs (`qerl doctor` says what is missing)"
        )
    return engine == "vllm"


def check_memory(config: RunConfig, base: ModelRef, free: int, ranks: int = 1) -> None:
    """Raise EngineError if a run with the vllm engine needs far more than `free` bytes of the card, or than its cap.

    An excess within the error of the plan is only a warning: the run measures, once the engine is open.
    """
    made = plan(with_values(config, {"model.format": base.format}), sizes_at(base), card_of_bytes(free, ranks))
    for problem in made.found:
        if problem.exceeds(PLAN_ERROR):
            raise EngineError(f"{problem.text}; `qerl plan` shows what takes it and what would fit")
    for problem in made.found:
        if problem.needed:
            logger.warning("by the plan this will hardly fit: %s", problem.text)


def settle_qat(config: RunConfig, base: ModelRef, ranks: int = 1) -> RunConfig:
    """The recipe of a new run, with what this machine takes where it says auto: optimizer, and what qat leaves open.

    `ranks` processes share the masters out. The moments of a 7B's weights take 13 GB in 8 bits and 52 GB in 32, so the
    plan has to know which they will be.
    """
    if config.qat is None or choose_engine(config.rollout.engine) != "vllm":
        return config
    if config.optim.name == "auto":
        has_8bit = importlib.util.find_spec("bitsandbytes") is not None
        config = with_values(config, {"optim.name": "adamw_8bit" if has_8bit else "adamw"})
    return settled_for(config, sizes_at(base), card_of_bytes(free_bytes(), ranks))


def sizes_at(base: ModelRef) -> ModelSizes:
    """The sizes in the config.json of a base. Raises CheckpointError if it lacks them."""
    return read_sizes(str(local_folder(base.base)))


def card_of_bytes(memory: int, ranks: int = 1) -> Card:
    """One of `ranks` cards, of which only the memory matters."""
    return Card("this card", memory / GIB, 1.0, 1.0, ranks)


def free_bytes() -> int:
    """The memory of the card without what other processes held before this one had loaded anything."""
    import torch

    device = torch.cuda.current_device()
    return torch.cuda.get_device_properties(device).total_memory - others_bytes(device)


def check_room(run_dir: Path, needed: int) -> None:
    """Raise CheckpointError if the disk has no room for a checkpoint of `needed` bytes, even if all checkpoints but
    the newest are deleted for it."""
    above = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    older = sum(file.stat().st_size for path in checkpoints(run_dir)[:-1] for file in path.rglob("*"))
    free = shutil.disk_usage(above).free
    if free + older < needed:
        raise CheckpointError(
            f"a checkpoint (weights and optimizer) takes {needed / 2**20:,.1f} MiB, and the disk of {run_dir} has "
            f"{free / 2**20:,.1f} MiB left: free some disk space, or write to another disk with --out"
        )
