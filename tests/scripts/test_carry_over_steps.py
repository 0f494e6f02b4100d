"""scripts/study/carry_over_steps.py: what is calculated of carry-over is what a run's own code does."""

import pytest

from scripts.study.carry_over_steps import CARRIED, decode_steps


def test_the_calculation_and_the_code_of_a_run_take_as_many_decode_steps():
    steps = decode_steps(prompts=2, wanted=6, longest=20, steps=100)
    calculated, sampled = steps["calculated"], steps["by the run's code"]
    assert list(calculated) == [0, *CARRIED]
    for carried in CARRIED:
        assert sampled[carried] == pytest.approx(calculated[carried], rel=0.15)
        assert sampled[carried] < 0.8 * calculated[0]


def test_completions_of_one_token_take_one_decode_step():
    steps = decode_steps(prompts=2, wanted=0.01, longest=20, steps=12)
    assert {value for of_each in steps.values() for value in of_each.values()} == {1}
