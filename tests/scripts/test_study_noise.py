"""scripts/study/study_noise.py: real runs of the arms on the embedded model, and the order of the queue."""

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qerl.base.errors import DataError
from qerl.config.recipe import load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "qerl" / "tiny"
SHIPPED = REPOSITORY / "benchmarks" / "study-noise-tiny.json"
SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=2", "run.micro_batch_tokens=400", "rollout.max_new_tokens=8")


@pytest.fixture(scope="module")
def arms(load):
    return load("study_arms")


@pytest.fixture
def settings(arms):
    return arms.JobSettings("tiny", "arith", 2, "transformers", [*SMALL, "noise.num_stages=3"], 3, 2)


def arguments(tmp_path, **given) -> argparse.Namespace:
    values = {
        "base": TINY, "out": tmp_path / "out.json", "work": tmp_path / "work", "arms": ["bf16", "nf4"],
        "rates": [1e-3, 2e-3], "weights_rates": [1e-4], "seeds": [0, 1], "steps": 2, "parallel": 2, "minutes": 5.0,
        "engine": "transformers", "task": "arith", "memory_gib": 7, "test_rows": 3, "validation_rows": 2,
        "set": [*SMALL],
    }  # fmt: skip
    return argparse.Namespace(**values | given)


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "nvfp4_aqn", "nvfp4_aqn_both", "nvfp4_aqn_x10", "nf4"])
def test_every_arm_is_a_valid_recipe_that_differs_only_where_it_should(arms, settings, name) -> None:
    full = replace(settings, overrides=[])
    config, bf16 = (
        load_recipe(arms.RECIPE, arms.overrides_of(arms.Job(arm, 2e-3, 1), full, Path("w")), steps=80)
        for arm in (name, "bf16")
    )
    assert config.optim.learning_rate == 2e-3
    assert (config.model.base, config.model.format) == (f"w/{arms.ARMS[name].base}", arms.ARMS[name].format)
    assert (config.noise.enabled, config.noise.where == "both") == ("aqn" in name, name.endswith("both"))
    assert (config.noise.sigma_start, config.noise.sigma_end) == ((0.1, 5e-3) if "x10" in name else (1e-2, 5e-4))
    for section in ("adapter", "data", "rewards", "rollout", "loss", "optim", "run"):
        assert getattr(config, section) == getattr(bf16, section)


def test_a_job_trains_evaluates_and_does_not_train_twice(arms, settings, tmp_path) -> None:
    (tmp_path / "bf16").symlink_to(TINY)
    job = arms.Job("bf16", 1e-3, 0)
    row = json.loads(json.dumps(arms.execute(job, settings, tmp_path)))
    assert len(row["steps"]["reward"]) == len(row["steps"]["entropy"]) == 2
    assert (len(row["test"]), len(row["validation"])) == (3, 2)
    assert set(row["test"] + row["validation"]) <= {"0", "1"}
    before = (tmp_path / "runs" / job.key / "metrics.jsonl").read_bytes()
    again = arms.execute(job, settings, tmp_path)
    assert (again["test"], again["steps"]) == (row["test"], row["steps"])
    assert (tmp_path / "runs" / job.key / "metrics.jsonl").read_bytes() == before


def test_a_study_that_asks_for_more_rows_than_the_task_has_is_refused_before_it_trains(load, tmp_path) -> None:
    study = load("study_queue").Study(arguments(tmp_path, task="arith", test_rows=1024, validation_rows=1))
    with pytest.raises(DataError, match=r"1024 test rows.*--validation-rows"):
        study.run()


def test_the_queue_goes_by_seed_with_every_rate_and_arm_for_each(load, tmp_path) -> None:
    study = load("study_queue").Study(arguments(tmp_path))
    assert [job.key for job in study.waiting()] == [
        "bf16-base", "nf4-base",
        "bf16-0.001-0", "nf4-0.001-0", "bf16-0.002-0", "nf4-0.002-0",
        "bf16-0.001-1", "nf4-0.001-1", "bf16-0.002-1", "nf4-0.002-1",
    ]  # fmt: skip
    study.results["failed"]["nf4-0.002-0"] = {"exit": 1, "log": ""}
    assert "nf4-0.002-0" not in [job.key for job in study.waiting()]


