"""Trackers get the numbers of metrics.jsonl from transformers' callbacks: under train/, MLflow by their own names.

Ours are the folders, the id by which a resumed run continues, the resolved recipe without secrets, and samples of
completions as tables of at most ROWS rows. The trainer's arguments name project and run (training/trainer.py).
"""

import json
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import (
    MLflowCallback,
    SwanLabCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)

from qerl.base.errors import ConfigError
from qerl.base.files import replace_text
from qerl.config.data import without_secrets
from qerl.config.schema import RunConfig
from qerl.report.read import FINISHED, STOPPED, has_result
from qerl.report.sections import flatten
from training.run_dir.folder import IDS

logger = logging.getLogger(__name__)

ROWS, TEXT = 32, 4000  # of a table: rows, and characters of a cell
FAILED = "failed"  # beside FINISHED and STOPPED, how a run ended
PARAMETERS = 100  # that MLflow takes at once
CLOSE_S = 60.0  # that wandb may go on uploading at the end
COLUMNS = ("step", "prompt", "completion", "advantage")
AT_WORK = ("on_log", "on_save", "on_predict", "on_train_end")  # the events at which a tracker reports


@contextmanager
def open_trackers(config: RunConfig, run_dir: Path, start_step: int) -> Iterator[list[TrainerCallback]]:
    """The callbacks of the trackers that the recipe names, which are told at the end how the run ended.

    Raises ConfigError for one that cannot be opened.
    """
    names, end = config.logging.report_to, FAILED
    try:
        yield [droppable_(name, _callback(name, config, run_dir, start_step)) for name in names]
        end = FINISHED if has_result(run_dir) else STOPPED
    except (KeyboardInterrupt, SystemExit):
        end = STOPPED
        raise
    finally:  # transformers closes them only where its loop comes to its end
        for name in names:
            try:
                _close(name, sys.modules.get(name), end, run_dir)
            except Exception as error:  # of the tracker or of its HTTP library; the run's own error counts
                logger.warning("%s could not be closed (%s); metrics.jsonl is complete", name, error)


def _close(name: str, tracker: Any, end: str, run_dir: Path) -> None:
    """End the run at a tracker, unless it is the caller's, by the tracker's word for how it ended."""
    if tracker is None:
        return
    own = _ids(run_dir).get(name)
    if name == "wandb":
        if tracker.run is not None and tracker.run.id == own:
            tracker.finish(exit_code={FINISHED: 0, STOPPED: 255, FAILED: 1}[end])  # 255: killed, as after Ctrl-C
    elif name == "mlflow":
        active = tracker.active_run()
        if active is not None and active.info.run_id == own:
            tracker.flush_async_logging()
            tracker.end_run({FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}[end])
    elif name == "swanlab":
        if tracker.has_run() and tracker.get_run().id == own:
            tracker.finish({FINISHED: "success", STOPPED: "aborted", FAILED: "crashed"}[end])
    elif name == "trackio":
        with suppress(RuntimeError):  # it is closed already
            tracker.finish()


def _callback(name: str, config: RunConfig, run_dir: Path, start_step: int) -> TrainerCallback:
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            purged = start_step + 1 if start_step else None
            return TensorBoardCallback(SummaryWriter(str(run_dir / "tensorboard"), purge_step=purged))
        if name == "trackio":
            return _Trackio(_recipe(config))
        if name == "mlflow":
            _open_mlflow(config, run_dir)
            return _MLflow()
        if name == "swanlab":
            _open_swanlab(config, run_dir)
            return SwanLabCallback()
        _open_wandb(config, run_dir)
        return WandbCallback()
    except Exception as error:  # of the tracker, of its HTTP library, or an OSError
        offline = f", set {name.upper()}_MODE=offline" if name in ("wandb", "swanlab") else ""
        raise ConfigError(
            f"logging.report_to names {name}, which cannot be opened ({error}): correct that{offline}, or leave it out "
            "(metrics.jsonl is written in any case)"
        ) from error


def _open_wandb(config: RunConfig, run_dir: Path) -> None:
    """Open the run that transformers' callback then takes, or take the one that the caller has open, as in a sweep."""
    import wandb

    if wandb.run is not None:
        wandb.run.config.update(_recipe(config), allow_val_change=True)
        logger.warning("wandb: this program has run %s open, which gets the numbers and stays open", wandb.run.id)
        return
    wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "qerl",
        name=run_dir.name,
        id=_id(run_dir, "wandb"),
        resume="allow",
        dir=str(run_dir),
        config=_recipe(config),
        # Without `console` and `silent` it takes over what the run shows.
        settings=wandb.Settings(console="off", silent=True, finish_timeout=CLOSE_S),
    )


