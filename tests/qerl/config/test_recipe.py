"""Recipe files, `extends`, `--set`, flags, and the configuration that a run saves."""

import re
import time

import pytest
import yaml

from qerl.base.errors import ConfigError
from qerl.config.keys import REMOVED
from qerl.config.names import PROJECTIONS
from qerl.config.recipe import load_config, load_recipe, recipe_label, recipe_names, recipe_path, save_config
from qerl.config.schema import RewardConfig

NAMES = [
    *("calculator", "dapo_3b", "dapo_3b_bf16", "dapo_7b", "dapo_7b_bf16", "dapo_7b_fp8"),
    *("dapo_14b", "dapo_14b_bf16", "dapo_30b_a3b", "dapo_32b", "dapo_32b_bf16", "first_evening", "grpo_gsm8k_7b"),
    *("grpo_gsm8k_7b_bf16", "llama3_8b", "qad_1_7b", "qad_tiny", "qat_3b", "qat_7b", "qat_7b_ffn", "qat_tiny"),
    *("qwen3_5_9b", "qwen3_8_27b", "qwen3_8b", "qwen3_8b_fp8", "sft_7b", "sft_tiny", "tiny", "tiny_fp8", "tiny_moe"),
    "word_game",
]
OF_OTHER_SIZES = ("tiny", "tiny_fp8", "tiny_moe", "evening", "calculator", "game", "1_7b", "sft_7b")
SMALL = "model: {base: tiny}\ndata: {task: arith}\nrun: {steps: 40}\n"


@pytest.fixture
def recipe(tmp_path):
    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# -- shipped recipes


def test_the_list_of_shipped_recipes():
    assert recipe_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_survives_saving_exactly(name, tmp_path):
    config = load_recipe(name)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_says_how_to_start_it_and_where_its_numbers_come_from(name):
    text = recipe_path(name).read_text()
    comment = text[: re.search(r"^[a-z]", text, re.MULTILINE).start()]
    config = load_recipe(name)
    command = "distill" if config.distill else "sft" if config.sft else "train"
    assert re.search(rf"qerl {command} --recipe {name}( --quantize)?\n", comment)
    assert "2510.11696" in comment
    assert "departures from the paper" in comment.lower()


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_bf16")])
def test_a_bf16_twin_differs_in_format_noise_and_learning_rate_alone(name):
    twin, base = load_recipe(name).model_dump(), load_recipe(name.removesuffix("_bf16")).model_dump()
    differences = {
        f"{section}.{key}": (value, base[section][key])
        for section, keys in twin.items()
        if section not in ("rewards", "qat", "environment", "distill", "sft")
        for key, value in keys.items()
        if value != base[section][key]
    }
    assert differences == {
        "model.format": ("bf16", "nvfp4"),
        "noise.enabled": (False, True),
        "optim.learning_rate": (5e-6, 1e-5),
    }
    assert (twin["rewards"], twin["qat"], twin["distill"]) == (base["rewards"], None, None)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(OF_OTHER_SIZES)])
def test_a_step_of_the_paper_trains_on_128_completions(name):
    """arXiv 2510.11696, Table 4: batch 128; 8 samples per prompt on GSM8K (4096 tokens), 16 on BigMath (8192)."""
    rollout, task = load_recipe(name).rollout, load_recipe(name).data.task
    assert rollout.prompts_per_step * rollout.group_size == 128
    assert (rollout.group_size, rollout.max_new_tokens) == ((8, 4096) if task == "gsm8k" else (16, 8192))


# -- files


def test_an_unknown_recipe_names_the_nearest_and_lists_all():
    with pytest.raises(ConfigError, match=r"'dapo7b'; did you mean dapo_7b\? shipped are calculator, dapo_3b, "):
        load_recipe("dapo7b")
    with pytest.raises(ConfigError, match="no recipe is named 'zzzz"):
        load_recipe("z" * 5000)
    with pytest.raises(ConfigError, match="no recipe is named 'zzz'; shipped are calculator, dapo_3b, "):
        load_recipe("zzz")
    with pytest.raises(ConfigError, match="the recipe's name is empty"):
        load_recipe("")


