"""Write merged weights, open what was written again, compare it, and measure how much of s B A is in it.

    change = written - reference        reference: the base's weight that the output replaces in the same format
    kept   = <change, s B A> / |s B A|^2    1: all of the adapter is there; 0: rounding took it away
    cosine = <change, s B A> / (|change| |s B A|)    below 1: there is rounding noise beside it

NVFP4 has about 16 values per block: where s B A is smaller than half a step, rounding W_hat + s B A gives W_hat back.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from qerl import formats
from qerl.base.errors import ConfigError
from qerl.checkpoint.activations import read_activations, with_input_scales
from qerl.checkpoint.experts import all_experts
from qerl.checkpoint.export import Masters, dense_tensors, packed_tensors
from qerl.checkpoint.folder import format_of
from qerl.checkpoint.output import copy_small_files, write_json, write_weights
from qerl.checkpoint.shards import read_tensors, with_own_head
from qerl.checkpoint.source import Source, Tensors, finite, packed_groups, power_of_two_scale_of
from qerl.checkpoint.verify import FailedCheck, check_head, check_input_scales, checked, sqnr_db, verify
from qerl.formats.base import Format
from quantize.export.base import Adapter, Base, BaseReader, MergedReader, merged_source, power_of_two_scales, read_base

NOTHING = 1e-8  # of a weight: a change of this size is what float32 leaves of a difference that is none


@dataclass(frozen=True)
class Survival:
    """How much of the adapter is in the written weights of one linear, or of all (`name` is "total")."""

    name: str
    kept: float | None  # None if the adapter changes nothing here
    cosine: float | None
    norm_ratio: float | None  # |change| / |s B A|
    relative_size: float  # |s B A| / |W_hat|


@dataclass(frozen=True)
class Sums:
    """Inner products of float32 weights, accumulated in float64."""

    name: str
    dot: float
    change2: float
    delta2: float
    base2: float

    def survival(self) -> Survival:
        size = math.sqrt(self.delta2 / self.base2) if self.base2 else 0.0
        if not self.delta2 or (self.base2 and size < NOTHING):
            return Survival(self.name, None, None, None, size)
        norms = math.sqrt(self.change2 * self.delta2)
        ratio = math.sqrt(self.change2 / self.delta2)
        return Survival(self.name, self.dot / self.delta2, self.dot / norms if norms else 0.0, ratio, size)


def total(parts: Iterable[Sums]) -> Survival:
    """The survival over all linears."""
    return _added("total", list(parts)).survival()


def _added(name: str, parts: Sequence[Sums]) -> Sums:
    fields = ("dot", "change2", "delta2", "base2")
    return Sums(name, *(math.fsum(getattr(part, field) for part in parts) for field in fields))


@dataclass(frozen=True)
class Merge:
    """The adapter, the base it is merged onto, and what is written."""

    base: Base
    reference: Base  # the model whose weights the written ones are compared with
    adapter: Adapter
    source: Source


def plan_merge(base: Base, reference: Base, adapter: Adapter, to: Format) -> Merge:
    """The merge to do. Raises CheckpointError if the adapter does not fit the base, ConfigError if `to` does not."""
    if base.decoder.has_experts and not to.holds_experts:
        fits = " or ".join(f"--to {each.name}" for each in formats.writable(experts=True))
        raise ConfigError(
            f"--to {to.name}: {base.name} is a mixture of experts, which {to.label} does not hold: write {fits}"
        )
    adapter = adapter.in_files(base.decoder)
    return Merge(base, reference, adapter, merged_source(base, adapter, to))


def write_merged(merge: Merge, folder: Path, device: torch.device, track: Callable) -> int:
    """Fill `folder` with a whole model: weights, config.json, tokenizer and so on. Returns the bytes of the weights."""
    source = merge.source
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = "bfloat16"
    with BaseReader(merge.base, device) as base:
        read = MergedReader(base, source, merge.adapter, device)
        if source.format.quantized:
            like = merge.reference if merge.reference.format.is_kind_of(source.format) else merge.base
            if len(merge.reference.format.kinds) > 1:  # inputs were in 16 bits, whatever its config.json says
                config["quantization_config"] = source.format.quantization_config(source.unquantized(), "none")
            else:
                config["quantization_config"] = source.format.quantization_config_like(
                    like.config.get("quantization_config"), source.unquantized()
                )
            earlier = power_of_two_scales(merge.reference, source.format)
            # As `qerl quantize` has it for experts, unless the base was quantized in another way.
            pow2 = earlier or (source.decoder.has_experts and not merge.reference.format.is_kind_of(source.format))
            groups = packed_groups(source, read, device, power_of_two_scale_of(earlier) if pow2 else None)
            groups = with_input_scales(groups, _static_scales(like))
        else:
            groups = ({name: read(name) for name in names} for names in source.groups())
        written = write_weights(folder, track(groups, total=len(source.groups()), description="merging"))
    copy_small_files(source.folder, folder, code="auto_map" in source.config)
    write_json(folder / "config.json", with_own_head(config, read_tensors(folder)))  # the adapter can change either
    return written


def _static_scales(base: Base) -> dict[str, torch.Tensor]:
    """Of the activations of a base that has such: float32 (1,) by module."""
    if not base.format.four_bit_inputs:
        return {}
    found = read_activations(base.folder, base.format)
    return {name: torch.tensor([each.global_scale]) for name, each in found.items() if each.global_scale is not None}


def check_merged(merge: Merge, folder: Path, device: torch.device, track: Callable) -> list[Sums]:
    """Open the written model again and check every tensor. Returns the sums of each changed linear.

    Raises CheckpointError for the first tensor that is not what was computed.
    """
    with BaseReader(merge.base, device) as base:
        read = MergedReader(base, merge.source, merge.adapter, device)
        if merge.source.format.quantized:
            verify(folder, merge.source, read, device)
            if merge.reference.format.is_kind_of(merge.source.format):
                check_input_scales(folder, _static_scales(merge.reference))
        else:
            groups = ({name: finite(name, read(name)) for name in names} for names in merge.source.groups())
            for _ in checked(folder, groups):
                pass
            check_head(folder)
    return _measure(merge, folder, device, track)


def _measure(merge: Merge, folder: Path, device: torch.device, track: Callable) -> list[Sums]:
    found = []
    with BaseReader(read_base(str(folder), folder), device) as new, BaseReader(merge.reference, device) as old:
        for module in track(merge.adapter.modules, description="comparing"):
            base = old.weight(module)
            change = new.weight(module).sub_(base)
            found.append(_sums(module, change, merge.adapter.delta(module, device), base))
    return by_layer_of_experts(found)


def by_layer_of_experts(parts: Sequence[Sums]) -> list[Sums]:
    """The same with one sum for a layer's experts, of which there can be thousands, in place of one for each."""
    found: dict[str, list[Sums]] = {}
    for part in parts:
        found.setdefault(all_experts(part.name), []).append(part)
    return [_added(name, own) for name, own in found.items()]


