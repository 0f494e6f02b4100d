"""Linears that read the same input, each with a LoRA or a master, computed as one product and one autograd node.

For parts i with weight W_i, bias b_i, adapter factors A_i (r, K), B_i (N_i, r) and scale s_i:

    h_i = x A_i^T            y_i = x W_i^T + b_i + s_i h_i B_i^T         the y_i are column ranges of one y (T, N)
    g_i = s_i dy_i B_i       dx = sum_i dy_i W_i + g_i A_i
    dA_i = g_i^T x           dB_i = s_i dy_i^T h_i                       summed in float32, never rounded to 16 bits
    dM_i = dy_i^T x          for a master M_i: the weight that W_i is packed from, as if packing were the identity

All A_i take one product, and so do all W_i if the engine keeps them in one tensor. Only x and h are kept for the
backward pass. `lora_linear` says how a start, a packed-in adapter and rounded inputs change these equations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.formats import linear
from qerl.formats.linear import PackedLinear
from qerl.model.master import master_of
from qerl.model.products import (
    Upstream,
    add_weight_gradient_,
    followed,
    input_gradient,
    matrix_of,
    one_weight,
    own_product,
    recipe_of,
    summed_input,
)

if TYPE_CHECKING:
    from qerl.formats.nvfp4.activations import Activations

Factors = Sequence[torch.Tensor]


class _Cache:
    """Shared by all threads, because the backward pass runs in one of autograd's. None: nothing is kept."""

    values: dict[tuple, tuple[Factors, torch.Tensor]] | None = None


@contextmanager
def kept_factors() -> Iterator[None]:
    """Within this context, cast and stacked factors are kept: 2 bytes per trained parameter in 16 bits."""
    before, _Cache.values = _Cache.values, {}
    try:
        yield
    finally:
        _Cache.values = before


