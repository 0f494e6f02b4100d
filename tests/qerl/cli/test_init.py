"""`qerl init`: what it writes from a look at somebody's rows can be planned, graded and trained."""

import shlex
from pathlib import Path

import pytest

import qerl
from qerl.base.errors import ConfigError, DataError
from qerl.cli.init import InitOptions, init
from qerl.config.recipe import load_recipe
from qerl.data.guess import guess
from tests.helpers.row_files import write_csv, write_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
REPLIED = [*CHAT, {"role": "assistant", "content": "two"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1 + 1?", "answer": "2"}, ("prompt", "answer", "number", {})),
        ({"question": "q", "answer": "It is 1,800.\n#### 1,800"}, ("question", "answer", "number", {})),
        ({"problem": "q", "solution": "x^2"},
         ("problem", "solution", "text", {"question": "problem", "answer": "solution"})),
        ({"instruction": "q", "output": "Paris"},
         ("instruction", "output", "text", {"question": "instruction", "answer": "output"})),
        ({"messages": REPLIED}, ("messages", None, "text", {})),
        ({"messages": CHAT}, ("messages", None, "none", {})),
        ({"text": "Once"}, ("text", None, "none", {"question": "text"})),
        ({"data_source": "x", "prompt": CHAT, "reward_model": {"ground_truth": "2"}},
         ("prompt", "reward_model.ground_truth", "number", {"answer": "reward_model.ground_truth"})),
    ],
)  # fmt: skip
def test_columns_and_kinds_of_answers_are_found(row, expected, tmp_path):
    found = guess(write_jsonl(tmp_path / "rows.jsonl", [row, row]))
    assert (found.question, found.answer, found.kind, found.columns) == expected
    assert found.rows == 2


def test_columns_that_are_named_are_taken(tmp_path):
    rows = [{"article": f"About {n}", "topic": "owls", "text": "no question", "label": n} for n in range(3)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    found = guess(data, {"prompt": "article"})
    assert (found.columns, found.kind) == ({"question": "article", "answer": "label"}, "number")
    assert guess(data, {"answer": "topic"}).columns == {"question": "text", "answer": "topic"}
    for name, column in (("question", "label"), ("question", "artikel"), ("answer", "nothing"), ("id", "article")):
        with pytest.raises(DataError, match=f"no column as --columns {name}={column} says .its columns: article"):
            guess(data, {name: column})


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"id": 3}, "has no column that asks (its columns: id): write --columns question=NAME,answer=NAME; a question"),
        ({"messages": [{"content": "q"}]}, "its message 1 is no object with a role"),
        ({"messages": [{"role": "usr", "content": "q"}]}, "its message 1 has 'role' 'usr': write one of system, "),
        (
            {"conversations": [{"from": "narrator", "value": "q"}]},
            "its message 1 has 'from' 'narrator': write one of human, ",
        ),
        ({"messages": [{"role": "system", "content": "q"}]}, "its messages ask nothing"),
    ],
)
def test_rows_that_ask_nothing_are_one_line_and_write_nothing(row, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError) as refused:
        init(InitOptions(str(data)))
    assert line in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def grader(folder):
    space = {}
    exec((folder / "grader.py").read_text(encoding="utf-8"), space)
    return space["grade"]


