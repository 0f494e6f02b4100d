"""The kernels around the recurrence of linear attention against their twins in float64, and against autograd of these.

Without a card but with triton installed, run them by
`TRITON_INTERPRET=1 pytest -m gpu tests/qerl/model/test_delta_kernels.py` (for Triton 3.6 with numpy before 2.4).
"""

import os

import pytest
import torch

from qerl.model import gated_delta
from qerl.model.gated_delta import convolve, convolve_twin, gated_norm, gated_norm_twin, states_of
from qerl.model.packing import Copies, Layout, pack

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.gpu(instead=INTERPRETED)
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter truncates to bfloat16 instead of rounding.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
OF_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=str)
KEYS, VALUES, TAPS = (32, 64, 4) if INTERPRETED else (256, 768, 4)
GROUPS = [(1, [1, 2, 3, 9]), (2, [3, 1, 1]), (3, [2, 40]), (35, [1, 2, 3, 4, 5, 6]), (1, [1]), (2, [30]), (7, [1, 1])]


if INTERPRETED or torch.cuda.is_available():
    from qerl.model import delta_kernels


@pytest.fixture(autouse=True)
def takes_kernels(monkeypatch):
    monkeypatch.setattr(gated_delta, "has_kernels", lambda x: True)


def reads_of(groups):
    """(tokens, reads) of a packed row of prompts, by their lengths and those of their completions."""
    width, most = max(prompt for prompt, _ in groups), max(max(completions) for _, completions in groups)
    ids, mask = [], []
    for number, (prompt, completions) in enumerate(groups):
        for completion in completions:
            ids.append(torch.full((width + most,), 1 + number))
            mask.append(torch.zeros(width + most, dtype=torch.long))
            mask[-1][width - prompt : width + completion] = 1
    row = pack(torch.stack(ids), torch.stack(mask), most, Layout(torch.device("cpu"), prompts_first=True))
    tokens = row.input_ids.shape[1]
    return tokens, states_of(row.sequences, tokens, TAPS).reads


def on_device(reads):
    return Copies(*(part.to(DEVICE) for part in reads))


def inputs_of(tokens, dtype):
    """[q, k, v, gate] before the convolution, its weight, and the gradients of what it gives; on the CPU."""
    generator = torch.Generator().manual_seed(7)
    both = torch.randn(tokens, 2 * (KEYS + VALUES), generator=generator).to(dtype)
    weight = torch.randn(2 * KEYS + VALUES, TAPS, generator=generator).to(dtype)
    return both, weight, [torch.randn(tokens, n, generator=generator).to(dtype) for n in (KEYS, KEYS, VALUES, VALUES)]


