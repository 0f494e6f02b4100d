"""`qerl.Run`: what a run has written, as tables, pictures and paths."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.api.recipe import Recipe
from qerl.base.errors import ConfigError
from qerl.base.files import no_folder
from qerl.base.read_back import Shape, read_rows
from qerl.checkpoint.folder import RUNS, run_folder

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from qerl.report.read import Runs


def plot(runs: Sequence[str | os.PathLike | Run] | str | os.PathLike | Run, *metrics: str | Sequence[str]) -> Figure:
    """The curves of several runs in one matplotlib figure: those of `qerl report`, or those of the named metrics.

    A run is a Run or its folder. Raises ConfigError for a metric that none of the runs has, and DataError for a run
    before its first step.
    """
    from qerl.report.curves import Panel, curves
    from qerl.report.read import read_runs

    listed, names = _listed(runs), [name for given in metrics for name in _listed(given)]
    if not listed:
        raise ConfigError("there is no run to plot: write qerl.plot([run, 'runs/other'], 'reward')")
    read = read_runs([Run(run).path for run in listed])
    known = sorted({key for run in read for row in run.rows for key in row} - {"step"})
    for name in names:
        if name not in known:
            who = " and ".join(str(run.folder) for run in read)
            has = "it has" if len(read) == 1 else "they have"
            raise ConfigError(f"{who}: no metric {name!r}; {has} {', '.join(known)}")
    return curves(read, [Panel(name, {name: name}) for name in names] if names else None)


def runs(folder: str | os.PathLike = RUNS) -> Runs:
    """The runs in a folder, the newest first, as a list that prints as the table of `qerl runs`.

    Each has `folder`, `model`, `kind`, `steps`, `steps_in_all`, `measure` and `value` (the last reward or loss),
    `state`, `written` (seconds since 1970) and `note`, and can be given where a run is asked for. Raises ConfigError
    for a folder without runs.
    """
    from qerl.report.read import list_runs

    return list_runs(run_folder(os.fspath(folder)))


def _listed(given: Any) -> list[Any]:
    several = isinstance(given, Iterable) and not isinstance(given, str | os.PathLike)
    return list(given) if several else [given]


class Run:
    """A run directory. `qerl.train` returns one, and `qerl.Run("runs/x")`, or "x", opens one that is there.

    Everything is read when it is asked for, so that a run can be looked at while another process trains it.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        """Raises ConfigError for a folder that is not a run."""
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"{path!r:.60} is not a run: give a Run, or the directory that a run was written to")
        self.path = run_folder(os.fspath(path))
        if not (self.path / "config.yaml").is_file():
            what = f"{path} is not a run: it has no config.yaml" if self.path.exists() else no_folder(str(path))
            raise ConfigError(f"{what}; give the directory that a run was written to")

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the run, with every key."""
        return Recipe.load(self.path / "config.yaml")

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row for each step, one column for each metric (docs/metrics.md). Row 0, a validation before the first
        step, is there only if the recipe asks for it."""
        import pandas

        rows = self._rows("metrics.jsonl")
        return pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame()

    @property
    def completions(self) -> pandas.DataFrame:
        """The completions that were kept (`logging.completions_every`): step, prompt, completion, tokens, whether it
        was truncated, advantage, a column for each reward, and one for each name that a reward gave to `log_extra`;
        `rewards/NAME` and `extra/NAME` where another column has the name."""
        import pandas

        from qerl.report.read import completions_step

        rows = []
        for file in sorted((self.path / "completions").glob("step-*.jsonl")):
            for row in self._rows(file.relative_to(self.path)):
                named = {kind: row.pop(kind, {}) for kind in ("extra", "rewards")}
                rows.append(found := {"step": completions_step(file), **row})
                for kind, values in named.items():
                    found |= {f"{kind}/{name}" if name in found else name: value for name, value in values.items()}
        return pandas.DataFrame(rows)

    @property
    def warnings(self) -> list[str]:
        """What the run warned of, in words, with the step."""
        return [f"step {row['step']}: {row['text']}" for row in self._rows("warnings.jsonl")]

    @property
    def steps(self) -> int:
        """How many steps it has made."""
        return max((row["step"] for row in self._rows("metrics.jsonl")), default=0)

    @property
    def finished(self) -> bool:
        """Whether its result is there."""
        return self.adapter is not None

    @property
    def adapter(self) -> Path | None:
        """The folder of the trained adapter, a standard PEFT folder (of a run that trains whole weights: of the model);
        None until the run is finished."""
        found = (self.path / name for name in ("adapter", "model"))
        return next((folder for folder in found if folder.is_dir()), None)

    @property
    def best(self) -> Path | None:
        """The adapter of the best validation, if the recipe validates."""
        return self.path / "best" if (self.path / "best").is_dir() else None

    def plot(self, *metrics: str | Sequence[str]) -> Figure:
        """The curves of `qerl report`, or only the named metrics, as a matplotlib figure; a notebook shows it.

        Raises ConfigError for a metric that the run does not have, and DataError before the first step.
        """
        return plot([self], *metrics)

    def report(self) -> Path:
        """Write report.html, report.md and curves.png into the run, and return the page's path."""
        from qerl.report.page import write_report

        return write_report([self.path])

    def _rows(self, name: str | os.PathLike) -> Sequence[dict[str, Any]]:
        path = self.path / name
        if not path.is_file():
            return []
        return read_rows(path, Shape, "put back the file as the run wrote it")

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        rows, learned = self._rows("metrics.jsonl"), ""
        for key, name in (("nll", "loss"), ("reward", "reward")):
            if not learned and (values := [row[key] for row in rows if row.get(key) is not None]):
                learned = f", {name} {values[0]:.3f} at first, {values[-1]:.3f} at last"
        state = f"{self.steps} steps" if self.finished else f"not finished after {self.steps} steps"
        return f"Run({str(self.path)!r}: {state}{learned})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"
