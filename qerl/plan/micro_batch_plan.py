"""How many tokens a micro-batch has and how many layers recompute their activations, from sizes. Pure numbers.

A forward pass keeps, for each token and layer, what the backward pass reads; a layer that recomputes keeps its input
alone and runs twice. Fewer tokens at a time cost less memory, but every micro-batch costs as much time as about 400
tokens beside its own: it decodes all packed weights once in each direction (170 tokens: 2.6 bytes a weight at 4 TB/s
against 2 flops at 530 TFLOP/s, whatever the model's size), and its kernels wait for one another. A 7B's step with 4
micro-batches instead of 8 is 80 ms shorter, of 3.6 s (benchmarks/step-7b-qerl-tokens*.json). The plan weighs the
combinations that fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from qerl.errors import EngineError
from qerl.layers.saved import kept_bytes
from qerl.plan.engine_memory import GIB

CPU_TOKENS = 8192  # a micro-batch where no GPU bounds it
MAX_TOKENS = 32768  # more than this at once makes nothing faster
TOKEN_STEP = 1024
OVERHEAD_TOKENS = 400.0
LOGIT_TOKENS = 1024  # whose logits exist at once: 0.6 GiB in float32 with a vocabulary of 152,000
MARGIN = 0.08  # of the available memory: fragments, workspaces of cuBLAS
NEAR_RECOMPUTE = 1.02  # times the least cost: no layer recomputes for less; what it costs is sure, what it saves is not
NEAR = 1.01  # times the least cost: no memory is taken for less
REPEATED = 6  # of a shared prompt's tokens cost as one: a layer keeps 6.7 times the bytes of a token's keys and values
# (Llama 2 7B) to 68 times (Qwen2.5 3B)


@dataclass(frozen=True)
class Footprint:
    """Bytes that the training phase takes beside the weights, for each token of a micro-batch but for the last two."""

    layers: int
    layer: int  # what a layer keeps for its backward pass
    layer_input: int  # what it keeps if it recomputes
    working: int  # gradients while one layer runs backward
    fixed: int  # the adapter's gradients, optimizer state and 16-bit factors, a decoded weight
    head: int = 0  # what stands outside the layers while a chunk's logits exist; then no layer runs backward
    logits: int = 0  # of that chunk, and their slopes

    def needed(self, tokens: int, recomputed: int) -> int:
        """The peak: at the logits, as the backward pass begins, or (first layers recompute, their turn comes last) in a
        recompute."""
        inputs = recomputed * self.layer_input
        begin = (self.layers - recomputed) * self.layer + inputs
        later = inputs + self.layer if recomputed else 0
        backward = tokens * (max(begin, later) + self.working)
        return max(backward, tokens * (begin + self.head) + self.logits) + self.fixed


@dataclass(frozen=True)
class Shapes:
    """The sizes that a footprint follows from, as in config.json; attention in heads * head_dim."""

    hidden: int
    intermediate: int
    query: int
    key_value: int
    layers: int
    vocabulary: int
    rank: int
    trained: int  # parameters of the adapter
    head_norms: bool = False  # norms on queries and keys (Qwen3)

    def footprint(self, entropy_gradient: bool = False) -> Footprint:
        """For 16-bit activations and LoRA on every linear, as `qerl.layers` computes them.

        A chunk's logits are in float32 and their slope in 16 bit, and a second slope with `entropy_gradient`.

        A test holds `layer` to what autograd saves; training replaces it with what it measures.
        """
        sizes = (self.hidden, self.intermediate, self.query, self.key_value, self.rank)
        return Footprint(
            layers=self.layers,
            layer=kept_bytes(*sizes, self.head_norms),
            layer_input=2 * self.hidden,
            # the MLP's gradients of gate, up and activation; the rest is more than it needs, and what attention needs
            # where the MLP is narrow: gradients of q, k and v, of these in float32, and for each head
            working=2 * (3 * self.intermediate + 8 * self.hidden),
            fixed=16 * self.trained + 2 * self.hidden * 2 * self.intermediate,
            # the last sum, its norm, of that what predicts, and its slope, once more with `entropy_gradient`
            head=2 * 5 * self.hidden,
            logits=LOGIT_TOKENS * self.vocabulary * (8 if entropy_gradient else 6),
        )


@dataclass(frozen=True)
class MicroBatchPlan:
    """What a run's training phase does; recorded in its run.json, so that a resumed run computes the same bits."""

    micro_batch_tokens: int
    least: int = 0  # layers that recompute in any case
    most: int = 0
    usable: int | None = None  # bytes for a micro-batch; None: nothing bounds it
    footprint: Footprint | None = None

    def recomputed(self, tokens: int) -> int:
        """How many layers, from the first on, recompute in a micro-batch of `tokens`: those that do not fit."""
        if self.usable is None:
            return self.least
        fitting = (r for r in range(self.least, self.most) if self.footprint.needed(tokens, r) <= self.usable)
        return next(fitting, self.most)

    def needed(self, tokens: int) -> int:
        """Bytes at the peak of a micro-batch of `tokens`; 0 where nothing is planned."""
        return 0 if self.footprint is None else self.footprint.needed(tokens, self.recomputed(tokens))


