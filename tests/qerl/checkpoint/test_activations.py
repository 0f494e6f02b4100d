"""Folders whose linears round their input: how they are read, opened and checked, with transformers as the oracle."""

import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl import formats
from qerl.base.errors import CheckpointError, EngineError
from qerl.checkpoint.activations import read_activations
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.engine.transformers import engine as transformers_engine
from qerl.formats.linear import PackedLinear
from qerl.formats.nvfp4.activations import Activations
from tests.helpers.model_folders import edited, with_activations

OPTIONS = EngineOptions(engine="transformers")
PROMPTS, COMPLETIONS = [[5, 6, 7], [8, 9, 10, 11, 12]], [[13, 40], [5, 6, 7]]


@pytest.fixture(scope="module", params=["dynamic", "static"])
def folder(request, nvfp4_base, tmp_path_factory):
    return with_activations(nvfp4_base, request.param, tmp_path_factory.mktemp("w4a4") / request.param)


@pytest.fixture
def static(nvfp4_base, tmp_path):
    return with_activations(nvfp4_base, "static", tmp_path / "static")


def edit(folder, **changes):
    """Change tensors of the folder by name, dots written as two underscores; None drops one."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    edited(folder, lambda given: {name: each for name, each in (given | changes).items() if each is not None})


def logprobs_of(model):
    """The logprobs of COMPLETIONS by a model of transformers."""
    scores = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist())
    return scores


def test_an_engine_computes_with_rounded_activations(folder, nvfp4_base):
    engine, other = (open_engine(str(base), "nvfp4", OPTIONS) for base in (folder, nvfp4_base))
    assert engine.kernel.endswith(f", {folder.name} 4-bit activations")
    assert "activations" not in other.kernel
    rounded, plain = (torch.tensor(each.score(PROMPTS, COMPLETIONS)[1]) for each in (engine, other))
    assert (rounded - plain).abs().max() > 1e-3


def test_transformers_computes_the_same_from_a_folder_with_static_scales(static):
    """It decompresses the weights and rounds the input of each linear by compressed-tensors' own function."""
    logging.disable(logging.WARNING)
    try:
        stock = AutoModelForCausalLM.from_pretrained(static, dtype=torch.bfloat16)
        logprobs_of(stock)  # the first pass decompresses the weights, to bfloat16
    finally:
        logging.disable(logging.NOTSET)
    engine, stock = open_engine(str(static), "nvfp4", OPTIONS), torch.nn.Module.float(stock)
    for name, module in engine.policy_model().named_modules():
        if isinstance(module, PackedLinear):  # there it was rounded to bfloat16
            stock.get_submodule(name).weight.data = module.unpack(torch.float32)
    for score, expected in zip(engine.score(PROMPTS, COMPLETIONS), logprobs_of(stock), strict=True):
        assert score == pytest.approx(expected, abs=2e-5)


def test_linears_that_engines_fuse_get_their_largest_scale(static):
    edit(static, model__layers__1__self_attn__k_proj__input_global_scale=torch.tensor([512.0]))
    read = read_activations(static, formats.NVFP4)
    layer = "model.layers.1.self_attn"
    assert {read[f"{layer}.{name}_proj"] for name in "qkv"} == {Activations(512.0)}
    assert read[f"{layer}.o_proj"] == Activations(401.0)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, r"static scales .*o_proj has no input_global_scale \(1 linears lack it\)"),
        (torch.tensor([float("nan")]), r"holds \[nan\], and must be one positive number"),
        (torch.tensor([0.0]), r"holds \[0.0\]"),
        (torch.ones(2), r"holds \[1.0, 1.0\]"),
        ("weights only", r"no place for.*input_global_scale"),
    ],
)
def test_damaged_scales_and_those_that_the_config_does_not_have_are_refused(static, value, says):
    if isinstance(value, str):
        config = json.loads((static / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
        (static / "config.json").write_text(json.dumps(config))
    else:
        edit(static, model__layers__0__self_attn__o_proj__input_global_scale=value)
    with pytest.raises(CheckpointError, match=says):
        open_engine(str(static), "nvfp4", OPTIONS)


def test_an_engine_that_would_serve_16_bit_activations_does_not_open(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("qerl.model.lora.input_of", lambda x, parts: x)
        with pytest.raises(EngineError, match=r"does not compute with activations in 4 bits, as its config\.json says"):
            open_engine(str(folder), "nvfp4", OPTIONS)
    load = transformers_engine.load_model

    def without_activations(*given):
        model = load(*given)
        for module in model.modules():
            if isinstance(module, PackedLinear):
                module.activations = None
        return model

    monkeypatch.setattr(transformers_engine, "load_model", without_activations)
    with pytest.raises(EngineError, match=r"rounds its input as None, not as Activations"):
        open_engine(str(folder), "nvfp4", OPTIONS)
