"""Open a checkpoint as a transformers model, 16-bit or with its linears left packed, and its tokenizer.

    load_model("checkpoints/Qwen2.5-7B-Instruct-NVFP4A16", "nvfp4", dtype="bfloat16", device="cuda")

transformers itself would unpack a whole NVFP4 checkpoint at the first forward (transformers 5.17 with
compressed-tensors 0.19, `ct_decompress_hook`). So qerl builds the modules from the config alone, replaces the quantized
linears by the format's, and puts each tensor from its file into its place: no dense copy of a linear exists.
Experts become our blocks, each copied into its place as it is read.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError, first_line
from qerl.base.sandbox import SWITCH, try_tokenizer
from qerl.checkpoint.activations import INPUT_SCALE, check_packed, kind_of_activations, place_activations_
from qerl.checkpoint.experts import DECAYS, DOWN, FUSED_GATE_UP, Decoder, Place, check_numbers, decoder_of
from qerl.checkpoint.folder import EMBEDDED, format_of, quantize_line
from qerl.checkpoint.hub import check_links, download_model
from qerl.checkpoint.resolve import ModelRef
from qerl.checkpoint.shards import TensorInfo, TensorReader, has_own_head, read_config, read_json, read_tensors
from qerl.formats.base import Format

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from qerl.formats.experts import ExpertWeights


SERVED = ("Qwen3-MoE",)  # the families that the plugin of vLLM knows
PARTS = {FUSED_GATE_UP: 2, DOWN: 1}  # how many linears of an expert are in one tensor in memory


def check_served_family(decoder: Decoder, folder: Path) -> None:
    """Raise CheckpointError for a family that the transformers engine opens, and vLLM does not."""
    if decoder.has_experts and decoder.family.title not in SERVED:
        raise CheckpointError(
            f"{folder} is a mixture of experts of the family {decoder.family.title}, and qerl serves "
            f"{', '.join(SERVED)} with vLLM: take one of these, or write rollout.engine: transformers"
        )


def check_kv_cache(decoder: Decoder, name: str | Path, kv_cache_dtype: str) -> None:
    """Raise CheckpointError for a type of keys and values that vLLM does not serve where layers attend differently."""
    if (decoder.linear or decoder.full) and kv_cache_dtype != "auto":
        what = "linear attention, beside whose states" if decoder.linear else "layers with other head sizes, for which"
        raise CheckpointError(
            f"{name} has {what} the vllm engine keeps keys and values in 16 bits: write rollout.kv_cache_dtype: auto "
            f"in place of {kv_cache_dtype}"
        )


def fill_experts_(
    model: nn.Module, decoder: Decoder, format: Format, tensors: Mapping[str, TensorInfo], dtype: torch.dtype
) -> dict[str, TensorInfo]:
    """Put our blocks into `model`, whose modules may have no storage, with the experts of a checkpoint's `tensors`.

    Products are in `dtype`. Returns the tensors that are left to load, by their names in memory. Raises CheckpointError
    for experts that do not fit config.json.
    """
    weights = _place_(model, decoder, format, dtype)
    own = check_complete(decoder, format, tensors)
    with TensorReader({name: tensors[name] for name in own}) as read:
        for name, place in own.items():
            weights[place.tensor].write_(name.rpartition(".")[2], place.expert, place.first_row, read(name))
    return {
        decoder.in_memory(name): replace(info, stored_as=info.stored_as or name)
        for name, info in tensors.items()
        if name not in own
    }


def place_blocks_(model: nn.Module, decoder: Decoder, weights: Mapping[str, nn.Module]) -> None:
    """Put our blocks in place of the model's; `weights` are the experts' by their full names in memory."""
    from qerl.model.experts import ExpertBlock, Experts

    for number, layer in enumerate(decoder.sparse):
        inside = f"model.layers.{layer}"
        router = model.get_submodule(f"{inside}.mlp.gate")
        experts = Experts(weights[f"{inside}.{FUSED_GATE_UP}"], weights[f"{inside}.{DOWN}"])
        block = ExpertBlock(router, experts, decoder.chosen, decoder.normalises, number)
        model.set_submodule(f"{inside}.mlp", block)
    model.config.output_router_logits = False  # transformers would read them from its own routers, for a loss of theirs


def _place_(model: nn.Module, decoder: Decoder, format: Format, dtype: torch.dtype) -> dict[str, ExpertWeights]:
    """Our blocks in place of the model's, with empty weights, which are returned by their full names in memory."""
    from qerl.formats.experts import ExpertWeights

    placed = {
        f"model.layers.{layer}.{name}": ExpertWeights(format, decoder.shape_in_memory(name), "cpu", dtype, parts)
        for layer in decoder.sparse
        for name, parts in PARTS.items()
    }
    place_blocks_(model, decoder, placed)
    return placed


