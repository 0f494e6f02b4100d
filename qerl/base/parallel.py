"""Which process of a run this is, and everything the processes say to each other.

Code asks the one `Parallel` value it is given. A run of one process has the same value with `size` 1, whose methods do
nothing and import nothing. `qerl/base/process_group.py` makes the connections of several.

Started by torchrun, every rank runs the whole training loop as if it were alone. TRL, accelerate and vLLM must
therefore not see the launcher's variables: `open_parallel` takes them out of the environment, which has to happen
before those libraries are imported. The ranks talk through a process group of their own, beside torch's default group,
because vLLM makes a default group for itself and destroys it when its engine closes.

Every call is collective: all ranks make the same calls in the same order. Each call first exchanges a short message
between the ranks, so that a rank that failed, or that is at another place in the program, ends the others with one
clear error instead of a wait without end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from qerl.base.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from qerl.base.process_group import Group

T = TypeVar("T")

TIME_LIMIT_S = 1800.0  # of one call: the slowest rank's rollout and grading must fit
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# What torchrun sets beside them. With TORCHELASTIC_USE_AGENT_STORE left in place vLLM's own group of one process would
# join the launcher's store as a client and hang.
OTHERS = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE")
ELASTIC = "TORCHELASTIC_"


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
    from qerl.base.process_group import connect

    group = connect(launched, elastic, timedelta(seconds=time_limit_s))
    try:
        yield Parallel(rank, size, local_rank, group)
        group.end()
    except BaseException as error:  # Ctrl-C as well
        group.tell(error)
        raise
    finally:
        group.close()


def check_same(parallel: Parallel, facts: Mapping[str, object]) -> None:
    """Raise ConfigError if a rank has something else than rank 0 under one of the names of `facts`."""
    of_ranks = parallel.gather(dict(facts))
    for rank, of_rank in enumerate(of_ranks):
        if different := [name for name in facts if of_rank.get(name) != of_ranks[0][name]]:
            raise ConfigError(
                f"rank {rank} has another {different[0]} than rank 0: give all processes the same command, the same "
                "files and the same packages"
            )
