"""A start refuses a card or a cap that cannot hold the run, according to the plan, before an engine is opened.

The tests that need a card last ran on an H200 on 2026-11-22.
"""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from qerl.base.errors import ConfigError, EngineError
from qerl.checkpoint.resolve import ModelRef
from qerl.config.recipe import load_recipe
from qerl.engine.open import choose_engine
from qerl.plan.sizes import KNOWN, read_sizes
from tests.helpers.small_run import small_config
from training import run as training_run
from training.preflight import checks
from training.preflight.checks import check_memory
from training.preflight.plan import plan
from training.run import start

GIB = 2**30
CARD = 80 * GIB


@pytest.fixture
def seven(tmp_path):
    """A folder with the config.json of a 7B model, which is all that a plan reads."""
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["qwen2.5-7b"]), encoding="utf-8")
    return ModelRef("quantized", tmp_path, str(tmp_path), None, None, "nvfp4")


def with_cap(gib, *overrides):
    return load_recipe("dapo_7b", [f"memory.cap_gib={gib}", *overrides])


@pytest.mark.parametrize(
    ("cap", "gib", "said"),
    [
        (11, 80, r"lower rollout\.max_new_tokens.*memory\.cap_gib.*qerl plan"),
        (13, 80, r"lower rollout\.max_new_tokens.*memory\.cap_gib.*qerl plan"),
        ("null", 12, "training on 9216 tokens at once"),  # the card is a limit too
    ],
)
def test_memory_far_under_the_plan_is_refused_with_what_to_change(seven, cap, gib, said):
    with pytest.raises(EngineError, match=said):
        check_memory(with_cap(cap), seven, gib * GIB)


@pytest.mark.parametrize(("cap", "warned"), [(14, True), (16, False), ("null", False)])
def test_a_cap_within_the_plans_error_is_a_warning(seven, caplog, cap, warned):
    """14 GiB for planned 14.8: the run's own measurement decides, after the engine has opened."""
    with caplog.at_level(logging.INFO):
        check_memory(with_cap(cap), seven, CARD)
    said = "training on 9216 tokens at once needs", "give it more memory (card, memory.cap_gib)"
    assert [all(each in record.message for each in said) for record in caplog.records] == [True] * warned


def test_the_format_is_that_of_the_weights_on_disk(seven):
    """The format in the recipe only says how the base is searched for."""
    check_memory(with_cap(16), seven, CARD)
    with pytest.raises(EngineError, match=r"the weights take 14\.\d GiB"):
        check_memory(with_cap(16), ModelRef("base16", seven.path, seven.base, None, None, "bf16"), CARD)


def test_a_cache_without_room_for_one_sequence_is_refused(seven):
    longer = KNOWN["qwen2.5-7b"] | {"max_position_embeddings": 131072}
    (seven.path / "config.json").write_text(json.dumps(longer), encoding="utf-8")
    config = with_cap(24, "rollout.memory=10", "rollout.max_new_tokens=64512")
    # 57344 bytes per token
    with pytest.raises(EngineError, match=r"one sequence of 65537 tokens needs 3\.5 GiB of KV cache"):
        check_memory(config, seven, CARD)


def test_whether_prompts_fit_the_positions_depends_on_the_longest_real_prompt(seven):
    config = load_recipe("dapo_7b", ["rollout.max_new_tokens=32000"])
    assert "positions" in plan(config, read_sizes(seven.base), checks.card_of_bytes(CARD)).problems[0]
    check_memory(config, seven, CARD)


def test_a_prompt_with_tokens_outside_of_the_vocabulary_is_refused_before_anything_is_written(nvfp4_base, tmp_path):
    base = shutil.copytree(nvfp4_base, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    size = json.loads((base / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<added {number}>" for number in range(size)])
    tokenizer.chat_template = f"<added {size - 1}>{tokenizer.chat_template}"
    tokenizer.save_pretrained(base)
    with pytest.raises(EngineError, match=f"a prompt has token .* and the model only those up to {size - 1}: "):
        start(small_config(base, tmp_path), "tiny")
    assert not (tmp_path / "run").exists()


def test_a_start_with_vllm_checks_memory_before_it_opens_the_engine(nvfp4_base, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "choose_engine", lambda *_: "vllm")
    monkeypatch.setattr(training_run, "free_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(training_run, "open_rollout_engine", lambda *_: pytest.fail("an engine was opened"))
    with pytest.raises(EngineError, match="the rollout may hold"):
        start(small_config(nvfp4_base, tmp_path), "x")
    assert not Path(tmp_path / "run").exists()


def test_the_engine_is_told_how_much_memory_the_trainer_needs(seven, monkeypatch):
    told = []
    monkeypatch.setattr(training_run, "open_engine", lambda base, format, options: told.append(options))
    training_run.open_rollout_engine(with_cap(12), seven)
    # float32 factors and two 8-bit moments, rank 32 on every linear: q and o, k and v, gate and up, down
    numbers = 28 * 32 * (2 * 7168 + 2 * 4096 + 2 * 22528 + 22528)
    assert [options.trainer_bytes for options in told] == [numbers * (4 + 2)]


@pytest.mark.skipif(choose_engine("auto") == "vllm", reason="auto means vllm here")
@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["memory.cap_gib=24"], "does not read memory.cap_gib: leave it out"),
        (["rollout.memory=8", "rollout.deterministic=true"], "read rollout.memory, rollout.deterministic: leave them"),
    ],
)
def test_keys_of_vllm_are_refused_if_auto_means_transformers(nvfp4_base, tmp_path, given, named):
    config = small_config(nvfp4_base, tmp_path, "rollout.engine=auto", *given)
    with pytest.raises(ConfigError) as refused:
        start(config, "x")
    assert named in str(refused.value)
    assert "`qerl doctor`" in str(refused.value)
    assert not (tmp_path / "run").exists()
    assert not checks.uses_card(small_config(nvfp4_base, tmp_path, "rollout.engine=auto"))


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks the card")
def test_on_a_card_too_small_a_cap_is_refused_before_the_engine_opens(nvfp4_base, tmp_path, monkeypatch):
    monkeypatch.setattr(training_run, "open_rollout_engine", lambda *_: pytest.fail("an engine was opened"))
    config = small_config(nvfp4_base, tmp_path, "rollout.engine=vllm", "memory.cap_gib=2")
    with pytest.raises(EngineError, match=r"memory\.cap_gib"):
        start(config, "x")
    assert 0 < checks.free_bytes() <= torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize(
    ("found", "optimizer", "masters"), [(True, "adamw_8bit", "float32"), (False, "adamw", "bfloat16")]
)
def test_masters_are_planned_with_the_optimizer_that_is_installed(seven, monkeypatch, found, optimizer, masters):
    monkeypatch.setattr(checks, "choose_engine", lambda name: "vllm")
    monkeypatch.setattr(checks, "free_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: object() if found else None)
    settled = checks.settle_qat(load_recipe("qat_7b", []), seven)
    assert (settled.optim.name, settled.qat.masters) == (optimizer, masters)
