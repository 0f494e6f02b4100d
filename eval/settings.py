"""What an evaluation is asked to do: one frozen value, checked before anything is read.

The command line (`eval/command.py`), the quickstart and later callers all build an EvalSettings; its defaults are the
only ones. Importing this loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qerl.engine.interface import check_temperature
from qerl.engine.options import EngineOptions
from qerl.errors import ConfigError
from qerl.vllm_plugin.opening import KERNELS

LOADS = ("auto", "nvfp4", "bf16")
ENGINES = ("auto", "transformers", "vllm")
SAMPLED_TEMPERATURE, SAMPLED_TOP_P = 0.6, 0.95  # the reference's evaluation (NVlabs/QeRL)
MAX_NEW_TOKENS = 4096  # the reference's, where the model's context has room for it
BATCH_SIZE = {"transformers": 64, "vllm": 1024}  # vLLM schedules within a batch; a batch is what a kill can lose


@dataclass(frozen=True)
class EvalSettings:
    """One evaluation. None means: decided from the model, the task or the engine, and named in the log.

    Raises ConfigError for values that cannot be used together.
    """

    task: str  # name of a task, or a file of rows
    model: str | None = None  # folder, hub id, run or adapter; None: the newest run or checkpoint made here
    adapter: str | None = None
    load: str = "auto"
    data: str | None = None  # hub id, file or folder; None: the task's own
    columns: Mapping[str, str] | None = None
    limit: int | None = None
    samples: int = 1
    pass_k: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int | None = None
    batch_size: int | None = None
    seed: int = 0
    out: Path | None = None
    overwrite: bool = False
    engine: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    system_prompt: str | None = None  # None: the run's, else the task's; "": none
    prompt_template: str | None = None
    trust_remote_code: bool = False
    kernel: str = "auto"  # this and what follows: the vllm engine only
    memory: float | None = None  # GiB, or up to 1 a share of the card; None: the run's, else what is left
    cap_gib: float | None = None  # of the whole process; None: the run's, else the card
    deterministic: bool = False
    step: int | None = None  # of the run's checkpoint that `adapter` is: a label of the result

    def __post_init__(self) -> None:
        _choice("load", self.load, LOADS)
        _choice("engine", self.engine, ENGINES)
        _choice("kernel", self.kernel, KERNELS)
        for name in ("limit", "samples", "max_new_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag(name)} {value} is less than one: write 1 or more")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed} is negative: write 0 or more")
        if self.memory is not None and not 0 < self.memory < math.inf:
            raise ConfigError(f"--memory {self.memory} is no budget: write GiB, or a share of the card such as 0.9")
        if self.cap_gib is not None and not 0 < self.cap_gib < math.inf:
            raise ConfigError(f"--cap-gib {self.cap_gib:g} is no limit: write GiB, such as 24")
        if self.cap_gib is not None and self.memory is not None and self.cap_gib < self.memory > 1:
            raise ConfigError(
                f"--memory {self.memory:g} is more than --cap-gib {self.cap_gib:g}, which holds for the whole process: "
                "write a smaller --memory, or leave it out"
            )
        self._check_sampling()
        self._check_prompt()

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

    def _check_sampling(self) -> None:
        if not 0 <= self.temperature < math.inf:
            what = "negative" if self.temperature < 0 else "no number"
            raise ConfigError(f"--temperature {self.temperature} is {what}: write 0 (greedy) or more")
        check_temperature(self.temperature, "--temperature")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p} is no share: write more than 0 and at most 1")
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

    def _check_prompt(self) -> None:
        if self.prompt_template is not None and "{question}" not in self.prompt_template:
            raise ConfigError(
                f"--prompt-template {self.prompt_template!r} has no {{question}}: write it where the question belongs"
            )


def flag(name: str) -> str:
    """The command-line name of a setting."""
    return "--" + name.replace("_", "-")


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{flag(name)} {value!r} is not known: write one of {', '.join(choices)}")
