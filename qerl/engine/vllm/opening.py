"""Open vLLM on a checkpoint. Whatever can be refused is refused before anything is loaded.

The kernels that multiply by the packed weights are compiled while vLLM is still being imported. Parts of the start are
timed. The kernels of Triton (TRITON_CACHE_DIR) and Humming (HUMMING_CACHE_DIR) are cached on disk, and so are our own
(QERL_CACHE). Imports, weights, the profile run and captured CUDA graphs are not, because one process cannot hand them
to another. Nothing is compiled by torch: what stands between the products is a launch of ours each (`kernels.py`), and
a step that also begins sequences is a row of CUDA graphs with attention between them. No vllm.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl import formats
from qerl.base.devices import BF16_CAPABILITY, FP8_CAPABILITY, VLLM_ATTENDS
from qerl.base.errors import (
    CAP_GIB,
    ENGINE,
    KERNEL,
    MAX_NEW_TOKENS,
    MAX_PROMPT_TOKENS,
    MEMORY,
    CheckpointError,
    EngineError,
    MissingExtraError,
)
from qerl.checkpoint.activations import check_shared
from qerl.checkpoint.experts import PER_LAYER, Decoder, decoder_of, fused
from qerl.checkpoint.load import check_complete, check_kv_cache, check_served_family, config_of
from qerl.checkpoint.shards import KEY, OF_PICTURES, has_own_head, read_config, read_tensors
from qerl.config.names import KERNELS, KV_CACHE_DTYPES
from qerl.engine.memory import others_bytes, out_of_memory
from qerl.engine.vllm.sync import served_config, text_alone
from qerl.formats.base import Format
from qerl.formats.fp8.format import rounds_input
from qerl.formats.fp8.layout import BLOCK as FP8_BLOCK
from qerl.formats.fp8.layout import CODES
from qerl.formats.fp8.layout import KERNEL_ROWS as FP8_ROWS
from qerl.formats.nvfp4.layout import PACKED
from qerl.plan import engine_memory as plans
from qerl.plan.sizes import sizes_of

if TYPE_CHECKING:
    from qerl.engine.options import EngineOptions

logger = logging.getLogger(__name__)

MOST_EXPERT_RANK = 256  # of an adapter on experts: larger tiles do not fit the card's shared memory
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"  # the variable by which vLLM lets a graph stop at attention, and go on
BREAKS = "vllm.compilation.breakable_cudagraph"  # the module that does so


class Settings:
    """What the checkpoint's files say and the sizes that follow from it, read before vLLM is imported."""

    def __init__(self, base: str, format: str, options: EngineOptions) -> None:
        self.base, self.format, self.options = base, format, options
        self.config = config_of(Path(base), options.trust_remote_code).get_text_config()
        folder, own = Path(base), formats.get(format)
        config = read_config(folder)
        packed = config.get("quantization_config") is not None
        if packed != own.quantized:
            raise EngineError(
                f"{base} holds {'quantized' if packed else '16-bit'} weights but format {format!r} was asked for: "
                "set model.format to match, or run `qerl quantize` first"
            )
        declared, max_context = self.config.max_position_embeddings, options.max_context
        if max_context is not None and max_context > declared:
            raise EngineError(
                "a context of %d tokens was asked for, and %s declares %d: lower %s or %s",
                *(max_context, base, declared, MAX_PROMPT_TOKENS, MAX_NEW_TOKENS),
            )
        self.context = max_context or declared
        self.model_len = min(self.context + 1, declared)  # vLLM needs one token more to score a full completion
        if "text_config" in config:
            raise EngineError(
                "%s is a model for pictures and text, which vLLM would build as another than the trainer: write %s",
                *(base, ENGINE.set_to("transformers")),
            )
        self.decoder = decoder_of(config, base)
        check_experts_served(folder, own, self.decoder)
        if len(own.kinds) > 1 and self.decoder.linear:
            raise EngineError(
                "%s has linear attention in %s, which vLLM does not serve here: write %s",
                *(base, own.label, ENGINE.set_to("transformers")),
            )
        self.served = served_config(folder, own)
        check_kv_cache(self.decoder, base, options.kv_cache_dtype)
        # A packed head is decoded to 16 bits; what sees pictures is not read.
        self.weights = sum(info.nbytes // (2 if info.packed else 1) for info in read_tensors(folder).values())

    def overrides(self) -> dict[str, Any]:
        """What of config.json vLLM is to read in another way: a head in the file counts, as for `load_model`, and so do
        packed linears that vLLM would not know by its own reading."""
        config, tensors = read_config(Path(self.base)), read_tensors(Path(self.base))
        found: dict[str, Any] = {KEY: False} if has_own_head(config, tensors) else {}
        rope = config.get("rope_parameters") or {}
        if self.decoder.linear and not rope.keys().isdisjoint(OF_PICTURES):  # vLLM would ask for a model of pictures
            found["rope_parameters"] = {key: value for key, value in rope.items() if key not in OF_PICTURES}
        if self.decoder.full:  # vLLM 0.25.1 reads the hub's names, for which transformers 5.17 has PER_LAYER
            heads, size = sizes_of(self.config.to_dict(), self.base).full_heads
            found |= {PER_LAYER: None, "global_head_dim": size, "num_global_key_value_heads": heads}
            found |= {"architectures": ["Gemma4ForCausalLM"], "use_bidirectional_attention": None}  # no pictures
        return found if self.served is None else {**found, "quantization_config": self.served}

    def for_states(self) -> dict[str, Any]:
        """vLLM's further arguments for a model with states: float32, as the trainer computes; and nothing is kept of
        prompts, of which vLLM would find whole blocks of 500 to 800 tokens only."""
        if not self.decoder.linear:
            return {}
        return {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}

    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion, the same as for the transformers engine."""
        from qerl.checkpoint.load import end_token_ids, load_tokenizer

        return end_token_ids(Path(self.base), self.config, load_tokenizer(self.base, self.options.trust_remote_code))

    def memory_arguments(self, total: int, others: int = 0) -> dict[str, Any]:
        """vLLM's arguments for the budget on a card of `total` bytes, of which other processes hold `others`.

        The KV cache gets at most what `max_sequences` full contexts can fill; there are no more sequences at once than
        have room for their states, without which vLLM would not start.
        """
        options = self.options
        outside = plans.outside_bytes(options.trainer_bytes, options.max_sequences, self.config.vocab_size)
        plan = plans.plan_memory(
            total - others, self.weights, options.memory, options.cap_gib, outside, formats.get(self.format).quantized
        )
        sequences, tokens, prefill = options.max_sequences, self.model_len, 0
        if self.decoder.linear or self.decoder.full:
            sizes = sizes_of(self.config.to_dict(), self.base)
            tokens, per_token = sizes.cached_tokens(tokens), sizes.kv_bytes()
            sequences, prefill = sizes.at_once(plan.budget - plans.least_bytes(self.weights), sequences)
        else:
            per_token = plans.kv_bytes_per_token(self.config, options.kv_cache_dtype)
        # While a prompt is read, also layers with a window keep all of it: vLLM asks for room for one such.
        held = self.weights + prefill
        wanted = plans.kv_cache_bytes(plan, held, max(sequences * tokens, self.model_len), per_token)
        chosen = self.decoder.choice_bytes if options.records_experts else 0
        left = plan.budget - prefill - plans.chosen_bytes(plan, self.weights, per_token, chosen)
        needed = left if wanted is None else plans.engine_bytes(held, wanted)
        return {
            "gpu_memory_utilization": plan.utilization(total, needed),
            "kv_cache_memory_bytes": wanted,
            "max_num_seqs": sequences,
        }


def import_vllm() -> None:
    """Import vLLM, with the environment variables that it reads then, and register our plugin.

    A function of its own, because importing takes long and is timed as a part of the start.
    """
    set_environment_()
    from vllm import LLM  # noqa: F401

    from qerl.engine import vllm as vllm_plugin

    vllm_plugin.register()


def open_llm(settings: Settings, kernel: str) -> Any:
    """vLLM's LLM in this process, with our plugin in it. `kernel` is what `choose_kernel` returned."""
    import torch

    from qerl.engine import vllm as vllm_plugin
    from qerl.model.gated_delta import keep_timings

    import_vllm()
    decoder = settings.decoder
    if decoder.has_experts or decoder.linear or decoder.full:
        _take_new_runner_()
    if decoder.linear:
        keep_timings("chunk_gated_delta_rule_fwd_kernel", "start")
        vllm_plugin.register_hybrid()
    if decoder.full:
        vllm_plugin.register_gemma()
    options = settings.options
    arguments = {
        **_arguments(settings, kernel),
        **settings.memory_arguments(torch.cuda.get_device_properties(0).total_memory, others_bytes(0)),
        "linear_backend": linear_backend(kernel),
        "seed": options.seed,
        "enforce_eager": options.enforce_eager,
    }
    if not options.enforce_eager:
        arguments["cudagraph_capture_sizes"] = capture_sizes(arguments["max_num_seqs"])
    _inspect_here_(settings.config.architectures or [])
    if not options.enforce_eager and graphs_of_steps() == "FULL_DECODE_ONLY":
        logger.warning(
            "steps that begin sequences run without CUDA graphs, because vllm was imported before qerl, or %s is not 1",
            BREAKABLE,
        )
    from vllm import LLM

    from qerl.engine.vllm import multi_step

    for name in ("vllm", "scheduler"):
        logging.getLogger(f"vllm.config.{name}").addFilter(_is_news)
    try:
        with _little_to_collect(), text_alone(Path(settings.base)) as own:
            llm = LLM(**arguments | own)
    except (torch.OutOfMemoryError, ValueError) as error:
        raise cannot_open(settings, error) from error
    # EngineArgs 0.25.1 does not pass this field of vLLM's own config on; it is read at the first sleep.
    worker = llm.llm_engine.model_executor.driver_worker
    worker.model_config.sleep_mode_backend = vllm_plugin.SLEEP_BACKEND
    multi_step.allow_steps_(llm)
    return llm


def _inspect_here_(architectures: Sequence[str]) -> None:
    """Have vLLM look at the model's class in this process, instead of starting one that imports it all again."""
    from vllm import ModelRegistry

    for name in set(architectures) & set(ModelRegistry.models):
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


EXPECTED = ("torch.compile pipeline", "Inductor compilation was disabled", "Using custom scheduler class")


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of vLLM's log says anything but what we ask for: our scheduler, and that nothing is compiled."""
    return not any(said in record.getMessage() for said in EXPECTED)


@contextmanager
def _little_to_collect() -> Iterator[None]:
    """Spare what is there now the collections of garbage, of which vLLM asks for one per CUDA graph (0.4 s each).

    vLLM freezes what there is after an opening as well, and unfreezes it when it shuts down.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    except BaseException:
        gc.unfreeze()
        raise


def _take_new_runner_() -> None:
    """Have vLLM 0.25.1 take its newer model runner for experts and for states, as it does for other models.

    Our sampler, several steps per call and the record of chosen experts are made for that one; with
    VLLM_USE_V2_MODEL_RUNNER=0 models with states take the older one, and vLLM's sampler. vLLM keeps variables that an
    earlier engine of this process has read, until it is told to read them again.
    """
    from vllm.envs import disable_envs_cache

    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    disable_envs_cache()


def set_environment_() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the trainer needs the model in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # read when a kernel is imported: see `keep_timings`
    os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")  # vLLM has Triton print a line for each variant that it times
    if BREAKS not in sys.modules:  # it reads the variable once
        os.environ.setdefault(BREAKABLE, "1")
    if not has_module("flashinfer"):
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def _arguments(settings: Settings, kernel: str) -> dict[str, Any]:
    """The arguments of vLLM's LLM, except for memory, kernel choice, seed and CUDA graphs."""
    from qerl.engine import vllm as vllm_plugin

    options = settings.options
    for_plugin = {"max_rank": options.linear_rank, "deterministic": options.deterministic, "kernel": kernel}
    if settings.decoder.has_experts and options.expert_rank > MOST_EXPERT_RANK:
        raise EngineError(
            f"adapter.expert_rank {options.expert_rank}: the engine's kernels take at most {MOST_EXPERT_RANK}: write "
            f"adapter.expert_rank: {MOST_EXPERT_RANK}, or less"
        )
    if settings.decoder.has_experts:
        if options.deterministic:
            logger.warning("rollout.deterministic does not cover experts: their products may differ in the last bits")
        for_plugin["expert_rank"] = options.expert_rank if options.linear_rank else 0
        for_plugin["shares_outer"] = options.experts == "shared"
        for_plugin["records_experts"] = options.records_experts
    return {
        "model": settings.base,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "quantization": vllm_method(settings.format),
        "trust_remote_code": options.trust_remote_code,
        "max_model_len": settings.model_len,
        "max_num_batched_tokens": plans.MAX_BATCHED_TOKENS,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # the checkpoint's sampling defaults (a repetition penalty, say) bias the policy
        "kv_cache_dtype": options.kv_cache_dtype,
        "enable_prefix_caching": True,
        "enable_sleep_mode": True,
        "worker_cls": "qerl.engine.vllm.worker.QerlWorker",
        "scheduler_cls": "qerl.engine.vllm.multi_step.MultiStepScheduler",
        # FLA's chunks are the trainer's; FlashInfer, which vLLM takes on Hopper, may not be installed.
        "additional_config": {vllm_plugin.CONFIG_KEY: for_plugin, "gdn_prefill_backend": "triton"},
        **({"hf_overrides": overrides} if (overrides := settings.overrides()) else {}),
        **({"load_format": vllm_plugin.LOADER} if settings.served else {}),
        **attention_config(settings, kernel),
        "compilation_config": {"mode": 0, "cudagraph_mode": graphs_of_steps()},
        **settings.for_states(),
    }


def vllm_method(format: str) -> str:
    """The quantization method of our plugin that serves a format. Raises EngineError if there is none."""
    if (method := formats.get(format).vllm_method) is None:
        raise EngineError("the vllm engine does not serve %s: write %s", format, ENGINE.set_to("transformers"))
    return method


def attention_config(settings: Settings, kernel: str) -> dict[str, Any]:
    """vLLM's argument by which our kernel attends in decode steps; none beside states, whose pages it pads, and for
    Gemma 4. On other cards than Hopper it goes with our product; 8-bit caches, untried there, need kernel: qerl."""
    import torch

    from qerl.formats.cuda.nvrtc import capability, has_kernels, has_portable_kernels, stands_in
    from qerl.model.decode_attention import takes_every_layer

    if settings.decoder.linear or settings.decoder.full or settings.options.kv_cache_dtype not in ("auto", "fp8"):
        return {}
    if has_kernels(device := torch.device("cuda", torch.cuda.current_device())):
        return {"attention_config": {"backend": "CUSTOM"}}
    runs = kernel == "qerl" and has_portable_kernels(device) and capability(device)[0] != VLLM_ATTENDS
    asked = (settings.options.kernel == kernel or stands_in()) and takes_every_layer(settings.config)
    if not runs or (settings.options.kv_cache_dtype == "fp8" and not asked):
        return {}
    return {"attention_config": {"backend": "CUSTOM", "flash_attn_version": 2}}  # vLLM's own choice there


def graphs_of_steps() -> str:
    """Which steps are CUDA graphs: all up to the largest size; only decode steps if vLLM was imported before qerl.

    vLLM decides when its attention is imported whether a graph stops there. A graph that did not would hold the
    attention of the batch that it was captured with.
    """
    attention = sys.modules.get("vllm.model_executor.layers.attention.attention")
    operation = getattr(attention, "unified_attention_with_output", None)
    stops = operation is None or operation.__globals__["__name__"] == BREAKS
    return "FULL_AND_PIECEWISE" if stops and os.environ.get(BREAKABLE) == "1" else "FULL_DECODE_ONLY"


def check_vllm() -> None:
    """Raise MissingExtraError if vLLM is not installed."""
    if not has_module("vllm"):
        raise MissingExtraError("vllm", "gpu")


def check_device(dtype: str) -> int:
    """The index of the current CUDA device. Raises EngineError if vLLM cannot run there, or not in `dtype`."""
    import torch

    if not torch.cuda.is_available():
        raise EngineError(
            "%s needs an NVIDIA GPU, torch sees none: set %s", ENGINE.set_to("vllm"), ENGINE.set_to("transformers")
        )
    if dtype not in ("auto", "bfloat16"):
        raise EngineError(
            "%s computes in bfloat16: set the dtype to auto or bfloat16, not %s", ENGINE.set_to("vllm"), dtype
        )
    capability = torch.cuda.get_device_capability()
    if capability < BF16_CAPABILITY:
        raise EngineError(
            "%s has compute capability %s, bfloat16 needs %s: set %s",
            *(torch.cuda.get_device_name(), capability, BF16_CAPABILITY, ENGINE.set_to("transformers")),
        )
    return torch.cuda.current_device()


def check_kv_cache_dtype(kv_cache_dtype: str) -> None:
    """Raise EngineError for a type that is not known or that the card cannot compute with."""
    import torch

    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise EngineError(f"rollout.kv_cache_dtype={kv_cache_dtype!r} is not known: write {', '.join(KV_CACHE_DTYPES)}")
    capability = FP8_CAPABILITY if kv_cache_dtype == "auto" else torch.cuda.get_device_capability()
    if capability < FP8_CAPABILITY:
        raise EngineError(
            f"rollout.kv_cache_dtype={kv_cache_dtype} needs compute capability {FP8_CAPABILITY} (Ada, Hopper or newer) "
            f"and {torch.cuda.get_device_name()} has {capability}: write rollout.kv_cache_dtype: auto"
        )


def choose_kernel(kernel: str, format: str) -> str:
    """The kernel for packed weights: qerl, humming or marlin, and "" for 16-bit weights.

    "auto" is our own kernel, and Marlin where it cannot run. Raises EngineError for one that cannot run here, and
    MissingExtraError where its package is not installed.
    """
    import torch

    from qerl.formats.cuda.nvrtc import has_portable_kernels

    if kernel not in KERNELS:
        known = f"{', '.join(KERNELS[:-1])} or {KERNELS[-1]}"
        raise EngineError("%s is not known: write %s", KERNEL.set_to(f"{kernel!r}"), known)
    if not formats.get(format).kernels:
        return ""
    if kernel == "humming" and not has_module("humming"):
        raise MissingExtraError("humming-kernels", "gpu")
    if kernel in ("humming", "marlin"):
        return kernel
    if has_portable_kernels(torch.device("cuda", torch.cuda.current_device())):
        return "qerl"
    if kernel == "auto":
        return "marlin"
    raise EngineError(
        "%s needs a card from Ampere on (capability 8.0) and the CUDA bindings that torch brings, not %s: write %s",
        *(KERNEL.set_to("qerl"), torch.cuda.get_device_name(), KERNEL.set_to("auto, humming or marlin")),
    )


def compile_ahead(settings: Settings, kernel: str) -> None:
    """Start compiling our kernels for the model's shapes in the background, before vLLM is imported and reads weights.

    `linear.load_kernels` then finds them compiled, in the tilings that `qerl tune` measured on this card. Where the
    model's config does not tell the shapes, nothing is started and each kernel is compiled when it is loaded.
    """
    if kernel != "qerl":
        return
    import torch

    from qerl.formats.cuda import nvrtc
    from qerl.formats.nvfp4 import decode, gemm, lora, portable, tuning
    from qerl.model import costs, decode_attention

    device = torch.device("cuda", torch.cuda.current_device())
    tuning.take_(device, settings.options.deterministic)
    try:
        sizes = sizes_of(settings.config.to_dict(), settings.base)
    except CheckpointError:
        return
    bits = 8 if settings.options.kv_cache_dtype == "fp8" else 16
    ours = sizes.head_dim in costs.HEAD_DIMS and sizes.states is None and not sizes.decoder.full
    attention = decode_attention.variants(sizes.head_dim, bits, device) if ours else []
    linears = [(sum(parts), columns) for _, parts, columns in sizes.fused_linears()]
    if not nvrtc.has_kernels(device):
        needed = [portable.variants(columns) for _, columns in linears]
    else:
        needed = [gemm.variants(*linear) for linear in linears]
        needed += [lora.variants(columns) for _, columns in linears] if settings.options.linear_rank else []
    nvrtc.compile_ahead([*(each for variants in needed for each in variants), decode.OURS, *attention])


def linear_backend(chosen: str) -> str:
    """vLLM's `linear_backend` for the chosen kernel. Ours replaces Marlin, for which vLLM compiles nothing."""
    return {"": "auto", "qerl": "marlin"}.get(chosen, chosen)


def has_module(name: str) -> bool:
    """Whether a package is installed, without importing it."""
    return find_spec(name) is not None


ADVICE = re.compile(r"[.\s]*\b(?:Try|Decrease)\b.*", re.DOTALL)  # vLLM's own advice, which names its arguments


def cannot_open(settings: Settings, error: Exception) -> EngineError:
    """The error to raise when opening vLLM raised `error`, a ValueError or torch's OutOfMemoryError."""
    if not isinstance(error, ValueError):
        return out_of_memory(f"opening {settings.base}", error)
    facts = ADVICE.sub("", str(error))
    if "memory" not in facts:
        return EngineError(f"vLLM cannot open {settings.base}: {error}")
    return EngineError(
        "the card has too little free memory for a rollout, or a rollout may hold too little for the KV cache of one "
        "sequence of %d tokens: end what else runs there (nvidia-smi), lower %s, or change %s or %s (%s)",
        *(settings.model_len, MAX_NEW_TOKENS, MEMORY, CAP_GIB, facts),
    )


class Parts:
    """Seconds by part, in the order in which the parts began. A part that is timed several times adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - started


def whole(total: float, *parts: Mapping[str, float]) -> dict[str, float]:
    """All parts, and as `rest` the seconds that none of them accounts for; rounded to 0.01 s."""
    seconds = {name: value for each in parts for name, value in each.items()}
    return {name: round(value, 2) for name, value in {**seconds, "rest": total - sum(seconds.values())}.items()}


def line(seconds: Mapping[str, float]) -> str:
    """For the log: the parts that took at least a tenth of a second."""
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.1)


def capture_sizes(max_sequences: int) -> list[int]:
    """The numbers of tokens that get a CUDA graph: about half as many as in vLLM, and the full batch of up to 512.

    A batch between two sizes takes the graph of the larger one, with at most 7 extra rows up to 48, 15 up to 256 and 63
    above. Since decoding is bound by memory, that costs a few percent. Each graph costs memory and about a tenth of a
    second of every start. There is none for 56: see `linear.HUMMING_WRONG`.
    """
    sizes = {1, 2, 4, *range(8, 56, 8), *range(64, 256, 16), *range(256, 513, 64), max_sequences}
    return sorted(size for size in sizes if size <= min(2 * max_sequences, 512))


def check_experts_served(folder: Path, format: Format, decoder: Decoder) -> None:
    """Raise EngineError for experts that vLLM would not serve as they are, and CheckpointError if some are missing, or
    for another family than it serves."""
    from qerl.formats.nvfp4.kernel_layout import marlin_takes

    check_served_family(decoder, folder)
    if not decoder.has_experts:
        return
    if not format.holds_experts:
        raise EngineError(
            f"{folder} has experts in {format.label}, and vLLM serves them in NVFP4 or 16 bits here: quantize the "
            f"16-bit model with `--scheme {formats.DEFAULT.scheme}`"
        )
    if format.quantized and not marlin_takes(decoder.hidden, decoder.width):
        raise EngineError(
            "%s has experts of %d x %d, which vLLM's Marlin kernel does not multiply by: write %s",
            *(folder, decoder.width, decoder.hidden, ENGINE.set_to("transformers")),
        )
    check_complete(decoder, format, read_tensors(folder))


def check_folder(folder: Path, format: Format, kernel: str) -> None:
    """Raise EngineError for what vLLM or `kernel` would refuse after all weights have been read."""
    if not format.quantized:
        return
    tensors = read_tensors(folder)
    packed = format.quantized_linears(tensors)
    for kind in format.kinds:
        groups = fused(module for module in packed if format.of(module, tensors) is kind)
        if kind.kernels and kernel == "qerl":
            _check_own_kernel(groups, tensors)
        if kind.shared_tensor is not None:
            try:
                check_shared(groups, tensors, kind.shared_tensor, str(folder))
            except CheckpointError as error:
                raise EngineError("%s", error) from error
        if kind.block_rows > 1:
            rounds = kind is format and rounds_input(read_config(folder)["quantization_config"])
            _check_blocks(folder, groups, tensors, rounds)


def _check_own_kernel(groups: Sequence[Sequence[str]], tensors: Mapping[str, Any]) -> None:
    from qerl.formats.nvfp4 import gemm, portable

    for modules in (group for group in groups if ".experts." not in group[0]):
        shapes = [tensors[f"{module}.{PACKED}"].shape for module in modules]
        rows, columns = sum(shape[0] for shape in shapes), 2 * shapes[0][1]
        if not (gemm.takes(rows, columns) and portable.takes(rows, columns)):
            raise EngineError(
                "%s is %d x %d, which qerl's kernel does not take: write %s",
                *(", ".join(modules), rows, columns, KERNEL.set_to("humming or marlin")),
            )


def _check_blocks(folder: Path, groups: Sequence[Sequence[str]], tensors: Mapping[str, Any], rounds: bool) -> None:
    """Raise EngineError if a linear of an FP8 folder does not suit vLLM's blocks, or the card's products."""
    import torch

    capability = torch.cuda.get_device_capability()
    if rounds and capability < FP8_CAPABILITY:
        raise EngineError(
            f"{folder} multiplies activations in FP8, which needs compute capability {FP8_CAPABILITY} (Ada, Hopper or "
            f"newer), and {torch.cuda.get_device_name()} has {capability}: quantize the model with `--scheme "
            f"{formats.DEFAULT.name}`, whose kernels run there"
        )
    for modules in groups:
        shapes = {module: tensors[f"{module}.{CODES}"].shape for module in modules}
        for place, (module, (rows, columns)) in enumerate(shapes.items()):
            last = place == len(shapes) - 1
            if columns % FP8_BLOCK or rows % (FP8_ROWS if last else FP8_BLOCK):
                raise EngineError(
                    "%s is %d x %d, and vLLM takes FP8 in linears of decoder layers with columns (and rows of what it "
                    "fuses) in whole blocks of %d: leave it in 16 bits (`qerl quantize --ignore`, or "
                    "qat.quant_cfg.ignore), or write %s",
                    *(module, rows, columns, FP8_BLOCK, ENGINE.set_to("transformers")),
                )
