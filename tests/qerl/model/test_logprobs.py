"""Chunked log probabilities against the plain path, including gradients.

The tests that need a card last ran on an H200 on 2026-11-22.
"""

import pytest
import torch
from torch import nn

from qerl.model import logprobs as module
from qerl.model.logprobs import Head, dense_head, token_logprobs
from tests.helpers.linear_twins import packed_nvfp4


def plain(hidden, targets, head):
    logits = hidden @ head.weight.t() + (0 if head.bias is None else head.bias)
    logits = logits if not head.cap else head.cap * torch.tanh(logits / head.cap)
    log_p = torch.log_softmax(logits.float() / head.temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("tokens", [1, 4, 11])  # less than a chunk, one chunk, three with a rest
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("bias", "cap"), [(False, 0.0), (True, 0.0), (True, 2.0)])
def test_values_and_gradients_equal_those_of_the_plain_path(monkeypatch, tokens, temperature, bias, cap):
    monkeypatch.setattr(module, "LOGIT_TOKENS", 4)
    torch.manual_seed(tokens)
    hidden, targets = torch.randn(tokens, 8), torch.randint(20, (tokens,))
    head = Head(torch.randn(20, 8), torch.randn(20) if bias else None, temperature, cap)
    weights = torch.randn(2, tokens)
    results = []
    for compute in (lambda *a: token_logprobs(*a, entropy_gradient=True), plain):
        leaf = hidden.clone().requires_grad_()
        logprobs, entropies = compute(leaf, targets, head)
        (weights[0] * logprobs + weights[1] * entropies).sum().backward()
        results.append((logprobs, entropies, leaf.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_entropies_have_a_gradient_only_if_the_loss_needs_it(monkeypatch):
    monkeypatch.setattr(module, "LOGIT_TOKENS", 4)
    torch.manual_seed(0)
    hidden, targets, head = torch.randn(6, 8), torch.randint(20, (6,)), Head(torch.randn(20, 8), None, 1.0)
    gradients = []
    for compute in (token_logprobs, plain):
        leaf = hidden.clone().requires_grad_()
        logprobs, _ = compute(leaf, targets, head)
        logprobs.sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert not token_logprobs(hidden.requires_grad_(), targets, head)[1].requires_grad


def test_a_packed_head_gives_its_dense_weight():
    torch.manual_seed(0)
    packed = packed_nvfp4(nn.Linear(32, 20, bias=False))
    head = dense_head(packed, 0.5)
    assert torch.equal(head.weight, packed.dense(torch.float32))
    assert head.temperature == 0.5


@pytest.mark.gpu
def test_16_bit_on_the_gpu_is_as_exact_as_its_inputs():
    """The head of a 7B against float32 with the same bfloat16 inputs, and the memory of a chunk."""
    torch.manual_seed(0)
    tokens, vocabulary, width = 3000, 152064, 3584
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    weight = (0.05 * torch.randn(vocabulary, width, device="cuda")).bfloat16()
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    leaf = hidden.clone().requires_grad_()
    logprobs, entropies = token_logprobs(leaf, targets, Head(weight, None, 1.0))
    logprobs.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    exact_leaf = hidden.float().requires_grad_()
    exact, exact_entropies = plain(exact_leaf, targets, Head(weight.float(), None, 1.0))
    exact.sum().backward()
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=2e-4)
    torch.testing.assert_close(entropies, exact_entropies, rtol=0, atol=2e-4)
    error = (leaf.grad.float() - exact_leaf.grad).norm() / exact_leaf.grad.norm()
    assert error < 5e-3
    assert peak < 1024 * vocabulary * 6 + 10 * hidden.nbytes  # as `qerl.plan.micro_batch_plan` counts for the logits
