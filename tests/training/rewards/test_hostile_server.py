"""Reward servers that misbehave, on real sockets: each exchange ends at its deadline and at its limit of bytes; and
keys in headers, which stay out of whatever is written or shown."""

import gzip
import socket
import threading
import time
import tracemalloc
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from qerl.base.errors import ConfigError, RewardError
from qerl.config.schema import RewardConfig
from qerl.data.tasks import Example, get_task
from training.rewards.rewards import build_rewards, check_rewards, fixed_columns

EXAMPLES = [Example("2+16?", "18", "a"), Example("1+2?", "3", "b")]
FIXED = fixed_columns(get_task("gsm8k"), 100)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
KEY = "sk-very-secret-0123456789"


@contextmanager
def raw_server(*talks):
    """The URL of a server, and the list of requests (bytes) that it read. `talks` are what it sends to one connection
    after another, the last one to all that follow: bytes, or a function that yields them until the client hangs up."""
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
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    while len(body) < length:
        body += connection.recv(65536)
    return head


def answer(body=b"[0.5, 0.5]", *headers):
    return OK + b"".join(b"%s\r\n" % header for header in headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def forever(part, before=b"", pause_s=0.0):
    def talk():
        yield before
        while True:
            yield part
            time.sleep(pause_s)

    return talk


def wanted(url, **args):
    """The rewards of a recipe."""
    return [RewardConfig(name=url, args={"backoff_s": 0.01, "timeout_s": 20, "retries": 0, **args})]


def grade_two(url, tmp_path, **args):
    """What the server gives in the try before the run."""
    build_rewards(wanted(url, **args), FIXED, EXAMPLES, tmp_path)


@pytest.mark.parametrize(
    "talk",
    [
        forever(b"X", OK, pause_s=0.02),
        forever(b"HTTP/1.1 100 Continue\r\n\r\n"),
        forever(b"1;" + b"x" * 50_000 + b"\r\n \r\n", CHUNKED, pause_s=0.001),
        forever(b"1\r\n \r\n", CHUNKED, pause_s=0.02),
        forever(b"", pause_s=0.05),
    ],
    ids=["slow header", "endless 100", "chunk extensions", "slow chunks", "silence"],
)
def test_an_exchange_without_end_ends_at_its_deadline(talk, tmp_path):
    said = r"did not answer within 0\.5 s \(asked once\)"
    with raw_server(talk) as (url, _), pytest.raises(RewardError, match=said):
        grade_two(url, tmp_path, timeout_s=0.5)


@pytest.mark.parametrize(
    ("talk", "says"),
    [
        (forever(b"X-Long: " + b"x" * 5000 + b"\r\n", OK), "broke off"),
        (forever(b"x" * 65536, OK + b"\r\n["), "answered more than 16 MiB"),
        (forever(b"10000\r\n" + b" " * 65536 + b"\r\n", CHUNKED), "more than 16 MiB"),
        (
            answer(gzip.compress(b"[1, 2]"), b"Content-Encoding: gzip"),
            "in Content-Encoding gzip, though asked for plain",
        ),
        (b"HTTP/1.1 500 \x1b[31mred\r\nContent-Length: 4\r\n\r\n\x1b[2J", "answered 500"),
    ],
    ids=["headers", "body", "chunks", "gzip", "escapes"],
)
def test_an_answer_is_bounded_in_bytes(talk, says, tmp_path):
    tracemalloc.start()
    try:
        with raw_server(talk) as (url, _), pytest.raises(RewardError) as error:
            grade_two(url, tmp_path, timeout_s=60)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()
    assert says in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("form", ["number", "date"])
def test_the_pause_that_a_server_asks_for_is_kept(form, tmp_path):
    """A date has whole seconds only, so that it is up to a second earlier than it was asked to be."""
    times = []

    def busy():
        later = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True) if form == "date" else "1"
        times.append(time.time() + 1)
        yield f"HTTP/1.1 429 Too Many Requests\r\nRetry-After: {later}\r\nContent-Length: 0\r\n\r\n".encode()

    def served():
        times.append(time.time())
        yield answer()

    with raw_server(busy, served) as (url, _):
        grade_two(url, tmp_path, retries=1)
    earliest, again = times
    assert again >= earliest - 0.01


