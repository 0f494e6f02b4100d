"""The transformers engine: logprobs of the drawn tokens, seeds, stopping, and the effects of adapter and noise."""

import json
import shutil

import pytest
import torch

from qerl.base.errors import ConfigError, EngineError
from qerl.checkpoint.adapter import adapter_scaling, adapter_tensors, attach_lora, save_adapter
from qerl.checkpoint.adapter_file import read_adapter
from qerl.engine.interface import Request, SamplingParams, Source, request_seed
from qerl.engine.open import choose_engine, open_engine
from qerl.engine.options import EngineOptions
from qerl.engine.update import AdapterUpdate, deliver
from qerl.model.norms import block_norms
from tests.helpers.request_sources import Supplied

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [5, 6, 7]]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=12, temperature=0.8)


@pytest.fixture(scope="module")
def shared(nvfp4_base):
    return open_engine(str(nvfp4_base), "nvfp4", EngineOptions(engine="transformers"))


@pytest.fixture
def opened(nvfp4_base):
    return lambda **more: open_engine(str(nvfp4_base), "nvfp4", EngineOptions(engine="transformers", **more))


@pytest.fixture
def engine(opened):
    return opened()


def tokens(completions):
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampling_logprobs_are_those_of_the_scored_tokens(shared, temperature):
    completions = shared.generate(PROMPTS, SamplingParams(12, temperature), seed=1)
    scores = shared.score(PROMPTS, tokens(completions), temperature)
    for completion, score in zip(completions, scores, strict=True):
        assert len(completion.logprobs) == len(completion.token_ids) == len(score)
        assert completion.logprobs == pytest.approx(score, abs=2e-4)


def test_filtered_logprobs_are_renormalized(shared):
    """With top_k 1 each token has probability 1 in the distribution that it is drawn from."""
    completions = shared.generate(PROMPTS, SamplingParams(8, 1.0, top_k=1), seed=1)
    assert all(value == pytest.approx(0.0, abs=1e-6) for c in completions for value in c.logprobs)
    assert tokens(completions) == tokens(shared.generate(PROMPTS, SamplingParams(8, 0.0)))


def test_sampling_follows_the_models_distribution(shared):
    """2,000 draws of one token are compared with the scored probabilities of the five likeliest tokens."""
    draws = [c.token_ids[0] for c in shared.generate([PROMPTS[0]] * 2000, SamplingParams(1, 1.0), seed=3)]
    for token in sorted(set(draws), key=draws.count)[-5:]:
        (score,) = shared.score([PROMPTS[0]], [[token]])
        p = torch.tensor(score[0]).exp().item()
        assert abs(draws.count(token) / 2000 - p) < 4 * (p * (1 - p) / 2000) ** 0.5


