"""How many tokens a micro-batch has and how many layers recompute their activations, from sizes. Pure numbers.

A forward pass keeps, for each token and layer, what the backward pass reads. A layer that recomputes keeps only its
input and runs twice. Fewer tokens at a time take less memory, but every micro-batch costs as much time as about 400
additional tokens: it decodes all packed weights once in each direction (as long as 170 tokens take: 2.6 bytes per
weight at 4 TB/s against 2 flops at 530 TFLOP/s, whatever the model's size), and its kernels wait for one another. With
4 micro-batches instead of 8, a 7B's step of 3.6 s is 80 ms shorter (benchmarks/step-7b-qerl-tokens*.json). With experts
it decodes many more weights than a token is multiplied by, and costs as many more tokens. With linear
attention the host sets the pace of small micro-batches, and of larger ones the card. Whole weights have a third pass,
the products of their gradients, in which nothing is decoded but the sums are read and written. The plan compares the
combinations that fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from qerl.base.errors import EngineError
from qerl.checkpoint.experts import StateShapes
from qerl.model.costs import BUSY, LINEAR_S, LOGIT_TOKENS, REPEATED, even_budget, kept_bytes
from qerl.plan.engine_memory import CARDS, GIB, Card
from qerl.plan.sizes import ModelSizes, RecipeName, TeacherWork, rounding_work

CPU_TOKENS = 8192  # per micro-batch on a CPU, where memory is not planned
MAX_TOKENS = 32768  # more at once is not faster
TOKEN_STEP = 1024
OVERHEAD_TOKENS = 400.0
RATE = 0.77  # share of a card's rate, by which further seconds of a micro-batch count as tokens
DECODE_TOKENS = 170.0  # of these are for decoding the weights that a token is multiplied by, of 2.6 bytes each
MARGIN = 0.08  # share of the available memory left for fragments and cuBLAS's workspaces
# Plans whose cost is within these factors of the least count as equally fast. Recomputing has to save more than 2%:
# what it costs is certain, what it saves is an estimate. Using more memory has to save more than 1%.
NEAR_RECOMPUTE, NEAR = 1.02, 1.01


@dataclass(frozen=True)
class Footprint:
    """Bytes that training takes beside the weights; per token of a micro-batch, except `fixed` and `logits`."""

    layers: int
    layer: int  # what a layer keeps for its backward pass
    layer_input: int  # what a layer keeps if it recomputes
    working: int  # gradients while one layer runs backward
    fixed: int  # gradients and optimizer state of what is trained, and one decoded weight
    head: int = 0  # outside the layers while a chunk's logits exist, when no layer runs backward
    logits: int = 0  # the logits of one chunk and their slopes
    teacher: int = 0  # while a teacher runs, before the policy keeps anything
    overhead: float = OVERHEAD_TOKENS  # what a micro-batch costs beside its tokens, as a number of further tokens
    gradients: float | None = None  # the same for the gradients of whole weights; None without
    waits: float = 0.0  # the same for layers with linear attention, in a micro-batch of up to `busy` tokens
    busy: float = 1.0  # of which a larger one costs as many `waits` as it has times so many tokens

    def needed(self, tokens: int, recomputed: int) -> int:
        """The peak of a micro-batch whose first `recomputed` layers recompute.

        It is reached in a teacher's forward pass, which comes first, at the logits, when the backward pass begins, or
        during a recompute, which comes last.
        """
        inputs = recomputed * self.layer_input
        begin = (self.layers - recomputed) * self.layer + inputs
        later = inputs + self.layer if recomputed else 0
        backward = tokens * (max(begin, later) + self.working)
        return max(backward, tokens * (begin + self.head) + self.logits, tokens * self.teacher) + self.fixed


@dataclass(frozen=True)
class Shapes:
    """The sizes that a footprint follows from, as in config.json; attention's are heads * head_dim."""

    hidden: int
    intermediate: int
    query: int
    key_value: int
    layers: int
    vocabulary: int
    rank: int
    trained: int  # parameters that are trained
    head_norms: bool = False  # norms on queries and keys (Qwen3)
    trained_bytes: float = 16.0  # for each of them: an adapter's gradient, optimizer state and 16-bit factors
    fp8_recipe: RecipeName | None = None  # that rounds the trainer's products
    rounds_kv: bool = False  # to 8 bits, of which a copy is kept
    gradient_bytes: int = 0  # of one weight's gradient, where whole weights are trained
    copies: int = 0  # hidden states of a token while experts run, beside the stream's
    decoded: int | None = None  # bytes of what is decoded for a product at most; None: gate and up
    share: float = 1.0  # of the weights that are decoded, that a token is multiplied by
    states: StateShapes | None = None  # of layers with linear attention
    linear: float = 0.0  # the share of such layers
    gemma: bool = False  # layers of Gemma 4, which are transformers' own
    waits: float = 0.0  # see Footprint
    busy: float = 1.0

    @classmethod
    def of(cls, sizes: ModelSizes, rank: int, trained: int, card: Card | None = None) -> Shapes:
        """Those of a model, with an adapter of `rank` and `trained` parameters in all; `card`: None if not known."""
        return cls(
            hidden=sizes.hidden,
            intermediate=sizes.inner,
            query=_mean_rows(sizes, "q_proj"),
            key_value=_mean_rows(sizes, "k_proj"),
            layers=sizes.layers,
            vocabulary=sizes.vocabulary,
            rank=rank,
            trained=trained,
            head_norms=sizes.head_norms,
            copies=sizes.copies,
            decoded=sizes.decoded,
            share=sizes.active / sizes.body,
            states=sizes.states,
            linear=len(sizes.decoder.linear) / sizes.layers,
            gemma=bool(sizes.decoder.full),
            **({} if card is None or sizes.states is None else _waiting(sizes, card)),
        )

    @property
    def rounded_kv(self) -> int:
        """Bytes of a token's rounded keys and values in one layer."""
        return 2 * 2 * self.key_value if self.rounds_kv else 0

    def _hybrid(self) -> tuple[int, int]:
        """(what a layer of Qwen3.5 keeps per token on average, the gradients of one with linear attention), in bytes.

        An estimate, which training replaces by what it measures. Attention is transformers' own; linear attention keeps
        q, k and v before and after the convolution, the gate, the output before and after its norm, and in fla-core a
        row of 64 for each head. Backward has the convolution's float32, and a pair of states in 16 bits for each 64
        tokens. A completion that goes on from its prompt's states also keeps these, 2 MiB in three of four layers with
        9B and 3 with 27B, as much as 10 and 11 of its tokens (`costs.BEGUN`).
        """
        states = self.states
        outer = kept_bytes(self.hidden, self.intermediate, 0, 0, self.rank)
        attention = 6 * self.query + 8 * self.key_value
        linear = 4 * states.mixed + 6 * states.values + 2 * 64 * states.value_heads
        working = 12 * states.mixed + 8 * states.values + 4 * states.values * states.key_dim // 64
        return outer + round((1 - self.linear) * attention + self.linear * linear), working

    def _gemma(self) -> int:
        """What a layer of Gemma 4 keeps per token on average, in bytes: four norms and those of heads keep float32."""
        attention = 8 * self.query + 12 * self.key_value
        return 4 * 5 * self.hidden + 8 * self.intermediate + attention + 2 * 7 * self.rank

    def footprint(self, entropy_gradient: bool = False) -> Footprint:
        """For 16-bit activations, as `qerl.model` computes them.

        A chunk's logits are float32, and their slope is in 16 bits; `entropy_gradient` adds a second slope. A test
        compares `layer` with what autograd saves, and training replaces it by what it measures.
        """
        sizes = (self.hidden, self.intermediate, self.query, self.key_value, self.rank)
        rounding = rounding_work(self.fp8_recipe, self.hidden, self.intermediate, self.gradient_bytes > 0)
        decoded = 2 * self.hidden * 2 * self.intermediate if self.decoded is None else self.decoded
        layer, working = self._gemma() if self.gemma else kept_bytes(*sizes, self.head_norms), 0
        if self.states is not None:
            layer, working = self._hybrid()
        gradients = OVERHEAD_TOKENS - DECODE_TOKENS + 2 * self.gradient_bytes / 2.6 * DECODE_TOKENS
        return Footprint(
            layers=self.layers,
            layer=layer + self.rounded_kv,
            layer_input=2 * self.hidden,
            # The MLP needs the gradients of gate, up and activation. The second term is more than it needs, and covers
            # attention where the MLP is narrow: gradients of q, k and v, also in float32, and for each head.
            working=max(2 * (3 * self.intermediate + (8 + self.copies) * self.hidden), working) + rounding.token,
            fixed=int(self.trained_bytes * self.trained) + decoded + rounding.weight,
            # the residual stream, its norm, the rows of it that predict, and one or two slopes of these
            head=2 * 5 * self.hidden,
            logits=LOGIT_TOKENS * self.vocabulary * (8 if entropy_gradient else 6),
            overhead=OVERHEAD_TOKENS + DECODE_TOKENS * (1 / self.share - 1),
            waits=self.waits,
            busy=self.busy,
            gradients=gradients if self.gradient_bytes else None,
        )


