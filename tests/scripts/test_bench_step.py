"""scripts/bench/bench_step.py makes a recipe that loads, for any number of steps."""

import argparse
import json

import bench_step
import pytest

from qerl.config.recipe import load_recipe


@pytest.mark.parametrize(("steps", "noisy"), [(1, False), (2, False), (3, True), (4, True)])
def test_any_number_of_steps_is_valid_and_gives_noise_enough_steps(tmp_path, steps, noisy):
    parser = argparse.ArgumentParser()
    bench_step.add_options(parser)
    asked = parser.parse_args(["--model", "somewhere", "--steps", str(steps)])
    config = load_recipe("dapo_7b", bench_step.overrides(asked, tmp_path))
    assert (config.run.steps, config.noise.enabled) == (steps, noisy)
    assert config.validation.every is None  # a measurement reads nothing from the hub


def test_no_group_of_completions_is_without_a_signal():
    """A step on fewer groups is shorter, and TRL's trains on all."""
    names = {}
    exec(bench_step.REWARD, names)
    groups = [[f"t{group} t{completion}" for completion in range(8)] for group in range(1000)]
    assert all(len(set(names["drawn"](group))) == 8 for group in groups)


def test_each_step_gets_its_share_of_the_rate_measured_after_it(tmp_path):
    parser = argparse.ArgumentParser()
    bench_step.add_options(parser)
    asked = parser.parse_args(["--model", "Qwen/Qwen2.5-7B"])
    config = load_recipe("dapo_7b", bench_step.overrides(asked, tmp_path))
    full = {"completions/mean_tokens": 512.0, "completions/trained_share": 1.0, "time/train_s": 4.0}
    report = {"cards": 1, "steps": [dict(full), full | {"time/train_s": 8.0}]}
    bench_step.add_shares(report, config, 800.0)
    # In the body 16 prompts of 128 tokens, once each, and 128 completions of 512; in the head these completions only.
    # All count for forward and backward.
    needed = 4 * (6525288448 * (16 * 128 + 128 * 512) + 152064 * 3584 * 128 * 512)
    assert report["matrix_tflops"] == 800.0
    found = [step["train_share_of_matrix_rate"] for step in report["steps"]]
    assert found == [round(needed / 4 / 800e12, 4), round(needed / 8 / 800e12, 4)]


def test_the_file_has_the_complete_steps_at_any_time_and_all_at_the_end(tmp_path):
    metrics, out = tmp_path / "metrics.jsonl", tmp_path / "out.json"
    with bench_step.SoFar({"command": "c"}, metrics, out) as so_far:
        so_far.write()
        assert not out.exists()
        metrics.write_text('{"step": 1}\n{"step"')
        so_far.write()
        assert json.loads(out.read_text()) == {"command": "c", "unfinished": True, "steps": [{"step": 1}]}
        metrics.write_text('{"step": 1}\n{"step": 2}\n')
    assert [step["step"] for step in json.loads(out.read_text())["steps"]] == [1, 2]
