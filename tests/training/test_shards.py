"""Whole weights that two ranks share out, over gloo: the numbers and the files of one rank."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from qerl.base.errors import ConfigError
from qerl.checkpoint.experts import Decoder
from qerl.config.recipe import save_config
from qerl.plan.trained import shared_out
from tests.helpers.ranks import alone, rows_of, run
from tests.helpers.small_run import numbers, small_config
from training.run_dir.folder import check_shared

QAT = ("qat.mode=weights", "noise.enabled=false", "rollout.prompts_per_step=3", "run.micro_batch_tokens=40")
LINEARS, NORMS = 14, 4


def recipe(base, folder, *overrides, out, steps=3):
    folder.mkdir(exist_ok=True)
    save_config(small_config(base, folder, *QAT, *overrides, steps=steps, out=out), folder / f"{out}.yaml")
    return folder / f"{out}.yaml"


def moments(run_dir, step):
    return torch.load(run_dir / f"checkpoints/step-{step:06d}/optimizer.pt", weights_only=True)


def masters(run_dir, step):
    return load_file(run_dir / f"checkpoints/step-{step:06d}/weights/model.safetensors")


def close(one, other):
    return one == other or one == pytest.approx(other, rel=1e-5, abs=1e-5)


def same_numbers(one, other):
    for row, again in zip(numbers(one), numbers(other), strict=True):
        apart = {name: (row[name], again[name]) for name in row if not close(row[name], again[name])}
        assert not apart, row["step"]


def same_state(one, other, step):
    """Masters and moments of two checkpoints, to the rounding of sums in another order."""
    first, second = masters(one, step), masters(other, step)
    assert list(first) == list(second)
    assert all(torch.allclose(tensor, second[name], rtol=0, atol=1e-6) for name, tensor in first.items())
    first, second = moments(one, step), moments(other, step)
    assert first["param_groups"] == second["param_groups"]
    assert first["state"].keys() == second["state"].keys()
    assert len(first["state"]) == LINEARS + NORMS
    for number, state in first["state"].items():
        for name, tensor in state.items():
            assert torch.allclose(tensor, second["state"][number][name], rtol=1e-3, atol=1e-7), name


def back_to(run_dir, step):
    """Let the run be as it was after that step."""
    for path in (run_dir / "checkpoints").iterdir():
        if path.name > f"step-{step:06d}":
            shutil.rmtree(path)
    shutil.rmtree(run_dir / "model")


def test_two_ranks_compute_and_save_what_one_does_and_either_goes_on_from_the_other_s_files(base, tmp_path):
    given = ("optim.learning_rate=1e-5", "qat.train_norms=true", "run.save_every=1")
    one, two = tmp_path / "one", tmp_path / "two"
    alone(recipe(base, tmp_path, *given, out="one"))
    assert run(2, recipe(base, tmp_path, *given, out="two"), tmp_path) == [0, 0]
    same_numbers(one, two)
    same_state(one, two, 3)
    assert all(row["time/reduce_s"] >= 0 for row in rows_of(two))
    for size, step in ((1, 1), (2, 2)):  # the latter was saved by one rank
        back_to(two, step)
        assert run(size, tmp_path / "two.yaml", resumed=two) == [0] * size
        same_numbers(one, two)
        same_state(one, two, 3)


def test_masters_in_bfloat16_get_the_same_random_bits(base, tmp_path):
    given = ("optim.learning_rate=1e-6", "qat.masters=bfloat16", "optim.weight_decay=0", "run.save_every=2")
    alone(recipe(base, tmp_path, *given, out="one", steps=2))
    assert run(2, recipe(base, tmp_path, *given, out="two", steps=2)) == [0, 0]
    same_numbers(tmp_path / "one", tmp_path / "two")
    begun = {name: tensor for file in base.glob("*.safetensors") for name, tensor in load_file(file).items()}
    one, two = (masters(tmp_path / name, 2) for name in ("one", "two"))
    moved = sum((one[name] != begun[name].bfloat16()).sum() for name in one)
    apart = sum((one[name] != two[name]).sum() for name in one)
    assert moved > 100
    assert apart < 0.3 * moved  # other random bits would put about twice as many apart as have moved


def test_whole_layers_are_dealt_evenly():
    linears = [name for name in Decoder(28).linears() if "k_proj" not in name]
    dealt = shared_out(linears, 8)
    assert [len(layers) for layers in dealt] == [3, 4, 3, 4, 3, 4, 3, 4]
    assert sorted(name for layers in dealt for layer in layers for name in layer) == sorted(linears)
    assert all(len({name.split(".")[2] for name in layer}) == 1 for layers in dealt for layer in layers)
    assert [len(layers) for layers in shared_out(linears[:12], 3)] == [0, 1, 1]


def test_a_folder_that_not_all_ranks_see_is_refused(tmp_path):
    ranks = SimpleNamespace(size=2, first=True, broadcast=lambda value: value, barrier=lambda: None)
    ranks.gather = lambda seen: [seen, False]
    with pytest.raises(ConfigError, match=r"rank 1 does not see .*/run, where rank 0 writes .* give an --out on a"):
        check_shared(tmp_path / "run", ranks)
    ranks.gather = lambda seen: [seen, seen]
    check_shared(tmp_path / "run", ranks)
    assert not list((tmp_path / "run").iterdir())
