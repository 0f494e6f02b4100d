"""What a merge changed, its report and its card.

Compare a merged model with the adapter on its base: logprobs and greedy tokens on some prompts.

Completions are sampled from the exact policy (base + adapter, temperature 1). The KL divergence from it, in nats per
token, is estimated on their tokens as mean(r - log r - 1), r = exp(logprob of the model - logprob of the exact policy)
(http://joschu.net/blog/kl-approx.html, k3), once for the base alone and once for the merged model:

    kept = 1 - KL(exact || merged) / KL(exact || base)

1 means that the merged model is the policy, 0 that it is as far off as the base. A start that the adapter was trained
with, frozen or not, is a part of the base here: the training began there.

The result of a merge: `merge_report.json` beside the weights, warnings in words, and a table for the terminal.

The README.md of a merged model: a model card in the hub's format, from the run and the merge's measurements.

It states only what the files hold: the base, the recipe, the last metrics, each finished evaluation of the run with its
interval, the versions, the licence that the base declares, and how to load the result.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import DataError, QerlError
from qerl.base.files import JSON_BYTES, parse_json, read_object, read_rows, read_text, replace_text
from qerl.base.printable import quoted
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.base_start import START, TrainedStart
from qerl.checkpoint.folder import EMBEDDED, WORDS, quantized_from
from qerl.checkpoint.hub import HUB_ID
from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.peft_folder import loading, trained_on
from qerl.checkpoint.resolve import ModelRef, resolve_model
from qerl.config.recipe import load_config, read_config
from qerl.data.rows import local_rows
from qerl.data.tasks import load_examples, messages_of, render_prompt
from qerl.engine.interface import SamplingParams
from qerl.engine.open import open_model
from qerl.engine.options import EngineOptions
from qerl.engine.update import AdapterUpdate, deliver
from qerl.report.read import About, Metrics
from quantize.merge.base import Adapter, Survival
from quantize.report import format_size

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedTokenizerBase

    from qerl.engine.interface import Completion, Engine


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


def measure_effect(
    exact: ModelRef, merged: Path, limits: tuple[int, int], prompts_file: Path | None, engine: str = "auto"
) -> Effect:
    """Compare the model in `merged` with `exact` (base and adapter). `limits`: prompts, and new tokens of each."""
    count, max_new_tokens = limits
    tokenizer = load_tokenizer(exact.base)
    prompts, origin = load_prompts(tokenizer, exact, count, prompts_file)
    context = max(map(len, prompts)) + max_new_tokens
    sampled, greedy = SamplingParams(max_new_tokens), SamplingParams(max_new_tokens, temperature=0.0)
    options = EngineOptions(engine=engine, max_context=context)
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
        same = _same(greedy_exact, model.generate(prompts, greedy))
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

    A run's prompts are those of its saved completions, which already have the chat template, then those of its data.
    """
    if file is not None:
        return _rendered(tokenizer, questions_in(file)[:count]), str(file)
    run = run_of(ref.adapter)
    if run is not None:
        saved = [tokenizer.encode(text, add_special_tokens=False) for text in _saved_prompts(run)]
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


def run_of(adapter: Path) -> Path | None:
    """The run directory that an adapter lies in (`adapter/` or `checkpoints/step-N/`)."""
    parents = adapter.resolve().parents[:2]
    return next((p for p in parents if (p / "config.yaml").is_file() and (p / "metrics.jsonl").is_file()), None)


def _saved_prompts(run: Path) -> list[str]:
    """The distinct prompts that the run saved, newest first."""
    files = sorted(run.glob("completions/step-*.jsonl"), reverse=True)
    return list(dict.fromkeys(prompt for file in files for prompt in _column(file, "prompt")))


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
    from qerl.checkpoint.load import local_folder
    from qerl.checkpoint.reader import TensorReader
    from qerl.checkpoint.shards import read_tensors
    from quantize.merge.adapter import neutral_factors, start_in_merge

    adapter = Adapter(exact.adapter, *read_adapter(exact.adapter))
    start = start_in_merge(exact.adapter, exact.base) if formats.get(exact.format).quantized else None
    neutral = neutral_factors(adapter, {} if start is None or start.frozen else start.factors)
    with TensorReader(read_tensors(local_folder(exact.base))) as read:
        neutral |= {name: read(name).to(tensor.dtype) for name, tensor in adapter.norms.items()}
    deliver(AdapterUpdate(neutral, adapter.scaling), engine)