def test_the_graders_that_are_written_grade(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = {"numbers": {"prompt": "q", "answer": "So #### 1,800"}, "words": {"prompt": "q", "answer": "New York."}}
    for name, row in rows.items():
        init(InitOptions(write_jsonl(tmp_path / f"{name}.jsonl", [row]), recipe="tiny"))
    numbers, words = (grader(tmp_path / name) for name in rows)
    assert [numbers(text, "So #### 1,800") for text in ("it is 1800", "1800.0", "19 then 1800", "1801", "")] == [
        *(True, True, True, False, False)
    ]
    assert [words(text, "New York.") for text in ("So:\nnew  york", "New York", "York", "")] == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(ConfigError, match="numbers exists and is left as it is: write another --out"):
        init(InitOptions("numbers.jsonl"))
    with pytest.raises(ConfigError, match=r"run `qerl sft --recipe sft_tiny --data words.jsonl`"):
        init(InitOptions("words.jsonl", recipe="sft_tiny", out=tmp_path / "new"))
    assert not list(tmp_path.glob(".*"))


def test_what_is_written_is_planned_and_trained(tmp_path, monkeypatch, nvfp4_base, here):
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": f"What is {n} + {n}?", "solution": str(2 * n), "level": n} for n in range(4)]
    write_csv(tmp_path / "own rows.csv", rows)
    (tmp_path / "small.yaml").write_text(
        f"model: {{base: '{nvfp4_base}'}}\ndata: {{task: arith, max_prompt_tokens: 64}}\n"
        "adapter: {rank: 4}\nnoise: {enabled: false}\n"
        "rollout: {prompts_per_step: 8, group_size: 2, max_new_tokens: 4}\nrun: {steps: 2}\n"
    )
    code, printed, _ = here("init", "own rows.csv", "--out", "mine", "--recipe", "small.yaml")
    assert (code, printed.splitlines()[-1]) == (0, "Next: qerl train --recipe mine/recipe.yaml --quantize --dry-run")
    config = load_recipe("mine/recipe.yaml")
    assert config.data.columns == {"question": "problem", "answer": "solution"}
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (4, 2)
    code, printed, _ = here("train", "--recipe", "mine/recipe.yaml", "--dry-run")
    assert code == 0, printed
    assert "1 / 0" in printed  # the answer itself is graded right
    run = qerl.train("mine/recipe.yaml", out="run")
    assert run.finished
    assert {"rewards/accuracy", "rewards/short"} <= set(run.metrics.columns)


def test_rows_without_answers_are_trained_by_the_reward_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = init(
        InitOptions(write_jsonl(tmp_path / "asked.jsonl", [{"prompt": "Tell a joke.", "topic": "owls"}]), recipe="tiny")
    )
    config = load_recipe(folder / "recipe.yaml")
    assert (config.data.grader, [reward.name for reward in config.rewards]) == (None, ["asked/rewards.py:short"])
    assert "further columns: topic\n" in (folder / "recipe.yaml").read_text(encoding="utf-8")


NAMES = {
    "closes the docstring": 'x"""\nopen("PWN", "w")\nY = """', "closes a line": "x\nopen('PWN', 'w')\n",
    "other line ends": "a\rb\x0cc\x85d\u2028open('PWN', 'w')", "escapes": "\\N{x} \\", "NUL": "a\0b",
    "half a character": "\ud800", "encoding": "coding: utf-7 +AAo-open('PWN', 'w')", "braces": "{columns} {place} {0}",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("answer", ["2", "two", None])
def test_names_of_columns_never_become_code(name, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = {"prompt": "1 + 1?", "level": 1} | ({"answer": answer} if answer else {})
    init(InitOptions(write_jsonl(tmp_path / "plain.jsonl", [plain]), recipe="tiny"))
    init(InitOptions(write_jsonl(tmp_path / "odd.jsonl", [{**plain, name: 1}]), recipe="tiny"))
    for file in ("grader.py", "rewards.py"):
        assert (tmp_path / "odd" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert load_recipe(tmp_path / "odd" / "recipe.yaml").data.columns is None
    assert "# further columns: level, " in (tmp_path / "odd" / "recipe.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        'e"""; open("PWN", "w"); """', "a\nrun: {steps: 7}\n#", "a'$(touch PWN)`touch PWN`;touch PWN;", "--out",
        "a: {b} # c", '"""',
    ],
)  # fmt: skip
def test_names_of_files_never_become_code_keys_or_options(name, tmp_path, monkeypatch, here):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "plain.jsonl", [{"prompt": "1 + 1?", "answer": "2"}])
    plain = init(InitOptions("plain.jsonl", recipe="tiny"))
    odd = Path(write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": "1 + 1?", "answer": "2"}]))
    for folder in (init(InitOptions(f"./{odd.name}", recipe="tiny")), init(InitOptions(str(odd), Path(name), "tiny"))):
        for file in ("grader.py", "rewards.py"):
            assert (folder / file).read_bytes() == (plain / file).read_bytes()
        config, expected = load_recipe(folder / "recipe.yaml"), load_recipe(plain / "recipe.yaml")
        assert (config.data.grader, Path(config.data.source).name) == (str(folder / "grader.py"), odd.name)
        assert config.run.steps == expected.run.steps
    assert not (tmp_path / "PWN").exists()


def test_a_file_whose_name_is_no_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "\udcff.jsonl", [{"prompt": "1 + 1?", "answer": "2"}])
    with pytest.raises(ConfigError, match=r"'\\udcff.jsonl' has bytes that are no text in UTF-8: rename it"):
        init(InitOptions("\udcff.jsonl", Path("new"), "tiny"))


def test_the_command_that_comes_next_is_words_of_a_shell(tmp_path, monkeypatch, here):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a'$(touch PWN)`touch PWN`; b.jsonl", [{"prompt": "1 + 1?", "answer": "2"}])
    for out, folder in (((), "a___touch PWN__touch PWN__ b"), (("--out", "$(touch PWN)"), "$(touch PWN)")):
        code, printed, _ = here("init", "a'$(touch PWN)`touch PWN`; b.jsonl", "--recipe", "tiny", *out)
        assert code == 0
        words = shlex.split(printed.splitlines()[-1].removeprefix("Next: "))
        assert words[:4] == ["qerl", "train", "--recipe", f"{folder}/recipe.yaml"]
