"""Programs that ask their model over OpenAI's protocol: their conversations are episodes like any others."""

import contextlib
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from qerl.checkpoint.folder import EMBEDDED
from qerl.checkpoint.load import load_tokenizer
from qerl.episodes import endpoint
from qerl.episodes.driven import Action, BadEnvironmentError
from qerl.episodes.endpoint import Programmed
from tests.helpers import own_environments
from tests.helpers.scripted import run, scripted_environments

OWN = own_environments.__file__
VERIFIERS = Path(OWN).with_name("verifiers_environment.py")
CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 4}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(EMBEDDED["tiny_turns"]))


def test_a_program_s_conversation_is_an_episode(tokenizer):
    made = scripted_environments(tokenizer, f"{OWN}:solve", program=True)
    _, (right, never) = run(tokenizer, made, ["books", "books"], ["pens", "books"], ["a", "b", "c"])
    assert tokenizer.decode(right.prompt_ids + right.token_ids) == (
        "<|im_start|>user\nSay 5 letters.<|im_end|>\n<|im_start|>assistant\n"
        "pens<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\nbooks<|im_end|>"
    )
    wrote = [token for token, own in zip(right.token_ids, right.written, strict=True) if own]
    assert tokenizer.decode(wrote) == "pens<|im_end|>books<|im_end|>"
    assert (right.reward, right.ended, right.model_turns) == (1.0, "done", 2)
    assert (never.reward, never.ended, never.model_turns) == (0.25, "done", 3)


def test_what_goes_wrong_ends_its_own_episode(tokenizer):
    made = scripted_environments(tokenizer, f"{OWN}:solve", program=True, max_turns=2)
    lines = (["broken"], ["forget", "pens"], ["a", "b"], ["books"])
    _, episodes = run(tokenizer, made, ["books"] * 4, *lines)
    assert [episode.ended for episode in episodes] == ["failed", "failed", "turns", "done"]
    assert episodes[0].error.startswith("step raised ValueError: broken program (own_environments.py, line ")
    assert "asked with messages that do not go on from those before" in episodes[1].error
    assert [episode.reward for episode in episodes] == [0.0, 0.0, 0.0, 1.0]


def test_a_program_that_asks_nothing_or_hangs_is_an_episode_that_failed(tokenizer):
    made = scripted_environments(tokenizer, f"{OWN}:asks_nothing", program=True)
    _, (episode,) = run(tokenizer, made, ["a"], [])
    assert episode.error.startswith("reset ended without asking the model")
    began = time.monotonic()
    made = scripted_environments(tokenizer, f"{OWN}:sleeps", program=True, timeout_s=1.0)
    _, (episode,) = run(tokenizer, made, ["a"], [])
    assert (episode.error, time.monotonic() - began < 55) == ("did not answer within 1 s", True)


def test_a_program_s_tools_are_in_the_prompt_and_their_calls_in_openai_s_form(tokenizer):
    made = scripted_environments(tokenizer, f"{OWN}:with_tool", program=True, max_tokens=300)
    _, (episode,) = run(tokenizer, made, ["8"], [CALL, "8"])
    assert [(turn.role, turn.text) for turn in episode.turns] == [
        ("assistant", CALL),
        ("tool", "8"),
        ("assistant", "8"),
    ]
    assert (episode.reward, episode.tool_calls) == (1.0, 1)
    assert "double(number)" in tokenizer.decode(episode.prompt_ids)


def test_a_client_that_streams_is_answered_in_events(tokenizer):
    made = scripted_environments(tokenizer, f"{OWN}:streams", program=True)
    _, (episode,) = run(tokenizer, made, ["books"], ["books"])
    assert (episode.reward, episode.error) == (1.0, None)


@pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed")
def test_a_task_of_verifiers_runs_as_it_is(tokenizer):
    made = scripted_environments(tokenizer, f"{VERIFIERS}:solve", program=True, timeout_s=120.0)
    _, (right, wrong) = run(tokenizer, made, ["4", "4"], ["4"], ["5"])
    assert [(one.reward, one.error) for one in (right, wrong)] == [(1.0, None), (0.0, None)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "a request needs messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "the content of a message is text, or parts of text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "is text, or parts of text"),
        ({"messages": [{"role": "user", "content": "a"}], "n": 2}, "there is one answer: leave out n"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f"}}]}, "attribute `tools`"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(tokenizer, body, said):
    made = scripted_environments(tokenizer, f"{OWN}:bad_request", program=True, args={"body": json.dumps(body)})
    _, (episode,) = run(tokenizer, made, ["a"], [])
    assert "HTTPError" not in episode.error
    assert said in episode.error


def answer_to(head, body=b""):
    """The status that a raw request to an open episode gets."""
    asked, over = threading.Event(), threading.Event()

    def program(base_url):
        place = urlsplit(base_url)
        with socket.create_connection((place.hostname, place.port), 20) as connection:
            connection.sendall(f"POST {place.path}/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
            said.append(connection.recv(4096).decode())
        asked.set()
        over.wait(20)

    said = []
    episode = Programmed(program, {})

    def begin():
        with contextlib.suppress(BadEnvironmentError):
            episode.reset({}, 0)

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    asked.wait(20)
    over.set()
    thread.join(20)
    return said[0]


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("Content-Length: -1", b""),
        ("Content-Length: 99999999999999999999999", b""),
        ("Content-Length: 16777217", b""),
        ("Content-Length: \u0663", b""),
        ("Transfer-Encoding: chunked", b"5\r\n{}   \r\n0\r\n\r\n"),
        ("Content-Length: 200000", b"[" * 200_000),
        ("Content-Length: 200012", b'{"messages":' + b"[" * 200_000),
        ("Content-Length: 2", b"[]"),
        ("Content-Length: 4", b"null"),
        ("Content-Length: 16", b'{"messages":[1]}'),
        ("Content-Length: 26", b'{"messages":[{"content":1}'),
    ],
)
def test_a_request_that_has_no_end_or_nests_is_refused(head, body):
    assert answer_to(head, body).split()[1] == "400"


def test_requests_at_once_are_bounded_and_all_end_with_the_episode(monkeypatch):
    monkeypatch.setattr(endpoint, "MOST_ASKING", 5)
    statuses, started = [], threading.active_count()

    def ask(url):
        body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
        request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=30)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)

    def program(base_url):
        threads = [threading.Thread(target=ask, args=(base_url,), daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    episode = Programmed(program, {})
    episode.reset({}, 0)
    for _ in range(200):
        if len(statuses) == 3:
            break
        time.sleep(0.02)
    assert statuses == [400] * 3
    with pytest.raises(BadEnvironmentError, match="do not go on"):
        episode.step(Action("b"))
    for _ in range(500):
        if threading.active_count() <= started + 1:  # the server itself
            break
        time.sleep(0.02)
    assert threading.active_count() <= started + 1
    assert sorted(statuses) == [400] * 3 + [410] * 4, "and one had the turn"


def test_a_client_that_has_gone_leaves_no_traceback(capfd):
    gone, over = threading.Event(), threading.Event()

    def program(base_url):
        place = urlsplit(base_url)
        body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
        for _ in range(3):
            with socket.create_connection((place.hostname, place.port), 20) as connection:
                head = f"POST {place.path}/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset at once
        gone.set()
        over.wait(20)

    episode, threads = Programmed(program, {}), threading.active_count()
    episode.reset({}, 0)
    assert gone.wait(20)
    episode.abandon()
    over.set()
    deadline = time.monotonic() + 20
    while threading.active_count() > threads + 1 and time.monotonic() < deadline:  # the endpoint's own may be new
        time.sleep(0.01)
    assert capfd.readouterr().err == ""
