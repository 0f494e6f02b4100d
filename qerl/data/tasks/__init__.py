"""Tasks: a dataset, the prompt that is made from a row of it, and how an answer is graded.

Training and evaluation both make prompts with `build_messages` and `render_prompt`, so a model is evaluated on the
prompts it was trained on. The accuracy reward and the evaluation both judge completions with `grade`. Rows are read by
qerl/data/examples.py, answers are compared by qerl/data/grading/grade.py.

To add a task, write a file here that defines `TASK` and enter its name in TASKS of qerl/config/names.py. Importing
this module loads neither torch nor datasets nor sympy, and a task's file is imported only when that task is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from qerl.base.errors import PROMPT_TEMPLATE, SYSTEM_PROMPT, CheckpointError, ConfigError
from qerl.config import names
from qerl.config.names import unknown_name, unknown_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import DataConfig
    from qerl.data.examples import DropReport
    from qerl.data.grading.grade import Grade

Message = dict[str, Any]  # {"role": "system" | "user", "content": text}, and what a row's own message holds besides

# The instruction in the user's message with which DeepSeek-R1 and Qwen2.5-Math were tuned and are evaluated. There is
# no system prompt, since some chat templates have no system role; those with a default one keep it.
BOXED_TEMPLATE = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."

# The system prompt that the QeRL paper trains with (arXiv 2510.11696, appendix on training; eval/gsm8k.py of its code
# at 582bd69). A recipe selects it by `data.system_prompt` and `data.prompt_template: "{question}"`; `grade` reads
# `<answer>`.
TAGS_SYSTEM_PROMPT = (
    "Solve the following math problem step by step. The reasoning process and direct answer are enclosed within "
    "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
    "<answer> answer here </answer>."
)


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
    with "math" any mathematical form that equals the answer, with "text" the same text. With `last_number`, the last
    number of a completion counts as its answer if none is marked. With `free_form`, a row may have messages in place
    of a question, and needs no answer. `grader` is the user's own function, which then grades in place of all that
    (qerl/data/grading/grade.py), in at most `grader_timeout_s` per call.
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
    last_number: bool = False
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


# The module of each task, which defines TASK. A new task needs one more row.
MODULES = {name: f"qerl.data.tasks.{name}" for name in names.TASKS}


class _Tasks(Mapping[str, Task]):
    """The registry: a read-only mapping of name to Task, which imports the file of a task when it is asked for."""

    def __getitem__(self, name: str) -> Task:
        module = MODULES[name]
        try:
            return importlib.import_module(module).TASK
        except TypeError as error:
            if "Task.__init__()" not in str(error):
                raise
            file = importlib.util.find_spec(module).origin
            needed = [part.name for part in fields(Task) if MISSING is part.default is part.default_factory]
            raise ConfigError(
                f"{file} does not define the task {name!r}: {error}; a Task is made with {', '.join(needed)} (hub=None "
                "if it makes its rows itself), and what else its class lists"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


TASKS: Mapping[str, Task] = _Tasks()


def get_task(name: str) -> Task:
    """The task of this name. If there is none, raises a ConfigError that suggests the nearest name."""
    if name in MODULES:
        return TASKS[name]
    near = difflib.get_close_matches(name.lower().replace("-", "_"), MODULES, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"there is no task {name!r}{hint} (tasks: {', '.join(MODULES)})")


def task_of(data: DataConfig) -> Task:
    """The task of a recipe, with the recipe's grader and prompt. Raises ConfigError for a name that is not known."""
    task = with_grader(get_task(data.task), data.grader)
    keys = {key: value for key in ("system_prompt", "prompt_template") if (value := getattr(data, key)) != "default"}
    return replace(task, **keys)


def examples_of(data: DataConfig, episodes: bool = False) -> list[Example]:
    """The usable rows of one source of a recipe, those that are held out included."""
    task = for_episodes(task_of(data)) if episodes else task_of(data)
    return load_examples(task, data.source, data.split, data.columns, data.limit, data.keep_unreadable)[0]


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
    task = get_task(task) if isinstance(task, str) else task
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


def load_examples(
    task: Task | str,
    source: str | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    keep_unreadable: bool = False,
) -> tuple[list[Example], DropReport]:
    """The usable rows of the task's own dataset, or of `source`: a hub id (`owner/name:subset`), a file or a folder.

    See qerl.data.examples.load_examples, which this calls.
    """
    from qerl.data.examples import load_examples as load

    task = get_task(task) if isinstance(task, str) else task
    return load(task, source, split, columns, limit, keep_unreadable)


def grade(task: Task | str, completion: str, answer: str, question: str | None = None) -> Grade:
    """Judge one completion against the answer; see qerl.data.grading.grade.grade, which this calls."""
    from qerl.data.grading.grade import grade as judge

    return judge(get_task(task) if isinstance(task, str) else task, completion, answer, question)


def grade_many(
    task: Task | str,
    completions: Sequence[str],
    answers: Sequence[str],
    questions: Sequence[str | None] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> list[Grade]:
    """Judge many completions at once; see qerl.data.grading.grade.grade_many, which this calls."""
    from qerl.data.grading.grade import grade_many as judge

    return judge(get_task(task) if isinstance(task, str) else task, completions, answers, questions, columns)
