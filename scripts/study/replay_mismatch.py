"""How far the sampler is from the policy with and without the experts that it chose, on a CPU.

    python scripts/study/replay_mismatch.py benchmarks/experts/replay-cpu.json     # 2 minutes on one core

On a CPU sampler and trainer are the same modules in float32, and without a difference in rounding there is nothing to
replay. So the ways differ in what samples:

    float32    what trains
    bfloat16   the sampler multiplies in bfloat16, the trainer in float32
    both       both multiply in bfloat16: a token at a time with a cache, and whole texts
    noise      as float32, with noise of 1e-2 in the sampler's norms

`mismatch_kl` is that of a run, in nats per token; `changed` is the share of a layer's choices for a token that the
trainer would have made otherwise. Models are tiny_experts on arithmetic, and random weights with 16 and 128 experts on
random tokens.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from make_random_checkpoint import write

from qerl.checkpoint.load import load_tokenizer
from qerl.config.recipe import load_recipe
from qerl.data.tasks import get_task
from qerl.engine.interface import Completion, Engine, SamplingParams, of_length
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.model.norms import block_norms
from qerl.model.packing import PackedRow, pack
from qerl.plan.micro_batch_plan import MicroBatchPlan
from quantize.run import quantize_checkpoint
from training.loss.correction import Mismatch
from training.policy.packed_policy import PackedPolicy
from training.run_dir.inputs import versions

WAYS = {"float32": "float32", "bfloat16": "float32", "both": "bfloat16", "noise": "float32"}  # what the trainer is in
SIGMA = 1e-2
SEEDS, PROMPTS, GROUP, NEW_TOKENS, PROMPT_TOKENS = (0, 1, 2), 16, 4, 48, 24
RANDOM = {"16 experts, 4 chosen, random weights": "small-qwen3-moe", "128, 8 chosen, random": "small-qwen3-moe-128"}


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for title, base, prompts in models(Path(folder)):
            for way, seed in ((way, seed) for way in WAYS for seed in SEEDS):
                rows.append({"model": title, "way": way, "seed": seed, **measured(base, prompts, way, seed)})
                print(rows[-1], flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def models(folder: Path):
    """(title, folder, prompts) of each packed model."""
    quantize_checkpoint("tiny_experts", folder / "tiny")
    tokenizer, rows = load_tokenizer(folder / "tiny"), islice(get_task("arith").generate("train"), PROMPTS)
    asked = [[{"role": "user", "content": row["question"]}] for row in rows]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in asked]
    yield "tiny_experts: 8 experts, 2 chosen", folder / "tiny", prompts
    generator = torch.Generator().manual_seed(0)
    for title, shape in RANDOM.items():
        write(shape, folder / shape)
        yield title, folder / shape, torch.randint(2, 1000, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()


def measured(base: Path, prompts: list[list[int]], way: str, seed: int) -> dict[str, float]:
    """The mismatch with and without replay, and the share of choices that differ."""
    options = EngineOptions(engine="transformers", dtype=WAYS[way], records_experts=True)
    engine = open_engine(str(base), "nvfp4", options)
    asked = [prompt for prompt in prompts for _ in range(GROUP)]
    completions = sampled(engine, asked, way, seed)
    policy = PackedPolicy(engine.policy_model(), 1.0, MicroBatchPlan(2**20, 0, 0))
    values = {}
    for name, replays in (("with_replay", True), ("without_replay", False)):
        row, logprobs_B_T, mask_B_T = packed(asked, completions, replays)
        mismatch = Mismatch()
        with torch.no_grad():
            own = policy.logprobs(row, tuple(mask_B_T.shape))[0]
        mismatch.add(own, logprobs_B_T, mask_B_T, load_recipe("tiny_moe").loss.correction)
        values[name] = mismatch.mean_kl
        if replays:
            values["changed"] = float(row.replay.changed.sum()) / row.replay.choices
    return values


def sampled(engine: Engine, prompts: list[list[int]], way: str, seed: int) -> list[Completion]:
    norms, generator = block_norms(engine.policy_model()), torch.Generator().manual_seed(seed)
    if way == "noise":
        drawn = {name: torch.randn(norm.weight.shape, generator=generator) for name, norm in norms.items()}
        engine.set_noise({name: SIGMA * values for name, values in drawn.items()})
    with torch.autocast("cpu", torch.bfloat16) if way == "bfloat16" else nullcontext():
        completions = engine.generate(prompts, SamplingParams(NEW_TOKENS), seed=seed)
    engine.set_noise(None)
    return completions


def packed(
    prompts: list[list[int]], completions: list[Completion], replays: bool
) -> tuple[PackedRow, torch.Tensor, torch.Tensor]:
    """All rows as one, the sampler's logprobs (B, T) and the mask of the completions (B, T)."""
    before, after = max(map(len, prompts)), max(len(one.token_ids) for one in completions)
    ids = torch.zeros(len(prompts), before + after, dtype=torch.long)
    attention, logprobs_B_T = torch.zeros_like(ids), torch.zeros(len(prompts), after)
    for row, (prompt, one) in enumerate(zip(prompts, completions, strict=True)):
        place = slice(before - len(prompt), before + len(one.token_ids))
        ids[row, place] = torch.tensor([*prompt, *one.token_ids])
        attention[row, place] = 1
        logprobs_B_T[row, : len(one.token_ids)] = torch.tensor(one.logprobs)
    rows = zip(prompts, completions, strict=True)
    experts = [of_length(one.experts, len(prompt) + len(one.token_ids)) for prompt, one in rows]
    mask_B_T = attention[:, before:]
    return pack(ids, attention, after, loss_mask=mask_B_T, experts=experts if replays else None), logprobs_B_T, mask_B_T


if __name__ == "__main__":
    main()
