"""Which tilings `qerl tune` chooses, by a stand-in for the clock and the card; and which files are taken."""

import json
import re

import pytest
import torch

from qerl.base.errors import ConfigError, EngineError
from qerl.formats.cuda import nvrtc
from qerl.formats.nvfp4 import gemm, portable, slab_layout, tuning, ways
from qerl.formats.nvfp4.tuning import Card

pytestmark = pytest.mark.usefixtures("fresh_seed")
CPU, A10 = torch.device("cpu"), Card("NVIDIA A10", (8, 6), 72)
SMALL, PLACE = ("o_proj", (64,), 128), (64, 128, 8)
FIRST, *OTHERS = portable.neighbours(*PLACE)
REFUSED, WRONG, FAST, SLOW, *_ = OTHERS
US = {FIRST: 10.0, REFUSED: 1.0, WRONG: 2.0, FAST: 9.0}  # all others take 11


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A card that refuses one tiling and multiplies wrong in another, and whose first round is slow."""
    taken, rounds = {}, []

    def multiply(x, weight, bias, adapter, out, tiling):
        if tiling == REFUSED:
            raise EngineError("no room")
        out.copy_(gemm.reference_product(x, weight, bias, adapter) * (1.1 if tiling == WRONG else 1))
        return out

    def clock(calls):
        tiling = calls[0].keywords["tiling"]
        rounds.append(tiling)
        return len(calls) * (US.get(tiling, 11.0) + 5 * (rounds.count(tiling) == 1))

    defines = lambda tokens, tiling: tiling.defines()  # noqa: E731
    made = tuning.Product("portable.cu", (8,), portable.neighbours, defines, multiply, taken)
    monkeypatch.setattr(tuning, "product_on", lambda device: made)
    monkeypatch.setattr(tuning, "card_at", lambda device: A10)
    monkeypatch.setattr(tuning, "graph_us", clock)
    monkeypatch.setattr(tuning, "CACHE_BYTES", 0)
    monkeypatch.setattr(nvrtc, "compile_ahead", lambda variants: None)
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    return made


@pytest.mark.parametrize(("us", "chosen"), [(9.0, FAST), (9.9, FIRST)])
def test_the_fastest_right_tiling_is_chosen_if_it_gains_enough(card, monkeypatch, us, chosen):
    """The default takes 10 us; a wrong product does not count, nor one that the card refuses."""
    monkeypatch.setitem(US, FAST, us)
    (row,) = tuning.measured(card, SMALL, CPU)
    assert (row["rows"], row["columns"], row["tokens"]) == PLACE
    assert (row["default"], row["choice"]) == (tuning.name_of(FIRST), tuning.name_of(chosen))
    assert row["us"] == {tuning.name_of(each): US.get(each, 11.0) for each in (FIRST, FAST, SLOW, *_)}


def test_gains_count_from_the_first_tiling_that_runs(card, monkeypatch):
    """The default's clusters may not fit a card. The second tiling then takes 9.1 us and the fastest 9.0."""
    monkeypatch.setitem(US, REFUSED, 9.1)
    first = tuning.name_of(REFUSED)
    monkeypatch.setitem(globals(), "REFUSED", FIRST)
    (row,) = tuning.measured(card, SMALL, CPU)
    assert tuning.name_of(FIRST) not in row["us"]
    assert row["default"] == row["choice"] == first


def test_an_engine_takes_what_was_measured_unless_it_is_deterministic(card, monkeypatch):
    monkeypatch.setattr(portable, "MEASURED", card.measured)
    table, path = tuning.tune([SMALL], CPU)
    assert path == tuning.table_file(A10)
    assert path.name == "tilings-nvidia-a10-72.json"
    tuning.take_(CPU, deterministic=False)
    assert portable.choose_tiling(64, 128, 5) == FAST
    assert portable.choose_tiling(72, 128, 5) == portable.default_tiling(72, 128, 5)
    assert (portable.SOURCE, FAST.defines()) in portable.variants(128)
    assert [line.split() for line in table.lines()[1:]] == [["64", "x", "128", "8", "10.00", "9.00", "10%"]]
    assert tuning.said_of(tuning.table_of(A10), (8, 6)) == f"those that `qerl tune` measured on {table.date}"
    tuning.take_(CPU, deterministic=True)
    assert card.measured == {}
    assert portable.choose_tiling(64, 128, 5) == FIRST


def test_a_second_model_is_added_to_the_file(card):
    tuning.tune([SMALL], CPU)
    tuning.tune([SMALL, ("down_proj", (32,), 64)], CPU)
    assert [(row["rows"], row["columns"]) for row in tuning.table_of(A10).measured] == [(64, 128), (32, 64)]


