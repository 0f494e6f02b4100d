"""lighteval's model class on our engine. Nothing is cached, as its cache would outlive a change of weights."""

import uuid
from typing import Any

from lighteval.models.abstract_model import LightevalModel, ModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.prompt_manager import PromptManager
from lighteval.tasks.requests import Doc
from lighteval.utils.cache_management import SampleCache

from eval.plan import part_seed
from eval.settings import BATCH_SIZE, MAX_NEW_TOKENS, EvalSettings
from qerl.base.errors import ConfigError
from qerl.checkpoint.load import text_of_engine
from qerl.engine.interface import Engine, SamplingParams


class EngineModel(LightevalModel):
    """See lighteval's LightevalModel; `greedy_until` samples at the settings' temperature."""

    def __init__(self, engine: Engine, tokenizer: Any, settings: EvalSettings, context: int, scratch: str) -> None:
        """`context`: tokens of a prompt and its completion together; `scratch`: folder of lighteval's own files."""
        self.config = ModelConfig(model_name=f"qerl-{uuid.uuid4().hex}", cache_dir=scratch)
        self._engine, self._tokenizer, self._settings, self._context = engine, tokenizer, settings, context
        self._text = text_of_engine(tokenizer, engine)
        self._cache = SampleCache(self.config)
        chat = getattr(tokenizer, "chat_template", None) is not None
        self._prompts = PromptManager(chat, tokenizer, settings.system_prompt or None)
        self._batch = settings.batch_size or BATCH_SIZE[engine.name]

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def add_special_tokens(self) -> bool:
        return False

    @property
    def max_length(self) -> int:
        return self._context

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """One response for each document, with its `num_samples` texts, cut at its stop sequences."""
        prompts = [self._encode(self._prompts.prepare_prompt(doc)) for doc in docs]
        responses = [ModelResponse(input=doc.query, input_tokens=ids) for doc, ids in zip(docs, prompts, strict=True)]
        keys = [(number, self._limit(doc)) for number, doc in enumerate(docs) for _ in range(doc.num_samples)]
        for limit in sorted({limit for _, limit in keys}):
            same = [number for number, own in keys if own == limit]
            for start in range(0, len(same), self._batch):
                self._sample(same[start : start + self._batch], limit, start, docs, prompts, responses)
        return responses

    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """Sum of the logprobs of each choice after the document's prompt, and whether greedy sampling writes it."""
        return [self._score(doc) for doc in docs]

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        raise ConfigError("lighteval's perplexity tasks are not supported: take one that samples or compares choices")

    def _sample(self, numbers: list[int], limit: int, start: int, docs: list[Doc], prompts: list, out: list) -> None:
        settings = self._settings
        longest = max(len(prompts[number]) for number in numbers)
        sampling = SamplingParams(min(limit, self._context - longest), settings.temperature, settings.top_p)
        seed = part_seed(settings.seed, start)
        completions = self._engine.generate([prompts[number] for number in numbers], sampling, seed=seed)
        for number, completion in zip(numbers, completions, strict=True):
            text = self._text(completion.token_ids)
            for stop in docs[number].stop_sequences or ():
                text = text.partition(stop)[0] if stop else text
            out[number].text.append(text)
            out[number].output_tokens.append(completion.token_ids)

    def _score(self, doc: Doc) -> ModelResponse:
        context = self._prompts.prepare_prompt(doc)
        prompt = self._encode(context)
        choices = [self._encode(choice) for choice in doc.choices]
        scores = self._engine.score([prompt] * len(choices), choices)
        sampling = SamplingParams(max(map(len, choices)), 0.0)
        (greedy,) = self._engine.generate([prompt], sampling)
        return ModelResponse(
            input=context,
            input_tokens=prompt,
            output_tokens=choices,
            logprobs=[sum(values) for values in scores],
            argmax_logits_eq_gold=[greedy.token_ids[: len(choice)] == choice for choice in choices],
        )

    def _limit(self, doc: Doc) -> int:
        return self._settings.max_new_tokens or doc.generation_size or MAX_NEW_TOKENS

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
