"""The arms of scripts/study/study_real.py, the bases that they start from, and one run of an arm. Imports no torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPE, TASK = Path(__file__).with_name("study_real.yaml"), Path(__file__).with_name("real_task.py")
RANK = 32
ROWS_PER_STEP = 20  # that a run reads for its 16 prompts per step: reading all rows would take as long as ten steps
BASES = {  # folder -> the options of `qerl quantize` that make it
    "rtn": ("--method", "rtn", "--start-rank", "64"),
    "gptq": ("--method", "gptq", "--start-rank", "0"),
    "new": (),
    "long": ("--calibration-size", "128", "--sequence-length", "1024"),  # the default of the first runs
}
SPARSE = ("rollout.dynamic_sampling.enabled=true", "rollout.max_new_tokens=128")  # at 80 tokens, 83% are truncated
BF16, INPUTS = "bf16", "bf16_inputs"  # the 16-bit model, and an adapter for it that a run begins with
DISTILLED = "distilled"  # the run directory of a distillation from the 16-bit model, whose adapter a run begins with
DISTILL = (
    "--set",
    "rollout.group_size=4",
    "--steps",
    "240",
)  # 240 x 16 of the 4096 training rows, each once


@dataclass(frozen=True)
class Arm:
    """What is compared: a base, as a folder of the study's work directory, and how its runs begin and train."""

    title: str
    base: str
    overrides: tuple[str, ...] = ()
    packs: bool = False  # the base is the 16-bit model, and the run itself packs weights

    @property
    def format(self) -> str:
        return "bf16" if self.base in (BF16, INPUTS) and not self.packs else "nvfp4"

    @property
    def needs(self) -> str:
        """The folder that has to be quantized first; "" if none."""
        return "new" if self.base in (INPUTS, DISTILLED) else "" if self.base == BF16 else self.base

    @property
    def caches(self) -> str:
        """The arms of one name here run the same compiled graphs, which the first of them makes."""
        start = next((text for text in self.overrides if text.startswith("adapter.start=")), "")
        frozen = "-frozen" if start == FROZEN else ""
        return "trl" if self.base == "trl" else f"{self.format}{'-packed' if self.packs else ''}{frozen}"


NONE, FROZEN, TRAINED = (f"adapter.start={kind}" for kind in ("none", "frozen", "trained"))
NOISE = ("noise.enabled=true",)
ARMS = {
    "bf16": Arm("BF16", BF16),
    "bf16_inputs": Arm("BF16, A at the inputs' directions", INPUTS),
    "rtn": Arm("NVFP4 by rounding, from zero", "rtn", (NONE,)),
    "gptq": Arm("NVFP4 by GPTQ, from zero", "gptq", (NONE,)),
    "new": Arm("NVFP4 by default, from zero", "new", (NONE,)),
    "new_F": Arm("NVFP4 by default, frozen start", "new", (FROZEN,)),
    "new_S": Arm("NVFP4 by default, trained start", "new", (TRAINED,)),
    "new_D": Arm("NVFP4 by default, frozen start, distilled first", DISTILLED, (FROZEN,)),
    "rtn_F": Arm("NVFP4 by rounding, frozen start", "rtn", (FROZEN,)),
    "rtn_S": Arm("NVFP4 by rounding, trained start", "rtn", (TRAINED,)),
    "qat": Arm("whole weights through the quantizer", BF16, ("qat.mode=weights",), packs=True),
    "qat_adapter": Arm("adapter through the quantizer", BF16, ("qat.mode=adapter",), packs=True),
    "rtn_noise": Arm("NVFP4 by rounding, from zero, noise", "rtn", (NONE, *NOISE)),
    "new_noise": Arm("NVFP4 by default, from zero, noise", "new", (NONE, *NOISE)),
    "F_noise": Arm("NVFP4 by default, frozen start, noise", "new", (FROZEN, *NOISE)),
    "S_noise": Arm("NVFP4 by default, trained start, noise", "new", (TRAINED, *NOISE)),
    "trl": Arm("TRL, BF16", BF16),
}
LONG = "long_"  # arms over the base of the first runs, which was calibrated on rows of 1024 tokens
ARMS |= {
    LONG + name: replace(arm, title=f"{arm.title} (1024)", base="long" if arm.base == "new" else arm.base)
    for name, arm in ARMS.items()
    if arm.needs == "new" and arm.base != INPUTS
}


@dataclass(frozen=True)
class Job:
    """One run of an arm."""

    arm: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.arm}-{self.rate:g}-{self.seed}"


@dataclass(frozen=True)
class Settings:
    """What all runs of a study share."""

    variant: str
    steps: int
    engine: str
    overrides: list[str]
    test_rows: int
    sample_rows: int  # of the test rows, that are also sampled `samples` times
    samples: int


