"""What a run was given, trains and packs, as run.json keeps it: a resumed run does not change any of it in silence."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import ConfigError
from qerl.base.files import replace_text
from qerl.base.versions import versions
from qerl.config.data import REWARD_NAMES, is_url
from qerl.config.keys import drop_removed_
from qerl.data.grading.grade import find_grader
from qerl.data.rows import sources_of
from qerl.data.tasks import Task, task_of
from qerl.plan.trained import masters_dtype
from training.rewards.rewards import find_reward
from training.run_dir.folder import read_about

if TYPE_CHECKING:
    from qerl.config.quant import QatConfig
    from qerl.config.schema import RewardConfig, RunConfig
    from training.loss.groups import Prompt


logger = logging.getLogger(__name__)

PACKAGES = ("qerl", "torch", "transformers", "trl", "peft", "accelerate", "compressed-tensors", "vllm")
Inputs = Mapping[str, str]  # what it is, in words -> digest or version


def inputs_of_run(
    config: RunConfig, prompts: Sequence[Prompt], validated: Sequence[Prompt] = (), environment: Sequence[str] = ()
) -> dict[str, str]:
    """The digests of a run with one source as `inputs_of`; with several, rows, prompts and functions of each."""
    sources = sources_of(config.data, config.rewards)
    if len(sources) == 1:
        return inputs_of(prompts, task_of(sources[0].data), sources[0].rewards, validated, environment)
    found: dict[str, str] = {}
    for index, source in enumerate(sources):
        own, asked = ([one for one in each if one.source == index] for each in (prompts, validated))
        of_source = inputs_of(own, task_of(source.data), source.rewards, asked, environment)
        found |= {what if "environment" in what else f"{what} of {source.name}": it for what, it in of_source.items()}
    return found


def inputs_of(
    prompts: Sequence[Prompt],
    task: Task,
    rewards: Sequence[RewardConfig],
    validated: Sequence[Prompt] = (),
    environment: Sequence[str] = (),
) -> dict[str, str]:
    """Digests of the rows, of the prompts as token ids, of validation's if there are any, and of the files of
    the grader, of own rewards in the order of the recipe, and of the `environment`."""
    rows, ids = _digests(prompts)
    digests = {"the rows of the data": rows, "the prompts as tokens": ids}
    if validated:
        digests["the validation's rows"], digests["the validation's prompts as tokens"] = _digests(validated)
    own = [("grader", find_grader(task))] if task.grader is not None else []
    for file in map(Path, environment):
        digests[f"the environment's source {file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    own += [("reward", find_reward(each.name, each.timeout_s)) for each in rewards if _is_own(each)]
    for kind, function in own:
        for name, content in function.sources:
            what = f"the {kind}'s source {name}"
            digests[what] = hashlib.sha256(digests.get(what, "").encode() + content).hexdigest()
    return {what: digest[:16] for what, digest in digests.items()}


def _digests(prompts: Sequence[Prompt]) -> tuple[str, str]:
    """Of the rows and of the token ids."""
    rows, ids = hashlib.sha256(), hashlib.sha256()
    for prompt in prompts:
        example = prompt.example
        row = [example.id, example.question, example.answer, dict(example.extra)]
        rows.update(json.dumps(row, sort_keys=True, default=repr).encode(errors="surrogatepass") + b"\n")
        ids.update(json.dumps(prompt.ids).encode())
    return rows.hexdigest(), ids.hexdigest()


def check_same_inputs(run_dir: Path, inputs: Inputs, accept: bool) -> None:
    """Raise ConfigError if rows, rewards or packages are not those that the run began with; `accept` only says it."""
    about = read_about(run_dir)
    if not about:
        return
    if not about.get("inputs"):
        logger.warning("%s was begun without digests: whether its rows and rewards changed is not known", run_dir)
    changed = [f"{what} changed" for what in _differing(about.get("inputs") or inputs, inputs)]
    installed, before = versions(PACKAGES), about.get("versions") or {}
    for name in _differing(before, installed):
        changed.append(f"{name} is {installed.get(name, 'not installed')} and was {before.get(name, 'not installed')}")
    if not changed:
        return
    if not accept:
        raise ConfigError(
            f"since {run_dir} began, {', '.join(changed)}: put that back, or add --accept-changes to continue with "
            "what is there now"
        )
    logger.warning("continuing %s although %s", run_dir, ", ".join(changed))


def note_inputs(run_dir: Path, inputs: Inputs, step: int) -> None:
    """Let run.json say what is there from `step` on; what was there before is kept in it."""
    about, now = read_about(run_dir), {"inputs": dict(inputs), "versions": versions(PACKAGES)}
    before = {key: about[key] for key in now if about.get(key)}
    if before == now:
        return
    about["changes"] = [*(about.get("changes") or []), {"after": step, "was": before}]
    replace_text(run_dir / "run.json", json.dumps({**about, **now}, indent=1))


def _differing(before: Inputs, now: Inputs) -> list[str]:
    return [what for what in dict.fromkeys([*before, *now]) if before.get(what) != now.get(what)]


def _is_own(reward: RewardConfig) -> bool:
    return reward.name not in REWARD_NAMES and not is_url(reward.name)


KEY = "qat"  # in run.json
MAY_CHANGE = ("forward", "start_in")  # what the trainer multiplies by, and where it keeps what never changes


def qat_record(qat: QatConfig | None) -> dict[str, Any] | None:
    """What has to stay, of the recipe's section; None if it has none."""
    if qat is None:
        return None
    return {**qat.model_dump(mode="json", exclude=set(MAY_CHANGE)), "masters": masters_dtype(qat)}


def check_same_kind(run_dir: Path, config: RunConfig) -> None:
    """Raise ConfigError if a run's recipe learns from, trains or packs something else than when the run began.

    Masters and optimizer state are of what was trained, and RUN/base has the scales. A run.json of an earlier version
    does not say it.
    """
    about, qat = read_about(run_dir), config.qat
    learns, began = config.kind.learns, (about.get("kind") or {}).get("learns")
    if began not in (None, learns):
        raise ConfigError(
            f"{run_dir / 'config.yaml'} now learns from {learns}, and the run began with {began}: "
            "put its sections sft and distill back, or start a new run"
        )
    if KEY not in about:
        return
    drop_removed_(about)
    before, now = dict(_flat(KEY, about[KEY])), dict(_flat(KEY, qat_record(qat)))
    changed = {key: (before.get(key), now.get(key)) for key in {**before, **now} if before.get(key) != now.get(key)}
    if not changed:
        return
    if None in (about[KEY], qat):
        what = f"{'no' if qat is None else 'a'} section qat, and it had {'one' if qat is None else 'none'}"
    else:
        what = ", ".join(f"{key}: {_shown(new)}, where it was {_shown(old)}" for key, (old, new) in changed.items())
    raise ConfigError(
        f"{run_dir / 'config.yaml'} has {what} when the run began, and what was saved since is of that: put it back, "
        "or start a new run"
    )


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _flat(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Each value below `key` by its dotted key."""
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inner in value.items():
        yield from _flat(f"{key}.{name}", inner)
