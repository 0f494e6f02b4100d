"""`qerl chat`: talk to a model, with or without an adapter, on the engine that training and evaluation use.

Each line of stdin is a message, on a terminal and in a pipe, and only answers go to stdout. The conversation is kept
until `/reset`. When it no longer fits the context its oldest exchange is forgotten, and a log line says so. Nothing
here imports torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from qerl.base.devices import choose_card
from qerl.base.errors import MAX_PROMPT_TOKENS, PROMPT_TEMPLATE, SYSTEM_PROMPT, ConfigError, EngineError
from qerl.base.printable import printable
from qerl.checkpoint.folder import run_named
from qerl.checkpoint.load import check_chat_template, check_switches, load_tokenizer, local_folder, text_of_engine
from qerl.checkpoint.resolve import describe, resolve_model, run_of, switches_for
from qerl.checkpoint.shards import read_config
from qerl.cli.options import ENGINE_OPTIONS, Gpu, options_named
from qerl.data.option_text import Text, parse_switches
from qerl.data.tasks import render_prompt
from qerl.engine.interface import Completion, Engine, SamplingParams
from qerl.engine.open import open_model, with_chosen_engine
from qerl.engine.options import EngineOptions
from qerl.plan.sizes import sizes_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


RESET, EXIT = "/reset", "/exit"
OPTIONS = {  # what errors name here in place of keys of a recipe
    **ENGINE_OPTIONS,
    MAX_PROMPT_TOKENS: "the length of the message",
    SYSTEM_PROMPT: "--system-prompt",
    PROMPT_TEMPLATE: "the message",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """An open model, and what renders its prompts."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    context: int  # tokens of prompt and answer together
    switches: Mapping[str, object] = field(default_factory=dict)  # variables of the chat template

    def rendered(
        self, messages: Sequence[Mapping[str, str]], max_new_tokens: int, switches: Mapping[str, object] | None = None
    ) -> list[int]:
        """Token ids of the messages; `switches` are used in place of the model's own.

        Raises EngineError if the context has no room for them and their answer.
        """
        prompt = render_prompt(self.tokenizer, messages, self.switches if switches is None else switches)
        if (room := max(self.context - max_new_tokens, 0)) < len(prompt):
            raise EngineError(
                f"the prompt has {len(prompt)} tokens, and the context of {self.context} has room for {room} beside "
                f"the {max_new_tokens} of max_new_tokens: shorten it, lower max_new_tokens, or open a longer context"
            )
        return prompt

    def text(self, completion: Completion) -> str:
        """The completion without the tokens that end it."""
        return text_of_engine(self.tokenizer, self.engine)(completion.token_ids)


@dataclass
class Conversation:
    """Messages so far, and the model that answers them."""

    model: Opened
    sampling: SamplingParams
    system_prompt: str | None = None
    seed: int = 0
    turns: list[tuple[str, str]] = field(default_factory=list)  # (question, answer)
    answered: int = 0

    def ask(self, question: str) -> str:
        """The model's answer, which joins the conversation. Raises EngineError for a message that is too long."""
        prompt = self._fitting_prompt(question)
        (completion,) = self.model.engine.generate([prompt], self.sampling, seed=self.seed + self.answered)
        answer = self.model.text(completion)
        self.turns.append((question, answer))
        self.answered += 1
        if completion.finish_reason == "length":
            logger.info("(cut off after %d tokens: --max-new-tokens)", self.sampling.max_new_tokens)
        return answer

    def _fitting_prompt(self, question: str) -> list[int]:
        while True:
            messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
            for asked, answer in self.turns:
                messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            messages.append({"role": "user", "content": question})
            try:
                return self.model.rendered(messages, self.sampling.max_new_tokens)
            except EngineError:
                if not self.turns:
                    raise
            self.turns.pop(0)
            logger.info("(the context is full: the oldest exchange is forgotten)")


def chat(options: ChatOptions) -> None:
    """Answer the lines of stdin until it ends or a line says /exit.

    Raises QerlError for what cannot work, before the weights are loaded.
    """
    sampling = SamplingParams(options.max_new_tokens, options.temperature, options.top_p)
    asked = EngineOptions(engine=options.engine, kernel=options.kernel, memory=options.memory, cap_gib=options.cap_gib)
    context = max(4096, 2 * sampling.max_new_tokens)
    opened = open_chat(options.model, options.adapter, asked, context, options)
    try:
        talk(Conversation(opened, sampling, options.system_prompt, options.seed), sys.stdin, sys.stdout)
    finally:
        opened.engine.close()


