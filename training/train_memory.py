"""What the training phase of a step may take of the GPU, what it took, and the error that says what to lower."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qerl.errors import EngineError
from qerl.memory_plan import GIB, MicroBatchPlan, Shapes, Wishes, plan_micro_batches

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig

    from qerl.config import RunConfig
    from qerl.engine import Engine

logger = logging.getLogger(__name__)


def plan_run(config: RunConfig, policy: PeftModel, engine: Engine) -> MicroBatchPlan:
    """Plan a new run's micro-batches from what is free on the card while the engine sleeps."""
    rollout, run = config.rollout, config.run
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    wishes = Wishes(
        tokens=run.micro_batch_tokens,
        recompute=run.gradient_checkpointing,
        longest=longest,
        step_tokens=longest * rollout.prompts_per_step * rollout.group_size,
    )
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    shapes = model_shapes(policy.get_base_model().config.get_text_config(), config.adapter.rank, trained)
    plan = plan_micro_batches(shapes, wishes, _available(engine, config.memory.cap_gib))
    logger.info(
        "micro-batches of up to %d tokens, %d of %d layers recompute%s",
        plan.micro_batch_tokens,
        plan.recomputed_layers,
        shapes.layers,
        "" if plan.planned_gib is None else f", {plan.planned_gib:.1f} GiB planned beside the weights",
    )
    return plan


def recorded_plan(run_dir: Path, config: RunConfig) -> MicroBatchPlan | None:
    """The plan that run.json holds; None if there is none, or the recipe now fixes other tokens."""
    path = run_dir / "run.json"
    about = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "micro_batches" not in about:
        return None
    plan = MicroBatchPlan(**about["micro_batches"])
    return plan if config.run.micro_batch_tokens in (None, plan.micro_batch_tokens) else None


def as_record(plan: MicroBatchPlan) -> dict[str, object]:
    """What `recorded_plan` reads."""
    return asdict(plan)


def model_shapes(config: PretrainedConfig, rank: int, trained: int) -> Shapes:
    """The sizes of a Qwen2, Qwen3, Llama or Mistral model."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shapes(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        query=heads * head_dim,
        key_value=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        rank=rank,
        trained=trained,
    )


@dataclass
class TrainingMemory:
    """`metrics` of one training phase, empty on a CPU."""

    metrics: dict[str, float] = field(default_factory=dict)


@contextmanager
def training_memory(plan: MicroBatchPlan) -> Iterator[TrainingMemory]:
    """Measure the peak of a training phase above what is there before it; running out becomes an EngineError."""
    memory = TrainingMemory()
    if not torch.cuda.is_available():
        yield memory
        return
    earlier_peak, before = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        yield memory
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"the GPU has no memory left for micro-batches of {plan.micro_batch_tokens} tokens with "
            f"{plan.recomputed_layers} recomputed layers ({str(error).splitlines()[0]}): set run.micro_batch_tokens: "
            f"{plan.micro_batch_tokens // 2}, or run.gradient_checkpointing: true"
        ) from error
    peak = torch.cuda.max_memory_allocated()
    memory.metrics = {"memory/train_gib": (peak - before) / GIB, "memory/peak_gib": max(peak, earlier_peak) / GIB}
    if plan.planned_gib is not None:
        memory.metrics["memory/train_planned_gib"] = plan.planned_gib


def _available(engine: Engine, cap_gib: float | None) -> int | None:
    """Bytes that the training phase may take; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    engine.sleep()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return free if cap_gib is None else min(free, int(cap_gib * GIB) - (total - free))
