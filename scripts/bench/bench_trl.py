#!/usr/bin/env python3
"""The same training step as in bench_step.py, by TRL as it comes: BF16 base, LoRA, its own vLLM in colocate mode.

    python3 scripts/bench/bench_trl.py --model checkpoints/random-7b --out benchmarks/step-7b-trl.json

Everything that the workload does not determine is TRL's default, except vLLM's sleep mode (without it, two copies of a
7B model and a cache stay on the card), gradient checkpointing, and LoRA on the seven projections. `--tuned` turns
checkpointing off and Liger's kernels on, and `--full` trains all weights in BF16 with 8-bit AdamW. `--cap-gib` stands
for a smaller card: torch gets no more, vLLM the same share of that as of a whole card, and the 8-bit state of AdamW may
be paged to the host; on a card that has no more nothing is capped or paged. A run with `--cap-gib` that lacks memory is
reported with the error, and is no failure of the script.
torchrun spreads the batch over several cards. `--model` is a 16-bit checkpoint from
scripts/models/make_random_checkpoint.py. Prompts and lengths are those of bench_step.py. All rewards are 0, which does
not change the work that TRL does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qerl.config.names import PROJECTIONS
from scripts.bench.bench_step import PeakMemory, add_sizes
from scripts.bench.provenance import command, machine, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import LoraConfig
    from trl import GRPOTrainer

    from qerl.checkpoint.experts import Decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--full", action="store_true", help="train all weights in BF16 with 8-bit AdamW, without LoRA")
    parser.add_argument("--tuned", action="store_true", help="no gradient checkpointing, and Liger's kernels and loss")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing with --tuned, too")
    parser.add_argument("--no-vllm", action="store_true", help="transformers' generate, to try this script on a CPU")
    arguments = parser.parse_args()
    started, error, steps = time.monotonic(), None, []
    share = capped(arguments.cap_gib)
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as peak:
        try:
            trainer = build(arguments, folder, share)
            seconds = timed(trainer)
            trainer.train()
            steps = [row for row in trainer.state.log_history if "step_time" in row]
            steps = [row | {key: each[at] for key, each in seconds.items() if each} for at, row in enumerate(steps)]
        except Exception as raised:
            if arguments.cap_gib is None or "out of memory" not in str(raised).lower():
                raise
            error = str(raised)
    report = {
        "command": command(),
        **machine(),
        "run_s": round(time.monotonic() - started, 1),
        "peak_driver_gib": round(peak.gib, 2),
        "peak_torch_gib": torch_peak_gib(),
        "cap_gib": arguments.cap_gib,
        "out_of_memory": error,
        "steps": steps,
    }
    if int(os.environ.get("RANK", 0)):
        return
    print(write(report, arguments.out))


def capped(cap_gib: float | None) -> float:
    """The share of the card that `cap_gib` is, which torch is held to; 1 without a cap or with a larger one."""
    import torch

    if cap_gib is None or not torch.cuda.is_available():
        return 1.0
    share = min(1.0, cap_gib * 2**30 / torch.cuda.mem_get_info()[1])
    torch.cuda.set_per_process_memory_fraction(share)
    return share


def timed(trainer: GRPOTrainer) -> dict[str, list[float]]:
    """Seconds of each rollout and of each sync, one of both per step, filled in while the trainer trains."""
    seconds: dict[str, list[float]] = {"rollout_s": [], "sync_s": []}
    engine = getattr(trainer, "vllm_generation", None)
    for key, name in (("rollout_s", "generate"), ("sync_s", "sync_weights")):
        if engine is not None:
            setattr(engine, name, clocked(getattr(engine, name), seconds[key]))
    return seconds


def clocked(call: Callable, seconds: list[float]) -> Callable:
    """The same call, of which each adds its seconds to the list."""

    def clock(*given: object, **named: object) -> object:
        started = time.perf_counter()
        result = call(*given, **named)
        seconds.append(time.perf_counter() - started)
        return result

    return clock


def build(arguments: argparse.Namespace, folder: str, share: float = 1.0) -> GRPOTrainer:
    """The trainer of TRL for this workload, on a card of which it is to use this share."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    on_gpu, world = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", 1))
    vllm = {} if arguments.no_vllm else {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    if share < 1 and vllm:
        vllm["vllm_gpu_memory_utilization"] = GRPOConfig.vllm_gpu_memory_utilization * share
    if vllm and decoder(arguments.model).linear:
        take_text_of_qwen3_5()
    eight_bits = "paged_adamw_8bit" if share < 1 else "adamw_8bit"
    args = GRPOConfig(
        output_dir=folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=arguments.prompts * arguments.group // arguments.micro_batch // world,
        num_generations=arguments.group,
        max_completion_length=arguments.new_tokens,
        model_init_kwargs={"dtype": "bfloat16"},
        gradient_checkpointing=arguments.checkpointing or not arguments.tuned,
        use_liger_kernel=arguments.tuned,
        liger_kernel_config=without_experts(arguments.model),
        **({"optim": eight_bits if on_gpu else "adamw_torch"} if arguments.full else {}),
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        **vllm,
        **({"vllm_max_model_length": arguments.prompt_tokens + arguments.new_tokens + 1} if vllm else {}),
    )
    return GRPOTrainer(
        model=arguments.model,
        reward_funcs=zero,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts(arguments.prompt_tokens)]),
        processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
        peft_config=None if arguments.full else lora(arguments.rank, arguments.model),
    )


def take_text_of_qwen3_5() -> None:
    """Let TRL's vLLM 0.25.1 open the text model, which it has as a part of the one for pictures and text only; without
    flashinfer, which vLLM takes for granted there, states of prompts are computed by Triton's kernels."""
    from functools import partial
    from importlib.util import find_spec

    import vllm.device_allocator.cumem  # noqa: F401 - it might take TileLang's stub for CUDA's runtime later
    from trl.generation import vllm_generation

    from qerl.engine.vllm import register_text_model

    register_text_model()
    if not find_spec("flashinfer"):
        vllm_generation.LLM = partial(vllm_generation.LLM, gdn_prefill_backend="triton")


def without_experts(model: str) -> dict[str, bool] | None:
    """What of Liger a mixture of experts does without: its experts do not take an adapter of PEFT's (0.8.5 raises)."""
    return {"swiglu": False} if decoder(model).has_experts else None


def decoder(model: str) -> Decoder:
    from qerl.checkpoint.experts import decoder_of
    from qerl.checkpoint.shards import read_json

    return decoder_of(read_json(Path(model) / "config.json"), model)


def lora(rank: int, model: str) -> LoraConfig:
    """An adapter on the linears that ours has."""
    from peft import LoraConfig

    targets = decoder(model).targets(PROJECTIONS)
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), task_type="CAUSAL_LM")


def zero(completions: list[str], **columns: object) -> list[float]:
    """Reward every completion with 0: a step does all its work, with advantages of zero."""
    return [0.0] * len(completions)


def prompts(length: int) -> list[str]:
    """Texts of `length` bytes; each byte is one token."""
    return [f"{number:04d} ".ljust(length, "abcdefgh"[number % 8]) for number in range(64)]


def torch_peak_gib() -> float | None:
    """The most that torch's allocator held, in GiB."""
    import torch

    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