def _sums(name: str, change: torch.Tensor, delta: torch.Tensor, base: torch.Tensor) -> Sums:
    def product(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one * other).sum(dtype=torch.float64))

    return Sums(name, product(change, delta), product(change, change), product(delta, delta), product(base, base))


def check_written(
    masters: Masters, folder: Path, device: torch.device, track: Callable = iter, dense: bool = False
) -> float | None:
    """Compare the model in `folder` with `masters`, whose linears it holds packed or, if `dense`, in bfloat16.

    Returns the lowest SQNR of its trained weights to their masters, in dB; None if all are exact. Raises FailedCheck.
    """
    if format_of(folder).quantized == dense:
        raise FailedCheck(f"config.json says that it is {format_of(folder).label}")
    check_head(folder)
    lowest, groups = math.inf, dense_tensors(masters) if dense else packed_tensors(masters, device)
    with masters.reader() as wide:
        for group in checked(folder, track(groups)):
            for name, weight in _weights(masters, group):
                lowest = min(lowest, sqnr_db(wide(name).float(), weight) or math.inf)
    return lowest if math.isfinite(lowest) else None


def _weights(masters: Masters, group: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The trained weights in a group as they will be multiplied by, in float32."""
    format = masters.format
    for name in group:
        module, _, part = name.rpartition(".")
        weight = f"{module}.weight"
        parts = {each: group.get(f"{module}.{each}") for each in format.tensors}
        if weight in masters.trained and part == format.tensors[0] and None not in parts.values():
            yield weight, format.dequantize(parts, torch.float32)  # its codes may be named `weight`, too
        elif name in masters.trained:
            yield name, group[name].float()
