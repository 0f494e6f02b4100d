"""Rows of prompt and completion without their padding: cut into micro-batches by tokens, laid end to end in one row.

A packed row holds whole sequences one after another; positions start again with each, and `packed_attention` keeps
them apart. The model never sees a pad token, and only the positions that predict a completion token reach the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedRow:
    """N sequences of T tokens in all, with M completion tokens to score; out of a (B, C) block of completions."""

    input_ids: torch.Tensor  # (1, T)
    position_ids: torch.Tensor  # (1, T)
    starts: torch.Tensor  # (N + 1,) int32: where each sequence begins, and T
    longest: int  # tokens of the longest sequence
    predicting: torch.Tensor  # (M,) positions in T whose output predicts a completion token
    targets: torch.Tensor  # (M,) that token
    places: torch.Tensor  # (M,) where it stands in the (B, C) block, row after row

    def scatter(self, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """(M,) values at their places in a (B, C) block of zeros; the gradient flows back to them."""
        block = values.new_zeros(shape[0] * shape[1])
        return block.index_copy(0, self.places, values).view(shape)


def pack(input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_width: int) -> PackedRow:
    """Pack (B, P + C) rows, prompts padded left and completions right; C is `completion_width`.

    Rows whose completion is masked entirely are left out. Every row needs at least one prompt token.
    """
    kept = attention_mask[:, -completion_width:].bool()
    inside = attention_mask.bool() & kept.any(1, keepdim=True)
    completion = torch.zeros_like(inside)
    completion[:, -completion_width:] = kept
    lengths = inside.sum(1)
    lengths = lengths[lengths > 0]
    ids = input_ids[inside]
    scored = completion[inside].nonzero()[:, 0]
    return PackedRow(
        input_ids=ids[None],
        position_ids=(inside.cumsum(1) - 1)[inside][None],
        starts=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        longest=int(lengths.max()) if len(lengths) else 0,
        predicting=scored - 1,
        targets=ids[scored],
        places=kept.flatten().nonzero()[:, 0],
    )


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Groups of row indices whose tokens add up to at most `budget`; a longer row is a group of its own.

    First-fit decreasing, ties by index, so that the groups follow from the lengths alone. Rows keep their order within
    a group; a row of length 0 is in none.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for row in sorted((row for row in range(len(lengths)) if lengths[row] > 0), key=lambda row: (-lengths[row], row)):
        place = next((index for index, free in enumerate(room) if free >= lengths[row]), len(groups))
        if place == len(groups):
            groups.append([])
            room.append(budget)
        groups[place].append(row)
        room[place] -= lengths[row]
    return [sorted(group) for group in groups]
