"""Tasks: a dataset, the prompt that is made from a row of it, and how an answer is graded.

Training and evaluation both make prompts with `build_messages` and `render_prompt`, so a model is evaluated on the
prompts it was trained on. The accuracy reward and the evaluation both judge completions with `grade`. Rows are read by
qerl/data/examples.py, answers are compared by qerl/data/grading/grade.py.

To add a task, add it to TASKS below and its name to TASKS of qerl/config/names.py. Importing this module loads neither
torch nor datasets nor sympy.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from qerl.base.errors import PROMPT_TEMPLATE, SYSTEM_PROMPT, CheckpointError, ConfigError
from qerl.config.names import unknown_name, unknown_text
from qerl.data.tasks import arith

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import DataConfig

Message = dict[str, Any]  # {"role": "system" | "user", "content": text}, and what a row's own message holds besides

# The instruction in the user's message with which DeepSeek-R1 and Qwen2.5-Math were tuned and are evaluated. There is
# no system prompt, since some chat templates have no system role; those with a default one keep it.
BOXED_TEMPLATE = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Task:
    """A dataset with its prompt and the kind of its answers.

    `hub` is the id of the dataset on the hub and `hub_config` its subset. A task without `hub` makes its rows itself:
    `generate(split)` yields all of them, as mappings with "question", "answer" and possibly "id"; `solved(split)` the
    same rows with a worked solution as their answer, for `qerl sft`. `splits` maps our "train" and "test" to the
    split names of the hub (or to themselves); a split that is not listed does not exist. `columns` names the columns
    of question and answer. It may name several if copies of the data differ, of which the first that exists is used;
    dots and numbers reach into nested columns ("prompt.0.content"). `clean_question` removes what the hub adds to a
    question, and leaves a bare question as it is. With `answer_kind` "number" a completion has to state a number,
    with "math" any mathematical form that equals the answer, with "text" the same text. With `free_form`, a row may
    have messages in place of a question, and needs no answer. `grader` is the user's own function, which then grades in
    place of all that (qerl/data/grading/grade.py), in at most `grader_timeout_s` per call.
    """

    name: str
    hub: str | None
    splits: Mapping[str, str]
    answer_kind: Literal["number", "math", "text"]
    columns: Mapping[str, str | tuple[str, ...]] = field(
        default_factory=lambda: {"question": "question", "answer": "answer"}
    )
    hub_config: str | None = None
    generate: Callable[[str], Iterable[Mapping[str, Any]]] | None = None
    solved: Callable[[str], Iterable[Mapping[str, Any]]] | None = None
    clean_question: Callable[[str], str] | None = None
    system_prompt: str | None = None
    prompt_template: str = BOXED_TEMPLATE
    free_form: bool = False
    may_repeat: bool = False  # rows may ask the same, since an environment tells them apart
    grader: str | None = None
    grader_timeout_s: float = 300.0

    @property
    def place(self) -> str | None:
        """The id on the hub with the subset, as `data.source` takes it; None for a task that makes its rows itself."""
        return f"{self.hub}:{self.hub_config}" if self.hub_config else self.hub


@dataclass(frozen=True)
class Example:
    """One usable row. `id` is the row's own id, or its number counted from 1; `extra` holds the other columns.

    A row of messages has the last message of the user as its question, those before it in `earlier`, and what the last
    one holds besides (a name) in `beside`. `tools` are schemas that the row brings for its chat template.
    `conversational` says whether the row has messages, as TRL calls it.
    """

    question: str
    answer: str
    id: str
    extra: dict[str, Any] = field(default_factory=dict)
    earlier: tuple[Message, ...] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    conversational: bool = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The row's messages up to the question."""
        return [*map(dict, self.earlier), {"role": "user", "content": self.question, **self.beside}]


# What DAPO's file on the hub puts around each problem.
DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_SUFFIX = 'Remember to put your answer on its own line after "Answer:".'


def _dapo_question(question: str) -> str:
    return question.strip().removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX).strip()


ASKS = "environment_asks"  # a column: qerl/episodes/episodes.py takes the environment's text for the question
EPISODES = {"train": 1024, "test": 256}


def _episodes(split: str) -> Iterator[dict[str, Any]]:
    """Rows for an environment that brings its own task, which differ in their number alone: `reset` is the prompt."""
    for index in range(EPISODES[split]):
        yield {"id": f"environment-{split}-{index}", "question": f"Episode {index} of {split}.", ASKS: True}


def _word_game(split: str) -> Iterator[dict[str, Any]]:
    from qerl.data.tasks import word_game

    return word_game.rows(split)


