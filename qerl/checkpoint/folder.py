"""What a folder is: a model, an adapter or a run; what it names as its base, what it holds, and whether it is whole.

`qerl.checkpoint.resolve` follows the names from folder to folder. A run's checkpoints and its result are sealed: they
carry a checksum of each file, so that a lost bit is noticed. A run that trains through the quantizer has

    base/                          the packed model that the run began with
    checkpoints/step-*/weights/    the masters; a run that trains an adapter has its files in checkpoints/step-*/
    model/                         after the last step: the trained model, packed

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.files import JSON_BYTES, expanded, fsync, parse_json, read_text
from qerl.checkpoint.experts import COMPUTED
from qerl.checkpoint.hub import cached_config, check_links, is_hub_id
from qerl.checkpoint.shards import MODELOPT_CONFIG, read_config, read_json
from qerl.formats.base import Format

if TYPE_CHECKING:
    from qerl.config.objectives import RunKind

logger = logging.getLogger(__name__)

ModelKind = Literal["base16", "quantized", "adapter", "run"]


def kind_of(folder: Path) -> ModelKind:
    """What a folder holds, decided from its files. Raises CheckpointError for anything qerl cannot use."""
    if (kind := resting_kind(folder)) == "run":
        return kind
    check_links(folder)
    if kind is not None:
        return kind
    if (folder / "config.json").is_file():
        return "quantized" if format_of(folder).quantized else "base16"
    raise CheckpointError(
        f"{folder} has no config.json, adapter_config.json, or config.yaml with metrics.jsonl: give a model "
        "(16-bit or quantized), an adapter or a run directory"
    )


def resting_kind(folder: Path) -> Literal["adapter", "run"] | None:
    """The kind of a folder that names a model elsewhere as its base; None for any other folder."""
    if (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file():
        return "run"
    return "adapter" if (folder / "adapter_config.json").is_file() else None


def format_of(folder: Path) -> Format:
    """The number format of a model's weights, from its config.json. Raises CheckpointError for an unknown one."""
    quantization = read_config(folder).get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise CheckpointError(
            f"{folder / 'config.json'} has a quantization_config that cannot be read: copy or download the file again"
        )
    found = next((each for each in formats.all_formats() if each.recognises(quantization)), None)
    if found is None:
        method, layout = quantization.get("quant_method"), quantization.get("format")
        raise CheckpointError(
            f"{folder} is already quantized as {method}{f' ({layout})' if layout else ''}, and qerl reads 16-bit "
            f"models and {' and '.join(each.layout for each in formats.all_formats() if each.layout)}: give the model "
            "that it was made from"
        )
    found.check_config(folder, quantization)
    return found


TINY = "tiny"
# Two have learned more: to use a tool and to play a game, and as a mixture of experts.
EMBEDDED = {word: Path(__file__).parents[1] / word for word in (TINY, "tiny_turns", "tiny_experts")}
TINY_FOLDER = EMBEDDED[TINY]
WORDS = {folder: word for word, folder in EMBEDDED.items()}
RUNS = Path("runs")
LOCK = ".lock"  # in a run: locked by the process that writes to it, and says how the last one ended
SHORTEST = 3  # letters of the beginning of a run's name, so that a mistyped model seldom is a run
TRAINED_ON = "trained_on.json"  # of an adapter's folder that names another model to PEFT (peft_folder.py)


def whole_path(model: str) -> str:
    """The full path of a folder, since PEFT would take a relative one for a hub id from elsewhere; else the name."""
    return str(Path(model).resolve()) if model not in EMBEDDED and Path(model).is_dir() else model


def model_of_adapter(folder: Path) -> tuple[str, str | None]:
    """The base that an adapter was trained on, and its number format if that is known.

    If that base is a folder that is not here, the model that it was quantized from stands for it, in its format: on
    another machine it may have been quantized as well.
    """
    named = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    base, own = named, None
    if (folder / TRAINED_ON).is_file():
        origin = read_json(folder / TRAINED_ON)
        trained, own = origin.get("base"), origin.get("format")
        if not isinstance(trained, str) or own not in formats.names():
            raise CheckpointError(
                f"{folder / TRAINED_ON} names no base and format: write `--model BASE --adapter {folder}`"
            )
        is_here = trained in EMBEDDED or os.path.isdir(expanded(beside(folder, trained)))
        base = trained if is_here or not named or trained == named else named
    if not base or not isinstance(base, str):
        raise CheckpointError(
            f"{folder / 'adapter_config.json'} names no base: write `--model BASE --adapter {folder}`"
        )
    return base, own


