"""The paired tests give published and counted values, and a comparison refuses what it cannot compare."""

import itertools
import json
import os

import numpy as np
import pytest
from typer.testing import CliRunner

import qerl
from eval.compare import SAME, PairedTest, compare, mcnemar, mean_difference, newcombe, sign_flips, sign_test
from qerl.base.errors import CheckpointError, ConfigError
from qerl.cli.main import app

IDENTITY = {
    "task": "gsm8k", "questions": 40, "data": "d", "samples": 1, "temperature": 0, "top_p": 1.0,
    "max_new_tokens": 8, "seed": 0, "engine": "transformers", "kernel": "auto",
}  # fmt: skip


def write(folder, marks, **changes):
    """Write an evaluation folder. Each word of `marks` is one question, each 'x' a correct completion."""
    identity = {**IDENTITY, "questions": len(marks), "samples": len(marks[0]), **changes}
    rows = [
        {"row": row, "sample": sample, "correct": mark == "x"}
        for row, word in enumerate(marks)
        for sample, mark in enumerate(word)
    ]
    folder.mkdir()
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = {"task": identity["task"], "model": folder.name, "samples": identity["samples"], "identity": identity}
    (folder / "result.json").write_text(json.dumps({**result, "completions": len(rows)}))
    return folder


@pytest.mark.parametrize("wins", range(7))
def test_the_sign_test_counts_outcomes(wins):
    """The oracle counts all of the 2^6 sequences that are at least as lopsided."""
    far = abs(wins - 3)
    outcomes = [abs(sum(flips) - 3) >= far for flips in itertools.product((0, 1), repeat=6)]
    assert sign_test(wins, 6 - wins) == pytest.approx(sum(outcomes) / 64)


@pytest.mark.parametrize(
    ("counts", "low", "high"), [((36, 12, 2, 0), 0.0569, 0.3404), ((20, 12, 2, 16), 0.0562, 0.3290)]
)
def test_newcombe_gives_the_published_interval(counts, low, high):
    """Newcombe 1998, table II, method 10; phi in row 2: (20 * 16 - 12 * 2 - 25) / sqrt(32 * 18 * 22 * 28)."""
    assert newcombe(*counts) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=3e-4))


@pytest.mark.parametrize(
    ("difference", "low", "high", "p", "verdict"),
    [
        (0.1, 0.01, 0.2, 0.01, "better"),
        (-0.1, -0.2, -0.01, 0.01, "worse"),
        (0.1, -0.01, 0.2, 0.01, "cannot tell"),  # the test alone
        (0.1, 0.0, 0.2, 0.01, "cannot tell"),
        (-0.1, -0.2, 0.0, 0.01, "cannot tell"),
        (0.1, 0.01, 0.2, 0.05, "cannot tell"),  # the interval alone
    ],
)
def test_a_verdict_needs_the_test_and_the_interval(difference, low, high, p, verdict):
    assert PairedTest(difference, low, high, p, "test", "interval").verdict == verdict


def test_no_p_value_is_zero():
    """Of 10,000 random flips none is as far as 40 equal differences: the observed one itself counts."""
    assert sign_flips([0.25] * 40, [0.75] * 40).p_value == 1 / 10_001


def test_the_direction_is_second_minus_first():
    first, second = [0.0] * 10 + [1.0] * 30, [1.0] * 40
    better, worse = mcnemar(first, second), mcnemar(second, first)
    assert (better.difference, better.verdict, worse.difference, worse.verdict) == (0.25, "better", -0.25, "worse")
    assert 0 < better.low < 0.25 < better.high
    assert (better.low, better.high) == (pytest.approx(-worse.high), pytest.approx(-worse.low))


def test_the_interval_of_equal_results_has_a_width():
    """If 3.6% of all questions get worse, 100 questions show none of them once in 40 times."""
    found = sign_flips([0.5] * 100, [0.5] * 100)
    assert (found.low, found.high) == (pytest.approx(-0.036, abs=0.002), pytest.approx(0.036, abs=0.002))


PAIRS = {  # of Q questions: what the first and the second model know of each, with means near p and q
    "alike": lambda rng, p, q, count: (np.full(count, p), np.full(count, q)),
    "apart": lambda rng, p, q, count: (rng.beta(p / 20, (1 - p) / 20, count), rng.beta(q / 20, (1 - q) / 20, count)),
    "a few forgotten": lambda rng, p, q, count: (np.full(count, p), np.where(rng.random(count) < 0.02, 0, q)),
}
LONG = bool(os.environ.get("QERL_LONG_TESTS"))
SIZES = [(30, 1), (30, 64), (300, 4)]
MORE_SIZES = [(questions, samples) for questions in (30, 100, 300, 1319) for samples in (1, 2, 4, 16, 64)]


