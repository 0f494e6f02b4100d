"""The product of a linear's own weight and its gradients, in 16 bits, in the weight's own way, or by an FP8 recipe.

A recipe (`qerl.formats.fp8.training`) rounds the trainer's products alone: while an engine is `serving` the model with
the trainer's modules, they multiply as the engine does.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from qerl.formats.linear import PackedLinear
from qerl.model.master import add_gradient_, forward_alone, master_of, place_of, served_of

if TYPE_CHECKING:
    from qerl.formats.fp8.reference import FP8Tensor
    from qerl.formats.fp8.training import Both, Recipe, Scaled

RECIPE = "fp8_recipe"


def set_recipe_(model: nn.Module, linears: Sequence[nn.Module], recipe: Recipe) -> None:
    """Let the trainer's products of these linears of `model`, which is trained next, be rounded by `recipe`."""
    served = served_of(model)
    for linear in linears:
        setattr(linear, RECIPE, (recipe, served))
        if master_of(linear) is None:  # called as a module it takes the path of the fused layers, too
            linear.forward = types.MethodType(forward_alone, linear)


def recipe_of(base: nn.Module) -> Recipe | None:
    """The recipe by which the products of this linear are rounded now."""
    recipe, served = getattr(base, RECIPE, (None, ()))
    return None if served else recipe


def own_product(x: torch.Tensor, bases: Sequence[nn.Linear]) -> torch.Tensor | None:
    """x W^T (T, out of all), if that is not a product with the dense weight in 16 bits, else None.

    None, too, for several linears whose weights do not follow one another.
    """
    base, *others = bases
    recipe = recipe_of(base)
    if recipe is None or not recipe.rounds_output or recipe.name == getattr(base, "own_recipe", None):
        return base.own_product(x, others) if isinstance(base, PackedLinear) else None
    if (found := _weight_of(bases, x.dtype)) is None:
        return None
    weight, alpha = found
    y = recipe.output(x, recipe.weight(weight))
    return y if alpha == 1.0 else y.mul_(alpha)


class Upstream:
    """dy (T, out of all `bases`), the gradient of what linears with one input have computed.

    A recipe with one scale for a matrix rounds dy once, for the gradient to the input and, if there are such
    (`trains`), for the masters' gradients, and then the input too. `largest`: the largest magnitude of dy where it is
    known, as `qerl.formats.fp8.kernels.round_matrix` takes it.
    """

    def __init__(
        self, grad: torch.Tensor, bases: Sequence[nn.Linear], trains: bool, largest: torch.Tensor | None = None
    ) -> None:
        self.grad, self.largest, self.trains = grad, largest, trains
        recipe = _shared_recipe(bases)
        self.recipe = recipe if recipe is not None and recipe.one_scale else None
        self._rounded: Both | None = None

    def rounded(self) -> Both | None:
        """None if nothing is shared."""
        if self.recipe is not None and self._rounded is None:
            self._rounded = self.recipe.upstream(self.grad, self.largest, self.trains)
        return self._rounded

    def input_is_done(self) -> None:
        """Free what only the gradient to the input needs."""
        if self._rounded is not None:
            self._rounded = self._rounded._replace(plain=None)


def input_gradient(
    upstream: Upstream, columns: slice, bases: Sequence[nn.Linear], addend: torch.Tensor | None = None
) -> torch.Tensor:
    """dx (T, in) = dy W for these columns of dy, which belong to `bases`, plus `addend`, which is overwritten.

    The bases are `one_weight`.
    """
    grad, rounded = upstream.grad[:, columns], upstream.rounded()
    if (recipe := recipe_of(bases[0])) is None:
        matrix, alpha = matrix_of(bases, grad.dtype)
        dx = grad.new_empty(len(grad), matrix.shape[1]) if addend is None else addend
        return torch.addmm(dx, grad, matrix, beta=int(addend is not None), alpha=alpha, out=dx)
    weight, alpha = _turned_of(bases, recipe, grad.dtype)
    if rounded is None:
        product = recipe.to_input(grad, weight)
    else:
        part = rounded.plain._replace(codes=rounded.plain.codes[:, columns])
        product = recipe.product(part, weight, grad.dtype)
    if addend is not None:
        return addend.add_(product, alpha=alpha)
    return product if alpha == 1.0 else product.mul_(alpha)


