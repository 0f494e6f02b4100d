"""scripts/study/study_real.py: its jobs and recipes, a run by qerl and one by TRL, the queue, and the report."""

import argparse
import itertools
import json
from dataclasses import asdict, replace
from math import comb

import pytest
import study_real_arms as arms
import study_real_job as one
import study_real_queue as queue
import study_real_report as report
import torch
from study_real_arms import ARMS, Job, Settings

from qerl.config.recipe import load_recipe

SETTINGS = Settings("plain", 80, "vllm", [], 512, 0, 0)
SMALL = [
    *("data.max_prompt_tokens=448", "rollout.max_new_tokens=12", "rollout.prompts_per_step=2", "rollout.group_size=4"),
    *("rollout.memory=null", "run.micro_batch_tokens=2048"),
]


class TestJobs:
    def test_the_first_seed_of_all_comes_first(self):
        jobs = arms.jobs_of(["bf16:2e-4,1e-3:0-2", "rtn:2e-4:1"])
        assert [job.key for job in jobs] == [
            *("bf16-0.0002-0", "bf16-0.001-0", "rtn-0.0002-1"),
            *("bf16-0.0002-1", "bf16-0.001-1", "bf16-0.0002-2", "bf16-0.001-2"),
        ]

    def test_a_job_that_is_named_twice_is_done_once(self):
        assert len(arms.jobs_of(["rtn:2e-4:0-1", "rtn:2e-4,1e-3:0"])) == 3

    @pytest.mark.parametrize("text", ["bf61:2e-4:0", "bf16:2e-4", "bf16:fast:0", "bf16:2e-4:x"])
    def test_what_is_no_job_is_refused(self, text):
        with pytest.raises(ValueError, match=r"bf61|unpack|fast|x"):
            arms.jobs_of([text])

    @pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "trl"])
    def test_the_recipe_takes_every_arm(self, arm, tmp_path):
        config = load_recipe(arms.RECIPE, arms.overrides_of(Job(arm, 2e-4, 0), SETTINGS, tmp_path), seed=3, steps=80)
        assert (config.adapter.rank, config.adapter.alpha, config.rollout.prompts_per_step) == (32, 32, 16)
        assert config.noise.enabled is arm.endswith("noise")
        assert (config.qat is not None) == arm.startswith("qat")
        assert config.model.format == ("bf16" if arm.startswith("bf16") else "nvfp4")
        expected = {"_D": "frozen", "_F": "frozen", "F_": "frozen", "_S": "trained", "S_": "trained"}
        start = next((kind for part, kind in expected.items() if part in arm), None)
        if config.model.format == "nvfp4" and config.qat is None:
            assert config.adapter.start == (start or "none")

    def test_the_sparse_variant_replaces_groups_without_a_signal(self, tmp_path):
        job = Job("bf16", 2e-4, 0)
        plain, sparse = (
            load_recipe(arms.RECIPE, arms.overrides_of(job, replace(SETTINGS, variant=variant), tmp_path), steps=80)
            for variant in ("plain", "sparse")
        )
        assert (plain.rollout.dynamic_sampling.enabled, plain.data.limit) == (False, 1600)
        assert (sparse.rollout.dynamic_sampling.enabled, sparse.data.limit) == (True, None)


