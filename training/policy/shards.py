"""Whole weights shared out among ranks: each decoder layer's masters, gradients and moments are on one rank alone.

    backward   when all gradients of a layer are there, they are summed on the rank that has its masters, and dropped
    optimizer  each rank updates its own masters
    sync       each rank packs its own, and sends the packed bits, 0.56 bytes per weight, to all engines
    checkpoint rank 0 asks the others for what it lacks, so the files are the same as with one rank

Whole layers are dealt, because the names in a checkpoint, and the blocks of an 8-bit optimizer, then do not depend on
the number of ranks. docs/lab/several-gpus.md says why not PyTorch's own parts. The optimizers of all ranks have the
same groups of parameters, empty ones for the layers of others, so a state has the same number everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from qerl.formats.linear import PackedLinear
from qerl.model.master import receive_by_
from qerl.plan.trained import shared_out

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel


Answer = Callable[[Any], dict[str, Any] | None]  # what a rank has under a key, None if another one has it


class Shards:
    """Which rank has which of the trained linears, by module name, and what the ranks exchange of them."""

    def __init__(self, linears: Mapping[str, nn.Linear], parallel: Parallel) -> None:
        self.parallel, self._linears = parallel, dict(linears)
        of_ranks = enumerate(shared_out(list(linears), parallel.size))
        self._layers = [_Layer(self, names, rank) for rank, layers in of_ranks for names in layers]
        self._owner = {name: layer.rank for layer in self._layers for name in layer.names}

    def mine(self, name: str) -> bool:
        """Whether this rank has the master of that linear."""
        return self._owner[name] == self.parallel.rank

    def shape(self, name: str) -> tuple[int, int]:
        """(out, in) of a linear."""
        return self._linears[name].out_features, self._linears[name].in_features

    def receive_gradients_(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of all masters where these are. Elsewhere the parameter is empty."""
        for layer in self._layers:
            layer.receive_gradients_(masters)

    def add_nothing_(self) -> None:
        """Take part in the sums of a micro-batch that only other ranks have."""
        for layer in reversed(self._layers):
            layer.sum_()

    def send_packed_(self) -> None:
        """Bring what each rank has packed to all ranks, over the weights that engine and trainer multiply by."""
        for layer in self._layers:
            self.parallel.send_(self.packed(layer.names), layer.rank)
        for linear in self._linears.values():
            if isinstance(linear, PackedLinear):
                linear.drop_cached()

    def packed(self, names: Iterable[str] | None = None) -> list[torch.Tensor]:
        """The tensors that hold the weights to multiply by, of the linears of these names, by default of all."""
        linears = [self._linears[name] for name in names or self._linears]
        return list({tensor.data_ptr(): tensor for linear in linears for tensor in bits(linear)}.values())

    def clip_(self, optimizer: torch.optim.Optimizer, largest: float) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the parameters of all ranks; returns the norm before it, a scalar."""
        trained = {n: each for n, each in enumerate(_parameters(optimizer)) if each.grad is not None}
        device = next(iter(_parameters(optimizer))).device
        norms = [torch.linalg.vector_norm(each.grad) for each in trained.values()]
        own = torch.stack(norms).cpu() if norms else ()
        found: dict[int, torch.Tensor] = {}
        for of_rank in self.parallel.gather(dict(zip(trained, own, strict=True))):
            found |= of_rank
        total = torch.linalg.vector_norm(torch.stack([found[number] for number in sorted(found)])).to(device)
        torch.nn.utils.clip_grads_with_norm_([*trained.values()], largest, total)
        return total

    # -- checkpoints

    def whole_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """On rank 0: the state of all ranks, as one that has every parameter would save it. Others `serve`."""
        own = optimizer.state_dict()
        numbers = range(len(_parameters(optimizer)))
        states = {number: own["state"].get(number) or self.ask(number, lambda _: None) for number in numbers}
        return {**own, "state": {number: state for number, state in states.items() if state}}

    @staticmethod
    def own_state(optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
        """The part of a saved state that this rank's parameters need, copied."""
        own = {number for number, parameter in enumerate(_parameters(optimizer)) if parameter.numel()}
        states = {number: state for number, state in whole["state"].items() if number in own}
        return {**whole, "state": tree_map_only(torch.Tensor, torch.clone, states)}

    def ask(self, key: Any, answer: Answer) -> dict[str, Any] | None:
        """On rank 0: what is under `key` on the rank that has it, on the CPU; None if no rank has. Others `serve`."""
        self.parallel.broadcast((key,))
        return self._exchanged(answer(key))

    def serve(self, answer: Answer) -> None:
        """On the other ranks: answer until rank 0 has what it needs."""
        while asked := self.parallel.broadcast(None):
            self._exchanged(answer(asked[0]))

    def end(self) -> None:
        """On rank 0: no more questions."""
        self.parallel.broadcast(None)

    def _exchanged(self, found: dict[str, Any] | None) -> dict[str, Any] | None:
        """What a rank has found, on all ranks: its structure in a message, its tensors by the faster way."""
        specs = self.parallel.gather(tree_map_only(torch.Tensor, _Spec.of, found))
        owner = next((rank for rank, spec in enumerate(specs) if spec is not None), None)
        if owner is None:
            return None
        if owner != self.parallel.rank:
            found = tree_map_only(_Spec, _Spec.empty, specs[owner])
        found = tree_map_only(torch.Tensor, torch.Tensor.contiguous, found)
        self.parallel.send_([leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)], owner)
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, found)


