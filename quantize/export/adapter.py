"""Which adapter an export writes, as a standard PEFT folder, and the start that it was trained with.

With W the 16-bit weight, Q what the base holds of it, B0 A0 what the start repairs of W - Q, and D what the training
changed, which every merge adds, either to W or to Q + B0 A0:

    start      trained policy       D                on W
    none       Q + s B A            s B A            W + D
    frozen     Q + B0 A0 + s B A    s B A            W + D
    trained    Q + s B A            s B A - B0 A0    W + D    (W + s B A would repair what W never lost)

D is a plain LoRA, s B A - B0 A0 = s [B, -B0 / s] [A; A0]: its rank is larger by the rank of a trained start.
"""

import logging
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.files import mode_by_umask
from qerl.checkpoint.adapter_file import PEFT_PREFIX, config_of_file, for_whole_, is_for_whole, is_of_experts, to_peft
from qerl.checkpoint.base_start import BaseStart, TrainedStart, find_start, read_start, start_of_adapter
from qerl.checkpoint.folder import EMBEDDED, TRAINED_ON, beside, embedded_folder, is_text_part, model_of_adapter
from qerl.checkpoint.hub import is_hub_id
from qerl.checkpoint.output import TOKENIZER_CONFIG, write_json
from qerl.checkpoint.peft_folder import TrainedOn, add_tokenizer_, name_bases_, plain_base, trained_on
from qerl.checkpoint.shards import read_json
from quantize.export.base import FACTOR_A, FACTOR_B, Adapter, original_name
from quantize.export.options import ExportOptions

CONFIG = "adapter_config.json"
HOLDS_START = (
    "{} holds a repair of what rounding took from its base, and {} has 16-bit weights, which need none: leave --model "
    "out; `--onto original` merges what was trained, without that repair, with the 16-bit model"
)


@dataclass(frozen=True)
class AdapterStart:
    """How an adapter was trained with a start, where its factors are, and the factors by name."""

    trained: TrainedStart
    found: BaseStart
    factors: Mapping[str, torch.Tensor]

    @property
    def frozen(self) -> bool:
        """Whether it stays beside the adapter, which began at zero."""
        return self.trained.kind == "frozen"

    def change(self, adapter: Adapter) -> Adapter:
        """D as an adapter."""
        return adapter if self.frozen else _side_by_side(adapter, self.factors, _linears(adapter.tensors), -1.0)

    def beside(self, adapter: Adapter) -> dict[str, torch.Tensor]:
        """A0 and B0 that the base needs below D. A start that is trained repairs the adapter's own linears alone."""
        return {name: t for name, t in self.factors.items() if self.frozen or name in adapter.tensors}

    def stacked(self, adapter: Adapter) -> Adapter:
        """A frozen start and its adapter as one, s [B, B0 / s] [A; A0], with zeros where a linear has only one of them.

        It is what an adapter that was trained from the start would be.
        """
        linears = dict.fromkeys([*_linears(adapter.tensors), *_linears(self.factors)])
        return _side_by_side(adapter, self.factors, linears, 1.0)


def start_in_merge(adapter: Path, base: str) -> AdapterStart | None:
    """The start of an adapter; None if it was trained without one. Raises CheckpointError if it is nowhere."""
    trained = start_of_adapter(adapter)
    if trained is None:
        return None
    found = find_start(adapter, base)
    return AdapterStart(trained, found, read_start(found))


