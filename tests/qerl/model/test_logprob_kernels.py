"""The kernels over logits against float64 and against their twin. Last run on an H200 on 2026-11-22.

Without a card but with triton installed, run them by
`TRITON_INTERPRET=1 pytest -m gpu tests/qerl/model/test_logprob_kernels.py`.
"""

import os

import pytest
import torch

from qerl.model.logprobs import Head, kernel_chunk, reference_chunk

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.gpu(instead=INTERPRETED)
DEVICE = "cpu" if INTERPRETED else "cuda"
TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 0.7])

if INTERPRETED or torch.cuda.is_available():
    from qerl.model import kernels


def exact(logits, targets, temperature):
    """(logprobs, entropies, derivatives of both with respect to the divided logits) in float64."""
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    p = log_p.exp()
    entropies = -(p * log_p).sum(-1)
    onehot = torch.nn.functional.one_hot(targets, logits.shape[1])
    return log_p.gather(1, targets[:, None])[:, 0], entropies, onehot - p, -p * (log_p + entropies[:, None])


def random_logits(spread, columns, seed=0):
    """(logits, targets), with rows in which one token has almost all of the probability."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(9, columns, generator=generator)
    targets = torch.randint(columns, (9,), generator=generator)
    logits[0, targets[0]] = 4 * spread + 30  # likely
    logits[1, 5], logits[1, targets[1]] = 4 * spread + 30, -spread  # likely, but not the target
    logits[2] = 3.0  # all equal
    logits[3] += 1e4
    return logits.to(DEVICE), targets.to(DEVICE)


@TEMPERATURES
@pytest.mark.parametrize("columns", [7, 4096, 10007, 32000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
def test_values_and_slopes_equal_those_in_float64_within_rounding(spread, columns, temperature):
    logits, targets = random_logits(spread, columns)
    measured = kernels.measure_logits(logits, targets, temperature)
    slopes = kernels.slopes_of_logits(logits, targets, measured, (temperature, 0.0), (torch.float32, True))
    logprobs, entropies, slope, entropy_slope = exact(logits, targets, temperature)
    size = 2e-7 * (logits.abs().amax(1) / temperature + 10)  # the last bit of the largest logit
    assert ((measured.logprobs - logprobs).abs() < 4 * size).all()
    assert ((measured.entropies - entropies).abs() < 4 * size * (1 + entropies)).all()
    p = slope.abs().minimum(1 - slope.abs()) + 1e-2
    assert ((slopes[0] - slope).abs() < 8 * size[:, None] * p).all()
    assert ((slopes[1] - entropy_slope).abs() < 8 * size[:, None] * (1 + entropies[:, None])).all()
    rounded = kernels.slopes_of_logits(logits, targets, measured, (temperature, 0.0), (torch.bfloat16, False))
    assert len(rounded) == 1
    if not INTERPRETED:  # the interpreter truncates instead of rounding
        assert torch.equal(rounded[0], slopes[0].bfloat16())


@TEMPERATURES
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_a_chunk_agrees_with_the_twin_and_repeats_to_the_bit(temperature, cap):
    """Compared are values and the derivatives by the hidden states, for a head in its own dtype and with a bias."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(rows, 64, generator=generator).to(DEVICE) for rows in (40, 5003))
    targets = torch.randint(5003, (40,), generator=generator).to(DEVICE)
    head = Head(weight, torch.randn(5003, generator=generator).to(DEVICE), temperature, cap)
    results = []
    for compute in (kernel_chunk, reference_chunk, kernel_chunk):
        outputs, slopes = torch.empty(2, 40, device=DEVICE), [torch.empty_like(hidden) for _ in range(2)]
        compute(hidden, targets, head, outputs, slopes)
        results.append((outputs, *slopes))
    for ours, twin, again in zip(*results, strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours, again)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_another_number_of_rows_compiles_no_further_kernel(compiled):
    """The last chunk of a step may have any number of tokens, and its targets may begin at any address."""
    logits, targets = torch.randn(64, 1000, device=DEVICE), torch.randint(1000, (70,), device=DEVICE)

    def chunk(rows, start):
        measured = kernels.measure_logits(logits[:rows], targets[start : start + rows], 0.9)
        kernels.slopes_of_logits(
            logits[:rows], targets[start : start + rows], measured, (0.9, 0.0), (torch.bfloat16, True)
        )

    chunk(64, 0)
    compiled.clear()
    for rows, start in ((1, 0), (47, 0), (33, 1), (48, 6), (2, 3)):
        chunk(rows, start)
    assert compiled == []
