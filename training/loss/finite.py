"""Stop a run whose loss, gradient or trained weights are not finite, before a checkpoint of that step is written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qerl.base.errors import EngineError

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel


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


def check_trained(parameters: Iterable[torch.Tensor], step: int, run_dir: Path, parallel: Parallel) -> None:
    """Raise EngineError, on every rank, if a trained parameter of any of them holds NaN or infinity.

    Called before a checkpoint is written, so that each one can be resumed from.
    """
    bounds = [bound.float() for parameter in parameters for bound in parameter.detach().aminmax()]
    if not all(parallel.gather(not bounds or bool(torch.stack(bounds).isfinite().all()))):
        raise EngineError(
            f"the update of step {step} left NaN or infinity in what is trained, and is not saved: lower "
            f"optim.learning_rate, and resume from the last checkpoint in {run_dir}"
        )
