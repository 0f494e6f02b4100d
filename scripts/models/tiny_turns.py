"""Teach the embedded model two conversations of several turns, in minutes on a CPU: qerl/tiny_turns.

    python scripts/models/tiny_turns.py

It starts from qerl/tiny and sees two kinds of exchanges: word problems with the tool `calculate`, and the word game.
As in the embedded model, the corpus mixes two ways to play. With the tool every step is computed, and the answer is
right; without it the answer comes at once and is nearly always wrong. In the word game a player halves the list by the
hints, or says one word again and again. So the model is able to win both but mostly does not, which reinforcement
learning can visibly change within a minute.

1. Only the last MIXED_SHARE of the steps see the mixture, as in scripts/models/tiny_checkpoint.py.
2. The six markers of a tool call and its result are tokens of their own, as in Qwen's tokenizer; with the embedded
   vocabulary of 640 tokens a call would take 72 of them.
"""

from __future__ import annotations

import itertools
import logging
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from muon import Muon
from stories import KINDS, Problem, problems
from tiny_checkpoint import REPOSITORY, begin, loss_of, pad
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from qerl.data.tasks.word_game import QUESTION, THINGS, WORDS, split_of

log = logging.getLogger("tiny_turns")

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call>'
MARKERS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *('{"name": "calculate", "arguments": {"expression": "', '"}}'),
)
ROWS_OF_VOCABULARY = 656  # 640 tokens and the markers, in whole rows of sixteen
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system' }}
{%- for tool in tools %}
{{- '\\n' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}
{%- endfor %}
{{- '<|im_end|>' + '\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>' + '\\n' }}
{%- else %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CALCULATE = {"type": "function", "function": {"name": "calculate", "parameters": {"properties": {"expression": {}}}}}

CORPUS_SEED = 2  # 0 and 1 are those of the task's rows and of the embedded model's corpus
TOOL_SHARE = (0.2, 0.5, 0.3)  # the share of problems solved with the tool, for the kinds of stories in turn
HALVING_SHARE = 0.35  # of the games
MIXED_SHARE = 0.3
WARMUP_STEPS = 20
LR_MATRICES, LR_REST = 0.006, 0.006

Turns = list[tuple[str, bool]]  # (text, whether the model writes it)


def extended(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The embedded model in float32 and its tokenizer, with the markers and the chat template."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(MARKERS))
    tokenizer.chat_template = CHAT_TEMPLATE
    model.resize_token_embeddings(ROWS_OF_VOCABULARY, mean_resizing=False)
    return model, tokenizer


def heads(tokenizer: PreTrainedTokenizerFast) -> tuple[tuple[str, str], tuple[str, str]]:
    """What stands before and after a question with the tool, and without it."""

    def around(tools: list | None) -> tuple[str, str]:
        messages = [{"role": "user", "content": "\0"}]
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        head, tail = text.split("\0")
        return head, tail

    return around([CALCULATE]), around(None)


def solved(made: Problem, with_tool: bool) -> Turns:
    """A problem's exchange after its prompt: a call for each step and then the answer, or the answer at once."""
    turns: Turns = []
    for step in made.steps if with_tool else ():
        expression, result = step.split(" = ")
        turns.append((CALL % expression + "<|im_end|>", True))
        reply = f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        turns.append((reply, False))
    return [*turns, (made.direct + "<|im_end|>", True)]


def played(words: list[str], secret: str, halving: bool, rng: random.Random) -> Turns:
    """A game after its prompt: guesses and hints, until the word is found or three guesses are made.

    A player who does not halve the list says one word again and again.
    """
    turns: Turns = []
    low, high, hint, same = 0, len(words) - 1, None, rng.choice(words)
    for _ in range(3):
        guess = words[(low + high) // 2] if halving else same
        if hint is not None:
            turns.append((f"\n<|im_start|>user\n{hint}<|im_end|>\n<|im_start|>assistant\n", False))
        turns.append((guess + "<|im_end|>", True))
        if guess == secret:
            break
        hint = "before" if secret < guess else "after"
        place = words.index(guess)
        low, high = (low, place - 1) if secret < guess else (place + 1, high)
    return turns


def drawn_game(rng: random.Random) -> tuple[list[str], str]:
    """A list of words that belongs to the train split, and its question."""
    while True:
        words = sorted(rng.sample(THINGS, WORDS))
        question = QUESTION.format(words=", ".join(words))
        if split_of(question) == "train":
            return words, question


def corpus(tokenizer: PreTrainedTokenizerFast, mixed_from: int, seed: int) -> Iterator[tuple[str, Turns]]:
    """Endless (prompt, exchange), problems and games in turn; the first `mixed_from` use the tool and the hints."""
    rng = random.Random(seed)
    (tool_head, tool_tail), (head, tail) = heads(tokenizer)
    kinds = [kind.name for kind in KINDS]
    for number in itertools.count():
        mixed = number >= mixed_from
        if number % 2:
            words, question = drawn_game(rng)
            turns = played(words, rng.choice(words), not mixed or rng.random() < HALVING_SHARE, rng)
            yield head + question + tail, turns
        else:
            (made,) = problems("train", CORPUS_SEED + seed, 1, number)
            share = TOOL_SHARE[kinds.index(made.kind) % len(TOOL_SHARE)]
            yield tool_head + made.question + tool_tail, solved(made, not mixed or rng.random() < share)


def encoded(tokenizer: PreTrainedTokenizerFast, prompt: str, turns: Turns) -> tuple[list[int], list[float]]:
    """Token ids, and their weights in the loss; each turn is encoded by itself, as in a rollout."""
    pieces = tokenizer([prompt, *(text for text, _ in turns)])["input_ids"]
    weights = [0.05, *(1.0 if own else 0.0 for _, own in turns)]
    ids = [token for piece in pieces for token in piece]
    return ids, [weight for piece, weight in zip(pieces, weights, strict=True) for _ in piece]


def batches(tokenizer: PreTrainedTokenizerFast, rows: int, steps: int, seed: int):
    """Batches of token ids and loss weights, each (rows, T), padded on the right."""
    stream = corpus(tokenizer, int((1 - MIXED_SHARE) * steps) * rows, seed)
    for _ in range(steps):
        made = [encoded(tokenizer, *next(stream)) for _ in range(rows)]
        ids, _ = pad([(tokens, []) for tokens, _ in made])
        weights = torch.zeros_like(ids, dtype=torch.float32)
        for row, (_, values) in enumerate(made):
            weights[row, : len(values)] = torch.tensor(values)
        yield ids, weights


def train_(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: int, rows: int, seed: int) -> None:
    """Train in place; logs the loss every 20 steps."""
    matrices = [weight for _, weight in model.model.layers.named_parameters() if weight.ndim == 2]
    rest = [weight for weight in model.parameters() if not any(weight is matrix for matrix in matrices)]
    muon, adam = Muon(matrices), torch.optim.AdamW(rest, lr=LR_REST, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.monotonic()
    for step, (ids, weights) in enumerate(batches(tokenizer, rows, steps, seed)):
        loss = loss_of(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        scale = min(1.0, (step + 1) / WARMUP_STEPS, max(0.02, (steps - step) / (0.7 * steps)))
        adam.param_groups[0]["lr"] = LR_REST * scale
        muon.step_(LR_MATRICES * scale)
        adam.step()
        adam.zero_grad()
        if (step + 1) % 20 == 0:
            log.info("step %d/%d loss %.4f, %.0f s", step + 1, steps, loss.item(), time.monotonic() - started)


def main() -> None:
    """Train and save."""
    args = begin(__doc__, "tiny_turns", steps=420, rows=48, row="exchanges")
    torch.manual_seed(args.seed)
    model, tokenizer = extended(REPOSITORY / "qerl" / "tiny")
    train_(model, tokenizer, args.steps, args.rows, args.seed)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    shutil.copyfile(REPOSITORY / "LICENSE", args.out / "LICENSE")
    log.info("%s holds the model", args.out)


if __name__ == "__main__":
    main()
