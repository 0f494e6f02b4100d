"""Several checkpoints of a run in one call, a file as the task, and what a failed evaluation leaves behind."""

import json
import shutil

import pytest

import eval.run
from eval.plan import make_plan
from eval.result import COMPLETIONS, RESULT
from eval.run import adapters_by_step, choose, run_checkpoints, run_eval
from eval.settings import EvalSettings
from qerl.base.errors import CheckpointError, ConfigError, EngineError
from qerl.checkpoint.folder import kind_of
from qerl.cli.evaluate import main
from tests.helpers.eval_factory import build_model, make_adapter, make_run, pack_model

STEPS = (2, 4, 10)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "mine.jsonl"
    path.write_text("".join(json.dumps({"problem": f"What is {n}?", "result": str(n)}) + "\n" for n in range(6)))
    return path


def add_checkpoints(run, model):
    for step in STEPS:
        make_adapter(run / "checkpoints" / f"step-{step:06d}", model, random_b=True, seed=step)
    return run


@pytest.fixture
def run(model, tmp_path):
    return add_checkpoints(make_run(tmp_path / "run", model), model)


def settings_of(rows, **changes):
    given = {"task": str(rows), "columns": {"question": "problem", "answer": "result"}, "max_new_tokens": 8}
    return EvalSettings(**{**given, "engine": "transformers", **changes})


def texts(folder):
    lines = (folder / COMPLETIONS).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["completion"] for line in lines]


@pytest.fixture
def opened(monkeypatch):
    """The list of bases that were opened; the real engine opens them."""
    bases = []

    def count(base, *arguments, **options):
        bases.append(base)
        return real(base, *arguments, **options)

    real = eval.run.open_engine
    monkeypatch.setattr(eval.run, "open_engine", count)
    return bases


def test_one_engine_for_all_checkpoints_gives_the_same_as_one_for_each(rows, run, opened, tmp_path):
    results = run_checkpoints(settings_of(rows, run=run))
    assert len(opened) == 1
    assert [result.details["step"] for result in results] == list(STEPS)
    assert all(result.out.parent == run / "eval" for result in results)
    assert len({tuple(texts(result.out)) for result in results}) == 3
    for step, result in zip(STEPS, results, strict=True):
        folder = run / "checkpoints" / f"step-{step:06d}"
        alone = run_eval(settings_of(rows, model=str(run), adapter=str(folder), out=tmp_path / str(step)))
        assert texts(alone.out) == texts(result.out)
    opened.clear()
    assert [r.summary for r in run_checkpoints(settings_of(rows, run=run))] == [r.summary for r in results]
    assert opened == []


def test_the_checkpoints_of_a_4_bit_run_can_be_evaluated_on_its_16_bit_base(rows, model, tmp_path):
    packed = pack_model(tmp_path / "packed", model)
    (packed / "quantize_report.json").write_text(json.dumps({"source": str(model)}))
    run = add_checkpoints(make_run(tmp_path / "run", model), model)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(model), str(packed)).replace("format: bf16", "format: nvfp4"))
    assert kind_of(packed) == "quantized"
    assert make_plan(settings_of(rows, model=str(run))).ref.base == str(packed)
    (result,) = run_checkpoints(settings_of(rows, run=run, checkpoints="last", load="bf16", out=tmp_path / "out"))
    assert (result.details["format"], result.details["base"]) == ("bf16", str(model))
    assert result.out == tmp_path / "out" / "step-000010"
    adapter = run / "checkpoints" / "step-000010"
    plain = settings_of(rows, model=str(model), adapter=str(adapter), out=tmp_path / "plain")
    prompt = {
        "system_prompt": result.details["system_prompt"] or "",
        "prompt_template": result.details["prompt_template"],
    }
    assert texts(run_eval(EvalSettings(**{**vars(plain), **prompt})).out) == texts(result.out)


def test_steps_are_chosen_by_number(run, model, tmp_path):
    with pytest.raises(CheckpointError, match="no run directory"):
        adapters_by_step(run / "checkpoints" / "step-000002")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        adapters_by_step(make_run(tmp_path / "young", model))
    (run / "checkpoints" / "step-000012").mkdir()  # without an adapter
    found = adapters_by_step(run)
    assert list(choose(found, "10, 2")) == [2, 10]
    assert list(choose(found, "last")) == [10]
    for asked in ("3", "2,x", "", "newest"):
        with pytest.raises(ConfigError, match="write all, last, or steps of 2, 4, 10"):
            choose(found, asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoints", "all"], "--checkpoints all of which run?"),
        (["--run", "r", "--model", "tiny"], "leave out --model and --adapter"),
        (["--run", "r"], "--run r: there is no folder r"),
    ],
)
def test_options_that_do_not_go_together_give_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main("gsm8k", arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_shows_one_column_per_step(rows, run, capsys):
    columns = "question=problem,answer=result"
    with pytest.raises(SystemExit) as stopped:
        main("gsm8k", ["--data", str(rows), "--columns", columns, "--run", str(run), "--max-new-tokens", "8",
                       "--checkpoints", "2,10", "--engine", "transformers"])  # fmt: skip
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "step 2" in shown
    assert "step 10" in shown
    assert shown.count("completions and result:") == 2


def test_a_file_of_rows_can_be_the_task(rows, model, tmp_path):
    result = run_eval(settings_of(rows, model=str(model), out=tmp_path / "out"))
    assert (result.task, result.summary.questions) == ("mine", 6)
    with pytest.raises(ConfigError, match="leave --data out"):
        make_plan(settings_of(rows, data="x.jsonl", model=str(model)))
    assert json.loads((result.out / RESULT).read_text())["unparsed_share"] == 0


def test_a_failure_before_the_first_batch_leaves_nothing(rows, model, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise EngineError("no memory")

    out = tmp_path / "a" / "b"
    with monkeypatch.context() as patch:
        patch.setattr(eval.run, "open_engine", fail)
        with pytest.raises(EngineError):
            run_eval(settings_of(rows, model=str(model), out=out))
    assert list(tmp_path.iterdir()) == []
    run_eval(settings_of(rows, model=str(model), out=out, batch_size=2))
    shutil.copytree(out, tmp_path / "kept")
    (tmp_path / "kept" / RESULT).unlink()
    lines = (out / COMPLETIONS).read_bytes().splitlines(keepends=True)
    (tmp_path / "kept" / COMPLETIONS).write_bytes(b"".join(lines[:2]))
    with monkeypatch.context() as patch:
        patch.setattr(eval.run, "open_engine", fail)
        with pytest.raises(EngineError):
            run_eval(settings_of(rows, model=str(model), out=tmp_path / "kept", batch_size=2))
    assert (tmp_path / "kept" / COMPLETIONS).read_bytes() == b"".join(lines[:2])
