"""Attention of new tokens over a paged cache.

On a CPU the twin is compared with torch's attention, the division of sequences is checked, and the kernel is compiled
for every kind of card. With `-m gpu` the CUDA kernel is compared with the twin, on a Hopper with the code of other
cards too; last run on an H200, 2026-11-28, at 8046f02f.
"""

import re
import shutil
import subprocess
from dataclasses import replace
from math import e

import pytest
import torch
import torch.nn.functional as F

from qerl.formats.cuda import nvrtc
from qerl.formats.fp8.kv import decode, encode
from qerl.model import decode_attention
from qerl.model.costs import HEAD_DIMS
from qerl.model.decode_attention import (
    HOPPER,
    NONE,
    OTHERS,
    TILE,
    Batch,
    Cache,
    Space,
    attend_,
    reference_attend_,
    reference_plan,
)

pytestmark = pytest.mark.usefixtures("fresh_seed")
NO_SLOT = -1
SCALES = (2.0**-6, 2.0**-7)  # of keys and values in 8 bits; a value of 3.5 or more saturates
NVCC = shutil.which("nvcc")
MAX_SHARED = 99 * 1024  # bytes of shared memory that a block may have on the cards with the least (8.6, 8.9, 12.0)
OF_OTHERS = {16: "compute_80", 8: "compute_89"}  # the oldest cards that take a cache of so many bits


@pytest.fixture(params=["own", "others"])
def card(request, monkeypatch):
    """The kernel of the card at hand, then that of other cards, as code that the driver translates for this one."""
    if request.param == "others":
        take(monkeypatch, OTHERS)


def take(monkeypatch, builds):
    """Build the kernel as other cards do."""
    as_others = {bits: builds[bits]._replace(early=False, architecture=of) for bits, of in OF_OTHERS.items()}
    monkeypatch.setattr(decode_attention, "build_for", lambda device, bits: as_others[bits])


