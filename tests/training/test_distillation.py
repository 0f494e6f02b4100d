"""Runs that distill, on the transformers engine: one step against the dense loss, whole runs, and what is refused."""

import json
import shutil

import pytest
import torch

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.folder import weights_digest
from qerl.checkpoint.load import load_model
from qerl.config.recipe import load_recipe
from qerl.model.packed_attention import hidden_states, packed_attention_of
from qerl.model.packing import pack
from qerl.plan.micro_batch_plan import MicroBatchPlan
from tests.helpers.bases import write_base
from tests.helpers.small_run import numbers, small_config
from tests.helpers.trainer_factory import COMPLETION, MASK, PROMPT, batch_of, build_trainer, run_backward, with_plan
from training.policy.teacher import Teacher
from training.run import resume, start

DISTILL = ("distill.beta=1.0", "noise.enabled=false", "rewards=[{name: accuracy}]")
DISTILL += ("optim.learning_rate=1e-3", "run.save_every=1")
PADDED = 24  # tokens of the teacher's vocabulary beyond the tokenizer's

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def teacher(base, tmp_path_factory):
    """Another random model with the same tokenizer, wider, and with a padded vocabulary."""
    folder = write_base(tmp_path_factory.mktemp("teacher") / "teacher", seed=1, hidden=96)
    model = load_model(folder, "bf16")
    model.resize_token_embeddings(model.config.vocab_size + PADDED, mean_resizing=False)
    model.save_pretrained(folder)
    for shard in folder.glob("model-*"):
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    return folder


def config_of(base, folder, *overrides, steps=2, out="run"):
    return small_config(base, folder, *DISTILL, *overrides, steps=steps, out=out)


def dense_loss(trainer, teacher_model, beta, temperature):
    """The mean divergence over all completion tokens by plain forward passes over unpadded rows, in float64."""
    found = []
    for i in range(len(PROMPT)):
        length = int(MASK[i].sum())
        ids = torch.cat([PROMPT[i], COMPLETION[i, :length]])[None]
        models = trainer.model, teacher_model
        logits = [model(input_ids=ids).logits[0, 2:-1].double() / temperature for model in models]
        shared = min(each.shape[1] for each in logits)
        log_p, log_q = (torch.log_softmax(each[:, :shared], -1) for each in logits)
        log_m = torch.logaddexp(log_p + torch.tensor(1 - beta).log(), log_q + torch.tensor(beta).log())
        of = {0.0: log_p, 1.0: log_q}.get(beta, log_m)
        forward, backward = (log_q.exp() * (log_q - of)).sum(-1), (log_p.exp() * (log_p - of)).sum(-1)
        found.append(beta * forward + (1 - beta) * backward if 0 < beta < 1 else backward if beta else forward)
    return torch.cat(found).mean()


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_a_step_is_the_dense_loss_however_it_is_cut(base, teacher, tmp_path, monkeypatch, beta):
    pair = Teacher.pair
    monkeypatch.setattr(Teacher, "pair", lambda self, student: pair(self, student)._replace(chunk_tokens=3))
    keys = (f"distill.beta={beta}", f"distill.teacher={teacher}", "model.format=bf16", "rollout.temperature=0.9")
    trainer = build_trainer(config_of(base, tmp_path, *keys), tmp_path)
    expected = dense_loss(trainer, load_model(teacher, "bf16"), beta, 0.9)
    expected.backward()
    parameters = [each for each in trainer.model.parameters() if each.requires_grad]
    gradients = [each.grad.clone() for each in parameters]
    for budget in (8, 64):  # several micro-batches, and one
        trainer.model.zero_grad()
        parts = with_plan(trainer.parts, MicroBatchPlan(budget))
        found = run_backward(trainer, batch_of(None, torch.zeros(4, 4)), parts)
        torch.testing.assert_close(found.loss.double(), expected.detach(), rtol=1e-5, atol=1e-7)
        for each, gradient in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(each.grad, gradient, rtol=2e-4, atol=1e-6)
        assert found.metrics["kl_to_teacher/forward"] > 0


@pytest.fixture(scope="module")
def ran(base, tmp_path_factory):
    """Whole weights through the quantizer, taught by the run's own base."""
    return start(config_of(base, tmp_path_factory.mktemp("qad"), "qat.mode=weights"), "qad").run_dir


def test_what_it_logs(ran):
    """Rounding costs something, engine and trainer agree, accuracy is logged, and every completion is trained on."""
    rows = numbers(ran)
    assert all(row["loss"] == pytest.approx(row["kl_to_teacher/reverse"]) and row["loss"] > 1e-3 for row in rows)
    assert all(row["mismatch_kl"] < 1e-6 and row["completions/trained_share"] == 1.0 for row in rows)
    assert all("rewards/accuracy" in row and "groups/zero_variance_share" not in row for row in rows)


