"""Policies of a run through the quantizer: masters behind the engine's packed weights, or an adapter packed into them.

Masters in float32 do not begin at the 16-bit weights but a random piece nearer to what these were packed to
(`off_ties`), so that the size of a first step is what the learning rate says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qerl.base.errors import CheckpointError
from qerl.base.parallel import ALONE, Parallel
from qerl.base.philox import derive_seed
from qerl.checkpoint.adapter import (
    A_SUFFIX,
    B_SUFFIX,
    adapter_scaling,
    adapter_tensors,
    base_linears,
    pack_in_,
    reference_adapter,
    reference_tensors,
)
from qerl.checkpoint.folder import WEIGHTS
from qerl.checkpoint.load import local_folder
from qerl.checkpoint.output import write_weights
from qerl.checkpoint.shards import TensorReader, read_tensors
from qerl.checkpoint.source import by_layer
from qerl.engine.update import WeightsUpdate, pack_weights_
from qerl.formats.base import TensorSpec
from qerl.formats.linear import PackedLinear
from qerl.model.master import LowRankSum, multiply_by_masters_, set_master_
from qerl.model.norms import block_norms
from qerl.model.products import decoded
from qerl.plan.trained import masters_dtype, trained_linears, trainee
from training.policy.policy import AdapterPolicy, build_policy
from training.policy.shards import Shards

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import RunConfig
    from qerl.engine.interface import Engine
    from qerl.plan.sizes import ModelSizes

DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16"}  # of masters, as safetensors names them

logger = logging.getLogger(__name__)


class WeightsPolicy:
    """Whole weights: masters of linears and norms. A sync packs the linears' masters; norms act as they are.

    A linear's master gets the gradient of its packed weight (`qerl.model.master`). Of several ranks each has the
    masters of some layers (`shards`) and an empty parameter for every other one; all have the norms.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Iterable[tuple[str, torch.Tensor]],
        norms: Iterable[str] = (),
        dtype: torch.dtype | None = None,
        trained_bytes: float = 12.0,
        shards: Shards | None = None,
    ) -> None:
        """`weights` (out, in) by module name are where training starts; they are copied, to `dtype` (float32 if None).
        Those of other ranks may be empty. `norms` are trained from their present weights, in float32."""
        self.model = self.base_model = model
        self.trained_bytes, self.shards = trained_bytes, shards
        modules = dict(model.named_modules())
        self._weights = {name: _set_linear_(modules[name], weight, dtype) for name, weight in weights}
        self._norms = {name: _set_norm_(modules[name]) for name in norms}
        if shards is not None:
            shards.receive_gradients_(self._weights)

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter([*self._own().values(), *self._norms.values()])

    def replicas(self) -> Iterator[nn.Parameter]:
        return self.parameters() if self.shards is None else iter(self._norms.values())

    def update(self) -> WeightsUpdate:
        return WeightsUpdate(self._own(), self._norms)

    def save(self, folder: Path) -> None:
        """Of several ranks the first writes, while the others `shards.serve` what `answer` finds."""
        (Path(folder) / WEIGHTS).mkdir()
        names = [f"{name}.weight" for name in (*self._weights, *self._norms)]
        write_weights(Path(folder) / WEIGHTS, ({name: self._read(name) for name in names} for names in by_layer(names)))

    def answer(self, name: str) -> dict[str, torch.Tensor] | None:
        """What this rank has of a checkpoint's tensor."""
        tensor = self._named().get(name)
        return None if tensor is None else {name: tensor}

    def load(self, folder: Path) -> int:
        place, own = Path(folder) / WEIGHTS, self._named()
        saved = read_tensors(place)
        specs = {name: TensorSpec(DTYPES[str(tensor.dtype)], tuple(tensor.shape)) for name, tensor in own.items()}
        specs |= {
            f"{name}.weight": TensorSpec(DTYPES[str(master.dtype)], self.shards.shape(name))
            for name, master in self._weights.items()
            if f"{name}.weight" not in specs
        }
        found = {name: TensorSpec(info.dtype, info.shape) for name, info in saved.items()}
        if wrong := sorted(name for name in {*specs, *found} if specs.get(name) != found.get(name)):
            raise CheckpointError(f"{place} does not fit what is trained: {wrong[:4]} are of another kind or missing")
        with TensorReader(saved) as read, torch.no_grad():
            for name, master in own.items():
                master.copy_(read(name))
        return len(own)

    def reference(self) -> None:
        """The masters are the only copy."""

    def _own(self) -> dict[str, nn.Parameter]:
        """The masters of linears that this rank has."""
        return {n: master for n, master in self._weights.items() if self.shards is None or self.shards.mine(n)}

    def _named(self) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": master.detach() for name, master in {**self._own(), **self._norms}.items()}

    def _read(self, name: str) -> torch.Tensor:
        """A checkpoint's tensor on the CPU, from the rank that has it."""
        own = self._named().get(name)
        return self.shards.ask(name, self.answer)[name] if own is None else own.cpu()


