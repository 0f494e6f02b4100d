"""A rollout as padded tensors, and what the loss reads of some of its rows.

Axis suffixes: B rows (a completion each), L prompt tokens (padded on the left), T completion tokens (padded on the
right).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from qerl.engine.interface import of_length

if TYPE_CHECKING:
    from qerl.engine.interface import Completion
    from training.loss.divergence import Divergences


@dataclass(frozen=True)
class Batch:
    """Rows of one step. A mask is 1 where there is a token; a truncated completion may be masked entirely."""

    prompt_ids_B_L: torch.Tensor
    prompt_mask_B_L: torch.Tensor
    completion_ids_B_T: torch.Tensor
    completion_mask_B_T: torch.Tensor
    loss_mask_B_T: torch.Tensor  # 1 on the tokens that train
    advantages_B: torch.Tensor
    sampling_logprobs_B_T: torch.Tensor | None  # None: nobody sampled them
    old_logprobs_B_T: torch.Tensor | None = None  # None: equal to the current ones, one update per rollout
    reference_logprobs_B_T: torch.Tensor | None = None  # of the policy that the KL term holds on to
    experts: tuple[torch.Tensor, ...] | None = None  # for each row, uint8 (its tokens, layers, k) on the CPU
    compares_replay: bool = False  # whether this step also measures the mismatch with experts of the trainer's choice

    def __len__(self) -> int:
        return len(self.advantages_B)

    @property
    def width(self) -> int:
        """T, the columns of the completions."""
        return self.completion_ids_B_T.shape[1]

    def rows(self, index: torch.Tensor) -> Batch:
        """The rows of `index` (int64, on any device), in its order."""
        rows = self._each(lambda tensor: tensor.index_select(0, index.to(tensor.device)))
        if self.experts is None:
            return rows
        return replace(rows, experts=tuple(self.experts[row] for row in index.tolist()))

    def to(self, device: torch.device) -> Batch:
        """The same rows on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, mask) of prompt and completion side by side, (B, L + T)."""
        ids = torch.cat([self.prompt_ids_B_L, self.completion_ids_B_T], 1)
        return ids, torch.cat([self.prompt_mask_B_L, self.completion_mask_B_T], 1)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: change(value) for name, value in tensors.items()})


@dataclass(frozen=True)
class LossInputs:
    """What the loss of a micro-batch is computed from; all but `rows` is float32."""

    rows: Batch
    logprobs_B_T: torch.Tensor  # with a gradient to the policy
    entropies_B_T: torch.Tensor
    weights: torch.Tensor | None  # importance weights, (B, T) or (B, 1) per sequence; None: correction off
    step_tokens: torch.Tensor  # (), completion tokens with a loss in the whole step
    entropy_coef: float
    divergences: Divergences | None = None  # each (B, T): from the teacher, of a run that distills


def experts_of_rows(samples: Sequence[Completion], lengths: Sequence[int]) -> tuple[torch.Tensor, ...] | None:
    """The experts that were chosen for each completion's tokens, for so many tokens; None if nobody recorded any."""
    known = next((sample.experts for sample in samples if sample.experts is not None), None)
    if known is None:
        return None
    pairs = zip(samples, lengths, strict=True)
    return tuple(of_length(known[:0] if one.experts is None else one.experts, length) for one, length in pairs)


def padded_left(rows: list[torch.Tensor], value: float) -> torch.Tensor:
    """Rows of varied length as one tensor, with `value` before the shorter ones."""
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side="left")


def padded_right(rows: list[torch.Tensor], value: float) -> torch.Tensor:
    """Rows of varied length as one tensor, with `value` after the shorter ones."""
    return pad_sequence(rows, batch_first=True, padding_value=value)
