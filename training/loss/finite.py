"""Stop a run whose loss or gradient is not finite, before anything of that step is written to disk."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from qerl.errors import EngineError


def check_loss(loss: torch.Tensor, step: int, run_dir: Path) -> None:
    """Raise EngineError if the loss (a scalar) is NaN or infinite. Called before the update."""
    if not torch.isfinite(loss):
        raise EngineError(
            f"the loss of step {step} is {loss.item()}: lower optim.learning_rate or optim.max_grad_norm, and resume "
            f"from the last checkpoint in {run_dir}"
        )


def check_gradient(norm: float | None, step: int, run_dir: Path) -> None:
    """Raise EngineError if the gradient's norm is NaN or infinite. Called after the update, which is lost."""
    if norm is not None and not math.isfinite(norm):
        raise EngineError(
            f"the gradient of step {step} is {norm}, and its update broke the adapter: lower optim.learning_rate, and "
            f"resume from the last checkpoint in {run_dir}"
        )