def random_step(lengths, heads, key_heads, head_dim, device="cpu", page_tokens=16):
    """(new, cache, batch). Each sequence has its own pages, in any order, and its new token has a slot in the last one.
    Query, key and value are parts of one tensor, as after a fused projection. Slots without an owner hold NaN."""
    counts = [-(-length // page_tokens) for length in lengths]
    order = (torch.randperm(sum(counts) + 3) + 1).tolist()
    pages = torch.zeros(len(lengths), max(counts) + 2, dtype=torch.int32)
    layer = torch.full((len(order) + 1, 2, page_tokens, key_heads, head_dim), float("nan"), dtype=torch.bfloat16)
    slots = torch.full((len(lengths),), NO_SLOT)
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages[index, :count] = torch.tensor([order.pop() for _ in range(count)])
        for place in range(length - 1):
            layer[pages[index, place // page_tokens], :, place % page_tokens].normal_()
        if length:
            last = length - 1
            slots[index] = pages[index, last // page_tokens] * page_tokens + last % page_tokens
    fused = torch.randn(len(lengths), (heads + 2 * key_heads) * head_dim).bfloat16().to(device)
    new = fused.split([heads * head_dim, key_heads * head_dim, key_heads * head_dim], dim=1)
    new = tuple(part.unflatten(1, (-1, head_dim)) for part in new)
    batch = Batch(pages.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), slots.to(device))
    return new, Cache(*layer.to(device).unbind(1)), batch


def step_of(bits, *sizes, **options):
    """A random step whose cache has 16 or 8 bits."""
    new, cache, batch = random_step(*sizes, **options)
    if bits == 16:
        return new, cache, batch
    parts = zip((cache.keys, cache.values), SCALES, strict=True)
    codes = torch.stack([encode(part, scale).view(torch.uint8) for part, scale in parts], 1)
    return new, Cache(*codes.unbind(1), tuple(torch.tensor(scale, device=codes.device) for scale in SCALES)), batch


def copied(cache):
    keys = torch.stack([cache.keys, cache.values], 1)
    return Cache(*keys.unbind(1), cache.scales)


def contents(part, scale):
    """What the cache holds, float32."""
    return part.float() if scale is None else decode(part, scale.item(), torch.float32)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("heads", "key_heads", "head_dim"), [(7, 1, 32), (4, 4, 64), (10, 2, 128)])
def test_the_twin_is_attention_over_all_tokens(heads, key_heads, head_dim, bits):
    (query, key, value), cache, batch = step_of(bits, [20, 1, 16], heads, key_heads, head_dim)
    out = reference_attend_(torch.empty(query.shape), (query, key, value), cache, batch, 0.3)
    for index, length in enumerate([20, 1, 16]):
        pages = batch.pages[index, : -(-length // 16)].long()
        keys, values = (
            contents(part[pages].flatten(0, 1)[:length].transpose(0, 1), scale)
            for part, scale in zip((cache.keys, cache.values), cache.scales, strict=True)
        )
        # the call has written the new key, rounded if the cache has 8 bits
        new = key[index].float() if bits == 16 else decode(encode(key[index], SCALES[0]), SCALES[0], torch.float32)
        assert torch.equal(keys[:, -1], new)
        expected = F.scaled_dot_product_attention(
            query[index, :, None].float(), keys, values, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[index], expected[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [16, 8])
def test_without_a_slot_the_cache_is_unchanged_and_without_tokens_the_result_is_zero(bits):
    new, cache, batch = step_of(bits, [20, 0], 4, 2, 32)
    batch.slots[:] = NO_SLOT
    before = copied(cache)
    out = reference_attend_(torch.ones(2, 4, 32), new, cache, batch, 0.3)
    assert torch.equal(cache.keys.nan_to_num(), before.keys.nan_to_num())
    assert out[0].isfinite().all()
    assert not out[1].any()


def test_which_heads_the_kernel_supports_and_that_many_take_smaller_blocks():
    sizes = (28, 4, 128), (40, 4, 128), (8, 8, 80)
    assert [decode_attention.takes(*each) for each in sizes] == [True, False, False]
    build = HOPPER[16]
    for sequences, split in ((1, build.few), (127, build.few), (128, build.many), (256, build.many)):
        assert build.split_for(sequences, 4) is split


@pytest.mark.parametrize("hopper", [True, False])
def test_only_hopper_starts_early_and_only_its_warps_may_lack_registers(monkeypatch, hopper):
    monkeypatch.setattr(nvrtc, "has_kernels", lambda device: hopper)
    builds = [decode_attention.build_for(torch.device("cuda", 0), bits) for bits in (16, 8)]
    assert [(build.early, build.few.warps * build.few.blocks) for build in builds] == (
        [(True, 12), (True, 16)] if hopper else [(False, 8), (False, 12)]
    )


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("cards", "builds", "bits"),
    [
        ({"compute_80": ["sm_80", "sm_86", "sm_89"], "compute_120": ["sm_120"]}, OTHERS, 16),
        ({"compute_89": ["sm_89"], "compute_120": ["sm_120"]}, OTHERS, 8),
        ({"compute_90a": ["sm_90a"]}, HOPPER, 16),
        ({"compute_90a": ["sm_90a"]}, HOPPER, 8),
    ],
    ids=["others", "others-8-bits", "hopper", "hopper-8-bits"],
)
def test_registers_and_shared_memory_suffice_on_every_card(cards, builds, bits, head_dim, tmp_path):
    """Hopper's has two values in memory for a head of 128, and was measured with them."""
    for split in (builds[bits].few, builds[bits].many):
        source, defines = decode_attention.variant(head_dim, split, bits)
        targets = [f"-gencode=arch={of},code=[{','.join(names)}]" for of, names in cards.items()]
        macros = [f"-D{define}" for define in defines]
        command = [NVCC, "-std=c++17", "-fatbin", "-Xptxas=-v", *targets, *macros, str(nvrtc.FOLDER / source)]
        done = subprocess.run([*command, "-o", str(tmp_path / "out")], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        pattern = r"'attend' for '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers.*?(\d+) bytes smem"
        found = re.findall(pattern, done.stderr, re.DOTALL)
        assert sorted(card for card, *_ in found) == sorted(name for names in cards.values() for name in names)
        allowed = 8 if builds is HOPPER and (head_dim, bits) == (128, 16) else 0
        assert [each for each in found if int(each[1]) > allowed or int(each[3]) > MAX_SHARED] == []


@pytest.mark.parametrize("lengths", [[1], [2000], [0, 0, 0], [17, 0, 300, 16], list(range(256)), [9000, 3] * 20])
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("blocks", [1, 7, 396])
def test_the_ranges_of_the_blocks_cover_all_tiles_in_order(lengths, key_heads, blocks):
    plan = reference_plan(lengths, key_heads, blocks, 4)
    tiles = [max(1, -(-length // TILE)) for length in lengths for _ in range(key_heads)]
    done = []
    for item, tile, length, size in plan.blocks:
        assert item == NONE or length == lengths[item // key_heads]
        for _ in range(size if item != NONE else 0):
            if item < len(tiles):
                done += [(item, tile)] if tile < tiles[item] else []
                end = -(-tiles[item] // size) * size if plan.filled else tiles[item]
                item, tile = (item, tile + 1) if tile + 1 < end else (item + 1, 0)
    assert done == [(item, tile) for item, count in enumerate(tiles) for tile in range(count)]


@pytest.mark.parametrize(
    ("lengths", "size", "filled"),
    [([384], 4, True), ([140] * 8, 4, True), ([384] * 64, 16, False), ([640] * 32, 14, True), ([384] * 256, 63, False)],
)
def test_items_are_filled_up_if_that_costs_little(lengths, size, filled):
    plan = reference_plan(lengths, 4, 396, 4)
    assert (plan.blocks[0][3], plan.filled) == (size, filled)
    longest = reference_plan([40960], 1, 396, 4)  # divided among few enough blocks
    assert longest.blocks[0][3] == 40960 // TILE // decode_attention.MAX_SHARERS


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("lengths", [[1], [2000], [0, 0], [17, 0, 300, 16], list(range(1024)), [9000, 3] * 20])
@pytest.mark.parametrize("key_heads", [1, 4])
def test_the_plan_equals_that_of_its_twin(lengths, key_heads, bits):
    space = Space(len(lengths), key_heads, 32, torch.device("cuda"), bits)
    space.plan_(torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    for split, plan in space.plans.items():
        expected = reference_plan(lengths, key_heads, space.blocks[split], split.warps)
        assert plan.tolist() == [*(list(entry) for entry in expected.blocks), [expected.items, expected.filled, 0, 0]]


LENGTHS = {
    "one": [384],
    "cut": [384] * 60,
    "few": [1, 2, 15, 16, 17, 31, 33, 64, 65, 0, 1000],
    "full": [*range(1, 200), 0, 640, 5],
    "long": [9000, 3],
}


def distance(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def kernel_and_twin(lengths, heads, key_heads, head_dim, bits=16, **options):
    """(output, expected output, cache of the kernel, cache of the twin, the step and its work space)."""
    step = step_of(bits, lengths, heads, key_heads, head_dim, device="cuda", **options)
    new, cache, batch = step
    twin_cache, scale = copied(cache), head_dim**-0.5 * e
    space = Space(len(lengths), key_heads, head_dim, cache.keys.device, bits)
    space.plan_(batch.lengths)
    out = attend_(torch.full_like(new[0].contiguous(), 9.0), new, cache, batch, scale, space)
    expected = reference_attend_(torch.empty_like(out, dtype=torch.float64), new, twin_cache, batch, scale)
    return out, expected, cache, twin_cache, (step, space, scale)


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim"), [(28, 4, 128), (16, 2, 128), (40, 8, 128), (14, 2, 64), (4, 2, 32), (3, 3, 64)]
)
def test_the_kernel_agrees_with_its_twin(lengths, heads, key_heads, head_dim, bits):
    out, expected, cache, twin_cache, _ = kernel_and_twin(lengths, heads, key_heads, head_dim, bits)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=4e-3)
    assert distance(out, expected) < 4e-3
    for mine, twin in ((cache.keys, twin_cache.keys), (cache.values, twin_cache.values)):
        assert torch.equal(mine.nan_to_num(), twin.nan_to_num())
        assert torch.equal(mine.isnan(), twin.isnan())


def with_angles(step):
    """The step with angles for its batch, and the step whose query and key are rotated by vLLM's formula before."""
    (query, key, value), cache, batch = step
    head_dim = query.shape[-1]
    by = torch.arange(2000.0, device=query.device)[:, None] * 1e4 ** -torch.linspace(0, 1, head_dim // 2).to(
        query.device
    )
    angles = torch.cat([by.cos(), by.sin()], 1).bfloat16()
    cos, sin = (part.float()[:, None] for part in angles[(batch.lengths - 1).clamp(min=0).long()].chunk(2, 1))
    turned = []
    for part in (query, key):
        first, second = part.float().chunk(2, -1)
        turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin], -1).bfloat16())
    return replace(batch, angles=angles), ((*turned, value), copied(cache), batch)


@pytest.mark.parametrize("on", ["cpu", *(pytest.param(each, marks=pytest.mark.gpu) for each in ("own", "others"))])
@pytest.mark.parametrize("lengths", [[20, 1, 0, 16], [300, 7] * 3], ids=["few", "more"])
@pytest.mark.parametrize(("heads", "key_heads", "head_dim"), [(28, 4, 128), (14, 2, 64)])
def test_rotating_inside_has_the_bits_of_rotating_before(lengths, heads, key_heads, head_dim, on, monkeypatch):
    device = "cpu" if on == "cpu" else "cuda"
    if on == "others":
        take(monkeypatch, OTHERS)
    new, cache, _ = step = random_step(lengths, heads, key_heads, head_dim, device=device)
    batch, (turned, other, plain) = with_angles(step)
    outs = [torch.empty(new[0].shape, dtype=torch.bfloat16, device=device) for _ in range(2)]
    for out, given in zip(outs, ((new, cache, batch, 0.1), (turned, other, plain, 0.1)), strict=True):
        if device == "cpu":
            reference_attend_(out, *given)
            continue
        space = Space(len(lengths), key_heads, head_dim, cache.keys.device)
        space.plan_(batch.lengths)
        attend_(out, *given, space)
    assert torch.equal(*outs)
    assert torch.equal(cache.keys.nan_to_num(), other.keys.nan_to_num())


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("bits", [16, 8])
def test_the_kernel_supports_pages_of_other_sizes(bits):
    out, expected, *_ = kernel_and_twin([100, 1, 47, 48, 49], 28, 4, 128, bits, page_tokens=48)
    assert distance(out, expected) < 4e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("lengths", [[1500], [300] * 40, [77] * 200], ids=["one", "some", "many"])
def test_a_call_repeats_to_the_bit_also_in_a_graph(lengths, bits):
    out, _, cache, _, ((new, _, batch), space, scale) = kernel_and_twin(lengths, 28, 4, 128, bits)
    again, graph = torch.empty_like(out), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            attend_(again, new, cache, batch, scale, space)
    for _ in range(20):
        again.zero_()
        graph.replay()
        assert torch.equal(again, out)
    assert not space.done.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
def test_a_step_does_not_depend_on_the_work_space_of_the_one_before():
    """vLLM's sleep frees the memory of the work space, which afterwards may hold anything."""
    out, _, cache, _, ((new, _, batch), space, scale) = kernel_and_twin([1500, 20], 28, 4, 128)
    for left in (space.done, *space.plans.values(), space.parts, space.scales):
        left.view(torch.int32).fill_(7)
    space.plan_(batch.lengths)
    assert torch.equal(attend_(torch.empty_like(out), new, cache, batch, scale, space), out)
    assert not space.done.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("head_dim", [32, 128])
def test_queries_beyond_float16_are_cut_off_where_the_cache_has_8_bits(head_dim):
    """A query of one huge value: its softmax has all of its weight on one token either way."""
    new, cache, batch = step_of(8, [40], 4, 4, head_dim, device="cuda")
    new[0].zero_()
    new[0][..., 5] = 1e30
    space = Space(1, 4, head_dim, cache.keys.device, 8)
    space.plan_(batch.lengths)
    out = attend_(torch.empty_like(new[0].contiguous()), new, cache, batch, 1.0, space)
    expected = reference_attend_(torch.empty_like(out, dtype=torch.float64), new, cache, batch, 1.0)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=4e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
def test_scales_may_change_under_a_captured_graph():
    _, _, cache, _, ((new, _, batch), space, scale) = kernel_and_twin([300, 17], 28, 4, 128, 8)
    out, graph = torch.empty_like(new[0].contiguous()), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_(out, new, cache, batch, scale, space)
    for tensor, value in zip(cache.scales, (2.0**-5, 2.0**-4), strict=True):
        tensor.fill_(value)
    graph.replay()
    expected = reference_attend_(torch.empty_like(out, dtype=torch.float64), new, cache, batch, scale)
    assert distance(out, expected) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_divided_as_on_this_card_other_cards_code_has_the_same_bits(lengths, bits, monkeypatch):
    out, _, cache, _, ((new, _, batch), space, scale) = kernel_and_twin(lengths, 28, 4, 128, bits)
    take(monkeypatch, {**OTHERS, bits: space.build})
    space = Space(len(lengths), 4, 128, out.device, bits)
    space.plan_(batch.lengths)
    assert torch.equal(attend_(torch.empty_like(out), new, cache, batch, scale, space), out)


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("bits", [16, 8])
def test_without_a_slot_the_kernel_leaves_the_cache_unchanged(bits):
    step = step_of(bits, [40, 3], 28, 4, 128, device="cuda")
    new, cache, batch = step
    batch.slots[:] = NO_SLOT
    before, space = copied(cache), Space(2, 4, 128, cache.keys.device, bits)
    space.plan_(batch.lengths)
    attend_(torch.empty_like(new[0].contiguous()), new, cache, batch, 0.1, space)
    assert torch.equal(cache.keys.nan_to_num(), before.keys.nan_to_num())
    assert torch.equal(cache.values.nan_to_num(), before.values.nan_to_num())
