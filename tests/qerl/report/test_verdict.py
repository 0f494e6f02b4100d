"""The sentence at the top of a report: what it says of rewards and held-out answers, against values by hand."""

import pytest

from qerl.report.read import read_evaluation, read_run
from qerl.report.sections import Judged, mean_of, reward_sentence, rounded, student, verdict
from tests.helpers.report_factory import write_evaluation, write_run


def steps(*rewards, **more):
    return [{"step": i + 1, "reward": reward, **more} for i, reward in enumerate(rewards)]


RISING = steps(*(0.2 + 0.02 * (i % 2) + 0.02 * i for i in range(25)))


def evaluated(folder, value, low, high, **more):
    return write_evaluation(folder, [True], accuracy={"value": value, "low": low, "high": high}, **more)


@pytest.mark.parametrize(("freedom", "table"), [(4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042), (200, 1.972)])
def test_students_quantile_is_that_of_the_tables(freedom, table):
    assert student(freedom) == pytest.approx(table, rel=3e-3)


def test_the_interval_of_a_mean_over_steps():
    """Five values with mean 3 and variance 2.5: 2.776 * sqrt(2.5 / 5)."""
    assert mean_of([1, 2, 3, 4, 5]).half == pytest.approx(1.963, abs=5e-3)
    assert str(mean_of([0.5] * 5)) == "0.500 (0.500 to 0.500)"
    assert str(mean_of([0.5] * 4)) == "0.500"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (RISING, "rose from 0.248 (0.207 to 0.289) in the first 5 steps to 0.648 (0.607 to 0.689) in the last 5"),
        (steps(*(row["reward"] for row in RISING[::-1])), "The reward fell from 0.648"),
        (steps(*([0.1, 0.5, 0.3, 0.2, 0.4] * 5)), "The reward did not change measurably: it went from 0.300"),
        (steps(0.1, 0.5, 0.9), "went from 0.100 in the first step to 0.900 in the last step of 3, too few steps for"),
        (steps(0.25), "The reward of the only step is 0.250."),
        ([{"step": 1}], "No reward was logged."),
        ([row | {"sampled/reward": 0.3} for row in RISING], "did not change measurably: it went from 0.300"),
        ([{"step": 0, "reward": None}, *RISING], "The reward rose from"),
    ],
)
def test_what_is_said_of_rewards(rows, says):
    assert says in reward_sentence(rows)


def test_held_out_answers_decide(tmp_path):
    run = read_run(write_run(tmp_path / "run", RISING))
    compared = (
        read_evaluation(evaluated(tmp_path / "before", 0.42, 0.365, 0.476)),
        read_evaluation(evaluated(tmp_path / "after", 0.613, 0.556, 0.669, questions=300)),
    )
    numbers = (
        "from 42.0% (36.5% to 47.6%) to 61.3% (55.6% to 66.9%) on 300 questions of arith. The reward rose from 0.248"
    )
    leads = {"better": "It learned: held-out accuracy rose", "worse": "It got worse: held-out accuracy fell"}
    leads |= {"cannot tell": "Whether it learned cannot be told:", None: "Whether it learned was not tested:"}
    for outcome, lead in leads.items():
        said = verdict(run, compared, Judged(outcome, "..."))
        assert said.startswith(lead)
        assert numbers in said


def test_without_a_comparison_the_reward_is_not_taken_for_learning(tmp_path):
    folder = write_run(tmp_path / "run", RISING)
    assert verdict(read_run(folder)).endswith("Held-out accuracy was not given (--before and --after).")
    evaluated(folder / "eval" / "one", 0.5, 0.4, 0.6)
    assert "Held-out accuracy on arith is 50.0% (40.0% to 60.0%); what it was before" in verdict(read_run(folder))
    evaluated(folder / "eval" / "two", 0.5, 0.4, 0.6)
    assert "none is compared" in verdict(read_run(folder))


def validated(step, value, low, high):
    return {"step": step} | {f"validation/accuracy{name}": share for name, share in zip(
        ("", "_low", "_high"), (value, low, high), strict=True)} | {"validation/reward": value}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(0, 0.2, 0.1, 0.3), (16, 0.8, 0.7, 0.9)], "accuracy rose from 20.0% (10.0% to 30.0%) at step 0 to 80.0% ("),
        ([(0, 0.8, 0.7, 0.9), (8, 0.9, 0.8, 1.0), (16, 0.2, 0.1, 0.3)], "accuracy fell from 80.0%"),
        ([(0, 0.2, 0.1, 0.3), (16, 0.4, 0.3, 0.5)], "accuracy went from 20.0%"),
        ([(16, 0.4, 0.3, 0.5)], "accuracy is 40.0% (30.0% to 50.0%) at step 16."),
        ([{"step": step, "validation/loss": 2 - step / 8} for step in (0, 4)], "loss went from 2.00 at step 0 to 1.50"),
    ],
)  # fmt: skip
def test_validations_are_held_out_answers_too(tmp_path, rows, says):
    rows = [row if isinstance(row, dict) else validated(*row) for row in rows]
    said = verdict(read_run(write_run(tmp_path / "run", [*RISING, *rows])))
    assert f"In validation, held-out {says}" in said
    assert "not given" not in said
    evaluated(tmp_path / "run/eval/one", 0.5, 0.4, 0.6)
    assert "Held-out accuracy on arith is 50.0%" in verdict(read_run(tmp_path / "run"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (0.123456, "0.123"), (-0.5, "-0.500"), (1.23456, "1.23"), (12.3456, "12.3"), (1234.56, "1,235")),
        *((3.3e-13, "3.3e-13"), (0.001, "0.001"), (2.5e6, "2.5e+06")),
    ],
)
def test_numbers_are_rounded_to_what_counts(value, text):
    assert rounded(value) == text
