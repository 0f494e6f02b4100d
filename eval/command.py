"""The command line of evaluation, once: `qerl eval TASK ...` and `python -m eval.<task> ...` share these options.

`evaluate` is the typer command (qerl/cli.py registers it as `eval`); `main(task)` is the same with the task fixed.
Nothing here imports torch before the options are known to be good.
"""

from __future__ import annotations

import inspect
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eval.settings import ENGINES, KERNELS, LOADS, SAMPLED_TEMPERATURE, SAMPLED_TOP_P, EvalSettings
from eval.show import OPTIONS, show, show_suite
from qerl.commands.option_names import options_named
from qerl.commands.shell_values import task_values
from qerl.commands.terminal import run_command
from qerl.errors import ConfigError

Load = StrEnum("Load", [(name, name) for name in LOADS])
EngineName = StrEnum("EngineName", [(name, name) for name in ENGINES])
Kernel = StrEnum("Kernel", [(name, name) for name in KERNELS])

Suite = StrEnum("Suite", [("lighteval", "lighteval")])

MODEL, DATA, SAMPLE, RUN = "Model", "Data and prompt", "Sampling", "Run"
SAMPLED_HELP = f"Sample at temperature {SAMPLED_TEMPERATURE}, top-p {SAMPLED_TOP_P} (the reference's); default greedy."


def evaluate(
    task: Annotated[
        str,
        typer.Argument(
            help="gsm8k, math500, aime24, aime25, amc23, arith, another task, or a file of rows.",
            autocompletion=task_values,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Base, NVFP4 folder, run directory, adapter folder, hub id, or `tiny`. "
            "Default: the newest run or checkpoint made here.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="Adapter folder or run to apply to the model.", rich_help_panel=MODEL)
    ] = None,
    load: Annotated[
        Load, typer.Option(help="Weights to load; auto takes what the model is.", rich_help_panel=MODEL)
    ] = Load.auto,
    run: Annotated[
        Path | None,
        typer.Option(help="Run whose --checkpoints are evaluated, instead of --model.", rich_help_panel=MODEL),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(help="Of --run: all (default), last, or steps: 40,80.", rich_help_panel=MODEL),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="jsonl, json, csv or parquet file, folder, or hub id, instead of the task's own data.",
            rich_help_panel=DATA,
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="Columns of --data: question=problem,answer=solution", rich_help_panel=DATA),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first rows, this many.", rich_help_panel=DATA)] = None,
    system_prompt: Annotated[
        str | None,
        typer.Option(help='Default: the one that trained, else the task\'s; "" for none.', rich_help_panel=DATA),
    ] = None,
    prompt_template: Annotated[
        str | None,
        typer.Option(help="With {question}. Default: the one that trained, else the task's.", rich_help_panel=DATA),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", "-n", help="Completions a question.", rich_help_panel=SAMPLE)
    ] = 1,
    pass_k: Annotated[str | None, typer.Option(help="Also pass@k for these k: 1,4,8", rich_help_panel=SAMPLE)] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help=SAMPLED_HELP, rich_help_panel=SAMPLE)] = False,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLE)] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.", rich_help_panel=SAMPLE)] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="A completion is truncated here. Default: 4096, or what the context has room for.",
            rich_help_panel=SAMPLE,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", rich_help_panel=SAMPLE)] = 0,
    engine: Annotated[
        EngineName, typer.Option(help="auto: vllm on a GPU, else transformers.", rich_help_panel=RUN)
    ] = EngineName.auto,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Completions sampled and saved together. Default: 64, with vllm 1024.", rich_help_panel=RUN),
    ] = None,
    suite: Annotated[
        Suite | None,
        typer.Option(help="Run TASK as this harness defines it: 'gsm8k|0' (needs qerl[eval]).", rich_help_panel=RUN),
    ] = None,
    suite_tasks: Annotated[
        Path | None,
        typer.Option(help="Python file with lighteval's TASKS_TABLE: local data, no hub.", rich_help_panel=RUN),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for completions and result. Default: in the run, else in evals/.", rich_help_panel=RUN
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew where an evaluation stands.", rich_help_panel=RUN)
    ] = False,
    kernel: Annotated[
        Kernel, typer.Option(help="NVFP4 kernel of vllm; auto: the fastest on the card.", rich_help_panel=RUN)
    ] = Kernel.auto,
    memory: Annotated[
        float | None,
        typer.Option(
            help="GPU budget of vllm: GiB, or up to 1 a share of the card. Default: the run's, else what is left.",
            rich_help_panel=RUN,
        ),
    ] = None,
    cap_gib: Annotated[
        float | None,
        typer.Option(
            help="The process takes no more GPU memory than this (vllm). Default: the run's, else all.",
            rich_help_panel=RUN,
        ),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="vllm repeats itself to the bit (slower); transformers does anyway.",
            rich_help_panel=RUN,
        ),
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the checkpoint.", rich_help_panel=RUN)
    ] = False,
) -> None:
    """Measure a model on a task: accuracy with its 95% interval, every completion saved.

    A killed evaluation continues with the same command, to the same numbers.
    """
    settings = EvalSettings(
        task=task,
        model=model,
        adapter=adapter,
        load=str(load),
        data=data,
        columns=parse_columns(columns),
        limit=limit,
        samples=samples,
        pass_k=parse_pass_k(pass_k),
        **sampling_of(sampled, temperature, top_p),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        out=out,
        overwrite=overwrite,
        engine=str(engine),
        system_prompt=system_prompt,
        prompt_template=prompt_template,
        trust_remote_code=trust_remote_code,
        kernel=str(kernel),
        memory=memory,
        cap_gib=cap_gib,
        deterministic=deterministic,
    )
    if suite is not None:
        with options_named(OPTIONS):
            show_suite(settings, suite_tasks, run)
        return
    if suite_tasks is not None:
        raise ConfigError(f"--suite-tasks {suite_tasks} belongs to --suite lighteval: add that")
    if run is None and checkpoints is not None:
        raise ConfigError(f"--checkpoints {checkpoints} of which run? write --run RUN")
    if run is not None and (model is not None or adapter is not None):
        raise ConfigError("--run brings its own base and adapters: leave out --model and --adapter")
    with options_named(OPTIONS):
        show(settings, run, checkpoints or "all")


