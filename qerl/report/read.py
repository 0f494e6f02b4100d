"""Reads a run directory for the report. Only metrics.jsonl is required; everything else is shown if it exists."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl.base.errors import DataError
from qerl.base.nearby import no_folder
from qerl.base.read_back import OF_EVALUATION, Row, read_object, read_rows
from qerl.checkpoint.adapter_file import adapter_damage, adapters_of_run
from qerl.config.recipe import read_config
from qerl.report.shapes import About, Graded, Metrics, Result, Sampled, Warned

logger = logging.getLogger(__name__)

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

    `validations` are the rows with one, that of step 0 included, which was made before the first step.
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
    return Run(
        folder,
        name or folder.resolve().name,
        rows,
        config,
        config_text,
        read_object(about, About, "put back what the run wrote, or delete it") if about.exists() else {},
        _samples(folder),
        [read_evaluation(path) for path in sorted(folder.glob("eval/*")) if _result_file(path).exists()],
        [*(read_rows(warnings, Warned, OF_RUN) if warnings.exists() else []), *_damaged(folder, rows[-1]["step"])],
        [row for row in logged if any(row.get(f"validation/{name}") is not None for name in ("reward", "loss"))],
    )


def read_evaluation(folder: Path, shape: type[Result] = Result) -> Evaluation:
    """Read one evaluation. One by lighteval has no completions. Raises DataError if it is not a finished evaluation."""
    completions = folder / "completions.jsonl"
    rows = read_rows(completions, Graded, OF_EVALUATION) if completions.exists() else []
    result = read_object(_result_file(folder), shape, OF_EVALUATION)
    return Evaluation(folder, folder.resolve().name, result, rows)


def _damaged(folder: Path, step: int) -> list[Row]:
    """A warning for each saved adapter whose files are not those that the run wrote."""
    found = {path.relative_to(folder): adapter_damage(path) for path in adapters_of_run(folder)}
    texts = {path: f"{path} is damaged: {damage}" for path, damage in found.items() if damage}
    return [{"step": step, "kind": f"damaged {path}", "text": text} for path, text in texts.items()]


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