def test_the_seed_determines_the_samples(shared):
    first, again, other = (shared.generate(PROMPTS, SAMPLED, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert tokens(first) != tokens(other)
    state = torch.get_rng_state()
    shared.generate(PROMPTS, SAMPLED, seed=7)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random state is unchanged
    assert tokens(first)[0] != tokens(first)[3]  # the same prompt a second time gets another sample


def test_processes_that_share_a_batch_do_not_draw_the_same(shared):
    """Both halves have the same prompts and the seed of the batch; only their places in the batch differ."""
    whole = shared.generate(PROMPTS, SAMPLED, seed=7)
    first, second, again = (shared.generate(PROMPTS, SAMPLED, seed=7, first_index=index) for index in (0, 4, 4))
    assert first == whole
    assert tokens(second) != tokens(first)
    assert second == again


def test_greedy_does_not_depend_on_the_batch(shared, opened):
    whole = tokens(shared.generate(PROMPTS, GREEDY))
    assert whole == [tokens(shared.generate([prompt], GREEDY))[0] for prompt in PROMPTS]
    assert tokens(opened(batch_size=2).generate(PROMPTS, GREEDY)) == whole


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_give_one_error(engine, sampling):
    with torch.no_grad():
        next(iter(block_norms(engine.policy_model()).values())).weight[3] = float("nan")
    with pytest.raises(EngineError, match="logit that is not finite"):
        engine.generate(PROMPTS, sampling, seed=0)


def test_completions_are_reported_when_their_batch_has_ended(opened, monkeypatch):
    """The order is that in which they end: 9, 3 and 5 tokens in the first batch, then 4."""
    engine = opened(batch_size=3)
    each = [SamplingParams(length, 0.0) for length in (9, 3, 5, 4)]
    told, batches = [], []
    model = engine.policy_model()
    sample = model.generate
    monkeypatch.setattr(model, "generate", lambda **given: batches.append(1) or sample(**given))
    done = engine.generate(PROMPTS, each, seed=1, finished=lambda *one: told.append((len(batches), *one)))
    assert [len(completion.token_ids) for completion in done] == [9, 3, 5, 4]
    assert told == [(1, 1, done[1]), (1, 2, done[2]), (1, 0, done[0]), (2, 3, done[3])]
    assert engine.generate(PROMPTS, each, seed=1) == done


def test_after_an_error_in_the_callback_the_engine_works_as_before(engine):
    def refuse(index, completion):
        raise KeyboardInterrupt(index)

    engine.policy_model().train()
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt, match="0"):
        engine.generate(PROMPTS[:1], SAMPLED, seed=7, finished=refuse)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert engine.policy_model().training
    assert len(engine.generate(PROMPTS, GREEDY)) == len(PROMPTS)


class Turns(Source):
    """Two turns of each prompt: the second one follows the first and a token."""

    def __init__(self):
        self.waiting, self.done = [(index, prompt, 0) for index, prompt in enumerate(PROMPTS)], []

    def begin(self, wait, together):
        assert wait == bool(self.waiting or len(self.done) == 2 * len(PROMPTS))
        given, self.waiting = self.waiting, []
        return [Request(index, prompt, SAMPLED, 10 * turn + index, turn) for index, prompt, turn in given]

    def finished(self, index, completion):
        self.done.append((index, completion))
        if len(self.done) <= len(PROMPTS):
            self.waiting.append((index, [*PROMPTS[index], *completion.token_ids, 5], 1))


def test_each_turn_of_conversations_is_drawn_as_a_batch_of_its_own(shared):
    turns = Turns()
    assert shared.run(turns, seed=7) == {}
    first, second = dict(turns.done[: len(PROMPTS)]), turns.done[len(PROMPTS) :]
    assert [first[index] for index in range(len(PROMPTS))] == shared.generate(PROMPTS, SAMPLED, seed=7)
    order = [index for index, _ in turns.done[: len(PROMPTS)]]
    prompts = [[*PROMPTS[index], *first[index].token_ids, 5] for index in order]
    again = shared.generate(prompts, SAMPLED, seed=request_seed(7, 1))
    assert dict(second) == dict(zip(order, again, strict=True))


def test_a_completion_goes_on_while_others_end_and_begin_and_is_left_unfinished_at_the_end(shared):
    asked = [Request(row, PROMPTS[row], SamplingParams(tokens), row) for row, tokens in enumerate((40, 3, 5, 9))]
    source = Supplied(2, asked)
    left = shared.run(source, seed=3)
    assert source.told == [1, 2]
    assert {index: len(one.token_ids) for index, one in source.done.items()} == {1: 3, 2: 5}
    assert {index: (len(one.token_ids), one.finish_reason) for index, one in left.items()} == {0: (8, "unfinished")}
    drawn = source.done | left
    scores = shared.score([PROMPTS[index] for index in drawn], [one.token_ids for one in drawn.values()])
    for one, expected in zip(drawn.values(), scores, strict=True):
        assert one.logprobs == pytest.approx(expected, abs=1e-4)


def test_each_request_keeps_its_own_limit_and_temperature(shared):
    """Greedy rows, stop tokens and filters too: each row is the same as alone, with logprobs at its own temperature."""
    free = tokens(shared.generate(PROMPTS, GREEDY))
    stop = free[2][1]
    each = [
        SamplingParams(3, 0.0),
        SamplingParams(9, 0.7),
        SamplingParams(12, 0.0, stop_token_ids=(stop,)),
        SamplingParams(5, 0.0),
    ]
    done = shared.generate(PROMPTS, each, seed=1)
    assert [tokens(done)[row] for row in (0, 2, 3)] == [free[0][:3], free[2][: free[2].index(stop) + 1], free[3][:5]]
    assert [completion.finish_reason for completion in done] == ["length", "length", "stop", "length"]
    assert [len(completion.logprobs) for completion in done] == [len(row) for row in tokens(done)]
    assert len(done[1].token_ids) == 9
    (score,) = shared.score([PROMPTS[1]], [done[1].token_ids], 0.7)
    assert done[1].logprobs == pytest.approx(score, abs=2e-4)


@pytest.mark.parametrize("temperature", [1e-6, 0.0099])
def test_a_temperature_that_vllm_would_raise_is_refused(temperature):
    with pytest.raises(ConfigError, match=r"below 0\.01.* write 0 \(greedy\)"):
        SamplingParams(8, temperature)
    assert [SamplingParams(8, kept).temperature for kept in (0.0, 0.01)] == [0.0, 0.01]


def test_whether_a_request_fits_the_context_depends_on_its_own_limit(shared):
    """A short prompt may fill the rest of its context, next to a long prompt that may write little."""
    prompts = [[5] * 500, [5]]
    done = shared.generate(prompts, [SamplingParams(12, 0.0), SamplingParams(20, 0.0)])
    assert [len(completion.token_ids) for completion in done] == [12, 20]
    with pytest.raises(EngineError, match="a prompt of 500 tokens and 13 new ones exceed"):
        shared.generate(prompts, [SamplingParams(13, 0.0), SamplingParams(511, 0.0)])
    with pytest.raises(EngineError, match="a prompt of 1 tokens and 512 new ones exceed"):
        shared.generate(prompts, [SamplingParams(12, 0.0), SamplingParams(512, 0.0)])
    with pytest.raises(EngineError, match="1 sampling parameters were given for 2 prompts"):
        shared.generate(prompts, [GREEDY])
    assert shared.generate([], []) == []


def test_the_checkpoints_own_generation_config_biases_nothing(shared, nvfp4_base, tmp_path):
    """Qwen2.5 ships a repetition penalty, top_p and top_k; a policy has to be sampled without them."""
    biased = shutil.copytree(nvfp4_base, tmp_path / "biased")
    path = biased / "generation_config.json"
    settings = {"repetition_penalty": 5.0, "top_k": 1, "top_p": 0.1, "temperature": 0.1, "do_sample": True}
    settings |= {"no_repeat_ngram_size": 1, "suppress_tokens": list(range(40)), "epsilon_cutoff": 0.02}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    engine = open_engine(str(biased), "nvfp4", EngineOptions(engine="transformers"))
    for sampling in (SAMPLED, GREEDY):
        assert engine.generate(PROMPTS, sampling, 5) == shared.generate(PROMPTS, sampling, 5)


def test_the_trainers_adapter_acts_without_a_copy(engine):
    clean = tokens(engine.generate(PROMPTS, GREEDY))
    policy = attach_lora(engine.policy_model(), rank=4, alpha=8)
    tensors = adapter_tensors(policy)
    assert deliver(AdapterUpdate(tensors, adapter_scaling(policy)), engine) == len(tensors)
    assert tokens(engine.generate(PROMPTS, GREEDY)) == clean
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(torch.randn_like(tensor))
    assert tokens(engine.generate(PROMPTS, GREEDY)) != clean


def test_a_saved_adapter_acts_and_can_be_swapped_with_its_scaling(engine, opened, nvfp4_base, tmp_path):
    clean, other = tokens(engine.generate(PROMPTS, GREEDY)), opened()
    policy = attach_lora(other.policy_model(), rank=4, alpha=8)
    for index in range(2):
        torch.manual_seed(index)
        with torch.no_grad():
            for tensor in adapter_tensors(policy).values():
                tensor.copy_(torch.randn_like(tensor))
        save_adapter(policy, tmp_path / str(index), str(nvfp4_base))
        saved, scaling = read_adapter(tmp_path / str(index))
        deliver(AdapterUpdate(saved, 10 * scaling), engine)
        deliver(AdapterUpdate(saved, scaling), engine)
        synced = engine.generate(PROMPTS, GREEDY)
        assert synced == other.generate(PROMPTS, GREEDY)
        assert tokens(synced) != clean


def test_noise_acts_and_is_removed(engine):
    clean = engine.generate(PROMPTS, SAMPLED, 1)
    noise = {name: 0.3 * torch.randn(64) for name in block_norms(engine.policy_model())}
    assert engine.set_noise(noise) == 4
    assert engine.generate(PROMPTS, SAMPLED, 1) != clean
    assert engine.set_noise(None) == 0
    assert engine.generate(PROMPTS, SAMPLED, 1) == clean
    with pytest.raises(EngineError, match="does not have"):
        engine.set_noise({"model.layers.7.input_layernorm": torch.zeros(64)})


def test_a_model_with_other_norms_runs_without_noise(engine, monkeypatch):
    kind = type(engine.policy_model().model.layers[0].input_layernorm)
    monkeypatch.setattr(kind, "forward", lambda self, x: self.weight * (x - x.mean(-1, keepdim=True)))
    assert engine.set_noise(None) == 0
    with pytest.raises(EngineError, match=r"noise\.enabled=false"):
        engine.set_noise({"model.layers.0.input_layernorm": torch.zeros(64)})


def test_norms_are_checked_once_per_module(engine, monkeypatch):
    """The check of the formula runs each norm. A trained copy (modules_to_save) is another module and checked too."""
    checked = []
    kind = type(engine.policy_model().model.layers[0].input_layernorm)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *given: checked.append(1) or original(*given))
    for _ in range(3):
        engine.set_noise({})
        assert len(checked) == 4
    attach_lora(engine.policy_model(), rank=4, alpha=8, train_norms=True)
    checked.clear()
    for _ in range(2):
        engine.set_noise({})
        assert len(checked) == 4


def test_what_cannot_run_says_so(engine):
    vocabulary = engine.policy_model().config.vocab_size
    engine.generate([[5, vocabulary - 1]], GREEDY)
    for prompt, message in (
        ([5, vocabulary], rf"token {vocabulary} and the model only those up to {vocabulary - 1}"),
        ([5] * 501, "context of 512"),
        ([], "no tokens"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.generate([[5, 6], prompt], GREEDY)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(PROMPTS, GREEDY)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_the_choice_of_engine_without_a_gpu():
    assert choose_engine("auto") == "transformers"
    with pytest.raises(EngineError, match="no CUDA device"):
        choose_engine("vllm")
    with pytest.raises(EngineError, match="not known"):
        choose_engine("sglang")
