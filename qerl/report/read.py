"""What a run's files say: the fields that the report needs of each, and what dynamic sampling cost in all steps.

Only metrics.jsonl is required; everything else is shown if it exists.
"""

from __future__ import annotations

import fcntl
import html
import io
import logging
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import FiniteFloat, PlainValidator, model_validator
from rich.console import Console

from qerl.base.errors import ConfigError, DataError
from qerl.base.files import no_folder, parse_json, read_lines
from qerl.base.printable import SafeConsole
from qerl.base.read_back import OF_EVALUATION, Row, Shape, read_object, read_rows
from qerl.checkpoint.folder import LOCK, MODEL, adapter_damage, adapters_of_run, is_begun
from qerl.config.objectives import RunKind
from qerl.config.recipe import read_config

PREFIX = "dynamic_sampling/"
SUMMED = ("extra_rollouts", "sampled_groups", "discarded_groups", "discarded_tokens", "filled_groups")


def sampling_text(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What dynamic sampling did and what it cost, in a sentence; None for a run without it."""
    steps = [row for row in rows if row.get(PREFIX + "sampled_groups") is not None]
    if not steps:
        return None
    rollouts, sampled, discarded, tokens, filled = (sum(row[PREFIX + name] for row in steps) for name in SUMMED)
    extra_s = sum(row.get("time/extra_rollouts_s") or 0.0 for row in steps)
    share = extra_s / (sum(row.get("time/step_s") or 0.0 for row in rows) or 1.0)
    trained = sampled - discarded
    return (
        f"{trained - filled:.0f} of the {trained:.0f} groups trained on had a signal; {sampled:.0f} were sampled and "
        f"{discarded:.0f} discarded ({tokens:,.0f} tokens), in {rollouts:.0f} extra rollouts of {extra_s:.0f} s, "
        f"{share:.0%} of the run's time"
    )


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("it should be text")
    return value


def _conversation(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return _text(value)
    return value


# Unlike str in pydantic, Text allows lone surrogates, which models can write.
Text = Annotated[Any, PlainValidator(_text)]
Conversation = Annotated[Any, PlainValidator(_conversation)]  # text, or a list of messages

# If a row has the first metric as a number, it must have the others too.
TOGETHER = {"noise/stage": ("noise/sigma",), f"{PREFIX}sampled_groups": tuple(PREFIX + name for name in SUMMED)}


class Metrics(Shape):
    """A line of metrics.jsonl: numbers, or null for a number that was not finite."""

    __pydantic_extra__: dict[str, FiniteFloat | None]
    step: int

    @model_validator(mode="after")
    def _complete(self) -> Metrics:
        metrics = self.__pydantic_extra__
        for key, others in TOGETHER.items():
            for other in others:
                if metrics.get(key) is not None and metrics.get(other) is None:
                    raise ValueError(f"{other} is {'null' if other in metrics else 'missing'}, and {key} is a number")
        return self


class Change(Shape):
    """A prolonged run: up to step `after`, it followed schedules for a total of `was` steps."""

    after: int
    was: int


class About(Shape):
    """run.json."""

    command: list[Text] | None = None
    versions: dict[str, Any] | None = None
    inputs: dict[str, Any] | None = None
    changes: list[dict[str, Any]] | None = None
    totals: list[Change] | None = None
    kind: RunKind | None = None
    qat: dict[str, Any] | None = None


class Warned(Shape):
    """A line of warnings.jsonl."""

    step: int
    kind: Text
    text: Text


class Sampled(Shape):
    """A line of completions/step-*.jsonl."""

    prompt: Conversation
    completion: Conversation
    rewards: dict[str, float | None] | None = None


class Graded(Shape):
    """A line of an evaluation's completions.jsonl."""

    id: Text
    sample: int
    question: Text
    answer: Text
    completion: Text
    correct: bool
    truncated: bool


class Interval(Shape):
    """A number with the bounds of its 95% interval."""

    value: float
    low: float
    high: float


class Result(Shape):
    """result.json, or the lighteval.json of the other suite."""

    task: Text
    accuracy: Interval | None = None
    scores: dict[str, dict[str, float]] | None = None
    pass_at_k: dict[str, Interval] | None = None
    truncated_share: float | None = None
    no_answer_share: float | None = None
    completions: int | None = None
    completion_tokens: int | None = None


class ComparedResult(Result):
    """The result.json of an evaluation before or after training."""

    accuracy: Interval
    truncated_share: float
    no_answer_share: float


logger = logging.getLogger(__name__)

RUNNING, STOPPED, FINISHED = "running", "stopped", "finished"
HELD: set[Path] = set()  # locks of this process, which would be given up if one of the files was opened and closed
LEARNED_FROM = (
    ("kl_to_teacher/forward", "KL to the teacher"),
    ("nll", "loss"),
    ("sampled/reward", "reward"),
    ("reward", "reward"),
)
KINDS = {"samples": "RL", "teacher": "distillation", "conversations": "SFT"}

OF_RUN = "put back the file as the run wrote it, or delete that line"


@dataclass(frozen=True)
class Evaluation:
    """A finished `qerl eval`: its result.json or lighteval.json, and its graded completions."""

    folder: Path
    name: str  # distinguishes it from the other evaluations shown
    result: dict[str, Any]
    rows: list[Row] = field(repr=False)


@dataclass(frozen=True)
class Run:
    """What a run wrote: in `rows` the metrics of each step, in `samples` the logged completions with their steps.

    `validations` are the rows with one, step 0 included, which was made before the first step.
    """

    folder: Path
    name: str  # distinguishes it from the other runs shown
    rows: list[Row] = field(repr=False)
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    config_text: str = field(default="", repr=False)
    about: dict[str, Any] = field(default_factory=dict)  # run.json
    samples: list[Row] = field(default_factory=list, repr=False)
    evaluations: list[Evaluation] = field(default_factory=list, repr=False)
    warnings: list[Row] = field(default_factory=list, repr=False)  # step, kind and text, in order
    validations: list[Row] = field(default_factory=list, repr=False)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read each run once. If two folders have the same name, all runs are named by their paths.

    Raises what `read_run` raises.
    """
    different = list({folder.resolve(): folder for folder in folders}.values())
    names = [folder.resolve().name for folder in different]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in different]
    return [read_run(folder, name) for folder, name in zip(different, names, strict=True)]


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read one run. Raises DataError if it has no metrics, or has a file that is not what a run writes."""
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(_no_run(folder))
    logged = read_rows(folder / "metrics.jsonl", Metrics, OF_RUN)
    rows = [row for row in logged if row["step"] > 0]  # line 0 is the validation before the first step
    if not rows:
        raise DataError(f"{folder} has no steps in metrics.jsonl: give the directory of a run that has them")
    about, warnings = folder / "run.json", folder / "warnings.jsonl"
    config, config_text = _config(folder / "config.yaml")
    damaged = {path.relative_to(folder): adapter_damage(path) for path in adapters_of_run(folder)}
    found = read_rows(warnings, Warned, OF_RUN) if warnings.exists() else []
    found += [
        {"step": rows[-1]["step"], "kind": f"damaged {path}", "text": f"{path} is damaged: {damage}"}
        for path, damage in damaged.items()
        if damage
    ]
    return Run(
        folder,
        name or folder.resolve().name,
        rows,
        config,
        config_text,
        read_object(about, About, "put back what the run wrote, or delete it") if about.exists() else {},
        _samples(folder),
        [read_evaluation(path) for path in sorted(folder.glob("eval/*")) if _result_file(path).exists()],
        found,
        [row for row in logged if any(row.get(f"validation/{name}") is not None for name in ("reward", "loss"))],
    )


def read_evaluation(folder: Path, shape: type[Result] = Result) -> Evaluation:
    """Read one evaluation. One by lighteval has no completions. Raises DataError if it is not a finished evaluation."""
    completions = folder / "completions.jsonl"
    rows = read_rows(completions, Graded, OF_EVALUATION) if completions.exists() else []
    result = read_object(_result_file(folder), shape, OF_EVALUATION)
    return Evaluation(folder, folder.resolve().name, result, rows)


def _no_run(folder: Path) -> str:
    if _result_file(folder).is_file():
        return f"{folder} is an evaluation: give the run, and evaluations with --before and --after"
    if (folder / "config.yaml").is_file():
        return f"{folder} has no metrics.jsonl: put it back, or give the directory of a run that has begun"
    what = f"{folder} is not a run: it has no metrics.jsonl" if folder.exists() else no_folder(str(folder))
    return f"{what}; give the directory that `qerl train` printed"


def completions_step(path: Path) -> int | None:
    """The step whose completions a file of a run holds; None for a file that no run wrote, such as a copy."""
    named = re.fullmatch(r"step-([0-9]{1,12})\.jsonl", path.name)
    return int(named[1]) if named else None


def _result_file(folder: Path) -> Path:
    """The file with an evaluation's numbers: our own result.json, or what `--suite lighteval` wrote."""
    suite = folder / "lighteval.json"
    return suite if suite.exists() else folder / "result.json"


def _config(path: Path) -> tuple[dict[str, Any], str]:
    """The configuration, and the text of its file."""
    if not path.exists():
        return {}, ""
    try:
        return read_config(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): put back the file that the run wrote") from error


def _samples(folder: Path) -> list[Row]:
    rows = []
    for path in sorted(folder.glob("completions/step-*.jsonl")):
        if (step := completions_step(path)) is None:
            logger.warning("%s is passed over: no run writes a file of that name", path)
            continue
        rows += [{**row, "step": step} for row in read_rows(path, Sampled, OF_RUN)]
    return rows


def latest_warnings(run: Run) -> list[tuple[str, str]]:
    """For each kind of warning its steps and its latest text, in the order in which the kinds first occurred."""
    by_kind: dict[str, list[dict]] = {}
    for row in run.warnings:
        by_kind.setdefault(row["kind"], []).append(row)
    return [(", ".join(str(row["step"]) for row in rows), str(rows[-1]["text"])) for rows in by_kind.values()]


@dataclass(frozen=True)
class Listed:
    """A run in a line: `measure` is what it learns from, `value` that of the last step which logged it (None: it
    was not finite), `written` the time of its last step in seconds since 1970; `note` says why it failed, and what
    cannot be read of it."""

    folder: Path
    model: str
    kind: str
    steps: int
    steps_in_all: int | None
    measure: str
    value: float | None
    state: str
    written: float
    note: str

    def __fspath__(self) -> str:
        return str(self.folder)


class Runs(list[Listed]):
    """Runs, which print as a table, and below it a line for each that failed or is damaged."""

    def show(self, console: Console) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("run", "model", "kind", "steps", "last", "state", "age"):
            table.add_column(heading, overflow="fold")
        for run in self:
            steps = str(run.steps) if run.steps_in_all is None else f"{run.steps} of {run.steps_in_all}"
            last = f"{run.measure} {'nan' if run.value is None else format(run.value, '.3g')}" if run.measure else ""
            cells = run.folder.name, run.model, run.kind, steps, last, run.state, _age(time.time() - run.written)
            table.add_row(*map(Text, cells))
        console.print(table)
        for run in self:
            if run.note:
                console.print(f"{run.folder}: {run.note}", soft_wrap=True, highlight=False, markup=False)

    def __repr__(self) -> str:
        self.show(SafeConsole(file=(text := io.StringIO())))
        return "\n".join(map(str.rstrip, text.getvalue().splitlines())).strip("\n")

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def list_runs(folder: Path) -> Runs:
    """The runs in a folder, or the run that it is, the newest first. Raises ConfigError if there is none."""
    try:
        inside = [folder] if is_begun(folder) else [path for path in folder.iterdir() if is_begun(path)]
    except OSError as error:
        where = f"{folder} cannot be read ({error.strerror})" if folder.exists() else no_folder(str(folder))
        raise ConfigError(f"{where}: give the folder that holds your runs") from error
    if not inside:
        raise ConfigError(f"{folder} holds no run: give the folder that holds your runs")
    return Runs(sorted([_listed(run) for run in inside], key=lambda run: run.written, reverse=True))


def _listed(folder: Path) -> Listed:
    config, damages = {}, []
    try:
        config = read_config(folder / "config.yaml")[0]
    except FileNotFoundError:
        damages.append("no config.yaml")
    except (OSError, ValueError) as error:
        damages.append(f"config.yaml cannot be read ({error})")
    steps, measure, value, damage = _last(folder / "metrics.jsonl")
    state, _, why = state_of(folder).partition(": ")
    kind, model, planned = RunKind.of(config), config.get("model") or {}, (config.get("run") or {}).get("steps")
    files = [folder / name for name in ("metrics.jsonl", "config.yaml", LOCK)]
    return Listed(
        folder,
        model=str(model.get("base", "")),
        kind=f"{KINDS[kind.learns]}{', QAT' if kind.packs else ''}" if config else "",
        steps=steps,
        steps_in_all=planned if isinstance(planned, int) else None,
        measure=measure,
        value=value,
        state=state,
        written=next(filter(None, map(_written, files)), 0.0),
        note="; ".join([why] * bool(why) + damages + damage),
    )


def _written(file: Path) -> float:
    with suppress(OSError):  # it is not there, or was deleted meanwhile
        return file.stat().st_mtime
    return 0.0


def _last(metrics: Path) -> tuple[int, str, float | None, list[str]]:
    """The last step of metrics.jsonl, what it learned from and the last value of that, and what is damaged. A last line
    that a kill cut short is none."""
    step, damaged = 0, 0
    try:
        for line in reversed([*read_lines(metrics)] if metrics.exists() else []):
            try:
                row = Metrics.model_validate(parse_json(line)).model_dump()
            except ValueError:
                damaged += line.endswith(b"\n")
                continue
            step = max(step, row["step"])
            # Null stands for a number that was not finite, which counts where no other is there.
            found = [(row[key] is None, measure, row[key]) for key, measure in LEARNED_FROM if key in row]
            if found:
                null, measure, value = min(found, key=lambda each: each[0])
                notes = [f"{measure} was not finite at step {row['step']}"] * null
                return step, measure, value, notes + [f"{damaged} damaged lines in metrics.jsonl"] * bool(damaged)
    except (OSError, ValueError) as error:
        return step, "", None, [f"metrics.jsonl cannot be read ({error})"]
    return step, "", None, [f"{damaged} damaged lines in metrics.jsonl"] * bool(damaged)


def state_of(run: Path) -> str:
    """`running`, `finished`, `stopped` (by a signal, with its steps saved), `failed: why`, or `killed`; `not known`
    for a run of another host, whose lock may not be seen from here, or a copy of one; `not finished` for a run of an
    earlier version, which did not say how it ended.

    The lock is asked, not taken: a run that begins at this moment is not kept from it.
    """
    if (run / LOCK).resolve() in HELD:
        return RUNNING
    try:
        with (run / LOCK).open("rb") as file:
            if _is_locked(file):
                return RUNNING
            said = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        said = ""
    except OSError as error:
        return f"not known ({error.strerror})"
    if has_result(run):
        return FINISHED
    state, _, host = said.partition(" ")
    if state != RUNNING:
        return said or "not finished"
    return "killed" if host in ("", socket.gethostname()) else f"not known: it began on {host}"


def has_result(run: Path) -> bool:
    return any((run / name).is_dir() for name in ("adapter", MODEL))


def _is_locked(file: BinaryIO) -> bool:
    """Whether another process holds a record lock on the file (fcntl's F_GETLK)."""
    linux = sys.platform == "linux"
    form = "hhqqi4x" if linux else "qqihh"  # struct flock: of Linux, else of BSD and macOS
    asked = (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0) if linux else (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
    found = struct.unpack(form, fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(form, *asked)))
    return found[0 if linux else 3] != fcntl.F_UNLCK


def _age(seconds: float) -> str:
    for name, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
