"""Everything about an evaluation that is settled before any weight is loaded.

    model -> base, adapter, run            qerl.checkpoint.resolve, from the files
    prompt                                 what was asked, else the run's config.yaml, else the task's
    examples -> prompts (token ids)        qerl.data.tasks, the same functions that training uses
    prompts -> batches                     longest first; depends only on the prompts, samples and batch size

So a finished evaluation is recognized, and an impossible one refused, without opening an engine.

An environment is named, or it is the one that the run was trained with. A model that is evaluated chooses no code to
run and no server to ask: if the run's environment does not ship with qerl, it has to be named.

The identity is what decides the numbers, as plain JSON values; two evaluations with equal identities give equal rows.
Weights and data are identified by their contents and not by their paths, so a folder that was trained further counts as
another model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.result import Key
from eval.settings import BATCH_SIZE, MAX_NEW_TOKENS, EvalSettings
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.own_function import EPISODE_COLUMNS
from qerl.base.program import PYTHON, source_of
from qerl.checkpoint.folder import weights_digest
from qerl.checkpoint.load import check_chat_template, check_switches, load_tokenizer, local_folder
from qerl.checkpoint.resolve import ModelRef, describe, newest_model, resolve_model, run_of, switches_for
from qerl.checkpoint.shards import read_config
from qerl.config.environment import EnvironmentConfig
from qerl.config.recipe import load_config
from qerl.data.examples import DropReport, check_answers, check_source, load_examples
from qerl.data.grading.grade import check_grader, find_grader
from qerl.data.rows import is_local, sources_of
from qerl.data.sequences import Renderer
from qerl.data.tasks import TASKS, Task, for_episodes, get_task, task_of, with_grader
from qerl.engine.interface import SamplingParams
from qerl.engine.open import with_chosen_engine
from qerl.episodes.build import KNOWN
from qerl.episodes.driven import Episode
from qerl.episodes.play import Environments, open_environments
from qerl.plan.sizes import sizes_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.loss.groups import Prompt
    from training.rollout.sampler import Asking

logger = logging.getLogger(__name__)

EVALS = Path("evals")


@dataclass(frozen=True)
class Plan:
    """One evaluation, ready to be run."""

    settings: EvalSettings  # with engine, batch size and memory chosen
    ref: ModelRef
    task: Task  # with the prompt that is used
    dropped: DropReport
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    asking: Asking
    batches: list[list[Key]]
    environment: EnvironmentConfig | None = None
    identity: dict[str, Any] = field(init=False)  # what decides the numbers, as plain JSON values
    out: Path = field(init=False)

    @property
    def sampling(self) -> SamplingParams:
        return self.asking.sampling

    @property
    def given(self) -> list[str]:
        """The grader, the environment and the tools that are objects of the Python program."""
        code = self.environment
        names = [self.task.grader, *([code.name, *code.tools] if code else [])]
        return [name for name in names if is_given(name)]

    def __post_init__(self) -> None:
        identity = describe_identity(self)  # at once: the weights may be others later
        object.__setattr__(self, "identity", identity)
        object.__setattr__(self, "out", self.settings.out or default_out(self.ref, self.task.name, identity))


def make_plan(settings: EvalSettings) -> Plan:
    """Read everything but the weights. Raises ConfigError, CheckpointError or DataError with what to write instead."""
    settings, asked = find_task(settings)
    check_grader(asked)
    check_source(asked, settings.data, "test", settings.columns)  # torch is imported below
    ref = find_model(settings)
    check_chat_template(ref)
    logger.info("model: %s", describe(ref))
    settings = with_engine(settings)
    settings = replace(settings, batch_size=settings.batch_size or BATCH_SIZE[settings.engine])
    run = run_of(ref)
    settings = with_memory(settings, run)
    task = with_prompt(asked, settings, run)
    environment = find_environment(settings, run)
    rows = (settings.data, "test", settings.columns, settings.limit, settings.keep_unreadable)
    examples, dropped = load_examples(task if environment is None else for_episodes(task), *rows)
    check_answers(task, examples)
    check_grader(task, examples, EPISODE_COLUMNS if environment is not None else ())
    from training.rollout.prompts import prompts_of
    from training.rollout.sampler import Asking  # it imports torch

    folder = local_folder(ref.base)
    tokenizer = load_tokenizer(folder, settings.trust_remote_code)
    switches = switches_for(run, settings.chat_template_kwargs)
    check_switches(tokenizer, switches, "--chat-template-kwargs")
    environments = None
    if environment is not None:
        environments = open_environments(environment, tokenizer, folder, MAX_NEW_TOKENS, MAX_NEW_TOKENS, switches)
    renderer = Renderer(tokenizer, switches, environments and environments.chat.prompt)
    prompts = prompts_of(task, examples, renderer)
    ids = [prompt.ids for prompt in prompts]
    max_new_tokens = find_max_new_tokens(settings.max_new_tokens, ids, context_length(folder))
    if environments is not None:
        limits = replace(environments.limits, max_tokens=max_new_tokens, context=max(map(len, ids)) + max_new_tokens)
        environments = replace(environments, limits=limits)
    sampling = SamplingParams(max_new_tokens, settings.temperature, settings.top_p)
    asking = Asking(sampling, 1, environments, lambda _, row: part_seed(settings.seed, f"environment/{row}"))
    batches = plan_batches(ids, settings.samples, settings.batch_size)
    dropped = dropped.without(renderer.left_out)
    return Plan(settings, ref, task, dropped, tokenizer, prompts, asking, batches, environment)


def find_task(settings: EvalSettings) -> tuple[EvalSettings, Task]:
    """The task of that name, or a task for a file of rows, which then becomes the data. Raises ConfigError."""
    if settings.task in TASKS or not is_local(settings.task):
        return settings, with_grader(get_task(settings.task), settings.grader, settings.grader_timeout_s)
    if settings.data is not None:
        raise ConfigError(
            f"{settings.task} is a file of rows, and --data {settings.data} names others: leave --data out, or name "
            "the task whose prompt and grading apply (`qerl recipes tasks`)"
        )
    path = Path(settings.task)
    name = path.name.partition(".")[0] or "rows"
    if settings.grader is not None:
        logger.info("%s: rows of your own, graded by %s", path, settings.grader)
        task = replace(get_task("own"), name=name)
    else:
        logger.info("%s: rows of your own, graded as numbers or formulas", path)
        task = Task(name=name, hub=None, splits={"test": "test"}, answer_kind="math")
    return replace(settings, data=settings.task), with_grader(task, settings.grader, settings.grader_timeout_s)


def find_model(settings: EvalSettings) -> ModelRef:
    """The model that was asked for, else the newest one made here. Raises CheckpointError if there is none."""
    if settings.model is not None:
        return resolve_model(settings.model, settings.load, settings.adapter, settings.start)
    if settings.adapter is not None:
        return resolve_model(settings.adapter, settings.load, start=settings.start)
    newest = newest_model(settings.load)
    if newest is None:
        raise CheckpointError(
            "no --model was given, and neither runs/ nor checkpoints/ holds one made here: write --model MODEL "
            "(folder, hub id, or `tiny`), or make one with `qerl quantize --model MODEL`"
        )
    logger.info("no --model given: taking the newest run or checkpoint made here, %s", newest.path)
    return newest


def with_prompt(task: Task, settings: EvalSettings, run: Path | None) -> Task:
    """The task with the prompt that was asked for, else the one that the run trained with, else the task's own."""
    system, template, source = task.system_prompt, task.prompt_template, f"task {task.name}"
    if run is not None:
        # Of several sources the first with this task, whose prompt it then learned.
        sources = [source.data for source in sources_of(load_config(run / "config.yaml", evaluated=True).data)]
        data = next((data for data in sources if data.task == task.name), sources[0])
        if data.grader is not None and task.grader is None and data.task == task.name:
            # It has to be named here, since a model that is evaluated chooses no code to be run.
            raise ConfigError(
                f"{run} was trained with the grader {data.grader}, and the task's own grading would be another: add "
                f"--grader {data.grader}"
            )
        trained = task_of(data)
        system, template = trained.system_prompt, trained.prompt_template
        source = f"{run / 'config.yaml'} (the prompt that trained)"
    if settings.system_prompt is not None:
        system, source = settings.system_prompt or None, f"--system-prompt, the rest {source}"
    if settings.prompt_template is not None:
        template, source = settings.prompt_template, f"--prompt-template, the rest {source}"
    logger.info("prompt from %s: system %r, template %r", source, system, template)
    return replace(task, system_prompt=system, prompt_template=template)


