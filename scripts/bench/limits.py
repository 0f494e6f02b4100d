"""The least work that a step needs, which is counted, and the speed of the card, which is measured.

A share of the limit is the ratio of the two. Only products with weights are counted. Those within attention, and the
adapter's in training, are left out, so that shares come out too low rather than too high. A prompt that a group shares
counts once, and recomputation does not count. Of experts those count that tokens are multiplied by, as if all experts
were chosen equally often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig
    from qerl.plan.sizes import ModelSizes


def limits() -> dict[str, float]:
    """Measure the card: TFLOP/s of a bfloat16 product of 8192 cubed, in a burst and over a second, and GB/s of a copy.

    The rate of the copy counts bytes read and bytes written.
    """
    burst, sustained = matrix_tflops(), matrix_tflops(repeats=700)
    return {"tflops": burst, "sustained_tflops": sustained, "gb_per_s": copy_gb_per_s()}


def matrix_tflops(repeats: int = 10) -> float:
    """TFLOP/s of a large bfloat16 product. Takes 0.4 GiB.

    With few repeats it is the rate of a rested card, which a phase of seconds cannot reach because of the power limit.
    """
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_of(lambda: a @ b, repeats) / 1e12


def copy_gb_per_s() -> float:
    import torch

    source = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source)) / 1e9


def seconds_of(call: Callable[[], object], repeats: int = 10) -> float:
    """Seconds that one call takes on the card."""
    import torch

    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


@dataclass(frozen=True)
class Work:
    """The shape of a step's work."""

    sizes: ModelSizes
    prompts: int
    group: int
    prompt_tokens: int

    @classmethod
    def of(cls, config: RunConfig, sizes: ModelSizes) -> Work:
        """The work of a run whose prompts all have the maximum length, as those of bench_step do."""
        rollout = config.rollout
        return cls(sizes, rollout.prompts_per_step, rollout.group_size, config.data.max_prompt_tokens)

    @property
    def layers_flops(self) -> float:
        """Of a token's forward pass through the layers, routers included: 2 per weight."""
        return 2.0 * (self.sizes.active + self.sizes.routers)


def training_flops(work: Work, step: dict[str, Any]) -> float:
    """The flops that training needs in a step of metrics.jsonl.

    They are 2 per weight and token forward, and 2 for the gradient to the input: in the decoder for the tokens of all
    completions and of each prompt once, in the head for completion tokens (it computes its slope instead). No gradient
    goes through a router. Rows without a learning signal need none, so the sum is multiplied by the share of the rows
    that were trained on.
    """
    completions = work.prompts * work.group * step["completions/mean_tokens"]
    tokens = completions + work.prompts * work.prompt_tokens
    flops = (work.layers_flops + 2 * work.sizes.active) * tokens + 4 * work.sizes.head * completions
    return flops * step.get("completions/trained_share", 1.0)


def train_share(work: Work, step: dict[str, Any], tflops: float) -> float:
    """The share of the matrix rate that training reached, by the step's own seconds of training."""
    return training_flops(work, step) / step["time/train_s"] / (tflops * 1e12)