@dataclass(frozen=True)
class Wishes:
    """What the recipe fixes: `tokens` None and `recompute` auto are the planner's to choose."""

    tokens: int | None
    recompute: Literal["auto"] | bool
    longest: int  # tokens of the longest possible row
    step_tokens: int  # tokens of a step whose completions are all that long


def plan_micro_batches(footprint: Footprint, wishes: Wishes, available: int | None) -> MicroBatchPlan:
    """A plan that fits into `available` bytes (None: a CPU). Of those whose cost is near the least, the ones in which
    the fewest layers recompute; of these, the fewest tokens whose cost is near the least among them.

    A row longer than that is a micro-batch of its own, and more layers recompute in it. Raises EngineError if the
    longest possible row does not fit.
    """
    least, most = {True: (footprint.layers,) * 2, False: (0, 0), "auto": (0, footprint.layers)}[wishes.recompute]
    if available is None:
        return MicroBatchPlan(wishes.tokens or CPU_TOKENS, least, least)
    plan = MicroBatchPlan(wishes.tokens or wishes.longest, least, most, int(available * (1 - MARGIN)), footprint)
    largest = max(plan.micro_batch_tokens, wishes.longest)
    if plan.needed(largest) > plan.usable:
        raise EngineError(_refusal(plan, wishes, available))
    if wishes.tokens is not None:
        return plan
    costs = {tokens: _cost(plan, tokens) for tokens in _sizes(wishes) if plan.needed(tokens) <= plan.usable}
    near = _near(costs, NEAR_RECOMPUTE)
    fewest = min(plan.recomputed(tokens) for tokens in near)
    near = _near({tokens: cost for tokens, cost in near.items() if plan.recomputed(tokens) == fewest}, NEAR)
    return replace(plan, micro_batch_tokens=min(near))


def even_budget(budget: int, count: Callable[[int], int]) -> int:
    """The least budget that takes no more micro-batches than `budget`; `count` gives how many one takes."""
    low, high, most = 1, budget, count(budget)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if count(middle) <= most else (middle + 1, high)
    return high


def largest_micro_batch(budget: int, groups: int, group: int, prompt: int, new: int) -> tuple[int, int]:
    """(rows, tokens) of a step's largest micro-batch, if each of its groups has `group` completions of `new` tokens.

    As `training.policy.packing` cuts and counts: at most `budget` tokens but for a longer row, a group's prompt once,
    and no larger than as many micro-batches need.
    """

    def filled(tokens: int) -> list[list[int]]:
        """Of each micro-batch the rows of each prompt in it."""
        batches: list[list[int]] = []
        used = 0
        for row in range(groups * group):
            known = batches != [] and row % group > 0
            added = new + (prompt // REPEATED if known else prompt)
            if not batches or used + added > tokens:
                batches.append([])
                used, known, added = 0, False, new + prompt
            used += added
            if known:
                batches[-1][-1] += 1
            else:
                batches[-1].append(1)
        return batches

    def cost(rows: list[int]) -> int:
        copies = sum(times for times in rows if times > 1)
        return len(rows) * prompt + sum(rows) * new + copies * prompt // REPEATED

    tokens, rows = max((cost(rows), sum(rows)) for rows in filled(even_budget(budget, lambda size: len(filled(size)))))
    return rows, tokens


def _sizes(wishes: Wishes) -> list[int]:
    """The numbers of tokens to choose from: what the longest row fits with, whole steps, and all of a step at once."""
    most = min(MAX_TOKENS, wishes.step_tokens)
    return [min(wishes.longest, TOKEN_STEP), *range(TOKEN_STEP, most, TOKEN_STEP), most]


def _cost(plan: MicroBatchPlan, tokens: int) -> float:
    """Time of a token in micro-batches of `tokens`, in forward passes of all layers."""
    return (2 + plan.recomputed(tokens) / plan.footprint.layers) * (1 + OVERHEAD_TOKENS / tokens)


def _near(costs: dict[int, float], times: float) -> dict[int, float]:
    """Those of at most `times` the least."""
    least = min(costs.values())
    return {tokens: cost for tokens, cost in costs.items() if cost <= times * least}


def _refusal(plan: MicroBatchPlan, wishes: Wishes, available: int) -> str:
    tokens = max(plan.micro_batch_tokens, wishes.longest)
    fixes = ["set run.gradient_checkpointing: auto"] * (wishes.recompute is False)
    fixes += [f"set run.micro_batch_tokens: {wishes.longest}"] * (tokens > wishes.longest)
    fixes += ["lower rollout.max_new_tokens or data.max_prompt_tokens", "give it more memory (card, memory.cap_gib)"]
    return (
        f"training on {tokens} tokens at once needs {plan.needed(tokens) / GIB:.1f} GiB beside the weights"
        f"{'' if plan.most else ' without recomputing'}, and of the {available / GIB:.1f} GiB that are left it may "
        f"take {plan.usable / GIB:.1f}: {', or '.join(fixes)}"
    )
