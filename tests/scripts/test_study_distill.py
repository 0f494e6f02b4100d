"""What the study of distillation computes from answers and logs."""

import json
from itertools import islice

import numpy as np
import pytest
import torch
from held_out_kl import divergences, sampled, write_problems
from study_distill import accuracies, correct, falls, share_back

from qerl.checkpoint.load import load_model, load_tokenizer
from qerl.data.tasks import arith, build_messages

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


def test_the_kl_falls_from_the_rounded_model_to_the_mean_of_the_others():
    assert falls([0.3, 0.1, 0.2]) == {"rounded": 0.3, "distilled": [0.1, 0.2], "falls": pytest.approx(2.0)}


def test_the_kl_of_a_packed_model_is_that_of_dense_logits_row_by_row(base, nvfp4_base):
    """Rows have different lengths, so that a wrong mask or place of a completion would show."""
    questions = ["What is 2 + 3?", "Tom has 4 apples and gives 1 to Ann. How many apples does he have?"]
    (found,) = divergences(str(base), [nvfp4_base], "arith", questions, 5)
    whole, packed = load_model(base, "bf16"), load_model(nvfp4_base, "nvfp4")
    messages = [build_messages("arith", question) for question in questions]
    totals = []
    for prompt, completion in sampled(whole, load_tokenizer(base), messages, 5):
        ids = torch.tensor([prompt + completion])
        log_q, log_p = (
            model(ids).logits[0, len(prompt) - 1 : -1].detach().double().log_softmax(-1) for model in (whole, packed)
        )
        totals.append([(one.exp() * (one - other)).sum(-1) for one, other in ((log_q, log_p), (log_p, log_q))])
    forward, reverse = (torch.cat(each).mean().item() for each in zip(*totals, strict=True))
    assert found == pytest.approx({"forward": forward, "reverse": reverse}, rel=1e-4)
    assert forward > 1e-6


def test_problems_are_those_of_the_task_and_the_others_are_different(tmp_path):
    others = write_problems("arith", 20, tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    own = [{"question": row["question"], "answer": row["answer"]} for row in islice(arith.rows("test"), 40)]
    assert rows == own[:20]
    assert others == [row["question"] for row in own[20:]]


def test_answers_are_in_the_order_of_their_questions(tmp_path):
    lines = ['{"row": 1, "correct": true}', '{"row": 0, "correct": false}']
    (tmp_path / "completions.jsonl").write_text("\n".join(lines) + "\n")
    assert correct(tmp_path).tolist() == [0.0, 1.0]
