"""A process that does runs of scripts/study/study_real.py one after another, as the queue hands them over.

It reads a line of JSON per run from its standard input and writes the run's row to the file that the line names. What
is imported and compiled for the first run serves the next ones. A run that fails is written down, and ends the process.

The answers to the test rows come from the open engine of the run, after its last step: no second start is needed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study_real_arms import RECIPE, Job, Settings, overrides_of

if TYPE_CHECKING:
    from training.parts import Parts
    from training.validation.questions import Questions

KEPT = (
    "reward", "sampled/reward", "entropy", "sampling/entropy", "noise/sigma", "mismatch_kl", "grad_norm",
    "completions/mean_tokens", "completions/truncated_share", "groups/zero_variance_share", "time/step_s",
    "time/rollout_s", "memory/peak_gib",
)  # fmt: skip
SEED = 7  # of the samples for pass@k, the same in all runs


def do(job: Job, settings: Settings, work: Path, measure_before: bool) -> dict[str, Any]:
    """Train and answer the test rows; returns the row of the results, as JSON values."""
    started = time.monotonic()
    row = by_trl(job, settings, work) if job.arm == "trl" else by_qerl(job, settings, work, measure_before)
    return {**asdict(job), **row, "seconds": round(time.monotonic() - started, 1)}


def by_qerl(job: Job, settings: Settings, work: Path, measure_before: bool) -> dict[str, Any]:
    """A run of qerl in this process."""
    from qerl.config.recipe import load_recipe

    run_dir = work / "runs" / job.key
    shutil.rmtree(run_dir, ignore_errors=True)  # of a run that was cut off
    overrides = [*overrides_of(job, settings, work), f"validation.at_start={str(measure_before).lower()}"]
    config = load_recipe(RECIPE, overrides, seed=job.seed, steps=settings.steps, out=str(run_dir))
    from training.run import start
    from training.run_dir.log import read_metrics

    with answers_kept(settings) as answers:
        start(config, "study_real")
    steps = [row for row in read_metrics(run_dir) if row["step"]]
    for name in ("checkpoints", "base", "model"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    curves = {name: [rounded(row.get(name)) for row in steps] for name in KEPT if any(name in row for row in steps)}
    return {"before": answers.get(0), "after": answers[settings.steps], "steps": curves}


def by_trl(job: Job, settings: Settings, work: Path) -> dict[str, Any]:
    """A run of TRL in a process of its own, since it opens vLLM in its way."""
    if settings.variant != "plain":
        raise ValueError("TRL does not replace groups without a signal: give the arm trl with --variant plain alone")
    out = work / "runs" / job.key
    shutil.rmtree(out, ignore_errors=True)
    script = str(Path(__file__).with_name("study_real_trl.py"))
    given = [str(work / "bf16"), str(work / f"rows-{settings.variant}"), str(out), "--rate", f"{job.rate:g}"]
    given += ["--seed", str(job.seed), "--steps", str(settings.steps), "--test-rows", str(settings.test_rows)]
    subprocess.run([sys.executable, script, *given], check=True, stdin=subprocess.DEVNULL)
    return json.loads((out / "row.json").read_text(encoding="utf-8"))


def rounded(value: float | None) -> float | None:
    """To the precision of a curve."""
    return None if value is None else float(f"{value:.4g}")


@contextmanager
def answers_kept(settings: Settings) -> Iterator[dict[int, dict[str, Any]]]:
    """Within it, a run's validations fill the mapping with what `answers` returns, by the number of steps."""
    from training.parts import Parts

    kept: dict[int, dict[str, Any]] = {}

    def measure(parts: Parts, step: int, stop: Any) -> dict[str, float]:
        kept[step] = answers(parts, parts.questions, step, settings)
        bits = kept[step]["test"]
        accuracy = bits.count("1") / len(bits)
        return {
            "validation/accuracy": accuracy,
            "validation/reward": accuracy,
            "validation/mean_tokens": kept[step]["tokens"],
            "validation/truncated_share": kept[step]["truncated_share"],
        }

    original, Parts.measure = Parts.measure, measure
    try:
        yield kept
    finally:
        Parts.measure = original


def answers(parts: Parts, questions: Questions, step: int, settings: Settings) -> dict[str, Any]:
    """The greedy answers: `test`, with a 0 or 1 per question, longest prompt first; `tokens` and `truncated_share`.

    With settings.samples also `right`: for some of these questions, how many samples at temperature 1 are right.
    """
    import torch

    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        parts.sampler.sync(step)
        greedy = _groups(parts, questions, questions.prompts, 1, step)
        samples = [group.group.samples[0] for group in greedy]
        row = {
            "test": "".join(str(_right(questions, group)) for group in greedy),
            "tokens": round(sum(sample.written for sample in samples) / len(samples), 1),
            "truncated_share": round(sum(sample.truncated for sample in samples) / len(samples), 4),
        }
        if settings.samples and settings.sample_rows:
            apart = max(1, len(questions.prompts) // settings.sample_rows)
            chosen = questions.prompts[::apart][: settings.sample_rows]
            drawn = _groups(parts, questions, chosen, settings.samples, step)
            row |= {"right": [_right(questions, group) for group in drawn], "samples": settings.samples}
    return row


def _groups(parts: Parts, questions: Questions, prompts: Sequence[Any], size: int, step: int) -> list[Any]:
    """Graded completions of the prompts: one greedy one of each, or `size` at temperature 1."""
    from training.rewards.grading import Grader

    sampling = replace(questions.asking.sampling, temperature=0.0 if size == 1 else 1.0)
    asking = replace(questions.asking, sampling=sampling, size=size)
    with parts.sampler.clean_engine() as engine:
        groups = asking.groups(engine, prompts, SEED)
    grader = Grader(questions.rewards, parts.grader.decode, mask_truncated=False)
    return grader.grade(groups, step, steps_done=step).groups


def _right(questions: Questions, group: Any) -> int:
    """The number of the group's completions that are right."""
    return int((group.rewards_G_F[:, questions.accuracy] >= 0.5).sum())


def serve() -> None:
    """Do the runs that arrive, until the input ends or a run fails."""
    import_all()
    for line in sys.stdin:
        given = json.loads(line)
        job, out = Job(**given["job"]), Path(given["out"])
        log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        try:
            row = do(job, Settings(**given["settings"]), Path(given["work"]), given["measure_before"])
            write(out, {"row": row})
        except BaseException:
            text = traceback.format_exc()
            sys.stderr.write(text)
            write(out, {"error": text})
            raise SystemExit(1) from None


def import_all() -> None:
    """Import what the first run needs, while it waits for its turn."""
    import torch

    import training.run  # noqa: F401
    from qerl.engine.vllm import opening

    if torch.cuda.is_available() and opening.has_module("vllm"):
        opening.import_vllm()


def write(out: Path, value: dict[str, Any]) -> None:
    """Write JSON by a rename, so that the file is never incomplete."""
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(value) + "\n", encoding="utf-8")
    partial.rename(out)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    serve()
