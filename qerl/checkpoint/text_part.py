"""The text part of a model for pictures and text, as a text model of its own; and what is missing for others.

A checkpoint for pictures and text holds a decoder under `text_config`, with its tensors under a prefix. Without
pictures its positions are those of a text model, so that it computes what the text model of that family computes. What
is read here are config and headers; no torch is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qerl.base.errors import CheckpointError
from qerl.checkpoint.shards import TensorInfo

# model_type of the text part -> that of the text model, and its class in transformers.
TEXT_MODELS = {
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "ministral3": ("ministral3", "Ministral3ForCausalLM"),
    "gemma3_text": ("gemma3_text", "Gemma3ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
}
# The decoder's tensors, as the hub and transformers 5 name them.
PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
PICTURES = ("model.visual.", "model.vision")  # begins what is no text under the last of them
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
FROM_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
OF_PICTURES = ("mrope_section", "mrope_interleaved")  # how positions of pictures are rotated

# What a tensor's name says of a layout that is not supported: the first that it holds.
MISSING = {
    "linear_attn.": "layers with linear attention, whose state no packed row resets",
    ".mamba.": "layers with a state space, whose state no packed row resets",
    ".conv.": "layers with convolutions, which would mix packed rows",
    "embed_tokens_per_layer": "embeddings for each layer",
    "experts.gate_up_proj": "all experts of a layer in one tensor",
    "expert": "experts in this layout",
    "qkv_proj": "q, k and v in one matrix",
    "gate_up_proj": "gate and up in one matrix",
    "self_attn.q_a_proj": "latent attention",
    "visual": "a part that reads pictures",
    "vision": "a part that reads pictures",
}
NO_GATE = "an MLP with a gate"


def missing_part(tensor: str) -> str | None:
    """What a tensor with this name belongs to that qerl does not have; None if the name does not say."""
    return next((part for word, part in MISSING.items() if word in tensor), None)


def text_part(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The config and the tensors of a folder's text part, under the names of the text model.

    Raises CheckpointError, which says what is missing, for a text part of another family.
    """
    text = config["text_config"]
    kind = text.get("model_type") if isinstance(text, dict) else None
    prefix = next((each for each in PREFIXES if any(name.startswith(f"{each}layers.") for name in tensors)), None)
    if kind not in TEXT_MODELS or prefix is None:
        names = [name for name in tensors if prefix is None or name.startswith(prefix)]
        part = next((part for name in names if (part := missing_part(name))), f"a text part of the type {kind}")
        raise CheckpointError(
            f"{folder} is a model for pictures and text ({config.get('model_type')}), and qerl does not support "
            f"{part}: give a model whose text part is one of {', '.join(TEXT_MODELS)}, or a text model"
        )
    model_type, architecture = TEXT_MODELS[kind]
    own = {key: config[key] for key in FROM_WHOLE if key in config and text.get(key) is None}
    rope = {
        key: {name: value for name, value in text[key].items() if name not in OF_PICTURES}
        for key in ("rope_parameters", "rope_scaling")
        if isinstance(text.get(key), dict)
    }
    own |= {key: config[key] for key in ("tie_word_embeddings",) if key in config}  # the whole model's is what counts
    made = {**text, **own, **rope, "model_type": model_type, "architectures": [architecture]}
    decoder = {
        name: info for name, info in tensors.items() if name.startswith(prefix) and not name.startswith(PICTURES)
    }
    found = {f"model.{name.removeprefix(prefix)}": info for name, info in decoder.items()}
    head = next((tensors[name] for name in HEADS if name in tensors), None)
    found |= {"lm_head.weight": head} if head is not None else {}
    stored = {id(info): name for name, info in tensors.items()}
    return made, {name: replace(info, stored_as=info.stored_as or stored[id(info)]) for name, info in found.items()}
