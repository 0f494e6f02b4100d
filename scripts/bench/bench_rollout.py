#!/usr/bin/env python3
"""Decode speed of one engine with a LoRA adapter, by number of sequences; writes JSON for benchmarks/.

    python3 scripts/bench/bench_rollout.py --model checkpoints/random-7b-NVFP4A16 --out benchmarks/rollout-7b-qerl.json
    python3 scripts/bench/bench_rollout.py --engine stock --model checkpoints/random-7b \
        --out benchmarks/rollout-7b-bf16.json

`qerl`: this project's engine. `stock`: vLLM as it comes, its own multi-adapter LoRA, its own choice of kernel. Both
sample with temperature 1 and return the token's logprob. A rate is (new tokens - 1) * sequences over the difference
between a run with that many new tokens and one with a single token, so prefill is not in it; the median of 5 runs of
each. With --turns engines on one card measure in turns, run by run, so that what the machine does meets all of them;
one that fails or is killed leaves its turns to the others. The folder has to be new: who is gone counts as one of them.

Compiling chooses between kernels by timing them. Engines that open at once on a card time one another as well: let each
open alone before, with --open-only and else the same options, and they find what was chosen.

Every engine has a KV cache for all sequences at their full length. With --memory-share vLLM as it comes is told its
size: its own profile takes what others allocate on the card meanwhile for its own, and would leave it less.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

BLOCK = 16  # tokens, of vLLM's KV cache
ROUNDS = 5  # of which the median counts
PART = ".part"  # of a process that takes part in turns, which holds a lock on it
Generate = Callable[[list[list[int]], int], int]  # prompts, new tokens -> tokens sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", default="qerl", choices=("qerl", "stock"))
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--rank", type=int, default=32, help="0: no adapter")
    parser.add_argument("--tune", action="store_true", help="measure the ways to multiply first (qerl)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=129)
    parser.add_argument("--memory-share", type=float, help="share of the card for this engine; default: the engine's")
    parser.add_argument("--turns", type=Path, metavar="FOLDER", help="wait here for --of engines before each size and")
    parser.add_argument("--of", type=int, default=1, help="round, then measure one after another")
    parser.add_argument("--open-only", action="store_true", help="compile, choose kernels, and end: fills the caches")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with turns_left_to_others(arguments):
        report = measured(arguments)
    text = json.dumps(report, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


def measured(arguments: argparse.Namespace) -> dict:
    """What main writes."""
    from scripts.bench.provenance import machine

    started = time.monotonic()
    generate, opened = (open_qerl if arguments.engine == "qerl" else open_stock)(arguments)
    if arguments.open_only:
        return {"command": " ".join(sys.argv), "open_s": round(time.monotonic() - started, 1), **opened}
    if opened["cache_tokens"] < (needed := max(arguments.sequences) * context(arguments)):
        raise RuntimeError(f"the KV cache holds {opened['cache_tokens']} tokens and {needed} are to be sampled at once")
    report = {
        "command": " ".join(sys.argv),
        "open_s": round(time.monotonic() - started, 1),
        **opened,
        **machine(),
        "decode_tokens_per_s": {},
        "prefill_and_one_token_s": {},
        "runs_s": {},  # of each round: prefill and one token, and all tokens
    }
    for count, runs in measure(generate, arguments).items():
        first, whole = (median(column) for column in zip(*runs, strict=True))
        rate = count * (arguments.new_tokens - 1) / (whole - first)
        report["decode_tokens_per_s"][str(count)] = round(rate, 1)
        report["prefill_and_one_token_s"][str(count)] = round(first, 4)
        report["runs_s"][str(count)] = [[round(seconds, 4) for seconds in run] for run in runs]
    return report


@contextmanager
def turns_left_to_others(arguments: argparse.Namespace) -> Iterator[None]:
    """Take part from here on, by a lock on a file that ends with the block or the process; then nobody waits for it."""
    if arguments.turns is None or arguments.open_only:
        yield
        return
    arguments.turns.mkdir(parents=True, exist_ok=True)
    unlocked = arguments.turns / f"{os.getpid()}.begins"
    with unlocked.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(unlocked.with_suffix(PART))
        yield


@contextmanager
def turn(folder: Path | None, parties: int, name: str) -> Iterator[None]:
    """All `parties` processes that share `folder` have come to the turn of this name or are gone; inside one of them at
    a time."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.{name}").touch()
    while _came_or_gone(folder, name) < parties:
        time.sleep(0.02)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _came_or_gone(folder: Path, name: str) -> int:
    """How many of the processes that took part in `folder` nobody has to wait for at the turn of this name."""
    came = {path.stem for path in folder.glob(f"*.{name}")}
    return len(came | {path.stem for path in folder.glob(f"*{PART}") if path.stem not in came and _left(path)})


