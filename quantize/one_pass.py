"""Run a model's layers over calibration rows, one at a time, and compute what is written on the way.

`LayeredModel` runs the layers with the weights of several checkpoints. The hidden states of all rows stay, so memory
does not grow with the model's depth. The modules come from config.json and hold no weights;
`torch.func.functional_call` lends them the weights of one checkpoint after another.

`one_pass_groups` quantizes: for each layer, its rows go through it in 16 bits, while the second moment R of each
distinct input is summed; its linears are rounded under R or come from another method; and the factors of W - Q, the
start, are computed under R (`quantize.rounding`). All layers see the 16-bit model's inputs.

Experts are rounded each under its own tokens; one that had none takes the moment of its layer's other experts. The
start leaves experts out: they would need factors of their own, or shared ones that an adapter on experts can hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from qerl.base.errors import CheckpointError
from qerl.checkpoint.activations import scales_of
from qerl.checkpoint.base_start import (
    ABOUT,
    DEFAULT_RANK,
    LORA_A,
    LORA_B,
    START,
    BaseStart,
    base_digest,
    read_start,
    write_start,
)
from qerl.checkpoint.experts import LINEARIZED, Decoder, all_experts
from qerl.checkpoint.load import empty_model
from qerl.checkpoint.shards import DTYPE_BYTES, read_json
from qerl.checkpoint.source import HEADROOM_BITS, Source, finite, weight_for_scales
from qerl.checkpoint.verify import ReadTensor
from qerl.model.logprobs import Head, head_logits
from qerl.model.packed_attention import logit_shape
from quantize.rounding import best_factors, gptq, rate_ratio, roomy_global_scale, round_to, searched_scales

if TYPE_CHECKING:
    from qerl.formats.nvfp4.reference import GlobalScaleKind
    from quantize.calibration import Calibration


Tensors = Mapping[str, torch.Tensor]
Inputs = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
EMBEDDINGS, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class LayeredModel:
    """The modules of a decoder, without weights, and what its layers are called with for rows of one length."""

    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device) -> None:
        self._model = empty_model(source.folder, dtype, source.trust_remote_code).eval()
        self._names = source.decoder.linearized
        if source.decoder.has_experts:
            take_apart_(self._model, source.decoder)
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        self._layers = list(self._model.model.layers)
        self._arguments: list[dict[str, Any]] = []  # of each layer, beside the hidden states

    def embed(self, sequences: Sequence[torch.Tensor], outside: Tensors) -> list[torch.Tensor]:
        """The first layer's inputs (rows, T, hidden), for token ids (rows, T) of one length. `outside` has the tensors
        beside the layers.

        The model's own forward pass computes them and the arguments of each layer, with layers that do nothing. The
        arguments are a single row's, which fit any number of rows.
        """
        found: list[torch.Tensor] = []
        weights = {"embed_tokens.weight": outside[EMBEDDINGS], "norm.weight": outside[NORM]}
        with self._idle_layers(found):
            for ids in (*sequences, sequences[0][:1]):
                self._arguments.clear()
                torch.func.functional_call(self._model.model, weights, (ids,), {"use_cache": False})
        return found[: -len(self._layers) : len(self._layers)]

    @contextmanager
    def _idle_layers(self, found: list[torch.Tensor]) -> Iterator[None]:
        def idle(hidden: torch.Tensor, *_: None, **arguments: Any) -> torch.Tensor:
            found.append(hidden)
            self._arguments.append(arguments)
            return hidden

        try:
            for layer in self._layers:
                layer.forward = idle
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def step(
        self,
        number: int,
        weights: Tensors,
        hidden: list[torch.Tensor],
        see: Callable[[str, torch.Tensor], None] | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        """Replace the hidden states by what layer `number` with `weights` (full names) makes of them.

        `see(module, inputs)` is called with each linear's full name and its inputs (..., in). `inputs` has functions
        that give what a linear multiplies by instead, by full name.
        """
        layer, own, in_files = self._layers[number], {}, {}
        for name, tensor in weights.items():
            module, _, leaf = name.rpartition(".")
            inside = f"{self._names(module)}.{leaf}".removeprefix(f"model.layers.{number}.")
            own[inside], in_files[inside.rpartition(".")[0]] = tensor, module
        linears = {in_files[name]: each for name, each in layer.named_modules() if isinstance(each, nn.Linear)}
        hooks = []
        for name, linear in linears.items():
            if see is not None:
                hooks.append(linear.register_forward_pre_hook(lambda _, x, name=name: see(name, x[0])))
            if name in (inputs or {}):
                hooks.append(linear.register_forward_pre_hook(lambda _, x, name=name: (inputs[name](x[0]),)))
        try:
            for row, states in enumerate(hidden):
                out = torch.func.functional_call(layer, own, (states,), self._arguments[number])
                hidden[row] = out[0] if isinstance(out, tuple) else out
        finally:
            for hook in hooks:
                hook.remove()

    def logits(self, hidden: torch.Tensor, outside: Tensors) -> torch.Tensor:
        """Logits (T, vocabulary) in float32 of final hidden states (T, hidden)."""
        weight, bias = outside.get(HEAD, outside[EMBEDDINGS]), outside.get("lm_head.bias")
        head = Head(weight, bias, *logit_shape(self._model.config))
        normed = torch.func.functional_call(self._model.model.norm, {"weight": outside[NORM]}, (hidden,))
        return head_logits(normed, head).div_(head.temperature)


class LinearExperts(nn.ModuleList):
    """Stands in for the experts module of a layer; its linears are named as `Decoder.linearized` says.

    transformers 5.17 multiplies by two tensors that hold all experts of a layer. llm-compressor's `linearize_moe` takes
    such tensors apart; the modules here are made without weights.
    """

    def __init__(self, decoder: Decoder, act: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__(_expert(decoder, dtype) for _ in range(decoder.experts))
        self._act = act

    def forward(self, hidden_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the chosen experts' outputs for each token; an expert sees only the tokens it is for."""
        total_TD = torch.zeros_like(hidden_TD)
        for number, expert in enumerate(self):
            tokens, place = torch.where(chosen_TK == number)
            if len(tokens):
                x = hidden_TD[tokens]
                out = expert["down_proj"](self._act(expert["gate_proj"](x)) * expert["up_proj"](x))
                total_TD.index_add_(0, tokens, (out * weights_TK[tokens, place, None]).to(total_TD.dtype))
        return total_TD


