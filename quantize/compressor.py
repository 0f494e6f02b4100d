"""The entry to llm-compressor: import it, forward its log to ours, and take the scheme NVFP4A16 from it.

Importing llm-compressor takes seconds (it imports datasets, transformers' model code and torch.distributed), sets up
loguru and writes to stdout. So it is imported on first use, with its log switched off during the import.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from qerl import formats
from qerl.base.errors import MissingExtraError

SCHEME = formats.DEFAULT.scheme
LOG_SWITCH = "LLM_COMPRESSOR_LOG_DISABLED"
NOISE = (  # repeated many times; we say it once
    "No accelerator available",
    "Disabling tokenizer parallelism",
    "MoE is being linearized after loading",
)

logger = logging.getLogger(__name__)


def check_installed() -> None:
    """Raise MissingExtraError unless llm-compressor is installed. Does not import it."""
    if importlib.util.find_spec("llmcompressor") is None:
        raise MissingExtraError("llmcompressor", "quantize")


@cache
def load_compressor() -> None:
    """Import llm-compressor and forward its log, from WARNING up, to the logger `quantize.compressor`."""
    check_installed()
    with _environment(LOG_SWITCH, "true"):
        from llmcompressor.logger import LoggerConfig, configure_logger
    configure_logger(LoggerConfig(console_log_level=None))

    import loguru

    loguru.logger.add(_to_logging, level="WARNING", format="{message}", filter=_worth_saying)


def _worth_saying(record: dict) -> bool:
    """False for repeated lines and for METRIC lines, of which each linear has two, at a level above WARNING."""
    return record["level"].name != "METRIC" and not record["message"].startswith(NOISE)


def _to_logging(message: str) -> None:
    logger.warning("llm-compressor: %s", str(message).strip())


@cache
def power_of_two_observer() -> str:
    """Register an observer of weights whose global scales are powers of two; returns its name for a modifier."""
    load_compressor()
    import torch
    from llmcompressor.observers import Observer
    from llmcompressor.observers.min_max import MemorylessMinMaxObserver

    from qerl.formats.nvfp4.reference import power_of_two_scale

    name = "qerl_power_of_two"

    @Observer.register(name)
    class PowerOfTwoObserver(MemorylessMinMaxObserver):
        """Block scales as llm-compressor has them, under another global scale."""

        def get_global_scale(self) -> torch.Tensor:
            of_fused = self.fusion_handler.get_fused_statistics()
            bounds = [bound.abs().max() for statistics in of_fused for bound in statistics.values()]
            amax = torch.stack(bounds).max()
            return power_of_two_scale(amax).to(amax.device)

    return name


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
