"""Episodes against a scripted engine: which tokens they hold, who wrote them, and what ends them."""

import asyncio
import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.folder import EMBEDDED
from qerl.checkpoint.load import load_tokenizer
from qerl.data.tasks import get_task
from qerl.engine.interface import Completion, SamplingParams
from qerl.episodes import driven as module
from qerl.episodes.build import KNOWN, TOOLS, Source, build, register
from qerl.episodes.driven import Start, awaited
from tests.helpers import own_environments
from tests.helpers.scripted import END, Scripted, run, scripted_environments, starts
from training.rollout.sampler import episode_metrics

OWN = own_environments.__file__


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(EMBEDDED["tiny_turns"]))


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """What a test registers is forgotten."""
    monkeypatch.setattr("qerl.episodes.build.KNOWN", dict(KNOWN))
    monkeypatch.setattr("qerl.episodes.build.TOOLS", set(TOOLS))


def test_an_episode_is_one_growing_list_of_tokens_in_which_the_environment_wrote_nothing_that_trains(tokenizer):
    made = scripted_environments(tokenizer, f"{OWN}:Guess")
    engine, (episode,) = run(tokenizer, made, ["books"], ["pens", "books"])
    whole = tokenizer.decode(episode.prompt_ids + episode.token_ids)
    assert whole == (
        "<|im_start|>user\nSay it.\n\nSeed 7.<|im_end|>\n<|im_start|>assistant\n"
        "pens<|im_end|>\n<|im_start|>user\nnot pens<|im_end|>\n<|im_start|>assistant\nbooks<|im_end|>"
    )
    wrote = [token for token, own in zip(episode.token_ids, episode.written, strict=True) if own]
    assert tokenizer.decode(wrote) == "pens<|im_end|>books<|im_end|>"
    assert episode.logprobs == [-0.5 if own else 0.0 for own in episode.written]
    first, second = engine.asked
    assert second.prompt == [*first.prompt, *episode.token_ids[: len(second.prompt) - len(first.prompt)]]
    assert first.stream != second.stream
    assert (episode.reward, episode.ended, episode.answer) == (pytest.approx(0.9), "done", "books")
    assert [(turn.role, turn.text) for turn in episode.turns] == [
        ("assistant", "pens"),
        ("user", "not pens"),
        ("assistant", "books"),
    ]


def test_what_ends_an_episode_and_is_counted(tokenizer):
    lines = (["pens", "books"], ["hang"], ["raise"], ["nan"], ["four"], ["pens", "pens", "pens"], ["pens " * 60])
    made = scripted_environments(tokenizer, f"{OWN}:Faulty", timeout_s=1.5, max_turns=3, max_tokens=60)
    began = time.monotonic()
    _, episodes = run(tokenizer, made, ["books"] * len(lines), *lines)
    assert time.monotonic() - began < 55  # `hang` sleeps for 60
    assert [episode.ended for episode in episodes] == ["done", *["failed"] * 4, "turns", "tokens"]
    errors = [episode.error for episode in episodes]
    assert errors[1] == "did not answer within 1.5 s"
    assert errors[2].startswith("step raised KeyError: 'nothing\\nhere' (own_environments.py, line ")
    assert errors[3] == "step returned nan as its reward: return a finite number"
    assert errors[4].endswith("return (observation, reward, done)")
    assert [episode.reward for episode in episodes[1:5]] == [0.0] * 4
    assert episodes[5].reward == pytest.approx(-0.3)
    assert [episode.truncated for episode in episodes] == [False] * 6 + [True]
    metrics = episode_metrics(episodes)
    assert metrics["environment/failed_share"] == pytest.approx(4 / 7)
    assert metrics["environment/turn_limit_share"] == pytest.approx(1 / 7)


def test_an_answer_that_came_in_time_counts_however_long_the_engine_then_samples(tokenizer):
    class Slow(Scripted):
        def run(self, source, seed=None):
            assert source.begin(wait=False, together=True) == []
            while requests := source.begin(wait=True, together=True):
                for request in requests:
                    ids = [*self._encode(self.lines[request.index].pop(0)), END]
                    source.finished(request.index, Completion(ids, [-0.5] * len(ids), "stop"))
                time.sleep(2.1)  # other completions are sampled

    made = scripted_environments(tokenizer, f"{OWN}:Faulty", timeout_s=2.0)
    try:
        found = made.play(Slow(tokenizer, ["pens", "books"]), starts(made.chat, "books"), SamplingParams(50), 0)
    finally:
        made.close()
    assert [episode.ended for episode in found] == ["done"]


