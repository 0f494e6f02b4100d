"""Decode-step attention: one new token per sequence, over a paged KV cache that its key and value go into.

The fast twin of `reference_attend_` on every card from Ampere on; `qerl/formats/cuda/sources/attend.cu` explains how it
works. Its limit is the size of the keys and values, 4 * tokens * key heads * head_dim bytes (half of it for a cache in
8 bits), divided by the memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import Any, NamedTuple

import torch

from qerl.formats.cuda import nvrtc
from qerl.formats.cuda.nvrtc import Kernel, Launch, Variant, kernel
from qerl.formats.fp8.kv import decode, encode
from qerl.model.costs import GROUP, takes

TILE = 16  # tokens that a warp handles at a time; a page holds a multiple of it
MAX_SEQUENCES = 1024
MAX_SHARERS = 64  # the most blocks that one head of one sequence is divided among
SLACK = 6  # tiles by which a range may exceed an equal share, if that spares every block a second item
NONE = -1


class Split(NamedTuple):
    """How the warps of a multiprocessor are grouped into blocks."""

    warps: int  # per block
    blocks: int  # per multiprocessor


class Build(NamedTuple):
    """The kernel as it is compiled and launched on a kind of card.

    With `few` key heads more warps share a head; with `many` a block waits less for its slowest warp.
    """

    few: Split
    many: Split
    early: bool = False  # whether a launch may start while the one before it ends, which Hopper was the first to have
    architecture: str = ""  # as for `nvrtc.kernel`

    def split_for(self, sequences: int, key_heads: int) -> Split:
        return self.many if sequences * key_heads >= MANY_HEADS else self.few


# By the bits of the cache: codes take fewer registers than bfloat16, so that more warps have loads in flight.
HOPPER = {16: Build(Split(4, 3), Split(2, 6), early=True), 8: Build(Split(4, 4), Split(2, 8), early=True)}
# A guess: no such card has timed it. So many blocks leave all values in registers, on 12.0 too, where most are needed.
OTHERS = {16: Build(Split(4, 2), Split(2, 4)), 8: Build(Split(4, 3), Split(2, 6))}
MANY_HEADS = 512  # key heads, counted over all sequences, from which `many` is faster


def build_for(device: torch.device, bits: int) -> Build:
    return (HOPPER if nvrtc.has_kernels(device) else OTHERS)[bits]


class Space:
    """Kernels and work space of `attend_`, shared by all layers of a model. Create it before a graph is captured.

    `bits` is the width of an element of the cache, 16 or 8; 8 needs `FP8_CAPABILITY`. `build` is for measurements.
    """

    def __init__(
        self,
        sequences: int,
        key_heads: int,
        head_dim: int,
        device: torch.device,
        bits: int = 16,
        build: Build | None = None,
    ) -> None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.key_heads, self.head_dim, self.bits = key_heads, head_dim, bits
        self.build = build or build_for(device, bits)
        few, many = self.build.few, self.build.many
        self.blocks = {split: split.blocks * processors for split in (few, many)}
        self.kernels = {split: self._load("attend", split) for split in (few, many)}
        self._write_plans = self._load("attend_plan", few)
        most = 2 * self.blocks[many] * GROUP
        plans = torch.zeros(sum(self.blocks.values()) + 2, 4, dtype=torch.int32, device=device)
        self._plans = plans
        self.plans = {few: plans[: self.blocks[few] + 1], many: plans[self.blocks[few] + 1 :]}
        self.parts = torch.empty(most * head_dim, dtype=torch.float32, device=device)
        self.scales = torch.empty(most * 2, dtype=torch.float32, device=device)
        self.done = torch.zeros(sequences * key_heads, dtype=torch.int32, device=device)

    def plan_(self, lengths: torch.Tensor) -> None:
        """Divide the sequences' tiles among the blocks, for both splits, and clear the counters.

        Call it once per step, before the layers run. `lengths` may have more sequences than the step, because a CUDA
        graph is captured for a fixed number. Nothing has to survive from one step to the next: vLLM allocates this
        space in the memory of its KV cache, which a sleep gives back.
        """
        splits = (self.build.few, self.build.many)
        of_splits = (number for split in splits for number in (self.blocks[split], split.warps))
        sizes = (len(lengths), self.key_heads, *of_splits, MAX_SHARERS, SLACK)
        self._write_plans(Launch((2, 1, 1), MAX_SEQUENCES), self._plans, self.done, lengths, *sizes)

    def _load(self, entry: str, split: Split) -> Kernel:
        source, defines = variant(self.head_dim, split, self.bits)
        return kernel(source, entry, defines, self.build.architecture)


class Plan(NamedTuple):
    """What `Space.plan_` writes for one split. An item is one key head of one sequence: sequence * key_heads + head."""

    blocks: list[tuple[int, int, int, int]]  # (first item or NONE, its first tile, tokens of its sequence, range size)
    items: int
    filled: bool  # whether every item is padded to whole ranges


def reference_plan(lengths: list[int], key_heads: int, blocks: int, warps: int) -> Plan:
    """The same plan in plain Python: the tiles of all items in a row, cut into equal ranges.

    A sequence without tokens counts as one tile.
    """
    tiles = [max(1, -(-length // TILE)) for length in lengths]
    least = max(-(-sum(tiles) * key_heads // blocks), warps, -(-max(tiles) // MAX_SHARERS))
    sizes = range(least, least + SLACK + 1)
    filling = [size for size in sizes if sum(-(-count // size) for count in tiles) * key_heads <= blocks]
    size = filling[0] if filling else least
    of_item = [-(-count // size) * size if filling else count for count in tiles]
    row = [(item, tile) for item in range(len(tiles) * key_heads) for tile in range(of_item[item // key_heads])]
    first = [row[block * size] if block * size < len(row) else (NONE, 0) for block in range(blocks)]
    entries = [(item, tile, 0 if item == NONE else lengths[item // key_heads], size) for item, tile in first]
    return Plan(entries, len(tiles) * key_heads, bool(filling))


@dataclass(frozen=True)
class Cache:
    """A layer's part of the KV cache: keys and values (pages, tokens per page, key heads, head_dim).

    They are bfloat16, or e4m3 codes (uint8) with `scales`: of the keys and of the values, float32 of one element each,
    powers of two.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)

    @property
    def page_tokens(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True)