def take_apart_(model: nn.Module, decoder: Decoder) -> None:
    """Replace the experts of each layer of a decoder that is on the meta device."""
    for layer in decoder.sparse:
        block = model.get_submodule(f"model.layers.{layer}.mlp")
        block.experts = LinearExperts(decoder, block.experts.act_fn, block.experts.down_proj.dtype)


def _expert(decoder: Decoder, dtype: torch.dtype) -> nn.ModuleDict:
    gate, up, down = LINEARIZED
    shapes = {gate: (decoder.hidden, decoder.width), up: (decoder.hidden, decoder.width)}
    shapes[down] = (decoder.width, decoder.hidden)
    return nn.ModuleDict(
        {name: nn.Linear(*shape, bias=False, device="meta", dtype=dtype) for name, shape in shapes.items()}
    )


def streamed_input_scales(
    source: Source, read: ReadTensor, rows: Sequence[Sequence[int]], device: torch.device, advance: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """float32 (1,) by quantized module of `source`, whose tensors `read` gives, on `rows` of token ids.

    Linears that read the same input, as those which engines fuse do, have the same scale. `advance` is called after
    each layer. Raises CheckpointError for inputs that hold inf or NaN, or are zero throughout.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    amax = {name: torch.zeros((), device=device) for name in source.quantized}

    def see(module: str, inputs: torch.Tensor) -> None:
        if module in amax:
            amax[module] = torch.maximum(amax[module], inputs.abs().amax().float())

    def load(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: read(name).to(device, dtype) for name in names}

    before, *layers, after = source.groups()
    with torch.inference_mode():
        model = LayeredModel(source, dtype, device)
        hidden = model.embed([torch.tensor([row], device=device) for row in rows], load(before + after))
        for number, names in enumerate(layers):
            model.step(number, load(names), hidden, see)
            advance()
    return scales_of(amax, HEADROOM_BITS, f"{len(rows)} calibration sequences (--calibration)")


Weights = Mapping[str, torch.Tensor]  # of one group, on the device, by full name
Moments = Mapping[str, torch.Tensor]  # R of the inputs of each set of fused linears, by the set's first module
Write = Callable[[Sequence[str], Weights, Moments], Tensors]  # the tensors of a group that go into the file
BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}  # in a forward pass
RATIO_RANK = 32  # for which the ratio of learning rates is given, as most adapters have it

logger = logging.getLogger(__name__)


class Searched(NamedTuple):
    """What rounding by search is asked for."""

    global_scale: GlobalScaleKind = "amax"
    gptq: bool = False


@dataclass
class Start:
    """The factors of all linears, filled as the pass goes on. On the CPU, BF16, under their names in an adapter."""

    rank: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)

    @cached_property
    def rate_ratio(self) -> float | None:
        """The median over linears of `quantize.rounding.rate_ratio`, at RATIO_RANK or the rank if that is less."""
        ordered = sorted(self.ratios)
        return round(ordered[len(ordered) // 2], 3) if ordered else None

    def add(self, module: str, weight: torch.Tensor, quantized: torch.Tensor, moment: torch.Tensor) -> None:
        """The factors of a linear, from its weights before and after (out, in) and R."""
        factors = best_factors(weight.float() - quantized, moment, self.rank)
        if (ratio := rate_ratio(factors.prefix(RATIO_RANK), moment)) is not None:
            self.ratios.append(ratio)
        self._keep(module, *(factor.to("cpu", torch.bfloat16).contiguous() for factor in factors))

    def add_nothing(self, module: str, shape: Sequence[int]) -> None:
        """Factors of zero, for a linear (out, in) that stays in 16 bits."""
        rows, width = shape
        zeros = (self.rank, width), (rows, self.rank)
        self._keep(module, *(torch.zeros(size, dtype=torch.bfloat16) for size in zeros))

    def _keep(self, module: str, a: torch.Tensor, b: torch.Tensor) -> None:
        self.tensors[module + LORA_A], self.tensors[module + LORA_B] = a, b


def modules_of_start(source: Source) -> list[str]:
    """The linears that a start has factors for: of each kind that is quantized in some layer, all layers' linears."""
    decoder = source.decoder
    own = [module for module in decoder.linears() if decoder.place_of(module) is None]
    kinds = {module.rpartition(".")[2] for module in own if f"{module}.weight" in source.chosen}
    return [module for module in own if module.rpartition(".")[2] in kinds]


def largest_rank(source: Source) -> int:
    """The largest rank that all factors of a start can have: the smallest side of its linears. 0 without linears."""
    return min((min(source.tensors[f"{name}.weight"].shape) for name in modules_of_start(source)), default=0)


def searched(source: Source, how: Searched) -> Write:
    """Round by searched block scales; under the inputs where there are moments, and then by GPTQ if asked."""

    def write(names: Sequence[str], weights: Weights, moments: Moments) -> Tensors:
        sets = {f"{modules[0]}.weight": modules for modules in source.fused_sets()}
        written = {name: finite(name, weights[name]).cpu() for name in names if name not in source.chosen}
        for modules in (sets[name] for name in names if name in sets):
            written |= _pack(modules, weights, moments.get(modules[0]), how)
        return written

    return write


def _pack(modules: Sequence[str], weights: Weights, moment: torch.Tensor | None, how: Searched) -> Tensors:
    """The tensors of fused linears, whose rows are rounded together: they share the global scale and R."""
    dense = [weight_for_scales(f"{module}.weight", weights[f"{module}.weight"]) for module in modules]
    scale = roomy_global_scale(dense, how.global_scale)
    rows = torch.cat(dense)
    scales = searched_scales(rows, scale, None if moment is None else moment.diagonal())
    try:
        packed = gptq(rows, scales, scale, moment) if how.gptq else round_to(rows, scales, scale)
    except torch.linalg.LinAlgError as error:
        raise CheckpointError(
            f"GPTQ cannot use the inputs of {modules[0]} over the calibration rows ({error}): give other rows as "
            "--calibration, or write --method search"
        ) from error
    written: Tensors = {}
    for module, *parts in zip(
        modules, *(tensor.split([len(each) for each in dense]) for tensor in packed[:2]), strict=True
    ):
        tensors = packed._replace(packed=parts[0], block_scale=parts[1]).named()
        written |= {f"{module}.{part}": tensor.to("cpu", copy=True) for part, tensor in tensors.items()}
    return written


def searched_groups(source: Source, read: ReadTensor, device: torch.device, how: Searched) -> Iterator[Tensors]:
    """The tensors to write, on the CPU, one group of `source.groups()` at a time, without calibration rows."""
    write = searched(source, how)
    for names in source.groups():
        yield write(names, _load(read, names, device), {})


def one_pass_groups(
    source: Source,
    read: ReadTensor,
    rows: Sequence[Sequence[int]],
    device: torch.device,
    write: Write,
    start: Start | None = None,
) -> Iterator[Tensors]:
    """The tensors to write, on the CPU, one group of `source.groups()` at a time; `start` is filled on the way.

    `rows` are token ids of one length. `write` gives a group's tensors, such as `searched(...)` or what another method
    has written. Raises CheckpointError for inputs with inf or NaN.
    """
    before, *layers, after = source.groups()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    wanted = modules_of_start(source) if start is not None else []
    sets = source.fused_sets()
    with torch.no_grad():
        outside = _load(read, [*before, *after], device)
        model = LayeredModel(source, dtype, device)
        hidden = model.embed(_batches(rows, device), _cast(outside, dtype))
        written = write(before, outside, {})
    yield written
    for number, names in enumerate(layers):
        with torch.no_grad():
            weights = _load(read, names, device)
            sums = MomentSums([modules for modules in sets if f"{modules[0]}.weight" in weights])
            model.step(number, _cast(weights, dtype), hidden, sums.see)
            moments = sums.moments()
            written = write(names, weights, moments)
            if start is not None:
                _add_to_start(start, source, wanted, weights, written, moments)
            del weights, sums, moments
        yield written
    yield write(after, outside, {})


def _add_to_start(
    start: Start, source: Source, wanted: Sequence[str], weights: Weights, written: Tensors, moments: Moments
) -> None:
    """The factors of a layer's linears."""
    leaders = {module: modules[0] for modules in source.fused_sets() for module in modules}
    for module in (module for module in wanted if f"{module}.weight" in weights):
        weight = weights[f"{module}.weight"]
        if module not in leaders:
            start.add_nothing(module, weight.shape)
            continue
        parts = {part: written[f"{module}.{part}"].to(weight.device) for part in source.format.tensors}
        start.add(module, weight, source.format.dequantize(parts, torch.float32), moments[leaders[module]])


class MomentSums:
    """Sums x'x over the rows, float32 (in, in), for sets of linears that read the same input, by their first module."""

    def __init__(self, sets: Sequence[Sequence[str]]) -> None:
        self._tokens = {modules[0]: 0 for modules in sets}
        self._sums: dict[str, torch.Tensor] = {}

    def see(self, module: str, inputs: torch.Tensor) -> None:
        if module not in self._tokens:
            return
        x = inputs.flatten(0, -2)
        self._tokens[module] += len(x)
        if module not in self._sums:
            self._sums[module] = x.new_zeros((x.shape[1], x.shape[1]), dtype=torch.float32)
        add_products_(self._sums[module], x)

    def moments(self) -> Moments:
        """R, the mean of x'x, of each set. Empties the sums. Raises CheckpointError for inputs with inf or NaN."""
        unseen = [module for module, tokens in self._tokens.items() if not tokens]
        means = {module: self._mean_beside(module) for module in unseen}
        for module in list(self._sums):
            if not self._sums[module].diagonal().isfinite().all():
                raise CheckpointError(
                    f"the inputs of {module} hold NaN or infinity over the calibration rows: check the 16-bit model "
                    "and the rows, or write --calibration none, which looks at no inputs"
                )
            means[module] = self._sums.pop(module).div_(self._tokens[module])
        return means

    def _mean_beside(self, module: str) -> torch.Tensor:
        """The moment of an expert that no token was for: the mean over the tokens of its layer's other experts."""
        kind = all_experts(module)
        beside = [name for name in self._sums if all_experts(name) == kind]
        if kind == module or not beside:
            raise CheckpointError(
                f"no calibration token reached {module}: give other rows as --calibration, or write --calibration none"
            )
        logger.debug("no calibration token reached %s: it is rounded under the inputs of the others", module)
        return sum(self._sums[name] for name in beside) / sum(self._tokens[name] for name in beside)


def add_products_(sums: torch.Tensor, x: torch.Tensor) -> None:
    """Add x'x to `sums`, float32 (in, in), for inputs (tokens, in) in float32 or bfloat16."""
    if x.dtype == torch.float32:
        sums.addmm_(x.T, x)
    elif x.is_cuda:
        sums += torch.mm(x.T, x, out_dtype=torch.float32)  # products of 16 bits are exact in float32
    else:
        sums.addmm_(x.T.float(), x.float())


def _load(read: ReadTensor, names: Sequence[str], device: torch.device) -> Weights:
    return {name: finite(name, read(name).to(device)) for name in names}


def _cast(weights: Weights, dtype: torch.dtype) -> Weights:
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def _batches(rows: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Token ids (rows, T), as many rows at a time as go through a layer at once."""
    at_once = max(1, BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"]) // len(rows[0]))
    return [torch.tensor(rows[first : first + at_once], device=device) for first in range(0, len(rows), at_once)]


def save_start(
    base: Path, source: Source, start: Start, rows: Calibration, folder: Path | None = None
) -> dict[str, Any]:
    """Write the start of `base`, which holds the verified weights, into `folder` (default: start/ in it).

    Returns the entry of quantize_report.json. Raises CheckpointError if it cannot be read back.
    """
    folder = folder or base / START
    folder.mkdir(exist_ok=True)
    about = {"rate_ratio": start.rate_ratio}
    write_start(
        folder,
        start.tensors,
        {"source": source.name, "base_digest": base_digest(base), **about, "calibration": rows.summary()},
    )
    return {"rank": start.rank, **about}


def start_bytes(source: Source, rank: int) -> int:
    return sum(
        DTYPE_BYTES["BF16"] * rank * sum(source.tensors[f"{name}.weight"].shape) for name in modules_of_start(source)
    )


def read_factors(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A (rank, in) and B (out, rank) by module, of as many components as runs use; empty without a start."""
    if not (folder / ABOUT).is_file():
        return {}
    rank = read_json(folder / ABOUT)["rank"]
    tensors = read_start(BaseStart(folder, min(rank, DEFAULT_RANK)))
    modules = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    return {module: (tensors[module + LORA_A], tensors[module + LORA_B]) for module in modules}
