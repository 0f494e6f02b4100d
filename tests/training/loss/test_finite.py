"""Weights that are not finite stop every rank, whichever of them has them."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.base.parallel import ALONE
from training.loss.finite import check_trained


def ranks(other):
    """One of two ranks, where the other one found `other`."""
    return SimpleNamespace(gather=lambda found: [found, other])


@pytest.mark.parametrize(
    ("value", "parallel", "fits"),
    [
        (3e38, ALONE, True),
        (math.nan, ALONE, False),
        (-math.inf, ALONE, False),
        (0.0, ranks(other=True), True),
        (0.0, ranks(other=False), False),
        (math.inf, ranks(other=True), False),
    ],
)
def test_every_rank_stops(value, parallel, fits):
    weights = [torch.zeros(2, 3), torch.tensor([[0.0, value]], dtype=torch.bfloat16), torch.ones(4)]
    if fits:
        check_trained(weights, 7, Path("runs/a"), parallel)
        return
    with pytest.raises(EngineError, match=r"update of step 7 left NaN or infinity .* checkpoint in runs/a$"):
        check_trained(weights, 7, Path("runs/a"), parallel)


def test_a_rank_without_masters_stops_with_the_others():
    check_trained([], 7, Path("runs/a"), ALONE)
    with pytest.raises(EngineError):
        check_trained([], 7, Path("runs/a"), ranks(other=False))
