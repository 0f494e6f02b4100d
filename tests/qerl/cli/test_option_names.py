"""The engine's messages name keys of a recipe; commands with options of their own translate them into options."""

import ast
import logging
import re
import sys
from pathlib import Path

import pytest

import qerl.cli.main
from qerl.base import errors
from qerl.base.errors import CheckpointError, ConfigError, EngineError, Key
from qerl.checkpoint.load import load_tokenizer
from qerl.cli.chat import OPTIONS as CHAT
from qerl.cli.evaluate import OPTIONS as EVAL
from qerl.cli.options import options_named
from qerl.config.keys import describe_config
from qerl.data.tasks import render_prompt
from qerl.engine.interface import check_context
from qerl.engine.memory import out_of_memory
from qerl.plan.engine_memory import GIB, plan_memory

ROOT = Path(__file__).parents[3]
KEYS = {key.key for key in describe_config()}
NAMED = {value for value in vars(errors).values() if isinstance(value, Key)}


def keys_in_texts(path):
    """The recipe keys in the strings of a file, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from KEYS & set(re.findall(r"[a-z]+\.[a-z_]+", node.value))


@pytest.mark.parametrize("options", [EVAL, CHAT], ids=["eval", "chat"])
def test_each_key_that_the_engine_names_has_an_option(options):
    assert len(NAMED) > 5
    assert set(options) == NAMED
    assert {key.name for key in options} <= KEYS


@pytest.mark.parametrize(
    "path",
    [
        *(ROOT / "qerl/engine").glob("*.py"),
        *(ROOT / "qerl/engine/vllm").glob("*.py"),
        ROOT / "qerl/plan/engine_memory.py",
    ],
    ids=lambda path: path.name,
)
def test_the_engine_names_such_a_key_as_a_key(path):
    """As text, a command could not show its option."""
    assert not set(keys_in_texts(path)) & {key.name for key in NAMED}


@pytest.mark.parametrize(("command", "options"), [("eval", EVAL), ("chat", CHAT)])
def test_the_options_exist_in_the_command(command, options, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["qerl", command, "--help"])
    with pytest.raises(SystemExit):
        qerl.cli.main.main()
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {option for option in options.values() if option.startswith("--")} <= known


@pytest.mark.parametrize(
    ("key", "said", "in_eval"),
    [
        (errors.MEMORY, "rollout.memory", "--memory"),
        (errors.KERNEL.set_to("humming or marlin"), "rollout.kernel=humming or marlin", "--kernel humming or marlin"),
        (errors.MAX_PROMPT_TOKENS, "data.max_prompt_tokens", "the length of the prompts"),
        (Key("noise.enabled").set_to("false"), "noise.enabled=false", "noise.enabled=false"),
    ],
)
def test_a_key_with_a_value_becomes_the_option_with_that_value(key, said, in_eval):
    error = EngineError("set %s, or 100%% of %d", key, 3)
    assert str(error) == f"set {said}, or 100% of 3"
    with pytest.raises(EngineError) as caught, options_named(EVAL):
        raise error
    assert str(caught.value) == f"set {in_eval}, or 100% of 3"


def test_a_key_is_not_made_text_by_accident():
    with pytest.raises(TypeError, match="hand it to the error as a value"):
        f"lower {errors.MEMORY}"
    assert str(EngineError("100% and %s")) == "100% and %s"  # a text without values is left as it is


def too_small():
    plan_memory(8 * GIB, 6 * GIB, 6, 7, 0)


def too_long():
    check_context([[1] * 90], [20], 100)


def spent():
    raise out_of_memory("sampling", RuntimeError("CUDA out of memory"))


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (too_small, "raise --cap-gib, or take a smaller"),
        (too_long, "lower --max-new-tokens or the length of the prompts"),
        (spent, r"lower --memory, or raise --cap-gib \(CUDA out"),
    ],
)
def test_an_error_of_the_engine_keeps_its_kind_and_names_options(fails, words):
    with pytest.raises(EngineError, match=words) as caught, options_named(EVAL):
        fails()
    assert not KEYS & set(re.findall(r"[a-z]+\.[a-z_]+", str(caught.value)))


def test_messages_about_the_recipe_of_a_run_keep_its_keys():
    """config.yaml of the run has keys and no options."""
    with pytest.raises(ConfigError, match=r"rollout\.memory: got 'x'"), options_named(EVAL):
        raise ConfigError("runs/x/config.yaml:3: rollout.memory: got 'x'")


def test_warnings_of_the_engine_name_options_within_and_keys_outside(caplog):
    warn = logging.getLogger("qerl.engine.vllm.engine").warning
    with options_named(CHAT):
        warn("%d tokens: raise %s or %s", 5, errors.MEMORY, errors.CAP_GIB)
        logging.getLogger("eval.plan").warning("config.yaml: memory.cap_gib 24")
    warn("%d tokens: raise %s", 6, errors.MEMORY)
    assert caplog.messages == [
        "5 tokens: raise --memory or --cap-gib",
        "config.yaml: memory.cap_gib 24",
        "6 tokens: raise rollout.memory",
    ]


@pytest.mark.parametrize(("options", "where"), [(EVAL, "--prompt-template"), (CHAT, "the message")])
def test_for_a_template_without_a_system_role_the_options_are_named(options, where):
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    words = rf'set --system-prompt to "" and put the instruction into {where}$'
    with pytest.raises(CheckpointError, match=words), options_named(options):
        render_prompt(tokenizer, [{"role": "system", "content": "Be brief."}])


def test_chat_has_the_options_of_memory_and_refuses_them_where_they_do_nothing(monkeypatch, capsys):
    for option, value in (("--memory", "4"), ("--cap-gib", "8"), ("--kernel", "marlin")):
        monkeypatch.setattr(sys, "argv", ["qerl", "chat", "--model", "tiny", "--engine", "transformers", option, value])
        with pytest.raises(SystemExit) as stopped:
            qerl.cli.main.main()
        assert stopped.value.code == 2
        assert f"error: {option} is vllm's, and the engine here is transformers" in capsys.readouterr().err
