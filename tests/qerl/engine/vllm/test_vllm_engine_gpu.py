"""The vllm engine on a card: scripts/checks/check_engine.py on small models of odd sizes.

The expected numbers come from the checkpoint, from float64 products and from transformers in float32. Last run on an
H200 with vLLM 0.25.1 on 2026-11-22, unless a test says otherwise; those of Qwen3.5 and Gemma 4 on 2026-11-27.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from qerl.base.errors import EngineError
from qerl.engine.options import EngineOptions
from qerl.engine.vllm.engine import VLLMEngine
from qerl.formats.cuda import nvrtc
from qerl.plan.engine_memory import kv_bytes_per_token

ROOT = Path(__file__).resolve().parents[4]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CASES = [  # shape, format, kernel, flags
    ("tiny-qwen2", "nvfp4", "auto", ""),
    ("tiny-llama", "nvfp4", "auto", "--deterministic"),
    ("tiny-qwen3", "nvfp4", "humming", "--deterministic"),
    ("tiny-qwen2", "nvfp4", "marlin", "--deterministic"),
    ("tiny-qwen2", "bf16", "auto", ""),
    ("tiny-qwen3", "nvfp4", "auto", "--start=24"),
    ("tiny-qwen2", "nvfp4", "marlin", "--start=8"),
    ("tiny-qwen3.5", "nvfp4", "auto", "--deterministic"),
    ("tiny-qwen3.5 --ignore re:.*_attn.*", "nvfp4", "auto", ""),
    ("tiny-qwen3.5", "bf16", "auto", ""),
    ("tiny-gemma4", "nvfp4", "auto", "--deterministic"),
    ("tiny-gemma4 --ignore re:.*_attn.*", "nvfp4", "auto", ""),
    ("tiny-gemma4", "bf16", "auto", ""),
]
LINEARS, PACKED, NORMS = 14, 14, 4  # of the shapes with two layers
OF = {  # the same of families whose layers differ, by what is ignored
    "tiny-qwen3.5": {"": (25, 25, 8), "re:.*_attn.*": (25, 12, 8)},
    "tiny-gemma4": {"": (26, 26, 16), "re:.*_attn.*": (26, 12, 16)},
}


@pytest.fixture(scope="module", params=CASES, ids=["-".join(map(str, case)) for case in CASES])
def checked(request, tmp_path_factory):
    """The report of scripts/checks/check_engine.py. A process can have one engine only, so each case has its own."""
    (shape, *ignored), format, kernel, flag = request.param[0].split(), *request.param[1:]
    folder, given = tmp_path_factory.mktemp(f"{shape}-{kernel}"), ("--format", format)
    made = *given, *ignored
    report = report_of(folder, *given, "--kernel", kernel, *[flag] * bool(flag), shape=shape, made=made)
    mixed = shape in OF
    linears, packed, norms = OF[shape]["".join(ignored[1:])] if mixed else (LINEARS, PACKED, NORMS)
    counts = {"linears": linears, "packed": packed if format == "nvfp4" else 0, "norms": norms, "mixed": mixed}
    counts["kl"] = 1e-3 if mixed else 5e-5  # a CPU and an H200 had 3e-4, Gemma 4 on a CPU 7e-5
    counts["vllm_attends"] = ("flash attention", "vLLM's own")[: 1 + ("gemma" in shape)]
    return SimpleNamespace(format=format, asked=kernel, flag=flag, **counts, **report)


def run_script(script, *arguments, **environment):
    command = [sys.executable, str(next((ROOT / "scripts").glob(f"*/{script}"))), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=400, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout[:1500] + done.stdout[-1500:] + done.stderr[-3000:]


def report_of(folder, *check, shape="tiny-qwen3", made=()):
    """What scripts/checks/check_engine.py reports of a random checkpoint."""
    model, out = folder / "model", folder / "report.json"
    run_script("make_random_checkpoint.py", "--shape", shape, *made, "--out", model)
    run_script("check_engine.py", "--model", model, *check, "--out", out)
    return json.loads(out.read_text(encoding="utf-8"))


def test_what_is_allocated_is_the_base_once(tmp_path):
    """The model's own tensors are within 3% of the checkpoint. Everything else that is allocated (buffers of kernels,
    sampler and CUDA graphs) is less than half of the linears, the smallest part of the base."""
    given = "--memory", 8, "--only", "shared_memory"
    memory = report_of(tmp_path, *given, shape="qwen2.5-7b", made=("--layers", 4))["shared_memory"]
    linears = 4 * 233_046_016 * 9 / 16 / 2**30
    assert memory["checkpoint_gib"] == pytest.approx(memory["engine_gib"] - memory["adapter_gib"], rel=0.03)
    assert memory["allocated_gib"] - memory["engine_gib"] < linears / 2


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        ("tiny-qwen2", "humming"),
        ("tiny-llama", "humming"),
        ("tiny-qwen3", "marlin"),
        ("tiny-llama", "marlin"),
        ("tiny-qwen3", "auto"),
    ],
)
def test_the_layouts_of_other_shapes_decode_bit_exactly_too(tmp_path, shape, kernel):
    """Kernels and shapes that are not in CASES."""
    only = "--only", "dequantization", "product"
    report = report_of(tmp_path, "--kernel", kernel, "--memory", 8, *only, shape=shape)
    assert report["dequantization"]["different"] == {}
    assert report["dequantization"]["missing"] == []
    assert report["product"]["forward"] < 2.5e-3
    assert report["product"]["backward"] < 2.5e-3


class TestOnGPU:
    def test_the_requested_kernel_runs(self, checked):
        measured = nvrtc.has_kernels(torch.device("cuda", 0))
        tried = nvrtc.stands_in() and checked.asked == "auto" and checked.format == "nvfp4"
        expected = {"bf16": "cublas"}.get(checked.format, "qerl" if checked.asked == "auto" else checked.asked)
        assert checked.kernel == ("cublas + qerl" if 0 < checked.packed < checked.linears else expected)
        ours = not checked.mixed and (measured or tried)
        assert checked.attention in (("qerl",) if ours else checked.vllm_attends)
        assert checked.drawn_by == "FusedSampler"

    def test_the_policy_shares_every_base_weight_with_the_engine(self, checked):
        assert checked.shared_memory["foreign"] == []
        assert checked.shared_memory["kernel_linears"] == checked.packed

    def test_kernel_layouts_decode_to_the_checkpoint_bit_exactly(self, checked):
        assert checked.dequantization["different"] == {}
        assert checked.dequantization["missing"] == []
        assert checked.dequantization["twin_different"] == 0
        assert checked.dequantization["unscaled_relative_error"] < 1e-6

    def test_product_and_input_gradient_are_within_bf16_rounding(self, checked):
        # One rounding to bfloat16 makes 1.7e-3. A start adds its product to one that is rounded: plain torch has 2.4e-3
        # for a small start, and 2.7e-3 in the gradient for one as large as the weights.
        most = 3e-3 if checked.flag.startswith("--start") else 2.5e-3
        assert checked.product["forward"] < most
        assert checked.product["backward"] < most

    def test_sampler_trainer_and_score_agree(self, checked):
        assert checked.agreement["packed"]["kl"] < checked.kl
        for result in (checked.agreement, checked.temperature, checked.adapter):
            assert result["policy"]["kl"] < checked.kl
            assert result["score"]["kl"] < checked.kl

    def test_all_three_agree_with_transformers_in_float32(self, checked):
        for name in ("sampled", "policy", "score"):
            assert checked.oracle[name]["mean_abs"] < (3e-2 if checked.mixed else 5e-3)
            assert checked.oracle[name]["kl"] < checked.kl

    def test_an_adapter_acts_counts_match_and_misfits_raise(self, checked):
        assert checked.adapter["count"] == 2 * checked.linears
        assert checked.adapter["changed"] > 0
        least = 0.94 if checked.flag.startswith("--start") else 0.97  # a start makes more near-ties
        assert checked.adapter["greedy"]["equal_tokens"] > (0.9 if checked.mixed else least)
        assert checked.adapter["greedy"]["largest_gap"] < (0.2 if checked.mixed else 0.01)
        assert all(checked.adapter["errors"].values())

    def test_noise_acts_down_to_sigma_1e_4_and_is_removed_without_a_trace(self, checked):
        for sigma in ("0.01", "0.001", "0.0001"):
            assert checked.noise[sigma]["count"] == checked.norms
            assert checked.noise[sigma]["std_over_sigma"] == pytest.approx(1, abs=0.02)
            assert checked.noise[sigma]["correlation"] > 0.99
            assert checked.noise[sigma]["same_as_clean"]["logprobs"] == 0
        assert checked.noise["restored_bits"]

    def test_seeds_determine_samples_and_a_deterministic_engine_repeats_bits(self, checked):
        assert checked.repeat["other_seed"]["tokens"] == 0
        assert checked.repeat["distinct_within_call"] == 8
        if checked.flag == "--deterministic":
            for name in ("warm_prefix_cache", "cold", "cold_again", "same_seed"):
                assert checked.repeat[name] == {"tokens": 1.0, "logprobs": 1.0}
            assert checked.noise["restored_samples"] == {"tokens": 1.0, "logprobs": 1.0}
            assert checked.adapter["zero_adapter_restores"] == {"tokens": 1.0, "logprobs": 1.0}

    def test_several_steps_per_call_of_the_scheduler_sample_what_single_ones_do(self, checked):
        """A batch that shrinks at other steps has products of other sizes, whose last bits may turn a draw."""
        steps = checked.steps
        for name in ("drawn", "filtered"):
            assert steps[name]["tokens"] >= 0.85
            assert steps[f"{name}_again"] == {"tokens": 1.0, "logprobs": 1.0}
        assert {*steps["drawn_reasons"], *steps["filtered_reasons"]} == {"length", "stop"}

    def test_sleep_frees_the_kv_cache_and_nothing_else(self, checked):
        given_back = checked.sleep_and_wake["used_gib"] - checked.sleep_and_wake["asleep_gib"]
        assert given_back == pytest.approx(checked.sleep_and_wake["kv_gib"], rel=0.02)
        assert checked.sleep_and_wake["same_pointers"]
        assert checked.sleep_and_wake["policy_works_asleep"]

    def test_stop_tokens_lengths_filters_and_context(self, checked):
        assert checked.limits["stop_reason"] == "stop"
        assert checked.limits["stop_last"]
        assert checked.limits["length_reason"] == "length"
        assert checked.limits["length"] == 64
        assert checked.limits["own_lengths"] == [3, 9]
        assert "exceed the engine's context of 1024" in checked.limits["too_long"]
        assert checked.limits["top_k_1_logprob_zero"] == 0
        assert checked.limits["full_context_scored"] == 23

    def test_trained_norms_are_synced_to_the_bit_and_act(self, checked):
        assert checked.trained_norms["norms"] == checked.norms
        assert checked.trained_norms["count"] == checked.trained_norms["expected"]
        assert checked.trained_norms["bits"]
        assert checked.trained_norms["same_as_before"]["logprobs"] == 0
        assert checked.trained_norms["policy"]["kl"] < checked.kl

    def test_whole_weights_are_packed_in_place_and_act(self, checked):
        result = checked.whole_weights
        if checked.flag.startswith("--start"):
            assert "cannot be packed beside a start" in result["refused"]
            return
        if checked.kernel in ("humming", "marlin"):
            assert "cannot change: write rollout.kernel=qerl" in result["refused"]
            return
        assert result["count"] == result["expected"] == checked.linears
        assert result["different"] == result["moved"] == []
        assert result["same_as_before"]["logprobs"] == 0
        assert result["policy"]["kl"] < checked.kl
        assert result["score"]["kl"] < checked.kl
        if checked.flag == "--deterministic":
            assert result["restored"] == {"tokens": 1.0, "logprobs": 1.0}

    def test_the_fused_sampler_draws_from_the_softmax(self, checked):
        assert checked.sampler["largest_logprob_error"] < 2e-5
        assert checked.sampler["greedy"]
        assert checked.sampler["repeats"]
        assert checked.sampler["cells"] > 200
        assert abs(checked.sampler["chi_square_z"]) < 5


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The report of a deterministic engine on callers that are told of completions."""
    given = "--deterministic", "--memory", 8, "--only", "told_of_while"
    return SimpleNamespace(**report_of(tmp_path_factory.mktemp("told"), *given)["told_of_while"])