BOTH = {"train": "train", "test": "test"}  # splits of a task that makes its rows, or reads the user's
PROBLEM = {"question": "problem", "answer": "answer"}
# Big-Math as open-r1 has filtered it: competition and school problems whose answers are checked forms. The rows that
# QeRL trains 7B models on are levels 3 to 5, those for 32B models levels 4 and 5. That copy calls the columns `prompt`
# and `solution`, and a larger one `problem` and `answer`.
BIGMATH = Task(
    "bigmath",
    "open-r1/Big-Math-RL-Verified-Processed",
    {"train": "train"},
    "math",
    {"question": ("problem", "prompt"), "answer": ("answer", "solution")},
    hub_config="level_3_4_5",
)
TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        # Grade-school word problems (arXiv 2110.14168). The last line of the hub's worked solution is `#### N`.
        Task("gsm8k", "openai/gsm8k", BOTH, "number", hub_config="main"),
        # Competition problems whose answers are integers (arXiv 2503.14476), each about 100 times in the hub's file.
        # In open-r1's copy without repetitions (`data.source: open-r1/DAPO-Math-17k-Processed:en`), which QeRL's code
        # reads, `prompt` is the message itself.
        Task(
            "dapo_math",
            "BytedTsinghua-SIA/DAPO-Math-17k",
            {"train": "train"},
            "number",
            {"question": ("prompt.0.content", "prompt"), "answer": "reward_model.ground_truth"},
            clean_question=_dapo_question,
        ),
        BIGMATH,
        replace(BIGMATH, name="bigmath_hard", hub_config="level_4_5"),
        # 40 problems of AMC 12A and 12B, reworded so that the answer is a number instead of a letter.
        Task("amc23", "math-ai/amc23", {"test": "test"}, "math"),
        # 30 problems each, whose answers are integers from 0 to 999.
        Task("aime24", "HuggingFaceH4/aime_2024", {"test": "train"}, "math", PROBLEM),
        Task("aime25", "math-ai/aime25", {"test": "test"}, "math", PROBLEM),
        # 500 problems of the MATH test set (arXiv 2103.03874, 2305.20050).
        Task("math500", "HuggingFaceH4/MATH-500", {"test": "test"}, "math", PROBLEM),
        # The embedded model needs no instruction: it ends in "#### N" by itself.
        Task("arith", None, BOTH, "number", generate=arith.rows, solved=arith.solved, prompt_template="{question}"),
        Task("word_game", None, BOTH, "text", generate=_word_game, prompt_template="{question}"),
        Task("environment", None, BOTH, "text", generate=_episodes, prompt_template="{question}", free_form=True),
        # The user's rows: a prompt or messages, and perhaps an answer. Nothing is added unless it is asked for.
        Task(
            "own",
            None,
            BOTH,
            "text",
            {"question": ("prompt", "messages", "question", "conversations", "instruction"), "answer": "answer"},
            prompt_template="{question}",
            free_form=True,
        ),
    )
}


def get_task(name: str | Task) -> Task:
    """The task of this name, or the task itself. Raises ConfigError, with the nearest name, if there is none."""
    if isinstance(name, Task):
        return name
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(name.lower().replace("-", "_"), TASKS, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"there is no task {name!r}{hint} (tasks: {', '.join(TASKS)})")


def task_of(data: DataConfig) -> Task:
    """The task of a recipe, with the recipe's grader and prompt. Raises ConfigError for a name that is not known."""
    task = with_grader(get_task(data.task), data.grader)
    keys = {key: value for key in ("system_prompt", "prompt_template") if (value := getattr(data, key)) != "default"}
    return replace(task, **keys)


def for_episodes(task: Task) -> Task:
    """The task whose rows are for an environment, for which those of a free-form task may all ask the same."""
    return replace(task, may_repeat=task.free_form)


def with_grader(task: Task, grader: str | None, timeout_s: float = Task.grader_timeout_s) -> Task:
    """The task, graded by the user's own function; None leaves it as it is."""
    return task if grader is None else replace(task, grader=grader, grader_timeout_s=timeout_s)


def messages_of(
    task: Task | str, example: Example, system_prompt: str | None = "default", prompt_template: str = "default"
) -> list[Message]:
    """The chat messages of an example. The example's own system message comes before any other."""
    messages = build_messages(task, example.question, system_prompt, prompt_template)
    if any(message["role"] == "system" for message in example.earlier):
        messages = messages[-1:]
    return [*messages[:-1], *example.earlier, {**messages[-1], **example.beside}]


def build_messages(
    task: Task | str, question: str, system_prompt: str | None = "default", prompt_template: str = "default"
) -> list[Message]:
    """The chat messages that ask `question`.

    "default" stands for the task's own prompt and template; a system prompt of None or "" means no system message. Only
    `{question}` is replaced in the template, and braces without a name (`\\boxed{}`) are left as they are. Raises
    ConfigError if the template has no `{question}`, or another name in braces.
    """
    task = get_task(task)
    system = task.system_prompt if system_prompt == "default" else system_prompt
    template = task.prompt_template if prompt_template == "default" else prompt_template
    if "{question}" not in template:
        raise ConfigError(
            f"data.prompt_template is {template!r}, which does not contain {{question}}: no prompt would hold its "
            'problem. Write for example "{question}\\n\\nPut your final answer within \\\\boxed{}."'
        )
    if (name := unknown_name(template)) is not None:
        raise ConfigError(f"data.prompt_template is {template!r}: {unknown_text(name)}")
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": template.replace("{question}", question)}]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    switches: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Token ids of the messages in the checkpoint's own chat template, up to where the completion begins.

    `switches` are variables that the template reads, such as enable_thinking, and `tools` schemas that it is shown.

    Raises CheckpointError if the tokenizer has no chat template, or if its template refuses these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise CheckpointError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so prompts cannot be written as the "
            "model expects them: use the instruct version of the checkpoint, or put a chat_template.jinja beside its "
            "tokenizer_config.json"
        )
    from qerl.base.sandbox import SandboxError, render_chat

    try:
        return render_chat(tokenizer, messages, True, switches, tools)
    except SandboxError as error:
        roles = [message["role"] for message in messages]
        raise CheckpointError(
            'the chat template of %r refuses messages with the roles %s: %s; if it has no system role, set %s to "" '
            "and put the instruction into %s",
            *(tokenizer.name_or_path, roles, error, SYSTEM_PROMPT, PROMPT_TEMPLATE),
        ) from error
