"""An optimizer for 16-bit weights: each weight is updated in float32 and rounded to bfloat16 at random.

A step of 1e-6 of a weight is far below half a unit of bfloat16's last place, so rounding to nearest would drop every
such step. Rounded up with the probability of the dropped share, the weight is right on average. Any optimizer does the
update itself, bitsandbytes' with 8-bit moments as well: it is given one weight at a time, as float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from training.rollout.seeds import derive_seed

PIECE = 2**24  # numbers for which random bits exist at once


def round_randomly_(target: torch.Tensor, value: torch.Tensor, generator: torch.Generator) -> None:
    """Write `value` (float32, contiguous) to `target` (bfloat16), up or down with the probability of its nearness.

    Exact numbers, inf and NaN stay as they are. `value` is overwritten.
    """
    for to, of in zip(target.view(-1).split(PIECE), value.view(-1).split(PIECE), strict=True):
        dropped = torch.randint(0, 2**16, of.shape, dtype=torch.int32, device=of.device, generator=generator)
        dropped.masked_fill_(~of.isfinite(), 0)  # a carry would turn NaN into a number
        of.view(torch.int32).add_(dropped).bitwise_and_(-(2**16))
        to.copy_(of)


def pass_over_(count: int, device: torch.device, generator: torch.Generator) -> None:
    """Draw the random bits for so many weights and drop them, so that the next weights get the bits that are theirs."""
    for start in range(0, count, PIECE):
        shape = (min(PIECE, count - start),)
        torch.randint(0, 2**16, shape, dtype=torch.int32, device=device, generator=generator)


class RandomlyRounded(torch.optim.Optimizer):
    """`inner`, with parameters in bfloat16 updated in float32 and then rounded at random; others are left to it.

    `inner` is a new optimizer of these parameters, which from then on works for this one alone. The random bits depend
    on `seed` and the number of updates, which is part of the state, so a resumed run continues with the same bits. Its
    memory beside the state is a float32 copy of one weight and of its gradient.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, seed: int, elsewhere: Mapping[nn.Parameter, int] | None = None
    ) -> None:
        """`elsewhere` has the number of weights behind each empty parameter that another rank updates."""
        super().__init__(inner.param_groups, inner.defaults)
        self._elsewhere = dict(elsewhere or {})
        self.param_groups[0].setdefault("updates", 0)
        self._inner, self._seed = inner, seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        updates, generators = self.param_groups[0]["updates"], {}
        for group in self.param_groups:
            for parameter in group["params"]:
                elsewhere = self._elsewhere.get(parameter, 0)
                if parameter.grad is None and not elsewhere:
                    continue
                if (device := parameter.device) not in generators:
                    generators[device] = torch.Generator(device).manual_seed(
                        derive_seed(self._seed, updates, "rounding")
                    )
                if elsewhere:
                    pass_over_(elsewhere, device, generators[device])
                else:
                    self._update_(parameter, group, generators[device])
        self.param_groups[0]["updates"] = updates + 1
        return loss

    def _update_(self, parameter: nn.Parameter, group: dict[str, Any], generator: torch.Generator) -> None:
        """One step of `inner` on one parameter, which has its state here."""
        wide = parameter
        if parameter.dtype == torch.bfloat16:
            wide = nn.Parameter(parameter.float())
            wide.grad = parameter.grad.float()
        self._inner.param_groups = [{**group, "params": [wide]}]
        self._inner.state = defaultdict(dict, {wide: self.state[parameter]})
        self._inner.step()
        self.state[parameter] = self._inner.state[wide]
        if wide is not parameter:
            round_randomly_(parameter, wide.data, generator)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state with the dtypes it was saved in; torch would cast it to those of the parameters."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(parameters, saved, strict=True):
            if number in state_dict["state"]:
                state = state_dict["state"][number]
                self.state[parameter] = {key: _moved(value, key, parameter) for key, value in state.items()}


def _moved(value: Any, key: str, parameter: nn.Parameter) -> Any:
    """A copy on the parameter's device; torch's AdamW keeps its count of steps on the CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if key == "step" else value.to(parameter.device, copy=True)
