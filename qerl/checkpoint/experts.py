"""What a model consists of, from its config.json: the linears of each layer, and a router with experts in some of them.

Linears that read the same input (`FUSED`) are multiplied by at once in engines, and share a scale.

    model.layers.3.mlp.gate.weight                       the router, (experts, hidden); it always stays in 16 bits
    model.layers.3.mlp.experts.17.gate_proj.weight       an expert's linears: gate, up and down

Those are the names in files. In memory transformers 5.17 holds the experts of a layer in two tensors,
`mlp.experts.gate_up_proj` (experts, 2 x width, hidden), gate above up, and `mlp.experts.down_proj` (experts, hidden,
width); `Decoder.place_of` says which part of them a file's linear is. Another family with this structure is one more
row in FAMILIES.

Layers with linear attention (Gated DeltaNet, arXiv 2412.06464), three of four in Qwen3.5, have `linear_attn` in place
of `self_attn`. In Gemma 4 the layers with full attention have head sizes of their own, and may lack `v_proj`: their
values are the keys, normed otherwise. This module imports no torch.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.config.names import OF_EXPERTS, OF_STATES, PROJECTIONS

# llm-compressor gives those that are fused the same global scale (llmcompressor 0.14, observers/helpers.py,
# FUSED_LAYER_NAMES; its MLA and MoE groups are left out here).
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSED = (QKV, ("o_proj",), GATE_UP, ("down_proj",))
QKVZ = OF_STATES[:2]  # engines multiply by them at once; llm-compressor does not know that
W1_W3 = ("w1", "w3")  # what Mixtral calls gate and up
ATTENTION = tuple(f"self_attn.{name}" for name in (*QKV, "o_proj"))
LINEAR_ATTENTION = tuple(f"linear_attn.{name}" for name in OF_STATES)
KEPT_PAIR = ("in_proj_b", "in_proj_a")  # in the order of engines, which multiply by them at once
KEPT = tuple(f"linear_attn.{name}" for name in ("conv1d", "in_proj_a", "in_proj_b"))  # small, and always in 16 bits
DECAYS = (".A_log", ".dt_bias")  # how fast states decay, which stays as wide as the file has it
DENSE_MLP = tuple(f"mlp.{name}" for name in (*GATE_UP, "down_proj"))
HEAD_NORMED = ("qwen3", "gemma3", "gemma4", "olmo2", "olmo3", "olmoe")  # the beginning of model_type in config.json
FOUR_NORMS = ("gemma2", "gemma3", "gemma4")  # in each layer; the others have two
MOST = {  # bounds far beyond every published model: a larger number would only fill memory with an empty model
    "num_hidden_layers": 1000,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "vocab_size": 2**24,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**13,
    "global_head_dim": 2**13,
    "num_global_key_value_heads": 2**12,
    "linear_num_key_heads": 2**12,
    "linear_num_value_heads": 2**12,
    "linear_key_head_dim": 2**13,
    "linear_value_head_dim": 2**13,
    "linear_conv_kernel_dim": 2**8,
    "max_position_embeddings": 2**31,
    "sliding_window": 2**31,
}
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def matching(linears: Sequence[str], patterns: Iterable[str], option: str) -> list[str]:
    """The linears that a pattern names. As in llm-compressor it is a name, or `re:` and a regex for the name's start.

    Raises ConfigError, which names `option`, for a bad regex or one that matches nothing. It may name `lm_head`.
    """
    kept: set[str] = set()
    for pattern in patterns:
        try:
            regex = re.compile(pattern[3:] if pattern.startswith("re:") else re.escape(pattern) + r"\Z")
            found = set(filter(regex.match, (*linears, "lm_head")))
        except re.error as error:
            raise ConfigError(f"{option} {pattern!r} is not a regular expression ({error}): correct it") from error
        if not found:
            raise ConfigError(
                f"{option} {pattern!r} matches no layer: write a full name such as {linears[0]}, or a regex from the "
                "start of the name such as 're:.*self_attn.*'"
            )
        kept |= found
    return [module for module in linears if module in kept]


def fused(linears: Iterable[str]) -> list[tuple[str, ...]]:
    """The linears (module names) in groups that engines fuse into one matrix; each is in one group.

    Gate and up of one expert are such a group; different experts may differ.
    """
    leaders = {name: group[0] for group in (*FUSED, QKVZ, W1_W3) for name in group}
    groups: dict[tuple[str, str], list[str]] = {}
    for module in linears:
        parent, _, leaf = module.rpartition(".")
        groups.setdefault((parent, leaders.get(leaf, leaf)), []).append(module)
    return [tuple(modules) for modules in groups.values()]


FUSED_GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"  # in memory, for every family
LINEARIZED = ("gate_proj", "up_proj", "down_proj")
COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
SHARED_KEYS = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size", "moe_num_shared_experts")
MOST_EXPERTS = {"experts": 2**12, "chosen": 2**8, "width": 2**20}  # bounds beyond every published model


@dataclass(frozen=True)
class Family:
    """The names of a family of models with experts. `gate`, `up` and `down` are an expert's three linears."""

    title: str
    block: str  # what stands in a layer in place of an MLP, in files
    gate: str
    up: str
    down: str
    width_key: str  # of config.json: rows of an expert's gate
    normalises: bool | None  # whether the weights of the chosen experts are made to sum to 1; None: norm_topk_prob says

    @property
    def leaves(self) -> tuple[str, str, str]:
        return self.gate, self.up, self.down


