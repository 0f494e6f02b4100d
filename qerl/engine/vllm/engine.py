"""The rollout engine on vLLM, in the trainer's process and on the trainer's own tensors. It takes one CUDA device.

vLLM 0.25.1 runs with CUDA graphs. We use it only through its API and through what `qerl.engine.vllm` registers. A sync
or noise overwrites, in place, buffers that the captured graphs read; then the prefix cache is dropped. Nothing is
captured again.

Determinism: a repeated call with the same seed can differ in the last bits, because a warm prefix cache changes the
shapes of the prefill, and because Humming, if asked for, adds its stream-K slices in the order in which they finish.
With `deterministic` each call starts with an empty prefix cache, Humming runs without stream-K, and kernels are not
chosen by measured times. Our own kernels and Marlin always add in the same order. The random numbers of a request
depend only on (seed, position in the call, token position).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl import formats
from qerl.base.errors import CAP_GIB, MEMORY, EngineError
from qerl.checkpoint.activations import check_placed, read_activations
from qerl.checkpoint.adapter import set_start_
from qerl.checkpoint.load import local_folder
from qerl.engine.interface import (
    UNCALIBRATED,
    Completion,
    Engine,
    Request,
    Source,
    check_context,
    check_requests,
    request_seed,
)
from qerl.engine.memory import Cap, outgrown
from qerl.engine.update import Update
from qerl.engine.vllm import opening, requests
from qerl.engine.vllm.opening import Parts, line, whole
from qerl.engine.vllm.sync import Gains, attention_layers, set_scales_, take_

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from qerl.engine.options import EngineOptions
    from qerl.engine.vllm.requests import Reader
    from qerl.engine.vllm.sync import AdapterSlot
    from qerl.formats.fp8.kv import KVScales


logger = logging.getLogger(__name__)


class VLLMEngine(Engine):
    """See `qerl.engine.interface.Engine`."""

    name = "vllm"
    llm: Any = None  # vLLM's own LLM; None once the engine is closed
    found: Found | None = None  # what the engine uses of vLLM's model
    _reader: Reader | None = None  # of the experts that were chosen; None if they are not recorded
    _held: Callable[[int], int] | None = None  # tokens of the cache that a sequence takes, where it is not its own

    def __init__(self, base: str, format: str, options: EngineOptions) -> None:
        """Open the weights in folder `base`.

        Raises EngineError for what cannot run, before anything is loaded where possible.
        """
        opening.check_vllm()
        self._device = opening.check_device(options.dtype)
        opening.check_kv_cache_dtype(options.kv_cache_dtype)
        self._cap = Cap(self._device, options.cap_gib)
        self._began = time.monotonic()
        base = str(local_folder(base))
        self._uncalibrated = options.kv_cache_dtype == "fp8"  # then nothing is sampled before it has scales
        self._base, self.options = base, options
        settings = opening.Settings(base, format, options)
        self.end_token_ids = settings.stop_token_ids()
        try:
            self._start(settings)
        except BaseException as error:
            from qerl.engine.vllm import closing

            closing.clear_frames_(error)
            self.close()
            closing.abandon_()
            raise

    def _start(self, settings: opening.Settings) -> None:
        """Open vLLM. If this raises, the caller frees whatever was taken until then."""
        parts = Parts()
        kernel = opening.choose_kernel(self.options.kernel, settings.format)
        format = formats.get(settings.format)
        opening.check_folder(Path(settings.base), format, kernel)
        expected = read_activations(Path(settings.base), format) if format.rounds_inputs else {}
        with parts.part("imports"):
            opening.compile_ahead(settings, kernel)
            opening.import_vllm()
        self.llm = opening.open_llm(settings, kernel)
        self._asleep = self._cache_warned = False
        self.found = find(self.llm, self.options)
        rounded = check_placed(self.found.linears, expected) if expected else ""
        self.kernel, self.attention = self.found.kernel + rounded, self.found.attention
        self.max_context, self._model_len = settings.context, settings.model_len
        self._vocabulary = settings.config.vocab_size
        self.cache_tokens: int = self._cache_tokens(settings)  # how many the KV cache holds at once
        self._start_factors = self._write_start() if self.options.start else {}
        self._policy: PreTrainedModel | None = None
        self._cap.count_outside_()
        worker = self.llm.llm_engine.model_executor.driver_worker
        self._reader = worker.reader()
        self.startup_s = whole(time.monotonic() - self._began, parts.seconds, worker.startup_seconds())
        logger.info("vllm engine open: %s, kernel %s, attention %s", settings.base, self.kernel, self.attention)
        logger.info("start took %.0f s: %s", sum(self.startup_s.values()), line(self.startup_s))

    def run(self, source: Source, seed: int | None = None) -> dict[int, Completion]:
        """Each request begins as soon as `source` has it. Earlier turns of a conversation are in the prefix cache."""
        llm = self._open_awake()
        lengths: dict[int, int] = {}  # of each sequence, after its latest turn
        if self.options.deterministic:
            requests.drop_prefix_cache(llm)

        def begin(idle: bool) -> list[requests.Asked] | None:
            found = source.begin(wait=idle, together=self.options.deterministic)
            if not found:
                return found
            check_requests(found, self.max_context, self._vocabulary)
            lengths.update({one.index: len(one.prompt) for one in found})
            return [(one.index, one.prompt, self._params(one, seed)) for one in found]

        def take(done: list[tuple[int, Any]]) -> None:
            for index, output in done:
                completion = self._completion(output)
                lengths[index] += len(completion.token_ids)
                source.finished(index, completion)
            source.ended([index for index, _ in done])

        if not (unfinished := requests.serve(llm, begin, take)):
            self._check_cache([*lengths.values()])
        return unfinished

    def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        llm = self._open_awake()
        rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        check_context(rows, [1] * len(rows), self._model_len)
        if not rows:
            return []
        # vLLM computes prompt logprobs at temperature 1 only. The scale of the logits is a public field of its logits
        # processor and is read outside the CUDA graphs, so it can stand in for the temperature.
        processor = self.found.model.logits_processor
        before, processor.scale = processor.scale, processor.scale / (temperature or 1.0)
        waiting: list[requests.Asked] = [(index, row, requests.scoring_params()) for index, row in enumerate(rows)]
        scores: dict[int, list[float]] = {}

        def begin(idle: bool) -> list[requests.Asked]:
            begun, waiting[:] = waiting[:], []
            return begun

        def take(done: list[tuple[int, Any]]) -> None:
            for index, output in done:
                values = requests.first_at_each_position(output.prompt_logprobs)
                scores[index] = values[len(values) - len(completions[index]) :]

        try:
            requests.serve(llm, begin, take)
        finally:
            processor.scale = before
        return [scores[index] for index in range(len(rows))]

    def sync(self, update: Update) -> int:
        llm = self._open()
        take_(update, self.found, self.options.max_rank, self._device)
        requests.drop_prefix_cache(llm)
        return len(update)

    def set_kv_scales(self, scales: Mapping[int, KVScales]) -> int:
        llm = self._open()
        count = set_scales_(attention_layers(self.found.model), scales)
        requests.drop_prefix_cache(llm)
        self._uncalibrated = False
        return count

    def set_noise(self, noise: Mapping[str, torch.Tensor] | None) -> int:
        llm = self._open()
        noise = noise or {}
        self.found.gains.set_noise_(noise)
        requests.drop_prefix_cache(llm)
        return len(noise)

    def sleep(self) -> None:
        import torch

        llm = self._open()
        if self._asleep:
            return
        llm.sleep(level=1)
        self._asleep = True
        torch.cuda.empty_cache()  # what sampling or opening left in the cache would lie beside training's memory
        if self._cap.is_set:
            from qerl.engine.vllm.worker import kv_cache_bytes

            self._cap.limit_(released=kv_cache_bytes())

    def wake(self) -> None:
        import torch

        from qerl.engine.vllm.worker import kv_cache_bytes
        from qerl.formats.nvfp4.kernel_layout import release_work_buffers

        llm = self._open()
        if not self._asleep:
            return
        release_work_buffers()
        gc.collect()
        torch.cuda.empty_cache()
        needed, free = kv_cache_bytes(), self._cap.free_bytes()
        if needed > free:
            raise EngineError(
                "the KV cache needs %.2f GiB for the rollout and %.2f GiB are free: lower %s, or raise %s",
                *(needed / 2**30, free / 2**30, MEMORY, CAP_GIB),
            )
        self._cap.limit_()
        llm.wake_up()  # without tags: the scheduler stays paused until vLLM believes that everything is awake
        self._asleep = False

    def policy_model(self) -> PreTrainedModel:
        from qerl.engine.vllm.policy import build_policy

        self._open()
        if self._policy is None:
            self._policy = build_policy(self._base, self.found.model, self.options.trust_remote_code)
            set_start_(self._policy, self._start_factors)
        return self._policy

    def close(self) -> None:
        """Give the card's memory back. It may be called at any time, also asleep or twice.

        The policy model holds the same weights, which are freed when the caller drops it. A shutdown that fails inside
        vLLM is only a warning, because the results of the engine are already there.
        """
        if self.llm is None:
            return
        from qerl.engine.vllm import closing

        llm, self.llm = self.llm, None
        self.found = self._policy = self._reader = None
        self._start_factors = {}
        try:
            closing.shut_down_(llm)
        except Exception:
            logger.warning("vLLM could not be shut down: what it holds goes with the process", exc_info=True)
        del llm
        closing.give_back_()
        self._cap.limit_()  # while the cache slept, the limit allowed for it

    def _cache_tokens(self, settings: opening.Settings) -> int:
        """The tokens whose keys and values fit the cache; a sequence with states or windows takes `_held` of them.

        The blocks that vLLM 0.25.1 counts do not say it for those: the size that it notes is the smallest of all kinds
        of layers, and a block of states has as many tokens as a context.
        """
        config = self.llm.llm_engine.vllm_config
        if not (settings.decoder.linear or settings.decoder.full):
            return config.cache_config.num_gpu_blocks * config.cache_config.block_size
        from qerl.engine.vllm.worker import kv_cache_bytes
        from qerl.plan.sizes import sizes_of

        sizes = sizes_of(settings.config.to_dict(), settings.base)
        self._held = sizes.cached_tokens
        return kv_cache_bytes() // sizes.kv_bytes()

    def _write_start(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Put the base's start beside its weights; returns where its factors lie, by base linear."""
        from qerl.checkpoint.base_start import read_start
        from qerl.engine.vllm.sync import write_start_

        logger.info("beside the base acts its start %s", self.options.start)
        return write_start_(read_start(self.options.start), self.found.slots)

    def _completion(self, output: Any) -> Completion:
        """vLLM's complete output as our value, with the experts that were chosen if they are recorded."""
        made = requests.completion(output.outputs[0])
        return made if self._reader is None else replace(made, experts=self._reader.of_output(output))

    def _params(self, request: Request, seed: int | None) -> Any:
        return requests.sampling_params(request.sampling, self.end_token_ids, request_seed(seed, request.stream))

    def _check_cache(self, lengths: Sequence[int]) -> None:
        """Warn once when sequences of these lengths, in tokens, did not fit the KV cache."""
        held = lengths if self._held is None else [self._held(length) for length in lengths]
        found = outgrown(held, self.options.max_sequences, self.cache_tokens)
        if found is not None and not self._cache_warned:
            self._cache_warned = True
            logger.warning(*found)

    def _open(self) -> Any:
        if self.llm is None:
            raise EngineError("this engine was closed: open a new one")
        return self.llm

    def _open_awake(self) -> Any:
        llm = self._open()
        if self._asleep:
            raise EngineError("the engine sleeps: call wake() before sampling or scoring")
        if self._uncalibrated:
            raise EngineError(UNCALIBRATED)
        return llm