def test_a_completion_is_reported_while_others_are_generated(told):
    """Prompts 0 to 3 may write 40, 3, 24 and 9 tokens; one in 1000 draws ends a completion earlier."""
    assert sorted(told.order) == [0, 1, 2, 3]
    lengths = [told.lengths[index] for index in told.order]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert told.left == [sum(other > length for other in lengths) for length in lengths]
    assert told.told_is_returned
    assert told.same == {"tokens": 1.0, "logprobs": 1.0}


def test_a_callback_may_raise_while_others_are_generated_and_scores_are_the_usual_ones(told):
    assert told.raising["raised"]
    assert told.raising["left"] == 0
    assert told.raising["lengths_after"] == [told.lengths[1], told.lengths[2]]
    assert sorted(told.raising["told_after"]) == [0, 1]
    assert told.same_afterwards == {"tokens": 1.0, "logprobs": 1.0}
    assert told.score["kl"] < 5e-5
    assert told.raising["score"]["kl"] < 5e-5


def test_completions_that_a_call_leaves_go_on_in_the_next_after_a_sleep(tmp_path):
    given = "--deterministic", "--memory", 8, "--only", "carried_over"
    found = SimpleNamespace(**report_of(tmp_path, *given)["carried_over"])
    assert len(found.ended_first) >= 3
    assert found.left
    assert found.left_reasons == ["unfinished"]
    assert min(found.left.values()) > 0
    assert found.unfinished == found.rest == 0
    assert sorted(found.lengths) == sorted([*map(str, found.ended_first), *found.left])
    assert found.begins_as_before
    assert found.score["kl"] < 5e-5
    assert found.same_afterwards == {"tokens": 1.0, "logprobs": 1.0}


