"""What an evaluation is asked to do: one frozen value, checked before anything is read.

The command line, the quickstart and every other caller make an EvalSettings; its fields are the options of `qerl eval`
and its defaults are the only ones. Importing this loads no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from qerl import formats
from qerl.base.errors import ConfigError, check_choices
from qerl.checkpoint.folder import run_folder, run_named
from qerl.checkpoint.resolve import STARTS
from qerl.config.names import ENGINES, KERNELS, unknown_name, unknown_text
from qerl.data.option_text import Text, parse_columns, parse_names, parse_switches, task_values
from qerl.engine.interface import check_temperature
from qerl.engine.options import EngineOptions

LOADS = ("auto", *formats.names())
SAMPLED_TEMPERATURE, SAMPLED_TOP_P = 0.6, 0.95  # the reference's evaluation (NVlabs/QeRL)
MAX_NEW_TOKENS = 4096  # the reference's, where the model's context has room for it
SAMPLED_HELP = f"Sample at temperature {SAMPLED_TEMPERATURE}, top-p {SAMPLED_TOP_P} (the reference's); default greedy."
RANGES = (  # whether a value fits, what to write, and the settings of which that holds
    (lambda value: value >= 1, "1 or more", "limit", "samples", "max_new_tokens", "batch_size"),
    (lambda value: value >= 0, "0 or more", "seed"),
    (lambda value: 0 < value < math.inf, "seconds above 0", "grader_timeout_s"),
    (lambda value: 0 < value < math.inf, "GiB above 0, or a share of the card such as 0.9", "memory"),
    (lambda value: 0 < value < math.inf, "GiB above 0, such as 24", "cap_gib"),
    (lambda value: 0 <= value < math.inf, "0 (greedy) or more", "temperature"),
    (lambda value: 0 < value <= 1, "more than 0 and at most 1", "top_p"),
)
BATCH_SIZE = {"transformers": 64, "vllm": 1024}  # vLLM schedules within a batch; a batch is what a kill can lose


def parse_pass_k(text: str) -> tuple[int, ...]:
    """`1,4,8` as numbers, sorted, once each. Raises ConfigError for anything else."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")})) if text else ()
    except ValueError as error:
        raise ConfigError(f"--pass-k {text!r} is not a list of numbers: write 1,4,8") from error


