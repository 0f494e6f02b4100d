"""GPU memory of a step's training phase: plan it, measure it, and say what to lower if it runs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from qerl.base.errors import EngineError
from qerl.engine.memory import own_bytes
from qerl.model.packed_attention import hidden_states, packed_attention_of
from qerl.model.packing import pack
from qerl.plan.engine_memory import Card, card_named
from qerl.plan.micro_batch_plan import GIB, Footprint, MicroBatchPlan, Shapes, Wishes, plan_micro_batches
from qerl.plan.sizes import sizes_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from qerl.engine.interface import Engine
    from training.policy.policy import Policy

logger = logging.getLogger(__name__)

# Every step maps its pages anew, because the engine gets the memory back in between. On an H200 that takes 0.2 s for
# 50 GiB in torch's usual pages of 20 MiB, and 0.04 s in these, as long as ordinary blocks take.
PAGE_MIB = 256
PROBE_TOKENS = (64, 192)  # two lengths, so that what does not grow with the tokens cancels out


def plan_run(
    policy: Policy, engine: Engine, wishes: Wishes, rank: int, entropy_gradient: bool, cap_gib: float | None
) -> MicroBatchPlan:
    """Plan a new run's micro-batches from what is free on the card while the engine sleeps.

    `rank` is the adapter's, 0 without one; `entropy_gradient` says whether the loss has an entropy bonus.
    """
    footprint = footprint_of(policy, wishes, rank, entropy_gradient)
    available = _available(engine, cap_gib)
    if available is not None:
        shapes = _shapes(policy, wishes, rank)
        footprint = replace(footprint, layer=measure_layer(policy.base_model) + shapes.rounded_kv)
    plan = plan_micro_batches(footprint, wishes, available)
    logger.info(
        "micro-batches of %d tokens (%.1f GiB beside the weights): %d of %d layers recompute, %d in one of %d tokens",
        plan.micro_batch_tokens,
        plan.needed(plan.micro_batch_tokens) / GIB,
        plan.recomputed(plan.micro_batch_tokens),
        footprint.layers,
        plan.recomputed(wishes.longest),
        wishes.longest,
    )
    return plan


def footprint_of(policy: Policy, wishes: Wishes, rank: int, entropy_gradient: bool) -> Footprint:
    """What training `policy` takes, by the sizes of its model alone, and what the recipe and a teacher add."""
    footprint = _shapes(policy, wishes, rank).footprint(entropy_gradient)
    return footprint if wishes.teacher is None else wishes.teacher.beside(footprint)


def _shapes(policy: Policy, wishes: Wishes, rank: int) -> Shapes:
    trained = sum(parameter.numel() for parameter in policy.parameters())
    return replace(
        model_shapes(policy.base_model.config.get_text_config(), rank, trained, _this_card()),
        trained_bytes=policy.trained_bytes,
        **wishes.of_shapes,
    )


def _this_card() -> Card | None:
    """The known card that this process trains on; None on a CPU or an unknown one."""
    if not torch.cuda.is_available():
        return None
    return card_named(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1] / GIB)


def recorded_plan(about: Mapping[str, Any], micro_batch_tokens: int | None) -> MicroBatchPlan | None:
    """The plan in `about`, what run.json holds; None if there is none, or if the recipe now asks for other
    `micro_batch_tokens`."""
    if "micro_batches" not in about:
        return None
    record = about["micro_batches"]
    footprint = record["footprint"] and Footprint(**record["footprint"])
    plan = MicroBatchPlan(**{**record, "footprint": footprint})
    return plan if micro_batch_tokens in (None, plan.micro_batch_tokens) else None


def model_shapes(config: PretrainedConfig, rank: int, trained: int, card: Card | None = None) -> Shapes:
    """The sizes of a model with this transformers config."""
    return Shapes.of(sizes_of(config.to_dict(), "the model"), rank, trained, card)


def measure_layer(model: PreTrainedModel) -> int:
    """Bytes that a layer keeps per token: the difference of what autograd saves in two short forward passes."""
    was_training = model.training
    model.train()
    with torch.random.fork_rng():
        short, long = (_saved_bytes(model, tokens) for tokens in PROBE_TOKENS)
    model.train(was_training)
    return -(-(long - short) // ((PROBE_TOKENS[1] - PROBE_TOKENS[0]) * model.config.num_hidden_layers))


def _saved_bytes(model: PreTrainedModel, tokens: int) -> int:
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=model.dtype == torch.bfloat16)
    with packed_attention_of(model), bf16, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_states(model, pack(ids, torch.ones_like(ids), tokens - 1))
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in saved.items() if pointer not in known)


@contextmanager
def training_memory(plan: MicroBatchPlan) -> Iterator[dict[str, float]]:
    """Measure how far the peak of a training phase is above the memory before it; running out raises EngineError.

    The metrics are there when the phase has ended; empty on a CPU.
    """
    memory: dict[str, float] = {}
    before = torch.cuda.memory_allocated()
    begin_phase()
    try:
        with growing_segments():
            yield memory
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"the GPU has no memory left for micro-batches of {plan.micro_batch_tokens} tokens "
            f"({str(error).splitlines()[0]}): set run.micro_batch_tokens: {plan.micro_batch_tokens // 2}, or "
            "run.gradient_checkpointing: true"
        ) from error
    if torch.cuda.is_available():
        memory["memory/train_gib"] = (torch.cuda.max_memory_allocated() - before) / GIB
        memory |= card_memory("memory/train_card_gib")


@contextmanager
def growing_segments() -> Iterator[None]:
    """Within it, torch maps memory page by page, so that micro-batches of varied size leave no gaps behind.

    Each size would otherwise get blocks of its own, which torch keeps: with prompts of varied length one step of a 7B
    took twice the memory that it needed. It is off outside, since vLLM's memory pools, which a sleeping engine gives
    back, cannot be made of such pages; unless the user has it on, which vLLM minds by itself.
    """
    if not torch.cuda.is_available():
        yield
        return
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:True,large_segment_size_mb:{PAGE_MIB}")
    try:
        yield
    finally:
        ordinary = "expandable_segments:False,large_segment_size_mb:20"  # torch keeps these two until they are named
        of_user = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        torch._C._accelerator_setAllocatorSettings(f"{ordinary},{of_user}" if of_user else ordinary)


def make_gradients_(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Allocate a gradient of zeros for each trained parameter; it stays zero if no row has a loss.

    Gradients made in the first backward pass would lie in the same memory blocks as the activations of micro-batches.
    The optimizer's state would come to lie beside them, and torch could not give these blocks back.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def begin_phase() -> None:
    """Reset torch's peaks. Call it after the engine has woken, which empties torch's cache and maps the KV cache."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def card_memory(name: str) -> dict[str, float]:
    """{name: the peak of the card's used memory since `begin_phase`, in GiB}.

    It is what the driver reports now, plus what torch has given back since its own peak (under a cap torch frees its
    cache at the limit and tries again); memory outside torch counts as it is now. The figure includes other processes,
    so on a shared card it does not measure this run. torch's own peak would not do: it still counts a sleeping engine's
    KV cache, which the card has back. Empty on a CPU.
    """
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
    return {name: (total - free + given_back) / GIB}


def warn_of_retries() -> None:
    """Warn how often torch ran into the memory limit in this process and had to empty its cache to go on."""
    if times := torch.cuda.memory_stats().get("num_alloc_retries", 0):
        logger.warning(
            "torch gave its cache back %d times to stay within the card or memory.cap_gib, and waited for the card "
            "each time: for speed lower run.micro_batch_tokens, or raise the cap",
            times,
        )


def _available(engine: Engine, cap_gib: float | None) -> int | None:
    """Bytes that the training phase may use; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    engine.sleep()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    return free if cap_gib is None else min(free, int(cap_gib * GIB) - own_bytes(torch.cuda.current_device()))