class Batch:
    """Where the sequences' tokens lie in the cache.

    `pages` (sequences, n) int32: the pages of each sequence in order; a page holds a multiple of TILE tokens. `lengths`
    (sequences,) int32: tokens including the new one, 0 for an unused row. `slots` (sequences,) int64: where the new
    token goes, as page * tokens per page + its place in the page, or -1 if it is not to be written. `angles` are those
    by which the new query and key are still to be rotated, (positions, head_dim) bfloat16, cosines before sines: value
    d of a head with value d + head_dim / 2, by the row of the token's position.
    """

    pages: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    angles: torch.Tensor | None = None


def takes_every_layer(config: Any) -> bool:
    """Whether the kernel serves all layers of a model with this transformers config: by their heads, and without a
    window."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return takes(heads, key_heads, head_dim) and getattr(config, "sliding_window", None) is None


def rotates(head_dim: int, bits: int) -> bool:
    """Whether the kernel can rotate the new query and key."""
    return bits == 16 and head_dim >= 64


def variants(head_dim: int, bits: int, device: torch.device) -> list[Variant]:
    """What has to be compiled for a model on `device`."""
    build = build_for(device, bits)
    return [variant(head_dim, split, bits) for split in (build.few, build.many)]


def variant(head_dim: int, split: Split, bits: int) -> Variant:
    sizes = {"HEAD_DIM": head_dim, "KV_BITS": bits, "WARPS": split.warps, "BLOCKS": split.blocks}
    sizes["MAX_SEQUENCES"] = MAX_SEQUENCES
    return "attend.cu", tuple(f"{name}={size}" for name, size in sizes.items())


def attend_(
    out: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: Cache,
    batch: Batch,
    scale: float,
    space: Space,
) -> torch.Tensor:
    """Fill `out` (sequences, heads, head_dim) and the slots of `cache` from the new tokens, one per sequence.

    `new` is (query, key, value), each (sequences, heads or key heads, head_dim), bfloat16, with contiguous heads. In a
    cache of 8 bits the new key and value are rounded before they are attended to. `space.plan_` must have been called
    with these lengths. Raises ValueError for angles where `rotates` says no.
    """
    query, key, value = new
    if batch.angles is not None and not rotates(space.head_dim, space.bits):
        raise ValueError(
            f"heads of {space.head_dim} values over a cache in {space.bits} bits have to be rotated before"
        )
    split = space.build.split_for(len(query), space.key_heads)
    space.kernels[split](
        Launch((space.blocks[split], 1, 1), 32 * split.warps, early=space.build.early),
        *(query, key, value),
        *(cache.keys, cache.values),
        out,
        *cache.scales,
        *(batch.pages, batch.lengths, batch.slots),
        *(space.plans[split], space.parts, space.scales, space.done),
        *(query.stride(0), key.stride(0), value.stride(0)),
        *(batch.pages.stride(0), cache.page_tokens, *cache.keys.stride()[:3]),
        *(space.key_heads, query.shape[1] // space.key_heads),
        scale * log2(e),
        batch.angles,
    )
    return out


def reference_attend_(
    out: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: Cache,
    batch: Batch,
    scale: float,
) -> torch.Tensor:
    """The same as `attend_` in plain torch and float64, one sequence at a time."""
    query, key, value = new
    for index, (length, slot) in enumerate(zip(batch.lengths.tolist(), batch.slots.tolist(), strict=True)):
        out[index] = 0
        if not length:
            continue
        places = torch.arange(length, device=query.device)
        pages = batch.pages[index].long()[places // cache.page_tokens]
        of_query, of_key = query[index], key[index]
        if batch.angles is not None:
            of_query, of_key = (rotated(part, batch.angles[length - 1]) for part in (of_query, of_key))
        stored = [_stored(one, by) for one, by in zip((of_key, value[index]), cache.scales, strict=True)]
        keys, values = (
            torch.cat([part[pages, places % cache.page_tokens][:-1], one[None]])
            for part, one in zip((cache.keys, cache.values), stored, strict=True)
        )
        keys, values = (_read(part, by) for part, by in zip((keys, values), cache.scales, strict=True))
        group = query.shape[1] // key.shape[1]
        scores = torch.einsum("hd,thd->ht", of_query.double(), keys.repeat_interleave(group, 1)) * scale
        out[index] = torch.einsum("ht,thd->hd", scores.softmax(-1), values.repeat_interleave(group, 1)).to(out.dtype)
        if slot >= 0:
            for part, one in zip((cache.keys, cache.values), stored, strict=True):
                part[slot // cache.page_tokens, slot % cache.page_tokens] = one
    return out


def rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Heads (..., n) rotated by `angles` (..., n), cosines before sines: value d with value d + n / 2, rounded once."""
    (cosines, sines), (first, second) = (part.float().chunk(2, -1) for part in (angles, heads))
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(heads.dtype)


def _stored(new: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """A key or value as the cache holds it."""
    return new if scale is None else encode(new, scale.item()).view(torch.uint8)


def _read(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """What the cache holds, in float64."""
    return stored.double() if scale is None else decode(stored, scale.item(), torch.float64)