def compare_results(
    first: Annotated[Path, typer.Argument(help="Evaluation folder (`qerl eval` prints it).")],
    second: Annotated[Path, typer.Argument(help="Evaluation folder of the same questions and settings.")],
    out: Annotated[Path | None, typer.Option(help="Also write the comparison as JSON into this file.")] = None,
) -> None:
    """Say whether the second evaluation is better or worse than the first, or that it cannot be told."""
    from rich.console import Console

    from eval.compare import compare
    from eval.store import write_json

    comparison = compare(first, second)
    if out is not None:
        if not out.parent.is_dir():
            raise ConfigError(f"--out {out}: there is no folder {out.parent}: make it first, or write another file")
        write_json(out, comparison.to_json())
    Console().print(comparison.table(), soft_wrap=True)


def parse_columns(text: str | None) -> dict[str, str] | None:
    """`question=problem,answer=solution` as a dictionary. Raises ConfigError for anything else."""
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and column.strip() for name, _, column in pairs):
        raise ConfigError(f"--columns {text!r} is not of the form name=column: write question=problem,answer=solution")
    columns = {name.strip(): column.strip() for name, _, column in pairs}
    if len(columns) < len(pairs):
        raise ConfigError(f"--columns {text!r} maps one name to two columns: write question=problem,answer=solution")
    return columns


def parse_pass_k(text: str | None) -> tuple[int, ...]:
    """`1,4,8` as numbers, sorted, once each. Raises ConfigError for anything else."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")})) if text else ()
    except ValueError as error:
        raise ConfigError(f"--pass-k {text!r} is not a list of numbers: write 1,4,8") from error


def sampling_of(sampled: bool, temperature: float | None, top_p: float | None) -> dict[str, float]:
    """Temperature and top-p from the three options; --sampled gives the values that are not given."""
    if sampled and temperature == 0:
        raise ConfigError("--sampled and --temperature 0 contradict each other: leave one of them out")
    default = (SAMPLED_TEMPERATURE, SAMPLED_TOP_P) if sampled else (0.0, 1.0)
    return {
        "temperature": default[0] if temperature is None else temperature,
        "top_p": default[1] if top_p is None else top_p,
    }


def task_app(task: str) -> typer.Typer:
    """A typer app with the options of `evaluate`, for one task."""

    def command(**options: object) -> None:
        evaluate(task=task, **options)

    signature = inspect.signature(evaluate, eval_str=True)
    options = [parameter for name, parameter in signature.parameters.items() if name != "task"]
    command.__signature__ = signature.replace(parameters=options)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in options}
    command.__doc__ = evaluate.__doc__.replace("on a task", f"on {task}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command)
    return app


def main(task: str, arguments: list[str] | None = None) -> None:
    """`python -m eval.<task>`. Default: sys.argv's arguments."""
    run_command(task_app(task), arguments, f"python -m eval.{task}")