@pytest.mark.parametrize(("p", "q"), [(0.02, 0.1), (0.5, 0.6), (0.9, 0.9), (0.98, 0.998)])
@pytest.mark.parametrize("pair", PAIRS)
def test_intervals_of_differences_cover_the_truth(pair, p, q):
    """The nominal coverage is 95%. QERL_LONG_TESTS=1 simulates more sizes, more often."""
    rng = np.random.default_rng(11)
    truth = q * (0.98 if pair == "a few forgotten" else 1) - p
    for questions, samples in MORE_SIZES if LONG else SIZES:
        trials = 2000 if LONG else 60
        covered = 0
        for _ in range(trials):
            first, second = (rng.binomial(samples, knows) for knows in PAIRS[pair](rng, p, q, questions))
            if samples == 1:
                pairs = (first & second, second > first, first > second, (first | second) == 0)
                low, high = newcombe(*(int(each.sum()) for each in pairs))
            else:
                low, high = mean_difference(((second - first) / samples).tolist())
            covered += low <= truth <= high
        # 60 trials of a coverage of 0.95 give less than 0.86 once in 400 times.
        assert covered / trials >= (0.93 if LONG else 0.86), (questions, samples)


def test_sign_flips_on_few_questions_are_counted():
    """Six questions all have the same lead: 2 of the 2^6 sign patterns are as extreme, p = 1/32."""
    assert sign_flips([0.0] * 6, [0.5] * 6).p_value == pytest.approx(2 / 64, abs=0.006)
    assert sign_flips([0.0] * 5, [0.5] * 5).verdict == "cannot tell"  # 2/32 is above 0.05


def test_folders_are_compared_and_the_command_prints_the_result(tmp_path):
    first = write(tmp_path / "a", ["."] * 10 + ["x"] * 30)
    second = write(tmp_path / "b", ["x"] * 40, seed=1)
    found = compare(first, second / "result.json")
    assert (found.accuracies, found.only_first, found.only_second) == ((0.75, 1.0), 0, 10)
    assert found.also_different == "seed 0, now 1"
    assert repr(found).startswith("Comparison(gsm8k, the second: better. +25.0 points on the same 40 questions, 95%")
    assert found.verdict == qerl.compare(str(first), second).verdict == "better"
    out = tmp_path / "c.json"
    shown = CliRunner().invoke(app, ["compare", str(first), str(second), "--out", str(out)]).output
    assert "better" in shown
    assert "+25.0 points" in shown
    assert json.loads(out.read_text())["verdict"] == "better"


def test_several_samples_per_question_are_resampled_by_question(tmp_path):
    found = compare(write(tmp_path / "a", ["x..."] * 20), write(tmp_path / "b", ["xx..", "xxx."] * 10))
    assert found.paired.test == "sign flips"
    assert found.paired.difference == pytest.approx(0.375)
    assert found.paired.verdict == "better"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 9}, "max_new_tokens 8, now 9"),
        *(({name: "other"}, f"{name} .*, now other") for name in SAME if name not in ("questions", "samples")),
    ],
)
def test_other_questions_or_settings_are_refused(tmp_path, changes, message):
    first, second = write(tmp_path / "a", ["x"] * 4), write(tmp_path / "b", ["x"] * 4, **changes)
    with pytest.raises(ConfigError, match=message):
        compare(first, second)


def test_an_unfinished_evaluation_is_refused(tmp_path):
    first = write(tmp_path / "a", ["x"] * 4)
    (first / "completions.jsonl").write_text('{"row": 0, "correct": true}\n')
    with pytest.raises(CheckpointError, match="1 completions where 4 were graded"):
        compare(first, first)
    (first / "result.json").unlink()
    (first / "settings.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"a did not end: repeat the `qerl eval` that writes there, it continues"):
        compare(first, first)


def test_a_path_that_holds_no_evaluation_is_named_with_what_is_there(tmp_path):
    first = write(tmp_path / "gsm8k-1a2b", ["x"] * 4)
    assert compare(first, first).questions == compare(first / "result.json", first).questions == 4
    (tmp_path / "run" / "eval").mkdir(parents=True)
    inner = write(tmp_path / "run" / "eval" / "gsm8k-3c4d", ["x"] * 4)
    cases = {
        tmp_path / "gsm8k-1a2c": r"there is no folder .*gsm8k-1a2c \(did you mean .*gsm8k-1a2b\?\): give",
        first / "result.jsno": r"there is no folder .*result.jsno: give",
        first / "completions.jsonl": r"completions.jsonl holds no evaluation: give a folder",
        tmp_path / "run": rf"run holds no evaluation, but {inner} does: give that",
        tmp_path / "run" / "eval": rf"eval holds no evaluation, but {inner} does: give that",
    }
    for path, message in cases.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            compare(first, path)
        assert "Errno" not in str(caught.value)
    (inner / "result.json").unlink()
    with pytest.raises(CheckpointError, match=r"run holds no evaluation: give a folder in which `qerl eval` ended"):
        compare(first, tmp_path / "run")
