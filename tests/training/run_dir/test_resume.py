"""`qerl train --resume [RUN|STEP]`: the right run and checkpoint, and the same numbers from an earlier step."""

import json
import os
import shutil
from pathlib import Path

import pytest

from qerl.base.errors import CheckpointError, ConfigError, DataError
from qerl.checkpoint.resolve import resolve_model
from qerl.cli.train import TrainOptions, find_resumed, moved_files, with_resume_value
from qerl.config.recipe import load_recipe, save_config
from tests.helpers.small_run import numbers, same_adapters, small_config
from training.preflight.checks import check_resumed
from training.run import resume, start
from training.run_dir.checkpoint import checkpoints
from training.run_dir.folder import make_aside
from training.run_dir.resume import LAST, Moved, base_to_resume, config_to_resume, find_run, rewind_, with_moved


def fake_run(folder, recipe, age_s, steps=()):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("model: {}")
    (folder / "run.json").write_text(json.dumps({"recipe": recipe}))
    (folder / "metrics.jsonl").write_text("")
    os.utime(folder / "metrics.jsonl", (1e9 - age_s, 1e9 - age_s))
    for step in steps:
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_run(tmp_path / "runs" / "old", "dapo_7b", 30, steps=[20, 40])
    fake_run(tmp_path / "runs" / "new", "tiny", 10, steps=[5])
    return Path("runs")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((LAST,), ("runs/new", None)),
        ((LAST, "dapo_7b"), ("runs/old", None)),
        ((LAST, "mine/dapo_7b.yaml"), ("runs/old", None)),
        ((LAST, None, Path("runs/old")), ("runs/old", None)),
        (("5",), ("runs/new", 5)),
        (("40", "dapo_7b"), ("runs/old", 40)),
        (("runs/old",), ("runs/old", None)),
        (("runs/old/checkpoints/step-000020",), ("runs/old", 20)),
    ],
)
def test_the_run_and_the_step_that_are_found(runs, arguments, expected):
    run_dir, step = find_run(*arguments)
    assert (str(run_dir), step) == expected


@pytest.mark.parametrize(
    ("began", "now"), [("samples", "sft_tiny"), ("teacher", "tiny"), ("conversations", "qad_tiny")]
)
def test_a_recipe_that_was_made_another_kind_of_run_is_refused(tmp_path, began, now):
    save_config(load_recipe(now), tmp_path / "config.yaml")
    (tmp_path / "run.json").write_text(json.dumps({"kind": {"learns": began, "trains": "adapter"}}))
    with pytest.raises(ConfigError, match=f"now learns from .*, and the run began with {began}: .*start a new run"):
        config_to_resume(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LAST, "qwen3_8b"), "no run of recipe qwen3_8b"),
        (("runs/old", "dapo_7b"), "leave --recipe and --out out"),
        (("runs/old/checkpoints/step-000030",), "there are steps 20, 40"),
    ],
)
def test_for_a_missing_run_the_error_says_what_there_is(runs, arguments, message):
    with pytest.raises(ConfigError, match=message):
        find_run(*arguments)
    with pytest.raises(ConfigError, match="no checkpoint of step 30: there are steps 20, 40"):
        rewind_(runs / "old", 30)
    for text in ("", "[]", '{"recipe": 3}'):
        (runs / "new" / "run.json").write_text(text)
        assert find_run(LAST, "dapo_7b") == (runs / "old", None)


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("train --resume", "train --resume=last"),
        ("train --resume --recipe tiny", "train --resume=last --recipe tiny"),
        ("train --resume runs/x", "train --resume runs/x"),
        ("train --resume=40", "train --resume=40"),
    ],
)
def test_resume_without_a_value_means_the_last_run(typed, given):
    assert with_resume_value(typed.split()) == given.split()


def test_files_replaced_within_one_second_go_to_different_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("training.run_dir.folder.time.strftime", lambda _: "20261122-120000")
    names = [make_aside(tmp_path).name for _ in range(3)]
    assert names == ["replaced-20261122-120000", "replaced-20261122-120000-2", "replaced-20261122-120000-3"]


