"""Episodes on the vllm engine. All last passed on an H200 on 2026-11-24."""

import time

import pytest

from qerl.checkpoint.folder import EMBEDDED
from qerl.checkpoint.load import load_tokenizer
from qerl.config.environment import EnvironmentConfig
from qerl.data.examples import load_examples
from qerl.data.tasks import messages_of
from qerl.engine.interface import SamplingParams
from qerl.engine.options import EngineOptions
from qerl.episodes.play import open_environments
from tests.helpers import own_environments

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine():
    from qerl.engine.vllm.engine import VLLMEngine

    made = VLLMEngine(str(EMBEDDED["tiny_turns"]), "bf16", EngineOptions(max_context=512, max_sequences=64))
    yield made
    made.close()


def played(engine, count, **config):
    tokenizer = load_tokenizer(str(EMBEDDED["tiny_turns"]))
    examples, _ = load_examples("arith", limit=count)
    environments = open_environments(EnvironmentConfig(**config), tokenizer, EMBEDDED["tiny_turns"], 160, 512)
    starts = []
    for example in examples:
        messages = tuple(messages_of("arith", example))
        starts.append(environments.start(example, messages, environments.chat.prompt(messages), 1))
    try:
        return environments.play(engine, starts, SamplingParams(160), 3)
    finally:
        environments.close()


def test_each_turn_s_logprobs_are_those_of_the_whole_episode(engine):
    """An episode is sampled turn by turn from the prefix cache, and scored in one forward pass."""
    episodes = played(engine, 48, name="calculator", max_turns=6)
    assert max(episode.model_turns for episode in episodes) >= 3
    assert {episode.ended for episode in episodes} <= {"done", "turns", "tokens"}
    scored = engine.score([one.prompt_ids for one in episodes], [one.token_ids for one in episodes])
    differences = [
        abs(logprob - value)
        for episode, values in zip(episodes, scored, strict=True)
        for logprob, value, own in zip(episode.logprobs, values, episode.written, strict=True)
        if own
    ]
    assert sum(differences) / len(differences) < 0.02
    assert max(differences) < 0.5


def test_environments_work_while_the_engine_samples(engine):
    """Forty-eight episodes of up to four turns, with 0.2 s of the environment in each."""
    began = time.monotonic()
    path = f"{own_environments.__file__}:Guess"
    episodes = played(engine, 48, name=path, args={"patience": 0.2}, max_turns=4)
    assert time.monotonic() - began < 20  # one after another they would take 38 s
    assert sum(episode.waited_s for episode in episodes) > 10
