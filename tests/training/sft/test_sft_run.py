"""Runs on given conversations: a step against the dense loss, a run against TRL's trainer, resuming, validation."""

import io
import json
import shutil

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import training.run
import training.sft_step
from qerl.base.errors import ConfigError
from qerl.checkpoint.adapter import adapter_tensors
from qerl.checkpoint.load import load_model
from qerl.cli.plan import show_plan_at
from qerl.config.recipe import load_config, load_recipe
from qerl.report.page import render_text
from qerl.report.read import read_run
from tests.helpers.bases import write_base
from tests.helpers.small_run import numbers, same_adapters
from tests.helpers.small_sft import TALKS, small_sft
from training.preflight.dry_run import dry_run
from training.run import resume, start
from training.run_dir.log import read_metrics
from training.run_dir.verdict import best_of, ending
from training.step import backward
from training.trainer import QerlTrainer

GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
STEPS = 3

pytestmark = pytest.mark.usefixtures("one_thread")


def random_adapter(monkeypatch, seed=1):
    """Let runs begin with a random adapter, so that A has a gradient too; returns the policies that were built."""
    build, built = training.run.build_policy, []

    def with_noise(*given):
        policy = build(*given)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in adapter_tensors(policy.model).values():
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
        built.append(policy)
        return policy

    monkeypatch.setattr(training.run, "build_policy", with_noise)
    return built


