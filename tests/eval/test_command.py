"""The options of evaluation: equal for both commands, quick to import, and with one line for each mistake."""

import re
import runpy
import subprocess
import sys
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from eval.settings import EvalSettings, parse_pass_k
from qerl.base.errors import ConfigError
from qerl.cli.evaluate import evaluate, main, task_app
from qerl.cli.options import command_of

TASKS = ("gsm8k", "math500", "amc23", "aime24", "aime25", "arith")


def help_of(app, *arguments):
    return CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "200"}).output


def test_help_needs_no_torch():
    code = (
        "import sys; from qerl.cli.evaluate import task_app\n"
        "try: task_app('gsm8k')(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'peft', 'vllm', 'sympy'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--max-new-tokens" in done.stdout


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_its_module(task, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"eval/{task}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"eval.{task}", run_name="__main__")
    assert ended.value.code == 0
    assert f"Usage: python -m eval.{task}" in capsys.readouterr().out


def test_both_commands_have_the_same_options():
    whole = typer.Typer(rich_markup_mode=None, add_completion=False)
    whole.command()(command_of(evaluate))
    options = [set(re.findall(r"--[a-z-]+", help_of(app))) for app in (whole, task_app("gsm8k"))]
    assert options[0] == options[1]
    assert {"--model", "--samples", "--trust-remote-code"} < options[0]
    usage = [help_of(app).splitlines()[0].lower() for app in (whole, task_app("gsm8k"))]
    assert ["task" in line for line in usage] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--load", "int4"], "'int4' is not one of"),
        (["--limit", "0"], "--limit 0 is not possible: write 1 or more"),
        (["--samples", "0"], "--samples 0 is not possible: write 1 or more"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 is not possible: write 1 or more"),
        (["--seed", "-1"], "--seed -1 is not possible: write 0 or more"),
        (["--temperature", "-0.5"], "--temperature -0.5 is not possible: write 0 (greedy)"),
        (["--temperature", "0.005"], "--temperature 0.005 is below 0.01, at which vllm samples instead"),
        (["--temperature", "warm"], "--temperature"),
        (["--temperature", "nan"], "--temperature nan is not possible"),
        (["--top-p", "1.5", "--sampled"], "--top-p 1.5 is not possible"),
        (["--top-p", "0.9"], "does nothing at temperature 0 (greedy)"),
        (["--samples", "4"], "4 equal completions"),
        (["--sampled", "--temperature", "0"], "contradict each other"),
        (["--sampled", "--samples", "2", "--pass-k", "4"], "--pass-k 4 needs 1 to --samples (2)"),
        (["--sampled", "--samples", "2", "--pass-k", "1,x"], "--pass-k '1,x' is not a list of numbers"),
        (["--prompt-template", "Solve it."], "has no {question}"),
        ([], "no --model was given"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main("gsm8k", arguments)
    assert stopped.value.code == 2
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if not line.startswith(("Usage:", "Try "))]
    assert message in lines[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "temperature", "top_p"),
    [
        ((False, None, None), 0.0, 1.0),
        ((True, None, None), 0.6, 0.95),  # as in the reference's evaluation
        ((True, 1.0, None), 1.0, 0.95),
        ((True, None, 1.0), 0.6, 1.0),
        ((False, 0.7, None), 0.7, 1.0),
        ((False, 0.7, 0.9), 0.7, 0.9),
    ],
)
def test_sampled_sets_the_values_that_are_not_given(given, temperature, top_p):
    sampled, *asked = given
    settings = EvalSettings(task="gsm8k", sampled=sampled, temperature=asked[0], top_p=asked[1])
    assert (settings.temperature, settings.top_p) == (temperature, top_p)
    assert replace(settings, limit=None) == settings


def test_settings_refuse_values_that_the_command_line_cannot_express():
    assert parse_pass_k("8,1, 4,1") == (1, 4, 8)
    with pytest.raises(ConfigError, match="--load 'int4' is not known: write auto, nvfp4, fp8_block, bf16"):
        EvalSettings(task="gsm8k", load="int4")
