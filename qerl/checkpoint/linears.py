"""The linears of a decoder layer, and which of them read the same input, so that engines multiply by them at once."""

from __future__ import annotations

from collections.abc import Iterable

# llm-compressor gives those that are fused the same global scale (llmcompressor 0.14, observers/helpers.py,
# FUSED_LAYER_NAMES; its MLA and MoE groups are left out here).
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSED = (QKV, ("o_proj",), GATE_UP, ("down_proj",))
PROJECTIONS = tuple(name for group in FUSED for name in group)


def fused(linears: Iterable[str]) -> list[tuple[str, ...]]:
    """The linears (module names) in groups that engines fuse into one matrix; each is in one group."""
    leaders = {name: group[0] for group in FUSED for name in group}
    groups: dict[tuple[str, str], list[str]] = {}
    for module in linears:
        parent, _, leaf = module.rpartition(".")
        groups.setdefault((parent, leaders.get(leaf, leaf)), []).append(module)
    return [tuple(modules) for modules in groups.values()]
