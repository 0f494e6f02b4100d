"""Folders that --model may name: a 16-bit model, an NVFP4 checkpoint, an adapter and a run."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from qerl import formats
from qerl.checkpoint.folder import TINY_FOLDER
from tests.helpers.checkpoint_factory import fake_checkpoint

NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}, "input_activations": None}},
}

DYNAMIC = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "group", "dynamic": True}


def make_base(folder="models/Small-1B"):
    return fake_checkpoint(folder)


def make_nvfp4(folder="checkpoints/Small-1B-NVFP4A16", source=None):
    path = fake_checkpoint(folder, quantization_config=NVFP4)
    if source is not None:
        (path / "quantize_report.json").write_text(json.dumps({"source": str(source)}))
    return path


def make_adapter(folder, base):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def make_run(tmp_path, base, name="r1", model_format="nvfp4", steps=(5, 40)):
    run = tmp_path / "runs" / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"model:\n  base: {base}\n  format: {model_format}\n")
    (run / "metrics.jsonl").write_text("")
    for step in steps:
        make_adapter(run / "checkpoints" / f"step-{step:06d}", base)
    return run


def hub_snapshot(cache, repo, fill):
    """A model in the hub's cache, as the hub's client stores it."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123456789abcdef"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123456789abcdef")
    fill(snapshot)
    return snapshot


def edited(folder, change=None, **config):
    """`folder` after its tensors, in one file, became those that `change` returns, and config.json got other values."""
    if change is not None:
        (file,) = folder.glob("*.safetensors")
        save_file(change(load_file(file)), file, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def with_activations(folder, kind, out):
    """A copy of an NVFP4 checkpoint that rounds its input, with static scales that differ by layer; returns `out`."""
    shutil.copytree(folder, out)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]

    def scaled(tensors):
        modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
        scales = {f"{name}.input_global_scale": torch.tensor([400.0 + int(name.split(".")[2])]) for name in modules}
        return tensors | scales

    quantization = formats.NVFP4.quantization_config(ignored, kind)
    return edited(out, scaled if kind == "static" else None, quantization_config=quantization)


def without_template(folder):
    """The embedded model as a base version of it would be: with a tokenizer and without a chat template."""
    shutil.copytree(TINY_FOLDER, folder)
    for file in folder.glob("*chat_template*"):
        file.unlink()
    config = folder / "tokenizer_config.json"
    kept = {key: value for key, value in json.loads(config.read_text()).items() if key != "chat_template"}
    config.write_text(json.dumps(kept))
    return folder
