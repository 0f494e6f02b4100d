"""The rollout engine: what training and evaluation ask of whatever samples the completions.

Two engines serve the same interface: `transformers` (generate on the trainer's own modules; any device) and `vllm`
(in process, over the trainer's own tensors; one CUDA device). Neither knows which loss is used, and the trainer does
not know which engine or kernel ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from qerl.errors import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, ConfigError, EngineError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from qerl.engine.update import Update

MIN_TEMPERATURE = 0.01  # below it vLLM 0.25.1 samples at 0.01 and only warns (sampling_params.py line 449)


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 switch the filters off.

    Raises ConfigError for a temperature between 0 and MIN_TEMPERATURE.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()  # beside the checkpoint's own end-of-sequence tokens

    def __post_init__(self) -> None:
        check_temperature(self.temperature, "temperature")


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    `logprobs` holds, for each token of `token_ids`, the natural log of its probability under the distribution it was
    drawn from (after temperature and filters). A greedy completion carries the unfiltered log probability at
    temperature 1. `token_ids` includes the stop token if one was sampled; `finish_reason` "length" means truncated.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


Finished = Callable[[int, Completion], None]  # is told the index of a prompt, and the completion that has ended


class Engine(Protocol):
    """What `qerl.engine.open` returns. Calls come in any order; `sleep` and `wake` bracket the training phase."""

    name: str  # "transformers" or "vllm"
    kernel: str  # what really multiplies the base weights, for the log

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        seed: int | None = None,
        finished: Finished | None = None,
        first_index: int = 0,
    ) -> list[Completion]:
        """Sample one completion for each prompt (token ids), with the adapter and the noise that are set.

        `sampling` is for all prompts, or one for each. The same (prompts, sampling, seed) give the same completions
        where the engine is deterministic. `finished` is called once for each prompt, in the order in which their
        completions end, as soon as the engine knows, and in the caller's thread: the engine waits for it. What it
        raises ends the call and is raised here; the engine can be used further. `first_index` is for several processes
        that share a batch: the place of the first prompt in the whole batch, so that random streams do not depend on
        which process samples a prompt. Raises EngineError if a prompt and its completion cannot fit the context.
        """

    def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        """Log probabilities of given completion tokens at `temperature`, with the adapter and noise that are set."""

    def sync(self, update: Update) -> int:
        """Take over the trainer's adapter or weights, in place; returns the number of tensors that now act.

        Called through `qerl.engine.update.deliver`, which checks that number. Raises EngineError if a tensor finds no
        place or a place gets no tensor, and for weights that the linear's format or the engine's kernel cannot take.
        """

    def set_noise(self, noise: Mapping[str, torch.Tensor] | None) -> int:
        """Add float32 vectors (d,) to the named norms' weights from now on; None restores the clean norms bit-exactly.

        Always relative to the clean norms, never cumulative. Returns the number of norms touched; a name that does
        not exist raises EngineError.
        """

    def sleep(self) -> None:
        """Release what only sampling needs (the KV cache); weights stay."""

    def wake(self) -> None:
        """Take back what `sleep` released."""

    def policy_model(self) -> PreTrainedModel:
        """The transformers model that the trainer attaches its adapter to; its base weights are this engine's own."""

    def close(self) -> None:
        """Free everything but what the caller holds of `policy_model`; further calls raise EngineError."""


def check_temperature(temperature: float, name: str) -> None:
    """Raise ConfigError for one at which vLLM would sample otherwise than told."""
    if 0 < temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"{name} {temperature:g} is below {MIN_TEMPERATURE}, at which vllm samples instead: write 0 (greedy), or "
            f"{MIN_TEMPERATURE} or more"
        )


def each_sampling(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts. Raises EngineError if there are not as many."""
    each = [sampling] * count if isinstance(sampling, SamplingParams) else list(sampling)
    if len(each) != count:
        raise EngineError(f"{len(each)} sampling parameters were given for {count} prompts: give one for all, or each")
    return each


def check_context(prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], context: int) -> None:
    """Raise EngineError if a prompt is empty, or a prompt and its own new tokens are more than `context`."""
    for prompt, new in zip(prompts, max_new_tokens, strict=True):
        if not prompt:
            raise EngineError("a prompt has no tokens: check the prompt template")
        if len(prompt) + new > context:
            raise EngineError(
                "a prompt of %d tokens and %d new ones exceed the engine's context of %d: lower %s or %s",
                *(len(prompt), new, context, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS),
            )


def check_tokens(prompts: Iterable[Sequence[int]], vocabulary: int) -> None:
    """Raise EngineError if the tokenizer has tokens, and a prompt one of them, that the model's embeddings have not."""
    largest = max((max(prompt) for prompt in prompts if prompt), default=0)
    if largest >= vocabulary:
        raise EngineError(
            f"a prompt has token {largest} and the model only those up to {vocabulary - 1}: its tokenizer or chat "
            "template is of another model; copy them from the checkpoint that the weights are from"
        )