def test_a_process_that_ends_takes_its_episodes_with_it_and_the_next_rollout_has_another(tokenizer):
    made = scripted_environments(tokenizer, f"{OWN}:Faulty")
    try:
        for lines, ended in ((["exit"], "failed"), (["books"], "done")):
            (episode,) = made.play(Scripted(tokenizer, lines), starts(made.chat, "books"), SamplingParams(50), 0)
            assert episode.ended == ended
    finally:
        made.close()


def test_a_slow_environment_does_not_hold_the_others(tokenizer):
    """With one call of 0.3 s at a time, twelve episodes of two turns would take at least 7.2 s."""
    made = scripted_environments(tokenizer, f"{OWN}:Guess", args={"patience": 0.3}, processes=1)
    began = time.monotonic()
    _, episodes = run(tokenizer, made, ["books"] * 12, *[["pens", "books"] for _ in range(12)])
    assert time.monotonic() - began < 7.2
    assert all(episode.waited_s > 0.5 for episode in episodes)


def test_an_object_of_trl_plays_as_it_is(tokenizer):
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    lines = [call % ("increment", '{"by": 3}') + call % ("peek", "{}"), call % ("fly", "{}"), "{broken", "done"]
    lines[2] = "<tool_call>\n" + lines[2]
    register("Counter", own_environments.Trl)  # an object of Python, in this process
    made = scripted_environments(tokenizer, "Counter", max_tokens=1000)
    assert {schema["function"]["name"] for schema in made.runner.schemas} == {"increment", "peek"}
    _, (episode, lost) = run(tokenizer, made, ["3", "no number"], lines, [])
    said = [turn.text for turn in episode.turns if turn.role == "tool"]
    assert said[:2] == ["3", "3"]
    assert "there is no tool fly; the tools are increment, peek" in said[2]
    assert "no JSON" in said[3]
    assert (episode.reward, episode.tool_calls, episode.tool_errors) == (1.0, 4, 2)
    assert "increment(by)" in tokenizer.decode(episode.prompt_ids)
    # One that cannot even begin leaves an episode without a token that trains.
    assert lost.ended == "failed"
    assert lost.error.startswith("reset raised ValueError")
    assert (lost.written, len(lost.token_ids)) == ([False], 1)


def test_an_environment_of_trl_that_owns_its_data_asks_in_place_of_the_row(tokenizer):
    """As TRL 1.16 documents it: `reset` chooses the task and returns the prompt, and `get_reward` scores the state."""
    register("Own", own_environments.Chosen)
    call = '<tool_call>\n{"name": "add", "arguments": {"step": 2}}\n</tool_call>'
    made = scripted_environments(tokenizer, "Own", max_tokens=300)
    row = next(iter(get_task("environment").generate("train")))
    messages = ({"role": "system", "content": "Count."}, {"role": "user", "content": row["question"]})
    begins = Start(row, messages, made.chat.prompt(messages), 7)
    (episode,) = made.play(Scripted(tokenizer, [call, "done"]), [begins], SamplingParams(50), 0)
    prompt = tokenizer.decode(episode.prompt_ids)
    assert "Count." in prompt
    assert "user\nCount to 2.<|im_end|>" in prompt
    assert "Episode 0" not in prompt
    assert (episode.reward, episode.tool_calls) == (1.0, 1)


def test_a_row_that_waits_for_an_environment_s_prompt_and_gets_none_has_failed(tokenizer):
    register("Mute", own_environments.Mute)
    made = scripted_environments(tokenizer, "Mute")
    row = next(iter(get_task("environment").generate("train")))
    begins = Start(row, ({"role": "user", "content": row["question"]},), [1], 7)
    (episode,) = made.play(Scripted(tokenizer, []), [begins], SamplingParams(50), 0)
    assert episode.error.startswith("returned no prompt")