def test_a_file_is_found_by_its_path_and_suggested_for_its_stem(recipe, tmp_path, monkeypatch):
    recipe(SMALL)
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_recipe("tiny").model.base == "tiny", "a folder of that name does not hide it"
    assert load_recipe("mine.yaml").run.steps == 40
    assert load_recipe(tmp_path / "mine.yaml").run.steps == 40
    with pytest.raises(ConfigError, match=r"no recipe is named 'mine', but there is a file: write mine\.yaml"):
        load_recipe("mine")
    assert recipe_label("mine.yaml") == "mine"
    assert recipe_label("dapo_7b") == "dapo_7b"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty; write sections"),
        (b"# nothing\n", "is empty; write sections"),
        (b"- model\n- data\n", "holds the list ['model', 'data']; write sections"),
        (b"dapo_7b\n", "holds 'dapo_7b' (text); write sections"),
        (b"model:\n\tbase: tiny\n", "mine.yaml:2: not YAML: found character"),
        (b"model: {base: caf\xe9}\n", "is not UTF-8 text (byte 17); save it as UTF-8"),
        (SMALL.encode("utf-16"), "is not UTF-8 text (byte 0)"),
        (b"\x00\x01\x02", "mine.yaml:1: the character U+0000 cannot stand in YAML"),
    ],
)
def test_a_file_that_is_no_recipe_says_why(tmp_path, content, says):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    assert says in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_windows_line_ends_and_a_byte_order_mark_are_accepted(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert load_recipe(path).run.steps == 40


def test_paths_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file; write a YAML file or one of calculator, dapo_3b"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a folder, not a recipe; write a YAML file"):
        load_recipe(tmp_path)
    (tmp_path / "config.yaml").write_text(SMALL)
    with pytest.raises(ConfigError, match=r"is a folder, not a recipe; write .*config\.yaml"):
        load_recipe(tmp_path)
    for name in ("x" * 5000 + ".yaml", "a\0b.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_recipe(name)


# -- extends


def test_extends_merges_sections_and_replaces_the_rest(recipe):
    recipe(
        SMALL + "adapter: {rank: 4, targets: [q_proj, k_proj]}\nrewards: [{name: accuracy}, {name: format}]\n", "a.yaml"
    )
    mine = recipe(
        "extends: a.yaml\nadapter: {targets: [v_proj]}\nrewards: [{name: length}]\nloss: {correction: {cap: 3}}\n"
    )
    config = load_recipe(mine)
    assert config.adapter.rank == 4
    assert config.adapter.targets == ("v_proj",)
    assert config.rewards == (RewardConfig(name="length"),)
    assert (config.loss.correction.cap, config.loss.correction.mode) == (3.0, "token_truncate")
    assert config.run.steps == 40


def test_an_error_under_extends_points_into_the_file_that_holds_the_key(recipe):
    base = recipe(SMALL + "adapter: {rank: 0}\n", "a.yaml")
    mine = recipe("extends: a.yaml\n\noptim: {lr: 1}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{mine}:3: optim.lr: unknown key")):
        load_recipe(mine)
    recipe("extends: a.yaml\n")
    with pytest.raises(ConfigError, match=re.escape(f"{base}:4: adapter.rank: got 0")):
        load_recipe(mine)
    recipe("extends: dapo_7b\ndata: {limit: 3}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{mine}:2: data.limit 3 with rollout.prompts_per_step 8")):
        load_recipe(mine)


def test_extends_is_one_level_and_names_a_recipe(recipe):
    mine = recipe("extends: dapo_7b_bf16\n")
    with pytest.raises(ConfigError, match=r"dapo_7b_bf16\.yaml:\d+: extends: this recipe is itself extended, and one"):
        load_recipe(mine)
    recipe("extends: mine.yaml\n")
    with pytest.raises(ConfigError, match="one level is all there is"):
        load_recipe(mine)
    recipe("extends: dapo_7\n")
    with pytest.raises(ConfigError, match=r"mine.yaml:1: extends: no recipe is named 'dapo_7'; did you mean dapo_7b\?"):
        load_recipe(mine)
    recipe("extends: [tiny]\n")
    with pytest.raises(ConfigError, match=r"mine.yaml:1: extends: got the list \['tiny'\], expected one recipe"):
        load_recipe(mine)


