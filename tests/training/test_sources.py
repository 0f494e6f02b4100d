"""Runs on several sources: shares, rewards and validation of each, and the same bits after a kill."""

import json
import shutil
from itertools import islice

import pytest

import qerl
from qerl.base.errors import ConfigError, DataError
from qerl.config.recipe import save_config
from qerl.data.tasks import get_task, word_game
from tests.helpers.small_run import numbers, small_config
from training.preflight.checks import check_config
from training.run import resume, start

pytestmark = pytest.mark.usefixtures("one_thread")

LETTERS = '''
def letters(completions, row, log_metric, **columns):
    """Share of characters that are letters."""
    log_metric("own/first_row", min(row))
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]
'''
SETTINGS = ("rollout.prompts_per_step=3", "data.source=null", "data.limit=null", "validation.every=2")
SETTINGS += ("validation.metric=sources/sums/reward",)
PLAIN = ("validation.every=null", "validation.metric=accuracy", "data.held_out=0")


def config_of(base, folder, *overrides, **given):
    """Two parts of sums, graded by their digits, and one of words, graded by their letters."""
    (folder / "letters.py").write_text(LETTERS)
    for name in ("arith", "word_game"):
        rows = islice(get_task(name).generate("train"), 12)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"name": "sums", "weight": 2, "source": str(folder / "arith.jsonl")},
        {
            "name": "chains",
            "task": "word_game",
            "source": str(folder / "word_game.jsonl"),
            "rewards": [{"name": f"{folder / 'letters.py'}:letters", "weight": 2.0}],
            "validation": {},
        },
    ]
    listed = f"data.sources={json.dumps(sources)}"
    return small_config(base, folder, *SETTINGS, listed, "data.held_out=3", "validation.limit=4", *overrides, **given)


class DatasetDict(dict):
    """The splits of a data set, as `datasets` gives them."""


