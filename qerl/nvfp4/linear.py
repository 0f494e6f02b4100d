"""A frozen linear whose weight stays packed in NVFP4, and what swaps it into a model.

`NVFP4Linear` computes what `torch.nn.Linear` would on the dequantized weight: the same output and the same gradient to
the input (and to the bias, if that is trained), with no dense weight kept between calls. It is a `torch.nn.Linear` by
type, so that PEFT wraps it; its `.weight` is a `PackedWeight`, which has a shape, a dtype and a device but no storage.

Room for speed: `DEQUANTIZERS` maps a device type to a faster `reference.dequantize_unchecked`, and a subclass that
holds its weight in a kernel's layout overrides `NVFP4Linear.dense`, which forward, backward and `.weight` all call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from qerl.errors import CheckpointError, EngineError, QerlError
from qerl.nvfp4 import layout, reference

Dequantizer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]

DEQUANTIZERS: dict[str, Dequantizer] = {}  # device type -> faster twin of reference.dequantize_unchecked, bit-exact


def dequantizer(device: torch.device) -> Dequantizer:
    """What turns packed tensors on `device` into a dense weight: the one place where a kernel is chosen."""
    return DEQUANTIZERS.get(device.type, reference.dequantize_unchecked)


class NVFP4Linear(nn.Linear):
    """y = x W^T + b with W (out_features, in_features) packed: buffers named as in a checkpoint, `bias` a parameter.

    Casting the module (`.to(dtype)`, `.half()`) changes `compute_dtype` and the bias, never the bits of the buffers.
    Raises CheckpointError for an in_features that is not a multiple of 16, and on loading tensors that do not fit.
    """

    _cache: WeightCache | None = None  # set while inside `cached_weights`

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
        layout.check_features(out_features, in_features)
        self.in_features, self.out_features = in_features, out_features
        self.compute_dtype = dtype or torch.get_default_dtype()
        specs = layout.tensor_specs(out_features, in_features)
        dtypes = (torch.uint8, torch.float8_e4m3fn, torch.float32)
        for (name, spec), storage_dtype in zip(specs.items(), dtypes, strict=True):
            self.register_buffer(name, torch.zeros(spec.shape, dtype=storage_dtype, device=device))
        self.weight_global_scale.fill_(1.0)
        zeros = torch.zeros(out_features, dtype=self.compute_dtype, device=device) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros, requires_grad=False))

    @classmethod
    def from_tensors(
        cls,
        packed: torch.Tensor,
        block_scale: torch.Tensor,
        global_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> NVFP4Linear:
        """Hold the given tensors (no copy). The compute dtype defaults to the bias's, then to torch's default."""
        tensors = reference.NVFP4Tensor(packed, block_scale, global_scale).named()
        out_features, in_features = layout.check_tensors(tensors)
        layout.check_values(tensors)
        if bias is not None and tuple(bias.shape) != (out_features,):
            raise CheckpointError(f"linear.bias: has shape {tuple(bias.shape)}, must be ({out_features},)")
        dtype = compute_dtype or (torch.get_default_dtype() if bias is None else bias.dtype)
        linear = cls(in_features, out_features, bias=bias is not None, device="meta", dtype=dtype)
        for name, tensor in tensors.items():
            setattr(linear, name, tensor)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        return linear

    @classmethod
    def from_linear(cls, linear: nn.Linear, global_scale: torch.Tensor | None = None) -> NVFP4Linear:
        """Quantize a dense linear as llm-compressor would; `global_scale` as for `reference.quantize`."""
        packed = reference.quantize(linear.weight.detach(), global_scale)
        return cls.from_tensors(*packed, bias=linear.bias, compute_dtype=linear.weight.dtype)

    @property
    def weight(self) -> PackedWeight:
        """A stand-in for the dense weight: dequantized when it is computed with, an error when it is written to."""
        return PackedWeight(self)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized weight (out_features, in_features); fresh unless inside `cached_weights`."""
        if self._cache is not None:
            return self._cache.get(self, dtype)
        return self._dequantize(dtype)

    def pack_(self, matrix: torch.Tensor, name: str = "linear") -> None:
        """Overwrite the weight, in place, by what `reference.quantize` makes of `matrix` (out_features, in_features).

        The global scale stays, since captured CUDA graphs hold it as a number. Raises EngineError, with the weight as
        it was, for a matrix that has grown beyond that scale or is not finite; `name` is for the message.
        """
        tensors = requantized(matrix.to(self.weight_packed.device), self.weight_global_scale, name)
        self.weight_packed.copy_(tensors.packed)
        self.weight_scale.copy_(tensors.block_scale)
        self._drop_cached()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device, dtype = input.device.type, self.compute_dtype
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)  # F.linear casts input and bias itself, also inside a Function
        if torch.is_grad_enabled() and (input.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            return _FrozenLinear.apply(input, self.bias, self, dtype)
        return F.linear(input, self.dense(dtype), self.bias)

    def reset_parameters(self) -> None:
        raise QerlError("an NVFP4 linear has no random initialization: load packed tensors, or use from_linear")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format=nvfp4, compute_dtype={self.compute_dtype}"

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        tensors = (self.weight_packed, self.weight_scale, self.weight_global_scale)
        return dequantizer(self.weight_packed.device)(*tensors, dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> NVFP4Linear:
        """`.to`, `.half`, `.cuda`, ...: devices apply to all, dtypes to the bias and the compute dtype only."""
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight_packed.device)).dtype
        packed = {id(buffer) for name, buffer in self._buffers.items() if name in layout.TENSORS}

        def keep_bits(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in packed and moved.dtype != tensor.dtype else moved

        self._drop_cached()
        return super()._apply(keep_bits, recurse)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        """torch would cast a scale of another dtype silently; here that is an error, and so are NaN scales."""
        for tensor_name, spec in layout.tensor_specs(self.out_features, self.in_features).items():
            tensor = state_dict.get(prefix + tensor_name)
            try:
                if tensor is not None:
                    layout.check_tensor(tensor, spec, prefix + tensor_name)
                    layout.check_values({} if tensor.is_meta else {tensor_name: tensor}, prefix.rstrip("."))
            except CheckpointError as error:
                errors.append(str(error))
                return
        self._drop_cached()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _drop_cached(self) -> None:
        if self._cache is not None:
            self._cache.drop(self)

    def __getstate__(self) -> dict:
        """Block scales travel as bytes: plain pickle of torch 2.13 writes float8 tensors, but cannot read them back."""
        state = {name: value for name, value in super().__getstate__().items() if name != "_cache"}
        state["_buffers"] = _viewed(state["_buffers"], torch.uint8)
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__({**state, "_buffers": _viewed(state["_buffers"], torch.float8_e4m3fn)})


def requantized(matrix: torch.Tensor, global_scale: torch.Tensor, name: str) -> reference.NVFP4Tensor:
    """`reference.quantize` with a global scale that must not change.

    Raises EngineError for block scales that saturate under it, and for inf or NaN.
    """
    if not matrix.isfinite().all():
        raise EngineError(f"the update of {name} holds inf or NaN: lower optim.learning_rate")
    if count := reference.saturated_blocks(matrix, global_scale):
        raise EngineError(
            f"{count} of {matrix.numel() // layout.BLOCK} block scales of {name} saturate: its weights have grown "
            f"beyond the global scale {float(global_scale):g}, which is fixed for a run; quantize the base with more "
            "head room, or lower optim.learning_rate"
        )
    return reference.quantize(matrix, global_scale)


def _viewed(buffers: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The buffers with the block scales' bytes seen as `dtype`."""
    return {name: value.view(dtype) if name == layout.BLOCK_SCALE else value for name, value in buffers.items()}


class _FrozenLinear(torch.autograd.Function):
    """F.linear with a weight that gets no gradient: dequantized in forward, and again in backward.

    The module is kept on the context instead of its tensors in `save_for_backward`, so that hooks on saved tensors
    (activation offloading) do not move the base weights about.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, bias: torch.Tensor | None, linear: NVFP4Linear, dtype: torch.dtype):
        ctx.linear, ctx.dtype = linear, dtype
        return F.linear(x, linear.dense(dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        grad_input = grad_output @ ctx.linear.dense(ctx.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = grad_output.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad_input, grad_bias, None, None


class PackedWeight(torch.Tensor):
    """What `NVFP4Linear.weight` returns: no storage, dequantized for each operation that reads it.

    PEFT, transformers and others ask `.weight` for a device, a dtype or a shape, which costs nothing here. Writing to
    it (merging a LoRA, initializing) raises QerlError: the bits cannot hold the result, which would be lost silently.
    """

    @staticmethod
    def __new__(cls, linear: NVFP4Linear) -> PackedWeight:
        shape = (linear.out_features, linear.in_features)
        device = linear.weight_packed.device
        weight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=linear.compute_dtype, device=device)
        weight.linear = linear
        return weight

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.data.__set__ and isinstance(args[0], cls):
            raise _write_error()
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
                raise _write_error()
        args, kwargs = tree_map_only(cls, lambda weight: weight.linear.dense(weight.dtype), (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _write_error() -> QerlError:
    return QerlError(
        "the weight of an NVFP4 linear cannot be written to: 4 bits do not hold a merged LoRA or an update, so it "
        "would be lost; keep the adapter beside the base, or merge into the 16-bit model with `qerl merge`"
    )


class WeightCache:
    """Dense weights kept by `cached_weights`, at most `max_bytes` of them; `bytes` is what they take now."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._weights: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def get(self, linear: NVFP4Linear, dtype: torch.dtype) -> torch.Tensor:
        """The dense weight, from the cache, or dequantized and kept if it still fits."""
        key = (id(linear), dtype)
        if key in self._weights:
            return self._weights[key]
        weight = linear._dequantize(dtype)
        if self.max_bytes is None or self.bytes + weight.nbytes <= self.max_bytes:
            self._weights[key] = weight
            self.bytes += weight.nbytes
        return weight

    def drop(self, linear: NVFP4Linear) -> None:
        """Forget one linear, whose tensors change."""
        for key in [key for key in self._weights if key[0] == id(linear)]:
            self.bytes -= self._weights.pop(key).nbytes


@contextmanager
def cached_weights(model: nn.Module, max_bytes: int | None = None) -> Iterator[WeightCache]:
    """Keep the dense weights of the model's NVFP4 linears from their first use until the block ends, then free them.

    For token-by-token generation on a CPU, where dequantizing takes longer than multiplying. It costs the dense model
    in memory: `max_bytes` bounds that, and layers beyond it are dequantized at each call. Casting and loading inside
    the block are seen; writing to the packed buffers in place is not.
    """
    cache = WeightCache(max_bytes)
    linears = [module for module in model.modules() if isinstance(module, NVFP4Linear)]
    before = [linear._cache for linear in linears]
    for linear in linears:
        linear._cache = cache
    try:
        yield cache
    finally:
        for linear, outer in zip(linears, before, strict=True):
            linear._cache = outer


def swap_linears(model: nn.Module, quantized: Iterable[str]) -> int:
    """Replace the named `torch.nn.Linear` modules by empty NVFP4 linears (load tensors next); returns how many.

    Device, compute dtype, bias and training flag stay. Raises CheckpointError for a name that is missing or not a
    dense linear, and if no name was given.
    """
    names = list(dict.fromkeys(quantized))
    if not names:
        raise CheckpointError("no quantized linear to swap in: is this an NVFP4 checkpoint? `qerl quantize` makes one")
    modules = dict(model.named_modules())
    for name in names:
        if type(modules.get(name)) is not nn.Linear:
            raise CheckpointError(
                f"{name}: quantized in the checkpoint, but the model has {type(modules.get(name)).__name__} there "
                "where a torch.nn.Linear must be; the checkpoint is of another architecture"
            )
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, _empty_like(modules[name], name))
    return len(names)


def _empty_like(linear: nn.Linear, name: str) -> NVFP4Linear:
    layout.check_features(linear.out_features, linear.in_features, name)
    device, dtype = linear.weight.device, linear.weight.dtype
    packed = NVFP4Linear(linear.in_features, linear.out_features, bias=False, device=device, dtype=dtype)
    if linear.bias is not None:
        packed.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    return packed.train(linear.training)
