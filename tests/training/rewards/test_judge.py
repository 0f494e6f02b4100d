"""The reward `judge`, asked over HTTP from a server in a thread that speaks OpenAI's protocol."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest

from qerl.base.errors import ConfigError, RewardError
from qerl.config.schema import RewardConfig
from qerl.data.tasks import Example, get_task
from tests.helpers.built_rewards import build_rewards
from tests.helpers.http_server import serving
from training.rewards.rewards import check_rewards, fixed_columns

EXAMPLES = [Example("2+16?", "18", "a", {"level": 3}), Example("1+2?", "3", "b", {"level": 5})]
FIXED = fixed_columns(get_task("gsm8k"), 100)
KEY = "sk-very-secret-0123456789"
MODEL = "some/judge"


@contextmanager
def judge_server(reply, status=200, wait=lambda: None):
    """The URL of a server that writes `reply(question)`, and its requests as (path, headers, JSON)."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append((self.path, dict(self.headers), asked))
            wait()
            answer = reply(asked["messages"][0]["content"])
            if not isinstance(answer, bytes):
                choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
                answer = json.dumps({"id": "1", "object": "chat.completion", "choices": [choice]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with serving(Handler) as url:
        yield f"{url}/v1", received


def wanted(**args):
    return [RewardConfig(name="judge", args={"model": MODEL, "backoff_s": 0.01, "timeout_s": 60, **args})]


def build(tmp_path, **args):
    (function,) = build_rewards(wanted(**args), FIXED, EXAMPLES, tmp_path).functions
    return function


def call(function, completions, rows=None, logged=None):
    count = len(completions)
    log = (lambda *_: None) if logged is None else logged.__setitem__
    given = {"prompts": ["p"] * count, "completion_ids": [[1]] * count, "log_metric": log}
    return function(list(completions), rows or [0] * count, **given)


def test_a_judge_reads_each_completion_and_its_score_becomes_the_reward(tmp_path):
    replies = {"good": "Well. Score: 10", "half": "**Score**: 2 at first. Score: 5", "bad": "Score: 0"}

    def reply(text):
        return next((reply for completion, reply in replies.items() if f"\n{completion}\n" in text), "Score: 1")

    with judge_server(reply) as (url, seen):
        function = build(tmp_path, url=url)
        assert call(function, ["good", "half", "bad"], [0, 1, 0]) == [1.0, 0.5, 0.0]
    assert function.__name__ == "judge"
    path, _, asked = seen[2]
    assert path == "/v1/chat/completions"
    assert (asked["model"], asked["temperature"], asked["max_tokens"], len(asked["messages"])) == (MODEL, 0, 512, 1)
    text = {asked["messages"][0]["content"] for _, _, asked in seen[2:]}
    assert any("2+16?" in each and "\n18\n" in each and "\ngood\n" in each for each in text)
    assert any("1+2?" in each and "\n3\n" in each and "\nhalf\n" in each for each in text)


def test_template_pattern_words_and_body_are_those_of_the_recipe(tmp_path):
    template = '{level}|{question}|{prompt}|{completion}|{unknown}|{"json": 1}'
    args = {"template": template, "pattern": r"verdict (\w+)", "scores": {"Yes": 1, "no": -0.5}}
    args |= {"body": {"max_tokens": None, "max_completion_tokens": 9}}
    with judge_server(lambda text: "verdict NO, verdict yes" if "{answer}" in text else "verdict no") as (url, seen):
        function = build(tmp_path, url=f"{url}/", **args)
        assert call(function, ["{answer} {level}", "b"], [1, 0]) == [1.0, -0.5]
    contents = {asked["messages"][0]["content"] for _, _, asked in seen}
    assert '5|1+2?|p|{answer} {level}|{unknown}|{"json": 1}' in contents
    assert all("max_tokens" not in asked and asked["max_completion_tokens"] == 9 for _, _, asked in seen)


@pytest.mark.parametrize("reply", ["no idea", "Score: 11", "Score: -1", "", None, "Score: " + "9" * 400])
def test_a_reply_without_a_score_earns_nothing_and_is_counted(reply, tmp_path):
    logged = {}
    with judge_server(lambda text: reply if "odd" in text else "Score: 8") as (url, _):
        assert call(build(tmp_path, url=url), ["odd", "a", "b", "c"], logged=logged) == [0.0, 0.8, 0.8, 0.8]
    assert logged == {"judge/unparsed_share": 0.25}


def test_a_judge_that_never_writes_a_score_is_refused_before_the_run(tmp_path):
    with judge_server(lambda text: "I like\x1b[2J it") as (url, _), pytest.raises(RewardError) as error:
        build(tmp_path, url=url)
    assert "no score in any of 2 replies, the first of which ends with 'I like [2J it': write" in str(error.value)


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (b"<html>", 200, "answered what is no chat completion: <html>"),
        (b'{"choices": []}', 200, "answered what is no chat completion"),
        (b'{"error": "no such model"}', 404, 'answered 404 Not Found: {"error": "no such model"}'),
        (b"busy", 503, "answered 503 Service Unavailable: busy (asked 2 times)"),
    ],
    ids=["page", "empty", "model", "busy"],
)
def test_a_judge_that_cannot_be_asked_is_one_line(answer, status, says, tmp_path):
    with judge_server(lambda text: answer, status) as (url, _), pytest.raises(RewardError) as error:
        build(tmp_path, url=url, retries=1)
    assert f"judge {url}/chat/completions {says}" in str(error.value)
    assert "qerl train --resume RUN" in str(error.value)


