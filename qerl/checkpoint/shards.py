"""Tensors in safetensors files: list and check them from the headers, and read single ones on demand.

A file's header is enough to know what a checkpoint holds, and to notice a truncated or missing file before any long
work. Importing this loads no torch.

A checkpoint for pictures and text holds a decoder under `text_config`, with its tensors under a prefix. Without
pictures its positions are a text model's, so it is read as the text model of that family.

A folder of NVIDIA's ModelOpt is read as compressed-tensors would have written it (`read_config`, `read_tensors`), and
FP8 with one scale per tensor as blocks that share it. A packed head is decoded to float32.

A head that differs from the embeddings counts even where config.json ties the two, as in transformers 5. Engines and
other readers go by `tie_word_embeddings`, so whatever qerl writes says false there (`with_own_head`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.base.files import JSON_BYTES, parse_json, read_text
from qerl.formats.base import Format
from qerl.formats.fp8.layout import CODES, SCALE, blocks
from qerl.formats.nvfp4.layout import GLOBAL_SCALE, INPUT_SCALE, PACKED

if TYPE_CHECKING:
    import torch

    Turn = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
WEIGHT_DTYPES = ("BF16", "F16", "F32")  # of weights that are not packed
MAX_AXES = 16
OTHER_NAMES = {"weight_scale_inv": SCALE}  # what DeepSeek and Qwen call the scales of FP8 weights
OF_KV_CACHE = ("k_scale", "v_scale")  # of a cache in 8 bits, whose kind the engine is told: no weight of a model
OF_MODELOPT = "input_scale", "weight_scale_2"  # of an NVFP4 linear; both multiply where ours divide
OF_AWQ = "pre_quant_scale"  # of a ModelOpt linear whose inputs are multiplied before it
MODELOPT_CONFIG = "hf_quant_config.json"


@dataclass(frozen=True)
class TensorInfo:
    """A header's entry for one tensor; `dtype` is as safetensors writes it (`BF16`, `F8_E4M3`, `U8`, ...)."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    nbytes: int
    stored_as: str | None = None  # its name in the file, where `read_tensors` gives it another
    turn: Turn | None = None  # makes it, in its shape, of the file's
    packed: tuple[Format, Mapping[str, TensorInfo]] | None = None  # what it is decoded from


def read_json(path: Path) -> dict:
    """The JSON object in `path`. Raises CheckpointError if it is not one."""
    try:
        value = parse_json(read_text(path, JSON_BYTES))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): check the path and its permissions"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): copy or download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object: copy or download it again")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, of a model for pictures and text as its text part's, if that is of a family in TEXT_MODELS.

    The quantization_config of a ModelOpt folder is as compressed-tensors would have written it. Raises CheckpointError.
    """
    config = _text_config(read_json(folder / "config.json"))
    given, beside = config.get("quantization_config"), folder / MODELOPT_CONFIG
    alone = given is None and beside.is_file()
    if not alone and not (isinstance(given, Mapping) and str(given.get("quant_method")).startswith("modelopt")):
        return config
    try:
        stored = _stored_tensors(folder)
    except CheckpointError:  # they are not all here yet; who reads them says what is wrong
        stored = {}
    if alone and stored and not any(info.dtype in ("U8", "F8_E4M3") for info in stored.values()):
        return config  # the weights were decoded, and the file was left over
    made = formats.of_modelopt(folder, read_json(beside) if alone else given)
    if made is None:
        return {key: value for key, value in config.items() if key != "quantization_config"}
    scaled = {name.rpartition(".")[0] for name in stored.keys() - _OF_HEADS if name.endswith(f".{OF_MODELOPT[0]}")}
    packed = {module for module in scaled if f"{module}.{OF_MODELOPT[1]}" in stored}
    for group in made["config_groups"].values():  # older files name one algorithm with and without them
        if stored and not (packed if group["format"] == formats.NVFP4.layout else scaled - packed):
            group["input_activations"] = None
    return {**config, "quantization_config": made}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises CheckpointError if it is truncated or not a safetensors file."""
    from safetensors import SafetensorError, safe_open

    found = {}
    try:
        with safe_open(path, framework="np") as file:  # whose tensors share no bytes and fill the file
            for name in file.offset_keys():
                entry = file.get_slice(name)
                dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
                if len(shape) > MAX_AXES:
                    raise ValueError(f"{name} has {len(shape)} axes")
                found[name] = TensorInfo(dtype, shape, path, math.prod(shape) * DTYPE_BYTES.get(dtype, 0))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}): copy or download it again"
        ) from error
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights, in the index's order.

    Raises CheckpointError if there is none, if there are only pickled files, or if the index names a missing one.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(map(_is_file_name, weight_map.values())):
            raise CheckpointError(
                f"{index} has no weight_map to file names (in its own folder): copy or download the file again"
            )
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of the {len(names)} shards that its index names "
                f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}): copy or download them again"
            )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} has its weights only as pickled files ({pickled[0]}), which can run code when opened and are "
            "never read: take a safetensors version of the model, or load and save it once with "
            "save_pretrained in a place where you trust it"
        )
    raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}: give a folder with the model's weights")


