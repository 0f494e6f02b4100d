"""The state of a Python program that a call of qerl puts back when it ends, however it ends.

A command may change its process as it likes. A program goes on: with its environment, loggers, random generators and
torch's settings as they were, and without an engine that holds a card's memory. One thing stays: once CUDA has
started, the process keeps its card, and CUDA_VISIBLE_DEVICES says which.
"""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qerl.base.devices import ORDER, VISIBLE
from qerl.cli.terminal import NOISY_LOGGERS, quiet_libraries_
from qerl.engine.open import engines_closed_on_error


@contextmanager
def as_before() -> Iterator[None]:
    """Within it libraries are quiet; afterwards the program's state is what it was. Imports torch."""
    environment = dict(os.environ)
    loggers = [logging.getLogger(), *map(logging.getLogger, NOISY_LOGGERS)]
    levels = [logger.level for logger in loggers]
    quiet_libraries_()
    try:
        import torch  # before the number of threads is chosen, which would else hold for the whole program

        with _same_numbers(torch), _same_torch(torch), engines_closed_on_error():
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        _restore_environment(environment)


def _restore_environment(before: dict[str, str]) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        before = before | {name: os.environ[name] for name in (VISIBLE, ORDER) if name in os.environ}
    for name in set(os.environ) - set(before):
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def _same_numbers(torch: Any) -> Iterator[None]:
    """Put the states of the random generators back."""
    import numpy

    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cards is not None:
            torch.cuda.set_rng_state_all(cards)


@contextmanager
def _same_torch(torch: Any) -> Iterator[None]:
    """Put torch's settings back."""
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    dtype, threads, gradients = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
        torch.set_float32_matmul_precision(precision)
