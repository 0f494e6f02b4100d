"""The modules of a model with an adapter by their names in the base, and an adapter that is in the packed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl.checkpoint.adapter import ADAPTER_NAME

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_TRAINED = f".modules_to_save.{ADAPTER_NAME}."  # in the name of a parameter of a trained norm


def pack_in_(model: nn.Module) -> None:
    """Let the attached adapter act through packed weights alone: whoever packs them adds s B A (`qerl.layers.lora`)."""
    for module in model.modules():
        if hasattr(module, "lora_part"):
            module.packed_in = True


def base_name(name: str) -> str | None:
    """The name that a module or parameter of a model with an adapter has in the base; None for one of the adapter.

    A norm that is trained has the name of the one that it stands for, which has None.
    """
    if ".lora_" in name or ".original_module" in name or ".modules_to_save." in name.replace(_TRAINED, "."):
        return None
    return name.replace(_TRAINED, ".").replace(".base_layer", "")


def base_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linears whose weights can change, by base module name: all but the head, which may be the embeddings."""
    import torch

    head = model.get_output_embeddings()
    named = ((base_name(name), module) for name, module in model.named_modules() if module is not head)
    return {name: module for name, module in named if name and isinstance(module, torch.nn.Linear)}


def base_norms(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Parameters named `weight` that are vectors, by module name; those that act, where an adapter trains norms."""
    named = ((base_name(name), parameter) for name, parameter in model.named_parameters() if parameter.dim() == 1)
    return {name.removesuffix(".weight"): p for name, p in named if name and name.endswith(".weight")}
