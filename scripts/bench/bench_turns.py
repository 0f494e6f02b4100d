#!/usr/bin/env python3
"""What turns cost: episodes of several turns beside the same tokens sampled in one; writes JSON for benchmarks/.

    python3 scripts/bench/bench_turns.py --model checkpoints/random-7b-NVFP4A16 --out benchmarks/turns-7b.json

Every episode samples `--tokens` tokens in `--turns` turns, between which an environment says `--said` tokens after
`--delay` seconds. With the prefix cache only what it said is computed anew. The ratio is the median of the seconds of
episodes by that of single turns, measured in pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qerl.engine.interface import Request, SamplingParams, Source

FIRST_TOKEN, TOKENS = 1000, 50_000  # prompts and observations are drawn from these


class FixedTurns(Source):
    """Conversations whose turns have a fixed number of tokens, all of them sampled."""

    def __init__(self, prompts: list[list[int]], turns: int, tokens: int, said: int, delay_s: float) -> None:
        self._prompts = [list(prompt) for prompt in prompts]
        self._sampling = SamplingParams(tokens // turns)
        self._left, self._said, self._delay_s = [turns] * len(prompts), said, delay_s
        self._ready = [(0.0, index) for index in range(len(prompts))]
        self.sampled = 0

    def begin(self, wait: bool, together: bool) -> list[Request]:
        if together and not wait:
            return []
        if wait and self._ready:
            latest = max(self._ready) if together else min(self._ready)
            time.sleep(max(0.0, latest[0] - time.monotonic()))
        now = time.monotonic()
        due = [index for at, index in self._ready if at <= now]
        self._ready = [(at, index) for at, index in self._ready if at > now]
        count = len(self._prompts)
        return [Request(i, self._prompts[i], self._sampling, self._left[i] * count + i) for i in sorted(due)]

    def finished(self, index: int, completion) -> None:
        self.sampled += len(completion.token_ids)
        self._left[index] -= 1
        if self._left[index]:
            said = drawn(self._said, index * 1000 + self._left[index])
            self._prompts[index] = [*self._prompts[index], *completion.token_ids, *said]
            self._ready.append((time.monotonic() + self._delay_s, index))


def drawn(count: int, seed: int) -> list[int]:
    """Token ids that look like no others."""
    return [FIRST_TOKEN + (seed * 7919 + place * 104_729) % TOKENS for place in range(count)]


def measure(engine, arguments: argparse.Namespace, turns: int, repeat: int) -> dict[str, float]:
    """Seconds and tokens of one rollout. Prompts are others in each repeat, so that no cache holds them."""
    first = (turns * 100 + repeat) * 10_000
    prompts = [drawn(arguments.prompt, first + index // arguments.group) for index in range(arguments.sequences)]
    said, delay_s = (arguments.said, arguments.delay) if turns > 1 else (0, 0.0)
    conversations = FixedTurns(prompts, turns, arguments.tokens, said, delay_s)
    started = time.perf_counter()
    engine.run(conversations, seed=repeat)
    return {"seconds": time.perf_counter() - started, "tokens": conversations.sampled}


def summary(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """Medians of (single turn, episodes), and their ratio; per token, should a random model end a turn early."""
    single, several = ([each["seconds"] / each["tokens"] for each in side] for side in zip(*pairs, strict=True))
    return {
        "single_s_per_token": statistics.median(single),
        "turns_s_per_token": statistics.median(several),
        "ratio": statistics.median(several) / statistics.median(single),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--group", type=int, default=8, help="episodes of one prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens that the model samples in an episode")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--said", type=int, default=32, help="tokens that the environment says between two turns")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that it takes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from scripts.bench.provenance import command, machine, require_card

    require_card("vllm")
    from qerl.checkpoint.folder import format_of
    from qerl.engine.options import EngineOptions
    from qerl.engine.vllm.engine import VLLMEngine

    context = arguments.prompt + arguments.tokens + arguments.turns * arguments.said
    options = EngineOptions(max_context=context, max_rank=arguments.rank, max_sequences=arguments.sequences)
    engine = VLLMEngine(arguments.model, format_of(Path(arguments.model)).name, options)
    measure(engine, arguments, 1, 0)  # warm
    head = {"command": command(), **machine(), "sequences": arguments.sequences, "turns": arguments.turns}
    pairs = []
    for repeat in range(1, arguments.repeats + 1):
        pairs.append((measure(engine, arguments, 1, repeat), measure(engine, arguments, arguments.turns, repeat)))
        report = {**head, "pairs": pairs, **summary(pairs)}
        if arguments.out:  # after each, in case that this is cut off
            arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{arguments.turns} turns take {report['ratio']:.3f} times the seconds per token of one")


if __name__ == "__main__":
    main()