# -- overrides and flags


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("optim.learning_rate=1e-5", lambda c: c.optim.learning_rate, 1e-5),
        (" optim.learning_rate = 3e-6 ", lambda c: c.optim.learning_rate, 3e-6),
        ("adapter.targets=[q_proj,v_proj]", lambda c: c.adapter.targets, ("q_proj", "v_proj")),
        ("adapter.targets.0=v_proj", lambda c: c.adapter.targets, ("v_proj", *PROJECTIONS[1:])),
        ("rewards=[{name: accuracy}]", lambda c: c.rewards, (RewardConfig(name="accuracy"),)),
        ("rewards.0.weight=2", lambda c: c.rewards[0], RewardConfig(name="accuracy", weight=2.0)),
        ("rewards.0.args.words=[a, 1e-3]", lambda c: c.rewards[0].args, {"words": ["a", 1e-3]}),
        ("rewards.0.args.0.1=x", lambda c: c.rewards[0].args, {"0": {"1": "x"}}),
        ("rewards.0={weight: 3}", lambda c: c.rewards[0], RewardConfig(name="accuracy", weight=3.0)),
        ("noise={enabled: false}", lambda c: (c.noise.enabled, c.noise.num_stages), (False, 10)),
        ("data.columns.question=problem", lambda c: c.data.columns, {"question": "problem"}),
        ("data.system_prompt=null", lambda c: c.data.system_prompt, None),
        ("data.prompt_template='{question} = ?'", lambda c: c.data.prompt_template, "{question} = ?"),
        ("data.source=rows=1.jsonl", lambda c: c.data.source, "rows=1.jsonl"),
    ],
)
def test_an_override_is_read_as_yaml(recipe, override, read, value):
    assert read(load_recipe(recipe(SMALL), [override])) == value


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("adapter.rnk=3", "--set adapter.rnk=3: adapter.rnk: unknown key; did you mean adapter.rank?"),
        ("rank=3", "rank: unknown key; did you mean adapter.rank?"),
        ("adapter.rank.x=3", "adapter.rank.x: unknown key; adapter.rank holds a value, not keys"),
        ("adapter.rank", "--set adapter.rank: is not KEY=VALUE; write --set section.key=value"),
        ("run.out=", "has no value; write --set run.out=null, or --set run.out='\"\"'"),
        ("adapter.rank=3.5", "--set adapter.rank=3.5: adapter.rank: got 3.5, expected whole number >= 1"),
        ("rewards.1.weight=2", "rewards is a list, item 1 is not in it; write rewards.N with N an item's number (0 to"),
        ("rewards.0.wait=2", "rewards.0.wait: unknown key; did you mean rewards.0.weight?"),
        ("rewards=3", "rewards: got 3, expected a list of {name, weight, args, timeout_s}; the"),
        ("rewards=[3]", "rewards.0: got 3, expected keys (name, weight, args, timeout_s)"),
        ("rewards=acuracy", "--set rewards=acuracy: rewards.0.name acuracy: there is no such reward"),
        ("noise=off", "noise: got 'off' (text), expected keys (enabled, sigma_start,"),
        (
            "loss.correction=null",
            "loss.correction: got null, expected keys (mode, cap, floor); write keys under it, or",
        ),
        ("data.prompt_template={question} = ?", "text that is not YAML goes in quotes: --set 'data.prompt_template="),
        ("adapter.targets=[q_proj", "--set adapter.targets=[q_proj: not YAML"),
        ("data.columns.question=[a]", "data.columns.question: got the list ['a'], expected text"),
    ],
)
def test_a_wrong_override_is_named(recipe, override, says):
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe(SMALL), [override])
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_one_value_stands_for_a_list_of_it_and_text_for_the_reward_of_that_name(recipe):
    config = load_recipe(recipe(SMALL), ["rewards=[format, {name: accuracy, weight: 2}]", "adapter.targets=q_proj"])
    assert [(each.name, each.weight) for each in config.rewards] == [("format", 1), ("accuracy", 2)]
    assert config.adapter.targets == ("q_proj",)
    for one in ("rewards=format", "rewards={name: format}"):
        assert load_recipe(recipe(SMALL), [one]).rewards == config.rewards[:1]


def test_a_later_override_wins_and_flags_win_over_overrides(recipe):
    path = recipe(SMALL)
    config = load_recipe(path, ["run.steps=50", "run.steps=60", "model.base=a"], base="b", seed=None)
    assert (config.run.steps, config.model.base, config.run.seed) == (60, "b", 0)
    config = load_recipe(path, out="here", data="rows.jsonl", engine="vllm", steps=70, seed=3)
    assert (config.run.out, config.data.source, config.rollout.engine) == ("here", "rows.jsonl", "vllm")
    assert (config.run.steps, config.run.seed) == (70, 3)


def test_items_inside_free_arguments_can_be_changed_but_not_added(recipe):
    words = "rewards.0.args.words=[a, b]"
    config = load_recipe(recipe(SMALL), [words, "rewards.0.args.words.1=c"])
    assert config.rewards[0].args == {"words": ["a", "c"]}
    with pytest.raises(ConfigError, match=r"rewards\.0\.args\.words is a list, item 2 is not in it; .* \(0 to 1\)"):
        load_recipe(recipe(SMALL), [words, "rewards.0.args.words.2=c"])


