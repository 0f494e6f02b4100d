"""Compare a merged model with the adapter on its base: logprobs and greedy tokens on some prompts.

Completions are sampled from the exact policy (base + adapter, temperature 1). The KL divergence from it, in nats per
token, is estimated on their tokens as mean(r - log r - 1), r = exp(logprob of the model - logprob of the exact policy)
(http://joschu.net/blog/kl-approx.html, k3), once for the base alone and once for the merged model:

    kept = 1 - KL(exact || merged) / KL(exact || base)

1 means that the merged model is the policy, 0 that it is as far off as the base. A start that the adapter was trained
with, frozen or not, is a part of the base here: the training began there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import DataError, QerlError
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.load import load_tokenizer, local_folder
from qerl.checkpoint.resolve import ModelRef, resolve_model, run_of_adapter
from qerl.checkpoint.shards import TensorReader, read_tensors
from qerl.config.recipe import load_config
from qerl.data.examples import load_examples
from qerl.data.rows import local_rows
from qerl.data.tasks import messages_of, render_prompt
from qerl.engine.interface import Engine, SamplingParams
from qerl.engine.open import open_model
from qerl.engine.options import EngineOptions
from qerl.engine.update import AdapterUpdate, deliver
from quantize.export.base import Adapter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

QUESTIONS = (
    "A train travels 60 km in 45 minutes. What is its speed in km/h?",
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many pencils are left?",
    "Solve for x: 3x + 7 = 22.",
    "What is the sum of the first 20 positive integers?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "List three causes of the French Revolution.",
    "Write a Python function that reverses a string.",
)


@dataclass(frozen=True)
class Effect:
    """How far the base and the merged model are from the exact policy."""

    prompts: int
    tokens: int
    kl_base: float  # nats per token
    kl_merged: float
    kept: float | None  # None if the adapter changes nothing on these prompts
    same_greedy: int  # prompts whose greedy completion equals the exact policy's, token by token
    prompts_from: str


def measure_effect(exact: ModelRef, merged: Path, limits: tuple[int, int], prompts_file: Path | None) -> Effect:
    """Compare the model in `merged` with `exact` (base and adapter). `limits`: prompts, and new tokens of each."""
    count, max_new_tokens = limits
    tokenizer = load_tokenizer(exact.base)
    prompts, origin = load_prompts(tokenizer, exact, count, prompts_file)
    context = max(map(len, prompts)) + max_new_tokens
    sampled, greedy = SamplingParams(max_new_tokens), SamplingParams(max_new_tokens, temperature=0.0)
    options = EngineOptions(max_context=context)
    policy = open_model(exact, options)
    try:
        completions = policy.generate(prompts, sampled, seed=0)
        greedy_exact = policy.generate(prompts, greedy)
        tokens = [completion.token_ids for completion in completions]
        exact_logprobs = policy.score(prompts, tokens)
        _neutralize(policy, exact)
        base_logprobs = policy.score(prompts, tokens)
    finally:
        policy.close()
    model = open_model(resolve_model(str(merged)), options)
    try:
        merged_logprobs = model.score(prompts, tokens)
        pairs = zip(greedy_exact, model.generate(prompts, greedy), strict=True)
        same = sum(one.token_ids == other.token_ids for one, other in pairs)
    finally:
        model.close()
    kl_base, kl_merged = kl(exact_logprobs, base_logprobs), kl(exact_logprobs, merged_logprobs)
    kept = 1 - kl_merged / kl_base if kl_base > 1e-9 else None
    return Effect(len(prompts), sum(map(len, tokens)), kl_base, kl_merged, kept, same, origin)


def kl(exact: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """KL(exact || other) in nats per token, from the logprobs of tokens that `exact` sampled."""
    gaps = [q - p for row, others in zip(exact, other, strict=True) for p, q in zip(row, others, strict=True)]
    return math.fsum(math.expm1(gap) - gap for gap in gaps) / len(gaps)


def load_prompts(
    tokenizer: PreTrainedTokenizerBase, ref: ModelRef, count: int, file: Path | None
) -> tuple[list[list[int]], str]:
    """Prompts (token ids) and their origin: `file` (rows with `question`), else the adapter's run, else QUESTIONS.

    A run's prompts come from its saved completions, the newest first, which already have the chat template, then from
    its data.
    """
    if file is not None:
        return _rendered(tokenizer, questions_in(file)[:count]), str(file)
    run = run_of_adapter(ref.adapter)
    if run is not None:
        files = sorted(run.glob("completions/step-*.jsonl"), reverse=True)
        texts = dict.fromkeys(prompt for file in files for prompt in _column(file, "prompt"))
        saved = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        found = [*saved, *_task_prompts(tokenizer, run, count - len(saved))][:count]
        if found:
            return found, f"the run {run.name}"
    return _rendered(tokenizer, QUESTIONS[:count]), "qerl's own"


def questions_in(file: Path) -> list[str]:
    """The questions of `--prompts`. Raises DataError if it cannot be read or has none."""
    questions = _column(file, "question")
    if not questions:
        raise DataError(f"{file} has no row with a `question`: write jsonl or csv with such a column")
    return questions


def _task_prompts(tokenizer: PreTrainedTokenizerBase, run: Path, count: int) -> list[list[int]]:
    """The first prompts of the run's training data; none if the data cannot be read here."""
    if count <= 0:
        return []
    try:
        data = load_config(run / "config.yaml").data  # raises if another version of qerl wrote other keys
        examples, _ = load_examples(data.task, data.source, data.split, data.columns, count)
    except QerlError as error:
        logger.info("the run's data cannot be read here, fewer prompts are compared: %s", error)
        return []
    prompt = (data.system_prompt, data.prompt_template)
    switches = data.chat_template_kwargs
    asked = [(messages_of(data.task, example, *prompt), example.tools) for example in examples]
    return [render_prompt(tokenizer, messages, switches, tools) for messages, tools in asked]


def _column(file: Path, name: str) -> list[str]:
    return [row[name] for _, row in local_rows(str(file), "test") if row and row.get(name)]


def _rendered(tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]) -> list[list[int]]:
    return [render_prompt(tokenizer, [{"role": "user", "content": question}]) for question in questions]


def _neutralize(engine: Engine, exact: ModelRef) -> None:
    """Set the adapter to where its training began: B to zero or a start that was trained, and norms to the base's."""
    from quantize.export.adapter import neutral_factors, start_in_merge

    adapter = Adapter(exact.adapter, *read_adapter(exact.adapter))
    start = start_in_merge(exact.adapter, exact.base) if formats.get(exact.format).quantized else None
    neutral = neutral_factors(adapter, {} if start is None or start.frozen else start.factors)
    with TensorReader(read_tensors(local_folder(exact.base))) as read:
        neutral |= {name: read(name).to(tensor.dtype) for name, tensor in adapter.norms.items()}
    deliver(AdapterUpdate(neutral, adapter.scaling), engine)