def one_weight(bases: Sequence[nn.Linear]) -> bool:
    """Whether one product gives the gradient to the input of all: their weights are rows of one tensor."""
    return followed(bases) or (_shared_recipe(bases) is not None and _kept_of(bases) is not None)


def followed(bases: Sequence[nn.Linear]) -> bool:
    """Whether the weights follow one another in a tensor that is decoded at once."""
    return isinstance(bases[0], PackedLinear) and bases[0].followed_by(bases[1:])


def summed_input(x: torch.Tensor, upstream: Upstream, largest: torch.Tensor | None = None) -> torch.Tensor | Scaled:
    """x (T, in) as `add_weight_gradient_` takes it, for all masters that read it; `largest`: its largest, if known."""
    return x if upstream.rounded() is None else upstream.recipe.summed(x, largest)


def add_weight_gradient_(
    master: nn.Parameter, upstream: Upstream, columns: slice, x: torch.Tensor | Scaled, base: nn.Linear
) -> None:
    """The gradient of the master behind `base`, dy^T x for its columns of dy and what `summed_input` gave, added to its
    own."""
    if (rounded := upstream.rounded()) is not None:
        part = rounded.turned._replace(codes=rounded.turned.codes[columns])
        with place_of(master) as place:  # a product in a wider dtype would only take longer to write and to add
            place.add_(upstream.recipe.product(part, x, place.dtype))
        return
    grad, recipe = upstream.grad[:, columns], recipe_of(base)
    if recipe is not None and recipe.one_scale:
        with place_of(master) as place:
            place.add_(recipe.to_weight(grad, x, place.dtype))
    else:
        add_gradient_(master, grad, x)


def matrix_of(bases: Sequence[nn.Linear], dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """The weight (rows, in) of one linear, or of several that are `followed`, up to a scalar factor, and that factor.

    Valid until the next call.
    """
    base, *others = bases
    return base.unscaled(dtype, others) if isinstance(base, PackedLinear) else (base.weight.to(dtype), 1.0)


def decoded(base: PackedLinear) -> torch.Tensor:
    """The packed weight (out, in) in float32, by the fast kernel if there is one, which writes bfloat16, exactly."""
    matrix, factor = base.unscaled(base.exact_dtype)
    return matrix.float() * factor


def _shared_recipe(bases: Sequence[nn.Linear]) -> Recipe | None:
    """The recipe by which the products of all `bases` are rounded now, if it is one."""
    recipe = recipe_of(bases[0])
    return recipe if all(recipe_of(base) == recipe for base in bases) else None


def _kept_of(bases: Sequence[nn.Linear]) -> FP8Tensor | torch.Tensor | None:
    """The weight of all `bases` if it is kept in FP8 or dense, and they follow one another, as in an engine."""
    base, *others = bases
    if isinstance(base, PackedLinear):
        return base.codes_in_blocks(others)
    if any(isinstance(other, PackedLinear) for other in others):
        return None
    weights = [linear.weight.detach() for linear in bases]
    rows = sum(map(len, weights))
    end, columns = weights[0].data_ptr(), weights[0].shape[1]
    for weight in weights:
        alike = weight.is_contiguous() and (weight.shape[1], weight.dtype) == (columns, weights[0].dtype)
        same = weight.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()
        if not (alike and same and weight.data_ptr() == end):
            return None
        end += weight.nbytes
    return weights[0].as_strided((rows, columns), (columns, 1))


def _weight_of(bases: Sequence[nn.Linear], dtype: torch.dtype) -> tuple[FP8Tensor | torch.Tensor, float] | None:
    """The weight of all `bases` for a recipe, up to a scalar factor, and that factor."""
    if (kept := _kept_of(bases)) is not None:
        return kept.to(dtype) if isinstance(kept, torch.Tensor) else kept, 1.0
    return matrix_of(bases, dtype) if len(bases) == 1 or followed(bases) else None


def _turned_of(bases: Sequence[nn.Linear], recipe: Recipe, dtype: torch.dtype) -> tuple[FP8Tensor | Scaled, float]:
    """As `_weight_of`, the transpose in 8 bits that the product for dx takes."""
    base, *others = bases
    if recipe.one_scale and isinstance(base, PackedLinear) and (turned := base.turned_to_fp8(others)) is not None:
        return turned, 1.0
    weight, alpha = _weight_of(bases, dtype)
    return recipe.turned(weight), alpha