FAMILIES = {  # by model_type
    "qwen3_moe": Family("Qwen3-MoE", "mlp", "gate_proj", "up_proj", "down_proj", "moe_intermediate_size", None),
    "olmoe": Family("OLMoE", "mlp", "gate_proj", "up_proj", "down_proj", "intermediate_size", None),
    "mixtral": Family("Mixtral", "block_sparse_moe", "w1", "w3", "w2", "intermediate_size", True),
}
TITLES = ", ".join(family.title for family in FAMILIES.values())


class Expert(NamedTuple):
    """The full module names of one expert's linears in files. Gate and up have to share a global scale."""

    gate: str
    up: str
    down: str


class Place(NamedTuple):
    """Where a linear of a file is in memory: rows from `first_row` on of `tensor`[expert]."""

    tensor: str  # full name
    expert: int
    first_row: int


@dataclass(frozen=True)
class Decoder:
    """The linears of a decoder's layers. Without experts `family` is None, and the four numbers are 0."""

    layers: int
    family: Family | None = None
    experts: int = 0  # in a layer that has some
    chosen: int = 0  # experts that the router takes for each token
    width: int = 0  # rows of an expert's gate
    hidden: int = 0
    sparse: tuple[int, ...] = ()  # the layers with experts; the others have a dense MLP
    normalises: bool = False  # whether the weights of the chosen experts sum to 1
    linear: tuple[int, ...] = ()  # the layers with linear attention; the others have attention
    full: tuple[int, ...] = ()  # the layers whose attention has other head sizes than the rest (Gemma 4)
    keys_are_values: bool = False  # whether those have no v_proj

    @property
    def has_experts(self) -> bool:
        return bool(self.sparse)

    @property
    def share(self) -> float:
        """Of a layer's experts that a token gets; 0 without experts."""
        return self.chosen / self.experts if self.experts else 0.0

    def share_of(self, tokens: float) -> float:
        """Of a layer's experts that so many tokens get between them, if all are chosen equally often."""
        return 1 - (1 - self.share) ** tokens

    @property
    def choice_bytes(self) -> int:
        """Of the experts that a token gets in all layers, a byte for each; 0 without experts."""
        return len(self.sparse) * self.chosen

    def linears(self) -> list[str]:
        """The full module names of all linears that may be quantized, in order: `kept` ones are not among them."""
        return [name for layer in range(self.layers) for name in self.linears_of(layer)]

    def linears_of(self, layer: int) -> list[str]:
        attention = [f"model.layers.{layer}.{part}" for part in self._attention_of(layer)]
        if layer not in self.sparse:
            return attention + [f"model.layers.{layer}.{part}" for part in DENSE_MLP]
        return attention + [name for expert in self.experts_of(layer) for name in expert]

    def _attention_of(self, layer: int) -> tuple[str, ...]:
        if layer in self.linear:
            return LINEAR_ATTENTION
        return tuple(part for part in ATTENTION if not (self.keys_are_values and layer in self.full and "v_" in part))

    def experts_of(self, layer: int) -> list[Expert]:
        """The experts of a layer, in order; none of a layer with a dense MLP."""
        if layer not in self.sparse:
            return []
        inside = f"model.layers.{layer}.{self.family.block}.experts"
        return [Expert(*(f"{inside}.{n}.{leaf}" for leaf in self.family.leaves)) for n in range(self.experts)]

    def layers_with(self, leaf: str) -> set[int]:
        """The layers that have a linear, not an expert's, with this last part of its name; all for any other module."""
        every = range(self.layers)
        if leaf in OF_EXPERTS:
            return set(every) - set(self.sparse)
        if leaf not in (*PROJECTIONS, *OF_STATES):
            return set(every)
        return {layer for layer in every if any(part.endswith(f".{leaf}") for part in self._attention_of(layer))}

    def targets(self, targets: Sequence[str]) -> tuple[str, ...]:
        """The linears that `adapter.targets` names: all seven stand for all linears, those of linear attention too."""
        more = OF_STATES if self.linear and set(PROJECTIONS) <= set(targets) else ()
        return tuple(dict.fromkeys([*targets, *more]))

    def kept(self) -> list[str]:
        """The full names of the modules that stay in 16 bits, in order: routers (experts, hidden), and KEPT."""
        router = (f"{self.family.block}.gate",) if self.family else ()
        return [
            f"model.layers.{layer}.{part}"
            for layer in range(self.layers)
            for part in (KEPT if layer in self.linear else router if layer in self.sparse else ())
        ]

    def shape_of(self, leaf: str) -> tuple[int, int]:
        """(out, in) of an expert's linear with this last part of its name."""
        return (self.hidden, self.width) if leaf == self.family.down else (self.width, self.hidden)

    def shape_in_memory(self, tensor: str) -> tuple[int, int, int] | None:
        """Of `FUSED_GATE_UP` or `DOWN`, (experts, out, in); None without experts."""
        shapes = {
            FUSED_GATE_UP: (self.experts, 2 * self.width, self.hidden),
            DOWN: (self.experts, self.hidden, self.width),
        }
        return shapes.get(tensor) if self.has_experts else None

    def place_of(self, module: str) -> Place | None:
        """Where in memory the expert's linear with this name in files is; None for a module that is not an expert's."""
        found = self.family and _EXPERT.fullmatch(module)
        if not found or int(found["layer"]) not in self.sparse or found["leaf"] not in self.family.leaves:
            return None
        tensor = DOWN if found["leaf"] == self.family.down else FUSED_GATE_UP
        first_row = self.width if found["leaf"] == self.family.up else 0
        return Place(f"model.layers.{found['layer']}.{tensor}", int(found["expert"]), first_row)

    def linearized(self, module: str) -> str:
        """The name in memory of a file's module, where each expert has three linears of its own in place of a layer's
        two tensors: as llm-compressor's `linearize_moe` names them."""
        if self.family is None or ".experts." not in module:
            return self.in_memory(module)
        parent, _, leaf = self.in_memory(module).rpartition(".")
        return f"{parent}.{LINEARIZED[self.family.leaves.index(leaf)]}"

    def in_memory(self, name: str) -> str:
        """The name in memory of a tensor or a module that is not an expert's, by its name in files."""
        return name.replace(f".{self.family.block}.", ".mlp.", 1) if self.family else name


