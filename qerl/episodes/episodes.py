"""The episodes of one rollout: what the engine samples next, and what the environments answer meanwhile.

An episode is one growing list of token ids: its prompt, what the model sampled, what the environment said in the chat
template, what the model sampled next. Nothing in it is ever tokenized again, so that each turn's logprobs are those of
the tokens that train, and the engine finds all earlier turns in its prefix cache.

    reset ─> ready ─ engine ─> finished ─> step ─> ready ─> ...   until the environment is done, or a limit is reached

Between its steps the engine asks which turns begin, and says which have finished. Environments answer from threads, so
a slow one keeps nobody but its own episode waiting, unless the engine asks to wait for all (which repeats to the bit).
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError
from qerl.base.printable import printable
from qerl.data.tasks import ASKS
from qerl.engine.interface import Completion, Finished, Request, SamplingParams, Source, extended
from qerl.episodes.driven import Ending, Episode, Limits, Start, Turn

if TYPE_CHECKING:
    import torch

    from qerl.episodes.endpoint import Chat
    from qerl.episodes.runner import Answer, Runner

CUT = "\n[... the rest is not shown]"


@dataclass
class _Open:
    """An episode under way."""

    index: int
    number: int  # of the runner
    start: Start
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    spoken: int = 0  # turns of the model
    answer: str = ""
    reward: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0
    waited_s: float = 0.0
    call: int | None = None  # the question that the environment has not answered
    asked: float = 0.0
    ended: Ending | None = None
    truncated: bool = False
    error: str | None = None
    closed: bool = False  # nothing more happens in it
    environment: Any = None
    experts: torch.Tensor | None = None  # chosen for the tokens so far, where an engine says so


class Episodes(Source):
    """What `Engine.run` asks; `finish` gives the episodes once it has returned."""

    def __init__(
        self,
        runner: Runner,
        chat: Chat,
        limits: Limits,
        sampling: SamplingParams,
        starts: Sequence[Start],
        told: Finished | None = None,
    ) -> None:
        """`told` is called with each of the model's turns as it ends."""
        self._told = told
        self._runner, self._chat, self._limits, self._sampling = runner, chat, limits, sampling
        self._episodes = [
            _Open(index, runner.episode(), start, list(start.prompt_ids)) for index, start in enumerate(starts)
        ]
        self._by_call: dict[int, _Open] = {}
        self._ready: list[_Open] = []
        for episode in self._episodes:
            row = {**episode.start.row, "prompt": list(episode.start.messages)}
            self._ask(episode, "reset", row=row, seed=episode.start.seed)

    def begin(self, wait: bool, together: bool) -> list[Request]:
        """The next turns to sample, each once, in the order of the episodes."""
        if together and not wait:
            return []
        self._take_answers(block=False)
        while self._by_call and (together or (wait and not self._ready)):
            self._take_answers(block=True)
        ready, self._ready = sorted(self._ready, key=lambda episode: episode.index), []
        return [self._request(episode) for episode in ready]

    def finished(self, index: int, completion: Completion) -> None:
        """The model's turn in episode `index`."""
        if self._told is not None:
            self._told(index, completion)
        episode = self._episodes[index]
        action = self._chat.action(completion.token_ids)
        episode.token_ids += completion.token_ids
        episode.logprobs += completion.logprobs
        episode.written += [True] * len(completion.token_ids)
        if completion.experts is not None:
            episode.experts = extended(episode.experts, completion.experts)
        episode.answer = self._chat.decode(completion.token_ids)
        episode.turns.append(Turn("assistant", action.text, len(completion.token_ids)))
        episode.spoken += 1
        if completion.finish_reason == "length":
            self._end(episode, "tokens")
        else:
            self._ask(episode, "step", action=action)

    def finish(self) -> list[Episode]:
        """The episodes in the order of their starts. No environment is open any more."""
        self.drop()
        return [_closed(episode, self._chat.end_id) for episode in self._episodes]

    def drop(self) -> None:
        """Leave what is open; after an error there may be some."""
        for episode in self._episodes:
            if not episode.closed or episode.error is not None:
                self._runner.ask("drop", episode.number)
        self._by_call.clear()
        self._runner.settle()

    # -- what environments answer

    def _ask(self, episode: _Open, do: str, **given: Any) -> None:
        episode.asked = time.monotonic()
        episode.call = self._runner.ask(do, episode.number, **given)
        self._by_call[episode.call] = episode

    def _take_answers(self, block: bool) -> None:
        """Take what has been answered; with `block`, wait for one answer or for the next deadline.

        What was answered in time may have waited here while the engine sampled.
        """
        while self._by_call:
            deadline = min(episode.asked for episode in self._by_call.values()) + self._limits.timeout_s
            try:
                answer = self._runner.answers.get(block, max(0.0, deadline - time.monotonic()) + 0.001)
            except queue.Empty:
                self._end_late()
                if block:
                    continue
                return
            if (episode := self._by_call.pop(answer["id"], None)) is not None:  # else it came too late
                episode.waited_s += time.monotonic() - episode.asked
                episode.call = None
                self._answered(episode, answer)
                block = False

    def _end_late(self) -> None:
        now = time.monotonic()
        late = [one for one in self._by_call.values() if now - one.asked > self._limits.timeout_s]
        for episode in late:
            del self._by_call[episode.call]
            episode.waited_s += now - episode.asked
            self._runner.late(episode.number)
            self._fail(episode, f"did not answer within {self._limits.timeout_s:g} s")

    def _answered(self, episode: _Open, answer: Answer) -> None:
        episode.environment = answer.get("environment", episode.environment)
        if "raised" in answer:
            self._fail(episode, answer["raised"])
            return
        episode.reward += answer["reward"]
        episode.tool_calls += answer["tool_calls"]
        episode.tool_errors += answer["tool_errors"]
        if episode.ended is not None:  # this was the answer to its end
            episode.closed = True
        elif not episode.spoken:
            self._begin(episode, answer)
        else:
            self._go_on(episode, answer)

    def _begin(self, episode: _Open, answer: Answer) -> None:
        """The first turn, with what the reset has said in the prompt."""
        said = answer["messages"]
        asks = episode.start.row.get(ASKS) and answer["prompt"] is None
        if asks and not said:
            self._fail(episode, "returned no prompt, and the task environment has no other: return it from reset")
            return
        if answer["prompt"] is not None:
            messages = [dict(message) for message in answer["prompt"]]
        else:
            messages = [dict(message) for message in episode.start.messages]
            if said:
                own = [] if asks else [messages[-1]["content"]]
                parts = [*own, *(message["content"] for message in said)]
                messages[-1] = {**messages[-1], "content": "\n\n".join(part for part in parts if part)}
        if said or answer["prompt"] is not None:
            most, size = self._chat.most_characters(self._limits.context), _characters(messages)
            if size > most:
                self._fail(episode, f"makes a prompt of {size} characters, for which there is no room")
                return
            if (ids := self._rendered(episode, self._chat.prompt, messages)) is None:
                return
            episode.prompt_ids = ids
        room = self._limits.context - len(episode.prompt_ids)
        if room < 1:
            self._fail(episode, f"makes a prompt of {len(episode.prompt_ids)} tokens, for which there is no room")
        else:
            self._ready.append(episode)

    def _go_on(self, episode: _Open, answer: Answer) -> None:
        messages = answer["messages"]
        most = self._chat.most_characters(self._room(episode))  # more than the rest of an episode can hold
        # The text as people read it is not kept whole if it is longer than any observation that fits.
        shown = [m["content"] if len(m["content"]) <= most else m["content"][:most] + CUT for m in messages]
        texts = [Turn(message["role"], text, 0) for message, text in zip(messages, shown, strict=True)]
        if answer["done"] or episode.spoken >= self._limits.max_turns:
            episode.turns += texts
            if answer["done"]:
                episode.ended, episode.closed = "done", True
            else:
                self._end(episode, "turns")
            return
        if _characters(messages) > most:  # it has no room, which takes long to find out by its tokens
            episode.turns += texts
            self._end(episode, "tokens")
            return
        last = episode.token_ids[-1] if episode.token_ids else None
        if (ids := self._rendered(episode, self._chat.suffix, messages, last)) is None:
            return
        if texts:
            texts[0] = replace(texts[0], tokens=len(ids))
        episode.turns += texts
        if self._room(episode) <= len(ids):
            self._end(episode, "tokens")
            return
        episode.token_ids += ids
        episode.logprobs += [0.0] * len(ids)
        episode.written += [False] * len(ids)
        self._ready.append(episode)

    def _rendered(self, episode: _Open, render: Callable[..., list[int]], *said: Any) -> list[int] | None:
        """Token ids of what an environment said; None, and the episode has failed, if it is what the template refuses.

        Raises CheckpointError if the template refuses everything.
        """
        try:
            return render(*said)
        except CheckpointError as error:
            self._chat.check()
            self._fail(episode, f"returned messages that cannot be shown: {error}")
            return None

    # -- how it ends

    def _end(self, episode: _Open, why: Ending) -> None:
        """A limit ends it: the environment is asked for what the episode earns."""
        episode.ended, episode.truncated = why, why == "tokens"
        self._ask(episode, "end")

    def _fail(self, episode: _Open, error: str) -> None:
        episode.call, episode.error, episode.ended, episode.closed = None, printable(error), "failed", True
        episode.reward = 0.0

    # -- what the engine samples

    def _room(self, episode: _Open) -> int:
        """Tokens that the episode may still have."""
        most = min(self._limits.max_tokens, self._limits.context - len(episode.prompt_ids))
        return most - len(episode.token_ids)

    def _request(self, episode: _Open) -> Request:
        sampling = replace(self._sampling, max_new_tokens=self._room(episode))
        stream = episode.spoken * len(self._episodes) + episode.index
        return Request(episode.index, [*episode.prompt_ids, *episode.token_ids], sampling, stream, episode.spoken)


def _characters(said: Any) -> int:
    """Those of all texts in messages: names and what else a template may write count as contents do."""
    if isinstance(said, str):
        return len(said)
    if isinstance(said, Mapping):
        return sum(map(_characters, said.values()))
    return sum(map(_characters, said)) if isinstance(said, list | tuple) else 0


def _closed(episode: _Open, end_id: int) -> Episode:
    if not episode.token_ids:  # its environment failed at once: one token without a loss stands for it
        episode.token_ids, episode.logprobs, episode.written = [end_id], [0.0], [False]
    found = {each.name: getattr(episode, each.name) for each in fields(Episode)}
    return Episode(**{**found, "turns": tuple(episode.turns), "ended": episode.ended or "failed"})
