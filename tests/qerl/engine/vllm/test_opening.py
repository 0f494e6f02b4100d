"""The vllm engine before and while it opens: what it refuses, which kernel it takes, and how the start is timed.

If memory runs out, the error names keys of a recipe. The original texts are those of vLLM 0.25 and torch.
"""

import importlib.util
import sys
import time
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bench_startup import ratios
from transformers import AutoConfig

from qerl.base.errors import EngineError, MissingExtraError
from qerl.engine.options import EngineOptions
from qerl.engine.vllm import opening
from qerl.engine.vllm.engine import VLLMEngine
from qerl.engine.vllm.opening import Parts, cannot_open, capture_sizes, line, whole
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
        opening.choose_kernel("cutlass", "nvfp4")


@pytest.mark.parametrize(
    ("ours", "asked", "chosen", "backend"),
    [
        (True, "auto", "qerl", "marlin"),
        (True, "qerl", "qerl", "marlin"),
        (True, "humming", "humming", "humming"),
        (True, "marlin", "marlin", "marlin"),
        (False, "auto", "marlin", "marlin"),
        (False, "humming", "humming", "humming"),
    ],
)
def test_our_kernel_is_the_default_where_it_runs(monkeypatch, ours, asked, chosen, backend):
    on_card(monkeypatch, ours)
    assert opening.choose_kernel(asked, "nvfp4") == chosen
    assert opening.linear_backend(chosen) == backend
    assert opening.linear_backend(opening.choose_kernel("auto", "bf16")) == "auto"


def test_our_kernel_is_refused_on_other_cards(monkeypatch):
    on_card(monkeypatch, ours=False)
    with pytest.raises(
        EngineError, match=r"needs a card from Ampere on .* not NVIDIA A100: write rollout\.kernel=auto, humming"
    ):
        opening.choose_kernel("qerl", "nvfp4")


def test_for_a_missing_humming_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(opening, "has_module", lambda name: False)
    with pytest.raises(MissingExtraError, match="humming-kernels"):
        opening.choose_kernel("humming", "nvfp4")


SHAPES = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}


def begun(monkeypatch, kernel, max_rank, hopper=True, **shapes):
    """The kernels that are compiled before vLLM is imported, for a model with these shapes."""
    seen = []
    monkeypatch.setattr(nvrtc, "has_kernels", lambda device: hopper)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvrtc, "compile_ahead", seen.extend)
    config = AutoConfig.for_model("qwen2", vocab_size=64, num_hidden_layers=1, **shapes)
    settings = SimpleNamespace(config=config, base="model", options=EngineOptions(max_rank=max_rank))
    opening.compile_ahead(settings, kernel)
    return seen


def test_our_kernels_are_compiled_ahead_for_each_width_of_the_model(monkeypatch):
    """There are 3584 and 18944 columns. For the longer rows, 64 tokens and more have kernels of their own. Attention is
    compiled for few and for many heads."""
    seen = begun(monkeypatch, "qerl", 32, **SHAPES)
    count = Counter(source for source, _ in set(seen))
    assert count == {"gemm.cu": 8 + 3 + 5, "shrink.cu": 2 + 2, "decode_slabs.cu": 1, "attend.cu": 2}
    assert set(begun(monkeypatch, "qerl", 0, **SHAPES)) == {each for each in seen if each[0] != "shrink.cu"}
    short = begun(monkeypatch, "qerl", 32, **{**SHAPES, "intermediate_size": 4864})
    expected = {"gemm.cu": 8 + 3, "shrink.cu": 2, "decode_slabs.cu": 1, "attend.cu": 2}
    assert Counter(source for source, _ in set(short)) == expected
    other = begun(monkeypatch, "qerl", 32, hopper=False, **SHAPES)  # nine sizes; two have one for few rows
    assert Counter(source for source, _ in set(other)) == {"portable.cu": 11 + 5, "decode_slabs.cu": 1}
    odd = begun(monkeypatch, "qerl", 32, **SHAPES, head_dim=80)  # FlashAttention does all of this size
    assert "attend.cu" not in {source for source, _ in odd}


@pytest.mark.parametrize("kernel", ["", "marlin", "humming"])
def test_nothing_is_compiled_ahead_for_another_kernel(monkeypatch, kernel):
    assert begun(monkeypatch, kernel, 32, **SHAPES) == []


def test_for_a_model_of_unknown_shapes_kernels_are_compiled_when_it_is_loaded(monkeypatch):
    monkeypatch.setattr(nvrtc, "compile_ahead", pytest.fail)
    config = SimpleNamespace(to_dict=lambda: {"hidden_size": 64})
    opening.compile_ahead(SimpleNamespace(config=config, base="model"), "qerl")


def on_card(monkeypatch, ours):
    """A card with the properties that the choice depends on, and Humming installed."""
    monkeypatch.setattr(nvrtc, "has_portable_kernels", lambda device: ours)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(opening, "has_module", lambda name: True)


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


