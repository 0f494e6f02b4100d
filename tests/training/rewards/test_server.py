"""Rewards by URL, on real sockets: requests, answers and retries, servers that misbehave, and keys in headers.

Each exchange ends at its deadline and at its limit of bytes, and a key stays out of whatever is written or shown.
"""

import gzip
import json
import re
import socket
import threading
import time
import tracemalloc
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from qerl.base.errors import ConfigError, RewardError
from qerl.config.schema import RewardConfig
from qerl.data.tasks import Example, get_task
from tests.helpers.built_rewards import build_rewards
from training.rewards.rewards import FAILED, check_rewards, fixed_columns

EXAMPLES = [Example("2+16?", "18", "a", {"level": 3}), Example("1+2?", "3", "b")]
FIXED = fixed_columns(get_task("gsm8k"), 100)
DOCS = Path(__file__).resolve().parents[3] / "docs" / "reward-servers.md"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
KEY = "sk-live-" + "0123456789abcdef" * 8  # more characters than an error shows
NOWHERE = "http://127.0.0.1:9/grade"


@contextmanager
def server(*talks):
    """The URL of a server, and the list of requests (head, body) that it read. `talks` are what it sends to one
    connection after another, the last one to all that follow: bytes, or a function that yields them until the client
    hangs up."""
    received, stopped = [], threading.Event()

    def serve(connection, talk):
        with connection, suppress(OSError):
            received.append(read_request(connection))
            for part in [talk] if isinstance(talk, bytes) else talk():
                connection.sendall(part)
                if stopped.is_set():
                    return

    def accept():
        for number in range(1000):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            talk = talks[min(number, len(talks) - 1)]
            threading.Thread(target=serve, args=(connection, talk), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/grade", received
        finally:
            stopped.set()
            listener.shutdown(socket.SHUT_RDWR)


def read_request(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    while len(body) < int(head.lower().partition(b"content-length:")[2].split()[0]):
        body += connection.recv(65536)
    return head, json.loads(body)


def answer(text="[0.5, 0.5]", status=200, header=""):
    body = text if isinstance(text, bytes) else text.encode()
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nLocation: /elsewhere\r\n{header}"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def forever(part, before=b"", pause_s=0.0):
    def talk():
        yield before
        while True:
            yield part
            time.sleep(pause_s)

    return talk


def late():
    time.sleep(600)
    yield b""


def wanted(*urls, **args):
    """The rewards of a recipe."""
    return [RewardConfig(name=url, args={"backoff_s": 0.01, "timeout_s": 60, **args}) for url in urls]


def build(url, tmp_path, **args):
    """A server has to grade two rows before the run."""
    (function,) = build_rewards(wanted(url, **args), FIXED, EXAMPLES, tmp_path).functions
    return function


def call(function, completions=("a", "b"), row=(0, 1)):
    ids, row = [[1]] * len(completions), list(row)
    return function(prompts=["p"] * len(ids), completions=list(completions), completion_ids=ids, row=row, step=7)


def test_a_server_gets_each_completion_with_its_columns(tmp_path):
    with server(answer("[1, 2]"), answer('{"rewards": [true, 2, -0.5]}')) as (url, received):
        function = build(url, tmp_path, columns=["level"])
        assert call(function, ["a", "b", "½"], [0, 0, 1]) == [1.0, 2.0, -0.5]
    assert function.__name__ == "grade"
    (_, before), (head, asked) = received
    assert (before["completions"], before["questions"]) == (["18", "3"], ["2+16?", "1+2?"])
    assert head.startswith(b"POST /grade ")
    assert asked == {
        "completions": ["a", "b", "½"],
        "prompts": ["p", "p", "p"],
        "questions": ["2+16?", "2+16?", "1+2?"],
        "answers": ["18", "18", "3"],
        "rows": [0, 0, 1],
        "step": 7,
        "columns": {"level": [3, 3, None]},
    }


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ('{"rewards": [1]}', 200, "answered 1 rewards for 2 completions"),
        ('{"rewards": [1, NaN]}', 200, "answered NaN for completion 2 of 2, no finite number"),
        ('{"rewards": [1, null]}', 200, "answered null for completion 2 of 2"),
        ('{"rewards": ["1", 1]}', 200, 'answered "1" for completion 1 of 2'),
        ('{"rewards": [[1], 1]}', 200, "answered [1] for completion 1 of 2"),
        ('{"rewards": [1, 1' + "0" * 400 + "]}", 200, "answered 1000"),
        ("[1, 1" + "0" * 5000 + "]", 200, "answered what is not JSON: [1, 1000"),
        ('{"rewards": {"0": 1, "1": 1}}', 200, "answered JSON that is neither a list"),
        ("1.0", 200, "answered JSON that is neither a list nor has one as `rewards`: 1.0"),
        ("<html>hello</html>", 200, "answered what is not JSON: <html>hello</html>"),
        ("", 200, "answered what is not JSON: nothing"),
        ("[" * 100_000, 200, "answered what is not JSON: [[["),
        ("", 302, "answered 302 Found: nothing"),
        ("no such page", 404, "answered 404 Not Found: no such page"),
        ("x" * 999, 422, "answered 422 Unprocessable Entity: " + "x" * 80 + "..."),
    ],
)
def test_an_answer_that_is_no_list_of_numbers_is_final(text, status, says, tmp_path):
    with server(answer(), answer(text, status)) as (url, received):
        function = build(url, tmp_path / "run")
        with pytest.raises(RewardError) as error:
            call(function)
    assert f"reward server {url} {says}" in str(error.value)
    assert "qerl train --resume RUN" in str(error.value)
    assert len(received) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("talk", "reason"),
    [
        (answer("out of memory", 500), "answered 500 Internal Server Error: out of memory"),
        (answer("", 429), "answered 429 Too Many Requests: nothing"),
        (answer("", 503, "Retry-After: soon\r\n"), "answered 503 Service Unavailable: nothing"),
        (answer("", 503, "Retry-After: -1\r\n"), "answered 503 Service Unavailable: nothing"),
        (answer("", 503, "Retry-After: 1e9\r\n"), "answered 503 Service Unavailable: nothing"),
        (b"garbage\r\n\r\n", "broke off (illegal status line"),
        (b"", "broke off (Server disconnected without sending a response.)"),
        (OK + b"Content-Length: 99\r\n\r\n[1", "broke off (peer closed connection"),
    ],
)
def test_a_server_that_fails_is_asked_again_after_the_usual_pause(talk, reason, tmp_path, caplog):
    with server(answer(), talk, talk, answer(), answer(), talk) as (url, received):
        assert call(build(url, tmp_path, retries=2)) == [0.5, 0.5]
        assert len(received) == 4
        lines = [record.getMessage() for record in caplog.records if record.name == "qerl.base.http"]
        for line, pause in zip(lines, ("0.01", "0.02"), strict=True):
            assert f"reward server {url} {reason}" in line
            assert line.endswith(f"; asked again in {pause} s")
        function = build(url, tmp_path, retries=1)
        with pytest.raises(RewardError, match=rf"{re.escape(reason)}.*\(asked 2 times\): start it, correct its URL"):
            call(function)
        assert len(received) == 7


