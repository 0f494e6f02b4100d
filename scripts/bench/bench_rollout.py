#!/usr/bin/env python3
"""The decode speed of an engine with a LoRA adapter, by number of sequences; writes JSON for benchmarks/.

    python3 scripts/bench/bench_rollout.py --model checkpoints/random-7b-NVFP4A16 --out benchmarks/rollout-7b-qerl.json
    python3 scripts/bench/bench_rollout.py --engine stock --model checkpoints/random-7b \
        --out benchmarks/rollout-7b-bf16.json

`qerl` is this project's engine, `stock` is vLLM as it comes, with its own multi-adapter LoRA and its own choice of
kernel. Both sample with temperature 1, go on after end tokens and return the token's logprob. A rate is (new tokens -
1) * sequences, divided by the difference in time between a run with that many new tokens and one with a single token,
so it does not include prefill; both times are medians of 5 runs, and after each run the file has the medians so far. Of
long prompts prefill takes most of both times: --cached-prompts gives all runs the same ones, which are then in the
prefix cache. With --turns, several engines on one card take turns run by run, so that whatever happens on the machine
affects all of them. An engine that fails or is killed no longer holds up the others. Give --turns a new folder, because
an engine that has left it is counted too.

Compilation chooses between kernels by timing them, and engines that open at the same time on one card disturb each
other's timings. So first open each engine alone, with --open-only and otherwise the same options; afterwards it finds
its choice in the caches.

Every engine has a KV cache for all sequences at their full length. With --memory-share the size of the cache is set
explicitly for stock vLLM, whose own profile would take what others allocate on the card meanwhile for its own, and give
it a smaller cache.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.provenance import command, machine, write

if TYPE_CHECKING:
    import torch

    from qerl.plan.sizes import ModelSizes

BLOCK = 16  # tokens per block of vLLM's KV cache
PART = ".part"  # suffix of the file on which a process holds a lock while it takes part in turns
ROUNDS = 5  # the median of them counts
Seconds = dict[int, list[tuple[float, float]]]  # by number of sequences, for each round: for one token, and for all
Generate = Callable[[list[list[int]], int], int]  # prompts, new tokens -> tokens sampled


def main() -> None:
    arguments = options().parse_args()
    with turns_left_to_others(arguments):
        report = measured(arguments)
    print(write(report, arguments.out))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", default="qerl", choices=("qerl", "stock"))
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--rank", type=int, default=32, help="0: no adapter")
    parser.add_argument("--no-replay", action="store_true", help="do not record which experts are chosen (qerl)")
    parser.add_argument("--decode-steps", type=int, help="at most so many per call of vLLM's scheduler (qerl)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="fp8: with scale 1, which is as fast as any (qerl)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=129)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cached-prompts", action="store_true", help="no run computes more than the end of a prompt")
    parser.add_argument("--memory-share", type=float, help="share of the card for this engine; default: the engine's")
    parser.add_argument("--turns", type=Path, metavar="FOLDER", help="measure in turns with the engines that share it")
    parser.add_argument("--of", type=int, default=1, help="number of engines that share the folder of --turns")
    parser.add_argument("--open-only", action="store_true", help="only compile and choose kernels, to fill the caches")
    parser.add_argument("--out", type=Path)
    return parser


def measured(arguments: argparse.Namespace) -> dict:
    """The report, which is written after each round, too, so that a run that is cut off leaves what it had."""
    started = time.monotonic()
    generate, opened = (open_qerl if arguments.engine == "qerl" else open_stock)(arguments)
    if arguments.open_only:
        return {"command": command(), "open_s": round(time.monotonic() - started, 1), **opened}
    report = {"command": command(), "open_s": round(time.monotonic() - started, 1), **opened, **machine()}

    def note(seconds: Seconds) -> None:
        report.update(rates(seconds, arguments.new_tokens))
        write(report, arguments.out)

    measure(generate, arguments, note)
    return report


def rates(seconds: Seconds, new_tokens: int) -> dict[str, dict]:
    """What the report says of the rounds so far."""
    found: dict[str, dict] = {"decode_tokens_per_s": {}, "prefill_and_one_token_s": {}, "runs_s": {}}
    for count, runs in seconds.items():
        first, whole = (median(column) for column in zip(*runs, strict=True))
        found["decode_tokens_per_s"][str(count)] = round(count * (new_tokens - 1) / (whole - first), 1)
        found["prefill_and_one_token_s"][str(count)] = round(first, 4)
        found["runs_s"][str(count)] = [[round(each, 4) for each in run] for run in runs]
    return found


def measure(
    generate: Generate, arguments: argparse.Namespace, note: Callable[[Seconds], None] = lambda seconds: None
) -> Seconds:
    """Seconds for prefill and one token, and for all tokens. `note` gets those so far after each round."""
    drawn = random.Random(0)

    def run(count: int, new_tokens: int) -> float:
        rng = random.Random(count) if arguments.cached_prompts else drawn
        prompts = [[rng.randint(1, 256) for _ in range(arguments.prompt_tokens)] for _ in range(count)]
        started = time.perf_counter()
        sampled = generate(prompts, new_tokens)
        if sampled < 0.99 * count * new_tokens:
            raise RuntimeError(f"only {sampled} of {count * new_tokens} tokens were sampled")
        return time.perf_counter() - started

    seconds: Seconds = {count: [] for count in arguments.sequences}
    for number in range(arguments.rounds):
        for count, runs in seconds.items():
            with turn(arguments.turns, arguments.of, f"{number}-{count}"):
                if not number:
                    run(count, arguments.new_tokens)
                runs.append((run(count, 1), run(count, arguments.new_tokens)))
        note(seconds)
    return seconds


@contextmanager
def turns_left_to_others(arguments: argparse.Namespace) -> Iterator[None]:
    """Take part in turns from here on, by holding a lock on a file.

    The lock ends with the block or with the process, and then nobody waits for this engine any more.
    """
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
    """Wait until all `parties` processes that share `folder` have reached the turn `name` or are gone.

    Then the block runs in one process at a time.
    """
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
    """How many of the processes in `folder` have reached the turn `name` or are gone."""
    came = {path.stem for path in folder.glob(f"*.{name}")}
    return len(came | {path.stem for path in folder.glob(f"*{PART}") if path.stem not in came and _left(path)})


def _left(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def context(arguments: argparse.Namespace) -> int:
    """Tokens of a finished sequence."""
    return arguments.prompt_tokens + arguments.new_tokens


def cache_bytes(arguments: argparse.Namespace, sizes: ModelSizes) -> int:
    """Bytes of a KV cache for all finished sequences in whole blocks, with their states, and a few spare blocks."""
    each = sizes.cached_tokens(BLOCK * -(-(context(arguments) + 1) // BLOCK))
    return (max(arguments.sequences) * each + 64 * BLOCK) * sizes.kv_bytes()


def check_cache(holds: int, needed: int) -> None:
    """Raise RuntimeError if some sequences would have to wait for others, which is not what is measured."""
    if holds < needed:
        raise RuntimeError(f"the KV cache holds {holds} tokens and {needed} are to be sampled at once")


def open_qerl(arguments: argparse.Namespace) -> tuple[Generate, dict]:
    import torch

    from qerl.checkpoint.folder import format_of
    from qerl.engine.interface import SamplingParams
    from qerl.engine.options import EngineOptions
    from qerl.engine.update import AdapterUpdate, deliver
    from qerl.engine.vllm.engine import VLLMEngine
    from qerl.formats.fp8.kv import KVScales
    from qerl.plan.sizes import read_sizes

    options = EngineOptions(
        kernel=arguments.kernel,
        max_context=context(arguments),
        max_rank=arguments.rank,
        expert_rank=arguments.rank,
        records_experts=not arguments.no_replay,
        max_sequences=max(arguments.sequences),
        memory=arguments.memory_share,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    engine = VLLMEngine(arguments.model, format_of(Path(arguments.model)).name, options)
    engine.end_token_ids = ()  # random weights draw one at times
    each = read_sizes(arguments.model).cached_tokens(context(arguments))
    check_cache(engine.cache_tokens, max(arguments.sequences) * each)
    if arguments.decode_steps:
        from qerl.engine.vllm.multi_step import allow_steps_

        allow_steps_(engine.llm, arguments.decode_steps)
    if options.kv_cache_dtype == "fp8":
        engine.set_kv_scales({layer: KVScales(1.0, 1.0, 1.0) for layer in range(read_sizes(arguments.model).layers)})
    if arguments.rank:
        tensors = {}
        for name, slot in engine.found.slots.items():
            tensors[f"{name}.lora_A.weight"] = torch.randn(arguments.rank, slot.in_features, device="cuda") * 0.01
            tensors[f"{name}.lora_B.weight"] = torch.randn(slot.rows, arguments.rank, device="cuda") * 0.01
        deliver(AdapterUpdate(tensors | on_experts(engine.found.expert_slots, arguments.rank), 2.0), engine)

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        completions = engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens), seed=1)
        return sum(len(completion.token_ids) for completion in completions)

    opened = {"kernel": engine.kernel, "cache_tokens": engine.cache_tokens, "startup_s": engine.startup_s}
    return generate, opened


def on_experts(slots: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Random factors of this rank for the engine's buffers of an adapter on experts."""
    import torch

    tensors = {}
    for name, buffer in slots.items():
        shape = list(buffer.shape)
        shape[-2 if ".lora_A." in name else -1] = rank
        tensors[name] = torch.randn(shape, device=buffer.device) * 0.01
    return tensors


