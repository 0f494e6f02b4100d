"""Small checkpoints in the layouts that transformers writes, and folders that only look like checkpoints."""

import json
import math
import struct
from pathlib import Path

from qerl.checkpoint.shards import DTYPE_BYTES

LAYOUTS = ("qwen2", "qwen3", "llama", "mistral")
EXPERT_LAYOUTS = ("qwen3_moe", "olmoe", "mixtral")
CLASSES = {"qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"}
EXPERTS = {  # config keys of models with four experts, of which each token sees two
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
PROJECTIONS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (112, 64),
    "mlp.up_proj": (112, 64),
    "mlp.down_proj": (64, 112),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_checkpoint(folder, layout="qwen2", layers=2, dtype="bfloat16", max_shard_size="100KB", seed=0, **config):
    """Let transformers save a model with random weights (biases and norms too) and a tokenizer. Returns the folder."""
    import torch
    import transformers

    defaults = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "tie_word_embeddings": layout == "qwen3", "eos_token_id": 2, "pad_token_id": 0, **EXPERTS.get(layout, {}),
    }  # fmt: skip
    settings = getattr(transformers, f"{CLASSES.get(layout, layout.capitalize())}Config")(**{**defaults, **config})
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, 0.3 if "embed" in name else 0.1)
            parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(folder)
    return Path(folder)


def make_tokenizer():
    """A byte-level BPE tokenizer of 300 tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = ["What is 3 plus 4? The answer is 7."] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_safetensors(path, tensors):
    """Write a safetensors file whose data are zeros; `tensors` maps names to (dtype, shape). Needs no torch."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + DTYPE_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))


def layout_tensors(layers=2, dtype="BF16", tied=False):
    """Names, dtypes and shapes of a Llama-layout model, for `write_safetensors`."""
    tensors = {"model.embed_tokens.weight": (dtype, (320, 64)), "model.norm.weight": (dtype, (64,))}
    if not tied:
        tensors["lm_head.weight"] = (dtype, (320, 64))
    for layer in range(layers):
        for name, shape in PROJECTIONS.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = (dtype, shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = (dtype, (64,))
    return tensors


def fake_checkpoint(folder, tensors=None, tokenizer=True, **config):
    """A folder with config.json, a model.safetensors of zeros, and a tokenizer.json that no test opens."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": False, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    write_safetensors(folder / "model.safetensors", layout_tensors() if tensors is None else tensors)
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder
