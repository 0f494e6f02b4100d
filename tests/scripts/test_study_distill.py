"""What the study of distillation computes from answers and logs."""

import numpy as np
import pytest
from study_distill import accuracies, correct, kl, share_back

WHOLE, ROUNDED = np.array([1.0] * 80 + [0.0] * 20), np.array([1.0] * 60 + [0.0] * 40)


def test_what_came_back_of_what_rounding_cost():
    """Two seeds that answer 75 and 70 of 100 questions, where 80 and 60 were right: 12.5 points of 20."""
    seeds = [np.array([1.0] * count + [0.0] * (100 - count)) for count in (75, 70)]
    found = share_back(WHOLE, ROUNDED, seeds)
    assert [found[name][0] for name in ("cost", "back")] == pytest.approx([0.2, 0.125])
    share, low, high = found["share"]
    assert low < 0.625 < high
    assert share == pytest.approx(0.625, abs=0.02)
    named = accuracies([WHOLE, ROUNDED, *seeds])
    assert named["distilled"][0] == pytest.approx(0.725)
    assert named["16 bits"] == pytest.approx([0.8, 1.96 * np.sqrt(0.8 * 0.2 / 99)])


def test_a_share_of_no_cost_is_not_given():
    assert share_back(WHOLE, WHOLE, [WHOLE])["share"] == [None, None, None]


def test_the_kl_is_that_of_the_first_step_and_of_the_last_tenth():
    runs = [[{"kl": value} for value in (first, *[9.0] * 17, 0.1, 0.3)] for first in (1.0, 2.0)]
    assert kl(runs, "kl") == {"before": [1.0, 2.0], "after": pytest.approx([0.2, 0.2]), "falls": pytest.approx(7.5)}


def test_answers_are_in_the_order_of_their_questions(tmp_path):
    lines = ['{"row": 1, "correct": true}', '{"row": 0, "correct": false}']
    (tmp_path / "completions.jsonl").write_text("\n".join(lines) + "\n")
    assert correct(tmp_path).tolist() == [0.0, 1.0]