def test_a_column_of_the_row_reaches_an_environment_of_trl_and_its_prompt_stays(tokenizer):
    register("Given", own_environments.Given)
    call = '<tool_call>\n{"name": "add", "arguments": {"step": 3}}\n</tool_call>'
    made = scripted_environments(tokenizer, "Given", max_tokens=300)
    _, (episode,) = run(tokenizer, made, ["3"], [call, "done"])
    assert episode.reward == 1.0
    assert tokenizer.decode(episode.prompt_ids).count("Say it.") == 1


def test_functions_are_tools(tokenizer):
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    lines = [call % ("double", '{"number": 4}') + call % ("calculate", '{"expression": "7 / (2 - 2)"}'), "8"]
    register("double", own_environments.double, tool=True)
    made = scripted_environments(tokenizer, "double", "calculator", max_tokens=200)
    _, (episode,) = run(tokenizer, made, ["8"], lines)
    assert [turn.text for turn in episode.turns] == [lines[0], "8", "{'error': 'division by zero'}", "8"]
    assert (episode.tool_calls, episode.tool_errors, episode.answer) == (2, 1, "8")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("Silent",), "has neither step nor a method that could be a tool: write step"),
        (("Stepless",), "has no reset: write reset"),
        (("untyped",), "tool untyped has no schema .*give each argument a type hint"),
        (("Missing",), "has no class or function 'Missing'"),
        (("Guess", "double"), "has a step, which takes the model's turn: leave out tools"),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(names, said):
    tools = tuple(f"{OWN}:{name}" for name in names if name.islower())
    name = next((f"{OWN}:{name}" for name in names if not name.islower()), None)
    with pytest.raises(ConfigError, match=said) as raised:
        build(Source(name, tools))
    assert "\n" not in str(raised.value)


ODD_ANSWERS = {
    "half": "half a character", "half role": "half a character", "number": "with the content 7: write text",
    "mapping": "with the content {'a': 1}: write text", "picture": "write text, or parts of text",
    "bytes": "with the content b'x': write text", "key": "a message that is no JSON",
    "huge": "returned 1e+308 as its reward: return a finite number of at most 1e+15",
    "infinite": "returned inf as its reward: return a finite number", "long": "as its reward: return a finite number",
    "nan": "returned nan as its reward: return a finite number", "raise half": "raised ValueError: a b",
    "false as text": "returned 'False' as done: return True or False",
}  # fmt: skip


def test_an_odd_answer_ends_its_own_episode_and_is_counted(tokenizer):
    lines = [[said] for said in ODD_ANSWERS]
    made = scripted_environments(tokenizer, f"{OWN}:Odd")
    _, episodes = run(tokenizer, made, ["books"] * (len(lines) + 1), *lines, ["pens", "books"])
    *odd, right = episodes
    for episode, said in zip(odd, ODD_ANSWERS.values(), strict=True):
        assert said in episode.error
        episode.error.encode()
        assert (episode.reward, episode.ended) == (0.0, "failed")
    assert right.reward == pytest.approx(0.9)
    assert episode_metrics(episodes)["environment/failed_share"] == len(lines) / len(episodes)


def test_messages_that_the_template_refuses_end_their_own_episode(tokenizer, monkeypatch):
    tokenizer = copy.deepcopy(tokenizer)
    whole = tokenizer.chat_template
    refused = "{% if m.role not in ROLES %}{{ raise_exception('no such role') }}{% endif %}"
    refusal = "{% for m in messages %}" + refused + "{% endfor %}"
    tokenizer.chat_template = refusal.replace("ROLES", "['system', 'user', 'assistant', 'tool']") + whole
    made = scripted_environments(tokenizer, f"{OWN}:Odd")
    _, (odd, right) = run(tokenizer, made, ["books"] * 2, ["role"], ["books"])
    assert "returned messages that cannot be shown: the chat template" in odd.error
    assert right.reward == 1.0
    made = scripted_environments(tokenizer, f"{OWN}:OddReset")
    _, (reset,) = run(tokenizer, made, ["role"], [])
    assert "returned messages that cannot be shown" in reset.error
    made = scripted_environments(tokenizer, f"{OWN}:Guess")
    asked = starts(made.chat, "books")
    tokenizer.chat_template = refusal.replace("ROLES", "['nobody']") + whole
    with pytest.raises(CheckpointError, match=r"the chat template of .* refuses messages"):
        made.play(Scripted(tokenizer, ["books"]), asked, SamplingParams(50), 0)
    made.close()


