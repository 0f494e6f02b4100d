"""What a `--model` is, and what a run begins with: 16-bit base, quantized checkpoint, adapter or run; folder or hub id.

    config.json                          -> "base16", or "quantized" if it has a quantization_config (`qerl.formats`)
    adapter_config.json                  -> "adapter"; its base_model_name_or_path is the base, unless
                                            trained_on.json beside it names another
    config.yaml and metrics.jsonl        -> "run"; its model.base is the base, its newest saved adapter the adapter;
                                            if it trains through the quantizer, its model/ is the base, with no adapter

A folder's name says nothing. The word `tiny` is the model that ships with the package (a folder of that name is
`./tiny`). Importing this loads neither torch nor transformers.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.files import close_to, expanded, is_path, no_folder
from qerl.checkpoint.activations import check_packed
from qerl.checkpoint.base_start import BaseStart, find_start, start_beside, start_of_adapter
from qerl.checkpoint.folder import (
    CHECKPOINTS,
    EMBEDDED,
    REPORT,
    RUNS,
    TINY,
    WORDS,
    ModelKind,
    adapter_of_run,
    beside,
    default_quantized_dir,
    embedded_folder,
    export_line,
    format_of,
    kind_of,
    kind_of_run,
    model_of,
    model_of_adapter,
    quantize_line,
    quantized_from,
    resting_kind,
    whole_adapter,
)
from qerl.checkpoint.hub import config_folder, is_hub_id
from qerl.checkpoint.shards import weight_files
from qerl.formats.base import Format

logger = logging.getLogger(__name__)


BF16 = formats.BF16.name
DEEPEST = 16  # runs that begin from one another
STARTS = ("auto", "none")


@dataclass(frozen=True)
class ModelRef:
    """A resolved `--model`: what was given, and what has to be loaded."""

    kind: ModelKind
    path: Path  # folder that was given (for a hub id: its folder in the hub's cache)
    base: str  # hub id or folder of the base weights to load
    adapter: Path | None  # folder with adapter_config.json
    run: Path | None
    format: str  # of the base weights: the name of a `qerl.formats` value
    start: BaseStart | None = None  # what acts beside the base's weights, below the adapter if there is one


def resolve_model(ref: str, load: str = "auto", adapter: str | None = None, start: str = "auto") -> ModelRef:
    """Find out what `ref` is and which base (and adapter) to load for it.

    `load` is the name of a format, or "auto" for whatever is there (for a run: the format of its recipe). A quantized
    format takes, for a 16-bit base, the folder that `qerl quantize` makes of it; a 16-bit one takes, for a quantized
    folder, the model that its report names. `adapter` (adapter folder or run) replaces whatever adapter `ref` brings.
    `start` "auto" lets the start act that the adapter was trained with, or without an adapter the base's own; "none"
    leaves the base's own out. Raises CheckpointError if something is missing or of another kind, with what to type.
    """
    known = ("auto", *formats.names())
    if load not in known:
        raise CheckpointError(
            f"load={load!r} is not a way to load a model: write {', '.join(known[:-1])} or {known[-1]}"
        )
    folder, local = _locate(str(ref))
    kind = kind_of(folder)
    if kind == "run":
        found = _resolve_run(folder, load)
    elif kind == "adapter":
        found = _resolve_adapter(folder, load)
    else:
        found = _resolve_base(str(folder) if local else str(ref), folder, load)
    found = found if adapter is None else replace(found, adapter=adapter_folder(adapter))
    return replace(found, start=_start_of(found, start))


def _start_of(found: ModelRef, asked: str) -> BaseStart | None:
    """The frozen start that acts with what was found."""
    if asked not in STARTS:
        raise CheckpointError(f"start {asked!r} is not known: write {' or '.join(STARTS)}")
    if found.adapter is None:
        own = None if is_hub_id(found.base) or not formats.get(found.format).quantized else Path(found.base)
        return start_beside(own) if own is not None and asked == "auto" else None
    trained, quantized = start_of_adapter(found.adapter), formats.get(found.format).quantized
    if trained is not None and trained.kind == "trained" and not quantized:
        raise CheckpointError(
            f"{found.adapter} holds a repair of its quantized base, which counts twice on the 16-bit {found.base}: "
            "leave --load and --model out, so that its own base is taken, or write `qerl merge --to adapter --onto "
            "original`, which makes an adapter for the 16-bit model"
        )
    if trained is None or trained.kind == "trained" or not quantized:
        return None
    if asked == "none":
        raise CheckpointError(
            f"{found.adapter} was trained beside a start of rank {trained.rank}, without which it is another model: "
            "leave --start none out"
        )
    return find_start(found.adapter, found.base)


EXISTING = f"give an existing folder, a hub id such as Qwen/Qwen2.5-7B-Instruct, or `{TINY}` (the embedded model)"


def _locate(ref: str) -> tuple[Path, bool]:
    """The folder whose files show what `ref` is, and whether `ref` is itself a folder on this machine."""
    folder = EMBEDDED.get(ref) or expanded(ref)
    if os.path.isdir(folder):
        return folder, True
    if os.path.isfile(folder):
        raise CheckpointError(f"{ref} is a file: give the folder that holds it")
    if is_hub_id(ref):
        return config_folder(ref), False
    if is_path(ref):
        raise CheckpointError(f"{no_folder(ref)}: {EXISTING}")
    close = close_to(ref)
    raise CheckpointError(f"{ref} is neither a folder here nor a hub id{f' ({close})' if close else ''}: {EXISTING}")


def _resolve_base(name: str, folder: Path, load: str) -> ModelRef:
    own = format_of(folder)
    wanted = own if load == "auto" else formats.get(load)
    if own.quantized and not wanted.quantized:
        source = quantized_from(folder)
        if source is None:
            raise CheckpointError(
                f"{folder} holds {own.label} weights only, and its {REPORT} names no 16-bit model: write "
                f"{_load_as(own)}, or give the 16-bit model as --model"
            )
        return replace(resolve_model(source), path=folder, kind="quantized")
    if wanted.quantized and not own.quantized:
        return _quantized_of(name, wanted, own)
    if wanted is not own:
        raise CheckpointError(f"{folder} holds {own.label} weights, not {wanted.label}: write {_load_as(own)}")
    if folder == Path(name):
        weight_files(folder)
        check_packed(folder)
    return ModelRef("quantized" if own.quantized else "base16", folder, name, None, None, own.name)


def _load_as(format: Format) -> str:
    """What to write so that a folder is opened as it is."""
    return f"`qerl eval --load {format.name}`, in a recipe model.format: {format.name}"


def _quantized_of(name: str, wanted: Format, own: Format) -> ModelRef:
    """The folder that `qerl quantize --model name` makes in the format `wanted`; CheckpointError if it is not there."""
    model = WORDS.get(Path(name), name)
    if wanted.scheme is None and not wanted.writable:
        raise CheckpointError(
            f"{model} holds {own.label} weights, and qerl makes no folder in {wanted.label}: write {_load_as(own)}, "
            "or give a folder that holds them"
        )
    out = default_quantized_dir(name, wanted)
    if not (out / "config.json").is_file():
        raise CheckpointError(
            f"{model} is a 16-bit model and {out} does not exist: run `{quantize_line(model, wanted)}` first, "
            f"or take its own weights ({_load_as(own)})"
        )
    source = quantized_from(out)
    if source is not None and not _same_model(source, name):
        raise CheckpointError(
            f"{out} was made from {source}, not from {model}: run `{quantize_line(model, wanted)} --out DIR` and "
            "give DIR as --model"
        )
    return resolve_model(str(out))


def _same_model(source: str, name: str) -> bool:
    """Whether a report's source is the model `name`. If the source folder is gone, an equal folder name is enough."""
    folders = [embedded_folder(model) for model in (source, name)]
    if source == name or folders[0].resolve() == folders[1].resolve():
        return True
    return folders[0].is_absolute() and not folders[0].exists() and folders[0].name == folders[1].resolve().name