def _open_swanlab(config: RunConfig, run_dir: Path) -> None:
    """Open the run that transformers' callback then takes. SwanLab refuses if the caller has one open."""
    import swanlab

    folder = run_dir / "swanlab"
    folder.mkdir(parents=True, exist_ok=True)
    swanlab.init(
        project=os.environ.get("SWANLAB_PROJECT") or "qerl",
        name=run_dir.name,
        id=_id(run_dir, "swanlab"),
        resume="allow",
        log_dir=str(folder),
        config=_recipe(config),
        settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),  # else it takes what is shown
    )


def _open_mlflow(config: RunConfig, run_dir: Path) -> None:
    """Begin the run, or continue it where the store still has it. MLflow lets no parameter change: those of a resumed
    run stay, and its recipe is the artifact recipe.json. A run that the caller has open is not taken over."""
    import mlflow

    if (active := mlflow.active_run()) is not None:
        raise ConfigError(f"this program has run {active.info.run_id} open: end it with mlflow.end_run()")
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "qerl")
    with suppress(mlflow.MlflowException):
        if known := _ids(run_dir).get("mlflow"):
            mlflow.start_run(known)
    if mlflow.active_run() is None:
        run = mlflow.start_run(run_name=run_dir.name)
        _keep_id(run_dir, "mlflow", run.info.run_id)
        values = [(key, value[:TEXT]) for key, value in flatten(_recipe(config))]
        for at in range(0, len(values), PARAMETERS):
            mlflow.log_params(dict(values[at : at + PARAMETERS]))
    mlflow.log_dict(_recipe(config), "recipe.json")


class _MLflow(MLflowCallback):
    """For the open run; transformers would log its own arguments as parameters."""

    def setup(self, *_: Any) -> None:
        self._initialized = self._async_log = True


class _Trackio(TrackioCallback):
    def __init__(self, recipe: dict[str, Any]) -> None:
        super().__init__()
        self._recipe = recipe

    def setup(self, *args: Any, **kwargs: Any) -> None:
        super().setup(*args, **kwargs)
        self._trackio.config.update(self._recipe, allow_val_change=True)


def _recipe(config: RunConfig) -> dict[str, Any]:
    return without_secrets(config.model_dump(mode="json"))


def droppable_(name: str, tracker: TrainerCallback) -> TrainerCallback:
    """Let a tracker that fails while it reports be left out from then on, with a warning: the run goes on without it.

    One that cannot begin still raises, since a run that has not begun loses nothing.
    """
    dropped = False

    def kept(report: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal dropped
            try:
                return None if dropped else report(*args, **kwargs)
            except Exception as error:  # of the tracker or of its HTTP library
                dropped = True
                _say_dropped(name, error)
                return None

        return call

    for event in AT_WORK:
        setattr(tracker, event, kept(getattr(tracker, event)))
    return tracker


def _say_dropped(name: str, error: Exception) -> None:
    logger.warning("%s failed and gets nothing more (%s); metrics.jsonl is complete", name, error)


def log_table(names: Sequence[str], step: int, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Report a sample of completions, as `completion_rows` makes it; returns the trackers that did not fail."""
    columns, cells = table_of(step, rows)
    worked = []
    for name in names:
        try:
            if name == "wandb":
                import wandb

                wandb.log({"completions": wandb.Table(columns=columns, data=cells), "train/global_step": step})
            elif name == "trackio":
                import trackio

                data = [dict(zip(columns, row, strict=True)) for row in cells]
                trackio.log({"completions": trackio.Table(data=data), "train/global_step": step})
            elif name == "mlflow":
                import mlflow

                data = {column: list(of) for column, of in zip(columns, zip(*cells, strict=True), strict=True)}
                mlflow.log_table(data, f"completions/step-{step:06d}.json")
            elif name == "swanlab":
                import swanlab

                swanlab.log({"completions": swanlab.echarts.Table().add(columns, cells)}, step=step)
            worked.append(name)
        except Exception as error:  # of the tracker or of its HTTP library
            _say_dropped(f"the table of completions at {name}", error)
    return worked


def table_of(step: int, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and cells; each row has a cell for the rewards of all sources."""
    rows = rows[:ROWS]
    names = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    logged = list(
        dict.fromkeys(name for row in rows for name in row.get("extra", ()) if name not in (*COLUMNS, *names))
    )
    values = [
        [step, *(row[name] for name in COLUMNS[1:]), *map(row["rewards"].get, names)]
        + [None if (value := row.get("extra", {}).get(name)) is None else str(value) for name in logged]
        for row in rows
    ]
    return [*COLUMNS, *names, *logged], [
        [each[:TEXT] if isinstance(each, str) else each for each in row] for row in values
    ]


def _ids(run_dir: Path) -> dict[str, str]:
    """The run's id at each tracker, which a resumed run finds again."""
    path = run_dir / IDS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _keep_id(run_dir: Path, name: str, ident: str) -> str:
    replace_text(run_dir / IDS, json.dumps({**_ids(run_dir), name: ident}))
    return ident


def _id(run_dir: Path, name: str) -> str:
    return _ids(run_dir).get(name) or _keep_id(run_dir, name, uuid.uuid4().hex[:12])
