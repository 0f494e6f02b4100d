"""How far quantized models are from their 16-bit model, on completions that the latter samples once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

Tokens = tuple[list[int], list[int]]  # the tokens of a prompt and of its completion
ROWS = 512  # sequences of a forward pass


def divergences(base: str, models: Sequence[Path], task: str, questions: Sequence[str], tokens: int) -> list[dict]:
    """Of each packed model, in nats per token: {"forward": KL(base || model), "reverse": KL(model || base)}.

    The base samples one completion of at most `tokens` tokens per question, at temperature 1, from a fixed seed.
    """
    from qerl.checkpoint.load import load_model, load_tokenizer
    from qerl.data.tasks import build_messages

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(base)
    whole = load_model(base, "bf16", device=device)
    messages = [build_messages(task, question) for question in questions]
    rows = list(sampled(whole, tokenizer, messages, tokens))
    return [_mean(whole, load_model(each, "nvfp4", device=device), rows) for each in models]


def sampled(model, tokenizer, messages: Sequence[list[dict]], tokens: int) -> Iterator[Tokens]:
    """The rows of the base's own completions, each with the token that ended it."""
    from transformers import set_seed

    set_seed(0)
    for start in range(0, len(messages), ROWS):
        texts = tokenizer.apply_chat_template(
            messages[start : start + ROWS], tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        asked = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": tokens}
        written = model.generate(**inputs, **asked)[:, inputs["input_ids"].shape[1] :].tolist()
        for ids, mask, completion in zip(
            inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), written, strict=True
        ):
            end = completion.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in completion else None
            yield [token for token, there in zip(ids, mask, strict=True) if there], completion[:end]


@torch.no_grad()
def _mean(whole, model, rows: Sequence[Tokens]) -> dict[str, float]:
    totals, count = torch.zeros(2, dtype=torch.float64), 0
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        log_q, log_p = _log_probabilities(whole, part), _log_probabilities(model, part)
        for direction, (one, other) in enumerate(((log_q, log_p), (log_p, log_q))):
            totals[direction] += torch.linalg.vecdot(one.exp(), one - other).double().sum().cpu()
        count += len(log_q)
    return dict(zip(("forward", "reverse"), (totals / count).tolist(), strict=True))


def _log_probabilities(model, rows: Sequence[Tokens]) -> torch.Tensor:
    """float32 (tokens of all completions, vocabulary). Causal attention needs no mask for padding on the right."""
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    predicting = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, (prompt, completion) in enumerate(rows):
        ids[number, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
        predicting[number, len(prompt) - 1 : len(prompt) + len(completion) - 1] = True
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits
    return torch.log_softmax(logits[predicting.to(model.device)].float(), -1)


def write_problems(task: str, count: int, file: Path) -> list[str]:
    """Write `count` different problems of the task's test split as rows; returns as many other questions of it."""
    from importlib import import_module

    module = import_module(f"qerl.data.tasks.{task}")
    found: dict[str, str] = {}
    number = 0
    while len(found) < 2 * count:
        made = module.problem("test", module.TASK_SEED, number)
        found.setdefault(made.question, str(made.answer))
        number += 1
    rows = [{"question": question, "answer": answer} for question, answer in list(found.items())[:count]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return list(found)[count:]
