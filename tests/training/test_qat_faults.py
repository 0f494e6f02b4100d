"""What goes wrong in a run through the quantizer: numbers that are not finite, and a recipe that was changed."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.base.errors import CheckpointError, ConfigError, EngineError
from qerl.checkpoint import folder as sealed
from qerl.checkpoint.resolve import resolve_model
from qerl.cli.main import app
from qerl.cli.terminal import run_command
from qerl.config.recipe import load_config, save_config
from qerl.config.schema import RunConfig
from tests.helpers.checkpoint_tensors import tensors_in
from tests.helpers.small_run import numbers, small_config
from training.run import resume, start
from training.run_dir.checkpoint import newest_checkpoint
from training.run_dir.start_base import start_base
from training.trainer import QerlTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

QAT = ("qat.mode=weights", "run.keep_checkpoints=9", "noise.enabled=false", "optim.learning_rate=1e-3")
FP8 = ("model.format=fp8_block", "qat.quant_cfg=fp8_block")
EVERY = "run.save_every=1"


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("qat")
    return start(small_config(base, folder, *QAT, EVERY, "qat.targets=['re:.*mlp.*']", steps=1), "qat").run_dir


@pytest.fixture
def run(finished, tmp_path):
    """A copy that has steps left, to be changed."""
    folder = shutil.copytree(finished, tmp_path / "run")
    config = load_config(folder / "config.yaml")
    save_config(config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})}), folder / "config.yaml")
    return folder


def broken_by(update, value, monkeypatch):
    """Let that update of the optimizer leave `value` in one number of what is trained."""
    original, updates = QerlTrainer.create_optimizer, []

    def watched(trainer, *given):
        optimizer = original(trainer, *given)

        def after(*_):
            updates.append(1)
            if len(updates) == update:
                next(iter(trainer.parts.policy.parameters())).data.view(-1)[5] = value

        optimizer.register_step_post_hook(after)
        return optimizer

    monkeypatch.setattr(QerlTrainer, "create_optimizer", watched)


@pytest.mark.parametrize(
    ("value", "overrides"),
    [(math.inf, ("qat.masters=bfloat16",)), (math.nan, ("qat.mode=adapter",))],
    ids=["inf in bfloat16", "adapter"],
)
def test_a_number_that_is_not_finite_is_not_saved(base, tmp_path, monkeypatch, value, overrides):
    """The last checkpoint is the one before it, from which the run can go on."""
    broken_by(2, value, monkeypatch)
    with pytest.raises(EngineError, match=r"update of step 2 left NaN or infinity .* lower optim\.lear.* checkpoint"):
        start(small_config(base, tmp_path, *QAT, EVERY, *overrides, steps=2), "qat")
    run = tmp_path / "run"
    assert newest_checkpoint(run).name == "step-000001"
    assert not [*run.glob("checkpoints/.*"), *run.glob("model"), *run.glob(".model*")]
    assert len(numbers(run)) == 2


def test_a_master_that_is_not_finite_is_not_packed(base, tmp_path, monkeypatch):
    broken_by(1, math.nan, monkeypatch)
    said = r"update of model\.lay.*q_proj holds inf or NaN: .*last checkpoint"
    with pytest.raises(EngineError, match=said) as refused:
        start(small_config(base, tmp_path, *QAT, "run.save_every=9", *FP8, steps=2), "qat")
    assert "\n" not in str(refused.value)
    assert not [*(tmp_path / "run").glob("checkpoints/*"), *(tmp_path / "run").glob("model")]
    assert len(numbers(tmp_path / "run")) == 1


def test_a_model_that_is_not_finite_is_not_packed(base, tmp_path):
    damaged = shutil.copytree(base, tmp_path / "damaged")
    name = "model.layers.1.mlp.down_proj.weight"
    file = next(path for path in damaged.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    tensors[name][3, 7] = math.inf
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"^model\.layers\.1\.mlp\.down_proj\.weight holds NaN or infinity") as no:
        start(small_config(damaged, tmp_path, *QAT, steps=1), "qat")
    assert "\n" not in str(no.value)
    assert not (tmp_path / "run").exists()


def test_an_export_of_masters_that_are_not_finite_names_the_remedy(run, tmp_path, capsys):
    checkpoint = run / "checkpoints/step-000001"
    masters = tensors_in(checkpoint / "weights")
    name = next(iter(masters))
    masters[name][0, 0] = math.nan
    save_file(masters, checkpoint / "weights/model.safetensors")
    sealed.seal(checkpoint)
    said = refused(capsys, "export", "--run", run, "--to", "nvfp4", "--out", tmp_path / "out")
    assert f"the trained {name} holds NaN or infinity" in said
    assert "earlier one (`qerl export --step`)" in said
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


CHANGES = {
    "masters": ({"masters": "bfloat16"}, "qat.masters: bfloat16, where it was float32 when"),
    "mode": ({"mode": "adapter", "targets": None}, "qat.mode: adapter, where it was weights, qat.targets: null, where"),
    "targets": ({"targets": None}, 'qat.targets: null, where it was ["re:.*mlp.*"] when'),
    "norms": ({"train_norms": True}, "qat.train_norms: true, where it was false when"),
    "activations": ({"quant_cfg": {"activations": "dynamic"}}, "qat.quant_cfg.activations: dynamic, where it was none"),
    "layers": ({"quant_cfg": "nvfp4_w4a16_ffn"}, 'qat.quant_cfg.ignore: ["lm_head", "re:.*_attn.*"], where it was'),
    "format": ({"quant_cfg": "fp8_block"}, "qat.quant_cfg.weights.format: fp8_block, where it was nvfp4"),
    "no section": (None, "no section qat, and it had one when the run began"),
}


def refused(capsys, *command):
    """The one line in which a command that fails says why."""
    with pytest.raises(SystemExit) as exit:
        run_command(app, list(map(str, command)))
    assert exit.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert [line for line in said if line.startswith("error: ")] == said[-1:]
    return said[-1]


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_resumed_run_trains_as_it_began(run, change, message, capsys):
    given = load_config(run / "config.yaml").model_dump(mode="json")
    qat = None if change is None else {**given["qat"], **change}
    file = run / "config.yaml"
    format = "fp8_block" if change == {"quant_cfg": "fp8_block"} else "nvfp4"
    changed = {**given, "qat": qat, "model": {**given["model"], "format": format}}
    save_config(RunConfig.model_validate(changed), file)
    if change is None:
        shutil.rmtree(run / "base")  # what was trained is known without it
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    said = refused(capsys, "train", "--resume", run)
    assert f"{file} has {message}" in said
    assert said.endswith("put it back, or start a new run")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_where_run_json_does_not_say_what_is_trained_the_base_does(run):
    """As in a run of an earlier version."""
    about = json.loads((run / "run.json").read_text())
    del about["qat"]
    (run / "run.json").write_text(json.dumps(about))
    config = load_config(run / "config.yaml")
    quant = config.qat.quant_cfg.model_copy(update={"ignore": ("re:.*self_attn.*",)})
    qat = config.qat.model_copy(update={"quant_cfg": quant})
    save_config(config.model_copy(update={"qat": qat}), run / "config.yaml")
    with pytest.raises(ConfigError, match=r"base.* was made by another qat\.quant_cfg .* put that one back"):
        resume(run)


def test_where_it_keeps_weights_may_be_written_out(run):
    """float32 is what `auto` means here."""
    config = load_config(run / "config.yaml")
    assert config.qat.masters == "auto"
    qat = config.qat.model_copy(update={"masters": "float32"})
    save_config(config.model_copy(update={"qat": qat}), run / "config.yaml")
    assert resume(run).steps == 2


def test_a_base_that_a_start_left_of_another_model_is_made_again(base, tmp_path, caplog):
    """A start that was killed leaves the base, and no run yet. With the same model it is used as it is."""
    other, run = shutil.copytree(base, tmp_path / "other"), tmp_path / "run"
    file = next(other.glob("*.safetensors"))
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    left, model = small_config(other, tmp_path, *QAT), small_config(base, tmp_path, *QAT)
    run.mkdir()
    start_base(left, resolve_model(str(other)), run)
    before = sealed.weights_digest(run / "base")
    start_base(left, resolve_model(str(other)), run)
    assert sealed.weights_digest(run / "base") == before
    start_base(model, resolve_model(str(base)), run)
    assert "made of" in caplog.text
    assert sealed.weights_digest(run / "base") != before
    save_config(model, run / "config.yaml")  # the run has begun
    with pytest.raises(CheckpointError, match=r"base was made of other weights than .*: give those as --model, or"):
        start_base(left, resolve_model(str(other)), run)


def test_a_text_part_that_its_config_does_not_describe_is_refused_before_it_is_packed(base, tmp_path):
    folder, run = shutil.copytree(base, tmp_path / "whole"), tmp_path / "run"
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3_vl_text"}
    config = small_config(folder, tmp_path, *QAT)
    run.mkdir()
    described = {key: value for key, value in text.items() if key != "intermediate_size"}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": described}))
    with pytest.raises(CheckpointError, match=rf"^{folder} does not hold the model that its config.json describes"):
        start_base(config, resolve_model(str(folder)), run)
    assert not any(run.iterdir())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text}))
    assert start_base(config, resolve_model(str(folder)), run).path == run / "base"
