"""The interface of a rollout engine: what training and evaluation ask of whatever samples completions.

Two engines implement it: `transformers` (runs `generate` on the trainer's own modules, on any device) and `vllm` (in
the trainer's process and on the trainer's own tensors, on one CUDA device). Neither knows which loss is used, and the
trainer does not know which engine or kernel ran. `qerl.engine.open` opens them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from qerl.base.errors import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, ConfigError, EngineError
from qerl.config.names import MIN_TEMPERATURE
from qerl.model.costs import UNRECORDED

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from qerl.engine.update import Update
    from qerl.formats.fp8.kv import KVScales

UNCALIBRATED = "8-bit keys and values have no scales yet: call set_kv_scales() before sampling or scoring"
SEED_STRIDE = 1_000_003  # seeds of neighbouring calls do not meet in calls of fewer prompts than this


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch the filters off.

    Raises ConfigError for a temperature between 0 and MIN_TEMPERATURE.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()  # in addition to the checkpoint's own end-of-sequence tokens

    def __post_init__(self) -> None:
        check_temperature(self.temperature, "temperature")


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    `logprobs` holds, for each token of `token_ids`, the natural log of its probability under the distribution it was
    drawn from (after temperature and filters). A greedy completion carries the unfiltered log probability at
    temperature 1. `token_ids` includes the stop token if one was sampled; `finish_reason` "length" means truncated, and
    "unfinished" that sampling ended before the completion did.

    `experts` is there if the model is a mixture of experts and the engine was opened with `records_experts`: which
    experts it chose for every token that it read, uint8 (tokens, layers, k) on the CPU. The tokens are the prompt's,
    whether they were computed for this request or found in a cache, and all of `token_ids` but the last, which is
    sampled and not read: len(prompt) + len(token_ids) - 1 rows, or one more. The layers are the decoder layers that
    have experts, from first to last, and the k experts of a token are in any order. An entry may be UNRECORDED in all
    its layers. An unfinished completion needs none.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "unfinished"]
    experts: torch.Tensor | None = field(default=None, compare=False, repr=False)


Finished = Callable[[int, Completion], object]  # called with the index of a prompt and its finished completion


@dataclass(frozen=True)
class Request:
    """A completion to sample: number `index` of its source, after the token ids `prompt`.

    `stream` is the number of its random stream, which no other request of the source has. An engine that draws a whole
    batch from one stream takes the first request's `stream`, or its `batch_stream` if that is given.
    """

    index: int
    prompt: Sequence[int]
    sampling: SamplingParams
    stream: int
    batch_stream: int | None = None


class Source:
    """Where an engine's requests come from, and who hears of their completions. An answer may be a next request."""

    def begin(self, wait: bool, together: bool) -> Sequence[Request] | None:
        """The requests that begin now; the engine asks at first and between its steps.

        With `wait` the engine has nothing else to sample: wait until there is a request, and return none if no more
        will come. With `together` the result must not depend on how fast anybody answers: return requests only when
        asked to wait, and then all that may come. None ends the call, and what is still being sampled stays unfinished.
        """
        raise NotImplementedError

    def ended(self, indices: Sequence[int]) -> bool:
        """These completions have their last token. True if `begin` has an answer now, before the others have ended."""
        return False

    def finished(self, index: int, completion: Completion) -> None:
        """A completion that has ended, perhaps a while after `ended` was told of it."""
        raise NotImplementedError


