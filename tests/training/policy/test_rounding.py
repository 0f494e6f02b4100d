"""Weights in bfloat16, rounded at random: exact where nothing is dropped, right on average, the same bits again.

Without a card but with triton installed, the kernel runs by
`TRITON_INTERPRET=1 pytest -m gpu tests/training/policy/test_rounding.py`.
"""

import os

import pytest
import torch
from torch import nn

from training.policy.rounding import BLOCK, RandomlyRounded, random_halves, round_randomly_

BFLOAT16 = torch.bfloat16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rounded(value, seed=0):
    target = torch.empty(value.shape, dtype=BFLOAT16)
    round_randomly_(target, value, seed)
    return target


def test_numbers_of_bfloat16_and_what_is_not_finite_stay():
    values = torch.tensor([0.0, -0.0, 1.0, -3.0, 2.0**-130, 3e38, float("inf"), -float("inf")]).to(BFLOAT16).float()
    assert torch.equal(rounded(values).view(torch.int16), values.to(BFLOAT16).view(torch.int16))
    every_nan = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert rounded(every_nan).isnan().all()


@pytest.mark.parametrize(("share", "sign"), [(0.0001, 1), (0.25, -1), (0.9, 1)])
def test_a_number_goes_up_with_the_probability_of_its_nearness(share, sign):
    """Between 1 and 1 + 2^-7. A million draws: the share is off by 0.002 at most, four standard deviations."""
    low, high = 1.0, 1.0 + 2.0**-7
    values = torch.full((1_000_000,), sign * (low + share * 2.0**-7))
    result = rounded(values).float() * sign
    assert set(result.unique().tolist()) <= {low, high}
    assert (result == high).float().mean().item() == pytest.approx(share, abs=0.002)


def test_no_number_shares_its_bits_with_another_and_pieces_change_nothing(monkeypatch):
    """The 16 random bits of 64 numbers in a row are the same by chance in one of 10^300 seeds."""
    import training.policy.rounding as module

    halves = random_halves(2**62 + 5, 0, 3 * BLOCK - 7)
    assert len({tuple(row.tolist()) for row in halves[: len(halves) // 64 * 64].view(-1, 64)}) == len(halves) // 64
    assert halves.float().mean().item() == pytest.approx(2**15, abs=0.02 * 2**15)
    assert torch.equal(random_halves(2**62 + 5, 1, 100), halves[BLOCK : BLOCK + 100])
    assert not torch.equal(random_halves(2**61 + 5, 0, 100), halves[:100])
    values = torch.full((3 * BLOCK - 7,), 1.0 + 2.0**-8)
    whole = rounded(values)
    monkeypatch.setattr(module, "PIECE", 1)
    assert torch.equal(rounded(values), whole)


# Last passed on an H100 on 2026-11-26.
@pytest.mark.gpu(instead=INTERPRETED)
@pytest.mark.parametrize("count", [1, 1023, BLOCK, 2 * BLOCK + 77])
@pytest.mark.parametrize("seed", [0, 2**63 - 1, 123456789])
def test_the_kernel_has_the_bits_of_its_twin(count, seed):
    from training.policy.rounding_kernel import round_randomly_ as by_kernel_

    bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32)  # NaN and inf among them
    value = bits.view(torch.float32)
    target = torch.empty(count, dtype=BFLOAT16, device=DEVICE)
    by_kernel_(target, value.to(DEVICE), seed)
    assert torch.equal(target.cpu().view(torch.int16), rounded(value, seed).view(torch.int16))


def parameters(dtype, seed=0):
    generator = seeded(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((8, 32), (16,))]


def stepped(optimizer, trained, steps, seed=5):
    generator = seeded(seed)
    for _ in range(steps):
        for parameter in trained:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    return [parameter.detach().clone() for parameter in trained]


def adamw(trained, **options):
    return torch.optim.AdamW(trained, **{"lr": 1e-5, "weight_decay": 0.1, **options})


def test_parameters_in_float32_are_updated_as_by_the_optimizer_itself():
    plain, wrapped = parameters(torch.float32), parameters(torch.float32)
    expected = stepped(adamw(plain), plain, 3)
    assert all(map(torch.equal, stepped(RandomlyRounded(adamw(wrapped), 1), wrapped, 3), expected))


def test_small_steps_add_up_where_rounding_to_nearest_drops_them():
    trained, nearest = nn.Parameter(torch.ones(100_000, dtype=BFLOAT16)), nn.Parameter(torch.ones(8, dtype=BFLOAT16))
    for parameter in (trained, nearest):
        parameter.grad = torch.ones_like(parameter)
    optimizer = RandomlyRounded(torch.optim.SGD([trained], lr=1e-5), 1)
    plain = torch.optim.SGD([nearest], lr=1e-5)
    for _ in range(50):
        optimizer.step()
        plain.step()
    assert trained.float().mean().item() == pytest.approx(1 - 50e-5, abs=5e-5)
    assert nearest.eq(1).all()


def test_the_bits_depend_on_seed_and_update_alone():
    runs = []
    for seed, disturbance in ((1, 0), (1, 7), (2, 0)):
        trained = parameters(BFLOAT16)
        torch.manual_seed(disturbance)
        runs.append(stepped(RandomlyRounded(adamw(trained, lr=1e-3), seed), trained, 4))
    assert all(map(torch.equal, runs[0], runs[1]))
    assert not torch.equal(runs[0][0], runs[2][0])


def test_each_update_has_other_bits():
    """With the same ones in each, the same weights of equal ones would go up every time."""
    trained = nn.Parameter(torch.ones(1000, dtype=BFLOAT16))
    optimizer = RandomlyRounded(torch.optim.SGD([trained], lr=2.0**-9), 1)
    rounded_up = []
    for _ in range(3):
        trained.data.fill_(1)
        trained.grad = torch.full_like(trained, -1)
        optimizer.step()
        rounded_up.append(trained.detach() > 1)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        both = (rounded_up[one] & rounded_up[other]).float().mean()  # a quarter go up each time, independently
        assert both == pytest.approx(1 / 16, abs=0.04)


def test_a_loaded_state_continues_to_the_same_bits(tmp_path):
    whole = parameters(BFLOAT16)
    optimizer = RandomlyRounded(adamw(whole, lr=1e-3), 3)
    stepped(optimizer, whole, 2)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in whole]
    other = RandomlyRounded(adamw(resumed, lr=1.0), 3)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    assert all(state["exp_avg"].dtype == torch.float32 for state in other.state.values())
    expected = stepped(optimizer, whole, 3, seed=9)
    assert all(map(torch.equal, stepped(other, resumed, 3, seed=9), expected))


# Last passed on an H100 on 2026-11-26.
@pytest.mark.gpu
def test_bitsandbytes_keeps_its_moments_in_8_bits(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="the extra gpu is not installed")
    trained = [nn.Parameter(torch.randn(256, 512, device="cuda").to(BFLOAT16)) for _ in range(2)]

    def new(parameters):
        return RandomlyRounded(bitsandbytes.optim.AdamW(parameters, lr=1e-3, optim_bits=8), 3)

    def run(optimizer, parameters, steps, seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, device="cuda", generator=generator).to(BFLOAT16)
            optimizer.step()
        return [parameter.detach().clone() for parameter in parameters]

    optimizer = new(trained)
    run(optimizer, trained, 2, 1)
    assert all(state["state1"].dtype == torch.uint8 for state in optimizer.state.values())
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in trained]
    other = new(resumed)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    expected = run(optimizer, trained, 3, 2)
    assert all(map(torch.equal, run(other, resumed, 3, 2), expected))