@pytest.mark.parametrize("form", ["number", "date"])
def test_the_pause_that_a_server_asks_for_is_kept(form, tmp_path):
    """A date has whole seconds only, so that it is up to a second earlier than it was asked to be."""
    times = []

    def busy():
        later = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True) if form == "date" else "1"
        times.append(time.time() + 1)
        yield answer("", 429, f"Retry-After: {later}\r\n")

    def served():
        times.append(time.time())
        yield answer()

    with server(busy, served) as (url, _):
        build(url, tmp_path, retries=1)
    earliest, again = times
    assert again >= earliest - 0.01


def test_a_pause_beyond_the_deadline_ends_the_run_at_once(tmp_path):
    with server(answer("", 429, "Retry-After: 86400\r\n")) as (url, received), pytest.raises(RewardError) as error:
        build(url, tmp_path, retries=5, timeout_s=20)
    assert "asks for a pause of 86400 s (Retry-After), longer than the 30 s" in str(error.value)
    assert "raise args.timeout_s to 86400" in str(error.value)
    assert len(received) == 1


def test_a_late_server_is_asked_again(tmp_path, caplog):
    with server(answer(), late, answer()) as (url, received):
        assert call(build(url, tmp_path, timeout_s=1.0, retries=1)) == [0.5, 0.5]
    assert len(received) == 3
    assert f"reward server {url} did not answer within 1 s; asked again in 0.01 s" in caplog.text