@dataclass(frozen=True)
class EvalSettings:
    """What is asked of `qerl eval`, whose options these are.

    None is decided from the model, the task or the engine, and the log names what was taken.

    Raises ConfigError for values that cannot be used together.
    """

    task: Annotated[
        str,
        typer.Argument(
            help="gsm8k, math500, aime24, aime25, amc23, arith, another task, or a file of rows.",
            autocompletion=task_values,
        ),
    ]
    model: Annotated[
        str | None,
        Text(run_named),
        typer.Option(
            help="Base, NVFP4 folder, run directory, adapter folder, hub id, or `tiny`. "
            "Default: the newest run or checkpoint made here."
        ),
    ] = None
    adapter: Annotated[
        str | None, Text(run_named), typer.Option(help="Adapter folder or run to apply to the model.")
    ] = None
    load: Annotated[Literal[LOADS], typer.Option(help="Weights to load; auto takes what the model is.")] = "auto"
    run: Annotated[
        Path | None, Text(run_folder), typer.Option(help="Run whose --checkpoints are evaluated, instead of --model.")
    ] = None
    checkpoints: Annotated[str | None, typer.Option(help="Of --run: all (default), last, or steps: 40,80.")] = None
    data: Annotated[
        str | None,
        typer.Option(help="jsonl, json, csv or parquet file, folder, or hub id, instead of the task's own data."),
    ] = None
    columns: Annotated[
        Mapping[str, str] | None,
        Text(parse_columns),
        typer.Option(help="Columns of --data: question=problem,answer=solution"),
    ] = None
    keep_unreadable: Annotated[
        bool, typer.Option(help="Keep rows whose answer (prose, broken LaTeX) the grader cannot read.")
    ] = False
    limit: Annotated[int | None, typer.Option(help="Only the first rows, this many.")] = None
    system_prompt: Annotated[
        str | None, typer.Option(help='Default: the one that trained, else the task\'s; "" for none.')
    ] = None
    prompt_template: Annotated[
        str | None, typer.Option(help="With {question}. Default: the one that trained, else the task's.")
    ] = None
    chat_template_kwargs: Annotated[
        Mapping[str, object] | None,
        Text(parse_switches),
        typer.Option(help="Variables of the chat template: enable_thinking=false. Default: those that trained."),
    ] = None
    grader: Annotated[
        str | None, typer.Option(help="Your own grading: file.py, file.py:function. Default: the task's.")
    ] = None
    grader_timeout_s: Annotated[float, typer.Option(help="Seconds that one call of --grader may take.")] = 300.0
    environment: Annotated[
        str | None,
        typer.Option(
            help="Episodes with it: calculator, word_game, file.py:Name, or a URL; none. Default: the run's, if it is "
            "one of qerl's."
        ),
    ] = None
    tools: Annotated[
        tuple[str, ...], Text(parse_names), typer.Option(help="Functions that the model may call: file.py:f,file.py:g")
    ] = ()
    samples: Annotated[int, typer.Option("--samples", "-n", help="Completions per question.")] = 1
    pass_k: Annotated[tuple[int, ...], Text(parse_pass_k), typer.Option(help="Also pass@k for these k: 1,4,8")] = ()
    sampled: Annotated[bool, typer.Option("--sampled", help=SAMPLED_HELP)] = False
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None  # a number once this is made
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None  # likewise
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="A completion is truncated here. Default: 4096, or what the context has room for."),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0
    engine: Annotated[Literal[ENGINES], typer.Option(help="auto: vllm on a GPU, else transformers.")] = "auto"
    batch_size: Annotated[
        int | None, typer.Option(help="Completions sampled and saved together. Default: 64, with vllm 1024.")
    ] = None
    suite: Annotated[
        Literal["lighteval"] | None,
        typer.Option(help="Run TASK as this harness defines it: 'gsm8k|0' (needs qerl[eval])."),
    ] = None
    suite_tasks: Annotated[
        Path | None, typer.Option(help="Python file with lighteval's TASKS_TABLE: local data, no hub.")
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Folder for completions and result. Default: in the run, else in evals/.")
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew where an evaluation stands.")] = False
    kernel: Annotated[Literal[KERNELS], typer.Option(help="NVFP4 kernel of vllm; auto: the fastest on the card.")] = (
        "auto"
    )
    memory: Annotated[
        float | None,
        typer.Option(
            help="GPU budget of vllm: GiB, or up to 1 a share of the card. Default: the run's, else what is left."
        ),
    ] = None
    cap_gib: Annotated[
        float | None,
        typer.Option(help="The process takes no more GPU memory than this (vllm). Default: the run's, else all."),
    ] = None
    start: Annotated[
        Literal[STARTS],
        typer.Option(help="none: a quantized base without the start that its folder has (docs/start.md)."),
    ] = "auto"
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="vllm repeats itself to the bit (slower); transformers does anyway.")
    ] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the checkpoint.")
    ] = False
    dtype: str = "auto"  # no options of the command, this and what follows
    device: str = "auto"
    step: int | None = None  # of the run's checkpoint that `adapter` is: a label of the result

    def __post_init__(self) -> None:
        check_choices(self)
        self._set_sampling_()
        for fits, words, *names in RANGES:
            for name in names:
                if (value := getattr(self, name)) is not None and not fits(value):
                    raise ConfigError(f"{flag(name)} {value:g} is not possible: write {words}")
        if self.grader is None and self.grader_timeout_s != EvalSettings.grader_timeout_s:
            raise ConfigError(
                f"--grader-timeout-s {self.grader_timeout_s:g} is of a grader of your own: write --grader FILE.py "
                "as well, or leave it out"
            )
        if self.environment == "none" and self.tools:
            raise ConfigError(
                f"--tools {','.join(self.tools)} and --environment none contradict each other: leave one of them out"
            )
        if self.cap_gib is not None and self.memory is not None and self.cap_gib < self.memory > 1:
            raise ConfigError(
                f"--memory {self.memory:g} is more than --cap-gib {self.cap_gib:g}, which holds for the whole process: "
                "write a smaller --memory, or leave it out"
            )
        self._check_sources()
        self._check_sampling()
        if self.prompt_template is not None and "{question}" not in self.prompt_template:
            raise ConfigError(
                f"--prompt-template {self.prompt_template!r} has no {{question}}: write it where the question belongs"
            )

        if self.prompt_template is not None and (name := unknown_name(self.prompt_template)) is not None:
            raise ConfigError(f"--prompt-template {self.prompt_template!r}: {unknown_text(name)}")

    def engine_options(self) -> EngineOptions:
        """The engine that is asked for; its context and its adapter's rank are the caller's to add."""
        return EngineOptions(
            engine=self.engine,
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            kernel=self.kernel,
            memory=self.memory,
            cap_gib=self.cap_gib,
            deterministic=self.deterministic,
        )

    def _check_sources(self) -> None:
        if self.suite is not None:
            return  # `eval.compare.show_suite` refuses what does not go with it
        if self.suite_tasks is not None:
            raise ConfigError(f"--suite-tasks {self.suite_tasks} belongs to --suite lighteval: add that")
        if self.run is None and self.checkpoints is not None:
            raise ConfigError(f"--checkpoints {self.checkpoints} of which run? write --run RUN")
        if self.run is not None and (self.model is not None or self.adapter is not None):
            raise ConfigError("--run brings its own base and adapters: leave out --model and --adapter")

    def _set_sampling_(self) -> None:
        """Give temperature and top-p their values: as asked, else --sampled's, else greedy."""
        if self.sampled and self.temperature == 0:
            raise ConfigError("--sampled and --temperature 0 contradict each other: leave one of them out")
        default = {"temperature": SAMPLED_TEMPERATURE, "top_p": SAMPLED_TOP_P}
        for name, greedy in {"temperature": 0.0, "top_p": 1.0}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default[name] if self.sampled else greedy)

    def _check_sampling(self) -> None:
        check_temperature(self.temperature, "--temperature")
        if self.temperature == 0 and self.top_p < 1:
            raise ConfigError(
                f"--top-p {self.top_p} does nothing at temperature 0 (greedy): leave it out, or add --sampled"
            )
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError(
                f"--samples {self.samples} at temperature 0 would be {self.samples} equal completions of each "
                "question: add --sampled, or --temperature above 0"
            )
        for k in self.pass_k:
            if not 1 <= k <= self.samples:
                raise ConfigError(f"--pass-k {k} needs 1 to --samples ({self.samples}): write --samples {max(k, 1)}")


def flag(name: str) -> str:
    """The command-line name of a setting."""
    return "--" + name.replace("_", "-")
