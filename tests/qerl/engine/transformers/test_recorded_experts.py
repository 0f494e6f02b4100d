"""The experts that the transformers engine says it chose, against the router's choice in a pass over the whole text."""

from dataclasses import replace

import pytest
import torch

from qerl.engine.interface import UNRECORDED, Completion, Request, SamplingParams, extended, joined, of_length
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.engine.transformers.sampling import recorded_experts
from tests.helpers.bases import write_base
from tests.helpers.request_sources import Supplied

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [5, 6, 7]]
SAMPLED = SamplingParams(max_new_tokens=9)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "moe", "qwen3_moe")


@pytest.fixture(scope="module")
def engine(moe):
    return open_engine(str(moe), "bf16", EngineOptions(engine="transformers", records_experts=True))


def chosen(engine, prompt, completion):
    """What the model's routers choose in one pass over the tokens that were read, (tokens, layers, k)."""
    with torch.no_grad(), recorded_experts(engine.policy_model(), True) as found:
        ids = torch.tensor([[*prompt, *completion.token_ids[:-1]]])
        engine.policy_model()(ids)
        return found(0, 0, ids.shape[1])


def test_a_completion_says_what_was_chosen_for_each_token_that_was_read(engine):
    limits = [replace(SAMPLED, max_new_tokens=tokens) for tokens in (9, 4, 7, 1)]
    completions = engine.generate(PROMPTS, limits, seed=1)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = chosen(engine, prompt, completion)
        assert completion.experts.dtype == torch.uint8
        assert completion.experts.shape == (len(prompt) + len(completion.token_ids) - 1, 2, 2)
        assert torch.equal(completion.experts.sort(-1).values, expected.sort(-1).values)


def test_an_unfinished_completion_and_what_continues_it_say_it_too(engine):
    lengths = [replace(SAMPLED, max_new_tokens=tokens) for tokens in (9, 4, 7, 6)]
    requests = [Request(row, prompt, lengths[row], row) for row, prompt in enumerate(PROMPTS)]
    begun = engine.run(source := Supplied(1, requests, room=4), 1)[0]
    assert begun.finish_reason == "unfinished"
    assert [len(one.token_ids) for one in source.done.values()] == [4]
    last = Supplied(1, [replace(requests[0], prompt=[*PROMPTS[0], *begun.token_ids])])
    assert engine.run(last, 2) == {}
    whole = joined(begun, last.done[0])
    expected = chosen(engine, PROMPTS[0], whole)
    assert torch.equal(whole.experts.sort(-1).values, expected.sort(-1).values)
    assert torch.equal(whole.experts[: len(begun.experts)], begun.experts)


def test_nothing_is_recorded_unless_it_is_asked_for(moe, base):
    for folder, asked in ((moe, False), (base, True)):
        engine = open_engine(str(folder), "bf16", EngineOptions(engine="transformers", records_experts=asked))
        assert engine.generate(PROMPTS[:1], SAMPLED, seed=1)[0].experts is None


def test_choices_of_a_longer_text_keep_those_that_were_made_first():
    first, whole = (torch.full((length, 2, 2), value, dtype=torch.uint8) for length, value in ((3, 1), (5, 2)))
    assert extended(first, whole)[:, 0, 0].tolist() == [1, 1, 1, 2, 2]
    assert extended(None, whole) is whole
    assert of_length(first, 5)[:, 1, 1].tolist() == [1, 1, 1, UNRECORDED, UNRECORDED]
    assert of_length(whole, 2)[:, 0, 0].tolist() == [2, 2]
    assert joined(Completion([1], [0.0], "unfinished"), Completion([2], [0.0], "stop")).experts is None
