"""`qerl plan`: sizes by hand, memory against what runs measured, and what is said where a run does not fit."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from plan_check import (
    WORKLOADS,
    Workload,
    compare,
    compare_seconds,
    decode_table,
    scaled_table,
    seconds_table,
    table,
)
from rich.console import Console
from small_run import small_config
from typer.testing import CliRunner

from qerl.cli import app
from qerl.commands.plan import sentences, this_card
from qerl.config.recipe import load_recipe, recipe_names
from qerl.errors import CheckpointError, ConfigError, RewardError
from qerl.plan.advice import advice, largest_completion, with_values
from qerl.plan.cards import CARDS, card_of
from qerl.plan.plan import MAX_SEQUENCES, decode_seconds, plan, trainer_bytes
from qerl.plan.sizes import KNOWN, read_sizes, sizes_of
from qerl.vllm_plugin.opening import Settings
from training.preflight.dry_run import dry_run
from training.run import start

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30

LONG = Workload("dapo_7b", "Qwen/Qwen2.5-7B", 16, 16, 512, 4096, 32)


def test_the_help_says_all_that_a_model_may_be():
    text = " ".join(CliRunner().invoke(app, ["plan", "--help"]).output.split())
    for what in ("run", "adapter", "folder", "`tiny`", "hub id", *KNOWN):
        assert what in text.partition("--model")[2].partition("--set")[0], what


def test_qwen2_7b_by_hand():
    sizes = read_sizes("Qwen/Qwen2.5-7B-Instruct")
    # q and o 3584 x 3584, k and v 512 x 3584, gate, up and down 3584 x 18944, 28 layers
    body = 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 3584 * 18944)
    assert sizes.body == body
    assert sizes.kv_bytes() == 2 * 28 * 4 * 128 * 2
    assert sizes.kv_bytes("fp8") == 2 * 28 * 4 * 128
    assert sizes.kv_bytes("fp8_per_token_head") == 2 * 28 * 4 * 132
    assert sizes.adapter(32, ("q_proj", "down_proj")) == 28 * 32 * (2 * 3584 + 18944 + 3584)
    outer = 2 * 152064 * 3584 + 28 * 2 * 3584
    assert sizes.weights_bytes("nvfp4") == body * 9 / 16 + 2 * outer
    assert sizes.weights_bytes("bf16") == 2 * (body + outer)
    # A of q/k/v stands three times, B of the three in one block-diagonal matrix; ranks in steps of 16
    qkv, o, gate_up, down = 48 * (4608 + 3584), 16 * 7168, 32 * (37888 + 3584), 16 * (3584 + 18944)
    assert sizes.engine_adapter_bytes(9) == 2 * 28 * (qkv + o + gate_up + down)


def test_the_shipped_model_and_a_tied_head(tmp_path):
    assert read_sizes("tiny").body < 1e6
    (tmp_path / "config.json").write_text(json.dumps({**KNOWN["qwen2.5-3b"]}), encoding="utf-8")
    tied = read_sizes(str(tmp_path))
    assert tied.weights_bytes("bf16") == pytest.approx(3.09e9 * 2, rel=0.01)  # Qwen's own count


@pytest.mark.parametrize("name", WORKLOADS)
def test_planned_memory_is_within_a_tenth_of_what_the_run_measured(name):
    made = WORKLOADS[name].plan()
    assert not made.problems
    for one in compare(name, WORKLOADS[name]):
        assert one.planned == pytest.approx(one.measured, rel=0.10), one.what
    assert f"{name}.json" in table()


@pytest.mark.parametrize("name", ["step-7b-qerl", "step-7b-qerl-cap24"])
def test_planned_seconds_are_within_15_percent_of_what_the_run_measured(name):
    """Of the 32B and 70B there are first steps of older code alone; the page shows them."""
    for one in compare_seconds(name, WORKLOADS[name]):
        assert one.planned == pytest.approx(one.measured, rel=0.15), one.what


def test_the_page_shows_planned_beside_measured_seconds(tmp_path, monkeypatch):
    times = [(9.0, 9.0), (2.0, 4.0), (4.0, 6.0)]
    steps = [{"step": n + 1, "time/rollout_s": r, "time/train_s": t} for n, (r, t) in enumerate(times)]
    written = {f"{name}.json": {"steps": steps[:1] if "0b" in name else steps} for name in WORKLOADS}
    for shape in ("7b", "32b"):
        written[f"rollout-{shape}-qerl.json"] = {"decode_tokens_per_s": {"8": 1000.0}}
    for name, content in written.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr("plan_check.BENCHMARKS", tmp_path)
    name = "step-7b-qerl"
    assert [one.measured for one in compare_seconds(name, WORKLOADS[name])] == [3.0, 5.0]  # not the first
    lines = seconds_table().splitlines()
    planned = WORKLOADS[name].plan().seconds["rollout"]
    assert lines[2].endswith(f", mean of 2 | rollout | {planned:.1f} s | 3.0 s | {planned / 3 - 1:+.1%} |")
    assert lines[-2].split(" | ")[0].endswith("cap 80 GiB, the first step")
    assert "| 9.0 s |" in lines[-2]
    assert [line.split(" | ")[3] for line in decode_table().splitlines()[2:]] == ["8.00 ms"] * 2


def test_what_a_step_costs_as_one_thing_doubles():
    rows = [[float(cell.split()[0]) for cell in line.split(" | ")[1:]] for line in scaled_table().splitlines()[2:]]
    workload, prompts, group, prompt, *_, cap = rows
    assert workload[0] < prompts[0] < 2 * workload[0]  # weights are read for twice the sequences at once
    assert prompts[1] == pytest.approx(2 * workload[1], rel=0.03)
    assert group[1] < prompts[1]  # prompts once
    assert prompt[1] < 1.05 * workload[1]
    assert cap[2] < 24


@pytest.mark.parametrize(("name", "budget"), [("step-7b-qerl", 18432), ("step-7b-qerl-cap24", 3072)])
def test_the_largest_micro_batch_is_the_one_that_the_run_planned_for(name, budget):
    """Of whole rows and with shared prompts; the run measures what a layer keeps, and logs what it plans by that."""
    made = WORKLOADS[name].plan()
    assert made.micro_batches.micro_batch_tokens == budget
    steps = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))["steps"]
    planned = steps[0]["memory/train_planned_gib"]  # completions of full length
    # 0.005 once the files are measured anew: these are from before a chunk had fewer logits
    assert made.memory["training"]["micro-batch"] / GIB == pytest.approx(planned, rel=0.005)


@pytest.mark.parametrize("shape", ["7b", "32b"])
def test_planned_decode_steps_are_near_the_measured_ones(shape):
    """`bench_rollout.py` samples 128 tokens behind a prompt of 128."""
    measured = json.loads((ROOT / "benchmarks" / f"rollout-{shape}-qerl.json").read_text(encoding="utf-8"))
    sizes = read_sizes(f"Qwen/Qwen2.5-{shape.upper()}")
    for sequences, rate in measured["decode_tokens_per_s"].items():
        count = int(sequences)
        planned = decode_seconds(sizes, card_of("h200"), "nvfp4", count, count * 192 * sizes.kv_bytes())
        assert planned == pytest.approx(count / rate, rel=0.10), sequences


def test_training_pays_for_a_prompt_of_a_group_once():
    """8 x 8 against 32 x 2: 256 + 256 tokens; the head works on completions alone."""
    together = Workload("dapo_7b", "Qwen/Qwen2.5-7B", 8, 8, 256, 256, 32)
    apart = replace(together, prompts=32, group=2)
    body, head = read_sizes("Qwen/Qwen2.5-7B").body, read_sizes("Qwen/Qwen2.5-7B").head
    cost = [4 * body * (prompts * 256 + 64 * 256) + 4 * head * 64 * 256 for prompts in (8, 32)]
    seconds = [each.plan().seconds["training"] for each in (together, apart)]
    assert seconds[0] / seconds[1] == pytest.approx(cost[0] / cost[1], rel=1e-6)


def test_a_smaller_limit_takes_from_the_cache_and_from_the_micro_batch():
    wide, tight = (replace(LONG, cap=cap).plan() for cap in (80, 24))
    assert tight.cache_tokens < wide.cache_tokens
    assert tight.peak("training") < 24 * GIB
    assert tight.micro_batches.recomputed(4608) > wide.micro_batches.recomputed(4608) == 0
    assert tight.seconds["training"] > wide.seconds["training"]


@pytest.mark.parametrize(
    ("gpu", "said"),
    [("24", "0 of 28 layers recompute their activations, 19 in a row of 9216 tokens."), ("141", "0 of")],
)
def test_a_plan_says_what_recomputes_in_the_longest_row(gpu, said):
    """As a run logs: a row of more tokens than a micro-batch is one of its own."""
    config = load_recipe("dapo_7b", [])
    text = " ".join(sentences(config, plan(config, read_sizes("Qwen/Qwen2.5-7B"), card_of(gpu))))
    assert said in text
    assert ("in a row of" in text) == (gpu == "24")


def test_an_fp8_cache_holds_twice_the_tokens():
    sizes, values = read_sizes("Qwen/Qwen2.5-32B"), ["memory.cap_gib=80", "rollout.max_new_tokens=8192"]
    full, fp8 = (
        plan(load_recipe("dapo_32b", [*values, f"rollout.kv_cache_dtype={kind}"]), sizes, card_of("h200"))
        for kind in ("auto", "fp8")
    )
    assert fp8.memory["rollout"]["KV cache"] == full.memory["rollout"]["KV cache"]  # all that is left
    assert fp8.cache_tokens == pytest.approx(2 * full.cache_tokens, abs=1)
    assert fp8.seconds["rollout"] < full.seconds["rollout"]


def test_twice_the_new_tokens_take_more_than_twice_the_rollout():
    short = replace(LONG, group=8, prompt_tokens=128, new_tokens=512, cap=80)
    short, long = (each.plan() for each in (short, replace(short, new_tokens=1024)))
    assert 2.0 < long.seconds["rollout"] / short.seconds["rollout"] < 2.5  # the cache that is read grows


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ([], "take a smaller base"),
        (["rollout.memory=0.9"], "take a smaller base"),
        (["model.format=bf16", "noise.enabled=false"], "take a smaller or quantized base"),
    ],
)
def test_what_does_not_fit_is_named_with_the_remedy(settings, remedy):
    """To take a quantized base is no remedy where it is NVFP4."""
    made = plan(load_recipe("dapo_32b", settings), read_sizes("Qwen/Qwen2.5-32B"), card_of("16"))
    assert any(remedy in problem for problem in made.problems), made.problems


@pytest.mark.parametrize("gpu", ["8", "10", "12"])
def test_the_default_budget_leaves_room_for_what_lies_outside_it(gpu):
    made = plan(load_recipe("dapo_3b", []), read_sizes("Qwen/Qwen2.5-3B"), card_of(gpu))
    assert made.problems == ()
    assert made.peak("rollout") <= made.limit


@pytest.mark.parametrize(("memory", "said"), [("1.0", "0.91"), ("23.5", "21.6")])
def test_a_budget_that_leaves_no_room_is_a_problem_and_what_is_advised_is_none(memory, said):
    """4090: 23.6 GiB. Outside the budget: 0.5 + 1.25 + 0.6 - 1 of the engine, 160 MB of counts, float32 LoRA of rank 32
    and its 8-bit state."""
    config, sizes = load_recipe("dapo_7b", [f"rollout.memory={memory}"]), read_sizes("Qwen/Qwen2.5-7B")
    made = plan(config, sizes, card_of("4090"))
    (problem,) = made.problems
    assert problem.endswith(f"lower rollout.memory to {said}")
    lower = load_recipe("dapo_7b", [f"rollout.memory={said}"])
    assert plan(lower, sizes, card_of("4090")).problems == ()
    above = load_recipe("dapo_7b", [f"rollout.memory={float(said) + (0.01 if memory == '1.0' else 0.1)}"])
    assert plan(above, sizes, card_of("4090")).problems
    assert "--set rollout.memory=null" in advice(config, sizes, card_of("4090"))
    done = CliRunner().invoke(
        app, ["plan", "--recipe", "dapo_7b", "--gpu", "4090", "--set", f"rollout.memory={memory}"]
    )
    assert done.exit_code == 1


@pytest.mark.parametrize(
    ("values", "gib"),
    [([], 80), ([], 12), (["memory.cap_gib=14"], 80), (["rollout.memory=0.8"], 24), (["rollout.memory=20"], 24)],
)
def test_the_engine_takes_the_budget_that_was_planned(tmp_path, values, gib):
    """Both leave vLLM's profile to size the cache; a file of the right length stands for the weights."""
    config = load_recipe("dapo_7b", values)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "quantization_config": {}, **KNOWN["qwen2.5-7b"]}), encoding="utf-8"
    )
    sizes = read_sizes(str(tmp_path))
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(int(sizes.weights_bytes("nvfp4")))
    context = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    asked = (config.rollout.memory, config.memory.cap_gib, context, MAX_SEQUENCES, "auto", trainer_bytes(config, sizes))
    arguments = Settings(str(tmp_path), "nvfp4", False, *asked).memory_arguments(gib * GIB)
    assert arguments["kv_cache_memory_bytes"] is None
    made = plan(config, sizes, card_of(str(gib)))
    parts = made.memory["rollout"]
    planned = parts["weights"] + parts["KV cache"] + parts["engine's work"]
    assert arguments["gpu_memory_utilization"] * gib * GIB == pytest.approx(planned, abs=2)


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("24", 24),
        ("80", 80),
        ("H100", 79.2),
        ("4090", 23.6),
        ("RTX 4090", 23.6),
        ("rtx3090", 23.6),
        ("24GB", 24),
        ("8 GiB", 8),
    ],
)
def test_cards(text, gib):
    assert card_of(text).memory_gib == gib


