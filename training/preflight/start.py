"""What a run starts from: an adapter that was trained before, or the start of its base. Loads no torch.

`check_warm_start` holds an earlier adapter to the run's base, rank, scale and places. `settle_start` decides once which
start of the base the adapter gets (`qerl.checkpoint.base_start`). The settled values are in the run's config.yaml, and
the components that act in its start/, so that a resumed run depends on neither the base's folder nor a later default.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.adapter import A_SUFFIX, check_fit, is_block_norm
from qerl.checkpoint.adapter_file import describe, is_of_experts, read_adapter
from qerl.checkpoint.base_start import (
    DEFAULT_RANK,
    START,
    BaseStart,
    about_start,
    check_start,
    find_start,
    start_beside,
    start_of_adapter,
)
from qerl.checkpoint.experts import decoder_of
from qerl.checkpoint.load import local_folder
from qerl.checkpoint.shards import read_config
from qerl.config.names import OF_EXPERTS, PROJECTIONS, expert_rank
from qerl.config.section import yaml_word
from qerl.plan.trained import DEFAULT_START
from training.preflight.plan import with_values

if TYPE_CHECKING:
    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import AdapterConfig, RunConfig


def check_warm_start(adapter: Path, base: str, own: AdapterConfig) -> None:
    """Raise ConfigError if the adapter contradicts the recipe's `own`, CheckpointError if it has another base."""
    tensors, scaling = read_adapter(adapter)
    check_fit(adapter, tensors, base)
    factors = [name for name in tensors if name.endswith(A_SUFFIX) and not is_of_experts(name)]
    ranks = sorted({tensors[name].shape[0] for name in factors})
    kind, of_experts = describe(tensors)
    leaves = {name.removesuffix(A_SUFFIX).rpartition(".")[2] for name in factors} | set(
        OF_EXPERTS if of_experts else ()
    )
    decoder = decoder_of(read_config(local_folder(base)), base)
    wanted, norms = set(decoder.targets(own.targets)), any(map(is_block_norm, tensors))
    if own.experts == "none" and leaves == wanted - set(OF_EXPERTS):
        wanted = leaves
    places = [name for name in PROJECTIONS if name in leaves] + sorted(leaves - set(PROJECTIONS))
    same_rank = ranks == [own.rank]
    alike = same_rank and math.isclose(scaling, own.alpha / own.rank)
    trained = {  # whether it is the recipe's, what it is, and what the recipe has
        "targets": (leaves == wanted, tuple(places), own.targets),
        "train_norms": (norms == own.train_norms, norms, own.train_norms),
        "experts": (not of_experts or kind == own.experts, kind, own.experts),
        "expert_rank": (not of_experts or of_experts == expert_rank(own), of_experts, expert_rank(own)),
        "rank": (same_rank, " and ".join(map(str, ranks)), own.rank),
        "alpha": (alike, f"{scaling * max(ranks, default=own.rank):g}", own.alpha),
    }
    _check_same(adapter, {key: (was, now) for key, (same, was, now) in trained.items() if not same})


def _check_same(adapter: Path, differing: Mapping[str, tuple[object, object]]) -> None:
    """Raise ConfigError for values of the section `adapter` that were others when the adapter was trained."""
    was, now = (", ".join(f"adapter.{key}: {yaml_word(pair[i])}" for key, pair in differing.items()) for i in (0, 1))
    if differing:
        raise ConfigError(f"{adapter} was trained with {was}, and the recipe has {now}: write {was}")


HIGHEST_RATE = 1e-3  # from zero, with Adam: one run of five collapsed, and at 2e-3 all (docs/lab/study.md)

logger = logging.getLogger(__name__)


def settle_start(config: RunConfig, base: ModelRef) -> tuple[RunConfig, ModelRef]:
    """The recipe of a new run with its start settled, and the base with the start that the run uses, if any.

    Raises ConfigError where the base or the adapter that the run goes on from has no such start, CheckpointError for a
    start that is damaged or was made for other weights.
    """
    if config.kind.packs:  # the weights that the adapter is packed into are 16-bit ones, which lost nothing
        return with_values(config, {"adapter.start": "none"}), replace(base, start=None)
    kind, start = _of_adapter(config, base) if base.adapter is not None else _of_base(config, base)
    rank = config.adapter.start_rank if start is None else start.rank
    config = with_values(config, {"adapter.start": kind, "adapter.start_rank": rank})
    if start is not None:
        logger.info("the adapter's start: %s, %s", kind, start)
    return config, replace(base, start=start)


