"""NVFP4: 4-bit e2m1 weights with a scale for each block of 16 and one for each linear.

In files this is compressed-tensors' `nvfp4-pack-quantized` under llm-compressor's scheme NVFP4A16. The tensors are
described in `qerl/formats/nvfp4/layout.py`, the arithmetic in `qerl/formats/nvfp4/reference.py`.

Linears may round their input too (`qerl/formats/nvfp4/activations.py`). The config says so under `input_activations`:
static scales are the scheme NVFP4 (dynamic "local", with an `input_global_scale` for each linear). Ours per row have no
name in compressed-tensors; they are written as dynamic groups of 16, which stock vLLM refuses for NVFP4 weights instead
of serving them in another way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError
from qerl.formats.base import Format, config_entry, config_groups, make_config
from qerl.formats.nvfp4 import layout

if TYPE_CHECKING:
    import torch

    from qerl.formats.linear import PackedLinear

WEIGHTS = {"num_bits": 4, "type": "float", "group_size": layout.BLOCK}
INPUTS: dict[str, dict[str, Any]] = {  # `input_activations`, by what a recipe calls them
    "static": {**WEIGHTS, "strategy": "tensor_group", "dynamic": "local"},
    "dynamic": {**WEIGHTS, "strategy": "group", "dynamic": True},
}


@dataclass(frozen=True)
class _NVFP4(Format):
    check_features = staticmethod(layout.check_features)
    tensor_specs = staticmethod(layout.tensor_specs)

    def check_config(self, folder: Path, quantization: Mapping[str, Any] | None) -> None:
        groups = config_groups(folder, quantization)
        if self.activations(quantization) == "unknown":
            given = [group.get("input_activations") for group in groups]
            raise CheckpointError(
                f"{folder} quantizes activations in a way that qerl does not compute ({given!s:.200}): it reads NVFP4 "
                "with 16-bit activations and with those of llm-compressor's scheme NVFP4; run `qerl quantize` on the "
                "model that it was made from"
            )
        for group in groups:
            weights = group.get("weights") or {}
            other = {key: weights[key] for key, own in WEIGHTS.items() if weights.get(key, own) != own}
            if other:
                raise CheckpointError(
                    f"{folder / 'config.json'} calls its weights {self.layout} with {other}, and NVFP4 is {WEIGHTS}: "
                    "copy or download it again, or run `qerl quantize` on the model that it was made from"
                )

    def activations(self, quantization: Mapping[str, Any] | None) -> str:
        """Also "unknown", for what `check_config` refuses."""
        groups = (quantization or {}).get("config_groups", {}).values()
        kinds = {_kind_of(group.get("input_activations"), group.get("output_activations")) for group in groups}
        return kinds.pop() if len(kinds) == 1 else "unknown" if kinds else "none"

    def dense_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        rows, half = shapes[layout.PACKED]
        return rows, 2 * half

    def linear(self) -> type[PackedLinear]:
        from qerl.formats.nvfp4.linear import NVFP4Linear

        return NVFP4Linear

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        from qerl.formats.nvfp4.reference import dequantize

        return dequantize(*(tensors[name] for name in self.tensors), dtype)

    def quantize(
        self, weights: Sequence[torch.Tensor], shared: torch.Tensor | None = None
    ) -> list[dict[str, torch.Tensor]]:
        from qerl.formats.nvfp4.reference import quantize, shared_global_scale

        scale = shared_global_scale(weights) if shared is None else shared
        return [quantize(weight, scale).named() for weight in weights]

    def quantization_config(self, unquantized: Sequence[str], activations: str = "none") -> dict[str, Any]:
        return config_entry(make_config(self, unquantized, INPUTS.get(activations)))

    def quantization_config_like(
        self, quantization: Mapping[str, Any] | None, unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """Inputs are rounded as in the folder that it is made from."""
        return self.quantization_config(unquantized, self.activations(quantization))


def _kind_of(inputs: Any, outputs: Any) -> str:
    if outputs or not (inputs is None or isinstance(inputs, dict)):
        return "unknown"
    if not inputs:
        return "none"
    symmetric = inputs.get("symmetric", True)
    return next(
        (kind for kind, own in INPUTS.items() if symmetric and all(inputs.get(key) == own[key] for key in own)),
        "unknown",
    )


NVFP4 = _NVFP4(
    name="nvfp4",
    label="NVFP4",
    folder_label="NVFP4 checkpoint",
    model_label="NVFP4 model",
    bytes_per_weight=9 / 16,  # 4 bits, and 8 bits for the scale of 16 weights
    tensors=layout.TENSORS,
    shared_tensor=layout.GLOBAL_SCALE,
    layout="nvfp4-pack-quantized",
    scheme="NVFP4A16",
    min_sqnr_db=10.0,  # rounding leaves about 20 dB on any weights; a wrong scale or another model's leaves 0 or less
    kernels=("qerl", "humming", "marlin"),
    vllm_method="qerl_nvfp4",
    rounds_inputs=True,
    four_bit_inputs=True,
    card_tags=("nvfp4", "compressed-tensors"),
)
