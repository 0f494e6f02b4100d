"""TRL's own GRPO trainer over the 16-bit model, on the rows and with the recipe of scripts/study/study_real.py.

    python scripts/study/study_real_trl.py MODEL ROWS OUT --rate 2e-4 --seed 0 --steps 80    # OUT/row.json

TRL samples with vLLM in its own process (colocate) and sends merged weights. ROWS is a folder of
scripts/study/real_task.py, whose function `grade` is the reward. The test rows are answered by `generate` of
transformers, greedily, after the last step.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import real_task

PROMPTS, GROUP, NEW_TOKENS, RANK = 16, 8, 80, 32
TEST_BATCH = 256


def read(file: Path, limit: int | None = None) -> list[dict[str, str]]:
    """The rows of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:limit]]


def messages(row: dict[str, str]) -> list[dict[str, str]]:
    """The prompt of a row: the question alone."""
    return [{"role": "user", "content": row["question"]}]


def config_of(args: argparse.Namespace) -> Any:
    """TRL's configuration for the recipe in scripts/study/study_real.yaml."""
    from trl import GRPOConfig

    per_step = PROMPTS * GROUP
    return GRPOConfig(
        output_dir=str(args.out),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=per_step // 2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        use_vllm=args.vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=args.memory_share,
        vllm_max_model_length=256,
        learning_rate=args.rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, args.steps // 10),
        optim="adamw_torch",
        adam_beta2=0.99,
        weight_decay=0.1,
        max_grad_norm=0.2,
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        mask_truncated_completions=True,
        bf16=args.vllm,
        use_cpu=not args.vllm,
        model_init_kwargs={"dtype": "bfloat16" if args.vllm else "float32"},
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for a completion whose last number is the answer, else 0."""
    return [
        float(real_task.grade(completion[0]["content"], right))
        for completion, right in zip(completions, answer, strict=True)
    ]


def answers(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> dict[str, Any]:
    """The greedy answers to the rows, as scripts/study/study_real_job.py writes them."""
    import torch

    bits, tokens, truncated = "", 0, 0
    model.eval()
    for start in range(0, len(rows), TEST_BATCH):
        part = rows[start : start + TEST_BATCH]
        texts = [
            tokenizer.apply_chat_template(messages(row), add_generation_prompt=True, tokenize=False) for row in part
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        inputs = inputs.to(model.device)
        with torch.no_grad():
            made = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        written = made[:, inputs["input_ids"].shape[1] :].tolist()
        for ids, row in zip(written, part, strict=True):
            ended = tokenizer.eos_token_id in ids
            own = ids[: ids.index(tokenizer.eos_token_id) + 1] if ended else ids
            tokens, truncated = tokens + len(own), truncated + (not ended)
            bits += str(int(real_task.grade(tokenizer.decode(own, skip_special_tokens=True), row["answer"])))
    return {"test": bits, "tokens": round(tokens / len(rows), 1), "truncated_share": round(truncated / len(rows), 4)}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train and answer the test rows; returns the row of the results."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = read(args.rows / "train.jsonl", args.limit)
    given = [{"prompt": messages(row), "answer": row["answer"]} for row in rows]
    trainer = GRPOTrainer(
        model=str(args.model),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config_of(args),
        train_dataset=Dataset.from_list(given).shuffle(seed=args.seed),
        peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    names = {"reward": "reward", "step_time": "time/step_s", "completions/mean_length": "completions/mean_tokens"}
    curves = {
        name: [float(f"{row[key]:.4g}") for row in logged] for key, name in names.items() if logged and key in logged[0]
    }
    test = read(args.rows / "test.jsonl", args.test_rows)
    return {"before": None, "after": answers(trainer.model, tokenizer, test), "steps": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the 16-bit model")
    parser.add_argument("rows", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("out", type=Path, help="folder for row.json")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--test-rows", type=int, default=512)
    parser.add_argument("--limit", type=int, help="train on so many of the rows")
    parser.add_argument("--memory-share", type=float, default=0.08, help="of the card, for vLLM")
    parser.add_argument("--no-vllm", dest="vllm", action="store_false", help="sample with transformers, on a CPU")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    args.out.mkdir(parents=True, exist_ok=True)
    row = train(args)
    (args.out / "row.json").write_text(json.dumps(row) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
