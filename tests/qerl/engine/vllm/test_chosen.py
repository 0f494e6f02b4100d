"""The bookkeeping of chosen experts, on routers and a KV cache of vLLM's shape."""

from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.engine.interface import UNRECORDED
from qerl.engine.vllm.chosen import Chosen, Reader, check_cache, slots_of

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


def choices(tokens, step):
    """What the routers choose for tokens, ids that differ for each token, layer and step; (tokens, layers, k)."""
    ids = torch.arange(tokens * LAYERS * CHOSEN).view(tokens, LAYERS, CHOSEN) + 50 * step
    return ids % 200


def forward(routers, chosen, step, slots, padding=3):
    """A forward pass with tokens for `slots`, padded as CUDA graphs pad them."""
    ids = choices(len(slots) + padding, step)
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


def test_tokens_that_were_never_computed_are_unrecorded(chosen):
    reader = Reader(chosen, runner({"0-x": [1]}))
    assert reader.of_output(output("0", prompt=2, sampled=1)).unique().tolist() == [UNRECORDED]


def test_an_output_whose_blocks_were_taken_is_unrecorded_and_said_to_be(chosen, caplog):
    found = Reader(chosen, runner({"1-x": [1]})).of_output(output("0", prompt=2, sampled=3))
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