def test_an_adapter_on_a_4_bit_base_learns_from_the_model_that_was_quantized(nvfp4_base, base, tmp_path):
    """That is its null teacher, as run.json says."""
    keys = ("distill.teacher=null", "validation.every=1", "validation.limit=4")
    run = start(config_of(nvfp4_base, tmp_path, *keys, steps=1), "distill").run_dir
    _, row = numbers(run)
    assert row["kl_to_teacher/forward"] > 1e-3
    assert row["validation/accuracy"] is not None
    inputs = json.loads((run / "run.json").read_text())["inputs"]
    assert inputs["the teacher's weights"] == weights_digest(base)


def test_a_teacher_that_changed_stops_a_resumed_run(base, tmp_path):
    other = shutil.copytree(base, tmp_path / "teacher")
    run = start(config_of(base, tmp_path, f"distill.teacher={other}", "model.format=bf16", steps=1), "distill").run_dir
    changed("config.json", rms_norm_eps=1e-5)(other)
    with pytest.raises(ConfigError, match="the teacher's weights changed"):
        resume(run, steps=2)


def renamed_token(folder):
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    token = next(each for each in vocabulary if vocabulary[each] == 300)
    data["model"]["vocab"] = {"renamed" if each == token else each: number for each, number in vocabulary.items()}
    data["model"]["merges"] = [pair for pair in data["model"]["merges"] if token not in ("".join(pair), *pair)]
    (folder / "tokenizer.json").write_text(json.dumps(data))


def changed(file, **values):
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))


REFUSED = {
    "tokenizer": (
        renamed_token,
        r"tokenizer than the student: \d tokens have another number \('.*': \d+ and none.*take a",
    ),
    "end": (changed("tokenizer_config.json", eos_token="<|endoftext|>"), "another eos_token than the student"),
    "positions": (changed("config.json", max_position_embeddings=100), "reads 100 positions, and a prompt with its"),
    "gone": (shutil.rmtree, "there is no folder"),
    "quantized": ("nvfp4_base", "is already quantized .NVFP4., and a teacher is a 16-bit"),
    "run": ("ran", "is a run, and a teacher is .* write `qerl export"),
}


@pytest.mark.parametrize(("change", "says"), REFUSED.values(), ids=REFUSED)
def test_a_teacher_that_cannot_teach_is_refused_and_nothing_is_written(request, base, tmp_path, change, says):
    if isinstance(change, str):
        other = request.getfixturevalue(change)
    else:
        other = shutil.copytree(base, tmp_path / "other")
        change(other)
    with pytest.raises((ConfigError, CheckpointError), match=says) as refused:
        start(config_of(base, tmp_path, "qat.mode=weights", f"distill.teacher={other}"), "distill")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("run/[!.]*"))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("loss.kl_coef=0.1",), "has no other term; write loss.kl_coef: 0"),
        (("rollout.dynamic_sampling.enabled=true",), "rollout.dynamic_sampling.enabled: false"),
        (("model.format=bf16",), "there would be nothing to learn"),
        (("distill.beta=1.5",), "distill.beta: got 1.5"),
        (("distill.teacher_model_name_or_path=x",), "did you mean distill.teacher"),
    ],
)
def test_a_combination_that_means_nothing_is_refused(tmp_path, overrides, says):
    with pytest.raises(ConfigError, match=says):
        config_of("tiny", tmp_path, "distill.beta=1.0", *overrides)


GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1}


def test_models_that_divide_their_logits_are_student_and_teacher(tmp_path):
    """Granite: the logprobs of the trainer are those of the engine, and both divisors are in the divergence."""
    student = write_base(tmp_path / "student", "granite", logits_scaling=4.0, **GRANITE)
    teacher = write_base(tmp_path / "teacher", "granite", seed=1, logits_scaling=2.5, **GRANITE)
    keys = ("model.format=bf16", f"distill.teacher={teacher}", "rollout.temperature=0.7")
    trainer = build_trainer(config_of(student, tmp_path, *keys), tmp_path)
    expected = dense_loss(trainer, load_model(teacher, "bf16"), 1.0, 0.7)
    found = run_backward(trainer, batch_of(None, torch.zeros(4, 4)))
    torch.testing.assert_close(found.loss.double(), expected.detach(), rtol=1e-5, atol=1e-7)
    run = start(config_of(student, tmp_path, *keys, steps=1, out="ran"), "granite").run_dir
    assert numbers(run)[0]["mismatch_kl"] < 1e-6


def test_a_teacher_with_experts_chooses_them_itself(tmp_path):
    """What the engine recorded are the student's choices: here the same two experts for every token."""
    teacher = Teacher(
        write_base(tmp_path / "teacher", "qwen3_moe"), load_recipe("qad_tiny"), torch.device("cpu"), shared=40
    )
    ids, mask = torch.arange(3, 15).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    of_student = pack(ids, mask, 3, experts=[torch.tensor([0, 1], dtype=torch.uint8).expand(6, 2, 2)] * 2)
    with torch.no_grad(), packed_attention_of(teacher.model):
        replayed = hidden_states(teacher.model, of_student)
    own = teacher.hidden(of_student)
    assert torch.equal(own, teacher.hidden(pack(ids, mask, 3)))
    assert not torch.allclose(own, replayed)
