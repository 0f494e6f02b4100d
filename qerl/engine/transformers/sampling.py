"""How the transformers engine samples: rows of a batch, filters, logprobs, the end of a row, seeds, experts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from transformers import LogitsProcessor
from transformers.generation import StoppingCriteria, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from qerl.base.errors import EngineError
from qerl.engine.interface import SamplingParams

if TYPE_CHECKING:
    from qerl.model.experts import ExpertBlock


class Ended(StoppingCriteria):
    """Ends each row after its own number of new tokens, says which rows have ended, and ends all if told to.

    `rows` has the length and the reason of each row that has ended.
    """

    def __init__(
        self, prompt_width: int, limits: Sequence[int], stop: Collection[int], told: Callable[[list[int]], bool]
    ) -> None:
        self.rows: dict[int, tuple[int, Literal["stop", "length"]]] = {}
        self._width, self._limits, self._stop, self._told = prompt_width, limits, frozenset(stop), told

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        length = input_ids.shape[1] - self._width
        new: dict[int, tuple[int, Literal["stop", "length"]]] = {}
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if row not in self.rows and (token in self._stop or length >= self._limits[row]):
                new[row] = (length, "stop" if token in self._stop else "length")
        self.rows |= new
        over = bool(new) and self._told([*new])
        return torch.tensor([over or row in self.rows for row in range(len(input_ids))], device=input_ids.device)


class LogprobRecorder(LogitsProcessor):
    """The last of the logits processors: records, step by step, the scores from which each token is drawn."""

    def __init__(self, prompt_width: int) -> None:
        self._prompt_width = prompt_width
        self._scores: torch.Tensor | None = None
        self._chosen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > self._prompt_width:
            self._take(input_ids[:, -1])
        if not scores.amax(-1).isfinite().all():
            raise EngineError(
                "the model gave a token a logit that is not finite: weights, adapter or noise hold inf or nan"
            )
        self._scores = torch.log_softmax(scores.float(), dim=-1)
        return scores

    def logprobs(self, new_tokens: torch.Tensor) -> torch.Tensor:
        """Logprobs (rows, tokens) of `new_tokens`, of which the last column was drawn after the last call."""
        if new_tokens.shape[1] > len(self._chosen):
            self._take(new_tokens[:, -1])
        return torch.stack(self._chosen[: new_tokens.shape[1]], dim=1)

    def _take(self, tokens: torch.Tensor) -> None:
        self._chosen.append(self._scores.gather(1, tokens[:, None])[:, 0])


def filters(sampling: SamplingParams) -> list[LogitsProcessor]:
    """Temperature and filters, in the order of transformers."""
    if sampling.temperature <= 0:
        return []
    found: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k > 0:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    return found


def batches(each: Sequence[SamplingParams], size: int) -> Iterator[list[int]]:
    """Rows that are sampled together, at most `size`: their parameters differ only in the number of new tokens."""
    alike: dict[SamplingParams, list[int]] = {}
    for row, one in enumerate(each):
        alike.setdefault(replace(one, max_new_tokens=1), []).append(row)
    for rows in alike.values():
        yield from (rows[start : start + size] for start in range(0, len(rows), size))


def pad_left(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, width) token ids and attention mask, int64, padded on the left."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = torch.tensor(row)
        mask[index, width - len(row) :] = 1
    return ids.to(device), mask.to(device)


@contextmanager
def forked_rng(device: torch.device, seed: int | None) -> Iterator[None]:
    """Sample from `seed` and leave the global generators as they were; None samples from the global ones."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def blocks_of(model: nn.Module) -> list[ExpertBlock]:
    """The blocks of experts in a model, from the first layer to the last; none in a dense model."""
    return [module for module in model.modules() if getattr(module, "replays", False)]


@contextmanager
def recorded_experts(model: nn.Module, wanted: bool) -> Iterator[Callable[[int, int, int], torch.Tensor | None]]:
    """Let the model's blocks of experts record what they choose within it, if that is `wanted`.

    Rows padded on the left are sampled, a token at a time. The function that it gives returns what row `row` chose from
    place `first` of the padded row to before `past`; None without experts.
    """
    blocks = blocks_of(model) if wanted else []
    for block in blocks:
        block.recorded = []

    def chosen(row: int, first: int, past: int) -> torch.Tensor | None:
        each = [torch.cat([ids[row] for ids in block.recorded])[first:past] for block in blocks]
        return torch.stack(each, 1).cpu() if each else None

    try:
        yield chosen
    finally:
        for block in blocks:
            block.recorded = None
