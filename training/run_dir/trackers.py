"""Trackers: wandb, trackio and TensorBoard get the numbers of metrics.jsonl, under the same names.

qerl opens them itself, before anything of the run is written. transformers' callbacks would do so once the run has
begun, with project names of their own and without the recipe. A tracker gets the resolved recipe as its config, without
secrets, and samples of completions as tables of at most ROWS rows. One that fails later is dropped with a warning,
since metrics.jsonl has everything.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qerl.base.errors import ConfigError
from qerl.base.files import replace_text
from qerl.config import yaml_text
from qerl.config.rewards import without_secrets
from qerl.config.schema import RunConfig

ROWS, TEXT = 32, 4000  # of a table: rows, and characters of a cell
CLOSE_S = 60.0  # that wandb may go on uploading at the end; trackio has limits of its own
IDS = ".trackers.json"  # in the run directory: by which a resumed run continues at a tracker
COLUMNS = ("step", "prompt", "completion", "advantage")

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """An open tracker."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def close(self, failed: bool) -> None: ...


@dataclass(frozen=True)
class About:
    """What a tracker is told of the run when it is opened."""

    project: str | None  # None: what the tracker's environment says, else "qerl"
    name: str
    run_dir: Path
    start_step: int
    recipe: Mapping[str, Any]


class Trackers:
    """The open trackers of a run."""

    def __init__(self, opened: Mapping[str, Tracker] | None = None) -> None:
        self._opened = dict(opened or {})

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Report the metrics of a step. What is not finite cannot be drawn, and is left out."""
        finite = {name: value for name, value in metrics.items() if value is not None}
        self._each(lambda tracker: tracker.log(step, finite))

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Report a sample of completions, as `completion_rows` makes it."""
        if rows and self._opened:
            rows = rows[:ROWS]
            names = list(dict.fromkeys(name for row in rows for name in row["rewards"]))  # of all sources
            values = [[step, *(row[name] for name in COLUMNS[1:]), *map(row["rewards"].get, names)] for row in rows]
            cells = [[_cut(value) for value in row] for row in values]
            self._each(lambda tracker: tracker.table(step, [*COLUMNS, *names], cells))

    def close(self, failed: bool) -> None:
        """Close them all, and wait for what they still upload."""
        self._each(lambda tracker: tracker.close(failed))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._opened.items()):
            if not _quiet(name, lambda t=tracker: call(t)):
                del self._opened[name]


def _quiet(name: str, call: Callable[[], None]) -> bool:
    """Whether the call succeeded; a failure is a warning."""
    try:
        call()
    except Exception as error:
        logger.warning("%s failed (%s), and gets no more; metrics.jsonl has everything", name, _first_line(error))
        return False
    return True


@contextmanager
def open_trackers(config: RunConfig, run_dir: Path, start_step: int) -> Iterator[Trackers]:
    """The trackers that the recipe names, closed at the end. Raises ConfigError for one that cannot be opened."""
    wanted = config.logging
    recipe = without_secrets(config.model_dump(mode="json"))
    about = About(wanted.project, wanted.run_name or run_dir.name, run_dir, start_step, recipe)
    opened: dict[str, Tracker] = {}
    failed = True
    try:
        for name in wanted.report_to:
            opened[name] = _open(name, about)
        yield Trackers(opened)
        failed = False
    finally:
        Trackers(opened).close(failed)


def _open(name: str, about: About) -> Tracker:
    try:
        return {"wandb": _Wandb, "trackio": _Trackio, "tensorboard": _TensorBoard}[name](about)
    except Exception as error:  # of the tracker, of its HTTP library, or an OSError
        offline = ", set WANDB_MODE=offline" if name == "wandb" else ""
        raise ConfigError(
            f"logging.report_to names {name}, which cannot be opened ({_first_line(error)}): correct that{offline}, or "
            "leave it out (metrics.jsonl is written in any case)"
        ) from error


class _Wandb:
    def __init__(self, about: About) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=about.project or os.environ.get("WANDB_PROJECT") or "qerl",
            name=about.name,
            id=_id(about.run_dir, "wandb"),
            resume="allow",
            dir=str(about.run_dir),
            config=dict(about.recipe),
            settings=wandb.Settings(  # without `console` and `silent` it takes over what the run shows
                console="off", silent=True, finish_timeout=CLOSE_S
            ),
        )
        # By our own step: a run that continues from an earlier checkpoint repeats steps, which wandb's counter refuses.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        logger.info("wandb: %s", f"offline, in {Path(self._run.dir).parent}" if self._run.offline else self._run.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({"samples": table, "step": step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    def __init__(self, about: About) -> None:
        import trackio

        self._trackio = trackio
        project = about.project or "qerl"
        with contextlib.redirect_stdout(io.StringIO()):  # it prints lines of advice
            self._run = trackio.init(
                project=project,
                name=about.name,
                config=dict(about.recipe),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        logger.info("trackio: `trackio show --project %s` shows %s", project, about.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        data = [dict(zip(columns, row, strict=True)) for row in rows]
        self._run.log({"samples": self._trackio.Table(data=data)}, step=step)

    def close(self, failed: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()


class _TensorBoard:
    def __init__(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = about.run_dir / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=about.start_step + 1 if about.start_step else None)
        self._writer.add_text("recipe", f"```yaml\n{yaml_text.dump(about.recipe)}\n```", about.start_step)
        logger.info("tensorboard: `tensorboard --logdir %s`", folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        lines = [columns, ["---"] * len(columns), *([in_cell(value) for value in row] for row in rows)]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def close(self, failed: bool) -> None:
        self._writer.close()


def _id(run_dir: Path, tracker: str) -> str:
    """The run's id at a tracker, which a resumed run finds again."""
    path = run_dir / IDS
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        ids = {}
    if not isinstance(ids, dict) or not isinstance(ids.get(tracker), str):
        ids = {tracker: uuid.uuid4().hex[:12]}
        replace_text(path, json.dumps(ids))
    return ids[tracker]


def _cut(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return value if len(value) <= TEXT else f"{value[:TEXT]}..."


def in_cell(value: Any) -> str:
    """A value as Markdown shows it in one cell of a table, and as nothing else; None is empty."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else f"{value:.4g}"
    for char, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("`", "&#96;"), ("\n", "<br>")):
        text = text.replace(char, written)
    return text


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
