"""How many tokens a micro-batch has and how many layers recompute their activations, from sizes. Pure numbers.

A forward pass keeps, for each token and layer, what the backward pass reads; a layer that recomputes keeps its input
alone and runs twice. Fewer tokens at a time cost less memory, but every micro-batch decodes all packed weights once in
each direction, which takes as long as the products of about 220 tokens (2.6 bytes a weight at 4 TB/s against 2 flops
at 680 TFLOP/s, whatever the model's size). The plan is the cheapest of the combinations that fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from qerl.errors import EngineError

GIB = 2**30
CPU_TOKENS = 8192  # a micro-batch where no GPU bounds it
MAX_TOKENS = 32768  # more than this at once makes nothing faster
TOKEN_STEP = 1024
DECODE_TOKENS = 220.0
LOGIT_TOKENS = 1024  # training.token_logprobs.CHUNK
MARGIN = 0.08  # of the available memory: fragments, workspaces of cuBLAS


@dataclass(frozen=True)
class Shapes:
    """What the memory of a training step follows from; dimensions as in config.json, attention in heads * head_dim."""

    hidden: int
    intermediate: int
    query: int
    key_value: int
    layers: int
    vocabulary: int
    rank: int
    trained: int  # adapter parameters

    def kept(self) -> int:
        """Bytes that a layer keeps for a token, 16-bit activations with LoRA on every linear."""
        norms = 2 * 8 * self.hidden  # each: its input in float32, and normalized
        attention = 2 * (2 * self.hidden + 2 * self.query + 2 * self.key_value) + 4
        feed_forward = 2 * 4 * self.intermediate  # gate, silu(gate), up, and their product
        factors = 2 * 7 * self.rank
        return norms + attention + feed_forward + factors

    def transient(self) -> int:
        """Bytes for a token while one layer runs backward: gradients of its widest tensors."""
        return 2 * (4 * self.intermediate + 4 * self.hidden)

    def ends(self) -> int:
        """Bytes for a token outside the layers: last norm, hidden states at the head and their slopes."""
        return 2 * 8 * self.hidden

    def fixed(self) -> int:
        """Bytes whatever the tokens: logits of a chunk with their probabilities, gradients and optimizer state."""
        return LOGIT_TOKENS * self.vocabulary * 10 + 12 * self.trained

    def needed(self, tokens: int, recomputed: int) -> int:
        """Bytes that a micro-batch of `tokens` takes if `recomputed` layers recompute."""
        held = (self.layers - recomputed) * self.kept() + recomputed * 2 * self.hidden
        working = self.transient() + (self.kept() if recomputed else 0) + self.ends()
        return tokens * (held + working) + self.fixed()


@dataclass(frozen=True)
class MicroBatchPlan:
    """What a run's training phase does; recorded in its run.json, so that a resumed run computes the same bits."""

    micro_batch_tokens: int
    recomputed_layers: int
    planned_gib: float | None = None  # activations, gradients, optimizer state at the peak; None: not planned


@dataclass(frozen=True)
class Wishes:
    """What the recipe fixes: `tokens` None and `recompute` auto are the planner's to choose."""

    tokens: int | None
    recompute: Literal["auto"] | bool
    longest: int  # tokens of the longest possible row
    step_tokens: int  # tokens of a step whose completions are all that long


def plan_micro_batches(shapes: Shapes, wishes: Wishes, available: int | None) -> MicroBatchPlan:
    """The cheapest plan that fits into `available` bytes (None: a CPU, nothing bounds it).

    Raises EngineError if not even the longest row fits with every layer recomputing.
    """
    if available is None:
        recomputed = shapes.layers if wishes.recompute is True else 0
        return MicroBatchPlan(wishes.tokens or CPU_TOKENS, recomputed)
    usable = int(available * (1 - MARGIN))
    best: tuple[float, int, int] | None = None
    for tokens, recomputed in _candidates(shapes, wishes):
        if shapes.needed(tokens, recomputed) <= usable:
            cost = (2 + recomputed / shapes.layers) * (1 + DECODE_TOKENS / tokens)
            best = min(best or (cost, tokens, recomputed), (cost, tokens, recomputed))
    if best is None:
        _refuse(shapes, wishes, available)
    _, tokens, recomputed = best
    return MicroBatchPlan(tokens, recomputed, round(shapes.needed(tokens, recomputed) / GIB, 2))


def _candidates(shapes: Shapes, wishes: Wishes) -> Iterator[tuple[int, int]]:
    """(tokens, recomputed layers); tokens hold the longest row, recompute is as wished."""
    layers = {True: [shapes.layers], False: [0], "auto": range(shapes.layers + 1)}[wishes.recompute]
    if wishes.tokens is not None:
        sizes = [wishes.tokens]
    else:
        most = max(wishes.longest, min(MAX_TOKENS, wishes.step_tokens))
        sizes = [wishes.longest, *range(-(-wishes.longest // TOKEN_STEP) * TOKEN_STEP, most + 1, TOKEN_STEP)]
    return ((tokens, recomputed) for tokens in sizes for recomputed in layers)


def _refuse(shapes: Shapes, wishes: Wishes, available: int) -> None:
    tokens = wishes.tokens or wishes.longest
    recomputed = 0 if wishes.recompute is False else shapes.layers
    what = "run.micro_batch_tokens" if wishes.tokens else "a micro-batch of the longest possible completion"
    fixes = ["run.micro_batch_tokens"] * (wishes.tokens is not None and wishes.tokens > wishes.longest)
    fixes += ["rollout.max_new_tokens", "adapter.rank"]
    raise EngineError(
        f"training needs {shapes.needed(tokens, recomputed) / GIB:.1f} GiB for {what} ({tokens} tokens"
        f"{', nothing recomputed' if recomputed == 0 else ''}) beside the weights, and {available / GIB:.1f} GiB are "
        f"left: raise memory.cap_gib, {'set run.gradient_checkpointing: auto, ' if wishes.recompute is False else ''}"
        f"or lower {' or '.join(fixes)}"
    )
