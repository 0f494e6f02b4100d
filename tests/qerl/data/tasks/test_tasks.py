"""The registry of tasks, and the prompt that training and evaluation both use."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from eval.settings import EvalSettings
from qerl.base.errors import CheckpointError, ConfigError
from qerl.config import names
from qerl.config.names import unknown_name
from qerl.config.recipe import load_recipe
from qerl.data.tasks import BOXED_TEMPLATE, TASKS, build_messages, get_task, render_prompt

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and no_system %}{{ raise_exception('no system role') }}{% endif %}"
    "<{{ message.role }}> {{ message.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(template):
    words = ["<unk>", "<system>", "<user>", "<assistant>", "<end>", "Be", "brief.", "2+2?", "Box", "it."]
    model = WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template)


def test_a_recipe_knows_the_names_of_all_tasks():
    assert tuple(TASKS) == names.TASKS


@pytest.mark.parametrize("name", TASKS)
def test_each_task_is_complete(name):
    task = get_task(name)
    assert task.name == name
    assert (task.hub is None) == (task.generate is not None or task.free_form)
    assert set(task.splits) <= {"train", "test"}
    assert task.splits
    assert set(task.columns) == {"question", "answer"}
    assert build_messages(name, "Q")[-1]["content"].count("Q") == 1


@pytest.mark.parametrize(("wrong", "near"), [("gsm8", "gsm8k"), ("AIME-24", "aime24"), ("dapo", "dapo_math")])
def test_for_an_unknown_task_the_nearest_is_named(wrong, near):
    with pytest.raises(ConfigError, match=f"no task '{wrong}'; did you mean '{near}'"):
        get_task(wrong)


def test_the_default_prompt_asks_for_a_box():
    assert build_messages("gsm8k", "What is 2+2?") == [
        {
            "role": "user",
            "content": "What is 2+2?\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
        }
    ]


def test_a_recipe_may_override_both_parts_of_the_prompt():
    messages = build_messages("gsm8k", "2+2?", system_prompt="Be brief.", prompt_template="Q: {question} A:")
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q: 2+2? A:"}]
    own = replace(get_task("gsm8k"), system_prompt="Think.", prompt_template="<{question}>")
    assert build_messages(own, "x")[0] == {"role": "system", "content": "Think."}
    assert build_messages(own, "x", system_prompt=None) == [{"role": "user", "content": "<x>"}]
    assert build_messages(own, "x", system_prompt="") == [{"role": "user", "content": "<x>"}]


@pytest.mark.parametrize("question", ["{question}", "{0} {} {{x}} %s", "\\boxed{1}", "{system_prompt}", "\\1 $1"])
def test_a_question_is_inserted_unchanged(question):
    assert build_messages("gsm8k", question, prompt_template="{question} \\boxed{}")[0]["content"] == (
        f"{question} \\boxed{{}}"
    )


@pytest.mark.parametrize("template", ["", "Solve it.", "{Question}", "{ question }"])
def test_a_template_without_question_is_refused(template):
    with pytest.raises(ConfigError, match=r"does not contain \{question\}"):
        build_messages("gsm8k", "2+2?", prompt_template=template)


def test_the_prompt_ends_where_the_completion_begins():
    tokenizer = make_tokenizer(TEMPLATE)
    messages = build_messages("gsm8k", "2+2?", "Be brief.", "{question} Box it.")
    ids = render_prompt(tokenizer, messages)
    assert all(type(token) is int for token in ids)
    assert " ".join(tokenizer.convert_ids_to_tokens(ids)) == (
        "<system> Be brief. <end> <user> 2+2? Box it. <end> <assistant>"
    )


def test_a_tokenizer_without_chat_template_is_refused():
    with pytest.raises(CheckpointError, match="no chat template"):
        render_prompt(make_tokenizer(None), build_messages("gsm8k", "2+2?"))


def test_a_template_that_refuses_the_system_role_says_what_to_write():
    tokenizer = make_tokenizer("{% set no_system = true %}" + TEMPLATE)
    assert render_prompt(tokenizer, build_messages("gsm8k", "2+2?"))
    with pytest.raises(CheckpointError, match=r"no system role.*data\.system_prompt"):
        render_prompt(tokenizer, build_messages("gsm8k", "2+2?", "Be brief."))


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
