"""The product for every card from Ampere on without a card: its tilings, and what a compiler makes of them."""

import re
import shutil
import subprocess

import pytest
import torch

from qerl.formats.cuda import nvrtc
from qerl.formats.nvfp4 import gemm, portable, slab_layout, ways
from qerl.formats.nvfp4.kernel_layout import MARLIN
from qerl.formats.nvfp4.portable import STAGES, choose_tiling
from tests.helpers.gemm_cases import random_adapter, random_weight

pytestmark = pytest.mark.usefixtures("fresh_seed")
CARDS = ("sm_86", "sm_120")  # 8.0, 8.9 and 9.0 take as many registers as 8.6, within four; 12.0 takes the most
REGISTERS = 65536  # of a multiprocessor
NVCC = shutil.which("nvcc")
SHAPES = ((4608, 3584), (37888, 3584), (3584, 18944))
# All that are compiled for a 7B: few rows, many rows, and long ones.
TILINGS = {choose_tiling(*shape, size) for shape in SHAPES for size in STAGES}
# For each number of threads on a multiprocessor, that with the most sums, which are in registers.
MOST_REGISTERS = {
    each.occupancy * each.threads: each for each in sorted(TILINGS, key=lambda t: (t.rows * t.tokens, repr(t)))
}
EACH_TILING = pytest.mark.parametrize(
    "tiling", sorted(TILINGS, key=repr), ids=lambda t: f"{t.tokens}-{t.rows}-{t.batch}"
)


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(1, 8), (8, 8), (9, 16), (17, 32), (33, 48), (49, 64), (65, 96), (128, 128), (129, 192), (193, 256), (256, 256)],
)
def test_a_launch_has_the_smallest_size_that_holds_the_tokens(tokens, size):
    assert {choose_tiling(*shape, tokens).tokens for shape in SHAPES} == {size}


@EACH_TILING
def test_a_tiling_fits_the_smallest_card_and_the_work_space(tiling):
    """Where several blocks share a multiprocessor, each needs a further KiB of the 100 that it has."""
    assert tiling.occupancy * (tiling.shared_bytes + 1024) <= portable.MAX_SHARED + 1024
    assert tiling.rows * tiling.tokens <= ways.MAX_SUMS
    assert slab_layout.ROWS % tiling.rows == 0
    assert tiling.rows // 4 <= 32 * tiling.warps  # each thread copies at most one piece of the block scales
    assert tiling.tokens % (8 * tiling.split) == 0
    assert tiling.tokens == 8 or tiling.tokens // tiling.split % 16 == 0  # x is loaded for two tiles of 8 at once
    assert tiling.stages >= 2


@pytest.mark.parametrize(
    ("rows", "columns", "ranks", "taken"),
    [
        *((4608, 3584, 192, True), (37888, 3584, 64, True), (5120, 27648, 64, True)),  # of a 7B and a 32B
        *((64, 100, 0, False), (12, 128, 0, False), (64, 49152, 0, False), (64, 128, 512, False)),
    ],
)
def test_which_sizes_are_taken(rows, columns, ranks, taken):
    assert portable.takes(rows, columns, ranks) is taken


@pytest.mark.parametrize("columns", [64, 880, 3584, 8176, 8192, 18944])
def test_the_variants_of_a_width_are_those_that_its_products_load(columns):
    sizes = [(rows, tokens) for rows in (64, ways.FEW_ROWS, ways.FEW_ROWS + 8) for tokens in range(1, 257)]
    loaded = {(portable.SOURCE, choose_tiling(rows, columns, tokens).defines()) for rows, tokens in sizes}
    assert loaded == set(portable.variants(columns))


@pytest.mark.parametrize(("hopper", "launched"), [(True, "gemm"), (False, "portable")])
def test_a_card_that_is_not_a_hopper_takes_the_portable_product(monkeypatch, hopper, launched):
    """300 tokens are launches of 256 and 44."""
    seen = []
    for module in (gemm, portable):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "product", lambda x, *rest, name=name: seen.append((name, len(x))))
    monkeypatch.setattr(gemm, "has_kernels", lambda device: hopper)
    monkeypatch.setattr(gemm, "has_portable_kernels", lambda device: True)
    gemm.split_product(torch.zeros(300, 128, dtype=torch.bfloat16), random_weight(64, 128))
    assert seen == [(launched, 256), (launched, 44)]


@pytest.mark.parametrize("wrong", ["columns", "dtype", "layout", "rank", "tokens"])
def test_what_the_kernel_would_misread_is_refused(wrong):
    weight = random_weight(64, 128, MARLIN) if wrong == "layout" else random_weight(64, 128)
    tokens, columns = 257 if wrong == "tokens" else 4, 192 if wrong == "columns" else 128
    x = torch.zeros(tokens, columns, dtype=torch.float32 if wrong == "dtype" else torch.bfloat16)
    adapter = random_adapter(64, 128, 24, (64,)) if wrong == "rank" else None
    with pytest.raises(ValueError, match=r"kernel|do not fit"):
        portable.product(x, weight, None, adapter)


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("tiling", MOST_REGISTERS.values(), ids=[f"{count}-threads" for count in MOST_REGISTERS])
def test_registers_suffice_on_every_card(tiling, tmp_path):
    """On 12.0 the compiler keeps a few values of a segment in memory; the loop over its units has none (nvdisasm)."""
    target = f"-gencode=arch=compute_80,code=[{','.join(CARDS)}]"
    macros = [f"-D{define}" for define in tiling.defines()]
    command = [NVCC, "-std=c++17", "-fatbin", "-Xptxas=-v", target, *macros, str(nvrtc.FOLDER / portable.SOURCE)]
    done = subprocess.run([*command, "-o", str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"for '(sm_\d+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", done.stderr, re.DOTALL)
    assert {card for card, _, _ in found} == set(CARDS)
    assert [card for card, spilled, _ in found if int(spilled) > (64 if card == "sm_120" else 0)] == []
    threads = tiling.occupancy * tiling.threads
    assert all(int(registers) * threads <= REGISTERS for _, _, registers in found)
