"""Reading the standard PEFT folder of a LoRA adapter. Tensors are named as `qerl.checkpoint.adapter` names them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.bounded import JSON_BYTES, parse_json, read_text
from qerl.base.errors import CheckpointError
from qerl.checkpoint.expert_adapter import from_peft, is_of_experts, rank_in_file

if TYPE_CHECKING:
    import torch

PEFT_PREFIX = "base_model.model."
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
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
    tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in saved.items()}
    expert_rank = rank_in_file(config, str(folder))
    if expert_rank is not None:
        tensors = from_peft(tensors, expert_rank, str(weights))
    if not any(name.endswith(".lora_A.weight") for name in tensors):
        raise CheckpointError(f"{weights} holds no LoRA tensors: give an adapter that PEFT saved, or a run")
    _check_factors(weights, tensors, config["r"])
    root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    return tensors, config["lora_alpha"] / root


def _check_factors(weights: Path, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    """Check that A is (rank, in) and B (out, rank): the scaling would be wrong for a rank other than the config's."""
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
