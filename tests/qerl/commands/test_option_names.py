"""The engine's messages name keys of a recipe; commands with options of their own translate them into options."""

import ast
import logging
import re
import sys
from pathlib import Path

import pytest

import qerl.cli
from eval.show import OPTIONS as EVAL
from qerl.checkpoint.load import load_tokenizer
from qerl.commands.conversation import OPTIONS as CHAT
from qerl.commands.option_names import in_options, options_named
from qerl.config.keys import describe_config
from qerl.engine.interface import check_context
from qerl.errors import CheckpointError, ConfigError, EngineError
from qerl.plan.engine_memory import GIB, plan_memory
from qerl.tasks import render_prompt
from qerl.vllm_plugin.exhausted import out_of_memory

ROOT = Path(__file__).parents[3]
KEYS = {key.key for key in describe_config()}
LEFT_ALONE = {
    "rollout.kv_cache_dtype",
    "rollout.tune_kernels",
    "model.dtype",
    "model.format",
}  # at their defaults


def engine_files():
    return [*(ROOT / "qerl").glob("engine*.py"), *(ROOT / "qerl" / "vllm_plugin").glob("*.py")]


def keys_in_texts(path):
    """The recipe keys in the strings of a file, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from KEYS & set(re.findall(r"[a-z]+\.[a-z_]+", node.value))


@pytest.mark.parametrize("options", [EVAL, CHAT], ids=["eval", "chat"])
def test_each_key_that_the_engine_names_has_an_option(options):
    named = {key for path in engine_files() for key in keys_in_texts(path)}
    assert len(named) > 5
    assert named <= set(options) | LEFT_ALONE
    assert set(options) <= KEYS


@pytest.mark.parametrize(("command", "options"), [("eval", EVAL), ("chat", CHAT)])
def test_the_options_exist_in_the_command(command, options, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["qerl", command, "--help"])
    with pytest.raises(SystemExit):
        qerl.cli.main()
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {option for option in options.values() if option.startswith("--")} <= known


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lower rollout.memory, or raise memory.cap_gib (x)", "lower --memory, or raise --cap-gib (x)"),
        ("rollout.kernel='x' is not known: write auto", "--kernel 'x' is not known: write auto"),
        ("write rollout.kernel=humming or marlin", "write --kernel humming or marlin"),
        ("rollout.kernel: marlin", "--kernel marlin"),
        ("set rollout.engine=transformers for this model", "set --engine transformers for this model"),
        ("rollout.memory_x and xrollout.memory are others", "rollout.memory_x and xrollout.memory are others"),
        ("raise rollout.memory: it is small", "raise --memory: it is small"),
    ],
)
def test_a_key_with_a_value_becomes_the_option_with_that_value(text, said):
    assert in_options(text, EVAL) == said


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
    warn = logging.getLogger("qerl.engine.vllm_engine").warning
    with options_named(CHAT):
        warn("%d tokens: raise rollout.memory or memory.cap_gib", 5)
        logging.getLogger("eval.plan").warning("config.yaml: memory.cap_gib 24")
    warn("%d tokens: raise rollout.memory", 6)
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
            qerl.cli.main()
        assert stopped.value.code == 2
        assert f"error: {option} is vllm's, and the engine here is transformers" in capsys.readouterr().err
