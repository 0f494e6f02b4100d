"""What qerl registers with vLLM 0.25 through its own extension points; no file or function of vLLM is replaced.

1. `register_quantization_config`: the methods `qerl_nvfp4`, `qerl_fp8` and `qerl_bf16`, linears with one static
   LoRA, updated in place (`linear.py`), and the experts of a mixture with another (`experts.py`).
2. `register_oot` of RMSNorm and GemmaRMSNorm: norm gains in float32, noise included; of SiluAndMul and of two rotary
   embeddings: the same in one launch each, as nothing is compiled (`layers.py`); for Qwen3.5 and Gemma 4 text models.
3. `SleepModeBackendFactory`: the backend `qerl_kv`, a sleep that gives back the KV cache alone, on a subclass of vLLM's
   allocator that replaces it from the first engine on (`worker.py`).
4. `worker_cls`: vLLM's worker, with a sampler that reads the logits once and with kernels chosen by measurement
   (`worker.py`).
5. `register_backend`: FlashAttention with our kernel for decode steps (`attention.py`).
6. `scheduler_cls`: vLLM's scheduler, with several decode steps per call (`multi_step.py`).

The engine calls `register` before it opens vLLM; for processes that vLLM starts there is the `vllm.general_plugins`
entry point, which does nothing unless the engine asked for it, so that other uses of vLLM in the same environment stay
as they are. In a process that registered, every RMSNorm is a NoisyNorm. There and in the processes that it starts no
model of vLLM's is compiled (`opening.BREAKABLE`). The rest acts only when asked for by name.

When a plugin fails vLLM only logs it, so `check` looks at the model that was built. Remove parts of this when vLLM
brings them itself: an in-memory update of a single LoRA adapter (without the multi-adapter path), and sleep by tag.
"""

from __future__ import annotations

import os
from functools import cache
from types import MethodType
from typing import Any, ClassVar

from qerl.base.errors import EngineError

SLEEP_BACKEND = "qerl_kv"
LOADER = "qerl"  # the `load_format` of folders whose tensors are not as vLLM reads them
CONFIG_KEY = "qerl"  # our part of vLLM's `additional_config`

ASKED = "QERL_VLLM_PLUGIN"  # environment variable that the engine sets for the processes that vLLM starts

_registered = False


def register() -> None:
    """Register everything, once per process."""
    global _registered
    if _registered:
        return
    os.environ[ASKED] = "1"
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    from qerl.engine.vllm import attention, layers  # noqa: F401  importing `layers` registers them

    attention.register()
    SleepModeBackendFactory.register_backend(SLEEP_BACKEND, "qerl.engine.vllm.worker", "KVCacheBackend")
    _registered = True


def register_if_asked() -> None:
    """What vLLM calls as a plugin, in each of its processes."""
    if os.environ.get(ASKED):
        register()


@cache
def register_hybrid() -> None:
    """Register what Qwen3.5 needs beside the above: the text model, and linear attention where graphs stop.

    A graph that did not stop there would hold the sequences that it was captured with; remove the stop when vLLM breaks
    there itself, as it does at attention. A step that only decodes has a launch of ours for seven of vLLM's.
    """
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    from qerl.model.delta_kernels import delta_step_
    from qerl.model.gated_delta import DeltaLayer

    register_text_model()

    class GatedDeltaNet(QwenGatedDeltaNetAttention):
        _forward_core = eager_break_during_capture(QwenGatedDeltaNetAttention._forward_core)

        def _forward_core_decode_non_spec(self, mixed_qkv, b, a, core_attn_out, attn_metadata):
            # vLLM's decode kernel rounds sigmoid(b) to b's dtype; its prefill and the trainer leave it in float32.
            super()._forward_core_decode_non_spec(mixed_qkv, b.float(), a, core_attn_out, attn_metadata)

        def forward_cuda(self, hidden_states, output):
            found = states_of_step(self)
            if found is None or len(found) != len(hidden_states):
                super().forward_cuda(hidden_states, output)
                return
            (qkvz, _), (ba, _) = self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
            taps, states = self.kv_cache[:2]
            causal_conv1d_update(
                qkvz[:, : 2 * self.key_dim + self.value_dim],
                taps if is_conv_state_dim_first() else taps.transpose(-1, -2),
                self.conv1d.weight.squeeze(1),
                self.conv1d.bias,
                self.activation,
                conv_state_indices=found,
                validate_data=False,
            )
            layer = DeltaLayer(self.A_log, self.dt_bias, self.norm.weight, self.norm.eps)
            output[:] = self.out_proj(delta_step_(qkvz, ba, states, found, layer))[0]

    QwenGatedDeltaNetAttention.register_oot(GatedDeltaNet)


