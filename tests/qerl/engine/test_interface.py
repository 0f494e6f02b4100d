"""Seeds of single prompts are fixed numbers, so that a recorded run can be sampled again."""

from qerl.engine.interface import request_seed


def test_the_seed_of_a_prompt_follows_from_the_batchs_seed_and_the_place_in_it():
    assert [request_seed(3, index) for index in (0, 1, 128)] == [3_000_009, 3_000_010, 3_000_137]
    assert request_seed(2**63 - 1, 5) == (2**63 - 1_000_003) + 5
    assert request_seed(None, 4) is None