class TestBases:
    def test_each_base_is_quantized_once_and_only_if_an_arm_needs_it(self, tmp_path, base):
        calls = []

        def run(command, **_):
            calls.append(command[2:])
            (tmp_path / command[command.index("--out") + 1].rpartition("/")[2]).mkdir()

        for _ in range(2):
            arms.prepare(base, tmp_path, "plain", ["bf16", "rtn", "rtn_F", "new_S", "qat"], run)
        made = [" ".join(call).replace(str(tmp_path), "W") for call in calls]
        assert made == [
            "qerl.cli.main quantize --model W/bf16 --out W/rtn --method rtn --start-rank 64",
            "qerl.cli.main quantize --model W/bf16 --out W/new",
        ]
        assert (tmp_path / "rows-plain" / "test.jsonl").is_file()

    def test_the_control_has_the_directions_of_the_start_and_the_size_of_a_fresh_adapter(self, tmp_path):
        from qerl.checkpoint.adapter_file import read_adapter
        from qerl.checkpoint.base_start import start_of_adapter, write_start

        torch.manual_seed(0)
        name = "model.layers.0.self_attn.q_proj"
        factors = {f"{name}.lora_A.weight": torch.randn(8, 48) * 0.01, f"{name}.lora_B.weight": torch.randn(32, 8)}
        (tmp_path / "new" / "start").mkdir(parents=True)
        write_start(tmp_path / "new" / "start", factors, {})
        arms.write_control(tmp_path / "new", tmp_path / "bf16", tmp_path / "control", rank=4)
        tensors, scaling = read_adapter(tmp_path / "control")
        a, b = tensors[f"{name}.lora_A.weight"].float(), tensors[f"{name}.lora_B.weight"]
        assert scaling == 1
        assert (a.shape, b.shape, b.abs().max()) == ((4, 48), (32, 4), 0)
        same = torch.nn.functional.cosine_similarity(a, factors[f"{name}.lora_A.weight"][:4])
        torch.testing.assert_close(same, torch.ones(4), atol=1e-4, rtol=0)
        fresh = torch.empty(4000, 48)
        torch.nn.init.kaiming_uniform_(fresh, a=5**0.5)
        torch.testing.assert_close(a.pow(2).mean(1).sqrt(), fresh.pow(2).mean().sqrt().expand(4), rtol=0.02, atol=0)
        assert start_of_adapter(tmp_path / "control") is None
        named = json.loads((tmp_path / "control" / "adapter_config.json").read_text())
        assert named["base_model_name_or_path"] == str(tmp_path / "bf16")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A work directory with the embedded model as the 16-bit base, and rows that are few."""
    import real_task

    from qerl.checkpoint.folder import EMBEDDED, embedded_folder

    folder = tmp_path_factory.mktemp("study")
    assert "tiny" in EMBEDDED
    (folder / "bf16").symlink_to(embedded_folder("tiny"), target_is_directory=True)
    real_task.write(folder / "rows-plain", "plain", {"train": 40, "validation": 5, "test": 12})
    return folder


@pytest.fixture(scope="module")
def done(work):
    """The row of a run of two steps, which answers before and after."""
    settings = Settings("plain", 2, "transformers", SMALL, 12, 3, 4)
    return one.do(Job("bf16", 1e-2, 0), settings, work, measure_before=True)


class TestRun:
    def test_the_row_holds_curves_and_answers_before_and_after(self, done, work):
        assert (done["arm"], done["rate"], done["seed"]) == ("bf16", 1e-2, 0)
        assert len(done["steps"]["reward"]) == len(done["steps"]["mismatch_kl"]) == 2
        for when in ("before", "after"):
            assert len(done[when]["test"]) == 12
            assert set(done[when]["test"]) <= {"0", "1"}
            assert (len(done[when]["right"]), done[when]["samples"]) == (3, 4)
        json.dumps(done, allow_nan=False)
        kept = {path.name for path in (work / "runs" / "bf16-0.01-0").iterdir()}
        assert {"adapter", "metrics.jsonl"} <= kept
        assert "checkpoints" not in kept

    def test_the_answers_are_those_of_an_evaluation(self, done, work, tmp_path):
        from eval.run import run_eval
        from eval.settings import EvalSettings

        run_eval(
            EvalSettings(
                task="own",
                model=str(work / "runs" / "bf16-0.01-0"),
                data=str(work / "rows-plain" / "test.jsonl"),
                grader=str(arms.TASK),
                max_new_tokens=12,
                engine="transformers",
                out=tmp_path,
            )
        )
        graded = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
        assert sum(row["correct"] for row in graded) == done["after"]["test"].count("1")
        assert round(sum(row["tokens"] for row in graded) / 12, 1) == done["after"]["tokens"]

    def test_trl_trains_on_the_same_rows(self, work, tmp_path):
        import study_real_trl

        args = argparse.Namespace(
            **{"model": work / "bf16", "rows": work / "rows-plain", "out": tmp_path, "rate": 1e-3, "seed": 0},
            **{"steps": 1, "test_rows": 5, "limit": 20, "memory_share": 0.1, "vllm": False},
        )
        row = study_real_trl.train(args)
        assert len(row["after"]["test"]) == 5
        assert len(row["steps"]["reward"]) == 1

    def test_trl_has_our_recipe(self, tmp_path):
        import study_real_trl

        config = load_recipe(arms.RECIPE, arms.overrides_of(Job("bf16", 2e-4, 0), SETTINGS, tmp_path), steps=80)
        args = argparse.Namespace(out=tmp_path, rate=2e-4, seed=0, steps=80, memory_share=0.1, vllm=False)
        theirs = study_real_trl.config_of(args)
        per_step = config.rollout.prompts_per_step * config.rollout.group_size
        assert theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps == per_step
        assert theirs.num_generations == config.rollout.group_size
        assert theirs.max_completion_length == config.rollout.max_new_tokens
        assert (theirs.epsilon, theirs.epsilon_high) == (config.loss.clip_low, config.loss.clip_high)
        assert theirs.loss_type == config.loss.type
        assert theirs.mask_truncated_completions == config.loss.mask_truncated
        assert (theirs.adam_beta2, theirs.weight_decay) == (config.optim.beta2, config.optim.weight_decay)
        assert theirs.max_grad_norm == config.optim.max_grad_norm
        assert theirs.warmup_steps == config.optim.warmup_ratio * 80
        assert theirs.lr_scheduler_type == config.optim.schedule
        assert config.adapter.rank == config.adapter.alpha == study_real_trl.RANK


WORKER = """
import json, pathlib, sys
def write(out, value):
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(value))
    partial.rename(out)


