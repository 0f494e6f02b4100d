"""Muon (https://kellerjordan.github.io/posts/muon), the optimizer of the matrices of the models that are made here.

It works in float32, batched over matrices of equal shapes.
"""

from __future__ import annotations

import torch

WEIGHT_DECAY = 0.05


class Muon:
    """Muon: momentum made orthogonal by five Newton-Schulz steps, scaled like an AdamW update (arXiv 2502.16982).

    A weight (n, out, in) is n matrices.
    """

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        self.groups: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for weight in weights:
            self.groups.setdefault(tuple(weight.shape[-2:]), []).append(weight)
        self.momenta = {
            shape: torch.zeros(sum(map(_matrices, group)), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step_(self, learning_rate: float) -> None:
        """Update every weight from its gradient and drop the gradient."""
        for shape, group in self.groups.items():
            gradient = torch.cat([weight.grad.view(-1, *shape) for weight in group])
            momentum = self.momenta[shape].lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95)) * (0.2 * max(shape) ** 0.5)
            for weight, change in zip(group, update.split(list(map(_matrices, group))), strict=True):
                weight.mul_(1 - learning_rate * WEIGHT_DECAY).sub_(change.view_as(weight), alpha=learning_rate)
                weight.grad = None


def _matrices(weight: torch.Tensor) -> int:
    return weight.shape[0] if weight.ndim == 3 else 1


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The matrices (n, out, in) with their singular values moved close to 1 (between 0.7 and 1.2)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x.mT if tall else x
