"""The rollout engine on transformers' `generate`, which runs the trainer's own modules on any device.

The adapter and the noise act on the very modules that are trained, so nothing has to be copied: `sync` checks that the
factors it is given are the model's own (in evaluation it attaches them). Whole weights are packed into those modules.
Logprobs are recorded during sampling, from the scores that each token was drawn from.

Keys and values in 8 bits are rounded before each product of attention, including earlier tokens', since
transformers' cache holds them as they were computed. A cache in 8 bits returns the same, because rounding a second time
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, GenerationConfig, LogitsProcessorList
from transformers.generation import StoppingCriteriaList
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from qerl import formats
from qerl.base.errors import EngineError
from qerl.checkpoint.activations import check_placed, check_served, read_activations
from qerl.checkpoint.adapter import adapter_tensors, attach_saved_, load_start_, load_tensors_, set_scaling_
from qerl.checkpoint.load import end_token_ids, load_model, load_tokenizer, local_folder
from qerl.engine.interface import (
    UNCALIBRATED,
    Completion,
    Engine,
    Request,
    SamplingParams,
    Source,
    check_requests,
    joined,
    request_seed,
)
from qerl.engine.transformers.sampling import (
    Ended,
    LogprobRecorder,
    batches,
    filters,
    forked_rng,
    pad_left,
    recorded_experts,
)
from qerl.engine.update import BESIDE_A_START, AdapterUpdate, Update, write_update_
from qerl.formats.linear import PackedLinear, cached_weights
from qerl.model.lora import lora_linear, parts_of
from qerl.model.master import serving
from qerl.model.norms import noise_norms, set_norm_noise_
from qerl.model.packed_attention import attending_by, rounded_kv, set_kv_scales_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qerl.engine.options import EngineOptions
    from qerl.formats.fp8.kv import KVScales
    from qerl.formats.nvfp4.activations import Activations


SCORED_TOKENS = 4096  # per forward pass of `score`: their float32 logits take 2.3 GiB at a vocabulary of 152k


class TransformersEngine(Engine):
    """See `qerl.engine.interface.Engine`."""

    name = "transformers"

    def __init__(self, base: str, format: str, options: EngineOptions) -> None:
        """Open the weights at `base`."""
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        trust = options.trust_remote_code
        self._model: PreTrainedModel | None = load_model(base, format, options.dtype, device, trust)
        self._tokenizer = load_tokenizer(base, trust)
        folder = local_folder(base, trust)
        rounded = _check_activations(self._model, read_activations(folder, formats.get(format)))
        self._has_start = options.start is not None
        if options.start is not None:
            load_start_(self._model, options.start)
        self.end_token_ids = end_token_ids(folder, self._model.config.get_text_config(), self._tokenizer)
        # transformers takes fields that a call leaves out from the checkpoint's generation config, which would bias the
        # policy (Qwen2.5 ships a repetition penalty of 1.05). Of that config only the end tokens are kept.
        pad_id = self._tokenizer.pad_token_id
        self._model.generation_config = GenerationConfig(eos_token_id=list(self.end_token_ids), pad_token_id=pad_id)
        self._batch_size, self._records_experts = options.batch_size, options.records_experts
        if options.kv_cache_dtype not in ("auto", "fp8"):
            raise EngineError(
                "the transformers engine rounds keys and values by scales that a run calibrates, and no others: write "
                "rollout.kv_cache_dtype: fp8, or auto"
            )
        self._kv_in_8_bits = self._uncalibrated = options.kv_cache_dtype == "fp8"
        self._noisy = False
        packed = any(isinstance(module, PackedLinear) for module in self._model.modules())
        self.kernel = f"{'unpack + ' if packed else ''}torch {self._model.dtype} on {self._model.device}{rounded}"

    def policy_model(self) -> PreTrainedModel:
        return self._open()

    def run(self, source: Source, seed: int | None = None) -> dict[int, Completion]:
        """Requests are sampled in waves: one ends when others may begin, and what it leaves goes on in the next one.

        All requests of a wave draw from one random stream. What else is in it must not depend on anybody's speed.
        """
        model = self._open()
        context, vocabulary = model.config.get_text_config().max_position_embeddings, model.get_input_embeddings()
        running: dict[int, Request] = {}
        unfinished: dict[int, Completion] = {}
        while (new := source.begin(wait=not running, together=True)) is not None and (running or new):
            check_requests(new, context, vocabulary.weight.shape[0])
            running |= {request.index: request for request in new}
            unfinished |= {request.index: Completion([], [], "unfinished") for request in new}
            with self._sampling(model), forked_rng(model.device, _wave_seed(new, seed)):
                self._wave(source, running, unfinished)
        return unfinished

    def _wave(self, source: Source, running: dict[int, Request], unfinished: dict[int, Completion]) -> None:
        """Sample `running` in batches until `source` has an answer for `begin`; only what is unfinished stays."""
        requests = [_continued(request, unfinished[index]) for index, request in running.items()]
        over = False

        def told(ended: list[int]) -> bool:
            nonlocal over
            over = source.ended(ended)
            return over

        for rows in batches([one.sampling for one in requests], self._batch_size or len(requests)):
            batch = [requests[row] for row in rows]
            done = self.generate_batch(batch, lambda ended, batch=batch: told([batch[row].index for row in ended]))
            for request, part in sorted(zip(batch, done, strict=True), key=lambda pair: len(pair[1].token_ids)):
                whole = unfinished[request.index] = joined(unfinished[request.index], part)
                if whole.finish_reason != "unfinished":
                    del running[request.index], unfinished[request.index]
                    source.finished(request.index, whole)
            if over:
                return

    def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        model = self._open()
        longest = max((len(p) + len(c) for p, c in zip(prompts, completions, strict=True)), default=1)
        step = max(1, SCORED_TOKENS // longest)
        scores: list[list[float]] = []
        with self._sampling(model):
            for start in range(0, len(prompts), step):
                rows = list(zip(prompts[start : start + step], completions[start : start + step], strict=True))
                scores += self._score_batch(rows, temperature)
        return scores

    def sync(self, update: Update) -> int:
        model = self._open()
        if isinstance(update, AdapterUpdate):
            return _take_adapter_(model, update)
        if self._has_start:
            raise EngineError(BESIDE_A_START)
        return write_update_(model, update)

    def set_kv_scales(self, scales: Mapping[int, KVScales]) -> int:
        if not self._kv_in_8_bits:
            raise EngineError("this engine keeps keys and values in the model's dtype: open it with kv_cache_dtype fp8")
        count = set_kv_scales_(self._open(), scales)
        self._uncalibrated = False
        return count

    def set_noise(self, noise: Mapping[str, torch.Tensor] | None) -> int:
        model = self._open()
        if noise is None and not self._noisy:  # a run without noise needs no norms, and the model may have none
            return 0
        self._noisy = noise is not None
        return set_norm_noise_(noise_norms(model), noise)

    def sleep(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Nothing was released: the cache exists only inside `generate`."""

    def close(self) -> None:
        self._model = None
        self.sleep()

    def _open(self) -> PreTrainedModel:
        if self._model is None:
            raise EngineError("this engine was closed: open a new one")
        return self._model

    @contextmanager
    def _sampling(self, model: PreTrainedModel) -> Iterator[None]:
        if self._uncalibrated:
            raise EngineError(UNCALIBRATED)
        with _sampling_mode(model), kv_in_8_bits(model) if self._kv_in_8_bits else nullcontext():
            yield

    def generate_batch(self, requests: Sequence[Request], told: Callable[[list[int]], bool]) -> list[Completion]:
        """Sample requests whose parameters differ only in `max_new_tokens`.

        `told` is called with the rows that have ended, after each token, and ends the others if it returns True.
        """
        model, sampling = self._open(), requests[0].sampling
        stop = tuple(dict.fromkeys([*self.end_token_ids, *sampling.stop_token_ids]))
        prompts, limits = zip(*((one.prompt, one.sampling.max_new_tokens) for one in requests), strict=True)
        input_ids, attention_mask = pad_left(prompts, self._tokenizer.pad_token_id, model.device)
        width = input_ids.shape[1]
        recorder, ended = LogprobRecorder(width), Ended(width, limits, stop, told)
        with recorded_experts(model, self._records_experts) as experts:
            sequences = model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=self._generation_config(sampling, stop, max(limits)),
                logits_processor=LogitsProcessorList([*filters(sampling), recorder]),
                stopping_criteria=StoppingCriteriaList([ended]),
            )
            new_tokens = sequences[:, width:]
            found = zip(new_tokens.tolist(), recorder.logprobs(new_tokens).tolist(), strict=True)
            done = []
            for row, (tokens, logprobs) in enumerate(found):
                length, reason = ended.rows.get(row, (len(tokens), "unfinished"))
                chosen = experts(row, width - len(prompts[row]), width + length - 1)
                done.append(Completion(tokens[:length], logprobs[:length], reason, chosen))
        return done

    def _generation_config(
        self, sampling: SamplingParams, stop: tuple[int, ...], max_new_tokens: int
    ) -> GenerationConfig:
        # Filters are our own processors (`filters`), so those that transformers would add by default are switched off.
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=sampling.temperature > 0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            eos_token_id=list(stop),
            pad_token_id=self._tokenizer.pad_token_id,
            use_cache=True,
            disable_compile=True,
        )

    def _score_batch(self, rows: list[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[list[float]]:
        model = self._open()
        joined = [[*prompt, *completion] for prompt, completion in rows]
        input_ids, attention_mask = pad_left(joined, self._tokenizer.pad_token_id, model.device)
        keep = max(len(completion) for _, completion in rows)
        logits = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
            logits_to_keep=keep + 1,
        ).logits[:, :-1]
        logits = logits.float() / (temperature or 1.0)
        picked = (logits.gather(-1, input_ids[:, -keep:, None])[..., 0] - logits.logsumexp(-1)).tolist()
        return [values[keep - len(completion) :] for values, (_, completion) in zip(picked, rows, strict=True)]


def _wave_seed(new: Sequence[Request], seed: int | None) -> int | None:
    """The seed of a wave that begins with these requests. The first of plain prompts have the caller's own."""
    if not new:
        return seed
    stream = new[0].stream if new[0].batch_stream is None else new[0].batch_stream
    return request_seed(seed, stream) if stream else seed


def _continued(request: Request, begun: Completion) -> Request:
    """What is left to sample of a request."""
    left = request.sampling.max_new_tokens - len(begun.token_ids)
    sampling = replace(request.sampling, max_new_tokens=left)
    return replace(request, prompt=[*request.prompt, *begun.token_ids], sampling=sampling)


def _check_activations(model: PreTrainedModel, expected: Mapping[str, Activations]) -> str:
    """What to add to the kernel's name. Raises EngineError unless each linear rounds its input as is `expected`.

    One linear of each shape is run, on the path that the decoder layers take.
    """
    shapes, linears = set(), dict(model.named_modules())
    kinds = check_placed(linears, expected)
    for name, activations in expected.items():
        linear = linears[name]
        if (shape := (linear.out_features, linear.in_features)) not in shapes:
            shapes.add(shape)
            x = torch.randn(8, linear.in_features, generator=torch.Generator().manual_seed(0))
            x = x.to(linear.weight_device, linear.compute_dtype)
            weight, serve = linear.unpack(torch.float32), partial(lora_linear, parts=parts_of(linear))
            check_served(name, serve, weight, linear.bias, x, activations)
    return kinds


def _take_adapter_(model: PreTrainedModel, update: AdapterUpdate) -> int:
    """Attach the adapter, or copy it into the attached one unless it is the same. Returns the number of tensors."""
    own, tensors = adapter_tensors(model), update.tensors
    if not own:
        attach_saved_(model, tensors, update.scaling)
        return len(tensors)
    if set(own) == set(tensors) and all(own[name] is tensors[name] for name in own):
        return len(own)
    count = load_tensors_(model, tensors)
    set_scaling_(model, update.scaling)
    return count


@contextmanager
def _sampling_mode(model: PreTrainedModel) -> Iterator[None]:
    """Without gradients, in evaluation mode, with autocast as in training; on a CPU weights are unpacked only once."""
    training = model.training
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(serving(model))
        if model.device.type == "cpu":
            stack.enter_context(cached_weights(model))
        elif model.dtype == torch.bfloat16:
            stack.enter_context(torch.autocast(model.device.type, torch.bfloat16))
        model.eval()
        try:
            yield
        finally:
            model.train(training)


NAME = "qerl_kv8"


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """transformers' interface."""
    return sdpa_attention_forward(module, query, *rounded_kv(module, key, value), *given, **named)


def kv_in_8_bits(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Within it the model's layers round keys and values by the scales that they have."""
    return attending_by(NAME, model.config.get_text_config())


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
