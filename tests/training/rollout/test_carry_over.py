"""Completions that go on in later steps: all that was drawn is trained on, none too late, and to the same bits."""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from make_random_checkpoint import end_by_chance

import training.step
from qerl.base.errors import ConfigError
from qerl.base.parallel import ALONE, Parallel
from qerl.config.recipe import load_recipe, save_config
from qerl.engine.interface import SamplingParams
from qerl.engine.transformers.engine import TransformersEngine
from tests.helpers import ranks
from tests.helpers.small_run import numbers, same_adapters, small_config
from training.rollout.carry_over import FILE, Begun, BegunGroup, CarryOver, Kept, due
from training.rollout.prompts import rollout_rows
from training.run import resume, start

SAMPLING = SamplingParams(8)
CARRIED = "rollout.carry_over=3"
VARIED = ("rollout.max_new_tokens=40", "run.micro_batch_tokens=200", "logging.completions_every=1")
ASKED = '''
import json
from pathlib import Path


def digits(completions, row, step, **columns):
    """Writes down which rows each step trains on."""
    with (Path(__file__).parent / "asked.jsonl").open("a") as handle:
        handle.write(json.dumps([step, row[::4]]) + "\\n")
    return [len(set(text)) for text in completions]
'''


@pytest.fixture(scope="module")
def ending(nvfp4_base, tmp_path_factory):
    """The random base with an end token among eight, so that lengths are geometric."""
    base = tmp_path_factory.mktemp("ending") / "base"
    shutil.copytree(nvfp4_base, base)
    end_by_chance(base, json.loads((base / "config.json").read_text())["vocab_size"], 8)
    return base


def configured(base, folder, *overrides, **kwargs):
    return small_config(base, folder, CARRIED, *VARIED, *overrides, **kwargs)


@pytest.fixture(scope="module")
def traced(ending, tmp_path_factory):
    """A run of six steps, what its engine drew after which tokens, and the groups and the batch of each step."""
    found = SimpleNamespace(drawn={}, steps=[])
    sample, padded_batch = TransformersEngine.generate_batch, training.step.padded_batch

    def traced_sample(self, requests, told):
        done = sample(self, requests, told)
        for request, part in zip(requests, done, strict=True):
            found.drawn.setdefault(tuple(request.prompt), []).append(part)
        return done

    def traced_batch(groups, *rest):
        batch = padded_batch(groups, *rest)
        found.steps.append(([graded.group for graded in groups], batch))
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "generate_batch", traced_sample)
        patch.setattr(training.step, "padded_batch", traced_batch)
        found.run_dir = start(configured(ending, tmp_path_factory.mktemp("traced")), "tiny").run_dir
    return found


def made_of(prompt, sample, drawn):
    """Whether the engine drew a completion in parts, each after the prompt and the parts before it."""
    begun = 0
    while begun < len(sample.token_ids):
        for part in drawn.get((*prompt, *sample.token_ids[:begun]), ()):
            end = begun + len(part.token_ids)
            same = list(sample.token_ids[begun:end]) == part.token_ids
            if part.token_ids and same and list(sample.logprobs[begun:end]) == part.logprobs:
                begun = end
                break
        else:
            return False
    return True


def test_where_all_lengths_are_equal_a_run_is_the_one_without(whole_run, nvfp4_base, tmp_path):
    rows = numbers(start(small_config(nvfp4_base, tmp_path, CARRIED), "tiny").run_dir)
    assert {row["carry_over/kept_tokens"] for row in rows} == {0}
    assert [{k: row[k] for k in row if not k.startswith("carry_over/")} for row in rows] == numbers(whole_run)


def test_the_gradient_is_of_the_tokens_that_were_drawn_with_the_logprobs_of_their_own_policy(traced):
    parts = Counter()
    for groups, batch in traced.steps:
        samples = [(group.prompt.ids, sample) for group in groups for sample in group.samples]
        for row, (prompt, sample) in enumerate(samples):
            assert made_of(prompt, sample, traced.drawn)
            tokens = len(sample.token_ids)
            assert batch.completion_ids_B_T[row, :tokens].tolist() == list(sample.token_ids)
            assert torch.equal(batch.sampling_logprobs_B_T[row, :tokens], torch.tensor(sample.logprobs))
            assert sum(count for _, count in sample.drawn) == tokens
            parts[len(sample.drawn)] += 1
    assert parts[2] > 3  # some were carried over, and some of them twice
    assert parts[3] > 0


def test_each_prompt_of_the_run_is_trained_on_once_and_none_late(traced):
    trained = Counter(group.prompt.row for groups, _ in traced.steps for group in groups)
    assert trained == Counter(row for rollout in range(6) for row in rollout_rows(12, 2, 0, rollout))
    assert all(len(groups) == 2 for groups, _ in traced.steps)
    rows = numbers(traced.run_dir)
    assert 1 < max(row["carry_over/max_age"] for row in rows) <= 3
    assert [row["carry_over/kept_groups"] > 0 for row in rows] == [True] * 5 + [False]


def test_the_metrics_count_what_was_carried(traced):
    before = 0
    for step, (row, (groups, _)) in enumerate(zip(numbers(traced.run_dir), traced.steps, strict=True)):
        samples = [sample for group in groups for sample in group.samples]
        old = sum(count for sample in samples for rollout, count in sample.drawn if rollout < step)
        assert row["carry_over/old_tokens_share"] * sum(len(one.token_ids) for one in samples) == pytest.approx(old)
        assert row["carry_over/continued_share"] == sum(len(one.drawn) > 1 for one in samples) / len(samples)
        assert row["carry_over/kept_tokens"] >= before - old
        before = row["carry_over/kept_tokens"]


