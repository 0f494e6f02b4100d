"""The 16-bit checkpoint to quantize, and its linears packed by their format, one decoder layer at a time.

All that cannot work is refused here, from file headers, before long work. The names and shapes of the tensors decide
what is supported, not a list of model classes. It has to be a decoder whose layers `model.layers.N` have the seven
projections self_attn.{q,k,v,o}_proj and mlp.{gate,up,down}_proj, with or without biases, QK-norms and tied embeddings
(Qwen2, Qwen2.5, Qwen3, Llama 3, Mistral). In place of an MLP a layer may have experts of a family that
`qerl.checkpoint.experts` names. Importing this loads no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.experts import TITLES, Decoder, check_decoder, check_numbers, decoder_of, fused, matching
from qerl.checkpoint.folder import WORDS, export_line, kind_of_run, resting_kind
from qerl.checkpoint.hub import download_model, is_hub_id
from qerl.checkpoint.load import COMPUTED
from qerl.checkpoint.resolve import check_whole, resolve_model
from qerl.checkpoint.shards import (
    DTYPE_BYTES,
    TEXT_MODELS,
    WEIGHT_DTYPES,
    TensorInfo,
    read_config,
    read_json,
    read_tensors,
    with_own_head,
)
from qerl.formats.base import Format

if TYPE_CHECKING:
    import torch


LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
OUTSIDE_LAYERS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("spiece.model",))
SUPPORTED = (
    "qerl quantizes decoders in the layout of Qwen2, Qwen2.5, Qwen3, Llama 3, Mistral, OLMo 2, Granite, Qwen3.5 and "
    f"Gemma 4, and mixtures of experts in that of {TITLES}"
)


@dataclass(frozen=True)
class Source:
    """A 16-bit checkpoint that can be quantized, and which of its linears will be."""

    name: str  # as in the report: hub id, `tiny`, or the folder's absolute path
    folder: Path
    config: dict
    tensors: dict[str, TensorInfo]
    quantized: tuple[str, ...]  # module names, in the model's order
    kept: tuple[str, ...]  # linears that stay in 16 bits by an ignore pattern, beside lm_head and `Decoder.kept`
    trust_remote_code: bool = False
    format: Format = formats.DEFAULT  # what `quantized` will be
    part: bool = False  # the folder's text part, beside which it holds one for pictures

    @cached_property
    def decoder(self) -> Decoder:
        return decoder_of(self.config, self.name)

    @cached_property
    def chosen(self) -> dict[str, str]:
        """The quantized modules by the names of their weights."""
        return {f"{module}.weight": module for module in self.quantized}

    def unquantized(self) -> list[str]:
        """The modules that `quantization_config` names as left in 16 bits."""
        return ["lm_head", *self.decoder.kept(), *self.kept]

    def groups(self) -> list[list[str]]:
        """Tensor names in groups and in the order of writing."""
        return by_layer(self.tensors)

    def fused_sets(self) -> list[tuple[str, ...]]:
        """The quantized modules in sets that engines fuse: q/k/v, gate/up, and the others alone, of each layer."""
        return fused(self.quantized)

    def size_bytes(self) -> int:
        """Bytes of the tensors to read."""
        return sum(info.nbytes for info in self.tensors.values())

    def output_bytes(self) -> int:
        """Bytes of the tensors to write."""
        total = 0
        for name, info in self.tensors.items():
            specs = self.format.tensor_specs(*info.shape).values() if name in self.chosen else [info]
            total += sum(DTYPE_BYTES[spec.dtype] * math.prod(spec.shape) for spec in specs)
        return total


def read_source(
    model: str,
    ignore: Sequence[str] = (),
    trust_remote_code: bool = False,
    option: str = "--ignore",
    format: Format = formats.DEFAULT,
) -> Source:
    """Open `model` (folder, hub id or `tiny`) as far as its headers, to make `format` of it.

    `option` is what gives the patterns of `ignore`, for the messages. Raises CheckpointError or ConfigError.
    """
    name, folder = _locate(model, trust_remote_code)
    config = read_config(folder)
    if "text_config" in config:
        kind = config["text_config"].get("model_type") if isinstance(config["text_config"], dict) else None
        raise CheckpointError(
            f"{folder} is a model for pictures and text ({config.get('model_type')}), and qerl does not support a text "
            f"part of the type {kind}: give a model whose text part is one of {', '.join(TEXT_MODELS)}, or a text model"
        )
    _check_config(folder, config)
    tensors, whole = read_tensors(folder), "text_config" in read_json(folder / "config.json")
    linears = check_layout(folder, config, tensors)
    config = with_own_head(config, tensors)
    kept = matching(linears, ignore, option)
    _refuse_split(linears, decoder_of(config, str(folder)), frozenset(kept), option)
    quantized = tuple(module for module in linears if module not in set(kept))
    if not quantized:
        raise ConfigError(f"{option} {' '.join(ignore)} leaves no layer to quantize: write narrower patterns")
    for module in quantized:
        _check_weight(module, tensors[f"{module}.weight"], format)
    _check_tokenizer(folder)
    for each, info in tensors.items():
        if info.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{each} is {info.dtype}, which is no 16-bit (or 32-bit) float: the model is quantized already, give "
                "the one that it was made from"
            )
    return Source(name, folder, config, tensors, quantized, tuple(kept), trust_remote_code, format, whole)


def _locate(model: str, trust_remote_code: bool) -> tuple[str, Path]:
    kind = resting_kind(Path(model))
    if kind is not None:  # checked first, since `resolve_model` would look for its base
        whole = kind == "run" and kind_of_run(Path(model)).packs
        command = export_line(Path(model)) if whole else f"qerl merge --adapter {model}"
        raise CheckpointError(
            f"{model} is {'an adapter' if kind == 'adapter' else 'a run'}, not a model: write "
            f"`{command} --to {formats.DEFAULT.name}`, or give the model that it was trained on"
        )
    ref = resolve_model(model)
    check_whole(ref, model, "quantizing takes")
    if is_hub_id(ref.base):
        return ref.base, download_model(ref.base, trust_remote_code)
    folder = Path(ref.base)
    return WORDS.get(folder, str(folder.resolve())), folder


def _check_config(folder: Path, config: dict) -> None:
    check_decoder(config, str(folder))
    if not isinstance(config.get("num_hidden_layers"), int):
        raise CheckpointError(f"{folder / 'config.json'} has no num_hidden_layers: {SUPPORTED}; give one of these")
    check_numbers(config, str(folder))


def check_layout(folder: Path, config: dict, tensors: dict[str, TensorInfo]) -> list[str]:
    """All linears of the decoder, in order. Raises CheckpointError, which names a tensor, for another layout."""
    decoder = decoder_of(config, str(folder))
    linears = decoder.linears()
    expected = {f"{module}.weight" for module in (*linears, *decoder.kept())}
    for name, info in tensors.items():
        layer = LAYER.fullmatch(name)
        small = len(info.shape) < 2 and (layer is not None or name.removesuffix(".bias") in ("lm_head", "model.norm"))
        outside = name in OUTSIDE_LAYERS and len(info.shape) == (1 if "norm" in name else 2)
        if name not in expected and not outside and not small:
            raise CheckpointError(
                f"{folder} ({config.get('model_type')}) has {name} of shape {list(info.shape)}: {SUPPORTED}; give one "
                "of these"
            )
    required = expected | {"model.embed_tokens.weight", "model.norm.weight"}
    if config.get("tie_word_embeddings") is False:  # without this key the architecture decides
        required.add("lm_head.weight")
    if missing := sorted(required - tensors.keys()):
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the tensors that its config.json asks for ({', '.join(missing[:3])}): "
            f"copy or download it again, or give another model: {SUPPORTED}"
        )
    for module in (module for layer in decoder.sparse for expert in decoder.experts_of(layer) for module in expert):
        shape, own = tensors[f"{module}.weight"].shape, decoder.shape_of(module.rpartition(".")[2])
        if shape != own:
            raise CheckpointError(
                f"{folder} has {module}.weight of shape {list(shape)}, and by its config.json that is {list(own)}: "
                "copy weights and config.json from the same checkpoint"
            )
    return linears


def _refuse_split(linears: Sequence[str], decoder: Decoder, kept: Collection[str], option: str) -> None:
    """Refuse patterns that split what engines multiply by at once: q/k/v, gate/up, and a layer's experts."""
    experts = [[module for expert in decoder.experts_of(layer) for module in expert] for layer in decoder.sparse]
    for modules in (*fused(linears), *experts):
        outside = [module for module in modules if module in kept]
        if outside and len(outside) < len(modules):
            rest = [module for module in modules if module not in kept]
            raise ConfigError(
                f"{option} keeps {outside[0]} in 16 bits but not {' and '.join(rest[:2])} ({len(rest)} linears), and "
                "engines multiply by them at once: ignore all of them or none"
            )


