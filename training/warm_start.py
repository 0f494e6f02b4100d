"""Starting from a saved adapter: whether it fits the recipe and the base is said before an engine is opened."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.adapter import load_tensors_, read_adapter
from qerl.adapter_fit import A_SUFFIX, check_fit
from qerl.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel

    from qerl.config import RunConfig

logger = logging.getLogger(__name__)


def check_warm_start(adapter: Path, base: str, config: RunConfig) -> None:
    """Raise ConfigError if the rank or alpha is not the recipe's, CheckpointError if the adapter is of another base."""
    tensors, scaling = read_adapter(adapter)
    rank, own = config.adapter.rank, config.adapter.alpha / config.adapter.rank
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith(A_SUFFIX)}
    if ranks != {rank}:
        found = " and ".join(map(str, sorted(ranks)))
        raise ConfigError(
            f"{adapter} has rank {found} and the recipe adapter.rank {rank}: write adapter.rank: {found} and "
            f"adapter.alpha: {scaling * max(ranks, default=rank):g}"
        )
    if not math.isclose(scaling, own):
        raise ConfigError(
            f"{adapter} was trained with alpha / rank {scaling:g} and would act with the recipe's {own:g}: write "
            f"adapter.alpha: {scaling * rank:g}"
        )
    check_fit(adapter, tensors, base)


def warm_start(policy: PeftModel, adapter: Path) -> None:
    """Put the saved tensors in place of the fresh ones."""
    tensors, _ = read_adapter(adapter)
    logger.info("starting from the adapter %s (%d tensors)", adapter, load_tensors_(policy, tensors))
