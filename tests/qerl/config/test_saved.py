"""The configuration of a run is read back as plain data, after what reports read of it has been checked."""

import pytest

from qerl.config.recipe import read_config

SOUND = "data:\n  task: arith\n  sources:\n  - {name: easy, rewards: [{name: accuracy}]}\n"


def test_it_is_plain_data(tmp_path):
    (tmp_path / "config.yaml").write_text(SOUND)
    data, text = read_config(tmp_path / "config.yaml")
    assert data["data"]["sources"] == [{"name": "easy", "rewards": [{"name": "accuracy"}]}]
    assert text == SOUND


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: arith", "data: "),
        ("data: {sources: 5}", "data.sources: "),
        ("data: {sources: [easy]}", "data.sources.0: "),
        ("data: {sources: [{name: easy, rewards: 1}]}", "data.sources.0.rewards: "),
        ("rewards: [accuracy]", "rewards.0: "),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path, text, said):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"^{said}"):
        read_config(tmp_path / "config.yaml")