def embedded_folder(name: str) -> Path:
    """The folder of an embedded model by its word, and of any other model its own path."""
    return EMBEDDED.get(name) or Path(name)


def beside(owner: Path, base: str) -> str:
    """Find a relative folder `base` that a run or an adapter (`owner`) names.

    The folders above the owner are searched from the nearest up, since the current folder may hold another model of
    that name. If it is the current folder that has the base, or none has, the name stays relative.
    """
    if not Path(base).is_absolute() and base not in EMBEDDED:
        for parent in owner.resolve().parents:
            if any((parent / base / name).is_file() for name in ("config.json", "config.yaml", "adapter_config.json")):
                return base if parent == Path.cwd() else str(parent / base)
    return base


CHECKPOINTS = Path("checkpoints")
REPORT = "quantize_report.json"


def quantized_from(folder: Path) -> str | None:
    """The model from which a quantized folder was made, according to its report; None if it has no report."""
    return read_json(folder / REPORT).get("source") if (folder / REPORT).is_file() else None


def is_text_part(base: str) -> bool:
    """Whether a base is the text part of a model for pictures and text: that model itself, or quantized from it.

    Only in families that stock vLLM serves as a whole, Qwen3.5 and Gemma 4. What is neither in a folder here nor in the
    hub's cache is taken for a text model.
    """
    config, report = _config_here(base), embedded_folder(base) / REPORT
    text = config.get("text_config")
    if str((text if isinstance(text, dict) else config).get("model_type")) not in COMPUTED:
        return False
    said = read_json(report) if report.is_file() else {}
    if "text_part" in said:
        return said["text_part"] is True
    return "text_config" in (_config_here(said["source"]) if said.get("source") else config)


def _config_here(model: str) -> dict[str, Any]:
    """The config.json of a folder, or of a hub id whose files are in the cache; else empty."""
    path = cached_config(model) if is_hub_id(model) else embedded_folder(model) / "config.json"
    return read_json(path) if path is not None and path.is_file() else {}


def default_quantized_dir(model: str, format: Format = formats.DEFAULT) -> Path:
    """Where `qerl quantize --model M` writes without --out: `checkpoints/<name>-<SCHEME>` under the current folder."""
    name = model if model in EMBEDDED else Path(model).expanduser().resolve().name if Path(model).exists() else model
    return CHECKPOINTS / f"{name.rstrip('/').rsplit('/', 1)[-1]}{format.folder_suffix}"


def quantize_line(model: str, format: Format) -> str:
    """The command that makes the folder of a model in a quantized format."""
    return f"qerl quantize --model {model}{'' if format is formats.DEFAULT else f' --scheme {format.name}'}"


WHOLE_BYTES = 1 << 24  # files up to this size are hashed whole
PIECES, PIECE_BYTES = 256, 1 << 16  # of a larger file, so many pieces are hashed, evenly spread over it
CONFIGS = ("config.json", "generation_config.json", "adapter_config.json", MODELOPT_CONFIG)


