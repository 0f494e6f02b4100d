"""Rewards by URL, tested with real servers in a thread: requests, answers and retries."""

import json
import re
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from qerl.base.errors import ConfigError, RewardError
from qerl.config.schema import RewardConfig
from qerl.data.tasks import Example, get_task
from tests.helpers.http_server import serving
from training.rewards.rewards import FAILED, build_rewards, check_rewards, fixed_columns

EXAMPLES = [Example("2+16?", "18", "a", {"level": 3}), Example("1+2?", "3", "b")]
DOCS = Path(__file__).resolve().parents[3] / "docs" / "reward-servers.md"


def right(count):
    """The answer of a server that gives each of `count` completions the reward 0.5."""
    return 200, json.dumps({"rewards": [0.5] * count})


@contextmanager
def server(*answers):
    """The URL of a server that gives these answers in turn and repeats the last one, and the list of its requests.

    An answer is a function of the number of completions, (status, text), seconds to wait before the right answer, or
    a text that is sent raw instead of HTTP.
    """
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = answers[min(len(received), len(answers) - 1)]
            received.append({"path": self.path, **asked})
            if isinstance(answer, str):
                self.wfile.write(answer.encode())
                return
            if isinstance(answer, float):
                stopped.wait(answer)
                answer = right
            status, text = answer(len(asked["completions"])) if callable(answer) else answer
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    stopped = threading.Event()
    with serving(Handler) as url:
        try:
            yield f"{url}/grade", received
        finally:
            stopped.set()


FIXED = fixed_columns(get_task("gsm8k"), 100)


def wanted(*urls, **args):
    """The rewards of a recipe."""
    return [RewardConfig(name=url, args={"backoff_s": 0.01, "timeout_s": 60, **args}) for url in urls]


def build(url, tmp_path, **args):
    (function,) = build_rewards(wanted(url, **args), FIXED, EXAMPLES, tmp_path).functions
    return function


def call(function, completions=("a", "b"), row=(0, 1)):
    return function(
        prompts=["p"] * len(completions),
        completions=list(completions),
        completion_ids=[[1]] * len(completions),
        row=list(row),
        step=7,
        log_metric=lambda name, value: None,
    )