def _resolve_run(run: Path, load: str) -> ModelRef:
    """The base and the adapter of a run.

    If the run began from another adapter, the base is the one under that adapter: the run's own adapter continues it.
    """
    if kind_of_run(run).packs:
        return replace(resolve_model(str(model_of(run)), load), kind="run", path=run, run=run)
    model_under(str(run))  # refuses runs that name one another
    base, recipe_format = model_in_recipe(run)
    try:
        found = resolve_base_of_run(base, recipe_format if load == "auto" else load, run)
    except CheckpointError as error:
        if is_hub_id(base) or os.path.exists(expanded(beside(run, base))):
            raise
        raise CheckpointError(
            f"{run} was trained on {base}, which is not here: write `--model BASE --adapter {run}` ({error})"
        ) from error
    return replace(found, kind="run", path=run, run=run, adapter=adapter_of_run(run))


def model_in_recipe(run: Path) -> tuple[str, str]:
    """model.base and model.format of the run's recipe."""
    from qerl.config.recipe import read_config

    try:
        model = read_config(run / "config.yaml")[0]["model"]
        base, format = model["base"], model["format"]
        if not isinstance(base, str) or not isinstance(format, str) or not base:
            raise TypeError("they are no text")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{run / 'config.yaml'} names no model.base and model.format: give another run"
        ) from error
    return base, format


