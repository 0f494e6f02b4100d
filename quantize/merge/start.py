"""The start that an adapter was trained with (`qerl.checkpoint.base_start`), in a merge.

    W        the 16-bit weight                  Q    what the base holds of it
    B0 A0    what the start repairs of W - Q    D    what the training changed

    start      trained policy       D                on W
    none       Q + s B A            s B A            W + D
    frozen     Q + B0 A0 + s B A    s B A            W + D
    trained    Q + s B A            s B A - B0 A0    W + D    (W + s B A would repair what W never lost)

So every merge adds D, either to W or to Q + B0 A0. D is a plain LoRA, whose rank is larger by that of a trained start:

    s B A - B0 A0 = s [B, -B0 / s] [A; A0]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter_file import config_of_file, is_of_experts
from qerl.checkpoint.base_start import BaseStart, TrainedStart, find_start, read_start, start_of_adapter
from qerl.checkpoint.shards import read_json
from quantize.merge.base import FACTOR_A, FACTOR_B, Adapter

if TYPE_CHECKING:
    import torch

CONFIG = "adapter_config.json"
HOLDS_START = (
    "{} holds a repair of what rounding took from its base, and {} has 16-bit weights, which need none: leave --model "
    "out; `--onto original` merges what was trained, without that repair, with the 16-bit model"
)


@dataclass(frozen=True)
class AdapterStart:
    """How an adapter was trained with a start, where its factors are, and the factors by name."""

    trained: TrainedStart
    found: BaseStart
    factors: Mapping[str, torch.Tensor]

    @property
    def frozen(self) -> bool:
        """Whether it stays beside the adapter, which began at zero."""
        return self.trained.kind == "frozen"

    def change(self, adapter: Adapter) -> Adapter:
        """D as an adapter."""
        return adapter if self.frozen else _side_by_side(adapter, self.factors, _linears(adapter.tensors), -1.0)

    def beside(self, adapter: Adapter) -> dict[str, torch.Tensor]:
        """A0 and B0 that the base needs below D. A start that is trained repairs the adapter's own linears alone."""
        return {name: t for name, t in self.factors.items() if self.frozen or name in adapter.tensors}

    def stacked(self, adapter: Adapter) -> Adapter:
        """A frozen start and its adapter as one, s [B, B0 / s] [A; A0], with zeros where a linear has only one of them.

        It is what an adapter that was trained from the start would be.
        """
        linears = dict.fromkeys([*_linears(adapter.tensors), *_linears(self.factors)])
        return _side_by_side(adapter, self.factors, linears, 1.0)


def start_in_merge(adapter: Path, base: str) -> AdapterStart | None:
    """The start of an adapter; None if it was trained without one. Raises CheckpointError if it is nowhere."""
    trained = start_of_adapter(adapter)
    if trained is None:
        return None
    found = find_start(adapter, base)
    return AdapterStart(trained, found, read_start(found))


def neutral_factors(adapter: Adapter, start: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Factors in the shapes of the adapter's that change nothing, or add B0 A0 where `start` has it for a linear.

    Raises CheckpointError for a start of a larger rank than the adapter's.
    """
    found: dict[str, torch.Tensor] = {}
    for module in adapter.modules:
        a, b = (adapter.tensors[module + factor].clone() for factor in (FACTOR_A, FACTOR_B))
        b.zero_()
        if (a0 := start.get(module + FACTOR_A)) is not None:
            if len(a0) > len(a):
                raise CheckpointError(
                    f"{adapter.folder} has rank {len(a)} and cannot have begun at a start of rank {len(a0)}: its "
                    "trained_on.json is of another adapter; copy the file again"
                )
            a[: len(a0)] = a0
            b[:, : len(a0)] = start[module + FACTOR_B].to(b.dtype) / adapter.scaling
        found |= {module + FACTOR_A: a, module + FACTOR_B: b}
    return found


def _linears(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the linears that have factors, without experts."""
    return [name.removesuffix(FACTOR_A) for name in tensors if name.endswith(FACTOR_A) and not is_of_experts(name)]


def _side_by_side(
    adapter: Adapter, start: Mapping[str, torch.Tensor], linears: Collection[str], sign: float
) -> Adapter:
    """s [B, sign B0 / s] [A; A0] for the linears, in float32. Trained norms and experts stay as they are."""
    import torch

    if not adapter.scaling:
        raise CheckpointError(f"{adapter.folder} has alpha 0, so that it changes nothing: merge another adapter")
    own, added = read_json(adapter.folder / CONFIG)["r"], _rank(start)
    rank = own + added
    alpha = adapter.scaling * rank
    scaling = alpha / rank  # as whoever reads the file computes it
    tensors = {name: t for name, t in adapter.tensors.items() if ".lora_" not in name or is_of_experts(name)}
    for linear in linears:
        a, b = (adapter.tensors.get(linear + factor) for factor in (FACTOR_A, FACTOR_B))
        a0, b0 = (start.get(linear + factor) for factor in (FACTOR_A, FACTOR_B))
        a = torch.zeros(own, a0.shape[1]) if a is None else a.float()
        b = torch.zeros(len(b0), own) if b is None else b.float()
        a0 = torch.zeros(added, a.shape[1]) if a0 is None else a0.float()
        b0 = torch.zeros(len(b), added) if b0 is None else b0.float()
        if a.shape[1] != a0.shape[1] or len(b) != len(b0):
            raise CheckpointError(
                f"{adapter.folder} and its start differ in the size of {linear}: give the start of its run"
            )
        tensors[linear + FACTOR_A] = torch.cat([a, a0])
        tensors[linear + FACTOR_B] = torch.cat([b, b0 * (sign / scaling)], dim=1)
    return replace(adapter, tensors=tensors, scaling=scaling, settings=_settings(adapter, linears, rank, alpha))


def _rank(start: Mapping[str, torch.Tensor]) -> int:
    return next(len(tensor) for name, tensor in start.items() if name.endswith(FACTOR_A))


def _settings(adapter: Adapter, linears: Collection[str], rank: int, alpha: float) -> dict[str, Any]:
    """What adapter_config.json says of the stacked adapter in place of the folder's own."""
    experts = adapter.of_experts
    return {
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": False,
        "target_modules": sorted({linear.rpartition(".")[2] for linear in linears}),
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        **(config_of_file(experts, rank, alpha / rank) if experts else {}),
    }
