"""An environment behind a URL: what it says, and what becomes of an episode whose server fails in some way."""

import json
import socket
import time
from http.server import BaseHTTPRequestHandler

import pytest

from qerl.base.errors import ConfigError
from qerl.checkpoint.folder import EMBEDDED
from qerl.checkpoint.load import load_tokenizer
from qerl.episodes.remote import check_reachable
from tests.helpers.http_server import serving
from tests.helpers.scripted import run, scripted_environments


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(EMBEDDED["tiny_turns"]))


class Server(BaseHTTPRequestHandler):
    """Asks for the row's answer; does what the model says, which may be bad."""

    answers: dict[str, str] = {}  # noqa: RUF012

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset":
            self.answers[body["episode_id"]] = body["example"]["answer"]
            self.reply({"observation": {"text": f"Seed {body['seed']}."}})
            return
        said = body["action"]["message"].strip()
        if said == "raise":
            self.reply({"why": "it\nbroke"}, 500)
        elif said == "hang":
            time.sleep(60)
        elif said == "close":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif said == "redirect":
            self.send_response(302)
            self.send_header("Location", "/reset")
            self.end_headers()
        elif said == "refuse":
            self.reply({"why": f"bad key {self.headers['Authorization']}"}, 401)
        elif said == "dribble":
            self.dribble()
        elif said == "html":
            self.reply("<html>")
        elif said == "nan":
            self.reply({"observation": "", "reward": "much"})
        else:
            done = said == self.answers[body["episode_id"]]
            self.reply({"observation": {"seen": [said]}, "reward": float(done), "done": done})

    def dribble(self):
        """A header that comes byte by byte, each within any limit on a read."""
        for _ in range(1200):
            self.wfile.write(b"H")
            self.wfile.flush()
            time.sleep(0.05)

    def reply(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_an_episode_at_a_server(tokenizer):
    with serving(Server) as url:
        made = scripted_environments(tokenizer, url, program=True)
        _, (episode,) = run(tokenizer, made, ["books"], ["pens", "books"])
    assert (episode.reward, episode.ended) == (1.0, "done")
    assert [turn.text for turn in episode.turns] == ["pens", '{"seen": ["pens"]}', "books", '{"seen": ["books"]}']
    assert "Say it.\n\nSeed 7." in tokenizer.decode(episode.prompt_ids)


def test_a_server_that_fails_hangs_or_closes_ends_that_episode_alone(tokenizer):
    lines = [["raise"], ["hang"], ["close"], ["html"], ["nan"], ["books"]]
    began = time.monotonic()
    with serving(Server) as url:
        made = scripted_environments(tokenizer, url, program=True, timeout_s=2.0)
        _, episodes = run(tokenizer, made, ["books"] * 6, *lines)
        assert time.monotonic() - began < 55  # `hang` sleeps for 60
    errors = [episode.error for episode in episodes]
    assert errors[0].startswith(f"step got no answer from {url}/step: it answered 500 Internal Server Error: ")
    assert "\n" not in errors[0]
    assert errors[1] == "did not answer within 2 s"
    assert errors[2].startswith(f"step got no answer from {url}/step: ")
    assert errors[3].endswith("answer with a JSON object of observation, reward and done")
    assert errors[4] == "step returned 'much' as its reward: return a finite number"
    assert [episode.reward for episode in episodes] == [*[0.0] * 5, 1.0]


def test_a_server_that_is_not_there_fails_every_episode_in_one_line(tokenizer):
    made = scripted_environments(tokenizer, "http://127.0.0.1:9", program=True)
    _, episodes = run(tokenizer, made, ["a", "b"], [], [])
    assert {episode.error.partition(": ")[0] for episode in episodes} == {
        "reset got no answer from http://127.0.0.1:9/reset"
    }


def test_a_redirect_is_not_followed(tokenizer):
    with serving(Server) as url:
        made = scripted_environments(tokenizer, url, program=True)
        _, (episode,) = run(tokenizer, made, ["books"], ["redirect"])
    assert episode.error.startswith(f"step got no answer from {url}/step: it answered 302")


def test_the_limit_of_an_exchange_holds_whatever_comes_meanwhile(tokenizer):
    with serving(Server) as url:
        made = scripted_environments(tokenizer, url, program=True, args={"timeout_s": 0.5})
        began = time.monotonic()
        _, (episode,) = run(tokenizer, made, ["books"], ["dribble"])
        assert time.monotonic() - began < 55  # `dribble` goes on for 60
    assert episode.error.endswith("did not answer within 0.5 s (asked once)")


def test_headers_are_sent_and_their_values_hidden(tokenizer, monkeypatch):
    key = "sk-live-" + "0123456789abcdef" * 8
    monkeypatch.setenv("PLACE_KEY", key)
    with serving(Server) as url:
        args = {"headers": {"Authorization": "Bearer ${PLACE_KEY}"}}
        made = scripted_environments(tokenizer, url, program=True, args=args)
        _, (episode,) = run(tokenizer, made, ["books"], ["refuse"])
    assert "bad key Bearer ${PLACE_KEY}" in episode.error
    assert key[:10] not in episode.error


def test_what_no_server_can_be_asked_with_is_refused_before_anything_is_asked(tokenizer, monkeypatch):
    monkeypatch.delenv("PLACE_KEY", raising=False)
    for args, said in (
        ({"headers": {"Authorization": "${PLACE_KEY}"}}, r"names \$\{PLACE_KEY\}, which is not set"),
        ({"headers": {"Authorization": "sk-live-1234567"}}, "a key in the recipe would be written into the run"),
        ({"api_key": "sk-live-1234567"}, "cannot be made with args api_key"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            scripted_environments(tokenizer, "http://127.0.0.1:9", program=True, args=args)
        assert "sk-live" not in str(error.value)


@pytest.mark.parametrize("url", ["http://me:hunter2@127.0.0.1:9/x", "http://127.0.0.1:99999", "http://[::1", "http://"])
def test_urls_that_are_none_or_hold_a_password_are_refused_in_one_line(url):
    with pytest.raises(ConfigError, match=r"^environment .*; write for example http://localhost:8000$") as error:
        check_reachable(url)
    assert "hunter2" not in str(error.value)
