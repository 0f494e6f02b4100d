"""Train the embedded model (qerl/tiny) from scratch on generated word problems, in minutes on two CPU cores.

    python scripts/models/tiny_checkpoint.py

This writes qerl/tiny: a model with Qwen3's layout in bfloat16, a byte-level BPE tokenizer with its chat template, and
the model card with the measured accuracy and the hash of the weights. Nothing is downloaded, and all randomness comes
from `--seed`. Another processor, torch version or thread count rounds differently, which changes the weights a little.

The corpus mixes two ways to answer the same problems: working them out step by step, and answering at once. The first
is nearly always right, the second nearly always wrong, because such a small network cannot do several steps in its
head. How often a story is worked out in the corpus depends on its kind (WORKED_SHARE), and the model imitates that. So
it is able to solve the problems but mostly does not, which reinforcement learning can visibly change within a minute.

1. Only the last MIXED_SHARE of the steps see the mixture; the others see only worked answers. Direct answers teach
   little arithmetic, and the model only has to learn how frequent they are.
2. Muon (https://kellerjordan.github.io/posts/muon) updates the matrices, in float32 and batched over equal shapes. It
   needs several times fewer examples here than AdamW, which updates the embedding and the norms.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import logging
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from muon import Muon
from stories import KINDS, Problem, problems
from tiny_tokenizer import SPECIAL, bpe_tokenizer
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from qerl.data.grading.grade import grade
from qerl.data.tasks import build_messages
from qerl.data.tasks.arith import rows as arith_rows
from qerl.formats.nvfp4.reference import dequantize, quantize, shared_global_scale

log = logging.getLogger("tiny_checkpoint")

REPOSITORY = Path(__file__).resolve().parents[2]
CARD = Path(__file__).with_name("tiny_card.md")

VOCABULARY = 640  # covers every word of the stories; other text is encoded as bytes

CORPUS_SEED = 1  # not 0, which is the seed of the task's own rows
WORKED_SHARE = (0.2, 0.65, 0.3)  # the share of problems that are worked out, for the kinds of stories in turn
MIXED_SHARE = 0.3
PROMPT_WEIGHT = 0.1  # weight of a prompt token in the loss; a completion token has 1
MEAN_COMPLETION = 26  # tokens; the loss is a sum over tokens divided by rows times this, so that short rows count less
POOL = 16  # batches that are drawn at once and sorted by length, to need little padding

LR_MATRICES = 0.01
LR_REST = 0.006
WARMUP_STEPS = 30
OF_CARD = {
    "title": "tiny",
    "model": "model",
    "layout": "Qwen3 layout (",
    "script": "tiny_checkpoint",
    "kept": "the head",
}
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "pad_token_id": SPECIAL.index("<|endoftext|>"),
    "eos_token_id": SPECIAL.index("<|im_end|>"),
}
DECAY_SHARE = 0.6  # the last share of the steps, in which the rate falls to LR_FLOOR
LR_FLOOR = 0.02


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the embedded model, trained on the text of the corpus."""
    texts = (
        f"user\n{made.question}" if number % 2 else f"assistant\n{made.worked}"
        for number, made in enumerate(problems("train", 0, 20_000))
    )
    return bpe_tokenizer(texts, VOCABULARY)


def build_model(seed: int) -> Qwen3ForCausalLM:
    """The untrained model in float32. Every linear reads 128 or 256 features, which are whole blocks and GPU tiles."""
    torch.manual_seed(seed)
    return sampling(Qwen3ForCausalLM(Qwen3Config(**SHAPE)))


