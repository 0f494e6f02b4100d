"""The adapter on experts: attached to a model, named, and in the files of PEFT.

Tensors have the names of the experts' tensors in memory, and the shapes of `qerl.model.expert_lora`:

    model.layers.0.mlp.experts.gate_up_proj.lora_A.weight    (experts, rank, hidden), or (rank, hidden) shared by all
    model.layers.0.mlp.experts.gate_up_proj.lora_B.weight    (experts, 2 width, rank)
    model.layers.0.mlp.experts.down_proj.lora_A.weight       (experts, rank, width)
    model.layers.0.mlp.experts.down_proj.lora_B.weight       (experts, hidden, rank), or (hidden, rank) shared by all

PEFT 0.21 has them under `target_parameters` (peft/tuners/lora/layer.py, ParamWrapper), which wraps one projection
around the other: down_proj is `experts.lora_A`, and gate_up_proj is `experts.base_layer.lora_A`. Its A is
(experts * rank, in) with the expert as the slower index, and its B (out, rank * experts) with the expert as the faster
one. It has no shared factors, so they are written once for each expert, and recognised when they are read. Its
`rank_pattern` and `alpha_pattern` hold another rank than that of the other linears.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError
from qerl.checkpoint.linears import GATE_UP

if TYPE_CHECKING:
    import torch
    from torch import nn

    from qerl.model.expert_adapter import ExpertAdapter
    from qerl.model.experts import Experts

LEAVES = ("gate_up_proj", "down_proj")
PARAMETERS = tuple(f"mlp.experts.{leaf}" for leaf in LEAVES)  # for PEFT's target_parameters
OF_EXPERTS = (*GATE_UP, "down_proj")  # in adapter.targets: linears of dense MLPs and of experts
_OWN = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<leaf>gate_up_proj|down_proj)\.lora_(?P<factor>[AB])\.weight")
_PEFT = re.compile(r"(?P<experts>.*\.mlp\.experts)(?P<inner>\.base_layer)?\.lora_(?P<factor>[AB])\.weight")


def is_of_experts(name: str) -> bool:
    """Whether a tensor of an adapter, by its name here, acts on experts."""
    return _OWN.fullmatch(name) is not None


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """The experts of a model's layers, by name."""
    from qerl.model.experts import Experts

    return {name: module for name, module in model.named_modules() if isinstance(module, Experts)}


def adapters_of(model: nn.Module) -> Iterator[ExpertAdapter]:
    """The attached adapters."""
    return (experts.adapter for experts in experts_of(model).values() if experts.adapter is not None)


def attach_to_experts_(model: nn.Module, kind: str, rank: int, scaling: float) -> None:
    """Give the experts of each layer a fresh adapter; `kind` is "shared" or "per_expert"."""
    from qerl.model.expert_adapter import ExpertAdapter

    for experts in experts_of(model).values():
        down = experts.down_proj
        sizes = down.experts, down.in_features, down.out_features
        experts.adapter = ExpertAdapter(sizes, rank, scaling, kind == "shared", down.weight_device)


def linear_targets(model: nn.Module, targets: Sequence[str]) -> tuple[str, ...]:
    """Those of `adapter.targets` that are linears of the model, without those that its experts have."""
    import torch

    if not experts_of(model):
        return tuple(targets)
    leaves = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return tuple(target for target in targets if target not in OF_EXPERTS or target in leaves)


def expert_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained factors by their names here; these are the model's own, not copies."""

    from qerl.checkpoint.adapter_file import PEFT_PREFIX

    return {
        f"{name.removeprefix(PEFT_PREFIX)}.{leaf}.lora_{factor}.weight": getattr(part, f"lora_{factor}")
        for name, experts in experts_of(model).items()
        if experts.adapter is not None
        for leaf in LEAVES
        for part in [getattr(experts.adapter, leaf)]
        for factor in "AB"
    }


