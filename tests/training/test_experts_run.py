"""Runs on a small random mixture of experts: replay, resuming to the bit, carried completions, and what PEFT reads."""

import json
import shutil

import pytest
import torch
from make_random_checkpoint import end_by_chance

from qerl.base.errors import ConfigError
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.resolve import resolve_model
from qerl.engine.interface import SamplingParams
from qerl.engine.open import open_model
from qerl.engine.options import EngineOptions
from quantize.export.options import ExportOptions
from quantize.export.run import export
from quantize.run import quantize_checkpoint
from tests.helpers.bases import write_base
from tests.helpers.roundings import ROUNDING
from tests.helpers.small_run import numbers, small_config
from training.run import resume, start

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def finished(nvfp4_moe, tmp_path_factory):
    """A run of 4 steps with shared factors, noise and a KL term."""
    return start(small_config(nvfp4_moe, tmp_path_factory.mktemp("moe"), "loss.kl_coef=0.1", steps=4), "tiny").run_dir


@pytest.fixture(scope="module")
def ends_by_chance(nvfp4_moe, tmp_path_factory):
    """The same base, whose completions have eight tokens on average."""
    base = shutil.copytree(nvfp4_moe, tmp_path_factory.mktemp("ends") / "base")
    end_by_chance(base, json.loads((base / "config.json").read_text())["vocab_size"], 8)
    return base


def test_sampler_and_trainer_agree_and_say_what_the_replay_does(finished):
    rows = numbers(finished)
    assert max(rows[0]["mismatch_kl"], rows[0]["mismatch/router_changed"]) < 1e-8  # the modules are the same
    noisy = [row for row in rows if row["noise/sigma"] == 0.05]
    assert all(row["noise/norms"] == 4 for row in noisy)
    assert all(row["mismatch_kl"] > 1e-5 for row in noisy)
    assert all(0 < row["mismatch/router_changed"] < 0.5 for row in noisy)
    assert ["mismatch/kl_without_replay" in row for row in rows] == [True, False, False, False]
    assert rows[0]["mismatch/kl_without_replay"] < 1e-8
    assert rows[0]["kl"] == 0
    assert rows[-1]["kl"] > 0
    tensors, scaling = read_adapter(finished / "adapter")
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert scaling == config["lora_alpha"] / config["r"]
    assert all(tensor.any() for name, tensor in tensors.items() if name.endswith(".lora_B.weight"))


def test_episodes_replay_what_was_chosen_in_every_turn(ends_by_chance, tmp_path):
    """In float32 the trainer would choose the same, so that any other token's choices would show."""
    game = ("data={task: word_game}", "environment={name: word_game}", "rollout.max_new_tokens=60")
    run_dir = start(small_config(ends_by_chance, tmp_path, *game, "noise.enabled=false", steps=1), "tiny").run_dir
    assert [row["mismatch/router_changed"] for row in numbers(run_dir)] == [0]
    lines = (run_dir / "completions" / "step-000001.jsonl").read_text().splitlines()
    turns = [json.loads(line)["turns"] for line in lines]
    assert max(len([turn for turn in each if turn["role"] == "assistant"]) for each in turns) > 1


def test_carried_completions_keep_their_experts_in_a_checkpoint(ends_by_chance, tmp_path):
    settings = ("rollout.carry_over=2", "run.save_every=1", "adapter.experts=per_expert", "rollout.max_new_tokens=40")
    settings += ("noise.enabled=false",)
    whole = start(small_config(ends_by_chance, tmp_path, *settings, steps=3), "tiny").run_dir
    assert all(row["carry_over/kept_tokens"] for row in numbers(whole)[:2])
    again = shutil.copytree(whole, tmp_path / "again")
    assert numbers(resume(again, step=2).run_dir) == numbers(whole)
    tensors, _ = read_adapter(whole / "adapter")
    assert tensors["model.layers.0.mlp.experts.down_proj.lora_B.weight"].dim() == 3


def test_without_replay_or_without_an_adapter_on_experts(nvfp4_moe, tmp_path):
    settings = ("rollout.router_replay=false", "adapter.experts=none", "noise.enabled=false")
    run_dir = start(small_config(nvfp4_moe, tmp_path, *settings, steps=2), "tiny").run_dir
    assert not any("router" in key or "replay" in key for row in numbers(run_dir) for key in row)
    assert not any(".experts." in name for name in read_adapter(run_dir / "adapter")[0])


def test_another_family_trains_and_merges(tmp_path):
    base = write_base(tmp_path / "mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    quantize_checkpoint(str(base), tmp_path / "packed", ROUNDING)
    run_dir = start(small_config(tmp_path / "packed", tmp_path, "noise.enabled=false", steps=1), "tiny").run_dir
    assert all(max(row["mismatch_kl"], row["mismatch/router_changed"]) < 1e-8 for row in numbers(run_dir))
    report = export(ExportOptions(str(run_dir), "bf16", tmp_path / "out", prompt_count=2, max_new_tokens=4))
    assert report.effect.kl_merged < report.effect.kl_base / 5  # rounding to 16 bits may change an expert


def test_an_engine_opens_the_runs_adapter(finished, nvfp4_moe):
    """As an evaluation does; the oracle is the adapter's effect on the logprobs that the run's own policy gives."""
    options = EngineOptions(engine="transformers")
    with_adapter, base = (open_model(resolve_model(str(path)), options) for path in (finished, nvfp4_moe))
    completions = [done.token_ids for done in with_adapter.generate(PROMPTS, SamplingParams(8), seed=0)]
    own, other = (torch.tensor(engine.score(PROMPTS, completions)[0]) for engine in (with_adapter, base))
    assert (own - other).abs().max() > 1e-4
    for experts in (m for n, m in with_adapter.policy_model().named_modules() if n.endswith("mlp.experts")):
        experts.adapter = None
    again = torch.tensor(with_adapter.score(PROMPTS, completions)[0])
    assert (own - again).abs().max() > 1e-5


def test_a_run_starts_from_the_adapter_of_another(finished, tmp_path):
    config = small_config(finished, tmp_path, "noise.enabled=false", steps=1)
    assert numbers(start(config, "tiny").run_dir)[0]["mismatch_kl"] < 1e-8
    for override, message in (
        ("adapter.experts=per_expert", "the recipe has adapter.experts: per_expert, .*write adapter.experts: shared"),
        ("adapter.expert_rank=3", "write adapter.expert_rank: "),
    ):
        with pytest.raises(ConfigError, match=message):
            start(small_config(finished, tmp_path, override, "noise.enabled=false", steps=1, out="other"), "tiny")
