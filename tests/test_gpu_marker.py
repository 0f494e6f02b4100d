"""`pytest -m gpu` on a machine without a card: tests are skipped with a reason, unless something stands in for one."""

import pytest
import torch

from tests.helpers.card import skip_without_card


class Item:
    """A collected test, as far as the marks go."""

    def __init__(self, *marks):
        self.marks = {decorator.mark.name: decorator.mark for decorator in marks}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, decorator):
        self.marks[decorator.mark.name] = decorator.mark


@pytest.mark.parametrize("card", [False, True])
def test_what_needs_a_card_is_skipped_where_there_is_none(monkeypatch, card):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    needs, can_do_without, other = Item(pytest.mark.gpu), Item(pytest.mark.gpu(instead=True)), Item()
    skip_without_card([needs, can_do_without, other])
    assert [("skip" in item.marks) for item in (needs, can_do_without, other)] == [not card, False, False]
    assert card or "needs a CUDA device" in needs.marks["skip"].kwargs["reason"]