@dataclass(frozen=True)
class Found:
    """What the engine uses of the model that vLLM has built: where sync and noise write, and which kernels multiply.

    `model` is vLLM's. `slots` are places of an adapter on linears, `expert_slots` on experts; each may be empty."""

    model: nn.Module
    gains: Gains
    slots: Mapping[str, AdapterSlot]
    kernel: str  # what multiplies the base weights
    attention: str
    expert_slots: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def has_start(self) -> bool:
        """Whether a frozen start acts beside the base's weights."""
        return any(slot.frozen for slot in self.slots.values())

    @cached_property
    def linears(self) -> Mapping[str, nn.Linear]:
        """A frozen linear over its rows for each linear of the checkpoint, which syncs of whole weights write to."""
        from qerl.engine.vllm.policy import linear_views

        return linear_views(self.model)


def find(llm: Any, options: EngineOptions) -> Found:
    """Look through the model of vLLM's LLM. Raises EngineError if it is not built of what this plugin registers."""
    import qerl.engine.vllm.flash  # noqa: F401 - it brings its forward pass to the trainer
    from qerl.engine import vllm as vllm_plugin
    from qerl.engine.vllm.attention import attention_name
    from qerl.engine.vllm.experts import kernel_names, products
    from qerl.engine.vllm.layers import NoisyNorm
    from qerl.engine.vllm.linear import KeptMethod, kernel_name
    from qerl.engine.vllm.sync import adapter_slots, expert_slots

    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    vllm_plugin.check(runner.model)
    modules, every = dict(runner.model.named_modules()), vllm_plugin.linears_of(runner.model)
    linears = {name: module for name, module in every.items() if not isinstance(module.quant_method, KeptMethod)}
    experts = products(runner.model)
    return Found(
        model=runner.model,
        gains=Gains({name: module for name, module in modules.items() if isinstance(module, NoisyNorm)}),
        slots=adapter_slots(linears, options.start.rank if options.start else 0) if options.linear_rank else {},
        kernel=" + ".join(sorted({kernel_name(layer) for layer in linears.values()}) + kernel_names(experts.values())),
        attention=attention_name(runner.model),
        expert_slots=expert_slots(
            {name: product.adapter for name, product in experts.items() if product.adapter is not None}
        ),
    )
