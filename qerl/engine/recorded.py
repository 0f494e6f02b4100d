"""The experts that were chosen for the tokens of a completion (`qerl.engine.interface.Completion.experts`).

All tensors are uint8 (tokens, layers with experts, k) on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from qerl.engine.interface import UNRECORDED, Completion
from qerl.model.experts import ExpertBlock

if TYPE_CHECKING:
    from torch import nn


class Recorder:
    """What the blocks of a model chose while rows padded on the left were sampled, a token at a time."""

    def __init__(self, blocks: list[ExpertBlock]) -> None:
        self._blocks = blocks

    def of_row(self, row: int, first: int, past: int) -> torch.Tensor | None:
        """A row's choices from place `first` of the padded row to before `past`; None without experts."""
        if not self._blocks:
            return None
        each = [torch.cat([ids[row] for ids in block.recorded])[first:past] for block in self._blocks]
        return torch.stack(each, 1).cpu()


def blocks_of(model: nn.Module) -> list[ExpertBlock]:
    """The blocks of experts in a model, from the first layer to the last; none in a dense model."""
    return [module for module in model.modules() if isinstance(module, ExpertBlock)]


@contextmanager
def recorded_experts(model: nn.Module, wanted: bool) -> Iterator[Recorder]:
    """Let the model's blocks of experts record what they choose within it, if that is `wanted`."""
    blocks = blocks_of(model) if wanted else []
    for block in blocks:
        block.recorded = []
    try:
        yield Recorder(blocks)
    finally:
        for block in blocks:
            block.recorded = None


def extended(earlier: torch.Tensor | None, later: torch.Tensor | None) -> torch.Tensor | None:
    """The choices of a text from those of its beginning, which were made first, and those of all of it."""
    if earlier is None or later is None:
        return later
    return torch.cat([earlier, later[len(earlier) :]])


def joined(begun: Completion, rest: Completion) -> Completion:
    """A completion of two parts."""
    return Completion(
        begun.token_ids + rest.token_ids,
        begun.logprobs + rest.logprobs,
        rest.finish_reason,
        extended(begun.experts, rest.experts),
    )


def of_length(ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """The choices of so many tokens: what is missing at the end is UNRECORDED."""
    missing = ids.new_full((max(0, tokens - len(ids)), *ids.shape[1:]), UNRECORDED)
    return torch.cat([ids, missing])[:tokens]
