"""The evaluation by lighteval.

lighteval's model class on our engine. Nothing is cached, as its cache would outlive a change of weights.

lighteval's own tasks on our engine: `qerl eval --suite lighteval 'gsm8k|0'`.

Prompts, metrics and aggregation are those of lighteval 0.13; base, adapter and sampling are ours. With --suite-tasks
FILE (Python with lighteval's TASKS_TABLE) only the tasks of that file are known, and only what they name is downloaded.
lighteval's own registry loads a model from the hub when it is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import tempfile
import time
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lighteval.models.abstract_model import LightevalModel, ModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.prompt_manager import PromptManager
from lighteval.tasks.requests import Doc
from lighteval.utils.cache_management import SampleCache

from eval.environment import versions
from eval.plan import batch_seed, context_length, default_out, find_model, with_engine, with_memory
from eval.result import write_json
from eval.settings import BATCH_SIZE, MAX_NEW_TOKENS, EvalSettings
from qerl.base.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from qerl.checkpoint.adapter_file import weights_digest
from qerl.checkpoint.load import text_of_engine
from qerl.checkpoint.resolve import ModelRef, describe, run_of
from qerl.engine.interface import Engine, SamplingParams

if TYPE_CHECKING:
    from rich.table import Table


class EngineModel(LightevalModel):
    """See lighteval's LightevalModel; `greedy_until` samples at the settings' temperature."""

    def __init__(self, engine: Engine, tokenizer: Any, settings: EvalSettings, context: int, scratch: str) -> None:
        """`context`: tokens of a prompt and its completion together; `scratch`: folder of lighteval's own files."""
        self.config = ModelConfig(model_name=f"qerl-{uuid.uuid4().hex}", cache_dir=scratch)
        self._engine, self._tokenizer, self._settings, self._context = engine, tokenizer, settings, context
        self._text = text_of_engine(tokenizer, engine)
        self._cache = SampleCache(self.config)
        chat = getattr(tokenizer, "chat_template", None) is not None
        self._prompts = PromptManager(chat, tokenizer, settings.system_prompt or None)
        self._batch = settings.batch_size or BATCH_SIZE[engine.name]

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def add_special_tokens(self) -> bool:
        return False

    @property
    def max_length(self) -> int:
        return self._context

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """One response for each document, with its `num_samples` texts, cut at its stop sequences."""
        prompts = [self._encode(self._prompts.prepare_prompt(doc)) for doc in docs]
        responses = [ModelResponse(input=doc.query, input_tokens=ids) for doc, ids in zip(docs, prompts, strict=True)]
        keys = [(number, self._limit(doc)) for number, doc in enumerate(docs) for _ in range(doc.num_samples)]
        for limit in sorted({limit for _, limit in keys}):
            same = [number for number, own in keys if own == limit]
            for start in range(0, len(same), self._batch):
                self._sample(same[start : start + self._batch], limit, start, docs, prompts, responses)
        return responses

    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """Sum of the logprobs of each choice after the document's prompt, and whether greedy sampling writes it."""
        return [self._score(doc) for doc in docs]

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        raise ConfigError("lighteval's perplexity tasks are not supported: take one that samples or compares choices")

    def _sample(self, numbers: list[int], limit: int, start: int, docs: list[Doc], prompts: list, out: list) -> None:
        settings = self._settings
        longest = max(len(prompts[number]) for number in numbers)
        sampling = SamplingParams(min(limit, self._context - longest), settings.temperature, settings.top_p)
        seed = batch_seed(settings.seed, start)
        completions = self._engine.generate([prompts[number] for number in numbers], sampling, seed=seed)
        for number, completion in zip(numbers, completions, strict=True):
            text = self._text(completion.token_ids)
            for stop in docs[number].stop_sequences or ():
                text = text.partition(stop)[0] if stop else text
            out[number].text.append(text)
            out[number].output_tokens.append(completion.token_ids)

    def _score(self, doc: Doc) -> ModelResponse:
        context = self._prompts.prepare_prompt(doc)
        prompt = self._encode(context)
        choices = [self._encode(choice) for choice in doc.choices]
        scores = self._engine.score([prompt] * len(choices), choices)
        sampling = SamplingParams(max(map(len, choices)), 0.0)
        (greedy,) = self._engine.generate([prompt], sampling)
        return ModelResponse(
            input=context,
            input_tokens=prompt,
            output_tokens=choices,
            logprobs=[sum(values) for values in scores],
            argmax_logits_eq_gold=[greedy.token_ids[: len(choice)] == choice for choice in choices],
        )

    def _limit(self, doc: Doc) -> int:
        return self._settings.max_new_tokens or doc.generation_size or MAX_NEW_TOKENS

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


logger = logging.getLogger(__name__)

SUITE_RESULT = "lighteval.json"


def run_suite(settings: EvalSettings) -> tuple[dict[str, Any], Path]:
    """Run lighteval's task; returns what lighteval.json holds, and its folder. Raises a fitting QerlError."""
    if importlib.util.find_spec("lighteval") is None:
        raise MissingExtraError("lighteval", "eval")
    if settings.suite_tasks is not None and not settings.suite_tasks.is_file():
        raise ConfigError(f"--suite-tasks {settings.suite_tasks} is no file: write a Python file with TASKS_TABLE")
    import torch

    ref = find_model(settings)
    settings = with_memory(with_engine(settings), run_of(ref))
    out = settings.out or _default_out(ref, settings)
    if (out / SUITE_RESULT).exists() and not settings.overwrite:
        raise CheckpointError(f"{out} holds a result already: give another --out, or --overwrite")
    started = time.monotonic()
    # lighteval 0.13 switches gradients off for the whole process when it is imported (transformers_model.py, line 70).
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        scores = _scores(settings, ref)
    result = {
        "suite": "lighteval",
        "task": settings.task,
        "model": describe(ref),
        "base": ref.base,
        "adapter": None if ref.adapter is None else str(ref.adapter),
        "format": ref.format,
        "scores": scores,
        "limit": settings.limit,
        "seconds": round(time.monotonic() - started, 1),
        "versions": versions(),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / SUITE_RESULT, result)
    return result, out


