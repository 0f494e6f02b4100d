"""Random weights and adapters for the product kernels, and how far a product may be from the exact one."""

import pytest
import torch

from qerl.formats.nvfp4 import slab_layout
from qerl.formats.nvfp4.kernel_layout import HUMMING_MMA, HUMMING_WGMMA, MARLIN, QERL, KernelWeight
from qerl.formats.nvfp4.lora import Adapter

LAYOUTS = {"qerl": QERL, "wgmma": HUMMING_WGMMA, "mma": HUMMING_MMA, "marlin": MARLIN}
IN_ALL_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def random_weight(rows, columns, layout=QERL, device="cpu", seed=0):
    """A weight of random codes, with block scales from all of e4m3, of which a tenth are zero.

    For vLLM's kernels it has random words and scales, with rows padded as Humming pads them. The same `seed` gives the
    same weight within a test.
    """
    generator = torch.Generator().manual_seed(torch.initial_seed() + seed)
    if layout is QERL:
        packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(0, 0x7F, (rows, columns // 16), generator=generator, dtype=torch.uint8)
        scales[torch.rand(scales.shape, generator=generator) < 0.1] = 0
        words, scales = slab_layout.pack(packed.to(device), scales.view(torch.float8_e4m3fn).to(device))
        return KernelWeight(layout, words, scales, rows, columns, global_scale=1000.0)
    padded = -(-rows // 256) * 256
    words = torch.randint(-(2**31), 2**31 - 1, (columns // 16, 2 * padded), generator=generator, dtype=torch.int32)
    low, high = (60, 120) if layout.marlin_scales else (0, 0x7F)  # 0x7f is e4m3's NaN; Marlin stores no subnormals
    scales = torch.randint(low, high, (columns // 16, padded), generator=generator, dtype=torch.uint8)
    scales = scales if layout.marlin_scales else scales.view(torch.float8_e4m3fn)
    return KernelWeight(layout, words.to(device), scales.to(device), rows, columns, global_scale=1000.0)


def error(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


def assert_rounded(value, expected):
    """Hold `out` to bfloat16 rounding: 2.5e-3 bounds many outputs, but a few, of which one dominates, can be worse."""
    assert error(value, expected) < max(2.5e-3, 1.5 * error(expected.bfloat16(), expected))


def random_adapter(rows, columns, ranks, parts, device="cpu", size=1.0):
    """Factors whose B consists of blocks on the diagonal; `ranks` are those of the parts."""
    a = torch.randn(ranks * len(parts), columns, device=device).mul_(0.05).bfloat16()
    b = torch.zeros(rows, ranks * len(parts), device=device, dtype=torch.bfloat16)
    for index, part in enumerate(parts):
        start = sum(parts[:index])
        b[start : start + part, ranks * index : ranks * (index + 1)].normal_(0, size)
    return Adapter(a, b, tuple(parts))
