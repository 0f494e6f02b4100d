#!/usr/bin/env python3
"""Write a checkpoint with the shape of a real model and random weights, for measurements that need no real weights.

    python3 scripts/models/make_random_checkpoint.py --shape qwen2.5-7b --out checkpoints/random-7b-NVFP4A16
    python3 scripts/models/make_random_checkpoint.py --shape qwen2.5-7b --mean-tokens 300 --out random-7b-mixed
    python3 scripts/models/make_random_checkpoint.py --shape llama3-70b --format bf16 --layers 4 --out random-70b-4

Weights are normal with standard deviation 0.02, those of norms 1 +- 0.1. Packed tensors are what `qerl quantize` would
write for them, including shared global scales, which are powers of two in models with experts. Layers are generated and
quantized one at a time, on the GPU if there is one. The tokenizer makes each byte of a text one token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qerl import formats
from qerl.checkpoint.base_start import LORA_A, LORA_B, START, write_start
from qerl.checkpoint.experts import ModelShapes, decoder_of, fused, matching, shapes_of
from qerl.checkpoint.shards import read_tensors
from qerl.formats import BF16, NVFP4
from qerl.plan.sizes import KNOWN, SIZES

QWEN = {
    **{"model_type": "qwen2", "vocab_size": 152064, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
    "max_position_embeddings": 32768,
}
QWEN3 = {**QWEN, "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}
QWEN3_5 = {**QWEN, **KNOWN["qwen3.5-9b"], "max_position_embeddings": 32768}  # the text part
LLAMA = {
    **{"model_type": "llama", "vocab_size": 128256, "rope_theta": 5e5, "rms_norm_eps": 1e-5},
    "max_position_embeddings": 8192,
}


def _sizes(*sizes: int) -> dict[str, int]:
    return dict(zip(SIZES, sizes, strict=True))


SHAPES = {
    **{name: {**QWEN, **KNOWN[name]} for name in [f"qwen2.5-{size}b" for size in ("1.5", "3", "7", "14", "32")]},
    **{f"llama3-{size}": {**KNOWN[f"llama-3.1-{size}"], **LLAMA} for size in ("8b", "70b")},  # with Llama 3's context
    "qwen3-8b": {**QWEN3, **KNOWN["qwen3-8b"]},
    "qwen3-30b-a3b": {**QWEN3, **KNOWN["qwen3-30b-a3b"]},
    **{f"gemma4-{size}": {**KNOWN[f"gemma-4-{size}"], "hidden_size_per_layer_input": 0} for size in ("12b", "31b")},
    "qwen3.5-9b": QWEN3_5,
    "qwen3.5-27b": {**QWEN3_5, **KNOWN["qwen3.5-27b"], "max_position_embeddings": 32768},
    # For tests: sizes that are not multiples of the kernels' tiles.
    "tiny-qwen2": {**QWEN, "vocab_size": 1000, **_sizes(192, 336, 2, 3, 1)},
    "tiny-qwen3": {
        **{**QWEN3, "vocab_size": 1000, "head_dim": 64, "tie_word_embeddings": True},
        **_sizes(256, 496, 2, 4, 2),
    },
    "tiny-qwen3.5": {
        **{**QWEN3_5, "vocab_size": 1000, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
        **_sizes(256, 496, 4, 4, 2),
    },
    "tiny-gemma4": {  # with the head sizes of real ones, and pages of keys and values that differ as theirs do
        **{**KNOWN["gemma-4-31b"], "vocab_size": 1000, "hidden_size_per_layer_input": 0, "sliding_window": 48},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_global_key_value_heads": 1},
        **_sizes(256, 496, 4, 8, 4),
    },
    "small-qwen3-moe": {
        **QWEN3,
        **{"model_type": "qwen3_moe", "vocab_size": 1000, "norm_topk_prob": True},
        **{"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
        **_sizes(512, 1024, 2, 8, 2),
    },
    "small-qwen3-moe-128": {  # as many experts as Qwen3-30B-A3B
        **QWEN3,
        **{"model_type": "qwen3_moe", "vocab_size": 1000, "norm_topk_prob": True, "head_dim": 64},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 64},
        **_sizes(256, 512, 8, 4, 2),
    },
    # For FP8, whose blocks of 128 have to divide what vLLM fuses.
    "small-qwen3": {**QWEN3, "vocab_size": 1000, **_sizes(512, 1024, 2, 4, 2)},
    "small-qwen2": {**QWEN, "vocab_size": 1000, **_sizes(512, 1152, 2, 4, 1)},
    "tiny-llama": {**LLAMA, "vocab_size": 1000, **_sizes(256, 720, 2, 4, 2)},
    # Attention that our kernel does not take: with a window, and with more than 8 query heads per key head.
    "tiny-mistral": {
        **{**LLAMA, "model_type": "mistral", "vocab_size": 1000, "sliding_window": 48},
        **_sizes(256, 496, 2, 4, 2),
    },
    "tiny-llama-10-heads": {**LLAMA, "vocab_size": 1000, **_sizes(640, 720, 2, 10, 1)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=sorted(SHAPES))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--format", default=NVFP4.name, choices=[each.name for each in formats.writable()])
    parser.add_argument(
        "--ignore", nargs="+", default=[], help="of the linears: leave these in 16 bits (a name, or re:)"
    )
    parser.add_argument("--activations", default="none", choices=("none", "dynamic", "static"), help="of NVFP4 linears")
    parser.add_argument("--layers", type=int, help="fewer layers than the real model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-rank", type=int, help="of NVFP4: a random start of this rank, in the folder's start/")
    parser.add_argument(
        "--mean-tokens", type=int, help="let completions end at random, after this many tokens on average"
    )
    arguments = parser.parse_args()
    if arguments.activations != "none" and decoder_of(SHAPES[arguments.shape], arguments.shape).has_experts:
        parser.error(f"--activations {arguments.activations}: {arguments.shape} has experts, whose inputs have 16 bits")
    write(arguments.shape, arguments.out, arguments.format, arguments.layers, arguments.seed, arguments.ignore)
    if arguments.activations != "none":
        round_inputs(arguments.out, arguments.activations)
    if arguments.start_rank:
        random_start(arguments.out, arguments.out / START, arguments.start_rank)
    if arguments.mean_tokens:
        end_by_chance(arguments.out, SHAPES[arguments.shape]["vocab_size"], arguments.mean_tokens)


def write(
    shape: str,
    out: Path,
    format: str = NVFP4.name,
    layers: int | None = None,
    seed: int = 0,
    ignore: Sequence[str] = (),
) -> None:
    """Write the checkpoint of a shape to the folder `out`, with the linears that `ignore` names in 16 bits."""
    started = time.monotonic()
    sizes = {**SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})}
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    index: dict[str, str] = {}
    total, kept = 0, matching(decoder_of(sizes, shape).linears(), ignore, "--ignore")
    for number, tensors in enumerate(_shards(sizes, format, generator, kept)):
        name = f"model-{number:05d}.safetensors"
        save_file({key: tensor.contiguous().cpu() for key, tensor in tensors.items()}, out / name, {"format": "pt"})
        index.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    weight_map = {"metadata": {"total_size": total}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(weight_map), encoding="utf-8")
    _write_config(sizes, format, out, kept)
    _write_tokenizer(sizes["vocab_size"], out)
    print(f"{out}: {total / 2**30:.2f} GiB in {time.monotonic() - started:.0f} s")


def round_inputs(folder: Path, kind: str) -> None:
    """Let the linears of an NVFP4 checkpoint round their input. Static scales hold up to 21, more than normed rows."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = NVFP4.quantization_config(["lm_head"], kind)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    place = folder / "model.safetensors.index.json"
    index, name = json.loads(place.read_text(encoding="utf-8")), "model-scales.safetensors"
    packed = [each.removesuffix(".weight_packed") for each in index["weight_map"] if each.endswith(".weight_packed")]
    if kind == "static":
        save_file({f"{module}.input_global_scale": torch.tensor([128.0]) for module in packed}, folder / name)
        index["weight_map"] |= {f"{module}.input_global_scale": name for module in packed}
        place.write_text(json.dumps(index), encoding="utf-8")


