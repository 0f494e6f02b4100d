"""Causal attention within the sequences of a packed row, as an attention function of transformers.

On a GPU in 16 bits this is flash attention: torch's, with FlashAttention 3's forward pass where an engine has brought
one. That returns all that FlashAttention 2's backward pass reads, so the backward pass is torch's in both cases.
Elsewhere it is the twin `attend_each`, plain scaled dot-product attention over one sequence at a time. No mask is
needed, and transformers builds none for an attention function whose name has no mask function.

Keys and values are rounded to 8 bits, as the cache of the engine that samples from the model does, if the attention
modules have `kv_scales` (`set_kv_scales_`). The attention of the transformers engine reads the same scales.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from qerl.base.errors import EngineError
from qerl.model.logprobs import Head, dense_head
from qerl.model.packing import PackedRow, Sequences, gather_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from qerl.formats.fp8.kv import KVScales


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (T, heads, d), (keys, kv heads, d) and (keys, kv heads, d)


def attend(qkv: QKV, sequences: Sequences, scale: float | None, window: int | None) -> torch.Tensor:
    """(T, heads, d), on CUDA in 16 bit. If a sequence has fewer queries than keys, its queries are the last tokens."""
    if window is None and _BROUGHT and _BROUGHT[0].takes(qkv[0]):
        return _Attend3.apply(*qkv, sequences, scale)
    from torch.nn.attention.varlen import varlen_attn

    # torch's window counts the tokens before the query; (-1, 0) is causal without a window
    left = -1 if window is None else window - 1
    layout = (sequences.query_starts, sequences.key_starts, sequences.longest_query, sequences.longest_key)
    return varlen_attn(*qkv, *layout, scale=scale, window_size=(left, 0), **_gqa_option(*qkv[:2]))


_BROUGHT: list[ModuleType] = []


def bring_forward_3_(module: ModuleType) -> None:
    """Let packed attention use the forward pass of FlashAttention 3 in `module` (`qerl.engine.vllm.flash`) from now on,
    where it takes the queries."""
    _BROUGHT[:] = [module]


class _Attend3(torch.autograd.Function):
    """FlashAttention 3's forward pass, which saves for the backward pass what torch's own would."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, scale: float | None):
        out, sums = _BROUGHT[0].forward((q, k, v), sequences, scale)
        ctx.sequences, ctx.scale = sequences, scale
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        sequences = ctx.sequences
        layout = (sequences.query_starts, sequences.key_starts, sequences.longest_query, sequences.longest_key)
        dropout, causal = 0.0, True
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), *ctx.saved_tensors, *layout, dropout, causal, *_no_dropout(grad.device), scale=ctx.scale
        )
        return *grads, None, None


