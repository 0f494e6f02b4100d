"""The layers that qerl registers with vLLM: the quantization methods, and the norm. Importing this registers them.

A checkpoint with 4-bit activations is opened as one with 16-bit ones, so that vLLM chooses no kernel by its own idea of
them (without 4-bit hardware it would leave them in 16 bits); the products round their input themselves.

The residual stream, which vLLM's layers pass from norm to norm, is float32 from the first sum on, as in the trainer
(`qerl.model.layers`). Rounding it to 16 bits in each layer would cause most of the difference between the two.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import extract_layer_index

from qerl.base.errors import EngineError
from qerl.checkpoint.activations import INPUT_SCALE, kind_of_activations
from qerl.checkpoint.experts import FULL
from qerl.checkpoint.folder import format_of as format_of_folder
from qerl.checkpoint.shards import TensorReader, read_tensors
from qerl.engine.vllm import LOADER, kernels, twins
from qerl.engine.vllm.attention import DecodeImpl, rotates_inside
from qerl.engine.vllm.experts import DenseExpertsMethod, NVFP4ExpertsMethod
from qerl.engine.vllm.fp8 import FP8BlockMethod
from qerl.engine.vllm.linear import AdapterLinearMethod, KeptMethod, Options, QerlNvFp4LinearKernel, is_kept
from qerl.engine.vllm.sync import format_of
from qerl.formats import BF16, FP8_BLOCK, MIXED, NVFP4
from qerl.formats.fp8.format import OTHER_METHOD, rounds_input, unquantized_modules
from qerl.formats.fp8.layout import SCALE


class ChosenByName:
    """A configuration that vLLM takes where its option `quantization` names `method`, whatever the checkpoint says."""

    method: ClassVar[str]

    def get_name(self) -> str:
        return self.method

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None):
        return cls.method if user_quant == cls.method else None


class OwnConfig(QuantizationConfig):
    """What vLLM asks of every configuration, for those that are not made from one of vLLM's."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


@register_quantization_config(NVFP4.vllm_method)
class QerlNVFP4Config(ChosenByName, CompressedTensorsConfig):
    """compressed-tensors' `nvfp4-pack-quantized`; each linear, quantized or not, has its adapter."""

    method = NVFP4.vllm_method
    activations = "none"  # how quantized linears round their input

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QerlNVFP4Config:
        groups = {name: {**group, "input_activations": None} for name, group in config["config_groups"].items()}
        made = super().from_config({**config, "config_groups": groups})
        made.activations = NVFP4.activations(config)
        return made

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        options = Options.current()
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix, options)
        if isinstance(layer, LinearBase) and is_kept(prefix):
            return KeptMethod(UnquantizedLinearMethod(), options)
        method = super().get_quant_method(layer, prefix)
        if not isinstance(layer, LinearBase):
            return method
        scheme = getattr(layer, "scheme", None)
        if options.kernel == "qerl" and isinstance(getattr(scheme, "kernel", None), NvFp4LinearKernel):
            scheme.kernel = QerlNvFp4LinearKernel()
        return AdapterLinearMethod(method, options, "none" if scheme is None else self.activations)

    def _experts_method(self, layer: RoutedExperts, prefix: str, options: Options) -> QuantizeMethodBase:
        """All experts of a layer are quantized, or none is. Raises EngineError if only some are, or round their
        input."""
        leaves = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        kept = {should_ignore_layer(f"{prefix}.0.{leaf}", self.ignore) for leaf in leaves}
        if kept == {True}:
            return DenseExpertsMethod(layer, options)
        if kept == {False} and self.activations == "none":
            return NVFP4ExpertsMethod(layer, options)
        raise EngineError(
            f"{prefix} has experts that are quantized in part, or that round their input, which qerl does not serve "
            "with vLLM: run `qerl quantize` on the 16-bit model"
        )


@register_quantization_config(BF16.vllm_method)
class QerlBF16Config(OwnConfig):
    """A model that is not quantized; each linear has its adapter."""

    def get_name(self) -> str:
        return BF16.vllm_method

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QerlBF16Config:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            return DenseExpertsMethod(layer, Options.current())
        if isinstance(layer, LinearBase):
            kind = KeptMethod if is_kept(prefix) else AdapterLinearMethod
            return kind(UnquantizedLinearMethod(), Options.current())
        return None


