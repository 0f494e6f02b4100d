"""What base and card limit, told before anything is loaded: context, the adapter's rank, memory by the plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.checkpoint.load import local_folder
from qerl.checkpoint.shards import read_json
from qerl.config.rules import vllm_only
from qerl.engine.interface import check_tokens
from qerl.engine.open import choose_engine
from qerl.engine.own_memory import others_bytes
from qerl.errors import ConfigError, EngineError
from qerl.plan.advice import with_values
from qerl.plan.cards import Card
from qerl.plan.plan import GIB, plan
from qerl.plan.sizes import ModelSizes, sizes_of

if TYPE_CHECKING:
    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import RunConfig
    from training.rollout.groups import Prompt

PLAN_ERROR = 0.10  # of the limit: as near to what runs measured is the plan held

logger = logging.getLogger(__name__)


def check_limits(config: RunConfig, folder: Path, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if a completion can outgrow the model's positions, or the rank every linear; EngineError if a
    prompt has tokens that the model has not."""
    sizes = sizes_of(read_json(folder / "config.json"), str(folder))
    check_tokens((prompt.ids for prompt in prompts), sizes.vocabulary)
    longest, new_tokens = max(len(prompt.ids) for prompt in prompts), config.rollout.max_new_tokens
    if sizes.positions is not None and longest + new_tokens > sizes.positions:
        raise ConfigError(
            f"a prompt of {longest} tokens and rollout.max_new_tokens {new_tokens} exceed the model's "
            f"{sizes.positions} positions: write rollout.max_new_tokens: {max(1, sizes.positions - longest)}, or lower "
            "data.max_prompt_tokens"
        )
    width = max(min(sizes.projections[target]) for target in config.adapter.targets)
    if config.adapter.rank > width:
        raise ConfigError(
            f"adapter.rank {config.adapter.rank} is more than any linear of this model can have: write adapter.rank: "
            f"{width} or less"
        )


def check_engine(config: RunConfig) -> str:
    """The engine that rollout.engine stands for here. Raises ConfigError if other keys need another."""
    engine = choose_engine(config.rollout.engine)
    asked = vllm_only(config) if engine == "transformers" else {}
    if asked:
        import torch

        why = "vllm is not installed" if torch.cuda.is_available() else "there is no CUDA device"
        keys = ", ".join(asked)
        raise ConfigError(
            f"rollout.engine auto is transformers here, since {why}, and that does not read {keys}: leave "
            f"{'it' if len(asked) == 1 else 'them'} out, or run it where vllm runs (`qerl doctor` says what is missing)"
        )
    return engine


def check_memory(config: RunConfig, base: ModelRef, free: int) -> None:
    """Raise EngineError if a run with the vllm engine needs far more than `free` bytes of the card, or its cap.

    What exceeds it by no more than the plan may be wrong is a warning: the run measures, once the engine is open.
    """
    made = plan(with_values(config, {"model.format": base.format}), sizes_at(base), card_of_bytes(free))
    for problem in made.found:
        if problem.exceeds(PLAN_ERROR):
            raise EngineError(f"{problem.text}; `qerl plan` shows what takes it and what would fit")
    for problem in made.found:
        if problem.needed:
            logger.warning("by the plan this will hardly fit: %s", problem.text)


def sizes_at(base: ModelRef) -> ModelSizes:
    """Raises CheckpointError where config.json does not tell them."""
    return sizes_of(read_json(local_folder(base.base) / "config.json"), base.base)


def card_of_bytes(memory: int) -> Card:
    """A card of which only the memory counts."""
    return Card("this card", memory / GIB, 1.0, 1.0)


def free_bytes() -> int:
    """Of the card, less what other processes held when this one had loaded nothing."""
    import torch

    device = torch.cuda.current_device()
    return torch.cuda.get_device_properties(device).total_memory - others_bytes(device)
