"""A run of seconds on given conversations and a random base, which the tests of supervised fine-tuning share."""

import json

from qerl.config.recipe import load_recipe

TALKS = [
    [
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
        {"role": "user", "content": "And twice that?"},
        {"role": "assistant", "content": f"2 * {a + b} = {2 * (a + b)}" + "." * (a % 3)},
    ][: 4 if b % 2 else 2]
    for a, b in ((3, 4), (5, 9), (12, 7), (8, 8), (20, 1), (6, 6), (2, 3), (15, 4))
]
SETTINGS = (
    "data.task=own", "data.limit=null", "sft.rows_per_step=4", "run.micro_batch_tokens=64", "run.save_every=2",
    "optim.warmup_ratio=0", "validation.every=null",
)  # fmt: skip


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small_sft(base, folder, *overrides, steps=4, out="run", rows=None):
    """A smaller version of the recipe sft_tiny on `base`, whose rows it writes into `folder`."""
    rows = [{"messages": talk} for talk in TALKS] if rows is None else rows
    source = write_rows(folder / "messages.jsonl", rows)
    settings = (*SETTINGS, f"data.source={source}", *overrides)
    return load_recipe("sft_tiny", settings, base=str(base), steps=steps, out=str(folder / out))