def test_a_server_gets_each_completion_with_its_columns(tmp_path):
    with server(lambda count: (200, json.dumps({"rewards": [True, 2, -0.5][:count]}))) as (url, received):
        function = build(url, tmp_path, columns=["level"])
        assert call(function, ["a", "b", "½"], [0, 0, 1]) == [1.0, 2.0, -0.5]
    assert function.__name__ == "grade"
    before = received[0]  # two rows have to be graded before the run
    assert (before["completions"], before["questions"]) == (["18", "3"], ["2+16?", "1+2?"])
    assert received[1] == {
        "path": "/grade",
        "completions": ["a", "b", "½"],
        "prompts": ["p", "p", "p"],
        "questions": ["2+16?", "2+16?", "1+2?"],
        "answers": ["18", "18", "3"],
        "rows": [0, 0, 1],
        "step": 7,
        "columns": {"level": [3, 3, None]},
    }


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((200, '{"rewards": [1]}'), "answered 1 rewards for 2 completions"),
        ((200, '{"rewards": [1, NaN]}'), "answered NaN for completion 2 of 2, no finite number"),
        ((200, '{"rewards": [1, null]}'), "answered null for completion 2 of 2"),
        ((200, '{"rewards": ["1", 1]}'), 'answered "1" for completion 1 of 2'),
        ((200, '{"rewards": [[1], 1]}'), "answered [1] for completion 1 of 2"),
        ((200, '{"rewards": [1, 1' + "0" * 400 + "]}"), "answered 1000"),
        ((200, "[1, 1" + "0" * 5000 + "]"), "answered what is not JSON: [1, 1000"),
        ((200, '{"rewards": {"0": 1, "1": 1}}'), "answered JSON that is neither a list"),
        ((200, "1.0"), "answered JSON that is neither a list nor has one as `rewards`: 1.0"),
        ((200, "<html>hello</html>"), "answered what is not JSON: <html>hello</html>"),
        ((200, ""), "answered what is not JSON: nothing"),
        ((200, "[" * 100_000), "answered what is not JSON: [[["),
        ((302, ""), "answered 302 Found: nothing"),
        ((404, "no such page"), "answered 404 Not Found: no such page"),
        ((422, "x" * 999), "answered 422 Unprocessable Entity: " + "x" * 80 + "..."),
    ],
)
def test_an_answer_that_is_no_list_of_numbers_is_final(answer, says, tmp_path):
    run_dir = tmp_path / "run"
    with server(right, answer) as (url, received):
        function = build(url, run_dir)
        with pytest.raises(RewardError) as error:
            call(function)
    assert f"reward server {url} {says}" in str(error.value)
    assert "qerl train --resume RUN" in str(error.value)
    assert len(received) == 2
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((500, "out of memory"), "answered 500 Internal Server Error: out of memory"),
        ((503, ""), "answered 503 Service Unavailable: nothing"),
        ((429, ""), "answered 429 Too Many Requests: nothing"),
        ("garbage\r\n\r\n", "broke off (illegal status line"),
        ("", "broke off (Server disconnected without sending a response.)"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n[1", "broke off (peer closed connection"),
    ],
)
def test_a_server_that_fails_is_asked_again(answer, reason, tmp_path, caplog):
    with server(right, answer, answer, right) as (url, received):
        assert call(build(url, tmp_path, retries=2)) == [0.5, 0.5]
        assert len(received) == 4
        lines = [record.getMessage() for record in caplog.records if record.name == "qerl.base.http"]
        assert len(lines) == 2
        for line, pause in zip(lines, ("0.01", "0.02"), strict=True):
            assert f"reward server {url} {reason}" in line
            assert line.endswith(f"; asked again in {pause} s")
    with server(right, answer) as (url, received):
        function = build(url, tmp_path, retries=1)
        with pytest.raises(RewardError, match=rf"{re.escape(reason)}.*\(asked 2 times\): start it, correct its URL"):
            call(function)
        assert len(received) == 3


def test_a_late_server_is_asked_again(tmp_path, caplog):
    with server(right, 600.0, right) as (url, received):
        assert call(build(url, tmp_path, timeout_s=1.5, retries=1)) == [0.5, 0.5]
    assert len(received) == 3
    assert f"reward server {url} did not answer within 1.5 s; asked again in 0.01 s" in caplog.text


def test_an_unreachable_server_is_refused_before_the_run(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RewardError, match=rf"server {url} cannot be reached \(.*refused\) \(asked 3 times\)"):
            build(url, tmp_path / "run", retries=2)
    assert not (tmp_path / "run" / FAILED).exists()


def test_a_proxy_of_the_environment_is_not_used_for_a_server_on_this_machine(tmp_path, monkeypatch):
    for key in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(key, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with server(right) as (url, _):
        assert call(build(url, tmp_path)) == [0.5, 0.5]


def test_two_servers_have_different_metrics(tmp_path):
    with server(right) as (first, _), server((200, "[2, 3e0]")) as (second, _):  # a plain list is an answer too
        functions = build_rewards(wanted(first, second), FIXED, EXAMPLES, tmp_path).functions
        assert [call(function) for function in functions] == [[0.5, 0.5], [2.0, 3.0]]
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
def test_arguments_are_refused_before_the_server_is_asked(args, says):
    with pytest.raises(ConfigError) as error:
        check_rewards(wanted("http://127.0.0.1:9/grade", **args), FIXED)
    assert says in str(error.value)


def test_a_column_that_the_data_does_not_have_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"asks for 'topic', .* \(what can be sent besides: completion_ids, level\)"):
        build("http://127.0.0.1:9/grade", tmp_path, columns=["topic"])


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
