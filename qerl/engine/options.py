"""How a rollout engine is opened, as one value: made once, from a recipe or from a command's options.

Importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError
from qerl.plan.engine_memory import MAX_SEQUENCES

if TYPE_CHECKING:
    import torch

    from qerl.checkpoint.base_start import BaseStart


@dataclass(frozen=True)
class EngineOptions:
    """What `open_engine` is told beside the base and its format.

    `max_rank`: the largest LoRA rank that a sync will bring, 0 for none; `start`: factors that stay beside the weights
    of the base, and to which an adapter is added (`qerl.checkpoint.base_start`); `experts` and `expert_rank`: the kind
    of the adapter on experts that it will bring (a value of `adapter.experts`) and its largest rank, 0 for none;
    `max_context`: prompt and completion tokens together, None for what the model declares; `records_experts`: whether
    completions of a mixture of experts say which experts were chosen for each token; `memory` and `cap_gib`: see
    `qerl.plan.engine_memory`; `trainer_bytes`: what the trainer keeps on the card during a rollout; `enforce_eager`: no
    CUDA graphs, for debugging.
    """

    engine: str = "auto"  # "transformers" or "vllm"; auto: vllm where it can run
    dtype: str = "auto"
    trust_remote_code: bool = False
    records_experts: bool = False
    device: str = "auto"  # transformers only, as is the next
    batch_size: int | None = None  # completions sampled at once; None: all
    kernel: str = "auto"  # this and what follows: vllm only
    memory: float | None = None
    cap_gib: float | None = None
    trainer_bytes: int = 0
    deterministic: bool = False
    kv_cache_dtype: str = "auto"
    max_context: int | None = None
    max_rank: int = 0
    start: BaseStart | None = None
    experts: str = "shared"
    expert_rank: int = 0
    seed: int = 0
    max_sequences: int = MAX_SEQUENCES
    enforce_eager: bool = False

    def for_adapter(self, tensors: Mapping[str, torch.Tensor]) -> EngineOptions:
        """The options of an engine that gets the adapter with these tensors.

        Raises CheckpointError for an adapter that has no LoRA, or one on experts alone.
        """
        from qerl.checkpoint.adapter_file import describe, is_of_experts

        factors = [name for name in tensors if name.endswith(".lora_A.weight")]
        ranks = [tensors[name].shape[0] for name in factors if not is_of_experts(name)]
        if not ranks:
            raise CheckpointError(
                f"the adapter has {'LoRA on experts alone' if factors else 'no LoRA'}, and the engine needs one that "
                "adapts attention: merge it with PEFT, and give the merged model"
            )
        kind, expert_rank = describe(tensors)
        return replace(self, max_rank=max(ranks), experts=kind, expert_rank=expert_rank)

    @property
    def linear_rank(self) -> int:
        """The rank of all that the engine multiplies by beside a linear's own weight: the start and the adapter."""
        return self.max_rank + (self.start.rank if self.start else 0)
