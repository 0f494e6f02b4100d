"""A call of vLLM: what surrounds it."""

import gc

import pytest

from qerl.vllm_plugin.requests import NEW_OBJECTS, rare_collections


def test_the_collector_is_rare_inside_and_as_before_afterwards_after_an_error_too():
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold() == NEW_OBJECTS
    assert gc.get_threshold() == before
    with pytest.raises(KeyboardInterrupt), rare_collections():
        raise KeyboardInterrupt
    assert gc.get_threshold() == before