def check_complete(decoder: Decoder, format: Format, tensors: Mapping[str, TensorInfo]) -> dict[str, Place]:
    """The experts' tensors among a checkpoint's, with the place in memory of each.

    Raises CheckpointError if one that config.json describes is missing, and for more of them.
    """
    places = {name: decoder.place_of(name.rpartition(".")[0]) for name in tensors}
    own = {name: place for name, place in places.items() if place is not None}
    _check_names(decoder, format, set(own), next(iter(tensors.values())).file.parent)
    return own


def _check_names(decoder: Decoder, format: Format, names: set[str], folder: Path) -> None:
    linears = (linear for layer in decoder.sparse for expert in decoder.experts_of(layer) for linear in expert)
    expected = {f"{linear}.{part}" for linear in linears for part in format.tensors or ("weight",)}
    if missing := sorted(expected - names):
        raise CheckpointError(
            f"{folder} lacks experts that its config.json describes ({missing[0]}; {len(missing)} tensors in all): the "
            "checkpoint is incomplete, or quantized in part; copy or quantize it again"
        )
    if more := sorted(names - expected):
        raise CheckpointError(
            f"{folder} holds {more[0]}, which no {format.label} expert has ({len(more)} tensors in all): copy or "
            "quantize it again"
        )


logger = logging.getLogger(__name__)

COMPUTED = "rotary_emb.inv_freq"  # a tensor of old checkpoints, which transformers now computes from the config
FLOATS = ("F64", "F32", "F16", "BF16")


