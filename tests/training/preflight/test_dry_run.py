"""`qerl train --dry-run`, and plans of runs and adapters: what they show and what they refuse."""

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from qerl.base.errors import ConfigError, RewardError
from qerl.cli.main import app
from qerl.cli.plan import show_plan_at
from qerl.config.recipe import load_recipe
from qerl.plan.sizes import read_sizes
from tests.helpers.small_run import small_config
from training.preflight.dry_run import dry_run


def test_a_dry_run_shows_plan_data_and_rewards_and_writes_nothing(nvfp4_base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["train", "--recipe", "tiny", "--model", str(nvfp4_base), "--set", "data.limit=24", "--dry-run"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "24 prompts" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.strip().startswith("arith-train-0-")]
    assert len(rows) == 5
    assert all(row[-3:] == ["1", "/", "0"] for row in rows)  # the answer earns the reward, an empty completion does not
    assert "KV cache" in done.stdout
    assert not list(tmp_path.iterdir())


def shown(config):
    console = Console(file=StringIO(), width=200)
    dry_run(config, console, show_plan_at)
    return console.file.getvalue()


def test_with_an_environment_episodes_are_played_and_its_failures_seen(nvfp4_base, tmp_path):
    config = load_recipe("word_game", ("data.limit=24",), base=str(nvfp4_base), out=str(tmp_path / "run"))
    text = shown(config)
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("word_game-train-")]
    assert [row[-3:] for row in rows] == [["1", "/", "0"]] * 5
    assert "in each turn (reward 1):\nassistant: pears\n" in text
    code = "class Game:\n    def reset(self):\n        return 'go'\n"
    code += "    def step(self, text):\n        raise ValueError('no')\n"
    (tmp_path / "game.py").write_text(code, encoding="utf-8")
    given = (f"environment.name={tmp_path / 'game.py'}:Game", "data.limit=24")
    text = shown(load_recipe("word_game", given, base=str(nvfp4_base), out=str(tmp_path / "run")))
    assert "in each turn (failed: its environment step raised ValueError: no (game.py, line 5)):" in text


def test_rows_without_answers_show_what_their_question_earns(nvfp4_base, tmp_path):
    (tmp_path / "own.py").write_text("def long(completion):\n    return float(len(completion))\n", encoding="utf-8")
    rows = [{"question": f"What is {n} + 1?"} for n in range(4)]
    rows[1]["question"] += " please" * 40
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given = ("data.task=own", f"data.source={tmp_path / 'asked.jsonl'}")
    text = shown(small_config(nvfp4_base, tmp_path, *given, f"rewards=[{{name: '{tmp_path / 'own.py'}:long'}}]"))
    assert "long: the question / empty" in text
    assert re.search(r"What is 0 \+ 1\?\s+14 / 0", text)
    assert "prompt of row 1, " in text
    whole = f"<|im_start|>user\n{rows[0]['question']}<|im_end|>\n<|im_start|>assistant\n"
    assert f"the model learns the completion that follows it:\n{whole}" in text


def test_the_completion_that_a_reward_failed_on_is_kept_after_a_dry_run(nvfp4_base, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "def wrong(completions, **columns):\n    return [float('nan') for _ in completions]\n"
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    config = small_config(nvfp4_base, tmp_path, f"rewards=[{{name: '{tmp_path / 'own.py'}:wrong'}}]")
    with pytest.raises(RewardError) as raised:
        dry_run(config, Console(file=StringIO()), show_plan_at)
    saved = Path(re.search(r"\S+failed_reward\.json", str(raised.value))[0])
    assert json.loads(saved.read_text(encoding="utf-8"))
    (tmp_path / "own.py").write_text(code.replace("nan", "1"), encoding="utf-8")
    left = set(tmp_path.iterdir())
    dry_run(config, Console(file=StringIO()), show_plan_at)
    assert set(tmp_path.iterdir()) <= left  # if rewards work, nothing is left behind


def test_a_run_and_its_adapter_are_planned_by_their_base(whole_run, nvfp4_base):
    assert read_sizes(str(whole_run)) == read_sizes(str(whole_run / "adapter")) == read_sizes(str(nvfp4_base))
    model = ["--model", str(whole_run), "--set", "data.limit=64"]
    planned = CliRunner().invoke(app, ["plan", "--recipe", "tiny", *model])
    assert planned.exit_code == 0, planned.output
    dry = CliRunner().invoke(app, ["train", "--recipe", "tiny", *model, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    memory, _, _ = planned.stdout.partition("They take")  # a dry run knows the lengths of the prompts
    assert memory[-200:] in dry.stdout


def test_a_dry_run_refuses_the_same_as_the_run(whole_run, nvfp4_base, tmp_path):
    for base, given, said in (
        (nvfp4_base, "rollout.max_new_tokens=512", "exceed the model's 512 positions"),
        (whole_run, "adapter.rank=8", "write adapter.rank: 16"),  # of the run that it starts from
    ):
        with pytest.raises(ConfigError, match=said):
            dry_run(small_config(base, tmp_path, given), Console(file=StringIO()), show_plan_at)
