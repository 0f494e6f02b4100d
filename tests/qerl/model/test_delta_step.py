"""The decode step of linear attention against its twin.

Without a GPU: `TRITON_INTERPRET=1 pytest -m gpu tests/qerl/model/test_delta_step.py`.
"""

import os

import pytest
import torch

from qerl.model.gated_delta import DeltaLayer, delta_rule_twin, delta_step_twin_

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def layer_and_inputs(rows, heads, dims, dtype, device="cpu"):
    """(qkvz, ba, states, what a layer keeps), strided as the parts of wider matrices, and of the cache's pages, are."""
    key_heads, value_heads = heads
    key_dim, value_dim = dims
    generator = torch.Generator().manual_seed(0)

    def rand(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    qkvz = rand(rows, 2 * (key_heads * key_dim + value_heads * value_dim) + 8, dtype=dtype)[:, :-8]
    ba = rand(rows, 2 * value_heads + 8, dtype=dtype)[:, :-8]
    size = value_heads * value_dim * key_dim
    states = rand(2 * rows + 1, size + 8)[:, :size].view(-1, value_heads, value_dim, key_dim)
    return qkvz, ba, states, DeltaLayer(rand(value_heads), 10 * rand(value_heads), rand(value_dim, dtype=dtype), 1e-6)


@pytest.mark.gpu(instead=INTERPRETED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "dims"),
    [
        (5, (2, 6), (128, 128)),
        (3, (2, 2), (16, 24)),
        (1, (16, 32), (128, 128)),
        (12, (2, 6), (128, 128)),  # from 9 on fewer warps
        (9, (1, 2), (96, 80)),
    ],
)
def test_the_kernel_agrees_with_its_twin(rows, heads, dims, dtype):
    """A row with block 0 only fills up a graph: it is zeros, and no state changes."""
    from qerl.model.delta_kernels import delta_step_

    qkvz, ba, states, layer = layer_and_inputs(rows, heads, dims, dtype, DEVICE)
    indices = torch.tensor([[2 * row + 1, -1] for row in range(rows)], dtype=torch.int32, device=DEVICE)[:, 0]
    indices[rows // 2] = 0 if rows > 1 else 1
    before, expected_states = states.clone(), states.clone()
    expected = delta_step_twin_(qkvz, ba, expected_states, indices, layer)
    found = delta_step_(qkvz, ba, states, indices, layer)
    torch.testing.assert_close(states, expected_states, rtol=1e-5, atol=1e-5)
    assert torch.equal(states[0], before[0])
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < {torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 3e-3}[dtype]


def test_a_step_is_that_of_training():
    """Oracle: the recurrence of a packed row, then the gated norm."""
    rows, heads, dims = 4, (2, 6), (8, 16)
    qkvz, ba, states, layer = layer_and_inputs(rows, heads, dims, torch.float32)
    sizes = [heads[0] * dims[0]] * 2 + [heads[1] * dims[1]] * 2
    q, k, v, z = qkvz.split(sizes, 1)
    b, a = ba.chunk(2, 1)
    decay = -layer.log_decay.exp() * torch.nn.functional.softplus(a + layer.bias)
    inputs = q.unflatten(1, (-1, dims[0])), k.unflatten(1, (-1, dims[0])), v.unflatten(1, (-1, dims[1])), decay
    begin = states[1 : rows + 1].mT.contiguous()
    out, ends = delta_rule_twin((*inputs, b.sigmoid()), torch.arange(rows + 1), begin)
    normed = out * (out.square().mean(-1, keepdim=True) + layer.eps).rsqrt() * layer.gain
    normed *= torch.nn.functional.silu(z.unflatten(1, (-1, dims[1])))
    found = delta_step_twin_(qkvz, ba, states, torch.arange(1, rows + 1), layer)
    torch.testing.assert_close(found, normed.flatten(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[1 : rows + 1].mT, ends, rtol=1e-4, atol=1e-5)
