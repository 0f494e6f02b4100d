"""16-bit weights, as models are published: a linear's `weight` is a plain matrix, and nothing is packed."""

from __future__ import annotations

from qerl.formats.base import Format

BF16 = Format(
    name="bf16",
    label="16-bit",
    folder_label="16-bit model",
    model_label="BF16 model",
    bytes_per_weight=2,
    vllm_method="qerl_bf16",
)
