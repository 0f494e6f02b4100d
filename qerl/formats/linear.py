"""Frozen linears whose weights stay packed: what the linears of all quantized formats share.

A `PackedLinear` computes what `torch.nn.Linear` would on the dequantized weight: the same output and the same gradient
to the input (and to the bias, if that is trained), with no dense weight kept between calls. It is a `torch.nn.Linear`
by type, so that PEFT wraps it; its `.weight` is a `PackedWeight`, which has a shape, a dtype and a device but no
storage. A format's own linear adds its buffers and `unpack`. `swap_linears` puts empty ones into a model, and
`cached_weights` keeps their dense weights while tokens are generated one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from qerl.base.errors import CheckpointError, QerlError
from qerl.formats.base import Format

if TYPE_CHECKING:
    from qerl.formats.fp8.reference import FP8Tensor
    from qerl.formats.fp8.training import Scaled
    from qerl.formats.nvfp4.activations import Activations


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_dense(weight: torch.Tensor, label: str, check_features: Callable[[int, int], None]) -> None:
    """Raise CheckpointError unless `weight` is a finite matrix (out, in) of `DTYPES` whose size the format takes.

    `label` is the format's, for the message; `check_features` raises for a size that it cannot pack.
    """
    if weight.ndim != 2 or weight.dtype not in DTYPES:
        raise CheckpointError(
            f"cannot quantize {weight.dtype} {tuple(weight.shape)} to {label}: it takes a 16- or 32-bit float weight "
            "(out, in), so a model that is quantized already has to be made from its 16-bit one"
        )
    check_features(*weight.shape)
    if not weight.isfinite().all():
        raise CheckpointError(
            f"cannot quantize a weight of shape {tuple(weight.shape)} that holds inf or NaN: the 16-bit checkpoint is "
            "damaged, or training went wrong"
        )


def product_dtype(device: str, own: torch.dtype) -> torch.dtype:
    """The dtype of autocast on a device of this type where it is active, else `own`."""
    active = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if active else own


class WeightCache:
    """Dense weights kept by `cached_weights`, at most `max_bytes` of them; `bytes` is what they take now."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._weights: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def get(self, linear: CachedWeight, dtype: torch.dtype) -> torch.Tensor:
        """The dense weight, from the cache, or dequantized and kept if it still fits."""
        key = (id(linear), dtype)
        if key in self._weights:
            return self._weights[key]
        weight = linear.unpack(dtype)
        if self.max_bytes is None or self.bytes + weight.nbytes <= self.max_bytes:
            self._weights[key] = weight
            self.bytes += weight.nbytes
        return weight

    def drop(self, linear: CachedWeight) -> None:
        """Forget one linear, whose tensors change."""
        for key in [key for key in self._weights if key[0] == id(linear)]:
            self.bytes -= self._weights.pop(key).nbytes


class CachedWeight:
    """A module whose dense weight `cached_weights` can keep; `unpack` computes it."""

    cache: WeightCache | None = None  # set while inside `cached_weights`

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized weight, computed anew."""
        raise NotImplementedError

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized weight; fresh unless inside `cached_weights`."""
        return self.unpack(dtype) if self.cache is None else self.cache.get(self, dtype)

    def drop_cached(self) -> None:
        """Forget the dense weight of `cached_weights`: call it after the buffers were written to."""
        if self.cache is not None:
            self.cache.drop(self)


@contextmanager
def cached_weights(model: nn.Module, max_bytes: int | None = None) -> Iterator[WeightCache]:
    """Keep the dense weights of the model's packed linears and experts from their first use until the block ends.

    For token-by-token generation on a CPU, where dequantizing takes longer than multiplying. It costs the dense model
    in memory: `max_bytes` bounds that, and layers beyond it are dequantized at each call. Casting and loading inside
    the block are noticed; code that writes to the packed buffers in place has to call `drop_cached`.
    """
    cache = WeightCache(max_bytes)
    linears = [module for module in model.modules() if isinstance(module, CachedWeight)]
    before = [linear.cache for linear in linears]
    for linear in linears:
        linear.cache = cache
    try:
        yield cache
    finally:
        for linear, outer in zip(linears, before, strict=True):
            linear.cache = outer


