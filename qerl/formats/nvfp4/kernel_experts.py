"""The experts of a layer in the layout of Marlin, which an engine multiplies by: the trainer decodes the same tensors.

Each expert is a weight of its own in that layout (`qerl.formats.nvfp4.kernel_layout`), with its own global scale. The
power of two that Marlin moves into the block scales is one for all experts of a projection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from qerl.formats.nvfp4 import kernel_layout
from qerl.formats.nvfp4.kernel_layout import MARLIN, KernelWeight
from qerl.formats.nvfp4.layout import BLOCK

ROWS, COLUMNS = 64, 128  # Marlin's tiles: it takes multiples of these, or of the same two the other way round


class KernelExperts(nn.Module):
    """W (experts, out_features, in_features), frozen; see `qerl.formats.experts`. It owns no tensor."""

    def __init__(
        self,
        words: torch.Tensor,
        scales: torch.Tensor,
        shape: tuple[int, int, int],
        global_scale: torch.Tensor,
        scale_factor: float,
    ) -> None:
        """`words` int32 (experts, in / 16, 2 * out) and `scales` (experts, in / 16, out) of one byte are the kernel's
        own; `global_scale` float32 (experts,) is that of the checkpoint."""
        super().__init__()
        self.experts, self.out_features, self.in_features = shape
        self.compute_dtype = torch.bfloat16
        self.words, self.scales, self.global_scale, self.scale_factor = words, scales, global_scale, scale_factor
        self._global_scales: list[float] = global_scale.tolist()

    @property
    def weight_device(self) -> torch.device:
        return self.words.device

    def of_expert(self, expert: int) -> KernelWeight:
        """The weight of one expert, as its kernel keeps it."""
        return KernelWeight(
            MARLIN,
            self.words[expert],
            self.scales[expert],
            self.out_features,
            self.in_features,
            self._global_scales[expert],
            self.scale_factor,
        )

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """W in `dtype`, bit-exact with compressed-tensors' decoding of the checkpoint."""
        out = torch.empty(self.experts, self.out_features, self.in_features, dtype=dtype, device=self.weight_device)
        if out.is_cuda:
            from qerl.formats.nvfp4.kernels import dequantize_experts_

            return dequantize_experts_(out, self)
        for expert in range(self.experts):
            out[expert] = self.dense_expert(expert, dtype)
        return out

    def dense_expert(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """W (out_features, in_features) of one expert, in plain torch."""
        return kernel_layout.dequantize(self.of_expert(expert), dtype)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """W in `dtype`, computed anew."""
        return self.unpack(dtype)

    def extra_repr(self) -> str:
        return f"{self.experts} x {self.out_features} x {self.in_features}, in the engine's layout"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KernelExperts:
        """Does nothing: the weights belong to the engine, so they neither move nor change dtype."""
        return self


def takes(hidden: int, width: int) -> bool:
    """Whether Marlin multiplies by experts of this size without padding them."""
    return hidden % COLUMNS == width % ROWS == 0 or hidden % ROWS == width % COLUMNS == 0


def expected_shapes(shape: tuple[int, int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of words and scales, for experts of `shape`."""
    experts, rows, columns = shape
    return (experts, columns // BLOCK, 2 * rows), (experts, columns // BLOCK, rows)
