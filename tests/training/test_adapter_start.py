"""Runs whose adapter has a start: which policy they begin with, what they keep, how they go on, and what is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.base.errors import CheckpointError, ConfigError, EngineError
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.base_start import (
    ABOUT,
    LORA_A,
    LORA_B,
    START,
    BaseStart,
    base_digest,
    digest_of,
    read_start,
    start_of_adapter,
    write_start,
)
from qerl.checkpoint.resolve import resolve_model
from qerl.engine.open import open_engine, open_model
from qerl.engine.options import EngineOptions
from qerl.engine.update import WeightsUpdate
from qerl.plan.trained import DEFAULT_START
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.small_run import numbers, same_adapters, small_config
from tests.helpers.starts import decoded_weights, give_start_
from training.policy.policy import build_policy
from training.preflight.start import settle_start, start_to_resume
from training.run import resume, start

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]
ANSWERS = [[9, 10, 11, 12], [5, 6]]
OPTIONS = EngineOptions(engine="transformers")
KINDS = ("frozen", "trained")
RANK = ("adapter.start_rank=8", "adapter.rank=12", "adapter.alpha=24", "noise.enabled=false")


def run_of(base, folder, kind):
    settings = (*RANK, f"adapter.start={kind}", "run.save_every=1")
    return start(small_config(base, folder, *settings, steps=3), "tiny").run_dir


@pytest.fixture(scope="module")
def runs(started_base, tmp_path_factory):
    return {kind: run_of(started_base, tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def dense_scores(folder, terms):
    """Logprobs by a 16-bit engine whose weights are the decoded ones plus `terms` (by module), in float32."""
    engine = open_engine(str(folder), "nvfp4", OPTIONS)
    model, linears = engine.policy_model(), decoded_weights(folder)
    for name, weight in linears.items():
        parent, _, leaf = name.rpartition(".")
        old = model.get_submodule(name)
        dense = torch.nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)
        dense.weight = torch.nn.Parameter(weight + terms.get(name, 0.0), requires_grad=False)
        dense.bias = old.bias
        setattr(model.get_submodule(parent), leaf, dense)
    return engine.score(PROMPTS, ANSWERS)


def products(tensors, scaling=1.0):
    names = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    return {n: scaling * tensors[n + LORA_B].float() @ tensors[n + LORA_A].float() for n in names}


def flat(scores):
    return torch.tensor([value for row in scores for value in row])


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_run_begins_with_the_base_and_its_start(started_base, tmp_path, kind):
    config = small_config(started_base, tmp_path, *RANK, f"adapter.start={kind}")
    config, base = settle_start(config, resolve_model(str(started_base)))
    assert (config.adapter.start, config.adapter.start_rank, base.start.rank) == (kind, 8, 8)
    engine = open_engine(base.base, base.format, replace(OPTIONS, start=base.start if kind == "frozen" else None))
    policy = build_policy(engine, base, config.adapter, seed=0)
    begun = flat(engine.score(PROMPTS, ANSWERS))
    right = dense_scores(started_base, products(read_start(base.start)))
    torch.testing.assert_close(begun, flat(right), atol=2e-5, rtol=0)
    rounded = flat(open_engine(base.base, base.format, OPTIONS).score(PROMPTS, ANSWERS))
    assert (begun - rounded).abs().max() > 1e-3  # the start acts
    if kind == "frozen":  # TRL gives a trained start its reference when the trainer is built (see the test of the KL)
        with policy.reference():
            torch.testing.assert_close(flat(engine.score(PROMPTS, ANSWERS)), begun, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_leaves_is_opened_as_it_was_trained(started_base, kind, runs):
    run = runs[kind]
    assert not any(tensor.isnan().any() for tensor in read_adapter(run / "adapter")[0].values())
    kept = read_start(BaseStart(run / START, 8))
    assert digest_of(kept) == digest_of(read_start(BaseStart(started_base / START, 8)))
    tensors, scaling = read_adapter(run / "adapter")
    terms = [products(tensors, scaling)] + ([products(kept)] if kind == "frozen" else [])
    right = flat(dense_scores(started_base, {name: sum(term[name] for term in terms) for name in terms[0]}))
    found = [resolve_model(str(place)) for place in (run, run / "adapter")]
    for ref in (*found, resolve_model(str(started_base), adapter=str(run / "checkpoints" / "step-000003"))):
        assert (ref.start is not None) == (kind == "frozen")
        assert start_of_adapter(ref.adapter).kind == kind
        torch.testing.assert_close(flat(open_model(ref, OPTIONS).score(PROMPTS, ANSWERS)), right, atol=2e-5, rtol=0)


def test_a_start_is_the_runs_own_whatever_the_bases_folder_has(runs, base, started_base, tmp_path):
    """Another start in the base's folder, made later, is not taken for it; evaluation can leave that one out."""
    frozen, trained = (runs[kind] for kind in KINDS)
    moved = shutil.copytree(started_base, tmp_path / "other", ignore=shutil.ignore_patterns(START))
    assert resolve_model(str(moved), adapter=str(frozen)).start.folder == frozen / START
    alone = shutil.copytree(frozen / "adapter", tmp_path / "alone")
    assert resolve_model(str(started_base), adapter=str(alone)).start.folder == started_base / START
    assert resolve_model(str(base), adapter=str(frozen)).start is None  # W + s B A is right as it is
    assert resolve_model(str(started_base)).start.rank == 16
    assert resolve_model(str(started_base), start="none").start is None
    for model, given, said in (
        (moved, {"adapter": str(alone)}, "was trained with a start of rank 8"),
        (base, {"adapter": str(trained)}, "counts twice"),
        (frozen, {"start": "none"}, "was trained beside a start"),
    ):
        with pytest.raises(CheckpointError, match=said):
            resolve_model(str(model), **given)


