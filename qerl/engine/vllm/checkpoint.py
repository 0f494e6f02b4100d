"""Checks what vLLM's fused linears and kernels require of a quantized checkpoint, from its headers and global scales.

Loading would check the same in `linear.py`, but only after all weights have been read. No vllm.
"""

from __future__ import annotations

from pathlib import Path

from qerl import formats
from qerl.base.devices import FP8_CAPABILITY
from qerl.base.errors import ENGINE, KERNEL, CheckpointError, EngineError
from qerl.checkpoint.experts import Decoder
from qerl.checkpoint.linears import fused
from qerl.checkpoint.load_experts import check_complete, check_served_family
from qerl.checkpoint.shards import read_json, read_tensors
from qerl.checkpoint.shared_scales import check_shared
from qerl.formats import BF16, NVFP4
from qerl.formats.base import Format
from qerl.formats.fp8.format import rounds_input
from qerl.formats.fp8.layout import BLOCK as FP8_BLOCK
from qerl.formats.fp8.layout import CODES
from qerl.formats.fp8.layout import KERNEL_ROWS as FP8_ROWS
from qerl.formats.nvfp4.layout import GLOBAL_SCALE, PACKED


def check_experts_served(folder: Path, format: Format, decoder: Decoder) -> None:
    """Raise EngineError for experts that vLLM would not serve as they are, and CheckpointError if some are missing."""
    from qerl.formats.nvfp4.kernel_experts import takes

    if not decoder.has_experts:
        return
    check_served_family(decoder, folder)
    if format.name not in (NVFP4.name, BF16.name):
        raise EngineError(
            f"{folder} has experts in {format.label}, and vLLM serves them in NVFP4 or 16 bits here: quantize the "
            f"16-bit model with `--scheme {NVFP4.scheme}`"
        )
    if format.quantized and not takes(decoder.hidden, decoder.width):
        raise EngineError(
            "%s has experts of %d x %d, which vLLM's Marlin kernel does not multiply by: write %s",
            *(folder, decoder.width, decoder.hidden, ENGINE.set_to("transformers")),
        )
    check_complete(decoder, format, read_tensors(folder))


def check_checkpoint(folder: Path, kernel: str) -> None:
    """Raise EngineError if `kernel` does not take a shape, or if fused linears have different global scales."""
    from qerl.formats.nvfp4 import gemm

    tensors = read_tensors(folder)
    groups = fused(NVFP4.quantized_linears(tensors))
    ours = [group for group in groups if ".experts." not in group[0]] if kernel == "qerl" else []
    for modules in ours:
        shapes = [tensors[f"{module}.{PACKED}"].shape for module in modules]
        rows, columns = sum(shape[0] for shape in shapes), 2 * shapes[0][1]
        if not gemm.takes(rows, columns):
            raise EngineError(
                "%s is %d x %d, which qerl's kernel does not take: write %s",
                *(", ".join(modules), rows, columns, KERNEL.set_to("humming or marlin")),
            )
    try:
        check_shared(groups, tensors, GLOBAL_SCALE, str(folder))
    except CheckpointError as error:
        raise EngineError("%s", error) from error


def check_fp8(folder: Path, format: Format) -> None:
    """Raise EngineError if a linear of an FP8 folder does not suit vLLM's blocks, or the card's products."""
    import torch

    config = read_json(folder / "config.json")["quantization_config"]
    capability = torch.cuda.get_device_capability()
    if rounds_input(config) and capability < FP8_CAPABILITY:
        raise EngineError(
            f"{folder} multiplies activations in FP8, which needs compute capability {FP8_CAPABILITY} (Ada, Hopper or "
            f"newer), and {torch.cuda.get_device_name()} has {capability}: quantize the model with `--scheme "
            f"{formats.DEFAULT.name}`, whose kernels run there"
        )
    tensors = read_tensors(folder)
    for modules in fused(format.quantized_linears(tensors)):
        shapes = {module: tensors[f"{module}.{CODES}"].shape for module in modules}
        for place, (module, (rows, columns)) in enumerate(shapes.items()):
            last = place == len(shapes) - 1
            if columns % FP8_BLOCK or rows % (FP8_ROWS if last else FP8_BLOCK) or module == "lm_head":
                raise EngineError(
                    "%s is %d x %d, and vLLM takes FP8 in linears of decoder layers with columns (and rows of what it "
                    "fuses) in whole blocks of %d: leave it in 16 bits (`qerl quantize --ignore`, or "
                    "qat.quant_cfg.ignore), or write %s",
                    *(module, rows, columns, FP8_BLOCK, ENGINE.set_to("transformers")),
                )