def jobs_of(texts: Iterable[str]) -> list[Job]:
    """The jobs of `arm:rate,...:seed,...` texts, `bf16:2e-4,1e-3:0-4`; the first seed of all comes first.

    Raises ValueError for a text of another form.
    """
    found: dict[Job, int] = {}
    for text in texts:
        arm, rates, seeds = text.split(":")
        if arm not in ARMS:
            raise ValueError(f"there is no arm {arm!r}: write one of {', '.join(ARMS)}")
        for rate in map(float, rates.split(",")):
            for place, seed in enumerate(_seeds(seeds)):
                found.setdefault(Job(arm, rate, seed), place)
    return sorted(found, key=lambda job: found[job])


def _seeds(text: str) -> list[int]:
    """`0-4` or `0,2` or both as numbers."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def overrides_of(job: Job, settings: Settings, work: Path) -> list[str]:
    """The values of --set with which `qerl train --recipe scripts/study/study_real.yaml` runs this job."""
    arm, rows = ARMS[job.arm], work / f"rows-{settings.variant}"
    sparse = settings.variant == "sparse"
    return [
        f"model.base={work / arm.base}",
        f"model.format={arm.format}",
        f"optim.learning_rate={job.rate:g}",
        f"data.source={rows / 'train.jsonl'}",
        f"data.grader={TASK}",
        f"validation.source={rows / 'test.jsonl'}",
        f"validation.limit={settings.test_rows}",
        f"rollout.engine={settings.engine}",
        *(SPARSE if sparse else (f"data.limit={ROWS_PER_STEP * settings.steps}",)),
        *arm.overrides,
        *settings.overrides,
    ]


def prepare(
    model: Path, work: Path, variant: str, arms: Iterable[str], run: Callable[..., Any] = subprocess.run
) -> None:
    """Make what these arms need in the work directory: rows, bases, and the adapter of the control."""
    import real_task

    work.mkdir(parents=True, exist_ok=True)
    if not (work / f"rows-{variant}").is_dir():
        real_task.write(work / f"rows-{variant}", variant)
    if not (work / BF16).exists():
        (work / BF16).symlink_to(model.resolve(), target_is_directory=True)
    needed = {ARMS[arm].needs for arm in arms} - {""}
    for name in [name for name in BASES if name in needed and not (work / name).exists()]:
        command = ["quantize", "--model", str(work / BF16), "--out", str(work / name), *BASES[name]]
        run([sys.executable, "-m", "qerl.cli.main", *command], cwd=ROOT, check=True)
    if INPUTS in {ARMS[arm].base for arm in arms} and not (work / INPUTS).exists():
        write_control(work / "new", work / BF16, work / INPUTS)
    if DISTILLED in {ARMS[arm].base for arm in arms} and not (work / DISTILLED).exists():
        distill(work, variant, run)


def distill(work: Path, variant: str, run: Callable[..., Any]) -> None:
    """Let an adapter over the base `new` follow the 16-bit model, in a run directory under `work`."""
    job, out = Job("new_F", 2e-4, 0), work / f".{DISTILLED}.partial"
    settings = Settings(variant, 1, "vllm", [], 512, 0, 0)
    values = [text for text in overrides_of(job, settings, work) if not text.startswith("data.limit=")]
    given = [part for text in values for part in ("--set", text)]
    command = ["distill", "--recipe", str(RECIPE), "--teacher", str(work / BF16), *given, *DISTILL, "--out", str(out)]
    shutil.rmtree(out, ignore_errors=True)
    run([sys.executable, "-m", "qerl.cli.main", *command], cwd=ROOT, check=True)
    out.rename(work / DISTILLED)


def write_control(base: Path, model: Path, out: Path, rank: int = RANK) -> None:
    """Write an adapter for the 16-bit model whose A has the directions of the start of `base`, and whose B is zero.

    Each row of A gets the length that it would have in a fresh A, whose elements are uniform within 1 / sqrt(in).
    """
    import torch

    from qerl.checkpoint.base_start import ABOUT, LORA_A, START, BaseStart, read_start, write_start
    from qerl.checkpoint.peft_folder import TrainedOn, name_bases_

    factors = {}
    for name, tensor in read_start(BaseStart(base / START, rank)).items():
        if name.endswith(LORA_A):
            rows = tensor.float()
            fresh = 1 / (3 * rows.shape[1]) ** 0.5  # root mean square of an element
            factors[name] = rows * (fresh / rows.pow(2).mean(1, keepdim=True).sqrt().clamp_min(1e-30))
        else:
            factors[name] = torch.zeros_like(tensor)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    write_start(partial, factors, {})
    (partial / ABOUT).unlink()  # this is an adapter and not a start
    name_bases_(partial, TrainedOn(str(model), "bf16"), str(model))
    partial.rename(out)


def read_results(out: Path) -> dict[str, Any]:
    """The results in a file; empty ones if it is not there."""
    if out.exists():
        return json.loads(out.read_text(encoding="utf-8"))
    return {"settings": {}, "machine": {}, "runs": {}, "failed": {}}