@pytest.mark.parametrize(
    ("reported", "gib", "gb_per_s"),
    [
        ("NVIDIA GeForce RTX 4090, 24564", 23.6, 857),
        ("NVIDIA GeForce RTX 4090 Laptop GPU, 16376", 16.0, 857),
        ("NVIDIA A100-SXM4-40GB, 40960", 39.4, 1322),
        ("NVIDIA A100-SXM4-80GB, 81920", 79.2, 1733),
        ("NVIDIA H100 NVL, 95830", 93.6, 2848),
        ("NVIDIA H200, 143771", 139.8, 4200),
        ("NVIDIA GeForce RTX 3060, 12288", 12.0, 796),
    ],
)
def test_this_card_has_the_memory_that_it_reports(tmp_path, monkeypatch, reported, gib, gb_per_s):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{reported}'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    card = this_card()
    assert (card.memory_gib, card.gb_per_s) == (gib, gb_per_s)


RECIPES = [name for name in recipe_names() if name != "tiny"]


@pytest.mark.parametrize("gpu", ["24", "4090", "80", "h100"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_fits_or_says_what_makes_it_fit(recipe, gpu):
    """What is advised is written down, read back as options of `qerl train`, and planned again."""
    config, card = load_recipe(recipe, []), card_of(gpu)
    sizes = read_sizes(config.model.base)
    found = advice(config, sizes, card)
    if not plan(config, sizes, card).problems:
        assert found == []
        return
    assert found
    for options in (each.split() for each in found if each.startswith("--")):
        values = dict(zip(options[::2], options[1::2], strict=True)) if options[0] == "--model" else {}
        changed = load_recipe(recipe, [word for word in options if "=" in word], base=values.get("--model"))
        assert plan(changed, read_sizes(changed.model.base), card).problems == (), options
    needed = [each.partition(" GiB")[0] for each in found if "of GPU memory" in each]
    assert needed
    assert plan(config, sizes, card_of(needed[0])).problems == ()
    assert plan(config, sizes, card_of(str(int(needed[0]) - 1))).problems


def test_the_longest_completion_is_a_boundary():
    config, card = load_recipe("dapo_7b", []), card_of("24")
    sizes = read_sizes(config.model.base)
    longest = largest_completion(config, sizes, card)
    assert longest >= config.rollout.max_new_tokens
    planned_with = {
        n: plan(with_values(config, {"rollout.max_new_tokens": n}), sizes, card) for n in (longest, longest + 256)
    }
    assert [bool(planned_with[n].problems) for n in planned_with] == [False, True]
    assert largest_completion(config, sizes, CARDS["h200"]) == 32768 - 1024  # there the model's positions end


def test_a_cap_or_a_fixed_size_is_advised_away():
    config = load_recipe("dapo_7b", ["memory.cap_gib=12", "run.micro_batch_tokens=40000"])
    sizes = read_sizes(config.model.base)
    assert "--set run.micro_batch_tokens=null --set memory.cap_gib=null" in advice(config, sizes, card_of("24"))


def test_a_cap_on_a_card_that_is_large_enough_is_advised_higher_not_another_card():
    config, card = load_recipe("dapo_7b", ["memory.cap_gib=10"]), card_of("24")
    sizes = read_sizes(config.model.base)
    found = advice(config, sizes, card)
    assert not any("of GPU memory" in line for line in found)
    (cap,) = [int(line.rpartition("=")[2]) for line in found if re.fullmatch(r"--set memory\.cap_gib=\d+", line)]
    planned = [plan(with_values(config, {"memory.cap_gib": float(gib)}), sizes, card) for gib in (cap - 1, cap)]
    assert [bool(each.problems) for each in planned] == [True, False]


def test_more_tokens_than_the_model_has_positions_for():
    config = load_recipe("dapo_7b", ["rollout.max_new_tokens=32768"])
    (problem,) = plan(config, read_sizes(config.model.base), CARDS["h200"]).problems
    assert "32768 positions" in problem


def test_known_sizes_say_which_models_norm_their_heads():
    assert read_sizes("Qwen/Qwen3-8B").head_norms
    assert not read_sizes("Qwen/Qwen2.5-7B").head_norms


@pytest.mark.parametrize(
    ("text", "words"), [("h900", "is not known"), ("0", "not a size"), ("-3", "not a size"), ("4070", "or one of 3090")]
)
def test_wrong_cards(text, words):
    with pytest.raises(ConfigError, match=words):
        card_of(text)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "big"), ("num_attention_heads", 0), ("head_dim", -1)])
