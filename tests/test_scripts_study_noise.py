"""scripts/study_noise.py: real runs of arms on the shipped model, and the order of the queue."""

import argparse
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qerl.recipe import load_recipe

REPOSITORY = Path(__file__).resolve().parents[1]
TINY = REPOSITORY / "qerl" / "tiny"
SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=2", "run.micro_batch_tokens=400", "rollout.max_new_tokens=8")


@pytest.fixture(scope="module")
def load():
    """Import a script by name; the scripts import one another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "scripts"))
        yield importlib.import_module


@pytest.fixture(scope="module")
def arms(load):
    return load("study_arms")


@pytest.fixture
def settings(arms):
    overrides = (*SMALL, "noise.num_stages=3")
    return arms.JobSettings(2, "transformers", overrides, test_rows=3, validation_rows=2)


def arguments(tmp_path, **given) -> argparse.Namespace:
    values = {
        "base": TINY, "out": tmp_path / "out.json", "work": tmp_path / "work", "merge": None, "arms": ["bf16", "nf4"],
        "rates": [1e-3, 2e-3], "seeds": [0, 1], "sweep_seed": 100, "every_rate": False,
        "steps": 2, "parallel": 2, "minutes": 5.0,
        "engine": "transformers", "task": "arith_chain", "memory_gib": 7, "test_rows": 3, "validation_rows": 2,
        "set": [*SMALL],
    }  # fmt: skip
    return argparse.Namespace(**values | given)


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "nvfp4_aqn", "nvfp4_aqn_both", "nf4"])
def test_every_arm_is_a_valid_recipe_that_differs_only_where_it_should(arms, settings, name) -> None:
    full = replace(settings, overrides=())
    config, bf16 = (
        load_recipe(arms.RECIPE, arms.overrides_of(arms.Job(arm, 2e-3, 1, "final"), full, Path("w")), steps=80)
        for arm in (name, "bf16")
    )
    assert config.optim.learning_rate == 2e-3
    assert (config.model.base, config.model.format) == (f"w/{arms.ARMS[name].base}", arms.ARMS[name].format)
    assert (config.noise.enabled, config.noise.where == "both") == ("aqn" in name, name.endswith("both"))
    for section in ("adapter", "data", "rewards", "rollout", "loss", "optim", "run"):
        assert getattr(config, section) == getattr(bf16, section)


def test_a_job_trains_evaluates_and_does_not_train_twice(arms, settings, tmp_path) -> None:
    (tmp_path / "bf16").symlink_to(TINY)
    job = arms.Job("bf16", 1e-3, 0, "final")
    row = json.loads(json.dumps(arms.execute(job, settings, tmp_path)))
    assert len(row["steps"]["reward"]) == len(row["steps"]["entropy"]) == 2
    assert (len(row["test"]), len(row["validation"]), set(row["test"] + row["validation"]) <= {"0", "1"}) == (
        3,
        2,
        True,
    )
    before = (tmp_path / "runs" / job.key / "metrics.jsonl").read_bytes()
    again = arms.execute(job, settings, tmp_path)
    assert (again["test"], again["steps"]) == (row["test"], row["steps"])
    assert (tmp_path / "runs" / job.key / "metrics.jsonl").read_bytes() == before


def row_of(arm: str, rate: float, seed: int, phase: str, validation: str) -> dict:
    row = {"arm": arm, "rate": rate, "seed": seed, "phase": phase, "validation": validation, "test": "010"}
    return row | {"seconds": {}, "steps": {"reward": [0.1, 0.2]}}


def test_the_sweep_comes_first_and_its_best_rate_is_trained_with_every_seed(load, tmp_path) -> None:
    queue = load("study_queue")
    study = queue.Study(arguments(tmp_path))
    assert [job.key for job in study.waiting()] == [
        "bf16-base", "nf4-base",
        "bf16-0.001-sweep-100", "nf4-0.001-sweep-100", "bf16-0.002-sweep-100", "nf4-0.002-sweep-100",
    ]  # fmt: skip
    for key, row in {
        "bf16-0.001-sweep-100": row_of("bf16", 1e-3, 100, "sweep", "01"),
        "bf16-0.002-sweep-100": row_of("bf16", 2e-3, 100, "sweep", "11"),
        "nf4-0.001-sweep-100": row_of("nf4", 1e-3, 100, "sweep", "01"),
    }.items():
        study.results["runs"][key] = row
    keys = [job.key for job in study.waiting() if job.rate is not None]
    assert keys == ["nf4-0.002-sweep-100", "bf16-0.002-final-0", "bf16-0.002-final-1"]
    study.results["failed"]["nf4-0.002-sweep-100"] = {"exit": 1, "log": ""}
    assert "nf4-0.001-final-1" in [job.key for job in study.waiting()]


def test_runs_of_an_earlier_call_are_taken_over_unless_they_were_of_other_steps(load, tmp_path) -> None:
    queue = load("study_queue")
    first = queue.Study(arguments(tmp_path))
    first.results["runs"]["bf16-0.001-sweep-100"] = row_of("bf16", 1e-3, 100, "sweep", "01")
    first.write()
    earlier = tmp_path / "earlier.json"
    first.args.out.rename(earlier)
    second = queue.Study(arguments(tmp_path, merge=earlier))
    assert "bf16-0.001-sweep-100" not in [job.key for job in second.waiting()]
    with pytest.raises(SystemExit, match="other steps"):
        queue.Study(arguments(tmp_path, merge=earlier, steps=3))


def test_one_run_of_a_format_goes_ahead_and_time_bounds_the_others(load, arms, tmp_path) -> None:
    queue = load("study_queue")
    study = queue.Study(arguments(tmp_path, engine="vllm"))
    first, second = arms.Job("bf16", 1e-3, 0, "sweep"), arms.Job("nf4", 1e-3, 0, "sweep")
    assert study.may_start(first)
    study.running[first.key] = (first, None, 0.0)
    assert not study.may_start(second)  # both open vllm on 16-bit weights
    assert study.may_start(arms.Job("nvfp4", 1e-3, 0, "sweep"))
    metrics = study.work / "runs" / first.key / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text("{}\n")
    study.note_warm()
    assert study.may_start(second)
    study.durations.append(301.0)
    assert not study.may_start(second)


def test_the_queue_runs_a_job_as_a_process_and_writes_what_it_gave(load, tmp_path) -> None:
    """Also a job that fails: an impossible setting, which stops before anything is loaded."""
    queue = load("study_queue")
    study = queue.Study(arguments(tmp_path, arms=["bf16"], rates=[1e-3], set=["rollout.group_size=1"]))
    assert study.run() == 1
    results = json.loads((tmp_path / "out.json").read_text())
    assert set(results["runs"]) == {"bf16-base"}
    assert len(results["runs"]["bf16-base"]["test"]) == 3
    assert "group_size" in results["failed"]["bf16-0.001-sweep-100"]["log"]


def test_nf4_rounding_keeps_the_largest_of_a_block_and_takes_the_nearest_value(load) -> None:
    nf4 = load("study_nf4")
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    rounded = nf4.round_to_nf4(weight)
    for block, own in zip(weight.reshape(-1, 64), rounded.reshape(-1, 64), strict=True):
        absmax = block.abs().max()
        assert own.abs().max() == absmax
        nearest = (block[:, None] - nf4.VALUES * absmax).abs().min(dim=1).values
        torch.testing.assert_close((block - own).abs(), nearest, rtol=1e-5, atol=1e-8)
    assert torch.equal(nf4.round_to_nf4(torch.zeros(1, 64)), torch.zeros(1, 64))


def test_the_nf4_twin_changes_the_linears_and_nothing_else(load, tmp_path) -> None:
    nf4 = load("study_nf4")
    assert nf4.write_nf4_twin(TINY, tmp_path / "twin") == 28
    before, after = (load_file(folder / "model.safetensors") for folder in (TINY, tmp_path / "twin"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]) != name.endswith("_proj.weight")


def final(arm: str, seed: int, test: str) -> dict:
    steps = {"reward": [0.1] * 10 + [0.8] * 10, "entropy": [1.0] * 20, "time/step_s": [2.0] * 20}
    row = {"arm": arm, "rate": 1e-3, "seed": seed, "phase": "final", "test": test, "validation": "", "seconds": {}}
    return row | {"steps": steps | {"memory/peak_gib": [0.5] * 20}}


def test_the_report_states_means_intervals_and_what_can_be_told(load, tmp_path) -> None:
    report = load("study_report")
    right = {"bf16": (50, 50, 50), "nvfp4": (52, 50, 48), "nvfp4_aqn": (95, 96, 97)}
    runs = {
        f"{arm}-{seed}": final(arm, seed, "1" * count + "0" * (100 - count))
        for arm, counts in right.items()
        for seed, count in enumerate(counts)
    }
    runs["bf16-base"] = final("bf16", 0, "1" * 40 + "0" * 60) | {"rate": None, "phase": "base", "steps": {}}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"runs": runs, "failed": {}}), encoding="utf-8")
    text = report.write_report(path, tmp_path)
    assert (
        "| BF16 LoRA | 40.0% | 50.0% ± 0.0 | 50.0% / 50.0% / 50.0% | 0.001 | 0.10 to 0.80 | 1.00 | 2.0 | 0.50 |" in text
    )
    assert "| NVFP4 LoRA |  | 50.0% ± 5.0 |" in text  # 4.303 * 0.02 / sqrt(3)
    assert "| NVFP4 LoRA against BF16 LoRA | +0.0 (" in text
    assert "AQN in the rollout against BF16 LoRA | +46.0 (" in text
    assert text.count("| better |") == 2
    assert text.count("| cannot tell |") == 1
    assert (tmp_path / "study-noise.png").stat().st_size > 10_000


def test_with_every_rate_seeds_come_in_turn_and_the_best_rate_on_validation_is_reported(load, tmp_path) -> None:
    queue, report = load("study_queue"), load("study_report")
    keys = [job.key for job in queue.Study(arguments(tmp_path, every_rate=True)).waiting() if job.rate is not None]
    assert keys[:4] == ["bf16-0.001-final-0", "nf4-0.001-final-0", "bf16-0.002-final-0", "nf4-0.002-final-0"]
    assert len(keys) == 8
    runs = {}
    for rate, validation, test in ((1e-3, "110", "000"), (2e-3, "100", "111"), (3e-3, "111", "011")):
        for seed in (0, 1) if rate < 3e-3 else (0,):  # the last rate has not been run with every seed
            row = final("bf16", seed, test) | {"rate": rate, "validation": validation}
            runs[f"{rate}-{seed}"] = row
    chosen = report.finals({"runs": runs}, "bf16")
    assert [(row["rate"], row["seed"]) for row in chosen] == [(1e-3, 0), (1e-3, 1)]
