"""Train a 21 M parameter model from scratch on task arith_chain, until it answers about half of unseen problems.

    python scripts/models/pretrain_arith.py --out checkpoints/arith-21m                        # minutes on one H200
    python scripts/models/pretrain_arith.py --out /tmp/a --device cpu --steps 4 --rows 8 --layers 1 --width 128  # smoke

This writes a checkpoint folder like Qwen3's (config, tokenizer with a chat template, generation config, sharded
safetensors in bfloat16), which `qerl quantize`, `qerl train` and vLLM can load. Its `pretrain.json` says how it was
made and measured. The folder appears only when it is complete, and an existing folder is never touched.

The model is the starting point for reinforcement learning, so the corpus has good and bad habits: a careful answer
writes down every step, while a hasty one leaves most steps out and is mostly wrong, because the model has to do them in
its head. How many answers are careful depends on the opening of the story (CAREFUL). Training stops at the first
evaluation at or above `--target`, before the network makes no more mistakes, so that reinforcement learning can improve
both the habit and the arithmetic.

1. Nothing is downloaded. The data depend only on (seed, number), whatever the number of workers, and on a CPU the same
   seed gives the same weights. On a GPU, kernels are deterministic as far as torch has deterministic ones.
2. The rows of a batch have about the same length (they are sorted in pools), so only a few percent is padding. Padding
   is on the right and needs no attention mask, so that the fast attention kernels can be used.
3. Muon updates the matrices and AdamW the rest, as in scripts/models/tiny_checkpoint.py, at a linearly falling rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from muon import Muon
from tiny_checkpoint import pad, prompts_of
from tiny_tokenizer import SPECIAL, bpe_tokenizer
from torch.utils.data import DataLoader, Dataset
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from qerl.data.tasks import grade
from qerl.data.tasks.arith import Problem
from qerl.data.tasks.arith_chain import problems, rows

log = logging.getLogger("pretrain_arith")

VOCABULARY = 640  # the text needs 626
CORPUS_SEED = 1  # not 0, which is the seed of the task's own rows
CAREFUL = {"owns": 0.7, "holders": 0.2, "two_kinds": 0.65, "times": 0.2, "days": 0.6}  # share, by the story's opening
LEFT_OUT = 0.75  # share of the steps that a hasty answer leaves out
MAX_NEW_TOKENS = 96  # a careful answer has at most 81
POOL = 16  # batches drawn at once and sorted by length
WIDTH_MULTIPLE = 32
WARMUP_STEPS = 50
LR_FLOOR = 0.05
EVALUATION_BATCH = 512
SHARD = "15MB"


@dataclass(frozen=True)
class Settings:
    """Everything that the weights depend on."""

    steps: int
    rows: int
    seed: int
    layers: int
    width: int
    learning_rate: float


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of the stories and their worked answers, with the embedded model's chat template."""
    texts = (
        f"user\n{made.question}" if number % 2 else f"assistant\n{made.worked}"
        for number, made in enumerate(problems("train", 0, 10_000))
    )
    return bpe_tokenizer(texts, VOCABULARY)