_NUMBER = re.compile(r"\.experts\.\d+\.")
_EXPERT = re.compile(r"model\.layers\.(?P<layer>\d+)\.\w+\.experts\.(?P<expert>\d+)\.(?P<leaf>\w+)")


def all_experts(module: str) -> str:
    """What reports call the linears of all experts of a layer together; else the module's own name."""
    return _NUMBER.sub(".experts.*.", module)


def decoder_of(config: Mapping[str, Any], name: str) -> Decoder:
    """The decoder that a config.json describes, whose sizes `check_numbers` takes; `name` is what messages call it.

    Raises CheckpointError for experts of a family that is not in FAMILIES, and for numbers that cannot be.
    """
    layers, kind = config.get("num_hidden_layers"), config.get("model_type")
    if kind in HYBRIDS:
        return Decoder(layers, linear=_linear_layers(config, name))
    if kind in GEMMA4:
        return Decoder(layers, full=_full_layers(config, name), keys_are_values=bool(config.get("attention_k_eq_v")))
    family, counted = _family_of(config, name)
    if family is None:
        return Decoder(layers)
    values = {
        "experts": (counted, config[counted]),
        "chosen": ("num_experts_per_tok", config.get("num_experts_per_tok")),
        "width": (family.width_key, config.get(family.width_key)),
    }
    for what, (key, value) in values.items():
        if type(value) is not int or not 1 <= value <= MOST_EXPERTS[what]:
            raise _odd(name, key, value)
    experts, chosen, width = (value for _, value in values.values())
    if chosen > experts:
        raise _odd(name, "num_experts_per_tok", chosen)
    normalises = bool(config.get("norm_topk_prob")) if family.normalises is None else family.normalises
    sparse = _sparse_layers(config, name)
    return Decoder(layers, family, experts, chosen, width, config.get("hidden_size"), sparse, normalises)