@pytest.mark.parametrize("value", ["-1", "soon", "", "1e9", "²"])
def test_a_retry_after_that_says_nothing_leaves_the_usual_pause(value, tmp_path):
    busy = f"HTTP/1.1 503 Busy\r\nRetry-After: {value}\r\nContent-Length: 0\r\n\r\n".encode()
    with raw_server(busy, answer()) as (url, received):
        grade_two(url, tmp_path, retries=1)
    assert len(received) == 2


def test_a_pause_beyond_the_deadline_ends_the_run_at_once(tmp_path):
    busy = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 86400\r\nContent-Length: 0\r\n\r\n"
    with raw_server(busy) as (url, received), pytest.raises(RewardError) as error:
        grade_two(url, tmp_path, retries=5)
    assert "asks for a pause of 86400 s (Retry-After), longer than the 30 s" in str(error.value)
    assert "raise args.timeout_s to 86400" in str(error.value)
    assert len(received) == 1


def test_a_key_reaches_the_server_and_nothing_else(tmp_path, monkeypatch, caplog):
    """The server repeats it in a refusal, as some do."""
    monkeypatch.setenv("GRADER_KEY", KEY)
    headers = {"Authorization": "Bearer ${GRADER_KEY}", "X-Team": "blue"}
    repeated = b"k" * 70 + KEY.encode()
    busy = b"HTTP/1.1 503 %b\r\nContent-Length: %d\r\n\r\n%b" % (KEY.encode(), len(repeated), repeated)
    forbidden = busy.replace(b"503", b"403", 1)
    with raw_server(answer(), busy, forbidden) as (url, received):
        grade_two(url, tmp_path, headers=headers)
        with pytest.raises(RewardError, match="answered 403") as error:
            grade_two(url, tmp_path, headers=headers, retries=1)
    assert all(f"authorization: bearer {KEY}".encode() in head.lower() for head in received)
    assert all(b"x-team: blue" in head.lower() for head in received)
    assert len(received) == 3
    assert "${GRADER_KEY}"[:9] in str(error.value)
    assert KEY[:6] not in str(error.value) + caplog.text


LONG = "sk-live-" + "0123456789abcdef" * 8  # more characters than an error shows


@pytest.mark.parametrize(
    "talk",
    [
        b"HTTP/1.1 401 Unauthorized Authorization: Bearer %b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: Bearer %b\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 403 No\r\nContent-Length: 200\r\n\r\n" + b" " * 60 + b"%b" + b" " * 4,
        b'HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n["' + b" " * 56 + b'%b", 1]   ',
    ],
    ids=["reason", "encoding", "body", "reward"],
)
def test_a_key_that_is_longer_than_what_is_shown_is_hidden_before_it_is_cut(talk, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("GRADER_KEY", LONG)
    with raw_server(talk % LONG.encode()) as (url, _), pytest.raises(RewardError) as error:
        grade_two(url, tmp_path, headers={"Authorization": "Bearer ${GRADER_KEY}"}, retries=1)
    assert "${GRADER_KEY}"[:8] in str(error.value)
    assert LONG[:6] not in str(error.value) + caplog.text


@pytest.mark.parametrize(
    ("value", "held", "says"),
    [
        ("${GRADER_KEY}", None, "names ${GRADER_KEY}, which is not set in the environment: `export GRADER_KEY=...`"),
        ("${GRADER_KEY}", "", "which is empty in the environment"),
        ("${GRADER_KEY}", f"{KEY}\n", "whose value has a line break or another character"),
        (f"Bearer {KEY}", None, "a key in the recipe would be written into the run"),
        (KEY, None, "a key in the recipe would be written into the run"),
        ("$GRADER_KEY", None, "a $ in it names no variable; write ${NAME}"),
        ("${GRADER-KEY}", None, "a $ in it names no variable"),
        (7, None, "its value is no text"),
    ],
)
def test_a_header_that_cannot_be_sent_is_refused_before_anything_is_loaded(value, held, says, monkeypatch):
    monkeypatch.delenv("GRADER_KEY", raising=False)
    if held is not None:
        monkeypatch.setenv("GRADER_KEY", held)
    with pytest.raises(ConfigError) as error:
        check_rewards(wanted("http://127.0.0.1:9/grade", headers={"Authorization": value}), FIXED)
    assert "args.headers.Authorization" in str(error.value)
    assert says in str(error.value)
    assert KEY not in str(error.value)
