"""The cards that `qerl plan` knows, with memory, bandwidth and rate. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from qerl.base.errors import ConfigError


@dataclass(frozen=True)
class Card:
    """Memory as the driver reports it, copy bandwidth, and the rate of a large bfloat16 product.

    Bandwidth and rate were measured, or are 85% of the data sheet's for cards that were not available.
    """

    name: str
    memory_gib: float
    gb_per_s: float
    tflops: float
    ranks: int = 1  # cards that share a run, of which this is one


CARDS = {
    card.name: card
    for card in (
        Card("3090", 23.6, 796, 60),
        Card("4090", 23.6, 857, 140),
        Card("5090", 31.4, 1523, 178),
        Card("a6000", 47.4, 653, 131),
        Card("l40s", 44.5, 734, 180),
        Card("a100-40", 39.4, 1322, 265),
        Card("a100", 79.2, 1733, 265),
        Card("h100", 79.2, 2848, 690),
        Card("h200", 139.8, 4200, 690),
    )
}


def card_of(text: str) -> Card:
    """The card of a name (`rtx 4090`), or a card of some GiB (`24`, `24GB`) as fast as the known card of that size.

    Raises ConfigError for anything else.
    """
    given = text.lower().replace(" ", "")
    if (card := CARDS.get(given.removeprefix("rtx"))) is not None:
        return card
    try:
        gib = float(given.removesuffix("gib").removesuffix("gb"))
    except ValueError:
        raise ConfigError(f"--gpu {text!r} is not known: write GiB (24) or one of {', '.join(CARDS)}") from None
    if not 0 < gib < 1024:
        raise ConfigError(
            f"--gpu {text} is not a size of memory: write GiB, such as 24 or 80, or one of {', '.join(CARDS)}"
        )
    nearest = min(CARDS.values(), key=lambda card: abs(card.memory_gib - gib))
    return Card(f"a card of {gib:g} GiB, as fast as a {nearest.name}", gib, nearest.gb_per_s, nearest.tflops)
