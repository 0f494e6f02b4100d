"""Whether a model's keys and values can be kept in 8 bits as they are. No torch."""

from __future__ import annotations

from pathlib import Path

from qerl.base.errors import ConfigError
from qerl.checkpoint.shards import read_json, read_tensors
from qerl.plan.sizes import ModelSizes

SCALES = ("k_scale", "v_scale")


def check_kv_cache(kv_cache_dtype: str, sizes: ModelSizes, base: str | Path, calibrates: bool = False) -> None:
    """Raise ConfigError for keys and values in `fp8` with scale 1 on a `base` (folder or hub id) that they ruin.

    Whoever `calibrates` sets other scales before anything is sampled.
    They ruin models with large keys, as Qwen2.5 has them (reported at verl#4435). Where queries and keys are normed the
    values stay within what the format holds, and elsewhere calibrated scales see to it.
    """
    if kv_cache_dtype != "fp8" or calibrates or sizes.head_norms or _calibrated(Path(base), sizes.layers):
        return
    raise ConfigError(
        f"rollout.kv_cache_dtype fp8 rounds keys and values with scale 1, which ruins models like {base}: it neither "
        f"norms its keys (as Qwen3, Gemma 3 and OLMo 2 do) nor carries calibrated scales ({', '.join(SCALES)}): write "
        "a number for rollout.kv_refresh, which calibrates it, or rollout.kv_cache_dtype: fp8_per_token_head, or auto"
    )


def _calibrated(folder: Path, layers: int) -> bool:
    """Whether the checkpoint has scales for each layer's keys and values, which an engine reads if its config.json
    says how the model is quantized."""
    if not folder.is_dir() or "quantization_config" not in read_json(folder / "config.json"):
        return False
    found = [name.rpartition(".")[2] for name in read_tensors(folder) if ".self_attn." in name]
    return all(found.count(scale) == layers for scale in SCALES)
