"""Which kernel multiplies by the packed weights, and its compilation while vLLM is still being imported."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import KERNEL, CheckpointError, EngineError, MissingExtraError
from qerl.engine.options import KERNELS
from qerl.plan.sizes import sizes_of

if TYPE_CHECKING:
    from qerl.engine.vllm.opening import Settings


def choose_kernel(kernel: str, format: str) -> str:
    """The kernel for packed weights: qerl, humming or marlin, and "" for 16-bit weights.

    "auto" is our own kernel on Hopper and Marlin on other cards. Raises EngineError for one that cannot run here, and
    MissingExtraError where its package is not installed.
    """
    import torch

    from qerl.formats.cuda.nvrtc import has_kernels

    if kernel not in KERNELS:
        known = f"{', '.join(KERNELS[:-1])} or {KERNELS[-1]}"
        raise EngineError("%s is not known: write %s", KERNEL.set_to(f"{kernel!r}"), known)
    if not formats.get(format).kernels:
        return ""
    if kernel == "humming" and not has_module("humming"):
        raise MissingExtraError("humming-kernels", "gpu")
    if kernel in ("humming", "marlin"):
        return kernel
    if has_kernels(torch.device("cuda", torch.cuda.current_device())):
        return "qerl"
    if kernel == "auto":
        return "marlin"
    raise EngineError(
        "%s needs a Hopper card (compute capability 9.0) and the CUDA bindings that torch brings, not %s: write %s",
        *(KERNEL.set_to("qerl"), torch.cuda.get_device_name(), KERNEL.set_to("auto, humming or marlin")),
    )


def compile_ahead(settings: Settings, kernel: str) -> None:
    """Start compiling our kernels for the model's shapes in the background, before vLLM is imported and reads weights.

    `products.load_kernels` then finds them compiled. Where the model's config does not tell the shapes, nothing is
    started and each kernel is compiled when it is loaded.
    """
    if kernel != "qerl":
        return
    from qerl.formats.cuda import nvrtc
    from qerl.formats.nvfp4 import decode, gemm, lora
    from qerl.model import decode_attention

    try:
        sizes = sizes_of(settings.config.to_dict(), settings.base)
    except CheckpointError:
        return
    projections, head_dim = sizes.projections, sizes.head_dim
    bits = 8 if settings.options.kv_cache_dtype == "fp8" else 16
    attention = decode_attention.variants(head_dim, bits) if head_dim in decode_attention.HEAD_DIMS else []
    needed = [gemm.variants, lora.variants] if settings.options.linear_rank else [gemm.variants]
    widths = {columns for _, columns in projections.values()}
    nvrtc.compile_ahead(
        [*(each for variants in needed for columns in widths for each in variants(columns)), decode.OURS, *attention]
    )


def linear_backend(chosen: str) -> str:
    """vLLM's `linear_backend` for the chosen kernel. Ours replaces Marlin, for which vLLM compiles nothing."""
    return {"": "auto", "qerl": "marlin"}.get(chosen, chosen)


def has_module(name: str) -> bool:
    """Whether a package is installed, without importing it."""
    return find_spec(name) is not None
