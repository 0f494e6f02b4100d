"""Which tokens of a conversation are learned: by the template's own marks, by difference, and what is refused."""

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint.load import load_tokenizer
from qerl.data.conversations import Conversation
from qerl.data.tasks import render_prompt
from training.sft.marking import Marker, UnmarkableError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3: the last answer has an empty thought before it, an earlier one has none.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = (
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "3 + 4 = 7"},
    {"role": "user", "content": "And 5 more?"},
    {"role": "assistant", "content": "#### 12"},
)


@pytest.fixture
def marker():
    def of(template):
        tokenizer = load_tokenizer("tiny")
        tokenizer.chat_template = template
        return Marker(tokenizer, [tokenizer.eos_token_id]), tokenizer

    return of


def learned(tokenizer, row):
    """The texts that a row learns, each run of tokens for itself."""
    runs, now = [], []
    for token, wanted in zip([*row.ids, 0], [*row.learned, 0], strict=True):
        if wanted:
            now.append(token)
        elif now:
            runs.append(tokenizer.decode(now, skip_special_tokens=False))
            now = []
    return runs


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_every_answer_is_learned_up_to_the_token_that_ends_it(marker, template):
    marks, tokenizer = marker(template)
    (row,) = marks.rows(Conversation("1", TALK))
    assert learned(tokenizer, row) == ["3 + 4 = 7<|im_end|>", "#### 12<|im_end|>"]
    whole = tokenizer.apply_chat_template(list(TALK), tokenize=True, return_dict=True)["input_ids"]
    assert row.ids == whole


def test_the_marks_of_a_template_are_those_of_transformers(marker):
    marks, tokenizer = marker(GENERATION)
    (row,) = marks.rows(Conversation("1", TALK))
    asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    expected = tokenizer.apply_chat_template(list(TALK), **asked)
    assert (row.ids, row.learned) == (expected["input_ids"], expected["assistant_masks"])


@pytest.mark.parametrize("template", [CHATML, GENERATION, THINKING])
def test_a_message_that_is_passed_over_or_of_the_prompt_is_read_and_not_learned(marker, template):
    marks, tokenizer = marker(template)
    for of_prompt in ({"passed": frozenset([1])}, {"learned_from": 3}):
        (row,) = marks.rows(Conversation("1", TALK, **of_prompt))
        (answer,) = learned(tokenizer, row)
        assert answer == ("<think></think>" if template == THINKING else "") + "#### 12<|im_end|>"
        assert "3 + 4 = 7" in tokenizer.decode(row.ids)
    first = marks.rows(Conversation("1", TALK, passed=frozenset([3])))[0]
    assert learned(tokenizer, first)[0].endswith("3 + 4 = 7<|im_end|>")


SPACED = CHATML.replace("'\n' + m.content", "': ' + m.content").replace("assistant\n", "assistant: ")
SPACED_GENERATION = GENERATION.replace("m.role + '\n' }}", "m.role + ': ' }}").replace("assistant\n", "assistant: ")


@pytest.mark.parametrize("template", [SPACED, SPACED_GENERATION])
def test_the_first_word_is_learned_after_a_prompt_that_ends_in_a_space(marker, template):
    """The tokenizer joins them, and the model is asked with the prompt alone."""
    marks, tokenizer = marker(template)
    talk = (TALK[0], {"role": "assistant", "content": "the apples"}, TALK[2], {"role": "assistant", "content": "has 4"})
    (row,) = marks.rows(Conversation("1", talk))
    assert learned(tokenizer, row) == ["the apples<|im_end|>", "has 4<|im_end|>"]
    assert tokenizer.decode(row.ids) == tokenizer.apply_chat_template(list(talk), tokenize=False)
    prompt = render_prompt(tokenizer, talk[:1])
    assert row.ids[: len(prompt)] == prompt


