"""What the base itself limits, told before it is loaded: the context and the adapter's rank."""

from __future__ import annotations

from pathlib import Path

from qerl.config import RunConfig
from qerl.errors import ConfigError
from qerl.shards import read_json
from qerl.sizes import sizes_of
from training.prompts import Prompts


def check_limits(config: RunConfig, folder: Path, prompts: Prompts) -> None:
    """Raise ConfigError if a completion can outgrow the model's positions, or the rank every linear."""
    sizes = sizes_of(read_json(folder / "config.json"), str(folder))
    longest, new_tokens = max(map(len, prompts.ids_by_text.values())), config.rollout.max_new_tokens
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