def random_start(model: Path, folder: Path, rank: int) -> None:
    """Write a start for the NVFP4 checkpoint `model` to `folder`, about as large as a real one."""
    generator, factors = torch.Generator().manual_seed(5), {}
    for name, info in read_tensors(model).items():
        if name.endswith(".weight_packed"):
            rows, halves = info.shape
            module = name.removesuffix(".weight_packed")
            factors[module + LORA_A] = (torch.randn(rank, 2 * halves, generator=generator) * 0.05).bfloat16()
            factors[module + LORA_B] = (torch.randn(rows, rank, generator=generator) * 0.05).bfloat16()
    folder.mkdir(exist_ok=True)
    write_start(folder, factors, {})


def end_by_chance(folder: Path, vocabulary: int, mean_tokens: int) -> None:
    """Make one in `mean_tokens` tokens an end token. Random weights draw nearly evenly, so lengths are geometric."""
    from transformers import GenerationConfig

    GenerationConfig(eos_token_id=list(range(0, vocabulary, mean_tokens)), pad_token_id=0).save_pretrained(folder)


def _shards(
    sizes: dict, format: str, generator: torch.Generator, kept: Sequence[str]
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of the checkpoint, one layer at a time."""
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    outer = {
        "model.embed_tokens.weight": _normal((vocab, hidden), generator),
        "model.norm.weight": _norm(hidden, generator, sizes["model_type"]),
    }
    if not sizes.get("tie_word_embeddings"):
        outer["lm_head.weight"] = _normal((vocab, hidden), generator)
    yield outer
    for layer in range(sizes["num_hidden_layers"]):
        yield _layer(layer, sizes, format, generator, kept)


def _layer(
    number: int, sizes: dict, format: str, generator: torch.Generator, kept: Sequence[str]
) -> dict[str, torch.Tensor]:
    shapes, prefix = shapes_of(sizes, "the shape"), f"model.layers.{number}"
    decoder, hidden, groups = shapes.decoder, shapes.hidden, []
    for modules in fused(decoder.linears_of(number)):
        group = {
            name: decoder.shape_of(name.rpartition(".")[2]) if ".experts." in name else shapes.shape_of(name)
            for name in modules
        }
        groups.append({name.removeprefix(f"{prefix}."): shape for name, shape in group.items()})
    norms, kind = ("input", "post_attention", "pre_feedforward", "post_feedforward"), sizes["model_type"]
    tensors = {f"{prefix}.{name}_layernorm.weight": _norm(hidden, generator, kind) for name in norms[: shapes.norms]}
    for group in groups:
        weights = {name: _normal(shape, generator) for name, shape in group.items()}
        if format == BF16.name or {f"{prefix}.{name}" for name in group} & {*kept}:
            tensors |= {f"{prefix}.{name}.weight": weight for name, weight in weights.items()}
            continue
        packed_group = _packed(list(weights.values()), format, decoder.has_experts)
        for name, packed in zip(weights, packed_group, strict=True):
            tensors |= {f"{prefix}.{name}.{key}": tensor for key, tensor in packed.items()}
    if sizes["model_type"] == "qwen2":
        for name, (rows, _) in groups[0].items():
            tensors[f"{prefix}.{name}.bias"] = _normal((rows,), generator, std=0.5)
    if number in decoder.sparse:
        tensors[f"{prefix}.mlp.gate.weight"] = _normal((decoder.experts, hidden), generator)
    if number in decoder.linear:
        return tensors | _small_parts(f"{prefix}.linear_attn", shapes, generator)
    if shapes.head_norms:
        size = shapes.full_heads[1] if number in decoder.full else shapes.head_dim
        scale = size**-0.25 if decoder.full else 1  # Gemma 4 multiplies queries and keys as they are
        tensors |= {f"{prefix}.self_attn.{name}_norm.weight": _norm(size, generator, kind) * scale for name in "qk"}
    return tensors | ({f"{prefix}.layer_scalar": _norm(1, generator)} if decoder.full else {})


def _small_parts(prefix: str, shapes: ModelShapes, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What linear attention keeps in 16 bits; half of a state is left after about 10 to 1,000 tokens."""
    states = shapes.states
    return {
        f"{prefix}.conv1d.weight": _normal((states.mixed, 1, states.taps), generator, std=0.5),
        f"{prefix}.in_proj_a.weight": _normal((states.value_heads, shapes.hidden), generator),
        f"{prefix}.in_proj_b.weight": _normal((states.value_heads, shapes.hidden), generator),
        f"{prefix}.A_log": _normal((states.value_heads,), generator, std=1.0) - 4,
        f"{prefix}.dt_bias": _norm(states.value_heads, generator),
        f"{prefix}.norm.weight": _norm(states.value_dim, generator),
    }


def _packed(weights: list[torch.Tensor], format: str, pow2: bool) -> list[dict[str, torch.Tensor]]:
    """What `qerl quantize` writes of weights that share a scale; `pow2`: it is a power of two."""
    from qerl.formats.nvfp4.reference import shared_global_scale

    own = formats.get(format)
    return own.quantize(weights, shared_global_scale(weights, "pow2") if pow2 and own.shared_tensor else None)


def _normal(shape: tuple[int, ...], generator: torch.Generator, std: float = 0.02) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).mul_(std).bfloat16()


