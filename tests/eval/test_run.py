"""Whole evaluations of a small random model (eval_factory) with the real engine, tokenizer, grading and files.

The model always answers. Its answers are read once, to craft data whose accuracy is known.
"""

import json
import logging
import shutil

import pytest
import torch
import yaml

import eval.run
from eval.plan import make_plan, part_seed, plan_batches, with_prompt
from eval.result import COMPLETIONS, RESULT
from eval.run import engine_options, run_eval
from eval.settings import EvalSettings
from qerl.base.errors import CheckpointError, ConfigError
from qerl.cli.evaluate import main
from qerl.config.recipe import load_recipe, save_config
from qerl.data.tasks import get_task
from tests.helpers.eval_factory import ANSWERS, CONTEXT, build_model, make_adapter, make_run, pack_model
from tests.helpers.small_run import small_config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The base. One thread is faster: products are so small that waiting for a second thread takes longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield build_model(tmp_path_factory.mktemp("base"))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [{"question": f"What is {n} times {n * n + 1}?", "answer": str(n)} for n in range(1, 11)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def settings(model, questions, tmp_path):
    def make(**changes):
        given = {"task": "gsm8k", "model": str(model), "data": str(questions), "max_new_tokens": 8, "batch_size": 4}
        return EvalSettings(**{**given, "out": tmp_path / "out", "engine": "transformers", **changes})

    return make


def rows_of(folder):
    """The saved rows without their times."""
    rows = [json.loads(line) for line in (folder / COMPLETIONS).read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key != "batch_seconds"} for row in rows]


def texts(folder):
    return {(row["row"], row["sample"]): row["completion"] for row in rows_of(folder)}


def test_accuracy_is_that_of_crafted_answers(settings, questions, tmp_path):
    first = run_eval(settings(out=tmp_path / "first"))
    stated = {row["row"]: row["extracted"] for row in rows_of(first.out)}
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["answer"] = f"{stated[number]}.0" if number % 3 == 0 else "77"  # 4 of 10; a number, not characters
    crafted = tmp_path / "crafted.jsonl"
    crafted.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run_eval(settings(data=str(crafted), out=tmp_path / "second"))
    assert (result.summary.questions, result.summary.correct, result.summary.accuracy.value) == (10, 4, 0.4)
    assert {row["row"] for row in rows_of(result.out) if row["correct"]} == {0, 3, 6, 9}
    saved = json.loads((result.out / RESULT).read_text())
    assert saved["accuracy"]["value"] == 0.4
    assert saved["accuracy"]["low"] < 0.4 < saved["accuracy"]["high"]
    assert saved["engine"]["name"] == "transformers"
    assert saved["sampling"]["max_new_tokens"] == 8


def test_a_row_holds_question_completion_and_grade(settings):
    result = run_eval(settings(limit=3))
    rows = sorted(rows_of(result.out), key=lambda row: row["row"])
    assert [row["question"] for row in rows] == [f"What is {n} times {n * n + 1}?" for n in (1, 2, 3)]
    for row in rows:
        assert row["completion"].startswith("\n#### ")
        assert row["completion"].endswith(row["extracted"])
        assert row["tokens"] == len(row["completion"].split("\n#### ")) - 1 + (
            not row["truncated"]
        )  # plus the stop token
        assert row["truncated"] == (row["tokens"] == 8 and len(row["completion"]) == 8 * len(ANSWERS[0]))
    assert result.summary.completion_tokens == sum(row["tokens"] for row in rows)


SAMPLED = {"samples": 3, "temperature": 1.0, "top_p": 0.95, "pass_k": (1, 2, 3)}


