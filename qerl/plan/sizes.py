"""The sizes that follow from a model's config.json: of weights, adapter, keys and values. Pure numbers, no torch.

In a mixture of experts a token meets the weights of a few of them: `active` counts those, `body` all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.base.nearby import is_path, no_folder
from qerl.checkpoint.experts import FUSED, QKV, Decoder, decoder_of
from qerl.formats.nvfp4.ranks import padded_rank
from qerl.plan.engine_memory import kv_head_bytes


def _known(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **others,
    }


QWEN2 = {"max_position_embeddings": 32768}
QWEN3 = {"max_position_embeddings": 40960, "head_dim": 128, "model_type": "qwen3"}
LLAMA3 = {"max_position_embeddings": 131072}
TIED = {"tie_word_embeddings": True}
A3B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
HEAD_NORMED = ("qwen3", "gemma3", "olmo2", "olmo3", "olmoe")  # the beginning of model_type in config.json


ATTENTION = (*QKV, "o_proj")
KNOWN = {  # by the beginning of the name after the organisation: sizes of models that are not on this disk
    "qwen2.5-0.5b": _known(896, 4864, 24, 14, 2, 151936, **QWEN2, **TIED),
    "qwen2.5-1.5b": _known(1536, 8960, 28, 12, 2, 151936, **QWEN2, **TIED),
    "qwen2.5-3b": _known(2048, 11008, 36, 16, 2, 151936, **QWEN2, **TIED),
    "qwen2.5-7b": _known(3584, 18944, 28, 28, 4, 152064, **QWEN2),
    "qwen2.5-14b": _known(5120, 13824, 48, 40, 8, 152064, **QWEN2),
    "qwen2.5-32b": _known(5120, 27648, 64, 40, 8, 152064, **QWEN2),
    "qwen2.5-72b": _known(8192, 29568, 80, 64, 8, 152064, **QWEN2),
    "qwen3-1.7b": _known(2048, 6144, 28, 16, 8, 151936, **QWEN3, **TIED),
    "qwen3-4b": _known(2560, 9728, 36, 32, 8, 151936, **QWEN3, **TIED),
    "qwen3-8b": _known(4096, 12288, 36, 32, 8, 151936, **QWEN3),
    "qwen3-14b": _known(5120, 17408, 40, 40, 8, 151936, **QWEN3),
    "qwen3-32b": _known(5120, 25600, 64, 64, 8, 151936, **QWEN3),
    "qwen3-30b-a3b": _known(2048, 6144, 48, 32, 4, 151936, **{**QWEN3, "model_type": "qwen3_moe"}, **A3B),
    "llama-3.2-1b": _known(2048, 8192, 16, 32, 8, 128256, **LLAMA3, **TIED, head_dim=64),
    "llama-3.2-3b": _known(3072, 8192, 28, 24, 8, 128256, **LLAMA3, **TIED, head_dim=128),
    "llama-3.1-8b": _known(4096, 14336, 32, 32, 8, 128256, **LLAMA3),
    "llama-3.1-70b": _known(8192, 28672, 80, 64, 8, 128256, **LLAMA3),
    "llama-3.3-70b": _known(8192, 28672, 80, 64, 8, 128256, **LLAMA3),
}


@dataclass(frozen=True)
class ModelSizes:
    """How many weights a model has where, and what follows from that."""

    layers: int
    hidden: int
    projections: dict[str, tuple[int, int]]  # the linears of a decoder layer with a dense MLP: name -> (out, in)
    vocabulary: int
    tied: bool
    kv_heads: int
    head_dim: int
    positions: int | None = None  # the longest context; None if config.json does not say
    head_norms: bool = False  # see `has_head_norms`
    four_bit_inputs: bool = False  # packed linears round their input to 4 bits
    decoder: Decoder = field(default_factory=lambda: Decoder(0))  # which layers have experts

    @property
    def body(self) -> int:
        """Weights of the decoder layers' linears: what is quantized."""
        return self.outside_experts + self.of_experts

    @property
    def active(self) -> int:
        """Those of them that a token is multiplied by."""
        return self.outside_experts + round(self.of_experts * self.decoder.share)

    def met(self, tokens: float) -> float:
        """Those of them that so many tokens are multiplied by between them, if experts are chosen equally often."""
        return self.outside_experts + self.of_experts * self.decoder.share_of(tokens)

    @property
    def of_experts(self) -> int:
        """Weights of all experts."""
        decoder = self.decoder
        return len(decoder.sparse) * decoder.experts * 3 * decoder.width * decoder.hidden

    @property
    def outside_experts(self) -> int:
        """Weights of the other linears: of attention, and of dense MLPs."""
        attention = sum(math.prod(self.projections[name]) for name in ATTENTION)
        mlp = sum(math.prod(shape) for name, shape in self.projections.items() if name not in ATTENTION)
        return self.layers * attention + (self.layers - len(self.decoder.sparse)) * mlp

    @property
    def routers(self) -> int:
        """Weights of the routers, which stay in 16 bits."""
        return len(self.decoder.sparse) * self.decoder.experts * self.decoder.hidden

    @property
    def inner(self) -> int:
        """Numbers between gate and down that a token has at most, over the experts that it gets."""
        dense = self.projections["gate_proj"][0] if len(self.decoder.sparse) < self.layers else 0
        return max(dense, self.decoder.chosen * self.decoder.width)

    @property
    def copies(self) -> int:
        """Hidden states that exist of a token while experts run: one for each that it gets, on one side of them."""
        return self.decoder.chosen

    @property
    def decoded(self) -> int:
        """Bytes of what is decoded for a product at most, in 16 bits: gate and up, of an MLP or a layer's experts."""
        experts = self.decoder.experts * self.decoder.width
        return 2 * 2 * self.hidden * max(self.projections["gate_proj"][0], experts)

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    def weights_bytes(self, format: str) -> float:
        """The checkpoint in memory, with its embeddings and head in 16 bits."""
        outer = self.head * (1 if self.tied else 2) + self.layers * 2 * self.hidden + self.routers
        return self.body * formats.get(format).bytes_per_weight + 2 * outer

    def read_bytes(self, format: str, tokens: float) -> float:
        """Bytes of the checkpoint that a step of `tokens` reads, which may choose the same experts or others."""
        unread = self.body - self.met(tokens)
        return self.weights_bytes(format) - unread * formats.get(format).bytes_per_weight

    def kv_bytes(self, kv_cache_dtype: str = "auto") -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * kv_head_bytes(kv_cache_dtype, self.head_dim)

    def adapter(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of a LoRA of `rank` on the projections `targets`; see `expert_adapter` for experts."""
        return rank * sum(self._layers_with(name) * sum(self.projections[name]) for name in targets)

    def expert_adapter(self, rank: int, shared: bool) -> int:
        """Parameters of a LoRA of `rank` on all experts; `shared`: A of gate and up and B of down are one for all."""
        decoder = self.decoder
        outer = 2 * decoder.hidden * (1 if shared else decoder.experts)
        return len(decoder.sparse) * rank * (outer + decoder.experts * 3 * decoder.width)

    def engine_adapter_bytes(self, rank: int) -> int:
        """The engine's static buffers: A of the fused parts, and their block-diagonal B with all its zeros."""
        padded = padded_rank(rank)
        numbers = 0
        for parts in FUSED:
            rows = sum(self.projections[name][0] for name in parts)
            numbers += self._layers_with(parts[0]) * padded * len(parts) * (rows + self.projections[parts[0]][1])
        return 2 * numbers

    def _layers_with(self, projection: str) -> int:
        return self.layers - (0 if projection in ATTENTION else len(self.decoder.sparse))


def has_head_norms(model_type: object) -> bool:
    """Whether models of this family have norms on queries and keys."""
    return str(model_type).startswith(HEAD_NORMED)


MOST = {  # bounds far beyond every published model: a larger number would only fill memory with an empty model
    "num_hidden_layers": 1000,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "vocab_size": 2**24,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**13,
    "max_position_embeddings": 2**31,
}
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def read_sizes(base: str) -> ModelSizes:
    """The sizes of a model folder, of a known model by its hub id, or of the base of a run or an adapter.

    Raises CheckpointError for anything else.
    """
    from qerl.checkpoint.folder import EMBEDDED
    from qerl.checkpoint.load import local_folder
    from qerl.checkpoint.resolve import model_under
    from qerl.checkpoint.shards import read_json

    base = model_under(base)
    name = base.rpartition("/")[2].lower()
    known = next((sizes for prefix, sizes in KNOWN.items() if name.startswith(prefix)), None)
    if known is not None and not os.path.isdir(base):
        return sizes_of(known, base)
    if base not in EMBEDDED and not os.path.isdir(base):
        what = no_folder(base) if is_path(base) else f"the sizes of {base} are not known here"
        raise CheckpointError(f"{what}: give a folder with its config.json, or one of {', '.join(KNOWN)}")
    return sizes_of(read_json(Path(local_folder(base)) / "config.json"), base)


def check_uncapped(config: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError for a model that caps its logits: neither our attention nor our losses do that."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key) is not None:
            raise CheckpointError(
                f"{name}: {config.get('model_type')} caps its logits ({key}: {config[key]}), which qerl does not "
                "compute: give a Qwen2, Qwen3, Llama or Mistral model"
            )


def check_numbers(config: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError if a size in config.json is no whole number above 0, or larger than any model's."""
    for key, most in MOST.items():
        value = config.get(key)
        if key not in config or (value is None and key not in REQUIRED):
            continue
        if type(value) is not int or not 1 <= value <= most:
            what = "is more than any model has" if type(value) is int and value > most else "is no whole number above 0"
            raise CheckpointError(
                f"{name}: config.json has {key} {value!r:.60}, which {what}: copy the file from the original model"
            )
    if config.get("sliding_window") == 0 and _has_window(config):
        raise CheckpointError(
            f"{name}: config.json has sliding_window 0, with which no token sees any: write null for no window, or "
            "copy the file from the original model"
        )


def _has_window(config: Mapping[str, Any]) -> bool:
    """Whether the model reads sliding_window: Llama never does, Qwen where use_sliding_window says so."""
    kind = str(config.get("model_type"))
    return bool(config.get("use_sliding_window", not kind.startswith(("qwen", "llama"))))


def sizes_of(config: Mapping[str, Any], name: str) -> ModelSizes:
    """The sizes that the keys of config.json give.

    Raises CheckpointError if one is missing or is not a whole number above 0.
    """
    config = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
    check_uncapped(config, name)
    for key in REQUIRED:
        if key not in config:
            raise CheckpointError(f"{name}: config.json has no {key!r}: only dense decoder models are supported")
    check_numbers(config, name)
    hidden, width, heads, layers, vocabulary = (config[key] for key in REQUIRED)
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    if head_dim < 1 or heads % kv_heads:
        raise CheckpointError(
            f"{name}: config.json has hidden_size {hidden}, {heads} attention heads and {kv_heads} of keys and values, "
            "which do not divide one another: copy the file from the original model"
        )
    queries, keys = heads * head_dim, kv_heads * head_dim
    return ModelSizes(
        layers=layers,
        hidden=hidden,
        projections={
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (width, hidden),
            "up_proj": (width, hidden),
            "down_proj": (hidden, width),
        },
        vocabulary=vocabulary,
        tied=bool(config.get("tie_word_embeddings")),
        kv_heads=kv_heads,
        head_dim=head_dim,
        positions=config.get("max_position_embeddings"),
        head_norms=has_head_norms(config.get("model_type")),
        four_bit_inputs=_rounds_inputs(config.get("quantization_config")),
        decoder=decoder_of(config, name),
    )


def _rounds_inputs(quantization: Any) -> bool:
    """Whether a quantization_config says that inputs are rounded to 4 bits."""
    if not isinstance(quantization, Mapping):
        return False
    for each in formats.all_formats():
        if each.four_bit_inputs and each.recognises(quantization):
            return each.activations(quantization) in ("dynamic", "static")
    return False
