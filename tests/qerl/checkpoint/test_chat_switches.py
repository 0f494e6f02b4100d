"""Variables of the chat template: in training, validation, evaluation and episodes the same, and none in silence."""

import json
from types import SimpleNamespace

import pytest

import qerl
from qerl.base.errors import ConfigError
from qerl.checkpoint.load import check_switches, load_tokenizer
from qerl.checkpoint.resolve import resolve_model, switches_for
from qerl.config.recipe import save_config
from qerl.data.option_text import parse_switches
from qerl.engine.transformers.engine import TransformersEngine
from qerl.episodes.endpoint import Chat
from tests.helpers.bases import TINY
from tests.helpers.small_run import small_config
from training.preflight.checks import read_prompts, sizes_at
from training.run import start
from training.validation.questions import read_questions

QWEN3 = (  # the end of Qwen3's own template
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
OFF = "<think>\n\n</think>\n\n"


@pytest.fixture
def switched(tmp_path, monkeypatch):
    """The recipe of a run without thinking, and prompts that the tokenizer of Qwen3 writes."""
    real = load_tokenizer

    def load(*args, **kwargs):
        tokenizer = real(*args, **kwargs)
        tokenizer.chat_template = QWEN3
        return tokenizer

    for module in ("training.preflight.checks", "qerl.cli.chat"):
        monkeypatch.setattr(f"{module}.load_tokenizer", load)
    asked = ("validation.every=2", "validation.limit=2", f"validation.source={tmp_path / 'questions.jsonl'}")
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "What is 3 + 4?", "answer": "7"}) + "\n")
    return lambda *more, steps=6: small_config(TINY, tmp_path, "model.format=bf16", *asked, *more, steps=steps)


@pytest.mark.parametrize(("value", "end"), [("false", "assistant\n" + OFF), ("true", "assistant\n")])
def test_prompts_and_questions_end_as_the_switch_says(switched, tmp_path, value, end):
    config = switched(f"data.chat_template_kwargs={{enable_thinking: {value}}}")
    base = resolve_model(str(TINY), "bf16")
    tokenizer, prompts, _ = read_prompts(config, base)
    questions = read_questions(config, tokenizer, prompts, sizes_at(base), tmp_path)
    assert all(prompt.text.endswith(end) for prompt in [*prompts, *questions.prompts])
    chat = Chat(tokenizer, [], [tokenizer.eos_token_id], config.data.chat_template_kwargs)
    assert chat.decode(chat.suffix([{"role": "user", "content": "Go on."}], None)).endswith(end)


def test_the_switches_that_trained_are_taken_unless_others_are_asked_for(switched, tmp_path):
    save_config(switched("data.chat_template_kwargs={enable_thinking: false}"), tmp_path / "config.yaml")
    assert switches_for(tmp_path, None) == {"enable_thinking": False}
    own = parse_switches("enable_thinking=true, level=2")
    assert switches_for(tmp_path, own) == {"enable_thinking": True, "level": 2}
    assert switches_for(tmp_path, {}) == switches_for(None, None) == {}


def test_an_open_model_thinks_as_it_trained_or_as_it_is_asked_to(switched, tmp_path, monkeypatch):
    """Qwen3's template on the embedded model, whose run trained without thinking."""
    small = ("rollout.max_new_tokens=2", "noise.enabled=false", "validation.every=null")
    recipe = switched("data.chat_template_kwargs={enable_thinking: false}", *small, steps=1)
    run, prompts = start(recipe, "tiny").run_dir, []
    generate = TransformersEngine.generate

    def noted(self, ids, *rest, **kwargs):
        prompts.extend(ids)
        return generate(self, ids, *rest, **kwargs)

    monkeypatch.setattr(TransformersEngine, "generate", noted)
    with qerl.load(run) as model:
        for asked in (None, {}, {"enable_thinking": True}, {"enable_thinking": False}):
            model.generate("1 + 1?", max_new_tokens=1, chat_template_kwargs=asked)
        with pytest.raises(ConfigError, match=r"chat_template_kwargs sets thinking, which .* does not read"):
            model.generate("1 + 1?", chat_template_kwargs={"thinking": False})
        with pytest.raises(ConfigError, match=r"no argument 'max_tokens'; did you mean max_new_tokens\? .*seed$"):
            model.generate("1 + 1?", max_tokens=3)
    texts = [load_tokenizer(str(TINY)).decode(ids) for ids in prompts]
    assert [text.endswith(OFF) for text in texts] == [True, False, False, True]


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ("enable_thinkin", r"enable_thinkin, which .* does not read: did you mean enable_thinking\?"),
        ("level", "sets level, .*: leave it out, or use a model whose template has it"),
        ("messages", "sets messages, which qerl gives the chat template itself"),
    ],
)
def test_a_switch_that_the_template_does_not_read_is_refused(switch, message):
    tokenizer = SimpleNamespace(get_chat_template=lambda: QWEN3, name_or_path="base")
    with pytest.raises(ConfigError, match=message):
        check_switches(tokenizer, {switch: False}, "keys")
    for text in (switch, "a b=1", "=1", f"{switch}=[", f"{switch}="):
        with pytest.raises(ConfigError, match="--chat-template-kwargs"):
            parse_switches(text)