def neutral_factors(adapter: Adapter, start: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Factors in the shapes of the adapter's that change nothing, or add B0 A0 where `start` has it for a linear.

    Raises CheckpointError for a start of a larger rank than the adapter's.
    """
    found: dict[str, torch.Tensor] = {}
    for module in adapter.modules:
        a, b = (adapter.tensors[module + factor].clone() for factor in (FACTOR_A, FACTOR_B))
        b.zero_()
        if (a0 := start.get(module + FACTOR_A)) is not None:
            if len(a0) > len(a):
                raise CheckpointError(
                    f"{adapter.folder} has rank {len(a)} and cannot have begun at a start of rank {len(a0)}: its "
                    "trained_on.json is of another adapter; copy the file again"
                )
            a[: len(a0)] = a0
            b[:, : len(a0)] = start[module + FACTOR_B].to(b.dtype) / adapter.scaling
        found |= {module + FACTOR_A: a, module + FACTOR_B: b}
    return found


def _linears(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the linears that have factors, without experts."""
    return [name.removesuffix(FACTOR_A) for name in tensors if name.endswith(FACTOR_A) and not is_of_experts(name)]


def _side_by_side(
    adapter: Adapter, start: Mapping[str, torch.Tensor], linears: Collection[str], sign: float
) -> Adapter:
    """s [B, sign B0 / s] [A; A0] for the linears, in float32. Trained norms and experts stay as they are."""
    if not adapter.scaling:
        raise CheckpointError(f"{adapter.folder} has alpha 0, so that it changes nothing: merge another adapter")
    own = read_json(adapter.folder / CONFIG)["r"]
    added = next(len(tensor) for name, tensor in start.items() if name.endswith(FACTOR_A))
    rank = own + added
    alpha = adapter.scaling * rank
    scaling = alpha / rank  # as whoever reads the file computes it
    tensors = {name: t for name, t in adapter.tensors.items() if ".lora_" not in name or is_of_experts(name)}
    for linear in linears:
        a, b = (adapter.tensors.get(linear + factor) for factor in (FACTOR_A, FACTOR_B))
        a0, b0 = (start.get(linear + factor) for factor in (FACTOR_A, FACTOR_B))
        a = torch.zeros(own, a0.shape[1]) if a is None else a.float()
        b = torch.zeros(len(b0), own) if b is None else b.float()
        a0 = torch.zeros(added, a.shape[1]) if a0 is None else a0.float()
        b0 = torch.zeros(len(b), added) if b0 is None else b0.float()
        if a.shape[1] != a0.shape[1] or len(b) != len(b0):
            raise CheckpointError(
                f"{adapter.folder} and its start differ in the size of {linear}: give the start of its run"
            )
        tensors[linear + FACTOR_A] = torch.cat([a, a0])
        tensors[linear + FACTOR_B] = torch.cat([b, b0 * (sign / scaling)], dim=1)
    return replace(adapter, tensors=tensors, scaling=scaling, settings=_settings(adapter, linears, rank, alpha))


def _settings(adapter: Adapter, linears: Collection[str], rank: int, alpha: float) -> dict[str, Any]:
    """What adapter_config.json says of the stacked adapter in place of the folder's own."""
    experts = adapter.of_experts
    return {
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": False,
        "target_modules": sorted({linear.rpartition(".")[2] for linear in linears}),
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        **(config_of_file(experts, rank, alpha / rank) if experts else {}),
    }


logger = logging.getLogger(__name__)

WEIGHTS = "adapter_model.safetensors"


def write_adapter(adapter: Adapter, folder: Path, base_name: str, dtype: torch.dtype | None = None) -> int:
    """Write the PEFT folder, with `base_name` as its base; `dtype` None keeps each tensor's own. Returns the bytes.

    The folder is adapter_config.json, adapter_model.safetensors and the tokenizer. For PEFT it names the 16-bit model
    of its base, and trained_on.json names the base itself (qerl/checkpoint/peft_folder.py). PEFT, transformers and qerl
    load it as it is. So does vLLM, unless norms were trained: PEFT keeps those as `modules_to_save`, which vLLM 0.25
    refuses.
    """
    from safetensors.torch import save_file

    cast = {name: tensor.to(dtype or tensor.dtype) for name, tensor in adapter.tensors.items()}
    of_experts = {name: tensor for name, tensor in cast.items() if name in adapter.of_experts}
    cast = {name: tensor for name, tensor in cast.items() if name not in of_experts} | to_peft(of_experts)
    tensors = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in cast.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, peft_config(adapter, base_name))
    if is_for_whole(adapter.folder) or is_text_part(base_name):
        for_whole_(folder)
    mode_by_umask(folder / WEIGHTS)
    _check_written(adapter, folder, dtype)
    return sum(tensor.nbytes for tensor in tensors.values())


def add_for_peft(adapter: Adapter, folder: Path, origin: TrainedOn) -> None:
    """Let the folder name a base that plain PEFT can open, and give it a tokenizer, if there is one on this machine.

    A base that is not here is named for both, and only where trained_on.json has something else to say.
    """
    if Path(origin.base).is_dir() or origin.start or adapter.settings:
        name_bases_(folder, origin, plain_base(origin) or origin.base)
    places = [adapter.folder, embedded_folder(origin.base)]
    if (adapter.folder / TRAINED_ON).is_file():  # qerl trains with the base's tokenizer
        places.reverse()
    there = [place for place in places if (place / TOKENIZER_CONFIG).is_file()]
    if there:
        add_tokenizer_(folder, str(there[0]))


def peft_config(adapter: Adapter, base_name: str) -> dict:
    """The adapter's adapter_config.json, set to inference on `base_name`."""
    config = {**read_json(adapter.folder / CONFIG), **adapter.settings}
    targets = config.get("target_modules")
    if isinstance(targets, list):  # PEFT writes a set, whose order changes from run to run
        config["target_modules"] = sorted(targets)
    return {**config, "base_model_name_or_path": base_name, "inference_mode": True}


def find_base_name(adapter: Adapter, asked: str | None) -> str:
    """The base to name: `asked`, else the one that the adapter names; a local folder as its full path."""
    if asked:
        name = asked
    elif (adapter.folder / TRAINED_ON).is_file():
        name = beside(adapter.folder, model_of_adapter(adapter.folder)[0])
    else:
        own = read_json(adapter.folder / CONFIG).get("base_model_name_or_path")
        name = own and beside(adapter.folder, own)
    if not name:
        raise CheckpointError(f"{adapter.folder / CONFIG} names no base: write `--base-name BASE` (hub id or folder)")
    if name in EMBEDDED:
        return str(EMBEDDED[name])
    if Path(name).is_dir():
        return str(Path(name).resolve())
    if not is_hub_id(name):
        logger.warning(
            "the adapter's base %s is not here: the folder names it all the same (--base-name changes it)", name
        )
    return name