def test_an_odd_reset_ends_its_own_episode(tokenizer):
    said = ("half", "number", "key")
    made = scripted_environments(tokenizer, f"{OWN}:OddReset")
    _, (*odd, right) = run(tokenizer, made, [*said, "message"], [], [], [], ["message"])
    assert all(ODD_ANSWERS[each] in episode.error for each, episode in zip(said, odd, strict=True))
    assert right.error is None


def test_marks_of_turns_parts_of_text_and_empty_contents_are_text(tokenizer):
    made = scripted_environments(tokenizer, f"{OWN}:Odd")
    _, (episode,) = run(tokenizer, made, ["books"], ["mark", "parts", "none", "books"])
    whole = tokenizer.decode(episode.token_ids)
    assert "user\n\x02turn\x02 \x02turn0\x02<|im_end|>" in whole
    assert "user\none two<|im_end|>" in whole
    assert "None" not in whole
    assert episode.ended == "done"


@pytest.mark.parametrize(
    ("answer", "lines", "limits", "ended"),
    [
        ("books", ("flood", "last flood", "flood in a role", "flood in a name"), {}, "tokens done tokens tokens"),
        ("flood", (), {"context": 300}, "failed"),
    ],
)
def test_a_flood_of_text_costs_no_more_than_what_fits(answer, lines, limits, ended, tokenizer):
    made = scripted_environments(tokenizer, f"{OWN}:{'OddReset' if answer == 'flood' else 'Odd'}", **limits)
    count, began = len(ended.split()), time.process_time()
    _, episodes = run(tokenizer, made, [answer] * count, *([[line] for line in lines] if count > 1 else [list(lines)]))
    assert time.process_time() - began < 5 * count
    assert [episode.ended for episode in episodes] == ended.split()
    for episode in episodes:
        assert sum(len(turn.text) for turn in episode.turns) < 1_000_000
        assert episode.ended != "done" or episode.reward >= 0.5


def test_a_tool_that_says_half_a_character_again_is_a_mistake_that_the_model_is_told(tokenizer):
    made = scripted_environments(tokenizer, f"{OWN}:echo")
    call = '<tool_call>{"name": "%s", "arguments": {"text": "\\ud83d"}}</tool_call>'
    _, (episode,) = run(tokenizer, made, ["books"], [call % "echo", call % "no\\ud83d", "books"])
    assert (episode.ended, episode.tool_calls, episode.tool_errors) == ("done", 2, 2)
    assert "the result holds half a character" in tokenizer.decode(episode.token_ids)
    "".join(turn.text for turn in episode.turns).encode()


def together(*coroutines):
    """What they end with, awaited at the same time."""
    with ThreadPoolExecutor(len(coroutines)) as threads:
        return list(threads.map(awaited, coroutines))


def test_what_is_no_coroutine_stays_as_it_is():
    assert awaited(3) == 3
    assert awaited(None) is None


def test_episodes_share_what_belongs_to_one_event_loop():
    lock, inside = asyncio.Lock(), []

    async def alone(name):
        async with lock:
            inside.append(name)
            await asyncio.sleep(0.02)
            assert inside.pop() == name
        return name

    assert together(alone("a"), alone("b"), alone("c")) == ["a", "b", "c"]


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), asyncio.CancelledError()])
def test_what_a_coroutine_raises_reaches_its_caller_alone(error):
    async def fails():
        raise error

    async def works():
        return 1

    with pytest.raises(type(error)):
        awaited(fails())
    assert awaited(works()) == 1


def test_a_coroutine_that_blocks_does_not_hold_the_others(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    meeting = threading.Barrier(3)  # one after another they would not meet

    async def blocks(name):
        meeting.wait(60)
        return name

    assert together(blocks("a"), blocks("b"), blocks("c")) == ["a", "b", "c"]
