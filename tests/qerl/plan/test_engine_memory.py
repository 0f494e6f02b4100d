import pytest
from transformers import Qwen2Config

from qerl.base.errors import ConfigError, EngineError
from qerl.plan.engine_memory import (
    CARDS,
    GIB,
    card_named,
    card_of,
    engine_bytes,
    grown_by_others,
    kv_bytes_per_token,
    kv_cache_bytes,
    plan_memory,
    sampler_bytes,
)

CARD = 140 * GIB
WEIGHTS_7B = int(5.5 * GIB)


@pytest.mark.parametrize(
    ("memory", "cap_gib", "limit_gib", "budget_gib"),
    [
        (None, None, 140, 119),  # 0.85 of the card
        (None, 24, 24, 20.4),  # 0.85 of the cap
        (0.5, 24, 24, 12),
        (20, 24, 24, 20),
        (1, 24, 24, 24),  # 1 means all of it, not 1 GiB
        (100, 200, 140, 100),  # a cap above the memory of the card has no effect
    ],
)
def test_budget_is_gib_above_one_and_a_share_below(memory, cap_gib, limit_gib, budget_gib):
    plan = plan_memory(CARD, WEIGHTS_7B, memory, cap_gib)
    assert plan.limit == limit_gib * GIB
    assert plan.budget == pytest.approx(budget_gib * GIB, abs=2)
    assert plan.utilization(CARD) == pytest.approx((budget_gib - 1) / 140)


@pytest.mark.parametrize(
    ("memory", "cap_gib", "message"),
    [
        (30, 24, "30.0 GiB and the limit is 24.0 GiB .memory.cap_gib"),
        (200, None, "the limit is 140.0 GiB .the card"),
        (0, None, "not a budget"),
        (-1, None, "not a budget"),
        (None, 8, "the weights take 5.5 GiB"),
        (8, None, "the weights take 5.5 GiB"),
    ],
)
def test_a_base_that_cannot_fit_is_refused_before_loading(memory, cap_gib, message):
    with pytest.raises(EngineError, match=message):
        plan_memory(CARD, WEIGHTS_7B, memory, cap_gib)


@pytest.mark.parametrize(
    ("memory", "cap_gib", "budget_gib"),
    [
        (None, 24, 20.4),  # here 15% are more than 2 GiB
        (None, 12, 10),
        (None, 10, 8),
        (0.85, 12, 10.2),  # as requested
        (12, 12, 12),
    ],
)
def test_without_a_request_the_budget_leaves_room_for_what_lies_outside_it(memory, cap_gib, budget_gib):
    plan = plan_memory(CARD, 2 * GIB, memory, cap_gib, outside=2 * GIB)
    assert plan.budget == pytest.approx(budget_gib * GIB, abs=2)


@pytest.mark.parametrize(
    ("memory", "cap_gib", "remedy"),
    [
        (8, 12, "raise rollout.memory, or take a smaller or quantized base"),  # 8.5 and 2 outside make 10.5
        (8, 10, "raise memory.cap_gib, or take a smaller or quantized base"),
        (None, 10, "raise memory.cap_gib, or take a smaller or quantized base"),
        (8, None, "raise rollout.memory, or take a smaller or quantized base"),
    ],
)
def test_a_larger_budget_is_advised_if_that_helps(memory, cap_gib, remedy):
    with pytest.raises(EngineError, match=remedy):
        plan_memory(CARD, WEIGHTS_7B, memory, cap_gib, outside=2 * GIB)


@pytest.mark.parametrize(("quantized", "remedy"), [(False, "a smaller or quantized base"), (True, "a smaller base")])
def test_if_the_card_is_the_limit_only_a_smaller_base_is_advised(quantized, remedy):
    with pytest.raises(EngineError, match=rf"may hold 6\.0 GiB: take {remedy}$"):
        plan_memory(8 * GIB, WEIGHTS_7B, None, None, outside=2 * GIB, quantized=quantized)


