"""The command lines to try the result of a merge: `vllm serve` and `qerl chat`, ready to be typed."""

from __future__ import annotations

import shlex
from pathlib import Path

from qerl.checkpoint.activations import kind_of_activations
from qerl.checkpoint.folder import format_of

ONLY_QERL = (
    "its activations have dynamic 4-bit scales per token, which stock vLLM does not know and refuses to load: qerl "
    "chat and qerl eval read it; static scales (qat.quant_cfg: nvfp4_w4a4_static) are read by stock vLLM"
)
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of --max-lora-rank that vLLM 0.25 takes


def chat_line(out: Path) -> str:
    """`qerl chat` with the folder; an adapter folder names its base itself."""
    return f"qerl chat --model {shlex.quote(str(out))}"


def serve_model_line(out: Path) -> str:
    """`vllm serve` with a whole model; vLLM reads from config.json whether it is BF16 or NVFP4, and what it rounds."""
    return f"vllm serve {shlex.quote(str(out))} --served-model-name {shlex.quote(out.name)}"


def only_qerl_reads(base: Path) -> bool:
    """Whether models that are made like the folder `base` have activations that stock vLLM refuses."""
    if not (base / "config.json").is_file():
        return False
    format = format_of(base)
    return format.four_bit_inputs and kind_of_activations(base, format) == "dynamic"


def serve_adapter_line(out: Path, base: str | None, rank: int, has_norms: bool) -> str | None:
    """`vllm serve` with a base and an adapter folder; None if there is no base that vLLM can load it on (trained norms,
    rank over 512, a base that only qerl reads)."""
    allowed = [limit for limit in LORA_RANKS if limit >= rank]
    if base is None or has_norms or not allowed or only_qerl_reads(Path(base)):
        return None
    module = shlex.quote(f"{out.name}={out.resolve()}")
    return f"vllm serve {shlex.quote(base)} --enable-lora --max-lora-rank {allowed[0]} --lora-modules {module}"