def _check_weight(module: str, info: TensorInfo, format: Format) -> None:
    if len(info.shape) != 2:
        raise CheckpointError(f"{module}.weight has shape {list(info.shape)}, a linear has two axes: {SUPPORTED}")
    format.check_features(*info.shape, name=module)


def _check_tokenizer(folder: Path) -> None:
    if not any(all((folder / file).is_file() for file in files) for files in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt): copy the "
            "tokenizer files of the model into it"
        )
    if (folder / "tokenizer.json").is_file():
        read_json(folder / "tokenizer.json")


def by_layer(names: Iterable[str]) -> list[list[str]]:
    """Tensor names in groups: embeddings, each decoder layer, final norm and head."""
    layers: dict[int, list[str]] = {}
    for name in names:
        if not name.endswith(COMPUTED):
            layers.setdefault(layer_of(name), []).append(name)
    return [sorted(layers[position]) for position in sorted(layers)]


def layer_of(name: str) -> int:
    """The decoder layer of a tensor; -1 for embeddings, and a number above all layers for final norm and head."""
    layer = LAYER.fullmatch(name)
    if layer:
        return int(layer.group(1))
    return -1 if name.startswith("model.embed_tokens") else 1 << 30


Tensors = dict[str, "torch.Tensor"]
HEADROOM_BITS = 2  # powers of two by which trained weights, or activations, may grow before a block scale saturates
ScaleOf = Callable[[Sequence[str], Sequence["torch.Tensor"]], "torch.Tensor"]  # of the modules and weights of one set


