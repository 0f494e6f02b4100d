"""scripts/study/real_text.py: rows to texts, divergences by hand, and the start that is added to the weights."""

import gzip
import json
from types import SimpleNamespace

import pytest
import real_text
import torch


def test_rows_that_mark_themselves_are_left_out(tmp_path):
    rows = [
        {"question": "a", "answer": "1", "solution": "since"},
        {"question": "b", "answer": "2", "eval_exact": ["math500"]},
        {"question": "c", "answer": "3", "dup": True},
        {"question": "d", "answer": "4", "lang": "zh"},
        {"question": "e", "answer": "5", "solution": "", "dup": False, "eval_near": []},
        {"question": "f", "answer": "6"},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for file in (tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.gz"):
        assert real_text.texts_of(file, 9) == ["a\nsince", "e\n5", "f\n6"]
        assert real_text.texts_of(file, 1, skip=1) == ["e\n5"]
        with pytest.raises(SystemExit, match="3 usable rows and --skip leaves out 3"):
            real_text.texts_of(file, 1, skip=3)


class Fixed(torch.nn.Module):
    """A model that predicts the same distribution everywhere."""

    def __init__(self, *probabilities):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(probabilities).log(), requires_grad=False)

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def test_divergences_by_hand():
    # KL of (1/2, 1/4, 1/4) from (1/4, 1/2, 1/4): 1/2 log 2 - 1/4 log 2.
    # The tokens 0, 1, 1 are predicted, as the first one of each row is not.
    found = real_text.compare(Fixed(0.5, 0.25, 0.25), Fixed(0.25, 0.5, 0.25), [[2, 0], [2, 1, 1]])
    log2 = 0.693147
    assert found["kl"] == pytest.approx(log2 / 4, abs=1e-5)
    assert found["nats"] == pytest.approx((2 * log2 + log2 + log2) / 3, abs=1e-5)
    assert (found["same"], found["tokens"]) == (0.0, 3)


def test_padding_changes_nothing(base):
    model = real_text.decoded(base, "cpu")
    rows = [[5, 6, 7, 8, 9], [3, 4]]
    together = list(real_text.log_probabilities(model, rows))
    for row, (values, tokens) in zip(rows, together, strict=True):
        alone, _ = next(real_text.log_probabilities(model, [row]))
        torch.testing.assert_close(values, alone, rtol=1e-4, atol=1e-5)
        assert tokens.tolist() == row[1:]


def test_a_start_of_a_rank_is_added_and_taken_away(base, tmp_path):
    from qerl.checkpoint.base_start import write_start

    torch.manual_seed(0)
    model = real_text.decoded(base, "cpu")
    name = "model.layers.0.self_attn.q_proj"
    weight = dict(model.named_parameters())[f"{name}.weight"]
    before, (out, into) = weight.detach().clone(), weight.shape
    a, b = torch.randn(4, into).bfloat16(), torch.randn(out, 4).bfloat16()
    (tmp_path / "start").mkdir()
    write_start(tmp_path / "start", {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, {})
    assert (real_text.start_rank(tmp_path), real_text.start_rank(base)) == (4, 0)
    real_text.add_start_(model, tmp_path, 2)
    torch.testing.assert_close(weight.detach() - before, b[:, :2].float() @ a[:2].float(), rtol=1e-3, atol=1e-3)
    real_text.add_start_(model, tmp_path, 2, -1)
    torch.testing.assert_close(weight.detach(), before, rtol=0, atol=1e-4)


def test_a_quantized_folder_is_decoded(base, nvfp4_base):
    from qerl.checkpoint.load import load_model

    rows = [[5, 6, 7, 8, 9]]
    whole, ours = real_text.decoded(base, "cpu"), real_text.decoded(nvfp4_base, "cpu")
    lost = real_text.compare(whole, ours, rows)["kl"]
    by_qerl = real_text.compare(load_model(nvfp4_base, "nvfp4"), ours, rows)["kl"]
    assert 0 <= by_qerl < 0.02 * lost  # decoded to bfloat16 here, and to float32 there
