"""From completions to numbers, on rows whose numbers are all known by hand."""

from pathlib import Path

import pytest

from eval.result import EvalResult, summarize
from qerl.data.grading.intervals import MANY_SAMPLES, ONE_SAMPLE, estimate

REASONS = {"x": "correct", ".": "wrong"}
ROW = {"truncated": False, "prompt_tokens": 10, "tokens": 5, "batch": 0, "batch_seconds": 2.0}


def rows(*graded, **changes):
    """One row per character of each word, 'x' for right and '.' for wrong; word i is question i."""
    return [
        {**ROW, "row": question, "sample": sample, "correct": mark == "x", "reason": REASONS[mark], **changes}
        for question, word in enumerate(graded)
        for sample, mark in enumerate(word)
    ]


def test_one_sample_per_question():
    summary = summarize(rows("x", ".", "x", "."))
    assert (summary.questions, summary.samples, summary.correct, summary.completions) == (4, 1, 2, 4)
    assert summary.accuracy.value == 0.5
    assert summary.accuracy == estimate([1.0, 0.0, 1.0, 0.0])
    assert summary.interval == ONE_SAMPLE
    assert summary.pass_at_k == {}


def test_a_result_is_shown_as_one_line():
    result = EvalResult(
        "gsm8k", "runs/a", Path("evals/x"), summarize(rows("x.", "xx", ".."), pass_k=(2,)), {"base": "b"}
    )
    one, two = result.summary.accuracy, result.summary.pass_at_k[2]
    assert repr(result) == (
        f"EvalResult(gsm8k, runs/a: accuracy 50.0% ({one.low:.1%} to {one.high:.1%}), pass@2 66.7% ({two.low:.1%} to "
        f"{two.high:.1%}), 3 questions, 2 samples each, in 'evals/x')"
    )


def test_mean_and_pass_at_k_are_over_questions():
    summary = summarize(rows("xx..", "....", "xxxx", "x..."), pass_k=(1, 2, 4))
    assert summary.accuracy.value == pytest.approx(7 / 16)
    # pass@2 with 2, 0, 4 and 1 right of 4: 1 - 1/6, 0, 1, 1 - 3/6
    assert {k: e.value for k, e in summary.pass_at_k.items()} == pytest.approx(
        {1: 7 / 16, 2: (5 / 6 + 0 + 1 + 1 / 2) / 4, 4: 3 / 4}
    )
    assert summary.interval == MANY_SAMPLES
    assert all(e.low < e.value < e.high for e in summary.pass_at_k.values())


def test_shares_are_of_completions():
    crafted = [
        *rows("x.", truncated=True),
        *[{**row, "row": 1} for row in rows("..", reason="no_answer")],
        *[{**row, "row": 2} for row in rows("x.")],
        *[{**row, "row": 3} for row in rows(".x", truncated=True, reason="no_answer")],
    ]
    crafted[-1]["reason"] = "correct"
    summary = summarize(crafted)
    assert summary.truncated_share == 4 / 8
    assert summary.no_answer_share == 3 / 8
    assert summary.correct == 3
    assert summary.reasons == {"correct": 3, "no_answer": 3, "wrong": 2}


def test_tokens_add_up_and_the_seconds_of_a_batch_count_once():
    crafted = [*rows("xx"), *[{**row, "row": 1, "batch": 1, "batch_seconds": 0.5, "tokens": 7} for row in rows("xx")]]
    summary = summarize(crafted)
    assert (summary.prompt_tokens, summary.completion_tokens, summary.seconds) == (40, 24, 2.5)


def test_uneven_samples_are_refused():
    with pytest.raises(ValueError, match=r"questions with \[1, 2\] samples"):
        summarize(rows("xx", "x"))
