"""What the report, the display and the plan say of several sources."""

import json
from types import SimpleNamespace

import pytest

from qerl.base.errors import ConfigError
from qerl.config.recipe import load_recipe
from qerl.plan.engine_memory import Card
from qerl.plan.sizes import KNOWN, sizes_of
from qerl.report.curves import panels
from qerl.report.page import extremes
from qerl.report.sections import changes
from tests.helpers.small_run import small_config
from training.preflight.advice import likely
from training.preflight.plan import plan, validation_sentences
from training.run_dir.log import numbers

CARDS_24 = Card("a card", 24.0, 1000.0, 100.0)


def row(step, **values):
    return {"step": step, "reward": 0.5, "sources/b/share": 0.5, "sources/a/share": 0.5, **values}


ROWS = [
    row(1, **{"sources/a/reward": 0.1, "sources/b/reward": 0.9, "validation/sources/a/accuracy": 0.2}),
    row(2, **{"sources/a/reward": 0.4, "sources/b/reward": None, "validation/sources/a/accuracy": 0.3}),
]


def test_each_source_has_its_reward_in_table_drawing_and_display():
    table = {change.label: (change.first, change.last) for change in changes(ROWS)}
    assert table["reward of a"] == (0.1, 0.4)
    assert "reward of b" not in table  # its last step had none
    drawn = {panel.title: panel.lines for panel in panels([SimpleNamespace(rows=ROWS, validations=ROWS)])}
    assert drawn["reward by source"] == {"a": "sources/a/reward"}
    assert drawn["validation accuracy by source"] == {"a": "validation/sources/a/accuracy"}
    assert numbers(ROWS[0]).endswith("a 0.100  b 0.900")
    assert numbers(ROWS[1]).endswith("a 0.400")


def test_a_sample_s_reward_is_by_the_weights_of_its_source():
    sources = [{"name": "a", "rewards": [{"name": "mine.py:short", "weight": 3.0}]}, {"name": "b", "rewards": []}]
    config = {"data": {"sources": sources}, "rewards": [{"name": "accuracy", "weight": 2.0}]}
    written = {"step": 1, "prompt": "p", "completion": "c", "advantage": 0.0}
    samples = [
        {**written, "source": "a", "rewards": {"short": 0.5}},
        {**written, "completion": "d", "source": "b", "rewards": {"accuracy": 1.0}},
    ]
    found = extremes(SimpleNamespace(config=config, samples=samples))
    assert [one.reward for one in (*found.best, *found.worst)] == [2.0, 1.5]


def recipe(*sources, **changed):
    overrides = [f"data.sources={json.dumps(sources)}", "data.held_out=4", "validation.every=10", "validation.limit=50"]
    return load_recipe("tiny", [*overrides, *(f"{key}={value}" for key, value in changed.items())])


def test_the_plan_weighs_prompts_and_counts_questions_of_all_sources(tmp_path):
    for name, words in (("short", 4), ("long", 400)):
        rows = [{"prompt": f"{n} " + "a" * words, "answer": "1"} for n in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    listed = [
        {"name": "s", "task": "own", "source": str(tmp_path / "short.jsonl"), "weight": 3},
        {"name": "l", "task": "own", "source": str(tmp_path / "long.jsonl"), "validation": {}},
    ]
    expected = likely(recipe(*listed)).lengths.prompt
    assert expected == pytest.approx((3 * (4 + 2) + (400 + 2)) / 4 / 4 + 20)
    made = plan(recipe(*listed), sizes_of(KNOWN["qwen2.5-0.5b"], "qwen2.5-0.5b"), CARDS_24)
    (both,), (one,) = (validation_sentences(recipe(*which), made) for which in (listed, listed[:1]))
    assert both.startswith("A validation (54 questions of")  # the 4 held out, and 50 by the limit
    assert one.startswith("A validation (4 questions of")


def test_completions_are_not_carried_over_between_sources(tmp_path):
    sources = json.dumps([{"name": "a"}, {"name": "b", "task": "word_game"}])
    listed = ("data.source=null", "data.limit=null", f"data.sources={sources}")
    with pytest.raises(ConfigError, match=r"data\.sources given with rollout\.carry_over 2: a step trains"):
        small_config("tiny", tmp_path, *listed, "rollout.carry_over=2")
    with pytest.raises(ConfigError, match=r"data\.curriculum true with rollout\.carry_over 2"):
        small_config("tiny", tmp_path, "data.curriculum=true", "rollout.carry_over=2")