def open_chat(
    model: str, adapter: str | None, asked: EngineOptions, context: int, chat: ChatOptions | None = None
) -> Opened:
    """Open a model for prompts and answers of `context` tokens, or of as many as it has positions.

    Raises QerlError for what cannot work, and for what `chat` cannot, before the weights are loaded.
    """
    ref = resolve_model(model, adapter=adapter)
    check_chat_template(ref)
    engine_options = with_chosen_engine(asked)
    tokenizer = load_tokenizer(ref.base)
    longest = sizes_of(read_config(local_folder(ref.base)), ref.base).positions or 2**31
    if chat is not None and chat.max_new_tokens >= longest:
        raise ConfigError(
            f"--max-new-tokens {chat.max_new_tokens} leaves no room in the context of {longest}: write fewer, such as "
            f"{longest // 2}"
        )
    system_prompt = None if chat is None else chat.system_prompt
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    switches = switches_for(run_of(ref), None if chat is None else chat.chat_template_kwargs)
    check_switches(tokenizer, switches, "--chat-template-kwargs")
    render_prompt(tokenizer, [*system, {"role": "user", "content": ""}], switches)  # refuses before weights are loaded
    logger.info("%s", describe(ref))
    context = min(longest, context)
    return Opened(open_model(ref, replace(engine_options, max_context=context)), tokenizer, context, switches)


def talk(conversation: Conversation, questions: TextIO, answers: TextIO) -> None:
    """Write one answer for each line of `questions`."""
    if questions.isatty():
        logger.info("%s forgets the conversation, %s or Ctrl-D ends it", RESET, EXIT)
    for line in _lines(questions):
        if line == EXIT:
            return
        if line == RESET:
            conversation.turns.clear()
            continue
        try:
            answer = conversation.ask(line)
        except EngineError as error:
            if not questions.isatty():
                raise
            error.options = OPTIONS
            logger.info("error: %s", error)
            continue
        answers.write(printable(answer) + "\n")
        answers.flush()


def _lines(questions: TextIO) -> Iterator[str]:
    """The lines that are not empty. On a terminal `input` reads them, with line editing and a prompt."""
    if not questions.isatty():
        yield from filter(None, (line.strip() for line in questions))
        return
    import readline  # noqa: F401  (importing it is what gives `input` its history)

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line:
            yield line


@dataclass(frozen=True)
class ChatOptions:
    """What is asked of `qerl chat`, whose options these are."""

    model: Annotated[
        str, Text(run_named), typer.Option(help="Base, merged model, NVFP4 folder, adapter, run, hub id, or `tiny`.")
    ]
    adapter: Annotated[
        str | None, Text(run_named), typer.Option(help="Adapter folder or run to apply to the model.")
    ] = None
    system_prompt: Annotated[str | None, typer.Option(help="System message; default: none.")] = None
    chat_template_kwargs: Annotated[
        Mapping[str, object] | None,
        Text(parse_switches),
        typer.Option(help="Variables of the chat template: enable_thinking=false. Default: those that trained."),
    ] = None
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.7
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1 is off.")] = 0.95
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 512
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0
    engine: Annotated[str, typer.Option(help="auto (vllm on a GPU), transformers or vllm.")] = "auto"
    kernel: Annotated[str, typer.Option(help="NVFP4 kernel of vllm: auto, qerl, humming or marlin.")] = "auto"
    memory: Annotated[
        float | None,
        typer.Option(min=0, help="GPU budget of vllm: GiB, or up to 1 a share of the card. Default: what is left."),
    ] = None
    cap_gib: Annotated[
        float | None, typer.Option(min=0, help="The process takes no more GPU memory than this (vllm). Default: all.")
    ] = None
    gpu: Gpu = None


def chat_command(options: ChatOptions) -> None:
    """Talk to a model on the engine that trains and evaluates; lines of a pipe are messages too."""
    from qerl.plan.threads import choose_threads

    choose_card(gpu=options.gpu)
    choose_threads(options.model)
    with options_named(OPTIONS):
        chat(options)
