"""The one adapter on the experts of a layer in the engine: its buffers, what a sync writes, and its products in torch.

As for linears (`linear.py`), captured CUDA graphs read the buffers and a sync overwrites them in place. They have the
shapes of `qerl.model.expert_lora` in bfloat16, with the rank padded by zeros, and B holds the scale. Rows are pairs:
row p is that of token p // k and of its choice p % k. `expert_kernels.py` has the kernels, of which the functions here
are the twins. No vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from qerl.base.errors import EngineError
from qerl.checkpoint.expert_adapter import LEAVES, is_of_experts
from qerl.engine.update import check_names
from qerl.formats.nvfp4.ranks import padded_power

FACTOR = ".lora_"


@dataclass(frozen=True)
class ExpertBuffers:
    """The adapter of a layer's experts. `gate_up_a` (R, hidden) and `down_b` (hidden, R) are shared by all experts, or
    have them as their first dimension."""

    gate_up_a: torch.Tensor
    gate_up_b: torch.Tensor  # (experts, 2 width, R)
    down_a: torch.Tensor  # (experts, R, width)
    down_b: torch.Tensor

    @classmethod
    def zeros(cls, sizes: tuple[int, int, int], rank: int, shared: bool, device: torch.device) -> ExpertBuffers:
        """Buffers for adapters of at most `rank`; `sizes` are (experts, width, hidden)."""
        experts, width, hidden = sizes
        rank, outer = padded_power(rank), () if shared else (experts,)
        shapes = ((*outer, rank, hidden), (experts, 2 * width, rank), (experts, rank, width), (*outer, hidden, rank))
        return cls(*(torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes))

    @property
    def shared(self) -> bool:
        return self.gate_up_a.dim() == 2

    @property
    def rank(self) -> int:
        """The padded rank R."""
        return self.gate_up_a.shape[-2]

    def named(self) -> dict[str, torch.Tensor]:
        """The buffers by what their names in an adapter end in."""
        names = (f"{leaf}.lora_{factor}.weight" for leaf in LEAVES for factor in "AB")
        return dict(zip(names, (self.gate_up_a, self.gate_up_b, self.down_a, self.down_b), strict=True))


def expert_slots(buffers: Mapping[str, ExpertBuffers]) -> dict[str, torch.Tensor]:
    """The buffers by the names of an adapter's tensors, given those of each layer by the name of its experts."""
    return {f"{name}.{leaf}": tensor for name, own in buffers.items() for leaf, tensor in own.named().items()}


def of_experts(tensors: Mapping[str, torch.Tensor], slots: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An adapter's tensors on experts. Raises EngineError unless all of them have a place, and every layer its own."""
    found = {name: tensor for name, tensor in tensors.items() if is_of_experts(name)}
    if found and not slots:
        raise EngineError(
            "the adapter acts on experts, and the engine was opened without an adapter on them: open it for the "
            "adapter's kind and rank on experts"
        )
    check_names("experts", found, slots, "adapter")
    for name, tensor in found.items():
        _check_shape(name, tensor, slots[name])
    return found


def copy_to_experts_(tensors: Mapping[str, torch.Tensor], slots: Mapping[str, torch.Tensor], scaling: float) -> None:
    """Overwrite the buffers with A and with B times `scaling`, and what gets no factors with zeros."""
    with torch.no_grad():
        for name, buffer in slots.items():
            along_rows = name.endswith(f"{FACTOR}A.weight")
            given, dim = tensors.get(name), buffer.dim() - (2 if along_rows else 1)
            rank = 0 if given is None else given.shape[dim]
            if given is not None:
                buffer.narrow(dim, 0, rank).copy_(given if along_rows else given * scaling)
            buffer.narrow(dim, rank, buffer.shape[dim] - rank).zero_()


def _check_shape(name: str, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    if tensor.dim() != buffer.dim():
        kinds = {2: "shared by all experts", 3: "of each expert"}
        raise EngineError(
            f"the adapter's {name} is {kinds.get(tensor.dim(), 'of no kind')}, and the engine was opened for one "
            f"{kinds[buffer.dim()]}: open it for the adapter's kind on experts"
        )
    dim = buffer.dim() - (2 if name.endswith(f"{FACTOR}A.weight") else 1)
    rank, most = tensor.shape[dim], buffer.shape[dim]
    if tensor.movedim(dim, 0).shape[1:] != buffer.movedim(dim, 0).shape[1:]:
        raise EngineError(
            f"the adapter's {name} is {tuple(tensor.shape)}, and its place is {tuple(buffer.shape)}: it was trained on "
            "another base"
        )
    if rank > most:
        raise EngineError(f"the adapter has rank {rank} on experts, the engine takes {most}: open it for {rank}")


def shrink(x: torch.Tensor, a: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A x of each pair's expert, (pairs, R), for x (tokens or pairs, n), a (experts, R, n) and ids (tokens, k)."""
    rows = x if len(x) == ids.numel() else x.repeat_interleave(ids.shape[1], 0)
    return torch.bmm(a[ids.flatten()].float(), rows.float()[:, :, None])[:, :, 0].to(x.dtype)


def activate(inner: torch.Tensor, h: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (pairs, width) for inner (pairs, 2 width) + B h, with h (tokens or pairs, R) and b (experts, 2
    width, R). The sum is rounded before the activation, as in the trainer."""
    rows = h if len(h) == ids.numel() else h.repeat_interleave(ids.shape[1], 0)
    added = torch.bmm(b[ids.flatten()].float(), rows.float()[:, :, None])[:, :, 0]
    gate, up = (inner.float() + added).to(inner.dtype).float().chunk(2, -1)
    return (F.silu(gate) * up).to(inner.dtype)


def expand_(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
    """y (pairs, hidden) += w B h in place, with h (pairs, R), b (experts, hidden, R) and weights w (tokens, k)."""
    added = torch.bmm(b[ids.flatten()].float(), h.float()[:, :, None])[:, :, 0]
    return y.copy_(y.float() + weights.flatten()[:, None] * added)


def combine(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(tokens, hidden): the sum of each token's rows of y (pairs, hidden), and B times its weighted sum of h (pairs, R)
    for b (hidden, R)."""
    tokens, k = weights.shape
    hidden = (h.float().view(tokens, k, -1) * weights[:, :, None]).sum(1).to(h.dtype)
    return (y.float().view(tokens, k, -1).sum(1) + hidden.float() @ b.float().t()).to(y.dtype)
