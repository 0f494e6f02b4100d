"""The tensors of a checkpoint's files, and the checkpoint that llm-compressor itself writes."""

import torch
from safetensors.torch import load_file

from qerl.checkpoint.shards import TensorReader, read_tensors
from quantize.compressor import load_compressor

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def load_all(folder):
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def tensors_in(folder):
    """The tensors under the names that qerl gives them."""
    infos = read_tensors(folder)
    with TensorReader(infos) as read:
        return {name: read(name) for name in infos}


def same_tensors(one, other):
    """Whether two folders hold the same bytes under the same names; other names are an error."""
    first, second = tensors_in(one), tensors_in(other)
    assert set(first) == set(second)
    return all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


def assert_same_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


def llm_compressor(source, out, ignore=("lm_head",)):
    """The checkpoint as llm-compressor's own oneshot writes it."""
    load_compressor()
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    recipe = QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=list(ignore))
    oneshot(model=str(source), tokenizer=str(source), recipe=recipe, output_dir=str(out))
    return load_all(out)