def cast(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return factor if factor.dtype == dtype else _cached(("cast", dtype), (factor,), lambda: factor.to(dtype))


def stacked(factors: Factors, dtype: torch.dtype) -> torch.Tensor:
    """Concatenate along the first dimension: the A_i (r_i, K) to one A (ranks, K), or the biases of several linears."""
    if len(factors) == 1:
        return cast(factors[0], dtype)
    return _cached(("stacked", dtype), factors, lambda: torch.cat([factor.to(dtype) for factor in factors]))


def diagonal(factors: Factors, dtype: torch.dtype) -> torch.Tensor:
    """A (ranks, N) matrix with the blocks B_i^T (r_i, N_i) on its diagonal and 0 elsewhere."""
    return _cached(
        ("diagonal", dtype), factors, lambda: torch.block_diag(*(factor.to(dtype) for factor in factors)).t()
    )


def beside(frozen: torch.Tensor, factor: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """[B0, s B] (N, r0 + r) of a frozen B0 (N, r0) and a trained B (N, r), as an engine has them in its buffers."""
    return _cached(
        ("beside", scale, dtype), (frozen, factor), lambda: torch.cat([frozen.to(dtype), (factor * scale).to(dtype)], 1)
    )


def _cached(kind: tuple, factors: Factors, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    if _Cache.values is None:
        return make()
    # The entry holds the factors themselves, so their ids cannot be reused by other tensors.
    key = (*kind, *((id(factor), factor._version) for factor in factors))
    if key not in _Cache.values:
        _Cache.values[key] = factors, make()
    return _Cache.values[key][1]


@dataclass(frozen=True)
class Part:
    """A linear whose own weight is frozen, with its adapter and its master; `a`, `b`, `master` are None without.

    `packed_in`: the weight has been packed with the adapter in it. Of the parts of one product all have it, or none. A
    base with a frozen start has neither this nor a master.
    """

    base: nn.Linear
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0
    master: nn.Parameter | None = None
    packed_in: bool = False

    @property
    def start(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A0 (r0, K) and B0 (N, r0) of the base, if it has a frozen start."""
        return getattr(self.base, "start", None)

    @property
    def adds(self) -> bool:
        """Whether a low-rank pair is a product of its own."""
        return self.start is not None or (self.a is not None and not self.packed_in)

    @property
    def frozen_rank(self) -> int:
        """r0; 0 without a frozen start."""
        return 0 if self.start is None else len(self.start[0])

    @property
    def rank(self) -> int:
        """r0 + r: the rows of this part's A in the product that all parts share."""
        return self.frozen_rank + (0 if self.a is None else len(self.a))

    @property
    def down(self) -> list[torch.Tensor]:
        """A0 and A, as far as there are such."""
        return [pair for pair in ((self.start or (None,))[0], self.a) if pair is not None]

    def up(self, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
        """[B0, s B] (N, rank) and what multiplies it; without a start B itself and s."""
        if self.start is None:
            return cast(self.b, dtype), self.scale
        if self.a is None:
            return cast(self.start[1], dtype), 1.0
        return beside(self.start[1], self.b, self.scale, dtype), 1.0


def part_of(module: nn.Module) -> Part | None:
    """What `module` multiplies by at present; None if it does more than multiply and therefore has to be called."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if hasattr(module, "lora_part"):
        return module.lora_part()
    if type(module) is not nn.Linear and not isinstance(module, PackedLinear):
        return None
    master = master_of(module)
    own = (parameter for parameter in module.parameters(recurse=False) if parameter is not master)
    return Part(module, master=master) if not any(parameter.requires_grad for parameter in own) else None


def parts_of(*modules: nn.Module) -> tuple[Part, ...] | None:
    """`part_of` for each module; None if it is None for any of them, or if they do not round their input alike."""
    parts = tuple(part_of(module) for module in modules)
    if None in parts or len({_activations(part) for part in parts}) > 1:
        return None
    return parts


def lora_linear(x: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """y (..., N) of the module docstring for x (..., K), in the dtype of the products.

    - An adapter that is trained through the quantizer is in W_i = Q(W0_i + s_i B_i A_i) already: y_i and dx have no
      term of their own for it, and dA_i and dB_i are as given there (straight-through).
    - A base with a frozen start (`qerl.checkpoint.base_start`) multiplies by W_i + B0_i A0_i. The two pairs are then
      one of rank r0 + r, [A0_i; A_i] and [B0_i, s_i B_i], in y_i and dx; only A_i and B_i get gradients.
    - Where the base rounds its input (`qerl.formats.nvfp4.activations`), x stands for the rounded one: adapters and
      masters read it too. The gradient to it goes to the input as if rounding were the identity, for clipped values
      too. FP8 rounds within its product: adapters beside it read x, while masters and packed-in adapters, whose
      gradient is that of the weight, read what it was multiplied by.

    The small products come first, and the base product is added to them in its float32 accumulator, so that y is
    rounded once. The gradient of a master is added to its `grad` in place, since a tensor of the weight's size for
    autograd to add would be too much. The products with W_i and of dM_i are `qerl.model.products`, which an FP8 recipe
    may round. Factors are cast and stacked only once between two updates (`kept_factors`).
    """
    rows = x.reshape(-1, x.shape[-1])
    y = _LoraLinear.apply(rows, tuple(parts), product_dtype(x, parts), *factors(parts))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])  # a view cannot be rotated in place


def input_of(x: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """What the parts multiply by: x (T, K) in the dtype of the products, rounded if they round their input."""
    activations = _activations(parts[0])
    return x if activations is None else activations(x)


def _activations(part: Part) -> Activations | None:
    return getattr(part.base, "activations", None)


def factors(parts: Sequence[Part]) -> list[torch.Tensor]:
    """A and B of each part that has an adapter, and its master: the tensors that receive gradients."""
    return [tensor for part in parts for tensor in (part.a, part.b, part.master) if tensor is not None]


def product_dtype(x: torch.Tensor, parts: Sequence[Part]) -> torch.dtype:
    """The dtype of autocast where it is active, otherwise the base's."""
    base = parts[0].base
    own = base.compute_dtype if isinstance(base, PackedLinear) else base.weight.dtype
    return linear.product_dtype(x.device.type, own)


def forward(x: torch.Tensor, parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return y (T, N) and h (T, ranks) for x (T, K); h is None without an adapter."""
    h = None if (a := _stacked_a(parts, x.dtype)) is None else x @ a.t()
    if (y := _own_output(x, h, parts)) is not None:
        return y, h
    y = x.new_empty(len(x), sum(part.base.out_features for part in parts))
    started = any(part.adds or part.base.bias is not None for part in parts)
    if started and _can_fuse_bias(parts):
        ups = [part.up(y.dtype) for part in parts]
        bias, b = stacked([p.base.bias for p in parts], y.dtype), diagonal([up for up, _ in ups], y.dtype)
        torch.addmm(bias, h, b, alpha=ups[0][1], out=y)
    elif started:
        for part, ranks, columns in _columns(parts):
            _write_bias_and_lora_(y[:, columns], None if h is None else h[:, ranks], part)
    for columns, block in _blocks(parts, followed([part.base for part in parts])):
        _add_product_(y[:, columns], x, block, started)
    return y, h


def upstream_of(grad: torch.Tensor, parts: Sequence[Part], largest: torch.Tensor | None = None) -> Upstream:
    """dy (T, N), for `backward_to_input` and `backward_to_factors`; its largest magnitude if known."""
    return Upstream(grad, [part.base for part in parts], any(part.master is not None for part in parts), largest)


def backward_to_input(upstream: Upstream, g: torch.Tensor | None, parts: Sequence[Part]) -> torch.Tensor:
    """dx (T, K) from dy and the `g` that `backward_to_h` returned."""
    grad = upstream.grad
    adapted = g is not None and any(part.adds for part in parts)
    after = recipe_of(parts[0].base) is not None  # its product cannot be added to a sum, but a sum can to it
    dx = g @ _stacked_a(parts, grad.dtype) if adapted and not after else None
    one = one_weight([part.base for part in parts])
    for columns, block in _blocks(parts, one):
        dx = input_gradient(upstream, columns, [part.base for part in block], dx)
    upstream.input_is_done()
    return dx.addmm_(g, _stacked_a(parts, grad.dtype)) if adapted and after else dx


def backward_to_h(grad: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor | None:
    """g (T, ranks) from dy (T, N); None without an adapter."""
    if not (ranks := sum(part.rank for part in parts)):
        return None
    g = grad.new_empty(len(grad), ranks)
    for part, rows, columns in _columns(parts):
        if part.rank:
            out, (up, scale) = g[:, rows], part.up(grad.dtype)
            torch.addmm(out, grad[:, columns], up, beta=0, alpha=scale, out=out)
    return g


class Read(NamedTuple):
    """x (T, K) that the parts read, its largest magnitude if known, and whether it is `spare`: overwritten next."""

    x: torch.Tensor
    largest: torch.Tensor | None = None
    spare: bool = False


def backward_to_factors(
    upstream: Upstream, read: Read, h: torch.Tensor | None, g: torch.Tensor | None, parts: Sequence[Part]
) -> list[torch.Tensor | None]:
    """dA and dB of each part that has an adapter, in the order of `factors` and the dtypes of A and B.

    For a master there is None, as its gradient has been added to it.
    """
    grad, x = upstream.grad, read.x
    grads: list[torch.Tensor | None] = []
    masters = [part for part in parts if part.master is not None]
    if parts[0].packed_in and _rounding(parts[0].base) is not None:
        x = parts[0].base.multiplied(x, read.spare)
        h = x @ _stacked_a(parts, x.dtype).t()
    summed = {None: summed_input(x, upstream, read.largest)} if masters else {}
    da = product_32(g.t(), x) if any(part.a is not None for part in parts) else None
    for part, ranks, columns in _columns(parts):
        if part.a is not None:
            rows = slice(ranks.start + part.frozen_rank, ranks.stop)
            db = product_32(grad[:, columns].t(), h[:, rows])
            db = db if part.scale == 1.0 else db.mul_(part.scale)
            grads += [da[rows].to(part.a.dtype), db.to(part.b.dtype)]
        if part.master is not None:
            kind = _rounding(part.base)
            if kind is not None and kind not in summed:
                summed[kind] = part.base.multiplied(x, read.spare)
            add_weight_gradient_(part.master, upstream, columns, summed[kind], part.base)
            grads.append(None)
    return grads


def _rounding(base: nn.Linear) -> str | None:
    """How the product with the weight of `base` rounds x; None if it does not, or leaves it to an FP8 recipe."""
    rounds = isinstance(base, PackedLinear) and getattr(base, "rounds_input", False) and recipe_of(base) is None
    return base.scales if rounds else None


class _LoraLinear(torch.autograd.Function):
    """See the module docstring. Keeps x and h, and references to the factors."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, parts: tuple[Part, ...], dtype: torch.dtype, *adapter: torch.Tensor):
        ctx.parts, ctx.x_dtype, x = parts, x.dtype, x.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            x = input_of(x, parts)
            y, h = forward(x, parts)
        ctx.save_for_backward(x, h, *adapter)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        x, h, *_ = ctx.saved_tensors
        grad = grad.to(x.dtype)
        with torch.autocast(grad.device.type, enabled=False):
            g, upstream = backward_to_h(grad, ctx.parts), upstream_of(grad, ctx.parts)
            dx = backward_to_input(upstream, g, ctx.parts).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
            return dx, None, None, *backward_to_factors(upstream, Read(x), h, g, ctx.parts)


def _columns(parts: Sequence[Part]) -> Iterator[tuple[Part, slice, slice]]:
    """For each part: the part, its columns of h and its columns of y."""
    rank, row = 0, 0
    for part in parts:
        rank_end, row_end = rank + part.rank, row + part.base.out_features
        yield part, slice(rank, rank_end), slice(row, row_end)
        rank, row = rank_end, row_end


def _blocks(parts: Sequence[Part], one: bool) -> Iterator[tuple[slice, Sequence[Part]]]:
    """For each base product, of which there is `one` or one a part: its columns of y and its parts."""
    row = 0
    for block in [parts] if one else [[part] for part in parts]:
        end = row + sum(part.base.out_features for part in block)
        yield slice(row, end), block
        row = end


def _own_output(x: torch.Tensor, h: torch.Tensor | None, parts: Sequence[Part]) -> torch.Tensor | None:
    """y (T, N) if one product of the bases' own gives all columns, as in the engine; else None."""
    y = own_product(x, [part.base for part in parts])
    if y is None:
        return None
    for part, ranks, columns in _columns(parts):
        if part.base.bias is not None:
            y[:, columns].add_(part.base.bias.to(y.dtype))
        if part.adds:
            up, scale = part.up(y.dtype)
            y[:, columns].addmm_(h[:, ranks], up.t(), alpha=scale)
    return y


def _add_product_(out: torch.Tensor, x: torch.Tensor, block: Sequence[Part], started: bool) -> None:
    """Add the block's base product to its columns of y, or write it there if y is not `started`."""
    bases = [part.base for part in block]
    own = own_product(x, bases)
    if own is None:
        matrix, alpha = matrix_of(bases, x.dtype)
        torch.addmm(out, x, matrix.t(), beta=int(started), alpha=alpha, out=out)
    elif started:
        out.add_(own)
    else:
        out.copy_(own)


def _can_fuse_bias(parts: Sequence[Part]) -> bool:
    """Whether all parts have a bias and adapters of the same scale.

    Then cuBLAS adds the bias of all columns within its product; a bias of only some columns has to be copied first.
    """
    if not all(part.adds and part.base.bias is not None for part in parts):
        return False
    return len({part.scale if part.start is None else 1.0 for part in parts}) == 1


def _write_bias_and_lora_(out: torch.Tensor, h: torch.Tensor | None, part: Part) -> None:
    """Fill `out`, the part's columns of y, with its bias and LoRA term."""
    bias = part.base.bias
    if part.adds:
        addend, (up, scale) = out if bias is None else bias.to(out.dtype), part.up(out.dtype)
        torch.addmm(addend, h, up.t(), beta=int(bias is not None), alpha=scale, out=out)
    elif bias is not None:
        out.copy_(bias)
    else:
        out.zero_()


def _stacked_a(parts: Sequence[Part], dtype: torch.dtype) -> torch.Tensor | None:
    stack = [factor for part in parts for factor in part.down]
    return stacked(stack, dtype) if stack else None


def product_32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in float32, without a rounding to 16 bits in between if the device supports that."""
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()