def packed_groups(
    source: Source, read: Callable[[str], torch.Tensor], device: torch.device, scale_of: ScaleOf | None = None
) -> Iterator[Tensors]:
    """The tensors to write, on the CPU, one group of `source.groups()` at a time.

    A group holds a whole layer, so that linears which engines fuse (q/k/v, gate/up) are packed together. `scale_of`
    gives the scale that these share; without it the format derives it from them. Raises CheckpointError for a tensor
    with NaN or infinity.
    """
    sets = {f"{modules[0]}.weight": modules for modules in source.fused_sets()}
    for names in source.groups():
        written = {name: finite(name, read(name)) for name in names if name not in source.chosen}
        for modules in (sets[name] for name in names if name in sets):
            own = [f"{module}.weight" for module in modules]
            weights = [weight_for_scales(name, read(name)).to(device) for name in own]
            packed = source.format.quantize(weights, scale_of(modules, weights) if scale_of else None)
            for module, tensors in zip(modules, packed, strict=True):
                written |= {f"{module}.{part}": tensor.cpu().contiguous() for part, tensor in tensors.items()}
        yield written


def power_of_two_scale_of(earlier: Mapping[str, torch.Tensor] | None = None, headroom_bits: int = 0) -> ScaleOf:
    """NVFP4's global scale (1,) as a power of two, for `packed_groups`.

    `headroom_bits`: by how many powers of two the weights may grow under it. `earlier` has scales, by module, of
    linears that were quantized before: they stay unless the weights have outgrown them.
    """
    from qerl.formats.nvfp4.reference import shared_global_scale

    def scale_of(modules: Sequence[str], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        scale = shared_global_scale(weights, "pow2", headroom_bits)
        for module in modules:
            scale = scale.minimum((earlier or {}).get(module, scale).to(scale.device))
        return scale

    return scale_of


def weight_for_scales(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight in the dtype in which its scales are computed: float32 for float16, else its own.

    A float16 global scale overflows if amax is under 0.041, and llm-compressor then writes 1.0. Raises CheckpointError
    for NaN and infinity, which llm-compressor would turn into scales of NaN and 0.
    """
    import torch

    weight = finite(name, weight)
    return weight.float() if weight.dtype == torch.float16 else weight


def finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged. Raises CheckpointError if it holds NaN or infinity."""
    if not all_finite(tensor):
        raise CheckpointError(f"{name} holds NaN or infinity: the checkpoint is damaged, take another copy")
    return tensor


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any size holds neither NaN nor infinity."""
    return all(bound.isfinite() for bound in tensor.aminmax())  # aminmax makes no copy: embeddings are large
