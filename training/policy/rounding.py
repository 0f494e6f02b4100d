"""What a recipe lets the trainer round: 16-bit weights, at random after an update in float32, and products in FP8.

A step of 1e-6 of a weight is far below half a unit of bfloat16's last place, so rounding to nearest would drop every
such step. Rounded up with the probability of the dropped share, the weight is right on average. Any optimizer does the
update itself, bitsandbytes' with 8-bit moments as well: it is given one weight at a time, as float32.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qerl.base.philox import WORD, Words, derive_seed, philox
from qerl.checkpoint.adapter import base_linears
from qerl.formats.fp8.training import recipe_of
from qerl.formats.linear import PackedLinear
from qerl.model.products import set_recipe_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qerl.config.train import TrainConfig

logger = logging.getLogger(__name__)

LANES = 1024  # counters per program; each gives the 16 random bits of eight numbers, which lie this far apart
BLOCK = 8 * LANES
PIECE = 1024  # blocks whose random bits exist at once in plain torch
EXPONENT, QUIET = 0x7F800000, 0x400000  # of float32: all bits set in inf and NaN; set in NaN that stays NaN when cut


def round_randomly_(target: torch.Tensor, value: torch.Tensor, seed: int) -> None:
    """Write `value` (float32) to `target` (bfloat16), up or down with the probability of its nearness.

    Both are contiguous and of one shape. Exact numbers, inf and NaN stay as they are. The random bits depend on `seed`
    (0 to 2^63 - 1) and on a number's place, and are the same on a CPU and on a GPU.
    """
    if value.is_cuda:
        from training.policy.rounding_kernel import round_randomly_ as by_kernel_

        by_kernel_(target, value, seed)
    else:
        reference_round_randomly_(target, value, seed)


def reference_round_randomly_(target: torch.Tensor, value: torch.Tensor, seed: int) -> None:
    """The twin of the kernel, in plain torch."""
    pieces = zip(target.view(-1).split(PIECE * BLOCK), value.view(-1).split(PIECE * BLOCK), strict=True)
    for number, (to, of) in enumerate(pieces):
        bits = of.view(torch.int32)
        finite = bits.bitwise_and(EXPONENT) != EXPONENT
        dropped = random_halves(seed, number * PIECE, of.numel()).to(device=of.device, dtype=torch.int32)
        up = torch.where(finite, bits + dropped, torch.where(of.isnan(), bits | QUIET, bits))
        to.view(torch.int16).copy_(up >> 16)


def random_halves(seed: int, block: int, count: int) -> torch.Tensor:
    """16 random bits (count,) int64 for each of the numbers from a block on."""
    blocks = -(-count // BLOCK)
    lanes = block * LANES + torch.arange(blocks * LANES)
    nothing = torch.zeros_like(lanes)
    key = torch.tensor(seed & WORD), torch.tensor(seed >> 32)
    words = philox(Words(lanes, nothing, nothing, nothing), key)
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)])  # (8, blocks x lanes)
    return halves.unflatten(1, (blocks, LANES)).transpose(0, 1).flatten()[:count]


class RandomlyRounded(torch.optim.Optimizer):
    """`inner`, with parameters in bfloat16 updated in float32 and then rounded at random; others are left to it.

    `inner` is a new optimizer of these parameters, which from then on works for this one alone. The random bits depend
    on `seed`, a parameter's number and the number of updates, which is part of the state, so a resumed run continues
    with the same bits, and so do several ranks that share out the parameters. Its memory beside the state is a float32
    copy of one weight and of its gradient.
    """

    def __init__(self, inner: torch.optim.Optimizer, seed: int) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups[0].setdefault("updates", 0)
        self._inner, self._seed = inner, seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        updates = self.param_groups[0]["updates"]
        parameters = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for number, (parameter, group) in enumerate(parameters):
            if parameter.grad is not None:
                self._update_(parameter, group, derive_seed(self._seed, updates, f"rounding of {number}"))
        self.param_groups[0]["updates"] = updates + 1
        return loss

    def _update_(self, parameter: nn.Parameter, group: dict[str, Any], seed: int) -> None:
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
            round_randomly_(parameter.data, wide.data, seed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state with the dtypes it was saved in; torch would cast it to the parameters' dtypes."""
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


def round_products_(model: PreTrainedModel, train: TrainConfig) -> None:
    """Let the trainer's products be rounded by the recipe's `train.fp8_recipe`.

    For a quantized base, only its packed linears count, so that what is kept in 16 bits stays so.
    """
    scales, products = train.fp8
    recipe = recipe_of(scales, products=products)
    linears = [*base_linears(model).values()]
    packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
    set_recipe_(model, packed or linears, recipe)
    logger.info(
        "training in FP8: %s, %s, gradients in %s, %d linears",
        recipe.name,
        "all products" if recipe.rounds_output else "the backward pass alone",
        str(recipe.gradients).removeprefix("torch.float8_"),
        len(packed or linears),
    )
