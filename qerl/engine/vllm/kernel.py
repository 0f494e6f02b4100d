"""Our NVFP4 kernel in the form of one of vLLM's: it packs a loaded linear into qerl's layout and multiplies by it."""

from __future__ import annotations

import torch
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig

from qerl.base.errors import KERNEL, EngineError
from qerl.formats.cuda.nvrtc import has_kernels
from qerl.formats.nvfp4 import gemm, slab_layout


class QerlNvFp4LinearKernel(NvFp4LinearKernel):
    """Replaces the kernel that vLLM chose for a linear (`linear.QerlNVFP4Config`)."""

    def __init__(self) -> None:
        super().__init__(NvFp4LinearLayerConfig())

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if has_kernels(torch.device("cuda", torch.cuda.current_device())):
            return True, None
        return False, "it runs on Hopper alone"

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Replace the checkpoint's codes and block scales by ours; vLLM calls this for one linear at a time."""
        rows, columns = layer.weight.shape[0], 2 * layer.weight.shape[1]
        if not gemm.takes(rows, columns):
            raise EngineError(
                "%s is %d x %d, which qerl's kernel does not take: write %s",
                *(layer.prefix, rows, columns, KERNEL.set_to("humming or marlin")),
            )
        words, scales = slab_layout.pack(layer.weight.data, layer.weight_scale.data, layer.prefix)
        layer.weight = torch.nn.Parameter(words, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = sum(layer.output_partition_sizes)
        out = torch.ops.qerl.nvfp4_linear(x.reshape(-1, x.shape[-1]), layer.weight, bias, rows)
        return out.view(*x.shape[:-1], rows)
