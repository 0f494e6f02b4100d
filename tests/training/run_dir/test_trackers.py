"""Trackers, for real: wandb and SwanLab offline, trackio and MLflow in a local database, TensorBoard's files; and those
that fail."""

import importlib.util
import json
import sys
import types
from contextlib import nullcontext
from unittest import mock

import pytest
from transformers import TrainerCallback

from qerl.base.errors import ConfigError
from qerl.config.data import without_secrets
from qerl.config.recipe import load_recipe
from tests.helpers.small_run import small_config
from training.preflight.checks import check_config, check_trackers
from training.run import resume, start
from training.run_dir.folder import new_run_dir
from training.run_dir.log import read_metrics
from training.run_dir.trackers import ROWS, TEXT, droppable_, log_table, open_trackers, table_of

NAMES = ("wandb", "trackio", "tensorboard")
MISSING = [name for name in NAMES if importlib.util.find_spec(name) is None]
installed = pytest.mark.skipif(bool(MISSING), reason=f"qerl[trackers] is not installed ({', '.join(MISSING)})")
pytestmark = pytest.mark.usefixtures("one_thread")
REPORTS = ("logging.report_to=[wandb, trackio, tensorboard]", "logging.completions_every=1", "noise.enabled=false")


@installed
def test_wandb_without_a_key_is_one_line_before_anything_is_loaded(tmp_path, monkeypatch):
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()  # it reads its environment once
    with pytest.raises(ConfigError, match=r"wandb, which has no key here: run `wandb login`, set WANDB_API_KEY, or"):
        check_config(load_recipe("tiny", ["logging.report_to=[wandb]"]))
    host = wandb.setup().settings.base_url.removeprefix("https://")
    (tmp_path / "netrc").write_text(f"machine {host} login user password {40 * 'a'}\n")
    check_config(load_recipe("tiny", ["logging.report_to=[wandb]"]))
    wandb.teardown()


@pytest.fixture(scope="module")
def reported(nvfp4_base, tmp_path_factory):
    """The directory of a run of 2 steps, resumed after its first, that reported to all three, and trackio's project."""
    folder = tmp_path_factory.mktemp("reported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_PROJECT", "mine")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        import trackio.utils

        patch.setattr(trackio.utils, "TRACKIO_DIR", folder / "trackio")
        patch.setattr("trackio.sqlite_storage.TRACKIO_DIR", folder / "trackio")
        given = (*REPORTS, "run.save_every=1")
        run = start(small_config(nvfp4_base, folder, *given, steps=1), "tiny").run_dir
        resume(run, steps=2)
        from trackio.sqlite_storage import SQLiteStorage

        yield run, SQLiteStorage.get_logs("mine", "run"), SQLiteStorage.get_all_run_configs("mine")


@installed
def test_tensorboard_has_the_metrics(reported):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _, _ = reported
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    rows = read_metrics(run)
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2]
    assert [event.value for event in events.Scalars("train/reward")] == pytest.approx([row["reward"] for row in rows])


@installed
def test_wandb_has_its_files_in_the_run_and_one_id_for_a_resumed_one(reported):
    run, _, _ = reported
    (ident,) = json.loads((run / ".trackers.json").read_text()).values()
    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(folder.name.endswith(ident) for folder in folders)
    logged = (folders[0] / f"run-{ident}.wandb").read_bytes()
    for text in (b"mine", b"learning_rate", b"rewards/digits"):
        assert text in logged
    (table,) = folders[0].glob("files/media/table/completions_*.json")
    table = json.loads(table.read_text())
    assert table["columns"] == ["step", "prompt", "completion", "advantage", "digits"]
    assert len(table["data"]) == 4


@installed
def test_trackio_has_the_metrics_the_recipe_and_completions(reported):
    run, logs, configs = reported
    rewards = [(log["train/global_step"], log["train/reward"]) for log in logs if "train/reward" in log]
    assert rewards == [(row["step"], pytest.approx(row["reward"])) for row in read_metrics(run)]
    tables = [log["completions"]["_value"] for log in logs if "completions" in log]
    assert [set(table[0]) for table in tables] == [{"step", "prompt", "completion", "advantage", "digits"}] * 2
    (config,) = configs.values()
    assert (config["optim"]["name"], config["run"]["save_every"]) == ("adamw", 1)


