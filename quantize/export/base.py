"""Base and adapter as one checkpoint of dense tensors, which are computed when they are read.

    merged = W_hat + s B A        in float32, rounded once when it is written; s = alpha / rank

W_hat is the decoded NVFP4 weight on which the adapter was trained, or the weight of a 16-bit base. A start that acted
in the training is a part of it (adapter.py), and trained norms replace the base's. The result is a `Source`, quantize's
view of a checkpoint, so that quantize's writer, rounding and verification take it like a folder. At most one layer is
computed at a time. `choose_base` says which weights are merged onto.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.activations import INPUT_SCALE
from qerl.checkpoint.adapter_file import is_of_experts
from qerl.checkpoint.experts import DECAYS, Decoder, decoder_of
from qerl.checkpoint.folder import REPORT, format_of, quantized_from
from qerl.checkpoint.resolve import ModelRef, resolve_model
from qerl.checkpoint.shards import (
    DTYPE_BYTES,
    WEIGHT_DTYPES,
    TensorInfo,
    TensorReader,
    read_config,
    read_json,
    read_tensors,
    with_own_head,
)
from qerl.checkpoint.source import Source, check_layout
from qerl.formats.base import Format

FACTOR_A, FACTOR_B = ".lora_A.weight", ".lora_B.weight"
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNTIE = (
    "save the base with a copy of its embeddings as lm_head.weight and tie_word_embeddings false, or let PEFT merge it "
    "(merge_and_unload)"
)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter as `qerl.checkpoint.adapter_file.read_adapter` reads it; tensors have the base's module names.

    Those on experts are one for each layer there; `in_files` gives each linear of the base its own. An adapter that was
    computed from that in `folder` has `settings`, which replace the folder's adapter_config.json.
    """

    folder: Path
    tensors: Mapping[str, torch.Tensor]
    scaling: float  # s, which multiplies B A
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the linears that the adapter changes."""
        return tuple(name.removesuffix(FACTOR_A) for name in self.tensors if name.endswith(FACTOR_A))

    @property
    def norms(self) -> dict[str, torch.Tensor]:
        """Trained norm weights by tensor name."""
        return {name: tensor for name, tensor in self.tensors.items() if ".lora_" not in name}

    @property
    def rank(self) -> int:
        return max(self.tensors[module + FACTOR_A].shape[-2] for module in self.modules)

    @property
    def of_experts(self) -> dict[str, torch.Tensor]:
        """Factors on experts by name, as they are read."""
        return {name: tensor for name, tensor in self.tensors.items() if is_of_experts(name)}

    def in_files(self, decoder: Decoder) -> Adapter:
        """The same with A and B of each expert's linears, under their names in files; these share the tensors' memory.

        Raises CheckpointError for an adapter on experts of another model.
        """
        stacked = self.of_experts
        linears = [name for layer in decoder.sparse if stacked for each in decoder.experts_of(layer) for name in each]
        # PEFT names a trained bias of a linear that has LoRA after the linear below it.
        own = {n.replace(".base_layer.bias", ".bias"): t for n, t in self.tensors.items() if n not in stacked}
        for module in linears:
            place, rows = decoder.place_of(module), decoder.shape_of(module.rpartition(".")[2])[0]
            a, b = (stacked.get(place.tensor + factor) for factor in (FACTOR_A, FACTOR_B))
            if a is None or b is None or any(each.ndim == 3 and len(each) != decoder.experts for each in (a, b)):
                raise CheckpointError(
                    f"{self.folder} has no adapter for {module}, one of {decoder.experts} experts of its layer: give "
                    "the base that it was trained on as --model"
                )
            a, b = (each[place.expert] if each.ndim == 3 else each for each in (a, b))
            own |= {module + FACTOR_A: a, module + FACTOR_B: b[place.first_row : place.first_row + rows]}
        if stacked and not linears:
            raise CheckpointError(f"{self.folder} changes experts, which the base has not: give its base as --model")
        return replace(self, tensors=own)

    def delta(self, module: str, device: torch.device) -> torch.Tensor:
        """s B A of one linear, float32 (out, in)."""
        a, b = (self.tensors[module + factor].to(device).float() for factor in (FACTOR_A, FACTOR_B))
        return (b @ a).mul_(self.scaling)


@dataclass(frozen=True)
class Base:
    """A checkpoint to merge onto. `packed` names its quantized linears, and `start` has factors to be added to them."""

    name: str
    folder: Path
    config: dict
    tensors: dict[str, TensorInfo]
    format: Format
    packed: frozenset[str]
    start: Mapping[str, torch.Tensor] = field(default_factory=dict)  # A0 and B0 by name, as `read_start` returns them

    @property
    def decoder(self) -> Decoder:
        return decoder_of(self.config, self.name)

    def dense_shape(self, module: str) -> tuple[int, int]:
        """(out_features, in_features) of a packed linear."""
        own = self.format.of(module, self.tensors)
        return own.dense_shape({part: self.tensors[f"{module}.{part}"].shape for part in own.tensors})


def read_base(name: str, folder: Path) -> Base:
    """Read a checkpoint's headers. Raises CheckpointError."""
    tensors, format = read_tensors(folder), format_of(folder)
    packed = frozenset(format.quantized_linears(tensors))
    config = with_own_head(read_config(folder), tensors)
    return Base(name, folder, config, tensors, format, packed)