def _is_file_name(value: object) -> bool:
    """Whether it names a file of the index's own folder: a path would lead out of it."""
    return isinstance(value, str) and value.endswith(".safetensors") and Path(value).name == value


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint by name, from the headers of all its files, under our names.

    Raises CheckpointError for what `weight_files` and `read_header` refuse, and if the index names a tensor that its
    file does not hold.
    """
    tensors, config = _with_dense_head(_renamed(_stored_tensors(folder))), folder / "config.json"
    return _text_tensors(tensors) if config.is_file() and "text_config" in read_json(config) else tensors


def _stored_tensors(folder: Path) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        tensors.update(read_header(path))
    index = folder / INDEX
    if index.is_file():
        for name, file in read_json(index)["weight_map"].items():
            if name not in tensors or tensors[name].file.name != file:
                raise CheckpointError(f"{index} says that {name} is in {file}, and it is not: download both again")
    return tensors


def _renamed(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The weights with our names. A name that is there already is not taken away from its tensor."""
    found = {}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in OF_KV_CACHE:
            continue
        if leaf == OF_AWQ:
            raise CheckpointError(
                f"{info.file.parent} has {name}: its weights were smoothed by AWQ, which qerl does not undo: give the "
                "model that it was made from"
            )
        own, made = OTHER_NAMES.get(leaf, leaf), info
        codes = tensors.get(f"{module}.{CODES}")
        if f"{module}.{OF_MODELOPT[1]}" in tensors:
            own = {CODES: PACKED, **dict(zip(OF_MODELOPT, (INPUT_SCALE, GLOBAL_SCALE), strict=True))}.get(leaf, leaf)
            if leaf in OF_MODELOPT and math.prod(info.shape) == 1:
                made = replace(info, shape=(1,), turn=_inverse)
        elif codes is not None and codes.dtype == "F8_E4M3" and len(codes.shape) == 2:
            if leaf == OF_MODELOPT[0]:
                continue  # inputs stay in 16 bits
            shape = blocks(codes.shape[0]), blocks(codes.shape[1])
            one, wide = math.prod(info.shape) == 1, info.shape == (shape[0], 1, shape[1], 1)
            if own == SCALE and info.shape != shape and (one or wide):
                size = math.prod(shape) * DTYPE_BYTES.get(info.dtype, 0)
                made = replace(info, shape=shape, nbytes=size, turn=_in_blocks)
        renamed = own != leaf and f"{module}.{own}" not in tensors
        made = replace(made, stored_as=name) if renamed else made
        found[f"{module}.{own}" if renamed else name] = made
    return found


