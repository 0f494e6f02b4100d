"""What decides an evaluation's numbers, as plain JSON values. Two evaluations with equal identities give equal rows.

Weights and data are identified by their contents and not by their paths. If a folder was replaced, or trained further,
it counts as another model, and completions of the old one are never taken for those of the new one.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from typing import TYPE_CHECKING, Any

from eval.environment import identity_of
from qerl.checkpoint.adapter_file import weights_digest
from qerl.checkpoint.load import local_folder
from qerl.data.grading.grade import find_grader

if TYPE_CHECKING:
    from eval.plan import Plan

PACKAGES = ("qerl", "torch", "transformers", "peft", "vllm", "compressed-tensors", "math-verify")


def describe_identity(plan: Plan) -> dict[str, Any]:
    """What decides the numbers of a planned evaluation."""
    settings, ref, sampling = plan.settings, plan.ref, plan.sampling
    return {
        "task": plan.task.name,
        "format": ref.format,
        "base": weights_digest(local_folder(ref.base)),
        "adapter": None if ref.adapter is None else weights_digest(ref.adapter),
        **({} if ref.start is None else {"start": digest([ref.start.rank, weights_digest(ref.start.folder)])}),
        "questions": len(plan.examples),
        "data": digest([[example.id, example.question, example.answer] for example in plan.examples]),
        "prompts": digest(list(plan.prompts)),
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
        **_grader(plan),
        **_environment(plan),
    }


def _grader(plan: Plan) -> dict[str, str]:
    """A digest of the grader's file and of the columns that it reads; nothing without a grader."""
    if plan.task.grader is None:
        return {}
    source = find_grader(plan.task).source.decode("utf-8", "replace")
    extra = [{key: repr(value) for key, value in example.extra.items()} for example in plan.examples]
    return {"grader": digest([plan.task.grader, source, extra])}


def _environment(plan: Plan) -> dict[str, str]:
    """A digest of what the model talks to; nothing without an environment."""
    if plan.environments is None:
        return {}
    return {"environment": digest(identity_of(plan.environment, plan.environments))}


def digest(value: Any) -> str:
    """16 hex digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """The installed versions of the packages that may change a completion or its grade."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
