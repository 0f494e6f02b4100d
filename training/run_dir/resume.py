"""Find the run that `qerl train --resume [RUN|STEP]` continues, and the checkpoint it continues from.

--resume                     the newest run under runs/ (with --recipe R the newest of R, with --out DIR the one in DIR)
--resume runs/x              this run, from its newest good checkpoint
--resume 40                  the run as in the first line, from its checkpoint of step 40
--resume runs/x/checkpoints/step-000040
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from qerl.checkpoint.load import local_folder
from qerl.checkpoint.resolve import RUNS
from qerl.checkpoint.weights_digest import weights_digest
from qerl.errors import ConfigError, DataError
from qerl.files.nearby import no_folder
from training.run_dir.checkpoint import checkpoint_path, checkpoint_step, checkpoints, damage_of
from training.run_dir.folder import make_aside, read_about
from training.run_dir.lock import only_writer, written

LAST = "last"  # the value of `--resume` if none is given

logger = logging.getLogger(__name__)


def find_run(ref: str, recipe: str | None = None, out: Path | None = None) -> tuple[Path, int | None]:
    """(run directory, step to continue from or None for the newest). Raises ConfigError, which lists what there is."""
    run_dir, step = _find(ref, recipe, out)
    check_run(run_dir)
    if step is not None:
        _check_step(run_dir, step)
    return run_dir, step


def check_run(run_dir: Path) -> None:
    """Raise ConfigError if the folder is not a run directory."""
    if os.path.isfile(run_dir / "config.yaml"):
        return
    what = f"{run_dir} is not a run: it has no config.yaml" if os.path.exists(run_dir) else no_folder(str(run_dir))
    raise ConfigError(f"{what}; give the directory that `qerl train` printed")


def check_same_base(run_dir: Path, base: str) -> None:
    """Raise ConfigError if weights or configs of the base changed since the run began, according to run.json."""
    began_on = read_about(run_dir).get("weights")
    if began_on is not None and began_on != weights_digest(local_folder(base)):
        raise ConfigError(
            f"{base} holds other weights than when {run_dir} began (was it quantized again?), or another config.json "
            "or generation_config.json: put those back, or start a new run from this one's adapter with "
            f"--model {run_dir}"
        )


def _find(ref: str, recipe: str | None, out: Path | None) -> tuple[Path, int | None]:
    if ref != LAST and not ref.isdecimal():
        if recipe is not None or out is not None:
            raise ConfigError(f"--resume {ref} names the run: leave --recipe and --out out")
        path = Path(ref)
        if path.parent.name == "checkpoints" and (path.parents[1] / "config.yaml").is_file():
            if path not in checkpoints(path.parents[1]):
                raise ConfigError(f"{path} is no checkpoint: {_steps(path.parents[1])}")
            return path.parents[1], checkpoint_step(path)
        return path, None
    run = out or newest_run(recipe)
    return run, None if ref == LAST else int(ref)


def newest_run(recipe: str | None = None) -> Path:
    """The newest run under runs/, of `recipe` if that is given. Raises ConfigError if there is none."""
    found = {file.parent: file.stat().st_mtime for file in RUNS.glob("*/metrics.jsonl") if _is_of(file.parent, recipe)}
    if not found:
        of = f" of recipe {recipe}" if recipe else ""
        raise ConfigError(f"there is no run{of} in {RUNS}/ to continue: write `qerl train --resume DIR`")
    newest = max(found, key=found.get)
    logger.info("no run was named: taking the newest%s, %s", f" of {recipe}" if recipe else "", newest)
    return newest


def rewind_(run_dir: Path, step: int) -> None:
    """Make the checkpoint of `step` the newest one by moving later ones and the result to `replaced-<time>/`.

    Nothing is deleted. Raises ConfigError if there is no good checkpoint of that step, or if another process writes to
    the run.
    """
    _check_step(run_dir, step)
    if damage := damage_of(checkpoint_path(run_dir, step)):
        raise ConfigError(f"the checkpoint of step {step} is damaged ({damage}): {_steps(run_dir)}")
    later = [path for path in checkpoints(run_dir) if checkpoint_step(path) > step]
    later += [path for path in (run_dir / "adapter",) if later and path.is_dir()]
    if not later:
        return
    with only_writer(run_dir, written(run_dir)):
        aside = make_aside(run_dir)
        for path in reversed(later):  # the result first, so that a kill in between leaves a run that continues
            path.rename(aside / path.name)
    logger.warning("continuing from step %d: %s moved to %s", step, ", ".join(p.name for p in later), aside)


def _check_step(run_dir: Path, step: int) -> None:
    if checkpoint_path(run_dir, step) not in checkpoints(run_dir):
        raise ConfigError(f"{run_dir} has no checkpoint of step {step}: {_steps(run_dir)}")


def _is_of(run: Path, recipe: str | None) -> bool:
    if not (run / "config.yaml").is_file():
        return False
    if recipe is None:
        return True
    try:
        return read_about(run).get("recipe") == Path(recipe).stem
    except DataError:
        return False


def _steps(run_dir: Path) -> str:
    steps = [str(checkpoint_step(path)) for path in checkpoints(run_dir)]
    return f"there are steps {', '.join(steps)}" if steps else "it has none yet, write --resume and the run"
