"""`qerl train`, `qerl sft` and `qerl distill`: begin a run from a recipe, or continue one.

The three differ in the sections that they add to a recipe. Here also stand the options that several commands share
(`--columns`, `--tools`, `--chat-template-kwargs`) and what a shell completes after an option. Every start of `qerl`
imports this, so it imports nothing heavy: torch comes only when nothing speaks against the run.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.printable import SafeConsole
from qerl.checkpoint.folder import default_quantized_dir, quantize_line, run_named
from qerl.checkpoint.resolve import resolve_model
from qerl.cli.launch import check_gpus, launch, one_card_each
from qerl.cli.next_step import after_training, say_next
from qerl.cli.options import Gpu
from qerl.cli.terminal import interrupts_counted
from qerl.data.option_text import Text, parse_columns, parse_names, task_values
from qerl.plan.engine_memory import CARDS
from qerl.plan.threads import choose_threads

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel
    from qerl.config.schema import RunConfig
    from training.run import TrainResult


def recipe_values(incomplete: str) -> list[str]:
    from qerl.config.recipe import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def card_values(incomplete: str) -> list[str]:
    """Cards that `qerl plan` knows."""
    return [name for name in CARDS if name.startswith(incomplete)]


def key_values(incomplete: str) -> list[str]:
    """Keys of a recipe, as `--set` takes them."""
    from qerl.config.keys import describe_config

    return [f"{key.key}=" for key in describe_config() if key.key.startswith(incomplete)]


@dataclass(frozen=True)
class TrainOptions:
    """What is asked of `qerl train`, whose options these are."""

    recipe: Annotated[
        str | None, typer.Option(help="Name (`qerl recipes`) or YAML file.", autocompletion=recipe_values)
    ] = None
    model: Annotated[
        str | None, Text(run_named), typer.Option(help="Base, NVFP4 folder, run or adapter; default: the recipe's.")
    ] = None
    task: Annotated[
        str | None, typer.Option(help="Task: prompt and grading; default: the recipe's.", autocompletion=task_values)
    ] = None
    data: Annotated[str | None, typer.Option(help="jsonl, json, csv or parquet file, folder, or hub name.")] = None
    columns: Annotated[
        Mapping[str, str] | None,
        Text(parse_columns),
        typer.Option(help="Columns of --data: question=problem,answer=solution"),
    ] = None
    system_prompt: Annotated[str | None, typer.Option(help='System message, "" for none; default: the recipe.')] = None
    prompt_template: Annotated[
        str | None, typer.Option(help="User message, with {question} in it; default: the recipe's.")
    ] = None
    grader: Annotated[
        str | None, typer.Option(help="Your own grading: file.py, file.py:function; default: the task's.")
    ] = None
    environment: Annotated[
        str | None,
        typer.Option(help="Episodes with it: calculator, word_game, file.py:Name, or a URL; default: the recipe's."),
    ] = None
    tools: Annotated[
        tuple[str, ...] | None,
        Text(parse_names),
        typer.Option(help="Tools of the model, by comma: file.py:function; default: the recipe's."),
    ] = None
    overrides: Annotated[
        tuple[str, ...],
        typer.Option(
            "--set", help="key=value over the recipe: --set run.steps=100. Repeatable.", autocompletion=key_values
        ),
    ] = ()
    steps: Annotated[
        int | None,
        typer.Option(help="Optimizer steps; default: the recipe's. With --resume: the run's new number in all."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Default: the recipe's.")] = None
    out: Annotated[Path | None, typer.Option(help="Run directory; default: runs/<recipe>-<time>.")] = None
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[RUN|STEP]",
            help="Continue a run: this one; this step of the last one; without a value the last one "
            "(of --recipe, or that at --out). Of the other options --steps goes with it, and --model, --data, "
            "--grader, --environment and --set KEY=PATH for what has moved.",
        ),
    ] = None
    accept_changes: Annotated[
        bool, typer.Option(help="With --resume: continue although rows, rewards or packages changed.")
    ] = False
    quantize_first: Annotated[
        bool, typer.Option("--quantize", help="Quantize the base first if that has not been done.")
    ] = False
    gpu: Gpu = None
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Cards of this machine to train on; for several machines use torchrun.")
    ] = None
    dry: Annotated[bool, typer.Option("--dry-run", help="Only the plan, the data and the rewards on five rows.")] = (
        False
    )
    teacher: str | None = None  # of `qerl distill`
    section: str | None = None  # that a recipe gets if it has none: of `qerl distill` and `qerl sft`
    implied: tuple[str, ...] = ()  # settings of such a command, before those that are given


logger = logging.getLogger(__name__)

# Options that are keys.
SAME = ("task", "data", "system_prompt", "prompt_template", "grader", "environment", "tools", "steps", "seed")
PLACE = re.compile(r"(data|validation|environment|rewards)\.([\w.]*\.)?(source|grader|name)=")  # that may have moved
NOT_WITH_RESUME = (  # what --resume refuses
    "task", "columns", "system_prompt", "prompt_template", "tools", "seed", "quantize_first", "dry", "teacher",
)  # fmt: skip


def train(options: TrainOptions) -> None:
    """Train a LoRA adapter, or whole weights in 4 bits, by reinforcement learning, as a recipe says."""
    check_gpus(options.gpu, options.gpus)
    if options.resume is not None:
        found = find_resumed(options, options.resume)
        if options.gpus is not None and options.gpus > 1:
            launch(options.gpus, sys.argv[1:])
        _end(*go_on(*found, options))
        return
    if options.recipe is None:
        command = options.section or "train"
        raise ConfigError(f"no recipe was given: write `qerl {command} --recipe NAME`; `qerl recipes` lists the names")
    if options.accept_changes:
        raise ConfigError("--accept-changes is about a run that began before: leave it out, or add --resume")
    from qerl.config.recipe import recipe_label

    config = config_of(options, options.recipe)
    name = recipe_label(options.recipe)
    check_new(config, name, options.gpus or 1)
    if options.gpus is not None and options.gpus > 1 and not options.dry:
        if not options.quantize_first:
            _check_base(config, options.recipe, quantize_first=False)
        launch(options.gpus, sys.argv[1:])
    if options.dry:
        with _ready(config, options.recipe, options) as parallel:
            fits = parallel.broadcast(_dry_run(config) if parallel.first else None)
        sys.exit(0 if fits else 1)
    _end(*begin(config, options.recipe, options))


def check_new(config: RunConfig, name: str, gpus: int = 1) -> Path:
    """The directory of a new run of the recipe called `name`. Raises QerlError for what speaks against it, as far as
    that can be known without torch."""
    from training.preflight.checks import check_calibration, check_config
    from training.preflight.plan import check_ranks
    from training.run_dir.folder import new_run_dir

    run_dir = new_run_dir(config.run.out, name)
    check_config(config)
    check_calibration(config)
    check_ranks(config, gpus)
    return run_dir


def begin(config: RunConfig, recipe: str, options: TrainOptions) -> tuple[TrainResult, bool]:
    """Train a recipe that `check_new` has accepted; and whether this is the process that speaks for the run. Of the
    options, the card and whether the base is to be quantized first count."""
    from qerl.config.recipe import recipe_label
    from qerl.engine.open import refuse_without_driver

    with _ready(config, recipe, options) as parallel:
        refuse_without_driver(config.rollout.engine)
        with interrupts_counted():
            logger.info("loading torch, transformers and trl")
            from training.run import start

        return start(config, recipe_label(recipe), parallel), parallel.first


@contextmanager
def _ready(config: RunConfig, recipe: str, options: TrainOptions) -> Iterator[Parallel]:
    """A card for each process, and a base that is there."""
    with one_card_each(options.gpu) as parallel:
        choose_threads(config.model.base)
        if parallel.first:
            _check_base(config, recipe, options.quantize_first)
        parallel.barrier()  # rank 0 may have to quantize
        yield parallel


def with_resume_value(arguments: list[str]) -> list[str]:
    """The arguments, with `--resume=last` for a `--resume` that has no value: typer options always take one."""
    following = [*arguments[1:], "--"]
    return [
        f"{word}=last" if word == "--resume" and after.startswith("--") else word
        for word, after in zip(arguments, following, strict=False)
    ]


def config_of(options: TrainOptions, recipe: str) -> RunConfig:
    """The recipe, with what the command and the options change of it. Raises ConfigError."""
    from qerl.config.recipe import load_recipe

    own = [(options.section, {}, f"qerl {options.section}")] if options.section is not None else []
    overrides = [*own, *options.implied, *options.overrides]
    if options.columns is not None:
        overrides.append(f"data.columns={{{', '.join(f'{name}: {of!r}' for name, of in options.columns.items())}}}")
    out = options.out and str(options.out)
    same = {name: getattr(options, name) for name in SAME}
    same["tools"] = options.tools and list(options.tools)
    return load_recipe(recipe, overrides, base=options.model, teacher=options.teacher, out=out, **same)


def _dry_run(config: RunConfig) -> bool:
    """Show what the run would do, and return whether it would fit."""
    from qerl.cli.plan import show_plan_at

    with interrupts_counted():
        logger.info("loading torch and transformers")
        from training.preflight.dry_run import dry_run

    return dry_run(config, SafeConsole(), show_plan_at)


def find_resumed(options: TrainOptions, resume: str) -> tuple[Path, int | None]:
    """The run that `resume` means, and the step to continue from. Raises QerlError if it cannot continue so."""
    others = any(getattr(options, name) != getattr(TrainOptions, name) for name in NOT_WITH_RESUME)
    if others or not all(map(PLACE.match, options.overrides)):
        raise ConfigError(
            "--resume continues a run as it was configured; of the options that change it --steps goes with it, and "
            "--model, --data, --grader, --environment or --set KEY=PATH for what has moved: leave the others out"
        )
    from training.preflight.checks import check_resumed
    from training.run_dir.resume import Moved, find_run

    run_dir, step = find_run(resume, options.recipe, options.out)
    check_resumed(run_dir, step, options.steps, Moved(options.model, moved_files(options)))
    return run_dir, step


def moved_files(options: TrainOptions) -> tuple[str, ...]:
    """The places where files of a run are now, which go with --resume."""
    named = (options.data, options.grader, options.environment)
    return (*filter(None, named), *(override.partition("=")[2].strip(" '\"") for override in options.overrides))


def go_on(run_dir: Path, step: int | None, options: TrainOptions) -> tuple[TrainResult, bool]:
    """Continue the run that `find_resumed` has found; and whether this is the process that speaks for it."""
    with one_card_each(options.gpu) as parallel:
        choose_threads(options.model or str(run_dir))
        with interrupts_counted():
            logger.info("loading torch, transformers and trl")
            from training.run import resume as resume_run
            from training.run_dir.resume import Moved

        moved = Moved(options.model, moved_files(options))
        result = resume_run(run_dir, step, options.steps, options.accept_changes, moved, parallel)
        return result, parallel.first


def _end(result: TrainResult, first: bool) -> None:
    """After a run that a signal stopped, exit as the shell reports the signal; the run has said how to continue.

    After a finished run the `first` process names the next command.
    """
    if result.adapter is None:
        sys.exit(128 + (result.stopped_by or signal.SIGINT))
    if first:
        from training.run_dir.terminal_gone import terminal_may_go

        with terminal_may_go(result.run_dir):
            say_next(after_training(result.run_dir))


def _check_base(config: RunConfig, recipe: str, quantize_first: bool) -> None:
    """See that a quantized base is there before anything heavy is loaded; with --quantize it is made."""
    from qerl.checkpoint.load import check_chat_template

    base = config.model.base
    if config.kind.packs:
        from training.run_dir.resume import starting_base

        if quantize_first:
            raise ConfigError("--quantize is for an adapter's base; qat quantizes its own: leave it out")
        starting_base(config)
        return
    try:
        check_chat_template(resolve_model(base, config.model.format))
    except CheckpointError as error:
        format = formats.get(config.model.format)
        made = default_quantized_dir(base, format)
        missing = format.scheme is not None and not made.exists()
        if not missing or resolve_model(base).kind != "base16":
            raise
        if not quantize_first:
            raise CheckpointError(
                f"recipe {recipe} trains on {made}, which does not exist: run `{quantize_line(base, format)}` first, "
                "or add --quantize"
            ) from error
        from quantize.options import QuantizeOptions
        from quantize.run import quantize_checkpoint

        options = QuantizeOptions(scheme=format.name, trust_remote_code=config.model.trust_remote_code)
        quantize_checkpoint(base, options=options)


@dataclass(frozen=True)
class SftOptions(TrainOptions):
    """The options of `qerl train`, without those about completions."""

    grader: str | None = None
    environment: str | None = None
    tools: tuple[str, ...] | None = None
    section: str | None = "sft"


def sft(options: SftOptions) -> None:
    """Let a model learn from conversations: the assistant's messages of a file, a folder or the hub.

    A recipe without the section `sft` gets one with its defaults.
    """
    train(options)


@dataclass(frozen=True)
class DistillOptions(TrainOptions):
    """The options of `qerl train`, and a teacher."""

    teacher: Annotated[
        str | None,
        typer.Option(
            help="16-bit model with the student's tokenizer; default: the recipe's, or the student's own base."
        ),
    ] = None
    section: str | None = "distill"
    implied: tuple[str, ...] = ("rollout.dynamic_sampling.enabled=false", "loss.kl_coef=0", "loss.entropy_coef=0")


def distill(options: DistillOptions) -> None:
    """Let a model learn from a 16-bit teacher on completions that it samples itself, as a recipe says.

    A recipe without the section `distill` gets one with its defaults. What a distillation cannot have is left out of
    any recipe: dynamic sampling, and the KL and entropy terms of the loss.
    """
    train(options)