def test_an_earlier_step_gives_the_same_numbers_and_replaced_files_are_kept(whole_run, tmp_path):
    run_dir = shutil.copytree(whole_run, tmp_path / "run")
    damaged = run_dir / "checkpoints" / "step-000004" / "scheduler.pt"
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1])
    with pytest.raises(ConfigError, match=r"step 4 is damaged .scheduler\.pt"):
        resume(run_dir, step=4)
    damaged.write_bytes(good)
    assert len(checkpoints(run_dir)) == 2  # nothing was moved
    resume(run_dir, step=4)
    assert numbers(run_dir) == numbers(whole_run)
    (aside,) = run_dir.glob("replaced-*")
    assert sorted(path.name for path in aside.iterdir()) == ["adapter", "step-000006"]
    assert [path.name for path in checkpoints(run_dir)] == ["step-000004", "step-000006"]
    assert same_adapters(run_dir / "adapter", whole_run / "adapter")


def test_base_and_data_of_a_run_have_to_exist_until_it_is_finished(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints" / "step-000020").mkdir(parents=True)
    config = load_recipe("tiny", ["model.format=bf16"], base="tiny", data="gone.jsonl", steps=20)
    save_config(config, run_dir / "config.yaml")
    check_resumed(run_dir)  # it has finished
    save_config(load_recipe("tiny", ["model.format=bf16"], data="gone.jsonl", steps=40), run_dir / "config.yaml")
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        check_resumed(run_dir)
    monkeypatch.chdir(tmp_path)
    for name in ("base", "my base", "./base"):
        with pytest.raises(CheckpointError, match=rf"run was trained on {name}, which is not here: .*--model BASE"):
            base_to_resume(Path("run"), load_recipe("tiny", [f"model.base={name}"]))


def test_a_run_whose_base_has_moved_continues_with_model(nvfp4_base, base, tmp_path, here):
    """The numbers are those of a run that nobody stopped, and later commands find the base without --model."""
    old, new = shutil.copytree(nvfp4_base, tmp_path / "old"), tmp_path / "new"
    settings = ("run.save_every=1", "noise.enabled=false")
    whole = start(small_config(old, tmp_path, *settings, steps=2), "tiny").run_dir
    left = shutil.ignore_patterns("step-000002", "adapter")
    run_dir = shutil.copytree(whole, tmp_path / "stopped", ignore=left)
    old.rename(new)
    code, _, err = here("train", "--resume", run_dir)
    assert code == 2
    assert f"trained on {old}, which is not here: write `qerl train --resume {run_dir} --model BASE`" in err
    for wrong in (shutil.copytree(base, tmp_path / "other"), whole):  # other weights, and a run without its own base
        assert here("train", "--resume", run_dir, "--model", wrong)[0] == 2
    code, _, err = here("train", "--resume", run_dir, "--model", new)
    assert code == 0, err
    assert numbers(run_dir) == numbers(whole)
    found = resolve_model(str(run_dir))
    assert (found.base, json.loads((run_dir / "run.json").read_text())["base"]) == (str(new), str(new))


def test_a_base_is_not_taken_for_the_adapter_that_a_run_began_from(whole_run, nvfp4_base, tmp_path):
    run = start(small_config(whole_run, tmp_path, "noise.enabled=false", steps=1), "tiny").run_dir
    check_resumed(run, steps=2, moved=Moved(str(whole_run)))
    with pytest.raises(ConfigError, match=r"began from a run or an adapter and .* is a base: give the model"):
        check_resumed(run, steps=2, moved=Moved(str(nvfp4_base)))


GRADER = "def right(completion): return len(completion) % 2 == 0\n"
REWARD = "def short(completions, **columns): return [1 / (1 + len(text)) for text in completions]\n"


@pytest.fixture(scope="module")
def moved(nvfp4_base, tmp_path_factory):
    """A run of two sources that has made one of its steps, and its files in another folder."""
    folder = tmp_path_factory.mktemp("moved")
    old, new = folder / "old", folder / "new"
    old.mkdir()
    rows = "".join(json.dumps({"prompt": f"{n} + {n}?", "answer": str(n)}) + "\n" for n in range(12))
    for name, text in (("grader.py", GRADER), ("rewards.py", REWARD), ("a.jsonl", rows), ("b.jsonl", rows)):
        (old / name).write_text(text)
    first = f"{{name: a, source: '{old}/a.jsonl', grader: '{old}/grader.py:right'}}"
    settings = ("data.task=own", "data.limit=null", "data.source=null", "noise.enabled=false")
    settings += (f"data.sources=[{first}, {{name: b, source: '{old}/b.jsonl'}}]",)
    settings += (f"rewards=[{{name: accuracy}}, {{name: '{old}/rewards.py:short'}}]",)
    run = start(small_config(nvfp4_base, folder, *settings, steps=1), "tiny").run_dir
    os.rename(old, new)
    return run, new


def test_files_that_have_moved_are_named_at_resume(moved, tmp_path):
    run, new = shutil.copytree(moved[0], tmp_path / "run"), moved[1]
    places = tuple(str(new / name) for name in ("grader.py", "rewards.py:short", "a.jsonl", "b.jsonl"))
    for files, said in (
        ((), r"rewards\.1\.name .*rewards\.py:short and data.*, which are not here: add --set rewards.* --set data"),
        (
            places[:3],
            r"begun with data\.sources\.1\.source .*b\.jsonl, which is not here: add --set .*PATH to `qerl train",
        ),
        (("other.py",), r"names no file other\.py \(its files: .*a\.jsonl.*: what has moved keeps"),
    ):
        with pytest.raises((ConfigError, DataError), match=said):
            check_resumed(run, steps=2, moved=Moved(files=files))
    assert resume(run, steps=2, moved=Moved(files=places)).steps == 2
    config, _ = config_to_resume(run)
    assert [source.source for source in config.data.sources] == list(places[2:])
    assert config.data.sources[0].grader == f"{new}/grader.py:right"
    check_resumed(run, steps=3)  # the places are kept


def test_what_a_moved_file_holds_has_to_be_the_same_and_rows_that_the_run_keeps_are_found_in_it(moved, tmp_path):
    run, new = shutil.copytree(moved[0], tmp_path / "run"), shutil.copytree(moved[1], tmp_path / "other")
    (new / "grader.py").write_text(GRADER.replace("== 0", "== 1"))
    places = tuple(str(new / name) for name in ("grader.py", "rewards.py", "a.jsonl", "b.jsonl"))
    with pytest.raises(ConfigError, match=r"the grader's source grader\.py of a changed"):
        resume(run, steps=2, moved=Moved(files=places))
    (run / "a.jsonl").write_bytes((new / "a.jsonl").read_bytes())
    assert config_to_resume(run)[0].data.sources[0].source == str(run / "a.jsonl")


def test_functions_of_one_file_move_each_or_all_together():
    config = load_recipe("tiny", ["rewards=[{name: 'old/r.py:short'}, {name: 'old/r.py:long', weight: 0.5}]"])

    def names(*files):
        return [reward.name for reward in with_moved(config, Path("run"), files).rewards]

    assert names("n/r.py") == names("n/r.py:short", "n/r.py:long") == ["n/r.py:short", "n/r.py:long"]
    assert names("n/r.py:long") == ["old/r.py:short", "n/r.py:long"]
    with pytest.raises(ConfigError, match=r"names no file r\.py:other \(its files: old/r\.py:short, old/r\.py:long\)"):
        names("n/r.py:other")


def test_the_options_name_what_has_moved():
    options = TrainOptions(grader="g.py", data="a.jsonl", overrides=("rewards.0.name='n/r.py:f'",))
    assert moved_files(options) == ("a.jsonl", "g.py", "n/r.py:f")
    with pytest.raises(ConfigError, match="--grader, --environment or --set KEY=PATH for what has moved"):
        find_resumed(TrainOptions(overrides=("rewards.0.weight=2",)), "runs/x")
