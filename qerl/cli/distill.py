"""`qerl distill`: `qerl train` for a recipe whose loss is the divergence from a teacher. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from qerl.cli.train import train
from qerl.cli.train_options import TrainOptions


@dataclass(frozen=True)
class DistillOptions(TrainOptions):
    """The options of `qerl train`, and a teacher."""

    teacher: Annotated[
        str | None,
        typer.Option(
            help="16-bit model with the student's tokenizer; default: the recipe's, or the student's own base."
        ),
    ] = None
    section: str | None = "distill"
    implied: tuple[str, ...] = ("rollout.dynamic_sampling.enabled=false", "loss.kl_coef=0", "loss.entropy_coef=0")


def distill(options: DistillOptions) -> None:
    """Let a model learn from a 16-bit teacher on completions that it samples itself, as a recipe says.

    A recipe without the section `distill` gets one with its defaults. What is no part of a distillation is left out of
    any recipe: dynamic sampling, and the KL and entropy terms of the loss.
    """
    train(options)
