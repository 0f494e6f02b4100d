"""The context that every check gets: the engine, its policy model, prompts and sampling parameters."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from qerl.checkpoint.base_start import BaseStart, start_beside
from qerl.engine.interface import SamplingParams
from qerl.engine.options import EngineOptions
from qerl.engine.vllm.engine import VLLMEngine
from scripts.models.make_random_checkpoint import random_start
from training.policy.kv_ranges import KVCalibration


class Context:
    """The engine, its policy model, and the prompts that all checks share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        started = time.monotonic()
        self.arguments = arguments
        self.start = None if arguments.start is None else start_of(arguments.model, arguments.start)
        self.engine = self.open()
        worker = self.engine.llm.llm_engine.model_executor.driver_worker
        self.report = {
            "model": arguments.model,
            "kernel": self.engine.kernel,
            "attention": self.engine.attention,
            "drawn_by": type(worker.model_runner.sampler).__name__,
            "open_s": round(time.monotonic() - started, 1),
            "startup_s": self.engine.startup_s,
            "ways": ways(),
            "cache_tokens": self.engine.cache_tokens,
            "gpu": torch.cuda.get_device_name(),
            "failed": [],
            "seconds": {},
        }
        self.policy = self.engine.policy_model()
        rng = random.Random(1)
        length = lambda: rng.randint(16, 128)  # noqa: E731 - one line
        self.prompts = [[rng.randint(1, 256) for _ in range(length())] for _ in range(arguments.prompts)]
        self.sampling = SamplingParams(max_new_tokens=arguments.new_tokens)
        if arguments.calibrate_kv:
            calibration = KVCalibration(self.policy, self.prompts, refresh=1)
            calibration.after_sync(self.engine, step=0)
            self.report["kv_scales"] = {layer: asdict(scales) for layer, scales in calibration.scales.items()}
        self.greedy = SamplingParams(max_new_tokens=arguments.new_tokens, temperature=0.0)

    def open(self, **more: Any) -> VLLMEngine:
        """Open the engine; `more` are options that not every context has."""
        arguments = self.arguments
        options = EngineOptions(
            kernel=arguments.kernel,
            deterministic=arguments.deterministic,
            kv_cache_dtype=arguments.kv_cache_dtype,
            max_context=1024,
            max_rank=arguments.rank,
            start=self.start,
            cap_gib=arguments.cap_gib,
            memory=arguments.memory,
            max_sequences=128,
            **more,
        )
        return VLLMEngine(arguments.model, arguments.format, options)


def start_of(model: str, rank: int) -> BaseStart:
    """The base's own start, or where it has none a random one in a folder of its own, about as large as a real one."""
    if (own := start_beside(Path(model), rank)) is not None:
        return own
    folder = Path(tempfile.mkdtemp())
    random_start(Path(model), folder, rank)
    return BaseStart(folder, rank)


def ways() -> dict[str, tuple[str, ...]]:
    """The way in which each quantized shape multiplies, for each of `qerl.formats.nvfp4.ways.TOKENS`."""
    from qerl.engine.vllm.linear import BASES

    return {base.shape.name: base.ways for base in BASES}
