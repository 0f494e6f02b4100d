"""The section `train` of a recipe: how the trainer computes, with its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from qerl import formats
from qerl.config.section import Conflict, Conflicts, Section, unread

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


class TrainConfig(Section):
    """How the trainer computes; what samples is not asked."""

    fp8_recipe: Literal["tensorwise", "blockwise", "tensorwise_gradients", "blockwise_gradients"] | None = Field(
        None,
        description="round products of the decoder's linears and of their gradients to 8 bits, by one scale for each "
        "matrix or by blocks of 128; *_gradients: those of the backward pass alone; null: 16 bits, or as the base does",
    )

    @property
    def fp8(self) -> tuple[str | None, str]:
        """The recipe, and the products that it rounds: "all" or "gradients"."""
        scales, gradients, _ = (self.fp8_recipe or "").partition("_gradients")
        return scales or None, "gradients" if gradients else "all"


def train(config: RunConfig) -> Conflicts:
    """A recipe in 8 bits acts on all that it is said to act on, and is corrected for."""
    this, qat = config.train, config.qat
    if this.fp8_recipe is None:
        return
    given = {"train.fp8_recipe": this.fp8_recipe}
    yield from unread(config, given, "a linear whose adapter drops out is computed in 16 bits", "adapter.dropout")
    if this.fp8[1] == "all" and config.loss.correction.mode == "off" and config.distill is None:
        yield Conflict(
            {**given, "loss.correction.mode": "off"},
            "the trainer computes with other roundings than what samples, which has to be corrected for",
            f"loss.correction.mode: token_truncate, or train.fp8_recipe: {this.fp8_recipe}_gradients",
        )
    if (
        qat is not None
        and qat.quant_cfg.activations != "none"
        and formats.get(qat.quant_cfg.weights.format).four_bit_inputs
    ):
        yield Conflict(
            {**given, "qat.quant_cfg.activations": qat.quant_cfg.activations},
            "activations are rounded to 4 bits already",
            "train.fp8_recipe: null",
        )
