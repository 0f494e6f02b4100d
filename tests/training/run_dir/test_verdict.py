"""Best validation and stop rule on values by hand."""

import pytest

from qerl.config.validation import ValidationConfig
from training.run_dir.verdict import Best, best_of, ending, sentence, validations


def rows_of(*values, first=0, metric="accuracy"):
    return [{"step": 10 * place, "validation/reward": 0.5, "validation/accuracy": 0.5, f"validation/{metric}": value}
            for place, value in enumerate(values, start=first)]  # fmt: skip


def config_of(**given):
    return ValidationConfig(every=10, **given)


@pytest.mark.parametrize(
    ("values", "best"),
    [((0.9, 0.4, 0.6, 0.6, 0.5), (20, 0.6)), ((0.1, 0.2), (10, 0.2)), ((0.9,), None), ((), None)],
)
def test_the_best_is_the_first_of_equals_and_after_a_step(values, best):
    assert best_of(rows_of(*values), config_of()) == (best and Best(best[0], "accuracy", best[1]))


def test_the_best_is_by_the_metric():
    rows = rows_of(0.1, 0.9, 0.3, metric="rewards/short")
    assert str(best_of(rows, config_of(metric="rewards/short"))) == "rewards/short 0.900 after step 10"
    assert str(best_of(rows, config_of())) == "accuracy 50.0% after step 10"


@pytest.mark.parametrize(
    ("values", "given", "ends"),
    [
        ((0.5, 0.6, 0.6, 0.59), {"stop_after": 2}, True),
        ((0.5, 0.6, 0.6, 0.61), {"stop_after": 2}, False),
        ((0.5, 0.4, 0.3), {"stop_after": 2}, True),  # the validation before the first step counts as the first value
        ((0.5, 0.6, 0.59, 0.6), {"stop_after": 2}, True),  # an equal one is not an improvement
    ],
)
def test_what_ends_a_run(values, given, ends):
    rows, config = rows_of(*values), config_of(**given)
    step = rows[-1]["step"]
    assert (ending(rows, config, step) is not None) is ends
    assert ending(rows, config, step + 1) is None  # only the validation of that step
    assert ending(rows, config.model_copy(update={"every": None}), step) is None


def test_rows_without_a_validation_are_no_validations():
    rows = [{"step": 1, "reward": 0.2}, *rows_of(0.3, first=1), {"step": 11, "validation/reward": None}]
    assert [row["step"] for row in validations(rows)] == [10]


def test_a_validation_in_one_line():
    row = {
        "step": 40,
        "validation/accuracy": 0.615,
        "validation/accuracy_low": 0.546,
        "validation/accuracy_high": 0.6806,
        "validation/reward": 0.61,
        "validation/mean_tokens": 212.4,
        "validation/truncated_share": 0.035,
    }
    expected = "accuracy 61.5% (54.6% to 68.1%), reward 0.610, 212 tokens, 3.5% truncated"
    assert sentence(row) == f"validation after step 40: {expected}"
    assert sentence({**row, "step": 0}) == f"validation before the first step: {expected}"
