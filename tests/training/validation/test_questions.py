"""Which questions a validation asks, and which recipes and rows are refused."""

import json

import pytest

import training.run
from qerl.base.errors import ConfigError, DataError, QerlError
from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.resolve import resolve_model
from tests.helpers.validated_run import QUESTIONS, validated_config
from training.preflight.checks import check_config, sizes_at
from training.rollout.prompts import load_all_prompts, load_prompts
from training.validation.questions import read_questions


@pytest.fixture(scope="module")
def tokenizer(nvfp4_base):
    return load_tokenizer(nvfp4_base)


@pytest.fixture
def asked(nvfp4_base, tokenizer, tmp_path):
    """The questions of the small run with these settings, whose validation has further `rows`."""

    def read(*settings, rows=()):
        config = validated_config(nvfp4_base, tmp_path, *settings)
        with (tmp_path / "questions.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        trained = load_prompts(config.data, tokenizer, 1)
        return read_questions(config, tokenizer, trained, sizes_at(resolve_model(str(nvfp4_base))), tmp_path), trained

    return read


def row_of(prompt, question=None):
    return {"question": question or prompt.example.question, "answer": prompt.example.answer}


def test_the_prompt_is_the_one_that_trains(asked):
    questions, trained = asked("data.prompt_template='{question} Go!'", "data.system_prompt=Be quick.")
    asked_text, trained_text = (
        prompt.text.replace(prompt.example.question, "...") for prompt in (questions.prompts[0], trained[0])
    )
    assert asked_text == trained_text
    assert "Be quick." in asked_text
    assert "... Go!" in asked_text


def test_room_is_for_the_longest_prompt_though_no_such_prompt_would_be_trained_on(asked):
    long = {"question": "How many apples? " * 20, "answer": "3"}
    questions, trained = asked("data.max_prompt_tokens=80", rows=[long])
    longest = len(questions.prompts[0].ids)
    assert questions.prompts[0].example.answer == "3"  # the longest comes first
    assert longest > 80 >= max(len(prompt.ids) for prompt in trained)
    assert questions.context == longest + 8
    assert [prompt.row for prompt in questions.prompts] == list(range(QUESTIONS + 1))


def test_questions_that_are_trained_on_are_left_out_and_counted(asked, caplog):
    _, trained = asked()
    again = [row_of(trained[0], f" {trained[0].example.question.upper()}\n"), row_of(trained[1])]
    caplog.clear()
    caplog.set_level("INFO")
    questions, _ = asked("validation.limit=4", rows=again)
    assert f"2 of {QUESTIONS + 2} questions of" in caplog.text
    assert "are among the 12 training rows and are left out" in caplog.text
    assert len(questions.prompts) == 4
    caplog.clear()
    asked()
    assert f"validation: none of the {QUESTIONS} questions of" in caplog.text


def test_rows_that_are_all_trained_on_are_refused(asked, tmp_path):
    with pytest.raises(DataError, match=r"validation: all 48 questions of .*: name other rows with validation\.source"):
        asked(f"validation.source={tmp_path / 'rows.jsonl'}", "data.limit=null")


def test_rows_without_answers_are_validated_by_the_rewards_alone(asked, tmp_path):
    (tmp_path / "bare.jsonl").write_text('{"prompt": "Say something short."}\n')
    settings = ("data.task=own", f"validation.source={tmp_path / 'bare.jsonl'}")
    questions, _ = asked(*settings)
    assert (questions.accuracy, questions.rewards.names) == (None, ["digits"])
    with pytest.raises(ConfigError, match=r"have no answers to grade by: write validation\.metric: reward"):
        asked(*settings, "validation.metric=accuracy")
    graded, _ = asked()
    assert (graded.accuracy, graded.rewards.names, graded.rewards.weights) == (1, ["digits", "accuracy"], [1.0, 0.0])


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("validation.metric=rewards/acuracy", "there is no such reward: write accuracy, reward or rewards/digits"),
        ("validation.max_new_tokens=600", r"and the model has 512 positions: write validation\.max_new_tokens: "),
        ("validation.source=gone.jsonl", r"validation: there is no file .*validation\.every=null"),
    ],
)
def test_what_cannot_be_validated_is_refused_before_anything_is_opened(
    nvfp4_base, tmp_path, monkeypatch, setting, says
):
    monkeypatch.setattr(training.run, "open_rollout_engine", lambda *_: pytest.fail("the engine was opened"))
    with pytest.raises(QerlError, match=says):
        training.run.start(validated_config(nvfp4_base, tmp_path, setting), "tiny")
    assert not (tmp_path / "run").exists()


def test_a_source_is_refused_before_torch_is_loaded(nvfp4_base, tmp_path):
    with pytest.raises(DataError, match=r"task arith has no split 'dev'.*validation\.every=null"):
        check_config(validated_config(nvfp4_base, tmp_path, OWN, "validation.split=dev"))


OWN, HELD = "validation.source=null", "data.held_out=5"
SOURCES = ("data.sources=[{name: a, source: a.jsonl}]", "data.source=null", "data.limit=null")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["validation.task=gsm9k"], "there is no such task; write validation.task: gsm8k"),
        (["validation.temperature=0.001"], "write validation.temperature: 0 (greedy), or 0.01 or more"),
        (["validation.temperature=0"], "greedy completions of one question are all the same"),
        (["validation.metric=perplexity"], "write validation.metric: accuracy, reward, or one of the rewards as"),
        (["validation.metric=loss"], "no validation gives a value of that name"),
        (["validation.min_improvement=0.1"], "this key is gone; any improvement counts"),
        (["loss.num_iterations=2", "validation.every=3"], "write validation.every: 4"),
        (["validation.every=null", "validation.stop_after=3"], "stop_after: null, or validation.every: 50"),
        (["validation.columns={frage: question}"], "this key is gone; write data.columns"),
        (["validation.test_freq=5"], "unknown key; did you mean validation.every?"),
        (["run.load_best_model_at_end=true"], "unknown key; did you mean validation.metric?"),
        ([OWN, HELD, "data.held_out=12"], "no row would be left to train on; write data.limit above 12"),
        ([HELD], "both say which rows validations ask; write validation.source: null"),
        ([OWN, HELD, "validation.every=null"], "would be neither trained on nor validated; write validation.every"),
    ],
)
def test_a_recipe_that_cannot_validate_is_refused(nvfp4_base, tmp_path, settings, says):
    with pytest.raises(ConfigError) as error:
        validated_config(nvfp4_base, tmp_path, *settings)
    assert says in str(error.value)


def test_the_last_rows_of_a_single_file_are_held_out(nvfp4_base, tokenizer, tmp_path):
    settings = ("validation.source=null", "data.held_out=5", "validation.limit=3")
    config = validated_config(nvfp4_base, tmp_path, *settings)
    trained = load_all_prompts(config, tokenizer)
    questions = read_questions(config, tokenizer, trained, sizes_at(resolve_model(str(nvfp4_base))), tmp_path)
    everything = load_prompts(config.data, tokenizer, 1)
    assert [prompt.example for prompt in trained] == [prompt.example for prompt in everything[:-5]]
    asked = {prompt.example.id for prompt in questions.prompts}  # the longest comes first
    assert asked == {prompt.example.id for prompt in everything[-5:-2]}
    assert "(5 rows held out)" in questions.name
