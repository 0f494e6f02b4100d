"""What an evaluation depends on: the environment that it plays, and the identity by which its numbers are known again.

An environment is named, or it is the one that the run was trained with. A model that is evaluated chooses no code to
run and no server to ask: if the run's environment does not ship with qerl, it has to be named.

The identity is what decides the numbers, as plain JSON values; two evaluations with equal identities give equal rows.
Weights and data are identified by their contents and not by their paths, so a folder that was trained further counts as
another model.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.settings import EvalSettings
from qerl.base.errors import ConfigError
from qerl.base.program import PYTHON, source_of
from qerl.checkpoint.folder import weights_digest
from qerl.checkpoint.load import local_folder
from qerl.config.environment import EnvironmentConfig
from qerl.data.grading.grade import find_grader
from qerl.episodes.build import KNOWN
from qerl.episodes.driven import Episode
from qerl.episodes.play import Environments

if TYPE_CHECKING:
    from eval.plan import Plan


NONE = "none"


def find_environment(settings: EvalSettings, run: Path | None) -> EnvironmentConfig | None:
    """What the model talks to; None for completions of one turn. Raises ConfigError if it would have to be named."""
    trained = None
    if run is not None:
        from qerl.config.recipe import load_config

        trained = load_config(run / "config.yaml").environment
    if settings.environment == NONE:
        return None
    if settings.environment is None and not settings.tools:
        if trained is not None:
            _check_known(trained, run)
        return trained
    if trained is not None and (trained.name, trained.tools) == (settings.environment, settings.tools):
        return trained
    return EnvironmentConfig(name=settings.environment, tools=settings.tools)


def _check_known(trained: EnvironmentConfig, run: Path) -> None:
    named = [*([trained.name] if trained.name else []), *trained.tools]
    if all(name in KNOWN for name in named):
        return
    add = [f"--environment {trained.name}"] if trained.name else []
    add += [f"--tools {','.join(trained.tools)}"] if trained.tools else []
    raise ConfigError(
        f"{run} was trained with the environment {', '.join(named)}, and a model that is evaluated chooses no code: "
        f"add {' '.join(add)}, or --environment {NONE} for completions of one turn"
    )


def episode_fields(episode: Episode) -> dict[str, Any]:
    """What a row of the evaluation says of an episode."""
    turns = [{"role": turn.role, "text": turn.text} for turn in episode.turns]
    return {"turns": turns, "ended": episode.error or episode.ended, "environment_reward": episode.reward}


def identity_of(config: EnvironmentConfig, environments: Environments) -> list[Any]:
    """What decides the episodes, beside the model: the settings, the files of the user's code, a program's objects."""
    given = [name for name in (config.name, *config.tools) if (name or "").startswith(f"{PYTHON}:")]
    texts = [hashlib.sha256(source_of(KNOWN[name])).hexdigest() for name in given]
    files = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in environments.runner.files]
    return [config.model_dump(mode="json"), files, *([texts] if texts else [])]


def environment_seed(seed: int, row: int) -> int:
    """The seed of an environment of an evaluation. Episodes of one row begin alike."""
    return int.from_bytes(hashlib.sha256(f"eval/{seed}/environment/{row}".encode()).digest()[:4], "big") >> 1


PACKAGES = ("qerl", "torch", "transformers", "peft", "vllm", "compressed-tensors", "math-verify")


def describe_identity(plan: Plan) -> dict[str, Any]:
    """What decides the numbers of a planned evaluation."""
    settings, ref, sampling = plan.settings, plan.ref, plan.sampling
    found = {
        "task": plan.task.name,
        "format": ref.format,
        "base": weights_digest(local_folder(ref.base)),
        "adapter": None if ref.adapter is None else weights_digest(ref.adapter),
        **({} if ref.start is None else {"start": digest([ref.start.rank, weights_digest(ref.start.folder)])}),
        "questions": len(plan.prompts),
        "data": digest([[one.id, one.question, one.answer] for one in (prompt.example for prompt in plan.prompts)]),
        "prompts": digest([prompt.ids for prompt in plan.prompts]),
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
    if plan.task.grader is not None:  # its file, and the columns that it may read
        source = find_grader(plan.task).source.decode("utf-8", "replace")
        extra = [{key: repr(value) for key, value in prompt.example.extra.items()} for prompt in plan.prompts]
        found["grader"] = digest([plan.task.grader, source, extra])
    if plan.environment is not None:
        found["environment"] = digest(identity_of(plan.environment, plan.asking.environments))
    return found


def digest(value: Any) -> str:
    """16 hex digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """The installed versions of the packages that may change a completion or its grade."""
    found = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
