"""What an open vLLM is given: an adapter or weights, norm gains with noise, scales of keys and values. No vllm.

All of it is written in place, into buffers that captured CUDA graphs and the policy model read. Nothing is written
before every tensor has its place and no place lacks a tensor. An adapter may cover only some of the projections
(`adapter.targets`), but those in every layer; the buffers of the others hold zeros.

The frozen start of a base (`qerl.checkpoint.base_start`) has the first columns of each slot. It is written once, when
the engine opens; the adapter of a sync comes after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from qerl.base.errors import ENGINE, EngineError
from qerl.checkpoint.adapter_file import LEAVES, is_of_experts
from qerl.checkpoint.experts import GATE_UP, KEPT_PAIR, QKV, QKVZ, decoder_of
from qerl.checkpoint.shards import read_config, read_json, read_tensors
from qerl.engine.update import (
    BESIDE_A_START,
    AdapterUpdate,
    Update,
    WeightsUpdate,
    check_fit,
    check_names,
    pack_weights_,
)
from qerl.engine.vllm import LOADER
from qerl.formats.nvfp4.ways import padded_power

if TYPE_CHECKING:
    from torch import nn

    from qerl.engine.vllm.engine import Found
    from qerl.formats.base import Format
    from qerl.formats.fp8.kv import KVScales


A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
# vLLM's name -> the checkpoint's
FUSED = {"qkv_proj": QKV, "qk_proj": QKV[:2], "gate_up_proj": GATE_UP, "in_proj_qkvz": QKVZ, "in_proj_ba": KEPT_PAIR}
PARTITIONS = {QKVZ[0]: 3}  # of a fused linear that are one linear of the checkpoint; 1 of any other


@dataclass(frozen=True)
class AdapterSlot:
    """Where the factors of one base linear lie in the buffers of the fused linear that it is part of."""

    lora_a: torch.Tensor  # (parts * max_rank, in)
    lora_b: torch.Tensor  # (out of all parts, parts * max_rank)
    first: int  # its first row of A, which is also its first column of B
    row_start: int  # its first row of B
    rows: int
    frozen: int = 0  # rows of A, from the first one on, that a start has

    @property
    def in_features(self) -> int:
        return self.lora_a.shape[1]


def adapter_slots(linears: Mapping[str, nn.Module], frozen: int = 0) -> dict[str, AdapterSlot]:
    """The slots by base module name, of which a start has rank `frozen`. `linears` are vLLM's, by their names there."""
    slots = {}
    for name, layer in linears.items():
        fused = parts(name, layer)
        max_rank = layer.lora_a.shape[0] // len(fused)
        for index, (part, start, rows) in enumerate(fused):
            slots[part] = AdapterSlot(layer.lora_a, layer.lora_b, index * max_rank, start, rows, frozen)
    return slots


def served_config(folder: Path, format: Format) -> dict[str, Any] | None:
    """The quantization_config with which vLLM opens a folder by our loader; None for one that it reads by itself."""
    config, tensors = read_config(folder), read_tensors(folder)
    others = any(info.turn or info.packed or info.stored_as for info in tensors.values())
    if not format.quantized or not (others or len(format.kinds) > 1):
        return None
    quantization, packed = config["quantization_config"], format.quantized_linears(tensors)
    if len(format.kinds) > 1:
        return {**quantization, "linears": {module: format.of(module, tensors).name for module in packed}}
    decoder = decoder_of(config, str(folder))
    kept = set(decoder.linears()).difference(packed)
    return format.quantization_config_like(quantization, ["lm_head", *decoder.kept(), *sorted(kept)])


@contextmanager
def text_alone(folder: Path) -> Iterator[dict[str, Any]]:
    """vLLM's further arguments for the text part of a folder for pictures and text, none for another: a config.json of
    its own, which is there inside the block, and our loader, which leaves the rest out."""
    if "text_config" not in read_json(folder / "config.json"):
        yield {}
        return
    with TemporaryDirectory(prefix="qerl-config-") as own:
        (Path(own) / "config.json").write_text(json.dumps(read_config(folder)), encoding="utf-8")
        yield {"hf_config_path": own, "load_format": LOADER}


def format_of(name: str, linears: Mapping[str, str]) -> str | None:
    """The name of the format of a vLLM linear, given those of the base's packed linears; None: it is not packed.

    Raises EngineError if linears that it fuses are in different ones.
    """
    parent, _, leaf = name.rpartition(".")
    found = {linears.get(f"{parent}.{part}") for part in FUSED.get(leaf, (leaf,))}
    if len(found) > 1:
        raise EngineError("vLLM fuses linears of different formats in %s: set %s", name, ENGINE.set_to("transformers"))
    return found.pop()


