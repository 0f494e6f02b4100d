"""Greedy tokens of a model on a CPU: by the transformers engine, and by transformers alone."""

import torch

from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.resolve import resolve_model
from qerl.data.examples import load_examples
from qerl.data.tasks import build_messages, get_task, render_prompt
from qerl.engine.interface import SamplingParams
from qerl.engine.open import open_model
from qerl.engine.options import EngineOptions

NEW_TOKENS = 24


def arith_prompts(model, count):
    """The first test problems as the tokens of `model`'s tokenizer."""
    tokenizer, task = load_tokenizer(model), get_task("arith")
    examples, _ = load_examples("arith", split="test", limit=count)
    return [render_prompt(tokenizer, build_messages(task, example.question)) for example in examples]


def engine_tokens(model, prompts):
    """Tokens of the engine for what `model` names: a run, an adapter with its base, or a model."""
    engine = open_model(resolve_model(str(model)), EngineOptions(engine="transformers", device="cpu"))
    greedy = SamplingParams(NEW_TOKENS, temperature=0.0)
    return [completion.token_ids for completion in engine.generate(prompts, greedy)]


def library_tokens(model, prompts):
    """Tokens of transformers' own generate, one prompt at a time."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


def same(one, other):
    """How many completions are equal."""
    return sum(a == b for a, b in zip(one, other, strict=True))
