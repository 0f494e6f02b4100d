"""The sizes that follow from a model's config.json: of weights, adapter, keys and values, and of what is computed
beside.

In a mixture of experts a token meets the weights of a few of them: `active` counts those, `body` all. Beside the model
itself are counted an FP8 recipe of training (`rounding_work`), a teacher, activations in 4 bits and their calibration,
and whether keys and values can be kept in 8 bits. Pure numbers, no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.base.files import is_path, no_folder
from qerl.checkpoint.experts import FUSED, QKVZ, ModelShapes, fused, shapes_of
from qerl.checkpoint.shards import TensorInfo, read_config, read_tensors, with_own_head
from qerl.formats.nvfp4.ways import padded_rank
from qerl.plan.engine_memory import CONTEXT, KERNELS, MAX_BATCHED_TOKENS, Card, kv_head_bytes

if TYPE_CHECKING:
    from qerl.config.objectives import DistillConfig
    from qerl.config.quant import QatConfig
    from qerl.plan.micro_batch_plan import Footprint


RecipeName = Literal["tensorwise", "blockwise"]


class RoundingWork(NamedTuple):
    """Bytes beyond what training without a recipe takes."""

    token: int  # per token of a micro-batch
    weight: int


def rounding_work(recipe: RecipeName | None, hidden: int, intermediate: int, masters: bool = False) -> RoundingWork:
    """What the recipe takes of a model with these sizes, whose `masters` are trained, or an adapter.

    It follows `qerl.formats.fp8.training` and `qerl.model.products` on a card, in an MLP of I columns and H features.

    blockwise: the peak is in the gradient to the input of gate and up. The gradient of the activation is gone by then,
    whose 2 I bytes per token `Shapes.footprint` counts. Beside the gradients of gate and up and the decoded weight
    there are, per token, the codes of dy (2 I bytes), a float32 scale for each 128 of them, and the product (H numbers
    of 2 bytes); of the weight (2 I x H) codes and their transposed copy, 1 byte each.

    tensorwise: the peak is in the same place, with the codes of dy but no scales per token, and only the transposed
    codes of the weight. With masters dy is rounded for both of its products: 4 I bytes per token of codes, less the 2 I
    of the activation's gradient. The product of a master's gradient (I x H) is counted as float32 beside that, though
    it comes later and is narrower where masters are.
    """
    if recipe is None:
        return RoundingWork(0, 0)
    if recipe == "tensorwise":
        codes, gone, product = 2 * intermediate * (2 if masters else 1), 2 * intermediate, 2 * hidden
        return RoundingWork(codes - gone + product, (4 if masters else 2) * intermediate * hidden)
    weight, product, gone = 2 * intermediate * hidden, 2 * hidden, 2 * intermediate
    rounded = 2 * intermediate + 4 * -(-2 * intermediate // 128)
    return RoundingWork(rounded - gone + product, (1 + 1) * weight)


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _known(*sizes: int, **others: Any) -> dict[str, Any]:
    return {**dict(zip((*SIZES, "vocab_size"), sizes, strict=True)), **others}


QWEN2 = {"max_position_embeddings": 32768}
QWEN3 = {"max_position_embeddings": 40960, "head_dim": 128, "model_type": "qwen3"}
MISTRAL = {"max_position_embeddings": 32768, "head_dim": 128}
SMOL = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
LLAMA3 = {"max_position_embeddings": 131072}
TIED = {"tie_word_embeddings": True}
GEMMA4 = {
    **{"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True},
    **{"final_logit_softcapping": 30.0, "sliding_window": 1024, "max_position_embeddings": 262144, **TIED},
    "hidden_size_per_layer_input": 0,
}
QWEN3_5 = {  # the text part
    **{"model_type": "qwen3_5_text", "head_dim": 256, "full_attention_interval": 4, "max_position_embeddings": 262144},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
A3B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}


KNOWN = {  # by the beginning of the name after the organisation: sizes of models that are not on this disk
    "qwen2.5-0.5b": _known(896, 4864, 24, 14, 2, 151936, **QWEN2, **TIED),
    "qwen2.5-1.5b": _known(1536, 8960, 28, 12, 2, 151936, **QWEN2, **TIED),
    "qwen2.5-3b": _known(2048, 11008, 36, 16, 2, 151936, **QWEN2, **TIED),
    "qwen2.5-7b": _known(3584, 18944, 28, 28, 4, 152064, **QWEN2),
    "qwen2.5-14b": _known(5120, 13824, 48, 40, 8, 152064, **QWEN2),
    "qwen2.5-32b": _known(5120, 27648, 64, 40, 8, 152064, **QWEN2),
    "qwen2.5-72b": _known(8192, 29568, 80, 64, 8, 152064, **QWEN2),
    "qwen2.5-math-1.5b": _known(1536, 8960, 28, 12, 2, 151936, max_position_embeddings=4096, **TIED),
    "qwen2.5-math-7b": _known(3584, 18944, 28, 28, 4, 152064, max_position_embeddings=4096),
    "deepseek-r1-distill-qwen-1.5b": _known(1536, 8960, 28, 12, 2, 151936, max_position_embeddings=131072),
    "qwen3-0.6b": _known(1024, 3072, 28, 16, 8, 151936, **QWEN3, **TIED),
    "qwen3-1.7b": _known(2048, 6144, 28, 16, 8, 151936, **QWEN3, **TIED),
    "qwen3-4b": _known(2560, 9728, 36, 32, 8, 151936, **QWEN3, **TIED),
    "qwen3-8b": _known(4096, 12288, 36, 32, 8, 151936, **QWEN3),
    "qwen3-14b": _known(5120, 17408, 40, 40, 8, 151936, **QWEN3),
    "qwen3-32b": _known(5120, 25600, 64, 64, 8, 151936, **QWEN3),
    "qwen3-30b-a3b": _known(2048, 6144, 48, 32, 4, 151936, **{**QWEN3, "model_type": "qwen3_moe"}, **A3B),
    "qwen3.5-9b": _known(4096, 12288, 32, 16, 4, 248320, **QWEN3_5),
    "qwen3.5-27b": _known(5120, 17408, 64, 24, 4, 248320, **{**QWEN3_5, "linear_num_value_heads": 48}),
    "llama-3.2-1b": _known(2048, 8192, 16, 32, 8, 128256, **LLAMA3, **TIED, head_dim=64),
    "llama-3.2-3b": _known(3072, 8192, 28, 24, 8, 128256, **LLAMA3, **TIED, head_dim=128),
    "llama-3-8b": _known(4096, 14336, 32, 32, 8, 128256, **{**LLAMA3, "max_position_embeddings": 8192}),
    "llama-3-70b": _known(8192, 28672, 80, 64, 8, 128256, **{**LLAMA3, "max_position_embeddings": 8192}),
    "llama-3.1-8b": _known(4096, 14336, 32, 32, 8, 128256, **LLAMA3),
    "llama-3.1-70b": _known(8192, 28672, 80, 64, 8, 128256, **LLAMA3),
    "llama-3.3-70b": _known(8192, 28672, 80, 64, 8, 128256, **LLAMA3),
    "smollm2-135m": _known(576, 1536, 30, 9, 3, 49152, **SMOL),
    "smollm2-360m": _known(960, 2560, 32, 15, 5, 49152, **SMOL),
    "smollm2-1.7b": _known(2048, 8192, 24, 32, 32, 49152, **SMOL),
    "smollm3-3b": _known(2048, 11008, 36, 16, 4, 128256, max_position_embeddings=65536, **TIED),
    "gemma-4-12b": _known(3840, 15360, 48, 16, 8, 262144, **GEMMA4, num_global_key_value_heads=1),
    "gemma-4-31b": _known(5376, 21504, 60, 32, 16, 262144, **GEMMA4, num_global_key_value_heads=4),
    "mistral-7b": _known(4096, 14336, 32, 32, 8, 32768, **MISTRAL),
    "mistral-nemo": _known(5120, 14336, 40, 32, 8, 131072, **{**MISTRAL, "max_position_embeddings": 131072}),
}
SAME_AS = (  # the beginning of a name -> of a known model with the same sizes
    (r"deepseek-r1-distill-qwen-(\d+b)", r"qwen2.5-\1"),
    (r"deepseek-r1-distill-llama-(\d+b)", r"llama-3.1-\1"),
    (r"meta-llama-", "llama-"),
    (r"qwen3\.[68]-27b", "qwen3.5-27b"),
    (r"qwen2\.5-coder-", "qwen2.5-"),
    (r"qwq-32b", "qwen2.5-32b"),
)


@dataclass(frozen=True)
class ModelSizes(ModelShapes):
    """How many weights a model has where, and what follows from that."""

    measured: Mapping[str, float] = field(default_factory=dict)  # bytes per weight of the folder's linears, by format
    named: str | None = None  # the hub id of a model that is known by its name alone

    @property
    def body(self) -> int:
        """Weights of the decoder layers' linears: what is quantized."""
        return self.outside_experts + self.of_experts

    @property
    def active(self) -> int:
        """Those of them that a token is multiplied by."""
        return self.outside_experts + round(self.of_experts * self.decoder.share)

    def met(self, tokens: float) -> float:
        """Those of them that so many tokens are multiplied by between them, if experts are chosen equally often."""
        return self.outside_experts + self.of_experts * self.decoder.share_of(tokens)

    def fused_linears(self) -> list[tuple[str, tuple[int, ...], int]]:
        """What engines multiply by at once, beside experts: the names, the rows of each, and the columns."""
        shapes = {name: shape for name, shape in self.projections.items() if self.shapes_of([name])}
        shapes |= {f"full.{name}": shape for name, shape in self.of_full.items()}
        groups = [(names, [shapes[name] for name in names]) for names in fused(shapes)]
        return [(" + ".join(names), tuple(rows for rows, _ in of), of[0][1]) for names, of in groups]

    @property
    def of_experts(self) -> int:
        """Weights of all experts."""
        decoder = self.decoder
        return len(decoder.sparse) * decoder.experts * 3 * decoder.width * decoder.hidden

    @cached_property  # a plan asks for it hundreds of times
    def outside_experts(self) -> int:
        """Weights of the other linears: of attention of both kinds, and of dense MLPs."""
        return sum(map(math.prod, self.shapes_of(self.projections)))

    @property
    def routers(self) -> int:
        """Weights of the routers, which stay in 16 bits."""
        return len(self.decoder.sparse) * self.decoder.experts * self.decoder.hidden

    @property
    def kept(self) -> int:
        """Weights of the layers that stay in 16 bits: norms, routers, and the small parts of linear attention."""
        of_states = len(self.decoder.linear) * self.states.kept(self.hidden) if self.states else 0
        return self.layers * self.norms * self.hidden + self.routers + of_states

    @property
    def inner(self) -> int:
        """Numbers between gate and down that a token has at most, over the experts that it gets."""
        dense = self.projections["gate_proj"][0] if len(self.decoder.sparse) < self.layers else 0
        return max(dense, self.decoder.chosen * self.decoder.width)

    @property
    def copies(self) -> int:
        """Hidden states that exist of a token while experts run: one for each that it gets, on one side of them."""
        return self.decoder.chosen

    @property
    def decoded(self) -> int:
        """Bytes of what is decoded for a product at most, in 16 bits: gate and up, of an MLP or a layer's experts."""
        experts = self.decoder.experts * self.decoder.width
        return 2 * 2 * self.hidden * max(self.projections["gate_proj"][0], experts)

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    def weights_bytes(self, format: str) -> float:
        """The checkpoint in memory, with its embeddings and head in 16 bits."""
        outer = self.head * (1 if self.tied else 2) + self.kept
        return self.body * self._bytes_per_weight(format) + 2 * outer

    def read_bytes(self, format: str, tokens: float) -> float:
        """Bytes of the checkpoint that a step of `tokens` reads, which may choose the same experts or others."""
        unread = self.body - self.met(tokens)
        return self.weights_bytes(format) - unread * self._bytes_per_weight(format)

    def _bytes_per_weight(self, format: str) -> float:
        return self.measured.get(format, formats.get(format).bytes_per_weight)

    def kv_bytes(self, kv_cache_dtype: str = "auto") -> int:
        """Keys and values of one token, while it is in the window of each layer that has one."""
        windowed = self._layers_with("k_proj") - len(self.decoder.full)
        return 2 * windowed * self.kv_heads * kv_head_bytes(kv_cache_dtype, self.head_dim) + self._full_kv_bytes

    @property
    def _full_kv_bytes(self) -> int:
        """Of it, what layers have whose attention has head sizes of its own; they keep 16 bits, and all tokens."""
        return 2 * len(self.decoder.full) * 2 * math.prod(self.full_heads or (0,))

    def at_once(self, room: int, most: int) -> tuple[int, int]:
        """(how many of `most` sequences have room for their states, what their prefill takes beside the cache); `room`
        are the bytes of a rollout for both.

        vLLM 0.25.1 copies the states of the sequences that a batch begins in one layer, before and after, in float32;
        fla's kernel has more in 16 bits, between chunks of 64 tokens. vLLM's profile run does without.
        """
        if self.states is None:
            return most, 0
        chunk = 2 * self.states.values * self.states.key_dim
        each, chunks = (4 + 1) * chunk, MAX_BATCHED_TOKENS // 64 * chunk
        sequences = max(1, min(most, (room - chunks) // (each + self.cached_tokens(1) * self.kv_bytes())))
        return sequences, chunks + sequences * each

    def seen_tokens(self, tokens: float) -> float:
        """As many tokens of `kv_bytes` as a sequence of so many attends to: layers with a window see its last ones."""
        beyond = 0 if self.window is None else max(0.0, tokens - self.window)
        return tokens - beyond * (1 - self._full_kv_bytes / self.kv_bytes()) if beyond else tokens

    @property
    def state_bytes(self) -> int:
        """Of a sequence's states in all layers with linear attention; 0 without any."""
        return len(self.decoder.linear) * self.states.bytes if self.states else 0

    def cached_tokens(self, tokens: int) -> int:
        """The tokens whose keys and values take as much of vLLM's cache as a sequence of so many does with its states.

        vLLM 0.25.1 divides the cache into blocks of tokens (a multiple of 16) that are as large as one layer's states,
        which take a block each (`Platform.update_block_size_for_backend`). Layers with a window give back what is not
        in it, block by block.
        """
        if self.states is None:
            return tokens if self.window is None else math.ceil(self.seen_tokens(tokens + BLOCK))
        linear, attending = len(self.decoder.linear), max(1, self._layers_with("k_proj"))
        block = BLOCK * -(-self.states.bytes * attending // (BLOCK * self.kv_bytes()))
        return block * -(-tokens // block) + -(-block * linear // attending)

    def adapter(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of a LoRA of `rank` on the projections `targets`; see `expert_adapter` for experts."""
        return rank * sum(map(sum, self.shapes_of(self.decoder.targets(targets))))

    def expert_adapter(self, rank: int, shared: bool) -> int:
        """Parameters of a LoRA of `rank` on all experts; `shared`: A of gate and up and B of down are one for all."""
        decoder = self.decoder
        outer = 2 * decoder.hidden * (1 if shared else decoder.experts)
        return len(decoder.sparse) * rank * (outer + decoder.experts * 3 * decoder.width)

    def engine_adapter_bytes(self, rank: int) -> int:
        """The engine's static buffers: A of the fused parts, and their block-diagonal B with all its zeros."""
        padded = padded_rank(rank)
        numbers = 0
        for parts in (*FUSED, *((QKVZ, ("out_proj",)) if self.states else ())):
            having = [self.decoder.layers_with(leaf) for leaf in parts]
            for layer in having[0]:
                leaves = [leaf for leaf, layers in zip(parts, having, strict=True) if layer in layers]
                shapes = [self.shape_of(f"{layer}.{leaf}") for leaf in leaves]
                numbers += padded * len(shapes) * (sum(rows for rows, _ in shapes) + shapes[0][1])
        return 2 * numbers

    def _layers_with(self, projection: str) -> int:
        return len(self.decoder.layers_with(projection))


def read_sizes(base: str) -> ModelSizes:
    """The sizes of a model folder, of a known model by its hub id, or of the base of a run or an adapter.

    Raises CheckpointError for anything else.
    """
    from qerl.checkpoint.folder import EMBEDDED, format_of
    from qerl.checkpoint.load import local_folder
    from qerl.checkpoint.resolve import model_under

    base = model_under(base)
    name = base.rpartition("/")[2].lower()
    for pattern, same in SAME_AS:
        name = re.sub(f"^{pattern}", same, name)
    known = next((sizes for prefix, sizes in KNOWN.items() if name.startswith(prefix)), None)
    if known is not None and not os.path.isdir(base):
        return replace(sizes_of(known, base), named=base)
    if base not in EMBEDDED and not os.path.isdir(base):
        if is_path(base):
            raise CheckpointError(
                f"{no_folder(base)}: give a folder with its config.json, or a model's name on the hub"
            )
        folder = base.rpartition("/")[2]
        raise CheckpointError(
            f"the sizes of {base} are not known here: fetch them with `hf download {base} config.json --local-dir "
            f"{folder}` and write --model ./{folder}, or give a folder with its config.json"
        )
    folder = Path(local_folder(base))
    config = read_config(folder)
    sizes = sizes_of(config, base)
    if any(folder.glob("*.safetensors")):
        tensors, own = read_tensors(folder), format_of(folder)
        sizes = sizes_of(with_own_head(config, tensors), base)
        if own.quantized:
            sizes = replace(sizes, measured={own.name: _bytes_of_linears(sizes, tensors) / sizes.body})
    return sizes


def _bytes_of_linears(sizes: ModelSizes, tensors: Mapping[str, TensorInfo]) -> int:
    """What the linears of a folder's decoder take, each in the format that it is in."""
    from qerl.checkpoint.load import FLOATS

    linears, total = set(sizes.decoder.linears()), 0
    for name, info in tensors.items():
        if name.rpartition(".")[0] in linears and len(info.shape) == 2:
            total += 2 * math.prod(info.shape) if info.dtype in FLOATS and name.endswith(".weight") else info.nbytes
    return total


def sizes_of(config: Mapping[str, Any], name: str) -> ModelSizes:
    """The sizes that the keys of config.json give; see `shapes_of`."""
    return ModelSizes(**vars(shapes_of(config, name)))


BLOCK = 16  # tokens of vLLM's blocks
CHUNK_TOKENS = 256  # whose logits exist at once where a teacher is compared
CAPPED = 4  # more of them where the student's logits are capped, as in Gemma 4
LOGITS = 34  # bytes per logit of a chunk: eight float32 tensors while a divergence is computed, and the 16-bit slope


@dataclass(frozen=True)
class TeacherWork:
    """Bytes that a training phase takes for the teacher, beside its weights."""

    forward: int  # per token, while it runs: before the policy keeps anything
    hidden: int  # per token, until the loss is computed
    logits: int  # of a chunk, the student's included

    def beside(self, footprint: Footprint) -> Footprint:
        """A policy's footprint with this."""
        return replace(footprint, teacher=self.forward, head=footprint.head + self.hidden, logits=self.logits)


def teacher_sizes(distill: DistillConfig | None, sizes: ModelSizes) -> ModelSizes | None:
    """The sizes of the teacher of a student with `sizes`; None without a teacher. Raises CheckpointError."""
    if distill is None:
        return None
    return sizes if distill.teacher is None else _read(distill.teacher)


def teacher_bytes(distill: DistillConfig | None, sizes: ModelSizes) -> int:
    """The teacher's weights on the card; 0 without one."""
    found = teacher_sizes(distill, sizes)
    return 0 if found is None else int(found.weights_bytes(formats.BF16.name))


def teacher_work(distill: DistillConfig | None, sizes: ModelSizes) -> TeacherWork | None:
    """What its forward pass takes; None without a teacher."""
    found = teacher_sizes(distill, sizes)
    if found is None:
        return None
    shared = max(sizes.vocabulary, found.vocabulary)
    return TeacherWork(
        forward_bytes(found), 2 * 2 * found.hidden, CHUNK_TOKENS * shared * (LOGITS + CAPPED * bool(sizes.decoder.full))
    )


def forward_bytes(sizes: ModelSizes) -> int:
    """Per token of a forward pass that keeps nothing, in 16 bits."""
    # As a layer of the policy while it runs: the MLP's three, and attention's. See `Shapes.footprint`.
    return 2 * (3 * sizes.inner + (8 + sizes.copies) * sizes.hidden)


def teacher_flops(distill: DistillConfig | None, sizes: ModelSizes, tokens: float, predicting: float) -> float:
    """Of a forward pass over `tokens`, and of the logits of `predicting` ones; 0 without a teacher."""
    found = teacher_sizes(distill, sizes)
    return 0.0 if found is None else 2 * found.active * tokens + 2 * found.head * predicting


@cache
def _read(teacher: str) -> ModelSizes:
    from qerl.checkpoint.hub import config_folder, is_hub_id

    try:
        return read_sizes(teacher)
    except CheckpointError:
        if not is_hub_id(teacher):
            raise
    return sizes_of(read_config(config_folder(teacher)), teacher)


ROUNDED = ("q_proj", "o_proj", "gate_proj", "down_proj")  # the linears whose inputs are rounded; others share theirs
LAUNCHES = 17e-6  # seconds that a decoder layer takes to round inputs of few values (benchmarks/qat)
TRAFFIC = 2.8  # times that reading and writing the values takes at the memory's speed (benchmarks/qat)
EAGER = 4e-4  # seconds of a decoder layer whose kernels are launched one by one; an estimate
CALIBRATING = "calibrating"  # the phase
CALIBRATED, CALIBRATION_ROWS = 2048, 512  # tokens of a calibration row at most, and rows at most


def rounds_to_four_bits(qat: QatConfig | None, sizes: ModelSizes) -> bool:
    """Whether the packed linears of a run round their input to 4 bits, by the recipe or by its base."""
    if qat is None:
        return sizes.four_bit_inputs
    quant = qat.quant_cfg
    return quant.activations != "none" and formats.get(quant.weights.format).four_bit_inputs


def rounding_seconds(sizes: ModelSizes, card: Card, tokens: float) -> float:
    """Of a forward pass over `tokens` tokens at once: 2 bytes of each input are read, and 2 written."""
    values = sum(sizes.projections[name][1] for name in ROUNDED)
    return sizes.layers * (LAUNCHES + TRAFFIC * 4 * values * tokens / (card.gb_per_s * 1e9))


def calibrates(qat: QatConfig | None) -> bool:
    """Whether a run computes static scales before its engine opens."""
    return qat is not None and qat.quant_cfg.activations == "static"


def calibrated_tokens(qat: QatConfig, prompt_tokens: int) -> tuple[int, int]:
    """(tokens of a row, rows) at most: of the rows that the recipe names, or of the run's own prompts."""
    asked = qat.quant_cfg.calibration
    return min(CALIBRATED, prompt_tokens) if asked.data is None else CALIBRATED, CALIBRATION_ROWS


def calibration_memory(qat: QatConfig, prompt_tokens: int, sizes: ModelSizes) -> dict[str, float]:
    """What takes the card's memory while the 16-bit model reads calibration rows, in bytes."""
    length, _ = calibrated_tokens(qat, prompt_tokens)
    work = length * forward_bytes(sizes)
    weights = sizes.weights_bytes(formats.BF16.name)
    return {"16-bit model": weights, "context": CONTEXT, "kernels": KERNELS, "its work": work}


def calibration_seconds(qat: QatConfig, prompt_tokens: int, sizes: ModelSizes, rate: float) -> float:
    """Of its forward passes at `rate` operations per second, each of which takes EAGER seconds per layer at least."""
    length, rows = calibrated_tokens(qat, prompt_tokens)
    return rows * max(2 * sizes.body * length / rate, sizes.layers * EAGER)