OTHER_CARD, OLD = "is of Card.*and this is", "other kernels than those of this qerl, from 20"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(({"card": "NVIDIA A40"}, OTHER_CARD), ({"processors": 84}, OTHER_CARD), ({"capability": [8, 9]}, OTHER_CARD)),
        *(
            ({"source": "0"}, OLD),
            ({"card": 5}, "it is of portable.cu on 5"),
            ({"kernel": "../x"}, "it is of ../x"),
            ({"more": 1}, "more"),
        ),
        *(({"capability": None}, "not iterable"), ({"measured": 3}, "not iterable"), ({"measured": [3]}, "subscript")),
        *(
            ({"row": {"tokens": 8.0}}, "tokens are"),
            ({"row": {"rows": -64}}, "are"),
            ({"row": {"us": {}}}, "not timed"),
        ),
        *(
            ({"row": {"tokens": 9}}, "not known"),
            ({"row": {"choice": "x", "default": "x", "us": {"x": 1}}}, "not known, x"),
        ),
        ({"row": {"us": {"x": "fast"}}}, "not timed"),
        ({"row": {"default": "x"}}, "x was not timed"),
    ],
)
def test_a_file_that_is_damaged_or_foreign_is_refused_with_one_line(card, caplog, change, said):
    _, path = tuning.tune([SMALL], CPU)
    value = json.loads(path.read_text())
    value["measured"][0] |= change.get("row", {})
    path.write_text(json.dumps({**value, **{key: new for key, new in change.items() if key != "row"}}))
    tuning.take_(CPU, deterministic=False)
    assert card.measured == {}
    (record,) = caplog.records[-1:]
    assert record.levelname == "WARNING"
    assert re.search(f"{said}.*measure again with `qerl tune`", record.getMessage())
    assert len(tuning.tune([SMALL], CPU)[0].measured) == 1  # measuring again mends it


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", "[" * 100000])
def test_what_is_no_table_is_refused(card, text):
    tuning.table_file(A10).write_text(text)
    with pytest.raises(ConfigError, match="is not a file of `qerl tune`"):
        tuning.table_of(A10)
    assert tuning.tables() == []


def test_a_card_or_linears_without_a_product_write_no_file(card, monkeypatch, tmp_path):
    with pytest.raises(EngineError, match=r"by none of these .* rollout\.kernel: marlin"):
        tuning.tune([("odd", (12,), 100)], CPU)
    monkeypatch.setattr(tuning, "product_on", lambda device: None)
    with pytest.raises(EngineError, match="no card here that runs them"):
        tuning.tune([SMALL], CPU)
    assert list(tmp_path.iterdir()) == []


SHAPES = ((4608, 3584), (37888, 3584), (3584, 18944), (64, 128))


def test_a_card_that_stands_in_for_another_is_not_measured(card, monkeypatch, tmp_path):
    monkeypatch.setenv("QERL_CAPABILITY", "8.0")
    with pytest.raises(EngineError, match="unset QERL_CAPABILITY"):
        tuning.tune([SMALL], CPU)
    assert list(tmp_path.iterdir()) == []


def test_neighbours_have_each_way_to_divide_rows():
    """Two slabs outside the loop too: a card with fewer processors than an H200 may need them for so many rows."""
    found = {(each.slabs, each.in_loop) for each in ways.neighbours(12288, 4096, 64)}
    assert found == {(1, True), (2, True), (2, False)}


def test_neighbours_fit_the_layout_and_the_work_space():
    """The first is the default, and no two are compiled alike."""
    for at in ((*shape, size) for shape in SHAPES for size in portable.STAGES):
        found = portable.neighbours(*at)
        assert found[0] == portable.default_tiling(*at)
        assert len({each.defines() for each in found}) == len(found) > 5
        for each in found:
            assert slab_layout.ROWS % each.rows == 0
            assert each.rows * each.tokens <= ways.MAX_SUMS
            assert min(each.stages, 32 * each.warps // (each.rows // 4) + 1) > 1  # a thread copies one piece of scales
            assert each.fits(*at, 96)
    for at in ((*shape, size) for shape in SHAPES for size in ways.TOKEN_TILES):
        found = ways.neighbours(*at)
        assert found[0] == ways.default_tiling(*at)
        assert len(set(found)) == len(found) > 2
        assert all(each.rows * at[2] <= ways.MAX_SUMS and each.stages > 2 for each in found)