def open_stock(arguments: argparse.Namespace) -> tuple[Generate, dict]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from qerl.engine.vllm import register_text_model
    from qerl.plan.sizes import read_sizes

    if (sizes := read_sizes(arguments.model)).states:  # stock vLLM has Qwen3.5 for pictures and text only
        register_text_model()
    shared = {}
    if arguments.memory_share:
        size = cache_bytes(arguments, sizes)
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
        mamba_ssm_cache_dtype="float32",
        gdn_prefill_backend=None if find_spec("flashinfer") else "triton",  # vLLM takes it for granted
        linear_backend=arguments.kernel,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    request = LoRARequest("bench", 1, write_adapter(arguments.model, arguments.rank)) if arguments.rank else None

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        how = SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False)
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(tokens, how, use_tqdm=False, lora_request=request)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    cache = llm.llm_engine.vllm_config.cache_config
    tokens = cache.num_gpu_blocks * cache.block_size
    if not arguments.memory_share:
        check_cache(tokens, max(arguments.sequences) * context(arguments))
    return generate, {"kernel": f"vLLM's own ({arguments.kernel})", "cache_tokens": tokens}


def write_adapter(model: str, rank: int) -> str:
    """Write a random LoRA on all seven projections as a PEFT folder; on experts one for each, as vLLM reads them."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from qerl.checkpoint.experts import decoder_of
    from qerl.checkpoint.shards import read_json
    from qerl.config.names import PROJECTIONS

    config = AutoConfig.from_pretrained(model)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    shapes: dict[str, tuple[int, int]] = {}
    tensors = {}
    for name, module in skeleton.named_modules():
        if name.rpartition(".")[2] in PROJECTIONS:
            shapes[name] = (module.out_features, module.in_features)
    decoder = decoder_of(read_json(Path(model) / "config.json"), model)
    of_experts = [name for layer in decoder.sparse for expert in decoder.experts_of(layer) for name in expert]
    shapes |= {name: decoder.shape_of(name.rpartition(".")[2]) for name in of_experts}
    random_values = torch.randn(rank * max(max(shape) for shape in shapes.values())).mul_(0.01).bfloat16()
    for name, (rows, columns) in shapes.items():
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = random_values[: rank * columns].view(rank, columns).clone()
        tensors[f"{prefix}.lora_B.weight"] = random_values[: rows * rank].view(rows, rank).clone()
    folder = Path(tempfile.mkdtemp())
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": PROJECTIONS, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


if __name__ == "__main__":
    main()
