"""qerl: reinforcement learning of language models on one GPU, on a frozen NVFP4 base with BF16 LoRA adapters."""

__version__ = "0.1.0"
