"""A step's loss from micro-batches of any size: which rows go where, what each one's share is, the step's metrics.

TRL computes the loss of one micro-batch and divides it in its own ways (GRPOTrainer._compute_loss, TRL 1.16.0, with one
micro-batch per step). The shares are the factors that make the sum over micro-batches the loss of the whole step:

    dapo, cispo, vespo              divided by the step's tokens already: 1
    bnpo                            a mean over the micro-batch's tokens: its share of the step's tokens
    grpo, sapo, dr_grpo, luspo      a mean over the micro-batch's rows: its share of the step's rows

So bnpo is a mean over the tokens of the step, as in dapo, and no longer one over micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qerl.model.packing import pack, row_lengths, split_by_tokens

if TYPE_CHECKING:
    from qerl.model.packing import PackedRow
    from training.loss.batch import Batch

BY_STEP_TOKENS = ("dapo", "cispo", "vespo")
BY_TOKENS = ("bnpo",)
SUMMED_METRICS = ("policy_loss",)  # parts of a sum; all others are means

Metrics = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a step."""

    rows: Batch
    tokens: int  # completion tokens with a loss
    loss_share: float  # factor of the policy loss
    token_share: float  # its tokens by the step's; the entropy bonus is a mean over tokens with every loss
    ids: torch.Tensor  # (rows, L + T) on the CPU, where rows are packed
    mask: torch.Tensor
    loss_mask: torch.Tensor  # (rows, T)
    trains: bool = True  # False: no row of the step has a signal, and this one is there to be measured

    @property
    def cost(self) -> int:
        """About the tokens that it computes."""
        return int(self.mask.sum())

    def packed(self, device: torch.device) -> PackedRow:
        """Its rows laid end to end, on `device`; packing on the CPU overlaps with the GPU's work."""
        return pack(self.ids, self.mask, self.rows.width, device, self.loss_mask, self.rows.experts)


def split(batch: Batch, budget: int, loss_type: str, advantage_only: bool, ranks: int = 1) -> list[MicroBatch]:
    """Cut a step into micro-batches of at most `budget` tokens, a prompt counted once for its rows.

    Rows without a loss are left out, since their gradient is exactly 0: those masked entirely and, where the loss has
    no term but the advantage's (`advantage_only`), those with advantage 0. If that leaves none, the first row that has
    a completion stays alone, so that the step has an entropy and a mismatch, which are the same for any `budget` and
    `ranks`. If there are rows enough, `ranks` divides the number of micro-batches.
    """
    ids, mask = (tensor.cpu() for tensor in batch.tokens())
    loss_mask = batch.loss_mask_B_T.cpu()
    step_tokens = max(1, int(loss_mask.sum()))
    completion_tokens = batch.completion_mask_B_T.sum(1) * batch.loss_mask_B_T.any(1)
    with_gradient = completion_tokens * (batch.advantages_B != 0) if advantage_only else completion_tokens
    lengths = row_lengths(batch.prompt_ids_B_L, batch.prompt_mask_B_L, with_gradient.tolist())  # of 0: left out
    groups = split_by_tokens(lengths, budget, ranks)
    if not (trains := bool(groups)):
        first = completion_tokens.nonzero()[:1].flatten().tolist()
        groups = [first] if first else []
    micro_batches = []
    for group in groups:
        index = torch.tensor(group)
        tokens = int(loss_mask[index].sum())
        token_share = tokens / step_tokens
        loss_share = _loss_share(loss_type, len(group) / len(batch), token_share)
        packed = ids[index], mask[index], loss_mask[index]
        micro_batches.append(MicroBatch(batch.rows(index), tokens, loss_share, token_share, *packed, trains))
    return micro_batches


def _loss_share(loss_type: str, row_share: float, token_share: float) -> float:
    """The factor of a micro-batch's loss, by its shares of the step's rows and tokens (see the module docstring)."""
    if loss_type in BY_STEP_TOKENS:
        return 1.0
    return token_share if loss_type in BY_TOKENS else row_share


def row_metrics(loss_type: str, level: str) -> tuple[str, ...]:
    """Prefixes of the metrics that TRL averages over rows instead of tokens."""
    by_sequence = ("clip_ratio/", "cispo_clip_ratio") if level == "sequence" else ()
    return by_sequence + (("vespo/phi_seq_mean",) if loss_type == "vespo" else ())


def merge_metrics(parts: Iterable[tuple[MicroBatch, Metrics]], by_row: tuple[str, ...]) -> dict[str, float]:
    """The step's metrics from its micro-batches': means over the tokens, or rows, that were trained on."""
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    for batch, metrics in parts:
        for name, values in metrics.items():
            if name in SUMMED_METRICS:
                sums[name] += sum(values) * batch.loss_share
                weights[name] = 1.0
            else:
                weight = len(batch.rows) if name.startswith(by_row) else batch.tokens
                sums[name] += sum(values) * weight
                weights[name] += len(values) * weight
    return {name: sums[name] / weights[name] for name in sums}
