"""What decides an evaluation's numbers, as plain JSON values: two evaluations with equal identities give equal rows.

Weights and data are named by their contents, not by their paths: a folder that was trained on since, or replaced, is
another model, and its old completions are never taken for the new one's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from eval.settings import EvalSettings
from qerl.checkpoint.resolve import ModelRef
from qerl.checkpoint.weights_digest import weights_digest
from qerl.engine.interface import SamplingParams
from qerl.tasks import Example, Task

PACKAGES = ("qerl", "torch", "transformers", "peft", "vllm", "compressed-tensors", "math-verify")


def describe_identity(
    settings: EvalSettings,
    ref: ModelRef,
    folder: Path,
    task: Task,
    examples: Sequence[Example],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
) -> dict[str, Any]:
    """The identity of an evaluation; `folder` holds the base weights, engine and batch size are settled."""
    return {
        "task": task.name,
        "format": ref.format,
        "base": weights_digest(folder),
        "adapter": None if ref.adapter is None else weights_digest(ref.adapter),
        "questions": len(examples),
        "data": digest([[example.id, example.question, example.answer] for example in examples]),
        "prompts": digest(list(prompts)),
        "samples": settings.samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": sampling.max_new_tokens,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "engine": settings.engine,
        "dtype": settings.dtype,
        "kernel": settings.kernel,
        "deterministic": settings.deterministic,
    }


def digest(value: Any) -> str:
    """16 hex digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of the installed packages that may change a completion or its grade."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