def register_text_model() -> None:
    """Register Qwen3.5's text model as a class of its own.

    vLLM 0.25.1 has that class as a part of the model for pictures and text only. Remove ours when vLLM registers it
    with its states (vllm-project/vllm#48060).
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import IsHybrid
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    name = Qwen3_5ForCausalLM.__name__
    if name in ModelRegistry.models:
        return
    states = [f"get_mamba_state_{what}" for what in ("dtype_from_config", "shape_from_config", "copy_func")]
    methods = {each: getattr(Qwen3_5ForConditionalGeneration, each) for each in states}
    ModelRegistry.register_model(name, type(name, (Qwen3_5ForCausalLM, IsHybrid), methods))


def states_of_step(layer) -> Any:
    """The blocks of states of a step in which each sequence has one new token, as vLLM's tensor; else None.

    A row of graphs with linear attention between them was captured without knowing the batch.
    """
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    if context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE or not isinstance(context.attn_metadata, dict):
        return None
    step = context.attn_metadata[layer.prefix]
    if step.num_prefills or not step.num_decodes or step.spec_sequence_masks is not None:
        return None
    others = layer.gqa_interleaved_layout or layer.tp_size > 1 or layer.norm.activation not in ("silu", "swish")
    if others or layer.kv_cache[0].dtype != layer.conv1d.weight.dtype:  # the convolution would not be in place
        return None
    return step.non_spec_state_indices_tensor[: step.num_actual_tokens]


def register_gemma() -> None:
    """Register Gemma 4's text model in place of vLLM 0.25.1's, which holds the rows of keys twice where values are the
    keys: here such layers have `qk_proj`, the linears of the checkpoint."""
    from vllm import ModelRegistry
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM

    from qerl.engine.vllm.sync import FUSED

    leaves = FUSED["qk_proj"]

    class Gemma4Text(Gemma4ForCausalLM):
        packed_modules_mapping: ClassVar = {**Gemma4ForCausalLM.packed_modules_mapping, "qk_proj": [*leaves]}

        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            for attention in (layer.self_attn for layer in self.model.layers if layer.self_attn.use_k_eq_v):
                options = {"bias": attention.config.attention_bias, "quant_config": self.quant_config}
                options["prefix"] = attention.qkv_proj.prefix.replace("qkv_proj", "qk_proj")
                del attention.qkv_proj
                rows = [attention.q_size, attention.kv_size]
                attention.qk_proj = MergedColumnParallelLinear(attention.hidden_size, rows, **options)
                attention.forward = MethodType(_attend_keys, attention)

        def load_weights(self, weights):
            own, loaded = dict(self.named_parameters()), set()

            def others():
                for name, tensor in weights:
                    parent, _, leaf = name.rpartition(".")
                    parent, _, linear = parent.rpartition(".")
                    place = f"{parent}.qk_proj.{leaf}"
                    if linear in leaves and place in own:
                        own[place].weight_loader(own[place], tensor, leaves.index(linear))
                        loaded.add(place)
                    else:
                        yield name, tensor

            return super().load_weights(others()) | loaded

    ModelRegistry.register_model(Gemma4ForCausalLM.__name__, Gemma4Text)


def _attend_keys(self, positions, hidden_states, **kwargs):
    """Replaces the forward of vLLM's attention of Gemma 4 in layers whose values are the keys, normed otherwise."""
    qk, _ = self.qk_proj(hidden_states)
    query, key = (heads.unflatten(-1, (-1, self.head_dim)) for heads in qk.split([self.q_size, self.kv_size], dim=-1))
    value = self.v_norm(key).flatten(-2)
    query, key = self.rotary_emb(positions, self.q_norm(query).flatten(-2), self.k_norm(key).flatten(-2))
    return self.o_proj(self.attn(query, key, value))[0]


def linears_of(model) -> dict:
    """vLLM's linears by module name, without the convolution of linear attention, which vLLM keeps in one."""
    from vllm.model_executor.layers.linear import LinearBase

    found = {name: module for name, module in model.named_modules() if isinstance(module, LinearBase)}
    return {name: module for name, module in found.items() if not name.endswith(".conv1d")}


def check(model) -> None:
    """Raise EngineError unless the linears, experts and norms of vLLM's decoder layers are ours."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    from qerl.engine.vllm.experts import products
    from qerl.engine.vllm.layers import NoisyNorm
    from qerl.engine.vllm.linear import AdapterLinearMethod

    linears = linears_of(model)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, (RMSNorm, GemmaRMSNorm))}
    foreign = [name for name, module in linears.items() if not isinstance(module.quant_method, AdapterLinearMethod)]
    foreign += [name for name, module in norms.items() if not isinstance(module, NoisyNorm)]
    if not any(name.endswith(".conv1d") for name, _ in model.named_modules()):  # Gemma's trainer has another stream
        foreign += [name for name, module in norms.items() if isinstance(module, GemmaRMSNorm)]
    if foreign or not linears or not norms:
        raise EngineError(
            f"vLLM built {len(linears)} linears and {len(norms)} norms of which these are not qerl's: {foreign[:4]}; "
            "adapter and noise would not act there. Another vLLM plugin may interfere (VLLM_PLUGINS= switches plugins "
            "off), or this vLLM is not the supported version 0.25.1"
        )
    products(model)
