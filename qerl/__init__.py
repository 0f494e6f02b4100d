"""qerl: reinforcement learning of language models on one GPU, on a frozen NVFP4 base with BF16 LoRA adapters."""

from qerl.telemetry import disable_telemetry

__version__ = "0.1.0"

disable_telemetry()  # before any library is imported