def _family_of(config: Mapping[str, Any], name: str) -> tuple[Family | None, str]:
    """The family of a mixture of experts, and the key with their number; (None, "") for a dense model."""
    counted = next((key for key in COUNT_KEYS if config.get(key)), None)
    if counted is None:
        return None, ""
    kind, shared = str(config.get("model_type")), next((key for key in SHARED_KEYS if config.get(key)), None)
    if shared or kind not in FAMILIES:
        raise CheckpointError(
            f"{name} is a mixture of experts of a family that qerl does not support yet ({kind}, {shared or counted}: "
            f"{config[shared or counted]}); it supports {TITLES}: give a model of one of these, or a dense one"
        )
    return FAMILIES[kind], counted


def _sparse_layers(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The layers with experts: every `decoder_sparse_step`-th one that is not in `mlp_only_layers`."""
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise _odd(name, "mlp_only_layers", dense)
    if type(step) is not int or step < 1:
        raise _odd(name, "decoder_sparse_step", step)
    return tuple(n for n in range(config["num_hidden_layers"]) if n not in dense and (n + 1) % step == 0)


HYBRIDS = ("qwen3_5_text",)  # model_type of those with linear attention in some layers


def _linear_layers(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The layers with linear attention, by `layer_types`, or else all but every `full_attention_interval`-th."""
    layers, kinds, every = config["num_hidden_layers"], config.get("layer_types"), config.get("full_attention_interval")
    if kinds is None:
        if every is not None and (type(every) is not int or every < 1):
            raise _odd(name, "full_attention_interval", every)
        return tuple(n for n in range(layers) if (n + 1) % (every or 4))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise _odd(name, "layer_types", kinds)
    return tuple(n for n, kind in enumerate(kinds) if kind == LINEAR)


GEMMA4 = ("gemma4_text", "gemma4_unified_text")  # model_type of those whose full attention has its own head sizes
PER_LAYER = "per_layer_config"  # where transformers 5.17 writes them, by the number of each such layer


def _full_layers(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The layers with full attention, by `layer_types` or else every sixth, and the last in any case."""
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    kinds = [FULL if (n + 1) % 6 == 0 else "" for n in range(layers)] if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise _odd(name, "layer_types", kinds)
    return tuple(n for n, kind in enumerate(kinds) if kind == FULL or n == layers - 1)


def _full_heads(config: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """(heads of keys and values, their size) in the layers with full attention of Gemma 4; None for other families."""
    if config.get("model_type") not in GEMMA4:
        return None
    kv_heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    own = {"num_key_value_heads": kv_heads, "head_dim": config.get("global_head_dim") or 512}
    if (written := config.get(PER_LAYER)) is not None:
        full = {str(layer) for layer in _full_layers(config, name)}
        own_layers = isinstance(written, dict) and {str(key).lstrip("0") or "0" for key in written} == full
        each = list(written.values()) if own_layers else [None]
        if not isinstance(each[0], dict) or each[0].keys() - own.keys() or any(one != each[0] for one in each):
            raise _odd(name, PER_LAYER, written)
        own = {"num_key_value_heads": None, "head_dim": config.get("head_dim") or 256, **each[0]}
        check_numbers(own, name)
    kv_heads = own["num_key_value_heads"] or config.get("num_key_value_heads") or config["num_attention_heads"]
    return kv_heads, own["head_dim"]


def _odd(name: str, key: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{name}: config.json has {key} {value!r:.60}, which cannot be: copy the file from the original model"
    )


class StateShapes(NamedTuple):
    """The sizes of linear attention: a state of (key_dim, value_dim) for each value head, and a causal convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def mixed(self) -> int:
        """Channels of q, k and v, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def bytes(self) -> int:
        """Of a sequence's state in one layer, in float32, and of the inputs that the convolution goes on with."""
        return 4 * self.values * self.key_dim + 2 * self.mixed * (self.taps - 1)

    def kept(self, hidden: int) -> int:
        """Numbers of a layer that stay in 16 bits: convolution, a, b, A_log, dt_bias and norm."""
        return self.taps * self.mixed + 2 * self.value_heads * (hidden + 1) + self.value_dim


@dataclass(frozen=True)
class ModelShapes:
    """What a model consists of, according to its config.json."""

    layers: int
    hidden: int
    projections: dict[str, tuple[int, int]]  # the linears of decoder layers with a dense MLP: name -> (out, in)
    vocabulary: int
    tied: bool
    kv_heads: int
    head_dim: int
    positions: int | None = None  # the longest context; None if config.json does not say
    head_norms: bool = False  # whether queries and keys have norms of their own
    four_bit_inputs: bool = False  # packed linears round their input to 4 bits
    decoder: Decoder = field(default_factory=lambda: Decoder(0))  # which layers have experts
    states: StateShapes | None = None  # of the layers with linear attention
    norms: int = 2  # of each layer, with a number per feature
    full_heads: tuple[int, int] | None = None  # of keys and values in `decoder.full`: how many, and their size
    of_full: dict[str, tuple[int, int]] = field(default_factory=dict)  # linears that have other shapes there
    window: int | None = None  # tokens that each of the other layers attends to at most, in Gemma 4
    windowed: bool = False  # whether some layers attend to a window alone, in any family

    def shape_of(self, linear: str) -> tuple[int, int] | None:
        """(out, in) of a linear, by its full name, that is not an expert's; None if the model has none of that name."""
        parts = linear.split(".")
        own = self.decoder.full  # of most models empty
        full = bool(own) and any(part.isdigit() and int(part) in own for part in parts)
        return (self.of_full if full else {}).get(parts[-1], self.projections.get(parts[-1]))

    def shapes_of(self, leaves: Iterable[str]) -> list[tuple[int, int]]:
        """(out, in) of all linears with these last parts of their names, beside experts."""
        layers = ((layer, leaf) for leaf in leaves for layer in self.decoder.layers_with(leaf))
        return [self.shape_of(f"{layer}.{leaf}") for layer, leaf in layers]


LINEAR, FULL = "linear_attention", "full_attention"
ATTENTIONS = (FULL, "sliding_attention")  # kinds of layers that have keys and values for each token
STATE_KEYS = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
UNLIKE = (  # keys that make a decoder another one than we compute and plan, where they hold anything
    *("attn_logit_softcapping", "final_logit_softcapping", "linear_num_key_heads", "kv_lora_rank"),
    *("hidden_size_per_layer_input", "global_head_dim", PER_LAYER, "num_kv_shared_layers", "enable_moe_block"),
)
COMPUTED = {  # what of these, and which kinds of layers, we compute in a family
    **dict.fromkeys(HYBRIDS, (STATE_KEYS, (FULL, LINEAR))),
    **dict.fromkeys(GEMMA4, (("final_logit_softcapping", "global_head_dim", PER_LAYER), ATTENTIONS)),
}


LEFT_OUT = {  # key that config.json leaves out -> model_type -> what transformers 5.17 takes, where `shapes_of` differs
    "head_dim": {
        **dict.fromkeys(("qwen3", "ministral3", "seed_oss", "ernie4_5"), 128),
        **dict.fromkeys((*HYBRIDS, "gemma3_text", *GEMMA4), 256),
    },
    "num_key_value_heads": {
        **dict.fromkeys(("qwen2", "qwen3", "exaone4"), 32),
        **dict.fromkeys(("mistral", "mixtral", "ministral3", "seed_oss"), 8),
        **dict.fromkeys(("qwen3_moe", "smollm3", *HYBRIDS, "gemma3_text", *GEMMA4), 4),
        "ernie4_5": 2,
    },
    "tie_word_embeddings": dict.fromkeys(("smollm3", "ernie4_5", "gemma3_text", *GEMMA4), True),
    "hidden_size_per_layer_input": {"gemma4_text": 256},
    "sliding_window": {
        **dict.fromkeys(("mistral", "gemma3_text", "olmo3", "exaone4"), 4096),
        "gemma4_text": 512,
        "gemma4_unified_text": 1024,
    },
    "use_sliding_window": dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "smollm3"), False),
}


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, with what it leaves out as transformers takes it."""
    kind = str(config.get("model_type"))
    return {**{key: values[kind] for key, values in LEFT_OUT.items() if kind in values}, **config}


def _switches(config: Mapping[str, Any]) -> bool:
    """Whether a config of its family has a switch for the window."""
    return config.get("model_type") in LEFT_OUT["use_sliding_window"]


def check_decoder(config: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError for a decoder that we neither compute nor plan, though its linears have familiar names."""
    if str(config.get("model_type")) not in COMPUTED:
        _family_of(config, name)
    computed, kinds = COMPUTED.get(str(config.get("model_type")), ((), ATTENTIONS))
    whole = _completed(config)
    found = [(key, whole[key]) for key in UNLIKE if whole.get(key) and key not in computed]
    found += [("use_bidirectional_attention", "all")] * (config.get("use_bidirectional_attention") == "all")
    found += [("layer_types", kind) for kind in config.get("layer_types") or () if kind not in kinds]
    for key, value in found[:1]:
        how = "" if key in config else " (as it does where the key is left out)"
        raise CheckpointError(
            f"{name}: config.json of {config.get('model_type')} has {key} {value!r:.60}{how}, which qerl does not "
            "compute: give a Qwen2, Qwen3, Qwen3.5, Llama, Mistral or Gemma 4 (12B, 31B) model"
        )