def resolve_base_of_run(base: str, load: str, run: Path) -> ModelRef:
    """Resolve a run's base, even if the current folder is not the one in which the run was started."""
    base = beside(run, base)
    if load in formats.names() and formats.get(load).quantized:
        quantized = beside(run, str(default_quantized_dir(base, formats.get(load))))
        source = quantized_from(Path(quantized))
        if source is not None and _same_model(source, base):
            base = quantized
    return resolve_model(base, load)


def _resolve_adapter(folder: Path, load: str) -> ModelRef:
    model_under(str(folder))  # refuses adapters that name one another
    base, own = model_of_adapter(folder)
    load = own if own and load == "auto" else load
    try:
        stacked = kind_of(_locate(beside(folder, base))[0]) in ("adapter", "run")
        found = None if stacked else resolve_model(beside(folder, base), load)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder} is an adapter of {base}, which is not here: write `--model BASE --adapter {folder}` ({error})"
        ) from error
    if found is None:
        raise CheckpointError(f"the base of {folder} is itself an adapter ({base}): merge that one first")
    return replace(found, kind="adapter", path=folder, adapter=whole_adapter(folder))


def model_under(ref: str) -> str:
    """The model at the bottom of a run or an adapter, which need not be on this machine; of any other `ref`, itself.

    Raises CheckpointError for runs and adapters that rest on themselves.
    """
    bottom = ref
    for _ in range(DEEPEST):
        if (named := _named_base(bottom)) is None:
            return bottom
        bottom = named
    raise CheckpointError(
        f"{ref} names itself as its base, or one that rests on it: write there the model that it was trained on, or "
        f"give `--model BASE --adapter {ref}`"
    )


def _named_base(ref: str) -> str | None:
    """The base that `ref` names, if it is a run or an adapter."""
    folder = expanded(ref)
    kind = resting_kind(folder) if ref not in EMBEDDED and os.path.isdir(folder) else None
    if kind is None:
        return None
    return beside(folder, model_in_recipe(folder)[0] if kind == "run" else model_of_adapter(folder)[0])


def adapter_folder(ref: str) -> Path:
    """The adapter of `ref`, an adapter folder or a run, whose base need not be on this machine.

    Raises CheckpointError if there is none.
    """
    folder, _ = _locate(ref)
    kind = kind_of(folder)
    if kind == "run":
        return adapter_of_run(folder)
    if kind == "adapter":
        return whole_adapter(folder)
    raise CheckpointError(f"{ref} is a model, not an adapter: give a folder with adapter_config.json, or a run")


def newest_model(load: str = "auto") -> ModelRef | None:
    """The newest usable run (runs/*) or checkpoint (checkpoints/*) under the current folder; None if there is none."""
    made = [(file.stat().st_mtime, file.parent) for file in RUNS.glob("*/metrics.jsonl")]
    made += [(file.stat().st_mtime, file.parent) for file in CHECKPOINTS.glob("*/config.json")]
    for _, folder in sorted(made, reverse=True):
        if folder.name.startswith("."):
            continue
        try:
            return resolve_model(str(folder), load)
        except CheckpointError as error:
            logger.warning("passing over %s: %s", folder, error)
    return None


