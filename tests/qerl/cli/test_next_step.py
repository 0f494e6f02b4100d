"""The command that is named at the end of each stage: it parses as typed, and the next stage takes what it names."""

import json
import shlex
from pathlib import Path

import pytest

from qerl.checkpoint.folder import TINY_FOLDER
from qerl.cli.next_step import after_evaluating, after_quantizing, after_training
from qerl.config.recipe import load_recipe, recipe_names, save_config
from qerl.data.tasks import TASKS
from quantize.run import quantize_checkpoint
from tests.helpers.parsed import check_parses
from tests.helpers.roundings import ROUNDING


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def quantized(folder, source):
    Path(folder).mkdir(parents=True)
    (Path(folder) / "quantize_report.json").write_text(json.dumps({"source": source}))
    return Path(folder)


def run(folder, *overrides, recipe="tiny", **flags):
    Path(folder).mkdir(parents=True)
    save_config(load_recipe(recipe, list(overrides), **flags), Path(folder) / "config.yaml")
    return Path(folder)


@pytest.mark.parametrize(
    ("folder", "source", "said"),
    [
        ("checkpoints/tiny-NVFP4A16", "tiny", "qerl train --recipe tiny"),
        ("checkpoints/Qwen2.5-7B-Instruct-NVFP4A16", "Qwen/Qwen2.5-7B-Instruct", "qerl train --recipe dapo_7b"),
        ("checkpoints/Qwen2.5-1.5B-Instruct-NVFP4A16", "Qwen/Qwen2.5-1.5B-Instruct",
         "qerl train --recipe first_evening"),
        ("mine", "Qwen/Qwen2.5-7B-Instruct", "qerl train --recipe dapo_7b --model mine"),
        ("my own", "/models/another", "qerl train --recipe first_evening --model 'my own'"),
    ],
)  # fmt: skip
def test_after_quantizing_comes_training_on_that_folder(folder, source, said):
    assert after_quantizing(str(quantized(folder, source))) == said
    check_parses(said)


@pytest.mark.parametrize("recipe", recipe_names())
def test_after_training_comes_evaluation_on_rows_that_were_not_trained_on(recipe):
    command = after_training(run("runs/a b", recipe=recipe))
    check_parses(command)
    program, verb, task, *rest = shlex.split(command)
    assert (program, verb, rest) == ("qerl", "eval", ["--model", "runs/a b"])
    trained = TASKS[load_recipe(recipe).data.task]
    assert "test" in TASKS[task].splits
    assert (TASKS[task].answer_kind, trained.name in (task, "bigmath", "bigmath_hard", "dapo_math")) == (
        trained.answer_kind,
        True,
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), "report runs/own"),
        (("validation.source=held out.jsonl",),
         "eval own --model runs/own --data 'held out.jsonl' --grader 'my own/grader.py'"),
        (("validation.source=a.jsonl", "data.columns={question: q}", "data.grader=null"),
         "eval own --model runs/own --data a.jsonl --columns question=q"),
        (("validation.source=a.jsonl", "data.grader=null", "rewards=[{name: format}]"), "report runs/own"),
        (("validation.source=a.jsonl", "validation.split=train"), "report runs/own"),
        (("validation.source=a.jsonl", "data.grader='python:right'"), "report runs/own"),
        (("validation.source=a.jsonl", "data.grader=null", "environment={name: 'mine.py:Game'}"),
         "eval own --model runs/own --data a.jsonl --environment mine.py:Game"),
    ],
)  # fmt: skip
def test_after_training_on_ones_own_rows_all_that_is_needed_is_named(settings, words):
    given = ("data.source=rows.jsonl", "data.task=own", "data.grader=my own/grader.py", "validation.every=2")
    command = after_training(run("runs/own", *given, *settings))
    assert command == f"qerl {words}"
    check_parses(command)


def test_after_training_on_several_sources_one_with_rows_of_its_own_for_it_is_named():
    sources = (
        "data.sources=[{name: a, task: own, source: a.jsonl}, "
        "{name: b, task: own, source: b.jsonl, grader: g.py, validation: {source: c.jsonl}}, {name: c, task: gsm8k}]"
    )
    assert after_training(run("runs/b", sources, "validation.every=2")) == (
        "qerl eval own --model runs/b --data c.jsonl --grader g.py"
    )
    assert after_training(run("runs/c", sources.replace("validation: {source: c.jsonl}", ""))) == (
        "qerl eval gsm8k --model runs/c"
    )
    none = "data.sources=[{name: a, task: own, source: a.jsonl}, {name: b, task: own, source: b.jsonl}]"
    assert after_training(run("runs/d", none)) == "qerl report runs/d"


