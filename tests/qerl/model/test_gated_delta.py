"""Linear attention over packed rows. Oracles: transformers' model on one row at a time, and the recurrence itself.

Gemma 4, whose layers differ too, is held to the same oracle.
"""

import sys
import types

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.base.errors import EngineError
from qerl.checkpoint.adapter import adapter_tensors, attach_lora
from qerl.checkpoint.adapter_file import linear_targets
from qerl.config.names import PROJECTIONS
from qerl.model import packing
from qerl.model.gated_delta import delta_rule, delta_rule_twin, fla_rule, keep_timings, states_of
from qerl.model.layers import fuse_, recompute_by_
from qerl.model.logprobs import token_logprobs
from qerl.model.packed_attention import check_config, has_states, head_of, hidden_states, packed_attention_of
from qerl.model.packing import Layout, pack

PROMPT, COMPLETION = 10, 80  # a chunk of the recurrence has 64 tokens
LENGTHS = [(10, 80), (10, 70), (10, 2), (2, 75), (2, 3), (7, 1), (4, 66)]  # of prompts and completions; some are shared
SHARED = {1: 0, 2: 0, 4: 3}  # a row whose prompt is that of another one


SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0},
}
OF_FAMILY = {
    "qwen3_5_text": {
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 16},
    },
    "gemma4_text": {
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "global_head_dim": 32},
        **{"num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
        **{"final_logit_softcapping": 6.0},
    },
}


def tiny_hybrid(family="qwen3_5_text"):
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **SIZES, **OF_FAMILY[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("dt_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("A_log"):
                parameter.uniform_(-3, 0)  # a state that is not forgotten at once
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    return model.requires_grad_(False).eval()


def rows():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 64, (len(LENGTHS), PROMPT + COMPLETION), generator=generator)
    mask = torch.zeros_like(ids)
    for number, (prompt, completion) in enumerate(LENGTHS):
        mask[number, PROMPT - prompt : PROMPT + completion] = 1
    for row, other in SHARED.items():
        ids[row, :PROMPT] = ids[other, :PROMPT]
    return ids, mask


def one_by_one(model, ids, mask):
    """Hidden states (B, C, hidden) that predict each completion token, from a forward pass of one row each."""
    found = []
    for row, (one, own) in enumerate(zip(ids, mask.bool(), strict=True)):
        hidden = model.base_model(input_ids=one[own][None], use_cache=False).last_hidden_state[0]
        count = LENGTHS[row][1]
        found.append(torch.nn.functional.pad(hidden[-count - 1 : -1], (0, 0, 0, COMPLETION - count)))
    return torch.stack(found)


def packed(model, ids, mask):
    with packed_attention_of(model):
        row = pack(ids, mask, COMPLETION, Layout(torch.device("cpu"), has_states(model.config)))
        return row, hidden_states(model, row)


def with_adapter(model):
    fuse_(model)
    policy = attach_lora(model, 4, 8, linear_targets(model, PROJECTIONS))
    torch.manual_seed(3)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    return policy


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("family", "linears", "cap"), [("qwen3_5_text", 25, 0), ("gemma4_text", 26, 6.0)])
def test_a_packed_row_has_values_and_gradients_of_single_rows(monkeypatch, shares, recomputes, family, linears, cap):
    monkeypatch.setattr(packing, "SHARE_PROMPTS", shares)
    model = tiny_hybrid(family)
    policy, (ids, mask) = with_adapter(model), rows()
    parameters = [p for p in policy.parameters() if p.requires_grad]
    assert len(parameters) == 2 * len({name.rpartition(".lora_")[0] for name in adapter_tensors(policy)}) == 2 * linears
    alone = one_by_one(model, ids, mask)
    if recomputes:
        model.train()
        for layer in model.model.layers:
            layer.gradient_checkpointing = True
            recompute_by_(layer, torch.float32)
    with packed_attention_of(model):  # the backward pass too, which recomputes
        row, hidden = packed(model, ids, mask)
        assert (row.sequences.keys is not None) == shares
        logits = model.lm_head(alone.flatten(0, 1)[row.places])
        logits = cap * torch.tanh(logits / cap) if cap else logits
        expected = torch.log_softmax(logits, -1).gather(1, row.targets[:, None])[:, 0]
        found, _ = token_logprobs(hidden, row.targets, head_of(model, 1.0))
        assert (expected - found).abs().max() < 1e-4
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(4))
        gradients = [torch.autograd.grad((each * weights).sum(), parameters) for each in (expected, found)]
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() < 1e-4 * one.norm()


def test_a_packed_row_through_transformers_own_linear_attention_is_another():
    """The leak that `delta_forward` is there for. If this fails, transformers resets states, and could be asked."""
    model = tiny_hybrid()
    ids, mask = rows()
    alone = one_by_one(model, ids, mask)
    for module in model.modules():
        if type(module).__name__ == "Qwen3_5GatedDeltaNet":
            module.forward = types.MethodType(stock, module)
    row, hidden = packed(model, ids, mask)
    assert (hidden - alone.flatten(0, 1)[row.places]).abs().max() > 0.1


def stock(self, hidden_states, cache_params=None, attention_mask=None, sequences=None, states=None, **kwargs):
    return type(self).forward(self, hidden_states, cache_params, attention_mask, **kwargs)


def test_a_packed_row_without_states_is_refused():
    model = tiny_hybrid()
    fuse_(model)
    with pytest.raises(EngineError, match="no states"):
        model.model.layers[0].linear_attn(torch.zeros(1, 3, 32), sequences=object())


def test_sampling_goes_through_transformers_own_module():
    model, ids = tiny_hybrid(), rows()[0][:2]
    expected = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    fuse_(model)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=6, do_sample=False), expected)


