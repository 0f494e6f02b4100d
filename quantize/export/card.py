"""The README.md of an export: a model card in the hub's format, from the run and the report.

It states only what the files hold: the base, the recipe, the last metrics, each finished evaluation of the run with its
interval, the versions, the licence that the base declares, and how to load the result.
"""

import logging
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from qerl.base.errors import CheckpointError, DataError
from qerl.base.files import JSON_BYTES, parse_json, read_text, replace_text
from qerl.base.printable import quoted
from qerl.base.read_back import read_object, read_rows
from qerl.checkpoint.base_start import START
from qerl.checkpoint.folder import EMBEDDED, WORDS, kind_of_run, quantized_from
from qerl.checkpoint.peft_folder import loading, on_hub, trained_on
from qerl.config.recipe import read_config
from qerl.data.rows import is_local
from qerl.data.tasks import TASKS
from qerl.report.read import About, Metrics
from quantize.export.options import GGUF, chat_line, gguf_lines, serve_model_line
from quantize.export.report import ExportReport, MergeReport

logger = logging.getLogger(__name__)

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


def write_card(report: ExportReport | MergeReport, run: Path | None, path: Path) -> None:
    """Write the card, metadata and text, in one step: whole or not at all. `run` is what the training is read from."""
    results = read_results(run) if run else []
    measured = report.measured()
    parts = [_title(report), measured and f"## What is left of the adapter\n\n{table_text(measured)}", _loading(report)]
    if run is not None:
        parts.append(training_text(run))
    if results:
        parts.append(evaluation_text(results, report.evaluated))
    parts.append("## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in report.versions.items()))
    text = "\n\n".join(part for part in parts if part)
    replace_text(path, f"---\n{_metadata(report, results, run)}\n---\n\n{text}\n")


def base_on_hub(base: str) -> str | None:
    """The hub id of a base, or of the model that it was quantized from; None if neither is known."""
    if base in EMBEDDED or Path(base) in WORDS:
        return None
    return on_hub(quantized_from(Path(base)) if Path(base).is_dir() else base)


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


def datasets_of(run: Path) -> list[str]:
    """The data sets on the hub that a run trained on, by its recipe; none if that cannot be read."""
    try:
        data = read_config(run / "config.yaml")[0].get("data", {})
        parts = [{**data, **part} for part in data.get("sources") or [data]]
        places = [part.get("source") or TASKS[part["task"]].hub for part in parts]
    except (DataError, OSError, ValueError, KeyError):
        return []
    return sorted({place.partition(":")[0] for place in places if place and not is_local(place)})


def _metadata(report: ExportReport | MergeReport, results: Iterable[dict], run: Path | None) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    evaluations = [
        EvalResult("text-generation", result["task"], result["task"], "accuracy", result["accuracy"]["value"])
        for result in results
    ]
    base, tag = base_on_hub(report.base), "grpo"
    with suppress(CheckpointError):  # a recipe that cannot be read is no reason to lose the merge
        tag = kind_of_run(run).tag if run else tag
    data = ModelCardData(
        base_model=base,
        base_model_relation="finetune" if base and report.to != "adapter" else None,  # packed or not, it was trained
        datasets=(run and datasets_of(run)) or None,
        license=licence_of(report.base),
        library_name={"adapter": "peft", GGUF: None}.get(report.to, "transformers"),
        pipeline_tag="text-generation",
        tags=["qerl", tag, *report.tags],
        model_name=report.out.name if evaluations else None,
        eval_results=evaluations or None,
    )
    return data.to_yaml().strip()


def _title(report: ExportReport | MergeReport) -> str:
    licence = licence_of(report.base)
    rows = {
        "what": report.kind,
        **report.rows(f"`{base_on_hub(report.base) or Path(report.base).name}`"),
        "licence": f"{licence} (the base's)" if licence else "that of the base model, which its folder does not state",
        "made": f"{report.created} by `qerl export --to {report.to}`",
    }
    notes = "".join(f"\n> {note}\n" for note in report.warnings())
    return f"# {report.out.name}\n\n{table_text(rows)}\n{notes}".rstrip()


def _loading(report: ExportReport | MergeReport) -> str:
    commands = _of_repo(report) if report.repo else report.commands.values()
    if report.to == GGUF:
        return _commands(commands)
    if report.to != "adapter":
        return loading_lines(report.repo or report.out.name, commands)
    origin = replace(trained_on(report.onto), start=report.start)
    return f"{_commands(commands)}\n\n{loading(report.shown, origin, str(report.out / START))}"


def _of_repo(report: ExportReport | MergeReport) -> list[str]:
    """The report's commands for what is pushed. Ollama takes no Modelfile from the hub, so it is downloaded."""
    repo = Path(report.repo)
    if report.to == GGUF:
        ollama = gguf_lines(Path(repo.name), f"{repo.name}.gguf")["ollama"]
        return [f"hf download {repo} --local-dir {repo.name} && {ollama}", f"llama-server -hf {repo} --jinja"]
    lines = [chat_line(repo)]
    if "vllm" in report.commands and report.to == "adapter":
        words = shlex.split(report.commands["vllm"])[:-1]  # the last is the adapter
        lines.append(shlex.join([*words, f"{repo.name}={repo}"]))
    elif "vllm" in report.commands:
        lines.append(serve_model_line(repo))
    return lines


def _commands(commands: Iterable[str]) -> str:
    return "\n".join(["## How to load it", "", *(f"    {command}" for command in commands)])


def loading_lines(name: str, commands: Iterable[str]) -> str:
    """How a whole model is loaded: by these commands, or in Python by its `name`."""
    lines = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained({quoted(name)}, dtype="bfloat16")',
        f"tokenizer = AutoTokenizer.from_pretrained({quoted(name)})",
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
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())])