def alone(name):
    """The tracker has an extra of its own."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"qerl[{name}] is not installed")


def reported_to(name, base, folder):
    """The directory of a run of one step that is resumed for another."""
    report = f"logging.report_to=[{name}]"
    run = start(small_config(base, folder, *REPORTS[1:], report, "run.save_every=1", steps=1), "tiny").run_dir
    resume(run, steps=2)
    return run


@alone("mlflow")
def test_mlflow_has_one_run_with_the_metrics_the_recipe_and_completions(nvfp4_base, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    run = reported_to("mlflow", nvfp4_base, tmp_path)
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    rewards = [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, "reward")]
    assert rewards == [(row["step"], pytest.approx(row["reward"])) for row in read_metrics(run)]
    assert (found.info.run_name, found.info.status, found.data.params["optim.name"]) == ("run", "FINISHED", "adamw")
    tables = [file.path for file in client.list_artifacts(found.info.run_id, "completions")]
    assert tables == ["completions/step-000001.json", "completions/step-000002.json"]


@alone("swanlab")
def test_swanlab_has_its_files_in_the_run_and_one_id_for_a_resumed_one(nvfp4_base, tmp_path, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    run = reported_to("swanlab", nvfp4_base, tmp_path)
    (ident,) = json.loads((run / ".trackers.json").read_text()).values()
    folders = sorted((run / "swanlab").glob("run-*"))
    assert [folder.name.endswith(ident) for folder in folders] == [True, True]
    for folder in folders:
        assert b"train/reward" in (folder / f"run-{ident}.swanlab").read_bytes()
        assert len(list(folder.glob("media/echarts/*.json"))) == 1


def stand_in(monkeypatch, name, **members):
    module = types.ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_swanlab_without_a_key_is_refused_before_anything_is_loaded(monkeypatch):
    for settings, refused in (("online", None), True), (("online", "key"), False), (("offline", None), False):
        of = types.SimpleNamespace(mode=settings[0], api_key=settings[1])
        stand_in(monkeypatch, "swanlab", Settings=lambda of=of: of)
        with pytest.raises(ConfigError, match="or set SWANLAB_MODE=offline to keep") if refused else nullcontext():
            check_trackers(["swanlab"])


def test_mlflow_and_swanlab_get_tables(monkeypatch):
    got = []
    table = types.SimpleNamespace(Table=lambda: types.SimpleNamespace(add=lambda *given: given))
    stand_in(monkeypatch, "swanlab", echarts=table, log=lambda row, step: got.append((row, step)))
    stand_in(monkeypatch, "mlflow", log_table=lambda data, file: got.append((data, file)))
    rows = [{"prompt": "1 + 1", "completion": "2", "advantage": 0.0, "rewards": {"accuracy": 1.0}}]
    assert log_table(["mlflow", "swanlab"], 3, rows) == ["mlflow", "swanlab"]
    columns, cells = ["step", "prompt", "completion", "advantage", "accuracy"], [3, "1 + 1", "2", 0.0, 1.0]
    assert got == [
        ({name: [cell] for name, cell in zip(columns, cells, strict=True)}, "completions/step-000003.json"),
        ({"completions": (columns, [cells])}, 3),
    ]


@installed
def test_a_tracker_that_cannot_be_opened_leaves_nothing_that_blocks_the_next_try(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError("no network\nat all")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", broken)
    run_dir = tmp_path / "run"
    (run_dir / "tensorboard").mkdir(parents=True)
    config = load_recipe("tiny", ["logging.report_to=[tensorboard]"])
    with (
        pytest.raises(ConfigError, match=r"names tensorboard, which cannot be opened \(no network"),
        open_trackers(config, run_dir, 0),
    ):
        pass
    for name in ("wandb", ".trackers.json"):
        (run_dir / name).touch()
    assert new_run_dir(str(run_dir), "tiny") == run_dir


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (None, [0, "FINISHED", "success"]),
        (SystemExit(143), [255, "KILLED", "aborted"]),
        (OSError("no room"), [1, "FAILED", "crashed"]),
        ("a signal", [255, "KILLED", "aborted"]),  # the loop ends, and there is no result
    ],
)
def test_trackers_are_told_how_the_run_ended_one_by_one(tmp_path, monkeypatch, caplog, error, ends):
    opened, closed = [], []
    stand_in(monkeypatch, "wandb", run=None, Settings=dict)
    stand_in(monkeypatch, "swanlab", init=lambda **given: opened.append(given["id"]), Settings=dict)
    stand_in(monkeypatch, "mlflow", MlflowException=OSError, set_experiment=str, log_params=dict)
    wandb, swanlab, mlflow = (sys.modules[name] for name in ("wandb", "swanlab", "mlflow"))
    wandb.init = lambda **given: setattr(wandb, "run", mock.Mock(id=given["id"]))
    wandb.finish = mock.Mock(side_effect=lambda exit_code: closed.append(exit_code) or 1 / 0)
    swanlab.has_run, swanlab.get_run = lambda: True, lambda: mock.Mock(id=opened[0])
    mlflow.start_run, mlflow.log_dict, mlflow.utils = mock.Mock(), mock.Mock(), mock.MagicMock()
    mlflow.active_run = lambda: mlflow.start_run.return_value if mlflow.start_run.called else None
    mlflow.start_run.return_value.info.run_id = "ours"
    swanlab.finish, mlflow.end_run, mlflow.flush_async_logging = closed.append, closed.append, list
    config = load_recipe("tiny", ["logging.report_to=[wandb, mlflow, swanlab]"])
    raised = isinstance(error, BaseException)
    with pytest.raises(type(error)) if raised else nullcontext(), open_trackers(config, tmp_path, 0):
        if raised:
            raise error
        if error is None:
            (tmp_path / "adapter").mkdir()
    assert closed == ends
    assert "wandb could not be closed (division by zero)" in caplog.text


def test_a_run_that_the_caller_has_open_is_joined_at_wandb_and_refused_elsewhere(tmp_path, monkeypatch, caplog):
    theirs, ended = mock.Mock(id="theirs"), mock.Mock()
    theirs.info.run_id = "theirs"
    stand_in(monkeypatch, "wandb", run=theirs, finish=ended)
    with open_trackers(load_recipe("tiny", ["logging.report_to=[wandb]"]), tmp_path, 0):
        pass
    assert "run theirs open, which gets the numbers and stays open" in caplog.text
    (recipe,), _ = theirs.config.update.call_args
    assert (recipe["run"]["steps"], (tmp_path / ".trackers.json").exists()) == (40, False)
    stand_in(monkeypatch, "mlflow", active_run=lambda: theirs, end_run=ended)
    open_ = {"has_run": lambda: True, "get_run": lambda: theirs, "finish": ended}
    stand_in(monkeypatch, "swanlab", init=mock.Mock(side_effect=RuntimeError("one is active")), Settings=dict, **open_)
    for name, said in ("mlflow", ".* has run theirs open: end it"), ("swanlab", "one is active"):
        config = load_recipe("tiny", [f"logging.report_to=[{name}]"])
        refused = pytest.raises(ConfigError, match=rf"{name}, which cannot be opened \({said}")
        with refused, open_trackers(config, tmp_path, 0):
            pass
    assert not ended.called


def test_tables_are_bounded_and_have_the_rewards_of_all_sources_as_columns():
    """Each row has the rewards of its own source alone; a table whose rows differ in width is refused by trackers."""
    shared = {"prompt": "p", "completion": "c" * 10 * TEXT, "advantage": 0.5}
    columns, rows = table_of(3, [{**shared, "rewards": own} for own in ({"a": 1.0}, {"b": 0.25, "a": 0.0})] * ROWS)
    assert columns == ["step", "prompt", "completion", "advantage", "a", "b"]
    assert (len(rows), rows[0][0], rows[0][3:], rows[1][4:]) == (ROWS, 3, [0.5, 1.0, None], [0.0, 0.25])
    assert len(rows[0][2]) == TEXT


def test_the_recipe_goes_there_without_secrets():
    args = "{api_key: abc, deep: {password: p, n: 3, list: ['Bearer xyz', plain]}, max_tokens: 5, token_env: '${KEY}'}"
    recipe = load_recipe("tiny", [f"rewards=[{{name: 'a.py:f', args: {args}}}, {{name: accuracy}}]"])
    shown = without_secrets(recipe.model_dump(mode="json"))
    assert shown["rewards"][0]["args"] == {
        "api_key": "(not shown)",
        "deep": {"password": "(not shown)", "n": 3, "list": ["(not shown)", "plain"]},
        "max_tokens": 5,
        "token_env": "${KEY}",
    }
    assert shown["data"] == recipe.model_dump(mode="json")["data"]


def test_a_tracker_that_fails_while_it_reports_is_left_out_with_one_warning(caplog):
    class Failing(TrainerCallback):
        calls = 0

        def on_train_begin(self, *args, **kwargs):
            raise OSError("no such project")

        def on_log(self, *args, **kwargs):
            self.calls += 1
            raise OSError("the server is gone")

    tracker = droppable_("wandb", Failing())
    with pytest.raises(OSError, match="no such project"):  # one that cannot begin still raises
        tracker.on_train_begin(None, None, None)
    for _ in range(3):
        assert tracker.on_log(None, None, None, logs={}) is None
    assert tracker.calls == 1
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "wandb failed and gets nothing more (the server is gone); metrics.jsonl is complete"


def test_a_table_that_fails_leaves_its_tracker_out(monkeypatch, caplog):
    stand_in(monkeypatch, "trackio", Table=lambda data: data, log=lambda row: 1 / 0)
    rows = [{"prompt": "1 + 1", "completion": "2", "advantage": 0.0, "rewards": {"accuracy": 1.0}}]
    assert log_table(["trackio", "tensorboard"], 3, rows) == ["tensorboard"]
    assert "the table of completions at trackio failed" in caplog.text
