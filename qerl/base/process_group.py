"""The connections between the processes of a run: gloo for messages and for tensors on a CPU, NCCL for those on a card.

`qerl/base/parallel.py` is what the rest of qerl asks; nothing else imports this, nor torch.distributed.
"""

from __future__ import annotations

import logging
import pickle
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from qerl.base.errors import ParallelError, QerlError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
logger = logging.getLogger(__name__)

CARDS_LIMIT_S = 45.0  # of a sum on the cards, which all ranks have reached; NCCL's first one connects them
FAILED = "failed"  # the call of a rank that raised


def connect(launched: Mapping[str, str], elastic: Mapping[str, str], time_limit: timedelta) -> Group:
    """The group of all ranks. Raises ParallelError if they do not all come."""
    from torch.distributed import PrefixStore, TCPStore

    rank, size = int(launched["RANK"]), int(launched["WORLD_SIZE"])
    host, port = launched["MASTER_ADDR"], int(launched["MASTER_PORT"])
    # The launcher's agent serves a store itself. Without one rank 0 does.
    serves = rank == 0 and elastic.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(host, port, size, serves, time_limit)
        restarts = elastic.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted run must not read the old keys
        return Group(PrefixStore(f"qerl/{restarts}", store), rank, size, time_limit)
    except RuntimeError as error:
        text = f"rank {rank} did not find all {size} processes at {host}:{port}: {_first_sentence(error)}"
        raise ParallelError(text) from error


class Group:
    """All ranks, each of which makes the same calls in the same order."""

    def __init__(self, store: Any, rank: int, size: int, time_limit: timedelta) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        self._store, self._rank, self._size, self._time_limit = store, rank, size, time_limit
        self._gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, time_limit)
        self._nccl: Any = None
        self._over = False  # a rank has failed, and nobody answers any more

    def exchange(self, call: str, value: T) -> list[T]:
        """What each rank gave to this `call`, by rank. Raises ParallelError if one of them failed or is elsewhere."""
        answers = self._all_gather((call, value))
        for rank, (other, said) in enumerate(answers):
            if other == FAILED:
                self._over = True
                raise ParallelError(f"rank {rank} failed: {said}")
        if calls := {other for other, _ in answers} - {call}:
            self._over = True
            raise RuntimeError(f"rank {self._rank} is at {call!r} and another at {calls.pop()!r}")
        return [said for _, said in answers]

    def tell(self, error: BaseException) -> None:
        """Make `error` the answer to what the other ranks call next, unless one of them has failed before."""
        if self._over:
            return
        logger.info("rank %d failed and tells the other ranks: %s", self._rank, _described(error))
        try:
            self._all_gather((FAILED, _described(error)))
        except ParallelError as gone:
            logger.warning("%s", gone)
        self._over = True

    def end(self) -> None:
        """Wait for the other ranks at the end, unless this one has left them."""
        if not self._over:
            self.exchange("end", None)

    def leave(self) -> None:
        """See `Parallel.leave`."""
        self._over = True

    def close(self) -> None:
        """End the connections. Left to the end of the interpreter, gloo's threads would abort the process."""
        if self._nccl is not None:
            (self._nccl.abort if self._over else self._nccl.shutdown)()
        self._gloo = self._nccl = self._store = None

    def sum_(self, tensor: torch.Tensor, rank: int | None = None) -> None:
        """See `Parallel.sum_` and, for the sum on one `rank`, `Parallel.sum_to_`."""
        from torch.distributed import ReduceOptions

        kind = f"sum of {tensor.dtype} {tuple(tensor.shape)}"
        self._meet(kind if rank is None else f"{kind} on rank {rank}", [tensor])
        with self._failing():
            group = self._group_of(tensor)
            every = rank is None
            work = group.allreduce([tensor]) if every else group.reduce([tensor], _of_rank(ReduceOptions(), rank))
            self._wait_for(work, tensor)

    def send_(self, tensors: Sequence[torch.Tensor], rank: int) -> None:
        """See `Parallel.send_`."""
        import torch
        from torch.distributed import BroadcastOptions

        self._meet(f"{len(tensors)} tensors of rank {rank}", tensors)
        with self._failing():
            for tensor in tensors:
                if tensor.numel():
                    data = tensor.detach().view(-1).view(torch.uint8)
                    work = self._group_of(data).broadcast([data], _of_rank(BroadcastOptions(), rank))
                    self._wait_for(work, data)

    def _meet(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        """Wait until all ranks are at `call`, and their cards have nothing else to do."""
        import torch

        if on_card := [tensor for tensor in tensors if tensor.is_cuda]:
            torch.cuda.current_stream(on_card[0].device).synchronize()
        self.exchange(call, None)

    def _group_of(self, tensor: torch.Tensor) -> Any:
        return self._on_cards() if tensor.is_cuda else self._gloo

    def _all_gather(self, value: object) -> list[Any]:
        """Values of any size: their lengths first, then their bytes, padded to the longest."""
        import torch

        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        with self._failing():
            lengths = self._gathered(torch.tensor([data.numel()]))
            padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
            padded[: data.numel()] = data
            rows = self._gathered(padded)
        return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        outs = [tensor.new_empty(tensor.shape) for _ in range(self._size)]
        self._gloo.allgather([outs], [tensor]).wait()
        return outs

    def _on_cards(self) -> Any:
        """NCCL's group, made when it is first needed: by then each rank has taken its card."""
        if self._nccl is None:
            from torch.distributed import PrefixStore, ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = self._time_limit
            self._nccl = ProcessGroupNCCL(PrefixStore("nccl", self._store), self._rank, self._size, options)
        return self._nccl

    def _wait_for(self, work: Any, tensor: torch.Tensor) -> None:
        """Wait for a transfer. A rank that dies within one between cards would leave the others' waiting for ever."""
        limit = time.monotonic() + CARDS_LIMIT_S
        while tensor.is_cuda and not work.is_completed():
            if time.monotonic() > limit:
                raise RuntimeError(f"a transfer between the cards did not end in {CARDS_LIMIT_S:.0f} s")
            time.sleep(0.0005)
        work.wait()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn what gloo and NCCL raise for a rank that is gone or silent into ParallelError."""
        try:
            yield
        except RuntimeError as error:
            self._over = True
            limit = self._time_limit.total_seconds()
            text = f"another rank is gone, or did not answer in {limit:.0f} s; its own output says why"
            raise ParallelError(f"{text} ({_first_sentence(error)})") from error


def _of_rank(options: Any, rank: int) -> Any:
    options.rootRank = rank
    return options


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, QerlError) else f"{type(error).__name__}: {error}"


def _first_sentence(error: object) -> str:
    """What happened. gloo begins with a line of its source and ends with advice for its own users."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\] ", "", line).partition(". ")[0].removesuffix(".")
