"""The chunked divergence against a dense one in float64, and against values by hand."""

import math

import pytest
import torch

from qerl.model.logprobs import Head
from training.loss.divergence import Divergences, Pair, token_divergences

BETAS = (0.0, 0.3, 0.5, 1.0)
TOKENS, SHARED = 11, 20
VALUES = ("loss", "forward", "reverse", "entropy", "logprob", "gradient")


def dense(hidden, taught, targets, pair):
    """The same by all logits in float64, written as the equations in the module's docstring."""
    student, teacher = (
        states @ head.weight.double().t() + (0 if head.bias is None else head.bias.double())
        for states, head in ((hidden, pair.student), (taught, pair.teacher))
    )
    student, teacher = (
        head.cap * torch.tanh(logits / head.cap) if head.cap else logits
        for logits, head in ((student, pair.student), (teacher, pair.teacher))
    )
    log_p, log_q = (
        torch.log_softmax(logits[:, : pair.shared] / head.temperature, -1)
        for logits, head in ((student, pair.student), (teacher, pair.teacher))
    )

    def kl(of, to):
        return (of.exp() * (of - to)).sum(-1)

    forward, reverse = kl(log_q, log_p), kl(log_p, log_q)
    beta = pair.beta
    if beta in (0.0, 1.0):
        loss = (forward, reverse)[int(beta)]
    else:
        log_m = torch.log((1 - beta) * log_p.exp() + beta * log_q.exp())
        loss = beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    logprobs = torch.log_softmax(student / pair.student.temperature, -1).gather(1, targets[:, None])[:, 0]
    return Divergences(loss, forward, reverse, -(log_p.exp() * log_p).sum(-1), logprobs)


def problem(beta, temperature=1.0, chunk=4, padding=(0, 0), bias=False, caps=(0.0, 0.0)):
    """Hidden states of two models of different width whose vocabularies have `padding` beyond what they share."""
    sizes = [SHARED + each for each in padding]
    student = Head(torch.randn(sizes[0], 8), torch.randn(sizes[0]) if bias else None, temperature, caps[0])
    teacher = Head(torch.randn(sizes[1], 6), None, temperature, caps[1])
    pair = Pair(student, teacher, SHARED, beta, chunk)
    return torch.randn(TOKENS, 8), torch.randn(TOKENS, 6), torch.randint(sizes[0], (TOKENS,)), pair


def with_gradient(function, hidden, *rest, double=False):
    leaf = (hidden.double() if double else hidden).clone().requires_grad_()
    given = [rest[0].double(), *rest[1:]] if double else rest
    found = function(leaf, *given)
    weights = torch.linspace(-1, 2, TOKENS)
    (found[0] * weights).sum().backward()
    return [*found, leaf.grad]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "more",
    [
        {"chunk": 1},
        {"temperature": 0.7},
        {"padding": (3, 0), "bias": True},
        {"padding": (0, 5), "chunk": 64},
        {"padding": (3, 0), "caps": (2.0, 3.0)},
    ],
    ids=["plain", "temperature", "padded student", "padded teacher", "capped"],
)
def test_values_and_gradients_equal_the_dense_ones_in_float64(fresh_seed, beta, more):
    given = problem(beta, **more)
    ours, exact = with_gradient(token_divergences, *given), with_gradient(dense, *given, double=True)
    for name, one, other in zip(VALUES, ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=5e-5, msg=lambda text, name=name: name + text)


def test_hand_values():
    """Two tokens, p = (1/4, 3/4), q = (1/2, 1/2)."""
    eye = Head(torch.eye(2), None, 1.0)
    hidden, taught = torch.tensor([[0.0, math.log(3)]]), torch.zeros(1, 2)
    found = token_divergences(hidden, taught, torch.tensor([1]), Pair(eye, eye, 2, 0.5, 8))
    forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    reverse = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    to_middle = [0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5), 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)]
    middle = sum(to_middle) / 2
    entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    expected = Divergences(middle, forward, reverse, entropy, math.log(0.75))
    torch.testing.assert_close(torch.stack(list(found))[:, 0], torch.tensor(expected))
