#!/usr/bin/env python3
"""Tokens per second and memory of supervised fine-tuning, by qerl, by TRL's QLoRA or by Unsloth; writes JSON.

    python3 scripts/bench/bench_sft.py --model checkpoints/7b --out OUT/sft-7b.json
    python3 scripts/bench/bench_sft.py --by trl --model checkpoints/7b-16 --out OUT/sft-7b-trl.json
    python3 scripts/bench/bench_sft.py --by unsloth --model checkpoints/7b-16 --out OUT/sft-7b-unsloth.json

All three get the same rows of token ids and labels: a prompt of --prompt-tokens and an answer whose length is drawn, so
that half of the answers are under --median tokens and none has more than --longest. A step has as many tokens as each
can arrange: ours takes --rows rows, the others fill bins of --max-length tokens where they can pack. LoRA on the seven
projections, rank and alpha are the same; AdamW in 8 bits. Tokens are those of the rows, without padding.

TRL: NF4 with double quantization (bitsandbytes) unless --bits 16, Liger's kernels where they are installed, and packing
where the attention keeps rows apart (`--attention flash_attention_2`, chosen where flash_attn is installed); otherwise
rows of similar length are padded together. Checkpointing is on, as QLoRA has it, unless --no-checkpointing. Unsloth
comes with its own checkpointing. The first step, in which kernels are compiled, is left out of `tokens_per_s`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qerl.config.names import PROJECTIONS
from scripts.bench.bench_step import PeakMemory, write
from scripts.bench.bench_trl import torch_peak_gib
from scripts.bench.provenance import command, machine

WARM = 1  # steps that do not count
Tokens = dict[str, list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as peak:
        started = time.monotonic()
        found = {"qerl": by_qerl, "trl": by_trl, "unsloth": by_unsloth}[arguments.by](arguments, Path(folder))
        seconds = time.monotonic() - started
    steps = found["steps"]
    counted = steps[WARM:] or steps
    report = {
        "command": command(),
        **machine(),
        "by": arguments.by,
        "run_s": round(seconds, 1),
        "tokens_per_s": round(sum(step["tokens"] for step in counted) / sum(step["step_s"] for step in counted), 1),
        "step_s": round(mean(step["step_s"] for step in counted), 3),
        "peak_driver_gib": round(peak.gib, 2),
        "peak_torch_gib": torch_peak_gib(),
        **found,
    }
    write(report, arguments.out)
    print(json.dumps({key: value for key, value in report.items() if key != "steps"}, indent=1))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", choices=("qerl", "trl", "unsloth"), default="qerl")
    parser.add_argument("--model", required=True, help="NVFP4 folder for qerl, 16-bit folder for the others")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64, help="rows of a step")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--median", type=int, default=384, help="tokens of an answer")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of an answer")
    parser.add_argument("--max-length", type=int, default=8192, help="tokens of a packed bin (trl, unsloth)")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows that are padded together where nothing packs")
    parser.add_argument("--attention", help="of transformers; default: flash_attention_2 if installed, else sdpa")
    parser.add_argument("--bits", type=int, choices=(4, 16), default=4, help="of TRL's and Unsloth's base")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the recipe (qerl)")
    parser.add_argument("--out", type=Path)


def lengths(arguments: argparse.Namespace) -> list[int]:
    """Tokens of each answer, of all steps: the same for all three."""
    drawn = random.Random(0)
    count = arguments.rows * arguments.steps
    each = (round(arguments.median * drawn.lognormvariate(0, 0.75)) for _ in range(count))
    return [min(max(16, length), arguments.longest) for length in each]


def rows(arguments: argparse.Namespace, vocabulary: int) -> list[Tokens]:
    """Rows of random token ids; the labels of a prompt are -100."""
    drawn, found = random.Random(1), []
    for answer in lengths(arguments):
        ids = [drawn.randrange(3, vocabulary) for _ in range(arguments.prompt_tokens + answer)]
        labels = [*[-100] * arguments.prompt_tokens, *ids[arguments.prompt_tokens :]]
        found.append({"input_ids": ids, "labels": labels})
    return found


def vocabulary_of(model: str) -> int:
    return json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]


def by_qerl(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A whole run, whose rows are put in place of a file's."""
    from unittest import mock

    from qerl.config.recipe import load_recipe
    from training.run import start
    from training.sft.rows import Row, Rows

    given = [
        Row(str(number), row["input_ids"], [int(label >= 0) for label in row["labels"]])
        for number, row in enumerate(rows(arguments, vocabulary_of(arguments.model)))
    ]
    config = load_recipe("sft_7b", overrides(arguments), base=arguments.model, out=str(folder / "run"))
    with mock.patch("training.sft.rows.read_rows", return_value=Rows(given)):
        result = start(config, "bench")
    lines = (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    about = json.loads((result.run_dir / "run.json").read_text(encoding="utf-8"))
    for step in steps:
        step |= {"step_s": step["time/step_s"], "tokens": step["rows/mean_tokens"] * arguments.rows}
    return {"micro_batches": about["micro_batches"], "steps": steps}


def overrides(arguments: argparse.Namespace) -> list[str]:
    """The workload as values over the recipe sft_7b."""
    return [
        f"sft.rows_per_step={arguments.rows}",
        f"sft.max_tokens={arguments.prompt_tokens + arguments.longest}",
        f"adapter.rank={arguments.rank}",
        f"adapter.alpha={2 * arguments.rank}",
        f"run.steps={arguments.steps}",
        f"run.save_every={arguments.steps}",
        "validation.every=null",
        *arguments.set,
    ]


def by_trl(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """TRL's SFTTrainer on a base in 4 bits, as a good engineer sets it."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from trl import SFTTrainer

    on_gpu = torch.cuda.is_available()
    attention = arguments.attention or ("flash_attention_2" if find_spec("flash_attn") else "sdpa")
    four = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model,
        dtype=torch.bfloat16,
        attn_implementation=attention,
        device_map={"": 0} if on_gpu else None,
        quantization_config=four if arguments.bits == 4 else None,
    )
    packs = attention.startswith("flash_attention")
    lora = LoraConfig(
        r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"
    )
    trainer = SFTTrainer(
        model,
        sft_config(arguments, folder, packs, gradient_checkpointing=not arguments.no_checkpointing),
        train_dataset=dataset(arguments),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        peft_config=lora,
    )
    liger = find_spec("liger_kernel") is not None
    return {"attention": attention, "packing": packs, "liger": liger, "bits": arguments.bits, "steps": timed(trainer)}


def by_unsloth(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Unsloth as it comes, with TRL's trainer that it patches."""
    import_module("unsloth")  # before trl and transformers, which it patches
    import torch
    from trl import SFTTrainer
    from unsloth import FastLanguageModel

    longest = arguments.max_length
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=arguments.model,
        max_seq_length=longest,
        dtype=torch.bfloat16,
        load_in_4bit=arguments.bits == 4,
        use_exact_model_name=True,
        local_files_only=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=arguments.rank,
        lora_alpha=2 * arguments.rank,
        target_modules=list(PROJECTIONS),
        use_gradient_checkpointing=False if arguments.no_checkpointing else "unsloth",
        random_state=0,
    )
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=dataset(arguments),
        args=sft_config(arguments, folder, packs=True),
    )
    return {"packing": True, "bits": arguments.bits, "steps": timed(trainer)}


