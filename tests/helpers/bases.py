"""Small checkpoints in the layout of real ones: config.json, tokenizer files, sharded safetensors, random weights."""

import shutil
from pathlib import Path

import torch

TINY = Path(__file__).parents[2] / "qerl" / "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FAMILIES = ("qwen3", "qwen2", "llama", "mistral")


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}


def write_base(folder, family="qwen3", seed=0, hidden=64, dtype=torch.bfloat16, **changes):
    """A random model of `family` with the embedded model's tokenizer, written as save_pretrained writes it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(TINY / name, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "initializer_range": 0.2,
        **(EXPERTS if family == "qwen3_moe" else {}),
        **changes,
    }
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder
