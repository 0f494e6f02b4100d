"""Calls of vLLM: what surrounds them, what is read from them, when, and which experts were chosen.

The requests, routers and KV cache here have the shape of vLLM's; real ones are in
tests/qerl/engine/vllm/test_vllm_engine_gpu.py.
"""

import gc
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from qerl.base.errors import EngineError
from qerl.engine.interface import UNRECORDED, Request, SamplingParams, Source
from qerl.engine.vllm import requests
from qerl.engine.vllm.requests import (
    NEW_OBJECTS,
    Chosen,
    Reader,
    check_cache,
    completion,
    drop_prefix_cache,
    first_at_each_position,
    rare_collections,
    serve,
    slots_of,
)
from qerl.plan.sizes import KNOWN
from tests.helpers.request_sources import Supplied
from tests.helpers.vllm_stand_in import opened_engine, vllm_parts


def test_garbage_collection_is_rare_inside_and_restored_afterwards_even_after_an_error():
    before, seen = gc.get_threshold(), []

    def interrupted():
        with rare_collections():
            seen.append(gc.get_threshold())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (seen, gc.get_threshold()) == ([NEW_OBJECTS], before)


def flat(*positions):
    """vLLM's FlatLogprobs, in which each position lists logprobs, that of the token first."""
    starts, ends, values = [], [], []
    for position in positions:
        starts.append(len(values))
        values += position
        ends.append(len(values))
    return SimpleNamespace(start_indices=starts, end_indices=ends, logprobs=values)


def test_the_logprob_of_the_token_is_read_and_empty_positions_are_left_out():
    assert first_at_each_position(flat([], [-1.0], [-2.0, -0.5])) == [-1.0, -2.0]


@pytest.mark.parametrize(("reason", "last", "said"), [("abort", -1.0, "abort"), ("stop", float("nan"), "not finite")])
def test_a_completion_that_was_aborted_or_has_no_logprob_is_an_error(reason, last, said):
    output = SimpleNamespace(finish_reason=reason, token_ids=[1, 2], logprobs=flat([-1.0], [last]))
    with pytest.raises(EngineError, match=said):
        completion(output)


class State:
    """A request that ends after as many tokens as the first id of its prompt says; they count up from the last id."""

    def __init__(self, prompt):
        self.prompt, self.sampled = prompt, 0

    def make_request_output(self, new_token_ids, pooling_output, finish_reason, stop_reason):
        assert (new_token_ids, pooling_output, stop_reason) == ([], None, None)
        return SimpleNamespace(outputs=[self.output(finish_reason)])

    def output(self, reason):
        ids = [self.prompt[-1] + number for number in range(1, self.sampled + 1)]
        return SimpleNamespace(finish_reason=reason, token_ids=ids, logprobs=flat(*[[-0.5]] * self.sampled))


class StandIn:
    """The parts of vLLM's LLM that are used. A step gives each request a token; one is still under way when requests
    are aborted, and requests stay if a call is interrupted."""

    def __init__(self):
        self.llm_engine = self.output_processor = self.engine_core = self.scheduler = self
        self.request_states, self.batch_queue, self.count, self.to_forget = {}, [], 0, []
        self.interrupt, self.aborted = None, []
        vars(self).update(vars(vllm_parts()))

    def enqueue(self, prompts, params, use_tqdm):
        names = [f"{self.count + index}-{'fedcba98'[index]}" for index in range(len(prompts))]
        self.count += len(prompts)
        states = (State(prompt["prompt_token_ids"]) for prompt in prompts)
        self.request_states |= dict(zip(names, states, strict=True))
        return names

    def has_unfinished_requests(self):
        return bool(self.request_states)

    def has_requests(self):
        return bool(self.request_states or self.to_forget)

    def step(self):
        if self.interrupt:
            raise self.interrupt
        self.to_forget = []
        self.batch_queue = ["the next step"] if self.request_states else []
        for state in self.request_states.values():
            state.sampled += 1
        ended = {name: state for name, state in self.request_states.items() if state.sampled == state.prompt[0]}
        self.forget(ended)
        scores = flat([], [-2.0], [-3.0])
        return [
            SimpleNamespace(
                request_id=name.partition("-")[0],
                finished=True,
                outputs=[state.output("length")],
                prompt_logprobs=scores,
            )
            for name, state in ended.items()
        ]

    def forget(self, names):
        self.request_states = {name: state for name, state in self.request_states.items() if name not in names}

    def abort_request(self, names, internal):
        assert internal
        self.to_forget, self.aborted = names, [*self.aborted, *names]
        self.forget(names)


def run(llm, prompts, heard=lambda index, length: None):
    """Lengths of the outputs, in the order of the prompts."""
    waiting, found = [(index, prompt, None) for index, prompt in enumerate(prompts)], {}

    def begin(idle):
        begun, waiting[:] = waiting[:], []
        return begun

    def take(done):
        for index, output in done:
            found[index] = len(output.outputs[0].token_ids)
            heard(index, found[index])

    assert serve(llm, begin, take) == {}
    return [found[index] for index in range(len(prompts))]


def test_outputs_are_read_when_they_end_and_returned_in_order():
    llm, taken = StandIn(), []

    def heard(index, length):
        taken.append((index, length, len(llm.request_states)))

    for _ in range(2):  # requests of the second call have other numbers
        assert run(llm, [[3], [1], [4], [1]], heard) == [3, 1, 4, 1]
        assert taken == [(1, 1, 2), (3, 1, 2), (0, 3, 1), (2, 4, 0)]
        taken.clear()


def test_after_an_error_in_the_callback_nothing_is_left_for_the_next_call():
    llm = StandIn()

    def refuse(index, length):
        raise ValueError(index)

    with pytest.raises(ValueError, match="1"):
        run(llm, [[3], [1], [4]], refuse)
    assert len(llm.aborted) == 2
    assert run(llm, [[2]]) == [2]


SPENT = (
    "a call of 2 sequences ran out of GPU memory: lower rollout.memory, or raise memory.cap_gib "
    "(CUDA out of memory. Tried to allocate 2 GiB.)"
)


@pytest.mark.parametrize(
    ("interrupt", "raised", "said"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand more"), EngineError, SPENT),
    ],
)
def test_an_interrupted_call_leaves_nothing_for_the_next(interrupt, raised, said):
    llm = StandIn()
    llm.interrupt = interrupt
    with pytest.raises(raised) as caught:
        run(llm, [[1], [2]])
    assert str(caught.value) == said
    assert llm.aborted == ["0-f", "1-e"]
    llm.interrupt = None
    assert run(llm, [[3]]) == [3]


def test_requests_that_were_made_directly_to_vllm_are_an_error():
    llm = StandIn()
    llm.request_states = {"17-f": State([1])}
    with pytest.raises(EngineError, match="did not ask for"):
        run(llm, [[4]])


def test_a_prefix_cache_that_stays_is_an_error():
    drop_prefix_cache(SimpleNamespace(reset_prefix_cache=lambda: True))
    with pytest.raises(EngineError, match="could not drop its prefix cache"):
        drop_prefix_cache(SimpleNamespace(reset_prefix_cache=lambda: False))


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """An engine on the stand-in, and the seeds of its requests."""
    reasons = SimpleNamespace(FinishReason=SimpleNamespace(ABORT="abort"))
    for name, module in {"vllm": SimpleNamespace(), "vllm.v1": SimpleNamespace(), "vllm.v1.engine": reasons}.items():
        monkeypatch.setitem(sys.modules, name, module)
    llm, seeds, model = StandIn(), [], SimpleNamespace(logits_processor=SimpleNamespace(scale=1.0))
    reader = SimpleNamespace(of_output=lambda output: torch.tensor([int(output.request_id)]))
    llm.model_executor.driver_worker.reader = lambda: reader
    monkeypatch.setattr(requests, "sampling_params", lambda *given: seeds.append(given[-1]))
    monkeypatch.setattr(requests, "scoring_params", lambda: None)
    return SimpleNamespace(llm=llm, engine=opened_engine(monkeypatch, tmp_path, llm, model), model=model, seeds=seeds)


@pytest.mark.parametrize(("room", "waits"), [(4, False), (3, True)])
def test_sequences_that_wait_for_room_beside_states_are_told_of(opened, monkeypatch, tmp_path, caplog, room, waits):
    """27B: a short sequence takes four blocks of 784 tokens of 64 KiB, three of which are its states."""
    config = AutoConfig.for_model(**{**KNOWN["qwen3.5-27b"], "vocab_size": 1000})
    cache = SimpleNamespace(kv_cache_bytes=lambda: room * 4 * 784 * 65536)
    monkeypatch.setitem(sys.modules, "qerl.engine.vllm.worker", cache)
    engine = opened_engine(monkeypatch, tmp_path, opened.llm, opened.model, config)
    assert engine.cache_tokens == room * 4 * 784
    engine.generate([[1]] * 4, SamplingParams(max_new_tokens=8), seed=0)
    assert ("the KV cache holds 9408 tokens and the rollout's longest 4 sequences have 12544" in caplog.text) == waits


def test_many_requests_go_to_vllm_in_parts_and_those_that_wait_are_not_lost_when_a_call_ends(monkeypatch, opened):
    monkeypatch.setattr(requests, "AT_ONCE", 2)
    llm, ended = opened.llm, []
    asked = [[1], [5], [1], [2], [1]]
    assert run(llm, asked, lambda index, length: ended.append((index, llm.count))) == [1, 5, 1, 2, 1]
    assert ended[0] == (0, 2)  # when the first ends vLLM has two requests
    given = [[(index, [9, 5], None) for index in range(5)], [], None]
    left = serve(llm, lambda idle: given.pop(0), lambda done: None)
    assert {index: len(part.token_ids) for index, part in left.items()} == {0: 2, 1: 2, 2: 1, 3: 1, 4: 0}


def test_the_engine_reports_each_completion_that_it_returns_and_scores_as_before(opened, monkeypatch):
    """It reports the very object that it returns, made once from vLLM's output."""
    made, told, engine = [], [], opened.engine
    monkeypatch.setattr(requests, "completion", lambda output: made.append(output) or completion(output))
    done = engine.generate(
        [[3], [1]], SamplingParams(9), finished=lambda *one: told.append((*one, len(opened.llm.request_states)))
    )
    assert [len(one.token_ids) for one in done] == [3, 1]
    assert told == [(1, done[1], 1), (0, done[0], 0)]
    assert all(one is done[index] for index, one, _ in told)
    assert len(made) == 2
    assert engine.generate([[3], [1]], SamplingParams(9)) == done
    assert engine.score([[2], [1, 5]], [[5, 6], [6]], 0.5) == [[-2.0, -3.0], [-3.0]]
    assert opened.model.logits_processor.scale == 1.0


class Turns(Source):
    """Conversations of two turns: the first has as many tokens as the prompt's first id says, the second one fewer."""

    def __init__(self, *lengths):
        self.waiting = [(index, [length]) for index, length in enumerate(lengths)]
        self.asked, self.done = [], []

    def begin(self, wait, together):
        self.asked.append((wait, together))
        given, self.waiting = self.waiting, []
        return [Request(index, prompt, SamplingParams(9), 10 * len(prompt) + index) for index, prompt in given]

    def finished(self, index, completion):
        tokens = len(completion.token_ids)
        self.done.append((index, tokens))
        if tokens > 1:
            self.waiting.append((index, [tokens - 1, *completion.token_ids]))


def test_turns_of_a_conversation_join_the_others_as_soon_as_they_are_ready(opened):
    turns = Turns(3, 1)
    assert opened.engine.run(turns, seed=5) == {}
    assert turns.done == [(1, 1), (0, 3), (0, 2), (0, 1)]
    assert turns.asked[0] == (True, False)  # nothing runs yet
    assert (False, False) in turns.asked
    assert turns.asked[-1] == (True, False)
    assert len(set(opened.seeds)) == 4
    assert opened.llm.request_states == {}


def test_a_completion_carries_the_experts_that_were_chosen_for_it(opened):
    found = opened.engine.generate([[3], [1], [2]], SamplingParams(9), seed=5)
    assert [int(one.experts) for one in found] == [0, 1, 2]
    turns = Turns(2)
    assert opened.engine.run(turns, seed=5) == {}
    assert turns.done == [(0, 2), (0, 1)]


def supplied(wanted, *lengths):
    """Completions of these lengths, two at a time, until `wanted` have ended."""
    asked = (Request(index, [length, 100], SamplingParams(9), index) for index, length in enumerate(lengths))
    return Supplied(wanted, asked)


def test_what_has_not_ended_is_taken_out_with_the_tokens_it_has(opened):
    supply = supplied(2, 7, 2, 1, 5)
    left = opened.engine.run(supply, seed=5)
    assert {index: one.token_ids for index, one in supply.done.items()} == {1: [101, 102], 2: [101]}
    assert supply.told == [1, 2]  # the third began where the second ended
    assert sorted(left) == [0]
    assert left[0].token_ids == [101, 102, 103]
    assert left[0].logprobs == [-0.5] * 3
    assert left[0].finish_reason == "unfinished"
    assert not opened.llm.has_requests()
    assert not opened.llm.batch_queue  # the step that was under way has ended


def test_a_call_ends_when_nothing_is_left_or_the_caller_has_enough(opened):
    assert opened.engine.run(supplied(0, 3), seed=5) == {}
    assert opened.llm.count == 0
    supply = supplied(9, 3, 1, 2)
    assert opened.engine.run(supply, seed=5) == {}
    assert {index: one.token_ids for index, one in supply.done.items()} == {1: [101], 0: [101, 102, 103], 2: [101, 102]}


LAYERS, CHOSEN, BLOCK = 3, 2, 4


class Router:
    def set_capture_fn(self, function):
        self.capture = function


@pytest.fixture
def routers():
    return [Router() for _ in range(LAYERS)]


@pytest.fixture
def chosen(routers):
    made = Chosen(routers, CHOSEN, 200, tokens=16, device=torch.device("cpu"))
    made.allocate_(10 * BLOCK)
    return made


def forward(routers, chosen, step, slots, padding=3):
    """A forward pass with tokens for `slots`, padded as CUDA graphs pad them; returns what the routers chose for them,
    ids that differ for each token, layer and step; (tokens, layers, k)."""
    tokens = len(slots) + padding
    ids = (torch.arange(tokens * LAYERS * CHOSEN).view(tokens, LAYERS, CHOSEN) + 50 * step) % 200
    for layer, router in enumerate(routers):
        router.capture(ids[:, layer].int())
    chosen.keep_(torch.tensor(slots))
    return ids[: len(slots)].byte()


def runner(requests):
    """vLLM's runner, with the blocks of requests by their names."""
    table = torch.zeros(len(requests), 6, dtype=torch.int32)
    for row, blocks in enumerate(requests.values()):
        table[row, : len(blocks)] = torch.tensor(blocks)
    states = SimpleNamespace(req_id_to_index={name: row for row, name in enumerate(requests)})
    tables = SimpleNamespace(block_tables=[SimpleNamespace(gpu=table)], kernel_block_sizes=[BLOCK], cp_size=1)
    return SimpleNamespace(req_states=states, block_tables=tables)


def output(name, prompt, sampled):
    return SimpleNamespace(
        request_id=name, prompt_token_ids=[0] * prompt, outputs=[SimpleNamespace(token_ids=[0] * sampled)]
    )


def test_a_request_is_read_through_its_blocks_in_their_order(routers, chosen):
    slots = slots_of(torch.tensor([7, 2, 5]), BLOCK, 10).tolist()
    assert slots == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21]
    prefill = forward(routers, chosen, 1, slots[:7])
    decoded = [forward(routers, chosen, step, [slot]) for step, slot in enumerate(slots[7:], 2)]
    reader = Reader(chosen, runner({"3-abc": [7, 2, 5], "31-abc": [9]}))
    found = reader.of_output(output("3", prompt=7, sampled=4))
    assert found.dtype == torch.uint8
    assert torch.equal(found, torch.cat([prefill, *decoded]))


def test_a_prompt_that_was_found_in_the_cache_has_the_choices_of_who_computed_it(routers, chosen):
    shared = forward(routers, chosen, 1, slots_of(torch.tensor([4, 1]), BLOCK, 8).tolist())
    own = forward(routers, chosen, 2, slots_of(torch.tensor([6]), BLOCK, 2).tolist())
    reader = Reader(chosen, runner({"0-x": [4, 1, 3], "1-y": [4, 1, 6]}))
    assert torch.equal(reader.of_output(output("1", prompt=8, sampled=3)), torch.cat([shared, own]))


def test_tokens_never_computed_or_whose_blocks_were_taken_are_unrecorded(chosen, caplog):
    reader = Reader(chosen, runner({"0-x": [1]}))
    assert reader.of_output(output("0", prompt=2, sampled=1)).unique().tolist() == [UNRECORDED]
    assert not caplog.records
    found = reader.of_output(output("1", prompt=2, sampled=3))
    assert torch.equal(found, torch.full((4, LAYERS, CHOSEN), UNRECORDED, dtype=torch.uint8))
    assert "KV cache was full" in caplog.text


def test_what_a_byte_cannot_name_is_refused_at_the_start(routers):
    with pytest.raises(EngineError, match="256 experts"):
        Chosen(routers, CHOSEN, 256, tokens=4, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("groups", "tables"), [(2, SimpleNamespace(cp_size=1)), (1, SimpleNamespace(cp_size=2)), (1, None)]
)
def test_a_cache_of_another_kind_is_refused(groups, tables):
    with pytest.raises(EngineError, match="router_replay: false"):
        check_cache(groups, tables)