def power_of_two_scales(base: Base, to: Format) -> dict[str, torch.Tensor]:
    """The scales that fused linears share, by module, if `base` is in the format `to` and all are powers of two."""
    if base.format is not to or to.shared_tensor is None:
        return {}
    with TensorReader(base.tensors) as read:
        scales = {module: read(f"{module}.{base.format.shared_tensor}") for module in base.packed}
    return scales if all(math.frexp(float(scale))[0] == 0.5 for scale in scales.values()) else {}


def merged_source(base: Base, adapter: Adapter, to: Format) -> Source:
    """Names, shapes and dtypes of the merged checkpoint; if `to` is quantized, also the linears that will be.

    Raises CheckpointError if the adapter does not fit the base.
    """
    tensors = {}
    for name, info in base.tensors.items():
        module, _, part = name.rpartition(".")
        if module in base.packed and part in base.format.tensors:
            tensors[f"{module}.weight"] = _in_bf16(info, base.dense_shape(module))
        elif not (module in base.packed and part == INPUT_SCALE):  # `write_merged` adds a quantized result's
            wide = info.dtype in WEIGHT_DTYPES and not name.endswith(DECAYS)
            tensors[name] = _in_bf16(info, info.shape) if wide else info
    _check_fit(tensors, base, adapter)
    source = Source(base.name, base.folder, base.config, tensors, (), (), format=to)
    return _with_quantized(source, base) if to.quantized else source


