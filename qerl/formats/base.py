"""What qerl asks of a number format, and the 16-bit format, in which nothing is packed.

`Format` itself is a format whose weights are not quantized; quantized ones override its methods.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl.base.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationConfig

    from qerl.formats.linear import PackedLinear


METHOD = "compressed-tensors"


class TensorSpec(NamedTuple):
    """The dtype, as safetensors writes it in a header, and the shape that a tensor must have."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Format:
    """How the linears of a base model keep their weights, in files, in memory and in the engines.

    The fields are what there is to know without looking at a model. The methods import torch and other libraries when
    they are called. Those for linears with packed weights are only called where `quantized` is true.
    """

    name: str  # in recipes, on the command line, in results
    label: str  # in sentences: "NVFP4", "16-bit"
    folder_label: str  # of a folder in this format: "NVFP4 checkpoint"
    model_label: str  # of a merged model in this format: "NVFP4 model"
    bytes_per_weight: float  # of a linear, with its scales
    tensors: tuple[str, ...] = ()  # that a packed linear has in a file in place of `weight`; () if not quantized
    shared_tensor: str | None = None  # the one of these that must be equal in linears that an engine fuses
    block_rows: int = 1  # of a weight, that have a scale in common
    layout: str | None = None  # `quantization_config.format` of config.json
    scheme: str | None = None  # llm-compressor's name for what `qerl quantize` does; None: it does not make this format
    scales: str | None = None  # the kind that is written, where there are several
    min_sqnr_db: float = 0.0  # quantized weights with less than this are not the model's
    kernels: tuple[str, ...] = ()  # values of rollout.kernel, beside auto; () if there is nothing to choose
    vllm_method: str | None = None  # what the plugin registers with vLLM; None: only the transformers engine serves it
    product_of_vllm: bool = False  # whether the product of rounded inputs on a card is vLLM's, in the trainer too
    rounds_inputs: bool = False  # whether linears can round their input, by dynamic scales
    four_bit_inputs: bool = False  # whether these have 4 bits, by dynamic or static scales
    holds_experts: bool = True  # whether the experts of a mixture can be in it
    writable: bool = True  # whether `qerl merge` can write a model in this format
    card_tags: tuple[str, ...] = ()  # of the model card of a merged model

    @property
    def takes_start(self) -> bool:
        """Whether an adapter can start at what rounding took, beside a base in this format."""
        return self.shared_tensor is not None

    @property
    def quantized(self) -> bool:
        """Whether linears are packed in tensors of their own."""
        return bool(self.tensors)

    @property
    def kinds(self) -> tuple[Format, ...]:
        """The formats that linears of one folder may be in: this one, except for `Mixed`."""
        return (self,)

    def of(self, module: str, names: Collection[str]) -> Format:
        """The format of a packed linear, by the names of the tensors in its folder."""
        return next(kind for kind in self.kinds if all(f"{module}.{part}" in names for part in kind.tensors))

    def is_kind_of(self, other: Format) -> bool:
        """Whether both are one format, which may have other scales or limits."""
        return self.name == other.name

    @property
    def folder_suffix(self) -> str:
        """What `qerl quantize` adds to a model's name for the default name of its folder."""
        return f"-{self.scheme}" if self.scheme else f"-{self.name}"

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        """Whether a folder whose config.json has this quantization_config (None: it has none) is in this format."""
        own = quantization is not None and quantization.get("quant_method") == METHOD
        return own and quantization.get("format") == self.layout if self.quantized else quantization is None

    def check_config(self, folder: Path, quantization: Mapping[str, Any] | None) -> None:
        """Raise CheckpointError for a variant of this format that qerl cannot use."""

    def activations(self, quantization: Mapping[str, Any] | None) -> str:
        """How packed linears round their input, by a quantization_config: none, dynamic or static."""
        return "none"

    def drops_inputs(self, quantization: Mapping[str, Any] | None) -> bool:
        """Whether the folder rounds inputs in a way that qerl leaves out: they stay in 16 bits."""
        return False

    def quantized_linears(self, tensor_names: Iterable[str]) -> list[str]:
        """Module names of the packed linears among a checkpoint's tensor names, in order of appearance.

        Raises CheckpointError for a module that has only some of `tensors`, or a dense weight beside them.
        """
        whole = [set(kind.tensors) for kind in self.kinds]
        exactly = " or ".join(f"{kind.label} linear has exactly {', '.join(kind.tensors)}" for kind in self.kinds)
        parts: dict[str, set[str]] = {}
        for full_name in tensor_names:
            module, _, tensor = full_name.rpartition(".")
            if tensor == "weight" or tensor in self.tensors:
                parts.setdefault(module, set()).add(tensor)
        for module, found in parts.items():
            if found != {"weight"} and found not in whole:
                raise CheckpointError(
                    f"{module}: has {', '.join(sorted(found))}, but an {exactly}; the checkpoint is incomplete or of "
                    "another format: quantize the 16-bit model with `qerl quantize`"
                )
        return [module for module, found in parts.items() if found in whole]

    def check_features(self, out_features: int, in_features: int, name: str = "linear") -> None:
        """Raise CheckpointError unless a weight (out_features, in_features) can be packed."""

    def tensor_specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """Dtype and shape of each of `tensors`, for a linear of this size."""
        raise NotImplementedError

    def dense_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """(out_features, in_features) of a linear whose `tensors` have these shapes."""
        raise NotImplementedError

    def linear(self) -> type[PackedLinear]:
        """The transformers-side module for a packed linear, which unpacks its weight and packs another in place."""
        raise NotImplementedError

    def configure_(self, linear: PackedLinear, quantization: Mapping[str, Any] | None) -> None:
        """Tell a linear of a folder what the folder's quantization_config says beside the weights."""

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The weight (out_features, in_features) in `dtype`. Raises CheckpointError for damaged tensors."""
        raise NotImplementedError

    def quantize(
        self, weights: Sequence[torch.Tensor], shared: torch.Tensor | None = None
    ) -> list[dict[str, torch.Tensor]]:
        """The `tensors` of float weights (out_features, in_features), which engines fuse: they share what fusing needs.

        `shared` is their `shared_tensor`, None for the usual one.
        Raises CheckpointError for weights that cannot be packed.
        """
        raise NotImplementedError

    def quantize_like(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The `tensors` of a float weight (out_features, in_features) that takes the place of the one in `tensors`.

        They are what the linear of that one writes for it (`PackedLinear.write_`).
        """
        return self.quantize([weight], tensors[self.shared_tensor] if self.shared_tensor else None)[0]

    def quantization_config(self, unquantized: Sequence[str], activations: str = "none") -> dict[str, Any] | None:
        """The quantization_config of a folder in which all linears but `unquantized` (module names) are packed, and
        round their input as `activations` says."""
        return None

    def quantization_config_like(
        self, quantization: Mapping[str, Any] | None, unquantized: Sequence[str]
    ) -> dict[str, Any] | None:
        """That of a folder that is made from one with `quantization`, in this format or in another."""
        return self.quantization_config(unquantized)


