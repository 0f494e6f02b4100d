"""Which card a process uses, on a host with several: one is chosen before CUDA starts.

TRL and transformers would spread a run over all cards that they see, and qerl trains on one. CUDA reads
CUDA_VISIBLE_DEVICES when it starts, and even `torch.cuda.is_available()` starts it. A command therefore calls
`choose_card` first of all; nothing here imports torch. A command for several cards leaves the call out, or gives each
process its own card by its local rank.
"""

import ctypes
import logging
import os
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from qerl.base.errors import ConfigError

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
TIMEOUT_S = 10
BF16_CAPABILITY = (8, 0)  # Ampere and newer
FP8_CAPABILITY = (8, 9)  # for products of e4m3: Ada, Hopper and newer
VLLM_ATTENDS = 10  # major capability of B200: vLLM has better kernels for prompts there than our attention goes with

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VisibleCard:
    """A card as nvidia-smi reports it; where it does not know the memory, that is 0."""

    index: int  # in the order of the bus
    uuid: str
    name: str
    free_gib: float
    total_gib: float

    def __str__(self) -> str:
        return f"{self.index} ({self.name}, {self.free_gib:.0f} of {self.total_gib:.0f} GiB free)"


def choose_card(
    local_rank: int | None = None, environ: MutableMapping[str, str] = os.environ, gpu: int | None = None
) -> None:
    """Leave one card visible to CUDA: card `gpu`, that of this process's `local_rank`, or the one with the most free
    memory.

    Does nothing where there is at most one. Raises ConfigError for a host with fewer cards than processes, and for a
    `gpu` that is not visible.
    """
    if gpu is not None:
        _take(gpu, environ)
        return
    named = named_cards(environ)
    if named is not None and len(named) < 2:
        return
    cards = visible_cards(environ)
    if named is not None and len(cards) < len(named):  # MIG devices, or there is no nvidia-smi to ask
        environ[VISIBLE] = _at(named, local_rank or 0)
        logger.info("using %s of %s: free memory is not known here", environ[VISIBLE], ", ".join(named))
    elif len(cards) > 1:
        card = best_card(cards) if local_rank is None else _at(cards, local_rank)
        _show(card, environ)
        logger.info("using card %s of %d; --gpu or CUDA_VISIBLE_DEVICES picks another", card, len(cards))


def best_card(cards: Sequence[VisibleCard]) -> VisibleCard:
    """The one with the most free memory; of equal ones the first."""
    return max(cards, key=lambda card: card.free_gib)


def visible_cards(environ: Mapping[str, str] = os.environ) -> list[VisibleCard]:
    """The cards that CUDA would show this process, as far as nvidia-smi can tell which they are."""
    cards = installed_cards()
    named = named_cards(environ)
    if named is None:
        return cards
    # By default CUDA counts the fastest card first and nvidia-smi follows the bus: the same if all are of one kind.
    same_order = environ.get(ORDER) == "PCI_BUS_ID" or len({card.name for card in cards}) == 1
    found = [_named(name, cards, same_order) for name in named]
    return [card for card in found if card is not None]


def named_cards(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES: numbers, or UUIDs of cards or MIG devices; None if it is not set.

    CUDA ignores what follows -1.
    """
    if (text := environ.get(VISIBLE)) is None:
        return None
    names = [name.strip() for name in text.split(",")]
    return names[: next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))]


def installed_cards() -> list[VisibleCard]:
    """All cards of this host but those that are split into MIG devices; none without a driver."""
    rows = nvidia_smi("index", "uuid", "name", "memory.free", "memory.total", "mig.mode.current")
    return [
        VisibleCard(int(index), uuid, name, _gib(free), _gib(total))
        for index, uuid, name, free, total, mig in rows
        if mig != "Enabled"
    ]


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed: without its library CUDA finds no card. Loading it does not start CUDA."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None if there is none."""
    rows = nvidia_smi("driver_version")
    return rows[0][0] or None if rows else None


def nvidia_smi(*fields: str) -> list[list[str]]:
    """What nvidia-smi says of each card, memory in MiB; nothing where it is missing, fails or hangs."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)] if result.returncode == 0 else []


def _take(gpu: int, environ: MutableMapping[str, str]) -> None:
    cards = {card.index: card for card in visible_cards(environ)}
    if gpu not in cards:
        seen = ", ".join(map(str, cards.values())) or "none"
        within = f" within CUDA_VISIBLE_DEVICES={environ[VISIBLE]}" if VISIBLE in environ else ""
        raise ConfigError(f"--gpu {gpu}: nvidia-smi shows these cards{within}: {seen}; name one, or leave it out")
    _show(cards[gpu], environ)
    logger.info("using card %s, by --gpu", cards[gpu])


def _show(card: VisibleCard, environ: MutableMapping[str, str]) -> None:
    """Let CUDA see this card alone, by its number on the bus: vLLM 0.25.1 reads the variable and knows no UUIDs."""
    environ |= {ORDER: "PCI_BUS_ID", VISIBLE: str(card.index)}


def _named(name: str, cards: Sequence[VisibleCard], same_order: bool) -> VisibleCard | None:
    if name.isdecimal():
        return next((card for card in cards if same_order and card.index == int(name)), None)
    return next((card for card in cards if card.uuid.startswith(name)), None)  # CUDA takes the beginning of a UUID too


def _at(cards: Sequence[T], local_rank: int) -> T:
    if local_rank >= len(cards):
        raise ConfigError(
            f"{local_rank + 1} processes were started on a host with {len(cards)} cards: start one for each card"
        )
    return cards[local_rank]


def _gib(mebibytes: str) -> float:
    try:
        return float(mebibytes) / 1024
    except ValueError:  # [N/A] where host and card share their memory
        return 0.0
