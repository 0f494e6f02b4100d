"""A loss or a gradient that is not finite stops a run, before anything of that step is on disk."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from qerl.errors import EngineError


def check_loss(loss: torch.Tensor, step: int, run_dir: Path) -> None:
    """Raise EngineError for a loss () that is NaN or infinite; its update has not been made."""
    if not torch.isfinite(loss):
        raise EngineError(
            f"the loss of step {step} is {loss.item()}: lower optim.learning_rate or optim.max_grad_norm, and resume "
            f"from the last checkpoint in {run_dir}"
        )


def check_gradient(norm: float | None, step: int, run_dir: Path) -> None:
    """Raise EngineError for a gradient whose norm is NaN or infinite; its update has been made."""
    if norm is not None and not math.isfinite(norm):
        raise EngineError(
            f"the gradient of step {step} is {norm}, and its update broke the adapter: lower optim.learning_rate, and "
            f"resume from the last checkpoint in {run_dir}"
        )
