"""lighteval's own pipeline on a local task and the embedded model."""

import json

import pytest
import torch

from eval.lighteval_suite import run_suite
from eval.settings import EvalSettings
from qerl.base.errors import ConfigError
from qerl.cli.evaluate import main

TASKS = """
from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc


def ask(row, task_name):
    return Doc(query=row["question"], choices=row["choices"], gold_index=row["gold"], task_name=task_name)


def config(name, metric):
    return LightevalTaskConfig(
        name=name, prompt_function=ask, hf_repo={folder!r}, hf_subset="default", metrics=[metric],
        hf_avail_splits=["test"], evaluation_splits=["test"], generation_size=12, stop_sequence=[],
    )


TASKS_TABLE = [config("mine", Metrics.exact_match), config("choose", Metrics.loglikelihood_acc)]
"""


@pytest.fixture
def tasks_file(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [
        {"question": f"What is {n} plus 2?", "choices": [f" {n + 2}", " banana and more"], "gold": 0} for n in (1, 2, 3)
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "tasks.py"
    path.write_text(TASKS.replace("{folder!r}", repr(str(folder))))
    return path


def suite(tasks_file, **given):
    return EvalSettings(**{"task": "mine|0", "model": "tiny", "suite": "lighteval", "suite_tasks": tasks_file, **given})


def test_local_tasks_run_and_the_choices_are_ranked_by_our_engine(tasks_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, out = run_suite(suite(tasks_file, task="mine|0,choose|0", engine="transformers", out=tmp_path / "out"))
    assert torch.is_grad_enabled(), "lighteval's import switches gradients off; a run after it could not train"
    assert set(result["scores"]) == {"mine:0", "choose:0"} or set(result["scores"]) == {"mine|0", "choose|0"}
    chosen = next(v for k, v in result["scores"].items() if k.startswith("choose"))
    assert next(v for k, v in chosen.items() if not k.endswith("_stderr")) == 1.0  # a number, not "banana"
    assert json.loads((out / "lighteval.json").read_text())["scores"] == result["scores"]


def refused(task, tasks_file, out, capsys):
    """The one line that the command gives, which leaves nothing."""
    with pytest.raises(SystemExit) as stopped:
        main(task, ["--suite", "lighteval", "--suite-tasks", str(tasks_file), "--model", "tiny", "--out", str(out)])
    assert stopped.value.code == 2
    assert not out.exists()
    return next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))


def test_a_missing_task_gives_one_line_and_leaves_nothing(tasks_file, tmp_path, capsys):
    assert "Cannot find task none" in refused("none", tasks_file, tmp_path / "out", capsys)


def test_a_host_that_cannot_be_reached_is_named_in_one_line(tasks_file, tmp_path, capsys):
    download = "import requests\n    requests.get('http://127.0.0.1:9/rows.pkl')\n    return Doc("
    tasks_file.write_text(tasks_file.read_text().replace("return Doc(", download))
    line = refused("mine|0", tasks_file, tmp_path / "out", capsys)
    assert line.startswith("error: lighteval cannot run 'mine|0' (")
    assert "127.0.0.1" in line
    assert line.endswith("without it lighteval downloads what a task needs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite-tasks", "x.py"], "belongs to --suite lighteval"),
        (["--suite", "lighteval", "--data", "x.jsonl"], "--data does not go with --suite lighteval"),
        (["--suite", "helm"], "'helm' is not"),
    ],
)
def test_options_that_do_not_fit_give_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main("gsm8k", arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", [{"memory": 4}, {"cap_gib": 24}, {"kernel": "marlin"}], ids=str)
def test_options_of_vllm_are_refused_where_transformers_runs(tasks_file, tmp_path, option):
    settings = suite(tasks_file, engine="transformers", out=tmp_path / "out", **option)
    with pytest.raises(ConfigError, match=f"--{next(iter(option)).replace('_', '-')} is vllm's"):
        run_suite(settings)
    assert not (tmp_path / "out").exists()


# What lighteval 0.13 says with its own pin, latex2sympy2_extended 1.0.6.
PAIRS = [
    (r"\frac{1}{2}", "0.5", 1.0),
    (r"2\sqrt{3}", r"\sqrt{12}", 1.0),
    ("x^2+2x+1", "(x+1)^2", 1.0),
    ("[0,1)", "[0,1)", 1.0),
    ("[0,1)", "(0,1)", 0.0),
    (r"\{1,2\}", "1,2", 1.0),
    ("6-5i", "6+5i", 0.0),
]


def test_lightevals_own_metric_for_formulas_works_beside_our_math_verify(tmp_path):
    (tmp_path / "tasks.py").write_text("")
    with pytest.raises(ConfigError, match="no TASKS_TABLE"):
        run_suite(suite(tmp_path / "tasks.py", out=tmp_path / "out"))
    from lighteval.metrics.dynamic_metrics import LatexExtractionConfig, MultilingualExtractiveMatchMetric
    from lighteval.models.model_output import ModelResponse
    from lighteval.tasks.requests import Doc
    from lighteval.utils.language import Language

    targets = [LatexExtractionConfig()]
    metric = MultilingualExtractiveMatchMetric(
        language=Language.ENGLISH, gold_extraction_target=targets, pred_extraction_target=targets
    )
    for gold, answer, score in PAIRS:
        doc = Doc(query="", choices=[f"${gold}$"], gold_index=0, task_name="t")
        assert metric.compute(doc, ModelResponse(text=[f"\\boxed{{{answer}}}"])) == score, (gold, answer)