def _same(one: Sequence[Completion], other: Sequence[Completion]) -> int:
    return sum(a.token_ids == b.token_ids for a, b in zip(one, other, strict=True))


MOST = 0.5  # if less than this share is kept, most of the adapter is lost


@dataclass(frozen=True)
class MergeReport:
    """The result of `merge`. `survival` covers all linears, `layers` each one; both are empty for an adapter folder."""

    out: Path
    to: str
    adapter: str
    base: str  # the model that the adapter was trained on
    onto: str  # the model that it was merged onto; for an adapter folder the base that it is for
    rank: int
    scaling: float
    trained_norms: int
    bytes: int
    created: str
    versions: dict[str, str]
    start: TrainedStart | None = (
        None  # that the adapter was trained with; for an adapter folder that of what was written
    )
    notes: tuple[str, ...] = ()
    survival: Survival | None = None
    layers: tuple[Survival, ...] = ()
    effect: Effect | None = None
    commands: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What was written, in words."""
        return "PEFT adapter" if self.to == "adapter" else formats.get(self.to).model_label

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the format for the model card."""
        return () if self.to == "adapter" else formats.get(self.to).card_tags

    def warnings(self) -> list[str]:
        """What a user has to know before using the result, one sentence each."""
        found = list(self.notes)
        if self.effect is not None and self.effect.kept is not None and self.effect.kept < MOST:
            found.append(
                f"only {max(0.0, self.effect.kept):.0%} of the adapter's effect is left in the merged model (KL to the "
                f"exact policy {self.effect.kl_merged:.2g} nats per token, of the base alone "
                f"{self.effect.kl_base:.2g}): serve the adapter on its base, or merge to {formats.BF16.name}"
            )
        elif self.survival is not None and self.survival.kept is not None and self.survival.kept < MOST:
            found.append(
                f"rounding kept only {max(0.0, self.survival.kept):.0%} of the adapter's change of the weights: serve "
                f"the adapter on its base, or merge to {formats.BF16.name}"
            )
        return found

    def to_json(self) -> dict:
        """The content of merge_report.json."""
        values = asdict(self)
        del values["out"]
        return {**values, "warnings": self.warnings()}

    def table(self) -> Table:
        """A short table: what the result is, and how much of the adapter is in it."""
        from rich.table import Table

        table = Table(title=self.kind, show_header=False, title_justify="left")
        table.add_row("adapter", f"{self.adapter}, rank {self.rank}, alpha / rank {self.scaling:g}")
        if self.start is not None:
            table.add_row("start", self.start_text())
        table.add_row("base" if self.to == "adapter" else "merged onto", self.onto)
        table.add_row("written to", f"{self.out} ({format_size(self.bytes)})")
        if self.trained_norms:
            table.add_row("trained norms", str(self.trained_norms))
        for name, text in self.measured().items():
            table.add_row(name, text)
        return table

    def start_text(self) -> str:
        """How the adapter was trained with its start, in words."""
        how = "acts beside the adapter" if self.start.kind == "frozen" else "the adapter began at it and holds it"
        return f"rank {self.start.rank}, {how}"

    def measured(self) -> dict[str, str]:
        """The measurements, by the names that people read."""
        found = {}
        if self.survival is not None and self.survival.kept is not None:
            part = self.survival
            found["weight change kept"] = (
                f"{part.kept:.1%} along s B A, cosine {part.cosine:.3f}, norm ratio {part.norm_ratio:.2f}"
            )
            worst = min((layer for layer in self.layers if layer.kept is not None), key=lambda layer: layer.kept)
            found["least kept"] = f"{worst.kept:.1%} ({worst.name})"
        if self.effect is not None:
            effect = self.effect
            share = "" if effect.kept is None else f"{effect.kept:.1%}: "
            found["effect kept"] = (
                f"{share}KL to base + adapter {effect.kl_merged:.2e} nats per token, of the base alone "
                f"{effect.kl_base:.2e} ({effect.tokens} tokens, {effect.prompts} prompts of {effect.prompts_from})"
            )
            found["same greedy completion"] = f"{effect.same_greedy} of {effect.prompts}"
        return found


