"""Packed rows: what is in them, how they are split, and attention that keeps their sequences apart."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.errors import EngineError
from training.packed_attention import (
    attend_each,
    attend_flash,
    check_config,
    deterministic_kernels,
    hidden_states,
    packed_attention_of,
)
from training.packing import pack, split_by_tokens

IDS = torch.tensor([[0, 1, 2, 3, 4, 0], [5, 6, 7, 8, 9, 10], [0, 0, 11, 12, 13, 14], [15, 16, 17, 18, 19, 0]])
MASK = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]])


def test_pack_holds_the_tokens_once_and_in_order():
    row = pack(IDS, MASK, 3)  # the third row's completion is masked
    assert row.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 16, 17, 18]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]
    assert row.starts.tolist() == [0, 4, 10, 14]
    assert row.starts.dtype == torch.int32
    assert row.longest == 6
    assert row.targets.tolist() == [3, 4, 8, 9, 10, 18]
    assert row.input_ids[0, row.predicting].tolist() == [2, 3, 7, 8, 9, 17]
    block = row.scatter(torch.arange(1.0, 7.0), (4, 3))
    assert block.tolist() == [[1, 2, 0], [3, 4, 5], [0, 0, 0], [6, 0, 0]]


@pytest.mark.parametrize(
    ("lengths", "budget", "groups"),
    [
        ([4, 4, 4, 4], 8, [[0, 1], [2, 3]]),
        ([3, 8, 5, 2], 8, [[1], [0, 2], [3]]),
        ([9, 1, 7], 8, [[0], [1, 2]]),  # longer than the budget: alone
        ([0, 2, 0, 1], 8, [[1, 3]]),
        ([], 8, []),
    ],
)
def test_rows_are_split_by_tokens(lengths, budget, groups):
    assert split_by_tokens(lengths, budget) == groups


def tiny_model(family, **changes):
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | changes)), dtype=torch.float32)


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
    ids=["qwen2", "qwen3", "llama", "mistral", "mistral-window", "qwen2-window"],
)
def test_a_packed_row_computes_what_each_sequence_computes_alone(family, changes):
    model = tiny_model(family, **changes)
    row = pack(IDS, MASK, 3)
    with packed_attention_of(model):
        packed = hidden_states(model, row)
    alone = []
    for ids, mask in zip(IDS, MASK, strict=True):
        if mask[3:].any():
            hidden = model.base_model(input_ids=ids[mask.bool()][None]).last_hidden_state[0]
            alone.append(hidden[-int(mask[3:].sum()) - 1 : -1])
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_no_sequence_reaches_another():
    """Other tokens in one sequence change no bit of the others, and get no gradient from them."""
    model = tiny_model("qwen3")
    row = pack(IDS, MASK, 3)
    with packed_attention_of(model):
        before = hidden_states(model, row)
        row.input_ids[0, 4:10] = 20
        after = hidden_states(model, row)
    changed = (before != after).any(1)
    assert changed.tolist() == [False, False, True, True, True, False]


def test_models_that_compute_something_else_are_refused():
    config = tiny_model("qwen3").config
    check_config(config)
    config.final_logit_softcapping = 30.0
    with pytest.raises(EngineError, match=r"final_logit_softcapping=30\.0"):
        check_config(config)
    config.final_logit_softcapping, config.attention_dropout = None, 0.1
    with pytest.raises(EngineError, match="attention_dropout"):
        check_config(config)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(28, 4, 128), (8, 8, 64), (16, 8, 256)])
def test_flash_attention_is_its_twin(heads, kv_heads, head_dim, window):
    """Outputs and gradients in bfloat16 against the twin in float32, within the rounding of bfloat16 inputs."""
    lengths = [640, 1, 77, 512, 300]
    starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    total, longest = sum(lengths), max(lengths)
    torch.manual_seed(0)
    tensors = [torch.randn(total, n, head_dim, device="cuda").bfloat16() for n in (heads, kv_heads, kv_heads)]
    weight = torch.randn(total, heads, head_dim, device="cuda")
    results = []
    for attend, dtype in ((attend_flash, torch.bfloat16), (attend_each, torch.float32)):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        out = attend(*inputs, starts, longest, head_dim**-0.5, window)
        (out.float() * weight).sum().backward()
        results.append([out, *(tensor.grad for tensor in inputs)])
    for fast, exact in zip(*results, strict=True):
        error = (fast.float() - exact.float()).norm() / exact.float().norm()
        assert error < 1e-2


@pytest.mark.gpu
def test_a_deterministic_gradient_repeats_to_the_bit():
    lengths = [1500, 700, 3000]
    starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    torch.manual_seed(0)
    tensors = [torch.randn(sum(lengths), n, 128, device="cuda").bfloat16() for n in (28, 4, 4)]
    gradients = []
    for _ in range(5):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        with deterministic_kernels(True):
            attend_flash(*inputs, starts, max(lengths), 128**-0.5, None).square().sum().backward()
        gradients.append([tensor.grad for tensor in inputs])
    for other in gradients[1:]:
        assert all(torch.equal(one, two) for one, two in zip(gradients[0], other, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()