def check_numbers(config: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError if a size in config.json is not a whole number above 0, or larger than any model's."""
    for key, most in MOST.items():
        value = config.get(key)
        if key not in config or (value is None and key not in REQUIRED):
            continue
        if type(value) is not int or not 1 <= value <= most:
            what = "is more than any model has" if type(value) is int and value > most else "is no whole number above 0"
            raise CheckpointError(
                f"{name}: config.json has {key} {value!r:.60}, which {what}: copy the file from the original model"
            )


def shapes_of(config: Mapping[str, Any], name: str) -> ModelShapes:
    """The shapes that the keys of config.json give.

    Raises CheckpointError if one is missing or is not a whole number above 0.
    """
    config = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
    check_decoder(config, name)
    for key in REQUIRED:
        if key not in config:
            raise CheckpointError(f"{name}: config.json has no {key!r}: only dense decoder models are supported")
    check_numbers(config, name)
    config = _completed(config)
    hidden, width, heads, layers, vocabulary = (config[key] for key in REQUIRED)
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    full = _full_heads(config, name)
    if head_dim < 1 or heads % kv_heads or (full and heads % full[0]):
        raise CheckpointError(
            f"{name}: config.json has hidden_size {hidden}, {heads} attention heads and {kv_heads} of keys and values, "
            "which do not divide one another: copy the file from the original model"
        )
    states = _states_of(config, name)
    return ModelShapes(
        layers=layers,
        hidden=hidden,
        projections={
            **_attention_linears(hidden, heads, (kv_heads, head_dim), gated=states is not None),
            "gate_proj": (width, hidden),
            "up_proj": (width, hidden),
            "down_proj": (hidden, width),
            **(dict(zip(OF_STATES, _state_linears(states, hidden), strict=True)) if states else {}),
        },
        vocabulary=vocabulary,
        tied=bool(config.get("tie_word_embeddings")),
        kv_heads=kv_heads,
        head_dim=head_dim,
        positions=config.get("max_position_embeddings"),
        head_norms=str(config.get("model_type")).startswith(HEAD_NORMED),
        four_bit_inputs=_rounds_inputs(config.get("quantization_config")),
        decoder=decoder_of(config, name),
        states=states,
        norms=4 if str(config.get("model_type")).startswith(FOUR_NORMS) else 2,
        full_heads=full,
        of_full={} if full is None else _attention_linears(hidden, heads, full),
        window=None if full is None else config.get("sliding_window") or 512,
        windowed=bool(config.get("sliding_window") and (config.get("use_sliding_window") or not _switches(config))),
    )


def _attention_linears(hidden: int, heads: int, kv: tuple[int, int], gated: bool = False) -> dict[str, tuple[int, int]]:
    """(out, in) of q, k, v and o; `kv` are the heads of keys and values and a head's size. `gated`: q has the output's
    gate too, as in Qwen3.5."""
    queries, keys = heads * kv[1], math.prod(kv)
    shapes = (queries * (2 if gated else 1), hidden), (keys, hidden), (keys, hidden), (hidden, queries)
    return dict(zip(PROJECTIONS, shapes, strict=False))


def _states_of(config: Mapping[str, Any], name: str) -> StateShapes | None:
    """The sizes of linear attention; None for a family that has none."""
    if config.get("model_type") not in HYBRIDS:
        return None
    for key in STATE_KEYS:
        if config.get(key) is None:
            raise CheckpointError(f"{name}: config.json has no {key!r}: copy the file from the original model")
    states = StateShapes(*(config[key] for key in STATE_KEYS), config.get("linear_conv_kernel_dim") or 4)
    if states.value_heads % states.key_heads:
        raise _odd(name, STATE_KEYS[1], states.value_heads)
    return states


def _state_linears(states: StateShapes, hidden: int) -> list[tuple[int, int]]:
    return [(states.mixed, hidden), (states.values, hidden), (hidden, states.values)]


def _rounds_inputs(quantization: Any) -> bool:
    """Whether a quantization_config says that inputs are rounded to 4 bits."""
    if not isinstance(quantization, Mapping):
        return False
    for each in formats.all_formats():
        if each.four_bit_inputs and each.recognises(quantization):
            return each.activations(quantization) in ("dynamic", "static")
    return False
