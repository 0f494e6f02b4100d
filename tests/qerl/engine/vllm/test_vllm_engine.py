"""The vllm engine before it opens: what it refuses, which kernel it takes, and what it compiles ahead."""

import importlib.util
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from qerl.base.errors import EngineError, MissingExtraError
from qerl.engine.options import EngineOptions
from qerl.engine.vllm import kernel_choice, opening
from qerl.engine.vllm.engine import VLLMEngine
from qerl.formats.cuda import nvrtc

HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.mark.skipif(HAS_VLLM, reason="vllm is installed here")
def test_without_vllm_the_extra_is_named():
    with pytest.raises(MissingExtraError, match=r"qerl\[gpu\]"):
        VLLMEngine("tiny", "nvfp4", EngineOptions())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_other_engine_is_named():
    with pytest.raises(EngineError, match=r"rollout.engine=transformers"):
        opening.check_device("auto")


def test_an_unknown_kernel_is_refused():
    with pytest.raises(EngineError, match="auto, qerl, humming or marlin"):
        kernel_choice.choose_kernel("cutlass", "nvfp4")


@pytest.mark.parametrize(
    ("hopper", "asked", "chosen", "backend"),
    [
        (True, "auto", "qerl", "marlin"),
        (True, "qerl", "qerl", "marlin"),
        (True, "humming", "humming", "humming"),
        (True, "marlin", "marlin", "marlin"),
        (False, "auto", "marlin", "marlin"),
        (False, "humming", "humming", "humming"),
    ],
)
def test_our_kernel_is_the_default_where_it_runs(monkeypatch, hopper, asked, chosen, backend):
    on_card(monkeypatch, hopper)
    assert kernel_choice.choose_kernel(asked, "nvfp4") == chosen
    assert kernel_choice.linear_backend(chosen) == backend
    assert kernel_choice.linear_backend(kernel_choice.choose_kernel("auto", "bf16")) == "auto"


def test_our_kernel_is_refused_on_other_cards(monkeypatch):
    on_card(monkeypatch, hopper=False)
    with pytest.raises(
        EngineError, match=r"needs a Hopper card .* not NVIDIA A100: write rollout\.kernel=auto, humming"
    ):
        kernel_choice.choose_kernel("qerl", "nvfp4")


def test_for_a_missing_humming_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(kernel_choice, "has_module", lambda name: False)
    with pytest.raises(MissingExtraError, match="humming-kernels"):
        kernel_choice.choose_kernel("humming", "nvfp4")


SHAPES = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}


def begun(monkeypatch, kernel, max_rank, **shapes):
    """The kernels that are compiled before vLLM is imported, for a model with these shapes."""
    seen = []
    monkeypatch.setattr(nvrtc, "compile_ahead", seen.extend)
    config = AutoConfig.for_model("qwen2", vocab_size=64, num_hidden_layers=1, **shapes)
    settings = SimpleNamespace(config=config, base="model", options=EngineOptions(max_rank=max_rank))
    kernel_choice.compile_ahead(settings, kernel)
    return seen


def test_our_kernels_are_compiled_ahead_for_each_width_of_the_model(monkeypatch):
    """There are 3584 and 18944 columns. For the longer rows, 64 tokens and more have kernels of their own. Attention is
    compiled for few and for many heads."""
    seen = begun(monkeypatch, "qerl", 32, **SHAPES)
    count = Counter(source for source, _ in set(seen))
    assert count == {"gemm.cu": 8 + 5, "shrink.cu": 2 + 2, "decode_slabs.cu": 1, "attend.cu": 2}
    assert set(begun(monkeypatch, "qerl", 0, **SHAPES)) == {each for each in seen if each[0] != "shrink.cu"}
    short = begun(monkeypatch, "qerl", 32, **{**SHAPES, "intermediate_size": 4864})
    expected = {"gemm.cu": 8, "shrink.cu": 2, "decode_slabs.cu": 1, "attend.cu": 2}
    assert Counter(source for source, _ in set(short)) == expected
    odd = begun(monkeypatch, "qerl", 32, **SHAPES, head_dim=80)  # FlashAttention does all of this size
    assert "attend.cu" not in {source for source, _ in odd}


@pytest.mark.parametrize("kernel", ["", "marlin", "humming"])
def test_nothing_is_compiled_ahead_for_another_kernel(monkeypatch, kernel):
    assert begun(monkeypatch, kernel, 32, **SHAPES) == []


def test_for_a_model_of_unknown_shapes_kernels_are_compiled_when_it_is_loaded(monkeypatch):
    monkeypatch.setattr(nvrtc, "compile_ahead", pytest.fail)
    config = SimpleNamespace(to_dict=lambda: {"hidden_size": 64})
    kernel_choice.compile_ahead(SimpleNamespace(config=config, base="model"), "qerl")


def on_card(monkeypatch, hopper):
    """A card with the properties that the choice depends on, and Humming installed."""
    monkeypatch.setattr(nvrtc, "has_kernels", lambda device: hopper)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(kernel_choice, "has_module", lambda name: True)


def test_a_kv_cache_type_that_the_card_lacks_is_refused(monkeypatch):
    with pytest.raises(EngineError, match="write auto, fp8, fp8_per_token_head"):
        opening.check_kv_cache_dtype("fp4")
    opening.check_kv_cache_dtype("auto")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(EngineError, match=r"A100 has \(8, 0\): write rollout\.kv_cache_dtype: auto"):
        opening.check_kv_cache_dtype("fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    opening.check_kv_cache_dtype("fp8_per_token_head")