def _norm(size: int, generator: torch.Generator, model_type: str = "") -> torch.Tensor:
    """A weight for gains around 1, which are 1 + weight in Qwen3.5."""
    return _normal((size,), generator, std=0.1) + (0 if model_type.startswith("qwen3_5") else 1)


def _write_config(sizes: dict, format: str, out: Path, kept: Sequence[str]) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    unquantized = ["lm_head", *decoder_of(sizes, "the shape").kept(), *kept]
    sizes = dict(sizes)
    if theta := sizes.pop("rope_theta", None):
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config = AutoConfig.for_model(**sizes, dtype="bfloat16", eos_token_id=0, bos_token_id=1)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[sizes["model_type"]]]
    text = json.loads(config.to_json_string(use_diff=False))
    if formats.get(format).quantized:
        text["quantization_config"] = formats.get(format).quantization_config(unquantized)
    (out / "config.json").write_text(json.dumps(text, indent=2), encoding="utf-8")


def _write_tokenizer(vocab: int, out: Path) -> None:
    """Write a tokenizer with bytes as tokens (ids 1 to 256) and fillers up to the vocabulary's size; id 0 is the end.

    The last filler pads, because Unsloth refuses a tokenizer that pads with the end. It is a byte-level BPE without
    merges, because transformers 5 gives a Qwen2 config its own BPE tokenizer anyway.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    words = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{number}>" for number in range(len(words), vocab)]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", words[-1]])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": words[-1],
        "model_max_length": 131072,
        "chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    main()