LICENCES = {  # words near the top of a licence's text -> its name on the hub
    "Apache License": "apache-2.0",
    "MIT License": "mit",
    "LLAMA 3.1 COMMUNITY": "llama3.1",
    "LLAMA 3.2 COMMUNITY": "llama3.2",
    "LLAMA 3.3 COMMUNITY": "llama3.3",
    "META LLAMA 3 COMMUNITY": "llama3",
    "GEMMA": "gemma",
}
METRICS = ("reward", "entropy", "mismatch_kl", "completions/mean_tokens", "completions/truncated_share")
GOES_WITHOUT = "the model card goes without the training; put the file back and merge again to have it"
RECIPE_SECTIONS = ("data", "rollout", "loss", "noise", "optim")


def write_card(report: MergeReport, adapter: Path, path: Path) -> None:
    """Write the card in one step, whole or not at all."""
    replace_text(path, card_text(report, adapter))


def card_text(report: MergeReport, adapter: Path) -> str:
    """The model card: metadata and text."""
    run = run_of(adapter)
    results = read_results(run) if run else []
    parts = [_title(report), _measured(report), _loading(report)]
    if run is not None:
        parts.append(training_text(run))
    if results:
        parts.append(evaluation_text(results, "base + adapter"))
    parts.append("## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in report.versions.items()))
    return f"---\n{_metadata(report, results)}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def base_on_hub(base: str) -> str | None:
    """The hub id of a base, or of the model that it was quantized from; None if neither is known."""
    if base in EMBEDDED or Path(base) in WORDS:
        return None
    if Path(base).is_dir():
        source = quantized_from(Path(base))
        return source if source and HUB_ID.fullmatch(source) and not Path(source).is_dir() else None
    return base if HUB_ID.fullmatch(base) else None


def licence_of(base: str) -> str | None:
    """The licence that a base's folder declares, in its card's metadata or at the top of its LICENSE file."""
    folder = Path(base)
    if not folder.is_dir():
        return None
    card = folder / "README.md"
    if card.is_file() and (found := re.search(r"^license: *([\w.-]+) *$", _metadata_of(card), re.MULTILINE)):
        return found[1]
    for file in sorted(folder.glob("LICENSE*")):
        head = file.read_text(encoding="utf-8", errors="replace")[:400].lower()
        for words, name in LICENCES.items():
            if words.lower() in head:
                return name
    return None


def _metadata_of(card: Path) -> str:
    """The YAML block at the top of a model card."""
    text = card.read_text(encoding="utf-8", errors="replace")
    return text.split("---", 2)[1] if text.startswith("---") and text.count("---") > 1 else ""


def read_results(run: Path) -> list[dict]:
    """The run's finished evaluations (`eval/*/result.json`), sorted by task."""
    found = []
    for file in sorted(run.glob("eval/*/result.json")):
        try:
            result = parse_json(read_text(file, JSON_BYTES))
            result["accuracy"]["value"], result["task"], result["questions"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # of another version, or cut short: there is no result to state
        found.append(result)
    return sorted(found, key=lambda result: result["task"])


def _metadata(report: MergeReport, results: Iterable[dict]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    evaluations = [
        EvalResult("text-generation", result["task"], result["task"], "accuracy", result["accuracy"]["value"])
        for result in results
    ]
    data = ModelCardData(
        base_model=base_on_hub(report.base),
        license=licence_of(report.base),
        library_name="peft" if report.to == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=["qerl", "grpo", "lora", *report.tags],
        model_name=report.out.name if evaluations else None,
        eval_results=evaluations or None,
    )
    return data.to_yaml().strip()


def _title(report: MergeReport) -> str:
    licence = licence_of(report.base)
    rows = {
        "what": report.kind,
        "trained on": f"`{base_on_hub(report.base) or Path(report.base).name}`",
        "adapter": f"LoRA, rank {report.rank}, alpha / rank {report.scaling:g}"
        + (f", and {report.trained_norms} trained norms" if report.trained_norms else ""),
        "licence": f"{licence} (the base's)" if licence else "that of the base model, which its folder does not state",
        "made": f"{report.created} by `qerl merge --to {report.to}`",
    }
    if report.start is not None:
        rows["start"] = report.start_text()
    if report.onto != report.base:
        rows["merged onto" if report.to != "adapter" else "for"] = f"`{report.onto}`"
    notes = "".join(f"\n> {note}\n" for note in report.warnings())
    return f"# {report.out.name}\n\n{table_text(rows)}\n{notes}".rstrip()


def _measured(report: MergeReport) -> str:
    found = report.measured()
    return f"## What is left of the adapter\n\n{table_text(found)}" if found else ""


def _loading(report: MergeReport) -> str:
    if report.to != "adapter":
        return loading_lines(report.out, report.commands.values())
    origin = replace(trained_on(report.onto), start=report.start)
    return f"{_commands(report.commands.values())}\n\n{loading(str(report.out), origin, str(report.out / START))}"


def _commands(commands: Iterable[str]) -> str:
    return "\n".join(["## How to load it", "", *(f"    {command}" for command in commands)])


def loading_lines(out: Path, commands: Iterable[str]) -> str:
    """How a whole model is loaded: by these commands, or in Python."""
    lines = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained({quoted(out.name)}, dtype="bfloat16")',
        f"tokenizer = AutoTokenizer.from_pretrained({quoted(out.name)})",
        "```",
    ]
    return "\n".join([_commands(commands), "", *lines])


def training_text(run: Path) -> str:
    """The recipe of a run and the means of its metrics; empty, with a warning, if its files cannot be read."""
    import yaml

    try:
        config, _ = read_config(run / "config.yaml")
        rows = read_rows(run / "metrics.jsonl", Metrics, GOES_WITHOUT)
        about = read_object(run / "run.json", About, GOES_WITHOUT) if (run / "run.json").is_file() else {}
    except (DataError, OSError, ValueError) as error:  # not a reason to lose a merge that took long and is complete
        logger.warning("%s", error)
        return ""
    text = f"## Training\n\nRecipe `{about.get('recipe', 'unknown')}`, {len(rows)} steps."
    if rows:
        last = {name: _number(rows, name) for name in METRICS}
        shown = {name: value for name, value in last.items() if value}
        text += f" Mean of the first and the last fifth of the steps:\n\n{table_text(shown)}"
    trained = "qat" if config.get("qat") else "adapter"
    recipe = {section: config[section] for section in (trained, *RECIPE_SECTIONS) if section in config}
    return f"{text}\n\n```yaml\n{yaml.safe_dump(recipe, sort_keys=False).strip()}\n```"


def _number(rows: list[dict], name: str) -> str | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return None
    fifth = max(1, len(values) // 5)
    return f"{sum(values[:fifth]) / fifth:.4g} -> {sum(values[-fifth:]) / fifth:.4g}"


def evaluation_text(results: list[dict], of: str) -> str:
    """A table of evaluations `of` a model."""
    lines = ["## Evaluation", "", "| task | accuracy | 95% interval | questions | samples | truncated |"]
    lines.append("|---|---|---|---|---|---|")
    for result in results:
        accuracy = result["accuracy"]
        low, high = accuracy.get("low"), accuracy.get("high")
        interval = f"{low:.1%} to {high:.1%}" if low is not None and high is not None else ""
        truncated = f"{result['truncated_share']:.1%}" if "truncated_share" in result else ""
        lines.append(
            f"| {result['task']} | {accuracy['value']:.1%} | {interval} | {result['questions']} | "
            f"{result.get('samples', 1)} | {truncated} |"
        )
    return "\n".join([*lines, "", f"Measured by `qerl eval` for {of}, on the engine of the training."])


def table_text(rows: dict[str, str]) -> str:
    """Names and texts as a table."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())])
