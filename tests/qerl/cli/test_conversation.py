"""Conversations with the embedded model: prompts hold the history, full contexts drop the oldest, pipes work."""

import io
import sys
from dataclasses import replace

import pytest

from qerl.base.errors import CheckpointError, ConfigError, EngineError
from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.resolve import resolve_model
from qerl.cli.chat import ChatOptions, Conversation, Opened, chat, talk
from qerl.engine.interface import SamplingParams
from qerl.engine.open import open_model
from qerl.engine.options import EngineOptions

QUESTION = "Anna has 4 apples and buys 3 more. How many apples does Anna have?"


class Recorded:
    """An engine that records the prompts it is given."""

    def __init__(self, engine):
        self.engine, self.prompts, self.seeds = engine, [], []

    def generate(self, prompts, sampling, seed=None):
        self.prompts += prompts
        self.seeds.append(seed)
        return self.engine.generate(prompts, sampling, seed)


@pytest.fixture(scope="module")
def engine():
    return open_model(resolve_model("tiny"), EngineOptions(engine="transformers"))


@pytest.fixture
def conversation(engine):
    sampling = SamplingParams(24, temperature=0.0)
    return Conversation(Opened(Recorded(engine), load_tokenizer("tiny"), 400), sampling, "Be brief.")


def text_of(conversation, number):
    return conversation.model.tokenizer.decode(conversation.model.engine.prompts[number])


def test_the_second_prompt_holds_the_first_exchange(conversation):
    first = conversation.ask(QUESTION)
    conversation.ask("And twice that?")
    prompt = text_of(conversation, 1)
    assert prompt.index("Be brief.") < prompt.index(QUESTION) < prompt.index("And twice that?")
    assert f"<|im_start|>assistant\n{first}<|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    assert conversation.model.engine.seeds == [0, 1]
    conversation.turns.clear()
    conversation.ask(QUESTION)
    assert text_of(conversation, 2) == text_of(conversation, 0)


def test_a_full_context_drops_the_oldest_messages_and_says_so(conversation, caplog):
    caplog.set_level("INFO")
    conversation.ask(QUESTION)
    conversation.model = replace(conversation.model, context=len(conversation.model.engine.prompts[0]) + 24 + 5)
    conversation.ask("What is 5 plus 6?")
    assert QUESTION not in text_of(conversation, 1)
    assert "oldest exchange is forgotten" in caplog.text
    conversation.model = replace(conversation.model, context=30)
    with pytest.raises(EngineError, match="shorten it, lower max_new_tokens"):
        conversation.ask(QUESTION)


def test_each_line_is_a_message_and_commands_are_not(conversation):
    answers = io.StringIO()
    talk(conversation, io.StringIO(f"{QUESTION}\n\n/reset\n{QUESTION}\n/exit\n{QUESTION}\n"), answers)
    lines = answers.getvalue().strip().split("\n")
    assert len(conversation.model.engine.prompts) == 2
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]


def test_a_pipe_works_as_typed(here, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n"))
    code, out, err = here("chat", "--model", "tiny", "--temperature", 0, "--max-new-tokens", 8)
    assert code == 0, err
    assert out.strip()
    assert "16-bit model" in err  # the model is named on stderr; stdout has answers only
    assert "16-bit model" not in out


def test_mistakes_are_refused_before_the_weights_are_loaded():
    with pytest.raises(ConfigError, match="leaves no room in the context of 2048"):
        chat(ChatOptions("tiny", max_new_tokens=2048))
    with pytest.raises(CheckpointError, match="is a model, not an adapter"):
        chat(ChatOptions("tiny", "tiny"))
