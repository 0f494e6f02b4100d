"""`qerl sft`: `qerl train` for a recipe that learns from given conversations. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from qerl.cli.train import train
from qerl.cli.train_options import TrainOptions


@dataclass(frozen=True)
class SftOptions(TrainOptions):
    """The options of `qerl train`, but for those about completions."""

    grader: str | None = None
    environment: str | None = None
    tools: tuple[str, ...] | None = None
    section: str | None = "sft"


def sft(options: SftOptions) -> None:
    """Let a model learn from conversations: the assistant's messages of a file, a folder or the hub.

    A recipe without the section `sft` gets one with its defaults.
    """
    train(options)
