"""What is asked of `qerl export`, as one value whose fields are its options, and how its result is served.

Importing this loads no torch.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from qerl import formats
from qerl.base.errors import ConfigError, check_choices
from qerl.checkpoint.activations import drops_inputs, kind_of_activations
from qerl.checkpoint.experts import decoder_of
from qerl.checkpoint.folder import format_of, run_named
from qerl.checkpoint.resolve import name_of_adapter
from qerl.checkpoint.shards import read_config
from qerl.data.option_text import Text

GGUF = "gguf"
TARGETS = ("adapter", *(each.name for each in formats.writable()), GGUF)
ONLY_QERL = (
    "its activations have dynamic 4-bit scales per token, which stock vLLM does not know and refuses to load: qerl "
    "chat and qerl eval read it; static scales (qat.quant_cfg: nvfp4_w4a4_static) are read by stock vLLM"
)
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of --max-lora-rank that vLLM 0.25 takes


@dataclass(frozen=True)
class ExportOptions:
    """What to write from which run or adapter, and how. `qerl merge` has the same options."""

    adapter: Annotated[
        str,
        Text(run_named),
        typer.Option("--run", "--adapter", help="Run directory, adapter folder, or hub id of an adapter."),
    ]
    to: Annotated[
        Literal[TARGETS] | None,
        typer.Option(
            help="adapter: PEFT folder; bf16, nvfp4, fp8_block: whole model in 16, 4, 8 bits; gguf: for llama.cpp and "
            "Ollama. Default, for a run that trained through the quantizer: as it was trained."
        ),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Default: exported/<name>-<to>, with --step exported/<name>-N-<to>.")
    ] = None
    model: Annotated[str | None, typer.Option(help="Base, if it is not the one that the adapter names.")] = None
    onto: Annotated[
        Literal["auto", "trained", "original"],
        typer.Option(
            help="trained: the weights that were trained on; original: the 16-bit model behind them. "
            "auto: original for nvfp4 and fp8_block where it is here, else trained. With --to adapter: original makes "
            "one for the 16-bit model of an adapter that began at its base's start."
        ),
    ] = "auto"
    dtype: Annotated[Literal["keep", "bfloat16", "float32"], typer.Option(help="Of an adapter folder's tensors.")] = (
        "keep"
    )
    base_name: Annotated[str | None, typer.Option(help="The base that an adapter folder names: hub id or folder.")] = (
        None
    )
    with_start: Annotated[
        bool, typer.Option("--with-start", help="Write an adapter and its frozen start as one adapter, for stock vLLM.")
    ] = False
    converter: Annotated[
        Path | None, typer.Option(help="Checkout of llama.cpp, for --to gguf; default: the installed converter.")
    ] = None
    prompts: Annotated[
        Path | None, typer.Option(help="File with a column `question`. Default: the run's own prompts.")
    ] = None
    prompt_count: Annotated[int, typer.Option(help="Prompts to compare on; 0 leaves it out.")] = 32
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each completion.")] = 128
    push_to_hub: Annotated[str | None, typer.Option(help="Upload to this hub id (owner/name).")] = None
    public: Annotated[bool, typer.Option("--public", help="A new hub repository is public; default private.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output folder that qerl wrote.")] = False
    force: Annotated[bool, typer.Option("--force", help="Replace it even if it holds files of others.")] = False
    device: Annotated[str, typer.Option(help="What merges and packs: auto, cpu or cuda.")] = "auto"
    step: Annotated[
        int | None,
        typer.Option(min=1, help="Checkpoint of a run that trained through the quantizer; default: the last."),
    ] = None

    def check(self) -> None:
        """Raise ConfigError for values that cannot be used together."""
        names = [*(each.name for each in formats.writable()), GGUF]
        check_choices(self, to=names)
        if self.out is not None and self.out.suffix.lower() in (".gguf", ".safetensors"):
            raise ConfigError(
                f"--out {self.out} is the folder for what is written: write --out {self.out.with_suffix('')}"
            )
        if self.converter is not None and self.to != GGUF:
            raise ConfigError(f"--converter {self.converter} goes with --to {GGUF}")
        if self.to != "adapter" and (self.dtype != "keep" or self.base_name):
            raise ConfigError(
                "--dtype and --base-name go with --to adapter: a whole model has weights of one kind and no base"
            )
        if self.to != "adapter" and self.with_start:
            raise ConfigError("--with-start goes with --to adapter: a whole model has the start in its weights")
        if self.to == "adapter" and (self.onto == "trained" or self.prompts):
            raise ConfigError(
                f"--onto and --prompts go with --to {' and '.join(names)}: an adapter folder is an exact copy"
            )
        if self.with_start and self.onto == "original":
            raise ConfigError(
                "--with-start is for the quantized base and --onto original for its 16-bit model: drop one"
            )
        if self.prompt_count < 0 or self.max_new_tokens < 1:
            raise ConfigError("--prompt-count must be at least 0 and --max-new-tokens at least 1")
        if self.prompts is not None and not self.prompts.is_file():
            raise ConfigError(f"--prompts {self.prompts} does not exist: give a file with a column `question`")

    def named(self) -> str:
        """A name for the result: that of the run and its checkpoint, the adapter folder's, or the hub's."""
        folder = Path(self.adapter).expanduser()
        return name_of_adapter(folder) if folder.exists() else self.adapter.rsplit("/", 1)[-1]

    def folder(self, above: str = "exported") -> Path:
        """Where the result is written; call it when `to` is known."""
        step = "" if self.step is None else f"-{self.step}"
        return (self.out or Path(above) / f"{self.named()}{step}-{self.to}").expanduser()


def chat_line(out: Path) -> str:
    """`qerl chat` with the folder; an adapter folder names its base itself."""
    return f"qerl chat --model {shlex.quote(str(out))}"


def gguf_lines(out: Path, file: str) -> dict[str, str]:
    """Lines that ask the GGUF `file` of the folder `out`."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", file.lower().removesuffix(".gguf"))
    name = plain.strip("-.")[:80] or "model"  # what Ollama takes as a name
    return {
        "ollama": f"ollama create {name} -f {shlex.quote(str(out / 'Modelfile'))} && ollama run {name}",
        "llama.cpp": f"llama-server -m {shlex.quote(str(out / file))} --jinja",
    }


