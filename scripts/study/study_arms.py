"""The arms of the studies, and one run of an arm, which trains by the recipe, evaluates and returns plain values."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from study_ways import DENSE, PACKED, trained_by

from qerl.formats import BF16, FP8_BLOCK, NVFP4

RECIPE = Path(__file__).with_name("study_noise.yaml")
TASK = "arith_chain"
EVALUATION_BATCH = 512
TEST_ROWS, VALIDATION_ROWS = 1024, 1024  # the first rows of the test split are reported, the next ones choose the rate
KEPT = (
    "reward", "entropy", "sampling/entropy", "noise/sigma", "mismatch_kl", "grad_norm", "completions/mean_tokens",
    "completions/truncated_share", "groups/zero_variance_share", "time/step_s", "time/rollout_s", "memory/peak_gib",
)  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One arm of the comparison: its base, a folder in the study's work directory, and what is trained of it."""

    title: str
    base: str  # "bf16", "nf4", or the name of a quantized format; after a dash, of that embedded model: "tiny-nvfp4"
    overrides: tuple[str, ...] = ("noise.enabled=false",)
    way: str = ""  # of training whole weights, in scripts/study/study_ways.py; "": an adapter
    packed_in: bool = False  # whether the adapter is trained through the quantizer
    packs: str = NVFP4.name  # the format of what a run packs
    rounded: str = ""  # the arm whose trained adapters are merged to 4 bits, which is all that this arm does

    @property
    def served(self) -> str:
        """The folder that has the weights with which the run begins to sample."""
        return self.packs if self.packed_in or self.way == PACKED else self.base

    @property
    def format(self) -> str:
        """The format of what is served. NF4 values are stored in 16 bits: see scripts/study/study_nf4.py."""
        kind = self.served.rpartition("-")[2]
        return kind if kind in (NVFP4.name, FP8_BLOCK.name) else BF16.name

    @property
    def caches(self) -> str:
        """The folder of caches of vLLM, which compiles something else with an adapter."""
        return f"{self.format}-weights" if self.way or self.packed_in else self.format


WEIGHTS = ("noise.enabled=false", "qat.mode=weights")
IN_FP8 = (*WEIGHTS, f"qat.quant_cfg={FP8_BLOCK.name}", "loss.mismatch_gate=null")
ARMS = {
    "bf16": Arm("BF16 LoRA", "bf16"),
    "nvfp4": Arm("NVFP4 LoRA", "nvfp4"),
    "nvfp4_aqn": Arm("NVFP4 LoRA + AQN in the rollout", "nvfp4", ("noise.enabled=true", "noise.where=rollout")),
    "nvfp4_aqn_both": Arm("NVFP4 LoRA + AQN in both", "nvfp4", ("noise.enabled=true", "noise.where=both")),
    "nf4": Arm("NF4 LoRA (QLoRA's values)", "nf4"),
    "nvfp4_aqn_x10": Arm(
        "NVFP4 LoRA + AQN x 10 in the rollout",
        "nvfp4",
        ("noise.enabled=true", "noise.where=rollout", "noise.sigma_start=1e-1", "noise.sigma_end=5e-3"),
    ),  # not in the paper; shows how strong noise has to be to have an effect
    "qat": Arm("QAT: whole weights, through NVFP4", "bf16", WEIGHTS, PACKED),
    "qat_fp8_gradients": Arm(
        "QAT through NVFP4, gradients in FP8",
        "bf16",
        (*WEIGHTS, "train.fp8_recipe=tensorwise", "train.fp8_products=gradients"),
        PACKED,
    ),
    "no_qat": Arm(
        "whole weights in 16 bits, NVFP4 rollouts",
        "bf16",
        (*WEIGHTS, "qat.forward=masters", "loss.mismatch_gate=null"),
        PACKED,
    ),
    "nvfp4_rounded": Arm("NVFP4 LoRA, rounded to 4 bits at the end", "nvfp4", rounded="nvfp4"),
    "packed_in": Arm("LoRA through NVFP4", "bf16", ("noise.enabled=false", "qat.mode=adapter"), packed_in=True),
    "bf16_weights": Arm("BF16, whole weights", "bf16", WEIGHTS, DENSE),
    "fp8": Arm("FP8 LoRA", FP8_BLOCK.name, ("noise.enabled=false", "loss.mismatch_gate=null")),
    "fp8_both": Arm(
        "FP8 rollouts and training, whole weights",
        "bf16",
        (*IN_FP8, "train.fp8_recipe=blockwise"),
        PACKED,
        packs=FP8_BLOCK.name,
    ),
    "fp8_rollout": Arm(
        "whole weights in 16 bits, FP8 rollouts",
        "bf16",
        (*IN_FP8, "qat.forward=masters"),
        PACKED,
        packs=FP8_BLOCK.name,
    ),
}
ARMS |= {
    "dense": Arm("its dense twin (tiny), LoRA", "tiny-nvfp4"),
    **{
        f"experts_{kind}": Arm(title, "nvfp4", ("noise.enabled=false", f"adapter.experts={kind}"))
        for kind, title in (
            ("shared", "experts, LoRA with shared outer factors"),
            ("per_expert", "experts, LoRA of each expert's own"),
            ("none", "experts, LoRA on attention alone"),
        )
    },
}
EXPERTS_ARMS = ("dense", "experts_shared", "experts_per_expert", "experts_none")
NOISE_ARMS = ("bf16", "nvfp4", "nvfp4_aqn", "nvfp4_aqn_both", "nf4", "nvfp4_aqn_x10")
FP8_ARMS = ("bf16_weights", "fp8_both", "fp8_rollout")
QAT_ARMS = ("nvfp4", "qat", "bf16_weights", "no_qat")