def suite_table(result: dict[str, Any]) -> Table:
    """One line per task and metric, with lighteval's standard error."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("task", "metric", "value", "standard error", title=Text(result["model"]), box=box.SIMPLE_HEAD)
    for task, metrics in result["scores"].items():
        for name, value in metrics.items():
            if not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr")
                table.add_row(Text(task), Text(name), f"{value:.4f}", "" if error is None else f"{error:.4f}")
    return table


def _default_out(ref: ModelRef, settings: EvalSettings) -> Path:
    """A folder beside the evaluations of our own tasks, which is in the run if there is one."""
    task = "".join(char if char.isalnum() else "-" for char in settings.task)
    asked = {"weights": weights_digest(ref.adapter or Path(ref.base)), "limit": settings.limit}
    return default_out(ref, f"lighteval-{task}", asked)


def _scores(settings: EvalSettings, ref: ModelRef) -> dict[str, dict[str, float]]:
    _accept_parser()
    from httpx import TransportError
    from lighteval.logging.evaluation_tracker import EvaluationTracker
    from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters

    from qerl.checkpoint.load import load_tokenizer, local_folder

    with tempfile.TemporaryDirectory() as scratch, _known_tasks(settings.suite_tasks):
        folder = local_folder(ref.base)
        tokenizer = load_tokenizer(folder, settings.trust_remote_code)
        context = context_length(folder) or MAX_NEW_TOKENS
        engine = _open(settings, ref)
        try:
            model = EngineModel(engine, tokenizer, settings, context, scratch)
            pipeline = Pipeline(
                tasks=settings.task,
                pipeline_parameters=PipelineParameters(
                    launcher_type=ParallelismManager.CUSTOM, max_samples=settings.limit
                ),
                evaluation_tracker=EvaluationTracker(output_dir=scratch),
                model=model,
            )
            pipeline.evaluate()
        except (ValueError, OSError, ImportError, TransportError) as error:
            raise DataError(f"lighteval cannot run {settings.task!r}{_reason(error)}") from error
        finally:
            engine.close()
        results = pipeline.get_results()["results"]
    return {name: {key: float(v) for key, v in scores.items()} for name, scores in results.items() if name != "all"}


def _reason(error: BaseException) -> str:
    """Why lighteval failed, and what to do. Its libraries raise several kinds of error without a network."""
    from httpx import TransportError
    from requests import ConnectionError as Unreached

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (ConnectionError, TransportError, Unreached)):
            asked = cause.request if isinstance(cause, Unreached) else None  # else it is the hub's client that failed
            host = urlsplit(asked.url).hostname if asked is not None else "the hub"
            return (
                f": it downloads what the task needs, and {host} cannot be reached: check the network, or give a task "
                "on local files with --suite-tasks FILE"
            )
        cause = cause.__cause__ or cause.__context__
    return f" ({error}): write task|few_shot, or give a file with your own tasks with --suite-tasks FILE"


PARSER = "latex2sympy2_extended"


def _accept_parser() -> None:
    """Let lighteval's metrics for LaTeX use the parser that our grading needs.

    lighteval 0.13 pins latex2sympy2_extended 1.0.6 in its extra `math` and cannot be imported beside another version.
    math-verify 0.9.0 brings 1.11.0, with which these metrics give the same verdicts on the pairs in
    tests/eval/test_lighteval.py. Remove when lighteval's pin fits math-verify's.
    """
    from lighteval.utils.imports import is_package_available, required_dependencies
    from packaging.requirements import Requirement

    required, installed = required_dependencies()[0], version(PARSER)
    pinned = required.get(PARSER)
    if pinned is None or installed in pinned.specifier:
        return
    logger.warning(
        "lighteval's metrics for LaTeX use %s %s here instead of %s: compare their scores with those of other "
        "installations with care",
        *(PARSER, installed, pinned.specifier),
    )
    required[PARSER] = Requirement(f"{PARSER}=={installed}")
    is_package_available.cache_clear()
    if not is_package_available(PARSER):
        raise DataError(f"lighteval does not accept {PARSER} {installed}: install lighteval 0.13.0")


@contextlib.contextmanager
def _known_tasks(tasks_file: Path | None) -> Iterator[None]:
    """Let lighteval know only the tasks of `tasks_file`; None leaves it its own."""
    from lighteval.tasks.registry import Registry

    if tasks_file is None:
        yield
        return
    try:
        configs = Registry._extract_configs(Registry.create_custom_tasks_module(tasks_file))
    except Exception as error:  # the user's own code
        raise ConfigError(f"--suite-tasks {tasks_file} failed when it was loaded ({error!r}): correct it") from error
    if not configs:
        raise ConfigError(
            f"--suite-tasks {tasks_file} has no TASKS_TABLE with a task in it: write one, as lighteval's tasks do"
        )
    before = Registry.__dict__["load_all_task_configs"]
    Registry.load_all_task_configs = staticmethod(lambda custom_tasks=None, load_multilingual=False: configs)
    try:
        yield
    finally:
        Registry.load_all_task_configs = before


def _open(settings: EvalSettings, ref: ModelRef) -> Any:
    """The engine with the adapter acting, and with the model's own context."""
    from qerl.engine.open import open_model

    return open_model(ref, settings.engine_options())
