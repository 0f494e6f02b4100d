"""Before the first step: whether the adapter acts in the engine as it does in the trainer.

An adapter starts with B = 0 in most runs. Engine and trainer then agree at the first step even if the engine does not
read its adapter at all, and `MismatchGate` would let a run begin whose engine samples from the base for ever. So each B
gets a small random draw, the engine samples a few completions with it, and the trainer scores their tokens with the
draw and without. Then each B is exactly zero again.

1. The draw depends on the run's seed alone, and no random stream of the run is touched. Its size is adapted until it
   moves the trainer's logprobs clearly. So a run has the same numbers as without the trial.
2. There is no noise and no dropout, so that runs are judged here whose first step cannot be.
3. Trained norms stay as they are. An adapter that starts elsewhere than at B = 0 needs no trial: the first step is one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import TYPE_CHECKING

import torch

from qerl.base.philox import derive_seed
from qerl.engine.interface import Completion, SamplingParams
from qerl.engine.update import AdapterUpdate, deliver
from training.loss.batch import experts_of_rows, padded_left, padded_right
from training.loss.gates import MismatchGate, Trial

if TYPE_CHECKING:
    from training.parts import Parts
    from training.policy.policy import Policy

COMPLETIONS, NEW_TOKENS = 4, 16
SIZE = 0.1  # of the first draw: about its share of a linear's output, if A is fresh
LEAST, WANTED, MOST = 0.05, 0.15, 0.3  # nats per token by which a draw moves the trainer's logprobs
LARGEST_CHANGE = 8.0  # of the size from one draw to the next
DRAWS = 5

logger = logging.getLogger(__name__)


def try_adapter(parts: Parts, gate: MismatchGate) -> None:
    """Compare engine and trainer under a trial draw of an adapter that starts at B = 0; others are left alone.

    Raises EngineError, on all ranks, if the engine of one does not change as its trainer does, or disagrees with it by
    more than the gate allows.
    """
    factors = zero_factors(parts.policy)
    if gate.passed or not factors:
        return
    started = time.perf_counter()
    parts.log.phase("rollout")
    parts.sampler.sync(0)  # calibrates 8-bit keys and values, as the first step would
    trial = _sized_trial(parts, factors)
    parts.sampler.sync(0)
    for of_rank in parts.parallel.gather(trial):
        gate.check_trial(of_rank)
    logger.info(
        "trial adapter: it moves logprobs by %.2g nats per token, of which the engine has %.0f%%; mismatch_kl %.1e "
        "(%.1f s)",
        *(trial.moved, 100 * trial.share, trial.mean_kl, time.perf_counter() - started),
    )


def zero_factors(policy: Policy) -> list[torch.Tensor]:
    """Each B of the adapter in the engine, if all are zero; empty for another start, and for weights that train."""
    update = policy.update()
    if not isinstance(update, AdapterUpdate):
        return []
    factors = [tensor for name, tensor in update.tensors.items() if name.endswith(".lora_B.weight")]
    return [] if any(bool(factor.any()) for factor in factors) else factors


@contextmanager
def drawn_(factors: Sequence[torch.Tensor], seed: int, size: float) -> Iterator[None]:
    """Within it each B (..., rank) is normal with standard deviation size / sqrt(rank); afterwards it is zero."""
    try:
        with torch.no_grad():
            for place, factor in enumerate(factors):
                generator = torch.Generator(factor.device).manual_seed(derive_seed(seed, place, "trial adapter"))
                noise = torch.randn(factor.shape, generator=generator, device=factor.device)
                factor.copy_(noise.mul_(size / factor.shape[-1] ** 0.5))
        yield
    finally:
        with torch.no_grad():
            for factor in factors:
                factor.zero_()


def _sized_trial(parts: Parts, factors: Sequence[torch.Tensor]) -> Trial:
    """The trial whose draw moves the trainer's logprobs by LEAST to MOST, or the last of DRAWS."""
    size = SIZE / parts.policy.update().scaling
    for _ in range(DRAWS):
        trial = trial_of(parts, factors, size)
        if LEAST <= trial.moved <= MOST:
            break
        change = WANTED / max(trial.moved, 1e-9) if trial.moved == trial.moved else 0.0  # NaN: far too large
        size *= min(max(change, 1 / LARGEST_CHANGE), LARGEST_CHANGE)
    return trial


def trial_of(parts: Parts, factors: Sequence[torch.Tensor], size: float) -> Trial:
    config = parts.config
    sampling = SamplingParams(min(NEW_TOKENS, config.rollout.max_new_tokens), config.rollout.temperature)
    shortest = sorted((prompt.ids for prompt in parts.prompts), key=len)[:COMPLETIONS]
    prompts = list(islice(cycle(shortest), COMPLETIONS))
    with drawn_(factors, config.run.seed, size):
        with parts.sampler.clean_engine() as engine:
            deliver(parts.policy.update(), engine)
            completions = engine.generate(prompts, sampling, derive_seed(config.run.seed, 0, "trial"))
        drawn = _scored(parts, prompts, completions)
    zero = _scored(parts, prompts, completions)
    own = [torch.tensor(one.logprobs, dtype=torch.float64) for one in completions]
    return Trial(torch.cat(own), drawn, zero)


def _scored(parts: Parts, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> torch.Tensor:
    """The trainer's logprobs of the completions' tokens, float64 (M,) on the CPU."""
    asked = [torch.tensor(ids) for ids in prompts]
    answers = [torch.tensor(one.token_ids) for one in completions]
    ids = [padded_left(asked, parts.tokenizer.pad_token_id), padded_right(answers, parts.tokenizer.pad_token_id)]
    mask = padded_right([torch.ones_like(answer) for answer in answers], 0)
    masks = [padded_left([torch.ones_like(prompt) for prompt in asked], 0), mask]
    experts = experts_of_rows(completions, [len(p) + len(c) for p, c in zip(asked, answers, strict=True)])
    scored = parts.packed.score(torch.cat(ids, 1), torch.cat(masks, 1), mask, experts)
    return scored.cpu().double()[mask.bool()]
