"""How the transformers engine samples: the filters, the logprobs that it records, and where a row ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from transformers import LogitsProcessor
from transformers.generation import (
    MinPLogitsWarper,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qerl.engine.interface import SamplingParams
from qerl.errors import EngineError


class OwnLimits(StoppingCriteria):
    """Ends each row after its own number of new tokens."""

    def __init__(self, prompt_width: int, limits: Sequence[int]) -> None:
        self._lengths = prompt_width + torch.tensor(limits)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self._lengths = self._lengths.to(input_ids.device)
        return input_ids.shape[1] >= self._lengths


class Ended(StoppingCriteria):
    """Says which rows have ended, after each token, and ends all of them if the answer is True."""

    def __init__(
        self, prompt_width: int, limits: Sequence[int], stop: Collection[int], told: Callable[[list[int]], bool]
    ) -> None:
        self.rows: set[int] = set()
        self._lengths = [prompt_width + limit for limit in limits]
        self._stop, self._told = frozenset(stop), told

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        width, last = input_ids.shape[1], input_ids[:, -1].tolist()
        new = [
            row
            for row, token in enumerate(last)
            if row not in self.rows and (token in self._stop or width >= self._lengths[row])
        ]
        self.rows.update(new)
        over = bool(new) and self._told(new)
        return torch.full((len(last),), over, device=input_ids.device)


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
    """Temperature and filters, in the order of transformers (vLLM applies min_p before top_k and top_p)."""
    if sampling.temperature <= 0:
        return []
    found: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k > 0:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found
