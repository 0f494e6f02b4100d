"""The vllm engine before and while it opens: what it refuses (also by a checkpoint's headers and global scales), which
kernel it takes, and how the start is timed.

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
from safetensors.torch import save_file
from transformers import AutoConfig

from qerl.base.errors import CheckpointError, EngineError, MissingExtraError
from qerl.engine.options import EngineOptions
from qerl.engine.vllm import opening
from qerl.engine.vllm.engine import VLLMEngine
from qerl.engine.vllm.opening import Parts, cannot_open, capture_sizes, check_folder, line, whole
from qerl.formats import NVFP4
from qerl.formats.cuda import nvrtc
from qerl.formats.nvfp4 import tuning
from qerl.plan.sizes import KNOWN

HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.mark.skipif(HAS_VLLM, reason="vllm is installed here")
def test_without_vllm_the_extra_is_named():
    with pytest.raises(MissingExtraError, match=r"qerl\[gpu\]"):
        VLLMEngine("tiny", "nvfp4", EngineOptions())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_other_engine_is_named():
    with pytest.raises(EngineError, match=r"rollout.engine=transformers"):
        opening.check_device("auto")


def on_card(monkeypatch, ours):
    """A card with the properties that the choice depends on, and Humming installed."""
    monkeypatch.setattr(nvrtc, "has_portable_kernels", lambda device: ours)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(opening, "has_module", lambda name: True)


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


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ("cutlass", EngineError, "auto, qerl, humming or marlin"),
        ("qerl", EngineError, r"needs a card from Ampere on .* not NVIDIA A100: write rollout\.kernel=auto, humming"),
        ("humming", MissingExtraError, "humming-kernels"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(monkeypatch, asked, error, said):
    on_card(monkeypatch, ours=False)
    monkeypatch.setattr(opening, "has_module", lambda name: False)
    with pytest.raises(error, match=said):
        opening.choose_kernel(asked, "nvfp4")


SHAPES = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}


def begun(monkeypatch, kernel, max_rank, hopper=True, config=None, **shapes):
    """The kernels that are compiled before vLLM is imported, for a model with these shapes."""
    seen = []
    monkeypatch.setattr(tuning, "take_", lambda device, deterministic: None)
    monkeypatch.setattr(nvrtc, "has_kernels", lambda device: hopper)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvrtc, "compile_ahead", seen.extend)
    config = config or AutoConfig.for_model("qwen2", vocab_size=64, num_hidden_layers=1, **shapes)
    settings = SimpleNamespace(config=config, base="model", options=EngineOptions(max_rank=max_rank))
    opening.compile_ahead(settings, kernel)
    return seen


def test_our_kernels_are_compiled_ahead_for_each_width_of_the_model(monkeypatch):
    """Up to 128 tokens q/k/v and o have clusters of 3 and of 4 blocks; gate, up and down share the kernels of 8 to 32
    tokens, and from 64 on down has longer rows. 192 and 256 tokens have two each, by length and number of the rows.
    Attention is compiled for few and for many heads."""
    seen = begun(monkeypatch, "qerl", 32, **SHAPES)
    count = Counter(source for source, _ in set(seen))
    assert count == {"gemm.cu": 6 + 6 + 3 + 3 + 3 + 2 + 2, "shrink.cu": 2 + 2, "decode_slabs.cu": 1, "attend.cu": 2}
    assert set(begun(monkeypatch, "qerl", 0, **SHAPES)) == {each for each in seen if each[0] != "shrink.cu"}
    short = begun(monkeypatch, "qerl", 32, **{**SHAPES, "intermediate_size": 4864})  # down is as o
    expected = {"gemm.cu": 6 + 6 + 3 + 3 + 1 + 2, "shrink.cu": 2, "decode_slabs.cu": 1, "attend.cu": 2}
    assert Counter(source for source, _ in set(short)) == expected
    other = begun(monkeypatch, "qerl", 32, hopper=False, **SHAPES)  # nine sizes; two have one for few rows
    assert Counter(source for source, _ in set(other)) == {"portable.cu": 11 + 5, "decode_slabs.cu": 1, "attend.cu": 2}
    assert not {each for each in other if each[0] == "attend.cu"} & set(seen)  # its work is divided otherwise
    odd = begun(monkeypatch, "qerl", 32, **SHAPES, head_dim=80)  # FlashAttention does all of this size
    assert "attend.cu" not in {source for source, _ in odd}
    for kernel in ("", "marlin", "humming"):
        assert begun(monkeypatch, kernel, 32, **SHAPES) == []
    unknown = SimpleNamespace(to_dict=lambda: {"hidden_size": 64})  # its kernels are compiled when it is loaded
    assert begun(monkeypatch, "qerl", 32, config=unknown) == []


OWN = {"attention_config": {"backend": "CUSTOM"}}
OWN_WITH_2 = {"attention_config": {"backend": "CUSTOM", "flash_attn_version": 2}}


@pytest.mark.parametrize(
    ("capability", "kernel", "cache", "of", "expected"),
    [
        *(((9, 0), kernel, "auto", {}, OWN) for kernel in ("qerl", "marlin", "")),
        *((each, "qerl", "auto", {}, OWN_WITH_2) for each in ((8, 0), (8, 6), (8, 9), (12, 0))),
        ((8, 6), "", "auto", {}, {}),  # weights in 16 bits
        ((8, 6), "marlin", "auto", {}, {}),
        ((8, 9), "qerl", "auto", {"asked": "auto"}, OWN_WITH_2),
        ((8, 9), "qerl", "fp8", {"asked": "auto"}, {}),
        ((9, 0), "qerl", "fp8", {"asked": "auto"}, OWN),
        ((8, 9), "qerl", "fp8", {}, OWN_WITH_2),
        ((8, 9), "qerl", "fp8", {"sliding_window": 48}, {}),
        ((8, 9), "qerl", "fp8", {"num_attention_heads": 40}, {}),
        ((8, 9), "qerl", "fp8", {"head_dim": 96}, {}),
        ((8, 9), "qerl", "auto", {"sliding_window": 48}, OWN_WITH_2),
        ((9, 0), "qerl", "fp8", {"sliding_window": 48}, OWN),
        ((8, 9), "qerl", "fp8_per_token_head", {}, {}),
        ((10, 0), "qerl", "auto", {}, {}),
        ((7, 5), "", "auto", {}, {}),
        ((9, 0), "qerl", "auto", {"linear": (0,)}, {}),
    ],
)
def test_on_which_cards_our_kernel_attends(monkeypatch, capability, kernel, cache, of, expected):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvrtc, "capability", lambda device: capability)
    monkeypatch.setattr(nvrtc, "has_kernels", lambda device: capability == (9, 0))
    monkeypatch.setattr(nvrtc, "has_portable_kernels", lambda device: capability >= (8, 0))
    monkeypatch.delenv("QERL_CAPABILITY", raising=False)
    config = SimpleNamespace(**{**SHAPES, "sliding_window": None, **of})
    decoder = SimpleNamespace(linear=of.get("linear", ()), full=())
    options = EngineOptions(kernel=of.get("asked", "qerl"), kv_cache_dtype=cache)
    settings = SimpleNamespace(decoder=decoder, options=options, config=config)
    assert opening.attention_config(settings, kernel) == expected


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
        (ValueError("rope is odd. Try again"), None, "cannot open models/seven: rope is odd. Try again"),
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
    """A part that fails is timed too."""
    times = iter([0.0, 2.0, 2.5, 5.5, 6.0, 7.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    parts = Parts()
    for name in ("imports", "weights", "imports"):
        with pytest.raises(KeyError), parts.part(name):
            raise KeyError
    assert list(parts.seconds.items()) == [("imports", 3.0), ("weights", 3.0)]
    seconds = whole(10.0, parts.seconds, {"profile": 1.25})
    assert seconds == {"imports": 3.0, "weights": 3.0, "profile": 1.25, "rest": 2.75}
    assert line({**seconds, "device": 0.04}) == "imports 3.0, weights 3.0, profile 1.2, rest 2.8"


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
    assert 56 not in sizes  # at which Humming is wrong
    assert len(sizes) <= 28  # vLLM has 51


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


def write(folder, **linears):
    """Write an NVFP4 checkpoint of one layer; name -> (rows, columns, global scale)."""
    tensors = {}
    for name, (rows, columns, scale) in linears.items():
        module = f"model.layers.0.{name.replace('__', '.')}"
        tensors[f"{module}.weight_packed"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        tensors[f"{module}.weight_scale"] = torch.zeros(rows, columns // 16, dtype=torch.float8_e4m3fn)
        tensors[f"{module}.weight_global_scale"] = torch.tensor([scale])
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_what_qerl_quantize_writes_is_taken(nvfp4_base):
    for kernel in ("qerl", "humming", "marlin"):
        check_folder(nvfp4_base, NVFP4, kernel)


def test_fused_linears_with_different_global_scales_are_named(tmp_path):
    scales = {"q": 3.0, "k": 3.0, "v": 3.5, "o": 9.0}
    folder = write(tmp_path, **{f"self_attn__{name}_proj": (64, 64, scale) for name, scale in scales.items()})
    with pytest.raises(EngineError, match=r"0\.self_attn\.k_proj, .*q_proj, .*v_proj .*3\.0, 3\.5.* `qerl quantize`"):
        check_folder(folder, NVFP4, "marlin")


def test_a_shape_that_our_kernel_does_not_support_is_refused_for_that_kernel_only(tmp_path):
    """gate/up are one product with all their rows. Its 32 rows are a multiple of 8, the 12 of down_proj are not."""
    fused = {"mlp__gate_proj": (20, 64, 5.0), "mlp__up_proj": (12, 64, 5.0)}
    folder = write(tmp_path, **fused)
    check_folder(folder, NVFP4, "qerl")
    write(tmp_path, **fused, mlp__down_proj=(12, 64, 7.0))
    with pytest.raises(EngineError, match=r"mlp\.down_proj is 12 x 64, .* write rollout\.kernel=humming or marlin"):
        check_folder(folder, NVFP4, "qerl")
    check_folder(folder, NVFP4, "marlin")


def test_beside_states_fewer_sequences_run_at_once_with_16_bit_keys_and_without_a_prefix_cache(tmp_path):
    """27B shape: a block is 784 tokens of 64 KiB, and a sequence has four at least, three of which are its states.

    A layer's states of one sequence are 1.5 MiB in 16 bits; a prefill has them twice in float32 and once or more as a
    chunk."""
    sizes = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4}
    states = {"linear_num_value_heads": 48, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "head_dim": 256}
    config = AutoConfig.for_model("qwen3_5_text", **sizes, **states, linear_value_head_dim=128, intermediate_size=17408)
    config.save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.zeros(1, 1)}, tmp_path / "model.safetensors")
    settings = opening.Settings(str(tmp_path), "bf16", EngineOptions(memory=30, max_context=1000))
    arguments = settings.memory_arguments(80 * 2**30)
    chunk = 3 * 2**19
    each = 4 * 784 * 64 * 2**10 + (2 * 2 + 1) * chunk
    assert arguments["max_num_seqs"] == (27 * 2**30 - 128 * chunk) // each  # of 30 GiB 3 are for work and graphs
    kept = (128 + 5 * arguments["max_num_seqs"]) * chunk
    assert arguments["gpu_memory_utilization"] == pytest.approx((29 * 2**30 - kept) / (80 * 2**30))
    assert arguments["kv_cache_memory_bytes"] is None  # those of 1,001 tokens need five blocks each
    few = opening.Settings(str(tmp_path), "bf16", EngineOptions(memory=30, max_context=1000, max_sequences=64))
    arguments = few.memory_arguments(80 * 2**30)
    assert arguments["max_num_seqs"] == 64
    assert arguments["kv_cache_memory_bytes"] == int(64 * 5 * 784 * 64 * 2**10 * 1.02) + 2**26
    assert settings.for_states() == {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}
    with pytest.raises(CheckpointError, match=r"in 16 bits: write rollout\.kv_cache_dtype: auto in place of fp8"):
        opening.Settings(str(tmp_path), "bf16", EngineOptions(kv_cache_dtype="fp8"))


def test_gemma_is_opened_by_the_hubs_names_of_its_sizes_with_room_for_windows_and_16_bit_keys(tmp_path):
    """31B: of 2,000 tokens layers with a window of 1,024 keep that and a block, 800 KiB each, and the others 80 KiB."""
    config = {**KNOWN["gemma-4-31b"], "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.zeros(1, 1)}, tmp_path / "model.safetensors")
    settings = opening.Settings(str(tmp_path), "bf16", EngineOptions(memory=70, max_context=1999, max_sequences=32))
    found = settings.overrides()
    assert (found["global_head_dim"], found["num_global_key_value_heads"]) == (512, 4)
    assert found["per_layer_config"] is found["use_bidirectional_attention"] is None
    kept = 1024 * 880 + (2000 + 16 - 1024) * 80  # KiB
    wanted = 32 * -(-kept // 880) * 880 * 1024
    assert settings.memory_arguments(80 * 2**30)["kv_cache_memory_bytes"] == int(wanted * 1.02) + 2**26
    one = opening.Settings(str(tmp_path), "bf16", EngineOptions(memory=70, max_context=1999, max_sequences=1))
    assert one.memory_arguments(80 * 2**30)["kv_cache_memory_bytes"] > 2000 * 880 * 1024  # while its prompt is read
    with pytest.raises(CheckpointError, match=r"other head sizes.*write rollout\.kv_cache_dtype: auto in place of fp8"):
        opening.Settings(str(tmp_path), "bf16", EngineOptions(kv_cache_dtype="fp8"))
