"""The kernel for the products in the backward pass of linear attention.

Without a GPU: `TRITON_INTERPRET=1 pytest -m gpu tests/qerl/model/test_delta_products.py`.
"""

import math
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
LENGTHS = [1, 63, 64, 65, 150]
CHUNKS = [(n, i) for n, length in enumerate(LENGTHS) for i in range(-(-length // 64))]
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0)


@pytest.mark.gpu(instead=INTERPRETED)
@pytest.mark.parametrize(
    ("heads", "shared", "key_dim", "value_dim"), [(2, 3, 128, 128), (2, 1, 128, 64), (1, 2, 24, 80)]
)
def test_the_kernel_has_the_gradients_of_each_chunk(heads, shared, key_dim, value_dim):
    """Oracle: autograd in float64 of what a chunk computes, for sequences whose ends are off the grid of 64 tokens.

    One has a state to begin with as any other chunk."""
    from qerl.model.delta_kernels import products_backward

    generator, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16

    def rand(*shape):
        return torch.randn(1, *shape, generator=generator, dtype=torch.float64).to(dtype).double()

    values = heads * shared
    q, k, w = rand(tokens, heads, key_dim), rand(tokens, heads, key_dim), rand(tokens, values, key_dim)
    v, do, dv = (rand(tokens, values, value_dim) for _ in range(3))
    h, dh = (rand(len(CHUNKS), values, key_dim, value_dim) for _ in range(2))
    natural = torch.zeros(1, tokens, values, dtype=torch.float64)
    for number, index in CHUNKS:
        own = chunk(number, index)
        steps = -torch.rand(own.stop - own.start, values, generator=generator, dtype=torch.float64)
        natural[0, own] = steps.cumsum(0)
    exact = gradients((q, k), (v, do, dv), (h, dh), natural)
    names = {"w": w, "dv": dv, "g": (natural / math.log(2)).float()}
    of = {"cu_seqlens": STARTS, "chunk_indices": torch.tensor(CHUNKS), "scale": 0.3}
    inputs = [each.to(dtype).to(DEVICE) for each in (q, k, v, do, h, dh)]
    names = {name: (each if name == "g" else each.to(dtype)).to(DEVICE) for name, each in names.items()}
    of = {name: each.to(DEVICE) if isinstance(each, torch.Tensor) else each for name, each in of.items()}
    found = products_backward(*inputs, **names, **of)
    assert [each.dtype for each in found] == [dtype, dtype, dtype, torch.float32]
    for name, mine, right in zip(("dq", "dk", "dw", "dg"), found, exact, strict=True):
        error = (mine.cpu().double() - right).norm() / right.norm()
        assert error < (1e-5 if INTERPRETED else 6e-3), f"{name}: {error}"
    again = products_backward(*inputs, **names, **of)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def chunk(number, index):
    """The tokens of a sequence's chunk."""
    begin = int(STARTS[number]) + 64 * index
    return slice(begin, min(begin + 64, int(STARTS[number + 1])))


def gradients(keyed, valued, states, natural):
    """dq, dk, dw and the gradient of the cumulative decays `natural`, in float64."""
    (q, k), (v, do, dv), (h, dh) = keyed, valued, states
    shared = v.shape[2] // q.shape[2]
    exact = [torch.zeros_like(each) for each in (q, k, v.new_zeros(*v.shape[:3], q.shape[3]), natural)]
    for place, (number, index) in enumerate(CHUNKS):
        own = chunk(number, index)
        leaves = [each[0, own].clone().requires_grad_() for each in (q, k, natural)]
        q_, k_, g_ = leaves
        q_, k_ = (each.repeat_interleave(shared, 1).transpose(0, 1) for each in (q_, k_))
        v_, g_, state = v[0, own].transpose(0, 1), g_.t(), h[0, place]
        above = torch.ones(g_.shape[1], g_.shape[1]).triu(1) > 0
        decays = (g_[:, :, None] - g_[:, None]).masked_fill(above, -torch.inf)
        out = 0.3 * (g_.exp()[..., None] * (q_ @ state) + (q_ @ k_.mT * decays.exp()) @ v_)
        after = g_[:, -1, None, None].exp() * state + ((g_[:, -1:] - g_).exp()[..., None] * k_).mT @ v_
        loss = (out * do[0, own].transpose(0, 1)).sum() + (after * dh[0, place]).sum()
        for result, gradient in zip((0, 1, 3), torch.autograd.grad(loss, leaves), strict=True):
            exact[result][0, own] = gradient
        exact[2][0, own] = -(dv[0, own].transpose(0, 1) @ state.mT).transpose(0, 1)
    return exact
