"""The modules of a model with an adapter by their names in the base, and an adapter that is in the packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter import ADAPTER_NAME
from qerl.checkpoint.base_start import LORA_A, LORA_B, BaseStart, read_start

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

_TRAINED = f".modules_to_save.{ADAPTER_NAME}."  # in the name of a parameter of a trained norm


def pack_in_(model: nn.Module) -> None:
    """Let the attached adapter act through packed weights alone: whoever packs them adds s B A (`qerl.model.lora`)."""
    for module in model.modules():
        if hasattr(module, "lora_part"):
            module.packed_in = True


def set_start_(model: PreTrainedModel, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let A0 (r0, in) and B0 (out, r0), by base linear, act beside the packed weights of a model without an adapter.

    They are kept in the dtype that each linear computes in, without a copy where they have it. Linears left in 16 bits
    have factors of zero, which are left out. Raises CheckpointError for others that are not there or not packed.
    """
    from qerl.formats.linear import PackedLinear

    linears = base_linears(model)
    for name, (a, b) in factors.items():
        linear = linears.get(name)
        if linear is not None and not b.any():
            continue
        if not isinstance(linear, PackedLinear):
            raise CheckpointError(
                f"the base has no packed {name}, for which its start has factors: quantize it again, or write "
                "adapter.start: none"
            )
        linear.start = tuple(factor.to(linear.weight_device, linear.compute_dtype) for factor in (a, b))


def load_start_(model: PreTrainedModel, start: BaseStart) -> None:
    """`set_start_` with the factors of a start's folder."""
    tensors = read_start(start)
    names = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    set_start_(model, {name: (tensors[name + LORA_A], tensors[name + LORA_B]) for name in names})


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