def with_engine(settings: EvalSettings) -> EvalSettings:
    """The settings with the engine that runs here. Raises ConfigError for options that this engine does not have."""
    return replace(settings, engine=with_chosen_engine(settings.engine_options()).engine)


def with_memory(settings: EvalSettings, run: Path | None) -> EvalSettings:
    """For vllm, the settings with the memory limits under which the run was trained.

    Limits that were asked for come first, and one of the run that does not fit these is left out.
    """
    if run is None or settings.engine != "vllm":
        return settings
    config = load_config(run / "config.yaml", evaluated=True)
    memory = config.rollout.memory if settings.memory is None else settings.memory
    cap = config.memory.cap_gib if settings.cap_gib is None else settings.cap_gib
    if memory is not None and cap is not None and cap < memory > 1:  # one of them was asked for, and decides
        memory, cap = settings.memory, settings.cap_gib
    if (memory, cap) != (settings.memory, settings.cap_gib):
        words = {"memory.cap_gib": cap, "rollout.memory": memory}
        limits = ", ".join(f"{key} {value:g}" for key, value in words.items() if value is not None)
        logger.info("GPU memory as in %s: %s (--cap-gib, --memory)", run / "config.yaml", limits)
    return replace(settings, memory=memory, cap_gib=cap)


def context_length(folder: Path) -> int | None:
    """How many tokens a prompt and its completion may have together; None if config.json does not say."""
    return sizes_of(read_config(folder), str(folder)).positions