@pytest.mark.parametrize(
    "talk",
    [
        forever(b"X", OK, pause_s=0.02),
        forever(b"HTTP/1.1 100 Continue\r\n\r\n"),
        forever(b"1;" + b"x" * 50_000 + b"\r\n \r\n", CHUNKED, pause_s=0.001),
        forever(b"1\r\n \r\n", CHUNKED, pause_s=0.02),
    ],
    ids=["slow header", "endless 100", "chunk extensions", "slow chunks"],
)
def test_an_exchange_without_end_ends_at_its_deadline(talk, tmp_path):
    said = r"did not answer within 0\.5 s \(asked once\)"
    with server(talk) as (url, _), pytest.raises(RewardError, match=said):
        build(url, tmp_path, timeout_s=0.5, retries=0)


@pytest.mark.parametrize(
    ("talk", "says"),
    [
        (forever(b"X-Long: " + b"x" * 5000 + b"\r\n", OK), "broke off"),
        (forever(b"x" * 65536, OK + b"\r\n["), "answered more than 16 MiB"),
        (forever(b"10000\r\n" + b" " * 65536 + b"\r\n", CHUNKED), "more than 16 MiB"),
        (answer(gzip.compress(b"[1, 2]"), header="Content-Encoding: gzip\r\n"), "in Content-Encoding gzip, though"),
        (b"HTTP/1.1 500 \x1b[31mred\r\nContent-Length: 4\r\n\r\n\x1b[2J", "answered 500"),
    ],
    ids=["headers", "body", "chunks", "gzip", "escapes"],
)
def test_an_answer_is_bounded_in_bytes_and_shown_as_printable_text(talk, says, tmp_path):
    tracemalloc.start()
    try:
        with server(talk) as (url, _), pytest.raises(RewardError) as error:
            build(url, tmp_path, retries=0)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()
    assert says in str(error.value)
    assert str(error.value).isprintable()


def test_an_unreachable_server_is_refused_before_the_run(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RewardError, match=rf"server {url} cannot be reached \(.*refused\) \(asked 3 times\)"):
            build(url, tmp_path / "run", retries=2)
    assert not (tmp_path / "run" / FAILED).exists()


def test_two_servers_have_different_metrics_and_no_proxy_of_the_environment(tmp_path, monkeypatch):
    """A plain list is an answer, too."""
    for key in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(key, "http://127.0.0.1:9")
    for key in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(key, raising=False)
    with server(answer('{"rewards": [0, 1e-1]}')) as (first, _), server(answer("[2, 3]")) as (second, _):
        functions = build_rewards(wanted(first, second), FIXED, EXAMPLES, tmp_path).functions
        assert [call(function) for function in functions] == [[0.0, 0.1], [2.0, 3.0]]
    assert [function.__name__ for function in functions] == ["grade", second.removeprefix("http://").replace("/", "_")]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"timeout_s": 0}, "args.timeout_s is 0: write a number of seconds above 0"),
        ({"backoff_s": -1}, "args.backoff_s is -1"),
        ({"retries": -1}, "args.retries is -1: write 0 or a whole number above"),
        ({"retries": True}, "args.retries is True"),
        ({"columns": "level"}, "args.columns is 'level': write a list of names, such as [level]"),
        ({"columns": [1]}, "args.columns is [1]"),
        ({"timeout": 5}, "takes no argument 'timeout'; did you mean 'timeout_s'?"),
    ],
)
def test_arguments_are_refused_before_the_server_is_asked(args, says, tmp_path):
    with pytest.raises(ConfigError) as error:
        check_rewards(wanted(NOWHERE, **args), FIXED)
    assert says in str(error.value)
    with pytest.raises(ConfigError, match=r"asks for 'topic', .* \(what can be sent besides: completion_ids, level\)"):
        build(NOWHERE, tmp_path, columns=["topic"])