def test_a_wrong_flag_is_named(recipe):
    with pytest.raises(ConfigError, match=r"--steps 0: run\.steps: got 0, expected whole number >= 1"):
        load_recipe(recipe(SMALL), steps=0)
    with pytest.raises(ConfigError, match=r"--model : model\.base: got '' \(text\), expected text"):
        load_recipe(recipe(SMALL), base="")
    with pytest.raises(
        ConfigError, match=r"--task gsm8: data\.task gsm8: there is no such task; write data.task: gsm8k"
    ):
        load_recipe(recipe(SMALL), task="gsm8")
    with pytest.raises(ConfigError, match=r"--engine vlm: rollout\.engine: got 'vlm' .*did you mean vllm\?"):
        load_recipe(recipe(SMALL), engine="vlm")


def test_an_override_into_a_broken_section_names_the_section(recipe):
    path = recipe(SMALL + "noise: 3\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}:4: noise: got 3, expected keys; write them under it")):
        load_recipe(path, ["noise.enabled=false"])


# -- saving


def test_what_is_saved_is_complete_and_reads_back_exactly(recipe, tmp_path):
    overrides = [
        "optim.learning_rate=1e-5", "optim.weight_decay=1e-8", "noise.sigma_start=0.012345678901234567",
        "data.system_prompt='yes: \"1e-5\"'", 'data.prompt_template="{question}\\n\\nénd\\t\\\\boxed{} #"',
        "rewards=[{name: pkg.mod.f, weight: -1, args: {a: '1e-5', b: 1e-5, c: [null, true, off], d: {e: .5}}}]",
        "loss.correction.mode=off", "noise.where=both",
    ]  # fmt: skip
    config = load_recipe(recipe(SMALL), overrides)
    saved = tmp_path / "config.yaml"
    save_config(config, saved)
    again = load_config(saved)
    assert again == config
    assert again.rewards[0].args == {"a": "1e-5", "b": 1e-5, "c": [None, True, "off"], "d": {"e": 0.5}}
    assert "keep_checkpoints: 2" in saved.read_text()
    save_config(again, tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_bytes() == saved.read_bytes()


def test_unknown_keys_by_the_thousand_are_one_short_line_at_once(recipe):
    text = "extends: tiny\n" + "".join(f"k{number}: 1\n" for number in range(4000))
    began = time.process_time()
    with pytest.raises(ConfigError) as raised:
        load_recipe(str(recipe(text)))
    assert time.process_time() - began < 2
    assert "k0: unknown key" in str(raised.value)
    assert "(3999 more after this one)" in str(raised.value)
    assert len(str(raised.value)) < 400


SECTIONS = {  # of removed keys that a recipe has only where it asks for them
    "qat": "qat.mode=weights",
    "distill": "distill.beta=1.0",
    "environment": "environment.name=calculator",
    "sft": "sft.max_tokens=64",
    "data.curriculum": "data.curriculum=true",
    "data.sources": "data.sources=[{name: a, validation: {}}, {name: b, validation: {}}]",
}


def with_removed(data, path, value, items=None):
    key, *rest = path
    if not rest:
        data[key] = value
    elif key == "N":
        for item in data[:items]:
            with_removed(item, rest, value, items)
    else:
        if not isinstance(data.get(key), dict | list):
            data[key] = {}
        with_removed(data[key], rest, value, items)


@pytest.mark.parametrize("key", REMOVED)
def test_a_saved_recipe_may_still_have_removed_keys_and_a_new_one_may_not(key, tmp_path):
    asked = [setting for section, setting in SECTIONS.items() if key.startswith(f"{section}.")]
    asked += ["noise.enabled=false"] + ["model.format=bf16"] * key.startswith("sft.")
    config, saved = load_recipe("tiny", asked), tmp_path / "config.yaml"
    for value in REMOVED[key].was or (1, 2.0, None):
        data = config.model_dump(mode="json")
        with_removed(data, key.split("."), value)
        saved.write_text(yaml.safe_dump(data))
        assert load_config(saved) == config
        with pytest.raises(ConfigError, match="this key is gone; "):
            load_recipe(saved)
    if REMOVED[key].was is not None:
        with_removed(data, key.split("."), "another value", items=1)
        saved.write_text(yaml.safe_dump(data))
        with pytest.raises(ConfigError, match="this key is gone; "):
            load_config(saved)
        if key.endswith(("system_prompt", "prompt_template")):
            with pytest.raises(ConfigError, match="this key is gone; "):
                load_config(saved, evaluated=True)
        else:
            assert load_config(saved, evaluated=True) == config


def test_a_grader_has_the_time_of_the_reward_that_grades():
    limited = ["rewards=[{name: accuracy, timeout_s: 2}]"]
    assert load_recipe("tiny", [*limited, "data.grader=grader.py"]).rewards[0].timeout_s == 2
    with pytest.raises(ConfigError, match=r"rewards\.0\.timeout_s .* write it for your own functions only"):
        load_recipe("tiny", limited)
