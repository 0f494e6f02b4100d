"""A rollout as padded tensors, its micro-batches, and what the loss reads of one.

Axis suffixes: B rows (a completion each), L prompt tokens (padded on the left), T completion tokens (padded on the
right).

TRL computes the loss of one micro-batch and divides it in its own ways (GRPOTrainer._compute_loss, TRL 1.16.0, with one
micro-batch per step). The shares are the factors that make the sum over micro-batches the loss of the whole step:

    dapo, cispo, vespo              divided by the step's tokens already: 1
    bnpo                            a mean over the micro-batch's tokens: its share of the step's tokens
    grpo, sapo, dr_grpo, luspo      a mean over the micro-batch's rows: its share of the step's rows

So bnpo is a mean over the tokens of the step, as in dapo, and no longer one over micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from qerl.engine.interface import Completion, of_length
from qerl.model.packing import Layout, PackedRow, pack, row_lengths, split_by_tokens

if TYPE_CHECKING:
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


# -- micro-batches of any size

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

    def packed(self, layout: Layout) -> PackedRow:
        """Its rows laid end to end; packing on the CPU overlaps with the GPU's work."""
        return pack(self.ids, self.mask, self.rows.width, layout, self.loss_mask, self.rows.experts)


def split(
    batch: Batch, budget: int, loss_type: str, advantage_only: bool, ranks: int = 1, states: bool = False
) -> list[MicroBatch]:
    """Cut a step into micro-batches of at most `budget` tokens, a prompt counted once for its rows (see
    `split_by_tokens`, also for `states`).

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
    groups = split_by_tokens(lengths, budget, ranks, states)
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
