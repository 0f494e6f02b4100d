"""What an FP8 recipe (`train.fp8_recipe`) takes of a card while a layer runs backward. Pure numbers.

It follows `qerl.formats.fp8.training` and `qerl.model.products` on a card, in an MLP of I columns and H features.

blockwise: the peak is in the gradient to the input of gate and up. Then the gradient of the activation is gone, whose
2 I bytes per token `Shapes.footprint` counts, and beside the gradients of gate and up and the decoded weight there are,
per token, the codes of dy (2 I bytes), a float32 scale for each 128 of them, and the product (H numbers of 2 bytes); of
the weight (2 I x H) codes and their transposed copy, 1 byte each.

tensorwise: the peak is in the same place, with the codes of dy but no scales per token, and the transposed codes of the
weight alone. With masters dy is rounded for both of its products, which makes 4 I bytes per token of codes, less the
2 I of the activation's gradient, which is gone. The product of a master's gradient (I x H) is counted as float32
beside that, though it comes later and is narrower where masters are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

RecipeName = Literal["tensorwise", "blockwise"]


class RoundingWork(NamedTuple):
    """Bytes beside those of training without a recipe."""

    token: int  # per token of a micro-batch
    weight: int


def rounding_work(recipe: RecipeName | None, hidden: int, intermediate: int, masters: bool = False) -> RoundingWork:
    """What the recipe takes of a model with these sizes, whose `masters` are trained, or an adapter."""
    if recipe is None:
        return RoundingWork(0, 0)
    if recipe == "tensorwise":
        codes, gone, product = 2 * intermediate * (2 if masters else 1), 2 * intermediate, 2 * hidden
        return RoundingWork(codes - gone + product, (4 if masters else 2) * intermediate * hidden)
    weight, product, gone = 2 * intermediate * hidden, 2 * hidden, 2 * intermediate
    rounded = 2 * intermediate + 4 * -(-2 * intermediate // 128)
    return RoundingWork(rounded - gone + product, (1 + 1) * weight)