def find_max_new_tokens(asked: int | None, prompts: Sequence[Sequence[int]], context: int | None) -> int:
    """The limit of a completion: as asked, else 4096 or as much as the context leaves beside the longest prompt."""
    longest = max(map(len, prompts))
    room = MAX_NEW_TOKENS if context is None else context - longest
    if room < 1:
        raise ConfigError(
            f"the longest prompt has {longest} tokens and the model's context {context}: give shorter questions, or a "
            "model with a longer context"
        )
    if asked is None:
        limit = min(room, MAX_NEW_TOKENS)
        logger.info("completions end at %d tokens (--max-new-tokens)", limit)
        return limit
    if context is not None and asked > room:
        raise ConfigError(
            f"--max-new-tokens {asked} and the longest prompt ({longest} tokens) exceed the model's context of "
            f"{context}: write {room} or less"
        )
    return asked


def plan_batches(prompts: Sequence[Sequence[int]], samples: int, batch_size: int) -> list[list[Key]]:
    """(row, sample) in batches of at most `batch_size`: longest prompt first, the samples of a row side by side.

    So prompts of similar length are batched together, which saves padding, and a batch that does not fit into memory
    fails at the start.
    """
    rows = sorted(range(len(prompts)), key=lambda row: (-len(prompts[row]), row))
    keys = [(row, sample) for row in rows for sample in range(samples)]
    return [keys[start : start + batch_size] for start in range(0, len(keys), batch_size)]


def part_seed(seed: int, part: int | str) -> int:
    """The seed, of at most 31 bits, of a batch by its number, or of the environment of a row, all of whose episodes
    begin alike. Nothing else decides it but the evaluation's seed."""
    return int.from_bytes(hashlib.sha256(f"eval/{seed}/{part}".encode()).digest()[:4], "big") >> 1


def default_out(ref: ModelRef, task: str, identity: dict[str, Any]) -> Path:
    """`<run>/eval/<task>-<hash>`, or `evals/<model>-<task>-<hash>`; the hash is of the identity."""
    name = f"{task}-{digest(identity)[:8]}"
    if (run := run_of(ref)) is not None:
        return run / "eval" / name
    named = ref.path if ref.kind == "adapter" or Path(ref.base).is_dir() else Path(ref.base)
    return EVALS / f"{named.resolve().name}-{name}"


NONE = "none"


def find_environment(settings: EvalSettings, run: Path | None) -> EnvironmentConfig | None:
    """What the model talks to; None for completions of one turn. Raises ConfigError if it would have to be named."""
    trained = None if run is None else load_config(run / "config.yaml", evaluated=True).environment
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


def is_given(name: str | None) -> bool:
    """Whether a grader, an environment or a tool is an object of the Python program."""
    return (name or "").startswith(f"{PYTHON}:")


def identity_of(config: EnvironmentConfig, environments: Environments) -> list[Any]:
    """What decides the episodes, beside the model: the settings, the files of the user's code, a program's objects."""
    given = [name for name in (config.name, *config.tools) if is_given(name)]
    texts = [hashlib.sha256(source_of(KNOWN[name])).hexdigest() for name in given]
    files = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in environments.runner.files]
    return [config.model_dump(mode="json"), files, *([texts] if texts else [])]


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
    if plan.task.grader is not None:  # its file, the columns that it may read, and the user's files that it imports
        source, *imported = (text.decode("utf-8", "replace") for _, text in find_grader(plan.task).sources)
        extra = [{key: repr(value) for key, value in prompt.example.extra.items()} for prompt in plan.prompts]
        found["grader"] = digest([plan.task.grader, source, extra, *([imported] if imported else [])])
    if plan.environment is not None:
        found["environment"] = digest(identity_of(plan.environment, plan.asking.environments))
    return found


def digest(value: Any) -> str:
    """16 hex digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