def serve_model_line(out: Path) -> str:
    """`vllm serve` with a whole model; vLLM reads from config.json whether it is BF16 or NVFP4, and what it rounds."""
    return f"vllm serve {shlex.quote(str(out))} --served-model-name {shlex.quote(out.name)}"


def only_qerl_reads(base: Path) -> bool:
    """Whether models that are made like the folder `base` have activations that stock vLLM refuses."""
    if not (base / "config.json").is_file():
        return False
    format = format_of(base)
    return format.four_bit_inputs and kind_of_activations(base, format) == "dynamic"


def served_by_vllm(base: Path) -> bool:
    """Whether vLLM 0.25.1 is known to serve models like the folder `base`: not text models of Qwen3.5 and Gemma 4."""
    if not (base / "config.json").is_file():
        return True
    decoder = decoder_of(read_config(base), str(base))
    return not (decoder.linear or decoder.full)


def serve_adapter_line(out: Path, base: str | None, rank: int, has_norms: bool) -> str | None:
    """`vllm serve` with a base and an adapter folder; None if there is no base that vLLM can load it on (trained norms,
    rank over 512, a base that only qerl reads, or whose inputs vLLM would round and qerl does not)."""
    allowed = [limit for limit in LORA_RANKS if limit >= rank]
    if base is None or has_norms or not allowed or not served_by_vllm(Path(base)):
        return None
    if only_qerl_reads(Path(base)) or drops_inputs(Path(base)):
        return None
    named, path = out.name, str(out.resolve())
    if set("=,") & set(named + path):  # vLLM takes the name up to "=", and what has "," for JSON
        module = json.dumps({"name": named, "path": path}, ensure_ascii=False)
    else:
        module = f"{named}={path}"
    line = f"vllm serve {shlex.quote(base)} --enable-lora --max-lora-rank {allowed[0]} --lora-modules"
    return f"{line} {shlex.quote(module)}"
