"""A step's loss from micro-batches of any size: which rows go where, what each one's share is, the step's metrics.

TRL computes the loss of one micro-batch and divides it in its own ways (GRPOTrainer._compute_loss, TRL 1.16.0, with one
micro-batch a step). `shares` are the factors that make the sum over micro-batches the loss of the whole step:

    dapo, cispo, vespo              divided by the step's tokens already: 1
    bnpo                            a mean over the micro-batch's tokens: its share of the step's tokens
    grpo, sapo, dr_grpo, luspo      a mean over the micro-batch's rows: its share of the step's rows

So bnpo is a mean over the tokens of the step, as in dapo, and no longer one over micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training.policy.packing import row_lengths, split_by_tokens

BY_STEP_TOKENS = ("dapo", "cispo", "vespo")
BY_TOKENS = ("bnpo",)
SUMMED_METRICS = ("policy_loss",)  # parts of a sum; all others are means


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a step; `inputs` are TRL's, a row a completion."""

    inputs: dict[str, Any]
    rows: int
    tokens: int  # completion tokens with a loss
    loss_share: float  # factor of the policy loss
    token_share: float  # its tokens by the step's; the entropy bonus is a mean over tokens with every loss
    ids: torch.Tensor  # (rows, P + C) on the CPU, where rows are packed
    mask: torch.Tensor

    @property
    def width(self) -> int:
        """C, the columns of the completions."""
        return self.inputs["completion_ids"].shape[1]


def split(inputs: Mapping[str, Any], budget: int, loss_type: str, advantage_only: bool) -> list[MicroBatch]:
    """Cut a step into micro-batches of at most `budget` tokens, a prompt counted once for its rows.

    Rows without a loss are left out, since their gradient is exactly 0: those masked entirely and, where the loss has
    no term but the advantage's (`advantage_only`), those with advantage 0. If that leaves none, one micro-batch with
    advantage 0 stays, so that the step has its entropy and mismatch.
    """
    mask = inputs["completion_mask"]
    ids, masks = (
        torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1).cpu() for name in ("ids", "mask")
    )
    rows, step_tokens = len(mask), max(1, int(mask.sum()))
    groups = _groups(inputs, mask.sum(1), budget)
    if advantage_only:
        has_loss = (inputs["advantages"].view(rows, -1) != 0).any(1)
        groups = _groups(inputs, mask.sum(1) * has_loss, budget) or groups[:1]
    batches = []
    for group in groups:
        part = _rows(inputs, group, rows)
        tokens = int(part["completion_mask"].sum())
        token_share = tokens / step_tokens
        by_rows = 1.0 if loss_type in BY_STEP_TOKENS else len(group) / rows
        loss_share = token_share if loss_type in BY_TOKENS else by_rows
        batches.append(MicroBatch(part, len(group), tokens, loss_share, token_share, ids[group], masks[group]))
    return batches


def row_metrics(loss_type: str, level: str) -> tuple[str, ...]:
    """Prefixes of the metrics that TRL averages over rows instead of tokens."""
    by_sequence = ("clip_ratio/", "cispo_clip_ratio") if level == "sequence" else ()
    return by_sequence + (("vespo/phi_seq_mean",) if loss_type == "vespo" else ())


def merge_metrics(
    parts: Iterable[tuple[MicroBatch, Mapping[str, Sequence[float]]]], by_row: tuple[str, ...]
) -> dict[str, float]:
    """The step's metrics from those of its micro-batches: means over the tokens, or rows, that were trained on."""
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    for batch, metrics in parts:
        for name, values in metrics.items():
            if name in SUMMED_METRICS:
                sums[name] += sum(values) * batch.loss_share
                weights[name] = 1.0
            else:
                weight = batch.rows if name.startswith(by_row) else batch.tokens
                sums[name] += sum(values) * weight
                weights[name] += len(values) * weight
    return {name: sums[name] / weights[name] for name in sums}


def _groups(inputs: Mapping[str, Any], completion_tokens: torch.Tensor, budget: int) -> list[list[int]]:
    lengths = row_lengths(inputs["prompt_ids"], inputs["prompt_mask"], completion_tokens.tolist())
    return split_by_tokens(lengths, budget)


def _rows(inputs: Mapping[str, Any], rows: Sequence[int], count: int) -> dict[str, Any]:
    """The given rows of every tensor that has a row for each of `count` completions; the rest as it is."""
    index = torch.tensor(rows)
    return {
        name: value.index_select(0, index.to(value.device))
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == count
        else value
        for name, value in inputs.items()
    }
