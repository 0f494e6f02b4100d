"""The configuration of a run is read back as plain data, after what reports read of it has been checked."""

import logging

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


SOURCES = "data.sources=[{name: a}, {name: b}]"
ASKED = "data.sources=[{name: a, validation: {}}, {name: b, validation: {}}]"


def saved_with(path, settings, keys):
    """A recipe as a run saved it, with more keys."""
    data = load_recipe("tiny", settings).model_dump(mode="json")
    for dotted, value in keys.items():
        *parents, key = (int(part) if part.isdecimal() else part for part in dotted.split("."))
        section = data
        for part in parents:
            section = section[part]
        section[key] = value
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize(
    ("settings", "keys", "now"),
    [
        ([], {"noise.indexing": "paper"}, ["noise.schedule=paper"]),
        (
            ["train.fp8_recipe=blockwise"],
            {"train.fp8_products": "gradients"},
            ["train.fp8_recipe=blockwise_gradients"],
        ),
        ([SOURCES], {"data.sources.0.limit": 9, "data.sources.1.limit": 9}, [SOURCES, "data.limit=9"]),
        ([SOURCES, "data.limit=9"], {"data.sources.0.limit": 9}, [SOURCES, "data.limit=9"]),
        ([SOURCES], {"data.sources.0.split": "test", "data.sources.1.split": "test"}, [SOURCES, "data.split=test"]),
        (
            [SOURCES, "validation.every=1"],
            {"data.sources.0.held_out": 5, "data.sources.1.held_out": 5},
            [SOURCES, "validation.every=1", "data.held_out=5"],
        ),
        (
            [ASKED, "validation.every=1", "validation.split=train"],
            {"data.sources.0.validation.split": "train", "data.sources.1.validation.split": "train"},
            [ASKED, "validation.every=1", "validation.split=train"],
        ),
    ],
)
def test_a_saved_key_that_another_says_now_becomes_that_one(tmp_path, settings, keys, now):
    settings, now = (["loss.correction.mode=token_truncate", *each] for each in (settings, now))
    saved = saved_with(tmp_path / "config.yaml", settings, keys)
    assert load_config(saved) == load_recipe("tiny", now)
    with pytest.raises(ConfigError, match="this key is gone; "):
        load_recipe(saved)


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (["noise.schedule=linear"], {"noise.indexing": "paper"}),
        ([SOURCES], {"data.sources.0.limit": 5}),
        ([SOURCES, "data.limit=9"], {"data.sources.0.limit": 5, "data.sources.1.limit": 6}),
        ([SOURCES, "validation.every=1"], {"data.sources.0.held_out": 5, "data.sources.1.held_out": 0}),
        ([ASKED, "validation.split=train"], {"data.sources.0.validation.split": "test"}),
        ([], {"data.keep_unreadable": True}),
        ([], {"rollout.min_p": 0.1}),
        ([], {"validation.target": 0.5}),
        (["environment.name=calculator"], {"environment.max_observation_tokens": 64}),
    ],
)
def test_what_no_key_says_now_is_refused_when_training_and_left_out_when_evaluating(tmp_path, caplog, settings, keys):
    saved, gone = saved_with(tmp_path / "config.yaml", settings, keys), next(iter(keys))
    with pytest.raises(ConfigError, match=f"{gone}: this key is gone; "):
        load_config(saved)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert load_config(saved, evaluated=True) == load_recipe("tiny", settings)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{saved}: an evaluation does without {gone.replace('.0.', '.N.')}")
    assert ("--keep-unreadable" in line) == (gone == "data.keep_unreadable")


def test_names_at_trackers_are_left_out_with_one_line(tmp_path, caplog):
    saved = saved_with(tmp_path / "config.yaml", [], {"logging.project": "mine", "logging.run_name": "first"})
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert load_config(saved) == load_recipe("tiny")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "logging.project (set the variable WANDB_PROJECT)" in line
    assert "logging.run_name (" in line
    caplog.clear()
    load_config(saved_with(tmp_path / "unnamed.yaml", [], {"logging.project": None}))
    assert not caplog.records
