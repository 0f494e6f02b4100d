"""How many threads a process computes with on a CPU: one for a small model, unless the user says otherwise.

torch starts a thread for each core, and the threads of each operation wait for one another. A small model's operations
are shorter than that wait, and on a machine whose cores have other work one late thread holds up all others: a step of
the embedded model then takes 20 times as long. OpenMP reads its variable when torch is imported, so a command calls
`choose_threads` before that.
"""

import logging
import os
import sys
from collections.abc import MutableMapping

from qerl.base.devices import installed_cards
from qerl.base.errors import QerlError
from qerl.plan.sizes import ModelSizes, read_sizes

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # those by which a user chooses
SMALL = 50_000_000  # weights: more than the study's model has (21 M), and far less than the smallest known one (0.5 B)

logger = logging.getLogger(__name__)


def choose_threads(model: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let torch, which must not have been imported, use one thread for a small `model` (any name of a model).

    Does nothing where the user has chosen a number, where there is a GPU, and for a model whose sizes are not known.
    """
    if any(environ.get(name) for name in VARIABLES) or installed_cards():
        return
    try:
        sizes = read_sizes(model)
    except QerlError:  # the command says later what is wrong with it
        return
    if weights(sizes) <= SMALL:
        environ["OMP_NUM_THREADS"] = "1"
        if environ is os.environ and "torch" in sys.modules:  # a program that has imported it already
            sys.modules["torch"].set_num_threads(1)
        logger.info("computing with one thread, as the model is small; OMP_NUM_THREADS sets another number")


def weights(sizes: ModelSizes) -> int:
    """How many weights the matrices of a model have."""
    return sizes.body + sizes.head * (1 if sizes.tied else 2)