def test_runs_of_an_earlier_call_are_reused_unless_their_settings_differ(load, tmp_path) -> None:
    queue = load("study_queue")
    first = queue.Study(arguments(tmp_path))
    first.results["runs"] = {"bf16-base": run_of("bf16", None, 0), "bf16-0.001-0": run_of("bf16", 1e-3, 0)}
    first.write()
    second = queue.Study(arguments(tmp_path, arms=["bf16"], rates=[1e-3], seeds=[0, 1]))
    assert [job.key for job in second.waiting()] == ["bf16-0.001-1"]
    with pytest.raises(SystemExit, match="other steps"):
        queue.Study(arguments(tmp_path, steps=3))


def test_one_run_of_each_format_goes_first_and_the_others_keep_to_the_time_limit(load, arms, tmp_path) -> None:
    queue = load("study_queue")
    study = queue.Study(arguments(tmp_path, engine="vllm"))
    first, second = arms.Job("bf16", 1e-3, 0), arms.Job("nf4", 1e-3, 0)
    assert study.may_start(first)
    study.running[first.key] = (first, None, 0.0)
    assert not study.may_start(second)  # both would open vllm on 16-bit weights
    assert study.may_start(arms.Job("nvfp4", 1e-3, 0))
    metrics = study.work / "runs" / first.key / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text("{}\n")
    study.note_warm()
    assert study.may_start(second)
    study.durations.append(301.0)
    assert not study.may_start(second)


NO_MODEL = """
import sys
from types import ModuleType, SimpleNamespace

def run_eval(settings):
    settings.out.mkdir(parents=True)
    rows = ['{"row": %d, "correct": true, "tokens": 1, "truncated": false}' % row for row in range(settings.limit)]
    (settings.out / "completions.jsonl").write_text("\\n".join(rows))

for name, members in {"run": {"run_eval": run_eval}, "settings": {"EvalSettings": SimpleNamespace}}.items():
    module = sys.modules[f"eval.{name}"] = ModuleType(f"eval.{name}")
    vars(module).update(members)
"""