LONG = (
    "To serve at least one request with the models's max seq len (9217), (0.49 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (0.21 GiB). Based on the available memory, the estimated maximum model length "
    "is 3920. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
NONE_LEFT = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing."
SHARED = (
    "Free memory on device cuda:0 (10.5/79.2 GiB) on startup is less than desired GPU memory utilization (0.9, 71.3 "
    "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
SPENT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. GPU 0 has 3 MiB free.\nSee the manual")


@pytest.mark.parametrize(
    ("error", "cap_gib", "words"),
    [
        (ValueError(LONG), None, "lower rollout.max_new_tokens, or change rollout.memory or memory.cap_gib ("),
        (ValueError(LONG), 12.0, "the estimated maximum model length is 3920)"),
        (ValueError(NONE_LEFT), None, "one sequence of 9217 tokens"),
        (ValueError(NONE_LEFT), 12.0, "(No available memory for the cache blocks)"),
        (ValueError(SHARED), None, "end what else runs there (nvidia-smi), lower"),
        (ValueError(SHARED), 24.0, "rollout.memory or memory.cap_gib (Free memory on device cuda:0 (10.5/"),
        (SPENT, None, "opening models/seven ran out of GPU memory: lower rollout.memory, or raise memory.cap_gib ("),
        (SPENT, 24.0, "3 MiB free.)"),
        (
            ValueError("rope_scaling is odd. Try again"),
            None,
            "cannot open models/seven: rope_scaling is odd. Try again",
        ),
    ],
)
def test_the_error_names_our_keys(error, cap_gib, words):
    settings = SimpleNamespace(base="models/seven", options=EngineOptions(cap_gib=cap_gib), model_len=9217)
    made = cannot_open(settings, error)
    assert isinstance(made, EngineError)
    assert words in str(made)
    for name in ("gpu_memory_utilization", "max_model_len", "Decrease"):
        assert name not in str(made)


def test_parts_add_up_and_the_rest_is_named(monkeypatch):
    times = iter([0.0, 2.0, 2.5, 5.5, 6.0, 7.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    parts = Parts()
    for name in ("imports", "weights", "imports"):
        with parts.part(name):
            pass
    assert parts.seconds == {"imports": 3.0, "weights": 3.0}
    assert list(parts.seconds) == ["imports", "weights"]
    seconds = whole(10.0, parts.seconds, {"profile": 1.25})
    assert seconds == {"imports": 3.0, "weights": 3.0, "profile": 1.25, "rest": 2.75}
    assert line({**seconds, "device": 0.04}) == "imports 3.0, weights 3.0, profile 1.2, rest 2.8"


def test_a_part_that_fails_is_timed():
    parts = Parts()
    with pytest.raises(KeyError), parts.part("weights"):
        raise KeyError
    assert "weights" in parts.seconds


@pytest.mark.parametrize("sequences", [1, 3, 8, 100, 128, 256, 600])
def test_every_batch_has_a_graph_and_pads_little(sequences):
    sizes = capture_sizes(sequences)
    assert sizes[0] == 1
    assert sizes == sorted(set(sizes))
    assert sequences in sizes or sequences > 512
    assert sizes[-1] <= min(512, 2 * sequences)
    for tokens in range(1, min(sequences, 256) + 1):
        padded = next(size for size in sizes if size >= tokens)
        assert padded - tokens <= (4 if tokens <= 8 else 7 if tokens <= 48 else 15)


def test_no_graph_has_the_56_tokens_at_which_humming_is_wrong():
    assert 56 not in capture_sizes(128)


def test_there_are_about_half_as_many_graphs_as_in_vllm():
    vllm = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert len(capture_sizes(256)) <= 0.55 * len(vllm)


def test_the_ratio_is_the_first_over_the_last():
    starts = [
        {"process_s": 100.0, "startup_s": {"imports": 10.0, "weights": 70.0}},
        {"process_s": 50.0, "startup_s": {"imports": 10.0, "weights": 22.0}},
    ]
    assert ratios(starts) == {"engine_first_over_last": 2.5, "process_first_over_last": 2.0}


def test_graphs_stop_at_attention_only_if_vllm_reads_that_it_is_asked_to(monkeypatch):
    """vLLM decides when it is imported. A graph that went on would keep the attention of the batch it was made with."""
    attention = "vllm.model_executor.layers.attention.attention"
    monkeypatch.delenv(opening.BREAKABLE, raising=False)
    monkeypatch.setitem(sys.modules, opening.BREAKS, ModuleType(opening.BREAKS))
    opening.set_environment_()
    assert opening.graphs_of_steps() == "FULL_DECODE_ONLY"
    monkeypatch.delitem(sys.modules, opening.BREAKS)
    opening.set_environment_()
    assert opening.graphs_of_steps() == "FULL_AND_PIECEWISE"
    undecorated = SimpleNamespace(unified_attention_with_output=lambda: None)  # and the variable was set too late
    monkeypatch.setitem(sys.modules, attention, undecorated)
    assert opening.graphs_of_steps() == "FULL_DECODE_ONLY"