def describe(ref: ModelRef) -> str:
    """What was given, its base and its adapter, as one line for logs."""
    if ref.kind in ("adapter", "run"):
        parts = [f"{ref.kind} {ref.path}", f"{ref.format} base {ref.base}"]
    else:
        parts = [f"{formats.get(ref.format).folder_label} {ref.base}"]
    if ref.start is not None:
        parts.append(f"start {ref.start}")
    if ref.adapter is not None:
        parts.append(f"adapter {ref.adapter}")
    return ", ".join(parts)


def starting_model(base: str, format: str, masters: bool, run: Path | None = None) -> ModelRef:
    """What `model.base` names, for a new run or for one that continues in `run`; its format is the engine's.

    Raises QerlError for a model that is not there, or that this kind of training cannot start from.
    """
    if not masters:
        return resolve_model(base, format) if run is None else resolve_base_of_run(base, format, run)
    found = resolve_model(base if run is None else beside(run, base))
    check_whole(found, f"model.base {base}", "qat trains")
    return replace(found, format=format)


def check_whole(found: ModelRef, named: str, use: str) -> None:
    """Raise ConfigError unless what was `named` (an option or a key, and its value) is a whole 16-bit model."""
    if found.kind == "quantized":
        source, label = quantized_from(found.path), formats.get(found.format).label
        remedy = f"give {source}" if source else "give the 16-bit model that it was made from"
        raise ConfigError(f"{named} is already quantized ({label}), and {use} a 16-bit model: {remedy}")
    if found.kind != "base16":
        command = f"qerl merge --adapter {found.path}" if found.adapter else export_line(found.path)
        raise ConfigError(
            f"{named} is {'an adapter' if found.kind == 'adapter' else 'a run'}, and {use} a whole 16-bit model: "
            f"write `{command} --to {BF16}` and give the folder that it makes"
        )


def teacher_model(given: str | None, base: ModelRef) -> ModelRef:
    """What `given` (distill.teacher) names, or the 16-bit model that the student's `base` is or was made from.

    Raises QerlError for a model that is not there or is not a whole 16-bit one.
    """
    if given is None:
        return _own(base.base)
    found = resolve_model(given)
    check_whole(found, f"distill.teacher {given}", "a teacher is")
    return found


def _own(base: str) -> ModelRef:
    """The 16-bit model under a base, without the adapter that may lie on it."""
    try:
        return replace(resolve_model(base, BF16), adapter=None)
    except CheckpointError as error:
        raise ConfigError(
            f"distill.teacher is null, and the 16-bit model under {base} is not here ({error}): write "
            "distill.teacher: MODEL"
        ) from error


def run_of(ref: ModelRef) -> Path | None:
    """The run directory that the model or its adapter belongs to, recognized by its files; None if it has none."""
    return ref.run if ref.adapter is None else run_of_adapter(ref.adapter)


def run_of_adapter(adapter: Path) -> Path | None:
    """The run directory that an adapter lies in (`adapter/`, `best/` or `checkpoints/step-N/`), by its files."""
    return next((folder for folder in adapter.resolve().parents[:3] if resting_kind(folder) == "run"), None)


def name_of_adapter(folder: Path) -> str:
    """A name for what is made of a run or an adapter: the run's, with that of the checkpoint unless it is the last."""
    folder = folder.expanduser().resolve()
    if folder.name == "adapter":
        return folder.parent.name
    run = run_of_adapter(folder)
    return folder.name if run is None else f"{run.name}-{folder.name}"


def switches_for(run: Path | None, asked: Mapping[str, object] | None) -> Mapping[str, object]:
    """The variables of the chat template that were asked for; for None those that the run trained with, if any."""
    if asked is not None or run is None:
        return asked or {}
    from qerl.config.recipe import read_config

    switches = read_config(run / "config.yaml")[0].get("data", {}).get("chat_template_kwargs") or {}
    if switches:
        logger.info("chat template with %s, as it trained", switches)
    return switches
