"""Weights packed as vLLM 0.25.1 packs them for Marlin, transcribed from the sources that are named."""

import torch

from qerl.formats import NVFP4
from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.kernel_layout import KernelExperts, marlin_scale_factor


def marlin_words(code):
    """`repack_tile` in csrc/quantization/marlin/gptq_marlin_repack.cu: 4 bits, no permutation."""
    rows, columns = code.shape
    out = torch.zeros(columns // 16, rows * 2, dtype=torch.int64)
    tiles = code.long().view(rows // 64, 64, columns // 16, 16).permute(2, 0, 1, 3)  # k tile, n tile, n, k
    for thread in range(32):
        for warp in range(4):
            n, k = warp * 16 + thread // 4, thread % 4 * 2
            values = [tiles[:, :, n + add, k + off] for add in (0, 8) for off in (0, 1, 8, 9)]
            packed = sum(values[v] << (4 * i) for i, v in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
            out[:, torch.arange(rows // 64) * 128 + thread * 4 + warp] = packed
    return out.to(torch.int32)


def marlin_scales(scale, factor):
    """`marlin_permute_scales` and `nvfp4_marlin_process_scales`, marlin_utils.py and marlin_utils_fp4.py."""
    turned = scale.to(torch.float32).t().contiguous().half()
    perm = [i + 8 * j for i in range(8) for j in range(8)]
    turned = turned.reshape(-1, 64)[:, perm].reshape(-1, scale.shape[0])
    turned = turned.view(-1, 4)[:, [0, 2, 1, 3]].view(turned.size(0), -1)
    turned = (turned.float() * factor).half() * 2**7
    turned[turned < 2] = 0
    return (turned.view(torch.int16) << 1).view(torch.uint8)[:, 1::2].contiguous()


def marlin_experts(matrices, spread=1.0):
    """(experts in Marlin's layout, the decoded weights in float32) of `matrices` (experts, out, in).

    Each expert has a global scale of its own, which `spread` keeps from being a power of two.
    """
    packed = [NVFP4.quantize([matrix], reference.global_scale(spread * matrix.abs().max()))[0] for matrix in matrices]
    scales = torch.stack([each["weight_scale"] for each in packed])
    factor = marlin_scale_factor(scales)
    experts = KernelExperts(
        torch.stack([marlin_words(reference.unpack_codes(each["weight_packed"])) for each in packed]),
        torch.stack([marlin_scales(each, factor) for each in scales]),
        tuple(matrices.shape),
        torch.cat([each["weight_global_scale"] for each in packed]),
        factor,
    )
    return experts, torch.stack([NVFP4.dequantize(each, torch.float32) for each in packed])
