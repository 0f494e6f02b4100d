"""A run with masters in bfloat16: they move by small steps, the engine holds their bytes, and a resumed run has the
same bits."""

import pytest
import torch
from safetensors.torch import load_file

from qerl.checkpoint.folder import WEIGHTS
from qerl.config.recipe import load_recipe
from qerl.plan.engine_memory import CARDS
from qerl.plan.sizes import KNOWN, sizes_of
from tests.helpers.small_run import numbers, small_config
from training.preflight.plan import plan, settled_for
from training.run import resume, start
from training.run_dir.checkpoint import checkpoint_path

pytestmark = pytest.mark.usefixtures("one_thread")
QAT = ("qat.mode=weights", "noise.enabled=false", "optim.learning_rate=1e-6", "optim.weight_decay=0")


def masters(run, step):
    folder = checkpoint_path(run, step) / WEIGHTS
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_masters_in_bfloat16_move_by_small_steps_and_resume_to_the_same_bits(base, tmp_path):
    config = small_config(base, tmp_path, *QAT, "qat.masters=bfloat16", "run.save_every=1", steps=2)
    whole = start(config, "tiny").run_dir
    early, late = masters(whole, 1), masters(whole, 2)
    assert {tensor.dtype for tensor in late.values()} == {torch.bfloat16}
    moved = [(late[name] != early[name]).float().mean().item() for name in late]
    assert all(0 < share < 0.2 for share in moved)  # by steps far below the last place: few of them, and each is whole
    expected = numbers(whole)
    resumed = resume(whole, step=1).run_dir
    assert numbers(resumed) == expected
    again = masters(resumed, 2)
    assert all(torch.equal(again[name], tensor) for name, tensor in late.items())


@pytest.mark.parametrize(
    ("recipe", "size", "card", "dtype"),
    [
        ("qat_3b", "qwen2.5-3b", "h200", "float32"),
        ("qat_3b", "qwen2.5-3b", "4090", "bfloat16"),
        ("qat_7b", "qwen2.5-7b", "h200", "float32"),
        ("qat_7b", "qwen2.5-7b", "h100", "bfloat16"),  # it holds float32, with micro-batches of 2048 tokens
    ],
)
def test_auto_takes_float32_where_the_card_holds_it_and_training_is_not_slow(recipe, size, card, dtype):
    config, sizes = load_recipe(recipe, ["qat.masters=auto"]), sizes_of(KNOWN[size], size)
    settled = settled_for(config, sizes, CARDS[card])
    assert settled.qat.masters == dtype
    made = plan(config, sizes, CARDS[card])
    assert made.memory == plan(settled, sizes, CARDS[card]).memory
    assert not made.problems
    assert f"masters ({dtype})" in made.memory["training"]
    assert settled_for(settled, sizes, CARDS["h200"]) == settled
