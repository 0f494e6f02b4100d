"""Masters: the weights behind packed ones, which are trained by the gradient of the packed weight (straight-through).

A linear with a master keeps it as a parameter named `master`. Its forward pass multiplies by the packed weight as
before; its backward pass adds the weight's gradient to `master.grad`. The optimizer changes the master, and a sync
packs it over the weight (`qerl.engine.update`). Where several ranks share the masters out, the gradient goes to the
rank that has this one (`receive_by_`), and the others keep an empty parameter in its place.
"""

from __future__ import annotations

import types
from typing import Protocol

import torch
from torch import nn

NAME = "master"
RECEIVER = "gradient_receiver"


class Receiver(Protocol):
    """Takes the gradient of a master, once per backward pass."""

    def place(self) -> torch.Tensor:
        """Where to add the gradient (out, in)."""

    def added(self) -> None:
        """The gradient has been added."""


def master_of(module: nn.Module) -> nn.Parameter | None:
    """The module's master; None if it has none."""
    return module._parameters.get(NAME)


def set_master_(linear: nn.Linear, weight: torch.Tensor) -> nn.Parameter:
    """Let `linear` train `weight` (out, in), which becomes its master without a copy. Returns the master."""
    master = nn.Parameter(weight)
    linear.register_parameter(NAME, master)
    # Called as a module it takes the path of the fused layers, too: its own forward pass knows frozen weights only.
    linear.forward = types.MethodType(_forward, linear)
    return master


def receive_by_(master: nn.Parameter, receiver: Receiver) -> None:
    """Let `receiver` take the gradient of `master`."""
    setattr(master, RECEIVER, receiver)


def add_gradient_(master: nn.Parameter, grad: torch.Tensor, x: torch.Tensor) -> None:
    """master.grad += grad^T x for grad (T, out) and x (T, in), summed in float32 where the gradient is that wide.

    Where it is not, as for a master in bfloat16, each product is summed in float32 and rounded once.
    """
    receiver: Receiver | None = getattr(master, RECEIVER, None)
    if receiver is not None:
        _add_product_(receiver.place(), grad.t(), x)
        receiver.added()
        return
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    _add_product_(master.grad, grad.t(), x)


def _add_product_(total: torch.Tensor, left: torch.Tensor, x: torch.Tensor) -> None:
    if total.dtype == x.dtype:
        total.addmm_(left, x)
    elif x.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, left, x, out_dtype=torch.float32, out=total)  # in place: no product of the weight's size
    else:
        wide = torch.promote_types(total.dtype, x.dtype)
        total.add_(left.to(wide) @ x.to(wide))


def _forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    from qerl.layers.lora import Part, lora_linear

    return lora_linear(x, [Part(self, master=master_of(self))])