def parts(name: str, layer: nn.Module) -> list[tuple[str, int, int]]:
    """(base module name, first row, rows) of each linear that `layer` fuses; `name` is vLLM's module name."""
    parent, _, leaf = name.rpartition(".")
    leaves = FUSED.get(leaf, (leaf,))
    sizes = list(getattr(layer, "output_partition_sizes", None) or [layer.output_size])
    counts = [PARTITIONS.get(part, 1) for part in leaves]
    assert sum(counts) == len(sizes), f"{name} has {len(sizes)} partitions for {leaves}"
    rows, start = [], 0
    for part, count in zip(leaves, counts, strict=True):
        size = sum(sizes[:count])
        del sizes[:count]
        rows.append((f"{parent}.{part}" if parent else part, start, size))
        start += size
    return rows


def split_adapter(
    tensors: Mapping[str, torch.Tensor],
    slots: Mapping[str, AdapterSlot],
    norms: Mapping[str, nn.Module],
    max_rank: int,
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
    """(A and B by base linear, trained weights by norm). Raises EngineError if anything does not fit."""
    a = {name.removesuffix(A_SUFFIX): tensor for name, tensor in tensors.items() if name.endswith(A_SUFFIX)}
    b = {name.removesuffix(B_SUFFIX): tensor for name, tensor in tensors.items() if name.endswith(B_SUFFIX)}
    trained = {n.removesuffix(".weight"): t for n, t in tensors.items() if not n.endswith((A_SUFFIX, B_SUFFIX))}
    if unpaired := sorted(set(a) ^ set(b)):
        raise EngineError(f"the adapter has only one of A and B for {unpaired[:4]}: its file is incomplete")
    if a and not slots:
        raise EngineError("the engine was opened without an adapter (max_rank 0): open it for the adapter's rank")
    check_names("linear", a, slots, "adapter")
    check_names("norm", trained, norms, "adapter")
    for name in a:
        _check_shapes(name, a[name], b[name], slots[name], max_rank)
    for name, tensor in trained.items():
        if tensor.shape != norms[name].gain.shape:
            raise EngineError(f"trained norm {name} has shape {tuple(tensor.shape)}: the adapter is of another base")
    return {name: (a[name], b[name]) for name in a}, trained


def copy_adapter_(
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], slots: Mapping[str, AdapterSlot], scaling: float
) -> None:
    """Overwrite the buffers with A and with B times `scaling`, and the parts of them that get no factors with zeros.

    A is zeroed there too: if an earlier adapter diverged and left a NaN, a zero in B would not remove it.
    """
    with torch.no_grad():
        for name, slot in slots.items():
            a, b = factors.get(name, (None, None))
            rank = 0 if a is None else a.shape[0]
            first = slot.first + slot.frozen
            columns, unused = slice(first, first + rank), slice(first + rank, _end(slot, slots))
            rows = slice(slot.row_start, slot.row_start + slot.rows)
            if a is not None:
                slot.lora_a[columns].copy_(a)
                slot.lora_b[rows, columns].copy_(b * scaling)
            slot.lora_a[unused].zero_()
            slot.lora_b[rows, unused].zero_()