def _waiting(sizes: ModelSizes, card: Card) -> dict[str, float]:
    seconds = len(sizes.decoder.linear) * LINEAR_S
    return {"waits": seconds * RATE * card.tflops * 1e12 / (4 * sizes.active), "busy": busy_tokens(sizes, card)}


def busy_tokens(sizes: ModelSizes, card: Card) -> float:
    """The tokens of a micro-batch from which a card needs longer for layers with linear attention than its host."""
    return BUSY / sizes.states.value_heads * card.gb_per_s / CARDS["h200"].gb_per_s


def _mean_rows(sizes: ModelSizes, leaf: str) -> int:
    """Of the linears with this last part of their names, in the layers that have one."""
    rows = [shape[0] for shape in sizes.shapes_of([leaf])]
    return sum(rows) // max(1, len(rows))


@dataclass(frozen=True)
class MicroBatchPlan:
    """How a run trains; recorded in its run.json, so that a resumed run computes the same bits."""

    micro_batch_tokens: int
    least: int = 0  # layers that recompute in every micro-batch
    most: int = 0  # layers that may recompute
    usable: int | None = None  # bytes for a micro-batch; None: not limited
    footprint: Footprint | None = None

    def recomputed(self, tokens: int) -> int:
        """How many layers recompute in a micro-batch of `tokens`: as few as it fits with, from the first layer on."""
        if self.usable is None:
            return self.least
        fitting = (r for r in range(self.least, self.most) if self.footprint.needed(tokens, r) <= self.usable)
        return next(fitting, self.most)

    def cost(self, tokens: int | None = None) -> float:
        """The time per token, in units of a forward pass through all layers; 0 if memory is not planned.

        `tokens` are those of a micro-batch; None: `micro_batch_tokens`.
        """
        if (footprint := self.footprint) is None:
            return 0.0
        tokens = self.micro_batch_tokens if tokens is None else tokens
        cost = (2 + self.recomputed(tokens) / footprint.layers) * (1 + footprint.overhead / tokens)
        cost += 2 * footprint.waits / min(tokens, footprint.busy)
        return cost if footprint.gradients is None else cost + 1 + footprint.gradients / tokens

    def needed(self, tokens: int) -> int:
        """Bytes at the peak of a micro-batch of `tokens`; 0 if memory is not planned."""
        return 0 if self.footprint is None else self.footprint.needed(tokens, self.recomputed(tokens))