def test_after_evaluating_an_adapter_that_is_merged_already_comes_talking_to_it():
    run("runs/demo")
    Path("merged/demo-nvfp4").mkdir(parents=True)
    Path("runs/demo/adapter").mkdir()
    assert after_evaluating("base", "runs/demo/adapter", "nvfp4") == "qerl chat --model merged/demo-nvfp4"
    Path("merged/merge_report.json").write_text("{}")
    assert after_evaluating("merged", None, "bf16") == "qerl chat --model merged"


def test_each_printed_line_works_as_it_is(tmp_path, here):
    rows = [{"prompt": f"{n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    for name, own in (("rows", rows), ("more", rows[20:]), ("test", rows[:3])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))

    def printed(*words):
        code, out, err = here(*words)
        assert code == 0, err
        return shlex.split((out + err).rpartition("Next: qerl ")[2].splitlines()[0])

    quantize_checkpoint("tiny", tmp_path / "checkpoints" / "tiny-NVFP4A16", ROUNDING)  # else --quantize takes longer
    line = printed("init", "rows.jsonl", "--out", "my own", "--recipe", "tiny")
    code, _, err = here(*line)
    assert code == 0, err
    sources = (
        "data.sources=[{name: a, source: rows.jsonl, validation: {source: test.jsonl}}, {name: b, source: more.jsonl}]"
    )
    few = ("run.steps=1", "noise.enabled=false", "rollout.max_new_tokens=8", "rollout.prompts_per_step=2")
    asked = ("data.source=null", sources, *few)
    settings = [word for key in asked for word in ("--set", key)]
    line = printed("train", *line[1:3], "--quantize", "--out", "runs/own", *settings)
    assert line[:2] == ["eval", "own"]
    line = printed(*line, "--max-new-tokens", 8)
    line = printed(*line)
    assert line == ["chat", "--model", "merged/own-nvfp4"]


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_after_evaluating_an_adapter_comes_its_merge(format):
    folder = run("runs/demo") / "adapter"
    folder.mkdir()
    commands = [after_evaluating("base", str(adapter), format) for adapter in (folder, "runs/demo/checkpoints/step-4")]
    assert commands == [
        f"qerl merge --adapter runs/demo --to {format}",
        f"qerl merge --adapter runs/demo/checkpoints/step-4 --to {format}",
    ]
    for command in commands:
        check_parses(command)


@pytest.mark.parametrize(
    ("folder", "source", "said"),
    [
        ("checkpoints/tiny-FP8_BLOCK", "tiny", "qerl train --recipe tiny_fp8"),
        ("mine", "Qwen/Qwen2.5-7B-Instruct", "qerl train --recipe dapo_7b_fp8 --model mine"),
        ("other", "/models/x", "qerl train --recipe first_evening --model other --set model.format=fp8_block"),
    ],
)
def test_an_fp8_folder_is_trained_in_its_format(folder, source, said):
    made = quantized(folder, source)
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}
    (made / "config.json").write_text(json.dumps(config))
    assert after_quantizing(str(made)) == said
    check_parses(said)


def test_after_evaluating_weights_that_were_trained_comes_a_chat():
    model = run("runs/demo", recipe="qat_tiny") / "model"
    exported = Path("exported/demo-nvfp4")
    for folder in (model, exported):
        folder.mkdir(parents=True)
    (exported / "export_report.json").write_text("{}")
    said = [after_evaluating(str(folder), None, "nvfp4") for folder in (model, exported)]
    assert said == ["qerl chat --model runs/demo", "qerl chat --model exported/demo-nvfp4"]
    for command in said:
        check_parses(command)


def test_after_evaluating_a_base_comes_training():
    folder = quantized("checkpoints/tiny-NVFP4A16", "tiny")
    before = {
        str(folder): "qerl train --recipe tiny",
        str(TINY_FOLDER): "qerl train --recipe tiny",
        "Qwen/Qwen2.5-7B-Instruct": "qerl train --recipe dapo_7b --quantize",
        "org/other": "qerl train --recipe first_evening --model org/other --quantize",
    }
    assert {base: after_evaluating(base, None, "bf16") for base in before} == before
    for command in before.values():
        check_parses(command)