def stock(base, tensors, config, folder):
    """(adapter, metrics of each step) of TRL's own trainer, which pads rows and knows nothing of ours."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    sizes = {"r": config.adapter.rank, "lora_alpha": config.adapter.alpha}
    model = get_peft_model(model, LoraConfig(**sizes, target_modules=list(config.adapter.targets)))
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            tensor.copy_(tensors[name])
    args = SFTConfig(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=4,
        assistant_only_loss=True, packing=False, max_length=None, learning_rate=1e-3, warmup_steps=0.3,
        lr_scheduler_type="cosine", weight_decay=0.1, adam_beta2=0.99, adam_epsilon=1e-4, max_grad_norm=0.2,
        optim="adamw_torch", gradient_checkpointing=False, bf16=False, use_cpu=True, save_strategy="no",
        logging_steps=1, report_to="none", disable_tqdm=True, loss_type="nll",
    )  # fmt: skip
    rows = Dataset.from_list([{"messages": talk} for talk in TALKS])
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(base))
    trainer.train()
    return adapter_tensors(model), trainer.state.log_history


def test_a_run_equals_that_of_trl(tmp_path, monkeypatch):
    monkeypatch.setattr("training.trainer.EPSILON", 1e-4)
    base = write_base(tmp_path / "base", hidden=32, dtype=torch.float32)
    (base / "chat_template.jinja").write_text(GENERATION)
    settings = ("model.format=bf16", "sft.rows_per_step=8", "optim.learning_rate=1e-3")
    settings += ("optim.warmup_ratio=0.3", "optim.weight_decay=0.1", "optim.max_grad_norm=0.2")
    config = small_sft(base, tmp_path, *settings, steps=STEPS)
    built = random_adapter(monkeypatch)
    before = {}
    begun = QerlTrainer.get_train_dataloader
    noted = lambda self: before.update(copied(self.parts.policy.model)) or begun(self)  # noqa: E731
    monkeypatch.setattr(QerlTrainer, "get_train_dataloader", noted)
    run_dir = start(config, "sft").run_dir
    expected, history = stock(base, before, config, tmp_path / "stock")
    for name, tensor in adapter_tensors(built[0].model).items():
        moved = (tensor - before[name]).norm()
        assert moved > 1e-4
        assert (tensor - expected[name]).norm() < 1e-3 * moved
    for row, reference in zip(numbers(run_dir), history[:STEPS], strict=True):
        assert row["nll"] == pytest.approx(row["loss"], rel=1e-6)
        for key in ("loss", "grad_norm", "learning_rate"):
            assert row[key] == pytest.approx(reference[key], rel=1e-5, abs=1e-7)


def copied(model):
    return {name: tensor.detach().clone() for name, tensor in adapter_tensors(model).items()}


def dense_loss(model, rows):
    """The mean negative log-likelihood of the learned tokens, by plain forward passes over one row at a time."""
    found = []
    for row in rows:
        ids, learned = torch.tensor(row.ids), torch.tensor(row.learned).bool()
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].double(), -1)
        found.append(-logprobs.gather(-1, ids[1:, None])[:, 0][learned[1:]])
    return torch.cat(found).mean()


def test_a_step_is_the_dense_loss_however_it_is_cut(base, tmp_path, monkeypatch):
    random_adapter(monkeypatch)
    seen = []

    def compared(parts, batch, objective, differentiate):
        found = backward(parts, batch, objective, differentiate)
        own = list(parts.policy.parameters())
        gradients = [each.grad.clone() for each in own]
        for each in own:
            each.grad = None
        dense_loss(parts.policy.model, rows[0]).backward()
        for each, gradient in zip(own, gradients, strict=True):
            torch.testing.assert_close(gradient, each.grad, rtol=2e-4, atol=1e-6)
        seen.append((found.loss.item(), dense_loss(parts.policy.model, rows[0]).item()))
        return found

    rows = []
    padded = training.sft_step.batch_of
    monkeypatch.setattr(training.sft_step, "batch_of", lambda given, pad: rows.append(given) or padded(given, pad))
    monkeypatch.setattr("training.trainer.backward", compared)
    for budget in (48, 512):  # several micro-batches, and one
        rows.clear()
        key = f"run.micro_batch_tokens={budget}"
        start(small_sft(base, tmp_path, "model.format=bf16", key, steps=1, out=f"run{budget}"), "sft")
    assert len(seen) == 2
    for ours, dense in seen:
        assert ours == pytest.approx(dense, rel=1e-5)


VALIDATED = ("validation.every=2", "validation.split=train", "validation.limit=null")


@pytest.fixture(scope="module")
def ran(nvfp4_base, tmp_path_factory):
    """A whole run with validations, on rows of its own."""
    folder = tmp_path_factory.mktemp("sft")
    held_out = [{"prompt": "What is 40 + 2?", "completion": "40 + 2 = 42"}]
    (folder / "held_out.jsonl").write_text(json.dumps(held_out[0]) + "\n")
    config = small_sft(nvfp4_base, folder, *VALIDATED, f"validation.source={folder / 'held_out.jsonl'}", steps=6)
    return start(config, "sft").run_dir


def test_it_learns_and_says_so(ran):
    rows = numbers(ran)
    assert rows[-1]["loss"] < 0.9 * rows[1]["loss"]
    measured = {row["step"]: row["validation/loss"] for row in rows if "validation/loss" in row}
    assert sorted(measured) == [0, 2, 4, 6]
    text = render_text(read_run(ran))
    assert "The loss went from" in text or "The loss fell from" in text
    assert f"{min(measured.values()):.2f}"[:3] in text
    assert (ran / "best" / "adapter_config.json").exists()
    assert not list(ran.glob("completions/*"))


def test_the_best_validation_is_the_one_with_the_lowest_loss(ran):
    config, rows = load_config(ran / "config.yaml").validation, read_metrics(ran)
    values = {row["step"]: row["validation/loss"] for row in rows if "validation/loss" in row and row["step"]}
    assert best_of(rows, config).step == min(values, key=values.get)
    assert ending(rows, config.model_copy(update={"stop_after": 9}), 6) is None


def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(ran, tmp_path):
    result = resume(shutil.copytree(ran, tmp_path / "run"), step=4)
    assert numbers(result.run_dir) == numbers(ran)
    assert same_adapters(result.adapter, ran / "adapter")


def test_the_last_rows_are_held_out_and_others_are_refused_when_it_resumes(nvfp4_base, tmp_path, caplog):
    with caplog.at_level("INFO"):
        run_dir = start(small_sft(nvfp4_base, tmp_path, "validation.every=1", steps=1), "sft").run_dir
    assert "the last 1 of 8 rows are held out" in caplog.text
    assert "7 rows with" in caplog.text
    assert "validation/loss" in numbers(run_dir)[-1]
    small_sft(nvfp4_base, tmp_path, rows=[{"messages": talk} for talk in TALKS[:-1]])
    with pytest.raises(ConfigError, match="the rows of the data changed"):
        resume(run_dir, steps=2)


def test_whole_weights_are_learned_through_the_quantizer(base, tmp_path):
    result = start(small_sft(base, tmp_path, "qat.mode=weights", "optim.learning_rate=1e-3", steps=3), "sft")
    losses = [row["loss"] for row in numbers(result.run_dir)]
    assert losses[-1] < losses[0]
    assert load_model(result.adapter, "nvfp4")(torch.tensor([[5, 6]])).logits.isfinite().all()


def test_a_dry_run_shows_what_is_learned_and_the_plan(nvfp4_base, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    assert dry_run(small_sft(nvfp4_base, tmp_path), console, show_plan_at)
    text = console.file.getvalue()
    assert "data: 8 rows of " in text
    assert "row 1, of which the model learns what stands between >>> and <<<:\n<|im_start|>user\n" in text
    assert "<|im_start|>assistant\n>>>3 + 4 = 7<|im_end|><<<" in text
    assert "Nothing is sampled" in text
    assert "KV cache" not in text.replace("no KV cache", "")
    assert not (tmp_path / "run").exists()


def test_it_teaches_the_embedded_model_and_its_adapter_is_a_warm_start_for_rl(tmp_path):
    """The model works a third of the problems out; the solutions that it is shown always do, and it comes to do so."""
    given = ("model.format=bf16", "data.limit=128", "validation.every=null", "sft.rows_per_step=16")
    config = load_recipe("sft_tiny", given, steps=8, out=str(tmp_path / "sft"))
    tuned = start(config, "sft_tiny").run_dir
    losses = [row["loss"] for row in numbers(tuned)]
    assert losses[-1] < 0.5 * losses[0]
    begun = {}
    for name, model in (("fresh", "tiny"), ("tuned", str(tuned))):
        keys = ("model.format=bf16", "data.limit=16", "rollout.group_size=4", "noise.enabled=false")
        config = load_recipe("tiny", keys, base=model, steps=1, out=str(tmp_path / name))
        begun[name] = numbers(start(config, "tiny").run_dir)[0]["reward"]
    assert begun["tuned"] > begun["fresh"] + 0.2
    assert json.loads((tmp_path / "tuned" / "run.json").read_text())["on_adapter"]
