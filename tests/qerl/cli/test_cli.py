"""The command line as users type it: the commands, their errors (one line, exit 2, nothing written), and speed."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import qerl
import qerl.cli.main
from qerl.base.versions import versions
from qerl.cli.main import app
from qerl.config.recipe import load_recipe, save_config
from tests.helpers.model_folders import without_template
from tests.helpers.small_run import REWARD, SETTINGS

ROOT = Path(__file__).parents[3]


def run(*arguments, cwd=None, timeout=280):
    """Run `python -m qerl.cli.main ...` in a separate process. Returns (exit code, stdout, stderr)."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "160"}
    command = [sys.executable, "-m", "qerl.cli.main", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def refusal(monkeypatch, capsys, *arguments):
    """The error line of a command that has to be refused; it runs in this process."""
    monkeypatch.setattr(sys, "argv", ["qerl", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        qerl.cli.main.main()
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "Traceback" not in "\n".join(lines)
    return lines[-1]


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small_train(*more):
    settings = [f"--set={setting}" for setting in SETTINGS]
    return ["train", "--recipe", "tiny", "--steps", 3, *settings, "--set=rewards=[{name: 'reward.py:digits'}]", *more]


def test_help_answers_at_once():
    """Counted in processor time, which other processes do not use up."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, out, _ = run("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert code == 0
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5  # 0.5; with torch 3 s and more
    assert all(f"  {command} " in out for command in ("quantize", "train", "eval", "plan", "recipes", "doctor"))
    assert "..." not in out.partition("Commands:")[2]  # no line of help is cut off


TRAIN_TINY = "train --recipe tiny --set model.format=bf16"
MISTAKES = {  # arguments -> what the error says
    "train --recipe tiny --quantize --set rewards=[{name:\0acuracy}]": "acuracy",
    "train --recipe tiny --quantize --data rwos.jsonl": r"'rwos.jsonl' \(did you mean rows.jsonl\?\)",
    f"{TRAIN_TINY} --data rows.jsonl --columns question=q,answer=aa": "no column 'aa' for the answer",
    f"{TRAIN_TINY} --data gsm8k": "'gsm8k' is neither a file nor a hub id",
    "train --resume runs/olb": r"there is no folder runs/olb \(did you mean runs/old",
    "train --resume 30": "no checkpoint of step 30: there are steps 20",
    "train --resume runs/old": "no folder ./gone",
    "train --resume runs/lost": r"data\.source lost\.jsonl, which is not here",
    "eval arith --model tiny --data rows.jsonl": "no column 'question'",
    "eval arith --run runs/olb": r"there is no folder runs/olb \(did you mean runs/old",
    "eval arith --model base": "the tokenizer in base has no chat template",
    "chat --model base": "the tokenizer in base has no chat template",
}
if not torch.cuda.is_available():
    MISTAKES |= {
        f"{TRAIN_TINY} --set rollout.engine=vllm": "is vllm, but there is no CUDA device here: write",
        "eval arith --model tiny --engine vllm": "is vllm, but there is no CUDA device here: write",
    }


RUN_ALL = """
import contextlib, io, json, sys, qerl.cli.main
found = {}
for line in json.load(sys.stdin):
    sys.argv = ["qerl", *(word.replace("\\0", " ") for word in line.split(" "))]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            qerl.cli.main.main()
        except SystemExit as end:
            code = end.code
    heavy = [name for name in ("torch", "transformers", "numpy", "datasets") if name in sys.modules]
    found[line] = code, said.getvalue(), heavy
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Exit code, output and loaded modules for each of MISTAKES, which one process runs in turn."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_mistakes(folder)
    before = sorted(folder.rglob("*"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["OMP_NUM_THREADS"] = "1"  # else the choice of threads reads a header, for which safetensors takes numpy
    command = [sys.executable, "-c", RUN_ALL]
    told = {"cwd": folder, "env": environment, "input": json.dumps([*MISTAKES])}
    done = subprocess.run(command, **told, capture_output=True, text=True, check=True, timeout=240)
    assert sorted(folder.rglob("*")) == before
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_refused_before_anything_heavy_is_imported(refusals, line):
    code, said, heavy = refusals[line]
    error = said.strip().splitlines()[-1]
    assert (code, heavy) == (2, [])
    assert error.startswith("error: ")
    assert re.search(MISTAKES[line], error), error
    assert "loading" not in said


def write_mistakes(folder):
    (folder / "rows.jsonl").write_text('{"q": "1 + 1", "a": "2"}\n')
    without_template(folder / "base")
    for name, recipe in {
        "lost": load_recipe("tiny", ["model.format=bf16"], data="lost.jsonl"),
        "old": load_recipe("tiny", [], base="./gone"),
    }.items():
        run_dir = folder / "runs" / name
        (run_dir / "checkpoints" / "step-000020").mkdir(parents=True)
        save_config(recipe, run_dir / "config.yaml")
        (run_dir / "metrics.jsonl").write_text("")
    os.utime(folder / "runs" / "lost" / "metrics.jsonl", (1e9, 1e9))


def test_a_command_says_so_before_it_loads_torch(workdir, monkeypatch, caplog):
    """Users take five seconds without a message for a hang."""
    (workdir / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    caplog.set_level("INFO")
    monkeypatch.setattr(sys, "argv", ["qerl", *TRAIN_TINY.split(), "--data", "rows.jsonl", "--dry-run"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else the choice of threads is told first
    with pytest.raises(SystemExit):
        qerl.cli.main.main()
    assert caplog.messages[0] == "loading torch and transformers"


def test_the_three_commands_as_typed(workdir, here):
    (workdir / "reward.py").write_text(REWARD.read_text())
    code, _, err = here("quantize", "--model", "tiny", "--method", "rtn", "--calibration", "none")
    assert code == 0, err
    assert (workdir / "checkpoints" / "tiny-NVFP4A16" / "quantize_report.json").is_file()
    code, _, err = here(*small_train())
    assert code == 0, err
    (run_dir,) = (workdir / "runs").iterdir()
    assert run_dir.name.startswith("tiny-")
    code, out, err = here("eval", "arith", "--limit", 4, "--max-new-tokens", 16, "--load", "nvfp4")
    assert code == 0, err
    assert str(run_dir.relative_to(workdir)) in out + err  # it names the model that it chose
    (result,) = run_dir.glob("eval/*/result.json")
    assert json.loads(result.read_text())["questions"] == 4
    code, _, err = here("report", run_dir, "--before", result.parent, "--after", result.parent)
    assert code == 0, err
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    text = (run_dir / "report.md").read_text()
    assert "| accuracy |" in text
    assert "After training: cannot tell. +0.0 points" in text  # an evaluation is compared with itself
    code, _, err = here("grade", result.parent / "completions.jsonl", "--task", "arith")
    assert code == 0, err


def test_recipes_lists_every_recipe_with_its_purpose():
    result = CliRunner().invoke(app, ["recipes"])
    names = [line.split()[0] for line in result.output.splitlines()]
    assert {"tiny", "dapo_7b", "dapo_7b_bf16", "grpo_gsm8k_7b", "llama3_8b", "qwen3_8b"} <= set(names)
    assert all(len(line.split()) > 4 for line in result.output.splitlines())
    assert "rollout.group_size" in CliRunner().invoke(app, ["recipes", "keys"]).output


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["qerl", "recipes"])
    monkeypatch.setattr("qerl.config.recipe.recipe_names", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        qerl.cli.main.main()


def test_a_copied_recipe_is_the_shipped_one_and_never_overwrites(workdir, monkeypatch, capsys):
    for name in ("tiny", "dapo_7b_bf16"):
        assert CliRunner().invoke(app, ["recipes", "copy", name]).exit_code == 0
        assert load_recipe(f"./{name}.yaml") == load_recipe(name)
    (workdir / "tiny.yaml").write_text("mine")
    assert "exists and is left as it is" in refusal(monkeypatch, capsys, "recipes", "copy", "tiny")
    assert (workdir / "tiny.yaml").read_text() == "mine"
    assert "did you mean" in refusal(monkeypatch, capsys, "recipes", "copy", "tinny")
    assert CliRunner().invoke(app, ["recipes", "copy", "tiny", "--out", "other.yaml"]).exit_code == 0
    assert (workdir / "other.yaml").is_file()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("qerl com", ["compare"]),
        ("qerl train --res", ["--resume"]),
        ("qerl train --recipe dapo_32", ["dapo_32b", "dapo_32b_bf16"]),
        ("qerl recipes show ti", ["tiny", "tiny_fp8", "tiny_moe"]),
        ("qerl plan --gpu h", ["h100", "h100-nvl", "h200"]),
        ("qerl plan --set noise.sigma_s", ["noise.sigma_start="]),
        ("qerl eval aime", ["aime24", "aime25"]),
        ("qerl merge --to n", ["nvfp4"]),
    ],
)
def test_a_shell_completes(typed, completed):
    """The call that the script of `qerl --install-completion` makes when the tab key is pressed."""
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_QERL_COMPLETE": "complete_bash"}
    done = CliRunner().invoke(app, env=asked, prog_name="qerl")
    assert done.stdout.split() == completed


def test_an_interrupt_during_the_start_prints_one_word(workdir, nvfp4_base):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "qerl.cli.main", *map(str, small_train("--model", nvfp4_base))]
    (workdir / "reward.py").write_text(REWARD.read_text())
    told = {"cwd": workdir, "env": {**os.environ, "PYTHONPATH": path}, "stderr": subprocess.PIPE, "text": True}
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731, tests in the background ignore SIGINT
    process = subprocess.Popen(command, **told, preexec_fn=heard)
    assert process.stderr.readline().startswith("loading torch")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == "interrupted"
    assert "Traceback" not in err


def test_what_is_recorded_is_the_version_of_the_code(monkeypatch):
    """An editable install keeps the version that it was made with."""
    monkeypatch.setattr(qerl, "__version__", "9.9")
    assert versions()["qerl"] == "9.9"


def test_the_version_names_the_stack_without_loading_it():
    script = "import sys; from qerl.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", script, "--version"], capture_output=True, text=True, cwd=ROOT)
    lines = dict(line.split(" ", 1) for line in found.stdout.splitlines())
    assert found.returncode == 0, found.stderr
    assert lines["qerl"] == qerl.__version__
    assert lines["torch"][0].isdigit()
    assert "vllm" in lines


def test_a_plan_of_a_model_alone_says_which_recipe_it_takes(here):
    code, stdout, stderr = here("plan", "--model", "Qwen/Qwen2.5-3B-Instruct", "--gpu", "24")
    assert code == 0, stderr
    assert "no --recipe given: planning with dapo_7b" in stderr
    assert "seconds per step" in stdout
