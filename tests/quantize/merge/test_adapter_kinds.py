"""The PEFT folder of an adapter that was trained with a start of its base: as it is, with the start, or without it."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.base_start import LORA_B, START, BaseStart, copy_start, read_start, start_of_adapter
from qerl.checkpoint.folder import TRAINED_ON
from qerl.checkpoint.resolve import resolve_model
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_tensors import load_all
from tests.helpers.merged import random_adapter, random_expert_adapter
from tests.helpers.moe import make_moe
from tests.helpers.started import (
    RANK,
    SCALING,
    assert_rounded_once,
    by_hand,
    factors_of,
    holding,
    load,
    logits,
    make_adapter,
    merged,
    name_start,
    product,
    with_peft,
)
from tests.helpers.starts import give_start_

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_adapter_from_its_start_counts_the_error_twice_on_the_original_and_its_change_does_not(
    bases, trained, tmp_path
):
    exact = logits(holding(bases, by_hand(bases, trained, "trained", "trained")))
    twice = logits(with_peft(load(bases.source), trained))
    report = merged(trained, "adapter", tmp_path / "out", onto="original")
    found = logits(with_peft(load(bases.source), report.out))
    # Factors in float32, and their difference: what float64 gives by hand, to 1e-5 of logits of size 1.
    by_weights = logits(holding(bases, by_hand(bases, trained, "trained", "original")))
    torch.testing.assert_close(found, by_weights, atol=2e-5, rtol=0)
    # The rank left a part of the error, which the original does not have.
    left, wrong = (found - exact).square().mean().sqrt(), (twice - exact).square().mean().sqrt()
    untouched = (logits(load(bases.source)) - exact).square().mean().sqrt()
    assert left < 0.6 * min(wrong, untouched)
    config = json.loads((report.out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (52, 104, str(bases.source))
    assert json.loads((report.out / TRAINED_ON).read_text())["start"] is None
    assert not (report.out / START).exists()
    assert str(bases.source) in report.commands["vllm"]
    assert "--max-lora-rank 64 " in report.commands["vllm"]
    found = resolve_model(str(report.out))
    assert (found.base, found.format, found.start) == (str(bases.source), "bf16", None)


def test_a_start_and_its_adapter_are_one_adapter_for_a_server_that_knows_no_start(bases, frozen, tmp_path):
    report = merged(frozen, "adapter", tmp_path / "one", with_start=True)
    exact = logits(holding(bases, by_hand(bases, frozen, "frozen", "trained")))
    found = logits(with_peft(holding(bases, bases.decoded), report.out))
    torch.testing.assert_close(found, exact, atol=2e-5, rtol=0)
    alone = logits(with_peft(holding(bases, bases.decoded), frozen))
    assert (alone - exact).abs().max() > 1e-2
    assert f"vllm serve {bases.nvfp4} --enable-lora --max-lora-rank 64 " in report.commands["vllm"]
    assert "rank 52, of which 24 are the start" in report.warnings()[0]
    config = json.loads((report.out / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (52, str(bases.nvfp4))
    ref = resolve_model(str(report.out))
    assert (ref.base, ref.start) == (str(bases.nvfp4), None)


def test_a_start_for_more_linears_than_are_trained_is_padded(bases, tmp_path):
    adapter = random_adapter(tmp_path / "adapter", bases.source, rank=4, targets=("q_proj", "up_proj"))
    name_start(adapter, bases.nvfp4, "frozen", factors_of(bases))
    report = merged(adapter, "adapter", tmp_path / "one", with_start=True)
    tensors, scaling = read_adapter(report.out)
    assert len(tensors) == 28
    assert scaling == SCALING
    untrained = "model.layers.0.mlp.down_proj"
    assert not tensors[untrained + LORA_B][:, :4].any()
    found = logits(with_peft(holding(bases, bases.decoded), report.out))
    exact = logits(holding(bases, by_hand(bases, adapter, "frozen", "trained")))
    torch.testing.assert_close(found, exact, atol=2e-5, rtol=0)
    whole = merged(adapter, "bf16", tmp_path / "whole")
    assert_rounded_once(load_all(whole.out), by_hand(bases, adapter, "frozen", "trained"))


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_an_adapter_folder_brings_its_start_and_is_opened_without_the_run(bases, kind, request, tmp_path):
    adapter = request.getfixturevalue(kind)
    moved = tmp_path / "base-NVFP4A16"
    shutil.copytree(bases.nvfp4, moved, ignore=shutil.ignore_patterns(START))
    report = merged(adapter, "adapter", tmp_path / "out")
    (report.out / TRAINED_ON).write_text((report.out / TRAINED_ON).read_text().replace(str(bases.nvfp4), str(moved)))
    ref = resolve_model(str(report.out))
    assert ref.base == str(moved)
    assert ref.start == (BaseStart(report.out / START, RANK) if kind == "frozen" else None)
    named = json.loads((report.out / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(bases.source if kind == "frozen" else bases.nvfp4)
    assert all(torch.equal(t, read_adapter(adapter)[0][n]) for n, t in read_adapter(report.out)[0].items())
    if kind == "frozen":
        assert f"vllm serve {bases.source} " in report.commands["vllm"]
        assert "--to adapter --with-start" in report.warnings()[0]
    else:
        assert f"vllm serve {bases.nvfp4} " in report.commands["vllm"]
        assert report.warnings() == []


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("none", {"to": "adapter", "with_start": True}, "was trained without a start: leave it out"),
        ("none", {"to": "adapter", "onto": "original"}, "is an exact copy"),
        ("frozen", {"to": "adapter", "onto": "original"}, "fits the 16-bit model as it is"),
        ("trained", {"to": "adapter", "with_start": True}, "began at its start and holds it"),
        ("trained", {"to": "bf16", "model": "SOURCE"}, "counts twice on the 16-bit"),
        ("trained", {"to": "adapter", "model": "SOURCE"}, "which need none: leave --model out"),
        ("frozen", {"to": "bf16", "with_start": True}, "--with-start goes with --to adapter"),
        ("frozen", {"to": "adapter", "with_start": True, "onto": "original"}, "drop one"),
    ],
)
def test_what_an_adapters_kind_does_not_have_is_refused(bases, tmp_path, kind, options, said):
    adapter = make_adapter(tmp_path / "adapter", bases, kind)
    if options.get("model") == "SOURCE":
        options = {**options, "model": str(bases.source)}
    with pytest.raises((ConfigError, CheckpointError), match=said):
        merged(adapter, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_trained_norms_stay_with_a_change_and_with_a_start(bases, tmp_path):
    for kind, options in (("frozen", {"with_start": True}), ("trained", {"onto": "original"})):
        adapter = make_adapter(tmp_path / kind, bases, kind, train_norms=True)
        report = merged(adapter, "adapter", tmp_path / f"{kind}-out", **options)
        ours, theirs = read_adapter(report.out)[0], read_adapter(adapter)[0]
        norms = [name for name in theirs if ".lora_" not in name]
        assert len(norms) == 4
        assert all(torch.equal(ours[name], theirs[name]) for name in norms)
        assert "vllm" not in report.commands
        whole = load_all(merged(adapter, "bf16", tmp_path / f"{kind}-whole").out)
        assert torch.equal(whole[norms[0]].float(), theirs[norms[0]].bfloat16().float())


@pytest.mark.parametrize("expert_rank", [4, 12])
def test_experts_stay_as_they_are_trained(tmp_path, expert_rank):
    """A start has factors for attention alone; ranks on experts and on attention differ in the stacked adapter."""
    source = make_moe(tmp_path / "source", layers=2)
    quantize_checkpoint(str(source), tmp_path / "nvfp4", QuantizeOptions(method="rtn", device="cpu"))
    base = SimpleNamespace(source=source, nvfp4=tmp_path / "nvfp4")
    give_start_(base.nvfp4, source, rank=32, kinds=("q_proj", "k_proj", "v_proj", "o_proj"))
    for kind, options in (("frozen", {"with_start": True}), ("trained", {"onto": "original"})):
        adapter = random_expert_adapter(tmp_path / kind, source, "shared", expert_rank)
        name_start(adapter, base.nvfp4, kind, factors_of(base))
        report = merged(adapter, "adapter", tmp_path / f"{kind}-out", **options)
        (ours, scaling), (theirs, own) = read_adapter(report.out), read_adapter(adapter)
        assert (scaling, own) == (SCALING, SCALING)
        experts = [name for name in theirs if ".experts." in name]
        assert len(experts) == 8
        assert all(torch.equal(ours[name], theirs[name]) for name in experts)
        linear = "model.layers.1.self_attn.q_proj"
        sign, start = (1 if kind == "frozen" else -1), product(factors_of(base))
        expected = product(theirs, SCALING)[linear] + sign * start[linear]
        torch.testing.assert_close(product(ours, SCALING)[linear], expected, atol=1e-6, rtol=0)


def test_a_base_that_is_not_here_is_not_needed_where_the_run_has_the_start(bases, trained, tmp_path):
    run, gone = tmp_path / "run", tmp_path / "gone-NVFP4A16"
    adapter = shutil.copytree(trained, run / "adapter")
    name_start(adapter, gone, "trained", factors_of(bases))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(gone)}))
    copy_start(BaseStart(bases.nvfp4 / START, RANK), run / START, "trained")
    report = merged(adapter, "adapter", tmp_path / "out")
    assert json.loads((report.out / TRAINED_ON).read_text()) == json.loads((adapter / TRAINED_ON).read_text())
    assert read_start(BaseStart(report.out / START, RANK)).keys() == factors_of(bases).keys()


def test_a_change_stays_without_a_start_wherever_it_is_put(bases, trained, tmp_path):
    """As below a run's folder, whose start/ is that of the run's checkpoints."""
    run = tmp_path / "run"
    run.mkdir()
    copy_start(BaseStart(bases.nvfp4 / START, RANK), run / START, "trained")
    (run / "step").mkdir()
    assert start_of_adapter(run / "step").kind == "trained"
    out = merged(trained, "adapter", run / "change", onto="original").out
    assert start_of_adapter(out) is None


@pytest.mark.parametrize(("kind", "with_start"), [("frozen", False), ("frozen", True), ("trained", False)])
def test_the_lines_of_the_card_give_the_policy_that_was_trained(bases, kind, with_start, request, tmp_path, capsys):
    adapter = request.getfixturevalue(kind)
    report = merged(adapter, "adapter", tmp_path / "out", with_start=with_start)
    card = (report.out / "README.md").read_text(encoding="utf-8")
    exact = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[-1]
    names = {}
    exec(compile(exact, "README.md", "exec"), names)
    assert capsys.readouterr().out
    model = names["model"].double()
    for name, weight in bases.decoded.items():  # the block decodes them to bfloat16
        model.get_submodule(f"base_model.model.{name}").base_layer.weight.data.copy_(weight)
    expected = logits(holding(bases, by_hand(bases, adapter, kind, "trained")))
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=0)
    assert ("--onto original" in card) == (kind == "trained" or with_start)
