"""Adapters on a small base with a start, of each kind, and what a merge of them should give, in float64."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.base_start import LORA_A, LORA_B, START, BaseStart, TrainedStart, digest_of, read_start
from qerl.checkpoint.folder import TRAINED_ON
from quantize.export.options import ExportOptions
from quantize.export.run import export
from tests.helpers.merged import random_adapter
from tests.helpers.starts import decoded_weights, dense_weights, quantized_with_start

RANK, SCALING = 24, 2.0  # of the start that acts, and of the adapters below
PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [40, 30, 20, 10, 9, 8, 7, 6]])


def small_bases(folder):
    """A 16-bit model, its NVFP4 base with a start of rank 32, and the weights of both."""
    source, nvfp4 = quantized_with_start(folder, rank=32)
    return SimpleNamespace(source=source, nvfp4=nvfp4, dense=dense_weights(source), decoded=decoded_weights(nvfp4))


def factors_of(bases):
    return read_start(BaseStart(bases.nvfp4 / START, RANK))


def name_start(folder, base, kind, factors):
    """What a run leaves beside its adapter."""
    start = None if kind == "none" else asdict(TrainedStart(kind, RANK, digest_of(factors)))
    said = {"base": str(base), "format": "nvfp4", **({"start": start} if start else {})}
    (folder / TRAINED_ON).write_text(json.dumps(said))
    return folder


def make_adapter(folder, bases, kind, rank=28, **options):
    """An adapter of random factors, on its base's start if it is `trained`; `none` is as before qerl knew starts."""
    random_adapter(folder, bases.source, rank=rank, **options)
    if kind == "trained":
        path, start = folder / "adapter_model.safetensors", factors_of(bases)
        tensors = load_file(path)
        for name, tensor in tensors.items():
            own = name.removeprefix("base_model.model.")
            if name.endswith(LORA_A):
                tensor[:RANK] = start[own].float() + 0.02 * tensor[:RANK]
            elif name.endswith(LORA_B):
                tensor[:, :RANK] = start[own].float() / SCALING + 0.02 * tensor[:, :RANK]
                tensor[:, RANK:] *= 0.2
        save_file(tensors, path, metadata={"format": "pt"})
    return name_start(folder, bases.nvfp4, kind, factors_of(bases))


def product(tensors, scaling=1.0):
    """float64 s B A by module."""
    names = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    return {name: scaling * tensors[name + LORA_B].double() @ tensors[name + LORA_A].double() for name in names}


def by_hand(bases, adapter, kind, onto):
    """float64 weights: the trained policy, or what the training changed on the 16-bit weights."""
    own, start = product(*read_adapter(adapter)), product(factors_of(bases))
    weights = bases.decoded if onto == "trained" else bases.dense
    sign = {("frozen", "trained"): 1, ("trained", "original"): -1}.get((kind, onto), 0)
    return {
        name: weight.double() + own.get(name, 0.0) + sign * (start[name] if kind == "frozen" or name in own else 0.0)
        for name, weight in weights.items()
    }


def merged(adapter, to, out, **options):
    return export(ExportOptions(str(adapter), to, out, device="cpu", **{"prompt_count": 0, **options}))


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@torch.no_grad()
def holding(bases, weights):
    """A plain model in float64 with these weights in its linears."""
    model = load(bases.source)
    for name, weight in weights.items():
        model.get_submodule(name).weight.copy_(weight)
    return model


@torch.no_grad()
def logits(model):
    return model(PROMPT).logits


def with_peft(model, adapter):
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).double()


def assert_rounded_once(written, exact):
    for name, weight in exact.items():
        half_step = weight.abs().log2().floor().exp2() / 256  # bfloat16 has 8 significant bits
        error = (written[f"{name}.weight"].double() - weight).abs()
        assert (error <= half_step + 1e-6).all(), name  # 1e-6 is for float32 sums
