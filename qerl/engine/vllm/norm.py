"""vLLM's RMSNorm with its weight in a float32 buffer, so that noise and updates finer than bfloat16 take effect.

The checkpoint's bfloat16 `weight`, which the trainer shares, is left as it is. The norm multiplies by `gain` instead, a
float32 buffer that starts with the same values and later holds trained weights and noise. The captured CUDA graphs read
it, and it is written in place. Everything is computed in float32 and rounded once. If x_hat were rounded before the
product as well, as in transformers' clean norms, it would have only 128 different mantissas, too few for noise of sigma
1e-4 to come out unbiased in each channel.

The residual stream, which vLLM's layers pass from norm to norm, is float32 from the first sum on, as in the trainer
(`qerl.model.decoder`). Rounding it to 16 bits in each layer would cause most of the difference between the two.

Remove when vLLM's RMSNorm takes a float32 weight in a bfloat16 model, multiplies by it before rounding, allows it to be
overwritten, and keeps the residual stream in float32.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


class _FillGain(QuantizeMethodBase):
    """Fills `gain`; vLLM calls it once the weights are loaded, as it does for quantization methods."""

    def create_weights(self, layer: torch.nn.Module, *weight_args, **extra_weight_attrs) -> None:
        """Does nothing, as the norm already has its weight."""

    def apply(self, layer: torch.nn.Module, *args, **kwargs) -> torch.Tensor:
        raise NotImplementedError("a norm is no linear")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.gain.copy_(layer.weight.data)


@RMSNorm.register_oot
class NoisyRMSNorm(RMSNorm):
    """Replaces every RMSNorm of vLLM in this process (see the module docstring)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, *args, **kwargs) -> None:
        super().__init__(hidden_size, eps, *args, **kwargs)
        self.register_buffer("gain", torch.ones(hidden_size, dtype=torch.float32), persistent=False)
        self.quant_method = _FillGain()

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.variance_size_override is not None:
            raise NotImplementedError("an RMSNorm over a part of the hidden size is not supported")
        wide = x.float() if residual is None else x.float() + residual.float()
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.variance_epsilon)
        out = (wide * scale * self.gain).to(x.dtype)
        return out if residual is None else (out, wide)

    forward_cuda = forward_native


def register() -> None:
    """Does nothing: importing this module has registered the norm, by the decorator above."""
