"""Runs whose adapter has a start: which policy they begin with, what they keep, how they go on, and what is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

import training.trainer
from qerl.base.errors import CheckpointError, ConfigError, EngineError
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.base_start import ABOUT, LORA_A, LORA_B, START, BaseStart, digest_of, read_start, start_of_adapter
from qerl.checkpoint.resolve import resolve_model
from qerl.engine.open import open_engine, open_model
from qerl.engine.options import EngineOptions
from qerl.engine.update import WeightsUpdate
from qerl.plan.trained import DEFAULT_START
from tests.helpers.killed import killed_in
from tests.helpers.small_run import numbers, same_adapters, small_config
from tests.helpers.starts import decoded_weights, give_start_
from training.policy.build import build_policy
from training.preflight.start import settle_start, start_to_resume
from training.run import resume, start
from training.run_dir.log import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]
ANSWERS = [[9, 10, 11, 12], [5, 6]]
OPTIONS = EngineOptions(engine="transformers")
RANK = ("adapter.start_rank=8", "adapter.rank=12", "adapter.alpha=24", "noise.enabled=false")


@pytest.fixture(scope="module")
def started_base(base, nvfp4_base, tmp_path_factory):
    """The small NVFP4 base with a start of rank 16."""
    folder = tmp_path_factory.mktemp("started") / "qwen3-NVFP4A16"
    shutil.copytree(nvfp4_base, folder)
    shutil.rmtree(folder / START, ignore_errors=True)
    give_start_(folder, base)
    return folder


@pytest.fixture(scope="module")
def frozen_run(started_base, tmp_path_factory):
    config = small_config(started_base, tmp_path_factory.mktemp("frozen"), *RANK, "adapter.start=frozen", steps=4)
    return start(config, "tiny").run_dir


@pytest.fixture(scope="module")
def trained_run(started_base, tmp_path_factory):
    config = small_config(started_base, tmp_path_factory.mktemp("trained"), *RANK, "adapter.start=trained", steps=4)
    return start(config, "tiny").run_dir


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


def added(*terms):
    return {name: sum(term[name] for term in terms) for name in terms[0]}


def flat(scores):
    return torch.tensor([value for row in scores for value in row])


@pytest.mark.parametrize("kind", ["frozen", "trained"])
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


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_what_a_run_leaves_is_opened_as_it_was_trained(started_base, kind, request):
    run = request.getfixturevalue(f"{kind}_run")
    assert not any(tensor.isnan().any() for tensor in read_adapter(run / "adapter")[0].values())
    kept = read_start(BaseStart(run / START, 8))
    assert digest_of(kept) == digest_of(read_start(BaseStart(started_base / START, 8)))
    tensors, scaling = read_adapter(run / "adapter")
    terms = [products(tensors, scaling)] + ([products(kept)] if kind == "frozen" else [])
    right = flat(dense_scores(started_base, added(*terms)))
    places = (run, run / "adapter", run / "checkpoints" / "step-000004")
    for place in places:
        ref = (
            resolve_model(str(place), adapter=None)
            if place != places[2]
            else resolve_model(str(started_base), adapter=str(place))
        )
        assert (ref.start is not None) == (kind == "frozen")
        assert start_of_adapter(ref.adapter).kind == kind
        torch.testing.assert_close(flat(open_model(ref, OPTIONS).score(PROMPTS, ANSWERS)), right, atol=2e-5, rtol=0)


def test_a_run_with_a_start_does_not_depend_on_the_bases_folder(frozen_run, started_base, tmp_path):
    """Another start in the base's folder, made later, is not taken for the run's own."""
    moved = tmp_path / "other"
    shutil.copytree(started_base, moved)
    shutil.rmtree(moved / START)
    assert resolve_model(str(moved), adapter=str(frozen_run)).start.folder == frozen_run / START
    alone = tmp_path / "alone"
    shutil.copytree(frozen_run / "adapter", alone)
    if start_of_adapter(alone) is None:
        pytest.fail("the adapter's own folder does not say which start it has")
    assert resolve_model(str(started_base), adapter=str(alone)).start.folder == started_base / START
    with pytest.raises(CheckpointError, match="was trained with a start of rank 8"):
        resolve_model(str(moved), adapter=str(alone))


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_a_killed_run_resumes_to_the_same_bits(started_base, kind, request, tmp_path):
    whole = request.getfixturevalue(f"{kind}_run")
    base = tmp_path / "base"
    shutil.copytree(started_base, base)
    config = small_config(base, tmp_path, *RANK, f"adapter.start={kind}", "loss.kl_coef=0.0", steps=4)
    with killed_in(training.trainer.QerlTrainer, "loss_of", 6):
        start(config, "tiny")
    shutil.rmtree(base / START)  # the run has its own
    result = resume(tmp_path / "run")
    assert numbers(result.run_dir) == numbers(whole)
    assert same_adapters(result.adapter, whole / "adapter")


def test_the_kl_of_a_resumed_run_is_from_where_it_began(started_base, tmp_path):
    config = small_config(started_base, tmp_path, *RANK, "adapter.start=trained", "loss.kl_coef=0.1", steps=4)
    whole = start(config, "tiny").run_dir
    assert read_metrics(whole)[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    again = small_config(started_base, tmp_path, *RANK, "adapter.start=trained", "loss.kl_coef=0.1", steps=4, out="b")
    with killed_in(training.trainer.QerlTrainer, "loss_of", 6):
        start(again, "tiny")
    assert numbers(resume(tmp_path / "b").run_dir) == numbers(whole)


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_a_run_goes_on_from_an_adapter_with_its_start(kind, request, tmp_path, started_base):
    first = request.getfixturevalue(f"{kind}_run")
    own = ("adapter.start=auto", "adapter.rank=12", "adapter.alpha=24", "noise.enabled=false")
    config = small_config(first, tmp_path, *own, steps=2)
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


def test_auto_takes_the_start_that_is_there(started_base, nvfp4_base, base, tmp_path, caplog):
    def settled(folder, *overrides):
        config = small_config(folder, tmp_path, "adapter.start=auto", *overrides)
        return settle_start(config, resolve_model(str(folder), "auto"))

    assert settled(started_base)[0].adapter.start == DEFAULT_START
    bare = tmp_path / "bare"
    shutil.copytree(started_base, bare)
    shutil.rmtree(bare / START)
    caplog.clear()
    config, ref = settled(bare)
    assert (config.adapter.start, ref.start) == ("none", None)
    assert "--start-of" in caplog.text
    caplog.clear()
    assert settled(base, "model.format=bf16")[0].adapter.start == "none"
    assert caplog.text == ""
    with pytest.raises(ConfigError, match=r"needs none: write adapter\.start: none"):
        settled(base, "model.format=bf16", "adapter.start=frozen")
    with pytest.raises(ConfigError, match="--start-of"):
        settled(bare, "adapter.start=trained")
    with pytest.raises(ConfigError, match="more than the rank 16"):
        settled(started_base, "adapter.start=frozen", "adapter.start_rank=17")
    with pytest.raises(ConfigError, match=r"more than adapter\.rank 4"):
        settled(started_base, "adapter.start=trained", "adapter.start_rank=8", "adapter.rank=4")


@pytest.mark.parametrize(("rate", "warned"), [("2e-4", False), ("1e-3", True)])
def test_a_rate_that_is_far_too_high_for_a_trained_start_is_said(started_base, tmp_path, caplog, rate, warned):
    folder = tmp_path / "base"
    shutil.copytree(started_base, folder)
    about = json.loads((folder / START / ABOUT).read_text())
    (folder / START / ABOUT).write_text(json.dumps({**about, "rate_ratio": 3.6}))
    for kind in ("trained", "frozen"):
        caplog.clear()
        overrides = (*RANK, f"adapter.start={kind}", f"optim.learning_rate={rate}")
        settle_start(small_config(folder, tmp_path, *overrides), resolve_model(str(folder)))
        assert ("collapsed" in caplog.text) == (warned and kind == "trained")
        assert "write optim.learning_rate: 0.0003 or less" in caplog.text or not (warned and kind == "trained")


def test_a_start_of_other_weights_is_refused(started_base, nvfp4_base, tmp_path):
    from safetensors.torch import load_file, save_file

    changed = tmp_path / "changed"
    shutil.copytree(started_base, changed)
    file = next(changed.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.uint8)
    tensors[name] = tensors[name] ^ 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="made for other weights"):
        settle_start(small_config(changed, tmp_path, "adapter.start=frozen"), resolve_model(str(changed)))


def test_a_start_with_a_nan_is_refused(started_base, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(started_base, broken)
    file = broken / START / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="NaN"):
        open_model(resolve_model(str(broken)), OPTIONS)


def test_a_run_from_before_starts_has_none(started_base, tmp_path):
    """Its config.yaml does not know the key, and a start that its base got since does not act."""
    config = small_config(started_base, tmp_path, "adapter.start=auto")
    config, ref = start_to_resume(config, resolve_model(str(started_base)), tmp_path)
    assert (config.adapter.start, ref.start) == ("none", None)


def test_whole_weights_are_not_packed_beside_a_start(started_base):
    engine = open_model(resolve_model(str(started_base)), OPTIONS)
    weights = decoded_weights(started_base)
    with pytest.raises(EngineError, match="cannot be packed beside a start"):
        engine.sync(WeightsUpdate(weights))


def test_a_trained_start_is_not_opened_on_the_16_bit_model(trained_run, frozen_run, base):
    with pytest.raises(CheckpointError, match="counts twice"):
        resolve_model(str(base), adapter=str(trained_run))
    assert resolve_model(str(base), adapter=str(frozen_run)).start is None  # W + s B A is right as it is


def test_linears_that_stayed_in_16_bits_have_no_start(base, tmp_path):
    from quantize.options import QuantizeOptions
    from quantize.run import quantize_checkpoint

    folder = tmp_path / "mixed"
    quantize_checkpoint(str(base), folder, QuantizeOptions(method="rtn", ignore=("re:.*layers.0.self_attn.*",)))
    shutil.rmtree(folder / START, ignore_errors=True)
    give_start_(folder, base)
    from qerl.checkpoint.base_start import base_digest, write_start

    tensors = read_start(BaseStart(folder / START, 16))
    for name in [n.replace("layers.1", "layers.0") for n in tensors if "layers.1.self_attn" in n]:
        tensors[name] = torch.zeros_like(tensors[name.replace("layers.0", "layers.1")])
    write_start(folder / START, tensors, {"base_digest": base_digest(folder)})
    model = open_model(resolve_model(str(folder)), OPTIONS).policy_model()
    started = {name for name, module in model.named_modules() if getattr(module, "start", None) is not None}
    assert started == set(decoded_weights(folder))


def test_a_base_that_rounds_its_inputs_has_a_start_too(base, tmp_path):
    from quantize.options import QuantizeOptions
    from quantize.run import quantize_checkpoint

    folder = tmp_path / "w4a4"
    quantize_checkpoint(str(base), folder, QuantizeOptions(method="rtn", activations="dynamic", start_rank=0))
    plain = flat(open_model(resolve_model(str(folder)), OPTIONS).score(PROMPTS, ANSWERS))
    give_start_(folder, base)
    assert (flat(open_model(resolve_model(str(folder)), OPTIONS).score(PROMPTS, ANSWERS)) - plain).abs().max() > 1e-3


def test_evaluation_can_leave_the_start_out(started_base, frozen_run):
    assert resolve_model(str(started_base)).start.rank == 16
    assert resolve_model(str(started_base), start="none").start is None
    with pytest.raises(CheckpointError, match="was trained beside a start"):
        resolve_model(str(frozen_run), start="none")
