"""vLLM's RMSNorm with its weight in a float32 buffer, so that noise and trained weights below bfloat16's grid act.

The checkpoint's bfloat16 `weight` stays as it is (the trainer shares it). `gain`, float32, is what multiplies: at first
the same values, later trained weights and noise. It is read by the captured CUDA graphs and written in place. All is
computed in float32 and rounded once: rounding x_hat before the product as well, as transformers' clean norms do, would
leave 128 different mantissas, too few for noise of sigma 1e-4 to come out unbiased in each channel.

The residual stream, which vLLM's layers hand from norm to norm, is in float32 from the first sum on, as in the trainer
(`qerl.layers.decoder`): rounded to 16 bits in each layer it makes up most of the difference between the two.

Remove when vLLM's RMSNorm takes a float32 weight in a bfloat16 model, multiplies by it before it rounds, lets it be
overwritten, and keeps the residual stream in float32.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


class _FillGain(QuantizeMethodBase):
    """vLLM calls this once the weights are loaded."""

    def create_weights(self, layer: torch.nn.Module, *weight_args, **extra_weight_attrs) -> None:
        """The norm has its weight already."""

    def apply(self, layer: torch.nn.Module, *args, **kwargs) -> torch.Tensor:
        raise NotImplementedError("a norm is no linear")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.gain.copy_(layer.weight.data)


@RMSNorm.register_oot
class NoisyRMSNorm(RMSNorm):
    """Stands in for every RMSNorm of the process (see the module docstring)."""

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
    """The decorator above registered on import."""
