"""The draw of a token.

On a CPU the twin is compared with the softmax. With `-m gpu` the Triton
kernels are compared with the twin, on other inputs in each run. Last run on an H200 on 2026-11-22.
"""

import pytest
import torch

from qerl.base.philox import WORD, Words, philox
from qerl.engine.vllm.draw import BLOCK, QUARTER, gumbel, reference_draw, row_keys

GREEDY = 0.0


def test_a_key_has_the_64_bits_of_seed_and_position():
    seeds = torch.tensor([0x299F31D0A4093822, -1, 0])
    positions = torch.tensor([0, 2**40 + 5, 0])
    keys = row_keys(seeds, positions)
    one = [torch.tensor([word]) for word in (5, 2**8, 0, 0)]
    assert keys[1] == philox(Words(*one), (torch.tensor([WORD]),) * 2).first
    assert keys[2] == 0x6627E8D5
    assert (
        len({*keys.tolist(), *row_keys(seeds, positions + 1).tolist(), *row_keys(seeds + 1, positions).tolist()}) == 9
    )


def test_the_noise_has_a_standard_gumbel_distribution():
    """A Gumbel variable has the mean gamma (Euler's) and the variance pi^2 / 6. No two logits of a row share a word."""
    noise = gumbel(torch.tensor([3, 4]), 3 * BLOCK - 7)
    assert noise.shape == (2, 3 * BLOCK - 7)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.1)
    assert all(len(row.unique()) > 0.999 * len(row) for row in noise)
    assert torch.equal(gumbel(torch.tensor([4]), 100)[0], noise[1, :100])
    assert noise.isfinite().all()


def drawn(logits, temperature=1.0, seed=1, first=0):
    """A token and its logprob for each row; positions start at `first`."""
    positions = torch.arange(first, first + len(logits))
    request = torch.zeros(len(logits), dtype=torch.int32)
    return reference_draw(logits, request, torch.tensor([temperature]), torch.tensor([seed]), positions)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_are_as_frequent_as_the_softmax_says(temperature):
    """Tokens are in each quarter of two blocks. A chi-square of 9 degrees is above 33.7 in one of 10,000 cases."""
    some = torch.tensor([0, 1, 900, QUARTER, 2000, 3 * QUARTER - 1, BLOCK - 1, BLOCK, BLOCK + 500, BLOCK + QUARTER])
    logits = torch.full((BLOCK + QUARTER + 1,), -1e4)
    logits[some] = temperature * torch.linspace(0, 2, len(some))
    tokens, _ = drawn(logits.expand(600, -1), temperature)
    observed = (tokens[:, None] == some).sum(0)
    expected = 600 * torch.linspace(0, 2, len(some)).softmax(0)
    assert observed.sum() == 600
    assert ((observed - expected) ** 2 / expected).sum() < 33.7


def test_the_logprob_is_that_of_the_drawn_token():
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) * 3
    tokens, logprobs = drawn(logits, 0.7)
    expected = torch.log_softmax(logits / 0.7, 1)[torch.arange(40), tokens]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert len(tokens.unique()) > 20


def test_at_temperature_zero_the_first_of_the_largest_logits_is_taken():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    logits[:, 7], logits[:, 90] = 9.0, 9.0
    for seed in (1, 2):
        tokens, logprobs = drawn(logits, GREEDY, seed)
        assert tokens.tolist() == [7] * 5
        torch.testing.assert_close(logprobs, logits.log_softmax(1)[:, 7])


def test_a_seed_and_a_position_determine_the_tokens_and_others_give_others():
    logits = torch.zeros(30, 1000)
    tokens, _ = drawn(logits, seed=11)
    assert torch.equal(drawn(logits, seed=11)[0], tokens)
    assert (drawn(logits, seed=12)[0] == tokens).sum() < 5
    assert torch.equal(drawn(logits, seed=11, first=10)[0][:20], tokens[10:])  # in whatever row it is
    assert len(tokens.unique()) > 25


def random_batch(rows, vocabulary, dtype):
    """The inputs of a step: rows of a wider tensor, whose other columns would win, and requests from a larger table."""
    wide = torch.full((rows, vocabulary + 24), 1e30, device="cuda", dtype=dtype)
    logits = wide[:, :vocabulary].normal_(0, 3)
    logits[1:2, :BLOCK] = float("-inf")
    table = 2 * rows + 3
    request = torch.randperm(table, device="cuda")[:rows].int()
    temperature = torch.rand(table, device="cuda") * 1.7 + 0.3
    temperature[request[2::4]] = GREEDY
    seeds = torch.randint(-(2**63), 2**63 - 1, (table,), device="cuda")
    positions = torch.randint(2**20, (rows,), device="cuda")
    return logits, request, temperature, seeds, positions


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("vocabulary", [5003, 152064])
@pytest.mark.parametrize("rows", [1, 7, 128])
def test_the_kernels_draw_what_the_twin_draws(fresh_seed, rows, vocabulary, dtype):
    """The same token, unless noisy logits are equal within float32 rounding, and the logprob of that token."""
    from qerl.engine.vllm.draw_kernel import draw

    logits, request, temperature, seeds, positions = batch = random_batch(rows, vocabulary, dtype)
    tokens, logprobs = draw(*batch)
    expected, _ = reference_draw(*batch)
    assert (tokens.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    greedy = temperature[request] == GREEDY
    assert torch.equal(tokens[greedy], expected[greedy])
    scaled = logits.double() / torch.where(greedy, 1.0, temperature[request]).double()[:, None]
    noisy = scaled + gumbel(row_keys(seeds[request], positions), vocabulary).masked_fill_(greedy[:, None], 0.0)
    which = torch.arange(rows, device="cuda")
    assert (noisy[which, expected] - noisy[which, tokens] < 1e-4).all()
    torch.testing.assert_close(logprobs.double(), scaled.log_softmax(1)[which, tokens], rtol=0, atol=1e-4)
    again = draw(*batch)
    assert torch.equal(again[0], tokens)
    assert torch.equal(again[1], logprobs)


@pytest.mark.gpu
def test_another_number_of_sequences_compiles_no_further_kernel(compiled):
    from qerl.engine.vllm.draw_kernel import draw

    draw(*random_batch(16, 5003, torch.bfloat16))
    compiled.clear()
    for rows in (1, 7, 32, 33, 128):
        draw(*random_batch(rows, 5003, torch.bfloat16))
    assert compiled == []
