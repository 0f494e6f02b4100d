"""The files of an adapter. Importing this loads no torch.

Tensors are named as `qerl.checkpoint.adapter` names them. PEFT keeps an adapter on experts in another layout
(`to_peft`). An adapter on the text part of a model for pictures and text is for the whole model in its file: vLLM opens
that model, and ignores keys that it does not have in silence.

    base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError
from qerl.base.files import JSON_BYTES, parse_json, read_text, replace_text
from qerl.checkpoint.shards import read_json
from qerl.config.names import OF_EXPERTS, OF_STATES, PROJECTIONS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from qerl.model.experts import ExpertAdapter, Experts


PEFT_PREFIX = "base_model.model."
PART, WHOLE = "model.layers.", "model.language_model.layers."  # decoder layers in a text model, and in a whole one
OTHER_ADAPTERS = (
    "use_dora", "lora_bias", "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication",
    "megatron_config", "monteclora_config", "trainable_token_indices", "use_bdlora", "use_qalora",
)  # fmt: skip
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")  # of A and B; the others change the base too


def read_adapter(folder: str | Path) -> tuple[dict[str, torch.Tensor], float]:
    """The tensors of a PEFT adapter folder, by base module name, and its scaling.

    Raises CheckpointError for anything but plain LoRA.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    config = _adapter_config(folder)
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise CheckpointError(
            f"{folder} has no adapter_model.safetensors, and pickle adapters (.bin) are not read: save it again "
            "with PEFT's save_pretrained"
        )
    try:
        saved = load_file(weights)
    except Exception as error:
        raise CheckpointError(f"{weights} cannot be read ({error}): save or download it again") from error
    tensors = {_in_text_model(name.removeprefix(PEFT_PREFIX)): tensor for name, tensor in saved.items()}
    expert_rank = rank_in_file(config, str(folder))
    if expert_rank is not None:
        tensors = from_peft(tensors, expert_rank, str(weights))
    if not any(name.endswith(".lora_A.weight") for name in tensors):
        raise CheckpointError(f"{weights} holds no LoRA tensors: give an adapter that PEFT saved, or a run")
    _check_factors(weights, tensors, config["r"])
    root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    return tensors, config["lora_alpha"] / root


def _in_text_model(name: str) -> str:
    return PART + name.removeprefix(WHOLE) if name.startswith(WHOLE) else name


def is_for_whole(folder: Path) -> bool:
    """Whether an adapter's folder is for a model for pictures and text, as `for_whole_` makes it."""
    return "language_model" in str(read_json(folder / "adapter_config.json").get("target_modules"))


