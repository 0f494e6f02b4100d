"""What the engine asks of the plugin."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config import VllmConfig, get_current_vllm_config

from qerl.engine.vllm import CONFIG_KEY


@dataclass(frozen=True)
class Options:
    """What the engine asks of the plugin, carried by vLLM's `additional_config`."""

    max_rank: int = 0  # of start and adapter together; 0: there is neither, and products cost nothing extra
    deterministic: bool = False
    kernel: str = ""  # "qerl": ours multiplies by NVFP4 weights; otherwise the one that vLLM chose (`linear_backend`)
    expert_rank: int = 0  # of the adapter on experts; 0: there is none
    shares_outer: bool = True  # whether that adapter has the factors that all experts share
    records_experts: bool = False  # whether the experts that are chosen are kept for each token

    @classmethod
    def current(cls) -> Options:
        return cls.of(get_current_vllm_config())

    @classmethod
    def of(cls, config: VllmConfig) -> Options:
        return cls(**(config.additional_config or {}).get(CONFIG_KEY, {}))
