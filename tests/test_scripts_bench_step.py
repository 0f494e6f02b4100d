"""What scripts/bench_step.py asks of a run is a recipe that loads, whatever the number of steps."""

import argparse
import sys
from pathlib import Path

import pytest

from qerl.recipe import load_recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_step


@pytest.mark.parametrize(("steps", "noisy"), [(1, False), (2, False), (3, True), (4, True)])
def test_any_number_of_steps_is_a_run_and_noise_has_the_steps_it_needs(tmp_path, steps, noisy):
    parser = argparse.ArgumentParser()
    bench_step.add_options(parser)
    asked = parser.parse_args(["--model", "somewhere", "--steps", str(steps)])
    config = load_recipe("dapo_7b", bench_step.overrides(asked, tmp_path))
    assert (config.run.steps, config.noise.enabled) == (steps, noisy)


def test_what_is_set_by_hand_wins(tmp_path):
    parser = argparse.ArgumentParser()
    bench_step.add_options(parser)
    asked = parser.parse_args(["--model", "somewhere", "--steps", "3", "--set", "noise.enabled=false"])
    assert not load_recipe("dapo_7b", bench_step.overrides(asked, tmp_path)).noise.enabled
