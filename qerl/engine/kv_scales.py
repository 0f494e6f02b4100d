"""Scales of keys, values and queries in 8 bits, one of each per layer, from the largest magnitudes that were seen.

A scale is a power of two, under which the largest magnitude seen has one bit of head room: e4m3 rounds alike under any
of them, down to 2^-15 of the largest, and what exceeds it saturates. Importing this loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qerl.base.errors import EngineError

LARGEST = 448.0  # of e4m3
HEADROOM = 2.0


@dataclass(frozen=True)
class Ranges:
    """The largest magnitudes of a layer's queries, keys and values, as attention gets them."""

    query: float
    key: float
    value: float


@dataclass(frozen=True)
class KVScales:
    """What a layer's queries, keys and values are divided by before they are rounded."""

    query: float
    key: float
    value: float


def scales_of(ranges: Mapping[int, Ranges]) -> dict[int, KVScales]:
    """The scales of each layer, by its number. Raises EngineError for magnitudes that are not finite."""
    return {
        layer: KVScales(*(_scale(value, layer) for value in (one.query, one.key, one.value)))
        for layer, one in ranges.items()
    }


def _scale(largest: float, layer: int) -> float:
    if not math.isfinite(largest):
        raise EngineError(
            f"keys and values of layer {layer} are not finite, so they have no scale: the policy has diverged; lower "
            "optim.learning_rate, or go on from an earlier checkpoint"
        )
    return 2.0 ** math.ceil(math.log2(max(largest, 2.0**-20) * HEADROOM / LARGEST))