def dataset(arguments: argparse.Namespace) -> Any:
    """The rows; where nothing packs, those of a step lie by length, so that little is padded."""
    from datasets import Dataset

    found = rows(arguments, vocabulary_of(arguments.model))
    size = arguments.rows
    steps = (found[first : first + size] for first in range(0, len(found), size))
    return Dataset.from_list([row for step in steps for row in sorted(step, key=lambda row: len(row["input_ids"]))])


def sft_config(arguments: argparse.Namespace, folder: Path, packs: bool, **more: Any) -> Any:
    """TRL's settings of the workload: as many tokens a step as ours has, in bins of --max-length or in padded rows."""
    import torch
    from trl import SFTConfig

    on_gpu = torch.cuda.is_available()
    tokens = sum(lengths(arguments)) / arguments.steps + arguments.rows * arguments.prompt_tokens
    bins = max(1, round(tokens / arguments.max_length))
    micro = 1 if packs else arguments.micro_batch
    return SFTConfig(
        output_dir=str(folder),
        max_steps=arguments.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=bins if packs else arguments.rows // micro,
        packing=packs,
        max_length=arguments.max_length if packs else None,
        train_sampling_strategy="sequential",
        learning_rate=2e-4,
        optim="adamw_8bit" if on_gpu else "adamw_torch",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        use_liger_kernel=find_spec("liger_kernel") is not None and on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def timed(trainer: Any) -> list[dict[str, float]]:
    """Seconds and tokens of each step; tokens by TRL's own count, which leaves padding out, or else the mean of all."""
    import torch
    from transformers import TrainerCallback

    steps: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = _now(torch)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append({"step_s": _now(torch) - self.began})

    trainer.add_callback(Clock())
    trainer.train()
    seen = [row["num_tokens"] for row in trainer.state.log_history if "num_tokens" in row]
    if len(seen) < len(steps):  # Unsloth logs none
        rows = min(len(trainer.train_dataset), len(steps) * rows_of_a_step(trainer.args))
        total = sum(len(trainer.train_dataset[row]["input_ids"]) for row in range(rows))
        seen = [total * (step + 1) / len(steps) for step in range(len(steps))]
    for step, now, before in zip(steps, seen, [0.0, *seen], strict=False):
        step["tokens"] = now - before
    return steps


def rows_of_a_step(args: Any) -> int:
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps)


def _now(torch: Any) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
