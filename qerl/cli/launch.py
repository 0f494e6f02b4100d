"""Start a command once for each of several cards of this machine, as torchrun does, and give each process its card."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from qerl.base.devices import choose_card, visible_cards
from qerl.base.errors import ConfigError
from qerl.base.parallel import Parallel, open_parallel

OPTION = "--gpus"


def launch(gpus: int, arguments: Sequence[str]) -> NoReturn:
    """Run `qerl ARGUMENTS`, without --gpus, as `gpus` processes, and exit as they did.

    torch's elastic agent starts them, gives them torchrun's variables, passes signals on, and ends the others if one
    of them dies. Raises ConfigError if the machine has fewer cards.
    """
    cards = len(visible_cards())
    if gpus > cards:
        raise ConfigError(f"--gpus {gpus} asks for more cards than the {cards} that are visible here: ask for fewer")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // gpus)))
    # As torchrun --standalone: a store of its own at a free port.
    config = LaunchConfig(1, 1, gpus, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="qerl", max_restarts=0)
    try:
        elastic_launch(config, sys.executable)("-m", _module(), *without_option(arguments))
    except ChildFailedError as error:  # the ranks have said why
        _, failure = error.get_first_failure()
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit(0)


@contextmanager
def one_card_each(gpu: int | None) -> Iterator[Parallel]:
    """Before the libraries on torch are imported, which would find other cards and other processes.

    One process takes `gpu`, if that is given. Of several each takes the card of its local rank, and only the first one
    logs what is not a warning.
    """
    with open_parallel() as parallel:
        if gpu is not None and parallel.size > 1:
            raise ConfigError(f"--gpu {gpu} is for one process, and {parallel.size} were started: leave it out")
        choose_card(parallel.local_rank if parallel.size > 1 else None, gpu=gpu)
        if not parallel.first:
            logging.getLogger().setLevel(logging.WARNING)
        yield parallel


def check_gpus(gpu: int | None, gpus: int | None) -> None:
    """Raise ConfigError if one card is named and several are asked for."""
    if gpu is not None and gpus is not None:
        raise ConfigError("--gpu names one card and --gpus asks for several: leave one of them out")


def _module() -> str:
    """What runs here: `python -m eval.NAME`, or the command line."""
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None and spec.name.startswith("eval.") else "qerl.cli.main"


def without_option(arguments: Sequence[str]) -> list[str]:
    """The arguments without --gpus and its value."""
    kept, skip = [], False
    for word in arguments:
        if not skip and word != OPTION and not word.startswith(f"{OPTION}="):
            kept.append(word)
        skip = word == OPTION
    return kept
