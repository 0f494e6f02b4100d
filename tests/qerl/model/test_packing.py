"""Packed rows: what they hold, how they are split, and attention that keeps their sequences apart.

The tests that need a card last ran on an H200 on 2026-11-22. Without a card but with triton installed, run those of the
kernel that sums copies by `TRITON_INTERPRET=1 pytest -m gpu`.
"""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qerl.base.errors import EngineError
from qerl.checkpoint.adapter import attach_lora
from qerl.model.layers import fuse_
from qerl.model.logprobs import dense_head, token_logprobs
from qerl.model.packed_attention import (
    check_config,
    hidden_states,
    make_backward_deterministic,
    packed_attention,
    packed_attention_of,
)
from qerl.model.packing import (
    Copies,
    Layout,
    Lengths,
    copies_of,
    gather_rows,
    pack,
    row_lengths,
    split_by_tokens,
    sum_copies,
)
from tests.helpers.layer_policies import tiny_model

IDS = torch.tensor([[0, 1, 2, 3, 4, 0], [5, 6, 7, 8, 9, 10], [0, 0, 11, 12, 13, 14], [0, 1, 2, 17, 18, 19]])
MASK = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]])


def test_pack_holds_each_prompt_once_and_each_completion():
    row = pack(IDS, MASK, 3)  # first and last row share a prompt, the third completion is masked
    assert row.input_ids.tolist() == [[1, 2, 3, 4, 17, 18, 19, 5, 6, 7, 8, 9, 10]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1, 2, 3, 4, 5]]
    sequences = row.sequences
    assert sequences.query_starts.tolist() == [0, 2, 4, 7, 13]
    assert sequences.key_starts.tolist() == [0, 2, 6, 11, 17]
    assert sequences.keys.rows.tolist() == [0, 1, *(0, 1, 2, 3), *(0, 1, 4, 5, 6), *range(7, 13)]
    assert (sequences.longest_query, sequences.longest_key) == (6, 6)
    assert sequences.query_starts.dtype == sequences.key_starts.dtype == torch.int32
    assert row.targets.tolist() == [3, 4, 17, 18, 19, 8, 9, 10]
    assert row.input_ids[0, row.predicting.rows].tolist() == [2, 3, 2, 17, 18, 7, 8, 9]
    block = row.scatter(torch.arange(1.0, 9.0), (4, 3))
    assert block.tolist() == [[1, 2, 0], [6, 7, 8], [0, 0, 0], [3, 4, 5]]


def test_different_prompts_share_nothing_and_repeated_keys_of_a_shared_one_are_counted():
    apart = pack(IDS[:2], MASK[:2], 3)
    assert apart.sequences.keys is None
    assert apart.sequences.query_starts.tolist() == apart.sequences.key_starts.tolist() == [0, 4, 10]
    assert apart.cost == 10
    ids = torch.arange(1, 15).repeat(5, 1)
    ids[:, 12:] += torch.arange(5)[:, None]
    row = pack(ids, torch.ones_like(ids), 2)
    assert (row.input_ids.shape[1], len(row.sequences.keys.rows)) == (22, 12 + 5 * 14)
    assert row.cost == 22 + 60 // 6


@pytest.mark.parametrize(
    ("rows", "budget", "groups"),
    [
        ([(0, 1, 3), (1, 1, 3), (2, 1, 3), (3, 1, 3)], 8, [[0, 1], [2, 3]]),
        ([(0, 4, 2), (0, 4, 2), (0, 4, 2)], 8, [[0, 1], [2]]),  # 4 + 2 + 2, and the prompt once again in the second
        ([(0, 4, 2), (1, 1, 1), (0, 4, 2)], 8, [[0, 2], [1]]),  # rows with the same prompt stay together
        ([(0, 12, 2), (0, 12, 2), (0, 12, 2)], 20, [[0, 1], [2]]),  # 12 + 2, then 2 + 12 / 6, which makes 18
        ([(0, 1, 8), (0, 1, 1), (1, 1, 6)], 8, [[0], [2], [1]]),  # a row above the budget stays alone
        ([(0, 1, 2), (1, 1, 5), (2, 1, 4), (3, 1, 5)], 6, [[1], [3], [2], [0]]),
        ([(0, 1, 0), (0, 1, 2), (1, 1, 0), (1, 1, 1)], 8, [[1, 3]]),
        ([(0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 1, 2)], 9, [[0, 1], [2, 3]]),  # filling up would give three and one
        ([(0, 1, 7), (1, 1, 7), (1, 1, 2), (2, 1, 7)], 10, [[1, 2], [0], [3]]),
        ([], 8, []),
    ],
)
def test_rows_are_split_by_tokens(rows, budget, groups):
    assert split_by_tokens([Lengths(*row) for row in rows], budget) == groups