def _inverse(stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return 1 / stored.float().reshape(shape)


def _in_blocks(stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return stored.reshape(()).expand(shape).contiguous() if stored.numel() == 1 else stored.reshape(shape)


def _with_dense_head(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The same with a packed head as one tensor that is decoded when it is read."""
    for name in HEADS:
        module = name.rpartition(".")[0]
        own = [each for each in formats.all_formats() if each.quantized]
        kind = next((each for each in own if all(f"{module}.{part}" in tensors for part in each.tensors)), None)
        if kind is None:
            continue
        parts = {part: tensors[f"{module}.{part}"] for part in kind.tensors}
        parts = {part: replace(info, stored_as=info.stored_as or f"{module}.{part}") for part, info in parts.items()}
        shape = kind.dense_shape({part: info.shape for part, info in parts.items()})
        head = TensorInfo("F32", shape, parts[kind.tensors[0]].file, 4 * math.prod(shape), packed=(kind, parts))
        left_out = {f"{module}.{part}" for part in (*kind.tensors, INPUT_SCALE)}
        tensors = {each: info for each, info in tensors.items() if each not in left_out} | {name: head}
    return tensors


# model_type of the text part -> the text model's, and its class in transformers.
TEXT_MODELS = {
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_5_text": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "ministral3": ("ministral3", "Ministral3ForCausalLM"),
    "gemma3_text": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma4_text": ("gemma4_text", "Gemma4ForCausalLM"),
    "gemma4_unified_text": ("gemma4_unified_text", "Gemma4UnifiedForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
}
# The decoder's tensors, as the hub and transformers 5 name them.
PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
PICTURES = ("model.visual.", "model.vision")  # begin what is not text under the last of them
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_OF_HEADS = {f"{name.rpartition('.')[0]}.{OF_MODELOPT[0]}" for name in HEADS}
FROM_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")
OF_PICTURES = ("mrope_section", "mrope_interleaved")  # how positions of pictures are rotated


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") not in TEXT_MODELS:
        return config
    model_type, architecture = TEXT_MODELS[text["model_type"]]
    own = {key: config[key] for key in FROM_WHOLE if key in config and text.get(key) is None}
    rope = {
        key: {name: value for name, value in text[key].items() if name not in OF_PICTURES}
        for key in ("rope_parameters", "rope_scaling")
        if isinstance(text.get(key), dict)
    }
    own |= {key: config[key] for key in ("tie_word_embeddings",) if key in config}  # the whole model's is what counts
    return {**text, **own, **rope, "model_type": model_type, "architectures": [architecture]}


def _text_tensors(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Those of the text part, under the names of the text model."""
    prefix = next((each for each in PREFIXES if any(name.startswith(f"{each}layers.") for name in tensors)), None)
    if prefix is None:
        return tensors
    found = {}
    for name, info in tensors.items():
        own = HEAD if name in HEADS else f"{PREFIXES[-1]}{name.removeprefix(prefix)}"
        if name in HEADS or (name.startswith(prefix) and not name.startswith(PICTURES)):
            found[own] = replace(info, stored_as=info.stored_as or name)
    return found


KEY, EMBEDDINGS, HEAD = "tie_word_embeddings", "model.embed_tokens.weight", "lm_head.weight"
ROWS = 8192  # of both that are compared at a time


def has_own_head(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether the file has a head that differs from the embeddings, and config.json does not say that it is untied.

    `tensors` are the checkpoint's by name. Raises CheckpointError if they cannot be read.
    """
    if config.get(KEY) is False or not {EMBEDDINGS, HEAD} <= tensors.keys():
        return False
    head, embeddings = tensors[HEAD], tensors[EMBEDDINGS]
    return head.packed is not None or head.shape != embeddings.shape or not _equal(head, embeddings)


def with_own_head(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The config, which says that the head is untied if the file has one of its own."""
    return {**config, KEY: False} if has_own_head(config, tensors) else dict(config)


def _equal(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors, named as they are in their files, hold the same numbers."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(one.file, framework="pt") as left, safe_open(other.file, framework="pt") as right:
            slices = left.get_slice(one.stored_as or HEAD), right.get_slice(other.stored_as or EMBEDDINGS)
            for begin in range(0, one.shape[0], ROWS):
                head, embeddings = (each[begin : begin + ROWS].float() for each in slices)
                if not head.equal(embeddings):
                    return False
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{one.file} cannot be read ({error}): copy or download it again") from error
    return True


class TensorReader:
    """Reads a checkpoint's tensors by name, each on demand; a context manager that closes the files.

    Only one file is open at a time, because the memory map of a file that has been read stays resident.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors
        self._stack = ExitStack()
        self._open: tuple[Path, object] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._open = None

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in the dtype of the file. Raises CheckpointError if the file cannot be read."""
        info = self._tensors[name]
        if info.packed is None:
            return self._read(name, info)
        import torch

        kind, parts = info.packed
        tensors = {part: self._read(name, each) for part, each in parts.items()}
        try:
            return kind.dequantize(tensors, torch.float32)
        except (CheckpointError, RuntimeError) as error:
            raise CheckpointError(
                f"{info.file.parent}: {name} cannot be decoded ({error}): copy or download it again"
            ) from error

    def _read(self, name: str, info: TensorInfo) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        file = info.file
        try:
            if self._open is None or self._open[0] != file:
                self._stack.close()
                self._open = (file, self._stack.enter_context(safe_open(file, framework="pt")))
            stored = self._open[1].get_tensor(info.stored_as or name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read from {file} ({error}): copy or download it again") from error
        return stored if info.turn is None else info.turn(stored, info.shape)
