"""An optimizer of which each rank has the part that updates its own masters (`shards.py`).

Every rank's optimizer has the same groups of parameters, in the same order; those of other ranks are empty and have
neither gradient nor state. So a state has the same number everywhere, which is the one that a single rank gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel


def clip_shared_(optimizer: torch.optim.Optimizer, largest: float, parallel: Parallel) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` over the parameters of all ranks; returns the norm before it, a scalar."""
    gradients = {n: parameter.grad for n, parameter in enumerate(_parameters(optimizer)) if parameter.grad is not None}
    device = next(iter(_parameters(optimizer))).device
    norms = torch.stack([torch.linalg.vector_norm(each) for each in gradients.values()]).cpu() if gradients else ()
    found: dict[int, torch.Tensor] = {}
    for of_rank in parallel.gather(dict(zip(gradients, norms, strict=True))):
        found |= of_rank
    total = torch.linalg.vector_norm(torch.stack([found[number] for number in sorted(found)])).to(device)
    torch.nn.utils.clip_grads_with_norm_([p for p in _parameters(optimizer) if p.grad is not None], largest, total)
    return total


def whole_state(optimizer: torch.optim.Optimizer, ask: Callable[[int], dict[str, Any] | None]) -> dict[str, Any]:
    """The state of all ranks, as one that has every parameter would save it. `ask` finds what is missing here."""
    own = optimizer.state_dict()
    states = {number: own["state"].get(number) or ask(number) for number in range(len(_parameters(optimizer)))}
    return {**own, "state": {number: state for number, state in states.items() if state}}


def own_state(optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
    """The part of a saved state that this rank's parameters need, copied."""
    own = {number for number, parameter in enumerate(_parameters(optimizer)) if parameter.numel()}
    states = {number: state for number, state in whole["state"].items() if number in own}
    return {**whole, "state": tree_map_only(torch.Tensor, torch.clone, states)}


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
