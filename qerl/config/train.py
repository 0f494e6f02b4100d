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

    fp8_recipe: Literal["tensorwise", "blockwise"] | None = Field(
        None,
        description="round products of the decoder's linears and of their gradients to 8 bits, by one scale for each "
        "matrix or by blocks of 128; null: 16 bits, or as the base does",
    )
    fp8_products: Literal["all", "gradients"] = Field(
        "all", description="products that fp8_recipe rounds; gradients: those of the backward pass alone"
    )


def train(config: RunConfig) -> Conflicts:
    """A recipe in 8 bits acts on all that it is said to act on, and is corrected for."""
    this, qat = config.train, config.qat
    if this.fp8_recipe is None:
        yield from unread(config, {"train.fp8_recipe": None}, "nothing is rounded", "train.fp8_products")
        return
    given = {"train.fp8_recipe": this.fp8_recipe}
    yield from unread(config, given, "a linear whose adapter drops out is computed in 16 bits", "adapter.dropout")
    if this.fp8_products == "all" and config.loss.correction.mode == "off" and config.distill is None:
        yield Conflict(
            {**given, "loss.correction.mode": "off"},
            "the trainer computes with other roundings than what samples, which has to be corrected for",
            "loss.correction.mode: token_truncate, or train.fp8_products: gradients",
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
