"""FP8 with block scales: 8-bit e4m3 weights, a scale for each block of 128 x 128, and activations in 8 or 16 bits.

In files this is compressed-tensors' `float-quantized` with the strategy `block`, under llm-compressor's scheme
FP8_BLOCK, or the layout of DeepSeek and Qwen (`quant_method: fp8`, `weight_block_size: [128, 128]`), which is read as
it is. One scale per tensor is read as well, repeated for each block; activations beside it stay in 16 bits. The tensors
are described in `qerl/formats/fp8/layout.py`, the arithmetic in `qerl/formats/fp8/reference.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError
from qerl.formats.base import Format, config_entry, config_groups, make_config
from qerl.formats.fp8 import layout

if TYPE_CHECKING:
    import torch

    from qerl.formats.linear import PackedLinear

OTHER_METHOD = "fp8"
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [layout.BLOCK, layout.BLOCK]}
PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}
INPUTS = {"num_bits": 8, "type": "float", "group_size": layout.BLOCK, "dynamic": True}
OTHER = {"weight_block_size": [layout.BLOCK, layout.BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}
OTHER_DEFAULTS = {"activation_scheme": "dynamic", "fmt": "e4m3"}


@dataclass(frozen=True)
class _FP8Block(Format):
    check_features = staticmethod(layout.check_features)
    tensor_specs = staticmethod(layout.tensor_specs)

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        return (quantization or {}).get("quant_method") == OTHER_METHOD or super().recognises(quantization)

    def check_config(self, folder: Path, quantization: Mapping[str, Any] | None) -> None:
        if quantization["quant_method"] == OTHER_METHOD:
            _refuse(folder, {**OTHER_DEFAULTS, **quantization}, OTHER)
            return
        groups = config_groups(folder, quantization)
        if rounds_input(quantization) and self.drops_inputs(quantization):
            raise CheckpointError(
                f"{folder} rounds inputs of FP8 linears per tensor and in groups of {layout.BLOCK}, and qerl has one "
                "way for all: give the model that it was made from"
            )
        for group in groups:
            weights = group.get("weights") or {}
            if weights.get("strategy") == "channel":
                raise CheckpointError(
                    f"{folder} has FP8 with a scale per channel (fp8_channel), and qerl reads FP8 with one per tensor, "
                    f"or per block of {layout.BLOCK} x {layout.BLOCK}: run `qerl quantize --scheme {self.name}` on the "
                    "model that it was made from"
                )
            _refuse(folder, weights, PER_TENSOR if _per_tensor(group) else WEIGHTS)
            if group.get("input_activations") and not _per_tensor(group):
                _refuse(folder, group["input_activations"], INPUTS)

    def drops_inputs(self, quantization: Mapping[str, Any] | None) -> bool:
        groups = (quantization or {}).get("config_groups", {}).values()
        return any(group.get("input_activations") for group in groups if _per_tensor(group))

    def dense_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        rows, columns = shapes[layout.CODES]
        return rows, columns

    def linear(self) -> type[PackedLinear]:
        from qerl.formats.fp8.linear import FP8Linear

        return FP8Linear

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        from qerl.formats.fp8.reference import dequantize

        return dequantize(*(tensors[name] for name in self.tensors), dtype)

    def quantize(
        self, weights: Sequence[torch.Tensor], shared: torch.Tensor | None = None
    ) -> list[dict[str, torch.Tensor]]:
        from qerl.formats.fp8.reference import quantize

        return [quantize(weight, self.scales).named() for weight in weights]

    def quantize_like(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> dict[str, torch.Tensor]:
        from qerl.formats.fp8.reference import quantize, scale_kind

        return quantize(weight, scale_kind(tensors[layout.SCALE])).named()

    def configure_(self, linear: PackedLinear, quantization: Mapping[str, Any] | None) -> None:
        linear.rounds_input = rounds_input(quantization)

    def quantization_config(self, unquantized: Sequence[str], activations: str = "dynamic") -> dict[str, Any]:
        """As for any format; `activations` are "dynamic" in groups of 128 (8 bits), or "none" (16 bits)."""
        config = make_config(self, unquantized)
        if activations == "none":
            for group in config.config_groups.values():
                group.input_activations = None
        return config_entry(config)

    def quantization_config_like(
        self, quantization: Mapping[str, Any] | None, unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """Inputs stay in 16 bits where the folder that it is made from is in FP8 and leaves them so."""
        rounds = not self.recognises(quantization) or rounds_input(quantization)
        return self.quantization_config(unquantized, "dynamic" if rounds else "none")


def rounds_input(quantization: Mapping[str, Any] | None) -> bool:
    """Whether linears multiply activations in 8 bits, by a folder's quantization_config."""
    if quantization is None or quantization.get("quant_method") == OTHER_METHOD:
        return quantization is not None
    groups = quantization.get("config_groups", {}).values()
    return any(group.get("input_activations") for group in groups if not _per_tensor(group))


def _per_tensor(group: Mapping[str, Any]) -> bool:
    return (group.get("weights") or {}).get("strategy") == PER_TENSOR["strategy"]


def unquantized_modules(quantization: Mapping[str, Any]) -> list[str]:
    """The names or `re:` patterns of linears that stay in 16 bits, by a folder's quantization_config."""
    keys = ("ignore", "modules_to_not_convert", "ignored_layers")
    return [name for key in keys for name in quantization.get(key) or ()]


def _refuse(folder: Path, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise CheckpointError for another kind of FP8 than `own`."""
    other = {key: found.get(key) for key in own if found.get(key) != own[key]}
    if other:
        raise CheckpointError(
            f"{folder / 'config.json'} says FP8 with {other}, and qerl reads FP8 with "
            f"{ {key: own[key] for key in other} }: run `qerl quantize` on the model that it was made from"
        )


FP8_BLOCK = _FP8Block(
    name="fp8_block",
    label="FP8",
    folder_label="FP8 checkpoint",
    model_label="FP8 model",
    bytes_per_weight=1 + 4 / layout.BLOCK**2,
    tensors=layout.TENSORS,
    block_rows=layout.BLOCK,
    holds_experts=False,
    layout="float-quantized",
    scheme="FP8_BLOCK",
    scales="pow2",  # 0.1 dB less than with any float32 scales, and exact when decoded to 16 bits
    min_sqnr_db=20.0,  # rounding leaves about 31 dB on any weights; a wrong scale or another model's leaves 0 or less
    product_of_vllm=True,
    rounds_inputs=True,
    vllm_method="qerl_fp8",
    card_tags=("fp8", "compressed-tensors"),
)