def bits(linear: nn.Linear) -> list[torch.Tensor]:
    """The tensors in which the weight lies that a linear multiplies by."""
    return linear.bits() if isinstance(linear, PackedLinear) else [linear.weight.data]


@dataclass
class _Layer:
    """The gradients of a layer's linears, side by side in one tensor while a backward pass is in the layer."""

    shards: Shards
    names: Sequence[str]
    rank: int  # that has the masters
    masters: dict[str, nn.Parameter] = field(default_factory=dict)
    sums: torch.Tensor | None = None
    missing: int = 0

    @property
    def numbers(self) -> int:
        return sum(rows * columns for rows, columns in map(self.shards.shape, self.names))

    def receive_gradients_(self, masters: Mapping[str, nn.Parameter]) -> None:
        self.masters = {name: masters[name] for name in self.names}
        for index, master in enumerate(self.masters.values()):
            receive_by_(master, _Piece(self, index))

    def pieces(self) -> list[torch.Tensor]:
        """Of each linear (out, in), zeros at first."""
        if self.sums is None:
            master = next(iter(self.masters.values()))
            self.sums = torch.zeros(self.numbers, dtype=master.dtype, device=master.device)
            self.missing = len(self.names)
        shapes = [self.shards.shape(name) for name in self.names]
        flat = self.sums.split([rows * columns for rows, columns in shapes])
        return [piece.view(shape) for piece, shape in zip(flat, shapes, strict=True)]

    def sum_(self) -> None:
        """Add the gradients of all ranks to the masters' gradients, on the rank that has them."""
        pieces, parallel = self.pieces(), self.shards.parallel
        parallel.sum_to_(self.sums, self.rank)
        if parallel.rank == self.rank:
            for master, piece in zip(self.masters.values(), pieces, strict=True):
                master.grad.add_(piece)
        self.sums = None


@dataclass(frozen=True)
class _Piece:
    """See `qerl.model.master.Receiver`."""

    layer: _Layer
    index: int

    def place(self) -> torch.Tensor:
        return self.layer.pieces()[self.index]

    def added(self) -> None:
        self.layer.missing -= 1
        if not self.layer.missing:
            self.layer.sum_()


@dataclass(frozen=True)
class _Spec:
    """A tensor that is to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_card: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Spec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.is_cuda)

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cuda" if self.on_card else "cpu")


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