@pytest.fixture(scope="module")
def finished(nvfp4_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return start(config_of(nvfp4_base, folder), "tiny").run_dir


def test_each_source_has_its_share_and_its_own_rewards(finished):
    rows = [row for row in numbers(finished) if row["step"]]
    assert [row["sources/sums/share"] for row in rows] == [2 / 3] * 6
    for row in rows:
        sums, chains = row["sources/sums/rewards/digits"], row["sources/chains/rewards/letters"]
        assert (row["rewards/digits"], row["rewards/letters"]) == pytest.approx((sums, chains))
        assert row["sources/sums/reward"] == pytest.approx(sums)
        assert row["sources/chains/reward"] == pytest.approx(2 * chains)
        assert row["reward"] == pytest.approx((2 * sums + 2 * chains) / 3)
        assert "sources/sums/rewards/letters" not in row
        assert row["own/first_row"] >= 9  # the rows of chains follow those 9 of sums that are not held out
    samples = [json.loads(line) for line in (finished / "completions" / "step-000002.jsonl").open()]
    assert {(one["source"], *one["rewards"]) for one in samples} == {("sums", "digits"), ("chains", "letters")}


def test_validations_ask_the_rows_held_out_and_the_test_rows_of_each_source(finished):
    rows = [row for row in numbers(finished) if "validation/accuracy" in row]
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    for row in rows:
        mean = (3 * row["validation/sources/sums/reward"] + 4 * row["validation/sources/chains/reward"]) / 7
        assert row["validation/reward"] == pytest.approx(mean)
        assert {"validation/sources/sums/accuracy", "validation/sources/chains/accuracy"} < row.keys()
        assert "validation/rewards/accuracy" not in row  # only the grading of the task
    assert json.loads((finished / "best" / "validation.json").read_text())["metric"] == "sources/sums/reward"


def test_changed_rows_of_one_source_are_named(finished, tmp_path):
    folder = shutil.copytree(finished.parent, tmp_path / "moved")
    for path in (folder / "run" / "config.yaml", folder / "arith.jsonl"):
        path.write_text(path.read_text().replace(str(finished.parent), str(folder)).replace("have", "hold"))
    with pytest.raises(ConfigError, match="the rows of the data of sums changed, the prompts as tokens of sums"):
        resume(folder / "run", steps=7)


def test_dynamic_sampling_replaces_groups_by_others_of_their_source(nvfp4_base, tmp_path):
    settings = ("rollout.dynamic_sampling.enabled=true", *PLAIN)
    (tmp_path / "same.py").write_text(
        "def letters(completions, row, **columns):\n"
        "    return [len(set(text)) if number % 2 else 1.0 for text, number in zip(completions, row)]\n"
    )
    config = config_of(nvfp4_base, tmp_path, *settings, f"rewards=[{{name: '{tmp_path}/same.py:letters'}}]", steps=3)
    run_dir = start(config, "tiny").run_dir
    rows = numbers(run_dir)
    assert [row["sources/sums/share"] for row in rows] == [2 / 3] * 3
    assert sum(row["dynamic_sampling/extra_rollouts"] for row in rows) > 0
    assert [row["dynamic_sampling/filled_groups"] for row in rows] == [0] * 3


def test_a_list_of_one_source_is_a_run_without_sources(nvfp4_base, tmp_path):
    (tmp_path / "plain").mkdir(), (tmp_path / "listed").mkdir()
    plain = start(small_config(nvfp4_base, tmp_path / "plain", "noise.enabled=false", steps=1), "tiny").run_dir
    source = json.dumps([{"name": "all", "source": str(tmp_path / "plain" / "rows.jsonl"), "weight": 7.5}])
    given = ("data.source=null", "data.limit=12", f"data.sources={source}", "noise.enabled=false")
    listed = small_config(nvfp4_base, tmp_path / "listed", *given, steps=1)
    rows = numbers(start(listed, "tiny").run_dir)
    assert [{k: v for k, v in row.items() if not k.startswith("sources/")} for row in rows] == numbers(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.source=rows.jsonl", "data.source rows.jsonl with data.sources .*: each of several sources has its own"),
        ("data.sources.1.name=sums", "data.sources.1.name sums: another source has this name"),
        ("data.sources.1.task=word_gam", "data.sources.1.task word_gam: .*write data.sources.1.task: word_game"),
        ("data.sources.0.rewards=[{name: accurcy}]", "data.sources.0.rewards.0.name accurcy: there is no such reward"),
        ("data.sources.1.held_out=2", "data.sources.1.held_out: this key is gone; write data.held_out"),
        ("validation.task=arith", "validation.task arith with data.held_out 3: both say which rows"),
        ("validation.metric=sources/chain/reward", "or of one source sources/sums/accuracy"),
        ("data.sources.0.name=a/b", "data.sources.0.name: got 'a/b'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(nvfp4_base, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        config_of(nvfp4_base, tmp_path, change)
    assert "\n" not in str(caught.value)


def test_a_source_that_is_not_there_or_too_small_is_named(nvfp4_base, tmp_path):
    missing = config_of(nvfp4_base, tmp_path, "data.sources.1.source=missing.jsonl")
    with pytest.raises(DataError, match=r"source chains: there is no file or folder .missing\.jsonl"):
        check_config(missing)
    with pytest.raises(DataError, match="source sums: 1 usable examples are fewer than the 2 prompts of one step"):
        start(config_of(nvfp4_base, tmp_path, "data.limit=4"), "tiny")
    assert not (tmp_path / "run").exists()


def test_python_gives_several_sources(nvfp4_base, tmp_path, monkeypatch):
    """Rows, a path and a task of its own, each with what belongs to it."""
    made = list(islice(word_game.rows("train"), 12))  # of 4096, whose prompts take as long as thirty steps
    monkeypatch.setattr(word_game, "rows", lambda split: made)
    config = config_of(nvfp4_base, tmp_path, *PLAIN, "data.sources=[]", "noise.enabled=false")
    save_config(config, tmp_path / "recipe.yaml")
    rows = [{"prompt": f"How much is {n} + {n}?", "answer": str(2 * n)} for n in range(4)]

    def short(completions, **columns):
        return [len(text) / 8 for text in completions]

    sources = {
        "mine": {"data": rows, "reward": short, "weight": 2},
        "file": tmp_path / "arith.jsonl",
        "made": {"task": "word_game"},
    }
    run = qerl.train(tmp_path / "recipe.yaml", data=sources, steps=2, out=tmp_path / "run")
    shares = [[row[f"sources/{name}/share"] for name in sources] for row in numbers(tmp_path / "run")]
    assert [[round(3 * share) for share in row] for row in shares] == [[1, 1, 1], [2, 1, 0]]
    assert run.metrics["rewards/short"].notna().all()
    assert len((tmp_path / "run" / "given-rows-mine.jsonl").read_text().splitlines()) == 4
    assert qerl.train(resume=run, reward=short, steps=3).steps == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data names no source"),
        ({"a": {"dat": []}}, r"source a takes no argument 'dat'; did you mean data\?"),
        ({"a": {"weight": 2}}, "source a has no rows: give data"),
        ({"a": [3]}, "row 1 of data is 3"),
        (DatasetDict(train=[], test=[]), r"splits train, test: give one of them, .*data\['train'\]"),
    ],
)
def test_python_refuses_what_is_no_source(data, message, tmp_path):
    with pytest.raises((ConfigError, DataError), match=message):
        qerl.train("tiny", data=data, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
