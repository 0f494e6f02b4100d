"""An environment behind a URL: what it says, and what becomes of an episode whose server fails in some way."""

import json
import socket
import time
from http.server import BaseHTTPRequestHandler

import pytest
from http_server import serving
from scripted import run, scripted_environments

from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.named_base import TINY_TURNS_FOLDER


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY_TURNS_FOLDER))


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
            time.sleep(3)
        elif said == "close":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif said == "html":
            self.reply("<html>")
        elif said == "nan":
            self.reply({"observation": "", "reward": "much"})
        else:
            done = said == self.answers[body["episode_id"]]
            self.reply({"observation": {"seen": [said]}, "reward": float(done), "done": done})

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
        made = scripted_environments(tokenizer, url, program=True, timeout_s=1.0, failure_reward=-1.0)
        _, episodes = run(tokenizer, made, ["books"] * 6, *lines)
        assert time.monotonic() - began < 3
    errors = [episode.error for episode in episodes]
    assert errors[0].startswith(f"step got 500 from {url}/step: ")
    assert "\n" not in errors[0]
    assert errors[1] == "did not answer within 1 s"
    assert errors[2].startswith(f"step got no answer from {url}/step: ")
    assert errors[3].endswith("answer with a JSON object of observation, reward and done")
    assert errors[4] == "step returned 'much' as its reward: return a finite number"
    assert [episode.reward for episode in episodes] == [*[-1.0] * 5, 1.0]


def test_a_server_s_own_limit_on_the_connection_is_kept(tokenizer):
    with serving(Server) as url:
        made = scripted_environments(tokenizer, url, program=True, args={"timeout_s": 0.5})
        _, (episode,) = run(tokenizer, made, ["books"], ["hang"])
    assert f"got no answer from {url}/step" in episode.error


def test_a_server_that_is_not_there_fails_every_episode_in_one_line(tokenizer):
    made = scripted_environments(tokenizer, "http://127.0.0.1:9", program=True)
    _, episodes = run(tokenizer, made, ["a", "b"], [], [])
    assert {episode.error.partition(": ")[0] for episode in episodes} == {
        "reset got no answer from http://127.0.0.1:9/reset"
    }
