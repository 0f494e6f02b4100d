"""What a teacher takes of a card and of a step: weights, and a forward pass over the packed rows. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.plan.sizes import ModelSizes, read_sizes, sizes_of

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig
    from qerl.plan.micro_batch_plan import Footprint

LOGITS = 34  # bytes per logit of a chunk: eight float32 tensors while a divergence is computed, and the 16-bit slope


@dataclass(frozen=True)
class TeacherWork:
    """Bytes that a training phase takes for the teacher, beside its weights."""

    forward: int  # per token, while it runs: before the policy keeps anything
    hidden: int  # per token, until the loss is computed
    logits: int  # of a chunk, with those of the student

    def beside(self, footprint: Footprint) -> Footprint:
        """A policy's footprint with this."""
        return replace(footprint, teacher=self.forward, head=footprint.head + self.hidden, logits=self.logits)


def teacher_sizes(config: RunConfig, sizes: ModelSizes) -> ModelSizes | None:
    """The sizes of the teacher of a student with `sizes`; None without a teacher. Raises CheckpointError."""
    if config.distill is None:
        return None
    return sizes if config.distill.teacher is None else _read(config.distill.teacher)


def teacher_bytes(config: RunConfig, sizes: ModelSizes) -> int:
    """The teacher's weights on the card; 0 without one."""
    found = teacher_sizes(config, sizes)
    return 0 if found is None else int(found.weights_bytes(formats.BF16.name))


def teacher_work(config: RunConfig, sizes: ModelSizes) -> TeacherWork | None:
    """What its forward pass takes; None without a teacher."""
    found = teacher_sizes(config, sizes)
    if found is None:
        return None
    shared = max(sizes.vocabulary, found.vocabulary)
    return TeacherWork(forward_bytes(found), 2 * 2 * found.hidden, config.distill.chunk_tokens * shared * LOGITS)


def forward_bytes(sizes: ModelSizes) -> int:
    """Per token of a forward pass that keeps nothing, in 16 bits."""
    # As a layer of the policy while it runs: the MLP's three, and attention's. See `Shapes.footprint`.
    return 2 * (3 * sizes.inner + (8 + sizes.copies) * sizes.hidden)


def teacher_flops(config: RunConfig, sizes: ModelSizes, tokens: float, predicting: float) -> float:
    """Of a forward pass over `tokens`, and of the logits of `predicting` ones; 0 without a teacher."""
    found = teacher_sizes(config, sizes)
    return 0.0 if found is None else 2 * found.active * tokens + 2 * found.head * predicting


@cache
def _read(teacher: str) -> ModelSizes:
    from qerl.checkpoint.hub import config_folder, is_hub_id
    from qerl.checkpoint.shards import read_json

    try:
        return read_sizes(teacher)
    except CheckpointError:
        if not is_hub_id(teacher):
            raise
    return sizes_of(read_json(config_folder(teacher) / "config.json"), teacher)