def write_start_(
    tensors: Mapping[str, torch.Tensor], slots: Mapping[str, AdapterSlot]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Write a start's A0 and B0 into the slots; returns views of them, (r0, in) and (out, r0), by base linear.

    Slots of linears that the start does not have keep zeros. Raises EngineError for factors that do not fit.
    """
    factors, _ = split_adapter(tensors, slots, {}, next(iter(slots.values())).frozen)
    views = {}
    with torch.no_grad():
        for name, (a, b) in factors.items():
            slot = slots[name]
            columns = slice(slot.first, slot.first + slot.frozen)
            rows = slice(slot.row_start, slot.row_start + slot.rows)
            views[name] = slot.lora_a[columns].copy_(a), slot.lora_b[rows, columns].copy_(b)
    return views


def _end(slot: AdapterSlot, slots: Mapping[str, AdapterSlot]) -> int:
    """One past the last of the slot's columns of B."""
    starts = [other.first for other in slots.values() if other.lora_b is slot.lora_b and other.first > slot.first]
    return min(starts, default=slot.lora_b.shape[1])


def _check_shapes(name: str, a: torch.Tensor, b: torch.Tensor, slot: AdapterSlot, max_rank: int) -> None:
    rank = a.shape[0]
    if a.shape != (rank, slot.in_features) or b.shape != (slot.rows, rank):
        raise EngineError(
            f"the adapter's {name} has A {tuple(a.shape)} and B {tuple(b.shape)}; the base is {slot.rows} x "
            f"{slot.in_features}: it was trained on another base"
        )
    if rank > max_rank:
        raise EngineError(f"the adapter has rank {rank}, the engine was opened for {max_rank}: open it for {rank}")


FACTOR = ".lora_"


@dataclass(frozen=True)
class ExpertBuffers:
    """The adapter of a layer's experts. `gate_up_a` (R, hidden) and `down_b` (hidden, R) are shared by all experts, or
    have them as their first dimension. The shapes are those of `qerl.model.experts` in bfloat16, with the rank padded
    by zeros, and B holds the scale.
    """

    gate_up_a: torch.Tensor
    gate_up_b: torch.Tensor  # (experts, 2 width, R)
    down_a: torch.Tensor  # (experts, R, width)
    down_b: torch.Tensor

    @classmethod
    def zeros(cls, sizes: tuple[int, int, int], rank: int, shared: bool, device: torch.device) -> ExpertBuffers:
        """Buffers for adapters of at most `rank`; `sizes` are (experts, width, hidden)."""
        experts, width, hidden = sizes
        rank, outer = padded_power(rank), () if shared else (experts,)
        shapes = ((*outer, rank, hidden), (experts, 2 * width, rank), (experts, rank, width), (*outer, hidden, rank))
        return cls(*(torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes))

    @property
    def shared(self) -> bool:
        return self.gate_up_a.dim() == 2

    @property
    def rank(self) -> int:
        """The padded rank R."""
        return self.gate_up_a.shape[-2]

    def named(self) -> dict[str, torch.Tensor]:
        """The buffers by what their names in an adapter end in."""
        names = (f"{leaf}.lora_{factor}.weight" for leaf in LEAVES for factor in "AB")
        return dict(zip(names, (self.gate_up_a, self.gate_up_b, self.down_a, self.down_b), strict=True))


def expert_slots(buffers: Mapping[str, ExpertBuffers]) -> dict[str, torch.Tensor]:
    """The buffers by the names of an adapter's tensors; `buffers` has each layer's by the name of its experts."""
    return {f"{name}.{leaf}": tensor for name, own in buffers.items() for leaf, tensor in own.named().items()}


def of_experts(tensors: Mapping[str, torch.Tensor], slots: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An adapter's tensors on experts. Raises EngineError unless all of them have a place, and every layer its own."""
    found = {name: tensor for name, tensor in tensors.items() if is_of_experts(name)}
    if found and not slots:
        raise EngineError(
            "the adapter acts on experts, and the engine was opened without an adapter on them: open it for the "
            "adapter's kind and rank on experts"
        )
    check_names("experts", found, slots, "adapter")
    for name, tensor in found.items():
        _check_shape(name, tensor, slots[name])
    return found


def copy_to_experts_(tensors: Mapping[str, torch.Tensor], slots: Mapping[str, torch.Tensor], scaling: float) -> None:
    """Overwrite the buffers with A and with B times `scaling`, and what gets no factors with zeros."""
    with torch.no_grad():
        for name, buffer in slots.items():
            along_rows = name.endswith(f"{FACTOR}A.weight")
            given, dim = tensors.get(name), buffer.dim() - (2 if along_rows else 1)
            rank = 0 if given is None else given.shape[dim]
            if given is not None:
                buffer.narrow(dim, 0, rank).copy_(given if along_rows else given * scaling)
            buffer.narrow(dim, rank, buffer.shape[dim] - rank).zero_()


def _check_shape(name: str, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    dim = buffer.dim() - (2 if name.endswith(f"{FACTOR}A.weight") else 1)  # along which ranks lie
    fits = tensor.dim() == buffer.dim() and tensor.shape[dim] <= buffer.shape[dim]
    if not fits or tensor.movedim(dim, 0).shape[1:] != buffer.movedim(dim, 0).shape[1:]:
        raise EngineError(
            f"the adapter's {name} is {tuple(tensor.shape)}, and its place {tuple(buffer.shape)} with the rank in "
            f"dimension {dim}: it was trained on another base, or the engine was opened for another kind of adapter on "
            "experts, or for a smaller rank"
        )


class Gains:
    """The gains of `norms`, by module name. A norm's `weight` is the checkpoint's and never changes; `gain` acts.

    The float32 `gain` (`layers.py`) is the checkpoint's weight or the trained one, plus the norm's offset and the
    noise. It is always computed from the clean weights, so noise leaves no trace when it is removed.
    """

    def __init__(self, norms: Mapping[str, nn.Module]) -> None:
        self.norms = dict(norms)
        self._trained: dict[str, torch.Tensor] = {}
        self._noise: dict[str, torch.Tensor] = {}

    def set_trained_(self, trained: Mapping[str, torch.Tensor]) -> None:
        """Have copies of these weights act, and the checkpoint's in all other norms. The noise stays."""
        self._trained = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in trained.items()}
        self._write_()

    def set_noise_(self, noise: Mapping[str, torch.Tensor]) -> None:
        """Add these vectors to the named norms and nothing to the others. Raises EngineError if one does not fit."""
        if unknown := sorted(set(noise) - set(self.norms)):
            raise EngineError(f"noise was given for norms that the model does not have: {unknown[:4]}")
        for name, vector in noise.items():
            if vector.shape != self.norms[name].gain.shape:
                raise EngineError(
                    f"noise for {name} has shape {tuple(vector.shape)}, not {tuple(self.norms[name].gain.shape)}"
                )
        self._noise = dict(noise)
        self._write_()

    def _write_(self) -> None:
        for name, norm in self.norms.items():
            clean = self._trained.get(name)
            norm.gain.copy_(norm.weight.data if clean is None else clean).add_(norm.offset)
            if name in self._noise:
                norm.gain.add_(self._noise[name].to(norm.gain))


READ_ON_THE_CARD = ("FlashAttentionImpl", "TritonAttentionImpl")


def attention_layers(model: Any) -> dict[int, Any]:
    """vLLM's attention layers with 8-bit keys and values, by the number of the decoder layer."""
    from vllm.model_executor.layers.attention import Attention

    named = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    found = {re.search(r"\blayers\.(\d+)\.", name): module for name, module in named.items()}
    in_8_bits = {match: module for match, module in found.items() if module.kv_cache_dtype in ("fp8", "fp8_e4m3")}
    return {int(match[1]): module for match, module in in_8_bits.items() if match}


def set_scales_(layers: Mapping[int, Any], scales: Mapping[int, KVScales]) -> int:
    """Overwrite the scales of each layer in place; returns how many layers have them.

    vLLM 0.25.1 keeps them as float32 buffers of the layer (`_k_scale`, `_v_scale`, and `_q_scale` where queries are
    rounded too), which our kernel, FlashAttention and vLLM's Triton kernel read on the card, so that they can change
    under captured graphs. Backends that take them from the host when a graph is captured (FlashInfer) cannot be
    calibrated.

    Raises EngineError unless each layer gets scales, and for attention that would not read them.
    """
    if set(layers) != set(scales):
        raise EngineError(
            f"scales of keys and values are for {len(scales)} layers, and {len(layers)} have 8-bit ones: write "
            "rollout.kv_cache_dtype: fp8_per_token_head, or auto"
        )
    for layer in layers.values():
        names = {kind.__name__ for kind in type(layer.impl).__mro__}
        if names.isdisjoint(READ_ON_THE_CARD):
            raise EngineError(
                f"vLLM attends by {type(layer.impl).__name__}, whose scales of keys and values cannot change: write "
                "rollout.kv_cache_dtype: fp8_per_token_head, or auto"
            )
    for number, layer in layers.items():
        _set_(layer, scales[number])
    return len(layers)


def _set_(layer: Any, scales: KVScales) -> None:
    values = {"k": scales.key, "v": scales.value}
    if getattr(layer, "query_quant", None) is not None:  # otherwise queries are not rounded
        values["q"] = scales.query
    for letter, value in values.items():
        getattr(layer, f"_{letter}_scale").data.fill_(value)  # vLLM 0.25.1 leaves scales that require a gradient
        setattr(layer, f"_{letter}_scale_float", value)
        on_host = getattr(layer, f"_{letter}_scale_cpu", None)
        if on_host is not None:
            on_host.fill_(value)


def take_(update: Update, found: Found, max_rank: int, device: int) -> None:
    """Overwrite the adapter, or the weights and the trained norms. Raises EngineError for what does not fit."""
    if isinstance(update, AdapterUpdate):
        experts = of_experts(update.tensors, found.expert_slots)
        others = {name: tensor for name, tensor in update.tensors.items() if name not in experts}
        factors, norms = split_adapter(others, found.slots, found.gains.norms, max_rank)
        copy_adapter_(factors, found.slots, update.scaling)
        copy_to_experts_(experts, found.expert_slots, update.scaling)
        found.gains.set_trained_(norms)
    else:
        if found.has_start:
            raise EngineError(BESIDE_A_START)
        _take_weights_(update, found, device)


def _take_weights_(update: WeightsUpdate, found: Found, device: int) -> None:
    check_fit(update, found.linears, {name: norm.gain for name, norm in found.gains.norms.items()})
    pack_weights_(update.weights, found.linears)
    found.gains.set_trained_(update.norms)
    torch.cuda.synchronize(device)  # a product may read its weight before the launch ahead of it has ended
