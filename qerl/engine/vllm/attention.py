"""vLLM's FlashAttention backend, with our kernel for the steps in which each sequence has one new token.

FlashAttention 3 handles those in tiles of 128 tokens and three launches (writing new tokens to the cache, attention,
the sum over splits): for a 7B model on an H200, 14.6 us per layer for one sequence, and 62 us for 256 sequences of 140
tokens, whose keys and values are 73 MB. Ours is one launch. All other steps are left to FlashAttention. Remove when
vLLM's own decode attention is no slower.

With keys and values in 8 bits FlashAttention 3 would also round queries and the weights of the softmax, which neither
the trainer nor our kernel does, and FlashAttention 2, that of other cards than Hopper, takes none. So all other steps
are computed there by vLLM's Triton kernel, which decodes keys and values and multiplies in 16 bits. Layers that our
kernel does not serve are FlashAttention 3's; `opening.attention_config` leaves models with such layers to vLLM
elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVQuantMode

from qerl.model.decode_attention import MAX_SEQUENCES, Batch, Cache, Space, attend_, rotates, takes

EIGHT_BITS = ("fp8", "fp8_e4m3")


def rotates_inside(layer: str) -> bool:
    """Whether our kernel serves this pass in the attention layer of that name, and rotates queries and keys as well.

    A row of graphs with attention between them rotates before, since it was captured without knowing the batch. The
    layer is the pass's own: vLLM gives the rotation of an engine before to the next one with the same parameters.
    """
    context = get_forward_context()
    known = isinstance(context.attn_metadata, dict) and context.cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE
    if not known or getattr(context.attn_metadata.get(layer), "decode_space", None) is None:
        return False
    return getattr(getattr(context.no_compile_layers.get(layer), "impl", None), "angles", None) is not None


class DecodeBuilder(FlashAttentionMetadataBuilder):
    """Plans the work of our kernel instead of FlashAttention's in the steps that it handles."""

    # A graph captured for one new token per sequence contains our kernel, so no other batch may replay it.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        sequences = self.vllm_config.scheduler_config.max_num_seqs
        self.space = None
        # Layers with a window are left to FlashAttention, whose builder must then see the first step unchanged.
        whole = getattr(self.kv_cache_spec, "sliding_window", None) is None and sequences <= MAX_SEQUENCES
        self._in_8_bits = self.cache_config.cache_dtype in EIGHT_BITS
        if whole and takes(self.num_heads_q, self.num_heads_kv, self.headdim):
            bits = 8 if self._in_8_bits else 16
            self.space = Space(sequences, self.num_heads_kv, self.headdim, self.device, bits)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        decode = common_attn_metadata.max_query_len == 1 and common_prefix_len == 0 and self.space is not None
        unplanned = fast_build or decode or (self._in_8_bits and self.space is not None)
        metadata = super().build(common_prefix_len, common_attn_metadata, unplanned)
        metadata.decode_space = self.space if decode else None
        if decode:
            self.space.plan_(metadata.seq_lens[: metadata.num_actual_tokens])
        return metadata


class DecodeImpl(FlashAttentionImpl):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        plain = self.attn_type == AttentionType.DECODER and self.sliding_window == (-1, -1)
        plain = plain and self.alibi_slopes is None and self.sinks is None and not self.logits_soft_cap
        plain = plain and self.kv_sharing_target_layer_name is None
        plain = plain and self.kv_cache_dtype in ("auto", "bfloat16", *EIGHT_BITS)
        self.decodes = plain and takes(self.num_heads, self.num_kv_heads, self.head_size)
        self._in_8_bits = self.decodes and self.kv_cache_dtype in EIGHT_BITS
        self._shape = (self.num_kv_heads, self.head_size, 8 if self._in_8_bits else 16)
        self.angles: torch.Tensor | None = None
        if self._in_8_bits:  # vLLM then hands queries on as they are
            self.supports_quant_query_input = False

    def rotate_by_(self, angles: torch.Tensor) -> None:
        """Rotate queries and keys by these where `rotates_inside` says so; nothing before does it then."""
        self.angles = angles.to(torch.bfloat16)

    def can_rotate(self) -> bool:
        return self.decodes and rotates(*self._shape[1:])

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        if attn_metadata is None:  # in vLLM's profile run
            return output.fill_(0)
        space = attn_metadata.decode_space if self.decodes else None
        inside = rotates_inside(layer.layer_name)
        if space is None or (space.key_heads, space.head_dim, space.bits) != self._shape:
            if inside:
                raise RuntimeError(f"{layer.layer_name} is not of the shape that its decode steps were planned for")
            if self.kv_sharing_target_layer_name is None and key is not None:
                self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            if self._in_8_bits:
                return self._attend_decoded_(layer, query, kv_cache, attn_metadata, output)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **options)
        count = attn_metadata.num_actual_tokens
        angles = self.angles if inside else None
        batch = Batch(attn_metadata.block_table, attn_metadata.seq_lens, attn_metadata.slot_mapping, angles)
        new = (query[:count], key[:count], value[:count])
        scales = (layer._k_scale, layer._v_scale) if self._in_8_bits else (None, None)
        attend_(output[:count], new, Cache(*kv_cache.unbind(1), scales), batch, self.scale, space)
        return output

    def _attend_decoded_(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashAttentionMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Fill `output` by 16-bit products with the keys and values of the cache in 8 bits, decoded by their scales."""
        count = metadata.num_actual_tokens
        unified_attention(
            query[:count],
            *kv_cache.view(torch.float8_e4m3fn).unbind(1),
            output[:count],
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            window_size=self.sliding_window,
            block_table=metadata.block_table,
            softcap=0,
            q_descale=None,
            k_descale=layer._k_scale,
            v_descale=layer._v_scale,
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        )
        return output


class DecodeBackend(FlashAttentionBackend):
    forward_includes_kv_cache_update = True

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in EIGHT_BITS or super().supports_kv_cache_dtype(kv_cache_dtype)

    @staticmethod
    def get_name() -> str:
        return AttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> type[DecodeImpl]:
        return DecodeImpl

    @staticmethod
    def get_builder_cls() -> type[DecodeBuilder]:
        return DecodeBuilder


def attention_name(model: torch.nn.Module) -> str:
    """The attention in a model's decode steps: "qerl" if our kernel runs, otherwise vLLM's name for it."""
    impls = [module.impl for module in model.modules() if isinstance(module, Attention)]
    ours = {isinstance(impl, DecodeImpl) and impl.decodes for impl in impls}
    names = {"qerl"} if True in ours else set()
    if False in ours:
        names.add("flash attention" if any(isinstance(impl, FlashAttentionImpl) for impl in impls) else "vLLM's own")
    return " + ".join(sorted(names))


def register() -> None:
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{DecodeBackend.__name__}")