def for_whole_(folder: Path) -> None:
    """Let a folder that acts on a text model act on the text part of the whole model, and on no other part of it."""
    from safetensors.torch import load_file, save_file

    weights, place = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = {name.replace(PEFT_PREFIX + PART, PEFT_PREFIX + WHOLE): t for name, t in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    config = read_json(place)
    if isinstance(leaves := config["target_modules"], list):
        config["target_modules"] = rf"(.*language_model|model)\.layers\.\d+\.(.*\.)?({'|'.join(sorted(leaves))})"
    replace_text(place, json.dumps(config, indent=2, sort_keys=True))


def _check_factors(weights: Path, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    """Check that A is (rank, in) and B (out, rank): the scaling would be wrong for a rank other than the config's."""
    a, b = ({n.removesuffix(f) for n in tensors if n.endswith(f)} for f in (".lora_A.weight", ".lora_B.weight"))
    if unpaired := sorted(a ^ b):
        raise CheckpointError(f"{weights} has only one of A and B for {unpaired[:4]}: save the adapter again")
    for name, tensor in tensors.items():
        axis = {"lora_A": 0, "lora_B": 1}.get(name.removesuffix(".weight").rpartition(".")[2])
        if axis is None or is_of_experts(name):
            continue
        if tensor.ndim != 2 or tensor.shape[axis] != rank or not tensor.is_floating_point():
            raise CheckpointError(
                f"{weights} has {name} as {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}, and "
                f"adapter_config.json rank {rank}: only plain LoRA, of one rank, is supported; save the adapter again"
            )


def _adapter_config(folder: Path) -> dict:
    try:
        config = parse_json(read_text(folder / "adapter_config.json", JSON_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} has no readable adapter_config.json, so it is not an adapter folder: give one that "
            "PEFT saved, or a run"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder}/adapter_config.json holds no object: save the adapter again")
    unsupported = [key for key in OTHER_ADAPTERS if config.get(key)]
    if config.get("peft_type") != "LORA" or unsupported:
        what = f" with {', '.join(unsupported)}" if unsupported else ""
        raise CheckpointError(
            f"{folder} is a {config.get('peft_type')} adapter{what}: only plain LoRA, of one rank, is supported; let "
            "PEFT make a model of base and adapter (merge_and_unload) and give that"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise CheckpointError(
            f"{folder}/adapter_config.json has r {rank!r} and lora_alpha {alpha!r}, which are no rank and no number: "
            "save the adapter again"
        )
    if (begun := config.get("init_lora_weights", True)) not in PLAIN_STARTS:
        raise CheckpointError(
            f"{folder} was begun with init_lora_weights {begun!r}, which changes the base's weights too: save it again "
            "as plain LoRA, with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    return config


LEAVES = ("gate_up_proj", "down_proj")
PARAMETERS = tuple(f"mlp.experts.{leaf}" for leaf in LEAVES)  # for PEFT's target_parameters
_OWN = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<leaf>gate_up_proj|down_proj)\.lora_(?P<factor>[AB])\.weight")
_PEFT = re.compile(r"(?P<experts>.*\.mlp\.experts)(?P<inner>\.base_layer)?\.lora_(?P<factor>[AB])\.weight")


def is_of_experts(name: str) -> bool:
    """Whether a tensor of an adapter, by its name here, acts on experts."""
    return _OWN.fullmatch(name) is not None


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """The experts of a model's layers, by name."""
    return {name: module for name, module in model.named_modules() if getattr(module, "is_experts", False)}


def adapters_of(model: nn.Module) -> Iterator[ExpertAdapter]:
    """The attached adapters."""
    return (experts.adapter for experts in experts_of(model).values() if experts.adapter is not None)


def attach_to_experts_(model: nn.Module, kind: str, rank: int, scaling: float) -> None:
    """Give the experts of each layer a fresh adapter; `kind` is "shared" or "per_expert"."""
    if not (found := experts_of(model)):
        return
    from qerl.model.experts import ExpertAdapter

    for experts in found.values():
        down = experts.down_proj
        sizes = down.experts, down.in_features, down.out_features
        experts.adapter = ExpertAdapter(sizes, rank, scaling, kind == "shared", down.weight_device)


def linear_targets(model: nn.Module, targets: Sequence[str]) -> tuple[str, ...]:
    """The linears of the model that `adapter.targets` names, without those that its experts have.

    All seven of PROJECTIONS stand for all linears that may have an adapter, those of linear attention too.
    """
    import torch

    leaves = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if set(PROJECTIONS) <= set(targets):
        targets = dict.fromkeys([*targets, *(name for name in OF_STATES if name in leaves)])
    if not experts_of(model):
        return tuple(targets)
    return tuple(target for target in targets if target not in OF_EXPERTS or target in leaves)


def expert_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained factors by their names here; these are the model's own, not copies."""

    return {
        f"{name.removeprefix(PEFT_PREFIX)}.{leaf}.lora_{factor}.weight": getattr(part, f"lora_{factor}")
        for name, experts in experts_of(model).items()
        if experts.adapter is not None
        for leaf in LEAVES
        for part in [getattr(experts.adapter, leaf)]
        for factor in "AB"
    }


def to_peft(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Factors by the names here -> by those of PEFT's file, without its prefix, in its layout.

    Here an adapter on experts is named by the experts' tensors in memory, with the shapes of `qerl.model.experts`:

        mlp.experts.gate_up_proj.lora_A.weight    (experts, rank, hidden), or (rank, hidden) shared by all
        mlp.experts.gate_up_proj.lora_B.weight    (experts, 2 width, rank)
        mlp.experts.down_proj.lora_A.weight       (experts, rank, width)
        mlp.experts.down_proj.lora_B.weight       (experts, hidden, rank), or (hidden, rank) shared by all

    PEFT 0.21 has them under `target_parameters` (peft/tuners/lora/layer.py, ParamWrapper), which wraps one projection
    around the other: down_proj is `experts.lora_A`, and gate_up_proj is `experts.base_layer.lora_A`. Its A is (experts
    * rank, in) with the expert as the slower index, and its B (out, rank * experts) with the expert as the faster one.
    It has no shared factors, so they are written once for each expert, and recognised when they are read. Its
    `rank_pattern` and `alpha_pattern` hold a rank that differs from the other linears'.
    """
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

    Outer factors are shared if they are in every layer. Raises CheckpointError for a size that is not a multiple of
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
        if match["factor"] == "A":
            each = tensor.view(-1, rank, tensor.shape[1])
        else:
            each = tensor.view(tensor.shape[0], rank, -1).permute(2, 0, 1).contiguous()
        leaf = "gate_up_proj" if match["inner"] else "down_proj"
        found[f"{match['experts']}.{leaf}.lora_{match['factor']}.weight"] = each
    shared = ("gate_up_proj.lora_A.weight", "down_proj.lora_B.weight")
    outer = [name for name in found if is_of_experts(name) and name.endswith(shared)]
    if all(bool((found[name] == found[name][:1]).all()) for name in outer):
        found |= {name: found[name][0].clone() for name in outer}
    return found


def describe(tensors: Mapping[str, torch.Tensor]) -> tuple[str, int]:
    """The kind (a value of `adapter.experts`) and rank of an adapter's tensors on experts: 0 for none.

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
        else {"rank_pattern": dict.fromkeys(PARAMETERS, own), "alpha_pattern": dict.fromkeys(PARAMETERS, scaling * own)}
    )
    return {"target_parameters": list(PARAMETERS), **patterns}


def rank_in_file(config: Mapping[str, Any], where: str) -> int | None:
    """The rank on experts that an adapter_config.json says; None if it has none on them.

    Raises CheckpointError for other parameters, and for patterns other than `config_of_file` writes.
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
