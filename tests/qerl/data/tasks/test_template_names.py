"""Names in braces of a prompt template that nothing is put into, and braces that are text."""

import pytest

from eval.settings import EvalSettings
from qerl.base.errors import ConfigError
from qerl.config.names import unknown_name
from qerl.config.recipe import load_recipe
from qerl.data.tasks import BOXED_TEMPLATE, build_messages


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{question}\n{input}", "input"),
        ("{instruction} {question}", "instruction"),
        ("{question} of{Level}", "Level"),
        ("({row.level}) {question}", "row.level"),
        ("{question}: {Question}", "Question"),
    ],
)
def test_another_name_is_refused_wherever_a_template_is_given(template, name):
    assert unknown_name(template) == name
    with pytest.raises(ConfigError, match=rf"{{{name}}} would be printed as it stands") as error:
        build_messages("own", "q", prompt_template=template)
    assert "\n" not in str(error.value)


def test_it_is_refused_where_options_and_recipes_are_read():
    with pytest.raises(ConfigError, match=r"\{input\} would be printed as it stands"):
        EvalSettings("arith", prompt_template="{question} {input}")
    with pytest.raises(ConfigError, match=r"\{input\} would be printed as it stands"):
        load_recipe("tiny", ["data.prompt_template='{question} {input}'"])


@pytest.mark.parametrize(
    "template",
    [
        *("{question}", BOXED_TEMPLATE, "{question} \\boxed{answer}", "{question} \\frac{a}{b} x^{n} a_{ij}"),
        *(
            "{question} {{name}}",
            '{question} {"answer": 1}',
            "{question} { answer }",
            "{question} {1, 2}",
            "{question}{}",
        ),
        *("{question} \\operatorname*{argmax}", "{question} \\{a\\}", "{question} $\\sqrt[3]{x}$"),
    ],
)
def test_braces_of_text_stay(template):
    (message,) = build_messages("own", "q", None, template)
    assert message["content"] == template.replace("{question}", "q")