BF16 = Format(
    name="bf16",
    label="16-bit",
    folder_label="16-bit model",
    model_label="BF16 model",
    bytes_per_weight=2,
    vllm_method="qerl_bf16",
)


@dataclass(frozen=True)
class Mixed(Format):
    """A format for each linear, known by the linear's tensors. Inputs stay in 16 bits, and nothing is packed anew."""

    parts: tuple[Format, ...] = ()

    @property
    def kinds(self) -> tuple[Format, ...]:
        return self.parts

    def check_config(self, folder: Path, quantization: Mapping[str, Any] | None) -> None:
        for group in config_groups(folder, quantization):
            kind = next((each for each in self.kinds if each.layout == group.get("format")), None)
            if kind is None:
                raise CheckpointError(
                    f"{folder} has linears in {group.get('format')}, and in such a folder qerl reads "
                    f"{' and '.join(each.layout for each in self.kinds)}: give the model that it was made from"
                )
            weights_only = {**group, "input_activations": None, "output_activations": None}
            kind.check_config(folder, {"quant_method": METHOD, "config_groups": {"group_0": weights_only}})

    def drops_inputs(self, quantization: Mapping[str, Any] | None) -> bool:
        return any(group.get("input_activations") for group in (quantization or {}).get("config_groups", {}).values())

    def configure_(self, linear: PackedLinear, quantization: Mapping[str, Any] | None) -> None:
        linear.rounds_input = False


def config_groups(folder: Path, quantization: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a folder's quantization_config. Raises CheckpointError for one that cannot be read."""
    groups = quantization.get("config_groups", {})
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(
            f"{folder / 'config.json'} has a quantization_config that cannot be read: copy or download the file again"
        )
    return list(groups.values())


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