def test_sizes_that_are_no_sizes_are_refused(key, value):
    with pytest.raises(CheckpointError, match=f"config.json has {key} {value!r}, which is no whole number above 0"):
        sizes_of({**KNOWN["qwen2.5-7b"], key: value}, "x")


def test_a_model_of_unknown_size_asks_for_its_folder():
    with pytest.raises(CheckpointError, match=r"give a folder with its config\.json"):
        read_sizes("someone/mystery-model")
    with pytest.raises(CheckpointError, match="only dense decoder models"):
        sizes_of({"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}, "x")


def test_the_command_says_what_fits_and_fails_where_nothing_does():
    done = CliRunner().invoke(app, ["plan", "--recipe", "dapo_7b", "--gpu", "24"])
    assert done.exit_code == 0
    assert "micro-batches of" in done.stdout
    assert "KV cache holds" in done.stdout
    done = CliRunner().invoke(app, ["plan", "--recipe", "dapo_32b", "--gpu", "24"])
    assert done.exit_code == 1
    assert "Does not fit: the weights take" in done.stdout
    assert "Fits with --model Qwen/Qwen2.5-14B-Instruct." in done.stdout


@pytest.mark.parametrize("name", CARDS)
def test_every_card_trains_a_3b_model(name):
    assert not Workload("dapo_3b", "Qwen/Qwen2.5-3B", 16, 8, 256, 1024, 32).plan(name).problems


def test_a_dry_run_shows_plan_data_and_rewards_and_writes_nothing(nvfp4_base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["train", "--recipe", "tiny", "--model", str(nvfp4_base), "--dry-run"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "8192 prompts" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.strip().startswith("arith-train-0-")]
    assert len(rows) == 5
    assert all(row[-3:] == ["1", "/", "0"] for row in rows)  # the answer earns the reward, nothing does not
    assert "KV cache" in done.stdout
    assert not list(tmp_path.iterdir())


def test_what_a_reward_failed_on_is_still_there_after_a_dry_run(nvfp4_base, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "def wrong(completions, **columns):\n    return [float('nan') for _ in completions]\n"
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    config = small_config(nvfp4_base, tmp_path, f"rewards=[{{name: '{tmp_path / 'own.py'}:wrong'}}]")
    with pytest.raises(RewardError) as raised:
        dry_run(config, Console(file=StringIO()))
    saved = Path(re.search(r"\S+failed_reward\.json", str(raised.value))[0])
    assert json.loads(saved.read_text(encoding="utf-8"))
    (tmp_path / "own.py").write_text(code.replace("nan", "1"), encoding="utf-8")
    left = set(tmp_path.iterdir())
    dry_run(config, Console(file=StringIO()))
    assert set(tmp_path.iterdir()) <= left  # nothing stays of rewards that work


@pytest.fixture(scope="module")
def run_of_three_steps(nvfp4_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return start(small_config(nvfp4_base, folder, steps=3), "first").run_dir


@pytest.mark.parametrize("part", ["", "adapter"])
def test_a_run_and_its_adapter_are_planned_by_their_base(run_of_three_steps, nvfp4_base, part):
    assert read_sizes(str(run_of_three_steps / part)) == read_sizes(str(nvfp4_base))
    model = ["--model", str(run_of_three_steps / part)]
    planned = CliRunner().invoke(app, ["plan", "--recipe", "tiny", *model])
    assert planned.exit_code == 0, planned.output
    dry = CliRunner().invoke(app, ["train", "--recipe", "tiny", *model, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert planned.stdout[-200:] == dry.stdout[-200:]


def test_an_adapter_of_a_known_model_is_planned_without_it(tmp_path):
    about = {"base_model_name_or_path": "Qwen/Qwen2.5-7B-Instruct"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    assert read_sizes(str(tmp_path)) == read_sizes("Qwen/Qwen2.5-7B")


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("adapter.rank=4096", ConfigError, "write adapter.rank: "),
        ("rollout.max_new_tokens=512", ConfigError, "exceed the model's 512 positions"),
        ("adapter.rank=8", ConfigError, "write adapter.rank: 16"),  # of the run that it starts from
    ],
)
def test_a_dry_run_refuses_what_the_run_would(run_of_three_steps, nvfp4_base, tmp_path, given, error, said):
    base = run_of_three_steps if given == "adapter.rank=8" else nvfp4_base
    with pytest.raises(error, match=said):
        dry_run(small_config(base, tmp_path, given), Console(file=StringIO()))
