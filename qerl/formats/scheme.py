"""The quantization_config of formats that compressed-tensors defines, as llm-compressor writes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig

    from qerl.formats.base import Format


def make_config(
    format: Format, unquantized: Iterable[str], inputs: Mapping[str, Any] | None = None
) -> QuantizationConfig:
    """The format's scheme over all linears but `unquantized` (module names); `inputs`: of their input_activations."""
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationStatus,
        preset_name_to_scheme,
    )

    scheme = preset_name_to_scheme(format.scheme, ["Linear"])
    scheme.format = CompressionFormat(format.layout)
    if inputs is not None:
        dtypes = {key: getattr(scheme.weights, key) for key in ("scale_dtype", "zp_dtype")}
        scheme.input_activations = QuantizationArgs(**inputs, **dtypes)
    return QuantizationConfig(
        config_groups={"group_0": scheme},
        format=format.layout,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(unquantized),
    )


def config_entry(config: QuantizationConfig) -> dict:
    """The `quantization_config` of config.json, with the fields that llm-compressor writes."""
    import compressed_tensors

    return {"version": compressed_tensors.__version__, "transform_config": {}, **config.model_dump(mode="json")}