def _in_bf16(info: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo("BF16", shape, info.file, math.prod(shape) * DTYPE_BYTES["BF16"])


def _with_quantized(source: Source, base: Base) -> Source:
    """Add the linears to pack: the base's, or all of a 16-bit base. Their scales need them in float32."""
    linears = check_layout(base.folder, base.config, source.tensors)
    quantized = tuple(module for module in linears if module in base.packed or not base.packed)
    tensors = dict(source.tensors)
    for module in quantized:
        info = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = replace(info, dtype="F32", nbytes=2 * info.nbytes)
    kept = tuple(module for module in linears if module not in quantized)
    return replace(source, tensors=tensors, quantized=quantized, kept=kept)


def _check_fit(tensors: Mapping[str, TensorInfo], base: Base, adapter: Adapter) -> None:
    changed = {}
    for module in adapter.modules:
        a, b = (adapter.tensors[module + factor].shape for factor in (FACTOR_A, FACTOR_B))
        changed[f"{module}.weight"] = b[0], a[1]
    changed |= {name: tuple(tensor.shape) for name, tensor in adapter.norms.items()}
    for name, shape in changed.items():
        there, remedy = tensors.get(name), "give the base that it was trained on as --model"
        if name in (EMBEDDINGS, HEAD) and HEAD not in tensors:
            there, remedy = None, f"{UNTIE}, since its embeddings are its head"
        elif ".base_layer." in name:  # as PEFT saves it beside LoRA on embeddings or head
            remedy = "save it with save_embedding_layers=False, or let PEFT merge it (merge_and_unload)"
        if there is None or there.shape != shape:
            raise CheckpointError(
                f"{adapter.folder} changes {name} as {shape}, and {base.name} has "
                f"{'no place for it' if there is None else there.shape}: {remedy}"
            )


class BaseReader(TensorReader):
    """Reads a checkpoint's tensors by name, and decodes its linears."""

    def __init__(self, base: Base, device: torch.device) -> None:
        super().__init__(base.tensors)
        self.base, self._device = base, device

    def weight(self, module: str) -> torch.Tensor:
        """The weight of one linear, decoded if it is packed, with its start: a float32 copy (out, in) on the device."""
        if module in self.base.packed:
            format = self.base.format.of(module, self.base.tensors)
            packed = {part: self(f"{module}.{part}").to(self._device) for part in format.tensors}
            weight = format.dequantize(packed, torch.float32)
        else:
            weight = self(f"{module}.weight").to(self._device, torch.float32, copy=True)
        if module + FACTOR_A in self.base.start:
            a, b = (self.base.start[module + factor].to(self._device).float() for factor in (FACTOR_A, FACTOR_B))
            weight.addmm_(b, a)
        return weight


class MergedReader:
    """Reads the tensors of `merged_source` by name and computes each on demand."""

    def __init__(self, base: BaseReader, source: Source, adapter: Adapter, device: torch.device) -> None:
        self._base, self._source, self._adapter, self._device = base, source, adapter, device
        self._changed, self._norms = frozenset(adapter.modules), adapter.norms

    def __call__(self, name: str) -> torch.Tensor:
        """The merged tensor on the CPU, in the dtype that `merged_source` gives it."""
        module = name.removesuffix(".weight")
        if name in self._norms:
            merged = self._norms[name]
        elif module in self._changed:
            merged = self._base.weight(module).add_(self._adapter.delta(module, self._device))
        elif name != module and (module in self._base.base.packed or module + FACTOR_A in self._base.base.start):
            merged = self._base.weight(module)
        else:
            merged = self._base(name)
        dtype = {"BF16": torch.bfloat16, "F32": torch.float32}.get(self._source.tensors[name].dtype, merged.dtype)
        return merged.to(dtype).cpu().contiguous()


def choose_base(onto: str, to: Format, exact: ModelRef) -> tuple[ModelRef, tuple[str, ...]]:
    """The weights to merge onto, and notes for the user about them. Raises ConfigError or CheckpointError.

        trained     W_hat + s B A, the policy that was trained: right for a 16-bit model
        original    W + s B A: the only choice that works for a quantized model

    W_hat lies on the grid, so rounding W_hat + s B A gives W_hat back wherever s B A is under half a step. W lies
    anywhere between grid points, so s B A moves the right share of the weights over a rounding boundary, and on average
    nothing is lost.

    An adapter that was trained with a start adds what it has learned, which is not always s B A (adapter.py). Q(W + s B
    A) is not exactly W_hat + s B A, the policy that was trained; `effect.py` measures the difference.
    """
    if onto == "trained" or not formats.get(exact.format).quantized or (onto == "auto" and not to.quantized):
        if onto == "original":
            raise ConfigError(f"{exact.base} is a 16-bit model, which is the original: leave --onto out")
        return exact, ()
    try:
        original = resolve_model(original_name(exact.base), formats.BF16.name)
    except CheckpointError as error:
        if onto == "original":
            raise
        return exact, (f"merged onto the quantized weights, where rounding takes most adapters away: {error}",)
    if to.quantized:
        return original, ()
    note = (
        f"merged onto the original {original.base}, not onto the quantized weights that the adapter was trained on: "
        "the result is not the policy that was trained, and only an evaluation says whether it is better or worse"
    )
    return original, (note,)


def original_name(base: str) -> str:
    """The 16-bit model that a quantized base was made from, which need not be here.

    Raises CheckpointError if it is not known, or has other weights than were quantized.
    """
    source = quantized_from(Path(base))
    if source is None:
        raise CheckpointError(f"{base} does not say which model it was quantized from: write `--onto trained`")
    if read_json(Path(base) / REPORT).get("method") == "awq":
        raise CheckpointError(
            f"{base} was quantized by awq, which rescales {source}'s weights, so that the adapter does not fit those: "
            "write `--onto trained`"
        )
    return source


def check_original(original: Base, trained: Base) -> None:
    """Raise CheckpointError unless `trained` looks like `original` after quantization; compares one layer."""
    from qerl.checkpoint.verify import sqnr_db

    cpu = torch.device("cpu")
    layer = next(iter(sorted(trained.packed))).rpartition(".")[0]
    with BaseReader(original, cpu) as one, BaseReader(trained, cpu) as other:
        for module in sorted(module for module in trained.packed if module.startswith(layer)):
            info = original.tensors.get(f"{module}.weight")
            decoded = other.weight(module)
            value = sqnr_db(one.weight(module), decoded) if info and info.shape == tuple(decoded.shape) else 0.0
            if value is not None and value < trained.format.of(module, trained.tensors).min_sqnr_db:
                raise CheckpointError(
                    f"{original.name} is not the model that {trained.name} was quantized from ({module} differs): "
                    "write `--onto trained`"
                )
