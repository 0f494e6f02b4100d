"""The command lines to try the result of a merge: `vllm serve` and `qerl chat`, ready to be typed."""

from __future__ import annotations

import shlex
from pathlib import Path

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of --max-lora-rank that vLLM 0.25 takes


def chat_line(out: Path) -> str:
    """`qerl chat` with the folder; an adapter folder names its base itself."""
    return f"qerl chat --model {shlex.quote(str(out))}"


def serve_model_line(out: Path) -> str:
    """`vllm serve` with a whole model; vLLM reads from config.json whether it is BF16 or NVFP4."""
    return f"vllm serve {shlex.quote(str(out))} --served-model-name {shlex.quote(out.name)}"


def serve_adapter_line(out: Path, base: str, rank: int, has_norms: bool) -> str | None:
    """`vllm serve` with a base and an adapter folder; None if vLLM cannot load it (trained norms, rank over 512)."""
    allowed = [limit for limit in LORA_RANKS if limit >= rank]
    if has_norms or not allowed:
        return None
    module = shlex.quote(f"{out.name}={out.resolve()}")
    return f"vllm serve {shlex.quote(base)} --enable-lora --max-lora-rank {allowed[0]} --lora-modules {module}"