HIDDEN = {
    "reason": b"HTTP/1.1 401 Unauthorized Authorization: Bearer %b\r\nContent-Length: 0\r\n\r\n",
    "encoding": OK + b"Content-Encoding: Bearer %b\r\nContent-Length: 1\r\n\r\nx",
    "body": b"HTTP/1.1 403 No\r\nContent-Length: 200\r\n\r\n" + b" " * 60 + b"%b" + b" " * 4,
    "asked again": b"HTTP/1.1 503 No\r\nContent-Length: 200\r\n\r\n" + b" " * 60 + b"%b" + b" " * 4,
    "reward": OK + b'Content-Length: 200\r\n\r\n["' + b" " * 56 + b'%b", 1]   ',
}


@pytest.mark.parametrize("talk", HIDDEN.values(), ids=HIDDEN)
def test_a_key_reaches_the_server_and_is_hidden_before_what_it_repeats_is_cut(talk, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("GRADER_KEY", KEY)
    headers = {"Authorization": "Bearer ${GRADER_KEY}", "X-Team": "blue"}
    with server(answer(), talk % KEY.encode()) as (url, received):
        build(url, tmp_path, headers=headers)
        with pytest.raises(RewardError) as error:
            build(url, tmp_path, headers=headers, retries=1)
    for head, _ in received:
        assert f"authorization: bearer {KEY}".encode() in head.lower()
        assert b"x-team: blue" in head.lower()
    assert "${GRADER_KEY}"[:8] in str(error.value)
    assert KEY[:6] not in str(error.value) + caplog.text


@pytest.mark.parametrize(
    ("value", "held", "says"),
    [
        ("${GRADER_KEY}", None, "names ${GRADER_KEY}, which is not set in the environment: `export GRADER_KEY=...`"),
        ("${GRADER_KEY}", "", "which is empty in the environment"),
        ("${GRADER_KEY}", f"{KEY}\n", "whose value has a line break or another character"),
        (f"Bearer {KEY}", None, "a key in the recipe would be written into the run"),
        ("${GRADER-KEY}", None, "a $ in it names no variable; write ${NAME}"),
        (7, None, "its value is no text"),
    ],
)
def test_a_header_that_cannot_be_sent_is_refused_before_anything_is_loaded(value, held, says, monkeypatch):
    monkeypatch.delenv("GRADER_KEY", raising=False)
    if held is not None:
        monkeypatch.setenv("GRADER_KEY", held)
    with pytest.raises(ConfigError) as error:
        check_rewards(wanted(NOWHERE, headers={"Authorization": value}), FIXED)
    assert "args.headers.Authorization" in str(error.value)
    assert says in str(error.value)
    assert KEY not in str(error.value)


def test_the_server_in_the_documentation_works(tmp_path, monkeypatch):
    """The code block of the page, unchanged except for the port."""
    (source,) = re.findall(r"```python\n(# server\.py\n.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    made = []
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda http: made.append(http))
    exec(compile(source.replace("8000", "0"), "server.py", "exec"), {"__name__": "grader"})
    monkeypatch.undo()
    (http,) = made
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        url = f"http://localhost:{http.server_address[1]}/grade"
        assert call(build(url, tmp_path), ["it is 18", "it is 4"]) == [1.0, 0.0]
    finally:
        http.shutdown()
        http.server_close()