@pytest.mark.parametrize(
    ("since", "groups", "rollout", "longest", "expected"),
    [
        ([], 2, 0, 3, 0),
        ([0, 0, 1, 1], 2, 2, 3, 0),  # two groups each until rollouts 3 and 4 are in time
        ([0, 0, 0, 0], 2, 2, 3, 2),  # four by rollout 3: two of them now
        ([0, 0, 0], 2, 2, 3, 1),
        ([0, 1, 1], 2, 1, 1, 1),
        ([0, 0, 0, 0], 2, 3, 3, 2),  # more than a rollout can take, after ranks were changed
    ],
)
def test_the_oldest_groups_end_in_time(since, groups, rollout, longest, expected):
    assert due(since, groups, rollout, longest) == expected


def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path, traced):
    """What step 5 had sampled for later steps is sampled again."""
    run = resume(shutil.copytree(traced.run_dir, tmp_path / "run"), step=4).run_dir
    assert numbers(run) == numbers(traced.run_dir)
    assert same_adapters(run / "adapter", traced.run_dir / "adapter")


def trained_rows(folder):
    """Step -> rows of all ranks."""
    found = {}
    for step, rows in map(json.loads, (folder / "asked.jsonl").read_text().splitlines()):
        found.setdefault(step, []).extend(rows)
    return found


def test_a_run_of_two_ranks_goes_on_with_one(ending, tmp_path, caplog):
    (tmp_path / "reward.py").write_text(ASKED)
    settings = ("rollout.prompts_per_step=3", "data.limit=12", "noise.enabled=false", "rollout.max_new_tokens=20")
    save_config(configured(ending, tmp_path, *settings, steps=4), tmp_path / "recipe.yaml")
    assert ranks.run(2, tmp_path / "recipe.yaml") == [0, 0]
    two = trained_rows(tmp_path)
    everything = Counter(row for rollout in range(4) for row in rollout_rows(12, 3, 0, rollout))
    assert Counter(row for rows in two.values() for row in rows) == everything
    assert {len(rows) for rows in two.values()} == {3}

    run = tmp_path / "run"
    assert len(torch.load(run / "checkpoints" / "step-000002" / FILE, weights_only=True)["taken"]) == 2
    shutil.rmtree(run / "checkpoints" / "step-000004")
    shutil.rmtree(run / "adapter")
    (tmp_path / "asked.jsonl").unlink()
    resume(run)
    one = trained_rows(tmp_path)
    assert sorted(one) == [3, 4]
    assert Counter(row for rows in [*map(two.get, (1, 2)), *one.values()] for row in rows) == everything
    assert "groups that 2 ranks began are dealt to 1" in caplog.text


def test_an_abandoned_step_leaves_what_was_there_before_it(tmp_path):
    config = load_recipe("tiny", [CARRIED, "rollout.prompts_per_step=2", "rollout.group_size=2"])
    prompts = [SimpleNamespace(row=row, ids=[row, 7]) for row in range(8)]
    sampled, loaded = (CarryOver(config, prompts, ALONE) for _ in range(2))
    sampled.pool(0, SAMPLING)
    begun = (Begun((5, 6), (-0.1, -1 / 3), ((0, 2),)), Begun((9,), (-0.5,), ((0, 1),), "stop"))
    after = Kept((BegunGroup(3, 0, begun),), 3)
    sampled.keep(0, [after])
    for step, expected in enumerate((Kept(), after)):
        sampled.save(tmp_path, step)
        loaded.load(tmp_path, step)
        assert loaded.before(step) == (expected,)
    prompts[3].ids = [8]
    loaded.load(tmp_path, 1)  # its completions would follow another prompt
    assert loaded.before(1) == (Kept((BegunGroup(3, 0, (Begun(), Begun())),), 3),)


def test_more_ranks_share_what_fewer_had_begun(tmp_path):
    """Two ranks have ended a rollout of six groups. One has begun five more of its share, and the other two."""
    config = load_recipe("tiny", [CARRIED, "rollout.prompts_per_step=6", "rollout.group_size=2", "data.limit=40"])
    prompts = [SimpleNamespace(row=row, ids=[row]) for row in range(40)]
    order = [rollout_rows(40, 6, 0, rollout) for rollout in range(3)]
    own = [[row for rows in order for row in rows[first : first + 3]] for first in (0, 3)]
    begun = (Begun((5,), (-0.5,), ((0, 1),)), Begun())
    taken = zip(own, (8, 5), strict=True)
    kept = [Kept(tuple(BegunGroup(row, 0, begun) for row in rows[3:count]), count) for rows, count in taken]
    two, three = (CarryOver(config, prompts, Parallel(0, size)) for size in (2, 3))
    two.keep(0, kept)
    two.save(tmp_path, 1)
    three.load(tmp_path, 1)
    dealt = three.before(1)
    assert [(len(one.groups), one.taken) for one in dealt] == [(4, 6)] * 3
    groups = [group for one in dealt for group in one.groups]
    assert sorted(group.row for group in groups) == sorted(order[1] + order[2])
    assert sorted(group.row for group in groups if not group.untouched) == sorted(own[0][3:8] + own[1][3:5])
    assert all(not one.groups[0].untouched for one in dealt)  # the oldest come first


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("rollout.dynamic_sampling.enabled=true", "leaves completions unfinished"),
        ("environment={name: calculator}", "write environment: null, or rollout.carry_over: 0"),
        ("loss.correction.mode=off", "an older policy drew"),
    ],
)
def test_what_cannot_be_combined_is_refused(override, why):
    with pytest.raises(ConfigError, match=why):
        load_recipe("tiny", [CARRIED, "noise.enabled=false", override])