def test_completions_are_judged_at_once_up_to_the_limit(tmp_path):
    """Each of the first four waits until all four have come; the test of two rows before them waits for nothing."""
    changed, state = threading.Condition(), {"come": 0, "now": 0, "most": 0}

    def wait():
        with changed:
            state["come"] += 1
            state["now"] += 1
            state["most"] = max(state["most"], state["now"])
            changed.notify_all()
            if state["come"] > 2:
                changed.wait_for(lambda: state["come"] >= 6, 60)
        time.sleep(0.02)  # in which a fifth would come
        with changed:
            state["now"] -= 1

    with judge_server(lambda text: "Score: 8", wait=wait) as (url, seen):
        assert call(build(tmp_path, url=url, concurrency=4), ["a"] * 12) == [0.8] * 12
    assert len(seen) == 14
    assert state["most"] == 4


def test_a_key_reaches_the_judge_and_nothing_else(tmp_path, monkeypatch, caplog):
    """It is longer than what is shown of a reply, and hidden before that is cut."""
    key = "sk-live-" + "0123456789abcdef" * 8
    monkeypatch.setenv("JUDGE_KEY", key)
    headers = {"Authorization": "Bearer ${JUDGE_KEY}"}
    with judge_server(lambda text: "Score: 8") as (url, seen):
        build(tmp_path, url=url, headers=headers)
    assert [headers["Authorization"] for _, headers, _ in seen] == [f"Bearer {key}"] * 2
    for reply, status in ((key.encode(), 401), (key.encode(), 503), (b"{'%b'}" % key.encode(), 200), (key, 200)):
        with judge_server(lambda text, reply=reply: reply, status) as (url, _), pytest.raises(RewardError) as error:
            build(tmp_path, url=url, headers=headers, retries=1)
        said = str(error.value) + caplog.text
        assert not any(key[at : at + 8] in said for at in range(0, 128, 8))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "reward judge has no args.url: write for example"),
        ({"url": "localhost:8001"}, "args.url is localhost:8001: "),
        ({"url": f"http://me:{KEY}@h/v1"}, "args.url is http://h/v1: a name and password in it would be logged"),
        ({"url": "http://h/v1", "model": ""}, "it names no model"),
        ({"url": "http://h/v1", "template": "{question}"}, "it has no {completion}"),
        ({"url": "http://h/v1", "pattern": "("}, "it is no regular expression"),
        ({"url": "http://h/v1", "pattern": "score"}, "it has 0 groups, and the score is in one"),
        ({"url": "http://h/v1", "range": [1, 1]}, "it is no lowest and highest score; write [0, 10]"),
        ({"url": "http://h/v1", "scores": {"yes": "1"}}, "it gives no number for a word"),
        ({"url": "http://h/v1", "body": {"stream": True}}, "it sets what qerl sets"),
        ({"url": "http://h/v1", "body": {"extra": [{"api_key": KEY}]}}, "args.body.extra.0.api_key is not shown"),
        ({"url": "http://h/v1", "body": {"user": KEY}}, "args.body.user is not shown: a key there would be written"),
        ({"url": "http://h/v1", "concurrency": 0}, "args.concurrency is 0: no request would be sent"),
        ({"url": "http://h/v1", "timeout_s": 0}, "args.timeout_s is 0: write a number of seconds above 0"),
        ({"url": "http://h/v1", "headers": {"Authorization": KEY}}, "a key in the recipe would be written"),
    ],
)
def test_arguments_are_refused_before_the_judge_is_asked(args, says):
    with pytest.raises(ConfigError) as error:
        check_rewards(wanted(**args), FIXED)
    assert says in str(error.value)
    assert KEY not in str(error.value)