def load_model(
    path: str | Path, format: str, dtype: str = "auto", device: str = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Open the weights at `path` (folder or hub id), frozen and in eval mode.

    `format` is the name of a `qerl.formats` value. `dtype` is for the 16-bit tensors and the products: "auto" is
    bfloat16 on a GPU and float32 on a CPU, where bfloat16 products are slow. Raises CheckpointError for a folder of
    another format.
    """
    from qerl.model.layers import fuse_

    folder = local_folder(path, trust_remote_code)
    wanted, found = formats.get(format), format_of(folder)
    torch_dtype = resolve_dtype(dtype, device)
    _check_format(folder, wanted, found)
    check_packed(folder)
    model = _load(folder, wanted, torch_dtype, trust_remote_code).to(device)
    place_activations_(model, folder, wanted)
    fuse_(model)
    return model.requires_grad_(False).eval()


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer, which pads on the left; if it has no pad token, with the end-of-sequence token.

    Raises CheckpointError if there is none that can be read.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    folder = local_folder(path, trust_remote_code)
    try:
        if (folder / "tokenizer.json").is_file():
            try_tokenizer(folder / "tokenizer.json")
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=trust_remote_code)
        tokenizer("3 + 4")  # odd values of tokenizer_config.json show only here
    except StrictDataclassError as error:
        raise CheckpointError(
            f"{folder}/config.json cannot be read ({' '.join(str(error).split())}): copy it from the original model"
        ) from error
    except Exception as error:  # an odd value raises whatever the code that met it raises
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read ({first_line(error)}): copy tokenizer.json and "
            "tokenizer_config.json from the original model into it"
        ) from error
    if tokenizer.eos_token is None:
        raise CheckpointError(f"the tokenizer in {folder} names no eos_token: set it in its tokenizer_config.json")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """ "auto", "bfloat16" or "float32" as a torch dtype."""
    import torch

    if dtype == "auto":
        dtype = "float32" if torch.device(device).type == "cpu" else "bfloat16"
    if dtype not in ("bfloat16", "float32"):
        raise CheckpointError(f"dtype {dtype!r} is not supported: write auto, bfloat16 or float32")
    return getattr(torch, dtype)


def local_folder(path: str | Path, trust_remote_code: bool = False) -> Path:
    """`path` if it is a folder here, the embedded model of that name, or else the hub's snapshot of that id."""
    if str(path) in EMBEDDED:
        return EMBEDDED[str(path)]
    if Path(path).is_dir():
        check_links(Path(path))
        return Path(path)
    return download_model(str(path), trust_remote_code)


def end_token_ids(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's, and what the folder's generation config names.

    Without a generation config the model's `config` is asked.
    """
    declared = None
    if (folder / "generation_config.json").exists():
        declared = _generation_config(folder).eos_token_id
    if declared is None:
        declared = getattr(config, "eos_token_id", None)
    declared = [] if declared is None else declared if isinstance(declared, list) else [declared]
    if not all(type(token) is int and 0 <= token < 2**31 for token in declared):
        raise CheckpointError(
            f"{folder}: eos_token_id {declared!r:.60} in generation_config.json or config.json is no list of token "
            "numbers: copy the file from the original model"
        )
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *declared]))


def _generation_config(folder: Path) -> GenerationConfig:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # an odd value raises whatever the code that met it raises
        raise CheckpointError(
            f"{folder}/generation_config.json cannot be read ({first_line(error)}): copy it from the original model"
        ) from error


def _check_format(folder: Path, wanted: Format, found: Format) -> None:
    if found.quantized and found is not wanted:
        raise CheckpointError(
            f"{folder} holds {found.label} weights: load it with format {found.name}, or give the 16-bit model"
        )
    if wanted.quantized and found is not wanted:
        raise CheckpointError(f"{folder} holds 16-bit weights: run `{quantize_line(str(folder), wanted)}` first")


def check_config_fits(folder: Path, tensors: Mapping[str, TensorInfo], trust_remote_code: bool = False) -> None:
    """Raise CheckpointError if config.json describes another model than the 16-bit `tensors`; reads headers only.

    Experts are left out: `qerl.checkpoint.source.check_layout` checks them by their names in files.
    """
    decoder = decoder_of(read_config(folder), str(folder))
    model = empty_model(folder, None, trust_remote_code)
    for layer in decoder.sparse:
        del model.get_submodule(f"model.layers.{layer}.mlp").experts
    there = {name: info.shape for name, info in tensors.items() if not name.endswith(COMPUTED)}
    there = {decoder.in_memory(name): shape for name, shape in there.items() if ".experts." not in name}
    _refuse_misfits(folder, model, there)


def _refuse_misfits(folder: Path, model: PreTrainedModel, there: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors of these shapes that are not those which an empty `model` asks for, by their names in memory."""
    own = model.state_dict()
    # A buffer, such as Gemma 4's layer_scalar, has a value before it is read; those of experts are filled already.
    buffers = {name for name, _ in model.named_buffers() if not (".experts." in name or name.endswith(COMPUTED))}
    empty = {name for name, tensor in own.items() if tensor.is_meta or name in buffers}
    found = [f"{name} is missing" for name in sorted(empty - set(model.all_tied_weights_keys) - there.keys())]
    found += [f"the model has no place for {name}" for name in sorted(there.keys() - own.keys())]
    shapes = {name: tuple(own[name].shape) for name in sorted(there.keys() & own.keys())}
    found += [f"{name} is {[*there[name]]}, not {[*shape]}" for name, shape in shapes.items() if there[name] != shape]
    if found:
        raise CheckpointError(
            f"{folder} does not hold the model that its config.json describes ({'; '.join(found[:3])}; {len(found)} in "
            "all): copy weights and config.json from the same checkpoint"
        )


def config_of(folder: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """transformers' config of a folder, of a model for pictures and text its text part's, without quantization."""
    from transformers import AutoConfig

    own = read_config(folder)
    if "text_config" in read_json(folder / "config.json") and "text_config" not in own:
        config = AutoConfig.for_model(**own)
    else:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def empty_model(folder: Path, dtype: torch.dtype | None, trust_remote_code: bool) -> PreTrainedModel:
    """The modules that config.json describes, on the meta device and without quantization."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    check_numbers(read_config(folder), str(folder))
    try:
        config = config_of(folder, trust_remote_code)
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # of the model's code, whatever value of the config it met
        raise CheckpointError(
            f"{folder} cannot be loaded: {first_line(error)}; take Qwen2, Qwen3, Qwen3.5, Gemma 4, Llama or Mistral"
        ) from error


def _load(folder: Path, format: Format, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    import torch

    from qerl.formats.linear import swap_linears

    config, tensors = read_config(folder), read_tensors(folder)
    static = kind_of_activations(folder, format) == "static" or len(format.kinds) > 1
    scales = {name for name, info in tensors.items() if name.endswith(f".{INPUT_SCALE}") and (static or info.turn)}
    tensors = {name: info for name, info in tensors.items() if not (name in scales or name.endswith(COMPUTED))}
    model = empty_model(folder, dtype, trust_remote_code)
    if has_own_head(config, tensors):
        model.config.tie_word_embeddings = False  # read by `tie_weights`, once the tensors are in place
    names = format.quantized_linears(tensors)
    linears = len(names)
    decoder = decoder_of(config, str(folder))
    if decoder.has_experts:
        tensors = fill_experts_(model, decoder, format, tensors, dtype)
        names = [name for name in names if decoder.place_of(name) is None]
    own = {name: format.of(name, tensors) for name in names}
    with torch.device("meta"):
        for kind in dict.fromkeys(own.values()) or ((format,) if format.quantized else ()):
            swap_linears(model, [name for name in names if own[name] is kind], kind)
    for name in names:
        format.configure_(model.get_submodule(name), config.get("quantization_config"))
    packed = {f"{name}.{part}" for name, kind in own.items() for part in kind.tensors}
    _refuse_bare_codes(folder, tensors, packed)
    _refuse_misfits(folder, model, {name: info.shape for name, info in tensors.items()})
    _fill_(model, tensors, packed, dtype)
    if (folder / "generation_config.json").exists():
        model.generation_config = _generation_config(folder)
    logger.info("opened %s: %d packed linears, dtype %s", folder, linears, dtype)
    return model


def _fill_(
    model: PreTrainedModel, tensors: Mapping[str, TensorInfo], packed: Collection[str], dtype: torch.dtype
) -> None:
    """Put each file's tensors in place, cast to `dtype`, except for `packed` linears; DECAYS only to a wider one."""
    import torch

    for file in dict.fromkeys(info.file for info in tensors.values()):
        with TensorReader(tensors) as reader:
            read = {name: reader(name) for name, info in tensors.items() if info.file == file}
        widths = {n: torch.promote_types(v.dtype, dtype) if n.endswith(DECAYS) else dtype for n, v in read.items()}
        values = {name: value if name in packed else value.to(widths[name]) for name, value in read.items()}
        try:
            model.load_state_dict(values, strict=False, assign=True)
        except RuntimeError as error:
            lines = str(error).splitlines()
            raise CheckpointError(
                f"{file} does not fit its config.json ({lines[min(1, len(lines) - 1)].strip()}): copy both files from "
                "the same checkpoint"
            ) from error
    model.tie_weights()


def _refuse_bare_codes(folder: Path, tensors: Mapping[str, TensorInfo], packed: Collection[str] = ()) -> None:
    """Integers, and floats of 8 bits or fewer, are codes, which mean nothing without their scales."""
    bare = [name for name, info in tensors.items() if name not in packed and info.dtype not in FLOATS]
    if bare:
        raise CheckpointError(
            f"{folder} holds {bare[0]} as {tensors[bare[0]].dtype} without scales ({len(bare)} such tensors): the "
            "checkpoint is incomplete or of another format, give the 16-bit model"
        )


# What a chat template is given already.
GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


def check_chat_template(ref: ModelRef) -> None:
    """Raise CheckpointError for a base whose tokenizer has no chat template.

    Files that are not on this machine yet are left to whoever loads the tokenizer.
    """
    folder = Path(ref.base) if Path(ref.base).is_dir() else ref.path
    config = folder / "tokenizer_config.json"
    if not config.is_file() or any(folder.glob("*chat_template*")) or read_json(config).get("chat_template"):
        return
    raise CheckpointError(
        f"the tokenizer in {folder} has no chat template, so prompts cannot be written as the model expects them: use "
        "the instruct version of the checkpoint, or put a chat_template.jinja into that folder"
    )


def check_switches(tokenizer: PreTrainedTokenizerBase, switches: Mapping[str, Any], key: str) -> None:
    """Raise ConfigError for a variable that the chat template does not read, under the `key` that set it."""
    template = tokenizer.get_chat_template() if switches else ""
    for name, value in switches.items():
        if name == SWITCH:
            if not isinstance(value, bool):
                raise ConfigError(f"{key}.{name} is {value!r}: write true or false")
            continue
        if name in GIVEN:
            raise ConfigError(f"{key} sets {name}, which qerl gives the chat template itself: leave it out")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            near = difflib.get_close_matches(name, set(re.findall(r"\b[a-z]\w*_\w+\b", template)), n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out, or use a model whose template has it"
            raise ConfigError(
                f"{key} sets {name}, which the chat template of {tokenizer.name_or_path!r} does not read: {hint}"
            )


class CompletionText:
    """Token ids -> text, with the tokenizer of one model, without the tokens that end or pad a completion.

    Other tokens that a tokenizer marks as special are a part of the answer: some mark `<think>` or `<tool_call>` so,
    and a grader has to see these.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]) -> None:
        """`end_ids` end a completion; so do the tokenizer's end of a sequence and what it pads with."""
        self._tokenizer = tokenizer
        self._left_out = frozenset([*end_ids, tokenizer.eos_token_id, tokenizer.pad_token_id]) - {None}

    def __call__(self, token_ids: Sequence[int]) -> str:
        kept = [token for token in map(int, token_ids) if token not in self._left_out]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def batch(self, completions: Sequence[Sequence[int]]) -> list[str]:
        return [self(token_ids) for token_ids in completions]


def text_of_engine(tokenizer: PreTrainedTokenizerBase, engine: Any) -> CompletionText:
    """The text of what an open engine samples."""
    return CompletionText(tokenizer, getattr(engine, "end_token_ids", ()))