@cache
def _no_dropout(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A random generator's state, which the backward pass takes but does not read without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, dtype=torch.uint64, device=device)


def _gqa_option(q: torch.Tensor, k: torch.Tensor) -> dict[str, bool]:
    return {"enable_gqa": True} if q.shape[1] != k.shape[1] and _asks_for_gqa() else {}


@cache
def _asks_for_gqa() -> bool:
    """Whether varlen_attn has enable_gqa: torch 2.13 needs it for fewer kv heads, earlier versions do without."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The attention modules of a transformers model, by the number of their layer."""
    return {one.layer_idx: one for one in model.modules() if hasattr(one, "layer_idx") and hasattr(one, "k_proj")}


def set_kv_scales_(model: nn.Module, scales: Mapping[int, KVScales] | None) -> int:
    """Round keys and values of each layer by these scales from now on, or no longer (None); returns how many layers do.

    Raises EngineError unless each attention module gets scales.
    """
    modules = attention_modules(model)
    if scales is not None and set(modules) != set(scales):
        raise EngineError(
            f"scales of keys and values are for {len(scales)} layers, and the model attends in {len(modules)}: write "
            "rollout.kv_cache_dtype: auto"
        )
    for layer, module in modules.items():
        module.kv_scales = None if scales is None else scales[layer]
    return len(modules)


def rounded_kv(module: nn.Module, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of any shape as attention `module` attends to them: rounded if it has scales."""
    scales = getattr(module, "kv_scales", None)
    if scales is None:
        return key, value
    from qerl.formats.fp8.kv import rounded

    return rounded(key, scales.key), rounded(value, scales.value)


NAME = "qerl_packed"
MAX_HEAD_DIM = 256  # flash attention's
UNKNOWN_KEYS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",  # of families that are not CAPPED
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "attention_chunk_size",
)


CAPPED = ("gemma4_text", "gemma4_unified_text")  # model_type of those whose capped logits we compute


def head_of(model: PreTrainedModel, temperature: float) -> Head:
    """The model's head, whose logits are divided by the temperature too."""
    divisor, cap = logit_shape(model.config)
    return dense_head(model.get_output_embeddings(), temperature * divisor, cap)


def logit_shape(config: PretrainedConfig) -> tuple[float, float]:
    """What the model divides its logits by, as Granite does, and their cap, as in Gemma 4, or 0; none has both."""
    cap = config.final_logit_softcapping if config.model_type in CAPPED else None
    return float(getattr(config, "logits_scaling", None) or 1.0), float(cap or 0.0)


def has_states(config: PretrainedConfig) -> bool:
    """Whether some layers have linear attention (`qerl.model.gated_delta`)."""
    return "linear_attention" in (getattr(config, "layer_types", None) or ())


def check_config(config: PretrainedConfig, device: str = "cpu") -> None:
    """Raise EngineError if the model's attention or head computes something that the packed path leaves out, or that
    needs a package on this device which is not installed."""
    if device == "cuda" and has_states(config):
        from qerl.model.gated_delta import fla_rule

        fla_rule()
    for key in UNKNOWN_KEYS:
        if getattr(config, key, None) not in (None, 1.0) and not (config.model_type in CAPPED and "final" in key):
            raise EngineError(
                f"the model's config sets {key}={getattr(config, key)}, which training does not support: take a "
                "Qwen2, Qwen3, Llama or Mistral model"
            )
    if getattr(config, "attention_dropout", 0.0):
        raise EngineError(
            f"the model's config sets attention_dropout={config.attention_dropout}, which training does not support: "
            "set it to 0 in its config.json"
        )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    *,
    sequences: Sequences | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' interface: query (1, heads, T, d), key and value (1, kv heads, T, d) -> (1, T, heads, d).

    With `sliding_window` W a token sees itself and the W - 1 before it. Keys and values are rounded to 8 bits if
    `module` has scales for them. Raises EngineError for what is not supported.
    """
    if attention_mask is not None or dropout or any(kwargs.get(name) is not None for name in ("softcap", "s_aux")):
        raise EngineError("packed attention knows no mask, dropout, softcap or sink: this model cannot be trained")
    if sequences is None:
        raise EngineError(f"{type(module).__name__} does not hand packed sequences on: this model cannot be trained")
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    key, value = rounded_kv(module, key, value)
    # Not indexed by [0]: the gradient of that allocates a tensor of zeros and copies into it with strides.
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if sequences.keys is not None:
        k, v = gather_rows(k, sequences.keys), gather_rows(v, sequences.keys)
    window = sliding_window if sliding_window is not None and sliding_window < sequences.longest_key else None
    fast = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= MAX_HEAD_DIM
    return (attend_flash if fast else attend_each)((q, k, v), sequences, scaling, window)[None], None


def attend_flash(qkv: QKV, sequences: Sequences, scale: float | None, window: int | None) -> torch.Tensor:
    """(T, heads, d) by flash attention, on CUDA in 16 bit."""
    out = attend(qkv, sequences, scale, window)
    if _Switch.deterministic and out.grad_fn is not None:
        make_backward_deterministic(out.grad_fn)
    return out


def attend_each(qkv: QKV, sequences: Sequences, scale: float | None, window: int | None) -> torch.Tensor:
    """The twin of `attend_flash` for any device and dtype; it takes one sequence after another."""
    q, k, v = qkv
    if q.shape[-1] > MAX_HEAD_DIM:  # with grouped heads of that size torch has no kernel but one that keeps all scores
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outputs = []
    bounds = zip(pairwise(sequences.query_starts.tolist()), pairwise(sequences.key_starts.tolist()), strict=True)
    for (start, end), (key_start, key_end) in bounds:
        parts = q[start:end], k[key_start:key_end], v[key_start:key_end]
        one = [part.transpose(0, 1)[None] for part in parts]
        queries, keys = end - start, key_end - key_start
        plain = queries == keys and (window is None or window >= keys)
        out = F.scaled_dot_product_attention(
            *one,
            attn_mask=None if plain else _mask(queries, keys, window or keys, q.device),
            is_causal=plain,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


@contextmanager
def attending_by(name: str, config: PretrainedConfig) -> Iterator[None]:
    """Inside the block the model of `config` attends by the function of that name. Blocks may be nested."""
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


def packed_attention_of(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside the block `model` reads packed rows."""
    return attending_by(NAME, model.config)


class _Switch:
    """A switch that all threads share: recomputed layers call their attention from one of autograd's threads."""

    deterministic = False


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """For forward passes inside the block, flash attention's backward pass sums in a fixed order.

    By default it sums in the order in which the GPU's blocks happen to end.
    """
    before, _Switch.deterministic = _Switch.deterministic, enabled
    try:
        yield
    finally:
        _Switch.deterministic = before


def make_backward_deterministic(node: torch.autograd.graph.Node) -> None:
    """Switch torch to deterministic algorithms while `node` runs backward.

    That is how flash attention is asked for it. It is set for this node alone because other kernels refuse to run then.
    """
    before: list[tuple[bool, bool, bool]] = []

    def switch_on(*_: Any) -> None:
        strict, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        before.append((strict, warns, torch.utils.deterministic.fill_uninitialized_memory))
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False

    def switch_back(*_: Any) -> None:
        strict, warns, fills = before.pop()
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills

    node.register_prehook(switch_on)
    node.register_hook(switch_back)


def hidden_states(model: PreTrainedModel, row: PackedRow) -> torch.Tensor:
    """The last hidden states (M, hidden) at the predicting positions; to be called inside `packed_attention_of`."""
    states = {}
    if has_states(model.config):
        from qerl.model.gated_delta import states_of

        taps = model.config.linear_conv_kernel_dim
        states["states"] = states_of(row.sequences, row.input_ids.shape[1], taps)
    output = model.base_model(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        use_cache=False,
        sequences=row.sequences,
        **states,
        **({} if row.replay is None else {"replay": row.replay}),
    )
    hidden = output.last_hidden_state.squeeze(0)
    # A prompt's last token occurs once in the row and predicts the first token of every completion in its group.
    return gather_rows(hidden, row.predicting)


def _mask(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """(queries, keys) bool for the last `queries` of `keys` tokens; token i sees each j with i - window < j <= i."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < window)


AttentionInterface.register(NAME, packed_attention)