def test_row_lengths_number_the_prompts():
    assert row_lengths(IDS[:, :3], MASK[:, :3], [2, 3, 0, 3]) == [(0, 2, 2), (1, 3, 3), (2, 1, 0), (0, 2, 3)]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 3}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1}),
    ],
)
def test_a_packed_row_computes_the_same_as_each_sequence_alone(family, changes):
    model = tiny_model(family, initializer_range=0.3, **changes)
    row = pack(IDS, MASK, 3)
    with torch.no_grad(), packed_attention_of(model):
        packed = hidden_states(model, row)
    alone = torch.zeros(4, 3, 32)
    for ids, mask, place in zip(IDS, MASK, (alone[i] for i in range(4)), strict=True):
        if count := int(mask[3:].sum()):
            hidden = model.base_model(input_ids=ids[mask.bool()][None]).last_hidden_state
            place[:count] = hidden[0, -count - 1 : -1].detach()
    torch.testing.assert_close(packed, alone.view(12, 32)[row.places], rtol=1e-5, atol=1e-5)


def test_heads_wider_than_flash_attentions_give_the_same(monkeypatch):
    row, generator = pack(IDS, MASK, 3), torch.Generator().manual_seed(1)
    tokens = row.input_ids.shape[1]
    qkv = [torch.randn(1, heads, tokens, 8, generator=generator) for heads in (4, 2, 2)]
    expected, _ = packed_attention(torch.nn.Module(), *qkv, None, sequences=row.sequences)
    monkeypatch.setattr("qerl.model.packed_attention.MAX_HEAD_DIM", 4)
    found, _ = packed_attention(torch.nn.Module(), *qkv, None, sequences=row.sequences)
    torch.testing.assert_close(found, expected)


def test_a_window_that_a_familys_attention_does_not_read_changes_nothing():
    """A config may hold any key; Llama's attention of transformers knows no window."""
    row, hidden = pack(IDS, MASK, 3), []
    for changes in ({}, {"sliding_window": 2}):
        model = tiny_model("llama", **changes)
        fuse_(model)
        attach_lora(model, 4, 8)
        with torch.no_grad(), packed_attention_of(model):
            hidden.append(hidden_states(model, row))
    assert torch.equal(*hidden)


def test_no_completion_affects_another():
    """Other tokens in one completion change no bit of the others or of the shared prompt."""
    model = tiny_model("qwen3")
    row = pack(IDS, MASK, 3)
    with packed_attention_of(model):
        before = hidden_states(model, row)
        row.input_ids[0, 2:4] = 20  # the completion of the first row, in which one token predicts the next
        after = hidden_states(model, row)
    assert (before != after).any(1).tolist() == [False, True, *[False] * 6]


