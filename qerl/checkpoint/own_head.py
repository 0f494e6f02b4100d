"""Whether a checkpoint's file has a head of its own where its config.json says that the embeddings serve as the head.

A head that differs from the embeddings counts, as transformers 5 has it. Engines and other readers go by
`tie_word_embeddings`, so whatever qerl writes says false there, and what it opens is opened that way. Importing this
loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qerl.checkpoint.shards import TensorInfo

KEY, EMBEDDINGS, HEAD = "tie_word_embeddings", "model.embed_tokens.weight", "lm_head.weight"
ROWS = 8192  # of both that are compared at a time


def has_own_head(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether the file has a head that differs from the embeddings, and config.json does not say that it is untied.

    `tensors` are those of the checkpoint by name. Raises CheckpointError if they cannot be read.
    """
    if config.get(KEY) is False or not {EMBEDDINGS, HEAD} <= tensors.keys():
        return False
    head, embeddings = tensors[HEAD], tensors[EMBEDDINGS]
    return head.shape != embeddings.shape or not _equal(head, embeddings)


def with_own_head(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The config, which says that the head is untied if the file has one of its own."""
    return {**config, KEY: False} if has_own_head(config, tensors) else dict(config)


def _equal(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors, named as they are in their files, hold the same numbers."""
    from safetensors import SafetensorError, safe_open

    from qerl.base.errors import CheckpointError

    try:
        with safe_open(one.file, framework="pt") as left, safe_open(other.file, framework="pt") as right:
            slices = left.get_slice(one.stored_as or HEAD), right.get_slice(other.stored_as or EMBEDDINGS)
            for begin in range(0, one.shape[0], ROWS):
                head, embeddings = (each[begin : begin + ROWS].float() for each in slices)
                if not head.equal(embeddings):
                    return False
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{one.file} cannot be read ({error}): copy or download it again") from error
    return True
