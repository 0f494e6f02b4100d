"""Tests of the marker `gpu` are skipped, with the reason, on a machine without a card."""

import pytest
import torch


def skip_without_card(items):
    """A mark whose condition `instead` holds (Triton's interpreter, NVRTC without a card) lets its test run."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none on this machine")
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark is not None and not mark.kwargs.get("instead"):
            item.add_marker(skip)
