"""The trainer's model over the engine's tensors: transformers modules around vLLM's weights, so that each exists once.

Embeddings, head, norms and 16-bit linears are shared by pointer; a part of a fused linear is a range of its rows. An
NVFP4 linear decodes its rows exactly from the kernel's own layout (`qerl.formats.nvfp4.kernel_layout`), so that trainer
and sampler differ only in the order of summation. An FP8 linear multiplies by the engine's own product. Experts are
decoded in the same way, or shared. The layers around them come from `qerl.model`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from vllm.model_executor.layers.linear import LinearBase

from qerl.base.errors import ENGINE, EngineError
from qerl.checkpoint.experts import DOWN, FUSED_GATE_UP, Decoder, decoder_of
from qerl.checkpoint.load import config_of, place_blocks_
from qerl.checkpoint.shards import read_config
from qerl.engine.vllm import fp8, linears_of
from qerl.engine.vllm.experts import products
from qerl.engine.vllm.fp8 import FP8BlockMethod
from qerl.engine.vllm.linear import KeptMethod, kernel_weight
from qerl.engine.vllm.sync import FUSED, parts
from qerl.formats.nvfp4.kernel_layout import KernelLinear
from qerl.model.layers import fuse_


def build_policy(folder: str, engine_model: nn.Module, trust_remote_code: bool = False) -> PreTrainedModel:
    """The transformers model of checkpoint `folder` with the weights of vLLM's `engine_model`, frozen.

    Raises EngineError if a module of one model has no counterpart of the same size in the other.
    """
    config = config_of(Path(folder), trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
    decoder = decoder_of(read_config(Path(folder)), folder)
    _place_experts_(model, engine_model, decoder)
    linears = _place_linears_(model, engine_model)
    _place_tensors_(model, engine_model, linears)
    _place_buffers_(model, engine_model)
    empty = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if empty:
        raise EngineError(
            "vLLM's model has nothing for %s: set %s for this model", empty[:5], ENGINE.set_to("transformers")
        )
    with suppress(OSError):  # a checkpoint without one keeps the defaults
        model.generation_config = GenerationConfig.from_pretrained(folder)
    fuse_(model)
    return model.requires_grad_(False).eval()


def linear_views(engine_model: nn.Module) -> dict[str, nn.Linear]:
    """For each linear of the checkpoint, by base module name, a frozen linear over its rows in the engine.

    Experts are not among them, nor is what stays in 16 bits (`kept_views`).
    """
    views: dict[str, nn.Linear] = {}
    for name, layer in linears_of(engine_model).items():
        if isinstance(layer.quant_method, KeptMethod):
            continue
        weight = kernel_weight(layer) if layer.qerl_quantized else None
        for part, start, rows in parts(name, layer):
            bias = None if layer.qerl_bias is None else layer.qerl_bias[start : start + rows]
            if isinstance(layer.quant_method.inner, FP8BlockMethod):
                views[part] = fp8.view(layer, start, rows, bias)
            elif weight is None:
                views[part] = _dense_linear(layer, start, rows, bias)
            else:
                views[part] = KernelLinear(weight, start, rows, bias)
                views[part].activations = layer.qerl_activations
    return views


def kept_views(engine_model: nn.Module) -> dict[str, nn.Linear]:
    """The same for those linears that stay in 16 bits and are fused: a and b of linear attention. Routers, which are
    not, are shared as they are."""
    return {
        part: _dense_linear(layer, start, rows, layer.qerl_bias)
        for name, layer in linears_of(engine_model).items()
        if isinstance(layer.quant_method, KeptMethod) and name.rpartition(".")[2] in FUSED
        for part, start, rows in parts(name, layer)
    }


def expert_views(engine_model: nn.Module) -> dict[str, nn.Module]:
    """The weights of both projections of each layer's experts, by their full names in the trainer's memory."""
    views = {}
    for name, product in products(engine_model).items():
        layer = name.removesuffix(".mlp.experts")
        views[f"{layer}.{FUSED_GATE_UP}"], views[f"{layer}.{DOWN}"] = product.base.views()
    return views


def _place_experts_(model: PreTrainedModel, engine_model: nn.Module, decoder: Decoder) -> None:
    """Put our blocks with the engine's experts in place of the model's own."""
    views = expert_views(engine_model)
    found = {name: (view.experts, view.out_features, view.in_features) for name, view in views.items()}
    expected = {
        f"model.layers.{layer}.{tensor}": decoder.shape_in_memory(tensor)
        for layer in decoder.sparse
        for tensor in (FUSED_GATE_UP, DOWN)
    }
    if found != expected:
        odd = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        sizes = f"{found.get(odd[0])} for {odd[0]}, and config.json says {expected.get(odd[0])}"
        raise EngineError(f"vLLM has {sizes} ({len(odd)} tensors in all): copy config.json and weights again")
    if views:
        place_blocks_(model, decoder, views)


def _place_linears_(model: PreTrainedModel, engine_model: nn.Module) -> set[str]:
    """Replace each linear by one over the engine's rows. Returns their names."""
    modules, views = dict(model.named_modules()), linear_views(engine_model) | kept_views(engine_model)
    for name, view in views.items():
        old = modules.get(name)
        if not isinstance(old, nn.Linear) or old.out_features != view.out_features:
            raise EngineError(f"vLLM has {view.out_features} rows for {name}, the transformers model {old}")
        parent, _, leaf = name.rpartition(".")
        setattr(modules[parent], leaf, view)
    return set(views)


def _dense_linear(layer: LinearBase, start: int, rows: int, bias: torch.Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(layer.input_size, rows, bias=bias is not None, dtype=layer.params_dtype)
    linear.weight = nn.Parameter(layer.weight.data[start : start + rows], requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _place_tensors_(model: PreTrainedModel, engine_model: nn.Module, linears: set[str]) -> None:
    """Share every other parameter (embeddings, head, norms) by pointer, without the rows that vLLM pads the vocabulary
    with."""
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


def _place_buffers_(model: PreTrainedModel, engine_model: nn.Module) -> None:
    """Share the buffers that the engine has too, and build the others, which no checkpoint contains: the scale of
    embeddings and the tables of the rotary embeddings."""
    device, own = next(engine_model.parameters()).device, dict(engine_model.named_buffers())
    for name, module in list(model.named_modules()):
        for leaf, _ in [*module.named_buffers(recurse=False)]:
            if (source := own.get(f"{name}.{leaf}")) is not None:
                setattr(module, leaf, source)
            elif leaf == "embed_scale":
                setattr(module, leaf, torch.tensor(module.scalar_embed_scale, device=device))
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, leaf = name.rpartition(".")
            fresh = type(module)(config=model.config).to(device)
            setattr(model.get_submodule(parent), leaf, fresh)
