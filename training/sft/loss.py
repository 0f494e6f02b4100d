"""The loss of supervised fine-tuning: the mean negative log-likelihood of a step's learned tokens.

That is TRL's `SFTTrainer` with `assistant_only_loss`, whose `num_items_in_batch` are the labels of a whole step: every
token weighs the same, in whatever row it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from training.loss.batch import LossInputs
    from training.loss.micro_batches import Metrics

LOSS_TYPE = "dapo"  # how `micro_batches` shares it: it is divided by the tokens of the step


def sft_loss(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """The loss of one micro-batch, its share of the step's, and what it measured, as means over its tokens."""
    mask_B_T = inputs.rows.loss_mask_B_T
    tokens = mask_B_T.sum().clamp(min=1)
    summed = -(inputs.logprobs_B_T * mask_B_T).sum()
    entropies = (inputs.entropies_B_T.detach() * mask_B_T).sum()
    measured = {"nll": [(summed.detach() / tokens).item()], "entropy": [(entropies / tokens).item()]}
    return summed / inputs.step_tokens.clamp(min=1), measured
