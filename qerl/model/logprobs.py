"""Log probabilities and entropies of tokens from hidden states, without all (tokens x vocabulary) logits at once.

With z = h W^T / temperature and p = softmax(z), for target y (the head W is frozen):

    logprob = z_y - logsumexp(z)         d logprob / dh = (onehot(y) - p) W / temperature
    entropy = -sum_j p_j log p_j         d entropy / dh = -(p * (log p + entropy)) W / temperature

Where a model caps its logits, z = cap tanh(h W^T / cap) / temperature, the rows that are multiplied by W are weighted
by the slope of the cap, 1 - tanh^2.

The loss weighs each token's logprob by one number. So the rows on the right are computed in the forward pass, while the
logits of a chunk are there, and the backward pass only scales them. That takes two products with the head per token;
recomputing the logits would take three. Both products count for time/forward_s, the scaling for time/backward_s.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.formats.linear import PackedLinear
from qerl.model.costs import LOGIT_TOKENS


class Head(NamedTuple):
    """The output projection: a dense weight (vocabulary, d), a bias or None, the temperature of the logits, and the cap
    that they stay below before they are divided by it; 0 without one."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float
    cap: float = 0.0


def dense_head(module: nn.Linear, temperature: float, cap: float = 0.0) -> Head:
    """The head of a model, dequantized if it is packed."""
    weight = module.dense(module.compute_dtype) if isinstance(module, PackedLinear) else module.weight.detach()
    return Head(weight, None if module.bias is None else module.bias.detach(), temperature, cap)


def token_logprobs(
    hidden: torch.Tensor, targets: torch.Tensor, head: Head, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropies), each float32 (M,), of `targets` (M,) after the hidden states `hidden` (M, d).

    Only `hidden` gets a gradient, and the entropies pass one on only with `entropy_gradient`.
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden.to(head.weight.dtype), targets, head, entropy_gradient)
    return logprobs, entropies if entropy_gradient else entropies.detach()


class _TokenLogprobs(torch.autograd.Function):
    """See the module docstring."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, targets: torch.Tensor, head: Head, entropy_gradient: bool):
        count = int(ctx.needs_input_grad[0]) * (2 if entropy_gradient else 1)
        slopes = [torch.empty_like(hidden) for _ in range(count)]
        outputs = hidden.new_empty(2, len(targets), dtype=torch.float32)
        compute = kernel_chunk if hidden.is_cuda else reference_chunk
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(targets), LOGIT_TOKENS):
                part = slice(start, start + LOGIT_TOKENS)
                compute(hidden[part], targets[part], head, outputs[:, part], [slope[part] for slope in slopes])
        ctx.save_for_backward(*slopes)
        return outputs[0].clone(), outputs[1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor):
        slope, *entropy_slope = ctx.saved_tensors
        grad = grad_logprobs[:, None] * slope
        if entropy_slope:
            grad += grad_entropies[:, None] * entropy_slope[0]
        return grad.to(slope.dtype), None, None, None


def kernel_chunk(
    hidden: torch.Tensor, targets: torch.Tensor, head: Head, outputs: torch.Tensor, slopes: list[torch.Tensor]
) -> None:
    """Fill `outputs` (2, m), logprobs and entropies, and each of `slopes` (m, d) for a chunk.

    `reference_chunk` is the same without kernels.
    """
    from qerl.model import kernels

    logits = head_logits(hidden, head)
    measured = kernels.measure_logits(logits, targets, head.temperature)
    outputs[0], outputs[1] = measured.logprobs, measured.entropies
    if slopes:
        wanted = head.weight.dtype, len(slopes) > 1
        by_logits = kernels.slopes_of_logits(logits, targets, measured, head[2:], wanted)
        del logits
        for slope, out in zip(by_logits, slopes, strict=True):
            torch.addmm(out, slope, head.weight, beta=0, alpha=1.0 / head.temperature, out=out)


def reference_chunk(
    hidden: torch.Tensor, targets: torch.Tensor, head: Head, outputs: torch.Tensor, slopes: list[torch.Tensor]
) -> None:
    """The same as `kernel_chunk` in plain torch, on any device."""
    rows = torch.arange(len(targets), device=targets.device)
    logits = head_logits(hidden, head)
    falls = cap_slopes(logits, head) if slopes else None
    log_p = torch.log_softmax(logits if head.temperature == 1.0 else logits.div_(head.temperature), -1)
    del logits
    outputs[0] = log_p[rows, targets]
    p = log_p.exp()
    outputs[1] = -torch.linalg.vecdot(p, log_p)
    if len(slopes) > 1:
        log_p += outputs[1][:, None]
        descend(log_p.mul_(p), head, slopes[1], falls)
    if slopes:
        p[rows, targets] -= 1.0
        descend(p, head, slopes[0], falls)


def head_logits(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """Logits (m, vocabulary) in float32, capped, not divided by the temperature; on a GPU never rounded to 16 bits."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
    else:
        logits = (hidden @ head.weight.t()).float()
    if head.bias is not None:
        logits += head.bias
    return logits.div_(head.cap).tanh_().mul_(head.cap) if head.cap else logits


def cap_slopes(logits: torch.Tensor, head: Head) -> torch.Tensor | None:
    """The derivatives of capped logits by those before the cap, of any shape; None without a cap."""
    return 1 - (logits / head.cap).square_() if head.cap else None


def descend(slope: torch.Tensor, head: Head, out: torch.Tensor, falls: torch.Tensor | None) -> None:
    """Turn negative derivatives by the scaled logits (m, vocabulary) into those by the hidden states, `out` (m, d);
    `falls` are the `cap_slopes`. The derivatives are overwritten."""
    slope = slope if falls is None else slope.mul_(falls)
    torch.mm(slope.to(head.weight.dtype), head.weight, out=out)
    out.mul_(-1.0 / head.temperature)
