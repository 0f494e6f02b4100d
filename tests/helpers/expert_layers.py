"""Experts of one layer with random weights, and the same as a plain loop over them."""

import torch
import torch.nn.functional as F

from qerl.formats.experts import ExpertWeights
from qerl.model.experts import ExpertFactors

EXPERTS, HIDDEN, WIDTH, RANK = 5, 32, 16, 3


def random_weights(format, dtype=torch.float32, scale=0.3):
    """(gate_up, down) of a layer: for a quantized format packed from random matrices, by the format itself."""
    return tuple(_filled(format, shape, dtype, scale) for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)))


def _filled(format, shape, dtype, scale):
    parts = shape[0] // WIDTH if shape[1] == HIDDEN else 1
    weights = ExpertWeights(format, (EXPERTS, *shape), dtype=dtype, parts=parts)
    for expert in range(EXPERTS):
        halves = (scale * torch.randn(shape)).chunk(parts)
        stored = format.quantize(halves) if format.quantized else [{"weight": half.to(dtype)} for half in halves]
        for number, tensors in enumerate(stored):
            for name, tensor in tensors.items():
                weights.write_(name, expert, number * WIDTH, tensor)
    return weights


def random_factors(kind, dtype=torch.float32, scale=0.3, rank=RANK):
    """Factors that the experts share on the outside ("shared"), or that each has ("per_expert"); None for "none"."""
    shapes = {
        "shared": ((rank, HIDDEN), (EXPERTS, 2 * WIDTH, rank), (EXPERTS, rank, WIDTH), (HIDDEN, rank)),
        "per_expert": ((EXPERTS, rank, HIDDEN), (EXPERTS, 2 * WIDTH, rank), (EXPERTS, rank, WIDTH),
            (EXPERTS, HIDDEN, rank)),
    }  # fmt: skip
    if kind == "none":
        return None
    return ExpertFactors(*((scale * torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes[kind]), 0.7)


def loop(x, gate_up, down, ids, weights, factors=None):
    """y (T, hidden) in float64, one token and one of its experts after another."""
    a, b, c, d = (None,) * 4 if factors is None else [each.double() for each in factors[:4]]
    rows = []
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, share in zip(chosen, shares, strict=True):
            inner = F.linear(x[token].double(), gate_up[expert].double())
            if factors is not None:
                inner = inner + factors[4] * _of(b, expert, 3) @ (_of(a, expert, 3) @ x[token].double())
            gate, up = inner.chunk(2)
            activation = F.silu(gate) * up
            out = F.linear(activation, down[expert].double())
            if factors is not None:
                out = out + factors[4] * _of(d, expert, 3) @ (_of(c, expert, 3) @ activation)
            total = total + share * out
        rows.append(total)
    return torch.stack(rows)


def _of(factor, expert, dims):
    return factor[expert] if factor.dim() == dims else factor
