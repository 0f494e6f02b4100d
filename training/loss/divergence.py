"""How far a student is from its teacher at each token, over the whole vocabulary, without all logits at once.

With z and u the logits of student and teacher, divided by the temperature, p = softmax(z) and q = softmax(u):

    beta 0          forward KL(q || p) = sum q (log q - log p)         its slope by z:  p - q
    beta 1          reverse KL(p || q) = sum p (log p - log q)                          p (log p - log q - KL(p || q))
    0 < beta < 1    beta KL(q || m) + (1 - beta) KL(p || m)                 (1 - beta) p (log p - log m - KL(p || m))
                    with m = (1 - beta) p + beta q

This is the generalized Jensen-Shannon divergence (arXiv 2306.13649) with TRL's `beta`: `DistillationConfig`, and
`trl.kernels.chunked_divergence` (1.16.0), which a test compares with. That function measures one divergence, recomputes
both models' logits in its backward pass and does not say how likely the sampled tokens were. Here the slope is computed
while a chunk's logits are there, as in `token_logprobs`, with both directions and the logprobs beside it. That takes
three products with a head per token instead of five, or seven.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from qerl.model.logprobs import Head, cap_slopes, descend, head_logits
from qerl.plan.sizes import CHUNK_TOKENS

if TYPE_CHECKING:
    from training.loss.batch import LossInputs, Metrics


class Pair(NamedTuple):
    """The heads of student and teacher, whose logits have one temperature, and the tokens that both know.

    Vocabularies of one tokenizer differ in padding, so each distribution is over the first `shared` tokens.
    """

    student: Head
    teacher: Head
    shared: int
    beta: float  # of the divergence that is the loss
    chunk_tokens: int = CHUNK_TOKENS  # that have logits at once


class Divergences(NamedTuple):
    """One number per token, float32; only `loss` has a gradient."""

    loss: torch.Tensor  # the divergence that `beta` selects
    forward_kl: torch.Tensor  # KL(teacher || student)
    reverse_kl: torch.Tensor  # KL(student || teacher)
    entropies: torch.Tensor  # of the student, at the temperature of the pair
    logprobs: torch.Tensor  # of the targets, by the student, over its whole vocabulary


def token_divergences(hidden: torch.Tensor, taught: torch.Tensor, targets: torch.Tensor, pair: Pair) -> Divergences:
    """Of `targets` (M,) after the student's hidden states (M, d) and the teacher's (M, d'). Only `hidden` gets a
    gradient."""
    taught = taught.to(pair.teacher.weight.dtype)
    values = _TokenDivergences.apply(hidden.to(pair.student.weight.dtype), taught, targets, pair)
    return Divergences(values[0], *(value.detach() for value in values[1:]))


class _TokenDivergences(torch.autograd.Function):
    """The backward pass only scales the slopes."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, taught: torch.Tensor, targets: torch.Tensor, pair: Pair):
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        values = hidden.new_empty(len(Divergences._fields), len(targets), dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(targets), pair.chunk_tokens):
                part = slice(start, start + pair.chunk_tokens)
                student, teacher = head_logits(hidden[part], pair.student), head_logits(taught[part], pair.teacher)
                falls = None if slopes is None else cap_slopes(student[:, : pair.shared], pair.student)
                values[4, part] = _logprobs(student, targets[part], pair.student.temperature)
                log_p = _log_softmax(student, pair.student.temperature, pair.shared)
                del student
                log_q = _log_softmax(teacher, pair.teacher.temperature, pair.shared)
                del teacher
                slope = _fill(values[:4, part], log_p, log_q, pair.beta, slopes is not None)
                if slope is not None:
                    head = pair.student._replace(weight=pair.student.weight[: pair.shared])
                    descend(slope.neg_(), head, slopes[part], falls)
        ctx.save_for_backward(slopes)
        return tuple(value.clone() for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor, *_: torch.Tensor):
        (slopes,) = ctx.saved_tensors
        return (grad[:, None] * slopes).to(slopes.dtype), None, None, None


def _logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    chosen = logits.gather(1, targets[:, None])[:, 0]
    scaled = logits if temperature == 1.0 else logits / temperature
    return chosen / temperature - torch.logsumexp(scaled, -1)


def _log_softmax(logits: torch.Tensor, temperature: float, shared: int) -> torch.Tensor:
    """Over the first `shared` columns. The logits are scaled in place."""
    cut = logits[:, :shared]
    return torch.log_softmax(cut if temperature == 1.0 else cut.div_(temperature), -1)


def _fill(
    values: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor, beta: float, with_slope: bool
) -> torch.Tensor | None:
    """Fill `values` (4, m), the first four of `Divergences`; returns the loss's slope by z (m, shared), if asked."""
    p, q = log_p.exp(), log_q.exp()
    values[3] = -torch.linalg.vecdot(p, log_p)
    if 0.0 < beta < 1.0:
        log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
        student = torch.linalg.vecdot(p, log_p - log_m)
        values[0] = beta * torch.linalg.vecdot(q, log_q - log_m) + (1 - beta) * student
    gap = log_p - log_q
    values[1], values[2] = -torch.linalg.vecdot(q, gap), torch.linalg.vecdot(p, gap)
    if beta in (0.0, 1.0):
        values[0] = values[1 + int(beta)]
    if not with_slope:
        return None
    if beta == 0.0:
        return p.sub_(q)
    if beta == 1.0:
        return gap.sub_(values[2][:, None]).mul_(p)
    return log_p.sub_(log_m).sub_(student[:, None]).mul_(p).mul_(1 - beta)


def distillation_loss(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """The loss of one micro-batch, its share of the step's, and what it measured, as means over its tokens."""
    found, mask_B_T = inputs.divergences, inputs.rows.loss_mask_B_T
    tokens = mask_B_T.sum().clamp(min=1)

    def mean(values_B_T: torch.Tensor) -> list[float]:
        return [((values_B_T.detach() * mask_B_T).sum() / tokens).item()]

    loss = (found.loss * mask_B_T).sum() / inputs.step_tokens.clamp(min=1)
    return loss, {
        "kl_to_teacher/forward": mean(found.forward_kl),
        "kl_to_teacher/reverse": mean(found.reverse_kl),
        "entropy": mean(inputs.entropies_B_T),
    }
