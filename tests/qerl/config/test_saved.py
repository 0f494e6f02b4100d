"""The configuration of a run is read back as plain data, after what reports read of it has been checked."""

import pytest
import yaml

from qerl.base.errors import ConfigError
from qerl.config.recipe import load_config, load_recipe, read_config

SOUND = "data:\n  task: arith\n  sources:\n  - {name: easy, rewards: [{name: accuracy}]}\n"


def test_it_is_plain_data(tmp_path):
    (tmp_path / "config.yaml").write_text(SOUND)
    data, text = read_config(tmp_path / "config.yaml")
    assert data["data"]["sources"] == [{"name": "easy", "rewards": [{"name": "accuracy"}]}]
    assert text == SOUND


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "no sections"),
        ("data: arith", "data: "),
        ("run: text", "run: Input should be a valid dictionary"),
        ("rewards: [{name: 7}]", "rewards.0.name: Input should be a valid string"),
        ("validation: [1]", "validation: Input"),
        ("data: {sources: 5}", "data.sources: "),
        ("data: {sources: [easy]}", "data.sources.0: "),
        ("data: {sources: [{name: easy, rewards: 1}]}", "data.sources.0.rewards: "),
        ("rewards: [accuracy]", "rewards.0: "),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path, text, said):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_config(tmp_path / "config.yaml")


def test_columns_of_the_validation_that_are_those_of_the_rows_are_read(tmp_path):
    config, saved = load_recipe("tiny", ["data.source=rows.jsonl"]), tmp_path / "config.yaml"
    data = config.model_dump(mode="json")
    for columns, same in (({"question": "q"}, True), ({"question": "other"}, False)):
        data["data"]["columns"], data["validation"]["columns"] = {"question": "q"}, columns
        saved.write_text(yaml.safe_dump(data))
        if same:
            assert load_config(saved).data.columns == columns
        else:
            with pytest.raises(ConfigError, match=r"write data\.columns"):
                load_config(saved)
