"""How far apart two computations are that differ in the last bits of their sums alone, with activations in 8 bits.

    python scripts/study/rounding_flips.py shape                 # random weights in the shape of Qwen2.5 7B, on a CPU
    python scripts/study/rounding_flips.py model qerl/tiny arith # a trained model, on what it samples itself

An engine and a trainer sum in different orders, so that a float32 sum differs in its last bits before it is rounded to
bfloat16. Here each output of a linear and of a norm is multiplied by 1 + 2^-20 z, with z normal, and rounded to
bfloat16. The ways are 16-bit weights (16), FP8 weights with 16-bit activations (w8a16) and both in FP8 (w8a8), each
computed two times (a, b) with other z. A last bit that tips the rounding of an activation to 8 bits becomes a whole
step of 2^-4, and so from layer to layer the two approach the distance of independent roundings.

`shape` makes one layer's weights at a time, with the deviations of scripts/models/make_random_checkpoint.py, and gives
the KL divergence over 8192 of the tokens; it takes 15 minutes on a core. `model` gives `mismatch_kl` as a run logs it,
and that of keys and values in 8 bits as well (kv8), with scales calibrated on the prompts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from qerl.formats.fp8 import reference

if TYPE_CHECKING:
    from qerl.formats.fp8.kv import KVScales

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, TOKENS = 3584, 18944, 28, 28, 4, 128, 8192, 24
STD, NORM_STD, BIAS_STD = 0.02, 0.1, 0.5
LAST_BITS = 2.0**-20
WAYS = {"16": (False, False), "w8a16": (True, False), "w8a8": (True, True)}  # weights, activations in 8 bits
States = dict[tuple[str, str], torch.Tensor]  # by way and a or b


class Noise:
    """Last bits that differ between the states, and the rounding to bfloat16 after them."""

    def __init__(self) -> None:
        names = [(way, one) for way in WAYS for one in "ab"]
        self._generators = {name: torch.Generator().manual_seed(seed) for seed, name in enumerate(names)}

    def states(self, x: torch.Tensor) -> States:
        return {name: x.clone() for name in self._generators}

    def __call__(self, name: tuple[str, str], x: torch.Tensor) -> torch.Tensor:
        return rounded(x, self._generators[name])


def rounded(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """x with other last bits, in bfloat16, as float32."""
    return (x * (1 + LAST_BITS * torch.randn(x.shape, generator=generator))).bfloat16().float()


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    return reference.dequantize_input(*reference.quantize_input(x))


def linear(x: States, rows: int, noise: Noise, bias: bool = False) -> States:
    """Each state times the same new weight, which is in FP8 where the way has it so."""
    columns = next(iter(x.values())).shape[1]
    dense = (STD * torch.randn(rows, columns)).bfloat16().float()
    weight = {False: dense, True: reference.dequantize(*reference.quantize(dense), torch.float32)}
    added = BIAS_STD * torch.randn(rows) if bias else None
    products = {}
    for name, one in x.items():
        packed, rounds = WAYS[name[0]]
        products[name] = noise(name, F.linear(in_8_bits(one) if rounds else one, weight[packed], added))
    return products


def norm(x: States, noise: Noise) -> States:
    gain = 1 + NORM_STD * torch.randn(WIDTH)
    return {n: noise(n, F.rms_norm(one, (WIDTH,), gain, 1e-6)) for n, one in x.items()}


def layer(x: States, noise: Noise) -> States:
    """A decoder layer without rotation, which changes no magnitude."""
    h = norm(x, noise)
    q, k, v = (linear(h, heads * HEAD_DIM, noise, bias=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    attended = {}
    for name in x:
        parts = [one[name].view(TOKENS, -1, HEAD_DIM).transpose(0, 1)[None] for one in (q, k, v)]
        out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        attended[name] = noise(name, out[0].transpose(0, 1).reshape(TOKENS, -1))
    out = linear(attended, WIDTH, noise)
    x = {name: noise(name, x[name] + out[name]) for name in x}
    h = norm(x, noise)
    gate, up = linear(h, INNER, noise), linear(h, INNER, noise)
    down = linear({name: noise(name, F.silu(gate[name]) * up[name]) for name in x}, WIDTH, noise)
    return {name: noise(name, x[name] + down[name]) for name in x}


def shape() -> None:
    """Print the KL divergences of random weights in the shape of a 7B."""
    torch.manual_seed(0)
    noise = Noise()
    x = noise.states((STD * torch.randn(TOKENS, WIDTH)).bfloat16().float())
    for number in range(LAYERS):
        x = layer(x, noise)
        apart = {way: ((x[way, "a"] - x[way, "b"]).norm() / x[way, "a"].norm()).item() for way in WAYS}
        print(f"layer {number}, relative distance of a and b:", {way: f"{far:.4f}" for way, far in apart.items()})
    head = STD * torch.randn(VOCABULARY, WIDTH)
    logprobs = {name: (one @ head.t()).log_softmax(-1) for name, one in norm(x, noise).items()}
    for way in WAYS:
        print(way, "a and b", _apart(logprobs[way, "a"], logprobs[way, "b"]))
    print("w8a16 and w8a8", _apart(logprobs["w8a16", "a"], logprobs["w8a8", "a"]))
    print("16 and w8a8", _apart(logprobs["16", "a"], logprobs["w8a8", "a"]))


def _apart(one: torch.Tensor, other: torch.Tensor) -> str:
    kl = (one.exp() * (one - other)).sum(-1).mean().item()
    return f"KL {kl:.2e}, mean |difference of logprobs| {(one - other).abs().mean().item():.3f}"


def model(base: str, task: str, prompts: int, new_tokens: int) -> None:
    """Print `mismatch_kl` of a trained model on its own completions, of two of the same way and of a 16-bit trainer."""
    from quantize.options import QuantizeOptions
    from quantize.run import quantize_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        places = {"16": (base, "bf16")}
        for way, activations in (("w8a16", "none"), ("w8a8", "dynamic")):
            places[way] = (str(Path(folder) / way), "fp8_block")
            quantize_checkpoint(
                base, Path(places[way][0]), QuantizeOptions(scheme="fp8_block", activations=activations)
            )
        for way, place in {**places, "kv8": places["16"]}.items():
            asked = prompts_of(base, task, prompts)
            scales = calibrated(base, asked) if way == "kv8" else None
            written = sampled(place, asked, new_tokens, scales)
            one, other, wide = (
                scored(*given, asked, written)
                for given in ((*place, 1, scales), (*place, 2, scales), (base, "bf16", 3, None))
            )
            print(f"{way}: mismatch_kl {_mismatch(one, other):.1e}, to a 16-bit trainer {_mismatch(one, wide):.1e}")


def prompts_of(base: str, task: str, prompts: int) -> list:
    """Token ids of prompts of the task."""
    from qerl.checkpoint.load import load_tokenizer
    from qerl.data.tasks import build_messages, get_task, load_examples, render_prompt

    found, tokenizer = get_task(task), load_tokenizer(base)
    rows = load_examples(found, None, "test", None, prompts)[0]
    return [render_prompt(tokenizer, build_messages(found, row.question)) for row in rows]


def calibrated(base: str, asked: list) -> dict[int, KVScales]:
    """The scales of keys and values that a run would take."""
    from qerl.checkpoint.load import load_model
    from qerl.formats.fp8.kv import scales_of
    from training.policy.kv_ranges import ROWS, measured

    return scales_of(measured(load_model(base, "bf16", "float32"), asked[:ROWS]))


def sampled(place: tuple[str, str], asked: list, new_tokens: int, scales: dict[int, KVScales] | None) -> list:
    """Token ids of what the model at `place` writes to the prompts, with keys and values in 8 bits if it has scales."""
    from qerl.engine.interface import SamplingParams
    from qerl.engine.open import open_engine
    from qerl.engine.options import EngineOptions

    cache = {} if scales is None else {"kv_cache_dtype": "fp8", "calibrates_kv": True}
    engine = open_engine(*place, EngineOptions(engine="transformers", device="cpu", **cache))
    if scales is not None:
        engine.set_kv_scales(scales)
    return [completion.token_ids for completion in engine.generate(asked, SamplingParams(new_tokens), seed=0)]


def scored(
    path: str, format: str, seed: int, scales: dict[int, KVScales] | None, asked: list, written: list
) -> torch.Tensor:
    """The logprobs of all tokens that were written, with the last bits of `seed`."""
    from qerl.checkpoint.load import load_model
    from qerl.engine.transformers.engine import kv_in_8_bits
    from qerl.model.packed_attention import set_kv_scales_

    model, generator = load_model(path, format, "float32").eval(), torch.Generator().manual_seed(seed)
    set_kv_scales_(model, scales)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or "norm" in name:
            module.register_forward_hook(lambda module, given, out: rounded(out, generator))
    logprobs = []
    with torch.no_grad(), kv_in_8_bits(model):
        for prompt, completion in zip(asked, written, strict=True):
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            logprobs.append(logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(logprobs)


def _mismatch(sampling: torch.Tensor, trainer: torch.Tensor) -> float:
    log_ratio = (trainer - sampling).double()
    return (log_ratio.exp() - log_ratio - 1).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("shape")
    trained = commands.add_parser("model")
    trained.add_argument("base")
    trained.add_argument("task")
    trained.add_argument("--prompts", type=int, default=96)
    trained.add_argument("--new-tokens", type=int, default=48)
    given = parser.parse_args()
    if given.command == "shape":
        shape()
    else:
        model(given.base, given.task, given.prompts, given.new_tokens)


if __name__ == "__main__":
    main()