class PackedLinear(CachedWeight, nn.Linear):
    """y = x W^T + b with W (out_features, in_features) packed in buffers, which are named as in a checkpoint.

    Casting the module (`.to(dtype)`, `.half()`) changes `compute_dtype` and the bias, never the bits of the buffers.
    """

    activations: Activations | None = None  # how the input is rounded; None: it is not
    exact_dtype = torch.float32  # in which `unscaled` loses nothing
    own_recipe: str | None = None  # the FP8 recipe by which it multiplies anyway, as its engine does
    start: tuple[torch.Tensor, torch.Tensor] | None = None  # A0 (r0, in) and B0 (out, r0) of `set_start_`

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """An all-zero weight, to load tensors into. `dtype` is the compute dtype, as for `torch.nn.Linear`."""
        nn.Module.__init__(self)  # nn.Linear's own would allocate a dense weight
        self.in_features, self.out_features = in_features, out_features
        self.compute_dtype = dtype or torch.get_default_dtype()
        for name, tensor in self.empty_tensors(device).items():
            self.register_buffer(name, tensor)
        zeros = torch.zeros(out_features, dtype=self.compute_dtype, device=device) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros, requires_grad=False))

    def multiplied(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        """What `own_product` multiplies by in place of x (T, in): x itself, or x rounded, in the dtype of x.

        A `spare` x may be overwritten.
        """
        return x

    @classmethod
    def of_buffers(
        cls,
        buffers: Mapping[str, torch.Tensor],
        shape: tuple[int, int],
        bias: torch.Tensor | None,
        compute_dtype: torch.dtype | None,
    ) -> Self:
        """A linear of `shape` (out_features, in_features) over these buffers, without a copy.

        The compute dtype defaults to the bias's, or without a bias to torch's default. Raises CheckpointError
        for a bias of another size.
        """
        out_features, in_features = shape
        if bias is not None and tuple(bias.shape) != (out_features,):
            raise CheckpointError(f"linear.bias: has shape {tuple(bias.shape)}, must be ({out_features},)")
        dtype = compute_dtype or (torch.get_default_dtype() if bias is None else bias.dtype)
        linear = cls(in_features, out_features, bias=False, device="meta", dtype=dtype)
        for name, tensor in buffers.items():
            setattr(linear, name, tensor)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        return linear

    def empty_tensors(self, device: torch.device | str | None) -> dict[str, torch.Tensor]:
        """The buffers of a linear of this size, of a weight that is zero."""
        raise NotImplementedError

    def write_(self, matrix: torch.Tensor, row_start: int = 0) -> torch.Tensor | None:
        """Overwrite the rows from `row_start` on by `matrix` (rows, in_features), rounded; tensors keep their places.

        A part of the rows begins at a multiple of 128. Returns the faults of `matrix`, which are counts of what the
        format cannot hold, on the weight's device, or None for a format that holds everything. A weight from a matrix
        with faults is of no use: give the counts to `refuse`. They are not read back here, so that the matrices of an
        update follow one another without a wait. Raises EngineError for a weight that cannot change.
        """
        raise NotImplementedError

    def refuse(self, faults: Sequence[int], name: str) -> None:
        """Raise EngineError if a count of `faults` is not 0; `name` names the linear in the message."""

    def pack_(self, matrix: torch.Tensor, name: str = "linear") -> None:
        """`write_` a matrix. Raises EngineError for one that has faults."""
        faults = self.write_(matrix)
        if faults is not None:
            self.refuse(faults.tolist(), name)

    def bits(self) -> list[torch.Tensor]:
        """The tensors that `write_` writes to: sent to an equal linear, they bring it the weight."""
        return list(self._buffers.values())

    @property
    def weight_device(self) -> torch.device:
        return next(iter(self._buffers.values())).device

    @property
    def weight(self) -> PackedWeight:
        """A stand-in for the dense weight: dequantized when it is computed with, an error when it is written to."""
        return PackedWeight(self)

    def product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x W^T + b with the weight in `dtype`."""
        return F.linear(x, self.dense(dtype), self.bias)

    def followed_by(self, others: Sequence[nn.Module]) -> bool:
        """Whether the rows of `others` follow this linear's in one tensor, which `unscaled` decodes at once."""
        return False

    def unscaled(self, dtype: torch.dtype, others: Sequence[nn.Module] = ()) -> tuple[torch.Tensor, float]:
        """The weight (rows, in_features) up to a scalar factor, and that factor. Valid until the next call.

        With `others`, which must follow this linear, the weight has their rows too.
        """
        return self.dense(dtype), 1.0

    def codes_in_blocks(self, others: Sequence[nn.Module] = ()) -> FP8Tensor | None:
        """The weight if it is kept in FP8, with the rows of `others`; None, too, if these do not follow in memory."""
        return None

    def turned_to_fp8(self, others: Sequence[nn.Module] = ()) -> Scaled | None:
        """The transpose (in_features, rows) in FP8 under one scale, where a kernel makes it of the packed weight."""
        return None

    def own_product(self, x: torch.Tensor, others: Sequence[nn.Module] = ()) -> torch.Tensor | None:
        """x W^T (T, out) for x (T, in) if the linear does not multiply by its dense weight, else None.

        With `others`, W has their rows too; None unless these follow this linear's in one tensor.
        """
        return None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = product_dtype(input.device.type, self.compute_dtype)  # F.linear casts, also inside a Function
        input = rounded_input(input.to(dtype), self.activations) if self.activations else input
        if torch.is_grad_enabled() and (input.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            out = _FrozenLinear.apply(input, self.bias, self, dtype)
        else:
            out = self.product(input, dtype)
        return self.with_start(input.to(dtype), out)

    def with_start(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` and what the start of this linear, if it has one, makes of the input x (..., in)."""
        if self.start is None:
            return out
        down, up = (factor.to(x.dtype) for factor in self.start)
        rows = F.linear(x, down).flatten(0, -2)
        return torch.addmm(out.flatten(0, -2), rows, up.t()).view_as(out)

    def reset_parameters(self) -> None:
        raise QerlError("a packed linear has no random initialization: load packed tensors, or quantize a dense linear")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, compute_dtype={self.compute_dtype}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        """`.to`, `.half`, `.cuda`, ...: devices apply to all, dtypes to the bias and the compute dtype only."""
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight_device)).dtype
        self.drop_cached()
        return super()._apply(moved_with_its_bits(fn, self._buffers.values()), recurse)

    def _load_from_state_dict(self, *args) -> None:
        self.drop_cached()
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict:
        """Pickle e4m3 buffers as bytes, because torch 2.13's pickle writes them but cannot read them back."""
        state = {name: value for name, value in super().__getstate__().items() if name != "cache"}
        names = [name for name, buffer in state["_buffers"].items() if buffer.dtype == torch.float8_e4m3fn]
        return {**state, "_buffers": _viewed(state["_buffers"], names, torch.uint8), "_e4m3": names}

    def __setstate__(self, state: dict) -> None:
        names = state["_e4m3"]
        super().__setstate__({**state, "_buffers": _viewed(state["_buffers"], names, torch.float8_e4m3fn)})


def moved_with_its_bits(
    fn: Callable[[torch.Tensor], torch.Tensor], packed: Iterable[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`fn`, which casts or moves a tensor, except the `packed` ones: it moves them and leaves their bits alone."""
    kept = {id(tensor) for tensor in packed}

    def keep_bits(tensor: torch.Tensor) -> torch.Tensor:
        moved = fn(tensor)
        return tensor.to(moved.device) if id(tensor) in kept and moved.dtype != tensor.dtype else moved

    return keep_bits


def _viewed(buffers: dict[str, torch.Tensor], names: Sequence[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The buffers, with the bytes of those called `names` viewed as `dtype`."""
    return {name: value.view(dtype) if name in names else value for name, value in buffers.items()}


def rounded_input(x: torch.Tensor, activations: Activations) -> torch.Tensor:
    """x rounded; its gradient is as if rounding were the identity, for clipped values too."""
    return _Rounded.apply(x, activations) if torch.is_grad_enabled() and x.requires_grad else activations(x)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, activations: Activations) -> torch.Tensor:
        return activations(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        return grad, None


class _FrozenLinear(torch.autograd.Function):
    """F.linear with a weight that gets no gradient: dequantized in forward, and again in backward.

    The module is kept on the context instead of its tensors in `save_for_backward`, so that hooks on saved tensors
    (activation offloading) do not move the base weights about.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, bias: torch.Tensor | None, linear: PackedLinear, dtype: torch.dtype):
        ctx.linear, ctx.dtype = linear, dtype
        return linear.product(x, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        grad_input = grad_output @ ctx.linear.dense(ctx.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = grad_output.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad_input, grad_bias, None, None


class PackedWeight(torch.Tensor):
    """What `PackedLinear.weight` returns: no storage, dequantized for each operation that reads it.

    PEFT, transformers and others ask `.weight` for a device, a dtype or a shape, which costs nothing here. Writing to
    it (merging a LoRA, initializing) raises QerlError: the bits cannot hold the result, which would be lost silently.
    """

    @staticmethod
    def __new__(cls, linear: PackedLinear) -> PackedWeight:
        shape = (linear.out_features, linear.in_features)
        weight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=linear.compute_dtype, device=linear.weight_device
        )
        weight.linear = linear
        return weight

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.data.__set__ and isinstance(args[0], cls):
            raise _write_error(args[0])
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return PackedWeight(args[0].linear)
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise _write_error(value)
        args, kwargs = tree_map_only(cls, lambda weight: weight.linear.dense(weight.dtype), (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _write_error(weight: PackedWeight) -> QerlError:
    return QerlError(
        f"the weight of {type(weight.linear).__name__} cannot be written to: its few bits do not hold a merged LoRA or "
        "an update, so it would be lost; keep the adapter beside the base, or merge into the 16-bit model with "
        "`qerl merge`"
    )


def swap_linears(model: nn.Module, quantized: Iterable[str], format: Format) -> int:
    """Replace the named `torch.nn.Linear` modules by empty linears of `format` (load tensors next); returns how many.

    Device, compute dtype, bias and training flag stay. Raises CheckpointError for a name that is missing or not a
    dense linear, for a shape that has no packing, and if no name was given.
    """
    names = list(dict.fromkeys(quantized))
    if not names:
        raise CheckpointError(
            f"no quantized linear to swap in: is this an {format.label} checkpoint? `qerl quantize` makes one"
        )
    modules = dict(model.named_modules())
    for name in names:
        if type(modules.get(name)) is not nn.Linear:
            raise CheckpointError(
                f"{name}: quantized in the checkpoint, but the model has {type(modules.get(name)).__name__} there "
                "where a torch.nn.Linear must be; the checkpoint is of another architecture"
            )
    for name in names:
        format.check_features(modules[name].out_features, modules[name].in_features, name)
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, _empty_like(modules[name], format.linear()))
    return len(names)


def _empty_like(linear: nn.Linear, kind: type[PackedLinear]) -> PackedLinear:
    device, dtype = linear.weight.device, linear.weight.dtype
    packed = kind(linear.in_features, linear.out_features, bias=False, device=device, dtype=dtype)
    if linear.bias is not None:
        packed.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    return packed.train(linear.training)