@register_quantization_config(FP8_BLOCK.vllm_method)
class QerlFP8Config(ChosenByName, OwnConfig):
    """FP8 in blocks, as compressed-tensors or as DeepSeek and Qwen lay it out; each linear has its adapter."""

    method = FP8_BLOCK.vllm_method

    def __init__(self, rounds_input: bool, scale_name: str, unquantized: list[str]) -> None:
        super().__init__()
        self.rounds_input, self.scale_name, self.unquantized = rounds_input, scale_name, unquantized

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QerlFP8Config:
        others = config.get("quant_method") == OTHER_METHOD
        return cls(rounds_input(config), f"{SCALE}_inv" if others else SCALE, unquantized_modules(config))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            raise EngineError(
                f"{prefix}: experts in FP8 are not served: quantize the model with `--scheme {NVFP4.scheme}`"
            )
        if not isinstance(layer, LinearBase):
            return None
        if is_kept(prefix):
            return KeptMethod(UnquantizedLinearMethod(), Options.current())
        kept = should_ignore_layer(prefix, self.unquantized, self.packed_modules_mapping)
        method = UnquantizedLinearMethod() if kept else FP8BlockMethod(self.rounds_input, self.scale_name)
        return AdapterLinearMethod(method, Options.current())


@register_quantization_config(MIXED.vllm_method)
class QerlMixedConfig(ChosenByName, OwnConfig):
    """A format for each linear, as `opening.served_config` tells it."""

    method = MIXED.vllm_method

    def __init__(self, linears: dict[str, str]) -> None:
        super().__init__()
        self.linears = linears
        self.configs: dict[str, QuantizationConfig] = {
            NVFP4.name: QerlNVFP4Config.from_config(NVFP4.quantization_config([])),
            FP8_BLOCK.name: QerlFP8Config.from_config(FP8_BLOCK.quantization_config([], "none")),
            BF16.name: QerlBF16Config(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QerlMixedConfig:
        return cls(config["linears"])

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        config = self.configs[format_of(prefix, self.linears) or BF16.name]
        config.packed_modules_mapping = self.packed_modules_mapping
        return config.get_quant_method(layer, prefix)


@register_model_loader(LOADER)
class OwnNamesLoader(DefaultModelLoader):
    """Gives vLLM a folder's tensors as the trainer reads them (`qerl.checkpoint.shards.read_tensors`)."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Does nothing, as the folder is here."""

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        self.counter_before_loading_weights = time.perf_counter()
        folder = Path(model_config.model)
        tensors = read_tensors(folder)
        static = kind_of_activations(folder, format_of_folder(folder)) == "static"
        with TensorReader(tensors) as read:
            for name in tensors:
                if static or not name.endswith(f".{INPUT_SCALE}"):  # vLLM has a place for it only there
                    yield name, read(name)


class _FillGain(QuantizeMethodBase):
    """Fills `gain`; vLLM calls it once the weights are loaded, as it does for quantization methods."""

    def create_weights(self, layer: torch.nn.Module, *weight_args, **extra_weight_attrs) -> None:
        """Does nothing, as the norm already has its weight."""

    def apply(self, layer: torch.nn.Module, *args, **kwargs) -> torch.Tensor:
        raise NotImplementedError("a norm is not a linear")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.gain.copy_(layer.weight.data).add_(layer.offset)


class NoisyNorm(torch.nn.Module):
    """The part that our norms have in common, which stands before vLLM's class among their bases.

    It multiplies by `gain`, a float32 buffer that starts with the checkpoint's values and later holds trained weights
    and noise, finer than bfloat16. The checkpoint's bfloat16 `weight`, which the trainer shares, is left as it is. The
    captured CUDA graphs read `gain`, and it is written in place. Everything is computed in float32 and rounded once. If
    x_hat were rounded before the product as well, as in transformers' clean norms, it would have only 128 different
    mantissas, too few for noise of sigma 1e-4 to come out unbiased in each channel.

    Remove it when vLLM's RMSNorm takes a float32 weight in a bfloat16 model, multiplies by it before rounding, allows
    it to be overwritten, and keeps the residual stream in float32.
    """

    offset = 0.0  # what the gain is more than the weight

    def __init__(self, hidden_size: int, eps: float = 1e-6, *args, **kwargs) -> None:
        super().__init__(hidden_size, eps, *args, **kwargs)
        self.register_buffer("gain", torch.ones(hidden_size, dtype=torch.float32), persistent=False)
        self.quant_method = _FillGain()

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if getattr(self, "variance_size_override", None) is not None:
            raise NotImplementedError("an RMSNorm over a part of the hidden size is not supported")
        out, wide = twins.add_norm(x, residual, self.gain, self.variance_epsilon)
        return out if residual is None else (out, wide)

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if getattr(self, "variance_size_override", None) is not None or x.dim() > 3:
            return self.forward_native(x, residual)
        out, wide = kernels.add_norm(x, residual, self.gain, self.variance_epsilon)
        return out if residual is None else (out, wide)


@RMSNorm.register_oot
class NoisyRMSNorm(NoisyNorm, RMSNorm):
    """Replaces every RMSNorm of vLLM in this process."""


@GemmaRMSNorm.register_oot
class NoisyGemmaRMSNorm(NoisyNorm, GemmaRMSNorm):
    """Replaces the norms whose gain is 1 + weight, as in Qwen3.5.

    Its norms of queries and keys are no block norms, and vLLM's one launch for both reads their weights instead.
    """

    offset = 1.0


@SiluAndMul.register_oot
class OneLaunchSiluAndMul(SiluAndMul):
    """The activation between the products of an MLP."""

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.swiglu(x) if x.dim() == 2 and x.is_contiguous() else super().forward_cuda(x)


class _OneLaunch(RotaryEmbedding):
    """The rotation of queries and keys, where their attention does not do it (`rotate_inside_`)."""

    attention = ""  # the layer that does

    def forward_cuda(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        plain = key is not None and self.is_neox_style and positions.dim() == 1 and query.dim() == 2
        if not plain:
            return super().forward_cuda(positions, query, key)
        if self.attention and rotates_inside(self.attention):
            return query, key
        kernels.rotate_(positions, query, key, self._match_cos_sin_cache_dtype(query), self.head_size)
        return query, key


@RotaryEmbedding.register_oot
class OneLaunchRotaryEmbedding(_OneLaunch):
    """Replaces vLLM's plain rotation."""


@Llama3RotaryEmbedding.register_oot
class OneLaunchLlama3RotaryEmbedding(_OneLaunch, Llama3RotaryEmbedding):
    """Replaces vLLM's rotation with the frequencies of Llama 3, which are in its table."""


@LogitsProcessor.register_oot
class CappedLogits(LogitsProcessor):
    """A cap on logits, as in Gemma 4, is computed in float32 as in the trainer; vLLM rounds to 16 bits at each step."""

    def forward(
        self, lm_head: torch.nn.Module, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.soft_cap is None:
            return super().forward(lm_head, hidden_states, embedding_bias)
        logits = self._get_logits(hidden_states, lm_head, embedding_bias).float()
        return logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap * self.scale)


@QKVParallelLinear.register_oot
class OwnQKVParallelLinear(QKVParallelLinear):  # vLLM finds the target "Linear" in the name
    """Stays empty where values are keys, as in some layers of Gemma 4: `register_gemma` puts another in its place.

    In a folder whose other linears are ignored, the rows of values would have no format.
    """

    def __init__(self, *sizes: Any, prefix: str = "", **options: Any) -> None:
        config = getattr(get_current_vllm_config().model_config, "hf_text_config", None)
        if getattr(config, "attention_k_eq_v", False) and config.layer_types[extract_layer_index(prefix)] == FULL:
            torch.nn.Module.__init__(self)
            self.prefix = prefix
        else:
            super().__init__(*sizes, prefix=prefix, **options)


ROTATED = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention")


def rotate_inside_(model: torch.nn.Module) -> None:
    """Let attention rotate queries and keys in decode steps: a launch less for each layer.

    It is done where nothing is computed between the rotation and attention, and all layers of a rotation can.
    """
    found: dict[_OneLaunch, list[torch.nn.Module]] = {}
    for module in model.modules():
        if isinstance(rotary := getattr(module, "rotary_emb", None), _OneLaunch):
            found.setdefault(rotary, []).append(module)
    for rotary, modules in found.items():
        whole = rotary.is_neox_style and rotary.rotary_dim == rotary.head_size
        if not whole or any(type(module).__name__ not in ROTATED for module in modules):
            continue
        impls = [module.attn.impl for module in modules]
        if all(isinstance(impl, DecodeImpl) and impl.can_rotate() for impl in impls):
            rotary.attention = modules[0].attn.layer_name
            for impl in impls:
                impl.rotate_by_(rotary.cos_sin_cache)
