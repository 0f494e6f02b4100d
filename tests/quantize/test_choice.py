"""What `qerl quantize` chooses for a model: by its size, the device, and what was asked for."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qerl.checkpoint.source import read_source
from qerl.plan.sizes import KNOWN, sizes_of
from quantize import run as module
from quantize.options import QuantizeOptions
from quantize.run import ON_CARD, Choice, choose, estimate_s
from tests.helpers.checkpoint_factory import EXPERTS, fake_checkpoint, layout_tensors

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
CARD = torch.device("cuda")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def model(folder, width=64, layers=2, **config):
    """Headers of a model; a file of zeros stands for its weights, so its sizes are changed in memory alone."""
    source = read_source(str(fake_checkpoint(folder)))
    sizes = {name: tuple(side * width // 64 for side in info.shape) for name, info in source.tensors.items()}
    tensors = {name: replace(info, shape=sizes[name]) for name, info in source.tensors.items()}
    return replace(source, tensors=tensors, config={**source.config, **config})


@pytest.fixture
def small(tmp_path):
    return model(tmp_path / "small")


@pytest.fixture
def medium(tmp_path):
    """About the size of a model of half a billion weights."""
    return model(tmp_path / "medium", width=4096 + 2048)


@pytest.fixture
def large(tmp_path):
    return model(tmp_path / "large", width=32768)


def chosen(source, device=CPU, **values):
    return choose(source, QuantizeOptions(**values).chosen(), device)


def facts(found):
    options = found.options
    return options.method, options.calibration_size, options.sequence_length, found.held_out, options.start_rank


def test_on_a_card_everything_is_done(small, large):
    for source, rank in ((small, 32), (large, 64)):
        assert facts(chosen(source, CARD)) == ("search_gptq", *ON_CARD, rank)


def test_on_a_cpu_a_small_model_gets_everything_and_a_larger_one_less(small, medium, large, caplog):
    caplog.set_level(logging.WARNING)
    assert facts(chosen(small)) == ("search_gptq", 64, 256, 16, 32)
    assert caplog.text == ""
    assert facts(chosen(medium)) == ("search", 16, 256, 4, 64)
    assert "under a few rows" in caplog.text
    assert "`--method search_gptq` does it all the same" in caplog.text
    caplog.clear()
    found = chosen(large)
    assert (found.options.method, found.options.has_rows, found.held_out, found.options.start_rank) == (
        "search", False, 0, 0,
    )  # fmt: skip
    assert "searched without rows" in caplog.text


def test_what_is_asked_for_is_done_however_long_it_takes(large, caplog):
    caplog.set_level(logging.WARNING)
    assert chosen(large, calibration="rows.jsonl").options.method == "search_gptq"
    assert facts(chosen(large, method="search_gptq")) == ("search_gptq", 64, 256, 16, 64)
    assert facts(chosen(large, start_rank=8)) == ("search_gptq", 64, 256, 16, 8)
    assert facts(chosen(large, calibration_size=3)) == ("search_gptq", 3, 256, 16, 64)
    assert chosen(large, method="search", sequence_length=100).options.sequence_length == 100
    assert caplog.text == ""


def test_a_method_without_data_loses_its_start_where_rows_would_take_too_long(large, caplog):
    caplog.set_level(logging.WARNING)
    found = chosen(large, method="rtn")
    assert (found.options.method, found.options.has_rows, found.options.start_rank) == ("rtn", False, 0)
    assert "`--method rtn --calibration mixed` does it all the same" in caplog.text


def test_without_rows_scales_are_searched(small):
    for device in (CPU, CARD):
        found = chosen(small, device, calibration="none")
        assert (found.options.method, found.held_out, found.options.start_rank) == ("search", 0, 0)
    assert chosen(small, calibration="none", method="rtn").options.method == "rtn"


def test_eight_bits_are_as_before(small):
    found = chosen(small, scheme="fp8_block")
    assert (found.options.method, found.options.has_rows, found.options.start_rank) == ("rtn", False, 0)
    found = chosen(small, scheme="fp8_block", calibration="rows.jsonl")
    assert (found.options.method, found.options.has_rows, found.held_out) == ("rtn", True, 16)


def test_sequences_are_not_longer_than_the_models_positions(tmp_path):
    short = model(tmp_path / "short", max_position_embeddings=100)
    assert chosen(short, CARD).options.sequence_length == 100


def test_the_estimate_counts_products_as_by_hand(medium):
    """Two layers of a model of width h: q, o (h, h), k, v (h/2, h), gate, up (7h/4, h), down (h, 7h/4)."""
    h, tokens, held = 6144, 1000, 0
    options = replace(QuantizeOptions("search"), calibration_size=10, sequence_length=100, start_rank=0)
    weights = 2 * h * h * (1 + 1 + 0.5 + 0.5 + 3 * 1.75)
    squares = 2 * h * h * (3 + 1.75**2)
    by_hand = 2 * tokens * (weights + squares) / (module.FLOPS_PER_THREAD * 2) + module.SEARCH_S * weights / 2
    assert estimate_s(medium, Choice(options, held)) == pytest.approx(by_hand, rel=1e-6)
    more = estimate_s(medium, Choice(replace(options, method="search_gptq"), held))
    started = estimate_s(medium, Choice(replace(options, start_rank=64), held))
    measured = estimate_s(medium, Choice(options, 16))
    assert min(more, started, measured) > by_hand


def test_an_experts_linears_see_their_share_of_the_tokens(tmp_path):
    experts = {"model_type": "qwen3_moe", "hidden_size": 64, **EXPERTS["qwen3_moe"]}
    tensors = {name: info for name, info in layout_tensors().items() if ".mlp." not in name}
    for layer in range(2):
        inside = f"model.layers.{layer}.mlp"
        tensors[f"{inside}.gate.weight"] = ("BF16", (4, 64))
        for expert in range(4):
            for name, shape in (("gate_proj", (48, 64)), ("up_proj", (48, 64)), ("down_proj", (64, 48))):
                tensors[f"{inside}.experts.{expert}.{name}.weight"] = ("BF16", shape)
    source = read_source(str(fake_checkpoint(tmp_path / "moe", tensors, **experts)))
    found = choose(source, QuantizeOptions().chosen(), CPU)
    assert (found.options.global_scale, found.options.start_rank) == ("pow2", 32)
    options = replace(QuantizeOptions("rtn"), calibration_size=1, sequence_length=1000, start_rank=1)
    attention, mlp = 2 * (64 * 64 * 2 + 32 * 64 * 2), 2 * 4 * 3 * 48 * 64 / 2
    squares = 2 * (2 * 64**2) + 2 * 4 * (64**2 + 48**2) / 2
    factors = 4 * 2 * 17 * 2 * (2 * 2 * (64 * 64 + 32 * 64) + 4 * 64**2)
    by_hand = (2 * 1000 * (attention + mlp + squares) + factors) / (module.FLOPS_PER_THREAD * 2)
    assert estimate_s(source, Choice(options, 0)) == pytest.approx(by_hand, rel=1e-6)
    assert math.isfinite(by_hand)


@pytest.mark.parametrize("size", ["7b", "32b"])
def test_the_cost_on_a_card_is_within_a_tenth_of_what_was_measured(tmp_path, size):
    measured = json.loads((ROOT / "benchmarks" / "quantization" / f"quantize-{size}.json").read_text())
    sizes = sizes_of(KNOWN[f"qwen2.5-{size}"], size)
    folder = fake_checkpoint(tmp_path / size, layout_tensors(sizes.layers), num_hidden_layers=sizes.layers)
    source = read_source(str(folder))
    outside = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (sizes.vocabulary, sizes.hidden))

    def of(name, info):
        shape = outside.get(name) or sizes.projections.get(name.split(".")[-2], info.shape)
        return replace(info, shape=shape, nbytes=2 * math.prod(shape))

    source = replace(source, tensors={name: of(name, info) for name, info in source.tensors.items()})
    cost = module.card_cost(source, measured["runs"][0]["calibration"]["tokens"])
    assert cost.seconds == pytest.approx(measured["whole_s"], rel=0.1)
    assert cost.nbytes / 2**30 == pytest.approx(measured["runs"][0]["peak_gib"], rel=0.1)
