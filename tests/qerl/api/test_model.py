"""`Model.generate` and the names of models: what cannot be is refused in one line, before anything is sampled."""

import pytest

import qerl
from qerl.api.arguments import model_name
from qerl.api.model import Model
from qerl.base.errors import ConfigError


@pytest.mark.parametrize(
    ("prompt", "asked", "line"),
    [
        (3, {}, "3 is not a prompt: give a text, a list of messages, or a list of either"),
        ("x", {"temperature": -1}, "temperature is -1: write 0 (greedy) or more"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens is 0: write 1 or more"),
        ("x", {"top_p": 0}, "top_p is 0: write more than 0 and at most 1"),
        (["a", 5], {}, "is not a prompt"),
        ([[]], {}, "[[]] is not a prompt"),
        ("x", {"max_new_tokens": 2.5}, "max_new_tokens is 2.5: write 1 or more"),
        ("x", {"seed": "x"}, "seed is 'x': write a whole number"),
        ("x", {"chat_template_kwargs": 5}, "chat_template_kwargs is 5: write a mapping"),
        ("x", {"system_prompt": 5}, "system_prompt is 5: write a text"),
        ("x", {"max_tokens": 3}, "no argument 'max_tokens'; did you mean max_new_tokens?"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompt, asked, line):
    with pytest.raises(ConfigError) as refused:
        Model(opened=object()).generate(prompt, **asked)
    assert line in str(refused.value)


@pytest.mark.parametrize("model", [3, object(), ["tiny"]])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ConfigError, match=r"is no model: give a hub id, the path of"):
        model_name(model)
    with pytest.raises(qerl.QerlError):
        qerl.load(model)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"context": "long"}, "context 'long' has no room for a prompt and its completion: write 2 or more"),
        ({"context": 1}, "context 1 has no room"),
        ({"memory": "half"}, "memory is 'half': write GiB"),
    ],
)
def test_a_model_is_not_opened_with_other_values(given, line):
    with pytest.raises(ConfigError, match=line):
        qerl.load("tiny", **given)
