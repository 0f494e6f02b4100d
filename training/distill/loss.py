"""The loss of a distillation: the mean divergence from the teacher over a step's completion tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from training.loss.batch import LossInputs
    from training.loss.micro_batches import Metrics

LOSS_TYPE = "dapo"  # how `micro_batches` shares it: every token of the step weighs the same, and is divided by all


def distillation_loss(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """The loss of one micro-batch, its share of the step's, and what it measured, as means over its tokens."""
    found, mask_B_T = inputs.divergences, inputs.rows.loss_mask_B_T
    tokens = mask_B_T.sum().clamp(min=1)

    def mean(values_B_T: torch.Tensor) -> list[float]:
        return [((values_B_T.detach() * mask_B_T).sum() / tokens).item()]

    loss = (found.loss * mask_B_T).sum() / inputs.step_tokens.clamp(min=1)
    return loss, {
        "kl_to_teacher/forward": mean(found.forward_kl),
        "kl_to_teacher/reverse": mean(found.reverse_kl),
        "entropy": mean(inputs.entropies_B_T),
    }
