"""Start a command once for each of several cards of this machine, as torchrun does."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from qerl.devices import visible_cards
from qerl.errors import ConfigError

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
        elastic_launch(config, sys.executable)("-m", "qerl.cli", *without_option(arguments))
    except ChildFailedError as error:  # the ranks have said why
        _, failure = error.get_first_failure()
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit(0)


def without_option(arguments: Sequence[str]) -> list[str]:
    """The arguments without --gpus and its value."""
    kept, skip = [], False
    for word in arguments:
        if not skip and word != OPTION and not word.startswith(f"{OPTION}="):
            kept.append(word)
        skip = word == OPTION
    return kept