def _left(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def measure(generate: Generate, arguments: argparse.Namespace) -> dict[int, list[tuple[float, float]]]:
    """Seconds of (prefill and one token, all tokens) in each round, by number of sequences."""
    rng = random.Random(0)

    def run(count: int, new_tokens: int) -> float:
        prompts = [[rng.randint(1, 256) for _ in range(arguments.prompt_tokens)] for _ in range(count)]
        started = time.perf_counter()
        sampled = generate(prompts, new_tokens)
        if sampled < 0.99 * count * new_tokens:
            raise RuntimeError(f"only {sampled} of {count * new_tokens} tokens were sampled")
        return time.perf_counter() - started

    seconds: dict[int, list[tuple[float, float]]] = {count: [] for count in arguments.sequences}
    for number in range(ROUNDS):
        for count, runs in seconds.items():
            with turn(arguments.turns, arguments.of, f"{number}-{count}"):
                if not number:
                    run(count, arguments.new_tokens)
                runs.append((run(count, 1), run(count, arguments.new_tokens)))
    return seconds


def context(arguments: argparse.Namespace) -> int:
    """Tokens of a sequence at its end."""
    return arguments.prompt_tokens + arguments.new_tokens


def cache_bytes(arguments: argparse.Namespace) -> int:
    """Of a KV cache for all sequences at their end, in whole blocks, and some blocks more."""
    from transformers import AutoConfig

    from qerl.plan.engine_memory import kv_bytes_per_token

    blocks = max(arguments.sequences) * -(-(context(arguments) + 1) // BLOCK) + 64
    return blocks * BLOCK * kv_bytes_per_token(AutoConfig.from_pretrained(arguments.model))


def open_qerl(arguments: argparse.Namespace) -> tuple[Generate, dict]:
    import torch

    from qerl.checkpoint.kinds import format_of
    from qerl.engine.interface import SamplingParams
    from qerl.engine.options import EngineOptions
    from qerl.engine.update import AdapterUpdate, deliver
    from qerl.engine.vllm_engine import VLLMEngine

    options = EngineOptions(
        kernel=arguments.kernel,
        max_context=context(arguments),
        max_rank=arguments.rank,
        max_sequences=max(arguments.sequences),
        memory=arguments.memory_share,
        tune_kernels=arguments.tune,
    )
    engine = VLLMEngine(arguments.model, format_of(Path(arguments.model)).name, options)
    if arguments.rank:
        tensors = {}
        for name, slot in engine._slots.items():
            tensors[f"{name}.lora_A.weight"] = torch.randn(arguments.rank, slot.in_features, device="cuda") * 0.01
            tensors[f"{name}.lora_B.weight"] = torch.randn(slot.rows, arguments.rank, device="cuda") * 0.01
        deliver(AdapterUpdate(tensors, 2.0), engine)

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        completions = engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens), seed=1)
        return sum(len(completion.token_ids) for completion in completions)

    parts = {"startup_s": engine.startup_s, "compiled_from_cache": engine.compiled_from_cache}
    return generate, {"kernel": engine.kernel, "cache_tokens": engine.cache_tokens, **parts}


def open_stock(arguments: argparse.Namespace) -> tuple[Generate, dict]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    shared = {}
    if arguments.memory_share:
        size = cache_bytes(arguments)
        shared = {"gpu_memory_utilization": arguments.memory_share, "kv_cache_memory_bytes": size}
    llm = LLM(
        model=arguments.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=context(arguments) + 1,
        max_num_seqs=max(arguments.sequences),
        enable_lora=arguments.rank > 0,
        **shared,
        max_lora_rank=max(arguments.rank, 8),
        max_loras=1,
        linear_backend=arguments.kernel,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    request = LoRARequest("bench", 1, write_adapter(arguments.model, arguments.rank)) if arguments.rank else None

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        params = SamplingParams(max_tokens=new_tokens, logprobs=0, flat_logprobs=True, detokenize=False, seed=1)
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(tokens, params, use_tqdm=False, lora_request=request)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    cache = llm.llm_engine.vllm_config.cache_config
    tokens = cache.num_gpu_blocks * cache.block_size
    return generate, {"kernel": f"vLLM's own ({arguments.kernel})", "cache_tokens": tokens}


def write_adapter(model: str, rank: int) -> str:
    """A random LoRA on all seven projections, as a PEFT folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tensors = {}
    for name, module in skeleton.named_modules():
        if name.rpartition(".")[2] in targets:
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = (torch.randn(rank, module.in_features) * 0.01).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = (torch.randn(module.out_features, rank) * 0.01).bfloat16()
    folder = Path(tempfile.mkdtemp())
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


if __name__ == "__main__":
    main()
