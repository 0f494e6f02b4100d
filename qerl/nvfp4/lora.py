"""The one adapter of a linear as the kernels take it, and its product beside a base product that another kernel made.

hidden = x A^T rounded to bfloat16, out += hidden B^T: one launch (`cuda/lora_add.cu`). Twin: `reference_add`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qerl.nvfp4.nvrtc import Launch, kernel

RANK_STEP = 16  # ranks of a part are padded to a multiple of this
ROW_STEP = 8  # rows of a part have to be a multiple of this
WARPS = 8  # of a block
WARP_ROWS = 32
GROUP_TOKENS = 16  # that the first blocks of `add_` take together


@dataclass(frozen=True)
class Adapter:
    """Of a linear of up to three fused parts, which have equal ranks, a multiple of RANK_STEP.

    `a` (ranks, in) has the parts' A under one another, `b` (out, ranks) their B as blocks of a diagonal; both bfloat16,
    contiguous. `counters` int32 (2,) is zero between launches; two launches with one adapter must not overlap.
    """

    a: torch.Tensor
    b: torch.Tensor
    part_rows: tuple[int, ...]
    counters: torch.Tensor

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, part_rows: tuple[int, ...]) -> Adapter:
        """With counters of its own."""
        return cls(a, b, part_rows, torch.zeros(2, dtype=torch.int32, device=a.device))

    @property
    def fits_kernels(self) -> bool:
        ranks_fit = self.a.shape[0] % (RANK_STEP * len(self.part_rows)) == 0
        return ranks_fit and len(self.part_rows) <= 3 and all(rows % ROW_STEP == 0 for rows in self.part_rows)


@dataclass(frozen=True)
class AdapterLaunch:
    """The arguments by which a kernel learns of an adapter, in its order."""

    groups: int  # clusters that make the hidden values
    tensors: tuple[torch.Tensor | None, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, adapter: Adapter | None, x: torch.Tensor, group_tokens: int) -> AdapterLaunch:
        if adapter is None:
            return cls(0, (None,) * 4, (0, 0, 1, 0, 0))
        tokens, ranks = x.shape[0], adapter.a.shape[0]
        groups = ranks // RANK_STEP * -(-tokens // group_tokens)
        first, second = (*adapter.part_rows, 0)[:2]
        ends = (first, first + second)
        hidden = x.new_empty(tokens, ranks)
        tensors = (adapter.a, adapter.b, hidden, adapter.counters)
        return cls(groups, tensors, (groups, ranks, ranks // len(adapter.part_rows), *ends))


def add_(
    out: torch.Tensor, x: torch.Tensor, adapter: Adapter, cluster: int | None = None, span: int | None = None
) -> torch.Tensor:
    """out (tokens, rows) += (x A^T) B^T in place, x (tokens, in); all bfloat16 and contiguous."""
    tokens, rows = out.shape
    columns = x.shape[1]
    cluster = cluster or (8 if columns >= 8192 else 4)
    span = span or (1 if tokens <= 16 else 2)
    launch_adapter = AdapterLaunch.of(adapter, x, GROUP_TOKENS)
    units = -(-rows // WARP_ROWS) * -(-tokens // (16 * span))
    launch = Launch((launch_adapter.groups + -(-units // (WARPS * cluster)), cluster, 1), 32 * WARPS, cluster=cluster)
    defines = (f"SPAN={span}", "SHRINK_TILES=2", "SHRINK_BATCH=4")
    kernel("lora_add.cu", "lora_add", defines)(
        launch, x, *launch_adapter.tensors, out, tokens, rows, columns, *launch_adapter.numbers
    )
    return out


def reference_add(out: torch.Tensor, x: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """The same in plain torch and float64, not in place."""
    hidden = (x.double() @ adapter.a.double().t()).to(torch.bfloat16)
    return out.double() + hidden.double() @ adapter.b.double().t()
