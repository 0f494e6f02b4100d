"""Which process of a run this is, and everything the processes say to each other.

Nothing else in qerl imports torch.distributed: code asks the one `Parallel` value it is given. A run of one process has
the same value with `size` 1, whose methods do nothing and import nothing.

Started by torchrun, every rank runs the whole training loop as if it were alone. TRL, accelerate and vLLM must
therefore not see the launcher's variables: `open_parallel` takes them out of the environment, which has to happen
before those libraries are imported. The ranks talk through a process group of their own, beside torch's default group,
because vLLM makes a default group for itself and destroys it when its engine closes.

Every call is collective: all ranks make the same calls in the same order. Each call first exchanges a short message
between the ranks, so that a rank that failed, or that is at another place in the program, ends the others with one
clear error instead of a wait without end.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from qerl.errors import ConfigError, ParallelError, QerlError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
logger = logging.getLogger(__name__)

TIME_LIMIT_S = 1800.0  # of one call: the slowest rank's rollout and grading must fit
CARDS_LIMIT_S = 45.0  # of a sum on the cards, which all ranks have reached; NCCL's first one connects them
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# What torchrun sets beside them. With TORCHELASTIC_USE_AGENT_STORE left in place vLLM's own group of one process would
# join the launcher's store as a client and hang.
OTHERS = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE")
ELASTIC = "TORCHELASTIC_"
FAILED = "failed"  # the call of a rank that raised


@dataclass(frozen=True)
class Parallel:
    """The place of this process among the `size` processes of a run.

    `rank` counts all of them and `local_rank` those of this host, where it picks the card.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: Group | None = field(default=None, repr=False, compare=False)  # None for one process

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def span(self, count: int) -> slice:
        """This rank's part of `count` things in their order; the parts of two ranks differ by at most one."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.group is not None:
            self.group.exchange("barrier", None)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank, on every rank. Values are pickled."""
        return [value] if self.group is None else self.group.exchange("gather", value)

    def broadcast(self, value: T) -> T:
        """The value of rank 0, on every rank; the others' values are ignored."""
        if self.group is None:
            return value
        return self.group.exchange("broadcast", value if self.first else None)[0]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` on every rank by the sum over all ranks, to the same bits everywhere; returns it.

        Contiguous, of the same shape and dtype on all ranks, on the CPU or on this rank's card.
        """
        if self.group is not None:
            self.group.sum_(tensor)
        return tensor

    def sum_to_(self, tensor: torch.Tensor, rank: int) -> None:
        """Replace `tensor` on `rank` by the sum over all ranks; on the others it is undefined afterwards.

        Tensors as for `sum_`. It takes half the traffic.
        """
        if self.group is not None:
            self.group.sum_(tensor, rank)

    def send_(self, tensors: Sequence[torch.Tensor], rank: int) -> None:
        """Replace the bytes of all tensors by those that `rank` has. Contiguous, and alike on all ranks."""
        if self.group is not None:
            self.group.send_(tensors, rank)

    def leave(self) -> None:
        """Make no further call: there is no time to wait for the other ranks, which may be anywhere."""
        if self.group is not None:
            self.group.leave()


ALONE = Parallel()  # a run of one process


@contextmanager
def open_parallel(
    environ: MutableMapping[str, str] = os.environ, time_limit_s: float = TIME_LIMIT_S
) -> Iterator[Parallel]:
    """The place of this process, read from the launcher's variables, which are removed from `environ`.

    At the end of the block the ranks wait for each other. What a rank raises inside it is told to the others, which
    raise ParallelError at their next call. Raises ConfigError if variables are missing, and ParallelError if the
    ranks do not find each other within `time_limit_s`.
    """
    launched = {name: environ.pop(name) for name in (*NEEDED, *OTHERS) if name in environ}
    elastic = {name: environ.pop(name) for name in list(environ) if name.startswith(ELASTIC)}
    if int(launched.get("WORLD_SIZE", 1)) == 1:
        yield ALONE
        return
    if missing := [name for name in NEEDED if name not in launched]:
        raise ConfigError(
            f"WORLD_SIZE is {launched['WORLD_SIZE']} and {missing[0]} is not set: start several processes with "
            "torchrun, or unset WORLD_SIZE"
        )
    rank, size, local_rank = (int(launched[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    group = _connect(launched, elastic, timedelta(seconds=time_limit_s))
    try:
        yield Parallel(rank, size, local_rank, group)
        group.end()
    except BaseException as error:  # Ctrl-C as well
        group.tell(error)
        raise
    finally:
        group.close()


def _connect(launched: Mapping[str, str], elastic: Mapping[str, str], time_limit: timedelta) -> Group:
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
        text = f"rank {rank} did not find all {size} processes at {host}:{port}: {_first_line(error)}"
        raise ParallelError(text) from error


def check_same(parallel: Parallel, facts: Mapping[str, object]) -> None:
    """Raise ConfigError if a rank has something else than rank 0 under one of the names of `facts`."""
    of_ranks = parallel.gather(dict(facts))
    for rank, of_rank in enumerate(of_ranks):
        if different := [name for name in facts if of_rank.get(name) != of_ranks[0][name]]:
            raise ConfigError(
                f"rank {rank} has another {different[0]} than rank 0: give all processes the same command, the same "
                "files and the same packages"
            )


class Group:
    """The connections between the ranks: gloo for messages and for tensors on a CPU, NCCL for tensors on a card."""

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
        kind = f"sum of {tensor.dtype} {tuple(tensor.shape)}"
        self._meet(kind if rank is None else f"{kind} on rank {rank}", [tensor])
        with self._failing():
            group = self._group_of(tensor)
            self._wait_for(group.allreduce([tensor]) if rank is None else group.reduce([tensor], _on(rank)), tensor)

    def send_(self, tensors: Sequence[torch.Tensor], rank: int) -> None:
        """See `Parallel.send_`."""
        import torch

        self._meet(f"{len(tensors)} tensors of rank {rank}", tensors)
        with self._failing():
            for tensor in tensors:
                if tensor.numel():
                    data = tensor.detach().view(-1).view(torch.uint8)
                    self._wait_for(self._group_of(data).broadcast([data], _from(rank)), data)

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
            raise ParallelError(f"{text} ({_first_line(error)})") from error


def _on(rank: int) -> Any:
    from torch.distributed import ReduceOptions

    options = ReduceOptions()
    options.rootRank = rank
    return options


def _from(rank: int) -> Any:
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = rank
    return options


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, QerlError) else f"{type(error).__name__}: {error}"


def _first_line(error: object) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