def start_to_resume(config: RunConfig, base: ModelRef, run_dir: Path) -> tuple[RunConfig, ModelRef]:
    """The same for a run that goes on: what its config.yaml says, and its own start/.

    A run that began before qerl knew starts has none. Raises CheckpointError if the run's start/ is gone.
    """
    kind = config.adapter.start
    if kind in ("auto", "none"):
        return with_values(config, {"adapter.start": "none"}), replace(base, start=None)
    start = start_beside(run_dir, config.adapter.start_rank)
    if start is None:
        raise CheckpointError(
            f"{run_dir} trains with a start ({kind}), and its {START}/ is gone: put it back, or begin a new run"
        )
    return config, replace(base, start=start)


def _of_adapter(config: RunConfig, base: ModelRef) -> tuple[str, BaseStart | None]:
    """What the adapter that the run goes on from was trained with: it has no other meaning."""
    trained, own = start_of_adapter(base.adapter), config.adapter
    kind = "none" if trained is None else trained.kind
    if own.start not in ("auto", kind):
        _check_same(base.adapter, {"start": (kind, own.start)})
    if trained is not None and own.start_rank not in (None, trained.rank):
        _check_same(base.adapter, {"start_rank": (trained.rank, own.start_rank)})
    return kind, find_start(base.adapter, base.base)


def _of_base(config: RunConfig, base: ModelRef) -> tuple[str, BaseStart | None]:
    own = config.adapter
    if own.start == "none":
        return "none", None
    kind = DEFAULT_START if own.start == "auto" else own.start
    most = DEFAULT_RANK if kind == "frozen" else own.rank
    start = start_beside(local_folder(base.base), own.start_rank, most)
    if start is None:
        _without(config, base)
        return "none", None
    if kind == "trained" and start.rank > own.rank:
        raise ConfigError(
            f"adapter.start_rank {start.rank} is more than adapter.rank {own.rank}, which is what trains: write "
            f"adapter.start_rank: {own.rank} or less, or adapter.start: frozen"
        )
    check_start(start, base.base)
    if kind == "trained":
        _say_rate(config.optim.learning_rate, start)
    return kind, start


def _say_rate(rate: float, start: BaseStart) -> None:
    """Warn if the learning rate of an adapter that starts at the error is far too high.

    The first steps move the outputs of linears further than from zero (`quantize.rounding.rate_ratio`).
    """
    ratio = about_start(start.folder).get("rate_ratio")
    if not isinstance(ratio, int | float) or not ratio > 0:
        return
    if rate * ratio > HIGHEST_RATE:
        logger.warning(
            "optim.learning_rate %g acts from the trained start like %.2g from zero, and above %g runs collapsed "
            "(docs/lab/study.md): write optim.learning_rate: %.1g or less, or adapter.start: frozen",
            *(rate, rate * ratio, HIGHEST_RATE, HIGHEST_RATE / ratio),
        )


def _without(config: RunConfig, base: ModelRef) -> None:
    """Raise ConfigError if a start was asked for by name; else say once what is lost."""
    own = formats.get(base.format)
    if config.adapter.start != "auto":
        remedy = (
            "quantize it again (`qerl quantize`), or make one for it with `qerl quantize --start-of "
            f"{base.base} --model THE_16_BIT_MODEL`"
            if own.quantized
            else "nothing was rounded in a 16-bit base, so that it needs none: write adapter.start: none"
        )
        raise ConfigError(f"adapter.start: {config.adapter.start}: {base.base} has no {START}/: {remedy}")
    if own.shared_tensor is not None:
        logger.warning(
            "%s has no %s/, the part of the rounding error that an adapter can hold, and the run begins from a model "
            "that is further from the 16-bit one than it need be: `qerl quantize --start-of %s --model "
            "THE_16_BIT_MODEL` makes one",
            *(base.base, START, base.base),
        )
