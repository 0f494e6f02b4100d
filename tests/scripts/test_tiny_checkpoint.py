"""scripts/models/tiny_checkpoint.py, and the folder qerl/tiny that was made with it."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import tiny_checkpoint as script
import torch
from muon import orthogonal
from stories import problem, problems
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl.data.tasks import build_messages, render_prompt

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "qerl" / "tiny"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


TEXTS = [
    "<|im_start|>user\nMia has 4 boxes.<|im_end|>\n<|im_start|>assistant\n",
    "4 * 6 = 24\n24 - 5 = 19\n#### 19<|im_end|>",
    "  two  leading, trailing \t\n\n ",
    "It's $1,800.50 -- DON'T pay £12 or 12%: \\boxed{\\frac{1}{2}}",
    "naïve café, 数学 42, \U0001f600, e\u0301 stays decomposed",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_shipped_tokenizer_reproduces_any_text_exactly(tokenizer, text) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_have_one_id_each_as_the_configs_say(tokenizer) -> None:
    config = json.loads((TINY / "config.json").read_text())
    generation = json.loads((TINY / "generation_config.json").read_text())
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>")["input_ids"] == [0, 1, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    for values in (config, generation):
        assert (values["pad_token_id"], values["eos_token_id"]) == (0, 2)
    assert len(tokenizer) <= config["vocab_size"]


def test_each_digit_is_one_token(tokenizer) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer("#### 42")["input_ids"]) == ["####", "Ġ4", "2"]


def test_script_rebuilds_the_shipped_tokenizer(tokenizer) -> None:
    assert script.build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_pretraining_prompt_is_the_rendered_prompt(tokenizer) -> None:
    question = problem("test", 0, 0).question
    rendered = render_prompt(tokenizer, build_messages("arith", question))
    assert tokenizer(script.prompts_of(tokenizer, [question])[0])["input_ids"] == rendered


def test_chat_template_renders_system_user_and_assistant_turns(tokenizer) -> None:
    turns = [("system", "Be brief."), ("user", "2 + 3?"), ("assistant", "#### 5")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n"
        "<|im_start|>assistant\n#### 5<|im_end|>\n"
    )


def test_card_states_the_hash_of_the_shipped_weights_and_the_folder_is_small() -> None:
    stated = re.search(r"sha256 `([0-9a-f]{64})`", (TINY / "README.md").read_text())
    assert stated
    assert hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest() == stated[1]
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 4_000_000


def test_the_shipped_model_solves_by_working_out_and_rarely_at_once(tokenizer, model) -> None:
    """The ranges are the accuracies of the model card, plus or minus three standard deviations for 64 problems."""
    assert script.accuracy(model, tokenizer, 64, style="worked") >= 0.9
    assert script.accuracy(model, tokenizer, 64, style="direct") <= 0.2
    assert 0.15 <= script.accuracy(model, tokenizer, 64) <= 0.55


def test_shipped_model_survives_nvfp4(tokenizer, model) -> None:
    assert script.accuracy(script.nvfp4_twin(model), tokenizer, 64, style="worked") >= 0.85


def test_nvfp4_twin_rounds_every_linear_and_nothing_else(model) -> None:
    twin, changed = script.nvfp4_twin(model).state_dict(), set()
    for name, weight in model.state_dict().items():
        if not torch.equal(weight, twin[name]):
            changed.add(name)
            noise = (weight - twin[name]).norm() / weight.norm()
            assert 0.05 < noise < 0.15  # 16 to 26 dB
    assert len(changed) == 28
    assert all("_proj" in name for name in changed)


def test_training_is_reproducible_and_depends_on_the_seed(tokenizer) -> None:
    def weights(seed: int) -> torch.Tensor:
        model = script.build_model(seed)
        script.train_(model, tokenizer, steps=2, rows=4, seed=seed)
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    first = weights(0)
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))


def test_the_corpus_begins_with_worked_answers_and_ends_with_a_mixture_by_kind(tokenizer) -> None:
    """Direct answers appear only in the mixture, with the share that their kind has."""
    rng = script.random.Random(0)
    made = list(problems("train", 9, 3000))
    assert all(script.answer_of(one, mixed=False, rng=rng) == one.worked for one in made)
    for position, kind in enumerate(script.KINDS[:3]):
        answers = [script.answer_of(one, True, rng) == one.worked for one in made if one.kind == kind.name]
        assert sum(answers) / len(answers) == pytest.approx(script.WORKED_SHARE[position], abs=0.12)


def test_a_batch_weighs_prompts_lightly_completions_fully_and_padding_not_at_all(tokenizer) -> None:
    ids, weights = next(script.batches(tokenizer, rows=4, steps=10, seed=0))
    for row, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        end = len(row) - row[::-1].index(2)  # after the last <|im_end|>
        begin = tokenizer.decode(row[:end]).index("assistant\n") + len("assistant\n")
        prompt = len(tokenizer(tokenizer.decode(row[:end])[:begin])["input_ids"])
        assert weight[:prompt] == pytest.approx([script.PROMPT_WEIGHT] * prompt)
        assert weight[prompt:end] == [1.0] * (end - prompt)
        assert weight[end:] == [0.0] * (len(row) - end)


@pytest.mark.parametrize("shape", [(3, 64, 128), (2, 128, 64), (1, 128, 128)])
def test_orthogonal_makes_all_singular_values_about_one(shape) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-4])
    values = torch.linalg.svdvals(orthogonal(matrices))
    if shape[1] != shape[2]:  # a square random matrix has singular values near zero, which five steps do not lift
        assert values.min() > 0.6
    assert values.max() < 1.25
    assert values.median() > 0.7


def test_the_loss_is_the_weighted_mean_of_the_negative_log_probability(model) -> None:
    ids = torch.tensor([[1, 5, 9, 2], [1, 7, 2, 0]])
    weights = torch.tensor([[0.1, 0.1, 1.0, 1.0], [0.1, 1.0, 1.0, 0.0]])
    logprobs = model(input_ids=ids).logits.log_softmax(-1)
    total = -sum(
        weights[row, t] * logprobs[row, t - 1, ids[row, t]] for row, t in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2))
    )
    expected = total / (2 * script.MEAN_COMPLETION)
    assert script.loss_of(model, ids, weights).item() == pytest.approx(expected.item(), rel=1e-5)