def test_a_token_whose_place_leaves_white_space_out_is_noticed():
    """As with ByteLevel's trim_offsets, which GPT-2's tokenizer has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.post_processor, built.decoder = processors.ByteLevel(trim_offsets=True), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    built.train_from_iterator([" the"] * 9, trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<|im_end|>", chat_template=SPACED)
    joined = tokenizer(": the", return_offsets_mapping=True)
    assert (tokenizer.decode(joined["input_ids"][-1]), joined["offset_mapping"][-1]) == (" the", (2, 5))
    talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "the apples"})
    (row,) = Marker(tokenizer, [tokenizer.eos_token_id]).rows(Conversation("1", talk))
    assert learned(tokenizer, row) == ["the apples<|im_end|>"]
    assert tokenizer.decode(row.ids).endswith("assistant: the apples<|im_end|>\n")


def test_an_answer_without_a_token_that_ends_completions_is_told(marker):
    marks, tokenizer = marker(CHATML)
    (row,) = marks.rows(Conversation("1", TALK))
    assert row.unended == ()
    end, other = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")
    marks = Marker(tokenizer, [other])
    (row,) = marks.rows(Conversation("1", TALK))
    assert row.unended == (end, end)
    says = marks.unended_text({end: 2})
    assert says.startswith("2 learned answers hold no token that ends a completion (<|endoftext|>)")
    assert f"'<|im_end|>': make it one, with \"eos_token_id\": [{other}, {end}] in the generation_config.json" in says


LATE = GENERATION.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}")
NONE = CHATML.replace("m.content + '<|im_end|>\n'", "m.content + '\n'").replace("<|im_start|>", "")


@pytest.mark.parametrize(("template", "says"), [(LATE, "move it"), (NONE, "<|im_end|> there")], ids=["late", "none"])
def test_what_to_do_about_it_fits_the_template(marker, template, says):
    marks, _ = marker(template)
    (row,) = marks.rows(Conversation("1", TALK[:2]))
    assert len(row.unended) == 1
    assert says in marks.unended_text(dict.fromkeys(row.unended, 1))


@pytest.mark.parametrize("template", [GENERATION, THINKING])
@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"tool_calls": [{"function": {"name": "add", "arguments": {"a": 3}}}], "content": ""}, "a tool call"),
        ({"reasoning_content": "three and four", "content": "7"}, "'reasoning_content' of a message"),
    ],
)
def test_what_the_template_does_not_write_of_an_answer_is_said(marker, template, message, says):
    """The model would learn to answer nothing in place of the call."""
    marks, _ = marker(template)
    for later in ((), TALK[2:]):  # with which THINKING gives a row for each answer
        with pytest.raises(UnmarkableError, match=f"the chat template writes nothing of {says}"):
            marks.rows(Conversation("1", (TALK[0], {"role": "assistant", **message}, *later)))


def test_a_template_that_writes_earlier_answers_otherwise_gets_a_row_for_each(marker):
    """Each as the model would be asked: before an answer, earlier ones have no thought."""
    marks, tokenizer = marker(THINKING)
    rows = marks.rows(Conversation("1", TALK))
    assert [learned(tokenizer, row) for row in rows] == [
        ["<think></think>3 + 4 = 7<|im_end|>"],
        ["<think></think>#### 12<|im_end|>"],
    ]
    assert "assistant\n3 + 4 = 7<|im_end|>" in tokenizer.decode(rows[1].ids, skip_special_tokens=False)
    assert len(marks.rows(Conversation("2", TALK[:2]))) == 1


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ '?' if add_generation_prompt }}", "is not how it"),
        ("{{ messages[0].content }}", "no token of the assistant"),
        ("{{ raise_exception('no') }}", "the template refuses it: no"),
    ],
)
def test_a_template_that_cannot_mark_an_answer_is_refused_in_one_line(marker, template, says):
    with pytest.raises(CheckpointError, match=f"does not show which tokens are the assistant's.*{says}") as error:
        marker(template)
    assert "\n" not in str(error.value)