for line in sys.stdin:
    given = json.loads(line)
    out, job = pathlib.Path(given["out"]), given["job"]
    (out.parent / "order").open("a").write(f"{job['arm']}-{job['seed']}-{given['measure_before']} ")
    if job["arm"] == "rtn":
        write(out, {"error": "Boom: no memory"})
        sys.exit(1)
    if job["arm"] == "qat":
        sys.exit(3)
    row = {**job, "before": {"test": "00"} if given["measure_before"] else None, "after": {"test": "01"},
           "steps": {"reward": [0.0, 0.5]}, "seconds": 1.0}
    write(out, {"row": row})
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run jobs through the queue with a worker that trains nothing; returns (failures, results, order)."""
    (tmp_path / "study_real_job.py").write_text(WORKER)
    monkeypatch.setattr(queue, "__file__", str(tmp_path / "study_real_queue.py"))
    monkeypatch.setattr(queue, "POLL_S", 0.01)

    def do(*jobs, **changes):
        settings = {"minutes": 1.0, "parallel": 2, "engine": "transformers", **changes}
        args = argparse.Namespace(
            out=tmp_path / "out.json", work=tmp_path, minutes=settings["minutes"], parallel=settings["parallel"]
        )
        shared = Settings("plain", 2, settings["engine"], [], 2, 0, 0)
        failed = queue.Queue(args, shared, arms.jobs_of(jobs)).run()
        order = tmp_path / "jobs" / "order"
        return failed, json.loads(args.out.read_text()), order.read_text().split() if order.exists() else []

    return do


class TestQueue:
    def test_all_jobs_are_done_and_only_the_first_of_an_arm_answers_before(self, run):
        failed, results, order = run("bf16:1e-3:0-2", "new:1e-3:0", parallel=1)
        assert failed == 0
        assert order == ["bf16-0-True", "new-0-True", "bf16-1-False", "bf16-2-False"]
        assert set(results["runs"]) == {"bf16-0.001-0", "bf16-0.001-1", "bf16-0.001-2", "new-0.001-0"}
        assert results["settings"]["steps"] == 2

    def test_what_is_done_is_not_repeated(self, run):
        run("bf16:1e-3:0")
        _, results, order = run("bf16:1e-3:0-1")
        assert order == ["bf16-0-True", "bf16-1-False"]
        assert len(results["runs"]) == 2

    def test_a_failure_is_named_and_does_not_stop_the_rest(self, run):
        failed, results, _ = run("rtn:1e-3:0-1", "qat:1e-3:0", "bf16:1e-3:0-1")
        assert failed == 3
        assert results["failed"]["rtn-0.001-0"] == "Boom: no memory"
        assert results["failed"]["qat-0.001-0"] == "its process was killed"
        assert set(results["runs"]) == {"bf16-0.001-0", "bf16-0.001-1"}
        _, results, _ = run("bf16:1e-3:0")
        assert results["failed"] == {}

    def test_without_time_nothing_starts(self, run):
        failed, results, order = run("bf16:1e-3:0", minutes=-1.0)
        assert (failed, results["runs"], order) == (0, {}, [])

    def test_results_of_other_settings_are_refused(self, run, tmp_path):
        (tmp_path / "out.json").write_text(
            json.dumps({"settings": asdict(SETTINGS), "machine": {}, "runs": {}, "failed": {}})
        )
        with pytest.raises(SystemExit, match="made with other steps, engine, test_rows"):
            run("bf16:1e-3:0")

    def test_with_vllm_the_first_run_of_a_kind_compiles_alone(self, tmp_path):
        args = argparse.Namespace(out=tmp_path / "out.json", work=tmp_path, minutes=9.0, parallel=9)
        jobs = arms.jobs_of(["bf16:1e-3:0-1", "rtn:1e-3:0", "new:1e-3:0", "new_F:1e-3:0"])
        waiting = queue.Queue(args, SETTINGS, jobs)
        started = []
        for job in jobs:
            if waiting.may_start(job):
                started.append(job.key)
                waiting.workers.append(queue.Worker(None, job))
        assert started == ["bf16-0.001-0", "rtn-0.001-0", "new_F-0.001-0"]  # rtn and new have the same graphs
        (tmp_path / "runs" / "rtn-0.001-0").mkdir()
        (tmp_path / "runs" / "rtn-0.001-0" / "metrics.jsonl").write_text("{}\n")
        waiting.note_warm()
        assert [job.key for job in jobs if waiting.may_start(job) and job.key not in started] == ["new-0.001-0"]


def row_of(arm, rate, seed, percent, reward=(0.1, 0.5), **more):
    bits = "1" * percent + "0" * (100 - percent)
    return {
        **{"arm": arm, "rate": rate, "seed": seed, "before": {"test": "1" * 9 + "0" * 91} if seed == 0 else None},
        **{"after": {"test": bits, **more}, "steps": {"reward": [*reward] * 10}, "seconds": 100.0},
    }


def results_of(*rows):
    machine = {"device": "CPU", "versions": {"torch": "2", "transformers": "5", "trl": "1", "peft": "0"}}
    runs = {Job(row["arm"], row["rate"], row["seed"]).key: row for row in rows}
    return {"settings": asdict(SETTINGS), "machine": machine, "runs": runs, "failed": {}}


class TestReport:
    def test_the_rate_is_chosen_by_the_reward_and_not_by_the_test_rows(self):
        low = [row_of("bf16", 1e-4, seed, 60, reward=(0.1, 0.2)) for seed in (0, 1)]
        high = [row_of("bf16", 1e-3, seed, 40, reward=(0.1, 0.9)) for seed in (0, 1)]
        once = row_of("bf16", 1e-2, 0, 90, reward=(0.9, 0.9))  # a rate with fewer seeds is not compared
        assert report.best(results_of(*low, *high, once), "bf16") == high

    def test_intervals_by_hand(self):
        # Differences 2, 4, 6: mean 4, standard deviation 2, t of 2 degrees of freedom 4.303.
        reference = [row_of("bf16", 1e-3, seed, 30 + seed) for seed in range(3)]
        arm = [row_of("new", 1e-3, seed, 30 + seed + 2 + 2 * seed) for seed in range(3)]
        assert report.differences(arm, reference) == pytest.approx([2, 4, 6])
        assert report.interval([2, 4, 6], "+.2f") == "+4.00 ± 4.97"
        assert report.interval([2.0]) == "2.0"
        line = next(line for line in report.best_table(results_of(*reference, *arm)) if "by default" in line)
        assert "| 9.0 | 35.0 ± 7.5 | +4.0 ± 5.0 | 32.0 / 35.0 / 38.0 |" in line

    def test_pass_at_k_is_unbiased(self):
        # All subsets of 3 of 5 samples, of which 2 are right.
        right = [True, True, False, False, False]
        by_hand = sum(map(any, itertools.combinations(right, 3))) / comb(5, 3)
        assert report.pass_at({"right": [2], "samples": 5}, 3) == pytest.approx(by_hand)
        assert report.pass_at({"right": [0, 5], "samples": 5}, 1) == 0.5

    def test_the_page_names_pass_at_k_only_where_it_was_measured(self, tmp_path):
        sampled = [row_of("bf16", 1e-3, seed, 30, right=[0, 1], samples=64) for seed in (0, 1)]
        page = report.page(results_of(*sampled), [tmp_path / "study-real.json"])
        assert "pass@64" in page
        assert "| 0.8 ± 0.0 |" in page  # pass@1: 1 of 64, in one of two questions
        assert "pass@" not in report.page(results_of(row_of("bf16", 1e-3, 0, 30)), [tmp_path / "study-real.json"])

    def test_several_files_are_one_study(self, tmp_path):
        files = [tmp_path / "study-real.json", tmp_path / "more.json"]
        files[0].write_text(json.dumps(results_of(row_of("bf16", 1e-3, 0, 30), row_of("bf16", 1e-3, 1, 34))))
        files[1].write_text(json.dumps(results_of(row_of("new_F", 1e-3, 0, 31), row_of("new_F", 1e-3, 1, 33))))
        report.write_report(files, [], tmp_path / "images")
        text = (tmp_path / "study-real.md").read_text()
        assert "frozen start" in text
        assert "+0.0 ± 12.7" in text  # differences 1 and -1
        assert (tmp_path / "images" / "study-real.png").stat().st_size > 10_000