def test_the_queue_runs_a_job_as_a_process_and_writes_its_result(load, tmp_path, monkeypatch) -> None:
    """That includes a job that fails: an impossible setting, which is refused before anything is loaded.

    The processes evaluate no model; the test of a job does.
    """
    (tmp_path / "sitecustomize.py").write_text(NO_MODEL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    queue = load("study_queue")
    given = {"arms": ["bf16"], "rates": [1e-3], "seeds": [0], "set": ["rollout.group_size=1"]}
    study = queue.Study(arguments(tmp_path, **given))
    assert study.run() == 1
    results = json.loads((tmp_path / "out.json").read_text())
    assert set(results["runs"]) == {"bf16-base"}
    assert results["runs"]["bf16-base"]["test"] == "111"
    assert "group_size" in results["failed"]["bf16-0.001-0"]["log"]


def test_nf4_rounding_keeps_the_largest_value_of_a_block_and_takes_the_nearest_for_others(load) -> None:
    nf4 = load("study_nf4")
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    rounded = nf4.round_to_nf4(weight)
    for block, own in zip(weight.reshape(-1, 64), rounded.reshape(-1, 64), strict=True):
        absmax = block.abs().max()
        assert own.abs().max() == absmax
        nearest = (block[:, None] - nf4.VALUES * absmax).abs().min(dim=1).values
        torch.testing.assert_close((block - own).abs(), nearest, rtol=1e-5, atol=1e-8)
    assert torch.equal(nf4.round_to_nf4(torch.zeros(1, 64)), torch.zeros(1, 64))


def test_nf4_rounding_equals_that_of_bitsandbytes_to_the_bit(load) -> None:
    """A digest of `dequantize_4bit(*quantize_4bit(weight, blocksize=64, quant_type="nf4"))`, bitsandbytes 0.50.2."""
    tensors = load_file(TINY / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(name for name in tensors if name.endswith("_proj.weight")):
        digest.update(load("study_nf4").round_to_nf4(tensors[name]).contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "e3292b4dfa089eab7a16619112ab6c57ff67e4e25f6272b12ffb343dda7a40c5"


def test_the_nf4_twin_changes_the_linears_and_nothing_else(load, tmp_path) -> None:
    nf4 = load("study_nf4")
    assert nf4.write_nf4_twin(TINY, tmp_path / "twin") == 28
    before, after = (load_file(folder / "model.safetensors") for folder in (TINY, tmp_path / "twin"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]) != name.endswith("_proj.weight")


def run_of(arm: str, rate: float | None, seed: int, test: str = "01", validation: str = "01", **steps) -> dict:
    """A row of the results, in which the reward rises by 0.01 per step."""
    usual = {"reward": [0.1 + 0.01 * step for step in range(20)], "sampling/entropy": [1.0] * 10 + [0.5] * 10}
    usual |= {"noise/sigma": [0.0] * 20, "mismatch_kl": [0.0] * 20}
    row = {"arm": arm, "rate": rate, "seed": seed, "test": test, "validation": validation}
    return row | ({} if rate is None else {"steps": usual | steps})


def results_of(*runs: dict) -> dict:
    return {"runs": {f"{r['arm']}-{r['rate']}-{r['seed']}": r for r in runs}, "machine": {"device": "CPU"}}


def right(count: int, of: int = 100) -> str:
    return "1" * count + "0" * (of - count)


def test_an_interval_covers_the_variance_of_seeds_and_of_questions(load) -> None:
    report = load("study_report")
    same = report.answers([run_of("bf16", 1e-3, seed, right(50)) for seed in range(3)])
    # The seeds agree, and half of 100 questions are right: 1.96 * sqrt(0.25 * 100/99 / 100)
    assert report.estimate(same) == pytest.approx((0.5, 0.09849), abs=1e-5)
    apart = report.answers([run_of("bf16", 1e-3, seed, right(100 * seed)) for seed in range(2)])
    # The questions agree, and the seeds give 0 and 1: 12.706 * sqrt(0.5) / sqrt(2)
    assert report.estimate(apart) == pytest.approx((0.5, 6.353), abs=1e-3)


def test_arms_are_compared_by_question_and_seed(load) -> None:
    report = load("study_report")
    runs = [run_of("bf16", 1e-3, seed, right(50)) for seed in (0, 1, 2)]
    runs += [run_of("nvfp4_aqn", 1e-3, seed, right(95), reward=[0.5] * 20) for seed in (0, 1)]
    runs += [run_of("nvfp4", 1e-3, seed, right(50 + (seed == 0))) for seed in (0, 1, 2)]
    rows = report.pairs_table(results_of(*runs))
    assert rows[1:] == [
        "| NVFP4 LoRA against BF16 LoRA | +0.3 ± 1.6 | +0.000 ± 0.000 | not told apart |",
        # 45 of 100 questions with the same two seeds: 1.96 * sqrt(0.45 * 0.55 * 100/99 / 100)
        "| NVFP4 LoRA + AQN in the rollout against BF16 LoRA | +45.0 ± 9.8 | +0.305 ± 0.000 | better |",
        "| NVFP4 LoRA + AQN in the rollout against NVFP4 LoRA | +44.5 ± 11.6 | +0.305 ± 0.000 | better |",
    ]


def test_a_single_seed_gives_no_interval_and_no_verdict(load) -> None:
    report = load("study_report")
    results = results_of(run_of("bf16", 1e-3, 0, right(50)), run_of("nvfp4", 1e-3, 0, right(95)))
    assert report.pairs_table(results)[1] == "| NVFP4 LoRA against BF16 LoRA | +45.0 | +0.000 | not told apart |"
    row = "| BF16 LoRA | 0.001 |  | 50.0 | 50.0 | 0.12 to 0.28 | 0.0100, cannot tell | 1.00 to 0.50 |"
    assert report.arms_table(results)[1] == row


def test_a_reward_rises_if_the_slopes_of_all_seeds_say_so(load) -> None:
    report = load("study_report")
    rising = [run_of("bf16", 1e-3, seed) for seed in range(3)]
    assert report.slope(rising[0]) == pytest.approx(0.01)
    assert report.rises(rising)
    # The slopes 0.01, 0.01 and 0 have the mean 0.0067, which is less than 4.303 * 0.00577 / sqrt(3) = 0.0143.
    assert not report.rises([*rising[:2], run_of("bf16", 1e-3, 2, reward=[0.5] * 20)])
    assert not report.rises(rising[:1])


def test_the_chosen_rate_is_the_best_on_validation_among_those_with_all_seeds(load) -> None:
    report = load("study_report")
    runs = [
        run_of("bf16", rate, seed, "01", validation)
        for rate, validation in ((1e-3, "110"), (2e-3, "100"), (3e-3, "111"))
        for seed in ((0,) if rate == 3e-3 else (0, 1))
    ]
    chosen = report.finals(results_of(*runs), "bf16")
    assert [(row["rate"], row["seed"]) for row in chosen] == [(1e-3, 0), (1e-3, 1)]
    assert report.sweep_table(results_of(*runs))[1] == "| BF16 LoRA | **66.7 (2)** | 33.3 (2) | 100.0 (1) |"


def test_noise_is_compared_at_the_first_step_that_has_some(load) -> None:
    report = load("study_report")
    noisy = {"noise/sigma": [0.0, 0.1], "mismatch_kl": [0.0, 2e-3], "sampling/entropy": [0.3, 0.4]}
    runs = [run_of("nvfp4", 1e-3, 0, "01", **{"sampling/entropy": [0.3, 0.35]})]
    runs.append(run_of("nvfp4_aqn", 1e-3, 0, "11", **noisy))
    rows = report.noise_table(results_of(*runs))
    assert rows[1:] == [
        "| NVFP4 LoRA + AQN in the rollout | 1 | 0.1 | 0.4000 | 0.3500 | 2.0e-03 | +50.0 (+50.0 to +50.0) |"
    ]


@pytest.fixture(scope="module")
def shipped() -> dict:
    return json.loads(SHIPPED.read_text(encoding="utf-8"))


def test_the_page_of_the_shipped_results_is_drawn_from_them(load, shipped) -> None:
    page = load("study_report").page(shipped, SHIPPED.name)
    assert SHIPPED.with_suffix(".md").read_text(encoding="utf-8") == page, (
        "run python scripts/study/study_noise.py report"
    )


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "nvfp4_aqn", "nvfp4_aqn_both", "nf4"])
def test_in_the_shipped_results_the_reward_of_every_seed_and_rate_rose(load, shipped, name) -> None:
    report = load("study_report")
    runs = report.trained(shipped, name)
    assert len(report.candidates(shipped, name)) >= 3
    finals = report.finals(shipped, name)
    assert {0, 1, 2} <= {run["seed"] for run in finals}
    assert all(report.slope(run) > 0 for rows in runs.values() for run in rows)
    assert report.rises(finals)


def test_in_the_shipped_results_runs_that_differ_only_in_noise_are_equal_until_it_begins(load, shipped) -> None:
    runs = shipped["runs"]
    for key, run in runs.items():
        if "aqn" in run["arm"] and run["rate"]:
            clean = runs[key.replace(run["arm"], "nvfp4")]["steps"]
            before = run["steps"]["noise/sigma"].index(1e-1 if run["arm"].endswith("x10") else 1e-2)
            assert before == 5
            for metric in ("reward", "sampling/entropy", "grad_norm"):
                assert run["steps"][metric][:before] == clean[metric][:before]
            assert run["steps"]["sampling/entropy"] != clean["sampling/entropy"]


def test_the_picture_is_drawn_from_the_results(load, tmp_path) -> None:
    runs = [run_of(arm, 1e-3, seed, right(50)) for arm in ("bf16", "nvfp4") for seed in (0, 1)]
    load("study_figure").draw(results_of(*runs), tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 10_000
