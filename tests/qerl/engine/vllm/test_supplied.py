"""A call of vLLM that ends when there is enough, on requests of vLLM's shape; real ones are in
tests/qerl/engine/vllm/test_vllm_engine_gpu.py."""

import sys
from types import SimpleNamespace

import pytest
from vllm_stand_in import opened_engine, vllm_parts

from qerl.engine.interface import Request, SamplingParams, Source
from qerl.engine.vllm import requests


def flat(tokens):
    """vLLM's FlatLogprobs of so many positions with one logprob each."""
    return SimpleNamespace(
        start_indices=list(range(tokens)), end_indices=list(range(1, tokens + 1)), logprobs=[-0.5] * tokens
    )


class State:
    """A request that ends after as many tokens as the first id of its prompt says; they count up from the last id."""

    def __init__(self, prompt):
        self.prompt, self.sampled = prompt, 0

    def make_request_output(self, new_token_ids, pooling_output, finish_reason, stop_reason):
        assert (new_token_ids, pooling_output, stop_reason) == ([], None, None)
        return SimpleNamespace(outputs=[self.output(finish_reason)])

    def output(self, reason):
        ids = [self.prompt[-1] + number for number in range(1, self.sampled + 1)]
        return SimpleNamespace(finish_reason=reason, token_ids=ids, logprobs=flat(self.sampled))


class AsynchronousLLM:
    """The parts of vLLM's LLM that are used, with a step that is still under way when requests are aborted."""

    def __init__(self):
        self.llm_engine = self.output_processor = self.engine_core = self.scheduler = self
        self.request_states, self.batch_queue, self.count, self.to_forget = {}, [], 0, []
        vars(self).update(vars(vllm_parts()))

    def enqueue(self, prompts, params, use_tqdm):
        names = [f"{self.count + index}-x" for index in range(len(prompts))]
        self.count += len(prompts)
        self.request_states |= {
            name: State(prompt["prompt_token_ids"]) for name, prompt in zip(names, prompts, strict=True)
        }
        return names

    def has_unfinished_requests(self):
        return bool(self.request_states)

    def has_requests(self):
        return bool(self.request_states or self.to_forget)

    def step(self):
        self.to_forget = []
        self.batch_queue = ["the next step"] if self.request_states else []
        for state in self.request_states.values():
            state.sampled += 1
        ended = {name: state for name, state in self.request_states.items() if state.sampled == state.prompt[0]}
        self.request_states = {name: state for name, state in self.request_states.items() if name not in ended}
        return [
            SimpleNamespace(request_id=name.partition("-")[0], finished=True, outputs=[state.output("stop")])
            for name, state in ended.items()
        ]

    def abort_request(self, names, internal):
        assert internal
        self.to_forget = names
        self.request_states = {name: state for name, state in self.request_states.items() if name not in names}


class Supplied(Source):
    """Two requests, then one wherever one ends, until `wanted` have ended."""

    def __init__(self, wanted, *lengths):
        self.wanted, self.waiting, self.room, self.done = wanted, list(enumerate(lengths)), 2, {}

    def begin(self, wait, together):
        if len(self.done) >= self.wanted:
            return None
        given, self.waiting = self.waiting[: self.room], self.waiting[self.room :]
        self.room -= len(given)
        return [Request(index, [length, 100], SamplingParams(9), 10 + index) for index, length in given]

    def ended(self, indices):
        assert set(indices) <= set(self.done)
        self.room += len(indices)
        return True

    def finished(self, index, completion):
        self.done[index] = completion.token_ids


@pytest.fixture
def engine(monkeypatch, tmp_path):
    reasons = SimpleNamespace(FinishReason=SimpleNamespace(ABORT="abort"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.v1", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", reasons)
    monkeypatch.setattr(requests, "sampling_params", lambda *_: None)
    llm = AsynchronousLLM()
    return SimpleNamespace(llm=llm, engine=opened_engine(monkeypatch, tmp_path, llm))


def test_what_has_not_ended_is_taken_out_with_the_tokens_it_has(engine):
    supply = Supplied(2, 7, 2, 1, 5)
    left = engine.engine.run(supply, seed=5)
    assert supply.done == {1: [101, 102], 2: [101]}  # the third began where the second ended
    assert sorted(left) == [0]
    assert left[0].token_ids == [101, 102, 103]
    assert left[0].logprobs == [-0.5] * 3
    assert left[0].finish_reason == "unfinished"
    assert not engine.llm.has_requests()
    assert not engine.llm.batch_queue  # the step that was under way has ended


def test_a_call_ends_when_nothing_is_left(engine):
    supply = Supplied(9, 3, 1, 2)
    assert engine.engine.run(supply, seed=5) == {}
    assert supply.done == {1: [101], 0: [101, 102, 103], 2: [101, 102]}


def test_a_caller_that_has_enough_samples_nothing(engine):
    assert engine.engine.run(Supplied(0, 3), seed=5) == {}
    assert engine.llm.count == 0
