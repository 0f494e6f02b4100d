"""The linear over a checkpoint's NVFP4 weight, the three tensors of `layout.py`. `kernel_layout.py` has an engine's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qerl.base.errors import CheckpointError, EngineError
from qerl.formats.linear import PackedLinear
from qerl.formats.nvfp4 import layout, reference

STORAGE = (torch.uint8, torch.float8_e4m3fn, torch.float32)  # dtypes of layout.TENSORS


class NVFP4Linear(PackedLinear):
    """See `PackedLinear`.

    Raises CheckpointError if in_features is not a multiple of 16, or if tensors do not fit when they are loaded.
    """

    @classmethod
    def from_tensors(
        cls,
        packed: torch.Tensor,
        block_scale: torch.Tensor,
        global_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> NVFP4Linear:
        """See `PackedLinear.of_buffers`."""
        tensors = reference.NVFP4Tensor(packed, block_scale, global_scale).named()
        shape = layout.check_tensors(tensors)
        layout.check_values(tensors)
        return cls.of_buffers(tensors, shape, bias, compute_dtype)

    def empty_tensors(self, device: torch.device | str | None) -> dict[str, torch.Tensor]:
        specs = layout.tensor_specs(self.out_features, self.in_features)
        tensors = {
            name: torch.zeros(spec.shape, dtype=dtype, device=device)
            for (name, spec), dtype in zip(specs.items(), STORAGE, strict=True)
        }
        tensors[layout.GLOBAL_SCALE].fill_(1.0)
        return tensors

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        tensors = (self.weight_packed, self.weight_scale, self.weight_global_scale)
        return reference.dequantize_unchecked(*tensors, dtype)

    @property
    def fixed_scale(self) -> float:
        """The global scale. It never changes, because captured CUDA graphs contain it as a number."""
        return float(self.weight_global_scale)

    def write_(self, matrix: torch.Tensor, row_start: int = 0) -> torch.Tensor:
        """See `PackedLinear.write_`: the bits equal `reference.quantize` with the fixed scale.

        The faults are as in `reference.faults`. A matrix with inf or NaN is not written.
        """
        matrix = matrix.to(self.weight_packed.device)
        faults = reference.faults(matrix, self.weight_global_scale)
        if not faults[0]:
            tensors = reference.quantize(matrix, self.weight_global_scale)
            rows = slice(row_start, row_start + len(matrix))
            self.weight_packed[rows].copy_(tensors.packed)
            self.weight_scale[rows].copy_(tensors.block_scale)
            self.drop_cached()
        return faults

    def refuse(self, faults: Sequence[int], name: str) -> None:
        """Raise EngineError if the matrix has inf or NaN, or has grown beyond the fixed scale."""
        unfit, saturated = faults
        if unfit:
            raise EngineError(
                f"the update of {name} holds inf or NaN: lower optim.learning_rate, and resume from the last checkpoint"
            )
        if saturated:
            raise EngineError(
                f"{saturated} of {self.out_features * self.in_features // layout.BLOCK} block scales of {name} "
                f"saturate: its weights have grown beyond the global scale {self.fixed_scale:g}, which is fixed for a "
                "run; quantize the base with more head room, or lower optim.learning_rate"
            )

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        """Load, but make scales of another dtype an error, which torch would cast silently, and NaN scales too."""
        errors: list[str] = rest[-1]
        for tensor_name, spec in layout.tensor_specs(self.out_features, self.in_features).items():
            tensor = state_dict.get(prefix + tensor_name)
            try:
                if tensor is not None:
                    layout.check_tensor(tensor, spec, prefix + tensor_name)
                    layout.check_values({} if tensor.is_meta else {tensor_name: tensor}, prefix.rstrip("."))
            except CheckpointError as error:
                errors.append(str(error))
                return
        super()._load_from_state_dict(state_dict, prefix, *rest)