def test_the_seed_determines_the_samples(settings, tmp_path):
    a, b, c = (
        run_eval(settings(out=tmp_path / name, seed=seed, **SAMPLED)) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert rows_of(a.out) == rows_of(b.out)
    assert texts(a.out) != texts(c.out)
    assert any(len({texts(a.out)[row, sample] for sample in range(3)}) == 3 for row in range(10))


def test_killed_and_continued_equals_uninterrupted(settings, tmp_path):
    whole = run_eval(settings(out=tmp_path / "whole", **SAMPLED))
    content = (whole.out / COMPLETIONS).read_bytes()
    for share in (0.37, 1.0):
        out = tmp_path / f"cut-{share}"
        shutil.copytree(whole.out, out)
        (out / RESULT).unlink()
        (out / COMPLETIONS).write_bytes(content[: int(share * len(content))])
        result = run_eval(settings(out=out, **SAMPLED))
        assert rows_of(out) == rows_of(whole.out), share
        assert result.summary.accuracy == whole.summary.accuracy
        assert result.summary.pass_at_k == whole.summary.pass_at_k
        assert (out / RESULT).is_file()


def test_a_stop_between_batches_keeps_the_finished_ones(settings, tmp_path):
    def stop_after_two(done, total, correct):
        if done >= 8:
            raise KeyboardInterrupt

    whole = run_eval(settings(out=tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run_eval(settings(), stop_after_two)
    kept = (tmp_path / "out" / COMPLETIONS).read_bytes()
    assert len(kept.splitlines()) == 8
    run_eval(settings())
    assert (tmp_path / "out" / COMPLETIONS).read_bytes().startswith(kept)
    assert rows_of(tmp_path / "out") == rows_of(whole.out)


def test_a_finished_evaluation_is_read_and_not_repeated(settings, monkeypatch):
    first = run_eval(settings())

    def refuse(*_, **__):
        raise AssertionError("the engine was opened")

    monkeypatch.setattr(eval.run, "open_engine", refuse)
    assert run_eval(settings()).summary == first.summary
    assert run_eval(settings()).details["engine"] == first.details["engine"]


@pytest.mark.parametrize("load", ["bf16", "nvfp4"])
def test_a_random_adapter_changes_completions_and_a_zero_one_does_not(settings, model, tmp_path, load):
    base = str(model if load == "bf16" else pack_model(tmp_path / "packed", model))
    plain = run_eval(settings(out=tmp_path / "plain", model=base, load=load))
    zero, random = (make_adapter(tmp_path / name, model, name == "random") for name in ("zero", "random"))
    with_zero, with_random = (
        run_eval(settings(out=tmp_path / f"with-{folder.name}", model=base, load=load, adapter=str(folder)))
        for folder in (zero, random)
    )
    assert plain.details["format"] == with_random.details["format"] == load
    assert texts(with_zero.out) == texts(plain.out)
    assert sum(texts(with_random.out)[key] != text for key, text in texts(plain.out).items()) >= 8


def test_an_adapter_folder_means_its_base_with_the_adapter(settings, model, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", model, random_b=True)
    both = run_eval(settings(out=tmp_path / "both", adapter=str(adapter)))
    assert texts(run_eval(settings(out=tmp_path / "alone", model=str(adapter))).out) == texts(both.out)


def shortest(plan):
    return plan.tokenizer.decode(min((prompt.ids for prompt in plan.prompts), key=len))


def test_a_run_that_saved_keys_that_are_gone_is_evaluated(settings, model, tmp_path):
    run = make_run(tmp_path / "run", model, system_prompt="Be brief.")
    data = yaml.safe_load((run / "config.yaml").read_text())
    data["rollout"]["min_p"], data["validation"]["target"], data["data"]["keep_unreadable"] = 0.1, 0.5, True
    (run / "config.yaml").write_text(yaml.safe_dump(data))
    plan = make_plan(settings(model=str(run)))
    assert (plan.task.system_prompt, plan.settings.keep_unreadable) == ("Be brief.", False)


def test_a_run_is_evaluated_with_the_prompt_of_its_training(settings, model, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = make_run(tmp_path / "r", model, system_prompt="Count.", prompt_template="Q {question}")
    plan = make_plan(settings(model=str(run), out=None))
    assert shortest(plan).startswith("<system>Count.<user>Q What is")
    assert "the prompt that trained" in caplog.text
    assert plan.out.parent == run / "eval"
    assert plan.out.name.startswith("gsm8k-")
    asked = make_plan(settings(model=str(run), system_prompt=""))
    assert shortest(asked).startswith("<user>Q What is")
    by_adapter = make_plan(settings(adapter=str(run / "adapter")))
    assert by_adapter.prompts == plan.prompts


def test_a_run_without_its_own_prompt_uses_the_one_of_its_task(settings, model, tmp_path):
    run = make_run(tmp_path / "r", model, task="gsm8k")
    assert make_plan(settings(model=str(run))).prompts == make_plan(settings()).prompts


def test_changed_weights_need_another_evaluation(settings, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adapter = make_adapter(tmp_path / "adapter", model, random_b=True)
    before = make_plan(settings(model=str(adapter), out=None))
    same = make_plan(settings(model=str(adapter), out=None))
    make_adapter(adapter, model, random_b=True, seed=2)
    after = make_plan(settings(model=str(adapter), out=None))
    assert before.out == same.out != after.out
    assert str(before.out).startswith("evals/adapter-gsm8k-")


def test_without_a_model_the_newest_is_taken_and_named(settings, model, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no --model was given.*qerl quantize --model"):
        make_plan(settings(model=None))
    shutil.copytree(model, tmp_path / "checkpoints" / "mine")
    assert make_plan(settings(model=None)).prompts
    assert "taking the newest run or checkpoint made here, checkpoints/mine" in caplog.text


def test_prompts_and_completions_have_to_fit_into_the_context(settings):
    plan = make_plan(settings(max_new_tokens=None))
    room = CONTEXT - max(len(prompt.ids) for prompt in plan.prompts)
    assert plan.sampling.max_new_tokens == room
    with pytest.raises(ConfigError, match=f"exceed the model's context of {CONTEXT}: write {room} or less"):
        make_plan(settings(max_new_tokens=room + 1))
    with pytest.raises(ConfigError, match="the longest prompt has"):
        make_plan(settings(prompt_template="x" * CONTEXT + "{question}"))


def test_batches_are_longest_first_and_hold_everything_once():
    batches = plan_batches([[0] * 3, [0] * 9, [0] * 3, [0] * 5], samples=2, batch_size=3)
    assert batches == [[(1, 0), (1, 1), (3, 0)], [(3, 1), (0, 0), (0, 1)], [(2, 0), (2, 1)]]


def test_batch_seeds_never_change_and_differ_from_each_other():
    """Saved numbers depend on the seeds. The oracle: sha256 of "eval/0/0" begins with 6a3325c6 (sha256sum)."""
    assert part_seed(0, 0) == 0x6A3325C6 >> 1
    assert len({part_seed(seed, batch) for seed in range(20) for batch in range(50)}) == 1000


def test_the_command_shows_the_table_and_where_the_files_are(settings, model, questions, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--model", str(model), "--data", str(questions), "--max-new-tokens", "8", "--engine", "transformers"]
    with pytest.raises(SystemExit) as stopped:
        main("gsm8k", [*options, "--sampled", "-n", "2", "--pass-k", "1,2"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "accuracy (mean@2)" in shown
    assert "pass@2" in shown
    out = next(tmp_path.glob("evals/*-gsm8k-*"))
    assert str(out.relative_to(tmp_path)) in shown
    assert len(rows_of(out)) == 20


@pytest.fixture
def capped_run(model, tmp_path):
    """A run with 24 GiB of memory, 12 of them for its rollouts."""
    run = make_run(tmp_path / "capped", model)
    values = [f"model.base={model}", "model.format=bf16", "rollout.engine=auto"]
    save_config(load_recipe("tiny", [*values, "rollout.memory=12", "memory.cap_gib=24"]), run / "config.yaml")
    return run


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (24, 12)),
        ({"memory": 20}, (24, 20)),
        ({"memory": 0.5}, (24, 0.5)),
        ({"cap_gib": 16}, (16, 12)),
        ({"cap_gib": 40, "memory": 30}, (40, 30)),
        ({"memory": 30}, (None, 30)),
        ({"cap_gib": 10}, (10, None)),
    ],
    ids=["none", "memory", "share", "cap", "both", "more than the run's cap", "less than the run's memory"],
)
def test_a_run_is_evaluated_in_the_memory_of_its_training_by_default(
    settings, capped_run, monkeypatch, asked, expected
):
    monkeypatch.setattr("qerl.engine.open.choose_engine", lambda *_: "vllm")
    for given in ({"model": str(capped_run)}, {"adapter": str(capped_run / "adapter")}):
        options = engine_options(make_plan(settings(engine="vllm", **given, **asked)), None)
        assert (options.cap_gib, options.memory) == expected


def test_memory_options_need_vllm_and_sensible_values(settings, capped_run):
    # The transformers engine has no memory budget.
    assert make_plan(settings(model=str(capped_run))).settings.cap_gib is None
    with pytest.raises(ConfigError, match="--cap-gib is vllm's"):
        make_plan(settings(cap_gib=24))
    with pytest.raises(ConfigError, match="--cap-gib 0 is not possible"):
        settings(cap_gib=0)
    with pytest.raises(ConfigError, match="--memory 30 is more than --cap-gib 24"):
        settings(cap_gib=24, memory=30)


SOURCES = [{"name": "sums"}, {"name": "chains", "task": "math500", "grader": "mine.py"}]


@pytest.fixture
def mixed(tmp_path):
    listed = f"data.sources={json.dumps(SOURCES)}"
    config = small_config("tiny", tmp_path, "data.source=null", "data.limit=null", listed, "data.system_prompt=Any.")
    save_config(config, tmp_path / "config.yaml")
    return tmp_path


def test_each_task_has_the_prompt_of_its_source(mixed):
    assert with_prompt(get_task("arith"), EvalSettings("arith"), mixed).system_prompt == "Any."
    assert (
        with_prompt(get_task("gsm8k"), EvalSettings("gsm8k"), mixed).system_prompt == "Any."
    )  # else that of the first
    with pytest.raises(ConfigError, match=r"was trained with the grader mine\.py"):
        with_prompt(get_task("math500"), EvalSettings("math500"), mixed)
