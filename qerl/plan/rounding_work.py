"""What an FP8 recipe (`train.fp8_recipe`) takes of a card while a layer runs backward. Pure numbers.

It follows `qerl.fp8.training` and `qerl.layers.products` on a card. The peak is in the gradient to the input of gate
and up, I columns each, of H features. Then the gradient of the activation is gone, whose 2 I bytes per token
`Shapes.footprint` counts, and beside the gradients of gate and up and the decoded weight there are

    recipe      per token                                             of the weight (2 I x H)
    tensorwise  dy divided by its scale, 2 bytes; codes of dy, 1      the same: 2 and 1
    blockwise   a copy of one side of dy, 2 bytes; its codes, 1;      codes and their transposed copy: 1 each
                a float32 scale for each 128 of them

and the product before it is added, H numbers of 2 bytes per token. The gradient of a master takes less, and is computed
at another time.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

RecipeName = Literal["tensorwise", "blockwise"]


class RoundingWork(NamedTuple):
    """Bytes beside those of training without a recipe."""

    token: int  # per token of a micro-batch
    weight: int


def rounding_work(recipe: RecipeName | None, hidden: int, intermediate: int) -> RoundingWork:
    """What the recipe takes of a model with these sizes."""
    if recipe is None:
        return RoundingWork(0, 0)
    dy, weight, product, gone = 2 * intermediate, 2 * intermediate * hidden, 2 * hidden, 2 * intermediate
    if recipe == "tensorwise":
        return RoundingWork((2 + 1) * dy - gone + product, (2 + 1) * weight)
    one_side = 2 * intermediate + intermediate + 4 * -(-intermediate // 128)
    return RoundingWork(one_side - gone + product, (1 + 1) * weight)