def grouped_rows(prompts, group, generator):
    """(ids, mask, completion width): `group` rows per prompt, all of different lengths; prompts are padded left."""
    width, longest = 90, 70
    ids = torch.randint(1, 32, (len(prompts) * group, longest + width), generator=generator)
    mask = torch.zeros_like(ids)
    for row in range(len(ids)):
        prompt = prompts[row // group]
        ids[row, :longest] = ids[row // group * group, :longest]
        mask[row, longest - prompt : longest + int(torch.randint(1, width, (1,), generator=generator))] = 1
    return ids, mask, width


def outputs_and_gradients(model, row, places):
    """Hidden states in the order of `places`, and the gradient of a fixed function of them for every weight."""
    model.zero_grad()
    with packed_attention_of(model):
        hidden = hidden_states(model, row)
    hidden = hidden.float()[torch.argsort(row.places)] * torch.linspace(-1, 1, hidden.shape[1], device=hidden.device)
    (hidden * torch.cos(torch.arange(places, device=hidden.device))[:, None]).sum().backward()
    gradients = [p.grad.flatten().float() for p in model.base_model.parameters() if p.requires_grad]
    return torch.cat([hidden.detach().flatten(), *gradients]).cpu()


def shared_and_apart(monkeypatch, device, dtype):
    """`outputs_and_gradients` of rows packed with one copy of each prompt, with one per row, and in float32."""
    from qerl.model import packing

    ids, mask, width = grouped_rows([70, 33, 1, 64], 4, torch.Generator().manual_seed(5))
    model = tiny_model("qwen2", head_dim=64, hidden_size=256, max_position_embeddings=256).requires_grad_()
    results = []
    for share, kind in ((True, dtype), (False, dtype), (False, torch.float32)):
        monkeypatch.setattr(packing, "SHARE_PROMPTS", share)
        row = packing.pack(ids.to(device), mask.to(device), width)
        results.append(outputs_and_gradients(model.to(device, kind), row, len(row.places)))
        assert (row.sequences.keys is not None) == share
    return results


def test_shared_prompts_give_the_same_gradients_as_separate_rows(monkeypatch):
    shared, apart, _ = shared_and_apart(monkeypatch, "cpu", torch.float32)
    assert (shared - apart).norm() / apart.norm() < 1e-5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_shared_prompts_in_bfloat16_are_as_exact_as_separate_rows(monkeypatch, device):
    """On a card bfloat16 uses flash attention, float32 the twin."""
    shared, apart, exact = shared_and_apart(monkeypatch, device, torch.bfloat16)
    errors = [((result - exact).norm() / exact.norm()).item() for result in (shared, apart)]
    assert errors[0] < 1.2 * errors[1]
    assert errors[1] < 4e-2


def test_models_that_compute_something_else_are_refused():
    config = tiny_model("qwen3").config
    check_config(config)
    config.final_logit_softcapping = 30.0
    with pytest.raises(EngineError, match=r"final_logit_softcapping=30\.0"):
        check_config(config)
    config.final_logit_softcapping, config.attention_dropout = None, 0.1
    with pytest.raises(EngineError, match="attention_dropout"):
        check_config(config)
    with pytest.raises(EngineError, match="does not hand packed sequences on"):  # like the attention of StableLM
        packed_attention(torch.nn.Module(), *[torch.zeros(1, 1, 2, 8)] * 3, None)


def test_the_strict_switch_is_on_only_during_the_backward_of_one_node():
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(
                (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
            )
            return grad

    inner = Watched.apply(torch.ones(2, requires_grad=True))
    make_backward_deterministic(inner.grad_fn)
    Watched.apply(inner).sum().backward()
    assert seen == [(False, False), (True, False)]  # in the outer node, then in the requested one
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_without_sharing_every_row_has_its_own_prompt(monkeypatch):
    from qerl.model import packing

    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    shared = packing.pack(ids, mask, 2)
    lengths = packing.row_lengths(ids[:, :2], mask[:, :2], [2, 1])
    assert shared.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert [row.prompt for row in lengths] == [0, 0]
    monkeypatch.setattr(packing, "SHARE_PROMPTS", False)
    apart = packing.pack(ids, mask, 2)
    assert apart.input_ids.tolist() == [[5, 6, 7, 8, 5, 6, 9]]
    assert apart.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert apart.targets.tolist() == shared.targets.tolist() == [7, 8, 9]
    assert [row.prompt for row in packing.row_lengths(ids[:, :2], mask[:, :2], [2, 1])] == [0, 1]


class Transposes(TorchDispatchMode):
    """Records the strides of tensors that are copied although their rows are not in order."""

    def __init__(self):
        super().__init__()
        self.strides = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_):
            stride = args[-1].stride()
            if list(stride) != sorted(stride, reverse=True):
                self.strides.append(stride)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_passes_gradients_on_without_transposing_them(family):
    """The backward pass once copied q, k and v twice per layer: into zeros, and back into the order of rows."""
    model, row = tiny_model(family), pack(IDS, MASK, 3)
    fuse_(model)
    embedded = model.get_input_embeddings()(row.input_ids).requires_grad_()
    arguments = {"position_ids": row.position_ids, "use_cache": False, "sequences": row.sequences}
    with packed_attention_of(model):
        out = model.base_model(inputs_embeds=embedded, **arguments).last_hidden_state
    with Transposes() as transposes:
        out.sum().backward()
    assert transposes.strides == []


@pytest.mark.gpu
def test_a_micro_batch_never_waits_for_the_gpu():
    """That holds from packing to the gradients, so that the GPU is never idle between micro-batches."""
    ids, mask, width = grouped_rows([70, 33], 4, torch.Generator().manual_seed(5))
    model = tiny_model("qwen2", head_dim=64, hidden_size=256, max_position_embeddings=256)
    model.to("cuda", torch.bfloat16)
    fuse_(model)
    scale = torch.ones(256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        row = pack(ids, mask, width, Layout(torch.device("cuda")))
        embedded = model.get_input_embeddings()(row.input_ids) * scale
        arguments = {"position_ids": row.position_ids, "use_cache": False, "sequences": row.sequences}
        with packed_attention_of(model):
            hidden = model.base_model(inputs_embeds=embedded, **arguments).last_hidden_state.squeeze(0)
        head = dense_head(model.get_output_embeddings(), 1.0)
        logprobs, _ = token_logprobs(gather_rows(hidden, row.predicting), row.targets, head)
        row.scatter(logprobs, (len(ids), width)).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scale.grad.isfinite().all()


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def test_copies_list_their_rows_and_rows_their_copies():
    copies = copies_of(torch.tensor([3, 0, 3, 1, 3]), 5)
    assert copies.rows.tolist() == [3, 0, 3, 1, 3]
    assert copies.order.tolist() == [1, 3, 0, 2, 4]
    assert copies.starts.tolist() == [0, 1, 2, 2, 5, 5]
    assert [part.tolist() for part in copies_of(torch.tensor([], dtype=torch.long), 2)] == [[], [], [0, 0, 0]]


def test_gradients_equal_those_of_plain_indexing():
    torch.manual_seed(0)
    rows, index = torch.randn(6, 2, 4, requires_grad=True), torch.randint(6, (20,))
    upstream = torch.randn(20, 2, 4)
    results = []
    for taken in (gather_rows(rows, copies_of(index, 6)), rows[index]):
        results.append((taken, *torch.autograd.grad((taken * upstream).sum(), rows)))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)


def test_sums_are_rounded_once():
    """The sum is 256 + 63 x 1: in bfloat16, adding ones to 256 would change nothing."""
    grad = torch.ones(64, 1, dtype=torch.bfloat16)
    grad[0] = 256
    assert sum_copies(grad, copies_of(torch.zeros(64, dtype=torch.long), 1)).item() == 320  # 319 is halfway


@pytest.mark.gpu(instead=INTERPRETED)
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 128), (3584,), (3, 7)], ids=str)
def test_the_kernel_agrees_with_its_twin_and_repeats_to_the_bit(shape, dtype):
    from qerl.model import kernels

    generator = torch.Generator().manual_seed(3)
    index = torch.cat([torch.arange(2, 60), torch.randint(2, 20, (120,), generator=generator)])  # row 0 has no copy
    grad = torch.randn(len(index), *shape, generator=generator).to(dtype)
    expected = sum_copies(grad, copies_of(index, 60))  # on the CPU they are added one after another, as in the kernel
    copies = Copies(*(part.to(DEVICE) for part in copies_of(index, 60)))
    grad = grad.to(DEVICE)
    total = kernels.sum_copies(grad, copies)
    assert total.dtype == dtype
    assert torch.equal(total.cpu(), expected)
    assert all(torch.equal(total, kernels.sum_copies(grad, copies)) for _ in range(3))
    assert (total[:2] == 0).all()