def to_peft(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Factors by the names here -> by those of PEFT's file, without its prefix, in its layout."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = _OWN.fullmatch(name)
        layer = match["experts"]
        count = next(t.shape[0] for n, t in tensors.items() if n.startswith(f"{layer}.") and t.dim() == 3)
        every = tensor if tensor.dim() == 3 else tensor.expand(count, -1, -1)
        inner = ".base_layer" if match["leaf"] == "gate_up_proj" else ""
        flat = every.flatten(0, 1) if match["factor"] == "A" else every.permute(1, 2, 0).flatten(1)
        found[f"{layer}{inner}.lora_{match['factor']}.weight"] = flat.contiguous()
    return found


def from_peft(tensors: Mapping[str, torch.Tensor], rank: int, where: str) -> dict[str, torch.Tensor]:
    """An adapter's tensors with those on experts under the names and in the shapes here; the others as they are.

    Outer factors are shared if they are in every layer. Raises CheckpointError for a size that is no multiple of
    `rank`.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = _PEFT.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        by_rank = tensor.shape[0 if match["factor"] == "A" else 1] if tensor.dim() == 2 else 0
        if not by_rank or by_rank % rank:
            raise CheckpointError(
                f"{where} has {name} as {tuple(tensor.shape)}, which is not the rank {rank} of adapter_config.json for "
                "each expert: save the adapter again"
            )
        each = tensor.view(-1, rank, tensor.shape[1]) if match["factor"] == "A" else _per_expert_b(tensor, rank)
        leaf = "gate_up_proj" if match["inner"] else "down_proj"
        found[f"{match['experts']}.{leaf}.lora_{match['factor']}.weight"] = each
    shared = ("gate_up_proj.lora_A.weight", "down_proj.lora_B.weight")
    outer = [name for name in found if is_of_experts(name) and name.endswith(shared)]
    if all(bool((found[name] == found[name][:1]).all()) for name in outer):
        found |= {name: found[name][0].clone() for name in outer}
    return found


def _per_expert_b(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.view(tensor.shape[0], rank, -1).permute(2, 0, 1).contiguous()


def describe(tensors: Mapping[str, torch.Tensor]) -> tuple[str, int]:
    """The kind (one of `qerl.model.expert_adapter.KINDS`) and rank of an adapter's tensors on experts: 0 for none.

    Raises CheckpointError for layers that differ in it.
    """
    outer = [tensor for name, tensor in tensors.items() if is_of_experts(name) and "gate_up_proj.lora_A" in name]
    kinds = {("shared" if tensor.dim() == 2 else "per_expert", tensor.shape[-2]) for tensor in outer}
    if len(kinds) > 1:
        raise CheckpointError(f"the adapter on experts differs from layer to layer ({sorted(kinds)}): save it again")
    return kinds.pop() if kinds else ("none", 0)


def config_of_file(tensors: Mapping[str, torch.Tensor], rank: int, scaling: float) -> dict[str, Any]:
    """What adapter_config.json says of an adapter with these tensors on experts, for other linears of `rank`."""
    own = describe(tensors)[1]
    patterns = (
        {}
        if own == rank
        else {
            "rank_pattern": dict.fromkeys(PARAMETERS, own),
            "alpha_pattern": dict.fromkeys(PARAMETERS, scaling * own),
        }
    )
    return {"target_parameters": list(PARAMETERS), **patterns}


def rank_in_file(config: Mapping[str, Any], where: str) -> int | None:
    """The rank on experts that an adapter_config.json says; None if it has none on them.

    Raises CheckpointError for other parameters, and for patterns that are not those of `config_of_file`.
    """
    parameters = config.get("target_parameters")
    ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    if not parameters and not ranks and not alphas:
        return None
    rank = ranks.get(PARAMETERS[0], config["r"]) if isinstance(ranks, dict) else None
    scaling = config["lora_alpha"] / config["r"]
    plain = type(rank) is int and rank > 0 and not (ranks and config.get("use_rslora"))
    plain = plain and (not ranks or ranks == dict.fromkeys(PARAMETERS, rank))
    expected = dict.fromkeys(PARAMETERS, scaling * rank) if plain and ranks else {}
    if not parameters or sorted(parameters) != sorted(PARAMETERS) or not plain or alphas != expected:
        raise CheckpointError(
            f"{where} has target_parameters {parameters!r:.80}, rank_pattern {ranks!r:.80} and alpha_pattern "
            f"{alphas!r:.80}: qerl reads plain LoRA of one rank, and on experts that of {' and '.join(PARAMETERS)} "
            "with one rank and the same alpha / rank"
        )
    return rank