@dataclass(frozen=True)
class Job:
    """One run of an arm. With rate None nothing is trained, and the arm's base is evaluated."""

    arm: str
    rate: float | None
    seed: int

    @property
    def key(self) -> str:
        """The name of the job and of its folders."""
        return f"{self.arm}-base" if self.rate is None else f"{self.arm}-{self.rate:g}-{self.seed}"


@dataclass(frozen=True)
class JobSettings:
    """The settings that all jobs of a study share."""

    base: str  # name of the 16-bit checkpoint
    task: str
    steps: int
    engine: str
    overrides: list[str]
    test_rows: int
    validation_rows: int


def check_rows(settings: JobSettings) -> None:
    """Raise DataError if the task has fewer test rows than the study asks for."""
    from qerl.base.errors import DataError
    from qerl.data.tasks import get_task, load_examples

    asked = settings.test_rows + settings.validation_rows
    found = len(load_examples(get_task(settings.task), None, "test", None, asked)[0])
    if found < asked:
        raise DataError(
            f"task {settings.task} has {found} test rows, the study asks for {settings.test_rows} and "
            f"{settings.validation_rows} more: write a smaller --test-rows or --validation-rows"
        )


def execute(job: Job, settings: JobSettings, work: Path) -> dict[str, Any]:
    """Train, unless that has been done, and evaluate; returns the job's row of the results, as JSON values."""
    arm, run_dir = ARMS[job.arm], work / "runs" / job.key
    row: dict[str, Any] = asdict(job)
    if arm.rounded and (work / "runs" / replace(job, arm=arm.rounded).key / "adapter").is_dir():
        run_dir = work / "runs" / replace(job, arm=arm.rounded).key  # has been trained for that arm
    if job.rate is not None:
        with trained_by(arm.way):
            _train(job, settings, work, run_dir)
        row["steps"] = steps_of(run_dir)
    model = work / arm.served if job.rate is None else run_dir
    if arm.rounded and job.rate is not None:
        model = _merged(run_dir, work / "merged" / job.key)
    return row | _evaluate(model, arm.format, settings, work / "evals" / job.key)


def _merged(run_dir: Path, out: Path) -> Path:
    from quantize.export.options import ExportOptions
    from quantize.export.run import export

    return export(ExportOptions(str(run_dir), NVFP4.name, out, prompt_count=0, overwrite=True)).out


def overrides_of(job: Job, settings: JobSettings, work: Path) -> list[str]:
    """The --set values with which `qerl train --recipe scripts/study/study_noise.yaml` would run this job."""
    arm = ARMS[job.arm]
    own = [
        f"model.base={work / arm.base}",
        f"model.format={arm.packs if arm.way else arm.format}",  # with masters, a way may pack nothing all the same
        f"optim.learning_rate={job.rate}",
        f"data.task={settings.task}",
        f"rollout.engine={settings.engine}",
    ]
    return [*own, *arm.overrides, *settings.overrides]


def _train(job: Job, settings: JobSettings, work: Path, run_dir: Path) -> None:
    from qerl.config.recipe import load_recipe

    overrides = overrides_of(job, settings, work)
    config = load_recipe(RECIPE, overrides, seed=job.seed, steps=settings.steps, out=str(run_dir))
    from training.run import resume, start  # loads torch, so a wrong setting is reported before that

    if (run_dir / "config.yaml").exists():
        resume(run_dir)
    else:
        start(config, "study_noise")


def steps_of(run_dir: Path) -> dict[str, list[float | None]]:
    """The metrics of a run, each as a list over the steps, rounded to the precision of a curve."""
    from training.run_dir.log import read_metrics

    rows = read_metrics(run_dir)
    return {
        name: [None if row.get(name) is None else float(f"{row[name]:.4g}") for row in rows]
        for name in KEPT
        if any(row.get(name) is not None for row in rows)
    }


def _evaluate(model: Path, format: str, settings: JobSettings, out: Path) -> dict[str, Any]:
    """Grade greedy answers to the first rows of the test split, by the transformers engine, which opens in a second.

    `test` and `validation` are strings with a 0 or 1 per question.
    """
    from eval.run import run_eval
    from eval.settings import EvalSettings

    rows = settings.test_rows + settings.validation_rows
    run_eval(
        EvalSettings(
            task=settings.task,
            model=str(model),
            load=format,
            limit=rows,
            max_new_tokens=96,
            batch_size=EVALUATION_BATCH,
            engine="transformers",
            out=out,
        )
    )
    graded = [json.loads(line) for line in (out / "completions.jsonl").read_text(encoding="utf-8").splitlines()]
    graded.sort(key=lambda row: row["row"])
    bits = "".join(str(int(row["correct"])) for row in graded)
    return {
        "test": bits[: settings.test_rows],
        "validation": bits[settings.test_rows :],
        "tokens": round(sum(row["tokens"] for row in graded) / len(graded), 1),
        "truncated_share": round(sum(row["truncated"] for row in graded) / len(graded), 4),
    }


def main(spec: Path, out: Path) -> None:
    """Run the job in `spec` (JSON) and write its row to `out`, by a rename, so that the file is never incomplete."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = json.loads(spec.read_text(encoding="utf-8"))
    row = execute(Job(**given["job"]), JobSettings(**given["settings"]), Path(given["work"]))
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(row), encoding="utf-8")
    partial.rename(out)
