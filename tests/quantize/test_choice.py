"""What `qerl quantize` chooses for a model: by its size, the device, and what was asked for."""

import logging
from dataclasses import replace

import pytest
import torch

from qerl.checkpoint.source import read_source
from quantize import run as module
from quantize.options import QuantizeOptions
from quantize.run import ON_CARD, Choice, choose, estimate_s
from tests.helpers.checkpoint_factory import EXPERTS, fake_checkpoint, layout_tensors

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


def test_the_estimate_grows_with_weights_and_tokens(medium):
    """Two layers of a model of width h: q, o (h, h), k, v (h/2, h), gate, up (7h/4, h), down (h, 7h/4)."""
    h, options = 6144, replace(QuantizeOptions("search"), calibration_size=10, sequence_length=100)
    weights = 2 * h * h * (1 + 1 + 0.5 + 0.5 + 3 * 1.75)
    assert estimate_s(medium, Choice(options, 0)) == pytest.approx(module.CPU_S * 1000 * weights / 2)
    assert estimate_s(medium, Choice(options, 5)) == pytest.approx(module.CPU_S * 1500 * weights / 2)


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
    options = replace(QuantizeOptions("rtn"), calibration_size=1, sequence_length=1000)
    attention, mlp = 2 * (64 * 64 * 2 + 32 * 64 * 2), 2 * 4 * 3 * 48 * 64 / 2  # two of four experts
    assert estimate_s(source, Choice(options, 0)) == pytest.approx(module.CPU_S * 1000 * (attention + mlp) / 2)
