"""What qerl registers with vLLM 0.25 through its own extension points; no file or function of vLLM is replaced.

1. `register_quantization_config`: the methods `qerl_nvfp4` and `qerl_bf16`, linears with one static LoRA, updated in
   place (`linear.py`).
2. `RMSNorm.register_oot`: NoisyRMSNorm, norm weights in float32, noise included (`norm.py`).
3. `SleepModeBackendFactory`: the backend `qerl_kv`, a sleep that gives back the KV cache alone, on a subclass of vLLM's
   allocator that stands in its place from the first engine on (`sleep.py`).
4. `worker_cls`: vLLM's worker with a sampler that reads the logits once, and kernels by measurement (`worker.py`).
5. `register_backend`: FlashAttention with our kernel for decode steps (`attention.py`).

The engine calls `register` before it opens vLLM; for processes that vLLM starts there is the `vllm.general_plugins`
entry point, which does nothing unless the engine asked for it, so that other uses of vLLM in the same environment stay
as they are. In a process that registered, every RMSNorm is a NoisyRMSNorm; the rest acts only when asked for by name.

vLLM logs a plugin that fails and goes on, so `check` looks at the model that was built. Remove what vLLM comes
to do itself: an adapter-only in-memory LoRA update (no multi-adapter path), and sleep by tag.
"""

from __future__ import annotations

import logging
import os

from qerl.errors import EngineError

logger = logging.getLogger(__name__)

SLEEP_BACKEND = "qerl_kv"
CONFIG_KEY = "qerl"  # our part of vLLM's `additional_config`

# Environment variables: set by the engine, inherited by processes that vLLM starts. TUNE stays out of vLLM's
# configuration, whose hash names the compiled graphs.
ASKED = "QERL_VLLM_PLUGIN"
TUNE = "QERL_TUNE_KERNELS"  # rollout.tune_kernels

_registered = False


def register() -> None:
    """Register everything, once a process."""
    global _registered
    if _registered:
        return
    os.environ[ASKED] = "1"
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    from qerl.vllm_plugin import attention, linear, norm

    linear.register()
    norm.register()
    attention.register()
    SleepModeBackendFactory.register_backend(SLEEP_BACKEND, "qerl.vllm_plugin.sleep", "KVCacheBackend")
    _registered = True


def register_if_asked() -> None:
    """The entry point."""
    if os.environ.get(ASKED):
        register()


def check(model, runner, own_attention: bool) -> None:
    """Raise EngineError unless the linears and norms of vLLM's decoder layers are ours.

    Where vLLM samples or attends (`own_attention`: ours was asked for) by its own all is right but slower: a warning.
    """
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import LinearBase

    from qerl.vllm_plugin.attention import attends_by_ours
    from qerl.vllm_plugin.linear import AdapterLinearMethod
    from qerl.vllm_plugin.norm import NoisyRMSNorm
    from qerl.vllm_plugin.sampling import FusedSampler

    linears = {name: module for name, module in model.named_modules() if isinstance(module, LinearBase)}
    norms = {name: module for name, module in model.named_modules() if isinstance(module, RMSNorm)}
    foreign = [name for name, module in linears.items() if not isinstance(module.quant_method, AdapterLinearMethod)]
    foreign += [name for name, module in norms.items() if not isinstance(module, NoisyRMSNorm)]
    if foreign or not linears or not norms:
        raise EngineError(
            f"vLLM built {len(linears)} linears and {len(norms)} norms of which these are not qerl's: {foreign[:4]}; "
            "adapter and noise would not act there. Another vLLM plugin may interfere (VLLM_PLUGINS= switches plugins "
            "off), or this vLLM is not the supported version 0.25.1"
        )
    sampler = getattr(runner, "sampler", None)
    if not isinstance(sampler, FusedSampler):
        _warn("sampler", sampler, runner)
    if own_attention and not attends_by_ours(model):
        _warn("attention", next((m.impl for m in model.modules() if hasattr(m, "impl")), None), runner)


def _warn(what: str, found: object, runner: object) -> None:
    logger.warning(
        "vLLM took its own %s (%s; runner %s) in place of qerl's: results are right and rollouts slower. Another vLLM "
        "plugin or a variable such as VLLM_USE_V2_MODEL_RUNNER may be the cause",
        what,
        *(f"{type(thing).__module__}.{type(thing).__name__}" for thing in (found, runner)),
    )