def inputs_of(lengths, dtype, key_heads=2, value_heads=6):
    generator = torch.Generator().manual_seed(5)
    tokens = sum(lengths)
    q, k = (torch.randn(tokens, key_heads, 8, generator=generator, dtype=dtype) for _ in "qk")
    v = torch.randn(tokens, value_heads, 4, generator=generator, dtype=dtype)
    g, beta = (torch.rand(tokens, value_heads, generator=generator, dtype=dtype) for _ in "gb")
    begin = torch.randn(len(lengths), value_heads, 8, 4, generator=generator, dtype=dtype)
    return [each.requires_grad_() for each in (q, k, v, -g, beta, begin)]


def recurrence(inputs, lengths):
    """Token after token, as the module docstring of `qerl.model.gated_delta` has it."""
    q, k, v, g, beta, states = inputs
    outputs, ends = [], []
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
    at = 0
    for number, length in enumerate(lengths):
        state = states[number]
        for t in range(at, at + length):
            state = state * g[t].exp()[:, None, None]
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
        ends.append(state)
        at += length
    return torch.stack(outputs), torch.stack(ends)


@pytest.mark.parametrize("lengths", [[5], [64], [1, 130, 63, 65]])
def test_the_twin_is_the_recurrence(lengths):
    inputs = inputs_of(lengths, torch.float64)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    found = delta_rule(tuple(inputs[:5]), starts, inputs[5])
    expected = recurrence(inputs, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weights = [torch.randn_like(each) for each in expected]
    gradients = [
        torch.autograd.grad(sum((one * w).sum() for one, w in zip(each, weights, strict=True)), inputs)
        for each in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


def test_the_twin_computes_16_bits_in_float32():
    inputs = [each.detach().bfloat16() for each in inputs_of([70], torch.float64)]
    starts = torch.tensor([0, 70])
    out, states = delta_rule_twin(tuple(inputs[:5]), starts)
    exact, _ = delta_rule_twin(tuple(each.double() for each in inputs[:5]), starts)
    assert (out.dtype, states.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


def test_each_token_is_convolved_with_those_before_it_in_its_own_sequence():
    ids, mask = torch.arange(1, 13).view(2, 6).repeat(2, 1), torch.ones(4, 6)
    ids[2:, 3:] += 20
    mask[1, :2] = 0
    mask[3, :2] = 0  # one prompt of a token, and one of three
    row = pack(ids, mask.long(), 3, Layout(torch.device("cpu"), prompts_first=True))
    tokens = [*row.input_ids[0].tolist(), 0]
    states = states_of(row.sequences, len(tokens) - 1, 4)
    read = torch.tensor(tokens)[states.reads.rows].unflatten(0, (-1, 4))
    assert read[:, -1].tolist() == tokens[:-1]
    seen = {tuple(each) for each in read.tolist()}
    assert {(0, 0, 0, 1), (0, 0, 1, 2), (0, 1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 24), (2, 3, 24, 25)} <= seen
    assert {(0, 0, 0, 9), (0, 0, 9, 10), (0, 0, 9, 30), (0, 9, 30, 31), (9, 30, 31, 32)} <= seen
    assert (states.tokens, states.starts.tolist(), states.later_starts.tolist()) == (4, [0, 3, 4], [0, 3, 6, 9, 12])
    assert states.prompts.rows.tolist() == [0, 0, 1, 1]


def test_a_row_whose_prompts_do_not_come_first_is_not_read_as_if_each_sequence_began_at_zero():
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])
    with pytest.raises(AssertionError, match="prompts first"):
        states_of(pack(ids, torch.ones_like(ids), 2).sequences, 6, 4)


def test_a_card_without_fla_core_is_refused_before_a_rollout(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    fla_rule.cache_clear()
    config = tiny_hybrid().config
    check_config(config, "cpu")
    with pytest.raises(EngineError, match=r"pip install fla-core==0\.6\.0"):
        check_config(config, "cuda")


def test_the_first_step_says_that_kernels_are_timed_and_where_that_is_kept(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    caplog.set_level("INFO")
    (tmp_path / "A").mkdir()
    (tmp_path / "A" / "chunk_gated_delta_rule_fwd_kernel_h.autotune.json").touch()
    keep_timings("chunk_gated_delta_rule_bwd_kernel", "step")
    assert "the first step on a card takes two to three minutes longer, in which Triton times" in caplog.text
    assert f"kept in {tmp_path}" in caplog.text
    caplog.clear()
    (tmp_path / "A" / "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64.autotune.json").touch()
    keep_timings("chunk_gated_delta_rule_bwd_kernel", "step")
    assert not caplog.text


@pytest.mark.parametrize(
    ("capability", "triton", "takes"),
    [
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.4.0", True),
        ((9, 0), "3.7.1", False),
        ((9, 0), "3.3.1", False),
        ((8, 9), "3.6.0", False),
    ],
)
def test_where_gradients_of_fla_core_would_be_wrong_our_products_are_registered(monkeypatch, capability, triton, takes):
    """TileLang's backend has priority 5 in fla-core 0.6.0, where lower ones come first."""
    seen = []
    fla = types.ModuleType("fla.backends")
    fla.BaseBackend, fla.register = object, lambda operation: lambda backend: seen.append((operation, backend()))
    rule = types.ModuleType("fla.ops.gated_delta_rule")
    rule.chunk_gated_delta_rule = object()
    for module in (fla, rule):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=triton))
    fla_rule.cache_clear()
    assert fla_rule() is rule.chunk_gated_delta_rule
    fla_rule.cache_clear()
    assert [(operation, found.priority < 5) for operation, found in seen] == ([("common", True)] if takes else [])
