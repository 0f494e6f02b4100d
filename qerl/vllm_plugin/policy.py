"""The trainer's model over the engine's tensors: transformers modules around vLLM's weights, one copy of each.

Embeddings, head, norms and 16-bit linears are shared by pointer (for a fused linear: a range of its rows). A quantized
linear reads its rows in the kernel's own layout: decoded into a short-lived buffer for each product, both directions.

The buffer holds code * block scale, which bfloat16 represents exactly; the rest of the scale multiplies the float32
accumulator of the product, as it does in both kernels. So the trainer computes with the checkpoint's exact weights,
not with their bfloat16 roundings, and differs from the sampler only by the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from vllm.model_executor.layers.linear import LinearBase

from qerl.errors import EngineError
from qerl.nvfp4.kernel_layout import KernelWeight
from qerl.nvfp4.kernels import decode_, dequantize_
from qerl.nvfp4.linear import NVFP4Linear
from qerl.vllm_plugin.linear import kernel_name, kernel_weight, parts


class KernelLinear(NVFP4Linear):
    """A frozen linear over rows [row_start, row_start + out_features) of a kernel's weight. It owns no weight."""

    def __init__(self, weight: KernelWeight, row_start: int, rows: int, bias: torch.Tensor | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = weight.in_features, rows
        self.compute_dtype = torch.bfloat16
        self.kernel_weight, self.row_start = weight, row_start
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self._cache = None

    @property
    def weight_packed(self) -> torch.Tensor:
        """The kernel's words, of the whole fused linear (NVFP4Linear asks them for the device)."""
        return self.kernel_weight.words

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _KernelProduct.apply(input.to(self.compute_dtype), self)

    def unscaled(self) -> torch.Tensor:
        """(out_features, in_features) bfloat16, exact: the weight without the factor `kernel_weight.alpha`."""
        return self._decode(torch.bfloat16, scaled=False)

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self._decode(dtype, scaled=True)

    def _decode(self, dtype: torch.dtype, scaled: bool) -> torch.Tensor:
        out = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.kernel_weight.words.device)
        if not scaled:
            return decode_(out, self.kernel_weight, self.row_start)
        return dequantize_(out, self.kernel_weight, self.row_start)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KernelLinear:
        """The weights belong to the engine: they neither move nor change dtype."""
        return self


class _KernelProduct(torch.autograd.Function):
    """alpha * x W^T + b and its gradient to x; the weight is decoded in both directions and not saved."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, linear: KernelLinear) -> torch.Tensor:
        ctx.linear = linear
        return _product(x, linear.unscaled().t(), linear.bias, linear.kernel_weight.alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        linear = ctx.linear
        grad_output = grad_output.to(linear.compute_dtype)
        return _product(grad_output, linear.unscaled(), None, linear.kernel_weight.alpha), None


def _product(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    addend, beta = (x.new_zeros(1), 0) if bias is None else (bias, 1)
    return torch.addmm(addend, rows, matrix, beta=beta, alpha=alpha).view(*x.shape[:-1], matrix.shape[1])


def build_policy(folder: str, engine_model: nn.Module, trust_remote_code: bool = False) -> PreTrainedModel:
    """The transformers model of checkpoint `folder` whose weights are those of vLLM's `engine_model`, frozen.

    Raises EngineError if a module of the one has no counterpart of the same size in the other.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
    linears = _place_linears_(model, engine_model)
    _place_tensors_(model, engine_model, linears)
    _fill_rotary_(model, next(engine_model.parameters()).device)
    empty = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if empty:
        raise EngineError(f"vLLM's model has nothing for {empty[:5]}: set rollout.engine=transformers for this model")
    with suppress(OSError):  # the checkpoint ships none: the defaults stay
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.requires_grad_(False).eval()


def _place_linears_(model: PreTrainedModel, engine_model: nn.Module) -> set[str]:
    """Put a module over the engine's rows in place of each linear; returns their names."""
    modules = dict(model.named_modules())
    placed = set()
    for name, layer in engine_model.named_modules():
        if not isinstance(layer, LinearBase):
            continue
        weight = None if kernel_name(layer) == "cublas" else kernel_weight(layer)
        for part, start, rows in parts(name, layer):
            old = modules.get(part)
            if not isinstance(old, nn.Linear) or old.out_features != rows:
                raise EngineError(f"vLLM's {name} has rows for {part} ({rows}), the transformers model {old}")
            bias = None if layer.qerl_bias is None else layer.qerl_bias[start : start + rows]
            new = _dense_linear(layer, start, rows, bias) if weight is None else KernelLinear(weight, start, rows, bias)
            parent, _, leaf = part.rpartition(".")
            setattr(modules[parent], leaf, new)
            placed.add(part)
    return placed


def _dense_linear(layer: LinearBase, start: int, rows: int, bias: torch.Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(layer.input_size, rows, bias=bias is not None, dtype=layer.params_dtype)
    linear.weight = nn.Parameter(layer.weight.data[start : start + rows], requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _place_tensors_(model: PreTrainedModel, engine_model: nn.Module, linears: set[str]) -> None:
    """Share every other parameter (embeddings, head, norms) by pointer; vLLM pads the vocabulary's rows."""
    own = dict(engine_model.named_parameters())
    for name, parameter in list(model.named_parameters()):
        module_name, _, leaf = name.rpartition(".")
        if module_name in linears:
            continue
        source = own.get(name)
        if source is None and name == "lm_head.weight":
            source = own.get("model.embed_tokens.weight")  # tied
        if source is None or source.shape[1:] != parameter.shape[1:] or source.shape[0] < parameter.shape[0]:
            raise EngineError(f"vLLM's model has no tensor for {name} {tuple(parameter.shape)}")
        module = model.get_submodule(module_name)
        setattr(module, leaf, nn.Parameter(source.data[: parameter.shape[0]], requires_grad=False))
    model.tie_weights()


def _fill_rotary_(model: PreTrainedModel, device: torch.device) -> None:
    """Build the rotary embeddings' tables, which no checkpoint holds, on the device."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, leaf = name.rpartition(".")
            fresh = type(module)(config=model.config).to(device)
            setattr(model.get_submodule(parent), leaf, fresh)