@pytest.mark.parametrize("shape", ["tiny-mistral", "tiny-llama-10-heads"])
def test_attention_that_our_kernel_does_not_support_is_done_by_flash_attention(tmp_path, shape):
    """A window of 48 tokens in sequences of up to 192, or ten query heads for one key head."""
    given = "--format", "bf16"
    report = report_of(tmp_path, *given, "--only", "agreement", "--prompts", 16, shape=shape, made=given)
    assert report["attention"] == "flash attention"
    assert report["agreement"]["policy"]["kl"] < 5e-5
    assert report["agreement"]["score"]["kl"] < 5e-5


def test_packing_needs_little_memory_besides_the_weights(tmp_path):
    """Four layers of a 7B model, with 2.5 GiB of embeddings and head. An H200 once filled by 6 GiB per layer because
    torch could not reuse the memory of a work tensor. Last run on 2026-11-21."""
    report = report_of(tmp_path, "--only", "loading", shape="qwen2.5-7b", made=("--layers", 4))["loading"]
    assert report["peak_gib"] < report["checkpoint_gib"] + 1.5


def test_a_rollout_larger_than_the_kv_cache_finishes_and_says_so(tmp_path):
    """64 layers take 32 KiB per token, so the rollout needs 4 GiB, and less than 2 are there. One in 1000 tokens ends a
    completion, so 49 of 128 should reach full length, with a standard deviation of 5.5."""
    given = "--memory", 3.1, "--only", "exhausted_cache"
    report = report_of(tmp_path, *given, made=("--layers", 64))["exhausted_cache"]
    assert report["tokens"] > 1.3 * report["cache_tokens"]
    assert report["completions"] == report["full"] + report["stopped"] == 128
    assert 24 < report["full"] < 74
    assert len(report["warned"]) == 1
    assert report["policy"]["kl"] < 1e-2  # for 64 random layers; a preempted sequence keeps its logprobs


