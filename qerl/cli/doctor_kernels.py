"""Which of our kernels work on this card: each does a small task, compared with its twin in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from qerl import formats
from qerl.base.devices import FP8_CAPABILITY, VLLM_ATTENDS
from qerl.base.errors import ConfigError
from qerl.cli.doctor import Check
from qerl.formats.cuda.nvrtc import capability, has_kernels, has_portable_kernels
from qerl.formats.fp8 import kv, training
from qerl.formats.fp8 import reference as fp8
from qerl.formats.nvfp4 import decode, gemm, lora, slab_layout, tuning
from qerl.formats.nvfp4.kernel_layout import HUMMING_WGMMA, MARLIN, QERL, KernelLayout, KernelWeight, dequantize
from qerl.formats.nvfp4.layout import BLOCK
from qerl.model.decode_attention import Batch, Cache, Space, attend_, reference_attend_

ROWS, COLUMNS, TOKENS, RANK = 256, 512, 8, 16
KV_SCALE = 2.0**-6  # of normal keys and values in 8 bits
ROUNDING = 1e-2  # relative error of a product whose values are stored in bfloat16
REMEDY = "compare driver and versions with the tested ones above; with those, it is a bug of qerl: report it"

Pair = tuple[torch.Tensor, torch.Tensor]  # what the kernel gives, and what its twin gives


def kernel_checks() -> list[Check]:
    """One line per kernel; one line for all if there is no card."""
    if not torch.cuda.is_available():
        return [Check("ok", "kernels", "need a CUDA card; without one the plain torch twins run")]
    device = torch.device("cuda", torch.cuda.current_device())
    found = kernel_check("kernel decode (triton)", lambda: _triton_decode(device), exact=True)
    found = [found, *_fp8_checks(device)]
    if has_portable_kernels(device) and not has_kernels(device):
        return [
            *found,
            kernel_check("kernel decode (cuda)", lambda: _cuda_decode(device, (QERL,)), exact=True),
            kernel_check("kernel product (cuda, without Hopper's instructions)", lambda: _cuda_product(device)),
            *_attention_checks(device),
            Check("ok", "kernel lora (cuda)", "not used on this card: Hopper alone"),
            Check("ok", "kernel choice", "a guess on this card: compare rollout.kernel: marlin"),
            _tilings(device),
        ]
    if not has_kernels(device):
        why = "not used here: they need a card from Ampere on, and the CUDA bindings that torch brings"
        return [*found, Check("ok", "kernel decode, product, lora, attention (cuda)", why)]
    return [
        *found,
        kernel_check("kernel decode (cuda)", lambda: _cuda_decode(device, (QERL, HUMMING_WGMMA, MARLIN)), exact=True),
        kernel_check("kernel product (cuda)", lambda: _cuda_product(device)),
        kernel_check("kernel lora (cuda)", lambda: _cuda_lora(device)),
        *_attention_checks(device),
        _tilings(device),
    ]


def _attention_checks(device: torch.device) -> list[Check]:
    what, of = "kernel attention (cuda)", capability(device)
    if of[0] == VLLM_ATTENDS:
        return [Check("ok", what, "not used on this card: vLLM attends")]
    found, what = [kernel_check(what, lambda: _cuda_attention(device))], "kernel attention, 8-bit cache (cuda)"
    if of < FP8_CAPABILITY:
        return [*found, Check("ok", what, f"not on compute capability {of}, which has no FP8")]
    return [*found, kernel_check(what, lambda: _cuda_attention(device, bits=8))]


def _tilings(device: torch.device) -> Check:
    """How our product divides its work on this card, and how that is known."""
    card = tuning.card_at(device)
    try:
        return Check("ok", "kernel tilings", tuning.said_of(tuning.table_of(card), card.capability))
    except ConfigError as error:
        return Check("warning", "kernel tilings", "the defaults", str(error))


def _fp8_checks(device: torch.device) -> list[Check]:
    """Decoding and packing FP8 weights, which any card can, and the products of both sides in FP8."""
    found = [
        kernel_check("kernel decode fp8 (triton)", lambda: _fp8_decode(device), exact=True),
        kernel_check("kernel pack fp8 (triton)", lambda: _fp8_pack(device), exact=True),
    ]
    what, of = "kernel product fp8 (vllm)", torch.cuda.get_device_capability(device)
    if of < FP8_CAPABILITY:
        less = f"not on compute capability {of}, which has no FP8: train on {formats.DEFAULT.label} weights"
        return [*found, Check("ok", what, less)]
    found.append(kernel_check("kernel product fp8, one scale (torch)", lambda: _fp8_tensorwise(device)))
    if find_spec("vllm") is None:
        return [*found, Check("ok", what, "needs vllm; without it the plain torch twin runs")]
    return [*found, kernel_check(what, lambda: _fp8_product(device))]


def kernel_check(what: str, run: Callable[[], Pair], exact: bool = False) -> Check:
    """Run a kernel and its twin and compare them: bit by bit if `exact`, else up to bfloat16 rounding."""
    try:
        value, expected = run()
        difference = (value.double() - expected.double()).norm() / expected.double().norm()
        error = difference.item()  # waits for the kernel: its errors come here
    except Exception as problem:  # of a compiler, a launch or a missing package: the kernel does not work here
        line = (str(problem).strip().splitlines() or [""])[0]
        return Check("error", what, f"{type(problem).__name__}: {line[:200]}", REMEDY)
    if not (error == 0.0 if exact else error <= ROUNDING):
        return Check("error", what, f"wrong values: relative error {error:.1e}", REMEDY)
    return Check("ok", what, "equal to its twin" if exact else f"relative error {error:.0e} to its twin")


def _triton_decode(device: torch.device) -> Pair:
    from qerl.formats.nvfp4.kernels import dequantize_

    layouts = (HUMMING_WGMMA, MARLIN)
    outs = [torch.empty(ROWS, COLUMNS, dtype=torch.float32, device=device) for _ in layouts]
    for out, layout in zip(outs, layouts, strict=True):
        dequantize_(out, _weight(layout, device))
    # torch divides by a number exactly on a CPU alone
    twins = [dequantize(_weight(layout, torch.device("cpu")), torch.float32) for layout in layouts]
    return torch.cat(outs), torch.cat(twins).to(device)


def _fp8_decode(device: torch.device) -> Pair:
    from qerl.formats.fp8 import kernels

    codes, scale = fp8.quantize(_normal((ROWS, COLUMNS), torch.device("cpu")))
    out = kernels.dequantize(codes.to(device), scale.to(device), torch.float32)
    return out, fp8.dequantize(codes, scale, torch.float32).to(device)


def _fp8_pack(device: torch.device) -> Pair:
    from qerl.formats.fp8 import kernels

    weight = _normal((ROWS, COLUMNS), torch.device("cpu"))
    expected, codes = fp8.quantize(weight), torch.empty(ROWS, COLUMNS, dtype=fp8.E4M3, device=device)
    scale = torch.empty_like(expected.scale, device=device)
    kernels.pack_(weight.to(device), codes, scale, "pow2")
    return fp8.dequantize(codes, scale, torch.float32), fp8.dequantize(*expected, torch.float32).to(device)


def _fp8_tensorwise(device: torch.device) -> Pair:
    sides = [_normal(shape, torch.device("cpu")) for shape in ((TOKENS, COLUMNS), (ROWS, COLUMNS))]
    rounded = [training.quantize_tensor(side.to(device)) for side in sides]
    x, weight = (training.quantize_tensor(side) for side in sides)
    twin = (x.codes.float() @ weight.codes.float().t()) * (x.scale * weight.scale)
    return training.scaled_product(*rounded, torch.bfloat16), twin.to(device)


def _fp8_product(device: torch.device) -> Pair:
    from qerl.engine.vllm.fp8 import product

    weight, x = fp8.quantize(_normal((ROWS, COLUMNS), device)), _normal((TOKENS, COLUMNS), device)
    return product(x, *weight, "pow2"), fp8.product(x.float(), weight)


def _cuda_decode(device: torch.device, layouts: tuple[KernelLayout, ...]) -> Pair:
    weights = [_weight(layout, device) for layout in layouts]
    outs = [decode.decode_(torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=device), each) for each in weights]
    return torch.cat(outs), torch.cat([decode.reference_decoded(each) for each in weights])


def _cuda_product(device: torch.device) -> Pair:
    weight, x, adapter = _weight(QERL, device), _normal((TOKENS, COLUMNS), device), _adapter(device)
    out = gemm.split_product(x, weight, None, adapter)
    return out, gemm.reference_product(x, weight, None, adapter)


def _cuda_lora(device: torch.device) -> Pair:
    out, x, adapter = _normal((TOKENS, ROWS), device), _normal((TOKENS, COLUMNS), device), _adapter(device)
    expected = lora.reference_add(out, x, adapter)
    return lora.add_(out, x, adapter), expected


def _cuda_attention(device: torch.device, bits: int = 16) -> Pair:
    heads, key_heads, head_dim, length = 8, 2, 128, 100
    query, key = _normal((heads, head_dim), device)[None], _normal((key_heads, head_dim), device)[None]
    cache = _normal((2 * 7 * 16, key_heads * head_dim), device).view(2, 7, 16, key_heads, head_dim)  # pages of 16
    pages = torch.arange(7, dtype=torch.int32, device=device)[None]
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    batch = Batch(pages, lengths, torch.tensor([length - 1], device=device))
    space, new, scale = Space(1, key_heads, head_dim, device, bits), (query, key, key), head_dim**-0.5
    space.plan_(lengths)
    held = Cache(*cache)
    if bits == 8:
        scales = torch.full((2,), KV_SCALE, device=device)
        held = Cache(*kv.encode(cache, KV_SCALE).view(torch.uint8), tuple(scales))
    out = attend_(torch.empty_like(query), new, held, batch, scale, space)
    return out, reference_attend_(torch.empty_like(query), new, held, batch, scale)


def _adapter(device: torch.device) -> lora.Adapter:
    lora_a = _normal((RANK, COLUMNS), device) / 32  # the base then has most of the product
    return lora.Adapter(lora_a, _normal((ROWS, RANK), device), (ROWS,))


def _weight(layout: KernelLayout, device: torch.device) -> KernelWeight:
    """A random weight.

    In our own layout random codes and scales are packed. In the others any words and scales are a weight, except for
    scales that are NaN (e4m3) or zero (Marlin).
    """
    generator = torch.Generator().manual_seed(0)
    low, high = (60, 120) if layout.marlin_scales else (0, 0x7F)
    scales = torch.randint(low, high, (COLUMNS // BLOCK, ROWS), generator=generator, dtype=torch.uint8)
    scales = scales if layout.marlin_scales else scales.view(torch.float8_e4m3fn)
    if layout is QERL:
        packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=generator, dtype=torch.uint8)
        words, scales = slab_layout.pack(packed, scales.t().contiguous())
    else:
        words = torch.randint(-(2**31), 2**31 - 1, (COLUMNS // BLOCK, 2 * ROWS), generator=generator, dtype=torch.int32)
    return KernelWeight(layout, words.to(device), scales.to(device), ROWS, COLUMNS, global_scale=1000.0)


def _normal(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] + shape[1])
    return torch.randn(shape, generator=generator).bfloat16().to(device)