def _check_written(adapter: Adapter, folder: Path, dtype: torch.dtype | None) -> None:
    from qerl.checkpoint.adapter_file import read_adapter

    tensors, scaling = read_adapter(folder)
    same = tensors.keys() == adapter.tensors.keys() and scaling == adapter.scaling
    if not same or not all(torch.equal(tensors[n], t.to(dtype or t.dtype)) for n, t in adapter.tensors.items()):
        raise CheckpointError("the written adapter does not pass its check and was removed: check the disk, try again")


@dataclass(frozen=True)
class WrittenAdapter:
    """An adapter to write, the base that it is for, and the base on which stock vLLM may serve it, if any."""

    adapter: Adapter
    origin: TrainedOn
    served_on: str | None
    start: AdapterStart | None = None
    notes: tuple[str, ...] = ()


def adapter_to_write(options: ExportOptions, adapter: Adapter, base: str) -> WrittenAdapter:
    """The adapter that `options` ask for; `base` is the one to name, unless it is for the 16-bit model.

        start      --to adapter      --with-start                --onto original
        none       as it is          refused                     refused: it fits that model as it is
        frozen     as it is          start and adapter as one    refused: it fits that model as it is
        trained    as it is          refused: it has it          what the training changed

    A frozen start is a part of the model that was trained on, but stock vLLM knows no start. Raises ConfigError for
    what the adapter's kind does not have, CheckpointError if its start is nowhere.
    """
    trained = start_of_adapter(adapter.folder)
    if trained is None:
        _refuse(options, f"{adapter.folder} was trained without a start")
        return WrittenAdapter(adapter, trained_on(base), base)
    origin = _origin(adapter, base)
    if trained.kind == "trained" and options.onto != "original" and not origin.quantized:
        raise CheckpointError(HOLDS_START.format(adapter.folder, origin.base))
    start = start_in_merge(adapter.folder, find_base_name(adapter, options.model))
    if not start.frozen:
        return _that_holds_its_start(options, adapter, origin, start)
    if not origin.quantized:  # W + s B A
        _refuse(options, f"no start acts on the 16-bit {base}")
        return WrittenAdapter(adapter, origin, base)
    if options.with_start:
        return _stacked(adapter, origin, start)
    _refuse(options, f"{adapter.folder} was trained beside a frozen start")
    origin = replace(origin, start=start.trained)
    return WrittenAdapter(adapter, origin, plain_base(origin), start, _not_for_vllm(options, adapter, origin))


def _refuse(options: ExportOptions, why: str) -> None:
    if options.with_start:
        raise ConfigError(f"--with-start: {why}: leave it out")
    if options.onto == "original":
        raise ConfigError(
            f"--onto original: {why}, so that it fits the 16-bit model as it is, and an adapter folder is an exact "
            "copy: leave it out"
        )


def _origin(adapter: Adapter, base: str) -> TrainedOn:
    """The base to name. One that is not a folder here is taken to have the format of the base that was trained on."""
    if base in EMBEDDED or Path(base).is_dir():
        return trained_on(base)
    return TrainedOn(base, model_of_adapter(adapter.folder)[1] or formats.NVFP4.name)


def _stacked(adapter: Adapter, origin: TrainedOn, start: AdapterStart) -> WrittenAdapter:
    made = start.stacked(adapter)
    note = (
        f"one adapter of rank {made.settings['r']}, of which {start.trained.rank} are the start; it is for "
        f"{origin.base} alone, since the 16-bit model does not need that repair"
    )
    # It holds the start as an adapter does that was trained from it, so that it is merged and published like one.
    origin = replace(origin, start=replace(start.trained, kind="trained"))
    return WrittenAdapter(made, origin, origin.base, start, (note,))


def _that_holds_its_start(
    options: ExportOptions, adapter: Adapter, origin: TrainedOn, start: AdapterStart
) -> WrittenAdapter:
    if options.with_start:
        raise ConfigError(f"--with-start: {adapter.folder} began at its start and holds it: leave it out")
    if options.onto != "original":
        return WrittenAdapter(adapter, replace(origin, start=start.trained), origin.base, start)
    made = start.change(adapter)
    name = options.base_name or original_name(find_base_name(adapter, options.model))
    name = find_base_name(adapter, name)
    note = (
        f"what the training changed, as an adapter of rank {made.settings['r']} for the 16-bit {name}; the policy that "
        "was trained has a rest of the rounding error too, so that the two differ slightly"
    )
    return WrittenAdapter(made, trained_on(name), name, None, (note,))


def _not_for_vllm(options: ExportOptions, adapter: Adapter, origin: TrainedOn) -> tuple[str, ...]:
    if adapter.norms or adapter.of_experts:
        return ()  # vLLM does not load these as an adapter anyway
    line = f"qerl merge --adapter {shlex.quote(options.adapter)} --to adapter --with-start"
    return (f"stock vLLM knows no start: for {origin.base} there write `{line}`, which makes one adapter of both",)