def test_a_cap_that_cannot_hold_the_weights_is_refused_before_loading(tmp_path):
    model = tmp_path / "model"
    run_script("make_random_checkpoint.py", "--shape", "tiny-qwen3", "--out", model)
    with pytest.raises(EngineError, match=r"raise memory\.cap_gib"):
        VLLMEngine(str(model), "nvfp4", EngineOptions(cap_gib=2.0))
    with pytest.raises(EngineError, match=r"set model\.format to match"):
        VLLMEngine(str(model), "bf16", EngineOptions())


@pytest.mark.parametrize("kind", ["fp8_per_token_head", "fp8"])
def test_an_fp8_cache_agrees_within_the_gate(tmp_path, kind):
    """fp8 is calibrated, and policy and engine round alike. The other type uses Triton's attention, and last passed on
    2026-11-21."""
    calibrated = ["--calibrate-kv"] * (kind == "fp8")
    report = report_of(tmp_path, "--kv-cache-dtype", kind, "--only", "agreement", "sleep_and_wake", *calibrated)
    assert kind != "fp8" or report["attention"] == "qerl"
    assert 1e-7 < report["agreement"]["policy"]["kl"] < 3e-3  # it differs by rounding only
    kv_bytes = report["sleep_and_wake"]["kv_gib"] * 2**30 / report["cache_tokens"]
    config = AutoConfig.from_pretrained(tmp_path / "model")
    work = 40 * 2**20 / report["cache_tokens"]  # our attention's space, and the 2 MiB in which the driver gives memory
    assert 0 <= kv_bytes - kv_bytes_per_token(config, kind) < work


def test_a_closed_engine_gives_its_memory_back_and_another_opens(tmp_path):
    """`qerl eval` does this with several bases. The driver counts the whole card, so nothing else may run on it. A
    failure prints what was left and who held it."""
    report = report_of(tmp_path, "--only", "reopened")["reopened"]
    text = json.dumps(report)
    first, *later = report["openings"]
    assert len(later) == 2
    for opened in later:
        assert opened["used_gib"] < first["used_gib"] + 0.3, text
        assert opened["reserved_gib"] < first["reserved_gib"] + 0.3, text
    for closed in report["closings"]:
        assert closed["used_gib"] < first["used_gib"], text
        assert not [tag for tag in closed["cumem_gib"] if not tag.endswith("asleep")], text  # no KV cache is mapped
        assert not {"GPUModelRunner", "AdapterLinearMethod"} & set(closed["alive"]), text  # no weight is referred to
    assert "Free memory" in report["refusal"], text  # from opening a second engine in between
    assert report["same"]["tokens"] > 0.7, text  # the rest are near-ties