def test_kv_bytes_of_qwen_7b_and_of_an_explicit_head_size():
    qwen = Qwen2Config(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4)
    assert kv_bytes_per_token(qwen) == 2 * 28 * 4 * 128 * 2
    qwen.head_dim = 64
    assert kv_bytes_per_token(qwen) == 2 * 28 * 4 * 64 * 2
    assert kv_bytes_per_token(qwen, "fp8") == 2 * 28 * 4 * 64
    assert kv_bytes_per_token(qwen, "fp8_per_token_head") == 2 * 28 * 4 * (64 + 4)


def test_the_kv_cache_is_no_larger_than_can_be_used_and_else_sized_by_the_profile():
    plan = plan_memory(CARD, WEIGHTS_7B, None, None)
    assert kv_cache_bytes(plan, WEIGHTS_7B, tokens=128 * 640, per_token=57344) == int(81920 * 57344 * 1.02) + 64 * 2**20
    assert kv_cache_bytes(plan, WEIGHTS_7B, tokens=256 * 32768, per_token=57344) is None


def test_vllm_requires_only_as_much_free_memory_as_a_small_engine_takes():
    """Another process on the card is no error as long as there is room."""
    plan = plan_memory(CARD, 2 * GIB, None, None)
    wanted = kv_cache_bytes(plan, 2 * GIB, 100_000, 2**15)
    assert wanted < 4 * GIB
    needed = engine_bytes(2 * GIB, wanted)
    assert plan.utilization(CARD, needed) * CARD == pytest.approx(needed - GIB)
    assert plan.utilization(CARD, needed) < 0.1 < plan.utilization(CARD)
    assert plan.utilization(CARD, 2 * CARD) == plan.utilization(CARD)


def test_the_counts_of_the_sampler_of_a_7b_computed_by_hand():
    assert sampler_bytes(256, 152064) == 256 * 152064 * 4 + 256 * 4752 * 4
    assert sampler_bytes(1, 33) == 33 * 4 + 2 * 4  # 33 bits need two words


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("rtx 4090", "4090"),
        ("RTX 4070 Ti SUPER", "4070-ti-super"),
        ("A100-80GB", "a100"),
        ("a100-40gb", "a100-40"),
        ("4060ti", "4060-ti"),
        ("RTX PRO 6000", "pro-6000"),
        ("H200-141GB", "h200"),
        ("A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "pro-6000"),
        ("NVIDIA RTX 6000 Ada Generation", "6000-ada"),
        ("2080ti", "2080-ti"),
    ],
)
def test_a_card_is_known_by_its_names(given, name):
    assert card_of(given) is CARDS[name]


# GB is a unit only after a number: GB10 is a card with 128 GB, and GB200 one with 186.
@pytest.mark.parametrize("given", ["gb10", "NVIDIA GB200", "4090 laptop", "24_0", "-24", "4095", "t40", "0", "x24"])
def test_what_is_no_card_is_refused(given):
    with pytest.raises(ConfigError, match="write GiB"):
        card_of(given)


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.6, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100"),
        ("Tesla V100-SXM2-32GB", 32.0, "v100-32"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16.0, "4070-ti-super"),
        ("NVIDIA GeForce RTX 4060 Ti", 16.0, "4060-ti-16"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, "pro-6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0, "a card of 16 GiB, as fast as 4090"),
    ],
)
def test_the_drivers_name_of_a_card_is_known(name, gib, known):
    assert card_named(name, gib).name == known


def test_a_driver_names_cards_that_are_not_known():
    assert card_named("NVIDIA T400 4GB", 4.0) is None
    assert card_named("NVIDIA GB10", 0.0) is None


@pytest.mark.parametrize(("increase", "others"), [(0, 0), (1.0, 0), (2.35, 0), (22.35, 20.0), (-10.0, -10.0)])
def test_what_others_take_while_an_engine_opens_is_not_its_own(increase, others):
    """GiB outside torch. An engine has 2.35 at most: a context, kernels and graphs."""
    assert grown_by_others(int(increase * GIB)) == pytest.approx(others * GIB, abs=2)
