"""Runs with 4-bit activations on the transformers engine: whole weights, and a LoRA on a frozen base."""

import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl.base.errors import CheckpointError, ConfigError, DataError
from qerl.checkpoint.activations import GRPO_WARNING, input_scales, read_activations
from qerl.checkpoint.export import dense_tensors, read_masters
from qerl.checkpoint.load import load_model, load_tokenizer
from qerl.checkpoint.shards import read_tensors
from qerl.formats import NVFP4
from qerl.formats.nvfp4.activations import Activations
from quantize.export.options import ONLY_QERL, ExportOptions
from quantize.export.run import export
from tests.helpers.bases import write_base
from tests.helpers.model_folders import with_activations
from tests.helpers.small_run import numbers, small_config
from training.run import start

pytestmark = pytest.mark.usefixtures("one_thread")
QAT = ("qat.mode=weights", "noise.enabled=false", "optim.learning_rate=1e-3")


def agrees(run):
    """Whether trainer and engine agreed at every step, as they would not if one of them left activations in 16 bits."""
    return all(row["mismatch_kl"] < 1e-10 and row["mismatch/max_abs"] < 1e-4 for row in numbers(run))


def test_whole_weights_are_trained_with_activations_that_both_sides_round(base, tmp_path, caplog):
    config = small_config(base, tmp_path, *QAT, "qat.quant_cfg=nvfp4_w4a4", steps=1)
    with caplog.at_level(logging.WARNING):
        run = start(config, "w4a4").run_dir
    assert agrees(run)
    assert caplog.messages.count(GRPO_WARNING) == 1
    for folder in (run / "base", run / "model"):
        assert set(read_activations(folder, NVFP4).values()) == {Activations()}
    caplog.clear()
    report = export(ExportOptions(str(run), out=tmp_path / "exported"))
    assert set(report.commands) == {"chat"}  # stock vLLM would refuse the folder
    assert any(ONLY_QERL in line for line in caplog.messages)
    assert set(export(ExportOptions(str(run), "bf16", tmp_path / "bf16")).commands) == {"chat", "vllm"}


def largest_inputs(base, rows):
    """By transformers' own model: the amax of what a norm, attention and the MLP hand to q/k/v, o and down."""
    model, found = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), {}
    for leaf in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):

        def watch(_, inputs, name=f"model.layers.1.{leaf}"):
            found[name] = max(found.get(name, 0.0), inputs[0].abs().max().item())

        model.get_submodule(f"model.layers.1.{leaf}").register_forward_pre_hook(watch)
    with torch.no_grad():
        for ids in rows:
            model(torch.tensor([ids]))
    return found


def test_static_scales_come_from_the_rows_and_stay_through_training_and_export(base, tmp_path):
    rows = tmp_path / "texts.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{n} plus {n} is {2 * n}"}) + "\n" for n in range(5)))
    given = ("qat.quant_cfg=nvfp4_w4a4_static", f"qat.quant_cfg.calibration.data={rows}")
    run = start(small_config(base, tmp_path, *QAT, *given, steps=1), "static").run_dir
    assert agrees(run)
    begun, model = (read_activations(run / name, NVFP4) for name in ("base", "model"))
    assert begun == model
    tokenizer = load_tokenizer(base)
    texts = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    for name, amax in largest_inputs(base, ids).items():
        assert 2688 / 16 < amax * begun[name].global_scale <= 2688 / 4  # a power of two with two bits of head room
    masters = read_masters(run / "base", run / "checkpoints/step-000001/weights")
    assert not any("scale" in name for group in dense_tensors(masters) for name in group)


def test_a_calibration_that_cannot_be_read_is_refused(base, tmp_path):
    given = ("qat.quant_cfg=nvfp4_w4a4_static", f"qat.quant_cfg.calibration.data={tmp_path}/none.jsonl")
    with pytest.raises(DataError, match=r"^qat\.quant_cfg\.calibration\.data: there is no file .*none\.jsonl"):
        start(small_config(base, tmp_path, *QAT, *given), "static")
    assert not (tmp_path / "run" / "base").exists()


def test_biases_stay_in_the_result(tmp_path):
    """Qwen2 has them on q, k and v."""
    base = write_base(tmp_path / "qwen2", family="qwen2")
    run = start(small_config(base, tmp_path, *QAT, steps=1), "biases").run_dir
    masters = read_masters(run / "base", run / "checkpoints/step-000001/weights")
    dense = {name: tensor for group in dense_tensors(masters) for name, tensor in group.items()}
    assert set(read_tensors(run / "model")) == set(read_tensors(run / "base"))
    assert set(dense) == set(read_tensors(base))


def test_a_lora_on_a_base_with_activations(nvfp4_base, tmp_path):
    folder = with_activations(nvfp4_base, "static", tmp_path / "w4a4")
    assert agrees(start(small_config(folder, tmp_path, "noise.enabled=false", steps=1), "lora").run_dir)
    with pytest.raises(ConfigError, match=r"adapter.dropout: 0.1 does not go with .*w4a4"):
        start(small_config(folder, tmp_path, "adapter.dropout=0.1", out="other"), "lora")


def test_rows_from_which_no_scale_follows_are_refused(base):
    model = load_model(base, "bf16")
    model.model.layers[1].input_layernorm.weight.data[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"input of model.layers.1.self_attn.q_proj has the amax nan over 1 cal"):
        input_scales(model, ["model.layers.1.self_attn.q_proj"], [[5, 6, 7]], 2)
