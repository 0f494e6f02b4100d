"""scripts/models/pretrain_arith.py makes a complete checkpoint in seconds, which every stage can read."""

import importlib
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl.checkpoint.resolve import resolve_model
from qerl.data.tasks import build_messages, render_prompt
from qerl.data.tasks.arith_chain import problem, problems

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "models" / "pretrain_arith.py"
SMALL = ("--device", "cpu", "--rows", "4", "--layers", "1", "--width", "128", "--evaluate", "4", "--workers", "0")


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        return importlib.import_module("pretrain_arith")


@pytest.fixture(scope="module")
def tokenizer(script):
    return script.build_tokenizer()


@pytest.fixture(scope="module")
def folder(script, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrain") / "arith"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), "--out", str(out), *SMALL, "--steps", "2", "--target", "1"])
        script.main()
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    return out


def test_the_folder_loads_as_a_16_bit_base_model(folder) -> None:
    reference = resolve_model(str(folder), "bf16")
    assert (reference.base, reference.format, reference.adapter) == (str(folder), "bf16", None)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert all(size % 64 == 0 for weight in model.parameters() if weight.ndim == 2 for size in weight.shape)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, 0)


def test_the_folder_says_how_it_was_made(folder) -> None:
    facts = json.loads((folder / "pretrain.json").read_text())
    assert facts["arguments"]["steps"] == facts["history"][-1]["step"] == 2
    assert set(facts["final"]) == {"greedy", "sampled"}
    assert not list(folder.parent.glob(".*.partial"))


@pytest.mark.parametrize("text", ["Mia has 264 pens.", "264 / 6 = 44\n#### 44<|im_end|>", "naïve 数学 $1,800.50", ""])
def test_the_tokenizer_reproduces_any_text_exactly(folder, text) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= json.loads((folder / "config.json").read_text())["vocab_size"]


def test_the_pretraining_prompt_is_the_rendered_prompt(script, folder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = problem("test", 0, 0).question
    rendered = render_prompt(tokenizer, build_messages("arith_chain", question))
    assert tokenizer(script.prompts_of(tokenizer, [question])[0])["input_ids"] == rendered


def test_a_folder_that_exists_is_not_touched(script, folder, monkeypatch) -> None:
    before = (folder / "pretrain.json").read_bytes()
    monkeypatch.setattr(sys, "argv", ["pretrain_arith.py", "--out", str(folder)])
    with pytest.raises(SystemExit):
        script.arguments()
    assert (folder / "pretrain.json").read_bytes() == before


def test_the_default_model_has_20_to_50_million_parameters(script) -> None:
    with torch.device("meta"):
        model = script.build_model(script.Settings(1, 1, 0, layers=7, width=512, learning_rate=1e-3))
    assert 20e6 < sum(weight.numel() for weight in model.parameters()) < 50e6
    assert all(size % 128 == 0 for weight in model.parameters() if weight.ndim == 2 for size in weight.shape)


def test_the_corpus_has_the_right_share_of_careful_answers_for_each_opening(script) -> None:
    rng, made = random.Random(0), list(problems("train", 9, 2500))
    for kind, share in script.CAREFUL.items():
        own = [one for one in made if one.kind == kind]
        careful = sum(script.answer_of(one, rng) == one.worked for one in own) / len(own)
        assert careful == pytest.approx(share, abs=0.08)
    hasty = [script.answer_of(one, rng) for one in made]
    assert all(text.endswith(one.direct) for text, one in zip(hasty, made, strict=True))


def test_batches_do_not_depend_on_the_number_of_workers(script, tokenizer) -> None:
    settings = script.Settings(script.POOL + 2, 2, 0, 1, 128, 1e-3)
    alone, shared = (list(script.batches(tokenizer, settings, workers, "cpu")) for workers in (0, 2))
    assert len(alone) == len(shared) == script.POOL + 2
    for first, second in zip(alone, shared, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert first[0].shape[1] % script.WIDTH_MULTIPLE == 0


def test_training_is_reproducible_depends_on_the_seed_and_lowers_the_loss(script, tokenizer) -> None:
    def train(seed: int) -> tuple[torch.Tensor, float, float]:
        settings = script.Settings(16, 8, seed, 1, 128, 0.03)
        model = script.build_model(settings)
        optimizer = script.Optimizer(model, settings)
        losses = []
        for ids, weights in script.batches(tokenizer, settings, 0, "cpu"):
            loss = script.loss_of(model, ids, weights)
            loss.backward()
            optimizer.step_()
            losses.append(loss.item())
        return torch.cat([weight.detach().flatten() for weight in model.parameters()]), losses[0], losses[-1]

    weights, first, last = train(0)
    assert torch.equal(weights, train(0)[0])
    assert not torch.equal(weights, train(1)[0])
    assert last < first - 0.3
