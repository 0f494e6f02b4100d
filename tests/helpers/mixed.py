"""Quantized folders as others write them, built tensor by tensor from a 16-bit folder, with the weights that they mean.

`write` says for each linear which algorithm of ModelOpt it is in. Numbers are computed here, in float64, and not by
qerl: a weight is code x block scale x scale of the tensor.
"""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoint_tensors import load_all

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
W4A4, W4A16, W8A8 = "NVFP4", "W4A16_NVFP4", "FP8"
GROUPS = {
    W4A4: {
        "format": "nvfp4-pack-quantized",
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        "input_activations": {
            "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local",
        },
    },
    W8A8: {
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    },
}  # fmt: skip
GROUPS[W4A16] = GROUPS[W4A4] | {"input_activations": None}


def power_of_two(value):
    return 2.0 ** torch.log2(value.double()).ceil()


def nvfp4(weight, round_scale):
    """(tensors of ModelOpt, float64 weight). `round_scale` gives the scale of the tensor that is stored."""
    scale = round_scale(weight.abs().amax() / (6 * 448)).float()
    blocks = weight.double().unflatten(1, (-1, 16))
    steps = (blocks.abs().amax(-1) / 6 / scale.double()).clamp(2**-6, 448).float().to(torch.float8_e4m3fn)
    step = (steps.double() * scale.double()).unsqueeze(-1)
    codes = ((blocks / step).abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    signed = (codes | (blocks < 0).long() << 3).flatten(1).to(torch.uint8)
    means = (torch.where(blocks < 0, -1.0, 1.0) * E2M1[codes] * step).flatten(1)
    packed = signed[:, ::2] | signed[:, 1::2] << 4
    return {"weight": packed, "weight_scale": steps, "weight_scale_2": scale}, means


def fp8(weight, round_scale):
    scale = round_scale(weight.abs().amax() / 448).float()
    codes = (weight.double() / scale.double()).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.double() * scale.double()


def as_compressed_tensors(tensors):
    """The tensors of one linear as llm-compressor writes them."""
    if "weight_scale_2" not in tensors:
        return {name: tensor if name == "weight" else tensor.reshape(1) for name, tensor in tensors.items()}
    names = {"weight": "weight_packed", "weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
    own = {names.get(name, name): tensor for name, tensor in tensors.items()}
    return own | {name: 1 / tensor.reshape(1) for name, tensor in own.items() if name.endswith("global_scale")}


def write(base, out, algorithm_of, writer="modelopt", round_scale=power_of_two, only_beside=False):
    """Write `out`; returns the float64 weight of each packed linear by module name.

    `writer` is modelopt or compressed-tensors. `only_beside`: hf_quant_config.json alone holds the config.
    """
    shutil.copytree(base, out)
    for file in (*out.glob("*.safetensors"), *out.glob("*.index.json")):
        file.unlink()
    tensors, means, found = load_all(base), {}, {}
    for name in [name for name in tensors if name.endswith(".weight") and tensors[name].ndim == 2]:
        module = name.removesuffix(".weight")
        if (algorithm := algorithm_of(module)) is None:
            continue
        own, means[module] = (fp8 if algorithm == W8A8 else nvfp4)(tensors.pop(name), round_scale)
        if algorithm != W4A16:
            own["input_scale"] = torch.tensor(0.015625)
        own = own if writer == "modelopt" else as_compressed_tensors(own)
        tensors |= {f"{module}.{part}": tensor for part, tensor in own.items()}
        found[module] = algorithm
        if module.endswith("k_proj"):
            tensors[f"{module}.k_scale"] = torch.tensor(1.0)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    quantization = modelopt_config(found) if writer == "modelopt" else compressed_config(found)
    if writer == "modelopt":
        nested = {("exclude_modules" if key == "ignore" else key): value for key, value in quantization.items()}
        (out / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": nested}))
    if not only_beside:
        config["quantization_config"] = quantization
    (out / "config.json").write_text(json.dumps(config))
    return means


def with_pictures(folder, kind):
    """Turn a folder into one of a model for pictures and text, of the type `kind`, as vendors lay it out."""
    file, path = folder / "model.safetensors", folder / "config.json"
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(file).items()}
    others = {"model.visual.merger.weight": torch.ones(4, 4), "mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}
    save_file(tensors | others, file)
    text = json.loads(path.read_text())
    quantization = json.dumps(text.pop("quantization_config")).replace('"model.', '"model.language_model.')
    whole = {"model_type": kind, "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    path.write_text(json.dumps(whole | {"quantization_config": json.loads(quantization)}))


def modelopt_config(found):
    common = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head", "model.layers.0.mlp*"]}
    if len(set(found.values())) == 1 and "lm_head" not in found:
        return common | {"quant_algo": next(iter(found.values())), "group_size": 16}
    layers = {module: {"quant_algo": algorithm, "group_size": 16} for module, algorithm in found.items()}
    return common | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def compressed_config(found):
    algorithms = sorted(set(found.values()))
    targets = {algorithm: [name for name in found if found[name] == algorithm] for algorithm in algorithms}
    groups = {f"group_{n}": GROUPS[each] | {"targets": targets[each]} for n, each in enumerate(algorithms)}
    layouts = {group["format"] for group in groups.values()}
    layout = layouts.pop() if len(layouts) == 1 else "mixed-precision"
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": []}