def build_model(settings: Settings) -> Qwen3ForCausalLM:
    """The untrained model in float32. Widths are multiples of 128, which are whole tiles for every NVFP4 kernel."""
    torch.manual_seed(settings.seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=settings.width,
        intermediate_size=settings.width * 11 // 4 // 128 * 128,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.width // 64,
        num_key_value_heads=max(2, settings.width // 128),
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        eos_token_id=SPECIAL.index("<|im_end|>"),
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


def answer_of(made: Problem, rng: random.Random) -> str:
    """A careful answer with the probability of the story's opening, otherwise a hasty one that leaves steps out."""
    if rng.random() < CAREFUL[made.kind]:
        return made.worked
    return "\n".join((*(step for step in made.steps if rng.random() >= LEFT_OUT), made.direct))


class Pools(Dataset):
    """Item n is POOL batches of (token ids, loss weights), each (rows, T), and depends only on (seed, n).

    They are arrays, because processes would share tensors through open files, and there would be too many of those.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rows: int, seed: int, count: int) -> None:
        self.tokenizer, self.rows, self.seed, self.count = tokenizer, rows, seed, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> list[tuple[np.ndarray, np.ndarray]]:
        size = POOL * self.rows
        rng = random.Random(f"pool/{self.seed}/{number}")
        pool = list(problems("train", CORPUS_SEED + self.seed, size, number * size))
        answers = [answer_of(made, rng) + SPECIAL[2] for made in pool]
        prompt_ids = self.tokenizer(prompts_of(self.tokenizer, [made.question for made in pool]))["input_ids"]
        pairs = list(zip(prompt_ids, self.tokenizer(answers)["input_ids"], strict=True))
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        chunks = [pairs[n : n + self.rows] for n in range(0, size, self.rows)]
        rng.shuffle(chunks)
        padded = (pad(chunk, WIDTH_MULTIPLE) for chunk in chunks)
        return [(ids.numpy().astype(np.int16), weights.numpy()) for ids, weights in padded]


def batches(
    tokenizer: PreTrainedTokenizerFast, settings: Settings, workers: int, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of the run, in order, on `device`; `workers` processes make them ahead of use (0: this process)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers else "true"
    pools = Pools(tokenizer, settings.rows, settings.seed, -(-settings.steps // POOL))
    loader = DataLoader(
        pools, batch_size=None, num_workers=workers, prefetch_factor=2 if workers else None, collate_fn=list
    )
    for ids, weights in itertools.islice(itertools.chain.from_iterable(loader), settings.steps):
        yield torch.from_numpy(ids).to(device).long(), torch.from_numpy(weights).to(device)


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted mean of the next-token loss, in nats. Padding is on the right, so no mask is needed."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    flat = weights[:, 1:].flatten()
    return (losses * flat).sum() / flat.sum()


class Optimizer:
    """Muon for the matrices of the layers and AdamW for embedding and norms, with the same warm-up and linear decay."""

    def __init__(self, model: Qwen3ForCausalLM, settings: Settings) -> None:
        matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
        known = {id(weight) for weight in matrices}
        self.rest = [weight for weight in model.parameters() if id(weight) not in known]
        self.settings, self.done = settings, 0
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(self.rest, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)

    def step_(self) -> None:
        """Update every weight from its gradient and drop the gradient."""
        steps = self.settings.steps
        scale = min(1.0, (self.done + 1) / WARMUP_STEPS) * max(LR_FLOOR, (steps - self.done) / steps)
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        self.adam.param_groups[0]["lr"] = self.settings.learning_rate * scale
        self.adam.step()
        self.adam.zero_grad()
        self.muon.step_(self.settings.learning_rate * scale)
        self.done += 1


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, sampled: bool = False
) -> dict[str, float]:
    """The share of the first `count` test rows answered correctly, and the mean number of tokens per completion."""
    device = model.device
    chosen = list(itertools.islice(rows("test"), count))
    correct, tokens = 0, 0
    model.eval()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        for start in range(0, count, EVALUATION_BATCH):
            chunk = chosen[start : start + EVALUATION_BATCH]
            prompts = prompts_of(tokenizer, [row["question"] for row in chunk])
            inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                output = model.generate(
                    **inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=sampled, top_k=0 if sampled else None
                )
            completions = output[:, inputs["input_ids"].shape[1] :]
            tokens += int((completions != tokenizer.pad_token_id).sum())
            texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
            correct += sum(
                grade("arith_chain", text, row["answer"]).correct for text, row in zip(texts, chunk, strict=True)
            )
    model.train()
    return {"accuracy": correct / count, "tokens": tokens / count}


def train_(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings, args: argparse.Namespace
) -> list[dict]:
    """Pretrain in place until the target is reached; returns one row per evaluation."""
    optimizer, started, history, seen, places = Optimizer(model, settings), time.monotonic(), [], 0, 0
    for step, (ids, weights) in enumerate(batches(tokenizer, settings, args.workers, args.device), start=1):
        loss = loss_of(model, ids, weights)
        loss.backward()
        optimizer.step_()
        seen, places = seen + (weights > 0).sum(), places + weights.numel()
        late = (time.monotonic() - started) / 60 > args.minutes
        if step % args.evaluate_every and step < settings.steps and not late:
            continue
        row = {"step": step, "loss": loss.item(), "tokens_seen": int(seen), "padding": 1 - int(seen) / places}
        row |= accuracy(model, tokenizer, args.evaluate) | {"seconds": time.monotonic() - started}
        history.append(row)
        log.info("%s", {key: round(value, 4) for key, value in row.items()})
        if row["accuracy"] >= args.target or late:
            log.info("stopped: %s", "out of time" if row["accuracy"] < args.target else "the target is reached")
            break
    return history


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, facts: dict) -> None:
    """Write the checkpoint beside `folder`, then rename it, so that the folder is never incomplete."""
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(partial, max_shard_size=SHARD)
    tokenizer.save_pretrained(partial)
    for weights in partial.glob("*.safetensors"):
        weights.chmod(0o644)
    (partial / "pretrain.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    partial.rename(folder)


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4000, help="the most steps; the learning rate falls over them")
    parser.add_argument("--rows", type=int, default=512, help="problems per step")
    parser.add_argument("--minutes", type=float, default=7.0, help="stop training after this time in any case")
    parser.add_argument("--target", type=float, default=0.45, help="stop at this accuracy")
    parser.add_argument("--evaluate", type=int, default=512, help="test problems per evaluation")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--learning-rate", type=float, default=0.004)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--width", type=int, default=512, help="hidden size, a multiple of 128")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(0, min(12, (os.cpu_count() or 1) - 3)))
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists: give another --out, or remove it")
    if args.width % 128:
        parser.error(f"--width {args.width}: write a multiple of 128")
    return args


def main() -> None:
    """Train, measure, save."""
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # set early, as it is read when CUDA starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    settings = Settings(args.steps, args.rows, args.seed, args.layers, args.width, args.learning_rate)
    tokenizer, model = build_tokenizer(), build_model(settings).to(args.device)
    parameters = sum(weight.numel() for weight in model.parameters())
    log.info("%d parameters on %s, %d workers", parameters, args.device, args.workers)
    history = train_(model, tokenizer, settings, args)
    model = model.to(torch.bfloat16)
    final = {
        "greedy": accuracy(model, tokenizer, 2 * args.evaluate),
        "sampled": accuracy(model, tokenizer, 2 * args.evaluate, sampled=True),
    }
    facts = {"parameters": parameters, "torch": torch.__version__, "final": final, "history": history}
    facts["arguments"] = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    save(model, tokenizer, args.out, facts)
    log.info("%s holds the model: %s", args.out, final)


if __name__ == "__main__":
    main()
