"""The forms in which completions state an answer without a box, and those that state none."""

import pytest

from qerl.data.grading.grade import grade
from qerl.data.tasks import get_task

MATH, NUMBER, OWN = get_task("math500"), get_task("gsm8k"), get_task("own")
STATED = (
    "**Final Answer**: {a}", "**Final Answer:** {a}", "**Final Answer**\n\n{a}", "### Answer\n{a}", "### Answer: {a}",
    "## Final Answer\n\n**{a}**", "The answer should be {a}.", "So the answer must be {a}", "\\boxed{{Answer: {a}}}",
    "\\boxed{{\\text{{Answer: }} {a}}}", "\\boxed{{\\text{{Final answer: }}{a}}}", "We add them up.\n\n**{a}**",
    "We add them up.\n**{a}**.", "Adding gives\n**${a}$**", "The final answer equals {a}.", "**Answer**: **{a}**",
    "__Answer__: {a}", "**Answer:**\n{a}",
)  # fmt: skip
SILENT = (
    "We add **{a}** and 3.", "First, **{a}** apples.\nThen we go on", "Step **{a}**:", "**Answer", "### Answer\n",
    "What should the answer be?", "**We find {a} and then**", "The answer should be clear.", "**{a}** or **5**",
)  # fmt: skip


@pytest.mark.parametrize("form", STATED)
def test_an_answer_without_a_box_is_found(form):
    assert grade(NUMBER, form.format(a="42"), "42").reason == "correct"
    assert grade(NUMBER, form.format(a="42"), "43").reason == "wrong"
    assert grade(MATH, form.format(a="42"), "42").reason == "correct"
    assert grade(MATH, form.format(a="2x^2+1"), "1+2x^2").reason == "correct"
    assert grade(MATH, form.format(a="2x^2+1"), "2x^2-1").reason == "wrong"


@pytest.mark.parametrize("form", SILENT)
def test_other_bold_text_and_headings_state_nothing(form):
    assert grade(NUMBER, form.format(a="42"), "42").reason == "no_answer"


MATRIX = "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"


@pytest.mark.parametrize(
    "text",
    [
        f"The answer is {MATRIX}.", f"The answer is $${MATRIX}$$", f"Answer: A = {MATRIX}",
        "The answer is\n\\begin{pmatrix}\n 1 & 2 \\\\\n 3 & 4\n\\end{pmatrix}", f"**Answer**\n\n\\[ {MATRIX} \\]",
    ],
)  # fmt: skip
def test_a_spaced_matrix_is_found_without_a_box(text):
    assert grade(MATH, text, "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}").reason == "correct"
    assert grade(MATH, text, "\\begin{bmatrix}1&3\\\\2&4\\end{bmatrix}").reason == "wrong"


# after "####": the words that follow a value, and what is no such remark
REMARKS = (
    " and so", " and so the reasoning above holds.", " (thirty-six)", ", which is right", "; done", " — as said above",
    " because they share", ": that is all", " apples, as said", " in total, I think.", " (in all).",
)  # fmt: skip
CHANGES = (
    " or 37", " and a half", " + 4", " of 40", " times two", ", or forty", " and 5 seconds", " to 40", " (squared)",
    ", not 37", " and one more", " (mod 40)", " - wait, no", " and two halves", "k",
    " is wrong, it is 37", " -> no", " -> 37",
)  # fmt: skip


@pytest.mark.parametrize("task", [MATH, NUMBER, OWN], ids=lambda task: task.name)
@pytest.mark.parametrize(("tail", "correct"), [*((r, True) for r in REMARKS), *((c, False) for c in CHANGES)])
def test_words_after_the_value_that_change_nothing_are_left_out(task, tail, correct):
    assert grade(task, f"30 + 6 = 36\n#### 36{tail}", "36").correct is correct
    assert not grade(task, f"30 + 7 = 37\n#### 37{tail}", "36").correct


@pytest.mark.parametrize("form", ["{a}", "\\boxed{{{a}}}", "The answer is {a}", "#### {a}", "**{a}**", '"({a})".'])
def test_a_fraction_without_its_zero_is_not_its_digits(form):
    for task in (MATH, NUMBER, OWN):
        assert not grade(task, form.format(a=".5"), "5").correct
        assert not grade(task, form.format(a="5"), ".5").correct
    assert grade(OWN, form.format(a=".5"), "0.5").correct


@pytest.mark.parametrize(
    "line", ["#### **36** apples", "#### 36 -> done", "#### 36</s>", "#### 36 <|im_end|>", "####\n36 and so"]
)
def test_a_number_that_begins_the_line_of_hashes_is_the_answer(line):
    assert grade("gsm8k", f"6 times 6.\n{line}", "36").correct


def test_a_label_in_text_leaves_no_brace_behind():
    assert grade("math500", r"\boxed{\text{the answer is }5}", "5").correct
