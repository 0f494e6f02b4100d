"""Which experts vLLM's routers choose, kept for each place of the KV cache and read when a request has ended.

vLLM 0.25.1 can return them itself (`enable_return_routed_experts`), but not with the model runner that qerl needs, and
not for tokens that it found in its prefix cache. Here each router writes its ids into a static buffer, inside the CUDA
graphs. After each forward pass the worker copies the rows of that buffer to the slots that the tokens' keys and values
went to. A token's slot belongs to every request that reads its keys and values, so a cached prompt is covered too.

A request is read as soon as vLLM has returned its last token. Its slots then belong to nobody, but no forward pass that
could write to them has been scheduled: the scheduler frees blocks when it takes the token over, and it has not been
asked for another step since. The copy to the host runs on a stream of its own, because the next forward pass may
already be under way; the rows are complete, since a step copies them before it samples. No vllm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qerl.base.errors import EngineError
from qerl.engine.interface import UNRECORDED

logger = logging.getLogger(__name__)


class Chosen:
    """The ids that the routers of a model chose, uint8, `UNRECORDED` where no token has been."""

    def __init__(self, routers: Sequence[Any], chosen: int, experts: int, tokens: int, device: torch.device) -> None:
        """`routers` are vLLM's, from the first layer with experts to the last; `tokens` is the most that a forward
        pass can have. Call it before CUDA graphs are captured.

        Raises EngineError for more experts than a byte can name.
        """
        if experts > UNRECORDED:
            raise EngineError(
                f"the model has {experts} experts in a layer, and replay names them in a byte: write "
                "rollout.router_replay: false"
            )
        shape = (tokens, len(routers), chosen)
        self._latest = torch.full(shape, UNRECORDED, dtype=torch.uint8, device=device)
        self._kept: torch.Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for place, router in enumerate(routers):
            router.set_capture_fn(self._writer(place))

    def allocate_(self, slots: int) -> None:
        """Make room for a KV cache of so many tokens."""
        latest = self._latest
        shape = (slots, *latest.shape[1:])
        self._kept = torch.full(shape, UNRECORDED, dtype=torch.uint8, device=latest.device)

    def unrecorded(self, tokens: int) -> torch.Tensor:
        """What `read` gives for tokens of which nothing is known."""
        return torch.full((tokens, *self._latest.shape[1:]), UNRECORDED, dtype=torch.uint8)

    def keep_(self, slots: torch.Tensor) -> None:
        """Copy the choices of the latest forward pass, whose tokens went to `slots` (tokens,) int64."""
        self._kept.index_copy_(0, slots, self._latest[: len(slots)])

    def read(self, blocks: torch.Tensor, block_size: int, tokens: int) -> torch.Tensor:
        """The choices of the first `tokens` tokens of a request, (tokens, layers, k) on the CPU.

        `blocks` (blocks,) int32 are its numbers in the KV cache, on the device, of `block_size` tokens each.
        """
        if self._stream is None:
            return self._read(blocks, block_size, tokens)
        with torch.cuda.stream(self._stream):
            return self._read(blocks, block_size, tokens)

    def _read(self, blocks: torch.Tensor, block_size: int, tokens: int) -> torch.Tensor:
        return self._kept[slots_of(blocks, block_size, tokens)].cpu()

    def _writer(self, place: int) -> Callable[[torch.Tensor], None]:
        own = self._latest[:, place]

        def write(ids: torch.Tensor) -> None:
            own[: len(ids)].copy_(ids)

        return write


def slots_of(blocks: torch.Tensor, block_size: int, tokens: int) -> torch.Tensor:
    """The slots (tokens,) int64 of a request's first tokens."""
    place = torch.arange(tokens, device=blocks.device)
    return blocks.long()[place // block_size] * block_size + place % block_size


class Reader:
    """Reads what was chosen for requests of vLLM, by the names of their outputs; `runner` is vLLM's model runner."""

    def __init__(self, chosen: Chosen, runner: Any) -> None:
        self._chosen, self._runner = chosen, runner

    def of_output(self, output: Any) -> torch.Tensor:
        """What was chosen for a complete output, for all of its tokens but the last.

        A request that vLLM took its blocks from while its last token was still being sampled, because the KV cache was
        full, is unrecorded.
        """
        states, tables = self._runner.req_states, self._runner.block_tables
        # vLLM calls a request "NUMBER-RANDOM" (or "NUMBER") and its output "NUMBER".
        names = [name for name in states.req_id_to_index if name.partition("-")[0] == output.request_id]
        tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        if not names:
            logger.warning(
                "the experts chosen for a completion of %d tokens are not known, so the trainer chooses its own: the "
                "KV cache was full when it ended",
                tokens,
            )
            return self._chosen.unrecorded(tokens)
        row = states.req_id_to_index[names[0]]
        return self._chosen.read(tables.block_tables[0].gpu[row], tables.kernel_block_sizes[0], tokens)


def check_cache(groups: int, block_tables: Any) -> None:
    """Raise EngineError for a KV cache in which a token has more than one slot, or a runner that has no tables."""
    if block_tables is None or groups != 1 or block_tables.cp_size != 1:
        raise EngineError(
            "vLLM keeps keys and values of this model in a way (several groups, or another model runner) for which "
            "qerl cannot tell which experts were chosen: write rollout.router_replay: false, and leave "
            "VLLM_USE_V2_MODEL_RUNNER unset"
        )
