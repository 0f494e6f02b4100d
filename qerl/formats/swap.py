"""Packed linears in place of a model's dense ones, still empty: their tensors are loaded next."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from qerl.base.errors import CheckpointError
from qerl.formats.base import Format
from qerl.formats.linear import PackedLinear


def swap_linears(model: nn.Module, quantized: Iterable[str], format: Format) -> int:
    """Replace the named `torch.nn.Linear` modules by empty linears of `format` (load tensors next); returns how many.

    Device, compute dtype, bias and training flag stay. Raises CheckpointError for a name that is missing or not a
    dense linear, for a shape that has no packing, and if no name was given.
    """
    names = list(dict.fromkeys(quantized))
    if not names:
        raise CheckpointError(
            f"no quantized linear to swap in: is this an {format.label} checkpoint? `qerl quantize` makes one"
        )
    modules = dict(model.named_modules())
    for name in names:
        if type(modules.get(name)) is not nn.Linear:
            raise CheckpointError(
                f"{name}: quantized in the checkpoint, but the model has {type(modules.get(name)).__name__} there "
                "where a torch.nn.Linear must be; the checkpoint is of another architecture"
            )
    for name in names:
        format.check_features(modules[name].out_features, modules[name].in_features, name)
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, _empty_like(modules[name], format.linear()))
    return len(names)


def _empty_like(linear: nn.Linear, kind: type[PackedLinear]) -> PackedLinear:
    device, dtype = linear.weight.device, linear.weight.dtype
    packed = kind(linear.in_features, linear.out_features, bias=False, device=device, dtype=dtype)
    if linear.bias is not None:
        packed.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    return packed.train(linear.training)
