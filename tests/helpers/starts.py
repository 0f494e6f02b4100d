"""A small NVFP4 base with a start: the singular vectors of what rounding took, which an oracle can compute again."""

import torch

from qerl.checkpoint.base_start import LORA_A, LORA_B, START, base_digest, write_start
from qerl.checkpoint.shards import TensorReader, read_tensors
from qerl.checkpoint.source import read_source
from qerl.formats import NVFP4
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import make_checkpoint


def dense_weights(source):
    """The 16-bit weights, float32, by module."""
    found = read_source(str(source))
    with TensorReader(found.tensors) as read:
        return {module: read(f"{module}.weight").float() for module in found.quantized}


def decoded_weights(folder):
    """The weights that an NVFP4 folder holds, float32, by module."""
    tensors = read_tensors(folder)
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    with TensorReader(tensors) as read:
        return {
            module: NVFP4.dequantize({part: read(f"{module}.{part}") for part in NVFP4.tensors}, torch.float32)
            for module in modules
        }


def give_start_(folder, source, rank=16, kinds=None):
    """Write start/ of this rank into a quantized folder of `source`, for its linears of these kinds (None: all)."""
    dense, factors = dense_weights(source), {}
    for module, weight in decoded_weights(folder).items():
        if kinds and module.rpartition(".")[2] not in kinds:
            continue
        left, values, right = torch.linalg.svd(dense[module] - weight, full_matrices=False)
        root = values[:rank].sqrt()
        factors[module + LORA_B] = (left[:, :rank] * root).bfloat16()
        factors[module + LORA_A] = (root[:, None] * right[:rank]).bfloat16()
    (folder / START).mkdir(exist_ok=True)
    write_start(folder / START, factors, {"base_digest": base_digest(folder)})


def quantized_with_start(folder, rank=16, **checkpoint):
    """(16-bit checkpoint, NVFP4 folder with a start) of a small model, rounded to nearest."""
    source = make_checkpoint(folder / "source", **checkpoint)
    quantize_checkpoint(str(source), folder / "nvfp4", QuantizeOptions(method="rtn", calibration="none"))
    give_start_(folder / "nvfp4", source, rank)
    return source, folder / "nvfp4"