def results_of(function, inputs, grads, wanted):
    """What a function gives of its inputs, and the gradients by those of them that are `wanted`; on the CPU."""
    leaves = [each.clone().requires_grad_(number in wanted) for number, each in enumerate(inputs)]
    found = function(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    gradients = torch.autograd.grad(found, [leaf for leaf in leaves if leaf.requires_grad], grads)
    return [each.detach().cpu() for each in (*found, *gradients)]


def convolved(both, weight, grads, reads, trained=True):
    inputs, grads = [both.to(DEVICE), weight.to(DEVICE)], [grad.to(DEVICE) for grad in grads]
    reads = on_device(reads)
    return results_of(lambda x, w: convolve(x, w, reads, (KEYS, VALUES)), inputs, grads, {0, 1} if trained else {0})


def exactly_convolved(both, weight, grads, reads):
    """In float64, with plain indexing."""

    def function(x, w):
        rows = torch.cat([x[:, : len(w)], x.new_zeros(1, len(w))])[reads.rows].unflatten(0, (-1, TAPS))
        out = torch.nn.functional.silu(torch.einsum("tjc,cj->tc", rows, w))
        return *out.split([KEYS, KEYS, VALUES], 1), x[:, len(w) :]

    return results_of(function, [both.double(), weight.double()], [grad.double() for grad in grads], {0, 1})


def check_rounding(found, exact):
    """Equal but for a last bit: half of one from rounding, and less from float32."""
    for ours, right in zip(found, exact, strict=True):
        size = torch.finfo(ours.dtype).eps
        few = 2e-6 * (1 + right.abs().amax(0, keepdim=True))  # sums of numbers of other signs in float32
        assert ((ours.double() - right).abs() <= 0.501 * size * right.abs() + few).all()


@OF_DTYPES
def test_the_convolution_is_that_in_float64_and_so_are_its_gradients(dtype):
    """Over sequences shorter than the taps, prompts shorter than they reach back, and runs of programs that end there.

    Last come a row of one token and one that is a multiple of what a program has."""
    for groups in (GROUPS, [(1, [1])], [(62, [1, 1])]):
        tokens, reads = reads_of(groups)
        inputs = inputs_of(tokens, dtype)
        found, exact = convolved(*inputs, reads), exactly_convolved(*inputs, reads)
        assert [each.dtype for each in found] == [dtype] * 6
        check_rounding(found[:5], exact[:5])
        torch.testing.assert_close(found[5].double(), exact[5], rtol=torch.finfo(dtype).eps, atol=1e-4)
        frozen = convolved(*inputs, reads, trained=False)
        assert len(frozen) == 5
        assert all(map(torch.equal, frozen, found[:5]))


@OF_DTYPES
def test_the_convolutions_twin_is_the_same(dtype):
    tokens, reads = reads_of(GROUPS)
    both, weight, grads = inputs_of(tokens, dtype)
    twin = results_of(lambda x, w: convolve_twin(x, w, reads, (KEYS, VALUES)), [both, weight], grads, {0, 1})
    check_rounding(twin[:5], exactly_convolved(both, weight, grads, reads)[:5])


def test_the_convolution_repeats_to_the_bit_however_its_programs_are_cut(monkeypatch):
    tokens, reads = reads_of(GROUPS)
    inputs = inputs_of(tokens, torch.float32)
    found = convolved(*inputs, reads)
    assert all(map(torch.equal, found, convolved(*inputs, reads)))
    sizes = {"COLUMNS": 16, "TOKENS": 2, "BACKWARD_COLUMNS": 8, "RUN": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(delta_kernels, name, size)
    assert all(map(torch.equal, found[:5], convolved(*inputs, reads)[:5]))


def test_a_tokens_gradient_does_not_go_into_other_sequences():
    """Of all tokens only the first of a completion has a gradient: its prompt's last three get some, others none."""
    tokens, reads = reads_of([(5, [2, 6]), (4, [3, 2])])
    both, weight, grads = inputs_of(tokens, torch.float32)
    for grad in grads:
        grad[:11] = grad[12:] = 0  # 11 is the first token of the second completion
    by_x = convolved(both, weight, grads, reads)[4][:, : len(weight)]
    assert by_x.any(1).nonzero()[:, 0].tolist() == [2, 3, 4, 11]


@OF_DTYPES
@pytest.mark.parametrize(("tokens", "heads", "width"), [(7, 3, 128), (5, 6, 12), (1, 1, 16)])
def test_the_gated_norm_is_that_in_float64_and_so_are_its_gradients(tokens, heads, width, dtype):
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(tokens, heads, width, generator=generator).to(dtype)
    wide = torch.randn(tokens, heads * width + 24, generator=generator).to(dtype)
    weight, grad = torch.rand(width, generator=generator), torch.randn(x.shape, generator=generator).to(dtype)
    weight = weight if dtype == torch.float32 else weight.to(dtype)

    def of(norm):
        return lambda x, wide, weight: norm(x, wide[:, 24:], weight, 1e-6)

    placed = [each.to(DEVICE) for each in (x, wide, weight)]
    found = results_of(of(gated_norm), placed, [grad.to(DEVICE)], {0, 1, 2})
    twin = results_of(of(gated_norm_twin), [x, wide, weight], [grad], {0, 1, 2})
    exact = results_of(of(gated_norm_twin), [each.double() for each in (x, wide, weight)], [grad.double()], {0, 1, 2})
    check_rounding(found, exact)
    check_rounding(twin[:1], exact[:1])
    assert all(map(torch.equal, found, results_of(of(gated_norm), placed, [grad.to(DEVICE)], {0, 1, 2})))
    frozen = results_of(of(gated_norm), placed, [grad.to(DEVICE)], {0, 1})
    assert all(map(torch.equal, frozen, found[:3]))
