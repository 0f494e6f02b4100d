"""The policy on the engine's own model: a LoRA adapter on a frozen base, or masters behind its packed weights.

Masters in float32 do not begin at the 16-bit weights but a random piece nearer to what these were packed to
(`off_ties`), so that the size of a first step is what the learning rate says.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from qerl.base.parallel import ALONE, Parallel
from qerl.base.philox import derive_seed
from qerl.checkpoint.adapter import (
    A_SUFFIX,
    adapter_tensors,
    attach_lora,
    base_linears,
    name_base_,
    set_dtype_,
    start_at_,
)
from qerl.checkpoint.adapter_file import attach_to_experts_, linear_targets
from qerl.checkpoint.base_start import read_start
from qerl.checkpoint.load import local_folder
from qerl.checkpoint.shards import TensorReader, read_tensors
from qerl.config.names import adapts_experts, expert_rank
from qerl.formats.fp8.training import recipe_of
from qerl.formats.linear import PackedLinear
from qerl.model.master import multiply_by_masters_
from qerl.model.norms import block_norms
from qerl.model.products import decoded, set_recipe_
from qerl.plan.trained import masters_dtype, trained_linears, trainee
from training.policy.policy import AdapterPolicy, PackedInPolicy, WeightsPolicy
from training.policy.shards import Shards

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import AdapterConfig, RunConfig
    from qerl.config.train import TrainConfig
    from qerl.engine.interface import Engine
    from qerl.plan.sizes import ModelSizes


FEW_DIGITS = (torch.bfloat16, torch.float16)
# Weights below this share of the matrix's largest stay where they are. A block that has no larger ones may have a scale
# below e4m3's normal numbers, which is rounded so coarsely that a weight can change it by moving towards its packed
# value. In a block that has larger ones they round to zero, far from a tie.
SMALLEST = 1 / 256


def off_ties(weight: torch.Tensor, packed: torch.Tensor, seed: int) -> torch.Tensor:
    """`weight` in float32, on the device of `packed`, moved towards `packed` (float32), the value that it is packed to.

    A 16-bit weight has so few digits that it often lies exactly between two codes, and the largest of a block between
    two block scales. An update then moves it to the other side, however small it is: with the embedded model in
    bfloat16 and any learning rate, 4% of what NVFP4 decodes to changes at once (docs/lab/qat.md).

    A move is uniform between 0 and a quarter of a unit of the weight's last place, by random numbers from `seed` (0 to
    2^63 - 1). So the result rounds to the 16-bit weight, and what is packed first has the same bits. Weights that are
    packed exactly stay, and so do all of a wider dtype than 16 bits. Masters in bfloat16 cannot leave ties, but random
    rounding lets few of them move at a time.
    """
    wide = weight.to(packed.device, torch.float32)
    if weight.dtype not in FEW_DIGITS:
        return wide
    random = torch.Generator(packed.device).manual_seed(seed)
    move = torch.rand(wide.shape, generator=random, device=wide.device, dtype=torch.float32)
    move *= torch.finfo(weight.dtype).eps / 8  # of mantissas from 0.5 to 1, a unit of the last place is eps / 2
    move = torch.ldexp(move, torch.frexp(wide).exponent)
    move *= torch.sign(packed - wide)
    move *= wide.abs() > SMALLEST * wide.abs().max()
    return torch.where(move == 0, wide, move + wide)  # -0.0 + 0.0 would be 0.0, which some formats pack otherwise


logger = logging.getLogger(__name__)


def build_policy(engine: Engine, base: ModelRef, adapter: AdapterConfig, seed: int) -> AdapterPolicy:
    """Attach the recipe's adapter to the engine's own modules: the base weights exist once.

    Where the recipe says so it starts at the start of the base; a frozen start is in the modules already.
    The adapter's master weights are float32, since a bfloat16 A of size 0.02 swallows an AdamW step of 1e-5; on a GPU
    its products run in bfloat16. Its A is drawn from `seed`.
    """
    base_model = engine.policy_model()
    targets = linear_targets(base_model, adapter.targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = attach_lora(base_model, adapter.rank, adapter.alpha, targets, adapter.dropout, adapter.train_norms)
        if adapts_experts(adapter):
            attach_to_experts_(model, adapter.experts, expert_rank(adapter), adapter.alpha / adapter.rank)
    set_dtype_(model, torch.float32)
    name_base_(model, base.base)  # model.base of the recipe may be a run or an adapter
    policy = AdapterPolicy(model)
    trained = sum(parameter.numel() for parameter in policy.parameters())
    logger.info("adapter: rank %d, %.2f M parameters in float32", adapter.rank, trained / 1e6)
    if adapter.start == "trained" and base.start is not None and base.adapter is None:
        start_at_(policy.model, read_start(base.start))
    if base.adapter is not None:
        logger.info("starting from the adapter %s (%d tensors)", base.adapter, policy.load(base.adapter))
    return policy


def build_packed_in_policy(engine: Engine, start: ModelRef, config: RunConfig) -> PackedInPolicy:
    """Attach the recipe's adapter, to be packed into the engine's weights together with those that the run starts from.

    These are read once and kept in their own dtype: on the card if `qat.start_in` says so, else in pinned host memory.
    """
    adapter = build_policy(engine, start, config.adapter, config.run.seed)
    linears = base_linears(adapter.base_model)
    device = next(iter(linears.values())).weight.device
    on_card = device.type == "cuda" and config.qat.start_in != "host"
    names = [name.removesuffix(A_SUFFIX) for name in adapter_tensors(adapter.model) if name.endswith(A_SUFFIX)]
    weights: dict[str, torch.Tensor] = {}
    with TensorReader(read_tensors(local_folder(start.base, config.model.trust_remote_code))) as read:
        for name in names:
            weight = read(f"{name}.weight")
            pinned = device.type == "cuda" and not on_card
            weights[name] = weight.to(device) if on_card else weight.pin_memory() if pinned else weight.clone()
    size = sum(weight.nbytes for weight in weights.values()) / 2**30
    where = f"on {device}" if on_card else "in host memory"
    logger.info(
        "the adapter is packed into %d linears; their 16-bit weights are %s (%.1f GiB)", len(names), where, size
    )
    return PackedInPolicy(adapter.model, weights)


def round_products_(model: PreTrainedModel, train: TrainConfig) -> None:
    """Let the trainer's products be rounded by the recipe's `train.fp8_recipe`, if it has one.

    For a quantized base, only its packed linears count, so that what is kept in 16 bits stays so.
    """
    recipe = recipe_of(train.fp8_recipe, products=train.fp8_products)
    if recipe is None:
        return
    linears = [*base_linears(model).values()]
    packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
    set_recipe_(model, packed or linears, recipe)
    logger.info(
        "training in FP8: %s, %s, gradients in %s, %d linears",
        recipe.name,
        "all products" if recipe.rounds_output else "the backward pass alone",
        str(recipe.gradients).removeprefix("torch.float8_"),
        len(packed or linears),
    )


def build_weights_policy(
    engine: Engine, start: ModelRef, config: RunConfig, sizes: ModelSizes, parallel: Parallel = ALONE
) -> WeightsPolicy:
    """Put masters behind the engine's packed weights, read from the 16-bit model that the run starts from.

    In float32 they begin off the ties of rounding (`off_ties`). Of several ranks each has the masters of its layers.
    """
    qat, model = config.qat, engine.policy_model()
    tensors = read_tensors(local_folder(start.base, config.model.trust_remote_code))
    names = trained_linears(qat, sizes.layers)
    norms = block_norms(model) if qat.train_norms else ()
    trained = trainee(config.adapter, qat, config.model.format, config.optim.name).trained(sizes, parallel.size)
    dtype, work_bytes = masters_dtype(qat), trained.work_bytes
    modules = dict(model.named_modules())
    shards = Shards({name: modules[name] for name in names}, parallel) if parallel.size > 1 else None
    own = [name for name in names if shards is None or shards.mine(name)]

    def weight_of(name: str) -> torch.Tensor:
        weight, linear = read(f"{name}.weight"), modules[name]
        if dtype != "float32" or not isinstance(linear, PackedLinear):
            return weight
        return off_ties(weight, decoded(linear), derive_seed(config.run.seed, 0, f"ties of {name}"))

    with TensorReader(tensors) as read:
        weights = ((name, weight_of(name) if name in own else torch.empty(0)) for name in names)
        policy = WeightsPolicy(model, weights, norms, getattr(torch, dtype), work_bytes, shards)
    if qat.forward == "masters":
        multiply_by_masters_(model)
        logger.info("the trainer multiplies by the masters and the engine by packed weights: see mismatch_kl")
    trained = sum(parameter.numel() for parameter in policy.parameters())
    logger.info("masters: %d linears, %.2f M parameters in %s", len(own), trained / 1e6, dtype)
    return policy
