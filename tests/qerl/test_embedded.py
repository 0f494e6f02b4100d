"""The embedded models that ship with qerl: their tokenizer, their cards, and what they can do, also in 4 bits."""

import hashlib
import itertools
import json
import re

import pytest
import torch

from qerl.checkpoint.experts import decoder_of
from qerl.checkpoint.folder import EMBEDDED, TINY_FOLDER
from qerl.checkpoint.load import load_model, load_tokenizer
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import read_json
from qerl.data.grading.grade import grade
from qerl.data.tasks import build_messages, render_prompt
from qerl.data.tasks.arith import rows
from quantize.run import quantize_checkpoint
from tests.helpers.roundings import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_FOLDER)


TEXTS = [
    "<|im_start|>user\nMia has 4 boxes.<|im_end|>\n<|im_start|>assistant\n",
    "4 * 6 = 24\n24 - 5 = 19\n#### 19<|im_end|>",
    "  two  leading, trailing \t\n\n ",
    "It's $1,800.50 -- DON'T pay £12 or 12%: \\boxed{\\frac{1}{2}}",
    "naïve café, 数学 42, \U0001f600, e\u0301 stays decomposed",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_reproduces_any_text_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_have_one_id_each_as_the_configs_say(tokenizer):
    config = json.loads((TINY_FOLDER / "config.json").read_text())
    generation = json.loads((TINY_FOLDER / "generation_config.json").read_text())
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>")["input_ids"] == [0, 1, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    for values in (config, generation):
        assert (values["pad_token_id"], values["eos_token_id"]) == (0, 2)
    assert len(tokenizer) <= config["vocab_size"]


def test_each_digit_is_one_token(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("#### 42")["input_ids"]) == ["####", "Ġ4", "2"]


def test_the_chat_template_renders_system_user_and_assistant_turns(tokenizer):
    turns = [("system", "Be brief."), ("user", "2 + 3?"), ("assistant", "#### 5")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n"
        "<|im_start|>assistant\n#### 5<|im_end|>\n"
    )


@pytest.mark.parametrize(("name", "size"), [("tiny", 4_000_000), ("tiny_experts", 2_500_000)])
def test_the_card_states_the_hash_of_the_weights_and_the_folder_is_small(name, size):
    folder = EMBEDDED[name]
    stated = re.search(r"sha256 `([0-9a-f]{64})`", (folder / "README.md").read_text())
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == stated[1]
    assert sum(file.stat().st_size for file in folder.iterdir()) < size
    assert (folder / "tokenizer.json").read_bytes() == (TINY_FOLDER / "tokenizer.json").read_bytes()
    assert resolve_model(name).path == folder


def accuracy(model, tokenizer, count, begin="", never=None):
    """Of greedy completions of the first test problems, which begin with `begin` and not with the token `never`."""
    given = list(itertools.islice(rows("test"), count))
    prompts = [render_prompt(tokenizer, build_messages("arith", row["question"])) for row in given]
    texts = [tokenizer.decode(ids) + begin for ids in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    suppressed = [tokenizer.convert_tokens_to_ids(never)] if never else None
    ids = model.generate(**inputs, max_new_tokens=48, do_sample=False, begin_suppress_tokens=suppressed)
    found = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return (
        sum(grade("arith", begin + text, row["answer"]).correct for text, row in zip(found, given, strict=True)) / count
    )


@pytest.mark.parametrize("packed", [False, True])
def test_the_model_solves_by_working_out_and_rarely_at_once(tokenizer, tmp_path, packed):
    """The ranges are the accuracies of the model card, plus or minus three standard deviations for 64 problems."""
    if packed:
        quantize_checkpoint("tiny", tmp_path / "packed", ROUNDING)
    model = load_model(tmp_path / "packed", "nvfp4") if packed else load_model(TINY_FOLDER, "bf16")
    assert accuracy(model, tokenizer, 64, never="####") >= 0.85
    assert accuracy(model, tokenizer, 64, begin="####") <= 0.2
    assert 0.15 <= accuracy(model, tokenizer, 64) <= 0.55


def test_packed_the_experts_work_problems_out_and_all_are_chosen(tokenizer, tmp_path):
    """The card's accuracy is 0.984; three standard deviations for so few problems are 0.1."""
    quantize_checkpoint("tiny_experts", tmp_path / "packed", ROUNDING)
    model = load_model(tmp_path / "packed", "nvfp4")
    decoder = decoder_of(read_json(EMBEDDED["tiny_experts"] / "config.json"), "tiny_experts")
    blocks = [layer.mlp for layer in model.model.layers]
    for block in blocks:
        block.recorded = []
    assert accuracy(model, tokenizer, 16, never="####") > 0.85
    for block in blocks:
        ids = torch.cat([each.flatten() for each in block.recorded])
        assert set(ids.tolist()) == set(range(decoder.experts))
