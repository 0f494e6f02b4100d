"""The gated MLP y = down(silu(gate(x)) * up(x)) as one autograd node that keeps only x, gate, up and the small h.

The kernel that computes the gradients of gate and up in the backward pass also computes the input of `down` again. That
keeps a third less memory at the cost of one more write.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.model import lora
from qerl.model.elementwise import kernels_for


def mlp_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Replaces the forward of a transformers MLP with gate_proj, up_proj, down_proj and SiLU."""
    gate_up, down = lora.parts_of(self.gate_proj, self.up_proj), lora.parts_of(self.down_proj)
    if gate_up is None or down is None:
        return type(self).forward(self, x)
    rows, dtype = x.reshape(-1, x.shape[-1]), lora.product_dtype(x, gate_up)
    y = _MLP.apply(rows, (gate_up, down, dtype), *lora.factors(gate_up), *lora.factors(down))
    return y.view(*x.shape[:-1], y.shape[1])


class _MLP(torch.autograd.Function):
    """See the module docstring."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, block: tuple, *adapter: torch.Tensor) -> torch.Tensor:
        gate_up, down, dtype = block
        ctx.gate_up, ctx.down, ctx.x_dtype, x = gate_up, down, x.dtype, x.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            x = lora.input_of(x, gate_up)
            inner, h_gate_up = lora.forward(x, gate_up)
            y, h_down = lora.forward(lora.input_of(kernels_for(x).swiglu_forward(inner), down), down)
        ctx.save_for_backward(x, inner, h_gate_up, h_down, *adapter)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        x, inner, h_gate_up, h_down, *_ = ctx.saved_tensors
        grad = grad.to(x.dtype)
        with torch.autocast(grad.device.type, enabled=False):
            g, upstream = lora.backward_to_h(grad, ctx.down), lora.upstream_of(grad, ctx.down)
            activation = lora.backward_to_input(upstream, g, ctx.down)
            # Where both are rounded to 8 bits next, one kernel less has to read them for their largest magnitudes.
            largest = torch.empty(2, dtype=torch.int32, device=x.device) if upstream.rounded() is not None else None
            # `activation` held its own gradient until here; this call overwrites it with the activation itself.
            grad_inner = kernels_for(x).swiglu_backward_(inner, activation, largest)
            of_inner, of_activation = (None, None) if largest is None else largest
            read = lora.input_of(activation, ctx.down)
            known = of_activation if read is activation else None
            down_grads = lora.backward_to_factors(upstream, read, h_down, g, ctx.down, known)
            del activation, read
            g = lora.backward_to_h(grad_inner, ctx.gate_up)
            upstream = lora.upstream_of(grad_inner, ctx.gate_up, of_inner)
            dx = lora.backward_to_input(upstream, g, ctx.gate_up) if ctx.needs_input_grad[0] else None
            grads = lora.backward_to_factors(upstream, x, h_gate_up, g, ctx.gate_up)
        return None if dx is None else dx.to(ctx.x_dtype), None, *grads, *down_grads
