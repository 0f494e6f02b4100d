"""Small mixtures of experts as checkpoints, in 16 bits and packed."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from qerl import formats
from qerl.checkpoint.experts import QKV, decoder_of
from qerl.checkpoint.shards import read_json
from tests.helpers.checkpoint_factory import make_checkpoint


def make_moe(folder, **changes):
    """A random Qwen3-MoE with four experts, two for each token; its experts are wide enough to tell them apart."""
    return make_checkpoint(folder, "qwen3_moe", max_shard_size="1GB", **changes)


def pack_moe(source, folder, format_name="nvfp4"):
    """`source` in a quantized format, by the format's own arithmetic: every linear but the head.

    Returns the folder of the packed one, and that of a 16-bit twin with the decoded weights, in float32.
    """
    format, decoder = formats.get(format_name), decoder_of(read_json(source / "config.json"), "test")
    stored = load_file(source / "model.safetensors")
    twin = {name: tensor.float() for name, tensor in stored.items()}
    for layer in range(decoder.layers):
        attention = [tuple(f"model.layers.{layer}.self_attn.{name}" for name in QKV)]
        attention.append((f"model.layers.{layer}.self_attn.o_proj",))
        experts = [group for each in decoder.experts_of(layer) for group in ((each.gate, each.up), (each.down,))]
        for group in attention + experts:
            packed = format.quantize([stored.pop(f"{name}.weight") for name in group])
            for name, tensors in zip(group, packed, strict=True):
                stored |= {f"{name}.{part}": tensor for part, tensor in tensors.items()}
                twin[f"{name}.weight"] = format.dequantize(tensors, torch.float32)
    config = {"quantization_config": format.quantization_config(["lm_head"])}
    return _written(source, folder / "packed", stored, config), _written(source, folder / "twin", twin, {})


def _written(source, folder, tensors, changes):
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(read_json(source / "config.json") | changes))
    return folder
