"""scripts/study/study_qat.py: its ways to train whole weights, its arms, and its tables."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_run import small_config

import training.run
from qerl.checkpoint.load import load_model
from qerl.checkpoint.reader import TensorReader
from qerl.checkpoint.shards import read_json, read_tensors
from qerl.config.recipe import load_recipe
from qerl.engine.options import EngineOptions
from qerl.engine.transformers.engine import TransformersEngine
from qerl.engine.update import WeightsUpdate
from qerl.formats.fp8.linear import FP8Linear
from qerl.model.master import master_of, multiply_by_masters_
from scripts.bench.watch import different
from training.policy.policy import WeightsPolicy
from training.run import start
from training.run_dir import start_base
from training.run_dir.log import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "qerl" / "tiny"


@pytest.fixture(scope="module")
def runs(load, base, tmp_path_factory):
    """The folder of a run of two steps on a random base for training in 16 bits, with and without packed rollouts."""
    ways, folder = load("study_ways"), tmp_path_factory.mktemp("ways")
    settings = ("qat.mode=weights", "noise.enabled=false", "loss.mismatch_gate=null", "optim.learning_rate=1e-3")
    for name, way, own in (("masters", ways.PACKED, ["qat.forward=masters"]), ("dense", ways.DENSE, [])):
        with ways.trained_by(way):
            start(small_config(base, folder, *settings, *own, steps=2, out=name), "study")
    return folder


def test_only_what_the_trainer_does_not_know_about_lies_between_it_and_the_sampler(runs) -> None:
    """`mismatch_kl`: rounding of a CPU's sums where both multiply by the same weights, and NVFP4's error where not."""
    found = {way: [row["mismatch_kl"] for row in read_metrics(runs / way)] for way in ("masters", "dense")}
    assert max(found["dense"]) < 1e-9
    assert min(found["masters"]) > 1e-6


def test_the_result_of_each_way_is_what_its_engine_samples_from(runs) -> None:
    for way in ("masters", "dense"):
        quantized = "quantization_config" in read_json(runs / way / "model" / "config.json")
        assert quantized == (way == "masters")
        load_model(runs / way / "model", "nvfp4" if quantized else "bf16")
    name = "model.layers.0.mlp.up_proj.weight"
    folders = (runs / "dense" / part for part in ("model", "checkpoints/step-000002/weights"))
    model, masters = (TensorReader(read_tensors(folder)) for folder in folders)
    with model as written, masters as trained:
        assert torch.equal(written(name), trained(name).to(written(name).dtype))


def test_the_ways_are_over_after_a_run(runs) -> None:
    assert training.run.start_base is start_base.start_base


def test_a_job_trains_in_the_way_of_its_arm(load, monkeypatch, tmp_path) -> None:
    arms, seen = load("study_arms"), {}
    monkeypatch.setattr(arms, "_evaluate", lambda *given: {})
    monkeypatch.setattr(arms, "steps_of", lambda run_dir: {})
    for name in arms.QAT_ARMS:

        def train(*given, name=name):
            seen[name] = training.run.start_base is start_base.start_base

        monkeypatch.setattr(arms, "_train", train)
        arms.execute(arms.Job(name, 1e-3, 0), None, tmp_path)
    assert seen == {"nvfp4": True, "qat": True, "bf16_weights": False, "no_qat": True}


def test_adapters_are_rounded_of_the_run_that_trained_them_if_there_is_one(load, monkeypatch, tmp_path) -> None:
    arms, merged, trained = load("study_arms"), [], []
    monkeypatch.setattr(arms, "_evaluate", lambda model, *given: {"model": model})
    monkeypatch.setattr(arms, "steps_of", lambda run_dir: {})
    monkeypatch.setattr(arms, "_train", lambda *given: trained.append(given[-1].name))
    monkeypatch.setattr(arms, "_merged", lambda run, out: merged.append(run.name) or out)
    (tmp_path / "runs/nvfp4-0.001-0/adapter").mkdir(parents=True)
    rows = [arms.execute(arms.Job("nvfp4_rounded", 1e-3, seed), None, tmp_path) for seed in (0, 1)]
    assert merged == trained == ["nvfp4-0.001-0", "nvfp4_rounded-0.001-1"]
    assert rows[0]["model"] == tmp_path / "merged/nvfp4_rounded-0.001-0"


def test_masters_act_in_training_and_packed_weights_while_the_engine_computes(nvfp4_base, base) -> None:
    """The oracle is the 16-bit model with the masters as its weights, by autograd."""
    engine = TransformersEngine(str(nvfp4_base), "nvfp4", EngineOptions(engine="transformers", device="cpu"))
    model, dense = engine.policy_model(), load_model(base, "bf16")
    ids, names = torch.arange(1, 25)[None], [n for n, m in dense.named_modules() if n.endswith("_proj")]
    packed, scores = model(ids).logits, engine.score([[1, 2, 3]], [[4, 5]])
    WeightsPolicy(model, ((name, dense.get_submodule(name).weight) for name in names))
    multiply_by_masters_(model)
    for name in names:
        dense.get_submodule(name).weight.requires_grad_(True)
    own, expected = model(ids).logits, dense(ids).logits
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
    assert (own - packed).abs().max() > 1e-3
    assert engine.score([[1, 2, 3]], [[4, 5]]) == scores
    for logits in (own, expected):
        logits.square().sum().backward()
    for name in names:
        wanted = dense.get_submodule(name).weight.grad
        torch.testing.assert_close(
            master_of(model.get_submodule(name)).grad, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())
        )


def test_arms_differ_in_what_is_trained_only(load) -> None:
    arms = load("study_arms")
    settings = arms.JobSettings("tiny", "arith", 80, "transformers", [], 3, 2)
    configs = {
        name: load_recipe(arms.RECIPE, arms.overrides_of(arms.Job(name, 1e-3, 0), settings, Path("w")), steps=80)
        for name in (*arms.QAT_ARMS, "nvfp4_rounded", "packed_in")
    }
    for name, config in configs.items():
        assert (config.qat is None) == name.startswith("nvfp4")
        assert (config.qat and config.qat.mode) in (None, "adapter" if name == "packed_in" else "weights")
        assert config.loss.mismatch_gate == (None if name == "no_qat" else 0.01)
        for section in ("data", "rewards", "rollout", "optim", "run"):
            assert getattr(config, section) == getattr(configs["qat"], section)


def test_arms_in_fp8_differ_in_what_is_in_8_bits_only(load) -> None:
    arms = load("study_arms")
    settings = arms.JobSettings("tiny", "arith", 80, "transformers", [], 3, 2)
    names = (*arms.FP8_ARMS, "bf16", "fp8")
    configs = {
        name: load_recipe(arms.RECIPE, arms.overrides_of(arms.Job(name, 1e-3, 0), settings, Path("w")), steps=80)
        for name in names
    }
    told = {name: (arms.ARMS[name].served, config.model.format) for name, config in configs.items()}
    assert told == {
        "bf16_weights": ("bf16", "nvfp4"),  # of which nothing is packed: see study_ways.py
        "fp8_both": ("fp8_block", "fp8_block"),
        "fp8_rollout": ("fp8_block", "fp8_block"),
        "bf16": ("bf16", "bf16"),
        "fp8": ("fp8_block", "fp8_block"),
    }
    both, rollout = configs["fp8_both"], configs["fp8_rollout"]
    assert (both.train.fp8_recipe, both.qat.forward, both.qat.quant_cfg.activations) == (
        "blockwise",
        "packed",
        "dynamic",
    )
    assert (rollout.train.fp8_recipe, rollout.qat.forward) == (None, "masters")
    assert both.qat.quant_cfg == rollout.qat.quant_cfg
    for section in ("data", "rewards", "rollout", "optim", "run"):
        assert len({repr(getattr(config, section)) for config in configs.values()}) == 1


def test_fp8_linears_that_are_not_their_masters_are_found() -> None:
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    linear = FP8Linear.from_linear(torch.nn.Linear(128, 256))
    linear.pack_(weight)
    assert different({"a": linear}, WeightsUpdate({"a": weight})) == []
    linear.weight_codes.view(torch.uint8)[200, 5] ^= 1
    assert different({"a": linear}, WeightsUpdate({"a": weight})) == ["a"]


def test_whole_weights_have_learning_rates_of_their_own(load, tmp_path) -> None:
    given = {"arms": ["nvfp4", "qat"], "rates": [1e-3], "weights_rates": [1e-4, 3e-4], "seeds": [0], "steps": 2}
    given |= {"base": TINY, "out": tmp_path / "out.json", "work": tmp_path, "engine": "transformers", "task": "arith"}
    study = load("study_queue").Study(SimpleNamespace(**given, set=[], test_rows=1, validation_rows=1))
    keys = [job.key for job in study.waiting()]
    assert keys == ["nvfp4-base", "nvfp4-0.001-0", "qat-0.0001-0", "qat-0.0003-0"]  # both are served from that base


def run_of(arm: str, rate: float | None, mismatch: list[float]) -> dict:
    steps = {"reward": [0.1, 0.2], "sampling/entropy": [1.0, 0.5], "noise/sigma": [0.0, 0.0], "mismatch_kl": mismatch}
    row = {"arm": arm, "rate": rate, "seed": 0, "test": "01" * 9, "validation": "01"}
    return row | ({} if rate is None else {"steps": steps})


def test_tables_and_picture_show_the_mismatch_where_weights_are_trained(load, tmp_path) -> None:
    runs = [run_of("nvfp4", None, []), run_of("qat", 1e-4, [2e-5, 1e-5]), run_of("no_qat", 1e-4, [1e-3, 4e-3])]
    results = {"runs": dict(enumerate(runs)), "machine": {"device": "CPU"}}
    report = load("study_report")
    assert report.mismatch_table(results)[1:] == [
        "| QAT: whole weights, through NVFP4 | 2.0e-05 | 2.0e-05 | 1.0e-05 | 2.0e-05 | 0.5 |",
        "| whole weights in 16 bits, NVFP4 rollouts | 1.0e-03 | 1.0e-03 | 4.0e-03 | 4.0e-03 | 4.0 |",
    ]
    assert len(report.noise_table(results)) == 1
    assert report.arms_table(results)[1].startswith("| QAT: whole weights, through NVFP4 | 0.0001 | 50.0 | 50.0")
    runs = [{**run, "steps": {k: v * 4 for k, v in run["steps"].items()}} for run in runs if run["rate"]]
    load("study_figure").draw({**results, "runs": dict(enumerate(runs))}, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 10_000


SHIPPED = REPOSITORY / "benchmarks" / "qat" / "study-qat-tiny.json"


@pytest.mark.parametrize("shipped", [SHIPPED, SHIPPED.parents[1] / "fp8" / "study-fp8-tiny.json"], ids=["qat", "fp8"])
def test_the_page_of_the_shipped_results_is_drawn_from_them(load, shipped) -> None:
    found = json.loads(shipped.read_text(encoding="utf-8"))
    page = load("study_report").page(found, f"{shipped.parent.name}/{shipped.name}")
    written = shipped.with_suffix(".md").read_text(encoding="utf-8")
    assert written == page, "run the report of scripts/study/study_qat.py, or of study_fp8.py"


def test_in_the_shipped_results_only_what_is_not_trained_through_the_quantizer_has_a_mismatch(load) -> None:
    found = json.loads(SHIPPED.read_text(encoding="utf-8"))
    for arm in load("study_arms").QAT_ARMS:
        finals = load("study_report").finals(found, arm)
        assert [run["seed"] for run in finals] == [0, 1, 2]
        values = [value for run in finals for value in run["steps"]["mismatch_kl"]]
        assert min(values) > 1e-4 if arm == "no_qat" else max(values) < 1e-11