class Prompts(Source):
    """Plain prompts: all of them begin at once, and `completions` has one for each in the end."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        told: Finished | None = None,
        first_stream: int = 0,
    ) -> None:
        self.completions: dict[int, Completion] = {}
        self._told = told
        self._waiting = [
            Request(index, prompt, one, first_stream + index)
            for index, (prompt, one) in enumerate(zip(prompts, sampling, strict=True))
        ]

    def begin(self, wait: bool, together: bool) -> Sequence[Request]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def finished(self, index: int, completion: Completion) -> None:
        self.completions[index] = completion
        if self._told is not None:
            self._told(index, completion)


class Engine(Protocol):
    """What `qerl.engine.open` returns. Calls come in any order; `sleep` and `wake` bracket the training phase."""

    name: str  # "transformers" or "vllm"
    kernel: str  # what multiplies by the base weights, for the log

    def run(self, source: Source, seed: int | None = None) -> dict[int, Completion]:
        """Sample what `source` asks for, with the adapter and the noise that are set; returns what is unfinished.

        Where the engine is deterministic, equal requests and seeds give equal completions. The source is called in the
        caller's thread, and the engine waits for it. If it raises, sampling ends, the exception is raised here, and the
        engine stays usable. Raises EngineError if a prompt and its completion cannot fit the context.
        """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        seed: int | None = None,
        finished: Finished | None = None,
        first_index: int = 0,
    ) -> list[Completion]:
        """Sample one completion for each prompt (token ids); `run` says what holds.

        `sampling` holds for all prompts, or gives one value for each. `finished` is called once for each prompt as soon
        as its completion has ended. `first_index` is for several processes that share a batch: the place of the first
        prompt in the whole batch, so that random streams do not depend on which process samples a prompt.
        """
        source = Prompts(prompts, each_sampling(sampling, len(prompts)), finished, first_index)
        self.run(source, seed)
        return [source.completions[index] for index in range(len(prompts))]

    def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        """Log probabilities of given completions' tokens at `temperature`, with the adapter and noise that are set."""

    def sync(self, update: Update) -> int:
        """Take over the trainer's adapter or weights, in place; returns the number of tensors that now act.

        Called through `qerl.engine.update.deliver`, which checks that number. Raises EngineError if a tensor finds no
        place or a place gets no tensor, and for weights that the linear's format or the engine's kernel cannot take.
        """

    def set_kv_scales(self, scales: Mapping[int, KVScales]) -> int:
        """Divide keys and values of 8 bits by these, per layer, from now on; returns the number of layers.

        Raises EngineError where they are not kept in 8 bits, or cannot change.
        """

    def set_noise(self, noise: Mapping[str, torch.Tensor] | None) -> int:
        """Add float32 vectors (d,) to the named norms' weights from now on; None restores the clean norms bit-exactly.

        Noise is always added to the clean norms and never accumulates. Returns the number of norms that were changed.
        Raises EngineError for a name that does not exist.
        """

    def sleep(self) -> None:
        """Release what only sampling needs (the KV cache). The weights stay."""

    def wake(self) -> None:
        """Take back what `sleep` released. Raises EngineError if the memory for it is gone."""

    def policy_model(self) -> PreTrainedModel:
        """The transformers model to which the trainer attaches its adapter. Its base weights are this engine's own."""

    def close(self) -> None:
        """Free everything except what the caller still holds of `policy_model`. Later calls raise EngineError."""


def request_seed(seed: int | None, stream: int) -> int | None:
    """The seed of a random stream in a call whose seed is `seed`; None for a call without one."""
    return None if seed is None else (seed * SEED_STRIDE + stream) % 2**63


def check_temperature(temperature: float, name: str) -> None:
    """Raise ConfigError for a temperature that vLLM would silently replace. `name` is what the error calls it."""
    if 0 < temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"{name} {temperature:g} is below {MIN_TEMPERATURE}, at which vllm samples instead: write 0 (greedy), or "
            f"{MIN_TEMPERATURE} or more"
        )


def each_sampling(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts. Raises EngineError if a sequence has another length."""
    each = [sampling] * count if isinstance(sampling, SamplingParams) else list(sampling)
    if len(each) != count:
        raise EngineError(f"{len(each)} sampling parameters were given for {count} prompts: give one for all, or each")
    return each


def check_requests(requests: Sequence[Request], context: int, vocabulary: int) -> None:
    """Raise EngineError for an empty prompt, one that exceeds `context` with its completion, or an unknown token."""
    check_context([one.prompt for one in requests], [one.sampling.max_new_tokens for one in requests], context)
    check_tokens((one.prompt for one in requests), vocabulary)


def check_context(prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], context: int) -> None:
    """Raise EngineError if a prompt is empty, or if it and its own `max_new_tokens` exceed `context` tokens."""
    for prompt, new in zip(prompts, max_new_tokens, strict=True):
        if not prompt:
            raise EngineError("a prompt has no tokens: check the prompt template")
        if len(prompt) + new > context:
            raise EngineError(
                "a prompt of %d tokens and %d new ones exceed the engine's context of %d: lower %s or %s",
                *(len(prompt), new, context, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS),
            )


def check_tokens(prompts: Iterable[Sequence[int]], vocabulary: int) -> None:
    """Raise EngineError if a prompt has a token for which the model has no embedding: its tokenizer is another's."""
    largest = max((max(prompt) for prompt in prompts if prompt), default=0)
    if largest >= vocabulary:
        raise EngineError(
            f"a prompt has token {largest} and the model only those up to {vocabulary - 1}: its tokenizer or chat "
            "template is of another model; copy them from the checkpoint that the weights are from"
        )


def extended(earlier: torch.Tensor | None, later: torch.Tensor | None) -> torch.Tensor | None:
    """The experts chosen for a text: for its beginning the `earlier` choices, and for the rest the `later` ones."""
    if earlier is None or later is None:
        return later
    import torch

    return torch.cat([earlier, later[len(earlier) :]])


def joined(begun: Completion, rest: Completion) -> Completion:
    """A completion of two parts."""
    return Completion(
        begun.token_ids + rest.token_ids,
        begun.logprobs + rest.logprobs,
        rest.finish_reason,
        extended(begun.experts, rest.experts),
    )


def of_length(ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """The experts chosen for so many tokens: what is missing at the end is UNRECORDED."""
    import torch

    missing = ids.new_full((max(0, tokens - len(ids)), *ids.shape[1:]), UNRECORDED)
    return torch.cat([ids, missing])[:tokens]
