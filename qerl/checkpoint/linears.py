"""The linears of a decoder layer, and which of them read the same input, so that engines multiply by them at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from qerl.base.errors import ConfigError

# llm-compressor gives those that are fused the same global scale (llmcompressor 0.14, observers/helpers.py,
# FUSED_LAYER_NAMES; its MLA and MoE groups are left out here).
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSED = (QKV, ("o_proj",), GATE_UP, ("down_proj",))
W1_W3 = ("w1", "w3")  # what Mixtral calls gate and up
PROJECTIONS = tuple(name for group in FUSED for name in group)
ATTENTION = tuple(f"self_attn.{name}" for name in (*QKV, "o_proj"))
DENSE_MLP = tuple(f"mlp.{name}" for name in (*GATE_UP, "down_proj"))


def projections(layers: int) -> list[str]:
    """The module names of all linears of a dense decoder of so many layers, in order. See also `experts.Decoder`."""
    return [f"model.layers.{n}.{part}" for n in range(layers) for part in (*ATTENTION, *DENSE_MLP)]


def matching(linears: Sequence[str], patterns: Iterable[str], option: str) -> list[str]:
    """The linears that a pattern names. As in llm-compressor it is a name, or `re:` and a regex for the name's start.

    Raises ConfigError, which names `option`, for a pattern that is no regex or matches nothing. It may name `lm_head`.
    """
    kept: set[str] = set()
    for pattern in patterns:
        try:
            found = {module for module in (*linears, "lm_head") if _matches(module, pattern)}
        except re.error as error:
            raise ConfigError(f"{option} {pattern!r} is not a regular expression ({error}): correct it") from error
        if not found:
            raise ConfigError(
                f"{option} {pattern!r} matches no layer: write a full name such as {linears[0]}, or a regex from the "
                "start of the name such as 're:.*self_attn.*'"
            )
        kept |= found
    return [module for module in linears if module in kept]


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern


def fused(linears: Iterable[str]) -> list[tuple[str, ...]]:
    """The linears (module names) in groups that engines fuse into one matrix; each is in one group.

    Gate and up of one expert are such a group; different experts may differ.
    """
    leaders = {name: group[0] for group in (*FUSED, W1_W3) for name in group}
    groups: dict[tuple[str, str], list[str]] = {}
    for module in linears:
        parent, _, leaf = module.rpartition(".")
        groups.setdefault((parent, leaders.get(leaf, leaf)), []).append(module)
    return [tuple(modules) for modules in groups.values()]