def weights_digest(folder: Path, configs: Sequence[str] = CONFIGS) -> str:
    """16 hex digits that change with a folder's safetensors files (names, sizes, contents: PIECES) and `configs`."""
    total = hashlib.sha256()
    for path in (folder / name for name in configs):
        if path.is_file():
            total.update(path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                total.update(file.read())
                continue
            for piece in range(PIECES):
                file.seek(piece * (size - PIECE_BYTES) // (PIECES - 1))
                total.update(file.read(PIECE_BYTES))
    return total.hexdigest()[:16]


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
CHECKSUMS = "checksums.json"


def seal(folder: Path) -> None:
    """Flush every file to disk, then write the checksums."""
    sums = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        sums[file.relative_to(folder).as_posix()] = _sha256(file)
        fsync(file)
    target = folder / CHECKSUMS
    target.write_text(json.dumps(sums, indent=1), encoding="utf-8")
    fsync(target)
    fsync(folder)


def read_sums(folder: Path) -> dict[str, str] | None:
    """The checksums by file name; None if they cannot be read. What is not an object comes back empty."""
    try:
        sums = parse_json(read_text(folder / CHECKSUMS, JSON_BYTES))
    except (OSError, ValueError):
        return None
    return sums if isinstance(sums, dict) else {}


def damage_of(folder: Path, expected: Collection[str], only: Collection[str] | None = None) -> str | None:
    """What is wrong with a folder that has to hold the `expected` files; None if it is good. `only` these files are
    compared, if it is given."""
    sums = read_sums(folder)
    if sums is None:
        return f"it has no readable {CHECKSUMS}"
    if unlisted := sorted(set(expected) - set(sums)):
        return f"{CHECKSUMS} does not list {', '.join(unlisted)}"
    for name, sum_ in sums.items():
        if only is not None and name not in only:
            continue
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if _sha256(file) != sum_:
            return f"{name} does not match its checksum"
    return None


def adapter_damage(folder: Path) -> str | None:
    """What is wrong with the files of an adapter. One that another program saved has no checksums, and counts as good;
    a checkpoint, which holds the trainer's state too, does not."""
    if (folder / CHECKSUMS).exists():
        return damage_of(folder, ADAPTER_FILES, only=ADAPTER_FILES)
    return f"it has no {CHECKSUMS}" if (folder / "trainer_state.json").exists() else None


def adapters_of_run(run: Path) -> list[Path]:
    """The folders with an adapter that a run has saved: its result first, then checkpoints from the newest back, then
    the adapter of its best validation."""
    saved = reversed(checkpoints_of(run).values())
    return [path for path in (run / "adapter", *saved, run / "best") if (path / ADAPTER_FILES[0]).is_file()]


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


BASE, MODEL, WEIGHTS = "base", "model", "weights"
STEP = re.compile(r"step-(\d+)")


def checkpoints_of(run: Path) -> dict[int, Path]:
    """The checkpoint folders of a run by step, oldest first, damaged ones included. Other names are no checkpoints."""
    named = ((STEP.fullmatch(folder.name), folder) for folder in run.glob("checkpoints/*"))
    return dict(sorted((int(match[1]), folder) for match, folder in named if match and folder.is_dir()))


def run_folder(ref: str) -> Path:
    """The folder of a run: `ref`, or what it names under runs/, so `tiny-2026` or `tiny-2026/eval/arith-1` for what
    begins so there, with at least three letters.

    What exists as it is written stays as it is, but for a word that names a run there and no run here; so does what
    nothing there is named like. Raises ConfigError for the beginning of several names.
    """
    here = expanded(ref)
    return expanded(ref if os.path.exists(here) and ("/" in ref or is_begun(here)) else _named(ref))


def run_named(ref: str) -> str:
    """The same for a model, which may be a run: words for embedded models and hub ids stay as they are."""
    return ref if ref in EMBEDDED or os.path.exists(expanded(ref)) else _named(ref)


def is_begun(folder: Path) -> bool:
    """Whether a folder is a run's, be it damaged or hardly begun."""
    return any(os.path.isfile(folder / name) for name in ("config.yaml", "metrics.jsonl", LOCK))


def _named(ref: str) -> str:
    name, _, inside = ref.partition("/")
    if not name or name in (".", "..", "~"):
        return ref
    runs = sorted(folder for folder in RUNS.glob("[!.]*") if is_begun(folder))
    names = [folder.name for folder in runs if os.path.exists(folder / inside)]
    found = [name] if name in names else [each for each in names if each.startswith(name) and len(name) >= SHORTEST]
    if len(found) > 1:
        several = " or ".join(str(RUNS / each / inside) for each in found)
        raise ConfigError(f"{ref} begins the names of several runs: write {several}")
    if not found:
        return ref
    path = str(RUNS / found[0] / inside)
    logger.info("%s is %s", ref, path)
    return path


def kind_of_run(run: Path) -> RunKind:
    """What kind of run it is, by run.json; where that does not say it, as in an earlier version's, by its recipe."""
    from qerl.config.objectives import RunKind
    from qerl.config.recipe import read_config

    with contextlib.suppress(CheckpointError, ValueError):
        return RunKind.model_validate(read_json(run / "run.json").get("kind"))
    try:
        return RunKind.of(read_config(run / "config.yaml")[0])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{run / 'config.yaml'} cannot be read ({error}): give another run") from error


def export_line(run: Path) -> str:
    """The command that makes a model of such a run."""
    return f"qerl export --run {run}"


def model_of(run: Path) -> Path:
    """The trained model of a finished run. Raises CheckpointError, which says to export it, if it is not there."""
    folder = run / MODEL
    if not folder.is_dir():
        raise CheckpointError(
            f"{run} trains through the quantizer and has not finished, so that it has no model yet: write "
            f"`{export_line(run)}`, which makes one of its last checkpoint, and give that folder"
        )
    if damage := damage_of(folder, {"config.json"}):
        raise CheckpointError(
            f"{folder} is damaged ({damage}): write `qerl train --resume {run}`, which makes it anew, or "
            f"`{export_line(run)}`, and give that folder"
        )
    return folder


def checkpoint_of(run: Path, step: int | None = None) -> tuple[int, Path]:
    """(step, folder) of the newest checkpoint of a run whose masters or adapter are whole, or of that of `step`.

    Damaged ones are passed over with a warning. Raises CheckpointError if none is left, ConfigError for a `step` that
    was not saved.
    """
    trained = (WEIGHTS, ADAPTER_FILES[0])
    found = {
        n: folder for n, folder in checkpoints_of(run).items() if any((folder / name).exists() for name in trained)
    }
    if not found:
        raise CheckpointError(
            f"{run} has saved no weights yet: let it reach its first checkpoint (run.save_every), or give another run"
        )
    if step is not None and step not in found:
        raise ConfigError(f"--step {step}: {run} has no checkpoint of it: give one of {', '.join(map(str, found))}")
    for one in [step] if step is not None else reversed(found):
        if (damage := _damage(found[one])) is None:
            return one, found[one]
        logger.warning("%s is damaged: %s", found[one], damage)
    raise CheckpointError(
        f"{run} has no checkpoint left that is whole: put the files back, or give another step or run"
    )


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with the masters or the adapter in a checkpoint; its other files are not read."""
    if (checkpoint / ADAPTER_FILES[0]).is_file():
        return adapter_damage(checkpoint)
    sums = read_sums(checkpoint) or {}
    names = [name for name in sums if name.startswith(f"{WEIGHTS}/")]
    return damage_of(checkpoint, (), names) if names else f"it has no {CHECKSUMS} that lists its weights"


def adapter_of_run(run: Path) -> Path:
    """The adapter that a finished run wrote, or else its last checkpoint's (`checkpoints/step-000040`).

    Damaged ones are passed over, with a warning. Raises CheckpointError if none is left.
    """
    if not kind_of_run(run).has_adapter:
        raise CheckpointError(
            f"{run} trains whole weights, and has no adapter: write `{export_line(run)}`, which makes a model of it"
        )
    saved = adapters_of_run(run)
    for folder in saved:
        if (damage := adapter_damage(folder)) is None:
            return whole_adapter(folder)
        logger.warning("%s is damaged and passed over: %s", folder, damage)
    raise CheckpointError(
        f"{run} has no adapter left that is whole: put the files back, or give another run"
        if saved
        else f"{run} has saved no adapter yet: let it reach its first checkpoint, or give another run or its base"
    )


def whole_adapter(folder: Path) -> Path:
    """`folder`, if it holds an adapter whose files are there and undamaged; CheckpointError otherwise."""
    check_links(folder)
    if not (folder / "adapter_model.safetensors").is_file():
        raise CheckpointError(f"{folder} has an adapter_config.json but no adapter_model.safetensors: save it again")
    if damage := adapter_damage(folder):
        raise CheckpointError(
            f"{folder} is damaged ({damage}): give another checkpoint, or the run, whose newest whole adapter is then "
            f"taken; if you changed the file yourself, delete {CHECKSUMS} there"
        )
    return folder
