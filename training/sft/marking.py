"""A conversation as token ids, and which of them the assistant wrote: those are learned.

A template that has {% generation %} says so itself. Of any other the assistant's part is found by difference: what the
template writes of the messages up to an answer, less what it writes as the prompt for it. Both have to be beginnings of
the whole text. Some templates write an earlier answer otherwise once more messages follow (Qwen3 drops its thoughts).
Such a conversation becomes a row for each answer, whose earlier messages are written as they would be when the model
is asked. What a template writes after the token that ends an answer is not learned, as no model writes it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl.base.errors import CheckpointError
from qerl.base.sandbox import SandboxError, encode_with_places, named, render_marked, render_text
from qerl.data.conversations import Conversation
from qerl.data.messages import Written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]  # of characters
REFUSES = "the template refuses it"


class Marked(NamedTuple):
    """A row: token ids, and 1 for those that are learned.

    `unended` has the last token of each learned answer that holds none which ends a completion.
    """

    ids: list[int]
    learned: list[int]
    unended: tuple[int, ...] = ()


class UnmarkableError(Exception):
    """Why the assistant's tokens of a conversation cannot be told from the others."""


class Marker:
    """The chat template of one model."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], switches: Mapping[str, Any] | None = None
    ) -> None:
        """`end_ids` end an answer; `switches` are variables of the template.

        Raises CheckpointError for a template that cannot mark a single answer.
        """
        self._tokenizer, self._end_ids, self._switches = tokenizer, frozenset(end_ids), switches
        self.ends = [token for token in end_ids if token is not None]
        self._written = Written(tokenizer, switches)
        name = tokenizer.name_or_path
        if not getattr(tokenizer, "chat_template", None):
            raise CheckpointError(
                f"the tokenizer of {name!r} has no chat template, so conversations cannot be written as the model "
                "expects them: use the instruct version of the checkpoint, or put a chat_template.jinja beside its "
                "tokenizer_config.json"
            )
        if not tokenizer.is_fast:
            raise CheckpointError(
                f"the tokenizer of {name!r} does not say which characters a token has: use a checkpoint with a "
                "tokenizer.json"
            )
        self._by_template = GENERATION.search(tokenizer.get_chat_template()) is not None
        dummy = ({"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"})
        try:
            self.rows(Conversation("dummy", dummy))
        except UnmarkableError as error:
            raise CheckpointError(
                f"the chat template of {name!r} does not show which tokens are the assistant's ({error}): put "
                "{% generation %} and {% endgeneration %} around what the assistant writes in its chat_template.jinja"
            ) from error

    def rows(self, conversation: Conversation) -> list[Marked]:
        """The conversation as a row, or as one for each answer. Raises UnmarkableError."""
        try:
            if self._by_template:
                return [self._by_generation(conversation)]
            whole = self._text(conversation, len(conversation.messages), prompt=False)
            answers = conversation.answers
            spans = [self._span(conversation, answer, whole) for answer in answers]
            if None not in spans:
                return [self._marked(whole, spans, conversation, answers)]
            return [self._single(conversation, answer) for answer in answers]
        except SandboxError as error:
            raise UnmarkableError(f"{REFUSES}: {error}") from error

    def quoted(self, conversation: Conversation) -> set[str]:
        """The special tokens that are text in a conversation."""
        return named(self._tokenizer, [conversation.messages, conversation.tools], self._switches)

    def unended_text(self, unended: Mapping[int, int]) -> str:
        """What to do about answers that hold no token which ends a completion, counted by the token at their end."""
        (token, _), count = max(unended.items(), key=lambda pair: pair[1]), sum(unended.values())
        said, names = (self._tokenizer.convert_ids_to_tokens(ids) for ids in (token, self.ends))
        text = (
            f"{count} learned answers hold no token that ends a completion ({', '.join(names)}), so that the trained "
        )
        text += "model would not stop: "
        if token in self._end_ids:
            return f"{text}the chat template writes {said!r} after {{% endgeneration %}}: move it before that"
        if token not in self._added:
            return f"{text}the chat template ends them with {said!r}: let chat_template.jinja write {names[0]} there"
        return (
            f"{text}the chat template ends them with {said!r}: make it one, with "
            f'"eos_token_id": {[*self.ends, token]} in the generation_config.json of the base'
        )

    @cached_property
    def _added(self) -> set[int]:
        """The tokens that were added to the vocabulary, as those are that templates write."""
        return {*self._tokenizer.added_tokens_decoder, *self._tokenizer.all_special_ids}

    def _by_generation(self, conversation: Conversation) -> Marked:
        text, spans = render_marked(self._tokenizer, conversation.messages, conversation.tools, self._switches)
        spoken = [each["role"] == "assistant" for each in conversation.messages]
        if len(conversation.answers) < sum(spoken):
            if len(spans) != sum(spoken):
                raise UnmarkableError(f"the template marks {len(spans)} of {sum(spoken)} answers")
            spans = [spans[sum(spoken[:answer])] for answer in conversation.answers]
        return self._marked(text, spans, conversation, conversation.answers)

    def _span(self, conversation: Conversation, answer: int, whole: str) -> Span | None:
        """The characters of message `answer` in the whole text; None if the template wrote it otherwise alone."""
        prompt = self._text(conversation, answer, prompt=True)
        up_to = whole if answer + 1 == len(conversation.messages) else self._text(conversation, answer + 1, False)
        if not up_to.startswith(prompt) or not whole.startswith(up_to):
            return None
        return len(prompt), len(up_to)

    def _single(self, conversation: Conversation, answer: int) -> Marked:
        """A row that ends with message `answer` and learns it alone."""
        prompt, whole = self._text(conversation, answer, prompt=True), self._text(conversation, answer + 1, False)
        if not whole.startswith(prompt):
            raise UnmarkableError("what it writes as the prompt for an answer is not how it begins with the answer")
        begun = replace(conversation, messages=conversation.messages[: answer + 1])
        return self._marked(whole, [(len(prompt), len(whole))], begun, [answer])

    def _text(self, conversation: Conversation, count: int, prompt: bool) -> str:
        """The first `count` messages; with what asks for an answer if they are a `prompt`."""
        messages = conversation.messages[:count]
        return render_text(self._tokenizer, messages, prompt, conversation.tools, self._switches)

    def _marked(self, text: str, spans: Sequence[Span], conversation: Conversation, answers: Sequence[int]) -> Marked:
        """A conversation's text as a row. Raises UnmarkableError also if a message or tool is not in the text."""
        ids, places = self._encoded(text.encode(errors="replace").decode(), spans)
        learned, unended = [0] * len(ids), []
        for start, end in spans:
            inside = [i for i, place in enumerate(places) if _within(place, start, end)]
            ends = [i for i in inside if ids[i] in self._end_ids]
            for i in inside:
                learned[i] = int(self._by_template or not ends or i <= ends[-1])
            if inside and not ends:
                unended.append(self._closing(ids, inside))
        if not any(learned):
            raise UnmarkableError("no token of the assistant is left of it")
        if (reason := self._written.missing(text, conversation.messages, conversation.tools, answers)) is not None:
            raise UnmarkableError(reason)
        return Marked(ids, learned, tuple(unended))

    def _encoded(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
        """Token ids, and the characters of each. No token lies across the beginning or the end of an answer.

        A tokenizer joins a space at the end of a prompt to the answer's first word. The model is asked with the prompt
        alone, so that it never sees that token: the text is then cut there, and its parts are encoded apart.
        """
        ids, places = encode_with_places(self._tokenizer, text)
        cuts = sorted(
            {at for span in spans for at in span if 0 < at < len(text) and self._joined(text, at, ids, places)}
        )
        if not cuts:
            return ids, places
        parts_ids, parts_places = [], []
        for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True):
            part, found = encode_with_places(self._tokenizer, text[first:last])
            parts_ids += part
            parts_places += [(first + start, first + end) for start, end in found]
        if self._tokenizer.decode(parts_ids) != self._tokenizer.decode(ids):
            raise UnmarkableError(
                "the tokenizer joins the prompt's end to the answer: remove the space at the end of the template's "
                "prompt from chat_template.jinja"
            )
        return parts_ids, parts_places

    def _joined(self, text: str, at: int, ids: Sequence[int], places: Sequence[Span]) -> bool:
        """Whether a token lies across a place of the text. Some tokenizers leave white space out of a token's place."""
        if any(first < at < last for first, last in places):
            return True
        before, after = text[at - 1], text[at]
        if not before.isspace() or (before == "\n" and not after.isspace()):
            return False
        alone = encode_with_places(self._tokenizer, text[:at])[0]
        return list(ids[: len(alone)]) != alone

    def _closing(self, ids: Sequence[int], inside: Sequence[int]) -> int:
        """The token that the template ends an answer with: one that was added to the vocabulary, else the last."""
        after = range(inside[-1] + 1, len(ids))
        return next((ids[i] for i in [*reversed(inside), *after] if ids[i] in self._added), ids[inside[-1]])


def _within(place: Span, start: int, end: int) -> bool:
    """Whether a token lies within an answer. Tokenizers that leave white space out of a token's place give one of white
    space alone the empty place at its end."""
    first, last = place
    return start <= first and last <= end and (first < last or first > start)