def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(started_base, runs, tmp_path):
    base = shutil.copytree(started_base, tmp_path / "base")
    run_of(base, tmp_path, "frozen")
    shutil.rmtree(base / START)  # the run has its own
    result = resume(tmp_path / "run", step=2)
    assert numbers(result.run_dir) == numbers(runs["frozen"])
    assert same_adapters(result.adapter, runs["frozen"] / "adapter")


def test_a_folder_that_a_kill_left_before_the_run_began_is_taken_again(started_base, runs, tmp_path):
    left = tmp_path / "run"
    for name in (START, f".{START}.partial"):
        (left / name).mkdir(parents=True)
    (left / START / ABOUT).write_text("of another base")
    run = run_of(started_base, tmp_path, "frozen")
    assert run == left
    assert numbers(run) == numbers(runs["frozen"])
    assert (run / START / ABOUT).read_text() == (runs["frozen"] / START / ABOUT).read_text()


def test_the_kl_of_a_resumed_run_is_from_where_it_began(started_base, tmp_path):
    given = (*RANK, "adapter.start=trained", "loss.kl_coef=0.1", "run.save_every=1")
    run = start(small_config(started_base, tmp_path, *given, steps=2), "tiny").run_dir
    whole = numbers(run)
    assert whole[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert numbers(resume(run, step=1).run_dir) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_an_adapter_with_its_start(kind, runs, tmp_path):
    first = runs[kind]
    own = ("adapter.start=auto", "adapter.rank=12", "adapter.alpha=24", "noise.enabled=false")
    config = small_config(first, tmp_path, *own, steps=1)
    config, base = settle_start(config, resolve_model(str(first)))
    assert (config.adapter.start, base.start.folder) == (kind, first / START)
    run = start(config, "tiny").run_dir
    assert digest_of(read_start(BaseStart(run / START, 8))) == digest_of(read_start(BaseStart(first / START, 8)))
    engine = open_engine(base.base, base.format, replace(OPTIONS, start=base.start if kind == "frozen" else None))
    build_policy(engine, base, config.adapter, seed=0)
    before = flat(open_model(resolve_model(str(first)), OPTIONS).score(PROMPTS, ANSWERS))
    torch.testing.assert_close(flat(engine.score(PROMPTS, ANSWERS)), before, atol=2e-5, rtol=0)
    other = "trained" if kind == "frozen" else "none"
    with pytest.raises(ConfigError, match=f"was trained with adapter.start: {kind}"):
        settle_start(config.model_copy(update={"adapter": config.adapter.model_copy(update={"start": other})}), base)


def test_auto_takes_the_start_that_is_there(started_base, base, tmp_path, caplog):
    def settled(folder, *overrides):
        config = small_config(folder, tmp_path, "adapter.start=auto", *overrides)
        return settle_start(config, resolve_model(str(folder), "auto"))

    assert settled(started_base)[0].adapter.start == DEFAULT_START
    config = small_config(started_base, tmp_path, "adapter.start=auto")  # of a run from before there were starts
    config, ref = start_to_resume(config, resolve_model(str(started_base)), tmp_path)
    assert (config.adapter.start, ref.start) == ("none", None)
    bare = shutil.copytree(started_base, tmp_path / "bare", ignore=shutil.ignore_patterns(START))
    caplog.clear()
    config, ref = settled(bare)
    assert (config.adapter.start, ref.start) == ("none", None)
    assert "--start-of" in caplog.text
    caplog.clear()
    assert settled(base, "model.format=bf16")[0].adapter.start == "none"
    assert caplog.text == ""
    for said, *given in (
        (r"needs none: write adapter\.start: none", base, "model.format=bf16", "adapter.start=frozen"),
        ("--start-of", bare, "adapter.start=trained"),
        ("more than the rank 16", started_base, "adapter.start=frozen", "adapter.start_rank=17"),
        (r"more than adapter\.rank 4", started_base, "adapter.start=trained", "adapter.start_rank=8", "adapter.rank=4"),
    ):
        with pytest.raises(ConfigError, match=said):
            settled(*given)


def test_a_rate_that_is_far_too_high_for_a_trained_start_is_said(started_base, tmp_path, caplog):
    folder = shutil.copytree(started_base, tmp_path / "base")
    about = json.loads((folder / START / ABOUT).read_text())
    (folder / START / ABOUT).write_text(json.dumps({**about, "rate_ratio": 3.6}))
    for kind, rate, said in (("trained", "2e-4", 0), ("frozen", "1e-3", 0), ("trained", "1e-3", 1)):
        overrides = (*RANK, f"adapter.start={kind}", f"optim.learning_rate={rate}")
        settle_start(small_config(folder, tmp_path, *overrides), resolve_model(str(folder)))
        assert caplog.text.count("collapsed") == caplog.text.count("write optim.learning_rate: 0.0003 or less") == said


def test_a_start_of_other_weights_or_with_a_nan_is_refused(started_base, tmp_path):
    def changed(name, pattern, change):
        folder = shutil.copytree(started_base, tmp_path / name)
        file = next(folder.glob(pattern))
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return folder

    other = changed("other", "*.safetensors", lambda t: next(v for v in t.values() if v.dtype == torch.uint8).add_(1))
    with pytest.raises(CheckpointError, match="made for other weights"):
        settle_start(small_config(other, tmp_path, "adapter.start=frozen"), resolve_model(str(other)))
    broken = changed("broken", f"{START}/adapter_model.safetensors", lambda t: next(iter(t.values())).fill_(torch.nan))
    with pytest.raises(CheckpointError, match="NaN"):
        open_model(resolve_model(str(broken)), OPTIONS)


def test_whole_weights_are_not_packed_beside_a_start(started_base):
    engine = open_model(resolve_model(str(started_base)), OPTIONS)
    weights = decoded_weights(started_base)
    with pytest.raises(EngineError, match="cannot be packed beside a start"):
        engine.sync(WeightsUpdate(weights))


def test_linears_that_stayed_in_16_bits_have_no_start(base, tmp_path):
    folder = tmp_path / "mixed"
    quantize_checkpoint(str(base), folder, QuantizeOptions(method="rtn", ignore=("re:.*layers.0.self_attn.*",)))
    shutil.rmtree(folder / START, ignore_errors=True)
    give_start_(folder, base)
    tensors = read_start(BaseStart(folder / START, 16))
    for name in [n.replace("layers.1", "layers.0") for n in tensors if "layers.1.self_attn" in n]:
        tensors[name] = torch.zeros_like(tensors[name.replace("layers.0", "layers.1")])
    write_start(folder / START, tensors, {"base_digest": base_digest(folder)})
    model = open_model(resolve_model(str(folder)), OPTIONS).policy_model()
    started = {name for name, module in model.named_modules() if getattr(module, "start", None) is not None}
    assert started == set(decoded_weights(folder))
