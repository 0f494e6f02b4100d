"""The command that comes next, as it can be typed: quantize, train, eval and merge print it at their end. No torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.checkpoint.folder import REPORT, WORDS, default_quantized_dir, embedded_folder, format_of, quantized_from
from qerl.checkpoint.output import EXPORT_REPORT, MERGE_REPORT
from qerl.checkpoint.resolve import name_of_adapter

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig
    from qerl.data.rows import Source

DEFAULT_RECIPE = "first_evening"  # for models that no recipe names


def say_next(command: str) -> None:
    """Print the line; it is not wrapped, so that it can be copied."""
    from qerl.base.printable import SafeConsole

    SafeConsole().print(f"Next: {command}", soft_wrap=True, highlight=False, markup=False)


def after_training(run_dir: Path) -> str:
    """Evaluate a run on rows that it did not train on: those of its validation, or the test rows of its task or of one
    like it. Where there are none the run is read in its report."""
    from qerl.config.recipe import load_config
    from qerl.data.rows import sources_of

    config = load_config(run_dir / "config.yaml")
    lines = (_evaluation(config, source, run_dir) for source in sources_of(config.data, config.rewards))
    return next(filter(None, lines), _line("report", str(run_dir)))


def _evaluation(config: RunConfig, source: Source, run_dir: Path) -> str | None:
    """`qerl eval` for the rows of one source, with whatever of the run has to be named there; None without rows."""
    from qerl.base.program import PYTHON
    from qerl.data.tasks import get_task
    from qerl.episodes.build import KNOWN

    data, played, task = source.data, config.environment, get_task(source.data.task)
    asked, name = source.validation or config.validation, task.name
    graded = data.grader is not None or any(reward.name == "accuracy" for reward in source.rewards)
    rows = asked.source if graded and config.validation.split == "test" and config.validation.task is None else None
    if rows is None:
        if data.source is not None or task.free_form:
            return None
        if "test" not in task.splits:
            name = {"number": "gsm8k", "math": "math500"}[task.answer_kind]
    others: list[tuple[str, object]] = [("--model", run_dir), ("--data", rows)]
    if rows is not None and (columns := data.columns):
        others.append(("--columns", ",".join(f"{key}={column}" for key, column in columns.items())))
    others.append(("--grader", data.grader if name == task.name else None))
    if played is not None and {played.name, *played.tools} - {None, *KNOWN}:
        others += [("--environment", played.name), ("--tools", ",".join(played.tools) or None)]
    words = [str(word) for option, value in others if value is not None for word in (option, value)]
    return None if any(word.startswith(f"{PYTHON}:") for word in words) else _line("eval", name, *words)


def after_evaluating(base: str, adapter: str | None, format: str) -> str:
    """Merge the adapter that was evaluated, or try what was merged; without an adapter train on the base, or try it if
    it was trained already."""
    if adapter is not None:
        folder = Path(adapter)
        whole = folder.parent if folder.name == "adapter" and (folder.parent / "config.yaml").is_file() else folder
        if (merged := Path("merged") / f"{name_of_adapter(whole)}-{format}").exists():
            return _line("chat", "--model", str(merged))
        to = format if formats.get(format).writable else formats.BF16.name
        return _line("merge", "--adapter", str(whole), "--to", to)
    folder = Path(base)
    if folder.name == "model" and (folder.parent / "config.yaml").is_file():  # of a run that trains what is served
        return _line("chat", "--model", str(folder.parent))
    trained = any((folder / name).is_file() for name in (MERGE_REPORT, EXPORT_REPORT))
    return _line("chat", "--model", base) if trained else after_quantizing(base)


def after_quantizing(model: str) -> str:
    """`qerl train` on a 16-bit model or a quantized folder; a 16-bit model is quantized first where that is missing."""
    source = WORDS.get(Path(model)) or quantized_from(Path(model)) or model
    written = all((Path(model) / name).is_file() for name in (REPORT, "config.json"))
    format = format_of(Path(model)) if written else formats.DEFAULT
    format = format if format.quantized else formats.DEFAULT  # of any other model
    recipe = _recipe_of(source, format.name)
    made = default_quantized_dir(source, format)
    named = [] if recipe and model in (source, str(made), str(embedded_folder(source))) else ["--model", model]
    quantized = (Path(model) / REPORT).is_file() or made.exists()
    other = [] if recipe or format is formats.DEFAULT else ["--set", f"model.format={format.name}"]
    return _line("train", "--recipe", recipe or DEFAULT_RECIPE, *named, *other, *([] if quantized else ["--quantize"]))


def _recipe_of(base: str, format: str) -> str | None:
    """The first shipped recipe that trains an adapter on `base` in this format."""
    from qerl.config.recipe import load_recipe, recipe_names

    for name in recipe_names():
        config = load_recipe(name)
        other = config.qat or config.distill or config.sft
        if other is None and (config.model.base, config.model.format) == (base, format):
            return name
    return None


def _line(*words: str) -> str:
    return shlex.join(["qerl", *words])