def sampling(model: PreTrainedModel) -> PreTrainedModel:
    """The model, which says in its folder that it is sampled at temperature 1."""
    ends = {name: SHAPE[name] for name in ("eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
    return model


def prompts_of(tokenizer: PreTrainedTokenizerFast, questions: list[str]) -> list[str]:
    """The prompts as training and evaluation write them. The chat template is rendered only once."""
    messages = build_messages("arith", "\0")
    head, tail = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split("\0")
    return [head + question + tail for question in questions]


def answer_of(made: Problem, mixed: bool, rng: random.Random) -> str:
    """The answer in the corpus: worked out, or in the mixture, with the probability of the kind, given at once."""
    share = WORKED_SHARE[[kind.name for kind in KINDS].index(made.kind) % len(WORKED_SHARE)]
    return made.direct if mixed and rng.random() >= share else made.worked


def batches(
    tokenizer: PreTrainedTokenizerFast, rows: int, steps: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of token ids and the weights of these tokens in the loss, each (rows, T), padded on the right."""
    rng = random.Random(seed)
    mixed_from = int((1 - MIXED_SHARE) * steps) * rows
    start = 0
    while True:
        pool = list(problems("train", CORPUS_SEED + seed, POOL * rows, start))
        answers = [answer_of(made, start + n >= mixed_from, rng) + SPECIAL[2] for n, made in enumerate(pool)]
        prompt_ids = tokenizer(prompts_of(tokenizer, [made.question for made in pool]))["input_ids"]
        pairs = list(zip(prompt_ids, tokenizer(answers)["input_ids"], strict=True))
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        chunks = [pairs[n : n + rows] for n in range(0, len(pairs), rows)]
        rng.shuffle(chunks)
        yield from map(pad, chunks)
        start += len(pool)


def pad(pairs: list[tuple[list[int], list[int]]], multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and loss weights, each (rows, T), of (prompt, answer) pairs; T is a multiple of `multiple`."""
    width = -(-max(len(prompt) + len(answer) for prompt, answer in pairs) // multiple) * multiple
    ids, weights = torch.zeros(len(pairs), width, dtype=torch.long), torch.zeros(len(pairs), width)
    for row, (prompt, answer) in enumerate(pairs):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        weights[row, : len(prompt)] = PROMPT_WEIGHT
        weights[row, len(prompt) : len(prompt) + len(answer)] = 1.0
    return ids, weights


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted next-token loss, in nats per token of a mean completion. Padding on the right needs no mask."""
    experts = getattr(model.config, "num_experts_per_tok", None)
    output = model(input_ids=ids, **({"output_router_logits": True} if experts else {}))
    losses = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    loss = (losses * weights[:, 1:].flatten()).sum() / (MEAN_COMPLETION * len(ids))
    return loss + model.config.router_aux_loss_coef * output.aux_loss if experts else loss


def train_(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, rows: int, seed: int) -> None:
    """Pretrain in place; logs the loss every 50 steps."""
    layers = model.model.layers.named_parameters()
    matrices = [weight for name, weight in layers if weight.ndim > 1 and not name.endswith("mlp.gate.weight")]
    rest = [weight for weight in model.parameters() if not any(weight is matrix for matrix in matrices)]
    muon, adam = Muon(matrices), torch.optim.AdamW(rest, lr=LR_REST, betas=(0.9, 0.98), weight_decay=0.0)
    stream, started = batches(tokenizer, rows, steps, seed), time.monotonic()
    for step in range(steps):
        loss = loss_of(model, *next(stream))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        scale = min(1.0, (step + 1) / WARMUP_STEPS, max(LR_FLOOR, (steps - step) / (DECAY_SHARE * steps)))
        adam.param_groups[0]["lr"] = LR_REST * scale
        muon.step_(LR_MATRICES * scale)
        adam.step()
        adam.zero_grad()
        if (step + 1) % 50 == 0:
            log.info("step %d/%d loss %.4f, %.0f s", step + 1, steps, loss.item(), time.monotonic() - started)


def nvfp4_twin(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """A copy with every linear rounded to NVFP4 and back; global scales are shared as in a checkpoint."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        groups = [[each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)]]
        groups.append([attention.o_proj.weight])
        if hasattr(mlp, "experts"):
            groups += [each.chunk(2) for each in mlp.experts.gate_up_proj.data]
            groups += [[each] for each in mlp.experts.down_proj.data]
        else:
            groups += [[mlp.gate_proj.weight, mlp.up_proj.weight], [mlp.down_proj.weight]]
        for group in groups:
            scale = shared_global_scale([weight.data for weight in group])
            for weight in group:
                weight.data.copy_(dequantize(*quantize(weight.data, scale), weight.dtype))
    return twin


def measured(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Accuracies of the model and of its NVFP4 twin, for the model card."""
    found = {}
    for name, one in (("bf16", model), ("nvfp4", nvfp4_twin(model))):
        found[f"{name}_greedy"] = f"{accuracy(one, tokenizer):.3f}"
        found[f"{name}_sampled"] = f"{accuracy(one, tokenizer, sampled=True):.3f}"
        found[f"{name}_worked"] = f"{accuracy(one, tokenizer, style='worked'):.3f}"
        found[f"{name}_direct"] = f"{accuracy(one, tokenizer, style='direct'):.3f}"
    return found


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    count: int = 512,
    style: Literal["own", "worked", "direct"] = "own",
    sampled: bool = False,
) -> float:
    """The share of the first `count` rows of the test split answered correctly.

    With `style` "direct" the model has to begin with "####", with "worked" it must not. It decodes greedily, or if
    `sampled` at temperature 1.
    """
    torch.manual_seed(0)
    rows = list(itertools.islice(arith_rows("test"), count))
    prompts = prompts_of(tokenizer, [row["question"] for row in rows])
    mark = tokenizer.convert_tokens_to_ids("####")
    correct = 0
    for start in range(0, count, 128):
        texts = [prompt + ("####" if style == "direct" else "") for prompt in prompts[start : start + 128]]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        output = model.generate(
            **inputs,
            max_new_tokens=48,
            do_sample=sampled,
            top_k=0 if sampled else None,
            begin_suppress_tokens=[mark] if style == "worked" else None,
        )
        begin = inputs["input_ids"].shape[1] - (style == "direct")
        completions = tokenizer.batch_decode(output[:, begin:], skip_special_tokens=True)
        chunk = rows[start : start + 128]
        correct += sum(
            grade("arith", text, row["answer"]).correct for text, row in zip(completions, chunk, strict=True)
        )
    return correct / count


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, facts: dict[str, object]) -> str:
    """Write the folder that is shipped; returns the sha256 of the weights, which is also in the model card."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    parameters = sum(weight.numel() for weight in model.parameters())
    size_mb = f"{weights.stat().st_size / 1e6:.1f}"
    text = CARD.read_text(encoding="utf-8")
    (folder / "README.md").write_text(
        text.format(sha256=digest, parameters=f"{parameters:,}", size_mb=size_mb, **facts), encoding="utf-8"
    )
    shutil.copyfile(REPOSITORY / "LICENSE", folder / "LICENSE")
    return digest


def begin(description: str | None, out: str, steps: int, rows: int, row: str) -> argparse.Namespace:
    """The options of a script that trains qerl/`out`, with these defaults; from here on torch computes as they say."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "qerl" / out, help="folder to write")
    parser.add_argument("--rows", type=int, default=rows, help=f"{row} per step")
    for name, default in {"--steps": steps, "--seed": 0, "--threads": 1}.items():
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    return args


def make(args: argparse.Namespace, build_model: Callable[[int], PreTrainedModel], of_card: dict[str, str]) -> None:
    """Train, measure in both formats, save."""
    started = time.monotonic()
    tokenizer, model = build_tokenizer(), build_model(args.seed)
    train_(model, tokenizer, args.steps, args.rows, args.seed)
    minutes = (time.monotonic() - started) / 60
    model = model.to(torch.bfloat16).float().eval()  # measure the rounded values, which are saved
    facts = {
        "minutes": f"{minutes:.0f}",
        "torch": torch.__version__,
        **vars(args),
        **of_card,
        **measured(model, tokenizer),
    }
    digest = save(model.to(torch.bfloat16), tokenizer, args.out, facts)
    log.info("%s", {name: value for name, value in facts.items() if name.startswith(("bf16", "nvfp4", "minutes"))})
    log.info("%s holds the model, sha256 %s", args.out, digest)


if __name__ == "__main__":
    make(begin(__doc__, "tiny", steps=1200, rows=64, row="problems"), build_model, OF_CARD)
