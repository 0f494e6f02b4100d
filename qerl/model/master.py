"""Weights behind packed ones: masters, and the sums of a start and a LoRA.

A linear with a master keeps it as a parameter named `master`. The forward pass multiplies by the packed weight; the
backward pass adds the packed weight's gradient to `master.grad` (straight-through). The optimizer changes the master,
and a sync packs it over the weight (`qerl.engine.update`). Where several ranks share the masters out, the gradient goes
to the rank that has this one (`receive_by_`), and the others keep an empty parameter. After `multiply_by_masters_`
trainer and masters work in 16 bits, and packed weights serve for sampling alone.

A `LowRankSum` is W0 + s B A, computed when it is asked for, in float64, a piece of the rows at a time, and rounded once
to float32. So it depends on neither device nor library: an export on a CPU has the bytes that a card packed.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from qerl.formats.linear import PackedLinear

NAME = "master"
RECEIVER = "gradient_receiver"
SERVED = "served_by_engine"


class Receiver(Protocol):
    """Takes the gradient of a master, once per backward pass."""

    def place(self) -> torch.Tensor:
        """Where to add the gradient (out, in)."""

    def added(self) -> None:
        """The gradient has been added."""


def master_of(module: nn.Module) -> nn.Parameter | None:
    return module._parameters.get(NAME)


def set_master_(linear: nn.Linear, weight: torch.Tensor) -> nn.Parameter:
    """Let `linear` train `weight` (out, in), which becomes its master without a copy. Returns the master."""
    master = nn.Parameter(weight)
    linear.register_parameter(NAME, master)
    # Called as a module it takes the path of the fused layers, too: its own forward pass knows frozen weights only.
    linear.forward = types.MethodType(forward_alone, linear)
    return master


def receive_by_(master: nn.Parameter, receiver: Receiver) -> None:
    """Let `receiver` take the gradient of `master`."""
    setattr(master, RECEIVER, receiver)


def add_gradient_(master: nn.Parameter, grad: torch.Tensor, x: torch.Tensor) -> None:
    """master.grad += grad^T x for grad (T, out) and x (T, in), summed in float32 where the gradient is that wide.

    Where it is not, as for a master in bfloat16, each product is summed in float32 and rounded once.
    """
    with place_of(master) as place:
        _add_product_(place, grad.t(), x)


@contextmanager
def place_of(master: nn.Parameter) -> Iterator[torch.Tensor]:
    """Where to add the gradient (out, in) of `master`, which has been added when this ends."""
    receiver: Receiver | None = getattr(master, RECEIVER, None)
    if receiver is not None:
        yield receiver.place()
        receiver.added()
        return
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    yield master.grad


class MasterLinear(PackedLinear):
    """A linear whose weight is a master, rounded to the dtype of the product. It is not part of a model."""

    def __init__(self, linear: nn.Linear) -> None:
        """`linear` has the master, and a bias, which is shared."""
        packed = isinstance(linear, PackedLinear)
        dtype = linear.compute_dtype if packed else linear.weight.dtype
        super().__init__(linear.in_features, linear.out_features, bias=False, dtype=dtype)
        self.bias, self.master_of = linear.bias, (linear,)  # a tuple, so that it is not a submodule

    def empty_tensors(self, device: torch.device | str | None) -> dict[str, torch.Tensor]:
        return {}

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return master_of(self.master_of[0]).detach().to(dtype)

    @property
    def fp8_recipe(self) -> object:
        """That of the linear, if it has one (`qerl.model.products`)."""
        return getattr(self.master_of[0], "fp8_recipe", (None, ()))

    @property
    def weight_device(self) -> torch.device:
        return master_of(self.master_of[0]).device


def multiply_by_masters_(model: nn.Module) -> None:
    """Let each linear that has a master multiply by it, except while an engine is `serving` the model."""
    from qerl.model.lora import Part

    served = served_of(model)

    def choose_(module: nn.Linear) -> None:
        dense = MasterLinear(module)
        module.lora_part = lambda: Part(module if served else dense, master=master_of(module))
        module.forward = types.MethodType(_forward_part, module)

    for module in [*model.modules()]:
        if master_of(module) is not None:
            choose_(module)


def served_of(model: nn.Module) -> list[bool]:
    """A list that is not empty while an engine is `serving` the model."""
    if not hasattr(model, SERVED):
        setattr(model, SERVED, [])
    return getattr(model, SERVED)


@contextmanager
def serving(model: nn.Module) -> Iterator[None]:
    """Within it, `model` multiplies as an engine does: by its packed weights, and by no recipe of the trainer."""
    served = served_of(model)
    served.append(True)
    try:
        yield
    finally:
        served.pop()


def _add_product_(total: torch.Tensor, left: torch.Tensor, x: torch.Tensor) -> None:
    if total.dtype == x.dtype:
        total.addmm_(left, x)
    elif x.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, left, x, out_dtype=torch.float32, out=total)  # in place: no product of the weight's size
    else:
        wide = torch.promote_types(total.dtype, x.dtype)
        total.add_(left.to(wide) @ x.to(wide))


def forward_alone(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The forward of a linear on the path of the fused layers, with its master if it has one."""
    from qerl.model.lora import Part, lora_linear

    return lora_linear(x, [Part(self, master=master_of(self))])


def _forward_part(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    from qerl.model.lora import lora_linear

    return lora_linear(x, [self.lora_part()])


PIECE = 2**22  # weights that are added up at once: 32 MiB in float64
ROWS = 128  # a piece has a multiple of this many rows: a block of FP8, and 8 slabs of the kernel that packs NVFP4


@dataclass(frozen=True, eq=False)
class LowRankSum:
    """W0 (out, in) in any float dtype on any device, A (r, in) and B (out, r), and the scale s."""

    start: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def shape(self) -> torch.Size:
        return self.start.shape

    def detach(self) -> LowRankSum:
        """The same without a graph, as tensors have it."""
        return LowRankSum(self.start, self.a.detach(), self.b.detach(), self.scaling)

    def pieces(self, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, W0 + s B A of the rows from there on), float32 on `device`, from the first row to the last."""
        a, b = (factor.detach().to(device, torch.float64) for factor in (self.a, self.b))
        step = max(ROWS, PIECE // self.shape[1] // ROWS * ROWS)
        for first in range(0, self.shape[0], step):
            rows = slice(first, first + step)
            start = self.start[rows].to(device, non_blocking=True).double()
            yield first, torch.addmm(start, b[rows], a, alpha=self.scaling).float()

    def dense(self, device: torch.device) -> torch.Tensor:
        """The whole matrix, float32 on `device`."""
        return torch.cat([rows for _, rows in self.pieces(device)])


def pieces_of(matrix: torch.Tensor | LowRankSum, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) of a matrix on `device`; a tensor is one piece."""
    if isinstance(matrix, LowRankSum):
        yield from matrix.pieces(device)
    else:
        yield 0, matrix.to(device)