def _set_linear_(linear: nn.Linear, weight: torch.Tensor, dtype: torch.dtype | None) -> nn.Parameter:
    device = linear.weight_device if isinstance(linear, PackedLinear) else linear.weight.device
    return set_master_(linear, weight.detach().to(device, dtype or torch.float32, copy=True))


def _set_norm_(norm: nn.Module) -> nn.Parameter:
    norm.weight = torch.nn.Parameter(norm.weight.detach().to(torch.float32, copy=True))
    return norm.weight


class PackedInPolicy(AdapterPolicy):
    """A LoRA adapter that is trained through the quantizer: each sync packs Q(W0 + s B A) into the engine's weights.

    W0 are the 16-bit weights that the run started from, which never change; from packed ones an update of less than
    half a step between two codes would vanish. Engine and trainer multiply by the packed weights alone, and A and B
    receive the gradients of the packed weight as if rounding were the identity (`qerl.model.lora`).
    """

    def __init__(self, model: PeftModel, start: Mapping[str, torch.Tensor]) -> None:
        """`start` has W0 (out, in) of each adapted linear by its module name, on the card or in host memory."""
        super().__init__(model)
        self._start = start
        pack_in_(model)

    def update(self) -> WeightsUpdate:
        """The sums, which are computed while they are packed, and trained norms."""
        tensors = adapter_tensors(self.model)
        norms = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if ".lora_" not in name}
        return WeightsUpdate(self._sums(tensors), norms)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within it the weights are packed anew, with the adapter that the run began with or, if it was new, without.

        Afterwards they have the same bits as before, since packing depends on nothing else. The engine, which reads
        the same tensors, has to wait.
        """
        self._pack_(reference_tensors(self.model))
        try:
            with reference_adapter(self.model):
                yield
        finally:
            self._pack_(adapter_tensors(self.model))

    def _sums(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, LowRankSum]:
        scaling = adapter_scaling(self.model)
        return {
            name: LowRankSum(start, tensors[name + A_SUFFIX], tensors[name + B_SUFFIX], scaling)
            for name, start in self._start.items()
        }

    def _pack_(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pack_weights_(self._sums(tensors), base_linears(self.base_model))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a product may read its weight before the launch ahead of it has ended


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


def build_weights_policy(
    engine: Engine, start: ModelRef, config: RunConfig, sizes: ModelSizes, parallel: Parallel = ALONE
) -> WeightsPolicy:
    """Put masters behind the engine's packed weights, read from the 16-bit model that the run starts from.

    In float32 they begin off the ties of rounding (`off_ties`). Of several ranks each has the masters of its layers.
    """
    qat, model = config.qat, engine.policy_model()
    tensors = read_tensors(local_folder(start.base, config.model.trust_remote_code))
    names = trained_linears(qat, sizes.decoder)
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