@dataclass(frozen=True)
class Wishes:
    """What the recipe fixes; the planner chooses where `tokens` is None or `recompute` is auto."""

    tokens: int | None
    recompute: Literal["auto"] | bool
    longest: int  # tokens of the longest possible row
    step_tokens: int  # tokens of a step whose rows are all that long
    teacher: TeacherWork | None = None
    fp8_recipe: RecipeName | None = None
    rounds_kv: bool = False
    gradient_bytes: int = 0
    length_keys: str = "rollout.max_new_tokens or data.max_prompt_tokens"  # what to lower if `longest` does not fit

    @property
    def of_shapes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("fp8_recipe", "rounds_kv", "gradient_bytes")}


def plan_micro_batches(footprint: Footprint, wishes: Wishes, available: int | None) -> MicroBatchPlan:
    """The plan for `available` bytes (None: a CPU).

    Of the plans that are about as fast as the fastest, those in which the fewest layers recompute are kept, and of
    these the one with the fewest tokens is taken. A row longer than `micro_batch_tokens` is a micro-batch of its own,
    in which more layers recompute. Raises EngineError if the longest possible row does not fit.
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
    costs = {tokens: plan.cost(tokens) for tokens in _sizes(wishes) if plan.needed(tokens) <= plan.usable}
    near = _near(costs, NEAR_RECOMPUTE)
    fewest = min(plan.recomputed(tokens) for tokens in near)
    near = _near({tokens: cost for tokens, cost in near.items() if plan.recomputed(tokens) == fewest}, NEAR)
    return replace(plan, micro_batch_tokens=min(near))


def smallest_plan(plans: Sequence[MicroBatchPlan]) -> MicroBatchPlan:
    """Of the plans for several cards the one for the card with the least memory, which is good for all of them."""
    return min(plans, key=lambda plan: math.inf if plan.usable is None else plan.usable)


def largest_micro_batch(budget: int, groups: int, group: int, prompt: int, new: int, least: int = 0) -> tuple[int, int]:
    """(rows, tokens) of a step's largest micro-batch, for `groups` of `group` completions of `new` tokens each.

    Rows are divided and counted as in `qerl.model.packing`: a micro-batch has at most `budget` tokens unless it is
    a single longer row, it holds a group's prompt once, and all are about equally large. A repeated prompt counts as
    `least` tokens at least.
    """
    again = max(prompt // REPEATED, least)

    def filled(tokens: int) -> list[list[int]]:
        """For each micro-batch, how many rows each of its prompts has in it."""
        batches: list[list[int]] = []
        used = 0
        for row in range(groups * group):
            known = batches != [] and row % group > 0
            added = new + (again if known else prompt)
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
        return len(rows) * prompt + sum(rows) * new + max(copies * prompt // REPEATED, copies * least)

    tokens, rows = max((cost(rows), sum(rows)) for rows in filled(even_budget(budget, lambda size: len(filled(size)))))
    return rows, tokens


def _sizes(wishes: Wishes) -> list[int]:
    """The micro-batch sizes to choose from: multiples of TOKEN_STEP, a shorter longest row, and a whole step."""
    most = min(MAX_TOKENS, wishes.step_tokens)
    return [min(wishes.longest, TOKEN_STEP), *range(TOKEN_STEP, most, TOKEN_STEP), most]


def _near(costs: dict[int, float], times: float) -> dict[int, float]:
    """The costs that are at most `times` the least."""
    least = min(costs.values())
    return {tokens: cost for tokens, cost in costs.items() if cost <= times * least}


def _refusal(plan: MicroBatchPlan, wishes: Wishes, available: int) -> str:
    tokens = max(plan.micro_batch_tokens, wishes.longest)
    fixes = ["set run.gradient_checkpointing: auto"] * (wishes.recompute is False)
    fixes += [f"set run.micro_batch_tokens: {wishes.longest}"] * (tokens > wishes.longest)
    fixes += [f"lower {wishes.length_keys}", "give it more memory (card, memory.cap_gib)"]
    return (
        f"training on {tokens} tokens at once needs {plan.needed(tokens) / GIB:.1f} GiB beside the weights"
        f"{'' if plan.most else ' without recomputing'}, and of the {available / GIB:.1f} GiB that are left it may "
        f"take {plan.usable / GIB:.1f}: {', or '.join(fixes)}"
    )
